//! The agent of one subscription: copies what is not copied yet, then streams.

use crate::ApplyError;
use crate::log_feed::{Body, LogFeed, LogItem};
use crate::postgres::initial_copy::{CopySettings, GIVE_WAY_FOR, InitialCopy};
use crate::postgres::pipeline::Pipeline;
use crate::postgres::progress::{Progress, TableProgress, state};
use crate::postgres::session::Session;
use crate::postgres::writer::{InTransaction, Writer};
use crate::scheduler::{GroupLimits, Input, Scheduler};
use crate::status::{Phase, SubscriptionStatus};
use farshore_capture::publication::PublicationSpec;
use farshore_capture::slot;
use farshore_fault as fault;
use farshore_model::transaction::Header;
use farshore_model::{Applied, Lsn, PgTime};
use farshore_pg::{CancelToken, Config, Mode};
use farshore_store::{LogStore, StoreError};
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// How long to wait for the connection of an agent that died to leave the target.
const LOCK_WAIT: Duration = Duration::from_secs(10);

/// How long a stop waits for the open target transaction.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// With nothing to apply, progress on the target follows the log this often.
const IDLE_PROGRESS_EVERY: Duration = Duration::from_secs(10);

/// What to apply, and to where.
#[derive(Clone, Debug)]
pub struct SubscriptionSpec {
    /// Subscription name, unique on the target database.
    pub name: String,
    /// `site/publication`.
    pub publication: String,
    /// The target database.
    pub target: Config,
    /// How the initial copy is done.
    pub copy: CopySettings,
    /// Bounds of one target transaction.
    pub limits: GroupLimits,
}

/// Carries one subscription from the store to its target until told to stop.
pub struct Subscription {
    /// What to apply.
    pub spec: SubscriptionSpec,
    /// Where the rows of the initial copy come from.
    pub source: PublicationSpec,
    /// Where the changes come from.
    pub store: Arc<dyn LogStore>,
    /// Counts capture's connections: from the first on a copy may begin, and each may have
    /// brought new tables into the publication.
    pub capture_ready: watch::Receiver<u64>,
    /// Where to say how it goes.
    pub status: Arc<Mutex<SubscriptionStatus>>,
}

/// Why streaming ended without an error.
enum StreamEnd {
    /// It was told to stop.
    Stopped,
    /// Tables joined the publication and must be copied.
    NewTables,
}

/// Where streaming starts, and what is copied.
struct Start {
    applied: Lsn,
    /// Copied tables.
    tables: Vec<TableProgress>,
    /// Every state is a prefix from here on.
    consistent_at: Lsn,
    /// Capture's connection at which the publisher was asked for new tables.
    asked: u64,
}

