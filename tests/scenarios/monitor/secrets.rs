//! Secrets that would be recognised anywhere, and names that would run as scripts.

use crate::asking::Monitor;
use anyhow::{Context, Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::{DATABASE, Direction, Pair, Site};
use serde_json::Value;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const TARGET_PASSWORD: &str = "geheim4711target";
const SOURCE_PASSWORD: &str = "geheim4711source";
const TOKEN: &str = "geheim4711-monitor-token";
const WEBHOOK_PATH: &str = "geheim4711webhook";
/// What all of them have in common.
const SECRET: &str = "geheim4711";
const NAME: &str = "<img src=x onerror=alert(1)>";

fn pair() -> Result<Pair> {
    let mut pair = Pair::bare(Direction::UP)?;
    let token = pair.site.directory().join("token");
    std::fs::write(&token, TOKEN)?;
    // Nobody listens there: that it cannot be posted is logged.
    let webhook = format!("http://127.0.0.1:9/{WEBHOOK_PATH}");
    pair.site.add_to_site(&format!(
        "monitor = \"127.0.0.1:0\"\nmonitor_token = \"{}\"\nwebhook = \"{webhook}\"\n",
        token.display()
    ))?;
    pair.on_both(&format!(
        "CREATE TABLE t (id integer PRIMARY KEY, v text); \
         CREATE TABLE \"{NAME}\" (id integer PRIMARY KEY, v text)"
    ))?;
    pair.publish(&format!("INSERT INTO \"{NAME}\" VALUES (1, 'v')"))?;
    pair.add_publication("p", &["public.*"], "")?;
    let source = pair.publisher.url(DATABASE);
    let with_password = source.replacen('@', &format!(":{SOURCE_PASSWORD}@"), 1);
    pair.site.replace(&source, &with_password)?;
    let target = pair.subscriber.url(DATABASE);
    pair.add_subscription("s", "p", &target.replacen('@', &format!(":{TARGET_PASSWORD}@"), 1))?;
    pair.site.start()?;
    pair.await_arrival()?;
    Ok(pair)
}

/// Everything that the monitor answers, and everything that is said elsewhere.
fn everything(pair: &Pair, monitor: Monitor) -> Result<Vec<(String, String)>> {
    let mut told = vec![("events".to_owned(), monitor.first_event()?)];
    let openapi: Value = serde_json::from_str(&monitor.get("/api/v1/openapi.json")?)?;
    let paths = openapi["paths"].as_object().context("no paths")?;
    for (path, methods) in paths.iter().filter(|(path, _)| !path.ends_with("/events")) {
        for name in ["p", "s", "nobody"] {
            let path = path.replace("{name}", name);
            if methods.get("get").is_some() {
                told.push((format!("GET {path}"), monitor.get_any(&path)?.body));
                let wrong = format!("{path}?from={SECRET}-not&limit=x");
                // What was asked may be told again; nothing else may.
                let body = monitor.get_any(&wrong)?.body.replace(&format!("{SECRET}-not"), "");
                told.push((format!("GET {wrong}"), body));
            } else if name == "nobody" || path.ends_with("/skip") || path.ends_with("/resync") {
                // Nothing is named that could be left out or copied: each is refused.
                told.push((format!("POST {path}"), monitor.post(&path, "{}")?.body));
            }
        }
    }
    let page = monitor.get("/")?;
    let parts = ["/", "/app.js", "/browse.js", "/actions.js", "/draw.js", "/format.js"];
    for part in parts.into_iter().chain(["/style.css", "/icon.svg", "/nowhere"]) {
        told.push((part.to_owned(), monitor.get_any(part)?.body));
    }
    ensure!(page.contains("Farshore"), "{page}");
    told.push(("the log".to_owned(), pair.site.log()));
    for arguments in [&["status"][..], &["status", "--json"], &["check"]] {
        let said = pair.site.verb(arguments[0], &arguments[1..])?;
        told.push((arguments.join(" "), said.stdout + &said.stderr));
    }
    Ok(told)
}

fn has_none(told: &[(String, String)]) -> Result<()> {
    for (place, text) in told {
        ensure!(!text.contains(SECRET), "a secret is told by {place}: {text}");
    }
    Ok(())
}

#[test]
fn no_secret_is_told_and_hostile_names_are_text() -> Result<()> {
    let mut pair = pair()?;
    let unknown = Monitor::of(&pair.site)?;
    for path in ["/", "/metrics", "/api/v1/status", "/api/v1/publications/p/changes"] {
        let refused = unknown.get_any(path)?;
        ensure!(refused.status == 401 && !refused.body.contains(SECRET), "{path}: {refused:?}");
    }
    let monitor = Monitor { token: Some(TOKEN), ..unknown };
    has_none(&everything(&pair, monitor)?)?;

    // An error that names the table, and a webhook that cannot be told of it.
    pair.subscriber.execute_script(&format!("DELETE FROM \"{NAME}\""))?;
    pair.publish(&format!("UPDATE \"{NAME}\" SET v = 'w' WHERE id = 1"))?;
    pair.site.await_trouble("s", "onerror")?;
    wait_until("the error to be shown", SOON, &[], || {
        Ok(monitor.get("/api/v1/status")?.contains("onerror").then_some(()))
    })?;
    pair.site.await_log("changes are not posted yet", SOON)?;
    let told = everything(&pair, monitor)?;
    has_none(&told)?;
    let of = |place: &str| {
        let found = told.iter().find(|(at, _)| at == place);
        found.map(|(_, text)| text.as_str()).with_context(|| format!("nothing of {place}"))
    };
    ensure!(of("GET /api/v1/publications/p/changes")?.contains("onerror"), "it is not browsed");
    ensure!(!of("GET /metrics")?.contains("onerror"), "a table's name became a label");

    // Servers that are away are named in errors, without what proves who asks.
    pair.subscriber.stop(farshore_testkit::postgres::StopMode::Fast)?;
    let answer = monitor.get_any("/api/v1/subscriptions/s/conflicts")?;
    ensure!(answer.status == 409 && answer.body.contains("postgres"), "{answer:?}");
    has_none(&everything(&pair, monitor)?)
}

/// One that leaked is not good until somebody can restart the node.
#[test]
fn a_token_that_is_replaced_is_asked_for() -> Result<()> {
    const OTHER: &str = "geheim4711-another-token";
    let mut site = Site::new()?;
    let token = site.directory().join("token");
    std::fs::write(&token, TOKEN)?;
    site.add_to_site("monitor = \"127.0.0.1:0\"\nmonitor_token = \"token\"\n")?;
    site.add("[publication.p]\nsource = \"postgres://a@127.0.0.1:1/d\"\ntables = ['public.t']\n")?;
    site.start()?;
    let before = Monitor { token: Some(TOKEN), ..Monitor::of(&site)? };
    let after = Monitor { token: Some(OTHER), ..before };
    ensure!(before.get_any("/metrics")?.status == 200 && after.get_any("/metrics")?.status == 401);
    std::fs::write(&token, OTHER)?;
    wait_until("the other token to be asked for", SOON, &[&site.log_path()], || {
        Ok((after.get_any("/metrics")?.status == 200).then_some(()))
    })?;
    ensure!(before.get_any("/metrics")?.status == 401, "the one from before is good still");
    ensure!(!site.log().contains(SECRET), "{}", site.log());
    site.stop().map(drop)
}
