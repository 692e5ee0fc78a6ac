//! Every case of every scenario.

use crate::contest::{Bench, Stopped};
use crate::drain::{self, DrainCase};
use crate::fanout::{self, FanoutCase};
use crate::latency::{self, LatencyCase};
use crate::measurement::Measurement;
use crate::mirror::{self, MirrorCase};
use crate::monitored;
use crate::penalty::{self, PenaltyCase};
use crate::scaling::{self, ScalingCase};
use crate::seed::{self, SeedCase};
use crate::study::{self, StudyCase};
use crate::wan::{self, WanCase};
use anyhow::Result;

/// What is measured as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Case {
    /// Everything was stopped while the backlog built.
    Drain(DrainCase),
    /// Only the subscribers were.
    DrainStore(DrainCase),
    /// What the monitor costs.
    Monitor(DrainCase),
    /// Several subscribers at once.
    Fanout(FanoutCase),
    /// A steady rate.
    Latency(LatencyCase),
    /// One thing varied at a time.
    Scaling(ScalingCase),
    /// The throughput study.
    Study(StudyCase),
    /// A long line between publisher and subscriber.
    Wan(WanCase),
    /// The log-compression study.
    Mirror(MirrorCase),
    /// The synchronous/asynchronous study.
    Penalty(PenaltyCase),
    /// A new standby's files.
    Seed(SeedCase),
}

impl Case {
    /// All cases, in the order they are run.
    pub fn all() -> Vec<Case> {
        let drains = DrainCase::ALL.into_iter().map(Case::Drain);
        let from_store = DrainCase::ALL.into_iter().map(Case::DrainStore);
        let scaling = ScalingCase::ALL.map(Case::Scaling);
        let live = LatencyCase::ALL.map(Case::Latency);
        let study = StudyCase::ALL.map(Case::Study);
        let fanout = FanoutCase::ALL.map(Case::Fanout);
        let wan = WanCase::ALL.map(Case::Wan);
        drains
            .chain(from_store)
            .chain(monitored::CASES.map(Case::Monitor))
            .chain(scaling)
            .chain(fanout)
            .chain(live)
            .chain(study)
            .chain(wan)
            .chain(MirrorCase::ALL.map(Case::Mirror))
            .chain(PenaltyCase::ALL.map(Case::Penalty))
            .chain(SeedCase::ALL.map(Case::Seed))
            .collect()
    }

    /// The scenario it belongs to.
    pub fn scenario(self) -> &'static str {
        match self {
            Case::Drain(_) => drain::DRAIN,
            Case::DrainStore(_) => drain::DRAIN_STORE,
            Case::Monitor(_) => monitored::MONITOR,
            Case::Fanout(_) => fanout::FANOUT,
            Case::Latency(_) => latency::LATENCY,
            Case::Scaling(_) => scaling::SCALING,
            Case::Study(_) => study::STUDY,
            Case::Wan(_) => wan::WAN,
            Case::Mirror(_) => mirror::MIRROR,
            Case::Penalty(_) => penalty::PENALTY,
            Case::Seed(_) => seed::SEED,
        }
    }

    /// Its name within the scenario.
    pub fn name(self) -> &'static str {
        match self {
            Case::Drain(case) | Case::DrainStore(case) | Case::Monitor(case) => case.name(),
            Case::Fanout(case) => case.name(),
            Case::Latency(case) => case.name(),
            Case::Scaling(case) => case.name(),
            Case::Study(case) => case.name(),
            Case::Wan(case) => case.name(),
            Case::Mirror(case) => case.name(),
            Case::Penalty(case) => case.name(),
            Case::Seed(case) => case.name(),
        }
    }

    /// Measures it: a line of output per metric.
    ///
    /// # Errors
    /// When something fails, or a target is not equal in the end.
    pub fn measure(self, bench: Bench<'_>) -> Result<Vec<Measurement>> {
        match self {
            Case::Drain(case) => Ok(vec![case.measure(bench, Stopped::Everything)?]),
            Case::DrainStore(case) => Ok(vec![case.measure(bench, Stopped::Subscribers)?]),
            Case::Monitor(case) => Ok(vec![monitored::measure(case, bench)?]),
            Case::Fanout(case) => Ok(vec![case.measure(bench)?]),
            Case::Latency(case) => case.measure(bench),
            Case::Scaling(case) => Ok(vec![case.measure(bench)?]),
            Case::Study(case) => case.measure(bench),
            Case::Wan(case) => case.measure(bench),
            Case::Mirror(case) => case.measure(bench),
            Case::Penalty(case) => case.measure(bench),
            Case::Seed(case) => case.measure(bench),
        }
    }
}
