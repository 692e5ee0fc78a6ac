//! What a case puts on the publisher.

mod foreign_keys;
mod hot_row;
mod identity_full;
mod incompressible;
mod mix_59;
mod rows_1k;
mod single_row;
mod steps;
mod toast;
mod tx_5m;
mod wide_100;

pub use foreign_keys::ForeignKeys;
pub use hot_row::HotRow;
pub use identity_full::IdentityFull;
pub use incompressible::Incompressible;
pub use mix_59::Mix59;
pub use rows_1k::Rows1k;
pub use single_row::{Insert1, Update1};
pub use steps::Steps;
pub use toast::Toast;
pub use tx_5m::Tx5m;
pub use wide_100::Wide100;

use crate::text::Prose;
use anyhow::Result;
use farshore_testkit::interrupt::Interrupt;
use postgres::Client;

/// Replicated tables are in this schema, and nothing else is.
pub const SCHEMA: &str = "bench";
/// What loads are made from is in this one, which nobody replicates; its tables are unlogged.
pub const STAGING: &str = "staging";
/// The table whose row is the last transaction of every backlog.
pub const MARKER: &str = "bench.marker";

/// How much a backlog is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Rows inserted, updated or deleted.
    pub commands: u64,
    /// Transactions.
    pub transactions: u64,
    /// Tables they are spread over.
    pub tables: u64,
}

/// A case's tables.
pub trait Tables {
    /// DDL of the replicated tables, the same on both sides.
    fn schema(&self) -> String;

    /// Whether Farshore writes as a role that may not keep foreign keys from being checked.
    fn checks_foreign_keys(&self) -> bool {
        false
    }

    /// Fills tables with what is there before replication begins, and makes what the load needs.
    ///
    /// # Errors
    /// The server's, or an interrupt.
    fn preload(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()>;
}

/// A case's tables and a load that waits to be replicated.
pub trait Backlog: Tables {
    /// How much it is.
    fn work(&self) -> Work;

    /// Commits the backlog's transactions.
    ///
    /// # Errors
    /// The server's, or an interrupt.
    fn build(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()>;
}

/// `full` work at a scale of 1, in whole units of `unit`, and at least one of them.
pub fn scaled(full: u64, scale: f64, unit: u64) -> u64 {
    let units = (full as f64 * scale / unit as f64).round() as u64;
    units.max(1) * unit
}

#[cfg(test)]
mod tests {
    use super::scaled;

    #[test]
    fn work_scales_in_whole_transactions() {
        assert_eq!(scaled(1_000_000, 1.0, 100), 1_000_000);
        assert_eq!(scaled(1_000_000, 0.00014, 100), 100);
        assert_eq!(scaled(400_000, 1e-9, 50), 50);
    }
}
