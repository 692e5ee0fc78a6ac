//! Whether changes of a relation version may be written in bulk, and the SQL for it.

use crate::ApplyError;
use crate::postgres::session::Session;
use crate::postgres::statements::TargetRelation;
use farshore_model::{ReplicaIdentity, quote_identifier};
use farshore_pg::{partition_tree, quote_literal};

/// A relation version whose changes may be written in bulk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchPlan {
    /// Columns by which rows are told apart, ascending; empty where there is no such key, and then
    /// only inserts are netted.
    pub key: Vec<usize>,
    /// Rows are found by all of their old values (`REPLICA IDENTITY FULL`), and fast by the key.
    pub whole_old_rows: bool,
    /// The target's table has writable columns that are not published.
    pub own_columns_on_target: bool,
    columns: Vec<ColumnTypes>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct ColumnTypes {
    element: u32,
    array: u32,
}

/// How changes of a relation version are to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Planned {
    /// In bulk.
    Batch(BatchPlan),
    /// Each by a statement of its own, in their order: a value cannot pass as it is because the
    /// types differ, or an update would set a `GENERATED ALWAYS AS IDENTITY` column outside the
    /// key.
    Alone,
    /// As [`Planned::Alone`], and after everything before it in whatever table: triggers or rules
    /// of the target's table fire for what we do, and look at other tables. (Those of foreign keys
    /// do that in ways that are known: [`crate::postgres::foreign_keys::Place`].)
    InOrder,
}

/// How changes of `target` are to be written. Holds until the table's triggers change.
pub async fn plan(session: &mut Session, target: &TargetRelation) -> Result<Planned, ApplyError> {
    let columns = &target.relation.columns;
    let whole_old_rows = target.relation.identity == ReplicaIdentity::Full;
    let mut key: Vec<usize> = match target.relation.identity {
        ReplicaIdentity::Default | ReplicaIdentity::Index => {
            (0..columns.len()).filter(|number| columns[*number].key).collect()
        }
        ReplicaIdentity::Full => target.primary_key.clone(),
        ReplicaIdentity::Nothing => Vec::new(),
    };
    let verbatim = columns.len() == target.columns.len()
        && target.touchable().is_some()
        && target.columns.iter().enumerate().all(|(number, on_target)| {
            let may_be_set = key.is_empty() || key.contains(&number) || !on_target.identity_always;
            target.value_plan(number).is_verbatim() && may_be_set
        });
    let rows = session
        .query(
            &format!("WITH own AS (SELECT pg_catalog.to_regclass($1) AS oid), \
             tables AS (SELECT oid FROM own UNION \
               SELECT p.relid FROM own CROSS JOIN LATERAL {} p) \
             SELECT a.attname, \
               CASE WHEN t.typtype = 'c' OR b.typtype IN ('c', 'd') THEN 0 ELSE t.typarray END, \
               EXISTS (SELECT FROM pg_catalog.pg_trigger g JOIN tables ON g.tgrelid = tables.oid \
                 JOIN pg_catalog.pg_proc f ON f.oid = g.tgfoid \
                 WHERE CASE pg_catalog.current_setting('session_replication_role') \
                   WHEN 'replica' THEN g.tgenabled IN ('A', 'R') \
                   ELSE g.tgenabled IN ('A', 'O') AND NOT (g.tgisinternal \
                     AND f.pronamespace = 'pg_catalog'::pg_catalog.regnamespace \
                     AND (f.proname LIKE 'RI\\_FKey\\_%' OR f.proname = 'unique_key_recheck')) END) \
               OR EXISTS (SELECT FROM pg_catalog.pg_rewrite r JOIN tables ON r.ev_class = tables.oid \
                 WHERE r.ev_type <> '1'), \
               a.attgenerated <> '', t.typreceive <> 0 \
             FROM own JOIN pg_catalog.pg_attribute a ON a.attrelid = own.oid AND a.attnum > 0 \
               AND NOT a.attisdropped \
             JOIN pg_catalog.pg_type t ON t.oid = a.atttypid \
             LEFT JOIN pg_catalog.pg_type b ON t.typtype = 'd' AND b.oid = t.typbasetype", partition_tree("own.oid")),
            &[Some(&target.table.to_string())],
        )
        .await?;
    if rows.iter().any(|row| row.get(2) != Some("f")) {
        return Ok(Planned::InOrder);
    }
    if !verbatim || columns.is_empty() {
        return Ok(Planned::Alone);
    }
    let mut types = Vec::new();
    for on_target in &target.columns {
        let row = rows.iter().find(|row| row.get(0) == Some(on_target.name.as_str()));
        if row.is_none_or(|row| row.get(4) != Some("t")) {
            return Ok(Planned::Alone);
        }
        let array = row.and_then(|row| row.parse(1).ok()).unwrap_or(0);
        types.push(ColumnTypes { element: on_target.type_oid, array });
    }
    // Keys travel as arrays.
    if !whole_old_rows && key.iter().any(|number| types[*number].array == 0) {
        key.clear();
    }
    let writable = rows.iter().filter(|row| row.get(3) != Some("t")).count();
    Ok(Planned::Batch(BatchPlan {
        key,
        whole_old_rows,
        own_columns_on_target: writable > target.columns.len(),
        columns: types,
    }))
}

impl BatchPlan {
    /// The target's type of a column.
    pub fn element_type(&self, column: usize) -> u32 {
        self.columns.get(column).map_or(0, |types| types.element)
    }

