//! The write-ahead log's own format, as far as a mirror must know it: how segment files are named,
//! and where whole records end (PostgreSQL: `access/xlog_internal.h`, `access/xlogrecord.h`). The
//! same from 14 to 18.
//!
//! ```text
//! segment 00000001 00000016 000000B3        page (8 KiB)
//!         timeline  high    segment         ├ magic 2 │ info 2 │ timeline 4 │ address 8 │ rest 4 │ pad 4 ┤
//!                   32 bits in those        first of a segment: system id 8 │ segment 4 │ page 4
//!
//! record, at a multiple of 8: total length 4 │ xid 4 │ previous 8 │ info 1 │ manager 1 │ pad 2 │ CRC 4 │ …
//! ```
//! All in the byte order of the server, which must be little-endian.

mod settings;

pub use settings::{NAMES as SETTINGS, Settings};

use farshore_model::Lsn;
use std::fmt;

/// A timeline's number, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timeline(pub u32);

impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Size of a segment file in bytes: a power of two from 1 MiB to 1 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentBytes(u32);

impl SegmentBytes {
    /// `None` for what no server can have.
    pub fn new(bytes: u64) -> Option<SegmentBytes> {
        let is_valid = bytes.is_power_of_two() && ((1 << 20)..=(1 << 30)).contains(&bytes);
        is_valid.then_some(SegmentBytes(bytes as u32))
    }

    /// In bytes.
    pub fn get(self) -> u64 {
        self.0.into()
    }

    /// The segment that the byte at `position` is in.
    pub fn number(self, position: Lsn) -> u64 {
        position.0 / self.get()
    }

    /// First byte of a segment.
    pub fn start(self, number: u64) -> Lsn {
        Lsn(number.saturating_mul(self.get()))
    }

    /// First byte of the segment that `position` is in.
    pub fn floor(self, position: Lsn) -> Lsn {
        self.start(self.number(position))
    }
}

/// A segment file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Segment {
    /// Its timeline.
    pub timeline: Timeline,
    /// Counted from the log's beginning.
    pub number: u64,
}

impl Segment {
    /// As `pg_wal` names it.
    pub fn file_name(self, size: SegmentBytes) -> String {
        let per_file = (1_u64 << 32) / size.get();
        format!(
            "{:08X}{:08X}{:08X}",
            self.timeline.0,
            self.number / per_file,
            self.number % per_file
        )
    }

    /// Reads a name; `None` if it is not one of a segment of this size.
    pub fn parse(name: &str, size: SegmentBytes) -> Option<Segment> {
        let upper_hex = |b: u8| b.is_ascii_digit() || (b'A'..=b'F').contains(&b);
        if name.len() != 24 || !name.bytes().all(upper_hex) {
            return None;
        }
        let part = |range| u32::from_str_radix(name.get(range)?, 16).ok();
        let (timeline, high, low) = (part(0..8)?, part(8..16)?, part(16..24)?);
        let per_file = (1_u64 << 32) / size.get();
        if timeline == 0 || u64::from(low) >= per_file {
            return None;
        }
        let number = u64::from(high) * per_file + u64::from(low);
        Some(Segment { timeline: Timeline(timeline), number })
    }
}

/// Name of a timeline's history file.
pub fn history_file_name(timeline: Timeline) -> String {
    format!("{:08X}.history", timeline.0)
}

/// The timeline whose history file has this name.
pub fn parse_history_file_name(name: &str) -> Option<Timeline> {
    let number = name.strip_suffix(".history")?;
    if number.len() != 8 {
        return None;
    }
    u32::from_str_radix(number, 16).ok().filter(|number| *number > 1).map(Timeline)
}

/// Bytes of a log page: what every usual build has.
pub const PAGE_BYTES: u64 = 8_192;
const SHORT_HEADER: u64 = 24;
const LONG_HEADER: u64 = 40;
/// Bytes of a record's header.
pub(crate) const RECORD_HEADER: usize = 24;
/// Where in it the CRC stands, which is its last field.
pub(crate) const RECORD_CRC_AT: usize = 20;
/// `XLogRecordMaxSize`
pub(crate) const RECORD_BYTES_MAX: u32 = 1_020 << 20;
const FIRST_IS_CONTRECORD: u16 = 1;
const LONG: u16 = 2;
const FIRST_IS_OVERWRITE_CONTRECORD: u16 = 8;
const RM_XLOG: u8 = 0;
const XLOG_SWITCH: u8 = 0x40;

