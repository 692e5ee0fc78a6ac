//! Stores, captures and subscriptions of one site, wired together and kept running.

use crate::check::gate::{self, Gate};
use crate::config::{self, SiteConfig};
use crate::control;
use crate::operate;
use crate::report::{CopyReport, PublicationReport, SiteReport, SubscriptionReport};
use crate::stores;
use crate::supervisor::{Notice, Outcome, supervise};
use crate::switch::Switch;
use farshore_apply::{Phase, Subscription, SubscriptionStatus};
use farshore_capture::source::Direct;
use farshore_capture::{Capture, CaptureStatus, slot};
use farshore_model::Lsn;
use farshore_store::segmented::SegmentedStore;
use farshore_store::{LogStore, StoreError};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// How often retention is enforced.
const RETENTION_EVERY: Duration = Duration::from_secs(2);
/// How long a stop may take before it is given up; nothing durable depends on it.
const STOP_MAX: Duration = Duration::from_secs(20);

/// Why a site cannot start.
#[derive(Debug, thiserror::Error)]
pub enum SiteError {
    /// The data folder.
    #[error("cannot {action} {path}: {error}. Check data_dir in the site file")]
    DataDir {
        /// Verb phrase.
        action: &'static str,
        /// Path.
        path: PathBuf,
        /// Reason.
        error: std::io::Error,
    },
    /// A publication's store.
    #[error("publication \"{publication}\": {error}")]
    Store {
        /// Which.
        publication: String,
        /// Reason.
        error: StoreError,
    },
}

/// A publication at work.
pub(crate) struct PublicationAgent {
    name: String,
    pub(crate) store: Arc<SegmentedStore>,
    capture: Arc<Capture>,
    failure: Arc<Mutex<AgentFailure>>,
    pub(crate) switch: Arc<Switch>,
    retention: farshore_store::Retention,
}

/// A subscription at work.
pub(crate) struct SubscriptionAgent {
    name: String,
    publication: String,
    pub(crate) store: Arc<SegmentedStore>,
    pub(crate) subscription: Arc<Subscription>,
    failure: Arc<Mutex<AgentFailure>>,
    pub(crate) switch: Arc<Switch>,
}

/// Why an agent is not running.
#[derive(Debug, Default)]
struct AgentFailure {
    retrying: Option<String>,
    stopped: Option<String>,
    restarts: u64,
}

impl AgentFailure {
    /// What was wrong before it was started by hand is history.
    fn begin(&mut self) {
        (self.retrying, self.stopped) = (None, None);
    }
}

