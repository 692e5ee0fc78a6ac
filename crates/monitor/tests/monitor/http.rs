//! The monitor asked over HTTP, as browsers, scrapers and strangers ask.

use crate::site::{Fake, ask, get, post, start, start_with};
use anyhow::{Result, ensure};
use farshore_monitor::{Action, Settings};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const HOSTILE: &str = "x\"><script>alert(1)</script>\\\n";

#[tokio::test]
async fn the_state_is_shown_with_headers_against_framing_and_sniffing() -> Result<()> {
    let monitor = start(Fake::full()).await?;
    let answer = get(&monitor, "/api/v1/status").await?;
    ensure!(answer.status == 200, "{answer:?}");
    let status: Value = serde_json::from_str(&answer.body)?;
    ensure!(status["site"] == "tukwila" && status["subscriptions"][0]["behind_bytes"] == 17);
    ensure!(status["rates"]["subscriptions"]["reporting"]["drain_seconds"].is_null());
    for path in ["/", "/app.js", "/style.css", "/metrics", "/api/v1/status", "/nowhere"] {
        let answer = get(&monitor, path).await?;
        for (name, value) in [
            ("content-security-policy", "default-src 'self'; frame-ancestors 'none'"),
            ("x-content-type-options", "nosniff"),
            ("x-frame-options", "DENY"),
            ("referrer-policy", "no-referrer"),
            ("cache-control", "no-store"),
        ] {
            let given = answer.header(name);
            ensure!(given.is_some_and(|given| given.contains(value)), "{path} {name}: {given:?}");
        }
    }
    ensure!(get(&monitor, "/nowhere").await?.status == 404);
    Ok(())
}

#[tokio::test]
async fn the_page_fetches_nothing_from_elsewhere() -> Result<()> {
    let monitor = start(Fake::full()).await?;
    let mut wanted: BTreeSet<String> = BTreeSet::from(["/".to_owned()]);
    let mut seen = BTreeSet::new();
    while let Some(path) = wanted.pop_first() {
        let answer = get(&monitor, &path).await?;
        ensure!(answer.status == 200, "{path}: {}", answer.status);
        let namespace = "http://www.w3.org/2000/svg";
        let text = answer.body.replace(namespace, "");
        ensure!(!text.contains("http://") && !text.contains("https://"), "{path} goes elsewhere");
        for sink in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
            ensure!(!text.contains(sink), "{path} uses {sink}: names would not be text");
        }
        seen.insert(path);
        for part in
            text.split(['"', '\'']).filter(|part| part.ends_with(".js") || part.ends_with(".css"))
        {
            if part.starts_with('/') && !seen.contains(part) {
                wanted.insert(part.to_owned());
            }
        }
    }
    ensure!(seen.len() >= 5, "{seen:?}");
    Ok(())
}

#[tokio::test]
async fn names_that_were_made_to_lead_here_are_refused() -> Result<()> {
    let monitor = start(Fake::full()).await?;
    for (host, status) in [
        ("localhost:7480", 200),
        ("127.0.0.1", 200),
        ("[::1]:7480", 200),
        ("evil.example", 421),
        ("localhost.evil.example:7480", 421),
    ] {
        let answer = ask(&monitor, "GET", "/api/v1/status", &[("host", host)], "").await?;
        ensure!(answer.status == status, "{host}: {answer:?}");
        ensure!(status == 200 || !answer.body.contains("tukwila"), "{host}: {answer:?}");
    }
    Ok(())
}

