//! The publisher's tables are altered while their changes are carried.

use anyhow::{Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{Direction, Pair, both_ways};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

/// The subscription stops with `what` in its reason; the statement for the target is given back.
fn stops_with(pair: &Pair, what: &str) -> Result<()> {
    let line = pair.site.await_log(" stopped: ", SOON)?;
    ensure!(line.contains(what), "expected \"{what}\" in: {line}");
    Ok(())
}

fn mended(pair: &mut Pair, sql: &str) -> Result<()> {
    pair.site.stop()?;
    pair.subscriber.execute_script(sql)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])
}

#[test]
fn added_columns_follow_with_what_old_rows_have_in_them() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TYPE mood AS ENUM ('sad', 'it''s \"ok\"'); \
             CREATE TABLE t (id integer PRIMARY KEY, a text); \
             CREATE TABLE bag (a integer); ALTER TABLE bag REPLICA IDENTITY FULL; \
             CREATE TABLE rests (id integer PRIMARY KEY); \
             CREATE TABLE m (id integer PRIMARY KEY) PARTITION BY RANGE (id); \
             CREATE TABLE m1 PARTITION OF m FOR VALUES FROM (0) TO (100); \
             CREATE TABLE m2 PARTITION OF m FOR VALUES FROM (100) TO (200)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.publish(
            "INSERT INTO t SELECT i, 'a' FROM generate_series(1, 100) AS i; \
             INSERT INTO bag VALUES (1), (1), (NULL); INSERT INTO rests VALUES (1); \
             INSERT INTO m SELECT generate_series(0, 199, 10)",
        )?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("INSERT INTO t VALUES (101, 'before')")?;
        pair.publish(
            "BEGIN; INSERT INTO t VALUES (102, 'in between'); \
             ALTER TABLE t ADD COLUMN b integer NOT NULL DEFAULT 7; \
             ALTER TABLE t ALTER COLUMN b SET DEFAULT 8; INSERT INTO t VALUES (103, 'b'); \
             ALTER TABLE t ADD COLUMN \"C c\" mood[] DEFAULT '{sad,\"it''s \\\"ok\\\"\"}'; \
             UPDATE t SET b = 9 WHERE id < 50; INSERT INTO t VALUES (104, 'c', 10, '{}'); COMMIT",
        )?;
        pair.publish(
            "ALTER TABLE t ADD COLUMN d numeric(10,2) DEFAULT 1.50, ADD COLUMN e timestamptz \
             DEFAULT '2024-02-29 12:00+00', ADD COLUMN f text DEFAULT E'\\\\,\"{}''', ADD COLUMN g \
             integer; ALTER TABLE t ALTER COLUMN g SET DEFAULT 5; \
             INSERT INTO t (id) VALUES (105); UPDATE t SET e = NULL WHERE id = 1; \
             ALTER TABLE bag ADD COLUMN b text DEFAULT 'x'; DELETE FROM bag WHERE a IS NULL; \
             UPDATE bag SET b = 'y' WHERE ctid = (SELECT min(ctid) FROM bag)",
        )?;
        pair.assert_equal(&["public"])?;
        pair.publish(
            "ALTER TABLE m ADD COLUMN v integer DEFAULT 3; INSERT INTO m VALUES (5, 4), (105, 5); \
             UPDATE m SET v = 6 WHERE id % 20 = 0",
        )?;
        pair.assert_equal(&["public"])?;
        // Streamed before its commit, with a column that an aborted sub-transaction added; and the
        // node dies on the way.
        pair.publish(
            "BEGIN; INSERT INTO t SELECT i, repeat('s', 50) FROM generate_series(1000, 3000) AS i; \
             SAVEPOINT a; ALTER TABLE t ADD COLUMN nope integer; \
             INSERT INTO t (id, nope) SELECT i, i FROM generate_series(3001, 5000) AS i; \
             ROLLBACK TO a; ALTER TABLE t ADD COLUMN h text DEFAULT 'h'; \
             INSERT INTO t (id, h) SELECT i, repeat('d', 50) FROM generate_series(5001, 8000) AS i; \
             COMMIT; UPDATE t SET h = 'later' WHERE id < 10",
        )?;
        pair.site.kill9()?;
        pair.publish(
            "ALTER TABLE t ADD COLUMN i integer DEFAULT 1; UPDATE t SET i = 2 WHERE id < 9",
        )?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        // A column that is added where nothing changes does not get in the way.
        pair.publish("ALTER TABLE rests ADD COLUMN v integer")?;
        pair.await_arrival()?;
        pair.publish("INSERT INTO rests VALUES (2, 3)")?;
        pair.assert_equal(&["public"])
    })
}

