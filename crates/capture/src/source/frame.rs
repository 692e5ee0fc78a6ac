//! Frames: what stands in one message of a channel.
//!
//! ```text
//! tag u8      1: part of a message, more follow   2: its last part   3: data
//! length u32  of the content, big-endian, at most 1 MiB
//! content     as it is, or, where fewer bytes are left than the length says, a zstd frame of it
//! ```

use super::channel::{Channel, ChannelError};
use bytes::{BufMut, Bytes, BytesMut};

/// Bytes of content that a frame is filled to.
pub(super) const FRAME_BYTES: usize = 512 << 10;
/// Bytes of content that a frame may have.
const CONTENT_BYTES_MAX: usize = 1 << 20;
const HEADER_BYTES: usize = 5;
/// Bytes that a message of a channel may have.
pub const MESSAGE_BYTES_MAX: usize = HEADER_BYTES + CONTENT_BYTES_MAX;
/// What is shorter is not worth compressing.
const COMPRESSED_BYTES_MIN: usize = 256;
const ZSTD_LEVEL: i32 = 1;

const PART: u8 = 1;
const LAST: u8 = 2;
const DATA: u8 = 3;

/// What came.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// A whole message.
    Message(Vec<u8>),
    /// Content of one frame of data.
    Data(Bytes),
    /// The other side has ended the channel.
    End,
}

/// Why nothing came.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ReceiveError {
    /// The channel.
    Channel(ChannelError),
    /// What came is not what the other side may send; what is wrong.
    Malformed(String),
}

impl From<ReceiveError> for ChannelError {
    fn from(error: ReceiveError) -> ChannelError {
        match error {
            ReceiveError::Channel(error) => error,
            ReceiveError::Malformed(what) => ChannelError::permanent(what),
        }
    }
}

/// Sends a message of any length.
pub(super) async fn send(channel: &mut dyn Channel, message: &[u8]) -> Result<(), ChannelError> {
    let mut left = message;
    while left.len() > FRAME_BYTES {
        let (part, rest) = left.split_at(FRAME_BYTES);
        channel.send(pack(PART, part)).await?;
        left = rest;
    }
    channel.send(pack(LAST, left)).await
}

/// Sends data of at most [`FRAME_BYTES`] bytes. They are compressed on another thread: that takes
/// milliseconds, and the streams of other publications are not to wait for it.
pub(super) async fn send_data(channel: &mut dyn Channel, data: Bytes) -> Result<(), ChannelError> {
    let packed = tokio::task::spawn_blocking(move || pack(DATA, &data)).await;
    let packed = packed.map_err(|error| ChannelError::away(format!("not compressed: {error}")))?;
    channel.send(packed).await
}

/// The next message of at most `bytes_max` bytes, or data. Not cancel-safe.
pub(super) async fn receive(
    channel: &mut dyn Channel,
    bytes_max: usize,
) -> Result<Received, ReceiveError> {
    let mut message = Vec::new();
    loop {
        let Some(frame) = channel.next().await.map_err(ReceiveError::Channel)? else {
            return Ok(Received::End);
        };
        let (tag, content) = unpack(frame).map_err(ReceiveError::Malformed)?;
        let malformed = |what: String| Err(ReceiveError::Malformed(what));
        match tag {
            DATA if message.is_empty() => return Ok(Received::Data(content)),
            DATA => return malformed("data came within a message".to_owned()),
            _ if message.len() + content.len() > bytes_max => {
                return malformed(format!("a message of more than {bytes_max} bytes"));
            }
            // An endless message of nothing.
            PART if content.is_empty() => return malformed("an empty part came".to_owned()),
            PART => message.extend_from_slice(&content),
            _last => {
                message.extend_from_slice(&content);
                return Ok(Received::Message(message));
            }
        }
    }
}

fn pack(tag: u8, content: &[u8]) -> Bytes {
    let compressed = if content.len() < COMPRESSED_BYTES_MIN {
        None
    } else {
        zstd::bulk::compress(content, ZSTD_LEVEL).ok().filter(|less| less.len() < content.len())
    };
    let stored = compressed.as_deref().unwrap_or(content);
    let mut frame = BytesMut::with_capacity(HEADER_BYTES + stored.len());
    frame.put_u8(tag);
    frame.put_u32(content.len() as u32);
    frame.put_slice(stored);
    frame.freeze()
}

