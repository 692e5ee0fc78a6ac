//! One suite for every [`LogStore`]: what the contract promises, as functions that panic when an
//! implementation does not keep it.
//!
//! ```ignore
//! farshore_store::conformance::run_all(&|| Box::new(MyInstance::new()));
//! ```

use crate::{
    Batch, Entry, EntryKind, EntryMeta, Growth, Item, LogStore, Retention, SpillFollower, SpillId,
    SpillItem, StoreError,
};
use bytes::Bytes;
use farshore_model::{Applied, DictionaryId, Durable, Lsn, PgTime};
use std::collections::BTreeMap;
use std::sync::Arc;

/// One store under test. Dropping it removes what it left behind.
pub trait Instance {
    /// The store.
    fn store(&self) -> Arc<dyn LogStore>;

    /// Closes the store and opens what it left; every other handle to it was dropped.
    fn reopen(&mut self);
}

/// Makes a new empty store with small segments (a few KiB).
pub type Make<'a> = &'a dyn Fn() -> Box<dyn Instance>;

/// A test of the suite.
pub type Test = fn(Make<'_>);

/// Runs every test of the suite, each on a store of its own, printing its name.
pub fn run_all(make: Make<'_>) {
    let tests: &[(&str, Test)] = &[
        ("what_is_appended_is_read", what_is_appended_is_read),
        ("reading_starts_anywhere", reading_starts_anywhere),
        ("definitions_come_before_use", definitions_come_before_use),
        ("definitions_are_named_by_content", definitions_are_named_by_content),
        ("order_is_enforced", order_is_enforced),
        ("malformed_batches_are_refused", malformed_batches_are_refused),
        ("a_reader_follows_the_end", a_reader_follows_the_end),
        ("large_entries_pass", large_entries_pass),
        ("spills_commit_abort_and_vanish", spills_commit_abort_and_vanish),
        ("spills_are_read_while_they_grow", spills_are_read_while_they_grow),
        ("cursors_hold_the_log", cursors_hold_the_log),
        ("limits_expire_cursors", limits_expire_cursors),
        ("cursors_and_notes_survive", cursors_and_notes_survive),
    ];
    for (name, test) in tests {
        println!("conformance: {name}");
        test(make);
    }
}

/// Runs a future to its end on this thread.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(future)
}

/// A batch of transactions with these positions and payloads.
pub fn batch(entries: &[(u64, &[u8])], dictionary: &[DictionaryId]) -> Batch {
    let mut batch = Batch { dictionary: dictionary.to_vec(), ..Batch::default() };
    for (position, payload) in entries {
        push(&mut batch, *position, EntryKind::Transaction, payload);
    }
    batch
}

/// Adds an entry to a batch; its commit time is now.
pub fn push(batch: &mut Batch, position: u64, kind: EntryKind, payload: &[u8]) {
    batch.entries.push(EntryMeta {
        position: Lsn(position),
        commit_time: PgTime::now(),
        kind,
        payload_len: payload.len() as u32,
    });
    batch.payload.extend_from_slice(payload);
}

/// Appends and waits until it is durable.
pub fn append(store: &dyn LogStore, batch: Batch) {
    let Some(last) = batch.entries.last().map(|entry| entry.position) else { return };
    block_on(async {
        store.append(batch).await.expect("append");
        wait_durable(store, last).await;
    });
}

/// Waits until `position` is durable.
pub async fn wait_durable(store: &dyn LogStore, position: Lsn) {
    let mut durable = store.durable();
    let reached = durable.wait_for(|durable| durable.0 >= position).await;
    assert!(reached.is_ok(), "the store failed: {:?}", store.failure());
}

/// Reads everything durable after `after`.
pub fn read_all(store: &dyn LogStore, after: Lsn) -> Vec<Item> {
    let mut reader = store.read_from(after).expect("read_from");
    let mut items = Vec::new();
    while let Some(block) = reader.next_block().expect("next_block") {
        assert!(!block.is_empty(), "a block without items");
        items.extend(block);
    }
    items
}