/// What that makes of rows that are there is not in the log, so a target that would take the new
/// values as well as the old ones does not have the new rows.
#[test]
fn a_type_that_holds_less_stops_as_well() -> Result<()> {
    both_ways(|direction| {
        let schema =
            "CREATE TABLE t (id integer PRIMARY KEY, n numeric, d timestamp, v varchar(9))";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.publish(
            "INSERT INTO t SELECT i, i / 7.0, timestamp '2026-01-01 12:00:00.123456', 'v' || i \
             FROM generate_series(1, 100) AS i",
        )?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        // Nothing of the rows changes.
        pair.publish(
            "ALTER TABLE t ALTER COLUMN v TYPE varchar(20); UPDATE t SET v = 'w' WHERE id = 1",
        )?;
        pair.assert_equal(&["public"])?;
        for (alter, update) in [
            ("ALTER COLUMN n TYPE numeric(12,1)", "n = 1.5"),
            ("ALTER COLUMN d TYPE timestamp(0) without time zone", "v = 'x'"),
            ("ALTER COLUMN v TYPE character varying(7)", "v = 'y'"),
        ] {
            pair.publish(&format!("ALTER TABLE t {alter}; UPDATE t SET {update} WHERE id = 2"))?;
            stops_with(&pair, &format!("ALTER TABLE public.t {alter}"))?;
            mended(&mut pair, &format!("ALTER TABLE t {alter}"))?;
            pair.assert_equal(&["public"])?;
        }
        Ok(())
    })
}

/// Or it would come again after the target was altered, which has no place for it any more.
#[test]
fn what_came_before_an_alteration_is_there_when_it_stops() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, v text)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.publish("INSERT INTO t VALUES (0, 'copied')")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.site.stop()?;
        let altered = [
            "ALTER COLUMN v TYPE character varying(70)",
            "ALTER COLUMN v TYPE character varying(60)",
            "ALTER COLUMN v TYPE character varying(50)",
        ];
        pair.publish("INSERT INTO t VALUES (1, 'before')")?;
        for (id, alter) in (2..).step_by(2).zip(altered) {
            pair.publish(&format!("ALTER TABLE t {alter}"))?;
            pair.publish(&format!("INSERT INTO t VALUES ({id}, 'between')"))?;
            pair.publish(&format!("INSERT INTO t VALUES ({id} + 1, 'between')"))?;
        }
        pair.site.start()?;
        for (rows, alter) in (2..).step_by(2).zip(altered) {
            stops_with(&pair, &format!("ALTER TABLE public.t {alter}"))?;
            let there = pair.subscriber_says("SELECT count(*) FROM t")?;
            ensure!(there == rows.to_string(), "{there} rows before {alter}");
            pair.site.stop()?;
            pair.subscriber.execute_script(&format!("ALTER TABLE t {alter}"))?;
            pair.site.start()?;
        }
        pair.assert_equal(&["public"])
    })
}

/// With `follow_ddl = "stop"`, as where nobody knows which column is which.
#[test]
fn renamed_columns_stop_with_the_sql_where_they_are_not_to_follow() -> Result<()> {
    both_ways(|direction| {
        let schema =
            "CREATE TABLE t (id integer PRIMARY KEY, a text, b integer NOT NULL, c integer)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.site.replace("[subscription.s]", "[subscription.s]\nfollow_ddl = \"stop\"")?;
        pair.publish("INSERT INTO t SELECT i, 'a', i, i FROM generate_series(1, 100) AS i")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;

        pair.publish("ALTER TABLE t RENAME COLUMN c TO z; UPDATE t SET z = -z WHERE id < 10")?;
        stops_with(&pair, "ALTER TABLE public.t RENAME COLUMN c TO z")?;
        mended(&mut pair, "ALTER TABLE t RENAME COLUMN c TO z")?;

        // In front of others: each column has its place.
        pair.publish(
            "ALTER TABLE t RENAME a TO y; ALTER TABLE t RENAME b TO x; UPDATE t SET y = 'r'",
        )?;
        let rename = "ALTER TABLE public.t RENAME COLUMN a TO y; \
                      ALTER TABLE public.t RENAME COLUMN b TO x";
        stops_with(&pair, rename)?;
        mended(&mut pair, rename)?;
        pair.assert_equal(&["public"])?;
        // The target first.
        pair.subscriber
            .execute_script("ALTER TABLE t RENAME y TO a; ALTER TABLE t RENAME x TO b")?;
        pair.publish(
            "ALTER TABLE t RENAME y TO a; ALTER TABLE t RENAME x TO b; UPDATE t SET a = 'a'",
        )?;
        pair.assert_equal(&["public"])?;

        Ok(())
    })
}

