//! Tables and partitions that come and go while the rest streams. Nothing is restarted here.

use crate::definitions::assert_same;
use anyhow::{Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{DATABASE, Direction, Pair, both_ways};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

fn pair(direction: Direction, schema: &str, more: &str) -> Result<Pair> {
    let mut pair = Pair::bare(direction)?;
    pair.publish(schema)?;
    pair.add_publication("p", &["*.*"], more)?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    Ok(pair)
}

/// Waits until the publication has as many tables.
pub fn await_published(pair: &mut Pair, tables: i64) -> Result<()> {
    let mut publisher = pair.publisher.connect()?;
    pair.site.wait_for("the publication to change", SOON, || {
        let count: i64 =
            publisher.query_one("SELECT count(*) FROM pg_publication_tables", &[])?.get(0);
        Ok((count == tables).then_some(()))
    })
}

#[test]
fn new_tables_join_and_dropped_ones_leave_while_the_rest_streams() -> Result<()> {
    both_ways(|direction| {
        let schema =
            "CREATE TABLE t (id integer PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'x')";
        let mut pair = pair(direction, schema, "")?;
        pair.publish(
            "CREATE SCHEMA fresh; CREATE TYPE fresh.kind AS ENUM ('a', 'b'); \
             CREATE TABLE fresh.joins (id serial PRIMARY KEY, k fresh.kind DEFAULT 'a', t integer REFERENCES t); \
             CREATE INDEX ON fresh.joins (k); \
             INSERT INTO fresh.joins (t) SELECT 1 FROM generate_series(1, 300)",
        )?;
        pair.publish("INSERT INTO t VALUES (2, 'y')")?;
        pair.await_copy("joins")?;
        pair.publish(
            "UPDATE fresh.joins SET k = 'b', t = 2 WHERE id % 2 = 0; DELETE FROM t WHERE id = 9",
        )?;
        pair.assert_equal(&["public", "fresh"])?;
        pair.publish("DROP TABLE fresh.joins; INSERT INTO t VALUES (3, 'z')")?;
        await_published(&mut pair, 2)?;
        pair.publish("UPDATE t SET v = 'w'")?;
        pair.assert_equal(&["public"])?;
        ensure!(pair.subscriber_says("SELECT count(*) FROM fresh.joins")? == "300");
        Ok(())
    })
}

const PARTITIONED: &str = "
    CREATE TABLE p (id integer, r integer, v text, PRIMARY KEY (r, id)) PARTITION BY RANGE (r);
    CREATE INDEX p_v ON p (v);
    CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10);
    CREATE TABLE alone (v text, r integer NOT NULL, id integer NOT NULL, PRIMARY KEY (r, id));
    INSERT INTO p SELECT i, i % 10, 'v' FROM generate_series(1, 100) i;
    INSERT INTO alone SELECT 'v', 20 + i % 10, i FROM generate_series(1, 100) i;";

const NEW_PARTITION: &str = "
    CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20);
    INSERT INTO p SELECT i, 10 + i % 10, 'v' FROM generate_series(101, 200) i;
    UPDATE p SET v = 'w' WHERE id % 3 = 0; UPDATE p SET r = r + 10 WHERE r = 1;";

const ATTACH: &str = "
    ALTER TABLE p ATTACH PARTITION alone FOR VALUES FROM (20) TO (30);
    INSERT INTO p SELECT i, 20 + i % 10, 'new' FROM generate_series(201, 300) i;
    UPDATE p SET r = r + 10, v = 'moved' WHERE r = 12; DELETE FROM p WHERE r = 25;";

const DETACH: &str = "ALTER TABLE p DETACH PARTITION p1; \
    INSERT INTO p1 VALUES (1000, 5, 'by itself'); UPDATE p1 SET v = 'by itself' WHERE id % 2 = 0;";

#[test]
fn partitions_come_and_go_leaf_to_leaf() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction, PARTITIONED, "")?;
        pair.publish(NEW_PARTITION)?;
        pair.await_copy("p2")?;
        pair.assert_equal(&["public"])?;
        await_published(&mut pair, 4)?;
        pair.publish(ATTACH)?;
        pair.site.await_log("created partition public.alone", SOON)?;
        pair.assert_equal(&["public"])?;
        assert_same(&pair.publisher, &pair.subscriber, &["child", "index"])?;
        pair.publish(DETACH)?;
        pair.await_arrival()?;
        let rows = "SELECT md5(string_agg(t::text, ',' ORDER BY t::text)) FROM p1 t";
        ensure!(pair.publisher_says(rows)? == pair.subscriber_says(rows)?);
        Ok(())
    })
}

