//! Random operations against a model. `FARSHORE_SEED=n` replays one run.

use super::{open, small};
use crate::conformance::{append, entries, noise, push, read_all};
use crate::segmented::{Case, SegmentedStore};
use crate::{Batch, Entry, EntryKind, Item, LogStore, Retention, SpillId, SpillItem, StoreError};
use farshore_model::{Applied, DictionaryId, Lsn};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

const RUNS: u64 = 16;
const STEPS: usize = 120;

/// An entry as it was appended: position, kind, payload, and the definition it refers to.
type Made = (u64, EntryKind, Vec<u8>, Option<DictionaryId>);

struct World {
    rng: StdRng,
    /// The current folder; older ones are gone.
    dir: TempDir,
    store: Option<Arc<SegmentedStore>>,
    /// Entries that must be there, with the definition each refers to.
    log: BTreeMap<u64, (EntryKind, Vec<u8>, Option<DictionaryId>)>,
    definitions: BTreeMap<DictionaryId, Vec<u8>>,
    spills: BTreeMap<SpillId, Vec<u8>>,
    cursors: BTreeMap<String, (u64, bool)>,
    end: u64,
    /// Definitions that something durable referred to. The ids of others are free after a restart.
    used: BTreeSet<DictionaryId>,
}

impl World {
    fn store(&self) -> &Arc<SegmentedStore> {
        self.store.as_ref().unwrap()
    }

    fn random_batch(&mut self) -> (Batch, Vec<Made>) {
        let mut batch = Batch::default();
        let mut made = Vec::new();
        for _ in 0..self.rng.random_range(1..20) {
            self.end += self.rng.random_range(1..50);
            if self.rng.random_bool(0.1) {
                push(&mut batch, self.end, EntryKind::Watermark, b"");
                made.push((self.end, EntryKind::Watermark, Vec::new(), None));
                continue;
            }
            let content = format!("relation {}", self.rng.random_range(0..10)).into_bytes();
            let id = self.store().define(&content);
            self.definitions.insert(id, content);
            if !batch.dictionary.contains(&id) {
                batch.dictionary.push(id);
            }
            let len = match self.rng.random_range(0..30) {
                0 => self.rng.random_range(4_000..40_000),
                _ => self.rng.random_range(0..400),
            };
            let payload =
                if self.rng.random_bool(0.5) { noise(len, self.end) } else { vec![b'.'; len] };
            push(&mut batch, self.end, EntryKind::Transaction, &payload);
            made.push((self.end, EntryKind::Transaction, payload, Some(id)));
        }
        (batch, made)
    }

    fn remember(&mut self, made: Vec<Made>) {
        for (position, kind, payload, id) in made {
            self.log.insert(position, (kind, payload, id));
            self.used.extend(id);
        }
    }

    /// After a restart.
    fn forget_unused(&mut self) {
        let used = &self.used;
        self.definitions.retain(|id, _| used.contains(id));
    }

    fn append(&mut self) {
        let (batch, made) = self.random_batch();
        append(&**self.store(), batch);
        self.remember(made);
    }

    fn spill(&mut self) {
        let content = format!("spilled relation {}", self.rng.random_range(0..5)).into_bytes();
        let id = self.store().define(&content);
        self.definitions.insert(id, content);
        let mut writer = self.store().begin_spill().unwrap();
        let mut body = Vec::new();
        for chunk in 0..self.rng.random_range(0..20) {
            let commands = noise(self.rng.random_range(1..6000), chunk);
            writer.write(&commands, &[id]).unwrap();
            body.extend_from_slice(&commands);
        }
        match self.rng.random_range(0..3) {
            0 => drop(writer),
            1 => {
                writer.finish().unwrap();
            }
            _ => {
                let spill = writer.finish().unwrap();
                if !body.is_empty() {
                    self.used.insert(id);
                }
                self.end += 7;
                let mut batch = Batch::default();
                push(&mut batch, self.end, EntryKind::Spilled(spill), b"header");
                append(&**self.store(), batch);
                assert!(self.spills.insert(spill, body).is_none(), "spill id used twice");
                let kind = EntryKind::Spilled(spill);
                self.remember(vec![(self.end, kind, b"header".to_vec(), None)]);
            }
        }
    }

