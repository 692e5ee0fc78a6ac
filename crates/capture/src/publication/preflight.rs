//! What can be said of a publication before anything is made.

use super::ours::{comment, create_statement, members_of, only};
use super::{PublicationSpec, TableName, TablePattern, TablePatternDisplay, Unfit};
use crate::CaptureError;
use farshore_pg::{Connection, ResultSet, Row, quote_identifier, quote_literal};

/// What came of trying to publish articles.
#[derive(Debug, Default)]
pub struct Tried {
    /// Why some cannot be published.
    pub refused: Vec<CaptureError>,
    /// Columns of filters that are not in the table's replica identity: the publisher refuses every
    /// UPDATE and DELETE of such a table (PostgreSQL docs: "29.4.2. Expression Restrictions").
    pub filtered_by: Vec<(TableName, Vec<String>)>,
    /// Columns whose large values the publisher does not send of a row that an UPDATE brings within
    /// the filter, if the UPDATE leaves them as they are.
    pub not_sent: Vec<(TableName, Vec<String>)>,
}

/// First version with row filters, as `server_version_num` writes it.
const FILTERS_SINCE: u32 = 150_000;

/// Which those are, of a publication that was just made. A list of columns leaves dependencies of
/// the same kind.
const FILTERED_BY: &str = "SELECT a.attname FROM pg_publication p \
    JOIN pg_publication_rel r ON r.prpubid = p.oid JOIN pg_class c ON c.oid = r.prrelid \
    JOIN pg_depend d ON d.classid = 'pg_publication_rel'::regclass AND d.objid = r.oid \
      AND d.refclassid = 'pg_class'::regclass AND d.refobjid = c.oid AND d.refobjsubid > 0 \
    JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = d.refobjsubid \
    WHERE p.pubname = 'farshore_check' AND r.prqual IS NOT NULL AND c.relreplident <> 'f' \
    AND coalesce(a.attnum <> ALL (r.prattrs::int2[]), true) \
    AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid \
      AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]) \
      AND CASE c.relreplident WHEN 'd' THEN i.indisprimary \
        WHEN 'i' THEN i.indisreplident ELSE false END) \
    ORDER BY a.attnum";

/// Columns of a publication whose values may lie apart from the row (TOAST) and are not in its
/// replica identity. Of an UPDATE that a filter turns into an INSERT the old values are all that
/// `pgoutput` can fill in, so what it left as it was is missing. Of a partitioned table it is the
/// leaves' identity that is in the log.
fn not_sent(publication: &str) -> String {
    format!(
        "SELECT n.nspname, c.relname, a.attname FROM pg_publication p \
         JOIN pg_publication_rel r ON r.prpubid = p.oid JOIN pg_class c ON c.oid = r.prrelid \
         JOIN pg_namespace n ON n.oid = c.relnamespace \
         JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped \
         WHERE p.pubname = {} AND r.prqual IS NOT NULL \
         AND (CASE c.relkind WHEN 'p' THEN EXISTS (SELECT FROM pg_partition_tree(c.oid) t \
             JOIN pg_class leaf ON leaf.oid = t.relid \
             WHERE t.isleaf AND leaf.relreplident IN ('d', 'i')) \
           ELSE c.relreplident IN ('d', 'i') END) \
         AND a.attstorage IN ('x', 'e') AND a.attgenerated = '' \
         AND coalesce(a.attnum = ANY (r.prattrs::int2[]), true) \
         AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid \
           AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]) \
           AND CASE c.relreplident WHEN 'i' THEN i.indisreplident ELSE i.indisprimary END) \
         ORDER BY 1, 2, a.attnum",
        quote_literal(publication)
    )
}

/// The tables and columns of an answer to [`not_sent`].
fn by_table(rows: &[Row]) -> Vec<(TableName, Vec<String>)> {
    let mut found: Vec<(TableName, Vec<String>)> = Vec::new();
    for row in rows {
        let text = |at| row.get(at).unwrap_or_default().to_owned();
        let (table, column) = (TableName { schema: text(0), name: text(1) }, text(2));
        match found.last_mut().filter(|(last, _)| *last == table) {
            Some((_, columns)) => columns.push(column),
            None => found.push((table, vec![column])),
        }
    }
    found
}

