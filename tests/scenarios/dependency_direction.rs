//! The crates of this workspace depend on each other in one direction only. The table here is the
//! architecture; `cargo metadata` tells what the code does.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// Every crate of the workspace, users first, and the crates of the workspace that it may use.
/// What is not here is forbidden; a crate may use fewer. Each line names only crates below it, so
/// there can be no cycle.
const ALLOWED: &[(&str, &[&str])] = &[
    ("farshore-tests", &["farshore-testkit"]),
    ("farshore-bench", &["farshore-testkit"]),
    // The demo starts throwaway servers with the test kit.
    (
        "farshore-cli",
        &["farshore-node", "farshore-commission", "farshore-fault", "farshore-testkit"],
    ),
    // The only crate that knows the site file, and the only one that sees all agents.
    (
        "farshore-node",
        &[
            "farshore-apply",
            "farshore-capture",
            "farshore-mirror",
            "farshore-store",
            "farshore-link",
            "farshore-monitor",
            "farshore-pg",
            "farshore-model",
            "farshore-fault",
        ],
    ),
    // Shows plain status values: it knows neither agents nor servers.
    ("farshore-monitor", &["farshore-model"]),
    // Carries the log as it is: it knows servers and links, and no store of changes.
    (
        "farshore-mirror",
        &["farshore-link", "farshore-pg", "farshore-wire", "farshore-model", "farshore-fault"],
    ),
    // The initial copy reads capture's snapshots.
    (
        "farshore-apply",
        &[
            "farshore-capture",
            "farshore-store",
            "farshore-pg",
            "farshore-wire",
            "farshore-model",
            "farshore-fault",
        ],
    ),
    (
        "farshore-capture",
        &["farshore-store", "farshore-pg", "farshore-wire", "farshore-model", "farshore-fault"],
    ),
    // Measures servers and disks by itself: it knows nothing of replication.
    ("farshore-commission", &["farshore-pg", "farshore-model"]),
    // A store never looks inside a payload: it knows neither servers nor their messages.
    ("farshore-store", &["farshore-model", "farshore-fault"]),
    // A link never decodes a change: it carries opaque messages, whoever sends them.
    ("farshore-link", &[]),
    ("farshore-pg", &["farshore-wire", "farshore-model", "farshore-fault"]),
    ("farshore-wire", &["farshore-model"]),
    ("farshore-model", &[]),
    ("farshore-fault", &[]),
    // Stands beside the product and never inside it: what it proves, it proves independently.
    ("farshore-testkit", &[]),
];

/// Tests of any crate may use the test kit.
const ALLOWED_IN_TESTS: &str = "farshore-testkit";

/// Crates of other people that only some of ours may use: the name, and who may.
const OUTSIDERS: &[(&str, &[&str])] = &[
    ("toml", &["farshore-node"]),
    ("clap", &["farshore-cli", "farshore-bench"]),
    ("zstd", &["farshore-store", "farshore-capture", "farshore-mirror", "farshore-bench"]),
    // The only crate that knows HTTP.
    ("axum", &["farshore-monitor"]),
    ("hyper", &["farshore-monitor"]),
    // Of mirrors the server that standbys connect to.
    ("rustls", &["farshore-pg", "farshore-link", "farshore-mirror", "farshore-monitor"]),
    ("rcgen", &["farshore-link"]),
    // Another client than ours: it belongs to what checks ours.
    ("postgres", &["farshore-testkit", "farshore-tests", "farshore-bench", "farshore-cli"]),
    // Pure crates do no input or output.
    (
        "tokio",
        &[
            "farshore-pg",
            "farshore-link",
            "farshore-mirror",
            "farshore-store",
            "farshore-capture",
            "farshore-apply",
            "farshore-node",
            "farshore-monitor",
            "farshore-commission",
            "farshore-cli",
        ],
    ),
];

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Edge {
    from: String,
    to: String,
    for_tests: bool,
}

