//! What the log of a server is not measured on, and what is left there afterwards: nothing.

use farshore_commission::log::{LogOptions, Script, measure};
use farshore_commission::report::{At, Report};
use farshore_commission::{Error, Stop};
use farshore_testkit::postgres::{Cluster, Installation};
use farshore_testkit::wait::wait_until;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

fn cluster(major: u32, settings: &[(&str, &str)]) -> Cluster {
    let mut builder = Cluster::builder(&Installation::find(major).unwrap());
    for (name, value) in settings {
        builder = builder.setting(name, value);
    }
    builder.start().unwrap()
}

/// A quick look: 2,000 rows of 1,000 characters.
fn quick(url: &str) -> LogOptions {
    LogOptions {
        rows: 2_000,
        row_size: 1_000,
        transaction_rows: vec![1, 100, 2_000],
        clients: vec![1, 4],
        repeats: 1,
        ..LogOptions::new(LogOptions::server(url).unwrap())
    }
}

fn run(
    options: &LogOptions,
    stop: &Stop,
    say: impl Fn(&str) + Send + Sync,
) -> Result<Report, Error> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(measure(options, stop, &say))
}

fn refusal(options: &LogOptions) -> String {
    let (_handle, stop) = Stop::new();
    let error = run(options, &stop, |_| {}).unwrap_err();
    assert!(matches!(error, Error::Refused(_)), "{error}");
    error.to_string()
}

/// Schemas that were left behind, and sessions that still run.
fn left(cluster: &Cluster) -> (i64, i64) {
    let sql = "SELECT (SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'farshore%'), \
               (SELECT count(*) FROM pg_stat_activity WHERE application_name = 'farshore commission' \
                AND state <> 'idle')";
    let row = cluster.connect().unwrap().query_one(sql, &[]).unwrap();
    (row.get(0), row.get(1))
}

/// More rows per transaction: fewer I/Os per row, larger I/Os. These are counts, not times.
fn the_shape_is_there(major: u32) {
    let cluster = cluster(major, &[("wal_buffers", "16MB")]);
    let (_handle, stop) = Stop::new();
    let report = run(&quick(&cluster.url("postgres")), &stop, |_| {}).unwrap();
    let section = report.section("transactions").unwrap();
    let row = |rows| section.row(&[At::Number(1), At::Number(rows)]).unwrap();
    for pair in [1, 100, 2_000].windows(2) {
        let (small, large) = (row(pair[0]), row(pair[1]));
        for (metric, grows) in [("ios_per_row", false), ("bytes_per_io", true)] {
            let (small, large) = (small.median(metric).unwrap(), large.median(metric).unwrap());
            assert_eq!(large > small, grows, "{major}, {metric} of {pair:?}: {small}, {large}");
        }
    }
    assert_eq!(row(100).median("commits"), Some(20.0));
    assert!(section.row(&[At::Number(4), At::Number(2_000)]).is_none());
    assert!(report.remarks.iter().any(|r| r.contains("4 × 2,000")), "{:?}", report.remarks);
    assert!(report.verdict.len() >= 4, "{:?}", report.verdict);
    assert_eq!(left(&cluster), (0, 0));
}

#[test]
fn larger_transactions_make_fewer_and_larger_ios_on_15() {
    the_shape_is_there(15);
}

#[test]
fn larger_transactions_make_fewer_and_larger_ios_on_18() {
    the_shape_is_there(18);
}

#[test]
fn a_stop_at_any_step_leaves_nothing_behind() {
    let cluster = cluster(18, &[]);
    let time_max = Duration::from_millis(20);
    let options = LogOptions { time_max, ..quick(&cluster.url("postgres")) };
    let steps = Arc::new(Mutex::new(Vec::new()));
    // First at the first step, then at the second, until one is not reached any more.
    for step in 0..6 {
        let (handle, stop) = Stop::new();
        let seen = Arc::new(Mutex::new(0));
        let heard = Arc::clone(&steps);
        let say = move |line: &str| {
            let mut seen = seen.lock().unwrap();
            if *seen == step {
                heard.lock().unwrap().push(line.to_owned());
                handle.stop();
            }
            *seen += 1;
        };
        let outcome = run(&options, &stop, say);
        assert!(matches!(outcome, Err(Error::Interrupted)), "{outcome:?}");
        assert_eq!(left(&cluster), (0, 0), "{steps:?}");
    }
    let steps = steps.lock().unwrap();
    assert!(steps.iter().any(|line| line.contains("4 of 5")), "{steps:?}");
}

