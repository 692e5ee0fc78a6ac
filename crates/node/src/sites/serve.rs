//! Sessions of downstream sites, and what they may have.

mod log;
mod places;
mod refusals;

use super::channel::SessionChannel;
use super::measure::Host;
use super::measure::serve::{Allowances, Measured, SESSION_TIME_MAX};
use super::protocol::{AskEnd, Wanted};
use crate::agents::lock;
use crate::config::sites::{Downstream, SitesConfig};
use crate::legs::milliseconds;
use crate::mirrors::NearAgent;
use farshore_capture::source::{Direct, Registry, serve};
use farshore_link::{Dialer, Incoming, LinkError, LinkOptions, Listener, Pacer, Session};
use farshore_mirror::MirrorError;
use farshore_mirror::relay::end::EndRequest;
use farshore_mirror::relay::message::MirrorRequest;
use farshore_mirror::seed::{BackupRequest, SeedRequest};
use farshore_mirror::spool::SlotName;
use farshore_model::{Lsn, PgTime, Timeline, leg_micros};
use farshore_store::LogStore;
use farshore_store::segmented::SegmentedStore;
use log::Takes;
use places::Places;
use refusals::Refusals;
use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

/// Sessions of one site that may ask publishers at once; each holds connections to one.
const ASKING_MAX: usize = 256;

/// How long one more of them waits for another's end; less than who asks has patience.
const ASKING_WAIT: Duration = Duration::from_secs(5);

/// A question that has to be passed on is answered within this, be it by a refusal: who asks has
/// patience for ten seconds, and then knows nothing but that there was no answer.
const PASSED_ON_WITHIN: Duration = Duration::from_secs(8);

/// How long an ended session's last words may take.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Longest message that a downstream site sends, in bytes: what it is told is long, what it says is
/// not (names of tables, the digests of one file). One that is granted little may ask for no more
/// memory than that, in each of its sessions.
const MESSAGE_OF_A_DOWNSTREAM_MAX: u32 = 32 << 20;

fn of_a_downstream() -> LinkOptions {
    LinkOptions { message_bytes_max: MESSAGE_OF_A_DOWNSTREAM_MAX, ..LinkOptions::default() }
}

/// What a downstream site is called among a store's cursors; no subscription can have such a name.
pub(crate) fn cursor_of(site: &str) -> String {
    format!("@{site}")
}

/// A publication that downstream sites can be given.
pub(crate) struct Served {
    /// Its log.
    pub store: Arc<SegmentedStore>,
    /// Counts occasions on which tables may have joined it.
    pub ready: watch::Receiver<u64>,
    /// Where its publisher can be asked.
    pub source: ServedSource,
    /// Why its log gets nothing more, if that is so.
    pub trouble: Box<dyn Fn() -> Option<String> + Send + Sync>,
}

/// Where a publication's publisher can be asked.
pub(crate) enum ServedSource {
    /// From here, together with this site's own subscriptions.
    Here(Box<Direct>, Arc<Registry>),
    /// At the site that it comes from, under this name.
    Upstream(Dialer, String),
}

/// How a downstream site follows a publication.
#[derive(Clone, Debug, Default)]
pub(crate) struct Following {
    /// A session is open.
    pub connected: bool,
    /// Counts the sessions: what ends one says nothing of a newer one.
    session: u64,
    /// Durable there.
    pub durable: Lsn,
    /// Where the log here begins, if what it still needed was dropped.
    pub dropped_before: Option<Lsn>,
    /// Why the log cannot be sent to it, or why it was refused for good.
    pub error: Option<String>,
    /// The same of the session before, while nothing was sent since: it was logged.
    logged: Option<String>,
    /// Bytes sent in the session that is open.
    pub sent_bytes: u64,
    /// Payload bytes that crossed in packs in this session, before compression.
    pub packed_bytes: u64,
    /// When it had told that it has which position, of all sessions.
    arrivals: Arc<Mutex<Timeline>>,
}

