//! The initial copy, from a publisher's snapshot into the target's tables.
//!
//! Tables are cut into block ranges, and each range is one target transaction that holds its rows
//! and its row in `farshore.range_copy`. Nothing that was committed is copied again after a crash:
//! finished tables stay at the consistent point they were copied at, and an unfinished one goes on
//! at a new point ([`crate::postgres::resume`]).

mod point;

use crate::ApplyError;
use crate::postgres::apart::{Below, PublishedNames};
use crate::postgres::copy_order::{CopyOrder, Standing};
use crate::postgres::follow_ddl::{Follow, FollowDdl, same_columns};
use crate::postgres::foreign_keys::CopyUnit;
use crate::postgres::in_use::BOUNDED;
use crate::postgres::log_points::{LogPoints, left_for};
use crate::postgres::noted_definition::{definition_of, load_definition, note_definition};
use crate::postgres::progress::{TABLE_COPIED, TableProgress};
use crate::postgres::resume::{Resume, Since, Touched, rows_lost, touched_between};
use crate::postgres::schema::{SchemaSettings, create_missing, lacks_tables};
use crate::postgres::session::Session;
use crate::postgres::target_table::{
    Filled, TargetTable, check_columns, rows_of_its_own, target_table,
};
use crate::remedy;
use crate::status::{SubscriptionStatus, TableCopy};
use farshore_capture::CaptureError;
use farshore_capture::publication::{PublishedTable, TableName, columns_sent};
use farshore_capture::slot;
use farshore_capture::snapshot::{BlockRange, CopyFormat, CopyPlan, cut_into_ranges, ranges_left};
use farshore_capture::source::{Snapshot, SnapshotSession, Source};
use farshore_fault as fault;
use farshore_model::{Lsn, Relation, quote_identifier};
use farshore_pg::Config;
use farshore_store::LogStore;
use futures_util::future::try_join_all;
use point::{LOG_WAIT, Point, Still};
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// How a copy is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopySettings {
    /// Connections that copy side by side, on each side.
    pub workers: usize,
    /// Blocks per range.
    pub range_blocks: u64,
}

impl Default for CopySettings {
    fn default() -> Self {
        // 8,192 blocks of 8 KiB: 64 MiB, about a second of work.
        CopySettings { workers: 4, range_blocks: 8_192 }
    }
}

/// One subscription's copy.
pub struct InitialCopy<'a> {
    /// Subscription name.
    pub subscription: &'a str,
    /// Where the rows come from.
    pub source: &'a dyn Source,
    /// Where they go.
    pub target: &'a Config,
    /// Where the log is that tells what happened since an earlier, unfinished copy.
    pub store: &'a Arc<dyn LogStore>,
    /// How.
    pub settings: CopySettings,
    /// Tables that are copied have been followed since.
    pub streaming: bool,
    /// What tables are called on the target, and whether missing ones are made.
    pub schema: &'a SchemaSettings,
    /// What is done about columns that tables gained after their copy was begun.
    pub follow_ddl: FollowDdl,
    /// Tables whose rows are all on the target are done; otherwise they wait for another run, at a
    /// point that follows everything the stream has passed over.
    pub ends: bool,
    /// Which tables.
    pub which: Which,
    /// Where to say how it goes.
    pub status: &'a Arc<Mutex<SubscriptionStatus>>,
    /// What was left for later by an earlier run.
    pub detaching: &'a LogPoints,
}

/// Which tables are copied; others are left for another run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    /// All that are not copied.
    All,
    /// Those whose copy was begun.
    Begun,
    /// These, if their copy was begun.
    These(HashSet<TableName>),
}

/// How often it is looked whether the stream has come as far as a snapshot.
const STREAM_LOOK_EVERY: Duration = Duration::from_millis(500);

/// Pause before another snapshot is tried when tables are locked.
pub const GIVE_WAY_FOR: Duration = Duration::from_millis(200);

/// What there is of an earlier copy of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Earlier {
    Nothing,
    Begun,
    /// It is to be copied anew, whatever is there.
    AskedFor,
}

impl Earlier {
    fn of(progress: Option<&TableProgress>) -> Earlier {
        match progress {
            Some(progress) if progress.asked_for => Earlier::AskedFor,
            Some(_) => Earlier::Begun,
            None => Earlier::Nothing,
        }
    }
}

