use farshore_model::transaction::Header;
use farshore_model::{Applied, Lsn, PgTime};

/// Where a subscription stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Connecting to the target, or waiting to try again.
    #[default]
    Starting,
    /// Copying tables.
    Copying,
    /// All tables are copied, at different points; they meet when the stream passes the last one.
    CatchingUp,
    /// Every state that a reader sees is a prefix of the publisher's commit order.
    Streaming,
    /// Stopped for a reason that trying again does not mend.
    Stopped,
}

impl Phase {
    /// One word for status outputs; `farshore.subscription.state` uses the same.
    pub fn word(self) -> &'static str {
        match self {
            Phase::Starting => "starting",
            Phase::Copying => "copying",
            Phase::CatchingUp => "catching-up",
            Phase::Streaming => "streaming",
            Phase::Stopped => "stopped",
        }
    }
}

/// Progress of one table's initial copy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TableCopy {
    /// Qualified name.
    pub table: String,
    /// Ranges of blocks in all.
    pub ranges: u64,
    /// Ranges committed on the target.
    pub ranges_done: u64,
    /// Rows committed on the target in this run.
    pub rows: u64,
    /// Bytes copied in this run.
    pub bytes: u64,
    /// Bytes of the table on the publisher.
    pub bytes_total: u64,
    /// Rows of it that were on the target had to go.
    pub starts_over: bool,
}

/// What one subscription is doing.
#[derive(Clone, Debug, Default)]
pub struct SubscriptionStatus {
    /// Where it stands.
    pub phase: Phase,
    /// Durable on the target.
    pub applied: Applied,
    /// The oldest transaction that was read and is not committed on the target; none while
    /// everything that the store has is there.
    pub oldest_pending: Option<SourceTransaction>,
    /// The newest transaction that the stream brought to the target.
    pub newest: Option<AppliedTransaction>,
    /// Bytes of the publisher's log that were applied since the agent started.
    pub log_bytes: u64,
    /// When everything that the store had was last on the target.
    pub caught_up_at: Option<PgTime>,
    /// Source transactions applied since the agent started.
    pub transactions: u64,
    /// Row changes applied since the agent started.
    pub changes: u64,
    /// Target transactions since the agent started.
    pub target_commits: u64,
    /// Changes recorded in `farshore.conflicts` since the agent started.
    pub conflicts: u64,
    /// Commit on the publisher to commit on the target.
    pub lag: LagHistogram,
    /// The newest tracer token that the target has.
    pub tracer: Option<AppliedTransaction>,
    /// Initial copy, table by table; empty when none is under way.
    pub copies: Vec<TableCopy>,
    /// Newest point at which a table was copied.
    pub copied_at: Option<Lsn>,
    /// Who on the target keeps it waiting, for a person.
    pub waits_for: Option<String>,
    /// Why a copy does not begin, or not go on, for a person.
    pub copy_waits: Option<String>,
    /// Ranges of tables that copies have committed on the target since the agent started.
    pub copied_ranges: u64,
    /// How often the longest wait was doubled for the log to come as far as a copy's snapshot.
    pub log_wait_doublings: u32,
    /// What is to be detached on the target and is left for later, and why, for a person.
    pub left_for_later: Option<String>,
    /// Last error, with what to do; cleared when the agent works again.
    pub error: Option<String>,
    /// How often the agent was started again after an error.
    pub restarts: u64,
}

/// A transaction of the publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceTransaction {
    /// End of its commit record on the publisher.
    pub position: Lsn,
    /// The publisher's clock at its commit.
    pub commit_time: PgTime,
}

impl From<&Header> for SourceTransaction {
    fn from(header: &Header) -> SourceTransaction {
        SourceTransaction { position: header.end_lsn, commit_time: header.commit_time }
    }
}

/// A transaction, or a tracer token, that has come to a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppliedTransaction {
    /// Which.
    pub source: SourceTransaction,
    /// This machine's clock when the target had confirmed it.
    pub applied_at: PgTime,
}

/// Counts of lags in buckets that grow by a quarter power of two, from 1 µs to about 9 h.
#[derive(Clone, Debug)]
pub struct LagHistogram {
    buckets: [u64; Self::BUCKETS],
    max_micros: u64,
}

impl Default for LagHistogram {
    fn default() -> Self {
        LagHistogram { buckets: [0; Self::BUCKETS], max_micros: 0 }
    }
}

impl LagHistogram {
    const BUCKETS: usize = 140;

    /// Counts one lag, in microseconds.
    pub fn record(&mut self, micros: u64) {
        self.max_micros = self.max_micros.max(micros);
        let bucket = (micros.max(1) as f64).log2() * 4.0;
        self.buckets[(bucket as usize).min(Self::BUCKETS - 1)] += 1;
    }

    /// Lags counted.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The lag that `quantile` (0 to 1) of all are within, in microseconds, to about 10 %.
    pub fn quantile_micros(&self, quantile: f64) -> Option<u64> {
        let wanted = (self.count() as f64 * quantile).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, count) in self.buckets.iter().enumerate() {
            seen += count;
            if seen >= wanted && *count > 0 {
                let middle = 2f64.powf((bucket as f64 + 0.5) / 4.0) as u64;
                return Some(middle.min(self.max_micros));
            }
        }
        None
    }

    /// The largest lag, in microseconds.
    pub fn max_micros(&self) -> u64 {
        self.max_micros
    }
}

#[cfg(test)]
mod tests {
    use super::LagHistogram;

    #[test]
    fn quantiles_are_within_a_bucket() {
        let mut lag = LagHistogram::default();
        assert_eq!(lag.quantile_micros(0.5), None);
        for micros in 1..=10_000 {
            lag.record(micros);
        }
        let median = lag.quantile_micros(0.5).unwrap() as f64;
        assert!((4_400.0..5_600.0).contains(&median), "{median}");
        assert_eq!(lag.max_micros(), 10_000);
        lag.record(u64::MAX);
        assert_eq!(lag.count(), 10_001);
    }
}
