//! Recovery, row by row, and retention.

use super::*;
use crate::synthetic::{Log, SEGMENT_BYTES, SYSTEM_ID};
use crate::wal::Settings;
use futures_util::FutureExt;
use std::os::unix::fs::FileExt;

const BEGIN: u64 = 5 * SEGMENT_BYTES;

fn identity() -> Identity {
    let segment = SegmentBytes::new(SEGMENT_BYTES).unwrap();
    Identity { system_id: SYSTEM_ID, segment, server_version: 150_018 }
}

fn created(folder: &Path) -> Spool {
    Spool::create(folder, identity(), Timeline(1), Lsn(BEGIN)).unwrap()
}

/// Appends the log between two positions, and waits until it is durable.
async fn append(spool: &Spool, log: &Log, from: u64, to: u64) {
    let timeline = spool.positions().borrow().timeline;
    let mut at = from;
    for piece in log.between(from, to).chunks(100_003) {
        spool.append(timeline, Lsn(at), &[Bytes::copy_from_slice(piece)]).await.unwrap();
        at += piece.len() as u64;
    }
    let mut positions = spool.positions();
    let is_there = |positions: &Positions| positions.durable == Lsn(to) || spool.has_failed();
    let durable = positions.wait_for(is_there).await.unwrap().durable;
    assert!(durable == Lsn(to), "{}", spool.failure());
}

/// Waits until the next segment's file is made.
async fn spare_is_made(spool: &Spool) {
    while !spool.writer.lock().unwrap().spare_is_made() {
        tokio::task::yield_now().await;
    }
}

/// Some log that takes a bit more than two segments.
fn some_log() -> Log {
    let mut log = Log::new(BEGIN);
    let mut length = 30;
    while log.end() < BEGIN + 2 * SEGMENT_BYTES + 50_000 {
        log.push(length);
        length = (length * 7 + 13) % 12_000 + 24;
    }
    log
}

fn segment(folder: &Path, nth: u64) -> PathBuf {
    let segment = Segment { timeline: Timeline(1), number: BEGIN / SEGMENT_BYTES + nth };
    folder.join(segment.file_name(identity().segment))
}

/// Bytes that this thread has given to the operating system so far.
fn written_by_this_thread() -> u64 {
    let counted = std::fs::read_to_string("/proc/thread-self/io").unwrap();
    let written = counted.lines().find_map(|line| line.strip_prefix("wchar: "));
    written.unwrap().parse().unwrap()
}

fn overwrite(path: &Path, at: u64, bytes: &[u8]) {
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(bytes, at).unwrap();
}

/// A spool with all of the log, closed.
async fn filled() -> (tempfile::TempDir, Log) {
    let folder = tempfile::tempdir().unwrap();
    let log = some_log();
    let spool = created(folder.path());
    append(&spool, &log, BEGIN, log.end()).await;
    drop(spool);
    (folder, log)
}

fn durable(folder: &Path) -> Lsn {
    let spool = Spool::open(folder).unwrap().unwrap();
    let positions = *spool.positions().borrow();
    assert_eq!(positions.written, positions.durable);
    positions.durable
}

fn refused(folder: &Path) -> SpoolError {
    Spool::open(folder).expect_err("it opened")
}

#[test]
fn nothing_was_begun() {
    let folder = tempfile::tempdir().unwrap();
    assert!(Spool::open(folder.path()).unwrap().is_none());
}

#[tokio::test]
async fn the_state_file_is_missing() {
    let (folder, _) = filled().await;
    std::fs::remove_file(folder.path().join(folder::STATE)).unwrap();
    assert!(matches!(refused(folder.path()), SpoolError::Missing { .. }));
}

#[tokio::test]
async fn the_state_file_is_damaged() {
    let (folder, _) = filled().await;
    overwrite(&folder.path().join(folder::STATE), 20, b"x");
    assert!(matches!(refused(folder.path()), SpoolError::State { .. }));
}

#[test]
fn begun_and_never_filled() {
    let folder = tempfile::tempdir().unwrap();
    drop(created(folder.path()));
    assert_eq!(durable(folder.path()), Lsn(BEGIN));
    let error = Spool::create(folder.path(), identity(), Timeline(1), Lsn(BEGIN)).unwrap_err();
    assert!(matches!(error, SpoolError::State { .. }), "{error}");
    let error = Spool::create(folder.path(), identity(), Timeline(1), Lsn(BEGIN + 1)).unwrap_err();
    assert!(matches!(error, SpoolError::DoesNotFollow { .. }), "{error}");
}

#[tokio::test]
async fn every_segment_is_missing() {
    let (folder, _) = filled().await;
    (0..3).for_each(|nth| std::fs::remove_file(segment(folder.path(), nth)).unwrap());
    assert!(matches!(refused(folder.path()), SpoolError::Missing { .. }));
}

#[tokio::test]
async fn a_segment_in_the_middle_is_missing() {
    let (folder, _) = filled().await;
    std::fs::remove_file(segment(folder.path(), 1)).unwrap();
    let error = refused(folder.path());
    assert!(matches!(&error, SpoolError::Missing { path } if *path == segment(folder.path(), 1)));
}

#[tokio::test]
async fn a_segment_has_another_size() {
    let (folder, _) = filled().await;
    let file = std::fs::OpenOptions::new().write(true).open(segment(folder.path(), 1)).unwrap();
    file.set_len(SEGMENT_BYTES - 1).unwrap();
    assert!(matches!(refused(folder.path()), SpoolError::Size { .. }));
}

#[tokio::test]
async fn all_is_whole_and_the_files_are_the_log() {
    let (folder, log) = filled().await;
    std::fs::write(folder.path().join("spare.tmp"), "leftover").unwrap();
    assert_eq!(durable(folder.path()), Lsn(log.end()));
    assert!(!folder.path().join("spare.tmp").exists());
    let mut files = Vec::new();
    (0..3).for_each(|nth| files.extend(std::fs::read(segment(folder.path(), nth)).unwrap()));
    assert_eq!(files[..log.bytes.len()], log.bytes[..]);
    assert!(files[log.bytes.len()..].iter().all(|byte| *byte == 0));
}

