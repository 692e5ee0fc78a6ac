//! Mirrors that no commit waits for: log gathers on its way and positions are told rarely. The
//! principal is told nothing that is not durable, and nothing is missing once they have caught up.

use crate::direct::Direct;
use crate::mirrored::{LONG, Mirrored, await_replayed, check_durable, told};
use crate::promotion::check_rows;
use anyhow::{Context, Result, bail, ensure};
use farshore_testkit::postgres::Cluster;
use farshore_tests::Site;

/// Of the end that keeps the log.
const KEEPING: [&str; 7] = [
    "spool.before-write:20",
    "spool.before-write:21:cut",
    "spool.before-fsync:5:cut",
    "spool.after-fsync:5:cut",
    "mirror.before-reply:4:cut",
    "mirror.after-reply:4:cut",
    "mirror.before-serve:20:cut",
];
/// Of the end that streams from the principal, and tells it how far the log is once a second.
const STREAMING: [&str; 4] = [
    "mirror.before-send:20",
    "mirror.after-send:20",
    "mirror.before-acknowledge:3",
    "mirror.after-acknowledge:3",
];

/// Ends this site at a crash point.
fn end_at(site: &mut Site, crash: &str) -> Result<()> {
    site.stop()?;
    site.env("FARSHORE_CRASH", crash);
    site.start()?;
    site.await_kill(crash, LONG)?;
    site.env("FARSHORE_CRASH", "");
    Ok(())
}

/// All that has returned by now gets to the standby.
fn arrives(principal: &Cluster, standby: &Cluster, returned: &[i32]) -> Result<()> {
    let flushed: String =
        principal.connect()?.query_one("SELECT pg_current_wal_flush_lsn()::text", &[])?.get(0);
    await_replayed(standby, &flushed)?;
    check_rows(standby, returned)
}

/// The far end is ended at a crash point, and the near one with it.
fn lose_both_ends(mirrored: &mut Mirrored, crash: &str) -> Result<()> {
    end_at(&mut mirrored.far, crash)?;
    mirrored.near.kill9()?;
    let told = told(&mirrored.principal)?;
    mirrored.far.start()?;
    check_durable(&mirrored.far, told)?;
    mirrored.near.start()?;
    arrives(&mirrored.principal, &mirrored.standby, &mirrored.returned())
}

#[test]
fn a_mirror_that_no_commit_waits_for_tells_only_what_is_durable() -> Result<()> {
    let mut mirrored = Mirrored::start_in(15, "async", None, Site::named("far")?)?;
    mirrored.await_commits(20)?;
    for crash in KEEPING {
        lose_both_ends(&mut mirrored, crash).with_context(|| format!("after {crash}"))?;
    }
    for crash in STREAMING {
        end_at(&mut mirrored.near, crash)?;
        mirrored.near.start()?;
        arrives(&mirrored.principal, &mirrored.standby, &mirrored.returned())
            .with_context(|| format!("after {crash}"))?;
    }
    mirrored.finish()
}

#[test]
fn a_direct_mirror_that_no_commit_waits_for_tells_only_what_is_durable() -> Result<()> {
    let mut direct = Direct::start(15, "async")?;
    direct.await_commits(20)?;
    // One process is both ends, and a power cut takes from it what the spool had not made durable.
    let streaming = STREAMING.iter().map(|point| format!("{point}:cut"));
    for crash in KEEPING.iter().map(|&point| point.to_owned()).chain(streaming) {
        // A direct mirror sends itself nothing.
        if crash.starts_with("mirror.after-send") {
            continue;
        }
        end_at(&mut direct.site, &crash)?;
        let told = told(&direct.principal)?;
        direct.site.start()?;
        check_durable(&direct.site, told).with_context(|| format!("after {crash}"))?;
        arrives(&direct.principal, &direct.standby, &direct.returned())
            .with_context(|| format!("after {crash}"))?;
    }
    direct.finish()
}

/// A false promise must be seen through: here it makes the principal discard log.
#[test]
fn acknowledging_at_the_near_end_where_no_commit_waits_is_caught() -> Result<()> {
    let defect = Some("mirror-near-claims-far");
    let mut mirrored = Mirrored::start_in(15, "async", defect, Site::named("far")?)?;
    for round in 0..8 {
        let crash = format!("spool.before-write:{}:cut", 20 + 7 * round);
        if let Err(error) = lose_both_ends(&mut mirrored, &crash) {
            let text = format!("{error:#}");
            ensure!(text.contains("LOST: "), "{text}");
            println!("caught: {text}");
            return Ok(());
        }
    }
    bail!("it was not caught")
}
