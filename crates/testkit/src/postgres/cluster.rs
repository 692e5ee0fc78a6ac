//! A private cluster: start, stop, kill, measure.

use super::installation::Installation;
use super::template;
use crate::child::{Supervised, open_pidfd, wait_pidfd};
use crate::port::ReservedPort;
use crate::proc_fs;
use crate::wait::{log_tail, wait_until, watch_until};
use crate::wan::{self, Namespace};
use ::postgres::{Client, NoTls};
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const START_TIMEOUT: Duration = Duration::from_secs(120);
const STOP_TIMEOUT: Duration = Duration::from_secs(60);
/// Where the kernel shows POSIX shared memory, and how PostgreSQL's names begin.
const SHARED_MEMORY: &str = "/dev/shm/PostgreSQL.";

/// How to ask a cluster to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopMode {
    /// Disconnect clients, write a checkpoint. The walsenders first send what is left.
    Fast,
    /// No checkpoint: the next start recovers from the log.
    Immediate,
}

/// Settings of a cluster to be started.
#[derive(Debug, Clone)]
pub struct ClusterBuilder {
    installation: Installation,
    settings: Vec<(String, String)>,
    password: Option<String>,
    place: Option<Namespace>,
}

/// A cluster with a data directory, a port and a log of its own. Dropping it stops the server and
/// removes everything, unless the environment variable `FARSHORE_KEEP` is set.
#[derive(Debug)]
pub struct Cluster {
    installation: Installation,
    // Dropped before the directory: the server must be gone first.
    server: Option<Supervised>,
    port: ReservedPort,
    password: Option<String>,
    place: Option<Namespace>,
    /// CPU time of earlier runs of the server.
    spent_cpu: Duration,
    peak_rss_bytes: u64,
    /// Shared memory that killed servers left behind; the next start removes it, or our drop.
    left_shared_memory: BTreeSet<String>,
    left_segments: BTreeSet<i32>,
    root: TempDir,
}

impl ClusterBuilder {
    /// Adds a line to `postgresql.conf`; a later line for the same name wins.
    pub fn setting(mut self, name: &str, value: impl ToString) -> ClusterBuilder {
        self.settings.push((name.to_owned(), value.to_string()));
        self
    }

    /// Asks for this password (SCRAM-SHA-256) over TCP. Without it everyone is trusted.
    pub fn scram_password(mut self, password: &str) -> ClusterBuilder {
        self.password = Some(password.to_owned());
        self
    }

    /// Runs the server in a network namespace, where it listens on the namespace's address too.
    /// This process then reaches it by its Unix socket. Default: where the test runs.
    pub fn place(mut self, place: &Namespace) -> ClusterBuilder {
        self.place = Some(place.clone());
        self
    }

    /// Creates the cluster and starts it. Takes about a second.
    ///
    /// # Errors
    /// When a directory, a port or the server cannot be had; the message shows the server's log.
    pub fn start(self) -> Result<Cluster> {
        let mut cluster = Cluster::without_data(self.installation, self.place)?;
        template::create_data_dir(&cluster.installation, &cluster.data_dir())?;
        if cluster.place.is_some() {
            cluster.write_access_rules("trust")?;
        }
        cluster.write_configuration(&self.settings)?;
        cluster.start()?;
        if let Some(password) = self.password {
            cluster.require_password(&password)?;
        }
        Ok(cluster)
    }
}

impl Cluster {
    /// A cluster of this installation, with test settings: `fsync` is on, because durability is
    /// what tests are about.
    pub fn builder(installation: &Installation) -> ClusterBuilder {
        ClusterBuilder {
            installation: installation.clone(),
            settings: Vec::new(),
            password: None,
            place: None,
        }
    }

