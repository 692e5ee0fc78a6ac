//! What is created, when, and what is not.

use crate::definitions::assert_same;
use anyhow::{Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{DATABASE, Direction, Pair, both_ways};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

const SCHEMA: &str = "
    CREATE TYPE mood AS ENUM ('sad', 'happy');
    CREATE TABLE a (id serial PRIMARY KEY, m mood DEFAULT 'sad', v text, w integer UNIQUE,
      CONSTRAINT longer CHECK (length(v) > 0));
    CREATE TABLE b (id integer PRIMARY KEY, a integer REFERENCES a ON DELETE CASCADE, v text);
    CREATE INDEX b_a ON b (a);
    CREATE INDEX a_v ON a (lower(v));
    COMMENT ON TABLE a IS 'The first';
    INSERT INTO a (v, w) SELECT 'v' || i, i FROM generate_series(1, 2000) i;
    INSERT INTO b SELECT i, i, 'v' FROM generate_series(1, 2000) i;";

fn pair(direction: Direction, tables: &[&str], more: &str) -> Result<Pair> {
    let mut pair = Pair::bare(direction)?;
    pair.publish(SCHEMA)?;
    pair.add_publication("p", tables, "")?;
    let target = pair.subscriber.url(DATABASE);
    pair.site
        .add(&format!("[subscription.s]\npublication = \"p\"\ntarget = \"{target}\"\n{more}\n"))?;
    Ok(pair)
}

/// Waits until nothing waits for the end of a copy any more.
fn await_all_created(pair: &mut Pair) -> Result<()> {
    let mut target = pair.subscriber.connect()?;
    pair.site.wait_for("all indexes and constraints", SOON, || {
        let query = "SELECT FROM farshore.after_copy WHERE refusal IS NULL LIMIT 1";
        Ok(target.query_opt(query, &[])?.map_or(Some(()), |_| None))
    })
}

#[test]
fn the_dry_run_prints_what_is_run() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction, &["public.*"], "")?;
        let dry = pair.site.verb("schema", &[])?;
        ensure!(dry.code == Some(0), "{dry:?}");
        let json = pair.site.verb("schema", &["--json", "--subscription", "s"])?;
        let parsed: serde_json::Value = serde_json::from_str(&json.stdout)?;
        ensure!(parsed["subscription"] == "s" && parsed["left_out"] == serde_json::json!([]));
        for statement in ["before", "after"].map(|when| parsed[when].as_array().cloned()) {
            for one in statement.unwrap_or_default() {
                let sql = one["sql"].as_str().unwrap_or("none");
                ensure!(dry.stdout.contains(&format!("{sql};\n")), "{sql} is not in {dry:?}");
            }
        }
        ensure!(pair.site.verb("schema", &["--subscription", "x"])?.code == Some(1));
        ensure!(
            pair.subscriber_says("SELECT count(*) FROM pg_type WHERE typname = 'mood'")? == "0"
        );
        // Run by hand, it gives what a run gives; and then there is nothing left to do.
        pair.subscriber.execute_script(&dry.stdout)?;
        assert_same(&pair.publisher, &pair.subscriber, &[])?;
        let again = pair.site.verb("schema", &[])?;
        ensure!(again.stdout == "-- subscription s: the target lacks nothing\n", "{again:?}");
        pair.site.start()?;
        pair.assert_equal(&["public"])
    })
}

