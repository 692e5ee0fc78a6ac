//! Checks that the open target transaction has put off until its COMMIT: those of deferrable foreign
//! keys, and of constraints that are deferred from the start (PostgreSQL docs: "SET CONSTRAINTS").

use crate::ApplyError;
use crate::postgres::in_use::{BOUNDED, UNBOUNDED};
use crate::postgres::session::Session;
use farshore_capture::publication::TableName;
use farshore_pg::{Row, ServerError};

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

const SAVEPOINT: &str = "farshore_alter";

/// Alters a table, if nobody uses it (see [`in_use`](crate::postgres::in_use)), and where PostgreSQL
/// will not because it has still to check rows of it ("pending trigger events"), makes those checks
/// first. Where keys hold only at the end of the transaction that fails, although its COMMIT would not
/// have: it is applied again carefully, where tables are altered before the changes.
pub(super) async fn alter(
    session: &mut Session,
    subscription: &str,
    table: &TableName,
    alter: &str,
) -> Result<(), ApplyError> {
    let release = format!("RELEASE SAVEPOINT {SAVEPOINT}");
    let first = format!("SAVEPOINT {SAVEPOINT}; {BOUNDED}; {alter}; {release}; {UNBOUNDED}");
    let (error, put_off) = match session.connection.simple_query(&first).await {
        Ok(_) => return Ok(()),
        Err(error) if error.sqlstate() == Some("55006") => {
            session.simple(&format!("ROLLBACK TO SAVEPOINT {SAVEPOINT}")).await?;
            let put_off = check_now(session, table).await?;
            let again = format!("{BOUNDED}; {alter}; {UNBOUNDED}");
            (session.connection.simple_query(&again).await.err(), put_off)
        }
        Err(error) => (Some(error), None),
    };
    match (error, put_off) {
        (Some(error), _) => {
            Err(session.in_use_or(error, subscription, alter, std::slice::from_ref(table)).await)
        }
        (None, Some(put_off)) => session.simple(&put_off).await,
        (None, None) => Ok(()),
    }
}

/// Whether a constraint of rows did not hold (integrity constraint violations): not what altering a
/// table by itself is refused with, but for checks of the column that is added.
pub(super) fn is_of_a_check(error: &ServerError) -> bool {
    matches!(error.code.as_str(), "23503" | "23505" | "23P01")
}

/// Makes the checks that wait for rows of a table or of those below it; returns what puts them off
/// again.
async fn check_now(session: &mut Session, table: &TableName) -> Result<Option<String>, ApplyError> {
    let found = session.query(OF_TABLE, &[Some(&table.to_string())]).await?;
    let is = |row: &Row, column| row.get(column) == Some("t");
    let listed = |rows: Vec<&Row>| {
        let names: Vec<&str> = rows.into_iter().filter_map(|row| row.get(0)).collect();
        (!names.is_empty()).then(|| names.join(", "))
    };
    let Some(all) = listed(found.iter().collect()) else { return Ok(None) };
    session.simple(&format!("SET CONSTRAINTS {all} IMMEDIATE")).await?;
    let again = match found.iter().any(|row| is(row, 2)) {
        true => Some("ALL".to_owned()),
        false => listed(found.iter().filter(|row| is(row, 1)).collect()),
    };
    Ok(again.map(|names| format!("SET CONSTRAINTS {names} DEFERRED")))
}
