//! Targets that are restored from a backup of the publisher instead of copied.

use anyhow::{Context, Result, ensure};
use farshore_testkit::checksum;
use farshore_testkit::postgres::StopMode;
use farshore_testkit::wait::wait_until;
use farshore_tests::{DATABASE, Direction, Pair};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SCHEMA: &str = "CREATE TABLE t (id bigserial PRIMARY KEY, v text); \
    CREATE TABLE u (id bigint PRIMARY KEY, v text)";
const SOON: Duration = Duration::from_secs(60);

fn await_publication(pair: &Pair) -> Result<()> {
    wait_until("the publication to stream", SOON, &[&pair.site.log_path()], || {
        let status = pair.site.status()?;
        Ok((status["publications"][0]["state"] == "streaming").then_some(()))
    })
}

fn add_subscription(pair: &mut Pair, target: &str) -> Result<()> {
    pair.add_subscription("s", "p", target)?;
    pair.site.replace("batches = ", "initialise = \"backup\"\nbatches = ")
}

/// A standby that is promoted is a physical backup: it tells by itself where it stands, in the
/// middle of a load.
#[test]
fn a_physical_backup_goes_on_from_where_it_stands() -> Result<()> {
    for version in [15, 18] {
        let mut pair = Pair::bare(Direction { publisher: version, subscriber: version })?;
        pair.publish(&format!(
            "{SCHEMA}; INSERT INTO u SELECT i, 'u' FROM generate_series(1, 500) i"
        ))?;
        pair.add_publication("p", &["public.*"], "")?;
        pair.site.start()?;
        await_publication(&pair)?;
        let mut standby = pair.publisher.standby(&[], &["farshore_p"])?;
        pair.site.stop()?;
        let target = standby.url(DATABASE);
        add_subscription(&mut pair, &target)?;
        pair.site.start()?;
        pair.site.await_trouble("s", "standby")?;
        await_publication(&pair)?;

        let (stop, source) = (Arc::new(AtomicBool::new(false)), pair.publisher.url(DATABASE));
        let told = stop.clone();
        let load = std::thread::spawn(move || -> Result<()> {
            let mut client = postgres::Client::connect(&source, postgres::NoTls)?;
            let mut n = 0_i64;
            while !told.load(Ordering::Relaxed) {
                n += 1;
                client.batch_execute(&format!(
                    "BEGIN; INSERT INTO t (v) VALUES ('{n}'); \
                     UPDATE u SET v = v || 'x' WHERE id = {n} % 500 + 1; COMMIT"
                ))?;
            }
            Ok(())
        });
        let count = "SELECT count(*) FROM t";
        wait_until("some load", SOON, &[], || {
            Ok((pair.publisher_says(count)?.parse::<u32>()? > 200).then_some(()))
        })?;
        standby.execute_script("SELECT pg_promote(true, 60)")?;
        if version == 18 {
            // Once more, as in a failover of its own: it left the publisher the first time.
            pair.publish("INSERT INTO u VALUES (5000, 'between')")?;
            standby.stop(StopMode::Fast)?;
            std::fs::write(standby.data_dir().join("standby.signal"), "")?;
            standby.start()?;
            standby.execute_script("SELECT pg_promote(true, 60)")?;
        }
        pair.site.await_trouble("s", "waits for its backup")?;

        let wrong = pair.site.verb("initialise", &["--subscription", "s", "--lsn", "0/1"])?;
        ensure!(wrong.code == Some(1), "{wrong:?}");
        ensure!(wrong.stderr.contains("left the publisher's timeline at"), "{wrong:?}");
        let done = pair.site.verb("initialise", &["--subscription", "s"])?;
        ensure!(done.code == Some(0), "{done:?}");
        ensure!(done.stdout.contains("as the target itself tells"), "{done:?}");
        let again = pair.site.verb("initialise", &["--subscription", "s"])?;
        ensure!(again.stderr.contains("has a subscription of that name already"), "{again:?}");
        stop.store(true, Ordering::Relaxed);
        load.join().ok().context("the load panicked")??;
        pair.subscriber = standby;
        pair.assert_equal(&["public"])?;
        pair.publish("DELETE FROM t WHERE id % 2 = 0; INSERT INTO u VALUES (9999, 'new')")?;
        pair.assert_equal(&["public"])?;
        pair.site.restart()?;
        pair.publish("UPDATE t SET v = 'after'")?;
        pair.assert_equal(&["public"])?;
        pair.site.stop()?;
    }
    Ok(())
}

