//! What happens to a mirror in the course of its life: what is said, what goes on, and that nothing
//! that was acknowledged is lost.

use crate::bounds::write_segments;
use crate::mirrored::{LONG, Mirrored, SLOT, client, follower, position, report};
use crate::promotion::{check_fork, check_rows, check_rows_of, is_in_recovery, promote};
use anyhow::{Context, Result, ensure};
use farshore_testkit::postgres::{Cluster, Installation, StopMode};
use farshore_testkit::serializability::{self, Clients, TABLE};
use farshore_testkit::wait::wait_until;
use farshore_tests::Site;
use serde_json::Value;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

const SEGMENT_BYTES: i64 = 16 << 20;

/// The mirror at this site, once its error says so.
fn said(site: &Site, text: &str) -> Result<Value> {
    report(site, text, |mirror| mirror["error"].as_str().is_some_and(|error| error.contains(text)))
}

fn rows(server: &Cluster) -> Result<i64> {
    Ok(server.connect()?.query_one("SELECT count(*) FROM t", &[])?.get(0))
}

/// Down for a while: the standby is readable, both ends wait, and all go on by themselves.
#[test]
fn a_principal_that_is_restarted_is_followed_again() -> Result<()> {
    let mut mirrored = Mirrored::start_idle(15, "far", None, Site::named("far")?)?;
    mirrored.principal.execute_script(TABLE)?;
    let clients = Clients::start(&mirrored.principal.url("postgres"), 4, 1);
    let await_more = |more: u64| {
        let before = clients.returned()?;
        wait_until("transactions to return", LONG, &[], || {
            let now = clients.returned()?;
            Ok(now.iter().zip(&before).all(|(now, before)| now - before >= more).then_some(()))
        })
    };
    for mode in [Some(StopMode::Fast), Some(StopMode::Immediate), None] {
        await_more(5)?;
        match mode {
            Some(mode) => mirrored.principal.stop(mode)?,
            None => mirrored.principal.kill9()?,
        }
        let far = report(&mirrored.far, "the far end to tell", |m| m["state"] == "retrying")?;
        let error = far["error"].as_str().unwrap_or_default();
        ensure!(error.contains("principal"), "{far}");
        println!("{mode:?}: {error}");
        let near = report(&mirrored.near, "the near end to tell", |m| m["state"] == "waiting")?;
        ensure!(near["error"].as_str().is_some_and(|e| e.contains("the principal")), "{near}");
        let lists: i64 =
            mirrored.standby.connect()?.query_one("SELECT count(*) FROM lists", &[])?.get(0);
        ensure!(lists > 0, "nothing can be read");
        mirrored.principal.start()?;
        await_more(5)?;
        let far = report(&mirrored.far, "all to be well", |m| m["state"] == "receiving")?;
        ensure!(far["error"].is_null(), "{far}");
    }
    let summary = serializability::check(&clients.finish()?)?;
    println!("{summary}");
    Ok(())
}

/// It asks for its segment from the beginning again, and gets on from where it was.
#[test]
fn a_standby_that_is_restarted_within_a_segment_catches_up() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    for is_killed in [false, true] {
        mirrored.await_commits(10)?;
        if is_killed {
            mirrored.standby.kill9()?;
        } else {
            mirrored.standby.stop(StopMode::Fast)?;
        }
        report(&mirrored.far, "the standby to be gone", |mirror| {
            mirror["standbys"].as_array().is_some_and(Vec::is_empty)
        })?;
        let far = report(&mirrored.far, "the far end", |mirror| mirror["durable"] != "")?;
        let at = position(far["durable"].as_str().unwrap_or_default())?;
        ensure!(at % SEGMENT_BYTES != 0, "{far}: not within a segment");
        // In this mode nobody waits for it.
        mirrored.await_commits(10)?;
        mirrored.standby.start()?;
        mirrored.check_standby(&mirrored.returned())?;
    }
    mirrored.finish()
}

/// What the principal of the mirror is now.
fn point_to(mirrored: &mut Mirrored, principal: &Cluster) -> Result<()> {
    let old = mirrored.principal.url("postgres");
    mirrored.near.replace(&old, &principal.url("postgres"))?;
    mirrored.near.restart()
}

