//! Sources over channels do what they do directly, on real servers; and what no publication gives
//! is refused.

mod over;
mod refused;
mod slow_line;

use farshore_capture::CaptureError;
use farshore_capture::publication::{
    AddedColumn, GrownTable, OldValue, PublicationSpec, PublishedTable,
};
use farshore_capture::publication::{DroppedColumns, TableName};
use farshore_capture::snapshot::{BlockRange, CopyFormat, CopyPlan, cut_into_ranges};
use farshore_capture::source::{Direct, FoundRow, Key, LookUp, Registry, SnapshotSession, Source};
use farshore_testkit::postgres::Cluster;
use farshore_wire::frontend::Format;
use over::{Elsewhere, cluster, spec, value, wait_for};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;

fn whole(cluster: &Cluster) -> PublicationSpec {
    let tables = ["public.orders", "public.people", "public.large", "public.days"];
    spec(cluster, "whole", &tables)
}

/// Makes the publication, and a place that serves it.
async fn publish(spec: &PublicationSpec) -> Arc<Elsewhere> {
    let mut sql = spec.connect(farshore_pg::Mode::Sql).await.unwrap();
    spec.ensure_publication(&mut sql).await.unwrap();
    Elsewhere::new(spec, &Arc::new(Registry::default()))
}

fn public(name: &str) -> TableName {
    TableName { schema: "public".into(), name: name.into() }
}

fn plan(table: &PublishedTable, format: CopyFormat) -> CopyPlan {
    CopyPlan { format, casts: vec![None; table.columns.len()] }
}

async fn copied(
    session: &mut dyn SnapshotSession,
    table: &PublishedTable,
    range: BlockRange,
    plan: &CopyPlan,
) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut data = session.copy_range(table, range, plan).await.unwrap();
    while let Some(pieces) = data.next().await.unwrap() {
        pieces.iter().for_each(|piece| bytes.extend_from_slice(piece));
    }
    assert!(data.next().await.unwrap().is_none());
    bytes
}

/// Until somebody waits for an exclusive lock on this table.
async fn await_in_the_way(session: &mut dyn SnapshotSession, oid: u32) {
    let seen = async { while !session.is_in_the_way(&[oid]).await.unwrap() {} };
    tokio::time::timeout(Duration::from_secs(60), seen).await.expect("who waits is not seen");
}

async fn found(session: &mut dyn SnapshotSession, wanted: LookUp<'_>) -> Vec<FoundRow> {
    let mut rows = Vec::new();
    let mut found = session.look_up(wanted).await.unwrap();
    while let Some(some) = found.next().await.unwrap() {
        rows.extend(some);
    }
    rows
}

fn transient<T>(result: Result<T, CaptureError>) -> String {
    match result {
        Ok(_) => panic!("it did not fail"),
        Err(error) => {
            assert!(error.is_transient(), "{error}");
            error.to_string()
        }
    }
}

