//! Where an agent starts: what the target has, whether the log goes on from there, which tables
//! are copied, and which are to be.

use super::unlogged::note_attached;
use super::{Initialise, Subscription, SubscriptionSpec};
use crate::ApplyError;
use crate::backup::{self, claim_anew};
use crate::cut_offs::Ending;
use crate::postgres::apart::{Below, PublishedNames};
use crate::postgres::initial_copy::Which;
use crate::postgres::log_points::{LogPoints, POINT_WITHIN, left_for};
use crate::postgres::progress::{Opened, Progress, Requests, TableProgress, state};
use crate::postgres::resume::Touched;
use crate::postgres::schema::create_missing;
use crate::postgres::session::Session;
use crate::remedy;
use crate::status::Phase;
use farshore_capture::publication::{PublishedTable, TableName, columns_sent};
use farshore_capture::slot;
use farshore_capture::source::Source;
use farshore_model::{Applied, Lsn};
use farshore_pg::quote_literal;
use farshore_store::{Cursor, StoreError};
use std::collections::{BTreeSet, HashSet};
use std::time::Duration;

/// How long to wait for the connection of an agent that died to leave the target.
pub(crate) const LOCK_WAIT: Duration = Duration::from_secs(10);

/// A backlog waits so long for capture to be there: before the publisher was asked what it publishes,
/// a table that has left and come back counts as copied.
const CAPTURE_WITHIN: Duration = Duration::from_secs(1);

/// How long streaming waits for a publisher that does not answer. It is asked again beside the stream.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(60);

/// Where streaming starts, and what is copied.
pub(crate) struct Start {
    /// What the target has.
    pub applied: Lsn,
    /// Progress keeps the newest transaction.
    pub keeps_newest: bool,
    /// Copied tables.
    pub tables: Vec<TableProgress>,
    /// Published tables that are otherwise than was noted of them still, as they were when that was
    /// looked at.
    pub otherwise: Vec<PublishedTable>,
    /// Tables that are copied while the others stream.
    pub beside: Vec<TableProgress>,
    /// Every state is a prefix from here on.
    pub consistent_at: Lsn,
    /// Capture's connection at which the publisher was asked for new tables.
    pub asked: u64,
    /// It did not answer.
    pub ask_again: bool,
    /// Tables that joined are copied only after something has been detached on the target.
    pub copies_wait: bool,
    /// Something is still to be detached on the target: it is started again for that after so long.
    pub again_after: Option<Duration>,
    /// Foreign keys are to be added when every state is a prefix.
    pub foreign_keys_wait: bool,
    /// Transactions that an operator wants left out.
    pub skips: BTreeSet<Lsn>,
}

/// What a look for tables that are not copied came to.
#[derive(Default)]
struct Looked {
    /// All that the publisher publishes, if it was asked and said so.
    published: Option<Vec<PublishedTable>>,
    /// It did not say so.
    ask_again: bool,
    /// To be copied while the others stream.
    beside: Vec<TableProgress>,
    /// Some were copied.
    copied: bool,
    /// Some cannot be copied before something is detached on the target.
    copies_wait: bool,
}

impl Start {
    /// What the target is once it has everything up to `position`.
    pub fn state_at(&self, position: Lsn) -> &'static str {
        if position >= self.consistent_at { state::STREAMING } else { state::CATCHING_UP }
    }
}

impl SubscriptionSpec {
    /// Copied tables that the publisher still has as it had them, each with its name on the target.
    /// Where its OID is not known, of one that the publication does not list by itself (all of a
    /// database or a schema, a partition) nobody can tell whether it was made again there too.
    fn copied_to(
        &self,
        tables: &[TableProgress],
        published: &[PublishedTable],
    ) -> Vec<(TableName, TableName)> {
        let is_same = |copied: &TableProgress, now: &PublishedTable| {
            let membership = copied.membership;
            let is_listed = membership == now.membership
                && membership != 0
                && !now.memberships_above.contains(&membership);
            copied.table == now.table && copied.oid.map_or(is_listed, |oid| oid == now.oid)
        };
        let copied = tables.iter().filter(|copied| copied.copied);
        let copied = copied.filter(|copied| published.iter().any(|now| is_same(copied, now)));
        copied.map(|p| (p.table.clone(), self.schema.names.table(&p.table))).collect()
    }
}

/// Where the newest copy stands.
fn newest_copy(tables: &[TableProgress]) -> Lsn {
    tables.iter().map(|table| table.copied_at).max().unwrap_or(Lsn::ZERO)
}

