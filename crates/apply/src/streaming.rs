//! The log applied to the target: groups begun, filled, committed and acknowledged.

use crate::ApplyError;
use crate::early::{EarlySettings, EarlyStart, Outcome, Turn};
use crate::halts::HaltAt;
use crate::log_feed::{Body, LogFeed, LogItem};
use crate::postgres::progress::{ProgressStep, TableProgress, state};
use crate::postgres::writer::{InTransaction, Writer};
use crate::question::Question;
use crate::scheduler::{Batches, GroupLimits, Input, Scheduler, Tables};
use crate::small_groups::SmallGroups;
use crate::status::{AppliedTransaction, Phase, SourceTransaction};
use crate::subscription::{Start, Subscription};
use farshore_capture::publication::PublishedTable;
use farshore_fault as fault;
use farshore_model::transaction::{Header, commands};
use farshore_model::{Applied, Lsn, PgTime};
use farshore_wire::pgoutput::stored::changed_relation;
use std::collections::VecDeque;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Why streaming ended without an error.
pub(crate) enum StreamEnd {
    /// It was told to stop.
    Stopped,
    /// Tables joined the publication and must be copied, foreign keys can be added now, what was to be
    /// detached on the target is looked at again, or what comes before a transaction that stops is
    /// committed.
    StartAgain,
    /// The next transaction, at this position, is one to be applied carefully.
    Halted(Lsn),
    /// Rows of tables that are copied beside the stream are all on the target.
    CopiedBeside,
}

/// With nothing to apply, progress on the target follows the log this often.
const IDLE_PROGRESS_EVERY: Duration = Duration::from_secs(10);

/// A connection that was idle for so long is watched for its end.
const IDLE_BEFORE_WATCHED: Duration = Duration::from_secs(1);

/// Connections that a backlog needed are closed after this long without one.
const SPARES_KEPT_FOR: Duration = Duration::from_secs(30);

/// A store that is so many bytes of the publisher's log ahead is worth more than one connection from
/// the start, if only its positions are: what they are of is not known yet.
const MUCH_BYTES: u64 = 4 << 20;

/// A publisher that did not answer is asked again after this, and after up to [`ASK_AGAIN_MAX`].
const ASK_AGAIN_MIN: Duration = Duration::from_secs(2);
const ASK_AGAIN_MAX: Duration = Duration::from_secs(300);

/// The numbers of columns that the target was given are looked for after this: more of them may come.
const LOOK_AFTER_ALTERED: Duration = Duration::from_secs(2);

/// How long what is in the log waits for the publisher's answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// One connection at work.
pub(crate) struct Streaming<'a> {
    agent: &'a Subscription,
    feed: LogFeed,
    writer: Writer,
    /// Transactions that are applied while they arrive.
    early: EarlyStart,
    /// Row changes of those.
    early_changes: u64,
    scheduler: Scheduler,
    /// Bounds of a usual group.
    limits: GroupLimits,
    small: SmallGroups,
    /// How many times the bounds of groups are halved now.
    halvings: u32,
    /// Confirmed by the target.
    applied: Lsn,
    /// Position of the last group that was sent with its COMMIT.
    sent: Lsn,
    /// Newest position read from the log.
    seen: Lsn,
    consistent_at: Lsn,
    /// Capture's connection at which the publisher was last asked for new tables.
    asked: u64,
    /// Copied tables.
    tables: Vec<TableProgress>,
    /// As [`Start::otherwise`].
    otherwise: Vec<PublishedTable>,
    /// Foreign keys are to be added when every state is a prefix.
    foreign_keys_wait: bool,
    /// Changes of a table that is not copied have come by, or the publisher did not answer.
    ask_again: bool,
    /// It is not asked before.
    ask_at: Instant,
    /// Something is still to be detached on the target, or has other columns: then it is looked at
    /// again.
    again_at: Option<Instant>,
    /// How long it is left alone when it does not answer.
    ask_pause: Duration,
    /// What it is being asked.
    question: Option<Question>,
    /// A transaction is worked on that is not in the open group yet.
    is_applying: bool,
    /// The transactions in the open group.
    in_group: Vec<SourceTransaction>,
    /// When the open group was begun.
    opened_at: Instant,
    /// Since when nothing has come for it.
    dry_since: Option<Instant>,
    /// The open group is a batch.
    batch: bool,
    /// Groups closed but not confirmed: their last positions and their transactions.
    awaiting: VecDeque<(Lsn, Vec<SourceTransaction>)>,
    /// Tracer tokens that were read and are not confirmed.
    tracers: VecDeque<SourceTransaction>,
    progress_at: Instant,
    /// Row changes that the status counts already.
    changes_announced: u64,
    /// Where it is to rest while somebody looks at the target.
    halt: Option<HaltAt>,
    /// Only used by the defect that swaps transactions.
    held_back: Option<(Header, Body)>,
}

