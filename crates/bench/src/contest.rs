//! Both contenders on even ground: the same servers, the same backlog, taking turns.
//!
//! Both drain the *same* backlog, each from slots of its own that were made before the load, into
//! databases prepared alike. While one works the other has no process running. They take turns at
//! going first, run by run, and every run begins with fresh databases.

mod farshore;
mod ground;
mod meter;
mod native;
mod relay;

use farshore::{COMPRESSION, CONNECTIONS};
pub use farshore::{Farshore, Site, Status, binary, issue_certificates};
use ground::Built;
pub use ground::{DRAIN_MAX, Ground, SWITCH_MAX};
pub use native::Native;

use crate::arguments::Plan;
use crate::backlog::Backlog;
use crate::line::Conditions;
use crate::measurement::{Own, Run};
use crate::servers::Servers;
use anyhow::{Context, Result};
use farshore_testkit::checksum;
use farshore_testkit::interrupt::Interrupt;
use farshore_testkit::process::FarshoreBuilder;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What every case is measured with.
#[derive(Debug, Clone, Copy)]
pub struct Bench<'a> {
    /// How much, how often.
    pub plan: &'a Plan,
    /// The pair of servers.
    pub servers: &'a Servers,
    /// Farshore.
    pub binary: &'a Path,
    /// Ends everything.
    pub interrupt: &'a Interrupt,
}

/// Who carries rows from the publisher to databases of its own on the subscriber.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contender {
    /// This project.
    Farshore,
    /// PostgreSQL's own logical replication.
    Native,
}

impl Contender {
    /// Both.
    pub const BOTH: [Contender; 2] = [Contender::Native, Contender::Farshore];

    /// The name in messages, and how its databases' names begin.
    pub fn name(self) -> &'static str {
        match self {
            Contender::Farshore => "farshore",
            Contender::Native => "native",
        }
    }
}

/// A contender that has copied what was there and is stopped.
pub trait Contestant {
    /// Which one.
    fn contender(&self) -> Contender;

    /// Where only subscribers stand still while the backlog builds: brings up what runs meanwhile,
    /// or ran. After it, `start` lets the subscribers go on.
    ///
    /// # Errors
    /// When it does not come up.
    fn stand_by(&mut self) -> Result<()> {
        Ok(())
    }

    /// Lets it work; returns without waiting for what it does.
    ///
    /// # Errors
    /// When it cannot be started.
    fn start(&mut self) -> Result<()>;

    /// Waits until all that was there is copied and changes follow.
    ///
    /// # Errors
    /// When it has given up, or the time is over.
    fn await_copied(&mut self, timeout: Duration) -> Result<()>;

    /// Whether there is hope; asked often.
    ///
    /// # Errors
    /// Why it has given up.
    fn check(&mut self) -> Result<()>;

    /// Its own processes, if it has some.
    ///
    /// # Errors
    /// When the kernel refuses to tell.
    fn own(&mut self) -> Result<Vec<Own>>;

    /// Stops it and waits until it has let go of its slots.
    ///
    /// # Errors
    /// When it does not stop.
    fn stop(&mut self) -> Result<()>;

    /// A log that tells what went wrong.
    fn log(&self) -> PathBuf;

    /// Whom to ask how far it is, if it can be asked.
    fn status(&self) -> Option<FarshoreBuilder> {
        None
    }
}

/// What stands still while the backlog builds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopped {
    /// Everything behind the publisher: both do the same work.
    Everything,
    /// Subscribers alone. Farshore's log reader fills the store; native replication has nothing
    /// between publisher and subscriber, so for it this is the same.
    Subscribers,
}

/// Where Farshore is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sites {
    /// One site, beside the publisher.
    One,
    /// One beside the publisher, and one beside the subscriber that pulls from it.
    Two,
}

/// How two contenders meet.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// What stands still while the backlog builds.
    pub stopped: Stopped,
    /// Databases that each contender serves.
    pub subscribers: usize,
    /// Whether both reach the publisher through a relay that counts what it sends.
    pub counts_bytes: bool,
    /// Farshore's connections to a target at most, where it is not left to it.
    pub streams: Option<usize>,
    /// Where Farshore is.
    pub sites: Sites,
    /// zstd level on the link between two sites.
    pub compression: u64,
    /// Whether native's worker waits for its commits to be on disk, as Farshore does and as it does
    /// not by default.
    pub native_is_durable: bool,
    /// Whether Farshore serves its monitor.
    pub monitor: bool,
    /// The line between the servers, if there is one.
    pub line: Option<Conditions>,
}

impl Terms {
    /// One subscriber beside the publisher.
    pub const PLAIN: Terms = Terms {
        stopped: Stopped::Everything,
        subscribers: 1,
        counts_bytes: false,
        streams: None,
        sites: Sites::One,
        compression: COMPRESSION,
        native_is_durable: false,
        monitor: false,
        line: None,
    };
}

/// What both needed, run by run, and what the figures depend on.
#[derive(Debug)]
pub struct Contest {
    /// Farshore's runs.
    pub farshore: Vec<Run>,
    /// Native replication's.
    pub native: Vec<Run>,
    /// For the line of output.
    pub settings: BTreeMap<&'static str, Value>,
}

impl Contest {
    /// Lets both drain a backlog, as often as planned. `name` is for messages.
    ///
    /// # Errors
    /// When something fails, or a target is not equal in the end.
    pub fn hold(
        bench: Bench<'_>,
        name: &str,
        backlog: &dyn Backlog,
        terms: Terms,
    ) -> Result<Contest> {
        let mut contest = Contest::new(bench, backlog, terms);
        for run in 0..bench.plan.runs {
            contest.hold_once(bench, name, run, backlog, terms)?;
        }
        Ok(contest)
    }

