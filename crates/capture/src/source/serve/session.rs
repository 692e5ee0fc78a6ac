//! A session inside an exported snapshot, for another site.

use super::{Ended, Failure, Registry, check_members, frame, refused, while_open};
use crate::CaptureError;
use crate::publication::{PublicationSpec, PublishedTable};
use crate::snapshot::{
    BlockRange, CopyFormat, CopyPlan, DigestOf, DigestScope, ExportedSnapshot, HashedAs,
    LookUpStatement, PARTS, SeenTables, SnapshotConnection,
};
use crate::source::channel::Channel;
use crate::source::direct::DirectCopy;
use crate::source::frame::FRAME_BYTES;
use crate::source::message::{Answer, Request, encode_answer};
use crate::source::rows::encode_row;
use crate::source::{ChannelError, CopyData, Key};
use bytes::{Bytes, BytesMut};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// Characters that the name of a built-in type may have.
const CAST_LEN_MAX: usize = 128;

/// What the other side sees of the publisher is in [`Session::tables`].
pub(super) struct Session<'a> {
    spec: &'a PublicationSpec,
    snapshots: &'a Registry,
    /// The snapshot's id in the registry.
    snapshot: String,
    connection: SnapshotConnection,
    /// The publication's own tables, as they are in the snapshot; once they are needed.
    known: Option<Arc<Vec<PublishedTable>>>,
}

/// Rows to look up.
pub(super) struct Wanted {
    pub table: u32,
    pub plan: CopyPlan,
    pub key_columns: Vec<String>,
    pub keys: Vec<Key>,
}

