//! Links that break, and links that fall silent.

use anyhow::{Result, ensure};
use farshore_tests::{Checked, Link, publisher_cluster, subscriber_cluster};

/// A checked pair with a link of its own on each side.
fn linked() -> Result<(Checked, Link, Link)> {
    // How long the stream may be silent follows the publisher's own limit for us.
    let publisher = publisher_cluster(18)?.setting("wal_sender_timeout", "3s").start()?;
    let subscriber = subscriber_cluster(15)?.start()?;
    let up = Link::to(publisher.port())?;
    let down = Link::to(subscriber.port())?;
    let mut checked = Checked::start(publisher, subscriber, &[], "")?;
    let site = &mut checked.pair.site;
    let port = |port: u16| format!("127.0.0.1:{port}/");
    site.replace(&port(checked.pair.publisher.port()), &port(up.port()))?;
    site.replace(&port(checked.pair.subscriber.port()), &port(down.port()))?;
    site.restart()?;
    checked.pair.await_arrival()?;
    Ok((checked, up, down))
}

#[test]
fn links_are_cut_and_mended() -> Result<()> {
    let (mut checked, up, down) = linked()?;
    for _ in 0..3 {
        for (link, agent) in [(&up, "p"), (&down, "s")] {
            link.cut();
            let (state, error) = checked.pair.site.await_trouble(agent, "127.0.0.1:")?;
            ensure!(state == "retrying", "{state}: {error}");
            checked.await_commits(20)?;
            link.mend();
            checked.pair.await_arrival()?;
        }
    }
    checked.finish().map(drop)
}

#[test]
fn a_publisher_that_falls_silent_is_noticed() -> Result<()> {
    let (mut checked, up, down) = linked()?;
    up.stall();
    let (state, error) = checked.pair.site.await_trouble("p", "took longer than")?;
    ensure!(state == "retrying", "{state}: {error}");
    up.mend();
    checked.pair.await_arrival()?;
    // A silent target cannot be told from one that works long; what comes after goes on.
    down.stall();
    checked.await_commits(50)?;
    down.mend();
    checked.pair.await_arrival()?;
    // Half open: what is left of the old connections is broken off only after a while.
    up.stall();
    down.stall();
    checked.await_commits(50)?;
    up.cut();
    down.cut();
    up.mend();
    down.mend();
    checked.pair.await_arrival()?;
    checked.finish().map(drop)
}
