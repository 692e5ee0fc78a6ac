//! A dead subscriber costs disk at the distributor and nothing at the publisher.
//!
//! - `FARSHORE_LOAD_MB`: size of the load (default 256; `make stress` has 1024). Well above what the
//!   publisher may keep, or it would prove nothing.

use anyhow::{Context, Result, ensure};
use farshore_testkit::checksum;
use farshore_testkit::postgres::{Cluster, Installation, StopMode};
use farshore_tests::{DATABASE, Direction, Pair, subscriber_cluster};
use postgres::Client;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What the publisher may keep for us, at any moment.
const RETAINED_BYTES_MAX: u64 = 64 << 20;
const SAMPLE_EVERY: Duration = Duration::from_millis(20);
const ROWS_PER_TRANSACTION: i64 = 100;
const WRITERS: i64 = 2;

const TABLES: [&str; 3] = ["public.entries", "public.totals", "farshore_marks.mark"];
const SCHEMA: &str = "
    CREATE TABLE entries (id bigint PRIMARY KEY, account integer NOT NULL, booked timestamptz NOT NULL,
      amount numeric(14, 2) NOT NULL, reference uuid NOT NULL, details jsonb, note text);
    CREATE TABLE totals (account integer PRIMARY KEY, entries bigint NOT NULL, amount numeric(20, 2));";

/// About 1 KB in a row; some is text that compresses and some is not.
const INSERT: &str = "
    INSERT INTO entries
    SELECT i, i % 500, timestamptz '2026-01-01 00:00+00' + i * interval '1 s', i * 1.37, md5(i::text)::uuid,
      jsonb_build_object('channel', 'branch ' || i % 40, 'tags', array['urgent', 'checked', 'eu-west-1'],
        'session', md5(i || 's'), 'amounts', array[i, i * 2, i * 3]),
      'Transfer ordered by customer ' || i % 9000 || ' in favour of supplier ' || i % 700 || '. '
        || md5(i || 'a') || md5(i || 'b') || md5(i || 'c') || md5(i || 'd') || md5(i || 'e')
        || repeat('Executed on the day after it was booked, as agreed. ', 9)
    FROM generate_series($1::bigint, $1 + $2 - 1) AS i";

fn load_bytes() -> Result<u64> {
    match std::env::var("FARSHORE_LOAD_MB") {
        Ok(text) => {
            let megabytes: u64 =
                text.parse().with_context(|| format!("FARSHORE_LOAD_MB={text}"))?;
            Ok(megabytes << 20)
        }
        Err(_) => Ok(4 * RETAINED_BYTES_MAX),
    }
}

/// Transactions of some rows and an update each, until `rows` are written.
fn write(client: &mut Client, writer: i64, rows: i64, written: &AtomicU64) -> Result<()> {
    let insert = client.prepare(INSERT)?;
    let update = client.prepare(
        "INSERT INTO totals VALUES ($1, 1, 1) ON CONFLICT (account) \
         DO UPDATE SET entries = totals.entries + 1, amount = totals.amount + 1.01",
    )?;
    let mut from = 0;
    while from < rows {
        let mut transaction = client.transaction()?;
        let first = writer * 100_000_000 + from;
        transaction.execute(&insert, &[&first, &ROWS_PER_TRANSACTION])?;
        // Writers have accounts of their own, so that they do not wait for each other.
        let account = i32::try_from(writer * 1_000 + from / ROWS_PER_TRANSACTION % 300)?;
        transaction.execute(&update, &[&account])?;
        transaction.commit()?;
        from += ROWS_PER_TRANSACTION;
        written.fetch_add(ROWS_PER_TRANSACTION as u64, Ordering::Relaxed);
    }
    Ok(())
}

/// The most that the slot retains from now until `done`, and how often was looked.
fn watch_retained(
    publisher: &Cluster,
    mut client: Client,
    done: &AtomicBool,
) -> Result<(u64, u64)> {
    let query = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint \
                 FROM pg_replication_slots WHERE slot_name = 'farshore_p'";
    let (mut most, mut samples) = (0, 0);
    while !done.load(Ordering::Relaxed) {
        let row = client.query_one(query, &[]);
        let row = row.with_context(|| format!("publisher on port {}", publisher.port()))?;
        most = most.max(row.get::<_, i64>(0).max(0) as u64);
        samples += 1;
        std::thread::park_timeout(SAMPLE_EVERY);
    }
    Ok((most, samples))
}

