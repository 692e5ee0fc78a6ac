//! Connections that groups take turns on.
//!
//! A group's statements run on one connection. While it is worked on, the next group's may run on
//! another: commits go out in the order of the log all the same, each after the one before it is
//! confirmed, so readers see prefixes only. Changes of one row never run side by side
//! ([`Lanes::is_touched`]), nor does anything that is not a batch.
//!
//! What else could be in the way (a unique key that moved from one row to another, somebody else's
//! locks) is left to the target to notice. A later group that is refused, or that an earlier one
//! waits for, is given up with everything that is not committed, and applied again with nothing
//! beside it ([`PipelineError::Met`]).

use crate::postgres::pipeline::{Expect, Pipeline, PipelineError};
use crate::postgres::progress::{ADVANCE, ADVANCE_TYPES};
use crate::postgres::session::Session;
use farshore_fault as fault;
use farshore_model::{DictionaryId, Lsn};
use farshore_pg::{CancelToken, Config, Connection, Mode};
use farshore_wire::frontend::Format;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// While an earlier group is waited for, it is looked this often whether it waits for a later one.
const LOOK_EVERY: Duration = Duration::from_secs(1);

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

/// Ends what the target is at.
pub type CancelTokens = Arc<Mutex<Vec<CancelToken>>>;

/// How connections beside the first one are made.
#[derive(Clone, Debug)]
pub struct LaneSettings {
    /// Subscription.
    pub subscription: String,
    /// The target database.
    pub target: Config,
    /// Connections at most, 1 or more.
    pub streams: usize,
    /// Up to here only one is used.
    pub alone_until: Lsn,
    /// Where each connection leaves its token.
    pub cancel: CancelTokens,
}

/// Keys of one table that a group keeps apart; with more, it meets everything in that table.
const KEYS_MAX: usize = 100_000;

/// Rows that a group changes, by the hashes of their keys.
#[derive(Debug, Default)]
struct Touched {
    tables: HashMap<u32, Keys>,
}

#[derive(Debug)]
enum Keys {
    /// Of one version of the table's definition.
    Of(DictionaryId, HashSet<u64>),
    /// Too many to keep, or of versions whose keys cannot be compared.
    All,
}

impl Touched {
    /// Adds rows of a table, as one version of its definition has it.
    fn add(&mut self, table: u32, relation: DictionaryId, keys: impl Iterator<Item = u64>) {
        let known = self.tables.entry(table).or_insert(Keys::Of(relation, HashSet::new()));
        match known {
            Keys::Of(version, hashes) if *version == relation => {
                hashes.extend(keys);
                if hashes.len() > KEYS_MAX {
                    *known = Keys::All;
                }
            }
            Keys::Of(..) => *known = Keys::All,
            Keys::All => {}
        }
    }

    /// Whether this row is among those here, as far as single rows are told apart.
    fn has(&self, table: u32, key: u64) -> bool {
        match self.tables.get(&table) {
            Some(Keys::Of(_, hashes)) => hashes.contains(&key),
            Some(Keys::All) | None => false,
        }
    }

    /// Whether rows of this version of the table cannot be told from those here.
    fn has_all(&self, table: u32, relation: DictionaryId) -> bool {
        match self.tables.get(&table) {
            None => false,
            Some(Keys::Of(version, _)) => *version != relation,
            Some(Keys::All) => true,
        }
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
}

/// A group that is complete and not committed.
#[derive(Debug)]
struct Closing {
    lane: usize,
    from: Lsn,
    to: Lsn,
    state: &'static str,
    stage: Stage,
    group: Open,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// For the groups before it.
    Waits,
    /// Its progress was sent after its statements; once all is answered it is committed.
    Ends,
    /// Its COMMIT was sent.
    Commits,
}

/// The connections of one subscription.
pub struct Lanes {
    settings: LaneSettings,
    pipelines: Vec<Pipeline>,
    /// The target's processes at their other ends.
    pids: Vec<String>,
    /// The open group's, once that has begun.
    current: usize,
    open: Open,
    closing: VecDeque<Closing>,
    /// Foreign keys fire for what we write.
    foreign_keys_fire: bool,
    held_up: HeldUp,
}

/// What looks at an earlier group that is waited for have found, one after the other.
#[derive(Debug, Default)]
struct HeldUp {
    /// It waits for a later one.
    by_ours: u32,
    /// It waits for anybody, or nobody could be asked.
    at_all: u32,
}

/// Locks of a moment look like a circle too; those are gone at the next look.
const LOOKS_AT_A_CIRCLE: u32 = 2;
/// A circle may close where no server can see it: in another subscription that commits in order
/// too, or in an application.
const LOOKS_AT_ANY_LOCK: u32 = 5;

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
        let (prepared, pids) = match prepare(&mut first).await {
            Ok(pid) => (Ok(()), vec![pid]),
            Err(error) => (Err(error), Vec::new()),
        };
        // In another connection a parent that is not committed is no parent.
        let streams = if foreign_keys_fire { 1 } else { settings.streams.max(1) };
        let lanes = Lanes {
            settings: LaneSettings { streams, ..settings },
            pipelines: vec![first],
            pids,
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
        self.open.overlaps = !self.closing.is_empty();
        Ok(())
    }

