//! A note, now and then, of how far whole records were durable. Recovery takes what is unsound in
//! the newest segment for the torn end of what was being written; where it lies before this note,
//! it is damage, and who takes over without it loses what was acknowledged.

use super::{SpoolError, folder};
use farshore_model::Lsn;
use std::path::Path;

pub(super) const NOTED: &str = "noted";

fn encode(end: Lsn) -> String {
    let text = format!("durable {end}\n");
    let crc = crc32c::crc32c(text.as_bytes());
    format!("{text}crc32c {crc:08x}\n")
}

fn decode(text: &str) -> Option<Lsn> {
    let end = text.lines().next()?.strip_prefix("durable ")?.parse().ok()?;
    (encode(end) == text).then_some(end)
}

/// Notes the end of a whole record that is durable. The note is, when this returns.
pub(super) fn write(folder: &Path, end: Lsn) -> Result<(), SpoolError> {
    folder::replace(&folder.join(NOTED), encode(end).as_bytes())
}

/// What was noted; `None` also if it cannot be understood: it is made again.
pub(super) fn read(folder: &Path) -> Result<Option<Lsn>, SpoolError> {
    let path = folder.join(NOTED);
    match std::fs::read(&path) {
        Ok(bytes) => {
            let noted = decode(&String::from_utf8_lossy(&bytes));
            if noted.is_none() {
                tracing::warn!("{} is damaged, and is made again", path.display());
            }
            Ok(noted)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(SpoolError::io("read", &path)(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_as_it_was_written_and_damage_is_no_note() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read(folder.path()).unwrap(), None);
        write(folder.path(), Lsn(0x300_0148)).unwrap();
        assert_eq!(read(folder.path()).unwrap(), Some(Lsn(0x300_0148)));
        let other = encode(Lsn(0x300_0148)).replace("148", "149");
        std::fs::write(folder.path().join(NOTED), other).unwrap();
        assert_eq!(read(folder.path()).unwrap(), None);
        std::fs::write(folder.path().join(NOTED), [0xff; 9]).unwrap();
        assert_eq!(read(folder.path()).unwrap(), None);
    }
}
