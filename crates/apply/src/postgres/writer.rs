//! Stored changes → statements on the target.
//!
//! ```text
//! ahead     tables looked at before their first change comes
//! batching  changes held until they are written in bulk
//! learning  what a relation version is on the target, when it is first met
//! renamed   copied tables whose changes come under another name
//! ```

mod ahead;
mod batching;
mod learning;
mod renamed;

use crate::ApplyError;
use crate::conflict::{self, ConflictPolicy};
use crate::log_feed::Definitions;
use crate::postgres::batch::{Batches, StatementNames, TableFacts};
use crate::postgres::explain::explain;
use crate::postgres::follow_ddl::{FollowDdl, quoted};
use crate::postgres::foreign_keys::ForeignKeys;
use crate::postgres::in_use::{BOUNDED, UNBOUNDED};
use crate::postgres::lanes::{LaneSettings, Lanes};
use crate::postgres::noted_definition::published_name;
use crate::postgres::pipeline::{ChangeRef, Expect, Pipeline, PipelineError, Statement};
use crate::postgres::progress::ProgressStep;
use crate::postgres::statements::{Prepared, SeenBy, Shape, TargetRelation};
use crate::remedy;
use crate::row_by_row::RowByRow;
use ahead::Ahead;
use bytes::Bytes;
use farshore_capture::publication::TableName;
use farshore_capture::schema::NameMap;
use farshore_capture::source::Source;
use farshore_fault as fault;
use farshore_model::transaction::{Header, commands};
use farshore_model::{DictionaryId, Lsn, Xid};
use farshore_pg::text_array;
use farshore_wire::frontend::{Bind, EncodeError, Format};
use farshore_wire::pgoutput::stored::{Stored, decode_stored};
use farshore_wire::pgoutput::{OldTuple, Tuple, Value};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use renamed::CopiedTables;

/// Most update shapes prepared per relation; beyond, one unnamed statement is parsed each time.
const SHAPES_MAX: usize = 64;

/// Applies transactions of one subscription, in groups that take turns on its connections.
pub struct Writer {
    pub(super) lanes: Lanes,
    pub(super) subscription: String,
    pub(super) relations: HashMap<DictionaryId, TargetRelation>,
    /// See [`Writer::stops_at`].
    stops_at: Option<Lsn>,
    /// The newest version of each table, by its name on the publisher.
    versions: HashMap<TableName, DictionaryId>,
    /// Tables that were looked at before their first change.
    ahead: Ahead,
    /// What those came to for versions that were met since and not batched yet.
    facts: HashMap<DictionaryId, TableFacts>,
    /// Versions that others have taken the place of.
    superseded: Vec<DictionaryId>,
    copied: CopiedTables,
    /// What tables are called on the target.
    following: Following,
    target_names: NameMap,
    /// Tables met in the log that are not copied.
    uncopied: BTreeSet<TableName>,
    /// Tables of the target were given other columns.
    altered: bool,
    /// Copied tables that lack changes which came under another name, with that name.
    renamed: Vec<(TableName, TableName)>,
    pub(super) on_conflict: ConflictPolicy,
    names: StatementNames,
    changes: u64,
    /// Changes of the open group are netted and written in bulk, where the table allows it.
    batching: bool,
    /// Batches hold parts of the body at hand.
    holds_body: bool,
    /// Bytes of changes since the last look at what a closing group waits for.
    unpolled: usize,
    /// Newest position applied.
    newest: Lsn,
    /// First position in the open group.
    first_of_group: Lsn,
    batches: Batches,
    /// The target's foreign keys, where they fire for what we write.
    cascades: Option<ForeignKeys>,
    /// The transaction's commit has not come: nothing but rows in bulk, on tables that the target
    /// has as they are.
    early: bool,
    /// In this group DELETE does what TRUNCATE may not.
    empties_by_delete: bool,
    /// Tables that the open group changes, as they were seen last: by their OIDs on the target.
    touched: BTreeMap<u32, (String, TableName)>,
    /// The version that was touched last.
    touched_last: Option<DictionaryId>,
    /// Where sequences of the target were set back last, by `TRUNCATE … RESTART IDENTITY`; 0: nowhere.
    sequences_restarted: Arc<AtomicU64>,
    /// Changes of the open group that were sent one by one.
    one_by_one: u64,
}

