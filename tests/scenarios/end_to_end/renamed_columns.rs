//! Columns that are renamed on the publisher get their new names on the target.

use anyhow::{Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{Direction, Pair, both_ways};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

fn never_stopped(pair: &Pair) -> Result<()> {
    ensure!(!pair.site.log().contains(" stopped: "), "{}", pair.site.log_tail());
    Ok(())
}

/// Values of old rows stay with their columns, whatever those are called in between.
#[test]
fn renamed_columns_follow() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, a text, \"b \"\"B\" text, c text); \
             CREATE TABLE wide (a integer, b bigint, c text, PRIMARY KEY (a, b)); \
             CREATE TABLE full_rows (a text, b text); ALTER TABLE full_rows REPLICA IDENTITY FULL";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.publish(
            "INSERT INTO t SELECT i, 'a' || i, 'b' || i, 'c' || i FROM generate_series(1, 50) i; \
             INSERT INTO wide SELECT i, -i, 'c' FROM generate_series(1, 50) i; \
             INSERT INTO full_rows SELECT 'a' || i, 'b' || i FROM generate_series(1, 50) i",
        )?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.subscriber.execute_script("CREATE VIEW of_t AS SELECT id, a, c FROM t")?;
        let renames = [
            "ALTER TABLE t RENAME c TO \"C c\"",
            "ALTER TABLE t RENAME id TO key; ALTER TABLE t RENAME a TO \"it's\"",
            // Crosswise, and around.
            "ALTER TABLE t RENAME \"it's\" TO x; ALTER TABLE t RENAME \"C c\" TO \"it's\"; \
             ALTER TABLE t RENAME x TO \"C c\"",
            "ALTER TABLE t RENAME \"it's\" TO x; ALTER TABLE t RENAME \"b \"\"B\" TO \"it's\"; \
             ALTER TABLE t RENAME \"C c\" TO \"b \"\"B\"; ALTER TABLE t RENAME x TO \"C c\"",
            "ALTER TABLE t RENAME key TO id; ALTER TABLE t RENAME \"it's\" TO a; \
             ALTER TABLE t RENAME \"C c\" TO c",
            // The key's.
            "ALTER TABLE wide RENAME a TO x; ALTER TABLE wide RENAME b TO a; \
             ALTER TABLE wide RENAME x TO b",
            "ALTER TABLE full_rows RENAME a TO x; ALTER TABLE full_rows RENAME b TO a; \
             ALTER TABLE full_rows RENAME x TO b",
        ];
        let changes = |n: usize| {
            format!(
                "INSERT INTO t VALUES ({0}, 'new', 'new', 'new'); DELETE FROM full_rows WHERE a LIKE \
                 '%{n}'; INSERT INTO full_rows VALUES ('new', '{n}'); UPDATE wide SET c = 'u{n}' WHERE a % 7 = 0; DELETE FROM wide WHERE b = {n}",
                1000 + n
            )
        };
        // While it runs, and what it finds when it starts, with the next ones done already.
        for stopped in [false, true] {
            if stopped {
                pair.site.stop()?;
            }
            for (n, rename) in renames.iter().enumerate() {
                pair.publish(&format!("BEGIN; {rename}; COMMIT"))?;
                pair.publish(&changes(if stopped { 20 + n } else { n }))?;
                if !stopped {
                    pair.assert_equal(&["public"])?;
                }
            }
            if stopped {
                pair.site.start()?;
                pair.assert_equal(&["public"])?;
            }
        }
        // Each behind the change before it, in one transaction.
        pair.publish(
            "BEGIN; UPDATE t SET a = 'before' WHERE id < 5; ALTER TABLE t RENAME a TO z; \
             UPDATE t SET z = 'after' WHERE id < 3; ALTER TABLE t RENAME c TO a; \
             INSERT INTO t VALUES (3000, '', '', ''); COMMIT",
        )?;
        pair.assert_equal(&["public"])?;
        never_stopped(&pair)
    })
}

