//! The note that a mirror was dropped at its near end. It outlives the node: a far end that comes
//! back must not make the slot again, and with it the log that the principal had no room for.

use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

/// Where the note of one mirror is. No far end's folder is called so: names have no dots.
#[derive(Clone, Debug)]
pub(crate) struct DropNote(PathBuf);

impl DropNote {
    pub fn of(data_dir: &Path, mirror: &str) -> DropNote {
        DropNote(data_dir.join("mirrors").join(format!("{mirror}.dropped")))
    }

    /// Why the mirror was dropped; `None` if it was not. A note that cannot be read counts. Blocks
    /// on the disk.
    pub fn read(&self) -> Option<String> {
        match std::fs::read_to_string(&self.0) {
            Ok(text) => Some(text.trim_end().to_owned()),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => Some(format!(
                "it was dropped, and why cannot be read: {}: {error}",
                self.0.display()
            )),
        }
    }

    /// Durable when this returns. Blocks on the disk.
    ///
    /// # Errors
    /// The file system's, for a person.
    pub fn write(&self, why: &str) -> Result<(), String> {
        let folder = self.0.parent().unwrap_or(Path::new("."));
        let new = self.0.with_extension("dropped.tmp");
        let write = || {
            std::fs::create_dir_all(folder)?;
            let mut file = File::create(&new)?;
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
        let (note, other) = (DropNote::of(folder.path(), "m"), DropNote::of(folder.path(), "n"));
        assert_eq!(note.read(), None);
        assert!(!note.remove().unwrap());
        note.write("too far behind").unwrap();
        note.write("much too far behind").unwrap();
        assert_eq!(DropNote::of(folder.path(), "m").read().as_deref(), Some("much too far behind"));
        assert_eq!(other.read(), None);
        assert!(note.remove().unwrap());
        assert_eq!(note.read(), None);
        // What cannot be read was there.
        std::fs::create_dir(folder.path().join("mirrors/n.dropped")).unwrap();
        assert!(other.read().is_some_and(|why| why.contains("cannot be read")));
        assert!(other.write("x").unwrap_err().contains("n.dropped"));
    }
}