    fn check_from(&mut self, after: u64) {
        let items = match self.store().read_from(Lsn(after)) {
            Err(StoreError::Dropped { start, .. }) => {
                assert!(after < start.0);
                assert!(self.log.range(..=start.0).next().is_none(), "dropped but expected");
                return;
            }
            Err(error) => panic!("{error}"),
            Ok(_) => read_all(&**self.store(), Lsn(after)),
        };
        let mut known = BTreeSet::new();
        for item in &items {
            match item {
                Item::Definition(id, bytes) => {
                    // A cut may leave a definition without the entries that it was for.
                    self.used.insert(*id);
                    let learnt = self.definitions.entry(*id).or_insert_with(|| bytes.to_vec());
                    assert_eq!(learnt[..], bytes[..]);
                    known.insert(*id);
                }
                Item::Entry(Entry { position, .. }) => {
                    let (_, _, id) = &self.log[&position.0];
                    assert!(id.is_none_or(|id| known.contains(&id)), "definition missing");
                }
            }
        }
        let found = entries(items);
        let expected: Vec<_> = self.log.range(after + 1..).collect();
        assert_eq!(found.len(), expected.len(), "after {after}");
        for (entry, (position, (kind, payload, _))) in found.iter().zip(expected) {
            assert_eq!((entry.position.0, entry.kind), (*position, *kind));
            assert!(entry.payload == payload);
        }
    }

    fn check(&mut self) {
        let end = self.end;
        let after = self.rng.random_range(0..=end);
        self.check_from(after);
        let spill = self.spills.iter().next_back();
        if let Some((spill, body)) = spill {
            let mut reader = self.store().open_spill(*spill).unwrap();
            let mut found = Vec::new();
            while let Some(items) = reader.next_block().unwrap() {
                for item in items {
                    match item {
                        SpillItem::Chunk(bytes) => found.extend_from_slice(&bytes),
                        SpillItem::Definition(id, bytes) => {
                            assert_eq!(self.definitions[&id], bytes[..]);
                        }
                    }
                }
            }
            assert!(found == *body);
        }
        for cursor in self.store().cursors() {
            let (applied, expired) = self.cursors[&cursor.name];
            assert_eq!((cursor.applied.0.0, cursor.expired.is_some()), (applied, expired));
        }
        let content: Vec<_> = self.definitions.values().cloned().collect();
        let pick = self.rng.random_range(0..10_usize);
        if let Some(content) = content.get(pick) {
            let id = self.store().define(content);
            let known = self.definitions.insert(id, content.clone());
            assert!(known.is_none_or(|known| known == *content), "an id was used twice");
        }
    }

    fn cursor(&mut self) {
        let name = format!("s{}", self.rng.random_range(0..3));
        let start = self.store().status().start.0;
        match self.rng.random_range(0..5) {
            0 => {
                let cursor = self.store().register_cursor(&name).unwrap();
                let known = self.cursors.entry(name).or_insert((self.end, false));
                assert_eq!((cursor.applied.0.0, cursor.expired.is_some()), *known);
            }
            1 => {
                let dropped = self.store().drop_cursor(&name).is_ok();
                assert_eq!(dropped, self.cursors.remove(&name).is_some());
            }
            _ => {
                let end = self.end;
                let to = self.rng.random_range(0..=end);
                let moved = self.store().move_cursor(&name, Applied(Lsn(to)));
                match self.cursors.get_mut(&name) {
                    None => assert!(matches!(moved, Err(StoreError::Unknown(_)))),
                    Some(_) if to < start => {
                        assert!(matches!(moved, Err(StoreError::Dropped { .. })));
                    }
                    Some(cursor) => {
                        moved.unwrap();
                        *cursor = (to, false);
                    }
                }
            }
        }
    }

    fn retain(&mut self) {
        let bytes = self.store().status().bytes_on_disk;
        let limit = self.rng.random_bool(0.2).then(|| bytes * 3 / 4);
        let retention = Retention { age_max: None, bytes_max: limit };
        let claims = self.cursors.values().filter(|(_, expired)| !expired);
        let needed = claims.map(|(applied, _)| *applied).min();
        let expired = self.store().enforce_retention(&retention).unwrap();
        let start = self.store().status().start.0;
        if limit.is_none() {
            assert!(expired.is_empty());
            assert!(needed.is_none_or(|needed| start <= needed), "dropped what is needed");
        }
        for (name, cursor) in &mut self.cursors {
            let newly = !cursor.1 && cursor.0 < start;
            assert_eq!(newly, expired.iter().any(|expired| expired.name == *name));
            cursor.1 |= newly;
        }
        let gone: Vec<u64> = self.log.range(..=start).map(|(position, _)| *position).collect();
        for position in gone {
            if let Some((EntryKind::Spilled(spill), ..)) = self.log.remove(&position) {
                self.spills.remove(&spill);
                assert!(self.store().open_spill(spill).is_err());
            }
        }
    }

