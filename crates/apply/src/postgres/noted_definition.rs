//! Definitions of tables as they are noted on the target, in `farshore.table_copy`.

use crate::ApplyError;
use crate::postgres::progress::TableCopyColumn;
use crate::postgres::session::Session;
use farshore_capture::publication::{PublishedTable, TableName};
use farshore_model::{Column, Relation, ReplicaIdentity};
use farshore_pg::{Row, text_array};
use farshore_wire::pgoutput::stored;
use std::collections::HashMap;

/// The definition of a table that is copied.
pub fn definition_of(table: &PublishedTable) -> Relation {
    let columns = table.columns.iter().map(|column| Column {
        key: false,
        name: column.name.clone(),
        type_oid: column.type_oid,
        type_modifier: column.type_modifier,
    });
    Relation {
        oid: table.oid,
        schema: table.table.schema.clone(),
        name: table.table.name.clone(),
        identity: ReplicaIdentity::Default,
        columns: columns.collect(),
        types: table.types.clone(),
    }
}

/// A definition of which only the OID and the name are known: a table that was restored from a backup
/// may have other columns by now. Changes are known by it that come under another name.
pub fn known_by_oid(table: &PublishedTable) -> Relation {
    Relation { columns: Vec::new(), types: Vec::new(), ..definition_of(table) }
}

/// Whether no more than that is known of what is `now`.
pub fn is_known_by_oid(noted: &Relation, now: &Relation) -> bool {
    noted.columns.is_empty() && !now.columns.is_empty()
}

/// A definition as a value in SQL.
pub fn definition_sql(relation: &Relation) -> String {
    format!("pg_catalog.decode('{}', 'hex')", hex_of(relation))
}

/// Its bytes, as hexadecimal digits.
pub fn hex_of(relation: &Relation) -> String {
    stored::encode_definition(relation).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.strip_prefix("\\x")?.as_bytes();
    let (pairs, rest) = digits.as_chunks::<2>();
    if !rest.is_empty() {
        return None;
    }
    let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    pairs.iter().map(byte).collect()
}

pub(super) fn published_name(relation: &Relation) -> TableName {
    named(&relation.schema, &relation.name)
}

/// pgoutput calls one of PostgreSQL's own schemas by no name.
fn named(schema: &str, name: &str) -> TableName {
    let schema = if schema.is_empty() { "pg_catalog" } else { schema };
    TableName { schema: schema.to_owned(), name: name.to_owned() }
}

/// The name in the beginning of a definition, from behind its OID on; the server's spelling of bytes.
pub(super) fn name_in(text: &str) -> Option<TableName> {
    let bytes = from_hex(text)?;
    let mut names = bytes.split(|byte| *byte == 0);
    let mut name = || std::str::from_utf8(names.next()?).ok();
    Some(named(name()?, name()?))
}

/// The definition that a table follows, if one is known; what is wrong with it if it is damaged.
pub async fn load_definition(
    session: &mut Session,
    subscription: &str,
    table: &TableName,
) -> Result<Result<Option<Relation>, &'static str>, ApplyError> {
    let rows = session
        .query(
            "SELECT definition FROM farshore.table_copy \
             WHERE subscription = $1 AND schema_name = $2 AND table_name = $3",
            &[Some(subscription), Some(&table.schema), Some(&table.name)],
        )
        .await?;
    let Some(text) = rows.first().and_then(|row| row.get(0)) else { return Ok(Ok(None)) };
    let decoded = from_hex(text).and_then(|bytes| stored::decode_definition(&bytes).ok());
    let damaged = "its definition in farshore.table_copy is damaged: set it to NULL there";
    Ok(decoded.map(Some).ok_or(damaged))
}

/// The definitions that copied tables follow, of all among `tables` for which one is known and
/// sound, with one question.
pub async fn load_definitions(
    session: &mut Session,
    subscription: &str,
    tables: &[TableName],
) -> Result<HashMap<TableName, Relation>, ApplyError> {
    let [schemas, names] = schemas_and_names(tables);
    let parameters = [Some(subscription), Some(&schemas[..]), Some(&names[..])];
    Ok(definitions_of(&session.query(DEFINITIONS, &parameters).await?))
}

