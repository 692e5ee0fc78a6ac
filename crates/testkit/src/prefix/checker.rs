//! Does every sample equal a prefix, and does no sample go back?

use super::history::History;
use super::sampler::{Sample, SampleSeries};
use super::schema::table_index;
use super::state::{RowChange, State};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt::{self, Write as _};
use std::time::Instant;

/// Differing rows shown in a report.
const ROWS_SHOWN: usize = 24;
/// Transactions named in a report, per kind.
const TRANSACTIONS_SHOWN: usize = 12;

/// What a check that found nothing wrong has seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    /// Commits of the publisher.
    pub commits: usize,
    /// Samples checked.
    pub samples: usize,
    /// Different prefixes among them.
    pub prefixes_seen: usize,
    /// The first and the last of these.
    pub range: (usize, usize),
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Summary { commits, samples, prefixes_seen, range } = self;
        write!(
            f,
            "{samples} samples of {commits} commits: {prefixes_seen} different prefixes, from {} to {}",
            range.0, range.1
        )
    }
}

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ViolationKind {
    /// A sample equals no prefix.
    UnknownState,
    /// A sample equals only prefixes that an earlier sample was already past.
    WentBack,
    /// The subscriber did not end as the publisher did.
    FinalDiffers,
}

/// The guarantee is broken; the text says where and how.
#[derive(Debug, Clone)]
pub struct Violation {
    /// What is wrong.
    pub kind: ViolationKind,
    report: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.report)
    }
}

impl std::error::Error for Violation {}

/// Checks all samples against the history. The order between samples of different readers is
/// that of real time: one that began after another had its snapshot must not be behind it.
///
/// # Errors
/// The first sample, in order of time, that breaks the guarantee.
pub fn check(history: &History, samples: &SampleSeries) -> Result<Summary, Box<Violation>> {
    let mut order: Vec<(usize, usize, &Sample)> = Vec::new();
    for (reader, series) in samples.readers.iter().enumerate() {
        order.extend(series.iter().enumerate().map(|(index, sample)| (reader, index, sample)));
    }
    order.sort_by_key(|(reader, index, sample)| {
        (sample.not_before, sample.not_after, *reader, *index)
    });
    let begin = order.first().map(|(_, _, sample)| sample.not_before);

    // Samples whose snapshot may be concurrent with the present one, by the end of their window.
    let mut concurrent: BinaryHeap<Reverse<(Instant, usize, usize)>> = BinaryHeap::new();
    // The greatest prefix that was certainly shown before, and by which sample.
    let mut shown: Option<(usize, usize)> = None;
    let mut seen = std::collections::BTreeSet::new();
    for (at, (reader, index, sample)) in order.iter().enumerate() {
        while let Some(Reverse((end, prefix, earlier))) = concurrent.peek().copied()
            && end <= sample.not_before
        {
            concurrent.pop();
            if shown.is_none_or(|(greatest, _)| prefix > greatest) {
                shown = Some((prefix, earlier));
            }
        }
        let floor = shown.map_or(0, |(prefix, _)| prefix);
        let all = history.prefixes_with(sample.hash);
        // A state can come again. The smallest possible prefix is the choice that constrains
        // later samples least, so if it fails no other choice would have held.
        let Some(prefix) = all.get(all.partition_point(|prefix| *prefix < floor)).copied() else {
            let time = begin.map_or(0.0, |begin| (sample.not_before - begin).as_secs_f64());
            let mut report =
                format!("sample {index} of reader {reader}, {time:.3} s after the first, ");
            let state = samples.state(*reader, *index);
            let kind = match (all.last(), shown) {
                (Some(own), Some((greatest, earlier))) => {
                    let (reader, index, _) = order[earlier];
                    let _ = write!(
                        report,
                        "went back: it equals prefix {own} of {}, but sample {index} of reader \
                         {reader} before it had shown prefix {greatest}",
                        history.prefixes() - 1
                    );
                    describe(&mut report, history, greatest, &state);
                    ViolationKind::WentBack
                }
                _ => {
                    report.push_str("equals no prefix of the publisher's commits");
                    describe_nearest(&mut report, history, &state);
                    let _ = write!(report, "\nthe samples before had shown prefix {floor}");
                    ViolationKind::UnknownState
                }
            };
            return Err(Box::new(Violation { kind, report }));
        };
        seen.insert(prefix);
        concurrent.push(Reverse((sample.not_after, prefix, at)));
    }
    Ok(Summary {
        commits: history.steps().len(),
        samples: order.len(),
        prefixes_seen: seen.len(),
        range: (seen.first().copied().unwrap_or(0), seen.last().copied().unwrap_or(0)),
    })
}

