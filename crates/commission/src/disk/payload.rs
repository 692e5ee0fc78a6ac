use super::WRITE_BYTES_MAX;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// What O_DIRECT asks of addresses in memory, on every device there is.
const ALIGNMENT: usize = 4_096;
/// As much as PostgreSQL's log buffers usually have. A smaller one would stay in the processor's
/// caches, and what copies it would be faster than it will ever be for a log.
const BUFFER_BYTES: usize = 16 << 20;

/// Random bytes to write: neither a file system nor a drive can shrink them.
pub struct Payload {
    buffer: Vec<u8>,
    aligned_from: usize,
}

impl Payload {
    /// Takes 16 MiB of memory.
    pub fn new() -> Payload {
        let mut buffer = vec![0; BUFFER_BYTES + ALIGNMENT];
        SmallRng::from_rng(&mut rand::rng()).fill_bytes(&mut buffer);
        let address = buffer.as_ptr().addr();
        let aligned_from = address.next_multiple_of(ALIGNMENT) - address;
        Payload { buffer, aligned_from }
    }

    /// `size` bytes, a multiple of 4,096 and at most [`WRITE_BYTES_MAX`], whose address is a multiple
    /// of 4,096. The next `number` gives the next ones, round and round.
    pub fn of(&self, number: u64, size: u32) -> &[u8] {
        let size = size.clamp(ALIGNMENT as u32, WRITE_BYTES_MAX) as usize;
        let places = BUFFER_BYTES / size;
        let start = self.aligned_from + (number % places as u64) as usize * size;
        &self.buffer[start..start + size]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slice_is_aligned_and_they_differ() {
        let payload = Payload::new();
        for number in [0, 1, 4_095, 4_096, u64::MAX] {
            for size in [4_096, WRITE_BYTES_MAX, u32::MAX] {
                let slice = payload.of(number, size);
                assert_eq!(slice.as_ptr().addr() % ALIGNMENT, 0);
                assert_eq!(slice.len(), size.min(WRITE_BYTES_MAX) as usize);
            }
        }
        assert_ne!(payload.of(0, 4_096), payload.of(1, 4_096));
    }
}
