//! The codecs are total: every input gives a value, "more bytes are needed", or a typed error.

use farshore_link::frame::{
    self, Announced, FrameError, HEADER_BYTES, Header, Kind, MESSAGE_BYTES_MAX, PAYLOAD_BYTES_MAX,
    REASON_BYTES_MAX,
};
use farshore_link::handshake::{
    ANSWER_BYTES, Answer, AnswerHead, HELLO_BYTES, HandshakeError, Hello, HelloHead,
    REQUEST_BYTES_MAX, WINDOW_BYTES_MAX, WINDOW_BYTES_MIN,
};
use proptest::prelude::*;

fn header_and_payload() -> impl Strategy<Value = (Header, Vec<u8>)> {
    let payload = prop::collection::vec(any::<u8>(), 0..600);
    (0..8_u8, any::<u64>(), 0..=MESSAGE_BYTES_MAX, payload).prop_map(
        |(kind, number, message_bytes, mut payload)| {
            let (kind, number) = match kind {
                0 => {
                    let message_bytes = message_bytes.max(payload.len() as u32);
                    if payload.is_empty() && message_bytes > 0 {
                        payload.push(1);
                    }
                    (Kind::First { message_bytes }, number)
                }
                1 => {
                    payload.push(1);
                    (Kind::More, number)
                }
                2 => (Kind::Credit, number),
                3 => (Kind::Ping, number),
                4 => (Kind::Pong, number),
                5 => (Kind::End, number),
                6 => (Kind::Ended, 0),
                _ => (Kind::Close, 0),
            };
            if !matches!(kind, Kind::First { .. } | Kind::More | Kind::Close) {
                payload.clear();
            }
            (Header { kind, number, payload_bytes: payload.len() as u32 }, payload)
        },
    )
}

fn encode(header: &Header, payload: &[u8]) -> Vec<u8> {
    let mut bytes = header.encode([payload]).to_vec();
    bytes.extend(payload);
    bytes
}

fn hello() -> impl Strategy<Value = Hello> {
    let request = prop::collection::vec(any::<u8>(), 0..300);
    (1..=16_u8, any::<u8>(), any::<[u8; 16]>(), WINDOW_BYTES_MIN..=WINDOW_BYTES_MAX, request)
        .prop_map(|(stripes, stripe, session, window_bytes, request)| {
            let stripe = stripe % stripes;
            let request = if stripe == 0 { request } else { Vec::new() };
            let (version_min, version_max) = (1, 1 + u16::from(stripes));
            Hello { version_min, version_max, stripe, stripes, session, window_bytes, request }
        })
}

fn decode_hello(bytes: &[u8]) -> Option<Result<Hello, HandshakeError>> {
    let head = match HelloHead::decode(bytes.first_chunk::<HELLO_BYTES>()?) {
        Ok(head) => head,
        Err(error) => return Some(Err(error)),
    };
    let request = bytes.get(HELLO_BYTES..HELLO_BYTES + head.request_bytes)?;
    Some(head.complete(request.to_vec()))
}

fn decode_answer(bytes: &[u8]) -> Option<Result<Answer, HandshakeError>> {
    let head = match AnswerHead::decode(bytes.first_chunk::<ANSWER_BYTES>()?) {
        Ok(head) => head,
        Err(error) => return Some(Err(error)),
    };
    let words = bytes.get(ANSWER_BYTES..ANSWER_BYTES + head.words_bytes)?;
    Some(head.complete(words))
}

