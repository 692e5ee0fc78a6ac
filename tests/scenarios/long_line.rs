//! Publisher and subscriber far from each other: a long line of 77 ms and 100 Mbit/s between them,
//! that is cut without a word and comes back.

use anyhow::{Result, ensure};
use farshore_testkit::skip::skipped;
use farshore_testkit::wait::wait_until;
use farshore_testkit::wan::{Wan, WanConfig};
use farshore_tests::{DATABASE, Pair, publisher_cluster, subscriber_cluster};
use std::time::Duration;

const SCHEMA: &str = "CREATE TABLE t (id int PRIMARY KEY, v text NOT NULL)";
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn changes_cross_a_long_line_that_is_cut_for_a_while() -> Result<()> {
    if let Err(reason) = Wan::available() {
        let test = "changes_cross_a_long_line_that_is_cut_for_a_while";
        skipped(test, &reason.to_string());
        return Ok(());
    }
    let wan = Wan::start(WanConfig {
        rtt: Duration::from_millis(77),
        bits_per_second: Some(100_000_000),
        ..WanConfig::default()
    })?;
    let publisher = publisher_cluster(15)?.place(wan.near()).start()?;
    let subscriber = subscriber_cluster(18)?.place(wan.far()).start()?;
    let mut pair = Pair::of(publisher, subscriber)?;
    pair.site.place(wan.far());
    pair.on_both(SCHEMA)?;
    pair.publish("INSERT INTO t SELECT i, md5(i::text) FROM generate_series(1, 10000) i")?;
    pair.add_publication("p", &["public.t"], "")?;
    let target = pair.site.url_of(&pair.subscriber, DATABASE);
    pair.add_subscription("s", "p", &target)?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    let copied = wan.traffic().near_to_far;
    ensure!(copied.bytes > 10_000 * 32, "the copy did not cross the line: {copied:?}");

    wan.cut();
    pair.publish("UPDATE t SET v = v || 'x' WHERE id > 5000; DELETE FROM t WHERE id % 7 = 0")?;
    wait_until("the publisher to send into the void", PATIENCE, &[], || {
        Ok((wan.traffic().near_to_far.cut > 0).then_some(()))
    })?;
    wan.restore();
    pair.assert_equal(&["public"])?;
    pair.site.stop()?;
    Ok(())
}
