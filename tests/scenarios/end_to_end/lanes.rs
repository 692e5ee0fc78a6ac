//! Groups of transactions that run side by side on several connections.

use anyhow::{Result, ensure};
use farshore_tests::{Direction, Link, Pair, both_ways};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const MET: &str = "groups were in each other's way";
const SCHEMA: &str = "
    CREATE TABLE t (id integer PRIMARY KEY, code integer UNIQUE, v text);
    CREATE TABLE log (note text);
    CREATE TABLE whole (id integer, v text);
    ALTER TABLE whole REPLICA IDENTITY FULL;
    CREATE PROCEDURE commit_each(first integer, last integer, statement text) LANGUAGE plpgsql AS $$
    BEGIN
      FOR step IN first..last LOOP
        EXECUTE statement USING step;
        COMMIT;
      END LOOP;
    END $$;";

/// A pair whose subscription applies small groups, in batches, on four connections.
fn pair(direction: Direction) -> Result<Pair> {
    let mut pair = Pair::new(direction, &["public.*"], SCHEMA)?;
    pair.apply_side_by_side()?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    Ok(pair)
}

/// As [`pair`], with a target 6 ms away.
fn far_pair(direction: Direction) -> Result<(Pair, Link)> {
    let mut pair = Pair::new(direction, &["public.*"], SCHEMA)?;
    pair.apply_side_by_side()?;
    let line = Link::far(pair.subscriber.port(), Duration::from_millis(3))?;
    let port = |port: u16| format!(":{port}/");
    pair.site.replace(&port(pair.subscriber.port()), &port(line.port()))?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    Ok((pair, line))
}

fn commit_each(pair: &Pair, first: u32, last: u32, statement: &str) -> Result<()> {
    pair.publish(&format!("CALL commit_each({first}, {last}, $s${statement}$s$)"))
}

/// Connections that apply, beside the first.
fn connections(pair: &Pair) -> Result<String> {
    pair.subscriber_says(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'farshore s'",
    )
}

#[test]
fn a_backlog_of_every_kind_of_change() -> Result<()> {
    both_ways(|direction| of_every_kind_of_change(pair(direction)?))
}

/// Connections to a target that is far take the next group behind the COMMIT of the one before.
#[test]
fn a_backlog_for_a_target_that_is_far() -> Result<()> {
    both_ways(|direction| {
        let (pair, _line) = far_pair(direction)?;
        of_every_kind_of_change(pair)
    })
}

/// A group is refused while others are on their way behind it.
#[test]
fn groups_behind_a_refused_one_are_not_committed() -> Result<()> {
    let (mut pair, _line) = far_pair(Direction::UP)?;
    pair.site.stop()?;
    pair.subscriber
        .execute_script("ALTER TABLE t ADD CONSTRAINT odd CHECK (v <> 'refused') NOT VALID")?;
    commit_each(&pair, 1, 400, "INSERT INTO t VALUES ($1, $1, 'new')")?;
    commit_each(&pair, 401, 401, "INSERT INTO t VALUES ($1, $1, 'refused')")?;
    commit_each(&pair, 402, 900, "INSERT INTO t VALUES ($1, $1, 'new')")?;
    pair.site.start()?;
    let (_, error) = pair.site.await_trouble("s", "odd")?;
    ensure!(error.contains("public.t"), "{error}");
    let there = pair.subscriber_says("SELECT count(*) || ' ' || max(id) FROM t")?;
    ensure!(there == "400 400", "what is there is no prefix: {there}");
    pair.subscriber.execute_script("ALTER TABLE t DROP CONSTRAINT odd")?;
    pair.site.stop()?;
    pair.site.start()?;
    pair.assert_equal(&["public"])
}

fn of_every_kind_of_change(mut pair: Pair) -> Result<()> {
    pair.site.stop()?;
    commit_each(&pair, 1, 2000, "INSERT INTO t VALUES ($1, $1, 'new')")?;
    // The same rows again and again, from group to group.
    commit_each(&pair, 1, 500, "UPDATE t SET v = v || $1 WHERE id = $1 % 7 + 1")?;
    commit_each(&pair, 1, 500, "UPDATE t SET v = 'at ' || $1 WHERE id = $1")?;
    commit_each(&pair, 1, 300, "INSERT INTO whole VALUES ($1 % 20, 'w')")?;
    commit_each(&pair, 1, 40, "DELETE FROM whole WHERE id = $1")?;
    commit_each(&pair, 1, 300, "INSERT INTO log VALUES ('line ' || $1 % 3)")?;
    pair.publish("TRUNCATE log")?;
    commit_each(&pair, 1, 300, "INSERT INTO log VALUES ('again ' || $1 % 3)")?;
    commit_each(&pair, 1, 900, "DELETE FROM t WHERE id = $1")?;
    pair.publish("ALTER TABLE t ADD COLUMN w integer DEFAULT 3")?;
    commit_each(&pair, 1, 900, "INSERT INTO t VALUES ($1, $1, 'back', $1)")?;
    commit_each(&pair, 1, 900, "UPDATE t SET id = -id WHERE id = $1")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    ensure!(connections(&pair)? != "1", "there was only one connection");
    Ok(())
}

