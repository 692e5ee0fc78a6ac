//! A server's log, packed and unpacked: what follows from the rest of it costs nothing on the way,
//! and nothing is lost.

mod running;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use farshore_mirror::receive::Promise;
use farshore_mirror::relay::compression::{Compression, Method, Packer, Unpacker};
use farshore_model::Lsn;
use farshore_testkit::postgres::{Cluster, Installation};
use running::{Mirror, flush_position};
use std::sync::atomic::Ordering::Relaxed;

const ROWS: i32 = 20_000;

fn principal() -> Result<Cluster> {
    let cluster = Cluster::builder(&Installation::find(15)?)
        .setting("wal_level", "replica")
        .setting("wal_keep_size", "1GB")
        .setting("synchronous_commit", "off")
        // Whole pages only where a test wants them.
        .setting("checkpoint_timeout", "1h")
        .start()?;
    cluster.execute_script(&format!(
        "CREATE TABLE accounts (aid int PRIMARY KEY, balance int, filler text); \
         CREATE TABLE history (aid int, at timestamptz DEFAULT now(), filler text); \
         INSERT INTO accounts SELECT g, 0, md5(g::text) FROM generate_series(1, {ROWS}) g"
    ))?;
    Ok(cluster)
}

/// Small transactions of every kind, flushed in the end: so many can be over before the server
/// flushes what nobody waits for.
fn load(cluster: &Cluster, count: i32) -> Result<()> {
    let mut client = cluster.connect()?;
    let change = client.prepare(
        "WITH a AS (UPDATE accounts SET balance = balance + 1 WHERE aid = $1) \
         INSERT INTO history (aid, filler) VALUES ($1, 'history')",
    )?;
    let lock = client.prepare("SELECT FROM accounts WHERE aid = $1 FOR UPDATE")?;
    let delete = client.prepare("DELETE FROM accounts WHERE aid = $1")?;
    let mut aid = 1_i64;
    for number in 0..count {
        aid = aid * 48_271 % 2_147_483_647;
        let statement = match number % 20 {
            7 => &lock,
            13 => &delete,
            _ => &change,
        };
        client.execute(statement, &[&((aid % i64::from(ROWS)) as i32 + 1)])?;
    }
    client.batch_execute("ROLLBACK; BEGIN; DELETE FROM history WHERE aid < 100; ROLLBACK")?;
    client.batch_execute("CREATE TABLE flushed_now (); DROP TABLE flushed_now")?;
    Ok(())
}

/// The log of a server between two positions, from its own files.
fn log(cluster: &Cluster, from: u64, to: u64) -> Result<Vec<u8>> {
    const SEGMENT: u64 = 16 << 20;
    let mut log = Vec::new();
    for number in from / SEGMENT..=to / SEGMENT {
        let name = format!("00000001{:08X}{:08X}", number >> 8, number & 0xFF);
        let path = cluster.data_dir().join("pg_wal").join(&name);
        let bytes = std::fs::read(path).with_context(|| format!("the server's {name}"))?;
        let begin = from.saturating_sub(number * SEGMENT).min(SEGMENT) as usize;
        let end = (to - number * SEGMENT).min(SEGMENT) as usize;
        log.extend_from_slice(&bytes[begin..end]);
    }
    ensure!(log.len() as u64 == to - from, "{} bytes of log", log.len());
    Ok(log)
}

/// Bytes that the log takes in messages of these lengths, again and again.
fn packed(packer: &mut Packer, start: u64, log: &[u8], lengths: &[usize]) -> Result<usize> {
    let mut unpacker = Unpacker::new()?;
    let (mut at, mut packed_bytes) = (0, 0);
    for length in lengths.iter().cycle() {
        let end = (at + length).min(log.len());
        if at == end {
            break;
        }
        let position = Lsn(start + at as u64);
        let message = Bytes::copy_from_slice(&log[at..end]);
        let (packing, packed) = packer.pack_log(position, std::slice::from_ref(&message))?;
        packed_bytes += packed.len();
        let again = unpacker.unpack_log(packing, packed, position, message.len())?;
        ensure!(again == message, "another log at {position}");
        at = end;
    }
    Ok(packed_bytes)
}

#[test]
fn a_servers_log_becomes_smaller_and_stays_the_same() -> Result<()> {
    let principal = principal()?;
    principal.execute_script("CHECKPOINT")?;
    // With whole pages, with none, and over the end of a segment.
    let mut bounds = vec![flush_position(&principal)?];
    for switch in [false, false, true] {
        load(&principal, 6_000)?;
        if switch {
            principal.execute_script("SELECT pg_switch_wal()")?;
            load(&principal, 2_000)?;
        }
        bounds.push(flush_position(&principal)?);
    }
    for (part, bound) in bounds.windows(2).enumerate() {
        let log = log(&principal, bound[0], bound[1])?;
        for lengths in [&[2_000, 7_000, 12_345][..], &[160, 8_192 * 3], &[100_000]] {
            for method in [Method::Zstd(1), Method::Lz4] {
                let packer = || Packer::new(Compression::Fixed(method));
                let before = packed(&mut packer()?, bound[0], &log, lengths)?;
                let records = packed(&mut packer()?.reducing(false), bound[0], &log, lengths)?;
                let after = packed(&mut packer()?.reducing(true), bound[0], &log, lengths)?;
                println!(
                    "part {part}, {} bytes in {lengths:?}, {method}: {before}, \
                     records reduced {records}, pages too {after}",
                    log.len()
                );
                let most = if part == 0 { 0.97 } else { 0.8 };
                ensure!((records as f64) < before as f64 * most, "{method}: {before}, {records}");
                // Where there are whole pages in it.
                let most = if part == 0 { 0.93 } else { 1.01 };
                ensure!((after as f64) < records as f64 * most, "{method}: {records}, {after}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_far_end_that_cannot_restore_gets_log_as_before() -> Result<()> {
    let principal = principal()?;
    let mut mirror = Mirror::start(&principal.url("postgres"), Promise::Far)?;
    let mut ratios = Vec::new();
    for asks_as_before in [true, false] {
        mirror.disconnect_far();
        mirror.asks_as_before.store(asks_as_before, Relaxed);
        mirror.connect_far();
        mirror.caught_up(&principal)?;
        load(&principal, 200)?;
        mirror.caught_up(&principal)?;
        let before = *mirror.near.status();
        load(&principal, 3_000)?;
        mirror.caught_up(&principal)?;
        let after = *mirror.near.status();
        let log = (after.log_bytes - before.log_bytes) as f64;
        ratios.push(log / (after.packed_bytes - before.packed_bytes) as f64);
    }
    println!("log by packed log, as before and reduced: {ratios:.2?}");
    ensure!(ratios[1] > ratios[0] * 1.3, "{ratios:?}");
    Ok(())
}
