//! Clients that commit, and share their flushes: whoever comes first writes and flushes for all that
//! wait by then; who comes meanwhile waits for the next flush.

use super::SyncMethod;
use super::payload::Payload;
use super::scratch_file::ScratchFile;
use super::stream::together;
use crate::latency::Latencies;
use crate::{Error, Stop};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What a commit adds to the log: a small row with its commit record.
const RECORD_BYTES: u64 = 512;
/// The log is written in whole pages, the last of them again and again until it is full.
const PAGE_BYTES: u64 = 8_192;
/// PostgreSQL's default on Linux.
const METHOD: SyncMethod = SyncMethod::Fdatasync;

/// What came of it.
#[derive(Debug)]
pub struct Committed {
    /// Of each commit.
    pub latencies: Latencies,
    /// How often the log was flushed.
    pub flushes: u64,
    /// From the first commit's start to the last one's end.
    pub elapsed: Duration,
}

/// The log in small. Guarded by a mutex; `flushed` moves only in the hands of the one client that
/// set `flushing`, and the file is written and flushed without the mutex.
#[derive(Debug, Default)]
struct Log {
    /// Bytes that were added.
    inserted: u64,
    /// Bytes that are durable.
    flushed: u64,
    /// Somebody writes and flushes.
    flushing: bool,
    flushes: u64,
    /// Nothing can be made durable any more.
    failed: bool,
}

struct Committer<'a> {
    opened: File,
    file: &'a ScratchFile,
    payload: &'a Payload,
    log: Mutex<Log>,
    flushed: Condvar,
}

/// Commits with that many clients until the time is over.
pub fn commit(
    file: &ScratchFile,
    clients: u32,
    duration: Duration,
    payload: &Payload,
    stop: &Stop,
) -> Result<Committed, Error> {
    let committer = Committer {
        opened: file.open_for(METHOD)?,
        file,
        payload,
        log: Mutex::new(Log::default()),
        flushed: Condvar::new(),
    };
    let (results, elapsed) = together(clients, duration, |deadline| {
        let mut latencies = Latencies::new();
        loop {
            let begin = Instant::now();
            if begin >= deadline || stop.is_requested() {
                return Ok(latencies);
            }
            if committer.commit_one()? {
                latencies.record(begin.elapsed());
            } else {
                // Whose flush it was tells why.
                return Ok(latencies);
            }
        }
    })?;
    stop.check()?;
    let mut latencies = Latencies::new();
    for result in results {
        latencies.merge(&result.map_err(Error::file("write to a file in", file.folder()))?);
    }
    let log = committer.log.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(Committed { latencies, flushes: log.flushes, elapsed })
}

impl Committer<'_> {
    /// Adds a record and returns when it is durable; `false` when another client could not flush.
    fn commit_one(&self) -> io::Result<bool> {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.inserted += RECORD_BYTES;
        let mine = log.inserted;
        while log.flushed < mine {
            if log.failed {
                return Ok(false);
            }
            if log.flushing {
                log = self.flushed.wait(log).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            log.flushing = true;
            let (from, to) = (log.flushed, log.inserted);
            drop(log);
            let outcome = self.flush(from, to);
            log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
            log.flushing = false;
            match &outcome {
                Ok(()) => {
                    log.flushed = to;
                    log.flushes += 1;
                }
                Err(_) => log.failed = true,
            }
            self.flushed.notify_all();
            outcome?;
        }
        Ok(true)
    }

    /// Writes the pages that hold these bytes of the log, and makes them durable.
    fn flush(&self, from: u64, to: u64) -> io::Result<()> {
        let pages = self.file.len() / PAGE_BYTES;
        for page in from / PAGE_BYTES..to.div_ceil(PAGE_BYTES) {
            let bytes = self.payload.of(page, PAGE_BYTES as u32);
            self.opened.write_all_at(bytes, page % pages * PAGE_BYTES)?;
        }
        METHOD.flush(&self.opened)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_share_flushes_and_none_waits_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let (_handle, stop) = Stop::new();
        let payload = Payload::new();
        let file = ScratchFile::create(folder.path(), 16 << 20, &payload, &stop).unwrap();
        for clients in [1, 16] {
            let run = commit(&file, clients, Duration::from_millis(50), &payload, &stop).unwrap();
            let commits = run.latencies.count();
            assert!(commits >= u64::from(clients), "{commits}");
            assert!(run.flushes >= 1 && run.flushes <= commits, "{run:?}");
            if clients == 1 {
                assert_eq!(run.flushes, commits);
            }
        }
    }
}
