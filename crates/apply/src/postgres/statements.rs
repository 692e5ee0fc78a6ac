//! SQL for row changes on one version of one relation, and what is known of its target table.

use crate::ApplyError;
use crate::postgres::session::Session;
use farshore_capture::publication::TableName;
use farshore_model::{Lsn, Relation, ReplicaIdentity, quote_identifier};
use std::collections::HashMap;
use std::sync::Arc;

/// OIDs below this are PostgreSQL's own and the same on every server (`FirstNormalObjectId`).
pub const FIRST_USER_OID: u32 = 16_384;

/// A column of a target table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetColumn {
    /// Name.
    pub name: String,
    /// Type OID on the target.
    pub type_oid: u32,
    /// Stored or virtual generated column: takes no value.
    pub generated: bool,
}

/// Reads a target table's columns; empty when there is no such table.
pub async fn target_columns(
    session: &mut Session,
    table: &TableName,
) -> Result<Vec<TargetColumn>, ApplyError> {
    let rows = session
        .query(
            "SELECT attname, atttypid, attgenerated <> '' FROM pg_catalog.pg_attribute \
             WHERE attrelid = pg_catalog.to_regclass($1) AND attnum > 0 AND NOT attisdropped \
             ORDER BY attnum",
            &[Some(&table.to_string())],
        )
        .await?;
    rows.iter()
        .map(|row| {
            Ok(TargetColumn {
                name: row.get(0).unwrap_or_default().to_owned(),
                type_oid: row.parse(1).map_err(|error| session.error(error))?,
                generated: row.get(2) == Some("t"),
            })
        })
        .collect()
}

/// Checks that `table` on the target can take `columns`.
pub fn check_columns<'a>(
    subscription: &str,
    table: &TableName,
    columns: impl Iterator<Item = &'a str>,
    target: &[TargetColumn],
) -> Result<(), ApplyError> {
    if target.is_empty() {
        return Err(ApplyError::Setup(format!(
            "subscription \"{subscription}\": table {table} is not on the target. Create it there \
             (for instance: pg_dump --schema-only --table='{table}' … | psql …)"
        )));
    }
    let missing: Vec<String> = columns
        .filter(|name| !target.iter().any(|column| column.name == *name && !column.generated))
        .map(quote_identifier)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(ApplyError::Setup(format!(
        "subscription \"{subscription}\": table {table} on the target has no writable column {}. \
         Add it there, or publish the table without it",
        missing.join(", ")
    )))
}

/// A statement by its shape: which columns an update sets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Shape {
    /// All columns.
    Insert,
    /// Key from the old tuple or the new one; columns that are set.
    Update {
        /// The row is found by the old tuple, and key columns are set too.
        old_given: bool,
        /// Columns without a value (unchanged TOAST) as a bit set by column number.
        unchanged: Vec<u64>,
    },
    /// By the old tuple.
    Delete,
}

/// A relation version with its statements on the target.
pub struct TargetRelation {
    /// The definition that changes refer to.
    pub relation: Arc<Relation>,
    /// Schema and name on the target.
    pub table: TableName,
    /// Transactions that committed before this are in the copied rows already.
    pub copied_at: Lsn,
    /// Prepared statements by shape.
    pub prepared: HashMap<Shape, Prepared>,
}

/// A statement that the target knows, with the columns its parameters come from.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// Name on the target.
    pub name: String,
    /// Columns whose new values are the first parameters, ascending.
    pub set: Vec<usize>,
    /// Columns whose identifying values are the parameters after them, ascending.
    pub find: Vec<usize>,
}

impl TargetRelation {
    /// The SQL of a shape and its parameters' type OIDs (0 where the target must decide). The
    /// parameters' order: see [`TargetRelation::parameters`].
    pub fn sql(&self, shape: &Shape) -> (String, Vec<u32>) {
        let mut types = Vec::new();
        let mut parameter = |column: usize| {
            let oid = self.relation.columns[column].type_oid;
            types.push(if oid < FIRST_USER_OID { oid } else { 0 });
            format!("${}", types.len())
        };
        let name = |column: usize| quote_identifier(&self.relation.columns[column].name);
        let (set, find) = self.parameters(shape);
        let text = match shape {
            Shape::Insert if set.is_empty() => format!("INSERT INTO {} DEFAULT VALUES", self.table),
            Shape::Insert => {
                let names: Vec<String> = set.iter().map(|c| name(*c)).collect();
                let values: Vec<String> = set.iter().map(|c| parameter(*c)).collect();
                format!(
                    "INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE VALUES ({})",
                    self.table,
                    names.join(", "),
                    values.join(", ")
                )
            }
            Shape::Update { .. } => {
                let mut assignments: Vec<String> =
                    set.iter().map(|c| format!("{} = {}", name(*c), parameter(*c))).collect();
                if assignments.is_empty() {
                    // Nothing but the key has a value, and it is the same: touch the row, so that
                    // a missing one is noticed.
                    let column = find.first().copied().unwrap_or_default();
                    assignments.push(format!("{0} = {0}", name(column)));
                }
                let condition = self.condition(&find, &mut parameter);
                format!("UPDATE {} SET {} WHERE {condition}", self.table, assignments.join(", "))
            }
            Shape::Delete => {
                let condition = self.condition(&find, &mut parameter);
                format!("DELETE FROM {} WHERE {condition}", self.table)
            }
        };
        (text, types)
    }

