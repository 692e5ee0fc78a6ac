//! Mirrors: their ends that are here, kept running.

mod bounds;
mod left_behind;
mod near_side;
mod note;
mod noting;
mod promote;
mod reserve;

pub(crate) use bounds::{resume_without_node, why_dropped};
pub(crate) use left_behind::left_behind;
pub(crate) use near_side::NearSide;
pub(crate) use promote::Takeover;

use crate::agents::{self, AgentFailure, lock};
use crate::config::mirrors::{FarMirror, NearMirror};
use crate::report::{MirrorReport, StandbyReport};
use crate::sites::protocol::Wanted;
use crate::supervisor::{LINK_BACK_OFF_MAX, Notice, Outcome, supervise};
use crate::switch::Switch;
use bounds::{Bounds, Leeway, Seen};
use farshore_link::Session;
use farshore_mirror::MirrorError;
use farshore_mirror::keep::{Far, Forgotten};
use farshore_mirror::receive::{self, Near, NearStatus};
use farshore_mirror::relay::compression::Compression;
use farshore_mirror::relay::message::MirrorRequest;
use farshore_mirror::seed::{self, BackupRequest, SeedRequest};
use farshore_mirror::serve::Server;
use farshore_model::Lsn;
use note::Note;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::JoinSet;

/// Data to the principal of a direct mirror stays unacknowledged no longer.
const SILENT_MAX: Duration = Duration::from_secs(15);

/// How often segments that nobody needs are looked for: their files serve for segments to come.
const FORGET_EVERY: Duration = Duration::from_millis(500);
/// How long standbys replay until it is told how fast.
const APPLY_RATE_EVERY: Duration = Duration::from_secs(2);

/// Base backups of a principal at a time, for clients of its mirror's far end.
const BACKUPS_MAX: usize = 2;

/// A mirror whose near end is here. It runs while its far end is connected.
pub(crate) struct NearAgent {
    near: Near,
    /// Why the last session ended.
    failure: Mutex<Option<String>>,
    /// What its far end told of a promotion there, after its last session.
    promoted: Mutex<Option<String>>,
    /// Its far end is here too.
    direct: bool,
    peer: Mutex<Option<String>>,
    bounds: Bounds,
    seen: Mutex<Seen>,
    /// The notes that outlive the node.
    dropped: Note,
    resumed: Note,
    slot: Note,
    /// Held by who drops the mirror or resumes it.
    dropping: tokio::sync::Mutex<()>,
    /// Each takes a walsender of the principal, of which the log needs one.
    backups: Semaphore,
    /// The session that runs ends when this changes.
    end_session: watch::Sender<u64>,
}

