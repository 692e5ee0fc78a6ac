//! What is particular to changes that are netted and written in bulk.

use anyhow::{Result, anyhow, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{DATABASE, Direction, Pair, both_ways};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

/// A pair whose subscription applies everything in batches.
fn pair(direction: Direction, schema: &str) -> Result<Pair> {
    let mut pair = Pair::new(direction, &["public.*"], schema)?;
    if std::env::var_os("FARSHORE_BATCHES").is_none() {
        pair.site.replace("batches = \"auto\"", "batches = \"always\"")?;
    }
    Ok(pair)
}

/// Netted changes of many kinds in one transaction and in many: chains of updates, keys that move
/// and come back, rows that come and go, values that are left out, arrays and composites.
fn assert_chains_come_to_the_same(identity: &str) -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TYPE pair AS (a integer, b text); \
            CREATE TABLE t (id integer, part text, v numeric, tags text[], p pair, big text, \
              PRIMARY KEY (part, id)); \
            ALTER TABLE t ALTER big SET STORAGE EXTERNAL; \
            CREATE TABLE u (id integer PRIMARY KEY, code integer UNIQUE, v text); \
            CREATE TABLE w (id integer, v numeric, j jsonb, big text, \
              PRIMARY KEY (id) INCLUDE (v)); \
            ALTER TABLE w ALTER big SET STORAGE EXTERNAL; \
            CREATE TABLE log (note text)";
        let mut pair = pair(direction, &format!("{schema}; {identity}"))?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish(
            "INSERT INTO t SELECT i, 'a', i / 7.0, ARRAY['x', NULL, i::text], ROW(i, 'p')::pair, \
               (SELECT string_agg(md5(i || ' ' || n), '') FROM generate_series(1, 120) n) \
             FROM generate_series(1, 50) i; \
             INSERT INTO u SELECT i, i, 'u' FROM generate_series(1, 50) i; \
             INSERT INTO w SELECT i, i / 3.0, jsonb_build_object('i', i), \
               (SELECT string_agg(md5(i || ' ' || n), '') FROM generate_series(1, 120) n) \
             FROM generate_series(1, 60) i; \
             INSERT INTO log SELECT 'line ' || i % 3 FROM generate_series(1, 50) i",
        )?;
        for round in 0..6 {
            pair.publish(&format!(
                "BEGIN; UPDATE t SET v = v + 1 WHERE id % 2 = 0; \
                 UPDATE t SET tags = tags || 'r{round}'::text, p = ROW(id, 'r{round}')::pair WHERE id % 3 = 0; \
                 UPDATE t SET part = 'b' WHERE id % 5 = 0 AND part = 'a'; \
                 UPDATE t SET v = NULL WHERE id % 7 = 0; \
                 UPDATE t SET part = 'a' WHERE id % 10 = 0; \
                 DELETE FROM t WHERE id % 11 = {round}; \
                 INSERT INTO t SELECT i, 'c{round}', i, '{{}}', NULL, 'big' FROM generate_series(1, 9) i; \
                 DELETE FROM t WHERE part = 'c{round}' AND id > 3; COMMIT; \
                 UPDATE u SET code = code + 1000 WHERE id % 2 = 0; \
                 BEGIN; UPDATE u SET code = -code WHERE id IN (1, 3); \
                 UPDATE u SET code = CASE id WHEN 1 THEN 3 ELSE 1 END WHERE id IN (1, 3); COMMIT; \
                 DELETE FROM u WHERE id = 10 + {round}; \
                 INSERT INTO u VALUES (10 + {round}, 10 + {round}, 'again'); \
                 BEGIN; UPDATE w SET v = v * 1.10 WHERE id % 2 = 0; \
                 UPDATE w SET j = NULLIF(j, '{{\"i\": 8}}') WHERE id % 4 = 0; \
                 UPDATE w SET id = id + 1000 WHERE id % 9 = 0 AND id <> 27 AND id < 1000; \
                 UPDATE w SET id = id - 1000, v = NULL WHERE id > 1030; \
                 DELETE FROM w WHERE id % 13 = {round}; COMMIT; \
                 INSERT INTO w SELECT i, i, NULL, 'new' FROM generate_series(1, 60, 13) i \
                 ON CONFLICT DO NOTHING; UPDATE w SET v = -1 WHERE id = 3 + {round}; \
                 INSERT INTO log VALUES ('round {round}')"
            ))?;
        }
        pair.publish(
            "UPDATE t SET big = 'small' WHERE id = 6; TRUNCATE log; INSERT INTO log VALUES ('x')",
        )?;
        pair.assert_equal(&["public"])
    })
}