    fn reopen(&mut self) {
        self.store = None;
        self.store = Some(open(self.dir.path()).0);
        self.forget_unused();
    }

    /// One more group is written, then the power fails before its fsync was over: any part of
    /// that group may be missing, anything before it is there.
    fn cut(&mut self) {
        // Positions of cursors may lag after a crash, so let the file catch up first.
        self.store().log.save_cursors().unwrap();
        let active_end = |store: &SegmentedStore| -> (PathBuf, u64) {
            let active = store.log.segments.holding(Lsn::MAX).unwrap();
            let end = super::super::segment::lock(&active.published).end;
            (active.path.clone(), end)
        };
        let (before_path, before_end) = active_end(self.store());
        let (batch, made) = self.random_batch();
        let boundary = self.log.keys().next_back().copied().unwrap_or(0);
        append(&**self.store(), batch);
        let (path, end) = active_end(self.store());
        let from = if path == before_path {
            before_end
        } else {
            super::super::segment::FILE_HEADER_LEN as u64
        };
        let copy = tempfile::tempdir().unwrap();
        copy_files(self.dir.path(), copy.path());
        let file = copy.path().join(path.file_name().unwrap());
        let file = std::fs::OpenOptions::new().write(true).open(file).unwrap();
        let at = self.rng.random_range(from..=end);
        match self.rng.random_range(0..4) {
            0 => file.set_len(at).unwrap(),
            1 => {
                let len = file.metadata().unwrap().len();
                file.set_len(at).unwrap();
                file.set_len(len).unwrap();
            }
            2 => {
                let hole = self.rng.random_range(0..=(end - at));
                file.write_all_at(&vec![0; hole as usize], at).unwrap();
            }
            _ => {
                let junk = self.rng.random_range(0..=(end - at));
                file.write_all_at(&noise(junk as usize, at), at).unwrap();
            }
        }
        self.store = None;
        let (store, report) = open(copy.path());
        assert!(!report.found(Case::NewestDamaged));
        let recovered_end = report.end.0;
        self.dir = copy;
        self.store = Some(store);
        let kept = made.into_iter().filter(|(position, ..)| *position <= recovered_end);
        self.remember(kept.collect());
        self.forget_unused();
        self.end = self.log.keys().next_back().copied().unwrap_or(0).max(recovered_end);
        assert!(recovered_end >= boundary, "durable entries are gone");
        let start = self.store().status().start.0;
        self.check_from(start);
    }
}

pub fn copy_files(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn run(seed: u64) {
    let dir = tempfile::tempdir().unwrap();
    let store = Some(SegmentedStore::open(dir.path(), small()).unwrap().0);
    let mut world = World {
        rng: StdRng::seed_from_u64(seed),
        dir,
        store,
        log: BTreeMap::new(),
        definitions: BTreeMap::new(),
        spills: BTreeMap::new(),
        cursors: BTreeMap::new(),
        end: 0,
        used: BTreeSet::new(),
    };
    for _ in 0..STEPS {
        match world.rng.random_range(0..20) {
            0..=7 => world.append(),
            8..=9 => world.spill(),
            10..=12 => world.check(),
            13..=15 => world.cursor(),
            16 => world.retain(),
            17 => world.reopen(),
            _ => world.cut(),
        }
    }
    world.check();
    let start = world.store().status().start.0;
    world.check_from(start);
}

#[test]
fn random_operations_agree_with_the_model() {
    let seed: Option<u64> = std::env::var("FARSHORE_SEED").ok().and_then(|text| text.parse().ok());
    if let Some(seed) = seed {
        return run(seed);
    }
    let base = super::super::random_id() >> 16;
    for seed in base..base + RUNS {
        println!("replay with FARSHORE_SEED={seed}");
        run(seed);
    }
}
