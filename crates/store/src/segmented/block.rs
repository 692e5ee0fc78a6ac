//! A block: the unit that is compressed, checksummed and read.
//!
//! ```text
//!  offset  size  field (all little-endian)
//!       0     8  magic  F5 'F' 'S' 'B' 'L' 'K' 0D 0A
//!       8     4  CRC32C over the stored payload, continued over bytes 12..104 of this header
//!      12     1  kind: 1 entries, 2 definitions, 3 chunk of a spill, 4 footer of a spill
//!      13     1  flags: bit 0 = payload is a zstd frame (otherwise it is stored as it is)
//!      14     2  zero
//!      16     4  stored length of the payload
//!      20     4  raw length of the payload
//!      24     8  store id
//!      32     8  container: the segment's sequence number, or the spill's id
//!      40     8  block number inside its container, from 0 without gaps
//!      48     8  synced_to: file bytes that an fsync had covered when this block was written
//!      56     8  after: end of the log before this block
//!      64     8  position of the first entry   (definitions: = after)
//!      72     8  position of the last entry    (definitions: = after)
//!      80     8  smallest commit time          (definitions: 0)
//!      88     8  largest commit time           (definitions: 0)
//!      96     4  entries in the block          (definitions: definitions)
//!     100     4  entries whose body is in a spill
//!     104     …  payload
//! ```
//!
//! `after` chains the blocks: it equals the `last` of the block before. `synced_to` is what tells
//! a torn tail from damage: see the decision table in `docs/formats/segment.md`.

use crate::StoreError;
use bytes::Bytes;
use farshore_model::{Lsn, PgTime};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

pub(crate) const MAGIC: [u8; 8] = *b"\xF5FSBLK\r\n";
pub(crate) const HEADER_LEN: usize = 104;
const FLAG_ZSTD: u8 = 1;
/// Bytes read at a time when a block is only verified.
const VERIFY_STEP: usize = 1 << 20;

/// What a block's payload is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Entries,
    Definitions,
    Chunk,
    Footer,
}

impl Kind {
    fn to_byte(self) -> u8 {
        match self {
            Kind::Entries => 1,
            Kind::Definitions => 2,
            Kind::Chunk => 3,
            Kind::Footer => 4,
        }
    }

    fn from_byte(byte: u8) -> Option<Kind> {
        match byte {
            1 => Some(Kind::Entries),
            2 => Some(Kind::Definitions),
            3 => Some(Kind::Chunk),
            4 => Some(Kind::Footer),
            _ => None,
        }
    }
}

/// What the writer says about a block's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    pub kind: Kind,
    pub after: Lsn,
    pub first: Lsn,
    pub last: Lsn,
    pub commit_time_min: PgTime,
    pub commit_time_max: PgTime,
    pub entries: u32,
    pub spilled: u32,
}

impl Content {
    /// Content without entries, at one position of the log.
    pub fn without_entries(kind: Kind, at: Lsn, items: u32) -> Content {
        Content {
            kind,
            after: at,
            first: at,
            last: at,
            commit_time_min: PgTime(0),
            commit_time_max: PgTime(0),
            entries: items,
            spilled: 0,
        }
    }
}

/// Which file a block belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Container {
    pub store_id: u64,
    /// A segment's sequence number or a spill's id.
    pub number: u64,
}

/// A decoded block header. Trust it only after the checksum of the whole block was verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub crc: u32,
    pub zstd: bool,
    pub stored_len: u32,
    pub raw_len: u32,
    pub container: Container,
    pub sequence: u64,
    pub synced_to: u64,
    pub content: Content,
}

impl Header {
    /// Bytes of the block in its file.
    pub fn block_len(&self) -> u64 {
        HEADER_LEN as u64 + u64::from(self.stored_len)
    }

