//! The far end: log from the link into the spool, and back how far it is.

use crate::error::MirrorError;
use crate::relay::compression::Unpacker;
use crate::relay::message::{Answer, FarPositions, FromFar, FromNear, Have, MirrorRequest, Turn};
use crate::serve::Standbys;
use crate::spool::tail;
use crate::spool::{HERE_BYTES, Identity, SlotName, Spool, SpoolError};
use crate::wal::{SegmentBytes, Timeline};
use bytes::Bytes;
use farshore_fault as fault;
use farshore_link::{Receiver, Sender, Session};
use farshore_model::Lsn;
use futures_util::FutureExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// How a mirror's far end goes.
#[derive(Clone, Copy, Debug, Default)]
pub struct FarStatus {
    /// The near end is connected and log flows.
    pub connected: bool,
    /// End of the principal's log as last heard of.
    pub principal_end: Lsn,
    /// Bytes of log that came since the node started.
    pub log_bytes: u64,
    /// Bytes that they took on the link, packed.
    pub packed_bytes: u64,
    /// What the near end was told last as durable.
    pub acknowledged: Lsn,
}

/// The far end of one mirror.
#[derive(Debug)]
pub struct Far {
    /// The mirror's name, here and at the near end.
    pub name: String,
    /// Where the spool is.
    pub folder: PathBuf,
    /// The spool, once something was begun.
    pub spool: watch::Sender<Option<Arc<Spool>>>,
    /// Who streams from it.
    pub standbys: Arc<Standbys>,
    /// How it goes.
    pub status: Mutex<FarStatus>,
    /// Reduced log did not come back as it was: it is not asked for again.
    takes_no_reduced: AtomicBool,
}

/// Log that came and is not in the spool yet. What of it is dropped comes again.
struct Gathered {
    /// It may be made durable on this thread: no commit waits for a standby that this would not
    /// hear meanwhile.
    at_once: bool,
    timeline: Timeline,
    start: Lsn,
    pieces: Vec<Bytes>,
    bytes: usize,
}

impl Gathered {
    fn nothing(at_once: bool) -> Gathered {
        let (timeline, start, pieces) = (Timeline(0), Lsn::ZERO, Vec::new());
        Gathered { at_once, timeline, start, pieces, bytes: 0 }
    }

    fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    fn add(&mut self, timeline: Timeline, start: Lsn, log: Bytes) {
        if self.is_empty() {
            (self.timeline, self.start) = (timeline, start);
        }
        self.bytes += log.len();
        self.pieces.push(log);
    }

    async fn pass_to(&mut self, spool: &Spool) -> Result<(), SpoolError> {
        if self.is_empty() {
            return Ok(());
        }
        if self.at_once {
            spool.append_at_once(self.timeline, self.start, &self.pieces).await?;
        } else {
            spool.append(self.timeline, self.start, &self.pieces).await?;
        }
        self.pieces.clear();
        self.bytes = 0;
        Ok(())
    }
}

/// While a session is kept: also when a promotion drops it half-way.
struct Connected<'a>(&'a Far);

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        self.0.status().connected = false;
    }
}

impl Far {
    /// Opens the spool in `folder`, if there is one. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError`].
    pub fn open(name: &str, folder: PathBuf) -> Result<Far, SpoolError> {
        let spool = Spool::open(&folder)?.map(Arc::new);
        let far = Far::without_spool(name, folder);
        far.spool.send_replace(spool);
        Ok(far)
    }

    /// One whose spool was not opened: to report of.
    pub fn without_spool(name: &str, folder: PathBuf) -> Far {
        Far {
            name: name.to_owned(),
            folder,
            spool: watch::Sender::new(None),
            standbys: Arc::default(),
            status: Mutex::default(),
            takes_no_reduced: AtomicBool::new(false),
        }
    }

    /// How it goes, to look at or change.
    pub fn status(&self) -> MutexGuard<'_, FarStatus> {
        self.status.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The spool, if there is one yet.
    pub fn spool(&self) -> Option<Arc<Spool>> {
        self.spool.borrow().clone()
    }

