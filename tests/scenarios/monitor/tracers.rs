//! Tracer tokens against the databases' own commit times.

use crate::asking::Monitor;
use anyhow::{Context, Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{Direction, Pair, both_ways, publisher_cluster, subscriber_cluster};
use serde_json::Value;
use std::time::Duration;

const TOKENS: usize = 12;
/// Microseconds since 1970 of a server's newest commit.
const NEWEST_COMMIT: &str =
    "SELECT (extract(epoch FROM timestamp) * 1000000)::bigint FROM pg_last_committed_xact()";
/// Times are told to the microsecond, by two ways of reading one clock.
const ROUNDING_MS: f64 = 0.2;

fn pair(direction: Direction) -> Result<Pair> {
    let publisher = publisher_cluster(direction.publisher)?;
    let subscriber = subscriber_cluster(direction.subscriber)?;
    let mut pair = Pair::of(
        publisher.setting("track_commit_timestamp", "on").start()?,
        subscriber.setting("track_commit_timestamp", "on").start()?,
    )?;
    pair.site.add_to_site("monitor = \"127.0.0.1:0\"\n")?;
    pair.on_both("CREATE TABLE t (id integer PRIMARY KEY, v text)")?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url("postgres");
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.await_arrival()?;
    Ok(pair)
}

fn tracer(pair: &Pair) -> Result<Value> {
    let said = pair.site.verb("tracer", &["p", "--json"])?;
    ensure!(said.code == Some(0), "{said:?}");
    Ok(serde_json::from_str(&said.stdout)?)
}

#[test]
fn tokens_take_as_long_as_the_databases_say() -> Result<()> {
    both_ways(|direction| {
        let pair = pair(direction)?;
        let before = pair.site.status()?["subscriptions"][0]["transactions"].as_u64();
        let mut over = Vec::new();
        for _ in 0..TOKENS {
            let report = tracer(&pair)?;
            let number = |value: &Value| value.as_f64().context("a time is missing");
            let total = number(&report["subscriptions"][0]["arrived_ms"])?;
            let (received, durable) =
                (number(&report["received_ms"])?, number(&report["durable_ms"])?);
            ensure!(received <= durable && durable <= total, "legs out of order: {report}");
            let published: f64 = pair.publisher_says(NEWEST_COMMIT)?.parse()?;
            let applied: f64 = pair.subscriber_says(NEWEST_COMMIT)?.parse()?;
            let between = (applied - published) / 1_000.0;
            // COMMIT was sent before the one, and was answered after the other.
            ensure!(
                total + ROUNDING_MS >= between,
                "{total} ms told, {between} ms at the databases"
            );
            over.push(total - between);
        }
        over.sort_by(f64::total_cmp);
        println!(
            "{direction:?}: told beyond what the databases say: median {:.2} ms, least {:.2}, \
             most {:.2}",
            over[TOKENS / 2],
            over[0],
            over[TOKENS - 1]
        );
        // Each was a transaction of its own, and none touched a table.
        let status = pair.site.status()?;
        let after = status["subscriptions"][0]["transactions"].as_u64();
        ensure!(after.zip(before).is_some_and(|(after, before)| after - before >= TOKENS as u64));
        ensure!(status["tracers"].as_array().is_some_and(|kept| kept.len() == TOKENS));
        ensure!(status["subscriptions"][0]["tracer_ms"].is_f64(), "{status}");
        ensure!(pair.subscriber_says("SELECT count(*) FROM t")? == "0");
        Ok(())
    })
}

#[test]
fn tokens_keep_their_place_among_other_transactions() -> Result<()> {
    let mut pair = pair(Direction::UP)?;
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            pair.publish(
                "DO $$ BEGIN FOR i IN 1..4000 LOOP \
                 INSERT INTO t VALUES (i, repeat('x', 100)); COMMIT; END LOOP; END $$",
            )
        });
        while !load.is_finished() {
            let report = tracer(&pair)?;
            let position = report["position"].as_str().context("no position")?;
            // Everything that committed before it is on the target.
            let applied = pair.subscriber_says(&format!(
                "SELECT applied >= '{position}' FROM farshore.subscription"
            ))?;
            ensure!(applied == "t", "{report}");
        }
        load.join().map_err(|_| anyhow::anyhow!("the load died"))?
    })?;
    pair.assert_equal(&["public"])
}