/// Where an fdatasync failed, the kernel has as clean what the disk lacks, and another one does nothing.
#[tokio::test]
async fn what_is_claimed_is_written_again_before_it_is_made_durable() {
    let (folder, log) = filled().await;
    let long_ago = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    let open = |nth| {
        let path = segment(folder.path(), nth);
        std::fs::OpenOptions::new().write(true).open(path).unwrap()
    };
    (0..3).for_each(|nth| open(nth).set_modified(long_ago).unwrap());
    let before = std::fs::read(segment(folder.path(), 2)).unwrap();
    let written_before = written_by_this_thread();
    assert_eq!(durable(folder.path()), Lsn(log.end()));
    let written = written_by_this_thread() - written_before;
    let is_rewritten = |nth| open(nth).metadata().unwrap().modified().unwrap() > long_ago;
    assert_eq!([0, 1, 2].map(is_rewritten), [false, false, true]);
    let claimed = log.end() - (BEGIN + 2 * SEGMENT_BYTES);
    assert!(written >= claimed, "{written} of {claimed} bytes");
    assert!(std::fs::read(segment(folder.path(), 2)).unwrap() == before, "it has other bytes");
}

#[tokio::test]
async fn a_boundary_within_a_record_is_durable_once_it_was_claimed() {
    let log = some_log();
    let boundary = BEGIN + SEGMENT_BYTES;
    assert!(!log.ends.contains(&boundary), "a record must go over");
    let folder = tempfile::tempdir().unwrap();
    let spool = created(folder.path());
    append(&spool, &log, BEGIN, boundary).await;
    drop(spool);
    assert!(segment(folder.path(), 1).exists(), "claimed, and the next one is not there");
    assert_eq!(durable(folder.path()), Lsn(boundary));
    let spool = Spool::open(folder.path()).unwrap().unwrap();
    append(&spool, &log, boundary, log.end()).await;
    drop(spool);
    assert_eq!(durable(folder.path()), Lsn(log.end()));
}

#[tokio::test]
async fn a_boundary_is_not_claimed_before_the_next_segment_is_there() {
    let log = some_log();
    let boundary = BEGIN + SEGMENT_BYTES;
    let folder = tempfile::tempdir().unwrap();
    let spool = created(folder.path());
    append(&spool, &log, BEGIN, boundary - 8).await;
    // Nothing can be renamed over a folder, and no segment is written to one.
    std::fs::create_dir(segment(folder.path(), 1)).unwrap();
    let last = Bytes::copy_from_slice(log.between(boundary - 8, boundary));
    let mut trouble = spool.shared.trouble.subscribe();
    spool.append(Timeline(1), Lsn(boundary - 8), &[last]).await.unwrap();
    trouble.wait_for(Option::is_some).await.unwrap();
    assert_eq!(spool.positions().borrow().durable, Lsn(boundary - 8));
    drop(spool);
    std::fs::remove_dir(segment(folder.path(), 1)).unwrap();
    let durable = durable(folder.path()).0;
    assert!((log.whole_until(boundary)..boundary).contains(&durable), "{}", Lsn(durable));
}

#[tokio::test]
async fn a_file_for_the_next_segment_that_somebody_removed_is_made_again() {
    let log = some_log();
    let folder = tempfile::tempdir().unwrap();
    let spool = created(folder.path());
    append(&spool, &log, BEGIN, BEGIN + 100).await;
    spare_is_made(&spool).await;
    std::fs::remove_file(folder.path().join(folder::SPARE)).unwrap();
    append(&spool, &log, BEGIN + 100, log.end()).await;
    drop(spool);
    assert_eq!(durable(folder.path()), Lsn(log.end()));
}

#[tokio::test]
async fn the_torn_end_is_not_claimed() {
    let (folder, log) = filled().await;
    let newest = BEGIN + 2 * SEGMENT_BYTES;
    for at in (newest..log.end()).rev().step_by(997) {
        overwrite(&segment(folder.path(), 2), at - newest, &[0x77; 3]);
        let durable = durable(folder.path());
        assert!(
            durable.0 <= at.next_multiple_of(8).max(newest),
            "torn at {}, durable {durable}",
            Lsn(at)
        );
        let whole = log.whole_until(at.saturating_sub(8_192)).max(newest);
        assert!(durable.0 >= whole, "torn at {}, durable {durable}", Lsn(at));
    }
}

#[tokio::test]
async fn what_was_durable_before_the_newest_segment_is_damaged() {
    let (folder, log) = filled().await;
    // The record that goes over from the second segment to the third.
    let newest = BEGIN + 2 * SEGMENT_BYTES;
    assert!(!log.ends.contains(&newest), "a record must go over");
    let begins = log.whole_until(newest);
    overwrite(&segment(folder.path(), 1), begins % SEGMENT_BYTES - 20, &[0x77; 4]);
    let error = refused(folder.path());
    assert!(matches!(error, SpoolError::Damaged { .. }), "{error}");
}

#[tokio::test]
async fn a_beginning_within_a_record_counts_once_it_is_passed() {
    // The log begins a segment earlier than the spool, and a record goes over.
    let mut log = Log::new(BEGIN - SEGMENT_BYTES);
    while log.end() < BEGIN - 20_000 {
        log.push(9_000);
    }
    log.push(60_000);
    let passed = log.end();
    (0..20).for_each(|_| log.push(500));
    let folder = tempfile::tempdir().unwrap();
    let spool = created(folder.path());
    append(&spool, &log, BEGIN, BEGIN + 9_000).await;
    drop(spool);
    assert_eq!(durable(folder.path()), Lsn(BEGIN + 9_000), "by the floor");
    let spool = Spool::open(folder.path()).unwrap().unwrap();
    append(&spool, &log, BEGIN + 9_000, passed + 8).await;
    append(&spool, &log, passed + 8, log.end()).await;
    drop(spool);
    assert_eq!(durable(folder.path()), Lsn(log.end()), "by its records");
}