/// The entries among items.
pub fn entries(items: Vec<Item>) -> Vec<Entry> {
    items
        .into_iter()
        .filter_map(|item| match item {
            Item::Entry(entry) => Some(entry),
            Item::Definition(..) => None,
        })
        .collect()
}

fn positions(store: &dyn LogStore, after: u64) -> Vec<u64> {
    entries(read_all(store, Lsn(after))).iter().map(|entry| entry.position.0).collect()
}

/// Bytes that do not compress, the same for the same seed.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// Entries come back as they went in, also after reopening.
pub fn what_is_appended_is_read(make: Make<'_>) {
    let mut instance = make();
    let mut all = Batch::default();
    push(&mut all, 10, EntryKind::Transaction, b"one");
    push(&mut all, 20, EntryKind::Watermark, b"");
    push(&mut all, 30, EntryKind::Transaction, &noise(3000, 1));
    {
        let store = instance.store();
        assert_eq!(*store.durable().borrow(), Durable(Lsn::ZERO));
        assert_eq!(read_all(&*store, Lsn::ZERO), vec![]);
        append(&*store, Batch::default());
        append(&*store, all.clone());
    }
    for round in 0..2 {
        {
            let store = instance.store();
            let mut payload = all.payload.as_slice();
            let found = entries(read_all(&*store, Lsn::ZERO));
            assert_eq!(found.len(), all.entries.len(), "round {round}");
            for (entry, meta) in found.iter().zip(&all.entries) {
                let (own, rest) = payload.split_at(meta.payload_len as usize);
                payload = rest;
                assert_eq!(entry.position, meta.position);
                assert_eq!(entry.commit_time, meta.commit_time);
                assert_eq!(entry.kind, meta.kind);
                assert_eq!(entry.payload, own);
            }
            let status = store.status();
            assert_eq!(status.durable, Durable(Lsn(30)));
            assert_eq!(status.start, Lsn::ZERO);
            assert_eq!(*store.durable().borrow(), Durable(Lsn(30)));
        }
        instance.reopen();
    }
}

/// Reading starts after any position, whether it is one of an entry or not.
pub fn reading_starts_anywhere(make: Make<'_>) {
    let instance = make();
    let store = instance.store();
    let mut expected = Vec::new();
    for group in 0..40_u64 {
        let mut grown = Batch::default();
        for entry in 0..10 {
            let position = 100 + group * 100 + entry * 10;
            expected.push(position);
            push(&mut grown, position, EntryKind::Transaction, &noise(100, position));
        }
        append(&*store, grown);
    }
    for after in (0..4200).step_by(35) {
        let wanted: Vec<u64> = expected.iter().copied().filter(|p| *p > after).collect();
        assert_eq!(positions(&*store, after), wanted, "after {after}");
    }
    assert_eq!(positions(&*store, u64::MAX), Vec::<u64>::new());
}

/// Wherever reading starts, an entry's definitions come first.
pub fn definitions_come_before_use(make: Make<'_>) {
    let mut instance = make();
    let content = |n: u64| format!("relation {n}").into_bytes();
    {
        let store = instance.store();
        for position in 1..=200_u64 {
            let id = store.define(&content(position % 7));
            let mut payload = id.0.to_le_bytes().to_vec();
            payload.extend_from_slice(&noise(200, position));
            append(&*store, batch(&[(position, &payload)], &[id]));
        }
    }
    for _ in 0..2 {
        {
            let store = instance.store();
            for after in (0..200).step_by(9) {
                let mut known = BTreeMap::new();
                let mut next = after + 1;
                for item in read_all(&*store, Lsn(after)) {
                    match item {
                        Item::Definition(id, bytes) => {
                            known.insert(id, bytes);
                        }
                        Item::Entry(entry) => {
                            assert_eq!(entry.position.0, next);
                            let id = entry.payload.first_chunk::<4>().expect("an id");
                            let id = DictionaryId(u32::from_le_bytes(*id));
                            let found = known.get(&id).expect("definition before use");
                            assert_eq!(found[..], content(next % 7)[..]);
                            next += 1;
                        }
                    }
                }
                assert_eq!(next, 201);
            }
        }
        instance.reopen();
    }
}

