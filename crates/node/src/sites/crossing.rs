//! A log's blocks as they cross a link: one by one, or several in a pack where the line is what is
//! waited for ([`super::packing`] says when).

use super::packing::Packing;
use super::protocol::{FromUpstream, Naming};
use bytes::Bytes;
use farshore_store::packs::{PACK_BYTES, pack};
use farshore_store::{SpillId, StoreError, StoredBlock, StoredReader};
use std::collections::VecDeque;

/// What crosses in one message.
pub(super) enum Crossing {
    Block(Box<StoredBlock>),
    Pack { packed: Bytes, raw_bytes: u64 },
}

impl Crossing {
    /// Spills that must be there before it, and what tells it from other blocks that name them.
    pub fn spilled(&self) -> Vec<(SpillId, Naming)> {
        match self {
            Crossing::Block(block) => {
                let naming = Naming::by(block);
                block.spilled.iter().map(|spill| (*spill, naming)).collect()
            }
            // What names spills crosses alone.
            Crossing::Pack { .. } => Vec::new(),
        }
    }

    pub fn raw_bytes(&self) -> u64 {
        match self {
            Crossing::Block(block) => u64::from(block.raw_len),
            Crossing::Pack { raw_bytes, .. } => *raw_bytes,
        }
    }

    pub fn message(
        self,
        block: fn(StoredBlock) -> FromUpstream,
        pack: fn(Bytes) -> FromUpstream,
    ) -> FromUpstream {
        match self {
            Crossing::Block(one) => block(*one),
            Crossing::Pack { packed, .. } => pack(packed),
        }
    }
}

/// Reads a log's blocks on threads that may wait.
pub(super) struct Blocks {
    /// Absent while it reads.
    reader: Option<Box<dyn StoredReader>>,
    /// Read, and not to cross with what was read before it.
    held: VecDeque<StoredBlock>,
    /// That many are passed over first.
    pass_over: u64,
}

impl Blocks {
    pub fn new(reader: Box<dyn StoredReader>) -> Blocks {
        Blocks::behind(reader, 0)
    }

    /// Those behind so many.
    pub fn behind(reader: Box<dyn StoredReader>, blocks: u64) -> Blocks {
        Blocks { reader: Some(reader), held: VecDeque::new(), pass_over: blocks }
    }

    /// The next block, or several if they are to be packed.
    pub async fn next(&mut self, packing: &Packing) -> Result<Option<Crossing>, StoreError> {
        let gone = || StoreError::Unknown("reader any more".to_owned());
        let mut reader = self.reader.take().ok_or_else(gone)?;
        let mut held = std::mem::take(&mut self.held);
        let (packed, compression) = (packing.is_on(), packing.compression);
        let pass_over = std::mem::take(&mut self.pass_over);
        let read = tokio::task::spawn_blocking(move || {
            for _ in 0..pass_over {
                match reader.pass_over() {
                    Ok(true) => {}
                    Ok(false) => {
                        let more = "block of a spill that the other site says it has".to_owned();
                        return (reader, held, Err(StoreError::Unknown(more)));
                    }
                    Err(error) => return (reader, held, Err(error)),
                }
            }
            let crossing = next_crossing(reader.as_mut(), &mut held, packed, compression);
            (reader, held, crossing)
        });
        let (reader, held, crossing) = read.await.map_err(|_| gone())?;
        (self.reader, self.held) = (Some(reader), held);
        crossing
    }
}

fn next_crossing(
    reader: &mut dyn StoredReader,
    held: &mut VecDeque<StoredBlock>,
    packed: bool,
    compression: i32,
) -> Result<Option<Crossing>, StoreError> {
    // One that names spills comes behind them, alone.
    let may_be_packed =
        |block: &StoredBlock| packed && block.spilled.is_empty() && block.raw_len < PACK_BYTES;
    let first = match held.pop_front() {
        Some(block) => block,
        None => match reader.next_stored()? {
            Some(block) => block,
            None => return Ok(None),
        },
    };
    if may_be_packed(&first) {
        let mut raw_bytes = u64::from(first.raw_len);
        held.push_front(first);
        let mut run = 1;
        while raw_bytes < u64::from(PACK_BYTES) {
            if run == held.len() {
                let Some(block) = reader.next_stored()? else { break };
                held.push_back(block);
            }
            let Some(block) = held.get(run).filter(|block| may_be_packed(block)) else { break };
            raw_bytes += u64::from(block.raw_len);
            run += 1;
        }
        if let Some(packed) = pack(&held.make_contiguous()[..run], compression) {
            held.drain(..run);
            return Ok(Some(Crossing::Pack { packed, raw_bytes }));
        }
        return Ok(held.pop_front().map(|block| Crossing::Block(Box::new(block))));
    }
    Ok(Some(Crossing::Block(Box::new(squeeze(first, compression)))))
}

/// A block as it crosses. One that cannot be compressed crosses as it is.
fn squeeze(mut block: StoredBlock, compression: i32) -> StoredBlock {
    if compression > 0
        && let Err(error) = block.compress(compression)
    {
        tracing::debug!("a block crosses as it is: {error}");
    }
    block
}
