//! Every row of the decision table, made on disk.

use farshore_model::{Applied, Lsn};
use farshore_store::conformance::{append, batch, entries, noise, push, read_all};
use farshore_store::segmented::{Case, Options, RecoveryReport, SegmentedStore};
use farshore_store::{Batch, EntryKind, LogStore, StoreError};
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

const HEADER_LEN: u64 = 64;

fn options() -> Options {
    Options {
        segment_bytes: 8 << 10,
        block_bytes: 4 << 10,
        cursor_save_interval: Duration::from_secs(3600),
        ..Options::default()
    }
}

fn open(dir: &Path) -> Result<(Arc<SegmentedStore>, RecoveryReport), StoreError> {
    SegmentedStore::open(dir, options())
}

fn reopened(dir: &Path) -> (Arc<SegmentedStore>, RecoveryReport) {
    open(dir).unwrap_or_else(|error| panic!("{error}"))
}

/// A closed store of several segments with one entry per 10 positions, and a spill at 5.
fn store() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = reopened(dir.path());
    let id = store.define(b"relation");
    let mut writer = store.begin_spill().unwrap();
    writer.write(&noise(2000, 0), &[id]).unwrap();
    let spill = writer.finish().unwrap();
    let mut first = Batch::default();
    push(&mut first, 5, EntryKind::Spilled(spill), b"header");
    append(&*store, first);
    store.register_cursor("reader").unwrap();
    for position in (10..=400).step_by(10) {
        append(&*store, batch(&[(position, &noise(700, position))], &[id]));
    }
    drop(store);
    dir
}

fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect();
    found.sort();
    found
}

fn segments(dir: &Path) -> Vec<PathBuf> {
    let found = files(dir, "seg");
    assert!(found.len() >= 3, "{found:?}");
    found
}

fn newest(dir: &Path) -> PathBuf {
    segments(dir).pop().unwrap()
}

