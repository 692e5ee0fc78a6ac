//! The report: one HTML file with everything in it, and the JSON lines beside it.

mod chart;

use crate::measurement::{Measurement, NATIVE};
use anyhow::{Context, Result};
use chart::{Bar, Part};
use serde_json::Value;
use std::fmt::Write as _;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Processes whose CPU time is told, and how each is drawn.
const PROCESSES: [(&str, &str); 5] = [
    ("publisher", "publisher"),
    ("farshore", "farshore"),
    ("farshore_near", "farshore"),
    ("farshore_far", "farshore"),
    ("subscriber", "subscriber"),
];

const STYLE: &str = include_str!("page/style.css");

/// Writes `bench.html` and `bench.jsonl` into a folder, which is made if need be.
///
/// # Errors
/// When a file cannot be written.
pub fn write(folder: &Path, measured: &[Measurement], failed: &[(String, String)]) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let mut lines = String::new();
    for measurement in measured {
        lines.push_str(&serde_json::to_string(measurement).context("write JSON")?);
        lines.push('\n');
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    for (name, text) in
        [("bench.jsonl", lines), ("bench.html", render(measured, failed, &utc(now)))]
    {
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

/// The page, of what was measured and what failed.
fn render(measured: &[Measurement], failed: &[(String, String)], when: &str) -> String {
    let mut body = String::new();
    let _ = write!(
        body,
        "<header><h1>Farshore beside native logical replication</h1><p>{} · {}</p></header>",
        escape(&machine(measured)),
        escape(when)
    );
    for (case, error) in failed {
        let _ = write!(
            body,
            "<section class=\"failed\"><h2>{} failed</h2><pre>{}</pre></section>",
            escape(case),
            escape(error)
        );
    }
    if !measured.is_empty() {
        body.push_str(&overview(measured));
    }
    for measurement in measured {
        body.push_str(&details(measurement));
    }
    body.push_str(
        "<footer>Medians of runs taken in turn; whiskers span the smallest and the largest run. \
         Each run ended with a proof by checksum that both targets equal the publisher. \
         Farshore's time in drain and fanout includes the start of its process.</footer>",
    );
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>Farshore benchmarks</title><style>{STYLE}</style></head>\
         <body><main>{body}</main></body></html>\n"
    )
}

fn machine(measured: &[Measurement]) -> String {
    let Some(first) = measured.first() else { return "nothing measured".to_owned() };
    let setting = |name| first.settings.get(name).map(plain).unwrap_or_default();
    format!(
        "PostgreSQL {} on both sides · {} cores · scale {} · {} run{} per case",
        setting("postgres"),
        setting("cores"),
        setting("scale"),
        first.runs,
        if first.runs == 1 { "" } else { "s" }
    )
}

/// Scenario, case, and the metric where it is not simply the time it took.
fn title(m: &Measurement) -> String {
    match m.metric {
        "seconds" => format!("{}/{}", m.scenario, m.case),
        metric => format!("{}/{} {metric}", m.scenario, m.case),
    }
}

/// What the bars of a metric show, and their unit.
fn meaning(metric: &str) -> (&str, &str) {
    match metric {
        "seconds" => ("Seconds from a stopped backlog to equal", "s"),
        "publisher_cpu_s" => ("CPU seconds of the publisher from a stopped backlog to equal", "s"),
        "mix_seconds" => ("Seconds from a stopped backlog over 59 tables to equal", "s"),
        "wire_mb" => ("Megabytes over the line until equal", "MB"),
        "mix_wire_mb" => ("Megabytes over the line until equal, 59 tables", "MB"),
        "seconds_per_gb" => ("Seconds to copy a gigabyte", "s"),
        "p50_ms" => ("Milliseconds from commit to visible: half of all take no longer", "ms"),
        "p99_ms" => ("Milliseconds from commit to visible: 99 of 100 take no longer", "ms"),
        "max_ms" => ("Milliseconds from commit to visible: the longest", "ms"),
        other => (other, ""),
    }
}

/// How many times as good, case by case, around the line where both are equal.
fn overview(measured: &[Measurement]) -> String {
    let ratios: Vec<(String, f64)> = measured.iter().map(|m| (title(m), m.advantage)).collect();
    format!(
        "<section><h2>Times better than native</h2>{}\
         <p class=\"note\">Logarithmic; to the left of the line Farshore is worse.</p></section>",
        chart::ratios(&ratios)
    )
}

fn details(m: &Measurement) -> String {
    let (heading, unit) = meaning(m.metric);
    let values: Vec<Bar> =
        [("farshore", Some(m.farshore)), (NATIVE, m.others.get(NATIVE).copied())]
            .into_iter()
            .filter_map(|(name, value)| {
                let parts = vec![Part { name: name.to_owned(), class: name, value: value? }];
                Some(Bar { label: name.to_owned(), parts, spread: m.spread.get(name).copied() })
            })
            .collect();
    let cpu: Vec<Bar> = [("farshore", &m.cpu_s), (NATIVE, &m.cpu_s_native)]
        .into_iter()
        .map(|(name, processes)| Bar {
            label: name.to_owned(),
            parts: PROCESSES
                .into_iter()
                .filter_map(|(process, class)| {
                    let value = *processes.get(process)?;
                    Some(Part { name: process.replace('_', " "), class, value })
                })
                .collect(),
            spread: None,
        })
        .collect();
    let rss: Vec<String> = m
        .peak_rss_mb
        .iter()
        .map(|(process, mb)| format!("{} {mb:.0} MiB", process.replace('_', " ")))
        .collect();
    format!(
        "<section><h2>{} <span class=\"advantage\">{:.2} ×</span></h2>\
         <p class=\"note\">{}</p>\
         <h3>{heading}</h3>{}\
         <h3>CPU seconds by process</h3>{}\
         <p class=\"note\">Peak memory: {}</p>{}{}{}</section>",
        escape(&title(m)),
        m.advantage,
        escape(&work(m)),
        chart::bars(&values, unit),
        chart::bars(&cpu, "s"),
        rss.join(", "),
        bound(m),
        also(m),
        settings(m)
    )
}

fn work(m: &Measurement) -> String {
    let setting = |name| m.settings.get(name).map(plain).unwrap_or_default();
    if m.settings.contains_key("transactions_per_s") {
        return format!(
            "{} transactions of {} row(s) per second, for {} s",
            setting("transactions_per_s"),
            setting("rows_per_transaction"),
            setting("seconds")
        );
    }
    if m.settings.contains_key("table_mb") {
        return format!("{} rows, {} MB", setting("rows"), setting("table_mb"));
    }
    format!(
        "{} commands in {} transactions over {} table(s); {} MB of WAL",
        setting("commands"),
        setting("transactions"),
        setting("tables"),
        setting("backlog_wal_mb")
    )
}

/// What no Farshore could be better than here, in words.
fn bound(m: &Measurement) -> String {
    m.bound.map_or_else(String::new, |bound| {
        format!(
            "<p class=\"note\">What both servers did for Farshore is {:.2} s of all processors: with a \
             Farshore that costs nothing, {:.2} ×.</p>",
            bound.seconds, bound.advantage
        )
    })
}

/// What else was measured, in words.
fn also(m: &Measurement) -> String {
    m.also.iter().fold(String::new(), |mut text, (metric, values)| {
        let shown: Vec<String> =
            values.iter().map(|(name, value)| format!("{name} {value:.2}")).collect();
        let _ = write!(text, "<p class=\"note\">{metric}: {}</p>", shown.join(", "));
        text
    })
}

fn settings(m: &Measurement) -> String {
    let mut rows = String::new();
    for (name, value) in &m.settings {
        let _ =
            write!(rows, "<tr><td>{}</td><td>{}</td></tr>", escape(name), escape(&plain(value)));
    }
    format!("<details><summary>Settings</summary><table>{rows}</table></details>")
}

/// A JSON value without the quotes of a string.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
            value.to_string()
        }
    }
}

