//! A standby takes over: with everything that was acknowledged, or not at all.

use crate::bounds::write_segments;
use crate::mirrored::{LONG, Mirrored, position, report};
use anyhow::{Context, Result, bail, ensure};
use farshore_testkit::postgres::{Cluster, Installation, copy_tree};
use farshore_testkit::wait::wait_until;
use farshore_tests::{Site, Verb};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

pub fn promote(mirrored: &Mirrored, standby: &Cluster, more: &[&str]) -> Result<Verb> {
    let url = standby.url("postgres");
    let arguments = [&["m", "--standby", &url], more].concat();
    mirrored.far.verb("mirror promote", &arguments)
}

/// Everything that returned is on the server that was promoted.
pub fn check_rows(server: &Cluster, returned: &[i32]) -> Result<()> {
    (0..).zip(returned).try_for_each(|(client, returned)| check_rows_of(server, client, *returned))
}

/// Everything that returned to this client is on the server that was promoted.
pub fn check_rows_of(server: &Cluster, client: i32, returned: i32) -> Result<()> {
    let sql = "SELECT count(*) FROM t WHERE client = $1 AND n <= $2";
    let there: i64 = server.connect()?.query_one(sql, &[&client, &returned])?.get(0);
    ensure!(
        there == i64::from(returned),
        "LOST: client {client} saw {returned} commits return, {there} are there"
    );
    Ok(())
}

/// Where the promoted server's own timeline begins, by its history file.
pub fn fork(server: &Cluster) -> Result<i64> {
    let sql = "SELECT pg_read_file('pg_wal/' || left(pg_walfile_name(pg_current_wal_lsn()), 8) || \
               '.history')";
    let history: String = server.connect()?.query_one(sql, &[])?.get(0);
    let last = history.lines().rfind(|line| !line.trim().is_empty()).context("no history")?;
    position(last.split('\t').nth(1).context("no position")?)
}

/// The new timeline begins at or past what the principal was told.
pub fn check_fork(server: &Cluster, told: i64) -> Result<()> {
    const PAGE_BYTES: i64 = 8_192;
    // A server may flush up to a page's end, within a record; that record is no commit yet.
    let whole = if told % PAGE_BYTES == 0 { told - PAGE_BYTES } else { told };
    let fork = fork(server)?;
    ensure!(
        fork >= whole,
        "LOST: the principal was told {told}, the new timeline begins at {fork}"
    );
    Ok(())
}

pub fn is_in_recovery(server: &Cluster) -> Result<bool> {
    Ok(server.connect()?.query_one("SELECT pg_is_in_recovery()", &[])?.get(0))
}

/// The standby gets nothing more, and the spool does.
fn let_the_standby_lag(mirrored: &Mirrored) -> Result<()> {
    mirrored.line.stall();
    mirrored.await_commits(10)
}

