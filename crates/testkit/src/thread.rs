//! Threads that a test waits for: what one of them waits for in turn may never come.

use crate::wait::wait_until;
use anyhow::{Result, anyhow};
use std::thread::JoinHandle;
use std::time::Duration;

/// Waits for the end of a thread for at most `timeout`, and gives what it returned. A thread that
/// still runs then is left behind.
///
/// # Errors
/// When `what` still runs, or has panicked.
pub fn join_within<T>(thread: JoinHandle<T>, what: &str, timeout: Duration) -> Result<T> {
    wait_until(&format!("{what} to end"), timeout, &[], || Ok(thread.is_finished().then_some(())))?;
    thread.join().map_err(|_| anyhow!("{what} panicked"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn a_thread_that_does_not_end_is_not_waited_for() {
        let soon = Duration::from_secs(10);
        assert_eq!(join_within(std::thread::spawn(|| 7), "a thread", soon).unwrap(), 7);
        let (end, ended) = channel::<()>();
        let waits = std::thread::spawn(move || ended.recv());
        let error = join_within(waits, "a thread", Duration::from_millis(10)).unwrap_err();
        assert!(error.to_string().contains("waiting for a thread to end"), "{error}");
        drop(end);
        let panics = std::thread::spawn(|| panic!("on purpose"));
        let error = join_within(panics, "a thread", soon).unwrap_err();
        assert_eq!(error.to_string(), "a thread panicked");
    }
}
