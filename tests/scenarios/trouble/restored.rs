//! Servers and stores that were put back to an earlier time, or replaced.

use anyhow::{Result, ensure};
use farshore_testkit::postgres::{Backup, StopMode, copy_tree};
use farshore_testkit::wait::wait_until;
use farshore_tests::{Direction, Pair, Site, Upstream, publisher_cluster};
use std::path::{Path, PathBuf};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

const SCHEMA: &str = "CREATE TABLE t (id integer PRIMARY KEY, v text)";

fn streaming(more: &str) -> Result<Pair> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.on_both(SCHEMA)?;
    pair.add_publication("p", &["public.*"], more)?;
    let target = pair.subscriber.url("postgres");
    pair.add_subscription("s", "p", &target)?;
    pair.publish("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 100) AS i")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    Ok(pair)
}

fn change(pair: &mut Pair, from: u32) -> Result<()> {
    pair.publish(&format!(
        "INSERT INTO t SELECT i, repeat('w', 100) FROM generate_series({from}, {from} + 99) AS i; \
         UPDATE t SET v = v || '!' WHERE id % 3 = 0; DELETE FROM t WHERE id = {from} - 50"
    ))?;
    pair.assert_equal(&["public"])
}

#[test]
fn the_target_from_a_backup_gets_again_what_the_log_still_has() -> Result<()> {
    let mut pair = streaming("")?;
    change(&mut pair, 1_000)?;
    let backup = pair.subscriber.back_up()?;
    for round in 1..=3 {
        change(&mut pair, 1_000 + round * 1_000)?;
        pair.subscriber.restore(&backup)?;
        pair.site.await_log("gone back", SOON)?;
        pair.assert_equal(&["public"])?;
    }
    Ok(())
}

#[test]
fn the_target_from_a_backup_that_is_too_old_is_refused() -> Result<()> {
    // Small segments: what was applied soon leaves the log.
    let mut pair = streaming("segment_size = \"64KB\"")?;
    let backup = pair.subscriber.back_up()?;
    let at_first = pair.site.status()?["publications"][0]["store_start"].to_string();
    let mut from = 1_000;
    while pair.site.status()?["publications"][0]["store_start"] == at_first.trim_matches('"') {
        let incompressible = "UPDATE t SET v = (SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 30))";
        pair.publish(incompressible)?;
        change(&mut pair, from)?;
        from += 200;
    }
    pair.subscriber.restore(&backup)?;
    let (state, error) = pair.site.await_trouble("s", "the target has gone back to")?;
    ensure!(state == "stopped" && error.contains("farshore resync"), "{state}: {error}");
    Ok(())
}

#[test]
fn the_publisher_from_a_backup_is_noticed() -> Result<()> {
    let mut pair = streaming("")?;
    let backup = pair.publisher.back_up()?;
    change(&mut pair, 1_000)?;
    pair.publisher.restore(&backup)?;
    let (state, error) = pair.site.await_trouble("p", "was set back")?;
    ensure!(state == "stopped" && error.contains("To copy everything anew"), "{state}: {error}");
    // Once it has written as much again, its positions look right and name other changes.
    for from in [5_000, 6_000] {
        pair.publish(&format!(
            "INSERT INTO t SELECT i, 'other' FROM generate_series({from}, {from} + 99) AS i; \
             SELECT pg_switch_wal()"
        ))?;
    }
    let resumed = pair.site.verb("resume", &["--publication", "p"])?;
    let (state, _) = pair.site.await_trouble("p", "was set back")?;
    ensure!(state == "stopped", "{state} after {resumed:?}");
    pair.site.restart()?;
    let (state, _) = pair.site.await_trouble("p", "was set back")?;
    ensure!(state == "stopped", "{state} after a restart");
    let checked = pair.site.verb("check", &[])?;
    ensure!(checked.code == Some(1) && checked.stdout.contains("was set back"), "{checked:?}");
    Ok(())
}

