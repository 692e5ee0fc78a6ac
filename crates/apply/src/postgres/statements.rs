//! SQL for row changes on one version of one relation, and what is known of its target table.

use crate::ApplyError;
use crate::postgres::pipeline::Statement;
use crate::postgres::session::Session;
use crate::postgres::value_plan::{ColumnType, ValuePlan, value_plan};
use farshore_capture::publication::TableName;
use farshore_capture::types::TypeCatalog;
use farshore_model::{Lsn, Relation, ReplicaIdentity, UserType, quote_identifier};
use std::collections::HashMap;
use std::sync::Arc;

/// A table on the target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetTable {
    /// Partitioned: its rows are in other tables.
    pub partitioned: bool,
    /// Its columns.
    pub columns: Vec<TargetColumn>,
    /// What the columns' types are made of, where those are not PostgreSQL's own; sorted by OID.
    pub types: Vec<UserType>,
}

/// A column of a target table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetColumn {
    /// Name.
    pub name: String,
    /// Type OID on the target.
    pub type_oid: u32,
    /// `atttypmod`.
    pub type_modifier: i32,
    /// The type as SQL names it, without a modifier. (What `regtype` prints would not do:
    /// `character` and `bit` mean a length of one.)
    pub type_name: String,
    /// The type below all domains, as SQL names it.
    pub base_name: String,
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
            "SELECT a.attname, a.atttypid, pg_catalog.format_type(a.atttypid, -1), a.attgenerated <> '', \
               a.attidentity = 'a', \
               coalesce(a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]), false), \
               c.relkind = 'p', \
               CASE WHEN b.typtype = 'b' AND b.typcategory <> 'A' AND n.nspname <> 'pg_catalog' \
                 THEN n.nspname END, a.atttypmod, pg_catalog.format_type(b.oid, -1) \
             FROM pg_catalog.pg_class c \
             LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 \
               AND NOT a.attisdropped \
             LEFT JOIN pg_catalog.pg_type t ON t.oid = a.atttypid \
             LEFT JOIN pg_catalog.pg_type b \
               ON b.oid = (WITH RECURSIVE chain AS ( \
                 SELECT t.oid, t.typtype, t.typbasetype UNION ALL \
                 SELECT d.oid, d.typtype, d.typbasetype FROM chain \
                 JOIN pg_catalog.pg_type d ON d.oid = chain.typbasetype \
                 WHERE chain.typtype = 'd') SELECT oid FROM chain WHERE typtype <> 'd') \
             LEFT JOIN pg_catalog.pg_namespace n ON n.oid = b.typnamespace \
             LEFT JOIN pg_catalog.pg_index i ON i.indrelid = c.oid AND i.indisprimary \
             WHERE c.oid = pg_catalog.to_regclass($1) ORDER BY a.attnum",
            &[Some(&table.to_string())],
        )
        .await?;
    let Some(first) = rows.first() else { return Ok(None) };
    let partitioned = first.get(6) == Some("t");
    let mut target = TargetTable { partitioned, ..TargetTable::default() };
    for row in rows.iter().filter(|row| row.get(0).is_some()) {
        target.columns.push(TargetColumn {
            name: row.get(0).unwrap_or_default().to_owned(),
            type_oid: row.parse(1).map_err(|error| session.error(error))?,
            type_name: row.get(2).unwrap_or_default().to_owned(),
            type_modifier: row.parse(8).map_err(|error| session.error(error))?,
            base_name: row.get(9).unwrap_or_default().to_owned(),
            generated: row.get(3) == Some("t"),
            identity_always: row.get(4) == Some("t"),
            primary_key: row.get(5) == Some("t"),
            equals: row.get(7).map_or_else(
                || "=".to_owned(),
                |schema| format!("OPERATOR({}.=)", quote_identifier(schema)),
            ),
        });
    }
    let mut catalog = TypeCatalog::default();
    let types = || target.columns.iter().map(|column| column.type_oid);
    let described = catalog.describe(&mut session.connection, types()).await;
    described.map_err(|error| session.error(error))?;
    target.types = catalog.closure(types());
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

/// Why a column of the publisher cannot be written on the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// There is no such column that takes values.
    Missing(String),
    /// Values of the publisher's type could be changed or misread as the target's type.
    Type {
        /// The column.
        column: String,
        /// The target's type, as SQL names it.
        target: String,
    },
}

impl TargetTable {
    /// The column of this name, and how values of the publisher's type get into it.
    pub fn plan(
        &self,
        name: &str,
        publisher: ColumnType<'_>,
    ) -> Result<(&TargetColumn, ValuePlan), Misfit> {
        let column = self.columns.iter().find(|column| column.name == name && !column.generated);
        let column = column.ok_or_else(|| Misfit::Missing(name.to_owned()))?;
        let target =
            ColumnType { oid: column.type_oid, modifier: column.type_modifier, types: &self.types };
        let plan = value_plan(publisher, target).ok_or_else(|| Misfit::Type {
            column: name.to_owned(),
            target: column.type_name.clone(),
        })?;
        Ok((column, plan))
    }
}