#[test]
fn what_the_role_may_not_create_is_found_beforehand() -> Result<()> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.publish(&format!("{SCHEMA} CREATE SCHEMA other; CREATE TABLE other.t (id integer)"))?;
    pair.subscriber.execute_script(
        "CREATE ROLE applier LOGIN; CREATE SCHEMA farshore AUTHORIZATION applier; \
         GRANT SET ON PARAMETER session_replication_role TO applier; \
         GRANT USAGE ON SCHEMA farshore_marks TO applier; \
         GRANT ALL ON farshore_marks.mark TO applier",
    )?;
    pair.add_publication("p", &["*.*"], "")?;
    let target = pair.subscriber.url(DATABASE).replace("postgres@", "applier@");
    pair.add_subscription("s", "p", &target)?;
    let check = pair.site.verb("check", &[])?;
    ensure!(check.code == Some(1), "{check:?}");
    for said in [
        "role applier may not create them in schema public: ",
        "→ GRANT USAGE, CREATE ON SCHEMA public TO applier",
        "role applier may not create them in schema other: ",
        "→ GRANT CREATE ON DATABASE postgres TO applier",
    ] {
        ensure!(check.stdout.contains(said), "{said}: {check:?}");
    }
    pair.subscriber.execute_script(
        "GRANT USAGE, CREATE ON SCHEMA public TO applier; GRANT CREATE ON DATABASE postgres TO applier",
    )?;
    let check = pair.site.verb("check", &[])?;
    ensure!(check.code == Some(0), "{check:?}");
    pair.site.start()?;
    pair.assert_equal(&["public", "other"])?;
    await_all_created(&mut pair)?;
    assert_same(&pair.publisher, &pair.subscriber, &[])
}

/// What the target cannot have is said, and the rows come all the same.
#[test]
fn a_refused_index_or_key_is_recorded_and_holds_nothing_up() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.publish(
            "CREATE TABLE parent (id integer PRIMARY KEY); \
             CREATE TABLE child (id integer PRIMARY KEY, p integer REFERENCES parent, v text); \
             CREATE FUNCTION calls(text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS \
               $$ BEGIN RETURN public.not_carried($1); END $$; \
             CREATE FUNCTION not_carried(text) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT $1'; \
             CREATE INDEX by_call ON child (calls(v)); CREATE INDEX plain ON child (v); \
             INSERT INTO parent VALUES (1), (2); INSERT INTO child VALUES (1, 1, 'a'), (2, 2, 'b')",
        )?;
        pair.add_publication(
            "p",
            &["public.*"],
            "[publication.p.article.\"public.parent\"]\nwhere = \"id > 1\"",
        )?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        pair.site.start()?;
        pair.await_arrival()?;
        pair.site.await_log("the target refuses index public.by_call", SOON)?;
        pair.site.await_log("the target refuses constraint child_p_fkey of public.child", SOON)?;
        let refused = "SELECT string_agg(object, ', ' ORDER BY stage) FROM farshore.after_copy \
                       WHERE refusal IS NOT NULL AND statement <> ''";
        // It is said a moment before it is committed.
        wait_until("both to be recorded", SOON, &[&pair.site.log_path()], || {
            let refused = pair.subscriber_says(refused)?;
            let both = "index public.by_call, constraint child_p_fkey of public.child";
            Ok((refused == both).then_some(()))
        })?;
        pair.publish("UPDATE child SET v = 'c'")?;
        pair.assert_equal(&["farshore_marks"])?;
        ensure!(pair.subscriber_says("SELECT string_agg(v, '') FROM child")? == "cc");
        ensure!(pair.subscriber_says("SELECT to_regclass('plain') IS NOT NULL")? == "t");
        Ok(())
    })
}

