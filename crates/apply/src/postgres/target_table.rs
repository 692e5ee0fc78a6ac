//! What is known of a table on the target, and how values of the publisher's get into it.

use crate::ApplyError;
use crate::postgres::session::Session;
use crate::postgres::value_plan::{ColumnType, Loss, ValuePlan, built_in_base, value_plan};
use crate::remedy;
use farshore_capture::publication::{PublishedColumn, PublishedTable, TableName};
use farshore_capture::source::HashedAs;
use farshore_capture::types::TypeCatalog;
use farshore_model::{UserType, quote_identifier};
use farshore_pg::{Question, Row, text_array};
use std::collections::BTreeMap;

/// A table on the target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetTable {
    /// Its OID.
    pub oid: u32,
    /// What its columns and triggers are: another when one was altered ([`UNALTERED`]).
    pub stamp: String,
    /// Partitioned: its rows are in other tables.
    pub partitioned: bool,
    /// What changes it may be part of a WITH, and give back the rows: it has no rewrite rules, and
    /// no part of it is in another server.
    pub takes_returning: bool,
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
    /// The type with its modifier, as SQL names it.
    pub declared_type: String,
    /// The type below all domains, as SQL names it.
    pub base_name: String,
    /// The type's equality operator as SQL names it: extensions keep theirs in their own schema,
    /// and our `search_path` is empty.
    pub equals: String,
    /// Stored or virtual generated column: takes no value.
    pub generated: bool,
    /// A virtual one.
    pub virtual_: bool,
    /// `GENERATED ALWAYS AS IDENTITY`: UPDATE cannot set it.
    pub identity_always: bool,
    /// Part of the primary key.
    pub primary_key: bool,
}

/// A table's name in statements that are to reach its rows, and not those of tables that inherit
/// from it, which are published by themselves.
pub fn rows_of_its_own(table: &TableName, partitioned: bool) -> String {
    if partitioned { table.to_string() } else { format!("ONLY {table}") }
}

/// Looks a table up on the target; `None` when there is no such table.
pub async fn target_table(
    session: &mut Session,
    table: &TableName,
) -> Result<Option<TargetTable>, ApplyError> {
    let tables = target_tables(session, std::slice::from_ref(table)).await?;
    Ok(tables.into_iter().next().flatten())
}

/// Looks tables up on the target, all with one question, in their order; `None` where there is no
/// such table.
pub async fn target_tables(
    session: &mut Session,
    tables: &[TableName],
) -> Result<Vec<Option<TargetTable>>, ApplyError> {
    let rows = session.query(LOOK_UP, &[Some(&names(tables))]).await?;
    looked_up(session, tables.len(), &rows).await
}

/// SQL names of tables, as the parameter of questions about them.
pub(crate) fn names(tables: &[TableName]) -> String {
    let names: Vec<String> = tables.iter().map(TableName::to_string).collect();
    text_array(names.iter().map(String::as_str))
}

/// What altering a column or trigger of the table `c.oid` changes: the versions of their rows in the
/// catalogs.
macro_rules! stamp {
    () => {
        "(SELECT pg_catalog.hashtextextended(coalesce((SELECT \
            pg_catalog.string_agg(a.xmin::text, ' ' ORDER BY a.attnum) \
            FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 \
            AND NOT a.attisdropped), '') || ';' || coalesce((SELECT \
            pg_catalog.string_agg(t.xmin::text, ' ' ORDER BY t.oid) FROM pg_catalog.pg_trigger t \
            WHERE t.tgrelid = c.oid AND NOT t.tgisinternal), ''), 0) AS stamp)"
    };
}

/// Whether tables are as they were when they were looked up, and are still what their names stand
/// for: an error of [`ALTERED`] where they are not. Asked when changes of a transaction have been
/// sent, whose locks let nobody alter these tables any more: statements that were planned for a
/// column of another type would round values without a word, and a COPY would take bytes for what
/// they are not. Types of its parameters: oid[], text[], text[].
pub(super) const UNALTERED: &str = concat!(
    "SELECT CASE WHEN pg_catalog.bool_and(s.stamp::text = c.stamp \
       AND coalesce(pg_catalog.to_regclass(c.name)::pg_catalog.oid = c.oid, false)) THEN 1 ELSE \
     ('a table was altered on the target, of ' || count(*))::int END \
     FROM unnest($1::oid[], $2::text[], $3::text[]) AS c (oid, stamp, name) CROSS JOIN LATERAL ",
    stamp!(),
    " s"
);

