//! Which segments go, and making them go.

use super::folder::{index_path, remove, spill_path};
use super::segment::{Segment, lock};
use super::{Log, cursors::CursorState, old_files};
use crate::{Cursor, Retention, StoreError};
use farshore_fault as fault;
use farshore_model::Lsn;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What the decision needs to know of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Facts {
    last: Lsn,
    /// How long ago it was written to last; `None` if the segment has no entries. Not since the
    /// transactions committed: that is the publisher's clock, and what a publisher has kept while
    /// nobody took it is not old here.
    age: Option<Duration>,
    /// The segment with its index and its spills.
    bytes: u64,
}

/// Whether a segment that was written to so long ago is older than the limit allows.
fn too_old(age: Option<Duration>, retention: &Retention) -> bool {
    age.zip(retention.age_max).is_some_and(|(age, age_max)| age > age_max)
}

/// How many of the sealed segments go, oldest first. `needed_after` is the lowest position any
/// cursor has applied.
fn drop_count(sealed: &[Facts], active: Facts, needed_after: Lsn, retention: &Retention) -> usize {
    let mut bytes = active.bytes + sealed.iter().map(|facts| facts.bytes).sum::<u64>();
    let mut count = 0;
    for facts in sealed {
        let too_many = retention.bytes_max.is_some_and(|max| bytes > max);
        if facts.last > needed_after && !too_many && !too_old(facts.age, retention) {
            break;
        }
        bytes -= facts.bytes;
        count += 1;
    }
    count
}

/// Whether the active segment must be sealed first, so that what it holds can go: it is wholly too
/// old, or nobody needs it and it is worth the trouble, or it is a large part of too many bytes.
fn roll_first(
    active: Facts,
    total_bytes: u64,
    needed_after: Lsn,
    retention: &Retention,
    roll_bytes_min: u64,
) -> bool {
    active.age.is_some()
        && (too_old(active.age, retention)
            || (active.last <= needed_after && active.bytes >= roll_bytes_min)
            || retention.bytes_max.is_some_and(|max| total_bytes > max && active.bytes >= max / 4))
}

/// The lowest position that a cursor with a claim has applied.
fn needed_after(state: &CursorState) -> Option<Lsn> {
    let claims = state.by_name.values().filter(|cursor| cursor.expired.is_none());
    claims.map(|cursor| cursor.applied.0).min()
}

impl Log {
    fn facts(&self, segment: &Segment) -> Facts {
        let published = lock(&segment.published);
        let spills = lock(&self.spills);
        let spilled = published.spills.iter().filter_map(|spill| spills.finished.get(spill));
        let has_entries = published.commit_times.is_some();
        Facts {
            last: published.last,
            age: has_entries.then(|| published.written.age()),
            bytes: published.end + spilled.map(|spill| spill.bytes).sum::<u64>(),
        }
    }

    fn all_facts(&self) -> (Vec<Facts>, Option<Facts>) {
        let segments: Vec<_> = lock(&self.segments.segments).iter().cloned().collect();
        let mut facts: Vec<_> = segments.iter().map(|segment| self.facts(segment)).collect();
        let active = facts.pop();
        (facts, active)
    }

    /// See [`crate::LogStore::enforce_retention`].
    pub fn enforce_retention(&self, retention: &Retention) -> Result<Vec<Cursor>, StoreError> {
        let _one_at_a_time = lock(&self.retaining);
        self.old_files.give_up_unused();
        let (sealed, active) = self.all_facts();
        let claim = needed_after(&lock(&self.cursors.state));
        if let Some(active) = active {
            let total = active.bytes + sealed.iter().map(|facts| facts.bytes).sum::<u64>();
            // Without any claim the active segment is left alone: it will be rolled in its time.
            let applied = claim.unwrap_or(Lsn::ZERO);
            let roll_bytes_min = self.options.roll_bytes_min;
            if roll_first(active, total, applied, retention, roll_bytes_min) {
                self.queue.roll();
            }
        }
        let before = self.segments.start();
        let (sealed, active) = self.all_facts();
        let claim = claim.unwrap_or(Lsn::MAX);
        if active.is_none_or(|active| drop_count(&sealed, active, claim, retention) == 0) {
            return Ok(Vec::new());
        }
        let known_to = self.look_before_dropping();
        let (dropped, expired) = self.take_from_list(retention, known_to.unwrap_or(Lsn::MAX));
        if dropped.is_empty() {
            return Ok(Vec::new());
        }
        // Before any file goes: a cursor on disk must not need what is gone, and one that expired
        // must say so; and the newest transaction is noted if it goes.
        let saved = self
            .note_newest_dropped((before, self.segments.start()), known_to.is_some())
            .and_then(|()| self.cursors.save(Lsn(self.synced_end.load(Ordering::Acquire))));
        if let Err(error) = saved {
            self.put_back(dropped);
            // What they need is there still: whoever is told later must be told then.
            let mut state = lock(&self.cursors.state);
            for cursor in &expired {
                if let Some(kept) = state.by_name.get_mut(&cursor.name) {
                    kept.expired = kept.expired.filter(|at| Some(*at) != cursor.expired);
                }
            }
            drop(state);
            if error.is_out_of_room() {
                self.old_files.give_up();
            }
            return Err(error);
        }
        let old_max = match self.queue.waiting_for_room() {
            Some(_) => 0,
            None => old_files::bytes_max(self.options.segment_bytes, retention.bytes_max),
        };
        let mut dropped = dropped.into_iter();
        while let Some(segment) = dropped.next() {
            if let Err(error) = self.remove_files(&segment, old_max) {
                // Those behind it must not outlive what is dropped later: that would be a hole.
                let first = segment.path.exists().then_some(segment);
                self.put_back(first.into_iter().chain(dropped).collect());
                if expired.is_empty() {
                    return Err(error);
                }
                // That they expired is on the disk, and is told once.
                tracing::warn!("retention: {error}");
                return Ok(expired);
            }
        }
        Ok(expired)
    }

