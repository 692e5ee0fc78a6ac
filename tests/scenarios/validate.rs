//! Tables compared on both sides while they are at work: nothing is said to differ that does not,
//! and what differs is found.

use anyhow::{Context, Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::mixed_tables::{CHANGES, ROWS, SCHEMA, TABLES, from_id, run_each};
use farshore_tests::{DATABASE, Direction, Pair, Upstream, Verb, both_ways};
use serde_json::Value;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

fn validate(pair: &Pair, more: &[&str]) -> Result<Verb> {
    pair.site.verb("validate", &[&["--subscription", "s"], more].concat())
}

/// What is said of each table, in JSON.
fn tables(said: &Verb) -> Result<Vec<Value>> {
    said.stdout.lines().map(|line| serde_json::from_str(line).context(line.to_owned())).collect()
}

/// What is said of one table, in JSON.
fn of_table(said: &Verb, table: &str) -> Result<Value> {
    let found = tables(said)?.into_iter().find(|line| line["table"] == table);
    found.with_context(|| format!("nothing of {table}: {said:?}"))
}

const LOADED: &str = "CREATE TABLE account (id integer PRIMARY KEY, balance bigint, v text); \
    CREATE TABLE entry (account integer, amount bigint); \
    ALTER TABLE entry REPLICA IDENTITY FULL; \
    CREATE TABLE large (id bigint PRIMARY KEY, v text)";
const LOADED_ROWS: &str = "INSERT INTO account SELECT i, 0, 'v' FROM generate_series(1, 500) AS i; \
    INSERT INTO entry SELECT i % 50, i % 3 FROM generate_series(1, 500) AS i; \
    INSERT INTO large SELECT i, repeat(md5(i::text), 100) FROM generate_series(1, 100) AS i";

/// Writes without a pause while `work` runs, on two connections.
fn under_load<T>(pair: &Pair, work: impl FnOnce(&AtomicU64) -> Result<T>) -> Result<T> {
    let (over, commits) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..2_u64)
            .map(|writer| {
                let (over, commits) = (&over, &commits);
                scope.spawn(move || -> Result<()> {
                    let mut client = pair.publisher.connect()?;
                    for n in 0_u64.. {
                        if over.load(Ordering::Relaxed) {
                            break;
                        }
                        let (from, to) = (n * 7 % 500 + 1, n * 13 % 500 + 1);
                        client.batch_execute(&format!(
                            "BEGIN; UPDATE account SET balance = balance - {n} WHERE id = {from}; \
                             UPDATE account SET balance = balance + {n} WHERE id = {to}; \
                             INSERT INTO entry VALUES ({from}, {n} % 5); \
                             UPDATE large SET v = v || '{n}' WHERE id = {n} % 100 + 1; COMMIT; \
                             DELETE FROM large WHERE id = 1000 + {writer}; \
                             INSERT INTO large VALUES (1000 + {writer}, '{n}')"
                        ))?;
                        commits.fetch_add(1, Ordering::Relaxed);
                    }
                    Ok(())
                })
            })
            .collect();
        let done = work(&commits);
        over.store(true, Ordering::Relaxed);
        for writer in writers {
            match writer.join() {
                Ok(written) => written?,
                Err(_) => anyhow::bail!("a writer panicked"),
            }
        }
        done
    })
}

/// Compares so many times while more is written; how often a table was said to differ.
fn compare_under_load(pair: &Pair, times: usize) -> Result<usize> {
    under_load(pair, |commits| {
        let mut differed = 0;
        for _ in 0..times {
            let before = commits.load(Ordering::Relaxed);
            wait_until("more to be written", SOON, &[], || {
                Ok((commits.load(Ordering::Relaxed) > before + 20).then_some(()))
            })?;
            let said = validate(pair, &["--json"])?;
            let lines = tables(&said)?;
            ensure!(lines.len() == 4, "{said:?}");
            ensure!(lines.iter().all(|line| line["result"] != "not compared"), "{said:?}");
            let differ = lines.iter().filter(|line| line["result"] == "differs").count();
            ensure!(said.code == Some(i32::from(differ > 0)), "{said:?}");
            differed += differ;
        }
        Ok(differed)
    })
}

#[test]
fn what_is_equal_is_said_to_be_equal_under_load() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::new(direction, &["public.*"], LOADED)?;
        pair.publish(LOADED_ROWS)?;
        pair.site.start()?;
        pair.await_arrival()?;
        let differed = compare_under_load(&pair, 6)?;
        ensure!(differed == 0, "{differed} tables were said to differ");
        pair.assert_equal(&["public"])
    })
}

