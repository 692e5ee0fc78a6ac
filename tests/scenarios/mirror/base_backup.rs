//! `pg_basebackup` against the far end: the principal's files come through the mirror.

use crate::mirrored::{LONG, report};
use crate::seeding::{Pair, own_as, verify_backup};
use anyhow::{Result, ensure};
use farshore_testkit::postgres::Cluster;
use farshore_testkit::skip::{skipped, this_test};
use farshore_testkit::wait::wait_until;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// The program, unless this installation has none (packages without clients).
fn pg_basebackup(cluster: &Cluster, port: u16, to: &Path) -> Option<Command> {
    let program = cluster.installation().command("pg_basebackup").get_program().to_owned();
    if !Path::new(&program).exists() {
        skipped(&this_test(), "no pg_basebackup here");
        return None;
    }
    let mut command = Command::new(program);
    command.args(["-h", "127.0.0.1", "-p", &port.to_string(), "-U", "s", "-c", "fast", "-D"]);
    command.arg(to).stdin(Stdio::null()).env("PGPASSWORD", PASSWORD);
    Some(command)
}

const PASSWORD: &str = "it's a secret";

/// A mirror that asks for a password, and the folder that holds it.
fn start(major: u32) -> Result<(Pair, TempDir)> {
    let home = tempfile::Builder::new().prefix("farshore-password").tempdir()?;
    let path = home.path().join("password");
    std::fs::write(&path, PASSWORD)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    let mut pair = Pair::start_at(major, "127.0.0.1", &format!("standby_password = {path:?}\n"))?;
    pair.near.start()?;
    pair.far.start()?;
    report(&pair.far, "the far end", |mirror| mirror["state"] == "receiving")?;
    Ok((pair, home))
}

fn done(output: &Output) -> Result<()> {
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Gives all of it to the server's user.
fn give(path: &Path, cluster: &Cluster) -> Result<()> {
    own_as(path, &cluster.data_dir())?;
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            give(&entry.path(), cluster)?;
        } else {
            own_as(&entry.path(), &cluster.data_dir())?;
        }
    }
    Ok(())
}

fn a_standby_by_pg_basebackup(major: u32) -> Result<()> {
    let (mut pair, _password) = start(major)?;
    let home = pair.home()?;
    let data = home.path().join("data");
    let Some(mut streamed) = pg_basebackup(&pair.principal, pair.port(), &data) else {
        return Ok(());
    };
    done(&streamed.args(["-R", "-X", "stream"]).output()?)?;
    verify_backup(&pair.principal, &data)?;
    give(&data, &pair.principal)?;
    let mut standby = pair.principal.adopt(&data)?;
    standby.start()?;
    pair.compare(&standby)?;
    report(&pair.far, "the standby", |mirror| {
        mirror["standbys"].as_array().is_some_and(|standbys| !standbys.is_empty())
    })?;
    // As archives, with the log in them.
    let archives = home.path().join("archives");
    if let Some(mut fetched) = pg_basebackup(&pair.principal, pair.port(), &archives) {
        done(&fetched.args(["-X", "fetch", "-F", "tar", "-r", "100M"]).output()?)?;
        ensure!(archives.join("base.tar").metadata()?.len() > 1 << 20, "base.tar is small");
    }
    Ok(())
}

#[test]
fn a_standby_by_pg_basebackup_on_15() -> Result<()> {
    a_standby_by_pg_basebackup(15)
}

/// With FARSHORE_VERSIONS=all, which `make test-versions` sets and installs them for.
#[test]
fn a_standby_by_pg_basebackup_on_14_16_and_17() -> Result<()> {
    if std::env::var("FARSHORE_VERSIONS").as_deref() != Ok("all") {
        skipped(&this_test(), "FARSHORE_VERSIONS is not \"all\" (make test-versions)");
        return Ok(());
    }
    [14, 16, 17].into_iter().try_for_each(a_standby_by_pg_basebackup)
}

#[test]
fn a_standby_by_pg_basebackup_on_18() -> Result<()> {
    a_standby_by_pg_basebackup(18)
}

/// What cannot be had is said to who asks, and what breaks off leaves nothing behind.
#[test]
fn backups_that_cannot_be_had_and_backups_that_break_off() -> Result<()> {
    let (mut pair, _password) = start(15)?;
    let home = pair.home()?;
    let data = home.path().join("data");
    let Some(mut elsewhere) = pg_basebackup(&pair.principal, pair.port(), &data) else {
        return Ok(());
    };
    let refused = |command: &mut Command, why: &str| -> Result<()> {
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(!output.status.success() && said.contains(why), "{said}");
        Ok(())
    };
    // Nobody has the principal's server write to its own disk.
    let text = "BASE_BACKUP (TARGET 'server', TARGET_DETAIL '/tmp/farshore-never')";
    let psql = pair.principal.installation().command("psql").get_program().to_owned();
    let mut raw = Command::new(psql);
    let place = format!("host=127.0.0.1 port={} user=s replication=true", pair.port());
    raw.args([&place, "-c", text]).stdin(Stdio::null()).env("PGPASSWORD", PASSWORD);
    refused(&mut raw, "goes to the client")?;
    // A backup that takes its time, whose client goes, and one whose near end goes.
    let backups = "SELECT count(*) FROM pg_stat_activity \
                   WHERE application_name = 'farshore_backup_m'";
    let mut client = pair.principal.connect()?;
    let mut await_backups = |wanted: i64| {
        wait_until("backups at the principal", LONG, &[], || {
            let found: i64 = client.query_one(backups, &[])?.get(0);
            Ok((found == wanted).then_some(()))
        })
    };
    let mut slow = elsewhere.args(["-X", "none", "-r", "200k"]).stderr(Stdio::null()).spawn()?;
    await_backups(1)?;
    slow.kill()?;
    slow.wait()?;
    await_backups(0)?;
    let other = home.path().join("other");
    let Some(mut slow) = pg_basebackup(&pair.principal, pair.port(), &other) else {
        return Ok(());
    };
    let slow = slow.args(["-X", "none", "-r", "200k"]).stderr(Stdio::piped()).spawn()?;
    await_backups(1)?;
    pair.near.kill9()?;
    let ended = slow.wait_with_output()?;
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    ensure!(!ended.status.success() && said.contains("by its near end"), "{said}");
    await_backups(0)?;
    let late = home.path().join("late");
    let Some(mut late) = pg_basebackup(&pair.principal, pair.port(), &late) else {
        return Ok(());
    };
    refused(&mut late, "by its near end")
}

/// The server's own files are more than the log: keys, `pg_hba.conf`, passwords.
#[test]
fn backups_are_for_who_has_shown_a_password() -> Result<()> {
    let mut pair = Pair::start(15)?;
    pair.near.start()?;
    pair.far.start()?;
    report(&pair.far, "the far end", |mirror| mirror["state"] == "receiving")?;
    let home = pair.home()?;
    let data = home.path().join("data");
    let Some(mut unasked) = pg_basebackup(&pair.principal, pair.port(), &data) else {
        return Ok(());
    };
    let output = unasked.output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(!output.status.success() && said.contains("standby_password"), "{said}");
    Ok(())
}
