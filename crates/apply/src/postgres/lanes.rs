//! Connections that groups take turns on.
//!
//! A group's statements run on one connection. While it is worked on, the next group's may run on
//! another: commits happen in the order of the log all the same, so readers see prefixes only.
//! Changes of one row never run side by side ([`Lanes::is_touched`]), nor does anything that is not
//! a batch.
//!
//! Where no batch is part of a group, and its statements fail on the target if anything is wrong
//! with them ([`Pipeline::must_be_answered`]), its end goes out together with them.
//!
//! The order is kept by the target itself, so that no group waits the round trip of the one before
//! it. A batch's transaction begins by taking a lock of its own, its *fence*. When all its
//! statements are answered as they should be, and those of the groups before it too, its end goes
//! out in one piece:
//!
//! ```text
//! AWAIT     the fence of the group before: held until that one is committed or rolled back
//! PROGRESS  from where that one left it; an error, and with it no COMMIT, if it is not there
//! COMMIT
//! ```
//!
//! What else could be in the way (a unique key that moved from one row to another, somebody else's
//! locks) is left to the target to notice. A later group that is refused, or that an earlier one
//! waits for, is given up with everything that is not committed, and applied again with nothing
//! beside it ([`PipelineError::Met`]).

mod circle;
mod connect;
mod touched;

use crate::netting::Net;
use crate::postgres::batch::{TableReferences, Ties};
use crate::postgres::pipeline::{Expect, Pipeline, PipelineError};
use crate::postgres::progress::{ProgressStep, newest_text};
use crate::postgres::target_table::{Seen, as_seen};
use circle::HeldUp;
pub(crate) use connect::join;
use connect::{Lane, connect, is_far, prepare};
use farshore_fault as fault;
use farshore_model::{DictionaryId, Lsn};
use farshore_pg::{CancelToken, Config};
use farshore_wire::frontend::Format;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;
use tokio::task::JoinSet;
use touched::Touched;

/// While an earlier group is waited for, it is looked this often whether it waits for a later one.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Bytes that may wait to be written, for each connection, to a target that is far: what keeps them
/// all busy while the next group is made. (One that is near takes them at once.)
const UNWRITTEN_FAR_EACH: usize = 8 << 20;

const BEGIN: &str = "farshore_begin";
/// Where foreign keys fire: those that can wait are checked at the commit, where the target is as
/// the publisher was at a commit.
const DEFER: &str = "farshore_defer";
const COMMIT: &str = "farshore_commit";
const PROGRESS: &str = "farshore_progress";
const FENCE: &str = "farshore_fence";
const AWAIT: &str = "farshore_await";
const LOOK_AGAIN: &str = "farshore_unaltered";

/// Ends what the target is at.
pub type CancelTokens = Arc<Mutex<Vec<CancelToken>>>;

/// A session has ended: nothing of it is to be cancelled any more.
pub(crate) fn withdraw(tokens: &CancelTokens, token: &CancelToken) {
    let mut tokens = tokens.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    tokens.retain(|other| !other.is_same(token));
}

/// How connections beside the first one are made.
#[derive(Clone, Debug)]
pub struct LaneSettings {
    /// Subscription.
    pub subscription: String,
    /// The target database.
    pub target: Config,
    /// Connections at most.
    pub streams: Streams,
    /// Up to here only one is used.
    pub alone_until: Lsn,
    /// Where each connection leaves its token.
    pub cancel: CancelTokens,
    /// Progress keeps the newest transaction.
    pub keeps_newest: bool,
}

/// Connections at most, 1 or more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Streams {
    /// To a target that is near.
    pub near: usize,
    /// To one whose answers take 5 ms or more.
    pub far: usize,
}

impl Streams {
    /// As many wherever the target is.
    pub fn fixed(streams: usize) -> Streams {
        Streams { near: streams, far: streams }
    }
}

