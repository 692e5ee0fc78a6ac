//! Tables whose rows are found by other means than a plain primary key.

use anyhow::Result;
use farshore_tests::{Pair, both_ways};

#[test]
fn identity_by_index_and_by_all_columns() -> Result<()> {
    both_ways(|direction| {
        let schema = "
            CREATE TABLE by_index (a integer, b integer NOT NULL, c text, d text NOT NULL);
            CREATE UNIQUE INDEX by_index_key ON by_index (d, b);
            ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_key;
            CREATE TABLE keyed_by_other (id integer PRIMARY KEY, code text NOT NULL UNIQUE, v integer);
            ALTER TABLE keyed_by_other REPLICA IDENTITY USING INDEX keyed_by_other_code_key;
            CREATE TABLE bag (a integer, b text, c timestamptz);
            ALTER TABLE bag REPLICA IDENTITY FULL;
            CREATE TABLE full_with_key (id integer PRIMARY KEY, big text, v integer);
            ALTER TABLE full_with_key REPLICA IDENTITY FULL;
            ALTER TABLE full_with_key ALTER big SET STORAGE EXTERNAL;";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        let rows = "
            INSERT INTO by_index SELECT i, i % 10, 'c', 'd' || i FROM generate_series(1, 100) AS i;
            INSERT INTO keyed_by_other SELECT i, 'k' || i, 0 FROM generate_series(1, 100) AS i;
            INSERT INTO bag SELECT i % 3, nullif('b' || i % 2, 'b0'), NULL FROM generate_series(1, 60) AS i;
            INSERT INTO bag SELECT NULL, NULL, NULL FROM generate_series(1, 5);
            INSERT INTO full_with_key SELECT i, (SELECT string_agg(md5(i || ' ' || n), '')
              FROM generate_series(1, 300) AS n), i FROM generate_series(1, 20) AS i;";
        pair.publish(rows)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        for script in [
            "UPDATE by_index SET c = 'changed' WHERE a % 2 = 0",
            "UPDATE by_index SET b = b + 100, d = d || 'x' WHERE a % 3 = 0",
            "DELETE FROM by_index WHERE a % 5 = 0",
            "UPDATE keyed_by_other SET v = 1 WHERE id % 2 = 0",
            "UPDATE keyed_by_other SET id = id + 1000 WHERE id % 3 = 0",
            "UPDATE keyed_by_other SET code = code || '!' WHERE id % 5 = 0",
            "DELETE FROM keyed_by_other WHERE id % 7 = 0",
            // One of several equal rows, and then all of them.
            "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE a = 1 AND b IS NULL)",
            "UPDATE bag SET b = 'one' WHERE ctid = (SELECT max(ctid) FROM bag WHERE a = 2)",
            "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE a IS NULL)",
            "UPDATE bag SET a = NULL WHERE a = 0",
            "UPDATE bag SET c = '2024-01-01 00:00+00' WHERE a = 1",
            "INSERT INTO bag SELECT * FROM bag",
            "DELETE FROM bag WHERE a IS NULL",
            "UPDATE full_with_key SET v = -v WHERE id % 2 = 0",
            "UPDATE full_with_key SET id = id + 100 WHERE id % 3 = 0",
            "UPDATE full_with_key SET big = 'short' WHERE id % 5 = 0",
            "DELETE FROM full_with_key WHERE id % 7 = 0",
        ] {
            pair.publish(script)?;
        }
        pair.assert_equal(&["public"])?;
        // The identity changes while the stream runs.
        pair.on_both("ALTER TABLE by_index REPLICA IDENTITY FULL")?;
        pair.publish("UPDATE by_index SET c = NULL; DELETE FROM by_index WHERE a % 4 = 0")?;
        pair.on_both("ALTER TABLE bag ADD COLUMN id serial PRIMARY KEY")?;
        pair.publish("TRUNCATE bag; ALTER TABLE bag REPLICA IDENTITY DEFAULT")?;
        pair.publish(
            "INSERT INTO bag VALUES (1, 'x'), (2, 'y'); UPDATE bag SET a = 3 WHERE a = 2",
        )?;
        pair.assert_equal(&["public"])
    })
}

