//! Messages written out byte by byte from the documentation's tables.

use farshore_model::{Column, DictionaryId, Lsn, PgTime, Relation, ReplicaIdentity};
use farshore_wire::pgoutput::{
    Begin, Commit, Context, Message, OldTuple, Prepared, Problem, Relations, Tuple, Value, decode,
    encode, stored,
};

const PLAIN: Context = Context { protocol: 1, in_stream: false, parallel_streaming: false };
const LATEST: Context = Context { protocol: 4, in_stream: false, parallel_streaming: false };
const STREAMED: Context = Context { protocol: 4, in_stream: true, parallel_streaming: false };

/// Concatenates the fields of a message.
macro_rules! bytes {
    ($($part:expr),* $(,)?) => {{
        let mut all = Vec::new();
        $(all.extend_from_slice(&$part[..]);)*
        all
    }};
}

fn u16(number: u16) -> [u8; 2] {
    number.to_be_bytes()
}

fn u32(number: u32) -> [u8; 4] {
    number.to_be_bytes()
}

fn u64(number: u64) -> [u8; 8] {
    number.to_be_bytes()
}

/// `(1, NULL, unchanged, binary 0xFF)`
fn row() -> Vec<u8> {
    bytes![u16(4), b"t", u32(1), b"1", b"n", b"u", b"b", u32(1), [0xFF]]
}

#[track_caller]
fn check(data: &[u8], context: Context, message: Message<'_>) {
    let decoded = decode(data, &context).unwrap();
    assert_eq!(decoded.message, message);
    assert_eq!(decoded.xid, None);
    assert_eq!(encode::message(&message, None), data);
    for len in 0..data.len() {
        decode(&data[..len], &context).unwrap_err();
    }
    let mut longer = data.to_vec();
    longer.push(0);
    let error = decode(&longer, &context).unwrap_err();
    assert_eq!(error.problem, Problem::Trailing { len: 1 });
    assert_eq!(error.offset, data.len());

    // The same inside a stream block: an id after the tag for the kinds that can stand there.
    let inside = Context { in_stream: true, protocol: 4, ..context };
    match data[0] {
        b'R' | b'Y' | b'I' | b'U' | b'D' | b'T' | b'M' => {
            let streamed = bytes![data[..1], u32(77), data[1..]];
            let decoded = decode(&streamed, &inside).unwrap();
            assert_eq!(decoded.message, message);
            assert_eq!(decoded.xid, Some(77));
            assert_eq!(encode::message(&message, Some(77)), streamed);
        }
        b'O' => assert_eq!(decode(data, &inside).unwrap().message, message),
        _ => assert_eq!(decode(data, &inside).unwrap_err().problem, Problem::InsideStream),
    }
}

#[test]
fn transactions() {
    check(
        &bytes![b"B", u64(0x16_B374_D848), u64(5), u32(730)],
        PLAIN,
        Message::Begin(Begin { final_lsn: Lsn(0x16_B374_D848), commit_time: PgTime(5), xid: 730 }),
    );
    check(
        &bytes![b"C", [0], u64(10), u64(20), u64(-3_i64 as u64)],
        PLAIN,
        Message::Commit(Commit { commit_lsn: Lsn(10), end_lsn: Lsn(20), commit_time: PgTime(-3) }),
    );
    check(
        &bytes![b"O", u64(9), b"pg_16389\0"],
        PLAIN,
        Message::Origin { lsn: Lsn(9), name: "pg_16389" },
    );
}

#[test]
fn definitions() {
    check(
        &bytes![
            b"R",
            u32(16384),
            b"public\0",
            b"orders\0",
            b"d",
            u16(2),
            [1],
            b"id\0",
            u32(23),
            u32(u32::MAX),
            [0],
            b"name\0",
            u32(1043),
            u32(104),
        ],
        PLAIN,
        Message::Relation(Relation {
            oid: 16384,
            schema: "public".into(),
            name: "orders".into(),
            identity: ReplicaIdentity::Default,
            columns: vec![
                Column { key: true, name: "id".into(), type_oid: 23, type_modifier: -1 },
                Column { key: false, name: "name".into(), type_oid: 1043, type_modifier: 104 },
            ],
            types: vec![],
        }),
    );
    for (letter, identity) in [
        (b'd', ReplicaIdentity::Default),
        (b'n', ReplicaIdentity::Nothing),
        (b'f', ReplicaIdentity::Full),
        (b'i', ReplicaIdentity::Index),
    ] {
        let relation = Relation {
            oid: 1,
            schema: "".into(),
            name: "t".into(),
            identity,
            columns: vec![],
            types: vec![],
        };
        let data = bytes![b"R", u32(1), b"\0t\0", [letter], u16(0)];
        assert_eq!(stored::encode_definition(&relation), data);
        assert_eq!(stored::decode_definition(&data).unwrap(), relation);
        check(&data, PLAIN, Message::Relation(relation));
    }
    check(
        &bytes![b"Y", u32(16390), b"public\0mood\0"],
        PLAIN,
        Message::Type { oid: 16390, schema: "public", name: "mood" },
    );
}

