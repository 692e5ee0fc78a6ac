//! The side that waits for sessions.

use crate::handshake::{Answer, HandshakeError, Hello, VERSION_MAX};
use crate::opening::Openings;
use crate::site_name::site_of;
use crate::trust::{tls_error, why_rejected, why_untrusted};
use crate::turned_away::{Tell, TurnedAway};
use crate::wire::{Broken, Socket, Wire, hear_hello, part, refuse, say_answer, socket, wire};
use crate::{Identity, LinkError, LinkOptions, Session};
use bytes::Bytes;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

/// Connections whose handshake is not done; more wait in the kernel's queue.
const HANDSHAKES_MAX: usize = 256;

/// Connections of known sites that wait for the others of their session; more are turned away.
const GATHERING_MAX: usize = 4_096;

/// Sessions that have opened and that nobody has asked for.
const INCOMING_MAX: usize = 16;

/// After the system refused a connection (no file descriptors left, for instance).
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Waits for sessions. Dropping it stops that; sessions that are open go on.
pub struct Listener {
    local: SocketAddr,
    incoming: Mutex<mpsc::Receiver<Incoming>>,
    identity: Arc<RwLock<Arc<Identity>>>,
    /// Counts occasions on which who is trusted may have changed.
    judgings: watch::Sender<u64>,
    accepting: AbortHandle,
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Listener").field("local", &self.local).finish_non_exhaustive()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Listener {
    /// Listens at `address` (`host:port`; port 0 takes any) from now on.
    pub async fn bind(
        address: &str,
        identity: Arc<Identity>,
        options: LinkOptions,
    ) -> Result<Listener, LinkError> {
        options.check()?;
        let failed = |error: io::Error| LinkError::Listen {
            address: address.to_owned(),
            error: Arc::new(error),
        };
        let tcp = TcpListener::bind(address).await.map_err(failed)?;
        let local = tcp.local_addr().map_err(failed)?;
        let (sender, incoming) = mpsc::channel(INCOMING_MAX);
        let identity = Arc::new(RwLock::new(identity));
        let judgings = watch::Sender::new(0);
        let door = Arc::new(Door {
            identity: identity.clone(),
            judgings: judgings.clone(),
            options,
            openings: Openings::default(),
            incoming: sender,
            gathering: Semaphore::new(GATHERING_MAX),
            told: Mutex::default(),
        });
        let accepting = tokio::spawn(accept(tcp, door)).abort_handle();
        Ok(Listener { local, incoming: Mutex::new(incoming), identity, judgings, accepting })
    }

    /// Where it listens.
    pub fn local_address(&self) -> SocketAddr {
        self.local
    }

    /// Another identity for connections from now on, with which the same peers are trusted as
    /// before. Sessions that are open go on.
    pub fn set_identity(&self, identity: Arc<Identity>) {
        *self.identity.write().unwrap_or_else(PoisonError::into_inner) = identity;
    }

    /// Another identity, with which others may be trusted: other authorities, or more revocations.
    /// [`Incoming::judged_anew`] is told of every peer that was let in before.
    pub fn judge_anew(&self, identity: Arc<Identity>) {
        self.set_identity(identity);
        // After it: who was let in by the one before has subscribed by now, whatever it does next.
        self.judgings.send_modify(|count| *count += 1);
    }

    /// The next session that a peer opens: the peer is authenticated and all its connections are
    /// there. Peers that are turned away are logged. Nothing is lost if the future is dropped.
    pub async fn next(&self) -> Incoming {
        match self.incoming.lock().await.recv().await {
            Some(incoming) => incoming,
            // The task that holds the other end lives as long as this.
            None => std::future::pending().await,
        }
    }
}

/// A session that a peer asks for. It waits for an answer no longer than its `connect_timeout`;
/// dropping this closes its connections without one.
pub struct Incoming {
    /// The site that the peer's certificate names.
    pub site: String,
    /// Where its first connection comes from.
    pub peer: SocketAddr,
    /// What it asks for, at most 64 KiB.
    pub request: Bytes,
    wires: Vec<Wire>,
    window_bytes: u64,
    /// Changes when it would have to be let in anew.
    judgings: watch::Receiver<u64>,
}

