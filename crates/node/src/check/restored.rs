//! A target that is to be restored from a backup: what it will hold beyond what is published.

use super::published::Published;
use super::tables::Table;
use super::{Findings, some_of};
use crate::config::Subscription;
use farshore_apply::backup::{NotFollowed, delete_left_out};
use farshore_capture::publication::TableName;
use std::collections::HashMap;

/// Says of a subscription that waits for its backup what is to be done about rows and columns that
/// are not published. `there` are the tables that its target has by now.
pub fn check(
    subscription: &Subscription,
    published: &Published,
    there: &HashMap<TableName, Table>,
    findings: &mut Findings,
) {
    let on_target =
        || published.tables.iter().map(|(name, t)| (subscription.spec.schema.names.table(name), t));
    let filtered: Vec<(TableName, String)> = on_target()
        .filter_map(|(name, table)| {
            let partitioned = there.get(&name).unwrap_or(table).kind == 'p';
            let delete = delete_left_out(&name, partitioned, table.row_filter.as_ref()?);
            Some((name, delete))
        })
        .collect();
    if !filtered.is_empty() {
        let (tables, deletes): (Vec<String>, Vec<String>) =
            filtered.into_iter().map(|(name, delete)| (name.to_string(), delete)).unzip();
        findings.warning(
            format!(
                "a backup holds rows that the publication's row filters leave out, and a target that \
                 has them is not initialised: {}",
                some_of(&tables)
            ),
            format!(
                "On the target, once it is restored and before farshore initialise: {}",
                deletes.join("; ")
            ),
        );
    }
    let not_followed: Vec<String> = on_target()
        .filter_map(|(table, source)| {
            let target = there.get(&table)?;
            let is_sent = |name: &str| source.columns.iter().any(|sent| sent.name == name);
            let not_sent = target.columns.iter().filter(|c| !c.generated && !is_sent(&c.name));
            let columns: Vec<String> = not_sent.map(|column| column.name.clone()).collect();
            (!columns.is_empty()).then(|| NotFollowed { table, columns }.to_string())
        })
        .collect();
    if !not_followed.is_empty() {
        findings.note(format!(
            "columns that are not published stay on the target as the backup has them: {}",
            some_of(&not_followed)
        ));
    }
}
