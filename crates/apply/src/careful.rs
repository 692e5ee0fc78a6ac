//! The log applied carefully, after the fast path has met a change that failed.
//!
//! Transactions before the one that failed are applied together, as the fast path would have. From
//! there on each source transaction is a target transaction, applied in runs of changes that each
//! have a savepoint. A run that fails is undone and shortened until the change that fails stands
//! alone and meets its table's policy. When all is calm, the fast path goes on.

use crate::ApplyError;
use crate::conflict::{self, OnConflict, relations_of};
use crate::error::FailedChange;
use crate::log_feed::{Body, Definitions, LogFeed, LogItem, SpillFeed};
use crate::postgres::progress::ProgressStep;
use crate::postgres::writer::{InTransaction, Writer};
use crate::status::SourceTransaction;
use crate::subscription::{Start, Subscription};
use bytes::Bytes;
use farshore_model::Lsn;
use farshore_model::transaction::{Header, commands};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use tokio::sync::watch;

/// Changes under one savepoint at most.
const RUN_MAX: usize = 256;
/// Transactions without a conflict after which the fast path goes on.
const CALM_AFTER: u64 = 64;

/// Where the log is applied carefully.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CarefulSpan {
    /// From here on each transaction is applied by itself.
    pub from: Lsn,
    /// At least up to here.
    pub until: Lsn,
    /// The transaction at `from` is first tried as a batch. A statement may write rows of several
    /// tables, and is checked when all are there; in the log a child may come before its parent then.
    /// A batch writes parents first.
    pub as_batch: bool,
    /// Only what comes before `from` is applied; who goes on begins anew there.
    pub only_before: bool,
}

impl CarefulSpan {
    /// Just at this position.
    pub fn at(position: Lsn) -> CarefulSpan {
        CarefulSpan { from: position, until: position, as_batch: false, only_before: false }
    }

    /// Each transaction by itself, from where the target stands up to `position`: one of them was
    /// refused, and it is not known which.
    pub fn all_until(position: Lsn) -> CarefulSpan {
        CarefulSpan { from: Lsn::ZERO, ..CarefulSpan::at(position) }
    }

    /// What comes before this position.
    pub fn before(position: Lsn) -> CarefulSpan {
        CarefulSpan { only_before: true, ..CarefulSpan::at(position) }
    }
}

/// Why a connection's work ended with an error.
pub(crate) struct Failure {
    /// What went wrong.
    pub error: ApplyError,
    /// The log is worth applying carefully here.
    pub careful: Option<CarefulSpan>,
}

impl Failure {
    /// Of changes applied together: which of them failed, if it was one of them. `stops_at` is the
    /// transaction at which the target was not as it has to be: whoever mends that does so for what
    /// comes from there on, so what comes before must have been committed.
    pub fn of_many(error: ApplyError, stops_at: Option<Lsn>) -> Failure {
        let careful = match &error {
            _ if error.is_transient() => None,
            ApplyError::Change(failed) => Some(CarefulSpan::at(failed.position)),
            // Any transaction of the group may be the reason; it would fail as a whole again.
            ApplyError::Commit(refused) => Some(CarefulSpan::all_until(refused.position)),
            ApplyError::Setup(_) => stops_at.map(CarefulSpan::before),
            _ => None,
        };
        Failure { error, careful }
    }
}

impl From<ApplyError> for Failure {
    fn from(error: ApplyError) -> Failure {
        Failure { error, careful: None }
    }
}

/// One connection at careful work.
pub(crate) struct Careful<'a> {
    pub agent: &'a Subscription,
    pub feed: &'a mut LogFeed,
    pub writer: &'a mut Writer,
    /// Moves on with what is applied.
    pub start: &'a mut Start,
    /// Where.
    pub span: CarefulSpan,
    /// The transaction that was tried as a batch last.
    pub tried_as_batch: Option<Lsn>,
    /// Commands of those before it in one target transaction.
    pub commands_max: u64,
}

