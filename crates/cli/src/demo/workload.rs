//! Read-write load on the publisher: pgbench, and transactions of every shape on the demo's own
//! tables.

mod transactions;

use anyhow::{Context, Result, bail};
use farshore_testkit::child::Supervised;
use farshore_testkit::interrupt::Interrupt;
use farshore_testkit::postgres::{Cluster, Installation};
use farshore_testkit::wait::log_tail;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use transactions::Worker;

/// Connections of pgbench.
const PGBENCH_CLIENTS: &str = "4";
/// Transactions per second that pgbench aims at: a steady load, so that lag means something.
const PGBENCH_RATE: &str = "400";
/// Connections of the mixed load.
const WORKERS: i64 = 2;
/// Pause between two transactions of a worker.
const WORKER_PAUSE: Duration = Duration::from_millis(5);
/// Initialising pgbench's tables takes seconds, and some more for each unit of the scale.
const PGBENCH_INIT_MAX: Duration = Duration::from_secs(120);
const PGBENCH_INIT_MAX_PER_SCALE: Duration = Duration::from_secs(5);

/// What the threads share.
#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    committed: AtomicU64,
    failure: Mutex<Option<String>>,
}

/// Load at work. Dropping it ends the load.
pub struct Workload {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    pgbench: Supervised,
    pgbench_log: PathBuf,
}

/// Makes pgbench's tables: with rows, or empty.
pub fn init_pgbench(
    programs: &Installation,
    server: &Cluster,
    scale: u32,
    with_rows: bool,
    log: &Path,
    interrupt: &Interrupt,
) -> Result<()> {
    let mut command = pgbench(programs, server, log)?;
    // d: drop, t: tables, g: rows, v: vacuum, p: primary keys.
    let steps = if with_rows { "dtgvp" } else { "dtp" };
    command.args(["--initialize", "--init-steps", steps, "--scale", &scale.to_string()]);
    let mut child = Supervised::spawn(command, libc::SIGKILL)?;
    let within = PGBENCH_INIT_MAX + PGBENCH_INIT_MAX_PER_SCALE * scale;
    farshore_testkit::wait::wait_until("pgbench's tables", within, &[log], || {
        interrupt.check()?;
        match child.try_wait()? {
            Some(ended) if ended.status.success() => Ok(Some(())),
            Some(ended) => bail!("pgbench --initialize: {}{}", ended.status, log_tail(log, 15)),
            None => Ok(None),
        }
    })
}

fn pgbench(programs: &Installation, server: &Cluster, log: &Path) -> Result<Command> {
    let mut command = programs.command("pgbench");
    let output =
        File::options().create(true).append(true).open(log).context("open pgbench's log")?;
    command
        .args(["--host", "127.0.0.1", "--port", &server.port().to_string()])
        .args(["--username", "postgres"])
        .env("PGDATABASE", "postgres")
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output);
    Ok(command)
}

impl Workload {
    /// Starts everything.
    pub fn start(publisher: &Cluster, seed: u64, log: &Path) -> Result<Workload> {
        let mut command = pgbench(publisher.installation(), publisher, log)?;
        // Ended by us; the limit is for the case that we cannot.
        command.args(["--client", PGBENCH_CLIENTS, "--no-vacuum", "--time", "86400"]);
        command.args(["--rate", PGBENCH_RATE, "--random-seed", &seed.to_string()]);
        let mut load = Workload {
            shared: Arc::default(),
            workers: Vec::new(),
            pgbench: Supervised::spawn(command, libc::SIGKILL)?,
            pgbench_log: log.to_owned(),
        };
        for number in 0..WORKERS {
            let mut worker = Worker::connect(publisher, number, WORKERS, seed)?;
            let shared = load.shared.clone();
            load.workers.push(std::thread::spawn(move || {
                // Relaxed: a counter, and a flag that guards no other memory.
                while !shared.stop.load(Ordering::Relaxed) {
                    match worker.transaction() {
                        Ok(true) => {
                            shared.committed.fetch_add(1, Ordering::Relaxed);
                        }
                        Ok(false) => {}
                        Err(error) => {
                            let mut failure = shared
                                .failure
                                .lock()
                                .unwrap_or_else(|poisoned| poisoned.into_inner());
                            failure.get_or_insert_with(|| format!("{error:#}"));
                            return;
                        }
                    }
                    std::thread::park_timeout(WORKER_PAUSE);
                }
            }));
        }
        Ok(load)
    }

    /// Transactions that the mixed load has committed.
    pub fn committed(&self) -> u64 {
        self.shared.committed.load(Ordering::Relaxed)
    }

    /// Fails if a part of the load has failed.
    pub fn check(&mut self) -> Result<()> {
        if let Some(ended) = self.pgbench.try_wait()? {
            bail!("pgbench ended: {}{}", ended.status, log_tail(&self.pgbench_log, 15));
        }
        let failure = self.shared.failure.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match &*failure {
            Some(failure) => bail!("the mixed load failed: {failure}"),
            None => Ok(()),
        }
    }

    /// Ends the load and waits until its last transaction is committed or rolled back.
    pub fn stop(mut self) -> Result<u64> {
        self.check()?;
        self.end();
        Ok(self.committed())
    }

    fn end(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.pgbench.signal(libc::SIGTERM);
        for worker in self.workers.drain(..) {
            // A worker that panicked has said so.
            let _ = worker.join();
        }
        let _ = self.pgbench.wait(Duration::from_secs(10));
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        self.end();
    }
}

/// One transaction of tens of thousands of changes, far beyond `logical_decoding_work_mem`, with a
/// sub-transaction that is rolled back. Returns the changes that it commits.
pub fn large_transaction(publisher: &Cluster) -> Result<u64> {
    let mut client = publisher.connect()?;
    let mut transaction = client.transaction()?;
    let inserted = transaction.execute(
        "INSERT INTO shop.measurements \
         SELECT 1000 + i % 100, now() + i * interval '1 millisecond', random() * 1e6, \
                (i % 256)::bit(8) FROM generate_series(1, 40000) AS i",
        &[],
    )?;
    let mut doomed = transaction.transaction()?;
    doomed.execute("DELETE FROM shop.measurements WHERE sensor BETWEEN 1000 AND 1019", &[])?;
    doomed.rollback()?;
    let updated = transaction.execute(
        "UPDATE shop.measurements SET value = -value WHERE sensor BETWEEN 1020 AND 1049",
        &[],
    )?;
    let deleted = transaction
        .execute("DELETE FROM shop.measurements WHERE sensor BETWEEN 1050 AND 1069", &[])?;
    transaction.commit()?;
    Ok(inserted + updated + deleted)
}
