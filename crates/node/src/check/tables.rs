//! What a server's catalogue says of tables: those that are asked about, of however many there are.

use farshore_capture::publication::TableName;
use farshore_pg::{Connection, Error, Question, Row, text_array};
use std::collections::{BTreeSet, HashMap};

/// Between names in one value; no identifier holds it.
const SEPARATOR: char = '\u{1}';

/// A column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// Name.
    pub name: String,
    /// The type with its modifier, as SQL names it under an empty `search_path`.
    pub type_name: String,
    /// The type's OID on that server.
    pub type_oid: u32,
    /// `atttypmod`.
    pub type_modifier: i32,
    /// Takes no NULL.
    pub not_null: bool,
    /// Filled by itself when no value is given.
    pub has_default: bool,
    /// Generated: takes no value.
    pub generated: bool,
    /// Generated when it is read.
    pub virtual_: bool,
}

/// A table or what stands under a table's name.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// `pg_class.relkind`.
    pub kind: char,
    /// `pg_class.relpersistence`.
    pub persistence: char,
    /// `pg_class.relreplident`.
    pub identity: char,
    /// Columns of the key that the identity names; empty without one.
    pub key: Vec<String>,
    /// There is a primary key.
    pub primary_key: bool,
    /// Columns that an index begins with.
    pub indexed: Vec<String>,
    /// Columns of which no two rows have the same values, index by index.
    pub unique: Vec<Vec<String>>,
    /// We may look into its schema.
    pub schema_usable: bool,
    /// We may read all of it.
    pub may_select: bool,
    /// The rights to change it that we lack.
    pub rights_missing: Vec<&'static str>,
    /// We own it, or are a member of its owner.
    pub owned: bool,
    /// Its owner.
    pub owner: String,
    /// Its owner may do everything: who is given that role may, too.
    pub owner_is_superuser: bool,
    /// Row-level security holds for us.
    pub row_security: bool,
    /// Sequences that its columns own or take values from.
    pub sequences: Vec<Sequence>,
    /// Columns in table order.
    pub columns: Vec<Column>,
    /// Of a table that is published: the condition that its rows have to meet, as SQL.
    pub row_filter: Option<String>,
}

/// A sequence of a table's column.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// As SQL.
    pub name: String,
    /// We may read how far it is.
    pub readable: bool,
    /// We may set it.
    pub settable: bool,
}

/// The word for what is of this `relkind`, when rows cannot be written to or read from it.
fn not_a_table(kind: char) -> Option<&'static str> {
    match kind {
        'v' => Some("a view"),
        'm' => Some("a materialized view"),
        'f' => Some("a foreign table"),
        _ => None,
    }
}

impl Table {
    /// The word for what stands under the name, when rows cannot be written to or read from it.
    pub fn not_a_table(&self) -> Option<&'static str> {
        not_a_table(self.kind)
    }

    /// Updates and deletes name the row.
    pub fn has_identity(&self) -> bool {
        self.identity == 'f' || !self.key.is_empty()
    }
}

/// The tables that are asked about (`c`, and their schemas `n`), by the parameters of [`Named`].
macro_rules! named {
    () => {
        "FROM unnest($1::text::name[], $2::text::name[]) AS w (schema_name, table_name) \
         JOIN pg_catalog.pg_namespace n ON n.nspname = w.schema_name \
         JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = w.table_name "
    };
}

/// Columns of the key that the replica identity of `c` names.
macro_rules! identity_key {
    () => {
        "(SELECT string_agg(a.attname, chr(1)) FROM pg_index i JOIN pg_attribute a \
           ON a.attrelid = i.indrelid AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]) \
           WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate AND \
           CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident \
           ELSE false END)"
    };
}

const TABLES: &str = concat!(
    "SELECT n.nspname, c.relname, c.relkind, c.relpersistence, c.relreplident, ",
    identity_key!(),
    ", \
       EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary), \
       (SELECT string_agg(DISTINCT a.attname, chr(1)) FROM pg_index i \
         JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] \
         WHERE i.indrelid = c.oid AND i.indisvalid AND i.indpred IS NULL), \
       has_schema_privilege(n.oid, 'USAGE'), \
       has_table_privilege(c.oid, 'SELECT'), has_table_privilege(c.oid, 'INSERT'), \
       has_table_privilege(c.oid, 'UPDATE'), has_table_privilege(c.oid, 'DELETE'), \
       has_table_privilege(c.oid, 'TRUNCATE'), \
       pg_has_role(c.relowner, 'USAGE'), pg_get_userbyid(c.relowner), \
       row_security_active(c.oid), \
       (SELECT string_agg(u.columns, chr(2)) FROM ( \
         SELECT (SELECT string_agg(a.attname, chr(1)) FROM pg_attribute a \
           WHERE a.attrelid = i.indrelid \
           AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])) AS columns \
         FROM pg_index i WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid \
         AND i.indpred IS NULL AND i.indexprs IS NULL) AS u), \
       (SELECT o.rolsuper FROM pg_roles o WHERE o.oid = c.relowner) ",
    named!(),
    "\
     WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f') AND n.nspname !~ '^pg_' \
     AND n.nspname NOT IN ('information_schema', 'farshore')"
);

