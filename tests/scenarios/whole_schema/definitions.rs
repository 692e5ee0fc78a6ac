//! Definitions of tables, as each server describes them.

use anyhow::{Result, ensure};
use farshore_testkit::postgres::Cluster;
use farshore_tests::DATABASE;
use std::collections::BTreeSet;

/// A line per column, constraint, index and comment of the tables in ordinary schemas. What only
/// one version writes otherwise is left out.
const DEFINITIONS: &str = "WITH t AS ( \
      SELECT c.oid, format('%I.%I', n.nspname, c.relname) AS name, c.relkind, c.relreplident, c.relpartbound \
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
      WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND n.nspname !~ '^(pg_|farshore)' \
        AND n.nspname <> 'information_schema') \
    SELECT concat_ws(' ', 'table', name, relkind, relreplident, pg_get_partkeydef(oid), \
        pg_get_expr(relpartbound, oid)) FROM t \
    UNION ALL SELECT concat_ws(' ', 'column', name, attname, format_type(atttypid, atttypmod), \
        CASE WHEN attnotnull THEN 'NOT NULL' END, attgenerated, pg_get_expr(adbin, adrelid), \
        a.attcollation::regcollation, CASE WHEN NOT relispartition THEN attidentity END) \
      FROM t JOIN pg_attribute a ON attrelid = t.oid JOIN pg_class c ON c.oid = t.oid \
      LEFT JOIN pg_attrdef d ON adrelid = attrelid AND adnum = attnum \
      WHERE attnum > 0 AND NOT attisdropped \
    UNION ALL SELECT concat_ws(' ', 'constraint', name, conname, pg_get_constraintdef(k.oid)) \
      FROM t JOIN pg_constraint k ON conrelid = t.oid WHERE contype <> 'n' AND conparentid = 0 \
    UNION ALL SELECT concat_ws(' ', 'index', pg_get_indexdef(indexrelid), indisreplident) \
      FROM t JOIN pg_index ON indrelid = t.oid \
    UNION ALL SELECT concat_ws(' ', 'comment', name, \
        (SELECT attname FROM pg_attribute WHERE attrelid = t.oid AND attnum = objsubid), description) \
      FROM t JOIN pg_description ON objoid = t.oid AND classoid = 'pg_class'::regclass \
    UNION ALL SELECT concat_ws(' ', 'child', i.inhrelid::regclass, i.inhparent::regclass) \
      FROM t JOIN pg_inherits i ON inhrelid = t.oid \
    UNION ALL SELECT concat_ws(' ', 'sequence', s.seqrelid::regclass, s.seqstart, s.seqincrement, s.seqmin, \
        s.seqmax, s.seqcache, s.seqcycle, d.refobjid::regclass, \
        (SELECT attname FROM pg_attribute WHERE attrelid = t.oid AND attnum = d.refobjsubid), d.deptype) \
      FROM pg_sequence s JOIN pg_depend d ON d.objid = s.seqrelid AND d.deptype IN ('a', 'i') \
        AND d.refobjsubid > 0 JOIN t ON t.oid = d.refobjid";

/// Lines that describe the tables of a server.
///
/// # Errors
/// The server's message.
pub fn definitions(server: &Cluster) -> Result<BTreeSet<String>> {
    let mut client = server.connect_to(DATABASE)?;
    client.batch_execute("SET search_path = ''; SET TimeZone = 'UTC'")?;
    let mut lines = BTreeSet::new();
    for row in client.query(DEFINITIONS, &[])? {
        lines.insert(row.get::<_, String>(0));
    }
    Ok(lines)
}

/// Compares the tables of two servers, but for lines that contain one of `but`.
///
/// # Errors
/// When they differ; with the differing lines.
pub fn assert_same(left: &Cluster, right: &Cluster, but: &[&str]) -> Result<()> {
    let (left, right) = (definitions(left)?, definitions(right)?);
    let differing = |one: &BTreeSet<String>, other: &BTreeSet<String>| -> Vec<String> {
        one.difference(other)
            .filter(|line| !but.iter().any(|b| line.contains(b)))
            .cloned()
            .collect()
    };
    let (missing, extra) = (differing(&left, &right), differing(&right, &left));
    ensure!(
        missing.is_empty() && extra.is_empty(),
        "the target lacks:\n  {}\nand has besides:\n  {}",
        missing.join("\n  "),
        extra.join("\n  ")
    );
    Ok(())
}
