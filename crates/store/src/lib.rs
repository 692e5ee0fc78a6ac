//! The distributor's log: append, make durable, read from a position, forget what all have applied.
//!
//! [`LogStore`] is the contract; [`segmented`] is the embedded implementation. A store never looks
//! inside an entry's payload. Positions are ends of commit records and strictly increase.

#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
pub mod packs;
pub mod replica;
pub mod segmented;

pub use replica::{Replicate, SpillReceiver, StoredBlock, StoredKind, StoredReader};

use bytes::Bytes;
use farshore_model::{Applied, DictionaryId, Durable, Lsn, PgTime};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use tokio::sync::watch;

/// Names one transaction body that is kept outside the log because it arrived before its commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SpillId(pub u64);

/// What kind of thing an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A transaction whose header and body are the payload.
    Transaction,
    /// A transaction whose header is the payload and whose body is in a spill.
    Spilled(SpillId),
    /// No transaction: the publisher's log has been read up to this position. Payload is empty.
    Watermark,
}

/// One entry of a [`Batch`], without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryMeta {
    /// End of the commit record (or the watermark).
    pub position: Lsn,
    /// The publisher's clock at commit; retention by age and browsing by time use it.
    pub commit_time: PgTime,
    /// What the entry is.
    pub kind: EntryKind,
    /// Bytes of [`Batch::payload`] that belong to this entry; they follow the entry before it.
    pub payload_len: u32,
}

/// Consecutive entries that are appended together and become durable together.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Entries with strictly increasing positions.
    pub entries: Vec<EntryMeta>,
    /// The entries' payloads, one after the other.
    pub payload: Vec<u8>,
    /// Every definition that the entries' payloads refer to.
    pub dictionary: Vec<DictionaryId>,
}

/// What a reader gets, in log order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// A definition. Always read before the first entry that refers to it, wherever reading starts;
    /// may be repeated.
    Definition(DictionaryId, Bytes),
    /// An entry.
    Entry(Entry),
}

/// An entry as read back. `payload` shares the block it was read with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// End of the commit record (or the watermark).
    pub position: Lsn,
    /// The publisher's clock at commit.
    pub commit_time: PgTime,
    /// What the entry is.
    pub kind: EntryKind,
    /// The payload as it was appended.
    pub payload: Bytes,
}

/// What a spill's reader gets, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpillItem {
    /// A definition, before the first chunk that refers to it.
    Definition(DictionaryId, Bytes),
    /// Bytes of the body; every chunk holds whole commands.
    Chunk(Bytes),
}

/// A subscription's claim on the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cursor {
    /// Subscription name.
    pub name: String,
    /// The log is kept from here on for this subscription.
    pub applied: Applied,
    /// Retention limits dropped entries this subscription still needed: the first position that
    /// the log still had afterwards. Such a subscription must be copied anew.
    pub expired: Option<Lsn>,
}

/// How much of the log is kept although a subscription still needs it, and how long at least.
/// What no cursor needs any more is dropped as soon as whole segments of it exist.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Retention {
    /// Entries older than this are dropped even if a cursor needs them; the cursor expires.
    pub age_max: Option<std::time::Duration>,
    /// When the log and its spills exceed this many bytes the oldest segments are dropped even if
    /// a cursor needs them; the cursor expires.
    pub bytes_max: Option<u64>,
}

/// Sizes and positions of a store at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreStatus {
    /// Everything after this position can still be read.
    pub start: Lsn,
    /// Newest durable position.
    pub durable: Durable,
    /// Bytes on disk of what the log holds: segments and spills, as [`Retention::bytes_max`] counts
    /// them. The few files kept for segments to come are beyond it.
    pub bytes_on_disk: u64,
    /// Segments on disk.
    pub segments: u64,
    /// Payload bytes appended since the store was opened, before compression.
    pub payload_bytes_appended: u64,
    /// Bytes those took on disk.
    pub stored_bytes_appended: u64,
    /// fdatasync calls since the store was opened.
    pub syncs: u64,
    /// The disk is full, or refuses for another reason that may pass: what the writer waits with,
    /// and what the operating system says. It goes on by itself when the disk takes it.
    pub waiting_for_room: Option<String>,
}

