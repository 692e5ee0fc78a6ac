//! Trouble that is no conflict: no policy hides it, and the message says what to do.

use anyhow::{Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{DATABASE, Direction, Pair};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const SCHEMA: &str = "CREATE TABLE t (id integer PRIMARY KEY, v text)";

/// A target role with just what it needs, and a policy that would hide any conflict.
fn pair() -> Result<Pair> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.on_both(SCHEMA)?;
    pair.publish("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 10) AS i")?;
    pair.subscriber.execute_script(
        "CREATE ROLE apply LOGIN; GRANT CREATE ON DATABASE postgres TO apply; \
         GRANT USAGE ON SCHEMA public, farshore_marks TO apply; \
         GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON t, farshore_marks.mark TO apply; \
         GRANT SET ON PARAMETER session_replication_role TO apply",
    )?;
    pair.add_publication("p", &["public.t"], "")?;
    let target = pair.subscriber.url(DATABASE).replace("postgres://postgres@", "postgres://apply@");
    pair.add_subscription("s", "p", &target)?;
    pair.site.add("on_conflict = \"skip\"")?;
    pair.site.start()?;
    pair.await_arrival()?;
    Ok(pair)
}

/// Waits until the subscription says `text`; returns its state.
fn await_error(pair: &Pair, text: &str) -> Result<String> {
    wait_until(&format!("{text}{}", pair.site.log_tail()), SOON, &[], || {
        let status = pair.site.status()?;
        let subscription = &status["subscriptions"][0];
        let said = subscription["error"].as_str().unwrap_or_default();
        let state = subscription["state"].as_str().unwrap_or_default();
        Ok(said.contains(text).then(|| state.to_owned()))
    })
}

fn assert_nothing_skipped(pair: &mut Pair) -> Result<()> {
    pair.assert_equal(&["public"])?;
    let records = pair.subscriber_says("SELECT count(*) FROM farshore.conflicts")?;
    ensure!(records == "0", "{records} conflicts");
    Ok(())
}

#[test]
fn a_missing_privilege_stops_under_every_policy() -> Result<()> {
    let mut pair = pair()?;
    pair.subscriber.execute_script("REVOKE UPDATE ON t FROM apply")?;
    pair.publish("UPDATE t SET v = 'w' WHERE id = 1")?;
    let state = await_error(&pair, "ERROR 42501: permission denied for table t")?;
    ensure!(state == "stopped", "{state}");
    await_error(
        &pair,
        "farshore check prints the SQL that grants it; then go on (farshore resume)",
    )?;
    pair.subscriber.execute_script("GRANT UPDATE ON t TO apply")?;
    let said = pair.site.verb("resume", &["--subscription", "s"])?;
    ensure!(said.code == Some(0), "{said:?}");
    // The log tells of the stop; only the status is of now.
    let mut target = pair.subscriber.connect()?;
    wait_until("the update", SOON, &[], || {
        Ok(target.query_opt("SELECT FROM t WHERE id = 1 AND v = 'w'", &[])?.map(drop))
    })?;
    pair.site.restart()?;
    assert_nothing_skipped(&mut pair)
}

#[test]
fn a_role_that_may_not_log_in_stops_and_is_named() -> Result<()> {
    let mut pair = pair()?;
    pair.site.stop()?;
    pair.subscriber.execute_script("ALTER ROLE apply NOLOGIN")?;
    pair.site.start()?;
    let state = await_error(&pair, "28000")?;
    ensure!(state == "stopped", "{state}");
    pair.subscriber.execute_script("ALTER ROLE apply LOGIN")?;
    pair.site.verb("resume", &["--subscription", "s"])?;
    wait_until("the subscription to go on", SOON, &[], || {
        let status = pair.site.status()?;
        Ok((status["subscriptions"][0]["state"] == "streaming").then_some(()))
    })?;
    pair.site.restart()?;
    assert_nothing_skipped(&mut pair)
}

#[test]
fn a_read_only_target_is_waited_for() -> Result<()> {
    let mut pair = pair()?;
    let mut target = pair.subscriber.connect()?;
    for (set, text) in [
        ("ALTER SYSTEM SET default_transaction_read_only = on", "The target takes no writes"),
        ("ALTER SYSTEM RESET default_transaction_read_only", ""),
    ] {
        target.batch_execute("SET default_transaction_read_only = off")?;
        target.batch_execute(set)?;
        target.batch_execute("SELECT pg_reload_conf()")?;
        if !text.is_empty() {
            pair.publish("UPDATE t SET v = 'w' WHERE id = 1")?;
            let state = await_error(&pair, text)?;
            ensure!(state == "retrying", "{state}");
        }
    }
    assert_nothing_skipped(&mut pair)
}

#[test]
fn a_cancelled_statement_is_tried_again() -> Result<()> {
    let mut pair = pair()?;
    let mut blocker = pair.subscriber.connect()?;
    let mut watch = pair.subscriber.connect()?;
    blocker.batch_execute("BEGIN; UPDATE t SET v = v WHERE id = 1")?;
    pair.publish("UPDATE t SET v = 'w' WHERE id = 1")?;
    pair.site.wait_for("apply to wait for the lock", SOON, || {
        let cancel = "SELECT pg_cancel_backend(pid) FROM (SELECT pid FROM pg_stat_activity \
            WHERE wait_event_type = 'Lock' AND usename = 'apply' LIMIT 1 OFFSET 0) AS waiting";
        Ok(watch.query_opt(cancel, &[])?.map(drop))
    })?;
    pair.site.await_log("The statement was cancelled on the target", SOON)?;
    blocker.batch_execute("COMMIT")?;
    assert_nothing_skipped(&mut pair)
}
