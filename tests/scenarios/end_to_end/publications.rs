//! What is published to whom: filters, column lists, several publications and subscriptions,
//! adopted ones, tables that join later.

use anyhow::{Result, ensure};
use farshore_testkit::checksum;
use farshore_testkit::wait::wait_until;
use farshore_tests::{DATABASE, Direction, Pair, both_ways};
use postgres::error::SqlState;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

const TWO_TABLES: &str = "CREATE TABLE t (id integer PRIMARY KEY, v text); \
    CREATE TABLE u (id integer PRIMARY KEY, v text)";

#[test]
fn a_column_of_names_makes_the_stream_textual() -> Result<()> {
    both_ways(|direction| {
        let schema = "
            CREATE TYPE pair AS (x integer, y text);
            CREATE TYPE mood AS ENUM ('sad', 'happy');
            CREATE TABLE t (id integer PRIMARY KEY, p pair, ps pair[], m mood[], r regclass,
              by bytea, f double precision, at timestamptz, n numeric[], j jsonb, big text);
            ALTER TABLE t ALTER big SET STORAGE EXTERNAL;
            CREATE TABLE plain (id integer PRIMARY KEY, v bytea);";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        let rows = |from: u32| {
            format!(
                "INSERT INTO t SELECT i, ROW(i, 'y,\"' || i)::pair, ARRAY[ROW(1, NULL)::pair, NULL], \
                 '{{sad,happy}}', 'pg_class', decode(md5(i::text), 'hex'), i / 3.0, now(), \
                 ARRAY[1.10, NULL], '{{\"a\": [1]}}', repeat(md5(i::text), 200) \
                 FROM generate_series({from}, {from} + 99) AS i; \
                 INSERT INTO t (id) VALUES ({from} + 500); \
                 INSERT INTO t (id, p, by, big) VALUES ({from} + 501, ROW(NULL, NULL), '', E'\\\\N'); \
                 INSERT INTO plain SELECT i, decode('00ff5c4e', 'hex') \
                 FROM generate_series({from}, {from} + 9) AS i;"
            )
        };
        pair.publish(&rows(1_000))?;
        pair.site.start()?;
        pair.publish(&rows(2_000))?;
        pair.publish(
            "UPDATE t SET p = ROW(0, 'new') WHERE id % 2 = 0; DELETE FROM t WHERE id % 5 = 0",
        )?;
        pair.publish(
            "UPDATE t SET id = -id WHERE id % 7 = 0; UPDATE plain SET v = NULL WHERE id % 2 = 0",
        )?;
        pair.assert_equal(&["public"])?;
        pair.site.await_log("binary=false", SOON)?;
        Ok(())
    })
}

/// A database is replicated from the beginning, before anything was made in it.
#[test]
fn a_schema_without_tables_is_published_and_they_join_as_they_are_made() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.on_both("CREATE SCHEMA app; CREATE SCHEMA later")?;
        let (source, target) = (pair.publisher.url(DATABASE), pair.subscriber.url(DATABASE));
        pair.site.add(&format!(
            "[publication.p]\nsource = \"{source}\"\ntables = ['app.*', 'later.*']\n"
        ))?;
        pair.add_subscription("s", "p", &target)?;
        let check = pair.site.verb("check", &[])?;
        let said = "no table on the publisher matches \"app.*\" as yet";
        ensure!(check.code == Some(0) && check.stdout.contains(said), "{check:?}");
        pair.site.start()?;
        let arrives = |pair: &mut Pair, table: &str, rows: &str| {
            let count = format!("SELECT count(*) FROM {table}");
            let mut there = pair.subscriber.connect()?;
            pair.site.wait_for(&format!("{table} to arrive"), SOON, || {
                match there.query_one(&count, &[]) {
                    Ok(row) => Ok((row.get::<_, i64>(0).to_string() == rows).then_some(())),
                    Err(error) if error.code() == Some(&SqlState::UNDEFINED_TABLE) => Ok(None),
                    Err(error) => Err(error.into()),
                }
            })
        };
        wait_until("the subscription to stream", SOON, &[&pair.site.log_path()], || {
            let status = pair.site.status()?;
            Ok((status["subscriptions"][0]["state"] == "streaming").then_some(()))
        })?;
        pair.publish("CREATE TABLE app.t (id integer PRIMARY KEY, v text); INSERT INTO app.t VALUES (1, 'a')")?;
        arrives(&mut pair, "app.t", "1")?;
        pair.site.restart()?;
        pair.publish("INSERT INTO app.t VALUES (2, 'b')")?;
        arrives(&mut pair, "app.t", "2")?;
        pair.publish("CREATE TABLE later.t (id integer PRIMARY KEY); INSERT INTO later.t VALUES (1), (2), (3)")?;
        arrives(&mut pair, "later.t", "3")?;
        let check = pair.site.verb("check", &[])?;
        ensure!(check.code == Some(0) && !check.stdout.contains("as yet"), "{check:?}");
        Ok(())
    })
}