impl Following {
    /// How long it takes from durable here to its word that it is durable there, milliseconds.
    pub fn link_ms(&self, durability: &Timeline) -> Option<f64> {
        let arrivals = lock(&self.arrivals);
        leg_micros(durability, &arrivals, self.durable, PgTime::now()).map(milliseconds)
    }
}

/// What downstream sites are given.
pub(crate) struct Serving {
    sites: SitesConfig,
    publications: BTreeMap<String, Served>,
    /// Those whose log could not be opened, and why.
    missing: BTreeMap<String, String>,
    /// Near ends by name.
    mirrors: BTreeMap<String, Arc<NearAgent>>,
    pacers: HashMap<String, Arc<Pacer>>,
    /// By site and publication.
    following: Mutex<BTreeMap<(String, String), Following>>,
    /// Sessions of each site that ask a publisher.
    asking: HashMap<String, Arc<Semaphore>>,
    /// Who measures has it: one at a time, so that nobody else's figures, nor replication, suffer.
    measuring: Arc<Semaphore>,
    /// How much sites have measured.
    allowances: Mutex<Allowances>,
    /// Counts the sessions of each site and publication: a new one ends the one before it.
    sessions: Mutex<HashMap<(String, String), Sessions>>,
    /// Which node has the place of each site.
    places: Places,
    /// What sites were refused lately.
    refusals: Refusals,
}

impl Serving {
    /// What these sites are given of these publications and mirrors.
    pub fn new(
        sites: SitesConfig,
        publications: BTreeMap<String, Served>,
        missing: BTreeMap<String, String>,
        mirrors: BTreeMap<String, Arc<NearAgent>>,
    ) -> Serving {
        let pacers = sites.downstreams.iter().map(|downstream| {
            (downstream.site.clone(), Arc::new(Pacer::new(downstream.rates.clone())))
        });
        let pacers = pacers.collect();
        let asking = sites
            .downstreams
            .iter()
            .map(|downstream| (downstream.site.clone(), Arc::new(Semaphore::new(ASKING_MAX))));
        let asking = asking.collect();
        Serving {
            sites,
            publications,
            missing,
            mirrors,
            pacers,
            following: Mutex::default(),
            asking,
            measuring: Arc::new(Semaphore::new(1)),
            allowances: Mutex::default(),
            sessions: Mutex::default(),
            places: Places::default(),
            refusals: Refusals::default(),
        }
    }

    /// The state of every downstream site, by site and publication.
    pub fn following(&self) -> BTreeMap<(String, String), Following> {
        let mut all = self.lock_following().clone();
        for downstream in &self.sites.downstreams {
            let second = self.places.second(&downstream.site, Instant::now());
            for publication in &downstream.publications {
                let following =
                    all.entry((downstream.site.clone(), publication.clone())).or_default();
                following.error = following.error.take().or_else(|| second.clone());
                let Some(served) = self.publications.get(publication) else { continue };
                let cursors = served.store.cursors();
                let name = cursor_of(&downstream.site);
                if let Some(cursor) = cursors.iter().find(|cursor| cursor.name == name) {
                    following.durable = cursor.applied.0;
                    following.dropped_before = cursor.expired;
                }
            }
        }
        all
    }

    /// Logs that a site follows at this moment.
    fn followed_by(&self, site: &str) -> usize {
        let following = self.lock_following();
        following.iter().filter(|((other, _), state)| other == site && state.connected).count()
    }

