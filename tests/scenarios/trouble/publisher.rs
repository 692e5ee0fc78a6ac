//! A publisher that has no connection left, loses the slot, or fails over.

use anyhow::{Result, ensure};
use farshore_testkit::postgres::{Cluster, Installation, StopMode};
use farshore_testkit::wait::wait_until;
use farshore_tests::{Checked, Direction, Link, Pair, publisher_cluster, subscriber_cluster};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

/// A physical replication connection that does nothing but take a walsender, once there is one:
/// one that ends gives its place back a little later.
fn take_walsender(port: u16) -> Result<TcpStream> {
    wait_until("a free walsender", SOON, &[], || try_to_take_walsender(port))
}

fn try_to_take_walsender(port: u16) -> Result<Option<TcpStream>> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    let parameters = b"user\0postgres\0replication\0true\0\0";
    let length = u32::try_from(8 + parameters.len())?;
    stream.write_all(&[&length.to_be_bytes()[..], &[0, 3, 0, 0], parameters].concat())?;
    // AuthenticationOk: from then on the walsender is ours.
    let mut answer = [0; 9];
    stream.read_exact(&mut answer)?;
    if answer[0] == b'E' {
        return Ok(None);
    }
    ensure!(answer[0] == b'R', "{answer:?}");
    let mut ready = [0];
    while ready != [b'Z'] {
        stream.read_exact(&mut ready)?;
    }
    Ok(Some(stream))
}

#[test]
fn no_walsender_is_left() -> Result<()> {
    let publisher = publisher_cluster(15)?.setting("max_wal_senders", "2").start()?;
    let mut checked = Checked::start(publisher, subscriber_cluster(18)?.start()?, &[], "")?;
    let port = checked.pair.publisher.port();
    let other = take_walsender(port)?;
    // Whoever comes first after this takes the second one.
    checked.pair.site.stop()?;
    let another = take_walsender(port)?;
    checked.pair.site.start()?;
    let (state, error) = checked.pair.site.await_trouble("p", "max_wal_senders")?;
    ensure!(state == "retrying", "{state}: {error}");
    drop((other, another));
    checked.pair.await_arrival()?;
    checked.finish().map(drop)
}

#[test]
fn the_slot_is_dropped_while_it_streams() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY)";
    for direction in [Direction::UP, Direction::DOWN] {
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        let mut publisher = pair.publisher.connect()?;
        // Farshore's next connection comes after a pause.
        wait_until("the slot to go", SOON, &[&pair.publisher.log_path()], || {
            let _ = publisher.batch_execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots \
                 WHERE slot_name = 'farshore_p' AND active_pid IS NOT NULL",
            );
            let dropped = publisher.batch_execute("SELECT pg_drop_replication_slot('farshore_p')");
            Ok(dropped.is_ok().then_some(()))
        })?;
        pair.publish("INSERT INTO t VALUES (1)")?;
        for _ in 0..2 {
            let (state, error) = pair.site.await_trouble("p", "\"farshore_p\" is gone from")?;
            ensure!(state == "stopped" && error.contains("To copy everything anew"), "{error}");
            let slots = "SELECT count(*) FROM pg_replication_slots";
            ensure!(pair.publisher_says(slots)? == "0", "a slot was made silently");
            pair.site.restart()?;
        }
    }
    Ok(())
}

