//! Where PostgreSQL's programs are, and as whom they run.

use anyhow::{Context, Result, bail};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The programs of one PostgreSQL version.
#[derive(Debug, Clone)]
pub struct Installation {
    major: u32,
    version: String,
    bin: PathBuf,
    run_as: Option<RunAs>,
}

/// An unprivileged user: PostgreSQL refuses to run as root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RunAs {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl Installation {
    /// Finds a major version: the directory in `FARSHORE_PG<major>_BIN`, else Debian's, else the
    /// cache that `scripts/setup` fills.
    ///
    /// # Errors
    /// When no such version is found, or what is found does not run or is another version.
    pub fn find(major: u32) -> Result<Installation> {
        let variable = format!("FARSHORE_PG{major}_BIN");
        let candidates = match std::env::var_os(&variable) {
            Some(named) => vec![PathBuf::from(named)],
            None => vec![
                PathBuf::from(format!("/usr/lib/postgresql/{major}/bin")),
                cache_dir().join(format!("postgres-{major}/bin")),
            ],
        };
        let has_server =
            |bin: &&PathBuf| bin.join("postgres").exists() && bin.join("initdb").exists();
        let Some(bin) = candidates.iter().find(has_server) else {
            let tried: Vec<_> = candidates.iter().map(|bin| bin.display().to_string()).collect();
            bail!(
                "no PostgreSQL {major} in {}; run scripts/setup, or name its bin directory in {variable}",
                tried.join(" or ")
            );
        };
        Installation::at(major, bin)
    }

    fn at(major: u32, bin: &Path) -> Result<Installation> {
        let mut installation = Installation {
            major,
            version: String::new(),
            bin: bin.to_owned(),
            run_as: unprivileged_user()?,
        };
        let output = installation
            .command("postgres")
            .arg("--version")
            .output()
            .with_context(|| format!("run {}/postgres --version", bin.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        // "postgres (PostgreSQL) 15.20 (Debian 15.20-0+deb12u1)"
        let version = text.split_whitespace().nth(2).unwrap_or_default();
        if !output.status.success() || version.split('.').next() != Some(&major.to_string()) {
            bail!(
                "{}/postgres is not a working PostgreSQL {major}: {}{}",
                bin.display(),
                text.trim(),
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        installation.version = version.to_owned();
        Ok(installation)
    }

    /// Major version, as 15.
    pub fn major(&self) -> u32 {
        self.major
    }

    /// Full version, as "15.20".
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The directory with `postgres`, `initdb` and `pg_ctl`. Client programs (`psql`, `pgbench`)
    /// are only in Debian's.
    pub fn bin(&self) -> &Path {
        &self.bin
    }

    /// A command that runs one of its programs, as the unprivileged user when this process is
    /// root.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.bin.join(program));
        if let Some(user) = self.run_as {
            command.uid(user.uid).gid(user.gid);
            // libpq looks there for certificates, and stops at a folder that is closed to it.
            command.env("HOME", "/");
        }
        // The caller's directory may be closed to that user.
        command.current_dir("/");
        command
    }

    pub(super) fn run_as(&self) -> Option<RunAs> {
        self.run_as
    }

    /// Gives a file or directory to the user that PostgreSQL runs as.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn hand_over(&self, path: &Path) -> Result<()> {
        if let Some(user) = self.run_as {
            std::os::unix::fs::chown(path, Some(user.uid), Some(user.gid))
                .with_context(|| format!("give {} to user {}", path.display(), user.uid))?;
        }
        Ok(())
    }
}

/// The cache that `scripts/setup` fills: `FARSHORE_CACHE`, else for root `/var/cache/farshore`
/// (root's home is closed to the user that PostgreSQL runs as), else `farshore` in the user's
/// cache directory.
pub fn cache_dir() -> PathBuf {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(named) = variable("FARSHORE_CACHE") {
        return PathBuf::from(named);
    }
    if is_root() {
        return PathBuf::from("/var/cache/farshore");
    }
    match (variable("XDG_CACHE_HOME"), variable("HOME")) {
        (Some(cache), _) => PathBuf::from(cache).join("farshore"),
        (None, Some(home)) => PathBuf::from(home).join(".cache/farshore"),
        (None, None) => std::env::temp_dir().join("farshore-cache"),
    }
}

fn is_root() -> bool {
    // SAFETY: geteuid has no preconditions.
    unsafe { libc::geteuid() == 0 }
}

fn unprivileged_user() -> Result<Option<RunAs>> {
    if !is_root() {
        return Ok(None);
    }
    let passwd = std::fs::read_to_string("/etc/passwd").context("read /etc/passwd")?;
    let user = |name: &str| {
        passwd.lines().find_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            (fields.first() == Some(&name)).then(|| {
                Some(RunAs { uid: fields.get(2)?.parse().ok()?, gid: fields.get(3)?.parse().ok()? })
            })?
        })
    };
    match user("postgres").or_else(|| user("nobody")) {
        Some(user) => Ok(Some(user)),
        None => bail!("PostgreSQL refuses to run as root, and there is no user postgres or nobody"),
    }
}
