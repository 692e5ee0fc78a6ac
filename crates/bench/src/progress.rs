//! What is going on, on standard error.

use std::sync::LazyLock;
use std::time::Instant;

static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

/// One line, with the seconds since the program started.
pub fn say(what: &str) {
    eprintln!("[{:7.1} s] {what}", BEGIN.elapsed().as_secs_f64());
}