#[test]
fn changes() {
    let row = row();
    let tuple = Tuple::parse(&row).unwrap();
    assert_eq!(
        tuple.values().collect::<Vec<_>>(),
        [Value::Text(b"1"), Value::Null, Value::Unchanged, Value::Binary(b"\xFF")]
    );
    assert_eq!((tuple.len(), tuple.values().len(), tuple.is_empty()), (4, 4, false));
    let key = bytes![u16(1), b"t", u32(0)];
    let key_tuple = Tuple::parse(&key).unwrap();
    assert_eq!(key_tuple.values().collect::<Vec<_>>(), [Value::Text(b"")]);
    let no_columns = u16(0);
    let no_columns = Tuple::parse(&no_columns).unwrap();
    assert!(no_columns.is_empty() && no_columns.values().next().is_none());

    let insert = bytes![b"I", u32(7), b"N", row];
    check(&insert, PLAIN, Message::Insert { relation: 7, new: tuple });
    check(
        &bytes![b"U", u32(7), b"N", row],
        PLAIN,
        Message::Update { relation: 7, old: OldTuple::None, new: tuple },
    );
    check(
        &bytes![b"U", u32(7), b"K", key, b"N", row],
        PLAIN,
        Message::Update { relation: 7, old: OldTuple::Key(key_tuple), new: tuple },
    );
    check(
        &bytes![b"U", u32(7), b"O", row, b"N", row],
        PLAIN,
        Message::Update { relation: 7, old: OldTuple::Full(tuple), new: tuple },
    );
    check(
        &bytes![b"D", u32(7), b"K", key],
        PLAIN,
        Message::Delete { relation: 7, old: OldTuple::Key(key_tuple) },
    );
    check(
        &bytes![b"D", u32(7), b"O", row],
        PLAIN,
        Message::Delete { relation: 7, old: OldTuple::Full(tuple) },
    );
    check(
        &bytes![b"T", u32(2), [3], u32(7), u32(8)],
        PLAIN,
        Message::Truncate {
            relations: Relations::new(&[u32(7), u32(8)]),
            cascade: true,
            restart_identity: true,
        },
    );
    check(
        &bytes![b"M", [1], u64(99), b"outbox\0", u32(3), b"a\0\xFF"],
        PLAIN,
        Message::Message {
            transactional: true,
            lsn: Lsn(99),
            prefix: "outbox",
            content: b"a\0\xFF",
        },
    );
}

#[test]
fn streamed_transactions() {
    check(&bytes![b"S", u32(700), [1]], LATEST, Message::StreamStart { xid: 700, first: true });
    check(
        &bytes![b"c", u32(700), [0], u64(1), u64(2), u64(3)],
        LATEST,
        Message::StreamCommit {
            xid: 700,
            commit_lsn: Lsn(1),
            end_lsn: Lsn(2),
            commit_time: PgTime(3),
        },
    );
    check(
        &bytes![b"A", u32(700), u32(701)],
        LATEST,
        Message::StreamAbort { xid: 700, subxid: 701, abort: None },
    );
    check(
        &bytes![b"A", u32(700), u32(701), u64(4), u64(5)],
        Context { parallel_streaming: true, ..LATEST },
        Message::StreamAbort { xid: 700, subxid: 701, abort: Some((Lsn(4), PgTime(5))) },
    );

    let stop = decode(b"E", &STREAMED).unwrap();
    assert_eq!(stop.message, Message::StreamStop);
    assert_eq!(decode(b"E", &LATEST).unwrap_err().problem, Problem::OutsideStream);

    let mut context = LATEST;
    context.follow(&Message::StreamStart { xid: 1, first: false });
    assert!(context.in_stream);
    context.follow(&Message::StreamStop);
    assert!(!context.in_stream);
}

