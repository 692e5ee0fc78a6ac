//! One timeline's log on its way: from the principal to the link, and back how far it is there.

use super::Near;
use super::promise::{Promise, Reply};
use crate::error::MirrorError;
use crate::relay::compression::Packer;
use crate::relay::message::{FarPositions, Feedback, FromFar, FromNear};
use crate::wal::Timeline;
use farshore_fault as fault;
use farshore_link::{Receiver, Sender};
use farshore_model::{Lsn, PgTime};
use farshore_pg::replication::{ReplicationStream, StreamMessage};
use farshore_wire::replication::HotStandbyFeedback;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Most log in one message: what has arrived is sent without waiting, but no more than this at a
/// time.
const BATCH_BYTES_MAX: usize = 256 << 10;
/// The principal is told how far we are at least so often; a third of the least sensible
/// `wal_sender_timeout`.
const STATUS_EVERY: Duration = Duration::from_secs(3);
/// How often, where nobody waits for it.
const STATUS_EVERY_ASYNC: Duration = Duration::from_secs(1);
/// Where no commit waits, log that comes so soon after a piece waits for more.
const GATHERING_ASYNC: Duration = Duration::from_millis(20);

pub(super) async fn send(
    sender: &mut Sender,
    mut messages: mpsc::Receiver<FromNear>,
    sent: &AtomicU64,
) -> Result<(), MirrorError> {
    while let Some(message) = messages.recv().await {
        if let FromNear::Log { start, bytes, .. } = &message {
            // Before the far end can have it.
            sent.store(start.0 + u64::from(*bytes), Relaxed);
        }
        fault::point("mirror.before-send");
        sender.send_parts(&message.encode()).await?;
        fault::point("mirror.after-send");
    }
    // The streaming task has ended, and says why.
    std::future::pending().await
}

/// What can be so after `before`, when log up to `sent` was handed to the link. What comes of it is
/// told to the principal, which lets commits return and drops log: the far end is not believed more
/// than it can have.
fn credible(positions: FarPositions, before: FarPositions, sent: Lsn) -> Option<FarPositions> {
    let FarPositions { written, durable, applied } = positions;
    let can_be = before.durable <= durable && durable <= written && written <= sent;
    // Standbys get only what is durable.
    can_be.then_some(FarPositions { applied: applied.min(durable), ..positions })
}

pub(super) async fn hear(
    site: &str,
    mut receiver: Receiver,
    sent: &AtomicU64,
    (far, needs): (watch::Sender<FarPositions>, watch::Sender<Feedback>),
    turn_noted: impl Fn(),
) -> Result<(), MirrorError> {
    let protocol = |what: String| MirrorError::Protocol { site: site.to_owned(), what };
    while let Some(message) = receiver.next().await? {
        match FromFar::decode(message).map_err(|what| protocol(what.to_string()))? {
            FromFar::Positions(positions) => {
                let before = *far.borrow();
                let sent = Lsn(sent.load(Relaxed));
                let positions = credible(positions, before, sent).ok_or_else(|| {
                    protocol(format!(
                        "positions that cannot be, after log up to {sent}: {positions:?}"
                    ))
                })?;
                far.send_replace(positions);
            }
            FromFar::Feedback(feedback) => {
                needs.send_replace(feedback);
            }
            FromFar::TurnNoted => turn_noted(),
        }
    }
    Err(protocol("no more, without a reason".to_owned()))
}

/// The next message, which is left to gather with others until then. Cancel-safe.
async fn next_of(
    stream: &mut ReplicationStream,
    gathers_until: Instant,
) -> Result<Option<StreamMessage>, farshore_pg::Error> {
    let patience = gathers_until.saturating_duration_since(Instant::now());
    if !patience.is_zero() {
        stream.wait_for(BATCH_BYTES_MAX, patience).await;
    }
    stream.next().await
}

