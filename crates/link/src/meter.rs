//! What a session has carried so far, for status and tests.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::watch;

/// Counts of one session at one moment. Bytes and messages are since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Messages that `send` took.
    pub messages_sent: u64,
    /// Their bytes.
    pub message_bytes_sent: u64,
    /// Bytes handed to TLS, headers and keepalive included; TLS adds about 0.2 %.
    pub wire_bytes_sent: u64,
    /// Messages that `next` returned.
    pub messages_received: u64,
    /// Their bytes.
    pub message_bytes_received: u64,
    /// Bytes that came out of TLS.
    pub wire_bytes_received: u64,
    /// Bytes cut and waiting for a connection.
    pub waiting_bytes: u64,
    /// Bytes received and not taken, as counted against the window; never more than that.
    pub held_bytes: u64,
    /// The most of them so far.
    pub held_bytes_peak: u64,
    /// How long `send` waited for the peer to take messages.
    pub waited_for_peer: Duration,
    /// How long `send` waited for the connections to carry bytes, or for the pacer.
    pub waited_for_network: Duration,
    /// The last round trip of a ping through a connection, waiting behind data included.
    pub round_trip: Option<Duration>,
}

/// The counters behind [`Traffic`]; shared by a session's halves and whoever reports.
#[derive(Debug)]
pub struct Meter {
    pub(crate) messages_sent: AtomicU64,
    pub(crate) message_bytes_sent: AtomicU64,
    pub(crate) wire_bytes_sent: AtomicU64,
    pub(crate) messages_received: AtomicU64,
    pub(crate) message_bytes_received: AtomicU64,
    pub(crate) wire_bytes_received: AtomicU64,
    pub(crate) waiting_bytes: AtomicU64,
    pub(crate) held_bytes: AtomicU64,
    pub(crate) held_bytes_peak: AtomicU64,
    pub(crate) waited_for_peer_us: AtomicU64,
    pub(crate) waited_for_network_us: AtomicU64,
    /// `u64::MAX` before the first.
    pub(crate) round_trip_us: AtomicU64,
    /// Tasks that work for the session.
    tasks: watch::Sender<usize>,
}

impl Default for Meter {
    fn default() -> Meter {
        Meter {
            messages_sent: AtomicU64::new(0),
            message_bytes_sent: AtomicU64::new(0),
            wire_bytes_sent: AtomicU64::new(0),
            messages_received: AtomicU64::new(0),
            message_bytes_received: AtomicU64::new(0),
            wire_bytes_received: AtomicU64::new(0),
            waiting_bytes: AtomicU64::new(0),
            held_bytes: AtomicU64::new(0),
            held_bytes_peak: AtomicU64::new(0),
            waited_for_peer_us: AtomicU64::new(0),
            waited_for_network_us: AtomicU64::new(0),
            round_trip_us: AtomicU64::new(u64::MAX),
            tasks: watch::Sender::new(0),
        }
    }
}

impl Meter {
    /// The counts now; each is right by itself, together they may be moments apart.
    pub fn traffic(&self) -> Traffic {
        let micros = |counter: &AtomicU64| Duration::from_micros(counter.load(Relaxed));
        let round_trip_us = self.round_trip_us.load(Relaxed);
        Traffic {
            messages_sent: self.messages_sent.load(Relaxed),
            message_bytes_sent: self.message_bytes_sent.load(Relaxed),
            wire_bytes_sent: self.wire_bytes_sent.load(Relaxed),
            messages_received: self.messages_received.load(Relaxed),
            message_bytes_received: self.message_bytes_received.load(Relaxed),
            wire_bytes_received: self.wire_bytes_received.load(Relaxed),
            waiting_bytes: self.waiting_bytes.load(Relaxed),
            held_bytes: self.held_bytes.load(Relaxed),
            held_bytes_peak: self.held_bytes_peak.load(Relaxed),
            waited_for_peer: micros(&self.waited_for_peer_us),
            waited_for_network: micros(&self.waited_for_network_us),
            round_trip: (round_trip_us != u64::MAX).then(|| Duration::from_micros(round_trip_us)),
        }
    }

    /// Waits until no task works for the session any more: its last words are sent and its
    /// connections closed. Never before the session has ended or failed.
    pub async fn closed(&self) {
        // Fails only when the sender is gone, and that is a field of `self`.
        let _ = self.tasks.subscribe().wait_for(|tasks| *tasks == 0).await;
    }

    pub(crate) fn hold(&self, bytes: u64) {
        self.held_bytes.store(bytes, Relaxed);
        self.held_bytes_peak.fetch_max(bytes, Relaxed);
    }

    /// Counts a task in until the guard is dropped.
    pub(crate) fn count_task(self: &std::sync::Arc<Meter>) -> TaskCount {
        self.tasks.send_modify(|tasks| *tasks += 1);
        TaskCount(self.clone())
    }
}

pub(crate) struct TaskCount(std::sync::Arc<Meter>);

impl Drop for TaskCount {
    fn drop(&mut self) {
        self.0.tasks.send_modify(|tasks| *tasks -= 1);
    }
}
