//! Connections of the monitor: how many, how long, with TLS.

use crate::guard::{Guard, Token};
use crate::sample::Snapshot;
use crate::{Settings, Source, api};
use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

/// Connections side by side.
const CONNECTIONS_MAX: usize = 64;
/// A client has this long for a TLS handshake, and for the head of a request.
const HEAD_MAX: Duration = Duration::from_secs(10);
/// The files of the certificate and of the token are looked at this often.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// A token shorter than this can be guessed.
const TOKEN_CHARS_MIN: usize = 16;

/// Why the monitor cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum MonitorError {
    /// The address.
    #[error("cannot listen on {address} for the monitor: {error}")]
    Listen {
        /// As configured.
        address: SocketAddr,
        /// Reason.
        error: std::io::Error,
    },
    /// A file that the site file names.
    #[error("cannot read {path} for the monitor: {error}")]
    File {
        /// Path.
        path: PathBuf,
        /// Reason.
        error: std::io::Error,
    },
    /// A file that is not what it should be.
    #[error("{path}: {what}")]
    Content {
        /// Path.
        path: PathBuf,
        /// What is wrong, and what would be right.
        what: String,
    },
    /// An address that others reach, without protection.
    #[error("{0}")]
    Unprotected(String),
}

/// A monitor that listens.
pub struct Monitor {
    listener: TcpListener,
    address: SocketAddr,
    tls: Option<Tls>,
    token: Option<TokenFile>,
    routes: Router,
}

/// Files as they were looked at.
type Seen = Vec<Option<(SystemTime, u64)>>;

/// Files that may be replaced while the monitor runs.
#[derive(Clone)]
struct Watched {
    files: Vec<PathBuf>,
    /// As they were when they were used, or tried to be.
    tried: Seen,
    before: Seen,
}

impl Watched {
    /// As they are before they are used.
    fn new(files: &[&Path]) -> Watched {
        let files: Vec<PathBuf> = files.iter().map(|path| (*path).to_owned()).collect();
        let seen = Watched::seen(&files);
        Watched { files, tried: seen.clone(), before: seen }
    }

    fn seen(files: &[PathBuf]) -> Seen {
        let look = |path: &PathBuf| {
            let metadata = std::fs::metadata(path).ok()?;
            Some((metadata.modified().ok()?, metadata.len()))
        };
        files.iter().map(look).collect()
    }

    /// Waits until they are to be used again.
    async fn replaced(&mut self, every: Duration) {
        loop {
            tokio::time::sleep(every).await;
            let now = Watched::seen(&self.files);
            // Who replaces several is let finish.
            let is_settled = now == self.before;
            self.before = now.clone();
            if now != self.tried && is_settled {
                self.tried = now;
                return;
            }
        }
    }
}

/// Where the token is; one that is replaced is asked for from then on.
#[derive(Clone)]
struct TokenFile {
    path: PathBuf,
    watched: Watched,
    token: Token,
}

impl TokenFile {
    fn load(path: &Path) -> Result<TokenFile, MonitorError> {
        let watched = Watched::new(&[path]);
        let token = Token::new(&read_token(path)?);
        Ok(TokenFile { path: path.to_owned(), watched, token })
    }

    /// Looks again and again.
    async fn renew(mut self, every: Duration) {
        loop {
            self.watched.replaced(every).await;
            match read_token(&self.path) {
                Ok(new) => {
                    if self.token.replace(&new) {
                        let path = self.path.display();
                        tracing::info!(
                            "the monitor's token was replaced: that in {path} is asked for"
                        );
                    }
                }
                Err(error) => tracing::error!(
                    "the monitor's token was replaced and cannot be used: {error}. Going on with the \
                     one from before"
                ),
            }
        }
    }
}

/// What connections are accepted with; a certificate that is replaced is used from then on.
#[derive(Clone)]
struct Tls {
    certificate: PathBuf,
    key: PathBuf,
    watched: Watched,
    acceptor: Arc<Mutex<TlsAcceptor>>,
}

impl Tls {
    fn load((certificate, key): &(PathBuf, PathBuf)) -> Result<Tls, MonitorError> {
        let watched = Watched::new(&[certificate, key]);
        let acceptor = Arc::new(Mutex::new(acceptor(certificate, key)?));
        Ok(Tls { certificate: certificate.clone(), key: key.clone(), watched, acceptor })
    }

    fn acceptor(&self) -> TlsAcceptor {
        self.acceptor.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    /// Looks again and again.
    async fn renew(mut self, every: Duration) {
        loop {
            self.watched.replaced(every).await;
            match acceptor(&self.certificate, &self.key) {
                Ok(new) => {
                    *self.acceptor.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = new;
                    let certificate = self.certificate.display();
                    tracing::info!("the monitor's certificate was replaced: {certificate} is used");
                }
                Err(error) => tracing::error!(
                    "the monitor's certificate was replaced and cannot be used: {error}. Going on \
                     with the one from before"
                ),
            }
        }
    }
}

impl Monitor {
    /// Listens. What is shown comes from `snapshots`, what is asked for goes to `source`.
    ///
    /// # Errors
    /// The address, the token's file, certificate or key.
    pub async fn bind(
        settings: &Settings,
        source: Arc<dyn Source>,
        snapshots: watch::Receiver<Arc<Snapshot>>,
    ) -> Result<Monitor, MonitorError> {
        settings.check().map_err(MonitorError::Unprotected)?;
        let (token, tls) = settings.read_files()?;
        let address = settings.address;
        let listen = |error| MonitorError::Listen { address, error };
        let listener = TcpListener::bind(address).await.map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let guard = Guard::new(token.as_ref().map(|file| file.token.clone()), tls.is_some());
        let routes = api::routes(source, snapshots, settings.history.clone(), guard);
        Ok(Monitor { listener, address, tls, token, routes })
    }

