//! A site's state as plain values, for people and programs.

pub use crate::Health;
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
    /// Time until the certificate that this site shows other sites expires, less than zero once it
    /// has; absent of a site that has none.
    #[serde(default)]
    pub certificate_seconds_left: Option<f64>,
    /// That is to be told, for judging what goes over links.
    #[serde(skip)]
    pub certificate_ends_soon: bool,
    /// Publications.
    pub publications: Vec<PublicationReport>,
    /// Subscriptions.
    pub subscriptions: Vec<SubscriptionReport>,
    /// What downstream sites have of each publication that they may have.
    #[serde(default)]
    pub downstreams: Vec<DownstreamReport>,
    /// Mirrors with an end here.
    #[serde(default)]
    pub mirrors: Vec<MirrorReport>,
    /// Tracer tokens that were posted here, the newest first.
    #[serde(default)]
    pub tracers: Vec<TracerReport>,
}

/// A tracer token's way. Times are milliseconds since its COMMIT was sent to the publisher, by this
/// site's clock.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TracerReport {
    /// Of which publication.
    pub publication: String,
    /// When it was posted, in seconds since 1970.
    pub posted_at: f64,
    /// End of its commit record; absent if it did not come out of the publisher's log in time.
    pub position: Option<String>,
    /// The publisher had answered its COMMIT.
    pub committed_ms: f64,
    /// Leg capture: it had come out of the publisher's log.
    pub received_ms: Option<f64>,
    /// Leg store: it was durable in the store here.
    pub durable_ms: Option<f64>,
    /// Leg apply, for each subscription here.
    pub subscriptions: Vec<TracerArrival>,
    /// Leg link, for each downstream site: its word that it has it durably had come back.
    pub downstreams: Vec<TracerArrival>,
}

/// Where a tracer token arrived.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TracerArrival {
    /// The subscription, or the downstream site.
    pub name: String,
    /// When; absent if not in time.
    pub arrived_ms: Option<f64>,
    /// What it was doing when it was waited for no more, if it had not arrived.
    #[serde(default)]
    pub state: Option<String>,
}

impl TracerReport {
    /// Whether it has arrived everywhere.
    pub fn is_complete(&self) -> bool {
        let arrivals = self.subscriptions.iter().chain(&self.downstreams);
        self.durable_ms.is_some() && arrivals.into_iter().all(|a| a.arrived_ms.is_some())
    }
}

impl SiteReport {
    /// Whether an agent has an error.
    pub fn has_trouble(&self) -> bool {
        self.publications.iter().any(|p| p.error.is_some())
            || self.subscriptions.iter().any(|s| s.error.is_some())
            || self.mirrors.iter().any(|m| m.error.is_some())
    }
}

