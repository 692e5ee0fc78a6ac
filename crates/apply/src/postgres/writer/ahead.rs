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
use crate::postgres::noted_definition::{DEFINITIONS, definitions_of, schemas_and_names};
use crate::postgres::pipeline::{Pipeline, PipelineError};
use crate::postgres::session::{Answers, Session};
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

/// With the first look at a target that is far, tables whose changes were not read yet are looked at
/// too, so that there are this many: the answer is to fit into what TCP sends at once.
pub(super) const FAR_TABLES_MAX: usize = 16;

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
    /// The first look was taken.
    pub has_looked: bool,
}

impl Ahead {
    /// What was seen of a table lately; it is not given twice.
    pub fn take(&mut self, published: &TableName) -> Option<Seen> {
        self.seen.remove(published).filter(|seen| seen.at.elapsed() < FRESH)
    }

    /// What was seen is not so any more.
    pub fn forget(&mut self) {
        self.seen.clear();
    }

    /// Whether a table was seen lately.
    pub fn has(&self, published: &TableName) -> bool {
        self.seen.get(published).is_some_and(|seen| seen.at.elapsed() < FRESH)
    }

    /// Looks at tables. The outer error is of what was in flight.
    pub async fn look(
        &mut self,
        pipeline: &mut Pipeline,
        subscription: &str,
        names: &NameMap,
        published: &[TableName],
    ) -> Result<Result<(), ApplyError>, PipelineError> {
        let tables: Vec<TableName> = published.iter().map(|table| names.table(table)).collect();
        let at = Instant::now();
        let (look, names) = (batch::facts_question(), target_table::names(&tables));
        let [schemas, own_names] = schemas_and_names(published);
        let questions = [
            Question::Extended(LOOK_UP, &[Some(&names)]),
            Question::Extended(&look, &[Some(&names)]),
            Question::Extended(
                DEFINITIONS,
                &[Some(subscription), Some(&schemas), Some(&own_names)],
            ),
        ];
        let answers = pipeline.ask(questions).await?;
        Ok(match answers {
            Ok(answers) => self.note(pipeline.session(), published, at, answers).await,
            Err(error) => Err(error),
        })
    }

    /// Notes what the target answered to a look that began then.
    async fn note(
        &mut self,
        session: &mut Session,
        published: &[TableName],
        at: Instant,
        [on_target, facts, definitions]: Answers<3>,
    ) -> Result<(), ApplyError> {
        let tables = published.len();
        let on_target = looked_up(session, tables, &on_target?).await?;
        let facts = batch::facts_answer(session, tables, &facts?)?;
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
