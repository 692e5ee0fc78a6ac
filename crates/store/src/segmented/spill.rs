//! A spill: the body of one transaction, kept in a file of its own until its commit is known.
//!
//! ```text
//!       0    64  header as a segment's (see `segment.rs`), magic "FARSHSPL", start zero
//!      64     …  blocks (see `block.rs`): definitions, chunks
//!       …     …  one footer block: all definitions of the spill again
//!    -24      8  magic "FARSHEND"
//!    -16      8  offset of the footer block
//!     -8      4  zero
//!     -4      4  CRC32C over the 20 bytes before
//! ```
//!
//! The footer is written by `finish` alone, so a spill without one was never finished. What stands
//! before it can be read while the spill is being written ([`SegmentedSpillFollower`]).

use super::block::{self, BlockError, BlockReader, Container, Content, HEADER_LEN, Header, Kind};
use super::folder::{remove, spill_path, sync_dir};
use super::segment::{
    FILE_HEADER_LEN, Fields, FileHeader, HeaderError, SPILL_MAGIC, definitions, lock,
    push_definition,
};
use super::sink::{BlockSink, Compressor, SinkStart};
use super::{Log, damaged, io_error};
use crate::replica::{StoredBlock, StoredKind};
use crate::{Growth, SpillFollower, SpillId, SpillItem, SpillReader, SpillWriter, StoreError};
use bytes::Bytes;
use farshore_fault as fault;
use farshore_model::{DictionaryId, Lsn};
use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::watch;

const TRAILER_MAGIC: [u8; 8] = *b"FARSHEND";
const TRAILER_LEN: usize = 24;
/// Compression contexts kept for spills that will be written next.
const COMPRESSORS_KEPT: usize = 2;

/// A finished spill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Finished {
    /// File length.
    pub bytes: u64,
    /// An entry that was handed to the log names it.
    pub committed: bool,
    /// Which of the spills that had its number since the store was opened; zero was there before.
    pub instance: u64,
}

/// A spill that is being written.
#[derive(Debug)]
struct Growing {
    growth: watch::Receiver<Growth>,
    instance: u64,
}

/// What the store knows of its spills.
#[derive(Debug, Default)]
pub(crate) struct Spills {
    pub next: u64,
    pub finished: HashMap<SpillId, Finished>,
    /// Those that are being written.
    growing: BTreeMap<SpillId, Growing>,
    /// Counts those that were begun.
    begun: u64,
    /// Their names.
    names: watch::Sender<Vec<SpillId>>,
}

impl Spills {
    /// Those of a store that was just opened.
    pub fn recovered(next: u64, finished: HashMap<SpillId, Finished>) -> Spills {
        Spills { next, finished, ..Spills::default() }
    }

    /// What those take that are not finished.
    pub fn growing_bytes(&self) -> u64 {
        self.growing.values().map(|growing| growing.growth.borrow().end).sum()
    }

    /// See [`crate::LogStore::growing_spills`].
    pub fn names_of_growing(&self) -> watch::Receiver<Vec<SpillId>> {
        self.names.subscribe()
    }

    fn tell_names(&self) {
        self.names.send_replace(self.growing.keys().copied().collect());
    }
}

/// Writes one spill.
pub(crate) struct SegmentedSpillWriter {
    log: Arc<Log>,
    id: SpillId,
    instance: u64,
    /// `None` once an error made it unusable.
    sink: Option<BlockSink>,
    path: PathBuf,
    chunk: Vec<u8>,
    /// Definitions whose block goes before the chunk being built.
    pending: Vec<DictionaryId>,
    /// All definitions of this spill.
    held: BTreeMap<DictionaryId, Bytes>,
    /// Bytes of commands taken, before compression.
    command_bytes: u64,
    /// What those that follow the spill are told.
    growth: watch::Sender<Growth>,
    /// The newest commit before what is written now.
    after: Lsn,
}

impl SegmentedSpillWriter {
    pub fn begin(log: Arc<Log>) -> Result<SegmentedSpillWriter, StoreError> {
        let id = {
            let mut spills = lock(&log.spills);
            let id = SpillId(spills.next);
            spills.next += 1;
            id
        };
        SegmentedSpillWriter::create(log, id)
    }