/// The same bytes get the same id, also after reopening; new bytes get an id never used before.
pub fn definitions_are_named_by_content(make: Make<'_>) {
    let mut instance = make();
    let (one, two) = {
        let store = instance.store();
        let (one, two) = (store.define(b"one"), store.define(b"two"));
        assert_ne!(one, two);
        assert_eq!(store.define(b"one"), one);
        append(&*store, batch(&[(1, b"x")], &[one, two]));
        (one, two)
    };
    instance.reopen();
    let store = instance.store();
    assert_eq!(store.define(b"two"), two);
    assert_eq!(store.define(b"one"), one);
    let three = store.define(b"three");
    assert!(three > one && three > two);
}

/// Positions strictly increase, within a batch and between batches.
pub fn order_is_enforced(make: Make<'_>) {
    let instance = make();
    let store = instance.store();
    let refused = |batch: Batch| {
        let result = block_on(store.append(batch));
        assert!(matches!(result, Err(StoreError::OutOfOrder { .. })), "{result:?}");
    };
    refused(batch(&[(5, b""), (5, b"")], &[]));
    refused(batch(&[(6, b""), (5, b"")], &[]));
    append(&*store, batch(&[(10, b"a")], &[]));
    refused(batch(&[(10, b"b")], &[]));
    refused(batch(&[(9, b"b"), (11, b"b")], &[]));
    append(&*store, batch(&[(11, b"c")], &[]));
    assert_eq!(positions(&*store, 0), vec![10, 11]);
    assert!(store.failure().is_none());
}

/// A batch that contradicts itself is refused and nothing else happens.
pub fn malformed_batches_are_refused(make: Make<'_>) {
    let instance = make();
    let store = instance.store();
    let mut short = batch(&[(1, b"abc")], &[]);
    short.payload.pop();
    assert!(block_on(store.append(short)).is_err());
    let unknown = batch(&[(1, b"abc")], &[DictionaryId(12345)]);
    assert!(matches!(block_on(store.append(unknown)), Err(StoreError::Unknown(_))));
    let mut no_spill = Batch::default();
    push(&mut no_spill, 1, EntryKind::Spilled(SpillId(999)), b"");
    assert!(matches!(block_on(store.append(no_spill)), Err(StoreError::Unknown(_))));
    append(&*store, batch(&[(1, b"abc")], &[]));
    assert_eq!(positions(&*store, 0), vec![1]);
}

/// A reader at the end sees what becomes durable later, across segments.
pub fn a_reader_follows_the_end(make: Make<'_>) {
    let instance = make();
    let store = instance.store();
    let mut reader = store.read_from(Lsn::ZERO).expect("read_from");
    assert!(reader.next_block().expect("next_block").is_none());
    for position in 1..=100 {
        append(&*store, batch(&[(position, &noise(300, position))], &[]));
        let block = reader.next_block().expect("next_block").expect("a block");
        let found = entries(block);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].position, Lsn(position));
        assert!(reader.next_block().expect("next_block").is_none());
    }
}

/// Entries larger than a block, compressible or not, between small ones.
pub fn large_entries_pass(make: Make<'_>) {
    let mut instance = make();
    let large = noise(3_000_000, 7);
    let flat = vec![b'z'; 5_000_000];
    {
        let store = instance.store();
        append(&*store, batch(&[(1, b"a"), (2, &large), (3, b"b"), (4, &flat), (5, b"c")], &[]));
    }
    for _ in 0..2 {
        {
            let store = instance.store();
            let found = entries(read_all(&*store, Lsn::ZERO));
            let payloads: Vec<&[u8]> = found.iter().map(|entry| &entry.payload[..]).collect();
            assert!(payloads == [b"a", &large[..], b"b", &flat[..], b"c"]);
            assert_eq!(positions(&*store, 2), vec![3, 4, 5]);
        }
        instance.reopen();
    }
}

