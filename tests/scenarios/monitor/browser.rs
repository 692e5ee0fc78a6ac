//! The page in a real browser: what it says against what the databases hold.

use crate::asking::Monitor;
use anyhow::{Context, Result, ensure};
use farshore_testkit::skip::skipped;
use farshore_testkit::wait::wait_until;
use farshore_tests::{DATABASE, Direction, Pair};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const ROWS: u64 = 30_000;
const NAME: &str = "<img src=x onerror=alert(1)>";

/// Where scripts/setup --browser puts what the browser is driven with.
fn modules() -> PathBuf {
    let setup = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/setup");
    let said = Command::new(setup).arg("--where").output();
    let cache = said.map(|said| String::from_utf8_lossy(&said.stdout).trim().to_owned());
    PathBuf::from(cache.unwrap_or_default()).join("browser")
}

/// What is missing on this machine.
pub fn missing() -> Option<String> {
    let modules = modules();
    for part in ["playwright-core", "axe-core"] {
        if !modules.join("node_modules").join(part).is_dir() {
            return Some(format!("{part} is not in {}", modules.display()));
        }
    }
    if !Path::new("/usr/bin/chromium").exists() {
        return Some("there is no /usr/bin/chromium".to_owned());
    }
    let node = Command::new("node").arg("--version").output();
    node.is_err().then(|| "there is no node".to_owned())
}

/// Looks at the page; pictures are kept where FARSHORE_PICTURES says.
fn look(monitor: Monitor) -> Result<Value> {
    run("look.mjs", monitor, &["s", "p"])
}

/// Runs one of the scripts in `tests/browser`, and checks what holds for every page.
pub fn run(script: &str, monitor: Monitor, arguments: &[&str]) -> Result<Value> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("browser").join(script);
    let kept = std::env::var_os("FARSHORE_PICTURES").map(PathBuf::from);
    let folder = tempfile::tempdir()?;
    let pictures = kept.unwrap_or_else(|| folder.path().to_owned());
    let output = Command::new("node")
        .arg(script)
        .arg(modules())
        .arg(format!("http://{}", monitor.address))
        .arg(pictures)
        .args(arguments)
        .output()?;
    let told = String::from_utf8_lossy(&output.stdout);
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the browser: {error}");
    let found: Value = serde_json::from_str(&told)?;
    for list in ["errors", "serious", "wide", "foreign"] {
        let list_is_empty = found[list].as_array().is_some_and(Vec::is_empty);
        ensure!(list_is_empty, "{list}: {:#}", found[list]);
    }
    Ok(found)
}

/// What the page shows as `12.3 MB`.
pub fn bytes(text: &str) -> Result<f64> {
    let (number, unit) = text.split_once(' ').context("no unit")?;
    let power = ["B", "KB", "MB", "GB"].iter().position(|known| *known == unit).context("unit")?;
    Ok(number.parse::<f64>()? * 1024_f64.powi(i32::try_from(power)?))
}

fn text<'a>(found: &'a Value, figure: &str) -> Result<&'a str> {
    found["figures"][figure].as_str().with_context(|| format!("no figure {figure} in {found:#}"))
}

#[test]
fn the_page_says_what_the_databases_hold() -> Result<()> {
    if let Some(why) = missing() {
        let why = format!("{why} (scripts/setup --browser)");
        skipped("the_page_says_what_the_databases_hold", &why);
        return Ok(());
    }
    let mut pair = Pair::bare(Direction::UP)?;
    pair.site.add_to_site("monitor = \"127.0.0.1:0\"\n")?;
    pair.on_both(&format!(
        "CREATE TABLE t (id integer PRIMARY KEY, v text); \
         CREATE TABLE \"{NAME}\" (id integer PRIMARY KEY, v text)"
    ))?;
    pair.publish(&format!("INSERT INTO \"{NAME}\" VALUES (1, 'v')"))?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.await_arrival()?;
    let monitor = Monitor::of(&pair.site)?;

    // A subscriber that stands still with a backlog.
    ensure!(monitor.post("/api/v1/subscriptions/s/pause", "{}")?.status == 200);
    pair.publish(&format!("INSERT INTO t SELECT i, 'v' FROM generate_series(1, {ROWS}) AS i"))?;
    let end = pair.publisher_says("SELECT pg_current_wal_lsn()")?;
    wait_until("the store to have it", SOON, &[], || {
        let status = monitor.status()?;
        let durable = status["publications"][0]["durable"].as_str().unwrap_or_default();
        let reached = pair.publisher_says(&format!("SELECT '{durable}'::pg_lsn >= '{end}'"))?;
        Ok((reached == "t").then_some(()))
    })?;
    let applied = pair.subscriber_says("SELECT applied FROM farshore.subscription")?;
    let found = look(monitor)?;
    ensure!(found["state"] == "paused", "{found:#}");
    let lacks = |end: &str| -> Result<f64> {
        let query = format!("SELECT '{end}'::pg_lsn - '{applied}'::pg_lsn");
        Ok(pair.publisher_says(&query)?.parse()?)
    };
    // The log goes on by itself, and what is shown has two digits or more.
    let (least, most) =
        (lacks(&end)?, lacks(&pair.publisher_says("SELECT pg_current_wal_lsn()")?)?);
    let shown = bytes(text(&found, "To apply")?)?;
    ensure!(least * 0.95 <= shown && shown <= most * 1.05, "{shown} shown, {least} to {most} lack");
    ensure!(text(&found, "Latency")? != "0 ms");
    let listed: Vec<&str> =
        found["overview"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    ensure!(listed == ["p", "s"], "{listed:?}");
    // The page's own button, by keyboard, let it go on.
    ensure!(found["outcome"] == "subscription \"s\" goes on", "{found:#}");
    pair.await_arrival()?;
    ensure!(pair.subscriber_says("SELECT count(*) FROM t")? == ROWS.to_string());

    // Load, and then a row that is not there, in a table with a hostile name.
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                pair.publish("UPDATE t SET v = v || 'x' WHERE id <= 100")?;
            }
            anyhow::Ok(())
        });
        let moving = wait_until("rates to be shown", SOON, &[], || {
            let rates = &monitor.status()?["rates"]["subscriptions"]["s"];
            Ok(rates["changes_per_second"].as_f64().filter(|rate| *rate > 0.0))
        });
        stop.store(true, Ordering::Relaxed);
        load.join().map_err(|_| anyhow::anyhow!("the load died"))??;
        moving
    })?;
    pair.subscriber.execute_script(&format!("DELETE FROM \"{NAME}\""))?;
    pair.publish(&format!("UPDATE \"{NAME}\" SET v = 'w' WHERE id = 1"))?;
    pair.site.await_trouble("s", "onerror")?;
    wait_until("the error to be shown", SOON, &[], || {
        Ok((monitor.status()?["subscriptions"][0]["state"] == "stopped").then_some(()))
    })?;
    pair.subscriber.execute_script(&format!("INSERT INTO \"{NAME}\" VALUES (1, 'v')"))?;
    let found = look(monitor)?;
    ensure!(found["state"] == "stopped" && found["after"] != "stopped", "{found:#}");
    pair.assert_equal(&["public"])
}
