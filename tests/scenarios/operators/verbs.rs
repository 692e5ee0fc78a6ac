//! pause, resume, skip and resync.

use anyhow::{Context, Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{Direction, Pair, both_ways};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const SCHEMA: &str = "CREATE TABLE t (id integer PRIMARY KEY, v text); \
    CREATE TABLE u (id integer PRIMARY KEY, v text)";
const ROWS: &str = "INSERT INTO t SELECT i, 'v' FROM generate_series(1, 100) AS i; \
    INSERT INTO u SELECT i, 'v' FROM generate_series(1, 100) AS i";

fn pair(direction: Direction) -> Result<Pair> {
    let mut pair = Pair::new(direction, &["public.*"], SCHEMA)?;
    pair.publish(ROWS)?;
    pair.site.start()?;
    pair.await_arrival()?;
    Ok(pair)
}

/// Runs a verb on subscription `s` that must succeed; returns what it says.
fn verb(pair: &Pair, verb: &str, more: &[&str]) -> Result<String> {
    let arguments = [&["--subscription", "s"], more].concat();
    let said = pair.site.verb(verb, &arguments)?;
    ensure!(said.code == Some(0), "{verb}: {said:?}");
    Ok(said.stdout)
}

/// Runs a verb on subscription `s` that must be refused; returns why.
fn refused(pair: &Pair, verb: &str, more: &[&str]) -> Result<String> {
    let arguments = [&["--subscription", "s"], more].concat();
    let said = pair.site.verb(verb, &arguments)?;
    ensure!(said.code == Some(1) && said.stdout.is_empty(), "{verb}: {said:?}");
    Ok(said.stderr)
}

fn state(pair: &Pair) -> Result<String> {
    let status = pair.site.status()?;
    Ok(status["subscriptions"][0]["state"].as_str().unwrap_or_default().to_owned())
}

fn await_state(pair: &Pair, wanted: &str) -> Result<()> {
    wait_until(&format!("state {wanted}"), SOON, &[], || Ok((state(pair)? == wanted).then_some(())))
}

/// Position of the transaction that a stopped subscription names.
fn position_of(line: &str) -> Result<String> {
    let (_, rest) = line.split_once("committed at ").context("no position")?;
    Ok(rest.split(' ').next().unwrap_or_default().to_owned())
}

/// Three transactions; the second cannot be applied.
fn get_stuck(pair: &mut Pair) -> Result<String> {
    pair.subscriber.execute_script("DELETE FROM t WHERE id = 7")?;
    pair.publish("UPDATE u SET v = 'before' WHERE id = 1")?;
    pair.publish(
        "BEGIN; UPDATE u SET v = 'with it' WHERE id = 2; UPDATE t SET v = 'w' WHERE id = 7; COMMIT",
    )?;
    pair.publish("UPDATE u SET v = 'after' WHERE id = 3")?;
    let line = pair.site.await_log(" stopped: ", SOON)?;
    position_of(&line)
}

const U: &str = "SELECT string_agg(v, ',' ORDER BY id) FROM u WHERE id <= 3";
const SKIPPED: &str = "SELECT count(*) || ' ' || coalesce(min(reason), '') FROM farshore.conflicts \
    WHERE operation = 'TRANSACTION' AND action = 'skipped'";

#[test]
fn skip_leaves_out_one_transaction() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction)?;
        let stuck = get_stuck(&mut pair)?;
        ensure!(pair.subscriber_says(U)? == "before,v,v");
        for (lsn, why) in [
            ("0/1", "is applied already"),
            ("FF/0", "no stored transaction's commit record ends there"),
        ] {
            let said = refused(&pair, "skip", &["--lsn", lsn])?;
            ensure!(said.contains(why), "{lsn}: {said}");
        }
        ensure!(state(&pair)? == "stopped", "a refused skip changed the state");
        let said = verb(&pair, "skip", &["--lsn", &stuck])?;
        ensure!(said.contains(&format!("committed at {stuck} next")), "{said}");
        wait_until("the rest", SOON, &[], || {
            Ok((pair.subscriber_says(U)? == "before,v,after").then_some(()))
        })?;
        let skipped = pair.subscriber_says(SKIPPED)?;
        ensure!(
            skipped == "1 skipped on request: 1 UPDATE on public.t, 1 UPDATE on public.u",
            "{skipped}"
        );
        let said = refused(&pair, "skip", &["--lsn", &stuck])?;
        ensure!(said.contains("is applied already"), "{said}");
        Ok(())
    })
}

