//! Readers of the subscriber: they look at everything, all the time.

use super::oracle::{READER_SETTINGS, begin_read, select_all, state_of};
use super::session::{StopSignal, connect, is_transient};
use super::state::{RowChange, State, StateHash};
use anyhow::{Context, Result, anyhow};
use postgres::Client;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// One look at all tables in one snapshot.
#[derive(Debug, Clone)]
pub struct Sample {
    /// The snapshot was taken after this moment,
    pub not_before: Instant,
    /// and before this one.
    pub not_after: Instant,
    /// The hash of what was seen.
    pub hash: StateHash,
    /// What changed since the same reader's sample before; its first begins with empty tables.
    pub changes: Vec<RowChange>,
}

/// The samples of each reader, in the order in which it took them.
#[derive(Debug, Clone, Default)]
pub struct SampleSeries {
    /// One list per reader.
    pub readers: Vec<Vec<Sample>>,
}

impl SampleSeries {
    /// Builds the state that a sample saw.
    pub fn state(&self, reader: usize, sample: usize) -> State {
        let mut state = State::default();
        for sample in self.readers[reader].iter().take(sample + 1) {
            state.apply(&sample.changes);
        }
        state
    }

    /// The number of samples of all readers.
    pub fn len(&self) -> usize {
        self.readers.iter().map(Vec::len).sum()
    }

    /// Whether there is no sample.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Reading threads. They reconnect when the subscriber is killed.
#[derive(Debug)]
pub struct Samplers {
    stop: Arc<StopSignal>,
    taken: Arc<AtomicU64>,
    readers: Vec<Arc<Mutex<Vec<Sample>>>>,
    threads: Vec<JoinHandle<Result<()>>>,
}

fn lock(samples: &Mutex<Vec<Sample>>) -> MutexGuard<'_, Vec<Sample>> {
    samples.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Samplers {
    /// Starts `readers` threads that read the database at `url`, each at most once per
    /// `interval`.
    pub fn start(url: &str, readers: usize, interval: Duration) -> Samplers {
        let stop = Arc::new(StopSignal::default());
        let taken = Arc::new(AtomicU64::new(0));
        let readers: Vec<Arc<Mutex<Vec<Sample>>>> = (0..readers).map(|_| Arc::default()).collect();
        let spawn = |samples: &Arc<Mutex<Vec<Sample>>>| {
            let (url, stop, taken) = (url.to_owned(), stop.clone(), taken.clone());
            let samples = samples.clone();
            std::thread::spawn(move || read(&url, interval, &stop, &taken, &samples))
        };
        let threads = readers.iter().map(spawn).collect();
        Samplers { stop, taken, readers, threads }
    }

    /// Samples taken so far.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// What the readers have seen so far.
    pub fn so_far(&self) -> SampleSeries {
        SampleSeries { readers: self.readers.iter().map(|samples| lock(samples).clone()).collect() }
    }

    /// Stops the readers and returns what they saw.
    ///
    /// # Errors
    /// When a reader met an error that no restart of the server explains.
    pub fn stop(mut self) -> Result<SampleSeries> {
        self.stop.stop();
        let threads = std::mem::take(&mut self.threads);
        let end = |thread: JoinHandle<Result<()>>| {
            thread.join().map_err(|_| anyhow!("a reader panicked"))?
        };
        threads.into_iter().try_for_each(end)?;
        let take = |samples: &Arc<Mutex<_>>| std::mem::take(&mut *lock(samples));
        Ok(SampleSeries { readers: self.readers.iter().map(take).collect() })
    }
}

impl Drop for Samplers {
    fn drop(&mut self) {
        self.stop.stop();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn read(
    url: &str,
    interval: Duration,
    stop: &StopSignal,
    taken: &AtomicU64,
    samples: &Mutex<Vec<Sample>>,
) -> Result<()> {
    let mut last = State::default();
    while let Some(client) = connect(url, "prefix-reader", stop) {
        let mut client = client.context("a reader connects to the subscriber")?;
        while !stop.is_stopped() {
            let begin = Instant::now();
            match sample(&mut client) {
                Ok((not_before, not_after, state)) => {
                    let changes = last.changes_to(&state);
                    let hash = state.hash();
                    lock(samples).push(Sample { not_before, not_after, hash, changes });
                    last = state;
                    taken.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => match error.downcast_ref::<postgres::Error>() {
                    Some(sql) if is_transient(sql) => break,
                    Some(_) | None => return Err(error.context("a reader of the subscriber")),
                },
            }
            stop.pause(interval.saturating_sub(begin.elapsed()));
        }
    }
    Ok(())
}

fn sample(client: &mut Client) -> Result<(Instant, Instant, State)> {
    client.batch_execute(&format!("{READER_SETTINGS}; {}", begin_read()))?;
    let not_before = Instant::now();
    client.batch_execute("SELECT pg_current_snapshot()")?;
    let not_after = Instant::now();
    let messages = client.simple_query(&select_all())?;
    client.batch_execute("COMMIT")?;
    Ok((not_before, not_after, state_of(messages)?))
}