/// A site whose stores are open.
pub struct Site {
    config: SiteConfig,
    publications: Vec<PublicationAgent>,
    subscriptions: Vec<SubscriptionAgent>,
    started: Instant,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Site {
    /// Opens every store. Blocks on the disk.
    pub fn open(config: SiteConfig) -> Result<Site, SiteError> {
        std::fs::create_dir_all(&config.data_dir).map_err(|error| SiteError::DataDir {
            action: "create",
            path: config.data_dir.clone(),
            error,
        })?;
        let mut stores = BTreeMap::new();
        let mut publications = Vec::new();
        for publication in &config.publications {
            let name = publication.spec.name.clone();
            let store = stores::open(&config, publication)?;
            stores.insert(name.clone(), store.clone());
            let (ready, _) = watch::channel(0);
            let capture = Capture {
                spec: publication.spec.clone(),
                store: store.clone(),
                status: Arc::new(Mutex::new(CaptureStatus::default())),
                ready,
                text_only: AtomicBool::new(false),
                stream_only: AtomicBool::new(false),
            };
            publications.push(PublicationAgent {
                name,
                store,
                capture: Arc::new(capture),
                failure: Arc::default(),
                switch: Arc::new(Switch::new(false)),
                retention: publication.retention.clone(),
            });
        }
        let mut subscriptions = Vec::new();
        for subscription in &config.subscriptions {
            let Some(agent) = publications.iter().find(|p| p.name == subscription.publication)
            else {
                continue;
            };
            let paused = operate::is_paused(agent.store.as_ref(), &subscription.spec.name);
            if paused {
                tracing::info!(subscription = %subscription.spec.name, "paused; farshore resume lets it go on");
            }
            subscriptions.push(SubscriptionAgent {
                name: subscription.spec.name.clone(),
                publication: subscription.publication.clone(),
                store: agent.store.clone(),
                subscription: Arc::new(Subscription {
                    spec: subscription.spec.clone(),
                    source: Arc::new(Direct(agent.capture.spec.clone())),
                    store: agent.store.clone(),
                    capture_ready: agent.capture.ready.subscribe(),
                    status: Arc::new(Mutex::new(SubscriptionStatus::default())),
                }),
                failure: Arc::default(),
                switch: Arc::new(Switch::new(paused)),
            });
        }
        let opened = publications.iter().map(|agent| (agent.name.as_str(), agent.store.as_ref()));
        stores::drop_cursors_of_removed(opened, &config);
        Ok(Site { config, publications, subscriptions, started: Instant::now() })
    }

    /// Runs until `stop` turns true, then stops everything in order: nothing durable is lost
    /// either way, and a stop in order leaves less to do again.
    pub async fn run(self: Arc<Site>, stop: watch::Receiver<bool>) -> Result<(), SiteError> {
        let path = control::socket_path(&self.config.data_dir);
        let control = control::listen(&self.config.data_dir)
            .map_err(|error| SiteError::DataDir { action: "listen on", path, error })?;
        let site = self.clone();
        let control = tokio::spawn(control::serve(control, move |request, lines| {
            operate::answer(site.clone(), request, lines)
        }));
        let retention = tokio::spawn(self.clone().enforce_retention());
        let mut agents = JoinSet::new();
        for agent in &self.publications {
            let site = self.clone();
            let (switch, stop) = (agent.switch.clone(), stop.clone());
            let (capture, failure) = (agent.capture.clone(), agent.failure.clone());
            agents.spawn(async move {
                let run =
                    |halted| run_capture(site.clone(), capture.clone(), failure.clone(), halted);
                switch.keep(stop, run).await;
            });
        }
        for agent in &self.subscriptions {
            let site = self.clone();
            let (switch, stop) = (agent.switch.clone(), stop.clone());
            let (subscription, failure) = (agent.subscription.clone(), agent.failure.clone());
            agents.spawn(async move {
                let run = |halted| {
                    run_subscription(site.clone(), subscription.clone(), failure.clone(), halted)
                };
                switch.keep(stop, run).await;
            });
        }
        let mut stopping = stop.clone();
        // An agent that stopped for good must not end the node: the others go on, and `status`
        // tells.
        let _ = stopping.wait_for(|stop| *stop).await;
        let finished =
            tokio::time::timeout(STOP_MAX, async { while agents.join_next().await.is_some() {} });
        if finished.await.is_err() {
            tracing::warn!("some agents did not stop within {STOP_MAX:?}; ending them");
        }
        agents.abort_all();
        retention.abort();
        control.abort();
        let _ = std::fs::remove_file(control::socket_path(&self.config.data_dir));
        Ok(())
    }

    async fn enforce_retention(self: Arc<Site>) {
        let mut every = tokio::time::interval(RETENTION_EVERY);
        loop {
            every.tick().await;
            let site = self.clone();
            let enforced = tokio::task::spawn_blocking(move || {
                for agent in &site.publications {
                    match agent.store.enforce_retention(&agent.retention) {
                        Ok(expired) => {
                            for cursor in expired {
                                tracing::error!(
                                    publication = %agent.name,
                                    subscription = %cursor.name,
                                    applied = %cursor.applied,
                                    "retention limits dropped changes that this subscription \
                                     still needed; it must be copied anew"
                                );
                            }
                        }
                        Err(error) => {
                            tracing::warn!(publication = %agent.name, "retention: {error}")
                        }
                    }
                }
            });
            if enforced.await.is_err() {
                tracing::error!("the retention task died");
            }
        }
    }

    pub(crate) fn subscription(&self, name: &str) -> Result<&SubscriptionAgent, String> {
        let found = self.subscriptions.iter().find(|agent| agent.name == name);
        found.ok_or_else(|| operate::unknown("subscription", name))
    }

    pub(crate) fn publication(&self, name: &str) -> Result<&PublicationAgent, String> {
        let found = self.publications.iter().find(|agent| agent.name == name);
        found.ok_or_else(|| operate::unknown("publication", name))
    }

    /// The site's state now.
    pub fn report(&self) -> SiteReport {
        SiteReport {
            site: self.config.name.clone(),
            pid: std::process::id(),
            uptime_seconds: self.started.elapsed().as_secs(),
            publications: self.publications.iter().map(PublicationAgent::report).collect(),
            subscriptions: self.subscriptions.iter().map(SubscriptionAgent::report).collect(),
        }
    }
}

/// Whether an agent has passed its [`gate`]; it is asked again only until then.
#[derive(Default)]
struct Passed(AtomicBool);

impl Passed {
    async fn or_asked(&self, ask: impl Future<Output = Gate>) -> Result<(), Outcome> {
        if self.0.load(Ordering::Relaxed) {
            return Ok(());
        }
        match ask.await {
            Gate::Open => self.0.store(true, Ordering::Relaxed),
            Gate::Unknown => {}
            Gate::Shut { why, passes: true } => return Err(Outcome::Transient(why)),
            Gate::Shut { why, passes: false } => return Err(Outcome::Permanent(why)),
        }
        Ok(())
    }
}

async fn run_capture(
    site: Arc<Site>,
    capture: Arc<Capture>,
    failure: Arc<Mutex<AgentFailure>>,
    stop: watch::Receiver<bool>,
) {
    let name = capture.spec.name.clone();
    lock(&failure).begin();
    let passed = Arc::new(Passed::default());
    let agent = || {
        let (capture, mut stop) = (capture.clone(), stop.clone());
        let (site, passed) = (site.clone(), passed.clone());
        async move {
            if let Some(publication) = site.config.publication(&capture.spec.name) {
                let started = slot::has_begun(|key| capture.store.note(key));
                let asked = passed.or_asked(gate::publication(publication, started));
                if let Err(outcome) = unless_stopped(&mut stop, asked).await {
                    return outcome;
                }
            }
            match capture.run(stop).await {
                Ok(()) => Outcome::Done,
                Err(error) => outcome(error.is_transient(), &error),
            }
        }
    };
    let position = || capture.store.durable().borrow().0;
    let notice = |notice: Notice<'_>| note(&failure, &notice);
    supervise("capture", name, stop.clone(), agent, position, notice).await;
}

/// Asks, but for a stop: then there is nothing more to do.
async fn unless_stopped(
    stop: &mut watch::Receiver<bool>,
    asked: impl Future<Output = Result<(), Outcome>>,
) -> Result<(), Outcome> {
    tokio::select! {
        biased;
        _ = stop.wait_for(|stop| *stop) => Err(Outcome::Done),
        answer = asked => answer,
    }
}

async fn run_subscription(
    site: Arc<Site>,
    subscription: Arc<Subscription>,
    failure: Arc<Mutex<AgentFailure>>,
    stop: watch::Receiver<bool>,
) {
    let name = subscription.spec.name.clone();
    lock(&failure).begin();
    let passed = Arc::new(Passed::default());
    let agent = || {
        let (subscription, mut stop) = (subscription.clone(), stop.clone());
        let (site, passed) = (site.clone(), passed.clone());
        async move {
            if let Some(configured) = site.config.subscription(&subscription.spec.name) {
                let asked = passed.or_asked(gate::subscription(&site.config, configured));
                if let Err(outcome) = unless_stopped(&mut stop, asked).await {
                    return outcome;
                }
            }
            match subscription.run(stop).await {
                Ok(()) => Outcome::Done,
                Err(error) => {
                    lock(&subscription.status).phase = Phase::Starting;
                    if error.is_clash() {
                        Outcome::Clash(error.to_string())
                    } else {
                        outcome(error.is_transient(), &error)
                    }
                }
            }
        }
    };
    let position = || lock(&subscription.status).applied.0;
    let notice = |notice: Notice<'_>| note(&failure, &notice);
    supervise("subscription", name, stop.clone(), agent, position, notice).await;
}

fn outcome(transient: bool, error: &dyn std::fmt::Display) -> Outcome {
    if transient {
        Outcome::Transient(error.to_string())
    } else {
        Outcome::Permanent(error.to_string())
    }
}

fn note(failure: &Mutex<AgentFailure>, notice: &Notice<'_>) {
    let mut failure = lock(failure);
    match notice {
        Notice::Retrying(error) => {
            failure.retrying = Some((*error).to_owned());
            failure.restarts += 1;
        }
        Notice::Stopped(error) => failure.stopped = Some((*error).to_owned()),
    }
}

impl PublicationAgent {
    fn report(&self) -> PublicationReport {
        let capture = lock(&self.capture.status).clone();
        let store = self.store.status();
        let failure = lock(&self.failure);
        let (state, error) = match (&failure.stopped, capture.streaming) {
            (Some(error), _) => ("stopped", Some(error.clone())),
            (None, _) if store.waiting_for_room.is_some() => ("retrying", store.waiting_for_room),
            (None, true) => ("streaming", None),
            (None, false) if failure.retrying.is_some() => ("retrying", failure.retrying.clone()),
            (None, false) => ("starting", None),
        };
        PublicationReport {
            name: self.name.clone(),
            state: state.to_owned(),
            error,
            publisher_end: capture.publisher_end.to_string(),
            received: capture.received.to_string(),
            durable: store.durable.to_string(),
            acknowledged: capture.acknowledged.to_string(),
            changes: capture.changes,
            wire_bytes: capture.wire_bytes,
            store_bytes: store.bytes_on_disk,
            payload_bytes: store.payload_bytes_appended,
            stored_bytes: store.stored_bytes_appended,
            syncs: store.syncs,
            store_start: store.start.to_string(),
        }
    }
}

impl SubscriptionAgent {
    fn report(&self) -> SubscriptionReport {
        let status = lock(&self.subscription.status).clone();
        let failure = lock(&self.failure);
        let live = matches!(status.phase, Phase::Copying | Phase::CatchingUp | Phase::Streaming);
        let (state, error) = match (&failure.stopped, &failure.retrying) {
            _ if self.switch.is_paused() => ("paused", None),
            (Some(error), _) => (Phase::Stopped.word(), Some(error.clone())),
            (None, Some(error)) if !live => ("retrying", Some(error.clone())),
            (None, _) => (status.phase.word(), None),
        };
        let milliseconds = |micros: Option<u64>| micros.map(|micros| micros as f64 / 1_000.0);
        let applied = if status.applied.0 == Lsn::ZERO {
            let cursors = self.store.cursors();
            cursors.iter().find(|c| c.name == self.name).map_or(Lsn::ZERO, |c| c.applied.0)
        } else {
            status.applied.0
        };
        SubscriptionReport {
            name: self.name.clone(),
            publication: self.publication.clone(),
            state: state.to_owned(),
            error,
            applied: applied.to_string(),
            behind_bytes: self.store.status().durable.0.bytes_since(applied),
            transactions: status.transactions,
            changes: status.changes,
            target_commits: status.target_commits,
            conflicts: status.conflicts,
            lag_p50_ms: milliseconds(status.lag.quantile_micros(0.50)),
            lag_p99_ms: milliseconds(status.lag.quantile_micros(0.99)),
            lag_max_ms: milliseconds((status.lag.count() > 0).then(|| status.lag.max_micros())),
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

/// The report of a site whose node does not run: what the site file names.
pub fn offline_report(config: &config::SiteConfig) -> SiteReport {
    let offline = || "not running".to_owned();
    SiteReport {
        site: config.name.clone(),
        publications: config
            .publications
            .iter()
            .map(|p| PublicationReport {
                name: p.spec.name.clone(),
                state: offline(),
                ..PublicationReport::default()
            })
            .collect(),
        subscriptions: config
            .subscriptions
            .iter()
            .map(|s| SubscriptionReport {
                name: s.spec.name.clone(),
                publication: s.publication.clone(),
                state: offline(),
                ..SubscriptionReport::default()
            })
            .collect(),
        ..SiteReport::default()
    }
}