/// Nobody looked before it had written more than it lost.
#[test]
fn the_publisher_from_a_backup_is_noticed_also_when_it_has_written_more_since() -> Result<()> {
    let mut pair = streaming("")?;
    let backup = pair.publisher.back_up()?;
    change(&mut pair, 1_000)?;
    pair.site.stop()?;
    pair.publisher.restore(&backup)?;
    for from in [5_000, 6_000] {
        pair.publish(&format!(
            "INSERT INTO t SELECT i, 'other' FROM generate_series({from}, {from} + 99) AS i; \
             SELECT pg_switch_wal()"
        ))?;
    }
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("p", "has written other changes since")?;
    ensure!(state == "stopped", "{state}: {error}");
    pair.site.restart()?;
    let (state, _) = pair.site.await_trouble("p", "has written other changes since")?;
    ensure!(state == "stopped", "{state} after a restart");
    Ok(())
}

/// What is given once more after kills is what the store has.
#[test]
fn a_slot_that_is_behind_the_store_is_no_trouble() -> Result<()> {
    let mut pair = streaming("")?;
    for round in 1..=4 {
        change(&mut pair, 1_000 * round)?;
        // A tracer token may be the last that the store has.
        let token = pair.site.verb("tracer", &["p"])?;
        ensure!(token.code == Some(0), "{token:?}");
        pair.site.kill9()?;
        // What the slot was told last is lost as well.
        pair.publisher.kill9()?;
        pair.publisher.start()?;
        pair.site.start()?;
        change(&mut pair, 1_000 * round + 500)?;
    }
    Ok(())
}

#[test]
fn a_store_that_was_replaced_is_noticed() -> Result<()> {
    let mut pair = streaming("")?;
    pair.site.stop()?;
    std::fs::remove_dir_all(pair.site.directory().join("data"))?;
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("p", "was not made for this store")?;
    ensure!(state == "stopped", "{state}: {error}");
    // And with a new slot, where the new store begins too late for the target.
    pair.site.stop()?;
    pair.drop_slot()?;
    pair.publish("INSERT INTO t VALUES (-1, 'between')")?;
    std::fs::remove_dir_all(pair.site.directory().join("data"))?;
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("s", "no longer has changes")?;
    ensure!(state == "stopped" && error.contains("farshore resync"), "{state}: {error}");
    Ok(())
}

/// A slot that nobody reads any more keeps the publisher's log: whoever renames a publication is told.
#[test]
fn a_publication_that_is_named_no_more_is_told_of() -> Result<()> {
    let mut pair = streaming("")?;
    pair.site.stop()?;
    pair.site.replace("[publication.p]", "[publication.q]")?;
    pair.site.replace("publication = \"p\"", "publication = \"q\"")?;
    let checked = pair.site.verb("check", &[])?;
    ensure!(checked.stdout.contains("its slot \"farshore_p\" keeps the log"), "{checked:?}");
    ensure!(!checked.stdout.contains("is of no publication"), "{checked:?}");
    // Also where no folder tells of it.
    std::fs::remove_dir_all(pair.site.directory().join("data"))?;
    let told = "slot \"farshore_p\" on ";
    wait_until("the slot to be told of", SOON, &[&pair.site.log_path()], || {
        let checked = pair.site.verb("check", &[])?;
        let is_told = checked.stdout.contains("is of no publication in this site file");
        Ok((is_told && checked.stdout.contains(told)).then_some(()))
    })
}

const MADE_AGAIN: &str = "DROP TABLE t; CREATE TABLE t (id integer PRIMARY KEY, v text)";

/// Statements go by name: what was in the old table would be gone, and inserts would go on.
#[test]
fn a_target_table_that_was_made_again_is_noticed() -> Result<()> {
    let mut pair = streaming("")?;
    pair.site.stop()?;
    pair.subscriber.execute_script(MADE_AGAIN)?;
    pair.publish("INSERT INTO t VALUES (1000, 'since')")?;
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("s", "made again, and is empty")?;
    ensure!(state == "stopped" && error.contains("--table public.t"), "{state}: {error}");
    let resumed = pair.site.verb("resume", &["--subscription", "s"])?;
    let (state, _) = pair.site.await_trouble("s", "made again, and is empty")?;
    ensure!(state == "stopped", "{state} after {resumed:?}");
    let said = pair.site.verb("resync", &["--subscription", "s", "--table", "public.t"])?;
    ensure!(said.code == Some(0), "{said:?}");
    pair.site.await_log("table copied", SOON)?;
    pair.site.restart()?;
    pair.assert_equal(&["public"])?;
    // What somebody made again and filled is gone on with, and known from then on.
    pair.site.stop()?;
    pair.subscriber.execute_script(
        "CREATE TABLE filled (LIKE t INCLUDING ALL); INSERT INTO filled SELECT * FROM t; \
         DROP TABLE t; ALTER TABLE filled RENAME TO t",
    )?;
    pair.site.start()?;
    change(&mut pair, 2_000)?;
    pair.site.await_log("gone on with as it is", SOON)?;
    pair.publish("DELETE FROM t")?;
    pair.assert_equal(&["public"])?;
    pair.site.restart()?;
    change(&mut pair, 3_000)
}

