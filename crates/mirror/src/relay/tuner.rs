//! Which method packs log best, by what is waited for. Pure: times come in.
//!
//! Log that waits for the link wants fewer bytes, log that waits for the processor less work. A
//! ladder of methods is climbed by a rung when log waited for the link for a good part of the last
//! second and packing left room; it is gone down when packing took a part of it that is worth having
//! and the link was not waited for. What a link has room for is found out by trying: a rung that was
//! too low is not tried again at once, but after a time that doubles. Nor does more work always make
//! fewer bytes: zstd 3 finds matches in hexadecimal text that cost more than its letters (2.52 where
//! level 1 has 2.86), and 4 % more in prose. So a level that shrinks no better than the one before is
//! left again, and tried again after a time that doubles. In between, and while little happens,
//! nothing changes.

use super::compression::Method;
use std::time::{Duration, Instant};

/// From little work to few bytes.
const LADDER: [Method; 5] =
    [Method::Off, Method::Lz4, Method::Zstd(1), Method::Zstd(3), Method::Zstd(6)];
/// Where it is begun.
const FIRST: usize = 2;
/// How long is looked at before anything changes.
const LOOK: Duration = Duration::from_secs(1);
/// Shares of that time: the link is what is waited for.
const LINK_BUSY: f64 = 0.20;
/// It is not.
const LINK_IDLE: f64 = 0.02;
/// Packing takes as much as it may.
const PACKING_BUSY: f64 = 0.40;
/// Packing takes so much that less of it would be felt: with zstd 1, some 30 MB/s of log.
const PACKING_FELT: f64 = 0.10;
/// What a level that is more work may leave of log, by what the one before left of it.
const WORTH: f64 = 0.98;
/// Less log says nothing about that.
const LOG_BYTES_MIN: u64 = 256 << 10;
/// Nor does the first log on a level, which has no context yet.
const COLD_BYTES: u64 = 2 << 20;
/// How long nothing is taken away after something was added.
const HOLD_MIN: Duration = Duration::from_secs(5);
const HOLD_MAX: Duration = Duration::from_secs(300);

/// Chooses.
#[derive(Debug)]
pub struct Tuner {
    rung: usize,
    since: Instant,
    packing: Duration,
    waiting: Duration,
    log_bytes: u64,
    packed_bytes: u64,
    /// What was left of log on the level that was climbed from, until it is known whether that was
    /// worth it.
    climbed_from: Option<f64>,
    /// Log that is not counted yet.
    cold_bytes: u64,
    /// Not higher than this until then: it was not worth it.
    highest: Option<(usize, Instant)>,
    /// How long that was for.
    doubt: Duration,
    hold: Duration,
    /// Down again from here on.
    held_until: Instant,
}

impl Tuner {
    /// What a session begins with.
    pub const BEGIN: Method = LADDER[FIRST];

    /// For a session that begins.
    pub fn new(now: Instant) -> Tuner {
        Tuner {
            rung: FIRST,
            since: now,
            packing: Duration::ZERO,
            waiting: Duration::ZERO,
            log_bytes: 0,
            packed_bytes: 0,
            climbed_from: None,
            cold_bytes: 0,
            highest: None,
            doubt: Duration::ZERO,
            hold: Duration::ZERO,
            held_until: now,
        }
    }

    /// Packing so much log took so long, and made it so small.
    pub fn packed(&mut self, took: Duration, log_bytes: usize, packed_bytes: usize) {
        self.packing += took;
        if self.cold_bytes > 0 {
            self.cold_bytes = self.cold_bytes.saturating_sub(log_bytes as u64);
            return;
        }
        self.log_bytes += log_bytes as u64;
        self.packed_bytes += packed_bytes as u64;
    }

    /// Packed log waited for the link so long.
    pub fn waited_for_link(&mut self, waited: Duration) {
        self.waiting += waited;
    }

