//! Every state that a reader sees on a subscriber is a prefix of the publisher's commits, never
//! going back, whoever is killed whenever. And the proof that this test would notice: with a
//! named defect switched on in the product, it fails.
//!
//! - `FARSHORE_KILLS`: how many crashes (default 30), in rounds of at most 50 on fresh servers;
//!   rounds differ in how changes are applied ([`APPLY`]), beginning where the seed says.
//! - `FARSHORE_SEED`: replays the choices of a run; each run prints its seed.
//! - `FARSHORE_KEEP`: keeps the directories of servers and site.

use anyhow::{Context, Result, ensure};
use farshore_testkit::chaos::{Actors, CrashPoint, Schedule, Trouble, Victim, subscription_state};
use farshore_testkit::postgres::{Cluster, Installation};
use farshore_testkit::prefix::{
    History, Oracle, SampleSeries, Samplers, State, Violation, Workload, WorkloadOptions, check,
    check_final, create_tables, read_state, table_names,
};
use farshore_testkit::process::{Farshore, FarshoreBuilder, fault_points, faults_binary};
use farshore_testkit::wait::{log_tail, wait_until};
use farshore_testkit::{checksum, seed};
use farshore_tests::Link;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

const DATABASE: &str = "postgres";
const SUBSCRIPTION: &str = "s";
const KILLS_PER_ROUND_MAX: usize = 50;
/// From the start of farshore to the end of the initial copy.
const STREAMING_TIMEOUT: Duration = Duration::from_secs(120);
/// In the end the subscriber must move at least this often until it has applied everything.
const PATIENCE: Duration = Duration::from_secs(20);

/// Each scenario keeps two servers busy; they take turns.
static TURN: Mutex<()> = Mutex::new(());

fn take_turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// How changes are applied, and by whom.
#[derive(Clone, Copy)]
struct Apply {
    /// The subscription's settings.
    settings: &'static str,
    /// The role on the target.
    role: &'static str,
    /// The target is far: [`FAR`] there, and as long back.
    is_far: bool,
}

/// Twice this is what a subscription takes for far.
const FAR: Duration = Duration::from_millis(3);

const fn near(settings: &'static str, role: &'static str) -> Apply {
    Apply { settings, role, is_far: false }
}

/// Round by round: change by change or in batches, one group after the other or several side by
/// side. Groups are small, so that there are many.
const APPLY: [Apply; 7] = [
    near("batches = \"auto\"\nstreams = 1", PLAIN_ROLE),
    near("batches = \"always\"\nstreams = 4\ngroup_transactions = 4", "postgres"),
    near("batches = \"auto\"\nstreams = 4\ngroup_transactions = 20", "postgres"),
    near("batches = \"always\"\nstreams = 4\ngroup_transactions = 4", PLAIN_ROLE),
    near("batches = \"always\"\nstreams = 1", "postgres"),
    near("batches = \"auto\"\nstreams = 1", "postgres"),
    Apply {
        settings: "batches = \"always\"\nstreams = 3\ngroup_transactions = 4",
        role: "postgres",
        is_far: true,
    },
];

/// One connection and several, batches for everything and for nothing.
const CORNERS: [Apply; 4] = [
    near("batches = \"never\"\nstreams = 1", "postgres"),
    near("batches = \"never\"\nstreams = 4\ngroup_transactions = 4", "postgres"),
    near("batches = \"always\"\nstreams = 1\ngroup_transactions = 4", "postgres"),
    near("batches = \"always\"\nstreams = 4\ngroup_transactions = 4", "postgres"),
];
/// Kills with each of these.
const CORNER_KILLS: usize = 7;

/// Foreign keys fire for what this role writes.
const PLAIN_ROLE: &str = "plain";
const ADMIT_PLAIN_ROLE: &str = "CREATE ROLE plain LOGIN; GRANT CREATE ON DATABASE postgres TO plain; \
    GRANT USAGE ON SCHEMA prefix TO plain; \
    GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON ALL TABLES IN SCHEMA prefix TO plain";

/// One round on fresh servers.
struct Plan {
    seed: u64,
    /// Crashes until the subscription streams.
    startup: Vec<CrashPoint>,
    /// Crashes from then on, with samplers watching.
    schedule: Schedule,
    /// How changes are applied.
    apply: Apply,
    /// The defect that is switched on in the product: what readers see is judged in between, so
    /// that a round ends once it shows.
    defect: Option<&'static str>,
    /// Commits that the publisher makes after the last crash, at least.
    calm_commits: u64,
}

