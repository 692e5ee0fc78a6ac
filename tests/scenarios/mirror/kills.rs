//! Kills, power cuts and a full disk: nothing that was acknowledged is lost.

use crate::mirrored::{LONG, Mirrored, report};
use crate::promotion::{check_fork, check_rows, promote};
use anyhow::{Context, Result, bail, ensure};
use farshore_testkit::thread::join_within;
use farshore_tests::Site;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

fn crash_points(major: u32) -> Result<()> {
    let mut mirrored = Mirrored::start(major, None)?;
    mirrored.await_commits(20)?;
    for crash in [
        "spool.before-write:40",
        "spool.before-write:41:cut",
        "spool.before-fsync:40:cut",
        "spool.after-fsync:40:cut",
        "mirror.before-reply:30:cut",
        "mirror.after-reply:30:cut",
        "mirror.before-serve:20:cut",
    ] {
        mirrored.lose_all_but_the_far_end(crash)?;
    }
    // The near end, at its own points: it keeps nothing, so there is nothing to look for.
    for crash in [
        "mirror.before-send:30",
        "mirror.after-send:30",
        "mirror.before-acknowledge:20",
        "mirror.after-acknowledge:20",
    ] {
        mirrored.near.stop()?;
        mirrored.near.env("FARSHORE_CRASH", crash);
        mirrored.near.start()?;
        mirrored.near.await_kill(crash, LONG)?;
        mirrored.near.env("FARSHORE_CRASH", "");
        mirrored.near.start()?;
        mirrored.await_commits(5).with_context(|| format!("after {crash}"))?;
    }
    let mirror = report(&mirrored.near, "the near end", |mirror| mirror["ratio"].is_number())?;
    println!("near: {mirror}");
    let mirror = report(&mirrored.far, "the far end", |mirror| mirror["harden_ms"].is_number())?;
    println!("far: {mirror}");
    mirrored.finish()
}

#[test]
fn no_acknowledged_commit_is_lost_at_any_crash_point_with_15() -> Result<()> {
    crash_points(15)
}

#[test]
fn no_acknowledged_commit_is_lost_at_any_crash_point_with_18() -> Result<()> {
    crash_points(18)
}

/// - `FARSHORE_MIRROR_KILLS`: how many (default 12).
#[test]
fn no_acknowledged_commit_is_lost_under_random_kills() -> Result<()> {
    let kills = match std::env::var("FARSHORE_MIRROR_KILLS") {
        Ok(text) => text.parse().with_context(|| format!("FARSHORE_MIRROR_KILLS={text}"))?,
        Err(_) => 12,
    };
    let seed = farshore_testkit::seed();
    println!("FARSHORE_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut mirrored = Mirrored::start(15, None)?;
    for kill in 0..kills {
        mirrored.await_commits(random.random_range(1..40))?;
        let victim = random.random_range(0..4);
        let context = || format!("kill {kill} of {victim} with FARSHORE_SEED={seed}");
        match victim {
            0 => {
                mirrored.near.kill9()?;
                mirrored.near.start()?;
            }
            1 => {
                mirrored.far.kill9()?;
                mirrored.far.start()?;
            }
            2 => {
                mirrored.standby.kill9()?;
                mirrored.standby.start()?;
            }
            _ => {
                // Both: what returned is at the far site alone.
                mirrored.far.kill9()?;
                mirrored.near.kill9()?;
                mirrored.await_silence()?;
                let (returned, told) = (mirrored.returned(), mirrored.told()?);
                mirrored.far.start()?;
                mirrored.check_spool(told).with_context(context)?;
                mirrored.check_standby(&returned).with_context(context)?;
                mirrored.near.start()?;
            }
        }
        mirrored.await_commits(3).with_context(context)?;
    }
    mirrored.await_commits(1)?;
    let returned = mirrored.returned();
    mirrored.check_standby(&returned)?;
    mirrored.finish()
}

/// The far end's disk is full: commits wait, nothing is lost, and it goes on once there is room.
#[test]
fn a_full_disk_holds_commits_up_and_loses_none() -> Result<()> {
    let mut far = Site::named("far")?;
    let Some(disk) = far.small_disk("data", 256)? else { return Ok(()) };
    let mirrored = Mirrored::start_in(15, "far", None, far)?;
    mirrored.await_commits(20)?;
    disk.fill()?;
    // More than what is there of segments can take.
    let mut bulk = mirrored.principal.connect()?;
    let loading = std::thread::spawn(move || {
        bulk.batch_execute(
            "CREATE TABLE bulk AS SELECT g, repeat(md5(g::text), 10) AS v \
             FROM generate_series(1, 200000) g",
        )
    });
    let full =
        report(&mirrored.far, "the disk to be full", |mirror| mirror["state"] == "out of room")?;
    let said = full["error"].as_str().unwrap_or_default();
    ensure!(said.contains("cannot write") && said.contains("No space left"), "{said}");
    mirrored.await_silence()?;
    let returned = mirrored.returned();
    mirrored.check_standby(&returned)?;
    disk.free()?;
    mirrored.await_commits(10)?;
    join_within(loading, "the load", LONG)??;
    report(&mirrored.far, "all to be well", |mirror| mirror["state"] == "receiving")?;
    mirrored.check_standby(&mirrored.returned())?;
    mirrored.finish()
}

/// Without a byte of room slots still move on, and a standby still takes over: there is room
/// in reserve for the note that the spool is closed.
#[test]
fn a_standby_takes_over_where_the_disk_is_full() -> Result<()> {
    let mut far = Site::named("far")?;
    let Some(disk) = far.small_disk("data", 256)? else { return Ok(()) };
    let mut mirrored = Mirrored::start_in(15, "far", None, far)?;
    mirrored.await_commits(20)?;
    disk.fill()?;
    // The standby's slot is at another segment, and cannot be saved there.
    mirrored.principal.execute_script("SELECT pg_switch_wal()")?;
    mirrored.await_commits(20)?;
    let told = mirrored.told()?;
    let returned = mirrored.lose_the_principal()?;
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}{}", mirrored.far.log_tail());
    check_rows(&mirrored.standby, &returned)?;
    check_fork(&mirrored.standby, told)?;
    let standby = std::fs::read_to_string(mirrored.standby.log_path())?;
    ensure!(!standby.contains("closed the connection"), "the standby was sent away: {standby}");
    Ok(())
}

