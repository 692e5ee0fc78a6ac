//! What may be set about a link.

use crate::LinkError;
use crate::frame::MESSAGE_BYTES_MAX;
use crate::handshake::{CONNECTIONS_MAX, WINDOW_BYTES_MAX, WINDOW_BYTES_MIN};
use crate::pacer::Pacer;
use std::sync::Arc;
use std::time::Duration;

/// Settings of a link. Both sides have their own; only the dialer's `connections` counts.
#[derive(Clone, Debug)]
pub struct LinkOptions {
    /// TCP connections of a session, 1 to 16: one alone cannot fill a long fat link with stock
    /// socket limits.
    pub connections: usize,
    /// Bytes that the peer may send ahead of what is taken here, 512 KiB to 1 GiB. Bounds this
    /// side's memory; should be at least twice bandwidth × round trip.
    pub window_bytes: usize,
    /// Length of the longest message that is taken from the peer, in bytes; a longer one ends the
    /// session. A message is held until it is whole, so this bounds memory beside the window.
    pub message_bytes_max: u32,
    /// How often each connection asks the peer for a sign of life; at least 10 ms.
    pub keepalive: Duration,
    /// The session ends when a connection brings no byte for so long; at least twice `keepalive`.
    pub dead_after: Duration,
    /// Each step of opening a session takes no longer: connecting with TLS, the connections coming
    /// together, and the peer's acceptance.
    pub connect_timeout: Duration,
    /// Cap on what this side sends, shared by the sessions of one link.
    pub pacer: Option<Arc<Pacer>>,
    /// What this session sends goes before what other sessions of the link have waiting for the
    /// pacer, for up to half of the cap.
    pub goes_first: bool,
}

impl Default for LinkOptions {
    fn default() -> LinkOptions {
        LinkOptions {
            connections: 4,
            window_bytes: 32 << 20,
            message_bytes_max: MESSAGE_BYTES_MAX,
            keepalive: Duration::from_secs(1),
            dead_after: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(10),
            pacer: None,
            goes_first: false,
        }
    }
}

impl LinkOptions {
    /// Fails with [`LinkError::Options`] if a value is out of its bounds.
    pub fn check(&self) -> Result<(), LinkError> {
        let wrong = |what: String| Err(LinkError::Options(what));
        if !(1..=CONNECTIONS_MAX).contains(&self.connections) {
            return wrong(format!(
                "a link takes 1 to {CONNECTIONS_MAX} connections, not {}",
                self.connections
            ));
        }
        if !(WINDOW_BYTES_MIN..=WINDOW_BYTES_MAX).contains(&(self.window_bytes as u64)) {
            return wrong(format!(
                "a link's window has {WINDOW_BYTES_MIN} to {WINDOW_BYTES_MAX} bytes, not {}",
                self.window_bytes
            ));
        }
        if self.keepalive < Duration::from_millis(10) {
            return wrong(format!("keepalive {:?} is below 10 ms", self.keepalive));
        }
        if self.dead_after < self.keepalive * 2 {
            return wrong(format!(
                "dead_after {:?} is less than twice keepalive {:?}",
                self.dead_after, self.keepalive
            ));
        }
        if self.connect_timeout.is_zero() {
            return wrong("connect_timeout is zero".to_owned());
        }
        Ok(())
    }
}
