//! What a case came to, in the form of the JSON lines.

use serde::Serialize;
use std::collections::BTreeMap;

/// The name under which PostgreSQL's own logical replication is reported.
pub const NATIVE: &str = "native";
/// The name under which Farshore is reported.
pub const FARSHORE: &str = "farshore";

/// One line of output: medians over the runs, with the spread.
#[derive(Debug, Clone, Serialize)]
pub struct Measurement {
    /// Scenario.
    pub scenario: &'static str,
    /// Case.
    pub case: &'static str,
    /// What is measured.
    pub metric: &'static str,
    /// `lower` or `higher`.
    pub better: &'static str,
    /// Farshore's median.
    pub farshore: f64,
    /// Medians of the others, by name.
    pub others: BTreeMap<&'static str, f64>,
    /// How many times better Farshore is than the best other; below 1 it is worse.
    pub advantage: f64,
    /// Measurements that the medians are of.
    pub runs: usize,
    /// Smallest and largest, by name.
    pub spread: BTreeMap<&'static str, [f64; 2]>,
    /// CPU seconds by process while Farshore was at work; medians.
    pub cpu_s: BTreeMap<&'static str, f64>,
    /// CPU seconds by process while native replication was at work; medians.
    pub cpu_s_native: BTreeMap<&'static str, f64>,
    /// Largest resident size seen, in MiB.
    pub peak_rss_mb: BTreeMap<&'static str, f64>,
    /// Medians of what else was measured, by metric and name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub also: BTreeMap<&'static str, BTreeMap<&'static str, f64>>,
    /// What bounds Farshore on this machine, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bound: Option<Bound>,
    /// CPU seconds per million row changes, by contender and process, where that was asked for.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub cpu_s_per_million: BTreeMap<&'static str, BTreeMap<&'static str, f64>>,
    /// What the figures depend on.
    pub settings: BTreeMap<&'static str, serde_json::Value>,
}

/// What a Farshore that used no processor at all would come to, if nothing ever waited: both
/// servers share the machine's processors, and what they do for it takes them that long.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bound {
    /// Seconds.
    pub seconds: f64,
    /// How many times better than the best other that would be.
    pub advantage: f64,
}

/// What one contender came to in one run.
#[derive(Debug, Clone)]
pub struct Run {
    /// What was measured, by metric.
    pub values: BTreeMap<&'static str, f64>,
    /// What it cost.
    pub costs: Costs,
}

impl Run {
    /// A metric's value; not a number if it was not measured.
    pub fn value(&self, metric: &str) -> f64 {
        self.values.get(metric).copied().unwrap_or(f64::NAN)
    }
}

/// What one contender's work cost.
#[derive(Debug, Clone)]
pub struct Costs {
    /// CPU seconds of the publisher's processes.
    pub publisher: f64,
    /// CPU seconds of the subscriber's processes.
    pub subscriber: f64,
    /// Its own processes, if it has some; the same in every run.
    pub own: Vec<Own>,
}

/// What a contender's own process has cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Own {
    /// The process, in the output.
    pub name: &'static str,
    /// CPU seconds.
    pub cpu: f64,
    /// Peak resident bytes.
    pub peak_rss_bytes: u64,
}

/// What a line is about.
#[derive(Debug, Clone, Copy)]
pub struct Headline<'a> {
    /// Scenario.
    pub scenario: &'static str,
    /// Case.
    pub case: &'static str,
    /// What the contenders are compared by; less is better.
    pub metric: &'static str,
    /// Whom Farshore is compared with: [`NATIVE`], but for special cases.
    pub other: &'static str,
    /// Other metrics that are told beside it.
    pub also: &'a [&'static str],
}

/// The middle value; of an even number of values, the mean of the two in the middle. 0 of none.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    match (sorted.len(), sorted.len() / 2) {
        (0, _) => 0.0,
        (length, middle) if length % 2 == 1 => sorted[middle],
        (_, middle) => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

/// Rounds to three decimals, which is what the clocks are good for.
pub fn rounded(value: f64) -> f64 {
    (value * 1_000.0).round() / 1_000.0
}

fn spread(values: impl Iterator<Item = f64>) -> [f64; 2] {
    let [low, high] = values.fold([f64::INFINITY, 0.0], |[low, high]: [f64; 2], value| {
        [low.min(value), high.max(value)]
    });
    [rounded(low), rounded(high)]
}

impl Measurement {
    /// The line for a person.
    pub fn summary(&self) -> String {
        let others: String =
            self.others.iter().map(|(name, value)| format!(", {name} {value:.2}")).collect();
        let Measurement { scenario, case, metric, farshore, advantage, .. } = self;
        format!("{scenario}/{case}: {metric} farshore {farshore:.2}{others}: {advantage:.2} ×")
    }

    /// Sums up the runs of a case.
    pub fn of_runs(
        headline: Headline<'_>,
        farshore: &[Run],
        others: &[Run],
        settings: BTreeMap<&'static str, serde_json::Value>,
    ) -> Measurement {
        let Headline { scenario, case, metric, other, also } = headline;
        let (ours, theirs) = (median(values(farshore, metric)), median(values(others, metric)));
        let beside = |metric| {
            BTreeMap::from([
                (FARSHORE, rounded(median(values(farshore, metric)))),
                (other, rounded(median(values(others, metric)))),
            ])
        };
        Measurement {
            scenario,
            case,
            metric,
            better: "lower",
            farshore: rounded(ours),
            others: BTreeMap::from([(other, rounded(theirs))]),
            advantage: (theirs / ours.max(f64::MIN_POSITIVE) * 100.0).round() / 100.0,
            runs: farshore.len(),
            spread: BTreeMap::from([
                (FARSHORE, spread(values(farshore, metric))),
                (other, spread(values(others, metric))),
            ]),
            cpu_s: cpu(farshore),
            cpu_s_native: cpu(others),
            peak_rss_mb: peak_rss_mb(farshore),
            also: also.iter().map(|metric| (*metric, beside(metric))).collect(),
            bound: None,
            cpu_s_per_million: BTreeMap::new(),
            settings,
        }
    }