proptest! {
    #[test]
    fn a_frame_comes_back((header, payload) in header_and_payload(), more in any::<[u8; 3]>()) {
        let mut bytes = encode(&header, &payload);
        let end = bytes.len();
        bytes.extend(more);
        prop_assert_eq!(frame::decode(&bytes), Ok(Some((header, &payload[..], end))));
    }

    #[test]
    fn a_payload_in_parts_has_the_same_header((header, payload) in header_and_payload(), at: prop::sample::Index) {
        let (left, right) = payload.split_at(at.index(payload.len() + 1));
        prop_assert_eq!(header.encode([left, &[], right]), header.encode([&payload[..]]));
    }

    #[test]
    fn a_frame_cut_anywhere_needs_more((header, payload) in header_and_payload()) {
        let bytes = encode(&header, &payload);
        for end in 0..bytes.len() {
            prop_assert_eq!(frame::decode(&bytes[..end]), Ok(None), "cut at {}", end);
        }
    }

    #[test]
    fn a_bit_turned_over_anywhere_is_an_error(
        (header, payload) in header_and_payload(),
        at: prop::sample::Index,
        bit in 0..8_u32,
    ) {
        let mut bytes = encode(&header, &payload);
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        // A longer payload may be announced; then its bytes are awaited, and do not fit.
        bytes.resize(HEADER_BYTES + PAYLOAD_BYTES_MAX, 0);
        let error = frame::decode(&bytes).unwrap_err();
        prop_assert!(!error.to_string().is_empty());
    }

    #[test]
    fn any_bytes_give_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
        if let Ok(Some((header, payload, end))) = frame::decode(&bytes) {
            prop_assert_eq!(encode(&header, payload), &bytes[..end]);
        }
        let _ = decode_hello(&bytes);
        let _ = decode_answer(&bytes);
    }

    #[test]
    fn a_hello_comes_back_and_may_not_be_changed(
        hello in hello(),
        at: prop::sample::Index,
        bit in 0..8_u32,
    ) {
        let bytes = hello.encode();
        prop_assert_eq!(decode_hello(&bytes), Some(Ok(hello)));
        for end in 0..bytes.len() {
            prop_assert_eq!(decode_hello(&bytes[..end]), None, "cut at {}", end);
        }
        let mut changed = bytes.clone();
        let at = at.index(bytes.len());
        changed[at] ^= 1 << bit;
        changed.resize(HELLO_BYTES + REQUEST_BYTES_MAX, 0);
        prop_assert!(decode_hello(&changed).is_some_and(|result| result.is_err()));
    }

    #[test]
    fn an_answer_comes_back_and_is_cut_to_its_bounds(why in ".{0,3000}", window in WINDOW_BYTES_MIN..=WINDOW_BYTES_MAX) {
        for answer in [
            Answer::Accepted { version: 2, window_bytes: window },
            Answer::Refused { why: why.clone() },
        ] {
            let bytes = answer.encode();
            match decode_answer(&bytes) {
                Some(Ok(Answer::Refused { why: found })) => prop_assert!(why.starts_with(&found)),
                found => prop_assert_eq!(found, Some(Ok(answer))),
            }
            for end in 0..bytes.len() {
                prop_assert_eq!(decode_answer(&bytes[..end]), None, "cut at {}", end);
            }
        }
    }
}

