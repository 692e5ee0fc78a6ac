//! `farshore demo`: two throwaway servers of different major versions, a live load, an initial
//! copy under that load, a kill in the middle, and at the end a proof that both sides are equal.

mod heartbeat;
mod schema;
mod screen;
mod stage;
mod summary;
mod watch;
mod workload;

use crate::output::{self, Printed};
use anyhow::{Context, Result, bail};
use clap::Args;
use farshore_testkit::checksum::compare_tables;
use farshore_testkit::interrupt::{Interrupt, Interrupted};
use farshore_testkit::process::{Farshore, FarshoreBuilder};
use farshore_testkit::wait::log_tail;
use heartbeat::Heartbeat;
use screen::{Screen, grouped, megabytes};
use stage::{Folder, Servers};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use summary::Summary;
use watch::{Known, Watch};
use workload::Workload;

/// Exit status after Ctrl-C or SIGTERM, as a shell reports SIGINT.
const EXIT_INTERRUPTED: u8 = 130;
/// Between two looks at how things are going.
const TICK: Duration = Duration::from_millis(20);
/// The load gets this far ahead before Farshore starts.
const HEAD_START: Duration = Duration::from_secs(1);
/// At least this long it streams before the kill, and again between recovery and the end.
const STREAMING_MIN: Duration = Duration::from_secs(3);
/// Far more than any step takes; beyond it something hangs.
const STEP_MAX: Duration = Duration::from_secs(300);
/// SIGTERM is obeyed well within this.
const STOP_MAX: Duration = Duration::from_secs(30);

/// What pgbench's tables take per unit of its scale, on both servers, with their log, in bytes.
const BYTES_PER_SCALE: u64 = 80 << 20;
/// Up to here nobody asks whether there is room.
const SMALL_SCALE: u32 = 10;

/// Arguments of `farshore demo`.
#[derive(Args)]
pub struct DemoArguments {
    /// Seconds of load; it takes longer when the initial copy does
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(5..=3600))]
    seconds: u64,
    /// Size of pgbench's tables, in units of 100,000 rows
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    scale: u32,
    /// Seed of the load
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Keep all folders: servers' data, store, site file, logs
    #[arg(long)]
    keep: bool,
    /// The report as JSON; progress goes to standard error
    #[arg(long)]
    json: bool,
}

