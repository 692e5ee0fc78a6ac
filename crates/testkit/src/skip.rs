//! Tests that do nothing here, and say so where it is seen: what a test prints that passes is not
//! shown.

use std::fs::OpenOptions;
use std::io::Write;

/// Tells that the test `name` does nothing here, and why: on standard output, and as a line of the
/// file that `FARSHORE_SKIPPED` names, whose lines are counted as skipped and not as passed.
pub fn skipped(name: &str, why: &str) {
    let why = why.split_whitespace().collect::<Vec<_>>().join(" ");
    println!("skipped: {name}: {why}");
    // A test's name has colons in it, and no tab.
    let line = format!("{name}\t{why}");
    let Some(path) = std::env::var_os("FARSHORE_SKIPPED").filter(|path| !path.is_empty()) else {
        return;
    };
    let file = OpenOptions::new().create(true).append(true).open(&path);
    // One write: others append to it at the same time.
    if let Err(error) = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes())) {
        eprintln!("{}: {error}", path.display());
    }
}

/// The name of the test that runs in this thread.
pub fn this_test() -> String {
    std::thread::current().name().unwrap_or("a test").to_owned()
}