#[test]
fn partitions_come_and_go_through_the_root() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction, PARTITIONED, "publish_via_partition_root = true")?;
        pair.publish(NEW_PARTITION)?;
        pair.assert_equal(&["public"])?;
        pair.publish(ATTACH)?;
        pair.assert_equal(&["public"])?;
        assert_same(&pair.publisher, &pair.subscriber, &["child", "index"])
    })
}

/// A copy that starts over needs partitions that came meanwhile, and a root that was made by hand
/// needs all of them.
#[test]
fn partitions_that_are_missing_under_a_root_are_made_before_its_copy() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.publish(PARTITIONED)?;
        pair.subscriber.execute_script(
            "CREATE TABLE p (id integer, r integer, v text, PRIMARY KEY (r, id)) \
             PARTITION BY RANGE (r)",
        )?;
        pair.add_publication("p", &["public.p"], "publish_via_partition_root = true")?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        let alike = |pair: &mut Pair| -> Result<()> {
            pair.await_arrival()?;
            let rows = "SELECT md5(string_agg(p::text, ';' ORDER BY id, r)) FROM p";
            ensure!(pair.publisher_says(rows)? == pair.subscriber_says(rows)?);
            let leaves = "SELECT string_agg(inhrelid::regclass::text, ' ' ORDER BY inhrelid::regclass::text) \
                          FROM pg_inherits WHERE inhparent = 'p'::regclass";
            ensure!(pair.publisher_says(leaves)? == pair.subscriber_says(leaves)?);
            Ok(())
        };
        let crash = "snapshot.before-range-commit:1";
        pair.site.env("FARSHORE_CRASH", crash);
        pair.site.start()?;
        pair.site.await_kill(crash, SOON)?;
        pair.site.env("FARSHORE_CRASH", "");
        pair.publish(NEW_PARTITION)?;
        pair.site.start()?;
        alike(&mut pair)?;
        // All is copied anew, behind another one.
        pair.site.stop()?;
        pair.publish(
            "CREATE TABLE p3 PARTITION OF p FOR VALUES FROM (40) TO (50); \
             INSERT INTO p SELECT i, 45, 'v' FROM generate_series(401, 450) i",
        )?;
        let resync = pair.site.verb("resync", &["--subscription", "s"])?;
        ensure!(resync.code == Some(0), "{resync:?}");
        pair.site.start()?;
        alike(&mut pair)?;
        pair.publish("UPDATE p SET v = 'last' WHERE id % 2 = 0")?;
        alike(&mut pair)
    })
}

/// A column that the publisher dropped stays on the target, where it is the target's business; and the
/// target's tables may have columns of their own, and wider ones. A new partition has them too.
#[test]
fn partitions_come_where_their_root_has_other_columns_on_the_target() -> Result<()> {
    const ROWS: &str =
        "SELECT md5(string_agg(concat_ws(',', id, r, w), ';' ORDER BY id, r)) FROM p";
    both_ways(|direction| {
        for more in ["", "publish_via_partition_root = true"] {
            let schema = format!("{PARTITIONED} CREATE INDEX p_id ON p (id)");
            let mut pair = pair(direction, &schema, more)?;
            pair.subscriber.execute_script(
                "ALTER TABLE p ADD COLUMN own text DEFAULT 'here'; \
                 ALTER TABLE p ALTER COLUMN id TYPE bigint",
            )?;
            pair.publish("ALTER TABLE p DROP COLUMN v; INSERT INTO p VALUES (1001, 3)")?;
            pair.publish(
                "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20); \
                 INSERT INTO p SELECT i, 10 + i % 10 FROM generate_series(101, 200) i",
            )?;
            if more.is_empty() {
                pair.await_copy("p2")?;
            }
            pair.publish(
                "ALTER TABLE p ADD COLUMN w integer DEFAULT 3; DELETE FROM p WHERE id % 9 = 0; \
                 UPDATE p SET w = 4 WHERE id % 5 = 0",
            )?;
            pair.await_arrival()?;
            let (left, right) = (pair.publisher_says(ROWS)?, pair.subscriber_says(ROWS)?);
            ensure!(left == right, "{more}: {left} and {right}");
            let own = "SELECT count(DISTINCT own) || ' ' || count(v) FROM p2";
            ensure!(pair.subscriber_says(own)? == "1 0", "{own}");
        }
        Ok(())
    })
}

