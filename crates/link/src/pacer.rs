//! A cap on a link's bandwidth, by time of day.
//!
//! Sessions that go first have half of it to themselves, when they need it.
//!
//! [`Bucket`] and [`Rates`] are pure: time goes in, a delay comes out. [`Pacer`] adds the clocks
//! and is shared by all sessions of one link.

use std::num::NonZeroU64;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Minutes of a day.
pub const MINUTES_PER_DAY: u16 = 24 * 60;

/// Lowest cap: below it, the frames that keep a session alive would be a good part of the traffic.
pub const RATE_MIN: u64 = 4 << 10;

/// What may be sent at once after a pause, in time at the current rate.
const BURST: Duration = Duration::from_millis(50);

/// How long the largest piece of a message takes at the current rate.
const PIECE: Duration = Duration::from_millis(250);

/// No wait is longer, whatever was promised ahead.
const WAIT_MAX: Duration = Duration::from_secs(86_400);

/// Pieces are not cut smaller than this for the sake of a cap.
const PIECE_BYTES_MIN: usize = 4 << 10;

/// Bytes per second; `None` is no cap.
pub type Rate = Option<NonZeroU64>;

/// A part of the day with a rate of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateWindow {
    /// First minute of the day, UTC, 0..1440.
    pub from_minute: u16,
    /// The minute after the last, 0..=1440. At or below `from_minute` it is one of the next day,
    /// so that a window may pass midnight.
    pub to_minute: u16,
    /// Rate in that time.
    pub rate: Rate,
}

impl RateWindow {
    fn holds(&self, minute: u16) -> bool {
        if self.from_minute < self.to_minute {
            (self.from_minute..self.to_minute).contains(&minute)
        } else {
            minute >= self.from_minute || minute < self.to_minute
        }
    }
}

/// A link's rates through the day, UTC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rates {
    usual: Rate,
    windows: Vec<RateWindow>,
}

/// Why rates were refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RatesError {
    /// Below [`RATE_MIN`].
    #[error(
        "a rate of {0} bytes per second is too low to keep a link alive; give at least {RATE_MIN}, or stop the subscription"
    )]
    TooLow(u64),
    /// A minute that no day has.
    #[error("minute {0} is not in a day; minutes go from 0 to 1439, and to 1440 at a window's end")]
    Minute(u16),
    /// A window without length.
    #[error("a window from minute {0} to itself is empty; for the whole day set the usual rate")]
    Empty(u16),
    /// Windows that both hold in a minute.
    #[error(
        "two windows hold at {:02}:{:02}; let one end where the other begins", .0 / 60, .0 % 60
    )]
    Overlap(u16),
}

impl Rates {
    /// No cap at any time.
    pub const UNLIMITED: Rates = Rates { usual: None, windows: Vec::new() };

    /// `usual` holds outside of all windows, of which no two may overlap.
    pub fn new(usual: Rate, windows: Vec<RateWindow>) -> Result<Rates, RatesError> {
        for rate in windows.iter().map(|window| window.rate).chain([usual]).flatten() {
            if rate.get() < RATE_MIN {
                return Err(RatesError::TooLow(rate.get()));
            }
        }
        for window in &windows {
            if window.from_minute >= MINUTES_PER_DAY {
                return Err(RatesError::Minute(window.from_minute));
            }
            if window.to_minute > MINUTES_PER_DAY {
                return Err(RatesError::Minute(window.to_minute));
            }
            if window.from_minute == window.to_minute {
                return Err(RatesError::Empty(window.from_minute));
            }
        }
        let holding = |minute: u16| windows.iter().filter(|w| w.holds(minute)).count();
        // Where two overlap, one of them begins within the other.
        if let Some(two) = windows.iter().find(|window| holding(window.from_minute) > 1) {
            return Err(RatesError::Overlap(two.from_minute));
        }
        Ok(Rates { usual, windows })
    }

    /// The rate in a minute of the day, 0..1440.
    pub fn at(&self, minute: u16) -> Rate {
        self.windows
            .iter()
            .find(|window| window.holds(minute))
            .map_or(self.usual, |window| window.rate)
    }
}

/// A token bucket that may go into debt: whoever takes is told how long to wait before sending, and
/// who comes after waits longer. So takers go in the order they came, none takes in parts, and the
/// rate holds for all of them together.
#[derive(Clone, Debug, Default)]
pub struct Bucket {
    /// Bytes that may be sent now; below zero, bytes promised ahead.
    level: f64,
    /// When `level` was right, on the caller's clock.
    at: Duration,
}

