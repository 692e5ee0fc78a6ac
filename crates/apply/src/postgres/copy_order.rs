//! In which order tables are copied, and which of them have to start over.
//!
//! Where foreign keys keep quiet everything is copied side by side. Where they fire
//! ([`Session::replica_role`] is not to be had), parents come before their children, and tables
//! that foreign keys bind together stand at one consistent point: a child's rows may refer to
//! parents that were not there at an earlier point. So an interrupted first copy starts over with
//! all of such a set, the finished ones included.

use crate::ApplyError;
use crate::postgres::foreign_keys::{CopyUnit, ForeignKeys};
use crate::postgres::in_use::BOUNDED;
use crate::postgres::progress::TABLE_COPYING;
use crate::postgres::session::Session;
use crate::postgres::target_table::{rows_of_its_own, target_tables};
use farshore_capture::publication::TableName;
use farshore_pg::quote_literal;
use std::collections::HashSet;

/// A table as its copy stands.
#[derive(Clone, Debug)]
pub struct Standing {
    /// Its name on the publisher, as progress is kept by it.
    pub table: TableName,
    /// Its name on the target.
    pub target: TableName,
    /// Its copy was begun.
    pub begun: bool,
    /// Its copy is complete.
    pub copied: bool,
}

/// The foreign keys that an initial copy has to mind.
pub struct CopyOrder {
    /// `None` where they keep quiet.
    keys: Option<ForeignKeys>,
}

impl CopyOrder {
    /// Reads the target's foreign keys if they fire for what we write.
    pub async fn load(session: &mut Session) -> Result<CopyOrder, ApplyError> {
        if session.replica_role {
            return Ok(CopyOrder { keys: None });
        }
        let loaded = ForeignKeys::load(&mut session.connection).await;
        Ok(CopyOrder { keys: Some(loaded.map_err(|error| session.error(error))?) })
    }

    /// Tables that have to start over: their numbers in `tables`. `streaming` tells that finished
    /// tables have been followed since, and so stay as they are.
    pub fn start_over(&self, tables: &[Standing], streaming: bool) -> HashSet<usize> {
        let Some(keys) = &self.keys else { return HashSet::new() };
        let names: Vec<TableName> = tables.iter().map(|table| table.target.clone()).collect();
        let sets = keys.bound_together(&names);
        let unfinished: HashSet<usize> =
            (0..tables.len()).filter(|i| !tables[*i].copied).map(|i| sets[i]).collect();
        let is_bound = |i: usize| {
            sets.iter().filter(|set| **set == sets[i]).count() > 1
                || keys.of_child(&names[i]).any(|key| key.child == key.parent)
        };
        (0..tables.len())
            .filter(|i| tables[*i].begun && unfinished.contains(&sets[*i]) && is_bound(*i))
            .filter(|i| !(streaming && tables[*i].copied))
            .collect()
    }

    /// Empties tables that start over, and forgets what was copied of them, in one transaction.
    pub async fn empty(
        &self,
        session: &mut Session,
        subscription: &str,
        tables: &[Standing],
        over: &HashSet<usize>,
    ) -> Result<(), ApplyError> {
        if over.is_empty() {
            return Ok(());
        }
        let mut forget = String::new();
        for i in over {
            let TableName { schema, name } = &tables[*i].table;
            let this = format!(
                "subscription = {} AND schema_name = {} AND table_name = {}",
                quote_literal(subscription),
                quote_literal(schema),
                quote_literal(name)
            );
            forget.push_str(&format!(
                "DELETE FROM farshore.range_copy WHERE {this}; UPDATE farshore.table_copy \
                 SET state = '{TABLE_COPYING}' WHERE {this}; "
            ));
        }
        let list: Vec<usize> = over.iter().copied().collect();
        let names: Vec<TableName> = list.iter().map(|i| tables[*i].target.clone()).collect();
        let there = target_tables(session, &names).await?;
        let rows: Vec<String> = names
            .iter()
            .zip(there)
            .map(|(name, there)| {
                rows_of_its_own(name, there.is_some_and(|there| there.partitioned))
            })
            .collect();
        let empty = format!("TRUNCATE {}", rows.join(", "));
        let truncate = format!("BEGIN; {BOUNDED}; {empty}; {forget} COMMIT");
        match session.connection.simple_query(&truncate).await {
            Ok(_) => return Ok(()),
            // Something else refers to them (0A000), or we lack the right to truncate (42501).
            Err(error) if matches!(error.sqlstate(), Some("0A000" | "42501")) => {}
            Err(error) => {
                return Err(session.in_use_or(error, subscription, &empty, &names).await);
            }
        }
        session.simple("ROLLBACK").await?;
        // Children first.
        let stages = self.stages(subscription, &names)?;
        let deletes: Vec<String> = stages
            .iter()
            .flatten()
            .flat_map(|unit| match unit {
                CopyUnit::Apart(i) => vec![*i],
                CopyUnit::Together(all) => all.clone(),
            })
            .rev()
            .map(|i| format!("DELETE FROM {}; ", rows[i]))
            .collect();
        session
            .simple(&format!(
                "BEGIN; SET CONSTRAINTS ALL DEFERRED; {}{forget} COMMIT",
                deletes.concat()
            ))
            .await
    }

    /// Stages in which tables are copied: what a stage refers to stands in those before it.
    pub fn stages(
        &self,
        subscription: &str,
        tables: &[TableName],
    ) -> Result<Vec<Vec<CopyUnit>>, ApplyError> {
        let Some(keys) = &self.keys else {
            return Ok(vec![(0..tables.len()).map(CopyUnit::Apart).collect()]);
        };
        keys.copy_order(tables).map_err(|in_the_way| {
            let names: Vec<String> = in_the_way.iter().map(|key| key.on_table()).collect();
            let remedies: Vec<String> =
                in_the_way.iter().map(|key| key.make_deferrable()).collect();
            ApplyError::Setup(format!(
                "subscription \"{subscription}\": tables that refer to each other in a circle \
                 cannot be copied while their foreign keys are checked at once: {}. {}; or let \
                 the role set session_replication_role",
                names.join(", "),
                remedies.join("; ")
            ))
        })
    }
}
