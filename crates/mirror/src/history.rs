//! Timeline history files (PostgreSQL docs: "26.3.6. Timelines"; source `access/transam/timeline.c`).
//!
//! ```text
//! 1 → 0/3000148 → no recovery target specified
//! 2 → 0/5000000 → …
//! ```
//! One line per ancestor (the arrows are tabs), oldest first: its number, where the next one leaves
//! it, and why.

use crate::wal::Timeline;
use farshore_model::Lsn;

/// Most bytes of a history file that is taken: some ten thousand switches.
pub const HISTORY_BYTES_MAX: usize = 1 << 20;

/// Where a timeline was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ancestor {
    /// The timeline.
    pub timeline: Timeline,
    /// First byte that belongs to the next one.
    pub left_at: Lsn,
}

/// How a timeline came about: its ancestors, oldest first. Empty for timeline 1.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History(pub Vec<Ancestor>);

/// Why a history file cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the history of timeline {timeline} is malformed at line {line}: {what}")]
pub struct HistoryError {
    /// Whose.
    pub timeline: Timeline,
    /// Which line, from 1.
    pub line: usize,
    /// What is wrong.
    pub what: &'static str,
}

impl History {
    /// Reads the history of `timeline`.
    ///
    /// # Errors
    /// Whatever `timeline.c` would refuse too.
    pub fn parse(timeline: Timeline, text: &str) -> Result<History, HistoryError> {
        let mut ancestors: Vec<Ancestor> = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let wrong = |what| HistoryError { timeline, line: number + 1, what };
            let line = line.trim_start();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let mut words = line.split_whitespace();
            let ancestor = words.next().and_then(|word| word.parse().ok()).map(Timeline);
            let ancestor = ancestor.ok_or_else(|| wrong("expected a timeline's number"))?;
            let left_at = words.next().and_then(|word| word.parse().ok());
            let left_at = left_at.ok_or_else(|| wrong("expected a position"))?;
            if ancestors.last().is_some_and(|last| last.timeline >= ancestor) {
                return Err(wrong("timelines must increase"));
            }
            if ancestor >= timeline {
                return Err(wrong("an ancestor must be before its descendant"));
            }
            ancestors.push(Ancestor { timeline: ancestor, left_at });
        }
        Ok(History(ancestors))
    }

    /// Where this timeline left `ancestor`, and for which timeline; `None` if it is no ancestor.
    pub fn left(&self, own: Timeline, ancestor: Timeline) -> Option<(Lsn, Timeline)> {
        let at = self.0.iter().position(|entry| entry.timeline == ancestor)?;
        let next = self.0.get(at + 1).map_or(own, |entry| entry.timeline);
        Some((self.0[at].left_at, next))
    }

    /// Where `timeline` begins, which is this one (`own`) or an ancestor; `None` if that is not known,
    /// or it is the first.
    pub fn begins(&self, own: Timeline, timeline: Timeline) -> Option<Lsn> {
        let at = if timeline == own {
            self.0.len()
        } else {
            self.0.iter().position(|entry| entry.timeline == timeline)?
        };
        Some(self.0.get(at.checked_sub(1)?)?.left_at)
    }

    /// The timeline, this one (`own`) or an ancestor, that the log at a position belongs to.
    pub fn timeline_at(&self, own: Timeline, position: Lsn) -> Timeline {
        let ancestor = self.0.iter().find(|entry| position < entry.left_at);
        ancestor.map_or(own, |entry| entry.timeline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histories_are_read_as_postgres_writes_them() {
        let text = "1\t0/3000148\tno recovery target specified\n\n# c\n2\t0/5000000\tbefore x\n";
        let history = History::parse(Timeline(4), text).unwrap();
        assert_eq!(history.left(Timeline(4), Timeline(1)), Some((Lsn(0x300_0148), Timeline(2))));
        assert_eq!(history.left(Timeline(4), Timeline(2)), Some((Lsn(0x500_0000), Timeline(4))));
        assert_eq!(history.left(Timeline(4), Timeline(3)), None);
        let begins = |timeline| history.begins(Timeline(4), Timeline(timeline));
        let begun = [begins(1), begins(2), begins(3), begins(4)];
        assert_eq!(begun, [None, Some(Lsn(0x300_0148)), None, Some(Lsn(0x500_0000))]);
        assert_eq!(History::default().begins(Timeline(1), Timeline(1)), None);
        for (position, timeline) in
            [(0x300_0000, 1), (0x300_0147, 1), (0x300_0148, 2), (0x4FF_FFFF, 2), (0x500_0000, 4)]
        {
            let found = history.timeline_at(Timeline(4), Lsn(position));
            assert_eq!(found, Timeline(timeline), "{position:#x}");
        }
        for text in ["x", "1", "1\tx", "2\t0/1\n1\t0/2", "4\t0/1"] {
            assert!(History::parse(Timeline(4), text).is_err(), "{text}");
        }
    }
}
