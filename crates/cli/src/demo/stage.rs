//! What the demo plays on: two servers, a folder, and Farshore as a process of its own.

use super::screen::Screen;
use super::{schema, workload};
use anyhow::{Context, Result};
use farshore_testkit::interrupt::Interrupt;
use farshore_testkit::postgres::{Cluster, Installation};
use farshore_testkit::process::{Farshore, FarshoreBuilder};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Publisher's and subscriber's major versions.
const MAJORS: [u32; 2] = [15, 18];
/// The publication's and the subscription's name.
const NAME: &str = "shop";

/// Two throwaway servers. Dropping it stops them and removes their data.
pub struct Servers {
    /// The older one, under load.
    pub publisher: Cluster,
    /// The newer one.
    pub subscriber: Cluster,
}

impl Servers {
    /// Starts both.
    pub fn start() -> Result<Servers> {
        let [old, new] = MAJORS.map(Installation::find);
        let publisher = Cluster::builder(&old?)
            .setting("wal_level", "logical")
            // Small, so that large transactions are streamed while they are in progress.
            .setting("logical_decoding_work_mem", "1MB")
            .setting("max_wal_size", "4GB")
            .start()?;
        let subscriber = Cluster::builder(&new?).setting("max_wal_size", "4GB").start()?;
        Ok(Servers { publisher, subscriber })
    }

    /// Makes the tables on both sides, and rows on the publisher. Returns the tables' names.
    pub fn load(
        &self,
        pgbench_scale: u32,
        logs: &Path,
        interrupt: &Interrupt,
    ) -> Result<Vec<String>> {
        let programs = self.publisher.installation();
        let log = logs.join("pgbench.log");
        workload::init_pgbench(programs, &self.publisher, pgbench_scale, true, &log, interrupt)?;
        workload::init_pgbench(programs, &self.subscriber, pgbench_scale, false, &log, interrupt)?;
        self.publisher.execute_script(schema::DDL).context("on the publisher")?;
        self.subscriber.execute_script(schema::DDL).context("on the subscriber")?;
        interrupt.check()?;
        self.publisher.execute_script(schema::ROWS).context("fill the publisher's tables")?;
        let url = self.publisher.url("postgres");
        let mut tables = farshore_testkit::checksum::tables_in_schema(&url, schema::SHOP)?;
        tables.extend(farshore_testkit::checksum::tables_in_schema(&url, "public")?);
        Ok(tables)
    }

    /// Says which servers these are.
    pub fn describe(&self) -> String {
        let side = |cluster: &Cluster| {
            format!("PostgreSQL {} on port {}", cluster.installation().version(), cluster.port())
        };
        format!("{} → {}", side(&self.publisher), side(&self.subscriber))
    }
}

/// The folder with the site file, the store and the logs.
pub struct Folder {
    root: TempDir,
    keep: bool,
}

impl Folder {
    /// Makes it.
    pub fn new(keep: bool) -> Result<Folder> {
        let root = tempfile::Builder::new()
            .prefix("farshore-demo")
            .tempdir()
            .context("make a temporary folder")?;
        Ok(Folder { root, keep })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.root.path()
    }

    /// The node's data.
    pub fn data_dir(&self) -> PathBuf {
        self.path().join("data")
    }

    /// Writes the site file and says how to run it: with this very binary.
    pub fn site(&self, servers: &Servers) -> Result<FarshoreBuilder> {
        let site = self.path().join("site.toml");
        let text = format!(
            "[site]\nname = \"demo\"\ndata_dir = \"data\"\n\n\
             [publication.{NAME}]\nsource = \"{}\"\ntables = [\"{}.*\", \"public.*\"]\n\n\
             [subscription.{NAME}]\npublication = \"{NAME}\"\ntarget = \"{}\"\n",
            servers.publisher.url("postgres"),
            schema::SHOP,
            servers.subscriber.url("postgres"),
        );
        std::fs::write(&site, text).context("write the site file")?;
        let binary = std::env::current_exe().context("find this program's own file")?;
        Ok(Farshore::builder(&binary, &site))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.keep {
            self.root.disable_cleanup(true);
            eprintln!("kept: {}", self.path().display());
        }
    }
}

/// Makes servers and everything else keep their folders.
pub fn keep_folders() {
    // SAFETY: called first thing in `main`'s only thread, before anything else could read the
    // environment.
    unsafe { std::env::set_var("FARSHORE_KEEP", "1") };
}

/// Starts the servers and fills the publisher, with progress.
pub fn set_up(
    screen: &mut Screen,
    folder: &Folder,
    pgbench_scale: u32,
    interrupt: &Interrupt,
) -> Result<(Servers, Vec<String>)> {
    let servers = Servers::start()?;
    screen.step("servers", &servers.describe());
    interrupt.check()?;
    let tables = servers.load(pgbench_scale, folder.path(), interrupt)?;
    screen.step("schema", &format!("{} tables on both sides, rows on the publisher", tables.len()));
    Ok((servers, tables))
}
