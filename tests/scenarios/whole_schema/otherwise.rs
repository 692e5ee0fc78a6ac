//! Tables whose shape on the target is not the publisher's: some columns do not come, generated ones
//! come with their values, or the target is partitioned otherwise.

use anyhow::{Result, ensure};
use farshore_tests::{DATABASE, Direction, Pair, both_ways};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

fn assert_alike(pair: &mut Pair, query: &str) -> Result<()> {
    pair.await_arrival()?;
    let (there, here) = (pair.publisher_says(query)?, pair.subscriber_says(query)?);
    ensure!(there == here, "{query}: {there} and {here}");
    Ok(())
}

#[test]
fn columns_that_are_not_published_may_be_empty() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.publish(
            "CREATE DOMAIN strict AS text NOT NULL; \
             CREATE TABLE t (id integer PRIMARY KEY, v text NOT NULL, secret text NOT NULL, \
               word strict, size integer GENERATED ALWAYS AS (length(secret)) STORED NOT NULL, \
               n integer NOT NULL DEFAULT 3); \
             CREATE TABLE root (id integer, secret text NOT NULL, PRIMARY KEY (id)) \
               PARTITION BY RANGE (id); \
             CREATE TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (100); \
             INSERT INTO t VALUES (1, 'v', 's', 'w'), (2, 'v', 's', 'w'); \
             INSERT INTO root VALUES (1, 's')",
        )?;
        pair.add_publication(
            "p",
            &["public.*"],
            "publish_via_partition_root = true\n\
             [publication.p.article.\"public.t\"]\ncolumns = [\"id\", \"v\"]\n\
             [publication.p.article.\"public.root\"]\ncolumns = [\"id\"]",
        )?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        let dry = pair.site.verb("schema", &[])?;
        for line in
            ["  v text NOT NULL,\n  secret text,\n  word text,\n", "  n integer DEFAULT 3 NOT NULL"]
        {
            ensure!(dry.stdout.contains(line), "{line}: {dry:?}");
        }
        pair.site.start()?;
        pair.await_arrival()?;
        pair.publish(
            "INSERT INTO t VALUES (3, 'v', 's', 'w'); UPDATE t SET v = 'x', secret = 'y' WHERE id = 1; \
             INSERT INTO root VALUES (2, 's')",
        )?;
        assert_alike(&mut pair, "SELECT string_agg(id || v || n, ' ' ORDER BY id) FROM t")?;
        assert_alike(&mut pair, "SELECT string_agg(id::text, ' ' ORDER BY id) FROM root")?;
        let empty = "SELECT count(*) FROM t WHERE secret IS NULL AND word IS NULL AND size IS NULL";
        ensure!(pair.subscriber_says(empty)? == "3");
        Ok(())
    })
}

/// Publications with generated columns came with 18.
fn with_generated() -> Result<Pair> {
    let mut pair = Pair::bare(Direction::DOWN)?;
    pair.publish(
        "CREATE TABLE t (id integer PRIMARY KEY, a integer, \
           g integer GENERATED ALWAYS AS (a * 2) STORED NOT NULL); \
         INSERT INTO t (id, a) VALUES (1, 1), (2, 2); \
         CREATE PUBLICATION whole FOR TABLE t, farshore_marks.mark \
           WITH (publish_generated_columns = stored)",
    )?;
    pair.add_publication("p", &["public.*"], "adopt_publication = \"whole\"")?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    Ok(pair)
}

const ROWS: &str = "SELECT string_agg(concat(id, '/', a, '/', g), ' ' ORDER BY id) FROM t";

#[test]
fn a_generated_column_that_is_published_is_a_plain_one() -> Result<()> {
    let mut pair = with_generated()?;
    let dry = pair.site.verb("schema", &[])?;
    ensure!(dry.stdout.contains("  g integer NOT NULL,\n"), "{dry:?}");
    pair.site.start()?;
    assert_alike(&mut pair, ROWS)?;
    pair.publish("INSERT INTO t (id, a) VALUES (3, 3); UPDATE t SET a = 7 WHERE id = 1")?;
    assert_alike(&mut pair, ROWS)
}