/// Why the store could not do what it was asked. Each message names the file.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// The operating system refused.
    #[error("cannot {action} {path}: {error}{}", make_room(error))]
    Io {
        /// Verb phrase.
        action: &'static str,
        /// The file.
        path: std::path::PathBuf,
        /// What the operating system said.
        error: Arc<std::io::Error>,
    },
    /// A file is not what it should be. Nothing was changed.
    #[error("store file {path} is damaged: {what}. {remedy}")]
    Damaged {
        /// The file.
        path: std::path::PathBuf,
        /// What is wrong, with the byte offset.
        what: String,
        /// What the operator can do.
        remedy: String,
    },
    /// A file was written by a newer Farshore.
    #[error(
        "store file {path} has format version {found}; this farshore reads up to {known}. Run the newer farshore, or start a new data_dir."
    )]
    Newer {
        /// The file.
        path: std::path::PathBuf,
        /// Version in the file.
        found: u32,
        /// Newest version this build reads.
        known: u32,
    },
    /// Another process has the store open.
    #[error(
        "store {path} is in use by another process (pid {pid}): a verb that somebody runs while no node does, such as farshore browse, or another node. Let it end, or stop it."
    )]
    Locked {
        /// The store's folder.
        path: std::path::PathBuf,
        /// The owner, as its lock file says.
        pid: String,
    },
    /// Reading was asked to start before the oldest entry kept.
    #[error("the log no longer holds what follows {wanted}: it now starts at {start}")]
    Dropped {
        /// Where the reader wanted to start.
        wanted: Lsn,
        /// Where the log starts.
        start: Lsn,
    },
    /// A batch's positions do not increase, or do not follow the log's end.
    #[error("entry position {position} does not follow the log's end {end}")]
    OutOfOrder {
        /// The offending position.
        position: Lsn,
        /// The log's end.
        end: Lsn,
    },
    /// A block of another site's log does not begin where this replica ends.
    #[error(
        "what follows {after} was to be added to a log that ends at {end}: something between is missing, or is here already"
    )]
    Hole {
        /// Where the block begins.
        after: Lsn,
        /// The log's end.
        end: Lsn,
    },
    /// An earlier failure closed the store for writing; reopen it after mending the cause.
    #[error(
        "the store takes no more since something failed: {}. See to that, and start this node again \
         (farshore run): nothing that was durable is lost",
        for_good(.0)
    )]
    Failed(Arc<StoreError>),
    /// A name that no cursor or spill has.
    #[error("the store has no {0}")]
    Unknown(String),
}

impl StoreError {
    /// Whether room on the disk is all that was missing.
    pub fn is_out_of_room(&self) -> bool {
        match self {
            StoreError::Io { error, .. } => is_out_of_room(error),
            StoreError::Damaged { .. }
            | StoreError::Newer { .. }
            | StoreError::Locked { .. }
            | StoreError::Dropped { .. }
            | StoreError::OutOfOrder { .. }
            | StoreError::Hole { .. }
            | StoreError::Failed(_)
            | StoreError::Unknown(_) => false,
        }
    }
}

/// A failure after which nothing goes on by itself.
fn for_good(error: &StoreError) -> String {
    match error {
        StoreError::Io { action, path, error } => {
            format!("cannot {action} {}: {error}", path.display())
        }
        error => error.to_string(),
    }
}

/// What to do when the disk is full.
fn make_room(error: &std::io::Error) -> &'static str {
    if is_out_of_room(error) {
        ". Free space on that disk: it goes on by itself, and nothing is lost meanwhile"
    } else {
        ""
    }
}

fn is_out_of_room(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded)
}

/// The note of the newest transaction that retention dropped.
const NOTE_NEWEST_DROPPED: &str = "newest.dropped";

/// The same, and up to where what was dropped is known: "position commit-time start". It holds also of
/// a log that comes from another site, and only as long as the log begins at `start` or before.
const NOTE_NEWEST_GONE: &str = "newest.gone";

/// Position and commit time of the newest transaction that was dropped from a store, noted where no
/// newer one was left in its log; `None` if that never happened. Of a replica it is not known.
pub fn newest_dropped(store: &dyn LogStore) -> Option<(Lsn, PgTime)> {
    let note = store.note(NOTE_NEWEST_DROPPED)?;
    let (position, commit_time) = note.split_once(' ')?;
    Some((position.parse().ok()?, PgTime(commit_time.parse().ok()?)))
}

