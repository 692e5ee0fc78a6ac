//! Scenario `drain`: everything is stopped while a backlog builds on the publisher; then each
//! contender in turn carries it to a target of its own. Measured is the time from the start of
//! its work to the last transaction being visible.
//!
//! Scenario `drain-store`: the same, but only the subscribers were stopped, as a distributor meets
//! it every day: the log has been read already and waits in the store.

use crate::backlog::{
    Backlog, ForeignKeys, HotRow, IdentityFull, Incompressible, Insert1, Mix59, Rows1k, Toast,
    Tx5m, Update1, Wide100,
};
use crate::contest::{Bench, Contest, Stopped, Terms};
use crate::measurement::{Headline, Measurement, NATIVE};
use anyhow::Result;

/// The name of the scenario in which everything was stopped.
pub const DRAIN: &str = "drain";
/// The name of the one in which the subscribers were.
pub const DRAIN_STORE: &str = "drain-store";

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
    /// One transaction of 5,000,000 small inserted rows.
    Tx5m,
    /// 100,000 transactions that update one and the same row.
    HotRow,
    /// 100,000 updates of rows with a text out of line, which they leave as it is.
    Toast,
    /// 150,000 updates and 50,000 deletes of tables whose replica identity is the whole row.
    IdentityFull,
    /// 60,000 inserts and 40,000 updates of a table of 100 columns.
    Wide100,
    /// 200,000 commands on orders and their lines; foreign keys are checked for Farshore.
    ForeignKeys,
    /// 300,000 inserted rows of 1 KB of random bytes.
    Incompressible,
}

impl DrainCase {
    /// All cases, in the order they are run.
    pub const ALL: [DrainCase; 11] = [
        DrainCase::Rows1k,
        DrainCase::Mix59,
        DrainCase::Insert1,
        DrainCase::Update1,
        DrainCase::Tx5m,
        DrainCase::HotRow,
        DrainCase::Toast,
        DrainCase::IdentityFull,
        DrainCase::Wide100,
        DrainCase::ForeignKeys,
        DrainCase::Incompressible,
    ];

    /// The name on the command line and in the output.
    pub fn name(self) -> &'static str {
        match self {
            DrainCase::Rows1k => "rows-1k",
            DrainCase::Mix59 => "mix-59",
            DrainCase::Insert1 => "insert-1",
            DrainCase::Update1 => "update-1",
            DrainCase::Tx5m => "tx-5m",
            DrainCase::HotRow => "hot-row",
            DrainCase::Toast => "toast",
            DrainCase::IdentityFull => "identity-full",
            DrainCase::Wide100 => "wide-100",
            DrainCase::ForeignKeys => "foreign-keys",
            DrainCase::Incompressible => "incompressible",
        }
    }

    /// What is to be drained.
    pub fn backlog(self, scale: f64) -> Box<dyn Backlog> {
        match self {
            DrainCase::Rows1k => Box::new(Rows1k::new(scale)),
            DrainCase::Mix59 => Box::new(Mix59::new(scale)),
            DrainCase::Insert1 => Box::new(Insert1::new(scale)),
            DrainCase::Update1 => Box::new(Update1::new(scale)),
            DrainCase::Tx5m => Box::new(Tx5m::new(scale)),
            DrainCase::HotRow => Box::new(HotRow::new(scale)),
            DrainCase::Toast => Box::new(Toast::new(scale)),
            DrainCase::IdentityFull => Box::new(IdentityFull::new(scale)),
            DrainCase::Wide100 => Box::new(Wide100::new(scale)),
            DrainCase::ForeignKeys => Box::new(ForeignKeys::new(scale)),
            DrainCase::Incompressible => Box::new(Incompressible::new(scale)),
        }
    }

    /// Measures the case.
    ///
    /// # Errors
    /// When something fails, or a target is not equal in the end.
    pub fn measure(self, bench: Bench<'_>, stopped: Stopped) -> Result<Measurement> {
        let scenario = match stopped {
            Stopped::Everything => DRAIN,
            Stopped::Subscribers => DRAIN_STORE,
        };
        let backlog = self.backlog(bench.plan.scale);
        let name = format!("{scenario}/{}", self.name());
        let terms = Terms { stopped, ..Terms::PLAIN };
        let contest = Contest::hold(bench, &name, backlog.as_ref(), terms)?;
        let (case, metric) = (self.name(), "seconds");
        let headline = Headline { scenario, case, metric, other: NATIVE, also: &[] };
        let Contest { farshore, native, settings } = contest;
        Ok(Measurement::of_runs(headline, &farshore, &native, settings).bounded().per_command())
    }
}
