//! Farshore, as a process with a site file of its own.

use super::ground::{DRAIN_MAX, Ground, SWITCH_MAX};
use super::{Contender, Contestant};
use crate::backlog::{SCHEMA, Tables};
use anyhow::{Context, Result, bail};
use farshore_testkit::process::{self, FarshoreBuilder, release_binary};
use farshore_testkit::wait::{log_tail, wait_until};
use serde::Deserialize;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
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
pub struct Status {
    /// Log readers.
    pub publications: Vec<Agent>,
    /// Distribution.
    pub subscriptions: Vec<Agent>,
}

/// One agent.
#[derive(Debug, Deserialize)]
pub struct Agent {
    name: String,
    state: String,
    error: Option<String>,
    #[serde(default)]
    durable: String,
    #[serde(default)]
    applied: String,
    /// Row changes on its connection.
    pub changes: u64,
}

impl Agent {
    /// Of a publication: the newest position in the store; 0 before there is one.
    pub fn durable(&self) -> u64 {
        parse_lsn(&self.durable).unwrap_or(0)
    }

    /// Of a subscription: the newest position on the target; 0 before there is one.
    pub fn applied(&self) -> u64 {
        parse_lsn(&self.applied).unwrap_or(0)
    }
}

/// A site that has made its slot and has copied what was there.
#[derive(Debug)]
pub struct Farshore<'a> {
    ground: &'a Ground<'a>,
    builder: FarshoreBuilder,
    binary: PathBuf,
    site: PathBuf,
    process: Option<process::Farshore>,
    paused: bool,
    /// Of earlier processes that were part of the work.
    peak_rss_bytes: u64,
    looked: Instant,
    // Removed last.
    folder: TempDir,
}

impl<'a> Farshore<'a> {
    /// Writes the site file, starts Farshore, waits until it streams, stops it.
    ///
    /// # Errors
    /// When it does not get that far within a minute; with the end of its log.
    pub fn prepare(ground: &'a Ground<'a>, tables: &dyn Tables) -> Result<Farshore<'a>> {
        let folder = tempfile::Builder::new().prefix("farshore-bench").tempdir()?;
        let site = folder.path().join("site.toml");
        let mut text = format!(
            "[site]\nname = \"bench\"\ndata_dir = \"data\"\n\n\
             [publication.bench]\nsource = \"{}\"\ntables = [\"{SCHEMA}.*\"]\n",
            ground.publisher_url()
        );
        for name in ground.targets(Contender::Farshore) {
            let target = ground.farshore_url(&name, tables);
            // Writing to a String cannot fail.
            let _ = write!(
                text,
                "\n[subscription.{name}]\npublication = \"bench\"\ntarget = \"{target}\"\n"
            );
            if let Some(streams) = ground.streams {
                let _ = writeln!(text, "streams = {streams}");
            }
        }
        std::fs::write(&site, text).context("write the site file")?;
        let builder = process::Farshore::builder(ground.binary(), &site);
        let mut farshore = Farshore {
            ground,
            builder,
            binary: ground.binary().to_owned(),
            site,
            process: None,
            paused: false,
            peak_rss_bytes: 0,
            looked: Instant::now(),
            folder,
        };
        farshore.start()?;
        farshore.await_agents("farshore's initial copy", SWITCH_MAX, |status| {
            status.subscriptions.iter().all(|agent| agent.state == "streaming")
        })?;
        farshore.stop()?;
        Ok(farshore)
    }

    /// Tells the stopped site that its subscriptions are to stand still until they are resumed.
    ///
    /// # Errors
    /// When it refuses.
    pub fn pause(&mut self) -> Result<()> {
        self.of_each_subscription("pause")?;
        self.paused = true;
        Ok(())
    }

    /// Waits until the store holds everything up to a position, and more.
    ///
    /// # Errors
    /// When capture stops, or after a quarter of an hour.
    pub fn await_stored(&mut self, position: u64) -> Result<()> {
        self.await_agents("the backlog in farshore's store", DRAIN_MAX, |status| {
            status.publications.iter().all(|agent| agent.durable() > position)
        })?;
        let (_, peak) = self.own()?.unwrap_or_default();
        self.peak_rss_bytes = peak;
        Ok(())
    }

    /// Runs a verb for operators for every subscription.
    fn of_each_subscription(&self, verb: &str) -> Result<()> {
        for name in self.ground.targets(Contender::Farshore) {
            let output = Command::new(&self.binary)
                .arg(verb)
                .arg(&self.site)
                .args(["--subscription", &name])
                .stdin(Stdio::null())
                .output()
                .with_context(|| format!("run farshore {verb}"))?;
            if !output.status.success() {
                let said = String::from_utf8_lossy(&output.stderr);
                bail!("farshore {verb} failed: {}", said.trim());
            }
        }
        Ok(())
    }

    fn await_agents(
        &mut self,
        what: &str,
        timeout: Duration,
        ready: impl Fn(&Status) -> bool,
    ) -> Result<()> {
        let log = self.log();
        wait_until(what, timeout, &[&log], || {
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

/// `16/B374D848` as a number.
fn parse_lsn(text: &str) -> Option<u64> {
    let (high, low) = text.split_once('/')?;
    let half = |digits| u64::from_str_radix(digits, 16).ok();
    Some(half(high)? << 32 | half(low)?)
}

impl Contestant for Farshore<'_> {
    fn contender(&self) -> Contender {
        Contender::Farshore
    }

    fn stand_by(&mut self) -> Result<()> {
        if !self.paused {
            return Ok(());
        }
        self.process = Some(self.builder.start()?);
        self.await_agents("farshore's log reader", SWITCH_MAX, |status| {
            status.publications.iter().all(|agent| agent.state == "streaming")
                && status.subscriptions.iter().all(|agent| agent.state == "paused")
        })
    }

    fn start(&mut self) -> Result<()> {
        if self.paused {
            self.of_each_subscription("resume")?;
            self.paused = false;
        } else {
            self.process = Some(self.builder.start()?);
        }
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
            Some(process) => {
                let peak = process.peak_rss_bytes().max(self.peak_rss_bytes);
                Ok(Some((process.cpu_seconds()?, peak)))
            }
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

    fn status(&self) -> Option<FarshoreBuilder> {
        Some(self.builder.clone())
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

#[cfg(test)]
mod tests {
    use super::parse_lsn;

    #[test]
    fn positions_compare_as_numbers() {
        assert_eq!(parse_lsn("16/B374D848"), Some(0x16_B374_D848));
        assert!(parse_lsn("1/0") > parse_lsn("0/FFFFFFFF"));
        // What is not known is behind everything.
        assert!(parse_lsn("") < Some(0));
    }
}
