//! The agent of one subscription: copies what is not copied yet, then streams.

mod copy;
mod start;
mod unlogged;

use crate::careful::{Careful, CarefulSpan, Failure};
use crate::conflict::ConflictPolicy;
use crate::cut_offs::{CutOffs, Ending};
use crate::early::EarlySettings;
use crate::halts::Halts;
use crate::log_backoff::LogBackoff;
use crate::log_feed::LogFeed;
use crate::postgres::follow_ddl::FollowDdl;
use crate::postgres::initial_copy::{CopySettings, GIVE_WAY_FOR};
use crate::postgres::lanes::{CancelTokens, LaneSettings, Streams};
use crate::postgres::log_points::LogPoints;
use crate::postgres::pipeline::Pipeline;
use crate::postgres::progress::TableProgress;
use crate::postgres::schema::SchemaSettings;
use crate::postgres::sequences::Sequences;
use crate::postgres::session::{Session, application_name};
use crate::postgres::writer::{CopiedTables, Following, Writer};
use crate::row_by_row::RowByRow;
use crate::scheduler::{Batches, GroupLimits};
use crate::small_groups::SmallGroups;
use crate::status::SubscriptionStatus;
use crate::streaming::{StreamEnd, Streaming};
use crate::{ApplyError, FailedChange, Given};
use farshore_capture::publication::TableName;
use farshore_capture::source::Source;
use farshore_fault as fault;
use farshore_model::{Applied, Lsn};
use farshore_pg::Config;
use farshore_store::{LogStore, StoreError};
pub(crate) use start::{LOCK_WAIT, Start, joined, published};
use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::watch;

/// How long a stop waits for the open target transaction.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// How long a stop waits for the sequences to follow once more.
const SEQUENCES_AT_STOP: Duration = Duration::from_millis(1_500);

/// Where a target's first rows come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Initialise {
    /// The publisher's tables are copied.
    #[default]
    Copy,
    /// The target is restored from a backup ([`crate::backup`]).
    Backup,
}

/// What to apply, and to where.
#[derive(Clone, Debug)]
pub struct SubscriptionSpec {
    /// Subscription name, unique on the target database.
    pub name: String,
    /// `site/publication`.
    pub publication: String,
    /// The target database.
    pub target: Config,
    /// Where the first rows come from.
    pub initialise: Initialise,
    /// How the initial copy is done.
    pub copy: CopySettings,
    /// What tables are called on the target, and whether missing ones are made.
    pub schema: SchemaSettings,
    /// How often sequences follow while streaming; never when absent.
    pub sequence_interval: Option<Duration>,
    /// Bounds of one target transaction.
    pub limits: GroupLimits,
    /// What is done about changes that are at odds with the target.
    pub on_conflict: ConflictPolicy,
    /// What is done about columns that the publisher's tables gain.
    pub follow_ddl: FollowDdl,
    /// Connections to the target at most, side by side, while it is far behind.
    pub streams: Streams,
}

/// Carries one subscription from the store to its target until told to stop.
pub struct Subscription {
    /// What to apply.
    pub spec: SubscriptionSpec,
    /// Where the rows of the initial copy come from, and what else the publisher is asked.
    pub source: Arc<dyn Source>,
    /// Where the changes come from.
    pub store: Arc<dyn LogStore>,
    /// How far the target can have come.
    pub given: Arc<Given>,
    /// Counts capture's connections: from the first on a copy may begin, and each may have
    /// brought new tables into the publication.
    pub capture_ready: watch::Receiver<u64>,
    /// Where to say how it goes.
    pub status: Arc<Mutex<SubscriptionStatus>>,
    /// What is to be detached on the target, and was left for later.
    pub detaching: LogPoints,
    /// Tables with columns or labels that are others by now, until it is certain that the log does not
    /// tell.
    pub unlogged: LogPoints,
    /// Tables with columns or labels that are not noted, until the stream has come to them.
    pub noting: LogPoints,
    /// Where the stream is asked to rest while somebody looks at the target.
    pub halts: Halts,
}

