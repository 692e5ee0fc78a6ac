//! No room where the log is kept, and no room at the target.

use anyhow::{Context, Result, ensure};
use farshore_testkit::postgres::StopMode;
use farshore_tests::{
    Checked, DATABASE, Direction, Pair, Site, SmallDisk, publisher_cluster, subscriber_cluster,
};
use std::process::Command;

/// Keeps the disk full until `agent` tells of it: what is applied leaves the log, and the room of
/// its segments would carry a modest load on for ever.
fn fill_until_told(disk: &SmallDisk, site: &Site, agent: &str) -> Result<(String, String)> {
    site.await_trouble_while(agent, "No space left on device", || disk.fill())
}

#[test]
fn the_distributors_disk_is_full() -> Result<()> {
    let mut checked =
        Checked::start(publisher_cluster(15)?.start()?, subscriber_cluster(18)?.start()?, &[], "")?;
    // The store moves to a small disk.
    let data = checked.pair.site.directory().join("data");
    checked.pair.site.stop()?;
    let aside = data.with_extension("aside");
    std::fs::rename(&data, &aside)?;
    let Some(disk) = checked.pair.site.small_disk("data", 16)? else { return Ok(()) };
    let copied = Command::new("cp").arg("-a").arg(aside.join(".")).arg(&data).status()?;
    ensure!(copied.success(), "cp: {copied}");
    checked.pair.site.start()?;
    checked.pair.await_arrival()?;

    for _ in 0..2 {
        let (state, error) = fill_until_told(&disk, &checked.pair.site, "p")?;
        ensure!(state == "retrying", "{state}");
        ensure!(error.contains("Free space on that disk"), "{error}");
        checked.await_commits(100)?;
        // What is durable has been applied, and the publisher hears from us.
        let slot = "SELECT active FROM pg_replication_slots WHERE slot_name = 'farshore_p'";
        println!("slot active while full: {}", checked.pair.publisher_says(slot)?);
        disk.free()?;
        checked.pair.await_arrival()?;
    }

    // A stop does not wait for room, nor does a kill lose anything.
    fill_until_told(&disk, &checked.pair.site, "p")?;
    checked.pair.site.stop_promptly().context("stop on a full disk")?;
    checked.pair.site.start().context("start on a full disk")?;
    // What was not durable has been given back.
    fill_until_told(&disk, &checked.pair.site, "p")?;
    checked.pair.site.kill9()?;
    disk.free()?;
    checked.pair.site.start()?;
    checked.pair.await_arrival()?;
    checked.finish().map(drop)
}

/// A server that shuts down waits until who streams from it has all of its log: not for a disk that
/// has no room.
#[test]
fn a_publisher_shuts_down_while_the_distributors_disk_is_full() -> Result<()> {
    for (publisher, subscriber) in [(15, 18), (18, 15)] {
        let mut pair = Pair::bare(Direction { publisher, subscriber })?;
        pair.on_both("CREATE TABLE t (id serial PRIMARY KEY, v text)")?;
        pair.add_publication("p", &["public.*"], "segment_size = \"64KB\"")?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        let Some(disk) = pair.site.small_disk("data", 16)? else { return Ok(()) };
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        // What is applied leaves the log, and makes room.
        pair.subscriber.stop(StopMode::Fast)?;
        pair.site.await_trouble_while("p", "No space left on device", || {
            disk.fill()?;
            // None of them so large that it goes to a spill.
            pair.publish(
                "DO $$ BEGIN FOR n IN 1..20 LOOP \
                   INSERT INTO t (v) SELECT string_agg(sha512(concat(now(), n, j)::bytea)::text, '') \
                   FROM generate_series(1, 60) j; COMMIT; \
                 END LOOP; END $$",
            )
        })?;
        pair.publisher.stop(StopMode::Fast)?;
        let log = std::fs::read_to_string(pair.publisher.log_path())?;
        ensure!(!log.contains("immediate shutdown"), "it had to be ended:\n{log}");
        pair.publisher.start()?;
        let (state, error) = pair.site.await_trouble("p", "No space left on device")?;
        ensure!(state == "retrying", "{state}: {error}");
        disk.free()?;
        pair.subscriber.start()?;
        pair.assert_equal(&["public"])?;
    }
    Ok(())
}

#[test]
fn the_targets_disk_is_full() -> Result<()> {
    let mut checked =
        Checked::start(publisher_cluster(18)?.start()?, subscriber_cluster(15)?.start()?, &[], "")?;
    let place = checked.pair.subscriber.data_dir().with_file_name("small");
    std::fs::create_dir(&place)?;
    let own = Command::new("chown")
        .arg("--reference")
        .arg(checked.pair.subscriber.data_dir())
        .arg(&place)
        .status()?;
    ensure!(own.success(), "chown: {own}");
    let Some(disk) = SmallDisk::mount(&place, 24)? else { return Ok(()) };
    checked.pair.site.stop()?;
    let mut target = checked.pair.subscriber.connect()?;
    target.batch_execute(&format!("CREATE TABLESPACE small LOCATION '{}'", place.display()))?;
    target.batch_execute("ALTER DATABASE postgres SET deadlock_timeout = '10s'")?;
    for table in farshore_testkit::prefix::table_names() {
        target.batch_execute(&format!("ALTER TABLE {table} SET TABLESPACE small"))?;
    }
    checked.pair.site.start()?;
    checked.pair.await_arrival()?;

    let (state, error) = fill_until_told(&disk, &checked.pair.site, "s")?;
    ensure!(state == "retrying", "{state}: {error}");
    disk.free()?;
    checked.pair.await_arrival()?;
    let _servers = checked.finish()?;
    drop(disk);
    Ok(())
}
