//! What a relation version is on the target, when it is first met.

use super::Writer;
use super::ahead::{FAR_TABLES_MAX, TABLES_MAX};
use crate::ApplyError;
use crate::error::RefusedCommit;
use crate::log_feed::Definitions;
use crate::postgres::follow_ddl::{Follow, is_same_table, same_columns};
use crate::postgres::foreign_keys::ForeignKey;
use crate::postgres::noted_definition::{
    is_known_by_oid, load_definitions, note_definition, published_name,
};
use crate::postgres::put_off;
use crate::postgres::statements::TargetRelation;
use crate::postgres::target_table::{
    Filled, TargetTable, check_columns, stamps_of_kin, target_table,
};
use bytes::Bytes;
use farshore_capture::publication::TableName;
use farshore_fault as fault;
use farshore_model::transaction::Header;
use farshore_model::{DictionaryId, Lsn, Relation};
use farshore_wire::pgoutput::stored::{Stored, decode_stored};
use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, OnceLock};

impl Writer {
    /// Looks a relation version up on the target when it is first met in a transaction that is not
    /// passed over, and lets the target's columns follow.
    pub(super) async fn learn(
        &mut self,
        id: DictionaryId,
        header: &Header,
        definitions: &Definitions,
    ) -> Result<(), ApplyError> {
        if self.touched_last == Some(id) {
            return Ok(());
        }
        if !self.relations.contains_key(&id) {
            self.learn_version(id, header, definitions, false).await?;
            // A version that is not learned, of a table that was copied later, takes nobody's place.
            if self.relations.contains_key(&id) {
                self.forget_superseded();
            }
        }
        // One that is superseded at once is learned again.
        if let Some(TargetRelation { as_seen: (oid, stamp), table, .. }) = self.relations.get(&id) {
            self.touched_last = Some(id);
            match self.touched.get_mut(oid) {
                Some((seen, _)) if seen == stamp => {}
                Some((seen, _)) => seen.clone_from(stamp),
                // Nothing of a table that is passed over is on the target.
                None if *oid == 0 => {}
                None => {
                    self.touched.insert(*oid, (stamp.clone(), table.clone()));
                }
            }
        }
        Ok(())
    }

    /// Forgets versions that another one has taken the place of: when one comes back, as it does
    /// when a column was added and dropped, the target has to follow again.
    pub(super) fn forget_superseded(&mut self) {
        if !self.superseded.is_empty() {
            self.touched_last = None;
        }
        for id in self.superseded.drain(..) {
            self.relations.remove(&id);
            self.facts.remove(&id);
            self.batches.forget(id);
        }
    }

    fn supersede(&mut self, table: TableName, id: DictionaryId) {
        let before = self.versions.insert(table, id);
        self.superseded.retain(|superseded| *superseded != id);
        self.superseded.extend(before.filter(|before| *before != id));
    }