/// A dump that is restored has new tables, and that one of them is empty says nothing.
#[test]
fn a_target_that_was_restored_from_a_dump_is_gone_on_with() -> Result<()> {
    let mut pair = streaming("")?;
    pair.publish("DELETE FROM t")?;
    pair.assert_equal(&["public"])?;
    pair.site.stop()?;
    pair.subscriber.execute_script(
        "CREATE TABLE restored AS TABLE farshore.table_copy; \
         DROP TABLE farshore.table_copy; ALTER TABLE restored SET SCHEMA farshore; \
         ALTER TABLE farshore.restored RENAME TO table_copy; \
         ALTER TABLE farshore.table_copy ADD PRIMARY KEY (subscription, schema_name, table_name)",
    )?;
    pair.subscriber.execute_script(MADE_AGAIN)?;
    pair.site.start()?;
    change(&mut pair, 1_000)
}

/// Changes on the publisher alone that differ from those of [`change`] at the same positions.
fn change_otherwise(pair: &Pair, from: u32) -> Result<()> {
    pair.publish(&format!(
        "INSERT INTO t SELECT i, 'other' FROM generate_series({from}, {from} + 99) AS i; \
         SELECT pg_switch_wal()"
    ))
}

/// A copy of the data folder of a site that is stopped.
fn snapshot(site: &Site) -> Result<PathBuf> {
    let kept = site.directory().join("kept");
    copy_tree(&site.directory().join("data"), &kept)?;
    Ok(kept)
}

fn put_back(site: &Site, kept: &Path) -> Result<()> {
    std::fs::remove_dir_all(site.directory().join("data"))?;
    copy_tree(kept, &site.directory().join("data"))
}

/// A snapshot of the machine with publisher and node; the target stays, of which there is a backup
/// of that time. The node is stopped.
fn set_back_but_for_the_target() -> Result<(Pair, Backup)> {
    set_back_after(|_| Ok(()))
}

/// The same, after something more that is lost with it.
fn set_back_after(more: impl FnOnce(&mut Pair) -> Result<()>) -> Result<(Pair, Backup)> {
    let mut pair = streaming("")?;
    pair.site.stop()?;
    let target = pair.subscriber.back_up()?;
    let (backup, kept) = (pair.publisher.back_up()?, snapshot(&pair.site)?);
    pair.site.start()?;
    change(&mut pair, 1_000)?;
    more(&mut pair)?;
    pair.site.stop()?;
    pair.publisher.restore(&backup)?;
    put_back(&pair.site, &kept)?;
    Ok((pair, target))
}

/// Where a copy stands the log may have yet to come to. What transactions have brought it had.
#[test]
fn a_target_that_is_ahead_is_noticed_beside_a_table_that_was_copied_since() -> Result<()> {
    let (mut pair, _) = set_back_after(|pair| {
        pair.publish(
            "CREATE TABLE joined (id integer PRIMARY KEY); INSERT INTO joined VALUES (1)",
        )?;
        pair.await_copy("joined")
    })?;
    pair.site.start()?;
    copied_anew_as_told(&mut pair, "the target has applied up to")
}