impl Bucket {
    /// Takes `bytes` at `now`, on a clock that does not go back. Returns how long to wait before
    /// sending them.
    pub fn take(&mut self, bytes: u64, now: Duration, rate: Rate) -> Duration {
        let wait = self.wait(now, rate);
        if rate.is_some() {
            self.level -= bytes as f64;
        }
        wait
    }

    /// How long who takes now would wait.
    fn wait(&mut self, now: Duration, rate: Rate) -> Duration {
        let Some(rate) = rate else {
            *self = Bucket { level: 0.0, at: now };
            return Duration::ZERO;
        };
        let rate = rate.get() as f64;
        let gained = now.saturating_sub(self.at).as_secs_f64() * rate;
        self.at = self.at.max(now);
        self.level = (self.level + gained).min(rate * BURST.as_secs_f64());
        if self.level >= 0.0 {
            Duration::ZERO
        } else {
            Duration::try_from_secs_f64(-self.level / rate).unwrap_or(WAIT_MAX).min(WAIT_MAX)
        }
    }
}

/// What sessions share: the cap, and of those that go first a half of it of their own.
#[derive(Clone, Debug, Default)]
struct Buckets {
    all: Bucket,
    first: Bucket,
}

impl Buckets {
    fn take(&mut self, bytes: u64, now: Duration, rate: Rate) -> Duration {
        self.all.take(bytes, now, rate)
    }

    /// Who goes first waits in the shorter of the two queues. Either way the bytes count for all, so
    /// that the others give way and the cap holds over time.
    fn take_first(&mut self, bytes: u64, now: Duration, rate: Rate) -> Duration {
        let in_turn = self.take(bytes, now, rate);
        let half = rate.and_then(|rate| NonZeroU64::new(rate.get() / 2));
        if self.first.wait(now, half) >= in_turn {
            return in_turn;
        }
        self.first.take(bytes, now, half)
    }
}

/// The cap of one link, shared by all its sessions in this direction.
#[derive(Debug)]
pub struct Pacer {
    started: Instant,
    state: Mutex<(Rates, Buckets)>,
}

impl Pacer {
    /// A pacer with these rates.
    pub fn new(rates: Rates) -> Pacer {
        Pacer { started: Instant::now(), state: Mutex::new((rates, Buckets::default())) }
    }

    /// Other rates from now on.
    pub fn set_rates(&self, rates: Rates) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).0 = rates;
    }

    /// The rate that holds now.
    pub fn rate(&self) -> Rate {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).0.at(minute_of_day())
    }

    /// Bytes that a piece should have at most, so that no session waits long for another's.
    pub(crate) fn piece_bytes_max(&self) -> usize {
        self.rate().map_or(usize::MAX, |rate| {
            ((rate.get() as f64 * PIECE.as_secs_f64()) as usize).max(PIECE_BYTES_MIN)
        })
    }

    /// Takes `bytes`; they may be sent after the delay returned. Who `goes_first` waits less, while
    /// that is half of the cap or less.
    pub(crate) fn take(&self, bytes: u64, goes_first: bool) -> Duration {
        let (minute, now) = (minute_of_day(), self.started.elapsed());
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let rate = state.0.at(minute);
        match goes_first {
            true => state.1.take_first(bytes, now, rate),
            false => state.1.take(bytes, now, rate),
        }
    }
}

