//! A snapshot in which every table has all its rows, and whose tables stay as they are.

use super::{ExportedSnapshot, SeenTables, SnapshotConnection};
use crate::publication::{PublicationSpec, PublishedTable};
use crate::source::Tell;
use crate::{CaptureError, slot};
use farshore_model::Lsn;
use farshore_pg::{Connection, Mode};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// How often a snapshot is taken again because a table was emptied or rewritten meanwhile.
const TRIES: usize = 50;

/// Pause before another one is tried when tables are locked, and between looks at standbys.
const PAUSE: Duration = Duration::from_millis(200);

/// Standbys are waited for no longer than this at once, and after so long it is told: meanwhile the
/// publisher keeps what the snapshot may read.
const STANDBYS_MAX: Duration = Duration::from_secs(60);
const STANDBYS_WORD_AFTER: Duration = Duration::from_secs(3);

/// An exported snapshot, and the locks that keep its tables as they are while this lives.
pub struct StillSnapshot {
    exported: ExportedSnapshot,
    /// Holds the locks.
    holder: SnapshotConnection,
    seen: SeenTables,
}

impl StillSnapshot {
    /// Takes a snapshot in which every published table has all its rows, apart from tables that are
    /// `followed` (OIDs): their rows are not read in it, and whoever wants one of them for himself
    /// need not wait for what is copied.
    ///
    /// TRUNCATE and rewriting commands are not MVCC-safe (PostgreSQL docs: "13.6. Caveats"): a
    /// table that is emptied after the snapshot was taken looks empty in the snapshot. A lock
    /// prevents that from then on; the tables' files tell whether it happened before the lock was
    /// there, and then another snapshot is taken. So is one where a table has become another member of
    /// the publication meanwhile, with another filter or list of columns: what a transaction wrote
    /// before that is published as it was then, also where the snapshot lacks it. (To lock first and
    /// then take the snapshot could hang: its creation waits for transactions that may wait for the
    /// lock.) Done here, beside the publisher: who is far away would hardly find a moment between two
    /// such commands.
    ///
    /// `tell` is told what is waited for.
    ///
    /// # Errors
    /// The publisher's; a transient one when tables are locked or rewritten all the time, or standbys
    /// that the publisher waits for get no further.
    pub async fn take(
        spec: &PublicationSpec,
        reader: &str,
        followed: &HashSet<u32>,
        tell: &Tell<'_>,
    ) -> Result<Self, CaptureError> {
        let mut sql = spec.connect(Mode::Sql).await?;
        for _ in 0..TRIES {
            let mut before = spec.published_tables(&mut sql).await?;
            before.retain(|table| !followed.contains(&table.oid));
            let exported = ExportedSnapshot::export(spec, reader, tell).await?;
            until_standbys_have(spec, &mut sql, exported.consistent_point, tell).await?;
            let mut holder = exported.open(spec).await?;
            let mut held = holder.tables(spec).await?;
            let seen = Arc::new(held.iter().map(|table| table.oid).collect());
            held.retain(|table| !followed.contains(&table.oid));
            if !holder.hold_still(spec, &held).await? {
                holder.close().await;
                exported.close().await;
                tokio::time::sleep(PAUSE).await;
                continue;
            }
            let mut now = holder.tables(spec).await?;
            now.retain(|table| !followed.contains(&table.oid));
            if places(&before) == places(&now) {
                sql.close().await;
                return Ok(StillSnapshot { exported, holder, seen });
            }
            tracing::debug!(
                publication = %spec.name, reader,
                "a table was truncated, rewritten or published otherwise while the snapshot was \
                 taken; taking another"
            );
        }
        Err(CaptureError::Interrupted(format!(
            "publication \"{}\": tables are locked, truncated, rewritten or published otherwise on \
             the publisher all the time; no snapshot could be taken between",
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

/// Waits until the standbys that our slot waits for (`synchronized_standby_slots`) have all that a
/// snapshot at `point` holds: one of them may take the publisher's place, and what it lacks then must
/// not be in a copy.
async fn until_standbys_have(
    spec: &PublicationSpec,
    sql: &mut Connection,
    point: Lsn,
    tell: &Tell<'_>,
) -> Result<(), CaptureError> {
    let (began_at, mut told) = (Instant::now(), false);
    loop {
        let place = slot::place(spec, sql).await?;
        let Some(place) = place.filter(|at| at.waits_for_standbys && at.standbys_have < point)
        else {
            if told {
                tell(None);
            }
            return Ok(());
        };
        let waited = began_at.elapsed();
        let lack = format!(
            "the standbys that synchronized_standby_slots names to have the publisher's log up to \
             {point}, of which one stands at {}: see to it, or, if it is gone for good, take it out \
             of that setting",
            place.standbys_have
        );
        if waited >= STANDBYS_MAX {
            tell(None);
            return Err(CaptureError::Interrupted(format!(
                "publication \"{}\": a copy has waited {} s for {lack}. Trying again",
                spec.name,
                STANDBYS_MAX.as_secs()
            )));
        }
        if waited >= STANDBYS_WORD_AFTER && !std::mem::replace(&mut told, true) {
            let why = format!("waiting for {lack}");
            tracing::warn!(publication = %spec.name, "{why}");
            tell(Some(why));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Where tables are, and as which members they are published.
fn places(tables: &[PublishedTable]) -> Vec<(u32, u32, u32)> {
    tables.iter().map(|table| (table.oid, table.file_node, table.membership)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::publication::TablePattern;
    use farshore_pg::Config;
    use farshore_testkit::postgres::{Cluster, Installation};
    use std::collections::BTreeMap;
    use std::sync::Arc;
    use tokio::runtime::Runtime;
    use tokio::sync::watch;

    fn spec(cluster: &Cluster) -> PublicationSpec {
        PublicationSpec {
            name: "p".to_owned(),
            source: Config::parse(&cluster.url("postgres")).unwrap(),
            tables: vec![TablePattern::parse("public.*").unwrap()],
            articles: BTreeMap::new(),
            via_partition_root: false,
            adopt_publication: None,
            adopt_slot: None,
        }
    }

    /// Begins a transaction with an id; returns that.
    async fn begin(sql: &mut Connection) -> String {
        sql.simple_query("BEGIN").await.unwrap();
        let id = sql.query("SELECT pg_current_xact_id()::text", &[]).await.unwrap();
        id[0].get(0).unwrap().to_owned()
    }

    /// Waits until somebody waits for the end of that transaction, or `is_over`.
    async fn until_awaited(sql: &mut Connection, id: &str, is_over: impl Fn() -> bool) -> bool {
        let awaited = "SELECT FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted \
                       AND transactionid::text = $1";
        let until = Instant::now() + STANDBYS_MAX;
        while Instant::now() < until && !is_over() {
            if !sql.query(awaited, &[Some(id)]).await.unwrap().is_empty() {
                return true;
            }
            tokio::task::yield_now().await;
        }
        false
    }

    /// What a transaction wrote before the filter was another one comes by the former, if it commits
    /// behind the snapshot: it must be in it.
    #[test]
    fn a_snapshot_is_taken_again_where_a_filter_has_changed_meanwhile() {
        for major in [15, 18] {
            let installation = Installation::find(major).unwrap();
            let cluster =
                Cluster::builder(&installation).setting("wal_level", "logical").start().unwrap();
            cluster
                .execute_script(
                    "CREATE TABLE t (i integer PRIMARY KEY); \
                     CREATE PUBLICATION farshore_p FOR TABLE t WHERE (i > 0)",
                )
                .unwrap();
            let spec = Arc::new(spec(&cluster));
            Runtime::new().unwrap().block_on(async {
                let mut connections = Vec::new();
                for _ in 0..4 {
                    connections.push(spec.connect(Mode::Sql).await.unwrap());
                }
                let [first, second, writer, sql] = &mut connections[..] else { unreachable!() };
                let first_id = begin(first).await;
                let of_task = spec.clone();
                let taken = tokio::spawn(async move {
                    StillSnapshot::take(&of_task, "s", &HashSet::new(), &|_| ()).await
                });
                let is_over = || taken.is_finished();
                assert!(
                    until_awaited(sql, &first_id, is_over).await,
                    "the first is not waited for"
                );
                let second_id = begin(second).await;
                first.simple_query("COMMIT").await.unwrap();
                assert!(until_awaited(sql, &second_id, is_over).await, "nor the second");
                // The server waits for no other any more.
                let id = begin(writer).await;
                writer.simple_query("INSERT INTO t VALUES (-1)").await.unwrap();
                sql.simple_query("ALTER PUBLICATION farshore_p SET TABLE t").await.unwrap();
                second.simple_query("COMMIT").await.unwrap();
                until_awaited(sql, &id, is_over).await;
                let before = sql.query("SELECT pg_current_wal_insert_lsn()", &[]).await.unwrap();
                writer.simple_query("COMMIT").await.unwrap();
                let snapshot = taken.await.unwrap().unwrap();
                let (point, before): (Lsn, Lsn) =
                    (snapshot.consistent_point(), before[0].parse(0).unwrap());
                assert!(point > before, "{major}: the snapshot at {point} lacks a row of {before}");
                snapshot.close().await;
            });
        }
    }

    #[test]
    fn a_snapshot_is_not_ahead_of_standbys_that_are_waited_for() {
        let installation = Installation::find(18).unwrap();
        let cluster = Cluster::builder(&installation)
            .setting("wal_level", "logical")
            .setting("synchronized_standby_slots", "standby")
            .start()
            .unwrap();
        cluster.execute_script("CREATE TABLE t (i integer)").unwrap();
        let spec = spec(&cluster);
        Runtime::new().unwrap().block_on(async {
            let mut sql = spec.connect(Mode::Sql).await.unwrap();
            spec.ensure_publication(&mut sql).await.unwrap();
            for slots in [
                "SELECT pg_create_logical_replication_slot('farshore_p', 'pgoutput', failover => true)",
                "SELECT pg_create_physical_replication_slot('standby', true)",
                "INSERT INTO t VALUES (1)",
            ] {
                sql.simple_query(slots).await.unwrap();
            }
            let (said, mut heard) = watch::channel(None);
            let tell = |why| drop(said.send_replace(why));
            let nothing = HashSet::new();
            let taken = StillSnapshot::take(&spec, "s", &nothing, &tell);
            let standby = async {
                let waits = |why: &Option<String>| {
                    why.as_ref().is_some_and(|why| why.contains("synchronized_standby_slots"))
                };
                heard.wait_for(waits).await.unwrap();
                let receives =
                    "SELECT pg_replication_slot_advance('standby', pg_current_wal_flush_lsn())";
                sql.simple_query(receives).await.unwrap();
            };
            let both = async { tokio::join!(taken, standby) };
            let (taken, ()) = tokio::time::timeout(STANDBYS_MAX, both).await.unwrap();
            taken.unwrap().close().await;
            assert_eq!(*said.borrow(), None);
        });
    }
}