/// One timeline's log on its way.
pub(super) struct Flow<'a> {
    pub(super) near: &'a Near,
    pub(super) timeline: Timeline,
    pub(super) received: Lsn,
    pub(super) packer: &'a mut Packer,
    pub(super) queue: &'a mpsc::Sender<FromNear>,
    pub(super) told: Reply,
}

impl Flow<'_> {
    /// Until the stream ends; where. `first` has come already.
    pub(super) async fn run(
        &mut self,
        first: Option<StreamMessage>,
        stream: &mut ReplicationStream,
        positions: &mut watch::Receiver<FarPositions>,
        feedback: &mut watch::Receiver<Feedback>,
    ) -> Result<Lsn, MirrorError> {
        let is_async = self.near.promise == Promise::Async;
        let every = if is_async { STATUS_EVERY_ASYNC } else { STATUS_EVERY };
        let mut tick = tokio::time::interval(every);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut pending: Option<FromNear> = None;
        let mut waiting_since = Instant::now();
        let mut gathers_until = waiting_since;
        let queue = self.queue;
        if let Some(first) = first {
            pending = self.take(first, stream)?.0;
        }
        loop {
            tokio::select! {
                // What the principal waits for comes first.
                biased;
                // It is due once in a while only, and must not wait for a pause in the log.
                _ = tick.tick() => {
                    let far = *positions.borrow();
                    self.reply(stream, far, true).await?;
                }
                changed = positions.changed() => {
                    if changed.is_err() {
                        std::future::pending::<()>().await;
                    }
                    let far = *positions.borrow_and_update();
                    if is_async {
                        // Shown here; the principal is told when it is due.
                        self.near.status().far = far;
                    } else {
                        self.reply(stream, far, false).await?;
                    }
                }
                changed = feedback.changed() => {
                    if changed.is_err() {
                        std::future::pending::<()>().await;
                    }
                    let needs = *feedback.borrow_and_update();
                    stream.send_feedback(HotStandbyFeedback {
                        client_time: PgTime::now(),
                        xmin: needs.xmin,
                        xmin_epoch: needs.xmin_epoch,
                        catalog_xmin: needs.catalog_xmin,
                        catalog_xmin_epoch: needs.catalog_xmin_epoch,
                    }).await?;
                }
                permit = queue.reserve(), if pending.is_some() => {
                    if let (Ok(permit), Some(message)) = (permit, pending.take()) {
                        permit.send(message);
                        let waited = waiting_since.elapsed();
                        self.packer.waited_for_link(waited);
                        self.near.status().flow_control += waited;
                    } else {
                        std::future::pending::<()>().await;
                    }
                }
                message = next_of(stream, gathers_until), if pending.is_none() => {
                    let Some(first) = message? else { return Ok(self.received) };
                    let before = self.received;
                    let (batch, asked) = self.take(first, stream)?;
                    pending = batch;
                    waiting_since = Instant::now();
                    // A flood is as large as a piece may be anyway.
                    if is_async && self.received.bytes_since(before) < BATCH_BYTES_MAX as u64 {
                        gathers_until = waiting_since + GATHERING_ASYNC;
                    }
                    if asked || fault::defect("mirror-near-claims-far") {
                        let far = *positions.borrow();
                        self.reply(stream, far, true).await?;
                    }
                }
            }
        }
    }

    /// Everything that has arrived, as one message; and whether the principal asks for a reply.
    fn take(
        &mut self,
        first: StreamMessage,
        stream: &mut ReplicationStream,
    ) -> Result<(Option<FromNear>, bool), MirrorError> {
        let start = self.received;
        let (mut pieces, mut bytes, mut asked) = (Vec::new(), 0, false);
        let mut principal_end = Lsn::ZERO;
        let mut next = Some(first);
        while let Some(message) = next {
            match message {
                StreamMessage::XLogData { wal_start, wal_end, data, .. } => {
                    if wal_start != self.received {
                        let what = format!(
                            "log came for {wal_start}, and what came before ends at {}",
                            self.received
                        );
                        let server = stream.server().to_owned();
                        return Err(MirrorError::WrongPrincipal { server, what });
                    }
                    self.received = Lsn(wal_start.0 + data.len() as u64);
                    principal_end = principal_end.max(wal_end);
                    bytes += data.len();
                    pieces.push(data);
                }
                StreamMessage::Keepalive { wal_end, reply_requested, .. } => {
                    principal_end = principal_end.max(wal_end);
                    asked |= reply_requested;
                }
            }
            // A walsender's message has at most 128 KiB: with one more it is still a piece.
            next = if bytes < BATCH_BYTES_MAX { stream.try_next()? } else { None };
        }
        let message = if pieces.is_empty() {
            FromNear::Alive { principal_end }
        } else {
            let packed_before = self.packer.packing();
            let (packing, packed) = self
                .packer
                .pack_log(start, &pieces)
                .map_err(|error| MirrorError::Io { action: "compress log", error })?;
            let mut status = self.near.status();
            status.log_bytes += bytes as u64;
            status.packed_bytes += packed.len() as u64;
            status.method = Some(self.packer.method());
            status.packing += self.packer.packing() - packed_before;
            let bytes = bytes as u32;
            let timeline = self.timeline;
            FromNear::Log { timeline, start, principal_end, bytes, packing, packed }
        };
        let mut status = self.near.status();
        status.receive(self.received, Instant::now());
        status.principal_end = status.principal_end.max(principal_end);
        Ok((Some(message), asked))
    }

    /// Tells the principal how far the log is, if that is new or `anyway`.
    async fn reply(
        &mut self,
        stream: &mut ReplicationStream,
        far: FarPositions,
        anyway: bool,
    ) -> Result<(), MirrorError> {
        self.near.status().far = far;
        let told = self.near.status().acknowledged;
        let mut reply = self.near.promise.reply(self.received, far, told);
        if self.near.is_held(far) {
            // Nobody returns for what a standby has written that has flushed nothing; and a server
            // that shuts down waits until all is written.
            reply.flushed = Lsn::ZERO;
        }
        // A server that shuts down waits for what is flushed, or for what is written where that is
        // nothing. Standbys may be away, and whoever waited for their replay is gone.
        let is_shutting_down =
            self.near.promise == Promise::FarApplied && self.near.status().is_shutting_down;
        if is_shutting_down {
            reply = Reply { written: far.durable, flushed: Lsn::ZERO, ..reply };
        }
        if reply == self.told && !anyway {
            return Ok(());
        }
        if reply.flushed > Lsn::ZERO {
            self.near.note_told(Instant::now());
        }
        fault::point("mirror.before-acknowledge");
        stream.send_status(reply.written, reply.flushed, reply.applied, false).await?;
        fault::point("mirror.after-acknowledge");
        self.told = reply;
        if !is_shutting_down {
            self.near.status().acknowledge(reply.flushed, Instant::now());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_far_end_is_believed_no_more_than_it_can_have() {
        let far = |written, durable, applied| FarPositions {
            written: Lsn(written),
            durable: Lsn(durable),
            applied: Lsn(applied),
        };
        let (before, sent) = (far(30, 20, 10), Lsn(40));
        for possible in [far(30, 20, 10), far(40, 40, 40), far(40, 20, 0), far(20, 20, 5)] {
            assert_eq!(credible(possible, before, sent), Some(possible));
        }
        for impossible in [far(41, 20, 10), far(41, 41, 10), far(30, 31, 10), far(30, 19, 10)] {
            assert_eq!(credible(impossible, before, sent), None, "{impossible:?}");
        }
        // Whatever a standby says that it has replayed.
        assert_eq!(credible(far(40, 30, 99), before, sent), Some(far(40, 30, 30)));
    }
}
