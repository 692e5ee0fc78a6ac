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
use crate::postgres::answers::count_all;
use crate::postgres::session::Session;
use crate::postgres::statements::{Shape, TargetRelation};
use crate::postgres::target_table::TargetTable;
use farshore_capture::publication::{PublishedTable, TableName};
use farshore_capture::snapshot::{BlockRange, CopyFormat, CopyPlan};
use farshore_capture::source::{FoundRow, Key, LookUp, RowPlace, SnapshotSession, run_for_keys};
use farshore_model::transaction::{Header, commands};
use farshore_model::{Lsn, Relation, ReplicaIdentity, Xid, quote_identifier};
use farshore_pg::Connection;
use farshore_store::{LogStore, StoreError};
use farshore_wire::frontend::{self, Format};
use farshore_wire::pgoutput::stored::{Stored, decode_stored};
use farshore_wire::pgoutput::{OldTuple, Tuple, Value};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Keys are held in memory: more bytes of them than this, and the table with most of them starts over.
const KEY_BYTES_MAX: usize = 32 << 20;
/// Statements that return no rows, sent before their answers are read.
const DELETES_IN_FLIGHT: usize = 200;

/// What happened to a table between two points of the log.
pub enum Touched {
    /// Nothing.
    Nothing,
    /// Rows with these keys were inserted, updated or deleted.
    Keys {
        /// The definition that the keys are of.
        relation: Arc<Relation>,
        /// Each key's values in column order.
        keys: HashSet<Key>,
    },
    /// It was emptied before anything else happened to it.
    Truncated,
    /// Something that keys do not tell; why.
    Unknown(&'static str),
}

/// Since when it is asked what happened to a table.
#[derive(Clone, Copy, Debug)]
pub struct Since {
    /// Its old point.
    pub point: Lsn,
    /// The publisher's OID of it, where it is known.
    pub oid: Option<u32>,
}

/// Reads what happened to each table between its old point and `until`. The store must hold the
/// log up to `until` durably.
pub async fn touched_between(
    store: &Arc<dyn LogStore>,
    tables: &HashMap<TableName, Since>,
    until: Lsn,
) -> Result<HashMap<TableName, Touched>, ApplyError> {
    let by_oid = tables.iter().filter_map(|(table, since)| Some((since.oid?, table)));
    let mut reading = Reading {
        tables,
        by_oid: by_oid.collect(),
        touched: tables.keys().map(|table| (table.clone(), Touched::Nothing)).collect(),
        held: HeldKeys::default(),
    };
    let Some(oldest) = tables.values().map(|since| since.point).min() else {
        return Ok(reading.touched);
    };
    let mut feed = match LogFeed::open(store.clone(), oldest) {
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
    tables: &'a HashMap<TableName, Since>,
    by_oid: HashMap<u32, &'a TableName>,
    touched: HashMap<TableName, Touched>,
    held: HeldKeys,
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
                if let Some(renamed) = self.by_oid.get(&relation.oid).filter(|t| ***t != table)
                    && header.commit_lsn >= self.tables[*renamed].point
                {
                    let renamed = (*renamed).clone();
                    self.touched.insert(renamed, Touched::Unknown("it had another name"));
                }
                let Some(since) = self.tables.get(&table) else { continue };
                if header.commit_lsn >= since.point {
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
        let bytes = touched.add(relation, truncated, tuples);
        if !matches!(touched, Touched::Keys { .. }) {
            self.held.release(&table);
            return;
        }
        self.held.hold(&table, bytes);
        while let Some(largest) = self.held.too_many() {
            self.touched.insert(largest, Touched::Unknown("too many of its rows were touched"));
        }
    }
}

impl Touched {
    /// Adds a change; returns how many more bytes of keys there are.
    fn add(
        &mut self,
        relation: &Arc<Relation>,
        truncated: bool,
        tuples: [Option<Tuple<'_>>; 2],
    ) -> usize {
        let keyed = matches!(relation.identity, ReplicaIdentity::Default | ReplicaIdentity::Index)
            && relation.columns.iter().any(|column| column.key);
        if matches!(self, Touched::Truncated) {
            return 0;
        }
        if truncated && matches!(self, Touched::Nothing) {
            *self = Touched::Truncated;
        } else if truncated {
            *self = Touched::Unknown("it was truncated");
        } else if !keyed {
            *self = Touched::Unknown("it has no key");
        }
        if matches!(self, Touched::Nothing) {
            *self = Touched::Keys { relation: relation.clone(), keys: HashSet::new() };
        }
        let Touched::Keys { relation: first, keys } = self else { return 0 };
        if first != relation {
            *self = Touched::Unknown("its definition changed");
            return 0;
        }
        let mut more = 0;
        for tuple in tuples.into_iter().flatten() {
            let mut key = Key::default();
            if !push_key(&mut key, relation, tuple) {
                *self = Touched::Unknown("a key value is missing in the log");
                return 0;
            }
            let bytes = key.bytes();
            if keys.insert(key) {
                more += bytes;
            }
        }
        more
    }
}

/// Bytes of keys that are in memory, table by table.
#[derive(Default)]
struct HeldKeys {
    of_table: HashMap<TableName, usize>,
    total: usize,
}

impl HeldKeys {
    fn hold(&mut self, table: &TableName, bytes: usize) {
        if bytes == 0 {
            return;
        }
        self.total += bytes;
        match self.of_table.get_mut(table) {
            Some(held) => *held += bytes,
            None => drop(self.of_table.insert(table.clone(), bytes)),
        }
    }

    fn release(&mut self, table: &TableName) {
        self.total -= self.of_table.remove(table).unwrap_or(0);
    }

    /// Where they are too many, the table with most of them, whose keys count no more: it is that
    /// one's changes that leave no room, and not those of tables that were touched last.
    fn too_many(&mut self) -> Option<TableName> {
        if self.total <= KEY_BYTES_MAX {
            return None;
        }
        let largest = self.of_table.iter().max_by_key(|(_, bytes)| **bytes);
        let largest = largest.map(|(table, _)| table.clone())?;
        self.release(&largest);
        Some(largest)
    }
}

fn old_tuple(old: OldTuple<'_>) -> Option<Tuple<'_>> {
    match old {
        OldTuple::Key(tuple) | OldTuple::Full(tuple) => Some(tuple),
        OldTuple::None => None,
    }
}

/// Appends the key's values. False when one is not in the tuple.
fn push_key(key: &mut Key, relation: &Relation, tuple: Tuple<'_>) -> bool {
    for (column, value) in relation.columns.iter().zip(tuple.values()) {
        if !column.key {
            continue;
        }
        match value {
            Value::Text(bytes) => key.push(Format::Text, bytes),
            Value::Binary(bytes) => key.push(Format::Binary, bytes),
            Value::Null | Value::Unchanged => return false,
        }
    }
    true
}

/// A table that goes on at a new snapshot.
pub struct Resume<'a> {
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
        source: &mut dyn SnapshotSession,
        target: &mut Session,
        touched: &Touched,
    ) -> Result<u64, ApplyError> {
        target.simple("BEGIN").await?;
        let mut rows = 0;
        if let Touched::Keys { relation, keys } = touched {
            let keys: Vec<&Key> = keys.iter().collect();
            self.delete_keys(target, relation, &keys).await?;
            let key_columns = relation.columns.iter().filter(|column| column.key);
            let key_columns: Vec<String> = key_columns.map(|column| column.name.clone()).collect();
            let (table, plan) = (self.table, self.plan);
            let wanted = LookUp { table, plan, key_columns: &key_columns, keys: &keys };
            let mut found = source.look_up(wanted).await?;
            let mut seen = HashSet::new();
            while let Some(some) = found.next().await? {
                let some = self.of_finished_ranges(some, &mut seen);
                rows += some.len() as u64;
                let inserted = self.insert(&mut target.connection, &some).await;
                let taken = inserted.map_err(|error| target.error(error))?;
                if taken != some.len() as u64 {
                    let (name, sent) = (self.subscription, some.len() as u64);
                    return Err(rows_lost(name, self.target, taken, sent));
                }
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
        let seen = (self.there.stamp.clone(), self.target.clone());
        target.commit_unaltered(self.subscription, &[(self.there.oid, seen)].into()).await?;
        farshore_fault::point("snapshot.after-range-commit");
        Ok(rows)
    }

    async fn delete_keys(
        &self,
        target: &mut Session,
        relation: &Arc<Relation>,
        keys: &[&Key],
    ) -> Result<(), ApplyError> {
        let (table, there) = (self.target.clone(), self.there.clone());
        let relation = TargetRelation::new(relation.clone(), table, self.point, there)
            .map_err(|misfit| misfit.error(self.subscription, (&self.table.table, self.target)))?;
        let (sql, types) = relation.sql(&Shape::Delete);
        for some in keys.chunks(DELETES_IN_FLIGHT) {
            let deleted = run_for_keys(&mut target.connection, &sql, &types, some, Format::Text);
            deleted.await.map_err(|error| target.error(error))?;
        }
        Ok(())
    }

    /// Rows that stand in finished ranges now, apart from those seen before: keys that are spelled
    /// differently may be equal to the publisher (`1.0` and `1.00`).
    fn of_finished_ranges(
        &self,
        mut found: Vec<FoundRow>,
        seen: &mut HashSet<RowPlace>,
    ) -> Vec<FoundRow> {
        found.retain(|row| {
            let block = u64::from(row.place.block);
            self.done.iter().any(|range| range.contains(block)) && seen.insert(row.place)
        });
        found
    }

    /// Returns how many rows the target says it has inserted.
    async fn insert(
        &self,
        target: &mut Connection,
        rows: &[FoundRow],
    ) -> Result<u64, farshore_pg::Error> {
        if rows.is_empty() {
            return Ok(0);
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
            let mut bind = frontend::Bind::begin(target.out(), "", "", row.values.len())?;
            for value in &row.values {
                bind.parameter(format, value.as_deref())?;
            }
            bind.finish(Format::Text)?;
            frontend::execute(target.out(), "", 0)?;
            target.flush().await?;
        }
        frontend::sync(target.out());
        count_all(target).await
    }
}

/// The target has taken other rows than were sent to it: more or less of them.
pub(super) fn rows_lost(
    subscription: &str,
    table: &TableName,
    taken: u64,
    sent: u64,
) -> ApplyError {
    ApplyError::Setup(format!(
        "subscription \"{subscription}\": table {table} on the target took {taken} rows of a part of \
         the copy, and {sent} were sent. A trigger there (BEFORE INSERT, one that returns NULL) or a \
         rule (DO INSTEAD) keeps rows out, and none of that part was committed. Drop or disable it, \
         and go on (farshore resume)"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_model::Column;
    use farshore_wire::pgoutput::encode;

    const LARGE: usize = 1 << 20;

    fn named(name: &str) -> TableName {
        TableName { schema: "public".into(), name: name.into() }
    }

    /// Touches rows of tables that have one column, their key.
    fn touched(
        rows: impl Iterator<Item = (&'static str, Vec<u8>)>,
    ) -> Vec<(String, Option<usize>)> {
        let since = Since { point: Lsn(1), oid: None };
        let tables: HashMap<TableName, Since> =
            ["a", "b"].into_iter().map(|name| (named(name), since)).collect();
        let mut reading = Reading {
            tables: &tables,
            by_oid: HashMap::new(),
            touched: tables.keys().map(|table| (table.clone(), Touched::Nothing)).collect(),
            held: HeldKeys::default(),
        };
        for (table, key) in rows {
            let key_column =
                Column { key: true, name: "id".into(), type_oid: 25, type_modifier: -1 };
            let relation = Relation {
                oid: 7,
                schema: "public".into(),
                name: table.into(),
                identity: ReplicaIdentity::Default,
                columns: vec![key_column],
                types: Vec::new(),
            };
            let row = encode::tuple(&[Value::Text(&key)]);
            let row = Tuple::parse(&row).unwrap();
            reading.touch(named(table), &Arc::new(relation), false, [Some(row), None]);
        }
        let total: usize = reading.held.of_table.values().sum();
        assert_eq!(total, reading.held.total);
        let keys = |touched: &Touched| match touched {
            Touched::Keys { keys, .. } => Some(keys.len()),
            Touched::Nothing => Some(0),
            Touched::Truncated | Touched::Unknown(_) => None,
        };
        let mut found: Vec<(String, Option<usize>)> =
            reading.touched.iter().map(|(table, is)| (table.name.clone(), keys(is))).collect();
        found.sort();
        found
    }

    fn large(number: u8) -> Vec<u8> {
        vec![number; LARGE]
    }

    #[test]
    fn a_row_that_is_touched_often_counts_once() {
        let rows = (0..200).map(|i| ("a", large(i % 3)));
        assert_eq!(touched(rows), [("a".to_owned(), Some(3)), ("b".to_owned(), Some(0))]);
    }

    #[test]
    fn a_table_with_many_touched_rows_leaves_room_for_the_others() {
        let many = (0..31).map(|i| ("a", large(i)));
        let few = (0..5).map(|i| ("b", large(i)));
        let again = (0..31).map(|i| ("a", large(i)));
        let found = touched(many.chain(few).chain(again));
        assert_eq!(found, [("a".to_owned(), None), ("b".to_owned(), Some(5))]);
    }
}
