//! The far end's copy of the log: whole segment files, named and filled as `pg_wal` has them.
//!
//! ```text
//! <folder>/LOCK                       held by the process that has the spool open
//!          spool.state                whose log it is and where it begins (checksummed, replaced whole)
//!          slots                      how far each standby's slot has come (likewise)
//!          noted                      how far whole records were durable, now and then
//!          turn                       the last turn with the near end
//!          closed                     a standby was promoted: nothing more is taken in
//!          promoted                   it has become a server of its own
//!          00000001000000000000002A   a segment; all but the newest are whole and durable
//!          00000001000000000000002B   the newest: zeros behind what has been written, or old log
//!          00000002.history           as the principal has it
//!          spare.tmp                  becomes the next segment
//!          old.….tmp                  a segment that was forgotten, for one to come
//! ```
//!
//! One thread writes, or whoever brings a little log while that thread has nothing to do: waking it
//! and being woken costs more than the write. Bytes are *written* when the operating system has
//! them and *durable* when an fdatasync has covered them; both positions are published in that
//! order, and only the second one is ever promised to anybody. A segment is made only after the one
//! before it is durable as a whole, and the boundary between them is durable only then, so what a
//! crash leaves is decided by the newest segment alone: [`recovery`] scans its records.
//! `docs/formats/spool.md` draws the bytes and lists the cases.

mod closed;
mod damage;
mod error;
pub(crate) mod folder;
mod forgetting;
mod noted;
mod reader;
mod recovery;
mod slots;
mod state;
pub(crate) mod tail;
mod turn;
mod writer;

pub use closed::Closed;
pub use error::SpoolError;
pub use reader::SpoolReader;
pub use recovery::ToReplay;
pub use slots::{SlotName, SlotView};

use crate::history::History;
use crate::relay::message::Turn;
use crate::wal::{Segment, SegmentBytes, Timeline};
use bytes::Bytes;
use damage::{Damages, Looked};
use farshore_fault as fault;
use farshore_model::Lsn;
use folder::FolderLock;
use forgetting::Forgotten;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// Pieces of log that wait for the writer; each has at most [`PIECE_BYTES_MAX`].
const QUEUE_PIECES_MAX: usize = 32;

/// Most bytes in one piece.
pub const PIECE_BYTES_MAX: usize = 1 << 20;

/// Log from here on is not made durable by who brings it: the thread is at its disk then while the
/// next is received. A near end that catches up sends so much at a time.
pub const HERE_BYTES: usize = 256 << 10;
/// A disk on which log is made durable by who brings it takes no longer than this for it: who does
/// has standbys and a link to mind, and waking the thread takes a tenth of this.
const HERE_WITHIN: Duration = Duration::from_millis(2);

/// Whose log it is. Never changes in the life of a spool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The cluster's system identifier.
    pub system_id: u64,
    /// Size of its segments.
    pub segment: SegmentBytes,
    /// Its version, as `server_version_num`.
    pub server_version: u32,
}

/// How far the log has come here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Positions {
    /// The timeline of both.
    pub timeline: Timeline,
    /// The operating system has everything before this. Lost in a power cut.
    pub written: Lsn,
    /// An fdatasync has covered everything before this.
    pub durable: Lsn,
}

/// What went into a spool since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hardening {
    /// fdatasync calls that covered new log.
    pub syncs: u64,
    /// Time from the first write of a group to the end of its fdatasync, all of them together.
    pub total: Duration,
    /// The same, of the last group.
    pub last: Duration,
}

/// What the writer is given.
#[derive(Debug)]
enum Work {
    Write { timeline: Timeline, start: Lsn, data: Bytes },
    Switch { timeline: Timeline, at: Lsn },
}

