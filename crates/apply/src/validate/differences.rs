//! What two tables differ in, from their rows' hashes. Pure.

use farshore_capture::source::{HashedRow, PartSum};
use std::collections::BTreeMap;

/// Differing rows that are named.
pub const NAMED_MAX: usize = 10;

/// What a row is at odds in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Difference {
    /// The publisher has it, and the target has none with its key.
    Missing,
    /// The target has it, and the publisher has none with its key.
    Extra,
    /// Both have one with its key, and other values.
    Other,
}

/// What two tables differ in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Differences {
    /// Rows that the target lacks.
    pub missing: u64,
    /// Rows that only the target has.
    pub extra: u64,
    /// Rows of the same key with other values.
    pub other: u64,
    /// Some of them: what each is named by, for a person.
    pub named: Vec<(Difference, String)>,
    /// All were counted, and not those of some parts of the table alone.
    pub all: bool,
}

/// Rows of all parts.
pub fn rows(sums: &[PartSum]) -> u64 {
    sums.iter().map(|sum| sum.rows).sum()
}

/// The parts in which the two sides differ, ascending.
pub fn differing_parts(publisher: &[PartSum], target: &[PartSum]) -> Vec<u16> {
    let of = |sums: &[PartSum]| -> BTreeMap<u32, (u64, String)> {
        sums.iter().map(|sum| (sum.part, (sum.rows, sum.sum.clone()))).collect()
    };
    let (publisher, target) = (of(publisher), of(target));
    let parts = publisher.keys().chain(target.keys()).copied();
    let differs = |part: &u32| publisher.get(part) != target.get(part);
    let differing: std::collections::BTreeSet<u32> = parts.filter(differs).collect();
    differing.into_iter().filter_map(|part| u16::try_from(part).ok()).collect()
}

/// Compares rows that are listed by key and hash. A list of `max` rows may go on.
pub fn compare(publisher: &[HashedRow], target: &[HashedRow], max: usize) -> Differences {
    // Keys behind the end of a list that is cut off may be on that side, too.
    let end = |rows: &[HashedRow]| rows.last().filter(|_| rows.len() >= max).map(|row| row.key);
    let end = [end(publisher), end(target)].into_iter().flatten().min();
    let is_listed = |row: &&HashedRow| end.is_none_or(|end| row.key < end);
    let mut keys: BTreeMap<i64, [Vec<&HashedRow>; 2]> = BTreeMap::new();
    for (side, rows) in [publisher, target].into_iter().enumerate() {
        for row in rows.iter().filter(is_listed) {
            keys.entry(row.key).or_default()[side].push(row);
        }
    }
    let mut found = Differences { all: end.is_none(), ..Differences::default() };
    for [publisher, target] in keys.values() {
        let missing = without(publisher, target);
        let extra = without(target, publisher);
        let count = |rows: &[(&HashedRow, u64)]| rows.iter().map(|(_, rows)| rows).sum::<u64>();
        let (lacks, has) = (count(&missing), count(&extra));
        let other = lacks.min(has);
        found.missing += lacks - other;
        found.extra += has - other;
        found.other += other;
        let Some((row, _)) = missing.first().or(extra.first()) else { continue };
        if found.named.len() < NAMED_MAX {
            let what = match (lacks, has) {
                (_, 0) => Difference::Missing,
                (0, _) => Difference::Extra,
                (_, _) => Difference::Other,
            };
            found.named.push((what, row.name.clone()));
        }
    }
    found
}

/// Rows of one key that are not among `others`, and how many of them are not.
fn without<'a>(rows: &[&'a HashedRow], others: &[&HashedRow]) -> Vec<(&'a HashedRow, u64)> {
    let among = |row: &HashedRow| {
        others.iter().filter(|other| other.hash == row.hash).map(|other| other.rows).sum::<u64>()
    };
    let left = rows.iter().map(|row| (*row, row.rows.saturating_sub(among(row))));
    left.filter(|(_, rows)| *rows > 0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(key: i64, hash: i64, rows: u64) -> HashedRow {
        HashedRow { key, hash, rows, name: format!("{key}") }
    }

    fn sum(part: u32, rows: u64, sum: &str) -> PartSum {
        PartSum { part, rows, sum: sum.into() }
    }

    #[test]
    fn parts_differ_by_rows_by_sums_and_by_being_there() {
        let publisher = [sum(0, 1, "5"), sum(7, 2, "9"), sum(9, 1, "-3"), sum(65_535, 1, "1")];
        let target = [sum(9, 1, "-3"), sum(7, 2, "8"), sum(0, 2, "5"), sum(8, 1, "4")];
        assert_eq!(differing_parts(&publisher, &target), [0, 7, 8, 65_535]);
        assert!(differing_parts(&publisher, &publisher).is_empty());
        assert_eq!(rows(&publisher), 5);
    }

    #[test]
    fn rows_are_missing_too_many_or_other() {
        let publisher = [row(1, 10, 1), row(2, 20, 1), row(3, 30, 1), row(4, 40, 1)];
        let target = [row(1, 10, 1), row(2, 21, 1), row(4, 40, 1), row(5, 50, 1)];
        let found = compare(&publisher, &target, 100);
        let named = [
            (Difference::Other, "2".to_owned()),
            (Difference::Missing, "3".to_owned()),
            (Difference::Extra, "5".to_owned()),
        ];
        let expected =
            Differences { missing: 1, extra: 1, other: 1, named: named.to_vec(), all: true };
        assert_eq!(found, expected);
        assert_eq!(compare(&target, &target, 100), Differences { all: true, ..Default::default() });
    }

    #[test]
    fn rows_without_a_key_are_counted_as_often_as_they_are_there() {
        let found = compare(&[row(1, 1, 3), row(2, 2, 1)], &[row(1, 1, 1), row(3, 3, 2)], 100);
        assert_eq!((found.missing, found.extra, found.other), (3, 2, 0));
    }

    #[test]
    fn nothing_is_said_of_keys_behind_the_end_of_a_list() {
        let publisher = [row(1, 1, 1), row(2, 2, 1), row(3, 3, 1)];
        let target = [row(1, 1, 1), row(5, 5, 1), row(6, 6, 1)];
        let found = compare(&publisher, &target, 3);
        assert!(!found.all);
        assert_eq!((found.missing, found.extra, found.other), (1, 0, 0));
    }
}
