//! A state of all tables as a multiset of rows, with a hash that is kept up to date row by row.

use super::schema::TABLES;
use std::collections::HashMap;
use std::collections::hash_map::{DefaultHasher, Entry};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// Characters shown of one value.
const VALUE_CHARS_SHOWN: usize = 60;

/// One row: its table and its values as PostgreSQL prints them. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Row {
    table: u8,
    values: Arc<[Option<Box<str>>]>,
    hash: StateHash,
}

/// A hash of rows: the wrapping sum of two independent 64-bit hashes per row, so that the order
/// of rows does not matter and rows can be taken out again. Only valid within one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct StateHash(u64, u64);

impl StateHash {
    fn plus(self, other: StateHash) -> StateHash {
        StateHash(self.0.wrapping_add(other.0), self.1.wrapping_add(other.1))
    }

    fn minus(self, other: StateHash) -> StateHash {
        StateHash(self.0.wrapping_sub(other.0), self.1.wrapping_sub(other.1))
    }
}

impl Hash for Row {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.hash.hash(state);
    }
}

impl Row {
    /// A row of the table with this index in [`TABLES`](super::TABLES).
    pub fn new(table: usize, values: Vec<Option<Box<str>>>) -> Row {
        let half = |salt: u64| {
            let mut hasher = DefaultHasher::new();
            (salt, table, &values).hash(&mut hasher);
            hasher.finish()
        };
        let hash = StateHash(half(0x9e37), half(0x79b9));
        Row { table: table as u8, values: values.into(), hash }
    }

    /// Index of its table.
    pub fn table(&self) -> usize {
        self.table.into()
    }

    /// Its values in column order.
    pub fn values(&self) -> &[Option<Box<str>>] {
        &self.values
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = &TABLES[self.table()];
        write!(f, "{} (", table.name)?;
        for (index, (column, value)) in table.columns.iter().zip(self.values.iter()).enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            match value.as_deref() {
                None => write!(f, "{separator}{column}=null")?,
                Some(text) if text.chars().count() <= VALUE_CHARS_SHOWN => {
                    write!(f, "{separator}{column}={text}")?;
                }
                Some(text) => {
                    let chars = text.chars().count();
                    let tail: String = text.chars().skip(chars - VALUE_CHARS_SHOWN).collect();
                    write!(f, "{separator}{column}=…{tail} ({chars} characters)")?;
                }
            }
        }
        f.write_str(")")
    }
}

/// A row that came into a state or went out of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RowChange {
    /// The row is there once more.
    Added(Row),
    /// The row is there once less.
    Removed(Row),
}

/// All rows of all tables.
#[derive(Debug, Clone, Default)]
pub struct State {
    rows: HashMap<Row, u32>,
    hash: StateHash,
}

impl PartialEq for State {
    fn eq(&self, other: &State) -> bool {
        self.hash == other.hash && self.rows == other.rows
    }
}

impl State {
    /// Adds a row.
    pub fn add(&mut self, row: Row) {
        self.hash = self.hash.plus(row.hash);
        *self.rows.entry(row).or_default() += 1;
    }

    /// Takes a row out; `false`, and no change, when it is not there.
    pub fn remove(&mut self, row: &Row) -> bool {
        let Entry::Occupied(mut entry) = self.rows.entry(row.clone()) else { return false };
        self.hash = self.hash.minus(row.hash);
        *entry.get_mut() -= 1;
        if *entry.get() == 0 {
            entry.remove();
        }
        true
    }

    /// Applies changes; rows to be removed that are not there are skipped.
    pub fn apply(&mut self, changes: &[RowChange]) {
        for change in changes {
            match change {
                RowChange::Added(row) => self.add(row.clone()),
                RowChange::Removed(row) => {
                    self.remove(row);
                }
            }
        }
    }

    /// The hash of all rows.
    pub fn hash(&self) -> StateHash {
        self.hash
    }

    /// How often a row is there.
    pub fn count(&self, row: &Row) -> u32 {
        self.rows.get(row).copied().unwrap_or(0)
    }

    /// Rows, each as often as it is there, in no order.
    pub fn rows(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().flat_map(|(row, count)| std::iter::repeat_n(row, *count as usize))
    }

    /// The changes that lead from this state to `other`, removals first.
    pub fn changes_to(&self, other: &State) -> Vec<RowChange> {
        let surplus = |a: &State, b: &State| {
            let mut rows = Vec::new();
            for (row, count) in &a.rows {
                let more = count.saturating_sub(b.count(row));
                rows.extend(std::iter::repeat_n(row.clone(), more as usize));
            }
            rows.sort_unstable();
            rows
        };
        let removed = surplus(self, other).into_iter().map(RowChange::Removed);
        removed.chain(surplus(other, self).into_iter().map(RowChange::Added)).collect()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A row of table `counter`.
    pub(in crate::prefix) fn counter(id: u32, n: u64) -> Row {
        row("counter", &[&id.to_string(), &n.to_string()])
    }

    /// A row of any table.
    pub(in crate::prefix) fn row(table: &str, values: &[&str]) -> Row {
        let table = super::super::schema::table_index(table).expect("a table of the schema");
        Row::new(table, values.iter().map(|value| Some((*value).into())).collect())
    }

    #[test]
    fn the_hash_depends_on_the_rows_and_not_on_the_way_there() {
        let (mut a, mut b) = (State::default(), State::default());
        a.add(counter(1, 1));
        a.add(counter(2, 5));
        b.add(counter(2, 5));
        b.add(counter(1, 7));
        assert!(!b.remove(&counter(1, 9)));
        assert_ne!(a, b);
        assert!(b.remove(&counter(1, 7)));
        b.add(counter(1, 1));
        assert_eq!(a, b);
        assert_eq!(a.hash(), b.hash());
        b.add(counter(1, 1));
        assert_ne!(a.hash(), b.hash());
        assert_eq!(a.changes_to(&b), [RowChange::Added(counter(1, 1))]);
    }

    #[test]
    fn the_same_values_in_other_tables_and_null_and_empty_differ() {
        let hash = |row: Row| row.hash;
        assert_ne!(hash(row("counter", &["1", "2"])), hash(row("account", &["1", "2"])));
        assert_ne!(hash(row("list", &["1", ""])), hash(Row::new(3, vec![Some("1".into()), None])));
        assert_ne!(hash(row("list", &["1", "2"])), hash(row("list", &["12", ""])));
    }
}