/// A virtual address that leads to another server for a moment: the far end is refused, and asks again
/// when it is told to, and by itself.
#[test]
fn a_far_end_that_was_refused_asks_again() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    // Of one version all have one system identifier here.
    let other =
        Cluster::builder(&Installation::find(18)?).setting("wal_level", "replica").start()?;
    let (right, wrong) = (mirrored.principal.url("postgres"), other.url("postgres"));
    for is_told in [true, false] {
        mirrored.await_commits(5)?;
        mirrored.near.replace(&right, &wrong)?;
        mirrored.near.restart()?;
        let far = said(&mirrored.far, "it is another cluster")?;
        ensure!(far["state"] == "stopped", "{far}");
        mirrored.near.replace(&wrong, &right)?;
        mirrored.near.restart()?;
        if is_told {
            let resumed = mirrored.far.verb("mirror resume", &["m"])?;
            ensure!(resumed.code == Some(0), "{resumed:?}");
            ensure!(resumed.stdout.contains("asks for log again"), "{resumed:?}");
        }
        mirrored.await_commits(5)?;
        let far = report(&mirrored.far, "all to be well", |m| m["state"] == "receiving")?;
        ensure!(far["error"].is_null(), "{far}");
    }
    let returned = mirrored.returned();
    mirrored.check_standby(&returned)?;
    mirrored.finish()
}

/// A standby of the principal's own takes over, and the mirror is pointed to it: it goes over to
/// the new timeline, and its standby with it.
#[test]
fn a_timeline_that_changes_upstream_is_followed() -> Result<()> {
    let mut mirrored = Mirrored::start_idle(15, "far", None, Site::named("far")?)?;
    mirrored.principal.execute_script("SELECT pg_drop_replication_slot('standby')")?;
    let next = mirrored.principal.standby(&[], &[SLOT])?;
    mirrored.start_clients()?;
    mirrored.await_commits(10)?;
    // A server that is stopped in order gives all that it has to whoever streams from it.
    mirrored.principal.stop(StopMode::Fast)?;
    let returned = mirrored.clients_end()?;
    next.execute_script("SELECT pg_promote()")?;
    point_to(&mut mirrored, &next)?;
    next.execute_script("INSERT INTO t VALUES (100, 1)")?;
    let far = report(&mirrored.far, "the new timeline", |mirror| mirror["timeline"] == 2)?;
    println!("{far}");
    check_rows(&next, &returned)?;
    mirrored.check_standby(&returned)?;
    wait_until("the standby to go over", LONG, &[&mirrored.standby.log_path()], || {
        let sql = "SELECT count(*) FROM t WHERE client = 100";
        Ok((mirrored.standby.connect()?.query_one(sql, &[])?.get::<_, i64>(0) == 1).then_some(()))
    })?;
    // And it can be promoted, past both.
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0) && promoted.stdout.contains("timeline 3"), "{promoted:?}");
    ensure!(rows(&mirrored.standby)? == rows(&next)?, "{promoted:?}");
    Ok(())
}

/// A server that lacks what was acknowledged became principal: its log is not taken in, and the
/// mirror's standby has what it lacks.
#[test]
fn a_principal_that_lacks_what_is_here_is_refused() -> Result<()> {
    let mut mirrored = Mirrored::start_idle(15, "far", None, Site::named("far")?)?;
    mirrored.principal.execute_script("SELECT pg_drop_replication_slot('standby')")?;
    let mut behind = mirrored.principal.standby(&[], &[SLOT])?;
    mirrored.start_clients()?;
    mirrored.await_commits(5)?;
    behind.kill9()?;
    mirrored.await_commits(10)?;
    let returned = mirrored.lose_the_principal()?;
    behind.start()?;
    behind.execute_script("SELECT pg_promote()")?;
    behind.execute_script("SET synchronous_commit = local; INSERT INTO t VALUES (100, 1)")?;
    point_to(&mut mirrored, &behind)?;
    let far = said(&mirrored.far, "never had that log")?;
    println!("{}: {}", far["state"], far["error"]);
    ensure!(far["state"] == "stopped", "{far}");
    mirrored.check_standby(&returned)?;
    ensure!(check_rows(&behind, &returned).is_err(), "it lacked nothing");
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    check_rows(&mirrored.standby, &returned)
}