/// Asks both the same questions.
async fn compare(direct: &dyn Source, remote: &dyn Source) {
    let published = direct.published_tables().await.unwrap();
    assert_eq!(published.len(), 5);
    assert_eq!(remote.published_tables().await.unwrap(), published);
    let partitioned = direct.partitioned_tables().await.unwrap();
    assert_eq!(partitioned.len(), 1);
    assert_eq!(remote.partitioned_tables().await.unwrap(), partitioned);
    let partitions = direct.partitions().await.unwrap();
    assert!(partitions.is_some());
    assert_eq!(remote.partitions().await.unwrap(), partitions);
    let mut oids: Vec<u32> = published.iter().map(|table| table.oid).collect();
    oids.extend(partitioned);
    let definitions = direct.definitions(&oids).await.unwrap();
    assert_eq!(definitions.tables.len(), 6);
    assert_eq!(remote.definitions(&oids).await.unwrap(), definitions);
    let sequences = direct.sequences().await.unwrap();
    assert_eq!(sequences.len(), 1);
    assert_eq!(remote.sequences().await.unwrap(), sequences);
    for (table, gone, dropped, root) in [
        ("orders", ["gone", "note", "secret"], vec!["gone", "note"], "orders"),
        ("days_1", ["x", "v", "y"], vec!["x", "v", "y"], "days"),
        ("nothing", ["x", "y", "z"], vec![], "nothing"),
    ] {
        let gone = gone.map(str::to_owned);
        let columns = dropped.into_iter().map(str::to_owned).collect();
        let wanted = DroppedColumns { columns, root: public(root) };
        let answers = [
            direct.dropped_columns(&public(table), &gone).await.unwrap(),
            remote.dropped_columns(&public(table), &gone).await.unwrap(),
        ];
        assert_eq!(answers, [wanted.clone(), wanted]);
    }
    let added = |name: &str, type_oid| AddedColumn { name: name.into(), type_oid };
    let columns = [added("added", 23), added("added", 25), added("at", 1184), added("gone", 23)];
    let orders = published.iter().find(|table| table.table == public("orders")).unwrap();
    let grown = |name: &str, oid| GrownTable {
        table: public(name),
        oid,
        copied_from: None,
        columns: orders.columns.iter().map(|column| column.name.clone()).collect(),
    };
    // By its OID, whatever it was called.
    for asked in [grown("orders", 0), grown("nothing", orders.oid)] {
        let old = direct.old_values(&asked, &columns).await.unwrap();
        assert_eq!(old[0], OldValue::Missing("42".into()));
        assert_eq!(old[1], OldValue::UNKNOWN, "it has another type");
        assert!(matches!(old[2], OldValue::Filled { .. }) && old[2] != OldValue::UNKNOWN);
        assert_eq!(remote.old_values(&asked, &columns).await.unwrap(), old);
    }
    let nothing = remote.old_values(&grown("nothing", 0), &columns).await.unwrap();
    assert_eq!(nothing, vec![OldValue::Null; 4]);
}

/// Reads both snapshots in the same ways.
async fn compare_snapshots(direct: &dyn Source, remote: &dyn Source) {
    let (near, far) = (direct.export("near").await.unwrap(), remote.export("far").await.unwrap());
    assert!(far.consistent_point() >= near.consistent_point());
    let (mut one, mut other) = (near.open().await.unwrap(), far.open().await.unwrap());
    let tables = one.tables().await.unwrap();
    assert_eq!(other.tables().await.unwrap(), tables);
    assert!(other.hold_still(&tables).await.unwrap());
    assert!(other.hold_still(&[]).await.unwrap());
    let oids: Vec<u32> = tables.iter().map(|table| table.oid).collect();
    assert!(!other.is_in_the_way(&oids).await.unwrap());
    let definitions = one.definitions(&oids).await.unwrap();
    assert_eq!(other.definitions(&oids).await.unwrap(), definitions);
    for table in &tables {
        for format in [CopyFormat::Text, CopyFormat::Binary] {
            let mut plan = plan(table, format);
            if table.table.name == "orders" {
                plan.casts[2] = Some("double precision".into());
                plan.casts[3] = Some("character varying".into());
            }
            for range in cut_into_ranges(table.blocks, 100) {
                let bytes = copied(one.as_mut(), table, range, &plan).await;
                assert!(bytes.len() > 20, "{} {range:?}", table.table);
                assert!(bytes == copied(other.as_mut(), table, range, &plan).await);
            }
        }
    }
    let orders = tables.iter().find(|table| table.table.name == "orders").unwrap();
    let keys: Vec<Key> = (0..30_000_i64)
        .map(|id| {
            let mut key = Key::default();
            match id % 2 {
                0 => key.push(Format::Binary, &id.to_be_bytes()),
                _ => key.push(Format::Text, format!("{id:0100}").as_bytes()),
            }
            key
        })
        .collect();
    let keys: Vec<&Key> = keys.iter().collect();
    let (plan, key_columns) = (plan(orders, CopyFormat::Binary), ["id".to_owned()]);
    let wanted = LookUp { table: orders, plan: &plan, key_columns: &key_columns, keys: &keys };
    let rows = found(one.as_mut(), wanted).await;
    assert_eq!(rows.len(), 20_000 - 20_000 / 3);
    assert!(rows == found(other.as_mut(), wanted).await);
    // Rows that do not fit into one frame, and none at all.
    let large = tables.iter().find(|table| table.table.name == "large").unwrap();
    let plan = self::plan(large, CopyFormat::Text);
    let mut three = Key::default();
    three.push(Format::Text, b"3");
    for keys in [&[&three, &three][..], &[]] {
        let wanted = LookUp { table: large, plan: &plan, key_columns: &key_columns, keys };
        let rows = found(one.as_mut(), wanted).await;
        assert_eq!(rows.len(), keys.len());
        assert!(rows == found(other.as_mut(), wanted).await);
    }
    other.close().await;
    one.close().await;
    far.close().await;
    near.close().await;
}

