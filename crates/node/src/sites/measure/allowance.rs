//! How much one site may measure: the line and the processors are there for replication. Pure.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// What is allowed is allowed anew after this time.
const PERIOD: Duration = Duration::from_secs(3_600);
/// Time of steps within a period.
const TIME_MAX: Duration = Duration::from_secs(20 * 60);
/// Bytes within a period.
const BYTES_MAX: u64 = 64 << 30;

/// What sites have used.
#[derive(Debug, Default)]
pub(in super::super) struct Allowances {
    used: HashMap<String, Used>,
}

#[derive(Debug)]
struct Used {
    since: Instant,
    time: Duration,
    bytes: u64,
}

impl Allowances {
    fn of(&mut self, site: &str, now: Instant) -> &mut Used {
        let fresh = || Used { since: now, time: Duration::ZERO, bytes: 0 };
        let used = self.used.entry(site.to_owned()).or_insert_with(fresh);
        if now.duration_since(used.since) >= PERIOD {
            *used = fresh();
        }
        used
    }

    /// Bytes that a site may still have moved.
    ///
    /// # Errors
    /// Why not any, and when again.
    pub fn left(&mut self, site: &str, now: Instant) -> Result<u64, String> {
        let used = self.of(site, now);
        let left = BYTES_MAX.saturating_sub(used.bytes);
        if left > 0 && used.time < TIME_MAX {
            return Ok(left);
        }
        let wait = PERIOD.saturating_sub(now.duration_since(used.since)).as_secs().div_ceil(60);
        Err(format!(
            "the line was measured for {} minutes and {} GB within an hour, and more is not \
             allowed; try again in {wait} minutes",
            used.time.as_secs() / 60,
            used.bytes >> 30
        ))
    }

    /// A site has used this.
    pub fn use_up(&mut self, site: &str, time: Duration, bytes: u64, now: Instant) {
        let used = self.of(site, now);
        used.time += time;
        used.bytes = used.bytes.saturating_add(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_site_has_its_own_and_gets_it_anew_after_an_hour() {
        let begin = Instant::now();
        let mut allowances = Allowances::default();
        assert_eq!(allowances.left("a", begin), Ok(BYTES_MAX));
        allowances.use_up("a", Duration::from_secs(1), BYTES_MAX - 1, begin);
        assert_eq!(allowances.left("a", begin), Ok(1));
        allowances.use_up("a", Duration::from_secs(1), 1, begin);
        let why = allowances.left("a", begin + Duration::from_secs(600)).unwrap_err();
        assert!(why.contains("64 GB") && why.contains("in 50 minutes"), "{why}");
        assert_eq!(allowances.left("b", begin), Ok(BYTES_MAX));
        allowances.use_up("b", TIME_MAX, 0, begin);
        assert!(allowances.left("b", begin).is_err());
        assert_eq!(allowances.left("a", begin + PERIOD), Ok(BYTES_MAX));
    }
}