const COLUMNS: &str = concat!(
    "SELECT n.nspname, c.relname, a.attname, \
       pg_catalog.format_type(a.atttypid, a.atttypmod), a.attnotnull, \
       a.atthasdef OR a.attidentity <> '' OR t.typdefault IS NOT NULL, \
       a.attgenerated <> '', a.attgenerated = 'v', a.atttypid, a.atttypmod ",
    named!(),
    "\
     JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid \
     JOIN pg_catalog.pg_type t ON t.oid = a.atttypid \
     WHERE c.relkind IN ('r', 'p') AND a.attnum > 0 AND NOT a.attisdropped \
     AND n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'farshore') \
     ORDER BY a.attrelid, a.attnum"
);

const SEQUENCES: &str = "SELECT n.nspname, c.relname, pg_catalog.format('%I.%I', sn.nspname, \
         sc.relname), pg_catalog.has_sequence_privilege(sc.oid, 'USAGE, SELECT'), \
       pg_catalog.has_sequence_privilege(sc.oid, 'UPDATE') \
     FROM (SELECT d.refobjid AS tbl, d.objid AS seq FROM pg_catalog.pg_depend d \
       WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.deptype IN ('a', 'i') \
         AND d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjsubid > 0 \
       UNION SELECT f.adrelid, d.refobjid FROM pg_catalog.pg_depend d \
       JOIN pg_catalog.pg_attrdef f ON f.oid = d.objid \
       WHERE d.classid = 'pg_catalog.pg_attrdef'::regclass \
         AND d.refclassid = 'pg_catalog.pg_class'::regclass) l \
     JOIN pg_catalog.pg_class sc ON sc.oid = l.seq AND sc.relkind = 'S' \
     JOIN pg_catalog.pg_namespace sn ON sn.oid = sc.relnamespace \
     JOIN pg_catalog.pg_class c ON c.oid = l.tbl \
     JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
     JOIN unnest($1::text::name[], $2::text::name[]) AS w (schema_name, table_name) \
       ON w.schema_name = n.nspname AND w.table_name = c.relname \
     WHERE sc.relpersistence = 'p' AND n.nspname !~ '^pg_' \
       AND n.nspname NOT IN ('information_schema', 'farshore') ORDER BY 3";

/// What patterns match and nobody publishes: views, foreign tables, and what is not logged.
const NOT_PUBLISHED: &str = "SELECT n.nspname, c.relname, c.relkind \
     FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
     WHERE (c.relkind IN ('v', 'm', 'f') OR c.relkind IN ('r', 'p') AND c.relpersistence = 'u') \
     AND n.nspname !~ '^pg_' AND n.nspname NOT IN ('information_schema', 'farshore')";

/// The partitions that hold the rows of partitioned tables, in name order.
const LEAVES: &str = concat!(
    "WITH RECURSIVE below (root, oid) AS (SELECT c.oid, c.oid ",
    named!(),
    "\
     WHERE c.relkind = 'p' \
     UNION SELECT below.root, i.inhrelid FROM below \
       JOIN pg_catalog.pg_inherits i ON i.inhparent = below.oid AND NOT i.inhdetachpending) \
     SELECT n.nspname, c.relname, c.relreplident, ",
    identity_key!(),
    ", rn.nspname, r.relname FROM below \
     JOIN pg_catalog.pg_class c ON c.oid = below.oid AND c.relkind = 'r' \
     JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
     JOIN pg_catalog.pg_class r ON r.oid = below.root \
     JOIN pg_catalog.pg_namespace rn ON rn.oid = r.relnamespace ORDER BY 5, 6, 1, 2"
);

