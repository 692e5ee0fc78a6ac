//! What the figures of a line mean, in plain words.

use super::drain::{all_together, idle_ms, slowest};
use super::{COMPRESSION, DOWN, End, LinkOptions, REPLAY, THROUGHPUT, rate, socket_limit};
use crate::report::{At, Report, Row};
use crate::units::{bytes, count, figure};

/// The line is what is waited for when a log fills it by this share.
const FULL: f64 = 0.8;
/// Packs are compressed at this level at least, whatever is set.
const PACKED_LEVEL_MIN: i32 = 3;
/// A ratio must be better by this factor to be worth a setting.
const WORTHWHILE: f64 = 1.1;
/// More is a line that loses.
const RESENT_PERCENT: f64 = 1.0;
/// A queue on the way that is as long as this many round trips, and this many ms, is felt.
const QUEUED: f64 = 3.0;
const QUEUED_MS: f64 = 100.0;

/// Sentences, the most important first.
pub(super) fn of(report: &Report, options: &LinkOptions, ends: (&End, &End)) -> Vec<String> {
    let mut verdict = Vec::new();
    drain(report, options, &mut verdict);
    load(report, options, &mut verdict);
    weakest(report, options, ends, &mut verdict);
    sockets(report, ends, &mut verdict);
    quality(report, &mut verdict);
    verdict
}

fn drain(report: &Report, options: &LinkOptions, verdict: &mut Vec<String>) {
    let Some(all) = all_together(report) else { return };
    let row_bytes = options.drain.row_bytes(options.content.as_ref());
    let not_counted = match (options.drain.source_mb_per_s, options.drain.target_mb_per_s) {
        (None, None) => {
            " Decoding at the publisher and applying at the target are not in it: give their rates \
             with --source-rate and --target-rate (commission log measures what a server takes)."
        }
        (None, Some(_)) => " Decoding at the publisher is not in it (--source-rate).",
        (Some(_), None) => " Applying at the target is not in it (--target-rate).",
        (Some(_), Some(_)) => "",
    };
    verdict.push(format!(
        "A backlog would drain at {}, {} rows/s of {} bytes: 1 GB in {}.{not_counted}",
        rate(all),
        count((all * 1e6 / row_bytes as f64) as u64),
        count(row_bytes),
        time(1e3 / all.max(f64::MIN_POSITIVE))
    ));
}

fn load(report: &Report, options: &LinkOptions, verdict: &mut Vec<String>) {
    let (Some(all), Some(load)) = (all_together(report), options.drain.load_mb_per_s) else {
        return;
    };
    let way = idle_ms(report).unwrap_or(0.0) / 2.0;
    verdict.push(if load < all {
        format!(
            "Under a load of {} the lag stays: {} ms on the way, and what storing and applying take \
             at both ends. It uses {:.0} % of what is there; an hour's outage is caught up in {}.",
            rate(load),
            figure(way),
            load / all * 100.0,
            time(3_600.0 * load / (all - load))
        )
    } else {
        format!(
            "A load of {} is too much: the lag would grow by {} for every minute that it lasts. After \
             an hour of it {} would be waiting, and take {} to drain.",
            rate(load),
            time(60.0 * (1.0 - all / load)),
            bytes(((load - all) * 1e6 * 3_600.0) as u64),
            time(3_600.0 * (load - all) / all.max(f64::MIN_POSITIVE))
        )
    });
}

fn down(report: &Report) -> Vec<&Row> {
    let rows = report.section(THROUGHPUT).map(|section| section.rows.as_slice());
    let is_down = |row: &&Row| row.at.first() == Some(&At::Word(DOWN.into()));
    rows.unwrap_or_default().iter().filter(is_down).collect()
}

fn weakest(
    report: &Report,
    options: &LinkOptions,
    (here, there): (&End, &End),
    verdict: &mut Vec<String>,
) {
    let Some((part, _)) = slowest(report) else { return };
    if part != "link" {
        verdict.push(format!(
            "Weakest part: {part}, not the link. A better line or more compression would not help."
        ));
        return;
    }
    let filled = down(report).last().and_then(|row| row.median("mb_per_s")).unwrap_or(0.0);
    let replay = report.section(REPLAY).and_then(|section| section.rows.first());
    let Some(replay) = replay else {
        verdict.push(format!(
            "Weakest part of what was measured: the line, which carries {} of what cannot be \
             compressed.",
            rate(filled)
        ));
        return;
    };
    let median = |metric| replay.median(metric).unwrap_or(0.0);
    let (log, link) = (median("log_mb_per_s"), median("link_mb_per_s"));
    if link >= filled * FULL {
        verdict.push(format!(
            "Weakest part: the line. A log that is {} times smaller when it crosses fills it with {} \
             of {}.{}",
            figure(median("ratio")),
            rate(link),
            rate(filled),
            more_compression(report, there, median("ratio"))
        ));
        return;
    }
    // Processors at work for it, of those that are there.
    let used = |per_gb: f64, end: &End| per_gb * log / 1e3 / f64::from(end.cores.max(1));
    let (cpu_here, cpu_there) =
        (used(median("cpu_here_s_per_gb"), here), used(median("cpu_there_s_per_gb"), there));
    let (site, share) = if cpu_there >= cpu_here {
        (options.site.as_str(), cpu_there)
    } else {
        ("this site", cpu_here)
    };
    verdict.push(format!(
        "Weakest part: not the line, of which {} of {} are used, but the processors, those of {site} \
         first ({:.0} % busy with it; the log is compressed and encrypted by one of them at a time). \
         Faster ones would help; a better line would not.",
        rate(link),
        rate(filled),
        share * 100.0
    ));
}