#[tokio::test]
async fn little_log_is_durable_when_it_is_taken_in() {
    let folder = tempfile::tempdir().unwrap();
    let spool = created(folder.path());
    let log = some_log();
    // The first makes the segment, which is the thread's.
    append(&spool, &log, BEGIN, BEGIN + 100).await;
    spool.settled().await.unwrap();
    let mut at = BEGIN + 100;
    while at < log.end() {
        let end = (at + 9_000).min(log.end());
        // The thread has said that it is done a moment before it lets go.
        drop(spool.writer.lock().unwrap());
        // It is asked at a boundary, and on a disk that was slow for a moment.
        let is_within = at / SEGMENT_BYTES == end / SEGMENT_BYTES;
        let is_for_here = is_within && spool.hardening().last <= HERE_WITHIN;
        let (first, second) = log.between(at, end).split_at(((end - at) / 2) as usize);
        let pieces = [first, second].map(Bytes::copy_from_slice);
        spool.append_at_once(Timeline(1), Lsn(at), &pieces).await.unwrap();
        assert!(!is_for_here || spool.positions().borrow().durable == Lsn(end), "at {at}");
        let settled = spool.settled().await.unwrap();
        assert_eq!((settled.written, settled.durable), (Lsn(end), Lsn(end)));
        at = end;
    }
    drop(spool);
    assert_eq!(durable(folder.path()), Lsn(log.whole_until(log.end())));
}

#[tokio::test]
async fn what_is_not_for_here_is_handed_over() {
    let folder = tempfile::tempdir().unwrap();
    let spool = created(folder.path());
    let log = some_log();
    append(&spool, &log, BEGIN, BEGIN + 100).await;
    spool.settled().await.unwrap();
    // The thread is at something else.
    let busy = spool.writer.lock().unwrap();
    let piece = Bytes::copy_from_slice(log.between(BEGIN + 100, BEGIN + 200));
    let pieces = [piece];
    let appended = spool.append_at_once(Timeline(1), Lsn(BEGIN + 100), &pieces).now_or_never();
    appended.unwrap().unwrap();
    assert_eq!(spool.positions().borrow().written, Lsn(BEGIN + 100));
    drop(busy);
    assert_eq!(spool.settled().await.unwrap().durable, Lsn(BEGIN + 200));
    // So much that the thread is to be at it while more comes.
    let end = BEGIN + 200 + HERE_BYTES as u64;
    let piece = Bytes::copy_from_slice(log.between(BEGIN + 200, end));
    assert!(!spool.write_here(Timeline(1), Lsn(BEGIN + 200), &[piece]).unwrap());
}

#[tokio::test]
async fn log_that_does_not_follow_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let spool = created(folder.path());
    spool.append(Timeline(1), Lsn(BEGIN + 8), &[Bytes::from_static(b"x")]).await.unwrap();
    let mut positions = spool.positions();
    // The writer has ended, and with it what it publishes stands still.
    while spool.trouble().is_none() {
        tokio::task::yield_now().await;
    }
    assert!(matches!(spool.failure(), SpoolError::DoesNotFollow { .. }));
    assert_eq!(positions.borrow_and_update().durable, Lsn(BEGIN));
    assert!(spool.append(Timeline(1), Lsn(BEGIN), &[Bytes::new()]).await.is_err());
}

#[tokio::test]
async fn a_timeline_goes_on_where_it_left_the_one_before() {
    let (folder, mut log) = filled().await;
    let spool = Spool::open(folder.path()).unwrap().unwrap();
    let switch = log.end();
    let text = format!("1\t{}\tno recovery target specified\n", Lsn(switch));
    spool.keep_history(Timeline(2), &text).unwrap();
    assert!(spool.keep_history(Timeline(2), "x").is_err());
    spool.switch_timeline(Timeline(2), Lsn(switch)).await.unwrap();
    let mut positions = spool.positions();
    positions.wait_for(|positions| positions.timeline == Timeline(2)).await.unwrap();
    drop(spool);
    assert_eq!(durable(folder.path()), Lsn(switch), "the switch alone survives");
    let spool = Spool::open(folder.path()).unwrap().unwrap();
    // Another server's timeline 2 is not this one's.
    let other = format!("1\t{}\tno recovery target specified\n", Lsn(switch - 8));
    let error = spool.keep_history(Timeline(2), &other).unwrap_err();
    assert!(matches!(error, SpoolError::OtherHistory { timeline: Timeline(2), .. }), "{error}");
    assert_eq!(spool.history_text(Timeline(2)).unwrap().as_ref(), Some(&text));
    spool.keep_history(Timeline(2), &text).unwrap();
    // As long as nothing has come of a timeline, it may turn out to be another.
    spool.keep_history(Timeline(3), &format!("1\t{}\tx\n", Lsn(switch))).unwrap();
    drop(spool);
    let spool = Spool::open(folder.path()).unwrap().unwrap();
    log.timeline = 2;
    (0..300).for_each(|_| log.push(9_000));
    append(&spool, &log, switch, log.end()).await;
    let spool = {
        drop(spool);
        Arc::new(Spool::open(folder.path()).unwrap().unwrap())
    };
    let positions = *spool.positions().borrow();
    assert_eq!((positions.timeline, positions.durable), (Timeline(2), Lsn(log.end())));
    // Who is on the new timeline reads all of it.
    let mut reader = SpoolReader::new(spool.clone(), Timeline(2)).unwrap();
    let (mut at, mut read) = (BEGIN, Vec::new());
    while at < log.end() {
        assert!(reader.read(Lsn(at), positions.durable, 100_000).unwrap());
        let piece = reader.log().to_vec();
        // Not where the file system cannot say what is in memory.
        if reader.read_if_cached(Lsn(at), positions.durable, 100_000) {
            assert!(reader.log() == piece);
        }
        at += piece.len() as u64;
        read.extend_from_slice(&piece);
    }
    assert!(read == log.bytes, "what is read is not the log");
    assert!(!reader.read(Lsn(BEGIN - 1), Lsn(BEGIN), 1).unwrap());
    // One that left before what is here has another past.
    spool.keep_history(Timeline(3), &format!("2\t{}\tx\n", Lsn(switch))).unwrap();
    spool.switch_timeline(Timeline(3), Lsn(switch)).await.unwrap();
    while spool.trouble().is_none() {
        tokio::task::yield_now().await;
    }
    assert!(matches!(spool.failure(), SpoolError::Diverged { .. }));
}

