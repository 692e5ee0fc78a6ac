//! A publication that something else alters. What is not published leaves no trace in the stream,
//! so the catalog has to be asked, and what may be missing must be said.

use anyhow::{Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{DATABASE, Direction, Pair};
use postgres::{Client, NoTls};
use std::sync::atomic::{AtomicBool, Ordering};
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

/// Only its root is listed: while it is detached nothing of it is published, and afterwards it is the
/// same table with the same membership.
#[test]
fn a_partition_is_detached_and_attached_again() -> Result<()> {
    for running in [true, false] {
        let schema = "CREATE TABLE p (id integer PRIMARY KEY, v text) PARTITION BY RANGE (id); \
            CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10); \
            CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20)";
        let direction = Direction { publisher: 18, subscriber: 15 };
        let mut pair = Pair::new(direction, &["public.p"], schema)?;
        pair.publish("INSERT INTO p VALUES (1, 'v'), (2, 'v'), (11, 'v')")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        if !running {
            pair.site.stop()?;
        }
        pair.publish("ALTER TABLE p DETACH PARTITION p1")?;
        pair.publish("UPDATE p1 SET v = 'missing'; INSERT INTO p1 VALUES (3, 'missing')")?;
        pair.publish("ALTER TABLE p ATTACH PARTITION p1 FOR VALUES FROM (0) TO (10)")?;
        if !running {
            pair.site.start()?;
        }
        let (state, error) = pair.site.await_trouble("s", "public.p1 on the target has rows")?;
        ensure!(state == "stopped", "{state}: {error}");
        pair.subscriber.execute_script("TRUNCATE p1")?;
        pair.site.restart()?;
        pair.publish("INSERT INTO p VALUES (4, 'after'); UPDATE p SET v = 'after'")?;
        pair.assert_equal(&["public"])?;
        pair.site.restart()?;
        pair.assert_equal(&["public"])?;
    }
    Ok(())
}

#[test]
fn a_row_filter_is_added() -> Result<()> {
    table_is_copied_anew(&[
        "ALTER PUBLICATION farshore_p SET TABLE t WHERE (id > 0), u, farshore_marks.mark",
    ])
}

/// The column is still there on the publisher, and so it is to be on the target.
#[test]
fn a_list_of_columns_is_no_reason_to_drop_one() -> Result<()> {
    for follow in ["add", "add-drop"] {
        let direction = Direction { publisher: 15, subscriber: 18 };
        let schema = "CREATE TABLE t (id integer PRIMARY KEY, a text NOT NULL, b integer)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        let follow = format!("[subscription.s]\nfollow_ddl = \"{follow}\"");
        pair.site.replace("[subscription.s]", &follow)?;
        pair.publish("INSERT INTO t SELECT i, 'a', i FROM generate_series(1, 50) i")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        // In one step: it is put back within seconds.
        pair.publish(
            "ALTER PUBLICATION farshore_p SET TABLE t (id), farshore_marks.mark; \
             INSERT INTO t VALUES (100, 'list', 1)",
        )?;
        pair.publish("INSERT INTO t VALUES (101, 'list', 1)")?;
        let (state, error) = pair.site.await_trouble("s", "--table public.t")?;
        ensure!(state == "stopped" && !error.contains("DROP COLUMN"), "{state}: {error}");
        let columns = "SELECT count(*) FROM pg_attribute WHERE attrelid = 't'::regclass \
            AND attnum > 0 AND NOT attisdropped";
        ensure!(pair.subscriber_says(columns)? == "3", "a column was dropped");
        pair.site.await_log("They are put back", SOON)?;
        wait_until("the publication to be whole", SOON, &[&pair.site.log_path()], || {
            let listed =
                "SELECT prattrs IS NULL FROM pg_publication_rel WHERE prrelid = 't'::regclass";
            Ok((pair.publisher_says(listed)? == "t").then_some(()))
        })?;
        pair.site.verb("resync", &["--subscription", "s", "--table", "public.t"])?;
        pair.site.verb("resume", &["--subscription", "s"])?;
        pair.assert_equal(&["public"])?;
    }
    Ok(())
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

/// Under a wildcard, sessions make scratch tables and drop them while the node starts: what was
/// listed a moment ago may be gone when it is locked, published or asked about.
#[test]
fn tables_that_come_and_go_stop_nothing() -> Result<()> {
    for (publisher, subscriber) in [(15, 18), (18, 15)] {
        let direction = Direction { publisher, subscriber };
        let mut pair = Pair::new(direction, &["*.*"], SCHEMA)?;
        let url = pair.publisher.url("postgres");
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| -> Result<()> {
            let mut clients = Vec::new();
            for number in 0..3 {
                let (url, over) = (&url, &over);
                clients.push(scope.spawn(move || -> Result<()> {
                    let mut client = Client::connect(url, NoTls)?;
                    while !over.load(Ordering::Relaxed) {
                        client.batch_execute(&format!(
                            "CREATE SCHEMA s{number}; CREATE TABLE s{number}.a (id integer); \
                             CREATE TABLE b{number} (id integer PRIMARY KEY)"
                        ))?;
                        client.batch_execute(&format!(
                            "DROP TABLE b{number}; DROP SCHEMA s{number} CASCADE"
                        ))?;
                    }
                    Ok(())
                }));
            }
            let tried = (|| -> Result<()> {
                for round in 0..4 {
                    pair.site.start()?;
                    pair.publish(&format!("INSERT INTO t VALUES ({round}, 'v')"))?;
                    wait_until("the row", SOON, &[&pair.site.log_path()], || {
                        let status = pair.site.status()?;
                        for kind in ["publications", "subscriptions"] {
                            let agent = &status[kind][0];
                            ensure!(agent["state"] != "stopped", "round {round}: {agent}");
                        }
                        let row = format!("SELECT count(*) FROM t WHERE id = {round}");
                        Ok((pair.subscriber_says(&row)? == "1").then_some(()))
                    })?;
                    pair.site.stop()?;
                }
                Ok(())
            })();
            over.store(true, Ordering::Relaxed);
            for client in clients {
                client.join().map_err(|_| anyhow::anyhow!("a client panicked"))??;
            }
            tried
        })?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
    }
    Ok(())
}

