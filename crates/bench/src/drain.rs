//! Scenario `drain`: everything is stopped while a backlog builds on the publisher; then each
//! contender in turn carries it to a target of its own. Measured is the time from the start of
//! its work to the last transaction being visible.
//!
//! Both contenders drain the *same* backlog, each from a slot of its own that was made before the
//! load, into databases prepared alike. While one works the other has no process running. They
//! take turns at going first, run by run, and every run begins with fresh databases.

mod backlog;
mod farshore;
mod ground;
mod mix_59;
mod native;
mod rows_1k;
mod single_row;

use crate::arguments::Plan;
use crate::measurement::{Drained, Measurement};
use crate::progress::say;
use crate::servers::Servers;
use anyhow::{Context, Result};
use backlog::Backlog;
use farshore::Farshore;
use farshore_testkit::checksum;
use farshore_testkit::interrupt::{Interrupt, Interrupted};
use ground::Ground;
use native::Native;
use serde_json::json;
use std::path::Path;

/// The scenario's name.
pub const NAME: &str = "drain";

/// What the backlog is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainCase {
    /// 1,000,000 inserted rows of 1 KB, 100 per transaction.
    Rows1k,
    /// 400,000 commands over 59 tables: 70 % insert, 20 % update, 10 % delete, 50 per transaction.
    Mix59,
    /// 200,000 transactions of one inserted row.
    Insert1,
    /// 200,000 transactions of one updated row.
    Update1,
}

impl DrainCase {
    /// All cases, in the order they are run.
    pub const ALL: [DrainCase; 4] =
        [DrainCase::Rows1k, DrainCase::Mix59, DrainCase::Insert1, DrainCase::Update1];

    /// The name on the command line and in the output.
    pub fn name(self) -> &'static str {
        match self {
            DrainCase::Rows1k => "rows-1k",
            DrainCase::Mix59 => "mix-59",
            DrainCase::Insert1 => "insert-1",
            DrainCase::Update1 => "update-1",
        }
    }

    fn backlog(self, scale: f64) -> Box<dyn Backlog> {
        match self {
            DrainCase::Rows1k => Box::new(rows_1k::Rows1k::new(scale)),
            DrainCase::Mix59 => Box::new(mix_59::Mix59::new(scale)),
            DrainCase::Insert1 => Box::new(single_row::Insert1::new(scale)),
            DrainCase::Update1 => Box::new(single_row::Update1::new(scale)),
        }
    }
}

/// Measures the planned cases one after the other and reports each as it is done. Returns the
/// cases that failed, with their errors.
///
/// # Errors
/// When nothing can be measured at all, or on an interrupt.
pub fn run(
    plan: &Plan,
    interrupt: &Interrupt,
    report: &mut dyn FnMut(Measurement) -> Result<()>,
) -> Result<Vec<(String, String)>> {
    let binary = farshore::binary()?;
    say("starting publisher and subscriber");
    let servers = Servers::start()?;
    let mut failed = Vec::new();
    for case in &plan.cases {
        match measure(*case, plan, &servers, &binary, interrupt) {
            Ok(measurement) => {
                say(&format!(
                    "{NAME}/{}: farshore {:.2} s, native {:.2} s: {:.2} ×",
                    case.name(),
                    measurement.farshore,
                    measurement.others.values().copied().fold(f64::INFINITY, f64::min),
                    measurement.advantage
                ));
                report(measurement)?;
            }
            Err(error) if error.is::<Interrupted>() => return Err(error),
            Err(error) => {
                say(&format!("{NAME}/{} failed: {error:#}", case.name()));
                failed.push((format!("{NAME}/{}", case.name()), format!("{error:#}")));
            }
        }
    }
    Ok(failed)
}

fn measure(
    case: DrainCase,
    plan: &Plan,
    servers: &Servers,
    binary: &Path,
    interrupt: &Interrupt,
) -> Result<Measurement> {
    let backlog = case.backlog(plan.scale);
    let (mut farshore, mut native) = (Vec::new(), Vec::new());
    let mut wal_bytes = 0;
    for run in 0..plan.runs {
        let label = format!("{NAME}/{} run {}/{}", case.name(), run + 1, plan.runs);
        let ground = Ground::new(servers, case.name(), &label, interrupt)?;
        // The same data in every run: runs differ by chance alone.
        let turn = take_turn(&ground, backlog.as_ref(), plan.seed, binary, run % 2 == 1);
        ground.clear(turn.is_err())?;
        let turn = turn?;
        farshore.push(turn.farshore);
        native.push(turn.native);
        wal_bytes = turn.wal_bytes;
    }
    let work = backlog.work();
    let mut settings = servers.settings();
    settings.extend([
        ("scale", json!(plan.scale)),
        ("seed", json!(plan.seed)),
        ("commands", json!(work.commands)),
        ("transactions", json!(work.transactions)),
        ("tables", json!(work.tables)),
        ("backlog_wal_mb", json!(wal_bytes >> 20)),
        ("native_options", json!(native::OPTIONS)),
        ("native_timed", json!("ALTER SUBSCRIPTION ENABLE to last row visible")),
        ("farshore_timed", json!("process start to last row visible")),
    ]);
    Ok(Measurement::of_drains(NAME, case.name(), &farshore, &native, settings))
}

struct Turn {
    farshore: Drained,
    native: Drained,
    wal_bytes: u64,
}

/// One run: prepare both, build the backlog, drain it twice, prove both equal.
fn take_turn(
    ground: &Ground<'_>,
    backlog: &dyn Backlog,
    seed: u64,
    binary: &Path,
    farshore_first: bool,
) -> Result<Turn> {
    ground.say("preparing");
    ground.create(backlog, seed)?;
    let mut native = Native::prepare(ground)?;
    let mut farshore = Farshore::prepare(ground, binary)?;
    ground.even_out(native::DATABASE)?;
    ground.even_out(farshore::DATABASE)?;

    let work = backlog.work();
    ground.say(&format!(
        "building the backlog: {} commands in {} transactions",
        work.commands, work.transactions
    ));
    let wal_bytes = ground.build(backlog, seed)?;
    ground.say(&format!("backlog of {} MB of WAL", wal_bytes >> 20));

    let mut drain_native = || -> Result<Drained> {
        let drained = native.drain(ground)?;
        ground.say(&format!("native drained it in {:.2} s", drained.seconds));
        Ok(drained)
    };
    let mut drain_farshore = || -> Result<Drained> {
        let drained = farshore.drain(ground)?;
        ground.say(&format!("farshore drained it in {:.2} s", drained.seconds));
        Ok(drained)
    };
    let (farshore, native) = if farshore_first {
        let first = drain_farshore()?;
        (first, drain_native()?)
    } else {
        let first = drain_native()?;
        (drain_farshore()?, first)
    };

    let source = ground.source_url();
    let tables = checksum::tables_in_schema(&source, backlog::SCHEMA)?;
    for database in [native::DATABASE, farshore::DATABASE] {
        ground.interrupt().check()?;
        checksum::assert_equal(&source, &ground.target_url(database), &tables)
            .with_context(|| format!("{database} is not equal to the publisher"))?;
    }
    ground.say(&format!("both equal to the publisher: {} tables", tables.len()));
    Ok(Turn { farshore, native, wal_bytes })
}
