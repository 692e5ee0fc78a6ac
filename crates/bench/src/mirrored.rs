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
use farshore_testkit::wait::watch_until;
use farshore_testkit::wan::{Side, Traffic};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
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
/// The mode in which a node beside the principal keeps the log, and carries it on.
const FAR_SYNC: &str = "far-sync";
/// A spool is full before anything is timed, as it is but for its first hours: from then on files of
/// segments are used again.
const SPOOL_SIZE: &str = "64MB";
/// So many segments are more than that.
const SPOOL_SEGMENTS: usize = 6;
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
        /// The principal's `wal_compression`.
        wal_compression: &'static str,
    },
    /// By a direct mirror: a site at the standby's end streams from the principal itself.
    Direct {
        /// Its mode.
        mode: &'static str,
        /// The principal's `wal_compression`.
        wal_compression: &'static str,
    },
}

/// The two servers, the line, and a mirror that comes and goes.
pub struct Mirrored<'a> {
    bench: Bench<'a>,
    /// Where the load runs.
    pub principal: Cluster,
    standby: Cluster,
    /// From the principal to the standby.
    sites: Vec<Site>,
    ports: Ports,
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
        let names = ["near", "between", "far"];
        issue_certificates(bench.binary, &folder.path().join("certificates"), &names)?;
        let ports = Ports::reserve()?;
        Ok(Mirrored { bench, principal, standby, sites: Vec::new(), ports, folder, line })
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

    /// Takes a base backup at the standby's end, with PostgreSQL's own program, into an empty
    /// directory of the server's user.
    ///
    /// # Errors
    /// When it fails; with its message.
    pub fn base_backup(&self, into: &Path, compress: Option<&str>) -> Result<()> {
        let principal = direct(&self.principal, &self.line);
        let done = self.line.end(Side::Far).enter(|| {
            let mut command = self.principal.installation().command("pg_basebackup");
            // The log comes by streaming, in both ways.
            command.args(["--checkpoint=fast", "--wal-method=none", "--dbname", &principal]);
            command.arg("--pgdata").arg(into);
            // As Farshore checks what came.
            command.arg("--manifest-checksums=SHA256");
            command.args(compress.map(|how| format!("--compress={how}")));
            command.output()
        })?;
        let done = done.context("run pg_basebackup")?;
        ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr).trim());
        Ok(())
    }

    /// Seeds a standby's files at its end, by the mirror that is there, into a directory of the
    /// server's user.
    ///
    /// # Errors
    /// When it fails; with its message.
    pub fn seed(&self, into: &Path) -> Result<()> {
        let site = self.sites.last().context("there is no mirror")?;
        let into = into.display().to_string();
        site.verb("mirror seed", &["bench", "--pgdata", &into, "--overwrite"]).map(drop)
    }

    /// Proves that files are what their backup's manifest says.
    ///
    /// # Errors
    /// When they are not.
    pub fn verify_backup(&self, files: &Path) -> Result<()> {
        let mut command = self.principal.installation().command("pg_verifybackup");
        let done = command.arg("--no-parse-wal").arg(files).output();
        let done = done.context("run pg_verifybackup")?;
        ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr).trim());
        Ok(())
    }

    /// Makes the line what it is to be; `None`: short and wide.
    pub fn set_line(&self, conditions: Option<Conditions>) {
        self.line.set(conditions);
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
        // A spool of the next way begins where the principal is then.
        self.catch_up()?;
        self.stop_sites()?;
        let (name, conninfo) = match way {
            Way::Native { wal_compression, commit } => {
                self.set(&self.principal, "wal_compression", wal_compression)?;
                self.set(&self.principal, "synchronous_commit", commit)?;
                (DIRECT, direct(&self.principal, &self.line))
            }
            Way::Mirror { wal_compression, .. } | Way::Direct { wal_compression, .. } => {
                self.set(&self.principal, "wal_compression", wal_compression)?;
                self.set(&self.principal, "synchronous_commit", "on")?;
                match way {
                    Way::Mirror { compression, mode, .. } => self.start_sites(compression, mode)?,
                    Way::Direct { mode, .. } => self.start_direct(mode)?,
                    Way::Native { .. } => {}
                }
                self.receives()?;
                // The spool is full before anything is timed.
                for _ in 0..SPOOL_SEGMENTS {
                    self.principal.execute_script("SELECT txid_current()")?;
                    self.principal.execute_script("SELECT pg_switch_wal()")?;
                }
                let listen = self.ports.far.number();
                (MIRROR, format!("host=127.0.0.1 port={listen} user=standby"))
            }
        };
        self.set(&self.standby, "primary_conninfo", &conninfo)?;
        // What follows shows that the way is there.
        self.principal.execute_script("SELECT txid_current()")?;
        self.catch_up()?;
        self.principal.execute_script("CHECKPOINT")?;
        self.catch_up()?;
        let nobody_waits = matches!(
            way,
            Way::Native { commit: "local", .. }
                | Way::Mirror { mode: "async", .. }
                | Way::Direct { mode: "async", .. }
        );
        if !nobody_waits {
            self.set(&self.principal, "synchronous_standby_names", name)?;
            watch_until("the standby to count", PREPARE_MAX, &[], || {
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
        let near_address = self.listens_near(&self.ports.near);
        let principal = self.principal.url_from(self.line.end(Side::Near), "postgres");
        let mirror_of = |principal: &str, mode: &str| {
            format!(
                "[mirror.bench]\nprincipal = \"{principal}\"\n\
                 compression = \"{compression}\"\nmode = \"{mode}\"\n"
            )
        };
        let mirror_from = |site: &str, address: &str, listen: &ReservedPort| {
            format!(
                "[upstream.{site}]\naddress = \"{address}\"\n\
                 [mirror.bench]\nupstream = \"{site}\"\nlisten = \"127.0.0.1:{}\"\n\
                 spool_size = \"{SPOOL_SIZE}\"\n",
                listen.number()
            )
        };
        let far_mirrors = "[downstream.far]\nmirrors = [\"bench\"]\n";
        let near = format!("listen = \"{near_address}\"\n{}", mirror_of(&principal, mode));
        let far = &self.ports.far;
        if mode == FAR_SYNC {
            // A node that keeps log alone, beside the principal; from its spool a mirror that
            // nobody waits for goes on to the far end.
            let address = self.listens_near(&self.ports.between);
            let kept = &self.ports.kept;
            let spool = format!("postgres://any@127.0.0.1:{}/postgres", kept.number());
            let onward = mirror_of(&spool, "async").replace("mirror.bench", "mirror.onward");
            let between = format!(
                "listen = \"{address}\"\n{}{onward}[downstream.far]\nmirrors = [\"onward\"]\n",
                mirror_from("near", &near_address, kept)
            );
            let far =
                mirror_from("between", &address, far).replace("mirror.bench", "mirror.onward");
            let downstream = far_mirrors.replace("downstream.far", "downstream.between");
            self.start_site("near", Side::Near, &(near + &downstream))?;
            self.start_site("between", Side::Near, &between)?;
            self.start_site("far", Side::Far, &far)?;
        } else {
            let far = mirror_from("near", &near_address, far);
            self.start_site("near", Side::Near, &(near + far_mirrors))?;
            self.start_site("far", Side::Far, &far)?;
        }
        Ok(())
    }

    fn start_direct(&mut self, mode: &str) -> Result<()> {
        let principal = self.principal.url_from(self.line.end(Side::Far), "postgres");
        let listen = self.ports.far.number();
        let text = format!(
            "[mirror.bench]\nprincipal = \"{principal}\"\nmode = \"{mode}\"\n\
             listen = \"127.0.0.1:{listen}\"\nspool_size = \"{SPOOL_SIZE}\"\n"
        );
        self.start_site("far", Side::Far, &text)
    }

    /// Waits until the site at the standby's end receives.
    fn receives(&self) -> Result<()> {
        let far = self.sites.last().context("no site")?.builder().clone();
        watch_until("the mirror to receive", PREPARE_MAX, &[far.log_path()], || {
            let Ok(text) = far.status_json() else { return Ok(None) };
            let status: Value = serde_json::from_str(&text)?;
            let ends = status["mirrors"].as_array().into_iter().flatten();
            Ok(ends.map(|end| &end["state"]).any(|state| state == "receiving").then_some(()))
        })
    }

    fn listens_near(&self, port: &ReservedPort) -> String {
        format!("{}:{}", self.line.end(Side::Near).address(), port.number())
    }

    /// `text` begins with what belongs to the site itself.
    fn start_site(&mut self, name: &'static str, side: Side, text: &str) -> Result<()> {
        let at = |name: &str| self.folder.path().join("certificates").join(name);
        let text = format!(
            "[site]\nname = \"{name}\"\ndata_dir = \"data\"\ncertificate = \"{}\"\n\
             key = \"{}\"\nca = \"{}\"\n{text}",
            at(&format!("{name}.crt")).display(),
            at(&format!("{name}.key")).display(),
            at("ca.crt").display()
        );
        let folder: PathBuf = self.folder.path().join(name);
        let place = self.line.end(side);
        let mut site = Site::new(name, self.bench.binary, &folder, Some(place), &text)?;
        site.start()?;
        self.sites.push(site);
        Ok(())
    }

    fn stop_sites(&mut self) -> Result<()> {
        // The slot moved on with another spool, if the next way has one of these sites again.
        while let Some(mut site) = self.sites.pop() {
            site.stop(PREPARE_MAX)?;
            site.forget()?;
        }
        let drop = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots \
                    WHERE slot_name = $1 AND NOT active";
        let count = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1";
        watch_until("the mirror's slot to be gone", PREPARE_MAX, &[], || {
            let mut principal = self.principal.connect()?;
            principal.execute(drop, &[&SLOT])?;
            let left: i64 = principal.query_one(count, &[&SLOT])?.get(0);
            Ok((left == 0).then_some(()))
        })
    }

    /// Waits until the standby has replayed what the principal has flushed.
    ///
    /// # Errors
    /// When it does not get there.
    pub fn catch_up(&self) -> Result<()> {
        let sql = "SELECT pg_current_wal_flush_lsn()::text";
        let end: String = self.principal.connect()?.query_one(sql, &[])?.get(0);
        let mut standby = self.standby.connect()?;
        watch_until("the standby to replay", PREPARE_MAX, &[&self.standby.log_path()], || {
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
        self.measure_with(|mirrored| work(&mirrored.principal))
    }

    /// [`Mirrored::measure`] of work that needs more than the principal.
    ///
    /// # Errors
    /// The work's.
    pub fn measure_with(
        &mut self,
        work: impl FnOnce(&Mirrored<'a>) -> Result<BTreeMap<&'static str, f64>>,
    ) -> Result<Run> {
        let before = self.meter()?;
        let begun = Instant::now();
        let mut values = work(self)?;
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
        let own: Vec<Own> = own.collect();
        let costs = Costs {
            publisher: after.principal - before.principal,
            subscriber: after.standby - before.standby,
            own,
        };
        values.insert("principal_cpu_s", costs.publisher);
        values.insert("standby_cpu_s", costs.subscriber);
        values.insert("farshore_cpu_s", costs.own.iter().map(|own| own.cpu).sum());
        Ok(Run { values, costs })
    }

    fn meter(&mut self) -> Result<Meter> {
        let sql = "SELECT (pg_current_wal_insert_lsn() - '0/0')::float8";
        let mut own = Vec::new();
        for site in &mut self.sites {
            own.extend(site.own()?);
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
        settings.insert("spool_size", Value::from(SPOOL_SIZE));
        settings
    }
}

/// Where sites listen.
struct Ports {
    /// The near end's link.
    near: ReservedPort,
    /// The link of the node that keeps log alone, and its spool.
    between: ReservedPort,
    kept: ReservedPort,
    /// The spool that the standby follows.
    far: ReservedPort,
}

impl Ports {
    fn reserve() -> Result<Ports> {
        Ok(Ports {
            near: ReservedPort::new()?,
            between: ReservedPort::new()?,
            kept: ReservedPort::new()?,
            far: ReservedPort::new()?,
        })
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
