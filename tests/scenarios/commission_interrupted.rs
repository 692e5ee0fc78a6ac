//! `commission disk`, `log` and `commit`, ended from outside at any moment: nothing is left behind.

use anyhow::{Context, Result, ensure};
use farshore_testkit::postgres::{Cluster, Installation};
use farshore_testkit::process::faults_binary;
use farshore_testkit::wait::wait_until;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
/// How they are ended; only the last gives no chance to clean up.
const SIGNALS: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGKILL];
/// Ends of each command by each signal.
const TIMES: usize = 2;

/// Runs it, and sends the signal when it has said so many lines of what it does.
fn end_after(arguments: &[&str], lines: usize, signal: i32) -> Result<()> {
    let mut child = Command::new(faults_binary()?)
        .arg("commission")
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("run farshore commission")?;
    let said = child.stderr.take().context("standard error")?;
    let mut said = BufReader::new(said).lines();
    let heard: Vec<String> = said.by_ref().take(lines).collect::<Result<_, _>>()?;
    ensure!(heard.len() == lines, "it ended by itself: {heard:?}");
    let pid = i32::try_from(child.id())?;
    // SAFETY: a system call without memory; the process is a child that was not waited for.
    unsafe { libc::kill(pid, signal) };
    // What it says further must find a reader.
    let rest: Vec<String> = said.collect::<Result<_, _>>()?;
    let ended = child.wait()?;
    if signal == libc::SIGKILL {
        ensure!(ended.code().is_none(), "{ended}: {rest:?}");
    } else {
        ensure!(ended.code() == Some(130), "{ended} after {signal}: {heard:?} {rest:?}");
        ensure!(rest.iter().any(|line| line.contains("nothing was left behind")), "{rest:?}");
    }
    Ok(())
}

/// Waits until the server has neither a schema nor a busy session of it.
fn await_nothing_left(cluster: &Cluster, after: &str) -> Result<()> {
    let mut client = cluster.connect()?;
    let sql = "SELECT (SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'farshore%') \
               + (SELECT count(*) FROM pg_stat_activity \
                  WHERE application_name = 'farshore commission')";
    let log = cluster.log_path();
    wait_until(&format!("the server to be rid of all after {after}"), SOON, &[&log], || {
        Ok((client.query_one(sql, &[])?.get::<_, i64>(0) == 0).then_some(()))
    })
}

#[test]
fn nothing_is_left_on_a_server_or_a_disk() -> Result<()> {
    let seed = farshore_testkit::seed();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let cluster = Cluster::builder(&Installation::find(15)?).start()?;
    let url = cluster.url("postgres");
    let folder = tempfile::tempdir()?;
    let disk = folder.path().display().to_string();
    // Longer than any of them is let run.
    let log = ["log", &url, "--rows", "2000", "--transaction-rows", "1,100", "--seconds", "0.2"];
    let commit = ["commit", &url, "--statement-rows", "1,1000,100000", "--seconds", "0.2"];
    let writes = ["disk", &disk, "--size", "16MB", "--seconds", "0.05"];
    for signal in SIGNALS {
        for _ in 0..TIMES {
            end_after(&log, rng.random_range(1..8), signal)?;
            await_nothing_left(&cluster, &format!("log and signal {signal}"))?;
            end_after(&commit, rng.random_range(1..6), signal)?;
            await_nothing_left(&cluster, &format!("commit and signal {signal}"))?;
            end_after(&writes, rng.random_range(1..12), signal)?;
            let left = std::fs::read_dir(folder.path())?.count();
            ensure!(left == 0, "{left} files after disk and signal {signal}");
        }
    }
    // Commits that wait for a standby that is not there.
    let mut client = cluster.connect()?;
    client.batch_execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")?;
    client.batch_execute("SELECT pg_reload_conf()")?;
    let names = "SELECT current_setting('synchronous_standby_names')";
    wait_until("the server to take the setting", SOON, &[&cluster.log_path()], || {
        Ok((client.query_one(names, &[])?.get::<_, String>(0) == "nobody").then_some(()))
    })?;
    for signal in SIGNALS {
        end_after(&log, 1, signal)?;
        await_nothing_left(&cluster, &format!("a commit that waits and signal {signal}"))?;
    }
    Ok(())
}