/// How a target that was filled from another publisher is copied from this one.
fn from_this_publisher(subscription: &str, state: &str) -> String {
    // While a copy is under way no other can be asked for: it is forgotten, and nothing else that
    // other subscriptions keep in the same schema.
    if state == state::COPYING {
        return format!(
            "to copy from this one, empty this subscription's tables on the target, DELETE FROM \
             farshore.subscription WHERE name = {} there, and go on (farshore resume)",
            quote_literal(subscription)
        );
    }
    format!(
        "to have all its tables emptied and copied anew from this one: {}, then farshore resume",
        remedy::resync(subscription, None)
    )
}

/// Those that are not copied.
pub(crate) fn joined(
    mut published: Vec<PublishedTable>,
    known: &[TableProgress],
) -> Vec<PublishedTable> {
    published.retain(|table| !known.iter().any(|k| k.copied && k.is_still(table)));
    published
}

/// Tables that are published now; `None` when the publisher cannot be asked. Streaming goes on then,
/// and asks again later.
pub(crate) async fn published(
    source: &dyn Source,
    subscription: &str,
) -> Option<Vec<PublishedTable>> {
    match source.published_tables().await {
        Ok(published) => Some(published),
        Err(error) => {
            tracing::info!(
                %subscription, %error,
                "the publisher does not say which tables it publishes; it is asked again"
            );
            None
        }
    }
}

