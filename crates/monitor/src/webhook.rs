//! Changes from good to warning to critical and back, posted to an address as they are seen.

use crate::Health;
use crate::report::SiteReport;
use hyper::client::conn::http1;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::RootCertStore;
use rustls::pki_types::ServerName;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsConnector;

/// The other side has this long for each try.
const TRY_MAX: Duration = Duration::from_secs(10);
/// The pause before a second try; it doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Where changes are posted. Its path may be a secret and is never shown.
#[derive(Clone, PartialEq, Eq)]
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
    /// Posts from a task of its own, which ends with this.
    pub fn start(webhook: Webhook) -> Watcher {
        let seen = watch::Sender::new(Seen::default());
        tokio::spawn(tell(webhook, seen.subscribe()));
        Watcher { seen }
    }

    /// Takes a look. What is not good at the first is a change too: nobody knows whether it was
    /// told before the node started.
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
async fn tell(webhook: Webhook, mut seen: watch::Receiver<Seen>) {
    let mut told: BTreeMap<(&'static str, String), Health> = BTreeMap::new();
    let mut pause = PAUSE_MIN;
    loop {
        let Seen { site, at, states } = seen.borrow_and_update().clone();
        let changes: Vec<Change> = states
            .iter()
            .filter_map(|((kind, name), (to, reason))| {
                let from = told.get(&(*kind, name.clone())).copied().unwrap_or_default();
                let change =
                    Change { kind, name: name.clone(), from, to: *to, reason: reason.clone() };
                (from != *to).then_some(change)
            })
            .collect();
        if !changes.is_empty() {
            let body = serde_json::to_string(&News { site, at, changes }).unwrap_or_default();
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
            told = states.into_iter().map(|(object, (health, _))| (object, health)).collect();
        }
        if seen.changed().await.is_err() {
            return;
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

    #[tokio::test]
    async fn what_was_not_taken_is_told_until_it_is() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}/geheim?x=1", listener.local_addr().unwrap());
        let webhook = Webhook::parse(&address).unwrap();
        assert!(!format!("{webhook:?}").contains("geheim"));
        let mut watcher = Watcher::start(webhook);
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
