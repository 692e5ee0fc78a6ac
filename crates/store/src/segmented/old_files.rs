//! Files of dropped segments, kept for segments to come, as PostgreSQL keeps them in `pg_wal`
//! ("29.5. WAL Configuration"): no disk space has to be found and made durable for them, and the
//! memory that the old segment's pages take serves the new one.
//!
//! What stands behind the last block of such a segment is not zero but old: blocks that name
//! another segment. `docs/decisions/0056-a-segment-begins-in-an-old-ones-file.md` has the figures.

use super::folder::{remove, sync_dir};
use super::io_error;
use super::segment::lock;
use crate::StoreError;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// At most so many segments' bytes are kept.
const SEGMENTS_MAX: u64 = 4;

/// Where the log is bounded, at most one part in so many of that is kept beyond it.
const SHARE: u64 = 8;

/// Files that nothing was added to or taken from for so long are removed: nothing moves any more.
const KEPT_FOR: Duration = Duration::from_secs(60);

/// How many bytes of old files may be kept, for segments of `segment_bytes` in a log of at most
/// `bytes_max`.
pub(crate) fn bytes_max(segment_bytes: u64, bytes_max: Option<u64>) -> u64 {
    // A segment ends with the batch that fills it.
    let most = SEGMENTS_MAX * (segment_bytes + segment_bytes / 2);
    bytes_max.map_or(most, |max| most.min(max / SHARE))
}

#[derive(Debug, Default)]
pub(crate) struct OldFiles(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    /// Each with its length, in bytes.
    files: Vec<(PathBuf, u64)>,
    changed_at: Option<Instant>,
}

impl OldFiles {
    /// Takes a dropped segment's name away, durably: its file is kept for another segment if all
    /// kept are `bytes_max` at most, and removed otherwise. That it is gone already is fine.
    pub fn put_away(&self, segment: &Path, bytes_max: u64) -> Result<(), StoreError> {
        let dir = segment.parent().unwrap_or(Path::new("."));
        let len = match std::fs::metadata(segment) {
            Ok(file) => file.len(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(io_error("examine", segment)(error)),
        };
        let kept: u64 = lock(&self.0).files.iter().map(|(_, len)| len).sum();
        if kept + len > bytes_max {
            remove(segment)?;
            return sync_dir(dir);
        }
        let old = segment.with_extension("old");
        std::fs::rename(segment, &old).map_err(io_error("rename", segment))?;
        sync_dir(dir)?;
        // Only now: nobody may write to it before it has lost its name for good.
        let mut kept = lock(&self.0);
        kept.files.push((old, len));
        kept.changed_at = Some(Instant::now());
        Ok(())
    }

    /// A file to begin a segment in; the caller gives it a name or removes it.
    pub fn take(&self) -> Option<PathBuf> {
        let mut kept = lock(&self.0);
        let (file, _) = kept.files.pop()?;
        kept.changed_at = Some(Instant::now());
        Some(file)
    }

    /// Removes all. Whether there were any.
    pub fn give_up(&self) -> bool {
        let files = std::mem::take(&mut lock(&self.0).files);
        for (file, _) in &files {
            if let Err(error) = remove(file) {
                tracing::warn!("{error}");
            }
        }
        !files.is_empty()
    }

    /// Removes all if nothing was added or taken for a while.
    pub fn give_up_unused(&self) {
        let unused = lock(&self.0).changed_at.is_some_and(|at| at.elapsed() >= KEPT_FOR);
        if unused {
            self.give_up();
        }
    }
}
