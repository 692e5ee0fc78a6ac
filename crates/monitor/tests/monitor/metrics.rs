//! The metrics keep to Prometheus' text format and conventions, and are documented.

use crate::site::{Fake, get, start};
use anyhow::{Context, Result, bail, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

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