/// Who removes a spool that is in use is told so, and no commit is acknowledged into nothing.
#[test]
fn a_spool_that_is_removed_while_it_is_used_stops() -> Result<()> {
    let mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(10)?;
    std::fs::remove_dir_all(mirrored.far.directory().join("data/mirrors/m"))?;
    let stopped =
        report(&mirrored.far, "the mirror to stop", |mirror| mirror["state"] == "stopped")?;
    let said = stopped["error"].as_str().unwrap_or_default();
    ensure!(said.contains("was removed while the spool was in use"), "{said}");
    mirrored.await_silence()?;
    mirrored.check_standby(&mirrored.returned())
}

/// However the log is packed, it arrives; and what `status` says of it is so.
#[test]
fn every_compression_carries_the_log() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(5)?;
    let mut before = "mode = \"far\"\n".to_owned();
    for (typed, shown) in
        [("off", "off"), ("lz4", "lz4"), ("auto", "auto: zstd 1"), ("zstd", "zstd 1")]
    {
        let line = format!("mode = \"far\"\ncompression = \"{typed}\"\n");
        mirrored.near.replace(&before, &line)?;
        before = line;
        mirrored.near.restart()?;
        mirrored.await_commits(20)?;
        let near = report(&mirrored.near, "the near end", |mirror| {
            mirror["state"] == "streaming" && mirror["ratio"].is_number()
        })?;
        ensure!(near["compression"] == shown, "{near}");
        let ratio = near["ratio"].as_f64().unwrap_or_default();
        ensure!((ratio > 1.2) != (typed == "off"), "{near}");
        mirrored.check_standby(&mirrored.returned())?;
        println!("{typed}: {ratio}");
    }
    let far = report(&mirrored.far, "the standby to replay", |mirror| {
        mirror["apply_bytes_per_s"].as_u64().is_some_and(|rate| rate > 0)
    })?;
    ensure!(far["redo_queue_bytes"].is_u64(), "{far}");
    mirrored.finish()
}

/// A false promise must be seen through.
fn caught(defect: &str, points: &[&str]) -> Result<()> {
    let mut mirrored = Mirrored::start(15, Some(defect))?;
    for round in 0..8 {
        for point in points {
            let crash = format!("{point}:{}:cut", 30 + 7 * round);
            match mirrored.lose_all_but_the_far_end(&crash) {
                Ok(()) => {}
                Err(error) => {
                    let text = format!("{error:#}");
                    ensure!(text.contains("LOST: "), "{text}");
                    println!("{defect} caught: {text}");
                    return Ok(());
                }
            }
        }
    }
    bail!("{defect} was not caught")
}

#[test]
fn acknowledging_before_fsync_is_caught() -> Result<()> {
    caught("spool-durable-before-fsync", &["spool.before-write"])
}

#[test]
fn acknowledging_at_the_near_end_while_claiming_far_is_caught() -> Result<()> {
    caught("mirror-near-claims-far", &["spool.before-write", "mirror.before-reply"])
}

#[test]
fn a_reply_computed_from_received_bytes_is_caught() -> Result<()> {
    caught(
        "mirror-reply-from-received",
        &["spool.before-fsync", "mirror.after-reply", "mirror.before-reply"],
    )
}
