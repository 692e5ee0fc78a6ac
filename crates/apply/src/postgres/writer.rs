//! Stored changes → statements on the target.
//!
//! ```text
//! batching  changes held until they are written in bulk
//! learning  what a relation version is on the target, when it is first met
//! ```

mod batching;
mod learning;

use crate::ApplyError;
use crate::conflict::{self, ConflictPolicy};
use crate::log_feed::Definitions;
use crate::postgres::batch::{Batches, StatementNames};
use crate::postgres::explain::explain;
use crate::postgres::follow_ddl::FollowDdl;
use crate::postgres::foreign_keys::ForeignKeys;
use crate::postgres::pipeline::{ChangeRef, Expect, Pipeline, PipelineError};
use crate::postgres::progress::{ADVANCE, ADVANCE_TYPES};
use crate::postgres::statements::{Prepared, Shape, TargetRelation};
use crate::row_by_row::RowByRow;
use bytes::Bytes;
use farshore_capture::publication::{PublicationSpec, TableName};
use farshore_capture::schema::NameMap;
use farshore_fault as fault;
use farshore_model::transaction::{Header, commands};
use farshore_model::{DictionaryId, Lsn, Xid};
use farshore_wire::frontend::{Bind, EncodeError, Format};
use farshore_wire::pgoutput::stored::{Stored, decode_stored};
use farshore_wire::pgoutput::{OldTuple, Tuple, Value};
use std::collections::{BTreeSet, HashMap};

/// Most update shapes prepared per relation; beyond, one unnamed statement is parsed each time.
const SHAPES_MAX: usize = 64;

/// Applies transactions of one subscription through one connection.
pub struct Writer {
    pub(super) pipeline: Pipeline,
    pub(super) subscription: String,
    pub(super) relations: HashMap<DictionaryId, TargetRelation>,
    /// Copied tables and the consistent points of their copies.
    copied: HashMap<TableName, Lsn>,
    /// What tables are called on the target.
    following: Following,
    target_names: NameMap,
    /// Tables met in the log that are not copied.
    uncopied: BTreeSet<TableName>,
    pub(super) on_conflict: ConflictPolicy,
    names: StatementNames,
    changes: u64,
    /// Changes of the open group are netted and written in bulk, where the table allows it.
    batching: bool,
    /// BEGIN has been sent.
    begun: bool,
    /// A group whose COMMIT waits for the answers of its statements.
    closing: Option<Lsn>,
    /// The open or closing target transaction has statements of batches.
    has_batches: bool,
    /// Batches hold parts of the body at hand.
    holds_body: bool,
    /// Bytes of changes since the last look at what a closing group waits for.
    unpolled: usize,
    /// Newest position applied.
    newest: Lsn,
    batches: Batches,
    /// The target's foreign keys, where they fire for what we write.
    cascades: Option<ForeignKeys>,
}

/// What the target's columns follow.
#[derive(Clone, Debug)]
pub struct Following {
    /// What is done about new columns.
    pub policy: FollowDdl,
    /// Where the publisher is.
    pub source: PublicationSpec,
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
/// While a group closes, its answers are looked for whenever this much has been taken in meanwhile.
const POLL_EVERY_BYTES: usize = 32 << 10;

/// Every statement finds its rows by a key, whatever the planner thinks of the table's size at the
/// moment: a plan made while a table was empty must not read all of it later.
const PLANNING: &str = "SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; \
     SET enable_hashjoin = off; SET enable_mergejoin = off; SET jit = off";

const BEGIN: &str = "farshore_begin";
/// Where foreign keys fire: those that can wait are checked at the commit, where the target is as
/// the publisher was at a commit.
const DEFER: &str = "farshore_defer";
const COMMIT: &str = "farshore_commit";
const PROGRESS: &str = "farshore_progress";

impl Writer {
    /// Starts with a session that holds the subscription's lock.
    pub async fn new(
        mut pipeline: Pipeline,
        subscription: &str,
        on_conflict: ConflictPolicy,
        copied: HashMap<TableName, Lsn>,
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
        let prepared = async {
            pipeline.idle_session().await?.connection.simple_query(PLANNING).await?;
            pipeline.parse(BEGIN, "BEGIN", &[], None)?;
            pipeline.parse(COMMIT, "COMMIT", &[], None)?;
            pipeline.parse(DEFER, "SET CONSTRAINTS ALL DEFERRED", &[], None)?;
            pipeline.parse(PROGRESS, ADVANCE, &ADVANCE_TYPES, None)?;
            pipeline.sync();
            pipeline.drain().await
        };
        let outcome: Result<(), PipelineError> = prepared.await;
        let mut writer = Writer {
            pipeline,
            subscription: subscription.to_owned(),
            relations: HashMap::new(),
            copied,
            target_names,
            following,
            uncopied: BTreeSet::new(),
            on_conflict,
            names: StatementNames::default(),
            changes: 0,
            batching: false,
            begun: false,
            closing: None,
            has_batches: false,
            holds_body: false,
            unpolled: 0,
            newest: Lsn::ZERO,
            batches: Batches::new(row_by_row),
            cascades,
        };
        outcome.map_err(|error| writer.explain(error))?;
        writer.changes = 0;
        Ok(writer)
    }

