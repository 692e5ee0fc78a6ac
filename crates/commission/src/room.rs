//! Free space, and what is left of it to others.

use crate::Error;
use crate::units::bytes;
use std::path::Path;

/// What is left free on a file system at the least, beside a twentieth of it.
const FREE_BYTES_MIN: u64 = 256 << 20;

/// Free space of a file system, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    /// For unprivileged users.
    pub free: u64,
    /// Of all of it.
    pub total: u64,
}

impl Room {
    /// Of the file system that `folder` is on.
    pub(crate) fn of(folder: &Path) -> Result<Room, Error> {
        let status = rustix::fs::statvfs(folder)
            .map_err(|error| Error::file("ask for the free space of", folder)(error.into()))?;
        Ok(Room {
            free: status.f_bavail.saturating_mul(status.f_frsize),
            total: status.f_blocks.saturating_mul(status.f_frsize),
        })
    }

    /// What a measurement leaves to others.
    pub(crate) fn must_stay_free(self) -> u64 {
        FREE_BYTES_MIN.max(self.total / 20)
    }

    /// Whether that much may be taken.
    pub(crate) fn may_take(self, wanted: u64) -> bool {
        self.free >= wanted.saturating_add(self.must_stay_free())
    }
}

/// Refuses to take the last room of the file system that `folder` is on: `what` is to take `wanted`
/// bytes of it, and `instead` is what to do where there is too little.
///
/// # Errors
/// [`Error::Refused`] where there is too little, and the system's where it cannot be asked.
pub fn ensure(folder: &Path, wanted: u64, what: &str, instead: &str) -> Result<(), Error> {
    let room = Room::of(folder)?;
    if room.may_take(wanted) {
        return Ok(());
    }
    Err(Error::Refused(format!(
        "there is too little room in {}: {} are free, {what} takes {} and {} must stay free; {instead}",
        folder.display(),
        bytes(room.free),
        bytes(wanted),
        bytes(room.must_stay_free())
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_room_of_a_disk_is_not_taken() {
        let small = Room { free: 1 << 30, total: 2 << 30 };
        assert_eq!(small.must_stay_free(), FREE_BYTES_MIN);
        assert!(small.may_take(512 << 20) && !small.may_take(800 << 20));
        assert!(!small.may_take(u64::MAX));
        let large = Room { free: 60 << 30, total: 1 << 40 };
        assert!(large.may_take(8 << 30) && !large.may_take(9 << 30));
    }
}