#[test]
fn servers_that_may_not_be_written_to_are_refused_in_words() {
    let mut primary = cluster(15, &[]);
    let standby = primary.standby(&[], &[]).unwrap();
    let said = refusal(&quick(&standby.url("postgres")));
    assert!(said.contains("it is a standby") && said.contains("name its primary"), "{said}");
    drop(standby);

    let mut admin = primary.connect().unwrap();
    admin.batch_execute("CREATE ROLE reader LOGIN").unwrap();
    admin.batch_execute("CREATE DATABASE \"all\"").unwrap();
    let url = primary.url("postgres").replace("postgres@", "reader@");
    let said = refusal(&quick(&url));
    assert!(said.contains("GRANT CREATE ON DATABASE postgres TO reader"), "{said}");
    admin.batch_execute("ALTER ROLE reader SET default_transaction_read_only = on").unwrap();
    assert!(refusal(&quick(&url)).contains("default_transaction_read_only"));

    let mut other = primary.connect_to("all").unwrap();
    other.batch_execute("CREATE PUBLICATION everything FOR ALL TABLES").unwrap();
    let said = refusal(&quick(&primary.url("all")));
    assert!(said.contains("publication everything") && said.contains("another database"), "{said}");

    let url = primary.url("postgres");
    let said = refusal(&LogOptions { log_bytes_max: 1 << 20, ..quick(&url) });
    assert!(said.contains("--max-log"), "{said}");
    // More than any disk has, and allowed by the cap.
    let endless = LogOptions { rows: 1 << 42, log_bytes_max: u64::MAX, ..quick(&url) };
    let said = refusal(&endless);
    assert!(said.contains("must stay free"), "{said}");
    let said = refusal(&LogOptions { clients: vec![900], ..quick(&url) });
    assert!(said.contains("--clients"), "{said}");
    assert_eq!(left(&primary), (0, 0));
}

#[test]
fn a_schema_that_a_crash_left_is_removed_and_a_script_is_run() {
    let cluster = cluster(15, &[]);
    let mut admin = cluster.connect().unwrap();
    admin
        .batch_execute(
            "CREATE SCHEMA farshore_commission_42; CREATE TABLE farshore_commission_42.rows (); \
             CREATE SCHEMA farshore_commission_notes; CREATE TABLE hits (id int8, n int8)",
        )
        .unwrap();
    let script = "\\set id random(1, 9)\nINSERT INTO hits VALUES (:id, 1)";
    let options = LogOptions {
        rows: 60,
        transaction_rows: vec![1, 20],
        clients: vec![2],
        script: Some(Script::parse("hits.sql", script).unwrap()),
        ..quick(&cluster.url("postgres"))
    };
    let (_handle, stop) = Stop::new();
    let report = run(&options, &stop, |_| {}).unwrap();
    let section = report.section("transactions").unwrap();
    assert_eq!(section.rows.len(), 2);
    let row = admin.query_one("SELECT count(*), min(id), max(id) FROM hits", &[]).unwrap();
    let (hits, low, high): (i64, i64, i64) = (row.get(0), row.get(1), row.get(2));
    assert_eq!(hits, 120);
    assert!(low >= 1 && high <= 9, "{low} {high}");
    // What only looks alike is not ours.
    admin.batch_execute("DROP SCHEMA farshore_commission_notes; DROP TABLE hits").unwrap();
    assert_eq!(left(&cluster), (0, 0));

    let wrong = Script::parse("wrong.sql", "INSERT INTO nowhere VALUES (1)").unwrap();
    let options = LogOptions { script: Some(wrong), ..options };
    let error = run(&options, &stop, |_| {}).unwrap_err().to_string();
    assert!(error.contains("nowhere"), "{error}");
    assert_eq!(left(&cluster), (0, 0));
}

