//! Requests and answers, as JSON.
//!
//! A request is a length (u32, big-endian), so many bytes of JSON, and the keys of a look-up; an
//! answer is JSON alone. What copies and look-ups give travels in frames of data between
//! [`Answer::Begins`] and the answer that ends it.

use super::{AddedColumn, DroppedColumns, Key, OldValue};
use crate::publication::{PublishedTable, TableName};
use crate::schema::{Definitions, SequencePosition};
use crate::snapshot::{BlockRange, CopyPlan, Digest, DigestScope, HashedAs, Hashing};
use crate::timelines::Timelines;
use bytes::{Buf, Bytes};
use serde::{Deserialize, Serialize};

/// The version of all this. Another one is refused.
pub(super) const VERSION: u32 = 1;

/// Bytes that a request may have.
pub(super) const REQUEST_BYTES_MAX: usize = 4 << 20;
/// Bytes of keys that go with one look-up, apart from one key that is larger.
pub(super) const KEYS_BYTES: usize = 1 << 20;
/// Bytes that an answer may have: the definitions of tens of thousands of tables.
pub(super) const ANSWER_BYTES_MAX: usize = 256 << 20;

/// What a channel is asked. Tables are OIDs of the publisher where nothing else is said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Request {
    PublishedTables,
    PartitionedTables,
    Partitions,
    Definitions {
        tables: Vec<u32>,
    },
    Sequences,
    Timelines,
    DroppedColumns {
        table: TableName,
        gone: Vec<String>,
    },
    OldValues {
        table: TableName,
        columns: Vec<AddedColumn>,
        /// Sites of earlier versions do not say this and what follows.
        #[serde(default)]
        oid: u32,
        #[serde(default)]
        copied_from: Option<u32>,
        #[serde(default)]
        columns_now: Vec<String>,
    },
    /// Makes the channel a snapshot's: when it ends, so does the snapshot.
    Export {
        reader: String,
        /// Tables that need not be kept as they are; sites of earlier versions say nothing of them.
        #[serde(default)]
        followed: Vec<u32>,
    },
    /// Makes the channel a session inside the snapshot of that id.
    Open {
        snapshot: String,
    },
    /// In a session; and so on to [`Request::LookUp`].
    Tables,
    HoldStill {
        tables: Vec<u32>,
    },
    IsInTheWay {
        tables: Vec<u32>,
    },
    CopyRange {
        table: u32,
        range: BlockRange,
        plan: CopyPlan,
        /// Whether [`Answer::Copied`] is understood; sites of earlier versions say nothing of it.
        #[serde(default)]
        counted: bool,
    },
    /// With the keys behind it.
    LookUp {
        table: u32,
        plan: CopyPlan,
        key_columns: Vec<String>,
    },
    /// In a session; sites of earlier versions take it for no request.
    Digest {
        table: u32,
        types: Vec<Option<HashedAs>>,
        key_columns: Vec<String>,
        scope: DigestScope,
        hashing: Hashing,
    },
    /// Ends a snapshot or session, and the channel.
    Close,
}

/// What comes back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    Tables(Vec<PublishedTable>),
    Oids(Vec<u32>),
    Partitions(Option<(Vec<PublishedTable>, Definitions)>),
    Definitions(Definitions),
    Sequences(Vec<SequencePosition>),
    Timelines(Timelines),
    Dropped(DroppedColumns),
    OldValues(Vec<OldValue>),
    Exported {
        /// As a number: `Lsn` has no form of its own here.
        consistent_point: u64,
        /// Opens sessions; nobody can guess it.
        snapshot: String,
    },
    Is(bool),
    /// None, where the encoding is another.
    Digest(Option<Digest>),
    /// Data follow.
    Begins,
    Done,
    /// In place of [`Answer::Done`] behind the data of a range, where that was asked for.
    Copied {
        rows: u64,
    },
    Failed {
        message: String,
        transient: bool,
    },
}

#[derive(Serialize)]
struct Outgoing<'a> {
    version: u32,
    request: &'a Request,
}

/// Read first: a request of another version may be anything.
#[derive(Deserialize)]
struct Version {
    version: u32,
}

#[derive(Deserialize)]
struct Incoming {
    request: Request,
}

/// A request with its keys; what is wrong if it would be too long.
pub(super) fn encode_request(request: &Request, keys: &[&Key]) -> Result<Vec<u8>, String> {
    let json = serde_json::to_vec(&Outgoing { version: VERSION, request });
    let json = json.map_err(|error| error.to_string())?;
    let mut message = Vec::with_capacity(4 + json.len());
    message.extend_from_slice(&(json.len() as u32).to_be_bytes());
    message.extend_from_slice(&json);
    for key in keys {
        message.extend_from_slice(&(key.bytes() as u32).to_be_bytes());
        message.extend_from_slice(key.as_bytes());
    }
    if message.len() > REQUEST_BYTES_MAX {
        return Err(format!(
            "a request of {} bytes is more than the {REQUEST_BYTES_MAX} that may be asked",
            message.len()
        ));
    }
    Ok(message)
}

