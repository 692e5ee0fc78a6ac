use super::{GROUP_COMMIT, METHODS, WRITES};
use crate::report::{Better, Report, Row, Section};
use crate::units::{bytes, count, figure};

/// Past a rate that is this share of the best, more clients or larger writes give little.
const NEAR_THE_BEST: f64 = 0.9;
/// A latency that is this many times the usual one shows: applications notice.
const LONG_TAIL: f64 = 10.0;
/// Durable in less than this is the work of a cache with a battery, or of one that lies.
const FASTER_THAN_A_DRIVE_US: f64 = 30.0;

/// What the figures mean.
pub fn of(report: &Report) -> Vec<String> {
    let mut verdict = Vec::new();
    if let Some(section) = report.section(GROUP_COMMIT) {
        commits(section, &mut verdict);
    }
    if let Some(section) = report.section(METHODS) {
        methods(section, &mut verdict);
    }
    if let Some(section) = report.section(WRITES) {
        writes(section, &mut verdict);
    }
    verdict
}

/// The first row whose metric is near the best of all.
fn knee<'a>(section: &'a Section, metric: &str) -> Option<&'a Row> {
    let best = section.rows.iter().filter_map(|row| row.median(metric)).fold(0.0, f64::max);
    section.rows.iter().find(|row| row.median(metric).is_some_and(|v| v >= best * NEAR_THE_BEST))
}

fn commits(section: &Section, verdict: &mut Vec<String>) {
    let rate = "commits_per_s";
    let Some(one) = section.rows.iter().find(|row| row.number(0) == Some(1)) else { return };
    let Some(alone) = one.median(rate) else { return };
    let latency = one.median("p50_us").unwrap_or(0.0);
    verdict.push(format!(
        "One session that commits after each small transaction gets {} commits/s: a flush takes {} µs.",
        figure(alone),
        figure(latency)
    ));
    if let Some(knee) = knee(section, rate)
        && let (Some(clients), Some(most)) = (knee.number(0), knee.median(rate))
        && clients > 1
    {
        let is_last = section.rows.last().is_some_and(|last| std::ptr::eq(last, knee));
        verdict.push(format!(
            "Sessions that commit together share flushes: {} of them get {} commits/s, {} times as \
             many; {}.",
            count(clients),
            figure(most),
            figure(most / alone.max(f64::MIN_POSITIVE)),
            if is_last { "with more it may still grow" } else { "more sessions add little" }
        ));
    }
    let tail = one.median("p99_us").unwrap_or(0.0);
    if latency > 0.0 && tail > latency * LONG_TAIL {
        verdict.push(format!(
            "Weakest part: the tail. One flush in a hundred takes {} µs, {} times the usual: \
             something else writes to this disk, or the device pauses.",
            figure(tail),
            figure(tail / latency)
        ));
    } else {
        verdict.push(format!(
            "Weakest part: the flush. Whatever the size of a transaction, its commit waits {} µs for \
             it; more rows per transaction, several sessions, or a device whose write cache outlives \
             a power cut would help.",
            figure(latency)
        ));
    }
    if latency > 0.0 && latency < FASTER_THAN_A_DRIVE_US {
        verdict.push(
            "That is faster than a drive writes: a cache answers. Make sure that it outlives a power \
             cut, or commits will not."
                .to_owned(),
        );
    }
}

fn methods(section: &Section, verdict: &mut Vec<String>) {
    let word = |row: &Row| match row.at.first() {
        Some(crate::report::At::Word(word)) => word.clone(),
        Some(crate::report::At::Number(_)) | None => String::new(),
    };
    let smallest = section.rows.iter().filter_map(|row| row.number(1)).min();
    // PostgreSQL cannot be told to write its log past the kernel's cache.
    let choosable: Vec<&Row> = section
        .rows
        .iter()
        .filter(|row| row.number(1) == smallest && !word(row).contains("O_DIRECT"))
        .collect();
    let rate = |row: &Row| row.median("writes_per_s").unwrap_or(0.0);
    let Some(best) = choosable.iter().max_by(|a, b| rate(a).total_cmp(&rate(b))) else { return };
    let Some(usual) = choosable.iter().find(|row| word(row) == "fdatasync") else { return };
    let (Some(best_range), Some(usual_range)) =
        (best.range("writes_per_s"), usual.range("writes_per_s"))
    else {
        return;
    };
    verdict.push(if best_range.0 > usual_range.1 {
        format!(
            "wal_sync_method = {} makes {} writes/s durable here, fdatasync {}.",
            word(best),
            figure(rate(best)),
            figure(rate(usual))
        )
    } else {
        "No wal_sync_method is better than fdatasync here beyond the noise.".to_owned()
    });
}

fn writes(section: &Section, verdict: &mut Vec<String>) {
    debug_assert!(section.metrics.iter().any(|metric| metric.better == Better::Higher));
    let Some(knee) = knee(section, "mb_per_s") else { return };
    let (Some(size), Some(depth), Some(rate)) =
        (knee.number(0), knee.number(1), knee.median("mb_per_s"))
    else {
        return;
    };
    verdict.push(format!(
        "The disk takes {} MB/s of durable writes, from writes of {} with {} under way on.",
        figure(rate),
        bytes(size),
        count(depth)
    ));
}