/// Ends what Farshore has open on the publisher.
fn cut(pair: &Pair) -> Result<()> {
    pair.publish(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
         WHERE application_name LIKE 'farshore %' AND pid <> pg_backend_pid()",
    )
}

/// Neither a table that joins nor a lost connection finds what was listed.
#[test]
fn a_listed_table_that_is_dropped_holds_up_no_others() -> Result<()> {
    let mut pair = Pair::new(
        Direction::UP,
        &["public.t", "public.gone", "public.late", "new.*"],
        "CREATE TABLE t (id integer PRIMARY KEY, v text); \
         CREATE TABLE gone (id integer PRIMARY KEY); \
         CREATE TABLE late (id integer PRIMARY KEY); CREATE SCHEMA new; \
         CREATE TABLE new.first (id integer PRIMARY KEY)",
    )?;
    pair.site.start()?;
    pair.await_arrival()?;
    pair.publish("DROP TABLE gone")?;
    let (state, error) = pair.site.await_trouble("p", "there is no table public.gone")?;
    ensure!(state == "streaming", "{state}: {error}");
    pair.on_both("CREATE TABLE new.second (id integer PRIMARY KEY)")?;
    pair.publish("INSERT INTO new.second VALUES (1)")?;
    pair.await_copy("second")?;
    cut(&pair)?;
    pair.publish("INSERT INTO t VALUES (1, 'v'); INSERT INTO new.second VALUES (2)")?;
    pair.await_arrival()?;
    pair.assert_equal(&["new"])?;
    ensure!(pair.subscriber_says("SELECT count(*) FROM t")? == "1");
    // Nor is it missed where the node starts again, be the drop seen before or not.
    pair.site.stop()?;
    pair.site.start()?;
    pair.publish("INSERT INTO t VALUES (2, 'v')")?;
    pair.await_arrival()?;
    pair.site.stop()?;
    pair.publish("DROP TABLE late; INSERT INTO t VALUES (3, 'v')")?;
    pair.site.start()?;
    pair.await_arrival()?;
    let (state, error) = pair.site.await_trouble("p", "there is no table public.late")?;
    ensure!(state == "streaming", "{state}: {error}");
    ensure!(error.contains("there is no table public.gone"), "{error}");
    ensure!(pair.subscriber_says("SELECT count(*) FROM t")? == "3");
    // It is there again, and copied.
    pair.publish(
        "CREATE TABLE late (id integer PRIMARY KEY); CREATE TABLE gone (id integer PRIMARY KEY); \
         INSERT INTO gone VALUES (7)",
    )?;
    wait_until("its copy", SOON, &[&pair.site.log_path()], || {
        Ok((pair.subscriber_says("SELECT count(*) FROM gone")? == "1").then_some(()))
    })?;
    wait_until("nothing to say", SOON, &[&pair.site.log_path()], || {
        Ok(pair.site.status()?["publications"][0]["error"].is_null().then_some(()))
    })?;
    pair.assert_equal(&["public", "new"])
}