/// A copy of the principal from before is put in its place, and nobody looks until it has written
/// past what the mirror has. With what returned before; the near end is not there.
fn set_back(defect: Option<&str>) -> Result<(Mirrored, Vec<i32>)> {
    let mut mirrored = Mirrored::start_idle(15, "far", defect, Site::named("far")?)?;
    let backup = mirrored.principal.back_up()?;
    mirrored.start_clients()?;
    mirrored.await_commits(10)?;
    mirrored.principal.stop(StopMode::Fast)?;
    let returned = mirrored.clients_end()?;
    let far = report(&mirrored.far, "the far end", |mirror| mirror["durable"].is_string())?;
    let had = far["durable"].as_str().unwrap_or_default().to_owned();
    mirrored.near.stop()?;
    mirrored.principal.restore(&backup)?;
    let mut writer = mirrored.principal.connect()?;
    writer.batch_execute("SET synchronous_commit = local")?;
    let is_past = format!("SELECT pg_current_wal_flush_lsn() > '{had}'");
    let mut number = 0;
    while !writer.query_one(&is_past, &[])?.get::<_, bool>(0) {
        number += 1;
        writer.execute("INSERT INTO t VALUES (100, $1)", &[&number])?;
    }
    Ok((mirrored, returned))
}

#[test]
fn a_principal_that_was_set_back_is_refused() -> Result<()> {
    let (mut mirrored, returned) = set_back(None)?;
    mirrored.near.start()?;
    let far = said(&mirrored.far, "is not what the mirror's spool holds")?;
    ensure!(far["state"] == "stopped", "{far}");
    let check = mirrored.far.verb("check", &[])?;
    ensure!(check.code == Some(1) && check.stdout.contains("has stopped: "), "{check:?}");
    mirrored.check_standby(&returned)?;
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    check_rows(&mirrored.standby, &returned)
}

/// A spool that goes on with other log than it ends with: commits return, and no standby ever gets
/// to them.
#[test]
fn mutant_positions_are_trusted() -> Result<()> {
    const LATER: i32 = 200;
    let (mut mirrored, _) = set_back(Some("mirror-trusts-positions"))?;
    // What is in the spool alone counts.
    mirrored.line.stall();
    mirrored.near.start()?;
    let client = client(&mirrored.principal, LATER)?;
    let count = client.returned.clone();
    let logs = [&*mirrored.near.log_path(), &mirrored.far.log_path()];
    wait_until("a commit to return", LONG, &logs, || Ok((count.load(SeqCst) > 0).then_some(())))?;
    mirrored.principal.kill9()?;
    mirrored.near.kill9()?;
    ensure!(client.end()?.is_err(), "a client stopped before its server did");
    mirrored.line.cut();
    mirrored.line.mend();
    // To the end of what can be replayed, if it may be promoted at all.
    let promoted = promote(&mirrored, &mirrored.standby, &["--wait", "5"])?;
    let checked = check_rows_of(&mirrored.standby, LATER, count.load(SeqCst));
    let error = checked.err().with_context(|| format!("it was not caught: {promoted:?}"))?;
    ensure!(error.to_string().starts_with("LOST: "), "{error:#}");
    println!("caught: {error}; {promoted:?}");
    Ok(())
}