/// What the target's columns follow.
#[derive(Clone, Debug)]
pub struct Following {
    /// What is done about new columns.
    pub policy: FollowDdl,
    /// Where the publisher is.
    pub source: Arc<dyn Source>,
}

/// Where the commands of one transaction stand.
#[derive(Clone, Copy, Debug)]
pub struct InTransaction<'a> {
    /// The transaction.
    pub header: &'a Header,
    /// The transaction, or sub-transaction, of the commands that follow.
    pub subtransaction: Xid,
}

impl InTransaction<'_> {
    /// Reads a command; `None` for marks and for what was rolled back.
    pub fn read<'c>(&mut self, command: &'c [u8]) -> Result<Option<Stored<'c>>, ApplyError> {
        let position = self.header.end_lsn;
        let change = decode_stored(command)
            .map_err(|error| ApplyError::Stored { position, what: error.to_string() })?;
        if let Stored::SubtransactionMark(xid) = change {
            self.subtransaction = xid;
            return Ok(None);
        }
        let aborted = &self.header.aborted_subtransactions;
        Ok(aborted.binary_search(&self.subtransaction).is_err().then_some(change))
    }
}

/// Changes one by one of a group with which the COMMIT is sent at once, because the target sees for
/// itself whether each has met its row. That costs it some 3.5 µs for each; to wait for the answers
/// before the COMMIT is sent costs a round trip, and two processes that are woken.
const SEEN_BY_TARGET_MAX: u64 = 16;

/// While a group closes, its answers are looked for whenever this much has been taken in meanwhile.
const POLL_EVERY_BYTES: usize = 32 << 10;

impl Writer {
    /// Starts with a session that holds the subscription's lock.
    pub async fn new(
        mut pipeline: Pipeline,
        lanes: LaneSettings,
        on_conflict: ConflictPolicy,
        copied: CopiedTables,
        row_by_row: RowByRow,
        target_names: NameMap,
        following: Following,
    ) -> Result<Writer, ApplyError> {
        let cascades = match pipeline.idle_session().await {
            Ok(session) if !session.replica_role => {
                let loaded = ForeignKeys::load(&mut session.connection).await;
                Some(loaded.map_err(|error| session.error(error))?)
            }
            Ok(_) | Err(_) => None,
        };
        let foreign_keys = cascades.clone().unwrap_or_default();
        let subscription = lanes.subscription.clone();
        let foreign_keys_fire = cascades.is_some();
        let lanes = Lanes::new(lanes, pipeline, foreign_keys_fire).await;
        let (lanes, outcome) = match lanes {
            Ok(lanes) => (lanes, Ok(())),
            Err((lanes, error)) => (lanes, Err(error)),
        };
        let writer = Writer {
            lanes,
            subscription,
            relations: HashMap::new(),
            stops_at: None,
            versions: HashMap::new(),
            ahead: Ahead::default(),
            facts: HashMap::new(),
            superseded: Vec::new(),
            copied,
            target_names,
            following,
            uncopied: BTreeSet::new(),
            altered: false,
            renamed: Vec::new(),
            on_conflict,
            names: StatementNames::default(),
            changes: 0,
            batching: false,
            holds_body: false,
            unpolled: 0,
            newest: Lsn::ZERO,
            first_of_group: Lsn::MAX,
            batches: Batches::new(row_by_row, foreign_keys),
            cascades,
            early: false,
            empties_by_delete: false,
            touched: BTreeMap::new(),
            touched_last: None,
            sequences_restarted: Arc::new(AtomicU64::new(0)),
            one_by_one: 0,
        };
        match outcome {
            Ok(()) => Ok(writer),
            Err(error) => Err(writer.explain(error)),
        }
    }

    /// What follows is of a transaction whose commit has not come. What could not be taken back
    /// without anybody noticing, or depends on what is not committed before it, is an error.
    pub fn be_early(&mut self) {
        self.early = true;
    }

