//! What a durable commit costs on a live PostgreSQL: the same statements at each level of
//! `synchronous_commit`, from one row to a million.

use crate::log::{Demand, Stage, begin_report, connect, on_a_server, trying};
use crate::report::{At, Better, DimensionKind, Fact, Report, Section};
use crate::statistics::median;
use crate::units::{count, figure};
use crate::{Error, Progress, Stop};
use farshore_pg::{Config, Connection};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Name of the section of a report.
pub(crate) const PENALTY: &str = "penalty";
/// What everything is compared with: nobody waits for the log.
const NO_WAIT: &str = "off";
/// Statements of one figure at most.
const STATEMENTS_MAX: u64 = 200;
/// Rows of one figure, about; a statement of more is run once.
const ROWS: u64 = 200_000;
/// A penalty below this, in percent, is small.
const SMALL_PENALTY: f64 = 10.0;

/// What to measure.
#[derive(Debug, Clone)]
pub struct CommitOptions {
    /// The server, and the database that the scratch schema goes to.
    pub server: Config,
    /// Rows in a statement; each is a transaction.
    pub statement_rows: Vec<u64>,
    /// Characters in a row.
    pub row_size: u32,
    /// How often each figure is measured.
    pub repeats: u32,
    /// A figure is measured no longer than this each time, but for its first statement.
    pub time_max: Duration,
    /// Bytes of log written in all, at most.
    pub log_bytes_max: u64,
}

impl CommitOptions {
    /// One to a million rows of 100 characters.
    pub fn new(server: Config) -> CommitOptions {
        CommitOptions {
            server,
            statement_rows: vec![1, 10, 100, 1_000, 10_000, 100_000, 1_000_000],
            row_size: 100,
            repeats: 3,
            time_max: Duration::from_secs(5),
            log_bytes_max: 32 << 30,
        }
    }

    fn check(&self) -> Result<(), Error> {
        if self.repeats == 0 || self.statement_rows.is_empty() || self.statement_rows.contains(&0) {
            return Err(Error::Refused(
                "nothing would be measured: repeats and rows must be above 0".to_owned(),
            ));
        }
        if !(1..=crate::log::ROW_SIZE_MAX).contains(&self.row_size) {
            return Err(Error::Refused(format!(
                "a row can have 1 to {} characters",
                crate::log::ROW_SIZE_MAX
            )));
        }
        Ok(())
    }

    fn demand(&self) -> Demand {
        let row = u64::from(self.row_size) + 100;
        let largest = self.statement_rows.iter().copied().max().unwrap_or(0);
        let bytes = |rows: u64| rows.saturating_mul(row);
        let all = self.statement_rows.iter().map(|rows| bytes((*rows).max(ROWS)));
        let once = all.fold(0, u64::saturating_add);
        // As many levels as there can be.
        let rounds = u64::from(self.repeats) * 5;
        Demand {
            clients: 1,
            planned_bytes: Some(once.saturating_mul(rounds)),
            table_bytes: bytes(largest.max(ROWS)).saturating_mul(5) / 4,
            log_bytes_max: self.log_bytes_max,
        }
    }
}

/// Measures the price of each level. The scratch schema is gone when this returns.
///
/// # Errors
/// As [`crate::log::measure`].
pub async fn measure(
    options: &CommitOptions,
    stop: &Stop,
    say: Progress<'_>,
) -> Result<Report, Error> {
    options.check()?;
    let mut report = on_a_server(&options.server, options.demand(), stop, say, async |stage| {
        let mut report = begin_report("commit", stage, options.log_bytes_max);
        report.settings = vec![
            Fact::new("row size", options.row_size),
            Fact::new("repeats", options.repeats),
        ];
        let levels = levels(&stage.server.standbys);
        if levels.len() == 2 {
            report.remarks.push(
                "synchronous_standby_names is empty: on, local, remote_write and remote_apply all wait \
                 for the local flush alone, and are measured as on"
                    .to_owned(),
            );
        }
        report.sections.push(penalties(options, levels, stage, say).await?);
        Ok(report)
    })
    .await?;
    report.remark_on_spread();
    report.verdict = verdict(&report);
    Ok(report)
}

/// Levels that differ on this server, the one that waits for nothing first.
fn levels(standbys: &str) -> &'static [&'static str] {
    if standbys.trim().is_empty() {
        &[NO_WAIT, "on"]
    } else {
        &[NO_WAIT, "local", "remote_write", "on", "remote_apply"]
    }
}

