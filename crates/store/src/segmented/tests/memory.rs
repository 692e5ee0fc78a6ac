//! What readers at the log's end take from memory is what the files hold.

use super::open;
use crate::conformance::{append, batch, block_on, entries, noise, read_all, wait_durable};
use crate::{Entry, InMemory, Item, LogReader, LogStore};
use farshore_model::{DictionaryId, Lsn};

#[derive(Default)]
struct Follower {
    items: Vec<Item>,
    from_memory: usize,
    from_files: usize,
}

impl Follower {
    /// Reads on until all that is durable has been read.
    fn follow(&mut self, reader: &mut dyn LogReader) {
        loop {
            match reader.next_in_memory().unwrap() {
                InMemory::Items(items) => {
                    self.from_memory += items.len();
                    self.items.extend(items);
                }
                InMemory::End => return,
                InMemory::Elsewhere => match reader.next_block().unwrap() {
                    Some(items) => {
                        self.from_files += items.len();
                        self.items.extend(items);
                    }
                    None => return,
                },
            }
        }
    }
}

/// Entries, and for each the definitions that were known when it came.
fn told(items: &[Item]) -> Vec<(Entry, usize)> {
    let mut known = std::collections::HashSet::new();
    let mut told = Vec::new();
    for item in items {
        match item {
            Item::Definition(id, _) => {
                known.insert(*id);
            }
            Item::Entry(entry) => told.push((entry.clone(), known.len())),
        }
    }
    told
}

#[test]
fn blocks_in_memory_are_those_in_the_files() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open(dir.path());
    let mut near = store.read_from(Lsn::ZERO).unwrap();
    let mut late = store.read_from(Lsn::ZERO).unwrap();
    let (mut near_read, mut late_read) = (Follower::default(), Follower::default());
    let mut definitions: Vec<DictionaryId> = Vec::new();
    let mut position = 0;
    for round in 0..200_u64 {
        if round % 16 == 0 {
            definitions.push(store.define(&noise(30, round)));
        }
        // Small, a block's worth, and larger than a block of these options.
        let len = match round % 10 {
            3 => 3_000,
            7 => 6_000,
            _ => 40,
        };
        let payloads: Vec<Vec<u8>> = (0..3).map(|n| noise(len, round * 3 + n)).collect();
        let wanted: Vec<(u64, &[u8])> = payloads
            .iter()
            .map(|payload| {
                position += 10;
                (position, payload.as_slice())
            })
            .collect();
        append(&*store, batch(&wanted, &definitions[definitions.len() - 1..]));
        block_on(wait_durable(&*store, Lsn(position)));
        near_read.follow(near.as_mut());
        assert_eq!(
            near_read.items.iter().filter(|item| matches!(item, Item::Entry(_))).count() as u64,
            position / 10,
            "round {round}"
        );
        if round % 37 == 0 {
            late_read.follow(late.as_mut());
        }
    }
    late_read.follow(late.as_mut());
    assert!(near_read.from_memory > 300, "{} entries from memory", near_read.from_memory);
    assert!(near_read.from_files > 0, "large entries come from files");
    assert!(store.status().segments > 10);
    let stored = read_all(&*store, Lsn::ZERO);
    assert_eq!(told(&near_read.items), told(&stored));
    assert_eq!(told(&late_read.items), told(&stored));
    assert_eq!(entries(stored).len() as u64, position / 10);
}