fn write_at(path: &Path, at: u64, bytes: &[u8]) {
    std::fs::OpenOptions::new().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

fn set_len(path: &Path, len: u64) {
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(len).unwrap();
}

fn len(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().len()
}

/// Everything in the folder but the lock.
fn contents(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries
        .filter(|path| path.is_file() && !path.ends_with("LOCK"))
        .map(|path| (path.clone(), std::fs::read(path).unwrap()))
        .collect()
}

/// Opening must fail as damaged, name the file, say what to do, and change nothing.
fn refused(dir: &Path, file: &Path) -> String {
    let before = contents(dir);
    match open(dir) {
        Err(StoreError::Damaged { path, what, remedy }) => {
            assert_eq!(path, file, "{what}");
            assert!(!remedy.is_empty());
            assert!(contents(dir) == before, "something was changed");
            what
        }
        Err(error) => panic!("{error}"),
        Ok((_, report)) => panic!("opened: {report:?}"),
    }
}

/// Opening finds `case` and everything up to `end` is there, also once more.
fn mended(dir: &Path, case: Case, end: u64) -> RecoveryReport {
    let (store, report) = reopened(dir);
    assert!(report.found(case), "{report:?}");
    check(&store, end);
    append(&*store, batch(&[(1000, b"goes on")], &[]));
    drop(store);
    let (store, again) = reopened(dir);
    assert_eq!(again.end, Lsn(1000));
    assert_eq!(entries(read_all(&*store, Lsn(end))).len(), 1);
    report
}

fn check(store: &Arc<SegmentedStore>, end: u64) {
    let positions: Vec<u64> =
        entries(read_all(&**store, Lsn::ZERO)).iter().map(|entry| entry.position.0).collect();
    let expected: Vec<u64> = std::iter::once(5).chain((10..=end).step_by(10)).collect();
    assert_eq!(positions, expected);
}

/// Offsets of the blocks in a segment.
fn blocks(path: &Path) -> Vec<u64> {
    let bytes = std::fs::read(path).unwrap();
    let magic = b"\xF5FSBLK\r\n";
    (0..bytes.len()).filter(|at| bytes[*at..].starts_with(magic)).map(|at| at as u64).collect()
}

#[test]
fn a_clean_store_is_kept() {
    let dir = store();
    let report = mended(dir.path(), Case::NewestWhole, 400);
    assert!(report.found(Case::OlderWhole) && report.found(Case::IndexFits));
    assert!(report.found(Case::SpillWhole));
    assert_eq!(report.bytes_dropped, 0);
    let options = Options { verify_all: true, ..options() };
    let (_, report) = SegmentedStore::open(dir.path(), options).unwrap();
    assert!(report.found(Case::IndexFits) && !report.found(Case::IndexWrong), "{report:?}");
}

#[test]
fn space_that_a_kill_left_reserved_is_cut() {
    let dir = store();
    let newest = newest(dir.path());
    set_len(&newest, std::fs::metadata(&newest).unwrap().len() + 9_000);
    let report = mended(dir.path(), Case::NewestReserved, 400);
    assert_eq!(report.bytes_dropped, 0);
}

#[test]
fn a_torn_tail_is_cut_at_every_byte() {
    let dir = store();
    let last = *blocks(&newest(dir.path())).last().unwrap();
    let whole = std::fs::read(newest(dir.path())).unwrap();
    let end = last + 104 + 29 + 700;
    for at in (last + 1..end).step_by(37) {
        let copy = tempfile::tempdir().unwrap();
        for (path, bytes) in contents(dir.path()) {
            std::fs::write(copy.path().join(path.file_name().unwrap()), bytes).unwrap();
        }
        let mut torn = whole.clone();
        torn[at as usize..].fill(0);
        std::fs::write(newest(copy.path()), &torn).unwrap();
        let report = mended(copy.path(), Case::NewestTorn, 390);
        assert!(report.bytes_dropped > 0);
        std::fs::write(newest(dir.path()), &whole).unwrap();
    }
    set_len(&newest(dir.path()), end);
    mended(dir.path(), Case::NewestWhole, 400);
}

#[test]
fn a_block_that_was_durable_is_never_cut() {
    let dir = store();
    let newest = newest(dir.path());
    let blocks = blocks(&newest);
    assert!(blocks.len() >= 3);
    write_at(&newest, blocks[blocks.len() - 2] + 200, b"!damage!");
    let what = refused(dir.path(), &newest);
    assert!(what.contains(&format!("at byte {}", blocks[blocks.len() - 2])), "{what}");
}

#[test]
fn damage_in_an_older_segment_is_refused() {
    let dir = store();
    let older = segments(dir.path())[0].clone();
    write_at(&older, blocks(&older)[1] + 150, b"!damage!");
    // With its index the segment is trusted until it is read.
    let (store, _) = reopened(dir.path());
    let mut reader = store.read_from(Lsn::ZERO).unwrap();
    let found = std::iter::repeat_with(|| reader.next_block())
        .find_map(|block| block.err())
        .expect("damage is noticed");
    assert!(matches!(found, StoreError::Damaged { .. }), "{found}");
    drop(store);
    for index in files(dir.path(), "idx") {
        std::fs::remove_file(index).unwrap();
    }
    refused(dir.path(), &older);
}

#[test]
fn a_shortened_older_segment_is_refused() {
    let dir = store();
    let older = segments(dir.path())[1].clone();
    set_len(&older, *blocks(&older).last().unwrap());
    refused(dir.path(), &older);
}

#[test]
fn a_missing_segment_is_refused() {
    let dir = store();
    let segments = segments(dir.path());
    std::fs::remove_file(&segments[1]).unwrap();
    let what = refused(dir.path(), &segments[0]);
    assert!(what.contains("missing"), "{what}");
}

#[test]
fn a_missing_oldest_segment_is_refused_while_a_cursor_needs_it() {
    let dir = store();
    std::fs::remove_file(&segments(dir.path())[0]).unwrap();
    assert!(refused(dir.path(), dir.path()).contains("reader"));
}

#[test]
fn a_missing_newest_segment_is_refused_when_a_longer_log_was_recorded() {
    let dir = store();
    let (store, _) = reopened(dir.path());
    store.move_cursor("reader", Applied(Lsn(10))).unwrap();
    drop(store);
    std::fs::remove_file(newest(dir.path())).unwrap();
    refused(dir.path(), dir.path());
    for segment in files(dir.path(), "seg") {
        std::fs::remove_file(segment).unwrap();
    }
    refused(dir.path(), dir.path());
}

#[test]
fn overlapping_segments_are_refused() {
    let dir = store();
    let segments = segments(dir.path());
    // The same segment under a start that it does not have.
    std::fs::copy(&segments[1], dir.path().join("0000000000000007.seg")).unwrap();
    refused(dir.path(), &dir.path().join("0000000000000007.seg"));
    // The same with a header that agrees with the name.
    let mut bytes = std::fs::read(&segments[1]).unwrap();
    bytes[32..40].copy_from_slice(&7_u64.to_le_bytes());
    let crc = crc32c::crc32c(&bytes[..60]);
    bytes[60..64].copy_from_slice(&crc.to_le_bytes());
    std::fs::write(dir.path().join("0000000000000007.seg"), bytes).unwrap();
    refused(dir.path(), &segments[0]);
}

#[test]
fn a_segment_of_another_store_is_refused() {
    let (dir, other) = (store(), store());
    let (mine, theirs) = (newest(dir.path()), newest(other.path()));
    std::fs::copy(theirs, &mine).unwrap();
    assert!(refused(dir.path(), &mine).contains("belongs to store"));
}

#[test]
fn an_unfinished_new_segment_is_removed() {
    for content in [&b""[..], &[0; 64][..], &[0; 70_000][..], &b"FARSHSEG\x01\0"[..]] {
        let dir = store();
        let next = dir.path().join(format!("{:016x}.seg", 400));
        // As a roll leaves it: the segment before has no reserved space.
        let newest = newest(dir.path());
        let end = blocks(&newest).last().unwrap() + 104 + 29 + 700;
        set_len(&newest, end);
        std::fs::write(&next, content).unwrap();
        let case = if content.is_empty() { Case::NewestEmpty } else { Case::NewestHeaderTorn };
        mended(dir.path(), case, 400);
        // What stood before it was durable when it was begun.
        std::fs::write(&next, content).unwrap();
        set_len(&newest, end - 1);
        refused(dir.path(), &newest);
    }
}

#[test]
fn a_segment_with_only_a_header_is_written_on() {
    let dir = tempfile::tempdir().unwrap();
    drop(reopened(dir.path()));
    let (store, report) = reopened(dir.path());
    assert!(report.found(Case::NewestWhole));
    append(&*store, batch(&[(1, b"a")], &[]));
    drop(store);
    assert_eq!(files(dir.path(), "seg").len(), 1);
    assert_eq!(reopened(dir.path()).1.end, Lsn(1));
}

#[test]
fn a_lost_header_is_refused() {
    let dir = store();
    let newest = newest(dir.path());
    write_at(&newest, 20, b"!");
    refused(dir.path(), &newest);

    let dir = store();
    let older = segments(dir.path())[1].clone();
    write_at(&older, 20, b"!");
    refused(dir.path(), &older);
    std::fs::write(&older, b"").unwrap();
    refused(dir.path(), &older);
}

#[test]
fn a_sole_segment_that_began_later_is_no_fresh_store() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("00000000000000ff.seg");
    std::fs::write(&path, b"").unwrap();
    refused(dir.path(), &path);
}