    /// Where it listens.
    pub fn local_address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until it is dropped.
    pub async fn run(self) {
        let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
        let mut serving = JoinSet::new();
        if let Some(tls) = self.tls.clone() {
            serving.spawn(tls.renew(LOOK_EVERY));
        }
        if let Some(token) = self.token.clone() {
            serving.spawn(token.renew(LOOK_EVERY));
        }
        loop {
            while serving.try_join_next().is_some() {}
            let Ok(permit) = connections.clone().acquire_owned().await else { return };
            let Ok((stream, peer)) = self.listener.accept().await else {
                // Out of file descriptors, most likely: give others time to close some.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let (tls, routes) = (self.tls.as_ref().map(Tls::acceptor), self.routes.clone());
            serving.spawn(async move {
                match tls {
                    None => serve_one(stream, routes).await,
                    Some(tls) => match tokio::time::timeout(HEAD_MAX, tls.accept(stream)).await {
                        Ok(Ok(stream)) => serve_one(stream, routes).await,
                        Ok(Err(error)) => tracing::debug!(%peer, %error, "no TLS with a browser"),
                        Err(_) => tracing::debug!(%peer, "a TLS handshake took too long"),
                    },
                }
                drop(permit);
            });
        }
    }
}

async fn serve_one(stream: impl AsyncRead + AsyncWrite + Unpin, routes: Router) {
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes))
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "a monitor's client went away");
    }
}

impl Settings {
    /// Reads the files that the settings name, as the monitor does when it starts.
    ///
    /// # Errors
    /// The first that cannot be used.
    pub fn check_files(&self) -> Result<(), MonitorError> {
        self.read_files().map(drop)
    }

    fn read_files(&self) -> Result<(Option<TokenFile>, Option<Tls>), MonitorError> {
        let token = self.token.as_deref().map(TokenFile::load).transpose()?;
        Ok((token, self.tls.as_ref().map(Tls::load).transpose()?))
    }
}

fn read_token(path: &Path) -> Result<String, MonitorError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| MonitorError::File { path: path.to_owned(), error })?;
    let token = text.trim();
    if token.len() < TOKEN_CHARS_MIN {
        let what = format!(
            "the monitor's token has {} characters; it needs at least {TOKEN_CHARS_MIN} (for \
             instance: openssl rand -hex 24)",
            token.len()
        );
        return Err(MonitorError::Content { path: path.to_owned(), what });
    }
    Ok(token.to_owned())
}

fn acceptor(certificate: &Path, key: &Path) -> Result<TlsAcceptor, MonitorError> {
    let content = |path: &Path, what: String| MonitorError::Content { path: path.to_owned(), what };
    let read = |path: &Path| {
        std::fs::read(path).map_err(|error| MonitorError::File { path: path.to_owned(), error })
    };
    let chain: Result<Vec<_>, _> =
        CertificateDer::pem_slice_iter(&read(certificate)?).collect::<Result<_, _>>();
    let chain = chain.map_err(|error| content(certificate, error.to_string()))?;
    if chain.is_empty() {
        return Err(content(certificate, "there is no certificate in this file".to_owned()));
    }
    let secret = PrivateKeyDer::from_pem_slice(&read(key)?)
        .map_err(|error| content(key, format!("no private key can be read from it: {error}")))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, secret))
        .map_err(|error| content(certificate, error.to_string()))?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_token_that_is_replaced_is_asked_for_when_it_can_be() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, "the first of these tokens\n").unwrap();
        let file = TokenFile::load(&path).unwrap();
        let is = |token: &str| file.token.is(token.as_bytes());
        assert!(is("the first of these tokens"));
        let every = Duration::from_millis(20);
        let mut watched = file.watched.clone();
        let renewing = tokio::spawn(file.clone().renew(every));
        std::fs::write(&path, "too short").unwrap();
        watched.replaced(every).await;
        assert!(is("the first of these tokens"), "one that cannot be used changes nothing");
        std::fs::write(&path, "the second one of these tokens").unwrap();
        while !is("the second one of these tokens") {
            tokio::time::sleep(every).await;
        }
        assert!(!is("the first of these tokens"));
        renewing.abort();
    }

    #[tokio::test]
    async fn a_certificate_that_is_replaced_is_used_when_it_can_be() {
        let folder = tempfile::tempdir().unwrap();
        let files = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
        let put = || {
            let made = rcgen::generate_simple_self_signed(["a.example".to_owned()]).unwrap();
            std::fs::write(&files.0, made.cert.pem()).unwrap();
            std::fs::write(&files.1, made.signing_key.serialize_pem()).unwrap();
        };
        put();
        let tls = Tls::load(&files).unwrap();
        let first = tls.acceptor();
        let every = Duration::from_millis(20);
        let renewing = tokio::spawn(tls.clone().renew(every));
        let is = |acceptor: &TlsAcceptor| Arc::ptr_eq(acceptor.config(), tls.acceptor().config());
        // It looks at the files as they were first, whenever it begins.
        tokio::time::sleep(every).await;
        std::fs::write(&files.0, "no certificate").unwrap();
        tokio::time::sleep(every * 10).await;
        assert!(is(&first), "one that cannot be used changes nothing");
        put();
        while is(&first) {
            tokio::time::sleep(every).await;
        }
        renewing.abort();
    }
}
