//! How fast a backlog would cross and be applied: the slowest of what it goes through.

use super::{Content, DOWN, DRAIN, End, IDLE, REPLAY, ROUND_TRIP, THROUGHPUT};
use crate::Error;
use crate::report::{At, Better, DimensionKind, Fact, Report, Section};

/// Bytes of a row where nothing else is said.
const ROW_BYTES: u64 = 1_000;
/// How much of the processors parts use that share them and wait for each other: drains that such
/// processors bound used 82 to 92 % of them (docs/performance.md).
pub(super) const SHARED_USED: f64 = 0.85;
/// The row of a section with what all parts together do.
pub(crate) const ALL: &str = "all together";

/// What is known beside the link. Rates are of log, decompressed: about the bytes of its rows.
#[derive(Debug, Clone, Copy, Default)]
pub struct Drain {
    /// MB/s that the publisher decodes and its site stores.
    pub source_mb_per_s: Option<f64>,
    /// MB/s that the target takes.
    pub target_mb_per_s: Option<f64>,
    /// Processor seconds per GB of everything but the link, where everything shares this machine.
    pub shared_cpu_s_per_gb: Option<f64>,
    /// Bytes of a row; else as in the sample, or 1,000.
    pub row_bytes: Option<u64>,
    /// MB/s that the publisher writes.
    pub load_mb_per_s: Option<f64>,
}

impl Drain {
    pub(super) fn check(&self) -> Result<(), Error> {
        let rates = [
            self.source_mb_per_s,
            self.target_mb_per_s,
            self.shared_cpu_s_per_gb,
            self.load_mb_per_s,
        ];
        let is_wrong = |rate: &f64| !rate.is_finite() || *rate <= 0.0;
        if rates.iter().flatten().any(is_wrong) || self.row_bytes == Some(0) {
            return Err(Error::Refused("rates and sizes must be above 0".to_owned()));
        }
        Ok(())
    }

    pub(super) fn facts(&self) -> Vec<Fact> {
        let mb = |name, rate: Option<f64>| rate.map(|rate| Fact::new(name, format!("{rate} MB/s")));
        let shared = self.shared_cpu_s_per_gb;
        [
            mb("source rate, as given", self.source_mb_per_s),
            mb("target rate, as given", self.target_mb_per_s),
            shared.map(|s| {
                Fact::new("processor time beside the link, as given", format!("{s} s/GB"))
            }),
            mb("load, as given", self.load_mb_per_s),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Bytes of a row.
    pub(super) fn row_bytes(&self, content: Option<&Content>) -> u64 {
        let sampled = match content {
            Some(Content::Sample(sample)) => sample.row_bytes(),
            _ => None,
        };
        self.row_bytes.or(sampled).unwrap_or(ROW_BYTES)
    }
}

/// Each part's MB/s, the slowest last as what all of them do.
pub(super) fn add(
    report: &mut Report,
    drain: &Drain,
    content: Option<&Content>,
    (here, _): (&End, &End),
) {
    let row_bytes = drain.row_bytes(content);
    let mut section = Section::new(
        DRAIN,
        "How fast a backlog would drain",
        &format!(
            "MB of log per second, decompressed: about the bytes of its rows. Rows are taken to \
             have {} bytes each. What is not given is not counted: decoding at the \
             publisher (--source-rate) and applying at the target (--target-rate).",
            crate::units::count(row_bytes)
        ),
        &[("part", DimensionKind::Word)],
        &[
            ("mb_per_s", "MB/s", Better::Higher),
            ("rows_per_s", "rows/s", Better::Higher),
            ("s_per_gb", "s/GB", Better::Lower),
        ],
    );
    let link = link_rates(report);
    let shared = drain.shared_cpu_s_per_gb.and_then(|other| {
        let row = report.section(REPLAY)?.rows.first()?;
        let own = row.median("cpu_there_s_per_gb")? + row.median("cpu_here_s_per_gb")?;
        Some(1e3 * SHARED_USED * f64::from(here.cores) / (own + other))
    });
    // One figure per repeat, so that the spread of the link is told with it.
    for link in link {
        let parts = [
            ("publisher and its site", drain.source_mb_per_s),
            ("link", Some(link)),
            ("target", drain.target_mb_per_s),
            ("processors of this machine", shared),
        ];
        let known = parts.iter().filter_map(|(_, rate)| *rate);
        let all = known.fold(f64::INFINITY, f64::min);
        for (part, rate) in parts.into_iter().chain([(ALL, Some(all))]) {
            let Some(rate) = rate else { continue };
            section.add(
                &[At::Word(part.to_owned())],
                &[
                    ("mb_per_s", rate),
                    ("rows_per_s", rate * 1e6 / row_bytes as f64),
                    ("s_per_gb", 1e3 / rate.max(f64::MIN_POSITIVE)),
                ],
            );
        }
    }
    if !section.rows.is_empty() {
        report.sections.push(section);
    }
}

/// MB/s of log over the link, by repeat: of what was sent as a log, else of what filled the line.
fn link_rates(report: &Report) -> Vec<f64> {
    let replayed = report.section(REPLAY).and_then(|section| section.rows.first());
    if let Some(rates) = replayed.and_then(|row| row.figures.get("log_mb_per_s")) {
        return rates.clone();
    }
    let Some(section) = report.section(THROUGHPUT) else { return Vec::new() };
    let down = section.rows.iter().rfind(|row| row.at.first() == Some(&At::Word(DOWN.into())));
    down.and_then(|row| row.figures.get("mb_per_s")).cloned().unwrap_or_default()
}

/// What all parts together do, in MB/s.
pub(super) fn all_together(report: &Report) -> Option<f64> {
    report.section(DRAIN)?.row(&[At::Word(ALL.into())])?.median("mb_per_s")
}

/// The part that is slowest: its name and MB/s.
pub(super) fn slowest(report: &Report) -> Option<(String, f64)> {
    let rows = &report.section(DRAIN)?.rows;
    let rates = rows.iter().filter_map(|row| match row.at.first() {
        Some(At::Word(part)) if part != ALL => Some((part.clone(), row.median("mb_per_s")?)),
        _ => None,
    });
    rates.min_by(|(_, a), (_, b)| a.total_cmp(b))
}

/// Milliseconds there and back on an idle line.
pub(super) fn idle_ms(report: &Report) -> Option<f64> {
    report.section(ROUND_TRIP)?.row(&[At::Word(IDLE.into())])?.median("p50_ms")
}
