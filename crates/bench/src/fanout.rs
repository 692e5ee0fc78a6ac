//! Scenario `fanout`: what several subscribers cost the publisher. As in `drain` a backlog waits
//! and is carried to equal, but to 1, 4 and 8 databases at once: by Farshore from one reading of
//! the log, by native replication from a slot for each.

use crate::backlog::Mix59;
use crate::contest::{Bench, Contest, Terms};
use crate::measurement::{Headline, Measurement, NATIVE};
use anyhow::Result;

/// The scenario's name.
pub const FANOUT: &str = "fanout";
/// Share of the drain case `mix-59` that is carried to each subscriber: 200,000 commands.
const SHARE: f64 = 0.5;

/// How many subscribers there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FanoutCase {
    /// One.
    One,
    /// Four.
    Four,
    /// Eight.
    Eight,
}

impl FanoutCase {
    /// All cases, in the order they are run.
    pub const ALL: [FanoutCase; 3] = [FanoutCase::One, FanoutCase::Four, FanoutCase::Eight];

    /// The name on the command line and in the output.
    pub fn name(self) -> &'static str {
        match self {
            FanoutCase::One => "subscribers-1",
            FanoutCase::Four => "subscribers-4",
            FanoutCase::Eight => "subscribers-8",
        }
    }

    fn subscribers(self) -> usize {
        match self {
            FanoutCase::One => 1,
            FanoutCase::Four => 4,
            FanoutCase::Eight => 8,
        }
    }

    /// Measures the case.
    ///
    /// # Errors
    /// When something fails, or a target is not equal in the end.
    pub fn measure(self, bench: Bench<'_>) -> Result<Measurement> {
        let backlog = Mix59::new(bench.plan.scale * SHARE);
        let name = format!("{FANOUT}/{}", self.name());
        let terms = Terms { subscribers: self.subscribers(), counts_bytes: true, ..Terms::PLAIN };
        let mut contest = Contest::hold(bench, &name, &backlog, terms)?;
        contest.settings.insert("subscribers", self.subscribers().into());
        let headline = Headline {
            scenario: FANOUT,
            case: self.name(),
            metric: "publisher_cpu_s",
            other: NATIVE,
            also: &["bytes_sent_mb", "seconds"],
        };
        Ok(Measurement::of_runs(headline, &contest.farshore, &contest.native, contest.settings))
    }
}
