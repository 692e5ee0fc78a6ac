//! Scenario `mirror`, the log-compression study: clients that write as fast as the line lets them,
//! each commit durable at its far end. PostgreSQL's own streaming, with every `wal_compression`
//! that the build has, and a mirror, compressed and not, take turns on the same two servers. Two
//! cases have a set rate of log, and are about what that costs, with commits that wait and with
//! commits that do not.

use crate::contest::Bench;
use crate::line::Conditions;
use crate::measurement::Measurement;
use crate::mirrored::{Mirrored, Outcome, Ranking, Way, join_all};
use crate::progress::say;
use crate::text::Prose;
use anyhow::Result;
use farshore_testkit::postgres::Cluster;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::json;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The scenario's name.
pub const MIRROR: &str = "mirror";
/// Clients, as in the study.
const CLIENTS: u64 = 20;
/// Rows of the table that is written to: far more pages than are touched, so that most commits log
/// a whole page, as after any checkpoint.
const ROWS: f64 = 1_000_000.0;
/// At least so many.
const ROWS_MIN: f64 = 50_000.0;
/// Seconds of load that count.
const SECONDS: f64 = 30.0;
/// At least so many.
const SECONDS_MIN: f64 = 2.0;
/// Bytes of log per second, where there is a set rate.
const STEADY_LOG_PER_S: f64 = 12e6;
/// Clients that write it, and rows of 1 KB in each transaction.
const STEADY_CLIENTS: u64 = 4;
const STEADY_ROWS: i32 = 55;
const STEADY_ROW_BYTES: usize = 1_000;
/// What a row takes in the log beside its text.
const STEADY_ROW_BESIDE: f64 = 90.0;
const EQUAL: &str = "SELECT count(*) || ' ' || coalesce(sum(hashtext(a::text)::int8), 0) || ' ' || \
    (SELECT count(*) || ' ' || coalesce(sum(hashtext(h::text)::int8), 0) FROM history h) \
    FROM accounts a";

/// A line: megabits per second, and milliseconds there and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MirrorCase {
    name: &'static str,
    mbit_per_s: u64,
    rtt_ms: u64,
    load: Load,
}

/// What the clients do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Load {
    /// As many small transactions as the line allows.
    Full,
    /// Log at a set rate.
    Steady,
    /// The same, and no commit waits.
    SteadyAsync,
}

const fn case(name: &'static str, mbit_per_s: u64, rtt_ms: u64) -> MirrorCase {
    MirrorCase { name, mbit_per_s, rtt_ms, load: Load::Full }
}

const fn steady_case(name: &'static str, load: Load) -> MirrorCase {
    MirrorCase { name, mbit_per_s: 1_000, rtt_ms: 1, load }
}

/// Who takes turns, by the name in the output.
const NATIVE: [(&str, &str); 3] =
    [("native_off", "off"), ("native_lz4", "lz4"), ("native_zstd", "zstd")];
const OURS: [(&str, Way); 7] = [
    ("farshore", by_link("zstd", "off")),
    ("farshore_lz4", by_link("lz4", "off")),
    ("farshore_off", by_link("off", "off")),
    ("farshore_auto", by_link("auto", "off")),
    ("farshore_direct", Way::Direct { mode: "far", wal_compression: "off" }),
    // What PostgreSQL's best way has, a mirror may have as well.
    ("farshore_wal_zstd", by_link("zstd", "zstd")),
    ("farshore_direct_wal_zstd", Way::Direct { mode: "far", wal_compression: "zstd" }),
];

const fn by_link(compression: &'static str, wal_compression: &'static str) -> Way {
    Way::Mirror { compression, mode: "far", wal_compression }
}

impl MirrorCase {
    /// All cases, in the order they are run.
    pub const ALL: [MirrorCase; 10] = [
        case("10mbit-1ms", 10, 1),
        case("10mbit-20ms", 10, 20),
        case("50mbit-1ms", 50, 1),
        case("50mbit-20ms", 50, 20),
        case("100mbit-1ms", 100, 1),
        case("100mbit-20ms", 100, 20),
        case("1gbit-1ms", 1_000, 1),
        case("1gbit-20ms", 1_000, 20),
        steady_case("steady-12mb", Load::Steady),
        steady_case("steady-12mb-async", Load::SteadyAsync),
    ];

