//! Frames under way, first in first out, in a few large blocks: a frame is read from the device
//! into the place that it is written to the other device from.

use super::frame::FRAME_BYTES_MAX;
use std::collections::VecDeque;

const BLOCK_BYTES: usize = 1 << 20;
/// 512 MiB: what 10 Gbit/s hold under way for 300 ms, and in the queue for 100 ms more.
const BLOCKS_MAX: usize = 512;
/// Blocks kept for later.
const SPARE_MAX: usize = 16;

#[derive(Debug, Clone, Copy)]
struct Frame {
    due: u64,
    /// Counted from the first block ever.
    block: u64,
    at: usize,
    len: usize,
    packets: usize,
}

/// The frames and the blocks that they lie in. There is always a last block, with room.
#[derive(Debug)]
pub(super) struct Held {
    frames: VecDeque<Frame>,
    blocks: VecDeque<Box<[u8]>>,
    first_block: u64,
    /// Bytes of the last block that are taken.
    filled: usize,
    spare: Vec<Box<[u8]>>,
}

impl Held {
    pub(super) fn new() -> Held {
        Held {
            frames: VecDeque::new(),
            blocks: VecDeque::from([block()]),
            first_block: 0,
            filled: 0,
            spare: Vec::new(),
        }
    }

    /// Whether no more may be pushed.
    pub(super) fn is_full(&self) -> bool {
        self.blocks.len() >= BLOCKS_MAX
    }

    /// Where the next frame goes: room for the largest.
    pub(super) fn room(&mut self) -> &mut [u8] {
        if self.filled + FRAME_BYTES_MAX > BLOCK_BYTES {
            self.blocks.push_back(self.spare.pop().unwrap_or_else(block));
            self.filled = 0;
        }
        let last = self.blocks.len() - 1;
        &mut self.blocks[last][self.filled..]
    }

    /// Keeps the first `len` bytes of the room as a frame that stands for so many packets.
    pub(super) fn push(&mut self, len: usize, due: u64, packets: usize) {
        let block = self.first_block + self.blocks.len() as u64 - 1;
        self.frames.push_back(Frame { due, block, at: self.filled, len, packets });
        self.filled += len;
    }

    /// How many frames there are.
    pub(super) fn len(&self) -> usize {
        self.frames.len()
    }

    /// When the first frame is due.
    pub(super) fn due(&self) -> Option<u64> {
        self.frames.front().map(|frame| frame.due)
    }

    /// The first frame, and how many packets it stands for.
    pub(super) fn first(&mut self) -> Option<(&mut [u8], usize)> {
        let frame = self.frames.front()?;
        let block = &mut self.blocks[(frame.block - self.first_block) as usize];
        Some((&mut block[frame.at..frame.at + frame.len], frame.packets))
    }

    /// Lets the first frame go.
    pub(super) fn pop(&mut self) {
        self.frames.pop_front();
        let last = self.first_block + self.blocks.len() as u64 - 1;
        let needed = self.frames.front().map_or(last, |frame| frame.block);
        while self.first_block < needed {
            let block = self.blocks.pop_front().expect("a frame lies in a later block");
            self.first_block += 1;
            if self.spare.len() < SPARE_MAX {
                self.spare.push(block);
            }
        }
        if self.frames.is_empty() {
            self.filled = 0;
        }
    }

    /// Lets all go; how many packets they stood for.
    pub(super) fn clear(&mut self) -> u64 {
        let mut packets = 0;
        while let Some((_, count)) = self.first() {
            packets += count as u64;
            self.pop();
        }
        packets
    }
}

fn block() -> Box<[u8]> {
    vec![0; BLOCK_BYTES].into_boxed_slice()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_out_as_they_went_in_and_blocks_are_used_again() {
        let mut held = Held::new();
        let (mut next_in, mut next_out) = (0_u64, 0_u64);
        let size = |number: u64| (number as usize * 7919) % FRAME_BYTES_MAX + 1;
        for round in 0..50 {
            for _ in 0..100 {
                let len = size(next_in);
                held.room()[..len].fill(next_in as u8);
                held.push(len, next_in, next_in as usize % 3);
                next_in += 1;
            }
            let keep = if round == 49 { 0 } else { 30 };
            while next_in - next_out > keep {
                assert_eq!(held.due(), Some(next_out));
                let (frame, packets) = held.first().unwrap();
                assert_eq!((frame.len(), packets), (size(next_out), next_out as usize % 3));
                assert!(frame.iter().all(|byte| *byte == next_out as u8));
                held.pop();
                next_out += 1;
            }
        }
        assert_eq!(held.due(), None);
        assert!(held.first().is_none());
        assert_eq!(held.blocks.len(), 1);
        assert!(!held.spare.is_empty() && held.spare.len() <= SPARE_MAX);
    }

    #[test]
    fn it_fills_up_and_can_be_emptied() {
        let mut held = Held::new();
        let mut count = 0;
        while !held.is_full() {
            held.room();
            held.push(FRAME_BYTES_MAX, 0, 45);
            count += 45;
        }
        assert_eq!(held.clear(), count);
        assert!(!held.is_full());
        assert_eq!(held.clear(), 0);
    }
}