    /// Has segments that were to be dropped, the oldest ones, in the list again.
    fn put_back(&self, dropped: Vec<Arc<Segment>>) {
        let mut segments = lock(&self.segments.segments);
        for segment in dropped.into_iter().rev() {
            segments.push_front(segment);
        }
    }

    /// Decides, expires cursors and takes segments from the list in one step that cursors cannot
    /// move in, so that no cursor moves back to what is about to go. Nothing behind `known_to` goes.
    fn take_from_list(
        &self,
        retention: &Retention,
        known_to: Lsn,
    ) -> (Vec<Arc<Segment>>, Vec<Cursor>) {
        let mut state = lock(&self.cursors.state);
        let (sealed, active) = self.all_facts();
        let Some(active) = active else { return (Vec::new(), Vec::new()) };
        let claim = needed_after(&state).unwrap_or(Lsn::MAX);
        let known = sealed.iter().take_while(|facts| facts.last <= known_to).count();
        let count = drop_count(&sealed, active, claim, retention).min(known);
        let (dropped, start) = {
            let mut segments = lock(&self.segments.segments);
            let dropped: Vec<_> = segments.drain(..count).collect();
            (dropped, segments.front().map_or(Lsn::ZERO, |segment| segment.start))
        };
        let mut expired = Vec::new();
        if !dropped.is_empty() {
            for cursor in state.by_name.values_mut() {
                if cursor.expired.is_none() && cursor.applied.0 < start {
                    cursor.expired = Some(start);
                    expired.push(cursor.clone());
                }
            }
            // Also when no cursor expired: those on disk may lag behind what is dropped now.
            state.version += 1;
        }
        (dropped, expired)
    }

    /// The segment first, and durably: an entry must not outlive the spill it names.
    fn remove_files(&self, segment: &Segment, old_max: u64) -> Result<(), StoreError> {
        fault::point("store.before-drop");
        self.old_files.put_away(&segment.path, old_max)?;
        let spills = std::mem::take(&mut lock(&segment.published).spills);
        remove(&index_path(&segment.path))?;
        for spill in spills {
            lock(&self.spills).finished.remove(&spill);
            remove(&spill_path(&self.dir, spill))?;
        }
        fault::point("store.after-drop");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(last: u64, age: u64, bytes: u64) -> Facts {
        Facts { last: Lsn(last), age: Some(Duration::from_secs(age)), bytes }
    }

    #[test]
    fn only_what_all_cursors_applied_goes() {
        let sealed = [facts(10, 0, 5), facts(20, 0, 5), facts(30, 0, 5)];
        let active = facts(40, 0, 5);
        let none = Retention::default();
        for (needed, count) in [(0, 0), (9, 0), (10, 1), (29, 2), (30, 3), (u64::MAX, 3)] {
            assert_eq!(drop_count(&sealed, active, Lsn(needed), &none), count);
        }
    }

    #[test]
    fn limits_override_claims_oldest_first() {
        let sealed = [facts(10, 6, 5), facts(20, 5, 5), facts(30, 3, 5)];
        let active = facts(40, 2, 5);
        let bytes = Retention { bytes_max: Some(11), age_max: None };
        assert_eq!(drop_count(&sealed, active, Lsn(0), &bytes), 2);
        let age = Retention { bytes_max: None, age_max: Some(Duration::from_secs(3)) };
        assert_eq!(drop_count(&sealed, active, Lsn(0), &age), 2);
    }

    #[test]
    fn the_active_segment_is_rolled_only_when_that_helps() {
        let none = Retention::default();
        let roll = |active, total, needed, retention: &Retention| {
            roll_first(active, total, Lsn(needed), retention, 10)
        };
        assert!(!roll(facts(5, 0, 9), 9, 5, &none), "not worth the trouble");
        assert!(roll(facts(5, 0, 10), 10, 5, &none));
        assert!(!roll(facts(5, 0, 10), 10, 4, &none), "still needed");
        assert!(!roll(Facts { age: None, ..facts(5, 0, 99) }, 99, 5, &none), "empty");
        let bytes = Retention { bytes_max: Some(40), age_max: None };
        assert!(roll(facts(5, 0, 10), 41, 0, &bytes));
        assert!(!roll(facts(5, 0, 9), 41, 0, &bytes), "the sealed ones are the bulk");
    }
}