#[test]
fn the_slot_is_invalidated_while_the_link_is_silent() -> Result<()> {
    let publisher = publisher_cluster(18)?
        .setting("max_slot_wal_keep_size", "1MB")
        .setting("wal_sender_timeout", "2s")
        .start()?;
    let link = Link::to(publisher.port())?;
    let mut pair = Pair::of(publisher, subscriber_cluster(15)?.start()?)?;
    pair.on_both("CREATE TABLE t (id integer PRIMARY KEY)")?;
    pair.add_publication("p", &["public.*"], "")?;
    let port = |port: u16| format!(":{port}/");
    pair.site.replace(&port(pair.publisher.port()), &port(link.port()))?;
    let target = pair.subscriber.url("postgres");
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    link.stall();
    pair.publish("INSERT INTO t VALUES (1); CREATE TABLE unpublished (v text)")?;
    let mut publisher = pair.publisher.connect()?;
    wait_until("the slot to be invalidated", SOON, &[&pair.publisher.log_path()], || {
        publisher.batch_execute(
            "INSERT INTO unpublished SELECT repeat('x', 1000) FROM generate_series(1, 20000)",
        )?;
        publisher.batch_execute("SELECT pg_switch_wal(); CHECKPOINT")?;
        let lost = "SELECT FROM pg_replication_slots WHERE wal_status = 'lost'";
        Ok(publisher.query_opt(lost, &[])?.map(drop))
    })?;
    link.mend();
    let (state, error) = pair.site.await_trouble("p", "was invalidated")?;
    ensure!(state == "stopped" && error.contains("max_slot_wal_keep_size"), "{state}: {error}");
    ensure!(error.contains("To copy everything anew"), "{error}");
    Ok(())
}

#[test]
fn the_slot_is_invalidated_because_nobody_used_it() -> Result<()> {
    let publisher = publisher_cluster(18)?.start()?;
    let mut pair = Pair::of(publisher, subscriber_cluster(15)?.start()?)?;
    pair.on_both("CREATE TABLE t (id integer PRIMARY KEY)")?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url("postgres");
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.site.stop()?;
    pair.publisher
        .connect()?
        .batch_execute("ALTER SYSTEM SET idle_replication_slot_timeout = '1s'")?;
    pair.publish("SELECT pg_reload_conf()")?;
    let mut publisher = pair.publisher.connect()?;
    wait_until("the slot to be invalidated", SOON, &[&pair.publisher.log_path()], || {
        publisher.batch_execute("CHECKPOINT")?;
        let lost = "SELECT FROM pg_replication_slots WHERE wal_status = 'lost'";
        Ok(publisher.query_opt(lost, &[])?.map(drop))
    })?;
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("p", "was invalidated")?;
    let says = error.contains("idle_replication_slot_timeout");
    ensure!(state == "stopped" && says && !error.contains("max_slot_wal"), "{state}: {error}");
    Ok(())
}

/// A publisher of the newest version that is installed and knows failover slots, and a link to it.
fn primary(settings: &[(&str, &str)]) -> Result<(Cluster, Link)> {
    let builder = Cluster::builder(&Installation::find(18)?).setting("wal_level", "logical");
    let builder =
        settings.iter().fold(builder, |builder, (name, value)| builder.setting(name, value));
    let publisher = builder.start()?;
    let link = Link::to(publisher.port())?;
    Ok((publisher, link))
}

/// The standby gets our slot, and keeps it.
fn await_synced_slot(standby: &Cluster) -> Result<()> {
    let mut client = standby.connect()?;
    wait_until("the slot on the standby", SOON, &[&standby.log_path()], || {
        let synced = "SELECT FROM pg_replication_slots WHERE slot_name = 'farshore_p' AND synced \
                      AND NOT temporary AND invalidation_reason IS NULL";
        Ok(client.query_opt(synced, &[])?.map(drop))
    })
}

fn promote(standby: &Cluster) -> Result<()> {
    standby.execute_script("SELECT pg_promote(true, 60)")
}

#[test]
fn it_fails_over_to_a_standby() -> Result<()> {
    // The slot may only stream what the standby has.
    let (publisher, link) = primary(&[])?;
    let subscriber = subscriber_cluster(15)?.start()?;
    let mut checked = Checked::start_through(publisher, Some(&link), subscriber, &[], "")?;
    let standby = checked.pair.publisher.standby(
        &[("sync_replication_slots", "on"), ("synchronized_standby_slots", "")],
        &["farshore_p"],
    )?;
    checked
        .pair
        .publisher
        .execute_script("ALTER SYSTEM SET synchronized_standby_slots = 'standby'")?;
    checked.pair.publisher.execute_script("SELECT pg_reload_conf()")?;
    checked.pair.await_arrival()?;
    await_synced_slot(&standby)?;
    checked.await_commits(100)?;
    // In the middle of it all.
    checked.pair.publisher.kill9()?;
    promote(&standby)?;
    let old = std::mem::replace(&mut checked.pair.publisher, standby);
    link.redirect(checked.pair.publisher.port());
    checked.await_commits(100)?;
    checked.pair.await_arrival()?;
    let log = checked.pair.site.log();
    ensure!(log.contains("the publisher changed its timeline"), "{log}");
    let servers = checked.finish()?;
    drop((servers, old));
    Ok(())
}

