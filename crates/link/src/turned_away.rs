//! What peers were turned away for, told a few times: whoever does not know of it tries again every few
//! seconds, for as long as nobody mends it.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// The connections of one session come at the same time, and are turned away for the same reason.
const ALIKE: Duration = Duration::from_secs(1);

/// The same is told so many times.
const TOLD_MAX: u32 = 5;

/// And again when it was not met for so long.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// So many are remembered; what was met longest ago goes first.
const REMEMBERED_MAX: usize = 256;

/// How much of one that was turned away is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tell {
    /// Nothing.
    Nothing,
    /// All.
    All,
    /// All, and that it is for the last time.
    Last,
}

/// Who was turned away lately, and why.
#[derive(Debug, Default)]
pub(crate) struct TurnedAway(VecDeque<Met>);

#[derive(Debug)]
struct Met {
    from: IpAddr,
    why: String,
    last: Instant,
    told: u32,
}

impl TurnedAway {
    /// Takes in one more. `alike`: it may be one of several connections of a session.
    pub fn note(&mut self, from: IpAddr, why: String, alike: bool, now: Instant) -> Tell {
        self.0.retain(|met| now.saturating_duration_since(met.last) < FORGOTTEN_AFTER);
        let known = self.0.iter().position(|met| met.from == from && met.why == why);
        let known = known.and_then(|at| self.0.remove(at));
        if known.is_none() && self.0.len() == REMEMBERED_MAX {
            self.0.pop_front();
        }
        let before = known.as_ref().map_or(0, |met| met.told);
        let is_alike = |met: &Met| alike && now.saturating_duration_since(met.last) < ALIKE;
        let tell = match before + 1 {
            _ if known.as_ref().is_some_and(is_alike) => Tell::Nothing,
            TOLD_MAX => Tell::Last,
            times if times < TOLD_MAX => Tell::All,
            _ => Tell::Nothing,
        };
        let told = if tell == Tell::Nothing { before } else { before + 1 };
        self.0.push_back(Met { from, why, last: now, told });
        tell
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_met_again_and_again_is_told_a_few_times() {
        let (mut away, begin) = (TurnedAway::default(), Instant::now());
        let [a, b] = ["10.0.0.1", "10.0.0.2"].map(|ip| ip.parse::<IpAddr>().unwrap());
        let mut at = |from, why: &str, alike, millis| {
            away.note(from, why.to_owned(), alike, begin + Duration::from_millis(millis))
        };
        for millis in [0, 2_000, 4_000, 6_000] {
            assert_eq!(at(a, "revoked", false, millis), Tell::All);
        }
        assert_eq!(at(a, "revoked", false, 8_000), Tell::Last);
        assert_eq!(at(b, "revoked", false, 8_000), Tell::All);
        assert_eq!(at(a, "expired", false, 8_000), Tell::All);
        for seconds in (10..5_000).step_by(2) {
            assert_eq!(at(a, "revoked", false, seconds * 1_000), Tell::Nothing);
        }
        assert_eq!(at(a, "revoked", false, 5_700_000), Tell::All, "it was mended");
        // One session.
        assert_eq!(at(a, "too few", true, 5_700_000), Tell::All);
        assert_eq!(at(a, "too few", true, 5_700_100), Tell::Nothing);
        assert_eq!(at(a, "too few", true, 5_702_000), Tell::All);
        for number in 0..1_000 {
            at(b, &number.to_string(), false, 5_702_000);
        }
        assert!(away.0.len() <= REMEMBERED_MAX);
    }
}
