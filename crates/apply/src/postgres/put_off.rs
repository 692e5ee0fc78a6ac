//! Checks that the open target transaction has put off until its COMMIT: those of deferrable foreign
//! keys, and of constraints that are deferred from the start (PostgreSQL docs: "SET CONSTRAINTS").

use crate::ApplyError;
use crate::postgres::session::Session;
use farshore_capture::publication::TableName;
use farshore_pg::Row;

/// Constraints whose checks of a table, or of any below it, may be waiting; whether each is deferred
/// from the start; whether keys fire, so that all are deferred ("SET CONSTRAINTS" is by names, which
/// several tables may have).
const OF_TABLE: &str = "WITH RECURSIVE below (oid) AS (\
       SELECT pg_catalog.to_regclass($1)::oid UNION \
       SELECT i.inhrelid FROM below b JOIN pg_catalog.pg_inherits i ON i.inhparent = b.oid) \
     SELECT DISTINCT pg_catalog.format('%I.%I', n.nspname, c.conname), c.condeferred, \
       pg_catalog.current_setting('session_replication_role') <> 'replica' \
     FROM pg_catalog.pg_constraint c JOIN pg_catalog.pg_namespace n ON n.oid = c.connamespace \
     WHERE c.condeferrable AND (c.conrelid IN (SELECT oid FROM below) \
       OR c.confrelid IN (SELECT oid FROM below))";

/// What puts checks off again that were made early.
#[must_use]
pub(super) struct PutOff(Option<String>);

/// Makes the checks that wait for rows of a table or of those below it: PostgreSQL alters no table
/// with such ("pending trigger events"). The publisher has altered it where they had been made, so
/// what fails now fails at the COMMIT too, and is said as that is.
pub(super) async fn check_now(
    session: &mut Session,
    table: &TableName,
) -> Result<PutOff, ApplyError> {
    let found = session.query(OF_TABLE, &[Some(&table.to_string())]).await?;
    let is = |row: &Row, column| row.get(column) == Some("t");
    let listed = |rows: Vec<&Row>| {
        let names: Vec<&str> = rows.into_iter().filter_map(|row| row.get(0)).collect();
        (!names.is_empty()).then(|| names.join(", "))
    };
    let Some(all) = listed(found.iter().collect()) else { return Ok(PutOff(None)) };
    session.simple(&format!("SET CONSTRAINTS {all} IMMEDIATE")).await?;
    let again = match found.iter().any(|row| is(row, 2)) {
        true => Some("ALL".to_owned()),
        false => listed(found.iter().filter(|row| is(row, 1)).collect()),
    };
    Ok(PutOff(again.map(|names| format!("SET CONSTRAINTS {names} DEFERRED"))))
}

impl PutOff {
    pub(super) async fn again(self, session: &mut Session) -> Result<(), ApplyError> {
        match self.0 {
            Some(sql) => session.simple(&sql).await,
            None => Ok(()),
        }
    }
}
