//! Stores, captures and subscriptions of one site, wired together and kept running.

mod offline;
mod running;
mod unopened;

pub use offline::offline_report;

use crate::agents::{PublicationAgent, ReceivedAgent, SubscriptionAgent, lock};
use crate::check::gate::PublisherAsked;
use crate::config::{SiteConfig, secrets};
use crate::control;
use crate::legs::{self, Durability};
use crate::mirrors::{self, FarAgent, NearAgent, NearSide};
use crate::monitoring;
use crate::operate;
use crate::report::{DownstreamReport, SiteReport, TracerReport};
use crate::sites::receive::{Receive, ReceiveStatus};
use crate::sites::renewal::{Lifetime, Renewal, Seen};
use crate::sites::serve::{Served, ServedSource, Serving};
use crate::sites::{self, SourceOpener};
use crate::stores;
use crate::switch::Switch;
use farshore_apply::{Given, Halts, LogPoints, Subscription, SubscriptionStatus};
use farshore_capture::source::{Direct, Registry, Remote, Source};
use farshore_capture::{Capture, CaptureStatus};
use farshore_link::{Dialer, Identity, IdentityError, LinkError, LinkOptions, Listener};
use farshore_model::Lsn;
use farshore_store::segmented::SegmentedStore;
use farshore_store::{LogStore, StoreError};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::watch;
use tokio::task::JoinSet;
use unopened::Unopened;

/// How often retention is enforced.
const RETENTION_EVERY: Duration = Duration::from_secs(2);

/// The same for logs of several segments, some of which may be needed no more: in a flood their
/// files serve the segments to come.
const DROP_EVERY: Duration = Duration::from_millis(250);
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
    /// Another node runs on this data folder.
    #[error(
        "data_dir {path} is in use by another node (pid {pid}). Stop it, or give this site another \
         data_dir"
    )]
    Running {
        /// The data folder.
        path: PathBuf,
        /// The other's process, as it wrote it there.
        pid: String,
    },
    /// A publication's store.
    #[error("publication \"{publication}\": {error}")]
    Store {
        /// Which.
        publication: String,
        /// Reason.
        error: StoreError,
    },
    /// Who this site is to others.
    #[error("{0}")]
    Identity(#[from] IdentityError),
    /// The certificate names another site.
    #[error(
        "this is site \"{site}\", and its certificate is for site \"{named}\". Name its own under \
         [site] certificate and key (farshore site-cert issue makes one)"
    )]
    AnotherSite {
        /// As the site file says.
        site: String,
        /// As the certificate says.
        named: String,
    },
    /// Where downstream sites connect.
    #[error("{0}")]
    Link(#[from] LinkError),
}

/// Takes the data folder for this process; the kernel lets go of it when the process dies.
fn take_folder(data_dir: &Path) -> Result<File, SiteError> {
    let path = data_dir.join("node.lock");
    let failed = |action| {
        let path = path.clone();
        move |error| SiteError::DataDir { action, path, error }
    };
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true).create(true).truncate(false);
    let mut file = options.open(&path).map_err(failed("open"))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::Error(error)) => return Err(failed("lock")(error)),
        Err(TryLockError::WouldBlock) => {
            // Only for the message: the owner may not have written it yet.
            let mut pid = String::new();
            let _ = (&mut file).take(32).read_to_string(&mut pid);
            let pid = if pid.trim().is_empty() { "unknown" } else { pid.trim() }.to_owned();
            return Err(SiteError::Running { path: data_dir.to_owned(), pid });
        }
    }
    // On a full disk the node runs all the same: this is for the message alone.
    let _ = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
    Ok(file)
}

