//! Blocks out of one store and into another, as they stand on disk.

use super::block::{self, BlockError, BlockReader, Container, Content, Header, Kind};
use super::queue::{Queueable, Queued};
use super::reader::SegmentedReader;
use super::segment::{definitions, lock, walk_entries};
use super::spill::{SegmentedSpillWriter, SpillFile};
use super::{ENTRY_OVERHEAD, Log, SegmentedStore, io_error};
use crate::replica::{Replicate, SpillReceiver, StoredBlock, StoredKind, StoredReader};
use crate::{BoxFuture, EntryKind, SpillId, StoreError};
use bytes::Bytes;
use farshore_model::{DictionaryId, Lsn};
use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What a replica has been told that the next entries may refer to.
#[derive(Debug, Default)]
pub(crate) struct Told {
    /// The segment of the other store that it was told in.
    container: u64,
    /// Shared with the blocks on their way to disk; another one whenever it has grown.
    definitions: Arc<[DictionaryId]>,
}

impl Content {
    fn of_stored(stored: &StoredBlock) -> Content {
        Content {
            kind: match stored.kind {
                StoredKind::Entries => Kind::Entries,
                StoredKind::Definitions => Kind::Definitions,
                StoredKind::Chunk => Kind::Chunk,
            },
            after: stored.after,
            first: stored.first,
            last: stored.last,
            commit_time_min: stored.commit_times.0,
            commit_time_max: stored.commit_times.1,
            entries: stored.items,
            spilled: stored.spilled.len() as u32,
        }
    }
}

/// A block as it stands in `file`.
pub(crate) fn read_stored(
    blocks: &mut BlockReader,
    file: &File,
    at: u64,
    header: &Header,
) -> Result<StoredBlock, BlockError> {
    let (payload, checksum) = blocks.read_stored(file, at, header)?;
    let content = header.content;
    let kind = match content.kind {
        Kind::Entries => StoredKind::Entries,
        Kind::Definitions => StoredKind::Definitions,
        Kind::Chunk => StoredKind::Chunk,
        Kind::Footer => return Err(BlockError::Bad("a footer stands among the blocks")),
    };
    let mut stored = StoredBlock {
        kind,
        container: header.container.number,
        after: content.after,
        first: content.first,
        last: content.last,
        commit_times: (content.commit_time_min, content.commit_time_max),
        items: content.entries,
        spilled: Vec::new(),
        zstd: header.zstd,
        raw_len: header.raw_len,
        checksum,
        payload,
    };
    if content.spilled > 0 {
        let raw = stored.raw().map_err(BlockError::Bad)?;
        stored.spilled = spills_named(&raw).ok_or(BlockError::Bad("the entries are malformed"))?;
    }
    Ok(stored)
}

/// The spills that entries name.
fn spills_named(raw: &[u8]) -> Option<Vec<SpillId>> {
    let mut spills = Vec::new();
    walk_entries(raw, |entry, _| match entry.kind {
        EntryKind::Spilled(spill) => spills.push(spill),
        EntryKind::Transaction | EntryKind::Watermark => {}
    })?;
    Some(spills)
}

/// Reads a spill's blocks, without its footer.
struct StoredSpillReader {
    spill: SpillFile,
    blocks: BlockReader,
    at: u64,
}

impl StoredReader for StoredSpillReader {
    fn next_stored(&mut self) -> Result<Option<StoredBlock>, StoreError> {
        let (file, container, end) = self.spill.blocks();
        if self.at >= end {
            return Ok(None);
        }
        let at = self.at;
        let read = read_next(&mut self.blocks, file, at, end, container);
        let (stored, len) = read.map_err(|error| error.into_store_error(self.spill.path(), at))?;
        self.at += len;
        Ok(Some(stored))
    }

    fn pass_over(&mut self) -> Result<bool, StoreError> {
        let (file, container, end) = self.spill.blocks();
        if self.at >= end {
            return Ok(false);
        }
        let header = own_header(file, self.at, end, container);
        let header = header.map_err(|error| error.into_store_error(self.spill.path(), self.at))?;
        self.at += header.block_len();
        Ok(true)
    }

    fn bytes_on_disk(&self) -> Option<u64> {
        Some(self.spill.bytes)
    }
}

fn own_header(file: &File, at: u64, end: u64, container: Container) -> Result<Header, BlockError> {
    let header = block::read_header(file, at, end)?;
    if header.container != container {
        return Err(BlockError::Bad("the block belongs to another file"));
    }
    Ok(header)
}

fn read_next(
    blocks: &mut BlockReader,
    file: &File,
    at: u64,
    end: u64,
    container: Container,
) -> Result<(StoredBlock, u64), BlockError> {
    let header = own_header(file, at, end, container)?;
    Ok((read_stored(blocks, file, at, &header)?, header.block_len()))
}