#[test]
fn a_skip_takes_effect_once_whatever_kills_the_node() -> Result<()> {
    let mut pair = pair(Direction::UP)?;
    let stuck = get_stuck(&mut pair)?;
    pair.site.stop()?;
    // No node runs: the request waits on the target.
    let said = verb(&pair, "skip", &["--lsn", &stuck])?;
    ensure!(said.contains("will leave out"), "{said}");
    for point in ["apply.before-commit", "apply.after-commit-sent", "apply.after-commit"] {
        pair.site.env("FARSHORE_CRASH", point);
        pair.site.start()?;
        if point == "apply.after-commit" {
            // The skip itself may have been committed by then.
            pair.publish("UPDATE u SET v = 'x' WHERE id = 9")?;
        }
        pair.site.await_kill(point, SOON)?;
    }
    pair.site.env("FARSHORE_CRASH", "");
    pair.site.start()?;
    pair.await_arrival()?;
    let skipped = pair.subscriber_says(SKIPPED)?;
    ensure!(skipped.starts_with("1 skipped on request"), "{skipped}");
    ensure!(pair.subscriber_says(U)? == "before,v,after");
    let left = pair.subscriber_says("SELECT count(*) FROM farshore.skip_request")?;
    ensure!(left == "0", "{left} requests are left");
    Ok(())
}

#[test]
fn a_transaction_that_lies_ahead_is_skipped_when_it_is_reached() -> Result<()> {
    let mut pair = pair(Direction::DOWN)?;
    verb(&pair, "pause", &[])?;
    for v in ["one", "two", "three"] {
        pair.publish(&format!(
            "BEGIN; UPDATE u SET v = '{v}' WHERE id = 1; UPDATE t SET v = '{v}' WHERE id = 1; COMMIT"
        ))?;
        pair.publish(&format!("INSERT INTO u SELECT max(id) + 1, '{v}' FROM u"))?;
    }
    let mut lsns = Vec::new();
    wait_until("the changes in the log", SOON, &[], || {
        let said =
            pair.site.verb("browse", &["--publication", "p", "--table", "public.u", "--json"])?;
        lsns = said
            .stdout
            .lines()
            .filter(|line| line.contains("UPDATE"))
            .map(|line| {
                Ok(serde_json::from_str::<serde_json::Value>(line)?["lsn"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned())
            })
            .collect::<Result<Vec<String>>>()?;
        Ok((lsns.len() == 3).then_some(()))
    })?;
    let said = verb(&pair, "skip", &["--lsn", &lsns[1]])?;
    ensure!(said.contains("when it is reached"), "{said}");
    ensure!(state(&pair)? == "paused");
    verb(&pair, "resume", &[])?;
    pair.await_arrival()?;
    let record = "SELECT source_lsn FROM farshore.conflicts WHERE operation = 'TRANSACTION'";
    ensure!(pair.subscriber_says(record)? == lsns[1]);
    // What came before and after it is there: nothing but the second update is missing.
    pair.assert_equal(&["public"])?;
    ensure!(pair.subscriber_says(SKIPPED)?.starts_with("1 "));
    Ok(())
}

#[test]
fn a_pause_outlives_the_node() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction)?;
        let said = verb(&pair, "pause", &[])?;
        ensure!(said.contains("is paused"), "{said}");
        pair.publish("UPDATE u SET v = 'before' WHERE id = 1")?;
        ensure!(state(&pair)? == "paused");
        for kill in [false, true] {
            if kill {
                pair.site.kill9()?
            } else {
                pair.site.stop().map(drop)?
            }
            pair.site.start()?;
            pair.site.await_log("capture streaming", SOON)?;
            await_state(&pair, "paused")?;
        }
        ensure!(pair.subscriber_says(U)? == "v,v,v");
        // What is committed meanwhile is kept, and no error but worth a warning.
        let status = pair.site.verb("status", &[])?;
        ensure!(status.code == Some(4), "{status:?}");
        ensure!(status.stdout.contains("warning    paused by an operator"), "{status:?}");
        verb(&pair, "resume", &[])?;
        pair.await_arrival()?;
        ensure!(pair.subscriber_says(U)? == "before,v,v");
        // Without a node, too.
        pair.site.stop()?;
        verb(&pair, "pause", &[])?;
        pair.site.start()?;
        await_state(&pair, "paused")?;
        pair.site.stop()?;
        verb(&pair, "resume", &[])?;
        pair.site.start()?;
        pair.assert_equal(&["public"])
    })
}

