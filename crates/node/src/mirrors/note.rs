//! What a near end has to know of a mirror beyond its own life: that it was dropped, since a far end
//! that comes back must not make the slot again, and with it the log that the principal had no room
//! for; that it was resumed and is still as far behind as it was; and where it has a slot, which
//! outlives its section of the site file.

use farshore_store::segmented::give_to_owner;
use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

/// How the names of notes of slots end.
pub(super) const SLOT: &str = ".slot";

/// A note on one mirror. No far end's folder is called as its file: names have no dots.
#[derive(Clone, Debug)]
pub(crate) struct Note(PathBuf);

impl Note {
    /// Why it was dropped.
    pub fn dropped(data_dir: &Path, mirror: &str) -> Note {
        Note(data_dir.join("mirrors").join(format!("{mirror}.dropped")))
    }

    /// How far behind it may be since it was resumed.
    pub fn resumed(data_dir: &Path, mirror: &str) -> Note {
        Note(data_dir.join("mirrors").join(format!("{mirror}.resumed")))
    }

    /// Commits wait beside a spool that was begun anew. What stands there is the near end's own.
    pub fn begun_anew(data_dir: &Path, mirror: &str) -> PathBuf {
        data_dir.join("mirrors").join(format!("{mirror}.begun"))
    }

    /// Which far end's spool goes on with it. What stands there is the near end's own.
    pub fn turn(data_dir: &Path, mirror: &str) -> PathBuf {
        data_dir.join("mirrors").join(format!("{mirror}.turn"))
    }

    /// Its slot, and on the next line the server that has it.
    pub fn slot(data_dir: &Path, mirror: &str) -> Note {
        Note(data_dir.join("mirrors").join(format!("{mirror}{SLOT}")))
    }

    /// A slot that it had before on the same server; likewise.
    pub fn earlier_slot(data_dir: &Path, mirror: &str, slot: &str) -> Note {
        Note(data_dir.join("mirrors").join(format!("{mirror}.{slot}{SLOT}")))
    }

    /// Those of them that are there, with the slots' names. Blocks on the disk.
    pub fn earlier_slots(data_dir: &Path, mirror: &str) -> Vec<(String, Note)> {
        let Ok(entries) = std::fs::read_dir(data_dir.join("mirrors")) else { return Vec::new() };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let slots = names.filter_map(|file| {
            let (of, slot) = file.strip_suffix(SLOT)?.split_once('.')?;
            (of == mirror).then(|| slot.to_owned())
        });
        slots.map(|slot| (slot.clone(), Note::earlier_slot(data_dir, mirror, &slot))).collect()
    }

    /// `None` if there is none. One that cannot be read says so. Blocks on the disk.
    pub fn read(&self) -> Option<String> {
        match std::fs::read_to_string(&self.0) {
            Ok(text) => Some(text.trim_end().to_owned()),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => Some(format!("cannot read {}: {error}", self.0.display())),
        }
    }

    /// Durable when this returns. Blocks on the disk.
    ///
    /// # Errors
    /// The file system's, for a person.
    pub fn write(&self, why: &str) -> Result<(), String> {
        let folder = self.0.parent().unwrap_or(Path::new("."));
        // Not another note's, which may be written at the same time.
        let mut new = self.0.clone().into_os_string();
        new.push(".tmp");
        let write = || {
            std::fs::create_dir_all(folder)?;
            let mut file = File::create(&new)?;
            give_to_owner(&file, folder);
            file.write_all(why.as_bytes())?;
            file.sync_all()?;
            std::fs::rename(&new, &self.0)?;
            File::open(folder)?.sync_all()?;
            folder.parent().map_or(Ok(()), |above| File::open(above)?.sync_all())
        };
        write().map_err(|error| format!("cannot write {}: {error}", self.0.display()))
    }

    /// Whether there was one. Durable when this returns. Blocks on the disk.
    ///
    /// # Errors
    /// The file system's, for a person.
    pub fn remove(&self) -> Result<bool, String> {
        let remove = || match std::fs::remove_file(&self.0) {
            Ok(()) => {
                File::open(self.0.parent().unwrap_or(Path::new(".")))?.sync_all()?;
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        };
        remove()
            .map_err(|error: std::io::Error| format!("cannot remove {}: {error}", self.0.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_kept_until_it_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (note, other) = (Note::dropped(folder.path(), "m"), Note::dropped(folder.path(), "n"));
        assert_eq!(note.read(), None);
        assert!(!note.remove().unwrap());
        note.write("too far behind").unwrap();
        note.write("much too far behind").unwrap();
        assert_eq!(
            Note::dropped(folder.path(), "m").read().as_deref(),
            Some("much too far behind")
        );
        assert_eq!(other.read(), None);
        assert_eq!(Note::resumed(folder.path(), "m").read(), None);
        assert!(note.remove().unwrap());
        assert_eq!(note.read(), None);
        // What cannot be read was there.
        std::fs::create_dir(folder.path().join("mirrors/n.dropped")).unwrap();
        assert!(other.read().is_some_and(|why| why.contains("cannot read")));
        assert!(other.write("x").unwrap_err().contains("n.dropped"));
    }
}