/// One that began on a timeline with the segment that this begins in: the log before that is the one
/// that comes first.
#[tokio::test]
async fn a_timeline_that_a_spool_begins_on_was_not_switched_to() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = Log::new(BEGIN);
    log.timeline = 2;
    (0..50).for_each(|_| log.push(5_000));
    let begin = Lsn(BEGIN);
    let spool = Spool::create(folder.path(), identity(), Timeline(2), begin).unwrap();
    let switch = log.ends[40];
    spool.keep_history(Timeline(2), &format!("1\t{}\tx\n", Lsn(switch))).unwrap();
    let (some, more) = (log.ends[3], log.ends[45]);
    append(&spool, &log, BEGIN, some).await;
    drop(spool);
    assert_eq!(durable(folder.path()), Lsn(some));
    let spool = Spool::open(folder.path()).unwrap().unwrap();
    append(&spool, &log, some, more).await;
    drop(spool);
    assert_eq!(durable(folder.path()), Lsn(more));
}

#[tokio::test]
async fn whole_segments_are_forgotten_when_nobody_needs_them() {
    let (folder, log) = filled().await;
    let spool = Spool::open(folder.path()).unwrap().unwrap();
    let slot = SlotName::new("standby").unwrap();
    assert!(spool.create_slot(&slot, Some(Lsn(BEGIN))).unwrap());
    assert_eq!(spool.forget(spool.kept_for_slots().unwrap(), 0).unwrap(), 0);
    spool.advance_slot(&slot, Lsn(BEGIN + SEGMENT_BYTES + 5));
    let needed = spool.kept_for_slots().unwrap();
    assert_eq!(spool.forget(needed, 100 * SEGMENT_BYTES).unwrap(), 0, "there is room");
    assert_eq!(spool.forget(needed, 0).unwrap(), 1);
    assert_eq!(spool.forget(Lsn::MAX, 0).unwrap(), 0, "the record that goes over can be checked");
    assert_eq!(spool.segments().unwrap().len(), 2);
    drop(spool);
    assert_eq!(durable(folder.path()), Lsn(log.end()));
}

/// Log of some segments, of records that are all alike: whatever a file held before stands where
/// the new records do.
fn log_of(segments: u64) -> Log {
    let mut log = Log::new(BEGIN);
    while log.end() < BEGIN + segments * SEGMENT_BYTES - SEGMENT_BYTES / 2 {
        log.push(1_000);
    }
    log
}

#[tokio::test]
async fn forgotten_segments_become_new_ones() {
    let folder = tempfile::tempdir().unwrap();
    let (log, spool) = (log_of(8), created(folder.path()));
    let spool = Arc::new(spool);
    let olds = || {
        let names = std::fs::read_dir(folder.path()).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("old.")).count()
    };
    let middle = BEGIN + 3 * SEGMENT_BYTES + SEGMENT_BYTES / 2;
    append(&spool, &log, BEGIN, middle).await;
    let mut reader = SpoolReader::new(spool.clone(), Timeline(1)).unwrap();
    let from = Lsn(BEGIN + 5);
    assert!(reader.read(from, Lsn(middle), 500).unwrap());
    assert_eq!(*reader.log(), *log.between(from.0, from.0 + 500));
    spare_is_made(&spool).await;
    assert_eq!(spool.forget(Lsn::MAX, 0).unwrap(), 2);
    assert_eq!(olds(), 1, "one is kept, however little may be");
    assert!(!reader.read(from, Lsn(middle), 500).unwrap(), "it may be other log by now");
    assert!(!reader.read_if_cached(from, Lsn(middle), 500));
    // The next one was made before; the one after it is the old one.
    let end = BEGIN + 5 * SEGMENT_BYTES + SEGMENT_BYTES / 3;
    append(&spool, &log, middle, end).await;
    assert_eq!(olds(), 0);
    spool.note_durable().unwrap();
    assert!(spool.damage().is_none(), "{:?}", spool.damage());
    let newest = std::fs::read(segment(folder.path(), 5)).unwrap();
    let written = (end % SEGMENT_BYTES) as usize;
    assert_eq!(newest[..written], *log.between(BEGIN + 5 * SEGMENT_BYTES, end));
    let page = written.next_multiple_of(8_192);
    assert!(newest[written..page].iter().all(|byte| *byte == 0), "up to the page's end");
    assert!(newest[page..].iter().any(|byte| *byte != 0), "old log is not there");
    drop((spool, reader));
    assert_eq!(durable(folder.path()), Lsn(log.whole_until(end)));
    // As if the end of that page had not come to the disk.
    let old = log.between(BEGIN, BEGIN + SEGMENT_BYTES);
    overwrite(&segment(folder.path(), 5), written as u64, &old[written..page]);
    assert_eq!(durable(folder.path()), Lsn(log.whole_until(end)));
    // It goes on in a segment with old log behind.
    let spool = Spool::open(folder.path()).unwrap().unwrap();
    append(&spool, &log, log.whole_until(end), log.end()).await;
    drop(spool);
    assert_eq!(durable(folder.path()), Lsn(log.end()));
    for nth in 3..7 {
        let begin = BEGIN + nth * SEGMENT_BYTES;
        let whole = std::fs::read(segment(folder.path(), nth)).unwrap();
        assert_eq!(whole, log.between(begin, begin + SEGMENT_BYTES), "segment {nth}");
    }
}

