//! The state file: whose log it is, where it begins, and a position that was durable.

use super::{Identity, SpoolError, folder};
use crate::wal::{SegmentBytes, Timeline};
use farshore_model::Lsn;
use std::path::Path;

const MAGIC: &[u8; 8] = b"FARSHSPL";
/// Since 2, old log may stand behind the newest: who reads it must know old log when it sees it.
const VERSION: u32 = 2;
const OLDEST_VERSION: u32 = 1;
const BYTES: usize = 56;

/// What the state file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct State {
    pub identity: Identity,
    /// The timeline that it began on.
    pub timeline: Timeline,
    /// Where it began: the start of a segment.
    pub begin: Lsn,
    /// Log before this was durable when the file was written, on the timeline that it began on.
    pub floor: Lsn,
}

impl State {
    fn encode(&self) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.identity.segment.get() as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.identity.system_id.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.identity.server_version.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.timeline.0.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.begin.0.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.floor.0.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..48]);
        bytes[48..52].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Result<State, String> {
        let bytes: &[u8; BYTES] = bytes
            .try_into()
            .map_err(|_| format!("it has {} bytes and not {BYTES}", bytes.len()))?;
        let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let u64_at = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if bytes[..8] != *MAGIC {
            return Err("it does not begin as one".to_owned());
        }
        if u32_at(48) != crc32c::crc32c(&bytes[..48]) {
            return Err("its checksum is wrong".to_owned());
        }
        let version = u32_at(8);
        if !(OLDEST_VERSION..=VERSION).contains(&version) {
            return Err(format!("it is of version {version}, and this program knows {VERSION}"));
        }
        let segment = SegmentBytes::new(u32_at(12).into())
            .ok_or_else(|| format!("no segment has {} bytes", u32_at(12)))?;
        let (begin, floor) = (Lsn(u64_at(32)), Lsn(u64_at(40)));
        if floor < begin || segment.floor(begin) != begin {
            return Err(format!("it begins at {begin} and was durable up to {floor}"));
        }
        Ok(State {
            identity: Identity { system_id: u64_at(16), segment, server_version: u32_at(24) },
            timeline: Timeline(u32_at(28)),
            begin,
            floor,
        })
    }

    /// Whether the file is of an earlier version.
    pub fn is_of_earlier_version(folder: &Path) -> bool {
        let bytes = std::fs::read(folder.join(folder::STATE)).unwrap_or_default();
        bytes.get(8..12).is_some_and(|version| version != VERSION.to_le_bytes())
    }

    /// Makes it durable.
    pub fn write(&self, folder: &Path) -> Result<(), SpoolError> {
        folder::replace(&folder.join(folder::STATE), &self.encode())
    }

    /// `None` if there is none.
    pub fn read(folder: &Path) -> Result<Option<State>, SpoolError> {
        let path = folder.join(folder::STATE);
        match std::fs::read(&path) {
            Ok(bytes) => {
                State::decode(&bytes).map(Some).map_err(|what| SpoolError::State { path, what })
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(SpoolError::io("read", &path)(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_read_as_it_was_written_and_no_flipped_bit_passes() {
        let state = State {
            identity: Identity {
                system_id: 7,
                segment: SegmentBytes::new(16 << 20).unwrap(),
                server_version: 150_018,
            },
            timeline: Timeline(2),
            begin: Lsn(32 << 20),
            floor: Lsn((32 << 20) + 5),
        };
        let bytes = state.encode();
        assert_eq!(State::decode(&bytes), Ok(state));
        for bit in 0..52 * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(State::decode(&flipped).is_err(), "bit {bit}");
        }
        let with_version = |version: u32| {
            let mut bytes = bytes;
            bytes[8..12].copy_from_slice(&version.to_le_bytes());
            let crc = crc32c::crc32c(&bytes[..48]);
            bytes[48..52].copy_from_slice(&crc.to_le_bytes());
            State::decode(&bytes)
        };
        assert_eq!(with_version(1), Ok(state));
        assert!(with_version(0).is_err() && with_version(3).is_err());
        for len in 0..BYTES {
            assert!(State::decode(&bytes[..len]).is_err());
        }
    }
}
