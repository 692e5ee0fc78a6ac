//! What a measurement gives: figures by what was varied, with every repeat, and where they were
//! taken. It is plain data; as JSON it is what `--json` prints and `compare` reads.

use crate::Error;
use crate::statistics;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// The form of this data. Another number means something else.
pub const FORMAT: u32 = 1;
/// Half of the range by the median: beyond this share it has to be said.
const WIDE_SPREAD: f64 = 0.2;
/// Larger files are not reports.
const REPORT_BYTES_MAX: u64 = 64 << 20;

/// One measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`FORMAT`].
    pub format: u32,
    /// What was measured: `disk` or `log`.
    pub kind: String,
    /// The folder, or the server without secrets.
    pub subject: String,
    /// When it began, as `2026-11-22 01:30 UTC`.
    pub taken: String,
    /// Version of Farshore.
    pub farshore: String,
    /// Where: processor, kernel, file system, server.
    pub machine: Vec<Fact>,
    /// How: sizes, repeats, settings of the server that matter.
    pub settings: Vec<Fact>,
    /// Figures.
    pub sections: Vec<Section>,
    /// What was refused, left out, or has to be known to read the figures.
    pub remarks: Vec<String>,
    /// What it means, in plain words.
    pub verdict: Vec<String>,
}

/// A name and a value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fact {
    /// What it is.
    pub name: String,
    /// How it is.
    pub value: String,
}

impl Fact {
    /// A fact.
    pub fn new(name: &str, value: impl ToString) -> Fact {
        Fact { name: name.to_owned(), value: value.to_string() }
    }
}

/// Figures that were varied in the same way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Section {
    /// Short and stable: `compare` finds it by this.
    pub name: String,
    /// For people.
    pub title: String,
    /// What the figures mean, in a sentence or two.
    pub about: String,
    /// What was varied.
    pub dimensions: Vec<Dimension>,
    /// What was measured, in the order of columns.
    pub metrics: Vec<Metric>,
    /// One for each combination.
    pub rows: Vec<Row>,
    /// Pictures to draw of it.
    pub charts: Vec<Chart>,
}

/// Something that was varied.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dimension {
    /// What: `write size`.
    pub name: String,
    /// How to show its values.
    pub kind: DimensionKind,
}

/// How to show the values of a dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DimensionKind {
    /// A number of bytes.
    Bytes,
    /// A number.
    Count,
    /// A word.
    Word,
}

/// A value of a dimension.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(untagged)]
pub enum At {
    /// A number, in the unit of the dimension.
    Number(u64),
    /// A word.
    Word(String),
}

/// Something that was measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metric {
    /// Short and stable: `mb_per_s`.
    pub name: String,
    /// For people, with the unit: `MB/s`.
    pub title: String,
    /// Which way is better.
    pub better: Better,
}

/// Which way a metric gets better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Better {
    /// More.
    Higher,
    /// Less.
    Lower,
    /// Neither: it says how something was done.
    Neither,
}

/// The figures of one combination.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Values of the section's dimensions, in their order.
    pub at: Vec<At>,
    /// By the metric's name, one number per repeat. A metric that does not apply is left out.
    pub figures: BTreeMap<String, Vec<f64>>,
}

impl Row {
    /// The median of a metric's repeats, if it applies here.
    pub fn median(&self, metric: &str) -> Option<f64> {
        self.figures.get(metric).map(|values| statistics::median(values))
    }

    /// Smallest and largest of a metric's repeats, if it applies here.
    pub fn range(&self, metric: &str) -> Option<(f64, f64)> {
        self.figures.get(metric).map(|values| statistics::range(values))
    }

    /// The dimension's value, if it is a number.
    pub fn number(&self, dimension: usize) -> Option<u64> {
        match self.at.get(dimension)? {
            At::Number(number) => Some(*number),
            At::Word(_) => None,
        }
    }
}

/// A picture: a metric over the first dimension named, a line for each value of the second.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chart {
    /// For people.
    pub title: String,
    /// Name of the metric.
    pub metric: String,
    /// Index of the dimension that runs to the right.
    pub x: usize,
    /// Index of the dimension that makes lines, if there is one.
    pub lines: Option<usize>,
    /// Whether the upright axis is logarithmic.
    pub logarithmic: bool,
}

impl Section {
    /// A section without figures yet.
    pub(crate) fn new(
        name: &str,
        title: &str,
        about: &str,
        dimensions: &[(&str, DimensionKind)],
        metrics: &[(&str, &str, Better)],
    ) -> Section {
        Section {
            name: name.to_owned(),
            title: title.to_owned(),
            about: about.to_owned(),
            dimensions: dimensions
                .iter()
                .map(|(name, kind)| Dimension { name: (*name).to_owned(), kind: *kind })
                .collect(),
            metrics: metrics
                .iter()
                .map(|(name, title, better)| Metric {
                    name: (*name).to_owned(),
                    title: (*title).to_owned(),
                    better: *better,
                })
                .collect(),
            rows: Vec::new(),
            charts: Vec::new(),
        }
    }

