use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// PostgreSQL's `TimestampTz`: microseconds since 2000-01-01 00:00:00 UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PgTime(pub i64);

/// Seconds from the Unix epoch to PostgreSQL's.
const POSTGRES_EPOCH_UNIX_SECONDS: u64 = 946_684_800;

impl PgTime {
    /// This machine's clock now.
    pub fn now() -> PgTime {
        PgTime::from(SystemTime::now())
    }

    /// Microseconds from `earlier` to `self`; negative when the clocks disagree.
    pub fn micros_since(self, earlier: PgTime) -> i64 {
        self.0.saturating_sub(earlier.0)
    }

    /// Seconds since the Unix epoch, with fractions.
    pub fn unix_seconds(self) -> f64 {
        self.0 as f64 / 1e6 + POSTGRES_EPOCH_UNIX_SECONDS as f64
    }
}

impl From<SystemTime> for PgTime {
    fn from(time: SystemTime) -> PgTime {
        let epoch = UNIX_EPOCH + Duration::from_secs(POSTGRES_EPOCH_UNIX_SECONDS);
        match time.duration_since(epoch) {
            Ok(after) => PgTime(i64::try_from(after.as_micros()).unwrap_or(i64::MAX)),
            Err(before) => {
                PgTime(i64::try_from(before.duration().as_micros()).map_or(i64::MIN, |m| -m))
            }
        }
    }
}