/// What follows the record that ends a segment has no checksum: after a crash it may be anything.
#[tokio::test]
async fn what_follows_a_switch_is_claimed_once_the_next_segment_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = Log::new(BEGIN);
    while log.end() < BEGIN + SEGMENT_BYTES + 10_000 {
        log.push(900);
    }
    log.switch_segment();
    let switched = *log.ends.last().unwrap();
    let boundary = BEGIN + 2 * SEGMENT_BYTES;
    assert!(switched + 50_000 < boundary);
    log.push(500);
    let spool = created(folder.path());
    append(&spool, &log, BEGIN, switched + 50_000).await;
    drop(spool);
    // As an earlier version left it, which may have told of the whole segment.
    let state = folder.path().join(folder::STATE);
    let now = std::fs::read(&state).unwrap();
    let mut earlier = now.clone();
    earlier[8] = 1;
    let crc = crc32c::crc32c(&earlier[..48]);
    earlier[48..52].copy_from_slice(&crc.to_le_bytes());
    std::fs::write(&state, &earlier).unwrap();
    assert_eq!(durable(folder.path()), Lsn(boundary));
    assert_eq!(durable(folder.path()), Lsn(boundary), "again, before anything else comes");
    assert_eq!(std::fs::read(&state).unwrap(), earlier);
    std::fs::write(&state, &now).unwrap();
    assert_eq!(durable(folder.path()), Lsn(switched));
    let spool = Spool::open(folder.path()).unwrap().unwrap();
    append(&spool, &log, switched, boundary).await;
    drop(spool);
    assert_eq!(durable(folder.path()), Lsn(boundary));
    std::fs::write(&state, &earlier).unwrap();
    let spool = Spool::open(folder.path()).unwrap().unwrap();
    append(&spool, &log, boundary, log.end()).await;
    drop(spool);
    assert_eq!(durable(folder.path()), Lsn(log.end()));
    assert_eq!(std::fs::read(&state).unwrap()[8], 2, "it is of this version from then on");
}

/// A start, a look and a promotion read the newest segment, and the one before it for the record
/// that goes over.
#[tokio::test]
async fn what_was_complete_long_ago_is_not_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let (log, spool) = (log_of(5), created(folder.path()));
    append(&spool, &log, BEGIN, log.end()).await;
    let newest = BEGIN + 4 * SEGMENT_BYTES;
    assert!(!log.ends.contains(&newest), "a record must go over");
    overwrite(&segment(folder.path(), 1), 9_000, &[0xa5; 16]);
    spool.check_from(Lsn(newest)).unwrap();
    assert_eq!(spool.last_record_end().unwrap(), Lsn(log.end()));
    let damaged = spool.check_from(Lsn(BEGIN + 2 * SEGMENT_BYTES)).unwrap_err();
    assert!(matches!(damaged, SpoolError::Damaged { .. }), "{damaged}");
    drop(spool);
    assert_eq!(durable(folder.path()), Lsn(log.end()));
}

#[tokio::test]
async fn a_record_longer_than_a_segment_is_checked_as_a_whole() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = Log::new(BEGIN);
    (0..100).for_each(|_| log.push(900));
    let begins = log.end();
    log.push(2 * SEGMENT_BYTES as u32 + 300_000);
    log.push(50);
    let spool = created(folder.path());
    append(&spool, &log, BEGIN, log.end()).await;
    assert_eq!(spool.last_record_end().unwrap(), Lsn(log.end()));
    drop(spool);
    assert_eq!(durable(folder.path()), Lsn(log.end()));
    overwrite(&segment(folder.path(), 0), begins % SEGMENT_BYTES + 100, &[0xa5; 16]);
    // Any of its bytes may be the wrong one, also the last.
    assert_eq!(durable(folder.path()), Lsn(BEGIN + 2 * SEGMENT_BYTES));
}

#[test]
fn one_process_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let _spool = created(folder.path());
    assert!(matches!(refused(folder.path()), SpoolError::Locked { .. }));
}

/// A disk that refuses something for a while is no reason to take nothing in for good.
#[tokio::test]
async fn a_disk_that_refuses_a_segment_is_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let log = some_log();
    let spool = created(folder.path());
    // Where the file for the first segment would be made, there is none to be made.
    let obstacle = folder.path().join("spare.tmp");
    std::fs::create_dir_all(obstacle.join("within")).unwrap();
    let mut trouble = spool.shared.trouble.subscribe();
    let data = Bytes::copy_from_slice(log.between(BEGIN, BEGIN + 1_000));
    spool.append(Timeline(1), Lsn(BEGIN), &[data]).await.unwrap();
    let told = trouble.wait_for(Option::is_some).await.unwrap().clone().unwrap();
    assert!(told.to_string().contains("spare.tmp") && !told.is_out_of_room(), "{told}");
    std::fs::remove_dir_all(&obstacle).unwrap();
    trouble.wait_for(Option::is_none).await.unwrap();
    assert_eq!(spool.settled().await.unwrap().durable, Lsn(BEGIN + 1_000));
    append(&spool, &log, BEGIN + 1_000, log.end()).await;
}

/// What goes to a file that has lost its name is kept by nobody.
#[tokio::test]
async fn nothing_is_taken_in_once_the_newest_segment_or_the_folder_is_gone() {
    for is_whole in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let log = some_log();
        let spool = created(folder.path());
        spool.forget(Lsn(u64::MAX), u64::MAX).unwrap();
        append(&spool, &log, BEGIN, BEGIN + SEGMENT_BYTES).await;
        spool.forget(Lsn(u64::MAX), u64::MAX).unwrap();
        let (from, to) = (BEGIN + SEGMENT_BYTES, log.end() - 100);
        append(&spool, &log, from, to).await;
        spare_is_made(&spool).await;
        spool.forget(Lsn(u64::MAX), u64::MAX).unwrap();
        assert!(!spool.has_failed());
        if is_whole {
            std::fs::remove_dir_all(folder.path()).unwrap();
        } else {
            std::fs::remove_file(segment(folder.path(), 2)).unwrap();
        }
        let error = spool.forget(Lsn(u64::MAX), u64::MAX).unwrap_err();
        assert!(matches!(error, SpoolError::Removed { .. }), "{error}");
        assert!(matches!(spool.failure(), SpoolError::Removed { .. }));
        let more = Bytes::copy_from_slice(log.between(to, log.end()));
        let taken = spool.append_at_once(Timeline(1), Lsn(to), &[more]).await;
        let taken = match taken {
            Ok(()) => spool.settled().await.map(drop),
            refused => refused.map(drop),
        };
        assert!(matches!(taken, Err(SpoolError::Removed { .. })), "{taken:?}");
        assert_eq!(spool.positions().borrow().durable, Lsn(to));
    }
}

