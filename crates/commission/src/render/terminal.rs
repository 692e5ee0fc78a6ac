use super::at;
use crate::compare::{Comparison, Verdict};
use crate::report::{Report, Row, Section};
use crate::units::figure;
use std::fmt::Write as _;

/// Cells of the longest bar.
const BAR_CELLS: usize = 16;
/// Text and tables are broken before this column.
const WIDTH: usize = 96;

/// A report as text, with a small bar beside each row for the section's first metric.
pub fn terminal(report: &Report) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "{} of {}, {}", report.kind, report.subject, report.taken);
    for fact in report.machine.iter().chain(&report.settings) {
        let _ = writeln!(out, "  {}: {}", fact.name, fact.value);
    }
    for section in &report.sections {
        let _ = writeln!(out, "\n{}", section.title);
        paragraph(&mut out, "  ", &section.about);
        table(&mut out, section);
    }
    if !report.remarks.is_empty() {
        out.push_str("\nTo be known\n");
        report.remarks.iter().for_each(|remark| paragraph(&mut out, "  - ", remark));
    }
    out.push_str("\nVerdict\n");
    report.verdict.iter().for_each(|line| paragraph(&mut out, "  - ", line));
    out
}

/// Text in lines of at most [`WIDTH`] columns, each under the first one's start.
fn paragraph(out: &mut String, head: &str, text: &str) {
    let indent = " ".repeat(head.chars().count());
    let mut line = head.to_owned();
    let mut is_empty = true;
    for word in text.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            let _ = writeln!(out, "{line}");
            line.clone_from(&indent);
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    let _ = writeln!(out, "{line}");
}

/// A table, in several parts one below the other where it would be too wide.
fn table(out: &mut String, section: &Section) {
    let headline = section.metrics.first().map(|metric| metric.name.as_str()).unwrap_or_default();
    let longest = section.rows.iter().filter_map(|row| row.median(headline)).fold(0.0, f64::max);
    let begin = || -> Vec<Vec<String>> {
        let names = section.dimensions.iter().map(|dimension| dimension.name.clone()).collect();
        let values = section.rows.iter().map(|row| {
            let each = row.at.iter().enumerate();
            each.map(|(index, value)| at(section.dimensions.get(index), value)).collect()
        });
        std::iter::once(names).chain(values).collect()
    };
    let mut part = begin();
    for (index, metric) in section.metrics.iter().enumerate() {
        let mut column = vec![metric.title.clone()];
        column.extend(section.rows.iter().map(|row| cell(row, &metric.name, index == 0)));
        let used: usize = (0..part[0].len()).map(|column| width_of(&part, column) + 2).sum();
        let more = column.iter().map(|text| text.chars().count()).max().unwrap_or(0) + 2;
        if used + more > WIDTH && part[0].len() > section.dimensions.len() {
            align(out, &part);
            let _ = writeln!(out);
            part = begin();
        }
        for (line, value) in part.iter_mut().zip(column) {
            line.push(value);
        }
        if index == 0 {
            part[0].push(String::new());
            for (line, row) in part[1..].iter_mut().zip(&section.rows) {
                line.push(bar(row.median(headline).unwrap_or(0.0), longest));
            }
        }
    }
    align(out, &part);
}

fn width_of(lines: &[Vec<String>], column: usize) -> usize {
    let texts = lines.iter().filter_map(|line| line.get(column));
    texts.map(|text| text.chars().count()).max().unwrap_or(0)
}

/// The median; of the headline with half its range, in percent.
fn cell(row: &Row, metric: &str, with_spread: bool) -> String {
    let Some(median) = row.median(metric) else { return "–".to_owned() };
    let shown = figure(median);
    match row.range(metric) {
        Some((low, high)) if with_spread && median > 0.0 && high > low => {
            format!("{shown} ±{:.0}%", (high - low) / 2.0 / median * 100.0)
        }
        _ => shown,
    }
}

