//! What the two ends of a mirror say to each other. The request and the first answer are JSON, so
//! that a version can add to them; what follows is a tag and little-endian numbers.
//! `docs/formats/mirror.md` draws the bytes.
//!
//! Total: every input gives a message or an error.

use crate::history::HISTORY_BYTES_MAX;
use crate::spool::PIECE_BYTES_MAX;
use crate::wal::Timeline;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use farshore_model::Lsn;
use serde::{Deserialize, Serialize};

/// What a far end asks for when it opens a session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MirrorRequest {
    /// The mirror's name at the near end.
    pub mirror: String,
    /// What is there already; without it the far end has nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub have: Option<Have>,
    /// The far end can restore log that was reduced before it was packed.
    #[serde(default)]
    pub restores: bool,
    /// So it can where whole pages in it were reduced too.
    #[serde(default)]
    pub restores_pages: bool,
}

/// How much of the log a far end has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Have {
    /// Whose log: the cluster's system identifier.
    pub system_id: String,
    /// On which timeline.
    pub timeline: u32,
    /// Up to where it is durable there.
    #[serde(with = "as_text")]
    pub durable: Lsn,
    /// What it ends with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tail: Option<Tail>,
    /// What it was given in its last session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<Turn>,
}

/// The number of a spool's last session with a near end, higher in each: a copy of a spool is told from
/// it by that once one of the two has had another session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Turn(pub u64);

/// A piece of log, by which it is told from other log at the same positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tail {
    /// Position of its first byte.
    #[serde(with = "as_text")]
    pub start: Lsn,
    /// Position behind its last byte.
    #[serde(with = "as_text")]
    pub end: Lsn,
    /// Checksum of its bytes (CRC-32C).
    pub crc32c: u32,
}

/// The near end's first message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Log follows.
    Follows {
        /// Whose.
        system_id: String,
        /// The timeline of what follows.
        timeline: u32,
        /// Where it begins.
        #[serde(with = "as_text")]
        start: Lsn,
        /// Bytes of a segment.
        segment_bytes: u64,
        /// The principal's version, as `server_version_num`.
        server_version: u32,
        /// Commits wait for what standbys have replayed: it is to be told at once. So it is where
        /// the near end does not say.
        #[serde(default = "yes")]
        applied_counts: bool,
        /// No commit waits for anything of the far end: that it is told now and then is enough.
        #[serde(default)]
        nothing_counts: bool,
        /// What the far end is to note, and to say that it has ([`FromFar::TurnNoted`]); absent where
        /// the near end does not ask for it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        turn: Option<Turn>,
    },
    /// It cannot be had.
    Refused {
        /// Why, for a person.
        why: String,
        /// It may end by itself.
        passes: bool,
        /// The principal left the far end's timeline before where its log ends.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        left: Option<Left>,
    },
}

/// Where a principal left a timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// Position of the first byte that it has on the next one.
    #[serde(with = "as_text")]
    pub at: Lsn,
}

fn yes() -> bool {
    true
}

/// How log bytes are packed in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packing {
    /// As they are.
    Plain,
    /// zstd, one frame over all messages of the session that are packed so, flushed at the end of
    /// every message.
    Zstd,
    /// An lz4 block whose dictionary is the 64 KiB right before, however they were packed: as they
    /// were given to the packing, reduced or not.
    Lz4,
    /// Log that was reduced first (see [`super::redundancy`]), in the same frame as [`Packing::Zstd`].
    ReducedZstd,
    /// Log that was reduced first, as [`Packing::Lz4`].
    ReducedLz4,
    /// As [`Packing::ReducedZstd`], and whole pages in the log were reduced too.
    PagesReducedZstd,
    /// As [`Packing::ReducedLz4`], and whole pages in the log were reduced too.
    PagesReducedLz4,
}

impl Packing {
    /// Whether what is packed is log without what follows from the rest of it.
    pub fn is_reduced(self) -> bool {
        matches!(self, Packing::ReducedZstd | Packing::ReducedLz4) || self.has_pages_reduced()
    }

    /// Whether that goes for whole pages too.
    pub fn has_pages_reduced(self) -> bool {
        matches!(self, Packing::PagesReducedZstd | Packing::PagesReducedLz4)
    }

    pub(crate) fn to_byte(self) -> u8 {
        match self {
            Packing::Plain => 0,
            Packing::Zstd => 1,
            Packing::Lz4 => 2,
            Packing::ReducedZstd => 3,
            Packing::ReducedLz4 => 4,
            Packing::PagesReducedZstd => 5,
            Packing::PagesReducedLz4 => 6,
        }
    }

