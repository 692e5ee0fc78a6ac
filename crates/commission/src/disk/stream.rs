//! Sequential durable writes, several under way at a time: a thread for each, since a thread that
//! waits in a write is what a PostgreSQL backend that writes its log is.

use super::SyncMethod;
use super::payload::Payload;
use super::scratch_file::ScratchFile;
use crate::latency::Latencies;
use crate::{Error, Stop};
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// Enough for a loop around a system call.
const STACK_BYTES: usize = 256 << 10;

/// What to do.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    /// How writes become durable.
    pub method: SyncMethod,
    /// Bytes per write.
    pub size: u32,
    /// Writes under way at a time.
    pub depth: u32,
    /// For how long.
    pub duration: Duration,
}

/// What came of it.
#[derive(Debug)]
pub struct Written {
    /// Of each write.
    pub latencies: Latencies,
    /// From the first write's start to the last one's end.
    pub elapsed: Duration,
}

/// Writes until the time is over. The threads take turns at the next place in the file, and begin
/// anew at its end.
pub fn write(
    file: &ScratchFile,
    run: Run,
    payload: &Payload,
    stop: &Stop,
) -> Result<Written, Error> {
    let opened = file.open_for(run.method)?;
    let next = AtomicU64::new(0);
    let places = file.len() / u64::from(run.size);
    let work = |deadline: Instant| -> io::Result<Latencies> {
        let mut latencies = Latencies::new();
        // The end of one write is the beginning of the next: one look at the clock for each.
        let mut begin = Instant::now();
        loop {
            if begin >= deadline || stop.is_requested() {
                return Ok(latencies);
            }
            // Whose turn it is: nothing else depends on the order.
            let turn = next.fetch_add(1, Ordering::Relaxed);
            let offset = turn % places * u64::from(run.size);
            opened.write_all_at(payload.of(turn, run.size), offset)?;
            run.method.flush(&opened)?;
            let end = Instant::now();
            latencies.record(end - begin);
            begin = end;
        }
    };
    let (results, elapsed) = together(run.depth, run.duration, work)?;
    stop.check()?;
    let mut latencies = Latencies::new();
    for result in results {
        latencies.merge(&result.map_err(Error::file("write to a file in", file.folder()))?);
    }
    Ok(Written { latencies, elapsed })
}

/// Runs `work` in `threads` threads that start at the same moment, and gives each one's result and
/// the time from that moment to the end of the last. `work` is told when its time is over.
pub fn together<T: Send>(
    threads: u32,
    duration: Duration,
    work: impl Fn(Instant) -> T + Sync,
) -> Result<(Vec<T>, Duration), Error> {
    // Shut while threads are started; what is behind it says whether all of them were.
    let gate = RwLock::new(false);
    thread::scope(|scope| {
        let mut open = gate.write().unwrap_or_else(PoisonError::into_inner);
        let mut handles: Vec<ScopedJoinHandle<'_, Option<T>>> = Vec::new();
        for _ in 0..threads {
            let worker = || {
                let go = *gate.read().unwrap_or_else(PoisonError::into_inner);
                go.then(|| work(Instant::now() + duration))
            };
            let builder = thread::Builder::new().stack_size(STACK_BYTES);
            let started = builder.spawn_scoped(scope, worker);
            handles.push(started.map_err(|source| Error::Threads { wanted: threads, source })?);
        }
        *open = true;
        let begin = Instant::now();
        drop(open);
        let mut results = Vec::new();
        for handle in handles {
            results.extend(handle.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        Ok((results, begin.elapsed()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn threads_run_together_and_all_results_come_back() {
        // Whoever is alone waits for ever.
        let meeting = Barrier::new(8);
        let (results, elapsed) = together(8, Duration::from_secs(60), |deadline| {
            meeting.wait();
            deadline > Instant::now()
        })
        .unwrap();
        assert_eq!(results, [true; 8]);
        assert!(elapsed < Duration::from_secs(60));
    }

    #[test]
    fn writing_ends_when_asked() {
        let folder = tempfile::tempdir().unwrap();
        let (handle, stop) = Stop::new();
        let payload = Payload::new();
        let file = ScratchFile::create(folder.path(), 16 << 20, &payload, &stop).unwrap();
        let method = SyncMethod::Fdatasync;
        let run = Run { method, size: 4_096, depth: 3, duration: Duration::from_millis(20) };
        let written = write(&file, run, &payload, &stop).unwrap();
        assert!(written.latencies.count() >= 3 && written.elapsed >= run.duration);
        handle.stop();
        let endless = Run { duration: Duration::from_secs(3_600), ..run };
        assert!(matches!(write(&file, endless, &payload, &stop), Err(Error::Interrupted)));
    }
}