/// A copy of another subscription's target tells where that stood, in the middle of a load.
#[test]
fn a_copy_of_another_target_goes_on_from_where_that_stood() -> Result<()> {
    let mut pair = Pair::new(Direction::UP, &["public.*"], SCHEMA)?;
    pair.publish("INSERT INTO u SELECT i, 'u' FROM generate_series(1, 500) i")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.site.stop()?;
    let copy = pair.subscriber.standby(&[], &[])?;
    // The site file takes that for another server.
    let live = pair.subscriber.url(DATABASE).replace("127.0.0.1", "127.1");
    for (name, target) in [("near", copy.url(DATABASE)), ("live", live)] {
        pair.add_subscription(name, "p", &target)?;
        let section = format!("[subscription.{name}]\n");
        pair.site.replace(&section, &format!("{section}initialise = \"backup\"\n"))?;
    }
    pair.site.start()?;
    pair.site.await_trouble("near", "standby")?;
    pair.site.await_trouble("live", "waits for its backup")?;

    let stop = Arc::new(AtomicBool::new(false));
    let (told, source) = (stop.clone(), pair.publisher.url(DATABASE));
    let load = std::thread::spawn(move || -> Result<()> {
        let mut client = postgres::Client::connect(&source, postgres::NoTls)?;
        let mut n = 0_i64;
        while !told.load(Ordering::Relaxed) {
            n += 1;
            client.batch_execute(&format!(
                "BEGIN; INSERT INTO t (v) VALUES ('{n}'); \
                 UPDATE u SET v = v || 'x' WHERE id = {n} % 500 + 1; COMMIT"
            ))?;
        }
        Ok(())
    });
    wait_until("some load to arrive", SOON, &[&pair.site.log_path()], || {
        let there = pair.subscriber_says("SELECT count(*) FROM t")?;
        Ok((there.parse::<u32>()? > 200).then_some(()))
    })?;
    copy.execute_script("SELECT pg_promote(true, 60)")?;
    pair.site.await_trouble("near", "waits for its backup")?;
    for (name, from, said) in [
        ("near", "nobody", "no trace of subscription \"nobody\""),
        ("live", "s", "its target is that of \"s\" itself"),
    ] {
        let refused =
            pair.site.verb("initialise", &["--subscription", name, "--copied-from", from])?;
        ensure!(refused.code == Some(1) && refused.stderr.contains(said), "{refused:?}");
    }
    let done = pair.site.verb("initialise", &["--subscription", "near", "--copied-from", "s"])?;
    ensure!(done.code == Some(0), "{done:?}");
    ensure!(done.stdout.contains("as the target itself tells"), "{done:?}");
    ensure!(!done.stdout.contains("to be copied"), "{done:?}");
    stop.store(true, Ordering::Relaxed);
    load.join().ok().context("the load panicked")??;
    pair.assert_equal(&["public"])?;
    pair.await_arrival_at(copy.connect()?)?;
    let tables = ["public.t".to_owned(), "public.u".to_owned()];
    let (source, target) = (pair.publisher.url(DATABASE), copy.url(DATABASE));
    checksum::assert_equal(&source, &target, &tables)?;
    let names = "SELECT string_agg(name, ',') FROM farshore.subscription";
    let noted: String = copy.connect()?.query_one(names, &[])?.get(0);
    ensure!(noted == "near", "{noted}");
    pair.site.stop().map(drop)
}