#[test]
fn a_target_that_is_ahead_of_what_was_set_back_is_noticed_and_remembered() -> Result<()> {
    let (mut pair, _) = set_back_but_for_the_target()?;
    let applied = pair.subscriber_says("SELECT applied FROM farshore.subscription")?;
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("s", "the target has applied up to")?;
    ensure!(state == "stopped" && error.contains("remembered"), "{state}: {error}");
    for from in [5_000, 6_000] {
        change_otherwise(&pair, from)?;
    }
    pair.await_stored(&pair.site, &applied)?;
    let resumed = pair.site.verb("resume", &["--subscription", "s"])?;
    let (state, _) = pair.site.await_trouble("s", "the target has applied up to")?;
    ensure!(state == "stopped", "{state} after {resumed:?}");
    pair.site.restart()?;
    let (state, _) = pair.site.await_trouble("s", "the target has applied up to")?;
    ensure!(state == "stopped", "{state} after a restart");
    pair.site.stop()?;
    pair.subscriber
        .execute_script("DROP SCHEMA farshore CASCADE; TRUNCATE t, farshore_marks.mark")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.site.restart()?;
    change(&mut pair, 7_000)
}

/// Does what the messages say for a subscription that cannot go on.
fn copied_anew_as_told(pair: &mut Pair, text: &str) -> Result<()> {
    let (state, error) = pair.site.await_trouble("s", text)?;
    ensure!(
        state == "stopped" && error.contains("farshore resync SITE.toml --subscription s"),
        "{error}"
    );
    let resync = pair.site.verb("resync", &["--subscription", "s"])?;
    ensure!(resync.code == Some(0), "{resync:?}");
    pair.site.verb("resume", &["--subscription", "s"])?;
    pair.site.restart()?;
    pair.assert_equal(&["public"])?;
    change(pair, 9_000)?;
    pair.site.restart()?;
    change(pair, 9_500)
}

#[test]
fn a_target_that_is_ahead_is_copied_anew_as_the_message_says() -> Result<()> {
    let (mut pair, _) = set_back_but_for_the_target()?;
    pair.site.start()?;
    copied_anew_as_told(&mut pair, "the target has applied up to")
}

#[test]
fn what_lost_its_slot_is_copied_anew_as_the_message_says() -> Result<()> {
    let mut pair = streaming("")?;
    pair.site.stop()?;
    pair.drop_slot()?;
    change_otherwise(&pair, 5_000)?;
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("p", "is gone from")?;
    ensure!(state == "stopped" && error.contains("data_dir/publications/p"), "{error}");
    pair.site.stop()?;
    std::fs::remove_dir_all(pair.site.directory().join("data/publications/p"))?;
    pair.site.start()?;
    copied_anew_as_told(&mut pair, "the store no longer has changes")
}

/// As a major upgrade does: the same tables in another cluster, which has no slot.
#[test]
fn what_follows_another_cluster_is_copied_anew_as_the_messages_say() -> Result<()> {
    let mut pair = streaming("")?;
    pair.site.stop()?;
    let before = pair.site.url_of(&pair.publisher, "postgres");
    let identifier = "SELECT system_identifier FROM pg_control_system()";
    let was = pair.publisher_says(identifier)?;
    pair.publisher = publisher_cluster(18)?.start()?;
    let is = pair.publisher_says(identifier)?;
    ensure!(was != is, "both clusters have the system identifier {is}");
    pair.publish(
        "CREATE SCHEMA farshore_marks; CREATE TABLE farshore_marks.mark (id bigint PRIMARY KEY)",
    )?;
    pair.publish(SCHEMA)?;
    pair.publish("INSERT INTO t SELECT i, 'upgraded' FROM generate_series(51, 150) AS i")?;
    let now = pair.site.url_of(&pair.publisher, "postgres");
    pair.site.replace(&before, &now)?;
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("p", "To copy everything anew")?;
    ensure!(state == "stopped" && error.contains("data_dir/publications/p"), "{error}");
    pair.site.stop()?;
    std::fs::remove_dir_all(pair.site.directory().join("data/publications/p"))?;
    pair.site.start()?;
    // A table is not all of them.
    let (state, error) = pair.site.await_trouble("s", "another publisher")?;
    ensure!(state == "stopped", "{state}: {error}");
    let one = pair.site.verb("resync", &["--subscription", "s", "--table", "public.t"])?;
    ensure!(one.code == Some(0), "{one:?}");
    pair.site.verb("resume", &["--subscription", "s"])?;
    let (state, error) = pair.site.await_trouble("s", "another publisher")?;
    ensure!(state == "stopped", "{state}: {error}");
    let rows = pair.subscriber_says("SELECT count(*) FROM t WHERE v = 'v'")?;
    ensure!(rows == "100", "{rows} rows of the publisher before");
    copied_anew_as_told(&mut pair, "another publisher")?;
    let noted = pair.subscriber_says("SELECT publisher FROM farshore.subscription")?;
    ensure!(noted == is, "noted as {noted}");
    Ok(())
}

