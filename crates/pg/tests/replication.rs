//! The log, streamed from a real server.

mod cluster;

use cluster::Cluster;
use farshore_model::Lsn;
use farshore_pg::replication::{ReplicationStream, SlotOptions, SlotSnapshot, StreamMessage};
use farshore_pg::{Connection, Error, Mode};
use std::time::{Duration, Instant};

const OPTIONS: &[(&str, &str)] = &[("proto_version", "1"), ("publication_names", "pub")];

async fn replication(cluster: &Cluster) -> Connection {
    Connection::connect(&cluster.local(), Mode::LogicalReplication).await.unwrap()
}

/// Receives until `commits` transactions have ended; the kinds of the messages, and the end.
async fn receive_commits(stream: &mut ReplicationStream, commits: usize) -> (String, Lsn) {
    let (mut kinds, mut end, mut seen) = (String::new(), Lsn::ZERO, 0);
    while seen < commits {
        match stream.next().await.unwrap().expect("the stream ended") {
            StreamMessage::XLogData { data, .. } => {
                kinds.push(data[0] as char);
                if data[0] == b'C' {
                    seen += 1;
                    end = Lsn(u64::from_be_bytes(data[10..18].try_into().unwrap()));
                }
            }
            StreamMessage::Keepalive { reply_requested, .. } => {
                if reply_requested {
                    stream.send_status(end, end, end, false).await.unwrap();
                }
            }
        }
    }
    (kinds, end)
}

async fn confirmed(admin: &mut Connection) -> Lsn {
    let sql = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 's'";
    admin.query(sql, &[]).await.unwrap()[0].parse(0).unwrap()
}