/// Stamps of a table (its OID) and of all that it inherits from or that inherit from it, partitions
/// too: what alters a column of one alters it in all that are below.
const KIN: &str = concat!(
    "WITH RECURSIVE kin (oid) AS (SELECT $1::text::oid UNION SELECT CASE WHEN i.inhrelid = k.oid \
       THEN i.inhparent ELSE i.inhrelid END FROM kin k \
       JOIN pg_catalog.pg_inherits i ON k.oid IN (i.inhrelid, i.inhparent)) \
     SELECT c.oid, s.stamp FROM kin c CROSS JOIN LATERAL ",
    stamp!(),
    " s"
);

/// Asks [`KIN`].
pub(super) async fn stamps_of_kin(
    session: &mut Session,
    oid: u32,
) -> Result<Vec<(u32, String)>, ApplyError> {
    let rows = session.query(KIN, &[Some(&oid.to_string())]).await?;
    let stamp = |row: &Row| Ok((row.parse(0)?, row.get(1).unwrap_or_default().to_owned()));
    let stamps: Result<_, farshore_pg::Error> = rows.iter().map(stamp).collect();
    stamps.map_err(|error| session.error(error))
}

/// Tables by OID as they were looked up: their stamps and names.
pub type Seen = BTreeMap<u32, (String, TableName)>;

/// The parameters of [`UNALTERED`].
pub(super) fn as_seen(seen: &Seen) -> [String; 3] {
    let oids: Vec<String> = seen.keys().map(u32::to_string).collect();
    let names: Vec<String> = seen.values().map(|(_, table)| table.to_string()).collect();
    [
        text_array(oids.iter().map(String::as_str)),
        text_array(seen.values().map(|(stamp, _)| stamp.as_str())),
        text_array(names.iter().map(String::as_str)),
    ]
}

impl Session {
    /// Commits rows that were copied, if the tables they went to are as they were seen ([`UNALTERED`]).
    ///
    /// # Errors
    /// [`ApplyError::NotYet`] where one is not: nothing was committed then; the target's.
    pub(super) async fn commit_unaltered(
        &mut self,
        subscription: &str,
        seen: &Seen,
    ) -> Result<(), ApplyError> {
        let lists = as_seen(seen);
        let lists = lists.each_ref().map(|list| Some(list.as_str()));
        // A COMMIT behind an error rolls back.
        let questions = [Question::Extended(UNALTERED, &lists), Question::Simple("COMMIT")];
        let [unaltered, committed] = self.ask(questions).await?;
        match unaltered {
            Ok(_) => committed.map(drop),
            Err(ApplyError::Target { error, .. }) if error.sqlstate() == Some(ALTERED) => {
                Err(altered(subscription))
            }
            Err(error) => Err(error),
        }
    }
}

/// What is said where something was altered.
pub(super) fn altered(subscription: &str) -> ApplyError {
    ApplyError::NotYet(format!(
        "subscription \"{subscription}\": a table was altered on the target since it was looked at. \
         Nothing was written since; looking again"
    ))
}

/// SQLSTATE of [`UNALTERED`] where something was altered: invalid_text_representation.
pub(super) const ALTERED: &str = "22P02";

