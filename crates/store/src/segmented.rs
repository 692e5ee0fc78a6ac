//! The embedded store: segments on local disk.
//!
//! ```text
//! <dir>/LOCK                      flock and pid of the owner
//! <dir>/cursors, <dir>/notes      small files, replaced as a whole (`folder.rs`)
//! <dir>/<start lsn, 16 hex>.seg   segments (`segment.rs`), made of blocks (`block.rs`)
//! <dir>/<start lsn, 16 hex>.old   a dropped segment's file, kept for one to come (`old_files.rs`)
//! <dir>/<start lsn, 16 hex>.idx   advisory sparse index of a sealed segment (`index.rs`)
//! <dir>/<id, 16 hex>.spill        bodies that arrived before their commit (`spill.rs`)
//! ```
//!
//! Who does what: callers of [`LogStore::append`] put batches into a bounded queue (`queue.rs`);
//! one thread writes (`writer.rs`); readers read files on their own threads up to what the writer
//! published after an fsync (`reader.rs`), the newest blocks from memory (`recent.rs`); another thread saves cursors at leisure (`cursors.rs`).
//! Formats: `docs/formats/segment.md`, `docs/formats/spill.md`.

mod block;
mod cursors;
mod dictionary;
mod folder;
mod index;
mod newest;
mod old_files;
mod pressure;
mod queue;
mod reader;
mod recent;
mod recovery;
mod replica;
mod retention;
mod scan;
mod segment;
mod sink;
mod spill;
#[cfg(test)]
mod tests;
mod writer;

pub use folder::{give_to_owner, read_notes};
pub use recovery::{Action, Case, Finding, RecoveryReport, decide};

use crate::{
    Batch, BoxFuture, Cursor, EntryKind, LogReader, LogStore, Retention, SpillFollower, SpillId,
    SpillReader, SpillWriter, StoreError, StoreStatus,
};
use cursors::{Cursors, Notes};
use dictionary::Dictionary;
use farshore_model::{Applied, DictionaryId, Durable, Lsn, PgTime};
use newest::Newest;
use old_files::OldFiles;
use queue::{Queue, Queueable, Queued};
use recent::Recent;
use segment::{Segment, SegmentList, Written, lock};
use spill::{SegmentedSpillFollower, SegmentedSpillWriter, SpillError, SpillFile, Spills};
use std::collections::HashSet;
use std::hash::{BuildHasher, Hasher};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::watch;

/// Largest payload of one entry, in bytes.
pub const ENTRY_PAYLOAD_MAX: usize = 1 << 30;
/// What an entry is counted as in the queue beside its payload, in bytes.
const ENTRY_OVERHEAD: usize = 48;
/// Disk space is reserved at most so many bytes ahead.
const ALLOCATE_STEP_MAX: u64 = 8 << 20;

const REMEDY: &str = "Nothing was changed. Restore the file from a copy, or move the store's \
    folder away and start a new log; its subscriptions must then be copied anew";

/// How a store writes. The defaults suit production.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// A segment that has reached this many bytes is followed by a new one. At least 4 KiB.
    pub segment_bytes: u64,
    /// Bytes of entries compressed together, before compression; 4 KiB to 16 MiB. An entry larger
    /// than this has a block of its own.
    pub block_bytes: usize,
    /// zstd level, −7 to 22.
    pub zstd_level: i32,
    /// Bytes of batches that may wait for the disk. One batch may be larger; it then waits alone.
    pub queue_bytes_max: usize,
    /// How long a cursor's forward move may wait to be saved.
    pub cursor_save_interval: Duration,
    /// Retention rolls the active segment when nobody needs it and it has at least so many bytes
    /// (with its spills).
    pub roll_bytes_min: u64,
    /// Verify every block of every segment when opening. Otherwise older segments with a fitting
    /// index are verified when they are read.
    pub verify_all: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            segment_bytes: 64 << 20,
            block_bytes: 256 << 10,
            zstd_level: 1,
            queue_bytes_max: 8 << 20,
            cursor_save_interval: Duration::from_secs(1),
            roll_bytes_min: 1 << 20,
            verify_all: false,
        }
    }
}