struct Servers {
    // Farshore goes first when all are dropped: its directory must not vanish under it.
    farshore: Farshore,
    builder: FarshoreBuilder,
    publisher: Cluster,
    subscriber: Cluster,
    site_dir: tempfile::TempDir,
}

/// How long farshore may take from the state `streaming` to the crash points behind it.
const AFTERWARDS: Duration = Duration::from_secs(3);

/// From this number of kills on, every crash point must have been one of them.
const POINTS_NEED_KILLS: usize = 30;

/// What a round that held has seen.
struct Outcome {
    kills: usize,
    points_not_reached: Vec<String>,
}

fn cluster(major: u32) -> Result<Cluster> {
    Cluster::builder(&Installation::find(major)?)
        .setting("wal_level", "logical")
        // Transactions of some hundred rows are streamed before they commit.
        .setting("logical_decoding_work_mem", "64kB")
        .start()
}

fn write_site(
    dir: &Path,
    publisher: &Cluster,
    target: &str,
    Apply { settings, role, .. }: Apply,
) -> Result<std::path::PathBuf> {
    let target = target.replace("postgres@", &format!("{role}@"));
    let site = dir.join("site.toml");
    let text = format!(
        "[site]\nname = \"t1\"\ndata_dir = \"{}\"\n\n\
         [publication.p]\nsource = \"{}\"\ntables = [\"prefix.*\"]\n\
         segment_size = \"64KB\"\n\n\
         [subscription.{SUBSCRIPTION}]\npublication = \"p\"\ntarget = \"{}\"\n\
         copy_range = \"64KB\"\n{settings}\n",
        dir.join("data").display(),
        publisher.url(DATABASE),
        target,
    );
    std::fs::write(&site, text).context("write site.toml")?;
    Ok(site)
}

/// How often what readers have seen is judged where a defect is to show.
const JUDGE_EVERY: Duration = Duration::from_secs(5);
/// Publishers that cannot decode their own log, one after another, until that is an error.
const UNDECODABLE_MAX: u64 = 3;

/// Starts farshore with a crash point and waits until it crashes there or streams; in the second
/// case it is killed too. Returns whether it crashed there.
fn crash_on_the_way(builder: &FarshoreBuilder, point: &CrashPoint, target: &str) -> Result<bool> {
    let mut farshore = builder.clone().env("FARSHORE_CRASH", &point.to_string()).start()?;
    let mut streaming_since = None;
    let crashed = wait_until(
        "farshore to crash or stream",
        STREAMING_TIMEOUT,
        &[builder.log_path()],
        || {
            if let Some(status) = farshore.exit_status()? {
                if !farshore.was_killed_at(&point.name, status) {
                    let tail = farshore.log_tail();
                    return Err(
                        Trouble::Ended(format!("{status} instead of at {point}{tail}")).into()
                    );
                }
                return Ok(Some(true));
            }
            agents_still_work(builder.log_path())?;
            if streaming_since.is_none() && is_streaming(target)? {
                streaming_since = Some(Instant::now());
            }
            // The last points come right after the state that we see.
            Ok(streaming_since.is_some_and(|since| since.elapsed() > AFTERWARDS).then_some(false))
        },
    )?;
    if !crashed {
        farshore.kill9()?;
    }
    Ok(crashed)
}

fn is_streaming(target: &str) -> Result<bool> {
    Ok(subscription_state(target, SUBSCRIPTION)?.is_some_and(|row| row.state == "streaming"))
}

fn await_streaming(servers: &mut Servers) -> Result<()> {
    let target = servers.subscriber.url(DATABASE);
    let farshore = &mut servers.farshore;
    let log = farshore.log_path().to_owned();
    wait_until("the subscription to stream", STREAMING_TIMEOUT, &[&log], || {
        if let Some(status) = farshore.exit_status()? {
            return Err(Trouble::Ended(format!("{status}{}", farshore.log_tail())).into());
        }
        agents_still_work(&log)?;
        Ok(is_streaming(&target)?.then_some(()))
    })
}

/// Our locks and a TRUNCATE's, in another order; or a TRUNCATE that is not committed.
fn is_in_the_way(error: &anyhow::Error) -> bool {
    use postgres::error::SqlState;
    let code = error.downcast_ref::<postgres::Error>().and_then(postgres::Error::code);
    code.is_some_and(|code| {
        [SqlState::T_R_DEADLOCK_DETECTED, SqlState::LOCK_NOT_AVAILABLE].contains(code)
    })
}

