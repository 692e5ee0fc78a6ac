//! Reads the log forwards, across segments, up to what is durable.

use super::block::{self, BlockError, BlockReader, Container, Content, Header, Kind};
use super::index::{IndexFile, IndexFound, SparseIndex};
use super::recent::BlockPlace;
use super::segment::{FILE_HEADER_LEN, Segment, SegmentList, definitions, lock, walk_entries};
use super::{folder, io_error, replica};
use crate::{Entry, InMemory, Item, LogReader, StoreError, StoredBlock, StoredReader};
use bytes::Bytes;
use farshore_model::Lsn;
use std::collections::VecDeque;
use std::fs::File;
use std::sync::Arc;

/// A reader's place in the log. It keeps its segment's file open, so a segment that retention
/// drops meanwhile is read on, until its file is used for another one.
pub(crate) struct SegmentedReader {
    list: Arc<SegmentList>,
    /// Entries up to here are passed over; moves with what was read.
    after: Lsn,
    place: Place,
    blocks: BlockReader,
    /// Its number among the readers that look for the newest blocks in memory.
    recent: Option<u64>,
}

struct Place {
    segment: Arc<Segment>,
    file: File,
    /// Definitions blocks that stand before the starting point and are still to be yielded.
    definitions: VecDeque<u64>,
    /// The next block.
    at: u64,
    /// End of the log before the next block. Blocks are chained by it, so that a block which is
    /// passed over unread cannot hide entries by a damaged header.
    chain: Lsn,
}

impl SegmentedReader {
    pub fn open(list: Arc<SegmentList>, after: Lsn) -> Result<SegmentedReader, StoreError> {
        let place = locate(&list, after)?;
        Ok(SegmentedReader { list, after, place, blocks: BlockReader::new(), recent: None })
    }

    /// Looks for the newest blocks in memory from here on.
    pub fn joined(mut self) -> SegmentedReader {
        self.recent = Some(self.list.recent.join(self.after));
        self
    }

    /// The next block, if it is in memory and holds something.
    fn next_recent(&mut self) -> Result<Option<Vec<Item>>, BlockError> {
        let Some(number) = self.recent else { return Ok(None) };
        while self.place.definitions.is_empty() {
            let place = BlockPlace { sequence: self.place.segment.sequence, at: self.place.at };
            let Some(block) = self.list.recent.get(number, self.after, place) else { break };
            if block.content.after != self.place.chain {
                return Err(BlockError::Bad("the block does not follow the one before it"));
            }
            self.place.chain = block.content.last;
            self.place.at += block.file_len;
            if block.content.last > self.after {
                let items = self.entries(&block.content, &block.raw)?;
                if !items.is_empty() {
                    return Ok(Some(items));
                }
            }
        }
        Ok(None)
    }

    fn entries(&mut self, content: &Content, raw: &Bytes) -> Result<Vec<Item>, BlockError> {
        // At most what the block can hold, whatever the header says.
        let mut items = Vec::with_capacity((content.entries as usize).min(raw.len()));
        let after = self.after;
        walk_entries(raw, |entry, payload| {
            if entry.position > after {
                items.push(Item::Entry(Entry {
                    position: entry.position,
                    commit_time: entry.commit_time,
                    kind: entry.kind,
                    payload: raw.slice(payload),
                }));
            }
        })
        .ok_or(BlockError::Bad("the entries are malformed"))?;
        self.after = content.last;
        Ok(items)
    }

    /// Moves to the next segment. If that was dropped, what follows `after` may still be there:
    /// the reader may be ahead of all that was dropped.
    fn advance(&mut self) -> Result<(), StoreError> {
        let next = match self.list.following(self.place.segment.sequence) {
            Ok(segment) => Place::at_start(segment)?,
            Err(_start) => None,
        };
        self.place = match next {
            Some(place) => place,
            None => locate(&self.list, self.after)?,
        };
        Ok(())
    }