#[test]
fn a_stream_that_rests_behind_the_point_would_be_noticed() -> Result<()> {
    let mut pair = Pair::new(Direction::UP, &["public.*"], LOADED)?;
    pair.publish(LOADED_ROWS)?;
    pair.site.env("FARSHORE_DEFECT", "late-halt");
    pair.site.start()?;
    pair.await_arrival()?;
    ensure!(compare_under_load(&pair, 6)? > 0, "no table was said to differ");
    Ok(())
}

#[test]
fn every_difference_is_found() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE t (id integer, part text, v text, n numeric, \
                PRIMARY KEY (part, id)); \
            CREATE TABLE keyless (a integer, b text); ALTER TABLE keyless REPLICA IDENTITY FULL; \
            CREATE TABLE empty (id integer PRIMARY KEY); \
            CREATE TABLE many (id integer PRIMARY KEY, v integer)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.publish(
            "INSERT INTO t SELECT i, 'p' || i % 3, 'v', i FROM generate_series(1, 1000) AS i; \
             INSERT INTO keyless SELECT 1, 'same' FROM generate_series(1, 5); \
             INSERT INTO keyless VALUES (2, NULL); \
             INSERT INTO many SELECT i, i FROM generate_series(1, 200000) AS i",
        )?;
        pair.site.start()?;
        pair.await_arrival()?;
        let said = validate(&pair, &[])?;
        ensure!(said.code == Some(0), "{said:?}");
        ensure!(said.stdout.contains("\npublic.t: equal, 1000 rows\n"), "{said:?}");
        ensure!(said.stdout.contains(": 5 tables equal ("), "{said:?}");

        pair.subscriber.execute_script(
            "DELETE FROM t WHERE id = 7; UPDATE t SET v = '' WHERE id = 8; \
             UPDATE t SET v = NULL WHERE id = 9; UPDATE t SET n = 10.0 WHERE id = 10; \
             INSERT INTO t VALUES (2000, 'p1', 'v', 1); UPDATE t SET id = -11 WHERE id = 11; \
             DELETE FROM keyless WHERE ctid = (SELECT min(ctid) FROM keyless WHERE a = 1); \
             UPDATE keyless SET b = '' WHERE a = 2; INSERT INTO empty VALUES (1); \
             UPDATE many SET v = v + 1",
        )?;
        let said = validate(&pair, &["--json"])?;
        ensure!(said.code == Some(1), "{said:?}");
        let t = of_table(&said, "public.t")?;
        let counts = |line: &Value| {
            ["missing", "extra", "other"].map(|what| line[what].as_u64().unwrap_or(u64::MAX))
        };
        ensure!(t["result"] == "differs" && counts(&t) == [2, 2, 3], "{t}");
        ensure!(t["named_by"] == serde_json::json!(["id", "part"]), "{t}");
        let named = t["rows"].as_array().context("no rows")?;
        ensure!(named.len() == 7, "{t}");
        let missing = serde_json::json!({"difference": "missing", "row": "7, p1"});
        ensure!(named.contains(&missing), "{t}");
        let keyless = of_table(&said, "public.keyless")?;
        ensure!(counts(&keyless) == [2, 1, 0], "{keyless}");
        let rows = (keyless["publisher_rows"].as_u64(), keyless["target_rows"].as_u64());
        ensure!(rows == (Some(6), Some(5)), "{keyless}");
        ensure!(counts(&of_table(&said, "public.empty")?) == [0, 1, 0], "{said:?}");
        // Far more than are looked at one by one.
        let many = of_table(&said, "public.many")?;
        let [missing, extra, other] = counts(&many);
        ensure!(many["counted_all"] == false && missing + extra == 0 && other > 1_000, "{many}");
        ensure!(many["rows"].as_array().map(Vec::len) == Some(10), "{many}");
        ensure!(of_table(&said, "farshore_marks.mark")?["result"] == "equal", "{said:?}");
        ensure!(said.stderr.contains("4 tables differ: "), "{said:?}");
        ensure!(said.stderr.contains("farshore resync "), "{said:?}");

        // Of one table alone, for a person; and what is not a table is refused.
        let said = validate(&pair, &["--table", "public.empty", "--table", "public.keyless"])?;
        ensure!(said.code == Some(1) && !said.stdout.contains("public.t:"), "{said:?}");
        ensure!(said.stdout.contains("  only on the target: (id) = (1)\n"), "{said:?}");
        let said = validate(&pair, &["--table", "public.other"])?;
        ensure!(said.code == Some(1), "{said:?}");
        ensure!(said.stderr.contains("public.other is not a published table"), "{said:?}");

        // As it says, they are equal then.
        for table in ["public.t", "public.keyless", "public.empty", "public.many"] {
            let arguments = ["--subscription", "s", "--table", table];
            let resynced = pair.site.verb("resync", &arguments)?;
            ensure!(resynced.code == Some(0), "{resynced:?}");
        }
        pair.await_arrival()?;
        let said = validate(&pair, &[])?;
        ensure!(said.code == Some(0), "{said:?}");
        Ok(())
    })
}