/// Text that may stand in an element or a quoted attribute.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// `2026-11-05 14:03 UTC`.
fn utc(unix_seconds: u64) -> String {
    let (days, seconds) = (unix_seconds / 86_400, unix_seconds % 86_400);
    // Days counted from 1 March of year 0, so that a leap day ends a year.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02} {:02}:{:02} UTC", seconds / 3_600, seconds % 3_600 / 60)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measurement::{Costs, FARSHORE, Headline, Own, Run};
    use std::collections::BTreeMap;

    #[test]
    fn the_page_holds_every_case_and_needs_nothing_from_elsewhere() {
        let run = |seconds, own: &[Own]| Run {
            values: BTreeMap::from([("seconds", seconds), ("p99_ms", 7.25)]),
            costs: Costs { publisher: 1.5, subscriber: 2.5, own: own.to_vec() },
        };
        let settings = BTreeMap::from([("note", Value::from("a < b"))]);
        let measurement = Measurement::of_runs(
            Headline {
                scenario: "drain",
                case: "mix-59",
                metric: "seconds",
                other: NATIVE,
                also: &["p99_ms"],
            },
            &[run(2.0, &[Own { name: FARSHORE, cpu: 0.5, peak_rss_bytes: 64 << 20 }])],
            &[run(5.0, &[])],
            settings,
        );
        let failed = [("drain/rows-1k".to_owned(), "<it> broke".to_owned())];
        let page = render(&[measurement], &failed, &utc(1_794_000_000));
        for said in [
            "drain/mix-59",
            "2.50 ×",
            "a &lt; b",
            "&lt;it&gt; broke",
            "farshore 64 MiB",
            "p99_ms: farshore 7.25, native 7.25",
            "<svg",
        ] {
            assert!(page.contains(said), "{said}");
        }
        for foreign in ["http:", "https:", "src=", "href="] {
            assert!(!page.contains(foreign), "{foreign}");
        }
        assert!(render(&[], &[], "now").contains("nothing measured"));
    }

    #[test]
    fn dates_are_right_around_leap_days_and_years() {
        assert_eq!(utc(0), "1970-01-01 00:00 UTC");
        assert_eq!(utc(951_782_399), "2000-02-28 23:59 UTC");
        assert_eq!(utc(951_782_400), "2000-02-29 00:00 UTC");
        assert_eq!(utc(1_798_761_599), "2026-12-31 23:59 UTC");
    }
}
