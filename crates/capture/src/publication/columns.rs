//! What the publisher says of columns that a table gained or lost.

use super::{PublicationSpec, TableName, file_node};
use crate::CaptureError;
use farshore_model::quote_identifier;
use farshore_pg::{Connection, Error, partition_tree, quote_literal, text_array};
use serde::{Deserialize, Serialize};

/// A table that gained columns, as the log has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrownTable {
    /// Its name there; it may have another one by now.
    pub table: TableName,
    /// Its OID on the publisher; 0 where that is not known, and its name has to tell.
    pub oid: u32,
    /// The [file](super::PublishedTable::file_node) that it was copied from, where that is known.
    pub copied_from: Option<u32>,
    /// All columns that it has there.
    pub columns: Vec<String>,
}

/// A column that a table gained.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddedColumn {
    /// Name.
    pub name: String,
    /// Type OID on the publisher.
    pub type_oid: u32,
}

/// What rows had in a column when it was added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OldValue {
    /// NULL, or the column has gone again.
    Null,
    /// This text.
    Missing(String),
    /// NULL if the table is still in the file that it was copied from; else each its own.
    Filled {
        /// The file it is in now.
        file_node: u32,
    },
}

impl OldValue {
    /// The publisher cannot tell any more.
    pub const UNKNOWN: OldValue = OldValue::Filled { file_node: u32::MAX };
}

/// What is looked for where a column has neither a value that its old rows lack nor a default that may
/// have filled them: in so many blocks of each file.
const LOOKED_THROUGH: u32 = 10_000;

/// A table that is looked through is waited for no longer than this.
const LOOK_WITHIN: &str = "SET lock_timeout = '2s'";

/// What became of columns that are not published any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DroppedColumns {
    /// Those that the publisher has dropped.
    pub columns: Vec<String>,
    /// The top of the partitions that the table is one of, or the table itself.
    pub root: TableName,
}

/// The table at the top of a table's partition tree, and whether it is in one.
const ROOT: &str = "SELECT rn.nspname, r.relname, r.oid <> c.oid OR c.relkind = 'p' \
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
    JOIN pg_catalog.pg_class r \
      ON r.oid = coalesce(pg_catalog.pg_partition_root(c.oid)::pg_catalog.oid, c.oid) \
    JOIN pg_catalog.pg_namespace rn ON rn.oid = r.relnamespace \
    WHERE n.nspname = $1 AND c.relname = $2";

/// The top of the partitions that a table of any server is one of, or the table itself; and whether
/// it has or is a partition. `None` if there is no such table.
///
/// # Errors
/// The server's.
pub async fn partition_root(
    sql: &mut Connection,
    table: &TableName,
) -> Result<Option<(TableName, bool)>, Error> {
    let rows = sql.query(ROOT, &[Some(&table.schema), Some(&table.name)]).await?;
    let text = |row: &farshore_pg::Row, i: usize| row.get(i).unwrap_or_default().to_owned();
    Ok(rows.first().map(|row| {
        (TableName { schema: text(row, 0), name: text(row, 1) }, row.get(2) == Some("t"))
    }))
}

impl PublicationSpec {
    /// Which of the columns `gone` the publisher has dropped. A column that the table still has was
    /// dropped and added again if it is published; if not, it was taken out of the publication.
    pub async fn dropped_columns(
        &self,
        sql: &mut Connection,
        table: &TableName,
        gone: &[String],
    ) -> Result<DroppedColumns, CaptureError> {
        let failed = |error| self.publisher_error(error);
        let there = sql
            .query(
                "SELECT a.attname FROM pg_catalog.pg_attribute a \
                 JOIN pg_catalog.pg_class c ON c.oid = a.attrelid \
                 JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
                 WHERE n.nspname = $1 AND c.relname = $2 AND a.attnum > 0 AND NOT a.attisdropped",
                &[Some(&table.schema), Some(&table.name)],
            )
            .await
            .map_err(failed)?;
        let root = partition_root(sql, table).await.map_err(failed)?;
        let tables = self.published_tables(sql).await?;
        let now = tables.iter().find(|published| published.table == *table);
        // Without the table nobody can tell.
        let is_dropped = |name: &&String| {
            let is_there = there.iter().any(|row| row.get(0) == Some(name));
            let is_published =
                now.is_some_and(|table| table.columns.iter().any(|column| column.name == **name));
            !there.is_empty() && (!is_there || is_published)
        };
        let columns = gone.iter().filter(is_dropped).cloned().collect();
        let root = root.map_or_else(|| table.clone(), |(root, _)| root);
        Ok(DroppedColumns { columns, root })
    }

