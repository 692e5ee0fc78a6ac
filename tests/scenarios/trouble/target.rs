//! A target that refuses, is in the way, or waits for others.

use anyhow::{Result, ensure};
use farshore_testkit::postgres::StopMode;
use farshore_tests::{Checked, DATABASE, Direction, Pair, publisher_cluster, subscriber_cluster};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const TABLES: &str = "CREATE TABLE a (id integer PRIMARY KEY, n integer); \
    CREATE TABLE b (id integer PRIMARY KEY, n integer)";
const BOTH: &str = "BEGIN; UPDATE a SET n = n + 1; UPDATE b SET n = n + 1; COMMIT";

fn checked() -> Result<Checked> {
    let (publisher, subscriber) =
        (publisher_cluster(15)?.start()?, subscriber_cluster(18)?.start()?);
    let checked = Checked::start(publisher, subscriber, &[], "")?;
    Ok(checked)
}

/// Makes the target's sessions of farshore begin anew.
fn end_sessions(pair: &Pair) -> Result<()> {
    pair.subscriber.execute_script(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
         WHERE application_name LIKE 'farshore %'",
    )
}

/// Waits until a connection of apply, or several, have waited this long for a lock that this
/// session holds: connections of apply wait for each other too, for moments.
fn await_apply_waits(pair: &mut Pair, holder: &mut postgres::Client, long: &str) -> Result<()> {
    let waiting = format!(
        "SELECT FROM pg_stat_activity WHERE pg_backend_pid() = ANY (pg_blocking_pids(pid)) \
         AND application_name LIKE 'farshore %' \
         AND clock_timestamp() - query_start > interval '{long}' LIMIT 1"
    );
    pair.site.wait_for("apply to wait for a lock", SOON, || {
        // Inside its transaction, where statistics of sessions are looked at once.
        holder.batch_execute("SELECT pg_stat_clear_snapshot()")?;
        Ok(holder.query_opt(&waiting, &[])?.map(drop))
    })
}

#[test]
fn a_target_that_is_read_only_for_a_while() -> Result<()> {
    let mut checked = checked()?;
    let target = &checked.pair.subscriber;
    target.execute_script("ALTER DATABASE postgres SET default_transaction_read_only = on")?;
    end_sessions(&checked.pair)?;
    let (state, error) = checked.pair.site.await_trouble("s", "25006")?;
    ensure!(state == "retrying", "{state}: {error}");
    checked.await_commits(50)?;
    let target = &checked.pair.subscriber;
    target.execute_script(
        "BEGIN READ WRITE; ALTER DATABASE postgres RESET default_transaction_read_only; COMMIT",
    )?;
    checked.pair.await_arrival()?;
    checked.finish().map(drop)
}

#[test]
fn a_role_loses_a_privilege_and_gets_it_back() -> Result<()> {
    let mut checked = checked()?;
    let port = checked.pair.subscriber.port();
    // Its tables change hands while nothing is applied.
    checked.pair.site.stop()?;
    checked.pair.subscriber.execute_script(
        "CREATE ROLE applier LOGIN; GRANT USAGE ON SCHEMA prefix, farshore_marks TO applier; \
         GRANT CREATE ON DATABASE postgres TO applier; \
         GRANT ALL ON ALL TABLES IN SCHEMA prefix, farshore_marks TO applier; \
         GRANT USAGE ON SCHEMA farshore TO applier; ALTER SCHEMA farshore OWNER TO applier; \
         DO $$ DECLARE t text; BEGIN FOR t IN SELECT quote_ident(tablename) FROM pg_tables \
         WHERE schemaname = 'farshore' LOOP EXECUTE 'ALTER TABLE farshore.' || t || \
         ' OWNER TO applier'; END LOOP; END $$",
    )?;
    let target = format!("target = \"postgres://postgres@127.0.0.1:{port}/");
    let target_as = format!("target = \"postgres://applier@127.0.0.1:{port}/");
    checked.pair.site.replace(&target, &target_as)?;
    checked.pair.site.start()?;
    checked.pair.await_arrival()?;
    checked.pair.subscriber.execute_script("REVOKE INSERT ON prefix.ledger FROM applier")?;
    let (state, error) = checked.pair.site.await_trouble("s", "42501")?;
    ensure!(error.contains("ledger"), "{error}");
    checked.await_commits(20)?;
    checked.pair.subscriber.execute_script("GRANT INSERT ON prefix.ledger TO applier")?;
    if state == "stopped" {
        checked.pair.site.restart()?;
    }
    checked.pair.await_arrival()?;
    checked.finish().map(drop)
}

