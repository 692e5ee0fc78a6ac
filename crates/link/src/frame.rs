//! One frame: a header of 24 bytes and a payload. Pure and total: every input gives a value, "more
//! bytes are needed", or a typed error. Numbers are little-endian.
//!
//! ```text
//!  0        1                 4                 8
//!  ├────────┼─────────────────┼─────────────────┤
//!  │ kind   │ 0               │ payload length  │
//!  ├────────┴─────────────────┴─────────────────┤
//!  │ number                                     │
//!  ├──────────────────────────┬─────────────────┤ 16
//!  │ message length           │ CRC32C          │
//!  ├──────────────────────────┴─────────────────┤ 24
//!  │ payload …                                  │
//! ```
//!
//! The CRC32C covers bytes 0..20 and the payload. `docs/formats/link.md` tells what follows what.

use std::fmt;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 24;

/// Most bytes of a message in one frame.
pub const PAYLOAD_BYTES_MAX: usize = 256 << 10;

/// Most bytes of one message.
pub const MESSAGE_BYTES_MAX: u32 = (1 << 30) + (64 << 10);

/// Most bytes of the reason in [`Kind::Close`].
pub const REASON_BYTES_MAX: usize = 1024;

/// What a frame is. [`Header::number`] means something else in each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The first piece of a message; `number` counts the session's pieces in one direction from 0.
    First {
        /// Bytes of the whole message.
        message_bytes: u32,
    },
    /// A further piece of the message; `number` as above.
    More,
    /// The receiver has room: `number` is all it granted since the session began, in the units of
    /// [`cost`].
    Credit,
    /// Asks for a [`Kind::Pong`] with the same `number`.
    Ping,
    /// Answers a ping.
    Pong,
    /// No piece will have this `number` or a higher one.
    End,
    /// Every piece before the peer's [`Kind::End`] has arrived. `number` is 0.
    Ended,
    /// The session failed; the payload says why, in words. `number` is 0.
    Close,
}

impl Kind {
    fn code(self) -> u8 {
        match self {
            Kind::First { .. } => 1,
            Kind::More => 2,
            Kind::Credit => 3,
            Kind::Ping => 4,
            Kind::Pong => 5,
            Kind::End => 6,
            Kind::Ended => 7,
            Kind::Close => 8,
        }
    }

    /// Most bytes of payload that a frame of this kind carries.
    fn payload_bytes_max(self) -> usize {
        match self {
            Kind::First { message_bytes } => PAYLOAD_BYTES_MAX.min(message_bytes as usize),
            Kind::More => PAYLOAD_BYTES_MAX,
            Kind::Close => REASON_BYTES_MAX,
            Kind::Credit | Kind::Ping | Kind::Pong | Kind::End | Kind::Ended => 0,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::First { .. } => "first piece",
            Kind::More => "further piece",
            Kind::Credit => "credit",
            Kind::Ping => "ping",
            Kind::Pong => "pong",
            Kind::End => "end",
            Kind::Ended => "ended",
            Kind::Close => "close",
        })
    }
}

/// What a piece of so many payload bytes takes from the receiver's credit: its bytes, and what the
/// receiver needs to remember it, so that empty messages are not free.
pub const fn cost(payload_bytes: usize) -> u64 {
    payload_bytes as u64 + 64
}

/// A frame without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: Kind,
    /// See [`Kind`].
    pub number: u64,
    /// Bytes that follow the header.
    pub payload_bytes: u32,
}

/// A header as it came, and what its frame's checksum must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announced {
    /// The header.
    pub header: Header,
    /// Over the header's first 20 bytes.
    checksum_so_far: u32,
    /// As announced, over header and payload.
    checksum: u32,
}