#[test]
fn over_channels_a_source_says_what_it_says_directly() {
    for major in [15, 18] {
        let cluster = cluster(major);
        let spec = whole(&cluster);
        Runtime::new().unwrap().block_on(async {
            let elsewhere = publish(&spec).await;
            let direct = Direct::new(spec.clone());
            let remote = elsewhere.remote();
            compare(&direct, &remote).await;
            assert_eq!(elsewhere.served.lock().unwrap().len(), 1);
            compare_snapshots(&direct, &remote).await;
            elsewhere.until_at_work(1).await;
            wait_for(&spec, "SELECT count(*) FROM pg_replication_slots", "0").await;
        });
    }
}

#[test]
fn sessions_copy_side_by_side() {
    let cluster = cluster(18);
    let spec = whole(&cluster);
    Runtime::new().unwrap().block_on(async {
        let elsewhere = publish(&spec).await;
        let remote = elsewhere.remote();
        let snapshot = remote.export("copy").await.unwrap();
        let mut first = snapshot.open().await.unwrap();
        let tables = first.tables().await.unwrap();
        let large = tables.iter().find(|table| table.table.name == "large").unwrap();
        let plan = plan(large, CopyFormat::Text);
        let all = BlockRange { start: 0, end: None };
        // One stands in the middle of its copy while the other makes all of its own.
        let mut data = first.copy_range(large, all, &plan).await.unwrap();
        let begun = data.next().await.unwrap().unwrap();
        let mut second = snapshot.open().await.unwrap();
        let bytes = copied(second.as_mut(), large, all, &plan).await;
        let mut rest: usize = begun.iter().map(bytes::Bytes::len).sum();
        while let Some(pieces) = data.next().await.unwrap() {
            rest += pieces.iter().map(bytes::Bytes::len).sum::<usize>();
        }
        assert_eq!(rest, bytes.len());
        assert!(bytes.len() > 4 * 1_280_000);
    });
}

#[test]
fn what_is_dropped_ends_on_the_publisher_too_and_what_is_lost_can_be_had_again() {
    let cluster = cluster(18);
    let spec = whole(&cluster);
    let slots = "SELECT count(*) FROM pg_replication_slots";
    let sessions =
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'farshore whole%'";
    Runtime::new().unwrap().block_on(async {
        let elsewhere = publish(&spec).await;
        let remote = elsewhere.remote();
        let all = BlockRange { start: 0, end: None };

        // A copy that is dropped midway, and then its session.
        let snapshot = remote.export("dropped").await.unwrap();
        let mut session = snapshot.open().await.unwrap();
        let tables = session.tables().await.unwrap();
        let large = tables.iter().find(|table| table.table.name == "large").unwrap();
        let plan = plan(large, CopyFormat::Text);
        assert!(session.hold_still(&tables).await.unwrap());
        let mut data = session.copy_range(large, all, &plan).await.unwrap();
        data.next().await.unwrap();
        drop(data);
        // What keeps the snapshot and its tables stays.
        wait_for(&spec, sessions, "2").await;
        assert!(transient(session.tables().await).contains("site hq"));
        drop(session);
        let mut session = snapshot.open().await.unwrap();
        assert!(session.hold_still(&tables).await.unwrap());
        let locks = "SELECT count(*) > 0 FROM pg_locks WHERE relation = 'large'::regclass";
        assert_eq!(value(&spec, locks).await, "t");

        // The snapshot: who reads it goes on, nobody else can begin.
        drop(snapshot);
        wait_for(&spec, slots, "0").await;
        assert!(!copied(session.as_mut(), large, all, &plan).await.is_empty());
        drop(session);
        wait_for(&spec, locks, "f").await;

        // The channel that keeps the snapshot ends at the other side.
        let snapshot = remote.export("cut off").await.unwrap();
        elsewhere.served.lock().unwrap().last().unwrap().abort();
        wait_for(&spec, slots, "0").await;
        let gone = transient(snapshot.open().await.map(drop));
        assert!(gone.contains("any more"), "{gone}");

        // The exporting connection is ended on the publisher.
        for source in [&remote as &dyn Source, &Direct::new(spec.clone())] {
            let snapshot = source.export("terminated").await.unwrap();
            let end = "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots";
            assert_eq!(value(&spec, end).await, "t");
            transient(snapshot.open().await.map(drop));
        }

        // Everything stops.
        let snapshot = remote.export("stopped").await.unwrap();
        let mut session = snapshot.open().await.unwrap();
        elsewhere.stop.send_replace(true);
        transient(session.tables().await);
        transient(remote.published_tables().await);
        wait_for(&spec, sessions, "0").await;
        elsewhere.until_at_work(0).await;
    });
}

