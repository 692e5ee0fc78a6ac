//! A log that is kept a second time at another site: blocks go over as they are stored, compressed
//! once and checksummed end to end, and a replica holds them under the same positions and ids.
//!
//! A replica is written by [`Replicate::append_stored`] alone, apart from the one watermark that
//! says where it begins. Blocks are chained by the position before them, so a replica that has one
//! has everything since its beginning.

use crate::{BoxFuture, LogStore, SpillId, StoreError};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use farshore_model::{Lsn, PgTime};

/// Most bytes of a block before compression: one entry of the largest size and its header.
pub const BLOCK_RAW_MAX: u32 = (1 << 30) + (1 << 10);
/// Most bodies that one block may name. A block has at most 256 KiB of entries that are not alone.
const SPILLED_MAX: u32 = 1 << 16;

/// What a stored block holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredKind {
    /// Entries of the log.
    Entries,
    /// Definitions that blocks after it in the same container refer to.
    Definitions,
    /// A piece of a spill.
    Chunk,
}

/// A block of a log or of a spill, as it stands on disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// What it holds.
    pub kind: StoredKind,
    /// The file it was read from: a segment's number. What entries refer to stands before them in
    /// the same file.
    pub container: u64,
    /// End of the log before the block.
    pub after: Lsn,
    /// Position of the first entry; without entries as `after`.
    pub first: Lsn,
    /// Position of the last entry; without entries as `after`.
    pub last: Lsn,
    /// Smallest and largest commit time of the entries.
    pub commit_times: (PgTime, PgTime),
    /// Entries, or definitions.
    pub items: u32,
    /// Spills that the entries name.
    pub spilled: Vec<SpillId>,
    /// The payload is a zstd frame.
    pub zstd: bool,
    /// Bytes of the payload when decompressed, at most [`BLOCK_RAW_MAX`].
    pub raw_len: u32,
    /// CRC32C of the payload.
    pub checksum: u32,
    /// The payload as it is stored.
    pub payload: Bytes,
}

/// Bytes of a block's description before the list of spills.
const FIXED_LEN: usize = 1 + 1 + 8 + 8 * 3 + 8 * 2 + 4 + 4 + 4 + 4;

impl StoredBlock {
    /// A piece of a spill that is in no log yet, as it is: for what is to be compressed and sent
    /// as blocks are. At most [`BLOCK_RAW_MAX`] bytes.
    pub fn chunk(payload: Bytes) -> StoredBlock {
        StoredBlock {
            kind: StoredKind::Chunk,
            container: 0,
            after: Lsn::ZERO,
            first: Lsn::ZERO,
            last: Lsn::ZERO,
            commit_times: (PgTime(0), PgTime(0)),
            items: 0,
            spilled: Vec::new(),
            zstd: false,
            raw_len: payload.len() as u32,
            checksum: crc32c::crc32c(&payload),
            payload,
        }
    }

    /// The block's description; the payload follows it on the way to another site. Little-endian:
    /// kind, zstd, container, after, first, last, smallest and largest commit time, items, raw
    /// length, checksum, number of spills, spills.
    pub fn encode_head(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(FIXED_LEN + self.spilled.len() * 8);
        out.put_u8(match self.kind {
            StoredKind::Entries => 1,
            StoredKind::Definitions => 2,
            StoredKind::Chunk => 3,
        });
        out.put_u8(u8::from(self.zstd));
        out.put_u64_le(self.container);
        for position in [self.after, self.first, self.last] {
            out.put_u64_le(position.0);
        }
        out.put_i64_le(self.commit_times.0.0);
        out.put_i64_le(self.commit_times.1.0);
        out.put_u32_le(self.items);
        out.put_u32_le(self.raw_len);
        out.put_u32_le(self.checksum);
        out.put_u32_le(self.spilled.len() as u32);
        self.spilled.iter().for_each(|spill| out.put_u64_le(spill.0));
        out.freeze()
    }