/// An agent that stopped for good will not go on: no need to wait for it.
fn agents_still_work(log: &Path) -> Result<()> {
    let text = std::fs::read_to_string(log).context("read farshore's log")?;
    match text.lines().find(|line| line.contains(" ERROR stopped:")) {
        Some(line) => Err(Trouble::Ended(format!("an agent: {line}")).into()),
        None => Ok(()),
    }
}

/// Waits until the subscriber is in the publisher's last state, whose last commit ends at `end`;
/// gives up when it has applied that and is in another, and when it stands still before.
fn final_state(servers: &mut Servers, history: &History, end: u64) -> Result<State> {
    let target = servers.subscriber.url(DATABASE);
    let log = servers.builder.log_path().to_owned();
    let mut client = servers.subscriber.connect()?;
    let farshore = &mut servers.farshore;
    let mut moved = (None, Instant::now());
    wait_until("the subscriber to be equal", Duration::from_secs(600), &[&log], || {
        // Asked first: the state that is read next has at least that.
        let applied = subscription_state(&target, SUBSCRIPTION)?.map_or(0, |row| row.applied_lsn);
        let state = match read_state(&mut client) {
            Ok(state) => Some(state),
            Err(error) if is_in_the_way(&error) => {
                client.batch_execute("ROLLBACK")?;
                None
            }
            Err(error) => return Err(error),
        };
        if let Some(state) = &state
            && (state.hash() == history.final_hash() || applied >= end)
        {
            check_final(history, state).map_err(|violation| anyhow::Error::new(*violation))?;
            return Ok(Some(state.clone()));
        }
        let now = state.as_ref().map(State::hash);
        if now.is_some() && moved.0 != now {
            moved = (now, Instant::now());
        }
        if let Some(status) = farshore.exit_status()? {
            return Err(Trouble::Ended(format!("{status}{}", farshore.log_tail())).into());
        }
        agents_still_work(&log)?;
        if moved.1.elapsed() > PATIENCE {
            let how = match state.map(|state| check_final(history, &state)) {
                Some(Err(violation)) => format!("{violation}"),
                _ => "a table is locked".to_owned(),
            };
            return Err(
                Trouble::NoProgress(format!("applied up to {applied} of {end}: {how}")).into()
            );
        }
        Ok(None)
    })
}

/// Runs a plan. An error that holds a [`Violation`] or [`Trouble`] is the product's fault. A
/// publisher that cannot decode its own log, as PostgreSQL may where tables are truncated while a slot
/// is made, carries nothing and proves nothing: another one takes its place.
fn run(plan: &Plan) -> Result<Outcome> {
    for other in 0..UNDECODABLE_MAX {
        // Of the same versions.
        let seed = plan.seed.wrapping_add(other << 32);
        match run_with(plan, seed) {
            Err(error) if is_undecodable(&error) => {
                println!("the publisher could not decode its own log (seed {seed}): another one");
            }
            other => return other,
        }
    }
    anyhow::bail!("PostgreSQL could not decode its log {UNDECODABLE_MAX} times")
}

fn is_undecodable(error: &anyhow::Error) -> bool {
    let Some(Trouble::Ended(how)) = error.downcast_ref() else { return false };
    how.contains("cannot decode its own log") && !error.is::<Violation>()
}

/// Of the publisher and the subscriber.
fn majors(seed: u64) -> (u32, u32) {
    if seed.is_multiple_of(2) { (15, 18) } else { (18, 15) }
}