/// A future that the caller boxes nothing for.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The log of one publication.
pub trait LogStore: Send + Sync + 'static {
    /// Names a definition (a relation version): the same bytes get the same id for as long as the
    /// log holds them; ids are never reused. Durable with the first batch that refers to it.
    fn define(&self, definition: &[u8]) -> DictionaryId;

    /// Hands a batch to the log. Waits while too many bytes are on their way to disk. Returning
    /// means *accepted*, never durable: watch [`LogStore::durable`].
    fn append(&self, batch: Batch) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Position of the last entry accepted: what is appended next must follow it.
    fn accepted_end(&self) -> Lsn;

    /// The end of what is durable; changes whenever a group commit ends. When the store fails for
    /// writing the sender is dropped; [`LogStore::failure`] then says why.
    fn durable(&self) -> watch::Receiver<Durable>;

    /// Why the store stopped taking writes, if it did.
    fn failure(&self) -> Option<StoreError>;

    /// Reads what is durable after `after`. Fails with [`StoreError::Dropped`] if that is gone.
    fn read_from(&self, after: Lsn) -> Result<Box<dyn LogReader>, StoreError>;

    /// Starts a body that arrives before its commit. Dropping the writer without
    /// [`SpillWriter::finish`] deletes it, as does a crash before an entry that names it is durable.
    fn begin_spill(&self) -> Result<Box<dyn SpillWriter>, StoreError>;

    /// Removes spills that are finished and that no entry names yet, as a writer that begins anew
    /// leaves them: it gives what they hold once more, as others.
    ///
    /// # Errors
    /// When a file cannot be removed; it stays until the store is opened again.
    fn discard_unnamed_spills(&self) -> Result<(), StoreError>;

    /// Spills that are being written now, oldest first.
    fn growing_spills(&self) -> watch::Receiver<Vec<SpillId>>;

    /// Reads a spill that is being written. What is read may never be committed, and nothing of it
    /// is durable: only who can take all of it back may use it before an entry names the spill.
    fn follow_spill(&self, spill: SpillId) -> Result<Box<dyn SpillFollower>, StoreError>;

    /// Reads the body of a spilled transaction.
    fn open_spill(&self, spill: SpillId) -> Result<Box<dyn SpillReader>, StoreError>;

    /// Registers a subscription, or returns its cursor if it is registered already. A new cursor
    /// starts at the durable end. Durable when it returns.
    fn register_cursor(&self, name: &str) -> Result<Cursor, StoreError>;

    /// Moves a cursor to where its subscription must read from again: forwards as it applies, and
    /// also clears `expired`. Backwards is refused as [`StoreError::Dropped`] if the log is gone.
    fn move_cursor(&self, name: &str, applied: Applied) -> Result<(), StoreError>;

    /// Ends a subscription's claim.
    fn drop_cursor(&self, name: &str) -> Result<(), StoreError>;

    /// All cursors, by name.
    fn cursors(&self) -> Vec<Cursor>;

    /// Drops whole segments (and spills) that nothing needs or that limits forbid to keep, never
    /// blocking readers or writers. Returns the cursors it expired; the caller says so loudly.
    fn enforce_retention(&self, retention: &Retention) -> Result<Vec<Cursor>, StoreError>;

    /// Reads a small durable note (such as the publisher's system identifier).
    fn note(&self, key: &str) -> Option<String>;

    /// Writes a small durable note; durable when it returns.
    fn set_note(&self, key: &str, value: &str) -> Result<(), StoreError>;

    /// Sizes and positions now.
    fn status(&self) -> StoreStatus;
}

/// What a reader can tell without a file.
#[derive(Debug)]
pub enum InMemory {
    /// The next items.
    Items(Vec<Item>),
    /// Everything that was durable has been read.
    End,
    /// What comes next has to be read from a file.
    Elsewhere,
}

/// Reads a log forwards. Blocking: call it from a thread that may wait for the disk.
pub trait LogReader: Send {
    /// As [`LogReader::next_block`], as far as that needs no file: never waits for the disk.
    fn next_in_memory(&mut self) -> Result<InMemory, StoreError> {
        Ok(InMemory::Elsewhere)
    }

    /// The next block of items, or `None` when everything durable has been read (wait on
    /// [`LogStore::durable`], then call again). Memory is bounded by one block (256 KiB before
    /// compression, or one entry where that is larger).
    fn next_block(&mut self) -> Result<Option<Vec<Item>>, StoreError>;
}

/// Writes a spill. Blocking, buffered: at most one block (256 KiB or one command) in memory.
pub trait SpillWriter: Send {
    /// The spill's name, to be put into the entry that commits it.
    fn id(&self) -> SpillId;

    /// Adds whole commands; `dictionary` lists definitions they refer to.
    fn write(&mut self, commands: &[u8], dictionary: &[DictionaryId]) -> Result<(), StoreError>;

    /// What is written from here on was sent by the publisher after the commit at `position`, as
    /// those who follow the spill are told.
    fn follows(&mut self, position: Lsn);

    /// Empties the buffer to the file (not synced), so that an idle spill holds no memory.
    fn flush(&mut self) -> Result<(), StoreError>;

    /// Makes the body durable. The spill now waits for an entry that names it.
    fn finish(self: Box<Self>) -> Result<SpillId, StoreError>;
}

/// Reads a spill's body from its start. Blocking.
pub trait SpillReader: Send {
    /// The next items (at most one block), or `None` at the end.
    fn next_block(&mut self) -> Result<Option<Vec<SpillItem>>, StoreError>;
}

/// How far a spill that is being written has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Growth {
    /// Where what can be read ends, in bytes of the file.
    pub end: u64,
    /// The publisher sent all of that after the commit at this position, and what it had committed
    /// before has positions up to it. (In a replica: up to it there is all that had crossed.)
    pub after: Lsn,
    /// There will be no more: an entry that names the spill comes next, or none.
    pub finished: bool,
}

/// Reads a spill while it is being written. Blocking.
pub trait SpillFollower: Send {
    /// How far it has come. The sender is gone when the spill was finished, or was given up and
    /// will never be.
    fn growth(&self) -> watch::Receiver<Growth>;

    /// Whether an entry that names this number now means the spill that is followed, which is
    /// finished. A replica is given a number twice when its upstream store was set back: what was
    /// finished under it then, and never named, is replaced.
    fn has_the_number(&self) -> bool;

    /// The next items (at most one block) of what was there at `growth`, or `None` when all that
    /// was read.
    fn next_block(&mut self, growth: Growth) -> Result<Option<Vec<SpillItem>>, StoreError>;
}
