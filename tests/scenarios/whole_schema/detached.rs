//! Partitions that are detached on a publisher that publishes the root: from then on they are tables
//! of their own, and what is done to the root is nothing to them.

use crate::joining::await_published;
use anyhow::{Result, bail, ensure};
use farshore_tests::{DATABASE, Direction, Pair, both_ways};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

const VIA_ROOT: &str = "publish_via_partition_root = true";

const SCHEMA: &str = "
    CREATE TABLE pz (id integer, k integer, v text, PRIMARY KEY (id, k)) PARTITION BY LIST (k);
    CREATE TABLE pz1 PARTITION OF pz FOR VALUES IN (1);
    CREATE TABLE pz2 PARTITION OF pz FOR VALUES IN (2);";

const ROWS: &str = "INSERT INTO pz SELECT i, 1 + i % 2, 'v' FROM generate_series(1, 100) AS i";
const DETACH: &str = "ALTER TABLE pz DETACH PARTITION pz1";
const ATTACH: &str = "ALTER TABLE pz ATTACH PARTITION pz1 FOR VALUES IN (1)";
const CHANGES: &str = "INSERT INTO pz1 VALUES (1000, 1, 'new'); UPDATE pz1 SET v = 'w' WHERE id < 50; \
    UPDATE pz SET v = 'w' WHERE id < 50; DELETE FROM pz1 WHERE id = 99";

fn pair(direction: Direction) -> Result<Pair> {
    pair_as(direction, "postgres")
}

/// The target's role may be one that may not set `session_replication_role`.
fn pair_as(direction: Direction, role: &str) -> Result<Pair> {
    let mut pair = Pair::bare(direction)?;
    pair.subscriber.execute_script(
        "CREATE ROLE app LOGIN; GRANT CREATE ON DATABASE postgres TO app; \
         GRANT CREATE ON SCHEMA public TO app; GRANT USAGE ON SCHEMA farshore_marks TO app; \
         GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON ALL TABLES IN SCHEMA farshore_marks TO app",
    )?;
    pair.publish(&format!("{SCHEMA} {ROWS}"))?;
    pair.add_publication("p", &["public.*"], VIA_ROOT)?;
    let target = pair.subscriber.url(DATABASE).replace("postgres@", &format!("{role}@"));
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    Ok(pair)
}

/// Waits until the subscription has stopped for a reason that says `why`.
fn await_stop(pair: &Pair, why: &str) -> Result<String> {
    let (state, error) = pair.site.await_trouble("s", why)?;
    ensure!(state == "stopped", "{state}: {error}");
    Ok(error)
}

/// Does on the target what is asked for, and goes on.
fn mend(pair: &mut Pair, sql: &str) -> Result<()> {
    pair.site.stop()?;
    pair.subscriber.execute_script(sql)?;
    pair.site.start()
}

/// The detached table has rows on the target: it is to be emptied.
fn empty_detached(pair: &mut Pair) -> Result<()> {
    await_stop(pair, "TRUNCATE public.pz1")?;
    mend(pair, "TRUNCATE pz1")
}

fn is_apart(pair: &Pair) -> Result<()> {
    let apart = "SELECT NOT relispartition FROM pg_class WHERE oid = 'pz1'::regclass";
    ensure!(pair.subscriber_says(apart)? == "t", "pz1 is a partition of pz on the target");
    for count in ["SELECT count(*) FROM pz", "SELECT count(*) FROM pz1"] {
        ensure!(pair.publisher_says(count)? == pair.subscriber_says(count)?, "{count}");
    }
    Ok(())
}

#[test]
fn a_detached_partition_is_detached_on_the_target() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction)?;
        pair.publish(DETACH)?;
        empty_detached(&mut pair)?;
        pair.await_copy("pz1")?;
        pair.publish(CHANGES)?;
        pair.assert_equal(&["public"])?;
        is_apart(&pair)?;
        pair.publish("TRUNCATE pz")?;
        pair.assert_equal(&["public"])?;
        is_apart(&pair)?;
        pair.publish(ROWS.replace("1 + i % 2", "2").as_str())?;
        // It comes back, with its rows.
        pair.publish(ATTACH)?;
        pair.publish(
            "UPDATE pz SET v = 'back' WHERE id % 10 = 0; INSERT INTO pz VALUES (2000, 1, '')",
        )?;
        pair.assert_equal(&["public"])?;
        ensure!(
            pair.subscriber_says(
                "SELECT relispartition FROM pg_class WHERE oid = 'pz1'::regclass"
            )? == "t"
        );
        pair.publish("TRUNCATE pz")?;
        pair.assert_equal(&["public"])
    })
}

