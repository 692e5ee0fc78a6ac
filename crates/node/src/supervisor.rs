//! Runs an agent again and again until it is told to stop or fails for good.

use std::future::Future;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// First pause before an agent is started again.
const BACK_OFF_MIN: Duration = Duration::from_millis(200);
/// Longest pause.
const BACK_OFF_MAX: Duration = Duration::from_secs(15);
/// An agent that ran this long is not in a crash loop.
const HEALTHY_AFTER: Duration = Duration::from_secs(30);

/// How a run ended.
pub enum Outcome {
    /// As it was told.
    Done,
    /// With an error; trying again may help.
    Transient(String),
    /// With an error that trying again does not mend.
    Permanent(String),
}

/// What the supervisor tells of an agent.
pub enum Notice<'a> {
    /// It failed and is started again after a pause.
    Retrying(&'a str),
    /// It failed for good.
    Stopped(&'a str),
}

/// Runs `agent` until it is done or fails for good. Errors are logged here and nowhere else.
pub async fn supervise<F, Fut>(
    kind: &'static str,
    name: String,
    mut stop: watch::Receiver<bool>,
    mut agent: F,
    notice: impl Fn(Notice<'_>),
) where
    F: FnMut() -> Fut,
    Fut: Future<Output = Outcome>,
{
    let mut back_off = BACK_OFF_MIN;
    let mut last_error = String::new();
    loop {
        let started = Instant::now();
        match agent().await {
            Outcome::Done => return,
            Outcome::Permanent(error) => {
                tracing::error!(agent = kind, %name, "stopped: {error}");
                notice(Notice::Stopped(&error));
                return;
            }
            Outcome::Transient(error) => {
                if *stop.borrow() {
                    tracing::warn!(agent = kind, %name, "while stopping: {error}");
                    return;
                }
                if started.elapsed() >= HEALTHY_AFTER {
                    back_off = BACK_OFF_MIN;
                }
                // A server that stays away is said once, not every few seconds.
                if error == last_error {
                    tracing::debug!(agent = kind, %name, ?back_off, "trying again: {error}");
                } else {
                    tracing::warn!(agent = kind, %name, ?back_off, "trying again: {error}");
                }
                notice(Notice::Retrying(&error));
                last_error = error;
                tokio::select! {
                    () = tokio::time::sleep(back_off) => {}
                    _ = stop.wait_for(|stop| *stop) => return,
                }
                back_off = (back_off * 2).min(BACK_OFF_MAX);
            }
        }
    }
}
