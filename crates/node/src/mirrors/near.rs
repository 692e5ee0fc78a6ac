//! The near end: gives its far end the principal's log.

mod bounds;

pub(crate) use bounds::{LET_LOOK, kept_bytes, resume_without_node, why_dropped};

use super::note::Note;
use super::{ratio, redo_queue, with_warning};
use crate::agents::lock;
use crate::config::mirrors::NearMirror;
use crate::report::MirrorReport;
use crate::sites::protocol::Wanted;
use bounds::{Bounds, Leeway, Seen};
use farshore_link::Session;
use farshore_mirror::MirrorError;
use farshore_mirror::receive::{self, BegunAnew, Near};
use farshore_mirror::relay::compression::Compression;
use farshore_mirror::relay::message::MirrorRequest;
use farshore_mirror::seed::{self, BackupRequest, SeedRequest};
use farshore_model::Lsn;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;
use tokio::sync::{Semaphore, watch};

/// Data to the principal of a direct mirror stays unacknowledged no longer.
const SILENT_MAX: Duration = Duration::from_secs(15);

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
    /// Words on a mirror that goes on.
    fn warning(&self, seen: &Seen, is_connected: bool) -> Option<String> {
        let begun_anew = self.near.begun_anew_at();
        let held = begun_anew.map(|start| receive::held(&self.near.name, start));
        with_warning(held, seen.warning(&self.bounds, is_connected))
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
        NearAgent {
            near: Near {
                name: mirror.name.clone(),
                principal: reached_by(mirror),
                slot: mirror.slot.clone(),
                application_name: mirror.application_name.clone(),
                promise: mirror.promise,
                compression: mirror.compression,
                begun_anew: BegunAnew::noted_in(Note::begun_anew(data_dir, &mirror.name)),
                status: Mutex::default(),
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

    /// It was dropped, and waits to be resumed.
    pub fn is_dropped(&self) -> bool {
        self.why_dropped().is_some()
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
        }
        match seen.dropped.clone() {
            // A far end that gets no log for that reason says so as well.
            Some(why) if report.error.as_ref().is_none_or(|error| error.contains(&why)) => {
                (report.state, report.error) = ("dropped".to_owned(), Some(why));
            }
            Some(why) => {
                report.state = "dropped".to_owned();
                report.error = with_warning(report.error.take(), Some(why));
            }
            None => {
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
            error: seen
                .dropped
                .clone()
                .or(with_warning(failure, self.warning(&seen, status.connected))),
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
        let mut status = self.0.near.status();
        (status.connected, status.walsender) = (false, None);
    }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
