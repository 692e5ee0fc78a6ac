//! The publisher's catalogs, read.

mod objects;
mod tables;

use super::{Definitions, Sequence};
use crate::publication::TableName;
use farshore_pg::{Connection, Error, Row};

/// Names come out qualified and values in a form that every server reads.
const SETTINGS: &str = "SET search_path = ''; SET DateStyle = 'ISO, YMD'; \
    SET IntervalStyle = 'postgres'; SET extra_float_digits = 1";
const RESET: &str = "RESET search_path; RESET DateStyle; RESET IntervalStyle; \
    RESET extra_float_digits";

/// Reads the definitions of `tables` (by OID) in `sql`'s snapshot, with the partitions under them,
/// and the partitioned tables above them as far as one of `listed` reaches.
///
/// # Errors
/// The publisher's.
pub async fn read_definitions(
    sql: &mut Connection,
    tables: &[u32],
    listed: &[u32],
) -> Result<Definitions, Error> {
    sql.simple_query(SETTINGS).await?;
    let definitions = read(sql, tables, listed).await?;
    sql.simple_query(RESET).await?;
    Ok(definitions)
}

async fn read(sql: &mut Connection, tables: &[u32], listed: &[u32]) -> Result<Definitions, Error> {
    let tables = tables::tables(sql, &oid_array(tables), &oid_array(listed)).await?;
    let oids: Vec<u32> = tables.iter().map(|table| table.oid).collect();
    let oids = oid_array(&oids);
    let (extensions, objects) = objects::objects(sql, &oids).await?;
    Ok(Definitions { extensions, objects, sequences: sequences(sql, &oids).await?, tables })
}

/// Sequences that the tables' columns own or their defaults use. Those of identity columns are
/// part of their columns.
async fn sequences(sql: &mut Connection, tables: &str) -> Result<Vec<Sequence>, Error> {
    let rows = sql
        .query(
            "WITH used AS ( \
               SELECT d.objid AS oid FROM pg_catalog.pg_depend d \
               WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.deptype = 'a' \
                 AND d.refclassid = 'pg_catalog.pg_class'::regclass \
                 AND d.refobjid = ANY ($1::text::oid[]) AND d.refobjsubid > 0 \
               UNION SELECT d.refobjid FROM pg_catalog.pg_depend d \
               JOIN pg_catalog.pg_attrdef f ON f.oid = d.objid \
               WHERE d.classid = 'pg_catalog.pg_attrdef'::regclass \
                 AND d.refclassid = 'pg_catalog.pg_class'::regclass \
                 AND f.adrelid = ANY ($1::text::oid[])) \
             SELECT n.nspname, c.relname, o.nspname, t.relname, a.attname, \
               pg_catalog.format('AS %s START WITH %s INCREMENT BY %s MINVALUE %s MAXVALUE %s \
                 CACHE %s%s', s.seqtypid::regtype, s.seqstart, s.seqincrement, s.seqmin, s.seqmax, \
                 s.seqcache, CASE WHEN s.seqcycle THEN ' CYCLE' ELSE '' END), \
               pg_catalog.format('%L::regclass', pg_catalog.format('%I.%I', n.nspname, c.relname)) \
             FROM used u JOIN pg_catalog.pg_sequence s ON s.seqrelid = u.oid \
             JOIN pg_catalog.pg_class c ON c.oid = u.oid \
             JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
             LEFT JOIN pg_catalog.pg_depend d ON d.objid = c.oid AND d.objsubid = 0 \
               AND d.classid = 'pg_catalog.pg_class'::regclass AND d.deptype = 'a' \
               AND d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjsubid > 0 \
               AND d.refobjid = ANY ($1::text::oid[]) \
             LEFT JOIN pg_catalog.pg_class t ON t.oid = d.refobjid \
             LEFT JOIN pg_catalog.pg_namespace o ON o.oid = t.relnamespace \
             LEFT JOIN pg_catalog.pg_attribute a \
               ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid \
             WHERE c.relkind = 'S' ORDER BY 1, 2",
            &[Some(tables)],
        )
        .await?;
    Ok(rows
        .iter()
        .map(|row| Sequence {
            name: table_name(row, 0),
            owner: row.get(4).map(|column| (table_name(row, 2), column.to_owned())),
            options: text(row, 5),
            reference: text(row, 6),
        })
        .collect())
}

/// OIDs as a PostgreSQL array.
pub(super) fn oid_array(oids: &[u32]) -> String {
    let oids: Vec<String> = oids.iter().map(u32::to_string).collect();
    format!("{{{}}}", oids.join(","))
}

pub(super) fn text(row: &Row, column: usize) -> String {
    row.get(column).unwrap_or_default().to_owned()
}

fn optional(row: &Row, column: usize) -> Option<String> {
    row.get(column).map(str::to_owned)
}

pub(super) fn is(row: &Row, column: usize) -> bool {
    row.get(column) == Some("t")
}

/// A schema in `column` and a name in the next.
pub(super) fn table_name(row: &Row, column: usize) -> TableName {
    TableName { schema: text(row, column), name: text(row, column + 1) }
}
