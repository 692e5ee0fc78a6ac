//! The sparse index of a segment: where its definitions stand, and where about a position is.
//!
//! Advisory. It is written without fsync when a segment is sealed, and rebuilt whenever it is
//! absent, short, garbage, or does not fit its segment.
//!
//! ```text
//!       0     8  magic "FARSHIDX"
//!       8     4  version, now 1
//!      12     4  CRC32C over everything after this field
//!      16     8  store id
//!      24     8  the segment's sequence number
//!      32     8  end of the segment's blocks, in bytes
//!      40     8  number of blocks in the segment
//!      48     8  position of its last entry
//!      56     1  1 if it has entries, then
//!      57     8  smallest commit time
//!      65     8  largest commit time
//!      73     4  number of spills, then each 8 bytes id
//!       …     4  number of definitions blocks, then each 8 bytes offset
//!       …     4  number of sparse entries, then each 8 bytes offset, 8 bytes log end before it
//! ```

use super::folder::give_to_owner;
use super::segment::Fields;
use crate::SpillId;
use farshore_model::{Lsn, PgTime};
use std::io::Write as _;
use std::path::Path;

const MAGIC: [u8; 8] = *b"FARSHIDX";
const VERSION: u32 = 1;
/// One sparse entry at most for so many bytes of file.
const SPARSE_BYTES: u64 = 64 << 10;

/// Where blocks of a segment stand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SparseIndex {
    /// Offsets of all definitions blocks.
    pub definitions: Vec<u64>,
    /// Offset of some entries blocks and the log's end before each, ascending.
    pub entries: Vec<(u64, Lsn)>,
}

impl SparseIndex {
    pub fn add_definitions(&mut self, offset: u64) {
        self.definitions.push(offset);
    }

    pub fn add_entries(&mut self, offset: u64, after: Lsn) {
        let far = self.entries.last().is_none_or(|(last, _)| offset - last >= SPARSE_BYTES);
        if far {
            self.entries.push((offset, after));
        }
    }

    /// The last known block that starts at or before what follows `after`.
    pub fn landing(&self, after: Lsn) -> Option<(u64, Lsn)> {
        let index = self.entries.partition_point(|(_, before)| *before <= after);
        index.checked_sub(1).and_then(|index| self.entries.get(index)).copied()
    }
}

/// Everything an index file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IndexFile {
    pub store_id: u64,
    pub sequence: u64,
    pub end: u64,
    pub blocks: u64,
    pub last: Lsn,
    pub commit_times: Option<(PgTime, PgTime)>,
    pub spills: Vec<SpillId>,
    pub sparse: SparseIndex,
}

/// What an index file turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum IndexFound {
    Good(IndexFile),
    Absent,
    Garbage,
}

impl IndexFile {
    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        for word in [self.store_id, self.sequence, self.end, self.blocks, self.last.0] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        let (min, max) = self.commit_times.unwrap_or_default();
        out.push(u8::from(self.commit_times.is_some()));
        out.extend_from_slice(&min.0.to_le_bytes());
        out.extend_from_slice(&max.0.to_le_bytes());
        out.extend_from_slice(&(self.spills.len() as u32).to_le_bytes());
        for spill in &self.spills {
            out.extend_from_slice(&spill.0.to_le_bytes());
        }
        out.extend_from_slice(&(self.sparse.definitions.len() as u32).to_le_bytes());
        for offset in &self.sparse.definitions {
            out.extend_from_slice(&offset.to_le_bytes());
        }
        out.extend_from_slice(&(self.sparse.entries.len() as u32).to_le_bytes());
        for (offset, after) in &self.sparse.entries {
            out.extend_from_slice(&offset.to_le_bytes());
            out.extend_from_slice(&after.0.to_le_bytes());
        }
        let crc = crc32c::crc32c(&out[16..]);
        out[12..16].copy_from_slice(&crc.to_le_bytes());
        out
    }

    fn decode(bytes: &[u8]) -> Option<IndexFile> {
        let mut fields = Fields::new(bytes);
        let known = fields.bytes(8)? == MAGIC && fields.u32()? == VERSION;
        let crc = fields.u32()?;
        if !known || crc != crc32c::crc32c(bytes.get(16..)?) {
            return None;
        }
        let (store_id, sequence) = (fields.u64()?, fields.u64()?);
        let (end, blocks, last) = (fields.u64()?, fields.u64()?, Lsn(fields.u64()?));
        let has_entries = fields.u8()? == 1;
        let times = (PgTime(fields.u64()? as i64), PgTime(fields.u64()? as i64));
        let mut spills = Vec::new();
        for _ in 0..fields.u32()? {
            spills.push(SpillId(fields.u64()?));
        }
        let mut sparse = SparseIndex::default();
        for _ in 0..fields.u32()? {
            sparse.definitions.push(fields.u64()?);
        }
        for _ in 0..fields.u32()? {
            sparse.entries.push((fields.u64()?, Lsn(fields.u64()?)));
        }
        let commit_times = has_entries.then_some(times);
        let whole = fields.is_empty();
        let index =
            IndexFile { store_id, sequence, end, blocks, last, commit_times, spills, sparse };
        whole.then_some(index)
    }

    /// Writes the file beside its segment; not synced, because it can be rebuilt.
    pub fn write(&self, path: &Path) -> Result<(), std::io::Error> {
        let tmp = path.with_extension("idx.tmp");
        let mut file = std::fs::File::create(&tmp)?;
        give_to_owner(&file, path.parent().unwrap_or(Path::new(".")));
        file.write_all(&self.encode())?;
        std::fs::rename(&tmp, path)
    }

    /// Reads an index file; whether it fits its segment is for the caller to check.
    pub fn read(path: &Path) -> Result<IndexFound, std::io::Error> {
        match std::fs::read(path) {
            Ok(bytes) => {
                Ok(IndexFile::decode(&bytes).map_or(IndexFound::Garbage, IndexFound::Good))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(IndexFound::Absent),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_and_notices_every_cut_and_flip() {
        let index = IndexFile {
            store_id: 1,
            sequence: 2,
            end: 3,
            blocks: 4,
            last: Lsn(5),
            commit_times: Some((PgTime(-6), PgTime(7))),
            spills: vec![SpillId(8)],
            sparse: SparseIndex { definitions: vec![64], entries: vec![(100, Lsn(4))] },
        };
        let bytes = index.encode();
        assert_eq!(IndexFile::decode(&bytes), Some(index));
        for len in 0..bytes.len() {
            assert_eq!(IndexFile::decode(&bytes[..len]), None, "{len}");
        }
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(IndexFile::decode(&flipped), None, "bit {bit}");
        }
    }

    #[test]
    fn landing_is_at_or_before_what_follows() {
        let mut index = SparseIndex::default();
        index.add_entries(64, Lsn(0));
        index.add_entries(65, Lsn(1));
        index.add_entries(64 + SPARSE_BYTES, Lsn(10));
        assert_eq!(index.landing(Lsn(9)), Some((64, Lsn(0))));
        assert_eq!(index.landing(Lsn(10)), Some((64 + SPARSE_BYTES, Lsn(10))));
        assert_eq!(SparseIndex::default().landing(Lsn(10)), None);
    }
}
