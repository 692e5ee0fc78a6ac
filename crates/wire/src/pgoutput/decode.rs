use super::reader::Reader;
use super::{
    Begin, Commit, Context, DecodeError, Decoded, Message, OldTuple, Prepared, Problem, Relations,
    Tuple,
};
use farshore_model::{Column, Lsn, Relation, ReplicaIdentity};

/// Decodes one message, all of `data`.
///
/// # Errors
/// Whatever is not a well-formed message of a kind that `context` allows.
pub fn decode<'a>(data: &'a [u8], context: &Context) -> Result<Decoded<'a>, DecodeError> {
    let (tag, mut reader) = Reader::new(data)?;
    check_place(tag, &reader, context)?;
    let xid = match tag {
        b'R' | b'Y' | b'I' | b'U' | b'D' | b'T' | b'M' => streamed_xid(&mut reader, context)?,
        _ => None,
    };
    let r = &mut reader;
    let message = match tag {
        b'B' => Message::Begin(Begin {
            final_lsn: r.lsn("the position of the commit")?,
            commit_time: r.time("the time of the commit")?,
            xid: r.u32(XID)?,
        }),
        b'C' => {
            r.no_flags()?;
            Message::Commit(Commit {
                commit_lsn: r.lsn("the position of the commit")?,
                end_lsn: r.lsn("the end of the commit record")?,
                commit_time: r.time("the time of the commit")?,
            })
        }
        b'O' => Message::Origin {
            lsn: r.lsn("the position on the origin")?,
            name: r.string("the name of the origin")?,
        },
        b'R' => Message::Relation(relation(r)?),
        b'Y' => Message::Type {
            oid: r.u32("the OID of a type")?,
            schema: r.string("the schema of a type")?,
            name: r.string("the name of a type")?,
        },
        b'I' => Message::Insert { relation: r.u32(RELATION_OID)?, new: insert_rows(r)? },
        b'U' => {
            let relation = r.u32(RELATION_OID)?;
            let (old, new) = update_rows(r)?;
            Message::Update { relation, old, new }
        }
        b'D' => Message::Delete { relation: r.u32(RELATION_OID)?, old: delete_rows(r)? },
        b'T' => {
            let Truncate { relations, cascade, restart_identity } = truncate(r)?;
            Message::Truncate { relations, cascade, restart_identity }
        }
        b'M' => {
            let LogicalMessage { transactional, lsn, prefix, content } = logical_message(r)?;
            Message::Message { transactional, lsn, prefix, content }
        }
        b'S' => Message::StreamStart {
            xid: r.u32(XID)?,
            first: r.flag("a first-block flag of 0 or 1")?,
        },
        b'E' => Message::StreamStop,
        b'c' => {
            let xid = r.u32(XID)?;
            r.no_flags()?;
            Message::StreamCommit {
                xid,
                commit_lsn: r.lsn("the position of the commit")?,
                end_lsn: r.lsn("the end of the commit record")?,
                commit_time: r.time("the time of the commit")?,
            }
        }
        b'A' => Message::StreamAbort {
            xid: r.u32(XID)?,
            subxid: r.u32("the id of a sub-transaction")?,
            abort: if context.protocol >= 4 && context.parallel_streaming {
                Some((r.lsn("the position of the abort")?, r.time("the time of the abort")?))
            } else {
                None
            },
        },
        b'b' => Message::BeginPrepare(prepared(r)?),
        b'P' => {
            r.no_flags()?;
            Message::Prepare(prepared(r)?)
        }
        b'K' => {
            r.no_flags()?;
            Message::CommitPrepared {
                commit_lsn: r.lsn("the position of the commit")?,
                end_lsn: r.lsn("the end of the commit record")?,
                commit_time: r.time("the time of the commit")?,
                xid: r.u32(XID)?,
                gid: r.string(GID)?,
            }
        }
        b'r' => {
            r.no_flags()?;
            Message::RollbackPrepared {
                prepare_end_lsn: r.lsn("the end of the prepare record")?,
                rollback_end_lsn: r.lsn("the end of the rollback record")?,
                prepare_time: r.time("the time of the prepare")?,
                rollback_time: r.time("the time of the rollback")?,
                xid: r.u32(XID)?,
                gid: r.string(GID)?,
            }
        }
        b'p' => {
            r.no_flags()?;
            Message::StreamPrepare(prepared(r)?)
        }
        _ => return Err(reader.error_at(0, Problem::UnknownTag)),
    };
    reader.end()?;
    Ok(Decoded { xid, message })
}

const XID: &str = "a transaction id";
const GID: &str = "the name of a prepared transaction";
pub(super) const RELATION_OID: &str = "the number of a relation";

/// Refuses kinds that do not exist, or not in this protocol version, or not at this place.
#[inline]
pub(super) fn check_place(
    tag: u8,
    reader: &Reader<'_>,
    context: &Context,
) -> Result<(), DecodeError> {
    let (needed, inside, outside) = match tag {
        b'R' | b'Y' | b'I' | b'U' | b'D' | b'T' | b'M' | b'O' => (1, true, true),
        b'B' | b'C' => (1, false, true),
        b'E' => (2, true, false),
        b'S' | b'c' | b'A' => (2, false, true),
        b'b' | b'P' | b'K' | b'r' | b'p' => (3, false, true),
        _ => return Err(reader.error_at(0, Problem::UnknownTag)),
    };
    let Context { protocol, in_stream, parallel_streaming: _ } = *context;
    let problem = if !(1..=4).contains(&protocol) {
        Problem::UnknownProtocol(protocol)
    } else if protocol < needed {
        Problem::NotInProtocol { needed, protocol }
    } else if in_stream && !inside {
        Problem::InsideStream
    } else if !in_stream && !outside {
        Problem::OutsideStream
    } else {
        return Ok(());
    };
    Err(reader.error_at(0, problem))
}

