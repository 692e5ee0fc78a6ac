//! A log and its replica, with random blocks, interruptions and other sizes of segments.
//! `FARSHORE_SEED=n` replays one run.

use super::small;
use crate::conformance::{append, noise, push, read_all};
use crate::replica::{Replicate, StoredBlock, StoredKind};
use crate::segmented::{Options, SegmentedStore};
use crate::{Batch, EntryKind, Item, LogStore, Retention, SpillId, SpillItem, StoreError};
use bytes::Bytes;
use farshore_model::{Applied, Lsn, PgTime};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

fn until_durable(store: &SegmentedStore) {
    let mut durable = store.durable();
    let end = store.accepted_end();
    run(async { durable.wait_for(|durable| durable.0 >= end).await.map(drop) }).unwrap();
}

fn open_with(dir: &Path, segment_bytes: u64) -> Arc<SegmentedStore> {
    let options = Options { segment_bytes, ..small() };
    SegmentedStore::open(dir, options).unwrap_or_else(|error| panic!("{error}")).0
}

struct Pair {
    rng: StdRng,
    log: Arc<SegmentedStore>,
    replica: Option<Arc<SegmentedStore>>,
    dir: TempDir,
    replica_segments: u64,
    end: u64,
    _log_dir: TempDir,
}

impl Pair {
    fn new(seed: u64) -> Pair {
        let mut rng = StdRng::seed_from_u64(seed);
        let (log_dir, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut segments = || rng.random_range(4..40_u64) << 10;
        let (own, replica_segments) = (segments(), segments());
        let log = open_with(log_dir.path(), own);
        let replica = Some(open_with(dir.path(), replica_segments));
        Pair { rng, log, replica, dir, replica_segments, end: 0, _log_dir: log_dir }
    }

    fn grow(&mut self) {
        let mut batch = Batch::default();
        for _ in 0..self.rng.random_range(1..12) {
            self.end += self.rng.random_range(1..50);
            let content = format!("relation {}", self.rng.random_range(0..12)).into_bytes();
            let id = self.log.define(&content);
            if !batch.dictionary.contains(&id) {
                batch.dictionary.push(id);
            }
            if self.rng.random_bool(0.05) {
                let mut writer = self.log.begin_spill().unwrap();
                for chunk in 0..self.rng.random_range(1..9) {
                    let len = self.rng.random_range(1..6_000);
                    let chunk = if chunk % 2 == 0 { noise(len, chunk) } else { vec![b'.'; len] };
                    writer.write(&chunk, &[id]).unwrap();
                }
                let spill = writer.finish().unwrap();
                push(&mut batch, self.end, EntryKind::Spilled(spill), b"header");
                continue;
            }
            let len = match self.rng.random_range(0..30) {
                0 => self.rng.random_range(4_000..40_000),
                _ => self.rng.random_range(0..400),
            };
            // Each entry names the definition that it refers to.
            let mut payload = id.0.to_le_bytes().to_vec();
            payload.extend(if self.rng.random_bool(0.5) {
                noise(len, self.end)
            } else {
                vec![b'.'; len]
            });
            push(&mut batch, self.end, EntryKind::Transaction, &payload);
        }
        append(&*self.log, batch);
    }

    /// Sends up to `blocks` blocks, as a connection that ends then does.
    fn send(&mut self, blocks: usize) {
        let replica = self.replica.clone().unwrap();
        until_durable(&replica);
        let mut reader = self.log.read_stored(replica.durable().borrow().0).unwrap();
        for _ in 0..blocks {
            let Some(mut block) = reader.next_stored().unwrap() else { break };
            for spill in &block.spilled {
                if self.rng.random_bool(0.2) {
                    self.take_spill(&replica, *spill, false);
                    return;
                }
                self.take_spill(&replica, *spill, true).unwrap();
                if self.rng.random_bool(0.2) {
                    // Taken whole, and then the connection ended: it comes again.
                    return;
                }
            }
            if self.rng.random_bool(0.3) {
                block.compress(1).unwrap();
            }
            let crossed = [block.encode_head(), block.payload.clone()].concat();
            let block = StoredBlock::decode(Bytes::from(crossed)).unwrap();
            run(replica.append_stored(block)).unwrap();
        }
    }

    fn take_spill(
        &mut self,
        replica: &SegmentedStore,
        spill: SpillId,
        finished: bool,
    ) -> Option<SpillId> {
        let mut receiver = replica.receive_spill(spill).unwrap();
        let mut reader = self.log.read_stored_spill(spill).unwrap();
        while let Some(block) = reader.next_stored().unwrap() {
            receiver.take(block).unwrap();
            if !finished && self.rng.random_bool(0.5) {
                return None;
            }
        }
        finished.then(|| receiver.finish().unwrap())
    }

    fn reopen(&mut self) {
        if self.rng.random_bool(0.5) {
            // As after a crash: the replica's spills that no entry names are swept.
            until_durable(self.replica.as_ref().unwrap());
        }
        self.replica = None;
        self.replica = Some(open_with(self.dir.path(), self.replica_segments));
    }

    fn check(&mut self) {
        let replica = self.replica.as_ref().unwrap();
        until_durable(replica);
        let end = replica.durable().borrow().0;
        let after = Lsn(self.rng.random_range(0..=self.end));
        let start = replica.status().start.max(self.log.status().start);
        if after < start {
            return;
        }
        let mut known = std::collections::BTreeMap::new();
        let mut theirs = entries_with(&**replica, after, &mut known);
        for entry in &theirs {
            if entry.kind == EntryKind::Transaction {
                let id = entry.payload.first_chunk::<4>().map(|id| u32::from_le_bytes(*id));
                assert!(known.contains_key(&id.unwrap()), "a definition is missing");
            }
        }
        let mut ours = entries_with(&*self.log, after, &mut std::collections::BTreeMap::new());
        ours.retain(|entry| entry.position <= end);
        theirs.retain(|entry| entry.position <= end);
        assert!(ours == theirs, "the replica differs after {after}");
        for entry in &ours {
            if let EntryKind::Spilled(spill) = entry.kind {
                assert!(body(&*self.log, spill) == body(&**replica, spill), "{spill:?}");
            }
        }
        for (id, definition) in known {
            assert_eq!(self.log.define(&definition).0, id);
        }
    }
}

fn entries_with(
    store: &dyn LogStore,
    after: Lsn,
    known: &mut std::collections::BTreeMap<u32, Bytes>,
) -> Vec<crate::Entry> {
    let mut entries = Vec::new();
    for item in read_all(store, after) {
        match item {
            Item::Definition(id, definition) => drop(known.insert(id.0, definition)),
            Item::Entry(entry) => entries.push(entry),
        }
    }
    entries
}

fn body(store: &dyn LogStore, spill: SpillId) -> Vec<SpillItem> {
    let mut reader = store.open_spill(spill).unwrap();
    let mut items = Vec::new();
    while let Some(some) = reader.next_block().unwrap() {
        items.extend(some);
    }
    items
}

#[test]
fn a_replica_is_what_it_is_a_replica_of() {
    let seed = match std::env::var("FARSHORE_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => {
            let base = rand::rng().random_range(0..1_000_000_000);
            (base..base + 12).collect()
        }
    };
    for seed in seed {
        eprintln!("FARSHORE_SEED={seed}");
        let mut pair = Pair::new(seed);
        for _ in 0..60 {
            match pair.rng.random_range(0..10) {
                0..=3 => pair.grow(),
                4..=6 => {
                    let blocks = pair.rng.random_range(1..20);
                    pair.send(blocks);
                }
                7 => pair.reopen(),
                8 => {
                    // The log goes as far as the replica has it; the replica keeps all of its own.
                    let replica = pair.replica.as_ref().unwrap();
                    let durable = replica.durable().borrow().0;
                    replica.register_cursor("all").unwrap();
                    pair.log.register_cursor("@far").unwrap();
                    if pair.log.move_cursor("@far", Applied(durable)).is_ok() {
                        pair.log.enforce_retention(&Retention::default()).unwrap();
                    }
                }
                _ => pair.check(),
            }
        }
        while pair.replica.as_ref().unwrap().durable().borrow().0 < pair.log.durable().borrow().0 {
            pair.send(1_000);
            until_durable(pair.replica.as_ref().unwrap());
        }
        pair.check();
    }
}