/// Some are new, some are gone, some are called otherwise, and no change came in between.
#[test]
fn columns_are_renamed_added_and_dropped_at_once() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, a text, b text, c text)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.site.replace("[subscription.s]", "[subscription.s]\nfollow_ddl = \"add-drop\"")?;
        pair.publish("INSERT INTO t SELECT i, 'a', 'b', 'c' FROM generate_series(1, 50) i")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        for (n, alter) in [
            "DROP b, ADD d integer DEFAULT 4",
            "RENAME a TO e; ALTER TABLE t DROP c, ADD a text DEFAULT 'new a'",
            "RENAME d TO x; ALTER TABLE t RENAME a TO d; ALTER TABLE t RENAME x TO a; \
             ALTER TABLE t ADD b integer DEFAULT 5",
        ]
        .iter()
        .enumerate()
        {
            pair.publish(&format!("BEGIN; ALTER TABLE t {alter}; COMMIT"))?;
            pair.publish(&format!("INSERT INTO t (id) VALUES ({})", 100 + n))?;
            pair.assert_equal(&["public"])?;
        }
        never_stopped(&pair)
    })
}

/// As a table gets a larger key while it is in use.
#[test]
fn an_integer_key_becomes_a_larger_one() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, v text)";
    let mut pair = Pair::new(Direction::UP, &["public.*"], schema)?;
    pair.publish("INSERT INTO t SELECT i, 'v' || i FROM generate_series(1, 100) i")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.publish(
        "ALTER TABLE t ADD id_new bigint; \
         CREATE FUNCTION fill() RETURNS trigger LANGUAGE plpgsql AS \
           'BEGIN NEW.id_new := NEW.id; RETURN NEW; END'; \
         CREATE TRIGGER fill BEFORE INSERT OR UPDATE ON t FOR EACH ROW EXECUTE FUNCTION fill()",
    )?;
    pair.publish("INSERT INTO t VALUES (101, 'between')")?;
    let noted = "SELECT column_numbers ? 'id_new' FROM farshore.table_copy WHERE table_name = 't'";
    wait_until("the new column to be noted", SOON, &[&pair.site.log_path()], || {
        Ok((pair.subscriber_says(noted)? == "t").then_some(()))
    })?;
    pair.publish("UPDATE t SET id_new = id")?;
    pair.publish("CREATE UNIQUE INDEX t_new ON t (id_new)")?;
    pair.publish(
        "BEGIN; DROP TRIGGER fill ON t; ALTER TABLE t ALTER id_new SET NOT NULL; \
         ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t ALTER id DROP NOT NULL; \
         ALTER TABLE t RENAME id TO id_old; ALTER TABLE t RENAME id_new TO id; \
         ALTER TABLE t ADD CONSTRAINT t_pkey PRIMARY KEY USING INDEX t_new; COMMIT",
    )?;
    // Constraints are not carried.
    pair.await_arrival()?;
    pair.subscriber.execute_script(
        "BEGIN; ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t ALTER id DROP NOT NULL; COMMIT",
    )?;
    pair.publish("INSERT INTO t (id, v) VALUES (3000000000, 'large')")?;
    pair.publish("UPDATE t SET v = 'u' WHERE id < 10; DELETE FROM t WHERE id BETWEEN 20 AND 30")?;
    pair.assert_equal(&["public"])?;
    pair.publish("ALTER TABLE t DROP id_old; UPDATE t SET v = 'last' WHERE id = 3000000000")?;
    pair.await_arrival()?;
    pair.subscriber.execute_script("ALTER TABLE t DROP id_old")?;
    pair.assert_equal(&["public"])?;
    never_stopped(&pair)
}

