//! The link and the sites fail while changes cross.

use anyhow::{Context, Result, ensure};
use farshore_testkit::postgres::StopMode;
use farshore_testkit::prefix::create_tables;
use farshore_testkit::skip::skipped;
use farshore_testkit::wait::wait_until;
use farshore_tests::{
    Checked, DATABASE, Direction, Pair, Upstream, publisher_cluster, subscriber_cluster,
};
use std::path::Path;
use std::time::{Duration, Instant};

fn start(direction: Direction) -> Result<Checked> {
    let publisher = publisher_cluster(direction.publisher)?.start()?;
    Checked::start_far(publisher, subscriber_cluster(direction.subscriber)?.start()?)
}

fn upstream(checked: &mut Checked) -> Result<&mut Upstream> {
    checked.upstream.as_mut().context("a site upstream")
}

#[test]
fn a_link_that_is_cut_and_stalled_loses_nothing() -> Result<()> {
    let mut checked = start(Direction::UP)?;
    for _ in 0..4 {
        checked.await_commits(60)?;
        upstream(&mut checked)?.link.cut();
        checked.await_commits(60)?;
        upstream(&mut checked)?.link.mend();
    }
    checked.pair.await_arrival()?;
    // Nothing passes, and nobody is told: the peer is dead after ten seconds of silence.
    upstream(&mut checked)?.link.stall();
    checked.pair.site.await_trouble("up/p", "nothing was heard from site up")?;
    upstream(&mut checked)?.link.mend();
    checked.pair.await_arrival()?;
    // Every moment of a session is one that it may be cut in.
    for _ in 0..20 {
        upstream(&mut checked)?.link.cut();
        upstream(&mut checked)?.link.mend();
        checked.await_commits(7)?;
    }
    checked.finish().map(drop)
}

/// A large transaction goes on where it was, on a line that never lasts for the whole of it.
#[test]
fn a_large_transaction_crosses_a_link_that_is_cut_again_and_again() -> Result<()> {
    let mut pair = Pair::new(Direction::UP, &["public.*"], "CREATE TABLE t (id integer, v text)")?;
    let mut upstream = Upstream::split(&mut pair)?;
    upstream.site.start()?;
    pair.site.start()?;
    pair.publish("INSERT INTO t VALUES (0, 'before')")?;
    pair.await_arrival()?;
    // Two of them, which commit side by side, and a little one behind.
    upstream.link.cut();
    let before = upstream.link.passed();
    let large = "INSERT INTO t SELECT i, md5(random()::text) || md5(random()::text) || \
                 md5(random()::text) FROM generate_series(1, 120000) AS i";
    let mut other = pair.publisher.connect()?;
    let mut other = other.transaction()?;
    other.batch_execute(large)?;
    pair.publish(&format!("{large}; INSERT INTO t VALUES (-1, 'small')"))?;
    other.commit()?;
    pair.publish("INSERT INTO t VALUES (-2, 'behind')")?;
    // Once all of it is applied the store may let it go.
    let published = pair.publisher_says("SELECT pg_current_wal_lsn()")?;
    pair.await_stored(&upstream.site, &published)?;
    let disk = disk_bytes(&upstream.site.directory().join("data"))?;
    upstream.link.mend();
    upstream.link.cut_every(3 << 20);
    pair.await_arrival()?;
    let crossed = upstream.link.passed() - before;
    println!("{crossed} bytes crossed");
    ensure!(crossed < 2 * disk, "{crossed} bytes crossed for {disk} in the store");
    ensure!(crossed > 6 << 20, "{crossed} bytes: it was not cut");
    upstream.link.mend();
    pair.assert_equal(&["public"])
}

