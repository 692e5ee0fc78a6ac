//! Which far end goes on with the mirror.
//!
//! A machine that was copied with its spool, or set back to an earlier state with it, has log of the
//! same principal, and asks for what follows as the spool would that was told of log last. Were it
//! given that, commits would return for what is in the one, and somebody promotes the other. So each
//! session gives the spool a number, which is noted at both ends before anything is acknowledged: of
//! two copies the second one to come still has the number from before.
//!
//! A number is what the clock says, in microseconds, and higher than all that are known here. So it is
//! also higher than what another near end gave the spool before, which had the mirror meanwhile: the
//! far site's own in direct mode, or one beside a former principal. (Where clocks differ by more than
//! the time between, a spool that was begun anew there would be refused here, until it is let in.)
//!
//! What cannot be noted here, or there, is not held against anybody: then a copy is not told.

use super::begun_anew::write_note;
use crate::error::MirrorError;
use crate::relay::message::{Have, Turn};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Turns that the mirror's spool was given.
#[derive(Debug)]
pub struct Turns {
    note: PathBuf,
    state: Mutex<State>,
    /// Held by who writes the note, or removes it.
    writing: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    /// The last one that a far end has noted.
    known: Option<Turn>,
    /// The highest one that was offered, or known.
    highest: u64,
    /// A spool was refused since another one was taken.
    has_refused: bool,
}

impl Turns {
    /// They are noted in this file. Blocks on the disk.
    pub fn noted_in(note: PathBuf) -> Turns {
        let known = match std::fs::read_to_string(&note) {
            Ok(text) => text.trim_end().parse().ok().map(Turn),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => {
                let note = note.display();
                tracing::warn!("a copy of a far end would not be told from it: {note}: {error}");
                None
            }
        };
        let highest = known.map_or(0, |known| known.0);
        let state = Mutex::new(State { known, highest, has_refused: false });
        Turns { note, state, writing: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses a far end whose spool is not the one that went on with the mirror last.
    ///
    /// # Errors
    /// [`MirrorError::CopiedSpool`].
    pub fn check(&self, mirror: &str, have: Option<&Have>) -> Result<(), MirrorError> {
        // One of an earlier version does not say.
        let Some(turn) = have.and_then(|have| have.turn) else { return Ok(()) };
        let mut state = self.state();
        // What is noted here may have been set back, or not have been heard of.
        if state.known.is_none_or(|known| turn >= known) {
            return Ok(());
        }
        state.has_refused = true;
        Err(MirrorError::CopiedSpool { mirror: mirror.to_owned() })
    }

    /// Lets whichever spool asks next go on, if one was refused; others are older than what that is
    /// given then. Blocks on the disk.
    ///
    /// # Errors
    /// The note that cannot be removed.
    pub fn take_any(&self) -> Result<bool, String> {
        if !self.state().has_refused {
            return Ok(false);
        }
        let _one_at_a_time = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        match std::fs::remove_file(&self.note) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(format!("cannot remove {}: {error}", self.note.display()));
            }
            Ok(()) | Err(_) => {}
        }
        let mut state = self.state();
        (state.known, state.has_refused) = (None, false);
        Ok(true)
    }

    /// What a spool is given now.
    pub(super) fn offer(&self, have: Option<&Have>) -> Turn {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let clock = u64::try_from(since.as_micros()).unwrap_or_default();
        let before = have.and_then(|have| have.turn).map_or(0, |turn| turn.0);
        let mut state = self.state();
        state.highest = state.highest.max(before).saturating_add(1).max(clock);
        Turn(state.highest)
    }

    /// The far end has noted it. Log goes on meanwhile, whatever the disk here does.
    pub(super) fn confirm(self: &Arc<Self>, turn: Turn) {
        if self.is_newer(turn) {
            let turns = self.clone();
            tokio::task::spawn_blocking(move || turns.write());
        }
    }

    fn is_newer(&self, turn: Turn) -> bool {
        let mut state = self.state();
        let is_newer = state.known.is_none_or(|known| known < turn);
        if is_newer {
            (state.known, state.has_refused) = (Some(turn), false);
        }
        is_newer
    }