/// Of a partitioned table that refers to another, the log of a TRUNCATE names the partitions alone.
#[test]
fn what_a_partitioned_table_refers_to_is_truncated() -> Result<()> {
    const SCHEMA: &str =
        "CREATE TABLE customer (id integer PRIMARY KEY, parent integer REFERENCES customer);
        CREATE TABLE payment (id integer, day integer, customer integer REFERENCES customer,
          PRIMARY KEY (id, day)) PARTITION BY LIST (day);
        CREATE TABLE payment_1 PARTITION OF payment FOR VALUES IN (1);
        CREATE TABLE payment_2 PARTITION OF payment FOR VALUES IN (2);
        INSERT INTO customer SELECT i, nullif(i / 2, 0) FROM generate_series(1, 20) AS i;
        INSERT INTO payment SELECT i, 1 + i % 2, i FROM generate_series(1, 20) AS i;";
    const AGAIN: &str = "INSERT INTO customer VALUES (7); INSERT INTO payment VALUES (1, 1, 7)";
    both_ways(|direction| {
        for more in ["", "publish_via_partition_root = true"] {
            let mut pair = pair(direction, SCHEMA, more)?;
            pair.publish("TRUNCATE customer CASCADE")?;
            pair.publish(AGAIN)?;
            pair.assert_equal(&["public"])?;
            pair.publish(&format!("BEGIN; INSERT INTO customer VALUES (8, 7); TRUNCATE customer, payment; {AGAIN}; COMMIT"))?;
            pair.assert_equal(&["public"])?;
            ensure!(pair.subscriber_says("SELECT count(*) FROM payment")? == "1", "{more}");
            // The target's own rows are nobody else's to delete, nor left without what they refer to.
            pair.subscriber.execute_script(
                "CREATE TABLE own (customer integer REFERENCES customer ON DELETE CASCADE); \
                 INSERT INTO own VALUES (7)",
            )?;
            pair.publish("TRUNCATE customer CASCADE")?;
            let (state, error) = pair.site.await_trouble("s", "own_customer_fkey of public.own")?;
            ensure!(state == "stopped", "{state}: {error}");
            ensure!(pair.subscriber_says("SELECT count(*) FROM own, customer")? == "1");
            pair.subscriber.execute_script("DROP TABLE own")?;
            let resumed = pair.site.verb("resume", &["--subscription", "s"])?;
            ensure!(resumed.code == Some(0), "{resumed:?}");
            pair.site.restart()?;
            pair.assert_equal(&["public"])?;
        }
        Ok(())
    })
}

/// Through the root, the target may be one table.
#[test]
fn a_partitioned_table_becomes_a_plain_one() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.publish(PARTITIONED)?;
        pair.subscriber.execute_script(
            "CREATE TABLE p (v text, id integer, r integer, PRIMARY KEY (r, id))",
        )?;
        pair.add_publication("p", &["public.p"], "publish_via_partition_root = true")?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        pair.site.start()?;
        pair.publish(NEW_PARTITION)?;
        pair.await_arrival()?;
        let rows = "SELECT md5(string_agg(concat_ws(',', id, r, v), ';' ORDER BY id, r, v)) FROM p";
        ensure!(pair.publisher_says(rows)? == pair.subscriber_says(rows)?);
        ensure!(pair.subscriber_says("SELECT to_regclass('public.p2') IS NULL")? == "t");
        Ok(())
    })
}

/// Rows that are in the copy's way on the target, and a table that follows meanwhile.
const WIDE: &str = "CREATE TABLE wide (id integer PRIMARY KEY, v text)";

/// Waits until what copies `wide` waits for the session that is in its way.
fn await_copy_waits(pair: &mut Pair, in_its_way: &mut postgres::Client) -> Result<()> {
    await_waits(pair, in_its_way, "farshore % copy")
}

/// Waits for a session of ours, by what it calls itself, to be held up on the target.
fn await_waits(pair: &mut Pair, in_its_way: &mut postgres::Client, name: &str) -> Result<()> {
    let waiting = "SELECT FROM pg_stat_activity WHERE application_name LIKE $1 \
                   AND pg_backend_pid() = ANY (pg_blocking_pids(pid)) LIMIT 1";
    pair.site.wait_for("the copy to wait", SOON, || {
        in_its_way.batch_execute("SELECT pg_stat_clear_snapshot()")?;
        Ok(in_its_way.query_opt(waiting, &[&name])?.map(drop))
    })
}

