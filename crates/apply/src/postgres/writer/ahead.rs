//! Tables looked at on the target before their first change comes.
//!
//! To learn what a table is on the target, everything before its first change has to be written and
//! answered, and then three questions asked. Behind, with many tables, that would be most of the
//! work. So where tables are met soon after one another, each look takes twice as many tables along
//! as the one before, whichever come next: all are known after a few.
//!
//! What was seen is good for the first version of a table that comes by, if that is the one that
//! the target follows already, and only for a few seconds: from then on it is as if the table had
//! been met at that moment.

use crate::ApplyError;
use crate::postgres::batch::{self, TableFacts};
use crate::postgres::follow_ddl::load_definitions;
use crate::postgres::session::Session;
use crate::postgres::target_table::{TargetTable, target_tables};
use farshore_capture::publication::TableName;
use farshore_capture::schema::NameMap;
use farshore_model::Relation;
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

/// For how long it is taken for true what was seen of a table.
const FRESH: Duration = Duration::from_secs(10);

/// Most tables in one look.
const TABLES_MAX: usize = 512;

/// What the target says of a table.
pub(super) struct Seen {
    pub on_target: TargetTable,
    /// The version that it follows.
    pub definition: Relation,
    pub facts: TableFacts,
}

/// What was seen and not used yet, by the publisher's names.
#[derive(Default)]
pub(super) struct Ahead {
    seen: HashMap<TableName, Seen>,
    seen_at: Option<Instant>,
    /// When a table was met last of which nothing had been seen.
    met_at: Option<Instant>,
    /// Tables that were learned then, with those taken along.
    width: usize,
}

impl Ahead {
    /// What was seen of a table lately; it is not given twice.
    pub fn take(&mut self, published: &TableName) -> Option<Seen> {
        let seen = self.seen.remove(published)?;
        self.seen_at.is_some_and(|at| at.elapsed() < FRESH).then_some(seen)
    }

    /// A table was met of which nothing had been seen. Returns how many others to look at now.
    pub fn met_unseen(&mut self) -> usize {
        let is_soon = self.met_at.is_some_and(|at| at.elapsed() < FRESH);
        self.width = if is_soon { (2 * self.width).min(TABLES_MAX) } else { 1 };
        self.met_at = Some(Instant::now());
        self.width - 1
    }

    /// Looks at tables, in the order of `published`.
    pub async fn look(
        &mut self,
        session: &mut Session,
        subscription: &str,
        names: &NameMap,
        published: &[TableName],
    ) -> Result<(), ApplyError> {
        let tables: Vec<TableName> = published.iter().map(|table| names.table(table)).collect();
        let seen_at = Instant::now();
        let on_target = target_tables(session, &tables).await?;
        let facts = batch::look_at_tables(session, &tables).await?;
        let mut definitions = load_definitions(session, subscription, published).await?;
        if self.seen_at.is_none_or(|at| at.elapsed() >= FRESH) {
            self.seen.clear();
        }
        for ((published, on_target), facts) in published.iter().zip(on_target).zip(facts) {
            if let (Some(on_target), Some(definition)) = (on_target, definitions.remove(published))
            {
                self.seen.insert(published.clone(), Seen { on_target, definition, facts });
            }
        }
        self.seen_at = Some(seen_at);
        Ok(())
    }
}