/// A request and its keys, or what is wrong with it.
pub(super) fn decode_request(message: Vec<u8>) -> Result<(Request, Vec<Key>), String> {
    let mut message = Bytes::from(message);
    let json = split(&mut message).ok_or("a request that is cut off")?;
    let not_one = |error: serde_json::Error| format!("something that is no request: {error}");
    let Version { version } = serde_json::from_slice(&json).map_err(not_one)?;
    if version != VERSION {
        return Err(format!(
            "a request of version {version}, and this site speaks version {VERSION}: run the same \
             release of farshore on both sites"
        ));
    }
    let Incoming { request } = serde_json::from_slice(&json).map_err(not_one)?;
    let mut keys = Vec::new();
    while !message.is_empty() {
        let key = split(&mut message).ok_or("a key that is cut off")?;
        keys.push(Key::from_bytes(key.into()).ok_or("a key that is damaged")?);
    }
    Ok((request, keys))
}

/// Takes a length and so many bytes off.
fn split(message: &mut Bytes) -> Option<Bytes> {
    if message.len() < 4 {
        return None;
    }
    let len = message.get_u32() as usize;
    (len <= message.len()).then(|| message.split_to(len))
}

pub(super) fn encode_answer(answer: &Answer) -> Result<Vec<u8>, String> {
    serde_json::to_vec(answer).map_err(|error| error.to_string())
}

pub(super) fn decode_answer(message: &[u8]) -> Result<Answer, String> {
    serde_json::from_slice(message).map_err(|error| format!("not an answer: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::CopyFormat;
    use farshore_wire::frontend::Format;

    fn key(values: &[&[u8]]) -> Key {
        let mut key = Key::default();
        values.iter().for_each(|value| key.push(Format::Binary, value));
        key
    }

    /// A request as a site of another version sends it.
    fn sent_as(json: &str) -> Request {
        let mut message = (json.len() as u32).to_be_bytes().to_vec();
        message.extend_from_slice(json.as_bytes());
        decode_request(message).unwrap().0
    }

    #[test]
    fn a_snapshot_is_understood_as_sites_of_earlier_versions_ask_for_it() {
        for (more, expected) in [("", vec![]), (r#","followed":[7,8]"#, vec![7, 8])] {
            let asked = sent_as(&format!(
                r#"{{"version":1,"request":{{"export":{{"reader":"s"{more}}}}}}}"#
            ));
            assert_eq!(asked, Request::Export { reader: "s".into(), followed: expected });
        }
    }

    fn look_up() -> Request {
        Request::LookUp {
            table: 7,
            plan: CopyPlan { format: CopyFormat::Text, casts: vec![None, Some("text".into())] },
            key_columns: vec!["Odd \"name\"\0".into()],
        }
    }

    #[test]
    fn requests_come_as_they_were_sent_and_are_refused_cut_off() {
        let (one, other) = (key(&[b"\0\xff", b""]), key(&[]));
        let message = encode_request(&look_up(), &[&one, &other]).unwrap();
        let came = decode_request(message.clone()).unwrap();
        assert_eq!(came, (look_up(), vec![one.clone(), other]));
        let without = encode_request(&look_up(), &[&one]).unwrap().len();
        let json = encode_request(&look_up(), &[]).unwrap().len();
        for end in (0..message.len()).filter(|end| ![json, without].contains(end)) {
            assert!(decode_request(message[..end].to_vec()).is_err(), "{end}");
        }
    }

    #[test]
    fn a_copy_is_understood_as_sites_of_earlier_versions_ask_for_it() {
        let ask = |more: &str| {
            sent_as(&format!(
                r#"{{"version":1,"request":{{"copy_range":{{"table":7,"range":{{"start":0,"end":9}},
                "plan":{{"format":"text","casts":[]}}{more}}}}}}}"#
            ))
        };
        for (more, expected) in [("", false), (r#","counted":true,"later":1"#, true)] {
            let Request::CopyRange { counted, .. } = ask(more) else { panic!("another request") };
            assert_eq!(counted, expected);
        }
    }

    #[test]
    fn another_version_is_refused_whatever_it_asks() {
        let json = br#"{"version":2,"request":{"everything":[1,2]}}"#;
        let mut message = (json.len() as u32).to_be_bytes().to_vec();
        message.extend_from_slice(json);
        let refused = decode_request(message).unwrap_err();
        assert!(refused.contains("version 2"), "{refused}");
        let large = key(&[&vec![0; REQUEST_BYTES_MAX]]);
        assert!(encode_request(&look_up(), &[&large]).is_err());
    }
}
