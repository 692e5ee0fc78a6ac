//! Slots of the standbys that stream from a spool: how far each has come, kept over restarts.

use super::{SpoolError, folder};
use crate::wal::SegmentBytes;
use farshore_model::Lsn;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

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

/// What became of a slot that was to be dropped.
enum Removed {
    None,
    Temporary,
    /// It was one that is saved.
    Saved,
}

/// The slots of a spool, and their file. Whoever looks at them waits for no disk: they change first,
/// and are saved behind that, by one at a time.
#[derive(Debug)]
pub(super) struct KeptSlots {
    folder: PathBuf,
    slots: Mutex<Slots>,
    /// Held by who writes the file.
    saving: Mutex<()>,
}

impl KeptSlots {
    pub fn load(folder: &Path) -> Result<KeptSlots, SpoolError> {
        let slots = Mutex::new(Slots::load(folder)?);
        Ok(KeptSlots { folder: folder.to_owned(), slots, saving: Mutex::default() })
    }

    /// To look at them, or to change what is in no file.
    pub fn now(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Blocks on the disk.
    fn save(&self) -> Result<(), SpoolError> {
        let _turn = self.saving.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        // As they are by now: who waited for the turn saves what others changed meanwhile.
        let text = self.now().encode();
        folder::replace(&self.folder.join(folder::SLOTS), text.as_bytes())
    }

    pub fn create(&self, name: &SlotName, restart: Option<Lsn>) -> Result<bool, SpoolError> {
        let is_made = self.now().create(name, restart);
        if is_made { self.save().map(|()| true) } else { Ok(false) }
    }

    pub fn remove(&self, name: &SlotName) -> Result<bool, SpoolError> {
        let removed = self.now().remove(name);
        match removed {
            Removed::None => Ok(false),
            Removed::Temporary => Ok(true),
            Removed::Saved => self.save().map(|()| true),
        }
    }

    /// They are lost also where that cannot be saved: for want of room, perhaps, which their log
    /// will give.
    pub fn lose(&self, bound: Lsn) -> Vec<SlotName> {
        let over = self.now().lose(bound);
        if !over.is_empty()
            && let Err(error) = self.save()
        {
            tracing::error!(%error, "that slots are lost is not saved yet; it is known until a restart");
        }
        over
    }

    /// Where that cannot be saved it counts all the same: for want of room, perhaps, which the
    /// segments will give that it needs no more. After a restart it keeps what is left of them.
    pub fn advance(&self, name: &SlotName, flushed: Lsn, size: SegmentBytes) {
        let is_saved = self.now().advance(name, flushed, size);
        if is_saved && let Err(error) = self.save() {
            tracing::warn!(slot = %name, "what the slot has is not saved yet: {error}");
        }
    }
}

impl Slots {
    fn load(dir: &Path) -> Result<Slots, SpoolError> {
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

    /// Whether it was made, which is to be saved.
    fn create(&mut self, name: &SlotName, restart: Option<Lsn>) -> bool {
        if self.get(name).is_some() {
            return false;
        }
        self.restart.insert(name.clone(), restart);
        true
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

    fn remove(&mut self, name: &SlotName) -> Removed {
        if self.temporary.remove(name).is_some() {
            return Removed::Temporary;
        }
        if self.restart.remove(name).is_none() {
            return Removed::None;
        }
        self.lost.remove(name);
        Removed::Saved
    }

    /// Slots that keep log from before `bound` keep nothing from now on; which.
    fn lose(&mut self, bound: Lsn) -> Vec<SlotName> {
        let is_over = |restart: &Option<Lsn>| restart.is_some_and(|restart| restart < bound);
        let over: Vec<SlotName> = self
            .restart
            .iter()
            .filter(|(_, restart)| is_over(restart))
            .map(|(name, _)| name.clone())
            .collect();
        for name in &over {
            self.restart.insert(name.clone(), None);
            self.lost.insert(name.clone());
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

    /// Whether that is to be saved.
    fn advance(&mut self, name: &SlotName, flushed: Lsn, size: SegmentBytes) -> bool {
        if self.lost.contains(name) {
            return false;
        }
        let (restart, is_kept) = match (self.temporary.get_mut(name), self.restart.get_mut(name)) {
            (Some((_, restart)), _) => (restart, false),
            (None, Some(restart)) => (restart, true),
            (None, None) => return false,
        };
        // Whole segments are kept and dropped, so no more needs to be known.
        let flushed = size.floor(flushed);
        if restart.is_some_and(|restart| restart >= flushed) {
            return false;
        }
        *restart = Some(flushed);
        is_kept
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
        let slots = KeptSlots::load(dir.path()).unwrap();
        slots.create(behind, Some(Lsn(1 << 20))).unwrap();
        slots.create(level, Some(Lsn(3 << 20))).unwrap();
        slots.create(unused, None).unwrap();
        assert_eq!(slots.lose(Lsn(1 << 20)), []);
        assert_eq!(slots.lose(Lsn(3 << 20)), std::slice::from_ref(behind));
        assert_eq!(slots.lose(Lsn(3 << 20)), [], "once");
        // Its standby may be in the middle of a stream.
        slots.advance(behind, Lsn(2 << 20), size);
        let again = KeptSlots::load(dir.path()).unwrap();
        assert_eq!(again.now().views(), slots.now().views());
        let lost: Vec<bool> = again.now().views().iter().map(|view| view.is_lost).collect();
        assert_eq!(lost, [true, false, false]);
        assert_eq!(again.now().get(behind), Some(None));
        assert_eq!(again.now().oldest(), Some(Lsn(3 << 20)));
        assert!(!again.create(behind, None).unwrap());
        assert!(again.remove(behind).unwrap() && !again.now().is_lost(behind));
        assert!(again.create(behind, Some(Lsn(4 << 20))).unwrap());
        assert!(!Slots::load(dir.path()).unwrap().is_lost(behind));
    }

    #[test]
    fn slots_are_kept_and_damage_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let size = SegmentBytes::new(1 << 20).unwrap();
        let (a, b) = (SlotName::new("a").unwrap(), SlotName::new("b_1").unwrap());
        let slots = KeptSlots::load(dir.path()).unwrap();
        assert!(slots.create(&a, None).unwrap());
        assert!(!slots.create(&a, None).unwrap());
        assert!(slots.create(&b, Some(Lsn(5 << 20))).unwrap());
        slots.advance(&a, Lsn((3 << 20) + 7), size);
        slots.advance(&b, Lsn(1 << 20), size);
        let again = KeptSlots::load(dir.path()).unwrap();
        assert_eq!(again.now().restart, slots.now().restart);
        assert_eq!(again.now().get(&a), Some(Some(Lsn(3 << 20))));
        assert_eq!(again.now().oldest(), Some(Lsn(3 << 20)));
        let text = again.now().encode();
        assert!(Slots::decode(&text.replace("300000", "400000")).is_none());
        for len in 0..text.len() {
            assert!(Slots::decode(&text[..len]).is_none(), "{len}");
        }
        // A temporary one is a slot like another, and leaves nothing behind.
        let c = SlotName::new("c").unwrap();
        let number = slots.now().create_temporary(&c, Some(Lsn(1 << 20))).unwrap();
        assert!(!slots.create(&c, None).unwrap());
        assert_eq!(slots.now().create_temporary(&a, None), None);
        assert_eq!(slots.now().oldest(), Some(Lsn(1 << 20)));
        slots.advance(&c, Lsn(2 << 20), size);
        assert_eq!(slots.now().get(&c), Some(Some(Lsn(2 << 20))));
        slots.advance(&b, Lsn(6 << 20), size);
        assert_eq!(Slots::load(dir.path()).unwrap().get(&c), None);
        assert!(slots.remove(&c).unwrap());
        let another = slots.now().create_temporary(&c, None).unwrap();
        slots.now().remove_temporary(&c, number);
        assert_eq!(slots.now().get(&c), Some(None), "it was another one's");
        slots.now().remove_temporary(&c, another);
        assert_eq!(slots.now().get(&c), None);
        assert!(slots.remove(&a).unwrap() && slots.remove(&b).unwrap());
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
        let slots = KeptSlots::load(dir.path()).unwrap();
        slots.create(&name, Some(Lsn(1 << 20))).unwrap();
        // No file can be made there.
        let new = dir.path().join(folder::SLOTS).with_extension("tmp");
        std::fs::create_dir(&new).unwrap();
        slots.advance(&name, Lsn(3 << 20), size);
        assert_eq!(slots.now().oldest(), Some(Lsn(3 << 20)));
        assert_eq!(Slots::load(dir.path()).unwrap().oldest(), Some(Lsn(1 << 20)));
        std::fs::remove_dir(&new).unwrap();
        slots.advance(&name, Lsn(4 << 20), size);
        assert_eq!(Slots::load(dir.path()).unwrap().oldest(), Some(Lsn(4 << 20)));
    }

    #[test]
    fn who_looks_at_slots_does_not_wait_for_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let size = SegmentBytes::new(1 << 20).unwrap();
        let name = SlotName::new("standby").unwrap();
        let slots = KeptSlots::load(dir.path()).unwrap();
        slots.create(&name, Some(Lsn(1 << 20))).unwrap();
        let writing = slots.saving.lock().unwrap();
        std::thread::scope(|scope| {
            let moving = scope.spawn(|| slots.advance(&name, Lsn(2 << 20), size));
            while slots.now().oldest() != Some(Lsn(2 << 20)) {
                std::thread::yield_now();
            }
            assert!(!moving.is_finished(), "it was saved meanwhile");
            assert_eq!(slots.now().views().len(), 1);
            drop(writing);
        });
        assert_eq!(Slots::load(dir.path()).unwrap().oldest(), Some(Lsn(2 << 20)));
    }
}
