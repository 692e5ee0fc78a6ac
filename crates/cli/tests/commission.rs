//! `farshore commission` as a process: what it prints, and what is left when it is ended by signals.

use anyhow::{Context, Result, ensure};
use farshore_testkit::postgres::{Cluster, Installation};
use farshore_testkit::wait::wait_until;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

fn farshore(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farshore"));
    command.arg("commission").args(arguments).stdin(Stdio::null());
    command
}

/// Starts it, and returns when it says a line that contains `word` (on standard error).
fn started(arguments: &[&str], word: &str) -> Result<Child> {
    let mut child = farshore(arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    let stderr = child.stderr.take().context("stderr")?;
    let mut said = Vec::new();
    for line in BufReader::new(stderr).lines() {
        let line = line?;
        if line.contains(word) {
            return Ok(child);
        }
        said.push(line);
    }
    let status = child.wait()?;
    anyhow::bail!("it ended ({status}) without saying \"{word}\": {said:?}")
}

fn signal(child: &Child, signal: i32) {
    // SAFETY: kill has no memory preconditions, and the child is ours and not reaped yet.
    unsafe { libc::kill(child.id() as i32, signal) };
}

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).unwrap().next().is_none()
}

const LONG: [&str; 4] = ["--size", "32MB", "--seconds", "600"];

#[test]
fn a_disk_measurement_leaves_nothing_behind_whatever_ends_it() -> Result<()> {
    for (number, code) in [(libc::SIGINT, 130), (libc::SIGTERM, 130), (libc::SIGKILL, -1)] {
        let folder = tempfile::tempdir()?;
        let path = folder.path().to_str().context("path")?;
        let arguments: Vec<&str> = ["disk", path].into_iter().chain(LONG).collect();
        let mut child = started(&arguments, "round 1")?;
        ensure!(is_empty(folder.path()), "there is a file with a name");
        signal(&child, number);
        let status = child.wait()?;
        ensure!(status.code().unwrap_or(-1) == code, "{number}: {status}");
        ensure!(code >= 0 || status.signal() == Some(number), "{number}: {status}");
        ensure!(is_empty(folder.path()), "{number}: something is left");
    }
    Ok(())
}

#[test]
fn a_disk_report_is_json_a_page_and_comparable_with_itself() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (data, kept) = (folder.path().join("data"), folder.path().join("kept"));
    std::fs::create_dir(&data)?;
    std::fs::create_dir(&kept)?;
    let page = kept.join("page.html");
    let sizes = ["--write-sizes", "4kB,64kB", "--outstanding", "1,2", "--clients", "1,3"];
    let rest = ["--size", "16MB", "--seconds", "0.01", "--sustained", "0.0001", "--json"];
    let output = farshore(&["disk", data.to_str().context("path")?, "--html"])
        .arg(&page)
        .args(sizes)
        .args(rest)
        .output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let names: Vec<&str> = report["sections"]
        .as_array()
        .context("sections")?
        .iter()
        .filter_map(|section| section["name"].as_str())
        .collect();
    ensure!(names == ["writes", "methods", "group-commit", "sustained"], "{names:?}");
    let row = &report["sections"][0]["rows"][0];
    ensure!(row["at"] == serde_json::json!([4096, 1]), "{row}");
    ensure!(row["figures"]["mb_per_s"].as_array().is_some_and(|all| all.len() == 3), "{row}");
    ensure!(std::fs::read_to_string(&page)?.contains("<svg"));
    ensure!(is_empty(&data), "something is left");

    let file = kept.join("a.json");
    std::fs::write(&file, &output.stdout)?;
    let output = farshore(&["compare"]).arg(&file).arg(&file).output()?;
    let text = String::from_utf8(output.stdout)?;
    ensure!(text.contains("Within the noise") && !text.contains("Changed beyond"), "{text}");
    Ok(())
}

#[test]
fn what_cannot_be_measured_is_said_with_what_to_do() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().to_str().context("path")?;
    for (arguments, said) in [
        (["disk", path, "--size", "1000TB"], "ask for a smaller file with --size"),
        (["disk", path, "--html", "/no/such/folder/x.html"], "no folder /no/such/folder"),
        (["disk", "/proc/self/exe", "--size", "16MB"], "is no folder"),
        (["log", "postgres://a@b/c?nonsense=1", "--rows", "1"], "nonsense"),
    ] {
        let output = farshore(&arguments).output()?;
        let text = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(1) && text.contains(said), "{arguments:?}: {text}");
    }
    let output = farshore(&["disk", path, "--size", "much"]).output()?;
    ensure!(output.status.code() == Some(2), "{}", output.status);
    ensure!(is_empty(folder.path()));
    Ok(())
}

#[test]
fn a_log_measurement_leaves_nothing_behind_whatever_ends_it() -> Result<()> {
    let cluster = Cluster::builder(&Installation::find(18)?).start()?;
    let url = cluster.url("postgres");
    let schemas = || -> Result<i64> {
        let sql = "SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'farshore%'";
        Ok(cluster.connect()?.query_one(sql, &[])?.get(0))
    };
    let arguments = ["log", &url, "--rows", "1000000", "--clients", "4", "--max-log", "999GB"];
    let arguments: Vec<&str> = arguments
        .into_iter()
        .chain(["--transaction-rows", "100000", "--row-size", "100"])
        .collect();
    for number in [libc::SIGINT, libc::SIGTERM] {
        let mut child = started(&arguments, "round 1")?;
        ensure!(schemas()? == 1);
        signal(&child, number);
        let status = child.wait()?;
        ensure!(status.code() == Some(130), "{number}: {status}");
        ensure!(schemas()? == 0, "{number}: the schema is left");
    }
    // Nobody is left here to remove anything: the server does it.
    let mut child = started(&arguments, "round 1")?;
    ensure!(schemas()? == 1);
    signal(&child, libc::SIGKILL);
    child.wait()?;
    wait_until("the server to remove the schema", Duration::from_secs(60), &[], || {
        Ok((schemas()? == 0).then_some(()))
    })
}
