//! Appending, reading and dropping at the same time.

use farshore_model::{Applied, Lsn};
use farshore_store::conformance::{block_on, noise, push, wait_durable};
use farshore_store::segmented::{Options, SegmentedStore};
use farshore_store::{Batch, EntryKind, Item, LogStore, Retention, StoreError};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const END: u64 = 30_000;

fn payload(position: u64, id: u32) -> Vec<u8> {
    let mut payload = id.to_le_bytes().to_vec();
    payload.extend_from_slice(&noise((position % 200) as usize, position));
    payload
}

/// Reads to the end, checking every entry; how often the log was dropped under it.
fn read(store: &Arc<SegmentedStore>, cursor: Option<&str>) -> u64 {
    let mut durable = store.durable();
    let (mut position, mut dropped) = (0, 0);
    'start: loop {
        let mut known = HashSet::new();
        let mut reader = match store.read_from(Lsn(position)) {
            Ok(reader) => reader,
            Err(StoreError::Dropped { start, .. }) => {
                assert!(start > Lsn(position));
                dropped += 1;
                position = start.0;
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        while position < END {
            let items = match reader.next_block() {
                Ok(Some(items)) => items,
                Ok(None) => {
                    block_on(durable.wait_for(|end| end.0 > Lsn(position))).unwrap();
                    continue;
                }
                Err(StoreError::Dropped { .. }) => continue 'start,
                Err(error) => panic!("{error}"),
            };
            for item in items {
                match item {
                    Item::Definition(id, _) => {
                        known.insert(id.0);
                    }
                    Item::Entry(entry) => {
                        position += 1;
                        assert_eq!(entry.position, Lsn(position), "a gap");
                        let id = u32::from_le_bytes(*entry.payload.first_chunk().unwrap());
                        assert!(known.contains(&id), "definition before use");
                        assert!(entry.payload == payload(position, id));
                        assert!(entry.position <= durable.borrow().0, "not durable yet");
                    }
                }
            }
            if let Some(name) = cursor {
                store.move_cursor(name, Applied(Lsn(position))).unwrap();
            }
        }
        return dropped;
    }
}

#[test]
fn readers_see_every_entry_or_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options {
        segment_bytes: 32 << 10,
        block_bytes: 4 << 10,
        queue_bytes_max: 64 << 10,
        roll_bytes_min: 4 << 10,
        ..Options::default()
    };
    let (store, _) = SegmentedStore::open(dir.path(), options).unwrap();
    store.register_cursor("applies").unwrap();
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            block_on(async {
                let mut position = 0;
                while position < END {
                    let mut batch = Batch::default();
                    let id = store.define(format!("relation {}", position % 11).as_bytes());
                    batch.dictionary.push(id);
                    for _ in 0..(1 + position % 40).min(END - position) {
                        position += 1;
                        let payload = payload(position, id.0);
                        push(&mut batch, position, EntryKind::Transaction, &payload);
                    }
                    store.append(batch).await.unwrap();
                }
                wait_durable(&*store, Lsn(END)).await;
            });
        });
        scope.spawn(|| {
            while !ended.load(Ordering::SeqCst) {
                store.enforce_retention(&Retention::default()).unwrap();
                std::thread::yield_now();
            }
        });
        let applying = scope.spawn(|| read(&store, Some("applies")));
        let watching: Vec<_> = (0..2).map(|_| scope.spawn(|| read(&store, None))).collect();
        let dropped = applying.join();
        let watched: Vec<_> = watching.into_iter().map(|reader| reader.join()).collect();
        ended.store(true, Ordering::SeqCst);
        assert!(watched.iter().all(|result| result.is_ok()));
        assert_eq!(dropped.unwrap(), 0, "a cursor holds the log");
    });
    assert!(store.status().start > Lsn(END / 2), "retention worked meanwhile");
}