    /// After something was wrong: whether the segment was dropped meanwhile, and its file perhaps
    /// used for another. Then the place is where what follows `after` stands now.
    fn left_dropped(&mut self) -> Result<bool, StoreError> {
        if self.list.has(self.place.segment.sequence) {
            return Ok(false);
        }
        self.place = locate(&self.list, self.after)?;
        Ok(true)
    }

    /// The header of the block at `at`: a definitions block from before the starting point, or the
    /// next. `None` if nothing in it is wanted.
    fn next_header(
        &mut self,
        at: u64,
        limit: u64,
        is_next: bool,
    ) -> Result<Option<Header>, BlockError> {
        let Place { segment, file, .. } = &self.place;
        let header = block::read_header(file, at, limit)?;
        let container = Container { store_id: self.list.store_id, number: segment.sequence };
        if header.container != container {
            return Err(BlockError::Bad("the block belongs to another file"));
        }
        if !is_next && header.content.kind != Kind::Definitions {
            return Err(BlockError::Bad("no definitions stand where they are said to"));
        }
        if is_next {
            if header.content.after != self.place.chain {
                return Err(BlockError::Bad("the block does not follow the one before it"));
            }
            self.place.chain = header.content.last;
            self.place.at = at + header.block_len();
        }
        let passed = header.content.kind == Kind::Entries && header.content.last <= self.after;
        Ok((!passed).then_some(header))
    }

    fn read_items(&mut self, at: u64, header: &Header) -> Result<Vec<Item>, BlockError> {
        let raw = self.blocks.read_payload(&self.place.file, at, header)?;
        match header.content.kind {
            Kind::Entries => self.entries(&header.content, &raw),
            Kind::Definitions => {
                let found =
                    definitions(&raw).ok_or(BlockError::Bad("the definitions are malformed"))?;
                Ok(found.into_iter().map(|(id, bytes)| Item::Definition(id, bytes)).collect())
            }
            Kind::Chunk | Kind::Footer => {
                Err(BlockError::Bad("a spill's block stands in a segment"))
            }
        }
    }

    fn read_stored(&mut self, at: u64, header: &Header) -> Result<StoredBlock, BlockError> {
        let content = header.content;
        match content.kind {
            Kind::Entries if content.after < self.after => {
                return Err(BlockError::Bad("no block begins where reading was to start"));
            }
            Kind::Entries | Kind::Definitions => {}
            Kind::Chunk | Kind::Footer => {
                return Err(BlockError::Bad("a spill's block stands in a segment"));
            }
        }
        let stored = replica::read_stored(&mut self.blocks, &self.place.file, at, header)?;
        if content.kind == Kind::Entries {
            self.after = content.last;
        }
        Ok(stored)
    }

    /// The next block that holds something, as `read` has it.
    fn next<T>(
        &mut self,
        read: impl Fn(&mut Self, u64, &Header) -> Result<T, BlockError>,
        is_something: impl Fn(&T) -> bool,
    ) -> Result<Option<T>, StoreError> {
        loop {
            let (limit, last, sealed) = {
                let published = lock(&self.place.segment.published);
                (published.end, published.last, published.sealed)
            };
            let before = self.place.definitions.pop_front();
            let at = before.unwrap_or(self.place.at);
            if at >= limit {
                if self.place.chain != last {
                    if self.left_dropped()? {
                        continue;
                    }
                    let what = format!(
                        "at byte {at}: its blocks end at {}, not at {last}",
                        self.place.chain
                    );
                    return Err(super::damaged(&self.place.segment.path, what));
                }
                if !sealed {
                    return Ok(None);
                }
                self.advance()?;
                continue;
            }
            let found = match self.next_header(at, limit, before.is_none()) {
                Ok(Some(header)) => read(self, at, &header).map(Some),
                Ok(None) => Ok(None),
                Err(error) => Err(error),
            };
            if found.is_err() && self.left_dropped()? {
                continue;
            }
            let found =
                found.map_err(|error| error.into_store_error(&self.place.segment.path, at))?;
            if let Some(found) = found.filter(&is_something) {
                return Ok(Some(found));
            }
        }
    }
}

