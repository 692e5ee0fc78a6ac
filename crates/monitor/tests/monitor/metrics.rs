//! The metrics keep to Prometheus' text format and conventions, and are documented.

use crate::site::{Fake, cache, get, start};
use anyhow::{Context, Result, bail, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A sample: its family's name, its labels, its value.
#[derive(Debug, PartialEq)]
struct Sample {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

fn is_name(text: &str) -> bool {
    let mut characters = text.chars();
    characters.next().is_some_and(|c| c.is_ascii_lowercase())
        && characters.all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// Reads `name{label="value",…} value` strictly.
fn sample(line: &str) -> Result<Sample> {
    let end = line.find(['{', ' ']).context("no value")?;
    let (name, mut rest) = line.split_at(end);
    ensure!(is_name(name), "{name} is no name");
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            let (label, more) = rest.split_once("=\"").context("no label")?;
            ensure!(is_name(label) && !label.starts_with("__"), "{label} is no label");
            let mut value = String::new();
            let mut characters = more.char_indices();
            let end = loop {
                match characters.next().context("a label's value does not end")? {
                    (at, '"') => break at,
                    (_, '\\') => match characters.next() {
                        Some((_, '\\')) => value.push('\\'),
                        Some((_, '"')) => value.push('"'),
                        Some((_, 'n')) => value.push('\n'),
                        other => bail!("\\{other:?} is no escape"),
                    },
                    (_, other) => value.push(other),
                }
            };
            ensure!(labels.insert(label.to_owned(), value).is_none(), "{label} twice");
            rest = &more[end + 1..];
            match rest.strip_prefix(',') {
                Some(more) => rest = more,
                None => break,
            }
        }
        rest = rest.strip_prefix('}').context("labels do not end")?;
    }
    let value = rest.strip_prefix(' ').context("no space before the value")?;
    Ok(Sample { name: name.to_owned(), labels, value: value.parse()? })
}

/// Families, with their types and samples.
fn families(text: &str) -> Result<BTreeMap<String, (String, Vec<Sample>)>> {
    ensure!(text.ends_with('\n'), "the last line does not end");
    let mut families: BTreeMap<String, (String, Vec<Sample>)> = BTreeMap::new();
    let (mut helped, mut current) = (None, None);
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').context("HELP says nothing")?;
            ensure!(help.ends_with('.') && is_name(name), "{line}");
            helped = Some(name.to_owned());
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').context("TYPE says nothing")?;
            ensure!(helped.as_deref() == Some(name), "{name} has no HELP before its TYPE");
            ensure!(["gauge", "counter"].contains(&kind), "{line}");
            ensure!((kind == "counter") == name.ends_with("_total"), "{name} is a {kind}");
            let new = families.insert(name.to_owned(), (kind.to_owned(), Vec::new())).is_none();
            ensure!(new, "{name} comes twice");
            current = Some(name.to_owned());
        } else {
            let sample = sample(line).with_context(|| line.to_owned())?;
            ensure!(current.as_ref() == Some(&sample.name), "{line} outside its family");
            let (kind, samples) = families.get_mut(&sample.name).context("no family")?;
            ensure!(sample.value.is_finite() && (kind == "gauge" || sample.value >= 0.0), "{line}");
            let twice = samples.iter().any(|other| other.labels == sample.labels);
            ensure!(!twice, "{line}: the same series twice");
            samples.push(sample);
        }
    }
    Ok(families)
}

#[tokio::test]
async fn metrics_are_well_formed_and_documented() -> Result<()> {
    let monitor = start(Fake::full()).await?;
    let answer = get(&monitor, "/metrics").await?;
    ensure!(answer.header("content-type") == Some("text/plain; version=0.0.4; charset=utf-8"));
    let families = families(&answer.body)?;
    for (name, (_, samples)) in &families {
        for unit in ["_ms", "_kb", "_mb", "_minutes", "_percent", "_micros"] {
            ensure!(!name.contains(unit), "{name} is not in base units");
        }
        for label in samples.iter().flat_map(|sample| sample.labels.keys()) {
            let known =
                ["site", "version", "publication", "subscription", "mirror", "end", "kind", "name"];
            ensure!(known.contains(&label.as_str()), "{name}: label {label} may be unbounded");
        }
    }
    let behind = &families["farshore_subscription_behind_bytes"].1[0];
    ensure!(behind.value == 17.0 && behind.labels["publication"] == "dublin/sales", "{behind:?}");
    let latency = &families["farshore_subscription_latency_seconds"].1[0];
    ensure!(latency.value == 0.001_5, "{latency:?}");
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
    let docs = std::fs::read_to_string(docs)?;
    let documented: BTreeSet<&str> =
        docs.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let served: BTreeSet<&str> = families.keys().map(String::as_str).collect();
    let difference: Vec<_> = documented.symmetric_difference(&served).collect();
    ensure!(difference.is_empty(), "served and documented differ in {difference:?}");
    Ok(())
}

