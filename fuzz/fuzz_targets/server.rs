#![no_main]

use bytes::BytesMut;
use farshore_wire::server::{self, ClientError};
use libfuzzer_sys::fuzz_target;

/// Cuts messages off until there is no whole one left, or something is none.
fn all<T>(
    data: &[u8],
    pieces: usize,
    split: impl Fn(&mut BytesMut) -> Result<Option<T>, ClientError>,
) -> (Vec<T>, Result<(), ClientError>) {
    let mut buffer = BytesMut::new();
    let mut messages = Vec::new();
    for chunk in data.chunks(pieces) {
        buffer.extend_from_slice(chunk);
        loop {
            match split(&mut buffer) {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(error) => return (messages, Err(error)),
            }
        }
    }
    (messages, Ok(()))
}

// What strangers say to the server for standbys, before and after they were let in: the same in
// pieces as in one.
fuzz_target!(|input: &[u8]| {
    let Some((size, data)) = input.split_first() else { return };
    let (whole, pieces) = (data.len().max(1), usize::from(*size) + 1);
    assert_eq!(all(data, whole, server::split_opening), all(data, pieces, server::split_opening));
    assert_eq!(all(data, whole, server::split_message), all(data, pieces, server::split_message));
    let answers = all(data, whole, server::split_authentication);
    assert_eq!(answers, all(data, pieces, server::split_authentication));
    for answer in answers.0 {
        let length = answer.len();
        match server::sasl_initial_response(answer) {
            Ok((mechanism, first)) => assert_eq!(mechanism.len() + 1 + 4 + first.len(), length),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
});