    pub(crate) fn from_byte(byte: u8) -> Option<Packing> {
        match byte {
            0 => Some(Packing::Plain),
            1 => Some(Packing::Zstd),
            2 => Some(Packing::Lz4),
            3 => Some(Packing::ReducedZstd),
            4 => Some(Packing::ReducedLz4),
            5 => Some(Packing::PagesReducedZstd),
            6 => Some(Packing::PagesReducedLz4),
            _ => None,
        }
    }
}

/// A message of the near end, after its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromNear {
    /// A piece of log, right after the piece before.
    Log {
        /// On which timeline.
        timeline: Timeline,
        /// Position of the first byte.
        start: Lsn,
        /// End of the log on the principal then.
        principal_end: Lsn,
        /// Bytes when unpacked, at most [`PIECE_BYTES_MAX`].
        bytes: u32,
        /// How they are packed.
        packing: Packing,
        /// The packed bytes.
        packed: Bytes,
    },
    /// How a timeline came about: the text of its history file.
    History {
        /// Whose.
        timeline: Timeline,
        /// The file.
        text: Bytes,
    },
    /// What follows is on another timeline.
    Switch {
        /// The next one.
        timeline: Timeline,
        /// Where it begins.
        at: Lsn,
    },
    /// Nothing new; the principal is alive.
    Alive {
        /// End of the log on the principal.
        principal_end: Lsn,
    },
    /// The last message: the near end cannot go on.
    Failed {
        /// It may end by itself.
        passes: bool,
        /// Why, for a person.
        why: Bytes,
    },
}

/// How far the log has come at the far end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FarPositions {
    /// The operating system there has everything before this.
    pub written: Lsn,
    /// An fdatasync there has covered everything before this.
    pub durable: Lsn,
    /// The standbys there have replayed everything before this; zero as long as there was none.
    pub applied: Lsn,
}

/// Rows that queries on the standbys there still need. All zero: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Feedback {
    /// Oldest transaction needed, catalogs apart.
    pub xmin: u32,
    /// Its epoch.
    pub xmin_epoch: u32,
    /// Oldest transaction needed in catalogs.
    pub catalog_xmin: u32,
    /// Its epoch.
    pub catalog_xmin_epoch: u32,
}

/// A message of the far end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromFar {
    /// How far it is.
    Positions(FarPositions),
    /// What its standbys need.
    Feedback(Feedback),
    /// The turn that the answer gave it is noted there, durably.
    TurnNoted,
}

/// Bytes that are no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NoMessage(pub &'static str);

