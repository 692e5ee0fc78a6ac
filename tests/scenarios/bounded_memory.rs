//! Memory does not grow with the size of a transaction, nor beyond a few of the largest values.
//!
//! - `FARSHORE_ROWS`: rows of the large transactions (default 1,250,000; `make stress` has
//!   5,000,000). With more, memory may be more in proportion.
//! - `FARSHORE_BIG_VALUES`: values of 10 MB (default 60).

use anyhow::{Context, Result, ensure};
use farshore_testkit::checksum;
use farshore_testkit::postgres::{Cluster, Installation};
use farshore_tests::{DATABASE, Direction, Pair, Upstream, subscriber_cluster};
use postgres::Client;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

const PEAK_RSS_BYTES_MAX: u64 = 256 << 20;
const ROWS: i64 = 1_250_000;
/// While so many rows are written in one transaction.
const PEAK_RSS_BYTES_MAX_AT_ROWS: u64 = 64 << 20;
const VALUE_BYTES: usize = 10_000_000;

/// Each scenario keeps two servers busy; they take turns.
static TURN: Mutex<()> = Mutex::new(());

fn take_turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn number(variable: &str, default: i64) -> Result<i64> {
    match std::env::var(variable) {
        Ok(text) => text.parse().with_context(|| format!("{variable}={text} is no number")),
        Err(_) => Ok(default),
    }
}

/// As [`Pair::new`], with the publisher's usual memory for decoding.
fn pair(schema: &str) -> Result<Pair> {
    let publisher = Cluster::builder(&Installation::find(Direction::UP.publisher)?)
        .setting("wal_level", "logical")
        .setting("max_wal_size", "4GB")
        .start()?;
    let subscriber = subscriber_cluster(Direction::UP.subscriber)?.setting("max_wal_size", "4GB");
    let mut pair = Pair::of(publisher, subscriber.start()?)?;
    pair.patience = Duration::from_secs(600);
    pair.on_both(schema)?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target)?;
    Ok(pair)
}

fn assert_bounded(pair: &mut Pair, what: &str) -> Result<()> {
    assert_within(pair, PEAK_RSS_BYTES_MAX, what)
}

fn assert_within(pair: &mut Pair, bound: u64, what: &str) -> Result<()> {
    let peak = pair.site.farshore()?.peak_rss_bytes();
    println!("{what}: peak RSS {} MB", peak >> 20);
    ensure!(peak <= bound, "{what}: peak RSS {} MB, at most {} MB", peak >> 20, bound >> 20);
    Ok(())
}

#[test]
fn transactions_of_millions_of_rows() -> Result<()> {
    let _turn = take_turn();
    let rows = number("FARSHORE_ROWS", ROWS)?;
    let bound = PEAK_RSS_BYTES_MAX_AT_ROWS * rows.max(ROWS) as u64 / ROWS as u64;
    let mut pair = pair("CREATE TABLE wide (id bigint PRIMARY KEY, a integer, t text)")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    let insert = |from: i64| {
        format!(
            "INSERT INTO wide SELECT i, i % 1000, 'row ' || i || ' of a large transaction' \
             FROM generate_series({from}, {}) AS i",
            from + rows - 1
        )
    };
    let mut begin = Instant::now();
    let mut lap = |what: &str| {
        println!("{what}: {:?}", begin.elapsed());
        begin = Instant::now();
    };
    pair.publish(&format!("BEGIN; {}; ROLLBACK", insert(0)))?;
    lap("aborted transaction written");
    pair.await_arrival()?;
    lap("aborted transaction passed");
    assert_within(&mut pair, bound, "aborted transaction")?;
    pair.publish(&insert(0))?;
    lap("committed transaction written");
    pair.await_arrival()?;
    lap("committed transaction applied");
    assert_within(&mut pair, bound, "committed transaction")?;
    let (source, target) = (pair.publisher.url(DATABASE), pair.subscriber.url(DATABASE));
    checksum::assert_equal(&source, &target, &["public.wide"])?;
    lap("compared");
    let status = pair.site.status()?;
    println!("store: {} bytes", status["publications"][0]["store_bytes"]);
    pair.site.stop()?;
    Ok(())
}

