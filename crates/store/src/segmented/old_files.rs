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

/// At most so many are kept.
const FILES_MAX: usize = 4;

/// Where the log is bounded, at most one part in so many of that is kept beyond it.
const SHARE: u64 = 8;

/// One that was not needed for so long is removed.
const KEPT_FOR: Duration = Duration::from_secs(60);

/// How many bytes of old files may be kept, for segments of `segment_bytes` in a log of at most
/// `bytes_max`.
pub(crate) fn bytes_max(segment_bytes: u64, bytes_max: Option<u64>) -> u64 {
    // A segment ends with the batch that fills it.
    let most = FILES_MAX as u64 * (segment_bytes + segment_bytes / 2);
    bytes_max.map_or(most, |max| most.min(max / SHARE))
}

#[derive(Debug, Default)]
pub(crate) struct OldFiles(Mutex<Vec<OldFile>>);

#[derive(Debug)]
struct OldFile {
    path: PathBuf,
    /// Bytes.
    len: u64,
    since: Instant,
}

impl OldFiles {
    /// Takes a dropped segment's name away, durably: its file is kept for another segment if all
    /// kept are `bytes_max` at most, and removed otherwise. That it is gone already is fine.
    pub fn put_away(&self, segment: &Path, bytes_max: u64) -> Result<(), StoreError> {
        let dir = segment.parent().unwrap_or(Path::new("."));
        let len = match std::fs::metadata(segment) {
            Ok(file) => file.len(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return sync_dir(dir),
            Err(error) => return Err(io_error("examine", segment)(error)),
        };
        let is_room = {
            let kept = lock(&self.0);
            kept.len() < FILES_MAX
                && kept.iter().map(|file| file.len).sum::<u64>() + len <= bytes_max
        };
        let path = segment.with_extension("old");
        // A full disk may have no room for a name.
        if !is_room || std::fs::rename(segment, &path).is_err() {
            remove(segment)?;
            return sync_dir(dir);
        }
        sync_dir(dir)?;
        // Only now: nobody may write to it before it has lost its name for good.
        lock(&self.0).push(OldFile { path, len, since: Instant::now() });
        Ok(())
    }

    /// A file to begin a segment in; the caller gives it a name or removes it.
    pub fn take(&self) -> Option<PathBuf> {
        // The newest: those that are not needed age.
        lock(&self.0).pop().map(|file| file.path)
    }

    /// Removes all. Whether there were any.
    pub fn give_up(&self) -> bool {
        self.give_up_older(Duration::ZERO)
    }

    /// Removes those that were not needed for a while.
    pub fn give_up_unused(&self) {
        self.give_up_older(KEPT_FOR);
    }

    fn give_up_older(&self, than: Duration) -> bool {
        let files: Vec<OldFile> =
            lock(&self.0).extract_if(.., |file| file.since.elapsed() >= than).collect();
        for file in &files {
            if let Err(error) = remove(&file.path) {
                tracing::warn!("{error}");
            }
        }
        !files.is_empty()
    }
}