/// A site whose stores are open.
pub struct Site {
    pub(crate) config: SiteConfig,
    publications: Vec<PublicationAgent>,
    received: Vec<ReceivedAgent>,
    subscriptions: Vec<SubscriptionAgent>,
    unopened: Vec<Unopened>,
    near_mirrors: BTreeMap<String, Arc<NearAgent>>,
    far_mirrors: Vec<Arc<FarAgent>>,
    serving: Option<Arc<Serving>>,
    /// With what its files looked like.
    identity: Option<(Arc<Identity>, Seen)>,
    /// Of its certificate, and of those that replace it.
    lifetime: Option<Arc<Mutex<Lifetime>>>,
    /// Of every upstream site, as its sessions are opened.
    dialers: Vec<Dialer>,
    started: Instant,
    /// This node is the only one here: the control socket is its own.
    _lock: File,
    /// Tracer tokens that were posted here, the newest first.
    pub(crate) tracers: Mutex<VecDeque<TracerReport>>,
}

/// What a subscription needs of the publication that it follows.
struct Followed {
    store: Arc<SegmentedStore>,
    source: Arc<dyn Source>,
    ready: watch::Receiver<u64>,
    durability: Durability,
    capture: Option<Arc<Capture>>,
}

impl Site {
    /// Opens every store. Blocks on the disk.
    pub fn open(config: SiteConfig) -> Result<Site, SiteError> {
        std::fs::create_dir_all(&config.data_dir).map_err(|error| SiteError::DataDir {
            action: "create",
            path: config.data_dir.clone(),
            error,
        })?;
        let lock = take_folder(&config.data_dir)?;
        // Before they are loaded: what replaces them meanwhile is seen as new.
        let sites = &config.sites;
        let seen = sites.identity.as_ref().map(|files| Seen::look(files, &sites.revocations));
        let identity = sites.identity.as_ref().map(Identity::load).transpose()?;
        if let Some(identity) = identity.as_ref().filter(|id| id.site() != config.name) {
            return Err(SiteError::AnotherSite {
                site: config.name.clone(),
                named: identity.site().to_owned(),
            });
        }
        let identity = identity.map(Arc::new);
        let (mut publications, mut unopened) = (Vec::new(), Vec::new());
        for publication in &config.publications {
            let name = publication.spec.name.clone();
            let store = match stores::open(&config, publication) {
                Ok(store) => store,
                Err(why) => {
                    unopened.push(Unopened::without(&name, None, why)?);
                    continue;
                }
            };
            let (ready, _) = watch::channel(0);
            let source = Direct::new(publication.spec.clone());
            let capture = Capture {
                spec: publication.spec.clone(),
                store: store.clone(),
                status: Arc::new(Mutex::new(CaptureStatus::default())),
                ready,
                text_only: AtomicBool::new(false),
                stream_only: AtomicBool::new(false),
                awaited: source.awaited(),
            };
            publications.push(PublicationAgent {
                name,
                store,
                durability: Durability::default(),
                source,
                asked_by_gates: PublisherAsked::default(),
                capture: Arc::new(capture),
                failure: Arc::default(),
                switch: Arc::new(Switch::new(false)),
                retention: publication.log.retention.clone(),
                tracing: tokio::sync::Mutex::default(),
            });
        }
        let (mut received, mut dialers) = (Vec::new(), Vec::new());
        for (log, identity) in config.sites.received.iter().zip(identity.iter().cycle()) {
            let dialer = sites::dialer(&config.sites, &log.upstream, identity)?;
            let Some((dialer, upstream)) = dialer.zip(config.sites.upstream(&log.upstream)) else {
                continue;
            };
            dialers.push(dialer.clone());
            let folder = stores::received_folder(&config, &log.name);
            let store = match stores::open_at(&folder, &log.name, &upstream.log) {
                Ok(store) => store,
                Err(why) => {
                    unopened.push(Unopened::without(&log.name, Some(&log.upstream), why)?);
                    continue;
                }
            };
            received.push(ReceivedAgent {
                name: log.name.clone(),
                durability: Durability::default(),
                receive: Arc::new(Receive {
                    site: log.upstream.clone(),
                    publication: log.publication.clone(),
                    folder: folder.display().to_string(),
                    dialer,
                    store,
                    status: Mutex::new(ReceiveStatus::default()),
                    spills: Arc::default(),
                    held: Mutex::default(),
                    lack: Mutex::default(),
                    ready: watch::channel(0).0,
                }),
                failure: Arc::default(),
                switch: Arc::new(Switch::new(false)),
                retention: upstream.log.retention.clone(),
            });
        }
        let unopened = unopened::check_rest(unopened, &config)?;
        let mut subscriptions = Vec::new();
        for subscription in &config.subscriptions {
            let followed = followed(&publications, &received, &subscription.publication);
            let Some(Followed { store, source, ready, durability, capture }) = followed else {
                continue;
            };
            let paused = operate::is_paused(store.as_ref(), &subscription.spec.name);
            if paused {
                tracing::info!(subscription = %subscription.spec.name, "paused; farshore resume lets it go on");
            }
            subscriptions.push(SubscriptionAgent {
                name: subscription.spec.name.clone(),
                publication: subscription.publication.clone(),
                store: store.clone(),
                durability,
                capture,
                subscription: Arc::new(Subscription {
                    spec: subscription.spec.clone(),
                    source,
                    // Capture has added nothing yet.
                    given: Arc::new(Given::new(store.durable().borrow().0)),
                    store,
                    capture_ready: ready,
                    status: Arc::new(Mutex::new(SubscriptionStatus::default())),
                    detaching: LogPoints::default(),
                    unlogged: LogPoints::of_columns(),
                    noting: LogPoints::of_columns(),
                    halts: Halts::default(),
                }),
                first_left: Arc::default(),
                failure: Arc::default(),
                switch: Arc::new(Switch::new(paused)),
            });
        }
        let near_mirrors: BTreeMap<String, Arc<NearAgent>> = config
            .mirrors
            .near
            .iter()
            .map(|mirror| (mirror.name.clone(), Arc::new(NearAgent::new(mirror, &config.data_dir))))
            .collect();
        for open in secrets::open_to_all(&config.secret_files) {
            tracing::warn!("{}: {}", open.what, open.remedy);
        }
        for left in mirrors::left_behind(&config) {
            tracing::warn!("{}. {}", left.what, left.remedy);
        }
        let mut far_mirrors = Vec::new();
        for mirror in &config.mirrors.far {
            let near_side = match (&mirror.upstream, &identity) {
                (Some(upstream), Some(identity)) => {
                    let dialer = sites::dialer(&config.sites, upstream, identity)?;
                    dialers.extend(dialer.clone());
                    dialer.map(NearSide::Link)
                }
                (Some(_), None) => None,
                (None, _) => near_mirrors
                    .get(&mirror.name)
                    .map(|near| NearSide::Direct { near: near.clone(), site: config.name.clone() }),
            };
            let Some(near_side) = near_side else { continue };
            far_mirrors.push(Arc::new(FarAgent::open(mirror, &config.data_dir, near_side)));
        }
        for mirror in &config.mirrors.near {
            let streamed = config.mirrors.streamed_by(mirror).map(|far| far.name.as_str());
            let spool = far_mirrors.iter().find(|agent| Some(agent.name()) == streamed);
            if let Some((near, spool)) = near_mirrors.get(&mirror.name).zip(spool) {
                near.streams_from(spool);
            }
        }
        let serving = config.sites.listen.as_ref().map(|_| {
            let publications = served(&publications, &received);
            let missing = unopened.iter().map(|log| (log.name.clone(), log.why())).collect();
            let (sites, mirrors) = (config.sites.clone(), near_mirrors.clone());
            Arc::new(Serving::new(sites, publications, missing, mirrors))
        });
        let site = Site {
            config,
            publications,
            received,
            subscriptions,
            unopened,
            near_mirrors,
            far_mirrors,
            serving,
            lifetime: identity.as_deref().map(|own| Arc::new(Mutex::new(Lifetime::of(own)))),
            identity: identity.zip(seen),
            dialers,
            started: Instant::now(),
            _lock: lock,
            tracers: Mutex::default(),
        };
        stores::drop_cursors_of_removed(
            site.logs().map(|(name, store, _)| (name, store)),
            &site.config,
        );
        Ok(site)
    }

