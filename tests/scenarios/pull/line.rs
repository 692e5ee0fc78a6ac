//! Two sites with 77 ms between them, while the line does what lines do.
//!
//! - `FARSHORE_CUT_SECONDS`: how long it is cut (default 60).

use anyhow::{Context, Result, ensure};
use farshore_testkit::skip::{skipped, this_test};
use farshore_testkit::wait::wait_until;
use farshore_testkit::wan::{Direction, Wan, WanConfig};
use farshore_tests::{Checked, DATABASE, Pair, Upstream, publisher_cluster, subscriber_cluster};
use std::time::{Duration, Instant};

const RTT: Duration = Duration::from_millis(77);
const SOON: Duration = Duration::from_secs(60);

/// A line, or `None` with the test told as skipped.
fn line(loss: f64) -> Result<Option<Wan>> {
    line_of(100_000_000, loss)
}

fn line_of(bits_per_second: u64, loss: f64) -> Result<Option<Wan>> {
    if let Err(reason) = Wan::available() {
        skipped(&this_test(), &reason.to_string());
        return Ok(None);
    }
    let bits_per_second = Some(bits_per_second);
    let seed = farshore_testkit::seed();
    Wan::start(WanConfig { rtt: RTT, bits_per_second, loss, seed, ..WanConfig::default() })
        .map(Some)
}

fn start(wan: &Wan) -> Result<Checked> {
    let publisher = publisher_cluster(15)?.place(wan.near()).start()?;
    let subscriber = subscriber_cluster(18)?.place(wan.far()).start()?;
    Checked::start_across(wan, publisher, subscriber)
}

/// A table `t` that is published at the near end and subscribed to at the far one.
fn one_table(wan: &Wan) -> Result<Pair> {
    let publisher = publisher_cluster(15)?.place(wan.near()).start()?;
    let subscriber = subscriber_cluster(18)?.place(wan.far()).start()?;
    let mut pair = Pair::of(publisher, subscriber)?;
    pair.on_both("CREATE TABLE t (id int PRIMARY KEY, v text)")?;
    pair.add_publication("p", &["public.t"], "")?;
    let target = pair.subscriber.url_from(wan.far(), DATABASE);
    pair.add_subscription("s", "p", &target)?;
    Ok(pair)
}

/// Waits until everything has arrived, and says how long that took.
fn recover(checked: &mut Checked, from: &str) -> Result<()> {
    let begin = Instant::now();
    checked.pair.await_arrival()?;
    println!("recovered from {from} in {:.1} s", begin.elapsed().as_secs_f64());
    Ok(())
}

#[test]
fn a_line_that_is_cut_flaps_and_goes_silent() -> Result<()> {
    let Some(wan) = line(0.0)? else { return Ok(()) };
    let mut checked = start(&wan)?;
    let seconds = match std::env::var("FARSHORE_CUT_SECONDS") {
        Ok(text) => text.parse().with_context(|| format!("FARSHORE_CUT_SECONDS={text}"))?,
        Err(_) => 60,
    };
    // Nothing passes, and nobody is told: the sites find out by themselves.
    wan.cut();
    let cut = Instant::now();
    checked.pair.site.await_trouble("up/p", "up")?;
    while cut.elapsed() < Duration::from_secs(seconds) {
        checked.await_commits(20)?;
    }
    wan.restore();
    recover(&mut checked, &format!("a cut of {seconds} s"))?;
    // Only acknowledgements are lost.
    wan.cut_direction(Direction::FarToNear);
    checked.await_commits(100)?;
    wan.restore();
    recover(&mut checked, "one direction cut")?;
    for _ in 0..6 {
        wan.cut();
        commit_for(&mut checked, Duration::from_secs(1))?;
        wan.restore();
        commit_for(&mut checked, Duration::from_secs(1))?;
    }
    recover(&mut checked, "flapping")?;
    checked.finish().map(drop)
}

fn commit_for(checked: &mut Checked, time: Duration) -> Result<()> {
    let begin = Instant::now();
    while begin.elapsed() < time {
        checked.await_commits(5)?;
    }
    Ok(())
}

