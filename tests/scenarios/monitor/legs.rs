//! Legs and commands without tracer tokens, stored commands and conflicts: against the databases.

use crate::asking::Monitor;
use anyhow::{Context, Result, ensure};
use farshore_testkit::postgres::StopMode;
use farshore_testkit::wait::wait_until;
use farshore_tests::{
    DATABASE, DOWNSTREAM, Direction, Pair, Upstream, publisher_cluster, subscriber_cluster,
};
use serde_json::Value;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
/// Microseconds since 1970 of a server's newest commit.
const NEWEST_COMMIT: &str =
    "SELECT (extract(epoch FROM timestamp) * 1000000)::bigint FROM pg_last_committed_xact()";
/// Times are told to the microsecond, by two ways of reading one clock.
const ROUNDING_MS: f64 = 0.2;

fn pair(more: &str) -> Result<Pair> {
    let publisher = publisher_cluster(Direction::UP.publisher)?;
    let subscriber = subscriber_cluster(Direction::UP.subscriber)?;
    let mut pair = Pair::of(
        publisher.setting("track_commit_timestamp", "on").start()?,
        subscriber.setting("track_commit_timestamp", "on").start()?,
    )?;
    pair.site.add_to_site("monitor = \"127.0.0.1:0\"\n")?;
    pair.on_both("CREATE TABLE t (id integer PRIMARY KEY, v text)")?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    pair.site.add(more)?;
    pair.site.start()?;
    pair.await_arrival()?;
    Ok(pair)
}

fn number(value: &Value) -> Result<f64> {
    value.as_f64().with_context(|| format!("{value} is no number"))
}

/// Waits until the store has everything, and returns the state then.
fn all_stored(pair: &Pair, monitor: Monitor) -> Result<Value> {
    let end = pair.publisher_says("SELECT pg_current_wal_lsn()")?;
    wait_until("the store to have it", SOON, &[], || {
        let status = monitor.status()?;
        let durable = status["publications"][0]["durable"].as_str().unwrap_or_default();
        let reached = pair.publisher_says(&format!("SELECT '{durable}'::pg_lsn >= '{end}'"))?;
        Ok((reached == "t").then_some(status))
    })
}

#[test]
fn legs_add_up_to_what_the_databases_say() -> Result<()> {
    let pair = pair("")?;
    let monitor = Monitor::of(&pair.site)?;
    let mut told = Vec::new();
    for id in 0..8 {
        let counted = |status: &Value| status["subscriptions"][0]["transactions"].as_u64();
        let before = counted(&all_stored(&pair, monitor)?);
        pair.publish(&format!("INSERT INTO t VALUES ({id}, 'v')"))?;
        let status = wait_until("it to be on the target", SOON, &[], || {
            let status = monitor.status()?;
            Ok((counted(&status) > before).then_some(status))
        })?;
        let (p, s) = (&status["publications"][0], &status["subscriptions"][0]);
        let (upstream, apply) = (number(&s["upstream_ms"])?, number(&s["apply_ms"])?);
        let (capture, store) = (number(&p["capture_ms"])?, number(&p["store_ms"])?);
        ensure!(
            (capture + store - upstream).abs() < ROUNDING_MS,
            "the legs before apply took {capture} and {store} ms, together {upstream}"
        );
        let published: f64 = pair.publisher_says(NEWEST_COMMIT)?.parse()?;
        let applied: f64 = pair.subscriber_says(NEWEST_COMMIT)?.parse()?;
        let between = (applied - published) / 1_000.0;
        // Seen here after it was there.
        let total = upstream + apply;
        ensure!(total + ROUNDING_MS >= between, "{total} ms told, {between} at the databases");
        told.push((capture, store, apply, total - between));
        for (metric, leg) in [
            ("farshore_publication_capture_latency_seconds", capture),
            ("farshore_publication_store_latency_seconds", store),
        ] {
            let shown = monitor.metric(metric, "publication=\"p\"")?;
            ensure!((shown * 1_000.0 - leg).abs() < ROUNDING_MS, "{metric}: {shown}, not {leg} ms");
        }
    }
    println!("capture, store, apply, told beyond what the databases say (ms): {told:.2?}");
    Ok(())
}