/// Whatever levels of partitions there are, each index is there once, under its own name.
#[test]
fn indexes_of_partitions_of_partitions_are_made_once() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.publish(
            "CREATE TABLE m (id integer PRIMARY KEY, k integer, v text) PARTITION BY RANGE (id); \
             CREATE TABLE m1 PARTITION OF m FOR VALUES FROM (0) TO (100) PARTITION BY RANGE (id); \
             CREATE TABLE m11 PARTITION OF m1 FOR VALUES FROM (0) TO (50); \
             CREATE TABLE m12 PARTITION OF m1 FOR VALUES FROM (50) TO (100) PARTITION BY RANGE (id); \
             CREATE TABLE m121 PARTITION OF m12 DEFAULT; \
             CREATE INDEX otherwise ON m121 (k); CREATE INDEX on_m1 ON m1 (k, v); \
             CREATE INDEX ON m (k); CREATE INDEX ON m (v); ALTER TABLE m ADD UNIQUE (id, k); \
             INSERT INTO m SELECT i, i, 'v' FROM generate_series(1, 99) i",
        )?;
        pair.add_publication("p", &["public.*"], "")?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        let dry = pair.site.verb("schema", &[])?;
        pair.subscriber.connect()?.batch_execute("CREATE DATABASE by_hand")?;
        pair.subscriber.connect_to("by_hand")?.batch_execute(&dry.stdout)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        await_all_created(&mut pair)?;
        assert_same(&pair.publisher, &pair.subscriber, &[])?;
        // What joins a table that has its indexes gets them from that.
        pair.publish(
            "CREATE TABLE m2 PARTITION OF m FOR VALUES FROM (100) TO (200) PARTITION BY RANGE (id); \
             CREATE TABLE m21 PARTITION OF m2 DEFAULT; INSERT INTO m VALUES (100, 1, 'v')",
        )?;
        pair.await_copy("m21")?;
        pair.assert_equal(&["public"])?;
        await_all_created(&mut pair)?;
        let indexes = "SELECT string_agg(n::text, ' ' ORDER BY t) FROM (SELECT relname AS t, \
                         (SELECT count(*) FROM pg_index WHERE indrelid = c.oid) AS n \
                       FROM pg_class c WHERE relkind IN ('r', 'p') AND relname ~ '^m[0-9]*$') AS x";
        let (there, here) = (pair.publisher_says(indexes)?, pair.subscriber_says(indexes)?);
        ensure!(there == here, "{there} and {here}");
        let refused = pair.subscriber_says("SELECT count(*) FROM farshore.after_copy")?;
        ensure!(refused == "0", "{refused} statements were refused");
        Ok(())
    })
}

/// Where a partition or a child is carried without its parent, or is a plain table on the target.
#[test]
fn checks_and_keys_of_parents_that_are_not_carried_are_created() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.publish(
            "CREATE TABLE kinds (id integer PRIMARY KEY) PARTITION BY RANGE (id); \
             CREATE TABLE kinds_1 PARTITION OF kinds FOR VALUES FROM (0) TO (5); \
             CREATE TABLE kinds_2 PARTITION OF kinds FOR VALUES FROM (5) TO (10); \
             INSERT INTO kinds VALUES (1), (7); \
             CREATE TABLE root (id integer PRIMARY KEY, kind integer REFERENCES kinds, \
               CONSTRAINT positive CHECK (id > 0)) PARTITION BY RANGE (id); \
             CREATE TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (100); \
             CREATE TABLE plain (id integer PRIMARY KEY, kind integer REFERENCES kinds, \
               CONSTRAINT above CHECK (id > 0)) PARTITION BY RANGE (id); \
             CREATE TABLE plain_1 PARTITION OF plain FOR VALUES FROM (0) TO (100); \
             CREATE TABLE base (id integer, CONSTRAINT small CHECK (id < 100)); \
             CREATE TABLE child (v text, PRIMARY KEY (id)) INHERITS (base); \
             CREATE TABLE grandchild (PRIMARY KEY (id)) INHERITS (child); \
             INSERT INTO root VALUES (1, 1), (2, 7); INSERT INTO plain VALUES (1, 1), (2, 7); \
             INSERT INTO child VALUES (1, 'v'); INSERT INTO grandchild VALUES (2, 'w')",
        )?;
        pair.subscriber
            .execute_script("CREATE TABLE plain (id integer PRIMARY KEY, kind integer)")?;
        let tables =
            ["kinds", "leaf", "plain", "child", "grandchild"].map(|name| format!("public.{name}"));
        pair.add_publication("p", &tables.each_ref().map(String::as_str), "")?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        pair.site.start()?;
        pair.await_arrival()?;
        await_all_created(&mut pair)?;
        let said = pair.subscriber_says(
            "SELECT string_agg(conrelid::regclass || ' ' || conname, ', ' \
               ORDER BY conrelid::regclass::text, conname) FROM pg_constraint \
             WHERE contype IN ('c', 'f') AND connamespace = 'public'::regnamespace \
               AND (contype = 'c' OR confrelid = 'kinds'::regclass)",
        )?;
        let wanted = "child small, grandchild small, leaf positive, leaf root_kind_fkey, \
                      plain_1 above, plain_1 plain_kind_fkey";
        ensure!(said == wanted, "{said}");
        let refused = pair.subscriber_says("SELECT count(*) FROM farshore.after_copy")?;
        ensure!(refused == "0", "{refused} statements were refused");
        Ok(())
    })
}