fn run_with(plan: &Plan, seed: u64) -> Result<Outcome> {
    let binary = faults_binary()?;
    let (publisher_major, subscriber_major) = majors(seed);
    println!(
        "FARSHORE_SEED={seed}: publisher {publisher_major}, subscriber {subscriber_major}, {} kills{}",
        plan.startup.len() + plan.schedule.kills.len(),
        plan.defect.map(|defect| format!(", defect {defect}")).unwrap_or_default()
    );
    let publisher = cluster(publisher_major)?;
    let subscriber = cluster(subscriber_major)?;
    create_tables(&mut publisher.connect()?)?;
    create_tables(&mut subscriber.connect()?)?;
    subscriber.execute_script(ADMIT_PLAIN_ROLE)?;
    let oracle = Oracle::create(&mut publisher.connect()?)?;
    Workload::fill(&mut publisher.connect()?)?;
    let options = WorkloadOptions::new(seed);
    let workload = Workload::start(&publisher.url(DATABASE), &options);
    // The initial copy finds rows of all kinds, and meets transactions under way.
    wait_until("the first transactions", STREAMING_TIMEOUT, &[&publisher.log_path()], || {
        workload.ensure_running()?;
        Ok((workload.summary().committed >= 300).then_some(()))
    })?;

    let mut site_dir = tempfile::Builder::new().prefix("farshore-site").tempdir()?;
    site_dir.disable_cleanup(std::env::var_os("FARSHORE_KEEP").is_some());
    let line = plan.apply.is_far.then(|| Link::far(subscriber.port(), FAR)).transpose()?;
    let mut target = subscriber.url(DATABASE);
    if let Some(line) = &line {
        let port = |port: u16| format!(":{port}/");
        target = target.replace(&port(subscriber.port()), &port(line.port()));
    }
    let site = write_site(site_dir.path(), &publisher, &target, plan.apply)?;
    let mut builder = Farshore::builder(&binary, &site);
    if let Some(defect) = plan.defect {
        builder = builder.env("FARSHORE_DEFECT", defect);
    }
    let mut outcome = Outcome { kills: 0, points_not_reached: Vec::new() };
    for point in &plan.startup {
        println!("on the way to streaming: farshore at {point}");
        let crashed = crash_on_the_way(&builder, point, &subscriber.url(DATABASE))?;
        if crashed {
            outcome.kills += 1;
        } else {
            outcome.points_not_reached.push(point.name.clone());
        }
    }
    let farshore = builder.start()?;
    let mut servers = Servers { farshore, builder, publisher, subscriber, site_dir };
    let result = watch(plan, &mut servers, workload, &oracle, &mut outcome);
    result.with_context(|| {
        format!(
            "FARSHORE_SEED={seed}, site {}{}",
            servers.site_dir.path().display(),
            log_tail(servers.builder.log_path(), 25)
        )
    })?;
    Ok(outcome)
}

/// From streaming to the verdict.
fn watch(
    plan: &Plan,
    servers: &mut Servers,
    workload: Workload,
    oracle: &Oracle,
    outcome: &mut Outcome,
) -> Result<()> {
    await_streaming(servers)?;
    let target = servers.subscriber.url(DATABASE);
    let samplers = Samplers::start(&target, 2, Duration::from_millis(15));
    let log = servers.builder.log_path().to_owned();
    let source = servers.publisher.url(DATABASE);
    let (mut looked_at, mut judged_at) = (Instant::now(), Instant::now());
    let mut look = || {
        if looked_at.elapsed() > Duration::from_millis(250) {
            looked_at = Instant::now();
            agents_still_work(&log)?;
        }
        if plan.defect.is_some() && judged_at.elapsed() > JUDGE_EVERY {
            judge_so_far(&source, oracle, &samplers)?;
            judged_at = Instant::now();
        }
        anyhow::Ok(())
    };
    let mut progress = || {
        look()?;
        Ok(subscription_state(&target, SUBSCRIPTION)?.map(|row| row.applied_lsn))
    };
    let mut actors = Actors {
        publisher: &mut servers.publisher,
        subscriber: &mut servers.subscriber,
        builder: &servers.builder,
        farshore: &mut servers.farshore,
        progress: &mut progress,
    };
    let chaos = actors.execute(&plan.schedule, &mut |line| println!("{line}"));
    let chaos = chaos.and_then(|summary| {
        let goal = workload.summary().committed + plan.calm_commits;
        let mut looked_at = Instant::now();
        wait_until("the workload", STREAMING_TIMEOUT, &[&actors.publisher.log_path()], || {
            workload.ensure_running()?;
            if looked_at.elapsed() > Duration::from_millis(250) {
                looked_at = Instant::now();
                (actors.progress)()?;
            }
            Ok((workload.summary().committed >= goal).then_some(()))
        })?;
        Ok(summary)
    });
    match chaos {
        Ok(summary) => {
            outcome.kills += summary.kills;
            outcome.points_not_reached.extend(summary.points_not_reached);
        }
        // Stuck or ended: what the readers saw until then may tell why.
        Err(trouble) if trouble.is::<Trouble>() => {
            return Err(with_what_was_seen(trouble, servers, workload, oracle, samplers));
        }
        Err(error) => {
            // Readers may wait for what it has locked.
            servers.farshore.kill9()?;
            return Err(error);
        }
    }

    let written = workload.stop()?;
    let mut publisher = servers.publisher.connect()?;
    let history = oracle.history(&mut publisher)?;
    println!("workload: {written}; {} commits by the oracle", history.steps().len());
    let ended = final_state(servers, &history, oracle.end(&mut publisher)?);
    if ended.is_err() {
        // Readers may wait for what it has locked.
        servers.farshore.kill9()?;
    }
    // What samples show is more telling than the end alone.
    judge(&history, &samplers.stop()?)?;
    ended?;
    checksum::assert_equal(&source, &target, &table_names())?;
    let stopped = servers.farshore.sigterm(Duration::from_secs(20))?;
    if !stopped.status.success() {
        let how = format!("{} on SIGTERM{}", stopped.status, servers.farshore.log_tail());
        return Err(Trouble::Ended(how).into());
    }
    Ok(())
}

