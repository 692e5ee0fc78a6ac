//! `commission link` between two real sites over an emulated line: it finds what the line is, gets
//! nothing that it is not granted, and leaves nothing behind.

use anyhow::{Context, Result, ensure};
use farshore_testkit::skip::skipped;
use farshore_testkit::wait::wait_until;
use farshore_testkit::wan::{Wan, WanConfig};
use farshore_tests::{
    DATABASE, Direction, Pair, Upstream, certificate_lines, issue_certificates, publisher_cluster,
    subscriber_cluster,
};
use serde_json::Value;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const SCHEMA: &str = "CREATE TABLE t (id int PRIMARY KEY, v text NOT NULL)";
/// Text that is not the same again and again, some hundred bytes a row.
fn rows(from: u32) -> String {
    format!(
        "INSERT INTO t SELECT i, (SELECT string_agg(md5((i * j)::text), ' ') \
         FROM generate_series(1, 12) j) FROM generate_series({from}, {}) i",
        from + 99
    )
}

fn link(pair: &Pair, arguments: &[&str]) -> Command {
    let mut command = pair.site.command();
    command.args(["commission", "link"]).arg(pair.site.file());
    command.args(arguments).stdin(Stdio::null());
    command
}

fn run(mut command: Command) -> Result<Output> {
    command.output().context("run commission link")
}

