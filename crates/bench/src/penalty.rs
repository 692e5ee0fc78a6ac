//! Scenario `penalty`, the synchronous/asynchronous study: what an insert of so many rows pays for
//! being at the far end of a line when it returns. Farshore's modes and PostgreSQL's own take turns
//! on the same two servers; the penalty is what a commit takes beyond an asynchronous one.

use crate::contest::Bench;
use crate::line::Conditions;
use crate::measurement::Measurement;
use crate::mirrored::{Mirrored, Outcome, Ranking, Way};
use crate::progress::say;
use crate::text::Prose;
use anyhow::Result;
use farshore_testkit::postgres::Cluster;
use serde_json::json;
use std::collections::BTreeMap;
use std::time::Instant;

/// The scenario's name.
pub const PENALTY: &str = "penalty";
/// Mbit/s of the line.
const MBIT_PER_S: u64 = 1_000;
/// Bytes of a row's text, as in the study.
const ROW_BYTES: i32 = 1_000;
/// Text that rows are cut from.
const TEXT_BYTES: i32 = 60_000;
/// Rows per statement, the metric's name, and most statements of that size.
const SIZES: [(u32, &str, u32); 7] = [
    (1, "insert_1_ms", 1_000),
    (10, "insert_10_ms", 1_000),
    (100, "insert_100_ms", 300),
    (1_000, "insert_1000_ms", 50),
    (10_000, "insert_10000_ms", 10),
    (100_000, "insert_100000_ms", 2),
    (1_000_000, "insert_1000000_ms", 1),
];
/// How many of these are small: of their penalty the line is the most, not the log.
const SMALL_SIZES: usize = 3;
/// A statement of more rows than this is made smaller by the scale; its line says of how many.
const FIXED_ROWS_MAX: u32 = 1_000;
const EQUAL: &str =
    "SELECT count(*) || ' ' || coalesce(sum(hashtext(r::text)::int8), 0) FROM rows r";

/// A line's milliseconds there and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PenaltyCase {
    /// 1 ms.
    Near,
    /// 20 ms.
    Far,
    /// 1 ms, statements of up to 100 rows alone.
    NearSmall,
    /// 20 ms, likewise.
    FarSmall,
}

/// Who takes turns; what all are compared with is the first one.
const WAYS: [(&str, Way); 7] = [
    ("asynchronous", Way::Native { wal_compression: "off", commit: "local" }),
    ("native_on", Way::Native { wal_compression: "off", commit: "on" }),
    ("native_remote_apply", Way::Native { wal_compression: "off", commit: "remote_apply" }),
    ("farshore", mirror("far")),
    ("farshore_direct", Way::Direct { mode: "far", wal_compression: "off" }),
    ("farshore_far_sync", mirror("far-sync")),
    ("farshore_far_applied", mirror("far-applied")),
];

const fn mirror(mode: &'static str) -> Way {
    Way::Mirror { compression: "zstd", mode, wal_compression: "off" }
}

impl PenaltyCase {
    /// All.
    pub const ALL: [PenaltyCase; 4] =
        [PenaltyCase::Near, PenaltyCase::Far, PenaltyCase::NearSmall, PenaltyCase::FarSmall];