#[test]
fn a_newer_version_is_not_touched() {
    let dir = store();
    let newest = newest(dir.path());
    let mut head = std::fs::read(&newest).unwrap()[..HEADER_LEN as usize].to_vec();
    head[8] = 9;
    let crc = crc32c::crc32c(&head[..60]);
    head[60..64].copy_from_slice(&crc.to_le_bytes());
    write_at(&newest, 0, &head);
    let before = contents(dir.path());
    match open(dir.path()) {
        Err(StoreError::Newer { path, found: 9, known: 1 }) => assert_eq!(path, newest),
        other => panic!("{other:?}"),
    }
    assert!(contents(dir.path()) == before);
}

#[test]
fn indexes_are_rebuilt() {
    type Spoil = fn(&Path);
    let cases: [(Case, Spoil); 4] = [
        (Case::IndexAbsent, |path| std::fs::remove_file(path).unwrap()),
        (Case::IndexGarbage, |path| std::fs::write(path, b"garbage").unwrap()),
        (Case::IndexGarbage, |path| set_len(path, len(path) - 1)),
        (Case::IndexWrong, |path| {
            // Well-formed, but its definitions are said to stand where none do.
            let mut bytes = std::fs::read(path).unwrap();
            let spills = u32::from_le_bytes(bytes[73..77].try_into().unwrap()) as usize;
            let definitions = 77 + spills * 8 + 4;
            bytes[definitions] ^= 1;
            let crc = crc32c::crc32c(&bytes[16..]);
            bytes[12..16].copy_from_slice(&crc.to_le_bytes());
            std::fs::write(path, bytes).unwrap();
        }),
    ];
    for (case, spoil) in cases {
        let dir = store();
        let index = files(dir.path(), "idx")[0].clone();
        let good = std::fs::read(&index).unwrap();
        spoil(&index);
        // Spoilt while the store is open: readers do without.
        mended(dir.path(), case, 400);
        assert!(std::fs::read(&index).unwrap() == good, "{case:?}");
    }
}

