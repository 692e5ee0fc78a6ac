//! The store's folder: its lock, its file names, and small files that are replaced as a whole.

use super::cursors::Notes;
use super::io_error;
use crate::{SpillId, StoreError};
use farshore_model::Lsn;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};

/// Holds the folder for this process until it is dropped. The kernel lets go of it when the
/// process dies, so a stale lock cannot exist.
#[derive(Debug)]
pub(crate) struct FolderLock {
    _file: File,
}

impl FolderLock {
    pub fn take(dir: &Path) -> Result<FolderLock, StoreError> {
        let path = dir.join("LOCK");
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(io_error("open", &path))?;
        give_to_owner(&file, dir);
        // SAFETY: the descriptor is open as long as `file` lives; no memory is passed.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
            let error = std::io::Error::last_os_error();
            if error.kind() != std::io::ErrorKind::WouldBlock {
                return Err(io_error("lock", &path)(error));
            }
            let mut pid = String::new();
            // Only for the message: the owner may not have written it yet.
            let read = (&mut file).take(32).read_to_string(&mut pid);
            let pid = pid.trim();
            let known = read.is_ok() && !pid.is_empty();
            let pid = if known { pid.to_owned() } else { "unknown".to_owned() };
            return Err(StoreError::Locked { path: dir.to_owned(), pid });
        }
        let pid = format!("{}\n", std::process::id());
        // For a message only: on a full disk the log opens all the same, and lets go of what fills it.
        if let Err(error) = file.set_len(0).and_then(|()| file.write_all(pid.as_bytes())) {
            tracing::debug!(path = %path.display(), %error, "noting who has the log");
        }
        Ok(FolderLock { _file: file })
    }
}

/// Gives a file that was made in a folder to whom the folder belongs: a verb that root runs while no
/// node does must not leave files that the node's user cannot read. Anybody but root can give
/// nothing away, and need not.
pub fn give_to_owner(file: &File, folder: &Path) {
    let (Ok(made), Ok(folder)) = (file.metadata(), std::fs::metadata(folder)) else { return };
    if made.uid() != folder.uid() {
        // Refused to others.
        let _ = fchown(file, Some(folder.uid()), Some(folder.gid()));
    }
}

/// Makes created, renamed and removed names durable.
pub(crate) fn sync_dir(dir: &Path) -> Result<(), StoreError> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io_error("sync folder", dir))
}

/// Removes a file; that it is gone already is fine.
pub(crate) fn remove(path: &Path) -> Result<(), StoreError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(io_error("remove", path)(error))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

pub(crate) fn segment_path(dir: &Path, start: Lsn) -> PathBuf {
    dir.join(format!("{:016x}.seg", start.0))
}

pub(crate) fn index_path(segment: &Path) -> PathBuf {
    segment.with_extension("idx")
}

pub(crate) fn spill_path(dir: &Path, spill: SpillId) -> PathBuf {
    dir.join(format!("{:016x}.spill", spill.0))
}

/// What a file's name says it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    Segment(Lsn),
    Index(Lsn),
    Spill(SpillId),
    /// A dropped segment's file, kept for one to come.
    Old,
    Lock,
    Cursors,
    Notes,
    /// Half-written replacement of one of ours.
    Leftover,
    Foreign,
}

pub(crate) fn classify(name: &str) -> Name {
    match name {
        "LOCK" => return Name::Lock,
        "cursors" => return Name::Cursors,
        "notes" => return Name::Notes,
        "cursors.tmp" | "notes.tmp" => return Name::Leftover,
        _ => {}
    }
    let Some((number, kind)) = name.split_once('.') else { return Name::Foreign };
    let lower_hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    if number.len() != 16 || !number.bytes().all(lower_hex) {
        return Name::Foreign;
    }
    let Ok(number) = u64::from_str_radix(number, 16) else { return Name::Foreign };
    match kind {
        "seg" => Name::Segment(Lsn(number)),
        "idx" => Name::Index(Lsn(number)),
        "idx.tmp" => Name::Leftover,
        "old" => Name::Old,
        "spill" => Name::Spill(SpillId(number)),
        _ => Name::Foreign,
    }
}