/// The principal and both ends die at random; the standby is promoted with what the spool holds.
fn takes_over(mode: &str) -> Result<()> {
    let seed = farshore_testkit::seed();
    println!("FARSHORE_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut mirrored = Mirrored::start_in(15, mode, None, Site::named("far")?)?;
    for _ in 0..4 {
        mirrored.await_commits(random.random_range(1..20))?;
        match random.random_range(0..3) {
            0 => {
                mirrored.near.kill9()?;
                mirrored.near.start()?;
            }
            1 => {
                mirrored.far.kill9()?;
                mirrored.far.start()?;
            }
            _ => {
                mirrored.standby.kill9()?;
                mirrored.standby.start()?;
            }
        }
    }
    mirrored.await_commits(10)?;
    // In the other mode commits wait for the standby.
    if mode == "far" {
        let_the_standby_lag(&mirrored)?;
    }
    if random.random_bool(0.5) {
        mirrored.far.kill9()?;
        mirrored.far.start()?;
        report(&mirrored.far, "the spool to be open", |mirror| mirror["durable"] != "")?;
        mirrored.await_commits(1)?;
    }
    let told = mirrored.told()?;
    let returned = mirrored.lose_the_principal()?;
    if mode == "far" {
        let refused = promote(&mirrored, &mirrored.standby, &["--wait", "1"])?;
        ensure!(refused.code == Some(1), "{refused:?}");
        ensure!(refused.stderr.contains("bytes of log that the spool holds"), "{refused:?}");
        ensure!(is_in_recovery(&mirrored.standby)?, "promoted although it lacks log");
    }
    mirrored.line.cut();
    mirrored.line.mend();
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    ensure!(
        promoted.stdout.contains("nothing that this mirror acknowledged is lost"),
        "{promoted:?}"
    );
    println!("{}", promoted.stdout.trim());
    check_rows(&mirrored.standby, &returned)?;
    check_fork(&mirrored.standby, told)?;
    let again = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(again.stdout.contains("had been promoted already"), "{again:?}");
    if mode == "far" {
        // Its near end knows, also once it was started again.
        mirrored.near.restart()?;
        report(&mirrored.near, "the near end to hear of the promotion", |mirror| {
            let error = mirror["error"].as_str().unwrap_or_default();
            error.contains("site \"far\" has promoted the standby")
                && error.contains("pg_drop_replication_slot('farshore_mirror_m')")
        })?;
        let checked = mirrored.near.verb("check", &[])?;
        for said in ["has promoted the standby of this mirror", "Take that name out of"] {
            ensure!(checked.stdout.contains(said), "{checked:?}");
        }
        // Out of the site file, what is left of it is told.
        let file = mirrored.near.file();
        let text = std::fs::read_to_string(&file)?;
        let other = text.replace("[mirror.m]", "[mirror.n]").replace("\"m\"", "\"n\"");
        std::fs::write(&file, other)?;
        let checked = mirrored.near.verb("check", &[])?;
        let said = "its slot \"farshore_mirror_m\" on postgres://";
        ensure!(checked.stdout.contains(said), "{checked:?}");
        std::fs::write(&file, text)?;
    }
    // The old principal comes back: its log is not taken in, and nothing that it commits returns.
    mirrored.far.kill9()?;
    mirrored.far.start()?;
    let before = report(&mirrored.far, "the far end", |mirror| mirror["state"] == "promoted")?;
    mirrored.principal.start()?;
    let mut client = mirrored.principal.connect()?;
    client.batch_execute("SET application_name = 'late'")?;
    let commit = std::thread::spawn(move || client.execute("INSERT INTO t VALUES (100, 1)", &[]));
    wait_until("the commit to wait", LONG, &[], || {
        let sql = "SELECT count(*) FROM pg_stat_activity \
                   WHERE wait_event = 'SyncRep' AND application_name = 'late'";
        let waiting: i64 = mirrored.principal.connect()?.query_one(sql, &[])?.get(0);
        Ok((waiting == 1).then_some(()))
    })?;
    mirrored.far.restart()?;
    let after = report(&mirrored.far, "the far end", |mirror| mirror["state"] == "promoted")?;
    ensure!(before["durable"] == after["durable"], "{before} then {after}");
    ensure!(!commit.is_finished(), "a commit returned");
    mirrored.principal.kill9()?;
    ensure!(commit.join().is_ok_and(|committed| committed.is_err()), "a commit returned");
    mirrored.standby.execute_script("INSERT INTO t VALUES (101, 1)")
}

#[test]
fn a_standby_takes_over_with_all_that_was_durable() -> Result<()> {
    takes_over("far")
}

#[test]
fn a_standby_takes_over_with_all_that_was_applied() -> Result<()> {
    takes_over("far-applied")
}

/// A standby that replays late on purpose has what it needs on its disk, and is not waited for.
#[test]
fn a_standby_whose_replay_is_delayed_takes_over_with_all() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(5)?;
    for sql in ["ALTER SYSTEM SET recovery_min_apply_delay = '1h'", "SELECT pg_reload_conf()"] {
        mirrored.standby.execute_script(sql)?;
    }
    wait_until("the delay to be known", LONG, &[], || {
        let sql = "SELECT current_setting('recovery_min_apply_delay')";
        let delay: String = mirrored.standby.connect()?.query_one(sql, &[])?.get(0);
        Ok((delay == "1h").then_some(()))
    })?;
    mirrored.await_commits(20)?;
    let told = mirrored.told()?;
    let returned = mirrored.lose_the_principal()?;
    ensure!(check_rows(&mirrored.standby, &returned).is_err(), "nothing was delayed");
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    check_rows(&mirrored.standby, &returned)?;
    check_fork(&mirrored.standby, told)
}