impl Options {
    fn bounded(mut self) -> Options {
        self.segment_bytes = self.segment_bytes.max(4 << 10);
        self.block_bytes = self.block_bytes.clamp(4 << 10, 16 << 20);
        self.zstd_level = self.zstd_level.clamp(-7, 22);
        self
    }

    fn allocate_step(&self) -> u64 {
        (self.segment_bytes / 8).clamp(64 << 10, ALLOCATE_STEP_MAX)
    }
}

/// The embedded store. Dropping it writes what was accepted, saves the cursors and lets go of the
/// folder (once open spill writers are dropped too).
#[derive(Debug)]
pub struct SegmentedStore {
    log: Arc<Log>,
    durable: watch::Receiver<Durable>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Counters {
    payload_bytes: AtomicU64,
    stored_bytes: AtomicU64,
    syncs: AtomicU64,
}

/// What the store's threads share. Lock order: `retaining`, cursor state, segment list, one
/// segment's `published`, spills; the locks of the dictionary, the compressors, the newest blocks,
/// the newest transaction and the old files are innermost.
struct Log {
    dir: PathBuf,
    options: Options,
    segments: Arc<SegmentList>,
    dictionary: Mutex<Dictionary>,
    spills: Mutex<Spills>,
    cursors: Cursors,
    notes: Notes,
    newest: Mutex<Newest>,
    /// Blocks of another site's log have come, which are not looked into as they come.
    takes_stored: AtomicBool,
    queue: Arc<Queue>,
    counters: Counters,
    /// The last position that an fsync has covered.
    synced_end: AtomicU64,
    failure: Mutex<Option<StoreError>>,
    /// What the log that this one is a replica of has told of the next entries.
    told: Mutex<replica::Told>,
    /// Held while retention works.
    retaining: Mutex<()>,
    old_files: Arc<OldFiles>,
    /// Compression contexts that spill writers take turns with.
    compressors: Mutex<Vec<sink::Compressor>>,
    #[cfg(test)]
    fail_sync: Arc<std::sync::atomic::AtomicBool>,
    _lock: folder::FolderLock,
}

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Log").field("dir", &self.dir).finish_non_exhaustive()
    }
}

impl Log {
    /// Closes the store for writing for good.
    fn fail(&self, error: StoreError) {
        lock(&self.failure).get_or_insert(error);
        self.queue.ended();
    }

    fn failed(&self) -> StoreError {
        let failure = lock(&self.failure).clone();
        StoreError::Failed(Arc::new(failure.unwrap_or_else(|| {
            io_error("write", &self.dir)(std::io::Error::other("the store is closed"))
        })))
    }
}

fn io_error<'a>(
    action: &'static str,
    path: &'a Path,
) -> impl Fn(std::io::Error) -> StoreError + 'a {
    move |error| StoreError::Io { action, path: path.to_owned(), error: Arc::new(error) }
}

fn damaged(path: &Path, what: String) -> StoreError {
    damaged_with(path, what, REMEDY)
}

fn damaged_with(path: &Path, what: String, remedy: &str) -> StoreError {
    StoreError::Damaged { path: path.to_owned(), what, remedy: remedy.to_owned() }
}

/// A random number; the standard library seeds its hashers from the operating system.
fn random_id() -> u64 {
    let mut hasher = std::hash::RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish()
}

