//! Messages a server sends (PostgreSQL docs: "55.7. Message Formats", those marked *B*).
//!
//! [`split_frame`] cuts a byte stream into frames without copying; [`decode`] turns a frame into a
//! [`Message`]. Both are total: any bytes give a value or a [`DecodeError`], and a tag that is not
//! in the documentation is an error, never skipped. Row and COPY data are slices of the frame.

mod fields;
mod message;
mod server_error;

pub use crate::frontend::Format;
pub use fields::{DataRow, Field, Values};
pub use message::{Authentication, CommandTag, CopyFormat, Message, TransactionStatus, decode};
pub use server_error::ServerError;

use bytes::{Buf, Bytes, BytesMut};

/// Most bytes that a message's length word may announce: 1 GiB and some room for framing. A
/// greater length means that the peer does not speak this protocol.
pub const FRAME_BYTES_MAX: usize = (1 << 30) + (64 << 10);

/// Bytes before a frame's body: the tag and the length word.
pub const HEADER_BYTES: usize = 5;

/// One message as it came, not yet decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Which message.
    pub tag: u8,
    /// What follows the length word.
    pub body: Bytes,
}

/// Bytes that are not a message a server sends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// A length word below 4 or above [`FRAME_BYTES_MAX`].
    #[error(
        "a message tagged {} announces {length} bytes; the peer does not speak PostgreSQL's protocol, \
         or the stream is corrupt", printable(*.tag)
    )]
    Length {
        /// The tag before the length.
        tag: u8,
        /// The length word.
        length: u32,
    },
    /// A tag that no server message has.
    #[error("unknown message tag {}", printable(*.tag))]
    UnknownTag {
        /// The tag.
        tag: u8,
    },
    /// An authentication request that is not documented.
    #[error("unknown authentication request {code}")]
    UnknownAuthentication {
        /// The request's code.
        code: i32,
    },
    /// The body ended before the message did.
    #[error("{message} ends too early, at its {field}")]
    Truncated {
        /// The message's name in PostgreSQL's documentation.
        message: &'static str,
        /// What was missing.
        field: &'static str,
    },
    /// The body goes on after the message has ended.
    #[error("{message} has {bytes} bytes too many")]
    Trailing {
        /// The message's name in PostgreSQL's documentation.
        message: &'static str,
        /// How many.
        bytes: usize,
    },
    /// A number that means nothing there.
    #[error("{message}: {value} is not a {field}")]
    Value {
        /// The message's name in PostgreSQL's documentation.
        message: &'static str,
        /// What was expected.
        field: &'static str,
        /// What was there.
        value: i64,
    },
    /// Text that is not UTF-8, although the session's client_encoding is UTF8.
    #[error("{message}: the {field} is not valid UTF-8 (is the database's encoding SQL_ASCII?)")]
    NotUtf8 {
        /// The message's name in PostgreSQL's documentation.
        message: &'static str,
        /// Which text.
        field: &'static str,
    },
}

fn printable(tag: u8) -> String {
    if tag.is_ascii_graphic() { format!("'{}'", tag as char) } else { format!("0x{tag:02x}") }
}

/// The whole length, header included, of the frame at the head of `buffer`; `None` while fewer
/// than [`HEADER_BYTES`] are there.
///
/// # Errors
/// [`DecodeError::Length`] for a length outside 4 ..= [`FRAME_BYTES_MAX`].
pub fn frame_length(buffer: &[u8]) -> Result<Option<usize>, DecodeError> {
    let Some(&[tag, a, b, c, d]) = buffer.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
    let length = u32::from_be_bytes([a, b, c, d]);
    if length < 4 || length as usize > FRAME_BYTES_MAX {
        return Err(DecodeError::Length { tag, length });
    }
    Ok(Some(1 + length as usize))
}

/// Takes the next whole frame off `buffer`, as a slice of it; `None` while it is incomplete.
///
/// # Errors
/// [`DecodeError::Length`] for a length outside 4 ..= [`FRAME_BYTES_MAX`]; `buffer` is unchanged.
pub fn split_frame(buffer: &mut BytesMut) -> Result<Option<Frame>, DecodeError> {
    let Some(length) = frame_length(buffer)? else { return Ok(None) };
    if buffer.len() < length {
        return Ok(None);
    }
    let mut body = buffer.split_to(length).freeze();
    let tag = body[0];
    body.advance(HEADER_BYTES);
    Ok(Some(Frame { tag, body }))
}