    /// Whether many values of each of these columns fit into one parameter. Not so for columns that
    /// are arrays themselves, or composites: an array of them would come apart into elements or
    /// fields.
    pub fn have_arrays(&self, columns: &[usize]) -> bool {
        columns.iter().all(|column| self.columns.get(*column).is_some_and(|t| t.array != 0))
    }

    /// The target's types of arrays of these columns.
    pub fn array_types(&self, columns: &[usize]) -> Vec<u32> {
        columns.iter().map(|column| self.columns.get(*column).map_or(0, |t| t.array)).collect()
    }

    /// COPY of whole rows.
    pub fn copy_sql(&self, target: &TargetRelation) -> String {
        let names: Vec<String> =
            target.relation.columns.iter().map(|column| quote_identifier(&column.name)).collect();
        format!("COPY {} ({}) FROM STDIN (FORMAT binary)", target.table, names.join(", "))
    }

    /// Gives one row without columns when the table's columns are of the types they were.
    pub fn types_sql(&self, target: &TargetRelation) -> String {
        let columns: Vec<String> = target
            .columns
            .iter()
            .map(|column| format!("({}, {})", quote_literal(&column.name), column.type_oid))
            .collect();
        format!(
            "SELECT WHERE {} = (SELECT pg_catalog.count(*) FROM pg_catalog.pg_attribute a \
             JOIN (VALUES {}) AS w (name, type) ON a.attname = w.name AND a.atttypid = w.type \
             WHERE a.attrelid = {}::pg_catalog.regclass AND a.attnum > 0)",
            columns.len(),
            columns.join(", "),
            quote_literal(&target.table.to_string())
        )
    }

    /// DELETE by arrays of the columns in [`BatchPlan::identity`].
    pub fn delete_sql(&self, target: &TargetRelation) -> String {
        let rows = target.rows_of_its_own();
        if let ([column], false) = (self.key.as_slice(), self.whole_old_rows) {
            let name = quote_identifier(&target.relation.columns[*column].name);
            let equals = &target.columns[*column].equals;
            return format!("DELETE FROM {rows} WHERE {name} {equals} ANY ($1)");
        }
        let mut arrays = Unnest::default();
        let identity = arrays.add('i', &self.identity());
        let condition = self.condition(target, &identity);
        format!("DELETE FROM {rows} AS t USING {} WHERE {condition}", arrays.sql())
    }

    /// UPDATE by arrays: the new values of `set`, then the columns in [`BatchPlan::identity`].
    pub fn update_sql(&self, target: &TargetRelation, set: &[usize]) -> String {
        let name = |column: usize| quote_identifier(&target.relation.columns[column].name);
        let mut arrays = Unnest::default();
        let values = arrays.add('v', set);
        let identity = arrays.add('i', &self.identity());
        let assignments: Vec<String> = if set.is_empty() {
            // Nothing has a new value: touch the row, so that a missing one is noticed.
            target.touchable().map(|c| format!("{0} = t.{0}", name(c))).into_iter().collect()
        } else {
            values.iter().map(|(column, value)| format!("{} = {value}", name(*column))).collect()
        };
        format!(
            "UPDATE {} AS t SET {} FROM {} WHERE {}",
            target.rows_of_its_own(),
            assignments.join(", "),
            arrays.sql(),
            self.condition(target, &identity)
        )
    }

    /// Columns whose values say which row is meant, ascending.
    pub fn identity(&self) -> Vec<usize> {
        if self.whole_old_rows { (0..self.columns.len()).collect() } else { self.key.clone() }
    }

    /// Finds a row `t` by what stands for each column of its identity.
    fn condition(&self, target: &TargetRelation, identity: &[(usize, String)]) -> String {
        let name = |column: usize| {
            format!("t.{}", quote_identifier(&target.relation.columns[column].name))
        };
        let mut terms: Vec<String> = identity
            .iter()
            .filter(|(column, _)| self.key.contains(column))
            .map(|(column, value)| {
                format!("{} {} {value}", name(*column), target.columns[*column].equals)
            })
            .collect();
        if self.whole_old_rows {
            // As row by row: by image.
            let names: Vec<String> = identity.iter().map(|(column, _)| name(*column)).collect();
            let values: Vec<&str> = identity.iter().map(|(_, value)| value.as_str()).collect();
            terms.push(format!(
                "ROW({})::pg_catalog.record OPERATOR(pg_catalog.*=) ROW({})",
                names.join(", "),
                values.join(", ")
            ));
        }
        terms.join(" AND ")
    }
}

/// Arrays side by side as rows `s`. (With its schema before it, `unnest` takes one array only.)
#[derive(Default)]
struct Unnest {
    names: Vec<String>,
}

impl Unnest {
    /// One more array for each column; returns what stands for the columns.
    fn add(&mut self, prefix: char, columns: &[usize]) -> Vec<(usize, String)> {
        self.names.extend(columns.iter().map(|column| format!("{prefix}{column}")));
        columns.iter().map(|column| (*column, format!("s.{prefix}{column}"))).collect()
    }

    fn sql(&self) -> String {
        let parameters: Vec<String> = (1..=self.names.len()).map(|n| format!("${n}")).collect();
        format!("unnest({}) AS s ({})", parameters.join(", "), self.names.join(", "))
    }
}
