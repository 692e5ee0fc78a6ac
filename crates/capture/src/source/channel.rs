//! What carries questions to the site that has the publisher. Whoever has the connection between
//! the sites implements it.

use bytes::Bytes;
use farshore_store::BoxFuture;

/// Whole messages both ways, in order, each side waiting for its turn.
///
/// Dropping a channel ends it: the other side's [`Channel::next`] then gives `None` or an error,
/// within a time that the implementation bounds also where the network is gone, because locks and
/// a replication slot of the publisher may hang on it. A channel may be silent for hours without
/// being dead: whether it is must be found out below it.
pub trait Channel: Send {
    /// Sends a message of at most [`MESSAGE_BYTES_MAX`](super::MESSAGE_BYTES_MAX) bytes. Waits
    /// while the other side does not keep up. A channel whose send was dropped is not used again.
    fn send(&mut self, message: Bytes) -> BoxFuture<'_, Result<(), ChannelError>>;

    /// The next message; `None` when the other side has ended the channel. Cancel-safe: dropped
    /// early, it has taken nothing.
    fn next(&mut self) -> BoxFuture<'_, Result<Option<Bytes>, ChannelError>>;
}

/// Opens channels to the site that has the publisher of one publication.
pub trait Opener: Send + Sync {
    /// A new channel, at whose other end [`serve`](super::serve) runs for that publication.
    fn open(&self) -> BoxFuture<'_, Result<Box<dyn Channel>, ChannelError>>;
}

/// Why a channel cannot be had, or has ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ChannelError {
    /// What happened, and the next step where there is one.
    pub message: String,
    /// Whether trying again later, unchanged, can succeed.
    pub transient: bool,
}

impl ChannelError {
    /// The other side, or the way to it, is away.
    pub fn away(message: impl Into<String>) -> ChannelError {
        ChannelError { message: message.into(), transient: true }
    }

    /// Somebody has to change something first.
    pub fn permanent(message: impl Into<String>) -> ChannelError {
        ChannelError { message: message.into(), transient: false }
    }
}