/// What the writer and everybody else look at.
#[derive(Debug)]
struct Shared {
    folder: PathBuf,
    identity: Identity,
    positions: watch::Sender<Positions>,
    /// How many pieces of work the thread has done; they are durable.
    done: watch::Sender<u64>,
    /// Why the writer waits: there is no room.
    trouble: watch::Sender<Option<SpoolError>>,
    /// Why nothing is written any more.
    failure: OnceLock<SpoolError>,
    is_closing: AtomicBool,
    forgotten: Forgotten,
    syncs: AtomicU64,
    harden_total_us: AtomicU64,
    harden_last_us: AtomicU64,
}

impl Shared {
    /// Tells whoever waits why nothing is written any more.
    fn stop(&self, error: SpoolError) {
        tracing::error!(folder = %self.folder.display(), "the spool stops: {error}");
        // Whoever hands over looks here.
        let _ = self.failure.set(error);
        self.positions.send_modify(|_| {});
        self.done.send_modify(|_| {});
    }
}

/// That nothing is taken in any more.
#[derive(Debug)]
struct Closing {
    closed: Closed,
    /// Why that is not noted in the folder.
    unsaved: Option<SpoolError>,
}

/// A spool that is open.
#[derive(Debug)]
pub struct Spool {
    shared: Arc<Shared>,
    work: Option<mpsc::Sender<Work>>,
    /// How many pieces of work were handed over.
    handed_over: AtomicU64,
    writer: Arc<Mutex<writer::Writer>>,
    thread: Option<std::thread::JoinHandle<()>>,
    slots: slots::KeptSlots,
    /// The newest timeline that was handed over. Held while a history file is replaced: the thread
    /// of a session that was dropped may still be at it.
    newest_timeline: Mutex<Timeline>,
    /// Removing segments, one at a time.
    forgetting: Mutex<()>,
    closed: Mutex<Option<Closing>>,
    has_taken_over: AtomicBool,
    /// The last turn with the near end.
    turn: Mutex<Option<Turn>>,
    /// Where it began.
    begin: Lsn,
    /// The end of a whole record that was durable.
    noted: Mutex<Option<Lsn>>,
    /// What came when damage was looked for last.
    looked: Mutex<Looked>,
    /// Found when it was last looked for.
    damage: Mutex<Damages>,
    _lock: FolderLock,
}

impl Spool {
    /// Opens what is in `folder`, and decides by its files what of it is durable; `None` if
    /// nothing was ever begun there. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError`]: what is damaged, or missing, or in use.
    pub fn open(folder: &Path) -> Result<Option<Spool>, SpoolError> {
        folder::create(folder)?;
        let lock = FolderLock::take(folder)?;
        match recovery::recover(folder)? {
            None => Ok(None),
            Some(recovered) => Spool::start(folder, lock, recovered).map(Some),
        }
    }

    /// Begins a spool at the start of the segment that `start` is in, which must be where it is
    /// received from. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError`], and [`SpoolError::DoesNotFollow`] if `start` is within a segment.
    pub fn create(
        folder: &Path,
        identity: Identity,
        timeline: Timeline,
        start: Lsn,
    ) -> Result<Spool, SpoolError> {
        let expected = identity.segment.floor(start);
        if start != expected {
            return Err(SpoolError::DoesNotFollow { timeline, found: start, expected });
        }
        folder::create(folder)?;
        let lock = FolderLock::take(folder)?;
        if recovery::recover(folder)?.is_some() {
            let path = folder.join(folder::STATE);
            return Err(SpoolError::State { path, what: "there is one already".to_owned() });
        }
        let state = state::State { identity, timeline, begin: start, floor: start };
        state.write(folder)?;
        let recovered = recovery::Recovered {
            positions: Positions { timeline, written: start, durable: start },
            state,
        };
        Spool::start(folder, lock, recovered)
    }