/// What `farshore commission` makes for a moment stays with the publisher; what is only called
/// alike does not.
#[test]
fn what_commission_makes_is_not_published() -> Result<()> {
    for direction in [Direction::UP, Direction::DOWN] {
        let mut pair = Pair::new(direction, &["*.*"], SCHEMA)?;
        pair.publish(
            "CREATE SCHEMA farshore_commission_42; \
             CREATE TABLE farshore_commission_42.rows (id int8 NOT NULL, content text NOT NULL); \
             INSERT INTO farshore_commission_42.rows VALUES (1, 'x')",
        )?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish(
            "CREATE SCHEMA farshore_commission_43; \
             CREATE TABLE farshore_commission_43.pool (id int8 PRIMARY KEY, content text NOT NULL); \
             CREATE SCHEMA farshore_commission_notes; \
             CREATE TABLE farshore_commission_notes.hits (id int8 PRIMARY KEY)",
        )?;
        // Both were there when what joins was looked for.
        pair.await_copy("hits")?;
        pair.publish("INSERT INTO farshore_commission_43.pool VALUES (1, 'x')")?;
        pair.assert_equal(&["public", "farshore_commission_notes"])?;
        let made = "SELECT count(*) FROM pg_namespace WHERE nspname ~ '^farshore_commission_[0-9]'";
        ensure!(pair.subscriber_says(made)? == "0", "it is on the target");
    }
    Ok(())
}

/// It is not ours: what is taken out of it stays out, and is told of until it is back or meant.
#[test]
fn a_table_is_taken_out_of_an_adopted_publication() -> Result<()> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.on_both(SCHEMA)?;
    pair.publish("CREATE PUBLICATION handed FOR TABLE t, u, farshore_marks.mark")?;
    pair.add_publication("p", &[], "adopt_publication = \"handed\"")?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.publish("INSERT INTO t VALUES (1, 'v'); INSERT INTO u VALUES (1, 'v')")?;
    pair.assert_equal(&["public"])?;
    let alter = "ALTER PUBLICATION handed DROP TABLE t";
    let said = "something else took public.t out of PostgreSQL publication handed";
    let await_reason = |pair: &Pair, text: &str| {
        wait_until(text, SOON, &[&pair.site.log_path()], || {
            let status = pair.site.status()?;
            let p = &status["publications"][0];
            let reason = p["reason"].as_str().unwrap_or_default().to_owned();
            let is_well = p["state"] == "streaming" && p["error"].is_null();
            Ok((is_well && p["health"] == "warning" && reason.contains(text)).then_some(reason))
        })
    };
    let warns = |pair: &Pair| -> Result<()> {
        let reason = await_reason(pair, said)?;
        for next in
            ["ALTER PUBLICATION handed ADD TABLE public.t", "resume SITE.toml --publication"]
        {
            ensure!(reason.contains(next), "{reason}");
        }
        let status = pair.site.verb("status", &[])?;
        ensure!(status.code == Some(4) && status.stdout.contains(said), "{status:?}");
        let checked = pair.site.verb("check", &[])?;
        ensure!(checked.code == Some(0) && checked.stdout.contains(said), "{checked:?}");
        Ok(())
    };
    let is_quiet = |pair: &Pair| -> Result<()> {
        wait_until("nothing to say", SOON, &[&pair.site.log_path()], || {
            Ok((pair.site.status()?["publications"][0]["health"] == "good").then_some(()))
        })?;
        let checked = pair.site.verb("check", &[])?;
        ensure!(!checked.stdout.contains(said), "{checked:?}");
        Ok(())
    };
    pair.publish(alter)?;
    warns(&pair)?;
    // Nor is it forgotten when the node starts again; nor missed where it was not running.
    pair.site.restart()?;
    warns(&pair)?;
    pair.site.verb("resume", &["--publication", "p"])?;
    is_quiet(&pair)?;
    pair.publish("ALTER PUBLICATION handed DROP TABLE u")?;
    await_reason(&pair, "something else took public.u out of")?;
    // It is dropped: nothing is missing.
    pair.publish("DROP TABLE u")?;
    is_quiet(&pair)
}
