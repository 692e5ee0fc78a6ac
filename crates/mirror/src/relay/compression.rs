//! Compression with kept context, so that a small message profits from all that went before and
//! none waits for the next: zstd as one frame, flushed at the end of every message; lz4 as blocks
//! whose dictionary is the log right before.

use super::message::Packing;
use super::tuner::Tuner;
use bytes::Bytes;
use std::fmt;
use std::io;
use std::time::{Duration, Instant};
use zstd::stream::raw::{CParameter, DParameter, Decoder, Encoder, InBuffer, Operation, OutBuffer};

/// Most a peer may make us keep as context: 2^23 bytes, more than any level up to 19 needs for
/// pieces of this size.
const WINDOW_LOG_MAX: u32 = 23;
/// zstd's highest level that is allowed here.
pub const LEVEL_MAX: i32 = 19;
/// What lz4 can look back.
const LZ4_WINDOW_BYTES: usize = 64 << 10;
/// Log that is kept for it, at most.
const BEFORE_BYTES_MAX: usize = 4 * LZ4_WINDOW_BYTES;

/// How log is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// As it is.
    Off,
    /// lz4.
    Lz4,
    /// zstd with this level, 1 to [`LEVEL_MAX`].
    Zstd(i32),
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Method::Off => f.write_str("off"),
            Method::Lz4 => f.write_str("lz4"),
            Method::Zstd(level) => write!(f, "zstd {level}"),
        }
    }
}

/// What a site file says of a mirror's compression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Always so.
    Fixed(Method),
    /// By what is waited for, the link or the processor: see [`super::tuner`].
    Auto,
}

/// Packs log for one session.
pub struct Packer {
    method: Method,
    encoder: Option<Encoder<'static>>,
    /// The log right before, for lz4.
    before: Before,
    /// Only then what goes is remembered.
    may_use_lz4: bool,
    tuner: Option<Tuner>,
    packing: Duration,
}

impl fmt::Debug for Packer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packer").field("method", &self.method).finish_non_exhaustive()
    }
}

fn encoder(level: i32) -> io::Result<Encoder<'static>> {
    let mut encoder = Encoder::new(level.clamp(1, LEVEL_MAX))?;
    encoder.set_parameter(CParameter::WindowLog(WINDOW_LOG_MAX - 2))?;
    Ok(encoder)
}

/// The log right before, which lz4 of the next message may refer to.
#[derive(Default)]
struct Before(Vec<u8>);

impl Before {
    fn add(&mut self, log: &[u8]) {
        let log = last(log);
        // Moved together once in a while, and not for every small message.
        if self.0.len() + log.len() > BEFORE_BYTES_MAX {
            self.0.drain(..self.0.len().saturating_sub(LZ4_WINDOW_BYTES));
        }
        self.0.extend_from_slice(log);
    }

    fn dictionary(&self) -> &[u8] {
        last(&self.0)
    }
}

fn last(log: &[u8]) -> &[u8] {
    log.get(log.len().saturating_sub(LZ4_WINDOW_BYTES)..).unwrap_or_default()
}

impl Packer {
    /// For a session that begins.
    ///
    /// # Errors
    /// No memory.
    pub fn new(compression: Compression) -> io::Result<Packer> {
        let (method, tuner) = match compression {
            Compression::Fixed(method) => (method, None),
            Compression::Auto => (Tuner::BEGIN, Some(Tuner::new(Instant::now()))),
        };
        let packing = Duration::ZERO;
        let may_use_lz4 = tuner.is_some() || method == Method::Lz4;
        let mut packer = Packer {
            method,
            encoder: None,
            before: Before::default(),
            may_use_lz4,
            tuner,
            packing,
        };
        if let Method::Zstd(level) = method {
            packer.encoder = Some(encoder(level)?);
        }
        Ok(packer)
    }

    /// How the next message is packed.
    pub fn method(&self) -> Method {
        self.method
    }

    /// Time that packing took, in all.
    pub fn packing(&self) -> Duration {
        self.packing
    }

    /// Tells how long log waited for the link, for a method that goes by it.
    pub fn waited_for_link(&mut self, waited: Duration) {
        if let Some(tuner) = &mut self.tuner {
            tuner.waited_for_link(waited);
        }
    }

    /// Packs one message's log.
    ///
    /// # Errors
    /// zstd's.
    pub fn pack(&mut self, log: &[Bytes]) -> io::Result<(Packing, Bytes)> {
        let begun = Instant::now();
        let mut packed = Vec::new();
        let next = self.tuner.as_mut().map_or(self.method, |tuner| tuner.method(begun));
        if next != self.method {
            self.switch(next, &mut packed)?;
        }
        let done = match self.method {
            // The rest of a frame goes with a message that is of it.
            Method::Zstd(_) => self.zstd(log, packed).map(|packed| (Packing::Zstd, packed)),
            Method::Lz4 => Ok((Packing::Lz4, self.lz4(log))),
            Method::Off => Ok((
                Packing::Plain,
                match log {
                    [only] => only.clone(),
                    several => several.concat().into(),
                },
            )),
        }?;
        // Whatever packed it: the other side sees the same.
        if self.may_use_lz4 {
            log.iter().for_each(|piece| self.before.add(piece));
        }
        let took = begun.elapsed();
        self.packing += took;
        if let Some(tuner) = &mut self.tuner {
            let log_bytes = log.iter().map(Bytes::len).sum();
            tuner.packed(took, log_bytes, done.1.len());
        }
        Ok(done)
    }

