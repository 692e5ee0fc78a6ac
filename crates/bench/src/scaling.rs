//! Scenario `scaling`: how the time of a drain grows with the connections to the target, with the
//! backlog, with the tables and with the size of transactions. `us_per_change` is the time of the
//! whole, start included, by row change.

use crate::backlog::{Backlog, Mix59, Steps};
use crate::contest::{Bench, Contest, Terms};
use crate::measurement::{Headline, Measurement, NATIVE};
use anyhow::Result;

/// The scenario's name.
pub const SCALING: &str = "scaling";

/// Commands where it is not they that are varied.
const COMMANDS: f64 = 200_000.0;
/// Rows per transaction where it is not they that are varied.
const ROWS_PER_TRANSACTION: u64 = 100;

/// What is varied, and how much of it there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vary {
    /// Connections to the target; commands over 59 tables.
    Streams(usize),
    /// Row changes that wait; inserts in transactions of 100.
    Backlog(u64),
    /// Tables; commands over all of them in transactions of 50.
    Tables(usize),
    /// Rows per transaction; inserts.
    Transaction(u64),
}

/// A case: its name, and what it varies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScalingCase {
    name: &'static str,
    vary: Vary,
}

impl ScalingCase {
    /// All cases, in the order they are run.
    pub const ALL: [ScalingCase; 17] = [
        ScalingCase { name: "streams-1", vary: Vary::Streams(1) },
        ScalingCase { name: "streams-2", vary: Vary::Streams(2) },
        ScalingCase { name: "streams-4", vary: Vary::Streams(4) },
        ScalingCase { name: "streams-8", vary: Vary::Streams(8) },
        ScalingCase { name: "backlog-10k", vary: Vary::Backlog(10_000) },
        ScalingCase { name: "backlog-100k", vary: Vary::Backlog(100_000) },
        ScalingCase { name: "backlog-1m", vary: Vary::Backlog(1_000_000) },
        ScalingCase { name: "backlog-10m", vary: Vary::Backlog(10_000_000) },
        ScalingCase { name: "tables-59", vary: Vary::Tables(59) },
        ScalingCase { name: "tables-500", vary: Vary::Tables(500) },
        ScalingCase { name: "tables-2000", vary: Vary::Tables(2_000) },
        ScalingCase { name: "transaction-1", vary: Vary::Transaction(1) },
        ScalingCase { name: "transaction-10", vary: Vary::Transaction(10) },
        ScalingCase { name: "transaction-100", vary: Vary::Transaction(100) },
        ScalingCase { name: "transaction-1000", vary: Vary::Transaction(1_000) },
        ScalingCase { name: "transaction-10000", vary: Vary::Transaction(10_000) },
        ScalingCase { name: "transaction-100000", vary: Vary::Transaction(100_000) },
    ];

    /// The name on the command line and in the output.
    pub fn name(self) -> &'static str {
        self.name
    }

    fn backlog(self, scale: f64) -> Box<dyn Backlog> {
        let commands = COMMANDS * scale;
        match self.vary {
            Vary::Streams(_) => Box::new(Mix59::over(59, commands)),
            Vary::Tables(tables) => Box::new(Mix59::over(tables, commands)),
            Vary::Backlog(rows) => {
                Box::new(Steps::new((rows as f64 * scale) as u64, ROWS_PER_TRANSACTION))
            }
            Vary::Transaction(rows) => Box::new(Steps::new(commands as u64, rows)),
        }
    }

    /// Measures the case.
    ///
    /// # Errors
    /// When something fails, or a target is not equal in the end.
    pub fn measure(self, bench: Bench<'_>) -> Result<Measurement> {
        let backlog = self.backlog(bench.plan.scale);
        let streams = match self.vary {
            Vary::Streams(streams) => Some(streams),
            Vary::Backlog(_) | Vary::Tables(_) | Vary::Transaction(_) => None,
        };
        let terms = Terms { streams, ..Terms::PLAIN };
        let name = format!("{SCALING}/{}", self.name);
        let mut contest = Contest::hold(bench, &name, backlog.as_ref(), terms)?;
        let commands = backlog.work().commands as f64;
        for run in contest.farshore.iter_mut().chain(&mut contest.native) {
            let seconds = run.values.get("seconds").copied().unwrap_or(f64::NAN);
            run.values.insert("us_per_change", seconds * 1e6 / commands);
        }
        let (scenario, case, metric) = (SCALING, self.name, "seconds");
        let also = &["us_per_change"];
        let headline = Headline { scenario, case, metric, other: NATIVE, also };
        Ok(Measurement::of_runs(headline, &contest.farshore, &contest.native, contest.settings))
    }
}