/// What is kept for each table is little.
#[test]
fn a_transaction_of_a_million_rows_over_many_tables() -> Result<()> {
    const TABLES: i64 = 800;
    let _turn = take_turn();
    let rows = 1_000_000 / TABLES;
    // Not in one transaction: that would take more locks than a server has room for.
    let create = |from: i64| {
        format!(
            "DO $$ BEGIN FOR n IN {from}..{} LOOP EXECUTE format( \
             'CREATE TABLE many_%s (id bigint PRIMARY KEY, a integer, v text)', n); \
             END LOOP; END $$",
            from + TABLES / 4 - 1
        )
    };
    let mut pair = pair(&create(1))?;
    for quarter in 1..4 {
        pair.on_both(&create(quarter * TABLES / 4 + 1))?;
    }
    pair.site.start()?;
    pair.await_arrival()?;
    assert_bounded(&mut pair, "copies of many tables")?;
    pair.publish(&format!(
        "DO $$ BEGIN FOR n IN 1..{TABLES} LOOP EXECUTE format('INSERT INTO many_%s \
         SELECT i, {rows} - i, ''row '' || i FROM generate_series(1, {rows}) AS i', n); \
         END LOOP; END $$"
    ))?;
    pair.await_arrival()?;
    assert_bounded(&mut pair, "inserts into many tables")?;
    let (source, target) = (pair.publisher.url(DATABASE), pair.subscriber.url(DATABASE));
    let tables: Vec<String> = (1..=TABLES).map(|n| format!("public.many_{n}")).collect();
    let tables: Vec<&str> = tables.iter().map(String::as_str).collect();
    checksum::assert_equal(&source, &target, &tables)?;
    pair.site.stop()?;
    Ok(())
}