#[tokio::test]
async fn actions_come_from_the_page_alone() -> Result<()> {
    let monitor = start(Fake::full()).await?;
    let path = "/api/v1/subscriptions/reporting/pause";
    let host = monitor.address.to_string();
    let origin = format!("http://{host}");
    let good = [
        ("host", host.as_str()),
        ("origin", origin.as_str()),
        ("content-type", "application/json"),
        ("x-farshore-action", "page"),
    ];
    for (without, instead, status) in [
        ("", None, 200),
        ("origin", None, 200),
        ("origin", Some("http://evil.example"), 403),
        ("origin", Some("null"), 403),
        ("content-type", None, 403),
        ("content-type", Some("text/plain"), 403),
        ("x-farshore-action", None, 403),
        ("sec-fetch-site", Some("cross-site"), 403),
    ] {
        let mut headers: Vec<_> =
            good.iter().copied().filter(|(name, _)| *name != without).collect();
        headers.extend(instead.map(|value| (without, value)));
        let before = monitor.source.asked().len();
        let answer = ask(&monitor, "POST", path, &headers, "{}").await?;
        ensure!(answer.status == status, "{without} {instead:?}: {answer:?}");
        let asked = monitor.source.asked().len() - before;
        ensure!(asked == usize::from(status == 200), "{without} {instead:?}: asked {asked} times");
    }
    ensure!(get(&monitor, path).await?.status == 405, "an action by GET");
    Ok(())
}

#[tokio::test]
async fn actions_reach_the_site_and_tell_how_they_ended() -> Result<()> {
    let monitor = start(Fake::full()).await?;
    for (path, body, action) in [
        (
            "subscriptions/reporting/resume",
            json!({}),
            Action::Resume { subscription: "reporting".into() },
        ),
        (
            "subscriptions/reporting/resync",
            json!({ "table": HOSTILE }),
            Action::Resync { subscription: "reporting".into(), table: HOSTILE.into() },
        ),
        (
            "subscriptions/reporting/skip",
            json!({ "lsn": "0/1A" }),
            Action::Skip { subscription: "reporting".into(), lsn: "0/1A".into() },
        ),
        (
            "publications/dublin%2Fsales/resume",
            json!({}),
            Action::ResumePublication { publication: "dublin/sales".into() },
        ),
    ] {
        let answer = post(&monitor, &format!("/api/v1/{path}"), &body.to_string()).await?;
        ensure!(answer.status == 200, "{path}: {answer:?}");
        ensure!(monitor.source.asked().last() == Some(&action), "{path}");
    }
    let refused = post(&monitor, "/api/v1/subscriptions/nobody/pause", "{}").await?;
    ensure!(refused.status == 409, "{refused:?}");
    let why: Value = serde_json::from_str(&refused.body)?;
    ensure!(why["error"] == "the site file has no subscription \"nobody\"", "{why}");
    for body in ["", "[]", "{}", "{\"table\": 7}", "{\"table\": \"\"}"] {
        let answer = post(&monitor, "/api/v1/subscriptions/reporting/resync", body).await?;
        ensure!(answer.status == 400, "{body}: {answer:?}");
    }
    let large = format!("{{\"table\": \"{}\"}}", "x".repeat(100_000));
    let answer = post(&monitor, "/api/v1/subscriptions/reporting/resync", &large).await?;
    ensure!(answer.status == 413, "{}", answer.status);
    Ok(())
}