/// The trouble, or the violation that readers saw before it.
fn with_what_was_seen(
    trouble: anyhow::Error,
    servers: &mut Servers,
    workload: Workload,
    oracle: &Oracle,
    samplers: Samplers,
) -> anyhow::Error {
    let seen = || {
        // Before the readers are waited for: they may wait for what it has locked.
        servers.farshore.kill9()?;
        workload.stop()?;
        let samples = samplers.stop()?;
        judge(&oracle.history(&mut servers.publisher.connect()?)?, &samples)
    };
    match seen() {
        Ok(()) => trouble.context("what readers saw until then was right"),
        Err(violation) if violation.is::<Violation>() => violation.context(format!("{trouble:#}")),
        Err(error) => trouble.context(format!("{error:#}")),
    }
}

/// Whether what readers have seen so far is right. A publisher that does not answer says nothing.
fn judge_so_far(source: &str, oracle: &Oracle, samplers: &Samplers) -> Result<()> {
    // Taken first: what was seen by now was committed by now.
    let samples = samplers.so_far();
    let Ok(mut publisher) = postgres::Client::connect(source, postgres::NoTls) else {
        return Ok(());
    };
    let history = oracle.history_so_far(&mut publisher)?;
    check(&history, &samples).map_err(|violation| anyhow::Error::new(*violation)).map(drop)
}

fn judge(history: &History, samples: &SampleSeries) -> Result<()> {
    let summary = check(history, samples).map_err(|violation| anyhow::Error::new(*violation))?;
    println!("{summary}");
    ensure!(!samples.is_empty(), "no reader ever saw the subscriber");
    Ok(())
}

fn kills_from_environment() -> Result<usize> {
    match std::env::var("FARSHORE_KILLS") {
        Ok(text) => text.parse().with_context(|| format!("FARSHORE_KILLS={text} is no number")),
        Err(_) => Ok(30),
    }
}

fn startup_point(seed: u64, index: usize, name: &str) -> CrashPoint {
    let mixed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(index as u64) >> 33;
    CrashPoint { name: name.to_owned(), nth: 1, cut: mixed.is_multiple_of(2) }
}

