//! The note that a spool takes no more, because a standby of it has been, or is about to be,
//! promoted: what its old principal writes from then on belongs to another history.

use super::{SpoolError, folder};
use crate::wal::Timeline;
use farshore_model::Lsn;
use std::path::Path;

pub(super) const CLOSED: &str = "closed";
/// Room for the note: a standby must be able to take over also where the disk is full.
const RESERVE: &str = "closed.reserve";
/// More than any note takes.
const RESERVE_BYTES: usize = 4_096;

/// Sees to it that there is room for the note. Blocks on the disk.
pub(super) fn reserve(folder: &Path) -> Result<(), SpoolError> {
    let path = folder.join(RESERVE);
    let is_there = path.metadata().is_ok_and(|found| found.len() == RESERVE_BYTES as u64);
    if is_there { Ok(()) } else { folder::replace(&path, &[0; RESERVE_BYTES]) }
}

/// That the standby has become a server of its own.
const PROMOTED: &str = "promoted";

pub(super) fn is_promoted(folder: &Path) -> bool {
    folder.join(PROMOTED).exists()
}

/// Blocks on the disk.
pub(super) fn note_promoted(folder: &Path) -> Result<(), SpoolError> {
    folder::replace(&folder.join(PROMOTED), b"promoted\n")
}

/// Up to where a spool had the log when it was closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Closed {
    /// On which timeline.
    pub timeline: Timeline,
    /// The end of its last whole record: the promoted standby's own timeline begins here or later.
    pub end: Lsn,
    /// Who was to be promoted, as it is connected to: a second one would be another primary.
    pub server: String,
}

impl Closed {
    fn encode(&self) -> String {
        let text = format!("closed {} {} {}\n", self.timeline, self.end, self.server);
        let crc = crc32c::crc32c(text.as_bytes());
        format!("{text}crc32c {crc:08x}\n")
    }

    fn decode(text: &str) -> Option<Closed> {
        let mut words = text.lines().next()?.splitn(4, ' ').skip(1);
        let timeline = words.next()?.parse().ok().map(Timeline)?;
        let end = words.next()?.parse().ok()?;
        let closed = Closed { timeline, end, server: words.next()?.to_owned() };
        (closed.encode() == text).then_some(closed)
    }

    /// Makes it durable.
    pub(super) fn write(&self, folder: &Path) -> Result<(), SpoolError> {
        let (path, text) = (folder.join(CLOSED), self.encode());
        match folder::replace(&path, text.as_bytes()) {
            Err(error) if error.is_out_of_room() => {
                let reserve = folder.join(RESERVE);
                // What is wrong is that there is no room, whatever became of the reserve.
                folder::become_file(&reserve, &path, text.as_bytes()).map_err(|_| error)
            }
            written => written,
        }
    }

    /// `None` if the spool is open.
    pub(super) fn read(folder: &Path) -> Result<Option<Closed>, SpoolError> {
        let path = folder.join(CLOSED);
        match std::fs::read_to_string(&path) {
            Ok(text) => Closed::decode(&text)
                .map(Some)
                .ok_or_else(|| SpoolError::State { path, what: "no such note".to_owned() }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(SpoolError::io("read", &path)(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_as_it_was_written_and_damage_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Closed::read(folder.path()).unwrap(), None);
        let server = "db1:5432, or so".to_owned();
        let closed = Closed { timeline: Timeline(3), end: Lsn(0x300_0148), server };
        closed.write(folder.path()).unwrap();
        assert_eq!(Closed::read(folder.path()).unwrap().as_ref(), Some(&closed));
        // The same where all that is left is what was reserved.
        let reserved = tempfile::tempdir().unwrap();
        reserve(reserved.path()).unwrap();
        // Where the new file would be there is none to be made.
        std::fs::create_dir(reserved.path().join("closed.tmp")).unwrap();
        assert!(!closed.write(reserved.path()).unwrap_err().is_out_of_room());
        let (from, to) = (reserved.path().join(RESERVE), reserved.path().join(CLOSED));
        folder::become_file(&from, &to, closed.encode().as_bytes()).unwrap();
        assert_eq!(Closed::read(reserved.path()).unwrap().as_ref(), Some(&closed));
        let text = closed.encode();
        for len in 0..text.len() {
            std::fs::write(folder.path().join(CLOSED), &text[..len]).unwrap();
            assert!(Closed::read(folder.path()).is_err(), "{len}");
        }
        std::fs::write(folder.path().join(CLOSED), text.replace("148", "149")).unwrap();
        assert!(Closed::read(folder.path()).is_err());
    }
}