    /// Reads a description and the payload behind it; the payload is checked against its checksum.
    ///
    /// # Errors
    /// What is wrong with bytes that are no block.
    pub fn decode(mut bytes: Bytes) -> Result<StoredBlock, &'static str> {
        let mut block = StoredBlock::decode_head(&mut bytes)?;
        block.payload = bytes;
        block.check()?;
        Ok(block)
    }

    /// Takes a block off the front of several that stand one after the other, none compressed.
    ///
    /// # Errors
    /// What is wrong with bytes that are no block.
    pub fn decode_from(bytes: &mut Bytes) -> Result<StoredBlock, &'static str> {
        let mut block = StoredBlock::decode_head(bytes)?;
        if block.zstd || bytes.len() < block.raw_len as usize {
            return Err("a block is cut off");
        }
        block.payload = bytes.split_to(block.raw_len as usize);
        block.check()?;
        Ok(block)
    }

    /// The description alone.
    fn decode_head(bytes: &mut Bytes) -> Result<StoredBlock, &'static str> {
        if bytes.len() < FIXED_LEN {
            return Err("a block is too short");
        }
        let kind = match bytes.get_u8() {
            1 => StoredKind::Entries,
            2 => StoredKind::Definitions,
            3 => StoredKind::Chunk,
            _ => return Err("a block's kind is unknown"),
        };
        let zstd = match bytes.get_u8() {
            0 => false,
            1 => true,
            _ => return Err("a block's flags are unknown"),
        };
        let container = bytes.get_u64_le();
        let [after, first, last] = [(); 3].map(|()| Lsn(bytes.get_u64_le()));
        let commit_times = (PgTime(bytes.get_i64_le()), PgTime(bytes.get_i64_le()));
        let (items, raw_len) = (bytes.get_u32_le(), bytes.get_u32_le());
        let (checksum, spills) = (bytes.get_u32_le(), bytes.get_u32_le());
        if spills > SPILLED_MAX || bytes.len() < spills as usize * 8 {
            return Err("a block's list of spills is cut off");
        }
        let spilled = (0..spills).map(|_| SpillId(bytes.get_u64_le())).collect();
        Ok(StoredBlock {
            kind,
            container,
            after,
            first,
            last,
            commit_times,
            items,
            spilled,
            zstd,
            raw_len,
            checksum,
            payload: Bytes::new(),
        })
    }

    /// Whether the block can be what it says.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self) -> Result<(), &'static str> {
        if self.raw_len > BLOCK_RAW_MAX {
            return Err("a block is larger than one can be");
        }
        if !self.zstd && self.payload.len() != self.raw_len as usize {
            return Err("a block's lengths disagree");
        }
        if self.payload.len() > self.raw_len as usize {
            return Err("a block was not made smaller by its compression");
        }
        if crc32c::crc32c(&self.payload) != self.checksum {
            return Err("a block's checksum does not match");
        }
        let ordered = match self.kind {
            StoredKind::Entries => self.after < self.first && self.first <= self.last,
            StoredKind::Definitions | StoredKind::Chunk => {
                self.first == self.after && self.last == self.after
            }
        };
        if ordered { Ok(()) } else { Err("a block's positions are out of order") }
    }

    /// Compresses a payload that was stored as it is, if it then is smaller: what queued up on a
    /// fast disk is written without ([`crate::segmented`]), and should not cross a link so.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn compress(&mut self, level: i32) -> std::io::Result<()> {
        const WORTHWHILE: usize = 128;
        if self.zstd || self.payload.len() < WORTHWHILE {
            return Ok(());
        }
        let compressed = zstd::bulk::compress(&self.payload, level)?;
        if compressed.len() < self.payload.len() {
            self.checksum = crc32c::crc32c(&compressed);
            self.payload = Bytes::from(compressed);
            self.zstd = true;
        }
        Ok(())
    }

    /// The same block with its payload decompressed.
    ///
    /// # Errors
    /// When it does not decompress to the length that the block says.
    pub fn decompressed(&self) -> Result<StoredBlock, &'static str> {
        let payload = self.raw()?;
        let checksum = if self.zstd { crc32c::crc32c(&payload) } else { self.checksum };
        Ok(StoredBlock { zstd: false, checksum, payload, ..self.clone() })
    }

    /// The payload decompressed.
    ///
    /// # Errors
    /// When it does not decompress to the length that the block says.
    pub(crate) fn raw(&self) -> Result<Bytes, &'static str> {
        if !self.zstd {
            return Ok(self.payload.clone());
        }
        match zstd::bulk::decompress(&self.payload, self.raw_len as usize) {
            Ok(raw) if raw.len() == self.raw_len as usize => Ok(Bytes::from(raw)),
            Ok(_) => Err("a block decompresses to another length"),
            Err(_) => Err("a block does not decompress"),
        }
    }
}

/// Reads blocks as they are stored, in order. Blocking.
pub trait StoredReader: Send {
    /// The next block, or `None` when everything durable (of a spill: everything) has been read.
    fn next_stored(&mut self) -> Result<Option<StoredBlock>, StoreError>;

