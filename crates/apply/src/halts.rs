//! Halts of a stream at one point of the publisher's log, so that somebody can look at the target
//! while it is exactly what the publisher was there.
//!
//! ```text
//! who looks                     the stream
//! ──────────────────────────────────────────────────────────────
//! ask ────────────────────────► commits what is open, rests
//! (takes the publisher's
//!  snapshot, whose point is
//!  ahead of everything applied)
//! go_to(point) ───────────────► goes on, commits what starts before
//!                               the point, rests
//! (opens a snapshot there)
//! drop ───────────────────────► goes on
//! ```
//!
//! The stream rests before the point is known, or it could have passed it by then. Whoever asks may
//! go away at any moment, and the stream goes on; where the stream ends, who asks is told.

use farshore_model::Lsn;
use std::sync::Mutex;
use std::time::Duration;
use tokio::sync::{Notify, oneshot};

/// Where halts of one stream are asked for.
#[derive(Debug, Default)]
pub struct Halts {
    asked: Mutex<Option<Asked>>,
    changed: Notify,
    /// One at a time.
    turn: tokio::sync::Mutex<()>,
}

/// A halt that was asked for, as the stream sees it.
#[derive(Debug)]
pub(crate) struct Asked {
    rests: oneshot::Sender<Lsn>,
    point: oneshot::Receiver<Lsn>,
    at_point: oneshot::Sender<Lsn>,
    over: oneshot::Receiver<()>,
}

/// A stream that is to go on to a point and rest there.
#[derive(Debug)]
pub(crate) struct HaltAt {
    /// What starts at or behind this is not applied before somebody has looked.
    pub point: Lsn,
    at_point: oneshot::Sender<Lsn>,
    over: oneshot::Receiver<()>,
}

/// Why a stream does not rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotHalted {
    /// Nothing streamed, or it was at work on something else, for as long as it was waited for.
    NotInTime,
    /// It has ended. Another one may begin.
    Ended,
}

/// A stream that rests until it is told where to, or until this is dropped.
#[derive(Debug)]
pub struct Resting<'a> {
    /// What the target says is applied.
    pub applied: Lsn,
    point: oneshot::Sender<Lsn>,
    at_point: oneshot::Receiver<Lsn>,
    over: oneshot::Sender<()>,
    _turn: tokio::sync::MutexGuard<'a, ()>,
}

/// A stream that rests at its point, until this is dropped.
#[derive(Debug)]
pub struct AtPoint<'a> {
    /// What the target says is applied.
    pub applied: Lsn,
    _over: oneshot::Sender<()>,
    _turn: tokio::sync::MutexGuard<'a, ()>,
}

impl Halts {
    /// Has the stream rest. Waits for others who look, and then for the stream for as long as
    /// `within`.
    ///
    /// # Errors
    /// There is no stream that would rest in that time.
    pub async fn ask(&self, within: Duration) -> Result<Resting<'_>, NotHalted> {
        let turn = self.turn.lock().await;
        let (rests, resting) = oneshot::channel();
        let (point, told_point) = oneshot::channel();
        let (told_at_point, at_point) = oneshot::channel();
        let (over, is_over) = oneshot::channel();
        let asked = Asked { rests, point: told_point, at_point: told_at_point, over: is_over };
        *self.lock() = Some(asked);
        self.changed.notify_one();
        match tokio::time::timeout(within, resting).await {
            Ok(Ok(applied)) => Ok(Resting { applied, point, at_point, over, _turn: turn }),
            Ok(Err(_)) => Err(NotHalted::Ended),
            Err(_) => {
                *self.lock() = None;
                Err(NotHalted::NotInTime)
            }
        }
    }

    /// What was asked for; it is the stream's from here on.
    pub(crate) fn take(&self) -> Option<Asked> {
        self.lock().take()
    }

    /// Until something is asked for. Cancel-safe.
    pub(crate) async fn asked(&self) {
        while self.lock().is_none() {
            self.changed.notified().await;
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Asked>> {
        self.asked.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl<'a> Resting<'a> {
    /// Lets the stream go on to `point`; returns when it rests there.
    ///
    /// # Errors
    /// It has ended.
    pub async fn go_to(self, point: Lsn) -> Result<AtPoint<'a>, NotHalted> {
        let Resting { point: teller, at_point, over, _turn, .. } = self;
        teller.send(point).map_err(|_| NotHalted::Ended)?;
        let applied = at_point.await.map_err(|_| NotHalted::Ended)?;
        Ok(AtPoint { applied, _over: over, _turn })
    }
}

impl Asked {
    /// The stream rests, with so much applied. Where to it is to go on then; `None` if nobody wants
    /// it to rest any more.
    pub async fn point(self, applied: Lsn) -> Option<HaltAt> {
        let Asked { rests, point, at_point, over } = self;
        rests.send(applied).ok()?;
        Some(HaltAt { point: point.await.ok()?, at_point, over })
    }
}

impl HaltAt {
    /// The stream rests at the point, with so much applied, until nobody looks any more.
    pub async fn rest(self, applied: Lsn) {
        if self.at_point.send(applied).is_ok() {
            // It is never sent anything: it ends.
            let _ = self.over.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn a_stream_rests_goes_to_the_point_and_goes_on() {
        let halts = Halts::default();
        let stream = async {
            halts.asked().await;
            let halt = halts.take().unwrap().point(Lsn(5)).await.expect("a point");
            assert_eq!(halt.point, Lsn(7));
            halt.rest(Lsn(6)).await;
        };
        let looks = async {
            let resting = halts.ask(SOON).await.unwrap();
            assert_eq!(resting.applied, Lsn(5));
            let at = resting.go_to(Lsn(7)).await.unwrap();
            assert_eq!(at.applied, Lsn(6));
        };
        tokio::join!(stream, looks);
    }

    #[tokio::test]
    async fn who_goes_away_holds_no_stream_and_a_stream_that_ends_is_told() {
        let halts = Halts::default();
        let ask = tokio::join!(halts.ask(SOON), async {
            halts.asked().await;
            // It ends with what it was asked.
            drop(halts.take());
        });
        assert_eq!(ask.0.err(), Some(NotHalted::Ended));
        let stream = async {
            halts.asked().await;
            assert!(halts.take().unwrap().point(Lsn(5)).await.is_none());
        };
        let looks = async { drop(halts.ask(SOON).await.unwrap()) };
        tokio::join!(stream, looks);
        let stream = async {
            halts.asked().await;
            drop(halts.take().unwrap().point(Lsn(5)).await);
        };
        let looks = async { halts.ask(SOON).await.unwrap().go_to(Lsn(1)).await.err() };
        assert_eq!(tokio::join!(stream, looks).1, Some(NotHalted::Ended));
        // Nobody streams.
        assert_eq!(halts.ask(Duration::ZERO).await.err(), Some(NotHalted::NotInTime));
        assert!(halts.take().is_none());
    }
}
