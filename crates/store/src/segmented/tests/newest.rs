//! The newest transaction, noted when it leaves the log.

use super::open;
use crate::conformance::{append, batch, block_on, noise, wait_durable};
use crate::segmented::SegmentedStore;
use crate::{Batch, EntryKind, EntryMeta, LogStore, Retention, newest_dropped};
use farshore_model::{Applied, Lsn, PgTime};

fn fill(store: &SegmentedStore, from: u64, to: u64) {
    for position in from..to {
        append(store, batch(&[(position, &noise(1_000, position))], &[]));
        block_on(wait_durable(store, Lsn(position)));
    }
}

fn watermark(store: &SegmentedStore, position: u64) {
    let entry = EntryMeta {
        position: Lsn(position),
        commit_time: PgTime(7),
        kind: EntryKind::Watermark,
        payload_len: 0,
    };
    append(store, Batch { entries: vec![entry], ..Batch::default() });
    block_on(wait_durable(store, Lsn(position)));
}

fn drop_up_to(store: &SegmentedStore, applied: u64) {
    store.move_cursor("s", Applied(Lsn(applied))).unwrap();
    store.enforce_retention(&Retention::default()).unwrap();
}

fn position(store: &SegmentedStore) -> Option<Lsn> {
    newest_dropped(store).map(|(position, _)| position)
}

#[test]
fn it_is_noted_only_when_no_newer_one_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    store.register_cursor("s").unwrap();
    fill(&store, 1, 25);
    drop_up_to(&store, 20);
    assert!(store.status().start > Lsn::ZERO);
    assert_eq!(position(&store), None, "newer ones are left");
    drop_up_to(&store, 24);
    assert_eq!(store.status().start, Lsn(24), "the active segment went, too");
    assert_eq!(position(&store), Some(Lsn(24)));
    watermark(&store, 30);
    fill(&store, 31, 40);
    drop(store);
    // Another opening has written none.
    let (store, _) = open(dir.path());
    watermark(&store, 50);
    assert_eq!(position(&store), Some(Lsn(24)));
    let nothing = Retention { bytes_max: Some(1), age_max: None };
    store.enforce_retention(&nothing).unwrap();
    assert_eq!(store.status().start, Lsn(50));
    assert_eq!(position(&store), Some(Lsn(39)));
}

#[test]
fn a_log_without_transactions_has_none() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    store.register_cursor("s").unwrap();
    for position in 1..400 {
        watermark(&store, position);
    }
    drop_up_to(&store, 399);
    assert!(store.status().start > Lsn::ZERO);
    assert_eq!(position(&store), None);
}

#[test]
fn the_newest_is_found_in_what_was_there_and_what_came_since() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    assert_eq!(store.newest_transaction().unwrap(), None);
    fill(&store, 1, 25);
    watermark(&store, 30);
    let newest = |store: &SegmentedStore| store.newest_transaction().unwrap().map(|(at, _)| at);
    assert_eq!(newest(&store), Some(Lsn(24)));
    drop(store);
    let (store, _) = open(dir.path());
    assert_eq!(newest(&store), Some(Lsn(24)));
    fill(&store, 31, 33);
    assert_eq!(newest(&store), Some(Lsn(32)));
    let first = |after| store.first_transaction(Lsn(after)).unwrap().map(|(at, _)| at);
    assert_eq!(
        [first(23), first(24), first(31), first(32)].map(|at| at.map(|at| at.0)),
        [Some(24), Some(31), Some(32), None]
    );
    store.register_cursor("s").unwrap();
    drop_up_to(&store, 32);
    assert!(store.first_transaction(Lsn(1)).is_err(), "it was dropped");
    assert_eq!(newest(&store), Some(Lsn(32)), "nothing has come since");
}
