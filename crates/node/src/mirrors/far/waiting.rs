//! Log that becomes neither durable nor, where commits wait for that, replayed: a disk that does not
//! answer, a standby that does not replay.

use super::FarAgent;
use crate::agents::lock;
use crate::mirrors::nothing_is_acknowledged;
use farshore_mirror::receive::{REPLAY_WAITS_MAX, WAITS_MAX};
use farshore_model::Lsn;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often is looked. Who is asked looks too.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Since when a position has not moved that another one is ahead of, and how long is too long.
#[derive(Debug)]
struct Unmoved {
    since: Option<(Lsn, Instant)>,
    at_most: Duration,
}

impl Unmoved {
    fn for_longer_than(at_most: Duration) -> Unmoved {
        Unmoved { since: None, at_most }
    }

    fn look(&mut self, (at, ahead): (Lsn, Lsn), now: Instant) -> Option<Duration> {
        if at >= ahead {
            self.since = None;
            return None;
        }
        let (before, since) = *self.since.get_or_insert((at, now));
        if before != at {
            self.since = Some((at, now));
            return None;
        }
        let waits = now.saturating_duration_since(since);
        (waits > self.at_most).then_some(waits)
    }
}

/// What is looked at of a far end.
#[derive(Debug)]
pub(super) struct Waiting {
    durable: Unmoved,
    applied: Unmoved,
}

impl Default for Waiting {
    fn default() -> Waiting {
        Waiting {
            durable: Unmoved::for_longer_than(WAITS_MAX),
            applied: Unmoved::for_longer_than(REPLAY_WAITS_MAX),
        }
    }
}

impl FarAgent {
    /// Looks, on no thread that a disk may hold up.
    pub(super) async fn watch_waiting(self: Arc<Self>) {
        let mut every = tokio::time::interval(LOOK_EVERY);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            every.tick().await;
            let _ = self.waits();
        }
    }

    /// Why commits that wait for this mirror do not return, if that is so for long. What keeps a
    /// spool from being written says so itself.
    pub(super) fn waits(&self) -> Option<String> {
        let spool = self.far.spool()?;
        let positions = *spool.positions().borrow();
        let applied = self.far.standbys.seen().borrow().applied;
        // A principal that died left a record without its end, which is never replayed.
        let is_waited_for = self.far.standbys.are_waited_for() && self.far.status().connected;
        let is_there = self.far.standbys.does_any_replay();
        let now = Instant::now();
        let mut waiting = lock(&self.waiting);
        let hardens = waiting.durable.look((positions.durable, positions.written), now);
        let ahead = if is_waited_for && is_there { positions.durable } else { applied };
        let replays = waiting.applied.look((applied, ahead), now);
        if spool.closed().is_some() || spool.trouble().is_some() {
            return None;
        }
        let hardens = hardens.map(|waits| {
            let what = format!("durable: the disk of {} does not answer", spool.folder().display());
            nothing_is_acknowledged(waits, &what)
        });
        hardens.or_else(|| {
            let slowest = self.far.standbys.reports().into_iter();
            let slowest = slowest.filter(|standby| standby.applied > Lsn::ZERO);
            let slowest = slowest.min_by_key(|standby| standby.applied)?;
            let what = format!(
                "replayed: standby \"{}\" ({}) is at {} and replays nothing (is its replay paused or \
                 delayed, or a query in the way?)",
                slowest.application_name,
                slowest.peer.ip(),
                slowest.applied
            );
            Some(nothing_is_acknowledged(replays?, &what))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_move_is_noticed_after_a_while() {
        let (begun, mut unmoved) = (Instant::now(), Unmoved::for_longer_than(WAITS_MAX));
        let mut look = |seconds, at, ahead| {
            unmoved.look((Lsn(at), Lsn(ahead)), begun + Duration::from_secs(seconds))
        };
        assert_eq!(look(0, 10, 20), None);
        assert_eq!(look(11, 10, 30), Some(Duration::from_secs(11)));
        assert_eq!(look(12, 15, 30), None, "it gets on");
        assert_eq!(look(22, 15, 40), None);
        assert_eq!(look(23, 40, 40), None, "it is there");
        assert_eq!(look(60, 40, 50), None, "it had nothing to do");
        assert_eq!(look(71, 40, 50), Some(Duration::from_secs(11)));
    }
}