    /// The header's bytes; `crc` is computed from `payload_crc`, the CRC32C of the stored payload.
    pub fn encode(&self, payload_crc: u32) -> [u8; HEADER_LEN] {
        let mut out = [0; HEADER_LEN];
        out[..8].copy_from_slice(&MAGIC);
        out[12] = self.content.kind.to_byte();
        out[13] = if self.zstd { FLAG_ZSTD } else { 0 };
        out[16..20].copy_from_slice(&self.stored_len.to_le_bytes());
        out[20..24].copy_from_slice(&self.raw_len.to_le_bytes());
        let content = &self.content;
        let words = [
            self.container.store_id,
            self.container.number,
            self.sequence,
            self.synced_to,
            content.after.0,
            content.first.0,
            content.last.0,
            content.commit_time_min.0 as u64,
            content.commit_time_max.0 as u64,
        ];
        for (index, word) in words.into_iter().enumerate() {
            out[24 + index * 8..32 + index * 8].copy_from_slice(&word.to_le_bytes());
        }
        out[96..100].copy_from_slice(&content.entries.to_le_bytes());
        out[100..104].copy_from_slice(&content.spilled.to_le_bytes());
        let crc = crc32c::crc32c_append(payload_crc, &out[12..]);
        out[8..12].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Reads a header's fields; says what is wrong with bytes that cannot be one.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Header, &'static str> {
        if bytes[..8] != MAGIC {
            return Err("no block starts here");
        }
        let u32_at = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let kind = Kind::from_byte(bytes[12]).ok_or("the block's kind is unknown")?;
        if bytes[13] & !FLAG_ZSTD != 0 {
            return Err("the block's flags are unknown");
        }
        let header = Header {
            crc: u32_at(8),
            zstd: bytes[13] & FLAG_ZSTD != 0,
            stored_len: u32_at(16),
            raw_len: u32_at(20),
            container: Container { store_id: u64_at(24), number: u64_at(32) },
            sequence: u64_at(40),
            synced_to: u64_at(48),
            content: Content {
                kind,
                after: Lsn(u64_at(56)),
                first: Lsn(u64_at(64)),
                last: Lsn(u64_at(72)),
                commit_time_min: PgTime(u64_at(80) as i64),
                commit_time_max: PgTime(u64_at(88) as i64),
                entries: u32_at(96),
                spilled: u32_at(100),
            },
        };
        if !header.zstd && header.stored_len != header.raw_len {
            return Err("the block's lengths disagree");
        }
        Ok(header)
    }
}

/// Why a block could not be read.
#[derive(Debug)]
pub(crate) enum BlockError {
    Io(std::io::Error),
    Bad(&'static str),
}

impl From<std::io::Error> for BlockError {
    fn from(error: std::io::Error) -> BlockError {
        BlockError::Io(error)
    }
}

impl BlockError {
    /// The store's error for a block that was durable and must be readable.
    pub fn into_store_error(self, path: &Path, offset: u64) -> StoreError {
        match self {
            BlockError::Io(error) => super::io_error("read", path)(error),
            BlockError::Bad(what) => super::damaged(path, format!("at byte {offset}: {what}")),
        }
    }
}

/// Reads the header at `offset` of a file whose blocks end at `limit` or before. Unverified.
pub(crate) fn read_header(file: &File, offset: u64, limit: u64) -> Result<Header, BlockError> {
    if offset.checked_add(HEADER_LEN as u64).is_none_or(|end| end > limit) {
        return Err(BlockError::Bad("the file ends inside a block header"));
    }
    let mut bytes = [0; HEADER_LEN];
    file.read_exact_at(&mut bytes, offset)?;
    let header = Header::decode(&bytes).map_err(BlockError::Bad)?;
    if offset + header.block_len() > limit {
        return Err(BlockError::Bad("the file ends inside a block"));
    }
    Ok(header)
}

fn check_crc(header: &Header, payload_crc: u32) -> Result<(), BlockError> {
    // Encoding the decoded fields gives the header's bytes again, reserved ones as zero.
    let expected = header.encode(payload_crc);
    if expected[8..12] != header.crc.to_le_bytes() {
        return Err(BlockError::Bad("the block's checksum does not match"));
    }
    Ok(())
}

/// Reads blocks, reusing its buffer and decompression context. Holds at most one stored block.
pub(crate) struct BlockReader {
    stored: Vec<u8>,
    zstd: Option<zstd::zstd_safe::DCtx<'static>>,
}

/// A stored buffer larger than this is given back after use.
const STORED_KEEP_MAX: usize = 1 << 20;

impl BlockReader {
    pub fn new() -> BlockReader {
        BlockReader { stored: Vec::new(), zstd: None }
    }