/// With `follow_ddl = "stop"`: what rows have in them that were there is in the SQL, and columns of a
/// partition are altered at its root.
#[test]
fn new_columns_are_told_with_what_rows_have_in_them() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, a integer); \
         CREATE TABLE p (id integer PRIMARY KEY, a integer) PARTITION BY RANGE (id); \
         CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)";
    let mut pair = Pair::new(Direction::UP, &["public.*"], schema)?;
    pair.site.replace("[subscription.s]", "[subscription.s]\nfollow_ddl = \"stop\"")?;
    pair.publish("INSERT INTO t VALUES (1, 1), (2, 2); INSERT INTO p VALUES (1, 1), (2, 2)")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    for (statement, sql) in [
        (
            "ALTER TABLE t ADD c integer NOT NULL DEFAULT 7, ADD d text; INSERT INTO t VALUES (3)",
            "ALTER TABLE public.t ADD COLUMN c integer DEFAULT '7'::integer; \
             ALTER TABLE public.t ADD COLUMN d text",
        ),
        (
            "ALTER TABLE p ADD c text DEFAULT 'it''s'; INSERT INTO p VALUES (3)",
            "ALTER TABLE public.p ADD COLUMN c text DEFAULT 'it''s'::text",
        ),
        (
            "ALTER TABLE p ALTER a TYPE bigint; INSERT INTO p VALUES (4)",
            "ALTER TABLE public.p ALTER COLUMN a TYPE bigint",
        ),
        (
            "ALTER TABLE p RENAME a TO z; INSERT INTO p VALUES (5)",
            "ALTER TABLE public.p RENAME COLUMN a TO z",
        ),
    ] {
        pair.publish(statement)?;
        stops_with(&pair, sql)?;
        mended(&mut pair, sql)?;
        pair.assert_equal(&["public"])?;
    }
    Ok(())
}

#[test]
fn what_cannot_be_followed_stops_with_the_sql_that_mends_it() -> Result<()> {
    both_ways(|direction| {
        let schema =
            "CREATE TABLE t (id integer PRIMARY KEY, a text, b integer NOT NULL, c integer)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.publish("INSERT INTO t SELECT i, 'a', i, i FROM generate_series(1, 100) AS i")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;

        pair.publish("ALTER TABLE t RENAME c TO z; UPDATE t SET z = -z WHERE id < 10")?;
        pair.assert_equal(&["public"])?;
        pair.publish(
            "ALTER TABLE t ALTER COLUMN z TYPE numeric(12,2); UPDATE t SET z = 1.25 WHERE id < 5",
        )?;
        stops_with(&pair, "ALTER TABLE public.t ALTER COLUMN z TYPE numeric(12,2)")?;
        mended(&mut pair, "ALTER TABLE t ALTER COLUMN z TYPE numeric(12,2)")?;

        pair.publish("ALTER TABLE t DROP COLUMN b; INSERT INTO t VALUES (1000, 'new', 5)")?;
        stops_with(&pair, "ALTER TABLE public.t ALTER COLUMN b DROP NOT NULL")?;
        pair.site.stop()?;
        pair.subscriber.execute_script("ALTER TABLE t ALTER COLUMN b DROP NOT NULL")?;
        pair.site.start()?;
        pair.await_arrival()?;
        // What was dropped is left, and is nobody's any more: the next column is simply added.
        pair.publish("ALTER TABLE t ADD COLUMN d integer DEFAULT 4; UPDATE t SET a = 'd'")?;
        pair.await_arrival()?;
        ensure!(pair.subscriber_says("SELECT count(b) FROM t")? == "100");
        pair.subscriber.execute_script("ALTER TABLE t DROP COLUMN b")?;
        pair.assert_equal(&["public"])?;

        // Each row has a value of its own, and none is in the log.
        pair.publish(
            "ALTER TABLE t ADD COLUMN r double precision DEFAULT random(); \
             UPDATE t SET a = 'r' WHERE id = 1",
        )?;
        stops_with(&pair, "are not in the log")?;
        let columns =
            "SELECT count(*) FROM pg_attribute WHERE attrelid = 't'::regclass AND attname = 'r'";
        ensure!(pair.subscriber_says(columns)? == "0", "nothing of it is there");
        Ok(())
    })
}

/// What a column was filled with may be on the publisher alone, although nothing of the column says
/// so any more.
#[test]
fn a_column_that_a_rewrite_has_filled_stops_without_its_default_too() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE SEQUENCE filler; \
             CREATE DOMAIN filled AS bigint DEFAULT nextval('public.filler') CHECK (VALUE > 0); \
             CREATE TABLE t0 (id integer PRIMARY KEY); CREATE TABLE t1 (id integer PRIMARY KEY); \
             CREATE TABLE t2 (id integer PRIMARY KEY)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        for table in ["t0", "t1", "t2"] {
            pair.publish(&format!("INSERT INTO {table} SELECT generate_series(1, 100)"))?;
        }
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        for (table, add, then) in [
            ("t0", "bigint NOT NULL DEFAULT nextval('filler')", "DROP DEFAULT"),
            ("t1", "integer GENERATED ALWAYS AS IDENTITY", "DROP IDENTITY"),
            ("t2", "filled", "DROP DEFAULT"),
        ] {
            pair.publish(&format!(
                "BEGIN; ALTER TABLE {table} ADD COLUMN c {add}; ALTER TABLE {table} ALTER c {then}; \
                 COMMIT; INSERT INTO {table} VALUES (101, 7)"
            ))?;
            stops_with(&pair, "column c is new, and its values in the rows")?;
            let rows = pair.publisher_says(&format!(
                "SELECT string_agg(format('(%s, %s)', id, c), ',') FROM {table} WHERE id <= 100"
            ))?;
            mended(
                &mut pair,
                &format!(
                    "ALTER TABLE {table} ADD COLUMN c bigint; UPDATE {table} SET c = v \
                     FROM (VALUES {rows}) AS filled (id, v) WHERE filled.id = {table}.id"
                ),
            )?;
        }
        Ok(())
    })
}

