//! A principal at one end of a line and a standby at the other, which follows it directly, or by a
//! mirror of Farshore's.

mod outcome;

pub use outcome::{Outcome, Ranking};

use crate::contest::{Bench, Site, issue_certificates};
use crate::line::{Conditions, Line};
use crate::measurement::{Costs, Own, Run};
use anyhow::{Context, Result, ensure};
use farshore_testkit::port::ReservedPort;
use farshore_testkit::postgres::{Cluster, Installation};
use farshore_testkit::wait::wait_until;
use farshore_testkit::wan::{Side, Traffic};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The version of both: Debian's, whose build has all of `wal_compression`.
const MAJOR: u32 = 15;
/// What the mirror makes on the principal.
const SLOT: &str = "farshore_mirror_bench";
/// What `synchronous_standby_names` calls it.
const MIRROR: &str = "farshore_bench";
/// What it calls the standby that follows directly.
const DIRECT: &str = "direct";
/// Longest wait for anything that is prepared.
const PREPARE_MAX: Duration = Duration::from_secs(120);
/// Settings of both servers: checkpoints and autovacuum stay out of the measured time.
const SETTINGS: [(&str, &str); 8] = [
    ("wal_level", "replica"),
    ("shared_buffers", "512MB"),
    ("fsync", "on"),
    ("max_wal_size", "16GB"),
    ("checkpoint_timeout", "1h"),
    ("autovacuum", "off"),
    ("wal_keep_size", "1GB"),
    ("wal_retrieve_retry_interval", "100ms"),
];

/// How the log gets to the standby, and what a commit waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// By PostgreSQL's own streaming.
    Native {
        /// `wal_compression`.
        wal_compression: &'static str,
        /// `synchronous_commit`; `local`: no commit waits for the standby.
        commit: &'static str,
    },
    /// By a mirror.
    Mirror {
        /// Its compression.
        compression: &'static str,
        /// Its mode.
        mode: &'static str,
    },
}

/// The two servers, the line, and a mirror that comes and goes.
pub struct Mirrored<'a> {
    bench: Bench<'a>,
    /// Where the load runs.
    pub principal: Cluster,
    standby: Cluster,
    sites: Option<(Site, Site)>,
    ports: (ReservedPort, ReservedPort),
    folder: TempDir,
    // Both servers are in it.
    line: Line,
}

impl<'a> Mirrored<'a> {
    /// Starts both, with what `schema` makes.
    ///
    /// # Errors
    /// When there can be no line here, or a server does not start.
    pub fn start(bench: Bench<'a>, schema: &str) -> Result<Mirrored<'a>> {
        let line = Line::start()?;
        let builder = Cluster::builder(&Installation::find(MAJOR)?).place(line.end(Side::Near));
        let settings = SETTINGS.iter();
        let mut principal =
            settings.fold(builder, |b, (name, value)| b.setting(name, value)).start()?;
        principal.execute_script(schema)?;
        let place = line.end(Side::Far).clone();
        let conninfo = direct(&principal, &line);
        let standby = principal.standby_in(
            Some(place),
            &[("primary_conninfo", conninfo.as_str()), ("primary_slot_name", "")],
            &[],
        )?;
        let folder = tempfile::Builder::new().prefix("farshore-bench").tempdir()?;
        issue_certificates(bench.binary, &folder.path().join("certificates"), &["near", "far"])?;
        let ports = (ReservedPort::new()?, ReservedPort::new()?);
        Ok(Mirrored { bench, principal, standby, sites: None, ports, folder, line })
    }

    /// Which kinds of `wal_compression` the build has beside `off`.
    ///
    /// # Errors
    /// When the principal cannot be asked.
    pub fn wal_compressions(&self) -> Result<Vec<&'static str>> {
        let sql = "SELECT $1 = ANY (enumvals) FROM pg_settings WHERE name = 'wal_compression'";
        let mut client = self.principal.connect()?;
        let mut there = vec!["off"];
        for method in ["lz4", "zstd"] {
            if client.query_one(sql, &[&method])?.get(0) {
                there.push(method);
            }
        }
        Ok(there)
    }

    fn set(&self, server: &Cluster, name: &str, value: &str) -> Result<()> {
        server.execute_script(&format!("ALTER SYSTEM SET {name} = '{value}'"))?;
        server.execute_script("SELECT pg_reload_conf()")
    }