/// A snapshot waits for transactions that are open, its walsender with its slot too. Whoever gives it
/// up, and asks again and again, must not take all of them that the server has.
#[test]
fn a_snapshot_that_is_given_up_while_it_waits_leaves_nothing_on_the_publisher() {
    let cluster = cluster(15);
    let spec = whole(&cluster);
    let slots = "SELECT count(*) FROM pg_replication_slots";
    Runtime::new().unwrap().block_on(async {
        let elsewhere = publish(&spec).await;
        let mut open = spec.connect(farshore_pg::Mode::Sql).await.unwrap();
        open.simple_query("BEGIN; UPDATE people SET name = 'open' WHERE id = 1").await.unwrap();
        let (direct, remote) = (Direct::new(spec.clone()), elsewhere.remote());
        for source in [&direct as &dyn Source, &remote] {
            tokio::select! {
                _ = source.export("given up") => panic!("it did not wait"),
                () = wait_for(&spec, slots, "1") => {}
            }
            wait_for(&spec, slots, "0").await;
        }
        open.simple_query("COMMIT").await.unwrap();
        direct.export("had").await.unwrap();
    });
}

#[test]
fn who_waits_for_a_lock_is_seen_and_who_has_it_is_not_waited_for() {
    let cluster = cluster(18);
    let spec = whole(&cluster);
    Runtime::new().unwrap().block_on(async {
        let elsewhere = publish(&spec).await;
        let snapshot = elsewhere.remote().export("locks").await.unwrap();
        let mut session = snapshot.open().await.unwrap();
        let tables = session.tables().await.unwrap();
        let people: Vec<PublishedTable> =
            tables.iter().filter(|table| table.table.name == "people").cloned().collect();
        assert!(session.hold_still(&people).await.unwrap());
        let mut other = spec.connect(farshore_pg::Mode::Sql).await.unwrap();
        let truncate = tokio::spawn(async move { other.simple_query("TRUNCATE people").await });
        await_in_the_way(&mut *session, people[0].oid).await;
        let mut second = snapshot.open().await.unwrap();
        assert!(!second.hold_still(&people).await.unwrap());
        session.close().await;
        assert!(!truncate.is_finished(), "the snapshot's tables are kept as they are");
        snapshot.close().await;
        truncate.await.unwrap().unwrap();
    });
}

/// What a publication has, a server says as of now, also in a snapshot: rows that came before the
/// table was published would be copied, and changes since then would be in no log.
#[test]
fn a_table_that_is_published_behind_a_snapshot_is_no_part_of_it() {
    for major in [15, 18] {
        let cluster = cluster(major);
        let spec = spec(&cluster, "some", &["public.orders"]);
        Runtime::new().unwrap().block_on(async {
            let elsewhere = publish(&spec).await;
            let (direct, remote) = (Direct::new(spec.clone()), elsewhere.remote());
            for (source, table) in [(&direct as &dyn Source, "people"), (&remote, "days_1")] {
                let names = |tables: Vec<PublishedTable>| -> Vec<String> {
                    tables.into_iter().map(|table| table.table.name).collect()
                };
                let before = names(source.published_tables().await.unwrap());
                let snapshot = source.export("joins").await.unwrap();
                let publication = spec.publication_name();
                value(&spec, &format!("ALTER PUBLICATION \"{publication}\" ADD TABLE {table}"))
                    .await;
                let mut session = snapshot.open().await.unwrap();
                assert_eq!(names(session.tables().await.unwrap()), before);
                session.close().await;
                snapshot.close().await;
                let snapshot = source.export("joined").await.unwrap();
                let mut session = snapshot.open().await.unwrap();
                assert_eq!(session.tables().await.unwrap().len(), before.len() + 1);
            }
        });
    }
}

