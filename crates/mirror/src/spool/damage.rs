//! Looking for damage: whether what was durable is still there and sound.

use super::recovery::{self, LookFrom};
use super::{Positions, Spool, SpoolError, noted};
use crate::wal::{Segment, Timeline};
use farshore_model::Lsn;
use std::sync::MutexGuard;

/// How far damage was looked for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Looked {
    durable: Lsn,
    /// A whole record ends here, and everything before it was sound; `None` if that is not known.
    sound_to: Option<(Timeline, Lsn)>,
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
        let end = end.map(|end| end.min(positions.durable));
        if let (Some(position), Some(durable)) = (end, *self.noted())
            && position < durable
        {
            let number = size.number(position);
            let newest = Segment { timeline: positions.timeline, number };
            let path = self.folder().join(newest.file_name(size));
            return Err(SpoolError::Damaged { path, position, durable });
        }
        Ok(end)
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

    /// What of the newest segment was durable and is not sound, as last looked at. It is received
    /// again if the principal has it.
    pub fn damage(&self) -> Option<SpoolError> {
        self.damage.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    /// The end of the last whole record, if it can be told.
    pub(super) fn look_for_damage(&self) -> Option<Lsn> {
        let positions = *self.shared.positions.borrow();
        let Positions { timeline, durable, .. } = positions;
        let before = *self.looked();
        let size = self.identity().segment;
        let from = match (self.damage(), before.sound_to) {
            // It is damaged until that is sound.
            (Some(SpoolError::Damaged { position, .. }), _) => LookFrom::SegmentOf(position),
            // A segment is read as a whole once it is complete.
            (_, Some((of, end))) if of == timeline && size.number(end) < size.number(durable) => {
                LookFrom::SegmentOf(end)
            }
            (_, Some((of, end))) if of == timeline && end <= durable => LookFrom::Record(end),
            _ => LookFrom::Newest,
        };
        let (end, damage) = match self.checked_record_end(positions, from) {
            Ok(end) => {
                // A record begins at a multiple of 8, which may not have come yet.
                let sound_to = end.map(|end| (timeline, Lsn(end.0.next_multiple_of(8))));
                *self.looked() = Looked { durable, sound_to };
                (end, None)
            }
            Err(error @ SpoolError::Damaged { .. }) => {
                *self.looked() = Looked { durable, sound_to: None };
                (None, Some(error))
            }
            // A segment that was removed meanwhile, or a disk that says no: the next look begins
            // where this one did.
            Err(error) => {
                tracing::warn!("what came to the spool last was not looked at: {error}");
                return None;
            }
        };
        let mut known = self.damage.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        match (&damage, known.is_some()) {
            (Some(damage), false) => tracing::warn!("{damage}"),
            (None, true) => tracing::info!("what was damaged has been received again"),
            (Some(_), true) | (None, false) => {}
        }
        *known = damage;
        end
    }

    fn noted(&self) -> MutexGuard<'_, Option<Lsn>> {
        self.noted.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
