//! A farshore site in a temporary directory: its file, its process, its verbs.

use crate::SmallDisk;
use crate::small_disk::Mount;
use anyhow::{Context, Result, bail, ensure};
use farshore_testkit::child::Supervised;
use farshore_testkit::postgres::Cluster;
use farshore_testkit::process::{Farshore, FarshoreBuilder, faults_binary};
use farshore_testkit::wait::{log_tail, wait_until};
use farshore_testkit::wan::Namespace;
use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// SIGTERM must end a node within this time where nothing is in its way ([`Site::stop_promptly`]).
const PROMPT_STOP_MAX: Duration = Duration::from_secs(5);
/// SIGTERM must end a node within this time, whatever it is doing: the 20 s that it gives itself,
/// and what a busy machine takes.
const STOP_MAX: Duration = Duration::from_secs(30);
/// A verb must end within this time, whatever it waits for.
const VERB_MAX: Duration = Duration::from_secs(120);
/// Trouble must be told of within this time.
const TROUBLE_MAX: Duration = Duration::from_secs(60);
/// The log is searched for agents that gave up this often.
const LOOK_EVERY: Duration = Duration::from_millis(300);

/// What a verb printed and how it ended.
#[derive(Debug)]
pub struct Verb {
    /// Exit code; `None` when a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

/// A site file, its data directory and the `farshore run` on it. Dropping it kills the process.
#[derive(Debug)]
pub struct Site {
    // Dropped before the directory that it works in.
    farshore: Option<Farshore>,
    // As well, and after what writes there.
    mounts: Vec<Mount>,
    binary: PathBuf,
    text: String,
    /// Bytes of the log that were there when the process was last started.
    log_start: usize,
    environment: Vec<(String, String)>,
    place: Option<Namespace>,
    directory: TempDir,
}

/// What the log says when an operator lets an agent go on that had stopped.
const LET_GO_ON: [&str; 4] =
    [" resumed ", " to be skipped ", " to be copied anew ", " initialised from a backup "];

/// The first line of a log that says that an agent stopped, since one was let go on.
fn stop_since(log: &str) -> Option<&str> {
    log.lines().fold(None, |stop, line| {
        if line.contains(" stopped: ") {
            stop.or(Some(line))
        } else {
            stop.filter(|_| !LET_GO_ON.iter().any(|text| line.contains(text)))
        }
    })
}

/// A file from its beginning.
fn all_of(file: &mut File) -> Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl Site {
    /// A site without publications, whose data directory is `data` beside its file.
    ///
    /// # Errors
    /// When farshore does not build or there is no temporary directory.
    pub fn new() -> Result<Site> {
        Site::named("t1")
    }

    /// As [`Site::new`], with a name.
    ///
    /// # Errors
    /// As [`Site::new`].
    pub fn named(name: &str) -> Result<Site> {
        let mut directory = tempfile::Builder::new().prefix("farshore-site").tempdir()?;
        directory.disable_cleanup(std::env::var_os("FARSHORE_KEEP").is_some());
        let site = Site {
            farshore: None,
            mounts: Vec::new(),
            binary: faults_binary()?,
            text: format!("[site]\nname = \"{name}\"\ndata_dir = \"data\"\n"),
            log_start: 0,
            environment: Vec::new(),
            place: None,
            directory,
        };
        site.write()?;
        Ok(site)
    }

    /// Sets an environment variable for the verbs and the process.
    pub fn env(&mut self, name: &str, value: &str) {
        self.environment.push((name.to_owned(), value.to_owned()));
    }

    /// Mounts a small disk over this folder of the site's directory, until the site is dropped.
    /// `None`, with the test told as skipped, where that is not allowed.
    ///
    /// # Errors
    /// As [`SmallDisk::mount`].
    pub fn small_disk(&mut self, folder: &str, megabytes: u32) -> Result<Option<SmallDisk>> {
        let mut disk = SmallDisk::mount(&self.directory.path().join(folder), megabytes)?;
        self.mounts.extend(disk.as_mut().and_then(SmallDisk::take_mount));
        Ok(disk)
    }

    /// Runs the process and the verbs in a network namespace from now on.
    pub fn place(&mut self, place: &Namespace) {
        self.place = Some(place.clone());
    }

    /// A URL by which the site reaches a server of the test.
    pub fn url_of(&self, server: &Cluster, database: &str) -> String {
        match &self.place {
            Some(place) => server.url_from(place, database),
            None => server.url(database),
        }
    }

    /// Adds sections to the site file. A running node reads them when it is started again.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn add(&mut self, sections: &str) -> Result<()> {
        self.text.push('\n');
        self.text.push_str(sections);
        self.write()
    }

    /// Replaces text in the site file.
    ///
    /// # Errors
    /// When the text is not there, or the file cannot be written.
    pub fn replace(&mut self, from: &str, to: &str) -> Result<()> {
        ensure!(self.text.contains(from), "{from} is not in the site file:\n{}", self.text);
        self.text = self.text.replace(from, to);
        self.write()
    }