impl SegmentedStore {
    /// Opens the store in `dir`, creating it if it is not there, and mends what a crash left.
    ///
    /// # Errors
    /// [`StoreError::Locked`] if another process (or an unfinished spill writer of this one) has
    /// it; [`StoreError::Damaged`] or [`StoreError::Newer`] with nothing changed;
    /// [`StoreError::Io`].
    pub fn open(
        dir: &Path,
        options: Options,
    ) -> Result<(Arc<SegmentedStore>, RecoveryReport), StoreError> {
        let options = options.bounded();
        std::fs::create_dir_all(dir).map_err(io_error("create folder", dir))?;
        let folder_lock = folder::FolderLock::take(dir)?;
        let recovered = recovery::recover(dir, &options)?;
        let report = recovered.report;
        let end = report.end;
        let last = recovered.segments.last();
        let tail = recovered.tail.zip(last).map(|(tail, last)| (tail, last.blocks));
        let segments = recovered.segments.into_iter().map(|mut segment| {
            segment.published.written = Written::found(&segment.path);
            Arc::new(Segment {
                sequence: segment.sequence,
                start: segment.start,
                path: segment.path,
                published: Mutex::new(segment.published),
            })
        });
        let segments = Arc::new(SegmentList {
            store_id: recovered.store_id,
            segments: Mutex::new(segments.collect()),
            recent: Recent::default(),
        });
        let spills = Spills::recovered(recovered.next_spill, recovered.spills);
        let cursors = Cursors::new(dir.join("cursors"), recovered.store_id, recovered.cursors);
        let log = Arc::new(Log {
            dir: dir.to_owned(),
            segments,
            dictionary: Mutex::new(recovered.dictionary),
            spills: Mutex::new(spills),
            cursors,
            notes: Notes::new(dir.join("notes"), recovered.notes),
            newest: Mutex::default(),
            takes_stored: AtomicBool::new(false),
            queue: Arc::new(Queue::new(options.queue_bytes_max, end)),
            options,
            counters: Counters::default(),
            synced_end: AtomicU64::new(end.0),
            failure: Mutex::new(None),
            told: Mutex::default(),
            retaining: Mutex::new(()),
            old_files: Arc::default(),
            compressors: Mutex::new(Vec::new()),
            #[cfg(test)]
            fail_sync: Arc::default(),
            _lock: folder_lock,
        });
        let active = match tail {
            Some((tail, blocks)) => log.resume(tail, blocks, end)?,
            None => {
                let active = writer::create_segment(&log, 1, end)?;
                lock(&log.segments.segments).push_back(active.segment.clone());
                active
            }
        };
        let (sender, durable) = watch::channel(Durable(end));
        let writer = writer::Writer::new(log.clone(), sender, active)?;
        let mut store = SegmentedStore { log: log.clone(), durable, threads: Vec::new() };
        let for_thread = log.clone();
        store.spawn("store-writer", move || writer.run())?;
        store.spawn("store-cursors", move || {
            let interval = for_thread.options.cursor_save_interval;
            for_thread
                .cursors
                .keep_saved(interval, || Lsn(for_thread.synced_end.load(Ordering::Acquire)));
        })?;
        Ok((Arc::new(store), report))
    }

    fn spawn(
        &mut self,
        name: &str,
        body: impl FnOnce() + Send + 'static,
    ) -> Result<(), StoreError> {
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(body)
            .map_err(io_error("start a thread for", &self.log.dir))?;
        self.threads.push(thread);
        Ok(())
    }
}

impl SegmentedStore {
    /// Whether there are segments that retention could drop without beginning a new one.
    pub fn has_several_segments(&self) -> bool {
        lock(&self.log.segments.segments).len() > 1
    }