fn read_spill(store: &dyn LogStore, spill: SpillId) -> (Vec<u8>, BTreeMap<DictionaryId, Bytes>) {
    let mut reader = store.open_spill(spill).expect("open_spill");
    let (mut body, mut known) = (Vec::new(), BTreeMap::new());
    while let Some(block) = reader.next_block().expect("next_block") {
        for item in block {
            match item {
                SpillItem::Definition(id, bytes) => {
                    known.insert(id, bytes);
                }
                SpillItem::Chunk(bytes) => body.extend_from_slice(&bytes),
            }
        }
    }
    (body, known)
}

/// What a follower of a spill has read so far.
#[derive(Default)]
struct Followed {
    body: Vec<u8>,
    known: BTreeMap<DictionaryId, Bytes>,
}

impl Followed {
    /// Reads what is there at `growth`.
    fn read(&mut self, follower: &mut dyn SpillFollower, growth: Growth) {
        while let Some(block) = follower.next_block(growth).expect("next_block") {
            for item in block {
                match item {
                    SpillItem::Definition(id, bytes) => {
                        self.known.insert(id, bytes);
                    }
                    SpillItem::Chunk(bytes) => self.body.extend_from_slice(&bytes),
                }
            }
        }
    }
}

/// A spill can be read while it is written, never further than it has come, and says how it ends.
pub fn spills_are_read_while_they_grow(make: Make<'_>) {
    let instance = make();
    let store = instance.store();
    let names = store.growing_spills();
    let id = store.define(b"followed relation");
    let mut writer = store.begin_spill().expect("begin_spill");
    let spill = writer.id();
    assert_eq!(*names.borrow(), [spill]);
    let mut follower = store.follow_spill(spill).expect("follow_spill");
    let growth = follower.growth();
    let (mut followed, mut written) = (Followed::default(), Vec::new());
    let mut grown = 0;
    for chunk in 0..60 {
        writer.follows(Lsn(chunk));
        let before = *growth.borrow();
        let commands = noise(if chunk == 30 { 700_000 } else { 9_000 }, chunk);
        writer.write(&commands, &[id]).expect("write");
        written.extend_from_slice(&commands);
        if chunk % 7 == 0 {
            writer.flush().expect("flush");
            let now = *growth.borrow();
            assert!(now.end > before.end && now.after == Lsn(chunk) && !now.finished);
            followed.read(follower.as_mut(), before);
            assert!(written.starts_with(&followed.body), "what was there before");
            followed.read(follower.as_mut(), now);
            assert!(followed.body == written, "what a flush has written");
            grown += 1;
        }
    }
    assert_eq!(grown, 9);
    writer.finish().expect("finish");
    assert!(names.borrow().is_empty());
    let end = *growth.borrow();
    assert!(end.finished && growth.has_changed().is_err(), "it grows no more");
    followed.read(follower.as_mut(), end);
    assert!(followed.body == written);
    assert_eq!(followed.known.get(&id).map(|bytes| &bytes[..]), Some(&b"followed relation"[..]));
    assert!(matches!(store.follow_spill(spill), Err(StoreError::Unknown(_))));

    // One that is given up can be read on, and is never finished.
    let mut given_up = store.begin_spill().expect("begin_spill");
    let other = store.begin_spill().expect("begin_spill");
    assert_eq!(*names.borrow(), [given_up.id(), other.id()]);
    let mut follower = store.follow_spill(given_up.id()).expect("follow_spill");
    let growth = follower.growth();
    let commands = noise(20_000, 5);
    given_up.write(&commands, &[]).expect("write");
    given_up.flush().expect("flush");
    drop(given_up);
    assert_eq!(*names.borrow(), [other.id()]);
    let end = *growth.borrow();
    assert!(!end.finished && growth.has_changed().is_err());
    let mut followed = Followed::default();
    followed.read(follower.as_mut(), end);
    assert!(followed.body == commands);
}