    fn start(
        folder: &Path,
        lock: FolderLock,
        recovered: recovery::Recovered,
    ) -> Result<Spool, SpoolError> {
        let slots = slots::KeptSlots::load(folder)?;
        let closed = Closed::read(folder)?.map(|closed| Closing { closed, unsaved: None });
        let noted = noted::read(folder)?;
        if let Err(error) = closed::reserve(folder) {
            tracing::warn!("a promotion will need room on the disk: {error}");
        }
        let forgotten = Forgotten::default();
        if state::State::is_of_earlier_version(folder) {
            let durable = recovered.positions.durable;
            // With that version a start claims what follows a record that ends its segment. It
            // must be claimed by the next start too, which may come before the next segment.
            if durable == recovered.state.identity.segment.floor(durable) {
                forgotten.keep_none();
            } else if let Err(error) = recovered.state.write(folder) {
                tracing::warn!("files of the spool's segments are not used again: {error}");
                forgotten.keep_none();
            }
        }
        let newest_timeline = recovered.positions.timeline;
        let shared = Arc::new(Shared {
            folder: folder.to_owned(),
            identity: recovered.state.identity,
            positions: watch::Sender::new(recovered.positions),
            done: watch::Sender::new(0),
            trouble: watch::Sender::new(None),
            failure: OnceLock::new(),
            is_closing: AtomicBool::new(false),
            forgotten,
            syncs: AtomicU64::new(0),
            harden_total_us: AtomicU64::new(0),
            harden_last_us: AtomicU64::new(0),
        });
        let (work, queue) = mpsc::channel(QUEUE_PIECES_MAX);
        let begin = recovered.state.begin;
        let writer = writer::Writer::new(shared.clone(), recovered.state);
        let writer = Arc::new(Mutex::new(writer));
        let thread = std::thread::Builder::new().name("spool".to_owned());
        let writing = writer.clone();
        let thread = thread
            .spawn(move || writer::run(&writing, queue))
            .map_err(SpoolError::io("start the writer of", folder))?;
        let spool = Spool {
            shared,
            work: Some(work),
            handed_over: AtomicU64::new(0),
            writer,
            thread: Some(thread),
            slots,
            newest_timeline: Mutex::new(newest_timeline),
            forgetting: Mutex::new(()),
            closed: Mutex::new(closed),
            has_taken_over: AtomicBool::new(closed::is_promoted(folder)),
            turn: Mutex::new(turn::read(folder)),
            begin,
            noted: Mutex::new(noted),
            looked: Mutex::new(Looked::since(noted, begin, recovered.positions)),
            damage: Mutex::default(),
            _lock: lock,
        };
        if noted.is_some_and(|noted| noted > recovered.positions.durable) {
            spool.look_for_damage();
        }
        Ok(spool)
    }

    /// Whose log it is.
    pub fn identity(&self) -> Identity {
        self.shared.identity
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.shared.folder
    }

    /// The number of its last session with a near end; `None` as long as none has said so.
    pub fn turn(&self) -> Option<Turn> {
        *self.lock_turn()
    }

    fn lock_turn(&self) -> MutexGuard<'_, Option<Turn>> {
        self.turn.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Notes a turn, unless a later one is noted: a session that was dropped may still be at it. Blocks
    /// on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`]; nothing has changed then.
    pub fn note_turn(&self, turn: Turn) -> Result<(), SpoolError> {
        let mut noted = self.lock_turn();
        if noted.is_some_and(|noted| noted >= turn) {
            return Ok(());
        }
        turn::write(self.folder(), turn)?;
        *noted = Some(turn);
        Ok(())
    }

    /// Where it was closed; `None` if it still takes log in.
    pub fn closed(&self) -> Option<Closed> {
        self.closing().as_ref().map(|closing| closing.closed.clone())
    }

    /// Why a restart forgets that it was closed, or for whom; `None` if it does not.
    pub fn unsaved_close(&self) -> Option<SpoolError> {
        self.closing().as_ref().and_then(|closing| closing.unsaved.clone())
    }

