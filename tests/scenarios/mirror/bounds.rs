//! A far site that stays away does not fill the principal's disk, if that is not wanted; and `check`
//! says so beforehand.

use crate::mirrored::{LONG, Mirrored, SLOT, report};
use anyhow::{Result, ensure};
use farshore_testkit::postgres::{Cluster, StopMode};
use farshore_testkit::wait::wait_until;
use farshore_tests::Site;
use serde_json::Value;

fn slots(mirrored: &Mirrored) -> Result<i64> {
    let sql = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1";
    Ok(mirrored.principal.connect()?.query_one(sql, &[&SLOT])?.get(0))
}

/// So many segments of log.
pub fn write_segments(principal: &Cluster, segments: usize) -> Result<()> {
    let mut client = principal.connect()?;
    client.batch_execute("SET synchronous_commit = local")?;
    for _ in 0..segments {
        client.batch_execute("SELECT pg_logical_emit_message(false, 'x', 'y'), pg_switch_wal()")?;
    }
    Ok(())
}

#[test]
fn a_mirror_that_is_too_far_behind_is_dropped_loudly() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(5)?;
    let checked = mirrored.near.verb("check", &[])?;
    ensure!(checked.code == Some(0), "{checked:?}");
    ensure!(checked.stdout.contains("without bound"), "{checked:?}");
    ensure!(checked.stdout.contains("can be streamed from"), "{checked:?}");
    let bounds = "mode = \"far\"\nwarn_behind = \"64MB\"\ndrop_behind = \"256MB\"\n";
    mirrored.near.replace("mode = \"far\"\n", bounds)?;
    mirrored.near.restart()?;
    let checked = mirrored.near.verb("check", &[])?;
    ensure!(!checked.stdout.contains("without bound"), "{checked:?}");
    ensure!(checked.stdout.contains("only while this node runs"), "{checked:?}");
    mirrored.await_commits(5)?;
    // It is there, and takes nothing in.
    mirrored.far.signal(libc::SIGSTOP)?;
    mirrored.await_silence()?;
    write_segments(&mirrored.principal, 6)?;
    let warned = report(&mirrored.near, "the warning", |mirror| {
        mirror["error"].as_str().is_some_and(|error| error.contains("more than warn_behind"))
    })?;
    ensure!(warned["kept_bytes"].as_u64().is_some_and(|kept| kept > 64 << 20), "{warned}");
    ensure!(slots(&mirrored)? == 1, "dropped too early");
    write_segments(&mirrored.principal, 14)?;
    let dropped = report(&mirrored.near, "the mirror to be dropped", is_dropped)?;
    println!("{}", dropped["error"]);
    wait_until("the slot to go", LONG, &[], || Ok((slots(&mirrored)? == 0).then_some(())))?;
    let status = mirrored.near.verb("status", &[])?;
    ensure!(status.code == Some(1) && status.stdout.contains("critical   dropped"), "{status:?}");
    // Whoever comes back, and whichever node starts again: it stays dropped.
    mirrored.far.signal(libc::SIGCONT)?;
    report(&mirrored.far, "the far end to be refused", is_refused)?;
    mirrored.near.kill9()?;
    mirrored.near.start()?;
    mirrored.far.restart()?;
    report(&mirrored.far, "the far end to be refused again", is_refused)?;
    report(&mirrored.near, "the mirror to be dropped still", is_dropped)?;
    ensure!(slots(&mirrored)? == 0, "the slot was made again");
    let refused = mirrored.far.verb("mirror resume", &["m"])?;
    ensure!(refused.code == Some(1), "{refused:?}");
    ensure!(refused.stderr.contains("at the site of its near end"), "{refused:?}");
    let resumed = mirrored.near.verb("mirror resume", &["m"])?;
    ensure!(resumed.code == Some(0) && resumed.stdout.contains("goes on"), "{resumed:?}");
    // The principal of this test keeps log beyond what slots need, so nothing is gone yet.
    mirrored.await_commits(5)?;
    let again = mirrored.near.verb("mirror resume", &["m"])?;
    ensure!(again.stdout.contains("was not dropped"), "{again:?}");
    // Without nodes.
    mirrored.far.stop()?;
    let refused = mirrored.far.verb("mirror resume", &["m"])?;
    ensure!(refused.code == Some(1), "{refused:?}");
    ensure!(refused.stderr.contains("mirror resume at its near end"), "{refused:?}");
    let unknown = mirrored.far.verb("mirror resume", &["x"])?;
    ensure!(unknown.stderr.contains("has no mirror \"x\""), "{unknown:?}");
    mirrored.far.start()?;
    mirrored.near.stop()?;
    let again = mirrored.near.verb("mirror resume", &["m"])?;
    ensure!(again.code == Some(0), "{again:?}");
    ensure!(again.stdout.contains("Commits that are held are let go while the node"), "{again:?}");
    mirrored.near.start()?;
    mirrored.await_commits(5)?;
    let returned = mirrored.returned();
    mirrored.check_standby(&returned)?;
    mirrored.finish()
}

fn is_dropped(mirror: &Value) -> bool {
    mirror["state"] == "dropped"
        && mirror["error"].as_str().is_some_and(|error| error.contains("more than drop_behind"))
}

fn is_refused(mirror: &Value) -> bool {
    mirror["state"] == "retrying"
        && mirror["error"].as_str().is_some_and(|error| error.contains("farshore mirror resume"))
}

/// Where commits wait for a standby to replay them and there is none, `status` says whom to start.
#[test]
fn commits_that_wait_for_a_standby_that_is_gone_are_told_of() -> Result<()> {
    let mut mirrored = Mirrored::start_in(15, "far-applied", None, Site::named("far")?)?;
    mirrored.await_commits(5)?;
    mirrored.standby.stop(StopMode::Fast)?;
    mirrored.await_silence()?;
    report(&mirrored.far, "the far end to say so", |far| {
        far["error"].as_str().is_some_and(|error| error.contains("no standby streams"))
    })?;
    let said = mirrored.far.verb("status", &[])?;
    ensure!(said.code == Some(1) && said.stdout.contains("no standby streams"), "{said:?}");
    mirrored.standby.start()?;
    mirrored.await_commits(5)?;
    report(&mirrored.far, "all to be well", |far| far["error"].is_null())?;
    mirrored.finish()
}
