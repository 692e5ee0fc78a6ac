//! A disk that fails.

use super::{open, small};
use crate::conformance::{append, batch, block_on, entries, noise, read_all};
use crate::segmented::SegmentedStore;
use crate::{Batch, LogStore, StoreError};
use farshore_model::{Durable, Lsn};
use std::sync::atomic::Ordering;

#[test]
fn a_failed_sync_ends_writing_for_good_and_reading_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    append(&*store, batch(&[(1, b"durable")], &[]));
    let mut reader = store.read_from(Lsn::ZERO).unwrap();
    let mut durable = store.durable();
    durable.mark_unchanged();

    store.log.fail_sync.store(true, Ordering::SeqCst);
    block_on(async {
        store.append(batch(&[(2, b"lost")], &[])).await.unwrap();
        // The sender goes away without a further position.
        assert!(durable.changed().await.is_err());
    });
    assert_eq!(*durable.borrow(), Durable(Lsn(1)));
    assert!(matches!(store.failure(), Some(StoreError::Io { action: "sync", .. })));

    // Also when the disk is well again: what the failed sync left is not known.
    store.log.fail_sync.store(false, Ordering::SeqCst);
    let refused = block_on(store.append(batch(&[(3, b"late")], &[])));
    assert!(matches!(refused, Err(StoreError::Failed(_))), "{refused:?}");
    assert_eq!(entries(reader.next_block().unwrap().unwrap())[0].position, Lsn(1));
    assert!(reader.next_block().unwrap().is_none());
    assert_eq!(entries(read_all(&*store, Lsn::ZERO)).len(), 1);
    drop(reader);
    drop(store);

    let (store, _) = open(dir.path());
    let found = entries(read_all(&*store, Lsn::ZERO));
    assert_eq!(&found[0].payload[..], b"durable");
    append(&*store, batch(&[(9, b"again")], &[]));
}

#[test]
fn those_who_wait_for_room_learn_of_the_failure() {
    let dir = tempfile::tempdir().unwrap();
    let options = crate::segmented::Options { queue_bytes_max: 1000, ..small() };
    let (store, _) = SegmentedStore::open(dir.path(), options).unwrap();
    store.log.fail_sync.store(true, Ordering::SeqCst);
    block_on(async {
        let mut position = 0;
        loop {
            position += 1;
            let appended = store.append(batch(&[(position, &noise(900, 1))], &[])).await;
            match appended {
                Ok(()) => tokio::task::yield_now().await,
                Err(StoreError::Failed(_)) => break,
                Err(error) => panic!("{error}"),
            }
        }
    });
}

#[test]
fn a_batch_larger_than_the_bound_passes() {
    let dir = tempfile::tempdir().unwrap();
    let options = crate::segmented::Options { queue_bytes_max: 1000, ..small() };
    let (store, _) = SegmentedStore::open(dir.path(), options).unwrap();
    for position in 1..10 {
        append(&*store, batch(&[(position, &noise(100_000, position))], &[]));
    }
    assert_eq!(entries(read_all(&*store, Lsn::ZERO)).len(), 9);
}

#[test]
fn the_folder_belongs_to_one_store_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    match SegmentedStore::open(dir.path(), small()) {
        Err(StoreError::Locked { pid, .. }) => assert_eq!(pid, std::process::id().to_string()),
        other => panic!("{other:?}"),
    }
    // A spill that is still being written keeps the folder: its file would be taken for a leftover.
    let spill = store.begin_spill().unwrap();
    drop(store);
    assert!(matches!(SegmentedStore::open(dir.path(), small()), Err(StoreError::Locked { .. })));
    drop(spill);
    let (store, _) = open(dir.path());
    append(&*store, Batch::default());
}
