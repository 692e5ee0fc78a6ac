//! The side that opens sessions.

use crate::handshake::{Answer, Hello, REQUEST_BYTES_MAX, SessionId, VERSION_MAX, VERSION_MIN};
use crate::session::LAST_WORDS;
use crate::site_name::check_site_name;
use crate::trust::{tls_error, why_rejected, why_untrusted};
use crate::wire::{Broken, Wire, hear_answer, say_hello, socket, wire};
use crate::{Identity, LinkError, LinkOptions, Session};
use ring::rand::{SecureRandom, SystemRandom};
use rustls::pki_types::{DnsName, ServerName};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;

/// Opens sessions with one peer.
#[derive(Clone)]
pub struct Dialer {
    address: String,
    site: String,
    /// Clones share it.
    tls: Arc<RwLock<TlsConnector>>,
    options: LinkOptions,
    /// Which of a name's addresses is tried first. Clones share it.
    first: Arc<AtomicUsize>,
}

/// Another of a name's addresses is tried beside one that has not answered within this (RFC 8305,
/// "Happy Eyeballs", section 5).
const NEXT_ADDRESS_AFTER: Duration = Duration::from_millis(250);

fn connector(identity: &Identity, site: &str) -> Result<TlsConnector, LinkError> {
    let config = identity.client(site).map_err(|error| LinkError::Options(error.to_string()))?;
    Ok(TlsConnector::from(config))
}

/// A connection to the first of these addresses that takes one. Each is tried a moment after the one
/// before, or as soon as that has failed.
async fn connect_to_any(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
    let mut left = addresses.into_iter();
    let mut tries = JoinSet::new();
    let mut failed = io::Error::from(io::ErrorKind::AddrNotAvailable);
    loop {
        if let Some(address) = left.next() {
            tries.spawn(TcpStream::connect(address));
        } else if tries.is_empty() {
            return Err(failed);
        }
        tokio::select! {
            Some(tried) = tries.join_next() => match tried {
                Ok(Ok(tcp)) => return Ok(tcp),
                Ok(Err(error)) => failed = error,
                Err(ended) => failed = io::Error::other(ended),
            },
            () = tokio::time::sleep(NEXT_ADDRESS_AFTER), if left.len() > 0 => {}
        }
    }
}

