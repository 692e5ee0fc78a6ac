//! The target's sequences follow the publisher's, so that whoever takes over gives no value twice.
//!
//! A sequence moves outside of transactions and is not in the log. Its position is read from the
//! publisher now and then, and once more when the subscription stops; what is read then is never
//! behind the rows that are on the target already. Where the publisher does not answer, the rows
//! themselves say how far the sequence of their column must be. A sequence only ever moves forward.

use crate::ApplyError;
use crate::postgres::schema::SchemaSettings;
use crate::postgres::session::Session;
use farshore_capture::publication::TableName;
use farshore_capture::schema::SequencePosition;
use farshore_capture::source::Source;
use farshore_model::{Lsn, quote_identifier};
use farshore_pg::Config;
use farshore_store::LogStore;
use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// One subscription's sequences.
pub(crate) struct Sequences<'a> {
    /// Subscription name.
    pub subscription: &'a str,
    /// Where they are read.
    pub source: &'a dyn Source,
    /// Where they are set.
    pub target: &'a Config,
    /// Names on the target, and whether missing sequences are made.
    pub schema: &'a SchemaSettings,
    /// Tells whether anything has happened on the publisher.
    pub store: &'a Arc<dyn LogStore>,
    /// Positions that the target was seen to have.
    seen: HashMap<TableName, i64>,
    /// Where sequences of the target were set back last, as its rows were emptied.
    restarted: Arc<AtomicU64>,
    /// Up to where that is known here.
    restarts_seen: u64,
    /// Sequences that a warning was given for, and of which server.
    warned: HashSet<(TableName, Side)>,
}

/// Whose sequence it is that a warning is about.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Side {
    Publisher,
    Target,
}

/// A sequence of the target.
struct Found {
    /// As SQL.
    name: String,
    writable: bool,
    ascending: bool,
    last_value: Option<i64>,
}

