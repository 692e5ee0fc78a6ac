//! What a subscription asks of its publisher, wherever the publisher is.
//!
//! ```text
//! direct    a publisher that this site connects to
//! remote    a publisher that another site connects to, asked over channels
//! serve     the other end of a channel: answers for one publication
//! channel   what carries questions to the other site
//! frame     what stands in one message of a channel
//! message   requests and answers, as JSON
//! rows      rows that were looked up, as bytes
//! keys      keys of rows, in the form that they came in
//! ```
//!
//! Operations are typed: no SQL text comes from who asks, so that the site that has the publisher
//! can answer for it and keep to what is published.
//!
//! Dropping anything here ends what belongs to it on the publisher: a snapshot its slot, a session
//! its transaction and locks.

mod channel;
mod direct;
mod frame;
mod keys;
mod message;
mod remote;
mod rows;
mod serve;
mod shared_answer;

pub use crate::publication::{AddedColumn, DroppedColumns, GrownTable, OldValue};
pub use crate::snapshot::{
    Digest, DigestOf, DigestScope, FoundRow, HashedAs, HashedRow, Hashing, PartSum, RowPlace,
};
pub use channel::{Channel, ChannelError, Opener};
pub use direct::Direct;
pub use frame::MESSAGE_BYTES_MAX;
pub(crate) use keys::put_for_keys;
pub use keys::{Key, run_for_keys};
pub use remote::Remote;
pub use serve::{Registry, serve};
pub use shared_answer::{Arrival, SharedAnswer};

use crate::CaptureError;
use crate::publication::{PublishedTable, TableName};
use crate::schema::{Definitions, SequencePosition};
use crate::snapshot::{BlockRange, CopyPlan};
use crate::timelines::Timelines;
use bytes::Bytes;
use farshore_model::Lsn;
use farshore_store::BoxFuture;
use std::fmt;

/// What an operation of a source gives.
pub type Asked<'a, T> = BoxFuture<'a, Result<T, CaptureError>>;

/// The publisher of one publication, as its subscriptions see it.
///
/// Every future may be dropped at any await. Errors are transient
/// ([`CaptureError::is_transient`]) where the publisher, or the way to it, is away.
pub trait Source: fmt::Debug + Send + Sync {
    /// The publisher, for messages; without secrets.
    fn server(&self) -> String;

    /// The published tables as they are now.
    fn published_tables(&self) -> Asked<'_, Vec<PublishedTable>>;

    /// OIDs of the partitioned tables that the publication names.
    fn partitioned_tables(&self) -> Asked<'_, Vec<u32>>;

    /// The published tables, and the definitions of the partitioned tables that the publication
    /// names, with all their partitions. `None` where it names no partitioned table.
    fn partitions(&self) -> Asked<'_, Option<(Vec<PublishedTable>, Definitions)>>;

    /// Definitions of tables of the publication, by OID, with what they need.
    fn definitions<'a>(&'a self, tables: &'a [u32]) -> Asked<'a, Definitions>;

    /// The sequences that belong to what is published, and where they stand.
    fn sequences(&self) -> Asked<'_, Vec<SequencePosition>>;

    /// The timelines that the publisher has been on.
    fn timelines(&self) -> Asked<'_, Timelines>;

    /// Which of the columns `gone` (they were published once) the publisher has dropped.
    fn dropped_columns<'a>(
        &'a self,
        table: &'a TableName,
        gone: &'a [String],
    ) -> Asked<'a, DroppedColumns>;

    /// What the rows of a published table had in `columns` when those were added: as many answers,
    /// in the same order.
    fn old_values<'a>(
        &'a self,
        table: &'a GrownTable,
        columns: &'a [AddedColumn],
    ) -> Asked<'a, Vec<OldValue>>;

    /// Makes a new consistent point at which every published table has all its rows, and keeps the
    /// tables from being emptied or rewritten for as long as the snapshot lives. Waits for the
    /// transactions that run now to end. `reader` names who reads, for people who look at the
    /// publisher.
    fn export<'a>(&'a self, reader: &'a str) -> Asked<'a, Box<dyn Snapshot>> {
        self.export_telling(reader, &[], &|_| ())
    }

    /// As [`Source::export`], but tables that are `followed` (OIDs) need not be kept as they are, and
    /// their rows are not to be read in the snapshot: whoever has a publisher's table for himself is
    /// not to wait for a copy of others. (A site of an earlier version keeps them all.) `tell` is told which transactions are waited for, after a while and
    /// where that is known here: of a publisher behind channels it is not.
    fn export_telling<'a>(
        &'a self,
        reader: &'a str,
        followed: &'a [u32],
        tell: &'a Tell<'a>,
    ) -> Asked<'a, Box<dyn Snapshot>>;
}

