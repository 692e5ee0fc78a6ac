//! Row filters that change while the publisher's transactions go on.

use anyhow::{Context, Result, ensure};
use farshore_tests::{DATABASE, Direction, Pair, both_ways};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const HEADER: &str = "[publication.p.article.\"public.t\"]";

fn article(filter: Option<&str>) -> String {
    filter.map_or(String::new(), |filter| format!("{HEADER}\nwhere = \"{filter}\"\n"))
}

fn filtered(direction: Direction, filter: Option<&str>) -> Result<Pair> {
    let mut pair = Pair::bare(direction)?;
    pair.on_both("CREATE TABLE t (id integer PRIMARY KEY, v text)")?;
    // At the end, where it can be replaced by another one.
    pair.add_publication("p", &["public.t"], "")?;
    pair.site.add(&format!("{}# of t\n", article(filter)))?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    pair.publish("INSERT INTO t SELECT i, 'copied' FROM generate_series(-5, 5) i")?;
    pair.site.start()?;
    Ok(pair)
}

fn assert_equal_within(pair: &mut Pair, filter: Option<&str>) -> Result<()> {
    pair.await_arrival()?;
    let rows =
        |filter| format!("SELECT string_agg(t::text, ',' ORDER BY id) FROM t WHERE {filter}");
    let there = pair.publisher_says(&rows(filter.unwrap_or("true")))?;
    let here = pair.subscriber_says(&rows("true"))?;
    ensure!(there == here, "the publisher has within its filter\n{there}, the target\n{here}");
    Ok(())
}

/// What a transaction wrote before the filter was another one was published by that, whenever it
/// commits.
#[test]
fn a_filter_changes_beside_an_open_writer() -> Result<()> {
    both_ways(|direction| {
        for (before, after) in
            [(None, Some("id > 0")), (Some("id > 0"), None), (Some("id > 0"), Some("id < 2"))]
        {
            let case = format!("{before:?} to {after:?}");
            let mut pair = filtered(direction, before)?;
            assert_equal_within(&mut pair, before).context(case.clone())?;
            let mut writer = pair.publisher.connect()?;
            writer.batch_execute(
                "BEGIN; INSERT INTO t VALUES (10, 'before'), (-10, 'before'); \
                 UPDATE t SET v = 'before' WHERE id IN (1, -1); DELETE FROM t WHERE id IN (2, -2)",
            )?;
            pair.site.stop()?;
            // To be copied anew.
            pair.subscriber.execute_script("TRUNCATE t")?;
            let [old, new] = [before, after].map(|filter| format!("{}# of t", article(filter)));
            pair.site.replace(&old, &new)?;
            pair.site.start()?;
            pair.site.await_log("capture streaming", SOON)?;
            pair.publish(
                "INSERT INTO t VALUES (20, 'beside'), (-20, 'beside'); \
                 UPDATE t SET v = 'beside' WHERE id IN (3, -3)",
            )?;
            writer.batch_execute(
                "INSERT INTO t VALUES (30, 'after'), (-30, 'after'); \
                 UPDATE t SET v = 'after' WHERE id IN (4, -4); COMMIT; \
                 INSERT INTO t VALUES (40, 'later'), (-40, 'later'); \
                 UPDATE t SET v = v || ', later' WHERE abs(id) < 20",
            )?;
            assert_equal_within(&mut pair, after).context(case.clone())?;
            pair.site.restart()?;
            pair.publish("UPDATE t SET v = v || ', at last'")?;
            assert_equal_within(&mut pair, after).context(case)?;
        }
        Ok(())
    })
}

/// Something else changes it while all goes on: the table is copied anew, beside the same writer.
#[test]
fn something_else_sets_a_filter_beside_an_open_writer() -> Result<()> {
    both_ways(|direction| {
        let mut pair = filtered(direction, Some("id > 0"))?;
        assert_equal_within(&mut pair, Some("id > 0"))?;
        let mut writer = pair.publisher.connect()?;
        writer.batch_execute("BEGIN; INSERT INTO t VALUES (10, 'before'), (-10, 'before')")?;
        pair.publish(
            "ALTER PUBLICATION farshore_p SET TABLE t WHERE (id > 3), farshore_marks.mark",
        )?;
        writer.batch_execute("INSERT INTO t VALUES (2000, 'within'), (-2000, 'within')")?;
        pair.site.await_log("something else took public.t out of PostgreSQL publication", SOON)?;
        pair.publish("UPDATE t SET v = 'beside' WHERE id IN (1, -1, 5)")?;
        writer.batch_execute("UPDATE t SET v = 'after' WHERE id IN (2, -2, 4); COMMIT")?;
        let (state, error) = pair.site.await_trouble("s", "public.t on the target has rows")?;
        ensure!(state == "stopped", "{state}: {error}");
        pair.subscriber.execute_script("TRUNCATE t")?;
        pair.site.restart()?;
        pair.publish("UPDATE t SET v = v || ', later'")?;
        assert_equal_within(&mut pair, Some("id > 0"))
    })
}

/// On the target a foreign key refers to what is to be emptied.
#[test]
fn a_table_that_others_refer_to_is_copied_anew_as_told() -> Result<()> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.on_both(
        "CREATE TABLE t (id integer PRIMARY KEY, v text); \
         CREATE TABLE child (id integer PRIMARY KEY, t integer REFERENCES t)",
    )?;
    pair.publish("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 9) i")?;
    pair.publish("INSERT INTO child SELECT i, i FROM generate_series(1, 9) i")?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.site.stop()?;
    pair.site.add(&article(Some("id < 100")))?;
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("s", "has rows already")?;
    let resync = "farshore resync SITE.toml --subscription s --table public.t;";
    ensure!(state == "stopped" && error.contains(resync), "{state}: {error}");
    ensure!(pair.subscriber.execute_script("TRUNCATE t").is_err());
    let said = pair.site.verb("resync", &["--subscription", "s", "--table", "public.t"])?;
    ensure!(said.code == Some(0), "{said:?}");
    pair.site.verb("resume", &["--subscription", "s"])?;
    pair.publish("INSERT INTO t VALUES (10, 'later'); INSERT INTO child VALUES (10, 10)")?;
    pair.assert_equal(&["public"])
}
