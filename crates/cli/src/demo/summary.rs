//! What the demo came to.

use super::heartbeat::quantile;
use super::screen::{grouped, megabytes, milliseconds};
use super::watch::{Copied, Totals};
use serde::Serialize;
use std::time::Duration;

/// The report, for people and programs.
#[derive(Default, Serialize)]
pub struct Summary {
    /// Tables compared.
    pub tables: usize,
    /// Tables that are equal on both sides.
    pub tables_equal: usize,
    /// Rows of the initial copy.
    pub rows_copied: u64,
    /// Seconds that it took.
    pub copy_seconds: f64,
    /// Bytes that it moved.
    pub copy_bytes: u64,
    /// Transactions that pgbench committed.
    pub pgbench_transactions: u64,
    /// Transactions that the mixed load committed.
    pub mixed_transactions: u64,
    /// Transactions of one row each by which the lag is measured.
    pub heartbeats: u64,
    /// Changes of the one large transaction.
    pub large_transaction_changes: u64,
    /// Source transactions applied from the stream, as the node counts them.
    pub streamed_transactions: u64,
    /// Row changes of those.
    pub streamed_changes: u64,
    /// Target transactions they went into.
    pub target_commits: u64,
    /// Heartbeats that the lag is measured by.
    pub lag_samples: usize,
    /// COMMIT returned on the publisher to row visible on the subscriber.
    pub lag: Option<Lag>,
    /// Bytes of replication messages from the publisher, initial copy not included.
    pub wire_bytes: u64,
    /// Bytes of the store on disk at the end.
    pub store_bytes: u64,
    /// Bytes that went into the store, before compression.
    pub store_payload_bytes: u64,
    /// Bytes they took.
    pub store_stored_bytes: u64,
    /// From SIGKILL until the subscriber showed a row younger than a second.
    pub recovery_seconds: f64,
    /// From the end of the load until all of it was visible.
    pub caught_up_seconds: f64,
}

/// Lags in milliseconds.
#[derive(Serialize)]
pub struct Lag {
    /// Median.
    pub p50_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// Largest.
    pub max_ms: f64,
}

impl Lag {
    fn of(sorted: &[Duration]) -> Option<Lag> {
        let ms = |share| quantile(sorted, share).map(|lag| lag.as_secs_f64() * 1_000.0);
        Some(Lag { p50_ms: ms(0.5)?, p99_ms: ms(0.99)?, max_ms: ms(1.0)? })
    }
}

impl Summary {
    /// Takes over what the node counted.
    pub fn set_counts(&mut self, totals: &Totals, copied: &Copied) {
        self.streamed_transactions = totals.transactions;
        self.streamed_changes = totals.changes;
        self.target_commits = totals.target_commits;
        self.wire_bytes = totals.wire_bytes;
        self.store_payload_bytes = totals.payload_bytes;
        self.store_stored_bytes = totals.stored_bytes;
        self.rows_copied = copied.rows;
        self.copy_bytes = copied.bytes;
        if let (Some(began), Some(ended)) = (copied.began, copied.ended) {
            self.copy_seconds = ended.saturating_duration_since(began).as_secs_f64();
        }
    }

    /// Takes over measured lags, in ascending order.
    pub fn set_lags(&mut self, sorted: &[Duration]) {
        self.lag_samples = sorted.len();
        self.lag = Lag::of(sorted);
    }

    /// Whether every table is equal.
    pub fn is_equal(&self) -> bool {
        self.tables_equal == self.tables
    }

    /// The verdict.
    pub fn verdict(&self) -> String {
        format!("equal: {} of {} tables", self.tables_equal, self.tables)
    }

    /// The report's lines.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let rate = self.rows_copied as f64 / self.copy_seconds.max(0.001);
        let ratio = self.store_payload_bytes as f64 / self.store_stored_bytes.max(1) as f64;
        let lag = match &self.lag {
            Some(lag) => {
                let show = |ms: f64| milliseconds(Duration::from_secs_f64(ms / 1_000.0));
                format!(
                    "p50 {}, p99 {}, max {}  (COMMIT returned on the publisher → row visible on the\n\
                     {:14}subscriber, by {} heartbeats; copy and kill left out)",
                    show(lag.p50_ms),
                    show(lag.p99_ms),
                    show(lag.max_ms),
                    "",
                    grouped(self.lag_samples as u64)
                )
            }
            None => "no heartbeat arrived while it was streaming".to_owned(),
        };
        vec![
            (
                "copied",
                format!(
                    "{} rows, {} in {:.1} s under load: {} rows/s",
                    grouped(self.rows_copied),
                    megabytes(self.copy_bytes),
                    self.copy_seconds,
                    grouped(rate as u64)
                ),
            ),
            (
                "load",
                format!(
                    "{} transactions: {} of pgbench, {} mixed, {} heartbeats, one of {} changes",
                    grouped(
                        self.pgbench_transactions + self.mixed_transactions + self.heartbeats + 1
                    ),
                    grouped(self.pgbench_transactions),
                    grouped(self.mixed_transactions),
                    grouped(self.heartbeats),
                    grouped(self.large_transaction_changes)
                ),
            ),
            (
                "replicated",
                format!(
                    "{} transactions, {} changes, in {} commits on the subscriber",
                    grouped(self.streamed_transactions),
                    grouped(self.streamed_changes),
                    grouped(self.target_commits)
                ),
            ),
            ("lag", lag),
            (
                "bytes",
                format!(
                    "{} on the wire, {} into the store as {} ({ratio:.1} × smaller); {} on disk now",
                    megabytes(self.wire_bytes),
                    megabytes(self.store_payload_bytes),
                    megabytes(self.store_stored_bytes),
                    megabytes(self.store_bytes)
                ),
            ),
            (
                "kill -9",
                format!("less than 1 s behind again {:.1} s after the kill", self.recovery_seconds),
            ),
            ("drained", format!("{:.2} s after the end of the load", self.caught_up_seconds)),
        ]
    }
}
