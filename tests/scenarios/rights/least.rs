//! Copy, stream, TRUNCATE, restart and interruption with the least rights, foreign keys firing or
//! not.

use crate::foreign_keys::{CHANGES, GROWTH, ROWS, SCHEMA};
use crate::guide;
use anyhow::{Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{DATABASE, Direction, Pair};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

/// Who makes the publication and the slot.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Publication {
    Made,
    Adopted,
}

/// Whether the target's role may set `session_replication_role`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Triggers {
    Quiet,
    Firing,
}

fn pair(direction: Direction, publication: Publication, triggers: Triggers) -> Result<Pair> {
    let mut pair = Pair::bare(direction)?;
    pair.on_both(SCHEMA)?;
    // The tables belong to somebody who has nothing to do with replication.
    pair.on_both(
        "CREATE ROLE app; DO $$ DECLARE t regclass; BEGIN FOR t IN SELECT oid FROM pg_class \
         WHERE relkind = 'r' AND relnamespace IN ('public'::regnamespace, \
         'farshore_marks'::regnamespace) LOOP EXECUTE 'ALTER TABLE ' || t || ' OWNER TO app'; \
         END LOOP; END $$; ALTER SCHEMA farshore_marks OWNER TO app",
    )?;
    pair.publish(ROWS)?;
    let more = match publication {
        Publication::Made => {
            pair.publish(&guide::sql("Publisher: Farshore makes the publication")?)?;
            ""
        }
        Publication::Adopted => {
            pair.publish(&guide::sql("Publisher: somebody else makes the publication")?)?;
            pair.publish("CREATE PUBLICATION handed FOR TABLES IN SCHEMA public, farshore_marks")?;
            pair.publish("SELECT pg_create_logical_replication_slot('handed', 'pgoutput')")?;
            "adopt_publication = \"handed\"\nadopt_slot = \"handed\""
        }
    };
    pair.subscriber.execute_script(&guide::sql("Target: the tables are there")?)?;
    if triggers == Triggers::Quiet {
        pair.subscriber
            .execute_script(&guide::sql("Target, 15 and later: triggers keep quiet")?)?;
    }
    pair.add_publication("p", &["public.*"], more)?;
    let as_farshore = |url: String| url.replace("postgres@", "farshore@");
    let (source, target) = (pair.publisher.url(DATABASE), pair.subscriber.url(DATABASE));
    pair.site.replace(&source, &as_farshore(source.clone()))?;
    pair.add_subscription("s", "p", &as_farshore(target))?;
    Ok(pair)
}

fn copy_stream_and_restart(
    direction: Direction,
    publication: Publication,
    triggers: Triggers,
    batches: &str,
) -> Result<()> {
    let mut pair = pair(direction, publication, triggers)?;
    pair.site.replace("batches = \"auto\"", &format!("batches = \"{batches}\""))?;
    let check = pair.site.verb("check", &[])?;
    ensure!(check.code == Some(0), "{}", check.stdout);
    let firing = check.stdout.contains("fire for replicated rows");
    ensure!(firing == (triggers == Triggers::Firing), "{}", check.stdout);
    ensure!(firing == check.stdout.contains("see on public.region"), "{}", check.stdout);
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    let changes: Vec<&str> = std::iter::once(GROWTH).chain(CHANGES.iter().copied()).collect();
    for (number, change) in changes.into_iter().enumerate() {
        pair.publish(change)?;
        if number % 4 == 2 {
            pair.site.restart()?;
        }
    }
    pair.assert_equal(&["public"])?;
    // A table that joins later and refers to one that streams.
    pair.on_both(
        "CREATE TABLE late (id integer PRIMARY KEY, region integer REFERENCES region); \
         ALTER TABLE late OWNER TO app; GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON late TO farshore",
    )?;
    pair.publish("INSERT INTO late SELECT i, i FROM generate_series(1, 20) AS i")?;
    pair.site.restart()?;
    pair.await_copy("late")?;
    pair.publish("DELETE FROM late WHERE id > 10; INSERT INTO late VALUES (30, 1000)")?;
    pair.assert_equal(&["public"])?;
    let seen = pair.subscriber_says("SELECT count(*) FROM unpublished.seen")?;
    let wanted = if triggers == Triggers::Firing { "21" } else { "0" };
    ensure!(seen == wanted, "the trigger of the target has fired {seen} times, not {wanted}");
    let check = pair.site.verb("check", &[])?;
    ensure!(check.code == Some(0), "{}", check.stdout);
    pair.site.stop().map(drop)
}

#[test]
fn foreign_keys_and_triggers_fire() -> Result<()> {
    copy_stream_and_restart(Direction::UP, Publication::Made, Triggers::Firing, "auto")?;
    copy_stream_and_restart(Direction::DOWN, Publication::Adopted, Triggers::Firing, "never")
}

#[test]
fn foreign_keys_and_triggers_fire_for_batches() -> Result<()> {
    copy_stream_and_restart(Direction::DOWN, Publication::Made, Triggers::Firing, "always")?;
    copy_stream_and_restart(Direction::UP, Publication::Adopted, Triggers::Firing, "always")
}