/// A standby with a recovery target ends recovery there when it is promoted, whatever it has on its
/// disk: it is not, until the target is gone.
#[test]
fn a_standby_with_a_recovery_target_takes_over_with_all_or_not_at_all() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(5)?;
    let sql = "SELECT (pg_current_wal_flush_lsn() + 1048576)::text";
    let target: String = mirrored.principal.connect()?.query_one(sql, &[])?.get(0);
    let set = format!("ALTER SYSTEM SET recovery_target_lsn = '{target}'");
    mirrored.standby.execute_script(&set)?;
    mirrored.standby.restart()?;
    // Whether it has come there or not: it would stop without being promoted, if not.
    let early = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(early.code == Some(1) && early.stderr.contains("recovery_target_lsn"), "{early:?}");
    let sql = "CREATE TABLE filling AS SELECT repeat('x', 500) FROM generate_series(1, 4000)";
    mirrored.principal.execute_script(sql)?;
    wait_until("the standby to pause at its target", LONG, &[], || {
        let sql = "SELECT pg_is_wal_replay_paused()";
        Ok(mirrored.standby.connect()?.query_one(sql, &[])?.get::<_, bool>(0).then_some(()))
    })?;
    mirrored.await_commits(20)?;
    let told = mirrored.told()?;
    let returned = mirrored.lose_the_principal()?;
    ensure!(check_rows(&mirrored.standby, &returned).is_err(), "it did not stop at its target");
    let refused = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(refused.code == Some(1), "{refused:?}");
    ensure!(refused.stderr.contains("ALTER SYSTEM RESET recovery_target_lsn"), "{refused:?}");
    ensure!(is_in_recovery(&mirrored.standby)?, "promoted although it lacks log");
    let open = report(&mirrored.far, "the far end", |mirror| mirror["durable"] != "")?;
    ensure!(open["state"] != "promoted", "{open}");
    mirrored.standby.execute_script("ALTER SYSTEM RESET recovery_target_lsn")?;
    mirrored.standby.restart()?;
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    check_rows(&mirrored.standby, &returned)?;
    check_fork(&mirrored.standby, told)
}

/// What is not the mirror's standby is left alone, and log is given up only if that is wanted.
#[test]
fn no_promotion_by_mistake() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(5)?;
    // Another version is another cluster: those of one are copies of each other.
    let other = Cluster::builder(&Installation::find(18)?).start()?;
    for (server, said) in
        [(&other, "it is no standby of this mirror"), (&mirrored.principal, "is not in recovery")]
    {
        let refused = promote(&mirrored, server, &[])?;
        ensure!(refused.code == Some(1) && refused.stderr.contains(said), "{refused:?}");
    }
    let unknown = mirrored.far.verb("mirror promote", &["n"])?;
    ensure!(unknown.stderr.contains("no mirror \"n\""), "{unknown:?}");
    let unnamed = mirrored.far.verb("mirror promote", &["m"])?;
    ensure!(unnamed.stderr.contains("set standby = "), "{unnamed:?}");
    let elsewhere = mirrored.near.verb("mirror promote", &["m"])?;
    ensure!(elsewhere.stderr.contains("at the site of its far end"), "{elsewhere:?}");
    // What was refused left the mirror as it was.
    mirrored.await_commits(5)?;
    let_the_standby_lag(&mirrored)?;
    mirrored.lose_the_principal()?;
    let promoted = promote(&mirrored, &mirrored.standby, &["--wait", "1", "--allow-data-loss"])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    let lost = promoted.stdout.split("LOST: ").nth(1).and_then(|rest| rest.split(' ').next());
    let lost: i64 = lost.context("nothing said")?.parse()?;
    let spool = report(&mirrored.far, "the far end", |mirror| mirror["durable"] != "")?;
    let end = position(spool["durable"].as_str().unwrap_or_default())?;
    ensure!(lost > 0 && lost <= end - fork(&mirrored.standby)?, "{lost}: {promoted:?}");
    println!("{}", promoted.stdout.trim());
    Ok(())
}

