//! The model of one direction of the line. Pure: times come in and go out, in nanoseconds.

use std::time::Duration;

/// Frames are cut so that none occupies the line for longer than this: a super-segment of 64 KiB
/// would hold up everything behind it for half a second at 1 Mbit/s.
const PIECE_NS_MAX: u64 = 1_000_000;
/// A queue has room for at least this many pieces, or dropping would be all or nothing.
const PIECES_PER_QUEUE: u64 = 4;
const PACKET_BYTES: u64 = 1500;
const NS_PER_SECOND: u64 = 1_000_000_000;

/// How much waits in front of the line before what comes next is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queue {
    /// What the line carries in this time, whatever its rate is.
    Time(Duration),
    /// Bytes on the wire.
    Bytes(u64),
}

impl Default for Queue {
    /// 100 ms: what routers on long lines are commonly given.
    fn default() -> Queue {
        Queue::Time(Duration::from_millis(100))
    }
}

/// What the line is like at the moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Conditions {
    /// From the end of the queue to the other end.
    pub(super) delay: Duration,
    /// At most this much is added to the delay.
    pub(super) jitter: Duration,
    /// `None`: no limit, and so never a queue.
    pub(super) bits_per_second: Option<u64>,
    pub(super) queue: Queue,
    /// Probability that a packet of at most one MTU is lost on the line; 0 to 1.
    pub(super) loss: f64,
}

impl Conditions {
    fn queue_bytes(&self, bits_per_second: u64) -> u64 {
        match self.queue {
            Queue::Bytes(bytes) => bytes,
            Queue::Time(time) => {
                let bits = u128::from(bits_per_second).saturating_mul(time.as_nanos());
                u64::try_from(bits / 8 / u128::from(NS_PER_SECOND)).unwrap_or(u64::MAX)
            }
        }
    }

    /// How many packets of one MTU may travel as one piece; at least 1.
    pub(super) fn packets_together(&self) -> usize {
        let Some(rate) = self.bits_per_second else { return usize::MAX };
        let by_time = rate / (NS_PER_SECOND / PIECE_NS_MAX) / 8;
        let by_queue = self.queue_bytes(rate) / PIECES_PER_QUEUE;
        usize::try_from(by_time.min(by_queue) / PACKET_BYTES).unwrap_or(usize::MAX).max(1)
    }
}

/// One direction: a queue, then a line of a certain rate, then the way. Nothing overtakes.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// When the last bit of what was admitted has gone onto the line.
    free_at: u64,
    /// When the last that was admitted arrives.
    last_arrival: u64,
}

impl Line {
    /// When the last bit of a piece of `bytes` bytes that comes at `now` arrives; `None` when the
    /// queue is full. `jitter` is what chance adds to the way.
    ///
    /// An idle line takes a piece of any size. What waits keeps the time that the rate at its
    /// coming gave it.
    pub(super) fn admit(
        &mut self,
        now: u64,
        bytes: u64,
        conditions: &Conditions,
        jitter: u64,
    ) -> Option<u64> {
        let begin = self.free_at.max(now);
        if let Some(rate) = conditions.bits_per_second {
            let waiting_bits =
                u128::from(begin - now) * u128::from(rate) / u128::from(NS_PER_SECOND);
            let would_wait = waiting_bits / 8 + u128::from(bytes);
            if begin > now && would_wait > u128::from(conditions.queue_bytes(rate)) {
                return None;
            }
            // Rounded up: never faster than the rate.
            let ns = (u128::from(bytes) * 8 * u128::from(NS_PER_SECOND)).div_ceil(rate.into());
            self.free_at = begin.saturating_add(u64::try_from(ns).unwrap_or(u64::MAX));
        } else {
            self.free_at = begin;
        }
        let way = nanos(conditions.delay).saturating_add(jitter);
        self.last_arrival = self.free_at.saturating_add(way).max(self.last_arrival);
        Some(self.last_arrival)
    }
}