/// Minute of the day, UTC. Every day of Unix time has 86,400 seconds.
fn minute_of_day() -> u16 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (since_epoch.as_secs() / 60 % u64::from(MINUTES_PER_DAY)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(bytes: u64) -> Rate {
        NonZeroU64::new(bytes)
    }

    fn window(from_minute: u16, to_minute: u16, bytes: u64) -> RateWindow {
        RateWindow { from_minute, to_minute, rate: rate(bytes) }
    }

    #[test]
    fn the_window_that_holds_the_minute_gives_the_rate() {
        let windows =
            vec![window(480, 1080, 10_000), window(1320, 360, 20_000), window(1080, 1320, 30_000)];
        let rates = Rates::new(None, windows).unwrap();
        for (minute, expected) in [
            (0, rate(20_000)),
            (359, rate(20_000)),
            (360, None),
            (479, None),
            (480, rate(10_000)),
            (1079, rate(10_000)),
            (1080, rate(30_000)),
            (1320, rate(20_000)),
            (1439, rate(20_000)),
        ] {
            assert_eq!(rates.at(minute), expected, "minute {minute}");
        }
    }

    #[test]
    fn rates_out_of_bounds_are_refused() {
        for (usual, windows, expected) in [
            (rate(100), vec![], RatesError::TooLow(100)),
            (None, vec![window(0, 10, 5)], RatesError::TooLow(5)),
            (None, vec![window(1440, 10, 9_000)], RatesError::Minute(1440)),
            (None, vec![window(0, 1441, 9_000)], RatesError::Minute(1441)),
            (None, vec![window(7, 7, 9_000)], RatesError::Empty(7)),
            (None, vec![window(0, 10, 9_000), window(9, 20, 9_000)], RatesError::Overlap(9)),
            (None, vec![window(1_400, 10, 9_000), window(0, 5, 9_000)], RatesError::Overlap(0)),
            (None, vec![window(60, 70, 9_000), window(60, 70, 9_000)], RatesError::Overlap(60)),
        ] {
            assert_eq!(Rates::new(usual, windows), Err(expected));
        }
    }

    #[test]
    fn bytes_go_at_the_rate_whoever_takes_them() {
        let (mut bucket, rate) = (Bucket::default(), rate(1_000_000));
        let mut now = Duration::ZERO;
        let mut sent = 0;
        while now < Duration::from_secs(10) {
            now += bucket.take(25_000, now, rate);
            sent += 25_000;
        }
        assert!((10_000_000..=10_050_000).contains(&sent), "{sent}");
    }

    #[test]
    fn a_pause_earns_no_more_than_a_short_burst() {
        let mut bucket = Bucket::default();
        let now = Duration::from_secs(3600);
        assert_eq!(bucket.take(50_000, now, rate(1_000_000)), Duration::ZERO);
        assert_eq!(bucket.take(10_000, now, rate(1_000_000)), Duration::ZERO);
        assert_eq!(bucket.take(1, now, rate(1_000_000)), Duration::from_millis(10));
    }

    #[test]
    fn takers_at_one_moment_wait_in_turn() {
        let mut bucket = Bucket::default();
        let waits: Vec<_> =
            (0..4).map(|_| bucket.take(100_000, Duration::ZERO, rate(1_000_000))).collect();
        let expected: Vec<_> = [0, 100, 200, 300].map(Duration::from_millis).into();
        assert_eq!(waits, expected);
    }

    #[test]
    fn who_goes_first_does_not_wait_behind_the_others_and_keeps_to_the_cap() {
        let (mut buckets, rate) = (Buckets::default(), rate(1_000_000));
        let now = Duration::ZERO;
        for _ in 0..20 {
            buckets.take(250_000, now, rate);
        }
        // A commit.
        assert_eq!(buckets.take_first(8_000, now, rate), Duration::ZERO);
        let behind = buckets.take(1, now, rate);
        assert_eq!(behind, Duration::from_millis(5_008), "it counts for the others");
        // More than half of the cap at once waits by itself.
        buckets.take_first(500_000, now, rate);
        assert!(buckets.take_first(1, now, rate) >= Duration::from_secs(1));
        // A lot of it goes no faster than with the others.
        let mut now = Duration::from_secs(1_000);
        let mut sent = 0;
        while now < Duration::from_secs(1_010) {
            now += buckets.take_first(25_000, now, rate);
            sent += 25_000;
        }
        assert!((10_000_000..=10_150_000).contains(&sent), "{sent}");
    }

    #[test]
    fn no_cap_forgives_the_debt() {
        let mut bucket = Bucket::default();
        bucket.take(1_000_000_000, Duration::ZERO, rate(10_000));
        assert_eq!(bucket.take(1_000_000, Duration::ZERO, None), Duration::ZERO);
        assert_eq!(bucket.take(1, Duration::ZERO, rate(10_000)), Duration::ZERO);
    }

    #[test]
    fn no_wait_is_endless() {
        let mut bucket = Bucket::default();
        bucket.take(u64::MAX, Duration::ZERO, rate(RATE_MIN));
        assert_eq!(bucket.take(1, Duration::ZERO, rate(RATE_MIN)), WAIT_MAX);
    }

    #[test]
    fn a_clock_that_stands_still_is_no_fault() {
        let mut bucket = Bucket::default();
        bucket.take(1_000, Duration::from_secs(5), rate(10_000));
        let waits = bucket.take(1, Duration::from_secs(4), rate(10_000));
        assert!(waits < Duration::from_secs(1));
    }
}