/// The group that is being filled.
#[derive(Debug, Default)]
struct Open {
    /// BEGIN has been sent.
    begun: bool,
    /// Statements of batches are part of it.
    has_batches: bool,
    /// Something of it was sent while groups before it were not committed.
    overlaps: bool,
    /// It has changes that do not stand in batches.
    exclusive: bool,
    touched: Touched,
    /// Of the foreign keys that fire.
    ties: Ties,
    /// Its first position: it names the group.
    first: Lsn,
    /// The statement that takes its fence was sent.
    fenced: bool,
}

/// A group that is complete and not committed.
#[derive(Debug)]
struct Closing {
    lane: usize,
    step: ProgressStep,
    stage: Stage,
    group: Open,
    /// Its end was sent while the group before it was not confirmed.
    awaits: bool,
    /// Its end goes out with its statements: if one of them fails, the target passes over it.
    at_once: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// For answers to its statements, and for the ends of the groups before it.
    Waits,
    /// Its end was sent.
    Ends,
}

/// How far a closed group was moved on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// Not at all.
    Waits,
    /// Its end was sent, now or before.
    Ends,
    /// It is done with.
    Done,
}

/// The connections of one subscription.
pub struct Lanes {
    settings: LaneSettings,
    /// Connections at most.
    streams: usize,
    /// What bounds a connection is the line, not the target, so there are more of them.
    is_far: bool,
    pipelines: Vec<Pipeline>,
    /// The target's processes at their other ends.
    pids: Vec<String>,
    /// Connections that are being made.
    connecting: JoinSet<Result<Lane, String>>,
    /// The open group's, once that has begun.
    current: usize,
    open: Open,
    closing: VecDeque<Closing>,
    /// Foreign keys fire for what we write.
    foreign_keys_fire: bool,
    held_up: HeldUp,
}

impl Lanes {
    /// Starts with the session that holds the subscription's lock.
    ///
    /// # Errors
    /// The target's.
    pub async fn new(
        settings: LaneSettings,
        mut first: Pipeline,
        foreign_keys_fire: bool,
    ) -> Result<Lanes, (Lanes, PipelineError)> {
        let pids = vec![first.session().pid.clone()];
        let (prepared, is_far) = match is_far(&mut first).await {
            Ok(is_far) => (prepare(&mut first, &settings), is_far),
            Err(error) => (Err(error), false),
        };
        let streams = match settings.streams {
            Streams { far, .. } if is_far => far.max(1),
            Streams { near, .. } => near.max(1),
        };
        let lanes = Lanes {
            settings,
            streams,
            is_far,
            pipelines: vec![first],
            pids,
            connecting: JoinSet::new(),
            current: 0,
            open: Open::default(),
            closing: VecDeque::new(),
            foreign_keys_fire,
            held_up: HeldUp::default(),
        };
        match prepared {
            Ok(()) => Ok(lanes),
            Err(error) => Err((lanes, error)),
        }
    }

    /// The open group's connection. Before it has begun: a connection for questions, once nothing
    /// is closing.
    pub fn current(&mut self) -> &mut Pipeline {
        &mut self.pipelines[self.current]
    }

    /// Sends, behind the open group's changes, the question whether tables are as they were seen:
    /// by OID, their stamps and names.
    pub fn ask_unaltered(&mut self, seen: &Seen) -> Result<(), PipelineError> {
        let lists = as_seen(seen);
        self.current().run(LOOK_AGAIN, lists.len(), Expect::Unaltered, |bind| {
            lists.iter().try_for_each(|list| bind.parameter(Format::Text, Some(list.as_bytes())))
        })
    }

    /// Whether the target's answers took 5 ms or more when it was connected.
    pub fn is_far(&self) -> bool {
        self.is_far
    }

    /// There is much to come: to a target that is far the other connections are made now, while what
    /// is needed for the first group is still asked for.
    pub fn expect_much(&mut self) {
        if self.is_far {
            self.connect_more();
        }
    }

    /// Whether groups may run side by side.
    pub fn are_many(&self) -> bool {
        self.streams > 1
    }