impl<'a> Streaming<'a> {
    /// Nothing is open. Groups are as `small` says.
    pub fn new(
        agent: &'a Subscription,
        feed: LogFeed,
        mut writer: Writer,
        start: Start,
        early: EarlySettings,
        small: SmallGroups,
    ) -> Streaming<'a> {
        let durable = agent.store.durable().borrow().0;
        if start.applied >= early.lanes.alone_until
            && durable.bytes_since(start.applied) >= MUCH_BYTES
        {
            writer.expect_much();
        }
        let usual = agent.spec.limits;
        let halvings = small.halvings_at(start.applied);
        let may_be_early = usual.batches != Batches::Never && writer.may_be_early();
        let early = EarlyStart::new(agent.store.as_ref(), may_be_early.then_some(early));
        let again_at = start.again_after.map(|pause| Instant::now() + pause);
        let limits = if writer.is_far() { usual.for_far_target() } else { usual };
        let is_renamed = start.tables.iter().any(|table| table.renamed.is_some());
        Streaming {
            agent,
            feed,
            writer,
            early,
            early_changes: 0,
            scheduler: Scheduler::new(limits.halved(halvings)),
            limits,
            small,
            halvings,
            applied: start.applied,
            sent: start.applied,
            seen: start.applied,
            consistent_at: start.consistent_at,
            asked: start.asked,
            tables: start.tables,
            otherwise: start.otherwise,
            foreign_keys_wait: start.foreign_keys_wait,
            ask_again: start.ask_again || is_renamed,
            // It would say the same, and nothing could be copied yet.
            ask_at: again_at.filter(|_| start.copies_wait).unwrap_or_else(Instant::now),
            again_at,
            ask_pause: ASK_AGAIN_MIN,
            question: None,
            is_applying: false,
            in_group: Vec::new(),
            opened_at: Instant::now(),
            dry_since: None,
            batch: false,
            awaiting: VecDeque::new(),
            tracers: VecDeque::new(),
            progress_at: Instant::now(),
            changes_announced: 0,
            halt: None,
            held_back: None,
        }
    }

    /// Applies what the log has and will have, until told to stop or to copy new tables.
    pub async fn run(&mut self, stop: &mut watch::Receiver<bool>) -> Result<StreamEnd, ApplyError> {
        let end = self.apply_all(stop).await;
        let groups = self.awaiting.iter().map(|(_, group)| group).chain([&self.in_group]);
        let in_flight = groups.map(Vec::len).sum::<usize>()
            + usize::from(self.is_applying)
            + usize::from(self.early.is_busy());
        end.map_err(|error| {
            // One transaction by itself needs what it needs.
            let may_need_less = in_flight > 1 && error.is_out_of_memory();
            if may_need_less {
                ApplyError::NoRoom { applied: self.applied, error: Box::new(error) }
            } else {
                error
            }
        })
    }

    async fn apply_all(
        &mut self,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<StreamEnd, ApplyError> {
        loop {
            if *stop.borrow() {
                self.commit_group().await?;
                self.settle().await?;
                self.announce();
                return Ok(StreamEnd::Stopped);
            }
            let sessions = *self.agent.capture_ready.borrow();
            let is_to_be_asked = self.ask_again || self.asked != sessions;
            if self.question.is_none() && is_to_be_asked && Instant::now() >= self.ask_at {
                self.commit_group().await?;
                self.settle().await?;
                self.ask(sessions).await;
            }
            if self.tables_have_joined() {
                self.commit_group().await?;
                self.settle().await?;
                return Ok(StreamEnd::StartAgain);
            }
            let looks_again = self.again_at.is_some_and(|again_at| Instant::now() >= again_at);
            let adds_keys = self.foreign_keys_wait && self.applied >= self.consistent_at;
            if looks_again || adds_keys {
                self.commit_group().await?;
                self.settle().await?;
                return Ok(StreamEnd::StartAgain);
            }
            if let Some(asked) = self.agent.halts.take() {
                self.commit_group().await?;
                self.settle().await?;
                self.announce();
                let applied = self.applied;
                self.halt = self.rest(asked.point(applied), stop).await?.flatten();
                // No transaction is left before the point.
                self.halt_before(self.seen, stop).await?;
                continue;
            }
            match self.feed.next_at_hand().await? {
                Some(LogItem::Transaction { header, body }) => {
                    self.halt_before(header.commit_lsn, stop).await?;
                    self.transaction(header, body).await?;
                }
                Some(LogItem::Watermark(position)) => {
                    self.seen = self.seen.max(position);
                    self.halt_before(position, stop).await?;
                }
                Some(LogItem::Halt(position)) => {
                    self.commit_group().await?;
                    self.settle().await?;
                    return Ok(StreamEnd::Halted(position));
                }
                None => self.dry(stop).await?,
            }
        }
    }

    /// Rests where somebody wants to look at the target, if what comes next starts at or behind that
    /// point: everything before it is there then, and nothing else.
    async fn halt_before(
        &mut self,
        next: Lsn,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<(), ApplyError> {
        let late = if fault::defect("late-halt") { 1 << 12 } else { 0 };
        let Some(halt) = self.halt.take_if(|halt| next.0 >= halt.point.0 + late) else {
            return Ok(());
        };
        self.commit_group().await?;
        self.settle().await?;
        self.announce();
        let applied = self.applied;
        self.rest(halt.rest(applied), stop).await.map(drop)
    }

    /// Nothing is done until `done`, with nothing open on the target; `None` if it is to stop.
    async fn rest<T>(
        &mut self,
        done: impl Future<Output = T>,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<Option<T>, ApplyError> {
        tokio::select! {
            done = done => Ok(Some(done)),
            _ = stop.wait_for(|stop| *stop) => Ok(None),
            error = self.writer.ended() => Err(error),
        }
    }

    /// As [`Writer::stops_at`].
    pub fn stops_at(&self) -> Option<Lsn> {
        self.writer.stops_at()
    }

    /// Gives up what was begun before its commit has come. Where work ended in order, says goodbye
    /// to the target.
    pub async fn end(mut self, in_order: bool) {
        self.early.give_up().await;
        if in_order {
            self.writer.close_connections().await;
        }
    }

    /// Asks the publisher whether it publishes tables that are not copied. What is in the log may be
    /// of such, so the answer is waited for, but not for long: the rest need not wait.
    async fn ask(&mut self, sessions: u64) {
        let about_partitions = self.asked != sessions;
        let known = (&*self.tables, &*self.otherwise);
        let mut question = Question::ask(self.agent, known, sessions, about_partitions);
        // What asks again from here on asks for another answer.
        self.ask_again = false;
        let _ = tokio::time::timeout(ANSWER_WITHIN, question.answered()).await;
        self.question = Some(question);
    }

    /// Whether the publisher has answered that it does. Where somebody has one of its tables for
    /// himself it does not answer, and is asked again.
    fn tables_have_joined(&mut self) -> bool {
        let Some(question) = self.question.take_if(|question| question.is_over()) else {
            return false;
        };
        let sessions = question.sessions;
        let Some(answer) = question.answer() else {
            self.ask_later();
            self.ask_again = true;
            return false;
        };
        // What was renamed may get its name back without any change that tells.
        let renamed = self.tables.iter().any(|table| table.renamed.is_some());
        self.asked = sessions;
        self.ask_again |= renamed;
        if renamed {
            self.ask_later();
        } else {
            self.ask_pause = ASK_AGAIN_MIN;
        }
        answer
    }

    fn ask_later(&mut self) {
        self.ask_at = Instant::now() + self.ask_pause;
        self.ask_pause = (2 * self.ask_pause).min(ASK_AGAIN_MAX);
    }

    async fn transaction(&mut self, header: Header, body: Body) -> Result<(), ApplyError> {
        if fault::defect("swapped-transactions") {
            let Some((first_header, first_body)) = self.held_back.take() else {
                self.held_back = Some((header, body));
                return Ok(());
            };
            self.apply(header, body).await?;
            self.commit_group().await?;
            return self.apply(first_header, first_body).await;
        }
        self.apply(header, body).await
    }

    async fn apply(&mut self, header: Header, body: Body) -> Result<(), ApplyError> {
        if self.apply_early(&header, &body).await? {
            return Ok(());
        }
        self.dry_since = None;
        let source = SourceTransaction::from(&header);
        if self.in_group.is_empty() && self.awaiting.is_empty() {
            // The target may keep us waiting from here on.
            self.agent.set_status(|status| status.oldest_pending = Some(source));
        }
        self.let_groups_grow();
        let (input, _) = input_of(&header, &body, self.is_behind(header.commit_time));
        let decision = self.scheduler.step(input);
        if decision.commit_before {
            self.commit_open().await?;
        }
        if decision.begin {
            self.opened_at = Instant::now();
            self.batch = decision.batch;
            self.writer.begin(decision.batch).await?;
        }
        self.is_applying = true;
        let mut at = InTransaction { header: &header, subtransaction: header.xid };
        match body {
            Body::Inline(bytes) => {
                self.writer.apply(&bytes, &mut at, self.feed.definitions()).await?;
            }
            Body::Spilled(spill) => {
                let mut spill = self.feed.open_spill(spill)?;
                while let Some(chunks) = self.feed.next_chunk(&mut spill, header.end_lsn).await? {
                    for chunk in chunks {
                        self.writer.apply(&chunk, &mut at, self.feed.definitions()).await?;
                    }
                }
            }
        }
        for table in self.writer.take_uncopied() {
            tracing::info!(
                subscription = %self.agent.spec.name, %table,
                "changes of a table that is not copied are passed over"
            );
            self.ask_again = true;
        }
        for (table, other) in self.writer.take_renamed() {
            tracing::warn!(
                subscription = %self.agent.spec.name, %table,
                "the publisher's table is called {other} now, and its changes are not carried under \
                 its name: if it gets that back, it is to be copied anew"
            );
            for noted in self.tables.iter_mut().filter(|noted| noted.table == table) {
                noted.renamed = Some(other.clone());
            }
            self.ask_again = true;
        }
        // The end of what is copied beside the stream is a start by itself.
        if self.writer.take_altered() && self.consistent_at != Lsn::MAX {
            let soon = Instant::now() + LOOK_AFTER_ALTERED;
            self.again_at = Some(self.again_at.map_or(soon, |again_at| again_at.min(soon)));
        }
        self.seen = self.seen.max(header.end_lsn);
        self.is_applying = false;
        self.in_group.push(source);
        // Capture keeps no other transaction without changes.
        if header.commands == 0 {
            self.tracers.push_back(source);
        }
        if decision.commit_after {
            self.commit_open().await?;
        }
        Ok(())
    }

    /// The commit has come of a transaction that may be on the target already, but for it. False
    /// when it is not.
    async fn apply_early(&mut self, header: &Header, body: &Body) -> Result<bool, ApplyError> {
        let Body::Spilled(spill) = body else { return Ok(false) };
        if !self.early.has(*spill) {
            return Ok(false);
        }
        self.commit_group().await?;
        self.settle().await?;
        let source = SourceTransaction::from(header);
        self.agent.set_status(|status| status.oldest_pending = Some(source));
        let to = header.end_lsn;
        let state = self.state_at(to);
        let turn = Turn { header: header.clone(), from: self.sent, state };
        let changes = match self.early.commit(turn).await {
            Outcome::Committed { changes } => changes,
            Outcome::GivenUp => return Ok(false),
            Outcome::Failed(error) => return Err(error),
        };
        tracing::debug!(
            subscription = %self.agent.spec.name, position = %to, changes,
            "a large transaction was applied while it arrived"
        );
        self.early_changes += changes;
        self.seen = self.seen.max(to);
        self.sent = to;
        self.awaiting.push_back((to, vec![source]));
        self.acknowledge_up_to(to)?;
        Ok(true)
    }

    /// Groups are larger again where nothing was refused for a while.
    fn let_groups_grow(&mut self) {
        if self.halvings == 0 || !self.in_group.is_empty() {
            return;
        }
        let halvings = self.small.halvings_at(self.seen);
        if halvings < self.halvings {
            self.halvings = halvings;
            self.scheduler.set_limits(self.limits.halved(halvings));
        }
    }

    /// What the target is when it has everything up to `position`.
    fn state_at(&self, position: Lsn) -> &'static str {
        if position >= self.consistent_at { state::STREAMING } else { state::CATCHING_UP }
    }

    /// Nothing more is at hand: commit, wait for the target, then for the log.
    async fn dry(&mut self, stop: &mut watch::Receiver<bool>) -> Result<(), ApplyError> {
        if let Some((header, body)) = self.held_back.take() {
            self.apply(header, body).await?;
        }
        if self.keeps_group_open(stop).await? {
            return Ok(());
        }
        self.commit_group().await?;
        self.settle().await?;
        let idle_progress = self.progress_at + IDLE_PROGRESS_EVERY;
        let becomes_consistent =
            self.applied < self.consistent_at && self.seen >= self.consistent_at;
        if self.seen > self.applied && (becomes_consistent || Instant::now() >= idle_progress) {
            self.batch = false;
            self.writer.begin(false).await?;
            self.commit_open().await?;
            self.settle().await?;
        }
        self.announce();
        // What was read after what is applied has no changes.
        self.early.settled(self.seen);
        self.let_groups_grow();
        // What is done early takes room beside the others.
        if self.halvings == 0 {
            self.early.consider(self.applied, self.consistent_at);
        }
        let behind = self.seen > self.applied;
        let (asked, mut ready) = (self.asked, self.agent.capture_ready.clone());
        let (ask_at, ask_again) = (self.ask_at, self.ask_again);
        let may_ask = self.question.is_none() && Instant::now() >= ask_at;
        let is_asked = self.question.is_some();
        let again_at = self.again_at;
        let has_spares = self.writer.has_spares();
        let is_quiet = tokio::select! {
            Ok(_) = ready.wait_for(|sessions| *sessions != asked), if may_ask => false,
            () = tokio::time::sleep_until(ask_at), if ask_again && !may_ask && !is_asked => false,
            () = answered(&mut self.question), if is_asked => false,
            () = tokio::time::sleep_until(again_at.unwrap_or(ask_at)), if again_at.is_some() => false,
            () = self.feed.wait_for_more() => false,
            () = self.agent.halts.asked() => false,
            () = self.early.wait() => false,
            // Without this a target that has gone would be found with the next change.
            error = async {
                tokio::time::sleep(IDLE_BEFORE_WATCHED).await;
                self.writer.ended().await
            } => return Err(error),
            _ = stop.wait_for(|stop| *stop) => false,
            () = tokio::time::sleep_until(self.progress_at + IDLE_PROGRESS_EVERY), if behind => false,
            () = tokio::time::sleep_until(self.progress_at + SPARES_KEPT_FOR), if has_spares => true,
        };
        if is_quiet {
            self.writer.close_spares().await;
        }
        Ok(())
    }

    /// While the target is behind, waits a moment for more to put into the open group. False when
    /// the group is to be committed now.
    async fn keeps_group_open(
        &mut self,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<bool, ApplyError> {
        let Some(newest) = self.in_group.last() else { return Ok(false) };
        let behind = self.is_behind(newest.commit_time);
        let limits = &self.agent.spec.limits;
        let now = Instant::now();
        let dry_since = *self.dry_since.get_or_insert(now);
        let (open_for, dry_for) = (now - self.opened_at, now - dry_since);
        if self.scheduler.step(Input::Dry { behind, open_for, dry_for }).commit_before {
            self.commit_open().await?;
            return Ok(false);
        }
        // What is in the group already can be worked on meanwhile, and the one before it ends.
        self.writer.finish_closing().await?;
        self.writer.send().await?;
        let until = (self.opened_at + limits.open_max).min(dry_since + limits.dry_max);
        tokio::select! {
            () = self.feed.wait_for_more() => {}
            () = self.agent.halts.asked() => {}
            () = tokio::time::sleep_until(until) => {}
            _ = stop.wait_for(|stop| *stop) => {}
        }
        Ok(true)
    }

    /// Whether what committed then on the publisher should have been here before now.
    fn is_behind(&self, commit_time: PgTime) -> bool {
        let limit = self.agent.spec.limits.behind_after.as_micros();
        PgTime::now().micros_since(commit_time) > i64::try_from(limit).unwrap_or(i64::MAX)
    }

    async fn commit_group(&mut self) -> Result<(), ApplyError> {
        if self.scheduler.step(Scheduler::DONE).commit_before {
            self.commit_open().await
        } else {
            Ok(())
        }
    }

    async fn commit_open(&mut self) -> Result<(), ApplyError> {
        let to = self.seen;
        let state = self.state_at(to);
        let newest = self.in_group.last().copied();
        self.writer.close(ProgressStep { from: self.sent, to, newest, state }).await?;
        if !self.batch {
            self.writer.finish_closing().await?;
        }
        self.sent = to;
        self.awaiting.push_back((to, std::mem::take(&mut self.in_group)));
        // A group before this one may have been answered by now; or this one, if it is small.
        self.acknowledge()
    }

    /// Waits until the target has confirmed everything sent.
    async fn settle(&mut self) -> Result<(), ApplyError> {
        self.writer.finish_closing().await?;
        self.writer.drain().await?;
        self.acknowledge()
    }

    /// Moves the store's cursor to what the target has committed durably.
    fn acknowledge(&mut self) -> Result<(), ApplyError> {
        // Answers of several connections come in any order; the commits themselves do not.
        let committed = self.writer.take_committed().filter(|committed| *committed > self.applied);
        committed.map_or(Ok(()), |committed| self.acknowledge_up_to(committed))
    }

    fn acknowledge_up_to(&mut self, committed: Lsn) -> Result<(), ApplyError> {
        self.applied = committed;
        self.early.settled(committed);
        self.progress_at = Instant::now();
        self.agent.acknowledge(committed)?;
        self.announce();
        Ok(())
    }

    fn announce(&mut self) {
        let now = PgTime::now();
        let (mut confirmed, mut groups) = (Vec::new(), 0);
        while let Some((_, group)) = self.awaiting.pop_front_if(|(to, _)| *to <= self.applied) {
            groups += u64::from(!group.is_empty());
            confirmed.extend(group);
        }
        let (applied, consistent) = (self.applied, self.applied >= self.consistent_at);
        let changes = self.writer.changes() + self.early_changes - self.changes_announced;
        let mut tracer = None;
        while let Some(token) = self.tracers.pop_front_if(|token| token.position <= applied) {
            tracer = Some(AppliedTransaction { source: token, applied_at: now });
        }
        let newest = confirmed.last().map(|source: &SourceTransaction| AppliedTransaction {
            source: *source,
            applied_at: now,
        });
        let awaited = self.awaiting.iter().find_map(|(_, group)| group.first());
        let oldest_pending = awaited.or(self.in_group.first()).copied();
        self.changes_announced += changes;
        self.agent.set_status(|status| {
            status.phase = if consistent { Phase::Streaming } else { Phase::CatchingUp };
            status.applied = Applied(applied);
            status.transactions += confirmed.len() as u64;
            status.target_commits += groups;
            status.changes += changes;
            status.tracer = tracer.or(status.tracer);
            status.oldest_pending = oldest_pending;
            if oldest_pending.is_none() {
                status.caught_up_at = Some(now);
            }
            status.error = None;
            for source in &confirmed {
                let lag = now.micros_since(source.commit_time);
                status.lag.record(u64::try_from(lag).unwrap_or(0));
            }
            status.newest = newest.or(status.newest);
        });
    }
}

/// What the scheduler is told of a transaction, and what it is made of.
pub(crate) struct Facts {
    /// Bytes of the body; not known of a spill.
    pub bytes: Option<u64>,
    /// It stands alone, because of the locks that it takes or because it is in a spill.
    pub barrier: bool,
}

/// Waits for the answer to a question that was asked.
async fn answered(question: &mut Option<Question>) {
    match question {
        Some(question) => question.answered().await,
        None => std::future::pending().await,
    }
}

/// A transaction as an input of the scheduler.
pub(crate) fn input_of(header: &Header, body: &Body, behind: bool) -> (Input, Facts) {
    let mut tables = Tables::default();
    let facts = match body {
        Body::Inline(bytes) => {
            let mut truncates = false;
            for command in commands(bytes).map_while(Result::ok) {
                match changed_relation(command) {
                    Some(relation) => tables.add(relation),
                    // Rolled back or not.
                    None => truncates |= command.first() == Some(&b'T'),
                }
            }
            Facts { bytes: Some(bytes.len() as u64), barrier: truncates }
        }
        Body::Spilled(_) => Facts { bytes: None, barrier: true },
    };
    let input = Input::Transaction {
        commands: header.commands,
        // Unknown, and large.
        bytes: facts.bytes.unwrap_or(u64::MAX),
        behind,
        barrier: facts.barrier,
        tables,
    };
    (input, facts)
}
