//! What the two ends of a seeding say to each other. The request and the first answer are JSON; what
//! follows is a tag and little-endian numbers. `docs/formats/mirror.md` draws the bytes.
//!
//! Total: every input gives a message or an error.

use super::CHUNK_BYTES;
use crate::relay::message::{NoMessage, Packing, as_text};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use farshore_model::Lsn;
use serde::{Deserialize, Serialize};

/// Bytes of a digest: the beginning of a SHA-256.
pub const DIGEST_BYTES: usize = 16;
/// Digests in one message at most.
pub const DIGESTS_MAX: usize = 4_096;
/// Longest path, in bytes.
const PATH_BYTES_MAX: usize = 4_096;

/// What a chunk holds, in short.
pub type Digest = [u8; DIGEST_BYTES];

/// What a far end asks for when it opens the session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeedRequest {
    /// The mirror's name at the near end.
    pub mirror: String,
    /// At most so many kilobytes per second are read from the principal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_rate_kb: Option<u32>,
    /// The slot that the standby will stream by: what tells two seedings from one that was broken off
    /// and is begun anew. Versions before say nothing of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<String>,
}

/// The near end's first message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SeedAnswer {
    /// Files follow.
    Begins {
        /// Whose.
        system_id: String,
        /// Where the log begins that they need.
        #[serde(with = "as_text")]
        start: Lsn,
        /// On which timeline.
        timeline: u32,
        /// Size of all, estimated, in bytes.
        bytes: u64,
        /// Object ids of tablespaces, and their directories on the principal.
        tablespaces: Vec<(u32, String)>,
    },
    /// They cannot be had.
    Refused {
        /// Why, for a person.
        why: String,
    },
}

/// A message of the far end, before the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromTaker {
    /// It has this of a file: the digests of its chunks, from the one with this number on.
    Has {
        /// Relative to the data directory.
        path: String,
        /// Number of the first chunk.
        first: u32,
        /// One per chunk; of the file's last one over what there is of it.
        digests: Vec<Digest>,
    },
    /// That was all.
    Go,
}

/// A message of the near end, after its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromGiver {
    /// A file begins.
    File {
        /// Relative to the data directory.
        path: String,
        /// Permission bits.
        mode: u32,
        /// Size in bytes.
        bytes: u64,
    },
    /// A directory.
    Directory {
        /// Relative to the data directory.
        path: String,
        /// Permission bits.
        mode: u32,
    },
    /// The next bytes of the file that began last.
    Data {
        /// How many, at most [`CHUNK_BYTES`].
        bytes: u32,
        /// How they are packed.
        packing: Packing,
        /// The packed bytes.
        packed: Bytes,
    },
    /// The next bytes are those that the far end has there.
    Same {
        /// How many.
        bytes: u64,
    },
    /// The manifest begins: its pieces follow as [`FromGiver::Data`].
    Manifest,
    /// That was all.
    End {
        /// Up to where the log must be replayed.
        end: Lsn,
    },
    /// The last message: the near end cannot go on.
    Failed {
        /// Why, for a person.
        why: Bytes,
    },
}

const TAG_HAS: u8 = b'H';
const TAG_GO: u8 = b'G';
const TAG_FILE: u8 = b'F';
const TAG_DIRECTORY: u8 = b'M';
const TAG_DATA: u8 = b'D';
const TAG_SAME: u8 = b'S';
const TAG_MANIFEST: u8 = b'N';
const TAG_END: u8 = b'Z';
const TAG_FAILED: u8 = b'E';

fn path(bytes: &[u8]) -> Result<String, NoMessage> {
    if bytes.len() > PATH_BYTES_MAX {
        return Err(NoMessage("a path that is too long"));
    }
    let text = std::str::from_utf8(bytes).map_err(|_| NoMessage("a path that is not UTF-8"))?;
    // It is put below a directory of the far end's choice, and nowhere else.
    let is_relative = text.split('/').all(|part| !matches!(part, "" | "." | ".."));
    if is_relative && !text.contains('\0') {
        Ok(text.to_owned())
    } else {
        Err(NoMessage("a path that leads elsewhere"))
    }
}

impl FromTaker {
    /// The message.
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::new();
        match self {
            FromTaker::Has { path, first, digests } => {
                out.put_u8(TAG_HAS);
                out.put_u32_le(*first);
                out.put_u16_le(path.len().min(PATH_BYTES_MAX) as u16);
                out.put_slice(path.as_bytes());
                digests.iter().for_each(|digest| out.put_slice(digest));
            }
            FromTaker::Go => out.put_u8(TAG_GO),
        }
        out.freeze()
    }

    /// Reads a message.
    ///
    /// # Errors
    /// What is wrong with bytes that are none.
    pub fn decode(mut bytes: Bytes) -> Result<FromTaker, NoMessage> {
        match (bytes.first(), bytes.len()) {
            (Some(&TAG_GO), 1) => Ok(FromTaker::Go),
            (Some(&TAG_HAS), 7..) => {
                bytes.advance(1);
                let first = bytes.get_u32_le();
                let path_bytes = usize::from(bytes.get_u16_le());
                if bytes.len() < path_bytes {
                    return Err(NoMessage("digests without a file"));
                }
                let path = path(&bytes.split_to(path_bytes))?;
                if !bytes.len().is_multiple_of(DIGEST_BYTES)
                    || bytes.len() > DIGESTS_MAX * DIGEST_BYTES
                {
                    return Err(NoMessage("digests that are cut off, or too many"));
                }
                let mut digests = Vec::with_capacity(bytes.len() / DIGEST_BYTES);
                while bytes.has_remaining() {
                    let mut digest = [0; DIGEST_BYTES];
                    bytes.copy_to_slice(&mut digest);
                    digests.push(digest);
                }
                Ok(FromTaker::Has { path, first, digests })
            }
            _ => Err(NoMessage("a message of an unknown kind")),
        }
    }
}

