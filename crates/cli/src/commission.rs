mod link;

use crate::runtime;
use clap::{Args, Subcommand};
use farshore_commission::commit::{self, CommitOptions};
use farshore_commission::disk::{self, DiskOptions};
use farshore_commission::log::{self, LogOptions, Script};
use farshore_commission::report::Report;
use farshore_commission::units::parse_bytes;
use farshore_commission::{Error, Stop, compare, render};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Exit status after Ctrl-C or SIGTERM, as a shell reports SIGINT.
const EXIT_INTERRUPTED: u8 = 130;

/// What to measure, or to compare.
#[derive(Subcommand)]
pub enum CommissionAction {
    /// Durable writes into a folder: sizes, depths, sync methods, group commit; no database needed
    ///
    /// Writes into a file without a name, which is gone when the process ends, however it ends.
    /// Refuses when too little would stay free. 130 is the exit status after Ctrl-C.
    Disk(DiskArguments),
    /// The write-ahead log of a live PostgreSQL: rows in transactions of different sizes
    ///
    /// Writes into a schema of its own, which is gone at the end, whatever the end is. Refuses a
    /// standby, a role that may not make a schema, a publication of all tables, and a disk without
    /// room. 130 is the exit status after Ctrl-C.
    Log(LogArguments),
    /// What each level of synchronous_commit costs, by rows per statement
    ///
    /// Writes into a schema of its own, as log does, and refuses what log refuses.
    Commit(CommitArguments),
    /// The line to an upstream site: round trip, throughput, what a log does on it, how fast it drains
    ///
    /// Dials as the node does, with this site's own certificate; farshore must run at the other
    /// site, and need not run here. Nothing is stored, and nothing is left behind at either end.
    Link(link::LinkArguments),
    /// Two reports that --json printed: what changed beyond the noise
    Compare {
        /// The one before
        a: PathBuf,
        /// The one after
        b: PathBuf,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
}

/// Arguments of `commission disk`.
#[derive(Args)]
pub struct DiskArguments {
    /// Folder on the disk to be measured
    path: PathBuf,
    /// Size of the file that is written in
    #[arg(long, default_value = "1GB", value_parser = parse_bytes)]
    size: u64,
    /// Seconds that each figure is measured each time
    #[arg(long, default_value_t = 0.5, value_parser = seconds)]
    seconds: f64,
    /// How often each figure is measured; compare needs 3
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,
    /// Sizes of writes
    #[arg(long, value_delimiter = ',', value_parser = write_size, default_value = "4kB,8kB,16kB,64kB,256kB,1MB")]
    write_sizes: Vec<u32>,
    /// How many writes are under way at a time
    #[arg(long, value_delimiter = ',', default_value = "1,4,16,64")]
    outstanding: Vec<u32>,
    /// Clients that commit at a time
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64")]
    clients: Vec<u32>,
    /// Write on for this many minutes at the end, to see a cache that fills
    #[arg(long, value_name = "MINUTES", value_parser = seconds)]
    sustained: Option<f64>,
    #[command(flatten)]
    output: Output,
}

/// Arguments of `commission log`.
#[derive(Args)]
pub struct LogArguments {
    /// The server: a URL, a conninfo string, or service=NAME
    url: String,
    /// Rows written for each figure
    #[arg(long, default_value_t = 100_000)]
    rows: u64,
    /// Characters in a row
    #[arg(long, default_value_t = 4_000)]
    row_size: u32,
    /// Run the SQL of this file instead of inserting rows; understands \set of numbers and random()
    #[arg(long, value_name = "FILE", conflicts_with = "row_size")]
    script: Option<PathBuf>,
    /// Rows in a transaction, or runs of the script
    #[arg(long, value_delimiter = ',', default_value = "1,10,100,1000,10000,100000")]
    transaction_rows: Vec<u64>,
    /// Clients at a time
    #[arg(long, value_delimiter = ',', default_value = "1,16")]
    clients: Vec<u32>,
    /// How often each figure is measured; compare needs 3
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,
    /// Seconds that a figure may take each time; it is then of fewer rows
    #[arg(long, default_value_t = 30.0, value_parser = seconds)]
    seconds: f64,
    /// Log written in all at most
    #[arg(long, value_name = "SIZE", default_value = "32GB", value_parser = parse_bytes)]
    max_log: u64,
    #[command(flatten)]
    output: Output,
}

/// Arguments of `commission commit`.
#[derive(Args)]
pub struct CommitArguments {
    /// The server: a URL, a conninfo string, or service=NAME
    url: String,
    /// Rows in a statement
    #[arg(long, value_delimiter = ',', default_value = "1,10,100,1000,10000,100000,1000000")]
    statement_rows: Vec<u64>,
    /// Characters in a row
    #[arg(long, default_value_t = 100)]
    row_size: u32,
    /// How often each figure is measured; compare needs 3
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,
    /// Seconds that a figure may take each time, but for its first statement
    #[arg(long, default_value_t = 5.0, value_parser = seconds)]
    seconds: f64,
    /// Log written in all at most
    #[arg(long, value_name = "SIZE", default_value = "32GB", value_parser = parse_bytes)]
    max_log: u64,
    #[command(flatten)]
    output: Output,
}

/// Where a report goes.
#[derive(Args)]
pub(crate) struct Output {
    /// The report as JSON, to be kept for compare
    #[arg(long)]
    json: bool,
    /// Write the report as one HTML file, too
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 86_400.0 => Ok(value),
        _ => Err("a number above 0, at most 86400, is wanted".to_owned()),
    }
}