    fn without_data(installation: Installation, place: Option<Namespace>) -> Result<Cluster> {
        let root = tempfile::Builder::new()
            .prefix("farshore-pg")
            .tempdir()
            .context("create a temporary directory")?;
        template::open_to_all(root.path())?;
        installation.hand_over(root.path())?;
        template::place_children_apart(root.path());
        Ok(Cluster {
            installation,
            server: None,
            port: ReservedPort::new()?,
            password: None,
            place,
            spent_cpu: Duration::ZERO,
            peak_rss_bytes: 0,
            left_shared_memory: BTreeSet::new(),
            left_segments: BTreeSet::new(),
            root,
        })
    }

    /// A cluster of the same installation and place, still without a data directory.
    pub(super) fn without_copy(&self) -> Result<Cluster> {
        Cluster::without_data(self.installation.clone(), self.place.clone())
    }

    /// Adds this cluster's port, directories and limits to the configuration in its data directory,
    /// which something else has written.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn configure_again(&self) -> Result<()> {
        self.write_configuration(&[])
    }

    /// A copy of this stopped server, not started, on a port of its own, in this place and with
    /// these settings.
    pub(super) fn stopped_copy_in(
        &self,
        place: Option<Namespace>,
        settings: &[(&str, &str)],
    ) -> Result<Cluster> {
        let mut copy = Cluster::without_data(self.installation.clone(), place)?;
        template::copy_tree(&self.data_dir(), &copy.data_dir())?;
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        copy.write_configuration(&settings.iter().map(owned).collect::<Vec<_>>())?;
        copy.password.clone_from(&self.password);
        Ok(copy)
    }

    /// Writes a file into the data directory that belongs to the server's user.
    pub(super) fn write_as_server(&mut self, name: &Path, text: &str) -> Result<()> {
        let path = self.data_dir().join(name);
        std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        self.installation.hand_over(&path)
    }

    fn write_configuration(&self, settings: &[(String, String)]) -> Result<()> {
        let socket_dir = self.socket_dir().display().to_string();
        // sun_path holds 107 bytes and PostgreSQL appends a file name of up to 20.
        if socket_dir.len() > 85 {
            bail!("{socket_dir} is too long for a unix socket; point TMPDIR to a shorter path");
        }
        let port = self.port.number().to_string();
        let addresses = match &self.place {
            Some(place) => format!("127.0.0.1,{}", place.address()),
            None => "127.0.0.1".to_owned(),
        };
        let fixed = [
            ("listen_addresses", addresses.as_str()),
            ("port", &port),
            ("unix_socket_directories", &socket_dir),
            ("shared_buffers", "128MB"),
            ("max_connections", "100"),
            ("max_wal_senders", "20"),
            ("max_replication_slots", "20"),
            ("fsync", "on"),
            ("timezone", "UTC"),
            ("log_line_prefix", "%m [%p] %q%a "),
        ];
        let mut lines = String::from("\n# test kit\n");
        let given = settings.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        for (name, value) in fixed.into_iter().chain(given) {
            writeln!(lines, "{name} = '{}'", value.replace('\'', "''"))?;
        }
        let path = self.data_dir().join("postgresql.conf");
        let mut text = std::fs::read_to_string(&path).context("read postgresql.conf")?;
        text.push_str(&lines);
        std::fs::write(&path, text).context("write postgresql.conf")
    }

    fn require_password(&mut self, password: &str) -> Result<()> {
        let quoted = password.replace('\'', "''");
        let statement = format!(
            "SET password_encryption = 'scram-sha-256'; ALTER USER postgres PASSWORD '{quoted}'"
        );
        self.execute_script(&statement)?;
        self.password = Some(password.to_owned());
        self.write_access_rules("scram-sha-256")?;
        self.execute_script("SELECT pg_reload_conf()")?;
        // The reload is a signal to the server: the new rules hold once a login with a wrong
        // password fails.
        let mut wrong = Client::configure();
        wrong.host("127.0.0.1").port(self.port()).user("postgres").password("certainly wrong");
        let is_refused = || wrong.connect(NoTls).is_err();
        wait_until("the new pg_hba.conf", START_TIMEOUT, &[&self.log_path()], || {
            let is_refused = match &self.place {
                Some(place) => place.enter(is_refused)?,
                None => is_refused(),
            };
            Ok(is_refused.then_some(()))
        })
    }

    /// Says who may connect by TCP, and how they prove who they are.
    fn write_access_rules(&self, method: &str) -> Result<()> {
        let mut rules = "local all all trust\nlocal replication all trust\n".to_owned();
        let line = self.place.as_ref().map(|_| wan::NETWORK);
        for network in ["127.0.0.1/32"].into_iter().chain(line) {
            for database in ["all", "replication"] {
                writeln!(rules, "host {database} all {network} {method}")?;
            }
        }
        std::fs::write(self.data_dir().join("pg_hba.conf"), rules).context("write pg_hba.conf")
    }

    /// The installation it runs on.
    pub fn installation(&self) -> &Installation {
        &self.installation
    }

    /// TCP port on 127.0.0.1; stays the same over restarts.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// The data directory; its name is its cluster's own, for [`template::place_children_apart`].
    pub fn data_dir(&self) -> PathBuf {
        let root = self.root.path();
        root.join(root.file_name().unwrap_or(OsStr::new("data")))
    }

    /// The directory of the unix socket.
    pub fn socket_dir(&self) -> PathBuf {
        self.root.path().to_owned()
    }

    /// The server's log.
    pub fn log_path(&self) -> PathBuf {
        self.root.path().join("postgres.log")
    }

    /// A connection URL for user `postgres`, for this process; with the password if one was set.
    pub fn url(&self, database: &str) -> String {
        match &self.place {
            Some(_) => self.url_at(&percent_encoded(&self.socket_dir()), database),
            None => self.url_at("127.0.0.1", database),
        }
    }

    /// As [`Cluster::url`], for a process in `place`: by loopback if the server is there too, else
    /// over the line. Of no use when the server is in no namespace.
    pub fn url_from(&self, place: &Namespace, database: &str) -> String {
        match &self.place {
            Some(own) if !own.is_same(place) => self.url_at(&own.address().to_string(), database),
            _ => self.url_at("127.0.0.1", database),
        }
    }

    fn url_at(&self, host: &str, database: &str) -> String {
        let password = match &self.password {
            Some(password) => format!(":{password}"),
            None => String::new(),
        };
        format!("postgres://postgres{password}@{host}:{}/{database}", self.port())
    }

    /// Where the server runs, if that is a network namespace.
    pub fn place(&self) -> Option<&Namespace> {
        self.place.as_ref()
    }

    fn config(&self, database: &str) -> ::postgres::Config {
        let mut config = Client::configure();
        match &self.place {
            Some(_) => config.host_path(self.socket_dir()),
            None => config.host("127.0.0.1"),
        };
        config
            .port(self.port())
            .user("postgres")
            .dbname(database)
            .application_name("farshore-testkit")
            .connect_timeout(Duration::from_secs(10));
        if let Some(password) = &self.password {
            config.password(password);
        }
        config
    }

    /// Connects to database `postgres` as its superuser.
    ///
    /// # Errors
    /// When the server is not running or refuses.
    pub fn connect(&self) -> Result<Client> {
        self.connect_to("postgres")
    }

    /// Connects to a database as the superuser.
    ///
    /// # Errors
    /// When the server is not running or refuses.
    pub fn connect_to(&self, database: &str) -> Result<Client> {
        self.config(database)
            .connect(NoTls)
            .with_context(|| format!("connect to {database} on port {}", self.port()))
    }

    /// Runs SQL statements separated by semicolons in database `postgres`, as one transaction
    /// unless they say otherwise.
    ///
    /// # Errors
    /// The server's message, of the first statement that fails.
    pub fn execute_script(&self, sql: &str) -> Result<()> {
        self.connect()?.batch_execute(sql).map_err(|error| match error.as_db_error() {
            Some(said) => anyhow::anyhow!("{said}"),
            None => error.into(),
        })
    }

    /// Whether the server was started and has not been stopped or killed through this value.
    pub fn is_running(&self) -> bool {
        self.server.is_some()
    }

    /// Starts the stopped server, and waits until it accepts connections (that is, until crash
    /// recovery is over).
    ///
    /// # Errors
    /// When it ends instead or takes more than two minutes; with the end of its log.
    pub fn start(&mut self) -> Result<()> {
        if self.server.is_some() {
            return Ok(());
        }
        let log_path = self.log_path();
        let log = OpenOptions::new().create(true).append(true).open(&log_path);
        let log = log.with_context(|| format!("open {}", log_path.display()))?;
        let mut command = self.installation.command("postgres");
        command
            .arg("-D")
            .arg(self.data_dir())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        // An orphaned server shuts down at once, and takes its children and shared memory along.
        let mut server = Supervised::spawn_in(self.place.as_ref(), command, libc::SIGQUIT)?;
        let pid_file = self.data_dir().join("postmaster.pid");
        watch_until("PostgreSQL to start", START_TIMEOUT, &[&log_path], || {
            if let Some(ended) = server.try_wait()? {
                bail!("PostgreSQL did not start: {}{}", ended.status, log_tail(&log_path, 15));
            }
            let text = std::fs::read_to_string(&pid_file).unwrap_or_default();
            let mut lines = text.lines();
            let is_ours = lines.next().and_then(|line| line.parse().ok()) == Some(server.pid());
            // The eighth line tells the state; a stale file of a killed server has another pid.
            let is_ready = lines.nth(6).is_some_and(|line| line.trim() == "ready");
            Ok((is_ours && is_ready).then_some(()))
        })?;
        self.server = Some(server);
        // What a killed predecessor left in shared memory, the start has removed.
        self.left_shared_memory.clear();
        self.left_segments.clear();
        Ok(())
    }

    /// Stops the server and waits for its end. A fast stop that takes more than a minute becomes
    /// an immediate one.
    ///
    /// # Errors
    /// When even that does not end it.
    pub fn stop(&mut self, mode: StopMode) -> Result<()> {
        self.note_costs();
        let Some(mut server) = self.server.take() else { return Ok(()) };
        let signals: &[i32] = match mode {
            StopMode::Fast => &[libc::SIGINT, libc::SIGQUIT],
            StopMode::Immediate => &[libc::SIGQUIT],
        };
        for signal in signals {
            server.signal(*signal);
            if server.wait(STOP_TIMEOUT)?.is_some() {
                return Ok(());
            }
        }
        bail!("PostgreSQL did not stop{}", log_tail(&self.log_path(), 15))
    }

    /// Ends every process of the cluster by SIGKILL, as a crash of the machine would, and waits
    /// until all are gone. What the operating system holds in its cache survives.
    ///
    /// # Errors
    /// When a process does not go away.
    pub fn kill9(&mut self) -> Result<()> {
        self.note_costs();
        let Some(mut server) = self.server.take() else { return Ok(()) };
        // A stopped postmaster forks no more, so the list of its children is complete.
        server.signal(libc::SIGSTOP);
        self.await_stopped(server.pid())?;
        let children: Vec<i32> = proc_fs::children(server.pid()).iter().map(|c| c.pid).collect();
        let handles: Vec<_> = children.iter().filter_map(|pid| open_pidfd(*pid).ok()).collect();
        for pid in children.iter().chain([&server.pid()]) {
            self.left_shared_memory.extend(proc_fs::mapped_files(*pid, SHARED_MEMORY));
        }
        self.left_segments.extend(self.shared_segment());
        server.signal(libc::SIGKILL);
        for pid in children {
            // SAFETY: kill has no memory preconditions. The parent is not reaping (stopped, then
            // dead), so the ids still name its children.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        if server.wait(STOP_TIMEOUT)?.is_none() {
            bail!("the postmaster survived SIGKILL");
        }
        for handle in handles {
            if !wait_pidfd(&handle, STOP_TIMEOUT)? {
                bail!("a server process survived SIGKILL");
            }
        }
        Ok(())
    }

    fn await_stopped(&self, pid: i32) -> Result<()> {
        watch_until("the postmaster to stand still", STOP_TIMEOUT, &[], || {
            let line = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let state = line.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            Ok(matches!(state, Some('T' | 'Z') | None).then_some(()))
        })
    }

    /// The System V segment that guards the data directory: its id is in the seventh line.
    fn shared_segment(&self) -> Option<i32> {
        let text = std::fs::read_to_string(self.data_dir().join("postmaster.pid")).ok()?;
        text.lines().nth(6)?.split_whitespace().nth(1)?.parse().ok()
    }

    /// Stops fast and starts again.
    ///
    /// # Errors
    /// As [`Cluster::stop`] and [`Cluster::start`].
    pub fn restart(&mut self) -> Result<()> {
        self.stop(StopMode::Fast)?;
        self.start()
    }

    fn note_costs(&mut self) {
        self.peak_rss_bytes = self.peak_rss_bytes();
        self.spent_cpu += self.cpu_of_running_server();
    }

    fn cpu_of_running_server(&self) -> Duration {
        let Some(server) = &self.server else { return Duration::ZERO };
        let postmaster = proc_fs::stat(server.pid());
        let reaped = postmaster.map_or(Duration::ZERO, |stat| stat.own_cpu + stat.reaped_cpu);
        let live = proc_fs::children(server.pid());
        live.iter().fold(reaped, |sum, child| sum + child.own_cpu + child.reaped_cpu)
    }

    /// CPU seconds of all processes of the cluster since it was created, over restarts.
    pub fn cpu_seconds(&self) -> f64 {
        (self.spent_cpu + self.cpu_of_running_server()).as_secs_f64()
    }

    /// The largest peak resident size seen of any one process, in bytes, shared buffers included.
    /// Processes that came and went between two calls are not seen.
    pub fn peak_rss_bytes(&self) -> u64 {
        let Some(server) = &self.server else { return self.peak_rss_bytes };
        let pids = proc_fs::children(server.pid()).into_iter().map(|child| child.pid);
        let live = pids.chain([server.pid()]).filter_map(proc_fs::peak_rss_bytes).max();
        self.peak_rss_bytes.max(live.unwrap_or(0))
    }

    /// Bytes of write-ahead log that a slot keeps the server from removing.
    ///
    /// # Errors
    /// When there is no such slot.
    pub fn retained_wal(&self, slot: &str) -> Result<u64> {
        let query = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint \
                     FROM pg_replication_slots WHERE slot_name = $1 AND restart_lsn IS NOT NULL";
        let row = self.connect()?.query_opt(query, &[&slot])?;
        let row = row.with_context(|| format!("no replication slot \"{slot}\" holds WAL"))?;
        Ok(row.get::<_, i64>(0).max(0) as u64)
    }

    fn remove_left_shared_memory(&mut self) {
        for file in std::mem::take(&mut self.left_shared_memory) {
            let _ = std::fs::remove_file(file);
        }
        for segment in std::mem::take(&mut self.left_segments) {
            // SAFETY: removing a segment by id needs no memory; it belonged to the server that
            // this value started and killed.
            unsafe { libc::shmctl(segment, libc::IPC_RMID, std::ptr::null_mut()) };
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let begin = Instant::now();
        if let Err(error) = self.stop(StopMode::Immediate) {
            eprintln!("stopping a test cluster failed after {:?}: {error:#}", begin.elapsed());
        }
        self.remove_left_shared_memory();
        if std::env::var_os("FARSHORE_KEEP").is_some() {
            self.root.disable_cleanup(true);
            eprintln!("kept: {}", Path::display(self.root.path()));
        }
    }
}

/// A path as the host in a URL.
fn percent_encoded(path: &Path) -> String {
    use std::os::unix::ffi::OsStrExt;
    let mut text = String::new();
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' => {
                text.push(char::from(*byte));
            }
            _ => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}
