//! SQL for row changes on one version of one relation.

use crate::postgres::pipeline::Statement;
use crate::postgres::target_table::{Misfit, TargetColumn, TargetTable, rows_of_its_own};
use crate::postgres::value_plan::{ColumnType, ValuePlan};
use farshore_capture::publication::TableName;
use farshore_model::{Lsn, Relation, ReplicaIdentity, quote_identifier};
use farshore_wire::pgoutput::{Tuple, Value};
use std::collections::HashMap;
use std::sync::Arc;

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
    /// The target's OID of it, and what it was when it was looked up
    /// ([`crate::postgres::target_table::UNALTERED`]).
    pub as_seen: (u32, String),
    /// The target's table is partitioned: its rows are in other tables.
    pub partitioned: bool,
    /// [`TargetTable::takes_returning`].
    takes_returning: bool,
    /// A foreign key of the target may delete rows of its own accord, before their DELETE comes.
    pub cascaded: bool,
    /// A foreign key of the target deletes or empties what refers to a row that is deleted.
    pub loses_children: bool,
    /// The target's columns, by the publisher's column numbers.
    pub columns: Vec<TargetColumn>,
    /// The target's primary key, by the publisher's column numbers, ascending; empty when it has
    /// none, or one that is not all published.
    pub primary_key: Vec<usize>,
    /// How values get into them, by the publisher's column numbers.
    plans: Vec<ValuePlan>,
    /// Prepared statements by shape, and by who sees whether just one row was met.
    pub prepared: HashMap<(Shape, SeenBy), Prepared>,
}

/// How like its whole old values (`REPLICA IDENTITY FULL`) the row must be that they find. All but the
/// first need a primary key on the target that is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Likeness {
    /// In every byte.
    Image,
    /// In what is shown: equal values may have several images (a NaN with a sign, an array with a
    /// bitmap of NULLs that it no longer needs, a row that was written before its type got another
    /// attribute), and of one in text the image is not known.
    Shown,
    /// In the primary key.
    Key,
}

/// Who sees whether a change has met just one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SeenBy {
    /// We do, by the statement's answer, before the COMMIT is sent.
    Us,
    /// The target does: the statement fails, and what was sent behind it is passed over.
    Target,
}

/// Begins what a statement says that fails because it has met another number of rows.
pub const ROWS_MET: &str = "rows that a change of a Farshore subscription has met: ";