#[test]
fn tables_of_all_types_and_names_are_compared_over_a_link() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::new(direction, &TABLES, SCHEMA)?;
        let mut upstream = Upstream::split(&mut pair)?;
        pair.publish(&from_id(ROWS, 1_000))?;
        upstream.site.start()?;
        pair.site.start()?;
        pair.await_arrival()?;
        run_each(&pair, &from_id(CHANGES, 1_000))?;
        pair.await_arrival()?;
        let said = validate(&pair, &["--json"])?;
        ensure!(said.code == Some(0), "{said:?}");
        ensure!(tables(&said)?.len() > 10, "{said:?}");
        let rows =
            tables(&said)?.iter().filter_map(|line| line["publisher_rows"].as_u64()).sum::<u64>();
        ensure!(rows > 20, "{rows} rows");
        pair.site.stop()?;
        upstream.site.stop().map(drop)
    })
}

#[test]
fn what_is_published_is_compared_and_nothing_else() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.publish(
            "CREATE TABLE selected (id integer, region text, v text, secret text, PRIMARY KEY (id, region)); \
             CREATE TABLE wide (id smallint PRIMARY KEY, n integer, f real, s varchar(20), ts date); \
             CREATE TABLE modified (id integer, n numeric(10,2), i integer, c char(5), d char(3), \
               ns numeric(6,2)[], e char(4), ts timestamp(0), PRIMARY KEY (id, n)); \
             CREATE TABLE root (id integer, at date, v text, PRIMARY KEY (id, at)) \
               PARTITION BY RANGE (at); \
             CREATE TABLE root_old PARTITION OF root FOR VALUES FROM (MINVALUE) TO ('2020-01-01'); \
             CREATE TABLE root_new PARTITION OF root FOR VALUES FROM ('2020-01-01') TO (MAXVALUE); \
             INSERT INTO selected SELECT i, CASE i % 2 WHEN 0 THEN 'EU' ELSE 'US' END, 'v', 'x' \
               FROM generate_series(1, 100) AS i; \
             INSERT INTO wide SELECT i, i, 0.1, 's', '2026-01-01' FROM generate_series(1, 100) AS i; \
             INSERT INTO modified SELECT i, i / 7.0, i, 'c' || i, 'd', ARRAY[i / 3.0, NULL], \
               'e', now() FROM generate_series(1, 100) AS i; \
             INSERT INTO modified VALUES (101, 1); \
             INSERT INTO root SELECT i, '2015-01-01'::date + i * 40, 'v' \
               FROM generate_series(1, 100) AS i",
        )?;
        pair.subscriber.execute_script(
            "CREATE SCHEMA copies; \
             CREATE TABLE copies.selected (id integer PRIMARY KEY, region text, v text, secret text \
               DEFAULT 'ours', seen timestamptz DEFAULT now()); \
             CREATE TABLE copies.wide (ts timestamp, s text, f double precision, n numeric, \
               id bigint PRIMARY KEY); \
             CREATE DOMAIN copies.fine AS numeric(12,4); \
             CREATE TABLE copies.modified (id integer, n copies.fine, i numeric(10,2), c char(10), \
               d varchar(7), ns numeric(12,4)[], e text, ts timestamp(6), PRIMARY KEY (id, n)); \
             CREATE TABLE copies.root (id integer, at date, v text, PRIMARY KEY (id, at))",
        )?;
        pair.publish(
            "CREATE PUBLICATION ours FOR TABLE selected (id, region, v) WHERE (region = 'EU'), wide, \
               modified, root, farshore_marks.mark WITH (publish_via_partition_root = true)",
        )?;
        pair.add_publication("p", &["public.*"], "adopt_publication = \"ours\"")?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        pair.site.add("[subscription.s.schemas]\npublic = \"copies\"\n")?;
        pair.site.start()?;
        pair.await_arrival()?;
        pair.publish(
            "UPDATE selected SET region = 'EU' WHERE id < 10; UPDATE wide SET f = id / 3.0::real, n = -n; \
             UPDATE modified SET c = 'x', i = -i, n = n + 1 WHERE id < 50; \
             UPDATE root SET at = at + 2000 WHERE id < 20",
        )?;
        pair.await_arrival()?;
        let said = validate(&pair, &["--json"])?;
        ensure!(said.code == Some(0), "{said:?}");
        let root = of_table(&said, "public.root")?;
        ensure!(root["target"] == "copies.root" && root["publisher_rows"] == 100, "{root}");
        pair.subscriber.execute_script(
            "UPDATE copies.selected SET secret = 'other'; UPDATE copies.wide SET f = 0 WHERE id = 7",
        )?;
        let said = validate(&pair, &["--json"])?;
        ensure!(said.code == Some(1), "{said:?}");
        ensure!(of_table(&said, "public.selected")?["result"] == "equal", "{said:?}");
        ensure!(of_table(&said, "public.wide")?["other"] == 1, "{said:?}");
        Ok(())
    })
}