#[test]
fn the_rest_streams_while_a_new_table_is_copied() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, v text)";
        let mut pair = pair(direction, schema, "")?;
        pair.subscriber.execute_script(WIDE)?;
        let mut other = pair.subscriber.connect()?;
        other.batch_execute("BEGIN; LOCK TABLE wide IN SHARE MODE")?;
        pair.publish(&format!(
            "{WIDE}; CREATE INDEX ON wide (v); CREATE TABLE spelled (id numeric PRIMARY KEY, v text); \
             INSERT INTO spelled SELECT i, 'v' FROM generate_series(1.0, 9.0) i; \
             INSERT INTO wide SELECT i, repeat('v', 50) FROM generate_series(1, 1000) AS i"
        ))?;
        await_copy_waits(&mut pair, &mut other)?;
        let mut target = pair.subscriber.connect()?;
        // Its rows are there: now its keys are spelled otherwise.
        pair.site.wait_for("the other new table's rows", SOON, || {
            let range = "SELECT FROM farshore.range_copy WHERE table_name = 'spelled'";
            Ok(target.query_opt(range, &[])?.map(drop))
        })?;
        pair.publish(
            "UPDATE spelled SET id = round(id, 3) WHERE id < 5; UPDATE spelled SET v = 'w'; \
             UPDATE spelled SET id = round(id, 2) WHERE id < 3; DELETE FROM spelled WHERE id = 4",
        )?;
        for round in 1..=3 {
            pair.publish(&format!(
                "BEGIN; INSERT INTO t VALUES ({round}, 'new'); DELETE FROM wide WHERE id = {round}; \
                 UPDATE wide SET v = 'round {round}' WHERE id = 10 + {round}; \
                 INSERT INTO wide VALUES (-{round}, 'new'); COMMIT"
            ))?;
            pair.site.wait_for("the other table to follow", SOON, || {
                Ok(target.query_opt("SELECT FROM t WHERE id = $1", &[&round])?.map(drop))
            })?;
            let said = pair.subscriber_says("SELECT state FROM farshore.subscription")?;
            ensure!(said == "catching-up", "{said}");
        }
        other.batch_execute("COMMIT")?;
        pair.await_copy("wide")?;
        pair.publish("UPDATE wide SET v = 'last' WHERE id % 2 = 0; INSERT INTO t VALUES (4, '')")?;
        pair.assert_equal(&["public"])
    })
}

#[test]
fn a_new_table_joins_whatever_kills_the_node() -> Result<()> {
    both_ways(|direction| {
        let schema =
            "CREATE TABLE t (id integer PRIMARY KEY, v text); INSERT INTO t VALUES (0, '')";
        let mut pair = pair(direction, schema, "")?;
        let points = ["before-state", "after-state", "before-range-commit", "after-range-commit"];
        for (number, point) in points.iter().chain(&["before-finish", "after-finish"]).enumerate() {
            pair.site.stop()?;
            let crash = format!("snapshot.{point}:1");
            pair.site.env("FARSHORE_CRASH", &crash);
            pair.publish(&format!(
                "CREATE TABLE new{number} (id integer PRIMARY KEY, v text); \
                 INSERT INTO new{number} SELECT i, 'v' FROM generate_series(1, 100) AS i"
            ))?;
            pair.site.start()?;
            pair.publish(&format!("UPDATE t SET v = v || '{number}'"))?;
            pair.site.await_kill(&crash, SOON)?;
            pair.publish(&format!(
                "BEGIN; DELETE FROM new{number} WHERE id < 10; UPDATE new{number} SET v = 'w' \
                 WHERE id % 7 = 0; UPDATE t SET v = v || '.'; COMMIT"
            ))?;
            pair.site.env("FARSHORE_CRASH", "");
            pair.site.start()?;
            pair.await_copy(&format!("new{number}"))?;
            pair.publish(&format!("UPDATE new{number} SET v = 'x' WHERE id % 5 = 0"))?;
            pair.assert_equal(&["public"])?;
        }
        Ok(())
    })
}

/// However long the copy of another takes.
#[test]
fn a_table_that_streams_is_not_held_while_another_is_copied() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, v text); \
                      INSERT INTO t VALUES (0, '')";
        let mut pair = pair(direction, schema, "")?;
        pair.subscriber.execute_script(WIDE)?;
        let mut other = pair.subscriber.connect()?;
        other.batch_execute("BEGIN; LOCK TABLE wide IN SHARE MODE")?;
        pair.publish(&format!("{WIDE}; INSERT INTO wide VALUES (1, 'v')"))?;
        await_copy_waits(&mut pair, &mut other)?;
        pair.publish(
            "SET lock_timeout = '15s'; ALTER TABLE t ADD COLUMN w text; TRUNCATE t; \
             INSERT INTO t VALUES (1, 'v', 'w')",
        )?;
        ensure!(!pair.site.log().contains("gives way"), "{}", pair.site.log_tail());
        other.batch_execute("COMMIT")?;
        pair.await_copy("wide")?;
        pair.assert_equal(&["public"])
    })
}