impl Careful<'_> {
    /// Applies until all is calm, the log is dry, or `stop` turns true. False where what comes next was
    /// read and not applied: only what was before it was to be.
    pub async fn run(&mut self, stop: &watch::Receiver<bool>) -> Result<bool, Failure> {
        let mut calm_for = 0;
        // Newest position read, and commands in the open group of those before `from`.
        let (mut seen, mut open) = (self.start.applied, 0_u64);
        let (mut newest, mut transactions) = (None, 0);
        loop {
            let is_calm = calm_for >= CALM_AFTER && seen >= self.span.until;
            let item =
                if *stop.borrow() || is_calm { None } else { self.feed.next_at_hand().await? };
            let is_apart = match &item {
                Some(LogItem::Transaction { header, .. }) => {
                    header.end_lsn >= self.span.from || self.start.skips.contains(&header.end_lsn)
                }
                Some(LogItem::Watermark(_)) => false,
                Some(LogItem::Halt(_)) | None => true,
            };
            let more = match &item {
                Some(LogItem::Transaction { header, .. }) => header.commands.max(1),
                _ => 0,
            };
            if open > 0 && (is_apart || open.saturating_add(more) > self.commands_max) {
                let committed = self.commit(seen, newest, transactions).await;
                committed.map_err(|error| self.failure_of(transactions, error))?;
                (open, transactions) = (0, 0);
            }
            match item {
                Some(LogItem::Halt(_)) | None => return Ok(true),
                Some(LogItem::Watermark(position)) => seen = seen.max(position),
                Some(LogItem::Transaction { header, .. })
                    if self.span.only_before && header.end_lsn >= self.span.from =>
                {
                    return Ok(false);
                }
                Some(LogItem::Transaction { header, body })
                    if self.start.skips.contains(&header.end_lsn) =>
                {
                    self.left_out(&header, body).await?;
                    seen = seen.max(header.end_lsn);
                }
                Some(LogItem::Transaction { header, body })
                    if is_apart && self.span.as_batch && header.end_lsn == self.span.from =>
                {
                    let done = self.as_batch(&header, body).await;
                    done.map_err(|error| {
                        let row_by_row = CarefulSpan { as_batch: false, ..self.span };
                        // One that passes by itself is no answer: it is tried again.
                        let careful = (!error.is_transient()).then_some(row_by_row);
                        Failure { error, careful }
                    })?;
                    seen = seen.max(header.end_lsn);
                }
                Some(LogItem::Transaction { header, body }) if is_apart => {
                    let conflicts = self.transaction(&header, body).await;
                    let conflicts = conflicts.map_err(|error| match error.breaks_key_at() {
                        Some(at) if self.may_try_as_batch(at) => Failure::of_many(error, None),
                        _ => Failure::from(error),
                    })?;
                    calm_for = if conflicts > 0 { 0 } else { calm_for + 1 };
                    seen = seen.max(header.end_lsn);
                }
                Some(LogItem::Transaction { header, body }) => {
                    let done = self.among_others(&header, body, open == 0).await;
                    done.map_err(|error| self.failure_of(transactions + 1, error))?;
                    open = open.saturating_add(more);
                    newest = Some(SourceTransaction::from(&header));
                    transactions += 1;
                    seen = seen.max(header.end_lsn);
                }
            }
        }
    }

    /// What went wrong with this many transactions together.
    fn failure_of(&self, transactions: u64, error: ApplyError) -> Failure {
        if transactions < 2 || !error.is_out_of_memory() {
            return Failure::of_many(error, self.writer.stops_at());
        }
        let error = ApplyError::NoRoom { applied: self.start.applied, error: Box::new(error) };
        Failure { error, careful: Some(self.span) }
    }

    fn may_try_as_batch(&self, position: Lsn) -> bool {
        self.agent.may_batch() && self.tried_as_batch != Some(position)
    }

    /// Applies a transaction by itself in bulk.
    async fn as_batch(&mut self, header: &Header, body: Body) -> Result<(), ApplyError> {
        self.writer.begin(true).await?;
        self.whole(header, body).await?;
        self.commit(header.end_lsn, Some(header.into()), 1).await
    }

    /// Applies a transaction together with those around it.
    async fn among_others(
        &mut self,
        header: &Header,
        body: Body,
        begin: bool,
    ) -> Result<(), ApplyError> {
        if begin {
            self.writer.begin(false).await?;
        }
        self.whole(header, body).await
    }

    /// Applies what a transaction did in the open group.
    async fn whole(&mut self, header: &Header, body: Body) -> Result<(), ApplyError> {
        let mut at = InTransaction { header, subtransaction: header.xid };
        let mut chunks = Chunks::of(body, self.feed)?;
        while let Some(chunk) = chunks.next(self.feed, header).await? {
            self.writer.apply(&chunk, &mut at, self.feed.definitions()).await?;
        }
        Ok(())
    }

    /// Applies a transaction by itself; returns how many of its changes met a policy.
    async fn transaction(&mut self, header: &Header, body: Body) -> Result<u64, ApplyError> {
        self.writer.begin(false).await?;
        let mut at = InTransaction { header, subtransaction: header.xid };
        let (mut conflicts, mut run_length) = (0, RUN_MAX);
        let mut chunks = Chunks::of(body, self.feed)?;
        while let Some(chunk) = chunks.next(self.feed, header).await? {
            conflicts += self.changes(&chunk, &mut at, &mut run_length).await?;
        }
        self.commit(header.end_lsn, Some(header.into()), 1).await?;
        if conflicts > 0 {
            tracing::warn!(
                subscription = %self.agent.spec.name,
                position = %header.end_lsn,
                "{conflicts} changes of this transaction are at odds with the target; they are \
                 recorded in farshore.conflicts"
            );
            self.agent.set_status(|status| status.conflicts += conflicts);
        }
        Ok(conflicts)
    }

    /// Leaves a transaction out because an operator wants it, and records that.
    async fn left_out(&mut self, header: &Header, body: Body) -> Result<(), ApplyError> {
        let mut counts = ChangeCounts::default();
        let mut at = InTransaction { header, subtransaction: header.xid };
        let mut chunks = Chunks::of(body, self.feed)?;
        while let Some(chunk) = chunks.next(self.feed, header).await? {
            counts.add(&chunk, &mut at, self.feed.definitions())?;
        }
        self.writer.begin(false).await?;
        self.writer.record_skip(header, &counts.to_string()).await?;
        self.commit(header.end_lsn, Some(header.into()), 1).await?;
        tracing::warn!(
            subscription = %self.agent.spec.name,
            position = %header.end_lsn,
            commit_time = %header.commit_time,
            "transaction left out on request: {counts}; recorded in farshore.conflicts"
        );
        Ok(())
    }

    async fn changes(
        &mut self,
        body: &Bytes,
        at: &mut InTransaction<'_>,
        run_length: &mut usize,
    ) -> Result<u64, ApplyError> {
        let position = at.header.end_lsn;
        let mut changes = Vec::new();
        for command in commands(body) {
            let command = command
                .map_err(|error| ApplyError::Stored { position, what: error.to_string() })?;
            if at.read(command)?.is_some() {
                changes.push(body.slice_ref(command));
            }
        }
        let (mut next, mut conflicts) = (0, 0);
        while next < changes.len() {
            let end = changes.len().min(next + *run_length);
            let run = &changes[next..end];
            let failed = match self.run_of_changes(run, at.header).await {
                Ok(done) => {
                    next += done;
                    *run_length = RUN_MAX.min(*run_length * 2);
                    continue;
                }
                Err(ApplyError::Change(failed)) if failed.is_conflict() => failed,
                Err(ApplyError::Change(failed))
                    if failed.may_go_as_delete() && self.writer.empty_by_delete() =>
                {
                    self.writer.undo_changes().await?;
                    self.writer.keep_changes().await?;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let which = run.iter().position(|change| change.as_ptr() == failed.command.as_ptr());
            match which {
                // Those before it first, and then it stands alone.
                Some(before @ 1..) => {
                    self.writer.undo_changes().await?;
                    self.writer.keep_changes().await?;
                    *run_length = before;
                }
                _ if failed.breaks_key() && self.may_try_as_batch(failed.position) => {
                    return Err(ApplyError::Change(failed));
                }
                _ => {
                    if self.writer.apply_as_shown(&failed).await? {
                        self.writer.keep_changes().await?;
                    } else {
                        self.conflict(failed, at.header).await?;
                        conflicts += 1;
                    }
                    next += 1;
                    *run_length = 1;
                }
            }
        }
        Ok(conflicts)
    }

    /// Applies the first of these changes, as many as go together, and says how many.
    async fn run_of_changes(
        &mut self,
        run: &[Bytes],
        header: &Header,
    ) -> Result<usize, ApplyError> {
        let together = self.writer.prepare(run, header, self.feed.definitions()).await?;
        self.writer.begin_changes()?;
        for command in &run[..together] {
            self.writer.one(command, header, self.feed.definitions()).await?;
        }
        self.writer.keep_changes().await?;
        Ok(together)
    }

    /// A change that fails by itself meets its table's policy.
    async fn conflict(
        &mut self,
        failed: Box<FailedChange>,
        header: &Header,
    ) -> Result<(), ApplyError> {
        let policy = self.writer.policy_for(&failed);
        if policy == OnConflict::Stop || failed.operation == "TRUNCATE" {
            return Err(ApplyError::Change(failed));
        }
        self.writer.undo_changes().await?;
        self.writer.resolve(&failed, policy, header).await?;
        self.writer.keep_changes().await
    }

    async fn commit(
        &mut self,
        to: Lsn,
        newest: Option<SourceTransaction>,
        transactions: u64,
    ) -> Result<(), ApplyError> {
        let from = self.start.applied;
        let state = self.start.state_at(to);
        self.writer.commit(ProgressStep { from, to, newest, state }).await?;
        self.writer.drain().await?;
        if let Some(committed) = self.writer.take_committed() {
            self.start.applied = committed;
            self.agent.acknowledge(committed)?;
            self.agent.set_status(|status| {
                status.transactions += transactions;
                status.target_commits += 1;
            });
        }
        Ok(())
    }
}

/// Changes of a transaction, by table and operation.
#[derive(Default)]
struct ChangeCounts(BTreeMap<(String, &'static str), u64>);

impl ChangeCounts {
    fn add(
        &mut self,
        body: &Bytes,
        at: &mut InTransaction<'_>,
        definitions: &Definitions,
    ) -> Result<(), ApplyError> {
        let position = at.header.end_lsn;
        for command in commands(body) {
            let command = command
                .map_err(|error| ApplyError::Stored { position, what: error.to_string() })?;
            let Some(change) = at.read(command)? else { continue };
            for relation in relations_of(&change) {
                let table = definitions
                    .get(&relation)
                    .map_or_else(|| "?".to_owned(), |relation| relation.qualified_name());
                *self.0.entry((table, conflict::operation(&change))).or_default() += 1;
            }
        }
        Ok(())
    }
}

impl fmt::Display for ChangeCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no changes");
        }
        for (n, ((table, operation), count)) in self.0.iter().enumerate() {
            let comma = if n == 0 { "" } else { ", " };
            write!(f, "{comma}{count} {operation} on {table}")?;
        }
        Ok(())
    }
}

/// A transaction's body, piece by piece.
pub(crate) enum Chunks {
    Inline(Option<Bytes>),
    Spilled(SpillFeed, VecDeque<Bytes>),
}

impl Chunks {
    pub fn of(body: Body, feed: &LogFeed) -> Result<Chunks, ApplyError> {
        Ok(match body {
            Body::Inline(bytes) => Chunks::Inline(Some(bytes)),
            Body::Spilled(spill) => Chunks::Spilled(feed.open_spill(spill)?, VecDeque::new()),
        })
    }

    pub async fn next(
        &mut self,
        feed: &mut LogFeed,
        header: &Header,
    ) -> Result<Option<Bytes>, ApplyError> {
        match self {
            Chunks::Inline(bytes) => Ok(bytes.take()),
            Chunks::Spilled(spill, chunks) => loop {
                if let Some(chunk) = chunks.pop_front() {
                    return Ok(Some(chunk));
                }
                match feed.next_chunk(spill, header.end_lsn).await? {
                    Some(more) => chunks.extend(more),
                    None => return Ok(None),
                }
            },
        }
    }
}
