//! Points of the publisher's log for what its catalogue says of tables: the stream comes to what was
//! done there later than who asks.

use crate::ApplyError;
use crate::postgres::progress::TableProgress;
use crate::postgres::resume::{Since, Touched, touched_between};
use farshore_capture::CaptureError;
use farshore_capture::publication::PublishedTable;
use farshore_capture::source::Source;
use farshore_model::Lsn;
use farshore_store::LogStore;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::task::JoinHandle;

/// Pauses before what was left for later is looked at again; doubled each time.
const PAUSE_MIN: Duration = Duration::from_secs(2);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The publisher is asked for a point of its log while nothing streams for so long; it may have to
/// wait for transactions there.
pub(crate) const POINT_WITHIN: Duration = Duration::from_secs(5);

/// The log is not read, to see whether it has anything for a table, while it holds more than this.
const LOOKED_THROUGH_MAX: u64 = 64 << 20;

/// A table of the publisher, by its OID, its membership in the publication, and what is looked at of it.
type Member = (u32, u32, u64);

/// What was seen of tables, each with a point of the publisher's log behind it, and what is left for
/// later until the stream has come there; for as long as the subscription is kept running.
#[derive(Debug, Default)]
pub struct LogPoints {
    /// Of columns and labels: then a point is of how those were.
    of_columns: bool,
    noted: Mutex<Noted>,
    /// A question to the publisher, which outlives who waits for it.
    asked: tokio::sync::Mutex<Option<Asked>>,
}

#[derive(Debug, Default)]
struct Noted {
    /// Points of the publisher's log at which it was so already. The first is kept: what was done to
    /// the table is before it, and a newer one would be as far ahead of a stream that is kept busy as
    /// the one before was.
    seen_at: HashMap<Member, Lsn>,
    pause: Duration,
}

#[derive(Debug)]
struct Asked {
    /// Of which it was seen when the publisher was asked.
    tables: Vec<Member>,
    point: JoinHandle<Result<Lsn, CaptureError>>,
}

impl LogPoints {
    /// Of what is seen of the columns of tables, and of the labels of their enums.
    pub fn of_columns() -> LogPoints {
        LogPoints { of_columns: true, ..LogPoints::default() }
    }

    fn member(&self, table: &PublishedTable) -> Member {
        let mut hasher = DefaultHasher::new();
        if self.of_columns {
            for column in &table.columns {
                (&column.name, column.number, column.type_oid).hash(&mut hasher);
            }
            for label in &table.labels {
                (label.oid, &label.label).hash(&mut hasher);
            }
        }
        (table.oid, table.membership, hasher.finish())
    }

    fn noted(&self) -> MutexGuard<'_, Noted> {
        self.noted.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Notes that it was so of a table at `point`, and returns the first such point.
    pub(crate) fn seen_at(&self, table: &PublishedTable, point: Lsn) -> Lsn {
        *self.noted().seen_at.entry(self.member(table)).or_insert(point)
    }

    /// It is seen of these tables; of others, a point is to be found again.
    pub(crate) async fn keep(&self, seen: &[PublishedTable]) {
        let is_seen = |known: &Member| seen.iter().any(|table| self.member(table) == *known);
        self.noted().seen_at.retain(|known, _| is_seen(known));
        if let Some(asked) = self.asked.lock().await.as_mut() {
            asked.tables.retain(is_seen);
        }
    }

    /// It is not so any more.
    pub(crate) fn forget(&self, table: &PublishedTable) {
        self.noted().seen_at.remove(&self.member(table));
    }

    /// How long what was left is left alone this time.
    pub(crate) fn pause(&self) -> Duration {
        let mut noted = self.noted();
        let pause = noted.pause.clamp(PAUSE_MIN, PAUSE_MAX);
        noted.pause = 2 * pause;
        pause
    }

    /// Nothing is left.
    pub(crate) fn all_done(&self) {
        self.noted().pause = PAUSE_MIN;
    }

    /// A point of the publisher's log at which it was so of a table, one of those of which it is
    /// `seen`. `None` where the publisher does not say one `within` a time.
    pub(crate) async fn point_of(
        &self,
        table: &PublishedTable,
        seen: &[PublishedTable],
        source: &Arc<dyn Source>,
        (subscription, within): (&str, Duration),
    ) -> Option<Lsn> {
        if let Some(point) = self.noted().seen_at.get(&self.member(table)) {
            return Some(*point);
        }
        let mut asked = self.asked.lock().await;
        // One that was asked before it was seen says nothing of it.
        if asked.as_ref().is_some_and(|asked| {
            asked.point.is_finished() && !asked.tables.contains(&self.member(table))
        }) {
            *asked = None;
        }
        let question = asked.get_or_insert_with(|| {
            let (source, reader) = (source.clone(), subscription.to_owned());
            let point = tokio::spawn(async move {
                let snapshot = source.export(&reader).await?;
                let point = snapshot.consistent_point();
                snapshot.close().await;
                Ok(point)
            });
            Asked { tables: seen.iter().map(|table| self.member(table)).collect(), point }
        });
        let told = tokio::time::timeout(within, &mut question.point).await.ok()?;
        let tables = std::mem::take(&mut question.tables);
        *asked = None;
        let error = match told {
            Ok(Ok(point)) => {
                let mut noted = self.noted();
                for of in tables {
                    noted.seen_at.entry(of).or_insert(point);
                }
                return noted.seen_at.get(&self.member(table)).copied();
            }
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        tracing::info!(subscription, "the publisher does not say where its log stands: {error}");
        None
    }
}

/// What the log has for a table between what is applied and `until`, which it has come to; `None`
/// where that is not looked through.
pub(crate) async fn left_for(
    store: &Arc<dyn LogStore>,
    table: &TableProgress,
    applied: Lsn,
    until: Lsn,
) -> Result<Option<Touched>, ApplyError> {
    if applied >= until {
        return Ok(Some(Touched::Nothing));
    }
    if until.bytes_since(applied) > LOOKED_THROUGH_MAX {
        return Ok(None);
    }
    // What it missed under another name is seen when its own changes come.
    let since = Since { point: applied.max(table.copied_at), oid: None };
    let since = HashMap::from([(table.table.clone(), since)]);
    Ok(touched_between(store, &since, until).await?.remove(&table.table))
}

#[cfg(test)]
mod tests {
    use super::{LogPoints, PAUSE_MAX, PAUSE_MIN};

    #[test]
    fn pauses_grow_until_nothing_is_left() {
        let detaching = LogPoints::default();
        assert_eq!([detaching.pause(), detaching.pause()], [PAUSE_MIN, 2 * PAUSE_MIN]);
        assert_eq!((0..9).map(|_| detaching.pause()).max(), Some(PAUSE_MAX));
        detaching.all_done();
        assert_eq!(detaching.pause(), PAUSE_MIN);
    }
}
