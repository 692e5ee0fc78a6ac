//! Tests that need to see inside: failing disks, cuts in what no fsync covered, random operations.

mod failure;
mod memory;
mod newest;
mod old_files;
mod property;
mod replica;

use super::{Options, RecoveryReport, SegmentedStore};
use crate::LogStore;
use crate::conformance::{Instance, run_all};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

/// Small segments and blocks; cursors are saved only when they must be.
pub fn small() -> Options {
    Options {
        segment_bytes: 8 << 10,
        block_bytes: 4 << 10,
        cursor_save_interval: Duration::from_secs(3600),
        roll_bytes_min: 4 << 10,
        ..Options::default()
    }
}

pub fn open(dir: &Path) -> (Arc<SegmentedStore>, RecoveryReport) {
    SegmentedStore::open(dir, small()).unwrap_or_else(|error| panic!("{error}"))
}

struct OnDisk {
    dir: TempDir,
    store: Option<Arc<SegmentedStore>>,
}

impl Instance for OnDisk {
    fn store(&self) -> Arc<dyn LogStore> {
        self.store.clone().expect("open")
    }

    fn reopen(&mut self) {
        let store = self.store.take();
        assert_eq!(store.as_ref().map(Arc::strong_count), Some(1));
        drop(store);
        self.store = Some(open(self.dir.path()).0);
    }
}

#[test]
fn conforms() {
    run_all(&|| {
        let dir = tempfile::tempdir().unwrap();
        let store = Some(open(dir.path()).0);
        Box::new(OnDisk { dir, store })
    });
}
