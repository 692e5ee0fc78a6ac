#![no_main]

use bytes::BytesMut;
use farshore_wire::backend::{self, DecodeError, Frame, Message};
use libfuzzer_sys::fuzz_target;

/// The frames before the first error, and the error.
fn split<'a>(chunks: impl Iterator<Item = &'a [u8]>) -> (Vec<Frame>, Result<(), DecodeError>) {
    let mut buffer = BytesMut::new();
    let mut frames = Vec::new();
    for chunk in chunks {
        buffer.extend_from_slice(chunk);
        loop {
            match backend::split_frame(&mut buffer) {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(error) => return (frames, Err(error)),
            }
        }
    }
    (frames, Ok(()))
}

fuzz_target!(|input: &[u8]| {
    let Some((size, data)) = input.split_first() else { return };
    let whole = split(std::iter::once(data));
    assert_eq!(whole, split(data.chunks(usize::from(*size) + 1)));
    for frame in whole.0 {
        match backend::decode(frame) {
            Ok(Message::DataRow(row)) => {
                assert_eq!(row.values().count(), row.len());
            }
            Ok(message) => drop(format!("{message:?}")),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
});
