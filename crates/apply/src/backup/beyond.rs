//! What a target that was restored from a backup holds beyond what is published to it: rows that a
//! row filter leaves out, and columns that a column list leaves out.
//!
//! The rows would stay for ever, since nothing that happens to them is sent, and one that an UPDATE
//! brings within the filter comes as an INSERT of a row that is there already. So they have to go
//! first. Columns are another matter: no change that comes names them, and nobody here can tell those
//! that the publisher has and does not send from those that only the target was given. They stay as
//! they are, as columns of a target always do that are not published, and are told of.

use crate::ApplyError;
use crate::postgres::session::Session;
use crate::postgres::target_table::{rows_of_its_own, target_tables};
use farshore_capture::publication::{PublishedTable, TableName};
use farshore_capture::schema::NameMap;
use farshore_model::quote_identifier;

/// What a restored target holds that is not published.
#[derive(Debug, Default)]
pub(super) struct Beyond {
    /// Tables of the target with rows that their filters leave out: what deletes those.
    pub(super) rows: Vec<String>,
    /// Columns of the target that do not follow.
    pub(super) columns: Vec<NotFollowed>,
}

/// Columns of a table of the target that are not published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotFollowed {
    /// The table on the target.
    pub table: TableName,
    /// Its columns.
    pub columns: Vec<String>,
}

impl std::fmt::Display for NotFollowed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let columns: Vec<String> = self.columns.iter().map(|name| quote_identifier(name)).collect();
        write!(f, "{} ({})", self.table, columns.join(", "))
    }
}

/// Deletes from a table of a target the rows that a row filter leaves out.
pub fn delete_left_out(table: &TableName, partitioned: bool, filter: &str) -> String {
    format!("DELETE FROM {} WHERE ({filter}) IS NOT TRUE", rows_of_its_own(table, partitioned))
}

impl Session {
    /// Looks at the tables that the target was restored with; of those with a row filter it reads all
    /// rows, if it must.
    pub(super) async fn beyond(
        &mut self,
        held: &[&PublishedTable],
        names: &NameMap,
    ) -> Result<Beyond, ApplyError> {
        let on_target: Vec<TableName> =
            held.iter().map(|table| names.table(&table.table)).collect();
        let found = target_tables(self, &on_target).await?;
        let mut beyond = Beyond::default();
        for ((published, name), target) in held.iter().zip(on_target).zip(found) {
            // Dropped since it was looked for: the agent says so.
            let Some(target) = target else { continue };
            if let Some(filter) = &published.row_filter {
                let rows = rows_of_its_own(&name, target.partitioned);
                let left_out = format!("SELECT FROM {rows} WHERE ({filter}) IS NOT TRUE LIMIT 1");
                if !self.query(&left_out, &[]).await?.is_empty() {
                    beyond.rows.push(delete_left_out(&name, target.partitioned, filter));
                }
            }
            let is_sent = |column: &str| published.columns.iter().any(|sent| sent.name == column);
            let not_sent = target.columns.iter().filter(|c| !c.generated && !is_sent(&c.name));
            let columns: Vec<String> = not_sent.map(|column| column.name.clone()).collect();
            if !columns.is_empty() {
                beyond.columns.push(NotFollowed { table: name, columns });
            }
        }
        Ok(beyond)
    }
}
