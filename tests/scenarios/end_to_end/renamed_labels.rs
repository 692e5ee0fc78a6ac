//! Labels of enums that get other names on the publisher: rows say otherwise then, and the log has
//! nothing of it.

use anyhow::{Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{DATABASE, Direction, Pair};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

const SCHEMA: &str = "CREATE SCHEMA s; CREATE TYPE s.\"Mood\" AS ENUM ('a', 'b', 'it''s'); \
    CREATE DOMAIN moods AS s.\"Mood\"[]; \
    CREATE TABLE t (id integer PRIMARY KEY, m s.\"Mood\"); \
    CREATE TABLE u (id integer PRIMARY KEY, m moods); \
    CREATE TABLE v (id integer PRIMARY KEY, m text)";
const ROWS: &str = "INSERT INTO t SELECT i, (enum_range(NULL::s.\"Mood\"))[1 + i % 3] \
      FROM generate_series(1, 30) i; \
    INSERT INTO u SELECT id, ARRAY[m] FROM t; INSERT INTO v SELECT id, m FROM t";

const NOTICED: &str = "labels of enum s.\"Mood\" have other names";

fn copied(direction: Direction, on_target: &str) -> Result<Pair> {
    let mut pair = Pair::bare(direction)?;
    pair.publish(SCHEMA)?;
    pair.publish(ROWS)?;
    pair.subscriber.execute_script(on_target)?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    Ok(pair)
}

/// Does what the subscription says that is to be done, for as long as it stops.
fn mended_as_told(pair: &mut Pair) -> Result<Vec<String>> {
    let mark = pair.mark()?.to_string();
    let mut did = Vec::new();
    wait_until("the subscription to be mended", SOON, &[&pair.site.log_path()], || {
        let arrived = "SELECT coalesce(max(id), 0) FROM farshore_marks.mark";
        let status = pair.site.status()?;
        let subscription = &status["subscriptions"][0];
        if subscription["state"] != "stopped" {
            return Ok((pair.subscriber_says(arrived)? == mark).then_some(()));
        }
        let error = subscription["error"].as_str().unwrap_or_default().to_owned();
        ensure!(error.contains(NOTICED), "{error}");
        if let Some((_, told)) = error.split_once("On the target: ") {
            let (sql, _) = told.split_once(". Then").unwrap_or_default();
            pair.subscriber.execute_script(sql)?;
            did.push(sql.to_owned());
        } else {
            let (_, table) = error.rsplit_once("--table ").unwrap_or_default();
            let resync = pair.site.verb("resync", &["--subscription", "s", "--table", table])?;
            ensure!(resync.code == Some(0), "{resync:?}");
            did.push(table.to_owned());
        }
        pair.site.verb("resume", &["--subscription", "s"])?;
        Ok(None)
    })?;
    pair.assert_equal(&["public"])?;
    // And it stays so.
    pair.site.restart()?;
    pair.publish("UPDATE t SET m = 'it''s' WHERE id = 1")?;
    pair.assert_equal(&["public"])?;
    Ok(did)
}

fn target_says(pair: &Pair) -> Result<String> {
    pair.subscriber_says("SELECT string_agg(DISTINCT m::text, ' ' ORDER BY m::text) FROM t")
}

#[test]
fn a_label_that_has_another_name_is_renamed_as_told() -> Result<()> {
    for (direction, stopped) in [(Direction::UP, false), (Direction::DOWN, true)] {
        let mut pair = copied(direction, "SELECT 1")?;
        if stopped {
            pair.site.stop()?;
        }
        pair.publish("UPDATE t SET m = 'b' WHERE id = 2")?;
        pair.publish("ALTER TYPE s.\"Mood\" RENAME VALUE 'a' TO 'it was ''a'''")?;
        if stopped {
            pair.site.start()?;
        }
        pair.site.await_log(NOTICED, SOON)?;
        // What came before it has been applied.
        ensure!(pair.subscriber_says("SELECT m FROM t WHERE id = 2")? == "b");
        let did = mended_as_told(&mut pair)?;
        let rename = "ALTER TYPE s.\"Mood\" RENAME VALUE 'a' TO 'it was ''a'''";
        ensure!(did == [rename], "{did:?}");
    }
    Ok(())
}

/// The publisher is asked again and again about a table that was renamed. What is new of others, and
/// cannot be noted before the stream has come to it, does not keep the stream from coming to it.
#[test]
fn what_is_new_beside_a_table_that_was_renamed_holds_nothing_up() -> Result<()> {
    for news in ["ALTER TYPE mood ADD VALUE 'happy'", "ALTER TABLE e ADD COLUMN x integer"] {
        let schema = "CREATE TYPE mood AS ENUM ('sad', 'ok'); \
             CREATE TABLE was (id integer PRIMARY KEY, b text); \
             CREATE TABLE e (id integer PRIMARY KEY, m mood)";
        let mut pair = Pair::new(Direction::UP, &["public.*"], schema)?;
        pair.publish("INSERT INTO was VALUES (1, 'a')")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("ALTER TABLE was RENAME TO renamed; INSERT INTO renamed VALUES (2, 'b')")?;
        pair.site.await_log("is called public.renamed now", SOON)?;
        pair.assert_equal(&["public"])?;
        pair.site.stop()?;
        pair.publish(news)?;
        pair.publish("INSERT INTO e VALUES (1, 'ok')")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
    }
    Ok(())
}

/// A row with the new name may come before anybody has looked.
#[test]
fn a_row_with_the_new_name_stops_with_the_same() -> Result<()> {
    let mut pair = copied(Direction::UP, "SELECT 1")?;
    pair.site.stop()?;
    pair.publish("ALTER TYPE s.\"Mood\" RENAME VALUE 'a' TO 'c'")?;
    pair.publish("INSERT INTO t VALUES (101, 'c')")?;
    pair.site.start()?;
    let rename = "ALTER TYPE s.\"Mood\" RENAME VALUE 'a' TO 'c'";
    let (state, error) = pair.site.await_trouble("s", rename)?;
    ensure!(state == "stopped" && !error.contains("ADD VALUE"), "{state}: {error}");
    pair.subscriber.execute_script(rename)?;
    pair.site.verb("resume", &["--subscription", "s"])?;
    pair.assert_equal(&["public"])
}

/// Nobody can tell what rows mean that came after it.
#[test]
fn labels_that_change_places_are_copied_anew() -> Result<()> {
    let swap = "ALTER TYPE s.\"Mood\" RENAME VALUE 'a' TO 'x'; \
        ALTER TYPE s.\"Mood\" RENAME VALUE 'b' TO 'a'; \
        ALTER TYPE s.\"Mood\" RENAME VALUE 'x' TO 'b'";
    let taken =
        "ALTER TYPE s.\"Mood\" RENAME VALUE 'a' TO 'c'; ALTER TYPE s.\"Mood\" ADD VALUE 'a'";
    for (renamed, direction) in [(swap, Direction::UP), (taken, Direction::DOWN)] {
        let mut pair = copied(direction, "SELECT 1")?;
        for statement in renamed.split("; ") {
            pair.publish(statement)?;
        }
        pair.publish("INSERT INTO t VALUES (101, 'a'), (102, 'b')")?;
        pair.site.await_log(NOTICED, SOON)?;
        if renamed == taken {
            pair.subscriber.execute_script("ALTER TYPE s.\"Mood\" ADD VALUE 'c'")?;
        }
        let mut did = mended_as_told(&mut pair)?;
        did.sort();
        ensure!(did == ["public.t", "public.u"], "{did:?}");
    }
    Ok(())
}

#[test]
fn what_was_renamed_on_both_sides_goes_on() -> Result<()> {
    let mut pair = copied(Direction::UP, "SELECT 1")?;
    let rename = "ALTER TYPE s.\"Mood\" RENAME VALUE 'a' TO 'c'";
    pair.subscriber.execute_script(rename)?;
    pair.publish(rename)?;
    let noted = "SELECT count(*) FROM farshore.table_copy WHERE enum_labels::text LIKE '%\"c\"%'";
    wait_until("the new name to be noted", SOON, &[&pair.site.log_path()], || {
        Ok((pair.subscriber_says(noted)? == "2").then_some(()))
    })?;
    pair.publish("INSERT INTO t VALUES (101, 'c')")?;
    pair.assert_equal(&["public"])?;
    ensure!(!pair.site.log().contains(NOTICED), "{}", pair.site.log_tail());
    // One that is added is noted too.
    pair.on_both("ALTER TYPE s.\"Mood\" ADD VALUE 'new'")?;
    pair.publish("INSERT INTO t VALUES (102, 'new')")?;
    let noted = "SELECT count(*) FROM farshore.table_copy WHERE enum_labels::text LIKE '%new%'";
    wait_until("the new label to be noted", SOON, &[&pair.site.log_path()], || {
        Ok((pair.subscriber_says(noted)? == "2").then_some(()))
    })?;
    pair.publish("ALTER TYPE s.\"Mood\" RENAME VALUE 'new' TO 'newer'")?;
    pair.site.await_log(NOTICED, SOON)?;
    let did = mended_as_told(&mut pair)?;
    ensure!(did == ["ALTER TYPE s.\"Mood\" RENAME VALUE 'new' TO 'newer'"], "{did:?}");
    ensure!(target_says(&pair)? == "b c it's newer", "{}", target_says(&pair)?);
    Ok(())
}

/// Rows have the name itself where the target's column is no enum.
#[test]
fn names_that_are_text_on_the_target_are_copied_anew() -> Result<()> {
    let on_target = "CREATE TABLE t (id integer PRIMARY KEY, m text); \
        CREATE TABLE u (id integer PRIMARY KEY, m text[])";
    let mut pair = copied(Direction::UP, on_target)?;
    pair.publish("ALTER TYPE s.\"Mood\" RENAME VALUE 'a' TO 'c'")?;
    pair.site.await_log(NOTICED, SOON)?;
    let mut did = mended_as_told(&mut pair)?;
    did.sort();
    ensure!(did == ["public.t", "public.u"], "{did:?}");
    Ok(())
}