    /// Tells where sequences of the target were set back last, a position in the log.
    pub fn sequences_restarted(&self) -> Arc<AtomicU64> {
        self.sequences_restarted.clone()
    }

    /// What was applied early has its position now.
    pub fn is_at(&mut self, position: Lsn) {
        self.newest = self.newest.max(position);
    }

    /// Whether transactions may be applied before their commit comes. Where foreign keys fire, what
    /// they refer to may come at any time before that.
    pub fn may_be_early(&self) -> bool {
        self.lanes.are_many() && self.cascades.is_none()
    }

    /// Hands what has been taken in to the target.
    pub async fn flush(&mut self) -> Result<(), ApplyError> {
        self.send_batches().await?;
        self.send().await
    }

    /// Row changes sent so far.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Begins a target transaction; of a batch nothing is sent before there is something to say.
    pub async fn begin(&mut self, batch: bool) -> Result<(), ApplyError> {
        self.empties_by_delete = false;
        // What careful application has left: it has drained.
        self.forget_superseded();
        self.batching = batch;
        self.one_by_one = 0;
        if batch { Ok(()) } else { self.ensure_begun().await }
    }

    async fn ensure_begun(&mut self) -> Result<(), ApplyError> {
        let begun = self.lanes.begin(self.first_of_group).await;
        begun.map_err(|error| self.explain(error))
    }

    /// What follows must not run beside other groups.
    pub(super) async fn be_alone(&mut self) -> Result<(), ApplyError> {
        if self.early {
            let what = "it has changes that are not applied in bulk".to_owned();
            return Err(ApplyError::NotYet(what));
        }
        let alone = self.lanes.be_alone().await;
        alone.map_err(|error| self.explain(error))
    }

    /// Applies commands of one transaction. `at` carries its sub-transaction from chunk to chunk.
    pub async fn apply(
        &mut self,
        body: &Bytes,
        at: &mut InTransaction<'_>,
        definitions: &Definitions,
    ) -> Result<(), ApplyError> {
        let applied = self.apply_commands(body, at, definitions).await;
        let position = at.header.end_lsn;
        if let Err(ApplyError::Setup(_)) = &applied
            && self.first_of_group < position
        {
            self.stops_at = Some(position);
        }
        applied
    }

    /// The transaction at which the target was not as it has to be, behind others of its group.
    pub fn stops_at(&self) -> Option<Lsn> {
        self.stops_at
    }

    async fn apply_commands(
        &mut self,
        body: &Bytes,
        at: &mut InTransaction<'_>,
        definitions: &Definitions,
    ) -> Result<(), ApplyError> {
        let position = at.header.end_lsn;
        self.newest = self.newest.max(position);
        self.first_of_group = self.first_of_group.min(position);
        for command in commands(body) {
            let command = command
                .map_err(|error| ApplyError::Stored { position, what: error.to_string() })?;
            let Some(change) = at.read(command)? else { continue };
            self.changes += 1;
            if fault::defect("dropped-change") && self.changes.is_multiple_of(97) {
                continue;
            }
            if self.batching && self.take_in(&change, command.len(), body, at, definitions).await? {
                continue;
            }
            self.be_alone().await?;
            self.ensure_begun().await?;
            self.one_by_one += 1;
            let seen_by = match self.one_by_one.max(at.header.commands) {
                ..=SEEN_BY_TARGET_MAX => SeenBy::Target,
                _ => SeenBy::Us,
            };
            let command = body.slice_ref(command);
            self.change(&change, command, at.header, definitions, seen_by).await?;
            self.pace().await?;
        }
        if std::mem::take(&mut self.holds_body) && self.batches.holds(body) {
            self.send_batches().await?;
        }
        self.unpolled += body.len();
        if self.unpolled >= POLL_EVERY_BYTES {
            self.unpolled = 0;
            self.poll_closing().await?;
        }
        Ok(())
    }