    /// Begins a spill under an id that was given out elsewhere. What an earlier attempt left is
    /// replaced.
    pub fn receive(log: Arc<Log>, id: SpillId) -> Result<SegmentedSpillWriter, StoreError> {
        {
            let mut spills = lock(&log.spills);
            match spills.finished.get(&id) {
                Some(known) if known.committed => {
                    return Err(StoreError::Unknown(format!("uncommitted spill {}", id.0)));
                }
                Some(_) => drop(spills.finished.remove(&id)),
                None => {}
            }
            spills.next = spills.next.max(id.0.saturating_add(1));
        }
        let path = spill_path(&log.dir, id);
        match std::fs::remove_file(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(io_error("replace", &path)(error)),
        }
        SegmentedSpillWriter::create(log, id)
    }

    fn create(log: Arc<Log>, id: SpillId) -> Result<SegmentedSpillWriter, StoreError> {
        let path = spill_path(&log.dir, id);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .map_err(io_error("create", &path))?;
        let container = Container { store_id: log.segments.store_id, number: id.0 };
        let start =
            SinkStart { container, sequence: 0, end: 0, synced: 0, allocated: 0, allocate_step: 0 };
        let header = FileHeader {
            container,
            start: Lsn::ZERO,
            next_dictionary_id: lock(&log.dictionary).next(),
            next_spill_id: id.0 + 1,
            in_old_file: false,
        };
        let mut writer = SegmentedSpillWriter {
            sink: Some(BlockSink::new(file, &path, start, &log.old_files)),
            log,
            id,
            instance: 0,
            path,
            chunk: Vec::new(),
            pending: Vec::new(),
            held: BTreeMap::new(),
            command_bytes: 0,
            growth: watch::Sender::new(Growth::default()),
            after: Lsn::ZERO,
        };
        writer.with_sink(|sink, _| sink.put_plain(&header.encode(SPILL_MAGIC)))?;
        writer.grow();
        let mut spills = lock(&writer.log.spills);
        spills.begun += 1;
        let growing = Growing { growth: writer.growth.subscribe(), instance: spills.begun };
        writer.instance = growing.instance;
        spills.growing.insert(id, growing);
        spills.tell_names();
        drop(spills);
        Ok(writer)
    }

    /// Tells those that follow the spill what is in the file now: whole blocks.
    fn grow(&self) {
        let Some(sink) = &self.sink else { return };
        let (end, after) = (sink.written(), self.after);
        self.growth.send_if_modified(|growth| {
            let grows = end > growth.end;
            if grows {
                *growth = Growth { end, after, finished: false };
            }
            grows
        });
    }

    /// Runs one step on the file; after an error the spill refuses everything.
    fn with_sink(
        &mut self,
        step: impl FnOnce(&mut BlockSink, &mut Compressor) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let Some(sink) = &mut self.sink else {
            return Err(StoreError::Unknown(format!(
                "usable spill {} after its failure",
                self.id.0
            )));
        };
        let kept = lock(&self.log.compressors).pop();
        let mut compressor = match kept {
            Some(compressor) => compressor,
            None => Compressor::new(self.log.options.zstd_level)
                .map_err(io_error("compress for", &self.path))?,
        };
        let done = step(sink, &mut compressor);
        match &done {
            Ok(()) => {
                let mut kept = lock(&self.log.compressors);
                if kept.len() < COMPRESSORS_KEPT {
                    kept.push(compressor);
                }
            }
            Err(_) => self.sink = None,
        }
        done
    }

    fn put_definitions(&mut self, kind: Kind, ids: &[DictionaryId]) -> Result<(), StoreError> {
        let mut raw = Vec::new();
        let mut items = 0;
        for id in ids {
            if let Some(definition) = self.held.get(id) {
                push_definition(&mut raw, *id, definition);
                items += 1;
            }
        }
        let content = Content::without_entries(kind, Lsn::ZERO, items);
        self.with_sink(|sink, compressor| sink.put(Some(compressor), content, &raw))
    }

