//! Scenario `wan`: publisher and subscriber far from each other. As in `drain` a backlog waits on
//! the publisher and is carried to equal, over a line that is as long, or as narrow, as lines are;
//! and as in `latency` a load goes on, over the same line.
//!
//! Pull: Farshore is two sites, one beside the publisher and one beside the subscriber, with a link
//! between them. Push: one site beside the publisher, which writes to the subscriber over the line.

mod drain;
mod linked_server;
mod predict;
mod snapshot;

use crate::backlog::{Backlog, Tables, Work};
use crate::contest::{Bench, Sites, Terms};
use crate::latency::{Steady, Traffic};
use crate::line::Conditions;
use crate::measurement::{FARSHORE, Measurement, rounded};
use crate::progress::say;
use crate::servers::Servers;
use crate::text::Prose;
use anyhow::Result;
use drain::{Drain, Load};
use farshore_testkit::interrupt::Interrupt;
use postgres::Client;
use std::collections::BTreeMap;

/// The scenario's name.
pub const WAN: &str = "wan";
/// Mbit/s of the line where it is not narrow.
const WIDE: u64 = 1_000;
/// Milliseconds there and back where nothing else is said: from coast to coast.
const COAST_TO_COAST: u64 = 77;
/// What is told beside the metrics of a line.
const ALSO: [&str; 4] = ["wire_mb", "wire_back_mb", "dropped_packets", "emulator_cpu_s"];

/// What is carried over which line, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WanCase {
    /// Rows of text by pull, 77 ms.
    PullChar77,
    /// Rows of text by push, 77 ms.
    PushChar77,
    /// Rows of text by pull, 150 ms.
    PullChar150,
    /// Rows of text by push, 150 ms.
    PushChar150,
    /// Rows of random bytes by pull, 77 ms.
    PullBinary77,
    /// Rows of random bytes by push, 77 ms.
    PushBinary77,
    /// The initial copy.
    Snapshot77,
    /// Few rows beside a statement that writes to a foreign table.
    LinkedServer77,
    /// Commands over 59 tables.
    Mix59,
    /// Text and 59 tables at 100 Mbit/s.
    Narrow100,
    /// Text and 59 tables at 10 Mbit/s.
    Narrow10,
    /// What a zstd level on the link costs, and saves: 0 is as stored.
    Cost(u64),
    /// Eight databases at the far end.
    Fanout8,
    /// A steady load, 77 ms.
    Latency77,
    /// A steady load, 150 ms.
    Latency150,
    /// What `commission link` says of a drain over 77 ms.
    Predict77,
    /// The same over 20 ms and 10 Mbit/s.
    Predict10,
}

impl WanCase {
    /// All cases, in the order they are run.
    pub const ALL: [WanCase; 21] = [
        WanCase::PullChar77,
        WanCase::PushChar77,
        WanCase::PullChar150,
        WanCase::PushChar150,
        WanCase::PullBinary77,
        WanCase::PushBinary77,
        WanCase::Snapshot77,
        WanCase::LinkedServer77,
        WanCase::Mix59,
        WanCase::Narrow100,
        WanCase::Narrow10,
        WanCase::Cost(0),
        WanCase::Cost(1),
        WanCase::Cost(6),
        WanCase::Cost(12),
        WanCase::Cost(19),
        WanCase::Fanout8,
        WanCase::Latency77,
        WanCase::Latency150,
        WanCase::Predict77,
        WanCase::Predict10,
    ];