    /// Sends one stored change that was not rolled back on the publisher.
    pub(crate) async fn one(
        &mut self,
        command: &Bytes,
        header: &Header,
        definitions: &Definitions,
    ) -> Result<(), ApplyError> {
        let position = header.end_lsn;
        let change = decode_stored(command)
            .map_err(|error| ApplyError::Stored { position, what: error.to_string() })?;
        self.changes += 1;
        // What is at odds must leave the target willing to go on.
        self.change(&change, command.clone(), header, definitions, SeenBy::Us).await?;
        self.pace().await
    }

    async fn pace(&mut self) -> Result<(), ApplyError> {
        let paced = self.lanes.current().pace().await;
        paced.map_err(|error| self.explain(error))
    }

    async fn change(
        &mut self,
        change: &Stored<'_>,
        command: Bytes,
        header: &Header,
        definitions: &Definitions,
        seen_by: SeenBy,
    ) -> Result<(), ApplyError> {
        let position = header.end_lsn;
        let relation = match change {
            Stored::Insert { relation, .. }
            | Stored::Update { relation, .. }
            | Stored::Delete { relation, .. } => *relation,
            Stored::Truncate { .. } => {
                return self.truncate(change, command, header, definitions).await;
            }
            Stored::Message { .. } | Stored::SubtransactionMark(_) => return Ok(()),
        };
        self.learn(relation, header, definitions).await?;
        let Some(target) = self.relations.get_mut(&relation) else { return Ok(()) };
        if header.commit_lsn < target.copied_at {
            return Ok(());
        }
        let (shape, new, find) = shape_of(change, target).map_err(|what| ApplyError::Stored {
            position,
            what: format!("{} of {}: {what}", conflict::operation(change), target.table),
        })?;
        if shape == Shape::Insert {
            check_all_sent(&self.subscription, position, target, new)?;
        }
        if target.lacks_old_row(&shape) && !target.finds_without_old_row(&shape) {
            return Err(ApplyError::OldRowNotSent {
                subscription: self.subscription.clone(),
                position,
                table: Box::new(published_name(&target.relation)),
            });
        }
        if target.lacks_identity(&shape) {
            let published = published_name(&target.relation);
            return Err(ApplyError::Setup(format!(
                "subscription \"{0}\", the transaction that ends at {position}: what the publisher \
                 sent of a row of {published} has no column that tells which row it was. Either its \
                 replica identity is made of generated columns, which PostgreSQL does not send, or it \
                 is partitioned and has none itself, although its partitions have: give it another one \
                 there (ALTER TABLE {published} REPLICA IDENTITY …), and {1}",
                self.subscription,
                remedy::resync(&self.subscription, Some(&published))
            )));
        }
        let commit_time = header.commit_time;
        let may_be_gone = target.cascaded && shape == Shape::Delete;
        let reference = ChangeRef { position, commit_time, relation, command, may_be_gone };
        let seen_by = match seen_by {
            SeenBy::Target => target.may_be_seen_by(&shape),
            SeenBy::Us => SeenBy::Us,
        };
        let shaped = (shape, new, find);
        let result =
            send(self.lanes.current(), target, &mut self.names, shaped, seen_by, reference);
        result.map_err(|error| self.explain(error))
    }

