//! Any bytes decode to a value or a typed error, and what a server sends decodes to what it says.

use bytes::{BufMut, Bytes, BytesMut};
use farshore_wire::backend::{
    Authentication, DecodeError, Format, Frame, Message, TransactionStatus, decode, split_frame,
};
use farshore_wire::frontend::{self, Bind};
use proptest::prelude::*;

fn message(tag: u8, body: &[u8]) -> Result<Message, DecodeError> {
    decode(Frame { tag, body: Bytes::copy_from_slice(body) })
}

const TAGS: &[u8] = b"RK23CdcGHWDIEVvnNAtS1sZT";

#[test]
fn every_message_decodes() {
    use Message::*;
    let ok = |tag, body: &[u8]| message(tag, body).unwrap();
    assert_eq!(ok(b'R', b"\0\0\0\0"), Authentication(self::Authentication::Ok));
    assert_eq!(
        ok(b'R', b"\0\0\0\x05abcd"),
        Authentication(self::Authentication::Md5Password { salt: *b"abcd" })
    );
    assert_eq!(
        ok(b'R', b"\0\0\0\x0aX\0Y\0\0"),
        Authentication(self::Authentication::Sasl { mechanisms: vec!["X".into(), "Y".into()] })
    );
    assert_eq!(
        ok(b'R', b"\0\0\0\x0bdata"),
        Authentication(self::Authentication::SaslContinue { data: "data".into() })
    );
    assert_eq!(
        ok(b'K', b"\0\0\0\x07keys"),
        BackendKeyData { process_id: 7, secret_key: "keys".into() }
    );
    assert_eq!(
        ok(b'K', &[&[0, 0, 0, 7][..], &[9; 256]].concat()),
        BackendKeyData { process_id: 7, secret_key: vec![9; 256].into() }
    );
    assert_eq!(ok(b'Z', b"E"), ReadyForQuery(TransactionStatus::Failed));
    assert_eq!(ok(b'S', b"a\0b\0"), ParameterStatus { name: "a".into(), value: "b".into() });
    assert_eq!(ok(b't', b"\0\x01\0\0\0\x17"), ParameterDescription(vec![23]));
    assert_eq!(ok(b'c', b""), CopyDone);
    assert_eq!(
        ok(b'A', b"\0\0\0\x07c\0p\0"),
        NotificationResponse { process_id: 7, channel: "c".into(), payload: "p".into() }
    );
    assert_eq!(
        ok(b'v', b"\0\x03\0\0\0\0\0\x01_pq_.x\0"),
        NegotiateProtocolVersion { version: 3 << 16, unrecognized: vec!["_pq_.x".into()] }
    );
    let CopyOutResponse(copy) = ok(b'H', b"\x01\0\x02\0\x01\0\x01") else { panic!() };
    assert_eq!((copy.overall, copy.columns.len()), (Format::Binary, 2));

    let RowDescription(fields) =
        ok(b'T', b"\0\x01id\0\0\0\0\x05\0\x01\0\0\0\x17\0\x04\xff\xff\xff\xff\0\0")
    else {
        panic!()
    };
    assert_eq!((fields[0].name.as_str(), fields[0].type_oid), ("id", 23));

    let DataRow(row) = ok(b'D', b"\0\x03\0\0\0\x01a\xff\xff\xff\xff\0\0\0\0") else { panic!() };
    assert_eq!(row.values().collect::<Vec<_>>(), [Some(&b"a"[..]), None, Some(b"")]);
    let mut values = row.values();
    assert_eq!(values.next_range(), Some(Some(4..5)));
    assert_eq!(values.next_range(), Some(None));
    assert_eq!(values.next_range(), Some(Some(13..13)));
    assert_eq!(values.next_range(), None);

    let CommandComplete(tag) = ok(b'C', b"INSERT 0 12\0") else { panic!() };
    assert_eq!((tag.as_str(), tag.rows()), ("INSERT 0 12", Some(12)));
    let CommandComplete(tag) = ok(b'C', b"BEGIN\0") else { panic!() };
    assert_eq!(tag.rows(), None);
}

#[test]
fn errors_carry_all_their_fields() {
    let body =
        b"SFEHLER\0VERROR\0C23505\0Mdouble\0Dd\0Hh\0P7\0Ww\0ss\0tt\0cc\0dd\0nn\0Ff\0L9\0Rr\0?x\0\0";
    let Ok(Message::ErrorResponse(error)) = message(b'E', body) else { panic!() };
    assert_eq!((error.severity.as_str(), error.code.as_str()), ("ERROR", "23505"));
    assert_eq!((error.position, error.line), (Some(7), Some(9)));
    let some = |s: &str| Some(s.to_owned());
    assert_eq!((error.schema.clone(), error.table.clone()), (some("s"), some("t")));
    assert_eq!((error.column.clone(), error.constraint.clone()), (some("c"), some("n")));
    assert_eq!((error.data_type.clone(), error.context.clone()), (some("d"), some("w")));
    assert_eq!(error.to_string(), "ERROR 23505: double; detail: d; hint: h; where: w");
}