#[tokio::test]
async fn a_temporary_slot_ends_with_the_task_that_has_it() {
    let folder = tempfile::tempdir().unwrap();
    let spool = Arc::new(created(folder.path()));
    let kept = SlotName::new("kept").unwrap();
    assert!(spool.create_slot(&kept, None).unwrap());
    let name = SlotName::new("temporary").unwrap();
    let slot = spool.create_temporary_slot(&name, Some(Lsn(BEGIN))).unwrap();
    assert!(spool.create_temporary_slot(&name, None).is_none());
    spool.advance_slot(&name, Lsn(BEGIN + SEGMENT_BYTES));
    let file = std::fs::read_to_string(folder.path().join(folder::SLOTS)).unwrap();
    assert!(!file.contains("temporary"), "{file}");
    let task = tokio::spawn(async move {
        let _slot = slot;
        std::future::pending::<()>().await;
    });
    task.abort();
    assert!(task.await.unwrap_err().is_cancelled());
    assert_eq!(spool.slot(&name), None);
    assert_eq!((spool.kept_for_slots(), spool.slot(&kept)), (None, Some(None)));
}

#[tokio::test]
async fn a_timeline_without_its_history_is_refused_at_the_switch() {
    let elsewhere = |end: u64| format!("1\t{}\tx\n", Lsn(end - 8));
    for history in [None, Some(elsewhere)] {
        let (folder, log) = filled().await;
        let spool = Spool::open(folder.path()).unwrap().unwrap();
        if let Some(history) = history {
            spool.keep_history(Timeline(2), &history(log.end())).unwrap();
        }
        spool.switch_timeline(Timeline(2), Lsn(log.end())).await.unwrap();
        let error = spool.settled().await.unwrap_err();
        assert!(matches!(error, SpoolError::NoHistory { .. }), "{error}");
        assert!(error.to_string().contains("00000002.history"), "{error}");
        drop(spool);
        // Nothing of it is there: it goes on when the history has come.
        assert_eq!(durable(folder.path()), Lsn(log.end()));
    }
}

/// Without the note, what is unsound in the newest segment is taken for the torn end.
#[tokio::test]
async fn damage_behind_what_was_noted_is_no_torn_end() {
    let folder = tempfile::tempdir().unwrap();
    let (log, spool) = (some_log(), created(folder.path()));
    let whole = *log.ends.iter().rfind(|end| **end < log.end() - 20_000).unwrap();
    append(&spool, &log, BEGIN, whole + 9).await;
    spool.note_durable().unwrap();
    assert_eq!(spool.last_record_end().unwrap(), Lsn(whole), "the record behind it is not whole");
    spool.note_durable().unwrap();
    drop(spool);
    // The beginning of another record was there: that is an end as any crash leaves.
    let spool = Spool::open(folder.path()).unwrap().unwrap();
    assert_eq!(spool.last_record_end().unwrap(), Lsn(whole));
    drop(spool);
    let nth = (whole - BEGIN) / SEGMENT_BYTES;
    let damaged_at = whole - 5_000;
    assert!(damaged_at > BEGIN + nth * SEGMENT_BYTES + 9_000, "not within the newest segment");
    let path = segment(folder.path(), nth);
    overwrite(&path, (damaged_at - BEGIN) % SEGMENT_BYTES, &[0xa5; 16]);
    let spool = Spool::open(folder.path()).unwrap().unwrap();
    let sound = spool.positions().borrow().durable;
    assert!(sound <= Lsn(damaged_at), "{sound}");
    match spool.last_record_end().unwrap_err() {
        SpoolError::Damaged { position, durable, path: found, .. } => {
            assert_eq!((position, durable, found), (sound, Lsn(whole), path));
        }
        other => panic!("{other}"),
    }
    assert!(matches!(spool.damage(), Some(SpoolError::Damaged { .. })));
    spool.note_durable().unwrap();
    assert!(spool.damage().is_some(), "it is still so");
    // What is received again mends it.
    append(&spool, &log, sound.0, whole).await;
    assert_eq!(spool.last_record_end().unwrap(), Lsn(whole));
    spool.note_durable().unwrap();
    assert!(spool.damage().is_none());
}

/// A look reads what came since the one before.
#[tokio::test]
async fn damage_in_what_came_since_the_last_look_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let (log, spool) = (some_log(), created(folder.path()));
    let ends: Vec<u64> = log.ends.iter().copied().filter(|end| *end < log.end() - 20_000).collect();
    let (first, last) = (ends[ends.len() / 2], ends[ends.len() - 1]);
    assert!(last - first > 20_000, "not enough log");
    append(&spool, &log, BEGIN, first).await;
    spool.note_durable().unwrap();
    append(&spool, &log, first, last).await;
    let damaged_at = last - 9_000;
    let path = segment(folder.path(), (damaged_at - BEGIN) / SEGMENT_BYTES);
    let at = (damaged_at - BEGIN) % SEGMENT_BYTES;
    let sound = std::fs::read(&path).unwrap()[at as usize..][..16].to_vec();
    overwrite(&path, at, &[0xa5; 16]);
    spool.note_durable().unwrap();
    assert!(matches!(spool.damage(), Some(SpoolError::Damaged { .. })));
    // Nothing more came, and it is looked at once more.
    overwrite(&path, at, &sound);
    spool.note_durable().unwrap();
    assert!(spool.damage().is_none());
    append(&spool, &log, last, log.end()).await;
    spool.note_durable().unwrap();
    assert!(spool.damage().is_none());
}

/// It is not withdrawn because what came later is sound.
#[tokio::test]
async fn damage_stays_told_when_its_segment_is_complete() {
    let folder = tempfile::tempdir().unwrap();
    let (log, spool) = (some_log(), created(folder.path()));
    let in_segment = |nth: u64| {
        let most = BEGIN + nth * SEGMENT_BYTES + SEGMENT_BYTES / 2;
        *log.ends.iter().rfind(|end| **end < most).unwrap()
    };
    let (first, second, third) = (in_segment(0), in_segment(1), in_segment(2));
    append(&spool, &log, BEGIN, first).await;
    spool.note_durable().unwrap();
    append(&spool, &log, first, second).await;
    let path = segment(folder.path(), 0);
    let at = first - BEGIN + 9_000;
    let sound = std::fs::read(&path).unwrap()[at as usize..][..16].to_vec();
    overwrite(&path, at, &[0xa5; 16]);
    spool.note_durable().unwrap();
    assert!(matches!(spool.damage(), Some(SpoolError::Damaged { .. })));
    spool.note_durable().unwrap();
    append(&spool, &log, second, third).await;
    spool.note_durable().unwrap();
    assert!(spool.damage().is_some(), "it is still so");
    overwrite(&path, at, &sound);
    spool.note_durable().unwrap();
    assert!(spool.damage().is_none());
}

