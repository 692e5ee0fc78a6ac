//! Equality of tables on two servers, proven by the servers: a count and a checksum that does not
//! depend on the order of rows, over the rows' text under one set of output settings.

use anyhow::{Context, Result, bail};
use postgres::{Client, NoTls};
use std::collections::BTreeMap;
use std::fmt;

/// Tables are split into this many buckets by hash, to find the rows that differ.
const BUCKETS: i64 = 1024;
/// Rows shown per table and side.
const ROWS_SHOWN: usize = 10;
/// Characters shown of one row.
const ROW_CHARS_SHOWN: usize = 300;

/// Both sides print values in the same way, whatever their configuration says. The empty search
/// path makes names inside values (of type regclass, say) come out qualified.
const OUTPUT_SETTINGS: &str = "
    SET bytea_output = 'hex'; SET extra_float_digits = 3; SET DateStyle = 'ISO, YMD';
    SET IntervalStyle = 'postgres'; SET TimeZone = 'UTC'; SET xmloption = 'content';
    SET lc_monetary = 'C'; SET lc_numeric = 'C'; SET search_path = pg_catalog;
    SET client_encoding = 'UTF8'; SET statement_timeout = 0;
    BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY";

/// A table that is not equal on both sides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableDiff {
    /// Qualified name, as it was asked for.
    pub table: String,
    /// Rows at the source.
    pub source_rows: i64,
    /// Rows at the target.
    pub target_rows: i64,
    /// Some rows that only the source has, as text.
    pub only_source: Vec<String>,
    /// Some rows that only the target has, as text.
    pub only_target: Vec<String>,
}

impl fmt::Display for TableDiff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TableDiff { table, source_rows, target_rows, only_source, only_target } = self;
        write!(f, "{table}: {source_rows} rows at the source, {target_rows} at the target")?;
        for row in only_source {
            write!(f, "\n  only at the source: {row}")?;
        }
        for row in only_target {
            write!(f, "\n  only at the target: {row}")?;
        }
        Ok(())
    }
}

/// Compares tables between two databases, each read in one snapshot. Returns the tables that
/// differ: none means all are equal. Columns are matched by name, so their order does not matter;
/// the sets of names must be the same.
///
/// # Errors
/// When a server cannot be reached, or a table is missing or has other columns on one side.
pub fn compare_tables(
    source_url: &str,
    target_url: &str,
    tables: &[impl AsRef<str>],
) -> Result<Vec<TableDiff>> {
    let mut source = open(source_url).context("connect to the source")?;
    let mut target = open(target_url).context("connect to the target")?;
    let mut different = Vec::new();
    for table in tables {
        let table = table.as_ref();
        let row = row_expression(&mut source, table).context("at the source")?;
        let row_at_target = row_expression(&mut target, table).context("at the target")?;
        if row != row_at_target {
            bail!("{table}: other columns: source {row}, target {row_at_target}");
        }
        let at_source = fingerprint(&mut source, table, &row)?;
        let at_target = fingerprint(&mut target, table, &row)?;
        if at_source != at_target {
            let (only_source, only_target) = differing_rows(&mut source, &mut target, table, &row)?;
            different.push(TableDiff {
                table: table.to_owned(),
                source_rows: at_source.0,
                target_rows: at_target.0,
                only_source,
                only_target,
            });
        }
    }
    Ok(different)
}

/// As [`compare_tables`], with an error that shows the differing rows.
///
/// # Errors
/// When a table differs, or cannot be compared.
pub fn assert_equal(source_url: &str, target_url: &str, tables: &[impl AsRef<str>]) -> Result<()> {
    let different = compare_tables(source_url, target_url, tables)?;
    if different.is_empty() {
        return Ok(());
    }
    let shown: Vec<_> = different.iter().map(TableDiff::to_string).collect();
    bail!("{} of {} tables differ:\n{}", different.len(), tables.len(), shown.join("\n"))
}

