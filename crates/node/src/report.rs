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
    /// What downstream sites have of each publication that they may have.
    #[serde(default)]
    pub downstreams: Vec<DownstreamReport>,
}

/// How a downstream site follows a publication.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct DownstreamReport {
    /// The site.
    pub site: String,
    /// The publication.
    pub publication: String,
    /// It is connected.
    pub connected: bool,
    /// Durable there; the log is kept for it from here on.
    pub durable: String,
    /// Bytes of the publisher's log between what is durable here and there.
    pub behind_bytes: u64,
    /// Bytes sent since it connected, as they crossed.
    pub sent_bytes: u64,
    /// Payload bytes of the log that crossed in packs since it connected, before compression: the
    /// line was what was waited for.
    #[serde(default)]
    pub packed_bytes: u64,
}

/// A publication's capture and store.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PublicationReport {
    /// Name; of a received one `upstream/publication`.
    pub name: String,
    /// The site that it is received from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream: Option<String>,
    /// `streaming` (of a received one `receiving`), `starting`, `retrying` or `stopped`.
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
