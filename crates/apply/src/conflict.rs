//! When the target's rows are not what the publisher's changes expect: what is said, and what is
//! done about it.

use crate::error::{Cause, is_about_data};
use crate::remedy::{missing_label, next_step_of};
use farshore_capture::publication::TableName;
use farshore_model::{DictionaryId, Relation};
use farshore_wire::backend::ServerError;
use farshore_wire::pgoutput::{OldTuple, Tuple, stored::Stored};
use farshore_wire::readable::{Readable, push_json_string, readable};
use std::borrow::Cow;
use std::collections::BTreeMap;

/// Longest key value shown in a message, in characters.
const SHOWN_CHARS_MAX: usize = 80;
/// Longest value kept in a record of a conflict, in bytes.
const RECORDED_BYTES_MAX: usize = 1 << 20;

/// What is done about a change that is at odds with the target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnConflict {
    /// The subscription stops before the change's transaction and says why.
    #[default]
    Stop,
    /// The change is left out and recorded.
    Skip,
    /// The publisher's row wins, and the conflict is recorded.
    Overwrite,
}

/// What is done, table by table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConflictPolicy {
    /// For tables that are not named.
    pub default: OnConflict,
    /// By the publisher's table names.
    pub tables: BTreeMap<TableName, OnConflict>,
}

impl ConflictPolicy {
    /// For one table of the publisher.
    pub fn of(&self, relation: &Relation) -> OnConflict {
        let named = self
            .tables
            .iter()
            .find(|(table, _)| table.schema == relation.schema && table.name == relation.name);
        named.map_or(self.default, |(_, policy)| *policy)
    }
}

const ROW_MISSING: &str = "The row is not on the target: something else changed the target. Put \
     the row back and go on (farshore resume), leave the transaction out (farshore skip), set \
     on_conflict, or copy the table anew (farshore resync). If it is there, a trigger or rule of the \
     target keeps the change out: farshore check names it";

const ROW_DIFFERS: &str = "No row on the target is in all columns what this one was on the publisher \
     (REPLICA IDENTITY FULL): something else changed the target. Mend the row and go on (farshore \
     resume), leave the transaction out (farshore skip), set on_conflict, or copy the table anew \
     (farshore resync)";

/// Of old rows that may be no more than the key of a partition.
const ROW_DIFFERS_OR_IS_A_KEY: &str = "No row on the target is in all columns what the publisher sent \
     as the old one (REPLICA IDENTITY FULL). It sent NULL for columns: if the table is partitioned \
     there and published through its root, the partition has another identity than the root \
     (PostgreSQL does not hand FULL down), and only its key came. ALTER TABLE … REPLICA IDENTITY FULL \
     on each such partition of the publisher (`farshore check` names them), and copy the table anew \
     (farshore resync). Otherwise something else changed the target: mend the row and go on (farshore \
     resume), leave the transaction out (farshore skip), or set on_conflict";

/// Of an update of a table whose rows are found by all of their old values, which came without them.
const ROW_MISSING_WITHOUT_OLD: &str = "The publisher sent no old row, though the table has REPLICA \
     IDENTITY FULL: the partition that the row is in has not (PostgreSQL does not hand it down). No row \
     on the target has its primary key. ALTER TABLE … REPLICA IDENTITY FULL on each such partition of \
     the publisher (`farshore check` names them), and copy the table anew (farshore resync); or leave \
     the transaction out (farshore skip), or set on_conflict";

const SEVERAL_ROWS: &str = "What finds the row is not unique on the target. Either something else \
     changed the target: remove the rows that do not belong there and go on (farshore resume). Or the \
     publisher's replica identity has a generated column, which PostgreSQL does not send: choose \
     another one there, and copy the table anew (farshore resync)";

const NOT_INSERTED: &str = "A trigger or rule on the target took the row (farshore check names it). \
     Disable or remove it, or, if it fires because the role may not set session_replication_role, let \
     it; and go on (farshore resume)";

const REFUSED: &str = "Mend the target (the message above names the constraint or type) and go on \
     (farshore resume), leave the transaction out (farshore skip), or set on_conflict";