/// Checks that the subscriber ended in the publisher's last state.
///
/// # Errors
/// When it did not; with the rows that differ.
pub fn check_final(history: &History, subscriber: &State) -> Result<(), Box<Violation>> {
    if subscriber.hash() == history.final_hash() {
        return Ok(());
    }
    let last = history.prefixes() - 1;
    let mut report =
        format!("the subscriber did not end as the publisher did, after {last} commits");
    if let Some(prefix) = history.prefixes_with(subscriber.hash()).last() {
        let _ = write!(report, "; it stands at prefix {prefix}");
    } else {
        describe_nearest(&mut report, history, subscriber);
        report.push_str("\nagainst the last state:");
    }
    describe(&mut report, history, last, subscriber);
    Err(Box::new(Violation { kind: ViolationKind::FinalDiffers, report }))
}

fn describe_nearest(report: &mut String, history: &History, state: &State) {
    let (nearest, distance) = history.nearest(state);
    let _ = write!(report, "\nnearest: prefix {nearest}, {distance} rows differ");
    describe(report, history, nearest, state);
}

/// Shows how `state` differs from a prefix.
fn describe(report: &mut String, history: &History, prefix: usize, state: &State) {
    if let Some(step) = prefix.checked_sub(1).and_then(|index| history.steps().get(index)) {
        let numbers: Vec<&str> = step.ledger_numbers().collect();
        let numbers = numbers.join(", ");
        let _ = write!(
            report,
            "\nprefix {prefix} ends with transaction {} (xid {})",
            numbers, step.xid
        );
    }
    let expected = history.state(prefix);
    let changes = expected.changes_to(state);
    describe_transactions(report, history, &expected, &changes);
    for change in changes.iter().take(ROWS_SHOWN) {
        let _ = match change {
            RowChange::Removed(row) => write!(report, "\n  missing: {row}"),
            RowChange::Added(row) if expected.count(row) > 0 => {
                write!(report, "\n  doubled: {row}")
            }
            RowChange::Added(row) => write!(report, "\n  too many: {row}"),
        };
    }
    if changes.len() > ROWS_SHOWN {
        let _ = write!(report, "\n  … and {} more rows", changes.len() - ROWS_SHOWN);
    }
}

/// Names the transactions whose ledger or trail rows are missing, doubled or too many.
fn describe_transactions(
    report: &mut String,
    history: &History,
    expected: &State,
    changes: &[RowChange],
) {
    let named = [table_index("ledger"), table_index("trail")];
    let mut committed_as: HashMap<&str, usize> = HashMap::new();
    for (index, step) in history.steps().iter().enumerate() {
        committed_as.extend(step.ledger_numbers().map(|number| (number, index + 1)));
    }
    let (mut missing, mut doubled, mut extra) = (Vec::new(), Vec::new(), Vec::new());
    for change in changes {
        let (list, row) = match change {
            RowChange::Removed(row) => (&mut missing, row),
            RowChange::Added(row) if expected.count(row) > 0 => (&mut doubled, row),
            RowChange::Added(row) => (&mut extra, row),
        };
        if !named.contains(&Some(row.table())) {
            continue;
        }
        let number = row.values()[0].as_deref().unwrap_or("null");
        let text = match committed_as.get(number) {
            Some(prefix) => format!("{number} (commit {prefix})"),
            None => format!("{number} (never committed)"),
        };
        if !list.contains(&text) {
            list.push(text);
        }
    }
    for (what, list) in [("missing", missing), ("doubled", doubled), ("too many", extra)] {
        if !list.is_empty() {
            let more = if list.len() > TRANSACTIONS_SHOWN { ", …" } else { "" };
            let first = list[..list.len().min(TRANSACTIONS_SHOWN)].join(", ");
            let _ = write!(report, "\ntransactions {what}: {first}{more}");
        }
    }
}

#[cfg(test)]
#[path = "checker_tests.rs"]
mod tests;
