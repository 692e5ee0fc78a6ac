//! The newest durable blocks, kept in memory as they were before compression, for readers at the
//! log's end: what they find here is neither read from the file, nor verified, nor decompressed.
//!
//! A block is kept only while a reader is still to read it, and within bounds on bytes; a reader
//! that does not find the block it comes to reads the file. So this is never a condition for
//! reading, and holds nothing of a log whose readers are all at its end.

use super::block::Content;
use super::segment::lock;
use bytes::Bytes;
use farshore_model::Lsn;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes kept of one log, at most.
const LOG_BYTES_MAX: usize = 16 << 20;

/// Bytes kept of all logs of this process together, at most.
const ALL_BYTES_MAX: usize = 48 << 20;

/// What a block takes beside its bytes: small ones are little else.
const OVERHEAD: usize = 2 * size_of::<RecentBlock>() + 64;

/// Bytes kept now, of all logs of this process.
static ALL_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Where a block stands: its segment's sequence number, and its offset in that file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BlockPlace {
    pub sequence: u64,
    pub at: u64,
}

/// A block of entries as it was before it was written.
#[derive(Clone, Debug)]
pub(crate) struct RecentBlock {
    pub place: BlockPlace,
    /// Bytes that it takes in the file, with its header.
    pub file_len: u64,
    pub content: Content,
    pub raw: Bytes,
    /// Memory that `raw` holds.
    memory: usize,
}

impl RecentBlock {
    pub fn new(place: BlockPlace, file_len: u64, content: Content, raw: Vec<u8>) -> RecentBlock {
        let memory = raw.capacity() + OVERHEAD;
        RecentBlock { place, file_len, content, raw: Bytes::from(raw), memory }
    }
}

#[derive(Debug, Default)]
struct State {
    /// By place.
    blocks: VecDeque<RecentBlock>,
    bytes: usize,
    /// What the open readers have read up to, by their numbers.
    readers: Vec<(u64, Lsn)>,
    next_reader: u64,
}

impl State {
    /// Drops what every reader has read.
    fn drop_read(&mut self) {
        let needed_after = self.readers.iter().map(|(_, after)| *after).min();
        while let Some(first) = self.blocks.front() {
            if needed_after.is_some_and(|after| first.content.last > after) {
                break;
            }
            self.drop_first();
        }
    }

    fn drop_first(&mut self) {
        if let Some(first) = self.blocks.pop_front() {
            self.bytes -= first.memory;
            ALL_BYTES.fetch_sub(first.memory, Ordering::Relaxed);
        }
    }
}

/// The newest blocks of one log.
#[derive(Debug, Default)]
pub(crate) struct Recent(Mutex<State>);

impl Recent {
    /// A reader that wants what follows `after`; [`Recent::leave`] ends it.
    pub fn join(&self, after: Lsn) -> u64 {
        let mut state = lock(&self.0);
        let reader = state.next_reader;
        state.next_reader += 1;
        state.readers.push((reader, after));
        reader
    }

    /// The reader is gone.
    pub fn leave(&self, reader: u64) {
        let mut state = lock(&self.0);
        state.readers.retain(|(number, _)| *number != reader);
        state.drop_read();
    }

    /// Whether any reader would find a block here.
    pub fn is_wanted(&self) -> bool {
        !lock(&self.0).readers.is_empty()
    }

    /// Adds durable blocks, which follow those added before.
    pub fn add(&self, blocks: impl IntoIterator<Item = RecentBlock>) {
        let mut state = lock(&self.0);
        for block in blocks {
            state.bytes += block.memory;
            ALL_BYTES.fetch_add(block.memory, Ordering::Relaxed);
            state.blocks.push_back(block);
        }
        state.drop_read();
        while state.bytes > LOG_BYTES_MAX
            || (state.bytes > 0 && ALL_BYTES.load(Ordering::Relaxed) > ALL_BYTES_MAX)
        {
            state.drop_first();
        }
    }

    /// The block at `place`, if it is still here. The reader has read up to `after`.
    pub fn get(&self, reader: u64, after: Lsn, place: BlockPlace) -> Option<RecentBlock> {
        let mut state = lock(&self.0);
        if let Some((_, read)) = state.readers.iter_mut().find(|(number, _)| *number == reader) {
            *read = after;
        }
        state.drop_read();
        let index = state.blocks.binary_search_by_key(&place, |block| block.place).ok()?;
        state.blocks.get(index).cloned()
    }
}

impl Drop for Recent {
    fn drop(&mut self) {
        let bytes = lock(&self.0).bytes;
        ALL_BYTES.fetch_sub(bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::block::Kind;
    use super::*;

    fn block(at: u64, last: u64, len: usize) -> RecentBlock {
        let content = Content::without_entries(Kind::Entries, Lsn(last), 1);
        RecentBlock::new(BlockPlace { sequence: 1, at }, len as u64, content, vec![0; len])
    }

    fn held(recent: &Recent) -> Vec<u64> {
        lock(&recent.0).blocks.iter().map(|block| block.place.at).collect()
    }

    #[test]
    fn blocks_stay_until_every_reader_has_read_them() {
        let recent = Recent::default();
        recent.add([block(0, 10, 5)]);
        assert_eq!(held(&recent), [0; 0], "nobody reads");
        let (slow, fast) = (recent.join(Lsn(10)), recent.join(Lsn(10)));
        recent.add([block(5, 20, 5), block(10, 30, 5)]);
        let place = |at| BlockPlace { sequence: 1, at };
        assert_eq!(
            recent.get(fast, Lsn(10), place(5)).map(|found| found.content.last),
            Some(Lsn(20))
        );
        assert!(recent.get(fast, Lsn(20), place(7)).is_none(), "no block begins there");
        assert!(recent.get(fast, Lsn(30), place(15)).is_none(), "not there yet");
        assert_eq!(held(&recent), [5, 10]);
        assert!(recent.get(slow, Lsn(20), place(10)).is_some());
        assert_eq!(held(&recent), [10]);
        recent.leave(slow);
        assert_eq!(held(&recent), [0; 0]);
        assert_eq!(lock(&recent.0).bytes, 0);
    }

    #[test]
    fn a_reader_that_is_far_behind_holds_no_more_than_the_bound() {
        let recent = Recent::default();
        let reader = recent.join(Lsn(0));
        for number in 0..40 {
            recent.add([block(number, number + 1, 1 << 20)]);
        }
        let state = lock(&recent.0);
        assert!(state.bytes <= LOG_BYTES_MAX);
        assert!(state.blocks.front().is_some_and(|first| first.place.at > 0));
        drop(state);
        recent.leave(reader);
    }
}
