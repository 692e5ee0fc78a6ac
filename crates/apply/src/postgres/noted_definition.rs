//! Definitions of tables as they are noted on the target.

use crate::postgres::follow_ddl::definition_of;
use farshore_capture::publication::PublishedTable;
use farshore_model::Relation;
use farshore_wire::pgoutput::stored;

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
