//! How fast and how small: prints figures, asserts only generous bounds. Run by hand:
//! `cargo test --release -p farshore-store --test throughput -- --ignored --nocapture --test-threads 1`

use farshore_model::Lsn;
use farshore_store::conformance::{block_on, noise, push, wait_durable};
use farshore_store::segmented::{Options, SegmentedStore};
use farshore_store::{Batch, EntryKind, Item, LogStore};
use std::time::Instant;

/// Peak resident bytes of this process so far, in MiB.
fn peak_rss_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() >> 10
}

/// Resident bytes of this process now, in MiB.
fn rss_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().unwrap() >> 10
}

#[test]
#[ignore = "a measurement"]
fn a_small_entries() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let (store, _) = SegmentedStore::open(dir.path(), Options::default()).unwrap();
    const ENTRIES: u64 = 1_000_000;
    let text = "2026-11-21 some customer, some street 17, some town, 4711.50 EUR, note: none; ";
    let batches: Vec<Batch> = (0..ENTRIES / 500)
        .map(|number| {
            let mut batch = Batch::default();
            for entry in 0..500 {
                let position = 1 + number * 500 + entry;
                let payload =
                    format!("{position} {text}{}{text}", position.wrapping_mul(2654435761));
                push(&mut batch, position, EntryKind::Transaction, payload.as_bytes());
            }
            batch
        })
        .collect();
    let started = Instant::now();
    block_on(async {
        for batch in batches {
            store.append(batch).await.unwrap();
        }
        wait_durable(&*store, Lsn(ENTRIES)).await;
    });
    let seconds = started.elapsed().as_secs_f64();
    let status = store.status();
    println!(
        "append: {:.0} entries/s, {:.0} MB/s raw, ratio {:.1}, {} syncs",
        ENTRIES as f64 / seconds,
        status.payload_bytes_appended as f64 / 1e6 / seconds,
        status.payload_bytes_appended as f64 / status.stored_bytes_appended as f64,
        status.syncs
    );
    let started = Instant::now();
    let mut reader = store.read_from(Lsn::ZERO).unwrap();
    let (mut count, mut bytes) = (0, 0);
    while let Some(items) = reader.next_block().unwrap() {
        for item in items {
            match item {
                Item::Entry(entry) => {
                    count += 1;
                    bytes += entry.payload.len();
                }
                Item::Definition(..) => {}
            }
        }
    }
    assert_eq!(count, ENTRIES);
    let seconds = started.elapsed().as_secs_f64();
    println!("read: {:.0} MB/s raw", bytes as f64 / 1e6 / seconds);
}

#[test]
#[ignore = "a measurement"]
fn b_large_entry() {
    let dir = tempfile::tempdir_in(".").unwrap();
    let before = rss_mib();
    let (store, _) = SegmentedStore::open(dir.path(), Options::default()).unwrap();
    println!("idle store: {} MiB more", rss_mib() - before);
    for (position, kind) in [(1, "noise"), (2, "text")] {
        let mut batch = Batch::default();
        {
            let payload = match kind {
                "noise" => noise(200 << 20, 1),
                _ => b"some text that repeats itself, ".repeat((200 << 20) / 31),
            };
            batch.payload = payload;
            let mut meta = Batch::default();
            push(&mut meta, position, EntryKind::Transaction, b"");
            meta.entries[0].payload_len = batch.payload.len() as u32;
            batch.entries = meta.entries;
        }
        let started = Instant::now();
        block_on(async {
            store.append(batch).await.unwrap();
            wait_durable(&*store, Lsn(position)).await;
        });
        println!(
            "200 MiB of {kind}: {:.2} s, peak {} MiB, afterwards {} MiB",
            started.elapsed().as_secs_f64(),
            peak_rss_mib(),
            rss_mib()
        );
    }
    let mut reader = store.read_from(Lsn::ZERO).unwrap();
    while let Some(items) = reader.next_block().unwrap() {
        drop(items);
    }
    println!("read back: peak {} MiB, afterwards {} MiB", peak_rss_mib(), rss_mib());
}
