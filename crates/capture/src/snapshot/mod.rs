//! The publisher's side of an initial copy: one consistent point, tables cut into block ranges,
//! rows out in COPY format.
//!
//! The consistent point comes from a temporary replication slot that exports its snapshot
//! (PostgreSQL docs: "47.2.5. Exported Snapshots"): the snapshot holds exactly the transactions
//! whose commit record starts before the point. The stream carries all others, so a table copied
//! at point `c` takes from the stream exactly the transactions with `commit_lsn >= c`.

mod casts;
mod digest;
mod look_up;
mod ranges;
mod still;

pub use digest::{
    Digest, DigestOf, DigestQuery, DigestScope, HashedAs, HashedRow, Hashing, PARTS, PartSum,
    ROWS_MAX, SETTINGS,
};
pub use look_up::{FoundRow, LookUpStatement, LookingUp, RowPlace};
pub use ranges::{BlockRange, cut_into_ranges, ranges_left};
pub use still::StillSnapshot;

use crate::CaptureError;
use crate::patience::patiently;
use crate::publication::{PublicationSpec, PublishedTable, file_node};
use crate::schema::Definitions;
use crate::source::{Key, Tell, WAITED_LONG};
use farshore_model::{Lsn, quote_identifier};
use farshore_pg::replication::{SlotOptions, SlotSnapshot};
use farshore_pg::{Connection, CopyOut, Mode, quote_literal};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::sync::Arc;

/// A snapshot of the publisher that any number of connections can read, for as long as this lives.
pub struct ExportedSnapshot {
    /// What the snapshot holds: transactions whose commit record starts before this.
    pub consistent_point: Lsn,
    name: String,
    /// The exporting connection: when it ends, the snapshot and its slot are gone.
    connection: Connection,
}

impl ExportedSnapshot {
    /// Makes a new consistent point. Waits for the transactions that are running now to end, as
    /// every logical slot's creation does; `tell` is told which.
    pub async fn export(
        spec: &PublicationSpec,
        reader: &str,
        tell: &Tell<'_>,
    ) -> Result<Self, CaptureError> {
        let mut connection = spec.connect(Mode::LogicalReplication).await?;
        let pid = connection.backend_pid();
        let slot: String = format!("farshore_snapshot_{pid}_{reader}")
            .chars()
            .map(|c| if c.is_ascii_lowercase() || c.is_ascii_digit() { c } else { '_' })
            .take(63)
            .collect();
        let options = SlotOptions {
            temporary: true,
            snapshot: SlotSnapshot::Export,
            failover: false,
            two_phase: false,
        };
        // Who asks may give up. The walsender would go on waiting, with the slot: as many would be
        // there in the end as the server has room for.
        let abandoned = connection.cancel_token().unless_done();
        let created = patiently(spec, connection.create_logical_slot(&slot, options), tell).await;
        abandoned.is_done();
        let created = created.map_err(|error| spec.publisher_error(error))?;
        let name = created.snapshot.ok_or_else(|| {
            CaptureError::Protocol("the publisher made a slot but exported no snapshot".to_owned())
        })?;
        Ok(ExportedSnapshot { consistent_point: created.consistent_point, name, connection })
    }

    /// Ends the snapshot: what still reads it goes on, nothing new can.
    pub async fn close(self) {
        self.connection.close().await;
    }

    /// What the publisher calls it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Opens a connection that reads this snapshot.
    pub async fn open(&self, spec: &PublicationSpec) -> Result<SnapshotConnection, CaptureError> {
        Self::open_named(spec, &self.name, None).await
    }

    /// Opens a connection that reads the snapshot of this [name](ExportedSnapshot::name), and knows
    /// no other tables than `seen`, where that is given.
    ///
    /// # Errors
    /// One that is transient, where the snapshot has gone: a new one can be had.
    pub async fn open_named(
        spec: &PublicationSpec,
        name: &str,
        seen: Option<SeenTables>,
    ) -> Result<SnapshotConnection, CaptureError> {
        let mut connection = spec.connect(Mode::Sql).await?;
        // As on a replication connection: names within values and filters come out qualified, and
        // money does not depend on the server's locale.
        let begin = format!(
            // A policy that would hide rows must be an error, never rows left out. And whoever waits
            // for a table for himself may wait for another connection of ours: to queue up behind
            // him for long would be a deadlock that no server sees.
            "SET row_security = off; SET search_path = ''; SET lc_monetary = 'C'; \
             SET lock_timeout = '{}s'; \
             BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SET TRANSACTION SNAPSHOT {}",
            WAITED_LONG.as_secs(),
            quote_literal(name)
        );
        match connection.simple_query(&begin).await {
            Ok(_) => Ok(SnapshotConnection { connection, seen }),
            // Invalid parameter value, or since 17 undefined object.
            Err(error) if matches!(error.sqlstate(), Some("22023" | "42704")) => {
                Err(CaptureError::Interrupted(format!(
                    "publication \"{}\": a snapshot on {} has ended before it was read: {error}",
                    spec.name,
                    spec.source.redacted()
                )))
            }
            Err(error) => Err(spec.publisher_error(error)),
        }
    }
}