impl Misfit {
    /// Says it of a table, with what to do.
    pub fn error(&self, subscription: &str, table: &TableName) -> ApplyError {
        ApplyError::Setup(match self {
            Misfit::Missing(column) => format!(
                "subscription \"{subscription}\": table {table} on the target has no writable \
                 column {}. Add it there, or publish the table without it",
                quote_identifier(column)
            ),
            Misfit::Type { column, target } => {
                let column = quote_identifier(column);
                format!(
                    "subscription \"{subscription}\": column {column} of {table} is {target} on the \
                     target, which cannot hold every value of the publisher's type as it is. Give it \
                     the publisher's type (ALTER TABLE {table} ALTER COLUMN {column} TYPE …), or \
                     publish the table without it"
                )
            }
        })
    }
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
    /// The target's primary key, by the publisher's column numbers, ascending; empty when it has
    /// none, or one that is not all published.
    pub primary_key: Vec<usize>,
    /// How values get into them, by the publisher's column numbers.
    plans: Vec<ValuePlan>,
    /// Prepared statements by shape.
    pub prepared: HashMap<Shape, Prepared>,
}

/// A statement with the columns that its parameters come from.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The statement.
    pub statement: Statement,
    /// Columns whose new values are the first parameters, ascending.
    pub set: Vec<usize>,
    /// Columns whose identifying values are the parameters after them, ascending.
    pub find: Vec<usize>,
}

impl TargetRelation {
    /// A relation version whose table on the target is as `target` says.
    ///
    /// # Errors
    /// A column that the target has not got, or whose type there cannot take the publisher's
    /// values as they are: what is wrong, for a message that names the table.
    pub fn new(
        relation: Arc<Relation>,
        table: TableName,
        copied_at: Lsn,
        target: TargetTable,
    ) -> Result<TargetRelation, Misfit> {
        let (mut columns, mut plans) = (Vec::new(), Vec::new());
        for column in &relation.columns {
            let publisher = ColumnType {
                oid: column.type_oid,
                modifier: column.type_modifier,
                types: &relation.types,
            };
            let (found, plan) = target.plan(&column.name, publisher)?;
            columns.push(found.clone());
            plans.push(plan);
        }
        let mut primary_key: Vec<usize> =
            (0..columns.len()).filter(|number| columns[*number].primary_key).collect();
        if target.columns.iter().filter(|column| column.primary_key).count() > primary_key.len() {
            primary_key.clear();
        }
        let prepared = HashMap::new();
        let partitioned = target.partitioned;
        Ok(TargetRelation {
            relation,
            table,
            copied_at,
            partitioned,
            cascaded: false,
            columns,
            primary_key,
            plans,
            prepared,
        })
    }

    /// A relation whose changes are passed over, because its table is not copied.
    pub fn passed_over(relation: Arc<Relation>, table: TableName) -> TargetRelation {
        TargetRelation {
            relation,
            table,
            copied_at: Lsn::MAX,
            partitioned: false,
            cascaded: false,
            columns: Vec::new(),
            primary_key: Vec::new(),
            plans: Vec::new(),
            prepared: HashMap::new(),
        }
    }

    /// How values of a column of the publisher get into the target's.
    ///
    /// It was decided when the relation was looked up. A prepared statement stays right when
    /// somebody changes the column's type on the target later, because its parameters keep their
    /// types; whoever writes binary values as the column's own type (a binary COPY) must make sure
    /// within the same transaction, behind a lock on the table, that the type is still that of
    /// [`TargetRelation::columns`].
    pub fn value_plan(&self, column: usize) -> ValuePlan {
        self.plans.get(column).copied().unwrap_or(ValuePlan::Verbatim { from: 0 })
    }

    /// A column that an UPDATE may set to what it is.
    pub fn touchable(&self) -> Option<usize> {
        self.columns.iter().position(|column| !column.identity_always)
    }

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
                    // Nothing but the key has a value, and it is the same: touch the row, so that
                    // a missing one is noticed.
                    if assignments.is_empty() {
                        let touched = self.touchable();
                        assignments.extend(touched.map(|c| format!("{0} = {0}", name(c))));
                    }
                    let (rows, set) = (self.rows_of_its_own(), assignments.join(", "));
                    if set.is_empty() {
                        format!("SELECT FROM {rows} WHERE {condition} FOR UPDATE")
                    } else {
                        format!("UPDATE {rows} SET {set} WHERE {condition}")
                    }
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
        self.value_plan(column).parameter_type()
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
            let mut terms = Vec::new();
            for column in find {
                let TargetColumn { equals, type_name, .. } = &self.columns[*column];
                let value = match self.value_plan(*column) {
                    ValuePlan::Verbatim { .. } => parameter(*column),
                    ValuePlan::Cast { .. } => format!("{}::{type_name}", parameter(*column)),
                };
                terms.push(format!("{} {equals} {value}", name(*column)));
            }
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
            type_modifier: -1,
            type_name: "integer".into(),
            base_name: "integer".into(),
            equals: "=".into(),
            generated: false,
            identity_always: false,
            primary_key: false,
        };
        let columns_there = (0..keys.len()).map(target).collect();
        let relation = Relation {
            oid: 1,
            schema: "s".into(),
            name: "order".into(),
            identity,
            columns,
            types: vec![],
        };
        let table = TableName { schema: "s".into(), name: "order".into() };
        let there = TargetTable { columns: columns_there, ..TargetTable::default() };
        TargetRelation::new(Arc::new(relation), table, Lsn::ZERO, there).unwrap()
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
