//! Changes as the log stores them.
//!
//! A stored command is the protocol-1 form of an Insert, Update, Delete, Truncate or Message whose
//! relation numbers are [`DictionaryId`]s, or a mark that says which sub-transaction the commands
//! after it belong to (see [`farshore_model::transaction`]). Definitions in the log's dictionary:
//! [`encode_definition`].

use super::decode::{
    LogicalMessage, RELATION_OID, Truncate, check_place, delete_rows, insert_rows, logical_message,
    streamed_xid, truncate, update_rows,
};
pub use super::definition::{decode_definition, encode_definition};
use super::reader::Reader;
use super::{Context, DecodeError, OldTuple, Problem, Relations, Tuple};
use farshore_model::transaction::SUBTRANSACTION_MARK;
use farshore_model::{DictionaryId, Lsn, Xid};

/// A stored command.
#[derive(Clone, Debug, PartialEq)]
pub enum Stored<'a> {
    /// A row was inserted.
    Insert {
        /// The relation's definition.
        relation: DictionaryId,
        /// The row.
        new: Tuple<'a>,
    },
    /// A row was updated.
    Update {
        /// The relation's definition.
        relation: DictionaryId,
        /// What the old row is known by, if the message said it.
        old: OldTuple<'a>,
        /// The row as it is now.
        new: Tuple<'a>,
    },
    /// A row was deleted.
    Delete {
        /// The relation's definition.
        relation: DictionaryId,
        /// What the old row was known by; never [`OldTuple::None`].
        old: OldTuple<'a>,
    },
    /// Relations were emptied.
    Truncate {
        /// The relations' definitions.
        relations: DictionaryIds<'a>,
        /// `TRUNCATE … CASCADE`.
        cascade: bool,
        /// `TRUNCATE … RESTART IDENTITY`.
        restart_identity: bool,
    },
    /// A logical decoding message.
    Message {
        /// Part of the transaction.
        transactional: bool,
        /// Where in the publisher's log the message is.
        lsn: Lsn,
        /// Says whose message it is.
        prefix: &'a str,
        /// Any bytes.
        content: &'a [u8],
    },
    /// The commands after this one belong to this transaction or sub-transaction.
    SubtransactionMark(Xid),
}

/// The relations of a stored Truncate, borrowed from the command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DictionaryIds<'a>(Relations<'a>);

impl Iterator for DictionaryIds<'_> {
    type Item = DictionaryId;

    fn next(&mut self) -> Option<DictionaryId> {
        self.0.next().map(DictionaryId)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl ExactSizeIterator for DictionaryIds<'_> {}
impl std::iter::FusedIterator for DictionaryIds<'_> {}

/// The kinds of message that the log stores as commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CommandKind {
    /// `I`
    Insert,
    /// `U`
    Update,
    /// `D`
    Delete,
    /// `T`
    Truncate,
    /// `M`
    Message,
}

impl CommandKind {
    /// What kind of command a server's message becomes; `None` for all that are not stored so.
    #[inline]
    pub fn of(data: &[u8]) -> Option<CommandKind> {
        match data.first()? {
            b'I' => Some(CommandKind::Insert),
            b'U' => Some(CommandKind::Update),
            b'D' => Some(CommandKind::Delete),
            b'T' => Some(CommandKind::Truncate),
            b'M' => Some(CommandKind::Message),
            _ => None,
        }
    }
}

/// What [`rewrite_to_stored`] has appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rewritten {
    /// Inside a stream block, the transaction or sub-transaction that the change belongs to.
    pub subxid: Option<Xid>,
    /// Kind of the command.
    pub kind: CommandKind,
}

/// Decodes one stored command, all of `command` (without its length).
///
/// # Errors
/// Whatever is not a well-formed command.
pub fn decode_stored(command: &[u8]) -> Result<Stored<'_>, DecodeError> {
    let (tag, mut reader) = Reader::new(command)?;
    let r = &mut reader;
    let stored = match tag {
        b'I' => Stored::Insert { relation: dictionary_id(r)?, new: insert_rows(r)? },
        b'U' => {
            let relation = dictionary_id(r)?;
            let (old, new) = update_rows(r)?;
            Stored::Update { relation, old, new }
        }
        b'D' => Stored::Delete { relation: dictionary_id(r)?, old: delete_rows(r)? },
        b'T' => {
            let Truncate { relations, cascade, restart_identity } = truncate(r)?;
            Stored::Truncate { relations: DictionaryIds(relations), cascade, restart_identity }
        }
        b'M' => {
            let LogicalMessage { transactional, lsn, prefix, content } = logical_message(r)?;
            Stored::Message { transactional, lsn, prefix, content }
        }
        SUBTRANSACTION_MARK => Stored::SubtransactionMark(r.u32("a sub-transaction id")?),
        _ => return Err(reader.error_at(0, Problem::NotCommand)),
    };
    reader.end()?;
    Ok(stored)
}

#[inline]
fn dictionary_id(r: &mut Reader<'_>) -> Result<DictionaryId, DecodeError> {
    r.u32(RELATION_OID).map(DictionaryId)
}

