use super::SyncMethod;
use super::payload::Payload;
use crate::{Error, Stop};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Bytes written at a time while the file is filled.
const FILL_STEP: u32 = 1 << 20;

/// A file without a name: the kernel frees it when the last descriptor is closed, which the end of
/// the process does, whatever ended it.
#[derive(Debug)]
pub struct ScratchFile {
    file: File,
    folder: PathBuf,
    len: u64,
}

impl ScratchFile {
    /// Makes it, and fills it durably with random bytes: later writes change no metadata, as in a
    /// log whose segments are used again.
    ///
    /// # Errors
    /// When the folder cannot be written to, or has no room.
    pub fn create(
        folder: &Path,
        len: u64,
        payload: &Payload,
        stop: &Stop,
    ) -> Result<ScratchFile, Error> {
        let file = nameless(folder)?;
        let mut written = 0;
        let full = |source: io::Error| Error::file("fill a file in", folder)(source);
        while written < len {
            stop.check()?;
            let size = u64::from(FILL_STEP).min(len - written) as u32;
            let bytes = payload.of(written / u64::from(FILL_STEP), size);
            file.write_all_at(bytes, written).map_err(full)?;
            written += u64::from(size);
        }
        file.sync_all().map_err(full)?;
        Ok(ScratchFile { file, folder: folder.to_owned(), len })
    }

    /// Opens it again, as `method` needs it.
    ///
    /// # Errors
    /// What the file system refuses.
    pub fn open(&self, method: SyncMethod) -> io::Result<File> {
        OpenOptions::new()
            .write(true)
            .custom_flags(method.flags().bits() as i32)
            .open(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }

    /// As [`ScratchFile::open`], with the folder in the error.
    pub fn open_for(&self, method: SyncMethod) -> Result<File, Error> {
        self.open(method).map_err(Error::file("open a file in", &*self.folder))
    }

    /// Where it is, for messages.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Its size in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }
}

/// A file that never had a name; where the file system cannot do that, one whose name is taken away
/// at once.
fn nameless(folder: &Path) -> Result<File, Error> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    let unnamed = options.clone().custom_flags(OFlags::TMPFILE.bits() as i32).open(folder);
    let refusal = match unnamed {
        Ok(file) => return Ok(file),
        Err(error) => error,
    };
    // EISDIR is what a kernel without such files says.
    let unknown = matches!(
        refusal.kind(),
        io::ErrorKind::Unsupported | io::ErrorKind::IsADirectory | io::ErrorKind::InvalidInput
    );
    if !unknown {
        return Err(Error::file("make a file in", folder)(refusal));
    }
    let path = folder.join(format!(".farshore-commission-{:016x}", rand::random::<u64>()));
    let file = options.create_new(true).open(&path).map_err(Error::file("make", &*path))?;
    std::fs::remove_file(&path).map_err(Error::file("take the name away from", &*path))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_no_name_and_can_be_written_by_every_method_that_opens() {
        let folder = tempfile::tempdir().unwrap();
        let (_handle, stop) = Stop::new();
        let payload = Payload::new();
        let file = ScratchFile::create(folder.path(), 3 << 20, &payload, &stop).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert_eq!(file.file.metadata().unwrap().len(), file.len());
        for method in SyncMethod::ALL {
            // What is refused is refused when it is opened: never later.
            let Ok(opened) = file.open(method) else { continue };
            opened.write_all_at(payload.of(9, 4_096), 4_096).unwrap();
            method.flush(&opened).unwrap();
        }
        let mut back = vec![0; 4_096];
        file.file.read_exact_at(&mut back, 4_096).unwrap();
        assert_eq!(back, payload.of(9, 4_096));
    }

    #[test]
    fn filling_stops_when_asked_and_a_folder_that_is_not_there_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (handle, stop) = Stop::new();
        handle.stop();
        let payload = Payload::new();
        let stopped = ScratchFile::create(folder.path(), 1 << 30, &payload, &stop);
        assert!(matches!(stopped, Err(Error::Interrupted)), "{stopped:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        let missing = folder.path().join("not-there");
        let error = ScratchFile::create(&missing, 1 << 20, &payload, &Stop::new().1).unwrap_err();
        assert!(error.to_string().contains("not-there"), "{error}");
    }
}
