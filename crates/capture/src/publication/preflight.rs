//! What can be said of a publication before anything is made.

use super::{
    PublicationSpec, TableName, TablePattern, TablePatternDisplay, comment, create_statement,
};
use crate::CaptureError;
use farshore_pg::Connection;

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
    /// list can be published.
    pub async fn try_articles(&self, sql: &mut Connection) -> Vec<CaptureError> {
        let members = match self.members(sql).await {
            Ok(members) => members,
            Err(error) => return vec![error],
        };
        let plain: Vec<String> = match self.expand_tables(sql).await {
            Ok(tables) => tables.iter().map(TableName::to_string).collect(),
            Err(error) => return vec![error],
        };
        let mut refused = Vec::new();
        for member in members.iter().filter(|member| !plain.contains(member)) {
            let create = create_statement("farshore_check", member, self.via_partition_root);
            let tried = sql.simple_query(&format!("BEGIN; {create}; ROLLBACK")).await;
            if let Err(error) = tried {
                refused.push(self.refused(member, &error));
                if let Err(error) = sql.simple_query("ROLLBACK").await {
                    refused.push(self.publisher_error(error));
                    break;
                }
            }
        }
        refused
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
