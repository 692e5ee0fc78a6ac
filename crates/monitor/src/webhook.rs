//! Changes from good to warning to critical and back, posted to an address as they are seen.

use crate::Health;
use crate::report::SiteReport;
use hyper::client::conn::http1;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::RootCertStore;
use rustls::pki_types::ServerName;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_rustls::TlsConnector;

/// The other side has this long for each try.
const TRY_MAX: Duration = Duration::from_secs(10);
/// The pause before a second try; it doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// For so long after the start nothing is said to be better than what was told before it: agents
/// that begin have not failed yet.
const BEGINS_IN: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 60 });
/// Within the monitor's folder: what was told last.
const TOLD: &str = "told.json";

/// Where changes are posted. Its path may be a secret and is never shown.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Webhook {
    tls: bool,
    host: String,
    port: u16,
    path: String,
}

impl std::fmt::Debug for Webhook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Webhook({}:{})", self.host, self.port)
    }
}

impl Webhook {
    /// Reads `http://host:port/path` or `https://…`.
    ///
    /// # Errors
    /// What is wrong with it, without the address itself.
    pub fn parse(text: &str) -> Result<Webhook, String> {
        let wrong =
            || "is no address to post to, such as https://alerts.example.com/farshore".to_owned();
        let uri: hyper::Uri = text.parse().map_err(|_| wrong())?;
        let tls = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(wrong()),
        };
        let authority = uri.authority().ok_or_else(wrong)?;
        if authority.as_str().contains('@') {
            return Err(
                "has a user name in it, which is not sent: put what proves who posts into \
                        the path"
                    .to_owned(),
            );
        }
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        Ok(Webhook {
            tls,
            host: authority.host().to_owned(),
            port: authority.port_u16().unwrap_or(if tls { 443 } else { 80 }),
            path: path.to_owned(),
        })
    }

    async fn post(&self, body: String) -> Result<(), String> {
        let name = self.host.trim_matches(['[', ']']);
        let stream = TcpStream::connect((name, self.port)).await.map_err(|e| e.to_string())?;
        if !self.tls {
            return self.send(stream, body).await;
        }
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let server = ServerName::try_from(name.to_owned()).map_err(|error| error.to_string())?;
        let stream = TlsConnector::from(Arc::new(config)).connect(server, stream).await;
        self.send(stream.map_err(|error| error.to_string())?, body).await
    }

    async fn send(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        body: String,
    ) -> Result<(), String> {
        let shaken = http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = shaken.map_err(|error| error.to_string())?;
        let request = Request::builder()
            .method(Method::POST)
            .uri(self.path.as_str())
            .header(HOST, format!("{}:{}", self.host, self.port))
            .header(CONTENT_TYPE, "application/json")
            .body(body)
            .map_err(|error| error.to_string())?;
        // It ends with the sender, at the latest.
        tokio::spawn(connection);
        let answer = sender.send_request(request).await.map_err(|error| error.to_string())?;
        match answer.status() {
            status if status.is_success() => Ok(()),
            StatusCode::NOT_FOUND => Err("404: there is nothing at this address".to_owned()),
            status => Err(format!("it answered {status}")),
        }
    }
}

/// One object's change.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Change {
    kind: &'static str,
    name: String,
    from: Health,
    to: Health,
    reason: Option<String>,
}

/// What is posted.
#[derive(Clone, Debug, Serialize)]
struct News {
    site: String,
    /// Seconds since 1970.
    at: f64,
    changes: Vec<Change>,
}