    /// What to open a session with: everything that was handed to the spool earlier is durable
    /// first, so nothing is asked for twice.
    ///
    /// # Errors
    /// Why the spool has stopped, or takes nothing in.
    pub async fn request(&self) -> Result<MirrorRequest, MirrorError> {
        let mut have = None;
        if let Some(spool) = self.spool() {
            spool.check_open()?;
            let positions = spool.settled().await?;
            let looked = spool.clone();
            blocking(move || {
                looked.look_once();
                Ok(())
            })
            .await?;
            self.check_sound(&spool)?;
            let of = spool.clone();
            let looked = tokio::task::spawn_blocking(move || tail::tail(&of, positions)).await;
            // It ended with the runtime.
            let tail = looked.unwrap_or(Ok(None)).map_err(MirrorError::of_file)?;
            let tail = tail.filter(|_| !fault::defect("mirror-trusts-positions"));
            have = Some(Have {
                system_id: spool.identity().system_id.to_string(),
                timeline: positions.timeline.0,
                durable: positions.durable,
                tail,
                turn: spool.turn(),
            });
        }
        let restores = !self.takes_no_reduced.load(Relaxed);
        let mirror = self.name.clone();
        Ok(MirrorRequest { mirror, have, restores, restores_pages: restores })
    }

    /// Keeps what comes on a session that was opened with `request`, until it or the spool fails.
    ///
    /// # Errors
    /// Why it ended.
    pub async fn keep(&self, session: Session, request: &MirrorRequest) -> Result<(), MirrorError> {
        let site = session.peer_site().to_owned();
        let (mut sender, mut receiver) = session.split();
        let begun = self.begin(&site, &mut receiver, request.have.as_ref()).await?;
        let (spool, awaited, turn) = begun;
        if let Some(turn) = turn
            && self.note_turn(&spool, turn).await
        {
            sender.send(FromFar::TurnNoted.encode()).await?;
        }
        self.standbys.set_waited_for(awaited == Awaited::Replayed);
        self.status().connected = true;
        let _connected = Connected(self);
        tokio::select! {
            // However much comes, what is durable is told.
            biased;
            ended = self.acknowledge(&spool, awaited, sender) => ended,
            ended = self.take_in(&site, &spool, awaited, receiver) => ended,
        }
    }

    async fn begin(
        &self,
        site: &str,
        receiver: &mut Receiver,
        have: Option<&Have>,
    ) -> Result<(Arc<Spool>, Awaited, Option<Turn>), MirrorError> {
        let protocol = |what: String| MirrorError::Protocol { site: site.to_owned(), what };
        let first = receiver.next().await?.ok_or_else(|| protocol("no answer".to_owned()))?;
        let answer: Answer = serde_json::from_slice(&first)
            .map_err(|error| protocol(format!("an answer that cannot be read ({error})")))?;
        let (system_id, timeline, start, identity, awaited, turn) = match answer {
            Answer::Follows {
                system_id,
                timeline,
                start,
                segment_bytes,
                server_version,
                applied_counts,
                nothing_counts,
                turn,
            } => {
                let identity = Identity {
                    system_id: system_id
                        .parse()
                        .map_err(|_| protocol(format!("the system identifier \"{system_id}\"")))?,
                    segment: SegmentBytes::new(segment_bytes)
                        .ok_or_else(|| protocol(format!("segments of {segment_bytes} bytes")))?,
                    server_version,
                };
                let awaited = match (applied_counts, nothing_counts) {
                    (_, true) => Awaited::Nothing,
                    (true, false) => Awaited::Replayed,
                    (false, false) => Awaited::Durable,
                };
                (system_id, timeline, start, identity, awaited, turn)
            }
            Answer::Refused { why, passes, left } => {
                if let Some(left) = left {
                    self.give_up_unfinished(left.at).await?;
                }
                return Err(MirrorError::Refused { site: site.to_owned(), why, passes });
            }
        };
        let follows = |have: &Have| {
            have.system_id == system_id && have.timeline == timeline && have.durable == start
        };
        match (self.spool(), have) {
            (Some(spool), Some(have)) if follows(have) => {
                if spool.identity().segment != identity.segment {
                    return Err(protocol(format!("segments of {} bytes", identity.segment.get())));
                }
                Ok((spool, awaited, turn))
            }
            (None, None) => {
                let (folder, current) = (self.folder.clone(), self.spool.clone());
                // Also where the session is given up meanwhile: one that is on the disk and not known
                // here would be in the next one's way.
                let create = move || {
                    let spool = Spool::create(&folder, identity, Timeline(timeline), start)?;
                    let spool = Arc::new(spool);
                    current.send_replace(Some(spool.clone()));
                    Ok(spool)
                };
                let spool = blocking(create).await.map_err(MirrorError::of_file)?;
                tracing::info!(mirror = %self.name, %start, timeline, "the spool begins");
                Ok((spool, awaited, turn))
            }
            _ => Err(protocol(format!(
                "log of {system_id} from {start} on timeline {timeline}, which was not asked for"
            ))),
        }
    }