    fn closing(&self) -> MutexGuard<'_, Option<Closing>> {
        self.closed.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The same, once a server has taken over for good: nobody needs what is here to become that one.
    pub fn promoted(&self) -> Option<Closed> {
        let has_taken_over = self.has_taken_over.load(Relaxed);
        if has_taken_over { self.closed() } else { None }
    }

    /// Notes that a server has taken over; should that not be saved, it is known until a restart.
    /// Blocks on the disk.
    pub fn note_promoted(&self) {
        if self.has_taken_over.swap(true, Relaxed) {
            return;
        }
        if let Err(error) = closed::note_promoted(self.folder()) {
            tracing::warn!("that a standby was promoted is forgotten at a restart: {error}");
        }
    }

    /// Takes nothing in from now on, also after a restart; of one that is closed, for whom is noted
    /// anew. Durable when this returns. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`]; then this spool goes on as before.
    pub fn close(&self, closed: Closed) -> Result<(), SpoolError> {
        let is_noted = |closing: &Closing| closing.closed == closed && closing.unsaved.is_none();
        if self.closing().as_ref().is_some_and(is_noted) {
            return Ok(());
        }
        fault::point("spool.before-close");
        closed.write(self.folder())?;
        fault::point("spool.after-close");
        *self.closing() = Some(Closing { closed, unsaved: None });
        Ok(())
    }

    /// Takes nothing in until a restart, where [`Spool::close`] failed.
    pub fn close_until_restart(&self, closed: Closed, why: SpoolError) {
        tracing::warn!("that the spool is closed is forgotten at a restart: {why}");
        *self.closing() = Some(Closing { closed, unsaved: Some(why) });
    }

    /// How far the log has come. Who waits is woken when more of it is durable, or it stops; what
    /// is written alone wakes nobody.
    pub fn positions(&self) -> watch::Receiver<Positions> {
        self.shared.positions.subscribe()
    }

    /// Why nothing is written for the time being, or any more: there is no room, or the disk refuses.
    /// `None` while all is well.
    pub fn trouble(&self) -> Option<SpoolError> {
        self.shared.failure.get().cloned().or_else(|| self.shared.trouble.borrow().clone())
    }

    /// What went in since it was opened.
    pub fn hardening(&self) -> Hardening {
        Hardening {
            syncs: self.shared.syncs.load(Relaxed),
            total: Duration::from_micros(self.shared.harden_total_us.load(Relaxed)),
            last: Duration::from_micros(self.shared.harden_last_us.load(Relaxed)),
        }
    }

    /// As [`Spool::append`], and blocks on the disk where that is a matter of a moment: log of less
    /// than [`HERE_BYTES`] in all is durable when this returns, if the thread has nothing to do and
    /// the disk is fast.
    ///
    /// # Errors
    /// Why nothing is written any more.
    pub async fn append_at_once(
        &self,
        timeline: Timeline,
        start: Lsn,
        pieces: &[Bytes],
    ) -> Result<(), SpoolError> {
        self.check_open()?;
        if self.write_here(timeline, start, pieces)? {
            return Ok(());
        }
        self.append(timeline, start, pieces).await
    }

    /// Hands over log that follows what was taken in before, in pieces of at most
    /// [`PIECE_BYTES_MAX`]. Waits while the thread is behind. Returning says nothing about
    /// durability: see [`Spool::positions`].
    ///
    /// # Errors
    /// Why nothing is written any more.
    pub async fn append(
        &self,
        timeline: Timeline,
        start: Lsn,
        pieces: &[Bytes],
    ) -> Result<(), SpoolError> {
        self.check_open()?;
        let mut start = start;
        for data in pieces {
            let end = Lsn(start.0 + data.len() as u64);
            self.hand_over(Work::Write { timeline, start, data: data.clone() }).await?;
            start = end;
        }
        Ok(())
    }