/// The log is kept for it again from then on.
#[test]
fn what_retention_dropped_is_copied_anew_as_the_message_says() -> Result<()> {
    let mut pair = streaming("segment_size = \"64KB\"\nretention_size = \"256KB\"")?;
    pair.site.verb("pause", &["--subscription", "s"])?;
    let at_first = pair.site.status()?["publications"][0]["store_start"].clone();
    wait_until("the log to be dropped", SOON, &[&pair.site.log_path()], || {
        pair.publish(
            "UPDATE t SET v = (SELECT string_agg(md5(random()::text || t.id || n), '') \
             FROM generate_series(1, 30) AS n)",
        )?;
        Ok((pair.site.status()?["publications"][0]["store_start"] != at_first).then_some(()))
    })?;
    pair.site.verb("resume", &["--subscription", "s"])?;
    copied_anew_as_told(&mut pair, "the store no longer has changes")
}

/// It is seen for the first time when the store has as much again, and its tables stood at
/// different points.
#[test]
fn a_target_that_is_ahead_is_noticed_also_when_it_is_reached_late() -> Result<()> {
    let (mut pair, earlier) = set_back_but_for_the_target()?;
    let applied = pair.subscriber_says("SELECT applied FROM farshore.subscription")?;
    pair.subscriber.execute_script("UPDATE farshore.subscription SET state = 'catching-up'")?;
    pair.subscriber.stop(StopMode::Fast)?;
    pair.site.start()?;
    for from in [5_000, 6_000] {
        change_otherwise(&pair, from)?;
    }
    pair.await_stored(&pair.site, &applied)?;
    pair.subscriber.start()?;
    let (state, error) = pair.site.await_trouble("s", "the target has applied up to")?;
    ensure!(state == "stopped", "{state}: {error}");
    // Set back as well, it is what the publisher was.
    pair.subscriber.restore(&earlier)?;
    pair.site.restart()?;
    pair.assert_equal(&["public"])?;
    pair.site.restart()?;
    change(&mut pair, 7_000)
}

/// Nothing was set back: the first copy to a target that is reached late begins where the log is by
/// then, and is cut off before it has anything of a table.
#[test]
fn a_first_copy_that_begins_late_and_is_cut_off_goes_on() -> Result<()> {
    let mut pair = Pair::new(Direction::UP, &["public.*"], "CREATE TABLE t (id int PRIMARY KEY)")?;
    pair.subscriber.stop(StopMode::Fast)?;
    pair.site.start()?;
    pair.site.await_trouble("s", "cannot connect")?;
    pair.publish("INSERT INTO t SELECT generate_series(1, 1000)")?;
    pair.await_stored(&pair.site, &pair.publisher_says("SELECT pg_current_wal_lsn()")?)?;
    // A snapshot that others can use waits for whoever writes.
    let mut writing = pair.publisher.connect()?;
    writing.batch_execute("BEGIN; INSERT INTO t VALUES (0)")?;
    pair.subscriber.start()?;
    wait_until("the copy to be noted", SOON, &[&pair.site.log_path()], || {
        let noted = pair.subscriber_says("SELECT state FROM farshore.subscription");
        Ok(noted.is_ok_and(|state| state == "copying").then_some(()))
    })?;
    pair.subscriber.execute_script(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
         WHERE application_name LIKE 'farshore %'",
    )?;
    writing.batch_execute("COMMIT")?;
    pair.assert_equal(&["public"])
}

