//! Scenario `monitor`: what the monitor costs. The same drain by Farshore with its monitor and
//! without, in turn; native replication drains beside both, as in `drain`, and is not told.

use crate::contest::{Bench, Contest, Terms};
use crate::drain::DrainCase;
use crate::measurement::{Headline, Measurement};
use anyhow::Result;

/// The scenario's name.
pub const MONITOR: &str = "monitor";
/// The name under which Farshore without its monitor is reported.
const WITHOUT: &str = "without";
/// Farshore's own processor seconds.
const CPU: &str = "farshore_cpu_s";

/// What is drained, in the order it is run.
pub const CASES: [DrainCase; 2] = [DrainCase::Mix59, DrainCase::Insert1];

/// Measures a case.
///
/// # Errors
/// When something fails, or a target is not equal in the end.
pub fn measure(case: DrainCase, bench: Bench<'_>) -> Result<Measurement> {
    let backlog = case.backlog(bench.plan.scale);
    let (on, off) = (Terms { monitor: true, ..Terms::PLAIN }, Terms::PLAIN);
    let mut with = Contest::new(bench, backlog.as_ref(), on);
    let mut without = Contest::new(bench, backlog.as_ref(), off);
    for run in 0..bench.plan.runs {
        // Who goes first changes from run to run; native's place stays, for both alike.
        let mut turns = [(&mut with, on, "with"), (&mut without, off, WITHOUT)];
        if run % 2 == 1 {
            turns.reverse();
        }
        for (contest, terms, how) in turns {
            let name = format!("{MONITOR}/{} {how}", case.name());
            contest.hold_once(bench, &name, run, backlog.as_ref(), terms)?;
        }
    }
    for run in with.farshore.iter_mut().chain(&mut without.farshore) {
        let cpu = run.costs.own.iter().map(|own| own.cpu).sum();
        run.values.insert(CPU, cpu);
    }
    let (scenario, case, metric) = (MONITOR, case.name(), "seconds");
    let headline = Headline { scenario, case, metric, other: WITHOUT, also: &[CPU] };
    Ok(Measurement::of_runs(headline, &with.farshore, &without.farshore, with.settings))
}