#[test]
fn readers_do_without_an_index() {
    let dir = store();
    let (store, _) = reopened(dir.path());
    for (number, index) in files(dir.path(), "idx").iter().enumerate() {
        match number % 2 {
            0 => std::fs::remove_file(index).unwrap(),
            _ => std::fs::write(index, b"garbage").unwrap(),
        }
    }
    for after in (0..400).step_by(10) {
        let found = entries(read_all(&*store, Lsn(after)));
        assert_eq!(found.len() as u64, (400 - after) / 10 + u64::from(after < 5), "{after}");
    }
}

#[test]
fn leftovers_go_and_foreign_files_stay() {
    let dir = store();
    let path = |name: &str| dir.path().join(name);
    for name in ["cursors.tmp", "notes.tmp", "0000000000000000.idx.tmp", "00000000000000ff.idx"] {
        std::fs::write(path(name), b"half").unwrap();
    }
    for name in ["00000000000000ff.spill", "README", "x.seg", "0000000000000001.seg.bak"] {
        std::fs::write(path(name), b"mine").unwrap();
    }
    std::fs::create_dir(path("00000000000000fe.seg")).unwrap();
    let report = mended(dir.path(), Case::LeftoverFile, 400);
    for case in [Case::ForeignFile, Case::IndexWithoutSegment, Case::SpillUnreferenced] {
        assert!(report.found(case), "{case:?}");
    }
    for name in ["cursors.tmp", "notes.tmp", "00000000000000ff.idx", "00000000000000ff.spill"] {
        assert!(!path(name).exists(), "{name}");
    }
    for name in ["README", "x.seg", "0000000000000001.seg.bak", "00000000000000fe.seg"] {
        assert!(path(name).exists(), "{name}");
    }
}

#[test]
fn a_committed_spill_must_be_there() {
    let dir = store();
    let spill = files(dir.path(), "spill")[0].clone();
    let good = std::fs::read(&spill).unwrap();
    std::fs::remove_file(&spill).unwrap();
    assert!(refused(dir.path(), &spill).contains("missing"));
    for len in [0, 63, 100, good.len() - 1] {
        std::fs::write(&spill, &good[..len]).unwrap();
        refused(dir.path(), &spill);
    }
    let mut header = good.clone();
    header[20] ^= 1;
    std::fs::write(&spill, header).unwrap();
    refused(dir.path(), &spill);
    // Damage in its middle is noticed by its reader.
    let mut middle = good.clone();
    middle[700] ^= 1;
    std::fs::write(&spill, middle).unwrap();
    let (store, _) = reopened(dir.path());
    let found = entries(read_all(&*store, Lsn::ZERO))[0].kind;
    let EntryKind::Spilled(id) = found else { panic!("{found:?}") };
    let mut reader = store.open_spill(id).unwrap();
    let error = std::iter::repeat_with(|| reader.next_block()).find_map(|block| block.err());
    assert!(matches!(error, Some(StoreError::Damaged { .. })), "{error:?}");
}

#[test]
fn torn_cursors_and_notes_are_refused() {
    for name in ["cursors", "notes"] {
        let dir = store();
        let (store, _) = reopened(dir.path());
        store.set_note("a", "b").unwrap();
        drop(store);
        let path = dir.path().join(name);
        set_len(&path, len(&path) - 2);
        refused(dir.path(), &path);
        std::fs::remove_file(&path).unwrap();
        reopened(dir.path());
    }
}