/// A domain on the target has a default of its own.
#[test]
fn an_added_column_is_not_filled_by_the_targets_domain() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE DOMAIN score AS integer; CREATE TABLE t (id integer PRIMARY KEY)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.subscriber.execute_script("ALTER DOMAIN score SET DEFAULT 5")?;
        pair.publish("INSERT INTO t SELECT generate_series(1, 10)")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("ALTER TABLE t ADD COLUMN s score; INSERT INTO t VALUES (11, 3)")?;
        pair.assert_equal(&["public"])
    })
}

/// A type that is made again under the name of the old one looks like it on the target.
#[test]
fn another_type_of_the_same_name_stops() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TYPE st AS ENUM ('new', 'paid', 'void'); \
             CREATE DOMAIN mail AS text; \
             CREATE TABLE t (id integer PRIMARY KEY, s st, m mail, note text)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.publish("INSERT INTO t SELECT i, 'void', 'A@b' FROM generate_series(1, 10) AS i")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        let swap = "ALTER TYPE st RENAME TO st_old; CREATE TYPE st AS ENUM ('new', 'paid'); \
             ALTER TABLE t ALTER s TYPE st \
               USING (CASE s::text WHEN 'void' THEN 'new' ELSE s::text END)::st; \
             DROP TYPE st_old";
        pair.publish(&format!("{swap}; UPDATE t SET note = 'x' WHERE id = 1"))?;
        stops_with(&pair, "column s has another type, public.st")?;
        mended(&mut pair, swap)?;
        let to_text = "ALTER TABLE t ALTER m TYPE text USING lower(m)";
        pair.publish(&format!("{to_text}; UPDATE t SET note = 'y' WHERE id = 2"))?;
        stops_with(&pair, "column m has another type, text")?;
        mended(&mut pair, to_text)?;
        // And back: what was noted of that column before it was text is no reason to stop.
        pair.on_both("ALTER TABLE t ALTER m TYPE mail")?;
        pair.publish("UPDATE t SET note = 'z' WHERE id = 3")?;
        pair.assert_equal(&["public"])?;
        // A label more is no other type.
        pair.on_both("ALTER TYPE st ADD VALUE 'late'")?;
        pair.publish("INSERT INTO t VALUES (11, 'late', 'm'); ALTER TABLE t ADD COLUMN more st")?;
        pair.publish("UPDATE t SET more = s")?;
        pair.assert_equal(&["public"])
    })
}

/// Added like a new one, it would be empty in the rows that are there.
#[test]
fn a_column_of_another_type_that_the_target_has_lost_stops() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, v integer)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.publish("INSERT INTO t SELECT i, i FROM generate_series(1, 10) AS i")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.site.stop()?;
        pair.subscriber.execute_script("ALTER TABLE t DROP COLUMN v")?;
        pair.publish("ALTER TABLE t ALTER v TYPE text; UPDATE t SET v = 'x' WHERE id = 1")?;
        pair.site.start()?;
        stops_with(&pair, "column v has another type")
    })
}

#[test]
fn columns_are_not_followed_where_that_is_not_wanted() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, a text)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.site.add("follow_ddl = \"stop\"")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("ALTER TABLE t ADD COLUMN b varchar(20); INSERT INTO t VALUES (1, 'a', 'b')")?;
        stops_with(&pair, "ALTER TABLE public.t ADD COLUMN b character varying(20)")?;
        mended(&mut pair, "ALTER TABLE t ADD COLUMN b varchar(20)")
    })
}

