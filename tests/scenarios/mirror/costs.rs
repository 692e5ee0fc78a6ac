//! What a mirror costs: memory, which is bounded, and processor time, which is told.

use crate::mirrored::{LONG, Mirrored};
use anyhow::{Context, Result, bail, ensure};
use farshore_testkit::postgres::Cluster;
use farshore_testkit::wait::wait_until;
use farshore_tests::Site;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// Of each end.
const PEAK_RSS_BYTES_MAX: u64 = 128 << 20;
/// Of log, as the budget for processor time is set.
const LOG_BYTES_PER_S: f64 = 12e6;
/// Between two looks at how much log there is.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Clients, and rows of 1 KB that each inserts one by one in a transaction.
const CLIENTS: i32 = 4;
const ROWS_PER_TRANSACTION: i32 = 55;

const INSERT: &str = "INSERT INTO bulk VALUES ($1, $2)";
/// About 0.2 MB of log in one statement.
const INSERT_MANY: &str = "INSERT INTO bulk SELECT g, repeat(md5(random()::text), 32) \
                           FROM generate_series(1, 180) g";

/// Half of it hardly to be compressed.
fn row(random: &mut StdRng) -> String {
    let digits = (0..32).map(|_| format!("{:016x}", random.random::<u64>()));
    digits.collect::<String>() + &"x".repeat(512)
}

/// Inserts at the set rate of all clients together, or as fast as it goes.
fn load(principal: &Cluster, number: i32, written: &AtomicU64, until: Instant) -> Result<()> {
    let mut client = principal.connect()?;
    let insert = client.prepare(INSERT)?;
    let mut random = StdRng::seed_from_u64(number as u64);
    let begin = Instant::now();
    let row_bytes = row(&mut random).len() as u64;
    while Instant::now() < until {
        if written.load(SeqCst) as f64 > begin.elapsed().as_secs_f64() * LOG_BYTES_PER_S {
            std::thread::park_timeout(LOOK_EVERY);
            continue;
        }
        let mut transaction = client.transaction()?;
        for _ in 0..ROWS_PER_TRANSACTION {
            transaction.execute(&insert, &[&number, &row(&mut random)])?;
        }
        transaction.commit()?;
        written.fetch_add(ROWS_PER_TRANSACTION as u64 * row_bytes, SeqCst);
    }
    Ok(())
}

/// The principal and both ends, in seconds of processor time.
fn costs(mirrored: &mut Mirrored) -> Result<[f64; 3]> {
    let near = mirrored.near.farshore()?.cpu_seconds()?;
    let far = mirrored.far.farshore()?.cpu_seconds()?;
    Ok([mirrored.principal.cpu_seconds(), near, far])
}

/// - `FARSHORE_MIRROR_SECONDS`: of load (default 15).
///
/// Processor time depends on the build and on what else runs here: it is printed, and decides
/// nothing. Memory does not.
#[test]
fn both_ends_keep_within_their_memory_and_tell_their_processor_time() -> Result<()> {
    let seconds = match std::env::var("FARSHORE_MIRROR_SECONDS") {
        Ok(text) => text.parse().with_context(|| format!("FARSHORE_MIRROR_SECONDS={text}"))?,
        Err(_) => 15.0,
    };
    let mut mirrored = Mirrored::start_idle(15, "far", None, Site::named("far")?)?;
    let mut writer = mirrored.principal.connect()?;
    writer.batch_execute("CREATE TABLE bulk (id int, v text)")?;
    let position = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint";
    let start: i64 = writer.query_one(position, &[])?.get(0);
    let before = costs(&mut mirrored)?;
    let (begin, written) = (Instant::now(), AtomicU64::new(0));
    let until = begin + Duration::from_secs_f64(seconds);
    std::thread::scope(|scope| {
        let loads: Vec<_> = (0..CLIENTS)
            .map(|number| {
                scope.spawn({
                    let (principal, written) = (&mirrored.principal, &written);
                    move || load(principal, number, written, until)
                })
            })
            .collect();
        loads.into_iter().try_for_each(|load| match load.join() {
            Ok(ended) => ended,
            Err(_) => bail!("a client panicked"),
        })
    })?;
    let took = begin.elapsed().as_secs_f64();
    let end: i64 = writer.query_one(position, &[])?.get(0);
    let after = costs(&mut mirrored)?;
    let [principal, near, far] = std::array::from_fn(|who| after[who] - before[who]);
    println!(
        "{:.1} MB/s of log for {took:.0} s. Processor seconds: principal {principal:.2}, near end \
         {near:.2}, far end {far:.2}; both ends: {:.1} % of the principal's",
        (end - start) as f64 / took / 1e6,
        100.0 * (near + far) / principal.max(f64::MIN_POSITIVE)
    );
    // More at once than any queue holds, to a far end that was away.
    mirrored.far.stop()?;
    writer.batch_execute("SET synchronous_commit = local")?;
    for _ in 0..1_000 {
        writer.batch_execute(INSERT_MANY)?;
    }
    let end: i64 = writer.query_one(position, &[])?.get(0);
    mirrored.far.start()?;
    wait_until("the far end to catch up", LONG, &[&mirrored.far.log_path()], || {
        Ok((mirrored.told()? >= end - 8_192).then_some(()))
    })?;
    for (end, site) in [("near", &mut mirrored.near), ("far", &mut mirrored.far)] {
        let peak = site.farshore()?.peak_rss_bytes();
        println!("{end} end: peak RSS {} MB", peak >> 20);
        ensure!(peak <= PEAK_RSS_BYTES_MAX, "{end} end: peak RSS {} MB", peak >> 20);
    }
    mirrored.finish()
}