#[test]
fn chains_of_changes_come_to_the_same() -> Result<()> {
    assert_chains_come_to_the_same("")
}

#[test]
fn chains_of_whole_old_rows_come_to_the_same() -> Result<()> {
    assert_chains_come_to_the_same(
        "ALTER TABLE t REPLICA IDENTITY FULL; ALTER TABLE u REPLICA IDENTITY FULL; \
         ALTER TABLE w REPLICA IDENTITY FULL",
    )
}

/// Rows that change places under a key that is checked at the end of the transaction: such a key
/// identifies nothing on the publisher.
#[test]
fn keys_change_places_under_a_deferred_primary_key() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE d (id integer PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, v text); \
            ALTER TABLE d REPLICA IDENTITY FULL";
        let mut pair = pair(direction, schema)?;
        pair.publish("INSERT INTO d SELECT i, 'row ' || i FROM generate_series(1, 30) i")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish(
            "UPDATE d SET id = id + 1; UPDATE d SET v = v || '.' WHERE id % 2 = 0; \
             BEGIN; UPDATE d SET id = 31 - id; UPDATE d SET v = v || '!' WHERE id < 5; \
             DELETE FROM d WHERE id IN (0, 7); UPDATE d SET id = id + 2; COMMIT",
        )?;
        pair.assert_equal(&["public"])
    })
}

/// A row of the target that is not the old row is a conflict, in bulk too.
#[test]
fn a_whole_old_row_that_is_another_is_noticed() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, v text); \
        ALTER TABLE t REPLICA IDENTITY FULL";
    for change in ["UPDATE t SET v = 'new'", "DELETE FROM t"] {
        let mut pair = pair(Direction::UP, schema)?;
        pair.publish("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 20) i")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.subscriber.execute_script("UPDATE t SET v = 'theirs' WHERE id = 7")?;
        pair.publish(change)?;
        let log = pair.site.await_log(" stopped: ", Duration::from_secs(60))?;
        ensure!(log.contains("id=7"), "{log}");
        let kept = pair.subscriber_says("SELECT count(*) FROM t WHERE v = 'v'")?;
        ensure!(kept == "19", "{kept}");
    }
    Ok(())
}

