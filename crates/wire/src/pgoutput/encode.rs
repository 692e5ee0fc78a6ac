//! Builds pgoutput messages as a server would send them: for tests, and for the log's dictionary.
//!
//! Names must not contain zero bytes (PostgreSQL's cannot); a name is cut at the first one. Rows
//! and definitions hold at most 32,767 columns (PostgreSQL's hold 1,600); more are left out.

use super::{Message, Prepared, Value};
use farshore_model::{Lsn, PgTime, Relation, ReplicaIdentity, Xid};

/// The bytes of `message`. Inside a stream block, `xid` is put into the kinds that carry one
/// there ([`Decoded::xid`](super::Decoded::xid)); for other kinds it is ignored.
pub fn message(message: &Message<'_>, xid: Option<Xid>) -> Vec<u8> {
    match message {
        Message::Begin(begin) => {
            start(b'B', None).lsn(begin.final_lsn).time(begin.commit_time).u32(begin.xid).done()
        }
        Message::Commit(commit) => start(b'C', None)
            .byte(0)
            .lsn(commit.commit_lsn)
            .lsn(commit.end_lsn)
            .time(commit.commit_time)
            .done(),
        Message::Origin { lsn, name } => start(b'O', None).lsn(*lsn).string(name).done(),
        Message::Relation(definition) => relation(definition, xid),
        Message::Type { oid, schema, name } => {
            start(b'Y', xid).u32(*oid).string(schema).string(name).done()
        }
        Message::Insert { relation, new } => {
            start(b'I', xid).u32(*relation).byte(b'N').bytes(new.as_bytes()).done()
        }
        Message::Update { relation, old, new } => {
            start(b'U', xid).u32(*relation).old(old).byte(b'N').bytes(new.as_bytes()).done()
        }
        Message::Delete { relation, old } => start(b'D', xid).u32(*relation).old(old).done(),
        Message::Truncate { relations, cascade, restart_identity } => {
            let relations: Vec<u32> = relations.clone().collect();
            truncate(&relations, *cascade, *restart_identity, xid)
        }
        Message::Message { transactional, lsn, prefix, content } => start(b'M', xid)
            .byte(u8::from(*transactional))
            .lsn(*lsn)
            .string(prefix)
            .u32(content.len() as u32)
            .bytes(content)
            .done(),
        Message::StreamStart { xid, first } => {
            start(b'S', None).u32(*xid).byte(u8::from(*first)).done()
        }
        Message::StreamStop => start(b'E', None).done(),
        Message::StreamCommit { xid, commit_lsn, end_lsn, commit_time } => start(b'c', None)
            .u32(*xid)
            .byte(0)
            .lsn(*commit_lsn)
            .lsn(*end_lsn)
            .time(*commit_time)
            .done(),
        Message::StreamAbort { xid, subxid, abort } => {
            let built = start(b'A', None).u32(*xid).u32(*subxid);
            match abort {
                Some((lsn, time)) => built.lsn(*lsn).time(*time).done(),
                None => built.done(),
            }
        }
        Message::BeginPrepare(transaction) => start(b'b', None).prepared(transaction).done(),
        Message::Prepare(transaction) => start(b'P', None).byte(0).prepared(transaction).done(),
        Message::CommitPrepared { commit_lsn, end_lsn, commit_time, xid, gid } => start(b'K', None)
            .byte(0)
            .lsn(*commit_lsn)
            .lsn(*end_lsn)
            .time(*commit_time)
            .u32(*xid)
            .string(gid)
            .done(),
        Message::RollbackPrepared {
            prepare_end_lsn,
            rollback_end_lsn,
            prepare_time,
            rollback_time,
            xid,
            gid,
        } => start(b'r', None)
            .byte(0)
            .lsn(*prepare_end_lsn)
            .lsn(*rollback_end_lsn)
            .time(*prepare_time)
            .time(*rollback_time)
            .u32(*xid)
            .string(gid)
            .done(),
        Message::StreamPrepare(transaction) => {
            start(b'p', None).byte(0).prepared(transaction).done()
        }
    }
}

