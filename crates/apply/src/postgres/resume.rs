//! An unfinished table copy goes on after a crash, at a new snapshot, without copying again what
//! is on the target.
//!
//! The finished ranges hold the table's rows as they were at the old point L1, and the new
//! snapshot shows them at L2. A row that no transaction between the two touched is where it was:
//! in a finished range, and then it is on the target; or in another, and then it will be copied.
//! The rows that were touched are known by key from the log. So, in one target transaction:
//!
//! 1. every touched key is deleted from the target;
//! 2. every touched key is looked up in the new snapshot, and if its row stands in a finished range
//!    now it is inserted (if it stands elsewhere its range is still to be copied);
//! 3. the table's consistent point becomes L2.
//!
//! That needs a key, and a table that was not rewritten or emptied in between: where that does not
//! hold, or too much was touched, the table starts over.

use crate::ApplyError;
use crate::log_feed::{Body, LogFeed, LogItem};
use crate::postgres::answers::answers;
use crate::postgres::session::Session;
use crate::postgres::statements::{Shape, TargetRelation, TargetTable};
use bytes::{Buf, Bytes};
use farshore_capture::publication::{PublicationSpec, PublishedTable, TableName};
use farshore_capture::snapshot::{BlockRange, CopyFormat, CopyPlan, SnapshotConnection};
use farshore_model::transaction::{Header, commands};
use farshore_model::{Lsn, Relation, ReplicaIdentity, TypeKind, Xid, quote_identifier};
use farshore_pg::Connection;
use farshore_store::{LogStore, StoreError};
use farshore_wire::frontend::{self, Format};
use farshore_wire::pgoutput::stored::{Stored, decode_stored};
use farshore_wire::pgoutput::{OldTuple, Tuple, Value};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Keys are held in memory: more bytes of them than this, and the table starts over.
const KEY_BYTES_MAX: usize = 32 << 20;
/// Statements that return no rows, sent before their answers are read.
const DELETES_IN_FLIGHT: usize = 200;
/// Rows looked up at once; they are held in memory and may be large.
const ROWS_IN_FLIGHT: usize = 8;

/// What happened to a table between two points of the log.
pub enum Touched {
    /// Nothing.
    Nothing,
    /// Rows with these keys were inserted, updated or deleted.
    Keys {
        /// The definition that the keys are of.
        relation: Arc<Relation>,
        /// Each key's values in column order, as [`push_key`] writes them.
        keys: HashSet<Vec<u8>>,
    },
    /// Something that keys do not tell; why.
    Unknown(&'static str),
}

/// Reads what happened to each table between its old point and `until`. The store must hold the
/// log up to `until` durably.
pub async fn touched_between(
    store: &Arc<dyn LogStore>,
    tables: &HashMap<TableName, Lsn>,
    until: Lsn,
) -> Result<HashMap<TableName, Touched>, ApplyError> {
    let mut reading = Reading {
        tables,
        touched: tables.keys().map(|table| (table.clone(), Touched::Nothing)).collect(),
        key_bytes: 0,
    };
    let Some(oldest) = tables.values().min() else { return Ok(reading.touched) };
    let mut feed = match LogFeed::open(store.clone(), *oldest) {
        Ok(feed) => feed,
        Err(StoreError::Dropped { .. }) => {
            let forgotten = || Touched::Unknown("retention limits dropped the log");
            return Ok(tables.keys().map(|table| (table.clone(), forgotten())).collect());
        }
        Err(error) => return Err(error.into()),
    };
    while let Some(item) = feed.next_at_hand().await? {
        let LogItem::Transaction { header, body } = item else { continue };
        if header.commit_lsn >= until {
            break;
        }
        match body {
            Body::Inline(body) => {
                let mut subtransaction = header.xid;
                reading.commands(&body, &header, &mut subtransaction, &feed)?;
            }
            Body::Spilled(spill) => {
                let mut spill = feed.open_spill(spill)?;
                let mut subtransaction = header.xid;
                while let Some(chunks) = feed.next_chunk(&mut spill, header.end_lsn).await? {
                    for chunk in chunks {
                        reading.commands(&chunk, &header, &mut subtransaction, &feed)?;
                    }
                }
            }
        }
    }
    Ok(reading.touched)
}

struct Reading<'a> {
    tables: &'a HashMap<TableName, Lsn>,
    touched: HashMap<TableName, Touched>,
    key_bytes: usize,
}