    /// From one method to another. A zstd frame that is not gone on with is left as it is: the
    /// next one begins anew on both sides.
    fn switch(&mut self, next: Method, packed: &mut Vec<u8>) -> io::Result<()> {
        if let Method::Zstd(level) = next {
            if let Some(mut old) = self.encoder.take() {
                loop {
                    packed.reserve(1 << 10);
                    let at = packed.len();
                    if old.finish(&mut OutBuffer::around_pos(packed, at), true)? == 0 {
                        break;
                    }
                }
            }
            self.encoder = Some(encoder(level)?);
        }
        self.method = next;
        Ok(())
    }

    fn zstd(&mut self, log: &[Bytes], mut packed: Vec<u8>) -> io::Result<Bytes> {
        let Some(encoder) = &mut self.encoder else {
            return Err(io::Error::other("there is no zstd frame"));
        };
        let bytes: usize = log.iter().map(Bytes::len).sum();
        packed.reserve(zstd::zstd_safe::compress_bound(bytes) + 64);
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
                return Ok(packed.into());
            }
            packed.reserve(left);
        }
    }

    fn lz4(&mut self, log: &[Bytes]) -> Bytes {
        let whole = match log {
            [only] => only.clone(),
            several => several.concat().into(),
        };
        lz4_flex::block::compress_with_dict(&whole, self.before.dictionary()).into()
    }
}

/// Unpacks log of one session.
pub struct Unpacker {
    decoder: Decoder<'static>,
    /// The log right before, for lz4.
    before: Before,
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
        Ok(Unpacker { decoder, before: Before::default() })
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
        let log = match packing {
            Packing::Lz4 => {
                let log =
                    lz4_flex::block::decompress_with_dict(&packed, bytes, self.before.dictionary())
                        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
                if log.len() == bytes { Ok(log.into()) } else { Err(another(log.len())) }
            }
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
        }?;
        self.before.add(&log);
        Ok(log)
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
        for method in [Method::Off, Method::Lz4, Method::Zstd(1), Method::Zstd(3), Method::Zstd(19)]
        {
            let (mut packer, mut unpacker) =
                (Packer::new(Compression::Fixed(method)).unwrap(), Unpacker::new().unwrap());
            for (number, bytes) in [1, 100, 0, 8_192, 300_000, 5].into_iter().enumerate() {
                let parts = [piece(number as u8, bytes), piece(1, bytes / 2)];
                let (packing, packed) = packer.pack(&parts).unwrap();
                let log = parts.concat();
                let again = unpacker.unpack(packing, packed, log.len()).unwrap();
                assert!(again == log, "{method}, message {number}");
            }
        }
    }

    #[test]
    fn context_is_kept() {
        let noise: Bytes =
            (0..4_000_u64).map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8).collect();
        for method in [Method::Lz4, Method::Zstd(1)] {
            let mut packer = Packer::new(Compression::Fixed(method)).unwrap();
            let first = packer.pack(std::slice::from_ref(&noise)).unwrap().1.len();
            let second = packer.pack(std::slice::from_ref(&noise)).unwrap().1.len();
            assert!(second < first / 3, "{method}: {first} then {second}");
        }
    }

    #[test]
    fn methods_change_within_a_session() {
        let mut packer = Packer::new(Compression::Fixed(Method::Zstd(1))).unwrap();
        packer.may_use_lz4 = true;
        let mut unpacker = Unpacker::new().unwrap();
        let methods = [Method::Zstd(1), Method::Zstd(6), Method::Lz4, Method::Off, Method::Zstd(3)];
        for round in 0..4 {
            for method in methods {
                for seed in 0..3 {
                    // What pack does when the tuner says so.
                    let mut packed = Vec::new();
                    if packer.method != method {
                        packer.switch(method, &mut packed).unwrap();
                    }
                    let log = piece(seed + round, 20_000);
                    let (packing, packed) = match method {
                        Method::Zstd(_) => {
                            let packed = packer.zstd(std::slice::from_ref(&log), packed).unwrap();
                            packer.before.add(&log);
                            (Packing::Zstd, packed)
                        }
                        Method::Lz4 | Method::Off => {
                            packer.pack(std::slice::from_ref(&log)).unwrap()
                        }
                    };
                    let again = unpacker.unpack(packing, packed, log.len()).unwrap();
                    assert!(again == log, "{method} in round {round}");
                }
            }
        }
    }

    #[test]
    fn a_dictionary_is_the_last_of_the_log() {
        let (mut before, mut all) = (Before::default(), Vec::new());
        for (seed, bytes) in
            [300, 70_000, 65_536, 1, 40_000].into_iter().cycle().take(40).enumerate()
        {
            let log = piece(seed as u8, bytes);
            before.add(&log);
            all.extend_from_slice(&log);
            assert!(before.dictionary() == last(&all), "after {}", all.len());
            assert!(before.0.len() <= BEFORE_BYTES_MAX);
        }
    }

    #[test]
    fn what_is_not_what_was_promised_is_refused() {
        let log = piece(1, 1_000);
        let (packing, packed) = Packer::new(Compression::Fixed(Method::Zstd(1)))
            .unwrap()
            .pack(std::slice::from_ref(&log))
            .unwrap();
        for bytes in [0, 999, 1_001] {
            assert!(Unpacker::new().unwrap().unpack(packing, packed.clone(), bytes).is_err());
        }
        let plain = Unpacker::new().unwrap().unpack(Packing::Plain, log, 999);
        assert!(plain.is_err());
        let noise = Bytes::from_static(b"no zstd at all");
        for packing in [Packing::Zstd, Packing::Lz4] {
            assert!(Unpacker::new().unwrap().unpack(packing, noise.clone(), 5).is_err());
        }
    }
}