async fn penalties(
    options: &CommitOptions,
    levels: &[&'static str],
    stage: &mut Stage<'_>,
    say: Progress<'_>,
) -> Result<Section, Error> {
    let mut section = Section::new(
        PENALTY,
        "What a commit costs at each level of synchronous_commit",
        "One client, one statement per transaction. The penalty is how much longer the usual \
         statement takes, its commit included, than with synchronous_commit = off in the same round.",
        &[("rows/statement", DimensionKind::Count), ("level", DimensionKind::Word)],
        &[
            ("p50_ms", "usual ms", Better::Lower),
            ("penalty_percent", "penalty %", Better::Lower),
            ("penalty_us", "penalty µs", Better::Lower),
            ("max_ms", "max ms", Better::Lower),
            ("statements", "statements", Better::Neither),
        ],
    );
    section.chart("Penalty in % by rows per statement", "penalty_percent", 0, Some(1), false);
    section.chart("Usual ms by rows per statement", "p50_ms", 0, Some(1), true);
    let name = stage.admin.server().to_owned();
    say("making rows to choose from");
    stage.scratch.fill(stage.admin, options.row_size).await?;
    let mut client = connect(stage.config).await?;
    stage.at_work.add(&client);
    let prepare = stage.scratch.prepare();
    client.simple_query(&prepare).await.map_err(trying("prepare a statement", &name))?;
    for round in 1..=options.repeats {
        for rows in &options.statement_rows {
            say(&format!(
                "round {round} of {}: statements of {} rows, each level",
                options.repeats,
                count(*rows)
            ));
            let mut took: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
            // Who goes first changes from round to round.
            let first = round as usize % levels.len();
            for level in levels.iter().cycle().skip(first).take(levels.len()) {
                stage.scratch.empty(stage.admin).await?;
                let times = statements(options, &mut client, level, *rows)
                    .await
                    .map_err(trying("write rows", &name))?;
                took.insert(level, times);
            }
            let base = took.get(NO_WAIT).map_or(0.0, |times| median(times));
            for level in levels {
                let Some(times) = took.get(level) else { continue };
                let usual = median(times);
                section.add(
                    &[At::Number(*rows), At::Word((*level).to_owned())],
                    &[
                        ("p50_ms", usual),
                        ("penalty_percent", (usual / base.max(f64::MIN_POSITIVE) - 1.0) * 100.0),
                        ("penalty_us", (usual - base) * 1e3),
                        ("max_ms", times.iter().copied().fold(0.0, f64::max)),
                        ("statements", times.len() as f64),
                    ],
                );
            }
        }
    }
    client.close().await;
    Ok(section)
}

/// Milliseconds of each statement.
async fn statements(
    options: &CommitOptions,
    client: &mut Connection,
    level: &str,
    rows: u64,
) -> Result<Vec<f64>, farshore_pg::Error> {
    client.simple_query(&format!("SET synchronous_commit = {level}")).await?;
    let wanted = (ROWS / rows).clamp(1, STATEMENTS_MAX);
    let begin = Instant::now();
    let mut times = Vec::new();
    for number in 0..wanted {
        let sql = format!("EXECUTE go({rows}, {})", number * rows);
        let start = Instant::now();
        client.simple_query(&sql).await?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        if begin.elapsed() >= options.time_max {
            break;
        }
    }
    Ok(times)
}

/// What the figures mean.
fn verdict(report: &Report) -> Vec<String> {
    let Some(section) = report.section(PENALTY) else { return Vec::new() };
    let mut levels: Vec<&str> = Vec::new();
    for row in &section.rows {
        if let Some(At::Word(level)) = row.at.get(1)
            && level != NO_WAIT
            && !levels.contains(&level.as_str())
        {
            levels.push(level);
        }
    }
    let mut verdict = Vec::new();
    for level in levels {
        let rows: Vec<_> = section
            .rows
            .iter()
            .filter(|row| row.at.get(1) == Some(&At::Word(level.to_owned())))
            .collect();
        let penalty = |row: &crate::report::Row| row.median("penalty_percent").unwrap_or(0.0);
        let Some(first) = rows.first() else { continue };
        // From there on it stays small: a single small one before may be chance.
        let last_large = rows.iter().rposition(|row| penalty(row) >= SMALL_PENALTY);
        let from = match last_large {
            None => Some(*first),
            Some(at) => rows.get(at + 1).copied(),
        };
        let end = match from.and_then(|row| row.number(0)) {
            Some(rows) => format!("from {} rows per statement on it is below 10 %", count(rows)),
            None => "it stays above 10 % at every size that was measured".to_owned(),
        };
        verdict.push(format!(
            "synchronous_commit = {level}: a statement of {} row{} takes {} µs longer than with off \
             ({} %); {end}.",
            count(first.number(0).unwrap_or(0)),
            if first.number(0) == Some(1) { "" } else { "s" },
            figure(first.median("penalty_us").unwrap_or(0.0)),
            figure(penalty(first))
        ));
    }
    verdict.push(
        "What would help: more rows per statement or per transaction; several sessions, which share \
         flushes; off only where the last moments may be lost in a crash."
            .to_owned(),
    );
    verdict
}