impl Subscription {
    /// Connects, unless there is a `session`, and says where streaming starts. A first copy is done
    /// here; tables that joined the publication since, or are copied anew, are left to be copied
    /// beside the stream, unless that was done: then their copy ends here. `no_place_in` tells in
    /// which table of the target a row found no partition: then a publisher that cannot be asked is
    /// an error.
    pub(super) async fn start(
        &self,
        session: Option<Session>,
        ending: &Ending,
        no_place_in: Option<&str>,
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
            self.check_origin(progress, &tables)?;
        }
        // Before anything is copied. A log that was begun anew is seen below.
        let begins = slot::log_begins(self.store.as_ref());
        if progress.as_ref().is_none_or(|progress| begins.is_some_and(|b| progress.applied >= b)) {
            self.check_not_ahead(progress.as_ref(), newest_copy(&tables))?;
            self.check_same_log(progress.as_ref()).await?;
        }
        let cursor = self.store.register_cursor(name)?;
        let awaits_backup = progress.is_none() && self.spec.initialise == Initialise::Backup;
        let unfinished = progress.as_ref().is_none_or(|progress| progress.state == state::COPYING);
        let cursor = match cursor.expired {
            // All is copied anew, or restored: the log is to be kept from here on.
            Some(_) if unfinished => {
                let anew = claim_anew(self.store.as_ref(), name)?;
                if awaits_backup {
                    tracing::warn!(
                        subscription = %name, from = %anew.applied,
                        "retention dropped log that was kept for its backup: a backup that was \
                         taken until now cannot be gone on from, and the log is kept from here on"
                    );
                }
                anew
            }
            _ => cursor,
        };
        if awaits_backup {
            return Err(self.waits_for_backup(cursor.applied));
        }
        if let (Some(start), false) = (cursor.expired, unfinished) {
            return Err(self.gap(start));
        }
        // What is published is asked once, when capture is there, unless that takes long.
        let mut ready = self.capture_ready.clone();
        let _ =
            tokio::time::timeout(CAPTURE_WITHIN, ready.wait_for(|sessions| *sessions > 0)).await;
        let asked = *self.capture_ready.borrow();
        if let Some(progress) = &progress {
            // Which publisher it is may be known only now.
            self.check_origin(progress, &tables)?;
        }
        let looked = if unfinished {
            let which = Which::All;
            self.copy_waiting(&mut session, progress.as_ref(), cursor.applied, which).await?;
            Looked { copied: true, ..Looked::default() }
        } else {
            let progress = progress.as_ref();
            self.look_for_uncopied(&mut session, progress, &tables, cursor.applied, ending).await?
        };
        let Looked { published, ask_again, beside, copied, copies_wait } = looked;
        let mut is_known = !copied && beside.is_empty();
        let (mut unlogged_waits, mut notes_wait) = (false, false);
        if !is_known {
            tables = session.load_tables(name).await?;
            progress = session.load_progress(name).await?;
        }
        if let Some(published) = &published {
            note_attached(&mut session, name, published, &mut tables).await?;
            if let Some(Progress { applied, .. }) = progress {
                let seen = (published.as_slice(), applied);
                notes_wait = self.note_unlogged(&mut session, seen, &mut tables).await?;
                unlogged_waits =
                    self.look_for_unlogged(&mut session, published, &mut tables, applied).await?;
            }
        }
        if let (Some(published), Some(progress)) = (&published, &progress) {
            let all_apart = self
                .set_apart(&mut session, published, &tables, progress.applied, no_place_in)
                .await?;
            if all_apart && !copies_wait && !unlogged_waits {
                self.nothing_is_left();
            }
        }
        if asked > 0 && self.spec.schema.create_tables {
            is_known &=
                !self.create_partitions(&mut session, &tables, no_place_in.is_some()).await?;
        }
        let progress = progress.ok_or_else(|| {
            ApplyError::NotYet(format!("subscription \"{name}\": its progress row has gone"))
        })?;
        let newest = newest_copy(&tables);
        tables.retain(|table| table.copied && !beside.iter().any(|b| b.table == table.table));
        let consistent_at = if beside.is_empty() {
            self.release_log_of_copy()?;
            newest_copy(&tables)
        } else {
            Lsn::MAX
        };
        self.place_cursor(&progress, newest, cursor).await?;
        if !is_known {
            requests = session.load_requests(name).await?;
        }
        let mut otherwise = Vec::new();
        if let Some(published) = published {
            session.check_remade(name, &self.spec.copied_to(&tables, &published)).await?;
            let is_otherwise =
                |now: &PublishedTable| tables.iter().any(|table| table.is_otherwise(now));
            otherwise.extend(published.into_iter().filter(is_otherwise));
        }
        let Requests { skips, foreign_keys_wait } = requests;
        let applied = progress.applied;
        let consistent = applied >= consistent_at;
        if consistent && foreign_keys_wait {
            session.add_foreign_keys(name).await?;
        }
        let is_left = self.lock_status().left_for_later.is_some();
        // What is copied beside the stream is not cut off for it; its end is a start, too.
        let again_after = match beside.is_empty() {
            true if is_left => Some(self.detaching.pause()),
            true if unlogged_waits => Some(self.unlogged.pause()),
            true if notes_wait => Some(self.noting.pause()),
            true | false => None,
        };
        let foreign_keys_wait = !consistent && foreign_keys_wait;
        let start = Start {
            applied,
            keeps_newest: progress.keeps_newest,
            tables,
            otherwise,
            beside,
            consistent_at,
            asked,
            ask_again,
            copies_wait,
            again_after,
            foreign_keys_wait,
            skips,
        };
        Ok((session, start))
    }

    fn waits_for_backup(&self, pinned: Applied) -> ApplyError {
        let name = &self.spec.name;
        match slot::log_begins(self.store.as_ref()) {
            Some(begins) => backup::waits(name, pinned.0.max(begins)),
            None => ApplyError::NotYet(format!(
                "subscription \"{name}\" is to be initialised from a backup, and none may be taken \
                 yet: its log has not begun"
            )),
        }
    }

    /// Finds what a subscription that was copied once has not copied: tables that joined since, or
    /// are copied anew. They are copied here if nothing can stream beside them; and what is to be
    /// ended is ended here, whatever else has joined.
    async fn look_for_uncopied(
        &self,
        session: &mut Session,
        progress: Option<&Progress>,
        tables: &[TableProgress],
        pinned: Applied,
        ending: &Ending,
    ) -> Result<Looked, ApplyError> {
        let half_copied = tables.iter().filter(|table| !table.copied).cloned();
        let (ended, left): (Vec<TableProgress>, Vec<TableProgress>) =
            half_copied.partition(|half_copied| ending.has(&half_copied.table));
        let begun: Vec<TableProgress> =
            tables.iter().map(|table| TableProgress { copied: true, ..table.clone() }).collect();
        let ends = !ended.is_empty();
        if ends {
            let which = match left.is_empty() {
                true => Which::Begun,
                false => Which::These(ended.into_iter().map(|ended| ended.table).collect()),
            };
            self.copy_waiting(session, progress, pinned, which).await?;
        }
        let published = published(self.source.as_ref(), &self.spec.name);
        let published = tokio::time::timeout(ANSWER_WITHIN, published).await.unwrap_or_default();
        let joined = published.clone().map(|published| joined(published, &begun));
        let ask_again = joined.is_none();
        let joined = joined.unwrap_or_default();
        let mut looked = Looked { published, ask_again, copied: ends, ..Looked::default() };
        if left.is_empty() && joined.is_empty() {
            return Ok(looked);
        }
        // Where foreign keys fire, tables at different points are in each other's way.
        if session.replica_role {
            self.keep_log_for_copy()?;
            session.mark_catching_up(&self.spec.name).await?;
            looked.beside = left;
            looked.beside.retain(|table| !joined.iter().any(|joined| joined.table == table.table));
            looked.beside.extend(joined.iter().map(TableProgress::not_begun));
        } else {
            match self.copy_waiting(session, progress, pinned, Which::All).await {
                // Nothing streams beside a copy: what is there streams on before it.
                Err(
                    ApplyError::StreamFirst(why)
                    | ApplyError::InUse(why)
                    | ApplyError::LogBehind { what: why, .. },
                ) => {
                    self.leave_for_later(why);
                    looked.copies_wait = true;
                }
                copied => copied?,
            }
            looked.copied = true;
        }
        Ok(looked)
    }

    /// Detaches, on the target, copied tables that are published by themselves from those that are
    /// published with all of their partitions. False if one is left for later: rows are still to
    /// come for it through such a one, or somebody uses that. What streams can go on meanwhile,
    /// unless a row found no place in the very table.
    async fn set_apart(
        &self,
        session: &mut Session,
        published: &[PublishedTable],
        tables: &[TableProgress],
        applied: Lsn,
        no_place_in: Option<&str>,
    ) -> Result<bool, ApplyError> {
        let (name, schema) = (self.spec.name.as_str(), &self.spec.schema);
        let PublishedNames { tables: own, roots } = PublishedNames::of(published, schema);
        self.detaching.keep(published).await;
        let mut all_apart = true;
        for below in session.filled_below(name, &roots, &own).await? {
            let now = published.iter().find(|t| schema.names.table(&t.table) == below.table);
            let is_copied = |now: &&PublishedTable| {
                tables.iter().any(|t| t.copied && t.copied_at <= applied && t.is_still(now))
            };
            let Some(now) = now.filter(is_copied).filter(|_| below.filled_by.is_none()) else {
                continue;
            };
            // By itself it has had a row that its root has no place for.
            let had_no_place = no_place_in == Some(below.table.to_string().as_str());
            let left = match had_no_place {
                true => Some(Touched::Nothing),
                false => self.left_for_root(published, tables, now, &below, applied).await?,
            };
            // What empties the root is refused while this is below it.
            let is_emptied = matches!(left, Some(Touched::Truncated));
            let is_urgent = had_no_place || is_emptied;
            if !is_emptied && !matches!(left, Some(Touched::Nothing)) {
                self.leave_for_later(format!(
                    "subscription \"{name}\": {} is detached from {} on the target once what came \
                     for it through {} is applied",
                    below.table, below.parent, below.root
                ));
                all_apart = false;
                continue;
            }
            match session.set_apart(name, schema, &below).await {
                Ok(()) => {
                    self.detaching.forget(now);
                    if is_emptied {
                        // The log does not tell whether it was attached then.
                        tracing::warn!(
                            "subscription \"{name}\": {} was detached from {} on the target before \
                             a TRUNCATE of {} is applied. If it was attached on the publisher when \
                             that ran, it was emptied with it there, and keeps its rows here: {}",
                            below.table,
                            below.parent,
                            below.root,
                            remedy::resync(name, Some(&now.table))
                        );
                    }
                }
                Err(ApplyError::InUse(why)) if !is_urgent => {
                    self.leave_for_later(why);
                    all_apart = false;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(all_apart)
    }

    /// What the log still has for a copied table through the root that it is below: it may have been
    /// attached again after it was copied, and detached once more. What is first of all a TRUNCATE of
    /// the root cannot be applied before it is detached. `None` where it cannot be told yet.
    async fn left_for_root(
        &self,
        published: &[PublishedTable],
        tables: &[TableProgress],
        now: &PublishedTable,
        below: &Below,
        applied: Lsn,
    ) -> Result<Option<Touched>, ApplyError> {
        let root = published.iter().find(|t| self.spec.schema.names.table(&t.table) == below.root);
        let root = root.and_then(|root| tables.iter().find(|t| t.table == root.table));
        let Some(root) = root.filter(|root| root.copied) else {
            return Ok(Some(Touched::Nothing));
        };
        let when = (applied, POINT_WITHIN);
        self.left_at_point(&self.detaching, now, published, root, when).await
    }

    /// What the log still has for a table between what is applied and the point that is known for
    /// `now`. `None` where it cannot be told yet.
    pub(super) async fn left_at_point(
        &self,
        points: &LogPoints,
        now: &PublishedTable,
        published: &[PublishedTable],
        table: &TableProgress,
        (applied, within): (Lsn, Duration),
    ) -> Result<Option<Touched>, ApplyError> {
        let asked = (self.spec.name.as_str(), within);
        let Some(point) = points.point_of(now, published, &self.source, asked).await else {
            return Ok(None);
        };
        let mut durable = self.store.durable();
        let arrived = durable.wait_for(|durable| durable.0 >= point);
        if !matches!(tokio::time::timeout(within, arrived).await, Ok(Ok(_))) {
            return Ok(None);
        }
        left_for(&self.store, table, applied, point).await
    }

    /// Sets the store's cursor to what the target has, once it is certain that the log goes on from
    /// there. `newest` is where the newest copy of a table stands.
    async fn place_cursor(
        &self,
        progress: &Progress,
        newest: Lsn,
        cursor: Cursor,
    ) -> Result<(), ApplyError> {
        let (name, applied) = (self.spec.name.as_str(), progress.applied);
        let mut ready = self.capture_ready.clone();
        let begins = loop {
            if let Some(begins) = slot::log_begins(self.store.as_ref()) {
                break begins;
            }
            if ready.changed().await.is_err() {
                return Err(ApplyError::NotYet(format!(
                    "subscription \"{name}\": waiting for its publication's capture"
                )));
            }
        };
        // Which publisher it is may be known only now.
        self.check_origin(progress, &[])?;
        // A store that was replaced begins later than what the target has.
        if applied < begins {
            return Err(self.gap(begins));
        }
        self.check_not_ahead(Some(progress), newest)?;
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
        Ok(())
    }

    pub(super) fn gap(&self, start: Lsn) -> ApplyError {
        ApplyError::Gap(format!(
            "subscription \"{}\": the store no longer has changes that it still needed; the log now \
             starts at {start} (retention limits dropped them, the store was replaced, or the \
             subscription was not in the site file for a while). To have all its tables emptied and \
             copied anew: {}, then farshore resume",
            self.spec.name,
            remedy::resync(&self.spec.name, None)
        ))
    }

    /// Nothing was dropped that it had not applied; it has gone back.
    fn went_back_too_far(&self, applied: Lsn, start: Lsn) -> ApplyError {
        ApplyError::Gap(format!(
            "subscription \"{}\": the target has gone back to {applied} (restored from a backup, or \
             failed over; or the subscription was not in the site file for a while, which gave up \
             its claim on the log), and the store begins at {start}: it no longer has changes that \
             the target lacks. Restore it from a backup that has applied more, or, to have all its \
             tables emptied and copied anew: {}, then farshore resume",
            self.spec.name,
            remedy::resync(&self.spec.name, None)
        ))
    }

    /// Refuses progress that is of another publication, or of another publisher. `tables` are the
    /// copies that the target has, which tell whether one begins there that an operator asked for.
    pub(super) fn check_origin(
        &self,
        progress: &Progress,
        tables: &[TableProgress],
    ) -> Result<(), ApplyError> {
        let name = &self.spec.name;
        if progress.publication != self.spec.publication {
            return Err(ApplyError::Setup(format!(
                "subscription \"{name}\": the target's subscription of that name follows \
                 publication \"{}\", not \"{}\". {}",
                progress.publication,
                self.spec.publication,
                remedy::follows_another(name, &progress.publication, &self.spec.publication)
            )));
        }
        match slot::publisher_identity(self.store.as_ref()) {
            Some(system)
                if system != progress.publisher && !progress.is_to_be_copied_anew(tables) =>
            {
                Err(ApplyError::Setup(format!(
                    "subscription \"{name}\": the target was filled from another publisher (system \
                     identifier {}, not {system}). Point the publication back at it; or, {}",
                    progress.publisher,
                    from_this_publisher(name, &progress.state)
                )))
            }
            Some(_) | None => Ok(()),
        }
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
        let asked = self.source.partitions();
        let asked = match needed {
            true => asked.await,
            false => tokio::time::timeout(ANSWER_WITHIN, asked).await.unwrap_or(Ok(None)),
        };
        let (published, definitions) = match asked {
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
        match create_missing(session, name, schema, &definitions, &HashSet::new(), &copied).await {
            // No row has asked for it yet.
            Err(ApplyError::InUse(why)) if !needed => self.leave_for_later(why),
            made => made?,
        }
        session.finish_tables(name).await?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::{from_this_publisher, state};

    /// The schema on the target is of all subscriptions into it.
    #[test]
    fn nothing_that_is_told_takes_other_subscriptions_progress() {
        let streaming = from_this_publisher("s", state::STREAMING);
        assert!(streaming.contains("farshore resync SITE.toml --subscription s,"), "{streaming}");
        let copying = from_this_publisher("s", state::COPYING);
        let delete = "DELETE FROM farshore.subscription WHERE name = 's' there";
        assert!(copying.contains(delete) && !copying.contains("resync"), "{copying}");
    }
}
