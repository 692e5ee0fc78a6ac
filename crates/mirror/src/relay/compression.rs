//! Compression with kept context: one zstd frame for the whole session, flushed at the end of every
//! message, so that a small one profits from all that went before and none waits for the next.

use super::message::Packing;
use bytes::Bytes;
use std::io;
use zstd::stream::raw::{DParameter, Decoder, Encoder, InBuffer, Operation, OutBuffer};

/// Most a peer may make us keep as context: 2^23 bytes, more than any level up to 19 needs for
/// pieces of this size.
const WINDOW_LOG_MAX: u32 = 23;
/// zstd's highest level that is allowed here.
pub const LEVEL_MAX: i32 = 19;

/// Packs log for one session.
pub struct Packer {
    encoder: Option<Encoder<'static>>,
}

impl std::fmt::Debug for Packer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Packer").finish_non_exhaustive()
    }
}

impl Packer {
    /// With zstd's `level`, 1 to [`LEVEL_MAX`]; 0 leaves log as it is.
    ///
    /// # Errors
    /// No memory.
    pub fn new(level: i32) -> io::Result<Packer> {
        if level == 0 {
            return Ok(Packer { encoder: None });
        }
        let mut encoder = Encoder::new(level.clamp(1, LEVEL_MAX))?;
        encoder.set_parameter(zstd::stream::raw::CParameter::WindowLog(WINDOW_LOG_MAX - 2))?;
        Ok(Packer { encoder: Some(encoder) })
    }

    /// Packs one message's log.
    ///
    /// # Errors
    /// zstd's.
    pub fn pack(&mut self, log: &[Bytes]) -> io::Result<(Packing, Bytes)> {
        let Some(encoder) = &mut self.encoder else {
            let plain = match log {
                [only] => only.clone(),
                several => several.concat().into(),
            };
            return Ok((Packing::Plain, plain));
        };
        let bytes: usize = log.iter().map(Bytes::len).sum();
        let mut packed: Vec<u8> = Vec::with_capacity(zstd::zstd_safe::compress_bound(bytes) + 64);
        for piece in log {
            let mut input = InBuffer::around(piece);
            while input.pos() < piece.len() {
                let at = packed.len();
                let mut output = OutBuffer::around_pos(&mut packed, at);
                encoder.run(&mut input, &mut output)?;
                packed.reserve(1 << 10);
            }
        }
        loop {
            let at = packed.len();
            let left = encoder.flush(&mut OutBuffer::around_pos(&mut packed, at))?;
            if left == 0 {
                return Ok((Packing::Zstd, packed.into()));
            }
            packed.reserve(left);
        }
    }
}

/// Unpacks log of one session.
pub struct Unpacker {
    decoder: Decoder<'static>,
}

impl std::fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unpacker").finish_non_exhaustive()
    }
}

impl Unpacker {
    /// For a session that begins.
    ///
    /// # Errors
    /// No memory.
    pub fn new() -> io::Result<Unpacker> {
        let mut decoder = Decoder::new()?;
        decoder.set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX))?;
        Ok(Unpacker { decoder })
    }

    /// Unpacks one message's log, which must be exactly `bytes` long. Takes no more memory than
    /// that, whatever the packed bytes say.
    ///
    /// # Errors
    /// zstd's, and another length.
    pub fn unpack(&mut self, packing: Packing, packed: Bytes, bytes: usize) -> io::Result<Bytes> {
        let another = |found: usize| {
            let what = format!("a message promised {bytes} bytes of log and holds {found}");
            io::Error::new(io::ErrorKind::InvalidData, what)
        };
        match packing {
            Packing::Plain if packed.len() == bytes => Ok(packed),
            Packing::Plain => Err(another(packed.len())),
            Packing::Zstd => {
                // One more byte, to notice what is too long.
                let mut log: Vec<u8> = Vec::with_capacity(bytes + 1);
                let mut input = InBuffer::around(&packed);
                loop {
                    let (at, taken) = (log.len(), input.pos());
                    self.decoder.run(&mut input, &mut OutBuffer::around_pos(&mut log, at))?;
                    let is_idle = log.len() == at && input.pos() == taken;
                    if log.len() > bytes || is_idle {
                        break;
                    }
                }
                if log.len() != bytes || input.pos() != packed.len() {
                    return Err(another(log.len()));
                }
                Ok(log.into())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(seed: u8, bytes: usize) -> Bytes {
        (0..bytes).map(|i| (i / 7) as u8 ^ seed ^ ((i * i) >> 9) as u8).collect()
    }

    #[test]
    fn every_message_can_be_unpacked_when_it_has_come() {
        for level in [0, 1, 3, 19] {
            let (mut packer, mut unpacker) =
                (Packer::new(level).unwrap(), Unpacker::new().unwrap());
            for (number, bytes) in [1, 100, 0, 8_192, 300_000, 5].into_iter().enumerate() {
                let parts = [piece(number as u8, bytes), piece(1, bytes / 2)];
                let (packing, packed) = packer.pack(&parts).unwrap();
                let log = parts.concat();
                let again = unpacker.unpack(packing, packed, log.len()).unwrap();
                assert!(again == log, "level {level}, message {number}");
            }
        }
    }

    #[test]
    fn context_is_kept() {
        let mut packer = Packer::new(1).unwrap();
        let noise: Bytes =
            (0..4_000_u64).map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect();
        let first = packer.pack(std::slice::from_ref(&noise)).unwrap().1.len();
        let second = packer.pack(&[noise]).unwrap().1.len();
        assert!(second < first / 3, "{first} then {second}");
    }

    #[test]
    fn what_is_not_what_was_promised_is_refused() {
        let log = piece(1, 1_000);
        let (packing, packed) = Packer::new(1).unwrap().pack(std::slice::from_ref(&log)).unwrap();
        for bytes in [0, 999, 1_001] {
            assert!(Unpacker::new().unwrap().unpack(packing, packed.clone(), bytes).is_err());
        }
        let plain = Unpacker::new().unwrap().unpack(Packing::Plain, log, 999);
        assert!(plain.is_err());
        let noise = Bytes::from_static(b"no zstd at all");
        assert!(Unpacker::new().unwrap().unpack(Packing::Zstd, noise, 5).is_err());
    }
}