/// How long a target is left alone that had no room for a group.
const NO_ROOM_PAUSE: Duration = Duration::from_millis(250);

/// How what failed before is applied this time.
pub(crate) struct Attempt {
    /// Where each transaction goes by itself.
    careful: Option<CarefulSpan>,
    tried_as_batch: Option<Lsn>,
    /// Where groups are smaller.
    small: SmallGroups,
    /// Where batches are not tried.
    row_by_row: RowByRow,
    /// Up to here groups do not run side by side.
    alone_until: Lsn,
    /// Where connections leave their tokens.
    cancel: CancelTokens,
}

impl SubscriptionSpec {
    /// What its connections are called on the target.
    pub fn application_name(&self) -> String {
        application_name(&self.name)
    }
}

/// Groups do not run side by side for so many bytes of the publisher's log after some were in each
/// other's way.
const ALONE_BYTES: u64 = 4 << 20;
const ALONE_DOUBLINGS_MAX: u32 = 14;

impl Subscription {
    /// Runs until `stop` turns true or something fails, at first on `session` if there is one
    /// already. A stop commits the open group, unless that takes long: then it is left to be done
    /// again.
    pub async fn run(
        &self,
        session: Option<Session>,
        stop: watch::Receiver<bool>,
    ) -> Result<(), ApplyError> {
        let cancel = CancelTokens::default();
        let mut stopping = stop.clone();
        let grace_over = async {
            let stopped = stopping.wait_for(|stop| *stop).await.is_ok();
            if stopped {
                tokio::time::sleep(STOP_GRACE).await;
            } else {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            result = self.work(session, stop, &cancel) => {
                self.nothing_waits();
                return result.map_err(|error| match error {
                    // Retention took it from under a reader that was slow.
                    ApplyError::Store(StoreError::Dropped { start, .. }) => self.gap(start),
                    error => error,
                });
            }
            () = grace_over => {}
            never = self.watch_for_holders() => match never {},
        }
        self.nothing_waits();
        // A statement that waits on the target would keep the connection, and with it the lock.
        self.cancel(&cancel).await;
        Ok(())
    }

    /// Ends what the target is at on these connections.
    async fn cancel(&self, cancel: &CancelTokens) {
        let tokens =
            std::mem::take(&mut *cancel.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        for token in tokens {
            if let Err(error) = token.cancel().await {
                tracing::debug!(subscription = %self.spec.name, %error, "not cancelled");
            }
        }
    }

    async fn work(
        &self,
        mut session: Option<Session>,
        mut stop: watch::Receiver<bool>,
        cancel: &CancelTokens,
    ) -> Result<(), ApplyError> {
        let mut careful = None;
        let mut small = SmallGroups::default();
        let mut row_by_row = RowByRow::default();
        let mut alone = LogBackoff::default();
        // A row found no partition; in which table.
        let (mut without_partition, mut no_place_in) = (None, None);
        let mut tried_as_batch = None;
        // What the publisher was asked about: once for where the target stands.
        let mut asked_about = HashSet::new();
        let (mut cut_offs, mut ending) = (CutOffs::default(), Ending::Nothing);
        loop {
            let mut stop_early = stop.clone();
            let table = no_place_in.as_deref();
            let started = tokio::select! {
                biased;
                _ = stop_early.wait_for(|stop| *stop) => return Ok(()),
                started = self.start(session.take(), &ending, table) => started,
            };
            let (session, start) = match started {
                Err(ApplyError::GaveWay(why)) => {
                    tracing::info!("{why}");
                    tokio::time::sleep(GIVE_WAY_FOR).await;
                    continue;
                }
                Err(ApplyError::LogBehind { point, what }) => {
                    self.copy_waits_for_log(what);
                    // What was copied beside the stream waits there: who streams lets go of the log.
                    if std::mem::take(&mut ending) != Ending::Nothing {
                        continue;
                    }
                    tokio::select! {
                        _ = stop_early.wait_for(|stop| *stop) => return Ok(()),
                        reached = self.log_reaches(point) => reached?,
                    }
                    continue;
                }
                // Nothing can stream without it.
                Err(ApplyError::InUse(why)) => {
                    self.leave_for_later(why);
                    tokio::select! {
                        _ = stop_early.wait_for(|stop| *stop) => return Ok(()),
                        () = tokio::time::sleep(self.detaching.pause()) => continue,
                    }
                }
                started => started?,
            };
            no_place_in = None;
            *cancel.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) =
                vec![session.connection.cancel_token()];
            let attempt = Attempt {
                careful: careful.take(),
                tried_as_batch,
                small,
                row_by_row: row_by_row.clone(),
                alone_until: alone.until().max(small.until()),
                cancel: cancel.clone(),
            };
            let (asked_in_vain, copies_wait) = (start.ask_again, start.copies_wait);
            let from = start.applied;
            let ended = if start.beside.is_empty() {
                (cut_offs, ending) = (CutOffs::default(), Ending::Nothing);
                self.stream(session, start, attempt, &mut stop).await
            } else {
                self.set_status(|status| status.copies = Vec::new());
                let before = self.lock_status().copied_ranges;
                let ended = self.stream_beside_copy(session, start, attempt, &stop).await;
                let status = self.lock_status();
                // Nor is it in vain that it waits for the log.
                let brought = status.copied_ranges > before || status.log_wait_doublings > 0;
                ending = cut_offs.note(&status.copies, brought);
                ended
            };
            match ended {
                Ok(StreamEnd::CopiedBeside) => ending = Ending::Begun,
                Ok(StreamEnd::Stopped) => return Ok(()),
                Ok(StreamEnd::StartAgain) => {}
                Ok(StreamEnd::Halted(position)) => {
                    careful = Some(CarefulSpan::at(position));
                }
                // Row by row it either goes, or says which row is wrong.
                Err(Failure {
                    error: ApplyError::BatchRefused { table, position, what, .. },
                    ..
                }) => {
                    let table = table.as_deref();
                    tracing::info!(
                        subscription = %self.spec.name, %position, what,
                        table = table.map(tracing::field::display),
                        "a batch was refused; its changes are applied row by row"
                    );
                    match table {
                        Some(table) => row_by_row.note(table, position),
                        // The COMMIT itself: any transaction may be the reason, and newer ones would
                        // make another batch of it.
                        None => careful = Some(CarefulSpan::all_until(position)),
                    }
                    // What was sent behind it would keep the connection, and with it the lock.
                    self.cancel(cancel).await;
                }
                Err(Failure { error: ApplyError::LanesMet { position, what, .. }, .. }) => {
                    alone.note(position, ALONE_BYTES, ALONE_DOUBLINGS_MAX);
                    tracing::info!(
                        subscription = %self.spec.name, %position, %what, until = %alone.until(),
                        "groups were in each other's way; they are applied one after the other"
                    );
                    self.cancel(cancel).await;
                }
                // A check violation: the row may be for a partition that is not here yet.
                Err(Failure { error: ApplyError::Change(failed), careful: span })
                    if self.spec.schema.create_tables
                        && failed.cause.is_of_no_partition()
                        && without_partition != Some(failed.position) =>
                {
                    without_partition = Some(failed.position);
                    no_place_in = Some(failed.table);
                    careful = span;
                }
                // The publisher may say so too, when it is asked: then it is a table that joined,
                // or one whose list of columns was changed.
                Err(Failure {
                    error:
                        ref error @ (ApplyError::AnotherTable { ref table, found: oid, .. }
                        | ApplyError::ColumnsMoved { ref table, oid, .. }),
                    careful: None,
                }) if asked_in_vain
                    || copies_wait
                    || asked_about.insert((table.clone(), oid, from)) =>
                {
                    if copies_wait {
                        return Err(ApplyError::NotYet(format!(
                            "{error}. Or it is published otherwise by now, and is copied once \
                             partitions that were detached on the publisher are detached on the \
                             target"
                        )));
                    }
                    if asked_in_vain {
                        return Err(ApplyError::NotYet(format!(
                            "{error}. Or it is published otherwise by now: the publisher cannot be \
                             asked about that at the moment"
                        )));
                    }
                    tracing::info!("the publisher is asked what it publishes by now. {error}");
                }
                Err(Failure { error: ApplyError::NoRoom { applied, error }, careful: span }) => {
                    careful = span;
                    let Some(halvings) = small.note(applied) else { return Err(*error) };
                    tracing::warn!(
                        subscription = %self.spec.name,
                        "{error}. Groups of transactions are halved for a while ({halvings} times \
                         by now), and applied one after the other. If it is locks that are short, \
                         because a group is for many tables, max_locks_per_transaction on the \
                         target makes room for more"
                    );
                    self.cancel(cancel).await;
                    tokio::select! {
                        _ = stop_early.wait_for(|stop| *stop) => return Ok(()),
                        () = tokio::time::sleep(NO_ROOM_PAUSE) => {}
                    }
                }
                Err(Failure { error: ApplyError::TablesInUse { tables, .. }, .. }) => {
                    let name = application_name(&format!("{} looks for locks", self.spec.name));
                    let mut session = Session::connect(&self.spec.target, &name).await?;
                    let error = session.in_use(&self.spec.name, "TRUNCATE", &tables).await;
                    session.connection.close().await;
                    return Err(error);
                }
                Err(Failure { error: ApplyError::Change(failed), careful: None })
                    if failed.cause.is_of_no_partition() =>
                {
                    return Err(self.without_partition(failed).await);
                }
                Err(Failure { error: ApplyError::Change(failed), careful: None })
                    if failed.lacks_label() =>
                {
                    return Err(self.of_renamed_label(failed).await);
                }
                Err(Failure { error, careful: None }) => return Err(error),
                Err(Failure { error, careful: span }) => {
                    tracing::debug!("to be applied again, carefully: {error}");
                    // Once: what fails as a batch too fails by itself.
                    let broken = error.breaks_key_at().filter(|_| self.may_batch());
                    let as_batch = broken.is_some() && tried_as_batch != broken;
                    tried_as_batch = broken.or(tried_as_batch);
                    careful = span.map(|span| CarefulSpan { as_batch, ..span });
                }
            }
        }
    }

    /// What is to be done about a change whose row no partition of the target takes.
    async fn without_partition(&self, mut failed: Box<FailedChange>) -> ApplyError {
        let name = application_name(&format!("{} looks for partitions", self.spec.name));
        let told = async {
            let mut session = Session::connect(&self.spec.target, &name).await?;
            let told = session.without_partition(&failed.table).await;
            session.connection.close().await;
            told
        };
        match told.await {
            Ok(Some(remedy)) => failed.remedy = remedy.into(),
            Ok(None) => {}
            Err(error) => tracing::debug!("partitions cannot be looked for: {error}"),
        }
        ApplyError::Change(failed)
    }

    pub(crate) fn may_batch(&self) -> bool {
        self.spec.limits.batches != Batches::Never
    }

    pub(crate) async fn stream(
        &self,
        session: Session,
        mut start: Start,
        attempt: Attempt,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<StreamEnd, Failure> {
        let name = self.spec.name.as_str();
        let mut read_after = start.applied;
        if fault::defect("doubled-batch-after-reconnect") {
            read_after = self.store.status().start;
        }
        let mut feed = match LogFeed::open(self.store.clone(), read_after) {
            Ok(feed) => feed,
            Err(StoreError::Dropped { start, .. }) => return Err(self.gap(start).into()),
            Err(error) => return Err(ApplyError::from(error).into()),
        };
        feed.tells(self.given.clone());
        let copied = CopiedTables::of(&start.tables);
        let policy = self.spec.on_conflict.clone();
        let names = self.spec.schema.names.clone();
        let Attempt { careful, tried_as_batch, small, row_by_row, alone_until, cancel } = attempt;
        let pipeline = Pipeline::new(session);
        let lanes = LaneSettings {
            subscription: name.to_owned(),
            target: self.spec.target.clone(),
            streams: self.spec.streams,
            alone_until,
            cancel,
            keeps_newest: start.keeps_newest,
        };
        let following = Following { policy: self.spec.follow_ddl, source: self.source.clone() };
        let early = EarlySettings {
            store: self.store.clone(),
            lanes: LaneSettings { streams: Streams::fixed(1), ..lanes.clone() },
            on_conflict: policy.clone(),
            copied: copied.clone(),
            row_by_row: row_by_row.clone(),
            target_names: names.clone(),
            following: following.clone(),
        };
        let mut writer =
            Writer::new(pipeline, lanes, policy, copied, row_by_row, names, following).await?;
        if let Some(span) = careful {
            let (feed, writer) = (&mut feed, &mut writer);
            let halvings = small.halvings_at(start.applied);
            let commands_max = self.spec.limits.halved(halvings).commands_max;
            let start = &mut start;
            let agent = self;
            let mut work =
                Careful { agent, feed, writer, start, span, tried_as_batch, commands_max };
            if !work.run(stop).await? {
                return Ok(StreamEnd::StartAgain);
            }
        }
        let applied = start.applied;
        let tables: Vec<TableName> = start.tables.iter().map(|t| t.table.clone()).collect();
        // Their changes do not make us look for new tables.
        let beside = start.beside.drain(..);
        start.tables.extend(beside.map(|table| TableProgress { copied: true, ..table }));
        feed.halt_at(start.skips.iter().find(|skip| **skip > applied).copied());
        let restarted = writer.sequences_restarted();
        let mut streaming = Streaming::new(self, feed, writer, start, early, small);
        tracing::info!(subscription = %name, %applied, "subscription streaming");
        let Some(interval) = self.spec.sequence_interval else {
            let end = streaming.run(stop).await;
            let stops_at = streaming.stops_at();
            streaming.end(end.is_ok()).await;
            return end.map_err(|error| Failure::of_many(error, stops_at));
        };
        let SubscriptionSpec { target, schema, .. } = &self.spec;
        let source = self.source.as_ref();
        let mut sequences = Sequences::new(name, source, target, schema, &self.store, restarted);
        let end = tokio::select! {
            end = streaming.run(stop) => end,
            never = sequences.follow(interval, &tables) => match never {},
        };
        let stops_at = streaming.stops_at();
        streaming.end(end.is_ok()).await;
        let end = end.map_err(|error| Failure::of_many(error, stops_at))?;
        if matches!(end, StreamEnd::Stopped) {
            let caught_up = sequences.catch_up(&tables);
            if tokio::time::timeout(SEQUENCES_AT_STOP, caught_up).await.is_err() {
                tracing::warn!(subscription = %name, "stopped before all sequences had followed");
            }
        }
        Ok(end)
    }

    /// Moves the store's cursor to what the target has committed durably.
    pub(crate) fn acknowledge(&self, committed: Lsn) -> Result<(), ApplyError> {
        fault::point("apply.after-commit");
        fault::point("apply.before-acknowledge");
        self.store.move_cursor(&self.spec.name, Applied(committed))?;
        fault::point("apply.after-acknowledge");
        self.set_status(|status| {
            // What was copied is not counted.
            if status.applied.0 != Lsn::ZERO {
                status.log_bytes += committed.bytes_since(status.applied.0);
            }
            status.applied = Applied(committed);
        });
        Ok(())
    }

    /// Says why something is to be detached on the target only later.
    pub(crate) fn leave_for_later(&self, why: String) {
        tracing::info!("{why}");
        self.set_status(|status| status.left_for_later = Some(why));
    }

    /// All that is to be detached on the target is.
    pub(crate) fn nothing_is_left(&self) {
        self.detaching.all_done();
        self.set_status(|status| status.left_for_later = None);
    }

    /// Whatever it waited for, it does not any more.
    fn nothing_waits(&self) {
        self.set_status(|status| {
            (status.waits_for, status.copy_waits, status.left_for_later) = (None, None, None);
        });
    }

    pub(crate) fn set_status(&self, change: impl FnOnce(&mut SubscriptionStatus)) {
        change(&mut self.lock_status());
    }

    pub(crate) fn lock_status(&self) -> MutexGuard<'_, SubscriptionStatus> {
        self.status.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
