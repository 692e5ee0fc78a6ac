//! The cluster and checksum halves of the test kit, on real servers of both versions.

use anyhow::Result;
use farshore_testkit::checksum::{assert_equal, compare_tables, tables_in_schema};
use farshore_testkit::postgres::{Cluster, Installation, StopMode};
use std::time::Duration;

#[test]
fn a_cluster_survives_kill_and_stop_keeps_its_port_and_leaves_nothing_behind() -> Result<()> {
    for major in [15, 18] {
        let installation = Installation::find(major)?;
        let mut cluster =
            Cluster::builder(&installation).setting("wal_level", "logical").start()?;
        let (port, data_dir) = (cluster.port(), cluster.data_dir());
        cluster.execute_script("CREATE TABLE t (id int); INSERT INTO t VALUES (1)")?;
        cluster
            .connect()?
            .execute("SELECT pg_create_logical_replication_slot('s', 'test_decoding')", &[])?;
        cluster.execute_script("INSERT INTO t SELECT generate_series(2, 10000)")?;
        assert!(cluster.retained_wal("s")? > 100_000);
        assert!(cluster.retained_wal("none").is_err());
        assert!(cluster.peak_rss_bytes() > 1 << 20);

        for _ in 0..3 {
            let mut open = cluster.connect()?;
            cluster.kill9()?;
            assert!(!cluster.is_running());
            assert!(open.simple_query("SELECT 1").is_err());
            assert!(cluster.connect().is_err());
            cluster.start()?;
        }
        cluster.restart()?;
        cluster.stop(StopMode::Immediate)?;
        cluster.start()?;
        assert_eq!(cluster.port(), port);
        let count: i64 = cluster.connect()?.query_one("SELECT count(*) FROM t", &[])?.get(0);
        assert_eq!(count, 10_000);
        assert!(cluster.cpu_seconds() > 0.0);
        cluster.kill9()?;
        drop(cluster);
        assert!(!data_dir.exists());
    }
    Ok(())
}

#[test]
fn a_password_is_asked_for_over_tcp() -> Result<()> {
    let cluster = Cluster::builder(&Installation::find(18)?).scram_password("s3cret").start()?;
    assert!(cluster.url("postgres").contains(":s3cret@"));
    cluster.execute_script("SELECT 1")?;
    let wrong = cluster.url("postgres").replace("s3cret", "guess");
    assert!(postgres::Client::connect(&wrong, postgres::NoTls).is_err());
    Ok(())
}

#[test]
fn checksums_agree_between_versions_and_show_what_differs() -> Result<()> {
    let old = Cluster::builder(&Installation::find(15)?).start()?;
    let new = Cluster::builder(&Installation::find(18)?)
        .setting("timezone", "Asia/Kathmandu")
        .setting("bytea_output", "escape")
        .setting("DateStyle", "German")
        .start()?;
    let fill = "INSERT INTO s.\"Mixed\" SELECT i, 'row '||i, i/3.0, sqrt(i), \
        timestamptz '2026-01-01 00:00Z' + i * interval '1 hour', decode(md5(i::text), 'hex'), \
        jsonb_build_object('i', i), ARRAY[i, NULL], i * interval '1 day 1 second' \
        FROM generate_series(1, 3000) i";
    let tail = "v text, n numeric, f float8, t timestamptz, b bytea, j jsonb, a int[], d interval";
    old.execute_script(&format!(
        "CREATE SCHEMA s; CREATE TABLE s.\"Mixed\" (id int, {tail}); {fill}"
    ))?;
    // Another physical order of the rows, and of a column.
    new.execute_script(&format!(
        "CREATE SCHEMA s; CREATE TABLE s.\"Mixed\" (id int, {tail}); {fill} ORDER BY md5(i::text); \
         ALTER TABLE s.\"Mixed\" RENAME n TO x; ALTER TABLE s.\"Mixed\" ADD n numeric; \
         UPDATE s.\"Mixed\" SET n = x; ALTER TABLE s.\"Mixed\" DROP x"
    ))?;
    let (source, target) = (old.url("postgres"), new.url("postgres"));
    let tables = tables_in_schema(&source, "s")?;
    assert_eq!(tables, ["s.\"Mixed\""]);
    assert_equal(&source, &target, &tables)?;

    new.execute_script(
        "UPDATE s.\"Mixed\" SET v = 'changed' WHERE id = 7; DELETE FROM s.\"Mixed\" WHERE id = 8; \
         INSERT INTO s.\"Mixed\" SELECT * FROM s.\"Mixed\" WHERE id = 9",
    )?;
    let different = compare_tables(&source, &target, &tables)?;
    assert_eq!(different.len(), 1);
    let diff = &different[0];
    assert_eq!((diff.source_rows, diff.target_rows), (3000, 3000));
    assert_eq!((diff.only_source.len(), diff.only_target.len()), (2, 2));
    assert!(diff.to_string().contains("changed") && diff.to_string().contains("row 8"), "{diff}");
    assert!(compare_tables(&source, &target, &["s.missing"]).is_err());
    Ok(())
}

#[test]
fn a_child_of_a_dead_test_process_is_not_left_behind() -> Result<()> {
    // A second copy of this test binary starts a cluster, says its pid and is killed.
    const ROLE: &str = "FARSHORE_TESTKIT_ORPHAN_ROLE";
    if std::env::var_os(ROLE).is_some() {
        let cluster = Cluster::builder(&Installation::find(18)?).start()?;
        let pid_file = std::fs::read_to_string(cluster.data_dir().join("postmaster.pid"))?;
        println!(
            "postmaster {} in {}",
            pid_file.lines().next().unwrap_or(""),
            cluster.socket_dir().display()
        );
        loop {
            std::thread::park();
        }
    }
    use std::io::BufRead;
    let mut role = std::process::Command::new(std::env::current_exe()?)
        .args(["--exact", "a_child_of_a_dead_test_process_is_not_left_behind", "--nocapture"])
        .env(ROLE, "1")
        .stdout(std::process::Stdio::piped())
        .spawn()?;
    let lines = std::io::BufReader::new(role.stdout.take().expect("piped")).lines();
    let line = lines.map_while(Result::ok).find(|line| line.contains("postmaster "));
    let line = line.expect("the copy says where its cluster is");
    let (pid, dir) =
        line.split_once("postmaster ").unwrap().1.split_once(" in ").expect("pid in directory");
    let postmaster = farshore_testkit::child::open_pidfd(pid.parse()?)?;
    role.kill()?;
    role.wait()?;
    assert!(farshore_testkit::child::wait_pidfd(&postmaster, Duration::from_secs(20))?);
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