impl Subscription {
    /// Runs until `stop` turns true or something fails. A stop commits the open group, unless that
    /// takes long: then it is left to be done again.
    pub async fn run(&self, stop: watch::Receiver<bool>) -> Result<(), ApplyError> {
        let cancel = Mutex::new(None);
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
            result = self.work(stop, &cancel) => return result,
            () = grace_over => {}
        }
        // A statement that waits on the target would keep the connection, and with it the lock.
        let token: Option<CancelToken> =
            cancel.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        if let Some(token) = token
            && let Err(error) = token.cancel().await
        {
            tracing::debug!(subscription = %self.spec.name, %error, "not cancelled");
        }
        Ok(())
    }

    async fn work(
        &self,
        mut stop: watch::Receiver<bool>,
        cancel: &Mutex<Option<CancelToken>>,
    ) -> Result<(), ApplyError> {
        loop {
            let mut stop_early = stop.clone();
            let started = tokio::select! {
                biased;
                _ = stop_early.wait_for(|stop| *stop) => return Ok(()),
                started = self.start() => started,
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
                Some(session.connection.cancel_token());
            match self.stream(session, start, &mut stop).await? {
                StreamEnd::Stopped => return Ok(()),
                StreamEnd::NewTables => {}
            }
        }
    }

    /// Connects, copies what is missing, and says where streaming starts.
    async fn start(&self) -> Result<(Session, Start), ApplyError> {
        let name = self.spec.name.as_str();
        self.set_status(|status| status.phase = Phase::Starting);
        let application = format!("farshore {name}");
        let mut session = Session::connect(&self.spec.target, &application).await?;
        session.ensure_schema().await?;
        session.lock_subscription(name, LOCK_WAIT).await?;
        let progress = session.load_progress(name).await?;
        if let Some(progress) = &progress {
            self.check_origin(progress)?;
        }
        let cursor = self.store.register_cursor(name)?;
        let unfinished = progress.as_ref().is_none_or(|progress| progress.state == state::COPYING);
        if let (Some(start), false) = (cursor.expired, unfinished) {
            return Err(self.gap(start));
        }
        let mut tables = session.load_tables(name).await?;
        let asked = *self.capture_ready.borrow();
        let half_copied = tables.iter().any(|table| !table.copied);
        if unfinished || half_copied || (asked > 0 && self.has_new_tables(&tables).await) {
            session.wait_for_copiers(name).await?;
            tables = session.load_tables(name).await?;
            self.copy(&mut session, progress.as_ref(), cursor.applied, &tables).await?;
            tables = session.load_tables(name).await?;
        }
        let progress = session.load_progress(name).await?.ok_or_else(|| {
            ApplyError::NotYet(format!("subscription \"{name}\": its progress row has gone"))
        })?;
        tables.retain(|table| table.copied);
        let consistent_at = tables.iter().map(|t| t.copied_at).max().unwrap_or(Lsn::ZERO);
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
        let durable = self.store.durable().borrow().0;
        if progress.state == state::STREAMING && applied > durable.max(consistent_at) {
            return Err(ApplyError::Gap(format!(
                "subscription \"{name}\": the target has applied up to {applied}, but the store \
                 holds only up to {durable}: the store or the publisher was replaced or set back. \
                 Empty the target's tables and drop its farshore schema to copy anew"
            )));
        }
        match self.store.move_cursor(name, Applied(applied)) {
            Ok(()) => {}
            Err(StoreError::Dropped { start, .. }) => return Err(self.gap(start)),
            Err(error) => return Err(error.into()),
        }
        Ok((session, Start { applied, tables, consistent_at, asked }))
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

    /// Whether the publisher publishes tables that are not copied. When it cannot be asked now,
    /// streaming goes on: a change of such a table would bring us back here.
    async fn has_new_tables(&self, known: &[TableProgress]) -> bool {
        let asked = async {
            let mut sql = self.source.connect(Mode::Sql).await?;
            self.source.published_tables(&mut sql).await
        };
        match asked.await {
            Ok(published) => {
                published.iter().any(|table| !known.iter().any(|k| k.copied && k.is_still(table)))
            }
            Err(error) => {
                tracing::debug!(subscription = %self.spec.name, %error, "publisher not asked");
                false
            }
        }
    }

    async fn copy(
        &self,
        session: &mut Session,
        progress: Option<&Progress>,
        pinned: Applied,
        known: &[TableProgress],
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
            spec: &self.source,
            target: &self.spec.target,
            store: &self.store,
            settings: self.spec.copy,
            status: &self.status,
        };
        let point = copy.run(session, known).await?;
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

    async fn stream(
        &self,
        session: Session,
        start: Start,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<StreamEnd, ApplyError> {
        let name = self.spec.name.as_str();
        let mut read_after = start.applied;
        if fault::defect("doubled-batch-after-reconnect") {
            read_after = self.store.status().start;
        }
        let feed = match LogFeed::open(self.store.clone(), read_after) {
            Ok(feed) => feed,
            Err(StoreError::Dropped { start, .. }) => return Err(self.gap(start)),
            Err(error) => return Err(error.into()),
        };
        let copied: HashMap<_, _> =
            start.tables.iter().map(|table| (table.table.clone(), table.copied_at)).collect();
        let writer = Writer::new(Pipeline::new(session), name, copied).await?;
        let mut streaming = Streaming {
            agent: self,
            feed,
            writer,
            scheduler: Scheduler::new(self.spec.limits),
            applied: start.applied,
            sent: start.applied,
            seen: start.applied,
            consistent_at: start.consistent_at,
            asked: start.asked,
            tables: start.tables,
            ask_again: false,
            in_group: Vec::new(),
            opened_at: Instant::now(),
            awaiting: Vec::new(),
            progress_at: Instant::now(),
            held_back: None,
        };
        tracing::info!(subscription = %name, applied = %start.applied, "subscription streaming");
        streaming.run(stop).await
    }

    fn set_status(&self, change: impl FnOnce(&mut SubscriptionStatus)) {
        change(&mut self.status.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
    }
}

/// One connection at work.
struct Streaming<'a> {
    agent: &'a Subscription,
    feed: LogFeed,
    writer: Writer,
    scheduler: Scheduler,
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
    /// Changes of a table that is not copied have come by.
    ask_again: bool,
    /// Commit times of the transactions in the open group.
    in_group: Vec<PgTime>,
    /// When the open group was begun.
    opened_at: Instant,
    /// Commit times of transactions whose COMMIT is on its way.
    awaiting: Vec<PgTime>,
    progress_at: Instant,
    /// Only used by the defect that swaps transactions.
    held_back: Option<(Header, Body)>,
}

impl Streaming<'_> {
    async fn run(&mut self, stop: &mut watch::Receiver<bool>) -> Result<StreamEnd, ApplyError> {
        loop {
            if *stop.borrow() {
                self.commit_group().await?;
                self.settle().await?;
                return Ok(StreamEnd::Stopped);
            }
            let sessions = *self.agent.capture_ready.borrow();
            if self.ask_again || self.asked != sessions {
                self.commit_group().await?;
                self.settle().await?;
                if self.tables_have_joined(sessions).await {
                    return Ok(StreamEnd::NewTables);
                }
            }
            match self.feed.next_at_hand().await? {
                Some(LogItem::Transaction { header, body }) => {
                    self.transaction(header, body).await?;
                }
                Some(LogItem::Watermark(position)) => self.seen = self.seen.max(position),
                None => self.dry(stop).await?,
            }
        }
    }

    /// Asks the publisher whether it publishes tables that are not copied.
    async fn tables_have_joined(&mut self, sessions: u64) -> bool {
        (self.asked, self.ask_again) = (sessions, false);
        self.agent.has_new_tables(&self.tables).await
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
        let bytes = match &body {
            Body::Inline(bytes) => bytes.len() as u64,
            // Unknown, and large: it stands alone.
            Body::Spilled(_) => u64::MAX,
        };
        let decision = self.scheduler.step(Input::Transaction { commands: header.commands, bytes });
        if decision.commit_before {
            self.commit_open().await?;
        }
        if decision.begin {
            self.opened_at = Instant::now();
            self.writer.begin()?;
        }
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
        self.seen = self.seen.max(header.end_lsn);
        self.in_group.push(header.commit_time);
        if decision.commit_after {
            self.commit_open().await?;
        }
        Ok(())
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
            self.writer.begin()?;
            self.commit_open().await?;
            self.settle().await?;
        }
        self.announce();
        let behind = self.seen > self.applied;
        let (asked, mut ready) = (self.asked, self.agent.capture_ready.clone());
        tokio::select! {
            Ok(_) = ready.wait_for(|sessions| *sessions != asked) => {}
            () = self.feed.wait_for_more() => {}
            _ = stop.wait_for(|stop| *stop) => {}
            () = tokio::time::sleep_until(self.progress_at + IDLE_PROGRESS_EVERY), if behind => {}
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
        let limits = &self.agent.spec.limits;
        let lag = PgTime::now().micros_since(*newest);
        let behind = lag > i64::try_from(limits.behind_after.as_micros()).unwrap_or(i64::MAX);
        let open_for = self.opened_at.elapsed();
        if self.scheduler.step(Input::Dry { behind, open_for }).commit_before {
            self.commit_open().await?;
            return Ok(false);
        }
        // What is in the group already can be worked on meanwhile.
        self.writer.send().await?;
        tokio::select! {
            () = self.feed.wait_for_more() => {}
            () = tokio::time::sleep_until(self.opened_at + limits.open_max) => {}
            _ = stop.wait_for(|stop| *stop) => {}
        }
        Ok(true)
    }

    async fn commit_group(&mut self) -> Result<(), ApplyError> {
        let dry = Input::Dry { behind: false, open_for: Duration::ZERO };
        if self.scheduler.step(dry).commit_before { self.commit_open().await } else { Ok(()) }
    }

    async fn commit_open(&mut self) -> Result<(), ApplyError> {
        let to = self.seen;
        let state = if to >= self.consistent_at { state::STREAMING } else { state::CATCHING_UP };
        self.writer.commit(self.sent, to, state).await?;
        // The group before this one has been answered by now.
        self.acknowledge()?;
        self.sent = to;
        self.awaiting.append(&mut self.in_group);
        Ok(())
    }

    /// Waits until the target has confirmed everything sent.
    async fn settle(&mut self) -> Result<(), ApplyError> {
        self.writer.drain().await?;
        self.acknowledge()
    }

    /// Moves the store's cursor to what the target has committed durably.
    fn acknowledge(&mut self) -> Result<(), ApplyError> {
        let Some(committed) = self.writer.take_committed() else { return Ok(()) };
        fault::point("apply.after-commit");
        self.applied = committed;
        self.progress_at = Instant::now();
        fault::point("apply.before-acknowledge");
        self.agent.store.move_cursor(&self.agent.spec.name, Applied(committed))?;
        fault::point("apply.after-acknowledge");
        self.announce();
        Ok(())
    }

    fn announce(&mut self) {
        let now = PgTime::now();
        let confirmed = std::mem::take(&mut self.awaiting);
        let (applied, consistent) = (self.applied, self.applied >= self.consistent_at);
        let changes = self.writer.changes();
        self.agent.set_status(|status| {
            status.phase = if consistent { Phase::Streaming } else { Phase::CatchingUp };
            status.applied = Applied(applied);
            status.transactions += confirmed.len() as u64;
            status.target_commits += u64::from(!confirmed.is_empty());
            status.changes = changes;
            status.error = None;
            for commit_time in &confirmed {
                status.lag.record(u64::try_from(now.micros_since(*commit_time)).unwrap_or(0));
            }
            if let Some(last) = confirmed.last() {
                status.applied_commit_time = Some(*last);
            }
        });
    }
}
