//! Tables looked at on the target before their first change comes.
//!
//! To learn what a table is on the target, everything before its first change has to be written and
//! answered, and then three questions asked. Behind, with many tables, that would be most of the
//! work. So when a table is met that nothing is known of, it is looked at together with all others
//! whose changes are in what was read of the log so far, in one round trip.
//!
//! What was seen is good for the first version of a table that comes by, if that is the one that
//! the target follows already, and only for a few seconds: from then on it is as if the table had
//! been met at that moment.

use crate::ApplyError;
use crate::postgres::batch::{self, TableFacts};
use crate::postgres::follow_ddl::{DEFINITIONS, definitions_of, schemas_and_names};
use crate::postgres::session::Session;
use crate::postgres::target_table::{self, LOOK_UP, TargetTable, looked_up};
use farshore_capture::publication::TableName;
use farshore_capture::schema::NameMap;
use farshore_model::Relation;
use farshore_pg::Question;
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;

/// For how long it is taken for true what was seen of a table.
const FRESH: Duration = Duration::from_secs(10);

/// Most tables in one look.
pub(super) const TABLES_MAX: usize = 512;

/// What the target says of a table.
pub(super) struct Seen {
    pub on_target: TargetTable,
    /// The version that it follows.
    pub definition: Relation,
    pub facts: TableFacts,
    at: Instant,
}

/// What was seen and not used yet, by the publisher's names.
#[derive(Default)]
pub(super) struct Ahead {
    seen: HashMap<TableName, Seen>,
}

impl Ahead {
    /// What was seen of a table lately; it is not given twice.
    pub fn take(&mut self, published: &TableName) -> Option<Seen> {
        self.seen.remove(published).filter(|seen| seen.at.elapsed() < FRESH)
    }

    /// Whether a table was seen lately.
    pub fn has(&self, published: &TableName) -> bool {
        self.seen.get(published).is_some_and(|seen| seen.at.elapsed() < FRESH)
    }

    /// Looks at tables.
    pub async fn look(
        &mut self,
        session: &mut Session,
        subscription: &str,
        names: &NameMap,
        published: &[TableName],
    ) -> Result<(), ApplyError> {
        let tables: Vec<TableName> = published.iter().map(|table| names.table(table)).collect();
        let at = Instant::now();
        let (look, names) = (batch::facts_question(), target_table::names(&tables));
        let [schemas, own_names] = schemas_and_names(published);
        let [on_target, facts, definitions] = session
            .ask([
                Question::Extended(LOOK_UP, &[Some(&names)]),
                Question::Extended(&look, &[Some(&names)]),
                Question::Extended(
                    DEFINITIONS,
                    &[Some(subscription), Some(&schemas), Some(&own_names)],
                ),
            ])
            .await?;
        let on_target = looked_up(session, tables.len(), &on_target?).await?;
        let facts = batch::facts_answer(session, tables.len(), &facts?)?;
        let mut definitions = definitions_of(&definitions?);
        self.seen.retain(|_, seen| seen.at.elapsed() < FRESH);
        for ((published, on_target), facts) in published.iter().zip(on_target).zip(facts) {
            self.seen.remove(published);
            if let (Some(on_target), Some(definition)) = (on_target, definitions.remove(published))
            {
                self.seen.insert(published.clone(), Seen { on_target, definition, facts, at });
            }
        }
        Ok(())
    }
}
