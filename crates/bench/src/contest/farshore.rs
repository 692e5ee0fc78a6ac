//! Farshore, as a process with a site file of its own.

use super::ground::{Ground, SWITCH_MAX};
use super::{Contender, Contestant};
use crate::backlog::{Backlog, SCHEMA};
use anyhow::{Context, Result, bail};
use farshore_testkit::process::{self, FarshoreBuilder, release_binary};
use farshore_testkit::wait::{log_tail, wait_until};
use serde::Deserialize;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tempfile::TempDir;

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

/// A site that has made its slot and has copied what was there.
#[derive(Debug)]
pub struct Farshore<'a> {
    ground: &'a Ground<'a>,
    builder: FarshoreBuilder,
    process: Option<process::Farshore>,
    looked: Instant,
    // Removed last.
    folder: TempDir,
}

impl<'a> Farshore<'a> {
    /// Writes the site file, starts Farshore, waits until it streams, stops it.
    ///
    /// # Errors
    /// When it does not get that far within a minute; with the end of its log.
    pub fn prepare(ground: &'a Ground<'a>, backlog: &dyn Backlog) -> Result<Farshore<'a>> {
        let folder = tempfile::Builder::new().prefix("farshore-bench").tempdir()?;
        let site = folder.path().join("site.toml");
        let mut text = format!(
            "[site]\nname = \"bench\"\ndata_dir = \"data\"\n\n\
             [publication.bench]\nsource = \"{}\"\ntables = [\"{SCHEMA}.*\"]\n",
            ground.publisher_url()
        );
        for name in ground.targets(Contender::Farshore) {
            let target = ground.farshore_url(&name, backlog);
            // Writing to a String cannot fail.
            let _ = write!(
                text,
                "\n[subscription.{name}]\npublication = \"bench\"\ntarget = \"{target}\"\n"
            );
        }
        std::fs::write(&site, text).context("write the site file")?;
        let builder = process::Farshore::builder(ground.binary(), &site);
        let looked = Instant::now();
        let mut farshore = Farshore { ground, builder, process: None, looked, folder };
        farshore.start()?;
        farshore.await_agents("farshore's initial copy", |status| {
            status.subscriptions.iter().all(|agent| agent.state == "streaming")
        })?;
        farshore.stop()?;
        Ok(farshore)
    }

    fn await_agents(&mut self, what: &str, ready: impl Fn(&Status) -> bool) -> Result<()> {
        let log = self.log();
        wait_until(what, SWITCH_MAX, &[&log], || {
            self.ground.interrupt().check()?;
            self.look()?;
            Ok(self.status()?.filter(|status| ready(status)).map(|_| ()))
        })
    }

    fn status(&self) -> Result<Option<Status>> {
        // The verb fails while the node is not up yet, and when an agent is in trouble; the
        // latter is seen once the agent stops, or in the log when the wait is over.
        let Ok(text) = self.builder.status_json() else { return Ok(None) };
        serde_json::from_str(&text).map(Some).context("read farshore's status")
    }

    fn look(&mut self) -> Result<()> {
        let log = self.builder.log_path();
        if let Some(process) = &mut self.process
            && let Some(status) = process.exit_status()?
        {
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

impl Contestant for Farshore<'_> {
    fn contender(&self) -> Contender {
        Contender::Farshore
    }

    fn start(&mut self) -> Result<()> {
        self.process = Some(self.builder.start()?);
        self.looked = Instant::now();
        Ok(())
    }

    fn check(&mut self) -> Result<()> {
        if self.looked.elapsed() < LOOK_EVERY {
            return Ok(());
        }
        self.looked = Instant::now();
        self.look()
    }

    fn own(&mut self) -> Result<Option<(f64, u64)>> {
        match &mut self.process {
            Some(process) => Ok(Some((process.cpu_seconds()?, process.peak_rss_bytes()))),
            None => Ok(None),
        }
    }

    fn stop(&mut self) -> Result<()> {
        if let Some(mut process) = self.process.take() {
            process.sigterm(SWITCH_MAX)?;
        }
        self.ground.await_idle_slots()
    }

    fn log(&self) -> PathBuf {
        self.builder.log_path().to_owned()
    }
}

impl Drop for Farshore<'_> {
    fn drop(&mut self) {
        if std::env::var_os("FARSHORE_KEEP").is_some() {
            self.folder.disable_cleanup(true);
            eprintln!("kept: {}", self.folder.path().display());
        }
    }
}