/// Members of the workspace, and what their manifests name.
fn workspace() -> Result<(BTreeSet<String>, BTreeSet<Edge>)> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .context("run cargo metadata")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let (mut members, mut edges) = (BTreeSet::new(), BTreeSet::new());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    for package in metadata["packages"].as_array().context("packages")? {
        let from = text(&package["name"]);
        for dependency in package["dependencies"].as_array().context("dependencies")? {
            let (to, kind) = (text(&dependency["name"]), text(&dependency["kind"]));
            edges.insert(Edge { from: from.clone(), to, for_tests: kind == "dev" });
        }
        members.insert(from);
    }
    Ok((members, edges))
}

/// Edges that the tables do not allow, in words.
fn violations(
    members: &BTreeSet<String>,
    edges: &BTreeSet<Edge>,
    allowed: &BTreeMap<&str, &[&str]>,
) -> Vec<String> {
    let outsiders: BTreeMap<&str, &[&str]> = OUTSIDERS.iter().copied().collect();
    let mut found = Vec::new();
    for Edge { from, to, for_tests } in edges {
        let is_allowed = if members.contains(to) {
            // A crate's own tests may switch its features on.
            let in_tests = *for_tests && (to == ALLOWED_IN_TESTS || to == from);
            in_tests
                || allowed.get(from.as_str()).is_some_and(|to_all| to_all.contains(&to.as_str()))
        } else {
            *for_tests
                || outsiders.get(to.as_str()).is_none_or(|users| users.contains(&from.as_str()))
        };
        if !is_allowed {
            let how = if *for_tests { "tests of " } else { "" };
            found.push(format!("{how}{from} must not depend on {to}"));
        }
    }
    found
}

#[test]
fn crates_depend_one_way() -> Result<()> {
    let (members, edges) = workspace()?;
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    let listed: BTreeSet<String> = allowed.keys().map(|name| (*name).to_owned()).collect();
    ensure!(
        members == listed,
        "the table of crates is out of date: not in it {:?}, not in the workspace {:?}",
        members.difference(&listed).collect::<Vec<_>>(),
        listed.difference(&members).collect::<Vec<_>>()
    );
    let found = violations(&members, &edges, &allowed);
    ensure!(found.is_empty(), "{}", found.join("\n"));
    Ok(())
}

#[test]
fn the_table_itself_has_one_direction() {
    for (at, (name, users)) in ALLOWED.iter().enumerate() {
        for used in *users {
            let below = ALLOWED[at + 1..].iter().any(|(other, _)| other == used);
            assert!(below, "{name} uses {used}, which is not listed below it");
        }
    }
}

#[test]
fn a_forbidden_edge_is_found() {
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.iter().copied().collect();
    let members: BTreeSet<String> = allowed.keys().map(|name| (*name).to_owned()).collect();
    let edge =
        |from: &str, to: &str, for_tests| Edge { from: from.into(), to: to.into(), for_tests };
    for (from, to, for_tests, is_allowed) in [
        ("farshore-store", "farshore-wire", false, false),
        ("farshore-store", "farshore-pg", true, false),
        ("farshore-link", "farshore-store", false, false),
        ("farshore-link", "farshore-model", false, false),
        ("farshore-node", "farshore-link", false, true),
        ("farshore-node", "farshore-mirror", false, true),
        ("farshore-mirror", "farshore-link", false, true),
        ("farshore-mirror", "farshore-store", false, false),
        ("farshore-link", "farshore-mirror", false, false),
        ("farshore-wire", "farshore-pg", false, false),
        ("farshore-cli", "farshore-commission", false, true),
        ("farshore-commission", "farshore-store", false, false),
        ("farshore-testkit", "farshore-model", false, false),
        ("farshore-node", "farshore-cli", false, false),
        ("farshore-apply", "toml", false, false),
        ("farshore-wire", "tokio", false, false),
        ("farshore-pg", "farshore-testkit", true, true),
        ("farshore-pg", "farshore-testkit", false, false),
        ("farshore-apply", "farshore-capture", false, true),
        ("farshore-capture", "farshore-apply", false, false),
    ] {
        let found = violations(&members, &BTreeSet::from([edge(from, to, for_tests)]), &allowed);
        assert_eq!(found.is_empty(), is_allowed, "{from} → {to}, for tests: {for_tests}");
    }
}
