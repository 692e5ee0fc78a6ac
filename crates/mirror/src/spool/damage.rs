//! Looking for damage: whether what was durable is still there and sound.

use super::recovery::{self, LookFrom, ToReplay};
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
    /// What ends before `durable` is damaged.
    is_behind_damage: bool,
    /// Since the spool was opened.
    is_current: bool,
}

impl Looked {
    /// Of a spool that was just opened: recovery reads the newest segment alone. What was noted last
    /// was sound; without a note, nothing was looked at since it was begun.
    pub fn since(noted: Option<Lsn>, begin: Lsn, positions: Positions) -> Looked {
        let durable = noted.unwrap_or(begin).min(positions.durable);
        Looked { durable, sound_to: None, is_behind_damage: false, is_current: false }
    }

    /// All of it was sound, and its last whole record ends at `end`.
    fn saw(&mut self, positions: Positions, end: Lsn) {
        (self.durable, self.is_behind_damage) = (positions.durable, false);
        // A record begins at a multiple of 8, which may not have come yet.
        self.sound_to = Some((positions.timeline, Lsn(end.0.next_multiple_of(8))));
    }
}

/// What was found when damage was looked for last.
#[derive(Clone, Debug, Default)]
pub(super) struct Damages {
    /// Records that are not sound, with log behind them, in their order; each is
    /// [`SpoolError::Damaged`].
    within: Vec<SpoolError>,
    /// A start found that less is here than was noted: what comes next is what is damaged.
    lacking: Option<SpoolError>,
}

/// More are not kept apart: the first and the newest are.
const DAMAGES_MAX: usize = 16;

impl Damages {
    /// The one that most standbys need.
    fn newest(&self) -> Option<&SpoolError> {
        self.lacking.as_ref().or(self.within.last())
    }

    /// Notes one that is further back than those known so far, or one of them.
    fn push(&mut self, damage: SpoolError) {
        self.within.retain(|known| position(known) < position(&damage));
        if self.within.len() == DAMAGES_MAX {
            self.within.remove(1);
        }
        self.within.push(damage);
    }

    fn has(&self, damage: &SpoolError) -> bool {
        self.within.iter().any(|known| position(known) == position(damage))
    }
}

/// Where it is; zero for what is no damage.
fn position(damage: &SpoolError) -> Lsn {
    if let SpoolError::Damaged { position, .. } = damage { *position } else { Lsn::ZERO }
}

