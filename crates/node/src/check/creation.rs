//! Tables that the target lacks and that are to be created there, and the names they will have.

use super::server::Server;
use super::{Findings, some_of};
use farshore_apply::postgres::session::Session;
use farshore_apply::{ApplyError, ConflictPolicy};
use farshore_capture::publication::TableName;
use farshore_capture::schema::NameMap;
use farshore_model::quote_identifier;
use std::collections::BTreeMap;

/// Whether the role may create `missing` tables (by their names on the target).
pub async fn check(
    missing: &[&TableName],
    server: &Server,
    session: &mut Session,
    findings: &mut Findings,
) -> Result<(), ApplyError> {
    if missing.is_empty() {
        return Ok(());
    }
    let rows = session
        .query(
            "SELECT nspname, has_schema_privilege(oid, 'CREATE') \
               AND has_schema_privilege(oid, 'USAGE') FROM pg_namespace",
            &[],
        )
        .await?;
    let schemas: BTreeMap<&str, bool> =
        rows.iter().filter_map(|row| Some((row.get(0)?, row.get(1) == Some("t")))).collect();
    let role = server.role_sql();
    let mut by_schema: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for table in missing {
        by_schema.entry(&table.schema).or_default().push(table.to_string());
    }
    for (schema, tables) in by_schema {
        let quoted = quote_identifier(schema);
        let grant = match schemas.get(schema) {
            Some(true) => None,
            None if server.may_create => None,
            Some(false) => Some(format!("GRANT USAGE, CREATE ON SCHEMA {quoted} TO {role}")),
            None => Some(format!("GRANT CREATE ON DATABASE {} TO {role}", server.database_sql())),
        };
        match grant {
            None => findings.note(format!(
                "not on the target, and will be created there (`farshore schema` shows the SQL): {}",
                some_of(&tables)
            )),
            Some(grant) => findings.error(
                format!(
                    "not on the target, and role {role} may not create them in schema {quoted}: {}",
                    some_of(&tables)
                ),
                format!("{grant}; or create them, and set create_tables = false"),
            ),
        }
    }
    Ok(())
}

/// A table with a policy of its own that is not published.
pub fn check_policies<'a>(
    policy: &ConflictPolicy,
    published: impl Iterator<Item = &'a TableName>,
    findings: &mut Findings,
) {
    let published: Vec<&TableName> = published.collect();
    for table in policy.tables.keys().filter(|table| !published.contains(table)) {
        findings.warning(
            format!("the site file says what conflicts do in {table}, and it is not published"),
            "Correct [subscription.NAME.on_conflict_tables] in the site file (names are as the \
             publisher has them, in upper or lower case), or publish it",
        );
    }
}

/// A mapped name that nothing has.
pub fn check_names<'a>(
    names: &NameMap,
    published: impl Iterator<Item = &'a TableName>,
    findings: &mut Findings,
) {
    let published: Vec<&TableName> = published.collect();
    for table in names.tables.keys().filter(|table| !published.contains(table)) {
        findings.warning(
            format!("the site file gives {table} another name, and it is not published"),
            "Correct [subscription.NAME.tables] in the site file, or publish it",
        );
    }
    let schemas = names.schemas.keys();
    for schema in schemas.filter(|schema| !published.iter().any(|t| t.schema == **schema)) {
        findings.warning(
            format!(
                "the site file gives schema {} another name, and no table of it is published",
                quote_identifier(schema)
            ),
            "Correct [subscription.NAME.schemas] in the site file",
        );
    }
}