    /// With what each row change took of a processor, by the number of them in its settings.
    pub fn per_command(mut self) -> Measurement {
        let commands = self.settings.get("commands").and_then(serde_json::Value::as_f64);
        let Some(commands) = commands.filter(|commands| *commands > 0.0) else { return self };
        let each = |cpu: &BTreeMap<&'static str, f64>| {
            cpu.iter().map(|(name, cpu)| (*name, rounded(cpu * 1e6 / commands))).collect()
        };
        let native = (NATIVE, each(&self.cpu_s_native));
        self.cpu_s_per_million = BTreeMap::from([(FARSHORE, each(&self.cpu_s)), native]);
        self
    }

    /// With what both servers' work alone takes, by the processors in its settings.
    pub fn bounded(mut self) -> Measurement {
        let cores = self.settings.get("cores").and_then(serde_json::Value::as_f64);
        let best = self.others.values().copied().reduce(f64::min);
        if let (Some(cores), Some(best)) = (cores.filter(|cores| *cores >= 1.0), best) {
            let servers =
                ["publisher", "subscriber"].iter().filter_map(|name| self.cpu_s.get(name));
            let seconds = servers.sum::<f64>() / cores;
            let advantage = (best / seconds.max(f64::MIN_POSITIVE) * 100.0).round() / 100.0;
            self.bound = Some(Bound { seconds: rounded(seconds), advantage });
        }
        self
    }
}

fn values(runs: &[Run], metric: &str) -> impl Iterator<Item = f64> {
    runs.iter().filter_map(move |run| run.values.get(metric).copied())
}

fn cpu(runs: &[Run]) -> BTreeMap<&'static str, f64> {
    let costs = || runs.iter().map(|run| &run.costs);
    let mut cpu = BTreeMap::from([
        ("publisher", rounded(median(costs().map(|costs| costs.publisher)))),
        ("subscriber", rounded(median(costs().map(|costs| costs.subscriber)))),
    ]);
    for name in own(runs).map(|own| own.name) {
        let of_this = own(runs).filter(|own| own.name == name).map(|own| own.cpu);
        cpu.insert(name, rounded(median(of_this)));
    }
    cpu
}

fn peak_rss_mb(runs: &[Run]) -> BTreeMap<&'static str, f64> {
    own(runs).fold(BTreeMap::new(), |mut peaks, own| {
        let mb = (own.peak_rss_bytes as f64 / 1_048_576.0 * 10.0).round() / 10.0;
        let peak = peaks.entry(own.name).or_insert(0.0_f64);
        *peak = peak.max(mb);
        peaks
    })
}

fn own(runs: &[Run]) -> impl Iterator<Item = &Own> {
    runs.iter().flat_map(|run| &run.costs.own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_measurement_is_medians_in_the_documented_form() {
        let run = |seconds, own: &[Own]| Run {
            values: BTreeMap::from([("seconds", seconds), ("publisher_cpu_s", 1.0)]),
            costs: Costs { publisher: 1.0, subscriber: 2.0, own: own.to_vec() },
        };
        let own = Own { name: FARSHORE, cpu: 0.6, peak_rss_bytes: 88 << 20 };
        let ours = [1.9, 1.7, 1.8].map(|seconds| run(seconds, &[own]));
        let theirs = [4.6, 5.1, 4.8].map(|seconds| run(seconds, &[]));
        let settings = BTreeMap::from([("scale", serde_json::json!(1))]);
        let mut headline = Headline {
            scenario: "drain",
            case: "mix-59",
            metric: "seconds",
            other: NATIVE,
            also: &[],
        };
        let line = Measurement::of_runs(headline, &ours, &theirs, settings.clone());
        assert_eq!(
            serde_json::to_string(&line).unwrap(),
            r#"{"scenario":"drain","case":"mix-59","metric":"seconds","better":"lower","farshore":1.8,"others":{"native":4.8},"advantage":2.67,"runs":3,"spread":{"farshore":[1.7,1.9],"native":[4.6,5.1]},"cpu_s":{"farshore":0.6,"publisher":1.0,"subscriber":2.0},"cpu_s_native":{"publisher":1.0,"subscriber":2.0},"peak_rss_mb":{"farshore":88.0},"settings":{"scale":1}}"#
        );
        headline.also = &["publisher_cpu_s"];
        let mut line = Measurement::of_runs(headline, &ours, &theirs, settings);
        assert_eq!(line.clone().bounded().bound, None, "nobody knows how many processors");
        line.settings.insert("cores", serde_json::json!(2));
        let line = line.bounded();
        assert_eq!(line.bound, Some(Bound { seconds: 1.5, advantage: 3.2 }));
        assert_eq!(line.clone().per_command().cpu_s_per_million, BTreeMap::new());
        let mut counted = line.clone();
        counted.settings.insert("commands", serde_json::json!(400_000));
        let each = counted.per_command().cpu_s_per_million;
        assert_eq!(each[FARSHORE][FARSHORE], 1.5);
        assert_eq!(each[NATIVE]["subscriber"], 5.0);
        assert!(
            serde_json::to_string(&line)
                .unwrap()
                .contains(r#","also":{"publisher_cpu_s":{"farshore":1.0,"native":1.0}},"#)
        );
        assert_eq!(median([1.0, 2.0]), 1.5);
        assert_eq!(median([]), 0.0);
    }
}