    /// Row changes sent so far.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Begins a target transaction; of a batch nothing is sent before there is something to say.
    pub async fn begin(&mut self, batch: bool) -> Result<(), ApplyError> {
        self.batching = batch;
        if batch { Ok(()) } else { self.ensure_begun().await }
    }

    async fn ensure_begun(&mut self) -> Result<(), ApplyError> {
        // A closed group takes nothing more.
        self.finish_closing().await?;
        if self.begun {
            return Ok(());
        }
        let statements: &[&str] = if self.cascades.is_some() { &[BEGIN, DEFER] } else { &[BEGIN] };
        for statement in statements {
            let sent = self.pipeline.run(statement, 0, Expect::Done, |_| Ok(()));
            sent.map_err(|error| self.explain(error))?;
        }
        self.begun = true;
        Ok(())
    }

    /// Applies commands of one transaction. `at` carries its sub-transaction from chunk to chunk.
    pub async fn apply(
        &mut self,
        body: &Bytes,
        at: &mut InTransaction<'_>,
        definitions: &Definitions,
    ) -> Result<(), ApplyError> {
        let position = at.header.end_lsn;
        self.newest = self.newest.max(position);
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
            self.ensure_begun().await?;
            self.change(&change, body.slice_ref(command), at.header, definitions).await?;
            self.pipeline.pace().await.map_err(|error| self.explain(error))?;
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
        self.change(&change, command.clone(), header, definitions).await?;
        self.pipeline.pace().await.map_err(|error| self.explain(error))
    }

    async fn change(
        &mut self,
        change: &Stored<'_>,
        command: Bytes,
        header: &Header,
        definitions: &Definitions,
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
        let commit_time = header.commit_time;
        let may_be_gone = target.cascaded && shape == Shape::Delete;
        let reference = ChangeRef { position, commit_time, relation, command, may_be_gone };
        let result = send(&mut self.pipeline, target, &mut self.names, shape, new, find, reference);
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
        let (mut tables, mut names) = (Vec::new(), Vec::new());
        let (mut first, mut passed_over) = (None, false);
        for relation in relations.clone() {
            self.learn(relation, header, definitions).await?;
            let Some(target) = self.relations.get(&relation) else {
                passed_over = true;
                continue;
            };
            if header.commit_lsn >= target.copied_at {
                tables.push(target.rows_of_its_own());
                names.push(target.table.to_string());
                first.get_or_insert(relation);
            } else {
                passed_over = true;
            }
        }
        let Some(relation) = first else { return Ok(()) };
        // The message names every published table that was emptied: whatever else CASCADE would
        // reach is the target's own. Where some tables are passed over because their copy is newer,
        // foreign keys may forbid to truncate the others.
        // Sequences are reset by their owner alone; the rows are the same without that.
        let restarts = *restart_identity
            && match self.pipeline.idle_session().await {
                Ok(session) => session.owns(&names).await?,
                Err(error) => return Err(self.explain(error)),
            };
        let identity = if restarts { " RESTART IDENTITY" } else { "" };
        let sql = if passed_over {
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
            format!("TRUNCATE {}{identity}", tables.join(", "))
        };
        let (position, commit_time) = (header.end_lsn, header.commit_time);
        let may_be_gone = false;
        let reference = ChangeRef { position, commit_time, relation, command, may_be_gone };
        self.pipeline
            .run_sql(&sql, Expect::Truncated(reference))
            .map_err(|error| self.explain(error))
    }

    /// Tables whose changes were passed over since the last call, because they are not copied.
    pub fn take_uncopied(&mut self) -> BTreeSet<TableName> {
        std::mem::take(&mut self.uncopied)
    }

    /// Writes progress into the open target transaction, waits for all its answers, and sends the
    /// COMMIT without waiting for it.
    pub async fn commit(&mut self, from: Lsn, to: Lsn, state: &str) -> Result<(), ApplyError> {
        self.close(from, to, state).await?;
        self.finish_closing().await
    }