/// The principal dropped what the far end lacks: that is said at both ends, commits wait, and the
/// standby takes over with all that returned, or is made anew as the message says.
#[test]
fn a_slot_that_lost_its_log_is_told_and_begun_anew() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(5)?;
    mirrored.far.stop()?;
    mirrored.await_silence()?;
    let returned = mirrored.returned();
    for setting in ["wal_keep_size = 0", "max_slot_wal_keep_size = '16MB'"] {
        mirrored.principal.execute_script(&format!("ALTER SYSTEM SET {setting}"))?;
    }
    // What the test's other standby was made with.
    mirrored.principal.execute_script("SELECT pg_drop_replication_slot('standby')")?;
    mirrored.principal.execute_script("SELECT pg_reload_conf()")?;
    let mut writer = mirrored.principal.connect()?;
    writer.batch_execute("SET synchronous_commit = local")?;
    wait_until("the slot to be lost", LONG, &[], || {
        writer.batch_execute("SELECT pg_logical_emit_message(false, 'x', 'y'), pg_switch_wal()")?;
        writer.batch_execute("CHECKPOINT")?;
        let sql = "SELECT wal_status = 'lost' FROM pg_replication_slots WHERE slot_name = $1";
        Ok(writer.query_one(sql, &[&SLOT])?.get::<_, bool>(0).then_some(()))
    })?;
    mirrored.far.start()?;
    for site in [&mirrored.far, &mirrored.near] {
        let told = said(site, "max_slot_wal_keep_size was exceeded")?;
        println!("{}: {}", told["state"], told["error"]);
    }
    let far = report(&mirrored.far, "the far end to stop", |m| m["state"] == "stopped")?;
    ensure!(far["error"].as_str().is_some_and(|error| error.contains("begin anew")), "{far}");
    // Nothing returned meanwhile, and what had returned can be read, here and there.
    ensure!(mirrored.returned() == returned, "a commit returned");
    mirrored.check_standby(&returned)?;
    // Without a spool it would be streamed by, and keep nothing.
    mirrored.far.stop()?;
    let (folder, aside) = (spool(&mirrored), mirrored.far.directory().join("aside"));
    std::fs::rename(&folder, &aside)?;
    mirrored.far.start()?;
    let far = report(&mirrored.far, "the far end to stop", |m| m["state"] == "stopped")?;
    ensure!(far["error"].as_str().is_some_and(|error| error.contains("drop the slot")), "{far}");
    mirrored.far.stop()?;
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::rename(&aside, &folder)?;
    mirrored.far.start()?;
    // A slot that is made anew does not bring the log back, and keeps none from then on.
    let sql = format!("SELECT pg_drop_replication_slot('{SLOT}')");
    mirrored.principal.execute_script(&sql)?;
    mirrored.far.restart()?;
    report(&mirrored.far, "the far end to stop again", |m| m["state"] == "stopped")?;
    wait_until("the new slot to be dropped", LONG, &[], || {
        let sql = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1";
        let slots: i64 = mirrored.principal.connect()?.query_one(sql, &[&SLOT])?.get(0);
        Ok((slots == 0).then_some(()))
    })?;
    // As it says.
    mirrored.far.stop()?;
    std::fs::remove_dir_all(spool(&mirrored))?;
    mirrored.far.start()?;
    // What waits is in no spool, also after both nodes were restarted.
    for _ in 0..2 {
        said(&mirrored.near, "the spool was begun anew at")?;
        report(&mirrored.far, "log to flow", |mirror| mirror["state"] == "receiving")?;
        ensure!(mirrored.returned() == returned, "a commit returned that is in no spool");
        mirrored.near.restart()?;
        mirrored.far.restart()?;
    }
    said(&mirrored.near, "the spool was begun anew at")?;
    // The principal is stopped for a moment, to be copied. Nobody waits any more then.
    let begins = std::time::Instant::now();
    mirrored.standby = follower(&mut mirrored.principal, mirrored.line.port(), "s2")?;
    // A server that is stopped in order waits for who streams from it, and would be killed after 60.
    ensure!(begins.elapsed() < Duration::from_secs(45), "the principal was not stopped in order");
    ensure!(mirrored.clients_end()? == returned, "a commit returned that is in no spool");
    mirrored.principal.execute_script("INSERT INTO t VALUES (100, 1)")?;
    let note = mirrored.near.directory().join("data/mirrors/m.begun");
    wait_until("the note to go", LONG, &[], || Ok((!note.exists()).then_some(())))?;
    mirrored.check_standby(&returned)
}

