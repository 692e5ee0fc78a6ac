//! What the monitor says, against the databases; and what it must not do.

use crate::asking::Monitor;
use anyhow::{Context, Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{DATABASE, Direction, Pair};
use std::net::TcpListener;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const SOON: Duration = Duration::from_secs(60);
/// The least rows that are a backlog to speak of.
const ROWS: u64 = 20_000;
const NAME: &str = "<img src=x onerror=alert(1)>";

fn pair() -> Result<Pair> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.site.add_to_site("monitor = \"127.0.0.1:0\"\n")?;
    pair.on_both(&format!(
        "CREATE TABLE t (id integer PRIMARY KEY, v text); \
         CREATE TABLE \"{NAME}\" (id integer PRIMARY KEY, v text)"
    ))?;
    pair.publish(&format!("INSERT INTO \"{NAME}\" VALUES (1, 'v')"))?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.await_arrival()?;
    Ok(pair)
}

#[test]
fn what_is_shown_is_what_the_databases_hold() -> Result<()> {
    let mut pair = pair()?;
    let monitor = Monitor::of(&pair.site)?;
    let applied = "SELECT applied::text FROM farshore.subscription";
    let before = wait_until("the copy to be shown as over", SOON, &[], || {
        let status = monitor.status()?;
        let streams = |kind: &str| status[kind][0]["state"] == "streaming";
        let both = streams("publications") && streams("subscriptions");
        Ok(status["subscriptions"][0]["changes"].as_u64().filter(|_| both))
    })?;
    ensure!(monitor.post("/api/v1/subscriptions/s/pause", "{}")?.status == 200);
    pair.publish(&format!("INSERT INTO t SELECT i, 'v' FROM generate_series(1, {ROWS}) AS i"))?;
    let end = pair.publisher_says("SELECT pg_current_wal_lsn()")?;
    // A subscriber that stands still: the backlog is the log that it lacks, and no less.
    let behind = wait_until("the backlog to be shown", SOON, &[], || {
        let status = monitor.status()?;
        let subscription = &status["subscriptions"][0];
        let durable = status["publications"][0]["durable"].as_str().unwrap_or_default();
        let reached = pair.publisher_says(&format!("SELECT '{durable}'::pg_lsn >= '{end}'"))?;
        let paused = subscription["state"] == "paused";
        let behind = subscription["behind_bytes"].as_u64().unwrap_or_default();
        let there = pair.subscriber_says(applied)?;
        let lacks = format!("SELECT '{durable}'::pg_lsn - '{there}'::pg_lsn");
        let truth: i64 = pair.publisher_says(&lacks)?.parse()?;
        let is_true = i64::try_from(behind)? == truth;
        Ok((reached == "t" && paused && is_true).then_some(behind))
    })?;
    ensure!(behind > ROWS * 30, "{ROWS} rows are only {behind} bytes behind");
    let shown = monitor.metric("farshore_subscription_behind_bytes", "subscription=\"s\"")?;
    ensure!(shown >= behind as f64, "{shown} in metrics, {behind} as state");
    ensure!(monitor.metric("farshore_subscription_paused", "subscription=\"s\"")? == 1.0);
    let latency = monitor.status()?["subscriptions"][0]["latency_ms"].as_f64();
    ensure!(latency.is_some_and(|ms| ms > 0.0), "a paused subscriber has latency {latency:?}");
    ensure!(monitor.post("/api/v1/subscriptions/s/resume", "{}")?.status == 200);
    pair.await_arrival()?;
    wait_until("everything to be shown as applied", SOON, &[], || {
        let status = monitor.status()?;
        let subscription = &status["subscriptions"][0];
        let changes = subscription["changes"].as_u64().unwrap_or_default();
        let there = subscription["applied"].as_str().map(str::to_owned);
        let truth = pair.subscriber_says(applied)?;
        let counted = changes.saturating_sub(before) > ROWS;
        Ok((there == Some(truth) && counted && subscription["latency_ms"] == 0.0).then_some(()))
    })
}

#[test]
fn a_target_that_keeps_a_transaction_waiting_shows_its_age() -> Result<()> {
    let pair = pair()?;
    let monitor = Monitor::of(&pair.site)?;
    let mut blocker = pair.subscriber.connect()?;
    blocker.batch_execute("BEGIN; LOCK t IN ACCESS EXCLUSIVE MODE")?;
    pair.publish("INSERT INTO t VALUES (1, 'waits')")?;
    wait_until("its age to be shown as more than a second", SOON, &[], || {
        let latency = monitor.status()?["subscriptions"][0]["latency_ms"].as_f64();
        Ok(latency.filter(|ms| *ms > 1_000.0).map(drop))
    })?;
    blocker.batch_execute("ROLLBACK")?;
    wait_until("nothing to wait any more", SOON, &[], || {
        Ok((monitor.status()?["subscriptions"][0]["latency_ms"] == 0.0).then_some(()))
    })
}