/// Bytes that do not compress, different for every seed.
fn noise(seed: i64) -> Vec<u8> {
    let mut state = (seed as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(VALUE_BYTES + 8);
    while bytes.len() < VALUE_BYTES {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(VALUE_BYTES);
    bytes
}

/// Printable, and hardly compressible for the server.
fn letters(seed: i64) -> String {
    noise(seed).iter().map(|byte| char::from(b'0' + byte % 75)).collect()
}

fn insert_value(client: &mut impl postgres::GenericClient, id: i64) -> Result<()> {
    let (text, bytes) = match id % 4 {
        0 => (None, Some(noise(id))),
        1 => (Some(letters(id)), None),
        2 => (Some("compressible ".repeat(VALUE_BYTES / 13)), None),
        _ => (None, Some(vec![u8::try_from(id % 251)?; VALUE_BYTES])),
    };
    let insert = "INSERT INTO big VALUES ($1, 'value', $2, $3)";
    client.execute(insert, &[&id, &text, &bytes]).map(drop).context("insert a large value")
}

fn insert_in_one_transaction(client: &mut Client, ids: std::ops::Range<i64>) -> Result<()> {
    let mut transaction = client.transaction()?;
    for id in ids {
        insert_value(&mut transaction, id)?;
    }
    Ok(transaction.commit()?)
}

fn big_values(schema: &str, values: i64) -> Result<()> {
    let mut pair = pair(schema)?;
    let mut client = pair.publisher.connect()?;
    let third = values / 3;
    for id in 0..third {
        insert_value(&mut client, id)?;
    }
    pair.site.start()?;
    pair.await_arrival()?;
    assert_bounded(&mut pair, "initial copy")?;
    for id in third..2 * third {
        insert_value(&mut client, id)?;
    }
    pair.await_arrival()?;
    assert_bounded(&mut pair, "one value in a transaction")?;
    insert_in_one_transaction(&mut client, 2 * third..values)?;
    pair.await_arrival()?;
    assert_bounded(&mut pair, "many values in a transaction")?;
    client.batch_execute(
        "UPDATE big SET note = 'unchanged values' WHERE id % 3 = 0; \
         UPDATE big SET id = id + 1000 WHERE id % 5 = 0; DELETE FROM big WHERE id % 7 = 0",
    )?;
    client.batch_execute("UPDATE big SET t = t || 'x', b = b || '\\x00' WHERE id % 11 = 0")?;
    client.batch_execute(
        "BEGIN; SAVEPOINT a; INSERT INTO big SELECT id + 2000, note, t, b FROM big WHERE id < 15; \
         ROLLBACK TO a; INSERT INTO big SELECT id + 3000, note, t, b FROM big WHERE id < 5; COMMIT",
    )?;
    pair.await_arrival()?;
    assert_bounded(&mut pair, "updates and savepoints")?;
    let (source, target) = (pair.publisher.url(DATABASE), pair.subscriber.url(DATABASE));
    checksum::assert_equal(&source, &target, &["public.big"])?;
    pair.site.stop()?;
    Ok(())
}

const BIG: &str = "CREATE TABLE big (id bigint PRIMARY KEY, note text, t text, b bytea);";

#[test]
fn values_of_10_mb() -> Result<()> {
    let _turn = take_turn();
    big_values(BIG, number("FARSHORE_BIG_VALUES", 60)?)
}

/// The stream is textual because of one column elsewhere, so that a bytea takes twice its size.
#[test]
fn values_of_10_mb_as_text() -> Result<()> {
    let _turn = take_turn();
    let schema = format!(
        "{BIG} CREATE TYPE pair AS (x integer, y integer); CREATE TABLE p (id integer PRIMARY KEY, p pair)"
    );
    big_values(&schema, number("FARSHORE_BIG_VALUES", 60)? / 3)
}

/// So many times its largest row is what a node may hold (it is twice mostly): as it came, as it is
/// stored or read, and as it goes on.
const ROWS_IN_MEMORY: u64 = 4;

/// Values of hundreds of megabytes, over a link: memory is a few times the largest row, and nothing
/// is lost.
#[test]
fn values_of_hundreds_of_megabytes() -> Result<()> {
    let _turn = take_turn();
    // Not compressed: what is written is what travels.
    let schema = format!("{BIG} ALTER TABLE big ALTER t SET STORAGE EXTERNAL");
    let mut pair = pair(&schema)?;
    let insert = |id: i64, text_mb: i64, bytes_mb: i64| {
        format!(
            "INSERT INTO big SELECT {id}, 'v', repeat('{id} megabytes of text. ', {text_mb} * 50000), \
             decode(repeat(md5('{id}'), {bytes_mb} * 62500), 'hex')"
        )
    };
    let mut upstream = Upstream::split(&mut pair)?;
    pair.publish(&insert(1, 100, 200))?;
    upstream.site.start()?;
    pair.site.start()?;
    pair.await_arrival()?;
    pair.publish(&insert(2, 250, 0))?;
    pair.publish(&insert(3, 0, 300))?;
    pair.publish("UPDATE big SET note = 'all large values unchanged'")?;
    pair.publish("UPDATE big SET id = 10 WHERE id = 2")?;
    pair.await_arrival()?;
    let (source, target) = (pair.publisher.url(DATABASE), pair.subscriber.url(DATABASE));
    checksum::assert_equal(&source, &target, &["public.big"])?;
    let largest = "SELECT max(coalesce(octet_length(t), 0) + coalesce(length(b), 0)) FROM big";
    let largest: u64 = pair.publisher_says(largest)?.parse()?;
    for (what, site) in [("upstream", &mut upstream.site), ("downstream", &mut pair.site)] {
        let peak = site.farshore()?.peak_rss_bytes();
        println!("{what}: a row of {} MB, peak RSS {} MB", largest >> 20, peak >> 20);
        ensure!(peak < ROWS_IN_MEMORY * largest, "{what}: {peak} bytes, the largest row {largest}");
        site.stop()?;
    }
    Ok(())
}

/// Old and new row travel with every change, both with their large values.
#[test]
fn values_of_10_mb_with_full_identity() -> Result<()> {
    let _turn = take_turn();
    let schema = format!("{BIG} ALTER TABLE big REPLICA IDENTITY FULL");
    big_values(&schema, number("FARSHORE_BIG_VALUES", 60)? / 3)
}
