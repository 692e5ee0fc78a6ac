//! Backlogs that capture takes by SQL function, in batches, before it streams.

use anyhow::{Result, ensure};
use farshore_testkit::wait::watch_until;
use farshore_tests::{Direction, Pair, both_ways};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const BY_FUNCTION: &str = "far behind: taken by function";
const SCHEMA: &str = "
    CREATE TYPE mood AS ENUM ('calm', 'stormy');
    CREATE TABLE t (id bigint PRIMARY KEY, v text, m mood DEFAULT 'calm');
    CREATE TABLE other (id bigint PRIMARY KEY, v text);
    CREATE PROCEDURE commit_each(first bigint, last bigint) LANGUAGE plpgsql AS $$
    BEGIN
      -- The publisher's disk is not what is tested, and a site that stands still must not do so for
      -- longer than its stream may be silent.
      PERFORM set_config('synchronous_commit', 'off', false);
      FOR step IN first..last LOOP
        INSERT INTO t (id, v) VALUES (step, repeat(md5(step::text), 4));
        IF step % 7 = 0 THEN ROLLBACK; ELSE COMMIT; END IF;
        UPDATE t SET v = 'changed', id = CASE WHEN step % 11 = 0 THEN -id ELSE id END
          WHERE id = step - 3;
        DELETE FROM t WHERE step % 13 = 0 AND id = step - 5;
        COMMIT;
      END LOOP;
    END $$;";

/// A pair that was equal when its site was stopped: what is published now is a backlog.
fn stopped_pair(direction: Direction) -> Result<Pair> {
    let mut pair = Pair::new(direction, &["public.t", "public.other"], SCHEMA)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.site.stop()?;
    Ok(pair)
}

/// Since the node was started.
fn batches(pair: &Pair) -> usize {
    pair.site.log().matches(BY_FUNCTION).count()
}

#[test]
fn a_backlog_of_small_transactions_and_what_altered_its_tables() -> Result<()> {
    both_ways(|direction| {
        let mut pair = stopped_pair(direction)?;
        pair.publish("CALL commit_each(1, 2000)")?;
        pair.publish("ALTER TABLE t ADD COLUMN w integer")?;
        pair.publish("UPDATE t SET w = id, m = 'stormy' WHERE id % 2 = 0")?;
        pair.publish("INSERT INTO other SELECT i, 'o' FROM generate_series(1, 500) AS i")?;
        pair.publish("CALL commit_each(2001, 4000)")?;
        pair.publish("TRUNCATE other; INSERT INTO other VALUES (1, 'again')")?;
        pair.publish("CALL commit_each(4001, 6000)")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        let taken = batches(&pair);
        ensure!(taken > 1, "taken in {taken} batches");
        // The stream goes on where the batches ended.
        pair.publish("CALL commit_each(6001, 6100)")?;
        pair.assert_equal(&["public"])
    })
}

#[test]
fn transactions_in_progress_at_the_end_of_a_batch_come_whole() -> Result<()> {
    both_ways(|direction| {
        let mut pair = stopped_pair(direction)?;
        // One that fits the publisher's memory, and one that is sent before its commit.
        let (mut small, mut large) = (pair.publisher.connect()?, pair.publisher.connect()?);
        small.batch_execute("BEGIN; INSERT INTO other VALUES (1, 'small')")?;
        pair.publish("CALL commit_each(1, 3000)")?;
        large.batch_execute(
            "BEGIN; INSERT INTO other SELECT i, repeat(md5(i::text), 4) \
             FROM generate_series(1000, 3000) AS i",
        )?;
        pair.publish("CALL commit_each(3001, 5000)")?;
        pair.site.start()?;
        pair.await_arrival()?;
        pair.site.await_log(BY_FUNCTION, SOON)?;
        small.batch_execute("INSERT INTO other VALUES (2, 'small'); COMMIT")?;
        large.batch_execute("INSERT INTO other VALUES (5000, 'large'); COMMIT")?;
        pair.assert_equal(&["public"])
    })
}

#[test]
fn a_stop_in_the_middle_of_a_backlog_loses_nothing() -> Result<()> {
    both_ways(|direction| {
        let mut pair = stopped_pair(direction)?;
        pair.publish("CALL commit_each(1, 10000)")?;
        pair.site.start()?;
        pair.site.await_log(BY_FUNCTION, SOON)?;
        pair.site.stop_promptly()?;
        pair.site.start()?;
        pair.assert_equal(&["public"])
    })
}

