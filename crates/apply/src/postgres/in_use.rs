//! Tables of the target that are needed for themselves, while others use them.
//!
//! Whoever reads a table for long keeps its lock from us for as long, and whoever comes to the table
//! after us waits with us. So such a lock is waited for a moment. Then the transaction is rolled back,
//! everybody else goes on, and it is tried again later.

use crate::ApplyError;
use crate::postgres::session::{Session, application_name};
use crate::postgres::target_table::names;
use farshore_capture::publication::TableName;
use farshore_pg::ServerError;

/// Put before what needs tables for itself, within its transaction. Most who read are done by then:
/// where queries overlap each other all day, a short wait would never be long enough.
pub(super) const BOUNDED: &str = "SET LOCAL lock_timeout = '10s'";

/// Put behind it, where the transaction goes on: rows that others have changed are waited for.
pub(super) const UNBOUNDED: &str = "SET LOCAL lock_timeout = 0";

/// Who has had these tables (`$1`), or what is below them, for as long as they were waited for, but
/// for connections of our own (`$2`): who has come since waited behind us. Of prepared transactions
/// no session has the locks (PostgreSQL docs: 54.12. `pg_locks`).
const USERS: &str = "WITH RECURSIVE wanted (oid) AS ( \
       SELECT pg_catalog.to_regclass(own.name)::oid FROM unnest($1::text::text[]) AS own (name) \
       UNION SELECT i.inhrelid FROM wanted w JOIN pg_catalog.pg_inherits i ON i.inhparent = w.oid), \
     held AS (SELECT DISTINCT l.pid, l.virtualtransaction FROM pg_catalog.pg_locks l \
       JOIN wanted w ON w.oid = l.relation WHERE l.locktype = 'relation' AND l.granted \
         AND l.database = (SELECT oid FROM pg_catalog.pg_database \
           WHERE datname = pg_catalog.current_database())) \
     SELECT pg_catalog.string_agg(said, ', ' ORDER BY said) FROM ( \
       SELECT pg_catalog.concat('process ', b.pid, ' of ', b.usename, ' (', \
         coalesce(nullif(b.application_name, ''), b.backend_type, 'not shown to this role'), \
         ', ' || b.state, ', in a transaction since ' \
           || pg_catalog.date_trunc('second', b.xact_start), ')') AS said \
       FROM held JOIN pg_catalog.pg_stat_activity b ON b.pid = held.pid \
       WHERE b.application_name <> pg_catalog.left($2, 63) \
         AND NOT pg_catalog.starts_with(b.application_name, $2 || ' ') \
         AND coalesce(b.xact_start <= pg_catalog.clock_timestamp() - interval '10 seconds', true) \
       UNION ALL SELECT pg_catalog.format('a prepared transaction, %L of %s since %s (COMMIT \
         PREPARED or ROLLBACK PREPARED ends it)', x.gid, x.owner, \
         pg_catalog.date_trunc('second', x.prepared)) \
       FROM held JOIN pg_catalog.pg_locks own ON own.virtualtransaction = held.virtualtransaction \
         AND own.granted AND own.pid IS NULL \
       JOIN pg_catalog.pg_prepared_xacts x ON x.transaction = own.transactionid \
       WHERE held.pid IS NULL) AS users";

/// Whether the target gave up to wait for a lock (lock_not_available).
pub(crate) fn is_of_a_lock(error: &ServerError) -> bool {
    error.code == "55P03"
}

impl Session {
    /// What a failure in an open transaction means that waited for tables, no longer than
    /// [`BOUNDED`], to do `what` there: where it waited in vain, the transaction is rolled back, and
    /// the error says who uses them.
    pub(super) async fn in_use_or(
        &mut self,
        error: farshore_pg::Error,
        subscription: &str,
        what: &str,
        tables: &[TableName],
    ) -> ApplyError {
        if !error.server_error().is_some_and(is_of_a_lock) {
            return self.error(error);
        }
        match self.simple("ROLLBACK").await {
            Ok(()) => self.in_use(subscription, what, tables).await,
            Err(error) => error,
        }
    }

    /// That others use these tables, and who: they were waited for a moment, to do `what` there. No
    /// transaction is open.
    pub(crate) async fn in_use(
        &mut self,
        subscription: &str,
        what: &str,
        tables: &[TableName],
    ) -> ApplyError {
        let own = application_name(subscription);
        let asked = self.query(USERS, &[Some(&names(tables)), Some(&own)]).await;
        let rows = match asked {
            Ok(rows) => rows,
            Err(error) => return error,
        };
        let users = rows.first().and_then(|row| row.get(0));
        let users = users.map_or("somebody who has gone since".to_owned(), str::to_owned);
        let list: Vec<String> = tables.iter().map(TableName::to_string).collect();
        ApplyError::InUse(format!(
            "subscription \"{subscription}\": {what} on the target has to wait until nobody else uses \
             {}. Used by {users}. It gives way after 10 s, so that others can go on, and is tried again",
            list.join(", ")
        ))
    }
}