/// It is held as long as the others of a first copy are not done, which takes another snapshot each
/// time.
#[test]
fn a_table_that_is_copied_is_given_way_to_while_another_is_not() -> Result<()> {
    both_ways(|direction| {
        let schema = format!("CREATE TABLE t (id integer PRIMARY KEY); {WIDE}");
        let mut pair = Pair::new(direction, &["public.*"], &schema)?;
        pair.publish("INSERT INTO t VALUES (0); INSERT INTO wide VALUES (1, 'v')")?;
        let mut other = pair.subscriber.connect()?;
        other.batch_execute("BEGIN; LOCK TABLE wide IN SHARE MODE")?;
        pair.site.start()?;
        pair.site.await_log("table copied subscription=s table=public.t", SOON)?;
        for (round, column) in (1..).zip(["v", "w", "x"]) {
            wait_until("another snapshot to be taken", SOON, &[&pair.site.log_path()], || {
                let begun = pair.site.log().matches("initial copy begins").count();
                Ok((begun >= round).then_some(()))
            })?;
            await_waits(&mut pair, &mut other, "farshore %")?;
            pair.publish(&format!(
                "SET lock_timeout = '15s'; ALTER TABLE t ADD COLUMN {column} text"
            ))?;
        }
        other.batch_execute("COMMIT")?;
        pair.publish("INSERT INTO t VALUES (1, 'v', 'w', 'x')")?;
        pair.assert_equal(&["public"])
    })
}

/// Nothing would be kept for it otherwise, however often it begins anew.
#[test]
fn log_is_kept_anew_for_a_copy_that_retention_took_it_from() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, v text); INSERT INTO t VALUES (0, '')";
    let small = "segment_size = \"64KB\"\nretention_size = \"256KB\"";
    let mut pair = pair(Direction::UP, schema, small)?;
    pair.subscriber.execute_script(WIDE)?;
    let mut other = pair.subscriber.connect()?;
    other.batch_execute("BEGIN; LOCK TABLE wide IN SHARE MODE")?;
    pair.publish(&format!("{WIDE}; INSERT INTO wide VALUES (1, 'v')"))?;
    await_copy_waits(&mut pair, &mut other)?;
    let publisher = pair.publisher.url(DATABASE);
    let mut publisher = postgres::Client::connect(&publisher, postgres::NoTls)?;
    let mut id = 0;
    let told = wait_until("retention to drop what the copy needs", SOON, &[], || {
        for _ in 0..50 {
            id += 1;
            publisher.execute(
                "INSERT INTO t SELECT $1, string_agg(md5(random()::text), '') \
                 FROM generate_series(1, 100)",
                &[&id],
            )?;
        }
        let log = pair.site.log();
        let told = log.lines().find(|line| line.contains("retention limits dropped changes"));
        Ok(told.map(str::to_owned))
    })?;
    ensure!(told.contains("a copy of tables of subscription s"), "{told}");
    pair.site.restart()?;
    pair.site.await_log("retention dropped log that was kept for a copy of tables", SOON)?;
    other.batch_execute("COMMIT")?;
    pair.publish("INSERT INTO wide VALUES (2, 'w')")?;
    pair.await_copy("wide")?;
    pair.assert_equal(&["public"])
}

#[test]
fn a_new_table_is_dropped_while_it_is_copied() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, v text)";
        let mut pair = pair(direction, schema, "")?;
        pair.subscriber.execute_script(WIDE)?;
        let mut other = pair.subscriber.connect()?;
        other.batch_execute("BEGIN; LOCK TABLE wide IN SHARE MODE")?;
        pair.publish(&format!("{WIDE}; INSERT INTO wide VALUES (1, 'v')"))?;
        await_copy_waits(&mut pair, &mut other)?;
        // The copy gives way to it.
        pair.publish("DROP TABLE wide; INSERT INTO t VALUES (1, 'v')")?;
        other.batch_execute("COMMIT")?;
        let mut target = pair.subscriber.connect()?;
        pair.site.wait_for("the copy to be forgotten", SOON, || {
            let left = "SELECT FROM farshore.table_copy WHERE table_name = 'wide'";
            Ok(target.query_opt(left, &[])?.is_none().then_some(()))
        })?;
        pair.publish("INSERT INTO t VALUES (2, 'v')")?;
        pair.await_copy("t")?;
        pair.await_arrival()?;
        ensure!(pair.subscriber_says("SELECT count(*) FROM t")? == "2");
        Ok(())
    })
}

/// A partitioned table whose copy through its root is under way, and who holds it up on the target.
/// `prepare` is run on the publisher before.
fn copying_through_its_root(
    direction: Direction,
    prepare: &str,
) -> Result<(Pair, postgres::Client)> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, v text)";
    let mut pair = pair(direction, schema, "publish_via_partition_root = true")?;
    let parted = "CREATE TABLE p (id integer PRIMARY KEY, v text) PARTITION BY RANGE (id); \
         CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (500); \
         CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (500) TO (2000);";
    pair.subscriber.execute_script(parted)?;
    let mut other = pair.subscriber.connect()?;
    other.batch_execute("BEGIN; LOCK TABLE p IN SHARE MODE")?;
    pair.publish(&format!(
        "{parted} {prepare} INSERT INTO p SELECT i, 'v' || i FROM generate_series(1, 999) i"
    ))?;
    await_copy_waits(&mut pair, &mut other)?;
    Ok((pair, other))
}