#[test]
fn row_filters_and_column_lists() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.on_both("CREATE SCHEMA \"S.x\"; CREATE TABLE plain (id integer PRIMARY KEY, v text)")?;
        pair.publish(
            "CREATE TABLE filtered (id integer PRIMARY KEY, region text, total integer, big text); \
             ALTER TABLE filtered REPLICA IDENTITY FULL; \
             ALTER TABLE filtered ALTER big SET STORAGE EXTERNAL; \
             CREATE TABLE \"S.x\".\"Cut\" (secret text, id integer PRIMARY KEY, \"Shown\" text, other text)",
        )?;
        pair.subscriber.execute_script(
            "CREATE TABLE filtered (id integer PRIMARY KEY, region text, total integer, big text); \
             CREATE TABLE \"S.x\".\"Cut\" (\"Shown\" text, id integer PRIMARY KEY, local text DEFAULT 'l')",
        )?;
        pair.add_publication(
            "p",
            &["public.plain", "public.filtered", "\"S.x\".*"],
            "[publication.p.article.\"public.filtered\"]\n\
             where = \"region = 'EU' AND total > 10\"\n\
             [publication.p.article.'\"S.x\".\"Cut\"']\n\
             columns = [\"id\", \"Shown\"]\n\
             where = \"id > 0\"",
        )?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        pair.publish(
            "INSERT INTO filtered SELECT i, CASE WHEN i % 2 = 0 THEN 'EU' ELSE 'US' END, i, \
               repeat(md5(i::text), 300) FROM generate_series(1, 100) AS i; \
             INSERT INTO \"S.x\".\"Cut\" SELECT 'secret', i, 'shown' || i, 'o' FROM generate_series(1, 100) AS i; \
             INSERT INTO \"S.x\".\"Cut\" SELECT 'secret', -i, 'shown' || i, 'o' FROM generate_series(201, 220) AS i; \
             INSERT INTO plain VALUES (1, 'x')",
        )?;
        pair.site.start()?;
        let compare = |pair: &mut Pair| -> Result<()> {
            pair.await_arrival()?;
            let (source, target) = (pair.publisher.url(DATABASE), pair.subscriber.url(DATABASE));
            checksum::assert_equal(&source, &target, &["public.plain"])?;
            for (at_source, at_target) in [
                (
                    "SELECT md5(string_agg(f::text, ',' ORDER BY id)) FROM filtered f \
                     WHERE region = 'EU' AND total > 10",
                    "SELECT md5(string_agg(f::text, ',' ORDER BY id)) FROM filtered f",
                ),
                (
                    "SELECT string_agg(concat(id, \"Shown\"), ',' ORDER BY id) FROM \"S.x\".\"Cut\" WHERE id > 0",
                    "SELECT string_agg(concat(id, \"Shown\"), ',' ORDER BY id) FROM \"S.x\".\"Cut\" WHERE local = 'l'",
                ),
            ] {
                let (left, right) =
                    (pair.publisher_says(at_source)?, pair.subscriber_says(at_target)?);
                ensure!(left == right, "{at_source}\n{left}\n{right}");
            }
            Ok(())
        };
        compare(&mut pair)?;
        // Into the filter, out of it, within it; with unchanged TOAST on the way in.
        pair.publish("UPDATE filtered SET region = 'EU' WHERE id % 5 = 0")?;
        pair.publish("UPDATE filtered SET region = 'US' WHERE id % 3 = 0")?;
        pair.publish("UPDATE filtered SET total = total - 20 WHERE region = 'EU'")?;
        pair.publish("UPDATE filtered SET id = id + 1000 WHERE id % 4 = 0; DELETE FROM filtered WHERE id % 7 = 0")?;
        pair.publish("UPDATE \"S.x\".\"Cut\" SET id = -id WHERE id % 10 = 0")?;
        pair.publish(
            "UPDATE \"S.x\".\"Cut\" SET \"Shown\" = 'new', secret = NULL WHERE id % 3 = 0",
        )?;
        pair.publish("UPDATE \"S.x\".\"Cut\" SET secret = 'unseen'; DELETE FROM \"S.x\".\"Cut\" WHERE id % 8 = 0")?;
        compare(&mut pair)
    })
}

