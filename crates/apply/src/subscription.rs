//! The agent of one subscription: copies what is not copied yet, then streams.

use crate::backup;
use crate::careful::{Careful, Failure};
use crate::conflict::ConflictPolicy;
use crate::early::EarlySettings;
use crate::log_feed::LogFeed;
use crate::postgres::follow_ddl::FollowDdl;
use crate::postgres::initial_copy::{CopySettings, GIVE_WAY_FOR, InitialCopy};
use crate::postgres::lanes::{CancelTokens, LaneSettings, Streams};
use crate::postgres::pipeline::Pipeline;
use crate::postgres::progress::{Opened, Progress, Requests, TableProgress, state};
use crate::postgres::schema::{SchemaSettings, create_missing};
use crate::postgres::sequences::Sequences;
use crate::postgres::session::{Session, application_name};
use crate::postgres::writer::{Following, Writer};
use crate::row_by_row::RowByRow;
use crate::scheduler::GroupLimits;
use crate::status::{Phase, SubscriptionStatus};
use crate::streaming::{StreamEnd, Streaming};
use crate::{ApplyError, Given};
use farshore_capture::publication::{PublishedTable, TableName, columns_sent};
use farshore_capture::slot;
use farshore_capture::source::Source;
use farshore_fault as fault;
use farshore_model::{Applied, Lsn};
use farshore_pg::Config;
use farshore_store::{LogStore, StoreError};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::watch;

/// How long to wait for the connection of an agent that died to leave the target.
pub(crate) const LOCK_WAIT: Duration = Duration::from_secs(10);

/// How often a copy beside the stream may be cut off.
const CUT_OFF_MAX: u32 = 5;

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
}

/// Where streaming starts, and what is copied.
pub(crate) struct Start {
    /// What the target has.
    pub applied: Lsn,
    /// Copied tables.
    pub tables: Vec<TableProgress>,
    /// Tables that are copied while the others stream.
    pub beside: Vec<TableProgress>,
    /// Every state is a prefix from here on.
    pub consistent_at: Lsn,
    /// Capture's connection at which the publisher was asked for new tables.
    pub asked: u64,
    /// It did not answer.
    pub ask_again: bool,
    /// Foreign keys are to be added when every state is a prefix.
    pub foreign_keys_wait: bool,
    /// Transactions that an operator wants left out.
    pub skips: BTreeSet<Lsn>,
}

impl Start {
    /// What the target is once it has everything up to `position`.
    pub fn state_at(&self, position: Lsn) -> &'static str {
        if position >= self.consistent_at { state::STREAMING } else { state::CATCHING_UP }
    }
}

/// How what failed before is applied this time.
pub(crate) struct Attempt {
    /// From this position on, each transaction by itself.
    careful_from: Option<Lsn>,
    /// Where batches are not tried.
    row_by_row: RowByRow,
    /// Up to here groups do not run side by side.
    alone_until: Lsn,
    /// Where connections leave their tokens.
    cancel: CancelTokens,
}

/// A backlog waits so long for capture to be there: before the publisher was asked what it publishes,
/// a table that has left and come back counts as copied.
const CAPTURE_WITHIN: Duration = Duration::from_secs(1);

impl SubscriptionSpec {
    /// What its connections are called on the target.
    pub fn application_name(&self) -> String {
        application_name(&self.name)
    }

    /// Copied tables that the publisher still has as it had them, each with its name on the target.
    /// Of one that the publication does not list by itself (all of a database or a schema, a
    /// partition) nobody can tell whether it was made again there too.
    fn copied_to(
        &self,
        tables: &[TableProgress],
        published: &[PublishedTable],
    ) -> Vec<(TableName, TableName)> {
        let is_same = |copied: &TableProgress, now: &PublishedTable| {
            let membership = copied.membership;
            copied.table == now.table
                && membership == now.membership
                && membership != 0
                && !now.memberships_above.contains(&membership)
        };
        let copied = tables.iter().filter(|copied| copied.copied);
        let copied = copied.filter(|copied| published.iter().any(|now| is_same(copied, now)));
        copied.map(|p| (p.table.clone(), self.schema.names.table(&p.table))).collect()
    }
}