    /// OIDs of the table and of the partitioned tables above it; none if there is no such table. By its
    /// OID, where that is not 0.
    pub async fn lineage(
        &self,
        sql: &mut Connection,
        table: &TableName,
        oid: u32,
    ) -> Result<Vec<u32>, CaptureError> {
        let rows = sql
            .query(
                &format!(
                    "WITH t AS (SELECT o.oid FROM {NAMED_OR_NUMBERED}) \
                     SELECT oid FROM t UNION SELECT a.relid::pg_catalog.oid \
                     FROM t CROSS JOIN LATERAL pg_catalog.pg_partition_ancestors(t.oid) a"
                ),
                &[Some(&table.schema), Some(&table.name), Some(&oid.to_string())],
            )
            .await
            .map_err(|error| self.publisher_error(error))?;
        rows.iter().map(|row| row.parse(0).map_err(|error| self.publisher_error(error))).collect()
    }

    /// What the table's rows had in these columns when they were added. Rows are looked at only in
    /// columns that `may_be_seen`.
    pub async fn old_values(
        &self,
        sql: &mut Connection,
        table: &GrownTable,
        columns: &[AddedColumn],
        may_be_seen: impl Fn(&AddedColumn) -> bool,
    ) -> Result<Vec<OldValue>, CaptureError> {
        let mut values = Vec::new();
        for column in columns {
            let value = ask_old_value(sql, table, column, may_be_seen(column)).await;
            values.push(match value.map_err(|error| self.publisher_error(error))? {
                Some(value) => value,
                None if self.may_be_renamed(sql, table, column).await? => OldValue::UNKNOWN,
                // The column has gone again, or the table, and with it whatever it held.
                None => OldValue::Null,
            });
        }
        Ok(values)
    }

    /// Whether the table publishes a column which the log has not seen, of that type and behind those
    /// that were before the one that is asked about: it may be that one, under another name.
    async fn may_be_renamed(
        &self,
        sql: &mut Connection,
        table: &GrownTable,
        column: &AddedColumn,
    ) -> Result<bool, CaptureError> {
        let found = columns_unseen(sql, table, column).await;
        let unseen = found.map_err(|error| self.publisher_error(error))?;
        if unseen.is_empty() {
            return Ok(false);
        }
        let lineage = self.lineage(sql, &table.table, table.oid).await?;
        let published = self.published_tables(sql).await?;
        let mut published = published.iter().filter(|table| lineage.contains(&table.oid));
        Ok(published.any(|table| table.columns.iter().any(|now| unseen.contains(&now.name))))
    }
}

/// A table `o` by its OID `$3`, where that is not 0, or else by its schema `$1` and name `$2`.
const NAMED_OR_NUMBERED: &str = "pg_catalog.pg_class o \
    JOIN pg_catalog.pg_namespace n ON n.oid = o.relnamespace \
      AND CASE $3::text::oid WHEN 0 THEN n.nspname = $1 AND o.relname = $2 \
        ELSE o.oid = $3::text::oid END";

async fn ask_old_value(
    sql: &mut Connection,
    table: &GrownTable,
    column: &AddedColumn,
    may_be_seen: bool,
) -> Result<Option<OldValue>, Error> {
    sql.simple_query("SET search_path = ''; SET lc_monetary = 'C'").await?;
    let (oid, type_oid) = (table.oid.to_string(), column.type_oid.to_string());
    let which = [&table.table.schema, &table.table.name, &oid, &column.name]
        .map(|text| Some(text.as_str()));
    // A partitioned table has no rows of its own: its partitions know. What has no default
    // (any more) may have been filled by one all the same: NOT NULL tells, and a domain that
    // has a default of its own.
    let rows = sql
        .query(
            &format!(
                "SELECT a.attmissingval::text, a.atthasdef OR a.attidentity <> '' \
                   OR a.attnotnull OR (d.typtype = 'd' AND d.typdefault IS NOT NULL), \
                   {file}, a.atttypid = $5::text::oid, \
                   CASE o.relkind WHEN 'p' THEN '' ELSE 'ONLY ' END \
                     || pg_catalog.format('%I.%I', n.nspname, o.relname) \
                 FROM {NAMED_OR_NUMBERED} CROSS JOIN LATERAL {tree} t \
                 JOIN pg_catalog.pg_class c ON c.oid = t.relid AND c.relkind <> 'p' \
                 JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid \
                 JOIN pg_catalog.pg_type d ON d.oid = a.atttypid \
                 WHERE a.attname = $4 AND NOT a.attisdropped \
                 ORDER BY a.atthasmissing DESC LIMIT 1",
                file = file_node("o"),
                tree = partition_tree("o.oid")
            ),
            &[&which[..], &[Some(&type_oid)]].concat(),
        )
        .await?;
    let Some(row) = rows.first() else { return Ok(None) };
    let missing = row.get(0).and_then(only_element);
    let file_node = row.parse(2)?;
    let is_in_its_file = table.copied_from == Some(file_node);
    Ok(Some(match (missing, row.get(3)) {
        (Some(text), Some("t")) => OldValue::Missing(text),
        // It has another type by now. Nothing was filled, if the table is where it was.
        (None, Some("f")) if is_in_its_file => OldValue::Null,
        (_, Some("f")) => OldValue::UNKNOWN,
        (None, _) if row.get(1) == Some("t") => OldValue::Filled { file_node },
        (None, _) if is_in_its_file || !may_be_seen => OldValue::Null,
        _ => match has_old_rows_filled(sql, row.get(4).unwrap_or_default(), &column.name).await? {
            true => OldValue::Filled { file_node },
            false => OldValue::Null,
        },
    }))
}

