//! What sites are refused, told once: they ask again every few seconds, for as long as nobody mends it.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The same is told again when it was not heard for so long.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// So much is remembered; what was heard longest ago goes first.
const REMEMBERED_MAX: usize = 256;

/// What was refused lately: when it was heard last, to whom, and why.
#[derive(Debug, Default)]
pub(super) struct Refusals(Mutex<VecDeque<(Instant, String, String)>>);

impl Refusals {
    /// Tells the log, if it is not what this site was refused a moment ago too.
    pub fn tell(&self, site: &str, peer: Option<SocketAddr>, why: &str) {
        let peer = peer.map(tracing::field::display);
        if self.is_news(site, why, Instant::now()) {
            tracing::warn!(site, peer, "refused: {why}");
        } else {
            tracing::debug!(site, peer, "refused again: {why}");
        }
    }

    fn is_news(&self, site: &str, why: &str, now: Instant) -> bool {
        let mut lately = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lately.retain(|(at, ..)| now.saturating_duration_since(*at) < FORGOTTEN_AFTER);
        let before = lately.iter().position(|(_, to, what)| (&**to, &**what) == (site, why));
        let known = before.and_then(|at| lately.remove(at));
        if known.is_none() && lately.len() == REMEMBERED_MAX {
            lately.pop_front();
        }
        let is_news = known.is_none();
        lately.push_back((now, site.to_owned(), why.to_owned()));
        is_news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_refused_again_and_again_is_told_once() {
        let (refusals, begin) = (Refusals::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert!(refusals.is_news("a", "not granted", at(0)));
        assert!(refusals.is_news("b", "not granted", at(1)));
        assert!(refusals.is_news("a", "another log", at(1)));
        for seconds in (2..3_600).step_by(2) {
            assert!(!refusals.is_news("a", "not granted", at(seconds)));
        }
        // It was mended, and is wrong again.
        assert!(refusals.is_news("b", "not granted", at(3_600)));
        for number in 0..1_000 {
            assert!(refusals.is_news("c", &number.to_string(), at(3_601)));
        }
        assert!(refusals.0.lock().unwrap().len() <= REMEMBERED_MAX);
    }
}
