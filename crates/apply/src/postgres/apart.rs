//! Subscribed tables that are partitions of subscribed tables on the target.
//!
//! A publisher that publishes partitioned tables through their roots publishes a partition by itself
//! once it is detached. On the target it is still a partition then, and what empties the root there
//! would empty it, although it was copied for good. So it is detached there too, as soon as nothing
//! is left to come for it through the root; and nothing empties a tree that holds it.
//!
//! Who reads the root on the target is in the way of that, for as long as he likes, and whoever comes
//! after us waits with us. So it is tried for a moment, and left for later; what streams goes on.

use crate::ApplyError;
use crate::error::passes_by_itself;
use crate::postgres::progress::TableCopyColumn;
use crate::postgres::schema::SchemaSettings;
use crate::postgres::session::Session;
use crate::postgres::target_table::names;
use farshore_capture::publication::{PublishedTable, TableName};
use farshore_pg::Row;

/// What is below these tables (`$2`) on the target and is filled by itself: by one of our names
/// (`$3`), or as `farshore.table_copy` notes it.
const BELOW: &str = "WITH RECURSIVE filled (relid, subscription) AS ( \
       SELECT pg_catalog.to_regclass(own.name)::oid, NULL::text \
       FROM pg_catalog.unnest($3::text::text[]) AS own (name) NOTED), \
     below (root, parent, relid) AS ( \
       SELECT c.oid, c.oid, c.oid FROM pg_catalog.unnest($2::text::text[]) AS root (name) \
       JOIN pg_catalog.pg_class c ON c.oid = pg_catalog.to_regclass(root.name) AND c.relkind = 'p' \
       UNION ALL SELECT b.root, i.inhparent, i.inhrelid FROM below b \
       JOIN pg_catalog.pg_inherits i ON i.inhparent = b.relid AND NOT i.inhdetachpending) \
     SELECT rn.nspname, r.relname, pn.nspname, p.relname, cn.nspname, c.relname, f.subscription \
     FROM (SELECT DISTINCT relid, nullif(subscription, $1) AS subscription FROM filled) f \
     JOIN below b ON b.relid = f.relid AND b.relid <> b.root \
     JOIN pg_catalog.pg_class r ON r.oid = b.root \
     JOIN pg_catalog.pg_namespace rn ON rn.oid = r.relnamespace \
     JOIN pg_catalog.pg_class p ON p.oid = b.parent \
     JOIN pg_catalog.pg_namespace pn ON pn.oid = p.relnamespace \
     JOIN pg_catalog.pg_class c ON c.oid = b.relid \
     JOIN pg_catalog.pg_namespace cn ON cn.oid = c.relnamespace ORDER BY 1, 2, 5, 6";

/// Left out where `farshore.table_copy` keeps no OIDs.
const NOTED: &str = "UNION ALL SELECT noted.target_oid, noted.subscription \
     FROM farshore.table_copy noted WHERE noted.noted_in = noted.tableoid";

/// A lock is not waited for longer: what uses the root may itself wait for who waits behind us.
const LOCK_WAIT: &str = "2s";

/// A table that is filled by itself and is a partition of another one, by their names on the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Below {
    /// The one above, of which its rows seem to be.
    pub root: TableName,
    /// What it is a partition of: the root, or something between.
    pub parent: TableName,
    /// The table.
    pub table: TableName,
    /// Which other subscription fills it.
    pub filled_by: Option<String>,
}

impl Below {
    fn detach(&self) -> String {
        format!("ALTER TABLE {} DETACH PARTITION {}", self.parent, self.table)
    }

    /// The error that it is there; `why` tells why we leave it there.
    pub fn error(&self, subscription: &str, why: &str) -> ApplyError {
        let by_whom = match &self.filled_by {
            Some(other) => format!("is filled by subscription \"{other}\""),
            None => "is published by itself".to_owned(),
        };
        ApplyError::Setup(format!(
            "subscription \"{subscription}\": table {} {by_whom}, and on the target it is a partition \
             of {}: what empties that would empty it too. {why}. On the target: {}; then go on \
             (farshore resume)",
            self.table,
            self.root,
            self.detach()
        ))
    }
}

impl Session {
    /// What is below `roots` and filled by itself: by its own name among `own`, or by what any
    /// subscription noted (of ours, that may be long ago). All names are the target's.
    pub async fn filled_below(
        &mut self,
        subscription: &str,
        roots: &[TableName],
        own: &[TableName],
    ) -> Result<Vec<Below>, ApplyError> {
        if roots.is_empty() {
            return Ok(Vec::new());
        }
        let noted = if self.keeps(TableCopyColumn::NotedIn).await? { NOTED } else { "" };
        let (roots, own) = (names(roots), names(own));
        let parameters = [Some(subscription), Some(roots.as_str()), Some(own.as_str())];
        let rows = self.query(&BELOW.replace("NOTED", noted), &parameters).await?;
        Ok(rows.iter().map(below).collect())
    }

    /// Detaches a table from what it is a partition of on the target.
    ///
    /// # Errors
    /// Tables are not ours to change, or the target does not let us; somebody uses the root
    /// ([`ApplyError::InUse`]), and trying again later is called for.
    pub async fn set_apart(
        &mut self,
        subscription: &str,
        settings: &SchemaSettings,
        below: &Below,
    ) -> Result<(), ApplyError> {
        if !settings.create_tables {
            let why = "It is not detached there, because create_tables = false";
            return Err(below.error(subscription, why));
        }
        let sql = format!("BEGIN; SET LOCAL lock_timeout = '{LOCK_WAIT}'; {}", below.detach());
        let Err(error) = self.connection.simple_query(&sql).await else {
            self.simple("COMMIT").await?;
            tracing::info!(
                subscription, table = %below.table, root = %below.root,
                "the table is published by itself: it was detached on the target"
            );
            return Ok(());
        };
        match error.sqlstate().map(str::to_owned).as_deref() {
            Some("55P03") => {
                self.simple("ROLLBACK").await?;
                Err(ApplyError::InUse(format!(
                    "subscription \"{subscription}\": {} is to be detached from {} on the target, \
                     and gives way to who uses them there; it is tried again",
                    below.table, below.parent
                )))
            }
            Some(_) if error.server_error().is_some_and(|said| !passes_by_itself(said)) => {
                let message = error.to_string();
                let why = message.trim_end_matches('.');
                Err(below.error(subscription, &format!("It cannot be detached there: {why}")))
            }
            Some(_) | None => Err(self.error(error)),
        }
    }
}

/// The names on the target of published tables, and of those among them that stand for all of their
/// partitions.
pub struct PublishedNames {
    /// All.
    pub tables: Vec<TableName>,
    /// Those that are published through their root.
    pub roots: Vec<TableName>,
}

impl PublishedNames {
    /// Of what the publisher says that it publishes.
    pub fn of(published: &[PublishedTable], settings: &SchemaSettings) -> PublishedNames {
        let name = |table: &PublishedTable| settings.names.table(&table.table);
        PublishedNames {
            tables: published.iter().map(name).collect(),
            roots: published.iter().filter(|table| table.partitioned).map(name).collect(),
        }
    }
}

fn below(row: &Row) -> Below {
    let name = |column: usize| TableName {
        schema: row.get(column).unwrap_or_default().to_owned(),
        name: row.get(column + 1).unwrap_or_default().to_owned(),
    };
    Below {
        root: name(0),
        parent: name(2),
        table: name(4),
        filled_by: row.get(6).map(str::to_owned),
    }
}