/// Cuts in the middle of a first copy between sites: what has been copied is not copied again.
#[test]
fn a_first_copy_goes_on_after_cuts() -> Result<()> {
    let Some(wan) = line_of(40_000_000, 0.0)? else { return Ok(()) };
    let mut pair = one_table(&wan)?;
    pair.publish(
        "INSERT INTO t SELECT i, (SELECT string_agg(md5(i::text || j), ' ') \
         FROM generate_series(1, 30) j) FROM generate_series(1, 40000) i",
    )?;
    pair.site.add("copy_range = \"1MB\"\n")?;
    let mut upstream = Upstream::split_across(&mut pair, Some(&wan))?;
    upstream.site.start()?;
    pair.site.start()?;
    let done = |pair: &Pair| -> Result<u64> {
        let status = pair.site.status()?;
        let copies = status["subscriptions"][0]["copies"].as_array().cloned().unwrap_or_default();
        let copy = copies.iter().find(|copy| copy["table"] == "public.t");
        Ok(copy.and_then(|copy| copy["ranges_done"].as_u64()).unwrap_or(0))
    };
    for cut in 0..2 {
        // Each attempt counts anew, what is left to do.
        wait_until("an attempt to begin", SOON, &[], || Ok((done(&pair)? < 8).then_some(())))?;
        wait_until("ranges to be copied", SOON, &[], || Ok((done(&pair)? >= 8).then_some(())))?;
        wan.cut();
        pair.site.await_trouble("s", "up")?;
        pair.publish(&format!("INSERT INTO t VALUES ({}, 'meanwhile')", 100_000 + cut))?;
        wan.restore();
    }
    pair.assert_equal(&["public"])?;
    // Once, and what was on its way at each cut; begun anew each time it would be half as much again.
    let crossed = wan.traffic().near_to_far.bytes;
    println!("{crossed} bytes crossed");
    ensure!(crossed < 28_000_000, "{crossed} bytes crossed");
    upstream.site.stop()?;
    pair.site.stop()?;
    Ok(())
}

/// What queues up before a narrow line crosses in packs, of transactions large and small.
#[test]
fn a_narrow_line_is_used_well() -> Result<()> {
    let Some(wan) = line_of(8_000_000, 0.0)? else { return Ok(()) };
    let mut pair = one_table(&wan)?;
    let mut upstream = Upstream::split_across(&mut pair, Some(&wan))?;
    upstream.site.start()?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    let begun = wan.traffic().near_to_far.bytes;
    let rows = "INSERT INTO t SELECT i, (SELECT string_agg(md5(i::text || j), ' ') \
                FROM generate_series(1, 30) j) FROM generate_series";
    pair.publish(&format!("{rows} (100001, 110000) i"))?;
    for from in (0..10_000).step_by(200) {
        pair.publish(&format!("{rows} ({from}, {}) i", from + 199))?;
    }
    pair.assert_equal(&["public"])?;
    let packed = upstream.site.status()?["downstreams"][0]["packed_bytes"].as_u64();
    let crossed = wan.traffic().near_to_far.bytes - begun;
    println!("{crossed} bytes crossed, of the log {packed:?} in packs");
    ensure!(packed.is_some_and(|bytes| bytes > 1 << 20), "{packed:?}");
    upstream.site.stop()?;
    pair.site.stop()?;
    Ok(())
}

#[test]
fn a_line_that_loses_and_changes_packets() -> Result<()> {
    let Some(wan) = line(0.01)? else { return Ok(()) };
    let mut checked = start(&wan)?;
    checked.await_commits(200)?;
    recover(&mut checked, "1 % loss")?;
    for flip in 0..6 {
        let flipped = wan.traffic();
        let (direction, before) = if flip % 2 == 0 {
            (Direction::NearToFar, flipped.near_to_far.flipped_bits)
        } else {
            (Direction::FarToNear, flipped.far_to_near.flipped_bits)
        };
        wan.flip_next_bit(direction);
        checked.await_commits(30)?;
        recover(&mut checked, "a flipped bit")?;
        let flipped = wan.traffic();
        let after = match direction {
            Direction::NearToFar => flipped.near_to_far.flipped_bits,
            Direction::FarToNear => flipped.far_to_near.flipped_bits,
        };
        ensure!(after > before, "no bit was flipped");
    }
    checked.finish().map(drop)
}

#[test]
fn a_receiver_whose_disk_is_full_waits_and_goes_on() -> Result<()> {
    let Some(wan) = line(0.0)? else { return Ok(()) };
    let mut checked = start(&wan)?;
    checked.pair.site.stop()?;
    let data = checked.pair.site.directory().join("data");
    let aside = checked.pair.site.directory().join("aside");
    std::fs::rename(&data, &aside)?;
    let Some(disk) = checked.pair.site.small_disk("data", 24)? else {
        std::fs::remove_dir(&data)?;
        std::fs::rename(&aside, &data)?;
        return Ok(());
    };
    let copied =
        std::process::Command::new("cp").arg("-a").arg(aside.join(".")).arg(&data).status()?;
    ensure!(copied.success(), "cp: {copied}");
    checked.pair.site.start()?;
    checked.await_commits(50)?;
    recover(&mut checked, "a move to a small disk")?;
    // Kept full: what is applied leaves the log, and a modest load lives in the room it leaves.
    let told = "Free space on that disk";
    checked.pair.site.await_trouble_while("up/p", told, || disk.fill())?;
    checked.await_commits(100)?;
    disk.free()?;
    recover(&mut checked, "a full disk at the receiver")?;
    checked.finish().map(drop)
}
