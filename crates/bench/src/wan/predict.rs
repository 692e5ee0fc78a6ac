//! What `commission link` says of a drain, and what the drain then is.
//!
//! Everything is on one machine. So what the work beside the link costs its processors is learned
//! first, from a smaller backlog drained over no line; and `commission link` is told (`--shared-cpu`).

use super::{ALSO, WAN};
use crate::backlog::{Backlog, Rows1k, SCHEMA};
use crate::contest::{Bench, Contender, Contestant, Farshore, Ground, SWITCH_MAX, Sites, Terms};
use crate::line::Conditions;
use crate::measurement::{Costs, Headline, Measurement, Run};
use crate::text::Prose;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The name under which the prediction is reported.
const PREDICTED: &str = "predicted";
/// Share of the backlog that the cost of everything else is learned from.
const LEARNED_SHARE: f64 = 0.3;
/// Share of the rows that are there for a sample: 6,000 of them.
const SAMPLED_SHARE: f64 = 0.006;
/// Bytes of a row in the log: its text, with the other columns and headers.
const ROW_BYTES: f64 = 1_020.0;

/// Measures how long a drain of rows of text takes over a line, beside what was predicted.
///
/// # Errors
/// When something fails.
pub fn measure(
    case: &'static str,
    bench: Bench<'_>,
    share: f64,
    conditions: Conditions,
) -> Result<Vec<Measurement>> {
    let terms = Terms { sites: Sites::Two, line: Some(conditions), ..Terms::PLAIN };
    let near = Terms { sites: Sites::One, line: None, ..Terms::PLAIN };
    let mut settings = bench.settings(terms);
    let (mut actual, mut predicted) = (Vec::new(), Vec::new());
    for run in 0..bench.plan.runs {
        let label = format!("{WAN}/{case} run {}/{}", run + 1, bench.plan.runs);
        let learned = Rows1k::new(bench.plan.scale * share.max(LEARNED_SHARE) * LEARNED_SHARE);
        let turn = on_ground(bench, &format!("{label}, beside the link"), near, |ground| {
            drain(ground, &learned, None)
        });
        let costs = turn?.0.costs;
        let own: f64 = costs.own.iter().map(|own| own.cpu).sum();
        let gb = learned.work().commands as f64 * ROW_BYTES / 1e9;
        let beside_s_per_gb = (costs.publisher + costs.subscriber + own) / gb;

        let backlog = Rows1k::new(bench.plan.scale * share);
        let turn = on_ground(bench, &label, terms, |ground| {
            drain(ground, &backlog, Some(beside_s_per_gb))
        });
        let (mut run, said) = turn?;
        let (seconds, rows) = (run.value("seconds"), backlog.work().commands as f64);
        run.values.insert("rows_per_s", rows / seconds);
        let rows_per_s = said.context("commission link was not asked")?;
        let values = BTreeMap::from([
            ("seconds", rows / rows_per_s),
            ("rows_per_s", rows_per_s),
            ("beside_cpu_s_per_gb", beside_s_per_gb),
        ]);
        let costs = Costs { publisher: 0.0, subscriber: 0.0, own: Vec::new() };
        predicted.push(Run { values, costs });
        actual.push(run);
    }
    settings.extend([
        ("backlog", json!("rows of 1 KB of text")),
        ("share", json!(share)),
        ("row_bytes", json!(ROW_BYTES)),
        ("predicted_by", json!("farshore commission link --sample --shared-cpu")),
    ]);
    let also = [&["rows_per_s", "beside_cpu_s_per_gb"], &ALSO[..]].concat();
    let headline =
        Headline { scenario: WAN, case, metric: "seconds", other: PREDICTED, also: &also };
    Ok(vec![Measurement::of_runs(headline, &actual, &predicted, settings)])
}

/// Databases for one drain, which are gone afterwards.
fn on_ground<T>(
    bench: Bench<'_>,
    label: &str,
    terms: Terms,
    work: impl FnOnce(&Ground<'_>) -> Result<T>,
) -> Result<T> {
    let ground = Ground::new(bench, label, terms)?;
    let done = work(&ground);
    ground.clear(done.is_err())?;
    done
}

/// Drains a backlog once; before, asks what that will be like, if it is said what the rest costs.
fn drain(
    ground: &Ground<'_>,
    backlog: &dyn Backlog,
    beside_s_per_gb: Option<f64>,
) -> Result<(Run, Option<f64>)> {
    ground.say("preparing");
    ground.create(backlog)?;
    let mut farshore = Farshore::prepare(ground, backlog)?;
    let said = match beside_s_per_gb {
        Some(beside) => Some(ask(ground, &mut farshore, beside)?),
        None => None,
    };
    ground.say("building the backlog");
    ground.build(backlog)?;
    ground.await_idle_slots()?;
    ground.set_line();
    let mut watch = ground.watch(Contender::Farshore)?;
    let meter = ground.begin(&mut farshore)?;
    farshore.start()?;
    watch.await_markers(&mut farshore)?;
    let seconds = meter.seconds();
    let (costs, sent) = (meter.read(ground, &mut farshore)?, meter.sent(ground));
    farshore.stop()?;
    ground.say(&format!("drained in {seconds:.2} s"));
    let mut values = BTreeMap::from([("seconds", seconds)]);
    values.extend(sent);
    Ok((Run { values, costs }, said))
}

/// What `commission link` says, with a few rows of the same kind as a sample.
fn ask(ground: &Ground<'_>, farshore: &mut Farshore<'_>, beside_s_per_gb: f64) -> Result<f64> {
    let mut source = ground.source()?;
    let mut prose = Prose::new(ground.seed().wrapping_add(2));
    Rows1k::new(SAMPLED_SHARE).build(&mut source, &mut prose, ground.interrupt())?;
    farshore.start()?;
    farshore.await_copied(SWITCH_MAX)?;
    ground.set_line();
    ground.say("asking commission link");
    let (beside, row) = (beside_s_per_gb.to_string(), (ROW_BYTES as u64).to_string());
    let sample = ground.publisher_url_from_far();
    let arguments = ["--json", "--sample", &sample, "--shared-cpu", &beside, "--row-size", &row];
    let report = farshore.commission_link(&arguments)?;
    let rows_per_s = rows_per_s(&report).context("no drain rate in the report")?;
    ground.say(&format!("predicted: {rows_per_s:.0} rows/s"));
    for line in report["verdict"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        ground.say(line);
    }
    farshore.stop()?;
    source.batch_execute(&format!("TRUNCATE {SCHEMA}.rows_1k"))?;
    Ok(rows_per_s)
}

/// What all parts of a report's drain do together.
fn rows_per_s(report: &Value) -> Option<f64> {
    let sections = report["sections"].as_array()?;
    let drain = sections.iter().find(|section| section["name"] == "drain")?;
    let rows = drain["rows"].as_array()?;
    let all = rows.iter().find(|row| row["at"][0] == "all together")?;
    let repeats = all["figures"]["rows_per_s"].as_array()?.iter().filter_map(Value::as_f64);
    Some(crate::measurement::median(repeats))
}
