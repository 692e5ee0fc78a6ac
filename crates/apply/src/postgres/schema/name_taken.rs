//! Names of indexes and sequences that a table is to be made with, and that another table on the
//! target has: most often the same table under the name that it had before the publisher renamed it.
//! What belongs to a table keeps its name then, on both sides.

use super::outline::Step;
use crate::ApplyError;
use crate::postgres::session::Session;
use farshore_model::quote_identifier;

/// Where a statement makes what is there (duplicate_table, also of indexes and sequences).
pub(super) const TAKEN: &str = "42P07";

/// Indexes and sequences of the table on the target that has one of this name ($1) in this schema
/// ($2): the table, the kind, the name with its schema, and the name alone.
const OF_ITS_TABLE: &str = "WITH belongs (oid, to_table) AS ( \
       SELECT indexrelid, indrelid FROM pg_catalog.pg_index \
       UNION SELECT objid, refobjid FROM pg_catalog.pg_depend \
       WHERE classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND refclassid = classid \
         AND deptype IN ('a', 'i') AND refobjsubid > 0) \
     SELECT other.to_table::pg_catalog.regclass, c.relkind, c.oid::pg_catalog.regclass, c.relname \
     FROM pg_catalog.pg_class taken JOIN belongs one ON one.oid = taken.oid \
     JOIN belongs other ON other.to_table = one.to_table \
     JOIN pg_catalog.pg_class c ON c.oid = other.oid AND c.relkind IN ('i', 'I', 'S') \
     WHERE taken.relname = $1 AND taken.relnamespace = pg_catalog.to_regnamespace($2) \
     ORDER BY c.relkind DESC, c.relname";

/// What to do about it; `None` where it is not known whose name it is. Ends the open transaction.
pub(super) async fn remedy(
    session: &mut Session,
    step: &Step,
    error: &farshore_pg::Error,
) -> Result<Option<String>, ApplyError> {
    let (Some(table), Some(said)) = (&step.table, error.server_error()) else { return Ok(None) };
    // PostgreSQL names it as it was asked for, in quotes.
    let quoted = said.message.split_once('"').and_then(|(_, rest)| Some(rest.rsplit_once('"')?.0));
    let Some(name) = quoted else { return Ok(None) };
    session.simple("ROLLBACK").await?;
    let schema = quote_identifier(&table.schema);
    let rows = session.query(OF_ITS_TABLE, &[Some(name), Some(&schema)]).await?;
    let Some(other) = rows.first().and_then(|row| row.get(0)) else { return Ok(None) };
    let after = || step.after.iter().map(|after| &after.sql);
    let wants = |name: &str| step.sql.iter().chain(after()).any(|sql| sql.contains(name));
    let renames: Vec<String> = rows
        .iter()
        .filter_map(|row| Some((row.get(1)?, row.get(2)?, row.get(3)?)))
        .filter(|(_, _, name)| wants(&quote_identifier(name)))
        .map(|(kind, full, name)| {
            let kind = if kind == "S" { "SEQUENCE" } else { "INDEX" };
            let before = quote_identifier(&format!("old_{name}"));
            format!("ALTER {kind} {full} RENAME TO {before}")
        })
        .collect();
    Ok(Some(format!(
        "There it belongs to table {other}. If the publisher renamed {other} to {table}, the one on \
         the target is not followed any more, and {table} is made and copied once it does not have \
         these names. On the target: DROP TABLE {other}; or, to keep it: {}. Do that",
        renames.join("; ")
    )))
}
