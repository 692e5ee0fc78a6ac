//! How fast bytes arrive, once a connection has found its speed. Pure.

use std::time::{Duration, Instant};

/// This share of the time belongs to connections that still look for their speed.
const WARM_SHARE: u32 = 3;

/// Bytes that arrived while the flow was steady.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flow {
    /// Bytes between the first and the last arrival of the steady part.
    pub bytes: u64,
    /// From that first to that last arrival.
    pub time: Duration,
    /// All bytes, the beginning included.
    pub all_bytes: u64,
}

impl Flow {
    /// Bytes per second; 0 if too little arrived to tell.
    pub fn rate(&self) -> f64 {
        if self.time.is_zero() { 0.0 } else { self.bytes as f64 / self.time.as_secs_f64() }
    }
}

/// Counts arrivals.
#[derive(Debug)]
pub(super) struct Arriving {
    steady_from: Instant,
    all: u64,
    /// The first arrival of all, and the first of the steady part: when, and bytes up to it.
    first: Option<(Instant, u64)>,
    steady: Option<(Instant, u64)>,
    last: Instant,
}

impl Arriving {
    /// Of something that goes on for `time` from now on.
    pub fn begin(now: Instant, time: Duration) -> Arriving {
        let steady_from = now + time / WARM_SHARE;
        Arriving { steady_from, all: 0, first: None, steady: None, last: now }
    }

    /// So much has arrived since the beginning.
    pub fn reach(&mut self, all: u64, now: Instant) {
        if all == self.all {
            return;
        }
        self.all = all;
        self.last = now;
        let here = Some((now, all));
        self.first = self.first.or(here);
        if now >= self.steady_from {
            self.steady = self.steady.or(here);
        }
    }

    /// So much has arrived beside what was there.
    pub fn add(&mut self, bytes: u64, now: Instant) {
        self.reach(self.all + bytes, now);
    }

    pub fn flow(&self) -> Flow {
        // A line so slow that its steady part has but one arrival is judged by all of them.
        let begin = self.steady.filter(|(_, before)| *before < self.all).or(self.first);
        let Some((from, before)) = begin else { return Flow::default() };
        Flow { bytes: self.all - before, time: self.last.duration_since(from), all_bytes: self.all }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_beginning_does_not_count_unless_there_is_nothing_else() {
        let begin = Instant::now();
        let at = |millis| begin + Duration::from_millis(millis);
        let mut arriving = Arriving::begin(begin, Duration::from_secs(3));
        assert_eq!(arriving.flow().rate(), 0.0);
        // Slow at first, then 1,000 bytes every 10 ms.
        arriving.add(10, at(500));
        for step in 100..=300 {
            arriving.add(1_000, at(step * 10));
        }
        let flow = arriving.flow();
        assert_eq!((flow.bytes, flow.time), (200_000, Duration::from_secs(2)));
        assert_eq!((flow.rate(), flow.all_bytes), (100_000.0, 201_010));

        let mut slow = Arriving::begin(begin, Duration::from_secs(3));
        slow.add(1_000, at(500));
        slow.add(1_000, at(2_500));
        assert_eq!(slow.flow().rate(), 500.0);
    }
}