    fn put_chunk(&mut self, commands: &[u8]) -> Result<(), StoreError> {
        let pending = std::mem::take(&mut self.pending);
        if !pending.is_empty() {
            self.put_definitions(Kind::Definitions, &pending)?;
        }
        let content = Content::without_entries(Kind::Chunk, Lsn::ZERO, 0);
        let block_bytes = self.log.options.block_bytes;
        self.with_sink(|sink, compressor| {
            if commands.len() > block_bytes {
                sink.put_large(compressor, content, &[], commands)
            } else {
                sink.put(Some(compressor), content, commands)
            }
        })
    }

    /// Takes a block as it is stored elsewhere, and the definitions that it holds.
    pub fn put_stored(
        &mut self,
        content: Content,
        block: &StoredBlock,
        definitions: BTreeMap<DictionaryId, Bytes>,
    ) -> Result<(), StoreError> {
        if block.kind == StoredKind::Chunk {
            self.command_bytes += u64::from(block.raw_len);
        }
        self.held.extend(definitions);
        self.with_sink(|sink, _| {
            let form = (block.zstd, block.raw_len);
            sink.put_stored(content, form, &block.payload, block.checksum)?;
            if sink.unsynced() >= SYNC_BYTES {
                sink.write_staged()?;
                sink.sync()?;
            }
            Ok(())
        })?;
        self.grow();
        Ok(())
    }

    fn put_buffered(&mut self) -> Result<(), StoreError> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        let mut chunk = std::mem::take(&mut self.chunk);
        self.put_chunk(&chunk)?;
        chunk.clear();
        self.chunk = chunk;
        Ok(())
    }
}

/// Written bytes after which a flush also syncs them.
const SYNC_BYTES: u64 = 32 << 20;

impl SpillWriter for SegmentedSpillWriter {
    fn id(&self) -> SpillId {
        self.id
    }

    fn write(&mut self, commands: &[u8], dictionary: &[DictionaryId]) -> Result<(), StoreError> {
        if commands.is_empty() {
            return Ok(());
        }
        self.command_bytes += commands.len() as u64;
        if self.chunk.len() + commands.len() > self.log.options.block_bytes {
            self.put_buffered()?;
        }
        for id in dictionary {
            if self.held.contains_key(id) {
                continue;
            }
            let definition = lock(&self.log.dictionary).get(*id).cloned();
            let definition =
                definition.ok_or_else(|| StoreError::Unknown(format!("definition {}", id.0)))?;
            self.held.insert(*id, definition);
            self.pending.push(*id);
        }
        if commands.len() > self.log.options.block_bytes {
            self.put_chunk(commands)?;
        } else {
            self.chunk.extend_from_slice(commands);
        }
        self.grow();
        Ok(())
    }

    fn follows(&mut self, position: Lsn) {
        self.after = self.after.max(position);
    }