    /// Whether log was written and made durable on this thread; else it is to be handed over.
    fn write_here(
        &self,
        timeline: Timeline,
        start: Lsn,
        pieces: &[Bytes],
    ) -> Result<bool, SpoolError> {
        // Nobody can reply between a write and an fdatasync that follows at once.
        if fault::defect("mirror-reply-from-received") {
            return Ok(false);
        }
        let is_little = pieces.iter().map(Bytes::len).sum::<usize>() < HERE_BYTES;
        let is_idle = *self.shared.done.borrow() == self.handed_over.load(Relaxed);
        if !is_little || !is_idle || self.has_failed() || self.hardening().last > HERE_WITHIN {
            return Ok(false);
        }
        let Ok(mut writer) = self.writer.try_lock() else { return Ok(false) };
        writer.write_here(timeline, start, pieces)
    }

    /// Whether [`Spool::switch_timeline`] would be refused, which stops the spool. Of what is durable:
    /// everything that was handed over has to be. Blocks on the disk.
    ///
    /// # Errors
    /// Why.
    pub fn check_switch(&self, timeline: Timeline, at: Lsn) -> Result<(), SpoolError> {
        let positions = *self.shared.positions.borrow();
        writer::check_switch(self.folder(), positions, timeline, at)
    }

    /// Goes over to `timeline`, which left the present one at `at`. Its history must be kept
    /// already ([`Spool::keep_history`]).
    ///
    /// # Errors
    /// Why the writer has ended.
    pub async fn switch_timeline(&self, timeline: Timeline, at: Lsn) -> Result<(), SpoolError> {
        {
            let mut newest = self.newest_timeline();
            *newest = timeline.max(*newest);
        }
        self.hand_over(Work::Switch { timeline, at }).await
    }

    fn newest_timeline(&self) -> MutexGuard<'_, Timeline> {
        self.newest_timeline.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// # Errors
    /// [`SpoolError::Promoted`] if it was closed.
    pub fn check_open(&self) -> Result<(), SpoolError> {
        match self.closed() {
            None => Ok(()),
            Some(Closed { timeline, end, .. }) => {
                let folder = self.folder().to_owned();
                Err(SpoolError::Promoted { timeline, end, folder })
            }
        }
    }

    async fn hand_over(&self, work: Work) -> Result<(), SpoolError> {
        let queue = self.work.as_ref().ok_or(SpoolError::Closing)?;
        match queue.reserve().await {
            // The writer has ended and its queue has not been dropped yet.
            Ok(_) if self.has_failed() => Err(self.failure()),
            Ok(permit) => {
                // Counted before the writer can have done it.
                self.handed_over.fetch_add(1, Relaxed);
                permit.send(work);
                Ok(())
            }
            Err(_) => Err(self.failure()),
        }
    }

    /// Waits until everything that was handed over is durable; how far that is.
    ///
    /// # Errors
    /// Why the writer has ended.
    pub async fn settled(&self) -> Result<Positions, SpoolError> {
        let mut done = self.shared.done.subscribe();
        let handed_over = self.handed_over.load(Relaxed);
        // Its sender is in `self`.
        let _ = done.wait_for(|done| *done >= handed_over || self.has_failed()).await;
        if self.has_failed() {
            return Err(self.failure());
        }
        Ok(*self.shared.positions.borrow())
    }

    /// Whether nothing is written any more.
    pub fn has_failed(&self) -> bool {
        self.shared.failure.get().is_some()
    }

    /// Why nothing is written any more, or that the thread is about to end.
    pub fn failure(&self) -> SpoolError {
        self.shared.failure.get().cloned().unwrap_or(SpoolError::Closing)
    }

    /// Keeps a timeline's history file. Durable when this returns. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError`], also if the text is not a history, or not the one of a timeline whose log is
    /// here.
    pub fn keep_history(&self, timeline: Timeline, text: &str) -> Result<(), SpoolError> {
        let path = self.folder().join(crate::wal::history_file_name(timeline));
        History::parse(timeline, text)
            .map_err(|error| SpoolError::History { path: path.clone(), error })?;
        let newest = self.newest_timeline();
        match folder::history_text(self.folder(), timeline)? {
            Some(there) if there == text => return Ok(()),
            // Its log is here, or that of a descendant.
            Some(_) if timeline <= *newest => {
                return Err(SpoolError::OtherHistory { timeline, path });
            }
            Some(_) | None => {}
        }
        folder::replace(&path, text.as_bytes())
    }

