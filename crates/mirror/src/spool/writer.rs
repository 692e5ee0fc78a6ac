//! What writes: takes what waits, writes it, makes it durable in one go, says so. Mostly that is a
//! thread; who brings a little log while nothing waits does it at once ([`Writer::write_here`]).

use super::folder::{self, SPARE};
use super::state::State;
use super::{Positions, Shared, SpoolError, Work};
use crate::wal::{self, PAGE_BYTES, Segment, SegmentBytes, Timeline};
use bytes::Bytes;
use farshore_fault as fault;
use farshore_fault::unsynced::Tracked;
use farshore_model::Lsn;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Most bytes that one fdatasync waits for.
const GROUP_BYTES_MAX: usize = 4 << 20;
/// How soon a disk that has no room, or refuses for another reason, is tried again: first, and at
/// last where it is not for room.
const AGAIN: Duration = Duration::from_millis(250);
const AGAIN_MAX: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Writer {
    shared: Arc<Shared>,
    state: State,
    timeline: Timeline,
    written: Lsn,
    durable: Lsn,
    open: Option<Open>,
    /// The next segment's file, being made.
    spare: Option<JoinHandle<Result<Spare, SpoolError>>>,
    /// The first segment may begin within a record, and not be durable beyond that yet: recovery
    /// could not check it, so the state file says how far it is.
    needs_floor: bool,
}

/// The segment that is being filled.
#[derive(Debug)]
struct Open {
    number: u64,
    path: PathBuf,
    file: File,
    tracked: Tracked,
    /// There may be old log behind what was written.
    has_old_log: bool,
}

/// A file that becomes a segment.
#[derive(Debug)]
struct Spare {
    path: PathBuf,
    /// It was one before; only its first page is zero.
    has_old_log: bool,
}

impl Spare {
    /// Gives it a segment's name; `false` if somebody has removed it since it was made.
    fn becomes(&self, segment: &Path) -> Result<bool, SpoolError> {
        match std::fs::rename(&self.path, segment) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(SpoolError::io("rename", &self.path)(error)),
        }
    }
}

/// The thread: takes what waits, until nobody can hand over any more.
pub(super) fn run(writer: &Mutex<Writer>, mut queue: mpsc::Receiver<Work>) {
    while let Some(first) = queue.blocking_recv() {
        let mut writer = lock(writer);
        if writer.shared.failure.get().is_some() {
            break;
        }
        if let Err(error) = writer.take_group(first, || queue.try_recv().ok()) {
            writer.stop(error);
            break;
        }
    }
    if let Some(spare) = lock(writer).spare.take() {
        // Its file is removed at the next start.
        drop(spare.join());
    }
}

