//! A far site that stays away does not fill the principal's disk, if that is not wanted; and `check`
//! says so beforehand.

use crate::mirrored::{LONG, Mirrored, SLOT, report};
use anyhow::{Result, ensure};
use farshore_testkit::wait::wait_until;

fn slots(mirrored: &Mirrored) -> Result<i64> {
    let sql = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1";
    Ok(mirrored.principal.connect()?.query_one(sql, &[&SLOT])?.get(0))
}

/// So many segments of log.
fn write_segments(mirrored: &Mirrored, segments: usize) -> Result<()> {
    let mut client = mirrored.principal.connect()?;
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
    mirrored.await_commits(5)?;
    mirrored.far.stop()?;
    mirrored.await_silence()?;
    write_segments(&mirrored, 6)?;
    let warned = report(&mirrored.near, "the warning", |mirror| {
        mirror["error"].as_str().is_some_and(|error| error.contains("more than warn_behind"))
    })?;
    ensure!(warned["kept_bytes"].as_u64().is_some_and(|kept| kept > 64 << 20), "{warned}");
    ensure!(slots(&mirrored)? == 1, "dropped too early");
    write_segments(&mirrored, 14)?;
    let dropped = report(&mirrored.near, "the mirror to be dropped", |mirror| {
        mirror["error"].as_str().is_some_and(|error| error.contains("was dropped"))
    })?;
    println!("{}", dropped["error"]);
    wait_until("the slot to go", LONG, &[], || Ok((slots(&mirrored)? == 0).then_some(())))?;
    // The principal of this test keeps log beyond what slots need, so nothing is gone yet.
    mirrored.far.start()?;
    mirrored.await_commits(5)?;
    let returned = mirrored.returned();
    mirrored.check_standby(&returned)?;
    mirrored.finish()
}