/// Where pages are read from.
pub trait Pages {
    /// The page at `address`, which is a multiple of [`PAGE_BYTES`]; `None` if it is not here.
    ///
    /// # Errors
    /// The disk's.
    fn page(&mut self, address: Lsn) -> std::io::Result<Option<&[u8]>>;
}

/// What a page begins with.
#[derive(Clone, Copy)]
pub(crate) struct PageHeader {
    info: u16,
    /// Bytes of the record that began on an earlier page, from this page on.
    rest_bytes: u32,
    pub(crate) header_bytes: u64,
}

impl PageHeader {
    /// Bytes of the record that began on an earlier page, if the page begins with the rest of one.
    pub(crate) fn rest_of_record(self) -> Option<u32> {
        (self.info & FIRST_IS_CONTRECORD != 0).then_some(self.rest_bytes)
    }
}

/// The header of the page at `address`; `None` if it has none.
pub(crate) fn page_header(page: &[u8], address: Lsn) -> Option<PageHeader> {
    let head = page.first_chunk::<{ SHORT_HEADER as usize }>()?;
    let info = u16::from_le_bytes([head[2], head[3]]);
    let stated = u64::from_le_bytes(std::array::from_fn(|i| head[8 + i]));
    let rest_bytes = u32::from_le_bytes(std::array::from_fn(|i| head[16 + i]));
    // A page that was never written is all zero, its magic too.
    if (head[0], head[1]) == (0, 0) || stated != address.0 {
        return None;
    }
    let header_bytes = if info & LONG != 0 { LONG_HEADER } else { SHORT_HEADER };
    Some(PageHeader { info, rest_bytes, header_bytes })
}

/// What a long page header says of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongHeader {
    /// The server's identity.
    pub system_id: u64,
    /// Bytes of a segment.
    pub segment_bytes: u32,
    /// Bytes of a page.
    pub page_bytes: u32,
}

/// The long header of a segment's first page; `None` if it has none.
pub fn long_header(page: &[u8], address: Lsn) -> Option<LongHeader> {
    let header = page_header(page, address)?;
    let head = page.first_chunk::<{ LONG_HEADER as usize }>()?;
    (header.info & LONG != 0).then(|| LongHeader {
        system_id: u64::from_le_bytes(std::array::from_fn(|i| head[24 + i])),
        segment_bytes: u32::from_le_bytes(std::array::from_fn(|i| head[32 + i])),
        page_bytes: u32::from_le_bytes(std::array::from_fn(|i| head[36 + i])),
    })
}

/// Whether the page begins with the rest of a record from before it.
///
/// # Errors
/// The disk's.
pub fn begins_within_record(pages: &mut impl Pages, address: Lsn) -> std::io::Result<bool> {
    let Some(page) = pages.page(address)? else { return Ok(false) };
    Ok(page_header(page, address).is_some_and(|header| header.info & FIRST_IS_CONTRECORD != 0))
}

/// Where the first record begins at or after the start of the page at `address`: behind what is
/// left of one that began before it. `None` if that cannot be told.
///
/// # Errors
/// The disk's.
pub fn first_record(pages: &mut impl Pages, address: Lsn) -> std::io::Result<Option<Lsn>> {
    let mut at = address;
    loop {
        let Some(page) = pages.page(at)? else { return Ok(None) };
        let Some(header) = page_header(page, at) else { return Ok(None) };
        if header.info & FIRST_IS_CONTRECORD == 0 {
            return Ok(Some(Lsn(at.0 + header.header_bytes)));
        }
        let end = header.header_bytes + u64::from(header.rest_bytes).next_multiple_of(8);
        if end < PAGE_BYTES {
            return Ok(Some(Lsn(at.0 + end)));
        }
        let Some(next) = at.0.checked_add(PAGE_BYTES) else { return Ok(None) };
        at = Lsn(next);
        if end == PAGE_BYTES {
            return Ok(Some(at));
        }
    }
}

/// What a record turned out to be.
enum Found {
    /// Whole and sound; the next one is looked for at `end`.
    Record { begin: Lsn, previous: Lsn, bytes_end: Lsn, end: Lsn, settings: Option<Settings> },
    /// It was given up when the server crashed, and overwritten from this page on.
    GivenUp { go_on: Lsn },
    /// Not there, not whole, or not sound. Everything before `at` was as it should be.
    Nothing { at: Lsn },
}

