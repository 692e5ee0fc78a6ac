//! A publisher that this site connects to: a connection for each question, and one for each
//! session.

use super::shared_answer::SharedAnswer;
use super::{
    AddedColumn, Asked, CopyData, Digest, DigestOf, DroppedColumns, FoundRow, FoundRows,
    GrownTable, LookUp, OldValue, Snapshot, SnapshotSession, Source, Tell,
};
use crate::CaptureError;
use crate::publication::{PublicationSpec, PublishedTable, TableName};
use crate::schema::{Definitions, SequencePosition};
use crate::snapshot::{
    BlockRange, CopyPlan, LookUpStatement, LookingUp, SnapshotConnection, StillSnapshot,
};
use crate::timelines::Timelines;
use bytes::Bytes;
use farshore_model::Lsn;
use farshore_pg::CopyOut;
use farshore_store::BoxFuture;
use futures_util::FutureExt;
use std::sync::Arc;
use tokio::sync::watch;

/// Pieces of a copy are handed on together up to this many bytes.
const PIECES_BYTES: usize = 256 << 10;

/// The publisher of a publication of this site. Its clones ask together: what several subscriptions
/// ask at the same time, the publisher is asked once.
#[derive(Clone, Debug)]
pub struct Direct {
    spec: PublicationSpec,
    published_tables: Arc<SharedAnswer<Vec<PublishedTable>>>,
    partitioned_tables: Arc<SharedAnswer<Vec<u32>>>,
    sequences: Arc<SharedAnswer<Vec<SequencePosition>>>,
    awaited: watch::Sender<Lsn>,
}

impl Direct {
    /// The publisher of `spec`.
    pub fn new(spec: PublicationSpec) -> Self {
        Direct {
            spec,
            published_tables: Arc::default(),
            partitioned_tables: Arc::default(),
            sequences: Arc::default(),
            awaited: watch::Sender::new(Lsn::ZERO),
        }
    }

    /// The newest point of a snapshot that was taken: its rows wait for the log up to there.
    pub fn awaited(&self) -> watch::Sender<Lsn> {
        self.awaited.clone()
    }

    /// Which publication, and where.
    pub fn spec(&self) -> &PublicationSpec {
        &self.spec
    }
}

impl Source for Direct {
    fn server(&self) -> String {
        self.spec.source.redacted()
    }

    fn published_tables(&self) -> Asked<'_, Vec<PublishedTable>> {
        let ask = async {
            let mut sql = self.spec.connect_to_ask().await?;
            let tables = self.spec.published_tables(&mut sql).await?;
            sql.close().await;
            Ok(tables)
        };
        Box::pin(async move { self.published_tables.get(ask).await.map(Arc::unwrap_or_clone) })
    }

    fn partitioned_tables(&self) -> Asked<'_, Vec<u32>> {
        let ask = async {
            let mut sql = self.spec.connect_to_ask().await?;
            let tables = self.spec.partitioned_tables(&mut sql).await?;
            sql.close().await;
            Ok(tables)
        };
        Box::pin(async move { self.partitioned_tables.get(ask).await.map(Arc::unwrap_or_clone) })
    }

    fn partitions(&self) -> Asked<'_, Option<(Vec<PublishedTable>, Definitions)>> {
        Box::pin(async move {
            let mut sql = self.spec.connect_to_ask().await?;
            let partitioned = self.spec.partitioned_tables(&mut sql).await?;
            let mut found = None;
            if !partitioned.is_empty() {
                let published = self.spec.published_tables(&mut sql).await?;
                found = Some((published, self.spec.definitions(&mut sql, &partitioned).await?));
            }
            sql.close().await;
            Ok(found)
        })
    }

    fn definitions<'a>(&'a self, tables: &'a [u32]) -> Asked<'a, Definitions> {
        Box::pin(async move {
            let mut sql = self.spec.connect_to_ask().await?;
            let definitions = self.spec.definitions(&mut sql, tables).await?;
            sql.close().await;
            Ok(definitions)
        })
    }

    fn sequences(&self) -> Asked<'_, Vec<SequencePosition>> {
        let ask = async {
            let mut sql = self.spec.connect_to_ask().await?;
            let positions = self.spec.sequences(&mut sql).await?;
            sql.close().await;
            Ok(positions)
        };
        Box::pin(async move { self.sequences.get(ask).await.map(Arc::unwrap_or_clone) })
    }

    fn timelines(&self) -> Asked<'_, Timelines> {
        Box::pin(self.spec.timelines())
    }

    fn dropped_columns<'a>(
        &'a self,
        table: &'a TableName,
        gone: &'a [String],
    ) -> Asked<'a, DroppedColumns> {
        Box::pin(async move {
            let mut sql = self.spec.connect_to_ask().await?;
            let dropped = self.spec.dropped_columns(&mut sql, table, gone).await?;
            sql.close().await;
            Ok(dropped)
        })
    }

    fn old_values<'a>(
        &'a self,
        table: &'a GrownTable,
        columns: &'a [AddedColumn],
    ) -> Asked<'a, Vec<OldValue>> {
        Box::pin(async move {
            let mut sql = self.spec.connect_to_ask().await?;
            let values = self.spec.old_values(&mut sql, table, columns, |_| true).await?;
            sql.close().await;
            Ok(values)
        })
    }

    fn export_telling<'a>(
        &'a self,
        reader: &'a str,
        followed: &'a [u32],
        tell: &'a Tell<'a>,
    ) -> Asked<'a, Box<dyn Snapshot>> {
        Box::pin(async move {
            let followed = followed.iter().copied().collect();
            let snapshot = StillSnapshot::take(&self.spec, reader, &followed, tell).await?;
            self.awaited.send_replace(snapshot.consistent_point());
            let snapshot = DirectSnapshot { spec: self.spec.clone(), snapshot };
            Ok(Box::new(snapshot) as Box<dyn Snapshot>)
        })
    }
}