/// The spool is gone, and the slot is not: a standby that can use the next one lets commits go on at
/// once, and where none can, they wait until somebody says otherwise.
#[test]
fn a_spool_that_was_lost_is_told_and_acknowledged_once_a_standby_can_use_the_next() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(5)?;
    mirrored.far.stop()?;
    report(&mirrored.near, "the far end to be gone", |m| m["state"] == "waiting")?;
    mirrored.await_silence()?;
    std::fs::remove_dir_all(spool(&mirrored))?;
    mirrored.far.start()?;
    mirrored.await_commits(5)?;
    mirrored.check_standby(&mirrored.returned())?;
    mirrored.standby.stop(StopMode::Fast)?;
    write_segments(&mirrored.principal, 3)?;
    mirrored.await_commits(5)?;
    mirrored.far.stop()?;
    report(&mirrored.near, "the far end to be gone", |m| m["state"] == "waiting")?;
    mirrored.await_silence()?;
    let returned = mirrored.returned();
    std::fs::remove_dir_all(spool(&mirrored))?;
    mirrored.far.start()?;
    // Also after both nodes were restarted.
    for _ in 0..2 {
        let near = said(&mirrored.near, "the one before it is gone")?;
        report(&mirrored.far, "log to flow", |mirror| mirror["state"] == "receiving")?;
        ensure!(mirrored.returned() == returned, "a commit returned: {near}");
        mirrored.near.restart()?;
        mirrored.far.restart()?;
    }
    mirrored.standby.start()?;
    said(&mirrored.far, "asks for log in vain")?;
    ensure!(mirrored.returned() == returned, "a commit returned that no standby can have");
    let resumed = mirrored.near.verb("mirror resume", &["m"])?;
    ensure!(resumed.code == Some(0), "{resumed:?}");
    ensure!(resumed.stdout.contains("acknowledges log from now on"), "{resumed:?}");
    mirrored.await_commits(5)?;
    mirrored.finish()
}

/// The newest segment of the spool.
fn newest_segment(mirrored: &Mirrored) -> Result<PathBuf> {
    let mut segments = Vec::new();
    for entry in std::fs::read_dir(spool(mirrored))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.len() == 24 && name.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            segments.push(path);
        }
    }
    segments.into_iter().max().context("no segment")
}

/// Bytes of what is in the newest segment go bad while the node is down: some that were durable
/// `before` the end by so much.
fn damage(mirrored: &mut Mirrored, before: i64) -> Result<()> {
    let far = report(&mirrored.far, "the far end", |mirror| mirror["durable"] != "")?;
    let durable = position(far["durable"].as_str().unwrap_or_default())?;
    let noted = spool(mirrored).join("noted");
    wait_until("how far it is to be noted", LONG, &[], || {
        let text = std::fs::read_to_string(&noted).unwrap_or_default();
        let noted = text.split_whitespace().nth(1).and_then(|at| position(at).ok());
        Ok(noted.is_some_and(|noted| noted >= durable - before).then_some(()))
    })?;
    mirrored.far.kill9()?;
    let at = (durable - before) % SEGMENT_BYTES;
    ensure!(durable % SEGMENT_BYTES > before, "not within the newest segment: {far}");
    let file = std::fs::OpenOptions::new().write(true).open(newest_segment(mirrored)?)?;
    file.write_all_at(&[0xa5; 64], u64::try_from(at)?)?;
    mirrored.far.start()
}

/// It is told, and received again from the principal.
#[test]
fn a_damaged_spool_is_mended_from_the_principal() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(50)?;
    mirrored.near.kill9()?;
    mirrored.await_silence()?;
    damage(&mut mirrored, 3_000)?;
    let far = said(&mirrored.far, "is damaged at")?;
    println!("{}", far["error"]);
    let returned = mirrored.returned();
    mirrored.near.start()?;
    report(&mirrored.far, "it to be mended", |m| {
        m["error"].is_null() && m["state"] == "receiving"
    })?;
    mirrored.await_commits(5)?;
    mirrored.check_standby(&returned)?;
    mirrored.finish()
}

/// Bytes go bad under a running node, in log that the standby still needs: nothing more is
/// acknowledged until it is there again. In the newest segment a start receives it again; in one
/// that is complete, also where the node was killed before it had looked, the principal's file is
/// put there.
#[test]
fn nothing_is_acknowledged_behind_damage_under_a_running_node() -> Result<()> {
    for (is_complete, is_killed) in [(false, false), (true, false), (true, true)] {
        let case = format!("complete: {is_complete}, killed: {is_killed}");
        let mut mirrored = Mirrored::start(15, None)?;
        mirrored.await_commits(10)?;
        mirrored.line.stall();
        mirrored.await_commits(50)?;
        let far = report(&mirrored.far, "the far end", |mirror| mirror["durable"] != "")?;
        let at = position(far["durable"].as_str().unwrap_or_default())? - 3_000;
        let path = newest_segment(&mirrored)?;
        let file = std::fs::OpenOptions::new().write(true).open(&path)?;
        file.write_all_at(&[0xa5; 64], u64::try_from(at % SEGMENT_BYTES)?)?;
        if is_complete {
            mirrored.principal.execute_script("SELECT pg_switch_wal()")?;
            mirrored.await_commits(5)?;
        }
        if is_killed {
            mirrored.far.kill9()?;
            mirrored.far.start()?;
        }
        said(&mirrored.far, "is damaged at").context(case.clone())?;
        mirrored.await_silence().context(case.clone())?;
        // As it says.
        mirrored.far.stop()?;
        if is_complete {
            let theirs = mirrored.principal.data_dir().join("pg_wal");
            std::fs::copy(theirs.join(path.file_name().unwrap_or_default()), &path)?;
        }
        mirrored.far.start()?;
        report(&mirrored.far, "it to be mended", |m| {
            m["error"].is_null() && m["state"] == "receiving"
        })
        .context(case.clone())?;
        mirrored.await_commits(5)?;
        let returned = mirrored.returned();
        mirrored.line.cut();
        mirrored.line.mend();
        mirrored.check_standby(&returned).context(case)?;
        mirrored.finish()?;
    }
    Ok(())
}