    /// The name on the command line and in the output.
    pub fn name(self) -> &'static str {
        self.name
    }

    fn clients(self) -> u64 {
        match self.load {
            Load::Full => CLIENTS,
            Load::Steady | Load::SteadyAsync => STEADY_CLIENTS,
        }
    }

    /// So that commits wait, or do not.
    fn waiting(self, way: Way) -> Way {
        let waits = self.load != Load::SteadyAsync;
        let mode = if waits { "far" } else { "async" };
        match way {
            Way::Native { wal_compression, .. } => {
                Way::Native { wal_compression, commit: if waits { "on" } else { "local" } }
            }
            Way::Mirror { compression, wal_compression, .. } => {
                Way::Mirror { compression, mode, wal_compression }
            }
            Way::Direct { wal_compression, .. } => Way::Direct { mode, wal_compression },
        }
    }

    /// Measures the case.
    ///
    /// # Errors
    /// When there can be no line here, something fails, or the standby is not equal in the end.
    pub fn measure(self, bench: Bench<'_>) -> Result<Vec<Measurement>> {
        let rows = (ROWS * bench.plan.scale).max(ROWS_MIN).round() as i32;
        let seconds = (SECONDS * bench.plan.scale).max(SECONDS_MIN);
        let schema = "CREATE TABLE accounts (aid int PRIMARY KEY, balance int, filler text); \
             CREATE TABLE history (aid int, delta int, at timestamptz DEFAULT now(), filler text)";
        // Anew for everybody: rows that were changed before would lie together on few pages.
        let fill = format!(
            "TRUNCATE accounts, history; \
             INSERT INTO accounts SELECT g, 0, md5(g::text) || md5((-g)::text) \
             FROM generate_series(1, {rows}) g"
        );
        say("starting a principal and a standby at the ends of a line");
        let mut mirrored = Mirrored::start(bench, schema)?;
        let conditions = Conditions::new(self.rtt_ms, self.mbit_per_s);
        let there = mirrored.wal_compressions()?;
        let native = NATIVE.iter().filter(|(_, method)| there.contains(method));
        let native = native
            .map(|(name, wal_compression)| (*name, Way::Native { wal_compression, commit: "on" }));
        let has = |way: &Way| match way {
            Way::Native { wal_compression, .. }
            | Way::Mirror { wal_compression, .. }
            | Way::Direct { wal_compression, .. } => there.contains(wal_compression),
        };
        let ours = OURS.into_iter().filter(|(_, way)| has(way));
        let ways: Vec<(&'static str, Way)> = native.chain(ours).collect();
        let ways = bench.plan.chosen(&ways)?;
        let mut outcomes: Vec<Outcome> =
            ways.iter().map(|(name, _)| Outcome { name, runs: Vec::new() }).collect();
        for run in 0..bench.plan.runs {
            for at in bench.plan.turns(run, ways.len()) {
                let (name, way) = &ways[at];
                mirrored.principal.execute_script(&fill)?;
                mirrored.take(self.waiting(*way), conditions)?;
                let seed = bench.plan.seed + run as u64;
                let mut took = mirrored.measure(|principal| match self.load {
                    Load::Full => full(principal, rows, seconds, seed),
                    Load::Steady | Load::SteadyAsync => steady(principal, seconds, seed),
                })?;
                let costs: f64 = ["principal_cpu_s", "standby_cpu_s", "farshore_cpu_s"]
                    .map(|who| took.value(who))
                    .iter()
                    .sum();
                let share = took.value("farshore_cpu_s") / took.value("principal_cpu_s");
                took.values.insert("all_cpu_s", costs);
                took.values.insert("ends_cpu_percent", 100.0 * share);
                mirrored.prove_equal(EQUAL)?;
                say(&format!(
                    "{MIRROR}/{}: {name}, run {}: {:.0} commits/s",
                    self.name,
                    run + 1,
                    took.value("commits_per_s")
                ));
                outcomes[at].runs.push(took);
            }
        }
        let mut settings = mirrored.settings(conditions);
        settings.extend([
            ("clients", json!(self.clients())),
            ("rows", json!(rows)),
            ("load_s", json!(seconds)),
            ("mode", json!(if self.load == Load::SteadyAsync { "async" } else { "far" })),
            ("ends", json!("equal: every row's hash, after each run")),
        ]);
        let theirs: Vec<&'static str> = NATIVE.iter().map(|(name, _)| *name).collect();
        let ours: Vec<&'static str> = OURS.iter().map(|(name, _)| *name).collect();
        let ranking = Ranking {
            scenario: MIRROR,
            case: self.name,
            metric: match self.load {
                Load::Full => ("commits_per_s", "commits_per_s"),
                Load::Steady | Load::SteadyAsync => ("all_cpu_s", "all_cpu_s"),
            },
            is_higher_better: self.load == Load::Full,
            ours: &ours,
            theirs: &theirs,
            also: &[
                "commit_ms",
                "log_mb_per_s",
                "wire_mb_per_s",
                "log_to_wire",
                "seconds",
                "principal_cpu_s",
                "standby_cpu_s",
                "farshore_cpu_s",
                "ends_cpu_percent",
            ],
        };
        Ok(vec![ranking.line(&outcomes, settings)])
    }
}