struct DirectSnapshot {
    spec: PublicationSpec,
    snapshot: StillSnapshot,
}

impl Snapshot for DirectSnapshot {
    fn consistent_point(&self) -> Lsn {
        self.snapshot.consistent_point()
    }

    fn open(&self) -> Asked<'_, Box<dyn SnapshotSession>> {
        Box::pin(async move {
            let connection = self.snapshot.open(&self.spec).await?;
            let session = DirectSession { spec: self.spec.clone(), connection };
            Ok(Box::new(session) as Box<dyn SnapshotSession>)
        })
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, ()> {
        Box::pin(self.snapshot.close())
    }
}

struct DirectSession {
    spec: PublicationSpec,
    connection: SnapshotConnection,
}

impl SnapshotSession for DirectSession {
    fn tables(&mut self) -> Asked<'_, Vec<PublishedTable>> {
        Box::pin(self.connection.tables(&self.spec))
    }

    fn hold_still<'a>(&'a mut self, tables: &'a [PublishedTable]) -> Asked<'a, bool> {
        Box::pin(self.connection.hold_still(&self.spec, tables))
    }

    fn is_in_the_way<'a>(&'a mut self, tables: &'a [u32]) -> Asked<'a, bool> {
        Box::pin(self.connection.is_in_the_way(&self.spec, tables))
    }

    fn definitions<'a>(&'a mut self, tables: &'a [u32]) -> Asked<'a, Definitions> {
        Box::pin(self.connection.definitions(&self.spec, tables))
    }

    fn copy_range<'a>(
        &'a mut self,
        table: &'a PublishedTable,
        range: BlockRange,
        plan: &'a CopyPlan,
    ) -> Asked<'a, Box<dyn CopyData + 'a>> {
        Box::pin(async move {
            let spec = &self.spec;
            let rows = self.connection.copy_range(spec, table, range, plan).await?;
            Ok(Box::new(DirectCopy { spec, rows }) as Box<dyn CopyData + 'a>)
        })
    }

    fn look_up<'a>(&'a mut self, wanted: LookUp<'a>) -> Asked<'a, Box<dyn FoundRows + 'a>> {
        Box::pin(async move {
            let LookUp { table, plan, key_columns, keys } = wanted;
            let statement =
                LookUpStatement::new(table, plan, key_columns).map_err(CaptureError::Setup)?;
            let rows = self.connection.look_up(&self.spec, statement, keys);
            Ok(Box::new(rows) as Box<dyn FoundRows + 'a>)
        })
    }

    fn digest<'a>(&'a mut self, wanted: DigestOf<'a>) -> Asked<'a, Option<Digest>> {
        Box::pin(self.connection.digest(&self.spec, wanted))
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, ()> {
        Box::pin(self.connection.close())
    }
}

/// What comes of a range.
pub(super) struct DirectCopy<'a> {
    pub spec: &'a PublicationSpec,
    pub rows: CopyOut<'a>,
}

impl CopyData for DirectCopy<'_> {
    fn next(&mut self) -> Asked<'_, Option<Vec<Bytes>>> {
        Box::pin(async move {
            let failed = |error| self.spec.publisher_error(error);
            let Some(first) = self.rows.next().await.map_err(failed)? else { return Ok(None) };
            let mut bytes = first.len();
            let mut pieces = vec![first];
            // What is at hand comes along: a row at a time would be a future for each.
            while bytes < PIECES_BYTES {
                match self.rows.next().now_or_never() {
                    Some(Ok(Some(piece))) => {
                        bytes += piece.len();
                        pieces.push(piece);
                    }
                    Some(Err(error)) => return Err(failed(error)),
                    // At the end, it says so again.
                    Some(Ok(None)) | None => break,
                }
            }
            Ok(Some(pieces))
        })
    }

    fn rows(&self) -> Option<u64> {
        self.rows.rows()
    }
}

impl FoundRows for LookingUp<'_> {
    fn next(&mut self) -> Asked<'_, Option<Vec<FoundRow>>> {
        Box::pin(LookingUp::next(self))
    }
}