impl Reading<'_> {
    fn commands(
        &mut self,
        body: &[u8],
        header: &Header,
        subtransaction: &mut Xid,
        feed: &LogFeed,
    ) -> Result<(), ApplyError> {
        let position = header.end_lsn;
        let stored = |what: String| ApplyError::Stored { position, what };
        for command in commands(body) {
            let command = command.map_err(|error| stored(error.to_string()))?;
            let change = decode_stored(command).map_err(|error| stored(error.to_string()))?;
            if let Stored::SubtransactionMark(xid) = change {
                *subtransaction = xid;
                continue;
            }
            if header.aborted_subtransactions.binary_search(subtransaction).is_ok() {
                continue;
            }
            let mut tuples = [None, None];
            let relations = match &change {
                Stored::Insert { relation, new } => {
                    tuples[0] = Some(*new);
                    vec![*relation]
                }
                Stored::Update { relation, old, new } => {
                    tuples = [old_tuple(*old), Some(*new)];
                    vec![*relation]
                }
                Stored::Delete { relation, old } => {
                    tuples[0] = old_tuple(*old);
                    vec![*relation]
                }
                Stored::Truncate { relations, .. } => relations.clone().collect(),
                Stored::Message { .. } | Stored::SubtransactionMark(_) => continue,
            };
            for id in relations {
                let Some(relation) = feed.definitions().get(&id) else { continue };
                let table =
                    TableName { schema: relation.schema.clone(), name: relation.name.clone() };
                let Some(point) = self.tables.get(&table) else { continue };
                if header.commit_lsn >= *point {
                    let truncated = matches!(change, Stored::Truncate { .. });
                    self.touch(table, relation, truncated, tuples);
                }
            }
        }
        Ok(())
    }

    fn touch(
        &mut self,
        table: TableName,
        relation: &Arc<Relation>,
        truncated: bool,
        tuples: [Option<Tuple<'_>>; 2],
    ) {
        let Some(touched) = self.touched.get_mut(&table) else { return };
        let keyed = matches!(relation.identity, ReplicaIdentity::Default | ReplicaIdentity::Index)
            && relation.columns.iter().any(|column| column.key);
        if truncated {
            *touched = Touched::Unknown("it was truncated");
        } else if !keyed {
            *touched = Touched::Unknown("it has no key");
        }
        if matches!(touched, Touched::Nothing) {
            *touched = Touched::Keys { relation: relation.clone(), keys: HashSet::new() };
        }
        let Touched::Keys { relation: first, keys } = touched else { return };
        if first != relation {
            *touched = Touched::Unknown("its definition changed");
            return;
        }
        for tuple in tuples.into_iter().flatten() {
            let mut key = Vec::new();
            if !push_key(&mut key, relation, tuple) {
                *touched = Touched::Unknown("a key value is missing in the log");
                return;
            }
            self.key_bytes += key.len();
            keys.insert(key);
        }
        if self.key_bytes > KEY_BYTES_MAX {
            *touched = Touched::Unknown("too many of its rows were touched");
        }
    }
}

fn old_tuple(old: OldTuple<'_>) -> Option<Tuple<'_>> {
    match old {
        OldTuple::Key(tuple) | OldTuple::Full(tuple) => Some(tuple),
        OldTuple::None => None,
    }
}

/// Appends the key's values: each a format byte, a length (32 bits) and the bytes. False when a
/// value is not in the tuple.
fn push_key(key: &mut Vec<u8>, relation: &Relation, tuple: Tuple<'_>) -> bool {
    for (column, value) in relation.columns.iter().zip(tuple.values()) {
        if !column.key {
            continue;
        }
        let (format, bytes) = match value {
            Value::Text(bytes) => (0, bytes),
            Value::Binary(bytes) => (1, bytes),
            Value::Null | Value::Unchanged => return false,
        };
        key.push(format);
        key.extend_from_slice(&(bytes.len() as u32).to_be_bytes());
        key.extend_from_slice(bytes);
    }
    true
}

/// The values that [`push_key`] wrote.
fn key_values(mut key: &[u8]) -> Vec<(Format, &[u8])> {
    let mut values = Vec::new();
    while key.len() >= 5 {
        let format = if key.get_u8() == 0 { Format::Text } else { Format::Binary };
        let len = (key.get_u32() as usize).min(key.len());
        let (value, rest) = key.split_at(len);
        values.push((format, value));
        key = rest;
    }
    values
}

/// A table that goes on at a new snapshot.
pub struct Resume<'a> {
    /// Where its rows are.
    pub spec: &'a PublicationSpec,
    /// Its subscription.
    pub subscription: &'a str,
    /// The table in the new snapshot.
    pub table: &'a PublishedTable,
    /// Its name on the target.
    pub target: &'a TableName,
    /// The table on the target.
    pub there: TargetTable,
    /// How its rows travel.
    pub plan: &'a CopyPlan,
    /// Ranges that are on the target.
    pub done: &'a [BlockRange],
    /// The new snapshot's point.
    pub point: Lsn,
}