impl<'a> Sequences<'a> {
    /// Nothing is known yet.
    pub fn new(
        subscription: &'a str,
        source: &'a dyn Source,
        target: &'a Config,
        schema: &'a SchemaSettings,
        store: &'a Arc<dyn LogStore>,
        restarted: Arc<AtomicU64>,
    ) -> Sequences<'a> {
        let (seen, warned) = (HashMap::new(), HashSet::new());
        let restarts_seen = 0;
        Sequences {
            subscription,
            source,
            target,
            schema,
            store,
            seen,
            restarted,
            restarts_seen,
            warned,
        }
    }

    /// What was seen before sequences were set back says nothing any more. Until that is committed
    /// on the target, neither does what is seen now.
    fn forget_if_restarted(&mut self) {
        let restarted = self.restarted.load(Ordering::Acquire);
        if restarted <= self.restarts_seen {
            return;
        }
        self.seen.clear();
        let cursors = self.store.cursors();
        let own = cursors.iter().find(|cursor| cursor.name == self.subscription);
        if own.is_some_and(|own| own.applied.0.0 >= restarted) {
            self.restarts_seen = restarted;
        }
    }

    fn awaits_restart(&self) -> bool {
        self.restarted.load(Ordering::Acquire) > self.restarts_seen
    }

    /// Follows every `interval` while anything happens on the publisher.
    pub async fn follow(&mut self, interval: Duration, tables: &[TableName]) -> Infallible {
        let mut followed_at = None;
        loop {
            let durable: Lsn = self.store.durable().borrow().0;
            if followed_at != Some(durable) || self.awaits_restart() {
                self.catch_up(tables).await;
                followed_at = Some(durable);
            }
            tokio::time::sleep(interval).await;
        }
    }

    /// Moves every sequence to where it must be now. What fails is said and tried again later: the
    /// rows do not depend on it.
    pub async fn catch_up(&mut self, tables: &[TableName]) {
        self.forget_if_restarted();
        let outcome = match self.source.sequences().await {
            Ok(positions) => self.set_all(&positions).await,
            Err(error) => {
                tracing::debug!(subscription = %self.subscription, %error, "sequences: by rows");
                self.advance_by_rows(tables).await
            }
        };
        if let Err(error) = outcome {
            tracing::warn!(
                subscription = %self.subscription,
                "sequences on the target do not follow now: {error}"
            );
        }
    }

    async fn connect(&self) -> Result<Session, ApplyError> {
        let name = format!("farshore {} sequences", self.subscription);
        Session::connect(self.target, &name).await
    }

    async fn set_all(&mut self, positions: &[SequencePosition]) -> Result<(), ApplyError> {
        let moved: Vec<&SequencePosition> = positions
            .iter()
            .filter(|p| {
                !p.readable || p.last_value.is_none_or(|v| self.seen.get(&p.name) != Some(&v))
            })
            .collect();
        if moved.is_empty() {
            return Ok(());
        }
        let mut session = self.connect().await?;
        for position in moved {
            if position.readable {
                self.set(&mut session, position).await?;
            } else {
                let name = &position.name;
                let (who, role) = match position.role.as_str() {
                    "" => ("the role".to_owned(), "the role"),
                    role => (format!("role {role}"), role),
                };
                self.warn_once(name, Side::Publisher, &format!(
                    "{who} may not read sequence {name} on the publisher, so it stays behind on \
                     the target. GRANT SELECT ON SEQUENCE {name} TO {role}"
                ));
            }
        }
        session.connection.close().await;
        Ok(())
    }

    async fn set(
        &mut self,
        session: &mut Session,
        position: &SequencePosition,
    ) -> Result<(), ApplyError> {
        // Who merely uses it may be in another schema.
        let name = self.schema.names.sequence(&position.name, position.owner.as_ref());
        let Some(found) = self.find(session, &name, position).await? else {
            if position.column.is_none() && self.schema.create_tables {
                self.create(session, &name, position).await?;
            }
            return Ok(());
        };
        let Some(value) = position.last_value else {
            // Looked at again when it is used first.
            self.seen.remove(&position.name);
            return Ok(());
        };
        let behind = found
            .last_value
            .is_none_or(|last| if found.ascending { last < value } else { last > value });
        if !behind {
            if found.last_value == Some(value) {
                self.seen.insert(position.name.clone(), value);
            }
            return Ok(());
        }
        if !found.writable {
            let (name, role) = (&found.name, quote_identifier(&self.target.user));
            self.warn_once(
                &position.name,
                Side::Target,
                &format!(
                    "role {role} may not set sequence {name} on the target, so it stays behind. \
                     GRANT SELECT, UPDATE ON SEQUENCE {name} TO {role}"
                ),
            );
            return Ok(());
        }
        let set = format!(
            "SELECT pg_catalog.setval({}::regclass, {value})",
            farshore_pg::quote_literal(&found.name)
        );
        match session.connection.simple_query(&set).await {
            Ok(_) => {
                self.seen.insert(position.name.clone(), value);
                Ok(())
            }
            // Beyond the bounds that it has here.
            Err(error) if error.sqlstate() == Some("22003") => {
                let name = &found.name;
                self.warn_once(&position.name, Side::Target, &format!(
                    "sequence {name} on the target cannot follow: {error}. Give it the bounds that \
                     it has on the publisher ({})",
                    position.options
                ));
                Ok(())
            }
            Err(error) => Err(session.error(error)),
        }
    }

    /// The target's sequence of that name, or else the one behind the same column.
    async fn find(
        &self,
        session: &mut Session,
        name: &TableName,
        position: &SequencePosition,
    ) -> Result<Option<Found>, ApplyError> {
        let column = position.column.as_ref();
        let table = column.map(|(table, _)| self.schema.names.table(table).to_string());
        let rows = session
            .query(
                "SELECT f.oid::regclass, r.readable, \
                   pg_catalog.has_sequence_privilege(f.oid, 'UPDATE'), s.seqincrement > 0, \
                   CASE WHEN r.readable THEN pg_catalog.pg_sequence_last_value(f.oid) END \
                 FROM (SELECT coalesce( \
                   (SELECT c.oid FROM pg_catalog.pg_class c \
                    WHERE c.oid = pg_catalog.to_regclass($1) AND c.relkind = 'S'), \
                   (SELECT d.objid FROM pg_catalog.pg_depend d \
                    JOIN pg_catalog.pg_attribute a \
                      ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid \
                    WHERE d.classid = 'pg_catalog.pg_class'::regclass \
                      AND d.refclassid = 'pg_catalog.pg_class'::regclass \
                      AND d.deptype IN ('a', 'i') AND a.attname = $3 \
                      AND d.refobjid = pg_catalog.to_regclass($2) LIMIT 1)) AS oid) f \
                 JOIN pg_catalog.pg_sequence s ON s.seqrelid = f.oid \
                 CROSS JOIN LATERAL (SELECT \
                   pg_catalog.has_sequence_privilege(f.oid, 'USAGE, SELECT') AS readable) r",
                &[Some(&name.to_string()), table.as_deref(), column.map(|(_, c)| c.as_str())],
            )
            .await?;
        let Some(row) = rows.first() else { return Ok(None) };
        Ok(Some(Found {
            name: row.get(0).unwrap_or_default().to_owned(),
            // To move it forward only, it must be read.
            writable: row.get(1) == Some("t") && row.get(2) == Some("t"),
            ascending: row.get(3) == Some("t"),
            last_value: match row.get(4) {
                Some(_) => Some(row.parse(4).map_err(|error| session.error(error))?),
                None => None,
            },
        }))
    }

    /// A sequence that no published column uses.
    async fn create(
        &mut self,
        session: &mut Session,
        name: &TableName,
        position: &SequencePosition,
    ) -> Result<(), ApplyError> {
        let schema = quote_identifier(&name.schema);
        let set = position.last_value.map_or_else(String::new, |value| {
            let quoted = farshore_pg::quote_literal(&name.to_string());
            format!("; SELECT pg_catalog.setval({quoted}::regclass, {value})")
        });
        let there = session
            .query("SELECT pg_catalog.to_regnamespace($1) IS NOT NULL", &[Some(&schema)])
            .await?;
        let schema = match there.first().and_then(|row| row.get(0)) {
            Some("t") => String::new(),
            _ => format!("CREATE SCHEMA {schema}; "),
        };
        let create =
            format!("BEGIN; {schema}CREATE SEQUENCE {name} {}{set}; COMMIT", position.options);
        match session.connection.simple_query(&create).await {
            Ok(_) => {
                tracing::info!(subscription = %self.subscription, "created sequence {name}");
                Ok(())
            }
            Err(error) if matches!(error.sqlstate(), Some("42501" | "42P07")) => {
                session.simple("ROLLBACK").await?;
                self.warn_once(&position.name, Side::Target, &format!(
                    "sequence {name} cannot be created on the target: {error}. Create it there, or \
                     grant the role CREATE on its schema"
                ));
                Ok(())
            }
            Err(error) => Err(session.error(error)),
        }
    }

    fn warn_once(&mut self, sequence: &TableName, side: Side, what: &str) {
        if self.warned.insert((sequence.clone(), side)) {
            tracing::warn!(subscription = %self.subscription, "{what}");
        }
    }

    /// Moves the sequences behind the columns of `tables` (by the publisher's names) beyond the
    /// values in their rows, where an index finds the largest at once.
    async fn advance_by_rows(&mut self, tables: &[TableName]) -> Result<(), ApplyError> {
        let mut session = self.connect().await?;
        for table in tables {
            let table = self.schema.names.table(table);
            for (sequence, column, ascending) in columns_of(&mut session, &table).await? {
                let (largest, beyond) = if ascending { ("max", ">") } else { ("min", "<") };
                let column = quote_identifier(&column);
                let quoted = farshore_pg::quote_literal(&sequence);
                session
                    .simple(&format!(
                        "SELECT pg_catalog.setval({quoted}::regclass, rows.value) FROM \
                           (SELECT pg_catalog.{largest}({column}) AS value FROM {table}) rows, \
                           {sequence} s \
                         WHERE rows.value {beyond} s.last_value \
                           OR (rows.value = s.last_value AND NOT s.is_called)"
                    ))
                    .await?;
            }
        }
        session.connection.close().await;
        Ok(())
    }
}

