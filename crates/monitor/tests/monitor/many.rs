//! A site of a thousand subscriptions.

use crate::site::{Fake, get, start};
use anyhow::{Result, ensure};
use farshore_monitor::report::SubscriptionReport;
use std::path::Path;
use std::process::Command;

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
  // The other views, with something in every field.
  for (const [hash, text] of [["#/mirror/all", "Standbys"], ["#/publication/dublin%2Fsales", "Tracer tokens"]]) {
    await page.goto(`${url}/${hash}`);
    await page.waitForSelector(`main h2:has-text('${text}')`);
  }
  await browser.close();
})();
"##;

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_subscriptions_stay_usable() -> Result<()> {
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
    let monitor = start(source).await?;
    let state = get(&monitor, "/api/v1/status").await?.body.len();
    let metrics = get(&monitor, "/metrics").await?.body;
    let series = metrics.lines().filter(|line| line.contains("subscription=\"s")).count();
    ensure!(series >= SUBSCRIPTIONS * 10, "{series} series");
    println!("{SUBSCRIPTIONS} subscriptions: {state} bytes of state, {} of metrics", metrics.len());
    let modules = std::env::var("FARSHORE_CACHE").unwrap_or("/var/cache/farshore".to_owned());
    let modules = format!("{modules}/browser");
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