/// Each time it is tried there is more behind it, of which another batch could be made.
#[test]
fn a_commit_that_is_refused_stops_while_more_and_more_comes() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, parent integer); \
        CREATE TABLE busy (id integer PRIMARY KEY, v integer)";
    let mut pair = pair(Direction::UP, schema)?;
    pair.publish("INSERT INTO busy SELECT i, 0 FROM generate_series(1, 100) i")?;
    pair.subscriber.execute_script(
        "CREATE TABLE parent (id integer PRIMARY KEY); INSERT INTO parent VALUES (1); \
         ALTER TABLE t ADD FOREIGN KEY (parent) REFERENCES parent DEFERRABLE INITIALLY DEFERRED; \
         CREATE ROLE plain LOGIN; GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON ALL TABLES \
         IN SCHEMA public, farshore_marks TO plain; GRANT USAGE ON SCHEMA farshore_marks TO plain; \
         GRANT CREATE ON DATABASE postgres TO plain",
    )?;
    let target = pair.subscriber.url(DATABASE);
    pair.site.replace(&target, &target.replace("postgres@", "plain@"))?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.site.stop()?;
    pair.publish(
        "INSERT INTO t SELECT i, CASE i WHEN 1500 THEN 2 ELSE 1 END FROM generate_series(1, 3000) i",
    )?;
    let (mut busy, over) = (pair.publisher.connect()?, AtomicBool::new(false));
    let said = std::thread::scope(|scope| -> Result<String> {
        let load = scope.spawn(|| -> Result<()> {
            while !over.load(Ordering::Relaxed) {
                busy.batch_execute("UPDATE busy SET v = v + 1")?;
                std::thread::park_timeout(Duration::from_millis(10));
            }
            Ok(())
        });
        // So far behind that what comes next is waited for, to make one batch of it.
        let said = wait_until("a backlog", SOON, &[], || {
            let old = "SELECT v >= 100 FROM busy LIMIT 1";
            Ok((pair.publisher_says(old)? == "t").then_some(()))
        });
        let said = said.and_then(|()| pair.site.start());
        let said = said.and_then(|()| pair.site.await_log(" stopped: ", SOON));
        over.store(true, Ordering::Relaxed);
        load.join().map_err(|_| anyhow!("the load died"))??;
        said
    })?;
    ensure!(said.contains("the target refuses to commit the transaction"), "{said}");
    ensure!(said.contains("(parent)=(2) is not present"), "{said}");
    pair.subscriber.execute_script("INSERT INTO parent VALUES (2)")?;
    pair.site.verb("resume", &["--subscription", "s"])?;
    pair.await_arrival()?;
    let counts = "SELECT (SELECT count(*) FROM t) || ' ' || (SELECT sum(v) FROM busy)";
    let [there, here] = [pair.publisher_says(counts)?, pair.subscriber_says(counts)?];
    ensure!(there == here, "{there}, on the target {here}");
    Ok(())
}

/// The index tells apart what the column's `=`, by which rows are found, does not: each of two rows is
/// found twice, as many as are looked for.
#[test]
fn an_index_that_tells_more_rows_apart_than_the_column_is_no_key() -> Result<()> {
    let schema = "CREATE EXTENSION citext; CREATE TABLE t (name citext NOT NULL, v integer); \
        CREATE UNIQUE INDEX by_name ON t (name text_ops); \
        ALTER TABLE t REPLICA IDENTITY USING INDEX by_name";
    let mut pair = pair(Direction::UP, schema)?;
    pair.publish("INSERT INTO t VALUES ('a', 1), ('A', 2), ('b', 3)")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.publish("UPDATE t SET v = v + 10")?;
    pair.site.await_log(" stopped: ", Duration::from_secs(60))?;
    let kept = pair.subscriber_says("SELECT string_agg(v::text, ' ' ORDER BY v) FROM t")?;
    ensure!(kept == "1 2 3", "{kept}");
    Ok(())
}

/// A statement for many rows counts them together: one row too many must not make up for one that
/// is missing.
#[test]
fn rows_that_the_target_has_twice_are_noticed() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, v text)";
    for change in ["UPDATE t SET v = 'new'", "DELETE FROM t"] {
        let mut pair = pair(Direction::UP, schema)?;
        let unique = "ALTER TABLE t DROP CONSTRAINT t_pkey; CREATE INDEX ON t (id)";
        pair.subscriber.execute_script(unique)?;
        pair.publish("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 20) i")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        let drift = "INSERT INTO t VALUES (1, 'v'); DELETE FROM t WHERE id = 2";
        pair.subscriber.execute_script(drift)?;
        pair.publish(&format!("{change} WHERE id IN (1, 2)"))?;
        let log = pair.site.await_log(" stopped: ", Duration::from_secs(60))?;
        ensure!(log.contains("id=1"), "{log}");
        let kept = pair.subscriber_says("SELECT count(*) FROM t WHERE v = 'v'")?;
        ensure!(kept == "20", "{kept}");
    }
    Ok(())
}

