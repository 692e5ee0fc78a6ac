use crate::status::EXIT_NOT_RUNNING;
use crate::{load, output, runtime};
use farshore_node::control::{Asked, Request, WHO_MAY_ASK, ask, cannot_ask};
use farshore_node::report::{TracerArrival, TracerReport};
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

/// Posts a tracer token and shows its way. The exit status says whether it has arrived everywhere.
pub fn tracer(site: &Path, publication: &str, seconds: u64, json: bool) -> ExitCode {
    let config = match load(site) {
        Ok(config) => config,
        Err(code) => return code,
    };
    let fail = |why: &str| {
        eprintln!("farshore: {why}");
        ExitCode::FAILURE
    };
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("cannot start: {error}")),
    };
    let request = Request::Tracer { publication: publication.to_owned(), seconds };
    let text = match runtime.block_on(ask(&config.data_dir, &request, |_| Ok(()))) {
        Ok(Asked::Done(text)) => text,
        Ok(Asked::Refused(why)) => return fail(&why),
        Ok(Asked::NotRunning) => {
            fail("no node runs here, so nothing would carry a token: start it (farshore run)");
            return ExitCode::from(EXIT_NOT_RUNNING);
        }
        Err(error) => return fail(&cannot_ask(&config.data_dir, &error, WHO_MAY_ASK)),
    };
    let report: TracerReport = match serde_json::from_str(&text) {
        Ok(report) => report,
        Err(error) => return fail(&format!("the node's answer cannot be read: {error}")),
    };
    let printed = output::print(&if json { text + "\n" } else { render(&report, seconds) });
    let arrived = if report.is_complete() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    printed.or_failure(arrived)
}

/// A table: a row for each way to the end, a column for each leg, and the total.
fn render(report: &TracerReport, seconds: u64) -> String {
    let mut out = String::new();
    let position = report.position.as_deref().unwrap_or("not seen");
    let _ = writeln!(out, "tracer of publication {}, at {position}", report.publication);
    let (Some(received), Some(durable)) = (report.received_ms, report.durable_ms) else {
        let leg = if report.received_ms.is_some() { "in the store" } else { "out of the log" };
        let _ = writeln!(
            out,
            "committed after {}, and not {leg} within {seconds} s: see farshore status",
            milliseconds(report.committed_ms)
        );
        return out;
    };
    let ways = report.subscriptions.iter().map(|a| ("subscription", a));
    let ways: Vec<_> = ways.chain(report.downstreams.iter().map(|a| ("site", a))).collect();
    let name = |(kind, arrival): &(&str, &TracerArrival)| format!("{kind} {}", arrival.name);
    let width = ways.iter().map(|way| name(way).chars().count()).max().unwrap_or(0).max(5);
    let _ = writeln!(
        out,
        "{:width$}  {:>10}  {:>10}  {:>10}  {:>10}  {:>10}",
        "", "capture", "store", "link", "apply", "total"
    );
    let (capture, store) = (milliseconds(received), milliseconds(durable - received));
    if ways.is_empty() {
        let total = milliseconds(durable);
        let _ = writeln!(
            out,
            "{:width$}  {capture:>10}  {store:>10}  {:>10}  {:>10}  {total:>10}",
            "store", "", ""
        );
    }
    for way in &ways {
        let (kind, arrival) = way;
        let _ = write!(out, "{:width$}  {capture:>10}  {store:>10}  ", name(way));
        let _ = match (arrival.arrived_ms, *kind) {
            (Some(total), kind) => {
                let leg = milliseconds((total - durable).max(0.0));
                let (link, apply) =
                    if kind == "site" { (leg, "".into()) } else { ("".into(), leg) };
                writeln!(out, "{link:>10}  {apply:>10}  {:>10}", milliseconds(total))
            }
            (None, _) => {
                let state = arrival.state.as_deref().unwrap_or("unknown");
                writeln!(out, "not within {seconds} s ({state})")
            }
        };
    }
    out
}

fn milliseconds(value: f64) -> String {
    if value < 1_000.0 { format!("{value:.1} ms") } else { format!("{:.2} s", value / 1_000.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_that_is_not_at_its_end_says_why() {
        let arrival = |name: &str, arrived_ms, state: Option<&str>| TracerArrival {
            name: name.to_owned(),
            arrived_ms,
            state: state.map(str::to_owned),
        };
        let mut report = TracerReport {
            publication: "sales".to_owned(),
            position: Some("0/1A".to_owned()),
            received_ms: Some(1.0),
            durable_ms: Some(3.5),
            subscriptions: vec![
                arrival("reporting", Some(10.0), None),
                arrival("asleep", None, Some("paused")),
            ],
            downstreams: vec![arrival("dublin", Some(80.0), None)],
            ..TracerReport::default()
        };
        let text = render(&report, 30);
        let line = |name: &str| text.lines().find(|line| line.contains(name)).unwrap_or_default();
        let words = |name: &str| line(name).split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(words("reporting"), "subscription reporting 1.0 ms 2.5 ms 6.5 ms 10.0 ms");
        assert_eq!(words("dublin"), "site dublin 1.0 ms 2.5 ms 76.5 ms 80.0 ms");
        assert!(line("asleep").ends_with("not within 30 s (paused)"), "{text}");
        assert!(!report.is_complete());
        report.subscriptions.pop();
        assert!(report.is_complete());
        report.durable_ms = None;
        assert!(render(&report, 30).contains("not in the store within 30 s"));
    }
}