/// An update that brings a row within the filter comes as an INSERT, and the publisher leaves out of
/// it what the update left alone and lies apart from the row: no NULL is put in its place.
#[test]
fn a_row_that_comes_within_a_filter_without_a_large_value() -> Result<()> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.on_both(
        "CREATE TABLE kept (id integer, region text, body text, PRIMARY KEY (id, region)); \
         ALTER TABLE kept ALTER body SET STORAGE EXTERNAL; \
         CREATE TABLE plain (id integer PRIMARY KEY)",
    )?;
    let filter = "[publication.p.article.\"public.kept\"]\nwhere = \"region = 'EU'\"";
    pair.add_publication("p", &["public.kept", "public.plain"], filter)?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    let check = pair.site.verb("check", &[])?;
    ensure!(check.stdout.contains("large values then"), "{check:?}");
    ensure!(check.stdout.contains("leaves as they were, of body"), "{check:?}");
    pair.site.start()?;
    pair.publish(
        "INSERT INTO kept SELECT i, CASE WHEN i % 2 = 0 THEN 'EU' ELSE 'US' END, \
         repeat(md5(i::text), 300) FROM generate_series(1, 10) AS i",
    )?;
    pair.await_arrival()?;
    // Small values come along.
    pair.publish("UPDATE kept SET body = 'small' WHERE id = 3")?;
    pair.publish("UPDATE kept SET region = 'EU' WHERE id = 3")?;
    pair.await_arrival()?;
    pair.publish("UPDATE kept SET region = 'EU' WHERE id = 1; INSERT INTO plain VALUES (1)")?;
    let (state, said) = pair.site.await_trouble("s", "does not send then")?;
    ensure!(state == "stopped", "{state}");
    ensure!(said.contains("column body") && said.contains("REPLICA IDENTITY FULL"), "{said}");
    let rows = "SELECT count(*)::text FROM kept WHERE body IS NULL OR id = 1";
    ensure!(pair.subscriber_says(rows)? == "0");
    // As the message says.
    pair.publish("ALTER TABLE kept REPLICA IDENTITY FULL")?;
    for (verb, arguments) in [
        ("resync", &["--subscription", "s", "--table", "public.kept"][..]),
        ("resume", &["--subscription", "s"]),
    ] {
        let done = pair.site.verb(verb, arguments)?;
        ensure!(done.code == Some(0), "{done:?}");
    }
    pair.publish("UPDATE kept SET region = 'EU' WHERE id = 5")?;
    pair.await_arrival()?;
    let all = "SELECT md5(string_agg(k::text, ',' ORDER BY id)) FROM kept k WHERE region = 'EU'";
    ensure!(pair.publisher_says(all)? == pair.subscriber_says(all)?);
    ensure!(pair.subscriber_says("SELECT count(*)::text FROM kept")? == "8");
    Ok(())
}