    /// A contest without runs yet.
    pub fn new(bench: Bench<'_>, backlog: &dyn Backlog, terms: Terms) -> Contest {
        let mut settings = bench.settings(terms);
        let work = backlog.work();
        settings.extend([
            ("commands", json!(work.commands)),
            ("transactions", json!(work.transactions)),
            ("tables", json!(work.tables)),
            ("native_timed", json!("ALTER SUBSCRIPTION ENABLE to last row visible")),
            (
                "farshore_timed",
                json!(match terms.stopped {
                    Stopped::Everything => "process start to last row visible",
                    Stopped::Subscribers => "resume to last row visible; the store held it all",
                }),
            ),
        ]);
        if backlog.checks_foreign_keys() {
            let who = "checked for farshore's role; native's worker does not check them";
            settings.insert("foreign_keys", json!(who));
        }
        Contest { farshore: Vec::new(), native: Vec::new(), settings }
    }

    /// Lets both drain a backlog once.
    ///
    /// # Errors
    /// When something fails, or a target is not equal in the end.
    pub fn hold_once(
        &mut self,
        bench: Bench<'_>,
        name: &str,
        run: usize,
        backlog: &dyn Backlog,
        terms: Terms,
    ) -> Result<()> {
        let label = format!("{name} run {}/{}", run + 1, bench.plan.runs);
        let ground = Ground::new(bench, &label, terms)?;
        // The same data in every run: runs differ by chance alone.
        let turn = take_turn(&ground, backlog, terms, run % 2 == 1);
        ground.clear(turn.is_err())?;
        let turn = turn?;
        self.farshore.push(turn.farshore);
        self.native.push(turn.native);
        self.settings.insert("backlog_wal_mb", json!(turn.wal_bytes >> 20));
        Ok(())
    }
}

impl Bench<'_> {
    /// Settings that all lines of output have.
    pub fn settings(&self, terms: Terms) -> BTreeMap<&'static str, Value> {
        let mut settings = self.servers.settings();
        settings.extend([
            ("scale", json!(self.plan.scale)),
            ("seed", json!(self.plan.seed)),
            ("native_options", json!(native::options(terms.native_is_durable))),
        ]);
        if let (Some(line), Some(conditions)) = (&self.servers.line, terms.line) {
            settings.extend(line.settings(conditions));
        }
        if terms.sites == Sites::Two {
            settings.insert("connections", json!(CONNECTIONS));
            settings.insert("compression", json!(format!("zstd {}", terms.compression)));
        }
        settings
    }
}

struct Turn {
    farshore: Run,
    native: Run,
    wal_bytes: u64,
}

/// One run: prepare both, build the backlog, drain it twice, prove both equal.
fn take_turn(
    ground: &Ground<'_>,
    backlog: &dyn Backlog,
    terms: Terms,
    farshore_first: bool,
) -> Result<Turn> {
    ground.say("preparing");
    ground.create(backlog)?;
    let mut native = Native::prepare(ground)?;
    let mut farshore = Farshore::prepare(ground, backlog)?;
    ground.even_out()?;

    if terms.stopped == Stopped::Subscribers {
        farshore.pause()?;
        farshore.stand_by()?;
    }
    let work = backlog.work();
    ground.say(&format!(
        "building the backlog: {} commands in {} transactions",
        work.commands, work.transactions
    ));
    let Built { wal_bytes, end } = ground.build(backlog)?;
    ground.say(&format!("backlog of {} MB of WAL", wal_bytes >> 20));
    if terms.stopped == Stopped::Subscribers {
        farshore.await_stored(end)?;
        farshore.stop()?;
    }

    ground.set_line();
    let (mut farshore, mut native) = if farshore_first {
        let first = drain(ground, &mut farshore)?;
        (first, drain(ground, &mut native)?)
    } else {
        let first = drain(ground, &mut native)?;
        (drain(ground, &mut farshore)?, first)
    };
    prove_equal(ground)?;
    for run in [&mut farshore, &mut native] {
        let seconds = run.values.get("seconds").copied().unwrap_or(f64::INFINITY);
        run.values.insert("wal_mb_per_s", wal_bytes as f64 / 1e6 / seconds);
    }
    Ok(Turn { farshore, native, wal_bytes })
}

/// Measures from the start of a contender's work to the last row being visible in each of its
/// databases.
fn drain(ground: &Ground<'_>, contestant: &mut dyn Contestant) -> Result<Run> {
    let name = contestant.contender().name();
    ground.await_idle_slots()?;
    contestant.stand_by()?;
    let mut watch = ground.watch(contestant.contender())?;
    let meter = ground.begin(contestant)?;
    contestant.start()?;
    watch.await_markers(contestant)?;
    let seconds = meter.seconds();
    let (costs, sent) = (meter.read(ground, contestant)?, meter.sent(ground));
    contestant.stop()?;
    ground.say(&format!("{name} drained it in {seconds:.2} s"));
    let mut values = BTreeMap::from([("seconds", seconds), ("publisher_cpu_s", costs.publisher)]);
    values.extend(sent);
    Ok(Run { values, costs })
}

/// Compares every table of every target with the publisher's.
///
/// # Errors
/// When one differs, or a server cannot be reached.
pub fn prove_equal(ground: &Ground<'_>) -> Result<()> {
    let source = ground.source_url();
    let tables = checksum::tables_in_schema(&source, crate::backlog::SCHEMA)?;
    for contender in Contender::BOTH {
        for database in ground.targets(contender) {
            ground.interrupt().check()?;
            checksum::assert_equal(&source, &ground.target_url(&database), &tables)
                .with_context(|| format!("{database} is not equal to the publisher"))?;
        }
    }
    ground.say(&format!("all equal to the publisher: {} tables", tables.len()));
    Ok(())
}
