//! What the publisher says of columns that a table gained or lost.

use super::{PublicationSpec, TableName};
use crate::CaptureError;
use farshore_pg::{Connection, Error, partition_tree};
use serde::{Deserialize, Serialize};

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

    /// OIDs of the table and of the partitioned tables above it; none if there is no such table.
    pub async fn lineage(
        &self,
        sql: &mut Connection,
        table: &TableName,
    ) -> Result<Vec<u32>, CaptureError> {
        let rows = sql
            .query(
                "WITH t AS (SELECT c.oid FROM pg_catalog.pg_class c \
                   JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
                   WHERE n.nspname = $1 AND c.relname = $2) \
                 SELECT oid FROM t UNION SELECT a.relid::pg_catalog.oid \
                 FROM t CROSS JOIN LATERAL pg_catalog.pg_partition_ancestors(t.oid) a",
                &[Some(&table.schema), Some(&table.name)],
            )
            .await
            .map_err(|error| self.publisher_error(error))?;
        rows.iter().map(|row| row.parse(0).map_err(|error| self.publisher_error(error))).collect()
    }

    /// What the table's rows had in these columns when they were added.
    pub async fn old_values(
        &self,
        sql: &mut Connection,
        table: &TableName,
        columns: &[AddedColumn],
    ) -> Result<Vec<OldValue>, CaptureError> {
        self.ask_old_values(sql, table, columns).await.map_err(|error| self.publisher_error(error))
    }

    async fn ask_old_values(
        &self,
        sql: &mut Connection,
        table: &TableName,
        columns: &[AddedColumn],
    ) -> Result<Vec<OldValue>, Error> {
        sql.simple_query("SET search_path = ''; SET lc_monetary = 'C'").await?;
        let mut values = Vec::new();
        for column in columns {
            // A partitioned table has no rows of its own: its partitions know. What has no default
            // (any more) may have been filled by one all the same: NOT NULL tells, and a domain that
            // has a default of its own.
            let rows = sql
                .query(
                    &format!(
                        "SELECT a.attmissingval::text, a.atthasdef OR a.attidentity <> '' \
                         OR a.attnotnull OR (d.typtype = 'd' AND d.typdefault IS NOT NULL), \
                       coalesce(pg_catalog.pg_relation_filenode(c.oid), 0) \
                     FROM pg_catalog.pg_class o \
                     JOIN pg_catalog.pg_namespace n ON n.oid = o.relnamespace \
                     CROSS JOIN LATERAL {} t \
                     JOIN pg_catalog.pg_class c ON c.oid = t.relid AND c.relkind <> 'p' \
                     JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid \
                     JOIN pg_catalog.pg_type d ON d.oid = a.atttypid \
                     WHERE n.nspname = $1 AND o.relname = $2 AND a.attname = $3 \
                       AND NOT a.attisdropped AND a.atttypid = $4::text::oid \
                     ORDER BY a.atthasmissing DESC LIMIT 1",
                        partition_tree("o.oid")
                    ),
                    &[
                        Some(&table.schema),
                        Some(&table.name),
                        Some(&column.name),
                        Some(&column.type_oid.to_string()),
                    ],
                )
                .await?;
            values.push(match rows.first() {
                // The column has gone again, and with it whatever it held.
                None => OldValue::Null,
                Some(row) => match (row.get(0).and_then(only_element), row.get(1)) {
                    (Some(text), _) => OldValue::Missing(text),
                    (None, Some("t")) => OldValue::Filled { file_node: row.parse(2)? },
                    (None, _) => OldValue::Null,
                },
            });
        }
        Ok(values)
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
