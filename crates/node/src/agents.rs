//! The agents of a site, and how each says how it goes. What that is worth is judged with the whole
//! report.

use crate::check::gate::PublisherAsked;
use crate::legs::{self, Durability, milliseconds};
use crate::report::{CopyReport, Health, PublicationReport, SubscriptionReport};
use crate::sites::receive::Receive;
use crate::supervisor::{Notice, Progress};
use crate::switch::Switch;
use farshore_apply::{Initialise, Phase, Subscription};
use farshore_capture::Capture;
use farshore_capture::source::Direct;
use farshore_model::{Lsn, PgTime, leg_micros};
use farshore_store::segmented::SegmentedStore;
use farshore_store::{Cursor, LogStore};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::time::Instant;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// A publication at work.
pub(crate) struct PublicationAgent {
    pub(crate) name: String,
    pub(crate) store: Arc<SegmentedStore>,
    pub(crate) durability: Durability,
    pub(crate) capture: Arc<Capture>,
    /// Whom its subscriptions ask, together.
    pub(crate) source: Direct,
    pub(crate) asked_by_gates: PublisherAsked,
    pub(crate) failure: Arc<Mutex<AgentFailure>>,
    pub(crate) switch: Arc<Switch>,
    pub(crate) retention: farshore_store::Retention,
    /// Held while a tracer token is on its way.
    pub(crate) tracing: tokio::sync::Mutex<()>,
}

/// A publication of another site whose log is kept here.
pub(crate) struct ReceivedAgent {
    pub(crate) name: String,
    pub(crate) durability: Durability,
    pub(crate) receive: Arc<Receive>,
    pub(crate) failure: Arc<Mutex<AgentFailure>>,
    pub(crate) switch: Arc<Switch>,
    pub(crate) retention: farshore_store::Retention,
}

/// A subscription at work.
pub(crate) struct SubscriptionAgent {
    pub(crate) name: String,
    pub(crate) publication: String,
    pub(crate) store: Arc<SegmentedStore>,
    pub(crate) durability: Durability,
    /// What fills the store, if it is captured here.
    pub(crate) capture: Option<Arc<Capture>>,
    pub(crate) subscription: Arc<Subscription>,
    pub(crate) first_left: Arc<FirstLeft>,
    pub(crate) failure: Arc<Mutex<AgentFailure>>,
    pub(crate) switch: Arc<Switch>,
}

/// When the first transaction of the log was committed that a target has not got, as far as that is
/// known. The log is read for it once for each position of the target, beside whoever asks: that is
/// done every second.
#[derive(Debug, Default)]
pub(crate) struct FirstLeft(Mutex<Looked>);

#[derive(Debug, Default)]
struct Looked {
    applied: Lsn,
    /// Up to here there is none.
    until: Lsn,
    found: Option<PgTime>,
    is_looking: bool,
}

impl FirstLeft {
    /// What is known of the first transaction after `applied`; where that is nothing, it is looked
    /// for.
    fn after(self: &Arc<Self>, store: &Arc<SegmentedStore>, applied: Lsn) -> Option<PgTime> {
        let end = store.status().durable.0;
        let mut looked = lock(&self.0);
        if looked.applied != applied && !looked.is_looking {
            *looked = Looked { applied, until: applied, ..Looked::default() };
        }
        let is_new = looked.found.is_none() && looked.until < end;
        if applied == Lsn::ZERO || looked.is_looking || !is_new {
            return looked.found.filter(|_| looked.applied == applied);
        }
        looked.is_looking = true;
        let (this, store, until) = (self.clone(), store.clone(), looked.until);
        let look = move || {
            // A log that begins later, or cannot be read, is told of elsewhere.
            let found = store.first_transaction(until).unwrap_or_default();
            let mut looked = lock(&this.0);
            looked.found = found.map(|(_, commit_time)| commit_time);
            (looked.until, looked.is_looking) = (end, false);
        };
        if std::thread::Builder::new().name("first-left".to_owned()).spawn(look).is_err() {
            looked.is_looking = false;
        }
        None
    }
}

/// Why an agent is not running.
#[derive(Debug, Default)]
pub(crate) struct AgentFailure {
    retrying: Option<String>,
    stopped: Option<String>,
    restarts: u64,
    /// The run that is ending had begun its work.
    had_begun: bool,
    in_vain: Option<InVain>,
}

/// Runs that began their work, failed, and came no further than the ones before them. Between two of
/// them an agent looks as if all were well.
#[derive(Debug)]
struct InVain {
    runs: u32,
    longest: Duration,
    progress: Progress,
    last: Instant,
}