#[test]
fn prepared_transactions() {
    let transaction = Prepared {
        prepare_lsn: Lsn(1),
        end_lsn: Lsn(2),
        prepare_time: PgTime(3),
        xid: 4,
        gid: "gid-4",
    };
    let fields = bytes![u64(1), u64(2), u64(3), u32(4), b"gid-4\0"];
    check(&bytes![b"b", fields], LATEST, Message::BeginPrepare(transaction));
    check(&bytes![b"P", [0], fields], LATEST, Message::Prepare(transaction));
    check(&bytes![b"p", [0], fields], LATEST, Message::StreamPrepare(transaction));
    check(
        &bytes![b"K", [0], fields],
        LATEST,
        Message::CommitPrepared {
            commit_lsn: Lsn(1),
            end_lsn: Lsn(2),
            commit_time: PgTime(3),
            xid: 4,
            gid: "gid-4",
        },
    );
    check(
        &bytes![b"r", [0], u64(1), u64(2), u64(3), u64(4), u32(5), b"g\0"],
        LATEST,
        Message::RollbackPrepared {
            prepare_end_lsn: Lsn(1),
            rollback_end_lsn: Lsn(2),
            prepare_time: PgTime(3),
            rollback_time: PgTime(4),
            xid: 5,
            gid: "g",
        },
    );
}

#[test]
fn every_tag_gives_a_value_or_says_why_not() {
    for tag in 0..=u8::MAX {
        let needed = match tag {
            b'B' | b'C' | b'O' | b'R' | b'Y' | b'I' | b'U' | b'D' | b'T' | b'M' => Some(1),
            b'S' | b'E' | b'c' | b'A' => Some(2),
            b'b' | b'P' | b'K' | b'r' | b'p' => Some(3),
            _ => None,
        };
        for protocol in 0..=u8::MAX {
            for in_stream in [false, true] {
                let context = Context { protocol, in_stream, parallel_streaming: false };
                let data = [tag];
                let result = decode(&data, &context);
                let Some(needed) = needed else {
                    assert_eq!(result.unwrap_err().problem, Problem::UnknownTag);
                    continue;
                };
                if !(1..=4).contains(&protocol) {
                    assert_eq!(result.unwrap_err().problem, Problem::UnknownProtocol(protocol));
                } else if protocol < needed {
                    let problem = Problem::NotInProtocol { needed, protocol };
                    assert_eq!(result.unwrap_err().problem, problem);
                } else if tag == b'E' && in_stream {
                    assert_eq!(result.unwrap().message, Message::StreamStop);
                } else {
                    let error = result.unwrap_err();
                    assert_eq!(error.tag, Some(tag));
                    assert!(matches!(
                        error.problem,
                        Problem::Ends { .. } | Problem::InsideStream | Problem::OutsideStream
                    ));
                }
            }
        }
        let stored = stored::decode_stored(&[tag]).unwrap_err().problem;
        if b"IUDTMx".contains(&tag) {
            assert!(matches!(stored, Problem::Ends { .. }));
        } else {
            assert_eq!(stored, Problem::NotCommand);
        }
    }
    let error = decode(b"", &PLAIN).unwrap_err();
    assert_eq!(
        error.to_string(),
        "pgoutput message without a tag, byte 0: expected a message tag, but the message ends"
    );
}

