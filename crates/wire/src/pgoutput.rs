//! The logical replication stream of PostgreSQL's `pgoutput` plugin, protocol versions 1 to 4
//! (PostgreSQL docs: "55.9. Logical Replication Message Formats").
//!
//! [`decode()`] is total: every input gives a [`Message`] or a [`DecodeError`], bytes left over are
//! an error, and so is a message kind that the protocol version or the place in the stream does
//! not allow. What it returns borrows the input; only [`Message::Relation`] allocates.
//!
//! [`stored`] holds the form in which changes are kept in the log, and [`encode`] builds messages.

mod decode;
mod definition;
pub mod encode;
mod error;
mod reader;
pub mod stored;
mod tuple;

pub use decode::decode;
pub use error::{DecodeError, Problem};
pub use tuple::{OldTuple, Tuple, Value, Values};

use farshore_model::{Lsn, PgTime, Relation, Xid};

/// What a message's bytes mean depends on this; the messages themselves do not say it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    /// The `proto_version` that replication was started with, 1 to 4.
    pub protocol: u8,
    /// Between [`Message::StreamStart`] and [`Message::StreamStop`]: changes then carry the id of
    /// their (sub-)transaction. [`Context::follow`] keeps it right.
    pub in_stream: bool,
    /// Replication was started with `streaming = parallel` (protocol 4): [`Message::StreamAbort`]
    /// then carries a position and a time.
    pub parallel_streaming: bool,
}

impl Context {
    /// The start of a replication stream.
    pub fn new(protocol: u8, parallel_streaming: bool) -> Context {
        Context { protocol, in_stream: false, parallel_streaming }
    }

    /// Takes note of a decoded message: enters and leaves stream blocks.
    pub fn follow(&mut self, message: &Message<'_>) {
        if let Message::StreamStart { .. } = message {
            self.in_stream = true;
        } else if let Message::StreamStop = message {
            self.in_stream = false;
        }
    }
}

/// A message and the transaction id that stream blocks put into it.
#[derive(Clone, Debug, PartialEq)]
pub struct Decoded<'a> {
    /// Inside a stream block, the transaction or sub-transaction that a Relation, Type, Insert,
    /// Update, Delete or Truncate belongs to. `None` for other kinds and outside.
    ///
    /// A Message carries the *top-level* transaction's id even when a sub-transaction emitted it
    /// (so do PostgreSQL 15 and 18), so it cannot be told from it whether that rolled back.
    pub xid: Option<Xid>,
    /// The message.
    pub message: Message<'a>,
}

