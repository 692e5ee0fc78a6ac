//! What a crash left, and what of it is durable. One row of the table, one test:
//!
//! | state file | segments | then |
//! | --- | --- | --- |
//! | none | none | nothing was begun |
//! | none | some | error: the state file is missing |
//! | damaged | any | error |
//! | there | none, and nothing was ever durable | empty, from its beginning |
//! | there | none, and something was durable | error: missing |
//! | there | a hole, or no history of the newest timeline | error: missing |
//! | there | one of another size | error |
//! | there | all whole | up to the last whole record of the newest one |
//! | there | unsound before what is known to have been durable | error: damaged |
//! | there | unsound behind that | the torn end of what was being written: it is not claimed |
//! | there | the newest begins within a record whose beginning is not here | the state file's floor, until the scan gets behind that record |
//! | any | leftovers | removed |
//!
//! Why this is enough: a segment is made only after the one before it is durable as a whole, and
//! the boundary between them is told to anybody only after it is made. So everything before the
//! newest segment is durable, nothing behind that was claimed but by its bytes, and every record
//! that was acknowledged is durable: it and all before it are whole, and the scan finds them. Before
//! anything is claimed, what was scanned is written over itself and fdatasynced: the process may have
//! died and the kernel not, or an fdatasync before may have failed ([`mend`]).

use super::folder::{self, Listing};
use super::state::State;
use super::{Positions, SpoolError};
use crate::history::History;
use crate::wal::{self, PAGE_BYTES, Pages, Segment, Settings, Timeline};
use farshore_model::Lsn;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A spool as it was found.
#[derive(Debug)]
pub(super) struct Recovered {
    pub state: State,
    pub positions: Positions,
}

/// Decides what is durable, by the table above. `None` if nothing was begun.
pub(super) fn recover(folder: &Path) -> Result<Option<Recovered>, SpoolError> {
    let Some(state) = State::read(folder)? else {
        // Any size tells whether there are segments.
        let any_size = wal::SegmentBytes::new(1 << 20);
        let found = any_size.map(|size| Listing::read(folder, size)).transpose()?;
        if found.is_some_and(|listing| !listing.segments.is_empty()) {
            return Err(SpoolError::Missing { path: folder.join(folder::STATE) });
        }
        return Ok(None);
    };
    let size = state.identity.segment;
    let listing = Listing::read(folder, size)?;
    for name in &listing.leftovers {
        folder::remove(&folder.join(name))?;
    }
    let path = |segment: Segment| folder.join(segment.file_name(size));
    let newest_timeline = listing.segments.iter().map(|segment| segment.timeline).max();
    let Some(timeline) = newest_timeline else {
        if state.floor > state.begin {
            let number = size.number(state.begin);
            return Err(SpoolError::Missing {
                path: path(Segment { timeline: state.timeline, number }),
            });
        }
        let positions =
            Positions { timeline: state.timeline, written: state.begin, durable: state.begin };
        return Ok(Some(Recovered { state, positions }));
    };
    let history = folder::history(folder, timeline)?;
    if timeline > state.timeline && history.left(timeline, state.timeline).is_none() {
        return Err(SpoolError::Missing { path: folder.join(wal::history_file_name(timeline)) });
    }
    let newest = newest_of(&listing, timeline);
    let oldest = listing.segments.first().map_or(newest.number, |segment| segment.number);
    for number in oldest..=newest.number {
        let found = listing.find(timeline, &history, number);
        let segment = found.unwrap_or(Segment { timeline, number });
        let length = match std::fs::metadata(path(segment)) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(SpoolError::Missing { path: path(segment) });
            }
            Err(error) => return Err(SpoolError::io("look at", &path(segment))(error)),
        };
        if length != size.get() {
            return Err(SpoolError::Size {
                path: path(segment),
                found: length,
                expected: size.get(),
            });
        }
    }
    let known = known_durable(&state, timeline, &history, newest);
    let mut pages = SpoolPages::new(folder, size, timeline, &history, &listing);
    let durable = scan(&mut pages, oldest, newest.number, known)?;
    mend(&path(newest), size.start(newest.number), known, durable)?;
    folder::sync(folder)?;
    Ok(Some(Recovered { state, positions: Positions { timeline, written: durable, durable } }))
}