/// All ordinary and partitioned tables of a schema, qualified and quoted, sorted; partitions are
/// part of their parents.
///
/// # Errors
/// When the server cannot be reached.
pub fn tables_in_schema(url: &str, schema: &str) -> Result<Vec<String>> {
    let mut client = Client::connect(url, NoTls).context("connect")?;
    let query = "SELECT format('%I.%I', n.nspname, c.relname) \
                 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
                 WHERE n.nspname = $1 AND c.relkind IN ('r', 'p') AND NOT c.relispartition \
                 ORDER BY 1";
    Ok(client.query(query, &[&schema])?.iter().map(|row| row.get(0)).collect())
}

fn open(url: &str) -> Result<Client> {
    let mut client = Client::connect(url, NoTls)?;
    client.batch_execute(OUTPUT_SETTINGS)?;
    Ok(client)
}

/// `ROW(columns by name)::text`, the text that stands for a row.
fn row_expression(client: &mut Client, table: &str) -> Result<String> {
    let query = "SELECT string_agg(quote_ident(attname), ', ' ORDER BY attname COLLATE \"C\") \
                 FROM pg_attribute \
                 WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped";
    let columns: Option<String> =
        client.query_one(query, &[&table]).context("read the columns")?.get(0);
    let columns = columns.with_context(|| format!("no table {table}"))?;
    Ok(format!("ROW({columns})::text"))
}

/// Count, and the sums of two independent 64-bit hashes per row.
fn fingerprint(client: &mut Client, table: &str, row: &str) -> Result<(i64, String)> {
    let query = format!(
        "SELECT count(*), concat_ws('/', sum(hashtextextended(r COLLATE \"C\", 0)::numeric), \
                                         sum(hashtextextended(r COLLATE \"C\", 7)::numeric)) \
         FROM (SELECT {row} AS r FROM {table}) AS t"
    );
    let row = client.query_one(&query, &[]).with_context(|| format!("checksum {table}"))?;
    Ok((row.get(0), row.get(1)))
}

type Bucket = (i64, String);

fn buckets(client: &mut Client, table: &str, row: &str) -> Result<BTreeMap<i64, Bucket>> {
    let query = format!(
        "SELECT h & {mask}, count(*), sum(h::numeric)::text \
         FROM (SELECT hashtextextended({row} COLLATE \"C\", 0) AS h FROM {table}) AS t GROUP BY 1",
        mask = BUCKETS - 1
    );
    let rows = client.query(&query, &[])?;
    Ok(rows.iter().map(|row| (row.get(0), (row.get(1), row.get(2)))).collect())
}

fn differing_rows(
    source: &mut Client,
    target: &mut Client,
    table: &str,
    row: &str,
) -> Result<(Vec<String>, Vec<String>)> {
    let at_source = buckets(source, table, row)?;
    let at_target = buckets(target, table, row)?;
    let (mut only_source, mut only_target) = (Vec::new(), Vec::new());
    for bucket in 0..BUCKETS {
        if at_source.get(&bucket) == at_target.get(&bucket) {
            continue;
        }
        let query = format!(
            "SELECT r, count(*) FROM (SELECT {row} AS r FROM {table}) AS t \
             WHERE hashtextextended(r COLLATE \"C\", 0) & {mask} = {bucket} GROUP BY 1",
            mask = BUCKETS - 1
        );
        let mut balance: BTreeMap<String, i64> = BTreeMap::new();
        for (client, sign) in [(&mut *source, 1), (&mut *target, -1)] {
            for row in client.query(&query, &[])? {
                *balance.entry(row.get(0)).or_default() += sign * row.get::<_, i64>(1);
            }
        }
        for (text, surplus) in balance.into_iter().filter(|(_, surplus)| *surplus != 0) {
            let side = if surplus > 0 { &mut only_source } else { &mut only_target };
            let shown: String = text.chars().take(ROW_CHARS_SHOWN).collect();
            let times = surplus.unsigned_abs();
            side.push(if times == 1 { shown } else { format!("{shown} ({times} times)") });
        }
        if only_source.len() >= ROWS_SHOWN || only_target.len() >= ROWS_SHOWN {
            break;
        }
    }
    only_source.truncate(ROWS_SHOWN);
    only_target.truncate(ROWS_SHOWN);
    Ok((only_source, only_target))
}
