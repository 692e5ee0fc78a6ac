//! Farshore's two legs, publisher to store and store to target, as its status tells them.

use super::beats::{Beat, now_micros};
use crate::contest::Status;
use anyhow::{Context, Result};
use farshore_testkit::process::FarshoreBuilder;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Between two questions. Each is a process of its own.
const ASK_EVERY: Duration = Duration::from_millis(250);
/// Rates are means over at least as long.
const RATE_OVER_MICROS: i64 = 1_000_000;

/// What was heard, in the order of time.
#[derive(Debug, Default)]
pub struct Legs {
    heard: Vec<Heard>,
}

#[derive(Debug, Clone, Copy)]
struct Heard {
    at: i64,
    /// Log reader, distribution.
    changes: [u64; 2],
    /// Durable in the store, durable on the target.
    positions: [u64; 2],
}

impl Legs {
    /// Asks until it is over.
    ///
    /// # Errors
    /// When the answer cannot be read.
    pub fn watch(status: &FarshoreBuilder, over: &AtomicBool) -> Result<Legs> {
        let mut heard = Vec::new();
        while !over.load(Ordering::Relaxed) {
            let at = now_micros();
            if let Ok(text) = status.status_json() {
                let status: Status =
                    serde_json::from_str(&text).context("read farshore's status")?;
                if let ([reader], [distribution]) =
                    (&status.publications[..], &status.subscriptions[..])
                {
                    heard.push(Heard {
                        at,
                        changes: [reader.changes, distribution.changes],
                        positions: [reader.durable(), distribution.applied()],
                    });
                }
            }
            // The pace of the questions; nobody waits for it.
            std::thread::sleep(ASK_EVERY);
        }
        Ok(Legs { heard })
    }

    /// Rates and latencies of both legs, after `warm_up` seconds.
    pub fn summary(&self, beats: &[Beat], warm_up: f64) -> Vec<(&'static str, f64)> {
        let (Some(first), Some(last)) = (beats.first(), beats.last()) else { return Vec::new() };
        let from = first.committed + (warm_up * 1e6) as i64;
        let during = |heard: &&Heard| (from..=last.committed).contains(&heard.at);
        let heard: Vec<Heard> = self.heard.iter().filter(during).copied().collect();
        if heard.len() < 2 {
            return Vec::new();
        }
        let [reader_rates, distribution_rates] = [0, 1].map(|leg| rates(&heard, leg));
        let lags: Vec<[f64; 2]> = heard.iter().map(|heard| lags_ms(heard, beats)).collect();
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
        let max = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
        let [reader, distribution] =
            [0, 1].map(|leg| lags.iter().map(|lags| lags[leg]).collect::<Vec<f64>>());
        vec![
            ("reader_commands_per_s_mean", mean(&reader_rates)),
            ("reader_commands_per_s_max", max(&reader_rates)),
            ("distribution_commands_per_s_mean", mean(&distribution_rates)),
            ("distribution_commands_per_s_max", max(&distribution_rates)),
            ("reader_ms_mean", mean(&reader)),
            ("reader_ms_max", max(&reader)),
            ("distribution_ms_mean", mean(&distribution)),
            ("distribution_ms_max", max(&distribution)),
        ]
    }
}

/// Commands per second of one leg, window by window.
fn rates(heard: &[Heard], leg: usize) -> Vec<f64> {
    let mut rates = Vec::new();
    let mut begin = heard[0];
    for now in heard {
        // Its count begins anew with every connection.
        if now.changes[leg] < begin.changes[leg] {
            begin = *now;
        }
        if now.at - begin.at >= RATE_OVER_MICROS {
            let changes = (now.changes[leg] - begin.changes[leg]) as f64;
            rates.push(changes / ((now.at - begin.at) as f64 / 1e6));
            begin = *now;
        }
    }
    rates
}

/// How old the newest marker was that each leg had done; the second leg's on top of the first's.
/// Never less than it is, and up to the time between two markers more.
fn lags_ms(heard: &Heard, beats: &[Beat]) -> [f64; 2] {
    let age = |position: u64| {
        let done = beats.partition_point(|beat| beat.position < position);
        let newest = done.checked_sub(1).map_or(beats[0].committed, |at| beats[at].committed);
        (heard.at - newest).max(0) as f64 / 1_000.0
    };
    let [reader, both] = heard.positions.map(age);
    [reader, (both - reader).max(0.0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legs_are_as_far_as_the_markers_they_have_done() {
        let beat = |number: i64| Beat {
            number,
            committed: number * 100_000,
            position: number.unsigned_abs() * 1_000,
        };
        let beats: Vec<Beat> = (1..=50).map(beat).collect();
        let heard = |n: i64| Heard {
            at: n * 500_000 + 20_000,
            changes: [n.unsigned_abs() * 5_000, n.unsigned_abs() * 4_000],
            positions: [n.unsigned_abs() * 5_000 + 1, n.unsigned_abs() * 5_000 - 1_999],
        };
        let legs = Legs { heard: (1..=9).map(heard).collect() };
        let summary = legs.summary(&beats, 0.0);
        let value = |name: &str| summary.iter().find(|(n, _)| *n == name).unwrap().1;
        assert_eq!(value("reader_commands_per_s_mean"), 10_000.0);
        assert_eq!(value("distribution_commands_per_s_max"), 8_000.0);
        assert_eq!(value("reader_ms_mean"), 20.0);
        assert_eq!(value("distribution_ms_max"), 200.0);
    }
}
