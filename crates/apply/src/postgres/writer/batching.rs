//! Changes held until they are written in bulk.

use super::{InTransaction, Writer};
use crate::ApplyError;
use crate::log_feed::Definitions;
use crate::postgres::batch::{self, Batch, Offered, StatementNames};
use crate::postgres::pipeline::{Pipeline, PipelineError};
use crate::postgres::statements::TargetRelation;
use bytes::Bytes;
use farshore_model::DictionaryId;
use farshore_wire::pgoutput::stored::Stored;

impl Writer {
    /// Takes a row change into its table's batch. False when it is to be applied by itself; what
    /// must come before it has been sent then.
    pub(super) async fn take_in(
        &mut self,
        change: &Stored<'_>,
        bytes: usize,
        body: &Bytes,
        at: &InTransaction<'_>,
        definitions: &Definitions,
    ) -> Result<bool, ApplyError> {
        let relation = match change {
            Stored::Insert { relation, .. }
            | Stored::Update { relation, .. }
            | Stored::Delete { relation, .. } => *relation,
            Stored::Truncate { .. } => {
                self.send_batches().await?;
                return Ok(false);
            }
            Stored::Message { .. } | Stored::SubtransactionMark(_) => return Ok(true),
        };
        self.learn(relation, at.header, definitions).await?;
        // What is passed over is done with.
        let Some(target) = self.relations.get(&relation) else { return Ok(true) };
        if at.header.commit_lsn < target.copied_at {
            return Ok(true);
        }
        if !self.batches.is_known(relation) {
            let planned = match self.facts.remove(&relation) {
                Some(facts) => batch::plan(target, &facts),
                None => {
                    let finished = self.lanes.finish().await;
                    finished.map_err(|error| self.explain(error))?;
                    let table = std::slice::from_ref(&target.table);
                    let facts = match self.lanes.current().idle_session().await {
                        Ok(session) => batch::look_at_tables(session, table).await?,
                        Err(error) => return Err(self.explain(error)),
                    };
                    batch::plan(target, &facts.into_iter().next().unwrap_or_default())
                }
            };
            self.batches.learn(relation, target, planned);
        }
        match self.batches.offer(change, relation, at.header.end_lsn, bytes, body) {
            Offered::Taken => {
                self.holds_body = true;
                return Ok(true);
            }
            Offered::Full => {
                self.send_batches().await?;
                return Ok(true);
            }
            Offered::RowByRow => return Ok(false),
            Offered::SendTable => self.send_batch(relation).await?,
            Offered::SendAll => self.send_batches().await?,
        }
        // What stood in the way has been sent. What it is still too much for goes by itself.
        let again = self.batches.offer(change, relation, at.header.end_lsn, bytes, body);
        self.holds_body |= again == Offered::Taken;
        Ok(matches!(again, Offered::Taken | Offered::Full))
    }

    /// Sends everything that has been taken in.
    pub(super) async fn send_batches(&mut self) -> Result<(), ApplyError> {
        let relations = self.batches.take_pending();
        let sent = self.try_to_send(&relations).await;
        sent.map_err(|error| self.explain(error))
    }

    async fn send_batch(&mut self, relation: DictionaryId) -> Result<(), ApplyError> {
        let sent = self.try_to_send(&[relation]).await;
        sent.map_err(|error| self.explain(error))
    }

    /// Sends what groups before this one have nothing to do with at once, and the rest when those
    /// are committed.
    async fn try_to_send(&mut self, relations: &[DictionaryId]) -> Result<(), PipelineError> {
        if self.cascades.is_some() {
            return self.send_in_order(relations).await;
        }
        let mut held_back = Vec::new();
        for relation in relations {
            if self.send_what_is_free(*relation).await? {
                held_back.push(*relation);
            }
        }
        if held_back.is_empty() {
            return Ok(());
        }
        // Worked on meanwhile.
        self.lanes.write().await?;
        self.lanes.finish().await?;
        for relation in held_back {
            if let Some((_, batch)) = self.batches.get_mut(relation) {
                batch.netting.take_back();
            }
            self.hand_over(relation, Batch::send).await?;
        }
        Ok(())
    }

    /// Sends children's deletes before those of their parents, and then what is left of parents
    /// before that of their children. There is one connection then.
    async fn send_in_order(&mut self, relations: &[DictionaryId]) -> Result<(), PipelineError> {
        for relation in relations {
            self.lanes.begin(self.first_of_group).await?;
            if let Some((table, batch)) = self.batches.get_mut(*relation) {
                self.lanes.touch(table, *relation, batch.netting.hashes()).await?;
            }
        }
        for relation in relations.iter().rev() {
            self.hand_over(*relation, Batch::send_deletes).await?;
        }
        for relation in relations {
            self.hand_over(*relation, Batch::send_rest).await?;
        }
        Ok(())
    }

    /// True when something is held back.
    async fn send_what_is_free(&mut self, relation: DictionaryId) -> Result<bool, PipelineError> {
        self.lanes.begin(self.first_of_group).await?;
        let Some((table, batch)) = self.batches.get_mut(relation) else { return Ok(false) };
        if batch.has_own_columns_on_target() {
            // Their defaults (a sequence, a clock) are to follow the order of the commits.
            if self.early {
                let what = "a table of its has columns of its own on the target".to_owned();
                return Err(PipelineError::Met(what));
            }
            self.lanes.be_alone().await?;
        }
        self.lanes.touch(table, relation, batch.netting.hashes()).await?;
        let lanes = &self.lanes;
        let held_back = batch.netting.hold_back(|key| lanes.is_touched(table, key));
        self.hand_over(relation, Batch::send).await?;
        Ok(held_back)
    }

    async fn hand_over(
        &mut self,
        relation: DictionaryId,
        send: fn(
            &mut Batch,
            &mut Pipeline,
            &TargetRelation,
            &mut StatementNames,
        ) -> Result<(), PipelineError>,
    ) -> Result<(), PipelineError> {
        let (Some((_, batch)), Some(target)) =
            (self.batches.get_mut(relation), self.relations.get(&relation))
        else {
            return Ok(());
        };
        send(batch, self.lanes.current(), target, &mut self.names)?;
        for name in self.names.take_given_up() {
            self.lanes.forget_statement(&name);
        }
        if self.lanes.current().is_full() { self.lanes.write().await } else { Ok(()) }
    }
}
