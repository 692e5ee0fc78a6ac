//! A segment: a header, then blocks.
//!
//! ```text
//!  offset  size  segment header (all little-endian)
//!       0     8  magic "FARSHSEG"  (a spill: "FARSHSPL")
//!       8     4  format version, now 1
//!      12     4  zero
//!      16     8  store id
//!      24     8  sequence number of the segment, from 1 without gaps  (a spill: its id)
//!      32     8  start: end of the log before this segment; the file's name says the same
//!      40     4  next definition id when the segment was created
//!      44     4  1 if the segment was begun in an older one's file: what stands behind its last block
//!                may be that one's; else 0
//!      48     8  next spill id when the segment was created
//!      56     4  zero
//!      60     4  CRC32C over bytes 0..60
//!      64     …  blocks (see `block.rs`), then in the active segment zeros (space reserved ahead) or
//!                what an older one left
//!
//!  an entry inside an entries block, one after the other
//!       0     8  position (end of the commit record)
//!       8     8  commit time
//!      16     1  kind: 1 transaction, 2 spilled transaction, 3 watermark
//!      17     8  spill id, or zero
//!      25     4  payload length
//!      29     …  payload
//!
//!  a definition inside a definitions block, one after the other
//!       0     4  id
//!       4     4  length
//!       8     …  the definition
//! ```

use super::block::Container;
use super::index::SparseIndex;
use super::recent::Recent;
use crate::{EntryKind, EntryMeta, SpillId};
use bytes::Bytes;
use farshore_model::{DictionaryId, Lsn, PgTime};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

pub(crate) const SEGMENT_MAGIC: [u8; 8] = *b"FARSHSEG";
pub(crate) const SPILL_MAGIC: [u8; 8] = *b"FARSHSPL";
/// Newest format version this build reads and the one it writes.
pub(crate) const FORMAT_VERSION: u32 = 1;
pub(crate) const FILE_HEADER_LEN: usize = 64;
pub(crate) const ENTRY_HEADER_LEN: usize = 29;

/// Locks a mutex. Poisoning is passed over: every critical section here leaves its data whole at
/// every step, and a store that panicked in one thread must still let readers finish.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The first 64 bytes of a segment or a spill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileHeader {
    pub container: Container,
    pub start: Lsn,
    pub next_dictionary_id: u32,
    pub next_spill_id: u64,
    /// The file was an older segment's.
    pub in_old_file: bool,
}

/// Why 64 bytes are no header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeaderError {
    /// Not written completely, or damaged.
    Torn,
    Newer(u32),
}

impl FileHeader {
    pub fn encode(&self, magic: [u8; 8]) -> [u8; FILE_HEADER_LEN] {
        let mut out = [0; FILE_HEADER_LEN];
        out[..8].copy_from_slice(&magic);
        out[8..12].copy_from_slice(&FORMAT_VERSION.to_le_bytes());
        out[16..24].copy_from_slice(&self.container.store_id.to_le_bytes());
        out[24..32].copy_from_slice(&self.container.number.to_le_bytes());
        out[32..40].copy_from_slice(&self.start.0.to_le_bytes());
        out[40..44].copy_from_slice(&self.next_dictionary_id.to_le_bytes());
        out[44..48].copy_from_slice(&u32::from(self.in_old_file).to_le_bytes());
        out[48..56].copy_from_slice(&self.next_spill_id.to_le_bytes());
        let crc = crc32c::crc32c(&out[..60]);
        out[60..].copy_from_slice(&crc.to_le_bytes());
        out
    }

    pub fn decode(bytes: &[u8], magic: [u8; 8]) -> Result<FileHeader, HeaderError> {
        let bytes = bytes.first_chunk::<FILE_HEADER_LEN>().ok_or(HeaderError::Torn)?;
        let mut fields = Fields::new(&bytes[8..]);
        let (version, _) = (fields.u32(), fields.u32());
        let header = FileHeader {
            container: Container {
                store_id: fields.u64().unwrap_or_default(),
                number: fields.u64().unwrap_or_default(),
            },
            start: Lsn(fields.u64().unwrap_or_default()),
            next_dictionary_id: fields.u32().unwrap_or_default(),
            in_old_file: fields.u32() == Some(1),
            next_spill_id: fields.u64().unwrap_or_default(),
        };
        fields.u32();
        // Every version keeps magic, version and this checksum where they are.
        if bytes[..8] != magic || fields.u32() != Some(crc32c::crc32c(&bytes[..60])) {
            return Err(HeaderError::Torn);
        }
        match version {
            Some(version) if version > FORMAT_VERSION => Err(HeaderError::Newer(version)),
            Some(_) => Ok(header),
            None => Err(HeaderError::Torn),
        }
    }
}

/// Little-endian fields of a buffer, one after the other; `None` once it is too short.
pub(crate) struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub fn new(bytes: &'a [u8]) -> Fields<'a> {
        Fields { rest: bytes }
    }

    pub fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.rest.split_first_chunk::<N>()?;
        self.rest = rest;
        Some(*head)
    }

    pub fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }
}