/// The near end knows what it acknowledged; the spool, which is an earlier state of itself, does not.
#[test]
fn a_spool_that_was_set_back_does_not_pass_for_whole() -> Result<()> {
    let mut mirrored = Mirrored::start(18, None)?;
    mirrored.await_commits(10)?;
    let_the_standby_lag(&mirrored)?;
    mirrored.far.kill9()?;
    let data = mirrored.far.directory().join("data");
    let saved = mirrored.far.directory().join("saved");
    copy_tree(&data, &saved)?;
    mirrored.far.start()?;
    mirrored.await_commits(20)?;
    let returned = mirrored.lose_the_principal()?;
    mirrored.far.kill9()?;
    std::fs::remove_dir_all(&data)?;
    copy_tree(&saved, &data)?;
    mirrored.far.start()?;
    report(&mirrored.far, "the spool to be open", |mirror| mirror["durable"] != "")?;
    mirrored.line.cut();
    mirrored.line.mend();
    let refused = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(refused.code == Some(1), "{refused:?}");
    ensure!(refused.stderr.contains("it was set back to an earlier state"), "{refused:?}");
    ensure!(is_in_recovery(&mirrored.standby)?, "promoted although it lacks commits");
    let promoted = promote(&mirrored, &mirrored.standby, &["--allow-data-loss"])?;
    ensure!(promoted.code == Some(0) && promoted.stdout.contains("LOST: "), "{promoted:?}");
    ensure!(!promoted.stdout.contains("nothing that this mirror"), "{promoted:?}");
    ensure!(check_rows(&mirrored.standby, &returned).is_err(), "nothing was set back");
    Ok(())
}

#[test]
fn promoting_without_drain_is_caught() -> Result<()> {
    let defect = Some("mirror-promote-without-drain");
    let mut mirrored = Mirrored::start(15, defect)?;
    mirrored.await_commits(10)?;
    let_the_standby_lag(&mirrored)?;
    let returned = mirrored.lose_the_principal()?;
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    match check_rows(&mirrored.standby, &returned) {
        Ok(()) => bail!("not caught"),
        Err(error) => {
            ensure!(format!("{error:#}").contains("LOST: "), "{error:#}");
            println!("caught: {error:#}");
            Ok(())
        }
    }
}

/// Whoever else streams gets all that there is, and is told then that nothing more comes.
#[test]
fn who_streams_on_is_told_of_the_promotion() -> Result<()> {
    let mut mirrored = Mirrored::start_idle(15, "far", None, Site::named("far")?)?;
    let second = mirrored.another_standby("s2")?;
    mirrored.start_clients()?;
    mirrored.await_commits(10)?;
    let told = mirrored.told()?;
    let returned = mirrored.lose_the_principal()?;
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    ensure!(promoted.stdout.contains("has no more log for who else streams"), "{promoted:?}");
    println!("{}", promoted.stdout.trim());
    let is_told = |from: usize| {
        wait_until("the other standby to be told", LONG, &[&second.log_path()], || {
            let log = std::fs::read_to_string(second.log_path())?;
            Ok(log
                .get(from..)
                .is_some_and(|log| log.contains("was promoted from it"))
                .then_some(()))
        })
    };
    is_told(0)?;
    check_rows(&second, &returned)?;
    // Also when the node starts again, and when the standby does.
    mirrored.far.restart()?;
    let before = std::fs::metadata(second.log_path())?.len();
    is_told(usize::try_from(before)?)?;
    check_rows(&mirrored.standby, &returned)?;
    check_fork(&mirrored.standby, told)
}

fn has_flushed(standby: &Cluster, end: i64) -> Result<()> {
    wait_until("the standby to have the log", LONG, &[&standby.log_path()], || {
        let sql = "SELECT coalesce(pg_last_wal_receive_lsn() - '0/0', 0)::bigint";
        let has: i64 = standby.connect()?.query_one(sql, &[])?.get(0);
        Ok((has >= end).then_some(()))
    })
}

/// Replay is paused, and not only asked to be.
fn await_pause(standby: &Cluster) -> Result<()> {
    wait_until("the standby to pause", LONG, &[&standby.log_path()], || {
        let sql = "SELECT pg_get_wal_replay_pause_state()";
        let state: String = standby.connect()?.query_one(sql, &[])?.get(0);
        Ok((state == "paused").then_some(()))
    })
}

