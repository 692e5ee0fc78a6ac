//! The store's process is killed at every crash point, with and without a power cut; what it had
//! acknowledged must be there afterwards. Needs `--features faults`.
#![cfg(feature = "faults")]

use farshore_model::{Applied, Lsn};
use farshore_store::conformance::{block_on, entries, noise, push, read_all, wait_durable};
use farshore_store::segmented::{Options, SegmentedStore};
use farshore_store::{Batch, Entry, EntryKind, LogStore, Retention, SpillItem, StoreError};
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const CHILD: &str = "FARSHORE_STORE_TEST_DIR";
/// More rounds than any crash point needs.
const ROUNDS: u64 = 400;

fn options() -> Options {
    Options {
        segment_bytes: 8 << 10,
        block_bytes: 4 << 10,
        cursor_save_interval: Duration::from_millis(1),
        roll_bytes_min: 4 << 10,
        ..Options::default()
    }
}

/// What the entry at a position holds.
fn payload(position: u64) -> Vec<u8> {
    noise((position % 700) as usize, position)
}

fn spill_body(position: u64) -> Vec<u8> {
    noise(9000, position)
}

/// One line per fact that was acknowledged, written before the next step.
fn note(dir: &Path, line: &str) {
    let file =
        std::fs::OpenOptions::new().create(true).append(true).open(dir.join("../acknowledged"));
    file.and_then(|mut file| writeln!(file, "{line}")).expect("note");
}

/// Runs in a process of its own when the environment asks for it.
#[test]
fn child() {
    let Ok(dir) = std::env::var(CHILD) else { return };
    let dir = Path::new(&dir);
    let (store, report) = SegmentedStore::open(dir, options()).expect("open");
    let mut position = report.end.0;
    let append = |batch: Batch| {
        let last = batch.entries.last().map_or(Lsn::ZERO, |entry| entry.position);
        block_on(async {
            store.append(batch).await.expect("append");
            wait_durable(&*store, last).await;
        });
        note(dir, &format!("durable {}", last.0));
    };
    store.register_cursor("reader").expect("register");
    for round in 0..ROUNDS {
        let mut batch = Batch::default();
        batch.dictionary.push(store.define(format!("relation {}", round % 5).as_bytes()));
        for _ in 0..3 {
            position += 1;
            push(&mut batch, position, EntryKind::Transaction, &payload(position));
        }
        append(batch);
        match round % 4 {
            0 => {
                position += 1;
                let mut writer = store.begin_spill().expect("begin");
                let id = store.define(b"spilled");
                for chunk in spill_body(position).chunks(1000) {
                    writer.write(chunk, &[id]).expect("write");
                }
                let spill = writer.finish().expect("finish");
                let mut batch = Batch::default();
                push(&mut batch, position, EntryKind::Spilled(spill), &position.to_le_bytes());
                append(batch);
            }
            1 => {
                let mut writer = store.begin_spill().expect("begin");
                writer.write(&noise(5000, round), &[]).expect("write");
                writer.flush().expect("flush");
                drop(writer);
            }
            2 => {
                let applied = position.saturating_sub(10);
                note(dir, &format!("applying {applied}"));
                store.move_cursor("reader", Applied(Lsn(applied))).expect("move");
            }
            _ => {
                store.enforce_retention(&Retention::default()).expect("retention");
            }
        }
    }
}

/// Runs the child until it is killed, and checks what it left. Says what was wrong, if anything.
fn crash(dir: &Path, fault: &str, defect: &str) -> Result<(), String> {
    let store_dir = dir.join("store");
    std::fs::create_dir_all(&store_dir).expect("folder");
    let output = Command::new(std::env::current_exe().expect("exe"))
        .args(["--exact", "child", "--nocapture"])
        .env(CHILD, &store_dir)
        .env("FARSHORE_CRASH", fault)
        .env("FARSHORE_DEFECT", defect)
        .output()
        .expect("child");
    let killed = output.status.signal() == Some(9);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(killed, "{fault} was not reached: {}\n{said}", output.status);
    let noted = std::fs::read_to_string(dir.join("acknowledged")).unwrap_or_default();
    let newest = |word: &str| -> u64 {
        let lines = noted.lines().filter_map(|line| line.strip_prefix(word));
        lines.filter_map(|number| number.trim().parse().ok()).max().unwrap_or(0)
    };
    let acknowledged = newest("durable");
    let (store, report) =
        SegmentedStore::open(&store_dir, options()).map_err(|error| error.to_string())?;
    if report.end.0 < acknowledged {
        return Err(format!("{acknowledged} was acknowledged, the log ends at {}", report.end));
    }
    check(&store, newest("applying"))
}

fn check(store: &Arc<SegmentedStore>, applying: u64) -> Result<(), String> {
    let status = store.status();
    let found = entries(read_all(&**store, status.start));
    let mut next = status.start.0;
    for Entry { position, kind, payload: found, .. } in found {
        next += 1;
        if position.0 != next {
            return Err(format!("{position} follows {}", next - 1));
        }
        match kind {
            EntryKind::Spilled(spill) => {
                let mut reader = store.open_spill(spill).map_err(|error| error.to_string())?;
                let mut body = Vec::new();
                while let Some(items) = reader.next_block().map_err(|e| e.to_string())? {
                    for item in items {
                        match item {
                            SpillItem::Chunk(bytes) => body.extend_from_slice(&bytes),
                            SpillItem::Definition(_, bytes) => assert_eq!(&bytes[..], b"spilled"),
                        }
                    }
                }
                if body != spill_body(next) {
                    return Err(format!("the spill at {position} differs"));
                }
            }
            EntryKind::Transaction if found == payload(next) => {}
            EntryKind::Transaction | EntryKind::Watermark => {
                return Err(format!("the entry at {position} differs"));
            }
        }
    }
    if next != status.durable.0.0 {
        return Err(format!("entries end at {next}, the log at {}", status.durable));
    }
    for cursor in store.cursors() {
        if cursor.expired.is_some() || cursor.applied.0.0 > applying.max(status.start.0) {
            return Err(format!("{cursor:?} leads {applying}"));
        }
        match store.read_from(cursor.applied.0) {
            Ok(_) => {}
            Err(StoreError::Dropped { .. }) => return Err(format!("{cursor:?} lost its log")),
            Err(error) => return Err(error.to_string()),
        }
    }
    Ok(())
}

#[test]
fn what_was_acknowledged_survives_a_kill_at_every_point() {
    let points = farshore_fault::POINTS
        .iter()
        .filter(|point| ["store.", "spill.", "cursor."].iter().any(|own| point.starts_with(own)));
    let mut checked = 0;
    for point in points {
        // One folder per point: each crash starts from what the one before left.
        let dir = tempfile::tempdir().expect("folder");
        for (nth, cut) in [(1, ""), (1, ":cut"), (2, ""), (3, ":cut"), (5, ":cut")] {
            let fault = format!("{point}:{nth}{cut}");
            crash(dir.path(), &fault, "").unwrap_or_else(|wrong| panic!("{fault}: {wrong}"));
            checked += 1;
        }
    }
    assert_eq!(checked, 14 * 5);
}

#[test]
fn acknowledging_before_fsync_is_noticed() {
    let dir = tempfile::tempdir().expect("folder");
    let defect = "acknowledge-before-fsync";
    let wrong = crash(dir.path(), "store.before-write:30:cut", defect);
    let wrong = wrong.expect_err("the defect must be noticed");
    assert!(wrong.contains("was acknowledged"), "{wrong}");
}
