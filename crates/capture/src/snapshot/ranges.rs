use serde::{Deserialize, Serialize};

/// Consecutive blocks of a table's main fork.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BlockRange {
    /// First block.
    pub start: u64,
    /// One past the last block. The last range of a table has no end.
    pub end: Option<u64>,
}

/// Cuts a table of `blocks` blocks into ranges of `range_blocks`. There is always at least one
/// range, and the last has no end: a table that grows while it is planned loses nothing.
pub fn cut_into_ranges(blocks: u64, range_blocks: u64) -> Vec<BlockRange> {
    let range_blocks = range_blocks.max(1);
    let count = blocks.div_ceil(range_blocks).max(1);
    (0..count)
        .map(|i| BlockRange {
            start: i * range_blocks,
            end: (i + 1 < count).then(|| (i + 1) * range_blocks),
        })
        .collect()
}

/// What `done` leaves of a table of `blocks` blocks, cut into ranges of `range_blocks`.
pub fn ranges_left(done: &[BlockRange], blocks: u64, range_blocks: u64) -> Vec<BlockRange> {
    let mut done = done.to_vec();
    done.sort();
    let mut left = Vec::new();
    let mut next = 0;
    for range in &done {
        if range.start > next {
            let gap = cut_into_ranges(range.start - next, range_blocks);
            left.extend(gap.into_iter().map(|piece| BlockRange {
                start: next + piece.start,
                end: Some(piece.end.map_or(range.start, |end| next + end)),
            }));
        }
        match range.end {
            Some(end) => next = next.max(end),
            None => return left,
        }
    }
    let rest = cut_into_ranges(blocks.saturating_sub(next), range_blocks);
    left.extend(rest.into_iter().map(|piece| BlockRange {
        start: next + piece.start,
        end: piece.end.map(|end| next + end),
    }));
    left
}

impl BlockRange {
    /// Whether `block` is in the range.
    pub fn contains(&self, block: u64) -> bool {
        block >= self.start && self.end.is_none_or(|end| block < end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_every_block_once() {
        for (blocks, size) in [(0, 10), (1, 10), (10, 10), (11, 10), (99, 10), (5, 0)] {
            let ranges = cut_into_ranges(blocks, size);
            assert_eq!(ranges[0].start, 0);
            for pair in ranges.windows(2) {
                assert_eq!(pair[0].end, Some(pair[1].start));
            }
            assert_eq!(ranges.last().unwrap().end, None);
        }
        assert_eq!(cut_into_ranges(25, 10).len(), 3);
    }

    #[test]
    fn what_is_left_and_what_is_done_cover_every_block_once() {
        let range = |start, end| BlockRange { start, end };
        for done in [
            vec![],
            vec![range(0, Some(10))],
            vec![range(30, Some(40)), range(10, Some(20))],
            vec![range(90, None)],
            vec![range(0, Some(10)), range(50, None)],
            vec![range(0, None)],
        ] {
            for (blocks, size) in [(0, 10), (95, 10), (200, 7)] {
                let mut all = ranges_left(&done, blocks, size);
                all.extend(&done);
                for block in 0..300 {
                    let holders = all.iter().filter(|r| r.contains(block)).count();
                    assert_eq!(holders, 1, "block {block}, done {done:?}, {blocks}/{size}");
                }
            }
        }
    }
}
