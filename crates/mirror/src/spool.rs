//! The far end's copy of the log: whole segment files, named and filled as `pg_wal` has them.
//!
//! ```text
//! <folder>/LOCK                       held by the process that has the spool open
//!          spool.state                whose log it is and where it begins (checksummed, replaced whole)
//!          slots                      how far each standby's slot has come (likewise)
//!          noted                      how far whole records were durable, now and then
//!          closed                     a standby was promoted: nothing more is taken in
//!          00000001000000000000002A   a segment; all but the newest are whole and durable
//!          00000001000000000000002B   the newest: zeros behind what has been written
//!          00000002.history           as the principal has it
//!          spare.tmp                  zeros that become the next segment
//! ```
//!
//! One thread writes. Bytes are *written* when the operating system has them and *durable* when an
//! fdatasync has covered them; both positions are published in that order, and only the second one
//! is ever promised to anybody. A segment is made only after the one before it is durable as a
//! whole, and the boundary between them is durable only then, so what a crash leaves is decided by
//! the newest segment alone: [`recovery`] scans its records. `docs/formats/spool.md` draws the
//! bytes and lists the cases.

mod closed;
mod folder;
mod noted;
mod reader;
mod recovery;
mod slots;
mod state;
mod writer;

pub use closed::Closed;
pub use reader::SpoolReader;
pub use slots::{SlotName, SlotView};

use crate::history::{History, HistoryError};
use crate::wal::{Segment, SegmentBytes, Timeline};
use bytes::Bytes;
use farshore_fault as fault;
use farshore_model::Lsn;
use folder::FolderLock;
use recovery::LookFrom;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// Pieces of log that wait for the writer; each has at most [`PIECE_BYTES_MAX`].
const QUEUE_PIECES_MAX: usize = 32;

/// Most bytes in one piece.
pub const PIECE_BYTES_MAX: usize = 1 << 20;

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