    /// Lets the standby follow in this way, over a short and wide line, until it has all; then the
    /// line is what it is to be, and commits wait.
    ///
    /// # Errors
    /// When it does not get that far.
    pub fn take(&mut self, way: Way, conditions: Conditions) -> Result<()> {
        self.line.set(None);
        self.set(&self.principal, "synchronous_standby_names", "")?;
        self.stop_sites()?;
        let (name, conninfo) = match way {
            Way::Native { wal_compression, commit } => {
                self.set(&self.principal, "wal_compression", wal_compression)?;
                self.set(&self.principal, "synchronous_commit", commit)?;
                (DIRECT, direct(&self.principal, &self.line))
            }
            Way::Mirror { compression, mode } => {
                self.set(&self.principal, "wal_compression", "off")?;
                self.set(&self.principal, "synchronous_commit", "on")?;
                self.start_sites(compression, mode)?;
                let listen = self.ports.1.number();
                (MIRROR, format!("host=127.0.0.1 port={listen} user=standby"))
            }
        };
        self.set(&self.standby, "primary_conninfo", &conninfo)?;
        // What follows shows that the way is there.
        self.principal.execute_script("SELECT txid_current()")?;
        self.catch_up()?;
        self.principal.execute_script("CHECKPOINT")?;
        self.catch_up()?;
        let is_local = matches!(way, Way::Native { commit: "local", .. });
        if !is_local {
            self.set(&self.principal, "synchronous_standby_names", name)?;
            wait_until("the standby to count", PREPARE_MAX, &[], || {
                let sql = "SELECT count(*) FROM pg_stat_replication \
                           WHERE sync_state = 'sync' AND state = 'streaming'";
                let count: i64 = self.principal.connect()?.query_one(sql, &[])?.get(0);
                Ok((count == 1).then_some(()))
            })?;
        }
        self.line.set(Some(conditions));
        self.bench.interrupt.check()
    }