/// Why bytes are not a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// No frame has this kind.
    #[error("unknown kind of frame {0}")]
    UnknownKind(u8),
    /// A field that this kind does not use is not zero.
    #[error("a frame ({0}) with a field set that it does not use")]
    UnusedField(Kind),
    /// More payload than this kind may have.
    #[error("a frame ({kind}) announces {bytes} bytes; it may have {bytes_max}")]
    TooLong {
        /// The frame.
        kind: Kind,
        /// Announced.
        bytes: u32,
        /// Allowed.
        bytes_max: usize,
    },
    /// A piece without bytes, though its message has some.
    #[error("a frame ({0}) without the bytes it should have")]
    Empty(Kind),
    /// A message longer than any may be.
    #[error("a message of {0} bytes is announced; {MESSAGE_BYTES_MAX} are allowed")]
    MessageTooLong(u32),
    /// Header or payload were changed on the way.
    #[error("a frame ({kind}) has checksum {found:08x}, not {announced:08x} as its header says")]
    Checksum {
        /// The frame.
        kind: Kind,
        /// In the header.
        announced: u32,
        /// Over what arrived.
        found: u32,
    },
}

impl Header {
    /// The 24 bytes before `payload`, which may lie in several parts. Their lengths must sum up to
    /// [`Header::payload_bytes`].
    pub fn encode<'a>(&self, payload: impl IntoIterator<Item = &'a [u8]>) -> [u8; HEADER_BYTES] {
        let message_bytes = match self.kind {
            Kind::First { message_bytes } => message_bytes,
            _ => 0,
        };
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.kind.code();
        bytes[4..8].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.number.to_le_bytes());
        bytes[16..20].copy_from_slice(&message_bytes.to_le_bytes());
        let start = crc32c::crc32c(&bytes[..20]);
        let checksum = payload.into_iter().fold(start, crc32c::crc32c_append);
        bytes[20..].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }
}

impl Announced {
    /// Reads a header; nothing has to be allocated to refuse what announces too much.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Announced, FrameError> {
        let u32_at = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let number = u64::from(u32_at(8)) | u64::from(u32_at(12)) << 32;
        let message_bytes = u32_at(16);
        let kind = match bytes[0] {
            1 => Kind::First { message_bytes },
            2 => Kind::More,
            3 => Kind::Credit,
            4 => Kind::Ping,
            5 => Kind::Pong,
            6 => Kind::End,
            7 => Kind::Ended,
            8 => Kind::Close,
            unknown => return Err(FrameError::UnknownKind(unknown)),
        };
        let payload_bytes = u32_at(4);
        let (message_unused, number_unused, must_not_be_empty) = match kind {
            Kind::First { .. } => (false, false, message_bytes > 0),
            Kind::More => (true, false, true),
            Kind::Credit | Kind::Ping | Kind::Pong | Kind::End => (true, false, false),
            Kind::Ended | Kind::Close => (true, true, false),
        };
        if bytes[1..4] != [0; 3]
            || message_unused && message_bytes != 0
            || number_unused && number != 0
        {
            return Err(FrameError::UnusedField(kind));
        }
        if message_bytes > MESSAGE_BYTES_MAX {
            return Err(FrameError::MessageTooLong(message_bytes));
        }
        let bytes_max = kind.payload_bytes_max();
        if payload_bytes as usize > bytes_max {
            return Err(FrameError::TooLong { kind, bytes: payload_bytes, bytes_max });
        }
        if must_not_be_empty && payload_bytes == 0 {
            return Err(FrameError::Empty(kind));
        }
        Ok(Announced {
            header: Header { kind, number, payload_bytes },
            checksum_so_far: crc32c::crc32c(&bytes[..20]),
            checksum: u32_at(20),
        })
    }

    /// Whether header and payload are as they were sent.
    pub fn check(&self, payload: &[u8]) -> Result<(), FrameError> {
        let found = crc32c::crc32c_append(self.checksum_so_far, payload);
        if found != self.checksum {
            let kind = self.header.kind;
            return Err(FrameError::Checksum { kind, announced: self.checksum, found });
        }
        Ok(())
    }
}

/// A frame, its payload, and how many bytes the two take.
pub type Decoded<'a> = (Header, &'a [u8], usize);

/// The frame that `input` begins with; `None` if more bytes are needed.
pub fn decode(input: &[u8]) -> Result<Option<Decoded<'_>>, FrameError> {
    let Some(head) = input.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let announced = Announced::decode(head)?;
    let end = HEADER_BYTES + announced.header.payload_bytes as usize;
    let Some(payload) = input.get(HEADER_BYTES..end) else { return Ok(None) };
    announced.check(payload)?;
    Ok(Some((announced.header, payload, end)))
}
