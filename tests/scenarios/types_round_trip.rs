//! Values of every type and tables of every shape arrive as they were, from 15 to 18 and from 18 to
//! 15, through the initial copy and through the stream: PostgreSQL itself compares.
//!
//! - `FARSHORE_SEED`: replays the choices of a run; each run prints its seed.
//! - `FARSHORE_ROUNDS`: how often each random test is done, with seeds that follow each other
//!   (default 1).

#[path = "types_round_trip/encodings.rs"]
mod encodings;
#[path = "types_round_trip/kinds.rs"]
mod kinds;
#[path = "types_round_trip/losses.rs"]
mod losses;
#[path = "types_round_trip/shapes.rs"]
mod shapes;
#[path = "types_round_trip/values.rs"]
mod values;
