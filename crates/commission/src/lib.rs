//! What a disk, a transaction log and a line can take, measured before anything depends on them.
//!
//! - [`disk`]: durable writes into a folder, no database needed;
//! - [`log`]: the write-ahead log of a live PostgreSQL;
//! - [`commit`]: what each level of `synchronous_commit` costs there;
//! - [`link`]: the line between two sites;
//! - [`report`]: what every measurement gives, to be kept as JSON;
//! - [`render`]: a report for the terminal, or as one HTML file;
//! - [`compare`]: two reports side by side, and what changed beyond the noise.
//!
//! Every figure is taken several times, in rounds: first all of them once, then all of them again.
//! What drifts while a measurement runs is thereby part of the spread that is shown.

pub mod commit;
pub mod compare;
pub mod disk;
mod error;
mod latency;
pub mod link;
pub mod log;
mod machine;
pub mod render;
pub mod report;
pub mod room;
mod statistics;
mod stop;
pub mod units;

pub use error::Error;
pub use stop::{Stop, StopHandle};

/// Told what is going on, in a line each time: `round 1 of 3: 4 KiB, 16 outstanding`.
pub type Progress<'a> = &'a (dyn Fn(&str) + Send + Sync);