/// How far a scan got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scanned {
    /// The end of the last whole record: of one that ends its segment, the segment's.
    pub end: Lsn,
    /// Where its own bytes end.
    pub bytes_end: Lsn,
    /// Where something was not as it should be; at or after `end`.
    pub stopped_at: Lsn,
}

/// Walks an unbroken row of records that begins at `start`, which is where a record begins (or
/// would), up to the last one that ends at or before `bound`. Every record's checksum is checked,
/// and that it names the one before: what a segment's file held earlier may stand behind the end.
///
/// # Errors
/// The disk's.
pub fn scan(
    pages: &mut impl Pages,
    start: Lsn,
    segment: SegmentBytes,
    bound: Lsn,
) -> std::io::Result<Scanned> {
    scan_for_settings(pages, start, segment, bound, |_, _| {})
}

/// As [`scan`], and tells of records that say what settings a standby has to have: where each
/// begins, and what it says.
///
/// # Errors
/// The disk's.
pub fn scan_for_settings(
    pages: &mut impl Pages,
    start: Lsn,
    segment: SegmentBytes,
    bound: Lsn,
    mut tell: impl FnMut(Lsn, Settings),
) -> std::io::Result<Scanned> {
    let (mut end, mut bytes_end) = (start, start);
    let mut at = start;
    let mut before: Option<Lsn> = None;
    loop {
        let stopped_at = match record(pages, at, segment)? {
            Found::Record { begin, previous, .. } if before.is_some_and(|b| b != previous) => begin,
            Found::Record { end: next, .. } if next > bound => next,
            Found::Record { begin, bytes_end: own, end: next, settings, .. } => {
                if let Some(settings) = settings {
                    tell(begin, settings);
                }
                before = Some(begin);
                (end, bytes_end, at) = (next, own, next);
                continue;
            }
            Found::GivenUp { go_on } => {
                at = go_on;
                continue;
            }
            Found::Nothing { at } => at,
        };
        return Ok(Scanned { end, bytes_end, stopped_at });
    }
}