/// Partitions cannot be renamed by themselves, and come with changes of their own.
#[test]
fn columns_of_partitions_follow() -> Result<()> {
    for more in ["", "publish_via_partition_root = true"] {
        let schema = "CREATE TABLE t (id integer, a text, b text, PRIMARY KEY (id)) \
               PARTITION BY RANGE (id); \
             CREATE TABLE t_low PARTITION OF t FOR VALUES FROM (1) TO (25); \
             CREATE TABLE t_high PARTITION OF t FOR VALUES FROM (25) TO (1000) PARTITION BY RANGE (id); \
             CREATE TABLE t_end PARTITION OF t_high FOR VALUES FROM (25) TO (1000)";
        let mut pair = Pair::bare(Direction::DOWN)?;
        pair.publish(schema)?;
        pair.publish("INSERT INTO t SELECT i, 'a', 'b' FROM generate_series(1, 50) i")?;
        pair.add_publication("p", &["public.*"], more)?;
        let target = pair.subscriber.url(farshore_tests::DATABASE);
        pair.add_subscription("s", "p", &target)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        for (n, rename) in [
            "ALTER TABLE t RENAME a TO c",
            "ALTER TABLE t RENAME c TO x; ALTER TABLE t RENAME b TO c; ALTER TABLE t RENAME x TO b",
            "ALTER TABLE t RENAME b TO a",
        ]
        .iter()
        .enumerate()
        {
            pair.publish(&format!("BEGIN; {rename}; COMMIT"))?;
            pair.publish(&format!("INSERT INTO t VALUES ({}, 'new', 'n')", 100 + n))?;
            pair.publish(
                "DELETE FROM t WHERE id IN (1, 2, 25); UPDATE t SET id = 25 WHERE id = 24",
            )?;
            pair.assert_equal(&["public"])?;
        }
        never_stopped(&pair)?;
    }
    Ok(())
}

/// What the catalogue says when the node starts is ahead of what the stream has still to see.
#[test]
fn numbers_from_ahead_of_the_stream_are_not_believed() -> Result<()> {
    let swap = |a: &str, b: &str| {
        format!(
            "BEGIN; ALTER TABLE t RENAME {a} TO x; ALTER TABLE t RENAME {b} TO {a}; \
             ALTER TABLE t RENAME x TO {b}; COMMIT"
        )
    };
    let swapped = swap("c", "d");
    let histories: [&[&str]; 3] = [
        &[
            "ALTER TABLE t ADD c text, ADD d text",
            "INSERT INTO t VALUES (101, 'a', 'b', 'c', 'd')",
            &swapped,
            "INSERT INTO t (id, c, d) VALUES (102, 'c', 'd')",
        ],
        &[
            "ALTER TABLE t ADD c text",
            "INSERT INTO t VALUES (101, 'a', 'b', 'c')",
            "BEGIN; ALTER TABLE t RENAME c TO d; ALTER TABLE t ADD c text; COMMIT",
            "INSERT INTO t (id, c, d) VALUES (102, 'c', 'd')",
        ],
        &[
            "ALTER TABLE t ADD c text",
            "INSERT INTO t VALUES (101, 'a', 'b', 'c')",
            "BEGIN; ALTER TABLE t DROP c; ALTER TABLE t ADD e text; COMMIT",
            "INSERT INTO t (id, e) VALUES (102, 'e')",
            "ALTER TABLE t RENAME e TO c",
            "INSERT INTO t (id, c) VALUES (103, 'c')",
        ],
    ];
    for history in histories {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, a text, b text)";
        let mut pair = Pair::new(Direction::UP, &["public.*"], schema)?;
        pair.publish("INSERT INTO t SELECT i, 'a', 'b' FROM generate_series(1, 50) i")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.site.stop()?;
        for statements in history {
            pair.publish(statements)?;
        }
        pair.site.start()?;
        let columns = "SELECT string_agg(attname, ', ' ORDER BY attname) FROM pg_attribute \
            WHERE attrelid = 't'::regclass AND attnum > 0 AND NOT attisdropped";
        let names = pair.publisher_says(columns)?;
        let rows = format!("SELECT string_agg(ROW({names})::text, ' ' ORDER BY id) FROM t");
        let there = pair.publisher_says(&rows)?;
        // It is followed, or it stops and is copied anew.
        wait_until("the rows to be the same", SOON, &[&pair.site.log_path()], || {
            let status = pair.site.status()?;
            if status["subscriptions"][0]["state"] == "stopped" {
                pair.site.verb("resync", &["--subscription", "s", "--table", "public.t"])?;
                pair.site.verb("resume", &["--subscription", "s"])?;
            }
            Ok((pair.subscriber_says(&rows).is_ok_and(|here| here == there)).then_some(()))
        })?;
    }
    Ok(())
}