#[test]
fn foreign_keys_and_triggers_keep_quiet() -> Result<()> {
    copy_stream_and_restart(Direction::DOWN, Publication::Made, Triggers::Quiet, "always")?;
    copy_stream_and_restart(Direction::UP, Publication::Adopted, Triggers::Quiet, "auto")
}

#[test]
fn an_interrupted_copy_starts_over_with_what_foreign_keys_bind() -> Result<()> {
    for interrupted_after in ["1", "3", "5", "7"] {
        let mut pair = pair(Direction::DOWN, Publication::Made, Triggers::Firing)?;
        let point = format!("snapshot.after-range-commit:{interrupted_after}");
        pair.site.env("FARSHORE_CRASH", &point);
        pair.site.start()?;
        pair.site.await_kill(&point, SOON)?;
        // New parents with children; parents that go with their children.
        pair.publish(GROWTH)?;
        pair.publish(CHANGES[1])?;
        pair.publish(CHANGES[3])?;
        pair.site.env("FARSHORE_CRASH", "");
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("DELETE FROM orders WHERE id % 5 = 0; INSERT INTO alone VALUES (0, 'z')")?;
        pair.assert_equal(&["public"])?;
        pair.site.stop()?;
    }
    Ok(())
}

#[test]
fn a_circle_that_cannot_wait_is_found_beforehand() -> Result<()> {
    let mut pair = pair(Direction::UP, Publication::Made, Triggers::Firing)?;
    pair.subscriber
        .execute_script("ALTER TABLE department ALTER CONSTRAINT head NOT DEFERRABLE")?;
    let check = pair.site.verb("check", &[])?;
    ensure!(check.code == Some(1), "{}", check.stdout);
    let remedy = "ALTER TABLE public.department ALTER CONSTRAINT head DEFERRABLE";
    ensure!(check.stdout.contains(remedy), "{}", check.stdout);
    pair.site.start()?;
    let line = pair.site.await_log("stopped: ", SOON)?;
    ensure!(line.contains(remedy), "{line}");
    pair.site.stop()?;
    let nothing = "SELECT count(*) FROM region";
    ensure!(pair.subscriber_says(nothing)? == "0", "something was copied");
    pair.subscriber.execute_script(remedy)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])
}

/// One statement may write a child before its parent, and delete a parent before its child: it is
/// checked when it has done both, and a row at a time it would never go.
#[test]
fn a_statement_that_writes_children_first_goes_as_it_is_written() -> Result<()> {
    let mut pair = pair(Direction::UP, Publication::Made, Triggers::Firing)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    let statements = [
        "WITH c AS (INSERT INTO customer VALUES (50000, 1)) INSERT INTO orders VALUES (50000, 50000)",
        "UPDATE alone SET v = v || '.' WHERE id = 1",
        "WITH o AS (DELETE FROM orders WHERE id = 50000) DELETE FROM customer WHERE id = 50000",
        // Its own table.
        "INSERT INTO customer VALUES (40000, 1, 40001), (40001, 1, NULL)",
        "DELETE FROM customer WHERE id IN (40000, 40001)",
    ];
    for statement in statements {
        pair.publish(statement)?;
        pair.await_arrival()?;
    }
    // One after the other, while the first is on its way.
    let mut source = pair.publisher.connect()?;
    for statement in statements.repeat(5) {
        source.batch_execute(statement)?;
    }
    pair.assert_equal(&["public"])?;
    // What fails as a batch too is said.
    pair.subscriber.execute_script("DELETE FROM a_line; DELETE FROM orders WHERE id = 6000")?;
    pair.publish("INSERT INTO a_line VALUES (6000, 5, 'v')")?;
    let line = pair.site.await_log("stopped: ", SOON)?;
    ensure!(line.contains("a_line_orders_fkey"), "{line}");
    Ok(())
}

/// PostgreSQL alters no table that it has still to check rows of, and on the target checks wait that
/// the publisher had made.
#[test]
fn columns_follow_where_checks_wait() -> Result<()> {
    // Of the same transaction, and of one before, which the target applies together with it.
    const ALTERED: &[&str] = &[
        "BEGIN; UPDATE department SET head = NULL WHERE id = 1; \
         UPDATE department SET head = 12 WHERE id = 1; \
         ALTER TABLE department ADD COLUMN floor integer DEFAULT 3; \
         UPDATE department SET floor = 4, head = 11 WHERE id = 1; COMMIT",
        "INSERT INTO employee VALUES (500, 2)",
        "UPDATE department SET head = 500 WHERE id = 2",
        "ALTER TABLE employee ADD COLUMN badge text",
        "ALTER TABLE department DROP COLUMN floor",
        "UPDATE department SET head = 500 WHERE id = 3",
        "INSERT INTO employee VALUES (501, 3, 'b')",
    ];
    for batches in ["always", "never"] {
        let mut pair = pair(Direction::UP, Publication::Made, Triggers::Firing)?;
        pair.site.replace("batches = \"auto\"", &format!("batches = \"{batches}\""))?;
        pair.site.add("follow_ddl = \"add-drop\"")?;
        pair.subscriber.execute_script(
            "ALTER TABLE department OWNER TO farshore; ALTER TABLE employee OWNER TO farshore",
        )?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.site.stop()?;
        for statements in ALTERED {
            pair.publish(statements)?;
        }
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.site.stop()?;
    }
    Ok(())
}

