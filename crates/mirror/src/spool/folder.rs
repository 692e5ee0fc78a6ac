//! The spool's folder: its lock, its names, and small files that are replaced as a whole.

use super::SpoolError;
use crate::history::History;
use crate::wal::{Segment, SegmentBytes, Timeline, history_file_name, parse_history_file_name};
use farshore_fault as fault;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::Path;

pub(super) const STATE: &str = "spool.state";
pub(super) const SLOTS: &str = "slots";
pub(super) const SPARE: &str = "spare.tmp";
pub(super) const OLD_PREFIX: &str = "old.";

/// Holds the folder for this process until it is dropped; the kernel lets go when the process dies.
#[derive(Debug)]
pub(super) struct FolderLock {
    _file: File,
}

impl FolderLock {
    pub fn take(folder: &Path) -> Result<FolderLock, SpoolError> {
        let path = folder.join("LOCK");
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(SpoolError::io("open", &path))?;
        // SAFETY: the descriptor is open as long as `file` lives; no memory is passed.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            let error = std::io::Error::last_os_error();
            if error.kind() != std::io::ErrorKind::WouldBlock {
                return Err(SpoolError::io("lock", &path)(error));
            }
            let mut pid = String::new();
            // Only for the message: the owner may not have written it yet.
            let read = (&mut file).take(32).read_to_string(&mut pid);
            let known = read.is_ok() && !pid.trim().is_empty();
            let pid = if known { pid.trim().to_owned() } else { "unknown".to_owned() };
            return Err(SpoolError::Locked { path: folder.to_owned(), pid });
        }
        // On a full disk the spool is opened all the same: this is for the message alone.
        let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
        Ok(FolderLock { _file: file })
    }
}

/// Makes the folder and those above it that are not there, and all their names durable.
pub(super) fn create(folder: &Path) -> Result<(), SpoolError> {
    let above = names_made_in(folder);
    std::fs::create_dir_all(folder).map_err(SpoolError::io("create", folder))?;
    above.into_iter().try_for_each(sync)
}

/// The folders that get a new name when `folder` is made, up to the first that is there already;
/// and always the one that it is in, whose sync an earlier start may not have reached.
fn names_made_in(folder: &Path) -> Vec<&Path> {
    let mut above = Vec::new();
    for parent in folder.ancestors().skip(1) {
        above.push(if parent.as_os_str().is_empty() { Path::new(".") } else { parent });
        if parent.exists() {
            break;
        }
    }
    above
}

/// Makes created, renamed and removed names durable.
pub(super) fn sync(folder: &Path) -> Result<(), SpoolError> {
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(SpoolError::io("sync folder", folder))
}

/// Removes a file; that it is gone already is fine.
pub(super) fn remove(path: &Path) -> Result<(), SpoolError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(SpoolError::io("remove", path)(error))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Puts `content` in the place of the file at `path`: all of it or nothing, durable.
pub(crate) fn replace(path: &Path, content: &[u8]) -> Result<(), SpoolError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let new = path.with_file_name(name);
    let write = || {
        let mut file = File::create(&new)?;
        file.write_all(content)?;
        file.sync_all()
    };
    write().map_err(SpoolError::io("write", &new))?;
    fault::point("spool.before-replace");
    std::fs::rename(&new, path).map_err(SpoolError::io("rename", &new))?;
    sync(path.parent().unwrap_or(Path::new(".")))
}

/// The file at `from` gets `content` and the name `path`, durable, and takes no more room than it
/// has: `content` must be shorter than what it held.
pub(super) fn become_file(from: &Path, path: &Path, content: &[u8]) -> Result<(), SpoolError> {
    let write = || {
        let mut file = OpenOptions::new().write(true).open(from)?;
        file.write_all(content)?;
        file.set_len(content.len() as u64)?;
        file.sync_all()
    };
    write().map_err(SpoolError::io("write", from))?;
    std::fs::rename(from, path).map_err(SpoolError::io("rename", from))?;
    sync(path.parent().unwrap_or(Path::new(".")))
}

pub(super) fn history_text(
    folder: &Path,
    timeline: Timeline,
) -> Result<Option<String>, SpoolError> {
    let path = folder.join(history_file_name(timeline));
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(SpoolError::io("read", &path)(error)),
    }
}

pub(super) fn history(folder: &Path, timeline: Timeline) -> Result<History, SpoolError> {
    let text = history_text(folder, timeline)?.unwrap_or_default();
    History::parse(timeline, &text).map_err(|error| SpoolError::History {
        path: folder.join(history_file_name(timeline)),
        error,
    })
}

/// What is in the folder.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// By number, then by timeline.
    pub segments: Vec<Segment>,
    /// Ascending.
    pub histories: Vec<Timeline>,
    /// Half-written replacements, a spare segment, and files of forgotten ones.
    pub leftovers: Vec<String>,
}

impl Listing {
    pub fn read(folder: &Path, size: SegmentBytes) -> Result<Listing, SpoolError> {
        let failed = |error| SpoolError::io("list", folder)(error);
        let mut listing = Listing::default();
        for entry in std::fs::read_dir(folder).map_err(failed)? {
            let name = entry.map_err(SpoolError::io("list", folder))?.file_name();
            let Some(name) = name.to_str() else { continue };
            if let Some(segment) = Segment::parse(name, size) {
                listing.segments.push(segment);
            } else if let Some(timeline) = parse_history_file_name(name) {
                listing.histories.push(timeline);
            } else if name.ends_with(".tmp") {
                listing.leftovers.push(name.to_owned());
            }
        }
        listing.segments.sort_unstable_by_key(|segment| (segment.number, segment.timeline));
        listing.histories.sort_unstable();
        Ok(listing)
    }

    /// The file that holds this part of the log for who is on `timeline`: its own, or the one of
    /// the nearest ancestor that has it.
    pub fn find(&self, timeline: Timeline, history: &History, number: u64) -> Option<Segment> {
        let own = std::iter::once(timeline);
        let ancestors = history.0.iter().rev().map(|ancestor| ancestor.timeline);
        own.chain(ancestors)
            .map(|timeline| Segment { timeline, number })
            .find(|segment| self.segments.contains(segment))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_folder_that_is_made_has_its_name_synced() {
        let there = tempfile::tempdir().unwrap();
        let folder = there.path().join("mirrors/m");
        let mirrors = there.path().join("mirrors");
        assert_eq!(names_made_in(&folder), [mirrors.as_path(), there.path()]);
        create(&folder).unwrap();
        assert!(folder.is_dir());
        assert_eq!(names_made_in(&folder), [mirrors.as_path()]);
    }

    #[test]
    fn a_folder_on_a_full_disk_is_taken_all_the_same() {
        let there = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/full", there.path().join("LOCK")).unwrap();
        let held = FolderLock::take(there.path()).unwrap();
        assert!(matches!(FolderLock::take(there.path()), Err(SpoolError::Locked { .. })));
        drop(held);
    }
}
