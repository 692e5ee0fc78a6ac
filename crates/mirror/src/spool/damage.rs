//! Looking for damage: whether what was durable is still there and sound.

use super::recovery::{self, LookFrom};
use super::{Positions, Spool, SpoolError, noted};
use crate::wal::{Segment, Timeline};
use farshore_model::Lsn;
use std::sync::MutexGuard;

/// How far damage was looked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Looked {
    /// What came before this was looked at, or is no concern of this node's.
    durable: Lsn,
    /// A whole record ends here, and everything before it was sound; `None` if that is not known.
    sound_to: Option<(Timeline, Lsn)>,
    /// Since the spool was opened.
    is_current: bool,
}

impl Looked {
    /// Of a spool that was just opened: recovery reads the newest segment alone. What was noted last
    /// was sound; without a note, nothing was looked at since it was begun.
    pub fn since(noted: Option<Lsn>, begin: Lsn, positions: Positions) -> Looked {
        let durable = noted.unwrap_or(begin).min(positions.durable);
        Looked { durable, sound_to: None, is_current: false }
    }
}

/// What was found when damage was looked for last.
#[derive(Clone, Debug)]
pub(super) struct Damage {
    error: SpoolError,
    /// Log behind it is taken to be here. If not, what comes next is what is damaged: a start found
    /// that less is here than was noted.
    is_within: bool,
}

impl Spool {
    /// The end of the last whole record among what is durable: a server that has all of this log
    /// can replay up to there. The durable position itself where that cannot be told. Blocks on
    /// the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`]; [`SpoolError::Damaged`] if records that were durable are not sound, or
    /// are not there any more.
    pub fn last_record_end(&self) -> Result<Lsn, SpoolError> {
        let positions = *self.shared.positions.borrow();
        Ok(self.checked_record_end(positions, LookFrom::Newest)?.unwrap_or(positions.durable))
    }

    /// Reads everything from the segment on that holds `from`, and checks every record of it.
    /// Blocks on the disk.
    ///
    /// # Errors
    /// As [`Spool::last_record_end`].
    pub fn check_from(&self, from: Lsn) -> Result<(), SpoolError> {
        let positions = *self.shared.positions.borrow();
        self.checked_record_end(positions, LookFrom::SegmentOf(from)).map(drop)
    }

    fn checked_record_end(
        &self,
        positions: Positions,
        from: LookFrom,
    ) -> Result<Option<Lsn>, SpoolError> {
        let end = self.scanned_record_end(positions, from)?;
        match end.and_then(|end| self.lacks_of_noted(positions, end)) {
            Some(damage) => Err(damage),
            None => Ok(end),
        }
    }

    /// By what is here.
    fn scanned_record_end(
        &self,
        positions: Positions,
        from: LookFrom,
    ) -> Result<Option<Lsn>, SpoolError> {
        let size = self.identity().segment;
        let end = loop {
            let changes = self.shared.forgotten.changes();
            match recovery::last_record_end(self.folder(), size, positions, from) {
                // Another segment's log was written to a file that was being read.
                Ok(None) | Err(_) if self.shared.forgotten.changes() != changes => {}
                end => break end?,
            }
        };
        // A record is followed by up to 7 bytes that mean nothing.
        Ok(end.map(|end| end.min(positions.durable)))
    }

    /// By what was noted: less is here.
    fn lacks_of_noted(&self, positions: Positions, end: Lsn) -> Option<SpoolError> {
        let durable = self.noted().filter(|noted| *noted > end)?;
        let size = self.identity().segment;
        let newest = Segment { timeline: positions.timeline, number: size.number(end) };
        let path = self.folder().join(newest.file_name(size));
        Some(SpoolError::Damaged { path, position: end, sound_to: end, durable })
    }