impl NearAgent {
    /// Blocks on the disk.
    pub fn new(mirror: &NearMirror, data_dir: &Path) -> NearAgent {
        let dropped = Note::dropped(data_dir, &mirror.name);
        let resumed = Note::resumed(data_dir, &mirror.name);
        let seen =
            Seen { kept_bytes: None, dropped: dropped.read(), leeway: Leeway::read(&resumed) };
        if let Some(why) = &seen.dropped {
            tracing::error!(mirror = %mirror.name, "{why}");
        }
        NearAgent {
            near: Near {
                name: mirror.name.clone(),
                principal: reached_by(mirror),
                slot: mirror.slot.clone(),
                application_name: mirror.application_name.clone(),
                promise: mirror.promise,
                compression: mirror.compression,
                status: Mutex::new(NearStatus::default()),
            },
            failure: Mutex::default(),
            promoted: Mutex::default(),
            direct: mirror.direct,
            peer: Mutex::default(),
            bounds: Bounds { warn_behind: mirror.warn_behind, drop_behind: mirror.drop_behind },
            seen: Mutex::new(seen),
            dropped,
            resumed,
            slot: Note::slot(data_dir, &mirror.name),
            dropping: tokio::sync::Mutex::default(),
            backups: Semaphore::new(BACKUPS_MAX),
            end_session: watch::Sender::new(0),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.near.name
    }

    /// Its far end is here too.
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Gives its far end what a session was opened for.
    pub async fn answer(&self, session: Session, wanted: Wanted) -> Result<(), MirrorError> {
        match wanted {
            Wanted::Mirror(request) => self.serve(session, request).await,
            Wanted::Seed(request) => self.seed(session, &request).await,
            Wanted::Backup(request) => self.back_up(session, &request).await,
            Wanted::MirrorEnd(asked) => {
                if asked.closed {
                    self.hear_of_promotion(session.peer_site());
                }
                self.near.tell_end(session).await
            }
            // Not a mirror's.
            Wanted::Log { .. } | Wanted::Source { .. } | Wanted::Measure {} => Ok(()),
        }
    }

    /// Nothing says so to the principal, which keeps log for a mirror that will never ask for it.
    fn hear_of_promotion(&self, site: &str) {
        let Near { name, slot, application_name, .. } = &self.near;
        let told = format!(
            "site \"{site}\" has promoted the standby of this mirror, or is about to: nothing more is \
             carried, and commits that wait for \"{application_name}\" do not return. Take that name \
             out of synchronous_standby_names if the old principal is to go on by itself; take \
             [mirror.{name}] out of the site file here; and drop the slot, which keeps log for \
             nobody: SELECT pg_drop_replication_slot('{slot}') there"
        );
        *lock(&self.peer) = Some(site.to_owned());
        let before = lock(&self.promoted).replace(told.clone());
        if before.as_ref() != Some(&told) {
            tracing::warn!(mirror = %name, "{told}");
        }
    }

    /// Serves its far end until the session ends.
    async fn serve(&self, session: Session, request: MirrorRequest) -> Result<(), MirrorError> {
        *lock(&self.peer) = Some(session.peer_site().to_owned());
        // One that was begun anew.
        *lock(&self.promoted) = None;
        let connected = Connected(self);
        let mut end = self.end_session.subscribe();
        // Looked at after that: a drop that comes now ends the session.
        if let Some(why) = self.why_dropped() {
            let dropped = MirrorError::Dropped(why);
            receive::refuse(session, &dropped).await?;
            return Err(dropped);
        }
        self.note_slot();
        let ended = tokio::select! {
            ended = self.near.serve(session, request) => ended,
            _ = end.changed() => Ok(()),
        };
        drop(connected);
        *lock(&self.failure) = ended.as_ref().err().map(ToString::to_string);
        ended
    }

    /// So that who takes the mirror out of the site file is told of the slot. Log flows meanwhile,
    /// whatever the disk here does.
    fn note_slot(&self) {
        let text = format!("{}\n{}", self.near.slot, self.near.principal.redacted());
        let (mirror, note) = (self.near.name.clone(), self.slot.clone());
        tokio::task::spawn_blocking(move || {
            if note.read().as_ref() != Some(&text)
                && let Err(error) = note.write(&text)
            {
                tracing::warn!(%mirror, "{error}");
            }
        });
    }

    /// Gives its far end the principal's files.
    async fn seed(&self, session: Session, request: &SeedRequest) -> Result<(), MirrorError> {
        let (mirror, site) = (&self.near.name, session.peer_site().to_owned());
        if let Some(why) = self.why_dropped() {
            let dropped = MirrorError::Dropped(why);
            seed::refuse(session, &dropped).await?;
            return Err(dropped);
        }
        tracing::info!(%mirror, %site, "a standby is seeded");
        seed::give(&self.near.principal, self.near.compression, session, request).await?;
        tracing::info!(%mirror, %site, "a standby was given all files");
        Ok(())
    }

    /// Gives a client of its far end's server a base backup of the principal.
    async fn back_up(&self, session: Session, request: &BackupRequest) -> Result<(), MirrorError> {
        let (mirror, site) = (&self.near.name, session.peer_site().to_owned());
        if let Some(why) = self.why_dropped() {
            let dropped = MirrorError::Dropped(why);
            seed::decline(session, &dropped).await?;
            return Err(dropped);
        }
        let Ok(_permit) = self.backups.try_acquire() else {
            let why = format!(
                "{BACKUPS_MAX} base backups are being taken through mirror \"{mirror}\" already"
            );
            let busy = MirrorError::NearEnd { why, passes: true };
            seed::decline(session, &busy).await?;
            return Err(busy);
        };
        tracing::info!(%mirror, %site, "a base backup of the principal is taken");
        seed::pass(&self.near.principal, self.near.compression, session, request).await?;
        tracing::info!(%mirror, %site, "a base backup of the principal was handed on");
        Ok(())
    }

    fn why_dropped(&self) -> Option<String> {
        lock(&self.seen).dropped.clone()
    }

    /// Adds what the near end knows to the report of a far end that is here too: a direct mirror has
    /// one report.
    fn add_to(&self, report: &mut MirrorReport) {
        let (status, seen) = (*self.near.status(), lock(&self.seen).clone());
        report.mode = Some(self.near.promise.as_str().to_owned());
        report.acknowledged = status.acknowledged.to_string();
        report.principal_kept_bytes = seen.kept_bytes;
        // There is no link.
        (report.link_bytes, report.ratio) = (0, None);
        if report.state != "promoted" {
            let written: Lsn = report.written.parse().unwrap_or_default();
            // While nothing is heard of it, the slot tells what the principal has.
            let kept = seen.kept_bytes.filter(|_| !status.connected).unwrap_or(0);
            report.principal_end = status.principal_end.to_string();
            report.send_queue_bytes = status.principal_end.bytes_since(written).max(kept);
        }
        match seen.dropped {
            // A far end that gets no log for that reason says so as well.
            Some(why) if report.error.as_ref().is_none_or(|error| error.contains(&why)) => {
                (report.state, report.error) = ("dropped".to_owned(), Some(why));
            }
            Some(why) => {
                report.state = "dropped".to_owned();
                report.error = with_warning(report.error.take(), Some(why));
            }
            None => {
                let warning = self.bounds.warning(seen.kept_bytes);
                report.error = with_warning(report.error.take(), warning);
            }
        }
    }

    pub fn report(&self) -> MirrorReport {
        let status = *self.near.status();
        let seen = lock(&self.seen).clone();
        let state = match (&seen.dropped, status.connected) {
            (Some(_), _) => "dropped",
            (None, true) => "streaming",
            (None, false) => "waiting",
        };
        let promoted = lock(&self.promoted).clone();
        let failure = promoted.or_else(|| lock(&self.failure).clone());
        let failure = failure.filter(|_| !status.connected);
        MirrorReport {
            name: self.near.name.clone(),
            end: "near".to_owned(),
            site: lock(&self.peer).clone(),
            state: state.to_owned(),
            error: seen.dropped.or(with_warning(failure, self.bounds.warning(seen.kept_bytes))),
            kept_bytes: seen.kept_bytes,
            mode: Some(self.near.promise.as_str().to_owned()),
            timeline: status.timeline,
            principal_end: status.principal_end.to_string(),
            received: status.received.to_string(),
            written: status.far.written.to_string(),
            durable: status.far.durable.to_string(),
            applied: status.far.applied.to_string(),
            acknowledged: status.acknowledged.to_string(),
            log_bytes: status.log_bytes,
            link_bytes: status.packed_bytes,
            ratio: ratio(status.log_bytes, status.packed_bytes),
            compression: status.method.map(|method| match self.near.compression {
                Compression::Auto => format!("auto: {method}"),
                Compression::Fixed(_) => method.to_string(),
            }),
            packing_ms: milliseconds(status.packing),
            flow_control_ms: milliseconds(status.flow_control),
            send_queue_bytes: status.received.bytes_since(status.far.written),
            redo_queue_bytes: redo_queue(status.far.durable, status.far.applied),
            ..MirrorReport::default()
        }
    }
}

/// How the principal is reached. By a direct mirror over a network that a link would cross: a peer
/// that answers nothing is found as soon as by a link, unless something else was said.
fn reached_by(mirror: &NearMirror) -> farshore_pg::Config {
    let mut principal = mirror.principal.clone();
    let usual = farshore_pg::Keepalive::default().user_timeout;
    if mirror.direct && principal.keepalive.user_timeout == usual {
        principal.keepalive.user_timeout = SILENT_MAX;
    }
    principal
}

/// A session may end by being dropped too.
struct Connected<'a>(&'a NearAgent);

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        self.0.near.status().connected = false;
    }
}