#[test]
fn a_stopped_subscription_goes_on_without_a_restart() -> Result<()> {
    let mut pair = pair(Direction::UP)?;
    get_stuck(&mut pair)?;
    let pid = pair.site.status()?["pid"].clone();
    // In vain.
    verb(&pair, "resume", &[])?;
    await_state(&pair, "stopped")?;
    pair.subscriber.execute_script("INSERT INTO t VALUES (7, 'put back')")?;
    verb(&pair, "resume", &[])?;
    wait_until("the rest", SOON, &[], || {
        Ok((pair.subscriber_says(U)? == "before,with it,after").then_some(()))
    })?;
    let status = pair.site.status()?;
    ensure!(status["pid"] == pid && status["subscriptions"][0]["error"].is_null(), "{status}");
    let fresh = farshore_tests::Site::new()?;
    std::fs::copy(pair.site.file(), fresh.file())?;
    let said = fresh.verb("browse", &["--publication", "p"])?;
    ensure!(said.code == Some(1) && said.stderr.contains("has no store in"), "{said:?}");
    for (verb, arguments, why) in [
        ("pause", &["--subscription", "x"][..], "has no subscription \"x\""),
        ("resume", &["--publication", "x"], "has no publication \"x\""),
    ] {
        let said = pair.site.verb(verb, arguments)?;
        ensure!(said.code == Some(1) && said.stderr.contains(why), "{said:?}");
    }
    pair.site.stop()?;
    let said = pair.site.verb("resume", &["--publication", "p"])?;
    let why = "no node runs here: a publication goes on when the node starts";
    ensure!(said.code == Some(1) && said.stderr.contains(why), "{said:?}");
    Ok(())
}

#[test]
fn resync_copies_a_table_anew_under_load() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction)?;
        pair.publish(
            "INSERT INTO t SELECT i, repeat('v', 200) FROM generate_series(101, 50000) AS i",
        )?;
        pair.await_arrival()?;
        // Something else has made a mess of one table.
        pair.subscriber.execute_script(
            "UPDATE t SET v = 'wrong' WHERE id % 3 = 0; DELETE FROM t WHERE id % 5 = 0; \
             INSERT INTO t VALUES (-1, 'wrong')",
        )?;
        let said = refused(&pair, "resync", &["--table", "public.x"])?;
        ensure!(said.contains("public.t"), "{said}");
        let done = AtomicBool::new(false);
        let mut client = pair.publisher.connect()?;
        std::thread::scope(|scope| {
            let load = scope.spawn(|| -> Result<()> {
                let mut n = 100_000;
                while !done.load(Ordering::Relaxed) {
                    n += 1;
                    // Rows that the mess has not touched: it stands until the table is emptied.
                    client.batch_execute(&format!(
                        "BEGIN; INSERT INTO t VALUES ({n}, 'new'); UPDATE u SET v = v || '.' \
                         WHERE id = {n} % 100; UPDATE t SET v = 'u' WHERE id = {}; COMMIT",
                        (n % 3_000) * 15 + 1
                    ))?;
                }
                Ok(())
            });
            let result = (|| {
                let said = verb(&pair, "resync", &["--table", "public.t"])?;
                ensure!(said.contains("copies anew: public.t"), "{said}");
                pair.site.await_log("table copied", SOON)?;
                pair.await_arrival()
            })();
            done.store(true, Ordering::Relaxed);
            let load = load.join().ok().context("the load died")?;
            result.and(load)
        })?;
        pair.assert_equal(&["public"])?;
        // All tables, and a node that dies in between.
        pair.subscriber.execute_script("DELETE FROM u; UPDATE t SET v = 'wrong'")?;
        let crash = "snapshot.after-range-commit:2";
        pair.site.env("FARSHORE_CRASH", crash);
        pair.site.stop()?;
        verb(&pair, "resync", &[])?;
        pair.site.start()?;
        pair.site.await_kill(crash, SOON)?;
        pair.site.env("FARSHORE_CRASH", "");
        pair.site.start()?;
        pair.assert_equal(&["public"])
    })
}