/// Why a spool cannot be used, or cannot go on.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SpoolError {
    /// The operating system refused.
    #[error("cannot {action} {path}: {error}")]
    Io {
        /// Verb phrase.
        action: &'static str,
        /// Of what.
        path: PathBuf,
        /// Why.
        error: Arc<std::io::Error>,
    },
    /// An fdatasync failed: what the kernel has of the file is not to be trusted any more.
    #[error(
        "cannot make {path} durable: {error}. What was not acknowledged is received again after a \
         restart; check the disk first"
    )]
    NotDurable {
        /// The segment.
        path: PathBuf,
        /// Why.
        error: Arc<std::io::Error>,
    },
    /// Another process has it open.
    #[error(
        "{path} is in use by process {pid}. Stop that one first, or give this site another data_dir"
    )]
    Locked {
        /// The folder.
        path: PathBuf,
        /// As it noted itself.
        pid: String,
    },
    /// The state file cannot be read.
    #[error(
        "{path} is damaged ({what}). If the mirror may be made anew: stop this node, remove the \
         folder, and start it"
    )]
    State {
        /// The file.
        path: PathBuf,
        /// How.
        what: String,
    },
    /// Files that should be there are not.
    #[error(
        "{path} is missing, although the log goes on behind it: files were removed from the spool. \
         Put it back from a backup, or remove the folder and make the mirror anew"
    )]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A segment has another size than the log's segments have.
    #[error(
        "{path} has {found} bytes, and a segment of this log has {expected}. Put it back from a backup, or make the mirror anew"
    )]
    Size {
        /// The segment.
        path: PathBuf,
        /// Its size in bytes.
        found: u64,
        /// What it should be.
        expected: u64,
    },
    /// Log that was durable is not sound.
    #[error(
        "{path} is damaged at {position}: the log was durable up to {durable}. A running node \
         receives it again where the principal has it; else stop the node, put the file back from \
         a backup or a standby's pg_wal, or make the mirror anew"
    )]
    Damaged {
        /// The segment.
        path: PathBuf,
        /// Where.
        position: Lsn,
        /// What is known to have been durable.
        durable: Lsn,
    },
    /// A history file that cannot be read.
    #[error("{path}: {error}")]
    History {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        error: HistoryError,
    },
    /// Log that does not follow what is here.
    #[error("log came for {found} on timeline {timeline}, and what is here ends at {expected}")]
    DoesNotFollow {
        /// Of what came.
        timeline: Timeline,
        /// Where it begins.
        found: Lsn,
        /// Where it should.
        expected: Lsn,
    },
    /// The new timeline left the old one before what is here.
    #[error(
        "timeline {timeline} begins at {switch}, and this spool holds timeline {own} up to {durable}: \
         the server that is principal now never had that log. Point the mirror to a principal that \
         has it, or make the mirror anew"
    )]
    Diverged {
        /// The new one.
        timeline: Timeline,
        /// Where it begins.
        switch: Lsn,
        /// What is here.
        own: Timeline,
        /// Up to where.
        durable: Lsn,
    },
    /// Two timelines of one number.
    #[error(
        "another history came for timeline {timeline} than {path} holds: two servers were promoted \
         to a timeline of the same number, and the log here is that of the other one. Point the \
         mirror to the principal that it was made from or a descendant of it, or make the mirror \
         anew: stop this node, remove the folder, and start it"
    )]
    OtherHistory {
        /// Of the one that came.
        timeline: Timeline,
        /// What is here.
        path: PathBuf,
    },
    /// A new timeline whose history says something else, or is not here.
    #[error(
        "timeline {timeline} shall go on at {switch} where timeline {own} ends, and its history \
         here does not say so: the principal has no {}, or another one. Put that file into its \
         pg_wal, or point the mirror to a server that has it",
        crate::wal::history_file_name(*.timeline)
    )]
    NoHistory {
        /// The new one.
        timeline: Timeline,
        /// Where it begins.
        switch: Lsn,
        /// What is here.
        own: Timeline,
    },
    /// The spool is being closed.
    #[error("the spool is being closed")]
    Closing,
    /// A standby was promoted, so nothing more is taken in.
    #[error(
        "a standby of this mirror was promoted, on timeline {timeline} from {end} on or later: what \
         the old principal writes belongs to another history. To mirror the new principal: give it \
         a mirror of its own, or stop this node and remove the folder {folder}"
    )]
    Promoted {
        /// The timeline that was left.
        timeline: Timeline,
        /// Where, at the earliest.
        end: Lsn,
        /// The spool.
        folder: PathBuf,
    },
}

impl SpoolError {
    pub(crate) fn io(
        action: &'static str,
        path: &Path,
    ) -> impl FnOnce(std::io::Error) -> SpoolError {
        let path = path.to_owned();
        move |error| SpoolError::Io { action, path, error: Arc::new(error) }
    }

    /// Whether there is no room left: a state that ends when somebody makes some.
    pub fn is_out_of_room(&self) -> bool {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        matches!(self, SpoolError::Io { error, .. } if matches!(error.kind(), StorageFull | QuotaExceeded))
    }
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
    /// How many pieces of work are done and durable.
    done: watch::Sender<u64>,
    /// Why the writer waits: there is no room.
    trouble: watch::Sender<Option<SpoolError>>,
    /// Why the writer has ended.
    failure: OnceLock<SpoolError>,
    is_closing: AtomicBool,
    syncs: AtomicU64,
    harden_total_us: AtomicU64,
    harden_last_us: AtomicU64,
}

/// A spool that is open.
#[derive(Debug)]
pub struct Spool {
    shared: Arc<Shared>,
    work: Option<mpsc::Sender<Work>>,
    /// How many pieces of work were handed over.
    handed_over: AtomicU64,
    writer: Option<std::thread::JoinHandle<()>>,
    slots: Mutex<slots::Slots>,
    /// The newest timeline that was handed over. Held while a history file is replaced: the thread
    /// of a session that was dropped may still be at it.
    newest_timeline: Mutex<Timeline>,
    /// Removing segments, one at a time.
    forgetting: Mutex<()>,
    closed: OnceLock<Closed>,
    /// The end of a whole record that was durable.
    noted: Mutex<Option<Lsn>>,
    /// What came when damage was looked for last.
    looked: Mutex<Looked>,
    /// Found when it was last looked for.
    damage: Mutex<Option<SpoolError>>,
    _lock: FolderLock,
}