#[test]
fn dropped_columns_follow_where_that_is_wanted() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, a text, b integer NOT NULL, \"C c\" text); \
             CREATE TABLE seen (id integer PRIMARY KEY, v text); \
             CREATE TABLE m (id integer PRIMARY KEY, v text) PARTITION BY RANGE (id); \
             CREATE TABLE m1 PARTITION OF m FOR VALUES FROM (0) TO (100); \
             CREATE TABLE m2 PARTITION OF m FOR VALUES FROM (100) TO (200)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.site.add("follow_ddl = \"add-drop\"")?;
        pair.subscriber.execute_script(
            "ALTER TABLE t ADD own text DEFAULT 'ours'; CREATE VIEW v AS SELECT v FROM seen",
        )?;
        pair.publish(
            "INSERT INTO t SELECT i, 'a', i, 'c' FROM generate_series(1, 50) AS i; \
             INSERT INTO seen VALUES (1, 'v'); INSERT INTO m SELECT i, 'm' FROM generate_series(0, 199) i",
        )?;
        pair.site.start()?;
        pair.await_arrival()?;
        // With changes before and after it, in one transaction; and with a column that comes.
        pair.publish(
            "BEGIN; UPDATE t SET b = -b; ALTER TABLE t DROP COLUMN b; INSERT INTO t VALUES (51, 'a', 'c'); \
             ALTER TABLE t DROP COLUMN \"C c\"; UPDATE t SET a = 'x' WHERE id < 9; COMMIT; \
             ALTER TABLE t ADD d integer DEFAULT 3; UPDATE t SET d = 4 WHERE id = 1; \
             ALTER TABLE m DROP COLUMN v; DELETE FROM m WHERE id % 7 = 0",
        )?;
        pair.await_arrival()?;
        let columns = "SELECT string_agg(attname, ',' ORDER BY attname) FROM pg_attribute \
             WHERE attrelid IN ('t'::regclass, 'm'::regclass) AND attnum > 0 AND NOT attisdropped";
        let there = pair.subscriber_says(columns)?;
        ensure!(there == "a,d,id,id,own", "{there}");
        for rows in ["(SELECT id, a, d FROM t ORDER BY id)", "(SELECT * FROM m ORDER BY id)"] {
            let rows = format!("SELECT md5(string_agg(r::text, ';')) FROM {rows} r");
            ensure!(pair.publisher_says(&rows)? == pair.subscriber_says(&rows)?, "{rows}");
        }
        // What the target needs is not dropped, and not passed over.
        pair.publish("ALTER TABLE seen DROP COLUMN v; INSERT INTO seen VALUES (2)")?;
        stops_with(&pair, "refused to drop it")?;
        pair.site.stop()?;
        pair.subscriber.execute_script("DROP VIEW v")?;
        pair.site.start()?;
        pair.await_arrival()?;
        ensure!(pair.subscriber_says("SELECT count(*) FROM seen")? == "2");
        // Nor behind others.
        pair.publish("ALTER TABLE seen ADD COLUMN v text; INSERT INTO seen VALUES (3, 'v')")?;
        pair.await_arrival()?;
        pair.subscriber.execute_script("CREATE VIEW v AS SELECT v FROM seen")?;
        pair.site.stop()?;
        pair.publish("INSERT INTO seen VALUES (4, 'v')")?;
        pair.publish("ALTER TABLE seen DROP COLUMN v; INSERT INTO seen VALUES (5)")?;
        pair.publish("INSERT INTO seen VALUES (6)")?;
        pair.site.start()?;
        stops_with(&pair, "refused to drop it")?;
        ensure!(pair.subscriber_says("SELECT count(*) FROM seen")? == "4");
        pair.site.stop()?;
        pair.subscriber.execute_script("DROP VIEW v")?;
        pair.site.start()?;
        pair.await_arrival()?;
        let rows = "SELECT string_agg(s::text, ' ' ORDER BY id) FROM seen s";
        ensure!(pair.subscriber_says(rows)? == "(1) (2) (3) (4) (5) (6)");
        Ok(())
    })
}

/// Whoever changes definitions holds locks. To learn of one table's columns must neither wait for
/// another table's lock nor take one: two sessions that lock several tables in different order end
/// in a deadlock, and it is the ALTER of the publisher's owner that may be ended.
#[test]
fn definitions_are_learned_beside_other_peoples_locks() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, a text); \
             CREATE TABLE m (id integer PRIMARY KEY, v text) PARTITION BY RANGE (id); \
             CREATE TABLE m1 PARTITION OF m FOR VALUES FROM (0) TO (100); \
             CREATE TABLE m2 PARTITION OF m FOR VALUES FROM (100) TO (200)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.site.add("follow_ddl = \"add\"")?;
        pair.publish("INSERT INTO t VALUES (1, 'a'); INSERT INTO m VALUES (1, 'm'), (150, 'm')")?;
        pair.site.start()?;
        pair.await_arrival()?;
        // The definition that is learned is of the tables that are locked, too.
        pair.publish(
            "ALTER TABLE m ADD w integer DEFAULT 7; ALTER TABLE t ADD b integer DEFAULT 3",
        )?;
        let mut owner = pair.publisher.connect()?;
        owner.batch_execute(
            "BEGIN; LOCK TABLE m, m1, m2 IN ACCESS EXCLUSIVE MODE; \
             UPDATE m SET v = 'changed' WHERE id = 1",
        )?;
        pair.publish("UPDATE t SET a = 'changed'")?;
        pair.await_arrival()?;
        ensure!(pair.subscriber_says("SELECT a || b FROM t")? == "changed3");
        owner.batch_execute("COMMIT; BEGIN; LOCK TABLE m2, m1 IN ACCESS EXCLUSIVE MODE")?;
        pair.publish("SELECT pg_logical_emit_message(true, 'test', '')")?;
        pair.await_arrival()?;
        ensure!(pair.subscriber_says("SELECT v || w FROM m WHERE id = 1")? == "changed7");
        // A table that joins is copied once the locks are gone, whoever could not be asked before.
        pair.on_both("CREATE TABLE later (id integer PRIMARY KEY)")?;
        // By Farshore itself it would join when the locks are gone: to add it locks all others.
        pair.publish("ALTER PUBLICATION farshore_p ADD TABLE later")?;
        pair.publish("INSERT INTO later SELECT generate_series(1, 100)")?;
        if direction.publisher >= 16 {
            pair.site.await_log("does not say which tables it publishes", SOON)?;
        }
        owner.batch_execute("ROLLBACK")?;
        pair.await_copy("later")?;
        pair.assert_equal(&["public"])
    })
}