/// Of a dump somebody has to say where it stands. Tables that it lacks are copied.
#[test]
fn a_dump_goes_on_from_where_it_is_said_to_stand() -> Result<()> {
    let mut pair = Pair::bare(Direction::UP)?;
    let rows = "INSERT INTO t SELECT i, 'v' || i FROM generate_series(1, 2000) i";
    pair.publish(&format!("{SCHEMA}; INSERT INTO u SELECT i, 'u' FROM generate_series(1, 50) i"))?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url(DATABASE);
    add_subscription(&mut pair, &target)?;
    let before = pair.publisher_says("SELECT pg_current_wal_lsn()")?;
    pair.site.start()?;
    pair.site.await_trouble("s", "waits for its backup")?;
    await_publication(&pair)?;
    pair.publish(rows)?;
    let lsn = pair.publisher_says("SELECT pg_current_wal_insert_lsn()")?;
    pair.publish("UPDATE t SET v = 'later' WHERE id > 1000; INSERT INTO t VALUES (5000, 'later')")?;
    // As pg_dump would have brought them.
    pair.subscriber
        .execute_script(&format!("CREATE TABLE t (id bigserial PRIMARY KEY, v text); {rows}"))?;

    let initialise = |lsn: &[&str]| {
        let arguments = [&["--subscription", "s"], lsn].concat();
        pair.site.verb("initialise", &arguments)
    };
    for (arguments, said) in [
        (&[][..], "say it with --lsn"),
        (&["--lsn", &before], "the log is kept for it from"),
        (&["--lsn", "FFFF/0"], "the log here ends at"),
    ] {
        let refused = initialise(arguments)?;
        ensure!(refused.code == Some(1) && refused.stderr.contains(said), "{refused:?}");
    }
    let done = initialise(&["--lsn", &lsn])?;
    ensure!(done.code == Some(0), "{done:?}");
    ensure!(done.stdout.contains("not verified") && done.stdout.contains("public.u"), "{done:?}");
    pair.assert_equal(&["public"])?;
    pair.publish("DELETE FROM t WHERE id < 10; UPDATE u SET v = 'w'")?;
    pair.assert_equal(&["public"])
}

/// Rows that a row filter leaves out have to go before a backup is gone on from: nothing that happens
/// to them would come. Columns outside a list stay as they are, and are named.
#[test]
fn a_backup_is_taken_without_rows_that_the_filter_leaves_out() -> Result<()> {
    for version in [15, 18] {
        let mut pair = Pair::bare(Direction { publisher: version, subscriber: version })?;
        pair.publish(
            "CREATE TABLE t (id bigint PRIMARY KEY, n bigint, secret text); \
             ALTER TABLE t REPLICA IDENTITY FULL; \
             INSERT INTO t SELECT i, i, 'kept' FROM generate_series(-50, 50) i; \
             INSERT INTO t VALUES (1000, NULL, 'kept'); \
             CREATE TABLE u (id bigint PRIMARY KEY, v text DEFAULT 'd', secret text DEFAULT 's'); \
             INSERT INTO u SELECT i, 'u', 'kept' FROM generate_series(1, 50) i",
        )?;
        let articles = "[publication.p.article.\"public.t\"]\nwhere = \"n > 0\"\n\
                        [publication.p.article.\"public.u\"]\ncolumns = [\"id\", \"v\"]";
        pair.add_publication("p", &["public.*"], articles)?;
        pair.site.start()?;
        await_publication(&pair)?;
        let standby = pair.publisher.standby(&[], &["farshore_p"])?;
        pair.site.stop()?;
        let target = standby.url(DATABASE);
        add_subscription(&mut pair, &target)?;
        pair.site.start()?;
        pair.site.await_trouble("s", "standby")?;
        await_publication(&pair)?;
        pair.publish("INSERT INTO t VALUES (51, 51, 'kept'), (-51, -51, 'kept')")?;
        let seen = pair.publisher_says("SELECT pg_current_wal_insert_lsn()")?;
        wait_until("the standby to have it", SOON, &[], || {
            let reached = format!("SELECT pg_last_wal_replay_lsn() >= '{seen}'");
            let reached: bool = standby.connect()?.query_one(&reached, &[])?.get(0);
            Ok(reached.then_some(()))
        })?;
        standby.execute_script("SELECT pg_promote(true, 60)")?;
        pair.site.await_trouble("s", "waits for its backup")?;

        let delete = "DELETE FROM ONLY public.t WHERE ((n > 0)) IS NOT TRUE";
        let checked = pair.site.verb("check", &[])?;
        let warned = checked.stdout.contains("DELETE FROM ONLY public.t WHERE (n > 0) IS NOT TRUE");
        ensure!(warned, "{checked:?}");
        ensure!(checked.stdout.contains("public.u (secret)"), "{checked:?}");
        let refused = pair.site.verb("initialise", &["--subscription", "s"])?;
        ensure!(refused.code == Some(1), "{refused:?}");
        ensure!(refused.stderr.contains("row filters leave out"), "{refused:?}");
        ensure!(refused.stderr.contains(delete), "{refused:?}");
        standby.execute_script(delete)?;
        let done = pair.site.verb("initialise", &["--subscription", "s"])?;
        ensure!(done.code == Some(0), "{done:?}");
        ensure!(done.stdout.contains("do not follow: public.u (secret)"), "{done:?}");
        pair.subscriber = standby;

        // Into the filter, out of it, and within it.
        pair.publish(
            "UPDATE t SET n = 7 WHERE id BETWEEN -9 AND -5 OR id = 1000; \
             UPDATE t SET n = -7 WHERE id BETWEEN 5 AND 9; UPDATE t SET n = n + 1 WHERE id > 40; \
             UPDATE u SET v = 'w', secret = 'new' WHERE id < 10; INSERT INTO u VALUES (99, 'x', 'y')",
        )?;
        pair.await_arrival()?;
        let rows = "SELECT string_agg(t::text, ',' ORDER BY id) FROM t";
        let (left, right) =
            (pair.publisher_says(&format!("{rows} WHERE n > 0"))?, pair.subscriber_says(rows)?);
        ensure!(left == right, "\n{left}\n{right}");
        let rows = "SELECT string_agg(concat(id, v), ',' ORDER BY id) FROM u";
        ensure!(pair.publisher_says(rows)? == pair.subscriber_says(rows)?);
        let kept = "SELECT count(*) FILTER (WHERE secret = 'kept') || ' ' || \
                    count(*) FILTER (WHERE secret = 's') FROM u";
        ensure!(pair.subscriber_says(kept)? == "50 1", "{}", pair.subscriber_says(kept)?);
        pair.site.stop()?;
    }
    Ok(())
}