/// Recovery reads the newest segment alone.
#[tokio::test]
async fn damage_that_came_behind_the_note_is_found_after_a_start() {
    let folder = tempfile::tempdir().unwrap();
    let (log, spool) = (some_log(), created(folder.path()));
    append(&spool, &log, BEGIN, log.ends[2]).await;
    spool.note_durable().unwrap();
    append(&spool, &log, log.ends[2], log.end()).await;
    let last_of_first = *log.ends.iter().rfind(|end| **end < BEGIN + SEGMENT_BYTES).unwrap();
    let (path, at) = (segment(folder.path(), 0), last_of_first - 20 - BEGIN);
    let sound = std::fs::read(&path).unwrap()[at as usize..][..16].to_vec();
    overwrite(&path, at, &[0xa5; 16]);
    drop(spool);
    let spool = Spool::open(folder.path()).unwrap().unwrap();
    spool.look_once();
    let (damage, position) = spool.damage_within().unwrap();
    // A record ends with up to seven bytes that mean nothing.
    assert!((last_of_first - 8..last_of_first).contains(&position.0), "{damage}");
    overwrite(&path, at, &sound);
    spool.note_durable().unwrap();
    assert!(spool.damage().is_none(), "{:?}", spool.damage());
}

/// Whichever it is, and however soon the log goes on behind it.
#[tokio::test]
async fn a_segment_that_is_removed_from_the_middle_or_the_beginning_is_missed() {
    for nth in [0, 1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let (log, spool) = (log_of(4), created(folder.path()));
        append(&spool, &log, BEGIN, BEGIN + 3 * SEGMENT_BYTES + 100).await;
        assert_eq!(spool.forget(Lsn::MAX, u64::MAX).unwrap(), 0);
        overwrite(&segment(folder.path(), nth), 9_000, &[0xa5; 16]);
        std::fs::remove_file(segment(folder.path(), nth)).unwrap();
        append(&spool, &log, BEGIN + 3 * SEGMENT_BYTES + 100, log.end()).await;
        let error = spool.forget(Lsn::MAX, u64::MAX).unwrap_err();
        let SpoolError::Removed { path } = &error else { panic!("{error}") };
        assert_eq!(*path, segment(folder.path(), nth));
        assert!(spool.has_failed());
        drop(spool);
        // The oldest may have been removed because nobody needs it.
        let opened = Spool::open(folder.path());
        assert!(nth == 0 || matches!(opened, Err(SpoolError::Missing { .. })), "{opened:?}");
    }
}

#[tokio::test]
async fn damage_before_the_first_look_is_found_behind_a_segment_that_was_switched() {
    let (folder, mut log) = (tempfile::tempdir().unwrap(), log_of(2));
    let spool = created(folder.path());
    spool.note_durable().unwrap();
    log.switch_segment();
    let end = log.end();
    log.push(100);
    append(&spool, &log, BEGIN, end).await;
    overwrite(&segment(folder.path(), 0), 9_000, &[0xa5; 16]);
    append(&spool, &log, end, log.end()).await;
    spool.note_durable().unwrap();
    assert!(spool.damage_within().is_some());
}

#[tokio::test]
async fn what_is_damaged_and_then_needed_by_nobody_is_not_told_any_more() {
    let folder = tempfile::tempdir().unwrap();
    let (log, spool) = (log_of(4), created(folder.path()));
    append(&spool, &log, BEGIN, BEGIN + SEGMENT_BYTES / 2).await;
    spool.note_durable().unwrap();
    append(&spool, &log, BEGIN + SEGMENT_BYTES / 2, log.end()).await;
    overwrite(&segment(folder.path(), 0), SEGMENT_BYTES - 20_000, &[0xa5; 16]);
    spool.note_durable().unwrap();
    assert!(spool.damage_within().is_some());
    assert!(spool.forget(Lsn::MAX, 0).unwrap() > 0);
    spool.note_durable().unwrap();
    assert!(spool.damage().is_none(), "{:?}", spool.damage());
}

/// What is damaged may be needed by nobody, and what comes later by all.
#[tokio::test]
async fn damage_behind_other_damage_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let (log, spool) = (log_of(6), created(folder.path()));
    let until = |nth: u64| BEGIN + nth * SEGMENT_BYTES + SEGMENT_BYTES / 2;
    let damage = |nth: u64| {
        let path = segment(folder.path(), nth);
        let sound = std::fs::read(&path).unwrap()[100_000..][..16].to_vec();
        overwrite(&path, 100_000, &[0xa5; 16]);
        (path, sound)
    };
    let found = |spool: &Spool| {
        spool.note_durable().unwrap();
        let (_, position) = spool.damage_within().expect("there is damage");
        (position.0 - BEGIN) / SEGMENT_BYTES
    };
    append(&spool, &log, BEGIN, until(1)).await;
    let first = damage(0);
    assert_eq!(found(&spool), 0);
    append(&spool, &log, until(1), until(3)).await;
    let second = damage(2);
    assert_eq!(found(&spool), 2);
    assert_eq!(found(&spool), 2, "it is still so");
    append(&spool, &log, until(3), until(4)).await;
    assert_eq!(found(&spool), 2);
    // As a start finds it, from what was noted on.
    drop(spool);
    let spool = Spool::open(folder.path()).unwrap().unwrap();
    assert_eq!(found(&spool), 2);
    overwrite(&second.0, 100_000, &second.1);
    assert_eq!(found(&spool), 0);
    let third = damage(4);
    let end = spool.positions().borrow().durable.0;
    append(&spool, &log, end, log.end()).await;
    assert_eq!(found(&spool), 4);
    overwrite(&first.0, 100_000, &first.1);
    assert_eq!(found(&spool), 4);
    overwrite(&third.0, 100_000, &third.1);
    spool.note_durable().unwrap();
    assert!(spool.damage().is_none(), "{:?}", spool.damage());
    assert!(spool.last_record_end().unwrap() > Lsn(until(4)));
}

