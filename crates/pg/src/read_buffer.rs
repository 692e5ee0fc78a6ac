use bytes::BytesMut;
use farshore_wire::backend::{DecodeError, Frame, HEADER_BYTES, frame_length, split_frame};
use std::ops::ControlFlow;

/// Allocated at a time. Frames are slices of such a chunk, and the chunk is given back when the
/// last slice of it has been dropped.
const CHUNK_BYTES: usize = 256 << 10;

/// A read is not worth a system call with less room than this.
const ROOM_BYTES_MIN: usize = 32 << 10;

/// An allocation larger than this is not used again once what made it grow has been taken out.
pub(crate) const KEPT_BYTES_MAX: usize = 1 << 20;

/// What has been read from the socket and not yet taken out as frames.
///
/// Grows only by what has really arrived, never by what a length word announces.
pub(crate) struct ReadBuffer {
    bytes: BytesMut,
    /// Size of the allocation that `bytes` is the tail of; `bytes.capacity()` forgets what frames
    /// have been split off its front.
    allocated: usize,
}

impl ReadBuffer {
    pub(crate) fn new() -> ReadBuffer {
        // The first read allocates: a connection that is being set up needs little.
        ReadBuffer { bytes: BytesMut::new(), allocated: 0 }
    }

    /// Takes the next whole frame out.
    pub(crate) fn next_frame(&mut self) -> Result<Option<Frame>, DecodeError> {
        split_frame(&mut self.bytes)
    }

    /// The buffer to append to, with room for a read that is worth its system call.
    pub(crate) fn with_room(&mut self) -> &mut BytesMut {
        let held = self.bytes.len();
        let room = self.bytes.capacity() - held;
        let outgrown = self.allocated > KEPT_BYTES_MAX && held <= CHUNK_BYTES;
        if room >= ROOM_BYTES_MIN && !outgrown {
            return &mut self.bytes;
        }
        // At least doubling keeps the copying linear while a large frame, or answers that nobody
        // takes yet, pile up.
        let wanted = CHUNK_BYTES.max(held);
        if !outgrown && self.bytes.try_reclaim(wanted) {
            return &mut self.bytes;
        }
        let mut fresh = BytesMut::with_capacity(held + wanted);
        fresh.extend_from_slice(&self.bytes);
        self.allocated = fresh.capacity();
        self.bytes = fresh;
        &mut self.bytes
    }

    /// Whether a whole frame is there.
    pub(crate) fn has_frame(&self) -> bool {
        matches!(frame_length(&self.bytes), Ok(Some(length)) if self.bytes.len() >= length)
    }

    /// Shows the whole frames that are there, without taking them out.
    pub(crate) fn visit_frames<T>(
        &self,
        mut visit: impl FnMut(u8, &[u8]) -> ControlFlow<T>,
    ) -> Option<T> {
        let mut rest = &self.bytes[..];
        while let Ok(Some(length)) = frame_length(rest) {
            let (frame, after) = rest.split_at_checked(length)?;
            if let ControlFlow::Break(found) = visit(frame[0], &frame[HEADER_BYTES..]) {
                return Some(found);
            }
            rest = after;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::{BufMut, Bytes};

    fn arrive(buffer: &mut ReadBuffer, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = buffer.with_room();
            let piece = bytes.len().min(room.capacity() - room.len());
            room.put_slice(&bytes[..piece]);
            bytes = &bytes[piece..];
        }
    }

    fn frame(bytes: usize) -> Vec<u8> {
        let mut frame = vec![b'd'];
        frame.extend((bytes as u32 + 4).to_be_bytes());
        frame.resize(bytes + 5, 7);
        frame
    }

    #[test]
    fn shrinks_after_a_large_frame() {
        let mut buffer = ReadBuffer::new();
        arrive(&mut buffer, &frame(10_000_000));
        assert!(buffer.allocated >= 10_000_000 && buffer.has_frame());
        assert_eq!(buffer.next_frame().unwrap().unwrap().body.len(), 10_000_000);
        arrive(&mut buffer, &frame(100));
        assert!(buffer.allocated <= KEPT_BYTES_MAX, "{}", buffer.allocated);
        assert_eq!(buffer.next_frame().unwrap().unwrap().body.len(), 100);
    }

    #[test]
    fn one_chunk_serves_for_ever_when_frames_are_dropped() {
        let mut buffer = ReadBuffer::new();
        let message = frame(1000);
        for _ in 0..10_000 {
            arrive(&mut buffer, &message);
            assert!(buffer.next_frame().unwrap().is_some());
        }
        assert!(buffer.allocated <= 2 * CHUNK_BYTES);
    }

    #[test]
    fn frames_stay_intact_while_the_buffer_moves_on() {
        let mut buffer = ReadBuffer::new();
        let mut kept: Vec<Bytes> = Vec::new();
        for i in 0..3000usize {
            let mut message = frame(1000 + i);
            message[5] = i as u8;
            arrive(&mut buffer, &message);
            kept.push(buffer.next_frame().unwrap().unwrap().body);
        }
        for (i, body) in kept.iter().enumerate() {
            assert_eq!((body.len(), body[0]), (1000 + i, i as u8));
        }
    }
}
