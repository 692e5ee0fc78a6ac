//! The near end: a physical replication client of the principal whose bytes go on the link as they
//! arrive. It keeps nothing: what the far end has not made durable, the principal's slot keeps.
//!
//! ```text
//! principal ─ XLogData ─► batch ─► pack ─► link ─► far end
//!     ◄─ written, flushed, applied ─ by the mode ◄─ how far it is there
//! ```

use crate::descent;
use crate::error::MirrorError;
use crate::relay::compression::{Compression, Method, Packer};
use crate::relay::message::{
    Answer, FarPositions, Feedback, FromFar, FromNear, Have, MirrorRequest,
};
use crate::wal::{SegmentBytes, Timeline};
use bytes::Bytes;
use farshore_fault as fault;
use farshore_link::{Receiver, Sender, Session};
use farshore_model::{Lsn, PgTime};
use farshore_pg::replication::{IdentifySystem, ReplicationStream, StreamMessage};
use farshore_pg::{Config, Connection, Mode};
use farshore_wire::replication::HotStandbyFeedback;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Most log in one message: what has arrived is sent without waiting, but no more than this at a
/// time.
const BATCH_BYTES_MAX: usize = 256 << 10;
/// Messages that wait for the link. More wait in the principal.
const QUEUE_MESSAGES_MAX: usize = 4;
/// The principal is told how far we are at least so often; a third of the least sensible
/// `wal_sender_timeout`.
const STATUS_EVERY: Duration = Duration::from_secs(3);
/// How often, where nobody waits for it.
const STATUS_EVERY_ASYNC: Duration = Duration::from_secs(1);

/// What a *flush* that the principal is told promises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Promise {
    /// fdatasynced in the far end's spool.
    #[default]
    Far,
    /// The same, where the far end is a node near the principal that keeps log alone: a mirror of
    /// its spool carries the log on.
    FarSync,
    /// Replayed by the standbys at the far end.
    FarApplied,
    /// Nothing that anybody should wait for: told lazily, of what is durable at the far end.
    Async,
}

impl Promise {
    /// As in a site file.
    pub fn as_str(self) -> &'static str {
        match self {
            Promise::Far => "far",
            Promise::FarSync => "far-sync",
            Promise::FarApplied => "far-applied",
            Promise::Async => "async",
        }
    }

    /// What the principal is told. `received` is what has arrived at the near end, of which
    /// nothing is promised: it is lost with this process. `told` is what it was told before as
    /// flushed.
    fn reply(self, received: Lsn, far: FarPositions, told: Lsn) -> Reply {
        if fault::defect("mirror-near-claims-far") {
            return Reply { written: received, flushed: received, applied: far.applied };
        }
        let flushed = match self {
            Promise::Far | Promise::FarSync | Promise::Async => far.durable,
            // A standby that is further behind than the ones before it does not take back what was
            // told: the slot would go back to log that the principal may have dropped. Whatever
            // comes next waits for it.
            Promise::FarApplied => far.durable.min(far.applied.max(told)),
        };
        Reply { written: far.written, flushed, applied: far.applied }
    }
}

/// A standby status update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Reply {
    written: Lsn,
    flushed: Lsn,
    applied: Lsn,
}

/// How a mirror's near end goes.
#[derive(Clone, Copy, Debug, Default)]
pub struct NearStatus {
    /// A far end is connected and log flows.
    pub connected: bool,
    /// End of the principal's log as last heard of.
    pub principal_end: Lsn,
    /// The timeline that flows.
    pub timeline: u32,
    /// Log has arrived here up to here.
    pub received: Lsn,
    /// How far it is at the far end.
    pub far: FarPositions,
    /// What the principal was told last as flushed; kept over sessions.
    pub acknowledged: Lsn,
    /// Bytes of log received since the node started.
    pub log_bytes: u64,
    /// Bytes that they took on the link, packed.
    pub packed_bytes: u64,
    /// How the last message was packed.
    pub method: Option<Method>,
    /// Time that packing took.
    pub packing: Duration,
    /// Time that packed log waited for the link.
    pub flow_control: Duration,
}

