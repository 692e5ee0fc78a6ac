//! Several contenders, one of which the line is about.

use crate::measurement::{Measurement, Run, median, rounded};
use serde_json::Value;
use std::collections::BTreeMap;

/// What one contender came to, run by run.
#[derive(Debug)]
pub struct Outcome {
    /// The name in the output.
    pub name: &'static str,
    /// Its runs.
    pub runs: Vec<Run>,
}

impl Outcome {
    fn median(&self, metric: &str) -> f64 {
        median(self.runs.iter().filter_map(|run| run.values.get(metric).copied()))
    }
}

/// How a line of output is made of contenders.
#[derive(Debug)]
pub struct Ranking<'a> {
    /// Scenario.
    pub scenario: &'static str,
    /// Case.
    pub case: &'static str,
    /// The metric's name in the output, and in the runs.
    pub metric: (&'static str, &'static str),
    /// More is better.
    pub is_higher_better: bool,
    /// Of Farshore; the first one is what the line is about.
    pub ours: &'a [&'static str],
    /// PostgreSQL's own, that it is compared with.
    pub theirs: &'a [&'static str],
    /// What else is told of everybody.
    pub also: &'a [&'static str],
}

impl Ranking<'_> {
    /// The line of output.
    pub fn line(
        &self,
        outcomes: &[Outcome],
        settings: BTreeMap<&'static str, Value>,
    ) -> Measurement {
        let of = |name: &&str| outcomes.iter().find(|outcome| outcome.name == *name);
        let (shown, metric) = self.metric;
        let first = self.ours.first().and_then(of);
        let farshore = first.map_or(f64::NAN, |first| first.median(metric));
        let others: BTreeMap<&'static str, f64> = self
            .theirs
            .iter()
            .filter_map(of)
            .map(|other| (other.name, rounded(other.median(metric))))
            .collect();
        let ours_first = |a: &&Outcome, b: &&Outcome| {
            let order = a.median(metric).total_cmp(&b.median(metric));
            if self.is_higher_better { order } else { order.reverse() }
        };
        let best = self.theirs.iter().filter_map(of).max_by(ours_first);
        let theirs = best.map_or(f64::NAN, |best| best.median(metric));
        let advantage = if self.is_higher_better { farshore / theirs } else { theirs / farshore };
        let beside = |metric: &&'static str| {
            let all =
                outcomes.iter().map(|outcome| (outcome.name, rounded(outcome.median(metric))));
            (*metric, all.collect())
        };
        let mut also: BTreeMap<_, BTreeMap<_, _>> = self.also.iter().map(beside).collect();
        also.insert(shown, outcomes.iter().map(|o| (o.name, rounded(o.median(metric)))).collect());
        let spread = outcomes.iter().map(|outcome| {
            let values = outcome.runs.iter().map(|run| run.value(metric));
            let [low, high] = values.fold([f64::INFINITY, f64::NEG_INFINITY], |[low, high], v| {
                [low.min(v), high.max(v)]
            });
            (outcome.name, [rounded(low), rounded(high)])
        });
        Measurement {
            scenario: self.scenario,
            case: self.case,
            metric: shown,
            better: if self.is_higher_better { "higher" } else { "lower" },
            farshore: rounded(farshore),
            others,
            advantage: (advantage * 100.0).round() / 100.0,
            runs: first.map_or(0, |first| first.runs.len()),
            spread: spread.collect(),
            cpu_s: first.map(cpu).unwrap_or_default(),
            cpu_s_native: best.map(cpu).unwrap_or_default(),
            peak_rss_mb: first.map(peak_rss_mb).unwrap_or_default(),
            also,
            bound: None,
            cpu_s_per_million: BTreeMap::new(),
            settings,
        }
    }
}

fn cpu(outcome: &Outcome) -> BTreeMap<&'static str, f64> {
    let costs = || outcome.runs.iter().map(|run| &run.costs);
    let mut cpu = BTreeMap::from([
        ("principal", rounded(median(costs().map(|costs| costs.publisher)))),
        ("standby", rounded(median(costs().map(|costs| costs.subscriber)))),
    ]);
    for name in ["near", "between", "far"] {
        let own = costs().flat_map(|costs| &costs.own).filter(|own| own.name == name);
        let values: Vec<f64> = own.map(|own| own.cpu).collect();
        if !values.is_empty() {
            cpu.insert(name, rounded(median(values)));
        }
    }
    cpu
}

fn peak_rss_mb(outcome: &Outcome) -> BTreeMap<&'static str, f64> {
    let own = outcome.runs.iter().flat_map(|run| &run.costs.own);
    own.fold(BTreeMap::new(), |mut peaks, own| {
        let peak: &mut f64 = peaks.entry(own.name).or_default();
        *peak = peak.max((own.peak_rss_bytes as f64 / 1_048_576.0 * 10.0).round() / 10.0);
        peaks
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measurement::{Costs, Own};

    fn outcome(name: &'static str, values: &[f64]) -> Outcome {
        let run = |value: &f64| Run {
            values: BTreeMap::from([("x", *value)]),
            costs: Costs {
                publisher: 1.0,
                subscriber: 2.0,
                own: vec![Own { name: "near", cpu: 0.5, peak_rss_bytes: 10 << 20 }],
            },
        };
        Outcome { name, runs: values.iter().map(run).collect() }
    }

    #[test]
    fn a_line_compares_with_the_best_of_the_others() {
        let all = [
            outcome("farshore", &[10.0, 12.0, 11.0]),
            outcome("native_off", &[2.0, 2.0, 2.0]),
            outcome("native_lz4", &[9.0, 10.0, 11.0]),
        ];
        let mut ranking = Ranking {
            scenario: "mirror",
            case: "c",
            metric: ("x_per_s", "x"),
            is_higher_better: true,
            ours: &["farshore"],
            theirs: &["native_off", "native_lz4"],
            also: &[],
        };
        let line = ranking.line(&all, BTreeMap::new());
        assert_eq!((line.farshore, line.advantage, line.better), (11.0, 1.1, "higher"));
        assert_eq!(line.cpu_s["near"], 0.5);
        assert_eq!(line.spread["farshore"], [10.0, 12.0]);
        ranking.is_higher_better = false;
        let line = ranking.line(&all, BTreeMap::new());
        assert_eq!(line.advantage, 0.18, "the best is the lowest");
    }
}
