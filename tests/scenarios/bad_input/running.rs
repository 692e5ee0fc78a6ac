//! Input that turns wrong while the node runs.

use crate::case::{Case, Then, compare, normal, pair, run_all, turn_into};
use anyhow::{Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{Direction, Pair};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

const CASES: &[Case] = &[
    Case {
        name: "the row of an update is not on the target",
        spoil: |pair| {
            pair.subscriber.execute_script("DELETE FROM t WHERE id = 42")?;
            pair.publish("INSERT INTO u VALUES (1)")?;
            pair.publish(
                "BEGIN; INSERT INTO u VALUES (2); UPDATE t SET v = 'w' WHERE id = 42; COMMIT",
            )?;
            pair.publish("INSERT INTO u VALUES (3)")
        },
        check: &[],
        run: "subscription \"s\": cannot apply UPDATE on public.t (key id=42) of the transaction that committed at LSN (DATE TIME): it met 0 rows instead of one. The row is not on the target: something else changed the target. Put the row back and go on (farshore resume), leave the transaction out (farshore skip), set on_conflict, or copy the table anew (farshore resync). If it is there, a trigger or rule of the target keeps the change out: farshore check names it",
        then: Then::Stops,
        mend: |pair| {
            // What came before it is there; its transaction and what follows are not.
            ensure!(pair.subscriber_says("SELECT string_agg(id::text, ',') FROM u")? == "1");
            pair.subscriber.execute_script("INSERT INTO t VALUES (42, 'c42', 'put back')")
        },
    },
    Case {
        name: "the row of a delete is not on the target",
        spoil: |pair| {
            pair.subscriber.execute_script("DELETE FROM t WHERE id = 42")?;
            pair.publish("DELETE FROM t WHERE id = 42")
        },
        check: &[],
        run: "subscription \"s\": cannot apply DELETE on public.t (key id=42) of the transaction that committed at LSN (DATE TIME): it met 0 rows instead of one. The row is not on the target: something else changed the target. Put the row back and go on (farshore resume), leave the transaction out (farshore skip), set on_conflict, or copy the table anew (farshore resync). If it is there, a trigger or rule of the target keeps the change out: farshore check names it",
        then: Then::Stops,
        mend: |pair| pair.subscriber.execute_script("INSERT INTO t VALUES (42, 'c42', 'put back')"),
    },
    Case {
        name: "the row of an insert is on the target already",
        spoil: |pair| {
            pair.subscriber.execute_script("INSERT INTO t VALUES (200, 'c200', 'mine')")?;
            pair.publish("INSERT INTO t VALUES (199, 'c199', 'v'), (200, 'c200', 'v')")
        },
        check: &[],
        run: "subscription \"s\": cannot apply INSERT on public.t (key id=200) of the transaction that committed at LSN (DATE TIME): ERROR 23505: duplicate key value violates unique constraint \"t_pkey\"; detail: Key (id)=(200) already exists. Mend the target (the message above names the constraint or type) and go on (farshore resume), leave the transaction out (farshore skip), or set on_conflict",
        then: Then::Stops,
        mend: |pair| pair.subscriber.execute_script("DELETE FROM t WHERE id = 200"),
    },
    Case {
        name: "another row has the unique value",
        spoil: |pair| {
            pair.subscriber.execute_script("UPDATE t SET code = 'taken' WHERE id = 1")?;
            pair.publish("UPDATE t SET code = 'taken' WHERE id = 2")
        },
        check: &[],
        run: "subscription \"s\": cannot apply UPDATE on public.t (key id=2) of the transaction that committed at LSN (DATE TIME): ERROR 23505: duplicate key value violates unique constraint \"t_code_key\"; detail: Key (code)=(taken) already exists. Mend the target (the message above names the constraint or type) and go on (farshore resume), leave the transaction out (farshore skip), or set on_conflict",
        then: Then::Stops,
        mend: |pair| pair.subscriber.execute_script("UPDATE t SET code = 'c1' WHERE id = 1"),
    },
    Case {
        name: "a constraint that only the target has",
        spoil: |pair| {
            pair.subscriber
                .execute_script("ALTER TABLE t ADD CONSTRAINT short CHECK (length(v) < 5)")?;
            pair.publish("UPDATE t SET v = 'much too long' WHERE id = 3")
        },
        check: &[],
        run: "subscription \"s\": cannot apply UPDATE on public.t (key id=3) of the transaction that committed at LSN (DATE TIME): ERROR 23514: new row for relation \"t\" violates check constraint \"short\"; detail: Failing row contains (3, c3, much too long). Mend the target (the message above names the constraint or type) and go on (farshore resume), leave the transaction out (farshore skip), or set on_conflict",
        then: Then::Stops,
        mend: |pair| pair.subscriber.execute_script("ALTER TABLE t DROP CONSTRAINT short"),
    },
    Case {
        name: "a column gets another type on the publisher",
        spoil: |pair| {
            pair.publish("ALTER TABLE t ALTER id TYPE bigint; INSERT INTO t VALUES (200, 'x', 'y')")
        },
        check: &[],
        run: "subscription \"s\": the publisher's table public.t was altered: column id has another type: ALTER TABLE public.t ALTER COLUMN id TYPE bigint (with the USING clause of the publisher, if it had one). Then go on (farshore resume)",
        then: Then::Stops,
        mend: |pair| pair.subscriber.execute_script("ALTER TABLE t ALTER id TYPE bigint"),
    },
    Case {
        name: "the table goes from the target",
        spoil: |pair| {
            pair.subscriber.execute_script("ALTER TABLE t RENAME TO elsewhere")?;
            pair.publish("UPDATE t SET v = 'w' WHERE id = 5")
        },
        check: &[],
        run: "subscription \"s\": table public.t is not on the target. Create it there (for instance: pg_dump --schema-only --table='public.t' … | psql …); then copy it anew, since what it had does not come again by itself (farshore resync SITE.toml --subscription s --table public.t)",
        then: Then::Stops,
        mend: |pair| pair.subscriber.execute_script("ALTER TABLE elsewhere RENAME TO t"),
    },
    Case {
        name: "the publication is dropped",
        spoil: |pair| {
            pair.publish("DROP PUBLICATION farshore_p")?;
            pair.publish("INSERT INTO t VALUES (200, 'x', 'y')")
        },
        check: &[],
        run: "publication \"p\": ERROR 42704: publication \"farshore_p\" does not exist; where: …. PostgreSQL publication \"farshore_p\" was dropped, or made after the slot's position, and the log since then cannot be decoded for it. To copy everything anew: stop this node, drop the slot, remove data_dir/publications/p, start, and for each of its subscriptions: farshore resync, then farshore resume",
        then: Then::Stops,
        mend: copy_anew_with_a_new_slot,
    },
    Case {
        name: "the slot is dropped",
        spoil: |pair| {
            pair.site.stop()?;
            pair.drop_slot()?;
            pair.publish("INSERT INTO t VALUES (200, 'x', 'y')")?;
            pair.site.start()
        },
        check: &[],
        run: "publication \"p\": replication slot \"farshore_p\" is gone from PUBLISHER. Changes after what this store holds may be lost to it. To copy everything anew: stop this node, drop the slot, remove data_dir/publications/p, start, and for each of its subscriptions: farshore resync, then farshore resume",
        then: Then::Stops,
        mend: copy_anew,
    },
    Case {
        name: "the slot is moved by something else",
        spoil: |pair| {
            pair.site.stop()?;
            pair.publish("INSERT INTO t VALUES (200, 'x', 'y')")?;
            pair.publish("SELECT pg_replication_slot_advance('farshore_p', pg_current_wal_lsn())")?;
            pair.site.start()
        },
        check: &[],
        run: "publication \"p\": slot \"farshore_p\" stands at LSN, but the store holds the log only up to LSN: something else moved the slot, or the store was replaced. The changes between are not in the store. To copy everything anew: stop this node, drop the slot, remove data_dir/publications/p, start, and for each of its subscriptions: farshore resync, then farshore resume",
        then: Then::Stops,
        mend: copy_anew_with_a_new_slot,
    },
    Case {
        name: "the slot is invalidated",
        spoil: |pair| {
            pair.site.stop()?;
            let mut publisher = pair.publisher.connect()?;
            publisher.batch_execute("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'")?;
            publisher.batch_execute("SELECT pg_reload_conf()")?;
            publisher.batch_execute("CREATE TABLE filler (v text)")?;
            for _ in 0..4 {
                publisher.batch_execute(
                    "INSERT INTO filler SELECT repeat('x', 1000) FROM generate_series(1, 20000)",
                )?;
                publisher.batch_execute("CHECKPOINT")?;
            }
            publisher.batch_execute("DROP TABLE filler")?;
            publisher.batch_execute("ALTER SYSTEM RESET max_slot_wal_keep_size")?;
            publisher.batch_execute("SELECT pg_reload_conf()")?;
            pair.site.start()
        },
        check: &[],
        run: "publication \"p\": slot \"farshore_p\" was invalidated: the publisher has removed log that was still needed (see max_slot_wal_keep_size). To copy everything anew: stop this node, drop the slot, remove data_dir/publications/p, start, and for each of its subscriptions: farshore resync, then farshore resume",
        then: Then::Stops,
        mend: copy_anew_with_a_new_slot,
    },
    Case {
        name: "the target's progress is gone",
        spoil: |pair| {
            pair.subscriber.execute_script("DROP SCHEMA farshore CASCADE")?;
            pair.publish("INSERT INTO t VALUES (200, 'x', 'y')")
        },
        check: &[],
        run: "target SUBSCRIBER: ERROR 42P01: relation \"farshore.table_copy\" does not exist. Farshore keeps its progress there, of all subscriptions into that database: restore it; or empty the tables of all of them, DROP SCHEMA IF EXISTS farshore CASCADE there, and go on (farshore resume) to copy anew",
        then: Then::Stops,
        mend: |pair| pair.subscriber.execute_script("TRUNCATE t, u, farshore_marks.mark"),
    },
];

/// As the messages say: the store's folder goes, and what the target has.
fn copy_anew(pair: &mut Pair) -> Result<()> {
    std::fs::remove_dir_all(pair.site.directory().join("data/publications/p"))?;
    pair.subscriber
        .execute_script("TRUNCATE t, u, farshore_marks.mark; DROP SCHEMA farshore CASCADE")
}

fn copy_anew_with_a_new_slot(pair: &mut Pair) -> Result<()> {
    pair.drop_slot()?;
    copy_anew(pair)
}

#[test]
fn wrong_while_running() -> Result<()> {
    run_all(CASES, turn_into)
}

#[test]
fn a_data_directory_that_is_in_use() -> Result<()> {
    let mut pair = pair()?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    let second = pair.site.verb("run", &[])?;
    ensure!(second.code == Some(1), "{second:?}");
    let last = second.stderr.lines().last().unwrap_or_default();
    compare(
        "run",
        &[normal(&pair, last)],
        &[
            "farshore: data_dir DIRECTORY/data is in use by another node (pid PID). Stop it, or give this site another data_dir",
        ],
    )?;
    // The first is none the worse for it, and still answers.
    pair.publish("UPDATE t SET v = 'w' WHERE id < 10")?;
    pair.assert_equal(&["public"])?;
    let status = pair.site.verb("status", &[])?;
    ensure!(status.code == Some(0), "{status:?}");
    pair.site.stop()?;
    // What a killed node leaves behind is in nobody's use.
    pair.site.start()?;
    pair.await_arrival()?;
    pair.site.kill9()?;
    let status = pair.site.verb("status", &[])?;
    ensure!(status.code == Some(3), "{status:?}");
    pair.site.start()?;
    pair.assert_equal(&["public"])
}

#[test]
fn two_nodes_for_one_subscription_take_turns() -> Result<()> {
    let mut pair = pair()?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    // A copy of the site elsewhere, as after a restore from a backup: the slot and the lock on the
    // target keep it from doing harm.
    let mut other = farshore_tests::Site::new()?;
    let text = std::fs::read_to_string(pair.site.file())?;
    std::fs::write(other.file(), text)?;
    other.start()?;
    let line = other.await_log("stopped: ", Duration::from_secs(30))?;
    ensure!(line.contains("already exists"), "{line}");
    pair.publish("UPDATE t SET v = 'w' WHERE id < 10")?;
    pair.assert_equal(&["public"])?;
    other.stop()?;
    pair.assert_equal(&["public"])
}

/// Whoever begins to fill a table first has it, also where both are asked whether they may at once.
#[test]
fn two_sites_that_start_together_do_not_fill_one_table() -> Result<()> {
    for round in 0..4 {
        let mut pair = Pair::bare(Direction::UP)?;
        pair.publisher.execute_script(
            "CREATE TABLE t (id integer PRIMARY KEY, v text); \
             INSERT INTO t SELECT i, 'v' FROM generate_series(1, 1000) i",
        )?;
        if round % 2 == 0 {
            pair.subscriber.execute_script("CREATE TABLE t (id integer PRIMARY KEY, v text)")?;
        }
        pair.add_publication("p", &["public.t"], "")?;
        let target = pair.subscriber.url("postgres");
        pair.add_subscription("s", "p", &target)?;
        let mut other = farshore_tests::Site::new()?;
        let text = std::fs::read_to_string(pair.site.file())?;
        let text = text.replace("publication.p]", "publication.q]");
        let text = text.replace("\"p\"", "\"q\"").replace("subscription.s]", "subscription.z]");
        std::fs::write(other.file(), text)?;
        pair.site.start()?;
        other.start()?;
        let mut states = [String::new(), String::new()];
        wait_until("both to have come to an end", SOON, &[&other.log_path()], || {
            for (state, site) in states.iter_mut().zip([&pair.site, &other]) {
                let status = site.status()?;
                let subscription = &status["subscriptions"][0];
                *state = subscription["state"].as_str().unwrap_or_default().to_owned();
                let error = subscription["error"].as_str().unwrap_or_default();
                ensure!(
                    *state != "stopped" || error.contains("is filled by subscription"),
                    "round {round}: {error}"
                );
            }
            Ok(states.iter().all(|state| state == "streaming" || state == "stopped").then_some(()))
        })?;
        let fills = states.iter().filter(|state| *state == "streaming").count();
        ensure!(fills == 1, "round {round}: {states:?}");
        let rows = pair.subscriber_says("SELECT count(*) FROM t")?;
        ensure!(rows == "1000", "round {round}: {rows} rows");
    }
    Ok(())
}