/// PostgreSQL pauses a standby that has lower settings than its principal, and shuts it down where
/// it is told to promote: it is not told, and the mirror goes on.
fn settings_too_low(major: u32) -> Result<()> {
    let mut mirrored = Mirrored::start_idle(major, "far", None, Site::named("far")?)?;
    let raise = [
        "ALTER SYSTEM SET max_connections = 150",
        "ALTER SYSTEM SET max_locks_per_transaction = 100",
    ];
    raise.iter().try_for_each(|sql| mirrored.principal.execute_script(sql))?;
    mirrored.principal.restart()?;
    mirrored.start_clients()?;
    mirrored.await_commits(10)?;
    await_pause(&mirrored.standby)?;
    // The spool is closed for good for a server alone that can take over.
    for more in [&["--wait", "5"][..], &["--wait", "5", "--allow-data-loss"]] {
        let refused = promote(&mirrored, &mirrored.standby, more)?;
        ensure!(refused.code == Some(1), "{refused:?}");
        let said =
            "max_connections 100 instead of 150, max_locks_per_transaction 64 instead of 100";
        ensure!(refused.stderr.contains(said), "{refused:?}");
        ensure!(refused.stderr.contains(&raise.join("; ")), "{refused:?}");
        println!("{}", refused.stderr.trim());
        mirrored.await_commits(5)?;
    }
    ensure!(is_in_recovery(&mirrored.standby)?, "it was promoted");
    let told = mirrored.told()?;
    let returned = mirrored.lose_the_principal()?;
    raise.iter().try_for_each(|sql| mirrored.standby.execute_script(sql))?;
    mirrored.standby.restart()?;
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    check_rows(&mirrored.standby, &returned)?;
    check_fork(&mirrored.standby, told)
}

#[test]
fn a_standby_with_lower_settings_is_not_told_to_take_over() -> Result<()> {
    settings_too_low(15)
}

#[test]
fn a_standby_of_18_with_lower_settings_is_not_told_to_take_over() -> Result<()> {
    settings_too_low(18)
}

/// A pause that somebody asked for is none of PostgreSQL's own; that what is behind it cannot be
/// replayed is seen all the same.
#[test]
fn a_standby_whose_replay_somebody_paused_takes_over_with_all_if_it_can() -> Result<()> {
    let mut mirrored = Mirrored::start_idle(15, "far", None, Site::named("far")?)?;
    mirrored.standby.execute_script("SELECT pg_wal_replay_pause()")?;
    let raise = "ALTER SYSTEM SET max_worker_processes = 40";
    mirrored.principal.execute_script(raise)?;
    mirrored.principal.restart()?;
    mirrored.start_clients()?;
    mirrored.await_commits(10)?;
    let refused = promote(&mirrored, &mirrored.standby, &["--wait", "5"])?;
    ensure!(refused.code == Some(1) && refused.stderr.contains(raise), "{refused:?}");
    ensure!(is_in_recovery(&mirrored.standby)?, "it was promoted");
    mirrored.standby.execute_script(raise)?;
    mirrored.standby.restart()?;
    mirrored.standby.execute_script("SELECT pg_wal_replay_pause()")?;
    mirrored.await_commits(10)?;
    let told = mirrored.told()?;
    let returned = mirrored.lose_the_principal()?;
    ensure!(check_rows(&mirrored.standby, &returned).is_err(), "nothing was paused");
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    check_rows(&mirrored.standby, &returned)?;
    check_fork(&mirrored.standby, told)
}

