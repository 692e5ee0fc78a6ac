//! What the tables of wrong inputs are made of.

use anyhow::{Context, Result, ensure};
use farshore_tests::{DATABASE, Direction, Pair, Verb};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(30);

pub const SCHEMA: &str = "CREATE TABLE t (id integer PRIMARY KEY, code text UNIQUE, v text); \
    CREATE TABLE u (id integer PRIMARY KEY)";
pub const ROWS: &str = "INSERT INTO t SELECT i, 'c' || i, 'v' FROM generate_series(1, 100) AS i";

/// What becomes of the agent that meets the wrong input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// It stops, and goes on when the node is started again.
    Stops,
    /// It tries again by itself, and goes on as soon as the input is right.
    Retries,
}

/// The agent says, in the same words, what the check finds.
pub const AS_CHECKED: &str = "";

/// What an agent says that stops for what the check has found.
fn said_by_gate(check: &[&str]) -> String {
    let first: Vec<String> =
        check.iter().take(3).map(|found| found.replacen(" → ", ". ", 1)).collect();
    let more = match check.len() {
        0..=3 => String::new(),
        count => format!(" — and {} more: `farshore check` lists them all", count - 3),
    };
    first.join(" — ") + &more
}

pub type Step = fn(&mut Pair) -> Result<()>;

/// One wrong input.
pub struct Case {
    pub name: &'static str,
    /// Makes the input wrong.
    pub spoil: Step,
    /// What `farshore check` finds wrong: all of it.
    pub check: &'static [&'static str],
    /// What the agent says that cannot work; [`AS_CHECKED`] where it says what the check says.
    pub run: &'static str,
    pub then: Then,
    /// Makes the input right.
    pub mend: Step,
}

pub fn pair() -> Result<Pair> {
    let pair = Pair::new(Direction::UP, &["public.*"], SCHEMA)?;
    pair.publish(ROWS)?;
    Ok(pair)
}

/// Replaces what differs from run to run.
pub fn normal(pair: &Pair, text: &str) -> String {
    let mut text = text.to_owned();
    for (cluster, name) in [(&pair.publisher, "PUBLISHER"), (&pair.subscriber, "SUBSCRIBER")] {
        let port = cluster.port();
        for user in ["postgres", "plain"] {
            text = text.replace(&format!("postgres://{user}@127.0.0.1:{port}/{DATABASE}"), name);
        }
        text = text.replace(&format!("127.0.0.1:{port}"), &format!("{name}_ADDRESS"));
    }
    text = text.replace(&pair.site.directory().display().to_string(), "DIRECTORY");
    let words: Vec<&str> = text.split(' ').collect();
    let before = [""].into_iter().chain(words.iter().copied());
    let words: Vec<String> =
        before.zip(&words).map(|(before, word)| normal_word(before, word)).collect();
    words.join(" ")
}

/// Log positions, process ids and system identifiers; punctuation around them stays.
fn normal_word(before: &str, word: &str) -> String {
    let is_edge = |c: char| !c.is_ascii_alphanumeric();
    let start = word.find(|c| !is_edge(c)).unwrap_or(word.len());
    let end = word.rfind(|c| !is_edge(c)).map_or(start, |at| at + 1);
    let core = &word[start..end];
    let is_hex = |part: &str| {
        !part.is_empty() && part.chars().all(|c| c.is_ascii_digit() || ('A'..='F').contains(&c))
    };
    let is_position = core.split_once('/').is_some_and(|(high, low)| is_hex(high) && is_hex(low));
    let is_number = core.chars().all(|c| c.is_ascii_digit());
    let is_made_of = |signs: &str| core.chars().all(|c| c.is_ascii_digit() || signs.contains(c));
    let name = match core {
        _ if is_made_of("-") && core.len() == 10 => "DATE",
        _ if is_made_of(":.+") && core.ends_with("+00") => "TIME",
        _ if is_position => "LSN",
        _ if is_number && core.len() >= 16 => "SYSTEM",
        _ if is_number && before.ends_with("pid") => "PID",
        core => core,
    };
    format!("{}{name}{}", &word[..start], &word[end..])
}