/// Newest version of the small files.
const SMALL_FILE_VERSION: u32 = 1;

/// What a small file turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SmallFile {
    Absent,
    Good(String),
    Damaged,
    Newer(u32),
}

/// Replaces a small file: written beside it, synced, renamed over it, folder synced.
///
/// ```text
/// farshore-<kind> <version> <crc32c of everything after this line, 8 hex digits>\n
/// <JSON>
/// ```
pub(crate) fn write_small(path: &Path, kind: &str, body: &str) -> Result<(), StoreError> {
    let tmp = path.with_extension("tmp");
    let crc = crc32c::crc32c(body.as_bytes());
    let text = format!("farshore-{kind} {SMALL_FILE_VERSION} {crc:08x}\n{body}");
    let folder = path.parent().unwrap_or(Path::new("."));
    File::create(&tmp)
        .and_then(|mut file| {
            give_to_owner(&file, folder);
            file.write_all(text.as_bytes())?;
            file.sync_all()
        })
        .map_err(io_error("write", &tmp))?;
    std::fs::rename(&tmp, path).map_err(io_error("replace", path))?;
    sync_dir(folder)
}

pub(crate) fn read_small(path: &Path, kind: &str) -> Result<SmallFile, StoreError> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(SmallFile::Absent),
        Err(error) => return Err(io_error("read", path)(error)),
    };
    Ok(parse_small(&bytes, kind).unwrap_or(SmallFile::Damaged))
}

/// The notes of the store in a folder, without opening it: another process may have it open. Empty
/// where there is no store yet.
///
/// # Errors
/// When the file cannot be read or is damaged.
pub fn read_notes(dir: &Path) -> Result<BTreeMap<String, String>, StoreError> {
    let path = dir.join("notes");
    let notes = match read_small(&path, "notes")? {
        SmallFile::Absent => return Ok(BTreeMap::new()),
        SmallFile::Good(body) => Notes::parse(&body),
        SmallFile::Damaged | SmallFile::Newer(_) => None,
    };
    notes.ok_or_else(|| {
        let error = std::io::Error::other("it is damaged, or of a newer version");
        io_error("read", &path)(error)
    })
}

fn parse_small(bytes: &[u8], kind: &str) -> Option<SmallFile> {
    let text = std::str::from_utf8(bytes).ok()?;
    let (head, body) = text.split_once('\n')?;
    let mut words = head.strip_prefix("farshore-")?.split(' ');
    if words.next()? != kind {
        return None;
    }
    let version: u32 = words.next()?.parse().ok()?;
    let crc = u32::from_str_radix(words.next()?, 16).ok()?;
    if crc != crc32c::crc32c(body.as_bytes()) {
        return None;
    }
    if version > SMALL_FILE_VERSION {
        return Some(SmallFile::Newer(version));
    }
    Some(SmallFile::Good(body.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_own_names_are_ours() {
        assert_eq!(classify("00000000000000ff.seg"), Name::Segment(Lsn(255)));
        assert_eq!(classify("00000000000000ff.idx.tmp"), Name::Leftover);
        for foreign in ["0.seg", "00000000000000FF.seg", "x.tmp", "00000000000000ff.seg.bak", ""] {
            assert_eq!(classify(foreign), Name::Foreign, "{foreign}");
        }
    }

    #[test]
    fn every_cut_and_flip_of_a_small_file_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notes");
        write_small(&path, "notes", "{\"a\":\"b\"}").unwrap();
        let good = std::fs::read(&path).unwrap();
        assert_eq!(parse_small(&good, "notes"), Some(SmallFile::Good("{\"a\":\"b\"}".into())));
        assert_eq!(parse_small(&good, "cursors"), None);
        for len in 0..good.len() {
            assert_eq!(parse_small(&good[..len], "notes"), None, "{len}");
        }
        let body = good.iter().position(|b| *b == b'\n').unwrap() + 1;
        for at in body..good.len() {
            let mut flipped = good.clone();
            flipped[at] ^= 1;
            assert_eq!(parse_small(&flipped, "notes"), None, "{at}");
        }
    }
}