    /// What to pack with from now on.
    pub fn method(&mut self, now: Instant) -> Method {
        let looked = now.saturating_duration_since(self.since);
        if looked >= LOOK {
            let share = |time: Duration| time.as_secs_f64() / looked.as_secs_f64();
            let (link, packing) = (share(self.waiting), share(self.packing));
            let left = (self.log_bytes >= LOG_BYTES_MIN)
                .then(|| self.packed_bytes as f64 / self.log_bytes as f64);
            let top = match self.highest {
                Some((highest, until)) if now < until => highest,
                _ => LADDER.len() - 1,
            };
            // Once it can be told, and never again: later log is other log.
            let was_worth = left.and_then(|left| Some(left <= self.climbed_from.take()? * WORTH));
            if was_worth == Some(true) {
                self.doubt = Duration::ZERO;
            }
            if was_worth == Some(false) {
                self.rung = self.rung.saturating_sub(1);
                self.doubt = (self.doubt * 2).clamp(HOLD_MIN, HOLD_MAX);
                self.highest = Some((self.rung, now + self.doubt));
            } else if link > LINK_BUSY && packing < PACKING_BUSY {
                // One climb at a time is judged.
                if self.rung < top && self.climbed_from.is_none() {
                    // Below zstd 1 a rung is on the way to it, whatever it shrinks log by.
                    self.climbed_from = left.filter(|_| self.rung >= FIRST);
                    self.cold_bytes = if self.climbed_from.is_some() { COLD_BYTES } else { 0 };
                    self.rung += 1;
                    self.hold = (self.hold * 2).clamp(HOLD_MIN, HOLD_MAX);
                    self.held_until = now + self.hold;
                }
            } else if packing > PACKING_BUSY && link < LINK_IDLE
                || packing > PACKING_FELT && link < LINK_IDLE && now >= self.held_until
            {
                self.rung = self.rung.saturating_sub(1);
                (self.climbed_from, self.cold_bytes) = (None, 0);
            }
            (self.since, self.packing, self.waiting) = (now, Duration::ZERO, Duration::ZERO);
            (self.log_bytes, self.packed_bytes) = (0, 0);
        }
        LADDER[self.rung]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is chosen after seconds of each kind, in milliseconds of waiting and packing.
    fn after(seconds: &[(u64, u64)]) -> Method {
        let mut now = Instant::now();
        let mut tuner = Tuner::new(now);
        let mut method = Tuner::BEGIN;
        for (waiting, packing) in seconds {
            tuner.waited_for_link(Duration::from_millis(*waiting));
            tuner.packed(Duration::from_millis(*packing), 0, 0);
            now += LOOK;
            method = tuner.method(now);
        }
        method
    }

    #[test]
    fn what_is_waited_for_decides() {
        assert_eq!(after(&[(0, 10)]), Method::Zstd(1), "little happens");
        assert_eq!(after(&[(500, 50)]), Method::Zstd(3), "the link is narrow");
        assert_eq!(after(&[(900, 50); 9]), Method::Zstd(6), "however narrow");
        assert_eq!(after(&[(900, 600); 9]), Method::Zstd(1), "both are busy");
        assert_eq!(after(&[(0, 700)]), Method::Lz4, "the processor is");
        assert_eq!(after(&[(0, 700); 9]), Method::Off, "whatever it does");
        assert_eq!(after(&[(0, 700), (300, 20)]), Method::Zstd(1), "and back");
        assert_eq!(after(&[(0, 200); 9]), Method::Off, "the link has room");
        assert_eq!(after(&[(100, 300); 9]), Method::Zstd(1), "neither nor");
    }

    const LOG: usize = 1 << 20;

    /// What is chosen, second by second, on a link that is waited for: `left` says what of 1 MiB of
    /// log a method leaves in a second.
    fn on_a_narrow_link(seconds: u64, left: impl Fn(Method, u64) -> usize) -> Vec<Method> {
        let mut now = Instant::now();
        let (mut tuner, mut method, mut methods) = (Tuner::new(now), Tuner::BEGIN, Vec::new());
        for second in 1..=seconds {
            tuner.waited_for_link(Duration::from_millis(500));
            tuner.packed(Duration::from_millis(5), LOG, left(method, second));
            now += LOOK;
            method = tuner.method(now);
            methods.push(method);
        }
        methods
    }

    #[test]
    fn a_level_that_shrinks_no_better_is_left_again() {
        // Level 3 leaves more than level 1, as of hexadecimal text.
        let methods = on_a_narrow_link(400, |method, _| match method {
            Method::Zstd(1) => LOG / 3,
            _ => LOG * 2 / 5,
        });
        let (one, three) = (Method::Zstd(1), Method::Zstd(3));
        assert_eq!(methods[..5], [three, three, three, one, one]);
        let tries: Vec<usize> = (1..methods.len())
            .filter(|at| methods[*at] == three && methods[at - 1] == one)
            .map(|at| at + 1)
            .collect();
        assert_eq!(tries, [9, 22, 45, 88, 171, 334]);
        assert!(!methods.contains(&Method::Zstd(6)));
    }

    #[test]
    fn a_level_that_was_worth_it_stays_when_log_changes() {
        let methods = on_a_narrow_link(60, |method, second| match method {
            // Nothing makes this smaller.
            _ if second > 30 => LOG,
            Method::Zstd(1) => LOG / 3,
            Method::Zstd(3) => LOG / 4,
            _ => LOG / 5,
        });
        assert_eq!(methods[6..], [Method::Zstd(6); 54]);
    }

    #[test]
    fn lower_rungs_are_steps_on_the_way() {
        let mut now = Instant::now();
        let mut tuner = Tuner::new(now);
        let mut second = |waiting, packing, left| {
            tuner.waited_for_link(Duration::from_millis(waiting));
            tuner.packed(Duration::from_millis(packing), LOG, left);
            now += LOOK;
            tuner.method(now)
        };
        assert_eq!((second(0, 700, LOG), second(0, 700, LOG)), (Method::Lz4, Method::Off));
        // lz4 makes nothing of log that zstd halves.
        assert_eq!((second(500, 5, LOG), second(500, 5, LOG)), (Method::Lz4, Method::Zstd(1)));
    }

    #[test]
    fn a_link_that_had_no_room_is_tried_again_after_a_time_that_doubles() {
        let mut now = Instant::now();
        let (mut tuner, mut method, mut tries) = (Tuner::new(now), Tuner::BEGIN, Vec::new());
        // A line that has room for what lz4 makes, and not for more.
        for second in 1..700 {
            let (waiting, packing) = if method == Method::Off { (400, 5) } else { (0, 150) };
            tuner.waited_for_link(Duration::from_millis(waiting));
            tuner.packed(Duration::from_millis(packing), 0, 0);
            now += LOOK;
            let next = tuner.method(now);
            if next == Method::Off && method != Method::Off {
                tries.push(second);
            }
            method = next;
        }
        assert_eq!(tries, [2, 8, 19, 40, 81, 162, 323, 624]);
    }
}
