//! The pair of servers that everything is measured on.

use crate::line::Line;
use anyhow::Result;
use farshore_testkit::postgres::{Cluster, ClusterBuilder, Installation};
use farshore_testkit::wan::{Namespace, Side};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The version on both sides.
const MAJOR: u32 = 18;

/// Settings of both servers. Checkpoints and autovacuum stay out of the measured time: a
/// checkpoint is made before each measurement instead, and tables are vacuumed when prepared.
const SETTINGS: [(&str, &str); 13] = [
    ("wal_level", "logical"),
    ("shared_buffers", "1GB"),
    ("synchronous_commit", "on"),
    ("fsync", "on"),
    ("max_wal_size", "16GB"),
    ("min_wal_size", "2GB"),
    ("checkpoint_timeout", "1h"),
    ("autovacuum", "off"),
    // Room for eight native subscriptions, and for whatever copies tables before.
    ("max_worker_processes", "32"),
    ("max_logical_replication_workers", "24"),
    ("max_wal_senders", "40"),
    ("max_replication_slots", "40"),
    // A native worker that is enabled must not wait out its retry interval of 5 s.
    ("wal_retrieve_retry_interval", "100ms"),
];

/// Publisher and subscriber. Dropping it stops both and removes their data.
#[derive(Debug)]
pub struct Servers {
    /// Where the load runs.
    pub publisher: Cluster,
    /// Where it is to arrive; both contenders have a database of their own here.
    pub subscriber: Cluster,
    /// What lies between them, if they are not beside each other. Dropped last: both are in it.
    pub line: Option<Line>,
}

impl Servers {
    /// Starts both. Takes a few seconds.
    ///
    /// # Errors
    /// When PostgreSQL is not installed or does not start; says what to do.
    pub fn start() -> Result<Servers> {
        Servers::start_at(None)
    }

    /// Starts both, the publisher at the near end of a line and the subscriber at the far end.
    ///
    /// # Errors
    /// As [`Servers::start`], and when there can be no line here: says why.
    pub fn start_across_a_line() -> Result<Servers> {
        Servers::start_at(Some(Line::start()?))
    }

    fn start_at(line: Option<Line>) -> Result<Servers> {
        let installation = Installation::find(MAJOR)?;
        let start = |side| {
            let builder = Cluster::builder(&installation);
            let builder = SETTINGS.iter().fold(builder, |b, (name, value)| b.setting(name, value));
            let end = line.as_ref().map(|line| line.end(side));
            end.into_iter().fold(builder, ClusterBuilder::place).start()
        };
        Ok(Servers { publisher: start(Side::Near)?, subscriber: start(Side::Far)?, line })
    }

    /// The network at one end; none if both ends are this machine's.
    pub fn end(&self, side: Side) -> Option<&Namespace> {
        self.line.as_ref().map(|line| line.end(side))
    }

    /// Writes everything dirty now, so that no measurement pays for what was before it, and both
    /// contenders begin with the same cost of first touching a page.
    ///
    /// # Errors
    /// When a server cannot be reached.
    pub fn checkpoint(&self) -> Result<()> {
        self.publisher.execute_script("CHECKPOINT")?;
        self.subscriber.execute_script("CHECKPOINT")
    }

    /// What the figures depend on.
    pub fn settings(&self) -> BTreeMap<&'static str, Value> {
        let mut settings: BTreeMap<_, _> =
            SETTINGS.iter().map(|(name, value)| (*name, json!(value))).collect();
        settings.insert("postgres", json!(self.publisher.installation().version()));
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        settings.insert("cores", json!(cores));
        let pair = match &self.line {
            None => "both servers and farshore on one machine, TCP loopback",
            Some(_) => "both servers and farshore on one machine, in two networks with a line",
        };
        settings.insert("pair", json!(pair));
        settings
    }
}