    async fn truncate(
        &mut self,
        change: &Stored<'_>,
        command: Bytes,
        header: &Header,
        definitions: &Definitions,
    ) -> Result<(), ApplyError> {
        let Stored::Truncate { relations, restart_identity, .. } = change else {
            return Ok(());
        };
        let (mut tables, mut emptied, mut trees) = (Vec::new(), Vec::new(), Vec::new());
        let (mut first, mut passed_over) = (None, false);
        for relation in relations.clone() {
            self.learn(relation, header, definitions).await?;
            let Some(target) = self.relations.get(&relation) else {
                passed_over = true;
                continue;
            };
            if header.commit_lsn >= target.copied_at {
                tables.push(target.rows_of_its_own());
                emptied.push(target.table.clone());
                trees.extend(target.partitioned.then(|| target.table.clone()));
                first.get_or_insert(relation);
            } else {
                passed_over = true;
            }
        }
        let Some(relation) = first else { return Ok(()) };
        self.refuse_to_empty_others(&trees, &emptied).await?;
        // The message names every published table that was emptied: whatever else CASCADE would
        // reach is the target's own. Where some tables are passed over because their copy is newer,
        // foreign keys may forbid to truncate the others.
        // Sequences are reset by their owner alone; the rows are the same without that.
        let restarts = *restart_identity
            && match self.lanes.current().idle_session().await {
                Ok(session) => {
                    let names: Vec<String> = emptied.iter().map(TableName::to_string).collect();
                    session.owns(&names).await?
                }
                Err(error) => return Err(self.explain(error)),
            };
        let identity = if restarts { " RESTART IDENTITY" } else { "" };
        if self.empties_by_delete {
            self.refuse_to_delete_for_others(&emptied).await?;
        }
        let by_delete = passed_over || self.empties_by_delete;
        let sql = if by_delete {
            let (last, others) = tables.split_last().map_or(("", &[][..]), |(l, o)| (l, o));
            let others: Vec<String> = others
                .iter()
                .enumerate()
                .map(|(n, table)| format!("t{n} AS (DELETE FROM {table})"))
                .collect();
            let with = if others.is_empty() {
                String::new()
            } else {
                format!("WITH {} ", others.join(", "))
            };
            format!("{with}DELETE FROM {last}")
        } else {
            if restarts {
                self.sequences_restarted.fetch_max(header.end_lsn.0, Ordering::Release);
            }
            format!("TRUNCATE {}{identity}", tables.join(", "))
        };
        let (position, commit_time) = (header.end_lsn, header.commit_time);
        let may_be_gone = false;
        let reference = ChangeRef { position, commit_time, relation, command, may_be_gone };
        let pipeline = self.lanes.current();
        let truncated = Expect::Truncated(reference);
        let sent = match by_delete {
            true => pipeline.run_sql(&sql, truncated),
            false => pipeline
                .run_sql(BOUNDED, Expect::Done)
                .and_then(|()| pipeline.run_sql(&sql, truncated))
                .and_then(|()| pipeline.run_sql(UNBOUNDED, Expect::Done)),
        };
        sent.map_err(|error| self.explain(error))
    }

    /// Checks that no partition of `trees` is filled by itself, unless it is among `emptied`.
    async fn refuse_to_empty_others(
        &mut self,
        trees: &[TableName],
        emptied: &[TableName],
    ) -> Result<(), ApplyError> {
        if trees.is_empty() {
            return Ok(());
        }
        let (subscription, names) = (self.subscription.clone(), self.target_names.clone());
        let own: Vec<TableName> =
            self.copied.points.keys().map(|table| names.table(table)).collect();
        let mut below = self.session().await?.filled_below(&subscription, trees, &own).await?;
        below.retain(|below| !emptied.contains(&below.table));
        if below.iter().any(|below| below.filled_by.is_none()) {
            // What was attached on the publisher since is a part of its root there, too.
            let published = self.following.source.published_tables().await?;
            let published: Vec<TableName> =
                published.iter().map(|table| names.table(&table.table)).collect();
            below.retain(|below| below.filled_by.is_some() || published.contains(&below.table));
        }
        match below.first() {
            Some(below) => {
                Err(below.error(&subscription, "The publisher has truncated the latter"))
            }
            None => Ok(()),
        }
    }