/// What [`target_tables`] asks; its parameter are the tables' [`names`]. Materialized, or what is
/// asked of a table is asked for each of its columns.
pub(super) const LOOK_UP: &str = concat!(
    "WITH c AS MATERIALIZED (SELECT w.number, c.oid, c.relkind, s.stamp, \
               NOT c.relhasrules AND CASE c.relkind WHEN 'p' THEN NOT EXISTS (SELECT \
                 FROM pg_catalog.pg_partition_tree(c.oid) p \
                 JOIN pg_catalog.pg_class f ON f.oid = p.relid WHERE f.relkind = 'f') \
                 ELSE c.relkind <> 'f' END AS takes_returning \
             FROM unnest($1::text::text[]) WITH ORDINALITY AS w (name, number) \
             JOIN pg_catalog.pg_class c ON c.oid = pg_catalog.to_regclass(w.name) \
             CROSS JOIN LATERAL ",
    stamp!(),
    " s) \
     SELECT a.attname, a.atttypid, pg_catalog.format_type(a.atttypid, -1), a.attgenerated <> '', \
               a.attidentity = 'a', \
               coalesce(a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]), false), \
               c.relkind = 'p', \
               CASE WHEN b.typtype = 'b' AND b.typcategory <> 'A' AND n.nspname <> 'pg_catalog' \
                 THEN n.nspname END, a.atttypmod, pg_catalog.format_type(b.oid, -1), c.number - 1, \
               pg_catalog.format_type(a.atttypid, a.atttypmod), a.attgenerated = 'v', \
               c.oid, c.stamp, c.takes_returning \
             FROM c \
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
             ORDER BY c.number, a.attnum"
);

/// The answer to [`LOOK_UP`], of so many tables. Asks what the columns' types are made of, where
/// those are not PostgreSQL's own.
pub(super) async fn looked_up(
    session: &mut Session,
    tables: usize,
    rows: &[Row],
) -> Result<Vec<Option<TargetTable>>, ApplyError> {
    let mut found: Vec<Option<TargetTable>> = vec![None; tables];
    for row in rows {
        let number: usize = row.parse(10).map_err(|error| session.error(error))?;
        let Some(slot) = found.get_mut(number) else { continue };
        let partitioned = row.get(6) == Some("t");
        let oid = row.parse(13).map_err(|error| session.error(error))?;
        let target = slot.get_or_insert_with(|| TargetTable {
            oid,
            stamp: row.get(14).unwrap_or_default().to_owned(),
            partitioned,
            takes_returning: row.get(15) == Some("t"),
            ..TargetTable::default()
        });
        let Some(name) = row.get(0) else { continue };
        target.columns.push(TargetColumn {
            name: name.to_owned(),
            type_oid: row.parse(1).map_err(|error| session.error(error))?,
            type_name: row.get(2).unwrap_or_default().to_owned(),
            declared_type: row.get(11).unwrap_or_default().to_owned(),
            type_modifier: row.parse(8).map_err(|error| session.error(error))?,
            base_name: row.get(9).unwrap_or_default().to_owned(),
            generated: row.get(3) == Some("t"),
            virtual_: row.get(12) == Some("t"),
            identity_always: row.get(4) == Some("t"),
            primary_key: row.get(5) == Some("t"),
            equals: row.get(7).map_or_else(
                || "=".to_owned(),
                |schema| format!("OPERATOR({}.=)", quote_identifier(schema)),
            ),
        });
    }
    let mut catalog = TypeCatalog::default();
    let columns = found.iter().flatten().flat_map(|target| &target.columns);
    let types: Vec<u32> = columns.map(|column| column.type_oid).collect();
    let described = catalog.describe(&mut session.connection, types).await;
    described.map_err(|error| session.error(error))?;
    for target in found.iter_mut().flatten() {
        target.types = catalog.closure(target.columns.iter().map(|column| column.type_oid));
    }
    Ok(found)
}

/// What a table of the target has been given before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// Nothing: it is to be copied.
    NotYet,
    /// Its rows, which are gone if it is.
    Before,
}