#[test]
fn a_published_column_that_the_target_generates_is_refused() -> Result<()> {
    let mut pair = with_generated()?;
    pair.subscriber.execute_script(
        "CREATE TABLE t (id integer PRIMARY KEY, a integer, \
           g integer GENERATED ALWAYS AS (a * 3) STORED)",
    )?;
    let said = "column g of public.t is generated on the target, and its values are published";
    let remedy = "Make it a plain one there (ALTER TABLE public.t ALTER COLUMN g DROP EXPRESSION), \
                  or publish the table without it";
    let check = pair.site.verb("check", &[])?;
    ensure!(check.code == Some(1), "{check:?}");
    ensure!(check.stdout.contains(said) && check.stdout.contains(remedy), "{check:?}");
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("s", said)?;
    ensure!(state == "stopped" && error.contains(remedy), "{state}: {error}");
    pair.subscriber.execute_script("ALTER TABLE public.t ALTER COLUMN g DROP EXPRESSION")?;
    // The log has the trouble.
    pair.site.restart()?;
    pair.publish("INSERT INTO t (id, a) VALUES (3, 3)")?;
    assert_alike(&mut pair, ROWS)
}

/// `hashed` has another key on the target, `wide` other bounds, and `made` is not there.
#[test]
fn a_root_that_is_partitioned_otherwise_keeps_its_partitions() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        for root in ["hashed", "wide", "made"] {
            pair.publish(&format!(
                "CREATE TABLE {root} (id integer, at date, v text, PRIMARY KEY (id, at)) \
                   PARTITION BY RANGE (at); \
                 CREATE TABLE {root}_20 PARTITION OF {root} \
                   FOR VALUES FROM ('2020-01-01') TO ('2021-01-01'); \
                 CREATE TABLE {root}_21 PARTITION OF {root} \
                   FOR VALUES FROM ('2021-01-01') TO ('2022-01-01') PARTITION BY LIST (id); \
                 CREATE TABLE {root}_21_all PARTITION OF {root}_21 DEFAULT; \
                 INSERT INTO {root} VALUES (1, '2020-05-05', 'v'), (2, '2021-05-05', 'v')"
            ))?;
        }
        pair.subscriber.execute_script(
            "CREATE TABLE hashed (id integer, at date, v text, PRIMARY KEY (id, at)) \
               PARTITION BY HASH (id); \
             CREATE TABLE h0 PARTITION OF hashed FOR VALUES WITH (MODULUS 2, REMAINDER 0); \
             CREATE TABLE h1 PARTITION OF hashed FOR VALUES WITH (MODULUS 2, REMAINDER 1); \
             CREATE TABLE wide (id integer, at date, v text, PRIMARY KEY (id, at)) \
               PARTITION BY RANGE (at); \
             CREATE TABLE wide_all PARTITION OF wide \
               FOR VALUES FROM ('2020-01-01') TO ('2022-01-01')",
        )?;
        pair.add_publication("p", &["public.*"], "publish_via_partition_root = true")?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        let check = pair.site.verb("check", &[])?;
        ensure!(check.code == Some(0), "{check:?}");
        let dry = pair.site.verb("schema", &[])?;
        ensure!(!dry.stdout.contains("hashed"), "{dry:?}");
        pair.site.start()?;
        let rows = |root: &str| {
            format!("SELECT string_agg(concat(id, '/', at, v), ' ' ORDER BY id) FROM {root}")
        };
        for root in ["hashed", "wide", "made"] {
            assert_alike(&mut pair, &rows(root))?;
        }
        pair.site.await_log("table public.wide_20 is not created on the target", SOON)?;
        // What the target has no place for is still made, also later.
        for root in ["hashed", "wide", "made"] {
            pair.publish(&format!(
                "CREATE TABLE {root}_22 PARTITION OF {root} \
                   FOR VALUES FROM ('2022-01-01') TO ('2023-01-01'); \
                 INSERT INTO {root} VALUES (3, '2022-05-05', 'v'); \
                 UPDATE {root} SET v = 'w', at = at + 1 WHERE id = 2"
            ))?;
        }
        for root in ["hashed", "wide", "made"] {
            assert_alike(&mut pair, &rows(root))?;
        }
        let leaves = "SELECT string_agg(relname, ' ' ORDER BY relname) FROM pg_class \
                      WHERE relispartition AND relkind IN ('r', 'p')";
        let leaves = pair.subscriber_says(leaves)?;
        let wanted = "h0 h1 made_20 made_21 made_21_all made_22 wide_22 wide_all";
        ensure!(leaves == wanted, "{leaves}");
        Ok(())
    })
}