    fn condition(&self, find: &[usize], parameter: &mut impl FnMut(usize) -> String) -> String {
        let full = self.relation.identity == ReplicaIdentity::Full;
        // Of rows that are equal in every column, just one is meant.
        let operator = if full { "IS NOT DISTINCT FROM" } else { "=" };
        let terms: Vec<String> = find
            .iter()
            .map(|c| {
                let name = quote_identifier(&self.relation.columns[*c].name);
                format!("{name} {operator} {}", parameter(*c))
            })
            .collect();
        let terms = terms.join(" AND ");
        if full {
            format!("ctid = (SELECT ctid FROM {} WHERE {terms} LIMIT 1)", self.table)
        } else {
            terms
        }
    }

    /// Column numbers whose new values, and then whose identifying values, are the parameters.
    pub fn parameters(&self, shape: &Shape) -> (Vec<usize>, Vec<usize>) {
        let columns = 0..self.relation.columns.len();
        let keys = columns.clone().filter(|c| self.relation.columns[*c].key).collect();
        match shape {
            Shape::Insert => (columns.collect(), Vec::new()),
            Shape::Delete => (Vec::new(), keys),
            Shape::Update { old_given, unchanged } => {
                let set = columns
                    .filter(|c| {
                        let has_value =
                            unchanged.get(c / 64).is_none_or(|word| word & (1 << (c % 64)) == 0);
                        // Without an old tuple the key is what it was.
                        has_value && (*old_given || !self.relation.columns[*c].key)
                    })
                    .collect();
                (set, keys)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_model::Column;

    fn relation(identity: ReplicaIdentity, keys: &[bool]) -> TargetRelation {
        let columns = keys
            .iter()
            .enumerate()
            .map(|(n, key)| Column {
                key: *key,
                name: format!("c{n}"),
                type_oid: if n == 2 { 90_000 } else { 23 },
                type_modifier: -1,
            })
            .collect();
        TargetRelation {
            relation: Arc::new(Relation {
                oid: 1,
                schema: "s".into(),
                name: "order".into(),
                identity,
                columns,
            }),
            table: TableName { schema: "s".into(), name: "order".into() },
            copied_at: Lsn::ZERO,
            prepared: HashMap::new(),
        }
    }

    fn update(old_given: bool, unchanged: u64) -> Shape {
        let unchanged = if unchanged == 0 { vec![] } else { vec![unchanged] };
        Shape::Update { old_given, unchanged }
    }

    #[test]
    fn statements_name_just_what_they_need() {
        let keyed = relation(ReplicaIdentity::Default, &[true, false, false]);
        for (shape, sql, types) in [
            (
                Shape::Insert,
                "INSERT INTO s.\"order\" (c0, c1, c2) OVERRIDING SYSTEM VALUE VALUES ($1, $2, $3)",
                vec![23, 23, 0],
            ),
            (
                update(false, 0),
                "UPDATE s.\"order\" SET c1 = $1, c2 = $2 WHERE c0 = $3",
                vec![23, 0, 23],
            ),
            (
                update(true, 0b10),
                "UPDATE s.\"order\" SET c0 = $1, c2 = $2 WHERE c0 = $3",
                vec![23, 0, 23],
            ),
            (update(false, 0b110), "UPDATE s.\"order\" SET c0 = c0 WHERE c0 = $1", vec![23]),
            (Shape::Delete, "DELETE FROM s.\"order\" WHERE c0 = $1", vec![23]),
        ] {
            assert_eq!(keyed.sql(&shape), (sql.to_owned(), types));
        }
    }

    #[test]
    fn a_full_identity_changes_one_of_equal_rows() {
        let full = relation(ReplicaIdentity::Full, &[true, true]);
        assert_eq!(
            full.sql(&Shape::Delete).0,
            "DELETE FROM s.\"order\" WHERE ctid = (SELECT ctid FROM s.\"order\" \
             WHERE c0 IS NOT DISTINCT FROM $1 AND c1 IS NOT DISTINCT FROM $2 LIMIT 1)"
        );
    }
}