/// Definitions that come back, at once and after the fact.
#[test]
fn columns_come_and_go_again() -> Result<()> {
    both_ways(|direction| {
        for stopped in [false, true] {
            let schema = "CREATE TABLE t (id integer PRIMARY KEY, a text)";
            let mut pair = Pair::new(direction, &["public.*"], schema)?;
            pair.site.add("follow_ddl = \"add-drop\"")?;
            pair.publish("INSERT INTO t SELECT i, 'a' FROM generate_series(1, 50) AS i")?;
            pair.site.start()?;
            pair.assert_equal(&["public"])?;
            for round in 1..=3 {
                let changes = [
                    format!(
                        "ALTER TABLE t ADD COLUMN c integer DEFAULT {round}; UPDATE t SET a = 'c' WHERE id < 5"
                    ),
                    "ALTER TABLE t DROP COLUMN c; UPDATE t SET a = 'd' WHERE id < 9".to_owned(),
                ];
                if stopped {
                    pair.site.stop()?;
                }
                for change in changes {
                    pair.publish(&change)?;
                    if !stopped {
                        pair.await_arrival()?;
                    }
                }
                if stopped {
                    pair.publish(
                        "ALTER TABLE t ADD COLUMN c integer; UPDATE t SET c = id WHERE id < 20",
                    )?;
                    pair.site.start()?;
                }
                pair.assert_equal(&["public"])?;
                if stopped {
                    pair.publish("ALTER TABLE t DROP COLUMN c; INSERT INTO t VALUES (1000 + (SELECT count(*) FROM t))")?;
                    pair.await_arrival()?;
                }
            }
        }
        Ok(())
    })
}

/// A partition that left its table on the publisher, and tables that inherit.
#[test]
fn a_column_is_dropped_where_it_was_dropped_and_nowhere_else() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE m (id integer PRIMARY KEY, v text) PARTITION BY RANGE (id); \
             CREATE TABLE m1 PARTITION OF m FOR VALUES FROM (0) TO (100); \
             CREATE TABLE m2 PARTITION OF m FOR VALUES FROM (100) TO (200); \
             CREATE TABLE parent (id integer PRIMARY KEY, v text); \
             CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.site.add("follow_ddl = \"add-drop\"")?;
        pair.publish(
            "INSERT INTO m SELECT i, 'm' FROM generate_series(0, 199) i; \
             INSERT INTO parent VALUES (1, 'p'); INSERT INTO child VALUES (2, 'c')",
        )?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("ALTER TABLE ONLY parent DROP COLUMN v; INSERT INTO parent VALUES (3)")?;
        pair.publish("UPDATE child SET v = 'd'")?;
        pair.assert_equal(&["public"])?;
        pair.publish(
            "ALTER TABLE m DETACH PARTITION m1; ALTER TABLE m1 DROP COLUMN v; \
             INSERT INTO m VALUES (200 - 1 - 100 + 50, 'x') ON CONFLICT DO NOTHING; \
             DELETE FROM m1 WHERE id = 1",
        )?;
        stops_with(&pair, "ALTER TABLE public.m DETACH PARTITION public.m1")?;
        let kept = pair.subscriber_says("SELECT count(v) FROM m")?;
        ensure!(kept == "200", "{kept}");
        mended(&mut pair, "ALTER TABLE m DETACH PARTITION m1")
    })
}