/// A claim that retention ended is made anew, so that a new backup is of use.
#[test]
fn a_backup_that_took_too_long_for_retention_can_be_taken_again() -> Result<()> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.publish("CREATE TABLE t (id bigint PRIMARY KEY, v text)")?;
    let small = "segment_size = \"64KB\"\nretention_size = \"256KB\"";
    pair.add_publication("p", &["public.*"], small)?;
    let target = pair.subscriber.url(DATABASE);
    add_subscription(&mut pair, &target)?;
    pair.site.start()?;
    pair.site.await_trouble("s", "waits for its backup")?;
    await_publication(&pair)?;
    let too_old = pair.publisher_says("SELECT pg_current_wal_insert_lsn()")?;
    let fill = |from: u32| {
        pair.publish(&format!(
            "INSERT INTO t SELECT {from} + i, (SELECT string_agg(md5(random()::text || i || n), '') \
             FROM generate_series(1, 30) AS n) FROM generate_series(1, 200) i"
        ))
    };
    let at_first = pair.site.status()?["publications"][0]["store_start"].clone();
    let mut from = 0;
    wait_until("the log to be dropped", SOON, &[&pair.site.log_path()], || {
        from += 200;
        fill(from)?;
        Ok((pair.site.status()?["publications"][0]["store_start"] != at_first).then_some(()))
    })?;
    let initialise =
        |lsn: &str| pair.site.verb("initialise", &["--subscription", "s", "--lsn", lsn]);
    let refused = initialise(&too_old)?;
    ensure!(refused.code == Some(1) && refused.stderr.contains("the log is kept"), "{refused:?}");
    let lsn = pair.publisher_says("SELECT pg_current_wal_insert_lsn()")?;
    let rows = pair.publisher_says("SELECT json_agg(t) FROM t")?.replace('\'', "''");
    pair.subscriber.execute_script(&format!(
        "CREATE TABLE t (id bigint PRIMARY KEY, v text); \
         INSERT INTO t SELECT * FROM json_populate_recordset(NULL::t, '{rows}')"
    ))?;
    let done = initialise(&lsn)?;
    ensure!(done.code == Some(0), "{done:?}");
    pair.publish("DELETE FROM t WHERE id < 250")?;
    pair.assert_equal(&["public"])
}

