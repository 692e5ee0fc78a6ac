//! What must hold for every message: there and back, and that no damage passes unnoticed.

mod totality;

use farshore_model::{
    Column, DictionaryId, Lsn, PgTime, Relation, ReplicaIdentity, transaction::push_command,
};
use farshore_wire::pgoutput::{
    Begin, Commit, Context, Message, OldTuple, Prepared, Relations, Tuple, Value, decode, encode,
    stored,
};
use proptest::prelude::*;
use totality::check_total;

#[derive(Clone, Debug)]
enum OwnedValue {
    Null,
    Unchanged,
    Text(Vec<u8>),
    Binary(Vec<u8>),
}

/// The material from which a message of any kind is made.
#[derive(Clone, Debug)]
struct Parts {
    kind: u8,
    numbers: [u64; 4],
    xid: u32,
    subxid: u32,
    streamed: Option<u32>,
    flags: [bool; 2],
    first: String,
    second: String,
    content: Vec<u8>,
    relations: Vec<u32>,
    definition: Relation,
    old: Vec<OwnedValue>,
    new: Vec<OwnedValue>,
}

/// Number of kinds that [`Parts::message`] makes.
const KINDS: u8 = 22;

fn name() -> impl Strategy<Value = String> {
    "[^\0]{0,12}"
}

fn row() -> impl Strategy<Value = Vec<OwnedValue>> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..20);
    let value = prop_oneof![
        Just(OwnedValue::Null),
        Just(OwnedValue::Unchanged),
        bytes().prop_map(OwnedValue::Text),
        bytes().prop_map(OwnedValue::Binary),
    ];
    prop::collection::vec(value, 0..6)
}

fn definition() -> impl Strategy<Value = Relation> {
    let identity = prop_oneof![
        Just(ReplicaIdentity::Default),
        Just(ReplicaIdentity::Nothing),
        Just(ReplicaIdentity::Full),
        Just(ReplicaIdentity::Index),
    ];
    let column = (any::<bool>(), name(), any::<u32>(), any::<i32>()).prop_map(
        |(key, name, type_oid, type_modifier)| Column { key, name, type_oid, type_modifier },
    );
    (any::<u32>(), name(), name(), identity, prop::collection::vec(column, 0..5)).prop_map(
        |(oid, schema, name, identity, columns)| Relation {
            oid,
            schema,
            name,
            identity,
            columns,
            types: vec![],
        },
    )
}

fn parts() -> impl Strategy<Value = Parts> {
    (
        (0..KINDS, any::<[u64; 4]>(), any::<u32>(), any::<u32>(), any::<Option<u32>>()),
        (any::<[bool; 2]>(), name(), name(), prop::collection::vec(any::<u8>(), 0..20)),
        (prop::collection::vec(any::<u32>(), 0..4), definition(), row(), row()),
    )
        .prop_map(
            |(
                (kind, numbers, xid, subxid, streamed),
                (flags, first, second, content),
                (relations, definition, old, new),
            )| Parts {
                kind,
                numbers,
                xid,
                subxid,
                streamed,
                flags,
                first,
                second,
                content,
                relations,
                definition,
                old,
                new,
            },
        )
}

fn tuple_bytes(row: &[OwnedValue]) -> Vec<u8> {
    let values: Vec<Value<'_>> = row
        .iter()
        .map(|value| match value {
            OwnedValue::Null => Value::Null,
            OwnedValue::Unchanged => Value::Unchanged,
            OwnedValue::Text(bytes) => Value::Text(bytes),
            OwnedValue::Binary(bytes) => Value::Binary(bytes),
        })
        .collect();
    let bytes = encode::tuple(&values);
    let tuple = Tuple::parse(&bytes).unwrap();
    assert_eq!(tuple.values().len(), values.len());
    assert_eq!(tuple.values().collect::<Vec<_>>(), values);
    assert_eq!(tuple.as_bytes(), bytes);
    bytes
}

/// A message with everything that is needed to read it back.
struct Made<'a> {
    message: Message<'a>,
    context: Context,
    xid: Option<u32>,
}