#[test]
fn commands_are_counted_and_a_restart_makes_them_an_estimate() -> Result<()> {
    let mut pair = pair("")?;
    let monitor = Monitor::of(&pair.site)?;
    ensure!(monitor.post("/api/v1/subscriptions/s/pause", "{}")?.status == 200);
    pair.publish("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 20000) AS i")?;
    pair.publish("UPDATE t SET v = 'w' WHERE id <= 300; DELETE FROM t WHERE id > 19990")?;
    let status = all_stored(&pair, monitor)?;
    let s = &status["subscriptions"][0];
    ensure!(s["behind_commands"] == 20_310 && s["behind_commands_estimated"] == false, "{s}");
    ensure!(status["publications"][0]["commands"].as_u64() >= Some(20_310), "{status}");
    let shown = monitor.metric("farshore_subscription_behind_commands", "subscription=\"s\"")?;
    ensure!(shown == 20_310.0, "{shown} in metrics");
    wait_until("what waits to show in the last leg", SOON, &[], || {
        let apply = monitor.status()?["subscriptions"][0]["apply_ms"].as_f64();
        Ok(apply.filter(|ms| *ms > 1_000.0).map(drop))
    })?;
    // What was stored before the node started is not counted again.
    pair.site.restart()?;
    let monitor = Monitor::of(&pair.site)?;
    let status = wait_until("the node to know the subscription", SOON, &[], || {
        let status = monitor.status()?;
        let behind = status["subscriptions"][0]["behind_bytes"].as_u64();
        Ok((behind > Some(0)).then_some(status))
    })?;
    let s = &status["subscriptions"][0];
    ensure!(s["behind_commands"].is_null() && s["behind_commands_estimated"] == true, "{s}");
    ensure!(monitor.post("/api/v1/subscriptions/s/resume", "{}")?.status == 200);
    pair.await_arrival()?;
    wait_until("nothing to wait", SOON, &[], || {
        let s = &monitor.status()?["subscriptions"][0];
        Ok((s["behind_commands"] == 0 && s["behind_commands_estimated"] == false).then_some(()))
    })?;
    pair.assert_equal(&["public"])
}

#[test]
fn what_a_publisher_keeps_is_not_known_while_it_is_away() -> Result<()> {
    let mut pair = pair("")?;
    let monitor = Monitor::of(&pair.site)?;
    let known = |status: &Value| status["publications"][0]["unacknowledged_bytes"].is_u64();
    wait_until("it to be known", SOON, &[], || Ok(known(&monitor.status()?).then_some(())))?;
    pair.publisher.stop(StopMode::Fast)?;
    let heard_at = wait_until("it to be unknown", SOON, &[], || {
        let p = &monitor.status()?["publications"][0];
        Ok(if p["unacknowledged_bytes"].is_null() { p["heard_at"].as_f64() } else { None })
    })?;
    let text = monitor.get("/metrics")?;
    ensure!(!text.contains("farshore_publication_unacknowledged_bytes{"), "{text}");
    let said = pair.site.verb("status", &[])?;
    ensure!(said.stdout.contains("unknown: nothing was heard of the publisher for"), "{said:?}");
    pair.publisher.start()?;
    wait_until("it to be heard again", SOON, &[], || {
        let status = monitor.status()?;
        let later = status["publications"][0]["heard_at"].as_f64() > Some(heard_at);
        Ok((later && known(&status)).then_some(()))
    })
}