#[test]
fn rows_equal_by_operator_but_not_by_text_are_told_apart() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE bag (n numeric, i interval); \
             ALTER TABLE bag REPLICA IDENTITY FULL";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.publish(
            "INSERT INTO bag VALUES (1.0, '1 month'), (1.00, '30 days'), (1.000, '720 h')",
        )?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("DELETE FROM bag WHERE n::text = '1.000'")?;
        pair.publish("UPDATE bag SET n = 2 WHERE n::text = '1.00'")?;
        pair.assert_equal(&["public"])
    })
}

#[test]
fn full_identity_with_types_that_have_no_equality() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE bag (j json, p point, x integer); \
             ALTER TABLE bag REPLICA IDENTITY FULL";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.publish(
            "INSERT INTO bag VALUES ('{\"a\":1}', '(1,2)', 1), ('{\"a\": 1}', '(1,2)', 1)",
        )?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("UPDATE bag SET x = 2 WHERE j::text = '{\"a\": 1}'")?;
        pair.publish("DELETE FROM bag WHERE x = 1")?;
        pair.assert_equal(&["public"])
    })
}

#[test]
fn identity_always_columns_outside_the_key_take_updates() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE t (code text PRIMARY KEY, n bigint GENERATED ALWAYS AS IDENTITY, \
             v text, big text); ALTER TABLE t ALTER big SET STORAGE EXTERNAL";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        let insert = "INSERT INTO t (code, v, big) SELECT 'k' || i, 'v', \
             (SELECT string_agg(md5(i || ' ' || n), '') FROM generate_series(1, 300) AS n) \
             FROM generate_series(1, 20) AS i";
        pair.publish(insert)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("UPDATE t SET v = 'w' WHERE n % 2 = 0")?;
        pair.publish("UPDATE t SET n = DEFAULT WHERE n = 3")?;
        pair.publish("UPDATE t SET code = code || 'x' WHERE n = 4")?;
        pair.assert_equal(&["public"])
    })
}

#[test]
fn partitioned_tables_follow_by_partition() -> Result<()> {
    both_ways(|direction| {
        let schema = "
            CREATE TABLE m (id integer, at date, v text, PRIMARY KEY (id, at)) PARTITION BY RANGE (at);
            CREATE TABLE m_old PARTITION OF m FOR VALUES FROM (MINVALUE) TO ('2024-01-01');
            CREATE TABLE m_new PARTITION OF m FOR VALUES FROM ('2024-01-01') TO (MAXVALUE);";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        let rows =
            "INSERT INTO m SELECT i, date '2023-07-01' + i, 'v' FROM generate_series(1, 365) AS i";
        pair.publish(rows)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("UPDATE m SET v = 'w' WHERE id % 2 = 0")?;
        // From one partition to the other.
        pair.publish("UPDATE m SET at = at + 100 WHERE id % 3 = 0")?;
        pair.publish(
            "DELETE FROM m WHERE id % 5 = 0; INSERT INTO m VALUES (0, '2024-02-29', 'x')",
        )?;
        pair.assert_equal(&["public"])?;
        pair.publish("TRUNCATE m_old")?;
        pair.assert_equal(&["public"])
    })
}

#[test]
fn tables_without_columns_count() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE nothing (); CREATE TABLE only_generated (); \
             ALTER TABLE only_generated ADD g integer GENERATED ALWAYS AS (1) STORED";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        let insert =
            "INSERT INTO nothing DEFAULT VALUES; INSERT INTO only_generated DEFAULT VALUES";
        pair.publish(insert)?;
        pair.site.start()?;
        pair.await_arrival()?;
        pair.publish(insert)?;
        pair.await_arrival()?;
        assert_eq!(pair.subscriber_says("SELECT count(*) FROM nothing")?, "2");
        assert_eq!(pair.subscriber_says("SELECT count(*) FROM only_generated")?, "2");
        Ok(())
    })
}