#[test]
fn no_time_means_few_rows_and_says_how_many() {
    let cluster = cluster(18, &[]);
    let options = LogOptions {
        time_max: Duration::from_nanos(1),
        transaction_rows: vec![10],
        ..quick(&cluster.url("postgres"))
    };
    let (_handle, stop) = Stop::new();
    let report = run(&options, &stop, |_| {}).unwrap();
    let section = report.section("transactions").unwrap();
    let row = section.row(&[At::Number(4), At::Number(10)]).unwrap();
    assert_eq!(row.median("rows"), Some(40.0));
}

#[test]
fn each_level_of_synchronous_commit_has_its_price_and_a_stop_leaves_nothing() {
    use farshore_commission::commit::{self, CommitOptions};
    let cluster = cluster(15, &[]);
    let server = LogOptions::server(&cluster.url("postgres")).unwrap();
    let options = CommitOptions {
        statement_rows: vec![1, 1_000],
        time_max: Duration::from_millis(20),
        repeats: 2,
        ..CommitOptions::new(server)
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let (handle, stop) = Stop::new();
    let report = runtime.block_on(commit::measure(&options, &stop, &|_| {})).unwrap();
    let section = report.section("penalty").unwrap();
    assert_eq!(section.rows.len(), 4);
    for row in &section.rows {
        let is_off = row.at[1] == At::Word("off".into());
        let penalties = &row.figures["penalty_percent"];
        assert_eq!(penalties.len(), 2);
        assert!(!is_off || penalties.iter().all(|penalty| *penalty == 0.0), "{row:?}");
        assert!(row.median("statements").unwrap() >= 1.0);
    }
    assert!(report.remarks.iter().any(|r| r.contains("synchronous_standby_names")));
    assert!(report.verdict[0].contains("synchronous_commit = on"), "{:?}", report.verdict);
    assert_eq!(left(&cluster), (0, 0));

    let say = |line: &str| {
        if line.contains("round 2") {
            handle.stop();
        }
    };
    let outcome = runtime.block_on(commit::measure(&options, &stop, &say));
    assert!(matches!(outcome, Err(Error::Interrupted)), "{outcome:?}");
    assert_eq!(left(&cluster), (0, 0));
}

#[test]
fn a_server_keeps_its_last_sessions_and_its_log_within_the_cap() {
    use farshore_commission::commit::{self, CommitOptions};
    let reserved = ("superuser_reserved_connections", "3");
    let full = cluster(18, &[("max_connections", "10"), reserved, ("reserved_connections", "3")]);
    let said = refusal(&LogOptions { clients: vec![1], ..quick(&full.url("postgres")) });
    assert!(said.contains("leaves 3 beside those that are reserved"), "{said}");
    drop(full);

    // Somebody else writes what was not planned, while it runs.
    let server = cluster(18, &[("max_connections", "10"), reserved]);
    let url = server.url("postgres");
    let options = CommitOptions {
        statement_rows: vec![1],
        time_max: Duration::from_secs(60),
        repeats: 1,
        log_bytes_max: 201_000_000,
        ..CommitOptions::new(LogOptions::server(&url).unwrap())
    };
    let other = Mutex::new(server.connect().unwrap());
    let say = |line: &str| {
        if line.contains("round 1") {
            let write = "SELECT pg_logical_emit_message(false, '', repeat('x', 50000000)) \
                         FROM generate_series(1, 5)";
            tokio::task::block_in_place(|| other.lock().unwrap().execute(write, &[]).unwrap());
        }
    };
    let (_handle, stop) = Stop::new();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let error = runtime.block_on(commit::measure(&options, &stop, &say)).unwrap_err();
    assert!(error.to_string().contains("--max-log"), "{error}");
    assert_eq!(left(&server), (0, 0));
}

/// Runs it, and fails where it does not end: what waits for a standby that is not there waits for
/// ever.
fn run_within<T: Send + 'static>(
    within: Duration,
    work: impl AsyncFnOnce() -> T + Send + 'static,
) -> T {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let _ = sender.send(runtime.block_on(work()));
    });
    receiver.recv_timeout(within).expect("it does not end")
}