#[test]
fn who_needs_a_table_for_himself_is_given_way_to() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, v text); \
        CREATE TABLE u (id integer PRIMARY KEY)";
    let mut pair = Pair::new(Direction::UP, &["public.*"], schema)?;
    pair.publish("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 100) AS i")?;
    pair.site.start()?;
    pair.await_arrival()?;
    // Who reads the table on the target waits for its index, with the publisher's table held.
    let mut holder = pair.subscriber.connect()?;
    holder.batch_execute("BEGIN; REINDEX INDEX t_pkey")?;
    std::thread::scope(|scope| -> Result<()> {
        let validating = scope.spawn(|| validate(&pair, &["--table", "public.t"]));
        let reads = || {
            wait_until("the comparison to read", SOON, &[], || {
                let waits = "SELECT count(*) FROM pg_stat_activity \
                    WHERE wait_event_type = 'Lock' AND application_name = 'farshore s validate'";
                Ok((pair.subscriber_says(waits)? == "1").then_some(()))
            })
        };
        reads()?;
        // They need the table, or its index, and come to that while the holder is still there.
        pair.publish("TRUNCATE u; ALTER TABLE t ADD CONSTRAINT c CHECK (id > 0)")?;
        reads()?;
        pair.publish("REINDEX INDEX t_pkey")?;
        holder.batch_execute("ROLLBACK")?;
        let Ok(said) = validating.join() else { anyhow::bail!("it panicked") };
        let said = said?;
        ensure!(said.code == Some(0), "{said:?}");
        ensure!(said.stdout.contains("given way to"), "{said:?}");
        Ok(())
    })
}

#[test]
fn what_does_not_stream_is_not_compared() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, v text)";
    let mut pair = Pair::new(Direction::DOWN, &["public.*"], schema)?;
    pair.publish("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 100) AS i")?;
    let said = validate(&pair, &[])?;
    ensure!(said.code == Some(1) && said.stderr.contains("no node runs here"), "{said:?}");
    pair.site.start()?;
    pair.await_arrival()?;
    let said = pair.site.verb("validate", &["--subscription", "other"])?;
    ensure!(said.code == Some(1) && said.stderr.contains("no subscription \"other\""), "{said:?}");
    pair.site.verb("pause", &["--subscription", "s"])?;
    let said = validate(&pair, &[])?;
    ensure!(said.code == Some(1) && said.stderr.contains("is paused"), "{said:?}");
    pair.site.verb("resume", &["--subscription", "s"])?;
    // A column that no change has brought yet.
    pair.publish("ALTER TABLE t ADD COLUMN w integer DEFAULT 3")?;
    let said = validate(&pair, &["--json"])?;
    let t = of_table(&said, "public.t")?;
    ensure!(said.code == Some(1) && t["result"] == "not compared", "{said:?}");
    ensure!(t["why"].as_str().is_some_and(|why| why.contains("no writable column w")), "{t}");
    pair.publish("UPDATE t SET v = 'w' WHERE id = 1")?;
    pair.await_arrival()?;
    let said = validate(&pair, &[])?;
    ensure!(said.code == Some(0), "{said:?}");
    // A row that cannot be applied: the subscription has stopped.
    pair.subscriber.execute_script("DELETE FROM t WHERE id = 7")?;
    pair.publish("UPDATE t SET v = 'x' WHERE id = 7")?;
    pair.site.await_log(" stopped: ", SOON)?;
    let said = validate(&pair, &[])?;
    ensure!(said.code == Some(1) && said.stderr.contains("does not stream ("), "{said:?}");
    // The publication has stopped, the subscription has not.
    mended(&mut pair)?;
    pair.site.stop()?;
    let of_t = "[publication.p.article.\"public.t\"]\nwhere = \"v <> 5\"\n";
    pair.site.add(of_t)?;
    pair.site.start()?;
    pair.site.await_log(" stopped: ", SOON)?;
    let said = validate(&pair, &[])?;
    let why = "publication \"p\" does not stream (";
    ensure!(said.code == Some(1) && said.stderr.contains(why), "{said:?}");
    Ok(())
}

fn mended(pair: &mut Pair) -> Result<()> {
    pair.subscriber.execute_script("INSERT INTO t (id, v) VALUES (7, 'v')")?;
    pair.site.verb("resume", &["--subscription", "s"])?;
    pair.await_arrival()
}