#[test]
fn others_hold_locks_and_statements_time_out() -> Result<()> {
    let mut checked = checked()?;
    let mut other = checked.pair.subscriber.connect()?;
    // Without a time limit: it waits, and goes on.
    other.batch_execute("BEGIN; LOCK TABLE prefix.ledger IN SHARE MODE")?;
    checked.await_commits(50)?;
    other.batch_execute("COMMIT")?;
    checked.pair.await_arrival()?;
    // Time limits that the target sets for others are not for us.
    other.batch_execute(
        "ALTER DATABASE postgres SET statement_timeout = '1s'; \
         ALTER DATABASE postgres SET lock_timeout = '1s'",
    )?;
    end_sessions(&checked.pair)?;
    other.batch_execute("BEGIN; LOCK TABLE prefix.ledger IN SHARE MODE")?;
    await_apply_waits(&mut checked.pair, &mut other, "2 s")?;
    checked.await_commits(50)?;
    let (state, error) = checked.pair.site.await_trouble("s", "that another session holds")?;
    ensure!(state != "retrying" && error.contains("idle in transaction"), "{state}: {error}");
    // What somebody cancels is tried again. Who waits may be another session by now.
    await_apply_waits(&mut checked.pair, &mut other, "1 s")?;
    other.batch_execute(
        "SELECT pg_cancel_backend(pid) FROM pg_stat_activity \
         WHERE application_name LIKE 'farshore %' AND wait_event_type = 'Lock'",
    )?;
    let (state, error) = checked.pair.site.await_trouble("s", "57014")?;
    ensure!(state == "retrying", "{state}: {error}");
    other.batch_execute(
        "COMMIT; ALTER DATABASE postgres RESET statement_timeout; \
         ALTER DATABASE postgres RESET lock_timeout",
    )?;
    checked.pair.await_arrival()?;
    checked.finish().map(drop)
}

/// A group that is for more tables than the target has room for locks would be refused for ever.
#[test]
fn a_target_with_few_locks() -> Result<()> {
    let mut pair = Pair::new(Direction::UP, &["public.*"], "")?;
    pair.on_both(
        "DO $$ BEGIN FOR i IN 0..1999 LOOP EXECUTE \
         format('CREATE TABLE t%s (id integer PRIMARY KEY)', i); COMMIT; END LOOP; END $$",
    )?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.site.stop()?;
    pair.subscriber.execute_script("ALTER SYSTEM SET max_locks_per_transaction = 10")?;
    pair.subscriber.execute_script("ALTER SYSTEM SET max_connections = 12")?;
    pair.subscriber.restart()?;
    pair.publish(
        "DO $$ BEGIN FOR i IN 1..2000 LOOP FOR k IN 0..9 LOOP EXECUTE \
         format('INSERT INTO t%s VALUES (%s)', (i * 10 + k) % 2000, i); END LOOP; COMMIT; \
         END LOOP; END $$",
    )?;
    pair.site.start()?;
    pair.await_arrival()?;
    let halved = "Groups of transactions are halved for a while (1 times by now)";
    ensure!(pair.site.log().contains(halved), "{}", pair.site.log_tail());
    // One transaction cannot be made smaller: that is said at once, and needs an operator.
    let (before, halved) = (pair.site.log().len(), "Groups of transactions are halved");
    pair.publish(
        "DO $$ BEGIN FOR i IN 0..1999 LOOP EXECUTE \
         format('INSERT INTO t%s VALUES (-1)', i); END LOOP; END $$",
    )?;
    pair.site.await_trouble("s", "max_locks_per_transaction")?;
    ensure!(!pair.site.log()[before..].contains(halved), "{}", pair.site.log_tail());
    // To look at all of it takes locks, too.
    pair.site.stop()?;
    pair.subscriber.execute_script("ALTER SYSTEM RESET ALL")?;
    pair.subscriber.restart()?;
    pair.site.start()?;
    pair.assert_equal(&["public"])
}

#[test]
fn a_deadlock_with_an_outside_session() -> Result<()> {
    let (publisher, subscriber) =
        (publisher_cluster(18)?.start()?, subscriber_cluster(15)?.start()?);
    let mut checked = Checked::start(publisher, subscriber, &["public.*"], TABLES)?;
    let pair = &mut checked.pair;
    pair.publish("INSERT INTO a VALUES (1, 0); INSERT INTO b VALUES (1, 0)")?;
    pair.await_arrival()?;
    // Apply looks for a deadlock once, this long after its wait began: not before the outside
    // session has had the time to close the circle.
    pair.subscriber.execute_script("ALTER DATABASE postgres SET deadlock_timeout = '5s'")?;
    end_sessions(pair)?;
    let mut other = pair.subscriber.connect()?;
    for round in 1..=3 {
        // Whoever waits longest for the other gives way: never the outside session.
        other.batch_execute(
            "SET deadlock_timeout = '60s'; BEGIN; UPDATE b SET n = n WHERE id = 1",
        )?;
        pair.publish(BOTH)?;
        await_apply_waits(pair, &mut other, "0 s")?;
        // Fails for apply, or apply would have it.
        other.batch_execute("UPDATE a SET n = n WHERE id = 1; COMMIT")?;
        pair.await_arrival()?;
        let both = "SELECT a.n || ',' || b.n FROM a, b";
        let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = 'postgres'";
        pair.site.wait_for("the deadlock to be counted", SOON, || {
            let count: i64 = other.query_one(deadlocks, &[])?.get(0);
            Ok((count >= round).then_some(()))
        })?;
        ensure!(pair.subscriber_says(both)? == format!("{round},{round}"), "not exactly once");
    }
    checked.finish().map(drop)
}

