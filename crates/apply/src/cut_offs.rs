//! Which tables a copy beside the stream cannot end, because the stream ends too often. Pure.
//!
//! Whatever ends the stream cuts the copy off. Most tables go on from the ranges that are there; one
//! without a key that is written to starts over each time, and may never be done. Such a table is
//! copied in one go while nothing streams, and only that one; all are where nothing of a copy comes
//! to the target any more before it is cut off.

use crate::status::TableCopy;
use std::collections::{HashMap, HashSet};

/// So often in a row a table may lose its rows to a cut, or a copy bring nothing.
const IN_VAIN_MAX: u32 = 5;

/// What of a copy is to be ended while nothing streams.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Nothing: it goes on beside the stream.
    #[default]
    Nothing,
    /// Tables of these names, as SQL writes them.
    These(HashSet<String>),
    /// Whatever was begun.
    Begun,
}

impl Ending {
    /// Whether it has a table of this name.
    pub(crate) fn has(&self, table: &impl ToString) -> bool {
        match self {
            Ending::Nothing => false,
            Ending::These(tables) => tables.contains(&table.to_string()),
            Ending::Begun => true,
        }
    }
}

/// How copies beside the stream were cut off, one after the other.
#[derive(Debug, Default)]
pub(crate) struct CutOffs {
    /// Of which nothing came to the target.
    in_vain: u32,
    /// How often each table has started over, by its name.
    started_over: HashMap<String, u32>,
}

impl CutOffs {
    /// Takes down how far a copy had come when it was cut off; says what is to be ended.
    /// `brought`: something of it has come to the target, or could not come yet.
    pub(crate) fn note(&mut self, copies: &[TableCopy], brought: bool) -> Ending {
        self.in_vain = if brought { 0 } else { self.in_vain + 1 };
        for copy in copies.iter().filter(|copy| copy.starts_over) {
            *self.started_over.entry(copy.table.clone()).or_default() += 1;
        }
        if self.in_vain >= IN_VAIN_MAX {
            return Ending::Begun;
        }
        let never_done = self.started_over.iter().filter(|(_, times)| **times >= IN_VAIN_MAX);
        let never_done: HashSet<String> = never_done.map(|(table, _)| table.clone()).collect();
        if never_done.is_empty() { Ending::Nothing } else { Ending::These(never_done) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(table: &str, starts_over: bool) -> TableCopy {
        TableCopy { table: table.to_owned(), starts_over, ..TableCopy::default() }
    }

    #[test]
    fn only_a_table_that_starts_over_each_time_is_ended_while_nothing_streams() {
        let mut cut_offs = CutOffs::default();
        assert_eq!(
            cut_offs.note(&[copy("keyed", false), copy("other", false)], true),
            Ending::Nothing
        );
        for time in 1..=IN_VAIN_MAX {
            let ending = cut_offs.note(&[copy("keyed", false), copy("other", true)], true);
            let others = Ending::These(HashSet::from(["other".to_owned()]));
            assert_eq!(ending, if time < IN_VAIN_MAX { Ending::Nothing } else { others });
        }
    }

    #[test]
    fn all_are_where_nothing_comes_any_more() {
        let mut cut_offs = CutOffs::default();
        for time in 1..IN_VAIN_MAX {
            let copies = [copy("t", false)];
            let copies = if time == 1 { &[][..] } else { &copies };
            assert_eq!(cut_offs.note(copies, false), Ending::Nothing);
        }
        assert_eq!(cut_offs.note(&[copy("t", false)], true), Ending::Nothing);
        for time in 1..=IN_VAIN_MAX {
            let ending = cut_offs.note(&[copy("t", false)], false);
            assert_eq!(ending, if time < IN_VAIN_MAX { Ending::Nothing } else { Ending::Begun });
        }
    }
}