/// Log that a standby still needs is taken away under a running node: commits wait from then on, and
/// go on once it is back.
#[test]
fn a_complete_segment_that_is_removed_while_the_node_runs_stops_the_mirror() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(10)?;
    mirrored.line.stall();
    mirrored.await_commits(10)?;
    let path = newest_segment(&mirrored)?;
    for _ in 0..2 {
        mirrored.principal.execute_script("SELECT pg_switch_wal()")?;
        mirrored.await_commits(5)?;
    }
    let kept = path.with_extension("kept");
    std::fs::rename(&path, &kept)?;
    let stopped = report(&mirrored.far, "it to stop", |mirror| mirror["state"] == "stopped")?;
    let said = stopped["error"].as_str().unwrap_or_default();
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    ensure!(said.contains(&format!("{name} was removed while the spool was in use")), "{said}");
    mirrored.await_silence()?;
    // As it says.
    mirrored.far.stop()?;
    std::fs::rename(&kept, &path)?;
    mirrored.line.cut();
    mirrored.line.mend();
    mirrored.far.start()?;
    mirrored.await_commits(5)?;
    mirrored.check_standby(&mirrored.returned())?;
    mirrored.finish()
}

/// The principal is gone, and the standby lacks what is damaged: it is not promoted, and once the
/// file is back it is, with everything.
#[test]
fn a_damaged_spool_is_not_promoted_without_what_is_damaged() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(10)?;
    mirrored.line.stall();
    mirrored.await_commits(50)?;
    let told = mirrored.told()?;
    let returned = mirrored.lose_the_principal()?;
    mirrored.near.kill9()?;
    let newest = newest_segment(&mirrored)?;
    let sound = std::fs::read(&newest)?;
    damage(&mut mirrored, 3_000)?;
    mirrored.line.cut();
    mirrored.line.mend();
    said(&mirrored.far, "is damaged at")?;
    let refused = promote(&mirrored, &mirrored.standby, &["--wait", "3"])?;
    ensure!(refused.code == Some(1) && refused.stderr.contains("is damaged at"), "{refused:?}");
    println!("{}", refused.stderr.trim());
    ensure!(is_in_recovery(&mirrored.standby)?, "promoted without what was acknowledged");
    // Back from a backup, as it says.
    mirrored.far.stop()?;
    std::fs::write(&newest, sound)?;
    mirrored.far.start()?;
    report(&mirrored.far, "the spool to be open", |mirror| mirror["durable"] != "")?;
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    check_rows(&mirrored.standby, &returned)?;
    check_fork(&mirrored.standby, told)
}

/// So with a segment that is long complete, which no start reads.
#[test]
fn a_damaged_segment_that_a_standby_still_needs_is_named() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(10)?;
    mirrored.line.stall();
    mirrored.await_commits(50)?;
    let far = report(&mirrored.far, "the far end", |mirror| mirror["durable"] != "")?;
    let at = position(far["durable"].as_str().unwrap_or_default())? - 3_000;
    let complete = newest_segment(&mirrored)?;
    mirrored.principal.execute_script("SELECT pg_switch_wal()")?;
    mirrored.await_commits(10)?;
    mirrored.lose_the_principal()?;
    mirrored.near.kill9()?;
    mirrored.far.kill9()?;
    let file = std::fs::OpenOptions::new().write(true).open(&complete)?;
    file.write_all_at(&[0xa5; 64], u64::try_from(at % SEGMENT_BYTES)?)?;
    mirrored.line.cut();
    mirrored.line.mend();
    mirrored.far.start()?;
    report(&mirrored.far, "the spool to be open", |mirror| mirror["durable"] != "")?;
    let refused = promote(&mirrored, &mirrored.standby, &["--wait", "3"])?;
    let name = complete.file_name().unwrap_or_default().to_string_lossy().into_owned();
    ensure!(refused.code == Some(1), "{refused:?}");
    ensure!(refused.stderr.contains(&format!("{name} is damaged at")), "{refused:?}");
    ensure!(is_in_recovery(&mirrored.standby)?, "promoted without what was acknowledged");
    println!("{}", refused.stderr.trim());
    Ok(())
}