#[test]
fn stored_commands_and_conflicts_are_shown_as_they_are() -> Result<()> {
    let mut pair = pair("on_conflict = \"skip\"\n")?;
    let monitor = Monitor::of(&pair.site)?;
    let none = monitor.get("/api/v1/subscriptions/s/conflicts")?;
    ensure!(none == "{\"conflicts\":[]}", "{none}");
    // Nothing is dropped from the store while somebody needs it.
    pair.publish("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 120) AS i")?;
    pair.await_arrival()?;
    pair.subscriber.execute_script("DELETE FROM t WHERE id = 7")?;
    pair.publish("UPDATE t SET v = '<b>changed</b>' WHERE id = 7")?;
    pair.await_arrival()?;
    let recorded = "SELECT source_lsn || ' ' || table_name || ' ' || key::text \
                    FROM farshore.conflicts";
    let truth = pair.subscriber_says(recorded)?;
    let answer: Value = serde_json::from_str(&monitor.get("/api/v1/subscriptions/s/conflicts")?)?;
    let conflicts = answer["conflicts"].as_array().context("no list")?;
    ensure!(conflicts.len() == 1, "{answer}");
    let text = |field: &str| conflicts[0][field].as_str().unwrap_or_default();
    ensure!(truth == format!("{} t {}", text("lsn"), text("key")), "{truth}, told {answer}");
    ensure!(text("table") == "public.t" && text("action") == "skipped", "{answer}");
    ensure!(text("operation") == "UPDATE" && text("reason").contains("0 rows"), "{answer}");

    // Its transaction among the stored ones.
    let lsn = text("lsn");
    let path = format!("/api/v1/publications/p/changes?limit=1&from={}", lsn.replace('/', "%2F"));
    let answer: Value = serde_json::from_str(&monitor.get(&path)?)?;
    ensure!(answer["transactions"][0]["lsn"] == lsn, "{answer}");
    let change = answer["transactions"][0]["changes"][0].as_str().unwrap_or_default();
    ensure!(change.starts_with("UPDATE public.t") && change.contains("'<b>changed"), "{change}");
    // Page by page to the end: each transaction once, in commit order.
    let (mut next, mut seen) = (String::new(), Vec::new());
    loop {
        let path = format!("/api/v1/publications/p/changes?limit=50{next}");
        let answer: Value = serde_json::from_str(&monitor.get(&path)?)?;
        for transaction in answer["transactions"].as_array().into_iter().flatten() {
            seen.push(transaction["lsn"].as_str().unwrap_or_default().to_owned());
        }
        match answer["next"].as_str() {
            Some(from) => next = format!("&from={}", from.replace('/', "%2F")),
            None => break,
        }
    }
    let listed = pair.site.verb("browse", &["--publication", "p", "--limit", "0", "--json"])?;
    let mut truth = Vec::new();
    for line in listed.stdout.lines() {
        let change: Value = serde_json::from_str(line)?;
        let lsn = change["lsn"].as_str().unwrap_or_default().to_owned();
        if truth.last() != Some(&lsn) {
            truth.push(lsn);
        }
    }
    ensure!(seen == truth && seen.len() > 1, "{seen:?} on the page, {truth:?} stored");
    let wrong = monitor.post("/api/v1/publications/nobody/changes", "{}")?;
    ensure!(wrong.status == 405, "{wrong:?}");
    let wrong = monitor.get("/api/v1/publications/nobody/changes");
    ensure!(wrong.is_err_and(|error| error.to_string().contains("no publication")));
    Ok(())
}

#[test]
fn the_link_is_a_leg_of_its_own() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY)";
    let mut pair = Pair::new(Direction::UP, &["public.*"], schema)?;
    let mut upstream = Upstream::split(&mut pair)?;
    upstream.site.add_to_site("monitor = \"127.0.0.1:0\"\n")?;
    pair.site.add_to_site("monitor = \"127.0.0.1:0\"\n")?;
    upstream.site.start()?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    let (near, far) = (Monitor::of(&upstream.site)?, Monitor::of(&pair.site)?);
    pair.publish("INSERT INTO t SELECT generate_series(1, 100)")?;
    pair.assert_equal(&["public"])?;
    wait_until("both sites to have timed their legs", SOON, &[], || {
        let (here, there) = (near.status()?, far.status()?);
        let d = &here["downstreams"][0];
        let s = &there["subscriptions"][0];
        let timed = d["link_ms"].is_f64() && s["upstream_ms"].is_f64() && s["apply_ms"].is_f64();
        let nothing = d["behind_commands"] == 0 && s["behind_commands"] == 0;
        Ok((timed && nothing).then_some(()))
    })?;
    upstream.link.cut();
    pair.publish("INSERT INTO t SELECT generate_series(101, 5100)")?;
    let label = format!("site=\"{DOWNSTREAM}\"");
    wait_until("what waits for the link to show", SOON, &[], || {
        let d = &near.status()?["downstreams"][0];
        let waits = d["link_ms"].as_f64() > Some(1_000.0) && d["behind_commands"] == 5_000;
        Ok((waits && d["connected"] == false).then_some(()))
    })?;
    ensure!(near.metric("farshore_downstream_behind_commands", &label)? == 5_000.0);
    upstream.link.mend();
    pair.assert_equal(&["public"])?;
    wait_until("nothing to wait", SOON, &[], || {
        Ok((near.status()?["downstreams"][0]["behind_commands"] == 0).then_some(()))
    })
}
