//! The site file as typed. Nothing here is interpreted; see [`super::parse`].

use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The whole file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SiteFile {
    /// `[site]`
    pub site: Site,
    /// `[publication.NAME]`
    #[serde(default)]
    pub publication: BTreeMap<String, Publication>,
    /// `[subscription.NAME]`
    #[serde(default)]
    pub subscription: BTreeMap<String, Subscription>,
    /// `[upstream.SITE]`
    #[serde(default)]
    pub upstream: BTreeMap<String, Upstream>,
    /// `[downstream.SITE]`
    #[serde(default)]
    pub downstream: BTreeMap<String, Downstream>,
    /// `[mirror.NAME]`
    #[serde(default)]
    pub mirror: BTreeMap<String, Mirror>,
    /// `[thresholds]`
    #[serde(default)]
    pub thresholds: Thresholds,
}

impl SiteFile {
    /// Takes all thresholds out.
    pub fn take_thresholds(&mut self) -> ThresholdSections {
        let publications = self.publication.iter_mut();
        let subscriptions = self.subscription.iter_mut();
        let mirrors = self.mirror.iter_mut();
        ThresholdSections {
            site: std::mem::take(&mut self.thresholds),
            publications: publications
                .filter_map(|(name, p)| Some((name.clone(), p.thresholds.take()?)))
                .collect(),
            subscriptions: subscriptions
                .filter_map(|(name, s)| Some((name.clone(), s.thresholds.take()?)))
                .collect(),
            mirrors: mirrors
                .filter_map(|(name, m)| Some((name.clone(), m.thresholds.take()?)))
                .collect(),
        }
    }
}

/// All thresholds of a site file.
#[derive(Debug, Default)]
pub struct ThresholdSections {
    /// `[thresholds]`
    pub site: Thresholds,
    /// `[publication.NAME.thresholds]`
    pub publications: BTreeMap<String, Thresholds>,
    /// `[subscription.NAME.thresholds]`
    pub subscriptions: BTreeMap<String, Thresholds>,
    /// `[mirror.NAME.thresholds]`
    pub mirrors: BTreeMap<String, Thresholds>,
}

/// `[thresholds]`: each for a warning, and critical.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Thresholds {
    /// Latency of a subscription.
    pub latency: Option<[String; 2]>,
    /// Log that a subscription lacks.
    pub behind: Option<[String; 2]>,
    /// Log that the publisher keeps for a publication.
    pub unacknowledged: Option<[String; 2]>,
    /// A publication's store on disk.
    pub store: Option<[String; 2]>,
    /// A mirror's send queue.
    pub send_queue: Option<[String; 2]>,
}

impl Thresholds {
    /// Keys that are there.
    pub fn given(&self) -> Vec<&'static str> {
        [
            ("latency", &self.latency),
            ("behind", &self.behind),
            ("unacknowledged", &self.unacknowledged),
            ("store", &self.store),
            ("send_queue", &self.send_queue),
        ]
        .into_iter()
        .filter_map(|(key, value)| value.is_some().then_some(key))
        .collect()
    }
}

/// `[site]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Site {
    /// The site's name.
    pub name: String,
    /// Folder for everything durable; relative paths start at the site file.
    pub data_dir: PathBuf,
    /// Address that downstream sites connect to, `host:port`.
    pub listen: Option<String>,
    /// This site's certificate; NAME.crt beside the site file by default.
    pub certificate: Option<PathBuf>,
    /// Its key; NAME.key by default.
    pub key: Option<PathBuf>,
    /// Certificates that sites' certificates are signed with; ca.crt by default.
    pub ca: Option<PathBuf>,
    /// Certificates that are not valid any more; revoked.crl by default, if there is one.
    pub revoked: Option<PathBuf>,
    /// Where the monitor listens, `address:port`; without it there is none.
    pub monitor: Option<String>,
    /// File with the token that the monitor asks for.
    pub monitor_token: Option<PathBuf>,
    /// The monitor's certificate, with those it is signed with.
    pub monitor_certificate: Option<PathBuf>,
    /// Its key.
    pub monitor_key: Option<PathBuf>,
    /// How often the monitor posts a tracer token of each publication.
    pub tracer_every: Option<String>,
    /// Where the monitor posts changes of health.
    pub webhook: Option<String>,
}

/// `[upstream.SITE]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Upstream {
    /// Where that site listens, `host:port`.
    pub address: String,
    /// Connections side by side.
    pub connections: Option<usize>,
    /// Received entries older than this are dropped even if a subscription still needs them.
    pub retention_age: Option<String>,
    /// Beyond this size the oldest received entries are dropped even if they are still needed.
    pub retention_size: Option<String>,
    /// Size of a log file.
    pub segment_size: Option<String>,
}

/// `[downstream.SITE]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Downstream {
    /// Publications that the site may have.
    #[serde(default)]
    pub publications: Vec<String>,
    /// Mirrors that the site may have.
    #[serde(default)]
    pub mirrors: Vec<String>,
    /// Bytes per second at most, for instance `20MB`.
    pub bandwidth: Option<String>,
    /// `[downstream.SITE.bandwidth_at]`: `"08:00-18:00" = "2MB"`, in UTC.
    #[serde(default)]
    pub bandwidth_at: BTreeMap<String, String>,
    /// zstd level of what crosses; 0: as it is stored.
    pub compression: Option<i32>,
}

