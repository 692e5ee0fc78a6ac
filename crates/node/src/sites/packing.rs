//! When blocks cross several at a time, compressed together ([`farshore_store::packs`]). Pure.
//!
//! Blocks cross as they are stored: compressed once, for any number of receivers. While the line is
//! what everything waits for, a processor has time to spare, and blocks that are compressed again,
//! together and harder, are a seventh smaller. Whether that is so is measured: a line that is
//! always full, and slow enough for a processor to keep up.

use std::time::{Duration, Instant};

/// How long the line is watched before it is judged.
const WINDOW: Duration = Duration::from_millis(500);
/// Payload bytes a second, decompressed, that a processor packs with ease.
const EASY_BYTES_PER_SECOND: f64 = 40e6;

/// Whether blocks are packed now.
#[derive(Debug)]
pub(super) struct Packing {
    /// zstd level for blocks that are not stored compressed; 0: they cross as they are stored.
    pub compression: i32,
    /// The site at the other end takes packs.
    allowed: bool,
    since: Instant,
    waited: Duration,
    raw_bytes: u64,
    on: bool,
    /// Payload bytes that crossed in packs, before compression.
    pub packed_bytes: u64,
}

impl Packing {
    pub fn new(compression: i32, allowed: bool, now: Instant) -> Packing {
        let allowed = allowed && compression > 0;
        Packing {
            compression,
            allowed,
            since: now,
            waited: Duration::ZERO,
            raw_bytes: 0,
            on: false,
            packed_bytes: 0,
        }
    }

    /// Whether the next blocks are to be packed.
    pub fn is_on(&self) -> bool {
        self.on && self.allowed
    }

    /// Blocks of `raw_bytes` were handed to the line, which took them after `waited`.
    pub fn sent(&mut self, raw_bytes: u64, waited: Duration, now: Instant) {
        self.waited += waited;
        self.raw_bytes += raw_bytes;
        let window = now.duration_since(self.since);
        if window < WINDOW {
            return;
        }
        let full = self.waited.as_secs_f64() / window.as_secs_f64();
        let rate = self.raw_bytes as f64 / window.as_secs_f64();
        // It goes on while the line is full more often than not.
        self.on = rate < EASY_BYTES_PER_SECOND && full > if self.on { 0.3 } else { 0.6 };
        (self.since, self.waited, self.raw_bytes) = (now, Duration::ZERO, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_packed_while_a_slow_line_is_full() {
        let mut now = Instant::now();
        let packing_of = |level, allowed| Packing::new(level, allowed, now);
        let mut packing = packing_of(1, true);
        let mut others = [packing_of(1, false), packing_of(0, true)];
        let mut second = |packing: &mut Packing, raw_bytes: u64, waited_ms: u64| {
            for _ in 0..10 {
                now += Duration::from_millis(100);
                packing.sent(raw_bytes / 10, Duration::from_millis(waited_ms / 10), now);
            }
            packing.is_on()
        };
        assert!(!second(&mut packing, 4_000_000, 100), "the log is what is waited for");
        assert!(second(&mut packing, 4_000_000, 950));
        assert!(second(&mut packing, 4_000_000, 450), "packing takes time too");
        assert!(!second(&mut packing, 4_000_000, 50), "it has caught up");
        assert!(!second(&mut packing, 300_000_000, 900), "too fast to be packed");
        for other in &mut others {
            assert!(!second(other, 4_000_000, 950));
            assert!(!second(other, 4_000_000, 950));
        }
    }
}
