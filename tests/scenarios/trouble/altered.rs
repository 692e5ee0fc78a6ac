//! Tables that somebody alters on the target while rows stream to them.

use anyhow::{Context, Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{Direction, Pair, publisher_cluster, subscriber_cluster};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

/// A type that rounds: the subscription stops before it writes a row, and goes on when the column is
/// as it was.
#[test]
fn values_are_not_rounded_where_a_column_got_another_type() -> Result<()> {
    const TABLE: &str = "CREATE TABLE t (id integer PRIMARY KEY, v numeric, at timestamp)";
    for is_side_by_side in [false, true] {
        let mut pair = Pair::new(Direction::UP, &["public.*"], TABLE)?;
        if is_side_by_side {
            pair.apply_side_by_side()?;
        }
        pair.site.start()?;
        let mut id = 0;
        let mut publish = |pair: &Pair| {
            let (from, to) = (id + 1, id + 40);
            id = to;
            pair.publish(&format!(
                "INSERT INTO t SELECT i, i + 0.5678, timestamp '2026-01-01 00:00:00.123456' \
                 FROM generate_series({from}, {to}) i; \
                 UPDATE t SET v = v + 0.1111 WHERE id = {to}"
            ))
        };
        for (altered, before) in [
            ("v TYPE integer", "v TYPE numeric"),
            ("v TYPE numeric(12,1)", "v TYPE numeric"),
            ("at TYPE timestamp(0)", "at TYPE timestamp"),
        ] {
            let case = format!("{altered}, side by side: {is_side_by_side}");
            publish(&pair)?;
            pair.assert_equal(&["public"])?;
            let rows = "SELECT count(*) FROM t";
            let had = pair.subscriber_says(rows)?;
            let alter =
                |what: &str| pair.subscriber.execute_script(&format!("ALTER TABLE t ALTER {what}"));
            alter(altered)?;
            publish(&pair)?;
            let (state, error) =
                pair.site.await_trouble("s", "cannot hold every value").context(case.clone())?;
            ensure!(state == "stopped", "{case}: {state}: {error}");
            ensure!(pair.subscriber_says(rows)? == had, "{case}: rows came");
            // What the altering itself has rounded comes again.
            alter(before)?;
            let resync =
                pair.site.verb("resync", &["--subscription", "s", "--table", "public.t"])?;
            ensure!(resync.code == Some(0), "{case}: {resync:?}");
            pair.site.verb("resume", &["--subscription", "s"])?;
            // Its stop is in the log.
            pair.site.restart()?;
            pair.assert_equal(&["public"]).context(case)?;
        }
    }
    Ok(())
}

/// Another table has taken its name, with a type whose values are as long: nothing is written to it,
/// one by one or by COPY, though statements that were prepared go to whatever has the name.
#[test]
fn a_table_that_takes_anothers_name_gets_none_of_its_rows() -> Result<()> {
    const TABLE: &str = "CREATE TABLE t (id integer PRIMARY KEY, v integer NOT NULL)";
    for is_side_by_side in [false, true] {
        let mut pair = Pair::new(Direction::UP, &["public.*"], TABLE)?;
        if is_side_by_side {
            pair.apply_side_by_side()?;
        }
        pair.site.start()?;
        for (from, to) in [(1, 40), (41, 80)] {
            pair.publish(&format!(
                "INSERT INTO t SELECT i, i FROM generate_series({from}, {to}) i; \
                 UPDATE t SET v = -v WHERE id % 3 = 0; DELETE FROM t WHERE id % 7 = 0"
            ))?;
            pair.assert_equal(&["public"])?;
        }
        for other in ["real NOT NULL", "integer NOT NULL"] {
            let case = format!("{other}, side by side: {is_side_by_side}");
            pair.subscriber.execute_script(&format!(
                "BEGIN; ALTER TABLE t RENAME TO t_before; \
                 CREATE TABLE t (id integer PRIMARY KEY, v {other}); COMMIT"
            ))?;
            pair.publish(
                "INSERT INTO t SELECT max(id) + i, i FROM t, generate_series(1, 40) i GROUP BY i",
            )?;
            let (_, error) = pair
                .site
                .await_trouble("s", "is not the one that was copied")
                .context(case.clone())?;
            ensure!(error.contains("public.t"), "{case}: {error}");
            ensure!(pair.subscriber_says("SELECT count(*) FROM t")? == "0", "{case}: rows came");
            pair.subscriber
                .execute_script("BEGIN; DROP TABLE t; ALTER TABLE t_before RENAME TO t; COMMIT")?;
            pair.site.verb("resume", &["--subscription", "s"])?;
            pair.assert_equal(&["public"]).context(case)?;
        }
    }
    Ok(())
}

/// What Farshore itself alters, following the publisher, fails no group: one partition was changed
/// before the root got its column, and another one behind that, all in one transaction. So with
/// tables that inherit.
#[test]
fn following_a_column_alters_partitions_that_were_changed_before() -> Result<()> {
    const TABLES: &str = "CREATE TABLE root (id integer, k integer, PRIMARY KEY (id, k)) \
        PARTITION BY LIST (k); \
        CREATE TABLE one PARTITION OF root FOR VALUES IN (1); \
        CREATE TABLE two PARTITION OF root FOR VALUES IN (2); \
        CREATE TABLE parent (id integer PRIMARY KEY, v integer); \
        CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent)";
    for is_side_by_side in [false, true] {
        let mut pair = Pair::new(Direction::UP, &["public.*"], TABLES)?;
        if is_side_by_side {
            pair.apply_side_by_side()?;
        }
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        for round in 1..=3 {
            pair.publish(&format!(
                "BEGIN; INSERT INTO two (id, k) VALUES ({round}, 2); \
                 INSERT INTO child (id, v) VALUES ({round}, 1); \
                 ALTER TABLE root ADD COLUMN a{round} integer; \
                 ALTER TABLE parent ADD COLUMN a{round} integer; \
                 INSERT INTO one (id, k, a{round}) VALUES ({round}, 1, {round}); \
                 INSERT INTO parent (id, v, a{round}) VALUES (-{round}, 1, {round}); COMMIT"
            ))?;
            pair.assert_equal(&["public"])?;
            pair.publish(&format!("UPDATE two SET a{round} = 7; UPDATE child SET a{round} = 8"))?;
            pair.assert_equal(&["public"])?;
        }
        let log = pair.site.log();
        ensure!(!log.contains("was altered on the target"), "{log}");
    }
    Ok(())
}

/// A transaction that adds a column in the middle and is at odds with the target is applied change by
/// change: what came before the column is of the older version of the table.
#[test]
fn a_column_is_added_within_a_transaction_that_is_at_odds_with_the_target() -> Result<()> {
    const TABLES: &str = "CREATE TABLE t (id integer PRIMARY KEY, v text); \
        CREATE TABLE root (id integer, k integer, PRIMARY KEY (id, k)) PARTITION BY LIST (k); \
        CREATE TABLE one PARTITION OF root FOR VALUES IN (1); \
        CREATE TABLE two PARTITION OF root FOR VALUES IN (2)";
    for policy in ["skip", "stop"] {
        let mut pair = Pair::new(Direction::UP, &["public.*"], TABLES)?;
        pair.site.replace("batches = ", &format!("on_conflict = \"{policy}\"\nbatches = "))?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        for round in 1..=2 {
            let (id, taken) = (round * 10, round * 10 + 1);
            let mine = format!("INSERT INTO t (id, v) VALUES ({taken}, 'mine')");
            pair.subscriber.execute_script(&mine)?;
            pair.publish(&format!(
                "BEGIN; INSERT INTO t (id, v) VALUES ({id}, 'before'); \
                 INSERT INTO two (id, k) VALUES ({id}, 2); \
                 ALTER TABLE t ADD COLUMN c{round} integer; \
                 ALTER TABLE root ADD COLUMN c{round} integer; \
                 INSERT INTO t (id, v, c{round}) VALUES ({taken}, 'theirs', 1), ({id} + 2, 'x', 2); \
                 INSERT INTO one (id, k, c{round}) VALUES ({id}, 1, 1); \
                 UPDATE t SET c{round} = 3 WHERE id = {id}; COMMIT"
            ))?;
            if policy == "stop" {
                let (_, error) = pair.site.await_trouble("s", "already exists")?;
                ensure!(error.contains(&format!("({taken})")), "{error}");
                pair.subscriber.execute_script(&format!("DELETE FROM t WHERE id = {taken}"))?;
                pair.site.verb("resume", &["--subscription", "s"])?;
            } else {
                pair.await_arrival()?;
                let kept = format!("SELECT v FROM t WHERE id = {taken}");
                ensure!(pair.subscriber_says(&kept)? == "mine", "it was not left out");
                pair.subscriber.execute_script(&format!("DELETE FROM t WHERE id = {taken}"))?;
                pair.publish(&format!("DELETE FROM t WHERE id = {taken}"))?;
            }
            pair.assert_equal(&["public"])?;
            pair.publish(&format!("UPDATE t SET c{round} = 7; UPDATE two SET c{round} = 7"))?;
            pair.assert_equal(&["public"])?;
        }
    }
    Ok(())
}

/// A trigger that fires for what is applied sees every row change, also those that a batch would
/// have netted.
#[test]
fn a_trigger_that_is_made_meanwhile_fires_for_each_change() -> Result<()> {
    let mut pair = Pair::new(
        Direction::UP,
        &["public.t"],
        "CREATE TABLE t (id integer PRIMARY KEY, v integer)",
    )?;
    pair.site.replace("batches = \"auto\"", "batches = \"always\"")?;
    pair.publish("INSERT INTO t SELECT i, 0 FROM generate_series(1, 2000) i")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.publish("UPDATE t SET v = v + 1")?;
    pair.await_arrival()?;
    pair.subscriber.execute_script(
        "CREATE TABLE public.seen (n bigint GENERATED ALWAYS AS IDENTITY, what text); \
         CREATE FUNCTION public.see() RETURNS trigger LANGUAGE plpgsql AS \
         $$ BEGIN INSERT INTO public.seen (what) VALUES (TG_OP); RETURN NULL; END $$; \
         CREATE TRIGGER sees AFTER INSERT OR UPDATE OR DELETE ON t \
         FOR EACH ROW EXECUTE FUNCTION public.see(); \
         ALTER TABLE t ENABLE ALWAYS TRIGGER sees",
    )?;
    for _ in 0..2 {
        pair.publish("UPDATE t SET v = v + 1 WHERE id <= 1000")?;
    }
    pair.publish(
        "BEGIN; DELETE FROM t WHERE id <= 10; \
         INSERT INTO t SELECT i, 7 FROM generate_series(1, 10) i; COMMIT",
    )?;
    pair.await_arrival()?;
    let seen = "SELECT string_agg(what || ' ' || n, ', ' ORDER BY what) FROM \
                (SELECT what, count(*) AS n FROM public.seen GROUP BY what) c";
    let seen = pair.subscriber_says(seen)?;
    ensure!(seen == "DELETE 10, INSERT 10, UPDATE 2000", "{seen}");
    Ok(())
}

/// No session has it: it may keep a lock for ever.
#[test]
fn a_prepared_transaction_that_holds_a_lock_is_named() -> Result<()> {
    let publisher = publisher_cluster(15)?.start()?;
    let subscriber = subscriber_cluster(18)?.setting("max_prepared_transactions", 4).start()?;
    let mut pair = Pair::of(publisher, subscriber)?;
    pair.on_both("CREATE TABLE t (id integer PRIMARY KEY, v integer)")?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url("postgres");
    pair.add_subscription("s", "p", &target)?;
    pair.publish("INSERT INTO t VALUES (1, 1)")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    // Another one holds nothing that is waited for.
    pair.subscriber.execute_script("CREATE TABLE public.other (id integer)")?;
    for (work, name) in [
        ("UPDATE t SET v = v WHERE id = 1", "forgotten"),
        ("INSERT INTO public.other VALUES (1)", "innocent"),
    ] {
        let prepare = format!("BEGIN; {work}; PREPARE TRANSACTION '{name}'");
        pair.subscriber.execute_script(&prepare)?;
    }
    pair.publish("UPDATE t SET v = 2")?;
    let (_, error) = pair.site.await_trouble("s", "a prepared transaction, 'forgotten'")?;
    ensure!(error.contains("ROLLBACK PREPARED") && !error.contains("innocent"), "{error}");
    for name in ["forgotten", "innocent"] {
        pair.subscriber.execute_script(&format!("ROLLBACK PREPARED '{name}'"))?;
    }
    pair.assert_equal(&["public"])?;
    wait_until("it to be told no more", SOON, &[&pair.site.log_path()], || {
        Ok(pair.site.status()?["subscriptions"][0]["error"].is_null().then_some(()))
    })
}