/// A table that is to be copied.
struct Work {
    table: PublishedTable,
    /// Its name on the target.
    target: TableName,
    /// The target's OID of it, and what it was when `plan` was made.
    seen: (u32, (String, TableName)),
    plan: CopyPlan,
    ranges: Vec<BlockRange>,
    /// Every range is on the target already.
    finished: bool,
    /// It is copied from its first row on.
    anew: bool,
}

impl InitialCopy<'_> {
    /// Copies every published table that `known` does not list as copied. Returns the consistent
    /// point that the newly copied tables stand at.
    pub async fn run(
        &self,
        session: &mut Session,
        known: &[TableProgress],
    ) -> Result<Lsn, ApplyError> {
        let copied = self.copy(session, known).await;
        if let Err(ApplyError::GaveWay(_) | ApplyError::LogBehind { .. }) = copied {
            // A statement that was left waits for its lock until the target notices, and others
            // wait behind it.
            if let Err(error) = session.connection.cancel_token().cancel().await {
                tracing::debug!(subscription = %self.subscription, %error, "not cancelled");
            }
        }
        copied
    }

    async fn copy(
        &self,
        session: &mut Session,
        known: &[TableProgress],
    ) -> Result<Lsn, ApplyError> {
        let still = self.take_snapshot(known).await?;
        let Still { snapshot, mut source, mut published, held, point: log_point } = still;
        let point = log_point.lsn;
        tracing::info!(subscription = %self.subscription, %point, "initial copy begins");
        let copied: HashSet<TableName> = published
            .iter()
            .filter(|table| known.iter().any(|k| k.copied && k.is_still(table)))
            .map(|table| table.table.clone())
            .collect();
        session.forget_begun(self.subscription, &published, known).await?;
        let all = published.clone();
        let was_begun = |table: &PublishedTable| known.iter().any(|known| known.is_still(table));
        match &self.which {
            Which::All => {}
            Which::Begun => published.retain(was_begun),
            Which::These(these) => {
                published.retain(|table| these.contains(&table.table) && was_begun(table));
            }
        }
        self.create_tables(session, source.as_mut(), &published, &copied, &held).await?;
        let order = CopyOrder::load(session).await?;
        let standings: Vec<Standing> =
            published.iter().map(|table| self.standing(table, known)).collect();
        let over = order.start_over(&standings, self.streaming);
        let to_copy: Vec<Standing> = (0..standings.len())
            .filter(|i| over.contains(i) || !standings[*i].copied)
            .map(|i| standings[i].clone())
            .collect();
        let emptied = async {
            self.set_apart(session, &all, &to_copy, known, point).await?;
            for table in over.iter().filter_map(|i| published.get(*i)) {
                let earlier = Earlier::of(known.iter().find(|known| known.is_still(table)));
                if !self.may_empty(session, &table.table, earlier).await? {
                    self.check_empty(session, &table.table).await?;
                }
            }
            order.empty(session, self.subscription, &standings, &over).await
        };
        self.unless_in_the_way(source.as_mut(), &held, emptied).await?;
        let over: Vec<TableName> = over.iter().map(|i| standings[*i].table.clone()).collect();
        published.retain(|table| over.contains(&table.table) || !copied.contains(&table.table));
        let names: Vec<TableName> =
            published.iter().map(|table| self.schema.names.table(&table.table)).collect();
        let stages = order.stages(self.subscription, &names)?;
        // What left the publication and came back is another table to us.
        let known: Vec<&TableProgress> =
            known.iter().filter(|k| published.iter().any(|table| k.is_still(table))).collect();
        let log_begins = slot::log_begins(self.store.as_ref()).unwrap_or(Lsn::MAX);
        let (mut begun, mut had_rows) = (HashMap::new(), HashSet::new());
        for table in &published {
            if let Some(progress) = known.iter().find(|progress| progress.table == table.table) {
                if over.contains(&table.table) {
                    continue;
                }
                let done = session.load_ranges(self.subscription, &table.table).await?;
                if !done.ranges.is_empty() {
                    had_rows.insert(table.table.clone());
                }
                let definition = load_definition(session, self.subscription, &table.table).await?;
                let is_same = |before: &Relation| same_columns(before, &definition_of(table));
                if done.file_node == table.file_node
                    && definition.is_ok_and(|before| before.as_ref().is_some_and(is_same))
                    && !progress.column_numbers.are_replaced_in(table)
                    && progress.enum_labels.renamed(&table.labels).is_empty()
                    && progress.copied_at >= log_begins
                    && !done.ranges.is_empty()
                {
                    let since = Since { point: progress.copied_at, oid: Some(table.oid) };
                    begun.insert(table.table.clone(), (since, done.ranges));
                }
            }
        }
        let beginning = async {
            let mut touched = self.touched_since(&begun, &log_point).await?;
            // Its own session: the other one looks out for who waits meanwhile.
            let mut reader = match begun.is_empty() {
                true => None,
                false => Some(snapshot.open().await?),
            };
            let mut work = Vec::new();
            for table in published {
                let name = table.table.clone();
                let progress = known.iter().find(|progress| progress.table == name);
                let earlier = begun.remove(&name).zip(touched.remove(&name));
                let item = match (earlier, &mut reader) {
                    (Some(((_, done), touched)), Some(reader)) => {
                        self.go_on(session, reader.as_mut(), table, &done, &touched, point).await?
                    }
                    _ => {
                        let earlier = Earlier::of(progress.copied());
                        self.start(session, table, earlier, point).await?
                    }
                };
                work.push(item);
            }
            if let Some(reader) = reader {
                reader.close().await;
            }
            Ok::<_, ApplyError>(work)
        };
        let mut work = self.unless_in_the_way(source.as_mut(), &held, beginning).await?;
        self.set_copies(&work, &had_rows);
        for work in work.iter().filter(|work| work.finished && self.ends) {
            self.finish_table(session, work).await?;
        }
        for unit in stages.iter().flatten() {
            if let CopyUnit::Together(all) = unit {
                all.iter().for_each(|index| work[*index].ranges = cut_into_ranges(0, 1));
            }
        }
        let left: Vec<usize> = work.iter().map(|work| work.ranges.len()).collect();
        let shared = Mutex::new(Shared { queue: VecDeque::new(), left });
        let copying = async {
            for stage in &stages {
                shared.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).queue =
                    stage.iter().flat_map(|unit| jobs(unit, &work)).collect();
                let workers = 0..self.settings.workers.max(1);
                let worker = |_| self.worker(snapshot.as_ref(), &log_point, &work, &shared);
                try_join_all(workers.map(worker)).await?;
            }
            Ok::<(), ApplyError>(())
        };
        self.unless_in_the_way(source.as_mut(), &held, copying).await?;
        self.set_waits(None);
        source.close().await;
        snapshot.close().await;
        Ok(point)
    }

    /// Sees to it that no table is emptied or filled on the target as a part of another one. What is
    /// published by itself is detached there, behind everything that came for it through the root.
    async fn set_apart(
        &self,
        session: &mut Session,
        published: &[PublishedTable],
        to_copy: &[Standing],
        known: &[TableProgress],
        point: Lsn,
    ) -> Result<(), ApplyError> {
        if to_copy.is_empty() {
            return Ok(());
        }
        let PublishedNames { tables, roots } = PublishedNames::of(published, self.schema);
        let copying = |target: &TableName| to_copy.iter().find(|table| table.target == *target);
        let filled = session.filled_below(self.subscription, &tables, &tables).await?;
        self.detaching.keep(published).await;
        for below in filled {
            let now = published.iter().find(|t| self.schema.names.table(&t.table) == below.table);
            let root_anew = copying(&below.root);
            let is_ours = below.filled_by.is_none();
            // What was attached on the publisher since is a part of its root there, too.
            if is_ours && now.is_none() {
                continue;
            }
            if let Some(now) = now.filter(|_| is_ours && roots.contains(&below.root)) {
                if root_anew.is_none() {
                    if copying(&below.table).is_none() {
                        continue;
                    }
                    let point = self.detaching.seen_at(now, point);
                    self.await_stream(session, published, &below, known, point).await?;
                }
                session.set_apart(self.subscription, self.schema, &below).await?;
                self.detaching.forget(now);
            } else if let Some(root) = root_anew
                && (root.begun || copying(&below.table).is_none())
            {
                return Err(below.error(self.subscription, "Its root is to be copied"));
            }
        }
        Ok(())
    }

    /// Waits until the stream has left nothing of the root in the log before `point`, at which the
    /// partition was published by itself: its rows would find no place once it is detached.
    async fn await_stream(
        &self,
        session: &mut Session,
        published: &[PublishedTable],
        below: &Below,
        known: &[TableProgress],
        point: Lsn,
    ) -> Result<(), ApplyError> {
        let root = published.iter().find(|t| self.schema.names.table(&t.table) == below.root);
        let root = root.and_then(|root| known.iter().find(|known| known.table == root.table));
        let Some(root) = root.filter(|_| self.streaming) else { return Ok(()) };
        self.await_log(point).await?;
        let begun = Instant::now();
        loop {
            let progress = session.load_progress(self.subscription).await?;
            let applied = progress.map_or(Lsn::ZERO, |progress| progress.applied);
            if let Some(Touched::Nothing) = left_for(self.store, root, applied, point).await? {
                return Ok(());
            }
            if self.ends {
                return Err(ApplyError::StreamFirst(format!(
                    "subscription \"{}\": table {} is copied once what came for it through {} is \
                     applied",
                    self.subscription, below.table, below.root
                )));
            }
            // The snapshot's locks and its slot are not held for as long as the stream may take.
            if begun.elapsed() >= LOG_WAIT {
                return Err(ApplyError::GaveWay(format!(
                    "subscription \"{}\": the stream has not come as far as the snapshot ({point}) \
                     within {LOG_WAIT:?}; another snapshot is taken later",
                    self.subscription
                )));
            }
            tokio::time::sleep(STREAM_LOOK_EVERY).await;
        }
    }

    fn standing(&self, published: &PublishedTable, known: &[TableProgress]) -> Standing {
        let progress = known.iter().find(|progress| progress.is_still(published));
        Standing {
            table: published.table.clone(),
            target: self.schema.names.table(&published.table),
            begun: progress.is_some(),
            copied: progress.is_some_and(|progress| progress.copied),
        }
    }

    /// Makes the tables that the target lacks, and partitions of what is to be copied.
    async fn create_tables(
        &self,
        session: &mut Session,
        source: &mut dyn SnapshotSession,
        published: &[PublishedTable],
        copied: &HashSet<TableName>,
        held: &[u32],
    ) -> Result<(), ApplyError> {
        let names = published.iter().map(|table| &table.table);
        if let Some((one, other, target)) = self.schema.names.collision(names) {
            return Err(ApplyError::Setup(format!(
                "subscription \"{}\": tables {one} and {other} would both be {target} on the \
                 target. Give one of them another name in the site file's mapping",
                self.subscription
            )));
        }
        let uncopied: Vec<&PublishedTable> =
            published.iter().filter(|table| !copied.contains(&table.table)).collect();
        let missing: HashSet<TableName> =
            uncopied.iter().map(|table| table.table.clone()).collect();
        // A partitioned table that is there may lack partitions: of those, rows come with its own.
        let has_partitions = uncopied.iter().any(|table| table.partitioned);
        if !self.schema.create_tables
            || !has_partitions && !lacks_tables(session, self.schema, &missing).await?
        {
            return Ok(());
        }
        let oids: Vec<u32> = uncopied.iter().map(|table| table.oid).collect();
        let definitions = source.definitions(&oids).await?.as_sent(&columns_sent(published));
        let (name, schema) = (self.subscription, self.schema);
        let created = create_missing(session, name, schema, &definitions, &missing, copied);
        self.unless_in_the_way(source, held, created).await
    }

    /// What happened to the tables of an earlier, unfinished copy since it took their rows.
    async fn touched_since(
        &self,
        begun: &HashMap<TableName, (Since, Vec<BlockRange>)>,
        point: &Point,
    ) -> Result<HashMap<TableName, Touched>, ApplyError> {
        let since: HashMap<TableName, Since> =
            begun.iter().map(|(table, (since, _))| (table.clone(), *since)).collect();
        if since.is_empty() {
            return Ok(HashMap::new());
        }
        self.log_has(point).await?;
        touched_between(self.store, &since, point.lsn).await
    }

    /// A table that is copied from its first row on.
    async fn start(
        &self,
        session: &mut Session,
        table: PublishedTable,
        earlier: Earlier,
        point: Lsn,
    ) -> Result<Work, ApplyError> {
        let target = self.schema.names.table(&table.table);
        let is_ours =
            earlier != Earlier::Nothing && self.may_empty(session, &table.table, earlier).await?;
        if is_ours && let Some(there) = target_table(session, &target).await? {
            // Its rows are ours: the copy's first act was to find the table empty.
            let rows = rows_of_its_own(&target, there.partitioned);
            self.empty_table(session, &table.table, (&target, &rows)).await?;
            self.follow(session, &table).await?;
        }
        let (there, plan) = self.check_target(session, &table).await?;
        let name = &table.table;
        if !is_ours {
            self.check_empty(session, name).await?;
        }
        fault::point("snapshot.before-state");
        session.simple("BEGIN").await?;
        // Ranges of an earlier copy of another table of that name.
        session
            .execute(
                "DELETE FROM farshore.range_copy \
                 WHERE subscription = $1 AND schema_name = $2 AND table_name = $3",
                &[Some(self.subscription), Some(&name.schema), Some(&name.name)],
            )
            .await?;
        session.note_begun(self.subscription, &table, point).await?;
        let (definition, names) = (definition_of(&table), (name, &target));
        note_definition(session, self.subscription, names, &definition).await?;
        session.claim_table(self.subscription, name, &target, is_ours).await?;
        session.simple("COMMIT").await?;
        fault::point("snapshot.after-state");
        // A partitioned table has no blocks of its own.
        let blocks = if table.partitioned { 0 } else { table.blocks };
        let ranges = cut_into_ranges(blocks, self.settings.range_blocks);
        let seen = (there.oid, (there.stamp, target.clone()));
        Ok(Work { table, target, seen, plan, ranges, finished: false, anew: true })
    }

    /// Whether the rows on the target of a table whose copy was begun are there by that copy. They
    /// are another's where the table is not the one that it was begun into: it was made again, or the
    /// site file gives it another name.
    async fn may_empty(
        &self,
        session: &mut Session,
        table: &TableName,
        earlier: Earlier,
    ) -> Result<bool, ApplyError> {
        let target = self.schema.names.table(table);
        if !session.is_remade(self.subscription, table, &target).await? {
            return Ok(true);
        }
        if earlier == Earlier::AskedFor {
            session.check_unclaimed(self.subscription, &target).await?;
        }
        Ok(earlier == Earlier::AskedFor)
    }

    /// Refuses to copy a table to where rows are.
    async fn check_empty(
        &self,
        session: &mut Session,
        table: &TableName,
    ) -> Result<(), ApplyError> {
        let target = self.schema.names.table(table);
        let Some(there) = target_table(session, &target).await? else { return Ok(()) };
        let rows = rows_of_its_own(&target, there.partitioned);
        if session.query(&format!("SELECT 1 FROM {rows} LIMIT 1"), &[]).await?.is_empty() {
            return Ok(());
        }
        // Or it would be emptied under who fills it.
        session.check_unclaimed(self.subscription, &target).await?;
        let known = session.load_tables(self.subscription).await?;
        let noted = known.into_iter().find(|known| known.table == *table);
        let was_copied = noted.as_ref().is_some_and(|noted| noted.copied);
        if let Some((other, oid)) = noted.and_then(|noted| noted.renamed.zip(noted.oid)) {
            return Err(ApplyError::Renamed {
                subscription: self.subscription.to_owned(),
                table: Box::new(table.clone()),
                other: Box::new(other),
                oid,
            });
        }
        if was_copied {
            return Err(ApplyError::Setup(format!(
                "subscription \"{}\": table {target} on the target has rows already, and it is to be \
                 copied anew (it left the publication or changed its filter or columns, or is another \
                 table under its name). To have it emptied and copied: {}; or empty it (TRUNCATE \
                 {target}; not with CASCADE, which empties what refers to it) or take it out of the \
                 publication. Then go on (farshore resume)",
                self.subscription,
                remedy::resync(self.subscription, Some(table))
            )));
        }
        Err(ApplyError::Setup(format!(
            "subscription \"{}\": table {target} on the target has rows already, and it is to be \
             copied (it is new here, or it left the publication or changed its filter or \
             columns, or its copy was noted in the target's schema farshore and that was emptied or \
             dropped). Empty it (TRUNCATE {target}) or take it out of the publication, and \
             go on (farshore resume)",
            self.subscription
        )))
    }

    /// A table whose copy was begun at an earlier point: what is on the target stays.
    async fn go_on(
        &self,
        session: &mut Session,
        source: &mut dyn SnapshotSession,
        table: PublishedTable,
        done: &[BlockRange],
        touched: &Touched,
        point: Lsn,
    ) -> Result<Work, ApplyError> {
        let starts_over = match touched {
            Touched::Truncated => Some("it was truncated"),
            Touched::Unknown(why) => Some(*why),
            // A row that moved from one range to another has left no trace.
            _ if table.updates_untold => Some("its updates are not published, nor what they moved"),
            Touched::Keys { .. } if table.old_keys_untold => {
                Some("a partition has another replica identity, and rows were changed")
            }
            Touched::Nothing | Touched::Keys { .. } => None,
        };
        if let Some(why) = starts_over {
            tracing::info!(
                subscription = %self.subscription,
                table = %table.table,
                "the copy of this table starts over: {why} since it was begun"
            );
            return self.start(session, table, Earlier::Begun, point).await;
        }
        let into = self.schema.names.table(&table.table);
        if session.is_remade(self.subscription, &table.table, &into).await? {
            tracing::warn!(
                subscription = %self.subscription, table = %table.table,
                "the table on the target was dropped and made again: its copy starts over"
            );
            return self.start(session, table, Earlier::Begun, point).await;
        }
        let (there, plan) = self.check_target(session, &table).await?;
        let seen = (there.oid, (there.stamp.clone(), into.clone()));
        let resume = Resume {
            subscription: self.subscription,
            table: &table,
            target: &into,
            there,
            plan: &plan,
            done,
            point,
        };
        // Never wait behind somebody who waits for us.
        if !source.hold_still(std::slice::from_ref(&table)).await? {
            return Err(self.gives_way());
        }
        let rows = resume.bring_forward(source, session, touched).await?;
        let ranges = ranges_left(done, table.blocks, self.settings.range_blocks);
        tracing::info!(
            subscription = %self.subscription,
            table = %table.table,
            ranges_done = done.len(),
            ranges_left = ranges.len(),
            rows_changed_meanwhile = rows,
            "the copy of this table goes on where it stopped"
        );
        let finished = ranges.is_empty();
        Ok(Work { table, target: into, seen, plan, ranges, finished, anew: false })
    }

    /// Adds what a table that was copied before, and is empty now, lacks of the publisher's columns:
    /// a change that would have brought them may be long in coming.
    async fn follow(
        &self,
        session: &mut Session,
        table: &PublishedTable,
    ) -> Result<(), ApplyError> {
        let name = self.schema.names.table(&table.table);
        let Some(target) = target_table(session, &name).await? else { return Ok(()) };
        let has = |column: &str| target.columns.iter().any(|there| there.name == column);
        if self.follow_ddl == FollowDdl::Stop || table.columns.iter().all(|c| has(&c.name)) {
            return Ok(());
        }
        let relation = definition_of(table);
        let follow = Follow {
            subscription: self.subscription,
            policy: self.follow_ddl,
            puts_drops_off: true,
            // Nothing is renamed for a copy.
            at: Lsn::MAX,
            source: self.source,
            names: &self.schema.names,
            table: &name,
            relation: &relation,
            is_copied_anew: true,
            root: OnceLock::new(),
        };
        session.simple("BEGIN").await?;
        follow.follow(session, &target).await?;
        session.simple("COMMIT").await
    }

    /// Checks that the target's table can take the rows, and says how they travel.
    async fn check_target(
        &self,
        session: &mut Session,
        table: &PublishedTable,
    ) -> Result<(TargetTable, CopyPlan), ApplyError> {
        let name = self.schema.names.table(&table.table);
        if let Some(column) = &table.unsent_key {
            return Err(ApplyError::Setup(format!(
                "subscription \"{}\": the publisher's table {} tells rows apart by the generated \
                 column {}, which it does not send. On the publisher: ALTER TABLE {1} REPLICA \
                 IDENTITY FULL, or USING INDEX one of other columns; or take the table out of the \
                 publication",
                self.subscription,
                table.table,
                farshore_model::quote_identifier(column)
            )));
        }
        let target = target_table(session, &name).await?;
        let names = table.columns.iter().map(|column| column.name.as_str());
        let both = (&table.table, &name);
        check_columns(self.subscription, both, names, target.as_ref(), Filled::NotYet)?;
        let target = target.unwrap_or_default();
        let casts = target.casts(self.subscription, &name, table)?;
        let binary = table.binary_safe && table.binary_copy;
        let format = if binary { CopyFormat::Binary } else { CopyFormat::Text };
        Ok((target, CopyPlan { format, casts }))
    }

    async fn empty_table(
        &self,
        session: &mut Session,
        name: &TableName,
        (target, rows): (&TableName, &str),
    ) -> Result<(), ApplyError> {
        let forget = format!(
            "DELETE FROM farshore.range_copy WHERE subscription = {} AND schema_name = {} AND \
             table_name = {}",
            farshore_pg::quote_literal(self.subscription),
            farshore_pg::quote_literal(&name.schema),
            farshore_pg::quote_literal(&name.name)
        );
        let empty = format!("TRUNCATE {rows}");
        let truncate = format!("BEGIN; {BOUNDED}; {empty}; {forget}; COMMIT");
        match session.connection.simple_query(&truncate).await {
            Ok(_) => Ok(()),
            // Referenced by foreign keys (0A000), or no TRUNCATE privilege (42501).
            Err(error) if matches!(error.sqlstate(), Some("0A000" | "42501")) => {
                session.simple("ROLLBACK").await?;
                let delete = format!("BEGIN; DELETE FROM {rows}; {forget}; COMMIT");
                session.simple(&delete).await
            }
            Err(error) => {
                let tables = std::slice::from_ref(target);
                Err(session.in_use_or(error, self.subscription, &empty, tables).await)
            }
        }
    }

    async fn worker(
        &self,
        snapshot: &dyn Snapshot,
        point: &Point,
        work: &[Work],
        shared: &Mutex<Shared>,
    ) -> Result<(), ApplyError> {
        let next =
            || shared.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).queue.pop_front();
        let Some(mut job) = next() else { return Ok(()) };
        let mut source = snapshot.open().await?;
        let name = format!("farshore {} copy", self.subscription);
        let mut target = Session::connect(self.target, &name).await?;
        target.join_copy(self.subscription).await?;
        loop {
            self.copy_job(source.as_mut(), &mut target, point, work, &job).await?;
            for (index, _) in job {
                let finished = {
                    let mut shared = shared.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
                    shared.left[index] -= 1;
                    shared.left[index] == 0
                };
                if finished && self.ends {
                    self.finish_table(&mut target, &work[index]).await?;
                }
            }
            match next() {
                Some(next) => job = next,
                None => return Ok(()),
            }
        }
    }

    /// One target transaction: a range, or several tables that refer to each other.
    async fn copy_job(
        &self,
        source: &mut dyn SnapshotSession,
        target: &mut Session,
        point: &Point,
        work: &[Work],
        job: &Job,
    ) -> Result<(), ApplyError> {
        target.simple("BEGIN").await?;
        if job.len() > 1 {
            target.simple("SET CONSTRAINTS ALL DEFERRED").await?;
        }
        let mut copied = Vec::new();
        for (index, range) in job {
            copied.push(self.copy_range(source, target, &work[*index], *range, *index).await?);
        }
        self.log_has(point).await?;
        fault::point("snapshot.before-range-commit");
        let seen = job.iter().map(|(index, _)| work[*index].seen.clone()).collect();
        target.commit_unaltered(self.subscription, &seen).await?;
        fault::point("snapshot.after-range-commit");
        // What it was tried again for is over.
        self.set_waits(None);
        for ((index, _), (rows, bytes)) in job.iter().zip(copied) {
            self.update_copy(*index, |copy| {
                copy.bytes += bytes;
                copy.rows += rows;
                copy.ranges_done += 1;
            });
        }
        let mut status = self.status.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        status.copied_ranges += job.len() as u64;
        Ok(())
    }

    /// Returns the rows, and the bytes that are not reported yet.
    async fn copy_range(
        &self,
        source: &mut dyn SnapshotSession,
        target: &mut Session,
        work: &Work,
        range: BlockRange,
        index: usize,
    ) -> Result<(u64, u64), ApplyError> {
        let table = &work.table;
        let columns: Vec<String> =
            table.columns.iter().map(|column| quote_identifier(&column.name)).collect();
        let list =
            if columns.is_empty() { String::new() } else { format!(" ({})", columns.join(", ")) };
        let into =
            format!("COPY {}{list} FROM STDIN (FORMAT {})", work.target, work.plan.format.sql());
        // Never wait behind somebody who waits for us.
        if !source.hold_still(std::slice::from_ref(table)).await? {
            return Err(self.gives_way());
        }
        let refused = |error| self.refused_values(work, error);
        let mut rows_out = source.copy_range(table, range, &work.plan).await.map_err(refused)?;
        let server = self.target.redacted();
        let target_error = |error| ApplyError::Target { server: server.clone(), error };
        let mut rows_in = target.connection.copy_in(&into).await.map_err(target_error)?;
        let (mut bytes, mut reported) = (0_u64, Instant::now());
        while let Some(pieces) = rows_out.next().await.map_err(refused)? {
            for data in pieces {
                rows_in.send(&data).await.map_err(target_error)?;
                bytes += data.len() as u64;
            }
            if reported.elapsed() > Duration::from_millis(200) {
                self.update_copy(index, |copy| copy.bytes += std::mem::take(&mut bytes));
                reported = Instant::now();
            }
        }
        let rows = rows_in.finish().await.map_err(target_error)?;
        if let Some(sent) = rows_out.rows().filter(|sent| *sent != rows) {
            return Err(rows_lost(self.subscription, &work.target, rows, sent));
        }
        let end = range.end.map(|end| end.to_string());
        target
            .execute(
                "INSERT INTO farshore.range_copy \
                 (subscription, schema_name, table_name, start_block, end_block, row_count) \
                 VALUES ($1, $2, $3, $4::text::bigint, $5::text::bigint, $6::text::bigint)",
                &[
                    Some(self.subscription),
                    Some(&table.table.schema),
                    Some(&table.table.name),
                    Some(&range.start.to_string()),
                    end.as_deref(),
                    Some(&rows.to_string()),
                ],
            )
            .await?;
        Ok((rows, bytes))
    }

    /// What the publisher says of rows that it is to cast: it names neither the table nor the column.
    fn refused_values(&self, work: &Work, error: CaptureError) -> ApplyError {
        let both = work.table.columns.iter().zip(&work.plan.casts);
        let cast = both.filter_map(|(column, cast)| Some((&column.name, cast.as_ref()?)));
        let cast: Vec<String> =
            cast.map(|(name, cast)| format!("{} as {cast}", quote_identifier(name))).collect();
        if cast.is_empty() || error.is_transient() {
            return error.into();
        }
        ApplyError::Setup(format!(
            "subscription \"{}\": the publisher's table {} cannot be copied with the types that columns \
             have on the target ({}): {error}. Where that does not hold every value, give the column the \
             publisher's type there (ALTER TABLE {} ALTER COLUMN … TYPE …), and go on (farshore resume)",
            self.subscription,
            work.table.table,
            cast.join(", "),
            work.target
        ))
    }

    async fn finish_table(&self, target: &mut Session, work: &Work) -> Result<(), ApplyError> {
        let literal = farshore_pg::quote_literal;
        let (name, schema, table) = (
            literal(self.subscription),
            literal(&work.table.table.schema),
            literal(&work.table.table.name),
        );
        let this =
            format!("subscription = {name} AND schema_name = {schema} AND table_name = {table}");
        target
            .simple(&format!(
                "BEGIN; UPDATE farshore.table_copy SET state = '{TABLE_COPIED}' WHERE {this}; \
                 DELETE FROM farshore.range_copy WHERE {this}; COMMIT"
            ))
            .await?;
        tracing::info!(
            subscription = %self.subscription,
            table = %work.table.table,
            "table copied"
        );
        Ok(())
    }

    /// `had_rows` are tables of which an earlier run left ranges on the target.
    fn set_copies(&self, work: &[Work], had_rows: &HashSet<TableName>) {
        let copies = work
            .iter()
            .map(|work| TableCopy {
                table: work.table.table.to_string(),
                ranges: work.ranges.len() as u64,
                bytes_total: work.table.bytes,
                starts_over: work.anew && had_rows.contains(&work.table.table),
                ..TableCopy::default()
            })
            .collect();
        self.status.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).copies = copies;
    }

    fn set_waits(&self, why: Option<String>) {
        self.status.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).copy_waits = why;
    }

    fn update_copy(&self, index: usize, change: impl FnOnce(&mut TableCopy)) {
        let mut status = self.status.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(copy) = status.copies.get_mut(index) {
            change(copy);
        }
    }
}

/// Ranges that are copied in one transaction, with the number of their table's work.
type Job = Vec<(usize, BlockRange)>;

fn jobs(unit: &CopyUnit, work: &[Work]) -> Vec<Job> {
    let ranges = |index: usize| work[index].ranges.iter().map(move |range| (index, *range));
    match unit {
        CopyUnit::Apart(index) => ranges(*index).map(|range| vec![range]).collect(),
        CopyUnit::Together(all) => vec![all.iter().flat_map(|index| ranges(*index)).collect()],
    }
}

/// What the workers of a copy share.
struct Shared {
    queue: VecDeque<Job>,
    /// Ranges of each table that are not committed yet.
    left: Vec<usize>,
}