    /// For messages.
    pub fn first(&self) -> &Pipeline {
        &self.pipelines[0]
    }

    /// Whether what goes wrong may be due to groups having run side by side.
    pub fn is_overlapping(&self) -> bool {
        self.open.overlaps || self.closing.iter().any(|closing| closing.group.overlaps)
    }

    /// Sends BEGIN for the open group unless that was done. `position` is its first.
    pub async fn begin(&mut self, position: Lsn) -> Result<(), PipelineError> {
        if self.open.begun {
            return Ok(());
        }
        self.poll().await?;
        self.take_lane(position).await?;
        let statements: &[&str] = if self.foreign_keys_fire { &[BEGIN, DEFER] } else { &[BEGIN] };
        for statement in statements {
            self.current().run(statement, 0, Expect::Done, |_| Ok(()))?;
        }
        self.open.begun = true;
        self.open.first = position;
        self.open.overlaps = !self.closing.is_empty();
        Ok(())
    }

    /// Makes a connection the current one that no closed group is on; or, to a target that is far,
    /// one on which only the answers to what ends its groups are to come: what is sent behind that
    /// does not wait for them.
    async fn take_lane(&mut self, position: Lsn) -> Result<(), PipelineError> {
        if position <= self.settings.alone_until {
            self.finish().await?;
        }
        while self.closing.iter().any(|closing| closing.lane == self.current) {
            let is_free = |lane: &usize| self.closing.iter().all(|c| c.lane != *lane);
            let free = (0..self.pipelines.len()).find(is_free);
            if let Some(free) = free.or_else(|| self.lane_that_ends()) {
                self.current = free;
                break;
            }
            self.connect_more();
            // Whichever comes first: one more connection, or one that is free.
            let mut connecting = std::mem::take(&mut self.connecting);
            let moved = tokio::select! {
                biased;
                Some(lane) = connecting.join_next() => {
                    self.connecting = connecting;
                    self.add_lane(lane.unwrap_or_else(|error| Err(error.to_string())));
                    continue;
                }
                moved = self.advance() => moved,
            };
            self.connecting = connecting;
            moved?;
            self.poll().await?;
        }
        self.current().forget_stale()
    }

    /// The lane that was told longest ago to commit what is on it, if the target is far.
    fn lane_that_ends(&self) -> Option<usize> {
        let ends = |lane: &usize| {
            let mut on_it = self.closing.iter().filter(|closing| closing.lane == *lane);
            on_it.all(|closing| closing.stage == Stage::Ends)
        };
        self.closing.iter().map(|closing| closing.lane).filter(|_| self.is_far).find(ends)
    }

    /// Begins to make connections: to a target that is far all of them, since each takes as long
    /// as the first.
    fn connect_more(&mut self) {
        let most = if self.is_far { self.streams } else { self.pipelines.len() + 1 };
        while self.pipelines.len() + self.connecting.len() < most.min(self.streams) {
            self.connecting.spawn(connect(self.settings.clone(), self.foreign_keys_fire));
        }
    }

    /// One more connection, or the decision to do without.
    fn add_lane(&mut self, lane: Result<Lane, String>) {
        match lane {
            Ok(Lane { pipeline, pid }) => {
                self.pipelines.push(pipeline);
                self.pids.push(pid);
            }
            Err(error) => {
                self.streams = self.pipelines.len() + self.connecting.len();
                tracing::info!(
                    subscription = %self.settings.subscription,
                    "goes on with {} of its connections to the target: {error}",
                    self.streams
                );
            }
        }
    }

    /// Closes the connections beside the first. Nothing is open or closing.
    pub async fn close_spares(&mut self) {
        self.current = 0;
        let mut connecting = std::mem::take(&mut self.connecting);
        // Made, and never needed.
        while let Some(made) = connecting.try_join_next() {
            if let Ok(Ok(Lane { pipeline, pid })) = made {
                self.pipelines.push(pipeline);
                self.pids.push(pid);
            }
        }
        drop(connecting);
        self.pids.truncate(1);
        for mut spare in self.pipelines.drain(1..) {
            withdraw(&self.settings.cancel, &spare.session().connection.cancel_token());
            spare.close().await;
        }
    }

