//! Tables whose rows are found by other means than a plain primary key.

use anyhow::{Result, ensure};
use farshore_tests::{DATABASE, Direction, Pair, both_ways};
use std::time::Duration;

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
             v text, big text, o integer GENERATED ALWAYS AS IDENTITY); \
             ALTER TABLE t ALTER big SET STORAGE EXTERNAL";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        let insert = "INSERT INTO t (code, v, big) SELECT 'k' || i, 'v', \
             (SELECT string_agg(md5(i || ' ' || n), '') FROM generate_series(1, 300) AS n) \
             FROM generate_series(1, 20) AS i";
        pair.publish(insert)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        // What the target alone has of a row stays.
        pair.subscriber.execute_script("ALTER TABLE t ADD own text; UPDATE t SET own = code")?;
        pair.publish("UPDATE t SET v = 'w' WHERE n % 2 = 0")?;
        pair.publish("UPDATE t SET code = code || 'x' WHERE n = 4")?;
        pair.publish("UPDATE t SET v = 'z' WHERE n = 5; ALTER TABLE t REPLICA IDENTITY FULL")?;
        pair.publish("UPDATE t SET v = 'full' WHERE n = 6")?;
        pair.await_arrival()?;
        let own = pair.subscriber_says("SELECT count(own) FROM t")?;
        ensure!(own == "20", "{own} of 20 rows have what the target alone has");
        pair.subscriber.execute_script("ALTER TABLE t DROP own")?;
        pair.publish("UPDATE t SET n = DEFAULT WHERE n = 3; UPDATE t SET o = DEFAULT WHERE n = 8")?;
        pair.publish(
            "ALTER TABLE t REPLICA IDENTITY DEFAULT; UPDATE t SET n = DEFAULT WHERE n = 7; \
             UPDATE t SET o = DEFAULT, v = 'o' WHERE n = 9; \
             UPDATE t SET o = DEFAULT, n = DEFAULT WHERE n = 10",
        )?;
        pair.assert_equal(&["public"])
    })
}

/// PostgreSQL does not send generated columns, and lets them be in a replica identity (publishers
/// before 18).
#[test]
fn an_identity_that_is_not_sent_is_named() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, v text, \
             g integer GENERATED ALWAYS AS (id * 2) STORED NOT NULL); CREATE UNIQUE INDEX ON t (g)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.publish("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 10) AS i")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("ALTER TABLE t REPLICA IDENTITY USING INDEX t_g_idx")?;
        if pair.publish("UPDATE t SET v = 'w' WHERE id = 3").is_err() {
            return Ok(());
        }
        let line = pair.site.await_log(" stopped: ", Duration::from_secs(60))?;
        ensure!(line.contains("replica identity is made of generated columns"), "{line}");
        Ok(())
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

#[test]
fn keys_stored_out_of_line_and_unchanged() -> Result<()> {
    both_ways(|direction| {
        // A key of 2,500 bytes is stored out of line, and most updates leave it out.
        let schema = "
            CREATE TABLE by_key (a integer, k text, v integer, big text, PRIMARY KEY (a, k));
            CREATE TABLE whole (LIKE by_key); ALTER TABLE whole REPLICA IDENTITY FULL;
            ALTER TABLE by_key ALTER k SET STORAGE EXTERNAL, ALTER big SET STORAGE EXTERNAL;
            ALTER TABLE whole ALTER k SET STORAGE EXTERNAL, ALTER big SET STORAGE EXTERNAL;";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        let long = |bytes: u32| {
            format!(
                "(SELECT left(string_agg(md5(i || ' ' || n), ''), {bytes}) FROM generate_series(1, 300) AS n)"
            )
        };
        let rows = |from: u32| {
            format!(
                "INSERT INTO by_key SELECT i, {}, i, CASE WHEN i % 3 > 0 THEN {} END \
                 FROM generate_series({from}, {from} + 29) AS i; \
                 INSERT INTO whole SELECT * FROM by_key WHERE a >= {from};",
                long(2_500),
                long(9_000)
            )
        };
        pair.publish(&rows(0))?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish(&rows(100))?;
        for table in ["by_key", "whole"] {
            for change in [
                "SET v = -v WHERE a % 2 = 0",
                "SET a = a + 1000 WHERE a % 3 = 0",
                "SET k = 'short' WHERE a % 5 = 0",
                "SET k = repeat('x', 2600), v = 0 WHERE a % 7 = 0",
                "SET big = NULL WHERE a % 4 = 0",
                "SET big = big || 'x', a = -a WHERE a % 6 = 1",
                "SET v = v",
            ] {
                pair.publish(&format!("UPDATE {table} {change}"))?;
            }
            pair.publish(&format!("DELETE FROM {table} WHERE v % 4 = 1"))?;
        }
        pair.assert_equal(&["public"])
    })
}