/// How an object is, and why.
type State = (Health, Option<String>);
/// Objects by kind and name.
type States = BTreeMap<(&'static str, String), State>;

/// What whoever is at the address was told last of each object; kept over a restart, so that what
/// one has mended is told as well.
struct Told {
    file: Option<PathBuf>,
    address: u64,
    health: BTreeMap<(String, String), Health>,
}

/// The same as a file.
#[derive(Deserialize, Serialize)]
struct ToldFile {
    /// Whom, without saying where: somebody else was told nothing.
    address: u64,
    /// Kind, name and health of each.
    objects: Vec<(String, String, Health)>,
}

impl Told {
    /// Blocks on the disk. What cannot be read was not told.
    fn read(webhook: &Webhook, folder: Option<&Path>) -> Told {
        let mut hasher = DefaultHasher::new();
        webhook.hash(&mut hasher);
        let (file, address) = (folder.map(|folder| folder.join(TOLD)), hasher.finish());
        let found = file.as_ref().and_then(|file| std::fs::read(file).ok());
        let found = found.and_then(|text| serde_json::from_slice::<ToldFile>(&text).ok());
        let objects = found.filter(|found| found.address == address).map(|found| found.objects);
        let health = objects.unwrap_or_default().into_iter();
        let health = health.map(|(kind, name, health)| ((kind, name), health)).collect();
        Told { file, address, health }
    }

    fn of(&self, kind: &str, name: &str) -> Health {
        self.health.get(&(kind.to_owned(), name.to_owned())).copied().unwrap_or_default()
    }

    /// `changes` were told; objects that there are no more are forgotten.
    async fn note(&mut self, changes: Vec<Change>, states: &States) {
        self.health.retain(|(kind, name), _| states.keys().any(|(k, n)| k == kind && n == name));
        for change in changes {
            self.health.insert((change.kind.to_owned(), change.name), change.to);
        }
        let Some(file) = self.file.clone() else { return };
        let objects = self.health.iter();
        let objects = objects.map(|((kind, name), to)| (kind.clone(), name.clone(), *to)).collect();
        let text = serde_json::to_vec(&ToldFile { address: self.address, objects });
        let written = tokio::task::spawn_blocking(move || write(&file, &text.unwrap_or_default()));
        if let Ok(Err(error)) = written.await {
            tracing::warn!("what was posted is not known after a restart: {error}");
        }
    }
}

/// As a whole or not at all.
fn write(file: &Path, text: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let beside = file.with_extension("new");
    std::fs::write(&beside, text)?;
    std::fs::rename(&beside, file)
}

/// What was seen last.
#[derive(Clone, Debug, Default)]
struct Seen {
    site: String,
    at: f64,
    states: States,
}

/// Hands what is seen to a task that posts it.
#[derive(Debug)]
pub(crate) struct Watcher {
    seen: watch::Sender<Seen>,
}

impl Watcher {
    /// Posts from a task of its own, which ends with this. What was posted is kept in `folder`, if
    /// there is one.
    pub fn start(webhook: Webhook, folder: Option<PathBuf>) -> Watcher {
        let seen = watch::Sender::new(Seen::default());
        tokio::spawn(tell(webhook, folder, seen.subscribe()));
        Watcher { seen }
    }

    /// Takes a look. What was never told was good.
    pub fn look(&mut self, report: &SiteReport, at: f64) {
        let publications =
            report.publications.iter().map(|p| ("publication", &p.name, p.health, &p.reason));
        let subscriptions =
            report.subscriptions.iter().map(|s| ("subscription", &s.name, s.health, &s.reason));
        let mirrors = report.mirrors.iter().map(|m| ("mirror", &m.name, m.health, &m.reason));
        let states: States = publications
            .chain(subscriptions)
            .chain(mirrors)
            .map(|(kind, name, health, reason)| ((kind, name.clone()), (health, reason.clone())))
            .collect();
        self.seen.send_if_modified(|seen| {
            let health = |states: &States| states.values().map(|s| s.0).collect::<Vec<_>>();
            let is_news =
                !seen.states.keys().eq(states.keys()) || health(&seen.states) != health(&states);
            *seen = Seen { site: report.site.clone(), at, states };
            is_news
        });
    }
}

/// Posts what differs from what was told last, again and again until it was taken: a line that is
/// cut hides the address too, and what happened meanwhile must be told when it is back.
async fn tell(webhook: Webhook, folder: Option<PathBuf>, mut seen: watch::Receiver<Seen>) {
    let begun = Instant::now() + BEGINS_IN;
    let mut told = Told::read(&webhook, folder.as_deref());
    let mut pause = PAUSE_MIN;
    // There is nothing to compare with what was told before the first look.
    if seen.changed().await.is_err() {
        return;
    }
    loop {
        let Seen { site, at, states } = seen.borrow_and_update().clone();
        let all: Vec<Change> = states
            .iter()
            .filter_map(|((kind, name), (to, reason))| {
                let from = told.of(kind, name);
                let change =
                    Change { kind, name: name.clone(), from, to: *to, reason: reason.clone() };
                (from != *to).then_some(change)
            })
            .collect();
        let has_begun = Instant::now() >= begun;
        let (changes, later): (Vec<Change>, Vec<Change>) =
            all.into_iter().partition(|change| has_begun || change.to > change.from);
        if !changes.is_empty() {
            let news = News { site, at, changes };
            let body = serde_json::to_string(&news).unwrap_or_default();
            let posted = tokio::time::timeout(TRY_MAX, webhook.post(body)).await;
            let error = match posted {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error),
                Err(_) => Some(format!("no answer within {TRY_MAX:?}")),
            };
            if let Some(error) = error {
                if pause == PAUSE_MIN {
                    tracing::warn!(host = %webhook.host, "changes are not posted yet: {error}");
                }
                tokio::time::sleep(pause).await;
                pause = (2 * pause).min(PAUSE_MAX);
                if seen.has_changed().is_err() {
                    return;
                }
                continue;
            }
            pause = PAUSE_MIN;
            told.note(news.changes, &states).await;
        }
        tokio::select! {
            changed = seen.changed() => if changed.is_err() { return },
            () = tokio::time::sleep_until(begun), if !later.is_empty() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::SubscriptionReport;
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
    use tokio::net::TcpListener;

    /// Takes one request; returns its first line and its body.
    async fn take(listener: &TcpListener, answer: &str) -> (String, serde_json::Value) {
        let (stream, _) = listener.accept().await.unwrap();
        let mut stream = BufReader::new(stream);
        let (mut first, mut length) = (String::new(), 0);
        stream.read_line(&mut first).await.unwrap();
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).await.unwrap();
            if let Some(text) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = text.trim().parse().unwrap();
            }
            if line.trim().is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await.unwrap();
        stream.write_all(answer.as_bytes()).await.unwrap();
        (first.trim().to_owned(), serde_json::from_slice(&body).unwrap())
    }

    fn report(health: Health) -> SiteReport {
        let reason = (health != Health::Good).then(|| "because".to_owned());
        let subscription =
            SubscriptionReport { name: "s".into(), health, reason, ..Default::default() };
        SiteReport { subscriptions: vec![subscription], ..SiteReport::default() }
    }

    /// What was told of the subscription.
    fn told(webhook: &Webhook, folder: Option<&Path>) -> Health {
        Told::read(webhook, folder).of("subscription", "s")
    }

    async fn wait_for(found: impl Fn() -> bool) {
        while !found() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[tokio::test]
    async fn what_was_not_taken_is_told_until_it_is() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}/geheim?x=1", listener.local_addr().unwrap());
        let webhook = Webhook::parse(&address).unwrap();
        assert!(!format!("{webhook:?}").contains("geheim"));
        let folder = tempfile::tempdir().unwrap();
        let place = Some(folder.path().join("monitor"));
        let mut watcher = Watcher::start(webhook.clone(), place.clone());
        let no = "HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n";
        let yes = "HTTP/1.1 204 Done\r\n\r\n";
        let mut seen = Vec::new();
        // What is good at first is no news, and what stays as it is is told once.
        for (health, answers) in
            [(Health::Good, &[][..]), (Health::Critical, &[no, yes]), (Health::Good, &[yes])]
        {
            watcher.look(&report(health), 7.0);
            watcher.look(&report(health), 8.0);
            for answer in answers {
                let (first, news) = take(&listener, answer).await;
                assert_eq!(first, "POST /geheim?x=1 HTTP/1.1");
                let change = &news["changes"][0];
                seen.push(format!("{} {} {}", change["from"], change["to"], change["reason"]));
            }
        }
        let bad = "\"good\" \"critical\" \"because\"";
        assert_eq!(seen, [bad, bad, "\"critical\" \"good\" null"]);

        // A node that starts again tells what has changed meanwhile, and nothing else.
        watcher.look(&report(Health::Warning), 9.0);
        take(&listener, yes).await;
        wait_for(|| told(&webhook, place.as_deref()) == Health::Warning).await;
        drop(watcher);
        let mut watcher = Watcher::start(webhook.clone(), place.clone());
        watcher.look(&report(Health::Warning), 10.0);
        watcher.look(&report(Health::Critical), 11.0);
        let (_, news) = take(&listener, yes).await;
        assert_eq!(news["changes"][0]["from"], "warning", "{news}");
        wait_for(|| told(&webhook, place.as_deref()) == Health::Critical).await;
        drop(watcher);
        // Not from its first moment on: what begins has not failed yet.
        let mut watcher = Watcher::start(webhook, place);
        let begin = Instant::now();
        watcher.look(&report(Health::Good), 12.0);
        let (_, news) = take(&listener, yes).await;
        assert_eq!(news["changes"][0]["to"], "good", "{news}");
        assert!(begin.elapsed() >= BEGINS_IN);
        // Somebody else was told nothing.
        let other = Webhook::parse("http://127.0.0.1:1/other").unwrap();
        assert_eq!(told(&other, Some(&folder.path().join("monitor"))), Health::Good);
    }

    #[test]
    fn an_address_that_is_none_is_not_repeated() {
        for wrong in ["geheim", "ftp://geheim/", "http://", "https://a:geheim@b/"] {
            let said = Webhook::parse(wrong).unwrap_err();
            assert!(!said.contains("geheim"), "{said}");
        }
        let webhook = Webhook::parse("https://[::1]/x").unwrap();
        assert_eq!((webhook.port, webhook.tls, webhook.host.as_str()), (443, true, "[::1]"));
    }
}
