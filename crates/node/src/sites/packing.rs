//! Blocks that cross several at a time, compressed together. Pure.
//!
//! Blocks cross as they are stored: compressed once, for any number of receivers. While the line is
//! what everything waits for, a processor has time to spare, and blocks that are compressed again,
//! together and harder, are a seventh smaller. Whether that is so is measured: a line that is
//! always full, and slow enough for a processor to keep up.
//!
//! ```text
//! length u32   of what follows, decompressed
//! zstd frame   the blocks, one after the other: description as in a message of its own, payload
//!              decompressed
//! ```

use bytes::{Buf, BufMut, Bytes, BytesMut};
use farshore_store::StoredBlock;
use std::time::{Duration, Instant};

/// Payload bytes, decompressed, that are compressed together: with more the gain is small.
pub(super) const PACK_BYTES: u32 = 1 << 20;
/// A pack is shorter than this: its last block, and descriptions, come on top.
const PACK_BYTES_MAX: u32 = 4 << 20;
/// Least zstd level for packs: a quarter of the gain is in the level, the rest in the length.
const LEVEL_MIN: i32 = 3;

/// How long the line is watched before it is judged.
const WINDOW: Duration = Duration::from_millis(500);
/// Payload bytes a second, decompressed, that a processor packs with ease.
const EASY_BYTES_PER_SECOND: f64 = 40e6;

/// Whether blocks are packed now.
#[derive(Debug)]
pub(super) struct Packing {
    /// zstd level for blocks that are not stored compressed; 0: they cross as they are stored.
    pub compression: i32,
    /// The site at the other end takes packs.
    allowed: bool,
    since: Instant,
    waited: Duration,
    raw_bytes: u64,
    on: bool,
}

impl Packing {
    pub fn new(compression: i32, allowed: bool, now: Instant) -> Packing {
        let allowed = allowed && compression > 0;
        Packing {
            compression,
            allowed,
            since: now,
            waited: Duration::ZERO,
            raw_bytes: 0,
            on: false,
        }
    }

    /// Whether the next blocks are to be packed.
    pub fn is_on(&self) -> bool {
        self.on && self.allowed
    }

    /// Blocks of `raw_bytes` were handed to the line, which took them after `waited`.
    pub fn sent(&mut self, raw_bytes: u64, waited: Duration, now: Instant) {
        self.waited += waited;
        self.raw_bytes += raw_bytes;
        let window = now.duration_since(self.since);
        if window < WINDOW {
            return;
        }
        let full = self.waited.as_secs_f64() / window.as_secs_f64();
        let rate = self.raw_bytes as f64 / window.as_secs_f64();
        // It goes on while the line is full more often than not.
        self.on = rate < EASY_BYTES_PER_SECOND && full > if self.on { 0.3 } else { 0.6 };
        (self.since, self.waited, self.raw_bytes) = (now, Duration::ZERO, 0);
    }
}

/// Packs blocks; `None` if one of them cannot be read, or they are too much for one pack.
pub(super) fn pack(blocks: &[StoredBlock], level: i32) -> Option<Bytes> {
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
pub(super) fn unpack(mut packed: Bytes, level: i32) -> Result<Vec<StoredBlock>, &'static str> {
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
    use farshore_model::{Lsn, PgTime};
    use farshore_store::StoredKind;

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

    #[test]
    fn blocks_are_packed_while_a_slow_line_is_full() {
        let mut now = Instant::now();
        let packing_of = |level, allowed| Packing::new(level, allowed, now);
        let mut packing = packing_of(1, true);
        let mut others = [packing_of(1, false), packing_of(0, true)];
        let mut second = |packing: &mut Packing, raw_bytes: u64, waited_ms: u64| {
            for _ in 0..10 {
                now += Duration::from_millis(100);
                packing.sent(raw_bytes / 10, Duration::from_millis(waited_ms / 10), now);
            }
            packing.is_on()
        };
        assert!(!second(&mut packing, 4_000_000, 100), "the log is what is waited for");
        assert!(second(&mut packing, 4_000_000, 950));
        assert!(second(&mut packing, 4_000_000, 450), "packing takes time too");
        assert!(!second(&mut packing, 4_000_000, 50), "it has caught up");
        assert!(!second(&mut packing, 300_000_000, 900), "too fast to be packed");
        for other in &mut others {
            assert!(!second(other, 4_000_000, 950));
            assert!(!second(other, 4_000_000, 950));
        }
    }
}
