//! The far end is killed at every step of a promotion, and asked again: it ends promoted, with
//! everything that was acknowledged, and never are two servers promoted.

use crate::mirrored::{LONG, Mirrored, report};
use crate::promotion::{check_fork, check_rows, is_in_recovery, promote};
use anyhow::{Context, Result, ensure};
use farshore_testkit::postgres::Cluster;
use farshore_testkit::wait::wait_until;
use farshore_tests::Site;

/// Before the spool is closed: the mirror goes on as if nobody had asked.
const BEFORE: [&str; 4] = [
    "promote.before-drain",
    "promote.after-drain",
    "spool.before-close",
    "spool.before-close:1:cut",
];

/// From then on one server, and no other, may be promoted; each of these is passed by a run that
/// goes on where the one before was killed.
const AFTER: [&str; 5] = [
    "spool.after-close:1:cut",
    "promote.before-told",
    "promote.after-told",
    "promote.before-fork",
    "promote.after-fork",
];

/// Promotes, and is killed there.
fn kill_at(mirrored: &mut Mirrored, point: &str) -> Result<()> {
    mirrored.far.kill9()?;
    mirrored.far.env("FARSHORE_CRASH", point);
    mirrored.far.start()?;
    report(&mirrored.far, "the spool to be open", |mirror| mirror["durable"] != "")?;
    let broken_off = promote(mirrored, &mirrored.standby, &[])?;
    ensure!(broken_off.code == Some(1), "{point}: {broken_off:?}");
    mirrored.far.await_kill(point, LONG)?;
    mirrored.far.env("FARSHORE_CRASH", "");
    mirrored.far.start()
}

/// However far the first one is, the second one is left alone.
fn check_no_second(mirrored: &Mirrored, second: &Cluster) -> Result<()> {
    let refused = promote(mirrored, second, &["--wait", "1"])?;
    ensure!(refused.code == Some(1), "{refused:?}");
    ensure!(refused.stderr.contains("was to be promoted from this mirror before"), "{refused:?}");
    ensure!(is_in_recovery(second)?, "two are promoted");
    Ok(())
}

#[test]
fn a_promotion_that_is_killed_at_any_step_is_finished_by_the_next() -> Result<()> {
    let mut mirrored = Mirrored::start_idle(15, "far", None, Site::named("far")?)?;
    let second = mirrored.another_standby("s2")?;
    mirrored.start_clients()?;
    for point in BEFORE {
        mirrored.await_commits(5)?;
        kill_at(&mut mirrored, point)?;
        ensure!(is_in_recovery(&mirrored.standby)?, "{point}: it was promoted");
        mirrored.await_commits(5).with_context(|| format!("after {point}"))?;
        mirrored.check_standby(&mirrored.returned())?;
    }
    // The standby lacks what returned last.
    mirrored.line.stall();
    mirrored.await_commits(10)?;
    let told = mirrored.told()?;
    let returned = mirrored.lose_the_principal()?;
    mirrored.near.kill9()?;
    mirrored.line.cut();
    mirrored.line.mend();
    for (number, point) in AFTER.iter().enumerate() {
        kill_at(&mut mirrored, point)?;
        let state = report(&mirrored.far, "the spool to be closed", |m| m["state"] == "promoted");
        state.with_context(|| format!("after {point}"))?;
        check_no_second(&mirrored, &second).with_context(|| format!("after {point}"))?;
        ensure!(is_in_recovery(&mirrored.standby)? == (number < 2), "{point}");
    }
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    ensure!(promoted.stdout.contains("had been promoted already"), "{promoted:?}");
    println!("{}", promoted.stdout.trim());
    check_rows(&mirrored.standby, &returned)?;
    check_fork(&mirrored.standby, told)?;
    check_no_second(&mirrored, &second)?;
    mirrored.standby.execute_script("INSERT INTO t VALUES (100, 1)")
}

