//! The product as a process: build it, start it, kill it, read its log and its costs.

use crate::child::{Ended, Supervised};
use crate::proc_fs;
use crate::wait::log_tail;
use crate::wan::Namespace;
use anyhow::{Context, Result, bail};
use std::fs::OpenOptions;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

/// The workspace's root directory.
pub fn workspace_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").components().collect()
}

/// The optimised binary as users get it: `FARSHORE_BIN`, else built once per process.
///
/// # Errors
/// When the build fails; with cargo's messages.
pub fn release_binary() -> Result<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    named_or_built("FARSHORE_BIN", &BUILT, || {
        let target = target_directory();
        cargo(&["build", "-p", "farshore-cli", "--release"], &target)?;
        Ok(target.join("release/farshore"))
    })
}

/// As the Makefile's `FAULTS`, so that little is compiled for the binary alone. A test of the
/// program brings the program with it, and is not run.
const FAULTS_BUILD: &[&str] = &[
    "test",
    "--workspace",
    "--features",
    "farshore-cli/faults",
    "--config",
    "profile.dev.opt-level=1",
    "--test",
    "commission",
    "--no-run",
];

/// The binary with crash points and defects switched in: `FARSHORE_FAULTS_BIN`, else built once
/// per process.
///
/// # Errors
/// When the build fails; with cargo's messages.
pub fn faults_binary() -> Result<PathBuf> {
    static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    named_or_built("FARSHORE_FAULTS_BIN", &BUILT, || {
        let target = target_directory();
        cargo(FAULTS_BUILD, &target)?;
        let built = target.join("debug/farshore");
        let kept = target.join("debug/farshore-faults");
        keep(&built, &kept).with_context(|| format!("copy {}", built.display()))?;
        Ok(kept)
    })
}

/// Copies a file, unless that was done: a build without faults has the same name.
fn keep(built: &Path, kept: &Path) -> Result<()> {
    let seen = |path: &Path| {
        let file = std::fs::metadata(path)?;
        std::io::Result::Ok((file.modified()?, file.len()))
    };
    let (modified, len) = seen(built)?;
    if seen(kept).is_ok_and(|kept| kept == (modified, len)) {
        return Ok(());
    }
    // Beside it first: another process may run the one that is there, or copy too.
    let beside = kept.with_extension(std::process::id().to_string());
    std::fs::copy(built, &beside)?;
    // Another build may have come in between.
    fault_points(&beside)?;
    std::fs::File::options().append(true).open(&beside)?.set_modified(modified)?;
    Ok(std::fs::rename(&beside, kept)?)
}

fn target_directory() -> PathBuf {
    let named = std::env::var_os("CARGO_TARGET_DIR").filter(|value| !value.is_empty());
    workspace_root().join(named.map_or_else(|| PathBuf::from("target"), PathBuf::from))
}

fn named_or_built(
    variable: &str,
    built: &OnceLock<Result<PathBuf, String>>,
    build: impl FnOnce() -> Result<PathBuf>,
) -> Result<PathBuf> {
    if let Some(named) = std::env::var_os(variable).filter(|value| !value.is_empty()) {
        return Ok(PathBuf::from(named));
    }
    let built = built.get_or_init(|| build().map_err(|error| format!("{error:#}")));
    built.clone().map_err(anyhow::Error::msg)
}

