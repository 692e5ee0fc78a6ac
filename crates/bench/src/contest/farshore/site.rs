//! A site of Farshore's: a file, and a process that comes and goes.

use super::Status;
use crate::measurement::Own;
use anyhow::{Context, Result, bail, ensure};
use farshore_testkit::process::{self, FarshoreBuilder};
use farshore_testkit::wait::log_tail;
use farshore_testkit::wan::Namespace;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// A site that has its file.
#[derive(Debug)]
pub struct Site {
    /// In the output.
    name: &'static str,
    builder: FarshoreBuilder,
    binary: PathBuf,
    file: PathBuf,
    place: Option<Namespace>,
    process: Option<process::Farshore>,
    /// Of earlier processes that were part of the work.
    peak_rss_bytes: u64,
}

impl Site {
    /// Writes the file of a site into a folder of its own.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn new(
        name: &'static str,
        binary: &Path,
        folder: &Path,
        place: Option<&Namespace>,
        text: &str,
    ) -> Result<Site> {
        std::fs::create_dir_all(folder).context("make a folder for the site")?;
        let file = folder.join("site.toml");
        std::fs::write(&file, text).context("write the site file")?;
        let builder = process::Farshore::builder(binary, &file);
        let place = place.cloned();
        let builder = place.iter().fold(builder, FarshoreBuilder::place);
        let binary = binary.to_owned();
        Ok(Site { name, builder, binary, file, place, process: None, peak_rss_bytes: 0 })
    }

    /// How to reach it.
    pub fn builder(&self) -> &FarshoreBuilder {
        &self.builder
    }

    /// Starts its process.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(&mut self) -> Result<()> {
        self.process = Some(self.builder.start()?);
        Ok(())
    }

    /// Stops its process, if there is one.
    ///
    /// # Errors
    /// When it does not stop.
    pub fn stop(&mut self, timeout: Duration) -> Result<()> {
        match self.process.take() {
            Some(mut process) => process.sigterm(timeout).map(drop),
            None => Ok(()),
        }
    }

    /// Removes what it keeps, of a site that does not run.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn forget(&self) -> Result<()> {
        let data = self.file.with_file_name("data");
        std::fs::remove_dir_all(&data).with_context(|| format!("remove {}", data.display()))
    }

    /// Runs a verb (`mirror seed` for instance) from where the site is; what it printed.
    ///
    /// # Errors
    /// When it refuses; with its message.
    pub fn verb(&self, verb: &str, arguments: &[&str]) -> Result<Vec<u8>> {
        let command = self.place.as_ref().map(|place| place.command(&self.binary));
        let output = command
            .unwrap_or_else(|| Command::new(&self.binary))
            .args(verb.split(' '))
            .arg(&self.file)
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("run farshore {verb}"))?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "farshore {verb} failed: {}", said.trim());
        Ok(output.stdout)
    }

    /// Measures the line to another site, from where the site is.
    ///
    /// # Errors
    /// When it fails; with its message.
    pub fn commission_link(&self, arguments: &[&str]) -> Result<serde_json::Value> {
        serde_json::from_slice(&self.verb("commission link", arguments)?).context("read the report")
    }

    /// What it says of itself; nothing while it is not up, or an agent is in trouble.
    ///
    /// # Errors
    /// When the answer cannot be read.
    pub fn status(&self) -> Result<Option<Status>> {
        // An agent in trouble is seen once it stops, or in the log when the wait is over.
        let Ok(text) = self.builder.status_json() else { return Ok(None) };
        serde_json::from_str(&text).map(Some).context("read farshore's status")
    }

    /// Whether there is hope.
    ///
    /// # Errors
    /// When its process has ended, or an agent has stopped.
    pub fn look(&mut self) -> Result<()> {
        let log = self.builder.log_path();
        if let Some(process) = &mut self.process
            && let Some(status) = process.exit_status()?
        {
            bail!("{} ended: {status}{}", self.name, log_tail(log, 25));
        }
        let Some(status) = self.status()? else { return Ok(()) };
        for agent in status.publications.iter().chain(&status.subscriptions) {
            if agent.state == "stopped" {
                let error = agent.error.as_deref().unwrap_or("no reason given");
                let log = log_tail(log, 25);
                bail!("{}'s \"{}\" has stopped: {error}{log}", self.name, agent.name);
            }
        }
        Ok(())
    }

    /// Notes the peak memory of the process that runs, for the next one.
    ///
    /// # Errors
    /// When the kernel refuses to tell.
    pub fn keep_peak(&mut self) -> Result<()> {
        if let Some(own) = self.own()? {
            self.peak_rss_bytes = own.peak_rss_bytes;
        }
        Ok(())
    }

    /// What its process has cost, if there is one.
    ///
    /// # Errors
    /// When the kernel refuses to tell.
    pub fn own(&mut self) -> Result<Option<Own>> {
        let Some(process) = &mut self.process else { return Ok(None) };
        let peak_rss_bytes = process.peak_rss_bytes().max(self.peak_rss_bytes);
        Ok(Some(Own { name: self.name, cpu: process.cpu_seconds()?, peak_rss_bytes }))
    }
}

/// Makes an authority and certificates of these sites in a folder.
///
/// # Errors
/// When the verb fails; with its message.
pub fn issue_certificates(binary: &Path, folder: &Path, sites: &[&str]) -> Result<()> {
    let made = Command::new(binary)
        .args(["site-cert", "issue", "--dir"])
        .arg(folder)
        .args(sites)
        .stdin(Stdio::null())
        .output()
        .context("run farshore site-cert")?;
    let said = String::from_utf8_lossy(&made.stderr);
    ensure!(made.status.success(), "farshore site-cert failed: {}", said.trim());
    Ok(())
}
