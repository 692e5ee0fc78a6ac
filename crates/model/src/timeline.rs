//! When a log had grown to which position, lately: what legs are timed and backlogs counted by.

use crate::{Lsn, PgTime};
use std::collections::VecDeque;

/// Marks that are kept. When there are so many, older ones are thinned by their age.
const MARKS_MAX: usize = 4_096;

/// So many of the newest marks are never thinned: what is recent is known to the batch.
const NEWEST_KEPT: usize = MARKS_MAX / 4;

/// What is older is known to this part of its age: an hour ago to the minute.
const PART_OF_AGE: i64 = 64;

/// A log had grown to a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The position.
    pub position: Lsn,
    /// When, by this machine's clock.
    pub at: PgTime,
    /// Commands of all transactions up to there, counted from the first mark on.
    pub commands: u64,
    /// Marks between the one before it and this one were forgotten.
    pub after_gap: bool,
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
            self.thin(|kept, next, newest| {
                next.at.micros_since(kept.at) > newest.micros_since(kept.at) / PART_OF_AGE
            });
        }
        if self.marks.len() >= MARKS_MAX {
            // The clock was set back, perhaps.
            let mut odd = false;
            self.thin(|_, _, _| {
                odd = !odd;
                odd
            });
        }
        self.marks.push_back(Mark { position, at, commands, after_gap: false });
    }

    /// Forgets marks but the first, which says from where on something is known, and the newest:
    /// `keeps` is asked about each other one, with the mark before it that was kept, the mark after
    /// it, and when the newest is from.
    fn thin(&mut self, mut keeps: impl FnMut(&Mark, &Mark, PgTime) -> bool) {
        let Some(newest) = self.marks.back().map(|mark| mark.at) else { return };
        let thinned = self.marks.len().saturating_sub(NEWEST_KEPT);
        let mut kept: VecDeque<Mark> = VecDeque::with_capacity(MARKS_MAX);
        let mut gap = false;
        let mut marks = self.marks.drain(..).enumerate().peekable();
        while let Some((nth, mut mark)) = marks.next() {
            let keep = match (kept.back(), marks.peek()) {
                (Some(before), Some((_, next))) if nth < thinned => keeps(before, next, newest),
                _ => true,
            };
            if keep {
                mark.after_gap |= gap;
                kept.push_back(mark);
            }
            gap = !keep;
        }
        drop(marks);
        self.marks = kept;
    }

    /// The newest mark.
    pub fn newest(&self) -> Option<Mark> {
        self.marks.back().copied()
    }

    /// The oldest mark beyond `position`; none if nothing is, or if that was before the first mark.
    pub fn first_after(&self, position: Lsn) -> Option<Mark> {
        let index = self.first_index_after(position);
        (index > 0).then(|| self.marks.get(index).copied()).flatten()
    }

    /// When the log had grown to `position`, or a moment later where marks were forgotten. Not
    /// known before the first mark and beyond the last.
    pub fn when(&self, position: Lsn) -> Option<PgTime> {
        self.mark_of(position).map(|mark| mark.at)
    }

    /// As [`Timeline::when`], but not known either where marks were forgotten.
    pub fn when_exactly(&self, position: Lsn) -> Option<PgTime> {
        self.mark_of(position)
            .filter(|mark| !mark.after_gap || mark.position == position)
            .map(|mark| mark.at)
    }

    fn mark_of(&self, position: Lsn) -> Option<&Mark> {
        let at = self.marks.partition_point(|mark| mark.position < position);
        let mark = self.marks.get(at)?;
        (at > 0 || mark.position == position).then_some(mark)
    }

    /// Commands beyond `position`, counting a batch that `position` lies within as a whole, and
    /// whether that is exact: where marks were forgotten it is up to what they told of too much.
    /// Not known of what was there before the first mark.
    pub fn commands_after(&self, position: Lsn) -> Option<(u64, bool)> {
        let after = self.first_index_after(position);
        let before = self.marks.get(after.checked_sub(1)?)?;
        let in_gap =
            before.position != position && self.marks.get(after).is_some_and(|mark| mark.after_gap);
        Some((self.newest()?.commands - before.commands, !in_gap))
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
        came.then(|| left.when_exactly(mark.position).map(|at| age(mark.at, at))).flatten()
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
        assert_eq!(timeline.commands_after(Lsn(100)), Some((10, true)));
        assert_eq!(
            timeline.commands_after(Lsn(199)),
            Some((10, true)),
            "a batch counts as a whole"
        );
        assert_eq!(timeline.commands_after(Lsn(200)), Some((3, true)));
        assert_eq!(timeline.commands_after(Lsn(400)), Some((0, true)));
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
    fn memory_is_bounded_and_what_is_old_is_known_to_a_part_of_its_age() {
        let mut timeline = Timeline::default();
        let end = 1_000_000;
        for nth in 0..end {
            // Now and then in a hurry.
            let at = nth as i64 * 5_000 + if nth % 1_000 < 300 { 0 } else { 700 };
            timeline.note(Lsn(nth + 1), PgTime(at), nth);
        }
        assert!(timeline.marks.len() <= MARKS_MAX);
        assert_eq!(
            timeline.when_exactly(Lsn(end - 999)),
            Some(PgTime((end as i64 - 1_000) * 5_000))
        );
        assert_eq!(timeline.marks[0].position, Lsn(1));
        assert_eq!(timeline.commands_after(Lsn(end - 10)), Some((10, true)));
        for nth in [500, 10_000, 500_000, 900_000, 990_000] {
            let (age, truly) = ((end - nth) as i64 * 5_000, nth as i64 * 5_000);
            let told = timeline.when(Lsn(nth + 1)).unwrap().0;
            assert!((truly..=truly + 700 + age / 50).contains(&told), "{nth}: {told}");
            let (commands, _) = timeline.commands_after(Lsn(nth + 1)).unwrap();
            let truly = end - 1 - nth;
            assert!((truly..=truly + truly / 50 + 1).contains(&commands), "{nth}: {commands}");
        }
    }

    #[test]
    fn what_came_long_ago_is_not_told_as_slow() {
        let (mut entered, mut left) = (Timeline::default(), Timeline::default());
        for nth in 0..5_000_u64 {
            entered.note(Lsn(nth + 1), PgTime(nth as i64 * 1_000), nth);
            left.note(Lsn(nth + 1), PgTime(nth as i64 * 1_000 + 10), 0);
        }
        // Only watermarks for many hours.
        for nth in 0..40_000_u64 {
            left.note(Lsn(6_000 + nth), PgTime(5_000_000 + nth as i64 * 2_000_000), 0);
        }
        let now = PgTime(5_000_000 + 40_000 * 2_000_000);
        let told = leg_micros(&entered, &left, Lsn(46_000), now);
        assert!(told.is_none_or(|micros| micros == 10), "{told:?}");
    }

    #[test]
    fn a_clock_that_is_set_back_does_not_make_it_grow() {
        let mut timeline = Timeline::default();
        for nth in 0..50_000_u64 {
            timeline.note(Lsn(nth + 1), PgTime(-(nth as i64) * 1_000), nth);
        }
        assert!(timeline.marks.len() <= MARKS_MAX);
    }
}