fn cargo(arguments: &[&str], target: &Path) -> Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    // What cargo tells a test about its package would be taken for the caller's choice, and some
    // crates are compiled anew when that changes.
    for (name, _) in std::env::vars_os() {
        let is_of_a_package = |name: &str| {
            ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_", "CARGO_BIN_", "CARGO_PRIMARY_"]
                .iter()
                .any(|beginning| name.starts_with(beginning))
        };
        if name.to_str().is_some_and(is_of_a_package) {
            command.env_remove(&name);
        }
    }
    let output = command
        .args(arguments)
        .arg("--target-dir")
        .arg(target)
        .current_dir(workspace_root())
        .stdin(Stdio::null())
        .output()
        .context("run cargo")?;
    if !output.status.success() {
        bail!("building farshore failed:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// The crash points that a faults build knows, as its verb `fault-points` lists them.
///
/// # Errors
/// When the binary does not know the verb: it is not a faults build.
pub fn fault_points(binary: &Path) -> Result<Vec<String>> {
    let output = Command::new(binary)
        .arg("fault-points")
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("run {} fault-points", binary.display()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{} fault-points failed: {}", binary.display(), said.trim());
    }
    let text = String::from_utf8(output.stdout).context("fault-points printed no UTF-8")?;
    Ok(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect())
}

/// How to start the process.
#[derive(Debug, Clone)]
pub struct FarshoreBuilder {
    binary: PathBuf,
    site: PathBuf,
    log: PathBuf,
    environment: Vec<(String, String)>,
    place: Option<Namespace>,
}

/// A running `farshore run`, or one that has ended. Dropping it kills it; if the test process
/// dies, the kernel kills it.
#[derive(Debug)]
pub struct Farshore {
    process: Supervised,
    log: PathBuf,
    /// Bytes of the log that others had written before.
    log_start: usize,
}

impl FarshoreBuilder {
    /// Sets an environment variable; a later value for the same name wins.
    pub fn env(mut self, name: &str, value: &str) -> FarshoreBuilder {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Runs it in a network namespace. Default: where the test runs.
    pub fn place(mut self, place: &Namespace) -> FarshoreBuilder {
        self.place = Some(place.clone());
        self
    }

    /// The file that its output is appended to. Default: beside the site file, ending in `.log`.
    pub fn log(mut self, path: &Path) -> FarshoreBuilder {
        self.log = path.to_owned();
        self
    }

    /// The file that its output is appended to.
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// Starts `farshore run SITE` and returns at once.
    ///
    /// # Errors
    /// When the log cannot be opened or the program cannot be started.
    pub fn start(&self) -> Result<Farshore> {
        let log = OpenOptions::new().create(true).append(true).open(&self.log);
        let log = log.with_context(|| format!("open {}", self.log.display()))?;
        let log_start = usize::try_from(log.metadata()?.len())?;
        let mut command = Command::new(&self.binary);
        command
            .arg("run")
            .arg(&self.site)
            // Faults are what the caller says, not what its own environment holds.
            .env_remove("FARSHORE_CRASH")
            .env_remove("FARSHORE_DEFECT")
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let process = Supervised::spawn_in(self.place.as_ref(), command, libc::SIGKILL)?;
        Ok(Farshore { process, log: self.log.clone(), log_start })
    }

    /// Runs `farshore status SITE --json` and returns what it prints.
    ///
    /// # Errors
    /// When it cannot be run or fails; with its message.
    pub fn status_json(&self) -> Result<String> {
        let command = self.place.as_ref().map(|place| place.command(&self.binary));
        let output = command
            .unwrap_or_else(|| Command::new(&self.binary))
            .arg("status")
            .arg(&self.site)
            .arg("--json")
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("run {} status", self.binary.display()))?;
        if !output.status.success() {
            bail!("farshore status failed: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        String::from_utf8(output.stdout).context("farshore status printed no UTF-8")
    }
}

impl Farshore {
    /// `binary` is to be run with this site file.
    pub fn builder(binary: &Path, site: &Path) -> FarshoreBuilder {
        FarshoreBuilder {
            binary: binary.to_owned(),
            site: site.to_owned(),
            log: site.with_extension("log"),
            environment: Vec::new(),
            place: None,
        }
    }

    /// Sends a signal, to stop or to continue it.
    pub fn signal(&mut self, signal: i32) {
        self.process.signal(signal);
    }

    /// Process id.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Where its output goes.
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// The last lines of its output, for messages.
    pub fn log_tail(&self) -> String {
        log_tail(&self.log, 25)
    }

    /// What it has printed.
    pub fn said(&self) -> String {
        let all = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(all.get(self.log_start..).unwrap_or_default()).into_owned()
    }

    /// Whether it ended itself at this crash point, and not otherwise.
    pub fn was_killed_at(&self, point: &str, status: ExitStatus) -> bool {
        status.signal() == Some(libc::SIGKILL)
            && self.said().contains(&format!("fault: SIGKILL at {point} "))
    }

    /// Waits for at most `timeout` until it ends itself at the crash point that `FARSHORE_CRASH`
    /// names in this form: `point[:nth][:cut]`.
    ///
    /// # Errors
    /// When it still runs then, or ended in any other way; with the end of its log.
    pub fn await_kill(&mut self, crash: &str, timeout: Duration) -> Result<()> {
        let Some(ended) = self.process.wait(timeout)? else {
            bail!("{crash} was not reached within {timeout:?}{}", self.log_tail());
        };
        let point = crash.split(':').next().unwrap_or_default();
        if !self.was_killed_at(point, ended.status) {
            bail!("{} instead of a kill at {crash}{}", ended.status, self.log_tail());
        }
        Ok(())
    }

    /// How it ended; `None` while it runs.
    ///
    /// # Errors
    /// When the kernel refuses to tell.
    pub fn exit_status(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.process.try_wait()?.map(|ended| ended.status))
    }

    /// Waits for its end for at most `timeout`; `None` when it still runs.
    ///
    /// # Errors
    /// When the kernel refuses to tell.
    pub fn wait(&mut self, timeout: Duration) -> Result<Option<Ended>> {
        self.process.wait(timeout)
    }

    /// Ends it by SIGKILL and waits until it is gone.
    ///
    /// # Errors
    /// When it does not go.
    pub fn kill9(&mut self) -> Result<Ended> {
        self.process.signal(libc::SIGKILL);
        self.process.wait(Duration::from_secs(30))?.context("farshore survived SIGKILL")
    }

    /// Asks it to shut down (SIGTERM) and waits for at most `timeout`.
    ///
    /// # Errors
    /// When it still runs then; with the end of its log.
    pub fn sigterm(&mut self, timeout: Duration) -> Result<Ended> {
        self.process.signal(libc::SIGTERM);
        match self.process.wait(timeout)? {
            Some(ended) => Ok(ended),
            None => bail!("farshore did not stop within {timeout:?}{}", self.log_tail()),
        }
    }

    /// CPU seconds, also after its end.
    ///
    /// # Errors
    /// When the kernel refuses to tell.
    pub fn cpu_seconds(&mut self) -> Result<f64> {
        let live = proc_fs::stat(self.pid()).map(|stat| stat.own_cpu + stat.reaped_cpu);
        let ended = self.process.try_wait()?.map(|ended| ended.cpu);
        Ok(ended.or(live).unwrap_or_default().as_secs_f64())
    }

    /// Peak resident size in bytes; after its end, the last value that was seen before (every
    /// kill, signal and wait looks).
    pub fn peak_rss_bytes(&mut self) -> u64 {
        self.process.peak_rss_bytes()
    }
}