/// Reads a body field by field; knows the message's name for its errors.
#[derive(Debug)]
struct Reader {
    message: &'static str,
    body: Bytes,
}

impl Reader {
    fn truncated(&self, field: &'static str) -> DecodeError {
        DecodeError::Truncated { message: self.message, field }
    }

    fn invalid(&self, field: &'static str, value: i64) -> DecodeError {
        DecodeError::Value { message: self.message, field, value }
    }

    fn u8(&mut self, field: &'static str) -> Result<u8, DecodeError> {
        self.body.try_get_u8().map_err(|_| self.truncated(field))
    }

    fn i16(&mut self, field: &'static str) -> Result<i16, DecodeError> {
        self.body.try_get_i16().map_err(|_| self.truncated(field))
    }

    fn i32(&mut self, field: &'static str) -> Result<i32, DecodeError> {
        self.body.try_get_i32().map_err(|_| self.truncated(field))
    }

    fn u32(&mut self, field: &'static str) -> Result<u32, DecodeError> {
        self.body.try_get_u32().map_err(|_| self.truncated(field))
    }

    /// A count of items that take at least `item_bytes` each, so that a lie about the count cannot
    /// make us allocate more than the body's own size.
    fn count(
        &self,
        count: i64,
        item_bytes: usize,
        field: &'static str,
    ) -> Result<usize, DecodeError> {
        let count = usize::try_from(count).map_err(|_| self.invalid(field, count))?;
        if count.saturating_mul(item_bytes) > self.body.len() {
            return Err(self.truncated(field));
        }
        Ok(count)
    }

    fn format(&mut self, field: &'static str) -> Result<Format, DecodeError> {
        match self.i16(field)? {
            0 => Ok(Format::Text),
            1 => Ok(Format::Binary),
            other => Err(self.invalid(field, other.into())),
        }
    }

    fn c_bytes(&mut self, field: &'static str) -> Result<Bytes, DecodeError> {
        let end = self.body.iter().position(|b| *b == 0).ok_or_else(|| self.truncated(field))?;
        let text = self.body.split_to(end);
        self.body.advance(1);
        Ok(text)
    }

    fn string(&mut self, field: &'static str) -> Result<String, DecodeError> {
        let bytes = self.c_bytes(field)?;
        let text = std::str::from_utf8(&bytes)
            .map_err(|_| DecodeError::NotUtf8 { message: self.message, field })?;
        Ok(text.to_owned())
    }

    /// For text that only people read: before the session is set up, a server may write in
    /// whatever encoding its own messages have.
    fn lossy_string(&mut self, field: &'static str) -> Result<String, DecodeError> {
        Ok(String::from_utf8_lossy(&self.c_bytes(field)?).into_owned())
    }

    fn rest(&mut self) -> Bytes {
        std::mem::take(&mut self.body)
    }

    fn end(self) -> Result<(), DecodeError> {
        match self.body.len() {
            0 => Ok(()),
            bytes => Err(DecodeError::Trailing { message: self.message, bytes }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_cut_where_they_end() {
        let mut buffer = BytesMut::from(&b"Z\0\0\0\x05IN\0\0\0\x08ab"[..]);
        let frame = split_frame(&mut buffer).unwrap().unwrap();
        assert_eq!((frame.tag, &frame.body[..]), (b'Z', &b"I"[..]));
        assert_eq!(split_frame(&mut buffer), Ok(None));
        buffer.extend_from_slice(b"cd");
        let frame = split_frame(&mut buffer).unwrap().unwrap();
        assert_eq!((frame.tag, &frame.body[..]), (b'N', &b"abcd"[..]));
        assert!(buffer.is_empty());
    }

    #[test]
    fn absurd_lengths_are_refused() {
        for (bytes, length) in [
            (&b"HTTP/1.1 400"[..], 0x5454_502F),
            (&b"Z\0\0\0\x03"[..], 3),
            (&b"d\xff\xff\xff\xff"[..], u32::MAX),
        ] {
            let mut buffer = BytesMut::from(bytes);
            let tag = bytes[0];
            assert_eq!(split_frame(&mut buffer), Err(DecodeError::Length { tag, length }));
            assert_eq!(&buffer[..], bytes);
        }
    }
}
