//! Two reports of one kind, side by side.

use crate::Error;
use crate::report::{At, Better, Report, Section};
use crate::statistics::{Difference, difference};
use serde::Serialize;

/// What became of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Better, beyond the noise.
    Better,
    /// Worse, beyond the noise.
    Worse,
    /// Different beyond the noise, which is neither better nor worse.
    Different,
    /// No more different than repeats of the same.
    Noise,
    /// Too few repeats to tell.
    Unknown,
}

/// One figure of both reports.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Line {
    /// Section, values, metric.
    pub what: String,
    /// Median of the first.
    pub before: f64,
    /// Its smallest and largest.
    pub before_range: (f64, f64),
    /// Median of the second.
    pub after: f64,
    /// Its smallest and largest.
    pub after_range: (f64, f64),
    /// What that means.
    pub verdict: Verdict,
}

/// Both reports.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// What the first one is.
    pub before: String,
    /// What the second one is.
    pub after: String,
    /// Machine and settings that are not the same: name, in the first, in the second.
    pub facts: Vec<(String, String, String)>,
    /// Every figure that both have.
    pub lines: Vec<Line>,
    /// Figures that only one has.
    pub unmatched: Vec<String>,
}

impl Comparison {
    /// In a sentence.
    pub fn summary(&self) -> String {
        let count = |verdict| self.lines.iter().filter(|line| line.verdict == verdict).count();
        format!(
            "Of {} figures {} got better and {} worse beyond the noise, {} are different without \
             being either, {} stayed within it{}.",
            self.lines.len(),
            count(Verdict::Better),
            count(Verdict::Worse),
            count(Verdict::Different),
            count(Verdict::Noise),
            match count(Verdict::Unknown) {
                0 => String::new(),
                unknown => format!(", {unknown} were taken too few times to tell"),
            }
        )
    }
}

/// Compares two reports.
///
/// # Errors
/// [`Error::Refused`] if they are not of one kind.
pub fn compare(before: &Report, after: &Report) -> Result<Comparison, Error> {
    if before.kind != after.kind {
        return Err(Error::Refused(format!(
            "one report is of \"{}\", the other of \"{}\": name two of one kind",
            before.kind, after.kind
        )));
    }
    let named = |report: &Report| format!("{} {}, {}", report.kind, report.subject, report.taken);
    let mut comparison = Comparison {
        before: named(before),
        after: named(after),
        facts: facts(before, after),
        lines: Vec::new(),
        unmatched: Vec::new(),
    };
    for section in &before.sections {
        match after.section(&section.name) {
            Some(other) => compare_sections(section, other, &mut comparison),
            None => comparison.unmatched.push(section.name.clone()),
        }
    }
    let only_after = after.sections.iter().filter(|s| before.section(&s.name).is_none());
    comparison.unmatched.extend(only_after.map(|section| section.name.clone()));
    Ok(comparison)
}

fn facts(before: &Report, after: &Report) -> Vec<(String, String, String)> {
    let all = |report: &Report| -> Vec<(String, String)> {
        let facts = report.machine.iter().chain(&report.settings);
        facts.map(|fact| (fact.name.clone(), fact.value.clone())).collect()
    };
    let (before, after) = (all(before), all(after));
    let value = |of: &[(String, String)], name: &str| {
        of.iter().find(|(known, _)| known == name).map_or("–".to_owned(), |(_, v)| v.clone())
    };
    let mut names: Vec<&String> = before.iter().chain(&after).map(|(name, _)| name).collect();
    let mut seen = std::collections::BTreeSet::new();
    names.retain(|name| seen.insert(*name));
    names
        .into_iter()
        .map(|name| (name.clone(), value(&before, name), value(&after, name)))
        .filter(|(_, before, after)| before != after)
        .collect()
}