#[test]
fn an_adopted_publication_and_slot() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.on_both(TWO_TABLES)?;
        pair.publish("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 100) AS i")?;
        pair.publish("CREATE PUBLICATION \"By Hand\" FOR TABLE t, u (id, v), farshore_marks.mark")?;
        pair.publish("SELECT pg_create_logical_replication_slot('by_hand', 'pgoutput')")?;
        // Between the slot and the copy: in the slot's log and in the copied rows.
        pair.publish("INSERT INTO u VALUES (1, 'x'); UPDATE t SET v = 'w' WHERE id < 10; DELETE FROM t WHERE id = 50")?;
        let source = pair.publisher.url(DATABASE);
        pair.site.add(&format!(
            "[publication.p]\nsource = \"{source}\"\nadopt_publication = \"By Hand\"\nadopt_slot = \"by_hand\"\n"
        ))?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("UPDATE u SET v = 'y'; DELETE FROM t WHERE id % 2 = 0")?;
        pair.site.restart()?;
        pair.assert_equal(&["public"])?;
        assert_eq!(
            pair.publisher_says("SELECT string_agg(slot_name, ',') FROM pg_replication_slots")?,
            "by_hand"
        );
        assert_eq!(
            pair.publisher_says("SELECT string_agg(pubname, ',') FROM pg_publication")?,
            "By Hand"
        );
        Ok(())
    })
}

/// Where a publisher is a target itself, its progress is its own.
#[test]
fn the_progress_of_a_publisher_that_is_a_target_is_not_carried() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.publisher.connect()?.batch_execute("CREATE DATABASE upstream")?;
        let mut upstream = pair.publisher.connect_to("upstream")?;
        upstream.batch_execute(
            "CREATE TABLE t (id integer PRIMARY KEY, v text); \
             INSERT INTO t SELECT i, 'v' FROM generate_series(1, 100) AS i",
        )?;
        let (first, second) = (pair.publisher.url("upstream"), pair.publisher.url(DATABASE));
        pair.site.add(&format!(
            "[publication.first]\nsource = \"{first}\"\ntables = [\"public.*\"]\n\
             [subscription.first]\npublication = \"first\"\ntarget = \"{second}\"\n"
        ))?;
        pair.site.start()?;
        let mut between = pair.publisher.connect()?;
        pair.site.wait_for("the first copy", SOON, || {
            let there =
                between.query_one("SELECT to_regclass('farshore.table_copy') IS NOT NULL", &[])?;
            if !there.get::<_, bool>(0) {
                return Ok(None);
            }
            let copied =
                "SELECT FROM farshore.table_copy WHERE table_name = 't' AND state = 'copied'";
            Ok(between.query_opt(copied, &[])?.map(drop))
        })?;
        pair.site.stop()?;
        pair.publish("CREATE PUBLICATION whole FOR ALL TABLES")?;
        pair.site.add(&format!(
            "[publication.p]\nsource = \"{second}\"\nadopt_publication = \"whole\"\n"
        ))?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        let check = pair.site.verb("check", &[])?;
        ensure!(check.code == Some(0) && !check.stdout.contains("farshore.sub"), "{check:?}");
        pair.site.start()?;
        upstream.batch_execute("UPDATE t SET v = 'w' WHERE id % 3 = 0")?;
        let mut last = pair.subscriber.connect()?;
        pair.site.wait_for("the upstream change", SOON, || {
            match last.query_opt("SELECT FROM t WHERE id = 99 AND v = 'w'", &[]) {
                Ok(row) => Ok(row.map(drop)),
                Err(error) if error.code() == Some(&SqlState::UNDEFINED_TABLE) => Ok(None),
                Err(error) => Err(error.into()),
            }
        })?;
        pair.site.restart()?;
        pair.assert_equal(&["public"])?;
        let progress = "SELECT string_agg(DISTINCT subscription, ' ') FROM farshore.table_copy";
        ensure!(pair.subscriber_says(progress)? == "s");
        let copied = "SELECT string_agg(schema_name || '.' || table_name, ' ' ORDER BY schema_name) \
                      FROM farshore.table_copy";
        let copied = pair.subscriber_says(copied)?;
        ensure!(copied == "farshore_marks.mark public.t", "{copied}");
        Ok(())
    })
}

