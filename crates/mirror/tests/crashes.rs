//! The spool's process is killed at every crash point, with and without a power cut; what it had
//! said to be durable must be there afterwards. Needs `--features faults`.
#![cfg(feature = "faults")]

#[path = "synthetic/mod.rs"]
mod synthetic;

use bytes::Bytes;
use farshore_mirror::spool::{HERE_BYTES, Identity, Spool};
use farshore_mirror::wal::{SegmentBytes, Timeline};
use farshore_model::Lsn;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use synthetic::{Log, SEGMENT_BYTES, SYSTEM_ID};

const CHILD: &str = "FARSHORE_SPOOL_TEST_DIR";
const BEGIN: u64 = 3 * SEGMENT_BYTES;
/// Log enough for every crash point to be passed: some segments.
const LOG_BYTES: u64 = 4 * SEGMENT_BYTES;

fn log() -> Log {
    let mut log = Log::new(BEGIN);
    let mut length = 30;
    while log.end() < BEGIN + LOG_BYTES {
        log.push(length);
        length = (length * 7 + 13) % 9_000 + 24;
    }
    log
}

/// Runs in a process of its own when the environment asks for it.
#[tokio::test]
async fn child() {
    let Ok(folder) = std::env::var(CHILD) else { return };
    let folder = Path::new(&folder);
    let log = log();
    let identity = Identity {
        system_id: SYSTEM_ID,
        segment: SegmentBytes::new(SEGMENT_BYTES).expect("a size"),
        server_version: 150_000,
    };
    let spool = match Spool::open(&folder.join("spool")).expect("open") {
        Some(spool) => spool,
        None => {
            Spool::create(&folder.join("spool"), identity, Timeline(1), Lsn(BEGIN)).expect("create")
        }
    };
    let acknowledged =
        std::fs::OpenOptions::new().create(true).append(true).open(folder.join("acknowledged"));
    let mut acknowledged = acknowledged.expect("notes");
    let mut positions = spool.positions();
    let mut at = positions.borrow().durable.0;
    // Pieces end where records do, as a walsender's do, and where segments do: what is claimed
    // there, the principal drops.
    let records = log.ends.iter().copied().filter(|end| end % 5 != 3);
    let boundaries = (1..=LOG_BYTES / SEGMENT_BYTES).map(|nth| BEGIN + nth * SEGMENT_BYTES);
    let mut ends: Vec<u64> = records.chain(boundaries.clone()).collect();
    ends.sort_unstable();
    let (mut begun, mut pieces) = (at, Vec::new());
    for end in ends {
        if end <= at {
            continue;
        }
        pieces.push(Bytes::copy_from_slice(log.between(at, end)));
        at = end;
        let is_boundary = boundaries.clone().any(|boundary| boundary == end);
        // Of every second segment so much at a time that it is handed over to the writer's thread.
        let by_thread = ((end - 1) / SEGMENT_BYTES).is_multiple_of(2);
        if by_thread && !is_boundary && at - begun < HERE_BYTES as u64 {
            continue;
        }
        spool.append_at_once(Timeline(1), Lsn(begun), &pieces).await.expect("append");
        (begun, pieces) = (at, Vec::new());
        if by_thread || end % 3 == 0 || is_boundary {
            let durable = positions.wait_for(|positions| positions.durable.0 >= at).await;
            let durable = durable.expect("durable").durable;
            writeln!(acknowledged, "{}", durable.0).expect("note");
            spool.forget(durable, 2 * SEGMENT_BYTES).expect("forget");
        }
    }
}

/// What the killed process had said, and what is there.
struct Left {
    acknowledged: u64,
    durable: u64,
    crashed: bool,
    bytes_are_right: bool,
}

fn crash(point: Option<String>, defect: Option<&str>) -> Left {
    let folder = tempfile::tempdir().expect("folder");
    let mut command = Command::new(std::env::current_exe().expect("own name"));
    command.args(["--exact", "child", "--nocapture"]).env(CHILD, folder.path());
    command.env("FARSHORE_CRASH", point.unwrap_or_default());
    command.env("FARSHORE_DEFECT", defect.unwrap_or_default());
    let output = command.output().expect("run");
    let crashed = output.status.signal() == Some(9);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(crashed || output.status.success(), "{said}");
    let notes = std::fs::read_to_string(folder.path().join("acknowledged")).unwrap_or_default();
    let acknowledged = notes.lines().filter_map(|line| line.parse().ok()).max().unwrap_or(BEGIN);
    let Some(spool) = Spool::open(&folder.path().join("spool")).expect("open again") else {
        return Left { acknowledged, durable: 0, crashed, bytes_are_right: true };
    };
    let durable = spool.positions().borrow().durable.0;
    let log = log();
    let bytes_are_right = spool.segments().expect("segments").iter().all(|segment| {
        let size = spool.identity().segment;
        let file = folder.path().join("spool").join(segment.file_name(size));
        let bytes = std::fs::read(file).expect("segment");
        let start = size.start(segment.number).0;
        let end = durable.clamp(start, start + SEGMENT_BYTES).min(log.end());
        bytes[..(end - start) as usize] == *log.between(start, end)
    });
    Left { acknowledged, durable, crashed, bytes_are_right }
}

#[test]
fn what_was_acknowledged_survives_every_crash_point() {
    let points = farshore_fault::POINTS.iter().filter(|point| point.starts_with("spool."));
    let mut crashes = 0;
    for point in points {
        for nth in [1, 2, 3, 7, 50, 301] {
            for cut in ["", ":cut"] {
                let left = crash(Some(format!("{point}:{nth}{cut}")), None);
                let at = format!("{point}:{nth}{cut}");
                assert!(
                    left.durable >= left.acknowledged
                        || left.durable == 0 && left.acknowledged == BEGIN,
                    "{at}: acknowledged {}, left {}",
                    Lsn(left.acknowledged),
                    Lsn(left.durable)
                );
                assert!(left.bytes_are_right, "{at}: the files are not the log");
                crashes += usize::from(left.crashed);
            }
        }
    }
    println!("{crashes} crashes");
    assert!(crashes >= 30, "only {crashes} crashes: are the points passed?");
}

#[test]
fn acknowledging_before_fsync_is_caught() {
    let points =
        ["spool.before-write:300:cut", "spool.before-write:301:cut", "spool.after-roll:2:cut"];
    let caught = points.iter().any(|point| {
        let left = crash(Some((*point).to_owned()), Some("spool-durable-before-fsync"));
        assert!(left.crashed, "{point} was not passed");
        left.durable < left.acknowledged || !left.bytes_are_right
    });
    assert!(caught, "the defect does no harm that is noticed");
}
