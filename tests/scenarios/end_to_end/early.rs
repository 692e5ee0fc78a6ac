//! Large transactions that are applied while they arrive, before their commit has come.

use anyhow::{Context, Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{Direction, Pair, both_ways};
use postgres::Client;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const APPLIED: &str = "a large transaction was applied while it arrived";
const GIVEN_UP: &str = "a large transaction is not applied while it arrives";
const WAITED_FOR: &str = "another session waits for a lock of it";
const SCHEMA: &str = "
    CREATE TABLE a (id bigint PRIMARY KEY, code bigint, filler text);
    CREATE TABLE b (id bigint PRIMARY KEY, v text);
    CREATE TABLE c (id bigint PRIMARY KEY);";

/// A pair whose subscription has two connections, and a session in a transaction.
fn pair(direction: Direction) -> Result<(Pair, Client)> {
    let mut pair = Pair::new(direction, &["public.*"], SCHEMA)?;
    pair.publish("INSERT INTO b SELECT i, 'old' FROM generate_series(1, 1000) AS i")?;
    pair.site.replace("publication = \"p\"\n", "publication = \"p\"\nstreams = 2\n")?;
    pair.site.env("FARSHORE_LOG", "info,farshore_apply=debug");
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    let mut session = pair.publisher.connect()?;
    session.batch_execute("BEGIN")?;
    Ok((pair, session))
}

/// Rows from `from` on, some 2 MB.
fn insert(session: &mut Client, from: i64) -> Result<()> {
    let insert = "INSERT INTO a SELECT i, i, repeat(md5(i::text), 6) \
                  FROM generate_series($1::bigint, $1 + 9999) AS i";
    session.execute(insert, &[&from])?;
    Ok(())
}

/// As [`insert`], and waits until those rows are on the target, where nobody sees them.
fn insert_early(pair: &mut Pair, session: &mut Client, from: i64) -> Result<()> {
    let mut target = pair.subscriber.connect()?;
    let mut size = move || -> Result<i64> {
        Ok(target.query_one("SELECT pg_relation_size('a')", &[])?.get(0))
    };
    let seen = pair.subscriber_says("SELECT count(*) FROM a")?;
    let before = size()?;
    insert(session, from)?;
    pair.site.wait_for("rows before their commit", SOON, || {
        Ok((size()? > before + 1_000_000).then_some(()))
    })?;
    let seen_now = pair.subscriber_says("SELECT count(*) FROM a")?;
    ensure!(seen_now == seen, "{seen_now} rows are seen before their commit, not {seen}");
    Ok(())
}

/// Waits until no early transaction is left on the target.
fn await_no_early_rows(pair: &mut Pair) -> Result<()> {
    let mut target = pair.subscriber.connect()?;
    pair.site.wait_for("the end of the early transaction", SOON, || {
        let query = "SELECT FROM pg_locks l JOIN pg_stat_activity s USING (pid) \
                     WHERE relation = 'a'::regclass AND application_name = 'farshore s'";
        Ok(target.query(query, &[])?.is_empty().then_some(()))
    })
}

/// Waits until the log says `text` so many times: it is said once the target has let go.
fn await_count(pair: &Pair, text: &str, times: usize) -> Result<()> {
    let what = format!("\"{text}\", {times} times");
    wait_until(&what, SOON, &[&pair.site.log_path()], || {
        Ok((count(pair, text) == times).then_some(()))
    })
}

fn count(pair: &Pair, text: &str) -> usize {
    pair.site.log().matches(text).count()
}

#[test]
fn rows_are_on_the_target_before_their_commit_and_seen_after_it() -> Result<()> {
    both_ways(|direction| {
        let (mut pair, mut session) = pair(direction)?;
        insert_early(&mut pair, &mut session, 0)?;
        // Others go on meanwhile.
        pair.publish("INSERT INTO c VALUES (1)")?;
        pair.publish("UPDATE b SET v = 'theirs' WHERE id > 500")?;
        pair.await_arrival()?;
        // What it changes now met the rows of those.
        session.batch_execute(
            "UPDATE b SET v = v || ' ours' WHERE id % 2 = 0; \
             DELETE FROM a WHERE id % 10 = 0; DELETE FROM c; SAVEPOINT kept",
        )?;
        insert(&mut session, 10_000)?;
        session.batch_execute("RELEASE kept")?;
        insert(&mut session, 20_000)?;
        ensure!(pair.subscriber_says("SELECT count(*) FROM a")? == "0");
        session.batch_execute("COMMIT")?;
        pair.assert_equal(&["public"])?;
        ensure!(count(&pair, APPLIED) == 1, "{}", pair.site.log_tail());
        ensure!(count(&pair, GIVEN_UP) == 0, "{}", pair.site.log_tail());
        let changes = pair.site.status()?["subscriptions"][0]["changes"].as_u64();
        ensure!(changes >= Some(31_000), "{changes:?} changes are counted");
        // And the next one, of tables that are known by now.
        session.batch_execute("BEGIN")?;
        insert(&mut session, 30_000)?;
        session.batch_execute("UPDATE a SET code = -id; COMMIT")?;
        pair.assert_equal(&["public"])
    })
}

#[test]
fn what_is_rolled_back_in_part_or_as_a_whole_is_not_kept() -> Result<()> {
    both_ways(|direction| {
        let (mut pair, mut session) = pair(direction)?;
        insert_early(&mut pair, &mut session, 0)?;
        session.batch_execute("ROLLBACK")?;
        await_no_early_rows(&mut pair)?;
        pair.assert_equal(&["public"])?;
        session.batch_execute("BEGIN; SAVEPOINT one")?;
        insert_early(&mut pair, &mut session, 0)?;
        session.batch_execute("ROLLBACK TO one")?;
        insert(&mut session, 10_000)?;
        session.batch_execute("COMMIT")?;
        pair.assert_equal(&["public"])?;
        ensure!(pair.subscriber_says("SELECT count(*) FROM a")? == "10000");
        ensure!(count(&pair, APPLIED) == 0, "{}", pair.site.log_tail());
        await_count(&pair, GIVEN_UP, 2)?;
        ensure!(count(&pair, "it was rolled back") == 1, "{}", pair.site.log_tail());
        ensure!(count(&pair, "rolled back to a savepoint") == 1, "{}", pair.site.log_tail());
        // Rolled back before anything of it was sent.
        session.batch_execute("BEGIN; SAVEPOINT two; INSERT INTO c VALUES (5); ROLLBACK TO two")?;
        insert_early(&mut pair, &mut session, 50_000)?;
        session.batch_execute("COMMIT")?;
        pair.assert_equal(&["public"])?;
        ensure!(count(&pair, APPLIED) == 1, "{}", pair.site.log_tail());
        Ok(())
    })
}

#[test]
fn whoever_waits_for_it_comes_first() -> Result<()> {
    both_ways(|direction| {
        let (mut pair, mut session) = pair(direction)?;
        insert_early(&mut pair, &mut session, 0)?;
        // Somebody on the target wants the table for himself.
        let mut other = pair.subscriber.connect()?;
        other.batch_execute("SET lock_timeout = '15s'; BEGIN; LOCK TABLE a; ROLLBACK")?;
        await_count(&pair, WAITED_FOR, 1)?;
        session.batch_execute("COMMIT")?;
        pair.assert_equal(&["public"])?;
        // A transaction that commits earlier wants a value that is unique on the target alone.
        pair.subscriber.execute_script("CREATE UNIQUE INDEX ON a (code)")?;
        session.batch_execute("BEGIN")?;
        insert_early(&mut pair, &mut session, 20_000)?;
        pair.publish("INSERT INTO a VALUES (100000, 20000, 'earlier')")?;
        pair.await_arrival()?;
        await_count(&pair, WAITED_FOR, 2)?;
        session.batch_execute("DELETE FROM a WHERE id = 20000; COMMIT")?;
        pair.assert_equal(&["public"])?;
        ensure!(count(&pair, APPLIED) == 0, "{}", pair.site.log_tail());
        Ok(())
    })
}

#[test]
fn what_is_more_than_rows_in_bulk_waits_for_its_commit() -> Result<()> {
    let (mut pair, mut session) = pair(Direction::UP)?;
    pair.subscriber.execute_script(
        "CREATE TABLE public.noted (id bigint); \
         CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS \
           $$BEGIN INSERT INTO public.noted VALUES (new.id); RETURN new; END$$; \
         CREATE TRIGGER note BEFORE INSERT ON c FOR EACH ROW EXECUTE FUNCTION note(); \
         ALTER TABLE c ENABLE ALWAYS TRIGGER note; \
         ALTER TABLE b ADD COLUMN at timestamptz DEFAULT clock_timestamp()",
    )?;
    let rest = [
        ("TRUNCATE b", "it has changes that are not applied in bulk"),
        (
            "ALTER TABLE a ADD COLUMN more text DEFAULT 'm'; INSERT INTO a VALUES (-1, -1, 'x', 'y')",
            "the target does not have public.a as it is",
        ),
        ("INSERT INTO c VALUES (7)", "it has changes that are not applied in bulk"),
        (
            "INSERT INTO b VALUES (5000, 'has a column of its own on the target')",
            "columns of its own on the target",
        ),
    ];
    for (number, (statements, why)) in (1..).zip(rest) {
        let before = count(&pair, why);
        insert_early(&mut pair, &mut session, 20_000 * number)?;
        session.batch_execute(statements)?;
        let more = format!(
            "INSERT INTO a (id, filler) SELECT i, repeat(md5(i::text), 6) \
             FROM generate_series({0}, {0} + 9999) AS i",
            20_000 * number + 10_000
        );
        session.batch_execute(&more)?;
        await_count(&pair, why, before + 1)?;
        session.batch_execute("COMMIT")?;
        pair.await_arrival()?;
        session.batch_execute("BEGIN")?;
    }
    ensure!(count(&pair, APPLIED) == 0, "{}", pair.site.log_tail());
    ensure!(pair.subscriber_says("SELECT count(*) FROM noted")? == "1");
    let both = "SELECT md5(string_agg(a::text, ',' ORDER BY id)) FROM a";
    ensure!(pair.publisher_says(both)? == pair.subscriber_says(both)?);
    Ok(())
}

/// Kills the site while the session's transaction is open, and again at `point` of it. Not where the
/// site, on a machine so busy, fell behind and had it anew in batches: that is said with false.
fn killed_at(point: &str, pair: &mut Pair, session: &mut Client, from: i64) -> Result<bool> {
    insert_early(pair, session, from)?;
    // Once while it is open.
    pair.site.kill9()?;
    pair.site.env("FARSHORE_CRASH", point);
    pair.site.start()?;
    // It arrives anew, from its beginning (after a restart the publisher keeps what it has read
    // again until there is more), and its commit is the first on the target.
    insert_early(pair, session, from + 10_000)?;
    let before = pair.publisher_says("SELECT count(*) FROM a")?;
    ensure!(pair.subscriber_says("SELECT count(*) FROM a")? == before);
    session.batch_execute("COMMIT")?;
    pair.site.await_kill(point, SOON)?;
    // What was sent with the COMMIT, or not, was the early transaction's.
    let is_early = count(pair, GIVEN_UP) == 0;
    ensure!(is_early || count(pair, "far behind") > 0, "{}", pair.site.log_tail());
    pair.site.env("FARSHORE_CRASH", "");
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    session.batch_execute("BEGIN")?;
    Ok(is_early)
}

#[test]
fn a_kill_at_any_step_loses_and_doubles_nothing() -> Result<()> {
    let (mut pair, mut session) = pair(Direction::DOWN)?;
    let points = ["apply.before-commit", "apply.after-commit-sent", "apply.after-commit"];
    let mut from = (0..).step_by(20_000).take(20);
    let mut next = || from.next().context("the site fell behind again and again");
    for point in points {
        while !killed_at(point, &mut pair, &mut session, next()?)? {}
    }
    insert_early(&mut pair, &mut session, next()?)?;
    session.batch_execute("COMMIT; BEGIN")?;
    pair.assert_equal(&["public"])?;
    ensure!(count(&pair, APPLIED) == 1, "{}", pair.site.log_tail());
    // The target crashes with it open.
    let from = next()?;
    insert_early(&mut pair, &mut session, from)?;
    pair.subscriber.kill9()?;
    pair.subscriber.start()?;
    insert(&mut session, from + 10_000)?;
    session.batch_execute("COMMIT")?;
    pair.assert_equal(&["public"])
}

#[test]
fn rows_that_were_rolled_back_are_noticed_when_they_are_kept() -> Result<()> {
    let (mut pair, mut session) = pair(Direction::UP)?;
    pair.site.kill9()?;
    pair.site.env("FARSHORE_DEFECT", "early-keeps-rolled-back");
    pair.site.start()?;
    session.batch_execute("SAVEPOINT one")?;
    insert_early(&mut pair, &mut session, 0)?;
    session.batch_execute("ROLLBACK TO one")?;
    insert(&mut session, 10_000)?;
    session.batch_execute("COMMIT")?;
    pair.await_arrival()?;
    ensure!(count(&pair, APPLIED) == 1, "{}", pair.site.log_tail());
    let said = pair.assert_equal(&["public"]).expect_err("the defect was not noticed");
    ensure!(format!("{said:#}").contains("public.a"), "{said:#}");
    ensure!(pair.subscriber_says("SELECT count(*) > 10000 FROM a")? == "t");
    Ok(())
}

#[test]
fn one_that_waits_for_a_lock_of_somebody_is_no_hindrance_to_a_stop() -> Result<()> {
    both_ways(|direction| {
        let (mut pair, mut session) = pair(direction)?;
        // An application on the target has a row that the transaction changes.
        let mut application = pair.subscriber.connect()?;
        application.batch_execute("BEGIN; SELECT FROM b WHERE id = 1 FOR UPDATE")?;
        session.batch_execute("UPDATE b SET v = 'ours'")?;
        insert(&mut session, 0)?;
        let await_waiting = |pair: &mut Pair| {
            let mut target = pair.subscriber.connect()?;
            pair.site.wait_for("the early transaction to wait", SOON, || {
                let query = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' \
                             AND application_name = 'farshore s'";
                Ok(target.query(query, &[])?.first().map(drop))
            })
        };
        let arrives = |pair: &mut Pair, id: i64| {
            pair.publish(&format!("INSERT INTO c VALUES ({id})"))?;
            pair.site.wait_for("what is not held up", SOON, || {
                let there =
                    pair.subscriber.connect()?.query("SELECT FROM c WHERE id = $1", &[&id])?;
                Ok(there.first().map(drop))
            })
        };
        await_waiting(&mut pair)?;
        arrives(&mut pair, 1)?;
        pair.site.stop_promptly()?;
        pair.site.start()?;
        arrives(&mut pair, 2)?;
        // After a restart the publisher keeps what it has read again until there is more.
        insert(&mut session, 10_000)?;
        await_waiting(&mut pair)?;
        pair.site.kill9()?;
        pair.site.start()?;
        arrives(&mut pair, 3)?;
        application.batch_execute("COMMIT")?;
        session.batch_execute("COMMIT")?;
        pair.assert_equal(&["public"])
    })
}
