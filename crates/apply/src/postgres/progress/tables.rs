//! Makes the tables of the `farshore` schema, and adds what earlier versions did not make.

use crate::ApplyError;
use crate::postgres::session::Session;
use farshore_capture::publication::TableName;
use farshore_pg::{Question, Row, quote_literal, text_array};
use std::fmt::Write as _;

/// Held while the schema is made, until the transaction ends, so that two subscriptions do not make
/// it at once.
pub(in crate::postgres) const SCHEMA_LOCK: &str =
    "SELECT pg_advisory_xact_lock(hashtextextended('farshore schema', 0))";

/// A role that may not make it can be given one that somebody else made.
const MAKE_SCHEMA: &str = "
CREATE SCHEMA farshore;
COMMENT ON SCHEMA farshore IS 'Progress of Farshore subscriptions into this database';
";

const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS farshore.subscription (
  name text PRIMARY KEY,
  publication text NOT NULL,
  publisher text NOT NULL,
  state text NOT NULL,
  applied pg_lsn NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 10);
COMMENT ON COLUMN farshore.subscription.publisher IS 'System identifier of the publisher';
COMMENT ON COLUMN farshore.subscription.applied IS
  'End of the newest applied commit record on the publisher; written with the rows it stands for';
CREATE TABLE IF NOT EXISTS farshore.table_copy (
  subscription text NOT NULL REFERENCES farshore.subscription ON DELETE CASCADE,
  schema_name text NOT NULL,
  table_name text NOT NULL,
  state text NOT NULL,
  copied_at pg_lsn NOT NULL,
  file_node bigint NOT NULL,
  membership bigint NOT NULL,
  PRIMARY KEY (subscription, schema_name, table_name)
);
COMMENT ON COLUMN farshore.table_copy.copied_at IS
  'Consistent point of the copy: transactions that committed before it are in the copied rows';
CREATE TABLE IF NOT EXISTS farshore.range_copy (
  subscription text NOT NULL REFERENCES farshore.subscription ON DELETE CASCADE,
  schema_name text NOT NULL,
  table_name text NOT NULL,
  start_block bigint NOT NULL,
  end_block bigint,
  row_count bigint NOT NULL,
  PRIMARY KEY (subscription, schema_name, table_name, start_block)
);
CREATE TABLE IF NOT EXISTS farshore.skip_request (
  subscription text NOT NULL REFERENCES farshore.subscription ON DELETE CASCADE,
  lsn pg_lsn NOT NULL,
  requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  PRIMARY KEY (subscription, lsn)
);
CREATE TABLE IF NOT EXISTS farshore.conflicts (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  recorded_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  subscription text NOT NULL,
  schema_name text,
  table_name text,
  operation text NOT NULL,
  key jsonb,
  action text NOT NULL,
  sqlstate text,
  reason text NOT NULL,
  source_xid bigint NOT NULL,
  source_lsn pg_lsn NOT NULL,
  commit_time timestamptz NOT NULL,
  old_row jsonb,
  new_row jsonb,
  existing_row jsonb
);
COMMENT ON TABLE farshore.conflicts IS
  'Changes that were left out (skipped) or that overwrote rows; may be deleted by hand at any time';
COMMENT ON COLUMN farshore.conflicts.source_lsn IS
  'End of the commit record of the change''s transaction on the publisher';
COMMENT ON COLUMN farshore.conflicts.existing_row IS
  'The target''s row (an array if there are several) that the conflict was with';
CREATE TABLE IF NOT EXISTS farshore.after_copy (
  subscription text NOT NULL,
  ordinal bigint GENERATED ALWAYS AS IDENTITY,
  schema_name text NOT NULL,
  table_name text NOT NULL,
  stage smallint NOT NULL,
  object text NOT NULL,
  statement text NOT NULL,
  refusal text,
  PRIMARY KEY (subscription, ordinal)
);
COMMENT ON TABLE farshore.after_copy IS
  'What is still to be created for tables that Farshore created, once their rows are there';
COMMENT ON COLUMN farshore.after_copy.refusal IS
  'Why the target refused the statement; it is not tried again';
";

/// A column that an earlier version did not make.
struct Added {
    table: &'static str,
    column: &'static str,
    kind: &'static str,
    comment: &'static str,
}

