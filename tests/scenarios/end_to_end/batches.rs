//! What is particular to changes that are netted and written in bulk.

use anyhow::{Result, ensure};
use farshore_tests::{Direction, Pair, both_ways};
use std::time::Duration;

/// A pair whose subscription applies everything in batches.
fn pair(direction: Direction, schema: &str) -> Result<Pair> {
    let mut pair = Pair::new(direction, &["public.*"], schema)?;
    if std::env::var_os("FARSHORE_BATCHES").is_none() {
        pair.site.replace("batches = \"auto\"", "batches = \"always\"")?;
    }
    Ok(pair)
}

/// Netted changes of many kinds in one transaction and in many: chains of updates, keys that move
/// and come back, rows that come and go, values that are left out, arrays and composites.
#[test]
fn chains_of_changes_come_to_the_same() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TYPE pair AS (a integer, b text); \
            CREATE TABLE t (id integer, part text, v numeric, tags text[], p pair, big text, \
              PRIMARY KEY (part, id)); \
            ALTER TABLE t ALTER big SET STORAGE EXTERNAL; \
            CREATE TABLE u (id integer PRIMARY KEY, code integer UNIQUE, v text); \
            CREATE TABLE log (note text)";
        let mut pair = pair(direction, schema)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish(
            "INSERT INTO t SELECT i, 'a', i / 7.0, ARRAY['x', NULL, i::text], ROW(i, 'p')::pair, \
               (SELECT string_agg(md5(i || ' ' || n), '') FROM generate_series(1, 120) n) \
             FROM generate_series(1, 50) i; \
             INSERT INTO u SELECT i, i, 'u' FROM generate_series(1, 50) i; \
             INSERT INTO log SELECT 'line ' || i % 3 FROM generate_series(1, 50) i",
        )?;
        for round in 0..6 {
            pair.publish(&format!(
                "BEGIN; UPDATE t SET v = v + 1 WHERE id % 2 = 0; \
                 UPDATE t SET tags = tags || 'r{round}'::text, p = ROW(id, 'r{round}')::pair WHERE id % 3 = 0; \
                 UPDATE t SET part = 'b' WHERE id % 5 = 0 AND part = 'a'; \
                 UPDATE t SET v = NULL WHERE id % 7 = 0; \
                 UPDATE t SET part = 'a' WHERE id % 10 = 0; \
                 DELETE FROM t WHERE id % 11 = {round}; \
                 INSERT INTO t SELECT i, 'c{round}', i, '{{}}', NULL, 'big' FROM generate_series(1, 9) i; \
                 DELETE FROM t WHERE part = 'c{round}' AND id > 3; COMMIT; \
                 UPDATE u SET code = code + 1000 WHERE id % 2 = 0; \
                 BEGIN; UPDATE u SET code = -code WHERE id IN (1, 3); \
                 UPDATE u SET code = CASE id WHEN 1 THEN 3 ELSE 1 END WHERE id IN (1, 3); COMMIT; \
                 DELETE FROM u WHERE id = 10 + {round}; \
                 INSERT INTO u VALUES (10 + {round}, 10 + {round}, 'again'); \
                 INSERT INTO log VALUES ('round {round}')"
            ))?;
        }
        pair.publish(
            "UPDATE t SET big = 'small' WHERE id = 6; TRUNCATE log; INSERT INTO log VALUES ('x')",
        )?;
        pair.assert_equal(&["public"])
    })
}

/// Nothing gets a new value, and the key is a column that UPDATE cannot set.
#[test]
fn a_row_is_touched_where_nothing_can_be_set() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE t (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, big text); \
            ALTER TABLE t ALTER big SET STORAGE EXTERNAL; \
            CREATE TABLE only_key (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY)";
        let mut pair = pair(direction, schema)?;
        pair.publish(
            "INSERT INTO t (big) SELECT (SELECT string_agg(md5(i || ' ' || n), '') \
               FROM generate_series(1, 120) n) FROM generate_series(1, 9) i; \
             INSERT INTO only_key SELECT FROM generate_series(1, 5)",
        )?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("UPDATE t SET big = big; UPDATE t SET big = big WHERE id = 1")?;
        pair.publish("UPDATE only_key SET id = DEFAULT WHERE id = 2; DELETE FROM t WHERE id = 4")?;
        pair.assert_equal(&["public"])
    })
}

/// A trigger that fires for replicated rows finds what its transaction did before.
#[test]
fn a_trigger_that_always_fires_sees_the_rows_before_its_own() -> Result<()> {
    let schema = "CREATE TABLE a (id integer PRIMARY KEY, n integer NOT NULL DEFAULT 0); \
        CREATE TABLE b (id integer PRIMARY KEY, a integer)";
    let mut pair = pair(Direction::UP, schema)?;
    pair.subscriber.execute_script(
        "ALTER TABLE a ADD own integer NOT NULL DEFAULT 0; \
         CREATE FUNCTION count_b() RETURNS trigger LANGUAGE plpgsql AS \
           $$ BEGIN UPDATE public.a SET own = own + 1 WHERE id = NEW.a; RETURN NEW; END $$; \
         CREATE TRIGGER count_b AFTER INSERT ON b FOR EACH ROW EXECUTE FUNCTION count_b(); \
         ALTER TABLE b ENABLE ALWAYS TRIGGER count_b",
    )?;
    pair.site.start()?;
    pair.await_arrival()?;
    for i in 0..20 {
        pair.publish(&format!(
            "BEGIN; INSERT INTO a VALUES ({i}); INSERT INTO b VALUES ({i}, {i}); COMMIT"
        ))?;
    }
    pair.await_arrival()?;
    let counted = pair.subscriber_says("SELECT sum(own) FROM a")?;
    ensure!(counted == "20", "the trigger found {counted} of 20 rows");
    Ok(())
}

/// A column of the target gets another type while farshore runs: values are never read as what
/// they are not.
#[test]
fn a_type_changed_on_the_target_is_noticed() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, n bigint)";
    let mut pair = pair(Direction::UP, schema)?;
    pair.site.start()?;
    pair.publish("INSERT INTO t SELECT i, i FROM generate_series(1, 10) i")?;
    pair.assert_equal(&["public"])?;
    pair.subscriber.execute_script("ALTER TABLE t ALTER n TYPE double precision")?;
    pair.publish("INSERT INTO t SELECT i, i FROM generate_series(11, 20) i")?;
    let log = pair.site.await_log(" stopped: ", Duration::from_secs(60))?;
    ensure!(log.contains("double precision"), "{log}");
    let wrong = pair.subscriber_says("SELECT count(*) FROM t WHERE n <> id")?;
    ensure!(wrong == "0", "{wrong} values were read as what they are not");
    Ok(())
}