#[test]
fn it_fails_over_to_a_standby_that_lacks_changes() -> Result<()> {
    let (publisher, link) = primary(&[])?;
    let mut pair = Pair::of(publisher, subscriber_cluster(15)?.start()?)?;
    pair.on_both("CREATE TABLE t (id integer PRIMARY KEY)")?;
    pair.add_publication("p", &["public.*"], "")?;
    let port = |port: u16| format!(":{port}/");
    pair.site.replace(&port(pair.publisher.port()), &port(link.port()))?;
    let target = pair.subscriber.url("postgres");
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    let mut standby =
        pair.publisher.standby(&[("sync_replication_slots", "on")], &["farshore_p"])?;
    pair.publish("INSERT INTO t VALUES (1)")?;
    pair.assert_equal(&["public"])?;
    await_synced_slot(&standby)?;
    // The standby is away; what is committed now is on the subscriber and never on it.
    standby.stop(farshore_testkit::postgres::StopMode::Fast)?;
    pair.publish("INSERT INTO t VALUES (2)")?;
    pair.assert_equal(&["public"])?;
    pair.publisher.kill9()?;
    standby.start()?;
    promote(&standby)?;
    link.redirect(standby.port());
    standby.execute_script("INSERT INTO t VALUES (3)")?;
    let (state, error) = pair.site.await_trouble("p", "before what the store holds")?;
    ensure!(state == "stopped" && error.contains("To copy everything anew"), "{state}: {error}");
    Ok(())
}

/// What is copied is in the log, so that a publisher that has lost it is found out, or it is not
/// copied at all.
#[test]
fn a_copy_has_nothing_that_a_failover_loses() -> Result<()> {
    let (publisher, link) = primary(&[])?;
    let mut pair = Pair::of(publisher, subscriber_cluster(15)?.start()?)?;
    pair.on_both("CREATE TABLE t (id integer PRIMARY KEY)")?;
    pair.add_publication("p", &["public.*"], "")?;
    let port = |port: u16| format!(":{port}/");
    pair.site.replace(&port(pair.publisher.port()), &port(link.port()))?;
    let target = pair.subscriber.url("postgres");
    pair.add_subscription("s", "p", &target)?;
    // Keeps the copy from beginning.
    pair.subscriber.execute_script("INSERT INTO t VALUES (99)")?;
    pair.site.start()?;
    pair.site.await_trouble("s", "has rows already")?;
    wait_until("the publication to stream", SOON, &[&pair.site.log_path()], || {
        let status = pair.site.status()?;
        Ok((status["publications"][0]["state"] == "streaming").then_some(()))
    })?;
    let mut standby =
        pair.publisher.standby(&[("sync_replication_slots", "on")], &["farshore_p"])?;
    pair.publish("INSERT INTO t VALUES (1)")?;
    await_synced_slot(&standby)?;
    standby.stop(StopMode::Fast)?;
    // The standby is away, and the log of what is committed now does not come.
    let walsender = pair.publisher_says(
        "SELECT active_pid FROM pg_replication_slots WHERE slot_name = 'farshore_p'",
    )?;
    let stopped = std::process::Command::new("kill").args(["-STOP", &walsender]).status()?;
    ensure!(stopped.success(), "{stopped}");
    pair.publish("INSERT INTO t VALUES (2)")?;
    pair.subscriber.execute_script("TRUNCATE t")?;
    let resumed = pair.site.verb("resume", &["--subscription", "s"])?;
    ensure!(resumed.code == Some(0), "{resumed:?}");
    wait_until("the copy to wait, or to be done", SOON, &[&pair.site.log_path()], || {
        let status = pair.site.status()?;
        let s = &status["subscriptions"][0];
        let waits = s["error"].as_str().is_some_and(|why| why.contains("waits for the log"));
        Ok((waits || s["state"] == "streaming").then_some(()))
    })?;
    pair.publisher.kill9()?;
    standby.start()?;
    promote(&standby)?;
    link.redirect(standby.port());
    let old = std::mem::replace(&mut pair.publisher, standby);
    pair.publish("INSERT INTO t VALUES (3)")?;
    pair.assert_equal(&["public"])?;
    drop(old);
    Ok(())
}