    /// Adds a repeat of the figures at `at`.
    pub(crate) fn add(&mut self, at: &[At], figures: &[(&str, f64)]) {
        let row = match self.rows.iter().position(|row| row.at == at) {
            Some(row) => row,
            None => {
                self.rows.push(Row { at: at.to_vec(), figures: BTreeMap::new() });
                self.rows.len() - 1
            }
        };
        for (metric, value) in figures {
            debug_assert!(self.metrics.iter().any(|known| known.name == *metric), "{metric}");
            self.rows[row].figures.entry((*metric).to_owned()).or_default().push(*value);
        }
    }

    /// Adds a picture.
    pub(crate) fn chart(
        &mut self,
        title: &str,
        metric: &str,
        x: usize,
        lines: Option<usize>,
        logarithmic: bool,
    ) {
        self.charts.push(Chart {
            title: title.to_owned(),
            metric: metric.to_owned(),
            x,
            lines,
            logarithmic,
        });
    }

    /// The row with these values.
    pub fn row(&self, at: &[At]) -> Option<&Row> {
        self.rows.iter().find(|row| row.at == at)
    }
}

impl Report {
    /// A report without figures yet, taken now.
    pub(crate) fn begin(kind: &str, subject: String) -> Report {
        let now = time::OffsetDateTime::now_utc();
        Report {
            format: FORMAT,
            kind: kind.to_owned(),
            subject,
            taken: format!(
                "{:04}-{:02}-{:02} {:02}:{:02} UTC",
                now.year(),
                u8::from(now.month()),
                now.day(),
                now.hour(),
                now.minute()
            ),
            farshore: env!("CARGO_PKG_VERSION").to_owned(),
            machine: Vec::new(),
            settings: Vec::new(),
            sections: Vec::new(),
            remarks: Vec::new(),
            verdict: Vec::new(),
        }
    }

    /// The section of this name.
    pub fn section(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|section| section.name == name)
    }

    /// Says so when repeats of the same differ widely: then nothing is known to two digits.
    pub(crate) fn remark_on_spread(&mut self) {
        let mut halves: Vec<f64> = Vec::new();
        for section in &self.sections {
            let Some(headline) = section.metrics.first() else { continue };
            for row in &section.rows {
                let repeats = row.figures.get(&headline.name).map_or(0, Vec::len);
                let median = row.median(&headline.name).unwrap_or(0.0);
                if let Some((low, high)) = row.range(&headline.name)
                    && repeats > 1
                    && median > 0.0
                {
                    halves.push((high - low) / 2.0 / median);
                }
            }
        }
        let usual = statistics::median(&halves);
        if usual > WIDE_SPREAD {
            self.remarks.push(format!(
                "repeats of the same differ widely (usually by ±{:.0} %): something else was at work, \
                 or the device is uneven; measure again when it is quiet before relying on a figure",
                usual * 100.0
            ));
        }
    }

    /// Reads what `--json` printed.
    ///
    /// # Errors
    /// When the file cannot be read, or is not a report of this [`FORMAT`].
    pub fn read(path: &Path) -> Result<Report, Error> {
        let wrong = |reason: String| Error::Report { path: path.to_owned(), reason };
        let size = std::fs::metadata(path).map_err(Error::file("read", path))?.len();
        if size > REPORT_BYTES_MAX {
            return Err(wrong(format!("{} are too many for a report", crate::units::bytes(size))));
        }
        let text = std::fs::read_to_string(path).map_err(Error::file("read", path))?;
        let report: Report = serde_json::from_str(&text).map_err(|error| {
            wrong(format!("not a report as `farshore commission … --json` prints it: {error}"))
        })?;
        if report.format != FORMAT {
            return Err(wrong(format!(
                "its format is {}, this Farshore reads {FORMAT}: take it again, or use the version \
                 that wrote it ({})",
                report.format, report.farshore
            )));
        }
        Ok(report)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_comes_back_as_it_was_and_others_are_refused_by_name() {
        let mut report = Report::begin("disk", "/data".into());
        let dimensions = [("size", DimensionKind::Bytes), ("method", DimensionKind::Word)];
        let mut section =
            Section::new("s", "S", "about", &dimensions, &[("x", "X", Better::Higher)]);
        let at = [At::Number(4_096), At::Word("fsync".into())];
        section.add(&at, &[("x", 1.0)]);
        section.add(&at, &[("x", 3.0)]);
        assert_eq!(section.row(&at).unwrap().median("x"), Some(2.0));
        assert_eq!(section.rows[0].number(0), Some(4_096));
        assert_eq!(section.rows[0].number(1), None);
        report.sections.push(section);
        report.remark_on_spread();
        assert!(report.remarks[0].contains("±50 %"), "{:?}", report.remarks);
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        std::fs::write(&path, serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(Report::read(&path).unwrap(), report);
        report.format = 99;
        std::fs::write(&path, serde_json::to_string(&report).unwrap()).unwrap();
        assert!(Report::read(&path).unwrap_err().to_string().contains("format is 99"));
        std::fs::write(&path, "{}").unwrap();
        assert!(Report::read(&path).unwrap_err().to_string().contains("not a report"));
        let missing = Report::read(&folder.path().join("no")).unwrap_err().to_string();
        assert!(missing.contains("cannot read"), "{missing}");
    }
}
