//! The link and the sites fail while changes cross.

use anyhow::{Context, Result, ensure};
use farshore_tests::{Checked, Direction, Upstream, publisher_cluster, subscriber_cluster};
use std::time::Duration;

fn start(direction: Direction) -> Result<Checked> {
    let publisher = publisher_cluster(direction.publisher)?.start()?;
    Checked::start_far(publisher, subscriber_cluster(direction.subscriber)?.start()?)
}

fn upstream(checked: &mut Checked) -> Result<&mut Upstream> {
    checked.upstream.as_mut().context("a site upstream")
}

#[test]
fn a_link_that_is_cut_and_stalled_loses_nothing() -> Result<()> {
    let mut checked = start(Direction::UP)?;
    for _ in 0..4 {
        checked.await_commits(60)?;
        upstream(&mut checked)?.link.cut();
        checked.await_commits(60)?;
        upstream(&mut checked)?.link.mend();
    }
    checked.pair.await_arrival()?;
    // Nothing passes, and nobody is told: the peer is dead after ten seconds of silence.
    upstream(&mut checked)?.link.stall();
    checked.pair.site.await_trouble("up/p", "nothing was heard from site up")?;
    upstream(&mut checked)?.link.mend();
    checked.pair.await_arrival()?;
    // Every moment of a session is one that it may be cut in.
    for _ in 0..20 {
        upstream(&mut checked)?.link.cut();
        upstream(&mut checked)?.link.mend();
        checked.await_commits(7)?;
    }
    checked.finish().map(drop)
}

#[test]
fn sites_that_are_killed_go_on_where_they_were() -> Result<()> {
    let mut checked = start(Direction::DOWN)?;
    for round in 0..6 {
        checked.await_commits(40)?;
        if round % 2 == 0 {
            let site = &mut upstream(&mut checked)?.site;
            site.kill9()?;
            checked.await_commits(20)?;
            upstream(&mut checked)?.site.start()?;
        } else {
            checked.pair.site.kill9()?;
            checked.await_commits(20)?;
            checked.pair.site.start()?;
        }
        checked.pair.await_arrival()?;
    }
    checked.finish().map(drop)
}

#[test]
fn a_receiver_that_dies_at_any_of_its_steps_goes_on() -> Result<()> {
    let mut checked = start(Direction::UP)?;
    for point in [
        "receive.before-block:9",
        "receive.after-block:9",
        "receive.before-acknowledge:5",
        "receive.after-acknowledge:5",
        "store.before-fsync:7:cut",
        "store.after-fsync:7:cut",
        "spill.before-fsync:1:cut",
        "spill.after-fsync:1:cut",
    ] {
        checked.pair.site.stop()?;
        checked.pair.site.env("FARSHORE_CRASH", point);
        checked.pair.site.start()?;
        let code = checked.pair.site.await_exit(Duration::from_secs(60));
        ensure!(code.is_err(), "not killed at {point}: {code:?}");
        checked.pair.site.env("FARSHORE_CRASH", "");
        checked.pair.site.start()?;
        checked.pair.await_arrival().with_context(|| format!("after {point}"))?;
    }
    checked.finish().map(drop)
}