/// The remedy for a transaction that the target does not commit.
pub const COMMIT_REFUSED: &str = "A deferred constraint or trigger of the target does not hold. \
     Mend the target and go on (farshore resume), or leave the transaction out (farshore skip)";

/// By what a change's row is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FoundBy {
    /// By its key.
    Key,
    /// By all of its old values.
    Image,
    /// By all of its old values, of which no more came than what may be the key of a partition.
    PartialImage,
    /// By a key, since its old values did not come.
    KeyForWantOfImage,
}

/// What to do about a failed change.
pub fn remedy(cause: &Cause, is_insert: bool, found_by: FoundBy) -> Cow<'static, str> {
    let of_rows = match (cause, found_by) {
        (Cause::Refused(error), _) => return remedy_of(error),
        (Cause::Rows(_), _) if is_insert => NOT_INSERTED,
        (Cause::Rows(0), FoundBy::Key) => ROW_MISSING,
        (Cause::Rows(0), FoundBy::Image) => ROW_DIFFERS,
        (Cause::Rows(0), FoundBy::PartialImage) => ROW_DIFFERS_OR_IS_A_KEY,
        (Cause::Rows(0), FoundBy::KeyForWantOfImage) => ROW_MISSING_WITHOUT_OLD,
        (Cause::Rows(_), _) => SEVERAL_ROWS,
    };
    of_rows.into()
}

fn remedy_of(error: &ServerError) -> Cow<'static, str> {
    match missing_label(error) {
        Some(label) => {
            format!("{label}; or leave the transaction out (farshore skip), or set on_conflict")
                .into()
        }
        None if is_about_data(error) => REFUSED.into(),
        None => next_step_of(error),
    }
}

/// The word for a stored change's kind.
pub fn operation(change: &Stored<'_>) -> &'static str {
    match change {
        Stored::Insert { .. } => "INSERT",
        Stored::Update { .. } => "UPDATE",
        Stored::Delete { .. } => "DELETE",
        Stored::Truncate { .. } => "TRUNCATE",
        Stored::Message { .. } => "MESSAGE",
        Stored::SubtransactionMark(_) => "SUBTRANSACTION",
    }
}

/// The relations that a change is on.
pub fn relations_of(change: &Stored<'_>) -> Vec<DictionaryId> {
    match change {
        Stored::Insert { relation, .. }
        | Stored::Update { relation, .. }
        | Stored::Delete { relation, .. } => vec![*relation],
        Stored::Truncate { relations, .. } => relations.clone().collect(),
        Stored::Message { .. } | Stored::SubtransactionMark(_) => Vec::new(),
    }
}

/// The row that the change is about: the old one where the publisher sent it, else the new.
fn row_of<'a>(change: &Stored<'a>) -> Option<Tuple<'a>> {
    match change {
        Stored::Insert { new, .. } => Some(*new),
        Stored::Update { old, new, .. } => identifying_tuple(*old, Some(*new)),
        Stored::Delete { old, .. } => identifying_tuple(*old, None),
        Stored::Truncate { .. } | Stored::Message { .. } | Stored::SubtransactionMark(_) => None,
    }
}

/// The values of the key's columns, or of all where there is no key.
fn key_of<'a>(
    tuple: Tuple<'a>,
    relation: &'a Relation,
) -> impl Iterator<Item = (&'a str, Readable)> {
    let keyed = relation.columns.iter().any(|column| column.key);
    readable_row(tuple, relation, move |column| column.key || !keyed)
}

fn readable_row<'a>(
    tuple: Tuple<'a>,
    relation: &'a Relation,
    wanted: impl Fn(&farshore_model::Column) -> bool + 'a,
) -> impl Iterator<Item = (&'a str, Readable)> {
    relation.columns.iter().zip(tuple.values()).filter(move |(column, _)| wanted(column)).map(
        |(column, value)| (column.name.as_str(), readable(value, column.type_oid, &relation.types)),
    )
}

