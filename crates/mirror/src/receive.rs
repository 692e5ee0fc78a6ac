//! The near end: a physical replication client of the principal whose bytes go on the link as they
//! arrive. It keeps nothing: what the far end has not made durable, the principal's slot keeps.
//!
//! ```text
//! principal ─ XLogData ─► batch ─► pack ─► link ─► far end
//!     ◄─ written, flushed, applied ─ by the mode ◄─ how far it is there
//! ```

mod begun_anew;
mod flow;
mod promise;
mod turns;

pub use begun_anew::BegunAnew;
pub use promise::Promise;
pub use turns::Turns;

use crate::descent;
use crate::error::MirrorError;
use crate::history::History;
use crate::relay::compression::{Compression, Method, Packer};
use crate::relay::message::{
    Answer, FarPositions, Feedback, FromNear, Have, Left, MirrorRequest, Tail, Turn,
};
use crate::wal::{SegmentBytes, Timeline};
use begun_anew::Beginning;
use bytes::Bytes;
use farshore_fault as fault;
use farshore_link::{Receiver, Sender, Session};
use farshore_model::Lsn;
use farshore_pg::replication::{IdentifySystem, ReplicationStream, StreamMessage};
use farshore_pg::{Config, Connection, Mode};
use flow::{Flow, hear, send};
use promise::Reply;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Messages that wait for the link. More wait in the principal.
const QUEUE_MESSAGES_MAX: usize = 4;

/// How a mirror's near end goes.
#[derive(Clone, Copy, Debug, Default)]
pub struct NearStatus {
    /// A far end is connected and log flows.
    pub connected: bool,
    /// The principal's process that sends it.
    pub walsender: Option<i32>,
    /// The principal takes nobody in any more, and ends once its log is at the far end.
    pub is_shutting_down: bool,
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
    /// Since when that has not moved although more log is here; none while all is acknowledged.
    pub unmoved_since: Option<Instant>,
    /// Whose log the principal has, the cluster's system identifier, when it last said so.
    pub system_id: Option<u64>,
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

impl NearStatus {
    /// Log has arrived up to there.
    fn receive(&mut self, received: Lsn, now: Instant) {
        self.received = received;
        let waits = received > self.acknowledged;
        self.unmoved_since = waits.then(|| self.unmoved_since.unwrap_or(now));
    }

    /// The principal was told this as flushed.
    fn acknowledge(&mut self, flushed: Lsn, now: Instant) {
        if flushed != self.acknowledged {
            (self.acknowledged, self.unmoved_since) = (flushed, None);
        }
        self.receive(self.received, now);
    }