/// How rows travel in a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyFormat {
    /// PostgreSQL's binary COPY format.
    Binary,
    /// PostgreSQL's text COPY format.
    Text,
}

impl CopyFormat {
    /// The word that SQL's `COPY … (FORMAT word)` takes.
    pub fn sql(self) -> &'static str {
        match self {
            CopyFormat::Binary => "binary",
            CopyFormat::Text => "text",
        }
    }
}

/// How the rows of one table travel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyPlan {
    /// The format of the values.
    pub format: CopyFormat,
    /// For each published column the SQL type that the publisher casts it to, if any: then it
    /// travels as the target's type.
    pub casts: Vec<Option<String>>,
}

impl CopyPlan {
    /// The published columns as a SELECT list.
    pub fn select_list(&self, table: &PublishedTable) -> String {
        let mut list = Vec::new();
        for (number, column) in table.columns.iter().enumerate() {
            let name = quote_identifier(&column.name);
            list.push(match self.casts.get(number) {
                Some(Some(cast)) => format!("{name}::{cast}"),
                Some(None) | None => name,
            });
        }
        list.join(", ")
    }
}

/// OIDs of the tables that were published when a snapshot was taken.
pub type SeenTables = Arc<HashSet<u32>>;

/// A connection inside an exported snapshot.
pub struct SnapshotConnection {
    connection: Connection,
    /// Which tables are published a server says as of now, in whatever snapshot: one that joined
    /// since would be copied as it was before.
    seen: Option<SeenTables>,
}

impl SnapshotConnection {
    /// The published tables as they are in the snapshot, with their sizes. Fails, for the time
    /// being, while somebody has one of them for himself or waits for that.
    pub async fn tables(
        &mut self,
        spec: &PublicationSpec,
    ) -> Result<Vec<PublishedTable>, CaptureError> {
        let mut tables = spec.published_tables(&mut self.connection).await?;
        if let Some(seen) = &self.seen {
            tables.retain(|table| seen.contains(&table.oid));
        }
        let oids: Vec<String> = tables.iter().map(|table| table.oid.to_string()).collect();
        let sizes = "SELECT pg_relation_size(oid) / current_setting('block_size')::int, \
               pg_table_size(oid) \
             FROM unnest($1::text::oid[]) WITH ORDINALITY AS t (oid, n) ORDER BY n";
        let oids = format!("{{{}}}", oids.join(","));
        let sizes = self.connection.query(sizes, &[Some(&oids)]).await;
        for (table, row) in
            tables.iter_mut().zip(&sizes.map_err(|error| spec.publisher_error(error))?)
        {
            // Null: dropped since.
            let number = |column: usize| row.get(column).and_then(|text| text.parse().ok());
            table.blocks = number(0).unwrap_or(0);
            table.bytes = number(1).unwrap_or(0);
        }
        Ok(tables)
    }

    /// Keeps the tables' rows where they are until this connection ends: nothing may rewrite or
    /// empty a table between its first range and its last. False if that cannot be had at once:
    /// because they are elsewhere by now, or because somebody holds or waits for an exclusive lock
    /// (to queue up behind them could deadlock with another connection of ours that they wait for).
    pub async fn hold_still(
        &mut self,
        spec: &PublicationSpec,
        tables: &[PublishedTable],
    ) -> Result<bool, CaptureError> {
        if tables.is_empty() {
            return Ok(true);
        }
        let names: Vec<String> = tables.iter().map(|table| table.table.to_string()).collect();
        let lock = format!("LOCK TABLE {} IN ACCESS SHARE MODE NOWAIT", names.join(", "));
        match self.connection.simple_query(&lock).await {
            Ok(_) => self.files_are_the_same(spec, tables).await,
            // One of them may have been dropped since they were listed, or its schema.
            Err(error) if matches!(error.sqlstate(), Some("55P03" | "42P01" | "3F000")) => {
                Ok(false)
            }
            Err(error) if error.sqlstate() == Some("42501") => {
                Err(may_not_read(spec, tables, error).await)
            }
            Err(error) => Err(spec.publisher_error(error)),
        }
    }