#[test]
fn every_sampled_state_is_a_prefix_under_kills() -> Result<()> {
    let _turn = take_turn();
    let first_seed = seed();
    let kills = kills_from_environment()?;
    let mut points = fault_points(&faults_binary()?)?;
    // Those of a site that receives are passed by the scenario `pull`, a mirror's by `mirror`.
    let elsewhere = ["receive.", "spool.", "mirror.", "promote.", "seed.", "backup."];
    points.retain(|point| !elsewhere.iter().any(|beginning| point.starts_with(beginning)));
    let (startup, streaming): (Vec<String>, Vec<String>) =
        points.into_iter().partition(|name| CrashPoint::is_before_streaming(name));
    let rounds = kills.div_ceil(KILLS_PER_ROUND_MAX).max(2);
    let mut never_reached: Option<BTreeSet<String>> = None;
    let mut killed = 0;
    for round in 0..rounds {
        let seed = first_seed + round as u64;
        let in_this_round = kills / rounds + usize::from(round < kills % rounds);
        let startup: Vec<CrashPoint> = startup
            .iter()
            .enumerate()
            .take(in_this_round)
            .map(|(index, name)| startup_point(seed, index, name))
            .collect();
        let schedule = Schedule::draw(seed, in_this_round - startup.len(), &streaming);
        // Short runs too come by all of them, in time.
        let apply = APPLY[(first_seed as usize).wrapping_add(round) % APPLY.len()];
        let plan = Plan { seed, startup, schedule, apply, defect: None, calm_commits: 100 };
        let outcome = run(&plan).with_context(|| format!("round {} of {rounds}", round + 1))?;
        killed += outcome.kills;
        let missed: BTreeSet<String> = outcome.points_not_reached.into_iter().collect();
        never_reached = Some(match never_reached {
            Some(before) => before.intersection(&missed).cloned().collect(),
            None => missed,
        });
    }
    let mut never_reached = never_reached.unwrap_or_default();
    if !never_reached.is_empty() && kills >= POINTS_NEED_KILLS {
        let outcome = once_more(first_seed + rounds as u64, APPLY[0], &never_reached)?;
        killed += outcome.kills;
        never_reached = outcome.points_not_reached.into_iter().collect();
    }
    println!("{killed} kills; crash points not reached: {never_reached:?}");
    ensure!(
        never_reached.is_empty() || kills < POINTS_NEED_KILLS,
        "no kill happened at {never_reached:?} (FARSHORE_SEED={first_seed})"
    );
    Ok(())
}

/// For points whose late passage did not come in time: once more, each at its first.
fn once_more(seed: u64, apply: Apply, points: &BTreeSet<String>) -> Result<Outcome> {
    println!("once more, for {points:?}");
    let first = |name: &String| CrashPoint { name: name.clone(), nth: 1, cut: false };
    let (startup, after): (Vec<_>, Vec<_>) =
        points.iter().map(first).partition(|p| CrashPoint::is_before_streaming(&p.name));
    let victims = after.into_iter().map(Victim::FarshoreAt).collect();
    let schedule = Schedule::of_victims(seed, victims);
    let plan = Plan { seed, startup, schedule, apply, defect: None, calm_commits: 100 };
    run(&plan).context("the round for points not reached")
}

#[test]
fn every_way_of_applying_keeps_the_prefix_under_kills() -> Result<()> {
    let _turn = take_turn();
    let first_seed = seed();
    let mut points = fault_points(&faults_binary()?)?;
    points.retain(|point| point.starts_with("apply."));
    for (number, apply) in (0..).zip(CORNERS) {
        let seed = first_seed.wrapping_add(number);
        let schedule = Schedule::draw(seed, CORNER_KILLS, &points);
        let startup = Vec::new();
        let plan = Plan { seed, startup, schedule, apply, defect: None, calm_commits: 100 };
        let context = || format!("{} (seed {seed})", apply.settings);
        let mut outcome = run(&plan).with_context(context)?;
        let missed: BTreeSet<String> = outcome.points_not_reached.into_iter().collect();
        outcome.points_not_reached = Vec::new();
        if !missed.is_empty() {
            let again = once_more(seed.wrapping_add(4), apply, &missed).with_context(context)?;
            outcome.kills += again.kills;
            outcome.points_not_reached = again.points_not_reached;
        }
        // Every group that is applied passes all of them.
        let missed = outcome.points_not_reached;
        ensure!(missed.is_empty(), "no kill happened at {missed:?}, {}", context());
        println!("{} kills with {}", outcome.kills, apply.settings.replace('\n', ", "));
    }
    Ok(())
}

/// Farshore at each of these points in turn, several times over, at various passages.
fn at_points(names: &[&str], times: u32, cut: bool) -> Vec<Victim> {
    let passage = |round: u32| 1 + round * 3;
    (0..times)
        .flat_map(|round| names.iter().map(move |name| (round, *name)))
        .map(|(round, name)| CrashPoint { name: name.to_owned(), nth: passage(round), cut })
        .map(Victim::FarshoreAt)
        .collect()
}

/// The same scenario with a defect in the product must fail, by the product's fault.
fn assert_caught(defect: &'static str, victims: Vec<Victim>) -> Result<()> {
    assert_caught_with(APPLY[5], defect, victims)
}

/// As [`assert_caught`], with the subscription's setting.
fn assert_caught_with(apply: Apply, defect: &'static str, victims: Vec<Victim>) -> Result<()> {
    assert_caught_within(1, apply, defect, &victims)
}

/// Rounds that end in trouble which is not the defect's, until that is an error.
const UNEXPLAINED_MAX: u32 = 2;

