//! Removing what nobody needs. The files of some forgotten segments become segments to come, as
//! PostgreSQL does it in `pg_wal` ("29.5. WAL Configuration"): nothing has to be written and made
//! durable beforehand, and the memory that the old log took serves the new log.
//!
//! Old log behind the new is told from it as PostgreSQL tells it: a page names its own position, and
//! a record the one before ([`crate::wal::scan`]).

use super::folder::{self, OLD_PREFIX};
use super::{Spool, SpoolError, recovery};
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

#[derive(Debug, Default)]
struct Files {
    /// The last one: everything up to it is gone, in the order of [`folder::Listing::segments`].
    last: Option<(u64, Timeline)>,
    /// Files to be used again.
    old: Vec<PathBuf>,
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

    /// Makes a forgotten segment's file the one at `path`; `false` if there is none.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn take_old(&self, path: &Path) -> Result<bool, SpoolError> {
        let Some(old) = self.files().old.pop() else { return Ok(false) };
        std::fs::rename(&old, path).map_err(SpoolError::io("rename", &old))?;
        Ok(true)
    }
}

impl Spool {
    /// Removes whole segments that end before `needed`, oldest first, while all together are more
    /// than `bytes_max`. Returns how many. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn forget(&self, needed: Lsn, bytes_max: u64) -> Result<usize, SpoolError> {
        let _turn = self.forgetting();
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
            fault::point("spool.before-forget");
            self.put_away(*segment, bytes_max / OLD_SHARE)?;
            // One at a time: a hole among the names would be damage.
            folder::sync(self.folder())?;
            fault::point("spool.after-forget");
            total -= size.get();
            removed += 1;
        }
        Ok(removed)
    }

    /// Whoever has this turn finds the segments as they are listed.
    pub(super) fn forgetting(&self) -> MutexGuard<'_, ()> {
        self.forgetting.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Keeps the file for a segment to come, or removes it.
    fn put_away(&self, segment: Segment, old_bytes_max: u64) -> Result<(), SpoolError> {
        let size = self.identity().segment;
        let name = segment.file_name(size);
        let path = self.folder().join(&name);
        let mut files = self.shared.forgotten.files();
        // Before anything can be written to it.
        files.last = Some((segment.number, segment.timeline));
        let old_max = (old_bytes_max / size.get()).max(1);
        if files.old.len() as u64 >= old_max {
            return folder::remove(&path);
        }
        let old = self.folder().join(format!("{OLD_PREFIX}{name}.tmp"));
        std::fs::rename(&path, &old).map_err(SpoolError::io("rename", &path))?;
        files.old.push(old);
        Ok(())
    }
}
