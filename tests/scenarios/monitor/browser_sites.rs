//! Two sites over a link in a real browser: a copy under way, load, a stalled target, a cut link, a
//! conflict. What each page says is checked against the databases.

use crate::asking::Monitor;
use crate::browser::{bytes, missing, run};
use anyhow::{Context, Result, ensure};
use farshore_testkit::skip::skipped;
use farshore_testkit::wait::wait_until;
use farshore_tests::{DOWNSTREAM, Direction, Pair, UPSTREAM, Upstream};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const COPIED: u64 = 5_000;
const WAITING: u64 = 3_000;

/// A view of the page: a name, the part of its address, a button to press, a text to wait for.
type View<'a> = (&'a str, &'a str, Option<&'a str>, Option<&'a str>);

/// What a page says of one view.
fn see(monitor: Monitor, (name, hash, press, awaited): View<'_>) -> Result<Value> {
    let views = json!([{ "name": name, "hash": hash, "press": press, "await": awaited }]);
    let mut found = run("read.mjs", monitor, &[&views.to_string()])?;
    Ok(found["views"][name].take())
}

/// The row of a table that begins with a text.
fn row<'a>(seen: &'a Value, table: &str, first: &str) -> Result<Vec<&'a str>> {
    let rows = seen["tables"][table].as_array().into_iter().flatten();
    let rows = rows.filter_map(|row| row.as_array());
    let mut rows = rows.map(|row| row.iter().filter_map(Value::as_str).collect::<Vec<_>>());
    let found = rows.find(|row| row.first() == Some(&first));
    found.with_context(|| format!("no row {first} in table {table} of {seen:#}"))
}

/// A number as `12,345`.
fn count(text: &str) -> Result<u64> {
    Ok(text.replace(',', "").parse()?)
}

fn figure<'a>(seen: &'a Value, name: &str) -> Result<&'a str> {
    seen["figures"][name].as_str().with_context(|| format!("no figure {name} in {seen:#}"))
}

const SUBSCRIPTION: &str = "#/subscription/s";

#[test]
fn the_pages_of_two_sites_say_what_the_databases_hold() -> Result<()> {
    if let Some(why) = missing() {
        skipped("the_pages_of_two_sites_say_what_the_databases_hold", &why.to_string());
        return Ok(());
    }
    let schema = "CREATE TABLE a (id integer PRIMARY KEY, v text); \
                  CREATE TABLE b (id integer PRIMARY KEY, v text)";
    let mut pair = Pair::new(Direction::UP, &["public.*"], schema)?;
    pair.site.add("on_conflict = \"skip\"\n")?;
    let insert = |table: &str| {
        format!("INSERT INTO {table} SELECT i, 'v' FROM generate_series(1, {COPIED}) AS i")
    };
    pair.publish(&insert("a"))?;
    pair.publish(&insert("b"))?;
    let mut upstream = Upstream::split(&mut pair)?;
    upstream.site.add_to_site("monitor = \"127.0.0.1:0\"\n")?;
    pair.site.add_to_site("monitor = \"127.0.0.1:0\"\n")?;
    // Rows cannot be written to b: its copy is under way for as long as that.
    let mut blocker = pair.subscriber.connect()?;
    blocker.batch_execute("BEGIN; LOCK b IN SHARE MODE")?;
    upstream.site.start()?;
    pair.site.start()?;
    let (near, far) = (Monitor::of(&upstream.site)?, Monitor::of(&pair.site)?);
    a_copy_under_way(&pair, far)?;
    blocker.batch_execute("ROLLBACK")?;
    pair.assert_equal(&["public"])?;
    under_load(&pair, near)?;
    pair.assert_equal(&["public"])?;
    a_stalled_target(&mut pair, far)?;
    a_cut_link(&mut pair, &upstream, near)?;
    a_conflict(&mut pair, far)?;

    // What the store at the near end holds is what was published.
    let start = Some("From the log's start");
    let seen = see(near, ("stored", "#/publication/p", start, Some("committed")))?;
    let first = seen["cards"][0].as_str().unwrap_or_default();
    let status = near.status()?;
    let (log_start, durable) =
        (&status["publications"][0]["store_start"], &status["publications"][0]["durable"]);
    let at = first.split(' ').next().unwrap_or_default();
    let within = format!("SELECT '{at}'::pg_lsn > {log_start} AND '{at}'::pg_lsn <= {durable}")
        .replace('"', "'");
    ensure!(
        pair.publisher_says(&within)? == "t",
        "{first}, in a log from {log_start} to {durable}"
    );
    Ok(())
}

fn a_copy_under_way(pair: &Pair, far: Monitor) -> Result<()> {
    wait_until("one table to be copied, and one not", SOON, &[], || {
        let subscription = &far.status()?["subscriptions"][0];
        let copies = subscription["copies"].as_array().cloned().unwrap_or_default();
        let done = |table: &str| {
            let copy = copies.iter().find(|copy| copy["table"] == table);
            copy.is_some_and(|copy| copy["ranges_done"] == copy["ranges"])
        };
        let begun = copies.iter().any(|copy| copy["table"] == "public.b");
        Ok((done("public.a") && begun && !done("public.b")).then_some(()))
    })?;
    let seen = see(far, ("copy", SUBSCRIPTION, None, Some("Copy")))?;
    ensure!(seen["state"] == "copying", "{seen:#}");
    for table in ["a", "b"] {
        let truth = pair.subscriber_says(&format!("SELECT count(*) FROM {table}"))?;
        let shown = row(&seen, "Copy, by table", &format!("public.{table}"))?;
        ensure!(count(shown[3])?.to_string() == truth, "{shown:?}, {truth} rows of {table}");
    }
    Ok(())
}

