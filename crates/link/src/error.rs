//! What can go wrong on a link. Every message names the site or the address, and what to do where
//! that is known.

use crate::frame::FrameError;
use crate::handshake::HandshakeError;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Why a link could not be opened, or ended.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LinkError {
    /// An option or argument is out of bounds.
    #[error("{0}")]
    Options(String),
    /// The listener's address cannot be used.
    #[error(
        "cannot listen at {address}: {error}. Choose another address for [site] listen, or stop what uses it"
    )]
    Listen {
        /// As configured.
        address: String,
        /// What the operating system said.
        error: Arc<io::Error>,
    },
    /// No connection to the peer.
    #[error(
        "cannot connect to site {site} at {address}: {error}. Check that farshore runs there and that the address and the network between are right"
    )]
    Connect {
        /// Expected there.
        site: String,
        /// As configured.
        address: String,
        /// What the operating system said.
        error: Arc<io::Error>,
    },
    /// Something took too long.
    #[error("site {site} at {address} did not {what} within {within:?}")]
    TimedOut {
        /// Expected there.
        site: String,
        /// As configured.
        address: String,
        /// Verb phrase.
        what: &'static str,
        /// How long it had.
        within: Duration,
    },
    /// What answers there is no Farshore link.
    #[error(
        "what listens at {address} is not the link of a farshore site: {why}. Check the address"
    )]
    NotALink {
        /// As configured.
        address: String,
        /// What it did.
        why: String,
    },
    /// We do not trust the peer.
    #[error("refused the certificate that site {site} at {address} showed: {why}")]
    Untrusted {
        /// Expected there.
        site: String,
        /// As configured.
        address: String,
        /// What is wrong with it, and what to do.
        why: String,
    },
    /// The peer does not trust us.
    #[error("site {site} at {address} refused our certificate: {why}")]
    Rejected {
        /// Expected there.
        site: String,
        /// As configured.
        address: String,
        /// What it said of it, and what to check.
        why: String,
    },
    /// The peer refused the request.
    #[error("site {site} refused: {why}")]
    Refused {
        /// The peer.
        site: String,
        /// Its words.
        why: String,
    },
    /// The peer broke the handshake's rules.
    #[error("the handshake with site {site} failed: {error}")]
    Handshake {
        /// The peer.
        site: String,
        /// How.
        error: HandshakeError,
    },
    /// A connection of the session failed.
    #[error("connection {stripe} to site {site} failed: {error}")]
    Io {
        /// The peer.
        site: String,
        /// Which connection of the session, from 0.
        stripe: usize,
        /// What the operating system or TLS said.
        error: Arc<io::Error>,
    },
    /// The peer's end of a connection is gone, without an orderly end of the session.
    #[error("site {site} closed connection {stripe} in the middle of the session")]
    Vanished {
        /// The peer.
        site: String,
        /// Which connection of the session, from 0.
        stripe: usize,
    },
    /// No byte came from the peer for too long.
    #[error(
        "nothing was heard from site {site} on connection {stripe} for {after:?}: the site or the network is down, or something between drops packets"
    )]
    Silent {
        /// The peer.
        site: String,
        /// Which connection of the session, from 0.
        stripe: usize,
        /// How long.
        after: Duration,
    },
    /// Bytes that are no frame, or were changed on the way.
    #[error("connection {stripe} from site {site} carried a bad frame: {error}")]
    Frame {
        /// The peer.
        site: String,
        /// Which connection of the session, from 0.
        stripe: usize,
        /// What is wrong.
        error: FrameError,
    },
    /// Good frames that break the protocol.
    #[error("site {site} broke the link protocol: {what}")]
    Protocol {
        /// The peer.
        site: String,
        /// How.
        what: String,
    },
    /// The peer ended the session because of a failure on its side.
    #[error("site {site} ended the session: {why}")]
    PeerFailed {
        /// The peer.
        site: String,
        /// Its words.
        why: String,
    },
    /// The other side, within this process, dropped a half of the session before its end.
    #[error("the other end, which is in this process, has ended")]
    OtherSideEnded,
    /// This side dropped a half of the session before its end. The peer is told in these words, so
    /// they speak of neither side.
    #[error("the session was given up before its end")]
    GivenUp,
}

impl LinkError {
    /// Whether trying again can help although nobody changes anything: the network may come back,
    /// a certificate does not mend itself. A peer's refusal counts as one that may pass.
    pub fn may_pass(&self) -> bool {
        match self {
            LinkError::Connect { .. }
            | LinkError::TimedOut { .. }
            | LinkError::Refused { .. }
            | LinkError::Io { .. }
            | LinkError::Vanished { .. }
            | LinkError::Silent { .. }
            | LinkError::Frame { .. }
            | LinkError::Protocol { .. }
            | LinkError::PeerFailed { .. }
            | LinkError::OtherSideEnded
            | LinkError::GivenUp => true,
            LinkError::Options(_)
            | LinkError::Listen { .. }
            | LinkError::NotALink { .. }
            | LinkError::Untrusted { .. }
            | LinkError::Rejected { .. }
            | LinkError::Handshake { .. } => false,
        }
    }
}
