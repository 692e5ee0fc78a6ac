//! Columns that are others than were copied, under the same names and of the same types, where no
//! change in between tells: the log is then the same as if nothing had been done.

use crate::ddl::mended_as_told;
use anyhow::{Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{DATABASE, Direction, Pair};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

const SCHEMA: &str = "CREATE TABLE t (id integer PRIMARY KEY, a integer, \"b \"\"B\" text, c text)";
const ROWS: &str = "INSERT INTO t SELECT i, i, 'b' || i, 'c' FROM generate_series(1, 50) i";

/// Each leaves the columns that were there, but not what rows have in them.
const REPLACED: [&str; 3] = [
    "ALTER TABLE t DROP a, DROP \"b \"\"B\", DROP c; \
     ALTER TABLE t ADD a integer, ADD \"b \"\"B\" text, ADD c text",
    "ALTER TABLE t DROP c, ADD c text DEFAULT 'other'",
    "ALTER TABLE t DROP c; ALTER TABLE t RENAME \"b \"\"B\" TO c",
];

fn copied(direction: Direction, schema: &str, more: &str) -> Result<Pair> {
    let mut pair = Pair::bare(direction)?;
    pair.publish(schema)?;
    pair.publish(ROWS)?;
    pair.add_publication("p", &["public.*"], more)?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    Ok(pair)
}

/// After one of [`REPLACED`].
fn mended(pair: &mut Pair, number: usize) -> Result<()> {
    if number == 2 {
        // The target has kept it.
        pair.site.stop()?;
        pair.subscriber.execute_script("ALTER TABLE t DROP \"b \"\"B\"")?;
        pair.site.start()?;
    }
    mended_as_told(pair, "stands in another place than before")
}

#[test]
fn what_no_change_tells_is_noticed_while_the_node_runs() -> Result<()> {
    for (number, replace) in REPLACED.iter().enumerate() {
        let direction = if number % 2 == 0 { Direction::UP } else { Direction::DOWN };
        let mut pair = copied(direction, SCHEMA, "")?;
        pair.publish(&format!("BEGIN; {replace}; COMMIT"))?;
        pair.site.await_log("stands in another place than before", SOON)?;
        mended(&mut pair, number)?;
    }
    Ok(())
}

#[test]
fn what_no_change_tells_is_noticed_when_the_node_starts() -> Result<()> {
    for (number, replace) in REPLACED.iter().enumerate() {
        let direction = if number % 2 == 0 { Direction::DOWN } else { Direction::UP };
        let mut pair = copied(direction, SCHEMA, "")?;
        pair.site.stop()?;
        pair.publish("UPDATE t SET c = 'before' WHERE id = 1")?;
        pair.publish(replace)?;
        pair.publish("CREATE TABLE u (id integer PRIMARY KEY); INSERT INTO u VALUES (1)")?;
        pair.site.start()?;
        pair.site.await_log("stands in another place than before", SOON)?;
        // What came before it has been applied.
        ensure!(pair.subscriber_says("SELECT c FROM t WHERE id = 1")? == "before");
        mended(&mut pair, number)?;
    }
    Ok(())
}

#[test]
fn what_no_change_tells_is_noticed_of_partitions() -> Result<()> {
    for more in ["", "publish_via_partition_root = true"] {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, a integer, b text, c text) \
               PARTITION BY RANGE (id); \
             CREATE TABLE t_low PARTITION OF t FOR VALUES FROM (1) TO (25); \
             CREATE TABLE u PARTITION OF t FOR VALUES FROM (25) TO (1000)";
        let mut pair = copied(Direction::UP, schema, more)?;
        pair.publish("ALTER TABLE t DROP a, ADD a integer DEFAULT 5")?;
        let said = pair.site.await_log("stands in another place than before", SOON)?;
        let both = "so it is with 1 more table: public.u; without --table all";
        ensure!(said.contains(both) == more.is_empty(), "{said}");
        mended_as_told(&mut pair, "stands in another place than before")?;
    }
    Ok(())
}

/// A column that the stream has seen go is followed as a new one, and what has its number still is what
/// it was.
#[test]
fn what_changes_tell_is_followed() -> Result<()> {
    let mut pair = copied(Direction::UP, SCHEMA, "")?;
    pair.site.stop()?;
    pair.site.replace("[subscription.s]", "[subscription.s]\nfollow_ddl = \"add-drop\"")?;
    pair.site.start()?;
    // What capture compares with is from before.
    pair.publish("INSERT INTO t VALUES (100, 1)")?;
    pair.assert_equal(&["public"])?;
    let mut next = 100;
    let mut publish = |pair: &mut Pair, ddl: &str| -> Result<()> {
        next += 1;
        let looks = looks(pair);
        for statement in ddl.split("; ") {
            pair.publish(statement)?;
        }
        pair.publish(&format!("INSERT INTO t (id, a) VALUES ({next}, 1)"))?;
        pair.assert_equal(&["public"])?;
        // At first with a look after each, then without.
        if next < 104 {
            wait_until("a look", SOON, &[&pair.site.log_path()], || {
                Ok((self::looks(pair) > looks).then_some(()))
            })?;
        }
        Ok(())
    };
    for round in 0..3 {
        publish(&mut pair, "ALTER TABLE t DROP c")?;
        publish(&mut pair, "ALTER TABLE t ADD c text DEFAULT 'new'")?;
        publish(&mut pair, "ALTER TABLE t ADD d integer")?;
        publish(&mut pair, "ALTER TABLE t ADD e integer; ALTER TABLE t DROP e")?;
        publish(&mut pair, "ALTER TABLE t RENAME d TO x; ALTER TABLE t RENAME x TO d")?;
        publish(&mut pair, "VACUUM FULL t; ANALYZE t; ALTER TABLE t ALTER a SET NOT NULL")?;
        publish(&mut pair, "ALTER TABLE t DROP d")?;
        // Dropped and added again while nobody looks, with changes in between.
        pair.site.stop()?;
        pair.publish("ALTER TABLE t DROP c; UPDATE t SET a = a + 1")?;
        publish_while_down(&mut pair, round)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
    }
    ensure!(!pair.site.log().contains(" stopped: "), "{}", pair.site.log_tail());
    // And then without one.
    let noted = "SELECT column_numbers ? 'c' FROM farshore.table_copy WHERE table_name = 't'";
    wait_until("the new column to be noted", SOON, &[&pair.site.log_path()], || {
        Ok((pair.subscriber_says(noted)? == "t").then_some(()))
    })?;
    pair.publish("ALTER TABLE t DROP c, ADD c text")?;
    pair.site.await_log("stands in another place than before", SOON)?;
    mended_as_told(&mut pair, "stands in another place than before")
}

/// How often capture has seen that columns are others.
fn looks(pair: &Pair) -> usize {
    pair.site.log().matches("or their columns are others").count()
}

fn publish_while_down(pair: &mut Pair, round: i32) -> Result<()> {
    pair.publish("ALTER TABLE t ADD c text")?;
    pair.publish(&format!("INSERT INTO t (id, a, c) VALUES ({}, 1, 'down')", 1000 + round))
}