#[tokio::test]
async fn a_logical_stream_moves_its_slot() {
    let Some(cluster) = Cluster::start(&[], &[]) else { return };
    let mut admin = cluster.connect().await;
    admin
        .simple_query("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (0)")
        .await
        .unwrap();
    let mut connection = replication(&cluster).await;
    let system = connection.identify_system().await.unwrap();
    assert_eq!((system.dbname.as_deref(), system.timeline), (Some("postgres"), 1));
    let options = SlotOptions { snapshot: SlotSnapshot::Export, ..SlotOptions::default() };
    let slot = connection.create_logical_slot("s", options).await.unwrap();
    assert_eq!(slot.name, "s");
    assert!(slot.consistent_point >= system.xlogpos);
    admin.simple_query("INSERT INTO t VALUES (1)").await.unwrap();

    // The exported snapshot shows what was there before, and only that.
    let mut reader = cluster.connect().await;
    reader
        .simple_query(&format!(
            "BEGIN ISOLATION LEVEL REPEATABLE READ; SET TRANSACTION SNAPSHOT '{}'",
            slot.snapshot.unwrap()
        ))
        .await
        .unwrap();
    let rows = reader.query("SELECT count(*) FROM t", &[]).await.unwrap();
    assert_eq!(rows[0].get(0), Some("1"));
    reader.close().await;

    let again = connection.create_logical_slot("s", options).await.unwrap_err();
    assert_eq!(again.sqlstate(), Some("42710"));
    if connection.server_version() < 170_000 {
        let failover = SlotOptions { failover: true, ..options };
        let error = connection.create_logical_slot("f", failover).await.unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }

    let mut stream = connection.start_replication("s", Lsn::ZERO, OPTIONS).await.unwrap();
    let (kinds, end) = receive_commits(&mut stream, 1).await;
    assert_eq!(kinds, "BRIC");
    assert!(confirmed(&mut admin).await < end);

    // In use: refused, and worth another try later.
    let second = replication(&cluster).await.start_replication("s", Lsn::ZERO, OPTIONS).await;
    let error = second.unwrap_err();
    assert_eq!(error.sqlstate(), Some("55006"));
    assert!(error.is_transient());

    stream.send_status(end, end, end, true).await.unwrap();
    // The server may have said something of its own accord before it takes the status in.
    let moved = async {
        loop {
            let confirmed = confirmed(&mut admin).await;
            assert!(confirmed <= end);
            if confirmed == end {
                break;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(30), moved).await.expect("the slot did not move");

    admin.simple_query("INSERT INTO t VALUES (2)").await.unwrap();
    receive_commits(&mut stream, 1).await;
    stream.finish().await;

    // What was not confirmed comes again, and what was does not.
    let mut stream =
        replication(&cluster).await.start_replication("s", Lsn::ZERO, OPTIONS).await.unwrap();
    let (kinds, _) = receive_commits(&mut stream, 1).await;
    assert_eq!(kinds, "BRIC");
    stream.finish().await;

    let mut connection = replication(&cluster).await;
    let missing = connection.drop_slot("nowhere", false).await.unwrap_err();
    assert_eq!(missing.sqlstate(), Some("42704"));
    connection.drop_slot("s", true).await.unwrap();

    // A slot with a snapshot for this connection's own transaction.
    connection.simple_query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await.unwrap();
    let options =
        SlotOptions { temporary: true, snapshot: SlotSnapshot::Use, ..SlotOptions::default() };
    connection.create_logical_slot("temporary", options).await.unwrap();
    let results = connection.simple_query("SELECT count(*) FROM public.t; COMMIT").await.unwrap();
    assert_eq!(results[0].rows[0].get(0), Some("3"));

    let wrong = connection.start_replication("temporary", Lsn::ZERO, &[("it's", "a'b")]).await;
    let error = wrong.unwrap_err();
    assert!(error.to_string().contains("it's"), "{error}");
}

#[tokio::test]
async fn next_may_be_dropped_at_any_time() {
    let Some(cluster) = Cluster::start(&[], &[]) else { return };
    let mut admin = cluster.connect().await;
    admin
        .simple_query(
            "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t",
        )
        .await
        .unwrap();
    let mut connection = replication(&cluster).await;
    let slot = connection.create_logical_slot("s", SlotOptions::default()).await.unwrap();
    let mut stream =
        connection.start_replication("s", slot.consistent_point, OPTIONS).await.unwrap();

    // 300 transactions of 100 rows, some of them long, while next() loses races all the time.
    let load = tokio::spawn(async move {
        for i in 0..300 {
            let insert = format!(
                "INSERT INTO t SELECT {i} * 100 + g, repeat('v', CASE g WHEN 7 THEN 100000 ELSE 20 END) \
                 FROM generate_series(0, 99) g"
            );
            admin.simple_query(&insert).await.unwrap();
        }
    });
    let mut ids = Vec::new();
    let (mut commits, mut dropped, mut statuses) = (0, 0u32, 0);
    while commits < 300 {
        let message = tokio::select! {
            biased;
            message = stream.next() => message.unwrap(),
            () = tokio::task::yield_now() => {
                dropped += 1;
                if dropped.is_multiple_of(10) {
                    statuses += 1;
                    let start = slot.consistent_point;
                    stream.send_status(start, start, start, true).await.unwrap();
                }
                continue;
            }
        };
        let Some(StreamMessage::XLogData { data, .. }) = message else { continue };
        match data[0] {
            b'I' => {
                // 'I' oid 'N' columns 't' length id…
                let length = u32::from_be_bytes(data[9..13].try_into().unwrap()) as usize;
                let id: usize =
                    std::str::from_utf8(&data[13..13 + length]).unwrap().parse().unwrap();
                ids.push(id);
            }
            b'C' => commits += 1,
            _ => {}
        }
    }
    load.await.unwrap();
    assert!(ids.iter().copied().eq(0..30_000), "lost, doubled or reordered");
    assert!(dropped > 0 && statuses > 0, "{dropped} {statuses}");
    stream.finish().await;
}

#[tokio::test]
async fn a_stream_ends_with_its_server_and_reports_a_kill() {
    let Some(cluster) = Cluster::start(&[], &[]) else { return };
    let mut admin = cluster.connect().await;
    admin
        .simple_query("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
        .await
        .unwrap();
    let mut connection = replication(&cluster).await;
    connection.create_logical_slot("s", SlotOptions::default()).await.unwrap();
    let mut stream = connection.start_replication("s", Lsn::ZERO, OPTIONS).await.unwrap();
    let walsender = stream.backend_pid().to_string();
    admin.query("SELECT pg_terminate_backend($1, 10000)", &[Some(&walsender)]).await.unwrap();
    let error = loop {
        if let Err(error) = stream.next().await {
            break error;
        }
    };
    assert_eq!(error.sqlstate(), Some("57P01"), "{error}");
    assert!(error.is_transient());

    let mut stream =
        replication(&cluster).await.start_replication("s", Lsn::ZERO, OPTIONS).await.unwrap();
    admin.close().await;
    // Only a walsender that streams already is given time at a shutdown; an answer proves it.
    stream.send_status(Lsn::ZERO, Lsn::ZERO, Lsn::ZERO, true).await.unwrap();
    stream.next().await.unwrap().expect("the stream ended");
    cluster.begin_stop("fast");
    // The server stays until we have confirmed everything; then the stream ends, no error.
    let mut end = Lsn::ZERO;
    let ended = async {
        while let Some(message) = stream.next().await.unwrap() {
            let (StreamMessage::XLogData { wal_end, .. }
            | StreamMessage::Keepalive { wal_end, .. }) = message;
            end = end.max(wal_end);
            stream.send_status(end, end, end, false).await.unwrap();
        }
    };
    tokio::time::timeout(Duration::from_secs(30), ended).await.unwrap();
    assert_eq!(stream.next().await.unwrap(), None);
    stream.finish().await;
}

#[tokio::test]
async fn the_log_itself_is_streamed() {
    let Some(cluster) = Cluster::start(&[], &[]) else { return };
    let mut connection =
        Connection::connect(&cluster.local(), Mode::PhysicalReplication).await.unwrap();
    let start = connection.identify_system().await.unwrap().xlogpos;
    let start = Lsn(start.0 & !0xFF_FFFF);
    let mut stream = connection.start_physical_replication(None, start, Some(1)).await.unwrap();
    let mut admin = cluster.connect().await;
    admin
        .simple_query("CREATE TABLE t AS SELECT repeat('x', 1000) FROM generate_series(1, 5000)")
        .await
        .unwrap();
    let rows = admin.query("SELECT pg_current_wal_flush_lsn()", &[]).await.unwrap();
    let goal: Lsn = rows[0].parse(0).unwrap();
    let mut position = start;
    while position < goal {
        if let Some(StreamMessage::XLogData { wal_start, data, .. }) = stream.next().await.unwrap()
        {
            assert_eq!(wal_start, position);
            position = Lsn(wal_start.0 + data.len() as u64);
        }
    }
    stream.finish().await;

    let connection =
        Connection::connect(&cluster.local(), Mode::PhysicalReplication).await.unwrap();
    let ahead = Lsn(position.0 + (1 << 40));
    let mut stream = connection.start_physical_replication(None, ahead, None).await.unwrap();
    let error = stream.next().await.unwrap_err();
    assert!(error.to_string().contains("ahead"), "{error}");
}

/// A measurement rather than a test: `cargo test --release -- --ignored --nocapture`.
#[tokio::test]
#[ignore = "prints a rate; run by hand"]
async fn rate_of_small_messages() {
    let Some(cluster) = Cluster::start(&[], &[]) else { return };
    let mut admin = cluster.connect().await;
    admin
        .simple_query("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
        .await
        .unwrap();
    let mut connection = replication(&cluster).await;
    connection.create_logical_slot("s", SlotOptions::default()).await.unwrap();
    admin.simple_query("INSERT INTO t SELECT generate_series(1, 1000000)").await.unwrap();
    let mut stream = connection.start_replication("s", Lsn::ZERO, OPTIONS).await.unwrap();
    stream.next().await.unwrap();
    let started = Instant::now();
    let (kinds, _) = receive_commits(&mut stream, 1).await;
    println!("{} messages in {:?}", kinds.len(), started.elapsed());
    stream.finish().await;
}