/// The near end of one mirror.
#[derive(Debug)]
pub struct Near {
    /// The mirror's name.
    pub name: String,
    /// The principal. Its `application_name` is set to [`Near::application_name`].
    pub principal: Config,
    /// The physical slot on the principal; made if it is not there.
    pub slot: String,
    /// What `synchronous_standby_names` calls this mirror.
    pub application_name: String,
    /// What a flush promises.
    pub promise: Promise,
    /// How log is packed.
    pub compression: Compression,
    /// How it goes.
    pub status: Mutex<NearStatus>,
}

impl Near {
    /// How it goes, to look at or change.
    pub fn status(&self) -> MutexGuard<'_, NearStatus> {
        self.status.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Serves a far end until the session, the principal or the caller ends it.
    ///
    /// # Errors
    /// Why it ended. The far end is told where it can be.
    pub async fn serve(&self, session: Session, request: MirrorRequest) -> Result<(), MirrorError> {
        let site = session.peer_site().to_owned();
        let (mut sender, receiver) = session.split();
        let begun = match self.begin(request.have.as_ref()).await {
            Ok(begun) => begun,
            Err(error) => {
                say_no(sender, &error).await?;
                return Err(error);
            }
        };
        if request.have.is_none() {
            // Another spool: what was told was of the one before. Who has the slot is alone in this.
            self.status().acknowledged = Lsn::ZERO;
        }
        sender.send(json(&begun.answer(self.promise))).await?;
        let ended = self.flow(&site, begun, sender, receiver).await;
        self.status().connected = false;
        ended
    }

    /// Whether `synchronous_standby_names` would take another one for this mirror: a commit that it
    /// lets return need not be at the far end. Looked at before anything is acknowledged; who has
    /// the slot is alone in that already.
    async fn check_namesakes(&self, own: i32) -> Result<(), MirrorError> {
        if self.promise == Promise::Async || fault::defect("mirror-misses-namesakes") {
            return Ok(());
        }
        let look = async {
            let mut connection = Connection::connect(&self.principal, Mode::Sql).await?;
            let sql = "SELECT pid, client_addr FROM pg_stat_replication \
                       WHERE lower(application_name) = lower($1) AND pid <> $2::int4";
            let (name, own) = (Some(self.application_name.as_str()), own.to_string());
            let rows = connection.query(sql, &[name, Some(&own)]).await?;
            let server = connection.server().to_owned();
            connection.close().await;
            Ok::<_, farshore_pg::Error>((rows, server))
        };
        match look.await {
            Ok((rows, server)) => match rows.first() {
                None => Ok(()),
                Some(other) => Err(MirrorError::Namesake {
                    server,
                    application_name: self.application_name.clone(),
                    pid: other.get(0).unwrap_or_default().to_owned(),
                    from: other.get(1).unwrap_or("its own socket").to_owned(),
                }),
            },
            Err(error) => {
                tracing::warn!(
                    mirror = %self.name,
                    "cannot look whether another standby is called \"{}\": {error}",
                    self.application_name
                );
                Ok(())
            }
        }
    }

    async fn connect(&self) -> Result<Connection, MirrorError> {
        let config = self.principal.clone().with_application_name(&self.application_name);
        Ok(Connection::connect(&config, Mode::PhysicalReplication).await?)
    }

    async fn begin(&self, have: Option<&Have>) -> Result<Begun, MirrorError> {
        let mut connection = self.connect().await?;
        let server = connection.server().to_owned();
        let wrong = |what: String| MirrorError::WrongPrincipal { server: server.clone(), what };
        let system = connection.identify_system().await?;
        if let Some(have) = have.filter(|have| have.system_id != system.system_id) {
            return Err(wrong(format!(
                "its system identifier is {}, and the mirror's spool holds the log of {}: it is \
                 another cluster. Point the mirror to the right one, or remove the spool's folder \
                 at the far site to begin anew",
                system.system_id, have.system_id
            )));
        }
        if let Some(have) = have {
            descent::check(&mut connection, Timeline(system.timeline), have).await?;
        }
        let shown = connection.simple_query("SHOW wal_segment_size").await?;
        let shown = shown.first().and_then(|set| set.rows.first()?.get(0).map(str::to_owned));
        let shown = shown.unwrap_or_default();
        let segment = parse_segment_size(&shown)
            .ok_or_else(|| wrong(format!("its wal_segment_size is \"{shown}\"")))?;
        match connection.create_physical_slot(&self.slot).await {
            Ok(()) => tracing::info!(mirror = %self.name, slot = %self.slot, "made the slot"),
            // duplicate_object
            Err(error) if error.sqlstate() == Some("42710") => {}
            Err(error) => return Err(error.into()),
        }
        let (timeline, start) = match have {
            Some(have) => (Timeline(have.timeline), have.durable),
            None => self.beginning(&mut connection, &system, segment).await?,
        };
        let server_version = connection.server_version();
        Ok(Begun { connection, system, segment, server_version, timeline, start })
    }