#[test]
fn partitions_of_a_table_that_is_published_through_its_root_are_looked_at() {
    for major in [15, 18] {
        let cluster = cluster(major);
        cluster
            .execute_script(
                "CREATE TABLE parted (id integer PRIMARY KEY) PARTITION BY RANGE (id); \
                 CREATE TABLE low PARTITION OF parted FOR VALUES FROM (0) TO (10) \
                   PARTITION BY RANGE (id); \
                 CREATE TABLE lowest PARTITION OF low FOR VALUES FROM (0) TO (5)",
            )
            .unwrap();
        let rooted = spec(&cluster, "rooted", &["public.parted"]);
        let spec = PublicationSpec { via_partition_root: true, ..rooted };
        Runtime::new().unwrap().block_on(async {
            let elsewhere = publish(&spec).await;
            let snapshot = elsewhere.remote().export("partitions").await.unwrap();
            let mut session = snapshot.open().await.unwrap();
            let tables = session.tables().await.unwrap();
            assert!(tables.len() == 1 && tables[0].file_node != 0, "{tables:?}");
            assert!(session.hold_still(&tables).await.unwrap());
            let mut other = spec.connect(farshore_pg::Mode::Sql).await.unwrap();
            let truncate = tokio::spawn(async move { other.simple_query("TRUNCATE lowest").await });
            await_in_the_way(&mut *session, tables[0].oid).await;
            session.close().await;
            snapshot.close().await;
            truncate.await.unwrap().unwrap();
            let mut sql = spec.connect(farshore_pg::Mode::Sql).await.unwrap();
            let after = spec.published_tables(&mut sql).await.unwrap();
            assert_ne!(after[0].file_node, tables[0].file_node);
        });
    }
}

#[test]
fn a_partition_that_was_detached_and_attached_again_is_attached_otherwise() {
    for major in [15, 18] {
        let cluster = cluster(major);
        cluster
            .execute_script(
                "CREATE TABLE parted (id integer PRIMARY KEY) PARTITION BY RANGE (id); \
                 CREATE TABLE low PARTITION OF parted FOR VALUES FROM (0) TO (10) \
                   PARTITION BY RANGE (id); \
                 CREATE TABLE lowest PARTITION OF low FOR VALUES FROM (0) TO (5); \
                 CREATE TABLE high PARTITION OF parted FOR VALUES FROM (10) TO (20)",
            )
            .unwrap();
        let spec = spec(&cluster, "parts", &["public.parted"]);
        Runtime::new().unwrap().block_on(async {
            publish(&spec).await;
            let mut sql = spec.connect(farshore_pg::Mode::Sql).await.unwrap();
            let mut seen = Vec::new();
            for between in [
                "VACUUM (FULL, FREEZE) pg_inherits",
                "ALTER TABLE low DETACH PARTITION lowest; \
                 ALTER TABLE low ATTACH PARTITION lowest FOR VALUES FROM (0) TO (5)",
                "ALTER TABLE parted DETACH PARTITION low; \
                 ALTER TABLE parted ATTACH PARTITION low FOR VALUES FROM (0) TO (10)",
            ] {
                let tables = spec.published_tables(&mut sql).await.unwrap();
                let how = |name: &str| {
                    let table = tables.iter().find(|table| table.table.name == name).unwrap();
                    table.attached_by(table.membership).unwrap()
                };
                seen.push((how("lowest"), how("high")));
                for statement in between.split("; ") {
                    sql.simple_query(statement).await.unwrap();
                }
            }
            let tables = spec.published_tables(&mut sql).await.unwrap();
            let lowest = tables.iter().find(|table| table.table.name == "lowest").unwrap();
            let last = lowest.attached_by(lowest.membership).unwrap();
            assert_eq!(seen[0], seen[1], "rewriting a catalog changes nothing");
            assert!(seen[1].0 != seen[2].0 && seen[2].0 != last, "{seen:?} {last}");
            assert!(seen.iter().all(|(_, high)| *high == seen[0].1), "{seen:?}");
        });
    }
}