/// The publisher's OID tells that a table had another name for a while, also where nothing had been
/// changed in it before: what was changed then is passed over.
#[test]
fn a_table_of_a_backup_that_had_another_name_for_a_while_is_noticed() -> Result<()> {
    const AWAY: &str = "ALTER TABLE t RENAME TO base; ALTER INDEX t_pkey RENAME TO base_pkey; \
        DELETE FROM base WHERE id = 3; INSERT INTO base VALUES (60, 'away'); \
        ALTER TABLE base RENAME TO t; ALTER INDEX base_pkey RENAME TO t_pkey";
    for is_noted_before in [true, false] {
        let mut pair = Pair::bare(Direction::UP)?;
        let tables = "CREATE TABLE t (id bigint PRIMARY KEY, v text); \
            CREATE TABLE u (id bigint PRIMARY KEY, v text)";
        let rows = "INSERT INTO t SELECT i, 'v' || i FROM generate_series(1, 20) i";
        pair.on_both(&format!("{tables}; {rows}"))?;
        pair.add_publication("p", &["public.t", "public.u"], "")?;
        let target = pair.subscriber.url(DATABASE);
        add_subscription(&mut pair, &target)?;
        pair.site.start()?;
        pair.site.await_trouble("s", "waits for its backup")?;
        await_publication(&pair)?;
        let lsn = pair.publisher_says("SELECT pg_current_wal_insert_lsn()")?;
        if !is_noted_before {
            pair.publish(AWAY)?;
        }
        pair.publish("INSERT INTO u VALUES (1, 'u')")?;
        let done = pair.site.verb("initialise", &["--subscription", "s", "--lsn", &lsn])?;
        ensure!(done.code == Some(0), "{done:?}");
        if is_noted_before {
            pair.await_arrival()?;
            pair.publish(AWAY)?;
        }
        pair.publish("UPDATE t SET v = 'back' WHERE id = 4; INSERT INTO u VALUES (2, 'u')")?;
        let (state, error) =
            pair.site.await_trouble("s", "public.t was called public.base for a while")?;
        ensure!(state == "stopped", "{state}: {error}");
        for (verb, arguments) in [
            ("resync", &["--subscription", "s", "--table", "public.t"][..]),
            ("resume", &["--subscription", "s"]),
        ] {
            let done = pair.site.verb(verb, arguments)?;
            ensure!(done.code == Some(0), "{done:?}");
        }
        pair.publish("UPDATE t SET v = 'last' WHERE id < 9")?;
        pair.assert_equal(&["public"])?;
        // And columns follow as if it had been copied.
        pair.publish("ALTER TABLE u ADD COLUMN n integer DEFAULT 5; UPDATE u SET v = 'w'")?;
        pair.assert_equal(&["public"])?;
    }
    Ok(())
}

/// What the publisher has renamed since is not what the backup has under that name.
#[test]
fn tables_that_change_names_before_a_backup_is_gone_on_from_are_noticed() -> Result<()> {
    let mut pair = Pair::bare(Direction { publisher: 18, subscriber: 18 })?;
    pair.publish(
        "CREATE TABLE t (id bigint PRIMARY KEY, v text); \
         CREATE TABLE u (id bigint PRIMARY KEY, v text); \
         CREATE TABLE w (id bigint PRIMARY KEY, v text); \
         INSERT INTO t SELECT i, 't' FROM generate_series(1, 20) i; \
         INSERT INTO u SELECT i, 'u' FROM generate_series(1, 30) i",
    )?;
    pair.add_publication("p", &["public.*"], "")?;
    pair.site.start()?;
    await_publication(&pair)?;
    let standby = pair.publisher.standby(&[], &["farshore_p"])?;
    pair.site.stop()?;
    let target = standby.url(DATABASE);
    add_subscription(&mut pair, &target)?;
    pair.site.start()?;
    pair.site.await_trouble("s", "standby")?;
    await_publication(&pair)?;
    let seen = pair.publisher_says("SELECT pg_current_wal_insert_lsn()")?;
    wait_until("the standby to have it", SOON, &[], || {
        let reached = format!("SELECT pg_last_wal_replay_lsn() >= '{seen}'");
        let reached: bool = standby.connect()?.query_one(&reached, &[])?.get(0);
        Ok(reached.then_some(()))
    })?;
    standby.execute_script("SELECT pg_promote(true, 60)")?;
    pair.subscriber = standby;
    pair.site.await_trouble("s", "waits for its backup")?;
    pair.publish(
        "BEGIN; ALTER TABLE t RENAME TO x; ALTER TABLE u RENAME TO t; ALTER TABLE x RENAME TO u; \
         COMMIT; INSERT INTO w VALUES (1, 'w')",
    )?;
    let done = pair.site.verb("initialise", &["--subscription", "s"])?;
    ensure!(done.code == Some(0), "{done:?}");
    for table in ["public.t", "public.u"] {
        ensure!(done.stdout.contains(table), "{table} is not said to be copied: {done:?}");
    }
    let (state, error) = pair.site.await_trouble("s", "has rows already")?;
    ensure!(state == "stopped", "{state}: {error}");
    pair.subscriber.execute_script("TRUNCATE t, u")?;
    pair.site.verb("resume", &["--subscription", "s"])?;
    pair.publish("UPDATE t SET v = 'last' WHERE id < 9; DELETE FROM u WHERE id = 1")?;
    pair.assert_equal(&["public"])
}
