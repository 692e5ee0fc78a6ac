//! How long something that went wrong is not tried again, in bytes of the publisher's log. Pure.

use farshore_model::Lsn;

/// A span of the log that is twice as long each time that something goes wrong again, and half as
/// long for each such span in which it went well: what happens once a week is no reason to go
/// without it for long.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LogBackoff {
    until: Lsn,
    times: u32,
}

impl LogBackoff {
    /// Up to here it is not tried.
    pub fn until(&self) -> Lsn {
        self.until
    }

    /// It went wrong up to `position`. The span behind it has `first` bytes the first time, and is
    /// doubled at most so many times.
    pub fn note(&mut self, position: Lsn, first: u64, doublings_max: u32) {
        let mut well = position.0.saturating_sub(self.until.0);
        while let Some(before) = self.times.checked_sub(1)
            && let Some(left) = well.checked_sub(first << before)
        {
            (self.times, well) = (before, left);
        }
        let until = Lsn(position.0.saturating_add(first << self.times));
        *self = LogBackoff { until, times: (self.times + 1).min(doublings_max) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: u64 = 4 << 20;

    fn span(backoff: &mut LogBackoff, position: u64) -> u64 {
        backoff.note(Lsn(position), FIRST, 10);
        backoff.until().0 - position
    }

    #[test]
    fn it_grows_while_it_goes_wrong_again_at_once() {
        let mut backoff = LogBackoff::default();
        let mut position = 100;
        for times in 0..20 {
            let span = span(&mut backoff, position);
            assert_eq!(span, FIRST << times.min(10));
            position += span + 5;
        }
    }

    #[test]
    fn it_is_forgotten_while_it_goes_well() {
        let mut backoff = LogBackoff::default();
        assert_eq!(span(&mut backoff, 100), FIRST);
        assert_eq!(span(&mut backoff, 200), 2 * FIRST);
        assert_eq!(span(&mut backoff, 300), 4 * FIRST);
        // As long again as it was not tried: one doubling less.
        let position = backoff.until().0 + 4 * FIRST;
        assert_eq!(span(&mut backoff, position), 4 * FIRST);
        let position = backoff.until().0 + 1_000 * FIRST;
        assert_eq!(span(&mut backoff, position), FIRST);
        // Before its end, as by a group that was sent already.
        let until = backoff.until().0;
        assert_eq!(span(&mut backoff, until - 1), 2 * FIRST);
        assert_eq!(span(&mut LogBackoff::default(), u64::MAX - 1), 1, "the log's end");
    }
}
