//! The whole prefix machinery on real servers, with PostgreSQL's own subscription in the place of
//! the product: a good replication is accepted, and interference on the subscriber is noticed.

use anyhow::{Context, Result};
use farshore_testkit::postgres::{Cluster, Installation};
use farshore_testkit::prefix::{
    Oracle, Samplers, TABLES, ViolationKind, Workload, WorkloadOptions, check, check_final,
    create_tables, read_state, table_names,
};
use farshore_testkit::wait::wait_until;
use farshore_testkit::{checksum, seed};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

fn clusters(publisher: u32, subscriber: u32) -> Result<(Cluster, Cluster)> {
    let start = |major| {
        Cluster::builder(&Installation::find(major)?)
            .setting("wal_level", "logical")
            .setting("logical_decoding_work_mem", "64kB")
            .setting("wal_retrieve_retry_interval", "10ms")
            .start()
    };
    Ok((start(publisher)?, start(subscriber)?))
}

/// Subscribes with PostgreSQL's own means and waits for the initial copy. With its default,
/// `synchronous_commit = off`, a killed subscriber shows earlier states again than readers saw
/// before, which the checker rightly refuses.
fn subscribe(publisher: &Cluster, subscriber: &Cluster) -> Result<()> {
    publisher
        .execute_script(&format!("CREATE PUBLICATION p FOR TABLE {}", table_names().join(", ")))?;
    let source = format!("host=127.0.0.1 port={} user=postgres dbname=postgres", publisher.port());
    subscriber.execute_script(&format!(
        "CREATE SUBSCRIPTION s CONNECTION '{source}' PUBLICATION p WITH (synchronous_commit = on)"
    ))?;
    let mut client = subscriber.connect()?;
    let log = subscriber.log_path();
    wait_until("the initial copy", TIMEOUT, &[&log], || {
        let query = "SELECT count(*) FILTER (WHERE srsubstate = 'r') FROM pg_subscription_rel";
        let ready: i64 = client.query_one(query, &[])?.get(0);
        Ok((ready as usize == TABLES.len()).then_some(()))
    })
}

#[test]
fn a_good_replication_under_kills_is_accepted_and_interference_is_noticed() -> Result<()> {
    let seed = seed();
    println!("FARSHORE_SEED={seed}");
    let majors = if seed.is_multiple_of(2) { (15, 18) } else { (18, 15) };
    let (mut publisher, mut subscriber) = clusters(majors.0, majors.1)?;
    create_tables(&mut publisher.connect()?)?;
    create_tables(&mut subscriber.connect()?)?;
    let oracle = Oracle::create(&mut publisher.connect()?)?;
    Workload::fill(&mut publisher.connect()?)?;
    subscribe(&publisher, &subscriber)?;

    let workload = Workload::start(&publisher.url("postgres"), &WorkloadOptions::new(seed));
    let samplers = Samplers::start(&subscriber.url("postgres"), 2, Duration::from_millis(20));
    for round in 1..=4 {
        wait_until("transactions and samples", TIMEOUT, &[&subscriber.log_path()], || {
            workload.ensure_running()?;
            let enough =
                workload.summary().committed >= round * 200 && samplers.taken() >= round * 20;
            Ok(enough.then_some(()))
        })?;
        let victim = if round % 2 == 0 { &mut publisher } else { &mut subscriber };
        victim.kill9()?;
        victim.start()?;
    }
    let written = workload.stop()?;
    let history = oracle.history(&mut publisher.connect()?)?;
    println!("{written}; {} commits by the oracle", history.steps().len());
    // PostgreSQL 15's own apply worker dies of SIGSEGV now and then after a deadlock with a
    // reader, and the server recovers: one more crash that a good replication goes through.
    let state =
        wait_until("the subscriber to be equal", TIMEOUT, &[&subscriber.log_path()], || {
            let state = subscriber.connect().and_then(|mut reader| read_state(&mut reader));
            Ok(state.ok().filter(|state| state.hash() == history.final_hash()))
        })?;
    check_final(&history, &state)?;
    let samples = samplers.stop()?;
    let summary = check(&history, &samples)?;
    println!("{summary}");
    assert!(summary.prefixes_seen > 10);
    let (source, target) = (publisher.url("postgres"), subscriber.url("postgres"));
    checksum::assert_equal(&source, &target, &table_names())?;

    // Somebody counts up on the subscriber: seen in the end, and by samples.
    subscriber.execute_script("UPDATE prefix.counter SET n = n + 1 WHERE id = 2")?;
    let changed = read_state(&mut subscriber.connect()?)?;
    let violation = check_final(&history, &changed).expect_err("one counter is ahead");
    assert_eq!(violation.kind, ViolationKind::FinalDiffers);
    assert!(violation.to_string().contains("counter (id=2"), "{violation}");
    let different = checksum::compare_tables(&source, &target, &table_names())?;
    assert_eq!(different.len(), 1);
    let again = Samplers::start(&target, 1, Duration::from_millis(1));
    wait_until("a sample", TIMEOUT, &[], || Ok((again.taken() > 0).then_some(())))?;
    let violation = check(&history, &again.stop()?).expect_err("one counter is ahead");
    assert_eq!(violation.kind, ViolationKind::UnknownState);
    oracle.remove(&mut publisher.connect()?).context("remove the oracle")
}