#[test]
fn replication_goes_on_without_the_monitor() -> Result<()> {
    let mut pair =
        Pair::new(Direction::UP, &["public.*"], "CREATE TABLE t (id integer PRIMARY KEY)")?;
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let address = taken.local_addr()?;
    pair.site.add_to_site(&format!("monitor = \"{address}\"\n"))?;
    pair.site.start()?;
    pair.site.await_log("cannot listen on", SOON)?;
    pair.publish("INSERT INTO t VALUES (1)")?;
    pair.assert_equal(&["public"])?;
    // Others give the address up.
    drop(taken);
    pair.site.await_log("monitor address=", SOON)?;
    ensure!(Monitor { address, token: None }.status()?["site"] == "t1");
    // Clients that say nothing, and that take nothing, hold nobody up.
    let idle: Vec<_> = (0..100).map(|_| std::net::TcpStream::connect(address)).collect();
    pair.publish("INSERT INTO t VALUES (2)")?;
    pair.assert_equal(&["public"])?;
    pair.site.stop_promptly().context("idle clients")?;
    drop(idle);
    Ok(())
}

/// However many.
const DRAINED_WITHIN: Duration = Duration::from_secs(300);
/// The site looks at itself so often, seconds.
const LOOKS_EVERY: f64 = 1.0;

/// - `FARSHORE_DRAIN_TRANSACTIONS`: that are drained one by one (default 6,000).
///
/// How well it is foretold is printed, and decides nothing.
#[test]
fn the_time_until_caught_up_is_told_while_a_backlog_shrinks() -> Result<()> {
    let transactions = std::env::var("FARSHORE_DRAIN_TRANSACTIONS");
    let transactions: i32 = transactions.map_or(Ok(6_000), |text| text.parse())?;
    let mut pair = Pair::bare(Direction::UP)?;
    pair.site.add_to_site("monitor = \"127.0.0.1:0\"\n")?;
    pair.on_both("CREATE TABLE t (id integer PRIMARY KEY, v text)")?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    // Slow and steady.
    pair.site.add("group_transactions = 1\n")?;
    pair.site.start()?;
    pair.await_arrival()?;
    let monitor = Monitor::of(&pair.site)?;
    ensure!(monitor.post("/api/v1/subscriptions/s/pause", "{}")?.status == 200);
    pair.publish(&format!(
        "DO $$ BEGIN PERFORM set_config('synchronous_commit', 'off', false); \
         FOR i IN 1..{transactions} LOOP \
         INSERT INTO t VALUES (i, repeat('x', 100)); COMMIT; END LOOP; END $$"
    ))?;
    ensure!(monitor.post("/api/v1/subscriptions/s/resume", "{}")?.status == 200);
    // The truth is the database's: when the last row is there. The site is asked once for each of
    // its looks, because answers take processor time from what is timed.
    let mut subscriber = pair.subscriber.connect()?;
    let mut told: Vec<(f64, f64)> = Vec::new();
    let mut looked = 0.0;
    let drained = wait_until("the last row", DRAINED_WITHIN, &[], || {
        let there = subscriber.query_one("SELECT coalesce(max(id), 0) FROM t", &[])?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
        if there.get::<_, i32>(0) == transactions {
            return Ok(Some(now));
        }
        if looked + LOOKS_EVERY < now {
            let status = monitor.status()?;
            looked = status["sampled_at"].as_f64().unwrap_or_default();
            let drain = status["rates"]["subscriptions"]["s"]["drain_seconds"].as_f64();
            let before = told.last().map(|(at, _)| *at);
            told.extend(drain.map(|drain| (looked, drain)).filter(|_| before < Some(looked)));
        }
        Ok(None)
    })?;
    // What comes of it is this machine's to say.
    for (at, drain) in told {
        let took = drained - at;
        println!("{drain:.1} s told, {took:.1} s taken: {:.2}", drain / took);
    }
    wait_until("nothing to be left", SOON, &[], || {
        let status = monitor.status()?;
        let drain = status["rates"]["subscriptions"]["s"]["drain_seconds"].as_f64();
        let behind = status["subscriptions"][0]["behind_bytes"].as_u64();
        Ok((behind == Some(0) && drain == Some(0.0)).then_some(()))
    })?;
    pair.assert_equal(&["public"])
}
