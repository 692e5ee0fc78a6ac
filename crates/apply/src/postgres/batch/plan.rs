//! Whether changes of a relation version may be written in bulk, and the SQL for it.

use crate::ApplyError;
use crate::postgres::session::Session;
use crate::postgres::statements::TargetRelation;
use crate::postgres::target_table::names;
use farshore_capture::publication::TableName;
use farshore_model::{ReplicaIdentity, quote_identifier};
use farshore_pg::{Row, partition_tree};

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
    /// Rows that are updated or deleted are named in the order of their keys, which is how an index
    /// has them, and not in the order in which they came. Only where the key is the target's primary
    /// key and nothing else is unique: values could be in each other's way.
    pub by_key: bool,
    columns: Vec<ColumnTypes>,
    /// The table's rows as a type, where values can travel in it.
    pub(super) row: Option<RowType>,
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

/// What the target's catalogs say of a table on which it depends how changes are written. Holds
/// until the table's triggers change.
#[derive(Clone, Debug, Default)]
pub struct TableFacts {
    /// Triggers or rules fire for what we do, or nothing is known of the table.
    fires: bool,
    /// It, or a partition of it, has unique or exclusion constraints beside its primary key.
    more_unique: bool,
    /// Columns of which no two rows have the same values, beside its primary key.
    unique: Vec<Vec<String>>,
    /// The types of its rows and of arrays of them, 0 if there are none.
    row: u32,
    rows: u32,
    /// In the order that they have in a row.
    columns: Vec<ColumnFacts>,
}

#[derive(Clone, Debug)]
struct ColumnFacts {
    name: String,
    /// 0 where values do not travel as an array.
    array: u32,
    generated: bool,
    /// Its type has a receive function.
    takes_binary: bool,
    type_oid: u32,
    /// Its type is a domain, which may refuse NULL.
    domain: bool,
}

/// Asks what it depends on how changes of `tables` are written, with one question for all.
pub async fn look_at_tables(
    session: &mut Session,
    tables: &[TableName],
) -> Result<Vec<TableFacts>, ApplyError> {
    let rows = session.query(&facts_question(), &[Some(&names(tables))]).await?;
    facts_answer(session, tables.len(), &rows)
}

/// What [`look_at_tables`] asks; its parameter are the tables' names.
pub(in crate::postgres) fn facts_question() -> String {
    format!(
        "WITH own AS MATERIALIZED (SELECT w.number, w.oid, \
                 EXISTS (SELECT FROM {partitions} p \
                   JOIN pg_catalog.pg_trigger g ON g.tgrelid = p.relid \
                   JOIN pg_catalog.pg_proc f ON f.oid = g.tgfoid \
                   WHERE CASE pg_catalog.current_setting('session_replication_role') \
                     WHEN 'replica' THEN g.tgenabled IN ('A', 'R') \
                     ELSE g.tgenabled IN ('A', 'O') AND NOT (g.tgisinternal \
                       AND f.pronamespace = 'pg_catalog'::pg_catalog.regnamespace \
                       AND (f.proname LIKE 'RI\\_FKey\\_%' OR f.proname = 'unique_key_recheck')) END) \
                 OR EXISTS (SELECT FROM {partitions} p \
                   JOIN pg_catalog.pg_rewrite r ON r.ev_class = p.relid \
                   WHERE r.ev_type <> '1') AS fires, \
                 EXISTS (SELECT FROM {partitions} p \
                   JOIN pg_catalog.pg_index i ON i.indrelid = p.relid \
                   WHERE (i.indisunique OR i.indisexclusion) AND NOT i.indisprimary) \
                 AS more_unique, \
                 (SELECT string_agg(u.columns, chr(2)) FROM ( \
                   SELECT (SELECT string_agg(a.attname, chr(1)) FROM pg_catalog.pg_attribute a \
                     WHERE a.attrelid = i.indrelid \
                     AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])) AS columns \
                   FROM pg_catalog.pg_index i WHERE i.indrelid = w.oid AND i.indisunique \
                   AND i.indimmediate AND i.indisvalid AND i.indpred IS NULL \
                   AND i.indexprs IS NULL AND NOT {finer}) AS u) AS unique_columns \
               FROM (SELECT number, pg_catalog.to_regclass(name)::pg_catalog.oid AS oid \
                 FROM unnest($1::text::text[]) WITH ORDINALITY AS named (name, number)) AS w) \
             SELECT own.number - 1, own.fires, a.attname, \
               CASE WHEN t.typtype = 'c' OR b.typtype IN ('c', 'd') THEN 0 ELSE t.typarray END, \
               a.attgenerated <> '', t.typreceive <> 0, own.more_unique, \
               a.atttypid, t.typtype = 'd', c.reltype, r.typarray, own.unique_columns \
             FROM own JOIN pg_catalog.pg_attribute a ON a.attrelid = own.oid AND a.attnum > 0 \
               AND NOT a.attisdropped \
             JOIN pg_catalog.pg_type t ON t.oid = a.atttypid \
             LEFT JOIN pg_catalog.pg_type b ON t.typtype = 'd' AND b.oid = t.typbasetype \
             JOIN pg_catalog.pg_class c ON c.oid = own.oid \
             LEFT JOIN pg_catalog.pg_type r ON r.oid = c.reltype \
             ORDER BY own.number, a.attnum",
        partitions = partition_tree("w.oid"),
        finer = TELLS_MORE_APART
    )
}