/// Makes sure that the segment that begins at `start` is on the disk up to `durable`.
///
/// It may have been read from the page cache after its fdatasync failed: the kernel then holds it as
/// clean although the disk does not have it, and another fdatasync would do nothing. So what none
/// before is `known` to have covered is written over itself first.
fn mend(path: &Path, start: Lsn, known: Lsn, durable: Lsn) -> Result<(), SpoolError> {
    let opened = OpenOptions::new().read(true).write(true).open(path);
    let file = opened.map_err(SpoolError::io("open", path))?;
    let (mut at, end) = (known.bytes_since(start), durable.bytes_since(start));
    let mut buffer = vec![0; REWRITTEN_AT_ONCE.min(end.saturating_sub(at)) as usize];
    while at < end {
        let piece = &mut buffer[..(end - at).min(REWRITTEN_AT_ONCE) as usize];
        file.read_exact_at(piece, at).map_err(SpoolError::io("read", path))?;
        file.write_all_at(piece, at).map_err(SpoolError::io("write to", path))?;
        at += piece.len() as u64;
    }
    file.sync_data().map_err(SpoolError::io("sync", path))
}

/// Bytes of a segment that are in memory while it is written over itself.
const REWRITTEN_AT_ONCE: u64 = 1 << 20;

fn newest_of(listing: &Listing, timeline: Timeline) -> Segment {
    let mut own = listing.segments.iter().filter(|segment| segment.timeline == timeline);
    own.next_back().copied().unwrap_or(Segment { timeline, number: 0 })
}

/// What is durable whatever the newest segment holds.
fn known_durable(state: &State, timeline: Timeline, history: &History, newest: Segment) -> Lsn {
    let size = state.identity.segment;
    let start = size.start(newest.number);
    let (switched_at, floor) = if timeline == state.timeline {
        // It never switched: the log before the place where this timeline begins had to come too.
        (Lsn::ZERO, state.floor)
    } else {
        // The segment that the timeline begins in came into being with what the one before had.
        (history.0.last().map_or(Lsn::ZERO, |ancestor| ancestor.left_at), Lsn::ZERO)
    };
    // The floor may be this segment's end.
    let within = start.0..=size.start(newest.number + 1).0;
    let within = |position: Lsn| if within.contains(&position.0) { position } else { start };
    start.max(within(switched_at)).max(within(floor))
}

/// The end of the last whole record in the newest segment, or what is known if that is more.
fn scan(
    pages: &mut SpoolPages<'_>,
    oldest: u64,
    newest: u64,
    known: Lsn,
) -> Result<Lsn, SpoolError> {
    let size = pages.size;
    let failed = |error: std::io::Error, folder: &Path| SpoolError::io("read", folder)(error);
    let folder = pages.folder.to_owned();
    let (from, first) = row_into(pages, oldest, newest).map_err(|e| failed(e, &folder))?;
    let start = size.start(from);
    let is_within = wal::begins_within_record(pages, start).map_err(|e| failed(e, &folder))?;
    let first = match first {
        // The rest of a record whose beginning is not here cannot be checked.
        Some(first) if is_within && first > known => return Ok(known),
        None if is_within => return Ok(known),
        Some(first) => first,
        None if known > start => return Err(pages.damaged(start, start, known)),
        None => return Ok(known),
    };
    let scanned = wal::scan(pages, first, size, Lsn::MAX).map_err(|e| failed(e, &folder))?;
    if scanned.stopped_at < known {
        return Err(pages.damaged(scanned.end, scanned.stopped_at, known));
    }
    // What follows a record that ends its segment has no checksum, and may be old log: it comes again.
    // But an earlier version, with which there was no old log, may have claimed it.
    let claims_all = State::is_of_earlier_version(&folder)
        || super::noted::read(&folder)?.is_some_and(|noted| noted >= scanned.end);
    Ok(if claims_all { scanned.end } else { scanned.bytes_end }.max(known))
}

