//! SQL for row changes on one version of one relation, and what is known of its target table.

use crate::ApplyError;
use crate::postgres::session::Session;
use farshore_capture::publication::TableName;
use farshore_model::{Lsn, Relation, ReplicaIdentity, quote_identifier};
use std::collections::HashMap;
use std::sync::Arc;

/// OIDs below this are PostgreSQL's own and the same on every server (`FirstNormalObjectId`).
pub const FIRST_USER_OID: u32 = 16_384;

/// A table on the target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetTable {
    /// Partitioned: its rows are in other tables.
    pub partitioned: bool,
    /// Its columns.
    pub columns: Vec<TargetColumn>,
}

/// A column of a target table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetColumn {
    /// Name.
    pub name: String,
    /// Type OID on the target.
    pub type_oid: u32,
    /// The type as SQL names it, without a modifier.
    pub type_name: String,
    /// The type's equality operator as SQL names it: extensions keep theirs in their own schema,
    /// and our `search_path` is empty.
    pub equals: String,
    /// Stored or virtual generated column: takes no value.
    pub generated: bool,
    /// `GENERATED ALWAYS AS IDENTITY`: UPDATE cannot set it.
    pub identity_always: bool,
    /// Part of the primary key.
    pub primary_key: bool,
}

/// Looks a table up on the target; `None` when there is no such table.
pub async fn target_table(
    session: &mut Session,
    table: &TableName,
) -> Result<Option<TargetTable>, ApplyError> {
    let rows = session
        .query(
            "SELECT a.attname, a.atttypid, a.atttypid::regtype, a.attgenerated <> '', \
               a.attidentity = 'a', coalesce(a.attnum = ANY (i.indkey), false), \
               c.relkind = 'p', \
               CASE WHEN b.typtype = 'b' AND b.typcategory <> 'A' AND n.nspname <> 'pg_catalog' \
                 THEN n.nspname END \
             FROM pg_catalog.pg_class c \
             LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 \
               AND NOT a.attisdropped \
             LEFT JOIN pg_catalog.pg_type t ON t.oid = a.atttypid \
             LEFT JOIN pg_catalog.pg_type b \
               ON b.oid = CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE t.oid END \
             LEFT JOIN pg_catalog.pg_namespace n ON n.oid = b.typnamespace \
             LEFT JOIN pg_catalog.pg_index i ON i.indrelid = c.oid AND i.indisprimary \
             WHERE c.oid = pg_catalog.to_regclass($1) ORDER BY a.attnum",
            &[Some(&table.to_string())],
        )
        .await?;
    let Some(first) = rows.first() else { return Ok(None) };
    let mut target = TargetTable { partitioned: first.get(6) == Some("t"), columns: Vec::new() };
    for row in rows.iter().filter(|row| row.get(0).is_some()) {
        target.columns.push(TargetColumn {
            name: row.get(0).unwrap_or_default().to_owned(),
            type_oid: row.parse(1).map_err(|error| session.error(error))?,
            type_name: row.get(2).unwrap_or_default().to_owned(),
            generated: row.get(3) == Some("t"),
            identity_always: row.get(4) == Some("t"),
            primary_key: row.get(5) == Some("t"),
            equals: row.get(7).map_or_else(
                || "=".to_owned(),
                |schema| format!("OPERATOR({}.=)", quote_identifier(schema)),
            ),
        });
    }
    Ok(Some(target))
}