/// Until everything is there, the subscription stops again and again for `what`; each time the
/// statement in its reason is run.
pub fn mended_as_told(pair: &mut Pair, what: &str) -> Result<()> {
    let mark = pair.mark()?.to_string();
    let mut stops = 0;
    wait_until("the subscription to be mended", SOON, &[&pair.site.log_path()], || {
        let arrived = "SELECT coalesce(max(id), 0) FROM farshore_marks.mark";
        let status = pair.site.status()?;
        let subscription = &status["subscriptions"][0];
        if subscription["state"] != "stopped" {
            return Ok((pair.subscriber_says(arrived)? == mark).then_some(()));
        }
        let error = subscription["error"].as_str().unwrap_or_default().to_owned();
        ensure!(error.contains(what), "expected \"{what}\" in: {error}");
        ensure!(
            error.contains("--table public.t") || error.contains("--table public.u"),
            "{error}"
        );
        let (_, table) = error.rsplit_once("--table ").unwrap_or_default();
        let resync = pair.site.verb("resync", &["--subscription", "s", "--table", table])?;
        ensure!(resync.code == Some(0), "{resync:?}");
        pair.site.verb("resume", &["--subscription", "s"])?;
        stops += 1;
        Ok(None)
    })?;
    ensure!(stops > 0, "nothing was noticed");
    pair.site.restart()?;
    pair.assert_equal(&["public"])
}

/// Statements go by name: changes would go to the rows of the table that had it before.
#[test]
fn another_table_under_a_name_is_noticed() -> Result<()> {
    let swap = "BEGIN; ALTER TABLE t RENAME TO x; ALTER TABLE u RENAME TO t; \
         ALTER TABLE x RENAME TO u; COMMIT";
    for (patterns, swaps) in [("public.*", 1), ("public.t, public.u", 1), ("public.*", 2)] {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, a text); \
             CREATE TABLE u (id integer PRIMARY KEY, a text)";
        let patterns: Vec<&str> = patterns.split(", ").collect();
        let mut pair = Pair::new(Direction::UP, &patterns, schema)?;
        pair.publish(
            "INSERT INTO t SELECT i, 't' FROM generate_series(1, 5) i; \
             INSERT INTO u SELECT i, 'u' FROM generate_series(1, 8) i",
        )?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("INSERT INTO t VALUES (50, 'x'); INSERT INTO u VALUES (50, 'x')")?;
        pair.await_arrival()?;
        if swaps == 2 {
            pair.site.stop()?;
        }
        for n in 0..swaps {
            pair.publish(&format!(
                "{swap}; INSERT INTO t VALUES (10{n}, 'x'); UPDATE t SET a = 'new' WHERE id = 2; \
                 INSERT INTO u VALUES (10{n}, 'z')"
            ))?;
        }
        if swaps == 2 {
            pair.site.start()?;
        }
        let line = pair.site.await_log(" stopped: ", SOON)?;
        if line.contains("has rows already") {
            mended(&mut pair, "TRUNCATE t, u")?;
        } else {
            mended_as_told(&mut pair, "is another one than was copied")?;
        }
        pair.publish("UPDATE t SET a = 'last'; DELETE FROM u WHERE id = 3")?;
        pair.assert_equal(&["public"])?;
    }
    Ok(())
}

/// What is changed under another name is passed over, and lacking once the table has its name back:
/// whether anything is changed under that one or not, and in one transaction too. A name that does
/// not come back holds nothing up.
#[test]
fn a_table_that_had_another_name_for_a_while_is_noticed() -> Result<()> {
    let away = "ALTER TABLE t RENAME TO base; ALTER INDEX t_pkey RENAME TO base_pkey; \
                CREATE VIEW t AS SELECT * FROM base;";
    let change = "DELETE FROM t WHERE id = 3; INSERT INTO t VALUES (60, 'away');";
    let back = "DROP VIEW t; ALTER TABLE base RENAME TO t;";
    let here = "INSERT INTO t VALUES (70, 'here'); INSERT INTO u VALUES (70, 'here');";
    let at_once = format!("BEGIN; {here} {away} {change} {back} UPDATE t SET a = 'back'; COMMIT");
    let asleep = format!("{here} {away} {change} {back} UPDATE t SET a = 'back' WHERE id = 4");
    for (patterns, case) in [
        ("public.t, public.u", ""),
        ("public.*", ""),
        ("public.t, public.u", &*at_once),
        ("public.t, public.u", &*asleep),
        ("public.*", &*asleep),
    ] {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, a text); \
             CREATE TABLE u (id integer PRIMARY KEY, a text)";
        let patterns: Vec<&str> = patterns.split(", ").collect();
        let mut pair = Pair::new(Direction::UP, &patterns, schema)?;
        pair.publish("INSERT INTO t SELECT i, 't' FROM generate_series(1, 5) i")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("INSERT INTO t VALUES (50, 'x'); INSERT INTO u VALUES (50, 'x')")?;
        pair.await_arrival()?;
        if case == asleep {
            pair.site.stop()?;
            pair.publish(case)?;
            pair.site.start()?;
        } else if case == at_once {
            pair.publish(case)?;
        } else {
            pair.publish(&format!("{away} {change} INSERT INTO u VALUES (80, 'y')"))?;
            pair.await_arrival()?;
            pair.site.restart()?;
            pair.publish("INSERT INTO u VALUES (81, 'y'); UPDATE t SET a = 'late' WHERE id = 1")?;
            pair.await_arrival()?;
            ensure!(pair.subscriber_says("SELECT count(*) FROM u")? == "3");
            pair.publish(back)?;
        }
        pair.site.await_log(" stopped: ", SOON)?;
        mended_as_told(&mut pair, "t was called public.base for a while")?;
        pair.publish("UPDATE t SET a = 'last'; DELETE FROM u WHERE id = 50")?;
        pair.assert_equal(&["public"])?;
    }
    Ok(())
}

