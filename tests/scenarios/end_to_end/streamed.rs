//! Transactions that the publisher sends before it knows whether they commit.

use anyhow::{Context, Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{Pair, both_ways};
use postgres::Client;
use std::time::Duration;

const SCHEMA: &str = "
    CREATE TABLE a (id bigint PRIMARY KEY, session integer, filler text);
    CREATE TABLE b (id bigint PRIMARY KEY, v text);
    CREATE TABLE c (session integer, n integer, PRIMARY KEY (session, n));";

/// Blocks of changes that the slot has streamed before their commits.
fn streamed_blocks(client: &mut Client) -> Result<i64> {
    let query = "SELECT coalesce(sum(stream_count), 0)::bigint FROM pg_stat_replication_slots";
    Ok(client.query_one(query, &[])?.get(0))
}

/// Rows from `from` on, some 150 KB of log: more than the publisher keeps in memory.
fn insert(session: &mut Client, number: i32, from: i64) -> Result<()> {
    let insert = "INSERT INTO a SELECT i, $1, repeat(md5(i::text), 4) \
                  FROM generate_series($2::bigint, $2 + 699) AS i";
    session.execute(insert, &[&number, &from]).map(drop).context("insert")
}

#[test]
fn interleaved_streams_with_nested_aborts() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::new(direction, &["public.*"], SCHEMA)?;
        pair.publish("INSERT INTO b SELECT i, 'old' FROM generate_series(1, 1000) AS i")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        let mut watch = pair.publisher.connect()?;
        let mut sessions = (0..6).map(|_| pair.publisher.connect()).collect::<Result<Vec<_>>>()?;
        for session in &mut sessions {
            session.batch_execute("BEGIN")?;
        }
        let mut next_id = 0;
        for round in 0..5 {
            for (number, session) in (0..).zip(&mut sessions) {
                let before = streamed_blocks(&mut watch)?;
                session.batch_execute(&format!("SAVEPOINT round_{round}"))?;
                for depth in 0..4 {
                    session.batch_execute(&format!("SAVEPOINT depth_{depth}"))?;
                    insert(session, number, next_id)?;
                    next_id += 700;
                    let update = format!("UPDATE b SET v = v || '{depth}' WHERE id % 6 = {number}");
                    session.batch_execute(&update)?;
                }
                // Each session and round gives up something else: one level, several, all, none,
                // or a level below one that was released.
                match (round + number) % 5 {
                    0 => session.batch_execute("ROLLBACK TO depth_2")?,
                    1 => session.batch_execute("ROLLBACK TO depth_1; ROLLBACK TO depth_0")?,
                    2 => session.batch_execute(&format!("ROLLBACK TO round_{round}"))?,
                    3 => session
                        .batch_execute("RELEASE depth_3; RELEASE depth_2; ROLLBACK TO depth_1")?,
                    _ => session.batch_execute("RELEASE depth_1")?,
                }
                insert(session, number, next_id)?;
                next_id += 700;
                // The publisher has sent some of it before the next session goes on.
                let log = pair.site.log_path();
                let log = &[log.as_path()];
                wait_until("a block to be streamed", Duration::from_secs(30), log, || {
                    Ok((streamed_blocks(&mut watch)? > before).then_some(()))
                })?;
            }
            // Short transactions of others in between.
            pair.publish(&format!("INSERT INTO c VALUES (100, {round})"))?;
        }
        // Not in the order that they began in; one is given up altogether.
        for number in [3, 0, 5] {
            sessions[number].batch_execute("COMMIT")?;
        }
        sessions[1].batch_execute("ROLLBACK")?;
        pair.assert_equal(&["public"])?;
        // A node that is killed gets the rest anew, from their beginnings.
        pair.site.kill9()?;
        insert(&mut sessions[2], 2, next_id)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        sessions[4].batch_execute("COMMIT")?;
        sessions[2].batch_execute("COMMIT")?;
        pair.assert_equal(&["public"])?;
        let rows = pair.subscriber_says("SELECT count(DISTINCT session) FROM a")?;
        ensure!(rows == "5", "{rows} sessions left rows");
        let files = farshore_files(&pair, "spill")?;
        ensure!(files.len() <= 5, "spills of transactions that ended are left behind: {files:?}");
        Ok(())
    })
}

#[test]
fn a_session_that_dies_in_a_streamed_transaction_leaves_nothing() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::new(direction, &["public.*"], SCHEMA)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        let mut watch = pair.publisher.connect()?;
        let mut session = pair.publisher.connect()?;
        session.batch_execute("BEGIN; SAVEPOINT a")?;
        insert(&mut session, 1, 0)?;
        session.batch_execute("SAVEPOINT b")?;
        insert(&mut session, 1, 1_000)?;
        wait_until("a block to be streamed", Duration::from_secs(30), &[], || {
            Ok((streamed_blocks(&mut watch)? > 0).then_some(()))
        })?;
        drop(session);
        pair.publish("INSERT INTO c VALUES (1, 1)")?;
        // A crash writes no abort record: the transaction just never goes on.
        let mut session = pair.publisher.connect()?;
        session.batch_execute("BEGIN")?;
        insert(&mut session, 2, 5_000)?;
        let before = streamed_blocks(&mut watch)?;
        insert(&mut session, 2, 6_000)?;
        wait_until("a block to be streamed", Duration::from_secs(30), &[], || {
            Ok((streamed_blocks(&mut watch)? > before).then_some(()))
        })?;
        pair.publisher.kill9()?;
        pair.publisher.start()?;
        pair.publish("INSERT INTO c VALUES (2, 1)")?;
        pair.assert_equal(&["public"])?;
        assert_eq!(pair.subscriber_says("SELECT count(*) FROM a")?, "0");
        Ok(())
    })
}

/// Files of the store whose path has `word` in it.
fn farshore_files(pair: &Pair, word: &str) -> Result<Vec<std::path::PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![pair.site.directory().join("data")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.to_string_lossy().contains(word) {
                found.push(path);
            }
        }
    }
    Ok(found)
}