    /// Where a far end that has nothing begins: with the oldest log that the slot keeps, so that a
    /// standby made a moment ago can follow.
    async fn beginning(
        &self,
        connection: &mut Connection,
        system: &IdentifySystem,
        segment: SegmentBytes,
    ) -> Result<(Timeline, Lsn), MirrorError> {
        let timeline = Timeline(system.timeline);
        let now = segment.floor(system.xlogpos);
        if connection.server_version() < 150_000 {
            return Ok((timeline, now));
        }
        let slot = connection.read_physical_slot(&self.slot).await?;
        let slot = slot.filter(|slot| slot.timeline == Some(timeline.0));
        let restart = slot.and_then(|slot| slot.restart);
        Ok((timeline, restart.map_or(now, |restart| segment.floor(restart))))
    }

    async fn flow(
        &self,
        site: &str,
        begun: Begun,
        mut sender: Sender,
        receiver: Receiver,
    ) -> Result<(), MirrorError> {
        {
            let mut status = self.status();
            status.connected = true;
            status.principal_end = begun.system.xlogpos;
            status.received = begun.start;
            status.far = FarPositions {
                written: begun.start,
                durable: begun.start,
                applied: status.far.applied,
            };
        }
        tracing::info!(mirror = %self.name, %site, start = %begun.start, timeline = %begun.timeline, "log flows");
        let (queue, messages) = mpsc::channel(QUEUE_MESSAGES_MAX);
        let (far, positions) = watch::channel(self.status().far);
        let (needs, feedback) = watch::channel(Feedback::default());
        let sent = AtomicU64::new(begun.start.0);
        let mut hearing = std::pin::pin!(hear(site, receiver, &sent, far, needs));
        let mut is_heard_out = false;
        let ended = tokio::select! {
            ended = self.stream(begun, queue, positions, feedback) => ended,
            ended = send(&mut sender, messages, &sent) => ended,
            ended = &mut hearing => {
                is_heard_out = true;
                ended
            }
        };
        if let Err(error) = &ended
            && !matches!(error, MirrorError::Link(_))
        {
            let why = error.to_string().into();
            let failed = FromNear::Failed { passes: error.is_transient(), why };
            let parting = async {
                sender.send_parts(&failed.encode()).await?;
                sender.finish().await
            };
            // The far end hangs up when it has heard: the receiver stays until then.
            let _ = tokio::time::timeout(LAST_WORDS, async {
                tokio::select! {
                    _ = parting => {}
                    _ = &mut hearing, if !is_heard_out => {}
                }
            })
            .await;
        }
        ended
    }

