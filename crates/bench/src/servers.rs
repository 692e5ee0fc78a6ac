//! The pair of servers that everything is measured on.

use anyhow::Result;
use farshore_testkit::postgres::{Cluster, Installation};
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
}

impl Servers {
    /// Starts both. Takes a few seconds.
    ///
    /// # Errors
    /// When PostgreSQL is not installed or does not start; says what to do.
    pub fn start() -> Result<Servers> {
        let installation = Installation::find(MAJOR)?;
        let start = || {
            let builder = Cluster::builder(&installation);
            let builder = SETTINGS.iter().fold(builder, |b, (name, value)| b.setting(name, value));
            builder.start()
        };
        Ok(Servers { publisher: start()?, subscriber: start()? })
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
        settings.insert("pair", json!("both servers and farshore on one machine, TCP loopback"));
        settings
    }
}