/// Whether an index `i` tells values apart that its columns' `=`, by which rows are found, does not:
/// by another collation than that of a column whose own is not deterministic, or by an operator
/// class that is not the type's own (but for those of patterns, which compare byte by byte).
const TELLS_MORE_APART: &str = "EXISTS (SELECT FROM \
     unnest((i.indkey::int2[])[0:i.indnkeyatts - 1], i.indclass::pg_catalog.oid[], \
       i.indcollation::pg_catalog.oid[]) AS k (attnum, class, collated) \
     JOIN pg_catalog.pg_attribute ka ON ka.attrelid = i.indrelid AND ka.attnum = k.attnum \
     JOIN pg_catalog.pg_type kt ON kt.oid = ka.atttypid \
     JOIN pg_catalog.pg_opclass o ON o.oid = k.class \
     WHERE (k.collated <> ka.attcollation AND EXISTS (SELECT FROM pg_catalog.pg_collation c \
       WHERE c.oid = ka.attcollation AND NOT c.collisdeterministic)) \
     OR (NOT o.opcdefault AND o.opcname !~ '(pattern|varchar)_ops$') \
     OR EXISTS (SELECT FROM pg_catalog.pg_opclass own WHERE own.opcdefault \
       AND own.opcmethod = o.opcmethod AND own.oid <> o.oid \
       AND own.opcintype IN (kt.oid, kt.typbasetype)))";

/// The answer to [`facts_question`], of so many tables.
pub(in crate::postgres) fn facts_answer(
    session: &Session,
    tables: usize,
    rows: &[Row],
) -> Result<Vec<TableFacts>, ApplyError> {
    let mut facts = vec![TableFacts::default(); tables];
    for row in rows {
        let number: usize = row.parse(0).map_err(|error| session.error(error))?;
        let Some(facts) = facts.get_mut(number) else { continue };
        facts.fires |= row.get(1) != Some("f");
        facts.more_unique |= row.get(6) != Some("f");
        facts.row = row.parse(9).unwrap_or(0);
        facts.rows = row.parse(10).unwrap_or(0);
        if facts.columns.is_empty() {
            let unique = row.get(11).into_iter().flat_map(|all| all.split('\u{2}'));
            let names = |columns: &str| columns.split('\u{1}').map(str::to_owned).collect();
            facts.unique = unique.map(names).collect();
        }
        facts.columns.push(ColumnFacts {
            name: row.get(2).unwrap_or_default().to_owned(),
            array: row.parse(3).unwrap_or(0),
            generated: row.get(4) == Some("t"),
            takes_binary: row.get(5) == Some("t"),
            type_oid: row.parse(7).unwrap_or(0),
            domain: row.get(8) != Some("f"),
        });
    }
    Ok(facts)
}

