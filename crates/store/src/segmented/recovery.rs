//! Opening: survey the folder without changing it, decide every finding by the table in
//! [`decision`], refuse if any finding says so, and only then change files.

pub mod decision;
mod survey;

use super::block::Container;
use super::dictionary::Dictionary;
use super::folder::{index_path, remove, sync_dir};
use super::index::{IndexFile, SparseIndex};
use super::scan::Scan;
use super::segment::{Published, Written};
use super::spill::Finished;
use super::{Options, damaged_with, io_error};
use crate::{SpillId, StoreError};
pub use decision::{Action, Case, decide};
use farshore_model::Lsn;
use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes rewritten at a time.
const REWRITE_STEP: u64 = 1 << 20;

/// One thing found when the store was opened, and what was done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The file.
    pub path: PathBuf,
    /// What was found.
    pub case: Case,
    /// What was done.
    pub action: Action,
    /// Particulars, with byte offsets; may be empty.
    pub detail: String,
}

/// What opening a store found and did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// Everything found, file by file.
    pub findings: Vec<Finding>,
    /// Bytes cut from the newest segment that were never acknowledged as durable.
    pub bytes_dropped: u64,
    /// Everything after this position can be read.
    pub start: Lsn,
    /// Newest durable position.
    pub end: Lsn,
}

impl RecoveryReport {
    /// Whether a case was found.
    pub fn found(&self, case: Case) -> bool {
        self.findings.iter().any(|finding| finding.case == case)
    }
}

/// A segment as recovered.
pub(super) struct RecoveredSegment {
    pub path: PathBuf,
    pub sequence: u64,
    pub start: Lsn,
    pub published: Published,
    pub blocks: u64,
}

/// The newest segment, to be written on.
pub(super) struct RecoveredTail {
    pub file: File,
    pub held: Vec<farshore_model::DictionaryId>,
}

/// Everything the folder held.
pub(super) struct Recovered {
    pub store_id: u64,
    pub segments: Vec<RecoveredSegment>,
    pub tail: Option<RecoveredTail>,
    pub dictionary: Dictionary,
    pub spills: HashMap<SpillId, Finished>,
    pub next_spill: u64,
    pub cursors: Vec<crate::Cursor>,
    pub notes: BTreeMap<String, String>,
    pub report: RecoveryReport,
}

/// The newest segment as surveyed, before it is cut.
struct Newest {
    path: PathBuf,
    scan: Scan,
}

/// Findings so far. The first one that refuses ends the survey.
#[derive(Default)]
struct Findings(Vec<Finding>);

impl Findings {
    /// Records a finding; an error if the table says to refuse. A newer format is refused by
    /// [`newer`], which knows the version.
    fn add(&mut self, path: &Path, case: Case, detail: String) -> Result<(), StoreError> {
        let action = decide(case);
        match action {
            Action::RefuseDamaged => {
                return Err(damaged_with(path, detail, decision::remedy(case)));
            }
            Action::RefuseNewer => return Err(newer(path, u32::MAX)),
            Action::Ignore => {
                tracing::warn!(path = %path.display(), "this file in the store's folder is not the store's; it is left alone");
            }
            Action::Truncate if case == Case::NewestTorn => {
                tracing::warn!(path = %path.display(), "cutting a torn tail that was never acknowledged as durable: {detail}");
            }
            Action::Keep | Action::Truncate => {}
            Action::Remove | Action::Rebuild => {
                tracing::info!(path = %path.display(), ?case, ?action, "store recovery: {detail}");
            }
        }
        self.0.push(Finding { path: path.to_owned(), case, action, detail });
        Ok(())
    }
}

fn newer(path: &Path, found: u32) -> StoreError {
    let known = super::segment::FORMAT_VERSION;
    StoreError::Newer { path: path.to_owned(), found, known }
}

/// Surveys and mends the store in `dir`. The caller holds the folder's lock.
pub(super) fn recover(dir: &Path, options: &Options) -> Result<Recovered, StoreError> {
    let survey::Surveyed { mut recovered, newest, rebuilt, findings } =
        survey::survey(dir, options)?;
    recovered.report.findings = findings.0;
    for finding in &recovered.report.findings {
        match finding.action {
            Action::Remove => remove(&finding.path)?,
            Action::Keep
            | Action::Truncate
            | Action::Rebuild
            | Action::Ignore
            | Action::RefuseDamaged
            | Action::RefuseNewer => {}
        }
    }
    for (path, index) in &rebuilt {
        if let Err(error) = index.write(&index_path(path)) {
            tracing::warn!(%error, path = %path.display(), "an index was not rebuilt; reading is slower");
        }
    }
    if let Some(newest) = newest {
        recovered.report.bytes_dropped = match newest.scan.tail {
            super::scan::Tail::Torn { end } => end - newest.scan.end,
            super::scan::Tail::End
            | super::scan::Tail::Zeros
            | super::scan::Tail::Old
            | super::scan::Tail::Damaged { .. } => 0,
        };
        recovered.tail = Some(mend_newest(&newest)?);
    }
    sync_dir(dir)?;
    Ok(recovered)
}

/// Cuts the newest segment after its last valid block and makes sure that what is left is on disk.
///
/// The last group may have been read from the page cache after its fsync failed: the kernel then
/// holds it as clean although the disk does not have it, and another fsync would do nothing. So
/// the bytes that no earlier fsync is known to have covered are written again first.
fn mend_newest(newest: &Newest) -> Result<RecoveredTail, StoreError> {
    let Newest { path, scan, .. } = newest;
    let file =
        OpenOptions::new().read(true).write(true).open(path).map_err(io_error("open", path))?;
    file.set_len(scan.end).map_err(io_error("shorten", path))?;
    let mut at = scan.synced_to.min(scan.end);
    let mut buffer = vec![0; REWRITE_STEP.min(scan.end - at) as usize];
    while at < scan.end {
        let piece = &mut buffer[..(scan.end - at).min(REWRITE_STEP) as usize];
        file.read_exact_at(piece, at).map_err(io_error("read", path))?;
        file.write_all_at(piece, at).map_err(io_error("write", path))?;
        at += piece.len() as u64;
    }
    file.sync_all().map_err(io_error("sync", path))?;
    let held = scan.definitions.iter().map(|(id, _)| *id).collect();
    Ok(RecoveredTail { file, held })
}

/// The part of a scan that is kept in memory.
fn published(scan: &Scan, sealed: bool) -> Published {
    let index = (!sealed).then(|| scan.sparse.clone());
    Published {
        end: scan.end,
        last: scan.last,
        commit_times: scan.commit_times,
        spills: scan.spills.clone(),
        sealed,
        index,
        written: Written::now(),
    }
}

/// The index file for a scanned segment.
fn index_of(scan: &Scan, container: Container) -> IndexFile {
    IndexFile {
        store_id: container.store_id,
        sequence: container.number,
        end: scan.end,
        blocks: scan.blocks,
        last: scan.last,
        commit_times: scan.commit_times,
        spills: scan.spills.clone(),
        sparse: SparseIndex::clone(&scan.sparse),
    }
}
