//! Looks at everything in the folder and changes nothing.

use super::super::block::{self, BlockReader, Container, Kind};
use super::super::cursors::{Notes, SavedCursors};
use super::super::dictionary::Dictionary;
use super::super::folder::{
    Name, SmallFile, classify, index_path, read_small, segment_path, spill_path,
};
use super::super::index::{IndexFile, IndexFound};
use super::super::scan::{Tail, holds_a_block, scan};
use super::super::segment::{
    FILE_HEADER_LEN, FileHeader, HeaderError, Published, SEGMENT_MAGIC, Written, definitions,
};
use super::super::spill::{Finished, SpillError, SpillFile};
use super::super::{Options, io_error};
use super::decision::Case;
use super::{Findings, Newest, Recovered, RecoveredSegment, RecoveryReport, newer};
use crate::{SpillId, StoreError};
use bytes::Bytes;
use farshore_model::{DictionaryId, Lsn};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

pub(super) struct Surveyed {
    pub recovered: Recovered,
    pub newest: Option<Newest>,
    /// Indexes to write, each with its segment's path.
    pub rebuilt: Vec<(PathBuf, IndexFile)>,
    pub findings: Findings,
}

/// The files of the folder, by what their names say.
#[derive(Default)]
struct Names {
    segments: BTreeSet<Lsn>,
    indexes: BTreeSet<Lsn>,
    spills: BTreeSet<SpillId>,
}

/// A segment whose header is good. Without its file: there may be more segments than a process may
/// have files open.
struct Headed {
    path: PathBuf,
    len: u64,
    header: FileHeader,
}

struct Survey<'a> {
    dir: &'a Path,
    options: &'a Options,
    findings: Findings,
    rebuilt: Vec<(PathBuf, IndexFile)>,
    segments: Vec<RecoveredSegment>,
    definitions: Vec<(DictionaryId, Bytes)>,
    next_dictionary_id: u32,
    next_spill: u64,
}

pub(super) fn survey(dir: &Path, options: &Options) -> Result<Surveyed, StoreError> {
    let mut survey = Survey {
        dir,
        options,
        findings: Findings::default(),
        rebuilt: Vec::new(),
        segments: Vec::new(),
        definitions: Vec::new(),
        next_dictionary_id: 1,
        next_spill: 1,
    };
    let names = survey.list()?;
    let cursors = survey.cursors()?;
    let notes = survey.notes()?;
    let (headed, unfinished) = survey.read_headers(&names)?;
    let store_id = survey.store_id(&headed, cursors.as_ref())?;
    let newest = survey.examine_segments(headed, unfinished)?;
    survey.indexes_without_segment(&names)?;
    let spills = survey.spills(&names, store_id)?;
    let start = survey.segments.first().map_or(Lsn::ZERO, |segment| segment.start);
    let end = survey.segments.last().map_or(Lsn::ZERO, |segment| segment.published.last);
    survey.check_cursors(cursors.as_ref(), start, end)?;

    let mut dictionary = Dictionary::new(survey.next_dictionary_id);
    for (id, definition) in &survey.definitions {
        dictionary.restore(*id, definition);
    }
    let recovered = Recovered {
        store_id,
        segments: survey.segments,
        tail: None,
        dictionary,
        spills,
        next_spill: survey.next_spill,
        cursors: cursors.map(|saved| saved.cursors).unwrap_or_default(),
        notes,
        report: RecoveryReport { start, end, ..RecoveryReport::default() },
    };
    Ok(Surveyed { recovered, newest, rebuilt: survey.rebuilt, findings: survey.findings })
}