fn lock(writer: &Mutex<Writer>) -> MutexGuard<'_, Writer> {
    writer.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Writer {
    pub fn new(shared: Arc<Shared>, state: State) -> Writer {
        let positions = *shared.positions.borrow();
        let needs_floor = positions.timeline == state.timeline;
        Writer {
            shared,
            state,
            timeline: positions.timeline,
            written: positions.written,
            durable: positions.durable,
            open: None,
            spare: None,
            needs_floor,
        }
    }

    /// Takes a group of what waits: `first`, and what `more` has.
    ///
    /// # Errors
    /// Why nothing is written any more; [`Writer::stop`] tells whoever waits.
    fn take_group(
        &mut self,
        first: Work,
        mut more: impl FnMut() -> Option<Work>,
    ) -> Result<(), SpoolError> {
        let began = Instant::now();
        let mut group_bytes = self.take(first)?;
        let mut group = 1;
        while group_bytes < GROUP_BYTES_MAX
            && let Some(next) = more()
        {
            group_bytes += self.take(next)?;
            group += 1;
        }
        if self.durable < self.written {
            self.harden()?;
            self.note_hardening(began.elapsed());
        }
        self.shared.done.send_modify(|done| *done += group);
        Ok(())
    }

    /// Writes log and makes it durable, if that is a matter of nothing but the segment that is
    /// open: `false` if it is not, or the disk refuses it, and it is to be handed over. What follows
    /// the last of it must be in the same segment.
    ///
    /// # Errors
    /// Why nothing is written any more: an fdatasync that fails cannot be tried again. Whoever
    /// waits has been told.
    pub fn write_here(
        &mut self,
        timeline: Timeline,
        start: Lsn,
        pieces: &[Bytes],
    ) -> Result<bool, SpoolError> {
        let bytes: usize = pieces.iter().map(Bytes::len).sum();
        let (number, at) = self.place();
        let is_within = at + (bytes as u64) < self.size().get();
        let follows = timeline == self.timeline && start == self.written;
        let is_durable = self.durable == self.written;
        let Some(open) = self.open.as_ref().filter(|open| open.number == number) else {
            return Ok(false);
        };
        if !is_within || !follows || !is_durable || self.needs_floor || bytes == 0 {
            return Ok(false);
        }
        let began = Instant::now();
        fault::point("spool.before-write");
        let mut end = at;
        for piece in pieces {
            if open.write(piece, end).is_err() {
                // What was written of it is behind the end of log, and comes again.
                return Ok(false);
            }
            end += piece.len() as u64;
        }
        self.written = Lsn(self.written.0 + bytes as u64);
        self.publish_written();
        if let Err(error) = self.harden() {
            self.stop(error.clone());
            return Err(error);
        }
        self.note_hardening(began.elapsed());
        Ok(true)
    }

    fn note_hardening(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.shared.harden_total_us.fetch_add(micros, Relaxed);
        self.shared.harden_last_us.store(micros, Relaxed);
    }

    /// Tells whoever waits why nothing is written any more.
    fn stop(&self, error: SpoolError) {
        self.shared.stop(error);
    }

    fn size(&self) -> SegmentBytes {
        self.state.identity.segment
    }

    /// How many bytes of log it was.
    fn take(&mut self, work: Work) -> Result<usize, SpoolError> {
        match work {
            Work::Write { timeline, start, data } => {
                if timeline != self.timeline || start != self.written {
                    return Err(SpoolError::DoesNotFollow {
                        timeline,
                        found: start,
                        expected: self.written,
                    });
                }
                self.write(&data)?;
                Ok(data.len())
            }
            Work::Switch { timeline, at } => self.switch(timeline, at).map(|()| 0),
        }
    }

    fn write(&mut self, data: &Bytes) -> Result<(), SpoolError> {
        let mut rest = &data[..];
        while !rest.is_empty() {
            let (number, at) = self.place();
            let room = (self.size().get() - at) as usize;
            let (piece, more) = rest.split_at(rest.len().min(room));
            fault::point("spool.before-write");
            self.until_it_goes(|writer| {
                let open = writer.opened(number)?;
                open.write(piece, at).map_err(SpoolError::io("write to", &open.path))
            })?;
            self.written = Lsn(self.written.0 + piece.len() as u64);
            rest = more;
            if self.size().floor(self.written) == self.written {
                self.roll()?;
            }
        }
        self.publish_written();
        Ok(())
    }

    /// The segment that comes next, and where in it.
    fn place(&self) -> (u64, u64) {
        (self.size().number(self.written), self.written.0 % self.size().get())
    }

    /// The segment is whole. Only once the next one is there is the boundary durable: the principal
    /// drops a segment as soon as it hears of its end, and without the next one recovery goes by
    /// whole records, of which the last one may reach over the boundary.
    fn roll(&mut self) -> Result<(), SpoolError> {
        self.sync()?;
        let (number, _) = self.place();
        self.until_it_goes(|writer| writer.opened(number).map(|_| ()))?;
        self.settle()
    }

    fn harden(&mut self) -> Result<(), SpoolError> {
        self.sync()?;
        self.settle()
    }

    fn sync(&mut self) -> Result<(), SpoolError> {
        if fault::defect("spool-durable-before-fsync") {
            return Ok(());
        }
        fault::point("spool.before-fsync");
        if let Some(open) = &self.open {
            open.file.sync_data().map_err(|error| SpoolError::NotDurable {
                path: open.path.clone(),
                error: Arc::new(error),
            })?;
            let start = self.size().start(open.number);
            open.tracked.synced(self.written.bytes_since(start));
        }
        fault::point("spool.after-fsync");
        self.shared.syncs.fetch_add(1, Relaxed);
        Ok(())
    }

    /// What was written has been made durable: says so.
    fn settle(&mut self) -> Result<(), SpoolError> {
        self.until_it_goes(Writer::keep_floor)?;
        self.durable = self.written;
        self.publish();
        Ok(())
    }

    fn keep_floor(&mut self) -> Result<(), SpoolError> {
        if !self.needs_floor || fault::defect("spool-durable-before-fsync") {
            return Ok(());
        }
        let folder = self.shared.folder.clone();
        let history = folder::history(&folder, self.timeline)?;
        let listing = folder::Listing::read(&folder, self.size())?;
        let first_segment = self.size().number(self.state.begin);
        if listing.segments.first().is_none_or(|oldest| oldest.number > first_segment) {
            self.needs_floor = false;
            return Ok(());
        }
        let mut pages = super::recovery::SpoolPages::new(
            &folder,
            self.size(),
            self.timeline,
            &history,
            &listing,
        );
        let first = match wal::first_record(&mut pages, self.state.begin) {
            // It was forgotten since it was listed: that is seen the next time.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Some(Lsn::MAX),
            first => first.map_err(SpoolError::io("read", &folder))?,
        };
        self.state.floor = self.written;
        self.state.write(&folder)?;
        self.needs_floor = first.is_none_or(|first| first > self.written);
        Ok(())
    }

    #[cfg(test)]
    pub(super) fn spare_is_made(&self) -> bool {
        self.spare.as_ref().is_some_and(JoinHandle::is_finished)
    }

    /// For who waits for log to be durable, and everybody else.
    fn publish(&self) {
        self.shared.positions.send_modify(|positions| self.show(positions));
    }

    /// For who looks anyway: nobody is woken for log that is not durable yet.
    fn publish_written(&self) {
        if fault::defect("mirror-reply-from-received") {
            return self.publish();
        }
        self.shared.positions.send_if_modified(|positions| {
            self.show(positions);
            false
        });
    }

    fn show(&self, positions: &mut Positions) {
        *positions =
            Positions { timeline: self.timeline, written: self.written, durable: self.durable };
    }

    /// Goes over to a timeline that left this one at `at`: as PostgreSQL does, its first segment
    /// begins with what this one has of it.
    fn switch(&mut self, timeline: Timeline, at: Lsn) -> Result<(), SpoolError> {
        if self.durable < self.written {
            self.harden()?;
        }
        let (number, bytes) = self.place();
        let size = self.size();
        let folder = self.shared.folder.clone();
        let positions = *self.shared.positions.borrow();
        check_switch(&folder, positions, timeline, at)?;
        let old = folder.join(Segment { timeline: self.timeline, number }.file_name(size));
        self.open = None;
        self.needs_floor = false;
        if bytes > 0 {
            let new = folder.join(Segment { timeline, number }.file_name(size));
            let copy = folder.join("switch.tmp");
            self.until_it_goes(|_| {
                zeroed(&copy, size)?;
                let whole = std::fs::read(&old).map_err(SpoolError::io("read", &old))?;
                let prefix = &whole[..whole.len().min(bytes as usize)];
                OpenOptions::new()
                    .write(true)
                    .open(&copy)
                    .and_then(|file| file.write_all_at(prefix, 0).and_then(|()| file.sync_all()))
                    .map_err(SpoolError::io("write", &copy))
            })?;
            std::fs::rename(&copy, &new).map_err(SpoolError::io("rename", &copy))?;
            folder::sync(&folder)?;
        }
        self.timeline = timeline;
        self.publish();
        Ok(())
    }

    /// Log from `end` on, which is in the segment that is filled, has not come. `false` if more has than
    /// `from` says.
    pub fn go_back(&mut self, from: Positions, end: Lsn) -> Result<bool, SpoolError> {
        let is_as_seen = self.timeline == from.timeline && self.written == from.durable;
        if !is_as_seen || self.durable != self.written {
            return Ok(false);
        }
        if self.timeline == self.state.timeline && self.state.floor > end {
            let state = State { floor: end, ..self.state };
            state.write(&self.shared.folder)?;
            self.state = state;
        }
        // What is behind counts as old log.
        self.open = None;
        (self.written, self.durable) = (end, end);
        self.publish();
        Ok(true)
    }

    /// The segment of this number, made if it is not there.
    fn opened(&mut self, number: u64) -> Result<&Open, SpoolError> {
        let is_open = self.open.as_ref().is_some_and(|open| open.number == number);
        if !is_open {
            let opened = self.open_segment(number)?;
            if self.spare.is_none() {
                match make_spare(self.shared.clone()) {
                    Ok(spare) => self.spare = Some(spare),
                    // It is made when it is needed, then.
                    Err(error) => tracing::warn!("no segment is made ahead: {error}"),
                }
            }
            return Ok(self.open.insert(opened));
        }
        self.open.as_ref().ok_or(SpoolError::Closing)
    }

    fn open_segment(&mut self, number: u64) -> Result<Open, SpoolError> {
        let name = Segment { timeline: self.timeline, number }.file_name(self.size());
        let path = self.shared.folder.join(name);
        let is_new = !path.exists();
        // Of one that is there, nobody knows.
        let mut has_old_log = true;
        if is_new {
            fault::point("spool.before-roll");
            has_old_log = match self.spare.take().map(JoinHandle::join) {
                Some(Ok(Ok(spare))) if spare.becomes(&path)? => spare.has_old_log,
                made => {
                    // No room is waited for here, and is told by who waits.
                    if let Some(Ok(Err(error))) = made
                        && !error.is_out_of_room()
                    {
                        tracing::warn!("the next segment is made anew: {error}");
                    }
                    let spare = spare(&self.shared)?;
                    let renamed = std::fs::rename(&spare.path, &path);
                    renamed.map_err(SpoolError::io("rename", &spare.path))?;
                    spare.has_old_log
                }
            };
        }
        // Also if it is there: an attempt before this one may have failed here.
        sync_names(&self.shared.folder)?;
        if is_new {
            fault::point("spool.after-roll");
        }
        let file =
            OpenOptions::new().write(true).open(&path).map_err(SpoolError::io("open", &path))?;
        let start = self.size().start(number);
        let tracked = Tracked::new(&path, self.durable.bytes_since(start));
        Ok(Open { number, path, file, tracked, has_old_log })
    }

    /// Does it again and again while the disk is full, or refuses for another reason that may pass.
    /// Nothing is acknowledged meanwhile, so the principal keeps what comes next.
    fn until_it_goes<T>(
        &mut self,
        mut attempt: impl FnMut(&mut Writer) -> Result<T, SpoolError>,
    ) -> Result<T, SpoolError> {
        let mut pause = AGAIN;
        loop {
            match attempt(self) {
                Err(error) if error.may_pass() => {
                    if self.shared.trouble.borrow().is_none() {
                        let what = if error.is_out_of_room() { "for room on" } else { "for" };
                        tracing::warn!("the mirror waits {what} the disk: {error}");
                    }
                    if !error.is_out_of_room() {
                        pause = AGAIN_MAX.min(pause * 2);
                    }
                    self.shared.trouble.send_replace(Some(error));
                    let again_at = Instant::now() + pause;
                    while Instant::now() < again_at {
                        if self.shared.is_closing.load(Relaxed) {
                            return Err(SpoolError::Closing);
                        }
                        if let Some(failure) = self.shared.failure.get() {
                            return Err(failure.clone());
                        }
                        std::thread::park_timeout(AGAIN);
                    }
                }
                done => {
                    if self.shared.trouble.borrow().is_some() {
                        self.shared.trouble.send_replace(None);
                    }
                    return done;
                }
            }
        }
    }
}