/// What a site downstream has lost it fetches again, of the same log.
#[test]
fn a_store_downstream_that_was_set_back_goes_on() -> Result<()> {
    let (mut pair, mut upstream) = downstream()?;
    let kept = snapshot(&pair.site)?;
    upstream.site.start()?;
    pair.site.start()?;
    change(&mut pair, 2_000)?;
    pair.site.stop()?;
    put_back(&pair.site, &kept)?;
    pair.site.start()?;
    wait_until("the rest to be fetched", SOON, &[&pair.site.log_path()], || {
        let status = pair.site.status()?;
        let state = status["subscriptions"][0]["state"].as_str().unwrap_or_default().to_owned();
        if state == "stopped" {
            pair.site.verb("resume", &["--subscription", "s"])?;
        }
        Ok((state == "streaming").then_some(()))
    })?;
    pair.site.restart()?;
    change(&mut pair, 3_000)
}

#[test]
fn a_store_upstream_that_was_set_back_with_its_publisher_is_noticed() -> Result<()> {
    a_store_upstream_is_set_back(|_| Ok(()))
}

/// All that the site downstream had was applied, and has left its log.
#[test]
fn it_is_noticed_also_where_nothing_is_left_to_compare() -> Result<()> {
    a_store_upstream_is_set_back(|pair| {
        let before = pair.publisher_says("SELECT pg_current_wal_lsn()")?;
        // So large that its segment is not kept for more to come.
        pair.publish(
            "INSERT INTO t SELECT i, string_agg(md5(random()::text), '') \
             FROM generate_series(3001, 3600) AS i, generate_series(1, 200) GROUP BY i",
        )?;
        wait_until("the log to be dropped", SOON, &[&pair.site.log_path()], || {
            let start = pair.site.status()?["publications"][0]["store_start"].clone();
            let start = start.as_str().unwrap_or_default();
            let dropped = format!("SELECT '{start}'::pg_lsn - '{before}' > 1000000");
            Ok((pair.publisher_says(&dropped)? == "t").then_some(()))
        })
    })
}

/// A snapshot of the machine with publisher and upstream site. Nobody looks before that site's log
/// has come past what the one downstream has.
fn a_store_upstream_is_set_back(before: impl FnOnce(&mut Pair) -> Result<()>) -> Result<()> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.on_both(SCHEMA)?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url("postgres");
    pair.add_subscription("s", "p", &target)?;
    let mut upstream = Upstream::split(&mut pair)?;
    upstream.site.start()?;
    pair.site.start()?;
    change(&mut pair, 1_000)?;
    upstream.site.stop()?;
    let (backup, kept) = (pair.publisher.back_up()?, snapshot(&upstream.site)?);
    // Nothing was lost: what the site downstream has is there.
    pair.publisher.restore(&backup)?;
    put_back(&upstream.site, &kept)?;
    upstream.site.start()?;
    change(&mut pair, 2_000)?;
    before(&mut pair)?;
    let had = pair.publisher_says("SELECT pg_current_wal_lsn()")?;
    pair.site.stop()?;
    upstream.site.stop()?;
    pair.publisher.restore(&backup)?;
    put_back(&upstream.site, &kept)?;
    upstream.site.start()?;
    go_past(&pair, &upstream, &had)?;
    pair.site.start()?;
    for _ in 0..2 {
        let (state, error) = pair.site.await_trouble("up/p", "has gone on with other changes")?;
        ensure!(state == "stopped" && error.contains("To begin anew"), "{state}: {error}");
        pair.site.restart()?;
    }
    Ok(())
}

/// A publisher and two sites, the target at the one downstream. Both are stopped.
fn downstream() -> Result<(Pair, Upstream)> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.on_both(SCHEMA)?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url("postgres");
    pair.add_subscription("s", "p", &target)?;
    let mut upstream = Upstream::split(&mut pair)?;
    upstream.site.start()?;
    pair.site.start()?;
    change(&mut pair, 1_000)?;
    pair.site.stop()?;
    upstream.site.stop()?;
    Ok((pair, upstream))
}