    /// The text of a timeline's history file; `None` if it is not here. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn history_text(&self, timeline: Timeline) -> Result<Option<String>, SpoolError> {
        folder::history_text(self.folder(), timeline)
    }

    /// How a timeline came about; of one without a history file, that it has no ancestors. Blocks
    /// on the disk.
    ///
    /// # Errors
    /// [`SpoolError`].
    pub fn history(&self, timeline: Timeline) -> Result<History, SpoolError> {
        folder::history(self.folder(), timeline)
    }

    /// The timelines whose history files are here.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn histories(&self) -> Result<Vec<Timeline>, SpoolError> {
        Ok(folder::Listing::read(self.folder(), self.identity().segment)?.histories)
    }

    /// The segments that are here, oldest first. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn segments(&self) -> Result<Vec<Segment>, SpoolError> {
        Ok(folder::Listing::read(self.folder(), self.identity().segment)?.segments)
    }

    /// Makes a slot that keeps the log from `restart` on. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`]; `Ok(false)` if there is one of that name.
    pub fn create_slot(&self, name: &SlotName, restart: Option<Lsn>) -> Result<bool, SpoolError> {
        self.slots.create(name, restart)
    }

    /// Makes a slot that is there until what is returned is dropped, and is in no file; `None` if
    /// there is one of that name.
    pub fn create_temporary_slot(
        self: &Arc<Spool>,
        name: &SlotName,
        restart: Option<Lsn>,
    ) -> Option<TemporarySlot> {
        let number = self.slots.now().create_temporary(name, restart)?;
        Some(TemporarySlot { spool: self.clone(), name: name.clone(), number })
    }

    /// Drops a slot; `Ok(false)` if there is none. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn drop_slot(&self, name: &SlotName) -> Result<bool, SpoolError> {
        self.slots.remove(name)
    }

    /// From where on a slot keeps the log; `None` if there is no such slot, `Some(None)` if it has
    /// never been used or is lost.
    pub fn slot(&self, name: &SlotName) -> Option<Option<Lsn>> {
        self.slots.now().get(name)
    }

    /// A slot's user has everything before `flushed`. Blocks on the disk, once per segment.
    pub fn advance_slot(&self, name: &SlotName, flushed: Lsn) {
        self.slots.advance(name, flushed, self.identity().segment);
    }

    /// Every slot but temporary ones.
    pub fn slot_views(&self) -> Vec<SlotView> {
        self.slots.now().views()
    }

    /// Whether a slot kept more than it may, and keeps nothing any more.
    pub fn is_slot_lost(&self, name: &SlotName) -> bool {
        self.slots.now().is_lost(name)
    }

    /// Slots that keep log from before `bound` keep nothing from now on, also after a restart;
    /// which. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn lose_slots(&self, bound: Lsn) -> Vec<SlotName> {
        self.slots.lose(bound)
    }

    /// From where on slots keep the log; `None` if none does.
    pub fn kept_for_slots(&self) -> Option<Lsn> {
        self.slots.now().oldest()
    }
}

/// A slot that is dropped with this, also when the task that has it is aborted.
#[derive(Debug)]
pub struct TemporarySlot {
    spool: Arc<Spool>,
    name: SlotName,
    number: u64,
}

impl Drop for TemporarySlot {
    fn drop(&mut self) {
        self.spool.slots.now().remove_temporary(&self.name, self.number);
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        self.shared.is_closing.store(true, Relaxed);
        self.work = None;
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            if thread.join().is_err() {
                tracing::error!("the spool's writer died");
            }
        }
    }
}

#[cfg(test)]
mod tests;