    fn flush(&mut self) -> Result<(), StoreError> {
        self.put_buffered()?;
        self.chunk = Vec::new();
        self.with_sink(|sink, _| {
            sink.write_staged()?;
            sink.shrink();
            // So that the commit of a transaction of many gigabytes finds little left to sync.
            if sink.unsynced() >= SYNC_BYTES {
                sink.sync()?;
            }
            Ok(())
        })?;
        self.grow();
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<SpillId, StoreError> {
        self.put_buffered()?;
        let footer_at = self.sink.as_ref().map_or(0, BlockSink::end);
        let all: Vec<_> = self.held.keys().copied().collect();
        self.put_definitions(Kind::Footer, &all)?;
        let mut bytes = 0;
        self.with_sink(|sink, _| {
            sink.put_plain(&trailer(footer_at))?;
            fault::point("spill.before-fsync");
            sink.sync()?;
            bytes = sink.end();
            Ok(())
        })?;
        sync_dir(&self.log.dir)?;
        fault::point("spill.after-fsync");
        let counters = &self.log.counters;
        counters.payload_bytes.fetch_add(self.command_bytes, Ordering::Relaxed);
        counters.stored_bytes.fetch_add(bytes, Ordering::Relaxed);
        let finished = Finished { bytes, committed: false, instance: self.instance };
        lock(&self.log.spills).finished.insert(self.id, finished);
        self.growth.send_replace(Growth { end: footer_at, after: self.after, finished: true });
        Ok(self.id)
    }
}

impl Drop for SegmentedSpillWriter {
    fn drop(&mut self) {
        let mut spills = lock(&self.log.spills);
        spills.growing.remove(&self.id);
        spills.tell_names();
        drop(spills);
        if !self.growth.borrow().finished {
            fault::point("spill.before-abort");
            if let Err(error) = remove(&self.path) {
                tracing::warn!(%error, "an aborted spill stays until the store is opened again");
            }
        }
    }
}

fn trailer(footer_at: u64) -> [u8; TRAILER_LEN] {
    let mut out = [0; TRAILER_LEN];
    out[..8].copy_from_slice(&TRAILER_MAGIC);
    out[8..16].copy_from_slice(&footer_at.to_le_bytes());
    let crc = crc32c::crc32c(&out[..20]);
    out[20..].copy_from_slice(&crc.to_le_bytes());
    out
}

/// A finished spill's ends, checked; its chunks are checked when they are read.
pub(crate) struct SpillFile {
    file: File,
    path: PathBuf,
    container: Container,
    footer_at: u64,
    footer: Header,
    pub bytes: u64,
}

/// Why a spill cannot be opened.
pub(crate) enum SpillError {
    Missing,
    Damaged(String),
    Newer(u32),
    Io(StoreError),
}

impl SpillFile {
    pub fn open(path: &Path, store_id: u64, id: SpillId) -> Result<SpillFile, SpillError> {
        let container = Container { store_id, number: id.0 };
        let io = |error| SpillError::Io(io_error("read", path)(error));
        let file = match File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(SpillError::Missing);
            }
            Err(error) => return Err(io(error)),
        };
        let bytes = file.metadata().map_err(io)?.len();
        if bytes < (FILE_HEADER_LEN + HEADER_LEN + TRAILER_LEN) as u64 {
            return Err(SpillError::Damaged(format!("{bytes} bytes are too few")));
        }
        let mut head = [0; FILE_HEADER_LEN];
        file.read_exact_at(&mut head, 0).map_err(io)?;
        match FileHeader::decode(&head, SPILL_MAGIC) {
            Ok(header) if header.container == container => {}
            Ok(_) => return Err(SpillError::Damaged("the header names another spill".into())),
            Err(HeaderError::Torn) => return Err(SpillError::Damaged("the header is torn".into())),
            Err(HeaderError::Newer(version)) => return Err(SpillError::Newer(version)),
        }
        let mut tail = [0; TRAILER_LEN];
        let blocks_end = bytes - TRAILER_LEN as u64;
        file.read_exact_at(&mut tail, blocks_end).map_err(io)?;
        let footer_at = Fields::new(&tail[8..]).u64().unwrap_or_default();
        if tail != trailer(footer_at) {
            return Err(SpillError::Damaged("the end of the file is not a spill's".into()));
        }
        let footer = match block::read_header(&file, footer_at, blocks_end) {
            Ok(footer)
                if footer.content.kind == Kind::Footer
                    && footer.container == container
                    && footer_at + footer.block_len() == blocks_end =>
            {
                footer
            }
            Ok(_) => return Err(SpillError::Damaged("the footer is another block".into())),
            Err(BlockError::Io(error)) => return Err(io(error)),
            Err(BlockError::Bad(what)) => return Err(SpillError::Damaged(what.to_owned())),
        };
        Ok(SpillFile { file, path: path.to_owned(), container, footer_at, footer, bytes })
    }

    /// All definitions of the spill.
    pub fn definitions(&self) -> Result<Vec<(DictionaryId, Bytes)>, SpillError> {
        let malformed = || SpillError::Damaged("the footer is malformed".to_owned());
        match BlockReader::new().read_payload(&self.file, self.footer_at, &self.footer) {
            Ok(raw) => definitions(&raw).ok_or_else(malformed),
            Err(BlockError::Io(error)) => Err(SpillError::Io(io_error("read", &self.path)(error))),
            Err(BlockError::Bad(what)) => Err(SpillError::Damaged(what.to_owned())),
        }
    }

    /// The file, whose blocks they are, and where they end.
    pub fn blocks(&self) -> (&File, Container, u64) {
        (&self.file, self.container, self.footer_at)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn into_reader(self) -> SegmentedSpillReader {
        SegmentedSpillReader { blocks: Blocks::new(self.container), spill: self }
    }
}

