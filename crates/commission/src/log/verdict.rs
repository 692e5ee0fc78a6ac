use super::TRANSACTIONS;
use crate::report::{Report, Row, Section};
use crate::units::{bytes, count, figure};

/// Past a rate that is this share of the best, larger transactions give little.
const NEAR_THE_BEST: f64 = 0.9;
/// A share of waiting from which on the log is what holds clients up, in percent.
const MOSTLY: f64 = 50.0;

/// What the figures mean.
pub fn of(report: &Report) -> Vec<String> {
    let Some(section) = report.section(TRANSACTIONS) else { return Vec::new() };
    let mut verdict = Vec::new();
    commits(section, &mut verdict);
    let mut clients: Vec<u64> = section.rows.iter().filter_map(|row| row.number(0)).collect();
    clients.dedup();
    for clients in clients {
        let rows: Vec<&Row> =
            section.rows.iter().filter(|row| row.number(0) == Some(clients)).collect();
        if let Some(line) = knee(clients, &rows) {
            verdict.push(line);
        }
    }
    weakest(section, &mut verdict);
    buffers(report, section, &mut verdict);
    verdict
}

/// The rate of the smallest transactions.
fn commits(section: &Section, verdict: &mut Vec<String>) {
    let Some(smallest) = section.rows.iter().filter_map(|row| row.number(1)).min() else { return };
    for row in section.rows.iter().filter(|row| row.number(1) == Some(smallest)) {
        let (Some(clients), Some(rate), Some(p50), Some(p99)) = (
            row.number(0),
            row.median("commits_per_s"),
            row.median("p50_us"),
            row.median("p99_us"),
        ) else {
            continue;
        };
        verdict.push(format!(
            "{} commit{} {} per second in transactions of {}; half of the commits take {} µs, one in a \
             hundred {} µs or more.",
            plural(clients, "client"),
            if clients == 1 { "s" } else { "" },
            figure(rate),
            plural(smallest, "row"),
            figure(p50),
            figure(p99)
        ));
    }
}

/// Where throughput stops growing.
fn knee(clients: u64, rows: &[&Row]) -> Option<String> {
    let rate = |row: &Row| row.median("rows_per_s").unwrap_or(0.0);
    let best = rows.iter().map(|row| rate(row)).fold(0.0, f64::max);
    let at = rows.iter().position(|row| rate(row) >= best * NEAR_THE_BEST)?;
    let (first, knee, last) = (rows.first()?, rows[at], rows.last()?);
    if rows.len() < 2 {
        return None;
    }
    let size = knee.number(1)?;
    let gained = format!(
        "{} rows/s and {} MB/s of log, {} times the rows of transactions of {}",
        figure(rate(knee)),
        figure(knee.median("mb_per_s")?),
        figure(rate(knee) / rate(first).max(f64::MIN_POSITIVE)),
        plural(first.number(1)?, "row")
    );
    let shape = format!(
        "I/Os per row go from {} to {}, bytes per I/O from {} to {}",
        figure(first.median("ios_per_row")?),
        figure(knee.median("ios_per_row")?),
        bytes(first.median("bytes_per_io")? as u64),
        bytes(knee.median("bytes_per_io")? as u64)
    );
    let end = if at == rows.len() - 1 {
        format!("it still grew at the largest that was measured, {} rows", count(size))
    } else {
        format!(
            "past {} rows per transaction it stops growing ({} rows: {} rows/s)",
            count(size),
            count(last.number(1)?),
            figure(rate(last))
        )
    };
    Some(format!(
        "Best transaction size with {}: {} rows, for {gained}; {shape}; {end}.",
        plural(clients, "client"),
        count(size)
    ))
}

/// What holds clients up, and what would help.
fn weakest(section: &Section, verdict: &mut Vec<String>) {
    let Some(smallest) = section.rows.first() else { return };
    let best = section.rows.iter().max_by(|a, b| {
        let rate = |row: &Row| row.median("mb_per_s").unwrap_or(0.0);
        rate(a).total_cmp(&rate(b))
    });
    let Some(best) = best else { return };
    let waiting = |row: &Row| row.median("waiting_percent").unwrap_or(0.0);
    let (small, large) = (waiting(smallest), waiting(best));
    verdict.push(if small >= MOSTLY {
        format!(
            "Weakest part for small transactions: the flush at commit. Clients wait for the log {} % \
             of their time; more rows per transaction, more clients at a time (they share flushes), or \
             a disk that flushes faster would help.",
            figure(small)
        )
    } else {
        format!(
            "Weakest part for small transactions: not the log alone. Clients wait for it {} % of their \
             time; the rest is the server's own work and the way there and back, which more clients at \
             a time or fewer, larger statements would hide.",
            figure(small)
        )
    });
    verdict.push(if large >= MOSTLY {
        format!(
            "Weakest part at the highest throughput: the log. Clients wait for it {} % of their time; a \
             faster disk for pg_wal, or less log (fewer indexes, fewer full pages), would help.",
            figure(large)
        )
    } else {
        format!(
            "Weakest part at the highest throughput: not the log (clients wait for it {} % of their \
             time) but the server's processors and tables; a faster disk for the log would help little.",
            figure(large)
        )
    });
}

/// Large transactions that outgrow the log's buffers write them out page by page.
fn buffers(report: &Report, section: &Section, verdict: &mut Vec<String>) {
    let per_io = |row: &Row| row.median("bytes_per_io").unwrap_or(0.0);
    let largest = section.rows.iter().map(per_io).fold(0.0, f64::max);
    // More often than one I/O in ten, and I/Os that are small again.
    let short = section.rows.iter().find(|row| {
        let full = row.median("buffers_full").unwrap_or(0.0);
        full * 10.0 > row.median("ios").unwrap_or(f64::MAX) && per_io(row) * 4.0 < largest
    });
    let Some(row) = short else { return };
    let (Some(clients), Some(rows)) = (row.number(0), row.number(1)) else { return };
    let size = report.machine.iter().find(|fact| fact.name == "wal_buffers");
    verdict.push(format!(
        "From transactions of {} with {} on, the log's buffers ({}) are full, and it is written in \
         pieces of {} instead of up to {}: a larger wal_buffers would help.",
        plural(rows, "row"),
        plural(clients, "client"),
        size.map_or("wal_buffers", |fact| fact.value.as_str()),
        bytes(per_io(row) as u64),
        bytes(largest as u64)
    ));
}

fn plural(number: u64, what: &str) -> String {
    format!("{} {what}{}", count(number), if number == 1 { "" } else { "s" })
}
