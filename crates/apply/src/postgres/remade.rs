//! A table on the target that was dropped and made again has lost its rows, and nothing else tells:
//! statements go by name, and meet the new table. So `farshore.table_copy` keeps the OID of the
//! table whose rows were copied (`target_oid`).
//!
//! OIDs change too where the whole database is restored from a dump. Then `farshore.table_copy` is
//! another table itself, and `noted_in`, which is its OID, tells.

use crate::ApplyError;
use crate::postgres::noted_definition::schemas_and_names;
use crate::postgres::progress::{SCHEMA_LOCK, TableCopyColumn};
use crate::postgres::session::Session;
use crate::postgres::target_table::names;
use crate::remedy;
use farshore_capture::publication::TableName;
use farshore_pg::quote_literal;

/// Copied tables that are not known by their OIDs as they are now: their numbers among the
/// parameters, and whether another table was known. Parameters: the subscription, the tables'
/// schemas and names, and their names on the target.
const OTHERS: &str = "SELECT w.number - 1, \
       c.target_oid IS NOT NULL AND c.noted_in IS NOT DISTINCT FROM c.tableoid \
     FROM unnest($2::text::text[], $3::text::text[], $4::text::text[]) \
       WITH ORDINALITY AS w (schema_name, table_name, target, number) \
     JOIN farshore.table_copy c ON c.subscription = $1 AND c.schema_name = w.schema_name \
       AND c.table_name = w.table_name \
     JOIN pg_catalog.pg_class t ON t.oid = pg_catalog.to_regclass(w.target) \
     WHERE (c.target_oid, c.noted_in) IS DISTINCT FROM (t.oid, c.tableoid) ORDER BY 1";

const NOTE: &str = "UPDATE farshore.table_copy c \
     SET target_oid = pg_catalog.to_regclass(w.target)::oid, noted_in = c.tableoid \
     FROM unnest($2::text::text[], $3::text::text[], $4::text::text[]) \
       AS w (schema_name, table_name, target) \
     WHERE c.subscription = $1 AND c.schema_name = w.schema_name \
       AND c.table_name = w.table_name";

/// Who else fills a table.
const FILLED_BY: &str = "SELECT subscription FROM farshore.table_copy c \
     WHERE subscription <> $1 AND target_oid = pg_catalog.to_regclass($2)::oid \
       AND noted_in = c.tableoid LIMIT 1";

impl Session {
    /// Checks that copied tables, each with its name on the target, are still those that were
    /// copied, and notes which they are. One that is another and has rows was filled by somebody.
    ///
    /// # Errors
    /// One is another and empty; the target's.
    pub async fn check_remade(
        &mut self,
        subscription: &str,
        tables: &[(TableName, TableName)],
    ) -> Result<(), ApplyError> {
        if tables.is_empty() || !self.keeps(TableCopyColumn::NotedIn).await? {
            return Ok(());
        }
        let rows = {
            let asked = Asked::of(tables);
            self.query(OTHERS, &asked.parameters(subscription)).await?
        };
        let mut noted = Vec::new();
        for row in &rows {
            let number: usize = row.parse(0).map_err(|error| self.error(error))?;
            let Some((table, target)) = tables.get(number) else { continue };
            if row.get(1) == Some("t") {
                if self.query(&format!("SELECT FROM {target} LIMIT 1"), &[]).await?.is_empty() {
                    return Err(lost(subscription, table, target));
                }
                tracing::warn!(
                    subscription, table = %target,
                    "the table on the target is not the one that was copied: it was dropped and \
                     made again, or renamed, or the site file gives it another name. It has rows, \
                     and is gone on with as it is: if they are not those of the one before, {}",
                    remedy::resync(subscription, Some(table))
                );
            }
            noted.push((table.clone(), target.clone()));
        }
        if !noted.is_empty() {
            let asked = Asked::of(&noted);
            self.execute(NOTE, &asked.parameters(subscription)).await?;
        }
        Ok(())
    }
}

impl Session {
    /// Notes which table on the target rows are copied to, in the transaction that begins the copy:
    /// nobody else may fill it. Who asks while another is about to note it waits for that one. What
    /// was claimed before (`is_ours`) is not asked about.
    ///
    /// # Errors
    /// Another subscription fills it; the target's.
    pub async fn claim_table(
        &mut self,
        subscription: &str,
        table: &TableName,
        target: &TableName,
        is_ours: bool,
    ) -> Result<(), ApplyError> {
        if !self.keeps(TableCopyColumn::NotedIn).await? {
            return Ok(());
        }
        self.simple(SCHEMA_LOCK).await?;
        let asked = Asked::of(&[(table.clone(), target.clone())]);
        self.execute(NOTE, &asked.parameters(subscription)).await?;
        if is_ours { Ok(()) } else { self.check_unclaimed(subscription, target).await }
    }

    /// Checks that no other subscription fills a table.
    ///
    /// # Errors
    /// One does; the target's.
    pub async fn check_unclaimed(
        &mut self,
        subscription: &str,
        target: &TableName,
    ) -> Result<(), ApplyError> {
        if !self.keeps(TableCopyColumn::NotedIn).await? {
            return Ok(());
        }
        let target_name = target.to_string();
        let which = [Some(subscription), Some(target_name.as_str())];
        let others = self.query(FILLED_BY, &which).await?;
        let Some(other) = others.first().and_then(|row| row.get(0)) else { return Ok(()) };
        Err(ApplyError::Setup(format!(
            "subscription \"{subscription}\": table {target} on the target is filled by subscription \
             \"{other}\". Take it out of one of the two; if it was taken out of \"{other}\": DELETE FROM \
             farshore.table_copy WHERE subscription = {0} AND target_oid = {1}::regclass; if \
             \"{other}\" is gone for good: DELETE FROM farshore.subscription WHERE name = {0}; then \
             go on (farshore resume)",
            quote_literal(other),
            quote_literal(&target_name)
        )))
    }

    /// Whether the table that the rows of one were copied to so far is another one now.
    pub async fn is_remade(
        &mut self,
        subscription: &str,
        table: &TableName,
        target: &TableName,
    ) -> Result<bool, ApplyError> {
        if !self.keeps(TableCopyColumn::NotedIn).await? {
            return Ok(false);
        }
        let asked = Asked::of(&[(table.clone(), target.clone())]);
        let rows = self.query(OTHERS, &asked.parameters(subscription)).await?;
        Ok(rows.first().is_some_and(|row| row.get(1) == Some("t")))
    }
}

fn lost(subscription: &str, table: &TableName, target: &TableName) -> ApplyError {
    ApplyError::Setup(format!(
        "subscription \"{subscription}\": table {target} on the target is not the one that was \
         copied: it was dropped and made again, and is empty. What it had does not come again by \
         itself: copy it anew ({})",
        remedy::resync(subscription, Some(table))
    ))
}

/// The parameters of [`OTHERS`] and [`NOTE`].
struct Asked {
    schemas: String,
    names: String,
    targets: String,
}

impl Asked {
    fn of(tables: &[(TableName, TableName)]) -> Asked {
        let (published, targets): (Vec<TableName>, Vec<TableName>) = tables.iter().cloned().unzip();
        let [schemas, published] = schemas_and_names(&published);
        Asked { schemas, names: published, targets: names(&targets) }
    }

    fn parameters<'a>(&'a self, subscription: &'a str) -> [Option<&'a str>; 4] {
        [Some(subscription), Some(&self.schemas), Some(&self.names), Some(&self.targets)]
    }
}
