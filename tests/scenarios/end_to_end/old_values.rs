//! What rows have that were there when a column was added is not in the log. The publisher is asked
//! when the first change arrives, and may have gone on by then.

use anyhow::{Context, Result, ensure};
use farshore_tests::{Direction, Pair, both_ways};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const TABLES: &str = "CREATE TABLE t (id integer PRIMARY KEY, a text); \
    CREATE TABLE u (id integer PRIMARY KEY, a text)";

fn streaming(direction: Direction) -> Result<Pair> {
    let mut pair = Pair::new(direction, &["public.t", "public.u"], TABLES)?;
    pair.publish("INSERT INTO t SELECT i, 'a' FROM generate_series(1, 50) i")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    Ok(pair)
}

/// Either both sides are equal, or the subscription has stopped, and said why, and is equal when the
/// table was copied anew.
fn ends_equal(pair: &mut Pair, stops: bool, case: &str) -> Result<()> {
    if stops {
        let (state, error) = pair.site.await_trouble("s", "are not in the log")?;
        ensure!(state == "stopped" && error.contains("public.t"), "{case}: {state}: {error}");
        let resync = ["--subscription", "s", "--table", "public.t"];
        for (verb, arguments) in [("resync", &resync[..]), ("resume", &["--subscription", "s"])] {
            let done = pair.site.verb(verb, arguments)?;
            ensure!(done.code == Some(0), "{case}: {done:?}");
        }
    }
    pair.assert_equal(&["public"]).with_context(|| case.to_owned())?;
    pair.publish("UPDATE t SET a = 'last' WHERE id % 3 = 0; DELETE FROM t WHERE id = 7")?;
    pair.assert_equal(&["public"]).with_context(|| case.to_owned())
}

/// Of a column that the publisher filled row by row nothing may tell any more when it is asked: the
/// default is gone, rows were changed and deleted, the table was rewritten again.
#[test]
fn a_column_that_was_filled_row_by_row_is_not_empty_here() -> Result<()> {
    both_ways(|direction| {
        for (add, then, stops) in [
            ("c timestamptz DEFAULT clock_timestamp()", "", true),
            ("c uuid DEFAULT gen_random_uuid()", "ALTER TABLE t ALTER c DROP DEFAULT", true),
            (
                "c timestamptz DEFAULT clock_timestamp()",
                "UPDATE t SET a = 'b' WHERE id < 40; DELETE FROM t WHERE id > 45; \
                 ALTER TABLE t ALTER c DROP DEFAULT",
                true,
            ),
            (
                "c uuid DEFAULT gen_random_uuid()",
                "ALTER TABLE t ALTER c DROP DEFAULT; VACUUM FULL t",
                true,
            ),
            ("c integer DEFAULT 7", "ALTER TABLE t ALTER c DROP DEFAULT; VACUUM FULL t", true),
            // What it was filled with is known, or nothing was.
            ("c integer DEFAULT 7", "ALTER TABLE t ALTER c DROP DEFAULT", false),
            ("c integer", "UPDATE t SET c = id WHERE id < 40; VACUUM FULL t", false),
            ("c integer", "VACUUM FULL t; UPDATE t SET c = id", false),
        ] {
            let case = format!("{add}; {then}");
            let mut pair = streaming(direction)?;
            pair.site.stop()?;
            // In one transaction, as migrations come, and in several.
            pair.publish(&format!("ALTER TABLE t ADD COLUMN {add}"))?;
            pair.publish("INSERT INTO t (id, a) VALUES (100, 'new')")?;
            for statement in then.split("; ").filter(|statement| !statement.is_empty()) {
                pair.publish(statement)?;
            }
            pair.site.start()?;
            ends_equal(&mut pair, stops, &case)?;
        }
        Ok(())
    })
}

