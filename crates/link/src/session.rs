//! A session: messages both ways, in order, over all its connections.

use crate::arrivals::{Arrivals, Assembly};
use crate::frame::{MESSAGE_BYTES_MAX, PAYLOAD_BYTES_MAX};
use crate::handshake::CONNECTIONS_MAX;
use crate::meter::{Meter, Traffic};
use crate::outgoing::{Outgoing, Piece, Wait, cut};
use crate::shared::{Phase, Shared};
use crate::stripe::{self, Stripe};
use crate::wire::Wire;
use crate::{LinkError, LinkOptions};
use bytes::Bytes;
use std::collections::VecDeque;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::coop::consume_budget;

/// An open session. Both sides have one each, and they are alike.
pub struct Session {
    sender: Sender,
    receiver: Receiver,
    peer: SocketAddr,
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("site", &self.peer_site())
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

impl Session {
    /// Takes over connections whose handshake is done. `window_bytes` is what the peer granted.
    pub(crate) fn start(
        wires: Vec<Wire>,
        site: String,
        peer: SocketAddr,
        window_bytes: u64,
        options: &LinkOptions,
    ) -> Session {
        debug_assert!((1..=CONNECTIONS_MAX).contains(&wires.len()));
        let meter = Arc::new(Meter::default());
        let outgoing = Outgoing::new(wires.len(), window_bytes);
        let arrivals = Arrivals::new(options.window_bytes as u64);
        let shared = Arc::new(Shared::new(site, wires.len(), outgoing, arrivals, meter));
        for (number, wire) in wires.into_iter().enumerate() {
            stripe::spawn(Stripe::new(shared.clone(), number, options), wire);
        }
        let pacer = options.pacer.clone();
        let pending = VecDeque::new();
        let sender = Sender {
            phase: shared.phase(),
            shared: shared.clone(),
            pacer,
            pending,
            is_finished: false,
        };
        let receiver = Receiver { phase: shared.phase(), shared, assembly: Assembly::default() };
        Session { sender, receiver, peer }
    }

    /// The halves, for two tasks. Dropping one before its direction has ended (by
    /// [`Sender::finish`], or [`Receiver::next`] returning `None`) gives the session up: the other
    /// half fails with [`LinkError::GivenUp`] and the peer is told.
    pub fn split(self) -> (Sender, Receiver) {
        (self.sender, self.receiver)
    }

    /// The site that the peer's certificate names.
    pub fn peer_site(&self) -> &str {
        self.sender.peer_site()
    }

    /// Where the peer's first connection comes from or goes to.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// The session's counters, for status.
    pub fn meter(&self) -> Arc<Meter> {
        self.sender.meter()
    }
}

/// The sending half.
pub struct Sender {
    shared: Arc<Shared>,
    phase: watch::Receiver<Phase>,
    pacer: Option<Arc<crate::pacer::Pacer>>,
    /// Pieces of a message that `send` took and has not handed on.
    pending: VecDeque<Piece>,
    is_finished: bool,
}

impl Sender {
    /// Sends one message of at most 1 GiB and 64 KiB; messages arrive in the order of the calls.
    /// Returns when the connections have taken it: waits for credit of the peer and for room, at
    /// most 256 KiB per connection. That it returned does not mean that the message arrived.
    ///
    /// If the future is dropped, the message may have been taken or not; if it was, it is never
    /// torn: the next `send` or [`Sender::finish`] first sends the rest of it.
    ///
    /// Fails if the session has failed, and with [`LinkError::Options`] if the message is too long
    /// (the session goes on).
    pub async fn send(&mut self, message: Bytes) -> Result<(), LinkError> {
        self.send_parts(&[message]).await
    }

    /// As [`Sender::send`], for one message that lies in several parts. They are not copied.
    pub async fn send_parts(&mut self, parts: &[Bytes]) -> Result<(), LinkError> {
        let length: u64 = parts.iter().map(|part| part.len() as u64).sum();
        let message_bytes = u32::try_from(length)
            .ok()
            .filter(|bytes| *bytes <= MESSAGE_BYTES_MAX)
            .ok_or_else(|| {
                LinkError::Options(format!(
                    "a message of {length} bytes is too long for a link; {MESSAGE_BYTES_MAX} \
                         are allowed"
                ))
            })?;
        // Who sends or takes many messages in a row lets others of its thread have their turn.
        consume_budget().await;
        self.hand_on().await?;
        let piece_bytes_max = self
            .pacer
            .as_ref()
            .map_or(PAYLOAD_BYTES_MAX, |pacer| pacer.piece_bytes_max().min(PAYLOAD_BYTES_MAX));
        self.pending = cut(parts, message_bytes, piece_bytes_max);
        let meter = &self.shared.meter;
        meter.messages_sent.fetch_add(1, Relaxed);
        meter.message_bytes_sent.fetch_add(length, Relaxed);
        self.hand_on().await
    }