/// One end of a mirror.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct MirrorReport {
    /// Name.
    pub name: String,
    /// `near` or `far`.
    pub end: String,
    /// The site of the other end, once it is known; none of a direct mirror.
    pub site: Option<String>,
    /// Both ends are here, and this is of both: log comes straight from the principal.
    #[serde(default)]
    pub direct: bool,
    /// At the near end `streaming`, `waiting` for the far end, or `dropped`; at the far end
    /// `receiving`, `starting`, `retrying`, `out of room`, `disk error`, `promoted` or `stopped`, and
    /// where it is direct `dropped`.
    pub state: String,
    /// What is wrong.
    pub error: Option<String>,
    /// How it goes with it.
    #[serde(default)]
    pub health: Health,
    /// Why it is not good.
    #[serde(default)]
    pub reason: Option<String>,
    /// What a flush promises: `far`, `far-sync`, `far-applied` or `async`; known at the near end, and
    /// where the mirror is direct.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// The timeline that flows.
    pub timeline: u32,
    /// End of the principal's log as last heard of.
    pub principal_end: String,
    /// Log has arrived at this end up to here.
    pub received: String,
    /// The far end's operating system has the log up to here.
    pub written: String,
    /// Durable in the far end's spool.
    pub durable: String,
    /// Replayed by the far end's standbys.
    pub applied: String,
    /// At the near end what the principal, at the far end what the near end was told as flushed.
    pub acknowledged: String,
    /// Bytes of log since the node started.
    pub log_bytes: u64,
    /// Bytes that they took on the link.
    pub link_bytes: u64,
    /// How many to one.
    pub ratio: Option<f64>,
    /// How log is packed at present; known at the near end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compression: Option<String>,
    /// Time that packing took since the node started, milliseconds; at the near end.
    #[serde(default)]
    pub packing_ms: u64,
    /// Time that packed log waited for the link since the node started, milliseconds; at the near
    /// end.
    #[serde(default)]
    pub flow_control_ms: u64,
    /// At the near end, bytes of log that the principal keeps for the mirror's slot, as seen last;
    /// at the far end, the most that the spool keeps for a standby's slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_bytes: Option<u64>,
    /// Bytes of log that the principal keeps for the mirror's slot, as seen last, where the mirror is
    /// direct.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub principal_kept_bytes: Option<u64>,
    /// Bytes of log that the near end has and the far end has not written; where the mirror is
    /// direct, that the principal has.
    pub send_queue_bytes: u64,
    /// Bytes of log that are durable at the far end and that its standbys have not replayed; none
    /// as long as there was no standby.
    #[serde(default)]
    pub redo_queue_bytes: Option<u64>,
    /// Bytes of log per second that the standby furthest behind replayed lately; at the far end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub apply_bytes_per_s: Option<u64>,
    /// fdatasync calls at the far end since the node started.
    pub syncs: u64,
    /// Mean time from a group's first write to the end of its fdatasync, milliseconds.
    pub harden_ms: Option<f64>,
    /// Bytes of the spool's segments.
    pub spool_bytes: u64,
    /// Slots in the far end's spool.
    #[serde(default)]
    pub slots: Vec<SlotReport>,
    /// Who streams from the far end.
    pub standbys: Vec<StandbyReport>,
}

/// A slot in the spool of a mirror's far end: of a standby, or of one that is being seeded.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct SlotReport {
    /// Its name.
    pub name: String,
    /// Log is kept for it from here on; absent if it was never used, or is lost.
    pub restart: Option<String>,
    /// Bytes of durable log from there on.
    pub kept_bytes: u64,
    /// A standby streams by it now.
    pub in_use: bool,
    /// It kept more than `drop_behind`, and keeps nothing any more.
    pub lost: bool,
}

