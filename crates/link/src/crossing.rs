//! A session's halves where its messages cross a network: cut into pieces over all its connections.

use crate::LinkError;
use crate::arrivals::Assembly;
use crate::frame::{MESSAGE_BYTES_MAX, PAYLOAD_BYTES_MAX};
use crate::meter::Meter;
use crate::outgoing::{Piece, Wait, cut};
use crate::pacer::Pacer;
use crate::shared::{Phase, Shared};
use bytes::Bytes;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;
use tokio::sync::watch;
use tokio::task::coop::consume_budget;

/// The sending half of a session over a network.
pub(crate) struct CrossingSender {
    shared: Arc<Shared>,
    phase: watch::Receiver<Phase>,
    pacer: Option<Arc<Pacer>>,
    /// Pieces of a message that `send` took and has not handed on.
    pending: VecDeque<Piece>,
    is_finished: bool,
}

impl CrossingSender {
    pub fn new(shared: Arc<Shared>, pacer: Option<Arc<Pacer>>) -> CrossingSender {
        CrossingSender {
            phase: shared.phase(),
            shared,
            pacer,
            pending: VecDeque::new(),
            is_finished: false,
        }
    }

    /// [`crate::Sender::send_parts`].
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

    /// [`crate::Sender::finish`].
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

    pub fn meter(&self) -> &Arc<Meter> {
        &self.shared.meter
    }

    pub fn peer_site(&self) -> &str {
        &self.shared.site
    }

    /// [`crate::Sender::over`].
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

impl Drop for CrossingSender {
    fn drop(&mut self) {
        if !self.is_finished {
            self.shared.fail(LinkError::GivenUp);
        }
    }
}

/// The receiving half of a session over a network.
pub(crate) struct CrossingReceiver {
    shared: Arc<Shared>,
    phase: watch::Receiver<Phase>,
    assembly: Assembly,
}

impl CrossingReceiver {
    pub fn new(shared: Arc<Shared>, message_bytes_max: u32) -> CrossingReceiver {
        let assembly = Assembly::new(message_bytes_max);
        CrossingReceiver { phase: shared.phase(), shared, assembly }
    }

    /// [`crate::Receiver::next`].
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

    pub fn peer_site(&self) -> &str {
        &self.shared.site
    }

    pub fn meter(&self) -> &Arc<Meter> {
        &self.shared.meter
    }
}

impl Drop for CrossingReceiver {
    fn drop(&mut self) {
        if !self.shared.is_complete() {
            self.shared.fail(LinkError::GivenUp);
        }
    }
}