    /// Timeline after timeline.
    async fn stream(
        &self,
        begun: Begun,
        queue: mpsc::Sender<FromNear>,
        mut positions: watch::Receiver<FarPositions>,
        mut feedback: watch::Receiver<Feedback>,
    ) -> Result<(), MirrorError> {
        let Begun { mut connection, system, mut timeline, mut start, .. } = begun;
        for ancestor in 2..=timeline.0.min(system.timeline) {
            pass_history(&mut connection, Timeline(ancestor), &queue).await?;
        }
        let mut packer = Packer::new(self.compression)
            .map_err(|error| MirrorError::Io { action: "compress log", error })?;
        loop {
            self.status().timeline = timeline.0;
            let server = connection.server().to_owned();
            let mut stream = connection
                .start_physical_replication(Some(&self.slot), start, Some(timeline.0))
                .await
                .map_err(|error| explain(&server, error.into()))?;
            self.check_namesakes(stream.backend_pid()).await?;
            let mut flow = Flow {
                near: self,
                timeline,
                received: start,
                packer: &mut packer,
                queue: &queue,
                told: Reply::default(),
            };
            let flowed = flow.run(&mut stream, &mut positions, &mut feedback).await;
            start = flowed.map_err(|error| explain(&server, error))?;
            let Some(switch) = stream.timeline_switch() else {
                return Err(MirrorError::Ended { server: stream.server().to_owned() });
            };
            stream.finish().await;
            if switch.start != start {
                let what = format!(
                    "timeline {timeline} was left at {}, and its log came up to {start}",
                    switch.start
                );
                return Err(MirrorError::WrongPrincipal { server, what });
            }
            tracing::info!(mirror = %self.name, timeline = switch.timeline, at = %start, "the principal has a new timeline");
            connection = self.connect().await?;
            timeline = Timeline(switch.timeline);
            pass_history(&mut connection, timeline, &queue).await?;
            hand_on(&queue, FromNear::Switch { timeline, at: start }).await;
        }
    }
}

/// Log that the principal has dropped does not come back by waiting.
fn explain(server: &str, error: MirrorError) -> MirrorError {
    match error {
        // undefined_file: the segment has been removed. A slot that is lost is an
        // object_not_in_prerequisite_state.
        MirrorError::Principal(error) if matches!(error.sqlstate(), Some("58P01" | "55000")) => {
            let what = format!(
                "it has dropped log that the far end still needs ({error}): \
                 max_slot_wal_keep_size was exceeded, or the slot was dropped. To begin anew: stop \
                 the far site's node, remove the mirror's spool there, drop the slot, start, and \
                 make the standbys anew. Raise max_slot_wal_keep_size, or keep the far site \
                 connected"
            );
            MirrorError::WrongPrincipal { server: server.to_owned(), what }
        }
        error => error,
    }
}

/// How long a refused far end has to take in why.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// A principal that can be streamed from.
struct Begun {
    connection: Connection,
    system: IdentifySystem,
    segment: SegmentBytes,
    server_version: u32,
    timeline: Timeline,
    start: Lsn,
}

impl Begun {
    fn answer(&self, promise: Promise) -> Answer {
        Answer::Follows {
            system_id: self.system.system_id.clone(),
            timeline: self.timeline.0,
            start: self.start,
            segment_bytes: self.segment.get(),
            server_version: self.server_version,
            applied_counts: promise == Promise::FarApplied,
        }
    }
}

/// Tells a far end why it gets no log.
///
/// # Errors
/// The link's.
pub async fn refuse(session: Session, why: &MirrorError) -> Result<(), MirrorError> {
    let (sender, _receiver) = session.split();
    say_no(sender, why).await
}

async fn say_no(mut sender: Sender, why: &MirrorError) -> Result<(), MirrorError> {
    let answer = Answer::Refused { why: why.to_string(), passes: why.is_transient() };
    sender.send(json(&answer)).await?;
    let _ = tokio::time::timeout(LAST_WORDS, sender.finish()).await;
    Ok(())
}

fn json(answer: &Answer) -> Bytes {
    serde_json::to_vec(answer).unwrap_or_default().into()
}

/// `16MB`, `1GB`, as the server shows it.
fn parse_segment_size(text: &str) -> Option<SegmentBytes> {
    let at = text.find(|c: char| !c.is_ascii_digit())?;
    let number: u64 = text[..at].parse().ok()?;
    let unit = match &text[at..] {
        "B" => 1,
        "kB" => 1 << 10,
        "MB" => 1 << 20,
        "GB" => 1 << 30,
        _ => return None,
    };
    SegmentBytes::new(number.checked_mul(unit)?)
}

