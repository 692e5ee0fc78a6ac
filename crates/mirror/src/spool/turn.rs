//! A note of the spool's last turn with its near end, by which a copy of the folder is told from it
//! ([`crate::receive`]).

use super::{SpoolError, folder};
use crate::relay::message::Turn;
use std::path::Path;

pub(super) const TURN: &str = "turn";

fn encode(turn: Turn) -> String {
    let text = format!("turn {}\n", turn.0);
    let crc = crc32c::crc32c(text.as_bytes());
    format!("{text}crc32c {crc:08x}\n")
}

fn decode(text: &str) -> Option<Turn> {
    let turn = Turn(text.lines().next()?.strip_prefix("turn ")?.parse().ok()?);
    (encode(turn) == text).then_some(turn)
}

/// Durable when this returns.
pub(super) fn write(folder: &Path, turn: Turn) -> Result<(), SpoolError> {
    folder::replace(&folder.join(TURN), encode(turn).as_bytes())
}

/// `None` if there is none, or it cannot be read: another one is given then.
pub(super) fn read(folder: &Path) -> Option<Turn> {
    let path = folder.join(TURN);
    match std::fs::read(&path) {
        Ok(bytes) => {
            let turn = decode(&String::from_utf8_lossy(&bytes));
            if turn.is_none() {
                tracing::warn!("{} is damaged, and is made again", path.display());
            }
            turn
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => {
            tracing::warn!("{} cannot be read, and is made again: {error}", path.display());
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_read_as_it_was_written_and_damage_is_none() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read(folder.path()), None);
        let turn = Turn(u64::MAX - 3);
        write(folder.path(), turn).unwrap();
        assert_eq!(read(folder.path()), Some(turn));
        let other = encode(turn).replacen('2', "3", 1);
        std::fs::write(folder.path().join(TURN), other).unwrap();
        assert_eq!(read(folder.path()), None);
        std::fs::write(folder.path().join(TURN), [0xff; 9]).unwrap();
        assert_eq!(read(folder.path()), None);
    }
}