/// As migrations come: in one transaction, in which rows are filled by an UPDATE or by a default.
#[test]
fn a_column_that_is_filled_in_the_transaction_that_adds_it() -> Result<()> {
    for (fill, stops) in [
        ("ALTER TABLE t ADD COLUMN c integer; UPDATE t SET c = id WHERE id < 40", false),
        (
            "ALTER TABLE t ADD COLUMN c uuid DEFAULT gen_random_uuid(); \
             ALTER TABLE t ALTER c DROP DEFAULT; UPDATE t SET a = 'b' WHERE id = 1",
            true,
        ),
    ] {
        let mut pair = streaming(Direction::DOWN)?;
        // Another file than the one that was copied, so that its number tells nothing.
        pair.publish("VACUUM FULL t")?;
        pair.publish(&format!("BEGIN; {fill}; COMMIT"))?;
        ends_equal(&mut pair, stops, fill)?;
    }
    Ok(())
}

/// The answer is lost with the node, or never comes while the publisher is away, and it is another one
/// the next time.
#[test]
fn the_publisher_is_asked_again_after_a_kill() -> Result<()> {
    let both = [(true, "uuid DEFAULT gen_random_uuid()"), (false, "integer DEFAULT 7")];
    for (stops, add) in both {
        let mut pair = streaming(Direction::UP)?;
        pair.site.stop()?;
        pair.publish(&format!("ALTER TABLE t ADD COLUMN c {add}"))?;
        pair.publish("INSERT INTO t (id, a) VALUES (100, 'new')")?;
        let mut crashed = 0;
        if !stops {
            for crash in ["apply.before-commit:1", "apply.after-commit-sent:1"] {
                pair.site.env("FARSHORE_CRASH", crash);
                pair.site.start()?;
                pair.site.await_kill(crash, SOON)?;
                pair.publish(&format!("UPDATE t SET a = 'crash' WHERE id = {crashed} + 1"))?;
                crashed += 1;
            }
            pair.site.env("FARSHORE_CRASH", "");
        }
        pair.publish("ALTER TABLE t ALTER c DROP DEFAULT; DELETE FROM t WHERE id < 10")?;
        pair.site.start()?;
        ends_equal(&mut pair, stops, add)?;
    }
    Ok(())
}

/// Under another name, or with another name or type of the column, the publisher seems to have nothing
/// of what is asked about.
#[test]
fn a_table_or_column_that_is_called_otherwise_when_the_publisher_is_asked() -> Result<()> {
    for (before, after, stops) in [
        ("ALTER TABLE t RENAME TO x", "ALTER TABLE x RENAME TO t", false),
        (
            "CREATE SCHEMA apart; ALTER TABLE t SET SCHEMA apart",
            "ALTER TABLE apart.t SET SCHEMA public",
            false,
        ),
        ("ALTER TABLE t RENAME c TO d", "ALTER TABLE t RENAME d TO c", true),
        ("ALTER TABLE t ALTER c TYPE bigint", "ALTER TABLE t ALTER c TYPE integer", true),
    ] {
        let mut pair = streaming(Direction::UP)?;
        pair.site.stop()?;
        pair.publish(
            "ALTER TABLE t ADD COLUMN c integer DEFAULT 7; INSERT INTO t (id, a) VALUES (100, 'new')",
        )?;
        pair.publish(before)?;
        pair.publish("INSERT INTO u VALUES (1, 'behind it')")?;
        pair.site.start()?;
        if stops {
            pair.site.await_trouble("s", "are not in the log").context(before)?;
        } else {
            let arrived = "SELECT count(*) FROM u";
            let target = pair.subscriber.url("postgres");
            let mut target = postgres::Client::connect(&target, postgres::NoTls)?;
            pair.site.wait_for("what is behind the column", SOON, || {
                let count: i64 = target.query_one(arrived, &[])?.get(0);
                Ok((count == 1).then_some(()))
            })?;
        }
        pair.publish(after)?;
        ends_equal(&mut pair, stops, before)?;
    }
    Ok(())
}