/// SQLSTATE of that: invalid_text_representation.
pub const ROWS_MET_FAILED: &str = "22P02";

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
        let (partitioned, takes_returning) = (target.partitioned, target.takes_returning);
        let as_seen = (target.oid, target.stamp.clone());
        Ok(TargetRelation {
            relation,
            table,
            copied_at,
            as_seen,
            partitioned,
            takes_returning,
            cascaded: false,
            loses_children: false,
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
            as_seen: (0, String::new()),
            partitioned: false,
            takes_returning: false,
            cascaded: false,
            loses_children: false,
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
        let (sql, types, _) = self.sql_by(shape, Likeness::Image);
        (sql, types)
    }

    /// As [`TargetRelation::sql`], with a look at how many rows it meets.
    pub fn sql_seen_by(&self, shape: &Shape, seen_by: SeenBy) -> (String, Vec<u32>) {
        let (sql, types) = self.sql(shape);
        match seen_by {
            SeenBy::Us => (sql, types),
            SeenBy::Target => {
                let sql = format!(
                    "WITH met AS ({sql} RETURNING 1) SELECT CASE count(*) WHEN 1 THEN 1 \
                     ELSE ('{ROWS_MET}' || count(*))::int END FROM met"
                );
                (sql, types)
            }
        }
    }

    /// Who may see whether a change of this shape has met just one row. WITH takes no statement
    /// that has one itself.
    pub fn may_be_seen_by(&self, shape: &Shape) -> SeenBy {
        let (set, _) = self.parameters(shape);
        let is_plain = match shape {
            Shape::Insert => true,
            // What stands in the way is a row that is deleted and inserted, or only locked.
            Shape::Update { .. } => {
                let is_set = !set.is_empty() || self.touchable().is_some();
                is_set && !set.iter().any(|c| self.columns[*c].identity_always)
            }
            // One that is gone already is no matter then.
            Shape::Delete => !self.cascaded,
        };
        if is_plain && self.takes_returning { SeenBy::Target } else { SeenBy::Us }
    }

    /// As [`TargetRelation::sql`], for a row that is known by its whole old values and need not be
    /// like them in every byte; and the columns whose identifying values are the last parameters.
    pub fn sql_by(&self, shape: &Shape, likeness: Likeness) -> (String, Vec<u32>, Vec<usize>) {
        let mut types = Vec::new();
        let mut parameter = |column: usize| {
            types.push(self.parameter_type(column));
            format!("${}", types.len())
        };
        let name = |column: usize| quote_identifier(&self.relation.columns[column].name);
        let (set, mut find) = self.parameters(shape);
        let likeness = if self.lacks_old_row(shape) { Likeness::Key } else { likeness };
        if likeness == Likeness::Key {
            find.clone_from(&self.primary_key);
        }
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
                let condition = self.condition(&find, likeness, &mut parameter);
                let mut assignments: Vec<String> = set
                    .iter()
                    .zip(&values)
                    .filter(|(c, _)| !self.columns[**c].identity_always)
                    .map(|(c, v)| format!("{} = {v}", name(*c)))
                    .collect();
                // Nothing but the key has a value, and it is the same: touch the row, so that a
                // missing one is noticed.
                if assignments.is_empty() {
                    let touched = self.touchable();
                    assignments.extend(touched.map(|c| format!("{0} = {0}", name(c))));
                }
                let rows = self.rows_of_its_own();
                let plain = (!assignments.is_empty())
                    .then(|| format!("UPDATE {rows} SET {}", assignments.join(", ")));
                let cannot_be_set = set.iter().any(|c| self.columns[*c].identity_always);
                match (cannot_be_set, plain) {
                    (true, plain) => self.replace(&set, &values, plain, &condition),
                    (false, Some(plain)) => format!("{plain} WHERE {condition}"),
                    (false, None) => format!("SELECT FROM {rows} WHERE {condition} FOR UPDATE"),
                }
            }
            Shape::Delete => {
                let condition = self.condition(&find, likeness, &mut parameter);
                format!("DELETE FROM {} WHERE {condition}", self.rows_of_its_own())
            }
        };
        (text, types, find)
    }

    /// The type OID that a column's value is sent with, 0 where the target must decide.
    pub fn parameter_type(&self, column: usize) -> u32 {
        self.value_plan(column).parameter_type()
    }

    /// The condition that finds the row by its identifying values, and their type OIDs.
    pub fn identified(&self) -> (String, Vec<u32>) {
        let (_, find) = self.parameters(&Shape::Delete);
        self.found_by(&find, Likeness::Image)
    }

    /// The condition that finds the row by its primary key alone, and the type OIDs of that.
    pub fn identified_by_key(&self) -> (String, Vec<u32>) {
        self.found_by(&self.primary_key, Likeness::Key)
    }

    fn found_by(&self, find: &[usize], likeness: Likeness) -> (String, Vec<u32>) {
        let mut types = Vec::new();
        let condition = self.condition(find, likeness, &mut |column| {
            types.push(self.parameter_type(column));
            format!("${}", types.len())
        });
        (condition, types)
    }

    /// Rows are found by all of their old values.
    pub fn is_found_by_image(&self) -> bool {
        self.relation.identity == ReplicaIdentity::Full
    }

    /// An update of a row that is to be found by all of its old values, none of which came: it lies
    /// in a partition whose replica identity is not its root's `FULL`, and the identity there is
    /// what it was. It is found by the target's primary key.
    pub fn lacks_old_row(&self, shape: &Shape) -> bool {
        self.is_found_by_image() && matches!(shape, Shape::Update { old_given: false, .. })
    }

    /// A change of a row that nothing which was sent tells from others.
    pub fn lacks_identity(&self, shape: &Shape) -> bool {
        let has_key = || self.relation.columns.iter().any(|column| column.key);
        *shape != Shape::Insert && !self.is_found_by_image() && !has_key()
    }

    /// Whether an update that [lacks its old row](TargetRelation::lacks_old_row) finds it all the
    /// same: by a primary key whose values came.
    pub fn finds_without_old_row(&self, shape: &Shape) -> bool {
        let (_, find) = self.parameters(shape);
        let came = |c: &usize| match shape {
            Shape::Update { unchanged, .. } => has_value(unchanged, *c),
            Shape::Insert | Shape::Delete => true,
        };
        !find.is_empty() && find.iter().all(came)
    }

    /// Whether an old row that should be whole may have no more than the key of a partition: the
    /// publisher sends NULL for the rest, of such a partition as of `lacks_old_row`.
    pub fn is_like_a_key(&self, old: Tuple<'_>) -> bool {
        let is_of_key = |column: &usize| self.primary_key.contains(column);
        let nulls = old.values().enumerate().filter(|(_, value)| *value == Value::Null);
        let nulls: Vec<usize> = nulls.map(|(column, _)| column).collect();
        let are_all_others = nulls.len() + self.primary_key.len() >= self.columns.len();
        !nulls.is_empty()
            && (self.primary_key.is_empty() || are_all_others || nulls.iter().any(is_of_key))
    }

    /// Whether the row's primary key on the target is in an old row.
    pub fn has_primary_key(&self, old: Tuple<'_>) -> bool {
        let mut values = old.values().enumerate();
        !values.any(|(column, value)| value == Value::Null && self.primary_key.contains(&column))
    }

    /// The table without the tables that inherit from it, which are published by themselves.
    pub fn rows_of_its_own(&self) -> String {
        rows_of_its_own(&self.table, self.partitioned)
    }

    /// An update of columns that SQL's UPDATE cannot set (`GENERATED ALWAYS AS IDENTITY`): the row is
    /// taken out and put back, without what the target alone has of it. So where they are what they
    /// were, they are left alone: then `plain` sets the rest. One statement, so it counts as one row
    /// like any other change.
    fn replace(
        &self,
        set: &[usize],
        values: &[String],
        plain: Option<String>,
        condition: &str,
    ) -> String {
        let (mut names, mut sources) = (Vec::new(), Vec::new());
        for (number, column) in self.relation.columns.iter().enumerate() {
            let name = quote_identifier(&column.name);
            let position = set.iter().position(|c| *c == number);
            sources.push(position.map_or_else(|| format!("old.{name}"), |at| values[at].clone()));
            names.push(name);
        }
        let rows = self.rows_of_its_own();
        let insert = format!(
            "INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE SELECT {} FROM old",
            self.table,
            names.join(", "),
            sources.join(", ")
        );
        let cannot_be_set =
            || set.iter().zip(values).filter(|(c, _)| self.columns[**c].identity_always);
        let are_same: Vec<String> = cannot_be_set()
            .map(|(c, value)| {
                let TargetColumn { type_name, equals, .. } = &self.columns[*c];
                format!("{} {equals} {value}::{type_name}", names[*c])
            })
            .collect();
        let are_same = format!("({})", are_same.join(" AND "));
        if self.loses_children {
            let column =
                cannot_be_set().map(|(c, _)| names[*c].as_str()).next().unwrap_or_default();
            let remedy = format!(
                "{column} is GENERATED ALWAYS, so a row is taken out and put back to change it, and a \
                 foreign key would delete or empty what refers to the row. On the target: ALTER TABLE \
                 {} ALTER COLUMN {column} SET GENERATED BY DEFAULT",
                self.table
            );
            // The server says it, where there is such a row: a column's value beside it keeps it from
            // being worked out before.
            let refusal = format!(
                "SELECT pg_catalog.concat({}, ' (', {column}, ')')::pg_catalog.int4 FROM {rows} \
                 WHERE {condition}",
                farshore_pg::quote_literal(&remedy)
            );
            let stop = format!("{refusal} AND NOT {are_same}");
            return match plain {
                Some(plain) if self.takes_returning => format!(
                    "WITH same AS ({plain} WHERE {condition} AND {are_same} RETURNING 1) \
                     SELECT 1 FROM same UNION ALL {stop}"
                ),
                // That would take the row out whatever changes.
                Some(_) => refusal,
                None => format!(
                    "SELECT 1 FROM {rows} WHERE {condition} AND {are_same} UNION ALL {stop}"
                ),
            };
        }
        // A table whose rules rewrite an update into several takes it in no WITH.
        let Some(plain) = plain.filter(|_| self.takes_returning) else {
            return format!(
                "WITH old AS (DELETE FROM {rows} WHERE {condition} RETURNING *) {insert}"
            );
        };
        format!(
            "WITH same AS ({plain} WHERE {condition} AND {are_same} RETURNING 1), \
             old AS (DELETE FROM {rows} WHERE {condition} AND NOT {are_same} RETURNING *), \
             put AS ({insert} RETURNING 1) \
             SELECT 1 FROM same UNION ALL SELECT 1 FROM put"
        )
    }

    /// What stands beside an operator and a column, for a parameter that has the column's value.
    pub fn operand(&self, column: usize, parameter: String) -> String {
        let TargetColumn { type_name, base_name, .. } = &self.columns[column];
        match self.value_plan(column) {
            ValuePlan::Verbatim { from } if from != 0 => parameter,
            // Beside an operator of composite types the server takes a parameter for any record,
            // which has no input.
            ValuePlan::Verbatim { .. } => format!("{parameter}::{base_name}"),
            ValuePlan::Cast { .. } => format!("{parameter}::{type_name}"),
        }
    }

    fn condition(
        &self,
        find: &[usize],
        likeness: Likeness,
        parameter: &mut impl FnMut(usize) -> String,
    ) -> String {
        let name = |column: usize| quote_identifier(&self.relation.columns[column].name);
        if self.relation.identity != ReplicaIdentity::Full {
            let mut terms = Vec::new();
            for column in find {
                let value = self.operand(*column, parameter(*column));
                terms.push(format!("{} {} {value}", name(*column), self.columns[*column].equals));
            }
            return terms.join(" AND ");
        }
        // The whole old row. Compared by image (`*=`), so that 1.0 is not 1.00, NULL is NULL, and
        // types without an equality operator will do; the target's primary key, if it has one,
        // finds the row fast; and of rows that are equal in every byte just one is meant. Cast as
        // an assignment does, with the modifier: what it fills up (digits, blanks) is in the image.
        let (mut names, mut values, mut terms) = (Vec::new(), Vec::new(), Vec::new());
        for column in find {
            let value = format!("{}::{}", parameter(*column), self.columns[*column].declared_type);
            if self.columns[*column].primary_key {
                terms.push(format!("{} {} {value}", name(*column), self.columns[*column].equals));
            }
            if likeness == Likeness::Shown && !self.columns[*column].primary_key {
                let name = name(*column);
                terms.push(format!("({name})::text IS NOT DISTINCT FROM ({value})::text"));
            }
            names.push(name(*column));
            values.push(value);
        }
        if likeness != Likeness::Image {
            return terms.join(" AND ");
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
        let keys: Vec<usize> = if self.lacks_old_row(shape) {
            self.primary_key.clone()
        } else {
            columns.clone().filter(|c| self.relation.columns[*c].key).collect()
        };
        match shape {
            Shape::Insert => (columns.collect(), Vec::new()),
            Shape::Delete => (Vec::new(), keys),
            Shape::Update { old_given, unchanged } => {
                let set = columns
                    .filter(|c| {
                        // Without an old tuple the key is what it was.
                        has_value(unchanged, *c) && (*old_given || !keys.contains(c))
                    })
                    .collect();
                (set, keys)
            }
        }
    }
}