    /// Notes that a session has begun to follow this log, from there on, until what is returned is
    /// dropped.
    fn connected(&self, key: &(String, String), durable: Lsn) -> Connected<'_> {
        let mut all = self.lock_following();
        let before = all.remove(key).unwrap_or_default();
        let (arrivals, logged) = (before.arrivals, before.error.or(before.logged));
        let session = before.session + 1;
        let begun =
            Following { connected: true, session, durable, arrivals, logged, ..Default::default() };
        all.insert(key.clone(), begun);
        Connected { serving: self, key: key.clone(), session }
    }

    fn lock_following(&self) -> MutexGuard<'_, BTreeMap<(String, String), Following>> {
        self.following.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Serves whoever connects until `stop` turns true.
    pub async fn run(self: Arc<Self>, listener: Arc<Listener>, mut stop: watch::Receiver<bool>) {
        let mut sessions = JoinSet::new();
        loop {
            let incoming = tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => break,
                Some(_) = sessions.join_next(), if !sessions.is_empty() => continue,
                incoming = listener.next() => incoming,
            };
            let (serving, stop) = (self.clone(), stop.clone());
            sessions.spawn(async move {
                let (site, judged_anew) = (incoming.site.clone(), incoming.judged_anew());
                tokio::select! {
                    () = serving.session(incoming, stop) => {}
                    () = judged_anew => {
                        tracing::info!(%site, "session ended: certificates were replaced, and it is to be let in anew");
                    }
                }
            });
        }
        sessions.shutdown().await;
    }

    async fn session(&self, incoming: Incoming, mut stop: watch::Receiver<bool>) {
        let (site, peer, came_at) = (incoming.site.clone(), incoming.peer, Instant::now());
        let Some(downstream) = self.sites.downstream(&site) else {
            let why = format!("there is no [downstream.{site}] in the site file here");
            self.refusals.tell(&site, Some(peer), &why);
            return incoming.refuse(&why).await;
        };
        let wanted: Wanted = match serde_json::from_slice(&incoming.request) {
            Ok(wanted) => wanted,
            Err(error) => {
                tracing::warn!(%site, %peer, "refused: a request that cannot be read ({error})");
                return incoming.refuse("the request cannot be read: is it a newer version?").await;
            }
        };
        let publication = match &wanted {
            Wanted::Log { publication, .. } | Wanted::Source { publication } => publication.clone(),
            Wanted::Mirror(MirrorRequest { mirror, .. })
            | Wanted::MirrorEnd(AskEnd { request: EndRequest { mirror }, .. })
            | Wanted::Seed(SeedRequest { mirror, .. })
            | Wanted::Backup(BackupRequest { mirror, .. }) => {
                let mirror = mirror.clone();
                return self.mirror(downstream, incoming, (&mirror, wanted), stop).await;
            }
            Wanted::Measure {} => return self.measure(downstream, incoming, stop).await,
        };
        let granted = downstream.publications.contains(&publication);
        let Some(served) = self.publications.get(&publication).filter(|_| granted) else {
            let why = match self.missing.get(&publication).filter(|_| granted) {
                Some(why) => why.clone(),
                // Whether there is such a publication is none of its business.
                None => format!(
                    "publication \"{publication}\" is not granted to site \"{site}\". Name it under \
                     [downstream.{site}] publications, if that site may have it"
                ),
            };
            self.refusals.tell(&site, Some(peer), &why);
            return incoming.refuse(&why).await;
        };
        let _permit = match (&wanted, self.asking.get(&site)) {
            (Wanted::Source { .. }, Some(asking)) => match self.turn(asking).await {
                Some(permit) => Some(permit),
                None => {
                    let why = format!("{ASKING_MAX} sessions of it ask publishers already");
                    self.refusals.tell(&site, Some(peer), &why);
                    return incoming.refuse(&why).await;
                }
            },
            _ => None,
        };
        // Before the session is accepted: if it fails there, who asks is to know why.
        let upstream = match (&wanted, &served.source) {
            (Wanted::Source { .. }, ServedSource::Upstream(dialer, name)) => {
                match open_upstream(dialer, name, came_at + PASSED_ON_WITHIN).await {
                    Ok(session) => Some(session),
                    Err(why) => {
                        let told = format!("publication \"{publication}\": {why}");
                        self.refusals.tell(&site, Some(peer), &told);
                        return incoming.refuse(&why).await;
                    }
                }
            }
            _ => None,
        };
        let pacer = self.pacers.get(&site).cloned();
        let options = LinkOptions { pacer, ..of_a_downstream() };
        let session = match incoming.accept(options).await {
            Ok(session) => session,
            Err(error) => return tracing::warn!(%site, %peer, "{error}"),
        };
        let halted = stop.clone();
        let stopped = async {
            let _ = stop.wait_for(|stop| *stop).await;
        };
        let ended = tokio::select! {
            () = stopped => Ok(()),
            ended = self.serve((downstream, peer), &publication, served, (session, upstream), wanted, halted) => ended,
        };
        if let Err(error) = ended {
            tracing::warn!(%site, %publication, "session ended: {error}");
        }
    }

    async fn mirror(
        &self,
        downstream: &Downstream,
        incoming: Incoming,
        (name, wanted): (&String, Wanted),
        mut stop: watch::Receiver<bool>,
    ) {
        let site = &downstream.site;
        let granted = downstream.mirrors.contains(name);
        let Some(mirror) = self.mirrors.get(name).filter(|_| granted) else {
            let why = format!(
                "mirror \"{name}\" is not granted to site \"{site}\". Name it under \
                 [downstream.{site}] mirrors, if that site may have it"
            );
            self.refusals.tell(site, Some(incoming.peer), &why);
            return incoming.refuse(&why).await;
        };
        let pacer = self.pacers.get(site).cloned();
        // Commits may wait for a mirror, and for nothing else that goes there.
        let goes_first = matches!(wanted, Wanted::Mirror(_));
        let options = LinkOptions { pacer, goes_first, ..of_a_downstream() };
        let session = match incoming.accept(options).await {
            Ok(session) => session,
            Err(error) => return tracing::warn!(%site, mirror = %name, "{error}"),
        };
        // A publication's name has no colon.
        let kind = match &wanted {
            // Two standbys may be seeded at once; one that is begun anew ends what was broken off.
            Wanted::Seed(SeedRequest { slot: Some(slot), .. }) if SlotName::new(slot).is_some() => {
                &format!("seed {slot}")
            }
            Wanted::Seed(_) => "seed",
            // Several clients may take one each.
            Wanted::Backup(_) => {
                let ended = tokio::select! {
                    _ = stop.wait_for(|stop| *stop) => return,
                    ended = mirror.answer(session, wanted) => ended,
                };
                if let Err(error) = ended {
                    tracing::warn!(%site, mirror = %name, "base backup ended: {error}");
                }
                return;
            }
            // Who only looks is not in the way of a promotion.
            Wanted::MirrorEnd(AskEnd { closed: false, hold: None, .. }) => "look",
            Wanted::MirrorEnd(_) => "end",
            _ => "mirror",
        };
        if let Some(refused) = mirror.refuses(&wanted) {
            tracing::warn!(%site, mirror = %name, "refused: {refused}");
            if let Err(error) = farshore_mirror::receive::refuse(session, &refused).await {
                tracing::debug!(%site, mirror = %name, "{error}");
            }
            return;
        }
        let mut newer = self.begin_session(&(site.clone(), format!("{kind}:{name}")));
        let ended = tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return,
            // What the old one waits for is as dead as its peer.
            _ = newer.changed() => return,
            ended = mirror.answer(session, wanted) => ended,
        };
        match ended {
            Ok(()) => {}
            // Said when it was dropped, and in `status`; the far end asks every few seconds.
            Err(error @ MirrorError::Dropped(_)) => {
                tracing::debug!(%site, mirror = %name, "refused: {error}");
            }
            Err(error) => tracing::warn!(%site, mirror = %name, "session ended: {error}"),
        }
    }

    /// Lets a site measure the line, within bounds.
    async fn measure(
        &self,
        downstream: &Downstream,
        incoming: Incoming,
        mut stop: watch::Receiver<bool>,
    ) {
        let site = &downstream.site;
        // A session of before may have its last words yet.
        let Some(_turn) = self.turn(&self.measuring).await else {
            tracing::warn!(%site, "refused to measure the line: it is being measured");
            return incoming
                .refuse("a line of this site is being measured; try again when that has ended")
                .await;
        };
        let allowed = self
            .allowances
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .left(site, Instant::now());
        if let Err(why) = allowed {
            self.refusals.tell(site, Some(incoming.peer), &why);
            return incoming.refuse(&why).await;
        }
        let pacer = self.pacers.get(site).cloned();
        let host = Host {
            compression: downstream.compression,
            bandwidth: pacer.as_ref().and_then(|pacer| pacer.rate()).map(Into::into),
            publications: downstream.publications.clone(),
            following: self.followed_by(site),
            ..Host::here()
        };
        let options = LinkOptions { pacer, ..of_a_downstream() };
        let session = match incoming.accept(options).await {
            Ok(session) => session,
            Err(error) => return tracing::warn!(%site, "{error}"),
        };
        tracing::info!(%site, "the line is being measured");
        let measured = Measured {
            site,
            host,
            publications: &self.publications,
            allowances: &self.allowances,
            sample: bytes::BytesMut::new(),
        };
        let ended = tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return,
            ended = tokio::time::timeout(SESSION_TIME_MAX, measured.run(session)) => ended,
        };
        match ended {
            Ok(Ok(())) => tracing::info!(%site, "the line was measured"),
            Ok(Err(error)) => tracing::info!(%site, "measuring the line ended: {error}"),
            Err(_) => tracing::warn!(%site, "measuring the line took too long, and was ended"),
        }
    }

    async fn serve(
        &self,
        (downstream, peer): (&Downstream, SocketAddr),
        publication: &str,
        served: &Served,
        (session, upstream): (Session, Option<Session>),
        wanted: Wanted,
        halted: watch::Receiver<bool>,
    ) -> Result<(), LinkError> {
        match wanted {
            Wanted::Log {
                have,
                packs,
                hears_trouble,
                spills,
                hears_naming,
                hears_bytes,
                start,
                ..
            } => {
                let (trouble, naming, bytes) = (hears_trouble, hears_naming, hears_bytes);
                let takes = Takes { packs, trouble, naming, bytes };
                let key = (downstream.site.clone(), publication.to_owned());
                // One of an earlier version tells none.
                let asks = start.map(|start| (start, peer.ip()));
                let place =
                    asks.map(|asks| self.places.take(&downstream.site, asks, Instant::now()));
                let _place = match place.transpose() {
                    Ok(place) => place,
                    Err(why) => return self.refuse_log(&key, session, why).await,
                };
                let mut newer = self.begin_session(&key);
                tokio::select! {
                    ended = self.serve_log(&key, downstream, served, session, (have, spills), takes) => ended,
                    // What the old one reads is as dead as its peer.
                    _ = newer.changed() => Ok(()),
                }
            }
            Wanted::Source { .. } => {
                match (&served.source, upstream) {
                    (ServedSource::Here(direct, snapshots), _) => {
                        let mut channel = SessionChannel::new(session);
                        if let Err(error) = serve(direct, snapshots, &mut channel, halted).await {
                            tracing::info!(site = %downstream.site, publication, "{error}");
                        }
                        // Its last words may say what is wrong.
                        let _ = tokio::time::timeout(LAST_WORDS, channel.finish()).await;
                    }
                    (ServedSource::Upstream(..), Some(upstream)) => {
                        forward(session, upstream).await?;
                    }
                    (ServedSource::Upstream(..), None) => {}
                }
                Ok(())
            }
            // Served apart.
            Wanted::Mirror(_)
            | Wanted::MirrorEnd(_)
            | Wanted::Seed(_)
            | Wanted::Backup(_)
            | Wanted::Measure {} => Ok(()),
        }
    }

    async fn turn(&self, asking: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
        let turn = tokio::time::timeout(ASKING_WAIT, asking.clone().acquire_owned());
        turn.await.ok()?.ok()
    }

    /// Ends the session that the site has of this publication, if any: it lost touch with it.
    fn begin_session(&self, key: &(String, String)) -> watch::Receiver<u64> {
        let mut sessions = self.sessions.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if sessions.len() >= SESSIONS_KNOWN_MAX {
            sessions.retain(|_, one| one.newest.receiver_count() > 0);
        }
        let sessions = sessions.entry(key.clone()).or_default();
        if sessions.newest.receiver_count() > 0 && sessions.take_over(Instant::now()) {
            tracing::warn!(
                site = %key.0, log = %key.1,
                "{TAKEN_OVER_OFTEN} sessions within a minute, each begun while the one before was \
                 open. If two nodes run with this site's certificate, each ends the other's: give \
                 each its own (farshore site-cert)"
            );
        }
        sessions.newest.send_modify(|count| *count += 1);
        sessions.newest.subscribe()
    }
}

