//! Which far end's spool goes on with the mirror.
//!
//! A machine that was copied with its spool, or set back to an earlier state with it, has log of the
//! same principal, and asks for what follows as the spool would that was told of log last. Were it
//! given that, commits would return for what is in the one, and somebody promotes the other. So each
//! session gives the spool a number, which is noted at both ends before anything is acknowledged: of
//! two copies the second one to come still has the number from before.
//!
//! What cannot be noted here, or there, is not held against anybody: then a copy is not told.

use super::begun_anew::write_note;
use crate::error::MirrorError;
use crate::relay::message::{Have, Turn};
use ring::rand::{SecureRandom, SystemRandom};
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Turns that spools were given.
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
    /// The highest number that was offered.
    offered: u64,
    /// A spool was refused since another one was taken.
    has_refused: bool,
}

impl Turns {
    /// They are noted in this file. Blocks on the disk.
    pub fn noted_in(note: PathBuf) -> Turns {
        let known = match std::fs::read_to_string(&note) {
            Ok(text) => decode(&text),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => {
                let note = note.display();
                tracing::warn!("a copy of a far end would not be told from it: {note}: {error}");
                None
            }
        };
        let state = Mutex::new(State { known, ..State::default() });
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
        // What was noted here may have been set back; what it has noted itself was given to it.
        let is_it = |known: Turn| known.spool == turn.spool && turn.number >= known.number;
        if state.known.is_none_or(is_it) {
            return Ok(());
        }
        state.has_refused = true;
        Err(MirrorError::CopiedSpool { mirror: mirror.to_owned() })
    }

    /// Lets whichever spool asks next go on, if one was refused. Blocks on the disk.
    ///
    /// # Errors
    /// The note that cannot be removed.
    pub fn take_any(&self) -> Result<bool, String> {
        if !self.state().has_refused {
            return Ok(false);
        }
        self.forget()?;
        Ok(true)
    }

    fn forget(&self) -> Result<(), String> {
        let _one_at_a_time = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        match std::fs::remove_file(&self.note) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(format!("cannot remove {}: {error}", self.note.display()));
            }
            Ok(()) | Err(_) => {}
        }
        *self.state() = State::default();
        Ok(())
    }

    /// What a spool is given now; `None` if it cannot be given anything that would be known again.
    /// Blocks on the disk for one that begins, or has lost what it was given.
    pub(super) fn offer(&self, have: Option<&Have>) -> Option<Turn> {
        let Some(turn) = have.and_then(|have| have.turn) else {
            // It would be refused beside what is noted, if it was not heard that it has noted this.
            if let Err(error) = self.forget() {
                tracing::warn!("a copy of the far end would not be told from it: {error}");
                return None;
            }
            return Some(Turn { spool: random()?, number: 1 });
        };
        let mut state = self.state();
        if state.known.is_none_or(|known| known.spool != turn.spool) {
            // Whatever number its copies have, they are not it from then on.
            return Some(Turn { spool: random()?, number: 1 });
        }
        state.offered = state.offered.max(turn.number).saturating_add(1);
        Some(Turn { number: state.offered, ..turn })
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
        let is_older = |known: Turn| known.spool != turn.spool || known.number < turn.number;
        let is_newer = state.known.is_none_or(is_older);
        if is_newer {
            (state.known, state.has_refused) = (Some(turn), false);
        }
        is_newer
    }

    fn write(&self) {
        let _one_at_a_time = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        // Another one may have come, or been forgotten.
        let Some(known) = self.state().known else { return };
        if let Err(error) = write_note(&self.note, &encode(known)) {
            tracing::warn!(
                "after a restart a copy of the far end would not be told from it: {error}"
            );
        }
    }
}

fn encode(turn: Turn) -> String {
    format!("{:016x} {}\n", turn.spool, turn.number)
}

fn decode(text: &str) -> Option<Turn> {
    let (spool, number) = text.trim_end().split_once(' ')?;
    Some(Turn { spool: u64::from_str_radix(spool, 16).ok()?, number: number.parse().ok()? })
}

fn random() -> Option<u64> {
    let mut bytes = [0; 8];
    SystemRandom::new().fill(&mut bytes).ok()?;
    Some(u64::from_le_bytes(bytes))
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
        let turn = turns.offer(have.as_ref()).unwrap();
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
        let offered = near.offer(have(Some(before)).as_ref()).unwrap();
        assert!(near.check("m", have(Some(before)).as_ref()).is_ok());
        // Or it was, and that was not heard here.
        assert!(near.check("m", have(Some(offered)).as_ref()).is_ok());
        let next = session(&near, Some(offered)).unwrap();
        assert!(next.number > offered.number);
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
        assert!(next.number > last.number);
    }

    #[test]
    fn a_spool_that_begins_is_another_one() {
        let folder = tempfile::tempdir().unwrap();
        let near = turns(folder.path());
        let first = session(&near, None).unwrap();
        let begun = near.offer(None).unwrap();
        assert_ne!(begun.spool, first.spool);
        // Whatever it noted: what was told is gone with the one before.
        assert!(turns(folder.path()).check("m", have(Some(begun)).as_ref()).is_ok());
        assert!(near.is_newer(begun));
        assert!(near.check("m", have(Some(first)).as_ref()).is_err());
    }

    #[test]
    fn a_spool_that_lost_its_note_is_not_refused_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let near = turns(folder.path());
        session(&near, None).unwrap();
        // It has noted what it was given then, and the session ended before that was heard here.
        let given = near.offer(have(None).as_ref()).unwrap();
        for near in [&near, &turns(folder.path())] {
            assert!(near.check("m", have(Some(given)).as_ref()).is_ok());
        }
    }
}