/// A header with these fields and a good checksum for an empty payload.
fn raw(kind: u8, payload_bytes: u32, number: u64, message_bytes: u32) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[0] = kind;
    bytes[4..8].copy_from_slice(&payload_bytes.to_le_bytes());
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    bytes[16..20].copy_from_slice(&message_bytes.to_le_bytes());
    let checksum = crc32c::crc32c(&bytes[..20]);
    bytes[20..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

#[test]
fn headers_that_announce_what_no_frame_may_have() {
    let too_long = |kind, bytes, bytes_max| FrameError::TooLong { kind, bytes, bytes_max };
    let limit = PAYLOAD_BYTES_MAX as u32;
    for (bytes, expected) in [
        (raw(0, 0, 0, 0), FrameError::UnknownKind(0)),
        (raw(9, 0, 0, 0), FrameError::UnknownKind(9)),
        (raw(1, 1, 0, MESSAGE_BYTES_MAX + 1), FrameError::MessageTooLong(MESSAGE_BYTES_MAX + 1)),
        (
            raw(1, limit + 1, 0, limit * 2),
            too_long(Kind::First { message_bytes: limit * 2 }, limit + 1, PAYLOAD_BYTES_MAX),
        ),
        (raw(1, 11, 0, 10), too_long(Kind::First { message_bytes: 10 }, 11, 10)),
        (raw(1, 0, 0, 10), FrameError::Empty(Kind::First { message_bytes: 10 })),
        (raw(2, limit + 1, 0, 0), too_long(Kind::More, limit + 1, PAYLOAD_BYTES_MAX)),
        (raw(2, u32::MAX, 0, 0), too_long(Kind::More, u32::MAX, PAYLOAD_BYTES_MAX)),
        (raw(2, 0, 0, 0), FrameError::Empty(Kind::More)),
        (raw(2, 1, 0, 1), FrameError::UnusedField(Kind::More)),
        (raw(3, 1, 0, 0), too_long(Kind::Credit, 1, 0)),
        (raw(4, 0, 0, 1), FrameError::UnusedField(Kind::Ping)),
        (raw(7, 0, 1, 0), FrameError::UnusedField(Kind::Ended)),
        (raw(8, 1025, 0, 0), too_long(Kind::Close, 1025, REASON_BYTES_MAX)),
    ] {
        assert_eq!(Announced::decode(&bytes), Err(expected));
    }
    let mut reserved = raw(4, 0, 0, 0);
    reserved[2] = 1;
    assert_eq!(Announced::decode(&reserved), Err(FrameError::UnusedField(Kind::Ping)));
}

#[test]
fn hellos_that_cannot_be_met() {
    let good = Hello {
        version_min: 2,
        version_max: 2,
        stripe: 0,
        stripes: 4,
        session: [7; 16],
        window_bytes: WINDOW_BYTES_MIN,
        request: Vec::new(),
    };
    let mut stranger = good.encode();
    stranger[..8].copy_from_slice(b"GET / HT");
    assert_eq!(decode_hello(&stranger), Some(Err(HandshakeError::Magic(*b"GET / HT"))));
    for (bad, expected) in [
        (Hello { version_min: 3, version_max: 9, ..good.clone() }, "versions 3 to 9"),
        (Hello { version_min: 1, version_max: 1, ..good.clone() }, "versions 1 to 1"),
        (Hello { version_min: 3, ..good.clone() }, "above its highest"),
        (Hello { stripe: 4, ..good.clone() }, "out of bounds"),
        (Hello { stripes: 17, ..good.clone() }, "out of bounds"),
        (Hello { window_bytes: WINDOW_BYTES_MIN - 1, ..good.clone() }, "credit out of bounds"),
        (Hello { window_bytes: WINDOW_BYTES_MAX + 1, ..good.clone() }, "credit out of bounds"),
        (Hello { stripe: 1, request: vec![1], ..good.clone() }, "on a further connection"),
        (Hello { request: vec![1; REQUEST_BYTES_MAX + 1], ..good }, "65537 bytes"),
    ] {
        let error = decode_hello(&bad.encode()).unwrap().unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// The bytes of version 2, so that they do not change by accident.
#[test]
fn bytes_on_the_wire() {
    let header = Header { kind: Kind::First { message_bytes: 5 }, number: 258, payload_bytes: 5 };
    let mut expected = vec![1, 0, 0, 0, 5, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0];
    let checksum = crc32c::crc32c_append(crc32c::crc32c(&expected), b"hello");
    expected.extend(checksum.to_le_bytes());
    assert_eq!(header.encode([&b"hello"[..]]), expected[..]);

    let bytes = Hello {
        version_min: 2,
        version_max: 2,
        stripe: 2,
        stripes: 4,
        session: *b"0123456789abcdef",
        window_bytes: 1 << 20,
        request: Vec::new(),
    }
    .encode();
    let expected = b"FARSHLNK\x02\0\x02\0\x02\x04\0\x000123456789abcdef\0\0\x10\0\0\0\0\0\0\0\0\0";
    assert_eq!(bytes[..44], expected[..]);
}