/// How far damage was looked for.
#[derive(Clone, Copy, Debug, Default)]
struct Looked {
    durable: Lsn,
    /// A whole record ends here, and everything before it was sound; `None` if that is not known.
    sound_to: Option<(Timeline, Lsn)>,
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
        let slots = slots::Slots::load(folder)?;
        let closed = OnceLock::new();
        if let Some(found) = Closed::read(folder)? {
            let _ = closed.set(found);
        }
        let noted = noted::read(folder)?;
        let newest_timeline = recovered.positions.timeline;
        let shared = Arc::new(Shared {
            folder: folder.to_owned(),
            identity: recovered.state.identity,
            positions: watch::Sender::new(recovered.positions),
            done: watch::Sender::new(0),
            trouble: watch::Sender::new(None),
            failure: OnceLock::new(),
            is_closing: AtomicBool::new(false),
            syncs: AtomicU64::new(0),
            harden_total_us: AtomicU64::new(0),
            harden_last_us: AtomicU64::new(0),
        });
        let (work, queue) = mpsc::channel(QUEUE_PIECES_MAX);
        let writer = writer::Writer::new(shared.clone(), recovered.state, queue);
        let thread = std::thread::Builder::new().name("spool".to_owned());
        let writer = thread
            .spawn(move || writer.run())
            .map_err(SpoolError::io("start the writer of", folder))?;
        let spool = Spool {
            shared,
            work: Some(work),
            handed_over: AtomicU64::new(0),
            writer: Some(writer),
            slots: Mutex::new(slots),
            newest_timeline: Mutex::new(newest_timeline),
            forgetting: Mutex::new(()),
            closed,
            noted: Mutex::new(noted),
            looked: Mutex::default(),
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

    /// Where it was closed; `None` if it still takes log in.
    pub fn closed(&self) -> Option<Closed> {
        self.closed.get().cloned()
    }

    /// Takes nothing in from now on, also after a restart. Durable when this returns. Blocks on
    /// the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn close(&self, closed: Closed) -> Result<(), SpoolError> {
        if self.closed().is_some() {
            return Ok(());
        }
        fault::point("spool.before-close");
        closed.write(self.folder())?;
        fault::point("spool.after-close");
        let _ = self.closed.set(closed);
        Ok(())
    }

    /// The end of the last whole record among what is durable: a server that has all of this log
    /// can replay up to there. The durable position itself where that cannot be told. Blocks on
    /// the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`]; [`SpoolError::Damaged`] if records that were durable are not sound, or
    /// are not there any more.
    pub fn last_record_end(&self) -> Result<Lsn, SpoolError> {
        let positions = *self.shared.positions.borrow();
        Ok(self.checked_record_end(positions, LookFrom::Newest)?.unwrap_or(positions.durable))
    }

    /// Reads everything from the segment on that holds `from`, and checks every record of it.
    /// Blocks on the disk.
    ///
    /// # Errors
    /// As [`Spool::last_record_end`].
    pub fn check_from(&self, from: Lsn) -> Result<(), SpoolError> {
        let positions = *self.shared.positions.borrow();
        self.checked_record_end(positions, LookFrom::SegmentOf(from)).map(drop)
    }