    /// Checks that a DELETE in place of a TRUNCATE leaves nobody without what he refers to, and has no
    /// key act on his rows: nothing may refer to these tables but they, and what they are partitions
    /// of.
    async fn refuse_to_delete_for_others(
        &mut self,
        emptied: &[TableName],
    ) -> Result<(), ApplyError> {
        const OTHERS: &str = "WITH RECURSIVE emptied (oid) AS ( \
               SELECT pg_catalog.to_regclass(name)::oid FROM unnest($1::text::text[]) AS n (name) \
               UNION SELECT i.inhrelid FROM emptied e JOIN pg_catalog.pg_inherits i \
                 ON i.inhparent = e.oid JOIN pg_catalog.pg_class c \
                 ON c.oid = i.inhrelid AND c.relispartition) \
             SELECT pg_catalog.format('%I of %s', k.conname, k.conrelid::pg_catalog.regclass) \
             FROM pg_catalog.pg_constraint k JOIN pg_catalog.pg_class c ON c.oid = k.conrelid \
             WHERE k.contype = 'f' AND k.confrelid IN (SELECT oid FROM emptied) \
             AND k.conrelid NOT IN (SELECT oid FROM emptied) AND NOT (c.relkind = 'p' \
               AND NOT EXISTS (SELECT FROM pg_catalog.pg_partition_tree(k.conrelid) AS t \
                 WHERE t.isleaf AND t.relid NOT IN (SELECT oid FROM emptied))) \
             ORDER BY 1 LIMIT 1";
        let names: Vec<String> = emptied.iter().map(TableName::to_string).collect();
        let list = text_array(names.iter().map(String::as_str));
        let found = self.session().await?.query(OTHERS, &[Some(&list)]).await?;
        match found.first().and_then(|row| row.get(0)) {
            Some(key) => Err(ApplyError::Setup(format!(
                "subscription \"{}\": the publisher has truncated {}, to which foreign key {key} of \
                 the target refers from a table that was not. Drop that key on the target, or empty \
                 its table there, and go on (farshore resume)",
                self.subscription,
                names.join(", ")
            ))),
            None => Ok(()),
        }
    }

    /// Has TRUNCATE done by DELETE in the open group. False if it is already.
    pub(crate) fn empty_by_delete(&mut self) -> bool {
        !std::mem::replace(&mut self.empties_by_delete, true)
    }

    /// Tables whose changes were passed over since the last call, because they are not copied.
    pub fn take_uncopied(&mut self) -> BTreeSet<TableName> {
        std::mem::take(&mut self.uncopied)
    }

    /// Whether tables of the target were given other columns since the last call.
    pub fn take_altered(&mut self) -> bool {
        std::mem::take(&mut self.altered)
    }

    /// Copied tables that have lost changes since the last call, each with the name that these have.
    pub fn take_renamed(&mut self) -> Vec<(TableName, TableName)> {
        std::mem::take(&mut self.renamed)
    }

    /// Writes progress into the open target transaction, waits for the answers that have to be looked
    /// at, and sends the COMMIT.
    pub async fn commit(&mut self, step: ProgressStep) -> Result<(), ApplyError> {
        self.close(step).await?;
        self.finish_closing().await
    }

    /// Closes the open group. Its COMMIT is sent at once if no answer has to be looked at before, and
    /// else when everything has been answered as it should: by [`Writer::finish_closing`], or on the
    /// way.
    pub async fn close(&mut self, step: ProgressStep) -> Result<(), ApplyError> {
        self.send_batches().await?;
        self.ensure_begun().await?;
        if fault::defect("progress-in-separate-transaction") {
            let committed = self.lanes.commit_without_progress(step.from).await;
            committed.map_err(|error| self.explain(error))?;
            fault::point("apply.after-commit");
            self.ensure_begun().await?;
        }
        if !self.touched.is_empty() {
            let asked = self.lanes.ask_unaltered(&self.touched);
            asked.map_err(|error| self.explain(error))?;
            self.touched.clear();
        }
        self.touched_last = None;
        self.first_of_group = Lsn::MAX;
        let closed = self.lanes.close(step).await;
        closed.map_err(|error| self.explain(error))
    }

    /// Waits until the statements of closed groups are answered, and sends their COMMITs. One that was
    /// sent at once is confirmed then, if there may be more connections than one.
    pub async fn finish_closing(&mut self) -> Result<(), ApplyError> {
        let finished = self.lanes.finish().await;
        finished.map_err(|error| self.explain(error))
    }

    /// Sends the COMMITs of closed groups whose statements are all answered by now.
    pub async fn poll_closing(&mut self) -> Result<(), ApplyError> {
        let polled = self.lanes.poll().await;
        polled.map_err(|error| self.explain(error))
    }

    /// Closes its connections; without this the target takes them for lost. Nothing is open.
    pub async fn close_connections(self) {
        self.lanes.close_all().await;
    }

    /// Closes the connections that only a backlog needs, once there is none.
    pub async fn close_spares(&mut self) {
        self.lanes.close_spares().await;
    }