/// The blocks of one spill, one after the other.
struct Blocks {
    container: Container,
    blocks: BlockReader,
    at: u64,
    sequence: u64,
}

impl Blocks {
    fn new(container: Container) -> Blocks {
        Blocks { container, blocks: BlockReader::new(), at: FILE_HEADER_LEN as u64, sequence: 0 }
    }

    /// The next one, which ends at `end` or before.
    fn next(&mut self, file: &File, path: &Path, end: u64) -> Result<Vec<SpillItem>, StoreError> {
        let at = self.at;
        self.read(file, end).map_err(|error| error.into_store_error(path, at))
    }

    fn read(&mut self, file: &File, end: u64) -> Result<Vec<SpillItem>, BlockError> {
        let header = block::read_header(file, self.at, end)?;
        if header.container != self.container || header.sequence != self.sequence {
            return Err(BlockError::Bad("the block does not follow the one before it"));
        }
        let raw = self.blocks.read_payload(file, self.at, &header)?;
        let items = match header.content.kind {
            Kind::Chunk => vec![SpillItem::Chunk(raw)],
            Kind::Definitions => definitions(&raw)
                .ok_or(BlockError::Bad("the definitions are malformed"))?
                .into_iter()
                .map(|(id, definition)| SpillItem::Definition(id, definition))
                .collect(),
            Kind::Entries | Kind::Footer => {
                return Err(BlockError::Bad("a block of this kind cannot stand here"));
            }
        };
        self.at += header.block_len();
        self.sequence += 1;
        Ok(items)
    }
}

/// Reads one spill.
pub(crate) struct SegmentedSpillReader {
    spill: SpillFile,
    blocks: Blocks,
}

impl SpillReader for SegmentedSpillReader {
    fn next_block(&mut self) -> Result<Option<Vec<SpillItem>>, StoreError> {
        let SpillFile { file, path, footer_at, footer, .. } = &self.spill;
        if self.blocks.at == *footer_at {
            if footer.sequence != self.blocks.sequence {
                let what =
                    format!("at byte {}: blocks are missing before the footer", self.blocks.at);
                return Err(damaged(path, what));
            }
            return Ok(None);
        }
        self.blocks.next(file, path, *footer_at).map(Some)
    }
}

/// Reads one spill while it is being written. It stays readable when the spill is given up, whose
/// file then has no name any more.
pub(crate) struct SegmentedSpillFollower {
    log: Arc<Log>,
    id: SpillId,
    instance: u64,
    file: File,
    path: PathBuf,
    blocks: Blocks,
    growth: watch::Receiver<Growth>,
}

impl SegmentedSpillFollower {
    pub fn open(log: &Arc<Log>, id: SpillId) -> Result<SegmentedSpillFollower, StoreError> {
        let spills = lock(&log.spills);
        let unknown = || StoreError::Unknown(format!("spill {} that is being written", id.0));
        let growing = spills.growing.get(&id).ok_or_else(unknown)?;
        let (growth, instance) = (growing.growth.clone(), growing.instance);
        let path = spill_path(&log.dir, id);
        // Under the lock: whoever gives it up takes it from those that grow before its file.
        let file = File::open(&path).map_err(io_error("read", &path))?;
        let container = Container { store_id: log.segments.store_id, number: id.0 };
        let (log, blocks) = (log.clone(), Blocks::new(container));
        Ok(SegmentedSpillFollower { log, id, instance, file, path, blocks, growth })
    }
}

impl SpillFollower for SegmentedSpillFollower {
    fn growth(&self) -> watch::Receiver<Growth> {
        self.growth.clone()
    }

    fn has_the_number(&self) -> bool {
        let spills = lock(&self.log.spills);
        spills.finished.get(&self.id).is_some_and(|named| named.instance == self.instance)
    }

    fn next_block(&mut self, growth: Growth) -> Result<Option<Vec<SpillItem>>, StoreError> {
        if self.blocks.at >= growth.end {
            return Ok(None);
        }
        self.blocks.next(&self.file, &self.path, growth.end).map(Some)
    }
}