    /// Closes all connections. Nothing is open or closing.
    pub async fn close_all(mut self) {
        self.close_spares().await;
        for pipeline in self.pipelines {
            pipeline.close().await;
        }
    }

    /// Whether there are connections beside the first.
    pub fn has_spares(&self) -> bool {
        self.pipelines.len() > 1 || !self.connecting.is_empty()
    }

    /// Notes that the open group changes these rows, before any of them is sent. Waits for groups
    /// before it where single rows cannot be told apart.
    pub async fn touch(
        &mut self,
        table: u32,
        relation: DictionaryId,
        keys: impl Iterator<Item = u64>,
    ) -> Result<(), PipelineError> {
        self.open.has_batches = true;
        if self.streams > 1 {
            if self.is_far {
                self.connect_more();
            }
            let is_in_the_way = |closing: &Closing| {
                closing.group.exclusive || closing.group.touched.has_all(table, relation)
            };
            if self.closing.iter().any(is_in_the_way) {
                self.finish().await?;
            }
            self.open.touched.add(table, relation, keys);
            if !self.open.fenced {
                self.open.fenced = true;
                let key = self.fence_key(self.open.first);
                self.current().run(FENCE, 1, Expect::Done, |bind| {
                    bind.parameter(Format::Text, Some(key.as_bytes()))
                })?;
            }
        }
        Ok(())
    }

    /// Whether a group before the open one, not yet committed, changes this row too: then it is
    /// not to be sent before [`Lanes::finish`].
    pub fn is_touched(&self, table: u32, key: u64) -> bool {
        self.closing.iter().any(|closing| closing.group.touched.has(table, key))
            && !fault::defect("missed-conflict")
    }

    /// Notes what a net change in the table of `references` does to rows that foreign keys tie
    /// together.
    pub fn tie(&mut self, references: &TableReferences, net: &Net) {
        if self.streams > 1 {
            references.add(net, &mut self.open.ties);
        }
    }

    /// Whether foreign keys let the net change come only after a group before the open one, which
    /// is not committed yet: then it is not to be sent before [`Lanes::finish`].
    pub fn is_tied(&self, references: &TableReferences, net: &Net) -> bool {
        let acts = references.acts(net);
        self.streams > 1
            && self.closing.iter().any(|before| acts || references.needs(net, &before.group.ties))
            && !fault::defect("missed-parent")
    }

    /// Waits for all before the open group, and lets none after it run beside it.
    pub async fn be_alone(&mut self) -> Result<(), PipelineError> {
        self.open.exclusive = true;
        self.finish().await
    }

    /// Closes the open group. Its end is sent here if no answer has to be looked at before, and else
    /// when everything has been answered as it should be and its turn has come, by
    /// [`Lanes::finish`] or [`Lanes::poll`].
    pub async fn close(&mut self, step: ProgressStep) -> Result<(), PipelineError> {
        let group = std::mem::take(&mut self.open);
        let at_once =
            self.closing.is_empty() && !group.has_batches && !self.current().must_be_answered();
        let (lane, stage, awaits) = (self.current, Stage::Waits, false);
        self.closing.push_back(Closing { lane, step, stage, group, awaits, at_once });
        if !at_once {
            self.current().ask_for_answers();
            self.write().await?;
        }
        self.poll().await
    }

    /// Writes the open group's messages, or to a target that is far lets some of them wait, and
    /// sees to those before it meanwhile: the target may take no more before they are committed.
    pub async fn write(&mut self) -> Result<(), PipelineError> {
        let unwritten_max = if self.is_far { UNWRITTEN_FAR_EACH * self.streams } else { 0 };
        loop {
            let unwritten = self.pipelines.iter_mut().map(Pipeline::write_available).sum::<usize>();
            if unwritten <= unwritten_max {
                return Ok(());
            }
            self.advance().await?;
            self.poll().await?;
        }
    }

