//! What a durable commit costs on a live PostgreSQL: the same statements at each level of
//! `synchronous_commit`, from one row to a million.

use crate::log::{Cap, Demand, Stage, Standby, begin_report, connect, on_a_server, trying};
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
/// All levels, the one that waits for nothing first.
const LEVELS: [&str; 5] = [NO_WAIT, "local", "remote_write", "on", "remote_apply"];
/// Statements of one figure at most.
const STATEMENTS_MAX: u64 = 200;
/// How often it is looked how much log there is.
const LOOK_EVERY: Duration = Duration::from_millis(50);
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
    let demand = options.demand();
    let each: Vec<Option<&str>> = LEVELS.into_iter().map(Some).collect();
    let mut report = on_a_server(&options.server, demand, &each, stop, say, async |stage| {
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
        let mirrors = mirrors(&stage.server.connected);
        report.remarks.extend(about_mirrors(&stage.server.connected, &mirrors));
        report.sections.push(penalties(options, levels, &mirrors, stage, say).await?);
        Ok(report)
    })
    .await?;
    report.remark_on_spread();
    report.verdict = verdict(&report);
    Ok(report)
}

/// Levels that differ on this server, the one that waits for nothing first.
fn levels(standbys: &str) -> &'static [&'static str] {
    if standbys.trim().is_empty() { &[NO_WAIT, "on"] } else { &LEVELS }
}

/// Names of the mirrors that commits wait for.
fn mirrors(standbys: &[Standby]) -> Vec<String> {
    let waited_for = standbys.iter().filter(|standby| standby.is_mirror && standby.is_waited_for);
    waited_for.filter_map(|standby| standby.name.clone()).collect()
}

/// What the levels have to do with mirrors.
fn about_mirrors(standbys: &[Standby], mirrors: &[String]) -> Vec<String> {
    let mut remarks = Vec::new();
    if standbys.iter().any(|standby| standby.name.is_none()) {
        remarks.push(
            "the role may not see which standbys are connected, and so not whether they are mirrors: \
             GRANT pg_monitor to it"
                .to_owned(),
        );
    }
    if mirrors.is_empty() {
        let lazy = standbys.iter().filter(|standby| standby.is_mirror);
        let lazy: Vec<&str> = lazy.filter_map(|standby| standby.name.as_deref()).collect();
        remarks.push(if lazy.is_empty() {
            "no mirror of Farshore is connected: no level here is the price of one".to_owned()
        } else {
            format!(
                "no commit waits for mirror {}, which is not in use by synchronous_standby_names: no \
                 level here is the price of a mode but async",
                lazy.join(", ")
            )
        });
        return remarks;
    }
    remarks.push(format!(
        "commits wait for mirror {}: local is the price of its mode async, on that of far, \
         remote_apply that of far-applied. A mirror whose own mode is far-applied makes on wait as \
         long as remote_apply; its mode stands in the site file of its near end",
        mirrors.join(", ")
    ));
    let others = standbys.iter().filter(|standby| standby.is_waited_for && !standby.is_mirror);
    let others: Vec<&str> = others.filter_map(|standby| standby.name.as_deref()).collect();
    if !others.is_empty() {
        remarks.push(format!(
            "commits also wait for {}, which no mirror is: the price is of all of them",
            others.join(", ")
        ));
    }
    remarks
}

/// A level, with the mode of a mirror that it is the price of.
fn label(level: &str, mirrors: &[String]) -> String {
    let mode = match level {
        _ if mirrors.is_empty() => None,
        "local" => Some("async"),
        "on" => Some("far"),
        "remote_apply" => Some("far-applied"),
        _ => None,
    };
    mode.map_or_else(|| level.to_owned(), |mode| format!("{level} (mirror {mode})"))
}

async fn penalties(
    options: &CommitOptions,
    levels: &[&'static str],
    mirrors: &[String],
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
    let cap = Cap::from_now(stage.admin, options.log_bytes_max).await?;
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
                let go = statements(options, &mut client, level, *rows, (stage.admin, cap));
                let times = go.await?.map_err(trying("write rows", &name))?;
                took.insert(level, times);
            }
            let base = took.get(NO_WAIT).map_or(0.0, |times| median(times));
            for level in levels {
                let Some(times) = took.get(level) else { continue };
                let usual = median(times);
                section.add(
                    &[At::Number(*rows), At::Word(label(level, mirrors))],
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

/// Milliseconds of each statement. Ends everything when too much log was written.
async fn statements(
    options: &CommitOptions,
    client: &mut Connection,
    level: &str,
    rows: u64,
    (admin, cap): (&mut Connection, Cap),
) -> Result<Result<Vec<f64>, farshore_pg::Error>, Error> {
    if let Err(error) = client.simple_query(&format!("SET synchronous_commit = {level}")).await {
        return Ok(Err(error));
    }
    let wanted = (ROWS / rows).clamp(1, STATEMENTS_MAX);
    let begin = Instant::now();
    let mut times = Vec::new();
    let mut looked = None;
    for number in 0..wanted {
        let sql = format!("EXECUTE go({rows}, {})", number * rows);
        let start = Instant::now();
        if let Err(error) = client.simple_query(&sql).await {
            return Ok(Err(error));
        }
        times.push(start.elapsed().as_secs_f64() * 1e3);
        // Not after each of many small ones.
        if looked.is_none_or(|looked: Instant| looked.elapsed() >= LOOK_EVERY) {
            cap.look(admin).await?;
            looked = Some(Instant::now());
        }
        if begin.elapsed() >= options.time_max {
            break;
        }
    }
    Ok(Ok(times))
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

#[cfg(test)]
mod tests {
    use super::*;

    fn standby(name: Option<&str>, is_waited_for: bool, is_mirror: bool) -> Standby {
        Standby { name: name.map(str::to_owned), is_waited_for, is_mirror }
    }

    #[test]
    fn mirrors_are_told_from_other_standbys() {
        let both =
            [standby(Some("farshore_dr"), true, true), standby(Some("walreceiver"), true, false)];
        let found = mirrors(&both);
        assert_eq!(found, ["farshore_dr"]);
        let said = about_mirrors(&both, &found).join("\n");
        assert!(said.contains("wait for mirror farshore_dr"), "{said}");
        assert!(said.contains("also wait for walreceiver"), "{said}");
        for (level, shown) in [
            ("off", "off"),
            ("local", "local (mirror async)"),
            ("remote_write", "remote_write"),
            ("on", "on (mirror far)"),
            ("remote_apply", "remote_apply (mirror far-applied)"),
        ] {
            assert_eq!(label(level, &found), shown);
            assert_eq!(label(level, &[]), level);
        }
        for (standbys, words) in [
            (vec![], "no mirror of Farshore is connected"),
            (vec![standby(Some("farshore_dr"), false, true)], "no commit waits for mirror"),
            (vec![standby(None, false, false)], "GRANT pg_monitor"),
        ] {
            assert!(mirrors(&standbys).is_empty());
            let said = about_mirrors(&standbys, &[]).join("\n");
            assert!(said.contains(words), "{said}");
        }
    }
}