/// As many such runs are no accident of a server that was started again.
const IN_VAIN_MIN: u32 = 3;
/// One that has worked for so long was well, whatever ended it.
const WELL_AFTER: Duration = Duration::from_secs(900);
/// So much longer than twice the longest of them an agent has to work before they are forgotten.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(60);

impl InVain {
    /// One more.
    fn and(before: Option<InVain>, ran: Duration, progress: Progress) -> InVain {
        let before = before.filter(|before| before.progress == progress);
        let (runs, longest) = before.map_or((0, Duration::ZERO), |all| (all.runs, all.longest));
        let longest = longest.max(ran.min(WELL_AFTER));
        InVain { runs: runs + 1, longest, progress, last: Instant::now() }
    }
}

impl AgentFailure {
    /// What was wrong before it was started by hand is history.
    pub(crate) fn begin(&mut self) {
        *self = AgentFailure { restarts: self.restarts, ..AgentFailure::default() };
    }

    /// The run that is about to end had begun its work, and its failure would not be seen in the
    /// state of the next one.
    pub(crate) fn had_begun(&mut self) {
        self.had_begun = true;
    }

    /// That it fails over and over although it seems to work now, if that is so.
    fn in_vain(&self, progress: Progress) -> Option<String> {
        let InVain { runs, longest, progress: stood, last } = self.in_vain.as_ref()?;
        let is_over = progress != *stood || last.elapsed() > *longest * 2 + FORGOTTEN_AFTER;
        if is_over || *runs < IN_VAIN_MIN {
            return None;
        }
        let error = self.retrying.as_deref().unwrap_or_default();
        Some(format!("failed {runs} times without coming any further, the last time with: {error}"))
    }

    /// Why it is started again and again.
    pub(crate) fn retrying(&self) -> Option<&str> {
        self.retrying.as_deref()
    }

    /// Why it does not work now.
    fn why(&self) -> Option<String> {
        self.stopped.clone().or_else(|| self.retrying.clone())
    }

    /// Why it has stopped for good.
    pub(crate) fn stopped(&self) -> Option<&str> {
        self.stopped.as_deref()
    }
}

/// Takes down what the supervisor tells.
pub(crate) fn note(failure: &Mutex<AgentFailure>, notice: &Notice<'_>) {
    let mut failure = lock(failure);
    match notice {
        Notice::Retrying { error, ran, progress } => {
            failure.retrying = Some((*error).to_owned());
            failure.stopped = None;
            failure.restarts += 1;
            if std::mem::take(&mut failure.had_begun) {
                let before = failure.in_vain.take().filter(|_| *ran < WELL_AFTER);
                failure.in_vain = Some(InVain::and(before, *ran, *progress));
            }
        }
        Notice::Stopped(error) => failure.stopped = Some((*error).to_owned()),
    }
}

impl PublicationAgent {
    /// Why its log gets nothing more, if that is so.
    pub(crate) fn trouble(&self) -> impl Fn() -> Option<String> + Send + Sync + use<> {
        let (failure, capture) = (self.failure.clone(), self.capture.clone());
        move || {
            if let Some(why) = capture.store.status().waiting_for_room {
                return Some(why);
            }
            let (streams, waits_for) = {
                let status = lock(&capture.status);
                (status.streaming, status.waits_for.clone())
            };
            if streams { waits_for } else { lock(&failure).why().or(waits_for) }
        }
    }

