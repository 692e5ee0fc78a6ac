//! Why no partition of the target takes a row. DDL is not carried: a partition that was detached on
//! the publisher is still one here, where it takes no rows but its own, and keeps its rows from the
//! default partition.

use crate::ApplyError;
use crate::postgres::session::Session;
use std::fmt::Write as _;

/// Partitions that are named at most.
const NAMED_MAX: usize = 5;

/// How the bound of a partition by hash begins.
const BY_HASH: &str = "FOR VALUES WITH";

/// A table ($1, quoted): whether it has partitions, what it is a partition of, and its bound.
const TABLE: &str = "SELECT c.relkind = 'p', i.inhparent::pg_catalog.regclass, \
       pg_catalog.pg_get_expr(c.relpartbound, c.oid), c.oid::pg_catalog.regclass \
     FROM pg_catalog.pg_class c \
     LEFT JOIN pg_catalog.pg_inherits i ON i.inhrelid = c.oid AND c.relispartition \
     WHERE c.oid = pg_catalog.to_regclass($1)";

/// The other partitions of what a table ($1, quoted) is one of, with their bounds.
const OTHERS: &str = "SELECT o.inhrelid::pg_catalog.regclass, \
       pg_catalog.pg_get_expr(c.relpartbound, c.oid) \
     FROM pg_catalog.pg_inherits i \
     JOIN pg_catalog.pg_inherits o ON o.inhparent = i.inhparent AND o.inhrelid <> i.inhrelid \
     JOIN pg_catalog.pg_class c ON c.oid = o.inhrelid \
     WHERE i.inhrelid = pg_catalog.to_regclass($1) ORDER BY 1";

impl Session {
    /// What to do where a row's table takes it on the publisher, and no partition here. `table` is
    /// its name on the target, quoted. `None` where it is neither partitioned nor a partition.
    pub(crate) async fn without_partition(
        &mut self,
        table: &str,
    ) -> Result<Option<String>, ApplyError> {
        let rows = self.query(TABLE, &[Some(table)]).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let (is_partitioned, parent, bound) = (row.get(0) == Some("t"), row.get(1), row.get(2));
        match (parent, bound) {
            (Some(parent), Some("DEFAULT")) => {
                let parent = parent.to_owned();
                let others = self.query(OTHERS, &[Some(table)]).await?;
                let others: Vec<(&str, &str)> =
                    others.iter().filter_map(|row| Some((row.get(0)?, row.get(1)?))).collect();
                Ok(Some(of_default(table, &parent, &others)))
            }
            (Some(parent), Some(bound)) if bound.starts_with(BY_HASH) => Ok(Some(format!(
                "On the target {table} is a partition of {parent} {bound}, and takes no other rows. \
                 Enums are hashed by their OIDs, and text by its bytes, so servers differ in where a \
                 row goes. Publish it through its root (publish_via_partition_root = true), with a \
                 subscription of another name and empty tables on the target. Or leave the tables \
                 apart there: ALTER TABLE {parent} DETACH PARTITION {table}, as all others of its \
                 partitions, and DROP TABLE {parent}. Then go on (farshore resume)"
            ))),
            (Some(parent), Some(bound)) => Ok(Some(format!(
                "On the target {table} is a partition of {parent} {bound}, and takes no other rows. \
                 If it was detached on the publisher (DDL is not carried), on the target: ALTER \
                 TABLE {parent} DETACH PARTITION {table}. If it was attached there anew with another \
                 bound, do both on the target. Then go on (farshore resume)"
            ))),
            _ if is_partitioned => Ok(Some(format!(
                "On the target {table} has no partition for the row: make one there, as on the \
                 publisher (CREATE TABLE … PARTITION OF {table} …), and go on (farshore resume)"
            ))),
            _ => Ok(None),
        }
    }
}

/// Of the default partition of a table, and the others.
fn of_default(table: &str, parent: &str, others: &[(&str, &str)]) -> String {
    let mut named = String::new();
    for (number, (other, bound)) in others.iter().take(NAMED_MAX).enumerate() {
        let comma = if number == 0 { "" } else { ", " };
        let _ = write!(named, "{comma}{other} {bound}");
    }
    if others.len() > NAMED_MAX {
        let _ = write!(named, ", and {} more", others.len() - NAMED_MAX);
    }
    let which = match others {
        [(other, _)] => other,
        _ => "…",
    };
    format!(
        "On the target {table} is the default partition of {parent}, and another one takes the row \
         ({named}). If that was detached on the publisher (DDL is not carried), on the target: ALTER \
         TABLE {parent} DETACH PARTITION {which}. Then go on (farshore resume)"
    )
}

#[cfg(test)]
mod tests {
    use super::of_default;

    #[test]
    fn the_one_that_may_have_been_detached_is_named_and_of_many_some() {
        let one = of_default("s.d", "s.p", &[("s.p1", "FOR VALUES IN (1)")]);
        assert!(one.contains("ALTER TABLE s.p DETACH PARTITION s.p1. Then"), "{one}");
        let many = [("s.p1", "FOR VALUES IN (1)"); 7];
        let many = of_default("s.d", "s.p", &many);
        assert!(many.contains(", and 2 more") && many.contains("DETACH PARTITION …"), "{many}");
    }
}