impl PublicationSpec {
    /// What an adopted publication does not publish of what is done to its tables, for people: their
    /// rows on targets stay as they are then. `None` if it publishes everything, or is our own.
    pub async fn not_published(
        &self,
        sql: &mut Connection,
    ) -> Result<Option<String>, farshore_pg::Error> {
        let Some(adopted) = &self.adopt_publication else { return Ok(None) };
        let rows = sql
            .query(
                "SELECT concat_ws(', ', CASE WHEN NOT pubinsert THEN 'INSERT' END, \
                   CASE WHEN NOT pubupdate THEN 'UPDATE' END, \
                   CASE WHEN NOT pubdelete THEN 'DELETE' END, \
                   CASE WHEN NOT pubtruncate THEN 'TRUNCATE' END) \
                 FROM pg_publication WHERE pubname = $1",
                &[Some(adopted)],
            )
            .await?;
        let missing = rows.first().and_then(|row| row.get(0)).unwrap_or_default();
        Ok((!missing.is_empty()).then(|| {
            format!(
                "publication {} does not publish {missing}: none of it reaches a target",
                quote_identifier(adopted)
            )
        }))
    }

    /// Whether the publisher's publication needs no change to publish just what is configured; an
    /// adopted one never does.
    pub async fn is_as_configured(
        &self,
        sql: &mut Connection,
        unfit: Unfit,
    ) -> Result<bool, CaptureError> {
        if self.adopt_publication.is_some() {
            return Ok(true);
        }
        let tables = self.expand_tables(sql, unfit).await?;
        let wanted = comment(&members_of(&tables).join(", "), self.via_partition_root);
        let is_as_wanted = self.existing_comment(sql).await? == Some(Some(wanted));
        let members_now = self.members_now(sql).await?;
        Ok(is_as_wanted && tables.keys().all(|table| members_now.contains(table)))
    }

    /// Of the publisher's publication, which is there, what [`Tried::not_sent`] is of one that is to
    /// be made.
    ///
    /// # Errors
    /// When the publisher cannot be asked.
    pub async fn not_sent(
        &self,
        sql: &mut Connection,
    ) -> Result<Vec<(TableName, Vec<String>)>, CaptureError> {
        if sql.server_version() < FILTERS_SINCE {
            return Ok(Vec::new());
        }
        let rows = sql.query(&not_sent(&self.publication_name()), &[]).await;
        Ok(by_table(&rows.map_err(|error| self.publisher_error(error))?))
    }

    /// Tries, in a transaction that is rolled back, whether each table with a filter or a column
    /// list can be published, and looks what of a filter would make the publisher refuse changes.
    pub async fn try_articles(&self, sql: &mut Connection, unfit: Unfit) -> Tried {
        let mut done = Tried::default();
        let tables = match self.expand_tables(sql, unfit).await {
            Ok(tables) => tables,
            Err(error) => {
                done.refused.push(error);
                return done;
            }
        };
        let members = members_of(&tables);
        let listed = tables.into_keys().zip(&members);
        for (table, member) in listed.filter(|(table, member)| table.to_string() != **member) {
            let create = create_statement("farshore_check", &only(member), self.via_partition_root);
            let has_filters = sql.server_version() >= FILTERS_SINCE;
            let none = || "SELECT 1 WHERE false".to_owned();
            let (by, large) = if has_filters {
                (FILTERED_BY.to_owned(), not_sent("farshore_check"))
            } else {
                (none(), none())
            };
            let look = format!("BEGIN; {create}; {by}; {large}; ROLLBACK");
            match sql.simple_query(&look).await {
                Ok(sets) => {
                    let mut answers = sets.iter().filter(|set| !set.columns.is_empty());
                    let rows =
                        |set: Option<&ResultSet>| set.map_or_else(Vec::new, |s| s.rows.clone());
                    let (by, large) = (rows(answers.next()), rows(answers.next()));
                    let by = by.iter().filter_map(|row| row.get(0).map(str::to_owned));
                    let by: Vec<String> = by.collect();
                    // Where it refuses every UPDATE, none brings a row in.
                    if by.is_empty() {
                        done.not_sent.append(&mut by_table(&large));
                    } else {
                        done.filtered_by.push((table, by));
                    }
                }
                Err(error) => {
                    done.refused.push(self.refused(member, error));
                    if let Err(error) = sql.simple_query("ROLLBACK").await {
                        done.refused.push(self.publisher_error(error));
                        break;
                    }
                }
            }
        }
        done
    }