/// What is renamed for one partition is renamed for the others, whatever comes for them next.
#[test]
fn columns_of_partitions_change_places_and_back() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, a text, b text) PARTITION BY RANGE (id); \
        CREATE TABLE t_low PARTITION OF t FOR VALUES FROM (1) TO (25); \
        CREATE TABLE t_high (b text, id integer NOT NULL, a text); \
        ALTER TABLE t ATTACH PARTITION t_high FOR VALUES FROM (25) TO (1000)";
    let mut pair = Pair::new(Direction::DOWN, &["public.*"], schema)?;
    pair.publish("INSERT INTO t SELECT i, 'a', 'b' FROM generate_series(5, 50) i")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    let crossed = "BEGIN; ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; \
        ALTER TABLE t RENAME x TO b; COMMIT";
    for batch in 0..2 {
        pair.site.stop()?;
        pair.publish(&format!("UPDATE t SET a = 'u{batch}' WHERE id IN (20, 30)"))?;
        pair.publish(crossed)?;
        pair.publish(&format!("INSERT INTO t VALUES ({}, '1', '2')", 1 + batch))?;
        pair.publish(crossed)?;
        pair.publish(&format!("INSERT INTO t VALUES ({}, 'A', 'B')", 100 + batch))?;
        pair.publish("UPDATE t SET b = 'last' WHERE id IN (7, 40)")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
    }
    // One name more, and back.
    pair.site.stop()?;
    pair.publish("ALTER TABLE t RENAME a TO x; UPDATE t SET x = 'x' WHERE id = 8")?;
    pair.publish("ALTER TABLE t RENAME x TO a; UPDATE t SET a = 'y' WHERE id = 45")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    never_stopped(&pair)
}

/// Row by row, and with savepoints.
#[test]
fn columns_are_renamed_where_changes_are_applied_carefully() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, a text, b text)";
    let mut pair = Pair::new(Direction::UP, &["public.*"], schema)?;
    pair.site.replace("[subscription.s]", "[subscription.s]\non_conflict = \"skip\"")?;
    pair.publish("INSERT INTO t SELECT i, 'a', 'b' FROM generate_series(1, 50) i")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.site.stop()?;
    pair.subscriber.execute_script("DELETE FROM t WHERE id = 7")?;
    pair.publish("UPDATE t SET a = 'missing' WHERE id = 7")?;
    pair.publish(
        "BEGIN; UPDATE t SET a = 'before' WHERE id = 8; ALTER TABLE t RENAME a TO x; \
         ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b; \
         UPDATE t SET a = 'after' WHERE id IN (8, 9); ALTER TABLE t RENAME b TO c; \
         UPDATE t SET c = 'after' WHERE id = 10; COMMIT",
    )?;
    pair.publish("DELETE FROM t WHERE id = 7")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    ensure!(pair.subscriber_says("SELECT count(*) FROM farshore.conflicts")? != "0");
    never_stopped(&pair)
}

/// Crosswise, and nothing comes that would tell.
#[test]
fn columns_that_change_places_follow_without_a_change() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, a text, b text, c integer)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.publish("INSERT INTO t SELECT i, 'a', 'b', i FROM generate_series(1, 50) i")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        let crossed = "BEGIN; ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; \
            ALTER TABLE t RENAME x TO b; COMMIT";
        pair.publish(crossed)?;
        pair.site.await_log("columns renamed on the target", SOON)?;
        pair.assert_equal(&["public"])?;
        pair.site.stop()?;
        pair.publish(crossed)?;
        pair.publish("ALTER TABLE t RENAME id TO key")?;
        pair.site.start()?;
        pair.site.await_log("columns=id is key now", SOON)?;
        pair.publish("DELETE FROM t WHERE key = 7; UPDATE t SET a = 'last' WHERE key = 9")?;
        pair.assert_equal(&["public"])?;
        never_stopped(&pair)
    })
}

