//! The point that a copy is made at: a snapshot of the publisher whose tables stay as they are, and
//! the log as far as that.

use super::InitialCopy;
use crate::ApplyError;
use crate::postgres::progress::TableProgress;
use crate::status::SubscriptionStatus;
use farshore_capture::publication::PublishedTable;
use farshore_capture::slot;
use farshore_capture::source::{Snapshot, SnapshotSession};
use farshore_model::{Lsn, PgTime};
use std::collections::HashSet;
use std::sync::MutexGuard;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often it is looked whether somebody waits for a table that is being copied.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// How long the log may take to come as far as a snapshot that was taken, at first; twice as long
/// each time that it was not enough, or a log that is always further behind would have no copy begin.
pub(super) const LOG_WAIT: Duration = Duration::from_secs(60);

/// About an hour.
const DOUBLINGS_MAX: u32 = 6;

/// A snapshot that takes longer is told of.
const SNAPSHOT_WITHIN: Duration = Duration::from_secs(10);

/// Log that takes longer is told of.
const LOG_WORD_AFTER: Duration = Duration::from_secs(5);

/// A snapshot of the publisher whose tables stay as they are.
pub(super) struct Still {
    pub(super) snapshot: Box<dyn Snapshot>,
    /// Holds the lock.
    pub(super) source: Box<dyn SnapshotSession>,
    pub(super) published: Vec<PublishedTable>,
    /// OIDs of those that the lock is on: what is not to be copied may change.
    pub(super) held: Vec<u32>,
    pub(super) point: Point,
}

/// What a snapshot holds, and whether the log is known to have come there.
pub(super) struct Point {
    pub(super) lsn: Lsn,
    /// The publisher's, as it was seen before the snapshot was taken.
    timeline: String,
    is_reached: AtomicBool,
}

fn oids(tables: &[PublishedTable]) -> Vec<u32> {
    tables.iter().map(|table| table.oid).collect()
}

/// For the next snapshot, whose log may take twice as long as that of the last one.
fn doublings_for(waited: Duration) -> u32 {
    (0..DOUBLINGS_MAX).find(|n| LOG_WAIT * 2_u32.pow(*n) >= 2 * waited).unwrap_or(DOUBLINGS_MAX)
}