/// What tables are partitions of, as far up as it is by hash of an enum, or of an array of one or a
/// domain over one.
const HASHED_BY_ENUM: &str = concat!(
    "WITH RECURSIVE up (oid) AS (SELECT c.oid ",
    named!(),
    "\
     WHERE c.relispartition \
     UNION SELECT i.inhparent FROM up JOIN pg_catalog.pg_inherits i ON i.inhrelid = up.oid) \
     SELECT n.nspname, c.relname, a.attname \
     FROM up JOIN pg_catalog.pg_partitioned_table p ON p.partrelid = up.oid AND p.partstrat = 'h' \
     JOIN pg_catalog.pg_class c ON c.oid = up.oid \
     JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
     JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid \
       AND a.attnum = ANY (p.partattrs::int2[]) AND a.attnum > 0 \
     JOIN pg_catalog.pg_type t ON t.oid = a.atttypid \
     LEFT JOIN pg_catalog.pg_type of ON of.oid = coalesce(nullif(t.typbasetype, 0), t.typelem) \
     WHERE 'e' IN (t.typtype, of.typtype) ORDER BY 1, 2, a.attnum"
);

/// A size locks its table for a moment. `pg_partition_tree` would lock all of them until the end.
const SIZE: &str = concat!(
    "WITH RECURSIVE named (oid) AS (SELECT c.oid ",
    named!(),
    "\
     UNION SELECT i.inhrelid FROM named JOIN pg_catalog.pg_class p \
       ON p.oid = named.oid AND p.relkind = 'p' \
     JOIN pg_catalog.pg_inherits i ON i.inhparent = p.oid) \
     SELECT pg_catalog.sum(pg_catalog.pg_table_size(c.oid)) \
     FROM named JOIN pg_catalog.pg_class c ON c.oid = named.oid AND c.relkind = 'r'"
);

/// Tables as the questions about them take them.
pub struct Named([String; 2]);

impl Named {
    /// These tables, each once: two may have one name on a target.
    pub fn new<'a>(tables: impl Iterator<Item = &'a TableName>) -> Named {
        let tables: BTreeSet<&TableName> = tables.collect();
        let schemas = text_array(tables.iter().map(|table| table.schema.as_str()));
        Named([schemas, text_array(tables.iter().map(|table| table.name.as_str()))])
    }

    /// For [`questions`].
    pub fn parameters(&self) -> [Option<&str>; 2] {
        self.0.each_ref().map(|names| Some(names.as_str()))
    }
}

/// Bytes of tables with TOAST and without indexes. `None` where somebody has one for himself, perhaps
/// for hours.
///
/// # Errors
/// The server's.
pub async fn size(sql: &mut Connection, tables: &Named) -> Result<Option<u64>, Error> {
    let parameters = tables.parameters();
    let questions = [
        Question::Simple("BEGIN; SET LOCAL lock_timeout = '1s'"),
        Question::Extended(SIZE, &parameters),
        Question::Simple("ROLLBACK"),
    ];
    let answer = sql.ask_all(&questions).await?.into_iter().nth(1);
    match answer.unwrap_or_else(|| Ok(Vec::new())) {
        Ok(rows) => Ok(rows.first().and_then(|row| row.get(0)?.parse().ok()).or(Some(0))),
        Err(error) if error.sqlstate() == Some("55P03") => Ok(None),
        Err(error) => Err(error),
    }
}

/// What [`from_answers`] is made from, of so many tables. Without a search_path types are named in
/// full, and alike on both sides.
pub fn questions<'a>(tables: &'a [Option<&'a str>; 2]) -> [Question<'a>; 5] {
    [
        Question::Extended(TABLES, tables),
        Question::Simple("BEGIN; SET LOCAL search_path = ''"),
        Question::Extended(COLUMNS, tables),
        Question::Extended(SEQUENCES, tables),
        Question::Simple("ROLLBACK"),
    ]
}

/// What stands under these names.
pub async fn named(
    sql: &mut Connection,
    tables: &Named,
) -> Result<HashMap<TableName, Table>, Error> {
    from_answers(sql.ask_all(&questions(&tables.parameters())).await?)
}

/// A partition that holds rows.
pub struct Leaf {
    /// Its name.
    pub name: TableName,
    /// The partitioned table that it is a part of, of those that were asked about.
    pub root: TableName,
    /// As [`Table::identity`].
    pub identity: char,
    /// As [`Table::key`].
    pub key: Vec<String>,
}