    fn write(&self) {
        let _one_at_a_time = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        // Another one may have come, or been forgotten.
        let Some(Turn(known)) = self.state().known else { return };
        if let Err(error) = write_note(&self.note, &format!("{known}\n")) {
            tracing::warn!(
                "after a restart a copy of the far end would not be told from it: {error}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_model::Lsn;
    use std::path::Path;

    fn have(turn: Option<Turn>) -> Option<Have> {
        let system_id = "7".to_owned();
        Some(Have { system_id, timeline: 1, durable: Lsn(1), tail: None, turn })
    }

    fn turns(folder: &Path) -> Arc<Turns> {
        Arc::new(Turns::noted_in(folder.join("mirrors/m.turn")))
    }

    /// A session of a spool that has noted this before.
    fn session(turns: &Arc<Turns>, before: Option<Turn>) -> Result<Turn, MirrorError> {
        let have = have(before);
        turns.check("m", have.as_ref())?;
        let turn = turns.offer(have.as_ref());
        assert!(turns.is_newer(turn));
        turns.write();
        Ok(turn)
    }

    #[test]
    fn of_two_copies_the_second_to_come_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let near = turns(folder.path());
        // Made before there were turns.
        let first = session(&near, None).unwrap();
        let copied = session(&near, Some(first)).unwrap();
        let real = session(&near, Some(copied)).unwrap();
        for near in [&near, &turns(folder.path())] {
            let refused = session(near, Some(copied)).unwrap_err();
            assert!(!refused.is_transient());
            let text = refused.to_string();
            assert!(text.contains("farshore mirror resume SITE.toml m"), "{text}");
            assert!(near.check("m", have(Some(real)).as_ref()).is_ok());
        }
        // An operator's word, which nobody needs unless one was refused.
        assert!(near.take_any().unwrap());
        assert!(!near.take_any().unwrap());
        let taken = session(&near, Some(copied)).unwrap();
        for other in [copied, real] {
            assert!(session(&near, Some(other)).is_err());
        }
        assert!(session(&near, Some(taken)).is_ok());
    }

    #[test]
    fn a_turn_that_was_not_noted_at_the_far_end_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let near = turns(folder.path());
        let before = session(&near, None).unwrap();
        let offered = near.offer(have(Some(before)).as_ref());
        assert!(near.check("m", have(Some(before)).as_ref()).is_ok());
        // Or it was, and that was not heard here.
        assert!(near.check("m", have(Some(offered)).as_ref()).is_ok());
        let next = session(&near, Some(offered)).unwrap();
        assert!(next > offered);
        // It has lost its note, and was given another one.
        let given = near.offer(have(None).as_ref());
        for near in [&near, &turns(folder.path())] {
            assert!(near.check("m", have(Some(given)).as_ref()).is_ok());
        }
    }

    #[test]
    fn a_near_end_that_was_set_back_takes_who_is_ahead_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let near = turns(folder.path());
        let first = session(&near, None).unwrap();
        let kept = std::fs::read(folder.path().join("mirrors/m.turn")).unwrap();
        let last = session(&near, Some(session(&near, Some(first)).unwrap())).unwrap();
        std::fs::write(folder.path().join("mirrors/m.turn"), kept).unwrap();
        let next = session(&turns(folder.path()), Some(last)).unwrap();
        assert!(next > last);
    }

    /// As in direct mode, or beside another principal.
    #[test]
    fn a_spool_comes_back_from_another_near_end() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (here, there) = (turns(here.path()), turns(there.path()));
        let mut turn = session(&here, None).unwrap();
        for near in [&there, &here, &there, &here] {
            let next = session(near, Some(turn)).unwrap();
            assert!(session(near, Some(turn)).is_err(), "a copy");
            turn = next;
        }
        // It was begun anew there.
        there.check("m", None).unwrap();
        let begun = there.offer(None);
        assert!(begun > turn);
        assert!(here.check("m", have(Some(begun)).as_ref()).is_ok());
    }
}
