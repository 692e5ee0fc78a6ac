#![no_main]

use farshore_link::frame;
use farshore_link::handshake::{
    ANSWER_BYTES, Answer, AnswerHead, HELLO_BYTES, HelloHead, VERSION_MAX, VERSION_MIN,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut rest = data;
    while let Ok(Some((header, payload, end))) = frame::decode(rest) {
        assert_eq!(header.payload_bytes as usize, payload.len());
        assert_eq!(header.encode([payload]), rest[..frame::HEADER_BYTES]);
        assert_eq!(payload, &rest[frame::HEADER_BYTES..end]);
        for cut in 0..end {
            assert_eq!(frame::decode(&rest[..cut]), Ok(None));
        }
        rest = &rest[end..];
    }
    if let Err(error) = frame::decode(rest) {
        assert!(!error.to_string().is_empty());
    }

    if let Some(head) = data.first_chunk::<HELLO_BYTES>()
        && let Ok(head) = HelloHead::decode(head)
        && let Some(request) = data.get(HELLO_BYTES..HELLO_BYTES + head.request_bytes)
        && let Ok(hello) = head.complete(request.to_vec())
    {
        assert!(hello.version_min <= VERSION_MAX && hello.version_max >= VERSION_MIN);
        let bytes = hello.encode();
        assert_eq!(bytes, data[..bytes.len()]);
    }
    if let Some(head) = data.first_chunk::<ANSWER_BYTES>()
        && let Ok(head) = AnswerHead::decode(head)
        && let Some(words) = data.get(ANSWER_BYTES..ANSWER_BYTES + head.words_bytes)
        && let Ok(Answer::Refused { why }) = head.complete(words)
    {
        assert!(why.len() <= words.len() * 3);
    }
});