/// A session that follows a log. However it ends, its site is away then, unless a newer session has
/// taken over.
struct Connected<'a> {
    serving: &'a Serving,
    key: (String, String),
    session: u64,
}

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        if let Some(following) = self.serving.lock_following().get_mut(&self.key)
            && following.session == self.session
        {
            following.connected = false;
        }
    }
}

/// Sessions of one site about one thing. A new one ends the one before.
#[derive(Default)]
struct Sessions {
    newest: watch::Sender<u64>,
    /// How many took over from one that was open, since when.
    taken_over: Option<(u32, Instant)>,
}

/// Of more, those that have ended are forgotten: seedings are told apart by names that sites choose.
const SESSIONS_KNOWN_MAX: usize = 1_024;

/// A site that lost touch takes over now and then; two sites with one certificate do without end.
const TAKEN_OVER_OFTEN: u32 = 5;

impl Sessions {
    /// Whether that is to be told.
    fn take_over(&mut self, now: Instant) -> bool {
        let recent = self.taken_over.filter(|(_, since)| *since + Duration::from_secs(60) > now);
        let (count, since) = recent.unwrap_or((0, now));
        self.taken_over = Some((count + 1, since));
        count + 1 == TAKEN_OVER_OFTEN
    }
}

/// A session for questions at the site that a publication comes from, or why there is none.
async fn open_upstream(dialer: &Dialer, name: &str, until: Instant) -> Result<Session, String> {
    let wanted = Wanted::Source { publication: name.to_owned() };
    let request = serde_json::to_vec(&wanted).unwrap_or_default();
    match tokio::time::timeout_at(until.into(), dialer.open(&request)).await {
        Ok(opened) => opened.map_err(|error| error.to_string()),
        Err(_) => Err(format!(
            "site \"{}\", which it comes from, is asked for it and does not answer",
            dialer.site()
        )),
    }
}