    pub(crate) fn report(&self) -> PublicationReport {
        let capture = lock(&self.capture.status).clone();
        let store = self.store.status();
        let failure = lock(&self.failure);
        let (state, error) = match (&failure.stopped, capture.streaming) {
            (Some(error), _) => ("stopped", Some(error.clone())),
            (None, _) if store.waiting_for_room.is_some() => ("retrying", store.waiting_for_room),
            (None, true) => {
                let in_vain = || failure.in_vain((store.durable.0, 0));
                (
                    "streaming",
                    capture.waits_for.clone().or_else(in_vain).or(capture.tables_stay.clone()),
                )
            }
            (None, false) if failure.retrying.is_some() => ("retrying", failure.retrying.clone()),
            (None, false) => ("starting", capture.waits_for.clone()),
        };
        // Nothing has come on a connection that has just begun.
        let taken = capture.received.0.max(store.durable.0);
        let is_heard = state == "streaming";
        let unacknowledged_bytes = match capture.acknowledged.0 {
            Lsn::ZERO => 0,
            acknowledged => capture.publisher_end.bytes_since(acknowledged),
        };
        let store_leg = leg_micros(
            &capture.transactions,
            &lock(&self.durability),
            store.durable.0,
            PgTime::now(),
        );
        PublicationReport {
            name: self.name.clone(),
            upstream: None,
            state: state.to_owned(),
            error,
            health: Health::Good,
            reason: None,
            tables_out: capture.tables_out.clone(),
            publisher_end: capture.publisher_end.to_string(),
            received: capture.received.to_string(),
            durable: store.durable.to_string(),
            acknowledged: capture.acknowledged.to_string(),
            capture_behind_bytes: capture.publisher_end.bytes_since(taken),
            store_behind_bytes: capture.received.0.bytes_since(store.durable.0),
            // The publisher's log goes on, unseen.
            unacknowledged_bytes: is_heard.then_some(unacknowledged_bytes),
            unacknowledged_last: unacknowledged_bytes,
            heard_at: capture.heard_at.map(PgTime::unix_seconds),
            capture_ms: legs::capture_ms(&capture).filter(|_| is_heard),
            store_ms: store_leg.map(milliseconds),
            commands: capture.commands,
            changes: capture.changes,
            wire_bytes: capture.wire_bytes,
            store_bytes: store.bytes_on_disk,
            payload_bytes: store.payload_bytes_appended,
            stored_bytes: store.stored_bytes_appended,
            syncs: store.syncs,
            restarts: failure.restarts,
            store_start: store.start.to_string(),
        }
    }
}

impl ReceivedAgent {
    fn has_no_more(&self, why: &str) -> String {
        let Receive { site, publication, .. } = &*self.receive;
        // In the words of the site that captures it: its node, and its folders.
        let here = if why.contains("data_dir/") {
            let folder = format!("{site}/{publication}").replace('/', "+");
            format!(
                " (\"This node\" and these folders are those of the site that captures it. Each \
                 site that receives it begins anew too, once that one has: stop its node, remove \
                 its folder of this log, here data_dir/received/{folder}, start it, and for each \
                 of its subscriptions: farshore resync, then farshore resume)"
            )
        } else {
            String::new()
        };
        format!("site \"{site}\" gets nothing more of it: {why}{here}")
    }

    /// Why its log gets nothing more, if that is so.
    pub(crate) fn trouble(&self) -> impl Fn() -> Option<String> + Send + Sync + use<> {
        let (failure, receive) = (self.failure.clone(), self.receive.clone());
        move || {
            if let Some(why) = receive.store.status().waiting_for_room {
                return Some(why);
            }
            let status = receive.status().clone();
            if status.connected {
                return status.trouble;
            }
            lock(&failure).why()
        }
    }

    pub(crate) fn report(&self) -> PublicationReport {
        let receive = self.receive.status().clone();
        let store = self.receive.store.status();
        let failure = lock(&self.failure);
        let (state, error) = match (&failure.stopped, receive.connected) {
            (Some(error), _) => ("stopped", Some(error.clone())),
            (None, _) if store.waiting_for_room.is_some() => ("retrying", store.waiting_for_room),
            // What the upstream site does not get does not come here either.
            (None, true) => {
                let trouble = receive.trouble.map(|why| self.has_no_more(&why));
                let progress = (store.durable.0, self.receive.blocks_coming());
                ("receiving", trouble.or_else(|| failure.in_vain(progress)))
            }
            (None, false) if failure.retrying.is_some() => ("retrying", failure.retrying.clone()),
            (None, false) => ("starting", None),
        };
        PublicationReport {
            name: self.name.clone(),
            upstream: Some(self.receive.site.clone()),
            state: state.to_owned(),
            error,
            health: Health::Good,
            reason: None,
            tables_out: None,
            // Only the upstream site hears of it.
            publisher_end: String::new(),
            received: receive.received.to_string(),
            durable: store.durable.to_string(),
            acknowledged: receive.acknowledged.to_string(),
            capture_behind_bytes: 0,
            store_behind_bytes: receive.received.bytes_since(store.durable.0),
            unacknowledged_bytes: None,
            unacknowledged_last: 0,
            heard_at: None,
            capture_ms: None,
            store_ms: None,
            commands: 0,
            changes: 0,
            wire_bytes: receive.traffic.wire_bytes_received,
            store_bytes: store.bytes_on_disk,
            payload_bytes: store.payload_bytes_appended,
            stored_bytes: store.stored_bytes_appended,
            syncs: store.syncs,
            restarts: failure.restarts,
            store_start: store.start.to_string(),
        }
    }
}

