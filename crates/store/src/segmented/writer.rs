//! The thread that writes: takes everything queued, compresses it into blocks, writes them, syncs
//! once, and only then lets readers and [`crate::LogStore::durable`] see it.

use super::block::{Container, Content, Kind};
use super::folder::{index_path, remove, segment_path, sync_dir};
use super::index::{IndexFile, SparseIndex};
use super::newest::Newest;
use super::pressure::Pressure;
use super::queue::{Queueable, Queued};
use super::recent::{BlockPlace, RecentBlock};
use super::scan::widen;
use super::segment::{
    ENTRY_HEADER_LEN, FILE_HEADER_LEN, FileHeader, Published, SEGMENT_MAGIC, Segment, Written,
    entry_header, lock, push_definition,
};
use super::sink::{BlockSink, Compressor, SinkStart};
use super::{Log, io_error};
use crate::{Batch, EntryKind, EntryMeta, SpillId, StoreError, StoredBlock};
use farshore_fault as fault;
use farshore_model::{DictionaryId, Durable, Lsn, PgTime};
use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tokio::sync::watch;

/// With the defect "acknowledge-before-fsync" only one group in so many is synced.
const DEFECT_SYNC_EVERY: u64 = 50;

/// The segment being written to.
pub(crate) struct Active {
    pub segment: Arc<Segment>,
    pub sink: BlockSink,
    /// Definitions that stand in this segment already.
    pub held: HashSet<DictionaryId>,
    /// In a replica, definitions that were added to those last.
    pub told: Option<Arc<[DictionaryId]>>,
    pub blocks: u64,
    /// Position of the last entry written to a block or added to `raw`.
    pub last: Lsn,
}

/// Written but not synced: what readers will see of it.
#[derive(Default)]
struct Unpublished {
    commit_times: Option<(PgTime, PgTime)>,
    spills: Vec<SpillId>,
    /// The newest transaction.
    newest: Option<(Lsn, PgTime)>,
    definitions: Vec<u64>,
    entries: Vec<(u64, Lsn)>,
    /// Blocks that a reader at the log's end need not read from the file.
    recent: Vec<RecentBlock>,
    anything: bool,
}

/// The block being filled.
#[derive(Default)]
struct Filling {
    raw: Vec<u8>,
    first: Option<Lsn>,
    after: Lsn,
    commit_times: Option<(PgTime, PgTime)>,
    entries: u32,
    spilled: u32,
    /// Definitions whose block goes first.
    definitions: Vec<DictionaryId>,
}

pub(crate) struct Writer {
    log: Arc<Log>,
    /// Dropped with the writer: that is how those who watch learn of the end.
    durable: watch::Sender<Durable>,
    compressor: Compressor,
    pressure: Pressure,
    active: Active,
    filling: Filling,
    unpublished: Unpublished,
    groups: u64,
}

/// However the thread ends, nobody is left waiting for it.
struct EndGuard(Arc<Log>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let error = std::io::Error::other("the store's writer thread panicked");
            self.0.fail(io_error("write", &self.0.dir)(error));
        }
        self.0.queue.ended();
    }
}

impl Writer {
    pub fn new(
        log: Arc<Log>,
        durable: watch::Sender<Durable>,
        active: Active,
    ) -> Result<Writer, StoreError> {
        let compressor =
            Compressor::new(log.options.zstd_level).map_err(io_error("compress for", &log.dir))?;
        Ok(Writer {
            log,
            durable,
            compressor,
            pressure: Pressure::default(),
            active,
            filling: Filling::default(),
            unpublished: Unpublished::default(),
            groups: 0,
        })
    }

    /// Writes until the queue is closed or something fails.
    pub fn run(mut self) {
        let _guard = EndGuard(self.log.clone());
        loop {
            let work = self.log.queue.take();
            let bytes = work.batches.iter().map(|queued| queued.content.len()).sum();
            self.pressure.at_hand(bytes, Instant::now());
            let last = work.last;
            if let Err(error) = self.write(work.batches, work.roll) {
                tracing::error!(%error, "the store stops taking writes");
                self.log.fail(error);
                return;
            }
            if last {
                // Or the next opening would look through what was reserved, or an older segment
                // left.
                if let Err(error) = self.active.sink.seal() {
                    tracing::warn!("{error}");
                }
                self.log.old_files.give_up();
                return;
            }
        }
    }

    fn write(
        &mut self,
        batches: impl IntoIterator<Item = Queued>,
        roll: Option<u64>,
    ) -> Result<(), StoreError> {
        for Queued { content, permit } in batches {
            if self.active.sink.end() >= self.log.options.segment_bytes && self.has_entries() {
                self.commit_group()?;
                self.roll()?;
            }
            match &content {
                Queueable::Batch(batch) => self.add_batch(batch)?,
                Queueable::Stored(block, needed) => self.add_stored(block, needed)?,
            }
            drop(content);
            drop(permit);
        }
        self.commit_group()?;
        if let Some(number) = roll {
            if self.has_entries() {
                self.roll()?;
            }
            self.log.queue.rolled(number);
        }
        Ok(())
    }

