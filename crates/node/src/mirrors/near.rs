//! The near end: gives its far end the principal's log.

mod bounds;

pub(crate) use bounds::{LET_LOOK, kept_bytes, resume_without_node, why_dropped};

use super::note::Note;
use super::{
    FarAgent, HAS_PROMOTED, NOTHING_ACKNOWLEDGED, nothing_is_acknowledged, ratio, redo_queue,
    with_warning,
};
use crate::agents::lock;
use crate::config::mirrors::NearMirror;
use crate::report::MirrorReport;
use crate::sites::protocol::{AskEnd, Wanted};
use bounds::{Bounds, Leeway, Seen};
use farshore_link::Session;
use farshore_mirror::MirrorError;
use farshore_mirror::receive::{self, BegunAnew, Near, Promise, REPLAY_WAITS_MAX, Turns};
use farshore_mirror::relay::compression::Compression;
use farshore_mirror::relay::end::EndAnswer;
use farshore_mirror::relay::message::MirrorRequest;
use farshore_mirror::seed::{self, BackupRequest, SeedRequest};
use farshore_mirror::spool::{SlotName, Spool};
use farshore_model::Lsn;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, watch};

/// Data to the principal of a direct mirror stays unacknowledged no longer.
const SILENT_MAX: Duration = Duration::from_secs(15);

/// Base backups of a principal at a time, for clients of its mirror's far end.
const BACKUPS_MAX: usize = 2;

/// Standbys of a mirror that are seeded at a time.
const SEEDINGS_MAX: usize = 2;
/// One that is begun anew finds the one before it gone within this.
const SEEDING_ENDS_WITHIN: Duration = Duration::from_secs(5);

/// A principal that may be a spool of this node's is asked whose log it has for so long.
const SEEN_WITHIN: Duration = Duration::from_secs(2);
const SEE_AGAIN: Duration = Duration::from_millis(100);

/// A mirror whose near end is here. It runs while its far end is connected.
pub(crate) struct NearAgent {
    near: Near,
    /// Why the last session ended.
    failure: Mutex<Option<String>>,
    /// What its far end told of a promotion there, after its last session.
    promoted: Mutex<Option<String>>,
    /// Its far end is here too.
    direct: bool,
    /// What it streams from is the spool of another mirror, whose far end is here.
    own_spool: OnceLock<Weak<FarAgent>>,
    peer: Mutex<Option<String>>,
    bounds: Bounds,
    seen: Mutex<Seen>,
    /// The notes that outlive the node.
    dropped: Note,
    resumed: Note,
    /// Where notes are.
    data_dir: PathBuf,
    /// Held by who drops the mirror or resumes it.
    dropping: tokio::sync::Mutex<()>,
    /// Each takes a walsender of the principal, of which the log needs one.
    backups: Semaphore,
    seedings: Semaphore,
    /// The session that runs ends when this changes.
    end_session: watch::Sender<u64>,
}

impl NearAgent {
    /// Words on a mirror that goes on.
    fn warning(&self, seen: &Seen, is_connected: bool) -> Option<String> {
        with_warning(self.held(), seen.warning(&self.bounds, is_connected))
    }

    /// That commits that wait for it do not return, if that is so. Where they are held that says why
    /// itself.
    fn waits(&self, is_connected: bool) -> Option<String> {
        let waits = self.near.status().waits(Instant::now())?;
        if !is_connected || self.near.begun_anew_at().is_some() {
            return None;
        }
        let what = match self.near.promise {
            Promise::FarApplied if waits <= REPLAY_WAITS_MAX => return None,
            Promise::FarApplied => "durable at its far end and replayed there",
            Promise::Far | Promise::FarSync => "durable at its far end",
            Promise::Async => return None,
        };
        Some(nothing_is_acknowledged(waits, what))
    }

    /// That nothing is acknowledged beside a spool that was begun anew, if that is so.
    fn held(&self) -> Option<String> {
        self.near.held()
    }

    /// Why it was dropped, and what is held all the same.
    fn dropped(&self, seen: &Seen) -> Option<String> {
        let dropped = seen.dropped.clone()?;
        with_warning(self.held(), Some(dropped))
    }

