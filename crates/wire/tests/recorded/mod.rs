//! Recordings of what a server sent: a line `# protocol P parallel true|false`, then one message
//! per line in hexadecimal. Other lines that start with `#` are comments.

use farshore_model::DictionaryId;
use farshore_wire::pgoutput::{Context, Decoded, Message, OldTuple, Tuple, decode, encode, stored};
use std::collections::{BTreeMap, HashMap};

/// How many messages of each kind a recording has; `A/` counts aborts of sub-transactions.
pub type Kinds = BTreeMap<String, usize>;

pub fn unhex(line: &str) -> Vec<u8> {
    assert!(line.len().is_multiple_of(2), "odd line {line:?}");
    (0..line.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&line[at..at + 2], 16).unwrap())
        .collect()
}

pub fn messages(recording: &str) -> (Context, Vec<Vec<u8>>) {
    let settings = recording.lines().find_map(|line| line.strip_prefix("# protocol ")).unwrap();
    let (protocol, parallel) = settings.split_once(" parallel ").unwrap();
    let context = Context::new(protocol.parse().unwrap(), parallel.parse().unwrap());
    let lines = recording.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    (context, lines.map(unhex).collect())
}

/// Decodes a recording from its start, checks every message against the ones before it, and counts
/// the kinds.
pub fn replay(recording: &str) -> Kinds {
    let (mut context, messages) = messages(recording);
    let mut columns: HashMap<u32, usize> = HashMap::new();
    let mut kinds = Kinds::new();
    let mut block = None;
    for data in &messages {
        let Decoded { xid, message } =
            decode(data, &context).unwrap_or_else(|error| panic!("{error}: {data:02x?}"));
        assert_eq!(encode::message(&message, xid), *data, "{message:?}");
        let mut kind = char::from(data[0]).to_string();
        let check = |relation: u32, tuple: Tuple<'_>| {
            assert_eq!(tuple.len(), columns[&relation], "{message:?}");
            assert_eq!(tuple.values().count(), tuple.len());
        };
        match &message {
            Message::Relation(relation) => {
                columns.insert(relation.oid, relation.columns.len());
                let definition = stored::encode_definition(relation);
                assert_eq!(stored::decode_definition(&definition).unwrap(), *relation);
            }
            Message::Insert { relation, new } => check(*relation, *new),
            Message::Update { relation, old, new } => {
                check(*relation, *new);
                kind.push_str(match old {
                    OldTuple::None => "",
                    OldTuple::Key(_) => "k",
                    OldTuple::Full(_) => "o",
                });
                if let Some(old) = old.tuple() {
                    check(*relation, old);
                }
            }
            Message::Delete { relation, old } => check(*relation, old.tuple().unwrap()),
            Message::Truncate { relations, .. } => {
                assert!(relations.clone().all(|relation| columns.contains_key(&relation)));
            }
            Message::StreamStart { xid, .. } => block = Some(*xid),
            Message::StreamStop => block = None,
            // Also for one that a sub-transaction emitted: see `Decoded::xid`.
            Message::Message { .. } => assert_eq!(xid, block),
            Message::StreamAbort { xid, subxid, .. } if xid != subxid => kind.push('/'),
            _ => {}
        }
        let mut out = Vec::new();
        let rewritten =
            stored::rewrite_to_stored(data, &context, &mut out, |oid| Some(DictionaryId(oid)));
        match stored::CommandKind::of(data) {
            Some(command) => {
                assert_eq!(rewritten.unwrap(), stored::Rewritten { subxid: xid, kind: command });
                assert_eq!(out[4..], encode::message(&message, None));
                stored::decode_stored(&out[4..]).unwrap();
            }
            None => assert!(rewritten.is_err()),
        }
        for len in 0..data.len().min(200) {
            decode(&data[..len], &context).unwrap_err();
        }
        context.follow(&message);
        *kinds.entry(kind).or_default() += 1;
    }
    kinds
}