/// The standby has what is damaged in the spool: nothing is lost by promoting it.
#[test]
fn a_standby_that_has_what_is_damaged_is_promoted() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(50)?;
    let told = mirrored.told()?;
    let returned = mirrored.lose_the_principal()?;
    mirrored.near.kill9()?;
    mirrored.check_standby(&returned)?;
    damage(&mut mirrored, 3_000)?;
    said(&mirrored.far, "is damaged at")?;
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    println!("{}", promoted.stdout.trim());
    check_rows(&mirrored.standby, &returned)?;
    check_fork(&mirrored.standby, told)
}

fn spool(mirrored: &Mirrored) -> PathBuf {
    mirrored.far.directory().join("data/mirrors/m")
}

/// A unit that is enabled twice, or a hand that starts another: the node that works stays the one that
/// is asked, and that can promote.
#[test]
fn a_second_node_of_the_same_site_is_refused() -> Result<()> {
    let mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(5)?;
    let second = mirrored.far.verb("run", &[])?;
    ensure!(second.code == Some(1), "{second:?}");
    ensure!(second.stderr.contains("is in use by another node"), "{second:?}");
    mirrored.await_commits(5)?;
    report(&mirrored.far, "the first to answer", |far| far["state"] == "receiving")?;
    mirrored.finish()
}

/// The server waits for what is flushed at its standbys, which is nothing new while none replays.
#[test]
fn a_principal_ends_in_order_while_no_standby_replays() -> Result<()> {
    let mut mirrored = Mirrored::start_idle(15, "far-applied", None, Site::named("far")?)?;
    mirrored.standby.stop(StopMode::Fast)?;
    mirrored.principal.execute_script(
        "SET synchronous_commit = local; INSERT INTO t VALUES (100, 1), (100, 2)",
    )?;
    let begins = std::time::Instant::now();
    mirrored.principal.stop(StopMode::Fast)?;
    // It is killed after 60 s.
    ensure!(begins.elapsed() < Duration::from_secs(45), "the principal was not stopped in order");
    // All of its log is at the far end, and nobody was told more than a standby has replayed.
    mirrored.standby.start()?;
    let mut there = mirrored.standby.connect()?;
    wait_until("the rows to be replayed", LONG, &[], || {
        let rows: i64 = there.query_one("SELECT count(*) FROM t", &[])?.get(0);
        Ok((rows == 2).then_some(()))
    })
}

/// A standby that is connected and replays nothing holds commits up in mode `far-applied`: both ends
/// say so, and no longer than that is so.
#[test]
fn a_standby_that_does_not_replay_is_told_of() -> Result<()> {
    let mirrored = Mirrored::start_idle(15, "far-applied", None, Site::named("far")?)?;
    mirrored.standby.execute_script("SELECT pg_wal_replay_pause()")?;
    let lazily = "SET synchronous_commit = off; INSERT INTO t VALUES (70, 1)";
    mirrored.principal.execute_script(lazily)?;
    let near = said(&mirrored.near, "nothing was acknowledged for")?;
    ensure!(near["state"] == "streaming" && near["health"] == "warning", "{near}");
    let far = said(&mirrored.far, "nothing was acknowledged for")?;
    ensure!(far["error"].as_str().is_some_and(|error| error.contains("\"s1\"")), "{far}");
    mirrored.standby.execute_script("SELECT pg_wal_replay_resume()")?;
    for site in [&mirrored.near, &mirrored.far] {
        report(site, "all to be well again", |mirror| mirror["error"].is_null())?;
    }
    Ok(())
}
