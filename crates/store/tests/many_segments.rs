//! More segments than a process may have files open. Alone in its process, which it limits.

use farshore_store::LogStore;
use farshore_store::conformance::{append, batch, noise};
use farshore_store::segmented::{Options, SegmentedStore};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const FILES_MAX: u64 = 64;

#[test]
fn a_log_of_many_segments_is_opened_again() {
    let dir = tempfile::tempdir().unwrap();
    let options = || Options { segment_bytes: 8 << 10, block_bytes: 4 << 10, ..Options::default() };
    let (store, _) = SegmentedStore::open(dir.path(), options()).unwrap();
    store.register_cursor("reader").unwrap();
    let end = 2_000;
    for position in (10..=end).step_by(10) {
        append(&*store, batch(&[(position, &noise(7_000, position))], &[]));
    }
    drop(store);
    let files = std::fs::read_dir(dir.path()).unwrap().count() as u64;
    assert!(files > 2 * FILES_MAX, "{files} files");
    let limits = Rlimit { current: Some(FILES_MAX), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limits).unwrap();
    let (store, report) = SegmentedStore::open(dir.path(), options()).unwrap();
    assert_eq!((report.end.0, store.durable().borrow().0.0), (end, end));
}