#[tokio::test]
async fn with_a_token_nothing_is_given_without_it() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("token");
    std::fs::write(&file, "geheim-geheim-geheim\n")?;
    let settings = |address: &str| Settings {
        address: address.parse().unwrap(),
        token: Some(file.clone()),
        tls: None,
        history: None,
        webhook: None,
    };
    let monitor = start_with(Fake::full(), settings("127.0.0.1:0")).await?;
    let basic = "Basic YW55Ym9keTpnZWhlaW0tZ2VoZWltLWdlaGVpbQ==";
    for path in
        ["/", "/app.js", "/metrics", "/api/v1/status", "/api/v1/events", "/api/v1/openapi.json"]
    {
        for (given, status) in [
            (None, 401),
            (Some("Bearer geheim"), 401),
            (Some("Bearer geheim-geheim-geheim2"), 401),
            (Some("Basic !!!"), 401),
            (Some("Basic Z2VoZWltLWdlaGVpbS1nZWhlaW0="), 401),
            (Some("geheim-geheim-geheim"), 401),
        ] {
            let headers: Vec<_> = given.map(|given| ("authorization", given)).into_iter().collect();
            let answer = ask(&monitor, "GET", path, &headers, "").await?;
            ensure!(answer.status == status, "{path} {given:?}: {answer:?}");
            ensure!(!answer.body.contains("tukwila") && !answer.body.contains("geheim"));
        }
        if path == "/api/v1/events" {
            continue;
        }
        for given in ["Bearer geheim-geheim-geheim", basic] {
            let answer = ask(&monitor, "GET", path, &[("authorization", given)], "").await?;
            ensure!(answer.status == 200, "{path} {given}: {answer:?}");
            ensure!(!answer.body.contains("geheim"), "{path} tells the token");
        }
    }
    // Elsewhere than on loopback there is TLS too.
    let said = start_with(Fake::full(), settings("0.0.0.0:0")).await;
    let said = said.err().map(|error| error.to_string()).unwrap_or_default();
    ensure!(said.contains("monitor_certificate and monitor_key"), "{said}");
    std::fs::write(&file, "short\n")?;
    let said = start_with(Fake::full(), settings("127.0.0.1:0")).await;
    let said = said.err().map(|error| error.to_string()).unwrap_or_default();
    ensure!(said.contains("at least 16") && !said.contains("short"), "{said}");
    Ok(())
}

#[tokio::test]
async fn with_tls_nothing_is_said_in_clear() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = |name: &str| folder.path().join(name);
    let made = rcgen::generate_simple_self_signed(["monitor.example".to_owned()])?;
    std::fs::write(file("crt"), made.cert.pem())?;
    std::fs::write(file("key"), made.signing_key.serialize_pem())?;
    std::fs::write(file("token"), "geheim-geheim-geheim")?;
    let settings = Settings {
        // Every address: allowed, with a certificate and a token.
        address: "0.0.0.0:0".parse()?,
        token: Some(file("token")),
        tls: Some((file("crt"), file("key"))),
        history: None,
        webhook: None,
    };
    let monitor = start_with(Fake::full(), settings.clone()).await?;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone())?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(client));
    for (token, status) in [("geheim-geheim-geheim", "200"), ("wrong", "401")] {
        let stream = TcpStream::connect(("127.0.0.1", monitor.address.port())).await?;
        let name = "monitor.example".try_into()?;
        let mut stream = connector.connect(name, stream).await?;
        let request = format!(
            "GET /api/v1/status HTTP/1.1\r\nhost: monitor.example\r\nauthorization: Bearer \
             {token}\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await?;
        let mut bytes = Vec::new();
        // The other side closes without a word more than its answer.
        let _ = stream.read_to_end(&mut bytes).await;
        let text = String::from_utf8_lossy(&bytes);
        ensure!(text.starts_with(&format!("HTTP/1.1 {status}")), "{text}");
        ensure!(text.contains("tukwila") == (status == "200"), "{text}");
    }
    // Who speaks in clear gets no answer in clear.
    let mut stream = TcpStream::connect(("127.0.0.1", monitor.address.port())).await?;
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await?;
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes).await;
    ensure!(!String::from_utf8_lossy(&bytes).contains("HTTP"), "{bytes:?}");
    std::fs::write(file("key"), "no key")?;
    let said = start_with(Fake::full(), settings).await.err().map(|error| error.to_string());
    ensure!(said.as_ref().is_some_and(|said| said.contains("no private key")), "{said:?}");
    Ok(())
}

#[tokio::test]
async fn events_come_as_the_state_changes() -> Result<()> {
    let monitor = start(Fake::full()).await?;
    let mut events = crate::site::events(&monitor).await?;
    let first = events.next().await?;
    ensure!(first["site"] == "tukwila", "{first}");
    monitor.source.set(|report| report.uptime_seconds = 4711);
    loop {
        let next = events.next().await?;
        if next["uptime_seconds"] == 4711 {
            return Ok(());
        }
    }
}

