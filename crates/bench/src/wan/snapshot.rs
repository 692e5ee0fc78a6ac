//! The initial copy over the line: from nothing to all rows being visible.

use super::{ALSO, Loaded, WAN};
use crate::backlog::{Rows1k, SCHEMA, Tables};
use crate::contest::{
    Bench, Contender, Contestant, DRAIN_MAX, Farshore, Ground, Native, Terms, prove_equal,
};
use crate::measurement::{Headline, Measurement, NATIVE, Run};
use anyhow::{Context, Result};
use farshore_testkit::wait::watch_until;
use postgres::Client;
use serde_json::json;
use std::collections::BTreeMap;

/// Whether native replication has committed the copy of every table: states from `f` on.
const COPIED_NATIVELY: &str =
    "SELECT NOT EXISTS (SELECT FROM pg_subscription_rel WHERE srsubstate NOT IN ('f', 's', 'r'))";
/// Whether Farshore has begun to say how far it is.
const BEGUN: &str = "SELECT to_regclass('farshore.subscription') IS NOT NULL";
/// Whether Farshore has committed the copy of every table.
const COPIED: &str = "SELECT EXISTS (SELECT FROM farshore.subscription WHERE state <> 'copying')";

/// Measures the copy of rows of 1 KB, 1 GB of them.
///
/// # Errors
/// When something fails, or a target is not equal in the end.
pub fn measure(case: &'static str, bench: Bench<'_>, terms: Terms) -> Result<Vec<Measurement>> {
    let rows = Loaded(Rows1k::new(bench.plan.scale));
    let mut settings = bench.settings(terms);
    let (mut farshore, mut native) = (Vec::new(), Vec::new());
    for run in 0..bench.plan.runs {
        let label = format!("{WAN}/{case} run {}/{}", run + 1, bench.plan.runs);
        let ground = Ground::new(bench, &label, terms)?;
        let turn = take_turn(&ground, &rows, run % 2 == 1);
        ground.clear(turn.is_err())?;
        let turn = turn?;
        farshore.push(turn.farshore);
        native.push(turn.native);
        settings.insert("table_mb", json!(turn.bytes / 1_000_000));
    }
    settings.extend([
        ("rows", json!(rows.work().commands)),
        ("tables", json!(1)),
        ("native_timed", json!("CREATE SUBSCRIPTION to the copy being committed")),
        ("farshore_timed", json!("start of both processes to the copy being committed")),
    ]);
    let line = |metric| {
        let beside = if metric == "seconds" { "seconds_per_gb" } else { "seconds" };
        let also = [&[beside], &ALSO[..]].concat();
        let headline = Headline { scenario: WAN, case, metric, other: NATIVE, also: &also };
        Measurement::of_runs(headline, &farshore, &native, settings.clone())
    };
    Ok(vec![line("seconds"), line("seconds_per_gb")])
}

struct Turn {
    farshore: Run,
    native: Run,
    /// Of the table.
    bytes: i64,
}

fn take_turn(ground: &Ground<'_>, rows: &dyn Tables, farshore_first: bool) -> Result<Turn> {
    ground.say("filling the table");
    ground.create(rows)?;
    let size = "SELECT sum(pg_relation_size(oid))::bigint FROM pg_class \
                WHERE relkind = 'r' AND relnamespace = $1::text::regnamespace";
    let bytes: i64 = ground.source()?.query_one(size, &[&SCHEMA])?.get(0);
    let mut native = Native::new(ground)?;
    let mut farshore = Farshore::new(ground, rows)?;
    ground.set_line();
    let (farshore, native) = if farshore_first {
        let first = copy(ground, &mut farshore, bytes)?;
        (first, copy(ground, &mut native, bytes)?)
    } else {
        let first = copy(ground, &mut native, bytes)?;
        (copy(ground, &mut farshore, bytes)?, first)
    };
    prove_equal(ground)?;
    Ok(Turn { farshore, native, bytes })
}

fn copy(ground: &Ground<'_>, contestant: &mut dyn Contestant, bytes: i64) -> Result<Run> {
    let contender = contestant.contender();
    let targets = ground.targets(contender);
    let database = targets.first().context("a copy has a target")?;
    let mut target = ground.target(database)?;
    ground.await_idle_slots()?;
    let meter = ground.begin(contestant)?;
    contestant.start()?;
    let log = contestant.log();
    watch_until("the initial copy", DRAIN_MAX, &[&log], || {
        ground.interrupt().check()?;
        if is_copied(&mut target, contender)? {
            return Ok(Some(()));
        }
        contestant.check().map(|()| None)
    })?;
    let seconds = meter.seconds();
    let (costs, sent) = (meter.read(ground, contestant)?, meter.sent(ground));
    contestant.await_copied(DRAIN_MAX)?;
    contestant.stop()?;
    ground.say(&format!("{} copied it in {seconds:.2} s", contender.name()));
    let per_gb = seconds / (bytes.max(1) as f64 / 1e9);
    let mut values = BTreeMap::from([("seconds", seconds), ("seconds_per_gb", per_gb)]);
    values.extend(sent);
    Ok(Run { values, costs })
}

fn is_copied(target: &mut Client, contender: Contender) -> Result<bool> {
    let mut answer = |query| Ok(target.query_one(query, &[])?.get(0));
    match contender {
        Contender::Native => answer(COPIED_NATIVELY),
        Contender::Farshore => Ok(answer(BEGUN)? && answer(COPIED)?),
    }
}