    /// Position and commit time of the newest transaction that the log has. Reads what was not
    /// looked through before: the newest segment, once, and what came since. Blocks on the disk.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn newest_transaction(&self) -> Result<Option<(Lsn, PgTime)>, StoreError> {
        self.log.newest_transaction()
    }

    /// As [`SegmentedStore::newest_transaction`]; of a log whose newest transaction was dropped that
    /// one, as far as it is known.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn newest_transaction_ever(&self) -> Result<Option<(Lsn, PgTime)>, StoreError> {
        self.log.newest_transaction_ever()
    }

    /// Position and commit time of the log's first transaction after `after`. Blocks on the disk.
    ///
    /// # Errors
    /// [`StoreError::Dropped`] if the log begins later; it cannot be read.
    pub fn first_transaction(&self, after: Lsn) -> Result<Option<(Lsn, PgTime)>, StoreError> {
        self.log.first_transaction(after)
    }

    /// Opens a finished spill.
    fn spill_file(&self, spill: SpillId) -> Result<SpillFile, StoreError> {
        let unknown = || StoreError::Unknown(format!("spill {}", spill.0));
        if !lock(&self.log.spills).finished.contains_key(&spill) {
            return Err(unknown());
        }
        let path = folder::spill_path(&self.log.dir, spill);
        match SpillFile::open(&path, self.log.segments.store_id, spill) {
            Ok(file) => Ok(file),
            Err(SpillError::Missing) if !lock(&self.log.spills).finished.contains_key(&spill) => {
                Err(unknown())
            }
            Err(SpillError::Missing) => Err(damaged(&path, "the file is missing".to_owned())),
            Err(SpillError::Damaged(what)) => Err(damaged(&path, what)),
            Err(SpillError::Newer(found)) => {
                Err(StoreError::Newer { path, found, known: segment::FORMAT_VERSION })
            }
            Err(SpillError::Io(error)) => Err(error),
        }
    }
}

impl Drop for SegmentedStore {
    fn drop(&mut self) {
        self.log.queue.close();
        self.log.cursors.stop();
        for thread in self.threads.drain(..) {
            // A panic was reported by the thread itself.
            let _ = thread.join();
        }
    }
}

impl Log {
    /// The newest segment as recovered, ready to be written on.
    fn resume(
        &self,
        tail: recovery::RecoveredTail,
        blocks: u64,
        last: Lsn,
    ) -> Result<writer::Active, StoreError> {
        let segment = lock(&self.segments.segments).back().cloned();
        let Some(segment) = segment else { return writer::create_segment(self, 1, last) };
        let end = lock(&segment.published).end;
        let start = sink::SinkStart {
            container: block::Container {
                store_id: self.segments.store_id,
                number: segment.sequence,
            },
            sequence: blocks,
            end,
            synced: end,
            allocated: end,
            allocate_step: self.options.allocate_step(),
        };
        let sink = sink::BlockSink::new(tail.file, &segment.path, start, &self.old_files)
            .waiting_with(&self.queue);
        #[cfg(test)]
        let sink = sink.failing_with(&self.fail_sync);
        let held: HashSet<DictionaryId> = tail.held.into_iter().collect();
        Ok(writer::Active { segment, sink, held, told: None, blocks, last })
    }

    /// Refuses a batch that could not be written or read again as it is.
    fn check(&self, batch: &Batch) -> Result<(), StoreError> {
        let invalid = |what: String| {
            let error = std::io::Error::new(std::io::ErrorKind::InvalidInput, what);
            io_error("append to", &self.dir)(error)
        };
        let mut before = None;
        let mut payload_len = 0;
        for entry in &batch.entries {
            if let Some(end) = before.filter(|end| entry.position <= *end) {
                return Err(StoreError::OutOfOrder { position: entry.position, end });
            }
            before = Some(entry.position);
            payload_len += entry.payload_len as usize;
            if entry.payload_len as usize > ENTRY_PAYLOAD_MAX {
                let position = entry.position;
                return Err(invalid(format!("the entry at {position} is larger than 1 GiB")));
            }
        }
        if payload_len != batch.payload.len() {
            let found = batch.payload.len();
            return Err(invalid(format!("a batch has {found} payload bytes, not {payload_len}")));
        }
        let dictionary = lock(&self.dictionary);
        match batch.dictionary.iter().find(|id| dictionary.get(**id).is_none()) {
            Some(id) => Err(StoreError::Unknown(format!("definition {}", id.0))),
            None => Ok(()),
        }
    }