impl Log {
    fn not_a_replica(&self, what: &str) -> StoreError {
        let error = std::io::Error::new(std::io::ErrorKind::InvalidData, what.to_owned());
        io_error("take a block of another site into", &self.dir)(error)
    }

    /// Takes in the definitions of a block, under the ids that they have.
    fn adopt_definitions(
        &self,
        block: &StoredBlock,
    ) -> Result<Vec<(DictionaryId, Bytes)>, StoreError> {
        let raw = block.raw().map_err(|what| self.not_a_replica(what))?;
        let found = definitions(&raw)
            .ok_or_else(|| self.not_a_replica("a block's definitions are malformed"))?;
        let mut dictionary = lock(&self.dictionary);
        for (id, definition) in &found {
            if dictionary.get(*id).is_some_and(|known| known != definition) {
                let what = format!("definition {} is another one here", id.0);
                return Err(self.not_a_replica(&what));
            }
            dictionary.restore(*id, definition);
        }
        Ok(found)
    }

    async fn append_stored(&self, block: StoredBlock) -> Result<(), StoreError> {
        let needed = match block.kind {
            StoredKind::Chunk => return Err(self.not_a_replica("a piece of a spill in the log")),
            StoredKind::Definitions => {
                let found = self.adopt_definitions(&block)?;
                let mut told = lock(&self.told);
                told.in_segment(block.container);
                told.add(found.iter().map(|(id, _)| *id));
                return Ok(());
            }
            StoredKind::Entries => {
                let mut told = lock(&self.told);
                told.in_segment(block.container);
                told.definitions.clone()
            }
        };
        // Before it is there: retention looks into what it drops.
        self.takes_stored.store(true, Ordering::Release);
        let bytes = block.payload.len() + block.items as usize * ENTRY_OVERHEAD;
        let Some(permit) = self.queue.room_for(bytes).await else { return Err(self.failed()) };
        let spills = block.spilled.clone();
        let content = Queueable::Stored(block, needed);
        self.push(Queued { content, permit }, spills)
    }
}

impl Told {
    /// What an earlier segment held is held no more: each stands by itself.
    fn in_segment(&mut self, container: u64) {
        if self.container != container {
            *self = Told { container, definitions: Arc::default() };
        }
    }

    fn add(&mut self, definitions: impl Iterator<Item = DictionaryId>) {
        let mut all = self.definitions.to_vec();
        all.extend(definitions);
        all.sort_unstable();
        all.dedup();
        self.definitions = all.into();
    }
}

/// Takes a spill under the id that it has elsewhere.
struct Receiver {
    log: Arc<Log>,
    writer: Box<SegmentedSpillWriter>,
}

impl SpillReceiver for Receiver {
    fn take(&mut self, block: StoredBlock) -> Result<(), StoreError> {
        match block.kind {
            StoredKind::Definitions => {
                let found: BTreeMap<_, _> =
                    self.log.adopt_definitions(&block)?.into_iter().collect();
                self.writer.put_stored(Content::of_stored(&block), &block, found)
            }
            StoredKind::Chunk => {
                self.writer.put_stored(Content::of_stored(&block), &block, BTreeMap::new())
            }
            StoredKind::Entries => Err(self.log.not_a_replica("entries in a spill")),
        }
    }

    fn finish(self: Box<Self>) -> Result<SpillId, StoreError> {
        crate::SpillWriter::finish(self.writer)
    }
}

impl Replicate for SegmentedStore {
    fn log_id(&self) -> u64 {
        self.log.segments.store_id
    }

    fn read_stored(&self, after: Lsn) -> Result<Box<dyn StoredReader>, StoreError> {
        Ok(Box::new(SegmentedReader::open(self.log.segments.clone(), after)?))
    }

    fn read_stored_spill(&self, spill: SpillId) -> Result<Box<dyn StoredReader>, StoreError> {
        let spill = self.spill_file(spill)?;
        let at = super::segment::FILE_HEADER_LEN as u64;
        Ok(Box::new(StoredSpillReader { spill, blocks: BlockReader::new(), at }))
    }

    fn append_stored(&self, block: StoredBlock) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            block.check().map_err(|what| self.log.not_a_replica(what))?;
            self.log.append_stored(block).await
        })
    }

    fn receive_spill(&self, spill: SpillId) -> Result<Box<dyn SpillReceiver>, StoreError> {
        let mut writer = SegmentedSpillWriter::receive(self.log.clone(), spill)?;
        // All that has crossed before it. Those that come in one block with its commit come later.
        crate::SpillWriter::follows(&mut writer, self.log.queue.accepted_end());
        Ok(Box::new(Receiver { log: self.log.clone(), writer: Box::new(writer) }))
    }
}