impl Survey<'_> {
    fn list(&mut self) -> Result<Names, StoreError> {
        let mut names = Names::default();
        let entries = std::fs::read_dir(self.dir).map_err(io_error("list", self.dir))?;
        for entry in entries {
            let entry = entry.map_err(io_error("list", self.dir))?;
            let path = entry.path();
            let is_file = entry.file_type().map_err(io_error("examine", &path))?.is_file();
            let name = entry.file_name().to_str().map_or(Name::Foreign, classify);
            match if is_file { name } else { Name::Foreign } {
                Name::Segment(start) => {
                    names.segments.insert(start);
                }
                Name::Index(start) => {
                    names.indexes.insert(start);
                }
                Name::Spill(spill) => {
                    names.spills.insert(spill);
                    self.next_spill = self.next_spill.max(spill.0.saturating_add(1));
                }
                Name::Lock | Name::Cursors | Name::Notes => {}
                Name::Old => self.findings.add(&path, Case::OldFile, String::new())?,
                Name::Leftover => self.findings.add(&path, Case::LeftoverFile, String::new())?,
                Name::Foreign => self.findings.add(&path, Case::ForeignFile, String::new())?,
            }
        }
        Ok(names)
    }

    fn small<T>(
        &mut self,
        kind: &str,
        case: Case,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, StoreError> {
        let path = self.dir.join(kind);
        let parsed = match read_small(&path, kind)? {
            SmallFile::Absent => return Ok(None),
            SmallFile::Newer(version) => return Err(newer(&path, version)),
            SmallFile::Damaged => None,
            SmallFile::Good(body) => parse(&body),
        };
        if parsed.is_none() {
            self.findings.add(&path, case, "its checksum or form is wrong".to_owned())?;
        }
        Ok(parsed)
    }

    fn cursors(&mut self) -> Result<Option<SavedCursors>, StoreError> {
        self.small("cursors", Case::CursorsDamaged, SavedCursors::parse)
    }

    fn notes(&mut self) -> Result<BTreeMap<String, String>, StoreError> {
        Ok(self.small("notes", Case::NotesDamaged, Notes::parse)?.unwrap_or_default())
    }

    /// Reads the headers of all segments, oldest first, and the start of a newest one that was never
    /// finished being created.
    fn read_headers(&mut self, names: &Names) -> Result<(Vec<Headed>, Option<Lsn>), StoreError> {
        let mut headed = Vec::new();
        let mut unfinished = None;
        for start in &names.segments {
            let path = segment_path(self.dir, *start);
            let newest = names.segments.last() == Some(start);
            let file = File::open(&path).map_err(io_error("open", &path))?;
            let len = file.metadata().map_err(io_error("examine", &path))?.len();
            if len == 0 {
                let case = if newest { Case::NewestEmpty } else { Case::OlderEmpty };
                self.findings.add(&path, case, "the file is empty".to_owned())?;
                unfinished = Some(*start);
                continue;
            }
            let mut head = vec![0; FILE_HEADER_LEN.min(len as usize)];
            file.read_exact_at(&mut head, 0).map_err(io_error("read", &path))?;
            let header = match FileHeader::decode(&head, SEGMENT_MAGIC) {
                Ok(header) => header,
                Err(HeaderError::Newer(version)) => {
                    return Err(newer(&path, version));
                }
                Err(HeaderError::Torn) => {
                    let blocks = holds_a_block(&file, len).map_err(io_error("read", &path))?;
                    let case = match (newest, blocks) {
                        (true, false) => Case::NewestHeaderTorn,
                        (true, true) => Case::NewestHeaderDamaged,
                        (false, _) => Case::OlderHeaderDamaged,
                    };
                    let detail = "at byte 0: the header's checksum does not match".to_owned();
                    self.findings.add(&path, case, detail)?;
                    unfinished = Some(*start);
                    continue;
                }
            };
            if header.start != *start {
                let detail = format!("its header says that it starts at {}", header.start);
                self.findings.add(&path, Case::HeaderNameMismatch, detail)?;
            }
            self.next_dictionary_id = self.next_dictionary_id.max(header.next_dictionary_id);
            self.next_spill = self.next_spill.max(header.next_spill_id);
            headed.push(Headed { path, len, header });
        }
        Ok((headed, unfinished))
    }

    /// The one store that all files belong to; a new random id if there are none.
    fn store_id(
        &mut self,
        headed: &[Headed],
        cursors: Option<&SavedCursors>,
    ) -> Result<u64, StoreError> {
        let known = cursors.map(|cursors| cursors.store_id);
        let first = headed.first().map(|segment| segment.header.container.store_id);
        let Some(store_id) = known.or(first) else { return Ok(super::super::random_id()) };
        for Headed { path, header, .. } in headed {
            let found = header.container.store_id;
            if found != store_id {
                let detail = format!("it belongs to store {found:016x}, not {store_id:016x}");
                self.findings.add(path, Case::OtherStore, detail)?;
            }
        }
        Ok(store_id)
    }

    fn examine_segments(
        &mut self,
        headed: Vec<Headed>,
        unfinished: Option<Lsn>,
    ) -> Result<Option<Newest>, StoreError> {
        if let Some(start) = unfinished.filter(|start| headed.is_empty() && *start > Lsn::ZERO) {
            // A roll finishes the new segment's header before anything older can be dropped.
            let path = segment_path(self.dir, start);
            let detail = "its header is lost and no older segment is there".to_owned();
            self.findings.add(&path, Case::NewestHeaderDamaged, detail)?;
        }
        let mut headed = headed.into_iter().peekable();
        let mut newest = None;
        while let Some(segment) = headed.next() {
            match headed.peek() {
                Some(next) => {
                    let follows = (next.header.start, next.header.container.number);
                    self.examine_older(segment, follows)?;
                }
                None => newest = Some(self.examine_newest(segment, unfinished)?),
            }
        }
        Ok(newest)
    }

    /// `next`: start and sequence number of the segment after this one.
    fn examine_older(&mut self, segment: Headed, next: (Lsn, u64)) -> Result<(), StoreError> {
        let Headed { path, len, header } = segment;
        let file = File::open(&path).map_err(io_error("open", &path))?;
        let (next_start, next_sequence) = next;
        let container = header.container;
        if next_sequence <= container.number {
            let detail = format!("its number {} is not below the next one's", container.number);
            self.findings.add(&path, Case::SegmentsOverlap, detail)?;
        }
        if next_sequence > container.number + 1 {
            let detail = format!(
                "{} segments between it and {next_start} are missing",
                next_sequence - container.number - 1
            );
            self.findings.add(&path, Case::SegmentMissing, detail)?;
        }
        let idx = index_path(&path);
        let found = IndexFile::read(&idx).map_err(io_error("read", &idx))?;
        let rebuild = match found {
            IndexFound::Good(index) => {
                let fits = index.store_id == container.store_id
                    && index.sequence == container.number
                    && index.last == next_start
                    && index.end <= len
                    && !self.options.verify_all;
                let found = if fits { read_definitions(&file, &index, container) } else { None };
                if let Some(found) = found {
                    self.definitions.extend(found);
                    self.findings.add(&path, Case::OlderWhole, String::new())?;
                    self.findings.add(&idx, Case::IndexFits, String::new())?;
                    self.segments.push(RecoveredSegment {
                        path,
                        sequence: container.number,
                        start: header.start,
                        blocks: index.blocks,
                        published: Published {
                            end: index.end,
                            last: index.last,
                            commit_times: index.commit_times,
                            spills: index.spills,
                            sealed: true,
                            index: None,
                            written: Written::now(),
                        },
                    });
                    return Ok(());
                }
                Some(index)
            }
            IndexFound::Absent => {
                self.findings.add(&idx, Case::IndexAbsent, String::new())?;
                None
            }
            IndexFound::Garbage => {
                self.findings.add(&idx, Case::IndexGarbage, String::new())?;
                None
            }
        };
        let scan = scan(&file, &path, &header)?;
        if scan.last > next_start {
            let detail =
                format!("it ends at {}, behind the next one's start {next_start}", scan.last);
            self.findings.add(&path, Case::SegmentsOverlap, detail)?;
        }
        if scan.last < next_start {
            let why = if scan.stopped_by.is_empty() { "its blocks end" } else { scan.stopped_by };
            let detail = format!(
                "at byte {}: {why}; {} to {next_start} cannot be read",
                scan.end, scan.last
            );
            self.findings.add(&path, Case::OlderDamaged, detail)?;
        }
        self.findings.add(&path, Case::OlderWhole, String::new())?;
        let index = super::index_of(&scan, container);
        match rebuild {
            Some(old) if old == index => {
                self.findings.add(&idx, Case::IndexFits, String::new())?;
            }
            Some(_) => {
                self.findings.add(&idx, Case::IndexWrong, String::new())?;
                self.rebuilt.push((path.clone(), index));
            }
            None => self.rebuilt.push((path.clone(), index)),
        }
        self.segments.push(RecoveredSegment {
            path,
            sequence: container.number,
            start: header.start,
            blocks: scan.blocks,
            published: super::published(&scan, true),
        });
        self.definitions.extend(scan.definitions);
        Ok(())
    }

    /// `unfinished`: start of a segment behind this one whose creation did not finish; it was
    /// begun only after everything in this one was durable.
    fn examine_newest(
        &mut self,
        segment: Headed,
        unfinished: Option<Lsn>,
    ) -> Result<Newest, StoreError> {
        let Headed { path, header, .. } = segment;
        let file = File::open(&path).map_err(io_error("open", &path))?;
        let scan = scan(&file, &path, &header)?;
        if let Some(next_start) = unfinished.filter(|start| *start != scan.last) {
            let detail = format!(
                "at byte {}: it ends at {}, but {next_start} was begun behind it",
                scan.end, scan.last
            );
            self.findings.add(&path, Case::OlderDamaged, detail)?;
        }
        let (case, detail) = match scan.tail {
            Tail::End => (Case::NewestWhole, String::new()),
            Tail::Zeros => (Case::NewestReserved, String::new()),
            Tail::Old => (Case::NewestOld, format!("at byte {}", scan.end)),
            Tail::Torn { end } => {
                let dropped = end - scan.end;
                let what = scan.stopped_by;
                let detail = format!(
                    "at byte {}: {what}; {dropped} bytes dropped behind {}",
                    scan.end, scan.last
                );
                (Case::NewestTorn, detail)
            }
            Tail::Damaged { proof } => {
                let detail = format!(
                    "at byte {}: {}, though it was durable when the block at byte {proof} was written",
                    scan.end, scan.stopped_by
                );
                (Case::NewestDamaged, detail)
            }
        };
        self.findings.add(&path, case, detail)?;
        self.segments.push(RecoveredSegment {
            path: path.clone(),
            sequence: header.container.number,
            start: header.start,
            blocks: scan.blocks,
            published: super::published(&scan, false),
        });
        self.definitions.extend(scan.definitions.iter().cloned());
        Ok(Newest { path, scan })
    }

    fn indexes_without_segment(&mut self, names: &Names) -> Result<(), StoreError> {
        let newest = names.segments.last();
        for start in &names.indexes {
            // The newest segment's index is of no use either: it is kept in memory and written
            // anew when the segment is sealed.
            if !names.segments.contains(start) || newest == Some(start) {
                let path = index_path(&segment_path(self.dir, *start));
                self.findings.add(&path, Case::IndexWithoutSegment, String::new())?;
            }
        }
        Ok(())
    }

    fn spills(
        &mut self,
        names: &Names,
        store_id: u64,
    ) -> Result<HashMap<SpillId, Finished>, StoreError> {
        let mut finished = HashMap::new();
        let segments = self.segments.iter();
        let referenced: BTreeSet<SpillId> =
            segments.flat_map(|segment| segment.published.spills.iter().copied()).collect();
        for spill in names.spills.difference(&referenced) {
            let path = spill_path(self.dir, *spill);
            self.findings.add(&path, Case::SpillUnreferenced, String::new())?;
        }
        for spill in referenced {
            self.next_spill = self.next_spill.max(spill.0.saturating_add(1));
            let path = spill_path(self.dir, spill);
            let opened = SpillFile::open(&path, store_id, spill)
                .and_then(|file| Ok((file.definitions()?, file.bytes)));
            let (case, detail) = match opened {
                Ok((found, bytes)) => {
                    self.definitions.extend(found);
                    finished.insert(spill, Finished { bytes, committed: true, instance: 0 });
                    (Case::SpillWhole, String::new())
                }
                Err(SpillError::Missing) => {
                    (Case::SpillMissing, "a committed transaction's body is missing".to_owned())
                }
                Err(SpillError::Damaged(what)) => (Case::SpillDamaged, what),
                Err(SpillError::Newer(version)) => {
                    return Err(newer(&path, version));
                }
                Err(SpillError::Io(error)) => return Err(error),
            };
            self.findings.add(&path, case, detail)?;
        }
        Ok(finished)
    }

    fn check_cursors(
        &mut self,
        cursors: Option<&SavedCursors>,
        start: Lsn,
        end: Lsn,
    ) -> Result<(), StoreError> {
        let Some(saved) = cursors else { return Ok(()) };
        if saved.log_end > end {
            let detail = format!(
                "the log ends at {end} although {} was durable: its newest segments are missing or cut",
                saved.log_end
            );
            self.findings.add(self.dir, Case::LogShorterThanRecorded, detail)?;
        }
        for cursor in &saved.cursors {
            if cursor.expired.is_none() && cursor.applied.0 < start {
                let detail = format!(
                    "subscription {} needs what follows {}, but the oldest segment starts at {start}",
                    cursor.name, cursor.applied
                );
                self.findings.add(self.dir, Case::CursorBeforeLog, detail)?;
            }
        }
        Ok(())
    }
}

/// The definitions at the places an index names; `None` if the index is wrong.
fn read_definitions(
    file: &File,
    index: &IndexFile,
    container: Container,
) -> Option<Vec<(DictionaryId, Bytes)>> {
    let mut reader = BlockReader::new();
    let mut found = Vec::new();
    for offset in &index.sparse.definitions {
        let header = block::read_header(file, *offset, index.end).ok()?;
        if header.content.kind != Kind::Definitions || header.container != container {
            return None;
        }
        let raw = reader.read_payload(file, *offset, &header).ok()?;
        found.extend(definitions(&raw)?);
    }
    Some(found)
}