fn load_with_a_dead_subscriber(direction: Direction) -> Result<()> {
    let publisher = Cluster::builder(&Installation::find(direction.publisher)?);
    let publisher = publisher.setting("wal_level", "logical").start()?;
    let mut pair = Pair::of(publisher, subscriber_cluster(direction.subscriber)?.start()?)?;
    pair.patience = Duration::from_secs(600);
    pair.on_both(SCHEMA)?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    let second = subscriber_cluster(direction.subscriber)?.start()?;
    second.execute_script(&format!(
        "{SCHEMA} CREATE SCHEMA farshore_marks; CREATE TABLE farshore_marks.mark (id bigint PRIMARY KEY)"
    ))?;
    pair.publisher.connect()?.execute(INSERT, &[&-10_000_i64, &5_000_i64])?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;

    pair.subscriber.stop(StopMode::Fast)?;
    let rows = (load_bytes()? / 1_100) as i64 / WRITERS;
    let (done, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let log_before = pair.publisher_says("SELECT pg_current_wal_lsn()")?;
    let begin = Instant::now();
    let publisher = &pair.publisher;
    let site = &mut pair.site;
    let (most, samples) = std::thread::scope(|scope| -> Result<(u64, u64)> {
        let watching = publisher.connect()?;
        let watcher = scope.spawn(|| watch_retained(publisher, watching, &done));
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let written = &written;
                let mut client = publisher.connect()?;
                Ok(scope.spawn(move || write(&mut client, writer, rows, written)))
            })
            .collect::<Result<_>>()?;
        // Half way, another subscription joins.
        let half_way = (|| {
            site.wait_for("half of the load", Duration::from_secs(900), || {
                let half = written.load(Ordering::Relaxed) >= (rows * WRITERS / 2) as u64;
                let ended = writers.iter().any(|writer| writer.is_finished());
                Ok((half || ended).then_some(()))
            })?;
            site.add(&format!(
                "[subscription.second]\npublication = \"p\"\ntarget = \"{}\"\n",
                second.url(DATABASE)
            ))?;
            site.restart()
        })();
        let mut ended = Vec::new();
        for writer in writers {
            ended.push(writer.join().map_err(|_| anyhow::anyhow!("a writer panicked"))?);
        }
        done.store(true, Ordering::Relaxed);
        let watched = watcher.join().map_err(|_| anyhow::anyhow!("the watcher panicked"))?;
        half_way.context("half way")?;
        ended.into_iter().collect::<Result<()>>().context("write")?;
        watched
    })?;
    let took = begin.elapsed();
    let log = pair.publisher_says(&format!(
        "SELECT (pg_current_wal_lsn() - '{log_before}'::pg_lsn)::bigint / 1048576"
    ))?;
    let size = pair
        .publisher_says("SELECT (pg_table_size('entries') + pg_table_size('totals')) / 1048576")?;
    println!(
        "{direction:?}: {} rows, {size} MB of tables and {log} MB of log in {took:?}; retained at \
         most {} MB in {samples} samples",
        written.load(Ordering::Relaxed),
        most >> 20
    );
    let status = pair.site.status()?;
    println!("status: {}", status["publications"][0]);
    ensure!(most < RETAINED_BYTES_MAX, "the publisher retained {most} bytes of log for the slot");

    let begin = Instant::now();
    pair.subscriber.start()?;
    pair.await_arrival()?;
    println!("the subscriber caught up in {:?}", begin.elapsed());
    let source = pair.publisher.url(DATABASE);
    checksum::assert_equal(&source, &pair.subscriber.url(DATABASE), &TABLES)?;
    pair.await_arrival_at(second.connect()?)?;
    checksum::assert_equal(&source, &second.url(DATABASE), &TABLES)?;
    let slots =
        pair.publisher_says("SELECT string_agg(slot_name, ',') FROM pg_replication_slots")?;
    ensure!(slots == "farshore_p", "slots: {slots}");
    let store = pair.site.status()?;
    println!("store at the end: {} bytes", store["publications"][0]["store_bytes"]);
    pair.site.stop()?;
    Ok(())
}

#[test]
fn a_dead_subscriber_does_not_hold_the_publishers_log_from_15() -> Result<()> {
    load_with_a_dead_subscriber(Direction::UP)
}

/// The newer publisher has another way to be asked for a record that the slot can move to.
#[test]
fn a_dead_subscriber_does_not_hold_the_publishers_log_from_18() -> Result<()> {
    load_with_a_dead_subscriber(Direction::DOWN)
}
