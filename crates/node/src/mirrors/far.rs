//! The far end: keeps the log in a spool and serves it to standbys.

mod holding;
mod noting;
mod promote;
mod reserve;
mod waiting;

pub(crate) use promote::Takeover;

use super::{NearSide, ratio, redo_queue, with_warning};
use crate::agents::{self, AgentFailure, lock};
use crate::config::mirrors::FarMirror;
use crate::report::{MirrorReport, StandbyReport};
use crate::sites::protocol::Wanted;
use crate::supervisor::{LINK_BACK_OFF_MAX, Notice, Outcome, supervise};
use crate::switch::Switch;
use farshore_mirror::MirrorError;
use farshore_mirror::keep::{Far, Forgotten};
use farshore_mirror::serve::Server;
use farshore_mirror::spool::SpoolError;
use farshore_model::Lsn;
use holding::Holding;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use waiting::Waiting;

/// How often segments that nobody needs are looked for: their files serve for segments to come.
const FORGET_EVERY: Duration = Duration::from_millis(500);
/// How long standbys replay until it is told how fast.
const APPLY_RATE_EVERY: Duration = Duration::from_secs(2);

/// A mirror whose far end is here.
pub(crate) struct FarAgent {
    config: FarMirror,
    far: Far,
    /// Its spool could be opened, or there was none yet.
    is_usable: bool,
    near_side: Arc<NearSide>,
    /// Halts what takes log in.
    intake: Switch,
    holding: Holding,
    /// Who asks the near end something beside the log.
    asking: tokio::sync::Mutex<()>,
    apply_rate: Mutex<ApplyRate>,
    waiting: Mutex<Waiting>,
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
            holding: Holding::default(),
            asking: tokio::sync::Mutex::default(),
            apply_rate: Mutex::default(),
            waiting: Mutex::default(),
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
                tokio::select! {
                    _ = end => {}
                    // On another thread than what may wait for the disk.
                    () = self.clone().watch_waiting() => {}
                }
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
        let agent = || async {
            match outcome(self.session().await) {
                Outcome::Refused(why) => Outcome::Refused(format!(
                    "{why}. It is asked again once a minute, and at once by farshore mirror resume \
                     SITE.toml {}, here",
                    self.config.name
                )),
                outcome => outcome,
            }
        };
        let progress = || (self.durable(), 0);
        let notice = |notice: Notice<'_>| agents::note(&self.failure, &notice);
        let name = self.config.name.clone();
        supervise(("mirror", LINK_BACK_OFF_MAX), name, stop, agent, progress, notice).await;
    }

    /// It asks for no log by itself, or seldom.
    pub fn has_stopped(&self) -> bool {
        !self.far.status().connected && lock(&self.failure).stopped().is_some()
    }

    /// Asks for log at once, where it had stopped.
    ///
    /// # Errors
    /// Why not, for a person.
    pub async fn resume(&self) -> Result<String, String> {
        let name = &self.config.name;
        if let Some(spool) = self.far.spool().filter(|spool| spool.closed().is_some()) {
            return Err(format!(
                "mirror \"{name}\" was promoted, and takes in nothing any more. If it is to carry log \
                 to this site once more, from the principal that it has now: stop this node, remove \
                 {}, start it, and seed the standbys",
                spool.folder().display()
            ));
        }
        if !self.has_stopped() {
            return Err(format!(
                "mirror \"{name}\" has its far end here, which has not stopped: it asks for log by \
                 itself. If the mirror was dropped, resume it at the site of its near end"
            ));
        }
        if !self.is_usable {
            let why = lock(&self.failure).stopped().unwrap_or_default().to_owned();
            return Err(format!(
                "the spool of mirror \"{name}\" could not be opened when this node started: {why}"
            ));
        }
        // It would end with the same again: what the disk has is gone through when a spool is opened.
        if let Some(spool) = self.far.spool().filter(|spool| spool.has_failed()) {
            return Err(format!(
                "the spool of mirror \"{name}\" has failed, and takes nothing in until it is opened \
                 again: {}. See to its disk, and start this node again (farshore run): what a failed \
                 write left is mended then",
                spool.failure()
            ));
        }
        // That it had stopped is noted nowhere.
        let Ok(()) = self.intake.resume(|| Ok::<(), std::convert::Infallible>(())).await;
        tracing::info!(mirror = %name, "resumed");
        Ok(format!("mirror \"{name}\" asks for log again; farshore status shows what comes of it"))
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
        supervise(kind, name, stop, agent, || (Lsn::ZERO, 0), notice).await;
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
        let unsaved = spool.as_ref().and_then(|spool| {
            let error = spool.unsaved_close()?;
            Some(promote::unsaved_close(&self.config.name, spool.folder(), &error))
        });
        let (state, error) = match (failure.stopped(), trouble, status.connected) {
            _ if closed => ("promoted", unsaved),
            // Where log flows again, somebody has mended it.
            (Some(error), _, false) => ("stopped", Some(error.to_owned())),
            (_, Some(trouble), _) if trouble.is_out_of_room() => {
                ("out of room", Some(trouble.to_string()))
            }
            (_, Some(trouble), _) => ("disk error", Some(trouble.to_string())),
            (_, None, true) => ("receiving", None),
            (None, None, false) => match failure.retrying() {
                Some(error) => ("retrying", Some(error.to_owned())),
                None => ("starting", None),
            },
        };
        // Not within what follows: it would be held while the list of standbys is asked for, by
        // whom those who report wait for it.
        let applied = self.far.standbys.seen().borrow().applied;
        let damage = spool.as_ref().and_then(|spool| spool.damage());
        let damage = damage.map(|damage| damage.to_string());
        // It may be what ended the session.
        let damage = damage.filter(|damage| error.as_ref() != Some(damage));
        let error = with_warning(error, damage);
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
            report.error = with_warning(report.error.take(), self.waits());
            if let Some(whose) = self.holding.whose().filter(|_| !closed) {
                let holds = format!("nothing is taken in while {whose} is promoted");
                report.error = with_warning(report.error.take(), Some(holds));
            }
            if is_waited_for && status.connected && !self.far.standbys.does_any_replay() {
                let waits =
                    "no standby streams, and in mode far-applied commits wait until one has \
                             replayed them: start it"
                        .to_owned();
                report.error = with_warning(report.error.take(), Some(waits));
            }
            report.error = with_warning(report.error.take(), self.far.standbys.refused_lately());
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
        // By the near end: its principal, say, is another server for as long as an address leads there.
        Err(error @ (MirrorError::Refused { .. } | MirrorError::NearEnd { .. })) => {
            Outcome::Refused(error.to_string())
        }
        // So is one with another history, or whose log does not go on from here.
        Err(
            error @ MirrorError::Spool(
                SpoolError::OtherHistory { .. }
                | SpoolError::NoHistory { .. }
                | SpoolError::Diverged { .. }
                | SpoolError::DoesNotFollow { .. },
            ),
        ) => Outcome::Refused(error.to_string()),
        Err(error) => Outcome::Permanent(error.to_string()),
    }
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

    /// Another server may answer by the principal's name for a while: the right one comes back.
    #[test]
    fn another_history_is_asked_for_again() {
        let timeline = farshore_mirror::wal::Timeline(2);
        let error = SpoolError::OtherHistory { timeline, path: "00000002.history".into() };
        assert!(matches!(outcome(Err(error.into())), Outcome::Refused(_)));
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