/// The transaction id that changes carry inside a stream block.
#[inline]
pub(super) fn streamed_xid(
    r: &mut Reader<'_>,
    context: &Context,
) -> Result<Option<u32>, DecodeError> {
    if context.in_stream { r.u32(XID).map(Some) } else { Ok(None) }
}

#[inline]
pub(super) fn insert_rows<'a>(r: &mut Reader<'a>) -> Result<Tuple<'a>, DecodeError> {
    const WHAT: &str = "'N' before the new row";
    match r.u8(WHAT)? {
        b'N' => r.tuple(),
        found => Err(r.error_at(r.offset() - 1, Problem::Unexpected { what: WHAT, found })),
    }
}

#[inline]
pub(super) fn update_rows<'a>(
    r: &mut Reader<'a>,
) -> Result<(OldTuple<'a>, Tuple<'a>), DecodeError> {
    const WHAT: &str = "'K', 'O' or 'N' before a row";
    let old = match r.u8(WHAT)? {
        b'N' => return Ok((OldTuple::None, r.tuple()?)),
        b'K' => OldTuple::Key(r.tuple()?),
        b'O' => OldTuple::Full(r.tuple()?),
        found => {
            return Err(r.error_at(r.offset() - 1, Problem::Unexpected { what: WHAT, found }));
        }
    };
    Ok((old, insert_rows(r)?))
}

#[inline]
pub(super) fn delete_rows<'a>(r: &mut Reader<'a>) -> Result<OldTuple<'a>, DecodeError> {
    const WHAT: &str = "'K' or 'O' before the old row";
    match r.u8(WHAT)? {
        b'K' => Ok(OldTuple::Key(r.tuple()?)),
        b'O' => Ok(OldTuple::Full(r.tuple()?)),
        found => Err(r.error_at(r.offset() - 1, Problem::Unexpected { what: WHAT, found })),
    }
}

pub(super) struct Truncate<'a> {
    pub(super) relations: Relations<'a>,
    pub(super) cascade: bool,
    pub(super) restart_identity: bool,
}

pub(super) fn truncate<'a>(r: &mut Reader<'a>) -> Result<Truncate<'a>, DecodeError> {
    const WHAT: &str = "truncate options of 0 to 3";
    let count = r.count32("the number of relations, at least 0")?;
    let options = r.u8(WHAT)?;
    if options > 3 {
        let problem = Problem::Unexpected { what: WHAT, found: options };
        return Err(r.error_at(r.offset() - 1, problem));
    }
    Ok(Truncate {
        relations: r.relations(count)?,
        cascade: options & 1 != 0,
        restart_identity: options & 2 != 0,
    })
}

pub(super) struct LogicalMessage<'a> {
    pub(super) transactional: bool,
    pub(super) lsn: Lsn,
    pub(super) prefix: &'a str,
    pub(super) content: &'a [u8],
}

pub(super) fn logical_message<'a>(r: &mut Reader<'a>) -> Result<LogicalMessage<'a>, DecodeError> {
    Ok(LogicalMessage {
        transactional: r.flag("a transactional flag of 0 or 1")?,
        lsn: r.lsn("the position of the message")?,
        prefix: r.string("the prefix of the message")?,
        content: {
            let len = r.count32("the length of the content, at least 0")?;
            r.bytes(len, "the content of the message")?
        },
    })
}

fn prepared<'a>(r: &mut Reader<'a>) -> Result<Prepared<'a>, DecodeError> {
    Ok(Prepared {
        prepare_lsn: r.lsn("the position of the prepare")?,
        end_lsn: r.lsn("the end of the prepare record")?,
        prepare_time: r.time("the time of the prepare")?,
        xid: r.u32(XID)?,
        gid: r.string(GID)?,
    })
}

/// The Relation message behind its tag.
pub(super) fn relation(r: &mut Reader<'_>) -> Result<Relation, DecodeError> {
    const IDENTITY: &str = "a replica identity of 'd', 'n', 'f' or 'i'";
    let oid = r.u32("the OID of a relation")?;
    let schema = r.string("the schema of a relation")?.to_owned();
    let name = r.string("the name of a relation")?.to_owned();
    let identity = match r.u8(IDENTITY)? {
        b'd' => ReplicaIdentity::Default,
        b'n' => ReplicaIdentity::Nothing,
        b'f' => ReplicaIdentity::Full,
        b'i' => ReplicaIdentity::Index,
        found => {
            return Err(r.error_at(r.offset() - 1, Problem::Unexpected { what: IDENTITY, found }));
        }
    };
    let count = r.count16("the number of columns, at least 0")?;
    // A column takes 10 bytes at least, so a false count cannot reserve more than the data's size.
    let mut columns = Vec::with_capacity(count.min(r.rest().len() / 10));
    for _ in 0..count {
        columns.push(Column {
            key: r.flag("a column flag of 0 or 1")?,
            name: r.string("the name of a column")?.to_owned(),
            type_oid: r.u32("the type of a column")?,
            type_modifier: r.i32("the type modifier of a column")?,
        });
    }
    Ok(Relation { oid, schema, name, identity, columns, types: Vec::new() })
}