/// Where a row of records begins that leads into the segment `number`: with its first record if none
/// reaches into it, or in the segment before, since the one that reaches into it can only be checked
/// as a whole. A record that is longer than a segment is looked for further back, down to `oldest`.
/// The segment that it begins in, and the record, if it can be told where one begins.
fn row_into(
    pages: &mut SpoolPages<'_>,
    oldest: u64,
    number: u64,
) -> std::io::Result<(u64, Option<Lsn>)> {
    let size = pages.size;
    let mut from = number.max(oldest);
    let start = size.start(from);
    if !wal::begins_within_record(pages, start)? {
        return Ok((from, wal::first_record(pages, start)?));
    }
    while from > oldest {
        from -= 1;
        let first = wal::first_record(pages, size.start(from))?;
        if first.is_some_and(|first| first < start) {
            return Ok((from, first));
        }
    }
    Ok((from, wal::first_record(pages, size.start(from))?))
}

/// Where a look at the log begins.
#[derive(Clone, Copy, Debug)]
pub(super) enum LookFrom {
    /// With the newest segment.
    Newest,
    /// With the segment that holds this position.
    SegmentOf(Lsn),
    /// The same, but for a record that reaches into it: that is damaged.
    FirstOf(Lsn),
    /// Behind the record that ends here.
    Record(Lsn),
}

/// The end of the last whole record before `positions.durable`, having checked all from `from` on;
/// `None` if the record that reaches up to there cannot be checked from here.
pub(super) fn last_record_end(
    folder: &Path,
    size: wal::SegmentBytes,
    positions: Positions,
    from: LookFrom,
) -> Result<Option<Lsn>, SpoolError> {
    let Positions { timeline, durable, .. } = positions;
    let listing = Listing::read(folder, size)?;
    let Some(oldest) = listing.segments.first().map(|segment| segment.number) else {
        return Ok(None);
    };
    let history = folder::history(folder, timeline)?;
    let mut pages = SpoolPages::new(folder, size, timeline, &history, &listing);
    let failed = |error: std::io::Error| SpoolError::io("read", folder)(error);
    // A segment that was just made holds nothing of it.
    let newest = size.number(Lsn(durable.0.saturating_sub(1)));
    let first = match from {
        LookFrom::Newest => row_into(&mut pages, oldest, newest).map_err(failed)?.1,
        LookFrom::SegmentOf(position) => {
            row_into(&mut pages, oldest, size.number(position).min(newest)).map_err(failed)?.1
        }
        LookFrom::FirstOf(position) => {
            let start = size.start(size.number(position).max(oldest));
            wal::first_record(&mut pages, start).map_err(failed)?
        }
        // The segment was removed since.
        LookFrom::Record(end) if size.number(end) < oldest => {
            row_into(&mut pages, oldest, newest).map_err(failed)?.1
        }
        LookFrom::Record(end) => Some(end),
    };
    match first {
        Some(first) if first <= durable => {
            // Records begin at multiples of 8. What is behind may be being written at present.
            let bound = Lsn(durable.0.next_multiple_of(8));
            let scanned = wal::scan(&mut pages, first, size, bound).map_err(failed)?;
            // The end of what came is within a record or behind one; anything else is damage, and
            // whoever had the log only up to there would lack what is behind it.
            if scanned.stopped_at < durable {
                return Err(pages.damaged(scanned.end, scanned.stopped_at, durable));
            }
            // What follows a record that ends its segment belongs to it, once it is all there.
            Ok(Some(if scanned.end > durable { scanned.bytes_end } else { scanned.end }))
        }
        Some(_) | None => Ok(None),
    }
}

/// What a server has to replay that goes on at `from`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToReplay {
    /// The highest settings that the log says, and where it says the first of them.
    pub needs: Option<(Lsn, Settings)>,
    /// The record at `from` was read: what is there is no settings unless it is among those.
    pub is_next_known: bool,
}

