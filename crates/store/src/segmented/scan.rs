//! Reads a whole segment, block by block, and says how it ends.

use super::block::{self, BlockError, BlockReader, Container, Kind, MAGIC};
use super::index::SparseIndex;
use super::io_error;
use super::segment::{FILE_HEADER_LEN, FileHeader, definitions, walk_entries};
use crate::{EntryKind, SpillId, StoreError};
use bytes::Bytes;
use farshore_model::{DictionaryId, Lsn, PgTime};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes searched at a time behind the last valid block.
const SEARCH_STEP: usize = 1 << 20;

/// What stands behind the last valid block of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tail {
    /// Nothing.
    End,
    /// Only zeros: space reserved ahead of the data.
    Zeros,
    /// What an older segment left in the file.
    Old,
    /// Bytes up to `end` that no fsync is known to have covered.
    Torn { end: u64 },
    /// A valid block at `proof` was written after an fsync had covered the place where the valid
    /// blocks stop: what stood there was durable and is damaged.
    Damaged { proof: u64 },
}

/// What a segment holds.
#[derive(Debug)]
pub(crate) struct Scan {
    /// End of the valid blocks.
    pub end: u64,
    pub blocks: u64,
    pub last: Lsn,
    pub commit_times: Option<(PgTime, PgTime)>,
    pub spills: Vec<SpillId>,
    pub definitions: Vec<(DictionaryId, Bytes)>,
    pub sparse: SparseIndex,
    /// Where the last valid block says that the fsynced part of the file ended.
    pub synced_to: u64,
    /// Why the block at `end` is not valid; empty if there is none.
    pub stopped_by: &'static str,
    pub tail: Tail,
}

/// Reads every block of a segment and verifies it.
pub(crate) fn scan(file: &File, path: &Path, header: &FileHeader) -> Result<Scan, StoreError> {
    let len = file.metadata().map_err(io_error("examine", path))?.len();
    let mut scan = Scan {
        end: FILE_HEADER_LEN as u64,
        blocks: 0,
        last: header.start,
        commit_times: None,
        spills: Vec::new(),
        definitions: Vec::new(),
        sparse: SparseIndex::default(),
        synced_to: FILE_HEADER_LEN as u64,
        stopped_by: "",
        tail: Tail::End,
    };
    let mut reader = BlockReader::new();
    while scan.end < len {
        match scan.next_block(file, len, header.container, &mut reader) {
            Ok(()) => {}
            Err(BlockError::Io(error)) => return Err(io_error("read", path)(error)),
            Err(BlockError::Bad(what)) => {
                scan.stopped_by = what;
                scan.tail = find_tail(file, &scan, len, header).map_err(io_error("read", path))?;
                break;
            }
        }
    }
    Ok(scan)
}

impl Scan {
    fn next_block(
        &mut self,
        file: &File,
        len: u64,
        container: Container,
        reader: &mut BlockReader,
    ) -> Result<(), BlockError> {
        let offset = self.end;
        let header = block::verify(file, offset, len)?;
        let content = header.content;
        if header.container != container {
            return Err(BlockError::Bad("the block belongs to another file"));
        }
        if header.sequence != self.blocks || content.after != self.last {
            return Err(BlockError::Bad("the block does not follow the one before it"));
        }
        match content.kind {
            Kind::Definitions => {
                let raw = reader.read_payload(file, offset, &header)?;
                let found =
                    definitions(&raw).ok_or(BlockError::Bad("the definitions are malformed"))?;
                self.definitions.extend(found);
                self.sparse.add_definitions(offset);
            }
            Kind::Entries => {
                if content.spilled > 0 {
                    let raw = reader.read_payload(file, offset, &header)?;
                    walk_entries(&raw, |entry, _| match entry.kind {
                        EntryKind::Spilled(spill) => self.spills.push(spill),
                        EntryKind::Transaction | EntryKind::Watermark => {}
                    })
                    .ok_or(BlockError::Bad("the entries are malformed"))?;
                }
                self.sparse.add_entries(offset, self.last);
                self.last = content.last;
                self.commit_times =
                    widen(self.commit_times, content.commit_time_min, content.commit_time_max);
            }
            Kind::Chunk | Kind::Footer => {
                return Err(BlockError::Bad("a spill's block stands in a segment"));
            }
        }
        self.end = offset + header.block_len();
        self.synced_to = header.synced_to;
        self.blocks += 1;
        Ok(())
    }
}