/// One pgoutput message, named as PostgreSQL's documentation names it.
#[derive(Clone, Debug, PartialEq)]
pub enum Message<'a> {
    /// `B`: a transaction that has committed follows.
    Begin(Begin),
    /// `C`: the transaction ends here.
    Commit(Commit),
    /// `O`: the transaction came to the publisher from elsewhere.
    Origin {
        /// Commit position on the origin; zero inside a stream block.
        lsn: Lsn,
        /// Name of the replication origin.
        name: &'a str,
    },
    /// `R`: definition of a relation, before the first change that names it and after each change
    /// of the definition.
    Relation(Relation),
    /// `Y`: name of a type that is not built in.
    Type {
        /// OID on the publisher.
        oid: u32,
        /// Schema name (`pg_catalog` arrives as the empty string).
        schema: &'a str,
        /// Type name.
        name: &'a str,
    },
    /// `I`: a row was inserted.
    Insert {
        /// OID of the relation.
        relation: u32,
        /// The row.
        new: Tuple<'a>,
    },
    /// `U`: a row was updated.
    Update {
        /// OID of the relation.
        relation: u32,
        /// What the old row is known by, if the message says it.
        old: OldTuple<'a>,
        /// The row as it is now.
        new: Tuple<'a>,
    },
    /// `D`: a row was deleted.
    Delete {
        /// OID of the relation.
        relation: u32,
        /// What the old row was known by; never [`OldTuple::None`].
        old: OldTuple<'a>,
    },
    /// `T`: relations were emptied.
    Truncate {
        /// OIDs of the relations.
        relations: Relations<'a>,
        /// `TRUNCATE … CASCADE`.
        cascade: bool,
        /// `TRUNCATE … RESTART IDENTITY`.
        restart_identity: bool,
    },
    /// `M`: a logical decoding message (`pg_logical_emit_message`).
    Message {
        /// Part of the transaction, or sent at once whether or not the transaction commits.
        transactional: bool,
        /// Where in the log the message is.
        lsn: Lsn,
        /// Says whose message it is.
        prefix: &'a str,
        /// Any bytes.
        content: &'a [u8],
    },
    /// `S`: a block of changes of a transaction that has not committed yet follows (protocol 2).
    StreamStart {
        /// Top-level transaction.
        xid: Xid,
        /// This is the transaction's first block.
        first: bool,
    },
    /// `E`: the block ends.
    StreamStop,
    /// `c`: a streamed transaction has committed.
    StreamCommit {
        /// Top-level transaction.
        xid: Xid,
        /// Start of the commit record.
        commit_lsn: Lsn,
        /// End of the commit record.
        end_lsn: Lsn,
        /// The publisher's clock at commit.
        commit_time: PgTime,
    },
    /// `A`: a streamed transaction, or one of its sub-transactions, has rolled back.
    StreamAbort {
        /// Top-level transaction.
        xid: Xid,
        /// What rolled back; equal to `xid` when all of it did.
        subxid: Xid,
        /// Position and time of the abort, with [`Context::parallel_streaming`] only.
        abort: Option<(Lsn, PgTime)>,
    },
    /// `b`: a transaction that has been prepared follows (protocol 3).
    BeginPrepare(Prepared<'a>),
    /// `P`: the prepared transaction ends here (protocol 3).
    Prepare(Prepared<'a>),
    /// `K`: `COMMIT PREPARED` (protocol 3).
    CommitPrepared {
        /// Start of the commit record.
        commit_lsn: Lsn,
        /// End of the commit record.
        end_lsn: Lsn,
        /// The publisher's clock at commit.
        commit_time: PgTime,
        /// Transaction id.
        xid: Xid,
        /// Name that `PREPARE TRANSACTION` gave it.
        gid: &'a str,
    },
    /// `r`: `ROLLBACK PREPARED` (protocol 3).
    RollbackPrepared {
        /// End of the prepare record.
        prepare_end_lsn: Lsn,
        /// End of the rollback record.
        rollback_end_lsn: Lsn,
        /// The publisher's clock at prepare.
        prepare_time: PgTime,
        /// The publisher's clock at rollback.
        rollback_time: PgTime,
        /// Transaction id.
        xid: Xid,
        /// Name that `PREPARE TRANSACTION` gave it.
        gid: &'a str,
    },
    /// `p`: a streamed transaction has been prepared (protocol 3).
    StreamPrepare(Prepared<'a>),
}

/// Content of [`Message::Begin`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begin {
    /// Start of the transaction's commit record.
    pub final_lsn: Lsn,
    /// The publisher's clock at commit.
    pub commit_time: PgTime,
    /// Transaction id.
    pub xid: Xid,
}

/// Content of [`Message::Commit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Commit {
    /// Start of the commit record.
    pub commit_lsn: Lsn,
    /// End of the commit record.
    pub end_lsn: Lsn,
    /// The publisher's clock at commit.
    pub commit_time: PgTime,
}

/// Content of [`Message::BeginPrepare`], [`Message::Prepare`] and [`Message::StreamPrepare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepared<'a> {
    /// Start of the prepare record.
    pub prepare_lsn: Lsn,
    /// End of the prepare record.
    pub end_lsn: Lsn,
    /// The publisher's clock at prepare.
    pub prepare_time: PgTime,
    /// Transaction id.
    pub xid: Xid,
    /// Name that `PREPARE TRANSACTION` gave it.
    pub gid: &'a str,
}

/// The relation numbers of a Truncate, borrowed from the message.
#[derive(Clone, Debug)]
pub struct Relations<'a> {
    numbers: &'a [[u8; 4]],
}

impl<'a> Relations<'a> {
    /// From big-endian numbers, as the message holds them.
    pub fn new(numbers: &'a [[u8; 4]]) -> Relations<'a> {
        Relations { numbers }
    }
}

impl Iterator for Relations<'_> {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        let (number, rest) = self.numbers.split_first()?;
        self.numbers = rest;
        Some(u32::from_be_bytes(*number))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.numbers.len(), Some(self.numbers.len()))
    }
}

impl ExactSizeIterator for Relations<'_> {}
impl std::iter::FusedIterator for Relations<'_> {}

impl PartialEq for Relations<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.numbers == other.numbers
    }
}

impl Eq for Relations<'_> {}