/// Schemas and names of tables, each as an array.
pub(super) fn schemas_and_names(tables: &[TableName]) -> [String; 2] {
    let schemas = text_array(tables.iter().map(|table| table.schema.as_str()));
    [schemas, text_array(tables.iter().map(|table| table.name.as_str()))]
}

/// What [`load_definitions`] asks; its parameters are the subscription and [`schemas_and_names`].
/// One by one, by the key: on a connection that changes are applied on, where nothing is hashed, a
/// join would compare all with all.
pub(super) const DEFINITIONS: &str = "SELECT w.schema_name, w.table_name, c.definition \
     FROM unnest($2::text::text[], $3::text::text[]) AS w (schema_name, table_name) \
     CROSS JOIN LATERAL (SELECT definition FROM farshore.table_copy WHERE subscription = $1 \
       AND schema_name = w.schema_name AND table_name = w.table_name LIMIT 1) AS c \
     WHERE c.definition IS NOT NULL";

/// The answer to [`DEFINITIONS`].
pub(super) fn definitions_of(rows: &[Row]) -> HashMap<TableName, Relation> {
    let definitions = rows.iter().filter_map(|row| {
        let table = TableName { schema: row.get(0)?.to_owned(), name: row.get(1)?.to_owned() };
        Some((table, stored::decode_definition(&from_hex(row.get(2)?)?).ok()?))
    });
    definitions.collect()
}

/// Keeps the definition that a copied table follows from now on, what its columns are called on the
/// target, and which types of their own they have there.
pub async fn note_definition(
    session: &mut Session,
    subscription: &str,
    (table, on_target): (&TableName, &TableName),
    relation: &Relation,
) -> Result<(), ApplyError> {
    let hex = hex_of(relation);
    let on_target = on_target.to_string();
    let mut parameters =
        vec![Some(subscription), Some(&table.schema), Some(&table.name), Some(&hex)];
    // Also where there are none (any more): what was noted before is about other columns.
    let types = if session.keeps(TableCopyColumn::OwnTypes).await? { OWN_TYPES } else { "" };
    let columns =
        if session.keeps(TableCopyColumn::TargetColumns).await? { TARGET_COLUMNS } else { "" };
    if !(types.is_empty() && columns.is_empty()) {
        parameters.push(Some(&on_target));
    }
    let note = format!(
        "UPDATE farshore.table_copy SET definition = pg_catalog.decode($4, 'hex'){types}{columns} \
         WHERE subscription = $1 AND schema_name = $2 AND table_name = $3"
    );
    session.execute(&note, &parameters).await.map(drop)
}

/// With their numbers: a column that is made again is another.
const OWN_TYPES: &str = ", own_types = ARRAY( \
     SELECT attnum || ' ' || atttypid || ' ' || atttypmod FROM pg_catalog.pg_attribute \
     WHERE attrelid = pg_catalog.to_regclass($5) AND attnum > 0 AND NOT attisdropped \
       AND atttypid >= 10000)";

/// Which of two names a column had then.
const TARGET_COLUMNS: &str = ", target_columns = ARRAY( \
     SELECT attnum || ' ' || attname FROM pg_catalog.pg_attribute \
     WHERE attrelid = pg_catalog.to_regclass($5) AND attnum > 0 AND NOT attisdropped)";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_definition_begins_with_a_name() {
        let of = |schema: &str, name: &str| TableName {
            schema: schema.to_owned(),
            name: name.to_owned(),
        };
        assert_eq!(name_in("\\x73007400640003ff"), Some(of("s", "t")));
        assert_eq!(name_in("\\x00c3bc00"), Some(of("pg_catalog", "ü")));
        for damaged in ["\\x7374", "\\x7300ff00", "73007400"] {
            assert_eq!(name_in(damaged), None, "{damaged}");
        }
    }

    #[test]
    fn hexadecimal_digits_are_read() {
        assert_eq!(from_hex("\\x00ff5c"), Some(vec![0, 255, 92]));
        assert_eq!(from_hex("\\x"), Some(vec![]));
        for damaged in ["00", "\\x0", "\\x0g", "\\xé"] {
            assert_eq!(from_hex(damaged), None, "{damaged}");
        }
    }
}