/// Where the record begins that is not sound; zero for what is no damage.
fn sound_to(damage: &SpoolError) -> Lsn {
    if let SpoolError::Damaged { sound_to, .. } = damage { *sound_to } else { Lsn::ZERO }
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

    /// What a server needs that has replayed everything before `from`, to replay up to `end`. Blocks
    /// on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn to_replay(&self, from: Lsn, end: Lsn) -> Result<ToReplay, SpoolError> {
        let timeline = self.shared.positions.borrow().timeline;
        loop {
            let changes = self.shared.forgotten.changes();
            let found =
                recovery::to_replay(self.folder(), self.identity().segment, timeline, (from, end));
            // Another segment's log was written to a file that was being read.
            if self.shared.forgotten.changes() == changes {
                return found;
            }
        }
    }

    /// Goes back to the last whole record, as a start would after a crash, where a record that never
    /// ended is all that is behind it: the principal goes on from `left_at`. To where, if it did. Nobody
    /// may hand log over meanwhile. Blocks on the disk.
    ///
    /// # Errors
    /// As [`Spool::last_record_end`].
    pub fn give_up_unfinished(&self, left_at: Lsn) -> Result<Option<Lsn>, SpoolError> {
        let positions = *self.shared.positions.borrow();
        let durable = positions.durable;
        let segment = self.identity().segment.floor(durable);
        if left_at < segment {
            return Ok(None);
        }
        // A start keeps whole segments, whatever ends in the next one.
        let end = self.last_record_end()?.max(segment);
        if end > left_at || end >= durable {
            return Ok(None);
        }
        let mut writer = self.writer.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if !writer.go_back(positions, end)? {
            return Ok(None);
        }
        drop(writer);
        tracing::info!(
            folder = %self.folder().display(), was = %durable, %end,
            "the part of a record that never ended is given up"
        );
        let positions = *self.shared.positions.borrow();
        *self.looked() = Looked::since(*self.noted(), self.begin, positions);
        Ok(Some(end))
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

    /// What was durable and is not sound, as last looked at; the newest, if there are several.
    pub fn damage(&self) -> Option<SpoolError> {
        self.known_damage().newest().cloned()
    }

    /// Damage that log lies behind, the newest, and its end: who has flushed more needs none.
    pub fn damage_within(&self) -> Option<(SpoolError, Lsn)> {
        self.known_damage().within.last().map(|damage| (damage.clone(), position(damage)))
    }

    /// Looks for damage if that was not done since the spool was opened: recovery reads the newest
    /// segment alone. Blocks on the disk.
    pub fn look_once(&self) {
        if !self.looked().is_current {
            self.look_for_damage();
        }
    }

    fn known_damage(&self) -> MutexGuard<'_, Damages> {
        self.damage.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Looks for damage; the end of the last whole record, if it can be told and everything is sound.
    /// Blocks on the disk.
    ///
    /// Behind what is damaged it goes on with the next segment: what is damaged may be needed by
    /// nobody, and what comes later by all.
    pub(super) fn look_for_damage(&self) -> Option<Lsn> {
        let positions = *self.shared.positions.borrow();
        let known = self.known_damage().clone();
        let (mut damages, mut looked) = (Damages::default(), *self.looked());
        let seen = self
            .look_at_known(positions, &known, &mut damages, &mut looked)
            .and_then(|()| self.look_at_rest(positions, &mut damages, &mut looked));
        let end = match seen {
            Ok(end) => end,
            // A segment that was removed meanwhile, or a disk that says no: the next look begins
            // where this one did.
            Err(error) => {
                tracing::warn!("what came to the spool last was not looked at: {error}");
                return None;
            }
        };
        damages.lacking = match end {
            Some(end) => self.lacks_of_noted(positions, end),
            None => known.lacking.clone(),
        };
        looked.is_current = true;
        *self.looked() = looked;
        for damage in damages.within.iter().filter(|damage| !known.has(damage)) {
            tracing::warn!("{damage}");
        }
        match (&damages.lacking, &known.lacking) {
            (Some(damage), None) => tracing::warn!("{damage}"),
            (None, Some(_)) => tracing::info!("what the spool lacked is there again"),
            (Some(_), Some(_)) | (None, None) => {}
        }
        let is_damaged = damages.newest().is_some();
        *self.known_damage() = damages;
        if is_damaged {
            // Who tells the near end what is durable looks at the damage first.
            self.shared.positions.send_modify(|_| {});
        }
        end.filter(|_| !is_damaged)
    }

    /// Whether what was damaged still is. It is until it is sound, or nobody needs it and it was
    /// removed.
    fn look_at_known(
        &self,
        positions: Positions,
        known: &Damages,
        damages: &mut Damages,
        looked: &mut Looked,
    ) -> Result<(), SpoolError> {
        let mut sound_from = None;
        for damage in &known.within {
            if self.is_forgotten(positions.timeline, position(damage)) {
                tracing::info!("what was damaged was removed with other log that nobody needs");
                continue;
            }
            // A look from an earlier one on has come past it.
            if sound_from.is_some()
                || damages.within.last().is_some_and(|last| position(last) > position(damage))
            {
                continue;
            }
            // What reaches into its segment may be other damage.
            let from = match damages.within.is_empty() {
                true => LookFrom::SegmentOf(sound_to(damage)),
                false => LookFrom::FirstOf(sound_to(damage)),
            };
            match self.scanned_record_end(positions, from) {
                Err(found @ SpoolError::Damaged { .. }) => {
                    if position(&found) != position(damage) {
                        tracing::info!("what was damaged is there again, and sound");
                    }
                    damages.push(found);
                }
                // It cannot be told.
                Ok(None) => damages.push(damage.clone()),
                Ok(Some(end)) => {
                    tracing::info!("what was damaged is there again, and sound");
                    sound_from = Some(end);
                }
                Err(error) => return Err(error),
            }
        }
        if let Some(end) = sound_from {
            looked.saw(positions, end);
        }
        Ok(())
    }

    /// What came since the last look; the end of the last whole record of it.
    fn look_at_rest(
        &self,
        positions: Positions,
        damages: &mut Damages,
        looked: &mut Looked,
    ) -> Result<Option<Lsn>, SpoolError> {
        let Positions { timeline, durable, .. } = positions;
        let size = self.identity().segment;
        let behind = |position| size.start(size.number(position) + 1);
        let mut from = match looked.sound_to {
            // A segment is read as a whole once it is complete.
            Some((of, end)) if of == timeline && size.number(end) < size.number(durable) => {
                LookFrom::SegmentOf(end)
            }
            Some((of, end)) if of == timeline && end <= durable => LookFrom::Record(end),
            // Behind what is damaged, no segment has begun yet.
            _ if looked.is_behind_damage && looked.durable >= durable => return Ok(None),
            _ if looked.is_behind_damage => LookFrom::FirstOf(looked.durable),
            _ => LookFrom::SegmentOf(looked.durable),
        };
        loop {
            let (LookFrom::SegmentOf(at) | LookFrom::FirstOf(at) | LookFrom::Record(at)) = from
            else {
                return Ok(None);
            };
            match self.scanned_record_end(positions, from) {
                Ok(Some(end)) => {
                    looked.saw(positions, end);
                    return Ok(Some(end));
                }
                // It cannot be told before more has come.
                Ok(None) if behind(at) > durable => {
                    looked.sound_to = None;
                    return Ok(None);
                }
                // Nor where no record begins in the segment, or its beginning is not to be read.
                Ok(None) => looked.durable = behind(at),
                Err(damage @ SpoolError::Damaged { .. }) => {
                    looked.durable = behind(sound_to(&damage));
                    damages.push(damage);
                }
                Err(error) => return Err(error),
            }
            (looked.sound_to, looked.is_behind_damage) = (None, true);
            if looked.durable >= durable {
                return Ok(None);
            }
            from = LookFrom::FirstOf(looked.durable);
        }
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
