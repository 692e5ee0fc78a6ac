//! Farshore, as a process with a site file of its own, or two of them with a link.

mod site;

use super::ground::{DRAIN_MAX, Ground, SWITCH_MAX};
use super::{Contender, Contestant, Sites};
use crate::backlog::{SCHEMA, Tables};
use crate::measurement::{FARSHORE, Own};
use anyhow::{Context, Result};
use farshore_testkit::port::ReservedPort;
use farshore_testkit::process::{FarshoreBuilder, release_binary};
use farshore_testkit::wait::watch_until;
use farshore_testkit::wan::Side;
use serde::Deserialize;
pub use site::{Site, issue_certificates};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How often a drain looks whether Farshore has given up. Asking costs it next to nothing.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Names of two sites, and of their certificates.
const NEAR: &str = "near";
const FAR: &str = "far";
/// TCP connections of a link; Farshore's default.
pub const CONNECTIONS: u64 = 4;
/// zstd level on a link; Farshore's default.
pub const COMPRESSION: u64 = 1;

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
    /// Log readers, and what is received from other sites.
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

/// A site, or two of them.
#[derive(Debug)]
pub struct Farshore<'a> {
    ground: &'a Ground<'a>,
    /// The site with the publication, beside the publisher; also with the subscriptions if there
    /// is no other one.
    near: Site,
    /// The site with the subscriptions, beside the subscriber.
    far: Option<Site>,
    paused: bool,
    looked: Instant,
    _port: Option<ReservedPort>,
    // Removed last.
    folder: TempDir,
}