/// Passes a downstream site's questions on to the site that the publication comes from. Who has its
/// answer drops the session: that ends it like a last word, and what was left unanswered is said at
/// that site itself.
async fn forward(session: Session, upstream: Session) -> Result<(), LinkError> {
    let (mut to_upstream, mut from_upstream) = upstream.split();
    let (mut to_downstream, mut from_downstream) = session.split();
    let asking = async {
        loop {
            match from_downstream.next().await {
                Ok(Some(message)) => to_upstream.send(message).await?,
                Ok(None) => return Ok(()),
                Err(ended @ LinkError::PeerFailed { .. }) => {
                    tracing::debug!("{ended}");
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
    };
    let answering = async {
        while let Some(message) = from_upstream.next().await? {
            to_downstream.send(message).await?;
        }
        Ok::<(), LinkError>(())
    };
    let ended = tokio::select! {
        ended = asking => ended,
        ended = answering => ended,
    };
    // What was passed on last may say what is wrong.
    let _ = tokio::time::timeout(LAST_WORDS, to_downstream.finish()).await;
    ended
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_link::certificates::Authority;
    use farshore_link::{Identity, IdentityFiles};

    #[tokio::test]
    async fn a_site_that_does_not_answer_is_waited_for_less_than_who_asks_waits() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::create(&folder.path().join("authority")).unwrap();
        let made = authority.issue("middle", 30, folder.path()).unwrap();
        let identity = Identity::load(&IdentityFiles {
            certificate: made.certificate,
            key: made.key,
            authorities: authority.certificate(),
            revoked: Some(authority.revoked()),
        });
        // It takes connections and says nothing.
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = silent.local_addr().unwrap().to_string();
        let options = LinkOptions::default();
        assert!(PASSED_ON_WITHIN + Duration::from_secs(1) < options.connect_timeout);
        let dialer = Dialer::new(&address, "first", &identity.unwrap(), options).unwrap();
        let until = Instant::now() + Duration::from_millis(200);
        let why = open_upstream(&dialer, "p", until).await.err().unwrap();
        assert!(why.contains("site \"first\"") && why.contains("does not answer"), "{why}");
    }
}