    /// Adds lines to the section `[site]`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn add_to_site(&mut self, lines: &str) -> Result<()> {
        self.replace("data_dir = \"data\"\n", &format!("data_dir = \"data\"\n{lines}"))
    }

    /// Takes the sections out whose names begin so, and returns them.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn remove_sections(&mut self, beginning: &str) -> Result<String> {
        let (mut kept, mut taken, mut takes) = (String::new(), String::new(), false);
        for line in self.text.split_inclusive('\n') {
            if let Some(section) = line.strip_prefix('[') {
                takes = section.starts_with(beginning);
            }
            if takes { &mut taken } else { &mut kept }.push_str(line);
        }
        self.text = kept;
        self.write()?;
        Ok(taken)
    }

    fn write(&self) -> Result<()> {
        std::fs::write(self.file(), &self.text).context("write site.toml")
    }

    /// The site file.
    pub fn file(&self) -> PathBuf {
        self.directory.path().join("site.toml")
    }

    /// The site's directory.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    fn builder(&self) -> FarshoreBuilder {
        let builder = Farshore::builder(&self.binary, &self.file());
        let builder = self.place.iter().fold(builder, FarshoreBuilder::place);
        self.environment.iter().fold(builder, |builder, (name, value)| builder.env(name, value))
    }

    /// What the node has logged since it was last started.
    pub fn log(&self) -> String {
        let all = std::fs::read(self.builder().log_path()).unwrap_or_default();
        String::from_utf8_lossy(all.get(self.log_start..).unwrap_or_default()).into_owned()
    }

    /// The last lines of the log, for messages.
    pub fn log_tail(&self) -> String {
        log_tail(self.builder().log_path(), 25)
    }

    /// Starts `farshore run`.
    ///
    /// # Errors
    /// When it runs already or cannot be started.
    pub fn start(&mut self) -> Result<()> {
        ensure!(self.farshore.is_none(), "farshore runs already");
        let builder = self.builder();
        let written = std::fs::metadata(builder.log_path()).map_or(0, |file| file.len());
        self.log_start = usize::try_from(written)?;
        self.farshore = Some(builder.start()?);
        Ok(())
    }

    /// The running process.
    ///
    /// # Errors
    /// When it was not started.
    pub fn farshore(&mut self) -> Result<&mut Farshore> {
        self.farshore.as_mut().context("farshore was not started")
    }

    /// Ends the node by SIGTERM: in good order and within the time that it gives itself. Returns how
    /// long it took.
    ///
    /// # Errors
    /// When it takes longer or exits with an error; with the end of its log.
    pub fn stop(&mut self) -> Result<Duration> {
        self.stop_within(STOP_MAX)
    }

    /// As [`Site::stop`], in less than 5 s: for scenarios about stopping.
    ///
    /// # Errors
    /// As [`Site::stop`].
    pub fn stop_promptly(&mut self) -> Result<Duration> {
        self.stop_within(PROMPT_STOP_MAX)
    }

    fn stop_within(&mut self, timeout: Duration) -> Result<Duration> {
        let Some(mut farshore) = self.farshore.take() else { bail!("farshore was not started") };
        let begin = Instant::now();
        let ended = farshore.sigterm(timeout)?;
        let took = begin.elapsed();
        ensure!(ended.status.success(), "SIGTERM: {}{}", ended.status, farshore.log_tail());
        Ok(took)
    }

    /// Stops and starts the node.
    ///
    /// # Errors
    /// As [`Site::stop`] and [`Site::start`].
    pub fn restart(&mut self) -> Result<()> {
        self.stop()?;
        self.start()
    }

    /// Sends the node a signal.
    ///
    /// # Errors
    /// When it was not started.
    pub fn signal(&mut self, signal: i32) -> Result<()> {
        let farshore = self.farshore.as_mut().context("farshore was not started")?;
        farshore.signal(signal);
        Ok(())
    }

    /// Where the node's messages go.
    pub fn log_path(&self) -> PathBuf {
        self.builder().log_path().to_owned()
    }

    /// Ends the node by SIGKILL.
    ///
    /// # Errors
    /// When it was not started or does not go.
    pub fn kill9(&mut self) -> Result<()> {
        let Some(mut farshore) = self.farshore.take() else { bail!("farshore was not started") };
        farshore.kill9().map(drop)
    }

    /// Waits until `farshore status` tells of an error of this publication or subscription that
    /// contains `text`, and returns its state and the error.
    ///
    /// # Errors
    /// On timeout, with the end of the log.
    pub fn await_trouble(&self, agent: &str, text: &str) -> Result<(String, String)> {
        self.await_trouble_while(agent, text, || Ok(()))
    }

    /// As [`Site::await_trouble`], doing `push` before each look: for trouble that goes away again
    /// unless it is kept up.
    ///
    /// # Errors
    /// As [`Site::await_trouble`], and what `push` fails with.
    pub fn await_trouble_while(
        &self,
        agent: &str,
        text: &str,
        mut push: impl FnMut() -> Result<()>,
    ) -> Result<(String, String)> {
        let builder = self.builder();
        let what = format!("{agent} to say \"{text}\"");
        wait_until(&what, TROUBLE_MAX, &[builder.log_path()], || {
            push()?;
            let status = self.status()?;
            let agents = ["publications", "subscriptions"].map(|kind| status[kind].as_array());
            let agent = agents.into_iter().flatten().flatten().find(|a| a["name"] == agent);
            let text_of = |key: &str| agent.and_then(|agent| agent[key].as_str()).unwrap_or("");
            let error = text_of("error");
            Ok(error.contains(text).then(|| (text_of("state").to_owned(), error.to_owned())))
        })
    }

    /// Waits for a node that ends by itself; returns its exit code.
    ///
    /// # Errors
    /// When it still runs after `timeout`, or was ended by a signal.
    pub fn await_exit(&mut self, timeout: Duration) -> Result<i32> {
        let Some(mut farshore) = self.farshore.take() else { bail!("farshore was not started") };
        let ended = farshore.wait(timeout)?;
        let ended = ended.with_context(|| format!("farshore still runs{}", farshore.log_tail()))?;
        ended.status.code().with_context(|| format!("farshore: {}", ended.status))
    }

    /// Waits for at most `timeout` until the node ends itself at this crash point, in the form of
    /// `FARSHORE_CRASH`.
    ///
    /// # Errors
    /// When it still runs then, or ended in any other way; with the end of its log.
    pub fn await_kill(&mut self, crash: &str, timeout: Duration) -> Result<()> {
        let Some(mut farshore) = self.farshore.take() else { bail!("farshore was not started") };
        farshore.await_kill(crash, timeout)
    }

    /// Waits until `probe` gives a value; gives up at once when the node ends or an agent stops
    /// for good.
    ///
    /// # Errors
    /// On timeout, on such an end, and what `probe` fails with; with the end of the log, and on
    /// timeout with what `farshore status` says.
    pub fn wait_for<T>(
        &mut self,
        what: &str,
        timeout: Duration,
        mut probe: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let log = self.builder().log_path().to_owned();
        let mut looked = Instant::now();
        let begin = Instant::now();
        let waited = wait_until(what, timeout, &[&log], || {
            if looked.elapsed() >= LOOK_EVERY {
                looked = Instant::now();
                if let Some(farshore) = &mut self.farshore
                    && let Some(status) = farshore.exit_status()?
                {
                    bail!("farshore ended ({status}) instead of {what}{}", log_tail(&log, 25));
                }
                if let Some(line) = stop_since(&self.log()) {
                    bail!("an agent stopped, waiting for {what}: {line}");
                }
            }
            probe()
        });
        waited.map_err(|error| match self.verb("status", &["--json"]) {
            Ok(status) if begin.elapsed() >= timeout => error.context(status.stdout),
            _ => error,
        })
    }

    /// Waits until the node has logged `text` since it was started; returns the line.
    ///
    /// # Errors
    /// On timeout, with the end of the log.
    pub fn await_log(&self, text: &str, timeout: Duration) -> Result<String> {
        let builder = self.builder();
        wait_until(&format!("\"{text}\" in the log"), timeout, &[builder.log_path()], || {
            Ok(self.log().lines().find(|line| line.contains(text)).map(str::to_owned))
        })
    }

    /// The program where the site is, with its environment and without arguments.
    pub fn command(&self) -> Command {
        let command = self.place.as_ref().map(|place| place.command(&self.binary));
        let mut command = command.unwrap_or_else(|| Command::new(&self.binary));
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs another verb on the site file; a verb of two words has a space.
    ///
    /// # Errors
    /// When the program cannot be run, or still runs after two minutes; with what it has said.
    pub fn verb(&self, verb: &str, arguments: &[&str]) -> Result<Verb> {
        let (mut stdout, mut stderr) = (tempfile::tempfile()?, tempfile::tempfile()?);
        let mut command = self.command();
        command
            .args(verb.split(' '))
            .arg(self.file())
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(stdout.try_clone()?)
            .stderr(stderr.try_clone()?);
        let mut running = Supervised::spawn(command, libc::SIGKILL)
            .with_context(|| format!("run {} {verb}", self.binary.display()))?;
        let ended = running.wait(VERB_MAX)?;
        let (stdout, stderr) = (all_of(&mut stdout)?, all_of(&mut stderr)?);
        let Some(ended) = ended else {
            bail!("farshore {verb} still runs after {VERB_MAX:?}: {stdout}{stderr}");
        };
        Ok(Verb { code: ended.status.code(), stdout, stderr })
    }

    /// What `farshore status --json` says; its exit code tells of trouble, not of failure.
    ///
    /// # Errors
    /// When it prints no JSON.
    pub fn status(&self) -> Result<serde_json::Value> {
        let status = self.verb("status", &["--json"])?;
        serde_json::from_str(&status.stdout).with_context(|| format!("{status:?}"))
    }
}
