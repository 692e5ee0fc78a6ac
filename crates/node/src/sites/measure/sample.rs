//! What stands for a log: blocks, over and over.

use super::protocol::SAMPLE_BYTES_MAX;
use bytes::Bytes;
use farshore_store::segmented::SegmentedStore;
use farshore_store::{LogStore, Replicate, StoreError, StoredBlock, StoredReader};
use std::sync::Arc;

/// Bytes of a block of a sample: as much as a log's blocks have.
const BLOCK_BYTES: usize = 256 << 10;

/// Bytes of blocks that are too large for a sample and are read for nothing.
const PASSED_OVER_MAX: usize = 1 << 30;

/// The oldest blocks that a log still has, bodies of large transactions included. Blocks on the
/// disk.
pub(super) fn of_log(store: &SegmentedStore) -> Result<Vec<StoredBlock>, StoreError> {
    let mut blocks = Vec::new();
    let (mut bytes, mut passed_over) = (0, 0);
    let mut add = |block: StoredBlock| {
        // A single value may be larger than all that is wanted; a log may be full of those.
        if block.raw_len as usize > SAMPLE_BYTES_MAX {
            passed_over += block.raw_len as usize;
            return passed_over < PASSED_OVER_MAX;
        }
        bytes += block.raw_len as usize;
        blocks.push(block);
        bytes < SAMPLE_BYTES_MAX
    };
    let mut reader = store.read_stored(store.status().start)?;
    'log: while let Some(mut block) = reader.next_stored()? {
        for spill in std::mem::take(&mut block.spilled) {
            // Bodies go as soon as nobody needs them any more, blocks with the file they are in.
            let Ok(mut body) = store.read_stored_spill(spill) else { continue };
            while let Some(piece) = body.next_stored()? {
                if !add(piece) {
                    break 'log;
                }
            }
        }
        if !add(block) {
            break;
        }
    }
    Ok(blocks)
}

/// Bytes as a log would have them in blocks, not compressed yet.
pub(super) fn of_bytes(bytes: &Bytes) -> Vec<StoredBlock> {
    let mut rest = bytes.clone();
    let mut blocks = Vec::new();
    while !rest.is_empty() {
        let payload = rest.split_to(rest.len().min(BLOCK_BYTES));
        blocks.push(StoredBlock::chunk(payload));
    }
    blocks
}

/// Reads the same blocks over and over.
pub(super) struct Again {
    blocks: Arc<[StoredBlock]>,
    next: usize,
}

impl Again {
    pub fn new(blocks: Vec<StoredBlock>) -> Again {
        Again { blocks: blocks.into(), next: 0 }
    }
}

impl StoredReader for Again {
    fn next_stored(&mut self) -> Result<Option<StoredBlock>, StoreError> {
        let block = self.blocks.get(self.next).cloned();
        self.next = (self.next + 1) % self.blocks.len().max(1);
        Ok(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_comes_again_and_again() {
        let bytes = Bytes::from(vec![7; BLOCK_BYTES + 1]);
        let blocks = of_bytes(&bytes);
        assert_eq!(blocks.len(), 2);
        assert!(blocks.iter().all(|block| block.check().is_ok()));
        let mut again = Again::new(blocks);
        let lengths: Vec<u32> =
            (0..4).map(|_| again.next_stored().unwrap().unwrap().raw_len).collect();
        assert_eq!(lengths, [BLOCK_BYTES as u32, 1, BLOCK_BYTES as u32, 1]);
        assert!(Again::new(Vec::new()).next_stored().unwrap().is_none());
    }
}