impl Resume<'_> {
    /// Brings the finished ranges from the old point to the new one, in one target transaction.
    /// Returns how many rows were put back.
    pub async fn bring_forward(
        &self,
        source: &mut SnapshotConnection,
        target: &mut Session,
        touched: &Touched,
    ) -> Result<u64, ApplyError> {
        target.simple("BEGIN").await?;
        let mut rows = 0;
        if let Touched::Keys { relation, keys } = touched {
            let keys: Vec<&Vec<u8>> = keys.iter().collect();
            self.delete_keys(target, relation, &keys).await?;
            let mut seen = HashSet::new();
            for some in keys.chunks(ROWS_IN_FLIGHT) {
                let found = self.look_up(source.connection(), relation, some, &mut seen);
                let found = found.await.map_err(|error| {
                    ApplyError::Capture(farshore_capture::CaptureError::Publisher {
                        server: self.spec.source.redacted(),
                        error,
                    })
                })?;
                rows += found.len() as u64;
                let inserted = self.insert(&mut target.connection, &found).await;
                inserted.map_err(|error| target.error(error))?;
            }
        }
        target
            .execute(
                "UPDATE farshore.table_copy SET copied_at = $4::text::pg_lsn \
                 WHERE subscription = $1 AND schema_name = $2 AND table_name = $3",
                &[
                    Some(self.subscription),
                    Some(&self.table.table.schema),
                    Some(&self.table.table.name),
                    Some(&self.point.to_string()),
                ],
            )
            .await?;
        farshore_fault::point("snapshot.before-range-commit");
        target.simple("COMMIT").await?;
        farshore_fault::point("snapshot.after-range-commit");
        Ok(rows)
    }

    async fn delete_keys(
        &self,
        target: &mut Session,
        relation: &Arc<Relation>,
        keys: &[&Vec<u8>],
    ) -> Result<(), ApplyError> {
        let (table, there) = (self.target.clone(), self.there.clone());
        let relation = TargetRelation::new(relation.clone(), table, self.point, there)
            .map_err(|misfit| misfit.error(self.subscription, self.target))?;
        let (sql, types) = relation.sql(&Shape::Delete);
        for some in keys.chunks(DELETES_IN_FLIGHT) {
            let deleted = run_for_keys(&mut target.connection, &sql, &types, some, Format::Text);
            deleted.await.map_err(|error| target.error(error))?;
        }
        Ok(())
    }

    /// Rows of the keys that stand in finished ranges now, apart from those seen before: keys that
    /// are spelled differently may be equal to the publisher (`1.0` and `1.00`).
    async fn look_up(
        &self,
        source: &mut Connection,
        relation: &Relation,
        keys: &[&Vec<u8>],
        seen: &mut HashSet<Bytes>,
    ) -> Result<Vec<Vec<Option<Bytes>>>, farshore_pg::Error> {
        let mut types = Vec::new();
        let mut terms: Vec<String> = Vec::new();
        for column in relation.columns.iter().filter(|column| column.key) {
            types.push(column.type_oid);
            let equals = self.equals(column.type_oid);
            terms.push(format!("{} {equals} ${}", quote_identifier(&column.name), types.len()));
        }
        if let Some(filter) = &self.table.row_filter {
            terms.push(format!("({filter})"));
        }
        // A partitioned table has no rows of its own.
        let only = if self.table.partitioned { "" } else { "ONLY " };
        // Where the row stands, as a text: that is the same bytes in either format.
        let sql = format!(
            "SELECT concat(tableoid, ' ', ctid), {} FROM {only}{} WHERE {}",
            self.plan.select_list(self.table),
            self.table.table,
            terms.join(" AND ")
        );
        let format = match self.plan.format {
            CopyFormat::Binary => Format::Binary,
            CopyFormat::Text => Format::Text,
        };
        let mut found = run_for_keys(source, &sql, &types, keys, format).await?;
        found.retain(|row| {
            let Some(place) = row.first().and_then(Option::as_ref) else { return false };
            let block = block_of(place);
            block.is_some_and(|block| self.done.iter().any(|range| range.contains(block)))
                && seen.insert(place.clone())
        });
        for row in &mut found {
            row.remove(0);
        }
        Ok(found)
    }

    /// The equality operator of a type on the publisher, where our `search_path` is empty too.
    fn equals(&self, mut oid: u32) -> String {
        let known = |oid: u32| self.table.types.iter().find(|known| known.oid == oid);
        while let Some(TypeKind::Domain { base }) = known(oid).map(|known| &known.kind) {
            oid = *base;
        }
        match known(oid) {
            Some(known) if known.kind == TypeKind::Base => {
                format!("OPERATOR({}.=)", quote_identifier(&known.schema))
            }
            Some(_) | None => "=".to_owned(),
        }
    }

    async fn insert(
        &self,
        target: &mut Connection,
        rows: &[Vec<Option<Bytes>>],
    ) -> Result<(), farshore_pg::Error> {
        if rows.is_empty() {
            return Ok(());
        }
        let names: Vec<String> =
            self.table.columns.iter().map(|column| quote_identifier(&column.name)).collect();
        let values: Vec<String> = (1..=names.len()).map(|n| format!("${n}")).collect();
        let sql = format!(
            "INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE VALUES ({})",
            self.target,
            names.join(", "),
            values.join(", ")
        );
        let format = match self.plan.format {
            CopyFormat::Binary => Format::Binary,
            CopyFormat::Text => Format::Text,
        };
        frontend::parse(target.out(), "", &sql, &[])?;
        for row in rows {
            let mut bind = frontend::Bind::begin(target.out(), "", "", row.len())?;
            for value in row {
                bind.parameter(format, value.as_deref())?;
            }
            bind.finish(Format::Text)?;
            frontend::execute(target.out(), "", 0)?;
            target.flush().await?;
        }
        frontend::sync(target.out());
        answers(target).await.map(drop)
    }
}

