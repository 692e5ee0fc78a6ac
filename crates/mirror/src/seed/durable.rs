//! Threads that make files durable while others are written: a file system takes in several fsyncs
//! with one commit of its journal, and a directory of a server is thousands of small files.

use super::take::SeedError;
use std::fs::File;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// They wait for the disk, not for a processor.
const THREADS: usize = 4;
/// Files that wait, and are open for that long.
const WAITING_MAX: usize = 64;

type Written = (PathBuf, File);

/// Files that are being made durable.
pub struct Durable {
    queue: Option<SyncSender<Written>>,
    threads: Vec<JoinHandle<Result<(), SeedError>>>,
}

impl Durable {
    /// Starts the threads, which end with this, or at the first file that cannot be made durable.
    pub fn start() -> Durable {
        let (queue, written) = sync_channel(WAITING_MAX);
        let written = Arc::new(Mutex::new(written));
        let sync = |_| {
            let written = Arc::clone(&written);
            thread::spawn(move || sync(&written))
        };
        Durable { queue: Some(queue), threads: (0..THREADS).map(sync).collect() }
    }

    /// Takes a file over, of which all was written. `path` is for an error's text.
    ///
    /// # Errors
    /// Of a file before this one that could not be made durable.
    pub fn take(&mut self, path: PathBuf, file: File) -> Result<(), SeedError> {
        if let Some(queue) = &self.queue
            && !self.threads.iter().any(JoinHandle::is_finished)
            && queue.send((path, file)).is_ok()
        {
            return Ok(());
        }
        // While there is a queue, none ends but by an error.
        self.finish()
    }

    /// Waits until all files are durable.
    ///
    /// # Errors
    /// The first that is not.
    pub fn finish(&mut self) -> Result<(), SeedError> {
        self.queue = None;
        std::mem::take(&mut self.threads).into_iter().try_for_each(|thread| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

fn sync(written: &Mutex<Receiver<Written>>) -> Result<(), SeedError> {
    loop {
        // The lock is let go before the file is synced.
        let next = written.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((path, file)) = next else { return Ok(()) };
        file.sync_all().map_err(SeedError::io("write", &path))?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_made_durable_is_told_of() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: usize| File::create(folder.path().join(name.to_string())).unwrap();
        let mut durable = Durable::start();
        (0..200).for_each(|name| durable.take("fine".into(), file(name)).unwrap());
        durable.finish().unwrap();

        let mut durable = Durable::start();
        // There is nothing to sync there: EINVAL.
        let refused = File::open("/dev/null").unwrap();
        durable.take("refused".into(), refused).unwrap();
        let told =
            (0..).find_map(|name| durable.take("fine".into(), file(name % 9)).err()).unwrap();
        assert!(told.to_string().contains("cannot write refused"), "{told}");
        let mut durable = Durable::start();
        durable.take("refused".into(), File::open("/dev/null").unwrap()).unwrap();
        assert!(durable.finish().is_err());
    }
}