/// How far groups do not run side by side, because some were in each other's way.
#[derive(Clone, Copy, Debug, Default)]
struct Alone {
    until: Lsn,
    times: u32,
}

impl Alone {
    /// Bytes of the publisher's log after the first meeting; doubled with each one more.
    const SPAN_BYTES: u64 = 4 << 20;
    const DOUBLINGS_MAX: u32 = 14;

    /// It happened to groups up to `position`.
    fn note(&mut self, position: Lsn) {
        let span = Self::SPAN_BYTES << self.times.min(Self::DOUBLINGS_MAX);
        *self = Alone { until: Lsn(position.0.saturating_add(span)), times: self.times + 1 };
    }
}

/// Those that are not copied.
fn joined(mut published: Vec<PublishedTable>, known: &[TableProgress]) -> Vec<PublishedTable> {
    published.retain(|table| !known.iter().any(|k| k.copied && k.is_still(table)));
    published
}

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
                self.set_status(|status| status.waits_for = None);
                return result.map_err(|error| match error {
                    // Retention took it from under a reader that was slow.
                    ApplyError::Store(StoreError::Dropped { start, .. }) => self.gap(start),
                    error => error,
                });
            }
            () = grace_over => {}
            never = self.watch_for_holders() => match never {},
        }
        self.set_status(|status| status.waits_for = None);
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
        let mut careful_from = None;
        let mut row_by_row = RowByRow::default();
        let mut alone = Alone::default();
        let (mut without_partition, mut needs_partitions) = (None, false);
        let mut copied_beside = false;
        let mut cut_off = 0;
        loop {
            let mut stop_early = stop.clone();
            let needed = std::mem::take(&mut needs_partitions);
            let started = tokio::select! {
                biased;
                _ = stop_early.wait_for(|stop| *stop) => return Ok(()),
                started = self.start(session.take(), copied_beside, needed) => started,
            };
            let (session, start) = match started {
                Err(ApplyError::GaveWay(why)) => {
                    tracing::info!("{why}");
                    tokio::time::sleep(GIVE_WAY_FOR).await;
                    continue;
                }
                started => started?,
            };
            *cancel.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) =
                vec![session.connection.cancel_token()];
            let attempt = Attempt {
                careful_from: careful_from.take(),
                row_by_row: row_by_row.clone(),
                alone_until: alone.until,
                cancel: cancel.clone(),
            };
            let ended = if start.beside.is_empty() {
                cut_off = 0;
                self.stream(session, start, attempt, &mut stop).await
            } else {
                cut_off += 1;
                self.stream_beside_copy(session, start, attempt, &stop).await
            };
            // A table without a key starts over each time. The others wait for it in the end.
            copied_beside = cut_off >= CUT_OFF_MAX;
            match ended {
                Ok(StreamEnd::CopiedBeside) => copied_beside = true,
                Ok(StreamEnd::Stopped) => return Ok(()),
                Ok(StreamEnd::StartAgain) => {}
                Ok(StreamEnd::Halted(position)) => careful_from = Some(position),
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
                    row_by_row.note(table, position);
                    // What was sent behind it would keep the connection, and with it the lock.
                    self.cancel(cancel).await;
                }
                Err(Failure { error: ApplyError::LanesMet { position, what, .. }, .. }) => {
                    alone.note(position);
                    tracing::info!(
                        subscription = %self.spec.name, %position, %what, until = %alone.until,
                        "groups were in each other's way; they are applied one after the other"
                    );
                    self.cancel(cancel).await;
                }
                // A check violation: the row may be for a partition that is not here yet.
                Err(Failure { error: ApplyError::Change(failed), careful_from: from })
                    if self.spec.schema.create_tables
                        && failed.cause.sqlstate() == Some("23514")
                        && without_partition != Some(failed.position) =>
                {
                    (without_partition, needs_partitions) = (Some(failed.position), true);
                    careful_from = from;
                }
                Err(Failure { error, careful_from: None }) => return Err(error),
                Err(Failure { error, careful_from: from }) => {
                    tracing::debug!("to be applied again, carefully: {error}");
                    careful_from = from;
                }
            }
        }
    }

    /// Connects, unless there is a `session`, and says where streaming starts. A first copy is done
    /// here; tables that joined the publication since, or are copied anew, are left to be copied
    /// beside the stream, unless that was done: then their copy ends here. `needs_partitions` tells
    /// that a row found no partition: then a publisher that cannot be asked is an error.
    async fn start(
        &self,
        session: Option<Session>,
        copied_beside: bool,
        needs_partitions: bool,
    ) -> Result<(Session, Start), ApplyError> {
        let name = self.spec.name.as_str();
        self.set_status(|status| status.phase = Phase::Starting);
        let mut session = match session {
            Some(session) => session,
            None => Session::connect(&self.spec.target, &self.spec.application_name()).await?,
        };
        let Opened { mut progress, mut tables, mut requests } =
            session.open_subscription(name, LOCK_WAIT).await?;
        if let Some(progress) = &progress {
            // Also of one that stops here.
            self.set_status(|status| status.applied = Applied(progress.applied));
            self.check_origin(progress)?;
        }
        // Before anything is copied. A log that was begun anew is seen below.
        let begins = slot::log_begins(self.store.as_ref());
        if progress.as_ref().is_none_or(|progress| begins.is_some_and(|b| progress.applied >= b)) {
            self.check_not_ahead(progress.as_ref(), &tables)?;
        }
        let cursor = self.store.register_cursor(name)?;
        if progress.is_none() && self.spec.initialise == Initialise::Backup {
            let Some(begins) = slot::log_begins(self.store.as_ref()) else {
                return Err(ApplyError::NotYet(format!(
                    "subscription \"{name}\" is to be initialised from a backup, and none may be \
                     taken yet: its log has not begun"
                )));
            };
            return Err(backup::waits(name, cursor.applied.0.max(begins)));
        }
        let unfinished = progress.as_ref().is_none_or(|progress| progress.state == state::COPYING);
        if let (Some(start), false) = (cursor.expired, unfinished) {
            return Err(self.gap(start));
        }
        // What is published is asked once, when capture is there, unless that takes long.
        let mut ready = self.capture_ready.clone();
        let _ =
            tokio::time::timeout(CAPTURE_WITHIN, ready.wait_for(|sessions| *sessions > 0)).await;
        let asked = *self.capture_ready.borrow();
        let mut published: Option<Vec<PublishedTable>> = None;
        let half_copied: Vec<TableProgress> =
            tables.iter().filter(|table| !table.copied).cloned().collect();
        let (mut beside, mut ask_again) = (Vec::new(), false);
        let mut is_known = true;
        if unfinished {
            is_known = false;
            self.copy_waiting(&mut session, progress.as_ref(), cursor.applied, false).await?;
        } else {
            let begun: Vec<TableProgress> = tables
                .iter()
                .map(|table| TableProgress { copied: true, ..table.clone() })
                .collect();
            // What only has to be brought forward is ended first, whatever else has joined.
            let ends = copied_beside && !half_copied.is_empty();
            if ends {
                is_known = false;
                self.copy_waiting(&mut session, progress.as_ref(), cursor.applied, true).await?;
            }
            published = self.published().await;
            let joined = published.clone().map(|published| joined(published, &begun));
            ask_again = joined.is_none();
            let joined = joined.unwrap_or_default();
            let left = if ends { Vec::new() } else { half_copied };
            let is_more = !left.is_empty() || !joined.is_empty();
            is_known &= !is_more;
            // Where foreign keys fire, tables at different points are in each other's way.
            if is_more && session.replica_role {
                self.keep_log_for_copy()?;
                session.mark_catching_up(name).await?;
                beside = left;
                beside.retain(|table| !joined.iter().any(|joined| joined.table == table.table));
                beside.extend(joined.iter().map(TableProgress::not_begun));
            } else if is_more {
                self.copy_waiting(&mut session, progress.as_ref(), cursor.applied, false).await?;
            }
        }
        if !is_known {
            tables = session.load_tables(name).await?;
            progress = session.load_progress(name).await?;
        }
        if asked > 0 && self.spec.schema.create_tables {
            is_known &= !self.create_partitions(&mut session, &tables, needs_partitions).await?;
        }
        let progress = progress.ok_or_else(|| {
            ApplyError::NotYet(format!("subscription \"{name}\": its progress row has gone"))
        })?;
        tables.retain(|table| table.copied && !beside.iter().any(|b| b.table == table.table));
        let consistent_at = if beside.is_empty() {
            self.release_log_of_copy()?;
            tables.iter().map(|t| t.copied_at).max().unwrap_or(Lsn::ZERO)
        } else {
            Lsn::MAX
        };
        let applied = progress.applied;
        // A store that was replaced begins later than what the target has.
        let mut ready = self.capture_ready.clone();
        while slot::log_begins(self.store.as_ref()).is_none() {
            if ready.changed().await.is_err() {
                return Err(ApplyError::NotYet(format!(
                    "subscription \"{name}\": waiting for its publication's capture"
                )));
            }
        }
        if let Some(begins) =
            slot::log_begins(self.store.as_ref()).filter(|begins| applied < *begins)
        {
            return Err(self.gap(begins));
        }
        self.check_not_ahead(Some(&progress), &tables)?;
        match self.store.move_cursor(name, Applied(applied)) {
            Ok(()) => {}
            Err(StoreError::Dropped { start, .. }) if cursor.expired.is_none() => {
                return Err(self.went_back_too_far(applied, start));
            }
            Err(StoreError::Dropped { start, .. }) => return Err(self.gap(start)),
            Err(error) => return Err(error.into()),
        }
        if applied < cursor.applied.0 && cursor.expired.is_none() {
            tracing::warn!(
                subscription = %name, from = %cursor.applied, to = %applied,
                "the target has gone back (restored from a backup, or failed over): what it lacks \
                 is applied again from the log"
            );
        }
        if !is_known {
            requests = session.load_requests(name).await?;
        }
        if let Some(published) = published {
            session.check_remade(name, &self.spec.copied_to(&tables, &published)).await?;
        }
        let Requests { skips, foreign_keys_wait } = requests;
        let consistent = applied >= consistent_at;
        if consistent && foreign_keys_wait {
            session.add_foreign_keys(name).await?;
        }
        let foreign_keys_wait = !consistent && foreign_keys_wait;
        let start = Start {
            applied,
            tables,
            beside,
            consistent_at,
            asked,
            ask_again,
            foreign_keys_wait,
            skips,
        };
        Ok((session, start))
    }

    fn gap(&self, start: Lsn) -> ApplyError {
        ApplyError::Gap(format!(
            "subscription \"{}\": the store no longer has changes that it still needed; the log now \
             starts at {start} (retention limits dropped them, or the store was replaced). To copy \
             anew: stop this node, empty the target's tables, DROP SCHEMA farshore CASCADE there, \
             and start",
            self.spec.name
        ))
    }

    /// Nothing was dropped that it had not applied; it has gone back.
    fn went_back_too_far(&self, applied: Lsn, start: Lsn) -> ApplyError {
        ApplyError::Gap(format!(
            "subscription \"{}\": the target has gone back to {applied} (restored from a backup, or \
             failed over), and the store begins at {start}: it no longer has changes that the \
             target had applied once and now lacks. Restore it from a backup that has applied more, \
             or, to copy anew: stop this node, empty the target's tables, DROP SCHEMA farshore \
             CASCADE there, and start",
            self.spec.name
        ))
    }

    fn check_origin(&self, progress: &Progress) -> Result<(), ApplyError> {
        let name = &self.spec.name;
        if progress.publication != self.spec.publication {
            return Err(ApplyError::Setup(format!(
                "subscription \"{name}\": the target's subscription of that name follows \
                 publication \"{}\", not \"{}\". Rename one of the two",
                progress.publication, self.spec.publication
            )));
        }
        match slot::publisher_identity(self.store.as_ref()) {
            Some(system) if system != progress.publisher => Err(ApplyError::Setup(format!(
                "subscription \"{name}\": the target was filled from another publisher (system \
                 identifier {}, not {system}). Point the publication back at it, or empty the \
                 target's tables and drop its farshore schema to copy anew",
                progress.publisher
            ))),
            Some(_) | None => Ok(()),
        }
    }

    /// Tables that the publisher publishes and that are not copied; `None` when it cannot be asked
    /// now. Streaming goes on then, and asks again later.
    pub(crate) async fn new_tables(&self, known: &[TableProgress]) -> Option<Vec<PublishedTable>> {
        self.published().await.map(|published| joined(published, known))
    }

    async fn published(&self) -> Option<Vec<PublishedTable>> {
        match self.source.published_tables().await {
            Ok(published) => Some(published),
            Err(error) => {
                tracing::info!(
                    subscription = %self.spec.name, %error,
                    "the publisher does not say which tables it publishes; it is asked again"
                );
                None
            }
        }
    }

    /// Whether the publisher publishes partitioned tables whose partitions we keep in step with;
    /// `None` when it cannot be asked now.
    pub(crate) async fn partitions_may_have_changed(&self) -> Option<bool> {
        if !self.spec.schema.create_tables {
            return Some(false);
        }
        self.source.partitioned_tables().await.ok().map(|tables| !tables.is_empty())
    }

    /// Makes partitions of copied tables that were attached on the publisher since. When it cannot
    /// be asked now, streaming goes on: a row without a partition would bring us back here. If it
    /// has, to go on would end at that row for good, or leave it out: it is asked again instead.
    /// Returns whether the target was looked at.
    async fn create_partitions(
        &self,
        session: &mut Session,
        tables: &[TableProgress],
        needed: bool,
    ) -> Result<bool, ApplyError> {
        let (published, definitions) = match self.source.partitions().await {
            Ok(Some(answer)) => answer,
            Ok(None) => return Ok(false),
            Err(error) if needed && error.is_transient() => return Err(error.into()),
            Err(error) => {
                tracing::debug!(subscription = %self.spec.name, %error, "publisher not asked");
                return Ok(false);
            }
        };
        let copied: HashSet<TableName> = tables.iter().map(|t| t.table.clone()).collect();
        let (name, schema) = (self.spec.name.as_str(), &self.spec.schema);
        for table in &published {
            if tables.iter().any(|t| t.is_still(table) && t.membership != table.membership) {
                session.note_membership(name, table).await?;
            }
        }
        let definitions = definitions.as_sent(&columns_sent(&published));
        create_missing(session, name, schema, &definitions, &HashSet::new(), &copied).await?;
        session.finish_tables(name).await?;
        Ok(true)
    }

    /// Copies what is not copied, or only what was begun, while nothing streams.
    async fn copy_waiting(
        &self,
        session: &mut Session,
        progress: Option<&Progress>,
        pinned: Applied,
        only_begun: bool,
    ) -> Result<(), ApplyError> {
        let name = &self.spec.name;
        session.wait_for_copiers(name).await?;
        let known = session.load_tables(name).await?;
        self.copy(session, progress, pinned, &known, only_begun).await
    }

    async fn copy(
        &self,
        session: &mut Session,
        progress: Option<&Progress>,
        pinned: Applied,
        known: &[TableProgress],
        only_begun: bool,
    ) -> Result<(), ApplyError> {
        let name = self.spec.name.as_str();
        self.set_status(|status| status.phase = Phase::Copying);
        let mut ready = self.capture_ready.clone();
        if ready.wait_for(|sessions| *sessions > 0).await.is_err() {
            return Err(ApplyError::NotYet(format!(
                "subscription \"{name}\": waiting for its publication's capture"
            )));
        }
        // The log from `pinned` on is kept for us, and no consistent point can be before it.
        if progress.is_none() {
            let system = slot::publisher_identity(self.store.as_ref()).unwrap_or_default();
            fault::point("snapshot.before-state");
            session
                .execute(
                    "INSERT INTO farshore.subscription (name, publication, publisher, state, applied) \
                     VALUES ($1, $2, $3, $4, $5::text::pg_lsn)",
                    &[
                        Some(name),
                        Some(&self.spec.publication),
                        Some(&system),
                        Some(state::COPYING),
                        Some(&pinned.to_string()),
                    ],
                )
                .await?;
            fault::point("snapshot.after-state");
        }
        let copy = InitialCopy {
            subscription: name,
            source: self.source.as_ref(),
            target: &self.spec.target,
            store: &self.store,
            settings: self.spec.copy,
            ends: true,
            only_begun,
            streaming: progress.is_some_and(|progress| progress.state != state::COPYING),
            schema: &self.spec.schema,
            follow_ddl: self.spec.follow_ddl,
            status: &self.status,
        };
        let point = copy.run(session, known).await?;
        session.finish_tables(name).await?;
        let tables = session.load_tables(name).await?;
        let newest = tables.iter().map(|table| table.copied_at).max().unwrap_or(point);
        let oldest = tables.iter().map(|table| table.copied_at).min().unwrap_or(point);
        // A first copy starts where its oldest table stands; one that adds tables to a running
        // subscription goes on where the others are.
        let applied = match progress {
            Some(progress) if progress.state != state::COPYING => progress.applied,
            Some(_) | None => oldest,
        };
        let applied = if fault::defect("snapshot-row-also-streamed") { pinned.0 } else { applied };
        let word = if applied >= newest || fault::defect("snapshot-row-also-streamed") {
            state::STREAMING
        } else {
            state::CATCHING_UP
        };
        fault::point("snapshot.before-finish");
        session
            .execute(
                "UPDATE farshore.subscription SET state = $2, applied = $3::text::pg_lsn, \
                 applied_at = clock_timestamp() WHERE name = $1",
                &[Some(name), Some(word), Some(&applied.to_string())],
            )
            .await?;
        fault::point("snapshot.after-finish");
        self.set_status(|status| status.copied_at = Some(newest));
        tracing::info!(subscription = %name, %applied, state = word, "initial copy done");
        Ok(())
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
        let copied: HashMap<_, _> =
            start.tables.iter().map(|table| (table.table.clone(), table.copied_at)).collect();
        let policy = self.spec.on_conflict.clone();
        let names = self.spec.schema.names.clone();
        let Attempt { careful_from, row_by_row, alone_until, cancel } = attempt;
        let pipeline = Pipeline::new(session);
        let lanes = LaneSettings {
            subscription: name.to_owned(),
            target: self.spec.target.clone(),
            streams: self.spec.streams,
            alone_until,
            cancel,
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
        if let Some(from) = careful_from {
            let (feed, writer) = (&mut feed, &mut writer);
            Careful { agent: self, feed, writer, start: &mut start, from }.run(stop).await?;
        }
        let applied = start.applied;
        let tables: Vec<TableName> = start.tables.iter().map(|t| t.table.clone()).collect();
        // Their changes do not make us look for new tables.
        let beside = start.beside.drain(..);
        start.tables.extend(beside.map(|table| TableProgress { copied: true, ..table }));
        feed.halt_at(start.skips.iter().find(|skip| **skip > applied).copied());
        let mut streaming = Streaming::new(self, feed, writer, start, early);
        tracing::info!(subscription = %name, %applied, "subscription streaming");
        let Some(interval) = self.spec.sequence_interval else {
            let end = streaming.run(stop).await;
            streaming.end(end.is_ok()).await;
            return end.map_err(Failure::of_many);
        };
        let SubscriptionSpec { target, schema, .. } = &self.spec;
        let source = self.source.as_ref();
        let mut sequences = Sequences::new(name, source, target, schema, &self.store);
        let end = tokio::select! {
            end = streaming.run(stop) => end,
            never = sequences.follow(interval, &tables) => match never {},
        };
        streaming.end(end.is_ok()).await;
        let end = end.map_err(Failure::of_many)?;
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

    pub(crate) fn set_status(&self, change: impl FnOnce(&mut SubscriptionStatus)) {
        change(&mut self.lock_status());
    }

    pub(crate) fn lock_status(&self) -> MutexGuard<'_, SubscriptionStatus> {
        self.status.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