    async fn learn_version(
        &mut self,
        id: DictionaryId,
        header: &Header,
        definitions: &Definitions,
        puts_drops_off: bool,
    ) -> Result<(), ApplyError> {
        let relation = definitions.get(&id).cloned().ok_or_else(|| ApplyError::Stored {
            position: header.end_lsn,
            what: format!("refers to definition {}, which was not read before it", id.0),
        })?;
        let table = published_name(&relation);
        let known = self.copied.points.get(&table).copied();
        let other_names = self.copied.other_names(&table, relation.oid);
        if self.early {
            let known = known.filter(|_| other_names.is_empty());
            return self.learn_early(id, relation, table, known).await;
        }
        let is_copied_later =
            other_names.iter().any(|(_, copied_at)| header.commit_lsn < *copied_at);
        for (other, copied_at) in other_names {
            if header.commit_lsn >= copied_at {
                self.note_renamed(&other, &relation).await?;
            }
        }
        let Some(mut copied_at) = known else {
            if is_copied_later {
                // Looked at again, until it comes to what that copy lacks.
                return Ok(());
            }
            // Whatever copy is made of it later stands at a point after everything in the log now,
            // so its changes can be passed over until then.
            self.uncopied.insert(table.clone());
            let skipped = TargetRelation::passed_over(relation, table.clone());
            self.relations.insert(id, skipped);
            self.supersede(table, id);
            return Ok(());
        };
        if fault::defect("snapshot-row-also-streamed") {
            copied_at = Lsn::ZERO;
        }
        if header.commit_lsn < copied_at {
            // The copy may be of a later version, and the target's table with it.
            return Ok(());
        }
        self.copied.know(&table, relation.oid);
        let published = table;
        let table = self.target_names.table(&published);
        let is_first = !self.versions.contains_key(&published);
        if is_first && self.learn_as_seen(&published, id, &relation, copied_at) {
            self.supersede(published, id);
            return Ok(());
        }
        if is_first && self.batching {
            // Behind what alters tables. Rows that were taken in do not, and to send them now would
            // make small batches of them wherever many tables are met one after the other.
            self.finish_closing().await?;
            self.look_ahead(&published, definitions).await?;
            if self.learn_as_seen(&published, id, &relation, copied_at) {
                self.supersede(published, id);
                return Ok(());
            }
        }
        // Behind what came before.
        self.send_batches().await?;
        self.finish_closing().await?;
        // In the open transaction.
        self.ensure_begun().await?;
        if !self.touched.is_empty() {
            // What is seen from now on must not hide that somebody else altered it before.
            let asked = self.lanes.ask_unaltered(&self.touched);
            asked.map_err(|error| self.explain(error))?;
        }
        let mut on_target = self.look_up(&table).await?;
        let mut put_off = false;
        if let Some(there) = &on_target {
            let subscription = self.subscription.clone();
            let (source, names) = (self.following.source.clone(), self.target_names.clone());
            let kin_before = match puts_drops_off {
                true => Some(stamps_of_kin(self.session().await?, there.oid).await?),
                false => None,
            };
            let follow = Follow {
                subscription: &subscription,
                policy: self.following.policy,
                puts_drops_off,
                at: header.commit_lsn,
                source: source.as_ref(),
                names: &names,
                table: &table,
                relation: &relation,
                is_copied_anew: false,
                root: OnceLock::new(),
            };
            let followed = follow.follow(self.session().await?, there).await;
            let followed = followed.map_err(|error| self.refused_before_commit(error))?;
            put_off = followed.put_off;
            if followed.changed {
                self.altered = true;
                self.be_alone().await?;
                on_target = self.look_up(&table).await?;
                let oid = on_target.as_ref().map_or(0, |there| there.oid);
                self.see_kin_again(oid, kin_before, followed.renamed).await?;
            }
        }
        let names = relation.columns.iter().map(|column| column.name.as_str());
        let both = (&published, &table);
        check_columns(&self.subscription, both, names, on_target.as_ref(), Filled::Before)?;
        let on_target = on_target.unwrap_or_default();
        let target = TargetRelation::new(relation, table.clone(), copied_at, on_target)
            .map_err(|misfit| misfit.error(&self.subscription, both))?;
        self.know(id, target);
        self.supersede(published, id);
        if put_off {
            self.superseded.push(id);
        }
        Ok(())
    }

    /// A check that the COMMIT would make was made before it, so that a table could be altered: any
    /// transaction of the group may be the reason that it failed.
    fn refused_before_commit(&self, error: ApplyError) -> ApplyError {
        match error {
            ApplyError::Target { error: farshore_pg::Error::Server(error), .. }
                if put_off::is_of_a_check(&error) =>
            {
                let (subscription, position) = (self.subscription.clone(), self.newest);
                ApplyError::Commit(Box::new(RefusedCommit { subscription, position, error }))
            }
            error => error,
        }
    }