/// Each is added only where it is lacking: the command takes the whole table for itself even where
/// there is nothing to add.
const ADDED: [Added; 10] = [
    Added {
        table: "subscription",
        column: "newest",
        kind: "text",
        comment: "Newest applied transaction: end of its commit record on the publisher, and its \
                  commit time in microseconds since 2000-01-01",
    },
    Added {
        table: "table_copy",
        column: "definition",
        kind: "bytea",
        comment: "The publisher's columns that the target's table follows; see \
                  docs/formats/transaction.md",
    },
    Added {
        table: "table_copy",
        column: "target_oid",
        kind: "oid",
        comment: "OID of the table here that the rows were copied to; NULL until it is noted",
    },
    Added {
        table: "table_copy",
        column: "noted_in",
        kind: "oid",
        comment: "OID of farshore.table_copy when target_oid was noted: another after a restore \
                  from a dump",
    },
    Added {
        table: "table_copy",
        column: "columns_left",
        kind: "text[]",
        comment: "Columns that the publisher's table has lost and the target's has kept: number \
                  and name",
    },
    Added {
        table: "table_copy",
        column: "own_types",
        kind: "text[]",
        comment: "Columns that had types of their own on the target when the definition was noted: \
                  number, type and modifier",
    },
    Added {
        table: "table_copy",
        column: "attached",
        kind: "bigint",
        comment: "Stands for how the publisher's table is attached below the one that publishes \
                  it; NULL where it is published by itself, and until it is noted",
    },
    Added {
        table: "table_copy",
        column: "column_numbers",
        kind: "jsonb",
        comment: "attnum, type and modifier of the publisher's columns, by name, when they were \
                  copied or first seen",
    },
    Added {
        table: "table_copy",
        column: "enum_labels",
        kind: "jsonb",
        comment: "Labels of the publisher's enums that its columns have, by OID, when they were \
                  copied or last seen",
    },
    Added {
        table: "table_copy",
        column: "target_columns",
        kind: "text[]",
        comment: "Columns of the target's table when the definition was noted: number and name",
    },
];

/// A column of `farshore.table_copy` that subscriptions can do without: a role that does not own the
/// table cannot give it one that an earlier version did not make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum TableCopyColumn {
    /// The newest of what tells which table of the target was copied to.
    NotedIn,
    OwnTypes,
    Attached,
    ColumnNumbers,
    EnumLabels,
    TargetColumns,
}

impl TableCopyColumn {
    pub(super) const ALL: [TableCopyColumn; 6] = [
        TableCopyColumn::NotedIn,
        TableCopyColumn::OwnTypes,
        TableCopyColumn::Attached,
        TableCopyColumn::ColumnNumbers,
        TableCopyColumn::EnumLabels,
        TableCopyColumn::TargetColumns,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            TableCopyColumn::NotedIn => "noted_in",
            TableCopyColumn::OwnTypes => "own_types",
            TableCopyColumn::Attached => "attached",
            TableCopyColumn::ColumnNumbers => "column_numbers",
            TableCopyColumn::EnumLabels => "enum_labels",
            TableCopyColumn::TargetColumns => "target_columns",
        }
    }
}

/// Columns that are there, of [`ADDED`] and others.
const COLUMNS: &str = "SELECT c.relname, a.attname FROM pg_catalog.pg_attribute a \
    JOIN pg_catalog.pg_class c ON c.oid = a.attrelid \
    WHERE c.relnamespace = pg_catalog.to_regnamespace('farshore') AND c.relkind = 'r' \
      AND a.attnum > 0";

/// So long subscriptions wait behind a column that is to be added, while somebody uses the table:
/// they can do without it.
const ADD_WITHIN: &str = "SET LOCAL lock_timeout = '2s'";

/// Whether the newest part of the schema is there, and what is asked for only now and then.
pub(super) const LATEST: &str = "SELECT to_regclass('farshore.after_copy') IS NOT NULL AND \
    to_regclass('farshore.skip_request') IS NOT NULL AND \
    to_regclass('farshore.conflicts') IS NOT NULL AND \
    EXISTS (SELECT 1 FROM pg_catalog.pg_attribute WHERE attname = 'newest' \
    AND attrelid = to_regclass('farshore.subscription')) AND \
    EXISTS (SELECT 1 FROM pg_catalog.pg_attribute WHERE attname = 'target_columns' \
    AND attrelid = to_regclass('farshore.table_copy'))";

/// Whether the parts are there that subscriptions do not do without.
const USABLE: &str = "SELECT to_regclass('farshore.after_copy') IS NOT NULL AND \
    to_regclass('farshore.skip_request') IS NOT NULL AND \
    to_regclass('farshore.conflicts') IS NOT NULL AND \
    EXISTS (SELECT 1 FROM pg_catalog.pg_attribute WHERE attname = 'definition' \
    AND attrelid = to_regclass('farshore.table_copy'))";

