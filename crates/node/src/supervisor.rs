//! Runs an agent again and again until it is told to stop or fails for good.

use std::future::Future;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// First pause before an agent is started again.
const BACK_OFF_MIN: Duration = Duration::from_millis(200);
/// Longest pause before a server is asked again: trying costs it something.
pub const SERVER_BACK_OFF_MAX: Duration = Duration::from_secs(15);
/// Longest pause before another site is: a link that is there again should be in use again.
pub const LINK_BACK_OFF_MAX: Duration = Duration::from_secs(2);
/// How often one is asked again that has refused an agent, which may be mended without a word here.
pub const REFUSED_PAUSE: Duration = Duration::from_secs(60);
/// An agent that ran this long is not in a crash loop.
const HEALTHY_AFTER: Duration = Duration::from_secs(30);

/// How a run ended.
pub enum Outcome {
    /// As it was told.
    Done,
    /// With an error; trying again may help.
    Transient(String),
    /// In a deadlock or the like with another session, which may have what it wanted now: to wait
    /// longer each time would only fall behind.
    Clash(String),
    /// With an error that trying again does not mend, but somebody elsewhere may: it has stopped,
    /// and asks again now and then.
    Refused(String),
    /// With an error that trying again does not mend.
    Permanent(String),
}

/// How far an agent has come: what it has durably, and of a copy the ranges that are done.
pub type Progress = (farshore_model::Lsn, u64);

/// What the supervisor tells of an agent.
pub enum Notice<'a> {
    /// It failed and is started again after a pause.
    Retrying {
        /// Why.
        error: &'a str,
        /// How long the run was.
        ran: Duration,
        /// How far it has come.
        progress: Progress,
    },
    /// It failed for good, or until somebody elsewhere mends it.
    Stopped(&'a str),
}

/// Runs `agent` until it is done or fails for good. Errors are logged here and nowhere else. The
/// pauses grow, up to `back_off_max`, for as long as its `progress` stays as it is.
pub async fn supervise<F, Fut>(
    (kind, back_off_max): (&'static str, Duration),
    name: String,
    mut stop: watch::Receiver<bool>,
    mut agent: F,
    progress: impl Fn() -> Progress,
    notice: impl Fn(Notice<'_>),
) where
    F: FnMut() -> Fut,
    Fut: Future<Output = Outcome>,
{
    let mut back_off = BACK_OFF_MIN;
    let mut last_error = String::new();
    loop {
        let (started, from) = (Instant::now(), progress());
        let outcome = agent().await;
        let clashed = matches!(outcome, Outcome::Clash(_));
        match outcome {
            Outcome::Done => return,
            Outcome::Permanent(error) => {
                tracing::error!(agent = kind, %name, "stopped: {error}");
                notice(Notice::Stopped(&error));
                return;
            }
            Outcome::Refused(error) => {
                if error == last_error {
                    tracing::debug!(agent = kind, %name, "still stopped: {error}");
                } else {
                    tracing::error!(agent = kind, %name, "stopped: {error}");
                }
                notice(Notice::Stopped(&error));
                last_error = error;
                tokio::select! {
                    () = tokio::time::sleep(REFUSED_PAUSE) => {}
                    _ = stop.wait_for(|stop| *stop) => return,
                }
                back_off = BACK_OFF_MIN;
            }
            Outcome::Transient(error) | Outcome::Clash(error) => {
                if *stop.borrow() {
                    tracing::warn!(agent = kind, %name, "while stopping: {error}");
                    return;
                }
                let (ran, progress) = (started.elapsed(), progress());
                if clashed || progress > from || ran >= HEALTHY_AFTER {
                    back_off = BACK_OFF_MIN;
                }
                // A server that stays away is said once, not every few seconds.
                if error == last_error {
                    tracing::debug!(agent = kind, %name, ?back_off, "trying again: {error}");
                } else {
                    tracing::warn!(agent = kind, %name, ?back_off, "trying again: {error}");
                }
                notice(Notice::Retrying { error: &error, ran, progress });
                last_error = error;
                tokio::select! {
                    () = tokio::time::sleep(back_off) => {}
                    _ = stop.wait_for(|stop| *stop) => return,
                }
                back_off = (back_off * 2).min(back_off_max);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_model::Lsn;
    use std::cell::Cell;

    /// Seconds until an agent has failed this often.
    async fn seconds_of(failures: u32, outcome: fn() -> Outcome, moves: bool) -> u64 {
        let (failed, position) = (Cell::new(0), Cell::new(0));
        let (_stop, stopped) = watch::channel(false);
        let begin = Instant::now();
        let agent = || async {
            failed.set(failed.get() + 1);
            position.set(position.get() + u64::from(moves));
            if failed.get() > failures { Outcome::Done } else { outcome() }
        };
        let at = || (Lsn(position.get()), 0);
        supervise(("test", SERVER_BACK_OFF_MAX), "a".to_owned(), stopped, agent, at, |_| {}).await;
        begin.elapsed().as_secs()
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_only_while_nothing_comes_of_it() {
        let transient = || Outcome::Transient("away".to_owned());
        assert_eq!(seconds_of(20, transient, false).await, 25 + 13 * 15);
        assert_eq!(seconds_of(20, transient, true).await, 4);
        assert_eq!(seconds_of(20, || Outcome::Clash("deadlock".to_owned()), false).await, 4);
    }

    #[tokio::test(start_paused = true)]
    async fn who_was_refused_asks_once_a_minute() {
        let refused = || Outcome::Refused("another cluster".to_owned());
        assert_eq!(seconds_of(5, refused, false).await, 5 * 60);
    }
}
