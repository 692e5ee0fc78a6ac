//! The command line as typed, and the plan it means.

use crate::case::Case;
use anyhow::{Result, bail};
use clap::Parser;
use std::path::PathBuf;

/// Compare Farshore with PostgreSQL's own replication. JSON lines on standard output.
#[derive(Debug, Parser)]
#[command(name = "farshore-bench", version, about)]
pub struct Arguments {
    /// Only this scenario, and no report page; without it all, with a page in the output folder
    #[arg(long, env = "SCENARIO", default_value = "")]
    scenario: String,
    /// Only these cases, separated by commas
    #[arg(long, env = "CASES", default_value = "")]
    cases: String,
    /// Of the contenders of `mirror`, `penalty` and `seed` only these, separated by commas
    #[arg(long, env = "WAYS", default_value = "")]
    ways: String,
    /// How often each case is measured; contenders take turns at going first
    #[arg(long, env = "RUNS", default_value = "3")]
    runs: String,
    /// Factor on the amount of work, for a quick look; printed in the settings
    #[arg(long, env = "SCALE", default_value = "1")]
    scale: String,
    /// Seed of all generated data
    #[arg(long, env = "SEED", default_value = "20050615")]
    seed: String,
    /// Folder for the report page
    #[arg(long, default_value = "out")]
    out: PathBuf,
}

/// What to measure.
#[derive(Debug)]
pub struct Plan {
    /// In the order they are run.
    pub cases: Vec<Case>,
    /// Names of contenders, of scenarios with several; none: all.
    pub ways: Vec<String>,
    /// Measurements per case; at least 1.
    pub runs: usize,
    /// Factor on the amount of work; above 0, at most 10.
    pub scale: f64,
    /// Seed of all generated data.
    pub seed: u64,
    /// Where the page goes, if one is asked for.
    pub report_folder: Option<PathBuf>,
}

impl Arguments {
    /// Checks names and numbers. Variables that are set but empty count as not given: make passes
    /// them on like that.
    ///
    /// # Errors
    /// Says which names or numbers there could be.
    pub fn resolve(self) -> Result<Plan> {
        let mut known = Case::all();
        if !self.scenario.is_empty() {
            known.retain(|case| case.scenario() == self.scenario);
        }
        if known.is_empty() {
            let mut names: Vec<_> = Case::all().into_iter().map(Case::scenario).collect();
            names.dedup();
            bail!("no scenario \"{}\"; there are: {}", self.scenario, names.join(", "));
        }
        let mut cases = Vec::new();
        for name in self.cases.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            let before = cases.len();
            cases.extend(known.iter().copied().filter(|case| case.name() == name));
            if cases.len() == before {
                let names: Vec<_> = known.iter().map(|case| case.name()).collect();
                bail!("no case \"{name}\"; there are: {}", names.join(", "));
            }
        }
        if cases.is_empty() {
            cases = known;
        }
        let runs = number(&self.runs, "RUNS", 3)?;
        let scale = number(&self.scale, "SCALE", 1.0)?;
        if !(1..=100).contains(&runs) {
            bail!("RUNS must be from 1 to 100");
        }
        if !(scale > 0.0 && scale <= 1_000.0) {
            bail!("SCALE must be above 0 and at most 1000");
        }
        let ways = self.ways.split(',').map(str::trim).filter(|name| !name.is_empty());
        Ok(Plan {
            cases,
            ways: ways.map(str::to_owned).collect(),
            runs,
            scale,
            seed: number(&self.seed, "SEED", 0)?,
            report_folder: self.scenario.is_empty().then_some(self.out),
        })
    }
}