/// Nothing gets a new value, and the key is a column that UPDATE cannot set.
#[test]
fn a_row_is_touched_where_nothing_can_be_set() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE t (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, big text); \
            ALTER TABLE t ALTER big SET STORAGE EXTERNAL; \
            CREATE TABLE only_key (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY)";
        let mut pair = pair(direction, schema)?;
        pair.publish(
            "INSERT INTO t (big) SELECT (SELECT string_agg(md5(i || ' ' || n), '') \
               FROM generate_series(1, 120) n) FROM generate_series(1, 9) i; \
             INSERT INTO only_key SELECT FROM generate_series(1, 5)",
        )?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("UPDATE t SET big = big; UPDATE t SET big = big WHERE id = 1")?;
        pair.publish("UPDATE only_key SET id = DEFAULT WHERE id = 2; DELETE FROM t WHERE id = 4")?;
        pair.assert_equal(&["public"])
    })
}

/// A trigger that fires for replicated rows finds what its transaction did before.
#[test]
fn a_trigger_that_always_fires_sees_the_rows_before_its_own() -> Result<()> {
    let schema = "CREATE TABLE a (id integer PRIMARY KEY, n integer NOT NULL DEFAULT 0); \
        CREATE TABLE b (id integer PRIMARY KEY, a integer)";
    let mut pair = pair(Direction::UP, schema)?;
    pair.subscriber.execute_script(
        "ALTER TABLE a ADD own integer NOT NULL DEFAULT 0; \
         CREATE FUNCTION count_b() RETURNS trigger LANGUAGE plpgsql AS \
           $$ BEGIN UPDATE public.a SET own = own + 1 WHERE id = NEW.a; RETURN NEW; END $$; \
         CREATE TRIGGER count_b AFTER INSERT ON b FOR EACH ROW EXECUTE FUNCTION count_b(); \
         ALTER TABLE b ENABLE ALWAYS TRIGGER count_b",
    )?;
    pair.site.start()?;
    pair.await_arrival()?;
    for i in 0..20 {
        pair.publish(&format!(
            "BEGIN; INSERT INTO a VALUES ({i}); INSERT INTO b VALUES ({i}, {i}); COMMIT"
        ))?;
    }
    pair.await_arrival()?;
    let counted = pair.subscriber_says("SELECT sum(own) FROM a")?;
    ensure!(counted == "20", "the trigger found {counted} of 20 rows");
    Ok(())
}

/// A column of the target gets another type while farshore runs: values are never read as what
/// they are not.
#[test]
fn a_type_changed_on_the_target_is_noticed() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, n bigint)";
    let mut pair = pair(Direction::UP, schema)?;
    pair.site.start()?;
    pair.publish("INSERT INTO t SELECT i, i FROM generate_series(1, 10) i")?;
    pair.assert_equal(&["public"])?;
    pair.subscriber.execute_script("ALTER TABLE t ALTER n TYPE double precision")?;
    pair.publish("INSERT INTO t SELECT i, i FROM generate_series(11, 20) i")?;
    let log = pair.site.await_log(" stopped: ", Duration::from_secs(60))?;
    ensure!(log.contains("double precision"), "{log}");
    let wrong = pair.subscriber_says("SELECT count(*) FROM t WHERE n <> id")?;
    ensure!(wrong == "0", "{wrong} values were read as what they are not");
    Ok(())
}