#[test]
fn a_replica_refuses_holes_repetition_and_other_definitions() {
    let (log_dir, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let log = open_with(log_dir.path(), 64 << 10);
    let replica = open_with(dir.path(), 64 << 10);
    for position in [10, 20, 30] {
        let mut batch = Batch::default();
        batch.dictionary.push(log.define(b"a relation"));
        push(&mut batch, position, EntryKind::Transaction, b"payload");
        append(&*log, batch);
        until_durable(&log);
    }
    let mut reader = log.read_stored(Lsn::ZERO).unwrap();
    let mut blocks = Vec::new();
    while let Some(block) = reader.next_stored().unwrap() {
        blocks.push(block);
    }
    let kinds: Vec<StoredKind> = blocks.iter().map(|block| block.kind).collect();
    use StoredKind::{Definitions, Entries};
    assert_eq!(kinds, [Definitions, Entries, Entries, Entries]);

    for at in [0, 1] {
        run(replica.append_stored(blocks[at].clone())).unwrap();
    }
    let hole = run(replica.append_stored(blocks[3].clone())).unwrap_err();
    assert!(matches!(hole, StoreError::Hole { after: Lsn(20), end: Lsn(10) }), "{hole}");
    let again = run(replica.append_stored(blocks[1].clone())).unwrap_err();
    assert!(matches!(again, StoreError::OutOfOrder { .. }), "{again}");

    // Another log's definition under an id that is taken.
    let elsewhere = tempfile::tempdir().unwrap();
    let other = open_with(elsewhere.path(), 64 << 10);
    let mut batch = Batch::default();
    batch.dictionary.push(other.define(b"something else"));
    push(&mut batch, 20, EntryKind::Transaction, b"payload");
    append(&*other, batch);
    until_durable(&other);
    let definitions = other.read_stored(Lsn::ZERO).unwrap().next_stored().unwrap().unwrap();
    let refused = run(replica.append_stored(definitions)).unwrap_err();
    assert!(refused.to_string().contains("definition 1 is another one here"), "{refused}");

    // A spill that is not there.
    let mut block = blocks[2].clone();
    block.spilled = vec![SpillId(7)];
    let refused = run(replica.append_stored(block)).unwrap_err();
    assert!(matches!(refused, StoreError::Unknown(_)), "{refused}");
    run(replica.append_stored(blocks[2].clone())).unwrap();
    until_durable(&replica);
    assert_eq!(replica.durable().borrow().0, Lsn(20));
    assert_ne!(log.log_id(), replica.log_id());
    assert_eq!(blocks[1].commit_times.0, blocks[1].commit_times.1.min(PgTime(i64::MAX)));
}

#[test]
fn a_spill_is_followed_while_a_replica_receives_it() {
    let (log_dir, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (log, replica) = (open_with(log_dir.path(), 1 << 20), open_with(dir.path(), 1 << 20));
    let mut writer = log.begin_spill().unwrap();
    for chunk in 0..40 {
        // Some blocks larger than what is staged, most smaller, none that shrinks.
        writer
            .write(&noise(if chunk % 13 == 12 { 1_500_000 } else { 90_000 }, chunk), &[])
            .unwrap();
    }
    let spill = writer.finish().unwrap();
    let mut receiver = replica.receive_spill(spill).unwrap();
    let mut follower = replica.follow_spill(spill).unwrap();
    let growth = follower.growth();
    let mut reader = log.read_stored_spill(spill).unwrap();
    let (mut followed, mut ends) = (Vec::new(), std::collections::BTreeSet::new());
    while let Some(block) = reader.next_stored().unwrap() {
        receiver.take(block).unwrap();
        let now = *growth.borrow();
        ends.insert(now.end);
        while let Some(items) = follower.next_block(now).unwrap() {
            followed.extend(items);
        }
    }
    assert!(ends.len() > 3, "it grew {} times", ends.len());
    receiver.finish().unwrap();
    let end = *growth.borrow();
    assert!(end.finished);
    while let Some(items) = follower.next_block(end).unwrap() {
        followed.extend(items);
    }
    assert!(followed == body(&*log, spill));
}

#[test]
fn a_number_that_is_given_again_is_not_the_spill_that_was_followed() {
    let (log_dir, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (log, replica) = (open_with(log_dir.path(), 1 << 20), open_with(dir.path(), 1 << 20));
    let mut writer = log.begin_spill().unwrap();
    writer.write(&noise(90_000, 1), &[]).unwrap();
    let spill = writer.finish().unwrap();
    let received = || {
        let mut receiver = replica.receive_spill(spill).unwrap();
        let follower = replica.follow_spill(spill).unwrap();
        let mut reader = log.read_stored_spill(spill).unwrap();
        while let Some(block) = reader.next_stored().unwrap() {
            receiver.take(block).unwrap();
        }
        assert!(!follower.has_the_number(), "before it is finished");
        receiver.finish().unwrap();
        follower
    };
    let first = received();
    assert!(first.has_the_number());
    let second = received();
    assert!(!first.has_the_number());
    assert!(second.has_the_number());
    // Nothing follows what is on its way now.
    let _third = replica.receive_spill(spill).unwrap();
    assert!(!second.has_the_number());
}

#[test]
fn the_newest_of_a_replica_is_found_without_all_that_came_since() {
    let (log_dir, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (log, replica) = (open_with(log_dir.path(), 1 << 20), open_with(dir.path(), 8 << 10));
    let mut position = 0;
    let mut grow = |entries| {
        for _ in 0..entries {
            position += 1;
            let mut batch = Batch::default();
            push(&mut batch, position, EntryKind::Transaction, &noise(1_000, position));
            append(&*log, batch);
            until_durable(&log);
        }
        let mut reader = log.read_stored(replica.durable().borrow().0).unwrap();
        while let Some(block) = reader.next_stored().unwrap() {
            run(replica.append_stored(block)).unwrap();
            until_durable(&replica);
        }
    };
    let newest = || replica.newest_transaction().unwrap().map(|(at, _)| at.0);
    grow(3);
    assert_eq!(newest(), Some(3));
    grow(60);
    let segments: Vec<_> = {
        let segments = replica.log.segments.segments.lock().unwrap();
        segments.iter().map(|segment| segment.path.clone()).collect()
    };
    assert!(segments.len() > 4, "{segments:?}");
    // Between what was known and the newest segment nothing need be readable.
    for path in &segments[..segments.len() - 2] {
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(64).unwrap();
    }
    assert_eq!(newest(), Some(63));
    assert_eq!(newest(), Some(63), "nothing came since");
}

#[test]
fn the_newest_of_a_replica_is_known_once_all_of_it_was_dropped() {
    let (log_dir, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let log = open_with(log_dir.path(), 1 << 20);
    let grow = |replica: &SegmentedStore, position, kind| {
        let mut batch = Batch::default();
        // A segment, or nearly.
        let payload =
            if kind == EntryKind::Watermark { Vec::new() } else { noise(5_000, position) };
        push(&mut batch, position, kind, &payload);
        append(&*log, batch);
        until_durable(&log);
        let mut reader = log.read_stored(replica.durable().borrow().0).unwrap();
        while let Some(block) = reader.next_stored().unwrap() {
            run(replica.append_stored(block)).unwrap();
            until_durable(replica);
        }
    };
    let newest =
        |replica: &SegmentedStore| replica.newest_transaction_ever().unwrap().map(|(at, _)| at.0);
    let drop_all = |replica: &SegmentedStore| {
        let end = replica.durable().borrow().0;
        replica.move_cursor("s", Applied(end)).unwrap();
        replica.enforce_retention(&Retention::default()).unwrap();
        assert_eq!(replica.status().start, end, "something is left");
    };
    let replica = open_with(dir.path(), 4 << 10);
    replica.register_cursor("s").unwrap();
    assert_eq!(newest(&replica), None);
    for position in 1..10 {
        grow(&replica, position, EntryKind::Transaction);
    }
    // As a session does that begins: what comes after it is not seen by that.
    assert_eq!(newest(&replica), Some(9));
    for position in 10..20 {
        grow(&replica, position, EntryKind::Transaction);
    }
    drop_all(&replica);
    assert_eq!(newest(&replica), Some(19));
    drop(replica);
    let replica = open_with(dir.path(), 4 << 10);
    assert_eq!(newest(&replica), Some(19), "it is noted");
    // What has no transaction goes as well.
    for position in 20..400 {
        grow(&replica, position, EntryKind::Watermark);
    }
    let nothing = Retention { bytes_max: Some(1), ..Retention::default() };
    replica.enforce_retention(&nothing).unwrap();
    assert!(replica.status().start > Lsn(19), "nothing was dropped");
    assert_eq!(newest(&replica), Some(19));
    // What an earlier version drops it does not note.
    let start = replica.status().start;
    let note = |known_to: u64| {
        let note = format!("{} 0 {}", Lsn(19), Lsn(known_to));
        replica.log.notes.set(crate::NOTE_NEWEST_GONE, &note).unwrap();
    };
    note(start.0 - 1);
    assert_eq!(newest(&replica), None);
    note(start.0);
    assert_eq!(newest(&replica), Some(19));
    grow(&replica, 400, EntryKind::Transaction);
    assert_eq!(newest(&replica), Some(400));
}