/// A spill is there from the entry that commits it until retention drops that entry.
pub fn spills_commit_abort_and_vanish(make: Make<'_>) {
    let mut instance = make();
    let (mut expected, spill, id, aborted, forgotten);
    {
        let store = instance.store();
        id = store.define(b"spilled relation");
        let mut writer = store.begin_spill().expect("begin_spill");
        expected = Vec::new();
        for chunk in 0..50 {
            let commands = noise(10_000, chunk);
            writer.write(&commands, &[id]).expect("write");
            expected.extend_from_slice(&commands);
            if chunk % 10 == 0 {
                writer.flush().expect("flush");
            }
        }
        let large = noise(2_000_000, 99);
        writer.write(&large, &[]).expect("write");
        expected.extend_from_slice(&large);
        let other = store.begin_spill().expect("begin_spill");
        aborted = other.id();
        assert_ne!(aborted, writer.id());
        drop(other);
        spill = writer.finish().expect("finish");
        assert!(matches!(store.open_spill(aborted), Err(StoreError::Unknown(_))));
        let unnamed = store.begin_spill().expect("begin_spill").finish().expect("finish");

        let mut commit = Batch::default();
        push(&mut commit, 10, EntryKind::Spilled(spill), b"header");
        append(&*store, commit);
        let before = store.status().bytes_on_disk;
        assert!(store.open_spill(unnamed).is_ok());
        store.discard_unnamed_spills().expect("discard");
        assert!(matches!(store.open_spill(unnamed), Err(StoreError::Unknown(_))));
        assert!(store.open_spill(spill).is_ok() && store.status().bytes_on_disk < before);
        forgotten = store.begin_spill().expect("begin_spill").finish().expect("finish");
    }
    for _ in 0..2 {
        {
            let store = instance.store();
            let found = entries(read_all(&*store, Lsn::ZERO));
            assert_eq!(found[0].kind, EntryKind::Spilled(spill));
            assert_eq!(found[0].payload, &b"header"[..]);
            let (body, known) = read_spill(&*store, spill);
            assert!(body == expected, "the spill's body");
            assert_eq!(known.get(&id).map(|bytes| &bytes[..]), Some(&b"spilled relation"[..]));
            assert_eq!(store.define(b"spilled relation"), id);
            let mut twice = Batch::default();
            push(&mut twice, 11, EntryKind::Spilled(spill), b"");
            assert!(block_on(store.append(twice)).is_err(), "one entry commits a spill");
        }
        instance.reopen();
        let store = instance.store();
        let reopened = store.open_spill(forgotten);
        assert!(matches!(reopened, Err(StoreError::Unknown(_))), "never committed");
    }
    let newest_id = {
        let store = instance.store();
        let before = store.status().bytes_on_disk;
        let newest_id = store.define(b"only in what is dropped");
        for position in 100..300 {
            let dictionary = if position == 100 { vec![newest_id] } else { vec![] };
            append(&*store, batch(&[(position, &noise(300, position))], &dictionary));
        }
        assert_eq!(store.enforce_retention(&Retention::default()).expect("retention"), vec![]);
        assert!(matches!(store.open_spill(spill), Err(StoreError::Unknown(_))));
        assert!(store.status().bytes_on_disk < before);
        newest_id
    };
    instance.reopen();
    let store = instance.store();
    assert!(store.define(b"another") > newest_id, "ids are not used twice");
    let next = store.begin_spill().expect("begin_spill").id();
    assert!(next > spill, "ids are not used twice");
}