/// Why replay is paused is in the log behind it: where the spool has removed that, it has to be said.
#[test]
fn a_pause_that_nobody_can_explain_is_told() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    let upstream = "upstream = \"near\"\n";
    mirrored.far.replace(upstream, &format!("{upstream}spool_size = \"64MB\"\n"))?;
    mirrored.far.restart()?;
    mirrored.await_commits(5)?;
    mirrored.standby.execute_script("SELECT pg_wal_replay_pause()")?;
    await_pause(&mirrored.standby)?;
    let sql = "SELECT '00000001' || lpad(to_hex(((pg_last_wal_replay_lsn() - '0/0') / 16777216)::int), \
               16, '0')";
    let segment: String = mirrored.standby.connect()?.query_one(sql, &[])?.get(0);
    write_segments(&mirrored.principal, 8)?;
    let segment = mirrored.far.directory().join("data/mirrors/m").join(segment);
    wait_until("the log to be removed", LONG, &[], || Ok((!segment.exists()).then_some(())))?;
    mirrored.await_commits(5)?;
    let told = mirrored.told()?;
    let returned = mirrored.lose_the_principal()?;
    let refused = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(refused.code == Some(1), "{refused:?}");
    ensure!(refused.stderr.contains("insufficient parameter settings"), "{refused:?}");
    println!("{}", refused.stderr.trim());
    ensure!(is_in_recovery(&mirrored.standby)?, "it was promoted");
    // As it says: it goes on replaying.
    mirrored.standby.execute_script("SELECT pg_wal_replay_resume()")?;
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    check_rows(&mirrored.standby, &returned)?;
    check_fork(&mirrored.standby, told)
}

/// The disk of the spool takes no note of a promotion: with everything on the standby, that is no
/// reason to be without a server for good.
#[test]
fn a_spool_whose_disk_takes_no_note_is_closed_as_long_as_the_node_runs() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(10)?;
    let told = mirrored.told()?;
    let returned = mirrored.lose_the_principal()?;
    // Where the new file would be there is none to be made.
    let obstacle = mirrored.far.directory().join("data/mirrors/m/closed.tmp");
    std::fs::create_dir(&obstacle)?;
    let refused = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(refused.code == Some(1), "{refused:?}");
    for said in ["has every record that the spool holds", "closed.tmp", "pg_promote() there"] {
        ensure!(refused.stderr.contains(said), "{refused:?}");
    }
    println!("{}", refused.stderr.trim());
    ensure!(is_in_recovery(&mirrored.standby)?, "it was promoted");
    let promoted = promote(&mirrored, &mirrored.standby, &["--allow-data-loss"])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    for said in ["nothing that this mirror acknowledged is lost", "remove the folder"] {
        ensure!(promoted.stdout.contains(said), "{promoted:?}");
    }
    println!("{}", promoted.stdout.trim());
    check_rows(&mirrored.standby, &returned)?;
    check_fork(&mirrored.standby, told)?;
    // The old principal comes back, and nothing of it is taken in.
    let before = report(&mirrored.far, "the far end", |mirror| mirror["state"] == "promoted")?;
    ensure!(before["error"].as_str().is_some_and(|error| error.contains("restart")), "{before}");
    mirrored.principal.start()?;
    let told_of_it = "the near end to hear of the promotion";
    report(&mirrored.near, told_of_it, |mirror| {
        let error = mirror["error"].as_str().unwrap_or_default();
        error.contains("site \"far\" has promoted the standby")
    })?;
    let after = report(&mirrored.far, "the far end", |mirror| mirror["state"] == "promoted")?;
    ensure!(before["durable"] == after["durable"], "{before} then {after}");
    Ok(())
}

/// Where the spool has failed, nothing comes in anyhow, and nothing has to be allowed.
#[test]
fn a_standby_takes_over_where_the_spool_has_failed() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(10)?;
    let told = mirrored.told()?;
    let returned = mirrored.lose_the_principal()?;
    let end = report(&mirrored.far, "the far end", |mirror| mirror["durable"] != "")?;
    has_flushed(&mirrored.standby, position(end["durable"].as_str().unwrap_or_default())?)?;
    std::fs::remove_dir_all(mirrored.far.directory().join("data/mirrors/m"))?;
    report(&mirrored.far, "the spool to be missed", |mirror| {
        mirror["error"].as_str().is_some_and(|error| error.contains("was removed while"))
    })?;
    let promoted = promote(&mirrored, &mirrored.standby, &["--wait", "5"])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    ensure!(promoted.stdout.contains("take [mirror.m] out of the site file"), "{promoted:?}");
    println!("{}", promoted.stdout.trim());
    check_rows(&mirrored.standby, &returned)?;
    check_fork(&mirrored.standby, told)
}
