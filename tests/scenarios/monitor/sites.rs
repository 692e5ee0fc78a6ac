//! Two sites: what each tells of the other.

use crate::asking::Monitor;
use anyhow::{Context, Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{DOWNSTREAM, Direction, Pair, Upstream};
use serde_json::Value;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

#[test]
fn a_token_crosses_the_link_and_is_told_of_at_both_sites() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY)";
    let mut pair = Pair::new(Direction::UP, &["public.*"], schema)?;
    let mut upstream = Upstream::split(&mut pair)?;
    upstream.site.add_to_site("monitor = \"127.0.0.1:0\"\n")?;
    pair.site.add_to_site("monitor = \"127.0.0.1:0\"\n")?;
    upstream.site.start()?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    let (near, far) = (Monitor::of(&upstream.site)?, Monitor::of(&pair.site)?);
    let said = upstream.site.verb("tracer", &["p", "--json"])?;
    ensure!(said.code == Some(0), "{said:?}");
    let report: Value = serde_json::from_str(&said.stdout)?;
    let arrival = &report["downstreams"][0];
    ensure!(arrival["name"] == DOWNSTREAM && arrival["arrived_ms"].is_f64(), "{report}");
    ensure!(arrival["arrived_ms"].as_f64() >= report["durable_ms"].as_f64(), "{report}");
    let position = report["position"].as_str().context("no position")?;
    wait_until("the token to be on the target", SOON, &[], || {
        let there = format!("SELECT applied >= '{position}' FROM farshore.subscription");
        let subscription = &far.status()?["subscriptions"][0];
        let told = subscription["tracer_ms"].as_f64().is_some_and(|ms| ms > 0.0);
        Ok((pair.subscriber_says(&there)? == "t" && told).then_some(()))
    })?;
    let said = pair.site.verb("tracer", &["up/p"])?;
    let why = "post the token at site \"up\", as publication \"p\"";
    ensure!(said.code == Some(1) && said.stderr.contains(why), "{said:?}");

    // A link that is cut: the near site tells what the far one lacks.
    let connected = format!("site=\"{DOWNSTREAM}\"");
    // What is told is of the last look.
    wait_until("the far site to be told as connected", SOON, &[], || {
        let is_told = near.metric("farshore_downstream_connected", &connected)? == 1.0;
        Ok(is_told.then_some(()))
    })?;
    pair.site.stop()?;
    pair.publish("INSERT INTO t SELECT generate_series(1, 5000)")?;
    wait_until("the far site to be away, and behind", SOON, &[], || {
        let away = near.metric("farshore_downstream_connected", &connected)? == 0.0;
        let behind = near.metric("farshore_downstream_behind_bytes", &connected)?;
        Ok((away && behind > 100_000.0).then_some(()))
    })?;
    let said = upstream.site.verb("tracer", &["p", "--wait", "1"])?;
    ensure!(said.code == Some(1) && said.stdout.contains("not within 1 s (away)"), "{said:?}");
    pair.site.start()?;
    pair.assert_equal(&["public"])
}
