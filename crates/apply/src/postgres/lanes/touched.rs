//! Which rows a group changes.

use farshore_model::DictionaryId;
use std::collections::{HashMap, HashSet};

/// Keys of one table that a group keeps apart; with more, it meets everything in that table.
const KEYS_MAX: usize = 100_000;

/// Rows that a group changes, by the hashes of their keys.
#[derive(Debug, Default)]
pub(super) struct Touched {
    tables: HashMap<u32, Keys>,
}

#[derive(Debug)]
enum Keys {
    /// Of one version of the table's definition.
    Of(DictionaryId, HashSet<u64>),
    /// Too many to keep, or of versions whose keys cannot be compared.
    All,
}

impl Touched {
    /// Adds rows of a table, as one version of its definition has it.
    pub(super) fn add(
        &mut self,
        table: u32,
        relation: DictionaryId,
        keys: impl Iterator<Item = u64>,
    ) {
        let known = self.tables.entry(table).or_insert(Keys::Of(relation, HashSet::new()));
        match known {
            Keys::Of(version, hashes) if *version == relation => {
                hashes.extend(keys);
                if hashes.len() > KEYS_MAX {
                    *known = Keys::All;
                }
            }
            Keys::Of(..) => *known = Keys::All,
            Keys::All => {}
        }
    }

    /// Whether this row is among those here, as far as single rows are told apart.
    pub(super) fn has(&self, table: u32, key: u64) -> bool {
        match self.tables.get(&table) {
            Some(Keys::Of(_, hashes)) => hashes.contains(&key),
            Some(Keys::All) | None => false,
        }
    }

    /// Whether rows of this version of the table cannot be told from those here.
    pub(super) fn has_all(&self, table: u32, relation: DictionaryId) -> bool {
        match self.tables.get(&table) {
            None => false,
            Some(Keys::Of(version, _)) => *version != relation,
            Some(Keys::All) => true,
        }
    }
}
