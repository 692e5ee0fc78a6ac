//! Blocks of a log compressed together, for a line that is slow: as they are stored, block by block,
//! they are a seventh larger.
//!
//! ```text
//! length u32   of what follows, decompressed; little-endian
//! zstd frame   the blocks, one after the other: description, payload decompressed
//! ```

use crate::StoredBlock;
use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Payload bytes, decompressed, that are compressed together: with more the gain is small.
pub const PACK_BYTES: u32 = 1 << 20;
/// A pack is shorter than this: its last block, and descriptions, come on top.
const PACK_BYTES_MAX: u32 = 4 << 20;
/// Least zstd level for packs: a quarter of the gain is in the level, the rest in the length.
const LEVEL_MIN: i32 = 3;

/// Packs blocks, at `level` or the least that is worthwhile; `None` if one of them cannot be read,
/// or they are too much for one pack.
pub fn pack(blocks: &[StoredBlock], level: i32) -> Option<Bytes> {
    let mut raw = BytesMut::new();
    for block in blocks {
        let block = block.decompressed().ok()?;
        raw.put_slice(&block.encode_head());
        raw.put_slice(&block.payload);
    }
    let length = u32::try_from(raw.len()).ok().filter(|length| *length < PACK_BYTES_MAX)?;
    let packed = zstd::bulk::compress(&raw, level.max(LEVEL_MIN)).ok()?;
    let mut out = BytesMut::with_capacity(4 + packed.len());
    out.put_u32_le(length);
    out.put_slice(&packed);
    Some(out.freeze())
}

/// The blocks of a pack, each compressed at `level` again, to be stored.
///
/// # Errors
/// What is wrong with bytes that are no pack.
pub fn unpack(mut packed: Bytes, level: i32) -> Result<Vec<StoredBlock>, &'static str> {
    if packed.len() < 4 {
        return Err("a pack is too short");
    }
    let length = packed.get_u32_le();
    if length >= PACK_BYTES_MAX {
        return Err("a pack is larger than one can be");
    }
    let raw = zstd::bulk::decompress(&packed, length as usize);
    let mut raw = Bytes::from(raw.map_err(|_| "a pack does not decompress")?);
    if raw.len() != length as usize {
        return Err("a pack decompresses to another length");
    }
    let mut blocks = Vec::new();
    while !raw.is_empty() {
        let mut block = StoredBlock::decode_from(&mut raw)?;
        if block.compress(level).is_err() {
            return Err("there is no memory to compress a block");
        }
        blocks.push(block);
    }
    Ok(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StoredKind;
    use farshore_model::{Lsn, PgTime};

    fn block(number: u64, payload: Vec<u8>) -> StoredBlock {
        StoredBlock {
            kind: StoredKind::Entries,
            container: 1,
            after: Lsn(number),
            first: Lsn(number + 1),
            last: Lsn(number + 1),
            commit_times: (PgTime(1), PgTime(2)),
            items: 1,
            spilled: Vec::new(),
            zstd: false,
            raw_len: payload.len() as u32,
            checksum: crc32c::crc32c(&payload),
            payload: payload.into(),
        }
    }

    #[test]
    fn blocks_come_out_as_they_went_in() {
        let text = |n: u64| format!("block {n}: ").repeat(200).into_bytes();
        let mut blocks: Vec<_> = (0..4).map(|n| block(n, text(n))).collect();
        blocks[1].compress(1).unwrap();
        assert!(blocks[1].zstd);
        blocks.push(block(9, Vec::new()));
        let packed = pack(&blocks, 1).unwrap();
        for (before, after) in blocks.iter().zip(unpack(packed.clone(), 1).unwrap()) {
            assert_eq!(after.check(), Ok(()));
            assert_eq!(before.decompressed(), after.decompressed());
        }
        for len in 0..packed.len() {
            assert!(unpack(packed.slice(..len), 1).is_err(), "{len}");
        }
        let mut large = BytesMut::from(&packed[..]);
        large[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(unpack(large.freeze(), 1).is_err());
        assert!(pack(&[block(1, vec![7; PACK_BYTES_MAX as usize])], 1).is_none());
    }
}