    /// This table was altered by ourselves, in the open group, and with it those that inherit from it.
    /// What of them the group has changed it holds locks on: nobody else altered that. The others
    /// are learned anew.
    ///
    /// While changes are prepared (`before` are the stamps from before it was altered), all of them
    /// stay known that were as they had been seen: an older version that is learned again would take
    /// the column that was just added for one that is to go. But where columns were `renamed`, all are
    /// learned anew: statements go by names.
    async fn see_kin_again(
        &mut self,
        oid: u32,
        before: Option<Vec<(u32, String)>>,
        renamed: bool,
    ) -> Result<(), ApplyError> {
        let kin = stamps_of_kin(self.session().await?, oid).await?;
        let before: Option<HashMap<u32, String>> = before.map(HashMap::from_iter);
        self.ahead.forget();
        for (oid, stamp) in kin {
            let is_touched = self.touched.contains_key(&oid);
            let versions: Vec<DictionaryId> = self
                .relations
                .iter()
                .filter(|(_, known)| known.as_seen.0 == oid)
                .map(|(id, _)| *id)
                .collect();
            for id in versions {
                // Its rows have been sent. How others are written depends on where its columns stand.
                self.facts.remove(&id);
                self.batches.forget(id);
                let Some(known) = self.relations.get_mut(&id) else { continue };
                let was_as_seen = before
                    .as_ref()
                    .is_some_and(|before| before.get(&oid) == Some(&known.as_seen.1));
                if !renamed && (is_touched || was_as_seen) {
                    known.as_seen.1.clone_from(&stamp);
                } else {
                    self.relations.remove(&id);
                }
            }
            if let Some((seen, _)) = self.touched.get_mut(&oid) {
                *seen = stamp;
            }
        }
        self.touched_last = None;
        Ok(())
    }

    /// Looks a version up that the target needs nothing done for. Any other is an error.
    async fn learn_early(
        &mut self,
        id: DictionaryId,
        relation: Arc<Relation>,
        published: TableName,
        copied_at: Option<Lsn>,
    ) -> Result<(), ApplyError> {
        let not_as_it_is =
            || ApplyError::NotYet(format!("the target does not have {published} as it is"));
        let (Some(copied_at), false) = (copied_at, self.versions.contains_key(&published)) else {
            return Err(not_as_it_is());
        };
        let table = self.target_names.table(&published);
        let on_target = self.look_up(&table).await?.ok_or_else(not_as_it_is)?;
        let (subscription, one) = (self.subscription.clone(), std::slice::from_ref(&published));
        let session = self.session().await?;
        let follows = load_definitions(session, &subscription, one).await?.remove(&published);
        if follows.as_ref().is_some_and(|follows| !is_same_table(follows, &relation)) {
            return Err(not_as_it_is());
        }
        match follows.filter(|follows| !is_known_by_oid(follows, &relation)) {
            Some(follows) if same_columns(&follows, &relation) => {}
            // The first version that comes by, and the target's columns are those of it.
            None if has_the_columns_of(&on_target, &relation) => {
                self.ensure_begun().await?;
                let session = self.session().await?;
                note_definition(session, &subscription, (&published, &table), &relation).await?;
            }
            Some(_) | None => return Err(not_as_it_is()),
        }
        let target = TargetRelation::new(relation, table, copied_at, on_target);
        self.know(id, target.map_err(|_| not_as_it_is())?);
        self.supersede(published, id);
        Ok(())
    }

    fn know(&mut self, id: DictionaryId, mut target: TargetRelation) {
        // It may have been altered by ourselves in the open group.
        self.touched_last = None;
        let (oid, stamp) = &target.as_seen;
        if let Some((seen, _)) = self.touched.get_mut(oid) {
            seen.clone_from(stamp);
        }
        target.cascaded = self
            .cascades
            .as_ref()
            .is_some_and(|keys| keys.of_child(&target.table).any(|key| key.on_delete == 'c'));
        target.loses_children = self
            .cascades
            .as_ref()
            .is_some_and(|keys| keys.of_parent(&target.table).any(ForeignKey::acts_on_delete));
        self.relations.insert(id, target);
    }

    /// Knows a version without asking, if its table was looked at lately and the target needs
    /// nothing done for it.
    fn learn_as_seen(
        &mut self,
        published: &TableName,
        id: DictionaryId,
        relation: &Arc<Relation>,
        copied_at: Lsn,
    ) -> bool {
        let Some(seen) = self.ahead.take(published) else { return false };
        let (oid, stamp) = (seen.on_target.oid, &seen.on_target.stamp);
        if self.touched.get(&oid).is_some_and(|(touched, _)| touched != stamp) {
            // It has another name too, and was altered since the open group took rows in for that.
            return false;
        }
        let followed = &seen.definition;
        if !is_same_table(followed, relation) || !same_columns(followed, relation) {
            return false;
        }
        let table = self.target_names.table(published);
        // What does not fit is looked at again, and said.
        let target = TargetRelation::new(relation.clone(), table, copied_at, seen.on_target);
        let Ok(target) = target else { return false };
        // Otherwise its first batch may come much later.
        if self.batching {
            self.facts.insert(id, seen.facts);
        }
        self.know(id, target);
        true
    }