    /// Writes progress into the open target transaction. Its COMMIT is sent when everything has
    /// been answered as it should: by [`Writer::finish_closing`], or on the way.
    pub async fn close(&mut self, from: Lsn, to: Lsn, state: &str) -> Result<(), ApplyError> {
        self.send_batches().await?;
        self.ensure_begun().await?;
        if fault::defect("progress-in-separate-transaction") {
            self.drain().await?;
            self.send_commit(from).await?;
            self.drain().await?;
            fault::point("apply.after-commit");
            self.ensure_begun().await?;
        }
        let (name, from_text, to_text) =
            (self.subscription.clone(), from.to_string(), to.to_string());
        self.pipeline
            .run(PROGRESS, 4, Expect::Progress, |bind| {
                for text in [name.as_str(), &from_text, &to_text, state] {
                    bind.parameter(Format::Text, Some(text.as_bytes()))?;
                }
                Ok(())
            })
            .map_err(|error| self.explain(error))?;
        self.closing = Some(to);
        self.pipeline.request_answers().await.map_err(|error| self.explain(error))
    }

    /// Waits until the statements of a closed group are answered, and sends its COMMIT.
    pub async fn finish_closing(&mut self) -> Result<(), ApplyError> {
        let Some(to) = self.closing else { return Ok(()) };
        self.drain().await?;
        self.send_commit(to).await
    }

    /// Sends the COMMIT of a closed group if its statements are all answered by now.
    pub async fn poll_closing(&mut self) -> Result<(), ApplyError> {
        let Some(to) = self.closing else { return Ok(()) };
        if self.pipeline.poll().map_err(|error| self.explain(error))? {
            self.send_commit(to).await?;
        }
        Ok(())
    }

    async fn send_commit(&mut self, to: Lsn) -> Result<(), ApplyError> {
        fault::point("apply.before-commit");
        let batch = std::mem::take(&mut self.has_batches);
        (self.closing, self.begun) = (None, false);
        let sent = self.pipeline.run(COMMIT, 0, Expect::Commit { position: to, batch }, |_| Ok(()));
        sent.map_err(|error| self.explain(error))?;
        self.pipeline.sync();
        self.pipeline.send().await.map_err(|error| self.explain(error))?;
        fault::point("apply.after-commit-sent");
        Ok(())
    }

    /// Sends what is waiting here, so that the target can work on it.
    pub async fn send(&mut self) -> Result<(), ApplyError> {
        self.pipeline.send().await.map_err(|error| self.explain(error))
    }

    /// Waits until the target has answered everything.
    pub async fn drain(&mut self) -> Result<(), ApplyError> {
        self.pipeline.drain().await.map_err(|error| self.explain(error))
    }

    /// Takes the answers that are here already.
    pub fn take_answers(&mut self) -> Result<(), ApplyError> {
        self.pipeline.take_answers().map_err(|error| self.explain(error))
    }

    /// The newest commit that the target has confirmed since the last call.
    pub fn take_committed(&mut self) -> Option<Lsn> {
        self.pipeline.take_committed()
    }

    pub(super) fn explain(&self, error: PipelineError) -> ApplyError {
        explain(error, &self.subscription, &self.pipeline, &self.relations, self.newest)
    }
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
            let mut unchanged = Vec::new();
            for (column, value) in new.values().enumerate() {
                if matches!(value, Value::Unchanged) {
                    unchanged.resize(columns.div_ceil(64), 0);
                    unchanged[column / 64] |= 1 << (column % 64);
                }
            }
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
    shape: Shape,
    new: Option<Tuple<'_>>,
    find: Option<Tuple<'_>>,
    reference: ChangeRef,
) -> Result<(), PipelineError> {
    if !target.prepared.contains_key(&shape) {
        let (sql, types) = target.sql(&shape);
        let (set, keys) = target.parameters(&shape);
        if target.prepared.len() >= SHAPES_MAX {
            pipeline.parse("", &sql, &types, Some(reference.clone()))?;
            let unnamed = Prepared { name: String::new(), set, find: keys };
            return bind(pipeline, &unnamed, new, find, reference);
        }
        let name = names.unused();
        pipeline.parse(&name, &sql, &types, Some(reference.clone()))?;
        target.prepared.insert(shape.clone(), Prepared { name, set, find: keys });
    }
    bind(pipeline, &target.prepared[&shape], new, find, reference)
}

fn bind(
    pipeline: &mut Pipeline,
    statement: &Prepared,
    new: Option<Tuple<'_>>,
    find: Option<Tuple<'_>>,
    reference: ChangeRef,
) -> Result<(), PipelineError> {
    let parameters = statement.set.len() + statement.find.len();
    pipeline.run(&statement.name, parameters, Expect::OneRow(reference), |bind| {
        write_values(bind, &statement.set, new)?;
        write_values(bind, &statement.find, find)
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