/// Columns of the table which the log has not seen, of that type and behind those that were before the
/// one that is asked about.
async fn columns_unseen(
    sql: &mut Connection,
    table: &GrownTable,
    column: &AddedColumn,
) -> Result<Vec<String>, Error> {
    if table.columns.is_empty() {
        return Ok(Vec::new());
    }
    let columns = || table.columns.iter().map(String::as_str);
    let known = text_array(columns());
    let before = text_array(columns().take_while(|before| *before != column.name));
    let unseen = format!(
        "SELECT a.attname FROM {NAMED_OR_NUMBERED} \
         JOIN pg_catalog.pg_attribute a ON a.attrelid = o.oid AND a.attnum > coalesce(( \
           SELECT max(b.attnum) FROM pg_catalog.pg_attribute b WHERE b.attrelid = o.oid \
             AND b.attname = ANY ($5::text::name[])), 0) \
         WHERE NOT a.attisdropped AND a.atttypid = $6::text::oid \
           AND NOT a.attname = ANY ($4::text::name[])"
    );
    let (oid, type_oid) = (table.oid.to_string(), column.type_oid.to_string());
    let parameters = [&table.table.schema, &table.table.name, &oid, &known, &before, &type_oid];
    let parameters = parameters.map(|text| Some(text.as_str()));
    let rows = sql.query(&unseen, &parameters).await?;
    Ok(rows.iter().filter_map(|row| row.get(0)).map(str::to_owned).collect())
}

/// Whether there are rows which have a value in a column although they were written before anything
/// was done to the column that the catalog has of it: a default filled them that has been dropped
/// since, when the column was added or when the table was rewritten. Rows that are written to a new
/// file are the first in it.
async fn has_old_rows_filled(
    sql: &mut Connection,
    table: &str,
    column: &str,
) -> Result<bool, Error> {
    let (name, literal) = (quote_identifier(column), quote_literal(column));
    let look = format!(
        "SELECT EXISTS (SELECT FROM {table} AS r \
         JOIN pg_catalog.pg_attribute a ON a.attrelid = r.tableoid AND a.attname = {literal} \
         WHERE r.{name} IS NOT NULL AND r.ctid < '({LOOKED_THROUGH},0)' \
           AND (pg_catalog.age(r.xmin) > pg_catalog.age(a.xmin) OR r.xmin = a.xmin \
             AND r.cmin::text::bigint < a.cmin::text::bigint))"
    );
    sql.simple_query(LOOK_WITHIN).await?;
    let looked = sql.query(&look, &[]).await;
    sql.simple_query("SET lock_timeout = 0").await?;
    match looked {
        Ok(rows) => Ok(rows.first().and_then(|row| row.get(0)) == Some("t")),
        // It could have been copied at some time.
        Err(error) if error.sqlstate() == Some("42501") => {
            tracing::warn!(%table, column, "what rows have in a new column is not looked at: {error}");
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// The element of an array with one element, from the array's text.
fn only_element(array: &str) -> Option<String> {
    let inner = array.strip_prefix('{')?.strip_suffix('}')?;
    let Some(quoted) = inner.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')) else {
        return (inner != "NULL").then(|| inner.to_owned());
    };
    let mut element = String::new();
    let mut chars = quoted.chars();
    while let Some(char) = chars.next() {
        element.push(if char == '\\' { chars.next()? } else { char });
    }
    Some(element)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_values_are_read_from_their_array() {
        for (array, element) in [
            ("{7}", Some("7")),
            ("{\"a, \\\"b\\\" \\\\ {}\"}", Some("a, \"b\" \\ {}")),
            ("{\"\"}", Some("")),
            ("{\"{1,2}\"}", Some("{1,2}")),
            ("{\"NULL\"}", Some("NULL")),
            ("{NULL}", None),
            ("7", None),
        ] {
            assert_eq!(only_element(array).as_deref(), element, "{array}");
        }
    }
}
