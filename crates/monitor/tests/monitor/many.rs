//! A site of a thousand subscriptions.

use crate::site::{Fake, cache, events, get, start};
use anyhow::{Context, Result, ensure};
use farshore_monitor::report::SubscriptionReport;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

const SUBSCRIPTIONS: usize = 1_000;

/// Opens the page and tells when its rows were there, all of them, and one was opened.
const SCRIPT: &str = r##"
const [modules, url] = process.argv.slice(1);
const { chromium } = require(`${modules}/node_modules/playwright-core`);
(async () => {
  const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: ["--no-sandbox"] });
  const page = await browser.newPage();
  page.on("pageerror", (error) => console.error(String(error)));
  page.on("console", (message) => { if (message.type() === "error") console.error(message.text()); });
  const begun = Date.now();
  await page.goto(url);
  await page.waitForSelector("#all");
  const shown = Date.now() - begun;
  await page.click("#all");
  await page.waitForFunction(() => document.querySelectorAll("main tbody tr").length > 1000);
  await page.click("a[href='#/subscription/s999']");
  await page.waitForSelector("main h1:has-text('s999')");
  console.log(`${shown} ${Date.now() - begun}`);
  const heap = await page.evaluate(() => performance.memory.usedJSHeapSize);
  console.log(`the page's heap: ${Math.round(heap / 1048576)} MB`);
  // The other views, with something in every field.
  for (const [hash, text] of [["#/mirror/all", "Standbys"], ["#/publication/dublin%2Fsales", "Tracer tokens"]]) {
    await page.goto(`${url}/${hash}`);
    await page.waitForSelector(`main h2:has-text('${text}')`);
  }
  await browser.close();
})();
"##;

/// Resident memory of this process, bytes.
fn resident_bytes() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line.and_then(|line| line.trim().split(' ').next()).context("no VmRSS")?;
    Ok(kilobytes.parse::<u64>()? * 1024)
}

/// A site of many subscriptions.
fn many() -> Arc<Fake> {
    let source = Fake::full();
    source.set(|report| {
        report.subscriptions = (0..SUBSCRIPTIONS)
            .map(|nth| SubscriptionReport {
                name: format!("s{nth}"),
                publication: "dublin/sales".to_owned(),
                state: "streaming".to_owned(),
                applied: "0/16B3748".to_owned(),
                latency_ms: Some(1.5),
                ..SubscriptionReport::default()
            })
            .collect();
    });
    source
}

/// Pages that are kept up to date and take nothing hold the node's memory for no more than what one
/// look is: each misses looks instead.
#[tokio::test(flavor = "multi_thread")]
async fn pages_that_take_nothing_cost_no_memory() -> Result<()> {
    const PAGES: usize = 24;
    const MEGABYTES_MAX: u64 = 160;
    let before = resident_bytes()?;
    let monitor = start(many()).await?;
    let mut pages = Vec::new();
    for _ in 0..PAGES {
        let mut page = events(&monitor).await?;
        page.next().await?;
        pages.push(page);
    }
    // One takes what comes: when it has seen a dozen looks, the others have missed most.
    let mut reader = pages.pop().context("no page")?;
    for _ in 0..12 {
        reader.next().await?;
    }
    let more = resident_bytes()?.saturating_sub(before);
    println!("{SUBSCRIPTIONS} subscriptions, {PAGES} pages: {} MB more", more >> 20);
    ensure!(more >> 20 < MEGABYTES_MAX, "{} MB more than before", more >> 20);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_subscriptions_stay_usable() -> Result<()> {
    let monitor = start(many()).await?;
    let state = get(&monitor, "/api/v1/status").await?.body.len();
    let metrics = get(&monitor, "/metrics").await?.body;
    let series = metrics.lines().filter(|line| line.contains("subscription=\"s")).count();
    ensure!(series >= SUBSCRIPTIONS * 10, "{series} series");
    println!("{SUBSCRIPTIONS} subscriptions: {state} bytes of state, {} of metrics", metrics.len());
    let modules = cache().join("browser").display().to_string();
    let is_there = |path: &str| Path::new(path).exists();
    if !is_there(&format!("{modules}/node_modules/playwright-core"))
        || !is_there("/usr/bin/chromium")
    {
        println!("skipped the browser: none is here (scripts/setup --browser)");
        return Ok(());
    }
    let url = format!("http://{}", monitor.address);
    let looked = tokio::task::spawn_blocking(move || {
        Command::new("node").args(["-e", SCRIPT, &modules, &url]).output()
    });
    let output = looked.await??;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && error.is_empty(), "the browser: {error}");
    let told = String::from_utf8_lossy(&output.stdout);
    println!(
        "milliseconds until the page was there, and until all were and one was opened: {}",
        told.trim()
    );
    Ok(())
}