/// What a subscription that is paused is to know before it is resumed.
fn dropped(cursor: &Cursor) -> Option<String> {
    let begins = cursor.expired?;
    Some(format!(
        "retention limits dropped changes that it still needed; the log begins at {begins} now, and \
         it must be copied anew"
    ))
}

/// Whether a subscription is at work.
pub(crate) fn is_live(phase: Phase) -> bool {
    matches!(phase, Phase::Copying | Phase::CatchingUp | Phase::Streaming)
}

/// How far a subscription has come.
pub(crate) fn subscription_progress(status: &farshore_apply::SubscriptionStatus) -> Progress {
    (status.applied.0, status.copies.iter().map(|copy| copy.ranges_done).sum())
}

impl SubscriptionAgent {
    /// Why it has stopped, or is tried again.
    pub(crate) fn trouble(&self) -> Option<String> {
        let live = is_live(lock(&self.subscription.status).phase);
        let failure = lock(&self.failure);
        // At work again, it is rid of what it was tried again for.
        failure.stopped.clone().or_else(|| failure.retrying.clone().filter(|_| !live))
    }

    pub(crate) fn report(&self) -> SubscriptionReport {
        let status = lock(&self.subscription.status).clone();
        let failure = lock(&self.failure);
        let live = is_live(status.phase);
        let cursor = self.store.cursors().into_iter().find(|cursor| cursor.name == self.name);
        let (state, error) = match (&failure.stopped, &failure.retrying) {
            _ if self.switch.is_paused() => ("paused", cursor.as_ref().and_then(dropped)),
            (Some(error), _) => (Phase::Stopped.word(), Some(error.clone())),
            // It is at work again, and held up at once.
            (None, _) if status.waits_for.is_some() => {
                (status.phase.word(), status.waits_for.clone())
            }
            (None, Some(error)) if !live => ("retrying", Some(error.clone())),
            (None, _) => {
                let in_vain = failure.in_vain(subscription_progress(&status));
                let waits = || status.copy_waits.clone().or_else(|| status.left_for_later.clone());
                (status.phase.word(), in_vain.or_else(waits))
            }
        };
        let applied = if status.applied.0 == Lsn::ZERO {
            cursor.as_ref().map_or(Lsn::ZERO, |cursor| cursor.applied.0)
        } else {
            status.applied.0
        };
        let behind_bytes = self.store.status().durable.0.bytes_since(applied);
        let reads = ["catching-up", "streaming"].contains(&state);
        let captured = self.capture.as_ref().map(|capture| lock(&capture.status));
        let transactions = captured.as_ref().map(|capture| &capture.transactions);
        let (behind_commands, behind_commands_estimated) =
            legs::commands_behind(&status, transactions, (applied, reads), behind_bytes);
        let legs = legs::apply_legs(
            &status,
            &lock(&self.durability),
            transactions,
            (applied, reads),
            PgTime::now(),
        );
        let age = |since: PgTime| PgTime::now().micros_since(since).max(0) as f64 / 1_000.0;
        let latency_ms = match (status.oldest_pending, status.caught_up_at) {
            (Some(oldest), _) => Some(age(oldest.commit_time)),
            // It reads whatever the store has.
            (None, _) if reads => Some(0.0),
            (None, Some(_)) if behind_bytes == 0 => Some(0.0),
            (None, Some(since)) => Some(age(since)),
            // The node was started since. A copy takes what is there.
            // Nor does what a backup brings along wait.
            (None, None)
                if status.phase != Phase::Copying
                    && status.copies.is_empty()
                    && (self.subscription.spec.initialise != Initialise::Backup
                        || status.applied.0 != Lsn::ZERO) =>
            {
                self.first_left.after(&self.store, applied).map(age)
            }
            (None, None) => None,
        };
        SubscriptionReport {
            name: self.name.clone(),
            publication: self.publication.clone(),
            state: state.to_owned(),
            error,
            dropped_before: cursor.and_then(|cursor| cursor.expired).map(|at| at.to_string()),
            health: Health::Good,
            reason: None,
            applied: applied.to_string(),
            behind_bytes,
            behind_commands,
            behind_commands_estimated,
            upstream_ms: legs.upstream_ms,
            apply_ms: legs.apply_ms,
            latency_ms,
            transactions: status.transactions,
            changes: status.changes,
            target_commits: status.target_commits,
            conflicts: status.conflicts,
            lag_p50_ms: status.lag.quantile_micros(0.50).map(milliseconds),
            lag_p99_ms: status.lag.quantile_micros(0.99).map(milliseconds),
            lag_max_ms: (status.lag.count() > 0).then(|| milliseconds(status.lag.max_micros())),
            tracer_ms: status.tracer.map(|tracer| {
                tracer.applied_at.micros_since(tracer.source.commit_time).max(0) as f64 / 1_000.0
            }),
            restarts: failure.restarts,
            copies: status
                .copies
                .iter()
                .map(|copy| CopyReport {
                    table: copy.table.clone(),
                    ranges: copy.ranges,
                    ranges_done: copy.ranges_done,
                    rows: copy.rows,
                    bytes: copy.bytes,
                    bytes_total: copy.bytes_total,
                })
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_store::segmented::Options;
    use farshore_store::{Batch, EntryKind, EntryMeta};

    async fn append(store: &SegmentedStore, position: u64, kind: EntryKind, commit_time: i64) {
        let (position, commit_time) = (Lsn(position), PgTime(commit_time));
        let entry = EntryMeta { position, commit_time, kind, payload_len: 0 };
        store.append(Batch { entries: vec![entry], ..Batch::default() }).await.unwrap();
        store.durable().wait_for(|durable| durable.0 >= position).await.unwrap();
    }

    /// What is known once nobody looks any more.
    async fn first_after(
        first: &Arc<FirstLeft>,
        store: &Arc<SegmentedStore>,
        applied: u64,
    ) -> Option<i64> {
        first.after(store, Lsn(applied));
        while lock(&first.0).is_looking {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        lock(&first.0).found.map(|found| found.0)
    }

    #[tokio::test]
    async fn the_first_transaction_that_a_target_lacks_is_looked_for_once() {
        let folder = tempfile::tempdir().unwrap();
        let (store, _) = SegmentedStore::open(folder.path(), Options::default()).unwrap();
        let first = Arc::<FirstLeft>::default();
        append(&store, 100, EntryKind::Transaction, 1_000).await;
        append(&store, 200, EntryKind::Watermark, 2_000).await;
        assert_eq!(first_after(&first, &store, 100).await, None);
        assert_eq!(lock(&first.0).until, Lsn(200), "nothing is looked for there again");
        append(&store, 300, EntryKind::Transaction, 3_000).await;
        append(&store, 400, EntryKind::Transaction, 4_000).await;
        assert_eq!(first_after(&first, &store, 100).await, Some(3_000));
        assert_eq!(first.after(&store, Lsn(100)), Some(PgTime(3_000)));
        assert!(!lock(&first.0).is_looking, "it is known");
        assert_eq!(first_after(&first, &store, 300).await, Some(4_000));
        assert_eq!(first_after(&first, &store, 400).await, None);
    }

    /// An agent begins, and fails after `ran`.
    fn fail(failure: &Mutex<AgentFailure>, ran: Duration, progress: Progress) {
        lock(failure).had_begun();
        note(failure, &Notice::Retrying { error: "no space", ran, progress });
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_that_fails_over_and_over_is_not_well_in_between() {
        let failure = Mutex::new(AgentFailure::default());
        let stood = (Lsn(100), 0);
        let ran = Duration::from_secs(300);
        for _ in 0..2 {
            fail(&failure, ran, stood);
            assert_eq!(lock(&failure).in_vain(stood), None, "a server may be started twice");
        }
        // What never began says why by its state, and is none of them.
        note(&failure, &Notice::Retrying { error: "refused", ran, progress: stood });
        assert_eq!(lock(&failure).in_vain(stood), None);
        fail(&failure, ran, stood);
        let said = lock(&failure).in_vain(stood).unwrap();
        assert!(said.contains("3 times") && said.ends_with("no space"), "{said}");
        tokio::time::advance(ran * 2).await;
        assert!(lock(&failure).in_vain(stood).is_some(), "it may fail again at any moment");
        // It came further, if only a range of a copy.
        assert_eq!(lock(&failure).in_vain((Lsn(100), 1)), None);
        fail(&failure, ran, (Lsn(200), 0));
        assert_eq!(lock(&failure).in_vain((Lsn(200), 0)), None);
        for _ in 0..3 {
            fail(&failure, ran, stood);
        }
        assert!(lock(&failure).in_vain(stood).is_some());
        tokio::time::advance(ran * 2 + FORGOTTEN_AFTER * 2).await;
        assert_eq!(lock(&failure).in_vain(stood), None, "it works for longer than it ever did");
        assert_eq!(lock(&failure).restarts, 8);
    }
}