/// With the publisher go its connections and the copy of the slot, and what was asked for ahead.
#[test]
fn a_publisher_that_crashes_in_the_middle_of_a_backlog_loses_nothing() -> Result<()> {
    both_ways(|direction| {
        let mut pair = stopped_pair(direction)?;
        for (first, last) in [(1, 6000), (6001, 12000)] {
            pair.publish(&format!("CALL commit_each({first}, {last})"))?;
            pair.site.start()?;
            // The first of many; the next ones are asked for.
            pair.site.await_log(BY_FUNCTION, SOON)?;
            pair.publisher.kill9()?;
            pair.publisher.start()?;
            pair.assert_equal(&["public"])?;
            pair.site.stop()?;
        }
        let copies = "SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE '%batches%'";
        ensure!(pair.publisher_says(copies)? == "0", "a copy of the slot was left behind");
        Ok(())
    })
}

/// Under a load that lasts, the stream may fall behind: then batches take over from it, and it goes
/// on where they end.
#[test]
fn a_stream_that_falls_behind_is_left_for_batches() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::new(direction, &["public.t", "public.other"], SCHEMA)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("CALL commit_each(1, 100)")?;
        pair.await_arrival()?;
        ensure!(batches(&pair) == 0, "not far behind yet");
        let mut open = pair.publisher.connect()?;
        open.batch_execute("BEGIN; INSERT INTO other VALUES (1, 'begun before')")?;
        pair.site.signal(libc::SIGSTOP)?;
        pair.publish("CALL commit_each(101, 15000)")?;
        pair.publish("ALTER TABLE t ADD COLUMN w integer")?;
        pair.publish("CALL commit_each(15001, 20000)")?;
        pair.site.signal(libc::SIGCONT)?;
        pair.await_arrival()?;
        open.batch_execute("INSERT INTO other VALUES (2, 'ended after'); COMMIT")?;
        pair.assert_equal(&["public"])?;
        let (log, taken) = (pair.site.log(), batches(&pair));
        ensure!(taken > 0, "it never turned to batches");
        // And back each time: once, or more often on a machine so busy that it fell behind again.
        let left = log.matches("far behind: the stream is left").count();
        ensure!(left > 0 && log.matches("capture streaming").count() == 1 + left, "{log}");
        pair.publish("CALL commit_each(20001, 20100)")?;
        pair.assert_equal(&["public"])
    })
}

/// Between batches the slot is not in use. What something else takes from it meanwhile is missing,
/// and that is said, not passed over.
#[test]
fn a_slot_that_something_else_moves_meanwhile_is_noticed() -> Result<()> {
    both_ways(|direction| {
        let mut pair = stopped_pair(direction)?;
        pair.publish("CALL commit_each(1, 20000)")?;
        let mut thief = pair.publisher.connect()?;
        pair.site.start()?;
        // As often as it can: once it gets between two batches.
        let take = "SELECT pg_replication_slot_advance('farshore_p', pg_current_wal_lsn())";
        let taken = watch_until("the slot to be free", SOON, &[], || {
            if let Ok(status) = pair.site.status()
                && status["publications"][0]["state"] == "streaming"
                && pair.site.log().contains("capture streaming")
            {
                return Ok(Some(false));
            }
            Ok(thief.batch_execute(take).is_ok().then_some(true))
        })?;
        if !taken {
            println!("the slot was never free for long enough");
            return pair.assert_equal(&["public"]);
        }
        let (state, error) = pair.site.await_trouble("p", "something else moved the slot")?;
        ensure!(state == "stopped", "{state}: {error}");
        Ok(())
    })
}

/// Batches are taken from a copy of the slot. Where the publisher has no room for one, the stream
/// reads all of it.
#[test]
fn without_a_free_slot_the_stream_reads_on() -> Result<()> {
    both_ways(|direction| {
        let mut pair = stopped_pair(direction)?;
        pair.publish("CALL commit_each(1, 3000)")?;
        pair.publish(
            "SELECT pg_create_physical_replication_slot('taken_' || i) FROM generate_series(1, \
             current_setting('max_replication_slots')::int \
             - (SELECT count(*)::int FROM pg_replication_slots)) AS i",
        )?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        let log = pair.site.log();
        ensure!(log.contains("no more batches by function: streaming"), "{log}");
        ensure!(batches(&pair) == 0, "{log}");
        Ok(())
    })
}