impl<'a> Farshore<'a> {
    /// Starts Farshore, waits until it streams, stops it.
    ///
    /// # Errors
    /// When it does not get that far within a quarter of an hour; with the end of its log.
    pub fn prepare(ground: &'a Ground<'a>, tables: &dyn Tables) -> Result<Farshore<'a>> {
        let mut farshore = Farshore::new(ground, tables)?;
        farshore.start()?;
        farshore.await_copied(DRAIN_MAX)?;
        farshore.stop()?;
        Ok(farshore)
    }

    /// Writes what is to be there before the first start.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn new(ground: &'a Ground<'a>, tables: &dyn Tables) -> Result<Farshore<'a>> {
        let folder = tempfile::Builder::new().prefix("farshore-bench").tempdir()?;
        let publication = format!(
            "[publication.bench]\nsource = \"{}\"\ntables = [\"{SCHEMA}.*\"]\n",
            ground.publisher_url()
        );
        let site = |name, side, text: &str| {
            Site::new(name, ground.binary(), &folder.path().join(name), ground.end(side), text)
        };
        let (near, far, port) = match ground.sites {
            Sites::One => {
                let monitor = if ground.monitor { "monitor = \"127.0.0.1:0\"\n" } else { "" };
                let text = format!(
                    "{}{monitor}\n{publication}{}",
                    identity(FARSHORE),
                    subscriptions(ground, Side::Near, "bench", tables)
                );
                (site(FARSHORE, Side::Near, &text)?, None, None)
            }
            Sites::Two => {
                let certificates = folder.path().join("certificates");
                issue_certificates(ground.binary(), &certificates, &[NEAR, FAR])?;
                let port = ReservedPort::new()?;
                let host = ground.host(Side::Far, Side::Near);
                let address = format!("{host}:{}", port.number());
                let near = format!(
                    "{}{}listen = \"{address}\"\n\n{publication}\n\
                     [downstream.{FAR}]\npublications = [\"bench\"]\ncompression = {}\n",
                    identity(NEAR),
                    certificate(&certificates, NEAR),
                    ground.compression
                );
                let far = format!(
                    "{}{}\n[upstream.{NEAR}]\naddress = \"{address}\"\n\
                     connections = {CONNECTIONS}\n{}",
                    identity(FAR),
                    certificate(&certificates, FAR),
                    subscriptions(ground, Side::Far, &format!("{NEAR}/bench"), tables)
                );
                let near = site("farshore_near", Side::Near, &near)?;
                (near, Some(site("farshore_far", Side::Far, &far)?), Some(port))
            }
        };
        let (paused, looked) = (false, Instant::now());
        Ok(Farshore { ground, near, far, paused, looked, _port: port, folder })
    }

    /// What `commission link` says of the line between two sites, with a sample of a database's
    /// rows. The near site runs.
    ///
    /// # Errors
    /// When the verb fails.
    pub fn commission_link(&self, arguments: &[&str]) -> Result<serde_json::Value> {
        let far = self.far.as_ref().context("there is but one site")?;
        far.commission_link(&[&[NEAR], arguments].concat())
    }

    fn sites(&mut self) -> impl Iterator<Item = &mut Site> {
        [&mut self.near].into_iter().chain(&mut self.far)
    }

    /// The site with the subscriptions.
    fn distributor(&self) -> &Site {
        self.far.as_ref().unwrap_or(&self.near)
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

    /// Waits until the store that the subscriptions are served from holds everything up to a
    /// position, and more.
    ///
    /// # Errors
    /// When capture stops, or after a quarter of an hour.
    pub fn await_stored(&mut self, position: u64) -> Result<()> {
        self.await_agents("the backlog in farshore's store", DRAIN_MAX, |status| {
            status.publications.iter().all(|agent| agent.durable() > position)
        })?;
        self.sites().try_for_each(Site::keep_peak)
    }

    /// Runs a verb for operators for every subscription.
    fn of_each_subscription(&self, verb: &str) -> Result<()> {
        for name in self.ground.targets(Contender::Farshore) {
            self.distributor().verb(verb, &["--subscription", &name])?;
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
        watch_until(what, timeout, &[&log], || {
            self.ground.interrupt().check()?;
            self.sites().try_for_each(Site::look)?;
            Ok(self.distributor().status()?.filter(|status| ready(status)).map(|_| ()))
        })
    }
}

/// The beginning of a site file.
fn identity(name: &str) -> String {
    format!("[site]\nname = \"{name}\"\ndata_dir = \"data\"\n")
}

/// Who the site is to the other one.
fn certificate(folder: &Path, name: &str) -> String {
    let folder = folder.display();
    format!(
        "certificate = \"{folder}/{name}.crt\"\nkey = \"{folder}/{name}.key\"\n\
         ca = \"{folder}/ca.crt\"\n"
    )
}

/// A subscription for each of Farshore's databases, as a site at one end has them.
fn subscriptions(
    ground: &Ground<'_>,
    from: Side,
    publication: &str,
    tables: &dyn Tables,
) -> String {
    let mut text = String::new();
    for name in ground.targets(Contender::Farshore) {
        let target = ground.farshore_url(from, &name, tables);
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "\n[subscription.{name}]\npublication = \"{publication}\"\ntarget = \"{target}\"\n"
        );
        if let Some(streams) = ground.streams {
            let _ = writeln!(text, "streams = {streams}");
        }
    }
    text
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
        self.sites().try_for_each(Site::start)?;
        self.await_agents("farshore's log reader", SWITCH_MAX, |status| {
            let reads = |agent: &Agent| ["streaming", "receiving"].contains(&agent.state.as_str());
            status.publications.iter().all(reads)
                && status.subscriptions.iter().all(|agent| agent.state == "paused")
        })
    }

    fn start(&mut self) -> Result<()> {
        if self.paused {
            self.of_each_subscription("resume")?;
            self.paused = false;
        } else {
            self.sites().try_for_each(Site::start)?;
        }
        self.looked = Instant::now();
        Ok(())
    }

    fn await_copied(&mut self, timeout: Duration) -> Result<()> {
        self.await_agents("farshore's initial copy", timeout, |status| {
            status.subscriptions.iter().all(|agent| agent.state == "streaming")
        })
    }

    fn check(&mut self) -> Result<()> {
        if self.looked.elapsed() < LOOK_EVERY {
            return Ok(());
        }
        self.looked = Instant::now();
        self.sites().try_for_each(Site::look)
    }

    fn own(&mut self) -> Result<Vec<Own>> {
        self.sites().filter_map(|site| site.own().transpose()).collect()
    }

    fn stop(&mut self) -> Result<()> {
        self.sites().try_for_each(|site| site.stop(SWITCH_MAX))?;
        self.ground.await_idle_slots()
    }

    fn log(&self) -> PathBuf {
        self.distributor().builder().log_path().to_owned()
    }

    fn status(&self) -> Option<FarshoreBuilder> {
        Some(self.distributor().builder().clone())
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
