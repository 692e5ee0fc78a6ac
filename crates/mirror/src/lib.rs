//! Mirrors.
pub mod history;
pub mod wal;
