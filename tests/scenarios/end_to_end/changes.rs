//! A dozen tables of mixed types and names, changed in every way that SQL has.

use anyhow::{Context, Result, anyhow};
use farshore_tests::mixed_tables::{CHANGES, ROWS, SCHEMA, SCHEMAS, TABLES, from_id, run_each};
use farshore_tests::{Direction, Pair, both_ways};
use std::time::{Duration, Instant};

fn every_kind_of_change(direction: Direction) -> Result<()> {
    let mut pair = Pair::new(direction, &TABLES, SCHEMA)?;
    pair.publish(&from_id(ROWS, 1_000))?;
    pair.site.start()?;
    // What is copied is changed, and what is streamed is changed too.
    pair.assert_equal(&SCHEMAS)?;
    run_each(&pair, &from_id(CHANGES, 1_000))?;
    pair.assert_equal(&SCHEMAS)?;
    pair.publish(&from_id(ROWS, 10_000))?;
    run_each(&pair, &from_id(CHANGES, 10_000))?;
    pair.assert_equal(&SCHEMAS)?;
    // Nothing is applied again by a node that starts where another was killed.
    pair.site.kill9()?;
    pair.publish(&from_id(ROWS, 20_000))?;
    run_each(&pair, &from_id(CHANGES, 20_000))?;
    pair.site.start()?;
    pair.assert_equal(&SCHEMAS)?;
    pair.site.stop()?;
    Ok(())
}

#[test]
fn every_kind_of_change_from_15_to_18() -> Result<()> {
    every_kind_of_change(Direction::UP)
}

#[test]
fn every_kind_of_change_from_18_to_15() -> Result<()> {
    every_kind_of_change(Direction::DOWN)
}

#[test]
fn rows_change_while_they_are_copied() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::new(direction, &TABLES, SCHEMA)?;
        pair.publish(&from_id(ROWS, 1_000))?;
        pair.site.add("copy_workers = 2\ncopy_range = \"64KB\"")?;
        pair.site.start()?;
        // From before the consistent point to after the copy: which change meets it is left to
        // chance, and must not matter.
        run_each(&pair, &from_id(CHANGES, 1_000))?;
        pair.publish(&from_id(ROWS, 10_000))?;
        run_each(&pair, &from_id(CHANGES, 10_000))?;
        pair.assert_equal(&SCHEMAS)
    })
}

/// One that waits for a lock of the copy, and that another connection of the copy waits behind,
/// would wait for ever: no server sees that circle.
#[test]
fn a_truncate_that_waits_for_a_copy_is_not_waited_for() -> Result<()> {
    let mut pair = Pair::new(Direction::UP, &TABLES, SCHEMA)?;
    pair.publish(&from_id(ROWS, 1_000))?;
    let mut emptying = pair.publisher.connect()?;
    emptying.batch_execute("SET statement_timeout = '30s'")?;
    // So often that a snapshot is had in between now and then, and so long that one of them waits
    // for it.
    let (beat, end) = (Duration::from_millis(50), Instant::now() + Duration::from_secs(8));
    let emptied = std::thread::spawn(move || {
        while Instant::now() < end {
            emptying.batch_execute("TRUNCATE events")?;
            std::thread::park_timeout(beat);
        }
        Ok::<_, postgres::Error>(())
    });
    pair.site.start()?;
    let emptied = emptied.join().map_err(|_| anyhow!("the truncating thread died"))?;
    emptied.context("TRUNCATE")?;
    pair.assert_equal(&SCHEMAS)
}