    /// Whether the tables' rows still are where they were when `tables` was read: whoever held them
    /// until now may have been cut off, and the tables emptied or rewritten since.
    async fn files_are_the_same(
        &mut self,
        spec: &PublicationSpec,
        tables: &[PublishedTable],
    ) -> Result<bool, CaptureError> {
        let expected: Vec<String> =
            tables.iter().map(|table| format!("({},{})", table.oid, table.file_node)).collect();
        let changed = format!(
            "SELECT count(*) FROM (VALUES {}) AS t (oid, node) \
             LEFT JOIN pg_class c ON c.oid = t.oid::oid WHERE {} <> t.node",
            expected.join(", "),
            file_node("c")
        );
        let rows = self.connection.query(&changed, &[]).await;
        let rows = rows.map_err(|error| spec.publisher_error(error))?;
        Ok(rows.first().and_then(|row| row.get(0)) == Some("0"))
    }

    /// Whether somebody has waited for an exclusive lock on one of the tables, on an index of one, or
    /// on a partition of one, for [`WAITED_LONG`].
    pub async fn is_in_the_way(
        &mut self,
        spec: &PublicationSpec,
        tables: &[u32],
    ) -> Result<bool, CaptureError> {
        let oids = tables.iter().map(u32::to_string).collect::<Vec<String>>().join(",");
        let waiting = format!(
            "SELECT EXISTS (SELECT 1 FROM pg_locks l WHERE NOT granted AND locktype = 'relation' \
             AND mode = 'AccessExclusiveLock' AND waitstart < clock_timestamp() - interval '{} seconds' \
             AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) \
             AND (relation = ANY ('{{{oids}}}'::oid[]) \
               OR EXISTS (SELECT FROM pg_index i WHERE i.indexrelid = relation \
                 AND i.indrelid = ANY ('{{{oids}}}'::oid[])) \
               OR EXISTS (SELECT 1 FROM pg_partition_ancestors(relation) a \
                 WHERE a.relid = ANY ('{{{oids}}}'::oid[]))))",
            WAITED_LONG.as_secs()
        );
        let rows = self.connection.query(&waiting, &[]).await;
        let rows = rows.map_err(|error| spec.publisher_error(error))?;
        Ok(rows.first().and_then(|row| row.get(0)) == Some("t"))
    }

    /// OIDs of the partitioned tables that the publication names.
    pub async fn partitioned_tables(
        &mut self,
        spec: &PublicationSpec,
    ) -> Result<Vec<u32>, CaptureError> {
        spec.partitioned_tables(&mut self.connection).await
    }

    /// Definitions of tables of the publication, with what they need, in the snapshot.
    pub async fn definitions(
        &mut self,
        spec: &PublicationSpec,
        tables: &[u32],
    ) -> Result<Definitions, CaptureError> {
        spec.definitions(&mut self.connection, tables).await
    }

    /// Starts to read the rows that have one of these keys.
    pub fn look_up<'a>(
        &'a mut self,
        spec: &'a PublicationSpec,
        statement: LookUpStatement,
        keys: &'a [&'a Key],
    ) -> LookingUp<'a> {
        LookingUp::new(spec, &mut self.connection, statement, keys)
    }

    /// Ends the transaction and the connection.
    pub async fn close(self) {
        self.connection.close().await;
    }

    /// Starts to read the published rows of one range of one table.
    pub async fn copy_range(
        &mut self,
        spec: &PublicationSpec,
        table: &PublishedTable,
        range: BlockRange,
        plan: &CopyPlan,
    ) -> Result<CopyOut<'_>, CaptureError> {
        let sql = copy_statement(table, range, plan);
        self.connection.copy_out(&sql).await.map_err(|error| spec.publisher_error(error))
    }
}