#[test]
fn full_identity_with_types_whose_plain_name_means_a_length() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE bag (c char(5), b bit(7), v varchar(3), n numeric(9,3), x integer); \
             ALTER TABLE bag REPLICA IDENTITY FULL";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.publish(
            "INSERT INTO bag SELECT 'c' || i, i::bit(7), 'v' || i, i / 7.0, i \
             FROM generate_series(1, 60) AS i",
        )?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("UPDATE bag SET x = -x WHERE x % 2 = 0; DELETE FROM bag WHERE x % 5 = 0")?;
        pair.publish("UPDATE bag SET c = 'd', b = ~b, v = NULL WHERE x % 3 = 0")?;
        pair.assert_equal(&["public"])
    })
}

#[test]
fn full_identity_whose_values_the_target_fills_up() -> Result<()> {
    both_ways(|direction| {
        for batches in ["always", "never"] {
            let mut pair = Pair::bare(direction)?;
            let identity: String = ["keyed", "listed", "widened", "bag"]
                .map(|table| format!("ALTER TABLE {table} REPLICA IDENTITY FULL; "))
                .concat();
            pair.publish(&format!(
                "CREATE TABLE keyed (id integer PRIMARY KEY, amount numeric(10,2), code char(3)); \
                 CREATE TABLE listed (id integer PRIMARY KEY, amounts numeric(10,2)[]); \
                 CREATE TABLE widened (id integer PRIMARY KEY, n integer); \
                 CREATE TABLE bag (amount numeric(10,2), code char(3)); {identity} \
                 INSERT INTO keyed SELECT i, 1.5, 'a' FROM generate_series(1, 40) i; \
                 INSERT INTO listed SELECT i, '{{1.5}}' FROM generate_series(1, 40) i; \
                 INSERT INTO widened SELECT i, i FROM generate_series(1, 40) i; \
                 INSERT INTO bag SELECT i / 4, 'a' FROM generate_series(1, 40) i"
            ))?;
            pair.subscriber.execute_script(&format!(
                "CREATE TABLE keyed (id integer PRIMARY KEY, amount numeric(12,4), code char(5)); \
                 CREATE TABLE listed (id integer PRIMARY KEY, amounts numeric(12,4)[]); \
                 CREATE TABLE widened (id integer PRIMARY KEY, n numeric(12,2)); \
                 CREATE TABLE bag (amount numeric(12,4), code char(5)); {identity}"
            ))?;
            pair.add_publication("p", &["public.*"], "")?;
            let target = pair.subscriber.url(DATABASE);
            pair.add_subscription("s", "p", &target)?;
            if std::env::var_os("FARSHORE_BATCHES").is_none() {
                let wanted = format!("batches = \"{batches}\"");
                pair.site.replace("batches = \"auto\"", &wanted)?;
            }
            pair.site.start()?;
            pair.await_arrival()?;
            pair.publish("UPDATE keyed SET amount = 2 WHERE id = 1")?;
            pair.publish(
                "BEGIN; UPDATE keyed SET amount = amount + 1, code = 'b' WHERE id % 2 = 0; \
                 DELETE FROM keyed WHERE id % 5 = 0; \
                 UPDATE listed SET amounts = '{2.25}' WHERE id % 3 = 0; \
                 DELETE FROM listed WHERE id % 5 = 0; \
                 UPDATE widened SET n = -n WHERE id % 3 = 0; \
                 DELETE FROM widened WHERE id % 5 = 0; COMMIT; \
                 UPDATE bag SET code = 'bc' WHERE amount > 5; DELETE FROM bag WHERE amount < 3",
            )?;
            pair.await_arrival()?;
            for rows in [
                "SELECT string_agg(concat_ws(' ', id, amount::numeric(12,4), code::text), ';' \
                   ORDER BY id) FROM keyed",
                "SELECT string_agg(id || amounts::numeric(12,4)[]::text, ';' ORDER BY id) \
                 FROM listed",
                "SELECT string_agg(id || ' ' || n::numeric(12,2), ';' ORDER BY id) FROM widened",
                "SELECT string_agg(amount::numeric(12,4) || code::text, ';' \
                   ORDER BY amount, code) FROM bag",
            ] {
                assert_eq!(pair.subscriber_says(rows)?, pair.publisher_says(rows)?, "{batches}");
            }
            let log = pair.site.log();
            assert!(!log.contains("a batch was refused"), "{log}");
        }
        Ok(())
    })
}

