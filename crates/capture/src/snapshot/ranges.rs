/// Consecutive blocks of a table's main fork.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
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
}