fn report(output: &Output) -> Result<Value> {
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {said}", output.status);
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// The repeats of a figure.
fn figures(report: &Value, section: &str, at: &Value, metric: &str) -> Result<Vec<f64>> {
    let sections = report["sections"].as_array().context("sections")?;
    let found = sections.iter().find(|known| known["name"] == section);
    let rows = found
        .and_then(|found| found["rows"].as_array())
        .with_context(|| format!("there is no section {section} in {report:#}"))?;
    let row = rows.iter().find(|row| row["at"] == *at);
    let row = row.with_context(|| format!("there is no {at} in {section}: {rows:#?}"))?;
    let values = row["figures"][metric].as_array();
    let values = values.with_context(|| format!("there is no {metric} in {row:#}"))?;
    Ok(values.iter().filter_map(Value::as_f64).collect())
}

fn verdict(report: &Value) -> String {
    let lines = report["verdict"].as_array().into_iter().flatten();
    lines.filter_map(Value::as_str).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_line_is_found_to_be_what_it_is() -> Result<()> {
    if let Err(reason) = Wan::available() {
        skipped("the_line_is_found_to_be_what_it_is", &reason.to_string());
        return Ok(());
    }
    let wan = Wan::start(WanConfig { rtt: Duration::from_millis(20), ..WanConfig::default() })?;
    let publisher = publisher_cluster(15)?.place(wan.near()).start()?;
    let subscriber = subscriber_cluster(18)?.place(wan.far()).start()?;
    let mut pair = Pair::of(publisher, subscriber)?;
    pair.on_both(SCHEMA)?;
    pair.add_publication("p", &["public.t"], "")?;
    let target = pair.subscriber.url_from(wan.far(), DATABASE);
    pair.add_subscription("s", "p", &target)?;
    let mut upstream = Upstream::split_across(&mut pair, Some(&wan))?;
    upstream.site.start()?;
    pair.site.start()?;
    // Through the log, not by the copy: it is to be there for a sample.
    pair.assert_equal(&["public"])?;
    (1..3_000).step_by(100).try_for_each(|from| pair.publish(&rows(from)))?;
    pair.assert_equal(&["public"])?;

    // 10 Mbit/s and 20 ms, with the log of the publication.
    wan.set_rate(Some(10_000_000));
    let page = pair.site.directory().join("link.html");
    let page_argument = page.display().to_string();
    let arguments = [
        "up",
        "--json",
        "--html",
        &page_argument,
        "--publication",
        "p",
        "--connections",
        "1,2",
        "--seconds",
        "2",
        "--repeats",
        "1",
        "--load",
        "0.5",
    ];
    let narrow = report(&run(link(&pair, &arguments))?)?;
    for connections in [1, 2] {
        for direction in ["to here", "from here"] {
            let at = serde_json::json!([direction, connections]);
            let rate = figures(&narrow, "throughput", &at, "mb_per_s")?;
            // 1.25 MB/s on the wire are at most 1.21 in messages.
            ensure!(rate.iter().all(|r| (0.8..1.25).contains(r)), "{direction} {rate:?}");
        }
    }
    let idle = serde_json::json!(["idle"]);
    let least = figures(&narrow, "round_trip", &idle, "min_ms")?;
    ensure!(least.iter().all(|ms| (20.0..60.0).contains(ms)), "{least:?}");
    let log = serde_json::json!(["log of p"]);
    let ratio = figures(&narrow, "replay", &log, "ratio")?;
    ensure!(ratio.iter().all(|ratio| *ratio > 1.3), "hexadecimal digits shrink: {ratio:?}");
    let crossed = figures(&narrow, "replay", &log, "link_mb_per_s")?;
    ensure!(crossed.iter().all(|rate| (0.5..1.25).contains(rate)), "{crossed:?}");
    let packed = figures(&narrow, "compression", &serde_json::json!(["packs, level 3"]), "ratio")?;
    ensure!(packed.iter().all(|ratio| *ratio > 1.3), "{packed:?}");
    let all = figures(&narrow, "drain", &serde_json::json!(["all together"]), "mb_per_s")?;
    let sent = figures(&narrow, "replay", &log, "log_mb_per_s")?;
    ensure!(all == sent, "nothing but the link is known: {all:?} {sent:?}");
    let said = verdict(&narrow);
    for words in ["would drain at", "Under a load of 0.500 MB/s", "Weakest part: the line"] {
        ensure!(said.contains(words), "{words}\n{said}");
    }
    let page = std::fs::read_to_string(&page)?;
    ensure!(page.contains("<svg") && !page.contains("http"), "{page}");
    println!("{said}");

    // A line of 1 Gbit/s and 77 ms, with rows of a table; nothing is written where they are.
    wan.set_rate(Some(1_000_000_000));
    wan.set_delay(Duration::from_millis(77));
    let server = pair.site.url_of(&pair.subscriber, DATABASE);
    let arguments = [
        "up",
        "--json",
        "--sample",
        &server,
        "--seconds",
        "1",
        "--repeats",
        "1",
        "--target-rate",
        "0.001",
    ];
    let wide = report(&run(link(&pair, &arguments))?)?;
    let least = figures(&wide, "round_trip", &idle, "min_ms")?;
    ensure!(least.iter().all(|ms| (77.0..150.0).contains(ms)), "{least:?}");
    for connections in [1, 4] {
        let at = serde_json::json!(["to here", connections]);
        let rate = figures(&wide, "throughput", &at, "mb_per_s")?;
        ensure!(rate.iter().all(|rate| (0.01..125.0).contains(rate)), "{rate:?}");
    }
    // The test's own table of marks is among the largest, too.
    let rows = serde_json::json!(["rows of t, farshore_marks.mark"]);
    let ratio = figures(&wide, "replay", &rows, "ratio")?;
    ensure!(ratio.iter().all(|ratio| *ratio > 1.0), "{ratio:?}");
    let said = verdict(&wide);
    for words in ["at 0.001 MB/s", "Weakest part: target", "(--source-rate)"] {
        ensure!(said.contains(words), "{words}\n{said}");
    }
    // Half of 4 MiB there and back in 77 ms or, on a busy machine, somewhat more.
    let allowed = said.split("allow about ").nth(1).and_then(|rest| rest.split(' ').next());
    let allowed: f64 = allowed.with_context(|| said.clone())?.parse()?;
    ensure!((14.0..27.3).contains(&allowed), "{allowed} MB/s\n{said}");
    // Both still replicate.
    wan.set_rate(Some(100_000_000));
    pair.publish("INSERT INTO t VALUES (0, 'after')")?;
    pair.assert_equal(&["public"])?;
    pair.site.stop()?;
    upstream.site.stop()?;
    Ok(())
}

#[test]
fn a_line_is_measured_only_by_who_may_and_one_at_a_time() -> Result<()> {
    let mut pair = Pair::new(Direction::UP, &["public.*"], SCHEMA)?;
    pair.add_publication("secret", &[], "")?;
    let mut upstream = Upstream::split(&mut pair)?;
    upstream.site.replace(", \"secret\"", "")?;
    let quick = ["--seconds", "0.05", "--repeats", "1", "--json"];
    let refused = |pair: &Pair, arguments: &[&str], words: &str| -> Result<()> {
        let output = run(link(pair, arguments))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(1) && output.stdout.is_empty(), "{output:?}");
        ensure!(said.contains(words), "{words}: {said}");
        Ok(())
    };
    refused(&pair, &["upp"], "Did you mean \"up\"?")?;
    refused(&pair, &["up"], "Check that farshore runs there")?;
    upstream.site.start()?;
    upstream.site.await_log("downstream sites may connect", SOON)?;
    let with = |more: &[&'static str]| [&["up"], more, &quick].concat();
    refused(&pair, &with(&["--publication", "secret"]), "not granted to site \"t1\"")?;
    refused(&pair, &with(&["--publication", "none"]), "not granted to site \"t1\"")?;
    refused(&pair, &with(&["--publication", "p"]), "too few to stand for it")?;
    refused(&pair, &["up", "--connections", "99"], "1 to 16 connections")?;
    refused(&pair, &["up", "--load", "0"], "above 0")?;
    refused(&pair, &["up", "--html", "/nowhere/a.html"], "no folder /nowhere")?;

    // While one measures another is sent away; interrupted, it leaves the way free.
    let mut first = link(&pair, &["up", "--seconds", "30", "--connections", "2"]);
    let mut first = first.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    upstream.site.await_log("the line is being measured", SOON)?;
    refused(&pair, &with(&[]), "is being measured; try again")?;
    let pid = i32::try_from(first.id())?;
    // SAFETY: a system call without memory; the process is a child that was not waited for.
    unsafe { libc::kill(pid, libc::SIGINT) };
    ensure!(first.wait()?.code() == Some(130), "interrupted");
    upstream.site.await_log("measuring the line ended", SOON)?;
    report(&run(link(&pair, &with(&[])))?)?;
    // Also when it cannot say goodbye.
    let begun = || upstream.site.log().matches("the line is being measured").count();
    let before = begun();
    let mut first = link(&pair, &["up", "--seconds", "30", "--connections", "2"]);
    let mut first = first.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
    wait_until("it to measure", SOON, &[], || Ok((begun() > before).then_some(())))?;
    first.kill()?;
    first.wait()?;
    report(&run(link(&pair, &with(&[])))?)?;

    // Nothing of it is in the folder of either site.
    let files = |site: &farshore_tests::Site| -> Result<Vec<String>> {
        let entries = std::fs::read_dir(site.directory())?;
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    };
    ensure!(files(&pair.site)? == ["site.toml"], "{:?}", files(&pair.site)?);

    // A site that nobody there knows.
    let folder = upstream.certificates.path().to_owned();
    issue_certificates(&folder, &["stranger"])?;
    pair.site.replace("name = \"t1\"", "name = \"stranger\"")?;
    let (known, stranger) =
        (certificate_lines(&folder, "t1"), certificate_lines(&folder, "stranger"));
    refused(&pair, &["up"], "is for site \"t1\", and this is \"stranger\"")?;
    pair.site.replace(&known, &stranger)?;
    refused(&pair, &["up"], "no [downstream.stranger]")?;
    upstream.site.stop()?;
    Ok(())
}
