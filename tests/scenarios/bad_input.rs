//! Wrong input: what is said about it, word by word, that nothing is lost by it, and that the right
//! input runs afterwards.
//!
//! Expected messages stand here in full, since they are what a person has to go on; only where
//! PostgreSQL words them, or a list would grow, `…` stands for any text. `PUBLISHER`, `SUBSCRIBER`,
//! `DIRECTORY`, `LSN`, `PID` and `SYSTEM` stand for what differs from run to run.
//! `FARSHORE_SHOW_MESSAGES=1` prints what was said instead of comparing it.

#[path = "bad_input/case.rs"]
mod case;
#[path = "bad_input/config.rs"]
mod config;
#[path = "bad_input/damage.rs"]
mod damage;
#[path = "bad_input/names.rs"]
mod names;
#[path = "bad_input/running.rs"]
mod running;
#[path = "bad_input/schemas.rs"]
mod schemas;
#[path = "bad_input/servers.rs"]
mod servers;
#[path = "bad_input/starting.rs"]
mod starting;
#[path = "bad_input/usage.rs"]
mod usage;
#[path = "bad_input/warnings.rs"]
mod warnings;