impl std::fmt::Debug for Incoming {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Incoming")
            .field("site", &self.site)
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

impl Incoming {
    /// Waits until who is trusted may have changed since this peer was let in; its session is to end
    /// then. Who is still trusted opens another.
    pub fn judged_anew(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut judgings = self.judgings.clone();
        async move {
            if judgings.changed().await.is_err() {
                // The listener is gone, and judges nobody.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Opens the session. Of `options`, `connections` does not count: the peer decides that.
    pub async fn accept(mut self, options: LinkOptions) -> Result<Session, LinkError> {
        options.check()?;
        let window_bytes = options.window_bytes as u64;
        let answer = Answer::Accepted { version: VERSION_MAX, window_bytes };
        for (stripe, wire) in self.wires.iter_mut().enumerate() {
            let said = timeout(options.connect_timeout, say_answer(wire, &answer)).await;
            let said = said.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
            said.map_err(|error| {
                let site = self.site.clone();
                LinkError::Io { site, stripe, error: Arc::new(error) }
            })?;
        }
        Ok(Session::start(self.wires, self.site, self.peer, self.window_bytes, &options))
    }

    /// Turns the peer away; it gets `why` (at most 4 KiB of it) as [`LinkError::Refused`]. Takes a
    /// second or two at most, if the peer does not listen.
    pub async fn refuse(self, why: &str) {
        let mut refusing = JoinSet::new();
        for wire in self.wires {
            refusing.spawn(refuse(wire, why.to_owned()));
        }
        refusing.join_all().await;
    }
}

/// What every connection needs before it is part of a session.
struct Door {
    identity: Arc<RwLock<Arc<Identity>>>,
    judgings: watch::Sender<u64>,
    options: LinkOptions,
    openings: Openings,
    incoming: mpsc::Sender<Incoming>,
    gathering: Semaphore,
    /// What was logged lately of connections turned away.
    told: Mutex<TurnedAway>,
}

/// Why a connection is turned away, for the log, and what is still to be done about it.
struct Turned {
    site: Option<String>,
    why: String,
    farewell: Farewell,
    /// The others of its session, which come at the same time, are turned away for the same reason.
    alike: bool,
}

enum Farewell {
    None,
    /// Of TLS: an alert is on its way, and it may have sent more than was looked at.
    Alert(Box<Socket>),
    Words(Wire, String),
}

impl Farewell {
    async fn say(self) {
        match self {
            Farewell::None => {}
            Farewell::Alert(socket) => part(*socket).await,
            Farewell::Words(wire, words) => refuse(wire, words).await,
        }
    }
}

async fn accept(tcp: TcpListener, door: Arc<Door>) {
    let permits = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    // Ends the handshakes with this task.
    let mut handshakes = JoinSet::new();
    loop {
        // Never closed.
        let Ok(permit) = permits.clone().acquire_owned().await else { return };
        while handshakes.try_join_next().is_some() {}
        match tcp.accept().await {
            Ok((tcp, peer)) => {
                let door = door.clone();
                let mut permit = Some(permit);
                handshakes.spawn(async move {
                    if let Err(turned) = door.greet(tcp, peer, &mut permit).await {
                        door.log(peer, &turned).await;
                        turned.farewell.say().await;
                    }
                });
            }
            Err(error) => {
                tracing::warn!("link: cannot accept a connection: {error}");
                tokio::time::sleep(ACCEPT_AGAIN).await;
            }
        }
    }
}

impl Door {
    async fn log(&self, peer: SocketAddr, turned: &Turned) {
        let site = turned.site.as_deref().unwrap_or("unknown");
        let why = &turned.why;
        let line = format!("{site}: {why}");
        let tell = self.told.lock().await.note(peer.ip(), line, turned.alike, Instant::now());
        let last = match tell {
            Tell::Nothing => {
                tracing::debug!(%peer, site, "link: turned a connection away too: {why}");
                return;
            }
            Tell::All => "",
            Tell::Last => " (told no more until it was not met for 10 minutes)",
        };
        tracing::warn!(%peer, site, "link: turned a connection away: {why}{last}");
    }

    /// Brings a connection to where it is part of a session. Gives `permit` back once its peer is
    /// known: who waits for connections of its session must not keep those out.
    async fn greet(
        &self,
        tcp: TcpStream,
        peer: SocketAddr,
        permit: &mut Option<OwnedSemaphorePermit>,
    ) -> Result<(), Turned> {
        let within = self.options.connect_timeout;
        let slow = |site, what: &str| Turned {
            site,
            why: format!("{what} within {within:?}"),
            farewell: Farewell::None,
            alike: false,
        };
        // Before the identity is looked at.
        let judgings = self.judgings.subscribe();
        let (wire, site, hello) = timeout(within, self.authenticate(tcp))
            .await
            .unwrap_or_else(|_| Err(slow(None, "it did not finish the handshake")))?;
        *permit = None;
        let turned =
            |why, farewell| Turned { site: Some(site.clone()), why, farewell, alike: false };
        let told = |wire, why: String| {
            let farewell = Farewell::Words(wire, words(&why));
            turned(why, farewell)
        };
        let Ok(_place) = self.gathering.try_acquire() else {
            return Err(told(wire, format!("{GATHERING_MAX} connections wait here already")));
        };
        if hello.stripe > 0 {
            let joined = self.openings.join(&site, &hello, wire, within).await;
            return joined.map_err(|(wire, why)| Turned { alike: true, ..told(wire, why) });
        }
        let mut opening = match self.openings.begin(&site, &hello) {
            Ok(opening) => opening,
            Err(why) => return Err(told(wire, why)),
        };
        let wires = match timeout(within, opening.complete(wire)).await {
            Ok(gathered) => gathered.map_err(|why| turned(why, Farewell::None))?,
            Err(_) => {
                let what = format!(
                    "{} of its {} connections did not come",
                    opening.missing(),
                    hello.stripes
                );
                return Err(slow(Some(site.clone()), &what));
            }
        };
        drop(opening);
        let incoming = Incoming {
            site: site.clone(),
            peer,
            request: hello.request.into(),
            wires,
            window_bytes: hello.window_bytes,
            judgings,
        };
        // The peer waits as long, then it is gone.
        if let Err(error) = self.incoming.send_timeout(incoming, within).await {
            let why = "this site is too busy to answer; try again later";
            error.into_inner().refuse(why).await;
            let why = "nobody took the session up: this site is too busy".to_owned();
            return Err(turned(why, Farewell::None));
        }
        Ok(())
    }

    async fn authenticate(&self, tcp: TcpStream) -> Result<(Wire, String, Hello), Turned> {
        let unknown = |why, farewell| Turned { site: None, why, farewell, alike: false };
        let identity = self.identity.read().unwrap_or_else(PoisonError::into_inner).clone();
        let socket = socket(tcp).map_err(|error| unknown(error.to_string(), Farewell::None))?;
        let tls = TlsAcceptor::from(identity.server()).accept(socket).into_fallible().await;
        let mut wire = match tls {
            Ok(tls) => wire(tls),
            Err((error, socket)) => {
                let turned = unknown(why_no_tls(&error), Farewell::Alert(Box::new(socket)));
                return Err(Turned { alike: is_of_certificates(&error), ..turned });
            }
        };
        let certificates = wire.get_ref().1.peer_certificates().unwrap_or_default();
        let site = match certificates.first() {
            Some(certificate) => site_of(certificate),
            None => Err("it showed none".to_owned()),
        };
        let site = match site {
            Ok(site) => site,
            Err(what) => {
                let words = format!("this site's certificate does not do: {what}");
                let why = format!("its certificate does not do: {what}");
                let turned = unknown(why, Farewell::Words(wire, words));
                return Err(Turned { alike: true, ..turned });
            }
        };
        let turned =
            |why, farewell, alike| Turned { site: Some(site.clone()), why, farewell, alike };
        match hear_hello(&mut wire).await {
            Ok(hello) => Ok((wire, site, hello)),
            Err(Broken::Io(error)) => Err(turned(why_no_hello(&error), Farewell::None, false)),
            Err(Broken::Handshake(error)) => {
                let why = error.to_string();
                let farewell = match error {
                    HandshakeError::Magic(_) => Farewell::None,
                    _ => Farewell::Words(wire, words(&why)),
                };
                Err(turned(why, farewell, true))
            }
        }
    }
}

/// What stands in our log of a peer, as told to that peer.
fn words(why: &str) -> String {
    format!("its log says of this site: {why}")
}

/// Why TLS did not come about, for the log.
fn why_no_tls(error: &io::Error) -> String {
    let Some(tls) = tls_error(error) else {
        return match error.kind() {
            io::ErrorKind::UnexpectedEof => "it closed the connection during TLS".to_owned(),
            _ => format!("TLS failed: {error}"),
        };
    };
    if let Some(why) = why_untrusted(tls) {
        return format!("its certificate does not do: {why}");
    }
    match tls {
        rustls::Error::AlertReceived(alert) if why_rejected(*alert).is_some() => format!(
            "it refused this site's certificate ({alert:?}). Check its log, and whether it was \
             meant to reach this site"
        ),
        rustls::Error::InvalidMessage(_) => format!("it does not speak TLS ({tls})"),
        _ => format!("TLS failed: {tls}"),
    }
}

/// Whether one side's certificate did not do for the other.
fn is_of_certificates(error: &io::Error) -> bool {
    tls_error(error).is_some_and(|tls| {
        let is_rejected =
            matches!(tls, rustls::Error::AlertReceived(alert) if why_rejected(*alert).is_some());
        why_untrusted(tls).is_some() || is_rejected
    })
}

/// Why nothing came after TLS, for the log.
fn why_no_hello(error: &io::Error) -> String {
    match tls_error(error) {
        Some(_) => why_no_tls(error),
        None if error.kind() == io::ErrorKind::UnexpectedEof => {
            "it closed the connection after TLS, before it said what it wants".to_owned()
        }
        None => format!("the connection failed after TLS: {error}"),
    }
}