    /// Every log that is kept here: name, store, and how long it is kept.
    fn logs(&self) -> impl Iterator<Item = (&str, &SegmentedStore, &farshore_store::Retention)> {
        let own = self.publications.iter();
        let own = own.map(|agent| (agent.name.as_str(), agent.store.as_ref(), &agent.retention));
        let received = self.received.iter();
        own.chain(
            received
                .map(|agent| (agent.name.as_str(), agent.receive.store.as_ref(), &agent.retention)),
        )
    }

    /// When each log that is kept here became durable.
    fn durabilities(&self) -> impl Iterator<Item = (&Durability, &SegmentedStore)> {
        let own = self.publications.iter().map(|agent| (&agent.durability, agent.store.as_ref()));
        let received = self.received.iter();
        own.chain(received.map(|agent| (&agent.durability, agent.receive.store.as_ref())))
    }

    /// The far end here of a mirror.
    ///
    /// # Errors
    /// There is none, for a person.
    pub(crate) fn far_mirror(&self, name: &str) -> Result<Arc<FarAgent>, String> {
        if let Some(agent) = self.far_mirrors.iter().find(|agent| agent.name() == name) {
            return Ok(agent.clone());
        }
        if self.near_mirrors.contains_key(name) {
            return Err(format!(
                "mirror \"{name}\" has its near end here: ask at the site of its far end"
            ));
        }
        Err(operate::unknown("mirror", name))
    }