/// What the log between `from` and `end` says of settings, as far as it is here and sound.
pub(super) fn to_replay(
    folder: &Path,
    size: wal::SegmentBytes,
    timeline: Timeline,
    (from, end): (Lsn, Lsn),
) -> Result<ToReplay, SpoolError> {
    let listing = Listing::read(folder, size)?;
    let mut found = ToReplay { needs: None, is_next_known: false };
    let Some(oldest) = listing.segments.first().map(|segment| segment.number) else {
        return Ok(found);
    };
    let history = folder::history(folder, timeline)?;
    let mut pages = SpoolPages::new(folder, size, timeline, &history, &listing);
    let failed = |error: std::io::Error| SpoolError::io("read", folder)(error);
    let row = row_into(&mut pages, oldest, size.number(from)).map_err(failed)?;
    let Some(first) = row.1 else { return Ok(found) };
    let tell = |begin: Lsn, settings: Settings| {
        // What is before was replayed, and may have been more.
        if begin >= from {
            let (at, needed) = found.needs.unwrap_or((begin, settings));
            found.needs = Some((at, needed.max(settings)));
        }
    };
    let scanned = wal::scan_for_settings(&mut pages, first, size, end, tell).map_err(failed)?;
    // The first record of a page begins behind the page's header.
    found.is_next_known = size.number(from) >= oldest && scanned.end > from;
    Ok(found)
}

/// Whether the segments before `candidate` can go: the newest segment's first record must still be
/// found from what is left.
pub(super) fn may_be_oldest(
    folder: &Path,
    size: wal::SegmentBytes,
    candidate: Segment,
) -> Result<bool, SpoolError> {
    let listing = Listing::read(folder, size)?;
    let Some(timeline) = listing.segments.iter().map(|segment| segment.timeline).max() else {
        return Ok(false);
    };
    let newest = newest_of(&listing, timeline);
    let history = folder::history(folder, timeline)?;
    let mut pages = SpoolPages::new(folder, size, timeline, &history, &listing);
    let start = size.start(candidate.number);
    let first = wal::first_record(&mut pages, start).map_err(SpoolError::io("read", folder))?;
    Ok(candidate.number < newest.number
        && first.is_some_and(|first| first <= size.start(newest.number)))
}

/// The spool's pages, as who is on its newest timeline sees them.
pub(super) struct SpoolPages<'a> {
    folder: &'a Path,
    size: wal::SegmentBytes,
    timeline: Timeline,
    history: &'a History,
    listing: &'a Listing,
    open: Option<(u64, File)>,
    /// Pages in a row: most records are shorter than a page.
    read: Vec<u8>,
    /// Where the first of them begins.
    read_from: Lsn,
}

/// Pages that are read at once; a segment, whatever its size, is a multiple of it.
const READ_BYTES: u64 = 32 * PAGE_BYTES;

impl<'a> SpoolPages<'a> {
    pub fn new(
        folder: &'a Path,
        size: wal::SegmentBytes,
        timeline: Timeline,
        history: &'a History,
        listing: &'a Listing,
    ) -> SpoolPages<'a> {
        let (read, read_from) = (Vec::new(), Lsn::ZERO);
        SpoolPages { folder, size, timeline, history, listing, open: None, read, read_from }
    }

    fn path(&self, number: u64) -> Option<PathBuf> {
        let segment = self.listing.find(self.timeline, self.history, number)?;
        Some(self.folder.join(segment.file_name(self.size)))
    }

    fn damaged(&self, sound_to: Lsn, position: Lsn, durable: Lsn) -> SpoolError {
        let path = self.path(self.size.number(position));
        let path = path.unwrap_or_else(|| self.folder.to_owned());
        SpoolError::Damaged { path, position, sound_to, durable }
    }
}

impl Pages for SpoolPages<'_> {
    /// What is written meanwhile may not be seen: nobody looks behind what was durable before.
    fn page(&mut self, address: Lsn) -> std::io::Result<Option<&[u8]>> {
        let number = self.size.number(address);
        if self.open.as_ref().is_none_or(|(open, _)| *open != number) {
            let Some(path) = self.path(number) else { return Ok(None) };
            self.open = Some((number, File::open(path)?));
            self.read.clear();
        }
        let Some((_, file)) = &self.open else { return Ok(None) };
        let read_from = Lsn(address.0 - address.0 % READ_BYTES);
        if self.read.is_empty() || read_from != self.read_from {
            self.read.resize(READ_BYTES as usize, 0);
            if let Err(error) = file.read_exact_at(&mut self.read, read_from.0 % self.size.get()) {
                self.read.clear();
                return Err(error);
            }
            self.read_from = read_from;
        }
        let at = (address.0 - read_from.0) as usize;
        Ok(self.read.get(at..at + PAGE_BYTES as usize))
    }
}