impl Plan {
    /// Those of the contenders that are to take turns.
    ///
    /// # Errors
    /// Says which there are, if one that was named is not.
    pub fn chosen<W: Copy>(&self, all: &[(&'static str, W)]) -> Result<Vec<(&'static str, W)>> {
        if let Some(unknown) = self.ways.iter().find(|way| all.iter().all(|(name, _)| name != way))
        {
            let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
            bail!("no contender \"{unknown}\"; there are: {}", names.join(", "));
        }
        let is_chosen =
            |name: &str| self.ways.is_empty() || self.ways.iter().any(|way| way == name);
        Ok(all.iter().copied().filter(|(name, _)| is_chosen(name)).collect())
    }

    /// The order in which so many contenders take turns in this run, counted from 0: each run begins
    /// further on in the list, so that over all runs nobody is always early or always late.
    pub fn turns(&self, run: usize, contenders: usize) -> impl Iterator<Item = usize> + use<> {
        let first = run * contenders / self.runs.max(1);
        (first..first + contenders).map(move |at| at % contenders)
    }
}

fn number<T: std::str::FromStr>(text: &str, name: &str, default: T) -> Result<T> {
    if text.is_empty() {
        return Ok(default);
    }
    match text.parse() {
        Ok(number) => Ok(number),
        Err(_) => bail!("{name} is \"{text}\", which is not a number it can have"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drain::DrainCase;

    fn plan(arguments: &[&str]) -> Result<Plan> {
        let named = ["farshore-bench", "--scenario", "drain"];
        Arguments::try_parse_from(named.iter().chain(arguments))?.resolve()
    }

    #[test]
    fn a_case_belongs_to_its_scenario() {
        let resolve = |arguments: &[&str]| {
            let arguments = ["farshore-bench"].iter().chain(arguments);
            Arguments::try_parse_from(arguments).unwrap().resolve()
        };
        let everywhere = resolve(&["--cases", "hot-row"]).unwrap();
        let hot = DrainCase::HotRow;
        assert_eq!(everywhere.cases, [Case::Drain(hot), Case::DrainStore(hot)]);
        assert!(everywhere.report_folder.is_some());
        let error = resolve(&["--scenario", "drains"]).unwrap_err().to_string();
        assert!(
            error.contains("drain, drain-store, monitor, scaling, fanout, latency, study, wan"),
            "{error}"
        );
        assert!(resolve(&["--scenario", "fanout", "--cases", "hot-row"]).is_err());
    }

    #[test]
    fn of_contenders_those_that_are_named_take_turns() {
        let all = [("farshore", 1), ("native_off", 2), ("native_lz4", 3)];
        let two = plan(&["--ways", "native_lz4, farshore"]).unwrap();
        assert_eq!(two.chosen(&all).unwrap(), [("farshore", 1), ("native_lz4", 3)]);
        assert_eq!(plan(&["--ways", ""]).unwrap().chosen(&all).unwrap(), all);
        let error = plan(&["--ways", "native"]).unwrap().chosen(&all).unwrap_err().to_string();
        assert!(error.contains("farshore, native_off"), "{error}");
    }

    #[test]
    fn each_run_begins_with_another_contender() {
        let orders = |runs: &str, contenders| -> Vec<Vec<usize>> {
            let plan = plan(&["--runs", runs]).unwrap();
            (0..plan.runs).map(|run| plan.turns(run, contenders).collect()).collect()
        };
        assert_eq!(orders("3", 3), [[0, 1, 2], [1, 2, 0], [2, 0, 1]]);
        assert_eq!(orders("1", 3), [[0, 1, 2]]);
        let firsts: Vec<usize> = orders("3", 10).iter().map(|order| order[0]).collect();
        assert_eq!(firsts, [0, 3, 6], "early, in the middle and late");
        for mut order in orders("5", 2) {
            order.sort_unstable();
            assert_eq!(order, [0, 1], "everybody once");
        }
        assert!(orders("2", 0).iter().all(Vec::is_empty));
    }

    #[test]
    fn empty_means_everything_and_wrong_names_are_answered_with_the_right_ones() {
        let all = plan(&["--cases", "", "--runs", "", "--scale", ""]).unwrap();
        assert_eq!((all.cases.len(), all.runs), (DrainCase::ALL.len(), 3));
        assert!(all.report_folder.is_none());
        let two = plan(&["--cases", "update-1, mix-59"]).unwrap();
        assert_eq!(two.cases, [DrainCase::Update1, DrainCase::Mix59].map(Case::Drain));
        for (wrong, said) in [
            (["--cases", "mix"], "rows-1k, mix-59"),
            (["--runs", "0"], "from 1 to 100"),
            (["--scale", "NaN"], "above 0"),
            (["--seed", "x"], "SEED is \"x\""),
        ] {
            let error = plan(&wrong).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