impl Session {
    /// Whether `farshore.table_copy` has this column.
    pub(crate) async fn keeps(&mut self, column: TableCopyColumn) -> Result<bool, ApplyError> {
        if let Some(keeps) = self.keeps.get(&column) {
            return Ok(*keeps);
        }
        let keeps = "SELECT FROM pg_catalog.pg_attribute WHERE attname = $1 \
             AND attrelid = pg_catalog.to_regclass('farshore.table_copy')";
        let keeps = !self.query(keeps, &[Some(column.name())]).await?.is_empty();
        self.keeps.insert(column, keeps);
        Ok(keeps)
    }

    /// Writes one of these columns, of type `jsonb`, of copied tables; false where it is not kept.
    pub(crate) async fn note_of_tables(
        &mut self,
        subscription: &str,
        column: TableCopyColumn,
        noted: &[(TableName, String)],
    ) -> Result<bool, ApplyError> {
        if !self.keeps(column).await? {
            return Ok(false);
        }
        let schemas = text_array(noted.iter().map(|(table, _)| table.schema.as_str()));
        let names = text_array(noted.iter().map(|(table, _)| table.name.as_str()));
        let json = text_array(noted.iter().map(|(_, json)| json.as_str()));
        let note = format!(
            "UPDATE farshore.table_copy t SET {} = now.noted::jsonb \
             FROM unnest($2::text::text[], $3::text::text[], $4::text::text[]) \
               AS now (schema_name, table_name, noted) \
             WHERE t.subscription = $1 \
               AND (t.schema_name, t.table_name) = (now.schema_name, now.table_name)",
            column.name()
        );
        self.execute(&note, &[Some(subscription), Some(&schemas), Some(&names), Some(&json)])
            .await?;
        Ok(true)
    }

    /// Makes the `farshore` schema where it is missing, and adds what an earlier version did not make.
    pub async fn ensure_schema(&mut self) -> Result<(), ApplyError> {
        let [latest, usable] =
            self.ask([Question::Simple(LATEST), Question::Simple(USABLE)]).await?;
        if is_true(&latest?) {
            return Ok(());
        }
        if !is_true(&usable?) {
            return self.make_schema().await;
        }
        let error = match self.extend_schema().await {
            Ok(()) => return Ok(()),
            Err(ApplyError::Target { error, server }) => match error.sqlstate() {
                Some("42501" | "55P03") => error,
                Some(_) | None => return Err(ApplyError::Target { error, server }),
            },
            Err(error) => return Err(error),
        };
        self.simple("ROLLBACK").await?;
        let server = self.connection.server();
        if error.sqlstate() == Some("42501") {
            tracing::warn!(
                "the farshore schema on {server} lacks what was added to it since, and this role may \
                 not add it: start the subscription whose role owns it"
            );
        } else {
            tracing::warn!(
                "the farshore schema on {server} lacks what was added to it since, and somebody uses \
                 its tables there (a dump?): it is added when a subscription starts again"
            );
        }
        Ok(())
    }

    async fn make_schema(&mut self) -> Result<(), ApplyError> {
        self.simple(&format!("BEGIN; {SCHEMA_LOCK}")).await?;
        let there = self.query("SELECT to_regnamespace('farshore') IS NOT NULL", &[]).await?;
        let make = if is_true(&there) { "" } else { MAKE_SCHEMA };
        self.simple(&format!("{make} {SCHEMA}")).await?;
        self.add_columns().await
    }

    /// Adds to one that can do without. Whoever uses its tables is not waited for long: behind us
    /// everybody else's progress would wait as well.
    async fn extend_schema(&mut self) -> Result<(), ApplyError> {
        // While another subscription waits to add it, too, that lock is not to be had either.
        self.simple(&format!("BEGIN; {ADD_WITHIN}; {SCHEMA_LOCK}")).await?;
        self.add_columns().await
    }

    /// Under [`SCHEMA_LOCK`]: who held it before may have added them.
    async fn add_columns(&mut self) -> Result<(), ApplyError> {
        let there = self.query(COLUMNS, &[]).await?;
        self.simple(&format!("{} COMMIT", added_sql(&there))).await
    }
}

/// Adds what is not among these columns, each with its table before it.
fn added_sql(there: &[Row]) -> String {
    let is_there = |added: &&Added| {
        there.iter().any(|row| (row.get(0), row.get(1)) == (Some(added.table), Some(added.column)))
    };
    let mut sql = String::new();
    for Added { table, column, kind, comment } in ADDED.iter().filter(|added| !is_there(added)) {
        let _ = write!(
            sql,
            "ALTER TABLE farshore.{table} ADD COLUMN {column} {kind}; \
             COMMENT ON COLUMN farshore.{table}.{column} IS {}; ",
            quote_literal(comment)
        );
    }
    sql
}

pub(super) fn is_true(rows: &[Row]) -> bool {
    rows.first().and_then(|row| row.get(0)) == Some("t")
}