/// What changes while it is out leaves no trace.
#[test]
fn a_schema_that_left_an_adopted_publication_and_came_back_stops_it() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.on_both("CREATE SCHEMA s; CREATE TABLE s.t (id integer PRIMARY KEY, v text)")?;
        pair.publish("CREATE PUBLICATION by_hand FOR TABLES IN SCHEMA s, farshore_marks")?;
        let source = pair.publisher.url(DATABASE);
        pair.site.add(&format!(
            "[publication.p]\nsource = \"{source}\"\nadopt_publication = \"by_hand\"\n"
        ))?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        pair.site.start()?;
        pair.publish("INSERT INTO s.t VALUES (1, 'one')")?;
        pair.assert_equal(&["s"])?;
        pair.publish("ALTER PUBLICATION by_hand DROP TABLES IN SCHEMA s")?;
        pair.site.await_log("took schema s out of PostgreSQL publication", SOON)?;
        pair.publish("INSERT INTO s.t VALUES (2, 'two')")?;
        pair.site.restart()?;
        pair.await_arrival()?;
        pair.publish("ALTER PUBLICATION by_hand ADD TABLES IN SCHEMA s")?;
        pair.site.await_trouble("p", "had a schema taken out of it").map(drop)
    })
}

#[test]
fn one_slot_for_two_subscriptions_and_one_more_for_another_publication() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.on_both(TWO_TABLES)?;
        pair.publish("CREATE TABLE q (id integer PRIMARY KEY, v text)")?;
        for database in ["second", "third"] {
            pair.subscriber.connect()?.batch_execute(&format!("CREATE DATABASE {database}"))?;
            pair.subscriber.connect_to(database)?.batch_execute(&format!(
                "{TWO_TABLES}; CREATE TABLE q (id integer PRIMARY KEY, v text); \
                 CREATE SCHEMA farshore_marks; CREATE TABLE farshore_marks.mark (id bigint PRIMARY KEY)"
            ))?;
        }
        pair.add_publication("p", &["public.t", "public.u"], "")?;
        pair.add_publication("q", &["public.q", "public.t"], "")?;
        let url = |pair: &Pair, database: &str| pair.subscriber.url(database);
        for (name, publication, database) in
            [("s", "p", DATABASE), ("s2", "p", "second"), ("s3", "q", "third")]
        {
            let target = url(&pair, database);
            pair.add_subscription(name, publication, &target)?;
        }
        pair.publish("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 1000) AS i; INSERT INTO q VALUES (1, 'q')")?;
        pair.site.start()?;
        pair.await_arrival()?;
        pair.publish("UPDATE t SET v = 'w' WHERE id % 2 = 0; INSERT INTO u VALUES (1, 'u'); UPDATE q SET v = 'r'")?;
        let source = pair.publisher.url(DATABASE);
        for (database, tables) in [
            (DATABASE, ["public.t", "public.u"]),
            ("second", ["public.t", "public.u"]),
            ("third", ["public.t", "public.q"]),
        ] {
            pair.await_arrival_at(pair.subscriber.connect_to(database)?)?;
            checksum::assert_equal(&source, &url(&pair, database), &tables)?;
        }
        let slots =
            "SELECT string_agg(slot_name, ',' ORDER BY slot_name) FROM pg_replication_slots";
        assert_eq!(pair.publisher_says(slots)?, "farshore_p,farshore_q");
        let senders = "SELECT count(*) FROM pg_stat_replication";
        assert_eq!(pair.publisher_says(senders)?, "2", "one decode per publication");
        // Each subscription stands on its own: one whose target goes away holds back nobody.
        pair.site.restart()?;
        pair.subscriber
            .connect()?
            .batch_execute("ALTER DATABASE second ALLOW_CONNECTIONS false")?;
        pair.subscriber.execute_script(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'second'",
        )?;
        pair.publish("UPDATE t SET v = 'x' WHERE id % 3 = 0")?;
        let third = pair.subscriber.connect_to("third")?;
        pair.assert_equal(&["farshore_marks"])?;
        pair.await_arrival_at(third)?;
        checksum::assert_equal(&source, &url(&pair, "third"), &["public.t"])?;
        pair.subscriber.connect()?.batch_execute("ALTER DATABASE second ALLOW_CONNECTIONS true")?;
        pair.site.restart()?;
        pair.await_arrival_at(pair.subscriber.connect_to("second")?)?;
        checksum::assert_equal(&source, &url(&pair, "second"), &["public.t", "public.u"])
    })
}