    /// Passes over the next block; false when there is none. A reader that can does not read it.
    fn pass_over(&mut self) -> Result<bool, StoreError> {
        self.next_stored().map(|block| block.is_some())
    }

    /// Bytes on disk of all that it reads, where that is known: of a spill.
    fn bytes_on_disk(&self) -> Option<u64> {
        None
    }
}

/// Takes the blocks of one spill. Blocking. Dropping it before [`SpillReceiver::finish`] removes
/// what was taken.
pub trait SpillReceiver: Send {
    /// The next block.
    fn take(&mut self, block: StoredBlock) -> Result<(), StoreError>;

    /// Makes the body durable. The spill now waits for a block that names it.
    fn finish(self: Box<Self>) -> Result<SpillId, StoreError>;
}

/// A store whose log can be replicated, or can be a replica.
pub trait Replicate: LogStore {
    /// A number that no other store has: tells whether a replica still follows the same log.
    fn log_id(&self) -> u64;

    /// Reads what is durable after `after`, which must be where a block ends. Definitions that the
    /// first entries may refer to come first.
    fn read_stored(&self, after: Lsn) -> Result<Box<dyn StoredReader>, StoreError>;

    /// Reads a spill.
    fn read_stored_spill(&self, spill: SpillId) -> Result<Box<dyn StoredReader>, StoreError>;

    /// Hands over the next block of the log that this store is a replica of: it must follow the
    /// end without a hole, its definitions and spills must be here. Waits while too many bytes are
    /// on their way to disk. As with [`LogStore::append`], returning means *accepted*.
    fn append_stored(&self, block: StoredBlock) -> BoxFuture<'_, Result<(), StoreError>>;

    /// Begins to take a spill under the id that it has in the log this store is a replica of. What
    /// an earlier attempt left is replaced.
    fn receive_spill(&self, spill: SpillId) -> Result<Box<dyn SpillReceiver>, StoreError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block() -> StoredBlock {
        let payload = Bytes::from_static(b"abcabcabc");
        StoredBlock {
            kind: StoredKind::Entries,
            container: 3,
            after: Lsn(4),
            first: Lsn(5),
            last: Lsn(6),
            commit_times: (PgTime(-7), PgTime(8)),
            items: 2,
            spilled: vec![SpillId(9), SpillId(10)],
            zstd: false,
            raw_len: 9,
            checksum: crc32c::crc32c(&payload),
            payload,
        }
    }

    fn encoded(block: &StoredBlock) -> Vec<u8> {
        [block.encode_head(), block.payload.clone()].concat()
    }

    #[test]
    fn blocks_round_trip_and_no_cut_or_flip_passes() {
        let bytes = encoded(&block());
        assert_eq!(StoredBlock::decode(Bytes::from(bytes.clone())), Ok(block()));
        for len in 0..bytes.len() {
            assert!(StoredBlock::decode(Bytes::from(bytes[..len].to_vec())).is_err(), "{len}");
        }
        // The payload is covered by the checksum; of the description, frames have their own.
        for bit in (bytes.len() - 9) * 8..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(StoredBlock::decode(Bytes::from(flipped)).is_err(), "{bit}");
        }
    }

    #[test]
    fn what_was_stored_as_it_is_crosses_compressed() {
        let payload = Bytes::from("all work and no play ".repeat(500));
        let mut block = StoredBlock {
            raw_len: payload.len() as u32,
            checksum: crc32c::crc32c(&payload),
            payload: payload.clone(),
            ..block()
        };
        block.compress(1).unwrap();
        assert!(block.zstd && block.payload.len() < payload.len() / 10);
        assert_eq!(block.check(), Ok(()));
        assert_eq!(block.raw(), Ok(payload));
        block.raw_len += 1;
        assert!(block.raw().is_err());
    }

    #[test]
    fn impossible_blocks_are_refused() {
        let spoilers: [fn(&mut StoredBlock); 5] = [
            |block| block.first = block.after,
            |block| block.last = Lsn(4),
            |block| block.raw_len = 10,
            |block| block.kind = StoredKind::Chunk,
            |block| block.raw_len = BLOCK_RAW_MAX + 1,
        ];
        for spoil in spoilers {
            let mut spoiled = block();
            spoil(&mut spoiled);
            assert!(StoredBlock::decode(Bytes::from(encoded(&spoiled))).is_err(), "{spoiled:?}");
        }
    }
}
