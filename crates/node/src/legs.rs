//! How long each leg takes, and how many commands wait, without tracer tokens: ends of logs are
//! taken down as they move, and looked up when somebody asks.

use crate::agents::lock;
use farshore_apply::SubscriptionStatus;
use farshore_capture::CaptureStatus;
use farshore_model::{Durable, Lsn, PgTime, Timeline};
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

/// When a log here had become durable up to where.
pub(crate) type Durability = Arc<Mutex<Timeline>>;

/// Takes down every group commit of a store, until the store or `stop` ends it.
pub(crate) async fn follow(
    durability: Durability,
    mut durable: watch::Receiver<Durable>,
    mut stop: watch::Receiver<bool>,
) {
    loop {
        let end = durable.borrow_and_update().0;
        lock(&durability).note(end, PgTime::now(), 0);
        tokio::select! {
            changed = durable.changed() => if changed.is_err() { return },
            _ = stop.wait_for(|stop| *stop) => return,
        }
    }
}

pub(crate) fn milliseconds(micros: u64) -> f64 {
    micros as f64 / 1_000.0
}

/// From one moment to another, milliseconds; clocks that disagree make it 0 at the least.
fn between(earlier: PgTime, later: PgTime) -> f64 {
    milliseconds(u64::try_from(later.micros_since(earlier)).unwrap_or(0))
}

/// Leg capture: commit on the publisher, by its clock, to received here of the newest transaction.
pub(crate) fn capture_ms(capture: &CaptureStatus) -> Option<f64> {
    capture.newest.map(|(committed, received)| between(committed, received))
}

/// The legs that end at a subscription's target.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct ApplyLegs {
    /// Commit on the publisher to durable in the store here, of the newest transaction there.
    pub upstream_ms: Option<f64>,
    /// Durable in the store here to committed on the target: of the newest transaction there, or of
    /// what has waited longest, if that is more.
    pub apply_ms: Option<f64>,
}

/// `transactions` is capture's timeline, if the log is captured here; `reads` says whether the agent
/// reads what the store has.
pub(crate) fn apply_legs(
    status: &SubscriptionStatus,
    durability: &Timeline,
    transactions: Option<&Timeline>,
    (applied, reads): (Lsn, bool),
    now: PgTime,
) -> ApplyLegs {
    let newest = status.newest.and_then(|newest| {
        let stored = durability.when_exactly(newest.source.position)?;
        Some((newest, stored))
    });
    let through = newest.map(|(newest, stored)| between(stored, newest.applied_at));
    let waiting = if reads {
        status.oldest_pending.map(|oldest| oldest.position)
    } else {
        transactions.and_then(|log| log.first_after(applied)).map(|mark| mark.position)
    };
    let waiting = match waiting {
        Some(position) => durability.when(position),
        // Of another site's log it is not known which positions are transactions'.
        None if !reads && transactions.is_none() => {
            let lacks = durability.newest().is_some_and(|end| end.position > applied);
            status.caught_up_at.filter(|_| lacks)
        }
        None => None,
    };
    let waiting = waiting.map(|since| between(since, now));
    ApplyLegs {
        upstream_ms: newest.map(|(newest, stored)| between(newest.source.commit_time, stored)),
        apply_ms: match (through, waiting) {
            (Some(through), Some(waiting)) => Some(through.max(waiting)),
            (one, other) => one.or(other),
        },
    }
}

/// Commands that a target lacks, and whether that is an estimate.
pub(crate) fn commands_behind(
    status: &SubscriptionStatus,
    transactions: Option<&Timeline>,
    (applied, reads): (Lsn, bool),
    behind_bytes: u64,
) -> (Option<u64>, bool) {
    // An agent that has read everything lacks at most log without transactions.
    if behind_bytes == 0 || reads && status.oldest_pending.is_none() {
        return (Some(0), false);
    }
    if let Some((counted, is_exact)) = transactions.and_then(|log| log.commands_after(applied)) {
        return (Some(counted), !is_exact);
    }
    if status.log_bytes == 0 || status.changes == 0 {
        return (None, true);
    }
    let per_byte = status.changes as f64 / status.log_bytes as f64;
    (Some((behind_bytes as f64 * per_byte).round() as u64), true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_apply::{AppliedTransaction, SourceTransaction};

    fn timeline(marks: &[(u64, i64, u64)]) -> Timeline {
        let mut timeline = Timeline::default();
        for (position, at, commands) in marks {
            timeline.note(Lsn(*position), PgTime(*at), *commands);
        }
        timeline
    }

    fn source(position: u64, commit_time: i64) -> SourceTransaction {
        SourceTransaction { position: Lsn(position), commit_time: PgTime(commit_time) }
    }

    #[test]
    fn a_stalled_target_shows_in_the_last_leg() {
        let durability = timeline(&[(100, 0, 0), (200, 12_000, 0), (300, 22_000, 0)]);
        let transactions = timeline(&[(100, 0, 0), (200, 11_000, 5), (300, 21_000, 9)]);
        let newest = AppliedTransaction { source: source(200, 8_000), applied_at: PgTime(17_000) };
        let mut status = SubscriptionStatus { newest: Some(newest), ..Default::default() };
        let legs = |status: &SubscriptionStatus, transactions, reads, now| {
            apply_legs(status, &durability, transactions, (Lsn(200), reads), PgTime(now))
        };
        let through = ApplyLegs { upstream_ms: Some(4.0), apply_ms: Some(5.0) };
        assert_eq!(legs(&status, Some(&transactions), true, 900_000), through);
        // Halted, and another transaction is there.
        let halted = legs(&status, Some(&transactions), false, 922_000);
        assert_eq!(halted, ApplyLegs { upstream_ms: Some(4.0), apply_ms: Some(900.0) });
        // Its target keeps it waiting.
        status.oldest_pending = Some(source(300, 19_000));
        assert_eq!(legs(&status, None, true, 922_000).apply_ms, Some(900.0));
        // Of another site's log, halted: a bound.
        status.caught_up_at = Some(PgTime(17_000));
        assert_eq!(legs(&status, None, false, 18_000).apply_ms, Some(5.0));
        assert_eq!(legs(&status, None, false, 117_000).apply_ms, Some(100.0));
    }

    #[test]
    fn commands_are_counted_or_estimated_and_called_so() {
        let transactions = timeline(&[(100, 0, 0), (200, 1, 5), (300, 2, 9)]);
        let mut status = SubscriptionStatus::default();
        let behind = |status: &SubscriptionStatus, log, applied, bytes| {
            commands_behind(status, log, (Lsn(applied), false), bytes)
        };
        assert_eq!(behind(&status, Some(&transactions), 200, 100), (Some(4), false));
        assert_eq!(behind(&status, Some(&transactions), 300, 0), (Some(0), false));
        // What was stored before the node started was not counted.
        assert_eq!(behind(&status, Some(&transactions), 50, 250), (None, true));
        (status.changes, status.log_bytes) = (10, 1_000);
        assert_eq!(behind(&status, Some(&transactions), 50, 250), (Some(3), true));
        assert_eq!(behind(&status, None, 200, 100), (Some(1), true));
        // Nothing that was read waits: what is left has no commands.
        assert_eq!(commands_behind(&status, None, (Lsn(200), true), 100), (Some(0), false));
    }
}
