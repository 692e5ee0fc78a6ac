use std::fmt;

/// Why bytes are not the message that they should be. The stream cannot be read past it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("pgoutput {}, byte {offset}: {problem}", Subject(.tag))]
pub struct DecodeError {
    /// First byte of the message; `None` when the message is empty.
    pub tag: Option<u8>,
    /// Bytes before the place where decoding stopped, the tag included.
    pub offset: usize,
    /// What was expected there.
    pub problem: Problem,
}

/// What is wrong with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// The message ends too early.
    #[error("expected {what}, but the message ends")]
    Ends {
        /// What should follow.
        what: &'static str,
    },
    /// A byte that must be one of a few has another value.
    #[error("expected {what}, found {found:#04x}")]
    Unexpected {
        /// What should be there.
        what: &'static str,
        /// What is there.
        found: u8,
    },
    /// A count or length is below zero.
    #[error("expected {what}, found {found}")]
    Negative {
        /// What should be there.
        what: &'static str,
        /// What is there.
        found: i32,
    },
    /// Text is not UTF-8.
    #[error("expected {what} in UTF-8 (is client_encoding UTF8 on the replication connection?)")]
    NotUtf8 {
        /// What should be there.
        what: &'static str,
    },
    /// The message is complete and bytes are left.
    #[error("expected the end of the message, but {len} more bytes follow")]
    Trailing {
        /// How many.
        len: usize,
    },
    /// No message kind has this tag.
    #[error("no message kind of protocol 1 to 4 has this tag")]
    UnknownTag,
    /// The kind exists in later protocol versions only.
    #[error("this message kind needs protocol {needed}, but replication runs with {protocol}")]
    NotInProtocol {
        /// First version that has it.
        needed: u8,
        /// Version in use.
        protocol: u8,
    },
    /// [`Context::protocol`](super::Context::protocol) is none that exists.
    #[error("protocol {0} is not known, 1 to 4 are")]
    UnknownProtocol(u8),
    /// The kind cannot stand between Stream Start and Stream Stop.
    #[error("this message kind cannot stand inside a stream block")]
    InsideStream,
    /// The kind cannot stand before Stream Start.
    #[error("this message kind cannot stand outside a stream block")]
    OutsideStream,
    /// The kind is not one that the log stores as a command.
    #[error("this message kind is not stored as a command")]
    NotCommand,
    /// A change names a relation that no Relation message has defined.
    #[error("no Relation message has defined the relation with OID {oid}")]
    UnknownRelation {
        /// The number in the change.
        oid: u32,
    },
    /// A command's length does not fit its 32-bit frame.
    #[error("a command of {len} bytes cannot be stored, 4 GiB is the limit")]
    TooLong {
        /// Length in bytes.
        len: usize,
    },
}

/// Names the message in an error.
struct Subject<'a>(&'a Option<u8>);

impl fmt::Display for Subject<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(tag) if tag.is_ascii_graphic() => write!(f, "message '{}'", char::from(*tag)),
            Some(tag) => write!(f, "message {tag:#04x}"),
            None => f.write_str("message without a tag"),
        }
    }
}
