//! A disk that is full, played with a small tmpfs in a mount namespace of its own.

use farshore_model::Lsn;
use farshore_store::conformance::{batch, block_on, entries, noise, read_all, wait_durable};
use farshore_store::segmented::{Options, SegmentedStore};
use farshore_store::{LogStore, StoreError};
use std::path::Path;
use std::process::Command;

const CHILD: &str = "FARSHORE_STORE_TEST_FULL_DISK";

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
    let mut position = 0;
    let failed = block_on(async {
        loop {
            position += 1;
            match store.append(batch(&[(position, &noise(5000, position))], &[])).await {
                Ok(()) => {}
                Err(error) => break error,
            }
        }
    });
    let StoreError::Failed(cause) = failed else { panic!("{failed}") };
    let StoreError::Io { error, .. } = &*cause else { panic!("{cause}") };
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    let durable = *store.durable().borrow();
    assert!(durable.0 > Lsn(10) && durable.0 < Lsn(position));
    assert_eq!(entries(read_all(&*store, Lsn::ZERO)).len() as u64, durable.0.0);
    drop(store);

    // Still full: opening may fail, but must not make it worse.
    let _ = SegmentedStore::open(&dir, options.clone());
    std::fs::remove_file(filler).unwrap();
    let (store, report) = SegmentedStore::open(&dir, options).unwrap();
    assert!(report.end >= durable.0, "{report:?}");
    let found = entries(read_all(&*store, Lsn::ZERO));
    for (index, entry) in found.iter().enumerate() {
        let position = index as u64 + 1;
        assert_eq!(entry.position, Lsn(position));
        assert!(entry.payload == noise(5000, position));
    }
    let next = report.end.0 + 1;
    block_on(async {
        store.append(batch(&[(next, b"room again")], &[])).await.unwrap();
        wait_durable(&*store, Lsn(next)).await;
    });
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
