//! Measuring the line between two sites, over a session of its own.
//!
//! ```text
//! protocol   what both sides say
//! ask        the side that wants to know
//! serve      the side that is asked: the running node, within bounds
//! allowance  how much one site may measure
//! flow       how fast bytes arrive
//! sample     what stands for a log
//! host       what a machine tells of itself
//! ```

mod allowance;
pub mod ask;
mod flow;
mod host;
mod protocol;
mod sample;
pub(super) mod serve;

pub use flow::Flow;
pub use host::{Host, Segments};
