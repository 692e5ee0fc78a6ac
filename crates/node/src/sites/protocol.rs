//! What sites say to each other. Requests and the first answer are JSON, so that a version can add
//! to them; a log's messages are a tag and bytes.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use farshore_mirror::relay::end::EndRequest;
use farshore_mirror::relay::message::MirrorRequest;
use farshore_mirror::seed::{BackupRequest, SeedRequest};
use farshore_model::Lsn;
use farshore_store::{SpillId, StoredBlock};
use serde::{Deserialize, Serialize};

/// What a session is opened for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Wanted {
    /// A publication's log.
    Log {
        /// Its name at the upstream site.
        publication: String,
        /// What is there already; without it the downstream site has nothing of it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        have: Option<Have>,
        /// The downstream site can take blocks in packs.
        #[serde(default)]
        packs: bool,
        /// The downstream site can hear [`FromUpstream::Trouble`].
        #[serde(default)]
        hears_trouble: bool,
        /// Spills that are there without the block that names them.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        spills: Vec<HeldSpill>,
        /// The downstream site can be told which block names a spill.
        #[serde(default)]
        hears_naming: bool,
        /// The downstream site can be told how many bytes a spill has, beside that.
        #[serde(default)]
        hears_bytes: bool,
        /// Tells this start of the downstream site's node from every other.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        start: Option<u64>,
    },
    /// To ask the publisher something: an initial copy, a table's definition.
    Source {
        /// Name of the publication at the upstream site.
        publication: String,
    },
    /// A mirror's log. What follows is `farshore_mirror`'s.
    Mirror(MirrorRequest),
    /// To ask how much log a mirror's principal has.
    MirrorEnd(AskEnd),
    /// To measure the line. What follows is [`super::measure`]'s.
    Measure {},
    /// The files of a mirror's principal. What follows is `farshore_mirror`'s.
    Seed(SeedRequest),
    /// A base backup of a mirror's principal. What follows is `farshore_mirror`'s.
    Backup(BackupRequest),
}

/// What a mirror's far end asks its near end beside the log's session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AskEnd {
    /// Of which mirror.
    #[serde(flatten)]
    pub request: EndRequest,
    /// The far end's standby was promoted, or is about to be: nothing more is taken in there. A near
    /// end that knows nothing of this answers all the same.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub closed: bool,
    /// A standby is being promoted: where the near end streams from a spool of its own node, that one
    /// is to take nothing in for a while (`true`), or may again (`false`). With `closed`, never again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<bool>,
}

impl AskEnd {
    /// Asks, and tells nothing.
    pub fn of(mirror: &str) -> AskEnd {
        AskEnd { request: EndRequest { mirror: mirror.to_owned() }, closed: false, hold: None }
    }
}

/// A spill that has come to a downstream site, or the beginning of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HeldSpill {
    /// Which.
    pub id: u64,
    /// How many blocks of it; `None` if that is all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<u64>,
    /// The block that names it, if the upstream site said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub naming: Option<Naming>,
}

/// Tells the block that names a spill from every other. The spill's number does not do: a store that
/// was set back with its whole machine gives the same numbers once more, to other transactions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Naming {
    /// Position of its last entry.
    #[serde(with = "as_text")]
    pub last: Lsn,
    /// Smallest and largest commit time of its entries, microseconds since 2000.
    pub commit_times: (i64, i64),
}

impl Naming {
    pub fn by(block: &StoredBlock) -> Naming {
        let (from, to) = block.commit_times;
        Naming { last: block.last, commit_times: (from.0, to.0) }
    }

    const LEN: usize = 24;

    fn put(&self, out: &mut BytesMut) {
        out.put_u64_le(self.last.0);
        out.put_i64_le(self.commit_times.0);
        out.put_i64_le(self.commit_times.1);
    }

    fn get(bytes: &mut Bytes) -> Naming {
        let last = Lsn(bytes.get_u64_le());
        Naming { last, commit_times: (bytes.get_i64_le(), bytes.get_i64_le()) }
    }
}

