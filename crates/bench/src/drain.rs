//! Scenario `drain`: everything is stopped while a backlog builds on the publisher; then each
//! contender in turn carries it to a target of its own. Measured is the time from the start of
//! its work to the last transaction being visible.

use crate::backlog::{Backlog, Insert1, Mix59, Rows1k, Update1};
use crate::contest::{Bench, Contest, Terms};
use crate::measurement::{Headline, Measurement};
use anyhow::Result;

/// The scenario's name.
pub const DRAIN: &str = "drain";

/// What the backlog is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainCase {
    /// 1,000,000 inserted rows of 1 KB, 100 per transaction.
    Rows1k,
    /// 400,000 commands over 59 tables: 70 % insert, 20 % update, 10 % delete, 50 per transaction.
    Mix59,
    /// 200,000 transactions of one inserted row.
    Insert1,
    /// 200,000 transactions of one updated row.
    Update1,
}

impl DrainCase {
    /// All cases, in the order they are run.
    pub const ALL: [DrainCase; 4] =
        [DrainCase::Rows1k, DrainCase::Mix59, DrainCase::Insert1, DrainCase::Update1];

    /// The name on the command line and in the output.
    pub fn name(self) -> &'static str {
        match self {
            DrainCase::Rows1k => "rows-1k",
            DrainCase::Mix59 => "mix-59",
            DrainCase::Insert1 => "insert-1",
            DrainCase::Update1 => "update-1",
        }
    }

    fn backlog(self, scale: f64) -> Box<dyn Backlog> {
        match self {
            DrainCase::Rows1k => Box::new(Rows1k::new(scale)),
            DrainCase::Mix59 => Box::new(Mix59::new(scale)),
            DrainCase::Insert1 => Box::new(Insert1::new(scale)),
            DrainCase::Update1 => Box::new(Update1::new(scale)),
        }
    }

    /// Measures the case.
    ///
    /// # Errors
    /// When something fails, or a target is not equal in the end.
    pub fn measure(self, bench: Bench<'_>) -> Result<Measurement> {
        let backlog = self.backlog(bench.plan.scale);
        let name = format!("{DRAIN}/{}", self.name());
        let contest = Contest::hold(bench, &name, backlog.as_ref(), Terms { subscribers: 1 })?;
        let headline =
            Headline { scenario: DRAIN, case: self.name(), metric: "seconds", also: &[] };
        Ok(Measurement::of_runs(headline, &contest.farshore, &contest.native, contest.settings))
    }
}