/// A frame's tag and content, or what is wrong with it.
fn unpack(mut frame: Bytes) -> Result<(u8, Bytes), String> {
    if frame.len() < HEADER_BYTES {
        return Err(format!("a frame of {} bytes", frame.len()));
    }
    let header = frame.split_to(HEADER_BYTES);
    let (tag, length) = (header[0], [header[1], header[2], header[3], header[4]]);
    let length = u32::from_be_bytes(length) as usize;
    if !(PART..=DATA).contains(&tag) {
        return Err(format!("a frame with the unknown tag {tag}"));
    }
    if length > CONTENT_BYTES_MAX || frame.len() > length {
        return Err(format!("a frame of {} bytes that says it has {length}", frame.len()));
    }
    if frame.len() == length {
        return Ok((tag, frame));
    }
    match zstd::bulk::decompress(&frame, length) {
        Ok(content) if content.len() == length => Ok((tag, content.into())),
        Ok(content) => Err(format!("a frame of {} bytes instead of {length}", content.len())),
        Err(error) => Err(format!("a frame that cannot be decompressed: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_store::BoxFuture;
    use std::collections::VecDeque;

    /// Gives back what was sent.
    #[derive(Default)]
    struct Loop(VecDeque<Bytes>);

    impl Channel for Loop {
        fn send(&mut self, message: Bytes) -> BoxFuture<'_, Result<(), ChannelError>> {
            assert!(message.len() <= MESSAGE_BYTES_MAX);
            self.0.push_back(message);
            Box::pin(async { Ok(()) })
        }

        fn next(&mut self) -> BoxFuture<'_, Result<Option<Bytes>, ChannelError>> {
            Box::pin(async { Ok(self.0.pop_front()) })
        }
    }

    /// Bytes that do not compress.
    fn noise(len: usize) -> Vec<u8> {
        let mut state = 1_u64;
        let next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        std::iter::repeat_with(next).take(len).collect()
    }

    #[tokio::test]
    async fn messages_and_data_come_as_they_were_sent() {
        let mut channel = Loop::default();
        let text = b"again and again ".repeat(100_000);
        let contents = [b"".to_vec(), b"x".to_vec(), noise(600_000), noise(FRAME_BYTES), text];
        for content in contents {
            send(&mut channel, &content).await.unwrap();
            let came = receive(&mut channel, 2 << 20).await;
            assert_eq!(came, Ok(Received::Message(content.clone())));
            let mut data = Bytes::from(content);
            data.truncate(FRAME_BYTES);
            send_data(&mut channel, data.clone()).await.unwrap();
            assert_eq!(receive(&mut channel, 10).await, Ok(Received::Data(data)));
        }
        assert_eq!(receive(&mut channel, 10).await, Ok(Received::End));
    }

    #[tokio::test]
    async fn what_is_too_long_is_refused() {
        let mut channel = Loop::default();
        send(&mut channel, &noise(600_000)).await.unwrap();
        let refused = receive(&mut channel, 599_999).await;
        assert!(matches!(refused, Err(ReceiveError::Malformed(_))), "{refused:?}");
    }

    #[test]
    fn no_bytes_make_a_frame_but_those_of_one() {
        let bomb = zstd::bulk::compress(&vec![0; 4 << 20], 1).unwrap();
        let says = |tag: u8, length: u32, rest: &[u8]| {
            let mut frame = vec![tag];
            frame.extend_from_slice(&length.to_be_bytes());
            frame.extend_from_slice(rest);
            Bytes::from(frame)
        };
        for frame in [
            Bytes::new(),
            Bytes::from_static(&[1, 0, 0, 0]),
            says(0, 0, b""),
            says(4, 1, b"x"),
            says(1, 0, b"x"),
            says(3, 5, b"abcd"),
            says(3, u32::MAX, b"abcd"),
            says(3, 4 << 20, &bomb),
            says(3, 1 << 20, &bomb),
        ] {
            assert!(unpack(frame.clone()).is_err(), "{frame:?}");
        }
        let whole = pack(DATA, &b"again and again ".repeat(100));
        assert!(whole.len() < 200);
        for end in 0..whole.len() {
            assert!(unpack(whole.slice(..end)).is_err(), "{end}");
        }
    }
}