#[test]
fn a_subscription_added_later_ends_equal() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::new(direction, &["public.*"], TWO_TABLES)?;
        pair.publish("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 1000) AS i")?;
        pair.site.start()?;
        pair.await_arrival()?;
        pair.publish(
            "UPDATE t SET v = 'w'; INSERT INTO u SELECT i, 'u' FROM generate_series(1, 1000) AS i",
        )?;
        pair.subscriber.connect()?.batch_execute("CREATE DATABASE later")?;
        pair.subscriber.connect_to("later")?.batch_execute(&format!(
            "{TWO_TABLES}; CREATE SCHEMA farshore_marks; CREATE TABLE farshore_marks.mark (id bigint PRIMARY KEY)"
        ))?;
        let later = pair.subscriber.url("later");
        pair.add_subscription("later", "p", &later)?;
        pair.site.restart()?;
        pair.publish(
            "DELETE FROM u WHERE id % 2 = 0; UPDATE t SET id = id + 5000 WHERE id % 3 = 0",
        )?;
        pair.await_arrival_at(pair.subscriber.connect_to("later")?)?;
        let source = pair.publisher.url(DATABASE);
        checksum::assert_equal(&source, &later, &["public.t", "public.u"])?;
        pair.assert_equal(&["public"])?;
        assert_eq!(pair.publisher_says("SELECT count(*) FROM pg_replication_slots")?, "1");
        Ok(())
    })
}

#[test]
fn a_table_that_joins_later_is_copied_and_follows() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::new(direction, &["public.*"], TWO_TABLES)?;
        pair.publish("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 1000) AS i")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.on_both("CREATE TABLE joins (id integer PRIMARY KEY, v text)")?;
        pair.publish("INSERT INTO joins SELECT i, 'old' FROM generate_series(1, 500) AS i")?;
        pair.site.restart()?;
        pair.publish("UPDATE t SET v = 'w' WHERE id % 2 = 0")?;
        pair.publish(
            "UPDATE joins SET v = 'new' WHERE id % 2 = 0; DELETE FROM joins WHERE id % 5 = 0",
        )?;
        pair.await_copy("joins")?;
        pair.publish(
            "UPDATE joins SET v = 'newer' WHERE id % 4 = 0; INSERT INTO joins VALUES (0, 'x')",
        )?;
        pair.assert_equal(&["public"])
    })
}

/// Without any change to the new table nothing in the stream tells of it.
#[test]
fn a_table_that_joins_later_and_rests_is_copied() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::new(direction, &["public.*"], TWO_TABLES)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.on_both("CREATE TABLE rests (id integer PRIMARY KEY, v text)")?;
        pair.publish("INSERT INTO rests SELECT i, 'old' FROM generate_series(1, 500) AS i")?;
        pair.site.restart()?;
        pair.await_copy("rests")?;
        pair.assert_equal(&["public"])
    })
}