/// Who has renamed them on the target, too, does not find them renamed twice.
#[test]
fn columns_that_were_renamed_by_hand_are_left_alone() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, a text, b text, c text)";
    let mut pair = Pair::new(Direction::UP, &["public.*"], schema)?;
    pair.publish("INSERT INTO t SELECT i, 'a', 'b', 'c' FROM generate_series(1, 50) i")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    let crossed = "BEGIN; ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; \
        ALTER TABLE t RENAME x TO b; COMMIT";
    for rename in [crossed, "ALTER TABLE t RENAME c TO d", crossed] {
        pair.subscriber.execute_script(rename)?;
        pair.publish(rename)?;
        pair.publish("UPDATE t SET a = 'once ' || a WHERE id = 7")?;
        pair.assert_equal(&["public"])?;
    }
    never_stopped(&pair)
}

/// What is undone with the stop has to be done first by who follows by hand.
#[test]
fn a_stop_behind_a_rename_says_both() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, a integer, b text)";
    let mut pair = Pair::new(Direction::UP, &["public.*"], schema)?;
    pair.publish("INSERT INTO t SELECT i, i, 'b' FROM generate_series(1, 50) i")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.publish(
        "BEGIN; ALTER TABLE t RENAME a TO z; ALTER TABLE t ALTER z TYPE text; COMMIT; \
         INSERT INTO t VALUES (100, 'z', 'b')",
    )?;
    let said = pair.site.await_log(" stopped: ", SOON)?;
    let first = "first of all on the target: ALTER TABLE public.t RENAME COLUMN a TO z. And column z \
        has another type: ALTER TABLE public.t ALTER COLUMN z TYPE text";
    ensure!(said.contains(first), "{said}");
    pair.subscriber
        .execute_script("ALTER TABLE t RENAME COLUMN a TO z; ALTER TABLE t ALTER z TYPE text")?;
    pair.site.verb("resume", &["--subscription", "s"])?;
    pair.assert_equal(&["public"])?;
    // What it may not do it says.
    pair.subscriber.execute_script("ALTER TABLE t ADD d integer")?;
    pair.publish("ALTER TABLE t RENAME b TO d; UPDATE t SET d = 'd' WHERE id = 1")?;
    wait_until("a stop", SOON, &[&pair.site.log_path()], || {
        Ok((pair.site.log().matches(" stopped: ").count() == 2).then_some(()))
    })?;
    pair.subscriber.execute_script("ALTER TABLE t DROP d")?;
    pair.site.verb("resume", &["--subscription", "s"])?;
    pair.assert_equal(&["public"])
}

/// Each gets the name of the one before it, and the catalogue is ahead of that when it is looked at:
/// the names that stay are not those of the columns that had them.
#[test]
fn names_that_move_along_are_not_taken_for_a_column_that_was_dropped() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, c0 integer, c1 integer)";
    let mut pair = Pair::new(Direction::UP, &["public.*"], schema)?;
    pair.publish("INSERT INTO t VALUES (1, 1, 2)")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.site.stop()?;
    for statement in [
        "ALTER TABLE t RENAME c1 TO z",
        "ALTER TABLE t RENAME c0 TO c1",
        "INSERT INTO t VALUES (2, 3, 4)",
        "ALTER TABLE t ADD n integer",
        "INSERT INTO t VALUES (3, 5, 6, 7)",
    ] {
        pair.publish(statement)?;
    }
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("s", "stands in another place than before")?;
    let resync = "farshore resync SITE.toml --subscription s --table public.t";
    ensure!(state == "stopped" && error.contains(resync), "{error}");
    pair.site.verb("resync", &["--subscription", "s", "--table", "public.t"])?;
    pair.site.verb("resume", &["--subscription", "s"])?;
    // Whichever gets which name: all of it is copied.
    let rename = "ALTER TABLE public.t RENAME COLUMN c0 TO z";
    pair.site.await_trouble("s", rename)?;
    pair.site.stop()?;
    pair.subscriber.execute_script(rename)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])
}