impl Open {
    /// What is written goes up to the end of a page at least: behind it are zeros, and not old log.
    /// So a page that is not in memory need not be read to be written in part.
    fn write(&self, piece: &[u8], at: u64) -> std::io::Result<()> {
        let end = at + piece.len() as u64;
        let last_page = end - end % PAGE_BYTES;
        let begins_page = at <= last_page && last_page < end;
        if self.has_old_log && begins_page {
            let zeros = (PAGE_BYTES - end % PAGE_BYTES) as usize;
            let mut padded = Vec::with_capacity(piece.len() + zeros);
            padded.extend_from_slice(piece);
            padded.resize(piece.len() + zeros, 0);
            return self.file.write_all_at(&padded, at);
        }
        self.file.write_all_at(piece, at)
    }
}

/// Whether `timeline` goes on where log that is durable as a whole ends.
pub(super) fn check_switch(
    folder: &Path,
    positions: Positions,
    timeline: Timeline,
    at: Lsn,
) -> Result<(), SpoolError> {
    let Positions { timeline: own, durable, .. } = positions;
    if at < durable || timeline <= own {
        return Err(SpoolError::Diverged { timeline, switch: at, own, durable });
    }
    if at > durable {
        return Err(SpoolError::DoesNotFollow { timeline, found: at, expected: durable });
    }
    // Without it, neither recovery nor a standby finds the way back to this one.
    let left = folder::history(folder, timeline)?.left(timeline, own);
    if left.is_none_or(|(left_at, _)| left_at != at) {
        return Err(SpoolError::NoHistory { timeline, switch: at, own });
    }
    Ok(())
}

