//! How long things took: counted in buckets, so that memory does not grow with their number.

use std::time::Duration;

/// Buckets between one power of two and the next: a figure read from them is at most 1/64 too large.
const STEPS: u64 = 64;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// Enough for every number of nanoseconds.
const BUCKETS: usize = ((64 - STEP_BITS as usize) + 1) * STEPS as usize;

/// Durations, counted in buckets of nanoseconds. Takes 30 KB however many are counted.
#[derive(Debug, Clone)]
pub struct Latencies {
    counts: Box<[u64]>,
    total: u64,
    max_ns: u64,
}

fn bucket(ns: u64) -> usize {
    if ns < STEPS {
        return ns as usize;
    }
    let shift = ns.ilog2() - STEP_BITS;
    ((u64::from(shift) + 1) * STEPS + (ns >> shift) - STEPS) as usize
}

/// The largest number of nanoseconds that falls into a bucket.
fn upper_edge(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < STEPS {
        return bucket;
    }
    let shift = bucket / STEPS - 1;
    let first = (bucket % STEPS + STEPS) << shift;
    first + ((1 << shift) - 1)
}

impl Latencies {
    /// None yet.
    pub fn new() -> Latencies {
        Latencies { counts: vec![0; BUCKETS].into(), total: 0, max_ns: 0 }
    }

    /// Counts one.
    pub fn record(&mut self, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        if let Some(count) = self.counts.get_mut(bucket(ns)) {
            *count += 1;
        }
        self.total += 1;
        self.max_ns = self.max_ns.max(ns);
    }

    /// Counts all of another's.
    pub fn merge(&mut self, other: &Latencies) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.total += other.total;
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.total
    }

    /// The longest, in microseconds; 0 if there are none.
    pub fn max_us(&self) -> f64 {
        self.max_ns as f64 / 1e3
    }

    /// The time in microseconds that a share of `quantile` (0 to 1) did not exceed; 0 if there are
    /// none. Right to 1/64, and never too small.
    pub fn quantile_us(&self, quantile: f64) -> f64 {
        let wanted = ((self.total as f64 * quantile).ceil() as u64).max(1);
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return upper_edge(bucket).min(self.max_ns) as f64 / 1e3;
            }
        }
        self.max_us()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_has_a_bucket_and_its_edge_is_near() {
        for power in 0..64 {
            for ns in [1_u64 << power, (1 << power) - 1, (1 << power) | (1 << (power / 2))] {
                let edge = upper_edge(bucket(ns));
                assert!(edge >= ns, "{ns} {edge}");
                assert!(edge - ns <= ns / STEPS, "{ns} {edge}");
            }
        }
        assert!(bucket(u64::MAX) < BUCKETS);
        assert_eq!(upper_edge(bucket(u64::MAX)), u64::MAX);
    }

    #[test]
    fn quantiles_are_those_of_a_sorted_list() {
        let (mut low, mut high) = (Latencies::new(), Latencies::new());
        assert_eq!((low.quantile_us(0.5), low.max_us()), (0.0, 0.0));
        for us in 1..=1_000 {
            let half = if us <= 500 { &mut low } else { &mut high };
            half.record(Duration::from_micros(us));
        }
        low.merge(&high);
        assert_eq!((low.count(), low.max_us()), (1_000, 1_000.0));
        for (quantile, exact) in [(0.5, 500.0), (0.99, 990.0), (1.0, 1_000.0)] {
            let found = low.quantile_us(quantile);
            assert!(found >= exact && found <= exact * (1.0 + 1.0 / 64.0), "{quantile}: {found}");
        }
    }
}