/// How much of a log a downstream site has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Have {
    /// Which log.
    pub log_id: u64,
    /// Up to where it is durable there.
    #[serde(with = "as_text")]
    pub durable: Lsn,
    /// The newest transaction there, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub newest: Option<Newest>,
}

/// The newest transaction of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Newest {
    /// End of its commit record.
    #[serde(with = "as_text")]
    pub position: Lsn,
    /// The publisher's clock at its commit, microseconds since 2000.
    pub commit_time: i64,
}

/// The upstream site's first message about a log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// Blocks follow.
    Follows {
        /// Which log it is.
        log_id: u64,
        /// What follows begins after this position.
        #[serde(with = "as_text")]
        after: Lsn,
        /// The publisher's system identifier.
        publisher: String,
    },
    /// It cannot be had.
    Refused {
        /// Why, for a person.
        why: String,
        /// It may end by itself.
        passes: bool,
    },
}

/// A message of the upstream site, after its answer.
#[derive(Debug)]
pub(crate) enum FromUpstream {
    /// The log's next block.
    Block(StoredBlock),
    /// The log's next blocks, in one pack ([`farshore_store::packs`]).
    Packed(Bytes),
    /// A spill that the next block names begins.
    SpillBegins {
        /// Which.
        id: SpillId,
        /// Which block that is, for who can hear it.
        naming: Option<Naming>,
        /// Bytes that it takes on the upstream site's disk, for who can hear it too.
        bytes: Option<u64>,
    },
    /// A spill goes on behind what the downstream site has said that it has.
    SpillGoesOn(SpillId),
    /// A block of that spill.
    SpillBlock(StoredBlock),
    /// Blocks of that spill, in one pack.
    SpillPacked(Bytes),
    /// That was the spill's last.
    SpillEnds,
    /// Tables may have joined the publication, or its capture has started.
    Ready,
    /// Why the log here gets nothing more, for a person; empty when it does again.
    Trouble(String),
}

/// A message of the downstream site.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FromDownstream {
    /// The log is durable there up to here.
    Durable(Lsn),
}