impl std::fmt::Debug for Dialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dialer")
            .field("address", &self.address)
            .field("site", &self.site)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl Dialer {
    /// `address` is `host:port`; `site` is the name that the peer's certificate must carry.
    /// Nothing is connected yet.
    pub fn new(
        address: &str,
        site: &str,
        identity: &Identity,
        options: LinkOptions,
    ) -> Result<Dialer, LinkError> {
        options.check()?;
        check_site_name(site).map_err(LinkError::Options)?;
        let tls = Arc::new(RwLock::new(connector(identity, site)?));
        let (address, site) = (address.to_owned(), site.to_owned());
        Ok(Dialer { address, site, tls, options, first: Arc::default() })
    }

    /// Another identity for connections from now on, of this dialer and its clones: renewed, or with
    /// more revocations. Sessions that are open go on.
    ///
    /// # Errors
    /// Its certificate and key do not go together.
    pub fn set_identity(&self, identity: &Identity) -> Result<(), LinkError> {
        let connector = connector(identity, &self.site)?;
        *self.tls.write().unwrap_or_else(PoisonError::into_inner) = connector;
        Ok(())
    }

    /// Opens a session: connects, says `request` (at most 64 KiB) and waits for the peer to accept
    /// it, which takes three round trips (four where the name has several addresses).
    /// [`LinkError::Refused`] carries the peer's words. Each step takes at most `connect_timeout`. Dropping the future closes what was opened.
    pub async fn open(&self, request: &[u8]) -> Result<Session, LinkError> {
        if request.len() > REQUEST_BYTES_MAX {
            return Err(LinkError::Options(format!(
                "a request of {} bytes is too long for a link; {REQUEST_BYTES_MAX} are allowed",
                request.len()
            )));
        }
        let mut session = SessionId::default();
        SystemRandom::new()
            .fill(&mut session)
            .map_err(|_| LinkError::Options("the system gives no random numbers".to_owned()))?;
        let hello = Hello {
            version_min: VERSION_MIN,
            version_max: VERSION_MAX,
            stripe: 0,
            stripes: self.options.connections as u8,
            session,
            window_bytes: self.options.window_bytes as u64,
            request: request.to_vec(),
        };

        let (peer, wires) = self.within("answer", self.connect(hello)).await?;
        let accepted = self.within("answer the request", self.acceptance(wires));
        let (wires, window_bytes) = accepted.await?;
        Ok(Session::start(wires, self.site.clone(), peer, window_bytes, &self.options))
    }

    /// The site that is expected there.
    pub fn site(&self) -> &str {
        &self.site
    }

    /// Makes all connections side by side, and says hello on each.
    async fn connect(&self, hello: Hello) -> Result<(SocketAddr, Vec<Wire>), LinkError> {
        let further = Hello { request: Vec::new(), ..hello.clone() };
        // A name may stand for several machines: then all go to the one that takes the first.
        let mut addresses = self.addresses().await?;
        let only = addresses.first().filter(|_| addresses.len() == 1);
        let mut joining = only.map(|peer| self.join(*peer, &further));
        // Whoever takes a connection may be somebody else, or say nothing: an attempt that fails
        // leaves the next one to begin with another address.
        let turn = self.first.fetch_add(1, Relaxed);
        let count = addresses.len().max(1);
        addresses.rotate_left(turn % count);
        let tcp = connect_to_any(addresses).await.map_err(|e| self.not_connected(e))?;
        let peer = tcp.peer_addr().map_err(|e| self.not_connected(e))?;
        let joining = joining.get_or_insert_with(|| self.join(peer, &further));
        let mut first = match self.greet(tcp, &hello).await {
            Ok(first) => first,
            Err(error) => {
                // They fail alike, each in order: the peer's log shall not wonder why they ended.
                let ended = async { while joining.join_next().await.is_some() {} };
                let _ = tokio::time::timeout(LAST_WORDS, ended).await;
                return Err(error);
            }
        };
        let mut wires = Vec::new();
        while let Some(joined) = joining.join_next().await {
            // A task of ours that panicked or was cancelled has no wire to give.
            match joined.unwrap_or_else(|e| Err(self.not_connected(io::Error::other(e)))) {
                Ok(wire) => wires.push(wire),
                Err(error) => return Err(self.reason(&mut first, error).await),
            }
        }
        self.first.store(turn, Relaxed);
        wires.sort_unstable_by_key(|(stripe, _)| *stripe);
        let further = wires.into_iter().map(|(_, wire)| wire);
        Ok((peer, std::iter::once(first).chain(further).collect()))
    }

    /// What the name stands for.
    async fn addresses(&self) -> Result<Vec<SocketAddr>, LinkError> {
        let found = tokio::net::lookup_host(&self.address).await;
        Ok(found.map_err(|error| self.not_connected(error))?.collect())
    }

    /// Makes the further connections.
    fn join(&self, peer: SocketAddr, hello: &Hello) -> JoinSet<Result<(u8, Wire), LinkError>> {
        let mut joining = JoinSet::new();
        for stripe in 1..hello.stripes {
            let (dialer, hello) = (self.clone(), Hello { stripe, ..hello.clone() });
            joining.spawn(async move {
                let tcp = TcpStream::connect(peer).await;
                let tcp = tcp.map_err(|error| dialer.not_connected(error))?;
                Ok((stripe, dialer.greet(tcp, &hello).await?))
            });
        }
        joining
    }

    async fn greet(&self, tcp: TcpStream, hello: &Hello) -> Result<Wire, LinkError> {
        let mut wire = self.tls(tcp).await?;
        // Where the peer turned us away, it is not the writing that tells why, but its answer.
        let _ = say_hello(&mut wire, hello).await;
        Ok(wire)
    }

    /// Why a further connection failed with `error`: the peer may say so on the first.
    async fn reason(&self, first: &mut Wire, error: LinkError) -> LinkError {
        match tokio::time::timeout(LAST_WORDS, self.answer(first)).await {
            Ok(Ok(Answer::Refused { why })) => self.refused(why),
            Ok(Err(told)) => told,
            Ok(Ok(Answer::Accepted { .. })) | Err(_) => error,
        }
    }

    /// The peer's answers, which may come on any connection first; and what credit it gives.
    async fn acceptance(&self, wires: Vec<Wire>) -> Result<(Vec<Wire>, u64), LinkError> {
        let mut answers = JoinSet::new();
        for (stripe, mut wire) in wires.into_iter().enumerate() {
            let dialer = self.clone();
            answers.spawn(async move { (stripe, dialer.answer(&mut wire).await, wire) });
        }
        let (mut accepted, mut granted) = (Vec::new(), None);
        while let Some(answer) = answers.join_next().await {
            let (stripe, answer, wire) =
                answer.map_err(|e| self.not_connected(io::Error::other(e)))?;
            match answer? {
                Answer::Accepted { window_bytes, .. }
                    if granted.is_none_or(|before| before == window_bytes) =>
                {
                    granted = Some(window_bytes);
                    accepted.push((stripe, wire));
                }
                Answer::Accepted { .. } => {
                    return Err(self.odd("its connections grant different credit"));
                }
                Answer::Refused { why } => return Err(self.refused(why)),
            }
        }
        accepted.sort_unstable_by_key(|(stripe, _)| *stripe);
        let granted = granted.ok_or_else(|| self.odd("there is no connection"))?;
        Ok((accepted.into_iter().map(|(_, wire)| wire).collect(), granted))
    }

    async fn tls(&self, tcp: TcpStream) -> Result<Wire, LinkError> {
        let socket = socket(tcp).map_err(|error| self.not_connected(error))?;
        // Not looked at: sites are named otherwise, and the name is not sent.
        let name = DnsName::try_from_str("farshore.internal")
            .map_err(|error| LinkError::Options(error.to_string()))?
            .to_owned();
        let connector = self.tls.read().unwrap_or_else(PoisonError::into_inner).clone();
        match connector.connect(ServerName::DnsName(name), socket).await {
            Ok(tls) => Ok(wire(tls)),
            Err(error) => Err(self.tls_failed(error)),
        }
    }

    async fn answer(&self, wire: &mut Wire) -> Result<Answer, LinkError> {
        hear_answer(wire).await.map_err(|broken| match broken {
            Broken::Io(error) => self.tls_failed(error),
            Broken::Handshake(error) => LinkError::Handshake { site: self.site.clone(), error },
        })
    }

    fn tls_failed(&self, error: io::Error) -> LinkError {
        let (site, address) = (self.site.clone(), self.address.clone());
        let Some(tls) = tls_error(&error) else {
            let is_closed = matches!(
                error.kind(),
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
            );
            return self.not_connected(if is_closed {
                let what = "it closed the connection before it answered (its log may say why)";
                io::Error::new(error.kind(), what)
            } else {
                error
            });
        };
        if let Some(why) = why_untrusted(tls) {
            return LinkError::Untrusted { site, address, why };
        }
        if let rustls::Error::AlertReceived(alert) = tls
            && let Some(why) = why_rejected(*alert)
        {
            return LinkError::Rejected { site, address, why: why.to_owned() };
        }
        LinkError::NotALink { address, why: tls.to_string() }
    }

    fn not_connected(&self, error: io::Error) -> LinkError {
        let (site, address) = (self.site.clone(), self.address.clone());
        LinkError::Connect { site, address, error: Arc::new(error) }
    }

    fn refused(&self, why: String) -> LinkError {
        LinkError::Refused { site: self.site.clone(), why }
    }

    fn odd(&self, what: &str) -> LinkError {
        LinkError::Protocol { site: self.site.clone(), what: what.to_owned() }
    }

    async fn within<T>(
        &self,
        what: &'static str,
        step: impl Future<Output = Result<T, LinkError>>,
    ) -> Result<T, LinkError> {
        let within: Duration = self.options.connect_timeout;
        tokio::time::timeout(within, step).await.unwrap_or_else(|_| {
            let (site, address) = (self.site.clone(), self.address.clone());
            Err(LinkError::TimedOut { site, address, what, within })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 192.0.2.0/24 is nobody's (RFC 5737), and a port of ours that nobody listens on refuses.
    #[tokio::test]
    async fn another_address_is_tried_where_one_is_silent_or_refuses() {
        let there = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let there = (there.local_addr().unwrap(), there);
        let closed = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let refuses = closed.local_addr().unwrap();
        drop(closed);
        let silent: SocketAddr = "192.0.2.9:9".parse().unwrap();
        for before in [vec![silent], vec![refuses], vec![silent, refuses]] {
            let addresses = [&before[..], &[there.0]].concat();
            let tcp = tokio::time::timeout(Duration::from_secs(10), connect_to_any(addresses));
            assert_eq!(tcp.await.unwrap().unwrap().peer_addr().unwrap(), there.0);
        }
        let refused = connect_to_any(vec![refuses, refuses]).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        assert!(connect_to_any(Vec::new()).await.is_err());
    }
}