/// In the middle of a failover an address leads to a standby for a moment: it is waited for.
#[test]
fn a_publisher_that_is_a_standby_for_a_while_is_waited_for() -> Result<()> {
    let publisher = publisher_cluster(18)?.start()?;
    let mut pair = Pair::of(publisher, subscriber_cluster(15)?.start()?)?;
    pair.on_both("CREATE TABLE t (id integer PRIMARY KEY, v text)")?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url("postgres");
    pair.add_subscription("s", "p", &target)?;
    pair.publish("INSERT INTO t VALUES (1, 'before')")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    for round in 2..=3 {
        pair.publisher.stop(StopMode::Fast)?;
        std::fs::write(pair.publisher.data_dir().join("standby.signal"), "")?;
        pair.publisher.start()?;
        if round == 3 {
            pair.site.restart()?;
        }
        let (state, error) = pair.site.await_trouble("p", "is a standby")?;
        ensure!(state == "retrying", "{state}: {error}");
        promote(&pair.publisher)?;
        pair.publish(&format!("INSERT INTO t VALUES ({round}, 'after')"))?;
        pair.assert_equal(&["public"])?;
    }
    Ok(())
}

/// A slot and a snapshot wait for transactions that are running: which they are is said.
#[test]
fn transactions_that_the_start_waits_for_are_named() -> Result<()> {
    let publisher = publisher_cluster(15)?.setting("max_prepared_transactions", 4).start()?;
    let mut pair = Pair::of(publisher, subscriber_cluster(18)?.start()?)?;
    pair.on_both("CREATE TABLE t (id integer PRIMARY KEY, v text)")?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url("postgres");
    pair.add_subscription("s", "p", &target)?;
    pair.publish("BEGIN; INSERT INTO t VALUES (1, 'prepared'); PREPARE TRANSACTION 'it''s held'")?;
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("p", "prepared transaction 'it''s held'")?;
    ensure!(state == "starting" && error.contains("ROLLBACK PREPARED"), "{state}: {error}");
    pair.publish("COMMIT PREPARED 'it''s held'")?;
    pair.assert_equal(&["public"])
}

/// Its keepalives tell only what it has sent.
#[test]
fn log_that_it_holds_back_for_a_standby_is_told() -> Result<()> {
    let (publisher, _link) = primary(&[])?;
    let mut pair = Pair::of(publisher, subscriber_cluster(15)?.start()?)?;
    pair.on_both("CREATE TABLE t (id integer PRIMARY KEY)")?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url("postgres");
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    let set = |standbys: &str| {
        let set = format!("ALTER SYSTEM SET synchronized_standby_slots = '{standbys}'");
        pair.publisher.execute_script(&set)?;
        pair.publisher.execute_script("SELECT pg_reload_conf()")
    };
    set("gone")?;
    pair.publisher.execute_script("INSERT INTO t SELECT generate_series(1, 10000)")?;
    let (state, error) = pair.site.await_trouble("p", "synchronized_standby_slots")?;
    ensure!(state == "streaming" && error.contains("bytes by now"), "{state}: {error}");
    let status = pair.site.status()?;
    let p = &status["publications"][0];
    ensure!(p["capture_behind_bytes"].as_u64() > Some(500_000), "{p}");
    ensure!(p["unacknowledged_bytes"].as_u64() > Some(500_000) && p["health"] == "warning", "{p}");
    set("")?;
    pair.assert_equal(&["public"])?;
    wait_until("nothing to say", SOON, &[&pair.site.log_path()], || {
        Ok(pair.site.status()?["publications"][0]["error"].is_null().then_some(()))
    })
}