fn with_warning(failure: Option<String>, warning: Option<String>) -> Option<String> {
    match (failure, warning) {
        (Some(failure), Some(warning)) => Some(format!("{warning}. {failure}")),
        (failure, warning) => failure.or(warning),
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Nothing is known of standbys that never were.
fn redo_queue(durable: Lsn, applied: Lsn) -> Option<u64> {
    (applied > Lsn::ZERO).then(|| durable.bytes_since(applied))
}

/// How fast standbys replay, from one look to the next.
#[derive(Debug, Default)]
struct ApplyRate {
    looked: Option<(Instant, Lsn)>,
    bytes_per_s: Option<u64>,
}

impl ApplyRate {
    fn look(&mut self, now: Instant, applied: Lsn) {
        if let Some((before, from)) = self.looked.filter(|(_, from)| *from > Lsn::ZERO) {
            let seconds = now.saturating_duration_since(before).as_secs_f64();
            let rate = applied.bytes_since(from) as f64 / seconds.max(f64::MIN_POSITIVE);
            self.bytes_per_s = Some(rate.round() as u64);
        }
        self.looked = Some((now, applied));
    }
}

fn ratio(log_bytes: u64, link_bytes: u64) -> Option<f64> {
    (link_bytes > 0).then(|| (100.0 * log_bytes as f64 / link_bytes as f64).round() / 100.0)
}

/// A mirror whose far end is here.
pub(crate) struct FarAgent {
    config: FarMirror,
    far: Far,
    /// Its spool could be opened, or there was none yet.
    is_usable: bool,
    near_side: Arc<NearSide>,
    /// Halts what takes log in.
    intake: Switch,
    apply_rate: Mutex<ApplyRate>,
    failure: Mutex<AgentFailure>,
    /// The same, of the server for standbys.
    server_failure: Mutex<AgentFailure>,
}

impl FarAgent {
    /// Opens its spool, if there is one. A spool that cannot be used stops this mirror, and nothing
    /// else of the site. Blocks on the disk.
    pub fn open(mirror: &FarMirror, data_dir: &Path, near_side: NearSide) -> FarAgent {
        let folder = data_dir.join("mirrors").join(&mirror.name);
        let failure = Mutex::default();
        let opened = Far::open(&mirror.name, folder.clone());
        let is_usable = opened.is_ok();
        let far = opened.unwrap_or_else(|error| {
            let error = error.to_string();
            tracing::error!(mirror = %mirror.name, "stopped: {error}");
            agents::note(&failure, &Notice::Stopped(&error));
            Far::without_spool(&mirror.name, folder)
        });
        FarAgent {
            config: mirror.clone(),
            far,
            is_usable,
            near_side: Arc::new(near_side),
            intake: Switch::new(false),
            apply_rate: Mutex::default(),
            failure,
            server_failure: Mutex::default(),
        }
    }

    /// Runs until `stop` turns true, on a thread of its own: its tasks do so little for each piece of
    /// log that waking another thread for it would cost more.
    pub async fn run(self: Arc<Self>, stop: watch::Receiver<bool>) {
        let (began, beginning) = oneshot::channel::<std::io::Result<()>>();
        let (ended, end) = oneshot::channel::<()>();
        let (agent, halting) = (self.clone(), stop.clone());
        let thread = std::thread::Builder::new().name("mirror".to_owned()).spawn(move || {
            match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => {
                    let _ = began.send(Ok(()));
                    runtime.block_on(agent.run_here(halting));
                    // Before what may still wait for a disk is waited for.
                    drop(ended);
                }
                Err(error) => {
                    let _ = began.send(Err(error));
                }
            }
        });
        let began = match thread {
            Ok(_) => beginning.await.unwrap_or(Ok(())),
            Err(error) => Err(error),
        };
        match began {
            Ok(()) => {
                let _ = end.await;
            }
            Err(error) => {
                tracing::warn!(mirror = %self.config.name, "has no thread of its own: {error}");
                self.run_here(stop).await;
            }
        }
    }

    async fn run_here(self: Arc<Self>, mut stop: watch::Receiver<bool>) {
        let mut parts = JoinSet::new();
        if self.is_usable {
            parts.spawn(self.clone().keep(stop.clone()));
            parts.spawn(self.clone().serve(stop.clone()));
            parts.spawn(self.clone().forget());
            parts.spawn(self.clone().note_durable());
        }
        let _ = stop.wait_for(|stop| *stop).await;
        parts.shutdown().await;
    }

    async fn keep(self: Arc<Self>, stop: watch::Receiver<bool>) {
        let run = |halted: watch::Receiver<bool>| {
            let agent = self.clone();
            async move {
                let mut halting = halted.clone();
                tokio::select! {
                    () = agent.take_in(halted) => {}
                    // A session may be given up at any point: what is not durable is sent again.
                    _ = halting.wait_for(|halted| *halted) => {}
                }
            }
        };
        self.intake.keep(stop, run).await;
    }

    async fn take_in(&self, stop: watch::Receiver<bool>) {
        if self.far.spool().is_some_and(|spool| spool.closed().is_some()) {
            return self.tell_closed().await;
        }
        let agent = || async { outcome(self.session().await) };
        let position = || self.durable();
        let notice = |notice: Notice<'_>| agents::note(&self.failure, &notice);
        let name = self.config.name.clone();
        supervise(("mirror", LINK_BACK_OFF_MAX), name, stop, agent, position, notice).await;
    }

    async fn session(&self) -> Result<(), MirrorError> {
        let request = self.far.request().await?;
        let wanted = Wanted::Mirror(request.clone());
        let kept = self.near_side.talk(wanted, |session| self.far.keep(session, &request)).await?;
        kept.map_err(|error| match error {
            MirrorError::Refused { why, passes, .. } if self.config.upstream.is_none() => {
                MirrorError::NearEnd { why, passes }
            }
            error => error,
        })
    }

    async fn serve(self: Arc<Self>, stop: watch::Receiver<bool>) {
        let agent = || async {
            let spool = self.far.spool.subscribe();
            let FarMirror { name, listen, access, .. } = &self.config;
            let (standbys, near_end) = (self.far.standbys.clone(), self.near_side.clone());
            match Server::bind(listen, access, name, spool, standbys, near_end).await {
                Ok(server) => {
                    let address = server.local_address();
                    tracing::info!(mirror = %name, %address, "standbys may connect");
                    lock(&self.server_failure).begin();
                    server.run().await;
                    Outcome::Done
                }
                Err(error) => outcome(Err(error)),
            }
        };
        let notice = |notice: Notice<'_>| agents::note(&self.server_failure, &notice);
        let name = self.config.name.clone();
        let kind = ("mirror server", LINK_BACK_OFF_MAX);
        supervise(kind, name, stop, agent, || Lsn::ZERO, notice).await;
    }

    async fn forget(self: Arc<Self>) {
        let mut every = tokio::time::interval(FORGET_EVERY);
        let mut rate = tokio::time::interval(APPLY_RATE_EVERY);
        loop {
            tokio::select! {
                _ = every.tick() => {}
                _ = rate.tick() => {
                    let applied = self.far.standbys.seen().borrow().applied;
                    lock(&self.apply_rate).look(Instant::now(), applied);
                    continue;
                }
            }
            let agent = self.clone();
            let forgotten = tokio::task::spawn_blocking(move || {
                agent.far.forget(agent.config.spool_bytes_max, agent.config.drop_behind)
            });
            match forgotten.await {
                Ok(Ok(Forgotten { segments, slots })) => {
                    if segments > 0 {
                        tracing::debug!(mirror = %self.config.name, segments, "removed from the spool");
                    }
                    for slot in slots {
                        tracing::error!(
                            mirror = %self.config.name, %slot,
                            "the slot kept more than drop_behind and keeps no log any more: seed \
                             its standby anew"
                        );
                    }
                }
                Ok(Err(error)) => tracing::warn!(mirror = %self.config.name, "{error}"),
                Err(_) => tracing::error!(mirror = %self.config.name, "looking for segments died"),
            }
        }
    }

    fn durable(&self) -> Lsn {
        self.far.spool().map_or(Lsn::ZERO, |spool| spool.positions().borrow().durable)
    }

    pub fn report(&self) -> MirrorReport {
        let status = *self.far.status();
        let spool = self.far.spool();
        let trouble = spool.as_ref().and_then(|spool| spool.trouble());
        let (failure, server) = (lock(&self.failure), lock(&self.server_failure));
        let closed = spool.as_ref().is_some_and(|spool| spool.closed().is_some());
        let (state, error) = match (failure.stopped(), trouble, status.connected) {
            _ if closed => ("promoted", None),
            (Some(error), _, _) => ("stopped", Some(error.to_owned())),
            (None, Some(trouble), _) => ("out of room", Some(trouble.to_string())),
            (None, None, true) => ("receiving", None),
            (None, None, false) => match failure.retrying() {
                Some(error) => ("retrying", Some(error.to_owned())),
                None => ("starting", None),
            },
        };
        // Not within what follows: it would be held while the list of standbys is asked for, by
        // whom those who report wait for it.
        let applied = self.far.standbys.seen().borrow().applied;
        let damage = spool.as_ref().and_then(|spool| spool.damage());
        let error = damage.map(|damage| damage.to_string()).or(error);
        let error = error.or_else(|| server.stopped().or(server.retrying()).map(str::to_owned));
        let mut report = MirrorReport {
            name: self.config.name.clone(),
            end: "far".to_owned(),
            site: self.config.upstream.clone(),
            direct: self.config.upstream.is_none(),
            state: state.to_owned(),
            error,
            principal_end: status.principal_end.to_string(),
            applied: applied.to_string(),
            acknowledged: status.acknowledged.to_string(),
            log_bytes: status.log_bytes,
            link_bytes: status.packed_bytes,
            ratio: ratio(status.log_bytes, status.packed_bytes),
            standbys: self.far.standbys.reports().into_iter().map(standby).collect(),
            ..MirrorReport::default()
        };
        if let Some(spool) = spool {
            let positions = *spool.positions().borrow();
            let hardening = spool.hardening();
            report.timeline = positions.timeline.0;
            report.received = positions.written.to_string();
            report.written = positions.written.to_string();
            report.durable = positions.durable.to_string();
            report.redo_queue_bytes = redo_queue(positions.durable, applied);
            report.apply_bytes_per_s = lock(&self.apply_rate).bytes_per_s;
            report.syncs = hardening.syncs;
            report.harden_ms = (hardening.syncs > 0).then(|| {
                let mean = hardening.total.as_secs_f64() * 1_000.0 / hardening.syncs as f64;
                (mean * 1_000.0).round() / 1_000.0
            });
            report.slots = self.slots(&spool);
            report.kept_bytes = report.slots.iter().map(|slot| slot.kept_bytes).max();
            report.error = with_warning(report.error.take(), self.warning_of(&report.slots));
            let is_waited_for = self.far.standbys.are_waited_for() && applied < self.durable();
            if is_waited_for && status.connected && !self.far.standbys.is_any_there() {
                let waits =
                    "no standby streams, and in mode far-applied commits wait until one has \
                             replayed them: start it"
                        .to_owned();
                report.error = with_warning(report.error.take(), Some(waits));
            }
            let segments = spool.segments().map_or(0, |segments| segments.len() as u64);
            report.spool_bytes = segments * spool.identity().segment.get();
        }
        if let NearSide::Direct { near, .. } = &*self.near_side {
            near.add_to(&mut report);
        }
        report
    }
}

fn standby(standby: farshore_mirror::serve::StandbyReport) -> StandbyReport {
    StandbyReport {
        application_name: standby.application_name,
        peer: standby.peer.to_string(),
        slot: standby.slot,
        sent: standby.sent.to_string(),
        flushed: standby.flushed.to_string(),
        applied: standby.applied.to_string(),
    }
}

fn outcome(ended: Result<(), MirrorError>) -> Outcome {
    match ended {
        Ok(()) => Outcome::Done,
        Err(error) if error.is_transient() => Outcome::Transient(error.to_string()),
        Err(error) => Outcome::Permanent(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_link::certificates::Authority;
    use farshore_link::{Dialer, Identity, IdentityFiles, LinkOptions};

    #[test]
    fn the_apply_rate_is_of_what_was_replayed_between_two_looks() {
        let (mut rate, begin) = (ApplyRate::default(), Instant::now());
        rate.look(begin, Lsn::ZERO);
        rate.look(begin + Duration::from_secs(2), Lsn(500));
        assert_eq!(rate.bytes_per_s, None, "there was no standby");
        rate.look(begin + Duration::from_secs(4), Lsn(2_500));
        assert_eq!(rate.bytes_per_s, Some(1_000));
        rate.look(begin + Duration::from_secs(6), Lsn(2_500));
        assert_eq!(rate.bytes_per_s, Some(0));
        assert_eq!(redo_queue(Lsn(30), Lsn(10)), Some(20));
        assert_eq!(redo_queue(Lsn(30), Lsn::ZERO), None);
    }

    #[tokio::test]
    async fn a_damaged_spool_stops_its_mirror_only() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::create(&folder.path().join("authority")).unwrap();
        let made = authority.issue("far", 30, folder.path()).unwrap();
        let identity = Identity::load(&IdentityFiles {
            certificate: made.certificate,
            key: made.key,
            authorities: authority.certificate(),
            revoked: Some(authority.revoked()),
        });
        let identity = identity.unwrap();
        let open = |name: &str| {
            let mirror = FarMirror {
                name: name.to_owned(),
                upstream: Some("near".to_owned()),
                listen: "127.0.0.1:0".to_owned(),
                access: farshore_mirror::serve::Access::default(),
                spool_bytes_max: 0,
                warn_behind: 0,
                drop_behind: None,
                standby: None,
            };
            let options = LinkOptions::default();
            let dialer = Dialer::new("127.0.0.1:1", "near", &identity, options).unwrap();
            FarAgent::open(&mirror, folder.path(), NearSide::Link(dialer))
        };
        let damaged = folder.path().join("mirrors/damaged");
        std::fs::create_dir_all(&damaged).unwrap();
        std::fs::write(damaged.join("spool.state"), "x").unwrap();
        let (damaged, sound) = (open("damaged"), open("sound"));
        let report = damaged.report();
        assert_eq!(report.state, "stopped");
        assert!(report.error.is_some_and(|error| error.contains("is damaged")));
        assert_eq!(sound.report().state, "starting");
        // It ends when it is told to, and not before.
        let (stop, stopping) = watch::channel(false);
        let running = tokio::spawn(Arc::new(damaged).run(stopping));
        tokio::task::yield_now().await;
        assert!(!running.is_finished());
        stop.send_replace(true);
        running.await.unwrap();
    }
}