    /// Waits until the target has ended the idle connection. No group may be open. Cancel-safe.
    pub async fn ended(&mut self) -> ApplyError {
        let error = self.lanes.current().ended().await;
        self.explain(error)
    }

    /// Whether the target's answers take so long that the line is what bounds a connection.
    pub fn is_far(&self) -> bool {
        self.lanes.is_far()
    }

    /// There is a backlog.
    pub fn expect_much(&mut self) {
        self.lanes.expect_much();
    }

    /// Whether there are connections that only a backlog needs.
    pub fn has_spares(&self) -> bool {
        self.lanes.has_spares()
    }

    /// Sends what is waiting here, so that the target can work on it.
    pub async fn send(&mut self) -> Result<(), ApplyError> {
        let sent = self.lanes.write().await;
        sent.map_err(|error| self.explain(error))
    }

    /// Waits until the target has answered everything.
    pub async fn drain(&mut self) -> Result<(), ApplyError> {
        let drained = self.lanes.drain().await;
        drained.map_err(|error| self.explain(error))
    }

    /// The newest commit that the target has confirmed since the last call.
    pub fn take_committed(&mut self) -> Option<Lsn> {
        self.lanes.take_committed()
    }

    pub(super) fn explain(&self, error: PipelineError) -> ApplyError {
        let error = match error {
            // Alone it either goes, or says what is wrong.
            error if self.lanes.is_overlapping() => match error.of_lanes() {
                Some(what) => PipelineError::Met(what),
                None => error,
            },
            error => error,
        };
        explain(error, &self.subscription, self.lanes.first(), &self.relations, self.newest)
    }
}

/// An insert has all its values, unless it was an update on the publisher that its filter made one.
fn check_all_sent(
    subscription: &str,
    position: Lsn,
    target: &TargetRelation,
    new: Option<Tuple<'_>>,
) -> Result<(), ApplyError> {
    let mut values = new.iter().flat_map(|new| new.values()).enumerate();
    let unsent = values.find(|(_, value)| *value == Value::Unchanged);
    let Some((at, _)) = unsent else { return Ok(()) };
    let relation = &target.relation;
    Err(ApplyError::ValueNotSent {
        subscription: subscription.to_owned(),
        position,
        table: Box::new(published_name(relation)),
        column: relation.columns.get(at).map(quoted).unwrap_or_default(),
    })
}

/// The shape of an update that sets all values that came, also those that a column has already.
pub(super) fn setting_all(shape: &Shape, new: Option<Tuple<'_>>) -> Shape {
    let Shape::Update { old_given, .. } = shape else { return shape.clone() };
    let values = new.iter().flat_map(|new| new.values()).enumerate();
    let unsent = values.filter(|(_, value)| *value == Value::Unchanged).map(|(column, _)| column);
    Shape::Update { old_given: *old_given, unchanged: bits(unsent) }
}

/// A bit for each of these columns.
fn bits(columns: impl Iterator<Item = usize>) -> Vec<u64> {
    let mut bits: Vec<u64> = Vec::new();
    for column in columns {
        bits.resize(bits.len().max(column / 64 + 1), 0);
        bits[column / 64] |= 1 << (column % 64);
    }
    bits
}

/// A change's statement shape, its new values and its identifying values.
pub(super) type Shaped<'a> = (Shape, Option<Tuple<'a>>, Option<Tuple<'a>>);