impl<'a> Session<'a> {
    /// Opens a session in the snapshot of this id, which the publisher calls `name`, of these
    /// tables.
    pub async fn open(
        spec: &'a PublicationSpec,
        snapshots: &'a Registry,
        snapshot: String,
        name: &str,
        seen: SeenTables,
    ) -> Result<Session<'a>, CaptureError> {
        let connection = ExportedSnapshot::open_named(spec, name, Some(seen)).await?;
        Ok(Session { spec, snapshots, snapshot, connection, known: None })
    }

    /// Ends the transaction and its locks.
    pub async fn close(self) {
        self.connection.close().await;
    }

    /// Answers what needs no data.
    pub async fn answer(&mut self, request: Request) -> Result<Answer, Failure> {
        match request {
            Request::Tables => {
                // The files of tables, and their sizes, are not bound to the snapshot.
                Ok(Answer::Tables(self.read_tables().await?.as_ref().clone()))
            }
            Request::HoldStill { tables } => {
                let known = self.tables().await?;
                check_members(&tables, &known, &[])?;
                let tables: HashSet<u32> = tables.into_iter().collect();
                let tables = known.iter().filter(|table| tables.contains(&table.oid));
                let tables: Vec<PublishedTable> = tables.cloned().collect();
                Ok(Answer::Is(self.connection.hold_still(self.spec, &tables).await?))
            }
            Request::IsInTheWay { tables } => {
                check_members(&tables, self.tables().await?.as_ref(), &[])?;
                let tables = tables.into_iter().collect::<HashSet<u32>>();
                let tables: Vec<u32> = tables.into_iter().collect();
                Ok(Answer::Is(self.connection.is_in_the_way(self.spec, &tables).await?))
            }
            Request::Definitions { tables } => {
                let partitioned = self.connection.partitioned_tables(self.spec).await?;
                check_members(&tables, self.tables().await?.as_ref(), &partitioned)?;
                let definitions = self.connection.definitions(self.spec, &tables).await?;
                Ok(Answer::Definitions(definitions))
            }
            Request::Digest { table, types, key_columns, scope, hashing } => {
                let known = self.tables().await?;
                let table = member(&known, table)?;
                let is_published =
                    |name: &String| table.columns.iter().any(|column| column.name == *name);
                if key_columns.len() > table.columns.len() || !key_columns.iter().all(is_published)
                {
                    return Err(refused(format!("a key that is not of {}", table.table)));
                }
                if matches!(&scope, DigestScope::Rows(parts) if parts.len() > PARTS as usize) {
                    return Err(refused("more parts of a table than there are"));
                }
                let types = self.own_types(table, types).await?;
                let (types, key_columns, scope, hashing) = (&types, &key_columns, &scope, &hashing);
                let wanted = DigestOf { table, types, key_columns, scope, hashing };
                Ok(Answer::Digest(self.connection.digest(self.spec, wanted).await?))
            }
            _other => Err(refused("a question that a session in a snapshot does not answer")),
        }
    }

    /// The publication's own tables, as they are in the snapshot.
    async fn tables(&mut self) -> Result<Arc<Vec<PublishedTable>>, CaptureError> {
        match self.known.clone().or_else(|| self.snapshots.tables(&self.snapshot)) {
            Some(known) => {
                self.known = Some(known.clone());
                Ok(known)
            }
            None => self.read_tables().await,
        }
    }

    async fn read_tables(&mut self) -> Result<Arc<Vec<PublishedTable>>, CaptureError> {
        let tables = Arc::new(self.connection.tables(self.spec).await?);
        self.snapshots.keep_tables(&self.snapshot, &tables);
        self.known = Some(tables.clone());
        Ok(tables)
    }

    /// Sends the published rows of a range. Everything but the last answer is sent here. How many
    /// they are is told who asks for that (`counted`).
    pub async fn copy_range(
        &mut self,
        channel: &mut dyn Channel,
        table: u32,
        range: BlockRange,
        plan: CopyPlan,
        counted: bool,
    ) -> Result<Result<Answer, Failure>, Ended> {
        let begun = while_open(channel, async {
            let known = self.tables().await?;
            let table = member(&known, table)?;
            let plan = self.own_plan(table, plan).await?;
            let spec = self.spec;
            let rows = self.connection.copy_range(spec, table, range, &plan).await?;
            Ok::<_, Failure>(DirectCopy { spec, rows })
        });
        let mut copy = match begun.await? {
            Ok(copy) => copy,
            Err(failure) => return Ok(Err(failure)),
        };
        send_begins(channel).await?;
        let mut data = BytesMut::new();
        loop {
            match while_open(channel, copy.next()).await? {
                Ok(Some(pieces)) => {
                    for piece in pieces {
                        fill(channel, &mut data, &piece).await?;
                    }
                }
                Ok(None) => break,
                Err(error) => return Ok(Err(error.into())),
            }
        }
        flush(channel, &mut data).await?;
        let rows = copy.rows().filter(|_| counted);
        Ok(Ok(rows.map_or(Answer::Done, |rows| Answer::Copied { rows })))
    }

    /// Sends the published rows that have one of the keys, as [`Session::copy_range`] does.
    pub async fn look_up(
        &mut self,
        channel: &mut dyn Channel,
        wanted: Wanted,
    ) -> Result<Result<Answer, Failure>, Ended> {
        let Wanted { table, plan, key_columns, keys } = wanted;
        let prepared = while_open(channel, async {
            let known = self.tables().await?;
            let table = member(&known, table)?;
            let plan = self.own_plan(table, plan).await?;
            let statement = LookUpStatement::new(table, &plan, &key_columns).map_err(refused)?;
            match keys.iter().find(|key| key.values().len() != key_columns.len()) {
                None => Ok::<_, Failure>(statement),
                Some(_) => Err(refused("a key with another number of values than of columns")),
            }
        });
        let statement = match prepared.await? {
            Ok(statement) => statement,
            Err(failure) => return Ok(Err(failure)),
        };
        send_begins(channel).await?;
        let keys: Vec<&Key> = keys.iter().collect();
        let mut data = BytesMut::new();
        let mut found = self.connection.look_up(self.spec, statement, &keys);
        loop {
            let rows = match while_open(channel, found.next()).await? {
                Ok(Some(rows)) => rows,
                Ok(None) => break,
                Err(error) => return Ok(Err(error.into())),
            };
            for row in rows {
                if !encode_row(&mut data, &row) {
                    return Ok(Err(refused("a row that is too large to travel")));
                }
                while data.len() >= FRAME_BYTES {
                    let full = data.split_to(FRAME_BYTES);
                    frame::send_data(channel, full.freeze()).await?;
                }
            }
        }
        flush(channel, &mut data).await?;
        Ok(Ok(Answer::Done))
    }

    /// Types to hash columns as, each with the publisher's own name.
    async fn own_types(
        &mut self,
        table: &PublishedTable,
        types: Vec<Option<HashedAs>>,
    ) -> Result<Vec<Option<HashedAs>>, Failure> {
        let name = |to: &Option<HashedAs>| to.as_ref().map(|to| to.type_name.clone());
        let casts = types.iter().map(name).collect();
        let plan = self.own_plan(table, CopyPlan { format: CopyFormat::Text, casts }).await?;
        let own = types.into_iter().zip(plan.casts);
        let own = own.map(|(to, name)| {
            to.zip(name).map(|(to, type_name)| HashedAs { type_name, modifier: to.modifier })
        });
        Ok(own.collect())
    }

    /// A plan in which every type has the publisher's own name for it: the other side's is not made
    /// part of a query.
    async fn own_plan(
        &mut self,
        table: &PublishedTable,
        plan: CopyPlan,
    ) -> Result<CopyPlan, Failure> {
        if plan.casts.len() > table.columns.len() {
            return Err(refused(format!("more casts than {} has columns", table.table)));
        }
        let mut known: BTreeMap<String, String> = BTreeMap::new();
        let mut casts = Vec::new();
        for cast in plan.casts {
            let Some(asked) = cast else {
                casts.push(None);
                continue;
            };
            if let Some(name) = known.get(&asked) {
                casts.push(Some(name.clone()));
                continue;
            }
            let found = if asked.len() <= CAST_LEN_MAX {
                self.connection.type_to_cast_to(self.spec, &asked).await?
            } else {
                None
            };
            let Some(name) = found else {
                let shown: String = asked.chars().take(CAST_LEN_MAX).collect();
                return Err(refused(format!("a cast to {shown:?}, not a built-in type of values")));
            };
            casts.push(Some(name.clone()));
            known.insert(asked, name);
        }
        Ok(CopyPlan { format: plan.format, casts })
    }
}

/// A table of the publication.
fn member(tables: &[PublishedTable], oid: u32) -> Result<&PublishedTable, Failure> {
    let found = tables.iter().find(|table| table.oid == oid);
    found.ok_or_else(|| refused(format!("a table (OID {oid}) that is not published")))
}

async fn send_begins(channel: &mut dyn Channel) -> Result<(), Ended> {
    let message = encode_answer(&Answer::Begins).map_err(ChannelError::permanent)?;
    Ok(frame::send(channel, &message).await?)
}

/// Gathers data, and sends whole frames of them.
async fn fill(
    channel: &mut dyn Channel,
    data: &mut BytesMut,
    mut piece: &[u8],
) -> Result<(), Ended> {
    while data.len() + piece.len() >= FRAME_BYTES {
        let (now, later) = piece.split_at(FRAME_BYTES - data.len());
        data.extend_from_slice(now);
        flush(channel, data).await?;
        piece = later;
    }
    data.extend_from_slice(piece);
    Ok(())
}

async fn flush(channel: &mut dyn Channel, data: &mut BytesMut) -> Result<(), Ended> {
    if !data.is_empty() {
        let full: Bytes = data.split().freeze();
        frame::send_data(channel, full).await?;
    }
    Ok(())
}