    /// The name on the command line and in the output.
    pub fn name(self) -> &'static str {
        match self {
            WanCase::PullChar77 => "pull-char-77",
            WanCase::PushChar77 => "push-char-77",
            WanCase::PullChar150 => "pull-char-150",
            WanCase::PushChar150 => "push-char-150",
            WanCase::PullBinary77 => "pull-binary-77",
            WanCase::PushBinary77 => "push-binary-77",
            WanCase::Snapshot77 => "snapshot-77",
            WanCase::LinkedServer77 => "linked-server-77",
            WanCase::Mix59 => "mix-59-77",
            WanCase::Narrow100 => "narrow-100mbit",
            WanCase::Narrow10 => "narrow-10mbit",
            WanCase::Cost(0) => "cost-0",
            WanCase::Cost(1) => "cost-1",
            WanCase::Cost(6) => "cost-6",
            WanCase::Cost(12) => "cost-12",
            WanCase::Cost(_) => "cost-19",
            WanCase::Fanout8 => "fanout-8-77",
            WanCase::Latency77 => "latency-77",
            WanCase::Latency150 => "latency-150",
            WanCase::Predict77 => "predict-77",
            WanCase::Predict10 => "predict-10mbit",
        }
    }

    /// Measures the case: a line of output per metric.
    ///
    /// # Errors
    /// When there can be no line here, something fails, or a target is not equal in the end.
    pub fn measure(self, bench: Bench<'_>) -> Result<Vec<Measurement>> {
        say("starting publisher and subscriber at the ends of a line");
        let servers = Servers::start_across_a_line()?;
        let bench = Bench { servers: &servers, ..bench };
        let case = self.name();
        let line = |rtt_ms| Some(Conditions::new(rtt_ms, WIDE));
        let terms = Terms { sites: Sites::Two, line: line(COAST_TO_COAST), ..Terms::PLAIN };
        let one_way = |load, sites, rtt_ms| {
            let terms = Terms { sites, line: line(rtt_ms), ..terms };
            Drain { case, load, share: 1.0, terms }.measure_beside_0ms(bench)
        };
        let pull = |load, share| Drain { case, load, share, terms };
        match self {
            WanCase::PullChar77 => one_way(Load::Char, Sites::Two, 77),
            WanCase::PushChar77 => one_way(Load::Char, Sites::One, 77),
            WanCase::PullChar150 => one_way(Load::Char, Sites::Two, 150),
            WanCase::PushChar150 => one_way(Load::Char, Sites::One, 150),
            WanCase::PullBinary77 => one_way(Load::Binary, Sites::Two, 77),
            WanCase::PushBinary77 => one_way(Load::Binary, Sites::One, 77),
            WanCase::Snapshot77 => snapshot::measure(case, bench, terms),
            WanCase::LinkedServer77 => linked_server::measure(case, bench, terms),
            WanCase::Mix59 => pull(Load::Mix, 1.0).measure(bench, &["seconds"]),
            WanCase::Narrow100 => narrow(bench, pull(Load::Char, 1.0), 100),
            // So that native replication needs minutes and not a quarter of an hour.
            WanCase::Cost(compression) => {
                let line = Some(Conditions::new(COAST_TO_COAST, 100));
                let terms = Terms { line, compression, ..terms };
                Drain { terms, ..pull(Load::Char, 0.3) }.measure(bench, &["wire_mb"])
            }
            WanCase::Narrow10 => narrow(bench, pull(Load::Char, 0.15), 10),
            WanCase::Fanout8 => {
                let terms = Terms { subscribers: 8, ..terms };
                Drain { terms, ..pull(Load::Mix, 0.5) }.measure(bench, &["wire_mb", "seconds"])
            }
            WanCase::Latency77 => steady(case, terms).measure(bench),
            WanCase::Latency150 => steady(case, Terms { line: line(150), ..terms }).measure(bench),
            WanCase::Predict77 => {
                predict::measure(case, bench, 1.0, Conditions::new(COAST_TO_COAST, WIDE))
            }
            WanCase::Predict10 => predict::measure(case, bench, 0.1, Conditions::new(20, 10)),
        }
    }
}

/// Two backlogs over a narrow line.
fn narrow(bench: Bench<'_>, text: Drain, mbit_per_s: u64) -> Result<Vec<Measurement>> {
    let line = Some(Conditions::new(COAST_TO_COAST, mbit_per_s));
    let text = Drain { terms: Terms { line, ..text.terms }, ..text };
    let mix = Drain { load: Load::Mix, share: 1.0, ..text };
    let mut lines = text.measure(bench, &["seconds", "wire_mb"])?;
    lines.extend(mix.measure(bench, &["mix_seconds", "mix_wire_mb"])?);
    Ok(lines)
}

fn steady(case: &'static str, terms: Terms) -> Steady {
    Steady {
        scenario: WAN,
        case,
        traffic: Traffic::of_one_row,
        per_second: 1_000.0,
        terms,
        also: &["committed_per_s", "wire_mb", "wire_back_mb", "emulator_cpu_s"],
        settings: BTreeMap::new(),
    }
}

/// Tells a push how it compares with the pull of the same, where that was measured before.
pub fn compare_ways(push: &mut Measurement, before: &[Measurement]) {
    let Some(what) = push.case.strip_prefix("push-").filter(|_| push.scenario == WAN) else {
        return;
    };
    let is_pull = |m: &&Measurement| {
        m.scenario == WAN && m.case.strip_prefix("pull-") == Some(what) && m.metric == push.metric
    };
    if let Some(pull) = before.iter().find(is_pull) {
        let ratio = rounded(push.farshore / pull.farshore);
        push.also.insert("ratio_to_pull", BTreeMap::from([(FARSHORE, ratio)]));
    }
}

/// A backlog's rows, where they are there before replication begins.
#[derive(Debug)]
struct Loaded<B>(B);

impl<B: Backlog> Loaded<B> {
    fn work(&self) -> Work {
        self.0.work()
    }
}

impl<B: Backlog> Tables for Loaded<B> {
    fn schema(&self) -> String {
        self.0.schema()
    }

    fn preload(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        self.0.build(client, prose, interrupt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measurement::{Costs, Headline, NATIVE, Run};

    #[test]
    fn a_push_is_compared_with_the_pull_of_the_same() {
        let line = |case, seconds| {
            let headline =
                Headline { scenario: WAN, case, metric: "seconds", other: NATIVE, also: &[] };
            let costs = Costs { publisher: 0.0, subscriber: 0.0, own: Vec::new() };
            let runs = [Run { values: BTreeMap::from([("seconds", seconds)]), costs }];
            Measurement::of_runs(headline, &runs, &runs, BTreeMap::new())
        };
        let before = [line("pull-char-150", 5.0), line("pull-char-77", 2.0)];
        let mut push = line("push-char-77", 9.0);
        compare_ways(&mut push, &before);
        assert_eq!(push.also["ratio_to_pull"][FARSHORE], 4.5);
        for case in ["push-binary-77", "pull-char-77", "snapshot-77"] {
            let mut other = line(case, 9.0);
            compare_ways(&mut other, &before);
            assert!(other.also.is_empty(), "{case}");
        }
    }

    #[test]
    fn names_are_different() {
        let mut names = WanCase::ALL.map(WanCase::name).to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), WanCase::ALL.len());
    }
}