/// Positions as PostgreSQL writes them.
mod as_text {
    use farshore_model::Lsn;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(position: &Lsn, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(position)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Lsn, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

const TAG_BLOCK: u8 = b'B';
const TAG_PACKED: u8 = b'P';
const TAG_SPILL_BEGINS: u8 = b'S';
const TAG_SPILL_GOES_ON: u8 = b'G';
const TAG_SPILL_BLOCK: u8 = b'C';
const TAG_SPILL_PACKED: u8 = b'Q';
const TAG_SPILL_ENDS: u8 = b'E';
const TAG_READY: u8 = b'R';
const TAG_TROUBLE: u8 = b'T';
const TAG_DURABLE: u8 = b'D';

/// Bytes behind the tag: the number alone, with what names it, with that and its size.
const SPILL_BEGINS_LENS: [usize; 3] = [8, 8 + Naming::LEN, 8 + Naming::LEN + 8];

impl FromUpstream {
    /// The message in parts, one after the other, so that payloads are not copied.
    pub fn encode(&self) -> Vec<Bytes> {
        let tag = |tag: u8, rest: &[u8]| {
            let mut out = BytesMut::with_capacity(1 + rest.len());
            out.put_u8(tag);
            out.put_slice(rest);
            out.freeze()
        };
        match self {
            FromUpstream::Block(block) => {
                vec![tag(TAG_BLOCK, &block.encode_head()), block.payload.clone()]
            }
            FromUpstream::SpillBlock(block) => {
                vec![tag(TAG_SPILL_BLOCK, &block.encode_head()), block.payload.clone()]
            }
            FromUpstream::Packed(pack) => vec![tag(TAG_PACKED, &[]), pack.clone()],
            FromUpstream::SpillPacked(pack) => vec![tag(TAG_SPILL_PACKED, &[]), pack.clone()],
            FromUpstream::SpillBegins { id, naming, bytes } => {
                let mut rest = BytesMut::with_capacity(8 + Naming::LEN + 8);
                rest.put_u64_le(id.0);
                if let Some(naming) = naming {
                    naming.put(&mut rest);
                    if let Some(bytes) = bytes {
                        rest.put_u64_le(*bytes);
                    }
                }
                vec![tag(TAG_SPILL_BEGINS, &rest)]
            }
            FromUpstream::SpillGoesOn(spill) => {
                vec![tag(TAG_SPILL_GOES_ON, &spill.0.to_le_bytes())]
            }
            FromUpstream::SpillEnds => vec![tag(TAG_SPILL_ENDS, &[])],
            FromUpstream::Ready => vec![tag(TAG_READY, &[])],
            FromUpstream::Trouble(why) => vec![tag(TAG_TROUBLE, why.as_bytes())],
        }
    }

    /// Reads a message.
    ///
    /// # Errors
    /// What is wrong with bytes that are none.
    pub fn decode(mut bytes: Bytes) -> Result<FromUpstream, &'static str> {
        if bytes.is_empty() {
            return Err("an empty message");
        }
        match bytes.get_u8() {
            TAG_BLOCK => StoredBlock::decode(bytes).map(FromUpstream::Block),
            TAG_SPILL_BLOCK => StoredBlock::decode(bytes).map(FromUpstream::SpillBlock),
            TAG_PACKED => Ok(FromUpstream::Packed(bytes)),
            TAG_SPILL_PACKED => Ok(FromUpstream::SpillPacked(bytes)),
            TAG_SPILL_BEGINS if SPILL_BEGINS_LENS.contains(&bytes.len()) => {
                let id = SpillId(bytes.get_u64_le());
                let naming = (bytes.len() >= Naming::LEN).then(|| Naming::get(&mut bytes));
                let bytes = (!bytes.is_empty()).then(|| bytes.get_u64_le());
                Ok(FromUpstream::SpillBegins { id, naming, bytes })
            }
            TAG_SPILL_GOES_ON if bytes.len() == 8 => {
                Ok(FromUpstream::SpillGoesOn(SpillId(bytes.get_u64_le())))
            }
            TAG_SPILL_ENDS if bytes.is_empty() => Ok(FromUpstream::SpillEnds),
            TAG_READY if bytes.is_empty() => Ok(FromUpstream::Ready),
            TAG_TROUBLE => {
                let why = String::from_utf8(bytes.into()).map_err(|_| "trouble that is no text")?;
                Ok(FromUpstream::Trouble(why))
            }
            _ => Err("a message of an unknown kind"),
        }
    }
}

impl FromDownstream {
    /// The message.
    pub fn encode(&self) -> Bytes {
        let FromDownstream::Durable(position) = self;
        let mut out = BytesMut::with_capacity(9);
        out.put_u8(TAG_DURABLE);
        out.put_u64_le(position.0);
        out.freeze()
    }