/// Rows of text, so many that there is a set rate of log.
fn steady(principal: &Cluster, seconds: f64, seed: u64) -> Result<BTreeMap<&'static str, f64>> {
    let each = f64::from(STEADY_ROWS) * (STEADY_ROW_BYTES as f64 + STEADY_ROW_BESIDE);
    let every = Duration::from_secs_f64(each * STEADY_CLIENTS as f64 / STEADY_LOG_PER_S);
    let begun = Instant::now();
    let end = begun + Duration::from_secs_f64(seconds);
    let mut threads = Vec::new();
    for number in 0..STEADY_CLIENTS {
        let mut client = principal.connect()?;
        let insert = client.prepare("INSERT INTO history (aid, filler) VALUES ($1, $2)")?;
        threads.push(std::thread::spawn(move || -> Result<(u64, Duration)> {
            let mut text = Prose::new(seed ^ (number << 32));
            let (mut commits, mut next) = (0, Instant::now());
            let mut committing = Duration::ZERO;
            while next < end {
                std::thread::sleep(next.saturating_duration_since(Instant::now()));
                let mut transaction = client.transaction()?;
                for aid in 0..STEADY_ROWS {
                    transaction.execute(&insert, &[&aid, &text.take(STEADY_ROW_BYTES)])?;
                }
                let asked = Instant::now();
                transaction.commit()?;
                committing += asked.elapsed();
                commits += 1;
                next += every;
            }
            Ok((commits, committing))
        }));
    }
    let done = join_all(threads)?;
    let commits: u64 = done.iter().map(|(commits, _)| commits).sum();
    let committing: Duration = done.iter().map(|(_, committing)| committing).sum();
    let commit_ms = 1_000.0 * committing.as_secs_f64() / commits.max(1) as f64;
    let per_s = commits as f64 / begun.elapsed().as_secs_f64();
    Ok(BTreeMap::from([("commits_per_s", per_s), ("commit_ms", commit_ms)]))
}

/// Every client changes one account at random and notes it, again and again.
fn full(
    principal: &Cluster,
    rows: i32,
    seconds: f64,
    seed: u64,
) -> Result<BTreeMap<&'static str, f64>> {
    let mut clients = Vec::new();
    for number in 0..CLIENTS {
        let mut client = principal.connect()?;
        clients.push((
            client.prepare(
                "WITH a AS (UPDATE accounts SET balance = balance + $2 WHERE aid = $1) \
             INSERT INTO history (aid, delta, filler) VALUES ($1, $2, 'history')",
            )?,
            client,
            StdRng::seed_from_u64(seed ^ (number << 32)),
        ));
    }
    let begun = Instant::now();
    let end = begun + Duration::from_secs_f64(seconds);
    let threads = clients.into_iter().map(|(statement, mut client, mut random)| {
        std::thread::spawn(move || -> Result<u64> {
            let mut commits = 0;
            while Instant::now() < end {
                let (aid, delta) = (random.random_range(1..=rows), random.random_range(-99..=99));
                client.execute(&statement, &[&aid, &delta])?;
                commits += 1;
            }
            Ok(commits)
        })
    });
    let commits: u64 = join_all(threads.collect())?.into_iter().sum();
    let took = begun.elapsed().as_secs_f64();
    let commit_ms = took * 1_000.0 * CLIENTS as f64 / commits.max(1) as f64;
    Ok(BTreeMap::from([("commits_per_s", commits as f64 / took), ("commit_ms", commit_ms)]))
}