#[test]
fn a_unique_value_that_moves_from_group_to_group() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction)?;
        pair.site.stop()?;
        commit_each(&pair, 1, 100, "INSERT INTO t VALUES ($1, $1, 'new')")?;
        // What keys cannot tell: the value that one row gives up is taken by another one later.
        commit_each(&pair, 1, 95, "UPDATE t SET code = -code WHERE id = $1")?;
        commit_each(&pair, 1, 90, "UPDATE t SET code = $1 WHERE id = $1 + 5")?;
        commit_each(&pair, 1, 60, "UPDATE t SET code = 1000 + $1 WHERE id = $1 + 7")?;
        commit_each(
            &pair,
            1,
            60,
            "INSERT INTO t VALUES (200 + $1, $1 + 2, 'taken') \
            ON CONFLICT DO NOTHING",
        )?;
        pair.site.start()?;
        pair.assert_equal(&["public"])
    })
}

/// A defect that lets changes of one row run side by side is noticed by the target's locks and by
/// the numbers of rows that statements touch: it costs a repetition, and nothing else.
#[test]
fn a_missed_conflict_does_no_harm() -> Result<()> {
    let mut pair = pair(Direction::UP)?;
    pair.site.stop()?;
    pair.site.env("FARSHORE_DEFECT", "missed-conflict");
    commit_each(&pair, 1, 300, "INSERT INTO t VALUES ($1, $1, 'new')")?;
    commit_each(&pair, 1, 600, "UPDATE t SET v = v || $1 WHERE id = $1 % 7 + 1")?;
    commit_each(&pair, 1, 300, "DELETE FROM t WHERE id = $1")?;
    commit_each(&pair, 1, 300, "INSERT INTO t VALUES ($1, $1, 'again')")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.site.await_log(MET, SOON).map(drop)
}

/// A session of somebody else stands between two groups: the earlier one waits for it, and it
/// waits for the later one. The target cannot see that circle.
#[test]
fn a_circle_through_somebody_elses_session_is_broken() -> Result<()> {
    let mut pair = pair(Direction::UP)?;
    pair.publish("INSERT INTO t SELECT i, i, 'old' FROM generate_series(1, 100) i")?;
    pair.assert_equal(&["public"])?;
    pair.site.stop()?;
    let mut other = pair.subscriber.connect()?;
    other.batch_execute("BEGIN; UPDATE t SET v = v WHERE id = 1")?;
    // The first group needs row 1; a later one takes row 50.
    commit_each(&pair, 1, 100, "UPDATE t SET v = 'to ' || $1 WHERE id = $1")?;
    pair.site.start()?;
    let reached = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'farshore s' \
                   AND backend_xid IS NOT NULL AND wait_event = 'ClientRead'";
    farshore_testkit::wait::wait_until("a later group's turn", SOON, &[], || {
        Ok((pair.subscriber_says(reached)? != "0").then_some(()))
    })?;
    other.batch_execute("UPDATE t SET v = v WHERE id = 15; COMMIT")?;
    pair.assert_equal(&["public"])
}

/// What the target's roles and databases set for sessions is not for ours.
#[test]
fn a_default_isolation_level_is_not_for_us() -> Result<()> {
    let mut pair = pair(Direction::UP)?;
    pair.subscriber.execute_script(
        "ALTER DATABASE postgres SET default_transaction_isolation = 'repeatable read'",
    )?;
    pair.site.stop()?;
    commit_each(&pair, 1, 500, "INSERT INTO t VALUES ($1, $1, 'new')")?;
    commit_each(&pair, 1, 500, "UPDATE t SET v = 'at ' || $1 WHERE id = $1")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    ensure!(!pair.site.log().contains("progress row"), "{}", pair.site.log());
    Ok(())
}