    /// Notes how far whole records are durable by now, for a later start to tell damage by; and
    /// looks for damage. Reads what came since it last did, or the newest segment, so it is for now
    /// and then. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn note_durable(&self) -> Result<(), SpoolError> {
        let durable = self.shared.positions.borrow().durable;
        // Idle, and sound when it was looked at.
        if self.looked().durable == durable && self.damage().is_none() {
            return Ok(());
        }
        match self.look_for_damage() {
            Some(end) if self.noted().is_none_or(|before| before < end) => {
                noted::write(self.folder(), end)?;
                *self.noted() = Some(end);
                Ok(())
            }
            Some(_) | None => Ok(()),
        }
    }

    fn looked(&self) -> MutexGuard<'_, Looked> {
        self.looked.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// What was durable and is not sound, as last looked at. What a start did not find is received
    /// again if the principal has it.
    pub fn damage(&self) -> Option<SpoolError> {
        self.known_damage().as_ref().map(|damage| damage.error.clone())
    }

    /// Damage that log lies behind, and its end: who has flushed more does not need it.
    pub fn damage_within(&self) -> Option<(SpoolError, Lsn)> {
        let known = self.known_damage();
        let damage = known.as_ref().filter(|damage| damage.is_within)?;
        let SpoolError::Damaged { position, .. } = &damage.error else { return None };
        Some((damage.error.clone(), *position))
    }

    /// Looks for damage if that was not done since the spool was opened: recovery reads the newest
    /// segment alone. Blocks on the disk.
    pub fn look_once(&self) {
        if !self.looked().is_current {
            self.look_for_damage();
        }
    }

    fn known_damage(&self) -> MutexGuard<'_, Option<Damage>> {
        self.damage.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Looks for damage; the end of the last whole record, if it can be told and everything is sound.
    /// Blocks on the disk.
    pub(super) fn look_for_damage(&self) -> Option<Lsn> {
        let positions = *self.shared.positions.borrow();
        let Positions { timeline, durable, .. } = positions;
        let before = *self.looked();
        let size = self.identity().segment;
        let known = self.damage();
        // It is damaged until that is sound, or nobody needs it and it was removed.
        let bad = match &known {
            Some(SpoolError::Damaged { sound_to, position, .. })
                if !self.is_forgotten(timeline, *position) =>
            {
                Some(*sound_to)
            }
            Some(_) | None => None,
        };
        let from = match (bad, before.sound_to) {
            (Some(sound_to), _) => LookFrom::SegmentOf(sound_to),
            // A segment is read as a whole once it is complete.
            (_, Some((of, end))) if of == timeline && size.number(end) < size.number(durable) => {
                LookFrom::SegmentOf(end)
            }
            (_, Some((of, end))) if of == timeline && end <= durable => LookFrom::Record(end),
            _ => LookFrom::SegmentOf(before.durable),
        };
        let found = match self.scanned_record_end(positions, from) {
            // It cannot be told.
            Ok(None) if bad.is_some() => return None,
            Ok(end) => {
                let lacks = end.and_then(|end| self.lacks_of_noted(positions, end));
                match lacks {
                    Some(error) => Err(Damage { error, is_within: false }),
                    None => Ok(end),
                }
            }
            Err(error @ SpoolError::Damaged { .. }) => Err(Damage { error, is_within: true }),
            // A segment that was removed meanwhile, or a disk that says no: the next look begins
            // where this one did.
            Err(error) => {
                tracing::warn!("what came to the spool last was not looked at: {error}");
                return None;
            }
        };
        let (end, damage) = match found {
            Ok(end) => {
                // A record begins at a multiple of 8, which may not have come yet.
                let sound_to = end.map(|end| (timeline, Lsn(end.0.next_multiple_of(8))));
                *self.looked() = Looked { durable, sound_to, is_current: true };
                (end, None)
            }
            Err(damage) => {
                *self.looked() = Looked { durable, sound_to: None, is_current: true };
                (None, Some(damage))
            }
        };
        match (&damage, &known) {
            (Some(damage), None) => tracing::warn!("{}", damage.error),
            (None, Some(_)) if bad.is_none() => {
                tracing::info!("what was damaged was removed with other log that nobody needs");
            }
            (None, Some(_)) => tracing::info!("what was damaged is there again, and sound"),
            (Some(_), Some(_)) | (None, None) => {}
        }
        let is_damaged = damage.is_some();
        *self.known_damage() = damage;
        if is_damaged {
            // Who tells the near end what is durable looks at the damage first.
            self.shared.positions.send_modify(|_| {});
        }
        end
    }

    fn is_forgotten(&self, timeline: Timeline, position: Lsn) -> bool {
        let number = self.identity().segment.number(position);
        // Of an older timeline, with the next one at the latest.
        self.shared.forgotten.has(Segment { timeline, number })
    }

    fn noted(&self) -> MutexGuard<'_, Option<Lsn>> {
        self.noted.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