/// COPY knows no rules: one is met only by a row that changed while its table was copied.
#[test]
fn a_row_that_a_rule_keeps_out_at_the_end_of_a_copy_is_missed() -> Result<()> {
    let mut pair = pair(Direction::UP)?;
    pair.subscriber.execute_script(
        "CREATE RULE r AS ON INSERT TO t WHERE NEW.v = 'lost' DO INSTEAD NOTHING; \
         ALTER TABLE t ENABLE ALWAYS RULE r; UPDATE t SET v = 'wrong'",
    )?;
    let mut reader = pair.subscriber.connect()?;
    reader.batch_execute("BEGIN; SELECT count(*) FROM t")?;
    verb(&pair, "resync", &["--table", "public.t"])?;
    let mut target = pair.subscriber.connect()?;
    wait_until("the copy to wait", SOON, &[], || {
        let waiting = "SELECT FROM pg_locks WHERE relation = 't'::regclass AND NOT granted LIMIT 1";
        Ok(target.query_opt(waiting, &[])?.map(drop))
    })?;
    pair.publish("UPDATE t SET v = 'lost' WHERE id IN (3, 5); UPDATE t SET v = 'x' WHERE id = 4")?;
    reader.batch_execute("COMMIT")?;
    let missed = "table public.t on the target took 1 rows of a part of the copy, and 3 were sent";
    let (state, error) = pair.site.await_trouble("s", missed)?;
    ensure!(state == "stopped", "{state}: {error}");
    pair.subscriber.execute_script("DROP RULE r ON t")?;
    verb(&pair, "resume", &[])?;
    pair.assert_equal(&["public"])
}

#[test]
fn the_rest_streams_while_a_table_is_copied_anew() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction)?;
        pair.subscriber.execute_script("UPDATE t SET v = 'wrong'")?;
        // A reader that the copy has to wait for.
        let mut reader = pair.subscriber.connect()?;
        reader.batch_execute("BEGIN; SELECT count(*) FROM t")?;
        verb(&pair, "resync", &["--table", "public.t"])?;
        let mut target = pair.subscriber.connect()?;
        wait_until("the copy to wait", SOON, &[], || {
            let waiting =
                "SELECT FROM pg_locks WHERE relation = 't'::regclass AND NOT granted LIMIT 1";
            Ok(target.query_opt(waiting, &[])?.map(drop))
        })?;
        for round in 1..=3 {
            pair.publish(&format!(
                "BEGIN; UPDATE t SET v = 'round {round}' WHERE id <= {round}; \
                 DELETE FROM t WHERE id = 10 + {round}; INSERT INTO t VALUES (1000 + {round}, 'new'); \
                 UPDATE u SET v = 'round {round}' WHERE id = 1; COMMIT"
            ))?;
            pair.site.wait_for("the other table to follow", SOON, || {
                let query = "SELECT FROM u WHERE id = 1 AND v = 'round ' || $1";
                Ok(target.query_opt(query, &[&round.to_string()])?.map(drop))
            })?;
            let said = pair.subscriber_says("SELECT state FROM farshore.subscription")?;
            ensure!(said == "catching-up", "{said}");
        }
        // Whoever needs the table for himself on the publisher does not wait for that reader.
        pair.publish("BEGIN; SET LOCAL lock_timeout = '15s'; LOCK TABLE t; COMMIT")?;
        reader.batch_execute("COMMIT")?;
        pair.assert_equal(&["public"])?;
        let cursors = pair.site.directory().join("data/publications/p/cursors");
        wait_until("the claim on the log to end", SOON, &[], || {
            Ok((!std::fs::read_to_string(&cursors)?.contains("s/copy")).then_some(()))
        })
    })
}