/// Names alone do not tell that one came back, nor, where columns are not to be renamed on the target,
/// that they were crosswise.
#[test]
fn columns_that_change_places_are_noticed() -> Result<()> {
    let crossed = [
        (
            "ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b",
            "stop",
        ),
        ("ALTER TABLE t RENAME a TO c; ALTER TABLE t ADD a integer", "stop"),
        ("ALTER TABLE t DROP a; ALTER TABLE t ADD a integer", "add"),
    ];
    for (alter, follow) in crossed {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, a integer, b integer)";
        let mut pair = Pair::new(Direction::DOWN, &["public.*"], schema)?;
        let follow = format!("[subscription.s]\nfollow_ddl = \"{follow}\"");
        pair.site.replace("[subscription.s]", &follow)?;
        pair.publish("INSERT INTO t SELECT i, i, -i FROM generate_series(1, 50) i")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish(&format!("BEGIN; {alter}; COMMIT; INSERT INTO t VALUES (100, 1, 2)"))?;
        if alter.contains("RENAME a TO c") {
            pair.subscriber.execute_script("ALTER TABLE t ADD c integer")?;
        }
        mended_as_told(&mut pair, "stands in another place than before")?;
    }
    Ok(())
}

/// It was left on the target with what was in it.
#[test]
fn a_column_that_was_dropped_and_comes_back_is_noticed() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, a integer, b integer)";
    let mut pair = Pair::new(Direction::UP, &["public.*"], schema)?;
    pair.publish("INSERT INTO t SELECT i, i, -i FROM generate_series(1, 50) i")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.publish("ALTER TABLE t DROP b; INSERT INTO t VALUES (100, 1)")?;
    pair.await_arrival()?;
    pair.publish("ALTER TABLE t ADD b integer DEFAULT 7; INSERT INTO t VALUES (101, 1, 2)")?;
    stops_with(&pair, "ALTER TABLE public.t DROP COLUMN b")?;
    mended(&mut pair, "ALTER TABLE public.t DROP COLUMN b")?;
    pair.publish("ALTER TABLE t DROP b; INSERT INTO t VALUES (102, 1)")?;
    pair.await_arrival()?;
    pair.publish("ALTER TABLE t ADD c integer DEFAULT 8; INSERT INTO t VALUES (103, 1, 2)")?;
    pair.await_arrival()?;
    let rows = "SELECT string_agg(ROW(id, a, c)::text, ',' ORDER BY id) FROM t";
    let [there, here] = [pair.publisher_says(rows)?, pair.subscriber_says(rows)?];
    ensure!(there == here, "{there}, on the target {here}");
    Ok(())
}

#[test]
fn a_type_that_the_target_lacks_is_named() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY)";
    let mut pair = Pair::new(Direction::UP, &["public.t"], schema)?;
    pair.site.start()?;
    pair.await_arrival()?;
    pair.publish(
        "CREATE TYPE \"Odd mood\" AS ENUM ('fine'); ALTER TABLE t ADD m \"Odd mood\"; \
         INSERT INTO t VALUES (1, 'fine')",
    )?;
    let named = "column m is of type public.\"Odd mood\", which the target does not have";
    let (state, said) = pair.site.await_trouble("s", named)?;
    ensure!(state == "stopped", "{state}: {said}");
    pair.subscriber.execute_script("CREATE TYPE \"Odd mood\" AS ENUM ('fine')")?;
    pair.site.verb("resume", &["--subscription", "s"])?;
    pair.await_arrival()?;
    ensure!(pair.subscriber_says("SELECT m FROM t")? == "fine");
    Ok(())
}

/// Before the subscription starts, the target's column looks like one that nothing fills.
#[test]
fn a_renamed_column_that_takes_no_null_is_met_at_its_change() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, a text NOT NULL)";
    let mut pair = Pair::new(Direction::DOWN, &["public.t"], schema)?;
    pair.publish("INSERT INTO t VALUES (1, 'a')")?;
    pair.site.start()?;
    pair.await_arrival()?;
    pair.site.stop()?;
    pair.publish("INSERT INTO t VALUES (2, 'before')")?;
    pair.publish("ALTER TABLE t RENAME a TO b; UPDATE t SET b = 'after' WHERE id = 1")?;
    let said = pair.site.verb("check", &[])?;
    ensure!(said.code == Some(0), "{said:?}");
    ensure!(said.stdout.contains("If it renamed them, nothing yet"), "{said:?}");
    pair.site.start()?;
    pair.assert_equal(&["public"])
}