    async fn take_lane(&mut self, position: Lsn) -> Result<(), PipelineError> {
        if position <= self.settings.alone_until {
            self.finish().await?;
        }
        while self.closing.iter().any(|closing| closing.lane == self.current) {
            let is_free = |lane: &usize| self.closing.iter().all(|c| c.lane != *lane);
            if let Some(free) = (0..self.pipelines.len()).find(is_free) {
                self.current = free;
            } else if self.pipelines.len() < self.settings.streams {
                self.add_lane().await;
            } else {
                self.finish_first().await?;
            }
        }
        self.current().forget_stale()
    }

    /// One more connection, or the decision to do without.
    async fn add_lane(&mut self) {
        match self.connect().await {
            Ok((pipeline, pid)) => {
                self.pipelines.push(pipeline);
                self.pids.push(pid);
            }
            Err(error) => {
                self.settings.streams = self.pipelines.len();
                tracing::info!(
                    subscription = %self.settings.subscription,
                    "goes on with {} of its connections to the target: {error}",
                    self.settings.streams
                );
            }
        }
    }

    async fn connect(&self) -> Result<(Pipeline, String), String> {
        let LaneSettings { subscription, target, cancel, .. } = &self.settings;
        let application = format!("farshore {subscription}");
        let session = Session::connect(target, &application).await;
        let mut session = session.map_err(|error| error.to_string())?;
        let token = session.connection.cancel_token();
        cancel.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(token);
        if session.replica_role == self.foreign_keys_fire {
            return Err("session_replication_role can be set on some of them only".to_owned());
        }
        if !session.join_lanes(subscription).await.map_err(|error| error.to_string())? {
            return Err("another agent waits for this one to end".to_owned());
        }
        let mut pipeline = Pipeline::new(session);
        match prepare(&mut pipeline).await {
            Ok(pid) => Ok((pipeline, pid)),
            Err(error) => Err(format!("{error:?}")),
        }
    }

    /// Closes the connections beside the first. Nothing is open or closing.
    pub async fn close_spares(&mut self) {
        self.current = 0;
        self.pids.truncate(1);
        for spare in self.pipelines.drain(1..) {
            spare.close().await;
        }
    }

    /// Whether there are connections beside the first.
    pub fn has_spares(&self) -> bool {
        self.pipelines.len() > 1
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
        if self.settings.streams > 1 {
            let is_in_the_way = |closing: &Closing| {
                closing.group.exclusive || closing.group.touched.has_all(table, relation)
            };
            if self.closing.iter().any(is_in_the_way) {
                self.finish().await?;
            }
            self.open.touched.add(table, relation, keys);
        }
        Ok(())
    }

    /// Whether a group before the open one, not yet committed, changes this row too: then it is
    /// not to be sent before [`Lanes::finish`].
    pub fn is_touched(&self, table: u32, key: u64) -> bool {
        self.closing.iter().any(|closing| closing.group.touched.has(table, key))
            && !fault::defect("missed-conflict")
    }

    /// Waits for all before the open group, and lets none after it run beside it.
    pub async fn be_alone(&mut self) -> Result<(), PipelineError> {
        self.open.exclusive = true;
        self.finish().await
    }