/// The place where what follows `after` begins.
fn locate(list: &SegmentList, after: Lsn) -> Result<Place, StoreError> {
    let dropped = |start| StoreError::Dropped { wanted: after, start };
    loop {
        let segment = list.holding(after).map_err(dropped)?;
        if let Some(place) = Place::in_segment(segment.clone(), after, list.store_id)? {
            return Ok(place);
        }
        // Retention takes a segment from the list before it removes the file. So either the list
        // has moved on, or a foreign hand removed the file.
        if list.holding(after).is_ok_and(|again| again.sequence == segment.sequence) {
            return Err(super::damaged(&segment.path, "the file is missing".to_owned()));
        }
    }
}

impl Drop for SegmentedReader {
    fn drop(&mut self) {
        if let Some(number) = self.recent {
            self.list.recent.leave(number);
        }
    }
}

impl LogReader for SegmentedReader {
    fn next_in_memory(&mut self) -> Result<InMemory, StoreError> {
        let at = self.place.at;
        let found = self.next_recent();
        let found = found.map_err(|error| error.into_store_error(&self.place.segment.path, at))?;
        if let Some(items) = found {
            return Ok(InMemory::Items(items));
        }
        let Place { segment, definitions, at, chain, .. } = &self.place;
        let published = lock(&segment.published);
        let is_end = definitions.is_empty()
            && !published.sealed
            && (*at, *chain) == (published.end, published.last);
        Ok(if is_end { InMemory::End } else { InMemory::Elsewhere })
    }

    fn next_block(&mut self) -> Result<Option<Vec<Item>>, StoreError> {
        if let InMemory::Items(items) = self.next_in_memory()? {
            return Ok(Some(items));
        }
        self.next(SegmentedReader::read_items, |items| !items.is_empty())
    }
}

impl StoredReader for SegmentedReader {
    fn next_stored(&mut self) -> Result<Option<StoredBlock>, StoreError> {
        self.next(SegmentedReader::read_stored, |_| true)
    }
}

impl Place {
    fn open(segment: &Segment) -> Result<Option<File>, StoreError> {
        match File::open(&segment.path) {
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(io_error("open", &segment.path)(error)),
        }
    }

    /// At a segment's first block; `None` if the file is gone.
    fn at_start(segment: Arc<Segment>) -> Result<Option<Place>, StoreError> {
        let file = Place::open(&segment)?;
        let (at, chain) = (FILE_HEADER_LEN as u64, segment.start);
        Ok(file.map(|file| Place { segment, file, definitions: VecDeque::new(), at, chain }))
    }

    /// At or before the first block that holds something after `after`.
    fn in_segment(
        segment: Arc<Segment>,
        after: Lsn,
        store_id: u64,
    ) -> Result<Option<Place>, StoreError> {
        let Some(mut place) = Place::at_start(segment)? else { return Ok(None) };
        let (index, limit) = {
            let published = lock(&place.segment.published);
            (published.index.clone(), published.end)
        };
        let index = match index {
            Some(index) => Some(index),
            None => place.saved_index(store_id),
        };
        // Without an index reading starts at the segment's first block: slower, never wrong.
        let Some(index) = index else { return Ok(Some(place)) };
        let Some((offset, before)) = index.landing(after) else { return Ok(Some(place)) };
        let fits = block::read_header(&place.file, offset, limit).is_ok_and(|header| {
            header.content.kind == Kind::Entries
                && header.content.after == before
                && header.container.number == place.segment.sequence
        });
        if fits {
            place.at = offset;
            place.chain = before;
            place.definitions =
                index.definitions.iter().copied().filter(|at| *at < offset).collect();
        }
        Ok(Some(place))
    }

    fn saved_index(&self, store_id: u64) -> Option<SparseIndex> {
        let end = lock(&self.segment.published).end;
        let path = folder::index_path(&self.segment.path);
        match IndexFile::read(&path) {
            Ok(IndexFound::Good(index)) => {
                let fits = index.store_id == store_id
                    && index.sequence == self.segment.sequence
                    && index.end == end;
                fits.then_some(index.sparse)
            }
            Ok(IndexFound::Absent | IndexFound::Garbage) | Err(_) => None,
        }
    }
}
