//! A site that is made up, the monitor on it, and a client that says exactly what a test wants.

use anyhow::{Context, Result};
use farshore_monitor::report::{
    CopyReport, DownstreamReport, MirrorReport, PublicationReport, SiteReport, SlotReport,
    StandbyReport, SubscriptionReport, TracerArrival, TracerReport,
};
use farshore_monitor::{Action, Monitor, Outcome, Question, Sampler, Settings, Source};
use serde_json::Value;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// Where scripts/setup puts what tests need.
pub fn cache() -> PathBuf {
    let setup = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/setup");
    let said = Command::new(setup).arg("--where").output();
    let cache = said.map(|said| String::from_utf8_lossy(&said.stdout).trim().to_owned());
    PathBuf::from(cache.unwrap_or_default())
}

/// A site that is made up.
pub struct Fake {
    report: Mutex<SiteReport>,
    asked: Mutex<Vec<Action>>,
}

impl Fake {
    /// With something in every field.
    pub fn full() -> Arc<Fake> {
        let text = |text: &str| Some(text.to_owned());
        let report = SiteReport {
            site: "tukwila".to_owned(),
            pid: 7,
            uptime_seconds: 60,
            certificate_seconds_left: Some(86_400.0),
            certificate_ends_soon: false,
            publications: vec![PublicationReport {
                name: "dublin/sales".to_owned(),
                upstream: text("dublin"),
                state: "receiving".to_owned(),
                error: text("a word"),
                durable: "0/10".to_owned(),
                unacknowledged_bytes: Some(5),
                heard_at: Some(1.5e9),
                capture_ms: Some(2.5),
                store_ms: Some(0.5),
                ..PublicationReport::default()
            }],
            subscriptions: vec![SubscriptionReport {
                name: "reporting".to_owned(),
                publication: "dublin/sales".to_owned(),
                state: "streaming".to_owned(),
                behind_bytes: 17,
                behind_commands: Some(3),
                upstream_ms: Some(3.0),
                apply_ms: Some(1.0),
                latency_ms: Some(1.5),
                lag_p50_ms: Some(0.5),
                copies: vec![CopyReport { table: "public.t".to_owned(), ..CopyReport::default() }],
                ..SubscriptionReport::default()
            }],
            downstreams: vec![DownstreamReport {
                site: "cork".to_owned(),
                publication: "dublin/sales".to_owned(),
                behind_commands: Some(4),
                link_ms: Some(40.0),
                ..DownstreamReport::default()
            }],
            mirrors: vec![MirrorReport {
                name: "all".to_owned(),
                end: "near".to_owned(),
                mode: text("far"),
                compression: text("zstd 1"),
                kept_bytes: Some(9),
                principal_kept_bytes: Some(6),
                redo_queue_bytes: Some(8),
                apply_bytes_per_s: Some(7),
                slots: vec![SlotReport { restart: text("0/3000000"), ..SlotReport::default() }],
                standbys: vec![StandbyReport::default()],
                ..MirrorReport::default()
            }],
            tracers: vec![TracerReport {
                publication: "dublin/sales".to_owned(),
                subscriptions: vec![TracerArrival::default()],
                downstreams: vec![TracerArrival::default()],
                ..TracerReport::default()
            }],
        };
        Arc::new(Fake { report: Mutex::new(report), asked: Mutex::default() })
    }

    fn report_now(&self) -> MutexGuard<'_, SiteReport> {
        self.report.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Changes what it says of itself.
    pub fn set(&self, change: impl FnOnce(&mut SiteReport)) {
        change(&mut self.report_now());
    }

    /// What it was asked for.
    pub fn asked(&self) -> Vec<Action> {
        self.asked.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }
}

impl Source for Fake {
    fn report(&self) -> SiteReport {
        self.report_now().clone()
    }

    fn tell(&self, question: Question) -> Outcome {
        Box::pin(async move { Ok(Value::from(format!("{question:?}"))) })
    }

    fn act(&self, action: Action) -> Outcome {
        self.asked.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(action.clone());
        Box::pin(async move {
            match action {
                Action::Pause { subscription } if subscription == "nobody" => {
                    Err("the site file has no subscription \"nobody\"".to_owned())
                }
                _ => Ok(Value::from("done")),
            }
        })
    }
}

/// A monitor at work.
pub struct Running {
    pub address: SocketAddr,
    pub source: Arc<Fake>,
    _parts: JoinSet<()>,
}

/// Starts a monitor on loopback.
pub async fn start(source: Arc<Fake>) -> Result<Running> {
    let settings = Settings {
        address: "127.0.0.1:0".parse()?,
        token: None,
        tls: None,
        history: None,
        webhook: None,
    };
    start_with(source, settings).await
}

/// Starts a monitor, and waits until it has looked at the site.
pub async fn start_with(source: Arc<Fake>, settings: Settings) -> Result<Running> {
    let (sampler, mut snapshots) = Sampler::new(source.clone(), &settings);
    let monitor = Monitor::bind(&settings, source.clone(), snapshots.clone()).await?;
    let address = monitor.local_address();
    let mut parts = JoinSet::new();
    parts.spawn(sampler.run());
    parts.spawn(monitor.run());
    snapshots.changed().await?;
    Ok(Running { address, source, _parts: parts })
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Answer {
    /// A header by its name in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(given, _)| given == name).map(|(_, value)| value.as_str())
    }
}

/// Asks for a path.
pub async fn get(monitor: &Running, path: &str) -> Result<Answer> {
    ask(monitor, "GET", path, &[], "").await
}

/// Asks for an action as the page does.
pub async fn post(monitor: &Running, path: &str, body: &str) -> Result<Answer> {
    let headers = [("content-type", "application/json"), ("x-farshore-action", "page")];
    ask(monitor, "POST", path, &headers, body).await
}

fn request(
    monitor: &Running,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> String {
    let mut text = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
    if !headers.iter().any(|(name, _)| *name == "host") {
        text.push_str(&format!("host: {}\r\n", monitor.address));
    }
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    text.push_str(&format!("content-length: {}\r\n\r\n{body}", body.len()));
    text
}

/// Asks with these headers.
pub async fn ask(
    monitor: &Running,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Result<Answer> {
    let mut stream = TcpStream::connect(monitor.address).await?;
    // A body that is too large is refused before it is read.
    let _ = stream.write_all(request(monitor, method, path, headers, body).as_bytes()).await;
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes).await;
    let text = String::from_utf8(bytes)?;
    let (head, body) = text.split_once("\r\n\r\n").context("no answer")?;
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).context("no status")?;
    let headers = lines.filter_map(|line| line.split_once(": "));
    let headers = headers.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()));
    Ok(Answer { status: status.parse()?, headers: headers.collect(), body: body.to_owned() })
}

/// Server-sent events.
pub struct Events(BufReader<TcpStream>);

/// Opens a stream of events.
pub async fn events(monitor: &Running) -> Result<Events> {
    let mut stream = TcpStream::connect(monitor.address).await?;
    stream.write_all(request(monitor, "GET", "/api/v1/events", &[], "").as_bytes()).await?;
    Ok(Events(BufReader::new(stream)))
}

impl Events {
    /// The next state.
    pub async fn next(&mut self) -> Result<Value> {
        loop {
            let mut line = String::new();
            anyhow::ensure!(self.0.read_line(&mut line).await? > 0, "the events ended");
            if let Some(data) = line.strip_prefix("data: ") {
                return Ok(serde_json::from_str(data)?);
            }
        }
    }
}