    /// The raw payload of the block whose header is `header`, checksum verified.
    pub fn read_payload(
        &mut self,
        file: &File,
        offset: u64,
        header: &Header,
    ) -> Result<Bytes, BlockError> {
        self.read(file, offset, header)?;
        let raw = if header.zstd {
            self.decompress(header.raw_len as usize)?
        } else {
            std::mem::take(&mut self.stored)
        };
        if self.stored.capacity() > STORED_KEEP_MAX {
            self.stored = Vec::new();
        }
        Ok(Bytes::from(raw))
    }

    /// The payload as it is stored, and its CRC32C, which was verified.
    pub fn read_stored(
        &mut self,
        file: &File,
        offset: u64,
        header: &Header,
    ) -> Result<(Bytes, u32), BlockError> {
        let crc = self.read(file, offset, header)?;
        Ok((Bytes::from(std::mem::take(&mut self.stored)), crc))
    }

    /// Fills the buffer with the stored payload; its CRC32C.
    fn read(&mut self, file: &File, offset: u64, header: &Header) -> Result<u32, BlockError> {
        self.stored.clear();
        self.stored.resize(header.stored_len as usize, 0);
        file.read_exact_at(&mut self.stored, offset + HEADER_LEN as u64)?;
        let crc = crc32c::crc32c(&self.stored);
        check_crc(header, crc)?;
        Ok(crc)
    }

    fn decompress(&mut self, raw_len: usize) -> Result<Vec<u8>, BlockError> {
        if self.zstd.is_none() {
            self.zstd = zstd::zstd_safe::DCtx::try_create();
        }
        let Some(context) = &mut self.zstd else {
            return Err(BlockError::Io(std::io::ErrorKind::OutOfMemory.into()));
        };
        let mut raw = Vec::with_capacity(raw_len);
        match context.decompress(&mut raw, &self.stored) {
            Ok(len) if len == raw_len => Ok(raw),
            Ok(_) => Err(BlockError::Bad("the block decompresses to another length")),
            Err(_) => Err(BlockError::Bad("the block does not decompress")),
        }
    }
}

/// Reads and verifies the block at `offset` without keeping its payload.
pub(crate) fn verify(file: &File, offset: u64, limit: u64) -> Result<Header, BlockError> {
    let header = read_header(file, offset, limit)?;
    let mut buffer = vec![0; VERIFY_STEP.min(header.stored_len as usize)];
    let mut at = offset + HEADER_LEN as u64;
    let end = at + u64::from(header.stored_len);
    let mut crc = 0;
    while at < end {
        let step = (end - at).min(VERIFY_STEP as u64) as usize;
        file.read_exact_at(&mut buffer[..step], at)?;
        crc = crc32c::crc32c_append(crc, &buffer[..step]);
        at += step as u64;
    }
    check_crc(&header, crc)?;
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            crc: 0,
            zstd: true,
            stored_len: 3,
            raw_len: 9,
            container: Container { store_id: 1, number: 2 },
            sequence: 3,
            synced_to: 4,
            content: Content {
                kind: Kind::Entries,
                after: Lsn(5),
                first: Lsn(6),
                last: Lsn(7),
                commit_time_min: PgTime(-8),
                commit_time_max: PgTime(9),
                entries: 10,
                spilled: 1,
            },
        }
    }

    #[test]
    fn header_round_trips_and_every_flipped_bit_is_noticed() {
        let payload_crc = crc32c::crc32c(b"abc");
        let bytes = header().encode(payload_crc);
        let decoded = Header::decode(&bytes).unwrap();
        assert_eq!(Header { crc: 0, ..decoded }, header());
        assert!(check_crc(&decoded, payload_crc).is_ok());
        for bit in 0..HEADER_LEN * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            let noticed = match Header::decode(&flipped) {
                Err(_) => true,
                Ok(decoded) => check_crc(&decoded, payload_crc).is_err(),
            };
            // The two reserved bytes carry nothing.
            assert!(noticed || (14..16).contains(&(bit / 8)), "bit {bit}");
        }
    }
}