fn record(pages: &mut impl Pages, start: Lsn, segment: SegmentBytes) -> std::io::Result<Found> {
    let mut at = start.0;
    let mut begin = start;
    let mut head: Vec<u8> = Vec::with_capacity(RECORD_HEADER);
    let mut body_crc = 0;
    // The beginning of the body, of a record that says settings.
    let mut body: Vec<u8> = Vec::new();
    // Bytes of the record not yet seen; the length stands in its first 4 bytes, which are always
    // on its first page.
    let mut left: Option<u32> = None;
    loop {
        let address = Lsn(at - at % PAGE_BYTES);
        let Some(page) = pages.page(address)? else { return Ok(Found::Nothing { at: address }) };
        let Some(header) = page_header(page, address) else {
            return Ok(Found::Nothing { at: address });
        };
        if at.is_multiple_of(PAGE_BYTES) {
            at += header.header_bytes;
            match left {
                Some(_) if header.info & FIRST_IS_OVERWRITE_CONTRECORD != 0 => {
                    return Ok(Found::GivenUp { go_on: address });
                }
                Some(left)
                    if header.info & FIRST_IS_CONTRECORD == 0 || header.rest_bytes != left =>
                {
                    return Ok(Found::Nothing { at: address });
                }
                None if header.info & FIRST_IS_CONTRECORD != 0 => {
                    return Ok(Found::Nothing { at: address });
                }
                Some(_) | None => {}
            }
        }
        if left.is_none() {
            begin = Lsn(at);
        }
        let here = (at % PAGE_BYTES) as usize;
        let Some(rest) = page.get(here..) else { return Ok(Found::Nothing { at: Lsn(at) }) };
        let mut remaining = match (left, rest.first_chunk::<4>()) {
            (Some(left), _) => left,
            (None, Some(word)) => {
                let total = u32::from_le_bytes(*word);
                if !(RECORD_HEADER as u32..=RECORD_BYTES_MAX).contains(&total) {
                    return Ok(Found::Nothing { at: Lsn(at) });
                }
                total
            }
            (None, None) => return Ok(Found::Nothing { at: Lsn(at) }),
        };
        let mut piece = &rest[..rest.len().min(remaining as usize)];
        at += piece.len() as u64;
        remaining -= piece.len() as u32;
        left = Some(remaining);
        if head.len() < RECORD_HEADER {
            let (of_head, of_body) = piece.split_at(piece.len().min(RECORD_HEADER - head.len()));
            head.extend_from_slice(of_head);
            piece = of_body;
        }
        body_crc = crc32c::crc32c_append(body_crc, piece);
        if head.len() == RECORD_HEADER && Settings::are_in(head[16], head[17]) {
            let wanted = settings::LOOKED_AT - body.len();
            body.extend_from_slice(&piece[..piece.len().min(wanted)]);
        }
        if remaining > 0 {
            continue;
        }
        let stated = u32::from_le_bytes(std::array::from_fn(|i| head[RECORD_CRC_AT + i]));
        // The checksum covers what follows the header first, then the header up to itself.
        if crc32c::crc32c_append(body_crc, &head[..RECORD_CRC_AT]) != stated {
            // Any of its bytes may be the wrong one.
            return Ok(Found::Nothing { at: Lsn(at - 1) });
        }
        let is_switch = head[17] == RM_XLOG && head[16] & 0xF0 == XLOG_SWITCH;
        let bytes_end = Lsn(at.next_multiple_of(8));
        let end = if is_switch && bytes_end != segment.floor(bytes_end) {
            segment.start(segment.number(bytes_end) + 1)
        } else {
            bytes_end
        };
        let previous = Lsn(u64::from_le_bytes(std::array::from_fn(|i| head[8 + i])));
        let settings = Settings::decode(&body);
        return Ok(Found::Record { begin, previous, bytes_end, end, settings });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::{Log, SEGMENT_BYTES, SYSTEM_ID};

    const MIB16: u64 = 16 << 20;

    #[test]
    fn segments_are_named_as_in_pg_wal() {
        let size = SegmentBytes::new(MIB16).unwrap();
        let position: Lsn = "16/B374D848".parse().unwrap();
        let segment = Segment { timeline: Timeline(3), number: size.number(position) };
        assert_eq!(segment.file_name(size), "0000000300000016000000B3");
        assert_eq!(Segment::parse("0000000300000016000000B3", size), Some(segment));
        for name in ["0000000300000016000000b3", "000000030000001600000100", "x", "00000000"] {
            assert_eq!(Segment::parse(name, size), None, "{name}");
        }
        assert_eq!(parse_history_file_name("00000002.history"), Some(Timeline(2)));
        assert_eq!(parse_history_file_name("00000001.history"), None);
        for bytes in [0, 1, 3 << 20, 512 << 10, 2 << 30] {
            assert_eq!(SegmentBytes::new(bytes), None, "{bytes}");
        }
    }

    struct Memory(Log);

    impl Pages for Memory {
        fn page(&mut self, address: Lsn) -> std::io::Result<Option<&[u8]>> {
            let at = address.0 as usize;
            Ok(self.0.bytes.get(at..at + PAGE_BYTES as usize))
        }
    }

    fn written(lengths: &[u32]) -> (Memory, Vec<Lsn>) {
        let mut log = Log::new(0);
        lengths.iter().for_each(|length| log.push(*length));
        let ends = log.ends.iter().map(|end| Lsn(*end)).collect();
        log.bytes.resize(log.bytes.len().next_multiple_of(8_192) + 8_192, 0);
        (Memory(log), ends)
    }

    #[test]
    fn the_scan_ends_where_the_last_whole_record_does() {
        let size = SegmentBytes::new(SEGMENT_BYTES).unwrap();
        let lengths = [30, 100, 8_100, 24, 20_000, 31, 8_192, 700];
        let (mut whole, ends) = written(&lengths);
        let start = first_record(&mut whole, Lsn(0)).unwrap().unwrap();
        assert_eq!(start, Lsn(LONG_HEADER));
        let found = scan(&mut whole, start, size, Lsn::MAX).unwrap();
        assert_eq!(Some(&found.end), ends.last());
        assert_eq!(found.stopped_at, found.end);
        let header = long_header(whole.page(Lsn(0)).unwrap().unwrap(), Lsn(0)).unwrap();
        assert_eq!((header.system_id, header.page_bytes), (SYSTEM_ID, 8_192));
        // Torn at any byte: everything that ends before it is found, and only whole records are.
        let total = ends.last().unwrap().0;
        for at in (LONG_HEADER..total).step_by(61) {
            let (mut torn, _) = written(&lengths);
            torn.0.bytes[at as usize] ^= 1;
            let found = scan(&mut torn, start, size, Lsn::MAX).unwrap().end;
            let before = ends.iter().rev().find(|end| end.0 <= at).copied().unwrap_or(start);
            assert!(found >= before, "torn at {at}: {found} < {before}");
            assert!(ends.contains(&found) || found == start, "torn at {at}: {found}");
        }
    }

    #[test]
    fn old_log_behind_the_new_is_not_taken_for_it() {
        let size = SegmentBytes::new(SEGMENT_BYTES).unwrap();
        let of = |begin: u64| {
            let mut log = Log::new(begin);
            while log.bytes.len() < 3 * PAGE_BYTES as usize {
                log.push(96);
            }
            log
        };
        let (old, new) = (of(0), of(SEGMENT_BYTES * 4));
        for kept in new.ends.iter().map(|end| (end - new.begin) as usize) {
            let mut bytes = vec![0; new.begin as usize];
            bytes.extend_from_slice(&new.bytes[..kept]);
            bytes.extend_from_slice(&old.bytes[kept..]);
            bytes.truncate(bytes.len() / PAGE_BYTES as usize * PAGE_BYTES as usize);
            let there = bytes.len() as u64;
            let mut file = Memory(Log::new(0));
            file.0.bytes = bytes;
            let start = Lsn(new.begin + LONG_HEADER);
            let found = scan(&mut file, start, size, Lsn::MAX).unwrap();
            let end = new.ends.iter().rfind(|end| **end <= there.min(new.begin + kept as u64));
            assert_eq!(Some(&found.end.0), end);
        }
    }

    #[test]
    fn a_switch_goes_on_in_the_next_segment() {
        let size = SegmentBytes::new(SEGMENT_BYTES).unwrap();
        let mut log = Log::new(0);
        log.push(100);
        log.switch_segment();
        log.push(200);
        let end = Lsn(log.end());
        log.bytes.resize(log.bytes.len().next_multiple_of(8_192), 0);
        let found = scan(&mut Memory(log), Lsn(LONG_HEADER), size, Lsn::MAX).unwrap();
        assert_eq!(found.end, end);
    }

    #[test]
    fn settings_are_told_wherever_their_record_begins() {
        let size = SegmentBytes::new(SEGMENT_BYTES).unwrap();
        let mut data = vec![0xFF, 28];
        (1..=7_i32).for_each(|value| data.extend_from_slice(&value.to_le_bytes()));
        // Whole on a page, and cut anywhere by the end of one.
        for length in (PAGE_BYTES - LONG_HEADER - 80..PAGE_BYTES - LONG_HEADER).step_by(8) {
            let mut log = Log::new(0);
            log.push(length as u32);
            log.push_as_server(0, RM_XLOG, 0x60, &data);
            log.push(100);
            let end = Lsn(log.end());
            log.bytes.resize(log.bytes.len().next_multiple_of(8_192), 0);
            let mut told = Vec::new();
            let found = scan_for_settings(
                &mut Memory(log),
                Lsn(LONG_HEADER),
                size,
                Lsn::MAX,
                |begin, settings| told.push((begin, settings)),
            );
            assert_eq!(found.unwrap().end, end, "{length}");
            let [(begin, settings)] = told[..] else { panic!("{length}: {told:?}") };
            assert!(begin.0 >= LONG_HEADER + length, "{length}: {begin}");
            assert_eq!(settings, Settings([1, 2, 3, 4, 5]), "{length}");
        }
    }

    #[test]
    fn the_rest_of_a_record_is_stepped_over() {
        let (mut log, ends) = written(&[30, 20_000, 40]);
        // The second page begins within the long record, which ends on the third.
        assert!(begins_within_record(&mut log, Lsn(PAGE_BYTES)).unwrap());
        assert_eq!(first_record(&mut log, Lsn(PAGE_BYTES)).unwrap(), Some(ends[1]));
        assert!(!begins_within_record(&mut log, Lsn(0)).unwrap());
        assert_eq!(first_record(&mut log, Lsn(PAGE_BYTES * 400)).unwrap(), None);
    }
}