/// Checks that a table on the target can take `columns`; `published` is what the publisher calls it.
pub fn check_columns<'a>(
    subscription: &str,
    (published, table): (&TableName, &TableName),
    columns: impl Iterator<Item = &'a str>,
    target: Option<&TargetTable>,
    filled: Filled,
) -> Result<(), ApplyError> {
    let Some(target) = target else {
        let copy_anew = match filled {
            Filled::NotYet => String::new(),
            Filled::Before => format!(
                "; then copy it anew, since what it had does not come again by itself ({})",
                remedy::resync(subscription, Some(published))
            ),
        };
        let rename = match published == table {
            true => String::new(),
            false => format!(", and give what was {published} the name {table}"),
        };
        return Err(ApplyError::Setup(format!(
            "subscription \"{subscription}\": table {table} is not on the target. Create it there \
             (for instance: pg_dump --schema-only --table='{published}' … | psql …{rename}){copy_anew}"
        )));
    };
    let (mut missing, mut generated) = (Vec::new(), None);
    for name in columns {
        match target.column(name) {
            Ok(_) => {}
            Err(Misfit::Missing(column)) => missing.push(quote_identifier(&column)),
            Err(misfit) => generated = generated.or(Some(misfit)),
        }
    }
    if !missing.is_empty() {
        let missing = missing.join(", ");
        return Err(missing_columns(subscription, (published, table), &missing, filled));
    }
    generated.map_or(Ok(()), |misfit| Err(misfit.error(subscription, (published, table))))
}

fn missing_columns(
    subscription: &str,
    (published, table): (&TableName, &TableName),
    columns: &str,
    filled: Filled,
) -> ApplyError {
    let rows_there = match filled {
        Filled::NotYet => String::new(),
        Filled::Before => format!(
            " (rows that are there by then have no value of the publisher's in it: where that \
             matters, have the table copied anew, {})",
            remedy::resync(subscription, Some(published))
        ),
    };
    ApplyError::Setup(format!(
        "subscription \"{subscription}\": table {table} on the target has no writable column \
         {columns}. Add it there{rows_there}, or publish the table without it"
    ))
}

/// Why a column of the publisher cannot be written on the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// There is no such column.
    Missing(String),
    /// The target computes it, and takes no value for it.
    Generated {
        /// The column.
        column: String,
        /// The target's type, as SQL names it, where it is computed when it is read: only a new
        /// column can take its place.
        virtual_of: Option<String>,
    },
    /// Values of the publisher's type could be changed or misread as the target's type.
    Type {
        /// The column.
        column: String,
        /// The target's type, as SQL names it.
        target: String,
        /// How.
        loss: Loss,
    },
}

impl TargetTable {
    /// The column of this name, if it takes values.
    fn column(&self, name: &str) -> Result<&TargetColumn, Misfit> {
        let column = self.columns.iter().find(|column| column.name == name);
        let column = column.ok_or_else(|| Misfit::Missing(name.to_owned()))?;
        if column.generated {
            let virtual_of = column.virtual_.then(|| column.declared_type.clone());
            return Err(Misfit::Generated { column: name.to_owned(), virtual_of });
        }
        Ok(column)
    }

    /// The column of this name, and how values of the publisher's type get into it.
    pub fn plan(
        &self,
        name: &str,
        publisher: ColumnType<'_>,
    ) -> Result<(&TargetColumn, ValuePlan), Misfit> {
        let column = self.column(name)?;
        let target =
            ColumnType { oid: column.type_oid, modifier: column.type_modifier, types: &self.types };
        let plan = value_plan(publisher, target).map_err(|loss| Misfit::Type {
            column: name.to_owned(),
            target: column.declared_type.clone(),
            loss,
        })?;
        Ok((column, plan))
    }
}

impl TargetTable {
    /// For each published column of `table` the type that the publisher casts it to, if any, so that
    /// it travels as this table's column. `name` is this table's.
    ///
    /// # Errors
    /// A column that is not here, or that does not hold the publisher's values.
    pub fn casts(
        &self,
        subscription: &str,
        name: &TableName,
        table: &PublishedTable,
    ) -> Result<Vec<Option<String>>, ApplyError> {
        let cast = |column: &PublishedColumn| {
            let publisher = ColumnType {
                oid: column.type_oid,
                modifier: column.type_modifier,
                types: &table.types,
            };
            let planned = self.plan(&column.name, publisher);
            let (there, plan) =
                planned.map_err(|misfit| misfit.error(subscription, (&table.table, name)))?;
            Ok((!plan.is_verbatim()).then(|| there.base_name.clone()))
        };
        table.columns.iter().map(cast).collect()
    }