/// Sequences that feed indexed columns of a table and that the role may read and set: the sequence
/// as SQL, the column, and whether it ascends.
async fn columns_of(
    session: &mut Session,
    table: &TableName,
) -> Result<Vec<(String, String, bool)>, ApplyError> {
    let rows = session
        .query(
            "SELECT s.seqrelid::regclass, a.attname, s.seqincrement > 0 \
             FROM pg_catalog.pg_depend d JOIN pg_catalog.pg_sequence s ON s.seqrelid = d.objid \
             JOIN pg_catalog.pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid \
             WHERE d.classid = 'pg_catalog.pg_class'::regclass \
               AND d.refclassid = 'pg_catalog.pg_class'::regclass AND d.deptype IN ('a', 'i') \
               AND d.refobjid = pg_catalog.to_regclass($1) \
               AND a.atttypid IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype) \
               AND EXISTS (SELECT 1 FROM pg_catalog.pg_index i WHERE i.indrelid = a.attrelid \
                 AND i.indkey[0] = a.attnum AND i.indisvalid AND i.indpred IS NULL) \
               AND pg_catalog.has_sequence_privilege(s.seqrelid, 'SELECT') \
               AND pg_catalog.has_sequence_privilege(s.seqrelid, 'UPDATE')",
            &[Some(&table.to_string())],
        )
        .await?;
    let text =
        |row: &farshore_pg::Row, column: usize| row.get(column).unwrap_or_default().to_owned();
    Ok(rows.iter().map(|row| (text(row, 0), text(row, 1), row.get(2) == Some("t"))).collect())
}
