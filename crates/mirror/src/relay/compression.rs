//! Compression with kept context, so that a small message profits from all that went before and
//! none waits for the next: zstd as one frame, flushed at the end of every message; lz4 as blocks
//! whose dictionary is what was packed right before. A peer that can restore it gets log reduced
//! first, as [`super::redundancy`] says.
//!
//! Who restores a record's CRC makes one that is right whatever the record's bytes have become. So
//! a checksum of the message goes with it, taken of the log as it came and compared when it is
//! restored: between the principal and the spool no byte changes unseen.

use super::message::Packing;
use super::redundancy::Redundancy;
use super::tuner::Tuner;
use bytes::{Buf, Bytes};
use farshore_model::Lsn;
use std::collections::VecDeque;
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
/// Before packed log that was reduced: the checksum of the log, little-endian.
const LOG_CHECKSUM_BYTES: usize = 4;

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

/// Packs log, or files, for one session.
pub struct Packer {
    method: Method,
    /// From the next message on.
    next: Method,
    encoder: Option<Encoder<'static>>,
    /// If log is reduced.
    redundancy: Option<Redundancy>,
    /// Whole pages in it too.
    reduces_pages: bool,
    /// What was packed right before, for lz4.
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

/// What was packed right before, which lz4 of the next message may refer to: reduced, where it was.
/// It is put together when lz4 needs it: with zstd, or with none, nothing is copied.
#[derive(Default)]
struct Before {
    together: Vec<u8>,
    /// What came behind that, as it came.
    pieces: VecDeque<Bytes>,
    pieces_bytes: usize,
}

/// Pieces that are kept as they came; small ones would take more than their bytes.
const PIECES_MAX: usize = 256;

impl Before {
    fn add(&mut self, log: &Bytes) {
        self.pieces_bytes += log.len();
        self.pieces.push_back(log.clone());
        // What is left is all that may be referred to.
        while let Some(first) = self.pieces.front()
            && self.pieces_bytes - first.len() >= LZ4_WINDOW_BYTES
        {
            self.pieces_bytes -= first.len();
            self.pieces.pop_front();
            self.together.clear();
        }
        if self.pieces.len() > PIECES_MAX {
            self.dictionary();
        }
    }

    fn add_copied(&mut self, log: &[u8]) {
        self.dictionary();
        self.append(log);
    }

    fn append(&mut self, log: &[u8]) {
        let log = last(log);
        // Moved together once in a while, and not for every small message.
        if self.together.len() + log.len() > BEFORE_BYTES_MAX {
            self.together.drain(..self.together.len().saturating_sub(LZ4_WINDOW_BYTES));
        }
        self.together.extend_from_slice(log);
    }

