//! Room for a spill. One that had none is given back, so that the disk is not left full with what is
//! of no use yet; it is not fetched again before the disk shows room for it.

use std::path::Path;
use std::time::{Duration, Instant};

/// A disk that shows room and still refuses (a quota) is tried again after this.
const HIDDEN_BOUND_PAUSE: Duration = Duration::from_secs(600);

/// Bytes that have to be free for a spill of so many: what is written beside it needs some too, and
/// its blocks may be stored a little larger here than at the upstream site.
pub(super) fn with_margin(bytes: u64) -> u64 {
    bytes.saturating_add(bytes / 16).saturating_add(1 << 20)
}

/// A spill that had no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lack {
    /// Bytes that have to be free before it is asked for again.
    needed: u64,
    /// The disk showed room for it when it refused, which it may do without showing more.
    hidden_since: Option<Instant>,
}

impl Lack {
    /// The disk refused a spill of so many bytes, or more, and shows this much that is free now that
    /// what had come of it was given back; `None` if it does not tell.
    pub fn of(bytes: u64, free: Option<u64>, now: Instant) -> Lack {
        let needed = with_margin(bytes);
        let shows_room = free.is_none_or(|free| free >= needed);
        Lack { needed, hidden_since: shows_room.then_some(now) }
    }

    /// Bytes that have to be free.
    pub fn needed(&self) -> u64 {
        self.needed
    }

    /// Whether it is still so.
    pub fn lasts(&self, free: Option<u64>, now: Instant) -> bool {
        match self.hidden_since {
            Some(since) => now.duration_since(since) < HIDDEN_BOUND_PAUSE,
            None => free.is_some_and(|free| free < self.needed),
        }
    }
}

/// Bytes that are free for this user on the disk of a folder; `None` where the file system does not
/// tell. May wait for the disk.
pub(super) fn free_bytes(folder: &Path) -> Option<u64> {
    let disk = rustix::fs::statvfs(folder).ok()?;
    // Some tell nothing, and say zero.
    (disk.f_blocks > 0).then(|| disk.f_bavail.saturating_mul(disk.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1 << 30;

    #[test]
    fn what_had_no_room_waits_for_more_than_it_came_to() {
        let now = Instant::now();
        let lack = Lack::of(16 * GB, Some(15 * GB), now);
        assert_eq!(lack.needed(), 17 * GB + (1 << 20));
        let years = now + Duration::from_secs(100_000_000);
        assert!(lack.lasts(Some(lack.needed() - 1), years));
        assert!(!lack.lasts(Some(lack.needed()), now));
        // Where nobody can tell it is tried.
        assert!(!lack.lasts(None, now));
    }

    #[test]
    fn a_bound_that_the_disk_does_not_show_is_tried_now_and_then() {
        let now = Instant::now();
        for free in [Some(100 * GB), None] {
            let lack = Lack::of(16 * GB, free, now);
            assert!(lack.lasts(free, now + HIDDEN_BOUND_PAUSE - Duration::from_secs(1)));
            assert!(!lack.lasts(free, now + HIDDEN_BOUND_PAUSE));
        }
    }
}