/// What a cursor has not applied stays; the rest goes, without disturbing open readers.
pub fn cursors_hold_the_log(make: Make<'_>) {
    let instance = make();
    let store = instance.store();
    let cursor = store.register_cursor("a").expect("register");
    assert_eq!(cursor.applied, Applied(Lsn::ZERO));
    for position in 1..=300 {
        append(&*store, batch(&[(position, &noise(300, position))], &[]));
    }
    assert_eq!(store.register_cursor("b").expect("register").applied, Applied(Lsn(300)));
    let retention = Retention::default();
    assert_eq!(store.enforce_retention(&retention).expect("retention"), vec![]);
    assert_eq!(positions(&*store, 0).len(), 300, "a needs it all");

    let mut reader = store.read_from(Lsn::ZERO).expect("read_from");
    let first = reader.next_block().expect("next_block").expect("a block");
    assert!(!first.is_empty());
    store.move_cursor("a", Applied(Lsn(150))).expect("move");
    assert_eq!(store.enforce_retention(&retention).expect("retention"), vec![]);
    let start = store.status().start;
    assert!(start > Lsn::ZERO && start <= Lsn(150), "{start}");
    assert_eq!(positions(&*store, 150), (151..=300).collect::<Vec<_>>());
    let dropped = store.read_from(Lsn::ZERO).map(|_| ());
    assert!(matches!(dropped, Err(StoreError::Dropped { .. })));
    loop {
        match reader.next_block() {
            Ok(Some(_)) => {}
            Ok(None) | Err(StoreError::Dropped { .. }) => break,
            Err(error) => panic!("{error}"),
        }
    }
    let back = store.move_cursor("a", Applied(Lsn::ZERO));
    assert!(matches!(back, Err(StoreError::Dropped { .. })));
    store.move_cursor("a", Applied(start)).expect("back to what is there");
    store.drop_cursor("a").expect("drop");
    assert!(matches!(store.drop_cursor("a"), Err(StoreError::Unknown(_))));
    assert!(matches!(store.move_cursor("a", Applied(Lsn(1))), Err(StoreError::Unknown(_))));
    assert_eq!(store.enforce_retention(&retention).expect("retention"), vec![]);
    assert!(store.status().start > start);
}

/// Limits drop what a cursor needs, and say so; moving the cursor clears that.
pub fn limits_expire_cursors(make: Make<'_>) {
    let mut instance = make();
    let expired_at = {
        let store = instance.store();
        store.register_cursor("slow").expect("register");
        for position in 1..=300 {
            append(&*store, batch(&[(position, &noise(300, position))], &[]));
        }
        let before = store.status().bytes_on_disk;
        let retention = Retention { age_max: None, bytes_max: Some(before / 2) };
        let expired = store.enforce_retention(&retention).expect("retention");
        let status = store.status();
        assert!(status.bytes_on_disk <= before / 2, "{} of {before}", status.bytes_on_disk);
        assert_eq!(expired.len(), 1);
        assert_eq!((&expired[0].name[..], expired[0].expired), ("slow", Some(status.start)));
        assert_eq!(store.enforce_retention(&retention).expect("retention"), vec![], "told once");
        expired[0].expired
    };
    instance.reopen();
    let store = instance.store();
    assert_eq!(store.cursors()[0].expired, expired_at);
    store.move_cursor("slow", Applied(Lsn(300))).expect("move");
    assert_eq!(store.cursors()[0].expired, None);
    let retention = Retention { age_max: Some(std::time::Duration::ZERO), bytes_max: None };
    store.enforce_retention(&retention).expect("retention");
    assert_eq!(store.status().start, Lsn(300), "everything is too old");
    append(&*store, batch(&[(301, b"x")], &[]));
    assert_eq!(positions(&*store, 300), vec![301]);
}

/// Cursors and notes are there after reopening.
pub fn cursors_and_notes_survive(make: Make<'_>) {
    let mut instance = make();
    {
        let store = instance.store();
        assert_eq!(store.note("system"), None);
        store.set_note("system", "7").expect("note");
        store.set_note("system", "8").expect("note");
        store.set_note("other", "\n\"").expect("note");
        append(&*store, batch(&[(1, b"a"), (2, b"b")], &[]));
        store.register_cursor("kept").expect("register");
        store.register_cursor("gone").expect("register");
        store.move_cursor("kept", Applied(Lsn(1))).expect("move back");
        store.drop_cursor("gone").expect("drop");
    }
    instance.reopen();
    let store = instance.store();
    assert_eq!(store.note("system").as_deref(), Some("8"));
    assert_eq!(store.note("other").as_deref(), Some("\n\""));
    let cursors = store.cursors();
    assert_eq!(cursors.len(), 1);
    assert_eq!((&cursors[0].name[..], cursors[0].applied), ("kept", Applied(Lsn(1))));
    assert_eq!(store.register_cursor("kept").expect("register").applied, Applied(Lsn(1)));
}