/// A column of a table that has not changed since: no change brings it, and the copy needs it.
#[test]
fn resync_brings_columns_that_were_added_since() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction)?;
        pair.publish(
            "ALTER TABLE t ADD z integer DEFAULT 7; ALTER TABLE t ADD w float8 DEFAULT random()",
        )?;
        verb(&pair, "resync", &["--table", "public.t"])?;
        pair.publish("INSERT INTO u VALUES (5000, 'u')")?;
        pair.assert_equal(&["public"])?;
        pair.publish("UPDATE t SET z = 8 WHERE id = 1")?;
        pair.assert_equal(&["public"])
    })
}

#[test]
fn resync_minds_foreign_keys_that_are_checked() -> Result<()> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.on_both(
        "CREATE TABLE parent (id integer PRIMARY KEY, v text); CREATE TABLE child \
         (id integer PRIMARY KEY, parent integer REFERENCES parent ON DELETE CASCADE); \
         CREATE TABLE apart (id integer PRIMARY KEY)",
    )?;
    pair.publish(
        "INSERT INTO parent SELECT i, 'v' FROM generate_series(1, 100) AS i; \
         INSERT INTO child SELECT i, i FROM generate_series(1, 100) AS i; \
         INSERT INTO apart SELECT i FROM generate_series(1, 100) AS i",
    )?;
    pair.subscriber.execute_script(
        "CREATE ROLE apply LOGIN; GRANT CREATE ON DATABASE postgres TO apply; \
         GRANT USAGE ON SCHEMA public, farshore_marks TO apply; \
         GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON parent, child, apart, \
         farshore_marks.mark TO apply",
    )?;
    pair.add_publication("p", &["public.*"], "")?;
    let target =
        pair.subscriber.url("postgres").replace("postgres://postgres@", "postgres://apply@");
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    for table in ["public.parent", "public.child"] {
        let said = refused(&pair, "resync", &["--table", table])?;
        ensure!(said.contains("child_parent_fkey of public.child"), "{table}: {said}");
    }
    ensure!(pair.subscriber_says("SELECT count(*) FROM child")? == "100");
    pair.subscriber.execute_script("DELETE FROM apart; UPDATE parent SET v = 'wrong'")?;
    verb(&pair, "resync", &["--table", "public.apart"])?;
    verb(&pair, "resync", &[])?;
    pair.publish("DELETE FROM parent WHERE id = 7; INSERT INTO parent VALUES (101, 'new')")?;
    pair.assert_equal(&["public"])
}

/// `systemctl reload`, or a closed terminal, ends nothing.
#[test]
fn a_hang_up_changes_nothing_and_says_so() -> Result<()> {
    let mut pair = pair(Direction::UP)?;
    for _ in 0..2 {
        pair.site.signal(libc::SIGHUP)?;
    }
    let line = pair.site.await_log("SIGHUP changes nothing", SOON)?;
    ensure!(line.contains("is read at the start. To take changes, restart"), "{line}");
    pair.publish("UPDATE t SET v = 'after' WHERE id = 1")?;
    pair.assert_equal(&["public"])?;
    pair.site.stop().map(drop)
}
