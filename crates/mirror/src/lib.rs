//! Mirrors.
pub mod history;
pub mod spool;
pub mod wal;

#[cfg(test)]
#[path = "../tests/synthetic/mod.rs"]
mod synthetic;