/// A transaction that the disk has no room for does not cross again and again for nothing.
#[test]
fn a_transaction_without_room_crosses_once_there_is_room() -> Result<()> {
    let mut pair = Pair::new(Direction::UP, &["public.*"], "CREATE TABLE t (id integer, v text)")?;
    let mut upstream = Upstream::split(&mut pair)?;
    let Some(disk) = pair.site.small_disk("data", 12)? else { return Ok(()) };
    upstream.site.start()?;
    pair.site.start()?;
    pair.publish("INSERT INTO t VALUES (0, 'before')")?;
    pair.await_arrival()?;
    let before = upstream.link.passed();
    pair.publish(
        "INSERT INTO t SELECT i, md5(random()::text) || md5(random()::text) || \
         md5(random()::text) FROM generate_series(1, 400000) AS i",
    )?;
    let (state, error) = pair.site.await_trouble("up/p", "Free space on that disk")?;
    ensure!(state == "retrying", "{state}: {error}");
    let restarts = |pair: &Pair| -> Result<u64> {
        pair.site.status()?["publications"][0]["restarts"].as_u64().context("restarts")
    };
    let until = restarts(&pair)? + 6;
    wait_until("further attempts", Duration::from_secs(60), &[&pair.site.log_path()], || {
        Ok((restarts(&pair)? >= until).then_some(()))
    })?;
    let crossed = upstream.link.passed() - before;
    println!("{crossed} bytes crossed in vain");
    ensure!(crossed < 12 << 20, "{crossed} bytes crossed for nothing");
    let (state, error) = pair.site.await_trouble("up/p", "bytes free there")?;
    ensure!(state == "retrying", "{state}: {error}");
    disk.resize(64)?;
    pair.assert_equal(&["public"])
}

/// What the upstream site does not get does not come here: that is said here too, and ends.
#[test]
fn a_site_is_told_that_its_upstream_gets_nothing_more() -> Result<()> {
    let mut pair =
        Pair::new(Direction::UP, &["public.*"], "CREATE TABLE t (id integer PRIMARY KEY)")?;
    let mut upstream = Upstream::split(&mut pair)?;
    upstream.site.start()?;
    pair.site.start()?;
    pair.publish("INSERT INTO t VALUES (1)")?;
    pair.assert_equal(&["public"])?;
    pair.publisher.stop(StopMode::Fast)?;
    let (state, error) = pair.site.await_trouble("up/p", "gets nothing more of it: publisher")?;
    ensure!(state == "receiving", "{state}: {error}");
    let status = pair.site.status()?;
    ensure!(status["subscriptions"][0]["latency_ms"].is_null(), "{status}");
    ensure!(pair.site.verb("status", &[])?.code != Some(0), "all is well there");
    pair.publisher.start()?;
    pair.publish("INSERT INTO t VALUES (2)")?;
    pair.assert_equal(&["public"])?;
    wait_until("the trouble to be over", Duration::from_secs(60), &[], || {
        let status = pair.site.status()?;
        Ok(status["publications"][0]["error"].is_null().then_some(()))
    })
}

/// Bytes of the files below a folder.
fn disk_bytes(folder: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += if metadata.is_dir() { disk_bytes(&entry.path())? } else { metadata.len() };
    }
    Ok(bytes)
}

#[test]
fn sites_that_are_killed_go_on_where_they_were() -> Result<()> {
    let mut checked = start(Direction::DOWN)?;
    for round in 0..6 {
        checked.await_commits(40)?;
        if round % 2 == 0 {
            let site = &mut upstream(&mut checked)?.site;
            site.kill9()?;
            checked.await_commits(20)?;
            upstream(&mut checked)?.site.start()?;
        } else {
            checked.pair.site.kill9()?;
            checked.await_commits(20)?;
            checked.pair.site.start()?;
        }
        checked.pair.await_arrival()?;
    }
    checked.finish().map(drop)
}

#[test]
fn a_receiver_that_dies_at_any_of_its_steps_goes_on() -> Result<()> {
    let mut checked = start(Direction::UP)?;
    for point in [
        "receive.before-block:9",
        "receive.after-block:9",
        "receive.before-acknowledge:5",
        "receive.after-acknowledge:5",
        "store.before-fsync:7:cut",
        "store.after-fsync:7:cut",
        "spill.before-fsync:1:cut",
        "spill.after-fsync:1:cut",
    ] {
        checked.pair.site.stop()?;
        checked.pair.site.env("FARSHORE_CRASH", point);
        checked.pair.site.start()?;
        checked.pair.site.await_kill(point, Duration::from_secs(60))?;
        checked.pair.site.env("FARSHORE_CRASH", "");
        checked.pair.site.start()?;
        checked.pair.await_arrival().with_context(|| format!("after {point}"))?;
    }
    checked.finish().map(drop)
}