#[test]
fn what_is_not_documented_is_an_error() {
    assert_eq!(message(b'?', b""), Err(DecodeError::UnknownTag { tag: b'?' }));
    assert_eq!(message(b'R', b"\0\0\0\x63"), Err(DecodeError::UnknownAuthentication { code: 99 }));
    for (tag, body) in [
        (b'Z', &b"X"[..]),
        (b'Z', b""),
        (b'Z', b"II"),
        (b'1', b"x"),
        (b'K', b"\0\0\0\x07key"),
        (b'D', b"\0\x01\0\0\0\x02a"),
        (b'D', b"\0\x01\xff\xff\xff\xfe"),
        (b'D', b"\xff\xff"),
        (b'D', b"\0\0x"),
        (b'T', b"\x7f\xff"),
        (b'G', b"\x02\0\0"),
        (b'C', b"INSERT"),
        (b'C', b"\xff\0"),
    ] {
        assert!(message(tag, body).is_err(), "{} {body:?}", tag as char);
    }
}

proptest! {
    #[test]
    fn decoding_is_total(tag in any::<u8>(), body in proptest::collection::vec(any::<u8>(), 0..200)) {
        let decoded = message(tag, &body);
        if !TAGS.contains(&tag) {
            prop_assert_eq!(decoded, Err(DecodeError::UnknownTag { tag }));
        }
    }

    /// Mostly zeros and small numbers, so that counts and lengths are often nearly right.
    #[test]
    fn decoding_near_misses_is_total(
        tag in proptest::sample::select(TAGS),
        body in proptest::collection::vec(prop_oneof![4 => Just(0u8), 2 => 1..6u8, 1 => any::<u8>()], 0..60),
    ) {
        if let Ok(Message::DataRow(row)) = message(tag, &body) {
            prop_assert_eq!(row.values().count(), row.len());
            let mut values = row.values();
            for value in row.values() {
                let range = values.next_range().unwrap();
                prop_assert_eq!(range.map(|range| &row.storage()[range]), value);
            }
        }
    }

    #[test]
    fn frames_survive_any_cut(
        bodies in proptest::collection::vec((any::<u8>(), proptest::collection::vec(any::<u8>(), 0..40)), 0..8),
        pieces in proptest::collection::vec(1..20usize, 1..40),
    ) {
        let mut stream = Vec::new();
        for (tag, body) in &bodies {
            stream.push(*tag);
            stream.extend((body.len() as u32 + 4).to_be_bytes());
            stream.extend(body);
        }
        let (mut buffer, mut frames) = (BytesMut::new(), Vec::new());
        let mut pieces = pieces.into_iter().cycle();
        let mut rest = &stream[..];
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(rest.len().min(pieces.next().unwrap()));
            buffer.extend_from_slice(piece);
            rest = after;
            while let Some(frame) = split_frame(&mut buffer).unwrap() {
                frames.push((frame.tag, frame.body.to_vec()));
            }
        }
        prop_assert!(buffer.is_empty());
        prop_assert_eq!(frames, bodies);
    }

    #[test]
    fn splitting_is_total(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
        let mut buffer = BytesMut::from(&bytes[..]);
        while let Ok(Some(frame)) = split_frame(&mut buffer) {
            let _ = decode(frame);
        }
    }

    #[test]
    fn rows_round_trip(values in proptest::collection::vec(proptest::option::of(proptest::collection::vec(any::<u8>(), 0..30)), 0..20)) {
        let mut body = BytesMut::new();
        body.put_u16(values.len() as u16);
        for value in &values {
            match value {
                None => body.put_i32(-1),
                Some(value) => {
                    body.put_u32(value.len() as u32);
                    body.put_slice(value);
                }
            }
        }
        let Message::DataRow(row) = message(b'D', &body).unwrap() else { panic!() };
        let decoded: Vec<_> = row.values().map(|v| v.map(<[u8]>::to_vec)).collect();
        prop_assert_eq!(decoded, values);
    }

    /// A Bind is its header, one format and one value per parameter, and one result format.
    #[test]
    fn binds_have_the_announced_length(values in proptest::collection::vec(proptest::option::of(proptest::collection::vec(any::<u8>(), 0..30)), 0..20)) {
        let mut out = BytesMut::new();
        let mut bind = Bind::begin(&mut out, "p", "st", values.len()).unwrap();
        for value in &values {
            bind.parameter(Format::Binary, value.as_deref()).unwrap();
        }
        bind.finish(Format::Binary).unwrap();
        let payload: usize = values.iter().map(|v| 6 + v.as_ref().map_or(0, Vec::len)).sum();
        prop_assert_eq!(out.len(), 1 + 4 + 2 + 3 + 2 + 2 + payload + 4);
        let frame = split_frame(&mut out).unwrap().unwrap();
        prop_assert_eq!(frame.tag, b'B');
        prop_assert!(out.is_empty());
    }

    #[test]
    fn encoders_keep_the_buffer_on_error(text in ".{0,12}", before in proptest::collection::vec(any::<u8>(), 0..9)) {
        let mut out = BytesMut::from(&before[..]);
        let refused = frontend::query(&mut out, &text).is_err();
        prop_assert_eq!(refused, text.contains('\0'));
        prop_assert_eq!(out.len(), before.len() + if refused { 0 } else { text.len() + 6 });
    }
}