impl Parts {
    /// Calls `check` with the message that these parts make; `relation` is applied to the numbers
    /// of relations in changes.
    fn with_message(&self, relation: impl Fn(u32) -> u32, check: impl FnOnce(Made<'_>)) {
        let [a, b, c, d] = self.numbers;
        let (old, new) = (tuple_bytes(&self.old), tuple_bytes(&self.new));
        let (old, new) = (Tuple::parse(&old).unwrap(), Tuple::parse(&new).unwrap());
        let numbers: Vec<[u8; 4]> =
            self.relations.iter().map(|oid| relation(*oid).to_be_bytes()).collect();
        let (first, second) = (self.first.as_str(), self.second.as_str());
        let relation = relation(self.subxid);
        let xid = self.xid;
        let prepared = Prepared {
            prepare_lsn: Lsn(a),
            end_lsn: Lsn(b),
            prepare_time: PgTime(c as i64),
            xid,
            gid: first,
        };
        let message = match self.kind {
            0 => Message::Begin(Begin { final_lsn: Lsn(a), commit_time: PgTime(b as i64), xid }),
            1 => Message::Commit(Commit {
                commit_lsn: Lsn(a),
                end_lsn: Lsn(b),
                commit_time: PgTime(c as i64),
            }),
            2 => Message::Origin { lsn: Lsn(a), name: first },
            3 => Message::Relation(self.definition.clone()),
            4 => Message::Type { oid: relation, schema: first, name: second },
            5 => Message::Insert { relation, new },
            6 => Message::Update { relation, old: OldTuple::None, new },
            7 => Message::Update { relation, old: OldTuple::Key(old), new },
            8 => Message::Update { relation, old: OldTuple::Full(old), new },
            9 => Message::Delete { relation, old: OldTuple::Key(old) },
            10 => Message::Delete { relation, old: OldTuple::Full(old) },
            11 => Message::Truncate {
                relations: Relations::new(&numbers),
                cascade: self.flags[0],
                restart_identity: self.flags[1],
            },
            12 => Message::Message {
                transactional: self.flags[0],
                lsn: Lsn(a),
                prefix: first,
                content: &self.content,
            },
            13 => Message::StreamStart { xid, first: self.flags[0] },
            14 => Message::StreamStop,
            15 => Message::StreamCommit {
                xid,
                commit_lsn: Lsn(a),
                end_lsn: Lsn(b),
                commit_time: PgTime(c as i64),
            },
            16 => Message::StreamAbort {
                xid,
                subxid: self.subxid,
                abort: self.flags[0].then_some((Lsn(a), PgTime(b as i64))),
            },
            17 => Message::BeginPrepare(prepared),
            18 => Message::Prepare(prepared),
            19 => Message::CommitPrepared {
                commit_lsn: Lsn(a),
                end_lsn: Lsn(b),
                commit_time: PgTime(c as i64),
                xid,
                gid: first,
            },
            20 => Message::RollbackPrepared {
                prepare_end_lsn: Lsn(a),
                rollback_end_lsn: Lsn(b),
                prepare_time: PgTime(c as i64),
                rollback_time: PgTime(d as i64),
                xid,
                gid: first,
            },
            _ => Message::StreamPrepare(prepared),
        };
        let xid = if (3..=12).contains(&self.kind) { self.streamed } else { None };
        let context = Context {
            protocol: 4,
            in_stream: xid.is_some() || self.kind == 14,
            parallel_streaming: self.flags[0],
        };
        check(Made { message, context, xid });
    }
}

proptest! {
    #[test]
    fn every_message_comes_back(parts in parts()) {
        parts.with_message(|oid| oid, |Made { message, context, xid }| {
            let data = encode::message(&message, xid);
            let decoded = decode(&data, &context).unwrap();
            assert_eq!(decoded.message, message);
            assert_eq!(decoded.xid, xid);
            check_total(&data, &context);
            for len in 0..data.len() {
                decode(&data[..len], &context).unwrap_err();
                check_total(&data[..len], &context);
            }
        });
    }

    #[test]
    fn stored_commands_differ_in_their_relation_numbers_only(parts in parts()) {
        let number = |oid: u32| oid.wrapping_mul(31);
        let mut out = Vec::new();
        parts.with_message(|oid| oid, |Made { message, context, xid }| {
            let data = encode::message(&message, xid);
            let result = stored::rewrite_to_stored(
                &data, &context, &mut out, |oid| Some(DictionaryId(number(oid))),
            );
            assert_eq!(result.is_ok(), stored::CommandKind::of(&data).is_some());
        });
        if !out.is_empty() {
            parts.with_message(number, |Made { message, .. }| {
                let mut expected = Vec::new();
                push_command(&mut expected, &encode::message(&message, None));
                assert_eq!(out, expected);
            });
        }
    }

    #[test]
    fn definitions_come_back(relation in definition()) {
        let bytes = stored::encode_definition(&relation);
        prop_assert_eq!(stored::decode_definition(&bytes).unwrap(), relation);
    }

    #[test]
    fn damage_is_refused_or_read_as_what_it_says(
        parts in parts(), at in any::<prop::sample::Index>(), byte in any::<u8>(),
    ) {
        parts.with_message(|oid| oid, |Made { message, context, xid }| {
            let mut data = encode::message(&message, xid);
            let at = at.index(data.len());
            data[at] = byte;
            check_total(&data, &context);
        });
    }

    #[test]
    fn any_bytes_are_refused_or_read_as_what_they_say(
        data in prop::collection::vec(any::<u8>(), 0..40),
        protocol in 0_u8..6, in_stream in any::<bool>(), parallel_streaming in any::<bool>(),
    ) {
        check_total(&data, &Context { protocol, in_stream, parallel_streaming });
    }
}
