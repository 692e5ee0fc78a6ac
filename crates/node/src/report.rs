//! A site's state as plain values, for people and programs.

use serde::{Deserialize, Serialize};

/// What `farshore status` shows.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SiteReport {
    /// Site name.
    pub site: String,
    /// Process id of the node.
    pub pid: u32,
    /// Seconds since the node started.
    pub uptime_seconds: u64,
    /// Publications.
    pub publications: Vec<PublicationReport>,
    /// Subscriptions.
    pub subscriptions: Vec<SubscriptionReport>,
}

/// A publication's capture and store.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PublicationReport {
    /// Name.
    pub name: String,
    /// `streaming`, `starting` or `stopped`.
    pub state: String,
    /// Why it is not streaming.
    pub error: Option<String>,
    /// End of the publisher's log as last heard of.
    pub publisher_end: String,
    /// Newest position taken from the stream.
    pub received: String,
    /// Newest position durable in the store.
    pub durable: String,
    /// What the slot was told last.
    pub acknowledged: String,
    /// Row changes taken on this connection.
    pub changes: u64,
    /// Bytes of replication messages taken on this connection.
    pub wire_bytes: u64,
    /// Bytes of the store on disk.
    pub store_bytes: u64,
    /// Payload bytes appended since the node started, before compression.
    pub payload_bytes: u64,
    /// Bytes those took on disk.
    pub stored_bytes: u64,
    /// fdatasync calls since the node started.
    pub syncs: u64,
    /// The log can be read after this position.
    pub store_start: String,
}

/// A subscription's apply agent.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SubscriptionReport {
    /// Name.
    pub name: String,
    /// Publication it follows.
    pub publication: String,
    /// `starting`, `copying`, `catching-up`, `streaming`, `retrying`, `paused` or `stopped`.
    pub state: String,
    /// Why it is retrying or stopped.
    pub error: Option<String>,
    /// Durable on the target.
    pub applied: String,
    /// Bytes of the publisher's log between what is durable in the store and what is applied.
    pub behind_bytes: u64,
    /// Source transactions applied since the node started.
    pub transactions: u64,
    /// Row changes applied on this connection.
    pub changes: u64,
    /// Target transactions since the node started.
    pub target_commits: u64,
    /// Changes recorded in `farshore.conflicts` since the node started.
    #[serde(default)]
    pub conflicts: u64,
    /// Commit on the publisher to commit on the target, median, milliseconds.
    pub lag_p50_ms: Option<f64>,
    /// The same, 99th percentile.
    pub lag_p99_ms: Option<f64>,
    /// The same, largest.
    pub lag_max_ms: Option<f64>,
    /// How often it was started again after an error.
    pub restarts: u64,
    /// Initial copy, table by table.
    pub copies: Vec<CopyReport>,
}

/// One table's initial copy.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CopyReport {
    /// Qualified name.
    pub table: String,
    /// Ranges in all.
    pub ranges: u64,
    /// Ranges done.
    pub ranges_done: u64,
    /// Rows copied in this run.
    pub rows: u64,
    /// Bytes copied in this run.
    pub bytes: u64,
    /// Bytes of the table on the publisher.
    pub bytes_total: u64,
}