/// Checks that `table` on the target can take `columns`.
pub fn check_columns<'a>(
    subscription: &str,
    table: &TableName,
    columns: impl Iterator<Item = &'a str>,
    target: Option<&TargetTable>,
) -> Result<(), ApplyError> {
    let Some(target) = target else {
        return Err(ApplyError::Setup(format!(
            "subscription \"{subscription}\": table {table} is not on the target. Create it there \
             (for instance: pg_dump --schema-only --table='{table}' … | psql …)"
        )));
    };
    let missing: Vec<String> = columns
        .filter(|name| {
            !target.columns.iter().any(|column| column.name == *name && !column.generated)
        })
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
    /// The target's table is partitioned: its rows are in other tables.
    pub partitioned: bool,
    /// A foreign key of the target may delete rows of its own accord, before their DELETE comes.
    pub cascaded: bool,
    /// The target's columns, by the publisher's column numbers.
    pub columns: Vec<TargetColumn>,
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
            types.push(self.parameter_type(column));
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
                let values: Vec<String> = set.iter().map(|c| parameter(*c)).collect();
                let condition = self.condition(&find, &mut parameter);
                if set.iter().any(|c| self.columns[*c].identity_always) {
                    self.replace(&set, &values, &condition)
                } else {
                    let mut assignments: Vec<String> = set
                        .iter()
                        .zip(&values)
                        .map(|(c, v)| format!("{} = {v}", name(*c)))
                        .collect();
                    if assignments.is_empty() {
                        // Nothing but the key has a value, and it is the same: touch the row, so
                        // that a missing one is noticed.
                        let column = find.first().copied().unwrap_or_default();
                        assignments.push(format!("{0} = {0}", name(column)));
                    }
                    let set = assignments.join(", ");
                    format!("UPDATE {} SET {set} WHERE {condition}", self.rows_of_its_own())
                }
            }
            Shape::Delete => {
                let condition = self.condition(&find, &mut parameter);
                format!("DELETE FROM {} WHERE {condition}", self.rows_of_its_own())
            }
        };
        (text, types)
    }

    /// The type OID that a column's value is sent with, 0 where the target must decide.
    pub fn parameter_type(&self, column: usize) -> u32 {
        let oid = self.relation.columns[column].type_oid;
        if oid < FIRST_USER_OID { oid } else { 0 }
    }

    /// The condition that finds the row by its identifying values, and their type OIDs.
    pub fn identified(&self) -> (String, Vec<u32>) {
        let mut types = Vec::new();
        let (_, find) = self.parameters(&Shape::Delete);
        let condition = self.condition(&find, &mut |column| {
            types.push(self.parameter_type(column));
            format!("${}", types.len())
        });
        (condition, types)
    }

    /// The table without the tables that inherit from it, which are published by themselves.
    pub fn rows_of_its_own(&self) -> String {
        if self.partitioned { self.table.to_string() } else { format!("ONLY {}", self.table) }
    }

    /// An update of columns that SQL's UPDATE cannot set (`GENERATED ALWAYS AS IDENTITY`): the row
    /// is taken out and put back. One statement, so it counts as one row like any other change.
    fn replace(&self, set: &[usize], values: &[String], condition: &str) -> String {
        let (mut names, mut sources) = (Vec::new(), Vec::new());
        for (number, column) in self.relation.columns.iter().enumerate() {
            let name = quote_identifier(&column.name);
            let position = set.iter().position(|c| *c == number);
            sources.push(position.map_or_else(|| format!("old.{name}"), |at| values[at].clone()));
            names.push(name);
        }
        format!(
            "WITH old AS (DELETE FROM {} WHERE {condition} RETURNING *) INSERT INTO {} ({}) \
             OVERRIDING SYSTEM VALUE SELECT {} FROM old",
            self.rows_of_its_own(),
            self.table,
            names.join(", "),
            sources.join(", ")
        )
    }

    fn condition(&self, find: &[usize], parameter: &mut impl FnMut(usize) -> String) -> String {
        let name = |column: usize| quote_identifier(&self.relation.columns[column].name);
        if self.relation.identity != ReplicaIdentity::Full {
            let terms: Vec<String> = find
                .iter()
                .map(|c| format!("{} {} {}", name(*c), self.columns[*c].equals, parameter(*c)))
                .collect();
            return terms.join(" AND ");
        }
        // The whole old row. Compared by image (`*=`), so that 1.0 is not 1.00, NULL is NULL, and
        // types without an equality operator will do; the target's primary key, if it has one,
        // finds the row fast; and of rows that are equal in every byte just one is meant.
        let (mut names, mut values, mut terms) = (Vec::new(), Vec::new(), Vec::new());
        for column in find {
            let value = format!("{}::{}", parameter(*column), self.columns[*column].type_name);
            if self.columns[*column].primary_key {
                terms.push(format!("{} {} {value}", name(*column), self.columns[*column].equals));
            }
            names.push(name(*column));
            values.push(value);
        }
        terms.push(format!(
            "ROW({})::pg_catalog.record OPERATOR(pg_catalog.*=) ROW({})",
            names.join(", "),
            values.join(", ")
        ));
        let terms = terms.join(" AND ");
        let rows = self.rows_of_its_own();
        if self.partitioned {
            // The same ctid may stand in every partition.
            format!("(tableoid, ctid) = (SELECT tableoid, ctid FROM {rows} WHERE {terms} LIMIT 1)")
        } else {
            format!("ctid = (SELECT ctid FROM {rows} WHERE {terms} LIMIT 1)")
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
        let target = |n: usize| TargetColumn {
            name: format!("c{n}"),
            type_oid: 23,
            type_name: "integer".into(),
            equals: "=".into(),
            generated: false,
            identity_always: false,
            primary_key: false,
        };
        TargetRelation {
            partitioned: false,
            cascaded: false,
            columns: (0..keys.len()).map(target).collect(),
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
                "UPDATE ONLY s.\"order\" SET c1 = $1, c2 = $2 WHERE c0 = $3",
                vec![23, 0, 23],
            ),
            (
                update(true, 0b10),
                "UPDATE ONLY s.\"order\" SET c0 = $1, c2 = $2 WHERE c0 = $3",
                vec![23, 0, 23],
            ),
            (update(false, 0b110), "UPDATE ONLY s.\"order\" SET c0 = c0 WHERE c0 = $1", vec![23]),
            (Shape::Delete, "DELETE FROM ONLY s.\"order\" WHERE c0 = $1", vec![23]),
        ] {
            assert_eq!(keyed.sql(&shape), (sql.to_owned(), types));
        }
    }

    #[test]
    fn a_full_identity_changes_one_of_equal_rows() {
        let mut full = relation(ReplicaIdentity::Full, &[true, true]);
        full.columns[0].primary_key = true;
        assert_eq!(
            full.sql(&Shape::Delete).0,
            "DELETE FROM ONLY s.\"order\" WHERE ctid = (SELECT ctid FROM ONLY s.\"order\" \
             WHERE c0 = $1::integer AND \
             ROW(c0, c1)::pg_catalog.record OPERATOR(pg_catalog.*=) ROW($1::integer, $2::integer) LIMIT 1)"
        );
    }

    #[test]
    fn an_identity_column_is_replaced_with_its_row() {
        let mut keyed = relation(ReplicaIdentity::Default, &[true, false, false]);
        keyed.columns[1].identity_always = true;
        assert_eq!(
            keyed.sql(&update(false, 0b100)).0,
            "WITH old AS (DELETE FROM ONLY s.\"order\" WHERE c0 = $2 RETURNING *) \
             INSERT INTO s.\"order\" (c0, c1, c2) OVERRIDING SYSTEM VALUE \
             SELECT old.c0, $1, old.c2 FROM old"
        );
    }
}