    fn has_entries(&self) -> bool {
        self.active.last > self.active.segment.start
    }

    fn add_batch(&mut self, batch: &Batch) -> Result<(), StoreError> {
        for id in &batch.dictionary {
            if self.active.held.insert(*id) {
                self.filling.definitions.push(*id);
            }
        }
        let block_bytes = self.log.options.block_bytes;
        let mut payload = batch.payload.as_slice();
        for meta in &batch.entries {
            // Lengths were checked when the batch was accepted.
            let (own, rest) = payload.split_at(meta.payload_len as usize);
            payload = rest;
            let len = ENTRY_HEADER_LEN + own.len();
            if self.filling.raw.len() + len > block_bytes {
                self.put_filling()?;
            }
            self.note_entry(meta);
            if len > block_bytes {
                self.put_alone(meta, own)?;
            } else {
                self.filling.raw.extend_from_slice(&entry_header(meta));
                self.filling.raw.extend_from_slice(own);
            }
        }
        self.log.counters.payload_bytes.fetch_add(batch.payload.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// A block of another store, as it is. Every segment holds what its own entries refer to, so
    /// where one begins here all that the block may refer to comes first.
    fn add_stored(
        &mut self,
        block: &StoredBlock,
        needed: &Arc<[DictionaryId]>,
    ) -> Result<(), StoreError> {
        self.put_filling()?;
        let same = self.active.told.as_ref().is_some_and(|told| Arc::ptr_eq(told, needed));
        if !same {
            for id in needed.iter() {
                if self.active.held.insert(*id) {
                    self.filling.definitions.push(*id);
                }
            }
            self.active.told = Some(needed.clone());
        }
        self.filling.first = Some(block.first);
        self.filling.after = self.active.last;
        self.filling.commit_times = Some(block.commit_times);
        self.filling.entries = block.items;
        self.filling.spilled = block.spilled.len() as u32;
        self.unpublished.spills.extend_from_slice(&block.spilled);
        self.active.last = block.last;
        if let Some(content) = self.describe_filling()? {
            let form = (block.zstd, block.raw_len);
            self.active.sink.put_stored(content, form, &block.payload, block.checksum)?;
        }
        self.log.counters.payload_bytes.fetch_add(u64::from(block.raw_len), Ordering::Relaxed);
        Ok(())
    }

    fn note_entry(&mut self, meta: &EntryMeta) {
        let filling = &mut self.filling;
        if filling.first.is_none() {
            filling.first = Some(meta.position);
            filling.after = self.active.last;
        }
        filling.commit_times = widen(filling.commit_times, meta.commit_time, meta.commit_time);
        filling.entries += 1;
        match meta.kind {
            EntryKind::Spilled(spill) => {
                filling.spilled += 1;
                self.unpublished.spills.push(spill);
            }
            EntryKind::Transaction | EntryKind::Watermark => {}
        }
        if meta.kind != EntryKind::Watermark {
            self.unpublished.newest = Some((meta.position, meta.commit_time));
        }
        self.active.last = meta.position;
    }

    /// Writes the definitions that the block being filled needs, and takes its description.
    fn describe_filling(&mut self) -> Result<Option<Content>, StoreError> {
        let Some(first) = self.filling.first.take() else { return Ok(None) };
        let after = self.filling.after;
        let wanted = std::mem::take(&mut self.filling.definitions);
        if !wanted.is_empty() {
            let mut raw = Vec::new();
            {
                let dictionary = lock(&self.log.dictionary);
                for id in &wanted {
                    // Known: `append` refuses a batch that names an unknown one.
                    if let Some(definition) = dictionary.get(*id) {
                        push_definition(&mut raw, *id, definition);
                    }
                }
            }
            let content = Content::without_entries(Kind::Definitions, after, wanted.len() as u32);
            self.unpublished.definitions.push(self.active.sink.end());
            self.active.sink.put(Some(&mut self.compressor), content, &raw)?;
            self.active.blocks += 1;
        }
        let (commit_time_min, commit_time_max) =
            self.filling.commit_times.take().unwrap_or_default();
        self.unpublished.entries.push((self.active.sink.end(), after));
        self.unpublished.commit_times =
            widen(self.unpublished.commit_times, commit_time_min, commit_time_max);
        self.unpublished.anything = true;
        self.active.blocks += 1;
        Ok(Some(Content {
            kind: Kind::Entries,
            after,
            first,
            last: self.active.last,
            commit_time_min,
            commit_time_max,
            entries: std::mem::take(&mut self.filling.entries),
            spilled: std::mem::take(&mut self.filling.spilled),
        }))
    }

    fn put_filling(&mut self) -> Result<(), StoreError> {
        if let Some(content) = self.describe_filling()? {
            let (sink, raw) = (&mut self.active.sink, &self.filling.raw);
            let at = sink.end();
            if self.pressure.wants_compression() {
                let (started, writing, before) = (Instant::now(), sink.writing(), sink.end());
                sink.put(Some(&mut self.compressor), content, raw)?;
                let stored = (sink.end() - before) as usize;
                let took = started.elapsed().saturating_sub(sink.writing() - writing);
                self.pressure.compressed(raw.len(), stored, took);
            } else {
                sink.put(None, content, raw)?;
            }
            let file_len = sink.end() - at;
            if self.log.segments.recent.is_wanted() {
                let next = Vec::with_capacity(raw.len());
                let raw = std::mem::replace(&mut self.filling.raw, next);
                let place = BlockPlace { sequence: self.active.segment.sequence, at };
                self.unpublished.recent.push(RecentBlock::new(place, file_len, content, raw));
            } else {
                self.filling.raw.clear();
            }
        }
        Ok(())
    }

    /// An entry too large to share a block: written from where it stands.
    fn put_alone(&mut self, meta: &EntryMeta, payload: &[u8]) -> Result<(), StoreError> {
        if let Some(content) = self.describe_filling()? {
            let prefix = entry_header(meta);
            self.active.sink.put_large(&mut self.compressor, content, &prefix, payload)?;
        }
        Ok(())
    }

    /// Makes everything added so far durable and visible.
    fn commit_group(&mut self) -> Result<(), StoreError> {
        self.put_filling()?;
        if !self.unpublished.anything {
            return Ok(());
        }
        fault::point("store.before-write");
        self.active.sink.write_staged()?;
        self.groups += 1;
        let postponed = fault::defect("acknowledge-before-fsync")
            && !self.groups.is_multiple_of(DEFECT_SYNC_EVERY);
        if !postponed {
            fault::point("store.before-fsync");
            let bytes = self.active.sink.unsynced();
            self.sync()?;
            self.pressure.written(bytes, self.active.sink.take_writing());
            fault::point("store.after-fsync");
        }
        self.publish();
        Ok(())
    }

    fn sync(&mut self) -> Result<(), StoreError> {
        self.active.sink.sync()?;
        self.log.counters.syncs.fetch_add(1, Ordering::Relaxed);
        self.log.synced_end.store(self.active.last.0, Ordering::Release);
        Ok(())
    }

    fn publish(&mut self) {
        let unpublished = std::mem::take(&mut self.unpublished);
        let last = self.active.last;
        {
            let mut published = lock(&self.active.segment.published);
            let end = self.active.sink.end();
            self.log.counters.stored_bytes.fetch_add(end - published.end, Ordering::Relaxed);
            published.end = end;
            published.last = last;
            published.written = Written::now();
            published.spills.extend(unpublished.spills);
            if let Some((min, max)) = unpublished.commit_times {
                published.commit_times = widen(published.commit_times, min, max);
            }
            if let Some(index) = &mut published.index {
                for offset in unpublished.definitions {
                    index.add_definitions(offset);
                }
                for (offset, after) in unpublished.entries {
                    index.add_entries(offset, after);
                }
            }
            if unpublished.newest.is_some() {
                *lock(&self.log.newest) = Newest::Known(unpublished.newest);
            }
            self.log.segments.recent.add(unpublished.recent);
            // Before the lock is let go: who reads an entry finds it told as durable, and who is
            // told finds it.
            self.durable.send_replace(Durable(last));
        }
    }

    /// Seals the active segment and begins the next. Everything added is durable already.
    fn roll(&mut self) -> Result<(), StoreError> {
        fault::point("store.before-roll");
        self.active.sink.seal()?;
        let old = self.active.segment.clone();
        self.save_index(&old);
        let next = self.create_when_the_disk_takes_it(old.sequence + 1)?;
        lock(&self.log.segments.segments).push_back(next.segment.clone());
        {
            // Only now: a reader that sees `sealed` goes on to the next segment in the list.
            let mut published = lock(&old.published);
            published.sealed = true;
            published.index = None;
        }
        self.active = next;
        fault::point("store.after-roll");
        Ok(())
    }

    fn create_when_the_disk_takes_it(&self, sequence: u64) -> Result<Active, StoreError> {
        let (mut waited, mut is_ours) = (false, false);
        loop {
            if is_ours {
                // What an attempt before this one made, and could not remove.
                let _ = std::fs::remove_file(segment_path(&self.log.dir, self.active.last));
            }
            let created = create_segment(&self.log, sequence, self.active.last);
            if let Err(StoreError::Io { error, .. }) = &created {
                is_ours |= error.kind() != std::io::ErrorKind::AlreadyExists;
            }
            match created {
                Err(error) if error.is_out_of_room() && self.log.old_files.give_up() => {}
                // Whatever else the system refuses may pass as well, and all is durable here.
                Err(error @ StoreError::Io { .. }) if self.log.queue.wait_for_room(&error) => {
                    waited = true;
                }
                created => {
                    if waited {
                        self.log.queue.found_room();
                    }
                    return created;
                }
            }
        }
    }

    fn save_index(&self, segment: &Segment) {
        let index = {
            let published = lock(&segment.published);
            IndexFile {
                store_id: self.log.segments.store_id,
                sequence: segment.sequence,
                end: published.end,
                blocks: self.active.blocks,
                last: published.last,
                commit_times: published.commit_times,
                spills: published.spills.clone(),
                sparse: published.index.clone().unwrap_or_default(),
            }
        };
        let path = index_path(&segment.path);
        if let Err(error) = index.write(&path) {
            // Readers do without and the next opening rebuilds it.
            tracing::warn!(%error, path = %path.display(), "a segment's index was not written");
        }
    }
}

/// Creates a segment file whose header and name are durable when this returns.
pub(crate) fn create_segment(log: &Log, sequence: u64, start: Lsn) -> Result<Active, StoreError> {
    let path = segment_path(&log.dir, start);
    let container = Container { store_id: log.segments.store_id, number: sequence };
    let header = FileHeader {
        container,
        start,
        next_dictionary_id: lock(&log.dictionary).next(),
        next_spill_id: lock(&log.spills).next,
        in_old_file: false,
    };
    let (file, allocated) = match begin_in_old_file(log, &path, &header)? {
        Some(begun) => begun,
        None => (begin_in_new_file(&path, &header)?, FILE_HEADER_LEN as u64),
    };
    if let Err(error) = sync_dir(&log.dir) {
        // So that it can be tried again under this name.
        let _ = std::fs::remove_file(&path);
        return Err(error);
    }
    let end = FILE_HEADER_LEN as u64;
    let segment = Arc::new(Segment {
        sequence,
        start,
        path: path.clone(),
        published: Mutex::new(Published {
            end,
            last: start,
            commit_times: None,
            spills: Vec::new(),
            sealed: false,
            index: Some(SparseIndex::default()),
            written: Written::now(),
        }),
    });
    let sink_start = SinkStart {
        container,
        sequence: 0,
        end,
        synced: end,
        allocated,
        allocate_step: log.options.allocate_step(),
    };
    let sink = BlockSink::new(file, &path, sink_start, &log.old_files).waiting_with(&log.queue);
    #[cfg(test)]
    let sink = sink.failing_with(&log.fail_sync);
    Ok(Active { segment, sink, held: HashSet::new(), told: None, blocks: 0, last: start })
}

fn begin_in_new_file(path: &Path, header: &FileHeader) -> Result<File, StoreError> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(io_error("create", path))?;
    if let Err(error) = write_header(&file, path, header) {
        // So that it can be tried again under this name.
        let _ = std::fs::remove_file(path);
        return Err(error);
    }
    Ok(file)
}

/// The file and its length; `None` if there is no old file, or it is not to be had. It gets the
/// segment's name only when the header is durable: then what else stands in it is known as old.
fn begin_in_old_file(
    log: &Log,
    path: &Path,
    header: &FileHeader,
) -> Result<Option<(File, u64)>, StoreError> {
    let Some(old) = log.old_files.take() else { return Ok(None) };
    let begin = || {
        let file =
            OpenOptions::new().read(true).write(true).open(&old).map_err(io_error("open", &old))?;
        let len = file.metadata().map_err(io_error("examine", &old))?.len();
        write_header(&file, &old, &FileHeader { in_old_file: true, ..*header })?;
        fault::point("store.before-rename");
        std::fs::rename(&old, path).map_err(io_error("rename", &old))?;
        fault::point("store.after-rename");
        Ok((file, len))
    };
    match begin() {
        Ok(begun) => Ok(Some(begun)),
        Err::<_, StoreError>(error) => {
            tracing::warn!("an old segment's file is not used again: {error}");
            remove(&old)?;
            Ok(None)
        }
    }
}

fn write_header(file: &File, path: &Path, header: &FileHeader) -> Result<(), StoreError> {
    file.write_all_at(&header.encode(SEGMENT_MAGIC), 0).map_err(io_error("write", path))?;
    file.sync_all().map_err(io_error("sync", path))
}