/// Clocks only serve to show how far behind things are, and to tell a certificate's time.
#[test]
fn a_site_whose_clock_is_an_hour_off() -> Result<()> {
    let libraries = glob_libfaketime();
    let Some(library) = libraries.first() else {
        skipped("a_site_whose_clock_is_an_hour_off", "libfaketime is not installed");
        return Ok(());
    };
    let mut checked = start(Direction::DOWN)?;
    for offset in ["-1h", "+1h"] {
        checked.pair.site.stop()?;
        checked.pair.site.env("LD_PRELOAD", library);
        checked.pair.site.env("DONT_FAKE_MONOTONIC", "1");
        checked.pair.site.env("FAKETIME", offset);
        checked.pair.site.start()?;
        checked.await_commits(100)?;
        checked.pair.await_arrival().with_context(|| format!("with a clock {offset}"))?;
    }
    checked.finish().map(drop)
}

/// Where Debian puts the library that fakes clocks.
fn glob_libfaketime() -> Vec<String> {
    let folders = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    let files = folders.map(|folder| folder.path().join("faketime/libfaketimeMT.so.1"));
    files.filter(|file| file.exists()).map(|file| file.display().to_string()).collect()
}

/// Neither the publisher nor another subscription waits for a site that stands still.
/// `FARSHORE_STALL_SECONDS`: how long (default 20).
#[test]
fn a_receiver_that_stands_still_holds_nobody_up() -> Result<()> {
    let seconds = match std::env::var("FARSHORE_STALL_SECONDS") {
        Ok(text) => text.parse().with_context(|| format!("FARSHORE_STALL_SECONDS={text}"))?,
        Err(_) => 20,
    };
    let mut checked = start(Direction::UP)?;
    let second = subscriber_cluster(Direction::UP.subscriber)?.start()?;
    create_tables(&mut second.connect()?)?;
    let target = second.url(DATABASE);
    let site = &mut upstream(&mut checked)?.site;
    site.stop()?;
    site.add(&format!("[subscription.near]\npublication = \"p\"\ntarget = \"{target}\"\n"))?;
    site.start()?;
    let mut near = second.connect()?;
    let mut applied = move || -> Result<String> {
        let sql = "SELECT applied::text FROM farshore.subscription WHERE state = 'streaming'";
        Ok(near.query_opt(sql, &[])?.map_or_else(String::new, |row| row.get(0)))
    };
    let soon = Duration::from_secs(60);
    let activity = "SELECT string_agg(concat_ws(' ', pid, application_name, state, wait_event, \
                    pg_blocking_pids(pid), left(query, 90)), E'\\n') FROM pg_stat_activity \
                    WHERE backend_type LIKE '%client%'";
    let mut target = second.connect()?;
    upstream(&mut checked)?
        .site
        .wait_for("the other subscription to stream", soon, || match applied() {
            Ok(applied) => Ok((!applied.is_empty()).then_some(())),
            Err(error) if format!("{error:#}").contains("does not exist") => Ok(None),
            Err(error) => Err(error),
        })
        .with_context(|| match target.query_one(activity, &[]) {
            Ok(row) => format!("its target is at\n{}", row.get::<_, String>(0)),
            Err(error) => format!("its target does not say what it is at: {error}"),
        })?;
    checked.pair.site.signal(libc::SIGSTOP)?;
    let stood = Instant::now();
    while stood.elapsed() < Duration::from_secs(seconds) {
        let before = applied()?;
        checked.await_commits(50)?;
        upstream(&mut checked)?.site.wait_for("the other subscription to go on", soon, || {
            Ok((applied()? != before).then_some(()))
        })?;
    }
    checked.pair.site.signal(libc::SIGCONT)?;
    let woken = Instant::now();
    // What was written in that time is still to be applied, beside what is written now.
    checked.pair.patience += Duration::from_secs(seconds);
    checked.pair.await_arrival()?;
    println!("arrived {:.1} s after it went on", woken.elapsed().as_secs_f64());
    checked.finish().map(drop)
}