/// What the role may not read, or not set, is named with the SQL that lets it.
#[test]
fn a_table_that_joins_and_sequences_that_stay_behind_are_named() -> Result<()> {
    const ON_THE_TARGET: &str = "GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON";
    let mut pair = pair(Direction::UP, Publication::Adopted, Triggers::Quiet)?;
    let check = pair.site.verb("check", &[])?;
    ensure!(check.code == Some(0) && !check.stdout.contains("sequences"), "{}", check.stdout);
    pair.on_both("CREATE TABLE counted (id serial PRIMARY KEY)")?;
    pair.publish("GRANT SELECT ON counted TO farshore")?;
    pair.subscriber.execute_script(&format!("{ON_THE_TARGET} counted TO farshore"))?;
    let check = pair.site.verb("check", &[])?;
    ensure!(check.code == Some(0), "{}", check.stdout);
    let read = "GRANT SELECT ON SEQUENCE public.counted_id_seq TO farshore";
    let set = "GRANT SELECT, UPDATE ON SEQUENCE public.counted_id_seq TO farshore";
    ensure!(check.stdout.contains(read) && check.stdout.contains(set), "{}", check.stdout);
    pair.site.start()?;
    let line = pair.site.await_log("role farshore may not read sequence", SOON)?;
    ensure!(line.contains(read), "{line}");
    pair.publish(read)?;
    pair.publish("INSERT INTO counted VALUES (DEFAULT), (DEFAULT)")?;
    let line = pair.site.await_log("role farshore may not set sequence", SOON)?;
    ensure!(line.contains(set), "{line}");
    pair.subscriber.execute_script(set)?;
    let check = pair.site.verb("check", &[])?;
    ensure!(check.code == Some(0) && !check.stdout.contains("sequences"), "{}", check.stdout);

    pair.on_both("CREATE TABLE newt (id integer PRIMARY KEY)")?;
    pair.subscriber.execute_script(&format!("{ON_THE_TARGET} newt TO farshore"))?;
    pair.publish("INSERT INTO newt VALUES (1)")?;
    let grant = "GRANT SELECT ON public.newt TO farshore";
    let (state, error) =
        pair.site.await_trouble("s", &format!("{grant}; and go on (farshore resume)"))?;
    ensure!(state == "stopped", "{state}: {error}");
    pair.publish(grant)?;
    let resumed = pair.site.verb("resume", &["--subscription", "s"])?;
    ensure!(resumed.code == Some(0), "{resumed:?}");
    // The log tells of the stop; only the status is of now.
    let mut target = pair.subscriber.connect()?;
    wait_until("the row of the new table", SOON, &[], || {
        Ok(target.query_opt("SELECT FROM newt WHERE id = 1", &[])?.map(drop))
    })?;
    pair.site.restart()?;
    pair.assert_equal(&["public"])
}

/// Under a wildcard somebody else's table appears.
#[test]
fn a_table_that_may_not_be_published_holds_up_no_others() -> Result<()> {
    const OF_APP: &str = "ALTER TABLE TABLE OWNER TO app; \
        GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON TABLE TO farshore";
    let mut pair = pair(Direction::UP, Publication::Made, Triggers::Quiet)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.on_both("CREATE TABLE strange (id integer PRIMARY KEY)")?;
    pair.publish("INSERT INTO strange VALUES (1)")?;
    let (state, error) = pair.site.await_trouble("p", "does not own public.strange")?;
    ensure!(state == "streaming", "{state}: {error}");
    pair.on_both(&format!(
        "CREATE TABLE late (id integer PRIMARY KEY); {}",
        OF_APP.replace("TABLE OWNER", "late OWNER").replace("ON TABLE", "ON late")
    ))?;
    pair.publish("INSERT INTO late VALUES (1)")?;
    pair.await_copy("late")?;
    pair.publish(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'farshore'",
    )?;
    pair.publish("INSERT INTO late VALUES (2)")?;
    pair.await_arrival()?;
    ensure!(pair.subscriber_says("SELECT count(*) FROM late")? == "2");
    // It is let, and copied.
    pair.on_both(
        &OF_APP.replace("TABLE OWNER", "strange OWNER").replace("ON TABLE", "ON strange"),
    )?;
    pair.await_copy("strange")?;
    wait_until("nothing to say", SOON, &[&pair.site.log_path()], || {
        Ok(pair.site.status()?["publications"][0]["error"].is_null().then_some(()))
    })?;
    pair.assert_equal(&["public"])
}