/// The definition that a stored row change refers to; nothing for other commands. Reads no further.
pub fn changed_relation(command: &[u8]) -> Option<DictionaryId> {
    let ([b'I' | b'U' | b'D'], rest) = command.split_at_checked(1)? else { return None };
    Some(DictionaryId(u32::from_be_bytes(*rest.first_chunk()?)))
}

/// Calls `visit` with each relation OID that a server's message changes: one for Insert, Update and
/// Delete, any number for Truncate, none for all other kinds. Reads no further than it must.
///
/// # Errors
/// A kind that `context` does not allow, or a message that ends before its relations do.
pub fn for_each_relation(
    data: &[u8],
    context: &Context,
    mut visit: impl FnMut(u32),
) -> Result<(), DecodeError> {
    let (tag, mut reader) = Reader::new(data)?;
    check_place(tag, &reader, context)?;
    match CommandKind::of(data) {
        Some(CommandKind::Insert | CommandKind::Update | CommandKind::Delete) => {
            streamed_xid(&mut reader, context)?;
            visit(reader.u32(RELATION_OID)?);
        }
        Some(CommandKind::Truncate) => {
            streamed_xid(&mut reader, context)?;
            truncate(&mut reader)?.relations.for_each(visit);
        }
        Some(CommandKind::Message) | None => {}
    }
    Ok(())
}

/// Appends a server's change to `out` as one framed stored command (a little-endian `u32` length
/// and then the command), without the transaction id of a stream block and with `lookup` applied
/// to its relation OIDs. The whole message is validated; nothing is allocated but room in `out`.
///
/// # Errors
/// A message that is malformed or not allowed by `context`, a kind that is not stored
/// ([`CommandKind::of`] says which are), or an OID that `lookup` does not know. `out` is then as
/// it was.
#[inline]
pub fn rewrite_to_stored(
    data: &[u8],
    context: &Context,
    out: &mut Vec<u8>,
    mut lookup: impl FnMut(u32) -> Option<DictionaryId>,
) -> Result<Rewritten, DecodeError> {
    let (tag, mut reader) = Reader::new(data)?;
    check_place(tag, &reader, context)?;
    let Some(kind) = CommandKind::of(data) else {
        return Err(reader.error_at(0, Problem::NotCommand));
    };
    let r = &mut reader;
    let subxid = streamed_xid(r, context)?;
    let body_at = r.offset();
    let body = r.rest();
    match kind {
        CommandKind::Insert | CommandKind::Update | CommandKind::Delete => {
            let oid = r.u32(RELATION_OID)?;
            let rows = r.rest();
            if kind == CommandKind::Insert {
                insert_rows(r)?;
            } else if kind == CommandKind::Update {
                update_rows(r)?;
            } else {
                delete_rows(r)?;
            }
            r.end()?;
            let Some(id) = lookup(oid) else {
                return Err(r.error_at(body_at, Problem::UnknownRelation { oid }));
            };
            let len = command_len(r, 1 + body.len())?;
            let mut head = [0; 9];
            head[..4].copy_from_slice(&len.to_le_bytes());
            head[4] = tag;
            head[5..].copy_from_slice(&id.0.to_be_bytes());
            out.reserve(head.len() + rows.len());
            out.extend_from_slice(&head);
            out.extend_from_slice(rows);
        }
        CommandKind::Truncate => {
            let relations = truncate(r)?.relations;
            r.end()?;
            let len = command_len(r, 1 + body.len())?;
            let start = out.len();
            out.extend_from_slice(&len.to_le_bytes());
            out.push(tag);
            // The count and the options stay as they are.
            let head_len = body.len() - 4 * relations.len();
            out.extend_from_slice(&body[..head_len]);
            for (nth, oid) in relations.enumerate() {
                let Some(id) = lookup(oid) else {
                    out.truncate(start);
                    let offset = body_at + head_len + 4 * nth;
                    return Err(r.error_at(offset, Problem::UnknownRelation { oid }));
                };
                out.extend_from_slice(&id.0.to_be_bytes());
            }
        }
        CommandKind::Message => {
            logical_message(r)?;
            r.end()?;
            let len = command_len(r, 1 + body.len())?;
            out.reserve(4 + 1 + body.len());
            out.extend_from_slice(&len.to_le_bytes());
            out.push(tag);
            out.extend_from_slice(body);
        }
    }
    Ok(Rewritten { subxid, kind })
}

#[inline]
fn command_len(r: &Reader<'_>, len: usize) -> Result<u32, DecodeError> {
    u32::try_from(len).map_err(|_| r.error_at(0, Problem::TooLong { len }))
}

/// Appends a framed mark: the commands after it belong to `xid`.
pub fn push_subtransaction_mark(out: &mut Vec<u8>, xid: Xid) {
    let mut mark = [SUBTRANSACTION_MARK; 5];
    mark[1..].copy_from_slice(&xid.to_be_bytes());
    farshore_model::transaction::push_command(out, &mark);
}
