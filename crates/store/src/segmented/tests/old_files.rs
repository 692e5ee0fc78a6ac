//! Segments that begin in the files of dropped ones.

use super::open;
use super::property::copy_files;
use crate::conformance::{append, batch, block_on, entries, noise, read_all, wait_durable};
use crate::segmented::SegmentedStore;
use crate::segmented::recovery::Case;
use crate::{LogReader, LogStore, Retention, StoreError};
use farshore_model::{Applied, Lsn};
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

fn payload(position: u64) -> Vec<u8> {
    noise(1_000, position)
}

/// Appends entries at `from..to`, each durable before the next.
fn fill(store: &SegmentedStore, from: u64, to: u64) {
    for position in from..to {
        append(store, batch(&[(position, &payload(position))], &[]));
        block_on(wait_durable(store, Lsn(position)));
    }
}

fn drop_up_to(store: &SegmentedStore, applied: u64, retention: &Retention) {
    store.move_cursor("s", Applied(Lsn(applied))).unwrap();
    store.enforce_retention(retention).unwrap();
}

fn files(dir: &Path, extension: &str) -> BTreeSet<PathBuf> {
    let all = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    all.filter(|path| path.extension().is_some_and(|found| found == extension)).collect()
}

fn inodes(files: &BTreeSet<PathBuf>) -> BTreeSet<u64> {
    files.iter().map(|file| std::fs::metadata(file).unwrap().ino()).collect()
}

/// Fills some segments of which the first are dropped and kept.
fn with_old_files(dir: &Path) -> (std::sync::Arc<SegmentedStore>, BTreeSet<u64>) {
    let (store, _) = open(dir);
    store.register_cursor("s").unwrap();
    fill(&store, 1, 25);
    drop_up_to(&store, 20, &Retention::default());
    let old = inodes(&files(dir, "old"));
    assert_eq!(old.len(), 2, "two whole segments are below 20");
    (store, old)
}

#[test]
fn a_crash_in_an_old_ones_file_takes_its_blocks_for_old() {
    let dir = tempfile::tempdir().unwrap();
    let (store, old) = with_old_files(dir.path());
    let mut found = 0;
    for end in 25..42 {
        fill(&store, end, end + 1);
        let newest = files(dir.path(), "seg").pop_last().unwrap();
        let in_old = old.contains(&std::fs::metadata(&newest).unwrap().ino());
        // What a process that was killed leaves.
        let copy = tempfile::tempdir().unwrap();
        copy_files(dir.path(), copy.path());
        let (left, report) = open(copy.path());
        assert_eq!(report.end, Lsn(end));
        let told = report.found(Case::NewestOld);
        // Its own blocks may fill the file to the last byte.
        let as_it_is = told || report.found(Case::NewestWhole);
        assert!(if in_old { as_it_is } else { !told }, "at {end}: {report:?}");
        assert!(!report.found(Case::NewestTorn), "at {end}: {report:?}");
        assert_eq!(files(copy.path(), "old"), BTreeSet::new());
        let read = entries(read_all(&*left, Lsn(20)));
        assert_eq!(read.len() as u64, end - 20);
        assert!(read.iter().all(|entry| entry.payload == payload(entry.position.0)));
        found += u32::from(told);
        drop(left);
        if told {
            torn_is_told(dir.path(), &newest, end);
        }
    }
    assert!(found >= 8, "the files were used again for {found} of the entries");
    assert_eq!(files(dir.path(), "old"), BTreeSet::new());
}

#[test]
fn whoever_reads_a_dropped_segment_is_told_or_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    store.register_cursor("s").unwrap();
    fill(&store, 1, 25);
    // One in the middle of what is dropped, one that stands there but wants what comes after.
    let mut behind = store.read_from(Lsn(2)).unwrap();
    assert_eq!(first(&mut *behind), 3);
    let mut ahead = store.read_from(Lsn(7)).unwrap();
    drop_up_to(&store, 20, &Retention::default());
    fill(&store, 25, 42);
    let mut read = 3;
    let gone = loop {
        match behind.next_block() {
            Ok(Some(items)) => read = entries(items).last().unwrap().position.0,
            Ok(None) => panic!("it read to the end"),
            Err(error) => break error,
        }
    };
    let told = matches!(&gone, StoreError::Dropped { wanted, .. } if *wanted == Lsn(read));
    assert!(told, "after {read}: {gone}");
    // Of the segment that it stands in nothing is left either.
    assert!(matches!(ahead.next_block(), Err(StoreError::Dropped { .. })));
    let mut in_time = store.read_from(Lsn(20)).unwrap();
    assert_eq!(first(&mut *in_time), 21);
}

/// The newest block, half of whose payload is missing, is no older segment's.
fn torn_is_told(dir: &Path, newest: &Path, end: u64) {
    let copy = tempfile::tempdir().unwrap();
    copy_files(dir, copy.path());
    let newest = copy.path().join(newest.file_name().unwrap());
    let mut bytes = std::fs::read(&newest).unwrap();
    let unique = payload(end);
    let at = bytes.windows(unique.len()).position(|window| window == unique).unwrap();
    bytes[at + 500..at + unique.len()].fill(0);
    std::fs::write(&newest, bytes).unwrap();
    let (_, report) = open(copy.path());
    assert!(report.found(Case::NewestTorn) && report.bytes_dropped > 0, "at {end}: {report:?}");
    assert_eq!(report.end, Lsn(end - 1));
}

fn first(reader: &mut dyn LogReader) -> u64 {
    entries(reader.next_block().unwrap().unwrap())[0].position.0
}

/// How many files are kept, and their bytes.
fn kept(dir: &Path) -> (usize, u64) {
    let kept = files(dir, "old");
    (kept.len(), kept.iter().map(|file| file.metadata().unwrap().len()).sum())
}

#[test]
fn no_more_is_kept_than_the_log_may_take() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    store.register_cursor("s").unwrap();
    fill(&store, 1, 100);
    let bounded = Retention { bytes_max: Some(1 << 20), age_max: None };
    drop_up_to(&store, 90, &bounded);
    let (count, bytes) = kept(dir.path());
    assert!((1..=4).contains(&count) && bytes <= (4 * 12) << 10, "{bytes} bytes in {count} files");
    fill(&store, 100, 200);
    drop(store);
    assert_eq!(kept(dir.path()), (0, 0), "a closed store needs none");
    let (store, _) = open(dir.path());
    let smaller = Retention { bytes_max: Some(100 << 10), age_max: None };
    drop_up_to(&store, 190, &smaller);
    let (count, bytes) = kept(dir.path());
    assert!(bytes <= 100 << 7, "{bytes} bytes in {count} files");
}