impl InitialCopy<'_> {
    fn status(&self) -> MutexGuard<'_, SubscriptionStatus> {
        self.status.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Waits until the store has the log up to the snapshot's point. No row is committed on the target
    /// before: a publisher that fails over to a server without its newest log, or that is put back,
    /// takes away what was copied from there, and only who has the log can tell afterwards.
    pub(super) async fn log_has(&self, point: &Point) -> Result<(), ApplyError> {
        if point.is_reached.load(Ordering::Acquire) {
            return Ok(());
        }
        self.await_log(point.lsn).await?;
        // What has come there may be another server's log.
        if self.timeline().await? != point.timeline {
            return Err(ApplyError::GaveWay(format!(
                "subscription \"{}\": the publisher has changed its timeline since the snapshot was \
                 taken; another one is taken",
                self.subscription
            )));
        }
        point.is_reached.store(true, Ordering::Release);
        Ok(())
    }

    /// The timeline that the publisher's log is on, as capture saw it last; where that is at another
    /// site, the publisher is asked.
    async fn timeline(&self) -> Result<String, ApplyError> {
        if let Some(timeline) = slot::timeline(self.store.as_ref()) {
            return Ok(timeline);
        }
        Ok(self.source.timelines().await?.current.to_string())
    }

    /// A snapshot, and a session in it, that keeps no table as it is which the stream follows. Of those
    /// that it seems to follow some may be published otherwise by now, and are to be copied: then
    /// another snapshot is taken.
    pub(super) async fn take_snapshot(&self, known: &[TableProgress]) -> Result<Still, ApplyError> {
        let timeline = self.timeline().await?;
        // In a first copy, what is copied may have to start over with what is bound to it.
        let copied = known.iter().filter(|table| table.copied && self.streaming);
        let mut followed: Vec<u32> = copied.filter_map(|table| table.oid).collect();
        loop {
            let mut still = self.open_source(&followed).await?;
            let is_followed = |table: &PublishedTable| {
                known.iter().any(|known| known.copied && known.is_still(table))
            };
            let uncopied = still.published.iter().filter(|table| !is_followed(table));
            let uncopied: HashSet<u32> = uncopied.map(|table| table.oid).collect();
            let so_many = followed.len();
            followed.retain(|oid| !uncopied.contains(oid));
            if followed.len() == so_many {
                still.held.retain(|oid| !followed.contains(oid));
                still.point.timeline = timeline;
                return Ok(still);
            }
            still.source.close().await;
            still.snapshot.close().await;
        }
    }

    /// Waits until the store has the log up to `point`.
    pub(super) async fn await_log(&self, point: Lsn) -> Result<(), ApplyError> {
        let mut durable = self.store.durable();
        let arrived = async { durable.wait_for(|durable| durable.0 >= point).await.map(drop) };
        let doublings = self.status().log_wait_doublings.min(DOUBLINGS_MAX);
        let (wait, begun) = (LOG_WAIT * 2_u32.pow(doublings), Instant::now());
        let mut arrived = std::pin::pin!(tokio::time::timeout(wait, arrived));
        let in_time = match tokio::time::timeout(LOG_WORD_AFTER, &mut arrived).await {
            Ok(in_time) => in_time,
            Err(_) => {
                self.set_waits(Some(format!(
                    "a copy waits for the log, which has not come as far as its snapshot ({point})"
                )));
                let in_time = arrived.await;
                self.set_waits(None);
                in_time
            }
        };
        match in_time {
            Ok(Ok(())) => {
                self.status().log_wait_doublings = doublings_for(begun.elapsed());
                Ok(())
            }
            Ok(Err(_)) => Err(ApplyError::NotYet("the store stopped taking writes".to_owned())),
            // The snapshot's locks and its slot are not held on the publisher for as long as a link
            // may be down.
            Err(_) => {
                self.status().log_wait_doublings = doublings + 1;
                Err(ApplyError::LogBehind {
                    point,
                    what: format!(
                        "subscription \"{}\": a copy waits for the log, which has not come as far as \
                         its snapshot ({point}) within {wait:?}; another snapshot is taken when it has",
                        self.subscription
                    ),
                })
            }
        }
    }

    /// Does something that may have to wait on the target, behind a reader of one of its tables for
    /// instance, and ends it when it is in somebody's way on the publisher.
    pub(super) async fn unless_in_the_way<T>(
        &self,
        source: &mut dyn SnapshotSession,
        tables: &[u32],
        work: impl Future<Output = Result<T, ApplyError>> + Send,
    ) -> Result<T, ApplyError> {
        tokio::select! {
            done = work => done,
            error = self.give_way(source, tables) => Err(error),
        }
    }

    /// Ends the copy when somebody on the publisher has waited for an exclusive lock (TRUNCATE, DDL)
    /// that we stand in the way of: everything else on that table would queue up behind them. The
    /// copy then goes on at another snapshot.
    async fn give_way(&self, source: &mut dyn SnapshotSession, tables: &[u32]) -> ApplyError {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            match source.is_in_the_way(tables).await {
                Ok(true) => return self.gives_way(),
                Ok(false) => {}
                Err(error) => return error.into(),
            }
        }
    }

    pub(super) fn gives_way(&self) -> ApplyError {
        ApplyError::GaveWay(format!(
            "subscription \"{}\": the initial copy gives way to a command on the publisher that \
             needs a table for itself (TRUNCATE, DDL); it goes on at a new snapshot",
            self.subscription
        ))
    }

    /// A snapshot of the publisher, and a session in it. What keeps it waiting is told in the status.
    async fn open_source(&self, followed: &[u32]) -> Result<Still, ApplyError> {
        let (since, told) = (PgTime::now(), AtomicBool::new(false));
        let tell = |why: Option<String>| {
            if let Some(why) = why {
                told.store(true, Ordering::Relaxed);
                self.set_waits(Some(format!("a copy cannot begin: {why}")));
            }
        };
        let mut exporting = self.source.export_telling(self.subscription, followed, &tell);
        let exported = tokio::time::timeout(SNAPSHOT_WITHIN, &mut exporting).await;
        let snapshot = match exported {
            Ok(exported) => exported?,
            Err(_) => {
                // Of a publisher behind channels nobody says here what it waits for.
                if !told.load(Ordering::Relaxed) {
                    tell(Some(format!(
                        "waiting for the publisher's snapshot since {since} (its slot waits for \
                         every transaction that was open there)"
                    )));
                }
                exporting.await?
            }
        };
        if told.load(Ordering::Relaxed) {
            self.set_waits(None);
        }
        let mut source = snapshot.open().await?;
        let published = source.tables().await?;
        // What an earlier attempt waited for is over, too: who is in the way on the target can be told.
        self.set_waits(None);
        let held = oids(&published);
        let lsn = snapshot.consistent_point();
        let point = Point { lsn, timeline: String::new(), is_reached: AtomicBool::new(false) };
        Ok(Still { snapshot, source, published, held, point })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_took_long_is_waited_for_longer_the_next_time() {
        let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
        for (waited, doublings) in [(0, 0), (1, 1), (2, 2), (3, 3), (16, 5), (32, 6), (64, 6)] {
            assert_eq!(doublings_for(minutes(waited)), doublings, "{waited}");
        }
        assert_eq!(doublings_for(Duration::from_secs(30)), 0);
    }
}
