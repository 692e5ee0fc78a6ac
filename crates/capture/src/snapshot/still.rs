//! A snapshot in which every table has all its rows, and whose tables stay as they are.

use super::{ExportedSnapshot, SeenTables, SnapshotConnection};
use crate::CaptureError;
use crate::publication::{PublicationSpec, PublishedTable};
use crate::source::Tell;
use farshore_model::Lsn;
use farshore_pg::Mode;
use std::sync::Arc;
use std::time::Duration;

/// How often a snapshot is taken again because a table was emptied or rewritten meanwhile.
const TRIES: usize = 50;

/// Pause before another one is tried when tables are locked.
const PAUSE: Duration = Duration::from_millis(200);

/// An exported snapshot, and the locks that keep its tables as they are while this lives.
pub struct StillSnapshot {
    exported: ExportedSnapshot,
    /// Holds the locks.
    holder: SnapshotConnection,
    seen: SeenTables,
}

impl StillSnapshot {
    /// Takes a snapshot in which every published table has all its rows.
    ///
    /// TRUNCATE and rewriting commands are not MVCC-safe (PostgreSQL docs: "13.6. Caveats"): a
    /// table that is emptied after the snapshot was taken looks empty in the snapshot. A lock
    /// prevents that from then on; the tables' files tell whether it happened before the lock was
    /// there, and then another snapshot is taken. (To lock first and then take the snapshot could
    /// hang: its creation waits for transactions that may wait for the lock.) Done here, beside the
    /// publisher: who is far away would hardly find a moment between two such commands.
    ///
    /// `tell` is told what is waited for.
    ///
    /// # Errors
    /// The publisher's; a transient one when tables are locked or rewritten all the time.
    pub async fn take(
        spec: &PublicationSpec,
        reader: &str,
        tell: &Tell<'_>,
    ) -> Result<Self, CaptureError> {
        let mut sql = spec.connect(Mode::Sql).await?;
        for _ in 0..TRIES {
            let before = spec.published_tables(&mut sql).await?;
            let exported = ExportedSnapshot::export(spec, reader, tell).await?;
            let mut holder = exported.open(spec).await?;
            let seen = holder.tables(spec).await?;
            if !holder.hold_still(spec, &seen).await? {
                holder.close().await;
                exported.close().await;
                tokio::time::sleep(PAUSE).await;
                continue;
            }
            if files(&before) == files(&holder.tables(spec).await?) {
                sql.close().await;
                let seen = Arc::new(seen.iter().map(|table| table.oid).collect());
                return Ok(StillSnapshot { exported, holder, seen });
            }
            tracing::debug!(
                publication = %spec.name, reader,
                "a table was truncated or rewritten while the snapshot was taken; taking another"
            );
        }
        Err(CaptureError::Interrupted(format!(
            "publication \"{}\": tables are locked, truncated or rewritten on the publisher all the \
             time; no snapshot could be taken between",
            spec.name
        )))
    }

    /// What the snapshot holds: transactions whose commit record starts before this.
    pub fn consistent_point(&self) -> Lsn {
        self.exported.consistent_point
    }

    /// What the publisher calls it.
    pub fn name(&self) -> &str {
        self.exported.name()
    }

    /// The tables that it is a snapshot of: those that are published later are no part of it.
    pub fn seen(&self) -> &SeenTables {
        &self.seen
    }

    /// Opens a connection that reads this snapshot.
    ///
    /// # Errors
    /// The publisher's.
    pub async fn open(&self, spec: &PublicationSpec) -> Result<SnapshotConnection, CaptureError> {
        ExportedSnapshot::open_named(spec, self.name(), Some(self.seen.clone())).await
    }

    /// Ends the snapshot and its locks: what still reads it goes on, nothing new can.
    pub async fn close(self) {
        self.holder.close().await;
        self.exported.close().await;
    }
}

fn files(tables: &[PublishedTable]) -> Vec<(u32, u32)> {
    tables.iter().map(|table| (table.oid, table.file_node)).collect()
}