    /// Looks at a table, and at others that have not been met yet and whose changes are in what was
    /// read; the first time, on a target that is far, at any others too, up to a bound: each would
    /// cost a round trip later.
    async fn look_ahead(
        &mut self,
        published: &TableName,
        definitions: &Definitions,
    ) -> Result<(), ApplyError> {
        let mut tables = BTreeSet::from([published.clone()]);
        let is_unseen = |table: &TableName| {
            self.copied.points.contains_key(table)
                && !self.versions.contains_key(table)
                && !self.ahead.has(table)
        };
        let unmet = definitions.iter().filter(|(id, _)| !self.relations.contains_key(id));
        let read = unmet.map(|(_, relation)| TableName {
            schema: relation.schema.clone(),
            name: relation.name.clone(),
        });
        for table in read.filter(is_unseen) {
            tables.insert(table);
            if tables.len() == TABLES_MAX {
                break;
            }
        }
        let mut others = Vec::new();
        if self.lanes.is_far() && !self.ahead.has_looked {
            let room = FAR_TABLES_MAX.saturating_sub(tables.len());
            let unread = self
                .copied
                .points
                .keys()
                .filter(|table| is_unseen(table) && !tables.contains(table));
            others.extend(unread.take(room).cloned());
        }
        self.ahead.has_looked = true;
        let tables: Vec<TableName> = tables.into_iter().collect();
        let all = [&tables[..], &others[..]].concat();
        match self.look_at(&all).await? {
            // What is wrong with a table that nobody changes is nobody's trouble.
            Err(ApplyError::Target { error, .. })
                if !others.is_empty() && error.sqlstate().is_some() =>
            {
                self.look_at(&tables).await?
            }
            looked => looked,
        }
    }

    /// The outer error is of what was in flight before.
    async fn look_at(
        &mut self,
        tables: &[TableName],
    ) -> Result<Result<(), ApplyError>, ApplyError> {
        let pipeline = self.lanes.current();
        let looked =
            self.ahead.look(pipeline, &self.subscription, &self.target_names, tables).await;
        looked.map_err(|error| self.explain(error))
    }

    async fn look_up(&mut self, table: &TableName) -> Result<Option<TargetTable>, ApplyError> {
        target_table(self.session().await?, table).await
    }

    /// Looks up what these changes refer to before they are applied under a savepoint: what
    /// following the publisher's columns does to the target must not be undone with them. All
    /// versions stay known to the end of the transaction: some changes may be applied again that are
    /// from before a column was added. None is dropped, for the same reason. Says how many of the
    /// changes may be applied so, at least one: up to the next that a version has to be looked up for,
    /// since columns may have to be renamed in front of it.
    pub(crate) async fn prepare(
        &mut self,
        commands: &[Bytes],
        header: &Header,
        definitions: &Definitions,
    ) -> Result<usize, ApplyError> {
        let position = header.end_lsn;
        for (number, command) in commands.iter().enumerate() {
            let change = decode_stored(command)
                .map_err(|error| ApplyError::Stored { position, what: error.to_string() })?;
            let relations = match change {
                Stored::Insert { relation, .. }
                | Stored::Update { relation, .. }
                | Stored::Delete { relation, .. } => vec![relation],
                Stored::Truncate { relations, .. } => relations.collect(),
                Stored::Message { .. } | Stored::SubtransactionMark(_) => continue,
            };
            for relation in relations {
                if self.relations.contains_key(&relation) {
                    continue;
                }
                if number > 0 {
                    return Ok(number);
                }
                self.learn_version(relation, header, definitions, true).await?;
            }
        }
        Ok(commands.len())
    }
}

/// Whether a table has the columns of a relation and, but for generated ones, no others.
fn has_the_columns_of(table: &TargetTable, relation: &Relation) -> bool {
    let is_there = |name: &str| table.columns.iter().any(|column| column.name == name);
    let is_published = |name: &str| relation.columns.iter().any(|column| column.name == name);
    relation.columns.iter().all(|column| is_there(&column.name))
        && table.columns.iter().all(|column| column.generated || is_published(&column.name))
}
