//! A publication that something else alters. What is not published leaves no trace in the stream,
//! so the catalog has to be asked, and what may be missing must be said.

use anyhow::{Result, ensure};
use farshore_tests::{Direction, Pair};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const SCHEMA: &str = "CREATE TABLE t (id integer PRIMARY KEY, v text); \
    CREATE TABLE u (id integer PRIMARY KEY, v text)";

fn streaming(publisher: u32) -> Result<Pair> {
    let direction = Direction { publisher, subscriber: if publisher == 15 { 18 } else { 15 } };
    let mut pair = Pair::new(direction, &["public.*"], SCHEMA)?;
    pair.publish("INSERT INTO t VALUES (1, 'v'); INSERT INTO u VALUES (1, 'v')")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    Ok(pair)
}

/// An alteration after which capture must stop and say why, whether it happens while the node
/// runs or while it does not.
fn stops(alter: &str, says: &str) -> Result<()> {
    for publisher in [15, 18] {
        for running in [true, false] {
            let mut pair = streaming(publisher)?;
            if !running {
                pair.site.stop()?;
            }
            pair.publish(alter)?;
            pair.publish("UPDATE t SET v = 'missing'; INSERT INTO u VALUES (2, 'v')")?;
            if !running {
                pair.site.start()?;
            }
            let (state, error) = pair.site.await_trouble("p", says)?;
            ensure!(state == "stopped", "{publisher}, running {running}: {state}: {error}");
            ensure!(error.contains("To copy everything anew"), "{error}");
            // Nor does another start forget it.
            pair.site.restart()?;
            pair.site.await_trouble("p", says)?;
        }
    }
    Ok(())
}

#[test]
fn it_publishes_inserts_only() -> Result<()> {
    stops(
        "ALTER PUBLICATION farshore_p SET (publish = 'insert')",
        "it published insert, update, delete, truncate, and now insert. Changes may be missing",
    )
}

#[test]
fn it_is_dropped() -> Result<()> {
    stops("DROP PUBLICATION farshore_p", "was dropped")
}

#[test]
fn it_is_altered_and_set_back_meanwhile() -> Result<()> {
    let mut pair = streaming(15)?;
    pair.site.stop()?;
    pair.publish("ALTER PUBLICATION farshore_p SET (publish = 'insert')")?;
    pair.publish("UPDATE t SET v = 'missing'")?;
    pair.publish(
        "ALTER PUBLICATION farshore_p SET (publish = 'insert, update, delete, truncate')",
    )?;
    pair.site.start()?;
    let (state, _) = pair.site.await_trouble("p", "and set back")?;
    ensure!(state == "stopped", "{state}");
    Ok(())
}

#[test]
fn it_is_dropped_and_made_again_meanwhile() -> Result<()> {
    for publisher in [15, 18] {
        let mut pair = streaming(publisher)?;
        pair.site.stop()?;
        pair.publish("DROP PUBLICATION farshore_p")?;
        pair.publish("UPDATE t SET v = 'missing'")?;
        pair.publish("CREATE PUBLICATION farshore_p FOR TABLE t, u, farshore_marks.mark")?;
        pair.site.start()?;
        let (state, _) = pair.site.await_trouble("p", "made again")?;
        ensure!(state == "stopped", "{state}");
    }
    Ok(())
}

/// A table that is taken out, or gets a row filter, is put back; the subscription says that it
/// must be copied anew, and is equal after that.
fn table_is_copied_anew(alter: &[&str]) -> Result<()> {
    for running in [true, false] {
        let mut pair = streaming(18)?;
        if !running {
            pair.site.stop()?;
        }
        for statement in alter {
            pair.publish(statement)?;
        }
        pair.publish("UPDATE t SET v = 'missing'; INSERT INTO t VALUES (-2, 'missing')")?;
        if !running {
            pair.site.start()?;
        }
        let said = "something else took public.t out of PostgreSQL publication";
        pair.site.await_log(said, SOON)?;
        let (state, error) = pair.site.await_trouble("s", "public.t on the target has rows")?;
        ensure!(state == "stopped", "{state}: {error}");
        pair.subscriber.execute_script("TRUNCATE t")?;
        pair.site.restart()?;
        pair.publish("INSERT INTO t VALUES (3, 'after'); UPDATE u SET v = 'after'")?;
        pair.assert_equal(&["public"])?;
        // And that is the end of it.
        pair.site.restart()?;
        pair.assert_equal(&["public"])?;
        ensure!(!pair.site.log().contains(said), "it is said again:\n{}", pair.site.log());
    }
    Ok(())
}

#[test]
fn a_table_is_taken_out() -> Result<()> {
    table_is_copied_anew(&["ALTER PUBLICATION farshore_p DROP TABLE t"])
}

#[test]
fn a_table_is_taken_out_and_put_back() -> Result<()> {
    table_is_copied_anew(&[
        "ALTER PUBLICATION farshore_p DROP TABLE t",
        "UPDATE t SET v = 'between'",
        "ALTER PUBLICATION farshore_p ADD TABLE t",
    ])
}

#[test]
fn a_row_filter_is_added() -> Result<()> {
    table_is_copied_anew(&[
        "ALTER PUBLICATION farshore_p SET TABLE t WHERE (id > 0), u, farshore_marks.mark",
    ])
}

#[test]
fn harmless_changes_are_harmless() -> Result<()> {
    let mut pair = streaming(15)?;
    pair.publish("CREATE ROLE owner SUPERUSER")?;
    for owner in ["owner", "postgres"] {
        pair.publish(&format!("ALTER PUBLICATION farshore_p OWNER TO {owner}"))?;
        pair.publish("DROP TABLE IF EXISTS u; UPDATE t SET v = v || 'x'")?;
        pair.assert_equal(&["farshore_marks"])?;
        pair.site.restart()?;
        pair.publish("UPDATE t SET v = v || 'y'")?;
        pair.assert_equal(&["farshore_marks"])?;
    }
    ensure!(!pair.site.log().contains("something else"), "{}", pair.site.log());
    Ok(())
}