#[test]
fn truncate_of_several_tables_restarts_and_cascades() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::new(direction, &TABLES, SCHEMA)?;
        pair.publish(&from_id(ROWS, 1_000))?;
        pair.site.start()?;
        pair.assert_equal(&SCHEMAS)?;
        // Sequences of the subscriber, as if it had been written to before.
        pair.on_both("SELECT setval('measured_id_seq', 777), setval('customers_id_seq', 777)")?;
        pair.publish("TRUNCATE events, one_column")?;
        pair.assert_equal(&SCHEMAS)?;
        pair.publish("TRUNCATE measured, swaps RESTART IDENTITY")?;
        pair.assert_equal(&SCHEMAS)?;
        let next = "SELECT nextval('measured_id_seq')";
        assert_eq!(pair.subscriber_says(next)?, "1", "RESTART IDENTITY must reach the sequence");
        pair.publish("TRUNCATE customers CASCADE; INSERT INTO customers VALUES (1, 'first')")?;
        pair.assert_equal(&SCHEMAS)?;
        assert_eq!(pair.subscriber_says("SELECT count(*) FROM order_lines")?, "0");
        let next = "SELECT nextval('customers_id_seq')";
        assert_eq!(pair.subscriber_says(next)?, "778", "nothing said RESTART IDENTITY");
        // With rows before and after in one transaction, and one that is rolled back.
        pair.publish(
            "BEGIN; INSERT INTO events VALUES (now(), 'gone'); TRUNCATE events, documents; \
             INSERT INTO events VALUES (now(), 'stays'); SAVEPOINT a; TRUNCATE every_type, events; \
             ROLLBACK TO a; COMMIT; BEGIN; TRUNCATE every_type; ROLLBACK",
        )?;
        pair.assert_equal(&SCHEMAS)
    })
}

#[test]
fn columns_added_inside_a_transaction() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, a text); \
             CREATE TABLE other (id integer PRIMARY KEY, a text)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.publish("INSERT INTO t SELECT i, 'a' FROM generate_series(1, 100) AS i")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("INSERT INTO t VALUES (101, 'before'); UPDATE t SET a = 'x' WHERE id = 1")?;
        // The subscriber first: it must be able to take the column when it comes.
        pair.subscriber.execute_script(
            "ALTER TABLE t ADD COLUMN b integer DEFAULT 7; ALTER TABLE t ADD COLUMN c jsonb",
        )?;
        pair.publish(
            "BEGIN; INSERT INTO t VALUES (102, 'in between'); INSERT INTO other VALUES (1, 'x'); \
             ALTER TABLE t ADD COLUMN b integer DEFAULT 7; INSERT INTO t VALUES (103, 'b', 8); \
             UPDATE t SET b = 9 WHERE id < 50; ALTER TABLE t ADD COLUMN c jsonb; \
             INSERT INTO t VALUES (104, 'c', 10, '{}'); UPDATE t SET c = '[1]' WHERE id > 90; \
             COMMIT",
        )?;
        pair.assert_equal(&["public"])?;
        // Streamed before its commit, with a column that an aborted sub-transaction added.
        pair.subscriber.execute_script("ALTER TABLE t ADD COLUMN d text")?;
        pair.publish(
            "BEGIN; INSERT INTO t SELECT i, repeat('s', 50) FROM generate_series(1000, 3000) AS i; \
             SAVEPOINT a; ALTER TABLE t ADD COLUMN nope integer; \
             INSERT INTO t (id, nope) SELECT i, i FROM generate_series(3001, 5000) AS i; \
             ROLLBACK TO a; ALTER TABLE t ADD COLUMN d text; \
             INSERT INTO t (id, d) SELECT i, repeat('d', 50) FROM generate_series(5001, 8000) AS i; \
             COMMIT; UPDATE t SET d = 'later' WHERE id < 10",
        )?;
        pair.assert_equal(&["public"])?;
        // A column that goes, one that is renamed, and one of another type.
        pair.on_both(
            "ALTER TABLE other DROP COLUMN a; ALTER TABLE other ADD COLUMN a integer; \
             ALTER TABLE other RENAME COLUMN a TO z",
        )?;
        pair.publish("INSERT INTO other VALUES (2, 5); UPDATE other SET z = 6 WHERE id = 1")?;
        pair.assert_equal(&["public"])?;
        pair.site.restart()?;
        pair.publish("UPDATE t SET a = 'end'")?;
        pair.assert_equal(&["public"])
    })
}
