//! The JSON interface: state, events, actions.

use crate::guard::{self, Guard, is_same_site};
use crate::history::{self, History, Kind};
use crate::sample::Snapshot;
use crate::{Action, Outcome, Question, Source, prometheus, web};
use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::middleware::from_fn_with_state;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::stream;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Longest body of an action, in bytes.
const BODY_BYTES_MAX: usize = 8 << 10;
/// Pages that are kept up to date side by side.
const EVENTS_MAX: usize = 24;
/// Actions side by side.
const ACTIONS_MAX: usize = 4;

/// Changes, or conflicts, in one answer: as many as asked for, up to this.
const SHOWN_MAX: u64 = 200;
/// How many are shown if nothing else is asked for.
const SHOWN: u64 = 50;
/// A disk or a server is waited for so long.
const TELL_MAX: Duration = Duration::from_secs(20);

/// What is served, described for programs.
pub const OPENAPI: &str = include_str!("openapi.json");

/// Every route beside the page's parts: method and path as in [`OPENAPI`].
pub const ROUTES: &[(&str, &str)] = &[
    ("get", "/metrics"),
    ("get", "/api/v1/openapi.json"),
    ("get", "/api/v1/status"),
    ("get", "/api/v1/events"),
    ("get", "/api/v1/publications/{name}/history"),
    ("get", "/api/v1/subscriptions/{name}/history"),
    ("get", "/api/v1/mirrors/{name}/history"),
    ("get", "/api/v1/publications/{name}/changes"),
    ("get", "/api/v1/subscriptions/{name}/conflicts"),
    ("post", "/api/v1/publications/{name}/resume"),
    ("post", "/api/v1/publications/{name}/tracer"),
    ("post", "/api/v1/subscriptions/{name}/pause"),
    ("post", "/api/v1/subscriptions/{name}/resume"),
    ("post", "/api/v1/subscriptions/{name}/resync"),
    ("post", "/api/v1/subscriptions/{name}/skip"),
];

const JSON: [(axum::http::HeaderName, &str); 1] = [(CONTENT_TYPE, "application/json")];

#[derive(Clone)]
struct Served {
    source: Arc<dyn Source>,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    history: Option<PathBuf>,
    events: Arc<Semaphore>,
    actions: Arc<Semaphore>,
    tellings: Arc<Semaphore>,
}

/// All routes, behind the guard.
pub(crate) fn routes(
    source: Arc<dyn Source>,
    snapshots: watch::Receiver<Arc<Snapshot>>,
    history: Option<PathBuf>,
    guard: Guard,
) -> Router {
    let served = Served {
        source,
        snapshots,
        history,
        events: Arc::new(Semaphore::new(EVENTS_MAX)),
        actions: Arc::new(Semaphore::new(ACTIONS_MAX)),
        tellings: Arc::new(Semaphore::new(ACTIONS_MAX)),
    };
    let mut router = Router::new();
    for &(_, path) in ROUTES {
        router = router.route(
            path,
            match path {
                "/metrics" => get(metrics),
                "/api/v1/openapi.json" => get(async || (JSON, OPENAPI)),
                "/api/v1/status" => get(status),
                "/api/v1/events" => get(events),
                _ if path.ends_with("/history") => get(kept),
                _ if path.ends_with("/changes") || path.ends_with("/conflicts") => get(tell),
                _ => post(act),
            },
        );
    }
    router
        .fallback(page)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(from_fn_with_state(Arc::new(guard), guard::stand))
        .with_state(served)
}

async fn page(uri: Uri) -> Response {
    let missing = || problem(StatusCode::NOT_FOUND, "there is nothing here; the page is at /");
    web::part(uri.path()).unwrap_or_else(missing)
}

fn problem(status: StatusCode, what: &str) -> Response {
    (status, JSON, json!({ "error": what }).to_string()).into_response()
}

async fn status(State(served): State<Served>) -> Response {
    let snapshot = served.snapshots.borrow().clone();
    (JSON, snapshot.to_json().to_owned()).into_response()
}

async fn metrics(State(served): State<Served>) -> Response {
    let snapshot = served.snapshots.borrow().clone();
    ([(CONTENT_TYPE, prometheus::CONTENT_TYPE)], prometheus::render(&snapshot)).into_response()
}

/// What is kept of one object.
async fn kept(State(served): State<Served>, Path(name): Path<String>, uri: Uri) -> Response {
    let snapshot = served.snapshots.borrow().clone();
    let kind = uri.path().rsplit('/').nth(2).and_then(Kind::of_path);
    let report = &snapshot.report;
    // Only what the site has: a name from outside never becomes a path.
    let known = kind.filter(|kind| match kind {
        Kind::Publication => report.publications.iter().any(|p| p.name == name),
        Kind::Subscription => report.subscriptions.iter().any(|s| s.name == name),
        Kind::Mirror => report.mirrors.iter().any(|m| m.name == name),
    });
    let Some(kind) = known else {
        return problem(StatusCode::NOT_FOUND, &format!("the site has no \"{name}\" of that kind"));
    };
    let read = move || match &served.history {
        Some(folder) => history::read(folder, kind, &name, snapshot.sampled_at),
        None => History::default(),
    };
    let Ok(history) = tokio::task::spawn_blocking(read).await else {
        return problem(StatusCode::INTERNAL_SERVER_ERROR, "the history could not be read");
    };
    (JSON, json!(history).to_string()).into_response()
}