    /// Lets a mirror go on that was dropped, if its near end is here, or that has stopped, if its far
    /// end is.
    ///
    /// # Errors
    /// Why not, for a person.
    pub(crate) async fn resume_mirror(&self, name: &str) -> Result<String, String> {
        let near = self.near_mirrors.get(name);
        let far = self.far_mirrors.iter().find(|agent| agent.name() == name);
        match (near, far) {
            // Of a direct mirror both are here.
            (Some(near), Some(far)) if !near.is_dropped() && far.has_stopped() => {
                far.resume().await
            }
            (Some(near), _) => near.resume().await,
            (None, Some(far)) => far.resume().await,
            (None, None) => Err(operate::unknown("mirror", name)),
        }
    }

    async fn listen(&self) -> Result<Option<Listener>, SiteError> {
        let (Some(address), Some((identity, _))) = (&self.config.sites.listen, &self.identity)
        else {
            return Ok(None);
        };
        let listener = Listener::bind(address, identity.clone(), LinkOptions::default()).await?;
        tracing::info!(address = %listener.local_address(), "downstream sites may connect");
        Ok(Some(listener))
    }

    /// Runs until `stop` turns true, then stops everything in order: nothing durable is lost
    /// either way, and a stop in order leaves less to do again.
    pub async fn run(self: Arc<Site>, stop: watch::Receiver<bool>) -> Result<(), SiteError> {
        let listener = self.listen().await?;
        let path = control::socket_path(&self.config.data_dir);
        let control = control::listen(&self.config.data_dir)
            .map_err(|error| SiteError::DataDir { action: "listen on", path, error })?;
        let site = self.clone();
        let control = tokio::spawn(control::serve(control, move |request, lines| {
            operate::answer(site.clone(), request, lines)
        }));
        let retention = tokio::spawn(self.clone().enforce_retention());
        let mut agents = JoinSet::new();
        for (durability, store) in self.durabilities() {
            agents.spawn(legs::follow(durability.clone(), store.durable(), stop.clone()));
        }
        if let Some(settings) = self.config.monitor.clone() {
            agents.spawn(monitoring::run(self.clone(), settings, stop.clone()));
        }
        let listener = listener.map(Arc::new);
        if let Some((listener, serving)) = listener.clone().zip(self.serving.clone()) {
            agents.spawn(serving.run(listener, stop.clone()));
        }
        let files = self.config.sites.identity.clone().zip(self.identity.as_ref());
        let files = files.zip(self.lifetime.clone());
        let renewal = files.map(|((files, (_, loaded)), lifetime)| {
            let (site, loaded) = (self.config.name.clone(), loaded.clone());
            let dialers = self.dialers.clone();
            let revocations = self.config.sites.revocations.clone();
            let renewal = Renewal { files, revocations, loaded, site, dialers, listener, lifetime };
            tokio::spawn(renewal.watch())
        });
        for agent in &self.received {
            let (switch, stop) = (agent.switch.clone(), stop.clone());
            let (name, receive) = (agent.name.clone(), agent.receive.clone());
            let failure = agent.failure.clone();
            agents.spawn(async move {
                let run = |halted| {
                    running::run_receive(name.clone(), receive.clone(), failure.clone(), halted)
                };
                switch.keep(stop, run).await;
            });
        }
        for agent in self.near_mirrors.values() {
            let (agent, stop) = (agent.clone(), stop.clone());
            agents.spawn(async move { agent.watch(stop).await });
        }
        for agent in &self.far_mirrors {
            agents.spawn(agent.clone().run(stop.clone()));
        }
        for agent in &self.publications {
            let site = self.clone();
            let (switch, stop) = (agent.switch.clone(), stop.clone());
            let (capture, failure) = (agent.capture.clone(), agent.failure.clone());
            agents.spawn(async move {
                let run = |halted| {
                    running::run_capture(site.clone(), capture.clone(), failure.clone(), halted)
                };
                switch.keep(stop, run).await;
            });
        }
        for agent in &self.subscriptions {
            let site = self.clone();
            let (switch, stop) = (agent.switch.clone(), stop.clone());
            let (subscription, failure) = (agent.subscription.clone(), agent.failure.clone());
            agents.spawn(async move {
                let run = |halted| {
                    running::run_subscription(
                        site.clone(),
                        subscription.clone(),
                        failure.clone(),
                        halted,
                    )
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
        renewal.inspect(|renewal| renewal.abort());
        control.abort();
        let _ = std::fs::remove_file(control::socket_path(&self.config.data_dir));
        Ok(())
    }

    async fn enforce_retention(self: Arc<Site>) {
        let mut every = tokio::time::interval(DROP_EVERY);
        let mut all_enforced_at: Option<Instant> = None;
        // What was told of each log last: a full disk may be that of the node's own messages.
        let mut told: BTreeMap<String, String> = BTreeMap::new();
        loop {
            every.tick().await;
            let all = all_enforced_at.is_none_or(|at| at.elapsed() >= RETENTION_EVERY);
            if all {
                all_enforced_at = Some(Instant::now());
            }
            let site = self.clone();
            let mut before = std::mem::take(&mut told);
            let enforced = tokio::task::spawn_blocking(move || {
                for (name, store, retention) in site.logs() {
                    if !all && !store.has_several_segments() {
                        continue;
                    }
                    match store.enforce_retention(retention) {
                        Ok(expired) => {
                            for cursor in expired {
                                tracing::error!(
                                    publication = %name,
                                    reader = %stores::reader_of(&cursor.name),
                                    applied = %cursor.applied,
                                    "retention limits dropped changes that it still needed; {}",
                                    stores::without_its_log(&cursor.name)
                                );
                            }
                        }
                        Err(error) if !all => {
                            tracing::debug!(publication = %name, "retention: {error}")
                        }
                        Err(error) => {
                            let error = error.to_string();
                            if before.get(name) != Some(&error) {
                                tracing::warn!(publication = %name, "retention: {error}");
                            }
                            before.insert(name.to_owned(), error);
                            continue;
                        }
                    }
                    if all {
                        before.remove(name);
                    }
                }
                before
            });
            match enforced.await {
                Ok(still) => told = still,
                Err(_) => tracing::error!("the retention task died"),
            }
        }
    }

    pub(crate) fn subscription(&self, name: &str) -> Result<&SubscriptionAgent, String> {
        let found = self.subscriptions.iter().find(|agent| agent.name == name);
        found.ok_or_else(|| {
            let follows = self.config.subscriptions.iter().find(|s| s.spec.name == name);
            match follows.and_then(|s| self.why_unopened(&s.publication)) {
                Some(why) => format!("subscription \"{name}\" has stopped: {why}"),
                None => operate::unknown("subscription", name),
            }
        })
    }

    /// Why a publication that is not known here is not, for a person.
    pub(crate) fn no_publication(&self, name: &str) -> String {
        self.why_unopened(name).unwrap_or_else(|| operate::unknown("publication", name))
    }

    fn why_unopened(&self, publication: &str) -> Option<String> {
        let log = self.unopened.iter().find(|log| log.name == publication)?;
        Some(log.why())
    }

    /// Publications of this site.
    pub(crate) fn publication_agents(&self) -> &[PublicationAgent] {
        &self.publications
    }

    /// Names of the subscriptions that follow a publication.
    pub(crate) fn followers(&self, publication: &str) -> impl Iterator<Item = String> {
        let all = self.subscriptions.iter();
        all.filter(move |agent| agent.publication == publication).map(|agent| agent.name.clone())
    }

    /// What downstream sites have durably of a publication, by site.
    pub(crate) fn durable_downstream(&self, publication: &str) -> BTreeMap<String, Lsn> {
        let all = self.serving.iter().flat_map(|serving| serving.following());
        let of_it = all.filter(|((_, followed), _)| followed == publication);
        of_it.map(|((site, _), following)| (site, following.durable)).collect()
    }

    /// The log of a publication, of this site or received.
    pub(crate) fn log(&self, name: &str) -> Option<Arc<SegmentedStore>> {
        let own = self.publications.iter().find(|agent| agent.name == name);
        let received = self.received.iter().find(|agent| agent.name == name);
        own.map(|agent| &agent.store).or(received.map(|agent| &agent.receive.store)).cloned()
    }

    /// The switch of what fills a publication's log: capture, or the receiver.
    pub(crate) fn log_switch(&self, name: &str) -> Option<Arc<Switch>> {
        let own = self.publications.iter().find(|agent| agent.name == name);
        let received = self.received.iter().find(|agent| agent.name == name);
        own.map(|agent| &agent.switch).or(received.map(|agent| &agent.switch)).cloned()
    }

    /// Why nothing fills a publication's log, if anything is in the way.
    pub(crate) fn log_trouble(&self, name: &str) -> Option<String> {
        let own = self.publications.iter().find(|agent| agent.name == name);
        let received = self.received.iter().find(|agent| agent.name == name);
        own.map(|agent| agent.trouble()()).or(received.map(|agent| agent.trouble()())).flatten()
    }

    /// The site's state now.
    pub fn report(&self) -> SiteReport {
        let (lifetime, now) = (self.lifetime.as_ref().map(|l| *lock(l)), SystemTime::now());
        let mut report = SiteReport {
            site: self.config.name.clone(),
            pid: std::process::id(),
            uptime_seconds: self.started.elapsed().as_secs(),
            certificate_seconds_left: lifetime.map(|lifetime| lifetime.seconds_left(now)),
            certificate_ends_soon: lifetime.is_some_and(|lifetime| lifetime.ends_soon(now)),
            publications: self
                .publications
                .iter()
                .map(PublicationAgent::report)
                .chain(self.received.iter().map(ReceivedAgent::report))
                .chain(self.unopened.iter().map(Unopened::report))
                .collect(),
            downstreams: self
                .serving
                .iter()
                .flat_map(|serving| self.downstreams(serving))
                .collect(),
            subscriptions: self
                .subscriptions
                .iter()
                .map(SubscriptionAgent::report)
                .chain(unopened::followers(&self.unopened, &self.config))
                .collect(),
            mirrors: self
                .near_mirrors
                .values()
                // Of a direct one the far end tells.
                .filter(|agent| !agent.is_direct())
                .map(|agent| agent.report())
                .chain(self.far_mirrors.iter().map(|agent| agent.report()))
                .collect(),
            tracers: self.tracers(),
        };
        // What the publisher has that was not heard of yet cannot be told.
        let troubled: BTreeSet<&str> = self
            .publications
            .iter()
            .filter(|agent| agent.trouble()().is_some())
            .map(|agent| &*agent.name)
            .chain(
                self.received
                    .iter()
                    .filter(|agent| agent.trouble()().is_some())
                    .map(|agent| &*agent.name),
            )
            .collect();
        let is_heard = |name: &str| {
            let mut publications = report.publications.iter();
            publications.any(|p| {
                let comes = matches!(&*p.state, "streaming" | "receiving");
                p.name == name && comes && !troubled.contains(name)
            })
        };
        let heard: Vec<bool> =
            report.subscriptions.iter().map(|s| is_heard(&s.publication)).collect();
        for (subscription, heard) in report.subscriptions.iter_mut().zip(heard) {
            if !heard && subscription.latency_ms == Some(0.0) {
                subscription.latency_ms = None;
            }
        }
        farshore_monitor::judge(&mut report, &self.config.limits);
        report
    }
}

impl Site {
    /// Leg link, milliseconds, and commands that are durable here and not there, as far as they
    /// were counted here.
    fn link_leg(
        &self,
        publication: &str,
        following: &sites::serve::Following,
    ) -> (Option<f64>, Option<u64>) {
        let there = following.durable;
        if let Some(own) = self.publications.iter().find(|agent| agent.name == publication) {
            let counted = lock(&own.capture.status).transactions.commands_after(there);
            let commands = counted.map(|(commands, _)| commands);
            return (following.link_ms(&lock(&own.durability)), commands);
        }
        let received = self.received.iter().find(|agent| agent.name == publication);
        (received.and_then(|agent| following.link_ms(&lock(&agent.durability))), None)
    }

    fn downstreams(&self, serving: &Serving) -> Vec<DownstreamReport> {
        let report =
            |((site, publication), following): ((String, String), sites::serve::Following)| {
                let end = self.log(&publication).map_or(Lsn::ZERO, |log| log.durable().borrow().0);
                let (link_ms, behind_commands) = self.link_leg(&publication, &following);
                DownstreamReport {
                    link_ms,
                    behind_commands,
                    site,
                    publication,
                    connected: following.connected,
                    durable: following.durable.to_string(),
                    error: following.error.clone(),
                    dropped_before: following.dropped_before.map(|start| start.to_string()),
                    behind_bytes: end.bytes_since(following.durable),
                    sent_bytes: following.sent_bytes,
                    packed_bytes: following.packed_bytes,
                }
            };
        serving.following().into_iter().map(report).collect()
    }
}

fn followed(
    publications: &[PublicationAgent],
    received: &[ReceivedAgent],
    name: &str,
) -> Option<Followed> {
    if let Some(agent) = publications.iter().find(|agent| agent.name == name) {
        return Some(Followed {
            store: agent.store.clone(),
            source: Arc::new(agent.source.clone()),
            ready: agent.capture.ready.subscribe(),
            durability: agent.durability.clone(),
            capture: Some(agent.capture.clone()),
        });
    }
    let agent = received.iter().find(|agent| agent.name == name)?;
    let receive = &agent.receive;
    let opener =
        SourceOpener { dialer: receive.dialer.clone(), publication: receive.publication.clone() };
    Some(Followed {
        store: receive.store.clone(),
        source: Arc::new(Remote::new(&receive.site, Arc::new(opener))),
        ready: receive.ready.subscribe(),
        durability: agent.durability.clone(),
        capture: None,
    })
}

/// What downstream sites can be given.
fn served(
    publications: &[PublicationAgent],
    received: &[ReceivedAgent],
) -> BTreeMap<String, Served> {
    let own = publications.iter().map(|agent| {
        let source =
            ServedSource::Here(Box::new(agent.source.clone()), Arc::new(Registry::default()));
        let ready = agent.capture.ready.subscribe();
        let trouble = Box::new(agent.trouble());
        (agent.name.clone(), Served { store: agent.store.clone(), ready, source, trouble })
    });
    let received = received.iter().map(|agent| {
        let receive = &agent.receive;
        let source = ServedSource::Upstream(receive.dialer.clone(), receive.publication.clone());
        let ready = receive.ready.subscribe();
        let trouble = Box::new(agent.trouble());
        (agent.name.clone(), Served { store: receive.store.clone(), ready, source, trouble })
    });
    own.chain(received).collect()
}
