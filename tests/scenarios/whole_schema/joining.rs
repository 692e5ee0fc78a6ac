//! Tables and partitions that come and go while the rest streams. Nothing is restarted here.

use crate::definitions::assert_same;
use anyhow::{Result, ensure};
use farshore_tests::{DATABASE, Direction, Pair, both_ways};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

fn pair(direction: Direction, schema: &str, more: &str) -> Result<Pair> {
    let mut pair = Pair::bare(direction)?;
    pair.publish(schema)?;
    pair.add_publication("p", &["*.*"], more)?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    Ok(pair)
}

/// Waits until the publication has as many tables.
fn await_published(pair: &mut Pair, tables: i64) -> Result<()> {
    let mut publisher = pair.publisher.connect()?;
    pair.site.wait_for("the publication to change", SOON, || {
        let count: i64 =
            publisher.query_one("SELECT count(*) FROM pg_publication_tables", &[])?.get(0);
        Ok((count == tables).then_some(()))
    })
}

#[test]
fn new_tables_join_and_dropped_ones_leave_while_the_rest_streams() -> Result<()> {
    both_ways(|direction| {
        let schema =
            "CREATE TABLE t (id integer PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'x')";
        let mut pair = pair(direction, schema, "")?;
        pair.publish(
            "CREATE SCHEMA fresh; CREATE TYPE fresh.kind AS ENUM ('a', 'b'); \
             CREATE TABLE fresh.joins (id serial PRIMARY KEY, k fresh.kind DEFAULT 'a', t integer REFERENCES t); \
             CREATE INDEX ON fresh.joins (k); \
             INSERT INTO fresh.joins (t) SELECT 1 FROM generate_series(1, 300)",
        )?;
        pair.publish("INSERT INTO t VALUES (2, 'y')")?;
        pair.await_copy("joins")?;
        pair.publish(
            "UPDATE fresh.joins SET k = 'b', t = 2 WHERE id % 2 = 0; DELETE FROM t WHERE id = 9",
        )?;
        pair.assert_equal(&["public", "fresh"])?;
        pair.publish("DROP TABLE fresh.joins; INSERT INTO t VALUES (3, 'z')")?;
        await_published(&mut pair, 2)?;
        pair.publish("UPDATE t SET v = 'w'")?;
        pair.assert_equal(&["public"])?;
        ensure!(pair.subscriber_says("SELECT count(*) FROM fresh.joins")? == "300");
        Ok(())
    })
}

const PARTITIONED: &str = "
    CREATE TABLE p (id integer, r integer, v text, PRIMARY KEY (r, id)) PARTITION BY RANGE (r);
    CREATE INDEX p_v ON p (v);
    CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10);
    CREATE TABLE alone (v text, r integer NOT NULL, id integer NOT NULL, PRIMARY KEY (r, id));
    INSERT INTO p SELECT i, i % 10, 'v' FROM generate_series(1, 100) i;
    INSERT INTO alone SELECT 'v', 20 + i % 10, i FROM generate_series(1, 100) i;";

const NEW_PARTITION: &str = "
    CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20);
    INSERT INTO p SELECT i, 10 + i % 10, 'v' FROM generate_series(101, 200) i;
    UPDATE p SET v = 'w' WHERE id % 3 = 0; UPDATE p SET r = r + 10 WHERE r = 1;";

const ATTACH: &str = "
    ALTER TABLE p ATTACH PARTITION alone FOR VALUES FROM (20) TO (30);
    INSERT INTO p SELECT i, 20 + i % 10, 'new' FROM generate_series(201, 300) i;
    UPDATE p SET r = r + 10, v = 'moved' WHERE r = 12; DELETE FROM p WHERE r = 25;";

const DETACH: &str = "ALTER TABLE p DETACH PARTITION p1; \
    INSERT INTO p1 VALUES (1000, 5, 'by itself'); UPDATE p1 SET v = 'by itself' WHERE id % 2 = 0;";

#[test]
fn partitions_come_and_go_leaf_to_leaf() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction, PARTITIONED, "")?;
        pair.publish(NEW_PARTITION)?;
        pair.await_copy("p2")?;
        pair.assert_equal(&["public"])?;
        await_published(&mut pair, 4)?;
        pair.publish(ATTACH)?;
        pair.site.await_log("created partition public.alone", SOON)?;
        pair.assert_equal(&["public"])?;
        assert_same(&pair.publisher, &pair.subscriber, &["child", "index"])?;
        pair.publish(DETACH)?;
        pair.await_arrival()?;
        let rows = "SELECT md5(string_agg(t::text, ',' ORDER BY t::text)) FROM p1 t";
        ensure!(pair.publisher_says(rows)? == pair.subscriber_says(rows)?);
        Ok(())
    })
}

#[test]
fn partitions_come_and_go_through_the_root() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction, PARTITIONED, "publish_via_partition_root = true")?;
        pair.publish(NEW_PARTITION)?;
        pair.assert_equal(&["public"])?;
        pair.publish(ATTACH)?;
        pair.assert_equal(&["public"])?;
        assert_same(&pair.publisher, &pair.subscriber, &["child", "index"])
    })
}

/// Through the root, the target may be one table.
#[test]
fn a_partitioned_table_becomes_a_plain_one() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.publish(PARTITIONED)?;
        pair.subscriber.execute_script(
            "CREATE TABLE p (v text, id integer, r integer, PRIMARY KEY (r, id))",
        )?;
        pair.add_publication("p", &["public.p"], "publish_via_partition_root = true")?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        pair.site.start()?;
        pair.publish(NEW_PARTITION)?;
        pair.await_arrival()?;
        let rows = "SELECT md5(string_agg(concat_ws(',', id, r, v), ';' ORDER BY id, r, v)) FROM p";
        ensure!(pair.publisher_says(rows)? == pair.subscriber_says(rows)?);
        ensure!(pair.subscriber_says("SELECT to_regclass('public.p2') IS NULL")? == "t");
        Ok(())
    })
}