    /// Blocks on the disk.
    pub fn new(mirror: &NearMirror, data_dir: &Path) -> NearAgent {
        let dropped = Note::dropped(data_dir, &mirror.name);
        let resumed = Note::resumed(data_dir, &mirror.name);
        let leeway = Leeway::read(&resumed);
        let seen = Seen { dropped: dropped.read(), leeway, ..Seen::default() };
        if let Some(why) = &seen.dropped {
            tracing::error!(mirror = %mirror.name, "{why}");
        }
        let near = Near {
            name: mirror.name.clone(),
            principal: reached_by(mirror),
            slot: mirror.slot.clone(),
            application_name: mirror.application_name.clone(),
            promise: mirror.promise,
            compression: mirror.compression,
            begun_anew: BegunAnew::noted_in(Note::begun_anew(data_dir, &mirror.name)),
            turns: Arc::new(Turns::noted_in(Note::turn(data_dir, &mirror.name))),
            status: Mutex::default(),
        };
        near.recall_begun_anew();
        NearAgent {
            near,
            failure: Mutex::default(),
            promoted: Mutex::default(),
            direct: mirror.direct,
            own_spool: OnceLock::new(),
            peer: Mutex::default(),
            bounds: Bounds { warn_behind: mirror.warn_behind, drop_behind: mirror.drop_behind },
            seen: Mutex::new(seen),
            dropped,
            resumed,
            data_dir: data_dir.to_owned(),
            dropping: tokio::sync::Mutex::default(),
            backups: Semaphore::new(BACKUPS_MAX),
            seedings: Semaphore::new(SEEDINGS_MAX),
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

    /// It was dropped, and waits to be resumed.
    pub fn is_dropped(&self) -> bool {
        self.why_dropped().is_some()
    }

    /// Why a far end gets nothing, whatever else goes on: its spool is a copy of the one that has gone
    /// on with the mirror. That one's session is not in its way.
    pub fn refuses(&self, wanted: &Wanted) -> Option<MirrorError> {
        let Wanted::Mirror(request) = wanted else { return None };
        let refused = self.near.turns.check(&self.near.name, request.have.as_ref()).err()?;
        *lock(&self.failure) = Some(refused.to_string());
        Some(refused)
    }

    /// Gives its far end what a session was opened for.
    pub async fn answer(&self, session: Session, wanted: Wanted) -> Result<(), MirrorError> {
        match wanted {
            Wanted::Mirror(request) => self.serve(session, request).await,
            Wanted::Seed(request) => self.seed(session, &request).await,
            Wanted::Backup(request) => self.back_up(session, &request).await,
            Wanted::MirrorEnd(asked) => {
                let answer = self.end(session.peer_site(), &asked).await;
                self.near.tell_end(session, &answer).await
            }
            // Not a mirror's.
            Wanted::Log { .. } | Wanted::Source { .. } | Wanted::Measure {} => Ok(()),
        }
    }

    /// Its principal is where standbys of this mirror connect, which is here too.
    pub fn streams_from(&self, spool: &Arc<FarAgent>) {
        // Once, when the site is opened.
        let _ = self.own_spool.set(Arc::downgrade(spool));
    }

    /// Where its principal's log ends. While its standby is promoted, nothing more is taken into a
    /// spool here that it streams from, and acknowledged there.
    async fn end(&self, site: &str, asked: &AskEnd) -> EndAnswer {
        let Some((first, spool)) = self.own_spool().await else {
            if asked.closed {
                self.hear_of_promotion(site, None);
            }
            return self.near.end().await;
        };
        let whose = format!("a standby of mirror \"{}\" at site \"{site}\"", self.near.name);
        let holds = match (asked.hold, asked.closed) {
            (Some(true), true) => first.close_for(&whose).await.map(|()| true),
            (Some(true), false) => first.hold_for(&whose).await.map(|()| true),
            (Some(false), _) => {
                first.let_go();
                Ok(false)
            }
            (None, _) => Ok(false),
        };
        let holds = holds.unwrap_or_else(|why| {
            tracing::error!(mirror = %self.near.name, "mirror \"{}\" goes on while {whose} is promoted: {why}", first.name());
            false
        });
        if asked.closed {
            self.hear_of_promotion(site, Some(&first));
        }
        EndAnswer { holds, ..self.near.end_of_spool(&spool) }
    }

    /// The spool here that it streams from. Addresses may deceive: one that has not the log that the
    /// principal had when it was last asked is not held up, nor closed, for a promotion elsewhere.
    async fn own_spool(&self) -> Option<(Arc<FarAgent>, Arc<Spool>)> {
        let first = self.own_spool.get().and_then(Weak::upgrade)?;
        let spool = first.spool()?;
        let seen = || self.near.status().system_id;
        // The spool's server is there soon, where the node was started a moment ago.
        let asked = tokio::time::timeout(SEEN_WITHIN, async {
            while seen().is_none() {
                let _ = self.near.end().await;
                tokio::time::sleep(SEE_AGAIN).await;
            }
        });
        if seen().is_none() {
            let _ = asked.await;
        }
        (seen() == Some(spool.identity().system_id)).then_some((first, spool))
    }

    /// Nothing says so to the principal, which keeps log for a mirror that will never ask for it.
    fn hear_of_promotion(&self, site: &str, spool: Option<&FarAgent>) {
        let Near { name, slot, application_name, .. } = &self.near;
        let promoted =
            format!("site \"{site}\" {HAS_PROMOTED}, or is about to: nothing more is carried");
        // A direct mirror has no site that it is granted to.
        let grant = match self.direct {
            true => String::new(),
            false => format!(", and out of `mirrors` under [downstream.{site}]"),
        };
        let told = match spool {
            None => format!(
                "{promoted}, and commits that wait for \"{application_name}\" do not return. Take \
                 that name out of synchronous_standby_names if the old principal is to go on by \
                 itself; take [mirror.{name}] out of the site file here{grant}; and drop the slot, which \
                 keeps log for nobody: SELECT pg_drop_replication_slot('{slot}') there. If that was \
                 an earlier promotion, and the mirror carries log there once more: stop the node of \
                 site \"{site}\", remove data_dir/mirrors/{name} there, start it, and seed the standbys"
            ),
            Some(spool) => {
                let first = spool.name();
                let what = if spool.is_closed() {
                    "takes in nothing more either: commits at its principal that wait for it do not \
                     return, and the site of its near end says what to do there"
                } else {
                    "goes on: commits at its principal that wait for it return, and are not on the \
                     server that was promoted"
                };
                format!(
                    "{promoted}. Mirror \"{first}\", which it goes on from, {what}. Take \
                     [mirror.{name}] out of the site file here{grant}; and drop the slot, which keeps \
                     log for nobody: farshore mirror drop-slot SITE.toml {first} {slot}, here"
                )
            }
        };
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

    /// So that who takes the mirror out of the site file, or gives it another slot, is told of the
    /// one that is left. Log flows meanwhile, whatever the disk here does.
    fn note_slot(&self) {
        let (slot, server) = (self.near.slot.clone(), self.near.principal.redacted());
        let (mirror, data_dir) = (self.near.name.clone(), self.data_dir.clone());
        tokio::task::spawn_blocking(move || {
            if let Err(error) = note_slot(&data_dir, &mirror, (&slot, &server)) {
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
        let turn = tokio::time::timeout(SEEDING_ENDS_WITHIN, self.seedings.acquire()).await;
        let Ok(Ok(_permit)) = turn else {
            let why = format!(
                "{SEEDINGS_MAX} standbys of mirror \"{mirror}\" are being seeded already: run this \
                 again once one of them is done"
            );
            let busy = MirrorError::NearEnd { why, passes: true };
            seed::refuse(session, &busy).await?;
            return Err(busy);
        };
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
    pub(super) fn add_to(&self, report: &mut MirrorReport) {
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
        } else if seen.kept_bytes.is_some() {
            report.error = with_warning(report.error.take(), lock(&self.promoted).clone());
        }
        match self.dropped(&seen).zip(seen.dropped.clone()) {
            // A far end that gets no log for that reason says so as well.
            Some((all, why)) if report.error.as_ref().is_none_or(|error| error.contains(&why)) => {
                (report.state, report.error) = ("dropped".to_owned(), Some(all));
            }
            Some((all, _)) => {
                report.state = "dropped".to_owned();
                report.error = with_warning(report.error.take(), Some(all));
            }
            None => {
                // The far end knows more of it, if it knows.
                let is_said = |error: &String| error.contains(NOTHING_ACKNOWLEDGED);
                if !report.error.as_ref().is_some_and(is_said) {
                    let waits = self.waits(status.connected);
                    report.error = with_warning(report.error.take(), waits);
                }
                let warning = self.warning(&seen, status.connected);
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
            error: self.dropped(&seen).or_else(|| {
                let waits = self.waits(status.connected);
                with_warning(failure.or(waits), self.warning(&seen, status.connected))
            }),
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

/// Notes the slot that is in use; and the one before on the same server, if it was another. Blocks on
/// the disk.
fn note_slot(data_dir: &Path, mirror: &str, (slot, server): (&str, &str)) -> Result<(), String> {
    let (note, text) = (Note::slot(data_dir, mirror), format!("{slot}\n{server}"));
    let before = note.read().unwrap_or_default();
    if before == text {
        return Ok(());
    }
    // One that cannot be read names none.
    if let Some((earlier, there)) = before.split_once('\n')
        && there == server
        && earlier != slot
        && SlotName::new(earlier).is_some()
    {
        tracing::warn!(
            %mirror, slot = %earlier,
            "the mirror has another slot now, and the one before keeps the log on {server}, without \
             bound, until it is dropped (unless another mirror uses it)"
        );
        Note::earlier_slot(data_dir, mirror, earlier).write(&before)?;
    }
    note.write(&text)?;
    // It may be one of before that is in use again.
    Note::earlier_slot(data_dir, mirror, slot).remove().map(drop)
}

/// A session may end by being dropped too.
struct Connected<'a>(&'a NearAgent);

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        let mut status = self.0.near.status();
        (status.connected, status.walsender) = (false, None);
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    /// A near end in `folder`, whose principal is nowhere.
    fn agent(folder: &Path) -> NearAgent {
        let text = format!(
            "[site]\nname = \"s\"\ndata_dir = {folder:?}\n[mirror.m]\n\
             principal = \"postgres://a@127.0.0.1:1/b\"\nlisten = \"127.0.0.1:5433\"\n"
        );
        let site = config::parse(&text, &folder.join("site.toml")).unwrap();
        NearAgent::new(&site.mirrors.near[0], folder)
    }

    #[tokio::test]
    async fn a_mirror_that_is_resumed_holds_what_it_held() {
        let folder = tempfile::tempdir().unwrap();
        Note::dropped(folder.path(), "m").write("it was dropped, and stays so").unwrap();
        let begun = Note::begun_anew(folder.path(), "m");
        std::fs::write(&begun, "0/3000000\n\n").unwrap();
        let near = agent(folder.path());
        let report = near.report();
        let error = report.error.unwrap();
        assert_eq!(report.state, "dropped");
        assert!(error.contains("begun anew at 0/3000000") && error.contains("it was dropped"));
        let resumed = near.resume().await.unwrap();
        assert!(resumed.contains("goes on when its far end asks"), "{resumed}");
        assert!(resumed.contains("begun anew at 0/3000000"), "{resumed}");
        assert!(!near.is_dropped() && near.held().is_some() && begun.exists());
        let resumed = near.resume().await.unwrap();
        assert!(resumed.contains("commits from before 0/3000000 return"), "{resumed}");
        assert!(near.held().is_none() && !begun.exists());
        assert!(near.resume().await.unwrap().contains("nothing was changed"));
    }

    #[test]
    fn a_slot_that_was_changed_is_told_of() {
        let folder = tempfile::tempdir().unwrap();
        let earlier = || -> Vec<String> {
            let slots = Note::earlier_slots(folder.path(), "m");
            slots.into_iter().map(|(slot, _)| slot).collect()
        };
        let note = |slot, server| note_slot(folder.path(), "m", (slot, server)).unwrap();
        note("a", "postgres://one");
        note("a", "postgres://one");
        assert_eq!(earlier(), [""; 0]);
        note("b", "postgres://one");
        assert_eq!(earlier(), ["a"]);
        // Of another server nobody knows whether it is still there.
        note("c", "postgres://two");
        assert_eq!(earlier(), ["a"]);
        note("a", "postgres://two");
        assert_eq!(earlier(), ["c"]);
        let text = Note::slot(folder.path(), "m").read();
        assert_eq!(text.as_deref(), Some("a\npostgres://two"));
        assert!(Note::earlier_slots(folder.path(), "n").is_empty());
    }
}
