//! Connections of threads that go on over crashes of the server.

use postgres::config::Config;
use postgres::{Client, NoTls};
use std::error::Error;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

/// Tells threads to stop, also those that pause.
#[derive(Debug, Default)]
pub(super) struct StopSignal {
    stopped: Mutex<bool>,
    changed: Condvar,
}

impl StopSignal {
    pub(super) fn stop(&self) {
        *self.stopped.lock().unwrap_or_else(|e| e.into_inner()) = true;
        self.changed.notify_all();
    }

    pub(super) fn is_stopped(&self) -> bool {
        *self.stopped.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Pauses for `duration` or until the signal; `true` when it is time to stop.
    pub(super) fn pause(&self, duration: Duration) -> bool {
        let deadline = Instant::now() + duration;
        let mut stopped = self.stopped.lock().unwrap_or_else(|e| e.into_inner());
        while !*stopped {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            stopped = self.changed.wait_timeout(stopped, left).unwrap_or_else(|e| e.into_inner()).0;
        }
        *stopped
    }
}

/// Connects, again and again while the server is down; `None` when told to stop, else the first
/// error that no restart of the server explains.
pub(super) fn connect(
    url: &str,
    name: &str,
    stop: &StopSignal,
) -> Option<Result<Client, postgres::Error>> {
    let mut config: Config = match url.parse() {
        Ok(config) => config,
        Err(error) => return Some(Err(error)),
    };
    config.connect_timeout(Duration::from_secs(5)).application_name(name);
    while !stop.is_stopped() {
        match config.connect(NoTls) {
            Err(error) if is_transient(&error) => {
                stop.pause(Duration::from_millis(10));
            }
            result => return Some(result),
        }
    }
    None
}

/// Whether a restart of the server or a conflict with another transaction explains the error.
pub(super) fn is_transient(error: &postgres::Error) -> bool {
    match error.code() {
        // 08 connection, 40 rollback by conflict, 53 no resources, 55 lock not available,
        // 57 shutdown, crash or starting up.
        Some(code) => ["08", "40", "53", "55", "57"].contains(&&code.code()[..2]),
        // The connection broke, or could not be made.
        None => {
            let cause = error.source();
            error.is_closed() || cause.is_some_and(|cause| cause.is::<std::io::Error>())
        }
    }
}
