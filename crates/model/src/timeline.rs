//! When a log had grown to which position, lately: what legs are timed and backlogs counted by.

use crate::{Lsn, PgTime};
use std::collections::VecDeque;

/// Marks that are kept. When there are so many, every second of the older half is forgotten: what
/// is long ago is known to the second, what is recent to the batch.
const MARKS_MAX: usize = 4_096;

/// A log had grown to a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The position.
    pub position: Lsn,
    /// When, by this machine's clock.
    pub at: PgTime,
    /// Commands of all transactions up to there, counted from the first mark on.
    pub commands: u64,
}

/// Marks with rising positions, from when somebody began to look. Memory is bounded.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    marks: VecDeque<Mark>,
}

impl Timeline {
    /// Takes down that the log has grown to `position`. A position that is known is no news.
    pub fn note(&mut self, position: Lsn, at: PgTime, commands: u64) {
        if self.marks.back().is_some_and(|last| last.position >= position) {
            return;
        }
        if self.marks.len() >= MARKS_MAX {
            let half = MARKS_MAX / 2;
            let mut nth = 0;
            // The first stays: it says from where on something is known.
            self.marks.retain(|_| {
                nth += 1;
                nth > half || nth % 2 == 1
            });
        }
        self.marks.push_back(Mark { position, at, commands });
    }

    /// The newest mark.
    pub fn newest(&self) -> Option<Mark> {
        self.marks.back().copied()
    }

    /// The oldest mark beyond `position`; none if nothing is, or if that was before the first mark.
    pub fn first_after(&self, position: Lsn) -> Option<Mark> {
        self.marks.get(self.first_index_after(position)).copied()
    }

    /// When the log had grown to `position`, or a moment later where marks were forgotten. Not
    /// known before the first mark and beyond the last.
    pub fn when(&self, position: Lsn) -> Option<PgTime> {
        let at = self.marks.partition_point(|mark| mark.position < position);
        let mark = self.marks.get(at)?;
        (at > 0 || mark.position == position).then_some(mark.at)
    }

    /// Commands beyond `position`, counting a batch that `position` lies within as a whole. Not
    /// known of what was there before the first mark.
    pub fn commands_after(&self, position: Lsn) -> Option<u64> {
        let before = self.first_index_after(position).checked_sub(1)?;
        Some(self.newest()?.commands - self.marks.get(before)?.commands)
    }

    fn first_index_after(&self, position: Lsn) -> usize {
        self.marks.partition_point(|mark| mark.position <= position)
    }
}

/// How long a leg takes, in microseconds: what came through it last, from when it `entered` to when
/// it had `left`, or what waits in it longest, whichever is more. `reached` is the end of what has
/// left. None as long as nothing has been seen to enter.
pub fn leg_micros(entered: &Timeline, left: &Timeline, reached: Lsn, now: PgTime) -> Option<u64> {
    let age = |since: PgTime, until: PgTime| u64::try_from(until.micros_since(since)).unwrap_or(0);
    let waiting = entered.first_after(reached).map(|mark| age(mark.at, now));
    let through = entered.first_index_after(reached).checked_sub(1);
    let through = through.and_then(|at| entered.marks.get(at)).and_then(|mark| {
        // The first mark says what was there already, and not when it came.
        let came = entered.marks.front().is_some_and(|first| first.position < mark.position);
        came.then(|| left.when(mark.position).map(|at| age(mark.at, at))).flatten()
    });
    waiting.max(through)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline(marks: &[(u64, i64, u64)]) -> Timeline {
        let mut timeline = Timeline::default();
        for (position, at, commands) in marks {
            timeline.note(Lsn(*position), PgTime(*at), *commands);
        }
        timeline
    }

    #[test]
    fn what_was_before_the_first_mark_is_not_known() {
        let timeline = timeline(&[(100, 1, 0), (200, 5, 7), (150, 6, 99), (300, 9, 10)]);
        assert_eq!(timeline.when(Lsn(99)), None);
        assert_eq!(timeline.when(Lsn(100)), Some(PgTime(1)));
        assert_eq!(timeline.when(Lsn(101)), Some(PgTime(5)));
        assert_eq!(timeline.when(Lsn(301)), None);
        assert_eq!(timeline.commands_after(Lsn(99)), None);
        assert_eq!(timeline.commands_after(Lsn(100)), Some(10));
        assert_eq!(timeline.commands_after(Lsn(199)), Some(10), "a batch counts as a whole");
        assert_eq!(timeline.commands_after(Lsn(200)), Some(3));
        assert_eq!(timeline.commands_after(Lsn(400)), Some(0));
        assert_eq!(Timeline::default().commands_after(Lsn(1)), None);
    }

    #[test]
    fn a_leg_takes_what_came_through_or_what_waits_longer() {
        let entered = timeline(&[(100, 0, 0), (200, 10, 0), (300, 20, 0)]);
        let left = timeline(&[(100, 0, 0), (200, 14, 0)]);
        let leg = |reached, now| leg_micros(&entered, &left, Lsn(reached), PgTime(now));
        assert_eq!(leg(200, 21), Some(4), "what came through took longer than what waits so far");
        assert_eq!(leg(200, 50), Some(30), "what waits has waited longer");
        assert_eq!(leg(250, 50), Some(30));
        let all = timeline(&[(100, 0, 0), (200, 14, 0), (300, 22, 0)]);
        assert_eq!(leg_micros(&entered, &all, Lsn(300), PgTime(99)), Some(2));
        assert_eq!(leg(100, 15), Some(5), "nothing has come through yet");
        let nothing = timeline(&[(100, 0, 0)]);
        assert_eq!(leg_micros(&nothing, &nothing, Lsn(100), PgTime(9)), None);
    }

    #[test]
    fn memory_is_bounded_and_what_is_recent_is_exact() {
        let mut timeline = Timeline::default();
        for nth in 0..100_000 {
            timeline.note(Lsn(nth + 1), PgTime(nth as i64), nth);
        }
        assert!(timeline.marks.len() <= MARKS_MAX);
        assert_eq!(timeline.when(Lsn(99_000)), Some(PgTime(98_999)));
        assert_eq!(timeline.marks[0].position, Lsn(1));
        let old = timeline.when(Lsn(50_000)).unwrap().0;
        assert!((49_999..99_000).contains(&old), "{old}");
        assert_eq!(timeline.commands_after(Lsn(99_990)), Some(10));
    }
}
