//! Scenario `seed`: the files of a new standby over a line, and once more when a part of them has
//! changed. `pg_basebackup`, as it is and with the server's compression, and `farshore mirror seed`
//! take turns on the same principal.

use crate::contest::Bench;
use crate::line::Conditions;
use crate::measurement::Measurement;
use crate::mirrored::{Mirrored, Outcome, Ranking, Way};
use crate::progress::say;
use crate::text::Prose;
use anyhow::{Context, Result};
use farshore_testkit::postgres::Cluster;
use farshore_testkit::proc_fs;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

/// The scenario's name.
pub const SEED: &str = "seed";
/// Rows of 1 KB of text.
const ROWS: f64 = 1_000_000.0;
/// At least so many.
const ROWS_MIN: f64 = 20_000.0;
const ROW_BYTES: usize = 1_000;
/// Rows per statement that makes them.
const ROWS_AT_ONCE: usize = 1_000;
/// One row in so many changes before the files are taken once more, all of them side by side.
const CHANGED: i64 = 20;
/// Small tables, each with a key: a database is thousands of small files as well.
const SMALL_TABLES: i32 = 500;

/// A line: megabits per second, and milliseconds there and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeedCase {
    name: &'static str,
    mbit_per_s: u64,
    rtt_ms: u64,
}

/// Who brings the files.
#[derive(Debug, Clone, Copy)]
enum Tool {
    /// `pg_basebackup` with this `--compress`.
    BaseBackup(Option<&'static str>),
    /// `farshore mirror seed`.
    Farshore,
}

/// zstd as in `native_zstd`, on two threads of the server, as many as this machine has processors.
const THREADS: &str = "server-zstd:level=1,workers=2";
const WAYS: [(&str, Tool); 5] = [
    ("native_plain", Tool::BaseBackup(None)),
    ("native_lz4", Tool::BaseBackup(Some("server-lz4"))),
    ("native_zstd", Tool::BaseBackup(Some("server-zstd:1"))),
    ("native_zstd_threads", Tool::BaseBackup(Some(THREADS))),
    ("farshore", Tool::Farshore),
];

impl SeedCase {
    /// All cases, in the order they are run.
    pub const ALL: [SeedCase; 3] = [
        SeedCase { name: "100mbit-20ms", mbit_per_s: 100, rtt_ms: 20 },
        SeedCase { name: "1gbit-1ms", mbit_per_s: 1_000, rtt_ms: 1 },
        SeedCase { name: "1gbit-77ms", mbit_per_s: 1_000, rtt_ms: 77 },
    ];

    /// The name on the command line and in the output.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// Measures the case: the first time, and once more.
    ///
    /// # Errors
    /// When there can be no line here, something fails, or the files are not the principal's.
    pub fn measure(self, bench: Bench<'_>) -> Result<Vec<Measurement>> {
        let rows = (ROWS * bench.plan.scale).max(ROWS_MIN).round() as usize;
        say("starting a principal and a standby at the ends of a line");
        let mut mirrored =
            Mirrored::start(bench, "CREATE TABLE rows (id int8 PRIMARY KEY, v text)")?;
        let mut ways = bench.plan.chosen(&WAYS)?;
        let has_threads = |tool: &Tool| matches!(tool, Tool::BaseBackup(Some(THREADS)));
        // As long as there is little to take.
        if ways.iter().any(|(_, tool)| has_threads(tool))
            && !mirrored.compresses_with_threads(THREADS)?
        {
            say("this server does not compress with threads: without native_zstd_threads");
            ways.retain(|(_, tool)| !has_threads(tool));
        }
        fill(&mirrored.principal, rows, bench.plan.seed)?;
        let conditions = Conditions::new(self.rtt_ms, self.mbit_per_s);
        let outcomes = || -> Vec<Outcome> {
            ways.iter().map(|(name, _)| Outcome { name, runs: Vec::new() }).collect()
        };
        let (mut first, mut again) = (outcomes(), outcomes());
        for run in 0..bench.plan.runs {
            for at in bench.plan.turns(run, ways.len()) {
                let (name, tool) = &ways[at];
                let way = match tool {
                    Tool::BaseBackup(_) => Way::Native { wal_compression: "off", commit: "local" },
                    Tool::Farshore => {
                        Way::Mirror { compression: "zstd", mode: "async", wal_compression: "off" }
                    }
                };
                // The room of rows that were changed before is there to use: the table does not
                // grow from turn to turn.
                mirrored.principal.execute_script("VACUUM rows")?;
                mirrored.take(way, conditions)?;
                let folder = tempfile::Builder::new().prefix("farshore-seeded").tempdir()?;
                mirrored.principal.installation().hand_over(folder.path())?;
                let files = folder.path().join("data");
                for outcomes in [&mut first, &mut again] {
                    make_place(&mirrored, *tool, &files)?;
                    mirrored.set_line(Some(conditions));
                    let took = bring(&mut mirrored, *tool, &files)?;
                    mirrored.set_line(None);
                    mirrored.verify_backup(&files)?;
                    say(&format!(
                        "{SEED}/{}: {name}, run {}: {:.1} s",
                        self.name,
                        run + 1,
                        took.value("seconds")
                    ));
                    outcomes[at].runs.push(took);
                    mirrored.principal.execute_script(&format!(
                        "UPDATE rows SET v = reverse(v) WHERE id <= {}",
                        rows as i64 / CHANGED
                    ))?;
                    // A checkpoint removes log whether the standby has it or not.
                    mirrored.catch_up()?;
                    mirrored.principal.execute_script("CHECKPOINT")?;
                }
            }
        }
        let mut settings = mirrored.settings(conditions);
        settings.extend([
            ("rows", json!(rows)),
            ("small_tables", json!(SMALL_TABLES)),
            ("changed", json!(format!("1/{CHANGED}"))),
            ("ends", json!("pg_verifybackup, after each run")),
        ]);
        let line = |metric: &'static str, outcomes: &[Outcome]| {
            Ranking {
                scenario: SEED,
                case: self.name,
                metric: (metric, "seconds"),
                is_higher_better: false,
                ours: &["farshore"],
                theirs: &["native_plain", "native_lz4", "native_zstd", "native_zstd_threads"],
                also: &["wire_mb", "principal_cpu_s", "farshore_cpu_s", "taker_cpu_s"],
            }
            .line(outcomes, settings.clone())
        };
        Ok(vec![line("seed_s", &first), line("again_s", &again)])
    }
}