    /// Waits until something was written or answered on one of the connections. When nothing is
    /// for a while, looks whether groups wait for each other.
    async fn advance(&mut self) -> Result<(), PipelineError> {
        let busy = self.pipelines.iter_mut().enumerate().filter_map(|(lane, pipeline)| {
            pipeline.is_busy().then(|| (lane, Box::pin(pipeline.exchange())))
        });
        let mut exchanges: Vec<_> = busy.collect();
        let any = poll_fn(|cx| {
            for (lane, exchange) in &mut exchanges {
                if let Poll::Ready(exchanged) = exchange.as_mut().poll(cx) {
                    return Poll::Ready((*lane, exchanged));
                }
            }
            Poll::Pending
        });
        let moved = tokio::time::timeout(LOOK_EVERY, any).await;
        drop(exchanges);
        match moved {
            Ok((_, Ok(()))) => Ok(()),
            Ok((lane, Err(error))) => Err(self.blame(lane, error)),
            Err(_) => self.check_for_a_circle().await,
        }
    }

    /// What an error of a lane comes from.
    fn blame(&self, lane: usize, error: PipelineError) -> PipelineError {
        let awaits = self.closing.iter().any(|closing| closing.lane == lane && closing.awaits);
        match error {
            // It went with the group that it waited for. What is wrong is found there, or when it
            // is applied again.
            PipelineError::ProgressMoved if awaits => {
                PipelineError::Met("the group before it was not committed".to_owned())
            }
            error => error,
        }
    }

    /// Takes the answers that are here, and moves closed groups on.
    pub async fn poll(&mut self) -> Result<(), PipelineError> {
        let mut index = 0;
        while let Some(closing) = self.closing.get(index) {
            let (lane, stage, to) = (closing.lane, closing.stage, closing.step.to);
            let at_once = closing.at_once && stage == Stage::Waits;
            // What ends behind another is of no interest before that has ended.
            let is_answered = !at_once && (index == 0 || stage == Stage::Waits) && {
                let pipeline = &mut self.pipelines[lane];
                let answered = pipeline.poll();
                // Behind a COMMIT may be the next group.
                let is_committed = stage == Stage::Ends && pipeline.confirmed() >= to;
                answered.map_err(|error| self.blame(lane, error))? || is_committed
            };
            match self.step(index, is_answered || at_once).await? {
                Step::Waits if fault::defect("unordered-commits") => index += 1,
                Step::Waits => break,
                Step::Ends => index += 1,
                Step::Done => {}
            }
        }
        Ok(())
    }

    /// Waits until all closed groups are on their way: with one connection that is when the
    /// COMMIT is sent, with more when it is confirmed.
    pub async fn finish(&mut self) -> Result<(), PipelineError> {
        loop {
            self.poll().await?;
            if self.closing.is_empty() {
                return Ok(());
            }
            self.advance().await?;
        }
    }