    /// Marks the spills that entries commit; refuses one that is not finished or was committed.
    fn commit_spills(&self, named: &[SpillId]) -> Result<(), StoreError> {
        if named.is_empty() {
            return Ok(());
        }
        let mut spills = lock(&self.spills);
        let mut seen = HashSet::new();
        for spill in named {
            let waiting = spills.finished.get(spill).is_some_and(|known| !known.committed);
            if !waiting || !seen.insert(*spill) {
                return Err(StoreError::Unknown(format!("uncommitted spill {}", spill.0)));
            }
        }
        for spill in named {
            if let Some(known) = spills.finished.get_mut(spill) {
                known.committed = true;
            }
        }
        Ok(())
    }

    async fn append(&self, batch: Batch) -> Result<(), StoreError> {
        if batch.entries.is_empty() && batch.payload.is_empty() {
            return Ok(());
        }
        self.check(&batch)?;
        let bytes = batch.payload.len() + batch.entries.len() * ENTRY_OVERHEAD;
        let Some(permit) = self.queue.room_for(bytes).await else { return Err(self.failed()) };
        let named = batch.entries.iter().filter_map(|entry| match entry.kind {
            EntryKind::Spilled(spill) => Some(spill),
            EntryKind::Transaction | EntryKind::Watermark => None,
        });
        let spills = named.collect();
        self.push(Queued { content: Queueable::Batch(batch), permit }, spills)
    }

    /// Queues entries that commit these spills.
    fn push(&self, queued: Queued, spills: Vec<SpillId>) -> Result<(), StoreError> {
        self.commit_spills(&spills)?;
        let refused = match self.queue.push(queued) {
            Ok(true) => return Ok(()),
            Ok(false) => self.failed(),
            Err(error) => error,
        };
        let mut known = lock(&self.spills);
        for spill in spills {
            if let Some(spill) = known.finished.get_mut(&spill) {
                spill.committed = false;
            }
        }
        Err(refused)
    }

    fn save_cursors(&self) -> Result<(), StoreError> {
        self.cursors.save(Lsn(self.synced_end.load(Ordering::Acquire)))
    }

    fn move_cursor(&self, name: &str, applied: Applied) -> Result<(), StoreError> {
        let at_leisure = {
            let mut state = lock(&self.cursors.state);
            let start = self.segments.start();
            let Some(cursor) = state.by_name.get_mut(name) else {
                return Err(StoreError::Unknown(format!("cursor \"{name}\"")));
            };
            if applied.0 < start {
                return Err(StoreError::Dropped { wanted: applied.0, start });
            }
            if cursor.applied != applied || cursor.expired.is_some() {
                // A cursor on disk may lag but not lead.
                let at_leisure = cursor.applied <= applied && cursor.expired.is_none();
                cursor.applied = applied;
                cursor.expired = None;
                state.version += 1;
                state.owed |= !at_leisure;
            } else if !state.owed {
                return Ok(());
            }
            !state.owed
        };
        if at_leisure {
            self.cursors.save_soon();
            return Ok(());
        }
        self.save_cursors()
    }
}

impl LogStore for SegmentedStore {
    fn define(&self, definition: &[u8]) -> DictionaryId {
        lock(&self.log.dictionary).define(definition)
    }