    /// Before anything is acknowledged. Log comes in all the same where that cannot be noted: the near
    /// end goes by what it has heard of.
    async fn note_turn(&self, spool: &Arc<Spool>, turn: Turn) -> bool {
        let of = spool.clone();
        match blocking(move || of.note_turn(turn)).await {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(mirror = %self.name, "a copy of the spool would not be told from it: {error}");
                false
            }
        }
    }

    /// A principal that crashed may have sent the beginning of a record that nobody will ever end: where
    /// the next one goes on from before it, it does not count.
    ///
    /// # Errors
    /// [`MirrorError::Unfinished`] if there was one; the spool's.
    async fn give_up_unfinished(&self, left_at: Lsn) -> Result<(), MirrorError> {
        let Some(spool) = self.spool() else { return Ok(()) };
        let was = spool.settled().await?.durable;
        let given_up = blocking(move || spool.give_up_unfinished(left_at)).await;
        match given_up.map_err(MirrorError::of_file)? {
            Some(end) => Err(MirrorError::Unfinished { was, end }),
            None => Ok(()),
        }
    }

    async fn take_in(
        &self,
        site: &str,
        spool: &Arc<Spool>,
        awaited: Awaited,
        mut receiver: Receiver,
    ) -> Result<(), MirrorError> {
        let protocol = |what: String| MirrorError::Protocol { site: site.to_owned(), what };
        let mut unpacker =
            Unpacker::new().map_err(|error| MirrorError::Io { action: "unpack log", error })?;
        let mut gathered = Gathered::nothing(awaited != Awaited::Replayed);
        // On which timeline log comes next, and where it begins.
        let mut next = {
            let positions = *spool.positions().borrow();
            (positions.timeline, positions.written)
        };
        loop {
            // What has come already goes into the spool together.
            let here = if gathered.is_empty() || gathered.bytes >= HERE_BYTES {
                None
            } else {
                receiver.next_parts().now_or_never()
            };
            let received = match here {
                Some(received) => received,
                None => {
                    gathered.pass_to(spool).await?;
                    receiver.next_parts().await
                }
            };
            let Ok(Some(parts)) = received else {
                gathered.pass_to(spool).await?;
                received?;
                break;
            };
            let message = FromNear::decode_parts(parts);
            if !matches!(message, Ok(FromNear::Log { .. })) {
                gathered.pass_to(spool).await?;
            }
            match message.map_err(|what| protocol(what.to_string()))? {
                FromNear::Log { timeline, start, principal_end, bytes, packing, packed } => {
                    let packed_bytes = packed.len() as u64;
                    let log = unpacker.unpack_log(packing, packed, start, bytes as usize);
                    let follows = (timeline, start) == next;
                    if log.is_err() || !follows {
                        gathered.pass_to(spool).await?;
                    }
                    // The writer would stop for it.
                    if !follows {
                        let (found, expected) = (start, next.1);
                        let error = SpoolError::DoesNotFollow { timeline, found, expected };
                        return Err(error.into());
                    }
                    let log = log.map_err(|error| {
                        if !packing.is_reduced() {
                            return protocol(format!("log that cannot be unpacked: {error}"));
                        }
                        // Should this be due to the reducing, it is not to be met for ever.
                        self.takes_no_reduced.store(true, Relaxed);
                        let (site, what) = (site.to_owned(), error.to_string());
                        MirrorError::NotRestored { site, what }
                    })?;
                    next = (timeline, Lsn(start.0 + log.len() as u64));
                    gathered.add(timeline, start, log);
                    let mut status = self.status();
                    status.log_bytes += u64::from(bytes);
                    status.packed_bytes += packed_bytes;
                    status.principal_end = status.principal_end.max(principal_end);
                }
                FromNear::History { timeline, text } => {
                    let text = String::from_utf8(text.to_vec())
                        .map_err(|_| protocol("a history that is no text".to_owned()))?;
                    let spool = spool.clone();
                    let kept = blocking(move || spool.keep_history(timeline, &text)).await;
                    kept.map_err(MirrorError::of_file)?;
                }
                FromNear::Switch { timeline, at } => {
                    tracing::info!(mirror = %self.name, %timeline, %at, "a new timeline");
                    spool.settled().await?;
                    let of = spool.clone();
                    // It ends the session alone: another principal may go on from here.
                    let checked = blocking(move || of.check_switch(timeline, at)).await;
                    checked.map_err(MirrorError::of_file)?;
                    spool.switch_timeline(timeline, at).await?;
                    next = (timeline, at);
                }
                FromNear::Failed { passes, why } => {
                    let why = String::from_utf8_lossy(&why).into_owned();
                    return Err(MirrorError::Refused { site: site.to_owned(), why, passes });
                }
                FromNear::Alive { principal_end } => {
                    let mut status = self.status();
                    status.principal_end = status.principal_end.max(principal_end);
                }
            }
        }
        Err(protocol("no more, without a reason".to_owned()))
    }

    /// Tells the near end how far it is here. Positions that come while a message is on its way are
    /// told together, and those that no commit waits for with the next one that some may.
    async fn acknowledge(
        &self,
        spool: &Arc<Spool>,
        awaited: Awaited,
        mut sender: Sender,
    ) -> Result<(), MirrorError> {
        let mut positions = spool.positions();
        let mut seen = self.standbys.seen();
        let (mut told, mut needed): (Option<FarPositions>, _) = (None, None);
        // When what nobody waits for is looked at, and how long it is not.
        let mut look_at: Option<Instant> = None;
        let (pause_min, pause_max) = match awaited {
            Awaited::Nothing => (TOLD_WITHIN_LAZILY, TOLD_WITHIN_LAZILY),
            Awaited::Durable | Awaited::Replayed => (TOLD_WITHIN, TOLD_WITHIN_MAX),
        };
        let mut pause = pause_min;
        loop {
            let let_go_at = self.standbys.let_go(std::time::Instant::now()).map(Instant::from_std);
            let now = *positions.borrow_and_update();
            if spool.has_failed() {
                return Err(spool.failure().into());
            }
            self.check_sound(spool)?;
            let standbys = *seen.borrow_and_update();
            let mut far = FarPositions {
                written: now.written,
                durable: now.durable,
                applied: standbys.applied,
            };
            if fault::defect("mirror-reply-from-received") {
                far.durable = now.written;
            }
            let is_waited_for = told.is_none_or(|told| match awaited {
                Awaited::Nothing => far.written.bytes_since(told.written) >= TOLD_BYTES_LAZILY,
                Awaited::Durable => told.durable != far.durable,
                Awaited::Replayed => told.durable != far.durable || told.applied != far.applied,
            });
            let is_due = look_at.is_some_and(|at| at <= Instant::now());
            if is_waited_for || (is_due && told != Some(far)) {
                fault::point("mirror.before-reply");
                sender.send(FromFar::Positions(far).encode()).await?;
                fault::point("mirror.after-reply");
                self.status().acknowledged = far.durable;
                told = Some(far);
                (look_at, pause) = (None, pause_min);
            } else if is_due {
                (look_at, pause) = (None, (pause * 2).min(pause_max));
            }
            // The slot at the principal keeps what was told in earlier sessions.
            if let Some(feedback) = standbys.feedback.filter(|_| needed != standbys.feedback) {
                sender.send(FromFar::Feedback(feedback).encode()).await?;
                needed = standbys.feedback;
            }
            let is_replayed_later = awaited != Awaited::Replayed
                && far.applied < far.durable
                && self.standbys.does_any_replay();
            if is_replayed_later || told != Some(far) {
                look_at = look_at.or_else(|| Some(Instant::now() + pause));
            } else {
                look_at = None;
            }
            let wake_at = look_at.into_iter().chain(let_go_at).min();
            // Neither ends while this runs: their senders are in what is borrowed here.
            tokio::select! {
                _ = positions.changed() => {}
                _ = seen.changed() => {}
                () = tokio::time::sleep_until(wake_at.unwrap_or_else(Instant::now)),
                    if wake_at.is_some() => {}
            }
        }
    }

    /// Nothing is acknowledged behind damaged log that a standby may need: no standby could replay
    /// it. Where all that are known have more, they have everything, and the damage is only told.
    fn check_sound(&self, spool: &Spool) -> Result<(), SpoolError> {
        let Some((damage, position)) = spool.damage_within() else { return Ok(()) };
        let size = spool.identity().segment;
        // A standby that connects again asks for its segment from the beginning on.
        let behind = size.start(size.number(position) + 1);
        let known = [spool.kept_for_slots(), self.standbys.kept_for_connected()];
        let needed_from = known.into_iter().flatten().min();
        if needed_from.is_some_and(|needed| needed >= behind) { Ok(()) } else { Err(damage) }
    }

    /// Removes segments that no standby needs while all are more than `bytes_max`. With
    /// `kept_bytes_max`, what is further back than that is kept for no standby: slots that need it
    /// are lost, and a stream that does ends where its log is gone. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn forget(
        &self,
        bytes_max: u64,
        kept_bytes_max: Option<u64>,
    ) -> Result<Forgotten, SpoolError> {
        let Some(spool) = self.spool() else { return Ok(Forgotten::default()) };
        let mut forgotten = Forgotten::default();
        let mut bound = Lsn::ZERO;
        if let Some(most) = kept_bytes_max {
            let durable = spool.positions().borrow().durable;
            bound = spool.identity().segment.floor(Lsn(durable.0.saturating_sub(most)));
            forgotten.slots = spool.lose_slots(bound);
        }
        let slots = spool.kept_for_slots().unwrap_or(Lsn::MAX);
        let connected = self.standbys.kept_for_connected().unwrap_or(Lsn::MAX);
        forgotten.segments = spool.forget(slots.min(connected).max(bound), bytes_max)?;
        Ok(forgotten)
    }
}