async fn pass_history(
    connection: &mut Connection,
    timeline: Timeline,
    queue: &mpsc::Sender<FromNear>,
) -> Result<(), MirrorError> {
    match connection.timeline_history(timeline.0).await {
        Ok(text) => {
            hand_on(queue, FromNear::History { timeline, text: text.into() }).await;
            Ok(())
        }
        // A timeline that this one does not come from.
        Err(error) if error.sqlstate() == Some("58P01") => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// When the queue is closed, the task behind it has ended and says why.
async fn hand_on(queue: &mpsc::Sender<FromNear>, message: FromNear) {
    if queue.send(message).await.is_err() {
        std::future::pending::<()>().await;
    }
}

async fn send(
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

async fn hear(
    site: &str,
    mut receiver: Receiver,
    sent: &AtomicU64,
    far: watch::Sender<FarPositions>,
    needs: watch::Sender<Feedback>,
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
        }
    }
    Err(protocol("no more, without a reason".to_owned()))
}

/// One timeline's log on its way.
struct Flow<'a> {
    near: &'a Near,
    timeline: Timeline,
    received: Lsn,
    packer: &'a mut Packer,
    queue: &'a mpsc::Sender<FromNear>,
    told: Reply,
}

impl Flow<'_> {
    /// Until the stream ends; where.
    async fn run(
        &mut self,
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
        let queue = self.queue;
        loop {
            tokio::select! {
                // What the principal waits for comes first.
                biased;
                // It is due once in a while only, and must not wait for a pause in the log.
                _ = tick.tick() => {
                    let far = *positions.borrow();
                    self.reply(stream, far, true).await?;
                }
                changed = positions.changed(), if !is_async => {
                    if changed.is_err() {
                        std::future::pending::<()>().await;
                    }
                    let far = *positions.borrow_and_update();
                    self.reply(stream, far, false).await?;
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
                message = stream.next(), if pending.is_none() => {
                    let Some(first) = message? else { return Ok(self.received) };
                    let (batch, asked) = self.take(first, stream)?;
                    pending = batch;
                    waiting_since = Instant::now();
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
                .pack(&pieces)
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
        status.received = self.received;
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
        let reply = self.near.promise.reply(self.received, far, told);
        if reply == self.told && !anyway {
            return Ok(());
        }
        fault::point("mirror.before-acknowledge");
        stream.send_status(reply.written, reply.flushed, reply.applied, false).await?;
        fault::point("mirror.after-acknowledge");
        self.told = reply;
        self.near.status().acknowledged = reply.flushed;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_promises_what_the_mode_says() {
        let far = FarPositions { written: Lsn(30), durable: Lsn(20), applied: Lsn(10) };
        let received = Lsn(40);
        for (promise, flushed) in [
            (Promise::Far, 20),
            (Promise::FarSync, 20),
            (Promise::FarApplied, 10),
            (Promise::Async, 20),
        ] {
            let reply = promise.reply(received, far, Lsn::ZERO);
            let expected = Reply { written: Lsn(30), flushed: Lsn(flushed), applied: Lsn(10) };
            assert_eq!(reply, expected, "{promise:?}");
        }
        let nobody = FarPositions { applied: Lsn::ZERO, ..far };
        assert_eq!(Promise::FarApplied.reply(received, nobody, Lsn::ZERO).flushed, Lsn::ZERO);
    }

    #[test]
    fn a_standby_that_is_further_behind_takes_nothing_back() {
        let mut told = Lsn::ZERO;
        let mut tell = |durable, applied| {
            let far = FarPositions { written: Lsn(100), durable: Lsn(durable), applied };
            told = Promise::FarApplied.reply(Lsn(100), far, told).flushed;
            told.0
        };
        assert_eq!(tell(30, Lsn(20)), 20);
        // An older one connects: commits wait until it has come as far.
        assert_eq!(tell(40, Lsn(5)), 20);
        assert_eq!(tell(50, Lsn(19)), 20);
        assert_eq!(tell(50, Lsn(31)), 31);
        // Another session, and nothing was heard of standbys yet.
        assert_eq!(tell(50, Lsn::ZERO), 31);
        // What is not durable is told by nobody.
        assert_eq!(tell(25, Lsn(60)), 25);
    }

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

    #[test]
    fn segment_sizes_are_read_as_servers_show_them() {
        assert_eq!(parse_segment_size("16MB"), SegmentBytes::new(16 << 20));
        assert_eq!(parse_segment_size("1GB"), SegmentBytes::new(1 << 30));
        for text in ["", "16", "MB", "3MB", "16 MB"] {
            assert_eq!(parse_segment_size(text), None, "{text}");
        }
    }
}