/// Somebody, or an earlier version, has left it one on the target.
#[test]
fn what_empties_a_partitioned_table_spares_one_that_is_published_by_itself() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction)?;
        pair.publish(DETACH)?;
        empty_detached(&mut pair)?;
        pair.await_copy("pz1")?;
        pair.publish(CHANGES)?;
        pair.assert_equal(&["public"])?;
        // At a TRUNCATE, and at the start after it.
        pair.subscriber.execute_script(ATTACH)?;
        pair.publish("TRUNCATE pz; INSERT INTO pz VALUES (1, 2, 'after')")?;
        let said = await_stop(&pair, "DETACH PARTITION public.pz1")?;
        ensure!(
            said.contains("public.pz1") && said.contains("ALTER TABLE public.pz DETACH"),
            "{said}"
        );
        mend(&mut pair, "SELECT")?;
        pair.assert_equal(&["public"])?;
        is_apart(&pair)?;
        // When the root is copied anew.
        pair.subscriber.execute_script(ATTACH)?;
        let said = pair.site.verb("resync", &["--subscription", "s", "--table", "public.pz"])?;
        ensure!(said.code == Some(0), "{said:?}");
        pair.await_copy("pz")?;
        pair.assert_equal(&["public"])?;
        is_apart(&pair)?;
        // When the node starts.
        pair.site.stop()?;
        pair.subscriber.execute_script(ATTACH)?;
        pair.site.start()?;
        pair.publish(CHANGES.replace("1000", "1001").as_str())?;
        await_apart(&mut pair)?;
        pair.assert_equal(&["public"])?;
        is_apart(&pair)
    })
}

/// Rows that the partition got while it was one come first; also where nothing streams while tables
/// are copied, because foreign keys fire.
#[test]
fn a_partition_is_detached_behind_the_rows_it_had_through_the_root() -> Result<()> {
    for (direction, role) in [(Direction::UP, "postgres"), (Direction::DOWN, "app")] {
        let mut pair = pair_as(direction, role)?;
        let pause = pair.site.verb("pause", &["--subscription", "s"])?;
        ensure!(pause.code == Some(0), "{pause:?}");
        let mut reader = pair.subscriber.connect()?;
        reader.batch_execute("BEGIN; LOCK TABLE pz2 IN SHARE MODE")?;
        pair.publish("INSERT INTO pz SELECT i, 1 + i % 2, '' FROM generate_series(200, 299) AS i")?;
        pair.publish(DETACH)?;
        await_published(&mut pair, 3)?;
        pair.publish("INSERT INTO pz1 VALUES (1000, 1, 'new')")?;
        let resume = pair.site.verb("resume", &["--subscription", "s"])?;
        ensure!(resume.code == Some(0), "{resume:?}");
        std::thread::sleep(Duration::from_secs(3));
        let partition = "SELECT relispartition FROM pg_class WHERE oid = 'pz1'::regclass";
        ensure!(pair.subscriber_says(partition)? == "t", "it was detached too early");
        reader.batch_execute("COMMIT")?;
        empty_detached(&mut pair)?;
        pair.await_copy("pz1")?;
        pair.publish(CHANGES.replace("1000", "1001").as_str())?;
        pair.assert_equal(&["public"])?;
        is_apart(&pair)?;
    }
    Ok(())
}