/// A duration as this module counts time; 584 years at most.
pub(super) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn conditions(bits_per_second: Option<u64>, queue: Queue) -> Conditions {
        Conditions {
            delay: Duration::from_millis(40),
            jitter: Duration::ZERO,
            bits_per_second,
            queue,
            loss: 0.0,
        }
    }

    #[test]
    fn an_idle_line_adds_the_time_on_the_line_and_the_way() {
        // 1,250 bytes are 10,000 bits: 1 ms at 10 Mbit/s.
        let slow = conditions(Some(10_000_000), Queue::default());
        let mut line = Line::default();
        assert_eq!(line.admit(5 * MS, 1250, &slow, 0), Some(46 * MS));
        assert_eq!(line.admit(5 * MS, 1250, &slow, 0), Some(47 * MS), "waits for the first");
        assert_eq!(line.admit(90 * MS, 1250, &slow, 0), Some(131 * MS), "idle again");
        let unlimited = conditions(None, Queue::default());
        assert_eq!(Line::default().admit(7, 1 << 40, &unlimited, 0), Some(7 + 40 * MS));
    }

    #[test]
    fn a_full_queue_drops_what_comes_and_drains_with_the_rate() {
        let slow = conditions(Some(10_000_000), Queue::Bytes(12_500));
        let mut line = Line::default();
        let taken = (0..100).filter(|_| line.admit(0, 1250, &slow, 0).is_some()).count();
        assert_eq!(taken, 10);
        assert_eq!(line.admit(MS / 2, 1250, &slow, 0), None);
        assert_eq!(line.admit(MS, 1250, &slow, 0), Some(51 * MS));
        let by_time = conditions(Some(10_000_000), Queue::Time(Duration::from_millis(10)));
        let mut line = Line::default();
        let taken = (0..100).filter(|_| line.admit(0, 1250, &by_time, 0).is_some()).count();
        assert_eq!(taken, 10);
        // More than the whole queue goes onto an idle line.
        assert_eq!(Line::default().admit(0, 125_000, &slow, 0), Some(140 * MS));
    }

    #[test]
    fn neither_jitter_nor_a_shorter_way_lets_one_overtake() {
        let mut line = Line::default();
        let mut now = conditions(None, Queue::default());
        assert_eq!(line.admit(0, 100, &now, 9 * MS), Some(49 * MS));
        assert_eq!(line.admit(MS, 100, &now, 0), Some(49 * MS));
        now.delay = Duration::from_millis(1);
        assert_eq!(line.admit(2 * MS, 100, &now, 0), Some(49 * MS));
        assert_eq!(line.admit(60 * MS, 100, &now, 0), Some(61 * MS));
    }

    #[test]
    fn pieces_are_small_on_slow_lines_and_in_small_queues() {
        let together = |rate, queue| conditions(rate, queue).packets_together();
        assert_eq!(together(None, Queue::Bytes(0)), usize::MAX);
        assert_eq!(together(Some(1_000_000_000), Queue::default()), 83);
        assert_eq!(together(Some(100_000_000), Queue::default()), 8);
        assert_eq!(together(Some(1_000_000), Queue::default()), 1);
        assert_eq!(together(Some(1_000_000_000), Queue::Bytes(30_000)), 5);
        assert_eq!(together(Some(1), Queue::Time(Duration::MAX)), 1);
    }

    #[test]
    fn the_rate_holds_over_a_million_odd_packets() {
        let rate = 777_777_777;
        let mut fast = conditions(Some(rate), Queue::Bytes(u64::MAX));
        fast.delay = Duration::ZERO;
        let mut line = Line::default();
        let end = (0..1_000_000).map(|_| line.admit(0, 1499, &fast, 0).unwrap()).last().unwrap();
        let exact = 1499.0 * 8e15 / rate as f64;
        assert!(end as f64 >= exact && (end as f64) < exact * 1.0001, "{end} ns, not {exact}");
    }
}