/// Text, and many small tables.
fn fill(principal: &Cluster, rows: usize, seed: u64) -> Result<()> {
    let mut text = Prose::new(seed);
    let mut client = principal.connect()?;
    let insert =
        "INSERT INTO rows SELECT $1 + at, v FROM unnest($2::text[]) WITH ORDINALITY t (v, at)";
    for begin in (0..rows).step_by(ROWS_AT_ONCE) {
        let some: Vec<String> =
            (begin..rows.min(begin + ROWS_AT_ONCE)).map(|_| text.take(ROW_BYTES)).collect();
        client.execute(insert, &[&(begin as i64), &some])?;
    }
    let mut small = String::new();
    for number in 0..SMALL_TABLES {
        write!(
            small,
            "CREATE TABLE small_{number} AS SELECT g AS id, md5(g::text) AS v \
             FROM generate_series({number}, {number} + 200) g; \
             CREATE UNIQUE INDEX ON small_{number} (id);"
        )?;
    }
    principal.execute_script(&small)?;
    // Hint bits are set, as where nothing was written lately.
    principal.execute_script("VACUUM (FREEZE, ANALYZE)")?;
    principal.execute_script("CHECKPOINT")
}

/// `pg_basebackup` begins anew each time, and wants an empty directory.
fn make_place(mirrored: &Mirrored<'_>, tool: Tool, files: &Path) -> Result<()> {
    if files.exists() {
        match tool {
            Tool::Farshore => return Ok(()),
            Tool::BaseBackup(_) => std::fs::remove_dir_all(files).context("remove files")?,
        }
    }
    std::fs::create_dir(files).context("make a directory for the files")?;
    mirrored.principal.installation().hand_over(files)
}

fn bring(mirrored: &mut Mirrored<'_>, tool: Tool, files: &Path) -> Result<crate::measurement::Run> {
    let before = children_cpu_seconds();
    let mut took = mirrored.measure_with(|mirrored| {
        match tool {
            Tool::BaseBackup(compress) => mirrored.base_backup(files, compress)?,
            Tool::Farshore => mirrored.seed(files)?,
        }
        Ok(BTreeMap::new())
    })?;
    took.values.insert("taker_cpu_s", children_cpu_seconds() - before);
    let wire_mb = took.value("wire_mb_per_s") * took.value("seconds");
    took.values.insert("wire_mb", wire_mb);
    Ok(took)
}

/// CPU seconds of all processes that were started from here and have ended.
fn children_cpu_seconds() -> f64 {
    let own = proc_fs::stat(std::process::id() as i32);
    own.map_or(0.0, |own| own.reaped_cpu.as_secs_f64())
}