#[tokio::test]
async fn a_hostile_name_stays_in_its_label() -> Result<()> {
    let name = "a\"} 1\n# HELP b\\";
    let source = Fake::full();
    source.set(|report| report.subscriptions[0].name = name.to_owned());
    let monitor = start(source).await?;
    let families = families(&get(&monitor, "/metrics").await?.body)?;
    let sample = &families["farshore_subscription_up"].1[0];
    ensure!(sample.labels["subscription"] == name, "{sample:?}");
    Ok(())
}

/// Names of our metrics that a text mentions.
fn mentioned(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_lowercase() || c == '_';
    let words = text.split(|c: char| !is_part(c));
    words.filter(|word| word.starts_with("farshore_")).map(str::to_owned).collect()
}

#[tokio::test]
async fn dashboard_and_alerts_use_metrics_that_exist() -> Result<()> {
    let monitor = start(Fake::full()).await?;
    let families = families(&get(&monitor, "/metrics").await?.body)?;
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/monitoring");
    for file in ["grafana.json", "alerts.yml"] {
        let text = std::fs::read_to_string(folder.join(file))?;
        let mentioned = mentioned(&text);
        ensure!(mentioned.len() >= 5, "{file} mentions only {mentioned:?}");
        for name in mentioned {
            ensure!(families.contains_key(&name), "{file}: there is no {name}");
        }
    }
    let dashboard = std::fs::read_to_string(folder.join("grafana.json"))?;
    serde_json::from_str::<serde_json::Value>(&dashboard)?;
    Ok(())
}

/// Prometheus' own check, from scripts/setup or the search path; none with the reason told.
fn promtool(test: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places = vec![cache().join("promtool")];
    places.extend(std::env::split_paths(&path).map(|folder| folder.join("promtool")));
    let found = places.into_iter().find(|place| place.is_file());
    if found.is_none() {
        println!("skipped: {test}: there is no promtool (scripts/setup --promtool)");
    }
    found
}

/// Lets promtool check a text on its standard input.
fn checked_by(promtool: &Path, what: &str, text: &str) -> Result<()> {
    let mut tool = Command::new(promtool)
        .args(["check", what])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    tool.stdin.take().context("no standard input")?.write_all(text.as_bytes())?;
    let output = tool.wait_with_output()?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    ensure!(output.status.success(), "promtool check {what}: {said}");
    Ok(())
}

#[tokio::test]
async fn prometheus_itself_takes_the_metrics() -> Result<()> {
    let Some(promtool) = promtool("prometheus_itself_takes_the_metrics") else { return Ok(()) };
    let monitor = start(Fake::full()).await?;
    let metrics = get(&monitor, "/metrics").await?.body;
    checked_by(&promtool, "metrics", &metrics)?;
    let without_help = "a_total 1\n";
    ensure!(checked_by(&promtool, "metrics", without_help).is_err(), "promtool takes anything");
    Ok(())
}

/// Every expression of the dashboard.
fn expressions(value: &serde_json::Value, found: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                match value.as_str().filter(|_| name == "expr") {
                    Some(expression) => found.push(expression.to_owned()),
                    None => expressions(value, found),
                }
            }
        }
        serde_json::Value::Array(values) => {
            values.iter().for_each(|value| expressions(value, found));
        }
        _ => {}
    }
}

#[test]
fn prometheus_itself_takes_alerts_and_dashboard() -> Result<()> {
    let test = "prometheus_itself_takes_alerts_and_dashboard";
    let Some(promtool) = promtool(test) else { return Ok(()) };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/monitoring");
    let check = |text: &str| -> Result<()> {
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), text)?;
        let output = Command::new(&promtool).args(["check", "rules"]).arg(file.path()).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "promtool check rules: {said}");
        Ok(())
    };
    check(&std::fs::read_to_string(folder.join("alerts.yml"))?)?;
    let dashboard = std::fs::read_to_string(folder.join("grafana.json"))?;
    let mut found = Vec::new();
    expressions(&serde_json::from_str(&dashboard)?, &mut found);
    ensure!(found.len() >= 15, "only {} expressions", found.len());
    // As rules: that is how promtool parses expressions.
    let mut rules = "groups:\n  - name: dashboard\n    rules:\n".to_owned();
    for (nth, expression) in found.iter().enumerate() {
        let expression = serde_json::to_string(expression)?;
        rules.push_str(&format!("      - record: panel:{nth}\n        expr: {expression}\n"));
    }
    check(&rules)?;
    ensure!(check(&rules.replace("rate(", "rate)")).is_err(), "promtool takes anything");
    Ok(())
}