/// The tables on the target are not ours.
#[test]
fn who_may_not_detach_says_what_is_to_be_detached() -> Result<()> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.on_both(SCHEMA)?;
    pair.publish(ROWS)?;
    pair.subscriber.execute_script(
        "CREATE ROLE app LOGIN; GRANT CREATE ON DATABASE postgres TO app; \
         GRANT SET ON PARAMETER session_replication_role TO app; GRANT USAGE ON SCHEMA farshore_marks TO app; \
         GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE \
         ON ALL TABLES IN SCHEMA public, farshore_marks TO app",
    )?;
    pair.add_publication("p", &["public.*"], VIA_ROOT)?;
    let target = pair.subscriber.url(DATABASE).replace("postgres@", "app@");
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.publish(DETACH)?;
    let said = await_stop(&pair, "DETACH PARTITION public.pz1")?;
    ensure!(said.contains("ALTER TABLE public.pz DETACH PARTITION public.pz1"), "{said}");
    ensure!(pair.subscriber_says("SELECT count(*) FROM pz1")? == "50");
    mend(&mut pair, DETACH)?;
    empty_detached(&mut pair)?;
    pair.await_copy("pz1")?;
    pair.publish(CHANGES)?;
    pair.assert_equal(&["public"])?;
    is_apart(&pair)
}

/// Waits until pz1 is no partition on the target.
fn await_apart(pair: &mut Pair) -> Result<()> {
    let mut target = pair.subscriber.connect()?;
    pair.site.wait_for("pz1 to be detached on the target", SOON, || {
        let apart = "SELECT FROM pg_class WHERE oid = 'pz1'::regclass AND NOT relispartition";
        Ok(target.query_opt(apart, &[])?.map(drop))
    })
}

/// Waits for a row on the target.
fn await_row(pair: &mut Pair, row: &str) -> Result<()> {
    let mut target = pair.subscriber.connect()?;
    let query = format!("SELECT FROM {row}");
    pair.site.wait_for(row, SOON, || Ok(target.query_opt(&query, &[])?.map(drop)))
}

/// Somebody reads the root on the target for as long as he likes. Nothing else waits for him.
#[test]
fn the_rest_streams_while_a_reader_is_in_the_way_of_detaching() -> Result<()> {
    for (direction, role) in [(Direction::UP, "postgres"), (Direction::DOWN, "app")] {
        let mut pair = pair_as(direction, role)?;
        let mut reader = pair.subscriber.connect()?;
        reader.batch_execute("BEGIN; SELECT FROM pz")?;
        pair.publish(DETACH)?;
        let (_, said) = pair.site.await_trouble("s", "gives way")?;
        ensure!(said.contains("public.pz1 is to be detached from public.pz"), "{said}");
        pair.publish("INSERT INTO pz VALUES (500, 2, 'meanwhile')")?;
        await_row(&mut pair, "pz2 WHERE id = 500")?;
        reader.batch_execute("COMMIT")?;
        empty_detached(&mut pair)?;
        pair.await_copy("pz1")?;
        pair.publish(CHANGES)?;
        pair.assert_equal(&["public"])?;
        is_apart(&pair)?;
        // Also when the node starts.
        pair.site.stop()?;
        pair.subscriber.execute_script(ATTACH)?;
        reader.batch_execute("BEGIN; SELECT FROM pz")?;
        pair.site.start()?;
        pair.site.await_trouble("s", "gives way")?;
        pair.publish("INSERT INTO pz VALUES (501, 2, 'meanwhile')")?;
        pair.publish("INSERT INTO pz1 VALUES (1001, 1, 'meanwhile')")?;
        await_row(&mut pair, "pz2 WHERE id = 501")?;
        await_row(&mut pair, "pz1 WHERE id = 1001")?;
        // A row that the root has no place for waits for him.
        pair.publish("INSERT INTO pz1 VALUES (600, 7, 'out of bounds')")?;
        reader.batch_execute("COMMIT")?;
        await_apart(&mut pair)?;
        pair.assert_equal(&["public"])?;
        is_apart(&pair)?;
    }
    Ok(())
}

/// Where nothing streams beside a copy, the point that the stream is to reach stands still.
#[test]
fn a_busy_root_does_not_keep_a_detached_partition_from_being_copied() -> Result<()> {
    let mut pair = pair_as(Direction::UP, "app")?;
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let mut busy = pair.publisher.connect()?;
    let writer = std::thread::spawn(move || -> Result<()> {
        let mut id = 10_000;
        while matches!(stopped.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty)) {
            busy.execute("INSERT INTO pz VALUES ($1, 2, 'busy')", &[&id])?;
            id += 1;
        }
        Ok(())
    });
    pair.publish("INSERT INTO pz VALUES (500, 1, 'last'); ALTER TABLE pz DETACH PARTITION pz1")?;
    let asked = empty_detached(&mut pair).and_then(|()| pair.await_copy("pz1"));
    drop(stop);
    let Ok(written) = writer.join() else { bail!("the writer panicked") };
    written?;
    asked?;
    pair.publish(CHANGES)?;
    pair.assert_equal(&["public"])?;
    is_apart(&pair)
}

