//! Tables whose shape on the target is not the publisher's: some columns do not come, and generated
//! ones come with their values.

use anyhow::{Result, ensure};
use farshore_tests::{DATABASE, Direction, Pair, both_ways};

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
