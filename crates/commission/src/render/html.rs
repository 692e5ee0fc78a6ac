use super::{at, chart};
use crate::report::{Fact, Report, Section};
use crate::units::figure;
use std::fmt::Write as _;

const STYLE: &str = include_str!("style.css");

/// A report as one HTML page that needs nothing from elsewhere, for screens of any width and for
/// paper.
pub fn html(report: &Report) -> String {
    let mut body = format!(
        "<header><h1>{} of {}</h1><p>{} · Farshore {}</p></header>",
        escape(&capitalised(&report.kind)),
        escape(&report.subject),
        escape(&report.taken),
        escape(&report.farshore)
    );
    list(&mut body, "Verdict", "verdict", &report.verdict);
    for section in &report.sections {
        body.push_str(&of_section(section));
    }
    list(&mut body, "To be known", "remarks", &report.remarks);
    facts(&mut body, "Taken on", &report.machine);
    facts(&mut body, "Settings", &report.settings);
    body.push_str(
        "<footer>Medians of the repeats; whiskers and ± span the smallest and the largest. \
         Point at a dot to see its figure.</footer>",
    );
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>{} of {}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n",
        escape(&capitalised(&report.kind)),
        escape(&report.subject)
    )
}

fn capitalised(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
}

fn list(body: &mut String, title: &str, class: &str, lines: &[String]) {
    if lines.is_empty() {
        return;
    }
    let _ = write!(body, "<section class=\"{class}\"><h2>{title}</h2><ul>");
    for line in lines {
        let _ = write!(body, "<li>{}</li>", escape(line));
    }
    body.push_str("</ul></section>");
}

fn facts(body: &mut String, title: &str, facts: &[Fact]) {
    if facts.is_empty() {
        return;
    }
    let _ = write!(body, "<section><h2>{title}</h2><dl>");
    for fact in facts {
        let _ = write!(body, "<dt>{}</dt><dd>{}</dd>", escape(&fact.name), escape(&fact.value));
    }
    body.push_str("</dl></section>");
}

fn of_section(section: &Section) -> String {
    let mut out = format!(
        "<section><h2>{}</h2><p class=\"soft\">{}</p><div class=\"charts\">",
        escape(&section.title),
        escape(&section.about)
    );
    for drawn in &section.charts {
        out.push_str(&chart::lines(section, drawn));
    }
    out.push_str("</div><div class=\"table\"><table><thead><tr>");
    for dimension in &section.dimensions {
        let _ = write!(out, "<th>{}</th>", escape(&dimension.name));
    }
    for metric in &section.metrics {
        let _ = write!(out, "<th>{}</th>", escape(&metric.title));
    }
    out.push_str("</tr></thead><tbody>");
    for row in &section.rows {
        out.push_str("<tr>");
        for (index, value) in row.at.iter().enumerate() {
            let shown = at(section.dimensions.get(index), value);
            let _ = write!(out, "<th>{}</th>", escape(&shown));
        }
        for metric in &section.metrics {
            match (row.median(&metric.name), row.range(&metric.name)) {
                (Some(median), Some((low, high))) => {
                    let spread = if median > 0.0 && high > low {
                        let percent = (high - low) / 2.0 / median * 100.0;
                        format!("<small>±{percent:.0}%</small>")
                    } else {
                        String::new()
                    };
                    let _ = write!(out, "<td>{}{spread}</td>", figure(median));
                }
                _ => out.push_str("<td>–</td>"),
            }
        }
        out.push_str("</tr>");
    }
    out.push_str("</tbody></table></div></section>");
    out
}

/// Text that may stand in an element or a quoted attribute.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{At, Better, DimensionKind};

    #[test]
    fn the_page_holds_everything_and_needs_nothing_from_elsewhere() {
        let mut report = Report::begin("disk", "/data/<x>".into());
        report.machine.push(Fact::new("kernel", "6 & more"));
        report.remarks.push("refused \"by\" name".into());
        report.verdict.push("good".into());
        let dimensions = [("size", DimensionKind::Bytes), ("outstanding", DimensionKind::Count)];
        let metrics = [("rate", "MB/s", Better::Higher), ("p99", "p99 µs", Better::Lower)];
        let mut section = Section::new("s", "Writes", "about", &dimensions, &metrics);
        for size in [4_096, 8_192] {
            for depth in [1, 64] {
                for repeat in [1.0, 1.2] {
                    let at = [At::Number(size), At::Number(depth)];
                    section.add(&at, &[("rate", repeat * depth as f64)]);
                }
            }
        }
        section.chart("MB/s", "rate", 1, Some(0), true);
        // A metric that nothing has must not break the page.
        section.chart("p99", "p99", 1, Some(0), true);
        report.sections.push(section);
        let page = html(&report);
        for said in [
            "Disk of /data/&lt;x&gt;",
            "6 &amp; more",
            "&quot;by&quot;",
            "<svg",
            "class=\"l1\"",
            "8 KiB",
            "prefers-color-scheme: dark",
            "<td>–</td>",
        ] {
            assert!(page.contains(said), "{said}");
        }
        for foreign in ["http:", "https:", "src=", "href=", "url(", "@import", "<script", "NaN"] {
            assert!(!page.contains(foreign), "{foreign}");
        }
    }
}