    /// Reads a message.
    ///
    /// # Errors
    /// What is wrong with bytes that are none.
    pub fn decode(mut bytes: Bytes) -> Result<FromDownstream, &'static str> {
        if bytes.len() != 9 || bytes.get_u8() != TAG_DURABLE {
            return Err("a message of an unknown kind");
        }
        Ok(FromDownstream::Durable(Lsn(bytes.get_u64_le())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip_and_no_cut_passes() {
        for message in [
            FromUpstream::SpillBegins { id: SpillId(7), naming: None, bytes: None },
            FromUpstream::SpillGoesOn(SpillId(8)),
            FromUpstream::SpillEnds,
            FromUpstream::Ready,
        ] {
            let bytes = message.encode().concat();
            let again = FromUpstream::decode(Bytes::from(bytes.clone())).unwrap();
            assert_eq!(again.encode().concat(), bytes);
            for len in 0..bytes.len() {
                assert!(FromUpstream::decode(Bytes::from(bytes[..len].to_vec())).is_err());
            }
        }
        let naming = Naming { last: Lsn(9), commit_times: (i64::MIN, 3) };
        for bytes in [None, Some(u64::MAX)] {
            let begins = FromUpstream::SpillBegins { id: SpillId(7), naming: Some(naming), bytes };
            let begins = begins.encode().concat();
            let FromUpstream::SpillBegins { id: SpillId(7), naming: Some(again), bytes: told } =
                FromUpstream::decode(Bytes::from(begins.clone())).unwrap()
            else {
                panic!("another message")
            };
            assert_eq!((again, told), (naming, bytes));
            for len in 0..begins.len() {
                let is_one = SPILL_BEGINS_LENS.contains(&len.wrapping_sub(1));
                let cut = Bytes::from(begins[..len].to_vec());
                assert_eq!(FromUpstream::decode(cut).is_ok(), is_one, "{len}");
            }
        }
        let durable = FromDownstream::Durable(Lsn(5));
        assert_eq!(FromDownstream::decode(durable.encode()), Ok(durable));
        for len in 0..9 {
            assert!(FromDownstream::decode(Bytes::from(vec![TAG_DURABLE; len])).is_err());
        }
        assert!(FromUpstream::decode(Bytes::from_static(b"Xyz")).is_err());
        for why in ["", "publisher \"p\": away"] {
            let bytes = FromUpstream::Trouble(why.to_owned()).encode().concat();
            let again = FromUpstream::decode(Bytes::from(bytes.clone())).unwrap();
            assert_eq!(again.encode().concat(), bytes);
        }
        assert!(FromUpstream::decode(Bytes::from_static(b"T\xff")).is_err());
    }

    #[test]
    fn requests_are_read_as_they_were_written() {
        let newest = Some(Newest { position: Lsn(2), commit_time: i64::MAX });
        let have = Some(Have { log_id: u64::MAX, durable: Lsn(3), newest });
        for wanted in [
            Wanted::Log {
                publication: "sales".into(),
                have,
                packs: true,
                hears_trouble: true,
                spills: Vec::new(),
                hears_naming: false,
                hears_bytes: false,
                start: None,
            },
            Wanted::Log {
                publication: "sales".into(),
                have: None,
                packs: false,
                hears_trouble: false,
                spills: vec![
                    HeldSpill { id: 7, blocks: None, naming: None },
                    HeldSpill {
                        id: 8,
                        blocks: Some(3),
                        naming: Some(Naming { last: Lsn(9), commit_times: (1, 2) }),
                    },
                ],
                hears_naming: true,
                hears_bytes: true,
                start: Some(u64::MAX),
            },
            Wanted::Source { publication: "tukwila/sales".into() },
            Wanted::Mirror(MirrorRequest {
                mirror: "dr".into(),
                have: None,
                restores: true,
                restores_pages: true,
            }),
            Wanted::MirrorEnd(AskEnd::of("dr")),
            Wanted::MirrorEnd(AskEnd { closed: true, ..AskEnd::of("dr") }),
            Wanted::MirrorEnd(AskEnd { hold: Some(false), ..AskEnd::of("dr") }),
            Wanted::Measure {},
        ] {
            let text = serde_json::to_string(&wanted).unwrap();
            assert_eq!(serde_json::from_str::<Wanted>(&text).unwrap(), wanted, "{text}");
        }
    }

    /// Versions before know no `closed`.
    #[test]
    fn what_is_asked_of_a_mirrors_end_is_as_it_was() {
        let text = serde_json::to_string(&Wanted::MirrorEnd(AskEnd::of("dr"))).unwrap();
        assert_eq!(text, r#"{"mirror_end":{"mirror":"dr"}}"#);
        let text = r#"{"mirror":"dr","closed":true}"#;
        assert_eq!(serde_json::from_str::<EndRequest>(text).unwrap().mirror, "dr");
    }
}