/// Nothing is to be applied, and the target is gone: that is noticed all the same.
#[test]
fn a_target_that_goes_while_nothing_happens_is_noticed() -> Result<()> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.on_both("CREATE TABLE t (id integer PRIMARY KEY)")?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url("postgres");
    pair.add_subscription("s", "p", &target)?;
    pair.publish("INSERT INTO t VALUES (1)")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    // No watermark comes either.
    pair.publisher.stop(StopMode::Fast)?;
    pair.subscriber.stop(StopMode::Fast)?;
    let (state, error) = pair.site.await_trouble("s", "refused")?;
    ensure!(state == "retrying", "{state}: {error}");
    pair.subscriber.start()?;
    pair.publisher.start()?;
    pair.publish("INSERT INTO t VALUES (2)")?;
    pair.assert_equal(&["public"])
}

/// What a trigger's function may not do is not what the role needs for the table; and an enum gets the
/// label that it lacks by what the stop says.
#[test]
fn what_a_function_may_not_do_and_a_label_that_is_lacking_say_what_to_do() -> Result<()> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.on_both("CREATE TYPE st AS ENUM ('new'); CREATE TABLE t (id integer PRIMARY KEY, s st)")?;
    pair.subscriber.execute_script(
        "CREATE SCHEMA notes; CREATE TABLE notes.audit (id integer); \
         CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS \
           $$ BEGIN INSERT INTO notes.audit VALUES (NEW.id); RETURN NULL; END $$; \
         CREATE TRIGGER note AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION note(); \
         ALTER TABLE t ENABLE ALWAYS TRIGGER note; \
         CREATE ROLE app LOGIN; GRANT CREATE ON DATABASE postgres TO app; \
         GRANT USAGE ON SCHEMA public, notes, farshore_marks TO app; \
         GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON t, farshore_marks.mark TO app",
    )?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url(DATABASE).replace("postgres@", "app@");
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.await_arrival()?;
    pair.publish("INSERT INTO t VALUES (1, 'new')")?;
    let (state, said) = pair.site.await_trouble("s", "permission denied for table audit")?;
    let within = said.contains("A function on the target") && said.contains("search_path");
    ensure!(state == "stopped" && within && !said.contains("farshore check"), "{state}: {said}");
    pair.subscriber.execute_script("GRANT INSERT ON notes.audit TO app")?;
    pair.site.verb("resume", &["--subscription", "s"])?;
    pair.assert_equal(&["public"])?;
    pair.publish("ALTER TYPE st ADD VALUE 'it''s'")?;
    pair.publish("INSERT INTO t VALUES (2, 'it''s')")?;
    let add = "ALTER TYPE public.st ADD VALUE 'it''s'";
    let (state, said) = pair.site.await_trouble("s", add)?;
    ensure!(state == "stopped", "{state}: {said}");
    pair.subscriber.execute_script(add)?;
    pair.site.verb("resume", &["--subscription", "s"])?;
    pair.await_arrival()?;
    ensure!(pair.subscriber_says("SELECT count(*) FROM t WHERE s = 'it''s'")? == "1");
    Ok(())
}

/// The publisher is to cast them, and names neither table nor column.
#[test]
fn what_a_column_of_the_target_does_not_hold_is_told_when_it_is_copied() -> Result<()> {
    let direction = Direction { publisher: 18, subscriber: 15 };
    let mut pair = Pair::bare(direction)?;
    pair.publish("CREATE TABLE t (id integer PRIMARY KEY, \"B b\" bigint)")?;
    pair.publish("INSERT INTO t SELECT i, i * 1000000000::bigint FROM generate_series(1, 5) i")?;
    pair.subscriber.execute_script("CREATE TABLE t (id integer PRIMARY KEY, \"B b\" integer)")?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("s", "out of range")?;
    let named = "table public.t cannot be copied with the types that columns have on the target \
        (\"B b\" as integer)";
    ensure!(state == "stopped" && error.contains(named), "{state}: {error}");
    pair.subscriber.execute_script("ALTER TABLE t ALTER \"B b\" TYPE bigint")?;
    pair.site.verb("resume", &["--subscription", "s"])?;
    pair.assert_equal(&["public"])
}