/// Plays the demo. The exit status says whether both sides were equal at the end.
pub fn demo(arguments: &DemoArguments) -> ExitCode {
    if arguments.keep {
        stage::keep_folders();
    }
    let mut screen = Screen::new(arguments.json);
    match play(arguments, &mut screen) {
        Ok(summary) => {
            let mut printed = Printed::Whole;
            if arguments.json {
                match serde_json::to_string_pretty(&summary) {
                    Ok(text) => printed = output::print(&format!("{text}\n")),
                    Err(error) => eprintln!("farshore: {error}"),
                }
            }
            screen.report(&summary.lines(), &summary.verdict(), summary.is_equal());
            let equal = if summary.is_equal() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
            printed.or_failure(equal)
        }
        Err(error) if error.is::<Interrupted>() => {
            let folders = if arguments.keep { "kept" } else { "gone" };
            screen.step("stopped", &format!("interrupted; servers are gone, folders {folders}"));
            ExitCode::from(EXIT_INTERRUPTED)
        }
        Err(error) => {
            screen.step("failed", &format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn play(arguments: &DemoArguments, screen: &mut Screen) -> Result<Summary> {
    let interrupt = Interrupt::install()?;
    screen.title("Farshore demo: a live database, copied and followed, through a kill");
    let folder = Folder::new(arguments.keep)?;
    if arguments.scale > SMALL_SCALE {
        let wanted = u64::from(arguments.scale) * BYTES_PER_SCALE;
        let instead = "name a folder on a larger disk in TMPDIR, or give a smaller --scale";
        farshore_commission::room::ensure(folder.path(), wanted, "the demo", instead)?;
    }
    let (servers, tables) = stage::set_up(screen, &folder, arguments.scale, &interrupt)?;
    let scene = Scene {
        screen,
        interrupt,
        load: Some(Workload::start(
            &servers.publisher,
            arguments.seed,
            &folder.path().join("pgbench.log"),
        )?),
        heartbeat: Heartbeat::start(&servers)?,
        watch: Watch::start(folder.data_dir()).context("watch the node")?,
        node: None,
        site: folder.site(&servers)?,
        servers: &servers,
    };
    scene.perform(Duration::from_secs(arguments.seconds), &tables)
}

/// Everything at work. Fields are dropped in order: first who uses the servers.
struct Scene<'a> {
    screen: &'a mut Screen,
    interrupt: Interrupt,
    load: Option<Workload>,
    heartbeat: Heartbeat,
    watch: Watch,
    node: Option<Farshore>,
    site: FarshoreBuilder,
    servers: &'a Servers,
}

impl Scene<'_> {
    fn perform(mut self, seconds: Duration, tables: &[String]) -> Result<Summary> {
        let mut summary = Summary { tables: tables.len(), ..Summary::default() };
        let load_began = Instant::now();
        self.screen.step("load", "pgbench and mixed transactions on the publisher");
        self.until("load", |_, _| load_began.elapsed() >= HEAD_START)?;

        self.node = Some(self.site.start()?);
        self.screen.step("farshore", "started; the initial copy begins under load");
        self.until("copy", |known, _| known.streaming.is_some())?;
        let streaming = self.say_copied();

        let third = load_began + seconds / 3;
        self.until("stream", |_, _| Instant::now() >= third.max(streaming + STREAMING_MIN))?;
        summary.large_transaction_changes = workload::large_transaction(&self.servers.publisher)?;
        let large = Instant::now();
        let changes = grouped(summary.large_transaction_changes);
        self.screen.step("large", &format!("one transaction of {changes} changes"));

        // Its delay is to count as lag, not as an effect of the kill.
        self.until("stream", |_, heartbeat| heartbeat.up_to_date_after(large).is_some())?;

        let half = load_began + seconds / 2;
        self.until("stream", |_, _| Instant::now() >= half)?;
        let killed = self.kill_and_restart()?;
        self.until("recover", |_, heartbeat| heartbeat.up_to_date_after(killed).is_some())?;
        let recovered = self.heartbeat.up_to_date_after(killed).unwrap_or_else(Instant::now);
        let recovery = recovered.duration_since(killed).as_secs_f64();
        let what = format!("less than 1 s behind again {recovery:.1} s after the kill");
        self.screen.step("recovered", &what);
        summary.recovery_seconds = recovery;

        let end = (load_began + seconds).max(recovered + STREAMING_MIN);
        self.until("stream", |_, _| Instant::now() >= end)?;
        self.end_load(&mut summary)?;
        let spans = [(streaming, killed), (recovered, Instant::now())];
        summary.set_lags(&self.heartbeat.lags(&spans));
        self.stop_node(&mut summary)?;
        summary.tables_equal = self.compare(tables)?;
        Ok(summary)
    }

    /// Waits for `done`, and fails as soon as anything at work fails.
    fn until(&mut self, step: &str, done: impl Fn(&Known, &Heartbeat) -> bool) -> Result<()> {
        let begin = Instant::now();
        loop {
            self.interrupt.check()?;
            if let Some(load) = &mut self.load {
                load.check()?;
            }
            self.heartbeat.check()?;
            let known = self.watch.known();
            if let Some(node) = &mut self.node {
                if let Some(status) = node.exit_status()? {
                    bail!("farshore ended: {status}{}", node.log_tail());
                }
                if let Some(error) = known.stopped() {
                    bail!("farshore has stopped: {error}{}", node.log_tail());
                }
            }
            if done(&known, &self.heartbeat) {
                return Ok(());
            }
            if begin.elapsed() > STEP_MAX {
                let log = log_tail(self.site.log_path(), 25);
                bail!("step \"{step}\" has not ended within {STEP_MAX:?}{log}");
            }
            let (load, lag) = (&self.load, self.heartbeat.lag());
            self.screen
                .going_on(step, || describe(&known, load.as_ref().map(Workload::committed), lag));
            std::thread::park_timeout(TICK);
        }
    }

    /// Reports the copy; returns when streaming began.
    fn say_copied(&mut self) -> Instant {
        let known = self.watch.known();
        let mut summary = Summary::default();
        summary.set_counts(&known.totals(), &known.copied);
        let what = format!(
            "{} rows of {} tables in {:.1} s; streaming",
            grouped(summary.rows_copied),
            known.copied.tables,
            summary.copy_seconds
        );
        self.screen.step("copied", &what);
        known.streaming.unwrap_or_else(Instant::now)
    }

    /// SIGKILL, and a new start at once. Returns the moment of the kill.
    fn kill_and_restart(&mut self) -> Result<Instant> {
        let killed = Instant::now();
        if let Some(mut node) = self.node.take() {
            node.kill9()?;
        }
        self.node = Some(self.site.start()?);
        self.screen.step("kill -9", "farshore killed, started again at once");
        Ok(killed)
    }

    /// Ends the load and waits until the subscriber shows its last transaction.
    fn end_load(&mut self, summary: &mut Summary) -> Result<()> {
        if let Some(load) = self.load.take() {
            summary.mixed_transactions = load.stop()?;
        }
        self.heartbeat.stop_beating();
        summary.heartbeats = self.heartbeat.count();
        let ended = Instant::now();
        self.until("drain", |_, heartbeat| heartbeat.all_visible())?;
        summary.caught_up_seconds = ended.elapsed().as_secs_f64();
        let what =
            format!("the load's last row is visible {:.2} s later", summary.caught_up_seconds);
        self.screen.step("load ended", &what);
        let count = "SELECT count(*) FROM pgbench_history";
        let committed: i64 = self.servers.publisher.connect()?.query_one(count, &[])?.get(0);
        summary.pgbench_transactions = committed.unsigned_abs();
        Ok(())
    }

    /// Takes the last counts, and stops Farshore as an operator would.
    fn stop_node(&mut self, summary: &mut Summary) -> Result<()> {
        // The last transactions are visible before they are counted.
        let asked = Instant::now();
        self.until("count", |known, _| known.asked.is_some_and(|at| at > asked))?;
        let known = self.watch.known();
        summary.set_counts(&known.totals(), &known.copied);
        summary.store_bytes = known.publication().map_or(0, |p| p.store_bytes);
        if let Some(mut node) = self.node.take() {
            let ended = node.sigterm(STOP_MAX)?;
            if !ended.status.success() {
                bail!("farshore did not stop in order: {}{}", ended.status, node.log_tail());
            }
        }
        Ok(())
    }

    /// Compares table by table and returns how many are equal.
    fn compare(&mut self, tables: &[String]) -> Result<usize> {
        let source = self.servers.publisher.url("postgres");
        let target = self.servers.subscriber.url("postgres");
        let mut equal = 0;
        for table in tables {
            self.interrupt.check()?;
            self.screen.going_on("compare", || table.clone());
            let different = compare_tables(&source, &target, &[table])?;
            equal += usize::from(different.is_empty());
            for difference in different {
                self.screen.step("DIFFERS", &difference.to_string());
            }
        }
        self.screen.step("compared", &format!("{} tables by count and checksum", tables.len()));
        Ok(equal)
    }
}

/// One line about what is going on.
fn describe(known: &Known, mixed: Option<u64>, lag: Duration) -> String {
    let load = match mixed {
        Some(mixed) => format!("{} mixed transactions, ", grouped(mixed)),
        None => String::new(),
    };
    let Some(subscription) = known.subscription() else { return format!("{load}no answer yet") };
    if let Some(error) = &subscription.error {
        return format!("{load}{}: {error}", subscription.state);
    }
    if subscription.state == "copying" {
        let copied = &known.copied;
        return format!(
            "{load}copying: {} rows, {}",
            grouped(copied.rows),
            megabytes(copied.bytes)
        );
    }
    format!(
        "{load}{}: {} transactions replicated, lag {} ms",
        subscription.state,
        grouped(known.totals().transactions),
        lag.as_millis()
    )
}
