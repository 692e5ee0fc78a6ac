//! Whether a block is worth compressing while batches wait for the writer. Pure.
//!
//! Compressing makes blocks smaller and costs a processor's time. With time to spare every block
//! is compressed. When batches queue up, what gets them to the disk soonest is right: on a fast
//! disk that is to write blocks as they are, on a slow one to compress them still.

use std::time::{Duration, Instant};

/// With so many payload bytes at hand at once, batches are queueing up.
const QUEUEING_BYTES: usize = 2 << 20;

/// A queue is taken to be there for so long after it was seen last: without compression it is
/// soon gone, and is back as soon as blocks are compressed again.
const QUEUEING_FOR: Duration = Duration::from_millis(500);

/// While blocks are written as they are, one in so many is compressed to see what that costs now.
const LOOK_EVERY: u64 = 64;

/// Weight of a new measurement.
const WEIGHT: f64 = 0.2;

/// Writes of fewer bytes say more about the disk's latency than about its speed.
const WRITE_BYTES_MIN: u64 = 256 << 10;

/// What compressing and writing cost of late.
#[derive(Debug)]
pub(crate) struct Pressure {
    /// When a queue was last seen.
    queueing: Option<Instant>,
    blocks: u64,
    /// Nanoseconds to compress a byte.
    compressing: Option<f64>,
    /// Stored bytes for a raw byte.
    shrinks_to: f64,
    /// Nanoseconds to write a stored byte and make it durable.
    writing: Option<f64>,
}

impl Default for Pressure {
    fn default() -> Self {
        Pressure { queueing: None, blocks: 0, compressing: None, shrinks_to: 1.0, writing: None }
    }
}

fn mix(known: Option<f64>, new: f64) -> f64 {
    known.map_or(new, |known| known + WEIGHT * (new - known))
}

impl Pressure {
    /// So many payload bytes were at hand when the writer asked.
    pub fn at_hand(&mut self, bytes: usize, now: Instant) {
        if bytes >= QUEUEING_BYTES {
            self.queueing = Some(now);
        } else if self.queueing.is_some_and(|seen| now.duration_since(seen) >= QUEUEING_FOR) {
            self.queueing = None;
        }
    }

    /// Whether the next block is to be compressed.
    pub fn wants_compression(&mut self) -> bool {
        self.blocks += 1;
        let (Some(compressing), Some(writing)) = (self.compressing, self.writing) else {
            return true;
        };
        self.queueing.is_none()
            || self.blocks.is_multiple_of(LOOK_EVERY)
            || compressing + writing * self.shrinks_to < writing
    }

    /// A block was compressed.
    pub fn compressed(&mut self, raw: usize, stored: usize, took: Duration) {
        if raw == 0 {
            return;
        }
        let known = self.compressing;
        self.compressing = Some(mix(known, took.as_nanos() as f64 / raw as f64));
        let shrinks_to = (stored as f64 / raw as f64).min(1.0);
        self.shrinks_to = mix(known.map(|_| self.shrinks_to), shrinks_to);
    }

    /// Bytes were written and made durable.
    pub fn written(&mut self, bytes: u64, took: Duration) {
        if bytes >= WRITE_BYTES_MIN {
            self.writing = Some(mix(self.writing, took.as_nanos() as f64 / bytes as f64));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: usize = 256 << 10;

    /// After blocks that shrink to a third at 200 MB/s, and writes at this speed.
    fn measured(disk_bytes_per_second: f64) -> Pressure {
        let mut pressure = Pressure::default();
        for _ in 0..50 {
            assert!(pressure.wants_compression(), "nothing is known of the disk yet");
            pressure.compressed(BLOCK, BLOCK / 3, Duration::from_secs_f64(BLOCK as f64 / 200e6));
        }
        let bytes = 8 << 20;
        for _ in 0..50 {
            let took = Duration::from_secs_f64(bytes as f64 / disk_bytes_per_second);
            pressure.written(bytes, took);
        }
        pressure
    }

    fn share_compressed(pressure: &mut Pressure) -> f64 {
        (0..1_000).filter(|_| pressure.wants_compression()).count() as f64 / 1_000.0
    }

    #[test]
    fn with_time_to_spare_all_is_compressed() {
        let mut pressure = measured(1e9);
        pressure.at_hand(QUEUEING_BYTES - 1, Instant::now());
        assert_eq!(share_compressed(&mut pressure), 1.0);
    }

    #[test]
    fn a_queue_before_a_fast_disk_is_written_as_it_is() {
        let mut pressure = measured(1e9);
        pressure.at_hand(QUEUEING_BYTES, Instant::now());
        let share = share_compressed(&mut pressure);
        assert!(share > 0.0 && share < 0.05, "{share}");
    }

    #[test]
    fn a_queue_is_remembered_for_a_moment() {
        let mut pressure = measured(1e9);
        let now = Instant::now();
        pressure.at_hand(QUEUEING_BYTES, now);
        pressure.at_hand(0, now + QUEUEING_FOR / 2);
        assert!(share_compressed(&mut pressure) < 0.05);
        pressure.at_hand(0, now + QUEUEING_FOR);
        assert_eq!(share_compressed(&mut pressure), 1.0);
    }

    #[test]
    fn a_queue_before_a_slow_disk_is_compressed() {
        let mut pressure = measured(50e6);
        pressure.at_hand(QUEUEING_BYTES, Instant::now());
        assert_eq!(share_compressed(&mut pressure), 1.0);
    }

    #[test]
    fn small_writes_say_nothing_of_the_disk() {
        let mut pressure = Pressure::default();
        pressure.compressed(BLOCK, BLOCK / 3, Duration::from_millis(1));
        pressure.written(WRITE_BYTES_MIN - 1, Duration::from_secs(1));
        pressure.at_hand(QUEUEING_BYTES, Instant::now());
        assert_eq!(share_compressed(&mut pressure), 1.0);
    }
}