/// PostgreSQL hashes a value of an enum by its OID, which is another one on every server.
#[test]
fn partitions_by_hash_of_an_enum_go_through_their_root() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        let labels = "'red', 'green', 'blue', 'cyan', 'pink', 'grey'";
        // The target has given away other OIDs by then.
        let other: String =
            (0..3).map(|i| format!("CREATE TYPE other{i} AS ENUM ({labels});")).collect();
        pair.subscriber.execute_script(&other)?;
        pair.publish(&format!(
            "CREATE TYPE colour AS ENUM ({labels}); \
             CREATE TABLE hashed (id integer, c colour, PRIMARY KEY (id, c)) PARTITION BY HASH (c)"
        ))?;
        for i in 0..4 {
            pair.publish(&format!(
                "CREATE TABLE hashed_{i} PARTITION OF hashed \
                   FOR VALUES WITH (MODULUS 4, REMAINDER {i})"
            ))?;
        }
        let rows = "INSERT INTO hashed SELECT i, (enum_range(NULL::colour))[1 + i % 6] \
                    FROM generate_series";
        pair.add_publication("p", &["public.*"], "")?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        let check = pair.site.verb("check", &[])?;
        let said = "public.hashed is partitioned by hash of column c, which is of an enum";
        ensure!(check.code == Some(0) && check.stdout.contains(said), "{check:?}");
        pair.site.start()?;
        pair.await_arrival()?;
        pair.publish(&format!("{rows} (1, 60) AS i"))?;
        let (state, error) = pair.site.await_trouble("s", "publish_via_partition_root = true")?;
        ensure!(state == "stopped", "{state}: {error}");
        let remedy = "ALTER TABLE public.hashed DETACH PARTITION public.hashed_";
        ensure!(error.contains(remedy), "{error}");
        // One way out.
        let detach: String = (0..4).map(|i| format!("{remedy}{i};")).collect();
        pair.site.stop()?;
        pair.subscriber.execute_script(&format!("{detach} DROP TABLE public.hashed"))?;
        pair.site.start()?;
        for i in 0..4 {
            let of = format!("SELECT concat(array_agg(concat(id, c) ORDER BY id)) FROM hashed_{i}");
            assert_alike(&mut pair, &of)?;
        }
        // The other one.
        pair.site.stop()?;
        pair.subscriber.execute_script(
            "DROP TABLE hashed_0, hashed_1, hashed_2, hashed_3; \
             DELETE FROM farshore.subscription WHERE name = 's'; TRUNCATE farshore_marks.mark",
        )?;
        pair.site.replace("tables = [", "publish_via_partition_root = true\ntables = [")?;
        pair.site.replace("[subscription.s]", "[subscription.through_root]")?;
        let check = pair.site.verb("check", &[])?;
        ensure!(check.code == Some(0) && !check.stdout.contains(said), "{check:?}");
        pair.site.start()?;
        pair.await_arrival()?;
        pair.publish(&format!("{rows} (101, 160) AS i"))?;
        assert_alike(&mut pair, "SELECT string_agg(concat(id, c), ' ' ORDER BY id) FROM hashed")
    })
}