    fn dictionary(&mut self) -> &[u8] {
        for piece in std::mem::take(&mut self.pieces) {
            self.append(&piece);
        }
        self.pieces_bytes = 0;
        last(&self.together)
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
            next: method,
            encoder: None,
            redundancy: None,
            reduces_pages: false,
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

    /// For log whose receiver can restore it when it was reduced.
    /// `with_pages`: also where whole pages in it were.
    #[must_use]
    pub fn reducing(mut self, with_pages: bool) -> Packer {
        self.redundancy = Some(Redundancy::default());
        self.reduces_pages = with_pages;
        self
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

    /// Packs one message's log, which begins at `start`.
    ///
    /// # Errors
    /// zstd's.
    pub fn pack_log(&mut self, start: Lsn, log: &[Bytes]) -> io::Result<(Packing, Bytes)> {
        self.pack_from(Some(start), log)
    }

    /// Packs what is no log.
    ///
    /// # Errors
    /// zstd's.
    pub fn pack(&mut self, data: &[Bytes]) -> io::Result<(Packing, Bytes)> {
        self.pack_from(None, data)
    }

    fn pack_from(&mut self, start: Option<Lsn>, log: &[Bytes]) -> io::Result<(Packing, Bytes)> {
        let begun = Instant::now();
        let log_bytes = log.iter().map(Bytes::len).sum();
        let mut packed = Vec::new();
        if let Some(tuner) = &mut self.tuner {
            self.next = tuner.method(begun);
        }
        let reduced = match (&mut self.redundancy, start) {
            // Log that goes as it is is not looked at: where nothing is packed there is no time for
            // that. What is reduced next does not begin where reduced log ended, as both sides see.
            (Some(redundancy), Some(start)) if self.next != Method::Off => {
                let mut reduced = log.concat();
                let checksum = redundancy.reduce(start, &mut reduced, self.reduces_pages);
                packed.extend_from_slice(&checksum.to_le_bytes());
                Some([Bytes::from(reduced)])
            }
            _ => None,
        };
        let log = reduced.as_ref().map_or(log, |reduced| reduced);
        if self.next != self.method {
            self.switch(self.next, &mut packed)?;
        }
        let done = match self.method {
            // The rest of a frame goes with a message that is of it.
            Method::Zstd(_) => {
                let packing = match reduced.is_some() {
                    true if self.reduces_pages => Packing::PagesReducedZstd,
                    true => Packing::ReducedZstd,
                    false => Packing::Zstd,
                };
                (packing, self.zstd(log, packed)?)
            }
            Method::Lz4 => {
                let packing = match reduced.is_some() {
                    true if self.reduces_pages => Packing::PagesReducedLz4,
                    true => Packing::ReducedLz4,
                    false => Packing::Lz4,
                };
                (packing, self.lz4(log, packed))
            }
            Method::Off => (Packing::Plain, together(log)),
        };
        // Whatever packed it: the other side sees the same.
        if self.may_use_lz4 {
            log.iter().for_each(|piece| self.before.add(piece));
        }
        let took = begun.elapsed();
        self.packing += took;
        if let Some(tuner) = &mut self.tuner {
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

    fn lz4(&mut self, log: &[Bytes], mut packed: Vec<u8>) -> Bytes {
        let block = lz4_flex::block::compress_with_dict(&together(log), self.before.dictionary());
        if packed.is_empty() {
            return block.into();
        }
        packed.extend_from_slice(&block);
        packed.into()
    }
}

fn together(log: &[Bytes]) -> Bytes {
    match log {
        [only] => only.clone(),
        several => several.concat().into(),
    }
}

/// Unpacks log, or files, of one session.
pub struct Unpacker {
    decoder: Decoder<'static>,
    redundancy: Redundancy,
    /// What was unpacked right before, for lz4.
    before: Before,
}

impl std::fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Unpacker").finish_non_exhaustive()
    }
}

fn invalid(what: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn check_length(found: usize, promised: usize) -> io::Result<()> {
    if found == promised {
        return Ok(());
    }
    Err(invalid(format!("a message promised {promised} bytes of log and holds {found}")))
}

impl Unpacker {
    /// For a session that begins.
    ///
    /// # Errors
    /// No memory.
    pub fn new() -> io::Result<Unpacker> {
        let mut decoder = Decoder::new()?;
        decoder.set_parameter(DParameter::WindowLogMax(WINDOW_LOG_MAX))?;
        Ok(Unpacker { decoder, redundancy: Redundancy::default(), before: Before::default() })
    }

    /// Unpacks one message's log, which begins at `start` and must be exactly `bytes` long. Takes no
    /// more memory than that, whatever the packed bytes say.
    ///
    /// # Errors
    /// zstd's, another length, and log that is not as it was.
    pub fn unpack_log(
        &mut self,
        packing: Packing,
        mut packed: Bytes,
        start: Lsn,
        bytes: usize,
    ) -> io::Result<Bytes> {
        if !packing.is_reduced() {
            return self.unpack(packing, packed, bytes);
        }
        let Some(stated) = packed.first_chunk::<LOG_CHECKSUM_BYTES>() else {
            return Err(invalid("reduced log without the checksum of what it was"));
        };
        let stated = u32::from_le_bytes(*stated);
        packed.advance(LOG_CHECKSUM_BYTES);
        let mut log = match packing {
            Packing::ReducedLz4 | Packing::PagesReducedLz4 => self.lz4(&packed, bytes)?,
            _ => self.zstd(&packed, bytes)?,
        };
        // As it was unpacked: it is restored in place.
        self.before.add_copied(&log);
        if self.redundancy.restore(start, &mut log, packing.has_pages_reduced()) != stated {
            return Err(invalid("log that is not what it was before it was packed"));
        }
        Ok(log.into())
    }

    /// Unpacks what is no log, or was not reduced, and must be exactly `bytes` long. Takes no more
    /// memory than that, whatever the packed bytes say.
    ///
    /// # Errors
    /// zstd's, another length, and reduced log.
    pub fn unpack(&mut self, packing: Packing, packed: Bytes, bytes: usize) -> io::Result<Bytes> {
        let data = match packing {
            Packing::Plain => {
                check_length(packed.len(), bytes)?;
                packed
            }
            Packing::Zstd => self.zstd(&packed, bytes)?.into(),
            Packing::Lz4 => self.lz4(&packed, bytes)?.into(),
            Packing::ReducedZstd
            | Packing::ReducedLz4
            | Packing::PagesReducedZstd
            | Packing::PagesReducedLz4 => {
                return Err(invalid("reduced log where there is none"));
            }
        };
        self.before.add(&data);
        Ok(data)
    }

    fn lz4(&mut self, packed: &[u8], bytes: usize) -> io::Result<Vec<u8>> {
        let data = lz4_flex::block::decompress_with_dict(packed, bytes, self.before.dictionary())
            .map_err(invalid)?;
        check_length(data.len(), bytes)?;
        Ok(data)
    }

    fn zstd(&mut self, packed: &[u8], bytes: usize) -> io::Result<Vec<u8>> {
        // One more byte, to notice what is too long.
        let mut data: Vec<u8> = Vec::with_capacity(bytes + 1);
        let mut input = InBuffer::around(packed);
        loop {
            let (at, taken) = (data.len(), input.pos());
            self.decoder.run(&mut input, &mut OutBuffer::around_pos(&mut data, at))?;
            let is_idle = data.len() == at && input.pos() == taken;
            if data.len() > bytes || is_idle {
                break;
            }
        }
        check_length(data.len(), bytes)?;
        if input.pos() != packed.len() {
            return Err(invalid("a message goes on behind its log"));
        }
        Ok(data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::Log;

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
        for round in 0..4 {
            for method in METHODS {
                packer.next = method;
                for seed in 0..3 {
                    let log = piece(seed + round, 20_000);
                    let (packing, packed) = packer.pack(std::slice::from_ref(&log)).unwrap();
                    let again = unpacker.unpack(packing, packed, log.len()).unwrap();
                    assert!(again == log, "{method} in round {round}");
                }
            }
        }
    }

    const METHODS: [Method; 5] =
        [Method::Zstd(1), Method::Zstd(6), Method::Lz4, Method::Off, Method::Zstd(3)];

    /// Records of which nothing but the number is new.
    fn records(count: u32) -> Log {
        let mut log = Log::new(0);
        for number in 0..count {
            log.push_as_server(number / 3, 11, 0, &number.to_le_bytes());
        }
        log
    }

    #[test]
    fn reduced_log_is_smaller_and_comes_back_whatever_it_is_packed_with() {
        let log = records(40_000);
        for reduces in [false, true] {
            let packer = || Packer::new(Compression::Fixed(Method::Zstd(1))).unwrap();
            let mut packer = if reduces { packer().reducing(true) } else { packer() };
            packer.may_use_lz4 = true;
            let mut unpacker = Unpacker::new().unwrap();
            let (mut at, mut sizes) = (0, Vec::new());
            for (number, message) in log.bytes.chunks(50_000).enumerate() {
                packer.next = METHODS[number % METHODS.len()];
                // As it came, and as it goes.
                let pieces = [&message[..1_000], &message[1_000..]].map(Bytes::copy_from_slice);
                let (packing, packed) = packer.pack_log(Lsn(at), &pieces).unwrap();
                let is_packed = packer.method != Method::Off;
                assert_eq!(packing.is_reduced(), reduces && is_packed);
                if is_packed {
                    sizes.push(packed.len());
                }
                let again = unpacker.unpack_log(packing, packed, Lsn(at), message.len()).unwrap();
                assert!(again == message, "message {number}, {packing:?}");
                at += message.len() as u64;
            }
            let packed: usize = sizes.iter().sum();
            // Four bytes of each record are noise as they are.
            assert_eq!(packed < 40_000 * 4, reduces, "{packed} bytes");
        }
    }

    #[test]
    fn reduced_log_that_is_not_what_it_was_is_refused() {
        let log = Bytes::from(records(2_000).bytes);
        for method in [Method::Zstd(1), Method::Lz4] {
            let pack = || {
                let mut packer = Packer::new(Compression::Fixed(method)).unwrap().reducing(true);
                packer.pack_log(Lsn(0), std::slice::from_ref(&log)).unwrap()
            };
            let unpack = |packing, packed: Bytes, start| {
                Unpacker::new().unwrap().unpack_log(packing, packed, Lsn(start), log.len())
            };
            let (packing, packed) = pack();
            assert!(unpack(packing, packed.clone(), 0).unwrap() == log);
            // Restored as log of another place, it is other log, and its records are sound.
            assert!(unpack(packing, packed.clone(), 8).is_err());
            for length in 0..4 {
                assert!(unpack(packing, packed.slice(..length), 0).is_err());
            }
            let mut other = packed.to_vec();
            other[0] ^= 1;
            assert!(unpack(packing, other.into(), 0).is_err());
            // Files are never reduced.
            assert!(Unpacker::new().unwrap().unpack(packing, packed, log.len()).is_err());
        }
    }

    #[test]
    fn a_dictionary_is_the_last_of_the_log() {
        let (mut before, mut all) = (Before::default(), Vec::new());
        for (seed, bytes) in
            [300, 70_000, 65_536, 1, 40_000].into_iter().cycle().take(40).enumerate()
        {
            let log = piece(seed as u8, bytes);
            if seed % 3 == 0 {
                before.add_copied(&log)
            } else {
                before.add(&log)
            }
            all.extend_from_slice(&log);
            assert!(before.pieces_bytes < 2 * 70_000 && before.pieces.len() <= PIECES_MAX);
            if seed % 4 != 0 {
                assert!(before.dictionary() == last(&all), "after {}", all.len());
            }
            assert!(before.together.len() <= BEFORE_BYTES_MAX);
        }
        for seed in 0..=255 {
            let log = piece(seed, 10);
            before.add(&log);
            all.extend_from_slice(&log);
        }
        before.add(&piece(1, 10));
        assert!(before.pieces.is_empty(), "small ones are put together");
        all.extend_from_slice(&piece(1, 10));
        assert!(before.dictionary() == last(&all));
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