    fn start_sites(&mut self, compression: &str, mode: &str) -> Result<()> {
        let near_place = self.line.end(Side::Near);
        let address = format!("{}:{}", near_place.address(), self.ports.0.number());
        let identity = |site: &str| {
            let at = |name: &str| self.folder.path().join("certificates").join(name);
            format!(
                "[site]\nname = \"{site}\"\ndata_dir = \"data\"\ncertificate = \"{}\"\n\
                 key = \"{}\"\nca = \"{}\"\n",
                at(&format!("{site}.crt")).display(),
                at(&format!("{site}.key")).display(),
                at("ca.crt").display()
            )
        };
        let near = format!(
            "{}listen = \"{address}\"\n[mirror.bench]\nprincipal = \"{}\"\n\
             compression = \"{compression}\"\nmode = \"{mode}\"\n\
             [downstream.far]\nmirrors = [\"bench\"]\n",
            identity("near"),
            self.principal.url_from(near_place, "postgres")
        );
        let far = format!(
            "{}[upstream.near]\naddress = \"{address}\"\n\
             [mirror.bench]\nupstream = \"near\"\nlisten = \"127.0.0.1:{}\"\n",
            identity("far"),
            self.ports.1.number()
        );
        let site = |name: &'static str, side, text: &str| {
            let folder: PathBuf = self.folder.path().join(name);
            Site::new(name, self.bench.binary, &folder, Some(self.line.end(side)), text)
        };
        let mut sites = (site("near", Side::Near, &near)?, site("far", Side::Far, &far)?);
        sites.0.start()?;
        sites.1.start()?;
        let far = sites.1.builder().clone();
        self.sites = Some(sites);
        wait_until("the mirror to receive", PREPARE_MAX, &[far.log_path()], || {
            let Ok(text) = far.status_json() else { return Ok(None) };
            let status: Value = serde_json::from_str(&text)?;
            Ok((status["mirrors"][0]["state"] == "receiving").then_some(()))
        })
    }

    fn stop_sites(&mut self) -> Result<()> {
        if let Some((mut near, mut far)) = self.sites.take() {
            far.stop(PREPARE_MAX)?;
            near.stop(PREPARE_MAX)?;
        }
        Ok(())
    }

    /// Waits until the standby has replayed what the principal has flushed.
    fn catch_up(&self) -> Result<()> {
        let sql = "SELECT pg_current_wal_flush_lsn()::text";
        let end: String = self.principal.connect()?.query_one(sql, &[])?.get(0);
        let mut standby = self.standby.connect()?;
        wait_until("the standby to replay", PREPARE_MAX, &[&self.standby.log_path()], || {
            self.bench.interrupt.check()?;
            let sql = "SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn";
            Ok(standby.query_one(sql, &[&end])?.get::<_, bool>(0).then_some(()))
        })
    }

    /// Proves that the standby has what the principal has.
    ///
    /// # Errors
    /// When `sql`, which must give one text, gives another one there.
    pub fn prove_equal(&self, sql: &str) -> Result<()> {
        self.line.set(None);
        self.catch_up()?;
        let ask = |server: &Cluster| -> Result<String> {
            Ok(server.connect()?.query_one(sql, &[])?.get(0))
        };
        let (here, there) = (ask(&self.principal)?, ask(&self.standby)?);
        ensure!(here == there, "the principal has {here}, the standby {there}");
        Ok(())
    }

    /// Does work, and notes what it took beside what the work itself gives.
    ///
    /// # Errors
    /// The work's.
    pub fn measure(
        &mut self,
        work: impl FnOnce(&Cluster) -> Result<BTreeMap<&'static str, f64>>,
    ) -> Result<Run> {
        let before = self.meter()?;
        let begun = Instant::now();
        let mut values = work(&self.principal)?;
        let seconds = begun.elapsed().as_secs_f64();
        let after = self.meter()?;
        let log_mb = (after.log - before.log) / 1e6;
        let sent = |traffic: &Traffic| traffic.near_to_far.bytes as f64 / 1e6;
        let wire_mb = sent(&after.traffic) - sent(&before.traffic);
        values.insert("seconds", seconds);
        values.insert("log_mb_per_s", log_mb / seconds);
        values.insert("wire_mb_per_s", wire_mb / seconds);
        values.insert("log_to_wire", log_mb / wire_mb.max(f64::MIN_POSITIVE));
        let own = after.own.iter().zip(&before.own);
        let own = own.map(|(after, before)| Own { cpu: after.cpu - before.cpu, ..*after });
        let costs = Costs {
            publisher: after.principal - before.principal,
            subscriber: after.standby - before.standby,
            own: own.collect(),
        };
        Ok(Run { values, costs })
    }

    fn meter(&mut self) -> Result<Meter> {
        let sql = "SELECT (pg_current_wal_insert_lsn() - '0/0')::float8";
        let mut own = Vec::new();
        if let Some((near, far)) = &mut self.sites {
            own.extend(near.own()?);
            own.extend(far.own()?);
        }
        Ok(Meter {
            log: self.principal.connect()?.query_one(sql, &[])?.get(0),
            traffic: self.line.traffic(),
            principal: self.principal.cpu_seconds(),
            standby: self.standby.cpu_seconds(),
            own,
        })
    }

    /// What the figures depend on.
    pub fn settings(&self, conditions: Conditions) -> BTreeMap<&'static str, Value> {
        let mut settings: BTreeMap<_, _> =
            SETTINGS.iter().map(|(name, value)| (*name, Value::from(*value))).collect();
        settings.extend(self.line.settings(conditions));
        settings.insert("postgres", Value::from(self.principal.installation().version()));
        let cores = std::thread::available_parallelism().map_or(0, usize::from);
        settings.insert("cores", Value::from(cores));
        settings.insert("scale", Value::from(self.bench.plan.scale));
        settings.insert("slot", Value::from(SLOT));
        settings
    }
}

struct Meter {
    /// End of the log, in bytes.
    log: f64,
    traffic: Traffic,
    principal: f64,
    standby: f64,
    own: Vec<Own>,
}

/// How the standby reaches the principal over the line.
fn direct(principal: &Cluster, line: &Line) -> String {
    let host = line.end(Side::Near).address();
    format!("host={host} port={} user=postgres application_name={DIRECT}", principal.port())
}

/// Joins threads that all must have done well.
///
/// # Errors
/// The first one's.
pub fn join_all<T>(threads: Vec<std::thread::JoinHandle<Result<T>>>) -> Result<Vec<T>> {
    threads
        .into_iter()
        .map(|thread| thread.join().ok().context("a client died").and_then(|done| done))
        .collect()
}
