//! Scenario `latency`: a steady rate of transactions, and how long each commit takes until a
//! reader of the subscriber sees it. Each contender has a phase of its own under the same kind of
//! load, while the other is stopped.
//!
//! `steady-1000` is 1,000 transactions of one row per second. The other two are a share of what
//! native replication can apply at most, which a drain of the same kind of transactions measures
//! first; theirs have 50 rows, because a machine that holds all three parties could not commit
//! enough transactions of one row.

mod traffic;

pub use traffic::Traffic;

use crate::contest::{Bench, Ground, Terms};
use crate::load::{self, Load, take_turn};
use crate::measurement::{Headline, Measurement, NATIVE};
use anyhow::Result;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The scenario's name.
pub const LATENCY: &str = "latency";
/// The metrics, each a line of output.
const METRICS: [&str; 3] = ["p50_ms", "p99_ms", "max_ms"];
/// Seconds of load that count.
const SECONDS: f64 = 30.0;
/// Seconds of load before, in which caches fill and statements are prepared.
const WARM_UP: f64 = 3.0;
/// How fast transactions come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LatencyCase {
    /// 1,000 transactions of one row per second.
    Steady1000,
    /// The same, where native's worker promises what Farshore does: what readers have seen outlasts
    /// a crash of the target.
    Steady1000Durable,
    /// Half of what native replication can apply.
    Ceiling50,
    /// Four fifths of what native replication can apply.
    Ceiling80,
}

impl LatencyCase {
    /// All cases, in the order they are run.
    pub const ALL: [LatencyCase; 4] = [
        LatencyCase::Steady1000,
        LatencyCase::Steady1000Durable,
        LatencyCase::Ceiling50,
        LatencyCase::Ceiling80,
    ];

    /// The name on the command line and in the output.
    pub fn name(self) -> &'static str {
        match self {
            LatencyCase::Steady1000 => "steady-1000",
            LatencyCase::Steady1000Durable => "steady-1000-durable",
            LatencyCase::Ceiling50 => "ceiling-50",
            LatencyCase::Ceiling80 => "ceiling-80",
        }
    }

    /// Of native replication's ceiling, where the rate depends on that.
    fn share(self) -> Option<f64> {
        match self {
            LatencyCase::Steady1000 | LatencyCase::Steady1000Durable => None,
            LatencyCase::Ceiling50 => Some(0.5),
            LatencyCase::Ceiling80 => Some(0.8),
        }
    }

    fn traffic(self) -> fn() -> Traffic {
        match self {
            LatencyCase::Steady1000 | LatencyCase::Steady1000Durable => Traffic::of_one_row,
            LatencyCase::Ceiling50 | LatencyCase::Ceiling80 => Traffic::of_many_rows,
        }
    }

    /// Measures the case: a line for each metric.
    ///
    /// # Errors
    /// When something fails, or a target is not equal in the end.
    pub fn measure(self, bench: Bench<'_>) -> Result<Vec<Measurement>> {
        let name = format!("{LATENCY}/{}", self.name());
        let mut settings = BTreeMap::new();
        let mut rate = 1_000.0;
        if let Some(share) = self.share() {
            let ceiling = native_ceiling(bench, &name, self.traffic()())?;
            settings.insert("native_ceiling_per_s", json!(ceiling.round()));
            rate = ceiling * share;
        }
        let steady = Steady {
            scenario: LATENCY,
            case: self.name(),
            traffic: self.traffic(),
            per_second: rate,
            terms: Terms {
                native_is_durable: self == LatencyCase::Steady1000Durable,
                ..Terms::PLAIN
            },
            also: &["committed_per_s"],
            settings,
        };
        steady.measure(bench)
    }
}

/// A load at a steady rate.
#[derive(Debug)]
pub struct Steady {
    /// The scenario.
    pub scenario: &'static str,
    /// The case.
    pub case: &'static str,
    /// What it is made of.
    pub traffic: fn() -> Traffic,
    /// Transactions per second.
    pub per_second: f64,
    /// How the contenders meet.
    pub terms: Terms,
    /// Metrics that are told beside the latencies.
    pub also: &'static [&'static str],
    /// What else the figures depend on.
    pub settings: BTreeMap<&'static str, Value>,
}

impl Steady {
    /// Measures it: a line for each metric.
    ///
    /// # Errors
    /// When something fails, or a target is not equal in the end.
    pub fn measure(self, bench: Bench<'_>) -> Result<Vec<Measurement>> {
        let Steady { scenario, case, traffic, per_second, terms, also, .. } = self;
        let load = Load {
            per_second,
            warm_up: WARM_UP * bench.plan.scale.min(1.0),
            seconds: SECONDS * bench.plan.scale,
            watches_legs: false,
        };
        let (mut farshore, mut native) = (Vec::new(), Vec::new());
        for run in 0..bench.plan.runs {
            let label = format!("{scenario}/{case} run {}/{}", run + 1, bench.plan.runs);
            let ground = Ground::new(bench, &label, terms)?;
            let turn = take_turn(&ground, traffic(), load, run % 2 == 1);
            ground.clear(turn.is_err())?;
            let turn = turn?;
            farshore.push(turn.farshore);
            native.push(turn.native);
        }
        let mut settings = bench.settings(terms);
        settings.extend(self.settings);
        settings.extend([
            ("transactions_per_s", json!(per_second.round())),
            ("rows_per_transaction", json!(traffic().rows())),
            ("seconds", json!(load.seconds)),
            ("markers_per_s", json!(load::MARKERS_PER_SECOND)),
        ]);
        let line = |metric| {
            let headline = Headline { scenario, case, metric, other: NATIVE, also };
            Measurement::of_runs(headline, &farshore, &native, settings.clone())
        };
        Ok(METRICS.map(line).into())
    }
}

/// Transactions per second that native replication applies when all are there already.
fn native_ceiling(bench: Bench<'_>, name: &str, mut traffic: Traffic) -> Result<f64> {
    let ground = Ground::new(bench, &format!("{name} ceiling"), Terms::PLAIN)?;
    let backlog = |traffic: &mut Traffic| traffic.backlog(&ground, bench.plan.scale);
    let measured = load::drain_natively(&ground, &mut traffic, backlog);
    ground.clear(measured.is_err())?;
    measured
}