    /// Moves a closed group on, if all of its lane's statements that have to be `is_answered`.
    async fn step(&mut self, index: usize, is_answered: bool) -> Result<Step, PipelineError> {
        if is_answered && index == 0 {
            self.held_up = HeldUp::default();
        }
        let before = index.checked_sub(1).and_then(|before| self.closing.get(before));
        // Its fence is taken: it would not have been sent its end before that was answered.
        let behind = before.map(|before| {
            let may_be_awaited = before.stage == Stage::Ends && before.group.fenced;
            may_be_awaited.then(|| self.fence_key(before.group.first))
        });
        let Some(closing) = self.closing.get_mut(index) else { return Ok(Step::Waits) };
        match (closing.stage, behind) {
            (Stage::Ends, None) if is_answered => {
                self.closing.pop_front();
                Ok(Step::Done)
            }
            (Stage::Ends, _) => Ok(Step::Ends),
            (Stage::Waits, Some(None)) if !fault::defect("unordered-commits") => Ok(Step::Waits),
            (Stage::Waits, _) if !is_answered => Ok(Step::Waits),
            (Stage::Waits, behind) => {
                let fence = behind.flatten();
                closing.stage = Stage::Ends;
                closing.awaits = fence.is_some();
                let lane = closing.lane;
                let pipeline = &mut self.pipelines[lane];
                let sent = send_end(pipeline, &self.settings.subscription, closing, fence).await;
                if let Err(error) = sent {
                    return Err(self.blame(lane, error));
                }
                let Some(closing) = self.closing.get(index) else { return Ok(Step::Waits) };
                // What follows on the same connection follows the COMMIT too. Behind a batch the
                // next group is to have a connection of its own; and one that is on another
                // connection already must know this one's fence, or see it confirmed. So must one
                // that may come on another connection while the target has not taken this one's
                // locks yet.
                let (is_batch, lane) = (closing.group.has_batches, closing.lane);
                let stays_on_it = self.closing.len() == 1 && self.current == lane;
                if self.streams == 1 || (!is_batch && stays_on_it && !closing.at_once) {
                    self.closing.pop_front();
                    return Ok(Step::Done);
                }
                Ok(Step::Ends)
            }
        }
    }

    /// What the fence of the group that begins at `first` is called.
    fn fence_key(&self, first: Lsn) -> String {
        format!("farshore group {} {first}", self.settings.subscription)
    }

    /// Commits the open group as it is, without progress. Only for the defect that separates the
    /// two.
    pub async fn commit_without_progress(&mut self, to: Lsn) -> Result<(), PipelineError> {
        self.finish().await?;
        let group = std::mem::take(&mut self.open);
        let pipeline = self.current();
        pipeline.drain().await?;
        send_commit(pipeline, to, group.has_batches).await?;
        pipeline.drain().await
    }

    /// Waits until the target has answered everything.
    pub async fn drain(&mut self) -> Result<(), PipelineError> {
        self.finish().await?;
        self.current().drain().await?;
        // The first one holds the subscription's lock: it must notice when it is cut.
        if !self.open.begun {
            self.current = 0;
        }
        Ok(())
    }

    /// The newest commit that was answered since the last call.
    pub fn take_committed(&mut self) -> Option<Lsn> {
        self.pipelines.iter_mut().filter_map(Pipeline::take_committed).max()
    }

    /// A statement is used no more, on any connection.
    pub fn forget_statement(&mut self, name: &str) {
        for pipeline in &mut self.pipelines {
            pipeline.forget_later(name);
        }
    }
}

/// Sends what ends a group: behind the group of `fence`, if there is one.
async fn send_end(
    pipeline: &mut Pipeline,
    subscription: &str,
    closing: &Closing,
    fence: Option<String>,
) -> Result<(), PipelineError> {
    if let Some(fence) = fence {
        pipeline.run(AWAIT, 1, Expect::Done, |bind| {
            bind.parameter(Format::Text, Some(fence.as_bytes()))
        })?;
    }
    let ProgressStep { from, to, newest, state } = closing.step;
    let (from, to_text, newest) = (from.to_string(), to.to_string(), newest.map(newest_text));
    pipeline.run(PROGRESS, 5, Expect::Progress, |bind| {
        for text in
            [Some(subscription), Some(&from), Some(&to_text), Some(state), newest.as_deref()]
        {
            bind.parameter(Format::Text, text.map(str::as_bytes))?;
        }
        Ok(())
    })?;
    send_commit(pipeline, to, closing.group.has_batches).await
}

async fn send_commit(
    pipeline: &mut Pipeline,
    position: Lsn,
    batch: bool,
) -> Result<(), PipelineError> {
    fault::point("apply.before-commit");
    pipeline.run(COMMIT, 0, Expect::Commit { position, batch }, |_| Ok(()))?;
    pipeline.sync();
    pipeline.send().await?;
    fault::point("apply.after-commit-sent");
    Ok(())
}