/// The server was promoted and goes down before anybody heard of it.
#[test]
fn a_server_that_dies_after_it_was_promoted_is_still_the_one() -> Result<()> {
    let mut mirrored = Mirrored::start_idle(15, "far", None, Site::named("far")?)?;
    let second = mirrored.another_standby("s2")?;
    mirrored.start_clients()?;
    mirrored.await_commits(10)?;
    let told = mirrored.told()?;
    let returned = mirrored.lose_the_principal()?;
    kill_at(&mut mirrored, "promote.before-told")?;
    mirrored.standby.execute_script("SELECT pg_promote()")?;
    mirrored.standby.kill9()?;
    report(&mirrored.far, "the spool to be closed", |mirror| mirror["state"] == "promoted")?;
    let refused = promote(&mirrored, &mirrored.standby, &["--wait", "1"])?;
    ensure!(refused.code == Some(1) && refused.stderr.contains("the standby: "), "{refused:?}");
    check_no_second(&mirrored, &second)?;
    mirrored.standby.start()?;
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    check_rows(&mirrored.standby, &returned)?;
    check_fork(&mirrored.standby, told)?;
    wait_until("one to be promoted", LONG, &[], || {
        Ok((!is_in_recovery(&mirrored.standby)?).then_some(()))
    })?;
    check_no_second(&mirrored, &second)
}

/// The machine of the server that was chosen is lost before it was promoted: another one takes its
/// place, with all that the spool holds, and only where it is said whose.
#[test]
fn another_server_takes_the_place_of_one_that_is_lost() -> Result<()> {
    let mut mirrored = Mirrored::start_idle(15, "far", None, Site::named("far")?)?;
    let mut second = mirrored.another_standby("s2")?;
    mirrored.start_clients()?;
    mirrored.await_commits(10)?;
    let none = promote(&mirrored, &second, &["--instead-of", "postgres://lost"])?;
    ensure!(none.code == Some(1) && none.stderr.contains("there is none instead"), "{none:?}");
    mirrored.await_commits(10)?;
    // It lacks what comes from now on, and has to get that from the spool.
    second.kill9()?;
    mirrored.await_commits(10)?;
    let told = mirrored.told()?;
    let returned = mirrored.lose_the_principal()?;
    kill_at(&mut mirrored, "promote.before-told")?;
    mirrored.standby.kill9()?;
    let state = |mirror: &serde_json::Value| mirror["state"] == "promoted";
    report(&mirrored.far, "the spool to be closed", state)?;
    mirrored.line.stall();
    second.start()?;
    check_no_second(&mirrored, &second)?;
    let chosen = mirrored.standby.url("postgres");
    for more in [&["--allow-data-loss"][..], &["--instead-of", "postgres://other"]] {
        let refused = promote(&mirrored, &second, more)?;
        ensure!(refused.code == Some(1), "{refused:?}");
        ensure!(refused.stderr.contains("--instead-of 'postgres://"), "{refused:?}");
        ensure!(is_in_recovery(&second)?, "two may be promoted");
    }
    // All is checked as ever.
    let lacks = promote(&mirrored, &second, &["--instead-of", &chosen, "--wait", "1"])?;
    ensure!(lacks.code == Some(1), "{lacks:?}");
    ensure!(lacks.stderr.contains("bytes of log that the spool holds"), "{lacks:?}");
    ensure!(is_in_recovery(&second)?, "promoted although it lacks log");
    mirrored.line.cut();
    mirrored.line.mend();
    mirrored.far.kill9()?;
    mirrored.far.env("FARSHORE_CRASH", "promote.before-told");
    mirrored.far.start()?;
    report(&mirrored.far, "the spool to be closed", state)?;
    let broken_off = promote(&mirrored, &second, &["--instead-of", &chosen])?;
    ensure!(broken_off.code == Some(1), "{broken_off:?}");
    mirrored.far.await_kill("promote.before-told", LONG)?;
    mirrored.far.env("FARSHORE_CRASH", "");
    mirrored.far.start()?;
    report(&mirrored.far, "the spool to be closed", state)?;
    // It is the one that was chosen now, also after a crash, and the first one no more.
    mirrored.standby.start()?;
    check_no_second(&mirrored, &mirrored.standby)?;
    let promoted = promote(&mirrored, &second, &["--instead-of", &chosen])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    ensure!(
        promoted.stdout.contains("nothing that this mirror acknowledged is lost"),
        "{promoted:?}"
    );
    println!("{}", promoted.stdout.trim());
    check_rows(&second, &returned)?;
    check_fork(&second, told)?;
    // What has taken over may have commits of its own.
    let now = second.url("postgres");
    let refused = promote(&mirrored, &mirrored.standby, &["--instead-of", &now])?;
    ensure!(refused.code == Some(1) && refused.stderr.contains("has taken over"), "{refused:?}");
    ensure!(is_in_recovery(&mirrored.standby)?, "two are promoted");
    Ok(())
}