/// Its rows are in its partitions.
#[test]
fn a_partitioned_table_changes_while_it_is_copied_through_its_root() -> Result<()> {
    both_ways(|direction| {
        let (mut pair, mut other) = copying_through_its_root(direction, "")?;
        pair.publish(
            "UPDATE p SET v = 'w' WHERE id % 3 = 0; DELETE FROM p WHERE id % 10 = 0; \
             UPDATE p SET id = id + 1000 WHERE id % 7 = 0 AND id < 900; \
             INSERT INTO p SELECT i, 'new' FROM generate_series(1990, 1999) i \
             ON CONFLICT DO NOTHING; INSERT INTO t VALUES (1, 'x')",
        )?;
        let mut target = pair.subscriber.connect()?;
        pair.site.wait_for("the other table to follow", SOON, || {
            Ok(target.query_opt("SELECT FROM t WHERE id = 1", &[])?.map(drop))
        })?;
        other.batch_execute("COMMIT")?;
        pair.await_copy("p")?;
        pair.publish("UPDATE p SET v = 'last' WHERE id % 2 = 0")?;
        pair.assert_equal(&["public"])
    })
}

/// A partition is identified by other columns than its root: of a key that changes, the log has the
/// new one alone.
#[test]
fn a_key_changes_in_a_partition_with_an_identity_of_its_own_while_it_is_copied() -> Result<()> {
    both_ways(|direction| {
        let by_v = "ALTER TABLE p1 ALTER COLUMN v SET NOT NULL; CREATE UNIQUE INDEX by_v ON p1 (v); \
                    ALTER TABLE p1 REPLICA IDENTITY USING INDEX by_v;";
        let (mut pair, mut other) = copying_through_its_root(direction, by_v)?;
        pair.publish("UPDATE p SET id = 0 WHERE id = 7; INSERT INTO t VALUES (1, 'x')")?;
        other.batch_execute("COMMIT")?;
        pair.await_copy("p")?;
        pair.publish("ALTER TABLE p1 REPLICA IDENTITY DEFAULT; UPDATE p SET v = v || 'last'")?;
        pair.assert_equal(&["public"])
    })
}

/// Who needs one of its partitions for himself is given way to, and what he did is seen.
#[test]
fn a_partition_is_emptied_while_its_table_is_copied_through_its_root() -> Result<()> {
    both_ways(|direction| {
        let (mut pair, mut other) = copying_through_its_root(direction, "")?;
        let mut source = pair.publisher.connect()?;
        source.batch_execute("SET statement_timeout = '60s'")?;
        source.batch_execute("TRUNCATE p1")?;
        other.batch_execute("COMMIT")?;
        pair.await_copy("p")?;
        pair.publish("UPDATE p SET v = 'last' WHERE id % 2 = 0")?;
        pair.assert_equal(&["public"])
    })
}

const MANY_ROWS: &str = "SELECT i, repeat('v', 500) FROM generate_series(1, 2000) AS i";