/// `[publication.NAME]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Publication {
    /// The publisher: a URL, a conninfo string, or `service=NAME`.
    pub source: String,
    /// `schema.table`, `schema.*` or `*.*`.
    #[serde(default)]
    pub tables: Vec<String>,
    /// `[publication.NAME.article."schema.table"]`
    #[serde(default)]
    pub article: BTreeMap<String, Article>,
    /// Publish changes of partitions as changes of the table they are partitions of.
    #[serde(default)]
    pub publish_via_partition_root: bool,
    /// Use this PostgreSQL publication as it is.
    pub adopt_publication: Option<String>,
    /// Use this replication slot as it is.
    pub adopt_slot: Option<String>,
    /// Entries older than this are dropped even if a subscription still needs them.
    pub retention_age: Option<String>,
    /// Beyond this size the oldest entries are dropped even if a subscription still needs them.
    pub retention_size: Option<String>,
    /// Size of a log file.
    pub segment_size: Option<String>,
    /// `[publication.NAME.thresholds]`
    pub thresholds: Option<Thresholds>,
}

/// `[publication.NAME.article."schema.table"]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Article {
    /// Published columns.
    pub columns: Option<Vec<String>>,
    /// SQL condition that published rows meet.
    #[serde(rename = "where")]
    pub row_filter: Option<String>,
}

/// `[subscription.NAME]`
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Subscription {
    /// The publication to follow.
    pub publication: String,
    /// The target database: a URL, a conninfo string, or `service=NAME`.
    pub target: String,
    /// `copy` or `backup`.
    #[serde(default)]
    pub initialise: Initialise,
    /// Connections of the initial copy, on each side.
    pub copy_workers: Option<usize>,
    /// Size of the ranges that large tables are copied in.
    pub copy_range: Option<String>,
    /// Most source transactions in one target transaction.
    pub group_transactions: Option<u64>,
    /// When changes are netted and written in bulk.
    #[serde(default)]
    pub batches: Batches,
    /// Connections to the target side by side while it is far behind.
    pub streams: Option<usize>,
    /// `stop`, `skip` or `overwrite`.
    #[serde(default)]
    pub on_conflict: OnConflict,
    /// The same for single tables, by the publisher's names.
    #[serde(default)]
    pub on_conflict_tables: BTreeMap<String, OnConflict>,
    /// `add` or `stop`.
    #[serde(default)]
    pub follow_ddl: FollowDdl,
    /// How often sequences follow; `off` for never.
    pub sequences_every: Option<String>,
    /// Whether tables that the target lacks are created there.
    pub create_tables: Option<bool>,
    /// `[subscription.NAME.tables]`: publisher's table = target's table.
    #[serde(default)]
    pub tables: BTreeMap<String, String>,
    /// `[subscription.NAME.schemas]`: publisher's schema = target's schema.
    #[serde(default)]
    pub schemas: BTreeMap<String, String>,
    /// `[subscription.NAME.thresholds]`
    pub thresholds: Option<Thresholds>,
}

/// `initialise = "…"`
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Initialise {
    /// The publisher's tables are copied.
    #[default]
    Copy,
    /// The target is restored from a backup.
    Backup,
}

/// `follow_ddl = "…"`
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FollowDdl {
    /// Columns that the publisher's tables gain are added on the target.
    #[default]
    Add,
    /// And those that they lose are dropped.
    AddDrop,
    /// The subscription stops.
    Stop,
}

/// `batches = "…"`
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Batches {
    /// When the target is behind, and for large transactions.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// What is done about a change that is at odds with the target.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnConflict {
    /// Stop and say why.
    #[default]
    Stop,
    /// Leave the change out and record it.
    Skip,
    /// Let the publisher's row win, and record it.
    Overwrite,
}

/// `[mirror.NAME]`: at the near end with `principal`, at the far end with `upstream`, and with
/// `principal` and `listen` where both are one.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mirror {
    /// The server that is mirrored: a URL, a conninfo string, or `service=NAME`.
    pub principal: Option<String>,
    /// The mirror's slot on the principal.
    pub slot: Option<String>,
    /// What `synchronous_standby_names` calls the mirror.
    pub application_name: Option<String>,
    /// What a flush that the principal is told promises.
    pub mode: Option<MirrorMode>,
    /// How what crosses is packed.
    pub compression: Option<MirrorCompression>,
    /// zstd's level.
    pub compression_level: Option<i32>,
    /// Warn when so much log is kept: at the near end by the principal for the mirror, at the far
    /// end by the spool for a standby.
    pub warn_behind: Option<String>,
    /// Drop the mirror, or the standby's slot, when so much is.
    pub drop_behind: Option<String>,
    /// The site of the near end.
    pub upstream: Option<String>,
    /// Where standbys connect, `host:port`.
    pub listen: Option<String>,
    /// File with the password that standbys are asked for.
    pub standby_password: Option<PathBuf>,
    /// Certificate chain that standbys are shown, PEM.
    pub standby_certificate: Option<PathBuf>,
    /// Its key, PEM.
    pub standby_key: Option<PathBuf>,
    /// Whole segments that no standby needs are removed beyond this size.
    pub spool_size: Option<String>,
    /// The standby that would take over.
    pub standby: Option<String>,
    /// `[mirror.NAME.thresholds]`
    pub thresholds: Option<Thresholds>,
}

/// `compression = …` of a mirror.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged, expecting = "expected \"zstd\", \"lz4\", \"off\", \"auto\", or zstd's level")]
pub enum MirrorCompression {
    /// zstd's level; 0: not compressed.
    Level(i32),
    /// By name.
    Method(CompressionMethod),
}

/// A way to compress.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CompressionMethod {
    /// zstd.
    Zstd,
    /// lz4.
    Lz4,
    /// None.
    Off,
    /// By what is waited for.
    Auto,
}

/// `mode = "…"` of a mirror.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MirrorMode {
    /// Durable in the far end's spool.
    #[default]
    Far,
    /// Durable in the spool of a node near the principal that keeps log alone.
    FarSync,
    /// Replayed by the standbys there.
    FarApplied,
    /// Nothing that anybody should wait for.
    Async,
}
