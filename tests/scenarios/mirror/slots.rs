//! What a slot in the spool keeps is seen, can be given up, and is bounded.

use crate::bounds::write_segments;
use crate::mirrored::{LONG, Mirrored, report};
use anyhow::{Context, Result, ensure};
use farshore_testkit::wait::wait_until;
use serde_json::Value;

/// Begins to seed a standby while the near end is away: the slot is there, and nothing else.
fn give_up_seeding(mirrored: &mut Mirrored) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let pgdata = folder.path().join("data").display().to_string();
    mirrored.near.stop()?;
    let failed = mirrored.far.verb("mirror seed", &["m", "--pgdata", &pgdata])?;
    ensure!(failed.code == Some(1), "{failed:?}");
    let way_out = "farshore mirror drop-slot SITE.toml m standby_m";
    ensure!(failed.stderr.contains(way_out), "{failed:?}");
    mirrored.near.start()?;
    mirrored.await_commits(1)
}

fn said(mirror: &Value, text: &str) -> bool {
    mirror["error"].as_str().is_some_and(|error| error.contains(text))
}

#[test]
fn a_seeding_that_was_given_up_keeps_no_log_unseen() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    let bounds = "spool_size = \"64MB\"\nwarn_behind = \"32MB\"\ndrop_behind = \"128MB\"\n";
    mirrored.far.replace("upstream = \"near\"\n", &format!("upstream = \"near\"\n{bounds}"))?;
    mirrored.far.restart()?;
    mirrored.await_commits(5)?;
    give_up_seeding(&mut mirrored)?;
    let seen = report(&mirrored.far, "the slot", |mirror| mirror["slots"][0].is_object())?;
    let slot = &seen["slots"][0];
    ensure!(slot["name"] == "standby_m" && slot["in_use"] == false, "{slot}");
    ensure!(slot["lost"] == false && slot["restart"].is_string(), "{slot}");
    write_segments(&mirrored.principal, 5)?;
    let warned =
        report(&mirrored.far, "the warning", |mirror| said(mirror, "nobody streams by it"))?;
    ensure!(warned["kept_bytes"].as_u64().is_some_and(|kept| kept > 32 << 20), "{warned}");
    let status = mirrored.far.verb("status", &[])?;
    ensure!(status.code == Some(1), "{status:?}");
    ensure!(status.stdout.contains("slot       standby_m  keeps "), "{status:?}");
    // It is given up.
    let unknown = mirrored.far.verb("mirror drop-slot", &["m", "other"])?;
    ensure!(unknown.code == Some(1) && unknown.stderr.contains("no slot \"other\""), "{unknown:?}");
    let dropped = mirrored.far.verb("mirror drop-slot", &["m", "standby_m"])?;
    ensure!(dropped.code == Some(0), "{dropped:?}");
    let after = report(&mirrored.far, "no slot", |mirror| {
        mirror["slots"].as_array().is_some_and(Vec::is_empty)
    })?;
    ensure!(after["error"].is_null(), "{after}");
    // Nobody gives up the next one, and the spool is bounded all the same.
    give_up_seeding(&mut mirrored)?;
    // The standby has no slot: it must not be a whole spool behind when its segments go.
    for _ in 0..6 {
        write_segments(&mirrored.principal, 2)?;
        // Behind those segments.
        mirrored.await_commits(1)?;
        mirrored.check_standby(&mirrored.returned())?;
    }
    let lost = report(&mirrored.far, "the slot to be lost", |mirror| said(mirror, "drop_behind"))?;
    ensure!(lost["slots"][0]["lost"] == true && lost["kept_bytes"] == 0, "{lost}");
    mirrored.far.kill9()?;
    mirrored.far.start()?;
    report(&mirrored.far, "the slot to be lost still", |mirror| said(mirror, "drop_behind"))?;
    const SPOOL_BYTES: u64 = 64 << 20;
    wait_until("the spool to shrink", LONG, &[], || {
        let status = mirrored.far.status()?;
        let bytes = status["mirrors"][0]["spool_bytes"].as_u64().context("no size")?;
        Ok((bytes <= SPOOL_BYTES).then_some(()))
    })?;
    // The standby that streams has what it needs.
    mirrored.await_commits(5)?;
    let returned = mirrored.returned();
    mirrored.check_standby(&returned)?;
    mirrored.finish()
}