/// TupleData of these values, for [`Tuple::parse`](super::Tuple::parse).
pub fn tuple(values: &[Value<'_>]) -> Vec<u8> {
    Builder(Vec::new()).tuple(values).done()
}

/// A Relation message.
pub fn relation(relation: &Relation, xid: Option<Xid>) -> Vec<u8> {
    let identity = match relation.identity {
        ReplicaIdentity::Default => b'd',
        ReplicaIdentity::Nothing => b'n',
        ReplicaIdentity::Full => b'f',
        ReplicaIdentity::Index => b'i',
    };
    let columns = &relation.columns[..relation.columns.len().min(COLUMNS_MAX)];
    let mut built = start(b'R', xid)
        .u32(relation.oid)
        .string(&relation.schema)
        .string(&relation.name)
        .byte(identity)
        .bytes(&(columns.len() as u16).to_be_bytes());
    for column in columns {
        built = built
            .byte(u8::from(column.key))
            .string(&column.name)
            .u32(column.type_oid)
            .bytes(&column.type_modifier.to_be_bytes());
    }
    built.done()
}

/// An Insert message.
pub fn insert(relation: u32, new: &[Value<'_>], xid: Option<Xid>) -> Vec<u8> {
    start(b'I', xid).u32(relation).byte(b'N').tuple(new).done()
}

/// What [`update`] and [`delete`] say of the old row.
#[derive(Clone, Copy, Debug)]
pub enum Old<'a> {
    /// Nothing; well-formed in updates only.
    None,
    /// The replica identity's columns, all others NULL.
    Key(&'a [Value<'a>]),
    /// The whole row.
    Full(&'a [Value<'a>]),
}

/// An Update message.
pub fn update(relation: u32, old: Old<'_>, new: &[Value<'_>], xid: Option<Xid>) -> Vec<u8> {
    start(b'U', xid).u32(relation).old_values(old).byte(b'N').tuple(new).done()
}

/// A Delete message.
pub fn delete(relation: u32, old: Old<'_>, xid: Option<Xid>) -> Vec<u8> {
    start(b'D', xid).u32(relation).old_values(old).done()
}

/// A Truncate message.
pub fn truncate(
    relations: &[u32],
    cascade: bool,
    restart_identity: bool,
    xid: Option<Xid>,
) -> Vec<u8> {
    let mut built = start(b'T', xid)
        .u32(relations.len() as u32)
        .byte(u8::from(cascade) | u8::from(restart_identity) << 1);
    for relation in relations {
        built = built.u32(*relation);
    }
    built.done()
}

const COLUMNS_MAX: usize = i16::MAX as usize;

pub(super) struct Builder(pub(super) Vec<u8>);

fn start(tag: u8, xid: Option<Xid>) -> Builder {
    let built = Builder(vec![tag]);
    match xid {
        Some(xid) => built.u32(xid),
        None => built,
    }
}

impl Builder {
    fn bytes(mut self, bytes: &[u8]) -> Builder {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(super) fn byte(self, byte: u8) -> Builder {
        self.bytes(&[byte])
    }

    pub(super) fn u32(self, number: u32) -> Builder {
        self.bytes(&number.to_be_bytes())
    }

    fn lsn(self, lsn: Lsn) -> Builder {
        self.bytes(&lsn.0.to_be_bytes())
    }

    fn time(self, time: PgTime) -> Builder {
        self.bytes(&time.0.to_be_bytes())
    }

    pub(super) fn string(self, text: &str) -> Builder {
        let text = text.split('\0').next().unwrap_or_default();
        self.bytes(text.as_bytes()).byte(0)
    }

    fn tuple(self, values: &[Value<'_>]) -> Builder {
        let values = &values[..values.len().min(COLUMNS_MAX)];
        let count = (values.len() as u16).to_be_bytes();
        values.iter().fold(self.bytes(&count), |built, value| match value {
            Value::Null => built.byte(b'n'),
            Value::Unchanged => built.byte(b'u'),
            Value::Text(bytes) => built.byte(b't').u32(bytes.len() as u32).bytes(bytes),
            Value::Binary(bytes) => built.byte(b'b').u32(bytes.len() as u32).bytes(bytes),
        })
    }

    fn old(self, old: &super::OldTuple<'_>) -> Builder {
        match old {
            super::OldTuple::None => self,
            super::OldTuple::Key(tuple) => self.byte(b'K').bytes(tuple.as_bytes()),
            super::OldTuple::Full(tuple) => self.byte(b'O').bytes(tuple.as_bytes()),
        }
    }

    fn old_values(self, old: Old<'_>) -> Builder {
        match old {
            Old::None => self,
            Old::Key(values) => self.byte(b'K').tuple(values),
            Old::Full(values) => self.byte(b'O').tuple(values),
        }
    }

    fn prepared(self, transaction: &Prepared<'_>) -> Builder {
        self.lsn(transaction.prepare_lsn)
            .lsn(transaction.end_lsn)
            .time(transaction.prepare_time)
            .u32(transaction.xid)
            .string(transaction.gid)
    }

    pub(super) fn done(self) -> Vec<u8> {
        self.0
    }
}