    /// Closes the open group: it is committed when everything has been answered as it should be
    /// and its turn has come, by [`Lanes::finish`] or [`Lanes::poll`].
    pub async fn close(
        &mut self,
        from: Lsn,
        to: Lsn,
        state: &'static str,
    ) -> Result<(), PipelineError> {
        let group = std::mem::take(&mut self.open);
        let (lane, stage) = (self.current, Stage::Waits);
        self.closing.push_back(Closing { lane, from, to, state, stage, group });
        if self.closing.len() > 1 {
            self.write().await?;
            return self.poll().await;
        }
        // Its turn is now: what is left of it goes out with its progress.
        self.step(false).await?;
        self.write().await
    }

    /// Writes the open group's messages, and sees to those before it meanwhile: the target may
    /// take no more before they are committed.
    pub async fn write(&mut self) -> Result<(), PipelineError> {
        loop {
            let front = self.closing.front().map(|closing| closing.lane);
            let Some(front) = front.filter(|front| *front != self.current) else {
                return self.current().send().await;
            };
            let Ok([current, front]) = self.pipelines.get_disjoint_mut([self.current, front])
            else {
                return Ok(());
            };
            tokio::select! {
                biased;
                written = current.send() => return written,
                answered = front.next_answer() => answered?,
                () = tokio::time::sleep(LOOK_EVERY) => self.check_for_a_circle().await?,
            }
            self.poll().await?;
        }
    }

    /// Takes the answers that are here, and moves closed groups on.
    pub async fn poll(&mut self) -> Result<(), PipelineError> {
        while let Some(closing) = self.closing.front() {
            let is_answered = self.pipelines[closing.lane].poll()?;
            if !self.step(is_answered).await? {
                break;
            }
        }
        Ok(())
    }

    /// Waits until all closed groups are on their way: with one connection that is when the
    /// COMMIT is sent, with more when it is confirmed.
    pub async fn finish(&mut self) -> Result<(), PipelineError> {
        while !self.closing.is_empty() {
            self.finish_first().await?;
        }
        Ok(())
    }