/// Other changes, until the upstream site's log has come past `had`.
fn go_past(pair: &Pair, upstream: &Upstream, had: &str) -> Result<()> {
    // Behind all that is changed later, however often it takes.
    let mut from = 20_000;
    wait_until("the upstream store to get there", SOON, &[&upstream.site.log_path()], || {
        change_otherwise(pair, from)?;
        from += 1_000;
        let durable = upstream.site.status()?["publications"][0]["durable"].clone();
        let durable = durable.as_str().filter(|durable| !durable.is_empty()).unwrap_or("0/0");
        let reached = pair.publisher_says(&format!("SELECT '{durable}'::pg_lsn > '{had}'"))?;
        Ok((reached == "t").then_some(()))
    })
}

/// A snapshot of every machine but the target's.
#[test]
fn a_target_downstream_of_what_was_set_back_is_noticed() -> Result<()> {
    let (mut pair, mut upstream) = downstream()?;
    let backup = pair.publisher.back_up()?;
    let (up, down) = (snapshot(&upstream.site)?, snapshot(&pair.site)?);
    upstream.site.start()?;
    pair.site.start()?;
    change(&mut pair, 2_000)?;
    pair.site.stop()?;
    upstream.site.stop()?;
    let had = pair.subscriber_says("SELECT applied FROM farshore.subscription")?;
    pair.publisher.restore(&backup)?;
    put_back(&upstream.site, &up)?;
    put_back(&pair.site, &down)?;
    upstream.site.start()?;
    go_past(&pair, &upstream, &had)?;
    pair.site.start()?;
    // It may look before that log has come here: then it says to go on once it has.
    wait_until("it to be noticed", SOON, &[&pair.site.log_path()], || {
        let subscription = pair.site.status()?["subscriptions"][0].clone();
        let error = subscription["error"].as_str().unwrap_or_default();
        if error.contains("farshore resume, once it has") {
            pair.site.verb("resume", &["--subscription", "s"])?;
        }
        ensure!(subscription["state"] != "streaming", "not noticed");
        Ok(error.contains("is not in the log here").then_some(()))
    })?;
    pair.site.restart()?;
    copied_anew_as_told(&mut pair, "is not in the log here")
}

/// The publisher was set back, and both sites begin anew; the targets were emptied by hand, and what
/// the subscription has noted there was not.
#[test]
fn a_log_that_was_begun_anew_does_not_go_on_from_the_old_ones_position() -> Result<()> {
    let (mut pair, mut upstream) = downstream()?;
    let backup = pair.publisher.back_up()?;
    upstream.site.start()?;
    pair.site.start()?;
    change(&mut pair, 2_000)?;
    pair.site.stop()?;
    upstream.site.stop()?;
    let had = pair.subscriber_says("SELECT applied FROM farshore.subscription")?;
    pair.publisher.restore(&backup)?;
    pair.drop_slot()?;
    for site in [&upstream.site, &pair.site] {
        std::fs::remove_dir_all(site.directory().join("data"))?;
    }
    pair.subscriber.execute_script("TRUNCATE t, farshore_marks.mark")?;
    upstream.site.start()?;
    go_past(&pair, &upstream, &had)?;
    pair.site.start()?;
    wait_until("it to be noticed", SOON, &[&pair.site.log_path()], || {
        let subscription = pair.site.status()?["subscriptions"][0].clone();
        let error = subscription["error"].as_str().unwrap_or_default();
        ensure!(subscription["state"] != "streaming", "not noticed");
        Ok(error.contains("farshore resync SITE.toml --subscription s").then_some(()))
    })?;
    copied_anew_as_told(&mut pair, "subscription \"s\"")
}

/// An old copy of the publisher was at its address for a while.
#[test]
fn the_right_publisher_is_gone_on_with_once_it_is_back() -> Result<()> {
    let mut pair = streaming("")?;
    let old = pair.publisher.back_up()?;
    change(&mut pair, 1_000)?;
    let right = pair.publisher.back_up()?;
    pair.publisher.restore(&old)?;
    let (state, error) = pair.site.await_trouble("p", "was set back")?;
    ensure!(state == "stopped" && error.contains("and remembered"), "{state}: {error}");
    for from in [5_000, 6_000] {
        change_otherwise(&pair, from)?;
    }
    pair.site.restart()?;
    let (state, _) = pair.site.await_trouble("p", "was set back")?;
    ensure!(state == "stopped", "{state} after a restart");
    pair.publisher.restore(&right)?;
    let resumed = pair.site.verb("resume", &["--publication", "p"])?;
    ensure!(resumed.code == Some(0), "{resumed:?}");
    pair.site.await_log("is forgotten", SOON)?;
    pair.site.restart()?;
    change(&mut pair, 2_000)?;
    let checked = pair.site.verb("check", &[])?;
    ensure!(!checked.stdout.contains("was set back"), "{checked:?}");
    Ok(())
}