    /// For how long commits wait that are not acknowledged, if that is so long that something is
    /// wrong.
    pub fn waits(&self, now: Instant) -> Option<Duration> {
        let waits = now.saturating_duration_since(self.unmoved_since?);
        (waits > WAITS_MAX).then_some(waits)
    }
}

/// Log that is not acknowledged within this is worth a word: what commits wait for takes as long as a
/// line and two disks.
pub const WAITS_MAX: Duration = Duration::from_secs(10);
/// The same where commits wait for replay. A principal may have flushed the beginning of a record, up
/// to where a page ends, which nobody can replay; it flushes the rest within 15 s, though nobody
/// commits (`LOG_SNAPSHOT_INTERVAL_MS`).
pub const REPLAY_WAITS_MAX: Duration = Duration::from_secs(20);

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
    /// Commits that wait beside a spool that was begun anew.
    pub begun_anew: BegunAnew,
    /// By which a copy of the far end's spool is told from it.
    pub turns: Arc<Turns>,
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
            let mut status = self.status();
            (status.acknowledged, status.far) = (Lsn::ZERO, FarPositions::default());
        }
        sender.send(json(&begun.answer(self.promise))).await?;
        let (is_slot_new, before) = (begun.is_slot_new, self.status().log_bytes);
        let ended = self.flow(&site, begun, &request, sender, receiver).await;
        // Another session's counts as well: where log flows the slot is somebody's.
        let received_any = {
            let mut status = self.status();
            (status.connected, status.walsender) = (false, None);
            status.log_bytes > before
        };
        let is_of_no_use =
            matches!(ended, Err(MirrorError::WrongPrincipal { .. } | MirrorError::Behind { .. }));
        if is_slot_new && !received_any && is_of_no_use {
            self.drop_slot().await;
        }
        ended
    }

    /// A far end that cannot go on from here has no use for a slot that was made for it a moment ago,
    /// and that would keep log from then on, without an end. Nor where the server may get there yet: it
    /// may as well be an old principal, or the wrong one, and is asked again soon.
    async fn drop_slot(&self) {
        let drop = async {
            let mut connection = self.connect().await?;
            let until = tokio::time::Instant::now() + LAST_WORDS;
            loop {
                match connection.drop_slot(&self.slot, false).await {
                    // object_in_use: by the walsender of the session that has just ended. Whoever
                    // has it for longer needs it.
                    Err(error)
                        if error.sqlstate() == Some("55006")
                            && tokio::time::Instant::now() < until =>
                    {
                        tokio::time::sleep(DROP_AGAIN).await;
                    }
                    dropped => return Ok::<_, MirrorError>(dropped?),
                }
            }
        };
        match drop.await {
            Ok(()) => {
                tracing::info!(mirror = %self.name, slot = %self.slot, "dropped the slot again")
            }
            Err(error) => tracing::warn!(
                mirror = %self.name, slot = %self.slot,
                "the slot keeps log that nobody can use: {error}"
            ),
        }
    }

    /// Whether `synchronous_standby_names` would take another one for this mirror: a commit that it
    /// lets return need not be at the far end. Looked at before anything is acknowledged; who has
    /// the slot is alone in that already.
    async fn check_namesakes(&self, own: i32) -> Result<(), MirrorError> {
        match self.find_namesake(own).await {
            Ok(None) => Ok(()),
            Ok(Some(namesake)) => Err(namesake),
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

    /// One that has come since the log began to flow. The log goes on: commits that the other one
    /// lets return would be missing here for longer.
    ///
    /// # Errors
    /// When the principal cannot be asked.
    pub async fn later_namesake(&self) -> Result<Option<MirrorError>, farshore_pg::Error> {
        let walsender = self.status().walsender;
        let Some(own) = walsender else { return Ok(None) };
        let found = self.find_namesake(own).await?;
        // Else it may be the next one of our own.
        Ok(found.filter(|_| self.status().walsender == walsender))
    }

    /// Another standby with this one's name; `own` is the process that sends to this one.
    async fn find_namesake(&self, own: i32) -> Result<Option<MirrorError>, farshore_pg::Error> {
        if self.promise == Promise::Async || fault::defect("mirror-misses-namesakes") {
            return Ok(None);
        }
        let mut connection = Connection::connect(&self.principal, Mode::Sql).await?;
        let sql = "SELECT pid, client_addr FROM pg_stat_replication \
                   WHERE lower(application_name) = lower($1) AND pid <> $2::int4";
        let (name, own) = (Some(self.application_name.as_str()), own.to_string());
        let rows = connection.query(sql, &[name, Some(&own)]).await?;
        let server = connection.server().to_owned();
        connection.close().await;
        Ok(rows.first().map(|other| MirrorError::Namesake {
            server,
            application_name: self.application_name.clone(),
            pid: other.get(0).unwrap_or_default().to_owned(),
            from: other.get(1).unwrap_or("its own socket").to_owned(),
        }))
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
        self.status().system_id = system.system_id.parse().ok();
        if let Some(have) = have.filter(|have| have.system_id != system.system_id) {
            return Err(wrong(format!(
                "its system identifier is {}, and the mirror's spool holds the log of {}: it is \
                 another cluster. Point the mirror to the right one, or remove the spool's folder \
                 at the far site to begin anew",
                system.system_id, have.system_id
            )));
        }
        let acknowledged = self.status().far.durable;
        if let Some(have) = have.filter(|have| have.durable < acknowledged) {
            tracing::warn!(
                mirror = %self.name, acknowledged = %acknowledged, durable = %have.durable,
                "the far end has less than it has acknowledged: its spool was set back, or its disk \
                 lies about what is durable. The rest is sent again, if the principal still has it"
            );
        }
        self.turns.check(&self.name, have)?;
        let shown = connection.simple_query("SHOW wal_segment_size").await?;
        let shown = shown.first().and_then(|set| set.rows.first()?.get(0).map(str::to_owned));
        let shown = shown.unwrap_or_default();
        let segment = parse_segment_size(&shown)
            .ok_or_else(|| wrong(format!("its wal_segment_size is \"{shown}\"")))?;
        if let Some(have) = have {
            descent::check(&mut connection, Timeline(system.timeline), have, segment).await?;
        }
        let was_pending = self.expect_waiting(have.is_none())?;
        let is_slot_new = match connection.create_physical_slot(&self.slot).await {
            Ok(()) => {
                tracing::info!(mirror = %self.name, slot = %self.slot, "made the slot");
                self.forget_told();
                true
            }
            // duplicate_object
            Err(error) if error.sqlstate() == Some("42710") => false,
            Err(error) => return Err(error.into()),
        };
        // One that has log may still go on where that ends, which gives the slot back what it keeps.
        if !is_slot_new && have.is_none() {
            self.refuse_lost_slot(&mut connection).await?;
        }
        let (timeline, start, is_kept) = match have {
            Some(have) => (Timeline(have.timeline), have.durable, true),
            None => self.beginning(&mut connection, &system, segment).await?,
        };
        let begins = match have {
            Some(_) => None,
            None => Some(Beginning {
                lacks_untold: is_slot_new || !is_kept || was_pending,
                // One that is made anew is made by somebody who knows.
                lacks_told: !is_slot_new && self.was_told()?,
            }),
        };
        self.look_for_waiting(start, begins, &mut connection).await?;
        let server_version = connection.server_version();
        let turn = self.turns.offer(have);
        Ok(Begun {
            connection,
            system,
            segment,
            server_version,
            timeline,
            start,
            turn,
            is_slot_new,
        })
    }

    /// Up to 15 a principal streams by a slot that is lost, and keeps nothing for it.
    async fn refuse_lost_slot(&self, connection: &mut Connection) -> Result<(), MirrorError> {
        if connection.server_version() >= 160_000 {
            return Ok(());
        }
        let Some((_, Some(status))) = self.slot_by_sql().await else { return Ok(()) };
        if status != "lost" {
            return Ok(());
        }
        let why = format!("the slot \"{}\" is lost, and keeps nothing", self.slot);
        Err(log_dropped(connection.server(), &why))
    }

    /// Where a far end that has nothing begins: with the oldest log that the slot keeps, so that a
    /// standby made a moment ago can follow; and whether that is what the slot keeps.
    async fn beginning(
        &self,
        connection: &mut Connection,
        system: &IdentifySystem,
        segment: SegmentBytes,
    ) -> Result<(Timeline, Lsn, bool), MirrorError> {
        let timeline = Timeline(system.timeline);
        let now = segment.floor(system.xlogpos);
        let place = if connection.server_version() < 150_000 {
            self.kept_from().await.map(|restart| (timeline.0, restart))
        } else {
            let slot = connection.read_physical_slot(&self.slot).await?;
            slot.and_then(|slot| slot.timeline.zip(slot.restart))
        };
        let Some((kept_on, restart)) = place else { return Ok((timeline, now, false)) };
        let start = segment.floor(restart);
        if kept_on != timeline.0 {
            // The segment that a timeline begins in is its own as a whole.
            let text = match connection.timeline_history(timeline.0).await {
                Ok(text) => text,
                // It has no such file.
                Err(error) if error.sqlstate() == Some("58P01") => String::new(),
                Err(error) => return Err(error.into()),
            };
            let history = History::parse(timeline, &text).unwrap_or_default();
            let begins = history.begins(timeline, timeline).map(|begins| segment.floor(begins));
            if begins != Some(start) {
                return Ok((timeline, now, false));
            }
        }
        Ok((timeline, start, true))
    }

    /// Where the slot begins, of 14, which tells it by SQL alone. `None` also where this role may not
    /// ask.
    async fn kept_from(&self) -> Option<Lsn> {
        self.slot_by_sql().await?.0
    }

    /// Where the slot begins, and its `wal_status`. `None` also where this role may not ask.
    async fn slot_by_sql(&self) -> Option<(Option<Lsn>, Option<String>)> {
        let asked = async {
            let mut connection = Connection::connect(&self.principal, Mode::Sql).await?;
            let sql = "SELECT restart_lsn, wal_status FROM pg_catalog.pg_replication_slots \
                       WHERE slot_name = $1";
            let rows = connection.query(sql, &[Some(&self.slot)]).await?;
            connection.close().await;
            let row = rows.first();
            let restart = row.and_then(|row| row.get(0)?.parse().ok());
            Ok::<_, farshore_pg::Error>((
                restart,
                row.and_then(|row| row.get(1)).map(str::to_owned),
            ))
        };
        match asked.await {
            Ok(told) => Some(told),
            Err(error) => {
                tracing::debug!(mirror = %self.name, %error, "what the slot keeps");
                None
            }
        }
    }

    async fn flow(
        &self,
        site: &str,
        begun: Begun,
        request: &MirrorRequest,
        mut sender: Sender,
        receiver: Receiver,
    ) -> Result<(), MirrorError> {
        {
            let mut status = self.status();
            status.connected = true;
            status.is_shutting_down = false;
            status.principal_end = begun.system.xlogpos;
            status.unmoved_since = None;
            status.receive(begun.start, Instant::now());
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
        let offered = begun.turn;
        let turn_noted = || self.turns.confirm(offered);
        let hearing = hear(site, receiver, &sent, (far, needs), turn_noted);
        let mut hearing = std::pin::pin!(hearing);
        let mut is_heard_out = false;
        let ended = tokio::select! {
            ended = self.stream(begun, request, queue, positions, feedback) => ended,
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
        request: &MirrorRequest,
        queue: mpsc::Sender<FromNear>,
        mut positions: watch::Receiver<FarPositions>,
        mut feedback: watch::Receiver<Feedback>,
    ) -> Result<(), MirrorError> {
        let Begun { mut connection, is_slot_new, mut system, mut timeline, mut start, .. } = begun;
        // They are handed on once it is known that the log is the one that the far end has: from
        // another server they would be refused there, in words that say less.
        let mut histories = Vec::new();
        for ancestor in 2..=timeline.0.min(system.timeline) {
            histories.extend(history_of(&mut connection, Timeline(ancestor)).await?);
        }
        // Only the first piece is behind what the far end had before.
        let mut tail = request.have.as_ref().and_then(|have| have.tail);
        let mut packer = Packer::new(self.compression)
            .map_err(|error| MirrorError::Io { action: "compress log", error })?;
        if request.restores {
            packer = packer.reducing(request.restores_pages);
        }
        loop {
            self.status().timeline = timeline.0;
            let server = connection.server().to_owned();
            let place = (timeline, start);
            let (mut stream, first) = match tail.take() {
                Some(tail) => {
                    // Else a slot of ours, or its history, speaks for it.
                    let must = is_slot_new && system.timeline == timeline.0;
                    self.start_compared(connection, &system, place, (&tail, must)).await?
                }
                None => (self.start_stream(connection, &system, place).await?, None),
            };
            self.check_namesakes(stream.backend_pid()).await?;
            for history in histories.drain(..) {
                hand_on(&queue, history).await;
            }
            self.status().walsender = Some(stream.backend_pid());
            let mut flow = Flow {
                near: self,
                timeline,
                received: start,
                packer: &mut packer,
                queue: &queue,
                told: Reply::default(),
            };
            let flowed = flow.run(first, &mut stream, &mut positions, &mut feedback).await;
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
            // Of the next stream's process nobody knows yet.
            self.status().walsender = None;
            connection = self.connect().await?;
            timeline = Timeline(switch.timeline);
            (system.timeline, system.xlogpos) = (switch.timeline, switch.start);
            if let Some(history) = history_of(&mut connection, timeline).await? {
                hand_on(&queue, history).await;
            }
            hand_on(&queue, FromNear::Switch { timeline, at: start }).await;
        }
    }
}

impl Near {
    async fn start_stream(
        &self,
        connection: Connection,
        system: &IdentifySystem,
        (timeline, start): (Timeline, Lsn),
    ) -> Result<ReplicationStream, MirrorError> {
        let server = connection.server().to_owned();
        connection
            .start_physical_replication(Some(&self.slot), start, Some(timeline.0))
            .await
            .map_err(|error| explain_start(&server, system, (timeline, start), error))
    }

    /// Starts the stream where the far end's log ends, after a look that the principal has the end
    /// of it; with what has come of the log behind it by then. Where it has that no more, it is
    /// believed, unless it `must` be looked at.
    async fn start_compared(
        &self,
        connection: Connection,
        system: &IdentifySystem,
        (timeline, start): (Timeline, Lsn),
        (tail, must): (&Tail, bool),
    ) -> Result<(ReplicationStream, Option<StreamMessage>), MirrorError> {
        let server = connection.server().to_owned();
        let begun = connection
            .start_physical_replication(Some(&self.slot), tail.start, Some(timeline.0))
            .await;
        let compared = match begun {
            Ok(mut stream) => {
                let first = descent::compare(&mut stream, timeline, tail, start).await;
                first.map(|first| (stream, first))
            }
            Err(error) => Err(error.into()),
        };
        match compared {
            // The slot keeps whole segments, from the one that `start` is in: where one begins
            // there, the end of the one before may be gone.
            Err(MirrorError::Principal(error)) if error.sqlstate() == Some("58P01") && !must => {
                tracing::warn!(
                    mirror = %self.name, %start,
                    "the principal has dropped the log before that, so whether it is the one that \
                     the far end has is not looked at: {error}"
                );
                let connection = self.connect().await?;
                Ok((self.start_stream(connection, system, (timeline, start)).await?, None))
            }
            Err(MirrorError::Principal(error)) => {
                Err(explain_start(&server, system, (timeline, start), error))
            }
            compared => compared,
        }
    }
}

/// Log that a principal does not have is refused with words that name neither it nor a way out. They
/// may be in any language: what the server said of itself before tells which case it is.
fn explain_start(
    server: &str,
    system: &IdentifySystem,
    (timeline, start): (Timeline, Lsn),
    error: farshore_pg::Error,
) -> MirrorError {
    // internal_error: both are reported without a code of their own.
    let what = match error.sqlstate() {
        Some("XX000") if system.timeline < timeline.0 => format!(
            "it is on timeline {}, and the far end's spool is on {timeline}: it is an old principal, \
             or a standby that is behind, whose log is taken once it is there. Point `principal` to \
             the server that is on timeline {timeline} ({error})",
            system.timeline
        ),
        Some("XX000") if system.xlogpos < start => format!(
            "its log ends at {}, before {start}, up to where the far end's spool has it: it was set \
             back, or is another server than before, or has not recovered all of its log yet, which \
             is waited for. If that log is gone there, promote the mirror's standby, which has it \
             (farshore mirror promote), or point `principal` to a server that has it; or give it up, \
             with the commits in it: stop the far site's node, remove the mirror's spool there, \
             start, and make the standbys anew ({error})",
            system.xlogpos
        ),
        _ => return explain(server, error.into()),
    };
    MirrorError::Behind { server: server.to_owned(), what }
}

/// Log that the principal has dropped does not come back by waiting.
fn explain(server: &str, error: MirrorError) -> MirrorError {
    match error {
        // undefined_file: the segment has been removed. A slot that is lost is an
        // object_not_in_prerequisite_state.
        MirrorError::Principal(error) if matches!(error.sqlstate(), Some("58P01" | "55000")) => {
            log_dropped(server, &error)
        }
        error => error,
    }
}

fn log_dropped(server: &str, why: &dyn std::fmt::Display) -> MirrorError {
    let what = format!(
        "it has dropped log that the far end still needs ({why}): max_slot_wal_keep_size was \
         exceeded, or the slot was dropped. To begin anew: stop the far site's node, remove the \
         mirror's spool there, drop the slot, start, and make the standbys anew. Raise \
         max_slot_wal_keep_size, or keep the far site connected"
    );
    MirrorError::WrongPrincipal { server: server.to_owned(), what }
}

/// How often a slot that is in use is tried again.
const DROP_AGAIN: Duration = Duration::from_millis(100);

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
    /// What the far end is to note.
    turn: Turn,
    /// The slot was made in this session.
    is_slot_new: bool,
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
            nothing_counts: promise == Promise::Async,
            turn: Some(self.turn),
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
    let left = match why {
        MirrorError::LeftBefore { at, .. } => Some(Left { at: *at }),
        _ => None,
    };
    let answer = Answer::Refused { why: why.to_string(), passes: why.is_transient(), left };
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

async fn history_of(
    connection: &mut Connection,
    timeline: Timeline,
) -> Result<Option<FromNear>, MirrorError> {
    match connection.timeline_history(timeline.0).await {
        Ok(text) => Ok(Some(FromNear::History { timeline, text: text.into() })),
        // A timeline that this one does not come from.
        Err(error) if error.sqlstate() == Some("58P01") => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// When the queue is closed, the task behind it has ended and says why.
async fn hand_on(queue: &mpsc::Sender<FromNear>, message: FromNear) {
    if queue.send(message).await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_wire::backend::ServerError;

    #[test]
    fn a_principal_that_is_not_as_far_as_the_spool_is_named_and_waited_for() {
        let explain = |code: &str, timeline, xlogpos| {
            let system_id = "7".to_owned();
            let system = IdentifySystem { system_id, timeline, xlogpos, dbname: None };
            let error = ServerError { code: code.into(), ..ServerError::default() };
            let error = farshore_pg::Error::Server(Box::new(error));
            explain_start("postgres://a", &system, (Timeline(3), Lsn(0x300_0000)), error)
        };
        let old = explain("XX000", 1, Lsn(0x500_0000));
        assert!(old.is_transient(), "{old}");
        let old = old.to_string();
        let said =
            "the principal postgres://a: it is on timeline 1, and the far end's spool is on 3";
        assert!(old.starts_with(said) && old.contains("Point `principal`"), "{old}");
        let set_back = explain("XX000", 3, Lsn(0x200_0000)).to_string();
        let said = "its log ends at 0/2000000, before 0/3000000";
        assert!(set_back.contains(said) && set_back.contains("set back"), "{set_back}");
        let other = explain("XX000", 3, Lsn(0x300_0000)).to_string();
        assert!(other.starts_with("the principal: "), "{other}");
        let dropped = explain("58P01", 1, Lsn(0x200_0000)).to_string();
        assert!(dropped.contains("it has dropped log"), "{dropped}");
    }

    #[test]
    fn log_that_is_not_acknowledged_is_noticed_and_nothing_else() {
        let (begun, mut status) = (Instant::now(), NearStatus::default());
        let at = |seconds| begun + Duration::from_secs(seconds);
        status.receive(Lsn(100), at(0));
        assert_eq!(status.waits(at(10)), None);
        assert_eq!(status.waits(at(11)), Some(Duration::from_secs(11)));
        // Far behind, and getting on.
        status.acknowledge(Lsn(50), at(11));
        status.receive(Lsn(200), at(15));
        assert_eq!(status.waits(at(20)), None);
        // The same once more is no news.
        status.acknowledge(Lsn(50), at(21));
        assert_eq!(status.waits(at(22)), Some(Duration::from_secs(11)));
        // Nobody writes.
        status.acknowledge(Lsn(200), at(23));
        assert_eq!((status.waits(at(900)), status.unmoved_since), (None, None));
        status.receive(Lsn(300), at(900));
        assert_eq!(status.waits(at(905)), None);
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