/// A record reaches from one into the other.
#[tokio::test]
async fn damage_in_segments_in_a_row_stays_known() {
    let folder = tempfile::tempdir().unwrap();
    let (log, spool) = (log_of(4), created(folder.path()));
    append(&spool, &log, BEGIN, log.end()).await;
    let mut sound = Vec::new();
    for nth in 0..2 {
        let path = segment(folder.path(), nth);
        sound.push(std::fs::read(&path).unwrap()[100_000..][..16].to_vec());
        overwrite(&path, 100_000, &[0xa5; 16]);
    }
    let is_in_second = |spool: &Spool| {
        spool.note_durable().unwrap();
        let (damage, position) = spool.damage_within().expect("there is damage");
        assert_eq!((position.0 - BEGIN) / SEGMENT_BYTES, 1, "{damage}");
    };
    for _ in 0..3 {
        is_in_second(&spool);
    }
    assert_eq!(spool.forget(Lsn(BEGIN + SEGMENT_BYTES), 0).unwrap(), 1);
    for _ in 0..3 {
        is_in_second(&spool);
    }
    overwrite(&segment(folder.path(), 1), 100_000, &sound[1]);
    spool.note_durable().unwrap();
    assert!(spool.damage().is_none(), "{:?}", spool.damage());
}

/// A segment whose beginning is not to be read is passed over, and nothing behind it.
#[tokio::test]
async fn damage_behind_a_segment_without_a_beginning_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let (log, spool) = (log_of(5), created(folder.path()));
    let until = |nth: u64| BEGIN + nth * SEGMENT_BYTES + SEGMENT_BYTES / 2;
    append(&spool, &log, BEGIN, until(1)).await;
    spool.note_durable().unwrap();
    overwrite(&segment(folder.path(), 1), 0, &[0; 64]);
    append(&spool, &log, until(1), until(3)).await;
    spool.note_durable().unwrap();
    overwrite(&segment(folder.path(), 3), 100_000, &[0xa5; 16]);
    append(&spool, &log, until(3), log.end()).await;
    spool.note_durable().unwrap();
    let (damage, position) = spool.damage_within().expect("there is damage");
    assert_eq!((position.0 - BEGIN) / SEGMENT_BYTES, 3, "{damage}");
}

#[tokio::test]
async fn what_was_removed_since_the_last_look_is_no_damage() {
    let folder = tempfile::tempdir().unwrap();
    let (log, spool) = (some_log(), created(folder.path()));
    append(&spool, &log, BEGIN, BEGIN + SEGMENT_BYTES / 2).await;
    spool.note_durable().unwrap();
    append(&spool, &log, BEGIN + SEGMENT_BYTES / 2, log.end()).await;
    let removed = spool.forget(Lsn(log.end()), SEGMENT_BYTES).unwrap();
    assert!(removed > 0, "nothing was removed");
    spool.note_durable().unwrap();
    assert!(spool.damage().is_none(), "{:?}", spool.damage());
}

#[test]
fn a_spool_whose_folder_takes_no_note_is_closed_until_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let spool = created(folder.path());
    let closed_for =
        |server: &str| Closed { timeline: Timeline(1), end: Lsn(BEGIN), server: server.to_owned() };
    // Where the new file would be there is none to be made.
    let obstacle = folder.path().join("closed.tmp");
    std::fs::create_dir(&obstacle).unwrap();
    let error = spool.close(closed_for("a")).unwrap_err();
    assert!(spool.check_open().is_ok());
    spool.close_until_restart(closed_for("a"), error);
    assert!(matches!(spool.check_open(), Err(SpoolError::Promoted { .. })));
    assert!(spool.unsaved_close().is_some());
    // Once it takes one, the same call notes it.
    std::fs::remove_dir(&obstacle).unwrap();
    spool.close(closed_for("a")).unwrap();
    assert!(spool.unsaved_close().is_none());
    drop(spool);
    let spool = Spool::open(folder.path()).unwrap().unwrap();
    assert_eq!(spool.closed(), Some(closed_for("a")));
    // Another server in its place is noted as well.
    spool.close(closed_for("b")).unwrap();
    assert_eq!(spool.closed(), Some(closed_for("b")));
    drop(spool);
    let spool = Spool::open(folder.path()).unwrap().unwrap();
    assert_eq!(spool.closed(), Some(closed_for("b")));
}

#[tokio::test]
async fn what_a_server_needs_to_replay_the_log_is_read_from_where_it_stands() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = some_log();
    let mut ends = Vec::new();
    for connections in [300_i32, 100, 200] {
        let mut data = vec![0xFF, 28];
        for value in [connections, 8, 10, 0, 64, 1, 0] {
            data.extend_from_slice(&value.to_le_bytes());
        }
        log.push_as_server(0, 0, 0x60, &data);
        log.push(1_000);
        ends.push(Lsn(log.end()));
    }
    let spool = created(folder.path());
    append(&spool, &log, BEGIN, log.end()).await;
    let needs = |from: Lsn, end: Lsn| {
        let found = spool.to_replay(from, end).unwrap();
        (found.needs.map(|(_, Settings(values))| values[0]), found.is_next_known)
    };
    let end = ends[2];
    assert_eq!(needs(Lsn(log.ends[3]), end), (Some(300), true));
    // What was replayed counts no more, nor what is not there yet.
    assert_eq!(needs(ends[0], end), (Some(200), true));
    assert_eq!(needs(ends[0], ends[1]), (Some(100), true));
    assert_eq!(needs(ends[2], end), (None, false));
    // Of log that is not here the rest is known.
    std::fs::remove_file(segment(folder.path(), 0)).unwrap();
    assert_eq!(needs(Lsn(log.ends[3]), end), (Some(300), false));
    assert_eq!(needs(ends[0], end), (Some(200), true));
}