fn words(section: &Section, at: &[At]) -> String {
    let each = at.iter().enumerate().map(|(index, value)| {
        let name = section.dimensions.get(index).map(|d| d.name.as_str()).unwrap_or_default();
        match value {
            At::Word(word) => word.clone(),
            At::Number(number) => format!("{name} {number}"),
        }
    });
    let each: Vec<String> = each.collect();
    format!("{}: {}", section.name, each.join(", "))
}

fn compare_sections(before: &Section, after: &Section, comparison: &mut Comparison) {
    for row in &before.rows {
        let name = words(before, &row.at);
        let Some(other) = after.row(&row.at) else {
            comparison.unmatched.push(name);
            continue;
        };
        for metric in &before.metrics {
            let (Some(old), Some(new)) =
                (row.figures.get(&metric.name), other.figures.get(&metric.name))
            else {
                continue;
            };
            let (Some(old_median), Some(new_median)) =
                (row.median(&metric.name), other.median(&metric.name))
            else {
                continue;
            };
            let verdict = match (difference(old, new), metric.better) {
                (Difference::Noise, _) => Verdict::Noise,
                (Difference::TooFewRepeats, _) => Verdict::Unknown,
                (Difference::Changed, Better::Neither) => Verdict::Different,
                (Difference::Changed, Better::Higher) if new_median > old_median => Verdict::Better,
                (Difference::Changed, Better::Lower) if new_median < old_median => Verdict::Better,
                (Difference::Changed, Better::Higher | Better::Lower) => Verdict::Worse,
            };
            comparison.lines.push(Line {
                what: format!("{name}, {}", metric.title),
                before: old_median,
                before_range: row.range(&metric.name).unwrap_or_default(),
                after: new_median,
                after_range: other.range(&metric.name).unwrap_or_default(),
                verdict,
            });
        }
    }
    let only_after = after.rows.iter().filter(|row| before.row(&row.at).is_none());
    comparison.unmatched.extend(only_after.map(|row| words(after, &row.at)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{DimensionKind, Fact};

    fn report(values: &[(u64, [f64; 3])], memory: &str) -> Report {
        let mut report = Report::begin("disk", "/data".into());
        report.machine.push(Fact::new("memory", memory));
        let metrics = [("rate", "MB/s", Better::Higher), ("p99", "p99 µs", Better::Lower)];
        let dimensions = [("size", DimensionKind::Bytes)];
        let mut section = Section::new("writes", "Writes", "", &dimensions, &metrics);
        for (size, rates) in values {
            for rate in rates {
                let figures = [("rate", *rate), ("p99", 1_000.0 / rate)];
                section.add(&[At::Number(*size)], &figures);
            }
        }
        report.sections.push(section);
        report
    }

    #[test]
    fn what_changed_is_told_from_noise_and_what_one_lacks_is_named() {
        let before =
            report(&[(1, [10.0, 10.1, 9.9]), (2, [10.0, 14.0, 6.0]), (3, [1.0; 3])], "4 GiB");
        let after =
            report(&[(1, [20.0, 20.1, 19.9]), (2, [11.0, 15.0, 7.0]), (4, [1.0; 3])], "8 GiB");
        let comparison = compare(&before, &after).unwrap();
        let verdicts: Vec<Verdict> = comparison.lines.iter().map(|line| line.verdict).collect();
        use Verdict::{Better, Noise};
        assert_eq!(verdicts, [Better, Better, Noise, Noise]);
        assert_eq!(comparison.unmatched, ["writes: size 3", "writes: size 4"]);
        assert_eq!(comparison.facts, [("memory".into(), "4 GiB".into(), "8 GiB".into())]);
        let back = compare(&after, &before).unwrap();
        assert!(back.lines[..2].iter().all(|line| line.verdict == Verdict::Worse));
        let text = crate::render::comparison(&back);
        assert!(text.contains("WORSE") && text.contains("Within the noise"), "{text}");
        let itself = compare(&before, &before).unwrap();
        assert!(itself.lines.iter().all(|line| line.verdict == Noise));
        let mut other = before.clone();
        other.kind = "log".into();
        assert!(compare(&before, &other).unwrap_err().to_string().contains("two of one kind"));
    }
}