/// A table without a key starts over each time its copy is cut off, and is copied while nothing
/// streams in the end. One with a key goes on beside the stream.
#[test]
fn a_copy_that_is_cut_off_again_and_again_halts_only_for_what_cannot_go_on() -> Result<()> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.on_both("CREATE TABLE t (id integer PRIMARY KEY, v text)")?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    pair.site.add("copy_range = \"64KB\"\ncopy_workers = 2\non_conflict = \"overwrite\"")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    // The last row of each waits for a lock of ours.
    pair.subscriber.execute_script(&format!(
        "{WIDE}; CREATE TABLE bag (id integer, v text); \
         CREATE FUNCTION waits() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           IF NEW.id = 2000 THEN PERFORM pg_advisory_xact_lock(length(TG_TABLE_NAME)); END IF; \
           RETURN NEW; END $$; \
         CREATE TRIGGER waits BEFORE INSERT ON wide FOR EACH ROW EXECUTE FUNCTION waits(); \
         CREATE TRIGGER waits BEFORE INSERT ON bag FOR EACH ROW EXECUTE FUNCTION waits(); \
         ALTER TABLE wide ENABLE ALWAYS TRIGGER waits; ALTER TABLE bag ENABLE ALWAYS TRIGGER waits"
    ))?;
    let mut other = pair.subscriber.connect()?;
    other.batch_execute(
        "SELECT pg_advisory_lock(length('wide')), pg_advisory_lock(length('bag'))",
    )?;
    let rows = "SELECT i, repeat('v', 200) FROM generate_series(1, 2000) i";
    pair.publish(&format!(
        "{WIDE}; INSERT INTO wide {rows}; CREATE TABLE bag (id integer, v text); INSERT INTO bag {rows}"
    ))?;
    // Those of an attempt that was cut off take their time to go.
    let mut seen: Vec<i32> = Vec::new();
    let mut waiting = |seen: &[i32]| -> Result<Vec<i32>> {
        let waiting = "SELECT pid FROM pg_stat_activity \
                       WHERE application_name LIKE 'farshore % copy' \
                       AND pg_backend_pid() = ANY (pg_blocking_pids(pid))";
        other.batch_execute("SELECT pg_stat_clear_snapshot()")?;
        let pids = other.query(waiting, &[])?.into_iter().map(|row| row.get(0));
        Ok(pids.filter(|pid| !seen.contains(pid)).collect())
    };
    let mut target = pair.subscriber.connect()?;
    let log = pair.site.log_path();
    let mut conflicts = 0_i64;
    loop {
        let (halts, pids) = wait_until("both copies to wait", SOON, &[&log], || {
            let recorded = "SELECT count(*) FROM farshore.conflicts";
            let recorded: i64 = target.query_one(recorded, &[])?.get(0);
            let pids = waiting(&seen)?;
            if recorded == conflicts && pids.len() == 2 {
                return Ok(Some((false, pids)));
            }
            let halts = pair.site.status()?["subscriptions"][0]["state"] == "copying";
            Ok((halts && !pids.is_empty()).then_some((true, pids)))
        })?;
        if halts {
            break;
        }
        seen.extend(pids);
        conflicts += 1;
        ensure!(conflicts < 20, "{}", pair.site.log_tail());
        let id = 1000 + conflicts;
        pair.subscriber.execute_script(&format!("INSERT INTO t VALUES ({id}, 'in its way')"))?;
        pair.publish(&format!(
            "INSERT INTO bag VALUES ({id}, 'more'); UPDATE wide SET v = 'w' WHERE id = {conflicts}; \
             INSERT INTO t VALUES ({id}, 'v')"
        ))?;
    }
    other.batch_execute("SELECT pg_advisory_unlock(length('bag'))")?;
    wait_until("the table without a key", SOON, &[&log], || {
        let copied =
            "SELECT FROM farshore.table_copy WHERE table_name = 'bag' AND state = 'copied'";
        Ok(target.query_opt(copied, &[])?.map(drop))
    })?;
    pair.publish("INSERT INTO t VALUES (5000, 'beside the other')")?;
    wait_until("the stream beside the other", SOON, &[&log], || {
        Ok(target.query_opt("SELECT FROM t WHERE id = 5000", &[])?.map(drop))
    })?;
    let copied = "SELECT state FROM farshore.table_copy WHERE table_name = 'wide'";
    ensure!(pair.subscriber_says(copied)? != "copied");
    other.batch_execute("SELECT pg_advisory_unlock(length('wide'))")?;
    pair.await_copy("wide")?;
    pair.assert_equal(&["public"])
}

/// A copy of `wide` that was interrupted. A publication to be adopted is made by `by_hand`.
fn interrupted(direction: Direction, by_hand: &str) -> Result<Pair> {
    let mut pair = Pair::bare(direction)?;
    pair.publish(&format!("{WIDE}; INSERT INTO wide {MANY_ROWS}"))?;
    if by_hand.is_empty() {
        pair.add_publication("p", &["*.*"], "")?;
    } else {
        pair.publish(by_hand)?;
        pair.add_publication("p", &["*.*"], "adopt_publication = \"by_hand\"")?;
    }
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    pair.site.add("copy_range = \"64KB\"\ncopy_workers = 1")?;
    let crash = "snapshot.after-range-commit:6";
    pair.site.env("FARSHORE_CRASH", crash);
    pair.site.start()?;
    pair.site.await_kill(crash, SOON)?;
    pair.site.env("FARSHORE_CRASH", "");
    Ok(pair)
}

/// An interrupted copy does not go on with ranges of a table that was another one, or had other
/// columns.
#[test]
fn a_table_becomes_another_one_while_its_copy_is_interrupted() -> Result<()> {
    for (number, change) in [
        // Another table of that name; with what was copied of it removed, as it is asked for.
        (0, "DROP TABLE wide; CREATE TABLE wide (id integer PRIMARY KEY, v text)"),
        // Rows that nobody touched get a value.
        (1, "ALTER TABLE wide ADD COLUMN c integer DEFAULT 5"),
        // What was changed in it has another name in the log.
        (
            2,
            "ALTER TABLE wide RENAME TO away; UPDATE away SET v = 'away' WHERE id % 100 < 9; \
             DELETE FROM away WHERE id % 100 = 9; ALTER TABLE away RENAME TO wide",
        ),
    ] {
        both_ways(|direction| {
            let mut pair = interrupted(direction, "")?;
            pair.publish(change)?;
            if number == 0 {
                pair.publish(&format!("INSERT INTO wide {MANY_ROWS}"))?;
                pair.subscriber.execute_script("TRUNCATE wide")?;
            } else if number == 1 {
                pair.subscriber.execute_script("ALTER TABLE wide ADD COLUMN c integer")?;
            }
            pair.site.start()?;
            pair.await_copy("wide")?;
            pair.assert_equal(&["public"])
        })?;
    }
    Ok(())
}