/// The state whenever it was looked at: at once, and about once a second. A client that takes long
/// misses some.
async fn events(State(served): State<Served>) -> Response {
    let Ok(permit) = served.events.clone().try_acquire_owned() else {
        let what = format!("{EVENTS_MAX} pages are kept up to date already; close one");
        return problem(StatusCode::SERVICE_UNAVAILABLE, &what);
    };
    let mut looks = served.snapshots.clone();
    looks.mark_changed();
    type Looks = (watch::Receiver<Arc<Snapshot>>, OwnedSemaphorePermit);
    let next = async |(mut looks, permit): Looks| {
        looks.changed().await.ok()?;
        let snapshot = looks.borrow_and_update().clone();
        let event = Event::default().event("status").data(snapshot.to_json());
        Some((Ok::<_, Infallible>(event), (looks, permit)))
    };
    let events = stream::unfold((looks, permit), next);
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

/// What takes a disk or a server to tell, by its path.
async fn tell(
    State(served): State<Served>,
    Path(name): Path<String>,
    uri: Uri,
    headers: HeaderMap,
) -> Response {
    if !is_same_site(&headers) {
        let what = "another site's page asks for this; open the monitor itself";
        return problem(StatusCode::FORBIDDEN, what);
    }
    let question = match question(&uri, name) {
        Ok(question) => question,
        Err(what) => return problem(StatusCode::BAD_REQUEST, &what),
    };
    let Ok(_permit) = served.tellings.clone().try_acquire_owned() else {
        return problem(StatusCode::SERVICE_UNAVAILABLE, "others are being answered; try again");
    };
    let telling: Outcome = served.source.tell(question);
    match tokio::time::timeout(TELL_MAX, telling).await {
        Ok(Ok(told)) => (JSON, told.to_string()).into_response(),
        Ok(Err(why)) => problem(StatusCode::CONFLICT, &why),
        Err(_) => problem(
            StatusCode::GATEWAY_TIMEOUT,
            &format!("what was asked did not answer within {TELL_MAX:?}; try again"),
        ),
    }
}

fn question(uri: &Uri, name: String) -> Result<Question, String> {
    let (mut from, mut limit) = (None, SHOWN);
    for part in uri.query().unwrap_or_default().split('&').filter(|part| !part.is_empty()) {
        match part.split_once('=') {
            // A position has no character that is written in another way but its slash.
            Some(("from", text)) => from = Some(text.replace("%2F", "/").replace("%2f", "/")),
            Some(("limit", text)) => {
                let wanted: u64 = text.parse().map_err(|_| format!("limit={text} is no number"))?;
                limit = wanted.clamp(1, SHOWN_MAX);
            }
            _ => return Err(format!("\"{part}\" is not understood; there are from and limit")),
        }
    }
    Ok(if uri.path().ends_with("/changes") {
        Question::Changes { publication: name, from, limit }
    } else {
        Question::Conflicts { subscription: name, limit }
    })
}

/// One of the actions, by its path.
async fn act(
    State(served): State<Served>,
    Path(name): Path<String>,
    uri: Uri,
    body: Bytes,
) -> Response {
    let action = match asked(&uri, name, &body) {
        Ok(action) => action,
        Err(what) => return problem(StatusCode::BAD_REQUEST, &what),
    };
    let Ok(permit) = served.actions.clone().try_acquire_owned() else {
        return problem(StatusCode::SERVICE_UNAVAILABLE, "other actions are under way; try again");
    };
    tracing::info!(?action, "asked for on the monitor");
    let acting = served.source.act(action);
    // A browser that goes away leaves nothing half done.
    let acting = tokio::spawn(async move {
        let outcome = acting.await;
        drop(permit);
        outcome
    });
    match acting.await {
        Ok(Ok(done)) => (JSON, json!({ "done": done }).to_string()).into_response(),
        Ok(Err(why)) => problem(StatusCode::CONFLICT, &why),
        Err(_) => problem(StatusCode::INTERNAL_SERVER_ERROR, "the action ended early; see the log"),
    }
}

fn asked(uri: &Uri, name: String, body: &[u8]) -> Result<Action, String> {
    let body: Value = serde_json::from_slice(body)
        .map_err(|error| format!("the body is no JSON object: {error}"))?;
    let text = |key: &str| {
        let value = body.get(key).and_then(Value::as_str).filter(|value| !value.is_empty());
        value.map(str::to_owned).ok_or_else(|| format!("the body has no \"{key}\""))
    };
    let mut segments = uri.path().rsplit('/');
    let verb = segments.next().unwrap_or_default();
    let kind = segments.nth(1).unwrap_or_default();
    Ok(match (kind, verb) {
        ("publications", "resume") => Action::ResumePublication { publication: name },
        ("publications", "tracer") => Action::Tracer { publication: name },
        ("subscriptions", "pause") => Action::Pause { subscription: name },
        ("subscriptions", "resume") => Action::Resume { subscription: name },
        ("subscriptions", "resync") => Action::Resync { subscription: name, table: text("table")? },
        ("subscriptions", "skip") => Action::Skip { subscription: name, lsn: text("lsn")? },
        _ => return Err(format!("there is no action {}", uri.path())),
    })
}