#[test]
fn tokens_of_others_and_messages_of_others_are_passed_over() -> Result<()> {
    let mut pair = pair(Direction::UP)?;
    pair.publish(
        "SELECT pg_logical_emit_message(true, 'outbox', repeat('x', 100000)); \
         SELECT pg_logical_emit_message(false, 'farshore.tracer', 'farshore_p 01'); \
         SELECT pg_logical_emit_message(true, 'farshore.tracer', 'farshore_other 01'); \
         BEGIN; INSERT INTO t VALUES (1, 'a'); \
         SELECT pg_logical_emit_message(true, 'farshore.tracer', 'farshore_p 02'); \
         INSERT INTO t VALUES (2, 'b'); COMMIT;",
    )?;
    pair.assert_equal(&["public"])?;
    tracer(&pair)?;
    let said = pair.site.verb("tracer", &["nobody"])?;
    ensure!(said.code == Some(1) && said.stderr.contains("no publication \"nobody\""), "{said:?}");
    Ok(())
}

#[test]
fn tokens_are_posted_again_and_again_where_the_site_file_says() -> Result<()> {
    let mut pair = pair(Direction::UP)?;
    pair.site.stop()?;
    pair.site.replace("monitor =", "tracer_every = \"1s\"\nmonitor =")?;
    pair.site.start()?;
    let monitor = Monitor::of(&pair.site)?;
    wait_until("three tokens to have arrived", Duration::from_secs(60), &[], || {
        let status = monitor.status()?;
        let tokens = status["tracers"].as_array().cloned().unwrap_or_default();
        let arrived = tokens.iter().filter(|t| t["subscriptions"][0]["arrived_ms"].is_f64());
        Ok((arrived.count() >= 3).then_some(()))
    })?;
    let label = "subscription=\"s\"";
    ensure!(monitor.metric("farshore_subscription_tracer_seconds", label)? > 0.0);
    Ok(())
}

#[test]
fn a_token_that_does_not_arrive_says_where_it_was_waited_for() -> Result<()> {
    let pair = pair(Direction::UP)?;
    let monitor = Monitor::of(&pair.site)?;
    let paused = monitor.post("/api/v1/subscriptions/s/pause", "{}")?;
    ensure!(paused.status == 200, "{paused:?}");
    let said = pair.site.verb("tracer", &["p", "--wait", "1"])?;
    ensure!(said.code == Some(1) && said.stdout.contains("not within 1 s (paused)"), "{said:?}");
    // The next one is not kept waiting for it: that a target is held up is what is to be seen.
    std::thread::scope(|scope| -> Result<()> {
        let first = scope.spawn(|| pair.site.verb("tracer", &["p", "--wait", "8"]));
        // The first of them may come before that one; the other does not.
        for _ in 0..2 {
            let next = pair.site.verb("tracer", &["p", "--wait", "1"])?;
            ensure!(next.stdout.contains("not within 1 s (paused)"), "{next:?}");
        }
        let first = first.join().map_err(|_| anyhow::anyhow!("the first one panicked"))??;
        ensure!(first.stdout.contains("not within 8 s (paused)"), "{first:?}");
        Ok(())
    })?;
    ensure!(monitor.post("/api/v1/subscriptions/s/resume", "{}")?.status == 200);
    let answer = monitor.post("/api/v1/publications/p/tracer", "{}")?;
    let report: Value = serde_json::from_str(&answer.body)?;
    ensure!(report["done"]["subscriptions"][0]["arrived_ms"].is_f64(), "{answer:?}");
    Ok(())
}