    /// Ends this direction: returns when the peer has received every message (not necessarily taken
    /// it). Fails if the session failed before. If the future is dropped, the session is given up.
    pub async fn finish(mut self) -> Result<(), LinkError> {
        self.hand_on().await?;
        self.shared.end();
        loop {
            if self.shared.is_confirmed() {
                self.is_finished = true;
                return Ok(());
            }
            self.wait().await?;
        }
    }

    /// What the session has carried so far.
    pub fn traffic(&self) -> Traffic {
        self.shared.meter.traffic()
    }

    /// The session's counters, for status.
    pub fn meter(&self) -> Arc<Meter> {
        self.shared.meter.clone()
    }

    /// The site that the peer's certificate names.
    pub fn peer_site(&self) -> &str {
        &self.shared.site
    }

    /// Waits until the session has failed or ended in both directions; for who has nothing to send.
    pub async fn over(&mut self) -> Result<(), LinkError> {
        // Fails only when the session is gone, and then it is over.
        let _ = self.phase.wait_for(Phase::is_over).await;
        self.shared.check()
    }

    async fn hand_on(&mut self) -> Result<(), LinkError> {
        self.shared.check()?;
        while let Err(wait) = self.shared.offer(&mut self.pending) {
            let began = Instant::now();
            let waited = self.wait().await;
            let micros = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
            let meter = &self.shared.meter;
            match wait {
                Wait::Credit => meter.waited_for_peer_us.fetch_add(micros, Relaxed),
                Wait::Room => meter.waited_for_network_us.fetch_add(micros, Relaxed),
            };
            waited?;
        }
        Ok(())
    }

    /// Waits for room, credit or the peer's confirmation.
    async fn wait(&mut self) -> Result<(), LinkError> {
        tokio::select! {
            () = self.shared.room.notified() => {}
            _ = self.phase.wait_for(Phase::is_over) => {}
        }
        self.shared.check()
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if !self.is_finished {
            self.shared.fail(LinkError::GivenUp);
        }
    }
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").field("site", &self.shared.site).finish_non_exhaustive()
    }
}

/// The receiving half.
pub struct Receiver {
    shared: Arc<Shared>,
    phase: watch::Receiver<Phase>,
    assembly: Assembly,
}

impl Receiver {
    /// The next message, in order; `None` after the peer's orderly end. Credit goes back to the
    /// peer as pieces are taken, and they are taken only in here: who does not call stops the peer
    /// after the window. A message longer than the window passes.
    ///
    /// When the session fails, messages that arrived whole are still returned before the error.
    /// Nothing is lost if the future is dropped.
    pub async fn next(&mut self) -> Result<Option<Bytes>, LinkError> {
        consume_budget().await;
        loop {
            while let Some(piece) = self.shared.take() {
                if let Some(message) =
                    self.assembly.add(piece).map_err(|what| self.shared.broken(what))?
                {
                    let meter = &self.shared.meter;
                    meter.messages_received.fetch_add(1, Relaxed);
                    meter.message_bytes_received.fetch_add(message.len() as u64, Relaxed);
                    return Ok(Some(message));
                }
            }
            if self.shared.is_at_end() {
                if self.assembly.is_begun() {
                    return Err(self.shared.broken("it ended within a message".to_owned()));
                }
                return Ok(None);
            }
            self.shared.check()?;
            tokio::select! {
                () = self.shared.arrived.notified() => {}
                _ = self.phase.wait_for(Phase::is_over) => {}
            }
        }
    }

    /// The site that the peer's certificate names.
    pub fn peer_site(&self) -> &str {
        &self.shared.site
    }

    /// The session's counters, for status.
    pub fn meter(&self) -> Arc<Meter> {
        self.shared.meter.clone()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if !self.shared.is_complete() {
            self.shared.fail(LinkError::GivenUp);
        }
    }
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver").field("site", &self.shared.site).finish_non_exhaustive()
    }
}

/// How long a failed session tries to tell the peer why.
pub(crate) const LAST_WORDS: Duration = Duration::from_secs(1);