/// The smallest and largest of what was known and one more range.
pub(crate) fn widen(
    known: Option<(PgTime, PgTime)>,
    min: PgTime,
    max: PgTime,
) -> Option<(PgTime, PgTime)> {
    Some(known.map_or((min, max), |(low, high)| (low.min(min), high.max(max))))
}

fn find_tail(file: &File, scan: &Scan, len: u64, own: &FileHeader) -> std::io::Result<Tail> {
    let mut nonzero_end = scan.end;
    let mut proof = None;
    each_window(file, scan.end, len, |at, window| {
        // Most of what was reserved: looked for in no time, byte by byte it takes 2 ms per MB.
        if is_zero(window) {
            return true;
        }
        if let Some(last) = window.iter().rposition(|byte| *byte != 0) {
            nonzero_end = nonzero_end.max(at + last as u64 + 1);
        }
        for hit in find_magic(window) {
            let offset = at + hit as u64;
            // Of an older segment's blocks there may be many.
            let foreign = |header: block::Header| header.container != own.container;
            if block::read_header(file, offset, len).is_ok_and(foreign) {
                continue;
            }
            let Ok(header) = block::verify(file, offset, len) else { continue };
            if header.container == own.container
                && header.sequence >= scan.blocks
                && header.synced_to > scan.end
            {
                proof = Some(offset);
                return false;
            }
        }
        true
    })?;
    Ok(match proof {
        Some(proof) => Tail::Damaged { proof },
        None if nonzero_end == scan.end => Tail::Zeros,
        None if own.in_old_file => match block::read_header(file, scan.end, len) {
            Ok(begun) if begun.container == own.container => {
                Tail::Torn { end: scan.end + begun.block_len() }
            }
            Ok(_) | Err(_) => Tail::Old,
        },
        None => Tail::Torn { end: nonzero_end },
    })
}

/// Whether any whole block stands in a file whose header cannot be read.
pub(crate) fn holds_a_block(file: &File, len: u64) -> std::io::Result<bool> {
    let mut found = false;
    each_window(file, 0, len, |at, window| {
        found = find_magic(window).any(|hit| block::verify(file, at + hit as u64, len).is_ok());
        !found
    })?;
    Ok(found)
}

/// Shows a file piece by piece, overlapping so that no magic is cut in two, until `each` is done.
/// Holes, and space that was reserved and never written, read as zeros and are left out.
fn each_window(
    file: &File,
    from: u64,
    len: u64,
    mut each: impl FnMut(u64, &[u8]) -> bool,
) -> std::io::Result<()> {
    let mut at = from;
    let mut buffer = vec![0; SEARCH_STEP.min(len.saturating_sub(from) as usize)];
    while let Some(data) = next_data(file, at)?.filter(|data| *data < len) {
        at = data;
        let size = (len - at).min(SEARCH_STEP as u64) as usize;
        let window = &mut buffer[..size];
        file.read_exact_at(window, at)?;
        if !each(at, window) || at + size as u64 == len {
            break;
        }
        at += (size - (MAGIC.len() - 1)) as u64;
    }
    Ok(())
}

/// Where the next byte at or after `at` stands that was ever written; `None`: nowhere. What a file
/// system does not know it tells as written.
fn next_data(file: &File, at: u64) -> std::io::Result<Option<u64>> {
    // SAFETY: the descriptor is open as long as `file` is borrowed; no memory is passed. It moves
    // the file's offset, which nothing here reads or writes by.
    let found = unsafe { libc::lseek(file.as_raw_fd(), at as libc::off_t, libc::SEEK_DATA) };
    if let Ok(found) = u64::try_from(found) {
        return Ok(Some(found));
    }
    let error = std::io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENXIO) => Ok(None),
        Some(libc::EINVAL) => Ok(Some(at)),
        _ => Err(error),
    }
}

fn is_zero(window: &[u8]) -> bool {
    window.chunks(4 << 10).all(|piece| piece.iter().fold(0, |any, byte| any | byte) == 0)
}

fn find_magic(window: &[u8]) -> impl Iterator<Item = usize> {
    window
        .windows(MAGIC.len())
        .enumerate()
        .filter(|(_, bytes)| bytes[0] == MAGIC[0] && *bytes == MAGIC)
        .map(|(at, _)| at)
}
