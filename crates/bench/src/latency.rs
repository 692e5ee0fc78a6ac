//! Scenario `latency`: a steady rate of transactions, and how long each commit takes until a
//! reader of the subscriber sees it. Each contender has a phase of its own under the same kind of
//! load, while the other is stopped.
//!
//! `steady-1000` is 1,000 transactions of one row per second. The other two are a share of what
//! native replication can apply at most, which a drain of the same kind of transactions measures
//! first; theirs have 50 rows, because a machine that holds all three parties could not commit
//! enough transactions of one row.

mod beats;
mod pace;
mod traffic;

use crate::contest::{
    Bench, Contestant, DRAIN_MAX, Farshore, Ground, Native, Stopped, Terms, prove_equal,
};
use crate::measurement::{Headline, Measurement, Run};
use anyhow::Result;
use beats::{Beats, Sightings};
use farshore_testkit::wait::wait_until;
use pace::Load;
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Instant;
use traffic::Traffic;

/// The scenario's name.
pub const LATENCY: &str = "latency";
/// The metrics, each a line of output.
const METRICS: [&str; 3] = ["p50_ms", "p99_ms", "max_ms"];
/// Seconds of load that count.
const SECONDS: f64 = 30.0;
/// Seconds of load before, in which caches fill and statements are prepared.
const WARM_UP: f64 = 3.0;
/// A load that reaches less than this share of its rate is said to have fallen behind.
const PACE_KEPT: f64 = 0.98;
/// Databases and connections as in a drain.
const TERMS: Terms = Terms { stopped: Stopped::Everything, subscribers: 1, counts_bytes: false };

/// How fast transactions come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LatencyCase {
    /// 1,000 transactions of one row per second.
    Steady1000,
    /// Half of what native replication can apply.
    Ceiling50,
    /// Four fifths of what native replication can apply.
    Ceiling80,
}

impl LatencyCase {
    /// All cases, in the order they are run.
    pub const ALL: [LatencyCase; 3] =
        [LatencyCase::Steady1000, LatencyCase::Ceiling50, LatencyCase::Ceiling80];

    /// The name on the command line and in the output.
    pub fn name(self) -> &'static str {
        match self {
            LatencyCase::Steady1000 => "steady-1000",
            LatencyCase::Ceiling50 => "ceiling-50",
            LatencyCase::Ceiling80 => "ceiling-80",
        }
    }

    /// Of native replication's ceiling, where the rate depends on that.
    fn share(self) -> Option<f64> {
        match self {
            LatencyCase::Steady1000 => None,
            LatencyCase::Ceiling50 => Some(0.5),
            LatencyCase::Ceiling80 => Some(0.8),
        }
    }

    fn traffic(self) -> Traffic {
        match self {
            LatencyCase::Steady1000 => Traffic::of_one_row(),
            LatencyCase::Ceiling50 | LatencyCase::Ceiling80 => Traffic::of_many_rows(),
        }
    }

    /// Measures the case: a line for each metric.
    ///
    /// # Errors
    /// When something fails, or a target is not equal in the end.
    pub fn measure(self, bench: Bench<'_>) -> Result<Vec<Measurement>> {
        let name = format!("{LATENCY}/{}", self.name());
        let mut settings = bench.settings();
        let mut rate = 1_000.0;
        if let Some(share) = self.share() {
            let ceiling = native_ceiling(bench, &name, self.traffic())?;
            settings.insert("native_ceiling_per_s", json!(ceiling.round()));
            rate = ceiling * share;
        }
        let load = Load {
            per_second: rate,
            warm_up: WARM_UP * bench.plan.scale.min(1.0),
            seconds: SECONDS * bench.plan.scale,
        };
        let (mut farshore, mut native) = (Vec::new(), Vec::new());
        for run in 0..bench.plan.runs {
            let label = format!("{name} run {}/{}", run + 1, bench.plan.runs);
            let ground = Ground::new(bench, &label, TERMS)?;
            let turn = take_turn(&ground, self.traffic(), load, run % 2 == 1);
            ground.clear(turn.is_err())?;
            let turn = turn?;
            farshore.push(turn.farshore);
            native.push(turn.native);
        }
        settings.extend([
            ("transactions_per_s", json!(rate.round())),
            ("rows_per_transaction", json!(self.traffic().rows())),
            ("seconds", json!(load.seconds)),
            ("markers_per_s", json!(beats::PER_SECOND)),
        ]);
        let line = |metric| {
            let also = &["committed_per_s"];
            let headline = Headline { scenario: LATENCY, case: self.name(), metric, also };
            Measurement::of_runs(headline, &farshore, &native, settings.clone())
        };
        Ok(METRICS.map(line).into())
    }
}

struct Turn {
    farshore: Run,
    native: Run,
}