#[test]
fn constraints_and_generated_columns() -> Result<()> {
    both_ways(|direction| {
        let schema = "
            CREATE EXTENSION btree_gist;
            CREATE TABLE seats (id integer PRIMARY KEY, place integer,
              UNIQUE (place) DEFERRABLE INITIALLY DEFERRED);
            CREATE TABLE lanes (id integer PRIMARY KEY, place integer UNIQUE DEFERRABLE INITIALLY IMMEDIATE);
            CREATE TABLE bookings (id integer PRIMARY KEY, room integer, during int4range,
              EXCLUDE USING gist (room WITH =, during WITH &&) DEFERRABLE INITIALLY DEFERRED);
            CREATE TABLE sums (id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, a integer,
              double integer GENERATED ALWAYS AS (a * 2) STORED,
              n integer GENERATED BY DEFAULT AS IDENTITY);";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        let rows = "
            INSERT INTO seats SELECT i, i FROM generate_series(1, 20) AS i;
            INSERT INTO lanes SELECT i, i FROM generate_series(1, 20) AS i;
            INSERT INTO bookings SELECT i, i % 3, int4range(i * 10, i * 10 + 9) FROM generate_series(1, 20) AS i;
            INSERT INTO sums (a) SELECT i FROM generate_series(1, 20) AS i;";
        pair.publish(rows)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("BEGIN; UPDATE seats SET place = 21 - place; COMMIT")?;
        pair.publish("UPDATE lanes SET place = 21 - place")?;
        pair.publish(
            "BEGIN; UPDATE bookings SET during = int4range(upper(during), upper(during) + 9); \
             UPDATE bookings SET room = (room + 1) % 3; COMMIT",
        )?;
        pair.publish(
            "UPDATE sums SET a = -a WHERE id % 2 = 0; UPDATE sums SET n = 100 + n; \
             INSERT INTO sums (id, a, n) OVERRIDING SYSTEM VALUE VALUES (1000, 5, -1); \
             UPDATE sums SET id = DEFAULT WHERE id = 1000; DELETE FROM sums WHERE id % 3 = 0",
        )?;
        pair.assert_equal(&["public"])
    })
}

#[test]
fn published_generated_columns_are_values_on_the_subscriber() -> Result<()> {
    // PostgreSQL 18 can publish them.
    let mut pair = Pair::bare(Direction::DOWN)?;
    pair.publish(
        "CREATE TABLE t (id integer PRIMARY KEY, a integer, s integer GENERATED ALWAYS AS (a * 2) STORED); \
         INSERT INTO t SELECT i, i FROM generate_series(1, 50) AS i; \
         CREATE PUBLICATION theirs FOR TABLE t, farshore_marks.mark WITH (publish_generated_columns = stored)",
    )?;
    pair.subscriber
        .execute_script("CREATE TABLE t (id integer PRIMARY KEY, a integer, s integer)")?;
    pair.add_publication("p", &["public.t"], "adopt_publication = \"theirs\"")?;
    let target = pair.subscriber.url(farshore_tests::DATABASE);
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.publish("INSERT INTO t VALUES (100, 100); UPDATE t SET a = -a WHERE id % 2 = 0")?;
    pair.assert_equal(&["public"])
}