/// What a higher level would give, if it gives something and a processor keeps up.
fn more_compression(report: &Report, there: &End, ratio: f64) -> String {
    let rows = report.section(COMPRESSION).map(|section| section.rows.as_slice());
    let usual = there.compression.max(PACKED_LEVEL_MIN);
    let worth_it = |row: &Row| {
        let of = |metric| row.median(metric).unwrap_or(0.0);
        let level = level_of(row).filter(|level| *level > usual)?;
        (of("cpu_mb_per_s") > of("line_mb_per_s") && of("ratio") > ratio * WORTHWHILE)
            .then(|| (level, of("ratio")))
    };
    let best = rows.unwrap_or_default().iter().filter_map(worth_it);
    match best.max_by(|(_, a), (_, b)| a.total_cmp(b)) {
        Some((level, ratio)) => format!(
            " More compression would help: [downstream] compression = {level} at the other site ({} \
             now) makes it {} times smaller, and a processor keeps up with it.",
            there.compression,
            figure(ratio)
        ),
        None => " A faster line would help; more compression would not, or processors would not \
                 keep up with it."
            .to_owned(),
    }
}

/// The level that a way to compress ends with.
fn level_of(row: &Row) -> Option<i32> {
    match row.at.first()? {
        At::Word(how) => how.rsplit(' ').next()?.parse().ok(),
        At::Number(_) => None,
    }
}

/// What sockets may hold, and what that means on a line of this length.
fn sockets(report: &Report, (here, there): (&End, &End), verdict: &mut Vec<String>) {
    let Some(ms) = idle_ms(report) else { return };
    let Some(limit) = socket_limit(there, here, ms) else { return };
    let rows = down(report);
    let one = rows.iter().find(|row| row.number(1) == Some(1));
    let best = rows.iter().filter_map(|row| row.median("mb_per_s")).fold(0.0, f64::max);
    let Some(one) = one.and_then(|row| row.median("mb_per_s")) else { return };
    let buffers = format!(
        "{} (tcp_wmem there) and {} (tcp_rmem here)",
        bytes(there.send_buffer_max.unwrap_or(0)),
        bytes(here.receive_buffer_max.unwrap_or(0))
    );
    if one < best * FULL && one > limit * 0.5 {
        verdict.push(format!(
            "One connection carries {}: its buffers of {buffers} allow about {} at {} ms. Several \
             carry {}; larger buffers would let one do as much.",
            rate(one),
            rate(limit),
            figure(ms),
            rate(best)
        ));
    } else {
        verdict.push(format!(
            "Sockets are not what limits it: buffers of {buffers} allow about {} for each connection \
             at {} ms.",
            rate(limit),
            figure(ms)
        ));
    }
}

/// Loss and queues.
fn quality(report: &Report, verdict: &mut Vec<String>) {
    let rows = report.section(THROUGHPUT).map(|section| section.rows.as_slice());
    let worst = |metric| {
        let values = rows.unwrap_or_default().iter().filter_map(|row| row.median(metric));
        values.fold(0.0, f64::max)
    };
    let resent = worst("resent_percent");
    if resent > RESENT_PERCENT {
        verdict.push(format!(
            "Up to {} % of what is sent is sent again: the line loses packets, or its queue is too \
             short for what is sent; with congestion control bbr at both ends it matters less.",
            figure(resent)
        ));
    }
    let (full, idle) = (worst("full_ms"), idle_ms(report).unwrap_or(0.0));
    if idle > 0.0 && full > idle * QUEUED && full - idle > QUEUED_MS {
        verdict.push(format!(
            "A full line delays what goes over it to {} ms there and back, from {} ms: [downstream] \
             bandwidth at the other site, a little below what the line carries, would keep it short.",
            figure(full),
            figure(idle)
        ));
    }
}

/// Seconds, as people say them.
fn time(seconds: f64) -> String {
    if seconds < 120.0 {
        format!("{} s", figure(seconds))
    } else if seconds < 7_200.0 {
        format!("{} minutes", figure(seconds / 60.0))
    } else {
        format!("{} hours", figure(seconds / 3_600.0))
    }
}