/// A standby that streams from a mirror's far end.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StandbyReport {
    /// As it calls itself.
    pub application_name: String,
    /// Where it connects from.
    pub peer: String,
    /// The slot that it uses.
    pub slot: Option<String>,
    /// Sent to it.
    pub sent: String,
    /// Durable there, by its own word.
    pub flushed: String,
    /// Replayed there.
    pub applied: String,
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
    /// Where the log here begins, if what the site still needed was dropped by the retention limits:
    /// it cannot go on.
    #[serde(default)]
    pub dropped_before: Option<String>,
    /// Why the log cannot be sent to it: the store here cannot be read, or what the site has is not
    /// of it.
    #[serde(default)]
    pub error: Option<String>,
    /// Bytes of the publisher's log between what is durable here and there.
    pub behind_bytes: u64,
    /// Commands that are durable here and not there, up to a batch too many. Absent of a received
    /// publication, and while it lacks some that were stored before the node started.
    #[serde(default)]
    pub behind_commands: Option<u64>,
    /// Leg link: durable here to its word that it is durable there of the newest, or the age of what
    /// waits longest, if that is more, milliseconds. Absent before the first.
    #[serde(default)]
    pub link_ms: Option<f64>,
    /// Bytes sent since it connected, as they crossed.
    pub sent_bytes: u64,
    /// Payload bytes that crossed in packs since it connected, before compression: the
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
    /// How it goes with it.
    #[serde(default)]
    pub health: Health,
    /// Why it is not good.
    #[serde(default)]
    pub reason: Option<String>,
    /// Which tables something else took out of an adopted publication, and what to do: for judging it.
    #[serde(skip)]
    pub tables_out: Option<String>,
    /// End of the publisher's log as last heard of.
    pub publisher_end: String,
    /// Newest position taken from the stream.
    pub received: String,
    /// Newest position durable in the store.
    pub durable: String,
    /// What the slot was told last.
    pub acknowledged: String,
    /// Leg capture: bytes of the publisher's log that were not taken from the stream yet; of a
    /// received publication not known here, and 0.
    #[serde(default)]
    pub capture_behind_bytes: u64,
    /// Leg store: bytes of the publisher's log that came in and are not durable yet.
    #[serde(default)]
    pub store_behind_bytes: u64,
    /// Bytes of the publisher's log that the slot was not told of yet: at least so much it keeps.
    /// Absent while nothing is heard of the publisher, and of a received publication.
    #[serde(default)]
    pub unacknowledged_bytes: Option<u64>,
    /// The same when the publisher was last heard, for judging it: it keeps no less now.
    #[serde(skip)]
    pub unacknowledged_last: u64,
    /// When anything was last heard of the publisher, in seconds since 1970.
    #[serde(default)]
    pub heard_at: Option<f64>,
    /// Leg capture: commit on the publisher, by its clock, to received here, by this site's, of the
    /// newest transaction, milliseconds. Absent before the first, while nothing is heard of the
    /// publisher, and of a received publication.
    #[serde(default)]
    pub capture_ms: Option<f64>,
    /// Leg store: received to durable of the newest transaction, or the age of what waits longest,
    /// if that is more, milliseconds. Absent before the first, and of a received publication.
    #[serde(default)]
    pub store_ms: Option<f64>,
    /// Commands (row changes, truncates, marks of savepoints) handed to the store since the node started; of a
    /// received publication 0.
    #[serde(default)]
    pub commands: u64,
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
    /// How often what fills it was started again after an error.
    #[serde(default)]
    pub restarts: u64,
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
    /// Where the log begins, if what it still needed was dropped by the retention limits: it has to
    /// be copied anew.
    #[serde(default)]
    pub dropped_before: Option<String>,
    /// How it goes with it.
    #[serde(default)]
    pub health: Health,
    /// Why it is not good.
    #[serde(default)]
    pub reason: Option<String>,
    /// Durable on the target.
    pub applied: String,
    /// Bytes of the publisher's log between what is durable in the store and what is applied.
    pub behind_bytes: u64,
    /// Commands that the store has and the target has not. Counted, up to a batch too many, if
    /// capture here has stored them since the node started; otherwise estimated. Absent as long as
    /// nothing is known to estimate from.
    #[serde(default)]
    pub behind_commands: Option<u64>,
    /// It is an estimate: bytes behind, times commands in each byte that was applied so far.
    #[serde(default)]
    pub behind_commands_estimated: bool,
    /// All legs before apply: commit on the publisher, by its clock, to durable in the store here, by
    /// this site's, of the newest transaction on the target, milliseconds. Absent before the first.
    #[serde(default)]
    pub upstream_ms: Option<f64>,
    /// Leg apply: durable in the store here to committed on the target of the newest transaction
    /// there, or the age of what waits longest, if that is more, milliseconds.
    #[serde(default)]
    pub apply_ms: Option<f64>,
    /// Leg apply and all before it: age of the oldest transaction that was read and is not
    /// committed on the target, milliseconds; 0 when there is none. While the agent does not run,
    /// an upper bound: time since everything was there. Absent when that is not known.
    #[serde(default)]
    pub latency_ms: Option<f64>,
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
    /// Commit on the publisher to commit on the target of the newest tracer token that the target
    /// has, milliseconds, by two clocks: the publisher's and this site's.
    #[serde(default)]
    pub tracer_ms: Option<f64>,
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
