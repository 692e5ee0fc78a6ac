//! Codecs for what travels between Farshore and PostgreSQL. Pure and total: no IO, and every input
//! gives a value or a typed error; an unknown tag is an error, never skipped.
//!
//! One file per layer, named as PostgreSQL's documentation names it.

pub mod backend;
pub mod base_backup;
pub mod copy_binary;
pub mod frontend;
pub mod pgoutput;
pub mod readable;
pub mod replication;
pub mod replication_command;
pub mod server;