    /// The name on the command line and in the output.
    pub fn name(self) -> &'static str {
        match self {
            PenaltyCase::Near => "1ms",
            PenaltyCase::Far => "20ms",
            PenaltyCase::NearSmall => "1ms-small",
            PenaltyCase::FarSmall => "20ms-small",
        }
    }

    fn sizes(self) -> &'static [(u32, &'static str, u32)] {
        match self {
            PenaltyCase::Near | PenaltyCase::Far => &SIZES,
            PenaltyCase::NearSmall | PenaltyCase::FarSmall => &SIZES[..SMALL_SIZES],
        }
    }

    fn rtt_ms(self) -> u64 {
        match self {
            PenaltyCase::Near | PenaltyCase::NearSmall => 1,
            PenaltyCase::Far | PenaltyCase::FarSmall => 20,
        }
    }

    /// Measures the case: a line for each size of a statement.
    ///
    /// # Errors
    /// When there can be no line here, something fails, or the standby is not equal in the end.
    pub fn measure(self, bench: Bench<'_>) -> Result<Vec<Measurement>> {
        say("starting a principal and a standby at the ends of a line");
        let schema = "CREATE UNLOGGED TABLE source (v text); CREATE TABLE rows (id int, v text)";
        let mut mirrored = Mirrored::start(bench, schema)?;
        let text = Prose::new(bench.plan.seed).take(TEXT_BYTES as usize + ROW_BYTES as usize);
        mirrored.principal.connect()?.execute("INSERT INTO source VALUES ($1)", &[&text])?;
        let conditions = Conditions::new(self.rtt_ms(), MBIT_PER_S);
        let scale = bench.plan.scale;
        let sized = |(rows, metric, statements): (u32, &'static str, u32)| {
            let scaled = |count: u32| ((f64::from(count) * scale) as u32).max(1);
            let rows_now =
                if rows > FIXED_ROWS_MAX { scaled(rows).max(FIXED_ROWS_MAX) } else { rows };
            (metric, rows_now, scaled(statements))
        };
        let sizes: Vec<(&str, u32, u32)> = self.sizes().iter().copied().map(sized).collect();
        // What the others are compared with is always there.
        let (asynchronous, others) = (WAYS[0], bench.plan.chosen(&WAYS)?);
        let others = others.into_iter().filter(|(name, _)| *name != asynchronous.0);
        let ways: Vec<(&'static str, Way)> = std::iter::once(asynchronous).chain(others).collect();
        let mut outcomes: Vec<Vec<Outcome>> = ways
            .iter()
            .map(|(name, _)| sizes.iter().map(|_| Outcome { name, runs: Vec::new() }).collect())
            .collect();
        for run in 0..bench.plan.runs {
            for at in bench.plan.turns(run, ways.len()) {
                let (name, way) = &ways[at];
                mirrored.take(*way, conditions)?;
                for (outcome, (metric, rows, statements)) in outcomes[at].iter_mut().zip(&sizes) {
                    // Of another size, what nobody waited for is not on the line any more.
                    mirrored.catch_up()?;
                    bench.interrupt.check()?;
                    let took =
                        mirrored.measure(|server| insert(server, metric, *rows, *statements))?;
                    outcome.runs.push(took);
                }
                mirrored.prove_equal(EQUAL)?;
                mirrored.principal.execute_script("TRUNCATE rows")?;
                say(&format!("{PENALTY}/{}: {name}, run {}", self.name(), run + 1));
            }
        }
        let mut lines = Vec::new();
        for (at, (metric, rows, statements)) in sizes.into_iter().enumerate() {
            let mut of_size = Vec::new();
            for outcome in &mut outcomes {
                let taken =
                    Outcome { name: outcome[at].name, runs: std::mem::take(&mut outcome[at].runs) };
                of_size.push(taken);
            }
            add_penalties(&mut of_size, metric);
            let mut settings = mirrored.settings(conditions);
            settings.extend([
                ("rows_per_statement", json!(rows)),
                ("statements", json!(statements)),
                ("row_bytes", json!(ROW_BYTES)),
                ("ends", json!("equal: every row's hash, after all sizes")),
            ]);
            let ranking = Ranking {
                scenario: PENALTY,
                case: self.name(),
                metric: (metric, metric),
                is_higher_better: false,
                ours: &["farshore", "farshore_direct", "farshore_far_sync", "farshore_far_applied"],
                theirs: &["native_on"],
                also: &["total_s", "penalty_ms", "penalty_percent", "rows_per_s", "inserts_per_s"],
            };
            lines.push(ranking.line(&of_size, settings));
        }
        Ok(lines)
    }
}

/// What each takes beyond the asynchronous one, run by run.
fn add_penalties(outcomes: &mut [Outcome], metric: &'static str) {
    let Some((asynchronous, others)) = outcomes.split_first_mut() else { return };
    for outcome in others {
        for (run, alone) in outcome.runs.iter_mut().zip(&asynchronous.runs) {
            let (taken, alone) = (run.value(metric), alone.value(metric));
            run.values.insert("penalty_ms", taken - alone);
            run.values.insert("penalty_percent", 100.0 * (taken - alone) / alone);
        }
    }
    for run in &mut asynchronous.runs {
        run.values.extend([("penalty_ms", 0.0), ("penalty_percent", 0.0)]);
    }
}

/// One client's inserts, one after the other.
fn insert(
    principal: &Cluster,
    metric: &'static str,
    rows: u32,
    statements: u32,
) -> Result<BTreeMap<&'static str, f64>> {
    let mut client = principal.connect()?;
    let statement = client.prepare(&format!(
        "INSERT INTO rows SELECT g, substr(v, 1 + ((g::int8 * 7919 + $2::int4) % {TEXT_BYTES})::int4, \
         {ROW_BYTES}) \
         FROM source, generate_series(1, $1::int4) g"
    ))?;
    let begun = Instant::now();
    for number in 0..statements {
        client.execute(&statement, &[&(rows as i32), &(number as i32)])?;
    }
    let seconds = begun.elapsed().as_secs_f64();
    let inserts_per_s = f64::from(statements) / seconds;
    Ok(BTreeMap::from([
        (metric, 1_000.0 / inserts_per_s),
        ("total_s", seconds),
        ("inserts_per_s", inserts_per_s),
        ("rows_per_s", inserts_per_s * f64::from(rows)),
    ]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measurement::{Costs, Run};

    #[test]
    fn a_penalty_is_what_is_beyond_an_asynchronous_insert() {
        let outcome = |name, value: f64| {
            let costs = Costs { publisher: 0.0, subscriber: 0.0, own: Vec::new() };
            let run = Run { values: BTreeMap::from([("insert_1_ms", value)]), costs };
            Outcome { name, runs: vec![run] }
        };
        let mut outcomes = [outcome("asynchronous", 2.0), outcome("native_on", 5.0)];
        add_penalties(&mut outcomes, "insert_1_ms");
        assert_eq!(outcomes[1].runs[0].value("penalty_ms"), 3.0);
        assert_eq!(outcomes[1].runs[0].value("penalty_percent"), 150.0);
        assert_eq!(outcomes[0].runs[0].value("penalty_ms"), 0.0);
    }
}
