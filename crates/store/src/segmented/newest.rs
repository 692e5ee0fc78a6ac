//! The newest transaction of a log, noted before it leaves: whoever has to know whether a publisher
//! still has what the store had can ask for that one.

use super::Log;
use super::reader::SegmentedReader;
use super::segment::lock;
use crate::{EntryKind, Item, LogReader, NOTE_NEWEST_DROPPED, NOTE_NEWEST_GONE, StoreError};
use farshore_model::{Lsn, PgTime};
use std::sync::atomic::Ordering;

/// So often a log is looked through while retention drops what is being read.
const LOOKS_MAX: u32 = 5;

/// The newest transaction that is durable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Newest {
    /// None was written since the store was opened, and what was there was not looked through.
    #[default]
    NotLookedFor,
    /// Its position and commit time, if there is one.
    Known(Option<(Lsn, PgTime)>),
}

impl Log {
    /// Looks through what was there when the store was opened, unless that was done or there is
    /// something newer. Once, before anything is dropped.
    pub fn look_for_newest(&self) {
        if *lock(&self.newest) != Newest::NotLookedFor {
            return;
        }
        let found = self.newest_in_files(None).unwrap_or_else(|error| {
            // Nothing to compare a publisher with is no reason to keep what may go.
            tracing::warn!("the newest transaction is not known: {error}");
            None
        });
        let mut newest = lock(&self.newest);
        if *newest == Newest::NotLookedFor {
            *newest = Newest::Known(found);
        }
    }

    /// The newest one, if nothing is known of what is newer than `known`. What is dropped while it is
    /// looked through is no answer: it is looked through again.
    fn newest_in_files(
        &self,
        known: Option<(Lsn, PgTime)>,
    ) -> Result<Option<(Lsn, PgTime)>, StoreError> {
        again_while_dropped(|| self.look_through_files(known))
    }

    /// From the newest segment backwards: what came since may be all of the log.
    fn look_through_files(
        &self,
        known: Option<(Lsn, PgTime)>,
    ) -> Result<Option<(Lsn, PgTime)>, StoreError> {
        let starts: Vec<Lsn> =
            lock(&self.segments.segments).iter().map(|segment| segment.start).collect();
        for start in starts.into_iter().rev() {
            // On to the log's end: what comes after it holds no transaction, or is new.
            let newest = self.newest_after(known.map_or(start, |(at, _)| start.max(at)))?;
            if newest.is_some() {
                return Ok(newest);
            }
            if known.is_some_and(|(at, _)| start <= at) {
                return Ok(known);
            }
        }
        // Newer ones may have come since, and gone with it.
        Ok(None)
    }

    fn newest_after(&self, after: Lsn) -> Result<Option<(Lsn, PgTime)>, StoreError> {
        let mut reader = SegmentedReader::open(self.segments.clone(), after)?;
        let mut newest = None;
        while let Some(items) = reader.next_block()? {
            newest = items.iter().rev().find_map(transaction).or(newest);
        }
        Ok(newest)
    }

    /// Of a log that comes from another site too, whose blocks are not looked into as they come.
    pub fn newest_transaction(&self) -> Result<Option<(Lsn, PgTime)>, StoreError> {
        let before = *lock(&self.newest);
        let known = match before {
            Newest::Known(known) => known,
            Newest::NotLookedFor => None,
        };
        let found = self.newest_in_files(known)?;
        let mut newest = lock(&self.newest);
        if *newest == before {
            *newest = Newest::Known(found);
        }
        Ok(found)
    }