/// A bar of eighths of a cell.
fn bar(value: f64, longest: f64) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    if longest <= 0.0 || !value.is_finite() {
        return String::new();
    }
    let share = (value / longest).clamp(0.0, 1.0);
    let eighths = (share * BAR_CELLS as f64 * 8.0).round() as usize;
    format!("{}{}", "█".repeat(eighths / 8), EIGHTHS[eighths % 8])
}

/// Columns as wide as they need; words to the left, figures to the right.
fn align(out: &mut String, lines: &[Vec<String>]) {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(|column| width_of(lines, column)).collect();
    for line in lines {
        let mut text = String::from(" ");
        for (column, value) in line.iter().enumerate() {
            let pad = " ".repeat(widths[column] - value.chars().count());
            let is_left =
                column == 0 || value.starts_with(['█', '▏', '▎', '▍', '▌', '▋', '▊', '▉']);
            let _ = if is_left {
                write!(text, " {value}{pad} ")
            } else {
                write!(text, " {pad}{value} ")
            };
        }
        let _ = writeln!(out, "{}", text.trim_end());
    }
}

/// Two reports side by side, as text: what changed beyond the noise first.
pub fn comparison(comparison: &Comparison) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "A  {}", comparison.before);
    let _ = writeln!(out, "B  {}", comparison.after);
    if !comparison.facts.is_empty() {
        out.push_str("\nTaken differently\n");
        for (name, before, after) in &comparison.facts {
            let _ = writeln!(out, "  {name}: {before} → {after}");
        }
    }
    for (title, wanted) in [
        ("Changed beyond the noise", [Verdict::Better, Verdict::Worse, Verdict::Different]),
        ("Within the noise", [Verdict::Noise; 3]),
        ("Taken too few times to tell (three repeats each are needed)", [Verdict::Unknown; 3]),
    ] {
        let lines: Vec<_> =
            comparison.lines.iter().filter(|line| wanted.contains(&line.verdict)).collect();
        if lines.is_empty() {
            continue;
        }
        let _ = writeln!(out, "\n{title}");
        let mut table = vec![["figure", "A", "B", "B/A", ""].map(str::to_owned).to_vec()];
        for line in lines {
            table.push(vec![
                line.what.clone(),
                spread(line.before, line.before_range),
                spread(line.after, line.after_range),
                figure(line.after / line.before),
                match line.verdict {
                    Verdict::Better => "better",
                    Verdict::Worse => "WORSE",
                    Verdict::Different => "different",
                    Verdict::Noise | Verdict::Unknown => "",
                }
                .to_owned(),
            ]);
        }
        align(&mut out, &table);
    }
    if !comparison.unmatched.is_empty() {
        let _ = writeln!(out, "\nOnly in one of them: {}", comparison.unmatched.join("; "));
    }
    let _ = writeln!(out);
    paragraph(&mut out, "", &comparison.summary());
    out
}

fn spread(median: f64, (low, high): (f64, f64)) -> String {
    format!("{} [{}, {}]", figure(median), figure(low), figure(high))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{At, Better, DimensionKind};

    #[test]
    fn a_report_shows_medians_spread_bars_and_its_verdict() {
        let mut report = Report::begin("disk", "/data".into());
        let mut section = Section::new(
            "s",
            "Writes",
            &"word ".repeat(60),
            &[("size", DimensionKind::Bytes)],
            &[("rate", "MB/s", Better::Higher), ("p99", "p99 µs", Better::Lower)],
        );
        for (size, rate) in [(4_096, 10.0), (8_192, 20.0)] {
            for factor in [0.9, 1.0, 1.1] {
                section.add(&[At::Number(size)], &[("rate", rate * factor)]);
            }
        }
        report.sections.push(section);
        report.verdict.push("fine".into());
        let text = terminal(&report);
        for said in ["disk of /data", "4 KiB", "20.0 ±10%", "█", "–", "- fine"] {
            assert!(text.contains(said), "{said}\n{text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= WIDTH), "{text}");
        assert_eq!(bar(1.0, 2.0).chars().count(), BAR_CELLS / 2);
        assert_eq!((bar(1.0, 0.0), bar(f64::NAN, 1.0)), (String::new(), String::new()));
    }
}
