//! A session: messages both ways, in order, over all its connections.

use crate::arrivals::Arrivals;
use crate::crossing::{CrossingReceiver, CrossingSender};
use crate::handshake::CONNECTIONS_MAX;
use crate::meter::{Meter, Traffic};
use crate::outgoing::Outgoing;
use crate::shared::Shared;
use crate::stripe::{self, Stripe};
use crate::wire::Wire;
use crate::within::{self, WithinReceiver, WithinSender};
use crate::{LinkError, LinkOptions};
use bytes::Bytes;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// An open session. Both sides have one each, and they are alike.
pub struct Session {
    sender: Sender,
    receiver: Receiver,
    peer: Option<SocketAddr>,
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
        let sender = CrossingSender::new(shared.clone(), options.pacer.clone());
        let receiver = CrossingReceiver::new(shared, options.message_bytes_max);
        let (sender, receiver) =
            (Sender(SenderWay::Crossing(sender)), Receiver(ReceiverWay::Crossing(receiver)));
        Session { sender, receiver, peer: Some(peer) }
    }

    /// The two sides of a session within this process, of `site` with itself: the same promises,
    /// without a network. `messages_max` messages wait to be taken; more wait to be sent.
    pub fn within(site: &str, messages_max: usize) -> (Session, Session) {
        let [near, far] = within::pair(site, messages_max).map(|(sender, receiver)| Session {
            sender: Sender(SenderWay::Within(sender)),
            receiver: Receiver(ReceiverWay::Within(receiver)),
            peer: None,
        });
        (near, far)
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

    /// Where the peer's first connection comes from or goes to; nowhere within a process.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// The session's counters, for status.
    pub fn meter(&self) -> Arc<Meter> {
        self.sender.meter()
    }
}

/// The sending half.
pub struct Sender(SenderWay);

enum SenderWay {
    Crossing(CrossingSender),
    Within(WithinSender),
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

    /// As [`Sender::send`], for one message that lies in several parts. Over a network they are not
    /// copied.
    pub async fn send_parts(&mut self, parts: &[Bytes]) -> Result<(), LinkError> {
        match &mut self.0 {
            SenderWay::Crossing(sender) => sender.send_parts(parts).await,
            SenderWay::Within(sender) => sender.send_parts(parts).await,
        }
    }

    /// Ends this direction: returns when the peer has received every message (not necessarily taken
    /// it). Fails if the session failed before. If the future is dropped, the session is given up.
    pub async fn finish(self) -> Result<(), LinkError> {
        match self.0 {
            SenderWay::Crossing(sender) => sender.finish().await,
            SenderWay::Within(sender) => sender.finish().await,
        }
    }

    /// What the session has carried so far.
    pub fn traffic(&self) -> Traffic {
        self.shared_meter().traffic()
    }

    /// The session's counters, for status.
    pub fn meter(&self) -> Arc<Meter> {
        self.shared_meter().clone()
    }

    /// The site that the peer's certificate names.
    pub fn peer_site(&self) -> &str {
        match &self.0 {
            SenderWay::Crossing(sender) => sender.peer_site(),
            SenderWay::Within(sender) => sender.peer_site(),
        }
    }

    /// Waits until the session has failed or ended in both directions; for who has nothing to send.
    pub async fn over(&mut self) -> Result<(), LinkError> {
        match &mut self.0 {
            SenderWay::Crossing(sender) => sender.over().await,
            SenderWay::Within(sender) => sender.over().await,
        }
    }

    fn shared_meter(&self) -> &Arc<Meter> {
        match &self.0 {
            SenderWay::Crossing(sender) => sender.meter(),
            SenderWay::Within(sender) => sender.meter(),
        }
    }
}

impl fmt::Debug for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sender").field("site", &self.peer_site()).finish_non_exhaustive()
    }
}

/// The receiving half.
pub struct Receiver(ReceiverWay);

enum ReceiverWay {
    Crossing(CrossingReceiver),
    Within(WithinReceiver),
}

impl Receiver {
    /// The next message, in order; `None` after the peer's orderly end. Credit goes back to the
    /// peer as pieces are taken, and they are taken only in here: who does not call stops the peer
    /// after the window. A message longer than the window passes.
    ///
    /// When the session fails, messages that arrived whole are still returned before the error.
    /// Nothing is lost if the future is dropped.
    pub async fn next(&mut self) -> Result<Option<Bytes>, LinkError> {
        Ok(self.next_parts().await?.map(together))
    }

    /// As [`Receiver::next`], a message as it lies: in one part from a network, and within a process
    /// in those that it was sent in, which are not copied.
    pub async fn next_parts(&mut self) -> Result<Option<Vec<Bytes>>, LinkError> {
        match &mut self.0 {
            ReceiverWay::Crossing(receiver) => Ok(receiver.next().await?.map(|whole| vec![whole])),
            ReceiverWay::Within(receiver) => receiver.next_parts().await,
        }
    }

    /// The site that the peer's certificate names.
    pub fn peer_site(&self) -> &str {
        match &self.0 {
            ReceiverWay::Crossing(receiver) => receiver.peer_site(),
            ReceiverWay::Within(receiver) => receiver.peer_site(),
        }
    }

    /// The session's counters, for status.
    pub fn meter(&self) -> Arc<Meter> {
        match &self.0 {
            ReceiverWay::Crossing(receiver) => receiver.meter().clone(),
            ReceiverWay::Within(receiver) => receiver.meter().clone(),
        }
    }
}

fn together(mut parts: Vec<Bytes>) -> Bytes {
    match (parts.pop(), parts.is_empty()) {
        (Some(only), true) => only,
        (last, _) => {
            parts.extend(last);
            parts.concat().into()
        }
    }
}

impl fmt::Debug for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receiver").field("site", &self.peer_site()).finish_non_exhaustive()
    }
}

/// How long a failed session tries to tell the peer why.
pub(crate) const LAST_WORDS: Duration = Duration::from_secs(1);
