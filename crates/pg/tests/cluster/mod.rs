//! A throwaway PostgreSQL server for one test: free port, private directory, unprivileged user.
#![allow(dead_code, reason = "each test file uses its own part")]

use farshore_pg::config::Environment;
use farshore_pg::{Config, Connection, Mode};
use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Where the binaries are: `PG_BIN`, or the newest of Debian's.
fn binaries() -> Option<PathBuf> {
    if let Some(directory) = std::env::var_os("PG_BIN") {
        return Some(directory.into());
    }
    let mut found: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
        .ok()?
        .flatten()
        .map(|entry| entry.path().join("bin"))
        .filter(|bin| bin.join("initdb").exists())
        .collect();
    found.sort();
    found.pop()
}

/// User and group to run the server as; `None` if we are not root and can run it ourselves.
fn unprivileged() -> Option<(u32, u32)> {
    // SAFETY: geteuid has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        return None;
    }
    for name in [c"postgres", c"nobody"] {
        // SAFETY: the name is a C string; the returned pointer is null or valid until the next
        // call, and is read at once. Tests that race here read the same entry.
        let ids = unsafe { libc::getpwnam(name.as_ptr()).as_ref() }.map(|e| (e.pw_uid, e.pw_gid));
        if ids.is_some() {
            return ids;
        }
    }
    panic!("neither user postgres nor nobody exists, and PostgreSQL refuses to run as root");
}

pub struct Cluster {
    directory: TempDir,
    bin: PathBuf,
    user: Option<(u32, u32)>,
    pub port: u16,
}

impl Cluster {
    /// Starts a server with these `pg_hba.conf` lines for TCP, and these settings. `None`, and a
    /// word about it, if there is no PostgreSQL here.
    pub fn start(hba: &[&str], settings: &[&str]) -> Option<Cluster> {
        Cluster::start_with_files(hba, settings, &[])
    }

    /// As `start`, with files for the server alone in its data directory.
    pub fn start_with_files(
        hba: &[&str],
        settings: &[&str],
        files: &[(&str, &str)],
    ) -> Option<Cluster> {
        let Some(bin) = binaries() else {
            eprintln!("skipped: no PostgreSQL server binaries (set PG_BIN to their directory)");
            return None;
        };
        let directory = tempfile::Builder::new().prefix("fs-pg-").tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let cluster = Cluster { directory, bin, user: unprivileged(), port };
        if let Some((uid, gid)) = cluster.user {
            chown(cluster.path(), Some(uid), Some(gid)).unwrap();
        }
        fs::set_permissions(cluster.path(), PermissionsExt::from_mode(0o755)).unwrap();
        cluster.run(
            "initdb",
            &["--no-sync", "-U", "postgres", "-A", "trust", "-E", "UTF8", "-D", "data"],
        );
        let data = cluster.path().join("data");
        let mut lines =
            vec!["local all all trust".to_owned(), "local replication all trust".into()];
        lines.extend(hba.iter().map(|line| (*line).to_owned()));
        fs::write(data.join("pg_hba.conf"), lines.join("\n") + "\n").unwrap();
        let mut conf = fs::read_to_string(data.join("postgresql.conf")).unwrap();
        conf.push_str(&format!(
            "\nport={port}\nlisten_addresses='127.0.0.1'\nunix_socket_directories='{}'\n\
             fsync=off\nwal_level=logical\nshared_buffers=16MB\nmax_wal_senders=5\n\
             max_replication_slots=5\nautovacuum=off\n{}\n",
            cluster.path().display(),
            settings.join("\n"),
        ));
        fs::write(data.join("postgresql.conf"), conf).unwrap();
        for (name, content) in files {
            let path = data.join(name);
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
            if let Some((uid, gid)) = cluster.user {
                chown(&path, Some(uid), Some(gid)).unwrap();
            }
        }
        cluster.run("pg_ctl", &["-D", "data", "-w", "-l", "log", "start"]);
        Some(cluster)
    }

    /// The cluster's directory, which also holds the Unix socket.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    pub fn run(&self, program: &str, arguments: &[&str]) {
        assert!(self.try_run(program, arguments), "{program}: {}", self.log());
    }

    fn try_run(&self, program: &str, arguments: &[&str]) -> bool {
        let mut command = Command::new(self.bin.join(program));
        command.args(arguments).current_dir(self.path()).stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(Stdio::null()).env("LC_ALL", "C");
        if let Some((uid, gid)) = self.user {
            command.uid(uid).gid(gid);
        }
        command.status().unwrap().success()
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.path().join("log")).unwrap_or_default()
    }

    /// Shuts the server down without waiting for it.
    pub fn begin_stop(&self, mode: &str) {
        self.run("pg_ctl", &["-D", "data", "-W", "-m", mode, "stop"]);
    }

    /// A configuration in an environment that has nothing but `HOME`, which is this cluster's
    /// directory.
    pub fn parse(&self, text: &str) -> Config {
        Config::parse_in(text, &self.environment()).unwrap()
    }

    pub fn environment(&self) -> Environment {
        Environment::default().with("HOME", self.path().to_str().unwrap())
    }

    /// The superuser, through the Unix socket.
    pub fn local(&self) -> Config {
        let directory = self.path().display();
        self.parse(&format!("host={directory} port={} user=postgres dbname=postgres", self.port))
    }

    pub async fn connect(&self) -> Connection {
        Connection::connect(&self.local(), Mode::Sql).await.unwrap()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("server log:\n{}", self.log());
        }
        self.try_run("pg_ctl", &["-D", "data", "-w", "-m", "immediate", "stop"]);
    }
}