    async fn finish_first(&mut self) -> Result<(), PipelineError> {
        let left = self.closing.len();
        while self.closing.len() == left
            && let Some(closing) = self.closing.front()
        {
            let pipeline = &mut self.pipelines[closing.lane];
            match tokio::time::timeout(LOOK_EVERY, pipeline.drain()).await {
                Ok(drained) => {
                    drained?;
                    self.held_up = HeldUp::default();
                }
                Err(_) => {
                    self.check_for_a_circle().await?;
                    continue;
                }
            }
            while self.closing.len() == left && self.step(true).await? {
                let answered = self.closing.front().map(|c| self.pipelines[c.lane].is_answered());
                if answered != Some(true) {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Moves the first closed group on; false when it waits for answers.
    async fn step(&mut self, is_answered: bool) -> Result<bool, PipelineError> {
        let Some(closing) = self.closing.front_mut() else { return Ok(false) };
        if is_answered {
            self.held_up = HeldUp::default();
        }
        let pipeline = &mut self.pipelines[closing.lane];
        match closing.stage {
            Stage::Waits => {
                let (from, to) = (closing.from.to_string(), closing.to.to_string());
                let name = &self.settings.subscription;
                pipeline.run(PROGRESS, 4, Expect::Progress, |bind| {
                    for text in [name.as_str(), &from, &to, closing.state] {
                        bind.parameter(Format::Text, Some(text.as_bytes()))?;
                    }
                    Ok(())
                })?;
                // Written by whoever looks for the answers.
                pipeline.ask_for_answers();
                closing.stage = Stage::Ends;
                Ok(true)
            }
            Stage::Ends if is_answered => {
                send_commit(pipeline, closing.to, closing.group.has_batches).await?;
                closing.stage = Stage::Commits;
                // What follows on the same connection follows the COMMIT too. Behind a batch the
                // next group is to have a connection of its own; and one that is on another
                // connection already must see this one confirmed before it writes its progress.
                let (is_batch, lane) = (closing.group.has_batches, closing.lane);
                let stays_on_it = self.closing.len() == 1 && self.current == lane;
                if self.settings.streams == 1 || (!is_batch && stays_on_it) {
                    self.closing.pop_front();
                }
                Ok(true)
            }
            Stage::Commits if is_answered => {
                self.closing.pop_front();
                Ok(true)
            }
            Stage::Ends | Stage::Commits => Ok(false),
        }
    }

    /// An earlier group that waits for a lock of a later one would wait forever: the later one
    /// waits for it, and the target cannot know.
    async fn check_for_a_circle(&mut self) -> Result<(), PipelineError> {
        let Some(first) = self.closing.front() else { return Ok(()) };
        let pid = |lane: usize| self.pids.get(lane).map_or("", String::as_str);
        let mut later: Vec<&str> = self.closing.iter().skip(1).map(|c| pid(c.lane)).collect();
        if self.open.begun {
            later.push(pid(self.current));
        }
        if later.is_empty() {
            return Ok(());
        }
        match self.blockers(pid(first.lane), &later).await {
            Some(Blockers { any: false, .. }) => self.held_up = HeldUp::default(),
            Some(Blockers { ours, .. }) => {
                self.held_up.at_all += 1;
                self.held_up.by_ours = if ours { self.held_up.by_ours + 1 } else { 0 };
            }
            None => self.held_up.at_all += 1,
        }
        let HeldUp { by_ours, at_all } = self.held_up;
        if by_ours >= LOOKS_AT_A_CIRCLE || at_all >= LOOKS_AT_ANY_LOCK {
            let what = "an earlier group waits for a lock".to_owned();
            return Err(PipelineError::Met(what));
        }
        Ok(())
    }

    /// Who keeps process `first` waiting; `None` if that could not be found out. Asked on a
    /// connection of its own.
    async fn blockers(&self, first: &str, later: &[&str]) -> Option<Blockers> {
        let waiting = "WITH RECURSIVE w (pid) AS ( \
             SELECT pg_catalog.unnest(pg_catalog.pg_blocking_pids($1::text::int)) UNION \
             SELECT pg_catalog.unnest(pg_catalog.pg_blocking_pids(w.pid)) FROM w) \
             SELECT pg_catalog.count(*), pg_catalog.count(*) \
               FILTER (WHERE pid::text = ANY ($2::text::text[])) FROM w";
        let later = format!("{{{}}}", later.join(","));
        let application = format!("farshore {} looks for locks", self.settings.subscription);
        let target = self.settings.target.clone().with_application_name(&application);
        let asked = async {
            let mut connection = Connection::connect(&target, Mode::Sql).await.ok()?;
            let found = connection.query(waiting, &[Some(first), Some(&later)]).await.ok();
            connection.close().await;
            let row = found?.into_iter().next()?;
            let is_some = |column| row.get(column).is_some_and(|count| count != "0");
            Some(Blockers { any: is_some(0), ours: is_some(1) })
        };
        tokio::time::timeout(LOOK_EVERY, asked).await.ok().flatten()
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

/// Who keeps a process waiting.
struct Blockers {
    any: bool,
    /// Later groups are among them, or behind them.
    ours: bool,
}

/// What every connection needs. Returns the target's process (a pooler tells another one at
/// first).
async fn prepare(pipeline: &mut Pipeline) -> Result<String, PipelineError> {
    let connection = &mut pipeline.idle_session().await?.connection;
    connection.simple_query(PLANNING).await?;
    let rows = connection.query("SELECT pg_catalog.pg_backend_pid()", &[]).await?;
    let pid = rows.first().and_then(|row| row.get(0)).unwrap_or_default().to_owned();
    // Progress is moved by who sees what the group before has committed.
    pipeline.parse(BEGIN, "BEGIN ISOLATION LEVEL READ COMMITTED", &[], None)?;
    pipeline.parse(COMMIT, "COMMIT", &[], None)?;
    pipeline.parse(DEFER, "SET CONSTRAINTS ALL DEFERRED", &[], None)?;
    pipeline.parse(PROGRESS, ADVANCE, &ADVANCE_TYPES, None)?;
    pipeline.sync();
    pipeline.drain().await?;
    Ok(pid)
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