pub(super) fn shape_of<'a>(
    change: &Stored<'a>,
    target: &TargetRelation,
) -> Result<Shaped<'a>, String> {
    let columns = target.relation.columns.len();
    let fits = |tuple: &Tuple<'_>| {
        if tuple.len() == columns {
            Ok(())
        } else {
            Err(format!("{} values for {columns} columns", tuple.len()))
        }
    };
    match change {
        Stored::Insert { new, .. } => {
            fits(new)?;
            Ok((Shape::Insert, Some(*new), None))
        }
        Stored::Update { old, new, .. } => {
            fits(new)?;
            let find = conflict::identifying_tuple(*old, Some(*new));
            if let Some(find) = &find {
                fits(find)?;
            }
            // A column that SQL's UPDATE cannot set had better be left alone.
            let old_values = match old {
                OldTuple::Full(old) => Some(old.values()),
                OldTuple::Key(_) | OldTuple::None => None,
            };
            let mut old_values = old_values.into_iter().flatten();
            let unchanged = new.values().enumerate().filter(|(column, value)| {
                let is_fixed =
                    target.columns.get(*column).is_some_and(|there| there.identity_always);
                let is_same = old_values.next() == Some(*value) && is_fixed;
                matches!(value, Value::Unchanged) || is_same
            });
            let unchanged = bits(unchanged.map(|(column, _)| column));
            let old_given = !matches!(old, OldTuple::None);
            Ok((Shape::Update { old_given, unchanged }, Some(*new), find))
        }
        Stored::Delete { old, .. } => {
            let find = conflict::identifying_tuple(*old, None);
            match &find {
                Some(find) => fits(find)?,
                None => return Err("no identifying values".to_owned()),
            }
            Ok((Shape::Delete, None, find))
        }
        Stored::Truncate { .. } | Stored::Message { .. } | Stored::SubtransactionMark(_) => {
            Err("not a row change".to_owned())
        }
    }
}

fn send(
    pipeline: &mut Pipeline,
    target: &mut TargetRelation,
    names: &mut StatementNames,
    (shape, new, find): Shaped<'_>,
    seen_by: SeenBy,
    reference: ChangeRef,
) -> Result<(), PipelineError> {
    let expect = match seen_by {
        SeenBy::Us => Expect::OneRow,
        SeenBy::Target => Expect::OneRowOrError,
    };
    let wanted = (shape, seen_by);
    if !target.prepared.contains_key(&wanted) {
        let shape = &wanted.0;
        let (sql, types) = target.sql_seen_by(shape, seen_by);
        let (set, keys) = target.parameters(shape);
        if target.prepared.len() >= SHAPES_MAX {
            pipeline.parse("", &sql, &types, Some(reference.clone()))?;
            let statement = Statement { name: String::new(), sql, types };
            let unnamed = Prepared { statement, set, find: keys };
            return bind(pipeline, &unnamed, new, find, expect(reference));
        }
        let statement = Statement { name: names.unused(), sql, types };
        target.prepared.insert(wanted.clone(), Prepared { statement, set, find: keys });
    }
    let prepared = &target.prepared[&wanted];
    pipeline.prepare(&prepared.statement, || Expect::Parsed(Some(reference.clone())))?;
    bind(pipeline, prepared, new, find, expect(reference))
}

fn bind(
    pipeline: &mut Pipeline,
    prepared: &Prepared,
    new: Option<Tuple<'_>>,
    find: Option<Tuple<'_>>,
    expect: Expect,
) -> Result<(), PipelineError> {
    let parameters = prepared.set.len() + prepared.find.len();
    pipeline.run(&prepared.statement.name, parameters, expect, |bind| {
        write_values(bind, &prepared.set, new)?;
        write_values(bind, &prepared.find, find)
    })
}

/// Writes the values of the columns in `wanted` (ascending).
pub(super) fn write_values(
    bind: &mut Bind<'_>,
    wanted: &[usize],
    tuple: Option<Tuple<'_>>,
) -> Result<(), EncodeError> {
    let Some(tuple) = tuple else { return Ok(()) };
    let mut wanted = wanted.iter().copied().peekable();
    for (column, value) in tuple.values().enumerate() {
        if wanted.next_if_eq(&column).is_none() {
            continue;
        }
        let (format, bytes) = parameter(value);
        bind.parameter(format, bytes)?;
    }
    Ok(())
}

/// A value as a statement's parameter. Unchanged ones are never among the wanted.
pub(super) fn parameter(value: Value<'_>) -> (Format, Option<&[u8]>) {
    match value {
        Value::Null | Value::Unchanged => (Format::Text, None),
        Value::Text(text) => (Format::Text, Some(text)),
        Value::Binary(bytes) => (Format::Binary, Some(bytes)),
    }
}