impl TableFacts {
    /// Whether no two rows of the target have the same values in these columns. What is deferrable
    /// is not enforced for a session that is a replica.
    fn is_unique(&self, key: &[usize], target: &TargetRelation) -> bool {
        let is_of_key = |name: &String| key.iter().any(|at| target.columns[*at].name == *name);
        self.unique.iter().any(|columns| columns.iter().all(is_of_key))
    }
}

/// How changes of `target` are to be written.
pub fn plan(target: &TargetRelation, facts: &TableFacts) -> Planned {
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
    if facts.fires {
        return Planned::InOrder;
    }
    if !verbatim || columns.is_empty() {
        return Planned::Alone;
    }
    let mut types = Vec::new();
    for on_target in &target.columns {
        match facts.columns.iter().find(|column| column.name == on_target.name) {
            // Of another type: it was altered between two looks.
            Some(column) if column.takes_binary && column.type_oid == on_target.type_oid => {
                types.push(ColumnTypes { element: on_target.type_oid, array: column.array });
            }
            Some(_) | None => return Planned::Alone,
        }
    }
    // A statement for many rows counts them all together: where several rows may have one key, one
    // too many would make up for one that is missing.
    if !facts.is_unique(&key, target) {
        key.clear();
    }
    // Keys travel as arrays.
    if !whole_old_rows && key.iter().any(|number| types[*number].array == 0) {
        key.clear();
    }
    let by_key = !facts.more_unique && key == target.primary_key;
    let writable = facts.columns.iter().filter(|column| !column.generated).count();
    Planned::Batch(BatchPlan {
        key,
        whole_old_rows,
        own_columns_on_target: writable > target.columns.len(),
        by_key,
        columns: types,
        row: RowType::of(target, facts),
    })
}

/// The rows of a table as a type of their own (PostgreSQL docs: "8.16. Composite Types").
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RowType {
    pub oid: u32,
    pub array: u32,
    pub fields: Vec<Field>,
}

/// A column in such a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Field {
    pub name: String,
    pub type_oid: u32,
    /// Which published column it is.
    pub column: Option<usize>,
    /// It may be left NULL where it is not looked at.
    pub may_be_null: bool,
}

impl RowType {
    /// `None` where a row cannot be sent in binary, or the table is not what it was taken for.
    fn of(target: &TargetRelation, facts: &TableFacts) -> Option<RowType> {
        let mut fields = Vec::with_capacity(facts.columns.len());
        for column in &facts.columns {
            let published = target.columns.iter().position(|c| c.name == column.name);
            let is_as_taken =
                published.is_none_or(|number| target.columns[number].type_oid == column.type_oid);
            if !column.takes_binary || !is_as_taken {
                return None;
            }
            fields.push(Field {
                name: column.name.clone(),
                type_oid: column.type_oid,
                column: published,
                may_be_null: !column.domain,
            });
        }
        let is_there = facts.row != 0 && facts.rows != 0;
        is_there.then_some(RowType { oid: facts.row, array: facts.rows, fields })
    }
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
    pub(super) fn condition(
        &self,
        target: &TargetRelation,
        identity: &[(usize, String)],
    ) -> String {
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
            // As row by row: by image, and as the column's modifier fills values up.
            let names: Vec<String> = identity.iter().map(|(column, _)| name(*column)).collect();
            let as_assigned = |(column, value): &(usize, String)| match &target.columns[*column] {
                on_target if on_target.type_modifier >= 0 => {
                    format!("{value}::{}", on_target.declared_type)
                }
                _ => value.clone(),
            };
            let values: Vec<String> = identity.iter().map(as_assigned).collect();
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
