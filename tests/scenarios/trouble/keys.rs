//! Keys that identify rows by more than the publisher sends, or by values that are no plain ones.

use anyhow::{Result, ensure};
use farshore_tests::{Direction, Pair};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

fn pair(direction: Direction, schema: &str) -> Result<Pair> {
    let mut pair = Pair::bare(direction)?;
    pair.on_both(schema)?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url("postgres");
    pair.add_subscription("s", "p", &target)?;
    Ok(pair)
}

const GENERATED: &str = "CREATE TABLE g (a integer, b integer, \
    s integer GENERATED ALWAYS AS (b * 2) STORED, v text, PRIMARY KEY (a, s))";

/// Without the generated column a change meets several rows, or a net change swallows one.
#[test]
fn a_key_with_a_generated_column_is_refused_before_and_on_the_way() -> Result<()> {
    let mut pair = pair(Direction::UP, GENERATED)?;
    let checked = pair.site.verb("check", &[])?;
    ensure!(
        checked.code == Some(1) && checked.stdout.contains("has generated columns (s)"),
        "{checked:?}"
    );
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("p", "has generated columns (s)")?;
    ensure!(state == "stopped", "{state}: {error}");
    // By the whole row there is no doubt.
    pair.publish("ALTER TABLE g REPLICA IDENTITY FULL")?;
    // The subscription may come to the same stop by itself, a moment after this one.
    pair.site.restart()?;
    pair.publish(
        "INSERT INTO g (a, b, v) SELECT a, b, 'x' FROM generate_series(1, 3000) a, \
         generate_series(1, 2) b; UPDATE g SET v = 'y' WHERE a % 7 = 0 AND b = 2; \
         DELETE FROM g WHERE b = 1",
    )?;
    pair.assert_equal(&["public"])?;
    // One that joins while everything runs.
    let another = GENERATED.replace("TABLE g", "TABLE h");
    pair.on_both(&another)?;
    pair.publish("INSERT INTO h (a, b) SELECT 5, b FROM generate_series(1, 2) b")?;
    pair.publish("DELETE FROM h WHERE b = 1")?;
    let (state, error) = pair.site.await_trouble("s", "which it does not send")?;
    ensure!(state == "stopped", "{state}: {error}");
    Ok(())
}

/// What would make the publisher refuse its own application's changes is said before it does.
#[test]
fn a_filter_by_other_columns_than_the_key_is_warned_of() -> Result<()> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.on_both("CREATE TABLE t (id integer PRIMARY KEY, v text, n integer)")?;
    let filter = "[publication.p.article.\"public.t\"]\nwhere = \"n > 10 AND id > 0\"\n";
    pair.add_publication("p", &["public.*"], filter)?;
    let checked = pair.site.verb("check", &[])?;
    let said = "the filter of public.t asks for n, which its replica identity has not";
    ensure!(checked.code == Some(0) && checked.stdout.contains(said), "{checked:?}");
    for identity in ["USING INDEX both", "FULL"] {
        pair.publish(
            "ALTER TABLE t ALTER n SET NOT NULL; \
             CREATE UNIQUE INDEX IF NOT EXISTS \"both\" ON t (id, n)",
        )?;
        pair.publish(&format!(
            "ALTER TABLE t REPLICA IDENTITY {}",
            identity.replace("both", "\"both\"")
        ))?;
        let checked = pair.site.verb("check", &[])?;
        ensure!(!checked.stdout.contains("the filter of"), "{identity}: {checked:?}");
    }
    Ok(())
}

/// As it comes, and in batches.
#[test]
fn composite_values_are_keys_like_others() -> Result<()> {
    for is_side_by_side in [false, true] {
        let schema = "CREATE TYPE c AS (a integer, b text); CREATE DOMAIN d AS c; \
            CREATE TABLE one (k c PRIMARY KEY, v text); \
            CREATE TABLE two (n integer, k c, v text, PRIMARY KEY (n, k)); \
            CREATE TABLE three (k d PRIMARY KEY, v text)";
        let mut pair = pair(Direction::UP, schema)?;
        if is_side_by_side {
            pair.apply_side_by_side()?;
        }
        for (table, key) in [("one", "k"), ("two (n, k, v)", "7, k"), ("three", "k::c::d")] {
            pair.publish(&format!(
                "INSERT INTO {table} SELECT {key}, 'x' FROM (SELECT ROW(g, 'a' || g)::c AS k \
                 FROM generate_series(1, 40) g) made"
            ))?;
        }
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        for table in ["one", "two", "three"] {
            pair.publish(&format!(
                "UPDATE {table} SET v = 'y' WHERE (k::c).a % 3 = 0; \
                 DELETE FROM {table} WHERE (k::c).a % 5 = 0; \
                 UPDATE {table} SET k = ROW(-(k::c).a, (k::c).b)::c WHERE (k::c).a % 7 = 0"
            ))?;
        }
        pair.assert_equal(&["public"])?;
    }
    Ok(())
}

/// Time limits of a role are for people's statements.
#[test]
fn time_limits_of_the_publishers_role_and_a_cancelled_statement_stop_nothing() -> Result<()> {
    let mut pair = pair(Direction::DOWN, "CREATE TABLE t (id integer PRIMARY KEY)")?;
    pair.publish("CREATE ROLE far SUPERUSER LOGIN")?;
    for limit in ["statement_timeout = '20ms'", "lock_timeout = '20ms'"] {
        pair.publish(&format!("ALTER ROLE far SET {limit}"))?;
    }
    let source = pair.publisher.url("postgres");
    pair.site.replace(&source, &source.replace("//postgres@", "//far@"))?;
    // The slot waits for it.
    let mut writer = pair.publisher.connect()?;
    let mut open = writer.transaction()?;
    open.batch_execute("INSERT INTO t VALUES (-1)")?;
    pair.site.start()?;
    let mut looking = pair.publisher.connect()?;
    pair.site.wait_for("the slot to wait for a transaction", SOON, || {
        let sql = "SELECT count(*) FROM pg_locks \
                   WHERE NOT granted AND waitstart < clock_timestamp() - interval '200 ms'";
        Ok((looking.query_one(sql, &[])?.get::<_, i64>(0) > 0).then_some(()))
    })?;
    open.commit()?;
    pair.publish("INSERT INTO t SELECT generate_series(1, 100)")?;
    pair.assert_equal(&["public"])?;
    pair.publish("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE usename = 'far'")?;
    pair.publish("INSERT INTO t SELECT generate_series(101, 200)")?;
    pair.assert_equal(&["public"])
}