fn under_load(pair: &Pair, near: Monitor) -> Result<()> {
    let stop = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                pair.publish("UPDATE a SET v = v || 'x' WHERE id <= 50")?;
            }
            anyhow::Ok(())
        });
        let moving = wait_until("rates", SOON, &[], || {
            let rate = near.status()?["rates"]["publications"]["p"]["changes_per_second"].as_f64();
            Ok(rate.filter(|rate| *rate > 0.0))
        });
        let seen = moving.and_then(|_| see(near, ("load", "#/", None, None)));
        stop.store(true, Ordering::Relaxed);
        load.join().map_err(|_| anyhow::anyhow!("the load died"))??;
        seen
    })?;
    let (publication, site) =
        (row(&seen, "Publications", "p")?, row(&seen, "Downstream sites", DOWNSTREAM)?);
    ensure!(publication[1] == "streaming" && publication[2] != "0/s", "{publication:?}");
    ensure!(publication[3].ends_with('s') && publication[4].ends_with('s'), "{publication:?}");
    ensure!(site[2] == "connected" && site[3].ends_with('s'), "{site:?}");
    Ok(())
}

fn a_stalled_target(pair: &mut Pair, far: Monitor) -> Result<()> {
    let mut blocker = pair.subscriber.connect()?;
    blocker.batch_execute("BEGIN; LOCK b IN SHARE MODE")?;
    pair.publish("UPDATE b SET v = 'w'")?;
    wait_until("it to wait", SOON, &[], || {
        let subscription = &far.status()?["subscriptions"][0];
        Ok(subscription["apply_ms"].as_f64().filter(|ms| *ms > 1_000.0).map(drop))
    })?;
    let seen = see(far, ("stalled", SUBSCRIPTION, None, None))?;
    // Both have waited longer than a second: they are told in seconds or minutes.
    for name in ["Latency", "Apply"] {
        ensure!(figure(&seen, name)?.ends_with(" s"), "{name} in {seen:#}");
    }
    let there = pair.subscriber_says("SELECT applied FROM farshore.subscription")?;
    let status = far.status()?;
    let durable = status["publications"][0]["durable"].as_str().unwrap_or_default();
    let lacks = format!("SELECT '{durable}'::pg_lsn - '{there}'::pg_lsn");
    let truth: f64 = pair.publisher_says(&lacks)?.parse()?;
    let shown = bytes(figure(&seen, "To apply")?)?;
    ensure!(0.0 < shown && shown <= truth * 1.05, "{shown} shown, {truth} lack");
    let about = figure(&seen, "Commands to apply")?;
    ensure!(about.starts_with("about "), "an estimate is not called one: {about}");
    blocker.batch_execute("ROLLBACK")?;
    pair.assert_equal(&["public"])
}

fn a_cut_link(pair: &mut Pair, upstream: &Upstream, near: Monitor) -> Result<()> {
    upstream.link.cut();
    pair.publish(&format!("UPDATE a SET v = 'cut' WHERE id <= {WAITING}"))?;
    let status = wait_until("the far site to be away, and behind", SOON, &[], || {
        let status = near.status()?;
        let d = &status["downstreams"][0];
        let waits = d["behind_commands"] == WAITING && d["link_ms"].as_f64() > Some(1_000.0);
        Ok((waits && d["connected"] == false).then_some(status))
    })?;
    let seen = see(near, ("cut", "#/", None, None))?;
    let site = row(&seen, "Downstream sites", DOWNSTREAM)?;
    ensure!(site[2] == "away" && site[3].ends_with(" s"), "{site:?}");
    ensure!(count(site[5])? == WAITING, "{site:?}");
    let position = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (here, there) = (
        position(&status["publications"][0]["durable"]),
        position(&status["downstreams"][0]["durable"]),
    );
    let lacks = format!("SELECT '{here}'::pg_lsn - '{there}'::pg_lsn");
    let least: f64 = pair.publisher_says(&lacks)?.parse()?;
    let shown = bytes(site[4])?;
    ensure!(shown >= least * 0.95, "{shown} shown, {least} lacked before");
    upstream.link.mend();
    pair.assert_equal(&["public"])
}

fn a_conflict(pair: &mut Pair, far: Monitor) -> Result<()> {
    pair.subscriber.execute_script("DELETE FROM b WHERE id = 42")?;
    pair.publish("UPDATE b SET v = 'gone' WHERE id = 42")?;
    pair.await_arrival()?;
    let show = Some("Show what the target has recorded");
    let seen = see(far, ("conflict", SUBSCRIPTION, show, Some("skipped")))?;
    let recorded = "SELECT source_lsn || '|' || (key->>'id') FROM farshore.conflicts";
    let truth = pair.subscriber_says(recorded)?;
    let (lsn, key) = truth.split_once('|').context("no record")?;
    let cards = seen["cards"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let cards: Vec<&str> = cards.collect();
    let card = cards.iter().find(|card| card.contains(lsn));
    let card = card.with_context(|| format!("no card of {lsn} among {cards:?}"))?;
    ensure!(card.contains("UPDATE public.b") && card.contains(key), "{card}");
    ensure!(card.contains("copy the table anew"), "no remedy: {card}");
    ensure!(count(figure(&seen, "Conflicts")?)? == 1, "{seen:#}");
    ensure!(
        see(far, ("received", &format!("#/publication/{UPSTREAM}%2Fp"), None, None))?["state"]
            == "receiving"
    );
    Ok(())
}
