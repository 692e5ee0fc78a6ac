//! A disk that fails.

use super::{open, small};
use crate::conformance::{append, batch, block_on, entries, noise, read_all, wait_durable};
use crate::segmented::SegmentedStore;
use crate::segmented::folder::segment_path;
use crate::{Batch, LogStore, Retention, StoreError};
use farshore_model::{Applied, Durable, Lsn};
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
fn a_segment_that_cannot_be_begun_for_a_while_is_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    append(&*store, batch(&[(1, &noise(100_000, 1))], &[]));
    // Where the next one goes to, there is none to be made.
    let obstacle = segment_path(dir.path(), Lsn(1));
    std::fs::create_dir(&obstacle).unwrap();
    block_on(store.append(batch(&[(2, b"later")], &[]))).unwrap();
    let why = std::iter::repeat_with(|| store.status().waiting_for_room).find_map(|why| why);
    assert!(why.unwrap().contains(&obstacle.display().to_string()));
    std::fs::remove_dir(&obstacle).unwrap();
    block_on(wait_durable(&*store, Lsn(2)));
    assert_eq!(store.status().waiting_for_room, None);
    assert_eq!(entries(read_all(&*store, Lsn::ZERO)).len(), 2);
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

#[test]
fn a_cursor_on_disk_never_leads() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    for position in 1..=100 {
        append(&*store, batch(&[(position, &noise(300, position))], &[]));
    }
    // What a crash at this moment would leave.
    let after_crash = || {
        let copy = tempfile::tempdir().unwrap();
        super::property::copy_files(dir.path(), copy.path());
        let cursors = open(copy.path()).0.cursors();
        cursors.into_iter().next()
    };
    store.register_cursor("a").unwrap();
    assert_eq!(after_crash().unwrap().applied, Applied(Lsn(100)));
    store.move_cursor("a", Applied(Lsn(20))).unwrap();
    assert_eq!(after_crash().unwrap().applied, Applied(Lsn(20)));
    store.move_cursor("a", Applied(Lsn(80))).unwrap();
    assert!(after_crash().unwrap().applied <= Applied(Lsn(80)));

    // Forward moves are saved at leisure, but before anything is dropped for them.
    store.enforce_retention(&Retention::default()).unwrap();
    let start = store.status().start;
    assert!(start > Lsn(20));
    assert!(after_crash().unwrap().applied.0 >= start);

    let all = Retention { bytes_max: Some(0), age_max: None };
    assert_eq!(store.enforce_retention(&all).unwrap().len(), 1);
    assert!(after_crash().unwrap().expired.is_some());
    store.move_cursor("a", Applied(Lsn(100))).unwrap();
    assert_eq!(after_crash().unwrap().expired, None);
    store.drop_cursor("a").unwrap();
    assert_eq!(after_crash(), None);
}

#[test]
fn a_reader_ahead_of_what_is_dropped_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    append(&*store, batch(&[(1, b"first")], &[]));
    let mut at_end = store.read_from(Lsn(1)).unwrap();
    let mut ahead = store.read_from(Lsn(150)).unwrap();
    for position in 2..=100 {
        append(&*store, batch(&[(position, &noise(300, position))], &[]));
    }
    // Everything so far goes; neither reader has moved from the first segment.
    let all = Retention { bytes_max: Some(0), age_max: None };
    store.enforce_retention(&all).unwrap();
    assert_eq!(store.status().start, Lsn(100));
    append(&*store, batch(&[(149, b"before"), (200, b"after")], &[]));
    let found = entries(ahead.next_block().unwrap().unwrap());
    assert_eq!((found.len(), found[0].position), (1, Lsn(200)));
    let dropped = std::iter::repeat_with(|| at_end.next_block()).find_map(|block| block.err());
    assert!(
        matches!(dropped, Some(StoreError::Dropped { wanted, start }) if wanted < start),
        "{dropped:?}"
    );
}
