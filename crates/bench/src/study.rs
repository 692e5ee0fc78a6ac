//! Scenario `study`: the throughput study of SQL Server 2005's transactional replication, in small:
//! 40 clients write to 59 tables all the time, and both legs have to keep up.
//!
//! The study (Microsoft, "Geo-replication performance gains with SQL Server 2005 running on
//! Windows Server 2008", and the tuning paper it builds on): transactions of 10 to 100 commands,
//! 70 % inserts, 20 % updates, 10 % deletes, rows of up to 2 KB. A command is a row change.

mod workload;

use crate::contest::{Bench, Ground, Terms};
use crate::load::{Load, MARKERS_PER_SECOND, take_turn};
use crate::measurement::{Headline, Measurement, NATIVE};
use anyhow::Result;
use serde_json::json;
use workload::Workload;

/// The scenario's name.
pub const STUDY: &str = "study";
/// The metrics, each a line of output.
const METRICS: [&str; 2] = ["mean_ms", "max_ms"];
/// What is told beside them; of the legs Farshore alone.
const ALSO: [&str; 10] = [
    "committed_per_s",
    "p99_ms",
    "reader_commands_per_s_mean",
    "reader_commands_per_s_max",
    "distribution_commands_per_s_mean",
    "distribution_commands_per_s_max",
    "reader_ms_mean",
    "reader_ms_max",
    "distribution_ms_mean",
    "distribution_ms_max",
];
/// Seconds of load that count.
const SECONDS: f64 = 600.0;
/// Seconds of load before.
const WARM_UP: f64 = 5.0;
/// Commands per second: a load that leaves the machine some room, as the study's did. (Its own
/// machines did 18,000, each party on one of its own.)
const COMMANDS_PER_SECOND: f64 = 9_000.0;

/// Connections to the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StudyCase {
    /// One.
    Streams1,
    /// Three, as in the study.
    Streams3,
}

impl StudyCase {
    /// All cases, in the order they are run.
    pub const ALL: [StudyCase; 2] = [StudyCase::Streams1, StudyCase::Streams3];

    /// The name on the command line and in the output.
    pub fn name(self) -> &'static str {
        match self {
            StudyCase::Streams1 => "streams-1",
            StudyCase::Streams3 => "streams-3",
        }
    }

    /// Measures the case: a line for each metric.
    ///
    /// # Errors
    /// When something fails, or a target is not equal in the end.
    pub fn measure(self, bench: Bench<'_>) -> Result<Vec<Measurement>> {
        let streams = match self {
            StudyCase::Streams1 => 1,
            StudyCase::Streams3 => 3,
        };
        let load = Load {
            per_second: COMMANDS_PER_SECOND / workload::COMMANDS_MEAN + MARKERS_PER_SECOND,
            warm_up: WARM_UP * bench.plan.scale.min(1.0),
            seconds: SECONDS * bench.plan.scale,
            watches_legs: true,
        };
        let (mut farshore, mut native) = (Vec::new(), Vec::new());
        for run in 0..bench.plan.runs {
            let label = format!("{STUDY}/{} run {}/{}", self.name(), run + 1, bench.plan.runs);
            let ground =
                Ground::new(bench, &label, Terms { streams: Some(streams), ..Terms::PLAIN })?;
            let turn = take_turn(&ground, Workload::new(), load, run % 2 == 1);
            ground.clear(turn.is_err())?;
            let turn = turn?;
            farshore.push(turn.farshore);
            native.push(turn.native);
        }
        let mut settings = bench.settings(Terms::PLAIN);
        settings.extend([
            ("streams", json!(streams)),
            ("clients", json!(workload::CLIENTS)),
            ("tables", json!(workload::TABLES)),
            ("commands_per_s", json!(COMMANDS_PER_SECOND)),
            ("commands_per_transaction", json!([workload::COMMANDS_MIN, workload::COMMANDS_MAX])),
            ("seconds", json!(load.seconds)),
        ]);
        let line = |metric| {
            let (scenario, case, other) = (STUDY, self.name(), NATIVE);
            let headline = Headline { scenario, case, metric, other, also: &ALSO };
            Measurement::of_runs(headline, &farshore, &native, settings.clone())
        };
        Ok(METRICS.map(line).into())
    }
}
