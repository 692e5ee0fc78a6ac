//! A backlog over the line.

use super::{ALSO, WAN};
use crate::backlog::{Backlog, Incompressible, Mix59, Rows1k};
use crate::contest::{Bench, Contest, Sites, Terms};
use crate::line::Conditions;
use crate::measurement::{Headline, Measurement, NATIVE, Run};
use anyhow::Result;
use serde_json::json;

/// Rows of the binary backlog, and the random bytes in each: 112 MB in all.
const BINARY_ROWS: u64 = 100_000;
const BINARY_BYTES: usize = 1_100;

/// What is carried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Load {
    /// As drain's `rows-1k`.
    Char,
    /// As drain's `incompressible`, but less of it.
    Binary,
    /// As drain's `mix-59`.
    Mix,
}

impl Load {
    fn backlog(self, scale: f64) -> Box<dyn Backlog> {
        match self {
            Load::Char => Box::new(Rows1k::new(scale)),
            Load::Binary => Box::new(Incompressible::of(BINARY_ROWS, BINARY_BYTES, scale)),
            Load::Mix => Box::new(Mix59::new(scale)),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Load::Char => "rows of 1 KB of text",
            Load::Binary => "rows of 1 KB of random bytes",
            Load::Mix => "commands over 59 tables",
        }
    }
}

/// A backlog, a line, and a way over it.
#[derive(Debug, Clone, Copy)]
pub struct Drain {
    /// The case.
    pub case: &'static str,
    /// What is carried.
    pub load: Load,
    /// How much of it.
    pub share: f64,
    /// Over what; by one site that pushes, or by two of which one pulls; to whom.
    pub terms: Terms,
}

impl Drain {
    /// Measures it: a line of output per metric.
    ///
    /// # Errors
    /// When something fails, or a target is not equal in the end.
    pub fn measure(self, bench: Bench<'_>, metrics: &[&'static str]) -> Result<Vec<Measurement>> {
        let backlog = self.load.backlog(bench.plan.scale * self.share);
        let contest = Contest::hold(bench, &self.name(), backlog.as_ref(), self.terms)?;
        Ok(self.lines(contest, metrics, &[]))
    }

    /// Measures it, and in turn the same over the same line without its length.
    ///
    /// # Errors
    /// When something fails, or a target is not equal in the end.
    pub fn measure_beside_0ms(self, bench: Bench<'_>) -> Result<Vec<Measurement>> {
        let backlog = self.load.backlog(bench.plan.scale * self.share);
        let backlog = backlog.as_ref();
        let far = self.terms;
        let at_hand = Terms { line: far.line.map(Conditions::at_hand), ..far };
        let mut contest = Contest::new(bench, backlog, far);
        let mut beside = Contest::new(bench, backlog, at_hand);
        let name = self.name();
        for run in 0..bench.plan.runs {
            beside.hold_once(bench, &format!("{name} at 0 ms"), run, backlog, at_hand)?;
            contest.hold_once(bench, &name, run, backlog, far)?;
        }
        compare(&mut contest.farshore, &beside.farshore);
        compare(&mut contest.native, &beside.native);
        Ok(self.lines(contest, &["seconds"], &["seconds_0ms", "ratio_to_0ms"]))
    }

    fn name(self) -> String {
        format!("{WAN}/{}", self.case)
    }

    fn lines(
        self,
        contest: Contest,
        metrics: &[&'static str],
        more: &[&'static str],
    ) -> Vec<Measurement> {
        let Contest { mut farshore, mut native, mut settings } = contest;
        for run in farshore.iter_mut().chain(&mut native) {
            run.values.insert("minutes", run.value("seconds") / 60.0);
            // Of a case's two backlogs, the second one's metrics have names of their own.
            run.values.insert("mix_seconds", run.value("seconds"));
            run.values.insert("mix_wire_mb", run.value("wire_mb"));
        }
        settings.extend([
            ("backlog", json!(self.load.name())),
            ("share", json!(self.share)),
            ("subscribers", json!(self.terms.subscribers)),
        ]);
        if let Some(minutes) = self.paper_minutes() {
            settings.insert("paper_minutes_per_gb", json!(minutes));
        }
        let also = [&["seconds", "minutes", "wal_mb_per_s"], &ALSO[..], more].concat();
        let line = |metric: &&'static str| {
            let also: Vec<&str> = also.iter().copied().filter(|other| other != metric).collect();
            let (case, metric) = (self.case, *metric);
            let headline = Headline { scenario: WAN, case, metric, other: NATIVE, also: &also };
            Measurement::of_runs(headline, &farshore, &native, settings.clone())
        };
        metrics.iter().map(line).collect()
    }

    /// What the white paper has for it: 1 GB over 77 ms by SQL Server's transactional replication.
    fn paper_minutes(self) -> Option<f64> {
        let is_its = self.load == Load::Char && self.terms.line == Some(Conditions::new(77, 1_000));
        is_its.then_some(match self.terms.sites {
            Sites::One => 110.0,
            Sites::Two => 12.5,
        })
    }
}

/// Takes note of what the same took without the line's length, run by run.
fn compare(runs: &mut [Run], at_hand: &[Run]) {
    for (run, at_hand) in runs.iter_mut().zip(at_hand) {
        let (seconds, at_hand) = (run.value("seconds"), at_hand.value("seconds"));
        run.values.insert("seconds_0ms", at_hand);
        run.values.insert("ratio_to_0ms", seconds / at_hand);
    }
}