/// Whether an update has a value for a column.
fn has_value(unchanged: &[u64], column: usize) -> bool {
    unchanged.get(column / 64).is_none_or(|word| word & (1 << (column % 64)) == 0)
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
            declared_type: "integer".into(),
            base_name: "integer".into(),
            equals: "=".into(),
            generated: false,
            virtual_: false,
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
        let there =
            TargetTable { columns: columns_there, takes_returning: true, ..TargetTable::default() };
        TargetRelation::new(Arc::new(relation), table, Lsn::ZERO, there).unwrap()
    }

    fn update(old_given: bool, unchanged: u64) -> Shape {
        let unchanged = if unchanged == 0 { vec![] } else { vec![unchanged] };
        Shape::Update { old_given, unchanged }
    }

    #[test]
    fn the_target_sees_how_many_rows_a_plain_change_meets() {
        let mut keyed = relation(ReplicaIdentity::Default, &[true, false, false]);
        let (sql, types) = keyed.sql_seen_by(&Shape::Delete, SeenBy::Target);
        let wanted = "WITH met AS (DELETE FROM ONLY s.\"order\" WHERE c0 = $1 RETURNING 1) \
            SELECT CASE count(*) WHEN 1 THEN 1 ELSE ('rows that a change of a Farshore \
            subscription has met: ' || count(*))::int END FROM met";
        assert_eq!((sql.as_str(), types), (wanted, vec![23]));
        let seen_by = |relation: &TargetRelation| {
            [Shape::Insert, update(false, 0), Shape::Delete].map(|s| relation.may_be_seen_by(&s))
        };
        assert_eq!(seen_by(&keyed), [SeenBy::Target; 3]);
        keyed.cascaded = true;
        assert_eq!(seen_by(&keyed), [SeenBy::Target, SeenBy::Target, SeenBy::Us]);
        keyed.columns[1].identity_always = true;
        assert_eq!(seen_by(&keyed), [SeenBy::Target, SeenBy::Us, SeenBy::Us]);
        keyed.takes_returning = false;
        assert_eq!(seen_by(&keyed), [SeenBy::Us; 3]);
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
    fn old_values_of_a_full_identity_are_filled_up_as_the_target_has_them() {
        let mut full = relation(ReplicaIdentity::Full, &[true]);
        full.columns[0].declared_type = "numeric(12,4)".into();
        let sql = full.sql(&Shape::Delete).0;
        assert!(sql.contains("OPERATOR(pg_catalog.*=) ROW($1::numeric(12,4))"), "{sql}");
        full.columns[0].primary_key = true;
        full.primary_key = vec![0];
        let (sql, _, _) = full.sql_by(&Shape::Delete, Likeness::Key);
        assert_eq!(sql, "DELETE FROM ONLY s.\"order\" WHERE c0 = $1::numeric(12,4)");
    }

    #[test]
    fn a_full_identity_without_an_old_row_goes_by_the_primary_key() {
        let mut full = relation(ReplicaIdentity::Full, &[true, true, true]);
        assert!(!full.finds_without_old_row(&update(false, 0)));
        full.columns[1].primary_key = true;
        full.primary_key = vec![1];
        assert!(full.lacks_old_row(&update(false, 0)) && !full.lacks_old_row(&update(true, 0)));
        assert_eq!(
            full.sql(&update(false, 0b100)),
            ("UPDATE ONLY s.\"order\" SET c0 = $1 WHERE c1 = $2::integer".into(), vec![23, 23])
        );
        assert_eq!(full.parameters(&update(false, 0b100)), (vec![0], vec![1]));
        assert!(full.finds_without_old_row(&update(false, 0b100)));
        assert!(!full.finds_without_old_row(&update(false, 0b010)));
    }

    #[test]
    fn an_identity_column_is_replaced_with_its_row() {
        let mut keyed = relation(ReplicaIdentity::Default, &[true, false, false]);
        keyed.columns[1].identity_always = true;
        assert_eq!(
            keyed.sql(&update(false, 0)).0,
            "WITH same AS (UPDATE ONLY s.\"order\" SET c2 = $2 WHERE c0 = $3 AND (c1 = $1::integer) \
             RETURNING 1), old AS (DELETE FROM ONLY s.\"order\" WHERE c0 = $3 AND NOT (c1 = \
             $1::integer) RETURNING *), put AS (INSERT INTO s.\"order\" (c0, c1, c2) OVERRIDING \
             SYSTEM VALUE SELECT old.c0, $1, $2 FROM old RETURNING 1) \
             SELECT 1 FROM same UNION ALL SELECT 1 FROM put"
        );
        // All of them are what they were, or the row is replaced.
        let mut two = relation(ReplicaIdentity::Default, &[true, false, false, false]);
        (two.columns[1].identity_always, two.columns[2].identity_always) = (true, true);
        let sql = two.sql(&update(false, 0)).0;
        assert!(sql.contains("AND NOT (c1 = $1::integer AND c2 = $2::integer)"), "{sql}");
        // With rules.
        keyed.takes_returning = false;
        assert_eq!(
            keyed.sql(&update(false, 0b100)).0,
            "WITH old AS (DELETE FROM ONLY s.\"order\" WHERE c0 = $2 RETURNING *) \
             INSERT INTO s.\"order\" (c0, c1, c2) OVERRIDING SYSTEM VALUE \
             SELECT old.c0, $1, old.c2 FROM old"
        );
    }
}