#[tokio::test]
async fn history_is_given_of_what_the_site_has() -> Result<()> {
    let folder = tempfile::tempdir()?;
    // A minute long ago, and a name that would lead elsewhere.
    std::fs::write(folder.path().join("subscription.reporting.ring"), [7; 640])?;
    let settings = Settings {
        address: "127.0.0.1:0".parse()?,
        token: None,
        tls: None,
        history: Some(folder.path().to_owned()),
        webhook: None,
    };
    let monitor = start_with(Fake::full(), settings).await?;
    for (path, fields) in
        [("subscriptions/reporting", 8), ("publications/dublin%2Fsales", 9), ("mirrors/all", 6)]
    {
        let answer = get(&monitor, &format!("/api/v1/{path}/history")).await?;
        let history: Value = serde_json::from_str(&answer.body)?;
        ensure!(history["every_seconds"] == 60 && history["points"] == json!([]), "{history}");
        ensure!(history["fields"].as_array().is_some_and(|f| f.len() == fields), "{history}");
    }
    for path in ["subscriptions/nobody", "subscriptions/..%2F..%2Fetc", "mirrors/reporting"] {
        let answer = get(&monitor, &format!("/api/v1/{path}/history")).await?;
        ensure!(answer.status == 404, "{path}: {answer:?}");
    }
    Ok(())
}

/// Keys of a value, and of what is in it, with the schema that describes them.
fn compare(value: &Value, schema: &Value, all: &Value, at: &str) -> Result<()> {
    let schema = match schema["$ref"].as_str() {
        Some(name) => &all[name.rsplit('/').next().unwrap_or_default()],
        None => schema,
    };
    match value {
        Value::Object(fields) if schema["additionalProperties"].is_object() => {
            for (key, value) in fields {
                compare(value, &schema["additionalProperties"], all, &format!("{at}.{key}"))?;
            }
        }
        Value::Object(fields) => {
            let keys: BTreeSet<_> = fields.keys().collect();
            let described: BTreeSet<_> =
                schema["properties"].as_object().into_iter().flat_map(|p| p.keys()).collect();
            ensure!(keys == described, "{at}: {keys:?} are served, {described:?} described");
            for (key, value) in fields {
                compare(value, &schema["properties"][key], all, &format!("{at}.{key}"))?;
            }
        }
        Value::Array(values) => {
            ensure!(!values.is_empty(), "{at} is empty, so nothing is compared");
            for value in values {
                compare(value, &schema["items"], all, &format!("{at}[]"))?;
            }
        }
        scalar => {
            let kind = match scalar {
                Value::String(_) => "string",
                Value::Bool(_) => "boolean",
                Value::Number(number) if number.is_f64() => "number",
                Value::Number(_) => "integer",
                _ => "null",
            };
            let kinds = match &schema["type"] {
                Value::Array(kinds) => kinds.clone(),
                kind => vec![kind.clone()],
            };
            let fits = kinds.iter().any(|k| k == kind || k == "number" && kind == "integer");
            ensure!(fits, "{at} is a {kind}, described as {kinds:?}");
        }
    }
    Ok(())
}

#[tokio::test]
async fn what_is_served_is_what_is_described() -> Result<()> {
    let monitor = start(Fake::full()).await?;
    let openapi: Value = serde_json::from_str(&get(&monitor, "/api/v1/openapi.json").await?.body)?;
    let described: BTreeSet<(String, String)> = openapi["paths"]
        .as_object()
        .into_iter()
        .flatten()
        .flat_map(|(path, methods)| {
            let methods = methods.as_object().into_iter().flat_map(|methods| methods.keys());
            methods.map(|method| (method.clone(), path.clone()))
        })
        .collect();
    let served: BTreeSet<(String, String)> = farshore_monitor::ROUTES
        .iter()
        .map(|(method, path)| ((*method).to_owned(), (*path).to_owned()))
        .collect();
    ensure!(described == served, "{described:?} described, {served:?} served");
    let schemas = &openapi["components"]["schemas"];
    let status: Value = serde_json::from_str(&get(&monitor, "/api/v1/status").await?.body)?;
    compare(&status, &schemas["Status"], schemas, "status")
}
