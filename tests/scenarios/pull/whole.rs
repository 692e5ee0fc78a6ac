//! Copies, streams and definitions over a link.

use anyhow::{Context, Result, ensure};
use farshore_testkit::checksum;
use farshore_tests::mixed_tables::{CHANGES, ROWS, SCHEMA, SCHEMAS, TABLES, from_id, run_each};
use farshore_tests::{
    DATABASE, DOWNSTREAM, Direction, Link, Pair, Site, UPSTREAM, Upstream, both_ways,
    certificate_lines, issue_certificates, subscriber_cluster,
};
use serde_json::Value;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

fn count(value: &Value) -> Result<u64> {
    value.as_u64().with_context(|| format!("{value} is no number"))
}

fn downstream(upstream: &Upstream) -> Result<Value> {
    let status = upstream.site.status()?;
    let found = status["downstreams"].as_array().into_iter().flatten();
    let found = found.into_iter().find(|d| d["site"] == DOWNSTREAM).cloned();
    found.with_context(|| format!("no {DOWNSTREAM} in {status}"))
}

#[test]
fn what_is_published_at_one_site_is_applied_at_another() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::new(direction, &TABLES, SCHEMA)?;
        let mut upstream = Upstream::split(&mut pair)?;
        pair.publish(&from_id(ROWS, 1_000))?;
        upstream.site.start()?;
        pair.site.start()?;
        pair.assert_equal(&SCHEMAS)?;
        run_each(&pair, &from_id(CHANGES, 1_000))?;
        // Streamed before it commits: its body crosses as a spill.
        pair.publish(
            "CREATE TABLE IF NOT EXISTS large (id bigint PRIMARY KEY, v text); \
             INSERT INTO large SELECT i, md5(i::text) FROM generate_series(1, 20000) AS i",
        )?;
        pair.await_copy("large")?;
        pair.assert_equal(&SCHEMAS)?;
        pair.publish(
            "BEGIN; UPDATE large SET v = v || 'x' WHERE id % 2 = 0; SAVEPOINT a; \
             DELETE FROM large; ROLLBACK TO a; DELETE FROM large WHERE id % 3 = 0; COMMIT",
        )?;
        pair.assert_equal(&SCHEMAS)?;

        // Both know how far they are, and each goes on where it was.
        let far = pair.site.status()?;
        ensure!(far["publications"][0]["name"] == "up/p", "{far}");
        ensure!(far["publications"][0]["state"] == "receiving", "{far}");
        let down = downstream(&upstream)?;
        ensure!(down["connected"] == true && count(&down["sent_bytes"])? > 100_000, "{down}");
        upstream.site.restart()?;
        pair.publish("INSERT INTO large SELECT i, 'r' FROM generate_series(30000, 30100) AS i")?;
        pair.assert_equal(&SCHEMAS)?;
        pair.site.restart()?;
        pair.publish("DELETE FROM large WHERE id > 30050")?;
        pair.assert_equal(&SCHEMAS)?;
        pair.site.stop()?;
        pair.publish("UPDATE large SET v = 'away' WHERE id < 1000")?;
        pair.site.start()?;
        pair.assert_equal(&SCHEMAS)?;

        // A column and a table that are new, and sequences.
        pair.publish(
            "ALTER TABLE large ADD COLUMN w integer DEFAULT 3; UPDATE large SET w = 4 WHERE id < 9; \
             CREATE TABLE later (id serial PRIMARY KEY, v text); \
             INSERT INTO later (v) SELECT 'v' FROM generate_series(1, 500)",
        )?;
        pair.await_copy("later")?;
        pair.assert_equal(&SCHEMAS)?;
        pair.site.stop()?;
        upstream.site.stop().map(drop)
    })
}

#[test]
fn many_subscriptions_at_a_site_are_one_crossing() -> Result<()> {
    let schema = "CREATE TABLE t (id bigint PRIMARY KEY, v text)";
    let mut pair = Pair::new(Direction::UP, &["public.*"], schema)?;
    let second = subscriber_cluster(Direction::UP.subscriber)?.start()?;
    second.execute_script(&format!(
        "{schema}; CREATE SCHEMA farshore_marks; \
         CREATE TABLE farshore_marks.mark (id bigint PRIMARY KEY)"
    ))?;
    let target = second.url(DATABASE);
    pair.add_subscription("second", "p", &target)?;
    let mut upstream = Upstream::split(&mut pair)?;
    upstream.site.start()?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.await_arrival_at(second.connect()?)?;
    let before = count(&downstream(&upstream)?["sent_bytes"])?;
    // Noise: what crosses cannot be less than its size.
    pair.publish(
        "INSERT INTO t SELECT i, (SELECT string_agg(md5(i::text || j), '') \
         FROM generate_series(1, 30) AS j) FROM generate_series(1, 3000) AS i",
    )?;
    pair.assert_equal(&["public"])?;
    pair.await_arrival_at(second.connect()?)?;
    checksum::assert_equal(&pair.publisher.url(DATABASE), &target, &["public.t".to_owned()])?;
    let sent = count(&downstream(&upstream)?["sent_bytes"])? - before;
    // Half a byte of a hexadecimal digit at least, and one crossing, not two.
    ensure!((1_400_000..2_600_000).contains(&sent), "{sent} bytes for two subscriptions");
    Ok(())
}

