//! Changes held until they are written in bulk.

use super::{InTransaction, Writer};
use crate::ApplyError;
use crate::log_feed::Definitions;
use crate::netting::Effect;
use crate::postgres::batch::{self, Batch, Offered, StatementNames, Ties};
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
        let mut held_back = Vec::new();
        let foreign_keys_fire = self.cascades.is_some();
        for relation in relations {
            if self.hold_back(*relation).await? {
                held_back.push(*relation);
            }
            if !foreign_keys_fire {
                self.hand_over(*relation, Batch::send).await?;
            }
        }
        if foreign_keys_fire {
            held_back = self.hold_back_what_is_tied(relations);
            self.send_in_order(relations).await?;
        }
        if held_back.is_empty() {
            return Ok(());
        }
        // Worked on meanwhile.
        self.lanes.write().await?;
        self.lanes.finish().await?;
        for relation in &held_back {
            if let Some((_, batch)) = self.batches.get_mut(*relation) {
                batch.netting.take_back();
            }
        }
        if foreign_keys_fire {
            return self.send_in_order(&held_back).await;
        }
        for relation in held_back {
            self.hand_over(relation, Batch::send).await?;
        }
        Ok(())
    }

    /// Puts rows aside that groups before this one, not yet committed, have changed too. True when
    /// there are any.
    async fn hold_back(&mut self, relation: DictionaryId) -> Result<bool, PipelineError> {
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
        Ok(batch.netting.hold_back(|net| lanes.is_touched(table, net.hash)))
    }

    /// Where foreign keys fire, puts aside, beside that, what they let come only after groups before
    /// this one or after what is put aside. Returns which of `relations`, parents before their
    /// children, have rows put aside.
    fn hold_back_what_is_tied(&mut self, relations: &[DictionaryId]) -> Vec<DictionaryId> {
        let lanes = &mut self.lanes;
        let (mut waiting, mut all) = (Ties::default(), false);
        // Rows behind their parents, and then parents' deletes behind those of their children.
        let twice = relations.iter().chain(relations.iter().rev()).enumerate();
        for (number, relation) in twice {
            let Some((_, Batch { netting, references, .. })) = self.batches.get_mut(*relation)
            else {
                continue;
            };
            if number < relations.len() {
                netting.nets().iter().chain(netting.held_back()).for_each(|net| {
                    lanes.tie(references, net);
                });
            }
            netting
                .hold_back(|net| lanes.is_tied(references, net) || references.needs(net, &waiting));
            for net in netting.held_back() {
                references.add(net, &mut waiting);
                // What refers to it may be before it in the same table, or stay where it is.
                let replaced = references.is_parent() && matches!(net.effect, Effect::Replace(_));
                all |= replaced || references.refers_to_itself();
            }
        }
        let mut held_back = Vec::new();
        for relation in relations {
            let Some((_, Batch { netting, references, .. })) = self.batches.get_mut(*relation)
            else {
                continue;
            };
            netting.hold_back(|_| all && references.are_some());
            if !netting.held_back().is_empty() {
                held_back.push(*relation);
            }
        }
        held_back
    }

    /// Sends children's deletes before those of their parents, and then what is left of parents
    /// before that of their children.
    async fn send_in_order(&mut self, relations: &[DictionaryId]) -> Result<(), PipelineError> {
        for relation in relations.iter().rev() {
            self.hand_over(*relation, Batch::send_deletes).await?;
        }
        for relation in relations {
            self.hand_over(*relation, Batch::send_rest).await?;
        }
        Ok(())
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