/// The row's key as `column=value, …`, for messages.
pub fn readable_key(change: &Stored<'_>, relation: &Relation) -> String {
    let Some(tuple) = row_of(change) else { return "none".to_owned() };
    let shown: Vec<String> = key_of(tuple, relation)
        .map(|(name, value)| format!("{name}={}", shortened(value.text())))
        .collect();
    shown.join(", ")
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

/// The row's key as a JSON object.
pub fn key_json(change: &Stored<'_>, relation: &Relation) -> Option<String> {
    Some(json_object(key_of(row_of(change)?, relation)))
}

/// The old row as a JSON object: all of it, or the key's columns, as the publisher sent it.
pub fn old_json(change: &Stored<'_>, relation: &Relation) -> Option<String> {
    let (Stored::Update { old, .. } | Stored::Delete { old, .. }) = change else { return None };
    match old {
        OldTuple::None => None,
        OldTuple::Key(tuple) => Some(json_object(key_of(*tuple, relation))),
        OldTuple::Full(tuple) => Some(json_object(readable_row(*tuple, relation, |_| true))),
    }
}

/// The new row as a JSON object.
pub fn new_json(change: &Stored<'_>, relation: &Relation) -> Option<String> {
    let (Stored::Insert { new, .. } | Stored::Update { new, .. }) = change else { return None };
    Some(json_object(readable_row(*new, relation, |_| true)))
}

fn json_object<'a>(values: impl Iterator<Item = (&'a str, Readable)>) -> String {
    let mut out = String::from("{");
    for (name, value) in values {
        if out.len() > 1 {
            out.push_str(", ");
        }
        push_json_string(&mut out, name);
        out.push_str(": ");
        let text = value.text();
        if text.len() > RECORDED_BYTES_MAX {
            let end = (0..=RECORDED_BYTES_MAX).rev().find(|at| text.is_char_boundary(*at));
            let start = &text[..end.unwrap_or(0)];
            push_json_string(&mut out, &format!("{start}… ({} bytes)", text.len()));
        } else {
            value.push_json(&mut out);
        }
    }
    out.push('}');
    out
}

/// The values that identify the row: the old tuple where the publisher sent one, else the new.
pub fn identifying_tuple<'a>(old: OldTuple<'a>, new: Option<Tuple<'a>>) -> Option<Tuple<'a>> {
    match old {
        OldTuple::Key(tuple) | OldTuple::Full(tuple) => Some(tuple),
        OldTuple::None => new,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use farshore_model::{Column, ReplicaIdentity};

    fn relation() -> Relation {
        let column = |name: &str, type_oid, key| Column {
            key,
            name: name.to_owned(),
            type_oid,
            type_modifier: -1,
        };
        Relation {
            oid: 1,
            schema: "public".into(),
            name: "t".into(),
            identity: ReplicaIdentity::Default,
            columns: vec![column("id", 23, true), column("v", 25, false)],
            types: vec![],
        }
    }

    #[test]
    fn rows_are_readable() {
        // Two values: a binary integer and a text.
        let long = "x".repeat(200);
        let mut bytes = vec![0, 2, b'b', 0, 0, 0, 4, 0xff, 0xff, 0xff, 0xfe, b't', 0, 0, 0, 200];
        bytes.extend(long.as_bytes());
        let tuple = Tuple::parse(&bytes).unwrap();
        let change = Stored::Insert { relation: farshore_model::DictionaryId(1), new: tuple };
        let relation = relation();
        assert_eq!(readable_key(&change, &relation), "id=-2");
        assert_eq!(key_json(&change, &relation).unwrap(), "{\"id\": -2}");
        assert_eq!(
            new_json(&change, &relation).unwrap(),
            format!("{{\"id\": -2, \"v\": \"{long}\"}}")
        );
        assert_eq!(old_json(&change, &relation), None);
        assert_eq!(shortened(&long).chars().count(), 81);
    }

    #[test]
    fn tables_may_have_a_policy_of_their_own() {
        let table = TableName { schema: "public".into(), name: "t".into() };
        let tables = BTreeMap::from([(table, OnConflict::Skip)]);
        let policy = ConflictPolicy { default: OnConflict::Overwrite, tables };
        assert_eq!(policy.of(&relation()), OnConflict::Skip);
        let other = Relation { name: "u".into(), ..relation() };
        assert_eq!(policy.of(&other), OnConflict::Overwrite);
    }
}