/// A table that leaves again before it was copied must not hold the others back.
#[test]
fn a_table_that_joins_and_goes_before_its_copy_is_forgotten() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::new(direction, &["public.*"], TWO_TABLES)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("CREATE TABLE brief (id integer PRIMARY KEY)")?;
        pair.site.replace("publication = \"p\"", "publication = \"p\"\ncreate_tables = false")?;
        // The target has no such table: the subscription cannot go on.
        pair.site.restart()?;
        pair.site.await_log("capture streaming", SOON)?;
        pair.publish("INSERT INTO brief VALUES (1); INSERT INTO t VALUES (1, 'x')")?;
        pair.site.await_log("table public.brief is not on the target", SOON)?;
        pair.publish("DROP TABLE brief")?;
        pair.site.restart()?;
        pair.assert_equal(&["public"])
    })
}

/// Who names a table means those that inherit from it too, and they stay when others join.
#[test]
fn tables_that_inherit_stay_published_when_others_join() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE SCHEMA aside; CREATE TABLE parent (id integer PRIMARY KEY, v text); \
            CREATE TABLE aside.child (PRIMARY KEY (id)) INHERITS (parent); \
            CREATE TABLE other (id integer PRIMARY KEY, v text)";
        let mut pair = Pair::new(direction, &["public.parent"], schema)?;
        pair.publish(
            "INSERT INTO parent VALUES (1, 'v'); INSERT INTO aside.child VALUES (2, 'v')",
        )?;
        pair.site.start()?;
        pair.publish("UPDATE parent SET v = 'of both'; INSERT INTO other VALUES (3, 'v')")?;
        pair.assert_equal(&["aside"])?;
        pair.site.replace("'public.parent'", "'public.parent', 'public.other'")?;
        pair.site.restart()?;
        pair.await_copy("other")?;
        pair.publish("UPDATE parent SET v = 'of both again'; UPDATE other SET v = 'w'")?;
        pair.assert_equal(&["public", "aside"])?;
        // One that is made later has to be named: it may have no identity. And a new parent of what is
        // published already.
        pair.on_both(
            "CREATE TABLE aside.late (PRIMARY KEY (id)) INHERITS (parent); \
             CREATE TABLE top (id integer PRIMARY KEY, v text); ALTER TABLE parent INHERIT top",
        )?;
        pair.publish("INSERT INTO aside.late VALUES (4, 'late'); UPDATE other SET v = 'x'")?;
        pair.await_arrival()?;
        ensure!(pair.subscriber_says("SELECT count(*) FROM aside.late")? == "0");
        pair.site.replace("'public.parent'", "'public.parent', 'aside.late', 'public.top'")?;
        pair.site.restart()?;
        pair.await_copy("late")?;
        pair.await_copy("top")?;
        pair.publish("INSERT INTO top VALUES (5, 'top'); UPDATE top SET v = 'of all'")?;
        pair.assert_equal(&["public", "aside"])
    })
}

#[test]
fn articles_change_with_the_site_file() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::new(direction, &["public.t"], TWO_TABLES)?;
        pair.publish("INSERT INTO u SELECT i, 'u' FROM generate_series(1, 100) AS i")?;
        pair.site.start()?;
        pair.publish("INSERT INTO t VALUES (1, 'x')")?;
        pair.assert_equal(&["farshore_marks"])?;
        assert_eq!(pair.subscriber_says("SELECT count(*) FROM u")?, "0");
        pair.site.replace("'public.t'", "'public.t', 'public.u'")?;
        pair.site.restart()?;
        pair.publish("UPDATE u SET v = 'w' WHERE id < 5")?;
        pair.await_copy("u")?;
        pair.publish("UPDATE u SET v = 'x' WHERE id < 3")?;
        pair.assert_equal(&["public"])?;
        // A table that leaves keeps its rows and gets no more.
        pair.site.replace("'public.t', ", "")?;
        pair.site.restart()?;
        pair.site.await_log("capture streaming", SOON)?;
        pair.publish(
            "INSERT INTO t VALUES (2, 'not published'); INSERT INTO u VALUES (1000, 'u')",
        )?;
        pair.await_arrival()?;
        assert_eq!(pair.subscriber_says("SELECT count(*) FROM t")?, "1");
        assert_eq!(pair.subscriber_says("SELECT count(*) FROM u")?, "101");
        Ok(())
    })
}
