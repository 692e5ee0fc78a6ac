//! Removing what nobody needs. The files of some forgotten segments become segments to come, as
//! PostgreSQL does it in `pg_wal` ("29.5. WAL Configuration"): nothing has to be written and made
//! durable beforehand, and the memory that the old log took serves the new log.
//!
//! Old log behind the new is told from it as PostgreSQL tells it: a page names its own position, and
//! a record the one before ([`crate::wal::scan`]).

use super::folder::{self, OLD_PREFIX};
use super::{Positions, Spool, SpoolError, recovery};
use crate::wal::{Segment, Timeline};
use farshore_fault as fault;
use farshore_model::Lsn;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

/// What is kept of forgotten segments for segments to come, beyond what the spool may take: one
/// part in so many of that, and one file at least.
const OLD_SHARE: u64 = 16;

/// What was forgotten since the spool was opened.
#[derive(Debug, Default)]
pub(super) struct Forgotten(Mutex<Files>);

// Nobody holds it while the disk is waited for.
#[derive(Debug, Default)]
struct Files {
    /// The last one: everything up to it is gone, in the order of [`folder::Listing::segments`].
    last: Option<(u64, Timeline)>,
    /// Changes before a segment loses its name, and again before its file is used for another.
    changes: u64,
    /// Files to be used again.
    old: Vec<PathBuf>,
    /// The oldest segment when segments were looked at last.
    oldest: Option<Segment>,
    keeps_none: bool,
}

impl Forgotten {
    fn files(&self) -> MutexGuard<'_, Files> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Whether a segment is gone: who has its file open may read other log there. Asked after
    /// reading.
    pub fn has(&self, segment: Segment) -> bool {
        self.files().last.is_some_and(|last| (segment.number, segment.timeline) <= last)
    }

    /// Who reads several segments and finds something wrong reads again if this has changed
    /// meanwhile.
    pub fn changes(&self) -> u64 {
        self.files().changes
    }

    /// No file is used again.
    pub fn keep_none(&self) {
        self.files().keeps_none = true;
    }

    /// Makes a forgotten segment's file the one at `path`; `false` if there is none, or it is not
    /// to be had.
    pub fn take_old(&self, path: &Path) -> bool {
        let Some(old) = self.files().old.pop() else { return false };
        let taken = std::fs::rename(&old, path);
        if let Err(error) = &taken {
            tracing::warn!("cannot use {} again: {error}", old.display());
            // It takes up room.
            let _ = std::fs::remove_file(&old);
        }
        taken.is_ok()
    }
}

impl Spool {
    /// Removes whole segments that end before `needed`, oldest first, while all together are more
    /// than `bytes_max`. Returns how many. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn forget(&self, needed: Lsn, bytes_max: u64) -> Result<usize, SpoolError> {
        let _turn = self.forgetting.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // Nothing comes any more, and what is there may be taken away by hand.
        if self.closed().is_some() || self.has_failed() {
            return Ok(0);
        }
        let size = self.identity().segment;
        let segments = self.segments_in_place()?;
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
            fault::point("spool.before-forget");
            let old = self.put_away(*segment, bytes_max / OLD_SHARE)?;
            // Whatever fails from here on, it was not somebody else who removed it.
            self.shared.forgotten.files().oldest = Some(*next);
            // One at a time: a hole among the names would be damage.
            folder::sync(self.folder())?;
            // Nobody writes to it before it has lost its name for good.
            {
                let mut files = self.shared.forgotten.files();
                files.changes += 1;
                files.old.extend(old);
            }
            fault::point("spool.after-forget");
            total -= size.get();
            removed += 1;
        }
        self.shared.forgotten.files().oldest = segments.get(removed).copied();
        Ok(removed)
    }

    /// The segments: from the oldest that was there when they were looked at last to the one that the
    /// log has come to, and none between may lack.
    fn segments_in_place(&self) -> Result<Vec<Segment>, SpoolError> {
        let Positions { durable, timeline, .. } = *self.shared.positions.borrow();
        let gone = |path: PathBuf| {
            let error = SpoolError::Removed { path };
            if !self.has_failed() {
                self.shared.stop(error.clone());
            }
            error
        };
        let segments = match self.segments() {
            Err(_) if matches!(self.folder().try_exists(), Ok(false)) => {
                return Err(gone(self.folder().to_owned()));
            }
            listed => listed?,
        };
        let size = self.identity().segment;
        let number = size.number(Lsn(durable.0.saturating_sub(1)));
        let newest = (durable > self.begin).then_some(Segment { timeline, number });
        let oldest = self.shared.forgotten.files().oldest;
        let path = |segment: Segment| self.folder().join(segment.file_name(size));
        // Some file systems' lists may miss a name while others are renamed.
        let is_gone = |segment: &Segment| matches!(path(*segment).try_exists(), Ok(false));
        let known = oldest.into_iter().chain(newest);
        let mut lacking =
            known.filter(|known| segments.iter().all(|there| there.number != known.number));
        if let Some(lacking) = lacking.find(is_gone) {
            return Err(gone(path(lacking)));
        }
        for (before, behind) in segments.iter().zip(segments.iter().skip(1)) {
            let number = before.number + 1;
            let hole = [before, behind].map(|of| Segment { number, ..*of });
            if behind.number > number && hole.iter().all(is_gone) {
                return Err(gone(path(hole[1])));
            }
        }
        Ok(segments)
    }

    /// Renames a segment's file for one to come; or removes it, where enough are kept.
    fn put_away(
        &self,
        segment: Segment,
        old_bytes_max: u64,
    ) -> Result<Option<PathBuf>, SpoolError> {
        let size = self.identity().segment;
        let name = segment.file_name(size);
        let path = self.folder().join(&name);
        let is_kept = {
            let mut files = self.shared.forgotten.files();
            files.last = Some((segment.number, segment.timeline));
            files.changes += 1;
            let old_max = (old_bytes_max / size.get()).max(1);
            !files.keeps_none && (files.old.len() as u64) < old_max
        };
        if !is_kept {
            folder::remove(&path)?;
            return Ok(None);
        }
        let old = self.folder().join(format!("{OLD_PREFIX}{name}.tmp"));
        std::fs::rename(&path, &old).map_err(SpoolError::io("rename", &path))?;
        Ok(Some(old))
    }
}