/// How soon the near end is told that standbys have replayed more, where no commit waits for that by
/// the mirror's mode: with the next log that is durable, or after so long, when a standby that was
/// sent that log at once has been listened to; and after twice that where it has not replayed it by
/// then, as where log was gathered for the standbys. One that asks for it all the same, by
/// `remote_apply`, waits so long. What is written is told with what is durable: a commit under
/// `remote_write` waits for that.
const TOLD_WITHIN: Duration = Duration::from_millis(7);
/// While standbys do not replay, they are looked at ever more seldom, down to this.
const TOLD_WITHIN_MAX: Duration = Duration::from_millis(80);
/// How soon it is told of anything where no commit waits, or of how much log: what is on its way is
/// shown by that.
const TOLD_WITHIN_LAZILY: Duration = Duration::from_millis(250);
const TOLD_BYTES_LAZILY: u64 = 1 << 20;

/// What of the far end commits wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    Nothing,
    /// What is durable in the spool.
    Durable,
    /// What standbys have replayed.
    Replayed,
}

/// What a spool keeps no more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forgotten {
    /// Segments that were removed.
    pub segments: usize,
    /// Slots that were lost.
    pub slots: Vec<SlotName>,
}

pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, SpoolError> + Send + 'static,
) -> Result<T, SpoolError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(_) => Err(SpoolError::Closing),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::compression::{Compression, Method, Packer};
    use crate::relay::message::{Feedback, Left, Packing};
    use crate::synthetic::{Log, SEGMENT_BYTES, SYSTEM_ID};
    use crate::wal::Segment;

    #[tokio::test]
    async fn reduced_log_that_does_not_come_back_is_not_asked_for_again() {
        let folder = tempfile::tempdir().unwrap();
        let far = Far::without_spool("m", folder.path().join("m"));
        let request = far.request().await.unwrap();
        assert!(request.restores && request.restores_pages);
        let answer = Answer::Follows {
            system_id: "7".to_owned(),
            timeline: 1,
            start: Lsn(16 << 20),
            segment_bytes: 16 << 20,
            server_version: 180_000,
            applied_counts: false,
            nothing_counts: false,
            turn: None,
        };
        let log = Bytes::from(vec![7; 8_192]);
        let zstd = Compression::Fixed(Method::Zstd(1));
        let mut packer = Packer::new(zstd).unwrap().reducing(true);
        let (packing, packed) = packer.pack_log(Lsn(16 << 20), std::slice::from_ref(&log)).unwrap();
        // The checksum of the log as it was.
        let mut other = packed.to_vec();
        other[0] ^= 1;
        let message = FromNear::Log {
            timeline: Timeline(1),
            start: Lsn(16 << 20),
            principal_end: Lsn(17 << 20),
            bytes: log.len() as u32,
            packing,
            packed: other.into(),
        };
        let (near, session) = Session::within("near", 8);
        let (mut sender, _receiver) = near.split();
        sender.send(serde_json::to_vec(&answer).unwrap().into()).await.unwrap();
        sender.send_parts(&message.encode()).await.unwrap();
        let error = far.keep(session, &request).await.unwrap_err();
        assert!(error.to_string().contains("not what it was before it was packed"), "{error}");
        assert!(error.is_transient(), "it is asked for again");
        let request = far.request().await.unwrap();
        assert!(!request.restores && !request.restores_pages);
    }

    fn begun(folder: &std::path::Path, begin: u64) -> (Far, Arc<Spool>) {
        let segment = SegmentBytes::new(SEGMENT_BYTES).unwrap();
        let identity = Identity { system_id: SYSTEM_ID, segment, server_version: 150_018 };
        let spool = Spool::create(folder, identity, Timeline(1), Lsn(begin)).unwrap();
        let (far, spool) = (Far::without_spool("m", folder.to_owned()), Arc::new(spool));
        far.spool.send_replace(Some(spool.clone()));
        (far, spool)
    }

    /// The principal may be another one in a moment, and the log go on.
    #[tokio::test]
    async fn log_that_does_not_follow_ends_the_session_and_not_the_spool() {
        let folder = tempfile::tempdir().unwrap();
        let begin = 5 * SEGMENT_BYTES;
        let (far, spool) = begun(folder.path(), begin);
        let mut log = Log::new(begin);
        log.push(100);
        let came = |start| FromNear::Log {
            timeline: Timeline(1),
            start: Lsn(start),
            principal_end: Lsn(log.end()),
            bytes: log.bytes.len() as u32,
            packing: Packing::Plain,
            packed: log.bytes.clone().into(),
        };
        let switch = |timeline| FromNear::Switch { timeline: Timeline(timeline), at: Lsn(begin) };
        let ended_by = async |message: FromNear| {
            let request = far.request().await.unwrap();
            let have = request.have.clone().unwrap();
            let answer = Answer::Follows {
                system_id: have.system_id,
                timeline: have.timeline,
                start: have.durable,
                segment_bytes: SEGMENT_BYTES,
                server_version: 150_018,
                applied_counts: false,
                nothing_counts: false,
                turn: None,
            };
            let (near, session) = Session::within("near", 8);
            let (mut sender, _receiver) = near.split();
            sender.send(serde_json::to_vec(&answer).unwrap().into()).await.unwrap();
            sender.send_parts(&message.encode()).await.unwrap();
            drop(sender);
            far.keep(session, &request).await.unwrap_err()
        };
        for (message, expected) in [
            (came(begin + 8), "and what is here ends at"),
            (switch(2), "its history here does not say so"),
            (switch(1), "never had that log"),
        ] {
            let error = ended_by(message).await.to_string();
            assert!(error.contains(expected), "{error}");
            assert!(!spool.has_failed(), "after {error}");
        }
        let error = ended_by(came(begin)).await;
        assert!(!matches!(error, MirrorError::Spool(_)), "{error}");
        assert_eq!(spool.settled().await.unwrap().durable, Lsn(log.end()));
    }

    #[tokio::test]
    async fn a_record_that_never_ended_is_given_up_for_a_principal_that_goes_on_before_it() {
        let folder = tempfile::tempdir().unwrap();
        let begin = 5 * SEGMENT_BYTES;
        let (far, spool) = begun(folder.path(), begin);
        let mut log = Log::new(begin);
        (0..100).for_each(|_| log.push(500));
        let whole = log.end();
        log.push(20_000);
        let torn = whole + 10_000;
        let pieces = [Bytes::copy_from_slice(log.between(begin, torn))];
        spool.append(Timeline(1), Lsn(begin), &pieces).await.unwrap();
        let refused_with = async |left: Option<Left>| {
            let request = far.request().await.unwrap();
            let answer = Answer::Refused { why: "it left".to_owned(), passes: false, left };
            let (near, session) = Session::within("near", 8);
            let (mut sender, _receiver) = near.split();
            sender.send(serde_json::to_vec(&answer).unwrap().into()).await.unwrap();
            far.keep(session, &request).await.unwrap_err()
        };
        let durable = || spool.positions().borrow().durable;
        // One that does not say where, and one that lacks what is whole.
        for left in [None, Some(Left { at: Lsn(whole - 8) })] {
            let error = refused_with(left).await;
            assert!(matches!(error, MirrorError::Refused { .. }), "{error}");
            assert_eq!(durable(), Lsn(torn));
        }
        let left = Some(Left { at: Lsn(whole + 8) });
        let error = refused_with(left).await;
        assert!(error.is_transient() && error.to_string().contains("never finished"), "{error}");
        assert_eq!(durable(), Lsn(whole));
        // Once.
        let error = refused_with(left).await;
        assert!(matches!(error, MirrorError::Refused { .. }), "{error}");
        // And it goes on from there, where old log stands.
        let text = format!("1\t{}\tx\n", Lsn(whole));
        spool.keep_history(Timeline(2), &text).unwrap();
        spool.switch_timeline(Timeline(2), Lsn(whole)).await.unwrap();
        log.cut(whole);
        log.timeline = 2;
        (0..50).for_each(|_| log.push(700));
        let pieces = [Bytes::copy_from_slice(log.between(whole, log.end()))];
        spool.append(Timeline(2), Lsn(whole), &pieces).await.unwrap();
        assert_eq!(spool.settled().await.unwrap().durable, Lsn(log.end()));
        assert_eq!(spool.last_record_end().unwrap(), Lsn(log.end()));
        far.spool.send_replace(None);
        drop((far, spool));
        let spool = Spool::open(folder.path()).unwrap().unwrap();
        assert_eq!(spool.positions().borrow().durable, Lsn(log.end()));
    }

    #[tokio::test]
    async fn a_file_that_cannot_be_read_is_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let begin = 5 * SEGMENT_BYTES;
        let (far, spool) = begun(folder.path(), begin);
        let mut log = Log::new(begin);
        (0..100).for_each(|_| log.push(500));
        let pieces = [Bytes::copy_from_slice(&log.bytes)];
        spool.append(Timeline(1), Lsn(begin), &pieces).await.unwrap();
        let before = far.request().await.unwrap();
        let segment = spool.segments().unwrap()[0].file_name(spool.identity().segment);
        let (path, aside) = (folder.path().join(segment), folder.path().join("aside"));
        std::fs::rename(&path, &aside).unwrap();
        // Of that nobody can read.
        std::fs::create_dir(&path).unwrap();
        let error = far.request().await.unwrap_err();
        assert!(error.is_transient() && error.to_string().contains("cannot read"), "{error}");
        std::fs::remove_dir(&path).unwrap();
        std::fs::rename(&aside, &path).unwrap();
        assert_eq!(far.request().await.unwrap(), before);
    }

    #[tokio::test]
    async fn nothing_is_acknowledged_behind_damage_that_a_standby_may_need() {
        let folder = tempfile::tempdir().unwrap();
        let segment = SegmentBytes::new(SEGMENT_BYTES).unwrap();
        let identity = Identity { system_id: SYSTEM_ID, segment, server_version: 150_018 };
        let begin = 5 * SEGMENT_BYTES;
        let spool = Spool::create(folder.path(), identity, Timeline(1), Lsn(begin)).unwrap();
        let mut log = Log::new(begin);
        while log.end() < begin + SEGMENT_BYTES + 10_000 {
            log.push(5_000);
        }
        let mut at = begin;
        for piece in log.between(begin, log.end()).chunks(100_000) {
            spool.append(Timeline(1), Lsn(at), &[Bytes::copy_from_slice(piece)]).await.unwrap();
            at += piece.len() as u64;
        }
        spool.settled().await.unwrap();
        let far = Far::without_spool("m", folder.path().join("m"));
        far.check_sound(&spool).unwrap();
        let first = Segment { timeline: Timeline(1), number: segment.number(Lsn(begin)) };
        let path = folder.path().join(first.file_name(segment));
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[20_000] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        spool.note_durable().unwrap();
        assert!(far.check_sound(&spool).is_err(), "who may need it is not known");
        let slot = SlotName::new("s").unwrap();
        assert!(spool.create_slot(&slot, Some(Lsn(begin))).unwrap());
        assert!(far.check_sound(&spool).is_err());
        spool.advance_slot(&slot, Lsn(begin + SEGMENT_BYTES));
        far.check_sound(&spool).unwrap();
        let peer = "127.0.0.1:1".parse().unwrap();
        let standby = far.standbys.enter("one", peer, None, Lsn(begin)).unwrap();
        standby.replied(Lsn(begin + 500), Lsn(begin + 500), Lsn(begin + 500));
        assert!(far.check_sound(&spool).is_err(), "one that streams has less");
        standby.replied(Lsn(log.end()), Lsn(log.end()), Lsn(log.end()));
        far.check_sound(&spool).unwrap();
    }

    /// What woke it was another thing: that a standby has replayed more wakes nobody.
    #[tokio::test]
    async fn what_is_replayed_is_told_whatever_else_came_meanwhile() {
        for awaited in [Awaited::Nothing, Awaited::Durable, Awaited::Replayed] {
            for comes_more in [true, false] {
                let told = tell_of_replay(awaited, comes_more);
                let told = tokio::time::timeout(Duration::from_secs(30), told).await;
                told.unwrap_or_else(|_| panic!("not told: {awaited:?}, {comes_more}"));
            }
        }
    }

    async fn tell_of_replay(awaited: Awaited, comes_more: bool) {
        let folder = tempfile::tempdir().unwrap();
        let segment = SegmentBytes::new(SEGMENT_BYTES).unwrap();
        let identity = Identity { system_id: SYSTEM_ID, segment, server_version: 150_018 };
        let begin = 5 * SEGMENT_BYTES;
        let spool = Spool::create(folder.path(), identity, Timeline(1), Lsn(begin)).unwrap();
        let mut log = Log::new(begin);
        log.push(100);
        let end = Lsn(log.end());
        spool.append(Timeline(1), Lsn(begin), &[log.bytes.into()]).await.unwrap();
        spool.settled().await.unwrap();
        let (spool, far) = (Arc::new(spool), Far::without_spool("m", folder.path().join("m")));
        far.standbys.set_waited_for(awaited == Awaited::Replayed);
        let peer = "127.0.0.1:1".parse().unwrap();
        let standby = far.standbys.enter("one", peer, None, Lsn(begin)).unwrap();
        let (near, session) = Session::within("near", 8);
        let (sender, _from_near) = session.split();
        let (_to_far, mut heard) = near.split();
        let mut applied_when_told = async || loop {
            match FromFar::decode(heard.next().await.unwrap().unwrap()).unwrap() {
                FromFar::Positions(far) => return far.applied,
                FromFar::Feedback(_) | FromFar::TurnNoted => {}
            }
        };
        let listening = async {
            assert_eq!(applied_when_told().await, Lsn::ZERO);
            standby.replied(end, end, end);
            if comes_more {
                standby.needs(Feedback { xmin: 7, ..Feedback::default() });
            }
            assert_eq!(applied_when_told().await, end);
            drop(standby);
        };
        tokio::select! {
            ended = far.acknowledge(&spool, awaited, sender) => ended.unwrap(),
            () = listening => {}
        }
    }
}