/// Is told what keeps somebody waiting, for a person; `None` when that is over.
pub type Tell<'a> = dyn Fn(Option<String>) + Sync + 'a;

/// A snapshot that any number of sessions can read, for as long as this lives.
pub trait Snapshot: Send + Sync {
    /// What the snapshot holds: transactions whose commit record starts before this.
    fn consistent_point(&self) -> Lsn;

    /// Opens a session inside the snapshot. Sessions read side by side.
    fn open(&self) -> Asked<'_, Box<dyn SnapshotSession>>;

    /// Ends the snapshot: what still reads it goes on, nothing new can.
    fn close(self: Box<Self>) -> BoxFuture<'static, ()>;
}

/// Whoever has waited for a lock for so long is not about to give it up by himself. Others come and
/// go, and a copy that made way for each of them would never end.
pub const WAITED_LONG: std::time::Duration = std::time::Duration::from_secs(2);

/// A session inside a snapshot.
///
/// After an operation or a stream was dropped before its end, or has failed, the session may be
/// over: then what is asked next fails, and that is transient.
pub trait SnapshotSession: Send {
    /// The published tables as they are in the snapshot.
    fn tables(&mut self) -> Asked<'_, Vec<PublishedTable>>;

    /// Keeps the tables' rows where they are until this session ends. False if that cannot be had
    /// at once, because somebody holds or waits for an exclusive lock.
    fn hold_still<'a>(&'a mut self, tables: &'a [PublishedTable]) -> Asked<'a, bool>;

    /// Whether somebody has waited for an exclusive lock on one of the tables (OIDs) for
    /// [`WAITED_LONG`].
    fn is_in_the_way<'a>(&'a mut self, tables: &'a [u32]) -> Asked<'a, bool>;

    /// Definitions of tables of the publication, by OID, with what they need, in the snapshot.
    fn definitions<'a>(&'a mut self, tables: &'a [u32]) -> Asked<'a, Definitions>;

    /// Starts to read the published rows of one range of one table.
    fn copy_range<'a>(
        &'a mut self,
        table: &'a PublishedTable,
        range: BlockRange,
        plan: &'a CopyPlan,
    ) -> Asked<'a, Box<dyn CopyData + 'a>>;

    /// Starts to read the published rows that have one of these keys.
    fn look_up<'a>(&'a mut self, wanted: LookUp<'a>) -> Asked<'a, Box<dyn FoundRows + 'a>>;

    /// Hashes of published rows of a table; `None` where they were to be hashed in an encoding that
    /// is not the publisher's.
    fn digest<'a>(&'a mut self, wanted: DigestOf<'a>) -> Asked<'a, Option<Digest>>;

    /// Ends the session, and with it its locks.
    fn close(self: Box<Self>) -> BoxFuture<'static, ()>;
}

/// Rows in COPY format, as they come.
pub trait CopyData: Send {
    /// The next pieces of the data, which may be cut anywhere: some hundred kilobytes at most,
    /// apart from one row that is larger. `None` is the end, and the data are complete.
    fn next(&mut self) -> Asked<'_, Option<Vec<Bytes>>>;

    /// How many rows the publisher has sent, at the end; `None` where that is not told (by a site
    /// of an earlier version).
    fn rows(&self) -> Option<u64>;
}

/// Rows that were looked up, as they come.
pub trait FoundRows: Send {
    /// The next rows, few of them (there may be none), each as often as a key names it. `None` is
    /// the end.
    fn next(&mut self) -> Asked<'_, Option<Vec<FoundRow>>>;
}

/// Rows to look up.
#[derive(Clone, Copy, Debug)]
pub struct LookUp<'a> {
    /// The table.
    pub table: &'a PublishedTable,
    /// How the published columns travel.
    pub plan: &'a CopyPlan,
    /// The columns that make the key, published ones.
    pub key_columns: &'a [String],
    /// Their values: as many in each key, in that order.
    pub keys: &'a [&'a Key],
}
