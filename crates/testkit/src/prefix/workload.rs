//! Writers on the publisher. They go on over its crashes; whether a commit that was under way
//! took place, the oracle tells.

use super::kinds::Writer;
use super::session::{StopSignal, connect, is_transient};
use anyhow::{Context, Result, anyhow, bail};
use postgres::Client;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the writers do.
#[derive(Debug, Clone)]
pub struct WorkloadOptions {
    /// Writing threads.
    pub writers: u32,
    /// Seed of their choices. Their interleaving is up to the scheduler.
    pub seed: u64,
    /// Each writer begins at most one transaction per this time.
    pub interval: Duration,
    /// Rows of the transactions that are meant to be streamed before they commit.
    pub bulk_rows: u32,
}

impl WorkloadOptions {
    /// Four writers with 100 transactions per second each, bulk transactions of 2,000 rows.
    pub fn new(seed: u64) -> WorkloadOptions {
        WorkloadOptions { writers: 4, seed, interval: Duration::from_millis(10), bulk_rows: 2_000 }
    }
}

/// What the writers saw of their transactions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WorkloadSummary {
    /// Commits that the server confirmed.
    pub committed: u64,
    /// Commits whose answer never came.
    pub unknown: u64,
    /// Rolled back: on purpose, by a conflict or by a crash.
    pub rolled_back: u64,
}

impl fmt::Display for WorkloadSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WorkloadSummary { committed, unknown, rolled_back } = self;
        write!(f, "{committed} committed, {unknown} unknown, {rolled_back} rolled back")
    }
}

#[derive(Debug, Default)]
struct Counters {
    committed: AtomicU64,
    unknown: AtomicU64,
    rolled_back: AtomicU64,
    failure: OnceLock<String>,
}

/// Running writers; dropping them stops them.
#[derive(Debug)]
pub struct Workload {
    stop: Arc<StopSignal>,
    counters: Arc<Counters>,
    threads: Vec<JoinHandle<Result<()>>>,
}

impl Workload {
    /// Fills the tables, in one transaction. The tables and the oracle exist already.
    ///
    /// # Errors
    /// The server's message.
    pub fn fill(client: &mut Client) -> Result<()> {
        super::kinds::fill(client).context("fill the workload's tables")
    }

    /// Starts the writers on filled tables.
    pub fn start(url: &str, options: &WorkloadOptions) -> Workload {
        let stop = Arc::new(StopSignal::default());
        let counters = Arc::new(Counters::default());
        let spawn = |number| {
            let (url, stop, counters) = (url.to_owned(), stop.clone(), counters.clone());
            let options = options.clone();
            std::thread::spawn(move || {
                let result = write(&url, number, &options, &stop, &counters);
                if let Err(error) = &result {
                    let _ = counters.failure.set(format!("{error:#}"));
                }
                result
            })
        };
        let threads = (1..=options.writers).map(spawn).collect();
        Workload { stop, counters, threads }
    }

    /// Counts so far.
    pub fn summary(&self) -> WorkloadSummary {
        WorkloadSummary {
            committed: self.counters.committed.load(Ordering::Relaxed),
            unknown: self.counters.unknown.load(Ordering::Relaxed),
            rolled_back: self.counters.rolled_back.load(Ordering::Relaxed),
        }
    }

    /// To be asked while waiting for the writers.
    ///
    /// # Errors
    /// When a writer has ended by an error that neither a crash nor a conflict explains.
    pub fn ensure_running(&self) -> Result<()> {
        match self.counters.failure.get() {
            Some(failure) => bail!("{failure}"),
            None => Ok(()),
        }
    }

    /// Stops the writers after their present transactions.
    ///
    /// # Errors
    /// When a writer met an error that neither a crash nor a conflict explains.
    pub fn stop(mut self) -> Result<WorkloadSummary> {
        self.stop.stop();
        for thread in std::mem::take(&mut self.threads) {
            thread.join().map_err(|_| anyhow!("a writer panicked"))??;
        }
        Ok(self.summary())
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        self.stop.stop();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn write(
    url: &str,
    number: u32,
    options: &WorkloadOptions,
    stop: &StopSignal,
    counters: &Counters,
) -> Result<()> {
    let mut writer = Writer::new(number, options.seed, options.bulk_rows);
    while let Some(client) = connect(url, "prefix-writer", stop) {
        let mut client = client.context("a writer connects to the publisher")?;
        while !stop.is_stopped() && !client.is_closed() {
            let begin = Instant::now();
            let counter = match transaction(&mut client, &mut writer) {
                Ok(End::Committed) => &counters.committed,
                Ok(End::Unknown) => &counters.unknown,
                Ok(End::RolledBack) => &counters.rolled_back,
                Err(error) if is_transient(&error) || is_conflict(&error) => &counters.rolled_back,
                Err(error) => return Err(error).context("a writer on the publisher"),
            };
            counter.fetch_add(1, Ordering::Relaxed);
            stop.pause(options.interval.saturating_sub(begin.elapsed()));
        }
    }
    Ok(())
}

enum End {
    Committed,
    Unknown,
    RolledBack,
}

fn transaction(client: &mut Client, writer: &mut Writer) -> Result<End, postgres::Error> {
    let mut transaction = client.transaction()?;
    if !writer.fill_transaction(&mut transaction)? {
        transaction.rollback()?;
        return Ok(End::RolledBack);
    }
    match transaction.commit() {
        Ok(()) => Ok(End::Committed),
        // The server refused: certainly not committed.
        Err(error) if error.as_db_error().is_some() => Err(error),
        Err(_broken_connection) => Ok(End::Unknown),
    }
}

/// Two writers met on a unique key.
fn is_conflict(error: &postgres::Error) -> bool {
    error.code() == Some(&postgres::error::SqlState::UNIQUE_VIOLATION)
}