/// The bytes before an entry's payload.
pub(crate) fn entry_header(meta: &EntryMeta) -> [u8; ENTRY_HEADER_LEN] {
    let (kind, spill) = match meta.kind {
        EntryKind::Transaction => (1, 0),
        EntryKind::Spilled(spill) => (2, spill.0),
        EntryKind::Watermark => (3, 0),
    };
    let mut out = [0; ENTRY_HEADER_LEN];
    out[..8].copy_from_slice(&meta.position.0.to_le_bytes());
    out[8..16].copy_from_slice(&meta.commit_time.0.to_le_bytes());
    out[16] = kind;
    out[17..25].copy_from_slice(&spill.to_le_bytes());
    out[25..].copy_from_slice(&meta.payload_len.to_le_bytes());
    out
}

/// Walks the entries of a raw block: what each is, and where its payload stands. `None` if the
/// bytes are not entries, which the checksum should have noticed.
pub(crate) fn walk_entries(
    raw: &[u8],
    mut each: impl FnMut(EntryMeta, std::ops::Range<usize>),
) -> Option<()> {
    let mut fields = Fields::new(raw);
    let mut at = 0;
    while !fields.is_empty() {
        let position = Lsn(fields.u64()?);
        let commit_time = PgTime(fields.u64()? as i64);
        let (kind, spill) = (fields.u8()?, fields.u64()?);
        let kind = match kind {
            1 => EntryKind::Transaction,
            2 => EntryKind::Spilled(SpillId(spill)),
            3 => EntryKind::Watermark,
            _ => return None,
        };
        let payload_len = fields.u32()?;
        let len = fields.bytes(payload_len as usize)?.len();
        let start = at + ENTRY_HEADER_LEN;
        at = start + len;
        each(EntryMeta { position, commit_time, kind, payload_len }, start..at);
    }
    Some(())
}

/// Appends one definition to a raw definitions block.
pub(crate) fn push_definition(raw: &mut Vec<u8>, id: DictionaryId, definition: &[u8]) {
    raw.extend_from_slice(&id.0.to_le_bytes());
    raw.extend_from_slice(&(definition.len() as u32).to_le_bytes());
    raw.extend_from_slice(definition);
}

/// The definitions of a raw block; `None` if the bytes are not definitions.
pub(crate) fn definitions(raw: &Bytes) -> Option<Vec<(DictionaryId, Bytes)>> {
    let mut fields = Fields::new(raw);
    let mut found = Vec::new();
    while !fields.is_empty() {
        let id = DictionaryId(fields.u32()?);
        let len = fields.u32()? as usize;
        found.push((id, raw.slice_ref(fields.bytes(len)?)));
    }
    Some(found)
}

/// What readers may see of a segment. Only the writer changes it, after an fsync covered it.
#[derive(Debug)]
pub(crate) struct Published {
    /// End of the durable blocks in the file.
    pub end: u64,
    /// Position of the last durable entry; the segment's start if there is none.
    pub last: Lsn,
    /// Commit times of the durable entries; `None` if there are none.
    pub commit_times: Option<(PgTime, PgTime)>,
    /// Bodies that entries of this segment name.
    pub spills: Vec<SpillId>,
    /// No block will be added; the next segment, if any, is in the list already.
    pub sealed: bool,
    /// The active segment's index. A sealed one's is in its `.idx` file.
    pub index: Option<SparseIndex>,
    /// When it was written to last.
    pub written: Written,
}

/// How long ago something was written, as far as possible by a clock that nobody sets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Written {
    seen: Instant,
    /// Of a file that was found, and what the machine's clock said of it then.
    found: Option<(SystemTime, Duration)>,
}

/// For so long after the start what the machine's clock says of a file is not acted on: it may be
/// wrong until the machine has reached those that know the time.
const CLOCK_SETTLES_IN: Duration = Duration::from_secs(600);

impl Written {
    /// Just now.
    pub fn now() -> Written {
        Written { seen: Instant::now(), found: None }
    }

    /// As a file that is found says by this machine's clock; one that cannot be looked at, or is
    /// from the future, is new.
    pub fn found(path: &Path) -> Written {
        let written = std::fs::metadata(path).and_then(|metadata| metadata.modified());
        let age = |at| SystemTime::now().duration_since(at).unwrap_or_default();
        Written { seen: Instant::now(), found: written.ok().map(|at| (at, age(at))) }
    }

    /// How long that is ago, at least.
    pub fn age(self) -> Duration {
        self.age_at(self.seen.elapsed(), SystemTime::now())
    }

    /// The same, so long after it was seen, when the machine's clock says `now`.
    fn age_at(self, watched: Duration, now: SystemTime) -> Duration {
        match self.found {
            Some((at, age)) if watched >= CLOCK_SETTLES_IN => {
                let by_clock = now.duration_since(at).unwrap_or_default();
                age.saturating_add(watched).min(by_clock).max(watched)
            }
            _ => watched,
        }
    }
}