fn take_turn(
    ground: &Ground<'_>,
    mut traffic: Traffic,
    load: Load,
    farshore_first: bool,
) -> Result<Turn> {
    ground.say("preparing");
    ground.create(&traffic)?;
    let mut native = Native::prepare(ground)?;
    let mut farshore = Farshore::prepare(ground, &traffic)?;
    ground.even_out()?;
    let turn = if farshore_first {
        let farshore = phase(ground, &mut farshore, &mut traffic, load)?;
        Turn { farshore, native: phase(ground, &mut native, &mut traffic, load)? }
    } else {
        let native = phase(ground, &mut native, &mut traffic, load)?;
        Turn { native, farshore: phase(ground, &mut farshore, &mut traffic, load)? }
    };
    // Whoever was first has the other's phase still before it, and the end of the load may have
    // come after the last marker.
    let mut source = ground.source()?;
    Beats::of(&mut source)?.commit(traffic.next_beat())?;
    let both: [&mut dyn Contestant; 2] = [&mut native, &mut farshore];
    for contestant in both {
        contestant.start()?;
        await_beat(ground, contestant, traffic.last_beat())?;
        contestant.stop()?;
    }
    prove_equal(ground)?;
    Ok(turn)
}

/// The load with one contender at work.
fn phase(
    ground: &Ground<'_>,
    contestant: &mut dyn Contestant,
    traffic: &mut Traffic,
    load: Load,
) -> Result<Run> {
    let name = contestant.contender().name();
    ground.await_idle_slots()?;
    contestant.start()?;
    await_beat(ground, contestant, traffic.last_beat())?;
    let meter = ground.begin(contestant)?;
    ground.say(&format!("{name}: {:.0} transactions per second", load.per_second));
    let (beats, sightings, committed) = pace::run(ground, contestant, traffic, load)?;
    let costs = meter.read(ground, contestant)?;
    contestant.stop()?;

    let latencies = sightings.latencies_ms(&beats, load.warm_up);
    let quantile = |share| beats::quantile(&latencies, share);
    let per_second = committed as f64 / (load.warm_up + load.seconds);
    ground.say(&format!(
        "{name}: p50 {:.1} ms, p99 {:.1} ms, max {:.1} ms at {per_second:.0} per second",
        quantile(0.5),
        quantile(0.99),
        quantile(1.0)
    ));
    if per_second < PACE_KEPT * load.per_second {
        ground.say("the publisher could not commit as many as it was asked to");
    }
    let values = BTreeMap::from([
        ("p50_ms", quantile(0.5)),
        ("p99_ms", quantile(0.99)),
        ("max_ms", quantile(1.0)),
        // Less than was asked for if the publisher could not commit more.
        ("committed_per_s", per_second),
    ]);
    Ok(Run { values, costs })
}

/// Waits until a contender's target shows a marker, or a later one.
fn await_beat(ground: &Ground<'_>, contestant: &mut dyn Contestant, number: i64) -> Result<()> {
    let mut target = Sightings::connect(ground, contestant.contender())?;
    let log = contestant.log();
    wait_until("everything so far to be visible", DRAIN_MAX, &[&log], || {
        ground.interrupt().check()?;
        if target.newest()? >= number {
            return Ok(Some(()));
        }
        contestant.check().map(|()| None)
    })
}

/// Transactions per second that native replication applies when all are there already.
fn native_ceiling(bench: Bench<'_>, name: &str, mut traffic: Traffic) -> Result<f64> {
    let ground = Ground::new(bench, &format!("{name} ceiling"), TERMS)?;
    let measured = drain_natively(&ground, &mut traffic, bench.plan.scale);
    ground.clear(measured.is_err())?;
    measured
}

fn drain_natively(ground: &Ground<'_>, traffic: &mut Traffic, scale: f64) -> Result<f64> {
    ground.say("preparing");
    ground.create(traffic)?;
    let mut native = Native::prepare(ground)?;
    ground.even_out()?;
    let mut source = ground.source()?;
    // From the first marker to the last: the worker's start does not count.
    Beats::of(&mut source)?.commit(traffic.next_beat())?;
    let first = traffic.last_beat();
    let transactions = traffic.backlog(ground, scale)?;
    Beats::of(&mut source)?.commit(traffic.next_beat())?;
    ground.await_idle_slots()?;
    ground.begin(&mut native)?;
    native.start()?;
    await_beat(ground, &mut native, first)?;
    let begin = Instant::now();
    await_beat(ground, &mut native, traffic.last_beat())?;
    let ceiling = transactions as f64 / begin.elapsed().as_secs_f64();
    native.stop()?;
    ground.say(&format!("native applies {ceiling:.0} transactions per second at most"));
    Ok(ceiling)
}