fn make_spare(shared: Arc<Shared>) -> Result<JoinHandle<Result<Spare, SpoolError>>, SpoolError> {
    let folder = shared.folder.clone();
    std::thread::Builder::new()
        .name("spool-spare".to_owned())
        .spawn(move || spare(&shared))
        .map_err(SpoolError::io("start a thread for", &folder))
}

/// A file for a segment to come, durable: writing to it needs no new blocks, so fdatasync is fast
/// and a full disk shows here and not later.
fn spare(shared: &Shared) -> Result<Spare, SpoolError> {
    let (path, size) = (shared.folder.join(SPARE), shared.identity.segment);
    let has_old_log = shared.forgotten.take_old(&path);
    if has_old_log {
        clear_first_page(&path)?;
    } else {
        zeroed(&path, size)?;
    }
    Ok(Spare { path, has_old_log })
}

/// A record names the one before, by which old ones are known; the first of a segment may have none
/// before it that is looked at.
fn clear_first_page(path: &Path) -> Result<(), SpoolError> {
    let zeros = [0; PAGE_BYTES as usize];
    OpenOptions::new()
        .write(true)
        .open(path)
        .and_then(|file| file.write_all_at(&zeros, 0).and_then(|()| file.sync_data()))
        .map_err(SpoolError::io("write to", path))
}

/// As [`folder::sync`]; a failure that does not pass is known by its error.
fn sync_names(folder: &Path) -> Result<(), SpoolError> {
    let names = File::open(folder).map_err(SpoolError::io("open", folder))?;
    names
        .sync_all()
        .map_err(|error| SpoolError::NotDurable { path: folder.to_owned(), error: Arc::new(error) })
}

/// A segment of zeros, durable.
fn zeroed(path: &Path, size: SegmentBytes) -> Result<(), SpoolError> {
    let write = || {
        let mut file = File::create(path)?;
        let zeros = vec![0; 1 << 20];
        for _ in 0..size.get() / zeros.len() as u64 {
            file.write_all(&zeros)?;
        }
        file.sync_all()
    };
    write().map_err(|error| {
        // What there is of it takes up room.
        let _ = std::fs::remove_file(path);
        SpoolError::io("write", path)(error)
    })
}