/// The partitions of these tables that hold their rows.
///
/// # Errors
/// The server's.
pub async fn leaves(sql: &mut Connection, tables: &Named) -> Result<Vec<Leaf>, Error> {
    let rows = sql.query(LEAVES, &tables.parameters()).await?;
    let leaf = |row: &Row| Leaf {
        name: name(row),
        root: TableName { schema: text(row, 4), name: text(row, 5) },
        identity: letter(row, 2),
        key: names(row, 3),
    };
    Ok(rows.iter().map(leaf).collect())
}

/// Of what these tables are partitions of: tables that are partitioned by hash of an enum, and the
/// first such column of each.
///
/// # Errors
/// As a query's.
pub async fn hashed_by_enum(
    sql: &mut Connection,
    tables: &Named,
) -> Result<Vec<(TableName, String)>, Error> {
    let rows = sql.query(HASHED_BY_ENUM, &tables.parameters()).await?;
    let mut hashed: Vec<_> = rows.iter().map(|row| (name(row), text(row, 2))).collect();
    hashed.dedup_by(|(later, _), (earlier, _)| later == earlier);
    Ok(hashed)
}

/// What nobody can publish, and what it is: see [`not_a_table`]; `None` is a table that is not
/// logged.
pub async fn not_published(
    sql: &mut Connection,
) -> Result<Vec<(TableName, Option<&'static str>)>, Error> {
    let rows = sql.query(NOT_PUBLISHED, &[]).await?;
    Ok(rows.iter().map(|row| (name(row), not_a_table(letter(row, 2)))).collect())
}

/// What a server answered to [`questions`].
pub fn from_answers(
    answers: Vec<Result<Vec<Row>, Error>>,
) -> Result<HashMap<TableName, Table>, Error> {
    let Ok([rows, _, columns, sequences, _]) = <[_; 5]>::try_from(answers) else {
        return Err(Error::Protocol("not an answer to each question".to_owned()));
    };
    let mut tables = HashMap::new();
    for row in &rows? {
        // Nobody has or lacks a right to what was dropped while it was looked at.
        if (8..=13).any(|right| row.get(right).is_none()) {
            continue;
        }
        let table = Table {
            kind: letter(row, 2),
            persistence: letter(row, 3),
            identity: letter(row, 4),
            key: names(row, 5),
            primary_key: row.parse_bool(6)?,
            indexed: names(row, 7),
            unique: row
                .get(17)
                .into_iter()
                .flat_map(|all| all.split('\u{2}'))
                .map(|columns| columns.split(SEPARATOR).map(str::to_owned).collect())
                .collect(),
            schema_usable: row.parse_bool(8)?,
            may_select: row.parse_bool(9)?,
            rights_missing: ["SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE"]
                .into_iter()
                .enumerate()
                .filter(|(number, _)| row.get(9 + number) != Some("t"))
                .map(|(_, right)| right)
                .collect(),
            owned: row.parse_bool(14)?,
            owner: text(row, 15),
            owner_is_superuser: row.get(18) == Some("t"),
            row_security: row.parse_bool(16)?,
            sequences: Vec::new(),
            row_filter: None,
            columns: Vec::new(),
        };
        tables.insert(name(row), table);
    }
    for row in &sequences? {
        let Some(table) = tables.get_mut(&name(row)) else { continue };
        // Null: dropped since.
        table.sequences.push(Sequence {
            name: text(row, 2),
            readable: row.get(3) != Some("f"),
            settable: row.get(4) != Some("f"),
        });
    }
    for row in &columns? {
        let Some(table) = tables.get_mut(&name(row)) else { continue };
        table.columns.push(Column {
            name: text(row, 2),
            type_name: text(row, 3),
            not_null: row.parse_bool(4)?,
            has_default: row.parse_bool(5)?,
            generated: row.parse_bool(6)?,
            virtual_: row.parse_bool(7)?,
            type_oid: row.parse(8)?,
            type_modifier: row.parse(9)?,
        });
    }
    Ok(tables)
}

fn text(row: &Row, column: usize) -> String {
    row.get(column).unwrap_or_default().to_owned()
}

fn letter(row: &Row, column: usize) -> char {
    row.get(column).and_then(|text| text.chars().next()).unwrap_or(' ')
}

fn name(row: &Row) -> TableName {
    TableName { schema: text(row, 0), name: text(row, 1) }
}

fn names(row: &Row, column: usize) -> Vec<String> {
    let Some(text) = row.get(column) else { return Vec::new() };
    text.split(SEPARATOR).map(str::to_owned).collect()
}