    /// For each published column of `table` the type, with its modifier, that the publisher's values
    /// are to be cast to so that they print as they do here, if any: `numeric(10,2)` prints other
    /// digits than `numeric(10,4)`. Arguments and errors as of [`TargetTable::casts`].
    pub fn hashed_as(
        &self,
        subscription: &str,
        name: &TableName,
        table: &PublishedTable,
    ) -> Result<Vec<Option<HashedAs>>, ApplyError> {
        let casts = self.casts(subscription, name, table)?;
        let hashed = |(column, cast): (&PublishedColumn, Option<String>)| {
            let there = self.columns.iter().find(|there| there.name == column.name)?;
            let (oid, modifier, types) = (there.type_oid, there.type_modifier, &self.types);
            let here = built_in_base(ColumnType { oid, modifier, types });
            let (oid, modifier) = (column.type_oid, column.type_modifier);
            let publisher = built_in_base(ColumnType { oid, modifier, types: &table.types });
            let modifier = here.map_or(-1, |(_, modifier)| modifier);
            let is_alike = || match (publisher, here) {
                (Some((_, publisher)), Some(_)) => modifier < 0 || publisher == modifier,
                (_, _) => true,
            };
            if cast.is_none() && is_alike() {
                return None;
            }
            Some(HashedAs { type_name: there.base_name.clone(), modifier })
        };
        Ok(table.columns.iter().zip(casts).map(hashed).collect())
    }
}

impl Misfit {
    /// Says it of a table, with what to do. `both` are its names, the publisher's first.
    pub fn error(&self, subscription: &str, both: (&TableName, &TableName)) -> ApplyError {
        let (_, table) = both;
        ApplyError::Setup(match self {
            Misfit::Missing(column) => {
                let column = quote_identifier(column);
                return missing_columns(subscription, both, &column, Filled::Before);
            }
            Misfit::Generated { column, virtual_of } => {
                let column = quote_identifier(column);
                let plain = match virtual_of {
                    None => format!("ALTER COLUMN {column} DROP EXPRESSION"),
                    Some(of) => format!("DROP COLUMN {column}, ADD COLUMN {column} {of}"),
                };
                format!(
                    "subscription \"{subscription}\": column {column} of {table} is generated on \
                     the target, and its values are published. Make it a plain one there (ALTER \
                     TABLE {table} {plain}), or publish the table without it"
                )
            }
            Misfit::Type { column, target, loss } => {
                let column = quote_identifier(column);
                format!(
                    "subscription \"{subscription}\": column {column} of {table} is {target} on the \
                     target, which cannot hold every value of the publisher's type as it is{}. Give it \
                     the publisher's type (ALTER TABLE {table} ALTER COLUMN {column} TYPE …), or \
                     publish the table without it",
                    loss.why()
                )
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_rows_are_there_a_column_that_lacks_leads_to_a_copy() {
        let published = TableName { schema: "public".into(), name: "t".into() };
        let table = TableName { schema: "far".into(), name: "t_copy".into() };
        let nothing = [].into_iter();
        let gone = check_columns("s", (&published, &table), nothing, None, Filled::Before);
        let gone = gone.unwrap_err().to_string();
        assert!(gone.contains("table far.t_copy is not on the target"), "{gone}");
        assert!(
            gone.contains("--table='public.t' … | psql …, and give what was public.t"),
            "{gone}"
        );
        assert!(gone.contains("--subscription s --table public.t)"), "{gone}");
        let said = |filled| {
            let target = TargetTable::default();
            let names = ["v"].into_iter();
            let both = (&published, &table);
            check_columns("s", both, names, Some(&target), filled).unwrap_err().to_string()
        };
        let (before, resync) = (said(Filled::Before), "--subscription s --table public.t)");
        assert!(before.contains("no writable column v") && before.contains(resync), "{before}");
        assert!(!said(Filled::NotYet).contains("resync"), "{}", said(Filled::NotYet));
    }
}