/// What is done again in a copy of the server stands at the same positions, under the same
/// transaction ids.
#[test]
fn the_publisher_from_a_backup_that_does_the_same_again_is_noticed() -> Result<()> {
    let mut pair = streaming("")?;
    pair.site.stop()?;
    let backup = pair.publisher.back_up()?;
    // Whatever else the server logs in between would show as other positions: tried again then.
    let done = |pair: &mut Pair, v: &str| -> Result<String> {
        let mut client = pair.publisher.connect()?;
        for id in 1_000..1_005 {
            client.execute("INSERT INTO t VALUES ($1, $2)", &[&id, &v])?;
        }
        let last =
            "SELECT pg_current_wal_lsn()::text || ' ' || (SELECT xmin FROM t WHERE id = 1004)";
        Ok(client.query_one(last, &[])?.get(0))
    };
    let first = done(&mut pair, "first")?;
    pair.site.start()?;
    pair.site.wait_for("the changes to arrive", SOON, || {
        let there = "SELECT count(*) FROM t WHERE v = 'first'";
        Ok((pair.subscriber.connect()?.query_one(there, &[])?.get::<_, i64>(0) == 5).then_some(()))
    })?;
    pair.site.stop()?;
    let mut again = String::new();
    for _ in 0..20 {
        pair.publisher.restore(&backup)?;
        again = done(&mut pair, "again")?;
        if again == first {
            break;
        }
    }
    ensure!(again == first, "{again} instead of {first}");
    change_otherwise(&pair, 5_000)?;
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("p", "has written other changes since")?;
    ensure!(state == "stopped", "{state}: {error}");
    Ok(())
}

/// Nothing is left in the store of what the slot would give again.
#[test]
fn the_publisher_from_a_backup_is_noticed_also_when_the_store_has_dropped_the_rest() -> Result<()> {
    let mut pair = streaming("")?;
    let backup = pair.publisher.back_up()?;
    pair.publish(
        "UPDATE t SET v = (SELECT string_agg(md5(random()::text), '') \
         FROM generate_series(1, 1500 + t.id))",
    )?;
    change(&mut pair, 1_000)?;
    wait_until("the store to be empty", SOON, &[&pair.site.log_path()], || {
        let publication = pair.site.status()?["publications"][0].clone();
        let bytes = publication["store_bytes"].as_u64().unwrap_or(u64::MAX);
        Ok((bytes < 10_000).then_some(()))
    })?;
    pair.site.stop()?;
    pair.publisher.restore(&backup)?;
    for from in [5_000, 6_000] {
        change_otherwise(&pair, from)?;
    }
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("p", "has written other changes since")?;
    ensure!(
        state == "stopped" && error.contains("not have the transaction at"),
        "{state}: {error}"
    );
    Ok(())
}

/// It lost nothing that was published. But the store has passed what it writes since.
#[test]
fn the_publisher_from_a_backup_of_a_quiet_time_is_noticed() -> Result<()> {
    let mut pair = streaming("")?;
    pair.site.stop()?;
    let backup = pair.publisher.back_up()?;
    pair.publish(
        "CREATE SCHEMA unpublished; CREATE TABLE unpublished.u (i integer); \
                  SELECT pg_switch_wal(); INSERT INTO unpublished.u VALUES (1)",
    )?;
    let position = pair.publisher_says("SELECT pg_current_wal_lsn()")?;
    pair.site.start()?;
    pair.await_stored(&pair.site, &position)?;
    pair.site.stop()?;
    pair.publisher.restore(&backup)?;
    for from in [5_000, 6_000] {
        change_otherwise(&pair, from)?;
    }
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("p", "has written other changes since")?;
    ensure!(state == "stopped", "{state}: {error}");
    Ok(())
}