/// What an agent may stop with by a defect, where no reader saw it before.
fn stops_with(defect: &str) -> &'static [&'static str] {
    match defect {
        // Slot or target are ahead of a store that lost what it had called durable.
        "acknowledge-before-fsync" => {
            &["but the store holds the log only up to", "but the store held only up to"]
        }
        // NULL is a value like any other; where a column takes none, the changes are applied one by
        // one, and the value is not lost.
        "lost-unchanged-value" => &[],
        // A row is there already, or is not there.
        _ => &["cannot apply "],
    }
}

/// Whether this is what the defect does: neither a slow machine nor a server's own bug counts.
fn shows(defect: &str, error: &anyhow::Error) -> bool {
    let is_told = |how: &str| stops_with(defect).iter().any(|text| how.contains(text));
    error.is::<Violation>()
        || matches!(error.downcast_ref(), Some(Trouble::Ended(how)) if is_told(how))
}

/// As [`assert_caught_with`], in one of so many rounds.
fn assert_caught_within(
    rounds: u32,
    apply: Apply,
    defect: &'static str,
    victims: &[Victim],
) -> Result<()> {
    let _turn = take_turn();
    let first_seed = seed();
    let (mut missed, mut unexplained) = (0, 0);
    for seed in first_seed.. {
        let schedule = Schedule::of_victims(seed, victims.to_vec());
        let (startup, defect_on) = (Vec::new(), Some(defect));
        let plan = Plan { seed, startup, schedule, apply, defect: defect_on, calm_commits: 1_000 };
        match run(&plan) {
            Err(error) if shows(defect, &error) => {
                println!("defect {defect} was noticed: {error:?}");
                return Ok(());
            }
            Err(error) if error.is::<Trouble>() => {
                println!("trouble that is not of defect {defect}: {error:?}");
                unexplained += 1;
                ensure!(unexplained < UNEXPLAINED_MAX, "not of defect {defect}: {error:?}");
            }
            Err(error) => anyhow::bail!("the test itself failed with defect {defect}: {error:?}"),
            Ok(outcome) => {
                missed += 1;
                ensure!(
                    missed < rounds,
                    "defect {defect} was not noticed in {rounds} rounds (FARSHORE_SEED={first_seed}; \
                     not reached: {:?})",
                    outcome.points_not_reached
                );
                println!("defect {defect} did not show in this round");
            }
        }
    }
    Ok(())
}

#[test]
fn mutant_acknowledge_before_fsync() -> Result<()> {
    assert_caught("acknowledge-before-fsync", at_points(&["store.before-fsync"], 8, true))
}

#[test]
fn mutant_progress_in_separate_transaction() -> Result<()> {
    let points = ["apply.after-commit", "apply.after-commit-sent", "apply.before-commit"];
    let mut victims = at_points(&points, 3, false);
    victims.extend([Victim::Farshore, Victim::Subscriber, Victim::Farshore]);
    assert_caught("progress-in-separate-transaction", victims)
}

#[test]
fn mutant_dropped_change() -> Result<()> {
    assert_caught("dropped-change", Vec::new())
}

#[test]
fn mutant_doubled_batch_after_reconnect() -> Result<()> {
    let once = [Victim::Subscriber, Victim::Publisher, Victim::Farshore];
    assert_caught("doubled-batch-after-reconnect", [once.clone(), once].concat())
}

#[test]
fn mutant_swapped_transactions() -> Result<()> {
    assert_caught("swapped-transactions", vec![Victim::Farshore])
}

#[test]
fn mutant_snapshot_row_also_streamed() -> Result<()> {
    assert_caught("snapshot-row-also-streamed", Vec::new())
}

#[test]
fn mutant_dropped_change_in_batches() -> Result<()> {
    assert_caught_with(APPLY[1], "dropped-change", Vec::new())
}

#[test]
fn mutant_unordered_commits() -> Result<()> {
    // After each restart there is a backlog, and with it groups side by side. Whether two of them
    // end in the wrong order is up to the target, and a busy machine may put it off.
    assert_caught_within(3, APPLY[1], "unordered-commits", &vec![Victim::Farshore; 4])
}

#[test]
fn mutant_lost_unchanged_value() -> Result<()> {
    // A value is lost where a row is changed twice within a group, as within one transaction.
    assert_caught_with(APPLY[4], "lost-unchanged-value", vec![Victim::Farshore, Victim::Subscriber])
}