/// What came with 18, on 15.
#[test]
fn an_older_target_gets_what_it_knows() -> Result<()> {
    let mut pair = Pair::bare(Direction::DOWN)?;
    pair.publish(
        "CREATE TABLE t (id uuid DEFAULT uuidv7() PRIMARY KEY, n integer CHECK (n > 0) NOT ENFORCED, \
           twice integer GENERATED ALWAYS AS (n * 2), u text DEFAULT upper('x')); \
         CREATE EXTENSION btree_gist; \
         CREATE TABLE rooms (room integer, during tsrange, v text, PRIMARY KEY (room, during WITHOUT OVERLAPS)); \
         CREATE TABLE bookings (room integer, during tsrange, \
           FOREIGN KEY (room, PERIOD during) REFERENCES rooms (room, PERIOD during)); \
         INSERT INTO t (n) SELECT i FROM generate_series(1, 10) i; \
         INSERT INTO rooms VALUES (1, '[2020-01-01,2020-02-01)', 'x'); \
         INSERT INTO bookings VALUES (1, '[2020-01-03,2020-01-04)')",
    )?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    let dry = pair.site.verb("schema", &[])?;
    for left_out in [
        "-- left out: table public.t: the default of column id, which needs uuidv7",
        "-- left out: table public.t: constraint t_n_check, which the target's version does not know",
        "-- left out: table public.bookings: constraint",
    ] {
        ensure!(dry.stdout.contains(left_out), "{left_out}: {dry:?}");
    }
    pair.site.start()?;
    pair.publish("UPDATE t SET n = -n WHERE n % 2 = 0; UPDATE rooms SET v = 'y'")?;
    pair.assert_equal(&["public"])?;
    let default = "SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef WHERE adrelid = 't'::regclass \
                   AND adnum = 4";
    ensure!(pair.subscriber_says(default)? == "upper('x'::text)");
    Ok(())
}

/// Whatever is cut off, the next start makes the rest, and nothing twice.
#[test]
fn killed_at_every_step_of_the_creation() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction, &["public.*"], "copy_workers = 1")?;
        // Around the first row of progress, each object and table, and each begin of a copy; then
        // around each index and constraint, the end of the copy, and the foreign key.
        let begin = ["before-state:1", "after-state:1", "before-state:2", "after-state:1"];
        let end = ["before-finish:1", "after-finish:1"];
        let twice = ["before-finish:2", "after-finish:1"];
        let all = [begin; 3].concat().into_iter().chain([end; 3].concat()).chain(twice);
        for point in all.chain([end; 2].concat()) {
            let crash = format!("snapshot.{point}");
            pair.site.env("FARSHORE_CRASH", &crash);
            pair.site.start()?;
            pair.site.await_kill(&crash, SOON)?;
        }
        pair.site.env("FARSHORE_CRASH", "");
        pair.site.start()?;
        pair.publish("INSERT INTO a (v) VALUES ('new'); DELETE FROM a WHERE id = 7")?;
        pair.assert_equal(&["public"])?;
        await_all_created(&mut pair)?;
        assert_same(&pair.publisher, &pair.subscriber, &[])
    })
}
