//! A disk that is full, played with a small tmpfs in a mount namespace of its own.

use farshore_model::Lsn;
use farshore_store::conformance::{batch, block_on, entries, noise, read_all, wait_durable};
use farshore_store::segmented::{Options, SegmentedStore};
use farshore_store::{LogStore, Retention};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const CHILD: &str = "FARSHORE_STORE_TEST_FULL_DISK";

/// What waits for room must stay less than the room that there will be.
async fn durable_or_no_room(store: &dyn LogStore, position: u64) {
    while store.status().waiting_for_room.is_none() {
        let durable = wait_durable(store, Lsn(position));
        if tokio::time::timeout(Duration::from_millis(50), durable).await.is_ok() {
            break;
        }
    }
}

/// Runs in a process of its own when the environment names a small disk.
#[test]
fn child() {
    let Ok(disk) = std::env::var(CHILD) else { return };
    let disk = Path::new(&disk);
    let filler = disk.join("filler");
    std::fs::write(&filler, vec![1; 1 << 20]).unwrap();
    let dir = disk.join("store");
    let options = Options { segment_bytes: 256 << 10, ..Options::default() };
    let (store, _) = SegmentedStore::open(&dir, options.clone()).unwrap();
    let payload = |position| noise(5000, position);
    let mut position = 0;
    block_on(async {
        while store.status().waiting_for_room.is_none() {
            let appended = batch(&[(position + 1, &payload(position + 1))], &[]);
            let appended = tokio::time::timeout(Duration::from_millis(100), store.append(appended));
            match appended.await {
                Ok(appended) => appended.unwrap(),
                // The queue is full because the writer waits, or about to.
                Err(_elapsed) => continue,
            }
            position += 1;
            durable_or_no_room(&*store, position).await;
        }
    });
    let waits = store.status().waiting_for_room.unwrap();
    assert!(waits.contains("No space left on device"), "{waits}");
    // What is durable can be read, nothing else, and nobody waits for a roll that cannot be.
    let durable = *store.durable().borrow();
    assert!(durable.0 > Lsn(10) && durable.0 < Lsn(position));
    assert_eq!(entries(read_all(&*store, Lsn::ZERO)).len() as u64, durable.0.0);
    let retention = Retention { bytes_max: Some(1), ..Retention::default() };
    store.register_cursor("s").unwrap();
    store.enforce_retention(&retention).unwrap();

    // Closing does not wait for room, and what was not durable is gone.
    drop(store);
    let durable = match SegmentedStore::open(&dir, options.clone()) {
        Ok((_, report)) => Lsn(report.end.0.max(durable.0.0)),
        // Still full: opening may fail, but must not make it worse.
        Err(error) => {
            assert!(error.is_out_of_room(), "{error}");
            durable.0
        }
    };
    std::fs::remove_file(&filler).unwrap();
    let (store, report) = SegmentedStore::open(&dir, options.clone()).unwrap();
    assert!(report.end >= durable, "{report:?}");
    let start = store.status().start;

    // It fills up again, and goes on by itself when there is room.
    let mut position = report.end.0;
    block_on(async {
        std::fs::write(&filler, vec![1; 1 << 20]).unwrap();
        while store.status().waiting_for_room.is_none() {
            let appended = batch(&[(position + 1, &payload(position + 1))], &[]);
            let appended = tokio::time::timeout(Duration::from_millis(100), store.append(appended));
            if let Ok(appended) = appended.await {
                appended.unwrap();
                position += 1;
                durable_or_no_room(&*store, position).await;
            }
        }
        std::fs::remove_file(&filler).unwrap();
        wait_durable(&*store, Lsn(position)).await;
        assert_eq!(store.status().waiting_for_room, None);
    });
    drop(store);
    let (store, _) = SegmentedStore::open(&dir, options).unwrap();
    let found = entries(read_all(&*store, start));
    assert_eq!(found.len() as u64, position - start.0);
    for (entry, position) in found.iter().zip(start.0 + 1..) {
        assert_eq!(entry.position, Lsn(position));
        assert!(entry.payload == payload(position));
    }
    println!("the child came to its end");
}

#[test]
fn a_full_disk_loses_nothing_durable() {
    let mount = tempfile::tempdir().unwrap();
    let unshare = |script: &str| {
        Command::new("unshare")
            .args(["--user", "--map-root-user", "--mount", "sh", "-c", script])
            .env("DISK", mount.path())
            .env("EXE", std::env::current_exe().unwrap())
            .env(CHILD, mount.path())
            .output()
    };
    let can_mount = unshare("mount -t tmpfs -o size=3m none \"$DISK\"");
    if !can_mount.is_ok_and(|output| output.status.success()) {
        println!("skipped a_full_disk_loses_nothing_durable: no mount namespaces here");
        return;
    }
    let script =
        "mount -t tmpfs -o size=3m none \"$DISK\" && exec \"$EXE\" --exact child --nocapture";
    let output = unshare(script).unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{errors}");
    assert!(said.contains("the child came to its end"), "{said}");
}