/// An interrupted copy that goes on in another table finds rows there that are not its own.
#[test]
fn a_copy_that_goes_on_elsewhere_empties_nobodys_table() -> Result<()> {
    let fill = "INSERT INTO {} SELECT -i, 'theirs' FROM generate_series(1, 9) i";
    for is_mapped in [true, false] {
        let mut pair = interrupted(Direction::UP, "")?;
        let into = if is_mapped { "archive.wide" } else { "public.wide" };
        let fill = fill.replace("{}", into);
        if is_mapped {
            pair.subscriber.execute_script(&format!(
                "CREATE SCHEMA archive; CREATE TABLE archive.wide (LIKE wide INCLUDING ALL); {fill}"
            ))?;
            pair.site.add("[subscription.s.tables]\n\"public.wide\" = \"archive.wide\"")?;
        } else {
            pair.subscriber.execute_script(&format!("DROP TABLE wide; {WIDE}; {fill}"))?;
        }
        pair.site.start()?;
        let (state, error) = pair.site.await_trouble("s", "has rows already")?;
        ensure!(state == "stopped" && error.contains(&format!("TRUNCATE {into}")), "{error}");
        let theirs = format!("SELECT count(*) FROM {into} WHERE v = 'theirs'");
        ensure!(pair.subscriber_says(&theirs)? == "9");
        pair.subscriber.execute_script(&format!("TRUNCATE {into}"))?;
        pair.site.verb("resume", &["--subscription", "s"])?;
        pair.await_copy("wide")?;
        pair.await_arrival()?;
        ensure!(pair.subscriber_says(&format!("SELECT count(*) FROM {into}"))? == "2000");
        // Who asks for it has what is there removed.
        pair.site.stop()?;
        pair.subscriber.execute_script(&format!(
            "CREATE TABLE another (LIKE {into} INCLUDING ALL); DROP TABLE {into}; \
             CREATE TABLE {into} (LIKE another INCLUDING ALL); DROP TABLE another; {fill}"
        ))?;
        let resync = ["--subscription", "s", "--table", "public.wide"];
        let said = pair.site.verb("resync", &resync)?;
        ensure!(said.code == Some(0), "{said:?}");
        pair.site.start()?;
        pair.await_copy("wide")?;
        pair.await_arrival()?;
        ensure!(pair.subscriber_says(&format!("SELECT count(*) FROM {into}"))? == "2000");
        ensure!(pair.subscriber_says(&theirs)? == "0");
    }
    Ok(())
}

/// Where updates are not published nothing tells that they moved rows from ranges that are copied to
/// others.
#[test]
fn an_interrupted_copy_without_updates_starts_over() -> Result<()> {
    both_ways(|direction| {
        let by_hand = "CREATE PUBLICATION by_hand FOR TABLE wide, farshore_marks.mark \
                       WITH (publish = 'insert, delete')";
        let mut pair = interrupted(direction, by_hand)?;
        pair.publish("UPDATE wide SET v = v || 'moved' WHERE id <= 100")?;
        pair.site.start()?;
        pair.await_copy("wide")?;
        pair.publish("INSERT INTO wide VALUES (-1, ''); DELETE FROM wide WHERE id = 7")?;
        pair.assert_equal(&["public"])
    })
}

/// Dropped and made again in one transaction, it is another table, and a member again.
#[test]
fn a_table_that_is_made_again_under_its_name_is_another_one() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'old'); \
             CREATE TABLE rests (id integer PRIMARY KEY)";
        let mut pair = pair(direction, schema, "")?;
        pair.publish(
            "BEGIN; DROP TABLE t; CREATE TABLE t (id integer PRIMARY KEY, v text); \
             INSERT INTO t SELECT i, 'new' FROM generate_series(1, 100) i; COMMIT",
        )?;
        let said = pair.site.await_log(" stopped: ", SOON)?;
        ensure!(said.contains("TRUNCATE public.t") && said.contains("has rows already"), "{said}");
        ensure!(pair.subscriber_says("SELECT v FROM t")? == "old");
        pair.site.stop()?;
        pair.subscriber.execute_script("TRUNCATE t")?;
        pair.site.start()?;
        pair.publish("INSERT INTO rests VALUES (1); UPDATE t SET v = 'newer' WHERE id = 1")?;
        pair.await_copy("t")?;
        pair.assert_equal(&["public"])
    })
}
