//! What the publisher publishes by now, asked beside the stream: it may take long to answer, or never
//! do.

use crate::postgres::progress::TableProgress;
use crate::subscription::{Subscription, joined, published};
use farshore_capture::publication::PublishedTable;
use tokio::task::JoinSet;

/// A question that is under way, or that has been answered. Dropping it gives it up.
pub(crate) struct Question {
    /// Capture's connection at which it was asked.
    pub sessions: u64,
    asking: JoinSet<Option<bool>>,
    answer: Option<bool>,
}

impl Question {
    /// Asks whether tables are published that are not copied, or have other columns or labels than they
    /// had, and else, if `about_partitions`, whether there are partitioned tables whose partitions we keep
    /// in step with. What is otherwise and as a start has `seen` it is nothing new: what that has put off
    /// until the stream has come there, another start would put off once more.
    pub fn ask(
        agent: &Subscription,
        (known, seen): (&[TableProgress], &[PublishedTable]),
        sessions: u64,
        about_partitions: bool,
    ) -> Question {
        let (source, name) = (agent.source.clone(), agent.spec.name.clone());
        let (known, seen) = (known.to_vec(), seen.to_vec());
        let about_partitions = about_partitions && agent.spec.schema.create_tables;
        let mut asking = JoinSet::new();
        asking.spawn(async move {
            let published = published(source.as_ref(), &name).await?;
            let of_others =
                |now| known.iter().any(|known| known.is_otherwise(now)) && !seen.contains(now);
            let is_new = published.iter().any(of_others) || !joined(published, &known).is_empty();
            if is_new || !about_partitions {
                return Some(is_new);
            }
            source.partitioned_tables().await.ok().map(|tables| !tables.is_empty())
        });
        Question { sessions, asking, answer: None }
    }

    /// Waits for the answer. Nothing is lost if the future is dropped.
    pub async fn answered(&mut self) {
        if let Some(answer) = self.asking.join_next().await {
            // A question that panicked was not answered.
            self.answer = answer.unwrap_or_default();
        }
    }

    /// Whether there is nothing to wait for any more.
    pub fn is_over(&mut self) -> bool {
        if let Some(answer) = self.asking.try_join_next() {
            self.answer = answer.unwrap_or_default();
        }
        self.asking.is_empty()
    }

    /// What was answered; `None` if the publisher cannot be asked now.
    pub fn answer(self) -> Option<bool> {
        self.answer
    }
}