/// The block in `16384 (12,3)`: a table's OID and a row's `ctid`.
fn block_of(place: &[u8]) -> Option<u64> {
    let (_, ctid) = std::str::from_utf8(place).ok()?.split_once('(')?;
    ctid.split_once(',')?.0.parse().ok()
}

/// Runs one statement for each key; returns all rows.
async fn run_for_keys(
    connection: &mut Connection,
    sql: &str,
    types: &[u32],
    keys: &[&Vec<u8>],
    results: Format,
) -> Result<Vec<Vec<Option<Bytes>>>, farshore_pg::Error> {
    frontend::parse(connection.out(), "", sql, types)?;
    for key in keys {
        let values = key_values(key);
        let mut bind = frontend::Bind::begin(connection.out(), "", "", values.len())?;
        for (format, value) in values {
            bind.parameter(format, Some(value))?;
        }
        bind.finish(results)?;
        frontend::execute(connection.out(), "", 0)?;
    }
    frontend::sync(connection.out());
    connection.flush().await?;
    answers(connection).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_in_places() {
        assert_eq!(block_of(b"16384 (12,3)"), Some(12));
        assert_eq!(block_of(b"16384 (4294967294,1)"), Some(4_294_967_294));
        assert_eq!(block_of(b"16384"), None);
    }

    #[test]
    fn keys_round_trip() {
        let mut key = Vec::new();
        for (format, value) in [(1_u8, &b"\0\x01"[..]), (0, b"abc"), (0, b"")] {
            key.push(format);
            key.extend_from_slice(&(value.len() as u32).to_be_bytes());
            key.extend_from_slice(value);
        }
        assert_eq!(
            key_values(&key),
            [(Format::Binary, &b"\0\x01"[..]), (Format::Text, b"abc"), (Format::Text, b"")]
        );
    }
}