#[test]
fn unknown_letters_flags_and_lengths_are_refused_where_they_stand() {
    let unexpected = |data: &[u8], offset: usize| {
        let error = decode(data, &LATEST).unwrap_err();
        assert_eq!(error.offset, offset, "{error}");
        let Problem::Unexpected { found, .. } = error.problem else { panic!("{error}") };
        assert_eq!(found, data[offset], "{error}");
    };
    unexpected(&bytes![b"I", u32(7), b"K", u16(0)], 5);
    unexpected(&bytes![b"I", u32(7), b"N", u16(1), b"x"], 8);
    unexpected(&bytes![b"U", u32(7), b"Q", u16(0)], 5);
    unexpected(&bytes![b"U", u32(7), b"K", u16(0), b"K", u16(0)], 8);
    unexpected(&bytes![b"D", u32(7), b"N", u16(0)], 5);
    unexpected(&bytes![b"T", u32(0), [4]], 5);
    unexpected(&bytes![b"M", [2], u64(0), b"\0", u32(0)], 1);
    unexpected(&bytes![b"C", [1], u64(0), u64(0), u64(0)], 1);
    unexpected(&bytes![b"S", u32(7), [2]], 5);
    unexpected(&bytes![b"R", u32(1), b"\0t\0", b"x", u16(0)], 8);
    unexpected(&bytes![b"R", u32(1), b"\0t\0", b"d", u16(1), [2]], 11);

    let negative = |data: &[u8], offset: usize| {
        let error = decode(data, &LATEST).unwrap_err();
        assert!(matches!(error.problem, Problem::Negative { .. }), "{error}");
        assert_eq!(error.offset, offset, "{error}");
    };
    negative(&bytes![b"I", u32(7), b"N", u16(0x8000)], 6);
    negative(&bytes![b"I", u32(7), b"N", u16(1), b"t", u32(u32::MAX)], 9);
    negative(&bytes![b"T", u32(u32::MAX), [0]], 1);
    negative(&bytes![b"M", [0], u64(0), b"\0", u32(0x8000_0000)], 11);
    negative(&bytes![b"R", u32(1), b"\0t\0", b"d", u16(0xFFFF)], 9);

    let error = decode(&bytes![b"Y", u32(1), b"ok\0", b"a\xFFb\0"], &PLAIN).unwrap_err();
    assert_eq!(error.problem, Problem::NotUtf8 { what: "the name of a type" });
    assert_eq!(error.offset, 9);

    // A count that promises more than there is must not reserve memory for it.
    decode(&bytes![b"T", u32(0x7FFF_FFFF), [0], u32(1)], &PLAIN).unwrap_err();
    decode(&bytes![b"R", u32(1), b"\0t\0", b"d", u16(0x7FFF)], &PLAIN).unwrap_err();
}

#[test]
fn changes_are_rewritten_to_stored_commands() {
    let row = row();
    let tuple = Tuple::parse(&row).unwrap();
    let lookup = |oid| (oid < 1000).then_some(DictionaryId(oid + 1));
    let mut out = b"before".to_vec();

    let insert = bytes![b"I", u32(55), u32(7), b"N", row];
    let done = stored::rewrite_to_stored(&insert, &STREAMED, &mut out, lookup).unwrap();
    assert_eq!((done.subxid, done.kind), (Some(55), stored::CommandKind::Insert));
    let command = bytes![b"I", u32(8), b"N", row];
    assert_eq!(out, bytes![b"before", (command.len() as u32).to_le_bytes(), command]);
    assert_eq!(
        stored::decode_stored(&command).unwrap(),
        stored::Stored::Insert { relation: DictionaryId(8), new: tuple }
    );
    assert_eq!(stored::changed_relation(&command), Some(DictionaryId(8)));
    for other in [&b"T\0\0\0\x08"[..], b"I\0\0\x08", b""] {
        assert_eq!(stored::changed_relation(other), None);
    }

    out.clear();
    let truncate = bytes![b"T", u32(2), [1], u32(7), u32(9)];
    stored::rewrite_to_stored(&truncate, &PLAIN, &mut out, lookup).unwrap();
    assert_eq!(out, bytes![14_u32.to_le_bytes(), b"T", u32(2), [1], u32(8), u32(10)]);
    let mut visited = Vec::new();
    stored::for_each_relation(&truncate, &PLAIN, |oid| visited.push(oid)).unwrap();
    assert_eq!(visited, [7, 9]);

    // What fails leaves nothing behind.
    out.clear();
    for (data, problem) in [
        (bytes![b"I", u32(1000), b"N", row], Problem::UnknownRelation { oid: 1000 }),
        (bytes![b"T", u32(2), [1], u32(7), u32(1001)], Problem::UnknownRelation { oid: 1001 }),
        (bytes![b"I", u32(7), b"N", row, [0]], Problem::Trailing { len: 1 }),
        (bytes![b"Y", u32(1), b"a\0b\0"], Problem::NotCommand),
        (bytes![b"?"], Problem::UnknownTag),
    ] {
        let error = stored::rewrite_to_stored(&data, &PLAIN, &mut out, lookup).unwrap_err();
        assert_eq!(error.problem, problem);
        assert!(out.is_empty());
    }

    stored::push_subtransaction_mark(&mut out, 0x0102_0304);
    assert_eq!(out, bytes![5_u32.to_le_bytes(), b"x", [1, 2, 3, 4]]);
    assert_eq!(
        stored::decode_stored(&out[4..]).unwrap(),
        stored::Stored::SubtransactionMark(0x0102_0304)
    );
}
