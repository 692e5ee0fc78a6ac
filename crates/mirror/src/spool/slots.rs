//! Slots of the standbys that stream from a spool: how far each has come, kept over restarts.

use super::{SpoolError, folder};
use crate::wal::SegmentBytes;
use farshore_model::Lsn;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

/// A slot's name, as PostgreSQL allows it: 1 to 63 lower-case letters, digits and underscores.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SlotName(String);

impl SlotName {
    /// `None` for what cannot be one.
    pub fn new(name: &str) -> Option<SlotName> {
        let fits = (1..=63).contains(&name.len())
            && name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
        fits.then(|| SlotName(name.to_owned()))
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SlotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A slot of a standby, as `status` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotView {
    /// Its name.
    pub name: SlotName,
    /// The log is kept from here on; `None` if it was never used, or is lost.
    pub restart: Option<Lsn>,
    /// It kept more than it may, and keeps nothing any more.
    pub is_lost: bool,
}

/// One line per slot, `name position` (`-` if it was never used, `lost` if it keeps nothing any
/// more), then `crc32c` of all before.
#[derive(Debug, Default)]
pub(super) struct Slots {
    /// The log is kept from here on; `None` if the slot was never used, or is lost.
    restart: BTreeMap<SlotName, Option<Lsn>>,
    /// Of those, the ones that are lost.
    lost: BTreeSet<SlotName>,
    /// The same, of slots that live as long as a session, and with the session's number: never in
    /// the file.
    temporary: BTreeMap<SlotName, (u64, Option<Lsn>)>,
    next: u64,
}

impl Slots {
    pub fn load(dir: &Path) -> Result<Slots, SpoolError> {
        let path = dir.join(folder::SLOTS);
        match std::fs::read_to_string(&path) {
            Ok(text) => Slots::decode(&text)
                .ok_or_else(|| SpoolError::State { path, what: "no list of slots".to_owned() }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Slots::default()),
            Err(error) => Err(SpoolError::io("read", &path)(error)),
        }
    }

    fn encode(&self) -> String {
        let mut text = String::new();
        for (name, restart) in &self.restart {
            let unused = if self.lost.contains(name) { "lost" } else { "-" };
            let restart = restart.map_or(unused.to_owned(), |restart| restart.to_string());
            text.push_str(&format!("{name} {restart}\n"));
        }
        let crc = crc32c::crc32c(text.as_bytes());
        text.push_str(&format!("crc32c {crc:08x}\n"));
        text
    }

    fn decode(text: &str) -> Option<Slots> {
        let (lines, last) = text.strip_suffix('\n')?.rsplit_once('\n').map_or_else(
            || (String::new(), text.trim_end()),
            |(lines, last)| (format!("{lines}\n"), last),
        );
        let stated = u32::from_str_radix(last.strip_prefix("crc32c ")?, 16).ok()?;
        if crc32c::crc32c(lines.as_bytes()) != stated {
            return None;
        }
        let mut slots = Slots::default();
        for line in lines.lines() {
            let (name, position) = line.split_once(' ')?;
            let name = SlotName::new(name)?;
            let position = match position {
                "-" => None,
                "lost" => {
                    slots.lost.insert(name.clone());
                    None
                }
                position => Some(position.parse().ok()?),
            };
            slots.restart.insert(name, position);
        }
        Some(slots)
    }

    fn save(&self, dir: &Path) -> Result<(), SpoolError> {
        folder::replace(&dir.join(folder::SLOTS), self.encode().as_bytes())
    }

    pub fn create(
        &mut self,
        dir: &Path,
        name: &SlotName,
        restart: Option<Lsn>,
    ) -> Result<bool, SpoolError> {
        if self.get(name).is_some() {
            return Ok(false);
        }
        self.restart.insert(name.clone(), restart);
        self.save(dir).map(|()| true)
    }

    /// Its number; `None` if there is a slot of that name.
    pub fn create_temporary(&mut self, name: &SlotName, restart: Option<Lsn>) -> Option<u64> {
        if self.get(name).is_some() {
            return None;
        }
        let number = self.next;
        self.next += 1;
        self.temporary.insert(name.clone(), (number, restart));
        Some(number)
    }

    /// Unless it is another of that name by now.
    pub fn remove_temporary(&mut self, name: &SlotName, number: u64) {
        if self.temporary.get(name).is_some_and(|(found, _)| *found == number) {
            self.temporary.remove(name);
        }
    }

    pub fn remove(&mut self, dir: &Path, name: &SlotName) -> Result<bool, SpoolError> {
        if self.temporary.remove(name).is_some() {
            return Ok(true);
        }
        if self.restart.remove(name).is_none() {
            return Ok(false);
        }
        self.lost.remove(name);
        self.save(dir).map(|()| true)
    }

    /// Slots that keep log from before `bound` keep nothing from now on; which. They are lost also
    /// where that cannot be saved: for want of room, perhaps, which their log will give.
    pub fn lose(&mut self, dir: &Path, bound: Lsn) -> Vec<SlotName> {
        let is_over = |restart: &Option<Lsn>| restart.is_some_and(|restart| restart < bound);
        let over: Vec<SlotName> = self
            .restart
            .iter()
            .filter(|(_, restart)| is_over(restart))
            .map(|(name, _)| name.clone())
            .collect();
        if over.is_empty() {
            return over;
        }
        for name in &over {
            self.restart.insert(name.clone(), None);
            self.lost.insert(name.clone());
        }
        if let Err(error) = self.save(dir) {
            tracing::error!(%error, "that slots are lost is not saved yet; it is known until a restart");
        }
        over
    }

    pub fn is_lost(&self, name: &SlotName) -> bool {
        self.lost.contains(name)
    }

    /// All but temporary ones.
    pub fn views(&self) -> Vec<SlotView> {
        let view = |(name, restart): (&SlotName, &Option<Lsn>)| SlotView {
            name: name.clone(),
            restart: *restart,
            is_lost: self.lost.contains(name),
        };
        self.restart.iter().map(view).collect()
    }

    pub fn get(&self, name: &SlotName) -> Option<Option<Lsn>> {
        let temporary = self.temporary.get(name).map(|(_, restart)| *restart);
        temporary.or_else(|| self.restart.get(name).copied())
    }

    /// Where that cannot be saved it counts all the same: for want of room, perhaps, which the
    /// segments will give that it needs no more. After a restart it keeps what is left of them.
    pub fn advance(&mut self, dir: &Path, name: &SlotName, flushed: Lsn, size: SegmentBytes) {
        if self.lost.contains(name) {
            return;
        }
        let (restart, is_kept) = match (self.temporary.get_mut(name), self.restart.get_mut(name)) {
            (Some((_, restart)), _) => (restart, false),
            (None, Some(restart)) => (restart, true),
            (None, None) => return,
        };
        // Whole segments are kept and dropped, so no more needs to be known.
        let flushed = size.floor(flushed);
        if restart.is_some_and(|restart| restart >= flushed) {
            return;
        }
        *restart = Some(flushed);
        if is_kept && let Err(error) = self.save(dir) {
            tracing::warn!(slot = %name, "what the slot has is not saved yet: {error}");
        }
    }

    pub fn oldest(&self) -> Option<Lsn> {
        let temporary = self.temporary.values().map(|(_, restart)| restart);
        self.restart.values().chain(temporary).flatten().min().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_that_is_lost_stays_so_until_it_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let size = SegmentBytes::new(1 << 20).unwrap();
        let names = ["behind", "level", "unused"].map(|name| SlotName::new(name).unwrap());
        let [behind, level, unused] = &names;
        let mut slots = Slots::default();
        slots.create(dir.path(), behind, Some(Lsn(1 << 20))).unwrap();
        slots.create(dir.path(), level, Some(Lsn(3 << 20))).unwrap();
        slots.create(dir.path(), unused, None).unwrap();
        assert_eq!(slots.lose(dir.path(), Lsn(1 << 20)), []);
        assert_eq!(slots.lose(dir.path(), Lsn(3 << 20)), std::slice::from_ref(behind));
        assert_eq!(slots.lose(dir.path(), Lsn(3 << 20)), [], "once");
        // Its standby may be in the middle of a stream.
        slots.advance(dir.path(), behind, Lsn(2 << 20), size);
        let mut again = Slots::load(dir.path()).unwrap();
        assert_eq!(again.views(), slots.views());
        let lost: Vec<bool> = again.views().iter().map(|view| view.is_lost).collect();
        assert_eq!(lost, [true, false, false]);
        assert_eq!((again.get(behind), again.oldest()), (Some(None), Some(Lsn(3 << 20))));
        assert!(!again.create(dir.path(), behind, None).unwrap());
        assert!(again.remove(dir.path(), behind).unwrap() && !again.is_lost(behind));
        assert!(again.create(dir.path(), behind, Some(Lsn(4 << 20))).unwrap());
        assert!(!Slots::load(dir.path()).unwrap().is_lost(behind));
    }

    #[test]
    fn slots_are_kept_and_damage_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let size = SegmentBytes::new(1 << 20).unwrap();
        let (a, b) = (SlotName::new("a").unwrap(), SlotName::new("b_1").unwrap());
        let mut slots = Slots::load(dir.path()).unwrap();
        assert!(slots.create(dir.path(), &a, None).unwrap());
        assert!(!slots.create(dir.path(), &a, None).unwrap());
        assert!(slots.create(dir.path(), &b, Some(Lsn(5 << 20))).unwrap());
        slots.advance(dir.path(), &a, Lsn((3 << 20) + 7), size);
        slots.advance(dir.path(), &b, Lsn(1 << 20), size);
        let again = Slots::load(dir.path()).unwrap();
        assert_eq!(again.restart, slots.restart);
        assert_eq!(again.get(&a), Some(Some(Lsn(3 << 20))));
        assert_eq!(again.oldest(), Some(Lsn(3 << 20)));
        let text = again.encode();
        assert!(Slots::decode(&text.replace("300000", "400000")).is_none());
        for len in 0..text.len() {
            assert!(Slots::decode(&text[..len]).is_none(), "{len}");
        }
        // A temporary one is a slot like another, and leaves nothing behind.
        let c = SlotName::new("c").unwrap();
        let number = slots.create_temporary(&c, Some(Lsn(1 << 20))).unwrap();
        assert!(!slots.create(dir.path(), &c, None).unwrap());
        assert_eq!(slots.create_temporary(&a, None), None);
        assert_eq!(slots.oldest(), Some(Lsn(1 << 20)));
        slots.advance(dir.path(), &c, Lsn(2 << 20), size);
        assert_eq!(slots.get(&c), Some(Some(Lsn(2 << 20))));
        slots.advance(dir.path(), &b, Lsn(6 << 20), size);
        assert_eq!(Slots::load(dir.path()).unwrap().get(&c), None);
        assert!(slots.remove(dir.path(), &c).unwrap());
        let another = slots.create_temporary(&c, None).unwrap();
        slots.remove_temporary(&c, number);
        assert_eq!(slots.get(&c), Some(None), "it was another one's");
        slots.remove_temporary(&c, another);
        assert_eq!(slots.get(&c), None);
        assert!(slots.remove(dir.path(), &a).unwrap() && slots.remove(dir.path(), &b).unwrap());
        assert_eq!(Slots::load(dir.path()).unwrap().oldest(), None);
        for name in ["", "A", "a b", "a-b"] {
            assert_eq!(SlotName::new(name), None, "{name}");
        }
    }

    #[test]
    fn a_slot_moves_on_where_that_cannot_be_saved() {
        let dir = tempfile::tempdir().unwrap();
        let size = SegmentBytes::new(1 << 20).unwrap();
        let name = SlotName::new("standby").unwrap();
        let mut slots = Slots::default();
        slots.create(dir.path(), &name, Some(Lsn(1 << 20))).unwrap();
        slots.advance(&dir.path().join("gone"), &name, Lsn(3 << 20), size);
        assert_eq!(slots.oldest(), Some(Lsn(3 << 20)));
        slots.advance(dir.path(), &name, Lsn(4 << 20), size);
        assert_eq!(Slots::load(dir.path()).unwrap().oldest(), Some(Lsn(4 << 20)));
    }
}