    fn checked_record_end(
        &self,
        positions: Positions,
        from: LookFrom,
    ) -> Result<Option<Lsn>, SpoolError> {
        let size = self.identity().segment;
        let end = recovery::last_record_end(self.folder(), size, positions, from)?;
        // A record is followed by up to 7 bytes that mean nothing.
        let end = end.map(|end| end.min(positions.durable));
        if let (Some(position), Some(durable)) = (end, *self.noted())
            && position < durable
        {
            let number = size.number(position);
            let newest = Segment { timeline: positions.timeline, number };
            let path = self.folder().join(newest.file_name(size));
            return Err(SpoolError::Damaged { path, position, durable });
        }
        Ok(end)
    }

    /// Notes how far whole records are durable by now, for a later start to tell damage by; and
    /// looks for damage. Reads what came since it last did, or the newest segment, so it is for now
    /// and then. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn note_durable(&self) -> Result<(), SpoolError> {
        let durable = self.shared.positions.borrow().durable;
        // Idle, and sound when it was looked at.
        if self.looked().durable == durable && self.damage().is_none() {
            return Ok(());
        }
        match self.look_for_damage() {
            Some(end) if self.noted().is_none_or(|before| before < end) => {
                noted::write(self.folder(), end)?;
                *self.noted() = Some(end);
                Ok(())
            }
            Some(_) | None => Ok(()),
        }
    }

    fn looked(&self) -> MutexGuard<'_, Looked> {
        self.looked.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// What of the newest segment was durable and is not sound, as last looked at. It is received
    /// again if the principal has it.
    pub fn damage(&self) -> Option<SpoolError> {
        self.damage.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    /// The end of the last whole record, if it can be told.
    fn look_for_damage(&self) -> Option<Lsn> {
        let positions = *self.shared.positions.borrow();
        let Positions { timeline, durable, .. } = positions;
        let before = *self.looked();
        let size = self.identity().segment;
        let from = match (self.damage(), before.sound_to) {
            // It is damaged until that is sound.
            (Some(SpoolError::Damaged { position, .. }), _) => LookFrom::SegmentOf(position),
            // A segment is read as a whole once it is complete.
            (_, Some((of, end))) if of == timeline && size.number(end) < size.number(durable) => {
                LookFrom::SegmentOf(end)
            }
            (_, Some((of, end))) if of == timeline && end <= durable => LookFrom::Record(end),
            _ => LookFrom::Newest,
        };
        let (end, damage) = match self.checked_record_end(positions, from) {
            Ok(end) => {
                // A record begins at a multiple of 8, which may not have come yet.
                let sound_to = end.map(|end| (timeline, Lsn(end.0.next_multiple_of(8))));
                *self.looked() = Looked { durable, sound_to };
                (end, None)
            }
            Err(error @ SpoolError::Damaged { .. }) => {
                *self.looked() = Looked { durable, sound_to: None };
                (None, Some(error))
            }
            // A segment that was removed meanwhile, or a disk that says no: the next look begins
            // where this one did.
            Err(error) => {
                tracing::warn!("what came to the spool last was not looked at: {error}");
                return None;
            }
        };
        let mut known = self.damage.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match (&damage, known.is_some()) {
            (Some(damage), false) => tracing::warn!("{damage}"),
            (None, true) => tracing::info!("what was damaged has been received again"),
            (Some(_), true) | (None, false) => {}
        }
        *known = damage;
        end
    }

    fn noted(&self) -> MutexGuard<'_, Option<Lsn>> {
        self.noted.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// How far the log has come; changes as it goes on.
    pub fn positions(&self) -> watch::Receiver<Positions> {
        self.shared.positions.subscribe()
    }

    /// Why nothing is written for the time being: there is no room. `None` while all is well.
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

    /// Hands over log that follows what was handed over before, at most [`PIECE_BYTES_MAX`].
    /// Waits while the writer is behind. Returning says nothing about durability: see
    /// [`Spool::positions`].
    ///
    /// # Errors
    /// Why the writer has ended.
    pub async fn append(
        &self,
        timeline: Timeline,
        start: Lsn,
        data: Bytes,
    ) -> Result<(), SpoolError> {
        self.check_open()?;
        self.hand_over(Work::Write { timeline, start, data }).await
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

    /// Whether the writer has ended.
    pub fn has_failed(&self) -> bool {
        self.shared.failure.get().is_some()
    }

    /// Why the writer has ended, or that it is about to.
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

    /// Removes whole segments that end before `needed`, oldest first, while all together are more
    /// than `bytes_max`. Returns how many. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn forget(&self, needed: Lsn, bytes_max: u64) -> Result<usize, SpoolError> {
        let _turn = self.forgetting.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let size = self.identity().segment;
        let segments = self.segments()?;
        let needed = needed.min(self.shared.positions.borrow().durable);
        let mut total = segments.len() as u64 * size.get();
        let mut removed = 0;
        // The newest one always stays: it tells where the log is.
        for (segment, next) in segments.iter().zip(segments.iter().skip(1)) {
            if total <= bytes_max || size.start(segment.number + 1) > needed {
                break;
            }
            // Recovery must be able to check the record that the newest segment begins within.
            if !recovery::may_be_oldest(self.folder(), size, *next)? {
                break;
            }
            farshore_fault::point("spool.before-forget");
            folder::remove(&self.folder().join(segment.file_name(size)))?;
            // One at a time: a hole among the names would be damage.
            folder::sync(self.folder())?;
            farshore_fault::point("spool.after-forget");
            total -= size.get();
            removed += 1;
        }
        Ok(removed)
    }

    fn slots(&self) -> MutexGuard<'_, slots::Slots> {
        self.slots.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Makes a slot that keeps the log from `restart` on. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`]; `Ok(false)` if there is one of that name.
    pub fn create_slot(&self, name: &SlotName, restart: Option<Lsn>) -> Result<bool, SpoolError> {
        self.slots().create(self.folder(), name, restart)
    }

    /// Makes a slot that is there until what is returned is dropped, and is in no file; `None` if
    /// there is one of that name.
    pub fn create_temporary_slot(
        self: &Arc<Spool>,
        name: &SlotName,
        restart: Option<Lsn>,
    ) -> Option<TemporarySlot> {
        let number = self.slots().create_temporary(name, restart)?;
        Some(TemporarySlot { spool: self.clone(), name: name.clone(), number })
    }

    /// Drops a slot; `Ok(false)` if there is none. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn drop_slot(&self, name: &SlotName) -> Result<bool, SpoolError> {
        self.slots().remove(self.folder(), name)
    }

    /// From where on a slot keeps the log; `None` if there is no such slot, `Some(None)` if it has
    /// never been used or is lost.
    pub fn slot(&self, name: &SlotName) -> Option<Option<Lsn>> {
        self.slots().get(name)
    }

    /// A slot's user has everything before `flushed`. Blocks on the disk, once per segment.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn advance_slot(&self, name: &SlotName, flushed: Lsn) -> Result<(), SpoolError> {
        self.slots().advance(self.folder(), name, flushed, self.identity().segment)
    }

    /// Every slot but temporary ones.
    pub fn slot_views(&self) -> Vec<SlotView> {
        self.slots().views()
    }

    /// Whether a slot kept more than it may, and keeps nothing any more.
    pub fn is_slot_lost(&self, name: &SlotName) -> bool {
        self.slots().is_lost(name)
    }

    /// Slots that keep log from before `bound` keep nothing from now on, also after a restart;
    /// which. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn lose_slots(&self, bound: Lsn) -> Vec<SlotName> {
        self.slots().lose(self.folder(), bound)
    }

    /// From where on slots keep the log; `None` if none does.
    pub fn kept_for_slots(&self) -> Option<Lsn> {
        self.slots().oldest()
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
        self.spool.slots().remove_temporary(&self.name, self.number);
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        self.shared.is_closing.store(true, Relaxed);
        self.work = None;
        if let Some(writer) = self.writer.take() {
            writer.thread().unpark();
            if writer.join().is_err() {
                tracing::error!("the spool's writer died");
            }
        }
    }
}

#[cfg(test)]
mod tests;
