//! Databases that are not in UTF-8.

use anyhow::{Context, Result, ensure};
use farshore_testkit::postgres::Cluster;
use farshore_tests::{Direction, Site, both_ways, publisher_cluster, subscriber_cluster};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const DATABASE: &str = "app";

/// Names, labels and values have what the encoding has beyond ASCII.
fn schema(word: &str) -> String {
    format!(
        "CREATE TYPE \"{word}typ\" AS ENUM ('{word}', 'x'); \
         CREATE TABLE \"{word}\" (id integer PRIMARY KEY, \"{word} 2\" text, tags text[], \
           doc jsonb, kind \"{word}typ\", c char(9), n name)"
    )
}

fn rows(cluster: &Cluster, word: &str) -> Result<Vec<String>> {
    let mut client = cluster.connect_to(DATABASE)?;
    let rows = format!("SELECT t::text FROM \"{word}\" t ORDER BY id");
    Ok(client.query(&rows, &[])?.iter().map(|row| row.get(0)).collect())
}

fn carried(direction: Direction, from: &str, to: &str, word: &str) -> Result<()> {
    let publisher = publisher_cluster(direction.publisher)?.start()?;
    let subscriber = subscriber_cluster(direction.subscriber)?.start()?;
    for (cluster, encoding) in [(&publisher, from), (&subscriber, to)] {
        cluster.execute_script(&format!(
            "CREATE DATABASE {DATABASE} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' \
             TEMPLATE template0"
        ))?;
    }
    let mut source = publisher.connect_to(DATABASE)?;
    source.batch_execute(&schema(word))?;
    let insert = format!(
        "INSERT INTO \"{word}\" SELECT i, '{word} ' || i, ARRAY['{word}', i::text], \
         jsonb_build_object('{word}', '{word}'), '{word}', '{word}', '{word}' FROM generate_series"
    );
    source.batch_execute(&format!("{insert}(1, 50) AS i"))?;
    let mut site = Site::new()?;
    site.add(&format!(
        "[publication.p]\nsource = \"{}\"\ntables = ['public.*']\n\n\
         [subscription.s]\npublication = \"p\"\ntarget = \"{}\"\n",
        publisher.url(DATABASE),
        subscriber.url(DATABASE)
    ))?;
    site.start()?;
    let await_equal = |site: &mut Site| {
        site.wait_for("both to be equal", SOON, || {
            let there = rows(&subscriber, word).unwrap_or_default();
            Ok((there == rows(&publisher, word)?).then_some(()))
        })
    };
    await_equal(&mut site)?;
    source.batch_execute(&format!(
        "{insert}(51, 3000) AS i; UPDATE \"{word}\" SET \"{word} 2\" = '{word}' WHERE id % 3 = 0; \
         DELETE FROM \"{word}\" WHERE id % 7 = 0"
    ))?;
    await_equal(&mut site)?;
    // Behind: taken by function, applied in bulk.
    site.stop()?;
    source.batch_execute(&format!(
        "{insert}(3001, 6000) AS i; UPDATE \"{word}\" SET c = 'x' WHERE id % 5 = 0"
    ))?;
    site.start()?;
    await_equal(&mut site)?;
    ensure!(!rows(&subscriber, word)?.is_empty());
    site.stop().map(drop)
}

#[test]
fn text_is_converted_between_encodings() -> Result<()> {
    both_ways(|direction| {
        for (from, to, word) in [
            ("LATIN1", "UTF8", "größe"),
            ("UTF8", "LATIN1", "größe"),
            ("WIN1251", "WIN1251", "слово"),
            ("EUC_JP", "UTF8", "日本"),
        ] {
            carried(direction, from, to, word).with_context(|| format!("{from} to {to}"))?;
        }
        Ok(())
    })
}

/// What the target's encoding lacks is in the record of the conflict, too.
#[test]
fn a_character_that_the_target_lacks_is_left_out_and_recorded() -> Result<()> {
    for policy in ["skip", "overwrite"] {
        let publisher = publisher_cluster(18)?.start()?;
        let subscriber = subscriber_cluster(15)?.start()?;
        for (cluster, encoding) in [(&publisher, "UTF8"), (&subscriber, "LATIN1")] {
            cluster.execute_script(&format!(
                "CREATE DATABASE {DATABASE} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' \
                 TEMPLATE template0"
            ))?;
            cluster
                .connect_to(DATABASE)?
                .batch_execute("CREATE TABLE t (id integer PRIMARY KEY, v text, j json, k text)")?;
        }
        let mut site = Site::new()?;
        site.add(&format!(
            "[publication.p]\nsource = \"{}\"\ntables = ['public.*']\n\n\
             [subscription.s]\npublication = \"p\"\ntarget = \"{}\"\non_conflict = \"{policy}\"\n",
            publisher.url(DATABASE),
            subscriber.url(DATABASE)
        ))?;
        site.start()?;
        let mut source = publisher.connect_to(DATABASE)?;
        let mut target = subscriber.connect_to(DATABASE)?;
        site.wait_for("the stream to begin", SOON, || {
            let streaming = "SELECT FROM farshore.subscription WHERE state = 'streaming'";
            Ok(target.query_opt(streaming, &[]).ok().flatten().map(drop))
        })?;
        source.batch_execute("INSERT INTO t VALUES (1, 'ä', '{}', 'ä')")?;
        source.batch_execute(
            "INSERT INTO t VALUES (2, '5 € ä', '{\"a\": \"\\u20ac\"}', 'k'); \
             UPDATE t SET v = '€' WHERE id = 1",
        )?;
        source.batch_execute("INSERT INTO t VALUES (3, 'ü', '{}', 'k')")?;
        site.wait_for("what follows to arrive", SOON, || {
            Ok(target.query_opt("SELECT FROM t WHERE id = 3", &[])?.map(drop))
        })?;
        let recorded = "SELECT string_agg(concat_ws(' ', operation, action, sqlstate, \
                        key ->> 'id', new_row ->> 'v', new_row -> 'j' ->> 'a'), ';' ORDER BY id) \
                        FROM farshore.conflicts";
        let said: String = target.query_one(recorded, &[])?.get(0);
        ensure!(
            said == "INSERT skipped 22P05 2 5 ? ? ?;UPDATE skipped 22P05 1 ?",
            "{policy}: {said}"
        );
        site.stop()?;
    }
    Ok(())
}