    pub fn first_transaction(&self, after: Lsn) -> Result<Option<(Lsn, PgTime)>, StoreError> {
        let mut reader = SegmentedReader::open(self.segments.clone(), after)?;
        while let Some(items) = reader.next_block()? {
            let found = items.iter().filter_map(transaction).find(|(at, _)| *at > after);
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// Looks before something is dropped, and says up to where the newest transaction is known: nothing
    /// behind that may be dropped. `None` if it cannot be told; that keeps nothing.
    pub fn look_before_dropping(&self) -> Option<Lsn> {
        if !self.takes_stored.load(Ordering::Acquire) {
            // What comes is noted as it comes.
            self.look_for_newest();
            return Some(Lsn::MAX);
        }
        let end = lock(&self.segments.segments).back().map(|active| lock(&active.published).last);
        match self.newest_transaction() {
            Ok(_) => end,
            Err(error) => {
                tracing::warn!("the newest transaction is not known: {error}");
                None
            }
        }
    }

    /// Notes the newest transaction if the log, which began at `before` and begins at `start` now,
    /// does not have it any more. `is_known`: none was dropped that is newer than what is known here.
    /// Durable when it returns.
    pub fn note_newest_dropped(
        &self,
        (before, start): (Lsn, Lsn),
        is_known: bool,
    ) -> Result<(), StoreError> {
        let newest = *lock(&self.newest);
        let gone = |(position, commit_time): (Lsn, PgTime)| {
            (NOTE_NEWEST_GONE, format!("{position} {} {start}", commit_time.0))
        };
        match newest {
            Newest::Known(Some((position, commit_time))) if position <= start => {
                let dropped = (NOTE_NEWEST_DROPPED, format!("{position} {}", commit_time.0));
                let gone = is_known.then(|| gone((position, commit_time)));
                self.notes.set_all(std::iter::once(dropped).chain(gone))
            }
            // Of what went now none was a transaction: what was noted before holds up to here.
            Newest::Known(None) if is_known => match self.newest_gone(before) {
                Some(newest) => self.notes.set_all([gone(newest)]),
                None => Ok(()),
            },
            Newest::Known(_) | Newest::NotLookedFor => Ok(()),
        }
    }

    /// The newest transaction of what stood before `start`, where the log begins, if it is known.
    fn newest_gone(&self, start: Lsn) -> Option<(Lsn, PgTime)> {
        let note = self.notes.get(NOTE_NEWEST_GONE)?;
        let mut words = note.split(' ');
        let position = words.next()?.parse().ok()?;
        let commit_time = PgTime(words.next()?.parse().ok()?);
        let known_to: Lsn = words.next()?.parse().ok()?;
        // An earlier version drops more and says nothing.
        (known_to >= start).then_some((position, commit_time))
    }

    /// The newest transaction that the log has or ever had, as far as that is known.
    pub fn newest_transaction_ever(&self) -> Result<Option<(Lsn, PgTime)>, StoreError> {
        let found = self.newest_transaction()?;
        Ok(found.or_else(|| self.newest_gone(self.segments.start())))
    }
}

fn again_while_dropped<T>(look: impl Fn() -> Result<T, StoreError>) -> Result<T, StoreError> {
    for _ in 1..LOOKS_MAX {
        match look() {
            Err(StoreError::Dropped { .. }) => {}
            found => return found,
        }
    }
    look()
}

fn transaction(item: &Item) -> Option<(Lsn, PgTime)> {
    match item {
        Item::Entry(entry) if entry.kind != EntryKind::Watermark => {
            Some((entry.position, entry.commit_time))
        }
        Item::Entry(_) | Item::Definition(..) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::{LOOKS_MAX, again_while_dropped};
    use crate::StoreError;
    use farshore_model::Lsn;
    use std::cell::Cell;

    #[test]
    fn what_is_dropped_meanwhile_is_looked_through_again() {
        let looks = Cell::new(0);
        let dropped_until = |found: u32| {
            looks.set(0);
            again_while_dropped(|| {
                looks.set(looks.get() + 1);
                if looks.get() < found {
                    return Err(StoreError::Dropped { wanted: Lsn(1), start: Lsn(2) });
                }
                Ok(looks.get())
            })
        };
        assert_eq!(dropped_until(1).unwrap(), 1);
        assert_eq!(dropped_until(3).unwrap(), 3);
        assert_eq!(dropped_until(LOOKS_MAX).unwrap(), LOOKS_MAX);
        // Then nothing is known, and nothing is said.
        let gone = dropped_until(LOOKS_MAX + 1);
        assert!(matches!(gone, Err(StoreError::Dropped { .. })), "{gone:?}");
        assert_eq!(looks.get(), LOOKS_MAX);
    }
}
