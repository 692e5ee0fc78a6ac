//! Readers of the subscriber: they look at everything, all the time.

use super::oracle::{READER_SETTINGS, begin_read, select_all, state_of};
use super::session::{StopSignal, connect, is_transient};
use super::state::{RowChange, State, StateHash};
use anyhow::{Context, Result, anyhow};
use postgres::Client;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
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
    threads: Vec<JoinHandle<Result<Vec<Sample>>>>,
}

impl Samplers {
    /// Starts `readers` threads that read the database at `url`, each at most once per
    /// `interval`.
    pub fn start(url: &str, readers: usize, interval: Duration) -> Samplers {
        let stop = Arc::new(StopSignal::default());
        let taken = Arc::new(AtomicU64::new(0));
        let spawn = |_| {
            let (url, stop, taken) = (url.to_owned(), stop.clone(), taken.clone());
            std::thread::spawn(move || read(&url, interval, &stop, &taken))
        };
        let threads = (0..readers).map(spawn).collect();
        Samplers { stop, taken, threads }
    }

    /// Samples taken so far.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Stops the readers and returns what they saw.
    ///
    /// # Errors
    /// When a reader met an error that no restart of the server explains.
    pub fn stop(mut self) -> Result<SampleSeries> {
        self.stop.stop();
        let threads = std::mem::take(&mut self.threads);
        let end =
            |thread: JoinHandle<_>| thread.join().map_err(|_| anyhow!("a reader panicked"))?;
        Ok(SampleSeries { readers: threads.into_iter().map(end).collect::<Result<_>>()? })
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
) -> Result<Vec<Sample>> {
    let mut samples = Vec::new();
    let mut last = State::default();
    while let Some(client) = connect(url, "prefix-reader", stop) {
        let mut client = client.context("a reader connects to the subscriber")?;
        while !stop.is_stopped() {
            let begin = Instant::now();
            match sample(&mut client) {
                Ok((not_before, not_after, state)) => {
                    let changes = last.changes_to(&state);
                    samples.push(Sample { not_before, not_after, hash: state.hash(), changes });
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
    Ok(samples)
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