#[test]
fn sites_chain() -> Result<()> {
    let schema = "CREATE TABLE t (id bigint PRIMARY KEY, v text)";
    let mut pair = Pair::new(Direction::DOWN, &["public.*"], schema)?;
    pair.publish("INSERT INTO t SELECT i, 'v' || i FROM generate_series(1, 5000) AS i")?;
    let mut upstream = Upstream::split(&mut pair)?;
    // The pair's site becomes the last of three.
    let folder = upstream.certificates.path().to_owned();
    issue_certificates(&folder, &["middle"])?;
    let port = farshore_testkit::port::ReservedPort::new()?;
    let mut middle = Site::named("middle")?;
    middle.add_to_site(&format!(
        "listen = \"127.0.0.1:{}\"\n{}",
        port.number(),
        certificate_lines(&folder, "middle")
    ))?;
    middle.add(&format!(
        "[upstream.{UPSTREAM}]\naddress = \"127.0.0.1:{}\"\n\
         [downstream.{DOWNSTREAM}]\npublications = [\"{UPSTREAM}/p\"]\n",
        upstream.link.port()
    ))?;
    upstream.site.replace(&format!("[downstream.{DOWNSTREAM}]"), "[downstream.middle]")?;
    let link = Link::to(port.number())?;
    pair.site
        .replace(&format!("publication = \"{UPSTREAM}/p\""), "publication = \"middle/up/p\"")?;
    pair.site.replace(&format!("[upstream.{UPSTREAM}]"), "[upstream.middle]")?;
    pair.site.replace(&upstream.link.port().to_string(), &link.port().to_string())?;
    upstream.site.start()?;
    middle.start()?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    for verb in ["check", "schema"] {
        let said = pair.site.verb(verb, &[])?;
        ensure!(said.code == Some(0), "{verb}: {said:?}");
        let tells = said.stdout.contains("-- subscription s: its publication is received from");
        ensure!(tells == (verb == "schema"), "{verb}: {said:?}");
    }
    pair.publish("UPDATE t SET v = 'w' WHERE id % 3 = 0; DELETE FROM t WHERE id % 5 = 0")?;
    pair.assert_equal(&["public"])?;
    // Who asked, by a copy or a verb, and has its answer is no trouble there.
    ensure!(!middle.log().contains("session ended"), "{}", middle.log());
    // The middle dies; both others go on with it.
    middle.kill9()?;
    pair.publish("INSERT INTO t SELECT i, 'x' FROM generate_series(9001, 9500) AS i")?;
    middle.start()?;
    pair.assert_equal(&["public"])?;
    pair.publish("CREATE TABLE u (id integer PRIMARY KEY); INSERT INTO u VALUES (1), (2)")?;
    pair.await_copy("u")?;
    pair.assert_equal(&["public"])
}

#[test]
fn what_a_site_does_not_have_yet_is_kept_for_it() -> Result<()> {
    let schema = "CREATE TABLE t (id bigint PRIMARY KEY, v text)";
    let mut pair = Pair::new(Direction::UP, &["public.*"], schema)?;
    let mut upstream = Upstream::split(&mut pair)?;
    upstream.site.replace("[publication.p]", "[publication.p]\nsegment_size = \"64KB\"")?;
    upstream.site.start()?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.site.stop()?;
    pair.publish("INSERT INTO t VALUES (0, '')")?;
    for _ in 0..100 {
        pair.publish(
            "INSERT INTO t SELECT m + i, md5(random()::text) \
             FROM (SELECT max(id) AS m FROM t) AS newest, generate_series(1, 200) AS i",
        )?;
    }
    // Whole segments are there that only the absent site needs; retention passes over them twice.
    let begins = upstream.site.status()?["publications"][0]["store_start"].clone();
    std::thread::sleep(Duration::from_secs(5));
    ensure!(upstream.site.status()?["publications"][0]["store_start"] == begins);
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    farshore_testkit::wait::wait_until("the log to be forgotten", SOON, &[], || {
        let status = upstream.site.status()?;
        Ok((status["publications"][0]["store_start"] != begins).then_some(()))
    })
}