fn is_showing() -> bool {
    std::env::var_os("FARSHORE_SHOW_MESSAGES").is_some()
}

/// Word by word, but that `…` stands for any text.
fn matches(said: &str, wanted: &str) -> bool {
    let mut parts = wanted.split('…');
    let Some(mut rest) = parts.next().and_then(|first| said.strip_prefix(first)) else {
        return false;
    };
    let mut parts = parts.peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.is_empty()
}

pub fn compare(what: &str, said: &[String], wanted: &[&str]) -> Result<()> {
    if is_showing() {
        println!("--- {what}\n{}", said.join("\n"));
        return Ok(());
    }
    let is_as_wanted = said.len() == wanted.len()
        && said.iter().zip(wanted).all(|(said, wanted)| matches(said, wanted));
    ensure!(is_as_wanted, "{what}\nsaid:\n{}\nnot:\n{}", said.join("\n"), wanted.join("\n"));
    Ok(())
}

/// Findings of one severity, as `farshore check --json` prints them.
pub fn said(check: &Verb, severity: &str) -> Result<Vec<String>> {
    let findings: Vec<serde_json::Value> = check
        .stdout
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()
        .with_context(|| format!("{check:?}"))?;
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    Ok(findings
        .iter()
        .filter(|finding| finding["severity"] == severity)
        .map(|finding| {
            let remedy = text(&finding["remedy"]);
            format!("{}: {} → {remedy}", text(&finding["object"]), text(&finding["what"]))
        })
        .collect())
}

/// What `farshore check` finds wrong, with remedies; its exit code must agree.
pub fn findings(pair: &Pair) -> Result<Vec<String>> {
    let check = pair.site.verb("check", &["--json"])?;
    let errors: Vec<String> =
        said(&check, "error")?.iter().map(|text| normal(pair, text)).collect();
    let wanted = if errors.is_empty() { Some(0) } else { Some(1) };
    ensure!(check.code == wanted, "exit code of check: {check:?}");
    let readable = pair.site.verb("check", &[])?;
    let lines = readable.stdout.lines().filter(|line| line.starts_with("ERROR")).count();
    ensure!(lines == errors.len() && readable.code == wanted, "{readable:?}");
    Ok(errors)
}

/// Waits until an agent is in trouble; returns its state and what it says.
fn await_trouble(pair: &Pair) -> Result<(String, String)> {
    let log = pair.site.log_tail();
    farshore_testkit::wait::wait_until(&format!("trouble in the status{log}"), SOON, &[], || {
        let status = pair.site.status()?;
        let agents = ["publications", "subscriptions"]
            .into_iter()
            .filter_map(|kind| status[kind].as_array())
            .flatten();
        let mut troubled = agents.filter(|agent| agent["error"].is_string());
        let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        Ok(troubled.next().map(|agent| (text(&agent["state"]), text(&agent["error"]))))
    })
}

/// Resumes what has stopped, and waits until nothing is.
fn go_on(pair: &Pair) -> Result<()> {
    let stopped = |kind: &str| -> Result<Vec<String>> {
        let status = pair.site.status()?;
        let agents = status[kind].as_array().into_iter().flatten();
        let stopped = agents.filter(|agent| agent["state"] == "stopped");
        Ok(stopped.filter_map(|agent| Some(agent["name"].as_str()?.to_owned())).collect())
    };
    for (kind, option) in [("publications", "--publication"), ("subscriptions", "--subscription")] {
        for name in stopped(kind)? {
            let resumed = pair.site.verb("resume", &[option, &name])?;
            ensure!(resumed.code == Some(0), "{resumed:?}");
        }
        farshore_testkit::wait::wait_until("work to go on", SOON, &[], || {
            let status = pair.site.status()?;
            let mut agents = status[kind].as_array().into_iter().flatten();
            let goes = |agent: &serde_json::Value| {
                matches!(agent["state"].as_str(), Some("streaming" | "copying" | "catching-up"))
                    && agent["error"].is_null()
            };
            Ok(agents.all(goes).then_some(()))
        })?;
    }
    Ok(())
}

