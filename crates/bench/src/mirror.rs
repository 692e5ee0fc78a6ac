//! Scenario `mirror`, the log-compression study: clients that write as fast as the line lets them,
//! each commit durable at its far end. PostgreSQL's own streaming, with every `wal_compression`
//! that the build has, and a mirror, compressed and not, take turns on the same two servers.

use crate::contest::Bench;
use crate::line::Conditions;
use crate::measurement::Measurement;
use crate::mirrored::{Mirrored, Outcome, Ranking, Way, join_all};
use crate::progress::say;
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
const EQUAL: &str = "SELECT count(*) || ' ' || coalesce(sum(hashtext(a::text)::int8), 0) || ' ' || \
    (SELECT count(*) || ' ' || coalesce(sum(hashtext(h::text)::int8), 0) FROM history h) \
    FROM accounts a";

/// A line: megabits per second, and milliseconds there and back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MirrorCase {
    name: &'static str,
    mbit_per_s: u64,
    rtt_ms: u64,
}

const fn case(name: &'static str, mbit_per_s: u64, rtt_ms: u64) -> MirrorCase {
    MirrorCase { name, mbit_per_s, rtt_ms }
}

/// Who takes turns, by the name in the output.
const NATIVE: [(&str, &str); 3] =
    [("native_off", "off"), ("native_lz4", "lz4"), ("native_zstd", "zstd")];
const OURS: [(&str, &str); 4] = [
    ("farshore", "zstd"),
    ("farshore_lz4", "lz4"),
    ("farshore_off", "off"),
    ("farshore_auto", "auto"),
];

impl MirrorCase {
    /// All cases, in the order they are run.
    pub const ALL: [MirrorCase; 8] = [
        case("10mbit-1ms", 10, 1),
        case("10mbit-20ms", 10, 20),
        case("50mbit-1ms", 50, 1),
        case("50mbit-20ms", 50, 20),
        case("100mbit-1ms", 100, 1),
        case("100mbit-20ms", 100, 20),
        case("1gbit-1ms", 1_000, 1),
        case("1gbit-20ms", 1_000, 20),
    ];

    /// The name on the command line and in the output.
    pub fn name(self) -> &'static str {
        self.name
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
        let ours = OURS
            .iter()
            .map(|(name, compression)| (*name, Way::Mirror { compression, mode: "far" }));
        let ways: Vec<(&'static str, Way)> = native.chain(ours).collect();
        let mut outcomes: Vec<Outcome> =
            ways.iter().map(|(name, _)| Outcome { name, runs: Vec::new() }).collect();
        for run in 0..bench.plan.runs {
            for (outcome, (name, way)) in outcomes.iter_mut().zip(&ways) {
                mirrored.principal.execute_script(&fill)?;
                mirrored.take(*way, conditions)?;
                let seed = bench.plan.seed + run as u64;
                let took = mirrored.measure(|principal| load(principal, rows, seconds, seed))?;
                mirrored.prove_equal(EQUAL)?;
                say(&format!(
                    "{MIRROR}/{}: {name}, run {}: {:.0} commits/s",
                    self.name,
                    run + 1,
                    took.value("commits_per_s")
                ));
                outcome.runs.push(took);
            }
        }
        let mut settings = mirrored.settings(conditions);
        settings.extend([
            ("clients", json!(CLIENTS)),
            ("rows", json!(rows)),
            ("load_s", json!(seconds)),
            ("mode", json!("far")),
            ("ends", json!("equal: every row's hash, after each run")),
        ]);
        let theirs: Vec<&'static str> = NATIVE.iter().map(|(name, _)| *name).collect();
        let ours: Vec<&'static str> = OURS.iter().map(|(name, _)| *name).collect();
        let ranking = Ranking {
            scenario: MIRROR,
            case: self.name,
            metric: ("commits_per_s", "commits_per_s"),
            is_higher_better: true,
            ours: &ours,
            theirs: &theirs,
            also: &["commit_ms", "log_mb_per_s", "wire_mb_per_s", "log_to_wire", "seconds"],
        };
        Ok(vec![ranking.line(&outcomes, settings)])
    }
}

/// Every client changes one account at random and notes it, again and again.
fn load(
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
