//! Farshore, as a process with a site file of its own.

use super::backlog::SCHEMA;
use super::ground::{Ground, SWITCH_MAX};
use crate::measurement::Drained;
use anyhow::{Context, Result, bail};
use farshore_testkit::process::{self, FarshoreBuilder, release_binary};
use farshore_testkit::wait::{log_tail, wait_until};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Its target.
pub const DATABASE: &str = "farshore";
/// How often a drain looks whether Farshore has given up. Asking costs it next to nothing.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// The optimised binary; built if need be.
///
/// # Errors
/// When the build fails.
pub fn binary() -> Result<PathBuf> {
    crate::progress::say("building farshore");
    release_binary()
}

/// What of `farshore status --json` is of interest here.
#[derive(Debug, Deserialize)]
struct Status {
    publications: Vec<Agent>,
    subscriptions: Vec<Agent>,
}

#[derive(Debug, Deserialize)]
struct Agent {
    name: String,
    state: String,
    error: Option<String>,
}

/// A site that has made its slot, has copied what was there, and is stopped.
#[derive(Debug)]
pub struct Farshore {
    builder: FarshoreBuilder,
    // Removed last.
    folder: TempDir,
}

impl Farshore {
    /// Writes the site file, starts Farshore, waits until it streams, stops it.
    ///
    /// # Errors
    /// When it does not get that far within a minute; with the end of its log.
    pub fn prepare(ground: &Ground<'_>, binary: &Path) -> Result<Farshore> {
        let folder = tempfile::Builder::new().prefix("farshore-bench").tempdir()?;
        let site = folder.path().join("site.toml");
        let text = format!(
            "[site]\nname = \"bench\"\ndata_dir = \"data\"\n\n\
             [publication.drain]\nsource = \"{}\"\ntables = [\"{SCHEMA}.*\"]\n\n\
             [subscription.drain]\npublication = \"drain\"\ntarget = \"{}\"\n",
            ground.source_url(),
            ground.target_url(DATABASE)
        );
        std::fs::write(&site, text).context("write the site file")?;
        let builder = process::Farshore::builder(binary, &site);
        let farshore = Farshore { builder, folder };
        let mut process = farshore.builder.start()?;
        let log = farshore.builder.log_path();
        wait_until("farshore's initial copy", SWITCH_MAX, &[log], || {
            ground.interrupt().check()?;
            farshore.check_alive(&mut process)?;
            Ok(farshore.is_streaming()?.then_some(()))
        })?;
        process.sigterm(SWITCH_MAX)?;
        ground.await_idle_slots()?;
        Ok(farshore)
    }

    /// Starts Farshore and measures until the last row is visible, then stops it.
    ///
    /// # Errors
    /// When the row does not arrive; with the end of Farshore's log.
    pub fn drain(&mut self, ground: &Ground<'_>) -> Result<Drained> {
        let meter = ground.begin()?;
        let mut process = self.builder.start()?;
        let mut looked = Instant::now();
        ground.await_marker(DATABASE, self.builder.log_path(), || {
            if looked.elapsed() >= LOOK_EVERY {
                looked = Instant::now();
                self.check_alive(&mut process)?;
            }
            Ok(())
        })?;
        let (seconds, cpu_publisher, cpu_subscriber) = meter.read(ground);
        let own = Some((process.cpu_seconds()?, process.peak_rss_bytes()));
        process.sigterm(SWITCH_MAX)?;
        ground.await_idle_slots()?;
        Ok(Drained { seconds, cpu_publisher, cpu_subscriber, own })
    }

    fn status(&self) -> Result<Option<Status>> {
        // The verb fails while the node is not up yet, and when an agent is in trouble; the
        // latter is seen once the agent stops, or in the log when the wait is over.
        let Ok(text) = self.builder.status_json() else { return Ok(None) };
        serde_json::from_str(&text).map(Some).context("read farshore's status")
    }

    fn is_streaming(&self) -> Result<bool> {
        let status = self.status()?;
        Ok(status.is_some_and(|s| s.subscriptions.iter().all(|agent| agent.state == "streaming")))
    }

    fn check_alive(&self, process: &mut process::Farshore) -> Result<()> {
        let log = self.builder.log_path();
        if let Some(status) = process.exit_status()? {
            bail!("farshore ended: {status}{}", log_tail(log, 25));
        }
        let Some(status) = self.status()? else { return Ok(()) };
        for agent in status.publications.iter().chain(&status.subscriptions) {
            if agent.state == "stopped" {
                let error = agent.error.as_deref().unwrap_or("no reason given");
                bail!("farshore's \"{}\" has stopped: {error}{}", agent.name, log_tail(log, 25));
            }
        }
        Ok(())
    }
}

impl Drop for Farshore {
    fn drop(&mut self) {
        if std::env::var_os("FARSHORE_KEEP").is_some() {
            self.folder.disable_cleanup(true);
            eprintln!("kept: {}", self.folder.path().display());
        }
    }
}