impl FromGiver {
    /// The message in parts, one after the other, so that data is not copied.
    pub fn encode(&self) -> Vec<Bytes> {
        let mut out = BytesMut::new();
        match self {
            FromGiver::File { path, mode, bytes } => {
                out.put_u8(TAG_FILE);
                out.put_u32_le(*mode);
                out.put_u64_le(*bytes);
                out.put_slice(path.as_bytes());
            }
            FromGiver::Directory { path, mode } => {
                out.put_u8(TAG_DIRECTORY);
                out.put_u32_le(*mode);
                out.put_slice(path.as_bytes());
            }
            FromGiver::Data { bytes, packing, packed } => {
                out.put_u8(TAG_DATA);
                out.put_u8(packing.to_byte());
                out.put_u32_le(*bytes);
                return vec![out.freeze(), packed.clone()];
            }
            FromGiver::Same { bytes } => {
                out.put_u8(TAG_SAME);
                out.put_u64_le(*bytes);
            }
            FromGiver::Manifest => out.put_u8(TAG_MANIFEST),
            FromGiver::End { end } => {
                out.put_u8(TAG_END);
                out.put_u64_le(end.0);
            }
            FromGiver::Failed { why } => {
                out.put_u8(TAG_FAILED);
                return vec![out.freeze(), why.clone()];
            }
        }
        vec![out.freeze()]
    }

    /// Reads a message.
    ///
    /// # Errors
    /// What is wrong with bytes that are none.
    pub fn decode(mut bytes: Bytes) -> Result<FromGiver, NoMessage> {
        if bytes.is_empty() {
            return Err(NoMessage("an empty message"));
        }
        match (bytes.get_u8(), bytes.len()) {
            (TAG_FILE, 13..) => {
                let (mode, length) = (bytes.get_u32_le(), bytes.get_u64_le());
                Ok(FromGiver::File { path: path(&bytes)?, mode: mode & 0o777, bytes: length })
            }
            (TAG_DIRECTORY, 5..) => {
                let mode = bytes.get_u32_le();
                Ok(FromGiver::Directory { path: path(&bytes)?, mode: mode & 0o777 })
            }
            (TAG_DATA, 5..) => {
                let packing = Packing::from_byte(bytes.get_u8())
                    .filter(|packing| !packing.is_reduced())
                    .ok_or(NoMessage("data that is packed in an unknown way"))?;
                let length = bytes.get_u32_le();
                if length as usize > CHUNK_BYTES {
                    return Err(NoMessage("a piece of data that is too long"));
                }
                Ok(FromGiver::Data { bytes: length, packing, packed: bytes })
            }
            (TAG_SAME, 8) => Ok(FromGiver::Same { bytes: bytes.get_u64_le() }),
            (TAG_MANIFEST, 0) => Ok(FromGiver::Manifest),
            (TAG_END, 8) => Ok(FromGiver::End { end: Lsn(bytes.get_u64_le()) }),
            (TAG_FAILED, _) => Ok(FromGiver::Failed { why: bytes }),
            _ => Err(NoMessage("a message of an unknown kind")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip_and_no_cut_of_a_fixed_one_passes() {
        let path = || "base/1/2".to_owned();
        for (message, head) in [
            (FromGiver::File { path: path(), mode: 0o600, bytes: 7 }, 14),
            (FromGiver::Directory { path: path(), mode: 0o700 }, 6),
            (FromGiver::Data { bytes: 3, packing: Packing::Plain, packed: "abc".into() }, 6),
            (FromGiver::Same { bytes: 1 << 40 }, 9),
            (FromGiver::Manifest, 1),
            (FromGiver::End { end: Lsn(7) }, 9),
            (FromGiver::Failed { why: "why".into() }, 1),
        ] {
            let bytes = Bytes::from(message.encode().concat());
            assert_eq!(FromGiver::decode(bytes.clone()).as_ref(), Ok(&message));
            for len in 0..head {
                assert!(FromGiver::decode(bytes.slice(..len)).is_err(), "{message:?} cut at {len}");
            }
        }
        let has = FromTaker::Has { path: path(), first: 2, digests: vec![[1; 16], [2; 16]] };
        for message in [has, FromTaker::Go] {
            let bytes = message.encode();
            assert_eq!(FromTaker::decode(bytes.clone()).as_ref(), Ok(&message));
            assert!(FromTaker::decode(bytes.slice(..bytes.len() - 1)).is_err());
        }
    }

    #[test]
    fn no_path_leads_out_of_the_data_directory() {
        for path in ["", "/etc/passwd", "..", "base/../../x", "./x", "base//x", "base/", "a\0b"] {
            let message = FromGiver::File { path: path.into(), mode: 0o600, bytes: 1 };
            let bytes = Bytes::from(message.encode().concat());
            assert!(FromGiver::decode(bytes).is_err(), "{path:?}");
        }
    }
}