/// Positions as PostgreSQL writes them.
pub(crate) mod as_text {
    use farshore_model::Lsn;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(position: &Lsn, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(position)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Lsn, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

const TAG_LOG: u8 = b'L';
const TAG_HISTORY: u8 = b'H';
const TAG_SWITCH: u8 = b'T';
const TAG_ALIVE: u8 = b'A';
const TAG_FAILED: u8 = b'E';
/// Most bytes of a reason.
const WHY_BYTES_MAX: usize = 64 << 10;
const TAG_POSITIONS: u8 = b'P';
const TAG_FEEDBACK: u8 = b'F';
const TAG_TURN_NOTED: u8 = b'N';
const LOG_HEAD: usize = 25;

impl FromNear {
    /// The message in parts, one after the other, so that log is not copied.
    pub fn encode(&self) -> Vec<Bytes> {
        let mut head = BytesMut::with_capacity(1 + LOG_HEAD);
        match self {
            FromNear::Log { timeline, start, principal_end, bytes, packing, packed } => {
                head.put_u8(TAG_LOG);
                head.put_u8(packing.to_byte());
                head.put_u32_le(timeline.0);
                head.put_u64_le(start.0);
                head.put_u64_le(principal_end.0);
                head.put_u32_le(*bytes);
                return vec![head.freeze(), packed.clone()];
            }
            FromNear::History { timeline, text } => {
                head.put_u8(TAG_HISTORY);
                head.put_u32_le(timeline.0);
                return vec![head.freeze(), text.clone()];
            }
            FromNear::Failed { passes, why } => {
                head.put_u8(TAG_FAILED);
                head.put_u8(u8::from(*passes));
                return vec![head.freeze(), why.slice(..why.len().min(WHY_BYTES_MAX))];
            }
            FromNear::Switch { timeline, at } => {
                head.put_u8(TAG_SWITCH);
                head.put_u32_le(timeline.0);
                head.put_u64_le(at.0);
            }
            FromNear::Alive { principal_end } => {
                head.put_u8(TAG_ALIVE);
                head.put_u64_le(principal_end.0);
            }
        }
        vec![head.freeze()]
    }

    /// Reads a message that lies in the parts that it was made in: its log is not copied. Or in any
    /// others.
    ///
    /// # Errors
    /// As [`FromNear::decode`].
    pub fn decode_parts(parts: Vec<Bytes>) -> Result<FromNear, NoMessage> {
        match &parts[..] {
            [whole] => FromNear::decode(whole.clone()),
            [head, body] if head.first() == Some(&TAG_LOG) && head.len() == 1 + LOG_HEAD => {
                let mut message = FromNear::decode(head.clone())?;
                if let FromNear::Log { packed, .. } = &mut message {
                    *packed = body.clone();
                }
                Ok(message)
            }
            several => FromNear::decode(several.concat().into()),
        }
    }

    /// Reads a message.
    ///
    /// # Errors
    /// What is wrong with bytes that are none.
    pub fn decode(mut bytes: Bytes) -> Result<FromNear, NoMessage> {
        if bytes.is_empty() {
            return Err(NoMessage("an empty message"));
        }
        match bytes.get_u8() {
            TAG_LOG if bytes.len() >= LOG_HEAD => {
                let packing = Packing::from_byte(bytes.get_u8())
                    .ok_or(NoMessage("log that is packed in an unknown way"))?;
                let timeline = Timeline(bytes.get_u32_le());
                let (start, principal_end) = (Lsn(bytes.get_u64_le()), Lsn(bytes.get_u64_le()));
                let length = bytes.get_u32_le();
                if length as usize > PIECE_BYTES_MAX || start.0.checked_add(length.into()).is_none()
                {
                    return Err(NoMessage("a piece of log that is too long"));
                }
                let packed = bytes;
                Ok(FromNear::Log { timeline, start, principal_end, bytes: length, packing, packed })
            }
            TAG_HISTORY if (4..=4 + HISTORY_BYTES_MAX).contains(&bytes.len()) => {
                let timeline = Timeline(bytes.get_u32_le());
                Ok(FromNear::History { timeline, text: bytes })
            }
            TAG_FAILED if (1..=1 + WHY_BYTES_MAX).contains(&bytes.len()) => match bytes.get_u8() {
                passes @ (0 | 1) => Ok(FromNear::Failed { passes: passes == 1, why: bytes }),
                _ => Err(NoMessage("a failure that neither passes nor stays")),
            },
            TAG_SWITCH if bytes.len() == 12 => {
                let timeline = Timeline(bytes.get_u32_le());
                Ok(FromNear::Switch { timeline, at: Lsn(bytes.get_u64_le()) })
            }
            TAG_ALIVE if bytes.len() == 8 => {
                Ok(FromNear::Alive { principal_end: Lsn(bytes.get_u64_le()) })
            }
            _ => Err(NoMessage("a message of an unknown kind")),
        }
    }
}

impl FromFar {
    /// The message.
    pub fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(25);
        match self {
            FromFar::Positions(positions) => {
                out.put_u8(TAG_POSITIONS);
                out.put_u64_le(positions.written.0);
                out.put_u64_le(positions.durable.0);
                out.put_u64_le(positions.applied.0);
            }
            FromFar::Feedback(feedback) => {
                out.put_u8(TAG_FEEDBACK);
                out.put_u32_le(feedback.xmin);
                out.put_u32_le(feedback.xmin_epoch);
                out.put_u32_le(feedback.catalog_xmin);
                out.put_u32_le(feedback.catalog_xmin_epoch);
            }
            FromFar::TurnNoted => out.put_u8(TAG_TURN_NOTED),
        }
        out.freeze()
    }

    /// Reads a message.
    ///
    /// # Errors
    /// What is wrong with bytes that are none.
    pub fn decode(mut bytes: Bytes) -> Result<FromFar, NoMessage> {
        match (bytes.first(), bytes.len()) {
            (Some(&TAG_POSITIONS), 25) => {
                bytes.advance(1);
                Ok(FromFar::Positions(FarPositions {
                    written: Lsn(bytes.get_u64_le()),
                    durable: Lsn(bytes.get_u64_le()),
                    applied: Lsn(bytes.get_u64_le()),
                }))
            }
            (Some(&TAG_FEEDBACK), 17) => {
                bytes.advance(1);
                Ok(FromFar::Feedback(Feedback {
                    xmin: bytes.get_u32_le(),
                    xmin_epoch: bytes.get_u32_le(),
                    catalog_xmin: bytes.get_u32_le(),
                    catalog_xmin_epoch: bytes.get_u32_le(),
                }))
            }
            (Some(&TAG_TURN_NOTED), 1) => Ok(FromFar::TurnNoted),
            _ => Err(NoMessage("a message of an unknown kind")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip_and_no_cut_of_a_fixed_one_passes() {
        let log = FromNear::Log {
            timeline: Timeline(2),
            start: Lsn(7),
            principal_end: Lsn(100),
            bytes: 3,
            packing: Packing::Plain,
            packed: Bytes::from_static(b"abc"),
        };
        let history = FromNear::History { timeline: Timeline(2), text: Bytes::from_static(b"1") };
        let switch = FromNear::Switch { timeline: Timeline(3), at: Lsn(9) };
        let alive = FromNear::Alive { principal_end: Lsn(9) };
        let failed = FromNear::Failed { passes: true, why: Bytes::from_static(b"why") };
        for message in [&log, &history, &switch, &alive, &failed] {
            let bytes = Bytes::from(message.encode().concat());
            assert_eq!(FromNear::decode(bytes.clone()).as_ref(), Ok(message));
            assert_eq!(FromNear::decode_parts(message.encode()).as_ref(), Ok(message));
            for cut in 0..bytes.len() {
                let parts = vec![bytes.slice(..cut), bytes.slice(cut..)];
                assert_eq!(FromNear::decode_parts(parts).as_ref(), Ok(message), "cut at {cut}");
            }
            let head = match message {
                FromNear::Log { .. } => LOG_HEAD,
                FromNear::History { .. } => 5,
                FromNear::Failed { .. } => 2,
                FromNear::Switch { .. } | FromNear::Alive { .. } => bytes.len(),
            };
            for len in 0..head {
                assert!(FromNear::decode(bytes.slice(..len)).is_err(), "{message:?} cut at {len}");
            }
        }
        let positions = FarPositions { written: Lsn(3), durable: Lsn(2), applied: Lsn(1) };
        let feedback = Feedback { xmin: 1, xmin_epoch: 2, catalog_xmin: 3, catalog_xmin_epoch: 4 };
        let all = [FromFar::Positions(positions), FromFar::Feedback(feedback), FromFar::TurnNoted];
        for message in all {
            let bytes = message.encode();
            assert_eq!(FromFar::decode(bytes.clone()), Ok(message));
            for len in 0..bytes.len() {
                assert!(FromFar::decode(bytes.slice(..len)).is_err());
            }
        }
        assert!(FromNear::decode(Bytes::from_static(b"Xyz")).is_err());
    }

    #[test]
    fn unknown_ways_of_packing_are_refused() {
        for byte in 0..=u8::MAX {
            let mut message = vec![0; 1 + LOG_HEAD];
            message[..2].copy_from_slice(&[TAG_LOG, byte]);
            let read = FromNear::decode(message.into());
            match Packing::from_byte(byte) {
                Some(packing) => assert_eq!(packing.to_byte(), byte),
                None => assert!(read.is_err() && byte > 4, "{byte}"),
            }
        }
    }

    #[test]
    fn a_piece_that_cannot_be_is_refused() {
        let log = |start: u64, bytes: u32| FromNear::Log {
            timeline: Timeline(1),
            start: Lsn(start),
            principal_end: Lsn(0),
            bytes,
            packing: Packing::Zstd,
            packed: Bytes::new(),
        };
        for message in [log(u64::MAX, 1), log(0, PIECE_BYTES_MAX as u32 + 1)] {
            assert!(FromNear::decode(Bytes::from(message.encode().concat())).is_err());
        }
    }

    #[test]
    fn requests_and_answers_are_read_as_they_were_written() {
        let tail = Some(Tail { start: Lsn(1), end: Lsn(9), crc32c: u32::MAX });
        let turn = Some(Turn(u64::MAX));
        let (system_id, durable) = ("7".to_owned(), Lsn(0x16_B374_D848));
        let have = Have { system_id, timeline: 2, durable, tail, turn };
        for request in [
            MirrorRequest {
                mirror: "dr".into(),
                have: Some(have),
                restores: true,
                restores_pages: true,
            },
            MirrorRequest {
                mirror: "dr".into(),
                have: None,
                restores: false,
                restores_pages: false,
            },
        ] {
            let text = serde_json::to_string(&request).unwrap();
            assert_eq!(serde_json::from_str::<MirrorRequest>(&text).unwrap(), request, "{text}");
        }
        // Of a far end that knows nothing of it.
        let old = serde_json::from_str::<MirrorRequest>(r#"{"mirror":"dr"}"#).unwrap();
        assert_eq!(
            old,
            MirrorRequest {
                mirror: "dr".into(),
                have: None,
                restores: false,
                restores_pages: false
            }
        );
        for left in [None, Some(Left { at: Lsn(0x16_B374_D848) })] {
            let answer = Answer::Refused { why: "no".into(), passes: true, left };
            let text = serde_json::to_string(&answer).unwrap();
            assert_eq!(serde_json::from_str::<Answer>(&text).unwrap(), answer, "{text}");
        }
        // Of a near end that knows nothing of it.
        let old = r#"{"refused":{"why":"no","passes":true}}"#;
        let refused = Answer::Refused { why: "no".into(), passes: true, left: None };
        assert_eq!(serde_json::from_str::<Answer>(old).unwrap(), refused);
    }
}