fn write_size(text: &str) -> Result<u32, String> {
    let size = parse_bytes(text)?;
    u32::try_from(size).map_err(|_| format!("{size} bytes are too many for one write"))
}

/// Measures or compares.
pub fn commission(action: CommissionAction) -> ExitCode {
    let done = match action {
        CommissionAction::Disk(arguments) => measure_disk(arguments),
        CommissionAction::Log(arguments) => measure_log(arguments),
        CommissionAction::Commit(arguments) => measure_commit(arguments),
        CommissionAction::Link(arguments) => match crate::load(&arguments.site) {
            Ok(config) => link::measure_link(&config, arguments),
            Err(code) => return code,
        },
        CommissionAction::Compare { a, b, json } => compare_files(&a, &b, json),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "farshore: {error}");
            match error {
                Error::Interrupted => ExitCode::from(EXIT_INTERRUPTED),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

fn measure_disk(arguments: DiskArguments) -> Result<(), Error> {
    let options = DiskOptions {
        folder: arguments.path,
        file_bytes: arguments.size,
        sizes: arguments.write_sizes,
        depths: arguments.outstanding,
        clients: arguments.clients,
        duration: Duration::from_secs_f64(arguments.seconds),
        repeats: arguments.repeats,
        methods: disk::SyncMethod::ALL.into(),
        sustained: arguments.sustained.map(|minutes| Duration::from_secs_f64(minutes * 60.0)),
    };
    ensure_writable(arguments.output.html.as_deref())?;
    let runtime = start_runtime()?;
    let stop = stop_on_signals(&runtime)?;
    let progress = ProgressLine::new();
    let report = disk::measure(&options, &stop, &|line| progress.say(line));
    progress.end();
    publish(&report?, &arguments.output)
}

fn measure_log(arguments: LogArguments) -> Result<(), Error> {
    let server = LogOptions::server(&arguments.url)?;
    let script = arguments.script.as_deref().map(Script::read).transpose()?;
    let options = LogOptions {
        server,
        rows: arguments.rows,
        row_size: arguments.row_size,
        script,
        transaction_rows: arguments.transaction_rows,
        clients: arguments.clients,
        repeats: arguments.repeats,
        time_max: Duration::from_secs_f64(arguments.seconds),
        log_bytes_max: arguments.max_log,
    };
    ensure_writable(arguments.output.html.as_deref())?;
    let runtime = start_runtime()?;
    let stop = stop_on_signals(&runtime)?;
    let progress = ProgressLine::new();
    let say = |line: &str| progress.say(line);
    let report = runtime.block_on(log::measure(&options, &stop, &say));
    progress.end();
    publish(&report?, &arguments.output)
}

fn measure_commit(arguments: CommitArguments) -> Result<(), Error> {
    let options = CommitOptions {
        server: LogOptions::server(&arguments.url)?,
        statement_rows: arguments.statement_rows,
        row_size: arguments.row_size,
        repeats: arguments.repeats,
        time_max: Duration::from_secs_f64(arguments.seconds),
        log_bytes_max: arguments.max_log,
    };
    ensure_writable(arguments.output.html.as_deref())?;
    let runtime = start_runtime()?;
    let stop = stop_on_signals(&runtime)?;
    let progress = ProgressLine::new();
    let say = |line: &str| progress.say(line);
    let report = runtime.block_on(commit::measure(&options, &stop, &say));
    progress.end();
    publish(&report?, &arguments.output)
}

fn compare_files(a: &Path, b: &Path, json: bool) -> Result<(), Error> {
    let comparison = compare::compare(&Report::read(a)?, &Report::read(b)?)?;
    if json { print_json(&comparison) } else { print(&render::comparison(&comparison)) }
}

fn start_runtime() -> Result<tokio::runtime::Runtime, Error> {
    runtime().map_err(|source| Error::Threads { wanted: 2, source })
}

/// Ctrl-C, SIGTERM and SIGHUP ask for an end in good order; a second signal does not wait.
fn stop_on_signals(runtime: &tokio::runtime::Runtime) -> Result<Stop, Error> {
    let (handle, stop) = Stop::new();
    let _inside = runtime.enter();
    let listen = |kind| signal(kind).map_err(|source| Error::Threads { wanted: 1, source });
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    let mut hang_up = listen(SignalKind::hangup())?;
    runtime.spawn(async move {
        for signals in 0.. {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
                _ = hang_up.recv() => {}
            }
            if signals > 0 {
                std::process::exit(EXIT_INTERRUPTED.into());
            }
            handle.stop();
        }
    });
    Ok(stop)
}

/// A page that cannot be written must not cost minutes of measuring first.
fn ensure_writable(page: Option<&Path>) -> Result<(), Error> {
    let Some(page) = page else { return Ok(()) };
    let folder = match page.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if folder.is_dir() {
        return Ok(());
    }
    Err(Error::Refused(format!(
        "there is no folder {} for the page: make it, or name another file with --html",
        folder.display()
    )))
}

fn publish(report: &Report, output: &Output) -> Result<(), Error> {
    // First what cannot fail for want of room.
    if output.json {
        print_json(report)?
    } else {
        print(&render::terminal(report))?
    }
    if let Some(page) = &output.html {
        std::fs::write(page, render::html(report)).map_err(|source| Error::File {
            what: "write",
            path: page.clone(),
            source,
        })?;
    }
    Ok(())
}

fn print_json(value: &impl serde::Serialize) -> Result<(), Error> {
    let text = serde_json::to_string_pretty(value).map_err(|error| cannot_print(error.into()))?;
    print(&text).and_then(|()| print("\n"))
}

fn print(text: &str) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(cannot_print)
}

fn cannot_print(source: std::io::Error) -> Error {
    Error::File { what: "write to", path: "standard output".into(), source }
}

/// What is going on, on standard error: one line that changes on a terminal, lines elsewhere.
struct ProgressLine {
    is_terminal: bool,
}

impl ProgressLine {
    fn new() -> ProgressLine {
        ProgressLine { is_terminal: std::io::stderr().is_terminal() }
    }

    fn say(&self, line: &str) {
        let mut out = std::io::stderr().lock();
        // Nobody may be reading any more; that is no reason to end.
        let _ = if self.is_terminal {
            write!(out, "\r\x1b[2K{line}").and_then(|()| out.flush())
        } else {
            writeln!(out, "{line}")
        };
    }

    fn end(&self) {
        if self.is_terminal {
            let _ = write!(std::io::stderr(), "\r\x1b[2K");
        }
    }
}
