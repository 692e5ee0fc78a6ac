//! Parts of questions to the catalogs that take no lock on anybody's table.

/// A subquery of one column, `relid`: `root` (an SQL expression of type oid) and every partition
/// below it.
///
/// `pg_partition_tree` says the same, but locks each table until its transaction ends. Whoever
/// changes definitions meanwhile would wait, and where two of them meet in different order their
/// own ALTER might be the one that is ended as a deadlock.
pub fn partition_tree(root: &str) -> String {
    format!(
        "(WITH RECURSIVE below (relid) AS (SELECT ({root})::pg_catalog.oid \
           UNION ALL SELECT i.inhrelid FROM below \
             JOIN pg_catalog.pg_inherits i ON i.inhparent = below.relid AND NOT i.inhdetachpending \
             JOIN pg_catalog.pg_class part ON part.oid = i.inhrelid AND part.relispartition) \
         SELECT relid FROM below)"
    )
}