/// It was copied once, came back, and is detached again while the target is behind.
#[test]
fn a_copied_partition_that_came_back_is_detached_behind_its_rows() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.publish(&format!(
            "{SCHEMA} {ROWS}; CREATE PUBLICATION whole FOR ALL TABLES WITH ({VIA_ROOT})"
        ))?;
        pair.add_publication("p", &["public.*"], "adopt_publication = \"whole\"")?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish(DETACH)?;
        pair.publish("INSERT INTO pz1 VALUES (1000, 1, 'by itself')")?;
        empty_detached(&mut pair)?;
        pair.await_copy("pz1")?;
        pair.publish(ATTACH)?;
        // Its first row through the root finds no place, and it is attached for that.
        pair.publish("INSERT INTO pz VALUES (2000, 1, 'back')")?;
        pair.assert_equal(&["public"])?;
        pair.site.stop()?;
        pair.publish(
            "INSERT INTO pz SELECT i, 1 + i % 2, '' FROM generate_series(3000, 3999) AS i",
        )?;
        pair.publish(DETACH)?;
        pair.publish("INSERT INTO pz1 VALUES (1001, 1, 'by itself'), (1002, 7, 'out of bounds')")?;
        pair.site.start()?;
        await_apart(&mut pair)?;
        pair.assert_equal(&["public"])?;
        is_apart(&pair)
    })
}

/// A partitioned table's rows are those of its partitions.
#[test]
fn check_sees_that_a_partitioned_table_has_rows() -> Result<()> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.on_both(SCHEMA)?;
    pair.add_publication("p", &["public.*"], VIA_ROOT)?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    let said = pair.site.verb("check", &[])?;
    ensure!(said.code == Some(0), "{said:?}");
    pair.subscriber.execute_script("INSERT INTO pz VALUES (1, 1, 'here already')")?;
    let said = pair.site.verb("check", &[])?;
    ensure!(said.stdout.contains("table public.pz on the target has rows already"), "{said:?}");
    // What is published by itself is not a part of it.
    pair.publish(DETACH)?;
    let said = pair.site.verb("check", &[])?;
    ensure!(!said.stdout.contains("table public.pz on the target has rows already"), "{said:?}");
    Ok(())
}

/// Leaf to leaf, nothing tells the target that a partition was detached but rows that it does not take.
#[test]
fn rows_that_a_detached_partition_is_in_the_way_of_say_which() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.publish(
            "CREATE TABLE pz (id integer, k integer, PRIMARY KEY (id, k)) PARTITION BY LIST (k); \
             CREATE TABLE pz1 PARTITION OF pz FOR VALUES IN (1); \
             CREATE TABLE pz2 PARTITION OF pz DEFAULT; \
             CREATE TABLE pw (id integer, k integer, PRIMARY KEY (id, k)) PARTITION BY LIST (k); \
             CREATE TABLE pw1 PARTITION OF pw FOR VALUES IN (1); \
             INSERT INTO pz VALUES (1, 1), (2, 2); INSERT INTO pw VALUES (1, 1)",
        )?;
        pair.add_publication("p", &["public.*"], "")?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        // To the default partition goes what went to the other one.
        pair.publish(&format!("{DETACH}; INSERT INTO pz VALUES (3, 1)"))?;
        let detach = "ALTER TABLE public.pz DETACH PARTITION public.pz1";
        await_stop(&pair, detach)?;
        mend(&mut pair, detach)?;
        pair.assert_equal(&["public"])?;
        // A table of its own takes any row.
        pair.publish("ALTER TABLE pw DETACH PARTITION pw1; INSERT INTO pw1 VALUES (4, 4)")?;
        let detach = "ALTER TABLE public.pw DETACH PARTITION public.pw1";
        await_stop(&pair, detach)?;
        mend(&mut pair, detach)?;
        pair.assert_equal(&["public"])
    })
}