    fn append(&self, batch: Batch) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(self.log.append(batch))
    }

    fn accepted_end(&self) -> Lsn {
        self.log.queue.accepted_end()
    }

    fn durable(&self) -> watch::Receiver<Durable> {
        self.durable.clone()
    }

    fn failure(&self) -> Option<StoreError> {
        lock(&self.log.failure).clone()
    }

    fn read_from(&self, after: Lsn) -> Result<Box<dyn LogReader>, StoreError> {
        Ok(Box::new(reader::SegmentedReader::open(self.log.segments.clone(), after)?.joined()))
    }

    fn begin_spill(&self) -> Result<Box<dyn SpillWriter>, StoreError> {
        Ok(Box::new(SegmentedSpillWriter::begin(self.log.clone())?))
    }

    fn discard_unnamed_spills(&self) -> Result<(), StoreError> {
        let unnamed: Vec<SpillId> = {
            let mut spills = lock(&self.log.spills);
            spills.finished.extract_if(|_, known| !known.committed).map(|(id, _)| id).collect()
        };
        let removed =
            unnamed.iter().map(|spill| folder::remove(&folder::spill_path(&self.log.dir, *spill)));
        // Each, whatever becomes of the others.
        removed.fold(Ok(()), Result::and)
    }

    fn growing_spills(&self) -> watch::Receiver<Vec<SpillId>> {
        lock(&self.log.spills).names_of_growing()
    }

    fn follow_spill(&self, spill: SpillId) -> Result<Box<dyn SpillFollower>, StoreError> {
        Ok(Box::new(SegmentedSpillFollower::open(&self.log, spill)?))
    }

    fn open_spill(&self, spill: SpillId) -> Result<Box<dyn SpillReader>, StoreError> {
        Ok(Box::new(self.spill_file(spill)?.into_reader()))
    }

    fn register_cursor(&self, name: &str) -> Result<Cursor, StoreError> {
        let (cursor, owed) = {
            let mut state = lock(&self.log.cursors.state);
            match state.by_name.get(name) {
                Some(cursor) => (cursor.clone(), state.owed),
                None => {
                    let applied = Applied(self.durable.borrow().0);
                    let cursor = Cursor { name: name.to_owned(), applied, expired: None };
                    state.by_name.insert(name.to_owned(), cursor.clone());
                    state.version += 1;
                    state.owed = true;
                    (cursor, true)
                }
            }
        };
        if owed {
            self.log.save_cursors()?;
        }
        Ok(cursor)
    }

    fn move_cursor(&self, name: &str, applied: Applied) -> Result<(), StoreError> {
        self.log.move_cursor(name, applied)
    }

    fn drop_cursor(&self, name: &str) -> Result<(), StoreError> {
        {
            let mut state = lock(&self.log.cursors.state);
            if state.by_name.remove(name).is_none() {
                return Err(StoreError::Unknown(format!("cursor \"{name}\"")));
            }
            state.version += 1;
        }
        self.log.save_cursors()
    }

    fn cursors(&self) -> Vec<Cursor> {
        lock(&self.log.cursors.state).by_name.values().cloned().collect()
    }

    fn enforce_retention(&self, retention: &Retention) -> Result<Vec<Cursor>, StoreError> {
        self.log.enforce_retention(retention)
    }

    fn note(&self, key: &str) -> Option<String> {
        self.log.notes.get(key)
    }

    fn set_note(&self, key: &str, value: &str) -> Result<(), StoreError> {
        self.log.notes.set(key, value)
    }

    fn status(&self) -> StoreStatus {
        let segments: Vec<_> = lock(&self.log.segments.segments).iter().cloned().collect();
        let segment_bytes: u64 = segments.iter().map(|s| lock(&s.published).end).sum();
        let spill_bytes: u64 = {
            let spills = lock(&self.log.spills);
            let finished: u64 = spills.finished.values().map(|spill| spill.bytes).sum();
            finished + spills.growing_bytes()
        };
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        StoreStatus {
            start: segments.first().map_or(Lsn::ZERO, |segment| segment.start),
            durable: *self.durable.borrow(),
            bytes_on_disk: segment_bytes + spill_bytes,
            segments: segments.len() as u64,
            payload_bytes_appended: count(&self.log.counters.payload_bytes),
            stored_bytes_appended: count(&self.log.counters.stored_bytes),
            syncs: count(&self.log.counters.syncs),
            waiting_for_room: self.log.queue.waiting_for_room(),
        }
    }
}