/// Makes commits wait for a standby that is not there.
fn wait_for_nobody(cluster: &Cluster) {
    let mut admin = cluster.connect().unwrap();
    // Neither of them waits itself.
    admin.batch_execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'").unwrap();
    admin.batch_execute("SELECT pg_reload_conf()").unwrap();
    let names = "SELECT current_setting('synchronous_standby_names')";
    wait_until("the server to have taken the setting", SOON, &[], || {
        Ok((admin.query_one(names, &[])?.get::<_, String>(0) == "nobody").then_some(()))
    })
    .unwrap();
}

#[test]
fn a_commit_that_a_standby_is_waited_for_is_refused_before_anything_is_measured() {
    use farshore_commission::commit::{self, CommitOptions};
    let cluster = cluster(15, &[]);
    let options = quick(&cluster.url("postgres"));
    let penalty = CommitOptions::new(options.server.clone());
    wait_for_nobody(&cluster);
    let log = options.clone();
    let (_handle, stop) = Stop::new();
    let ended = run_within(SOON, async move || measure(&log, &stop, &|_| {}).await);
    let said = ended.unwrap_err();
    assert!(matches!(said, Error::Refused(_)), "{said}");
    let said = said.to_string();
    for words in ["synchronous_standby_names", "nobody is not connected", "synchronous_commit"] {
        assert!(said.contains(words), "{said}");
    }
    assert_eq!(left(&cluster), (0, 0));

    let (_handle, stop) = Stop::new();
    let ended = run_within(SOON, async move || commit::measure(&penalty, &stop, &|_| {}).await);
    let said = ended.unwrap_err().to_string();
    assert!(said.contains("nobody is not connected") && said.contains("remote_write"), "{said}");
    assert_eq!(left(&cluster), (0, 0));

    // Who waits for the local flush alone has nothing to wait for.
    let alone = format!("{}?options=-csynchronous_commit%3Dlocal", cluster.url("postgres"));
    let alone = LogOptions { clients: vec![1], ..quick(&alone) };
    let (_handle, stop) = Stop::new();
    run_within(SOON, async move || measure(&alone, &stop, &|_| {}).await).unwrap();
    assert_eq!(left(&cluster), (0, 0));
}

#[test]
fn a_stop_ends_commits_that_wait_for_a_standby() {
    // First before anything is measured; then the standby is lost while it is.
    for lost in ["whether commits", "round 1"] {
        let cluster = Arc::new(cluster(18, &[]));
        // More than are written before it is lost.
        let options = LogOptions {
            rows: 1_000_000,
            transaction_rows: vec![1],
            ..quick(&cluster.url("postgres"))
        };
        if lost != "round 1" {
            wait_for_nobody(&cluster);
        }
        let there = Arc::clone(&cluster);
        let ended = run_within(SOON, async move || {
            let (handle, stop) = Stop::new();
            let handle = Arc::new(handle);
            let say = move |line: &str| {
                if !line.contains(lost) {
                    return;
                }
                let (cluster, handle) = (Arc::clone(&there), Arc::clone(&handle));
                std::thread::spawn(move || {
                    if lost == "round 1" {
                        wait_for_nobody(&cluster);
                    }
                    let mut admin = cluster.connect().unwrap();
                    let waits =
                        "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
                    wait_until("a commit that waits", SOON, &[], || {
                        Ok((admin.query_one(waits, &[])?.get::<_, i64>(0) > 0).then_some(()))
                    })
                    .unwrap();
                    handle.stop();
                });
            };
            measure(&options, &stop, &say).await
        });
        assert!(matches!(ended, Err(Error::Interrupted)), "{lost}: {ended:?}");
        assert_eq!(left(&cluster), (0, 0), "{lost}");
    }
}