/// One segment as all threads share it.
#[derive(Debug)]
pub(crate) struct Segment {
    pub sequence: u64,
    pub start: Lsn,
    pub path: PathBuf,
    pub published: Mutex<Published>,
}

/// The segments on disk, oldest first; their sequence numbers have no gaps and the last one is
/// written to. Shared with readers, which may outlive the store.
#[derive(Debug)]
pub(crate) struct SegmentList {
    pub store_id: u64,
    pub segments: Mutex<VecDeque<Arc<Segment>>>,
    /// The newest blocks, in memory.
    pub recent: Recent,
}

impl SegmentList {
    /// Everything after this position can still be read.
    pub fn start(&self) -> Lsn {
        lock(&self.segments).front().map_or(Lsn::ZERO, |segment| segment.start)
    }

    /// The segment that holds what follows `after`, or the log's start if that is gone.
    pub fn holding(&self, after: Lsn) -> Result<Arc<Segment>, Lsn> {
        let segments = lock(&self.segments);
        let index = segments.partition_point(|segment| segment.start <= after);
        match index.checked_sub(1).and_then(|index| segments.get(index)) {
            Some(segment) => Ok(segment.clone()),
            None => Err(segments.front().map_or(Lsn::ZERO, |segment| segment.start)),
        }
    }

    /// Whether retention has not dropped a segment. Asked after reading from it: its file may be
    /// another segment's as soon as it is dropped.
    pub fn has(&self, sequence: u64) -> bool {
        lock(&self.segments).front().is_some_and(|first| first.sequence <= sequence)
    }

    /// The segment after `sequence`, or the log's start if that is gone.
    pub fn following(&self, sequence: u64) -> Result<Arc<Segment>, Lsn> {
        let segments = lock(&self.segments);
        let wanted = sequence + 1;
        let index = segments.partition_point(|segment| segment.sequence < wanted);
        match segments.get(index) {
            Some(segment) if segment.sequence == wanted => Ok(segment.clone()),
            _ => Err(segments.front().map_or(Lsn::ZERO, |segment| segment.start)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_is_wrong_at_the_start_makes_nothing_old() {
        const HOUR: Duration = Duration::from_secs(3_600);
        let at = SystemTime::UNIX_EPOCH + HOUR * 1_000;
        // Found with a clock that is a thousand hours ahead, and set right before long.
        let written = Written { seen: Instant::now(), found: Some((at, HOUR * 1_001)) };
        let after = |watched, now| written.age_at(watched, now);
        assert_eq!(after(HOUR / 60, at + HOUR * 1_001), HOUR / 60);
        assert_eq!(after(HOUR * 2, at + HOUR * 3), HOUR * 3);
        // Not set right: what it says is all there is.
        assert_eq!(after(HOUR * 2, at + HOUR * 1_003), HOUR * 1_003);
        // Set ahead, or back, long after the start.
        assert_eq!(after(HOUR * 2, at + HOUR * 9_999), HOUR * 1_003);
        assert_eq!(after(HOUR * 2, SystemTime::UNIX_EPOCH), HOUR * 2);
        let new = Written { seen: Instant::now(), found: None };
        assert_eq!(new.age_at(HOUR, at), HOUR);
    }

    #[test]
    fn header_round_trips_and_notices_every_flip() {
        let header = FileHeader {
            container: Container { store_id: 7, number: 8 },
            start: Lsn(9),
            next_dictionary_id: 10,
            next_spill_id: 11,
            in_old_file: true,
        };
        let bytes = header.encode(SEGMENT_MAGIC);
        assert_eq!(FileHeader::decode(&bytes, SEGMENT_MAGIC), Ok(header));
        assert_eq!(FileHeader::decode(&bytes, SPILL_MAGIC), Err(HeaderError::Torn));
        assert_eq!(FileHeader::decode(&bytes[..63], SEGMENT_MAGIC), Err(HeaderError::Torn));
        for bit in 0..FILE_HEADER_LEN * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(FileHeader::decode(&flipped, SEGMENT_MAGIC), Err(HeaderError::Torn));
        }
    }

    #[test]
    fn no_cut_of_entries_or_definitions_panics() {
        let meta = EntryMeta {
            position: Lsn(5),
            commit_time: PgTime(-1),
            kind: EntryKind::Spilled(SpillId(3)),
            payload_len: 2,
        };
        let mut raw = entry_header(&meta).to_vec();
        raw.extend_from_slice(b"ab");
        let mut seen = Vec::new();
        walk_entries(&raw, |meta, range| seen.push((meta, range))).unwrap();
        assert_eq!(seen, vec![(meta, 29..31)]);
        for len in 1..raw.len() {
            assert!(walk_entries(&raw[..len], |_, _| ()).is_none());
        }
        let mut raw = Vec::new();
        push_definition(&mut raw, DictionaryId(4), b"xyz");
        let raw = Bytes::from(raw);
        assert_eq!(definitions(&raw).unwrap(), vec![(DictionaryId(4), Bytes::from("xyz"))]);
        for len in 1..raw.len() {
            assert!(definitions(&raw.slice(..len)).is_none());
        }
    }
}
