//! Writing on for minutes: a cache that fills shows as a rate that falls.

use super::payload::Payload;
use super::scratch_file::ScratchFile;
use super::stream::{self, Run};
use super::{SUSTAINED, SyncMethod};
use crate::report::{At, Better, DimensionKind, Section};
use crate::statistics::median;
use crate::units::{bytes, figure};
use crate::{Error, Progress, Stop};
use std::time::{Duration, Instant};

/// A checkpoint's or a bulk load's way of writing.
const SIZE: u32 = 256 << 10;
const DEPTH: u32 = 8;
/// Intervals that the time is divided into, at most; each is a second or longer.
const INTERVALS_MAX: u32 = 60;
/// A rate that falls below this share of what it was at first has fallen.
const FALLEN: f64 = 0.75;

/// Writes for `duration`; gives the rate by time, and what it means in words.
pub fn measure(
    file: &ScratchFile,
    method: SyncMethod,
    payload: &Payload,
    duration: Duration,
    stop: &Stop,
    say: Progress<'_>,
) -> Result<(Section, String), Error> {
    let mut section = Section::new(
        SUSTAINED,
        "Writing on",
        &format!("Writes of {}, {DEPTH} under way ({method}).", bytes(SIZE.into())),
        &[("second", DimensionKind::Count)],
        &[("mb_per_s", "MB/s", Better::Higher), ("p99_us", "p99 µs", Better::Lower)],
    );
    section.chart("MB/s by second", "mb_per_s", 0, None, false);
    let interval = (duration / INTERVALS_MAX).max(Duration::from_secs(1));
    let begin = Instant::now();
    let (mut rates, mut written) = (Vec::new(), 0);
    loop {
        let second = begin.elapsed();
        if second >= duration {
            break;
        }
        stop.check()?;
        say(&format!("writing on, second {} of {}", second.as_secs(), duration.as_secs()));
        let run = Run { method, size: SIZE, depth: DEPTH, duration: interval };
        let measured = stream::write(file, run, payload, stop)?;
        let moved = measured.latencies.count() * u64::from(SIZE);
        let rate = moved as f64 / 1e6 / measured.elapsed.as_secs_f64();
        written += moved;
        rates.push((second, written, rate));
        section.add(
            &[At::Number(second.as_secs())],
            &[("mb_per_s", rate), ("p99_us", measured.latencies.quantile_us(0.99))],
        );
    }
    Ok((section, in_words(&rates, file.len())))
}

/// What became of the rate: `(when, bytes written by its end, MB/s)` of each interval.
fn in_words(rates: &[(Duration, u64, f64)], file_bytes: u64) -> String {
    let Some((_, written, _)) = rates.last() else {
        return "writing on was too short to say anything".to_owned();
    };
    let first: Vec<f64> = rates.iter().take(3).map(|(_, _, rate)| *rate).collect();
    let at_first = median(&first);
    let last: Vec<f64> = rates.iter().rev().take(3).map(|(_, _, rate)| *rate).collect();
    let at_last = median(&last);
    let caveat = format!(
        "{} were written round and round in a file of {}: a cache that holds all of that file could \
         still hide what is behind it",
        bytes(*written),
        bytes(file_bytes)
    );
    // One slow interval is not a cache that is full: it stays slow then.
    let fallen = rates.windows(3).find(|next| next.iter().all(|r| r.2 < at_first * FALLEN));
    match fallen {
        Some([(when, written, _), ..]) if at_last < at_first * FALLEN => format!(
            "the rate fell from {} to {} MB/s after {} s and {}: a cache was full; count on the lower \
             figure. {caveat}",
            figure(at_first),
            figure(at_last),
            when.as_secs(),
            bytes(*written)
        ),
        _ => format!(
            "the rate held: {} MB/s at first, {} at the end. {caveat}",
            figure(at_first),
            figure(at_last)
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_that_falls_and_stays_low_is_told_from_a_hiccup() {
        let rates = |of: &[f64]| -> Vec<_> {
            let each = of.iter().enumerate();
            each.map(|(at, rate)| (Duration::from_secs(at as u64), (at as u64 + 1) << 30, *rate))
                .collect()
        };
        let steady = [500.0, 510.0, 490.0, 100.0, 505.0, 500.0, 495.0];
        let words = in_words(&rates(&steady), 1 << 30);
        assert!(words.starts_with("the rate held: 500 MB/s at first, 500"), "{words}");
        let fallen = [500.0, 510.0, 490.0, 480.0, 120.0, 121.0, 119.0, 120.0];
        let words = in_words(&rates(&fallen), 1 << 30);
        assert!(words.contains("from 500 to 120 MB/s after 4 s and 5 GiB"), "{words}");
        assert!(words.contains("file of 1 GiB"), "{words}");
        assert!(in_words(&[], 1).contains("too short"));
    }
}