/// Columns as the target has them: in another order, with some that were dropped, its own and
/// generated ones, arrays, composites, and domains that refuse NULL.
fn assert_rows_go_whole(identity: &str) -> Result<()> {
    let types = "CREATE DOMAIN code AS text NOT NULL; CREATE TYPE pair AS (a integer, b text)";
    let mut pair = Pair::bare(Direction::UP)?;
    pair.on_both(types)?;
    pair.publisher.execute_script(&format!(
        "CREATE TABLE wide (part text, id integer, n numeric(10, 2), c code, tags text[], p pair, \
           s varchar(20), at timestamptz(3), big text, PRIMARY KEY (id, part)); \
         ALTER TABLE wide ALTER big SET STORAGE EXTERNAL; {identity}"
    ))?;
    pair.subscriber.execute_script(
        "CREATE TABLE wide (gone integer, at timestamptz(3), tags text[], id integer, \
           doubled numeric GENERATED ALWAYS AS (id * 2) STORED, s varchar(20), gone_too pair, \
           p pair, n numeric(10, 2), part text, c code, own text DEFAULT 'own', big text, \
           PRIMARY KEY (part, id)); \
         ALTER TABLE wide DROP COLUMN gone, DROP COLUMN gone_too",
    )?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url("postgres");
    pair.add_subscription("s", "p", &target)?;
    pair.site.replace("batches = \"auto\"", "batches = \"always\"")?;
    pair.publish(
        "INSERT INTO wide SELECT 'a', i, i / 7.0, 'c' || i, ARRAY['x', NULL, i::text], \
           ROW(i, NULL)::pair, 's', to_timestamp(i), \
           (SELECT string_agg(md5(i || ' ' || n), '') FROM generate_series(1, 120) n) \
         FROM generate_series(1, 600) i",
    )?;
    pair.site.start()?;
    pair.await_arrival()?;
    let rows = "SELECT md5(string_agg(ROW(part, id, n, c, tags, p, s, at, big)::text, '|' \
        ORDER BY id, part)) || ' ' || count(*) FROM wide";
    for round in 0..4 {
        pair.publish(&format!(
            "UPDATE wide SET n = n + {round}, tags = tags || 'r{round}'::text, s = 'r{round}' \
               WHERE id % 2 = 0; \
             UPDATE wide SET c = c || '!', p = ROW(id, 'r{round}')::pair, n = NULL, at = NULL \
               WHERE id % 3 = {round} % 3; \
             UPDATE wide SET big = 'r{round}' WHERE id % 5 = {round}; \
             UPDATE wide SET part = part || 'b' WHERE id % 100 = {round}; \
             DELETE FROM wide WHERE id % 23 = {round}"
        ))?;
        pair.await_arrival()?;
        let [there, here] = [pair.publisher_says(rows)?, pair.subscriber_says(rows)?];
        ensure!(there == here, "round {round}: {there}, on the target {here}");
    }
    let others = pair.subscriber_says(
        "SELECT count(*) FROM wide WHERE own IS DISTINCT FROM 'own' OR doubled <> id * 2",
    )?;
    ensure!(others == "0", "{others} rows whose own columns were changed");
    let log = std::fs::read_to_string(pair.site.log_path())?;
    ensure!(!log.contains("a batch was refused"), "{log}");
    Ok(())
}

#[test]
fn rows_go_whole_by_their_key() -> Result<()> {
    assert_rows_go_whole("")
}

#[test]
fn rows_go_whole_by_all_old_values() -> Result<()> {
    assert_rows_go_whole("ALTER TABLE wide REPLICA IDENTITY FULL")
}

/// Values in a row are told apart by where they stand.
#[test]
fn a_column_that_changed_its_place_on_the_target_is_noticed() -> Result<()> {
    let columns: Vec<String> = (1..=10).map(|n| format!("v{n} integer")).collect();
    let schema = format!("CREATE TABLE t (id integer PRIMARY KEY, {})", columns.join(", "));
    let mut pair = pair(Direction::UP, &schema)?;
    pair.publish(
        "INSERT INTO t SELECT i, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 FROM generate_series(1, 500) i",
    )?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.publish("UPDATE t SET v3 = v3 + 100")?;
    pair.assert_equal(&["public"])?;
    pair.subscriber
        .execute_script("ALTER TABLE t DROP COLUMN v3; ALTER TABLE t ADD COLUMN v3 integer")?;
    pair.publish("UPDATE t SET v3 = v3 + 100, v10 = v10 + 1000")?;
    pair.await_arrival()?;
    let rows = "SELECT min(v3) || ' ' || max(v3) || ' ' || min(v10) || ' ' || max(v10) || ' ' || sum(v4) FROM t";
    let [there, here] = [pair.publisher_says(rows)?, pair.subscriber_says(rows)?];
    ensure!(there == here, "{there}, on the target {here}");
    // Whether it was met with the old columns in mind, and refused, or looked at once more before,
    // is a matter of moments.
    Ok(())
}