/// The trouble is there, is said, and ends when the input is mended.
pub fn meet_trouble(pair: &mut Pair, case: &Case) -> Result<()> {
    let (state, said) = await_trouble(pair)?;
    let as_checked = said_by_gate(case.check);
    let wanted = if case.run == AS_CHECKED { &as_checked } else { case.run };
    let compared = compare("run", &[normal(pair, &said)], &[wanted]);
    let is_stopped = state == "stopped";
    ensure!(is_showing() || is_stopped == (case.then == Then::Stops), "state {state}: {said}");
    let status = pair.site.verb("status", &[])?;
    ensure!(status.code == Some(1), "exit code of status: {status:?}");
    ensure!(status.stdout.contains(&said), "{status:?}");
    // What is corrected in the site file needs a node that reads it.
    if is_stopped && said.contains("go on (farshore resume)") && !said.contains("Correct") {
        (case.mend)(pair).context("mend")?;
        go_on(pair).with_context(|| said.clone())?;
        // The log has the trouble.
        pair.site.restart()?;
    } else if is_stopped {
        pair.site.stop()?;
        (case.mend)(pair).context("mend")?;
        pair.site.start()?;
    } else {
        (case.mend)(pair).context("mend")?;
    }
    pair.publish("INSERT INTO t VALUES (1000, 'after', 'x'); UPDATE t SET v = 'y' WHERE id < 9")?;
    let (source, target) = (pair.publisher.url(DATABASE), pair.subscriber.url(DATABASE));
    pair.await_arrival()?;
    let tables = farshore_testkit::checksum::tables_in_schema(&source, "public")?;
    farshore_testkit::checksum::assert_equal(&source, &target, &tables)?;
    let status = pair.site.verb("status", &[])?;
    ensure!(status.code == Some(0), "exit code of status when all is well: {status:?}");
    pair.site.stop()?;
    let status = pair.site.verb("status", &[])?;
    ensure!(status.code == Some(3), "exit code of status after the stop: {status:?}");
    compared
}

/// Input that is wrong before the node starts.
pub fn start_with(case: &Case, mut pair: Pair) -> Result<()> {
    (case.spoil)(&mut pair).context("spoil")?;
    // A check that misses something must not hide what the node does about it.
    let checked = compare("check", &findings(&pair)?, case.check);
    pair.site.start()?;
    meet_trouble(&mut pair, case)?;
    checked?;
    compare("check afterwards", &findings(&pair)?, &[])
}

/// Input that turns wrong while the node runs.
pub fn turn_into(case: &Case, mut pair: Pair) -> Result<()> {
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    (case.spoil)(&mut pair).context("spoil")?;
    meet_trouble(&mut pair, case)
}

/// Connects to one of the servers as a role without rights.
pub fn as_plain(pair: &mut Pair, publisher: bool) -> Result<()> {
    let cluster = if publisher { &pair.publisher } else { &pair.subscriber };
    let url = cluster.url(DATABASE);
    pair.site.replace(&url, &url.replace("postgres@", "plain@"))
}

/// Runs a table of cases, and tells of all that fail.
pub fn run_all(cases: &[Case], run: fn(&Case, Pair) -> Result<()>) -> Result<()> {
    let mut failed = Vec::new();
    for case in cases {
        if let Err(error) = pair().and_then(|pair| run(case, pair)) {
            failed.push(format!("{}: {error:#}", case.name));
        }
    }
    ensure!(
        failed.is_empty(),
        "{} of {} failed:\n\n{}",
        failed.len(),
        cases.len(),
        failed.join("\n\n")
    );
    Ok(())
}