/// What a publisher has said that does not let us read one of these tables, with the SQL that would
/// let us where that can be found out.
async fn may_not_read(
    spec: &PublicationSpec,
    tables: &[PublishedTable],
    error: farshore_pg::Error,
) -> CaptureError {
    // The transaction that met it answers nothing more.
    let Ok(mut sql) = spec.connect(Mode::Sql).await else { return spec.publisher_error(error) };
    let oids: Vec<String> = tables.iter().map(|table| table.oid.to_string()).collect();
    let oids = format!("{{{}}}", oids.join(","));
    let missing = sql
        .query(
            "SELECT pg_catalog.quote_ident(current_user), \
               pg_catalog.string_agg(DISTINCT pg_catalog.quote_ident(n.nspname), ', ') \
                 FILTER (WHERE NOT pg_catalog.has_schema_privilege(n.oid, 'USAGE')), \
               pg_catalog.string_agg(pg_catalog.format('%I.%I', n.nspname, c.relname), ', ') \
                 FILTER (WHERE NOT pg_catalog.has_table_privilege(c.oid, 'SELECT')) \
             FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
             WHERE c.oid = ANY ($1::text::oid[])",
            &[Some(&oids)],
        )
        .await;
    sql.close().await;
    let Ok(missing) = missing else { return spec.publisher_error(error) };
    let Some(row) = missing.first() else { return spec.publisher_error(error) };
    let role = row.get(0).unwrap_or_default();
    let grants = [("USAGE ON SCHEMA", row.get(1)), ("SELECT ON", row.get(2))];
    let grants: Vec<String> = grants
        .into_iter()
        .filter_map(|(what, names)| names.map(|names| format!("GRANT {what} {names} TO {role}")))
        .collect();
    if grants.is_empty() {
        // A policy that would hide rows, for instance.
        return spec.publisher_error(error);
    }
    CaptureError::Setup(format!(
        "publication \"{}\": role {role} may not read what is to be copied from {}: {error}. Run \
         there: {}; and go on (farshore resume)",
        spec.name,
        spec.source.redacted(),
        grants.join("; ")
    ))
}

fn copy_statement(table: &PublishedTable, range: BlockRange, plan: &CopyPlan) -> String {
    let mut conditions = Vec::new();
    if let Some(filter) = &table.row_filter {
        conditions.push(format!("({filter})"));
    }
    if range.start > 0 {
        conditions.push(format!("ctid >= '({},0)'::tid", range.start));
    }
    if let Some(end) = range.end {
        conditions.push(format!("ctid < '({end},0)'::tid"));
    }
    let only = if table.partitioned { "" } else { "ONLY " };
    let filter = if conditions.is_empty() {
        String::new()
    } else {
        format!(" WHERE {}", conditions.join(" AND "))
    };
    format!(
        "COPY (SELECT {} FROM {only}{}{filter}) TO STDOUT (FORMAT {})",
        plan.select_list(table),
        table.table,
        plan.format.sql()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::publication::{PublishedColumn, TableName};

    fn column(name: &str, type_oid: u32) -> PublishedColumn {
        PublishedColumn { name: name.into(), type_oid, type_modifier: -1, number: None }
    }

    #[test]
    fn a_copy_reads_just_the_published_rows_of_its_range() {
        let mut table = PublishedTable {
            oid: 1,
            table: TableName { schema: "public".into(), name: "Odd\"name".into() },
            columns: vec![column("id", 23), column("order", 25)],
            types: vec![],
            labels: Vec::new(),
            row_filter: Some("region = 'EU' OR x".into()),
            membership: 1,
            memberships_above: Vec::new(),
            attached_above: Vec::new(),
            file_node: 1,
            blocks: 100,
            bytes: 819_200,
            binary_safe: true,
            binary_copy: true,
            partitioned: false,
            unsent_key: None,
            updates_untold: false,
            old_keys_untold: false,
        };
        let mut plan = CopyPlan { format: CopyFormat::Binary, casts: vec![None, None] };
        let range = BlockRange { start: 10, end: Some(20) };
        assert_eq!(
            copy_statement(&table, range, &plan),
            "COPY (SELECT id, \"order\" FROM ONLY public.\"Odd\"\"name\" WHERE (region = 'EU' OR x) \
             AND ctid >= '(10,0)'::tid AND ctid < '(20,0)'::tid) TO STDOUT (FORMAT binary)"
        );
        table.row_filter = None;
        plan = CopyPlan { format: CopyFormat::Text, casts: vec![Some("bigint".into()), None] };
        table.partitioned = true;
        let all = BlockRange { start: 0, end: None };
        assert_eq!(
            copy_statement(&table, all, &plan),
            "COPY (SELECT id::bigint, \"order\" FROM public.\"Odd\"\"name\") TO STDOUT (FORMAT text)"
        );
    }
}