    /// Wildcards that match no table as yet.
    ///
    /// # Errors
    /// When the publisher cannot be asked.
    pub async fn without_tables(&self, sql: &mut Connection) -> Result<Vec<String>, CaptureError> {
        let mut without = Vec::new();
        if self.adopt_publication.is_some() {
            return Ok(without);
        }
        for pattern in &self.tables {
            let alone = PublicationSpec {
                tables: vec![pattern.clone()],
                articles: Default::default(),
                ..self.clone()
            };
            let is_empty = pattern.name.is_none()
                && alone.expand_tables(sql, Unfit::Refuse).await.is_ok_and(|all| all.is_empty());
            if is_empty {
                without.push(TablePatternDisplay(pattern).to_string());
            }
        }
        Ok(without)
    }

    /// Whether there is a place for tables that the pattern would match: a schema without any is one
    /// that is filled later, and one that is not there is misspelt.
    pub(super) async fn may_come_to_match(
        &self,
        sql: &mut Connection,
        pattern: &TablePattern,
    ) -> Result<bool, CaptureError> {
        let Some(schema) = pattern.schema.as_ref().filter(|_| pattern.name.is_none()) else {
            return Ok(pattern.name.is_none());
        };
        let there = "SELECT FROM pg_namespace WHERE nspname = $1";
        let rows = sql.query(there, &[Some(schema)]).await;
        Ok(!rows.map_err(|error| self.publisher_error(error))?.is_empty())
    }

    /// Why a pattern matches nothing that can be published.
    pub(super) async fn no_match(
        &self,
        sql: &mut Connection,
        pattern: &TablePattern,
    ) -> Result<CaptureError, CaptureError> {
        let shown = TablePatternDisplay(pattern);
        let name = &self.name;
        let (Some(schema), Some(table)) = (&pattern.schema, &pattern.name) else {
            return Ok(CaptureError::Setup(format!(
                "publication \"{name}\": no table on the publisher matches \"{shown}\". Create \
                 one, or correct `tables` in the site file"
            )));
        };
        let rows = sql
            .query(
                "SELECT c.relkind, c.relpersistence FROM pg_class c \
                 JOIN pg_namespace n ON n.oid = c.relnamespace \
                 WHERE n.nspname = $1 AND c.relname = $2",
                &[Some(schema), Some(table)],
            )
            .await
            .map_err(|error| self.publisher_error(error))?;
        let kind = rows.first().map(|row| (row.get(0).unwrap_or(""), row.get(1).unwrap_or("")));
        let what = match kind {
            None => {
                format!("there is no table {shown} on the publisher. Create it, or correct")
            }
            Some(("v" | "m", _)) => format!(
                "{shown} is a view, and views have no changes of their own. Publish the tables \
                 behind it: correct"
            ),
            Some(("f", _)) => format!(
                "{shown} is a foreign table: its changes are in another server's log. Publish it \
                 there: correct"
            ),
            Some((_, "u")) => format!(
                "{shown} is unlogged, and the log does not have its changes. ALTER TABLE {shown} \
                 SET LOGGED, or correct"
            ),
            Some((_, "t")) => format!("{shown} is a temporary table. Correct"),
            Some(("r" | "p", _)) => format!("{shown} belongs to PostgreSQL itself. Correct"),
            Some((_, _)) => format!("{shown} is not a table. Correct"),
        };
        Ok(CaptureError::Setup(format!("publication \"{name}\": {what} `tables` in the site file")))
    }
}
