//! Tables that the target lacks and that are to be created there, and the names they will have.

use super::server::Server;
use super::{Findings, some_of};
use farshore_apply::ApplyError;
use farshore_apply::postgres::session::Session;
use farshore_capture::publication::TableName;
use farshore_capture::schema::NameMap;
use farshore_model::quote_identifier;
use std::collections::{BTreeMap, BTreeSet};

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
        .query("SELECT nspname, has_schema_privilege(oid, 'CREATE') FROM pg_namespace", &[])
        .await?;
    let schemas: BTreeMap<&str, bool> =
        rows.iter().filter_map(|row| Some((row.get(0)?, row.get(1) == Some("t")))).collect();
    let (role, database) = (server.role_sql(), server.database_sql());
    let wanted: BTreeSet<&str> = missing.iter().map(|table| table.schema.as_str()).collect();
    let mut may = true;
    for schema in wanted {
        let quoted = quote_identifier(schema);
        let (what, grant) = match schemas.get(schema) {
            Some(true) => continue,
            None if server.may_create => continue,
            Some(false) => (
                format!("tables in schema {quoted} of the target"),
                format!("GRANT CREATE ON SCHEMA {quoted} TO {role}"),
            ),
            None => (
                format!("schema {quoted} on the target"),
                format!("GRANT CREATE ON DATABASE {database} TO {role}"),
            ),
        };
        may = false;
        findings.error(
            format!("role {role} may not create {what}, and the target lacks tables there"),
            format!("{grant}; or create them by hand (`farshore schema` prints the SQL)"),
        );
    }
    if may {
        let names: Vec<String> = missing.iter().map(ToString::to_string).collect();
        findings.note(format!(
            "these are not on the target and will be created there (`farshore schema` prints the \
             SQL): {}",
            some_of(&names)
        ));
    }
    Ok(())
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
