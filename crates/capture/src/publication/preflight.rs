//! What can be said of a publication before anything is made.

use super::{
    PublicationSpec, TableName, TablePattern, TablePatternDisplay, comment, create_statement,
};
use crate::CaptureError;
use farshore_pg::Connection;

/// What came of trying to publish articles.
#[derive(Debug, Default)]
pub struct Tried {
    /// Why some cannot be published.
    pub refused: Vec<CaptureError>,
    /// Columns of filters that are not in the table's replica identity: the publisher refuses every
    /// UPDATE and DELETE of such a table (PostgreSQL docs: "29.4.2. Expression Restrictions").
    pub filtered_by: Vec<(TableName, Vec<String>)>,
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

impl PublicationSpec {
    /// Whether the publisher's publication needs no change to publish just what is configured; an
    /// adopted one never does.
    pub async fn is_as_configured(&self, sql: &mut Connection) -> Result<bool, CaptureError> {
        if self.adopt_publication.is_some() {
            return Ok(true);
        }
        let wanted = comment(&self.members(sql).await?.join(", "), self.via_partition_root);
        Ok(self.existing_comment(sql).await? == Some(Some(wanted)) && self.has_members(sql).await?)
    }

    /// Tries, in a transaction that is rolled back, whether each table with a filter or a column
    /// list can be published, and looks what of a filter would make the publisher refuse changes.
    pub async fn try_articles(&self, sql: &mut Connection) -> Tried {
        let mut done = Tried::default();
        let asked = match self.members(sql).await {
            Ok(members) => self.expand_tables(sql).await.map(|tables| (members, tables)),
            Err(error) => Err(error),
        };
        let (members, tables) = match asked {
            Ok(asked) => asked,
            Err(error) => {
                done.refused.push(error);
                return done;
            }
        };
        let listed = tables.into_iter().zip(&members);
        for (table, member) in listed.filter(|(table, member)| table.to_string() != **member) {
            let create = create_statement("farshore_check", member, self.via_partition_root);
            let has_filters = sql.server_version() >= FILTERS_SINCE;
            let look = if has_filters { FILTERED_BY } else { "SELECT 1 WHERE false" };
            let tried = sql.simple_query(&format!("BEGIN; {create}; {look}; ROLLBACK")).await;
            match tried {
                Ok(sets) => {
                    let rows = sets.iter().flat_map(|set| &set.rows);
                    let columns = rows.filter_map(|row| row.get(0).map(str::to_owned));
                    let columns: Vec<String> = columns.collect();
                    if !columns.is_empty() {
                        done.filtered_by.push((table, columns));
                    }
                }
                Err(error) => {
                    done.refused.push(self.refused(member, &error));
                    if let Err(error) = sql.simple_query("ROLLBACK").await {
                        done.refused.push(self.publisher_error(error));
                        break;
                    }
                }
            }
        }
        done
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
