//! What in a write-ahead log follows from the rest of it, and looks like noise to a compressor:
//! taken out before log is packed, and put back when it is unpacked.
//!
//! ```text
//! record   total length 4 │ xid 4 │ previous 8 │ info 1 │ manager 1 │ pad 2 │ CRC 4 │ data …
//!                           └─ − the xid before    └─ ⊕ where the record before began
//!                                                        └─ ⊕ what the record's bytes come to
//! data of  commit, abort           FF 1 │ length 1 │ time 8 │ …      − the time before
//!          heap update, HOT update … │ old xmax 4 │ 10 bytes ┤       ⊕ the record's xid
//!          heap delete, lock       … │ xmax 4 │ 4 bytes ┤            ⊕ the record's xid
//! ```
//! Each field is replaced by how it differs from what is expected there: the exclusive or, or where
//! a minus stands the wrapping difference with its sign in the lowest bit. In log as servers write it
//! that is zero or small. No byte is added or left out.
//!
//! Expectations come from bytes before the field, or from bytes that are never changed, and whoever
//! restores has them restored by then: both walk the log in the same way and are never of two
//! minds. So it does not matter whether an expectation is right. Any bytes can be reduced and are
//! restored as they were; what log they are of, and whether it is sound, only decides how small they
//! become afterwards. What is walked by (lengths of records, headers of pages) is never changed.
//!
//! What goes with each message as its checksum is not just the CRC of its log. Whoever restores a
//! record's CRC makes one that fits the record's header, whatever that has become, and a CRC of the
//! same polynomial over both is then the same for every header: their difference is a multiple of
//! it. So the headers have a sum of their own, which the walk takes ([`Redundancy::restore`]).
//!
//! A message may begin and end anywhere. A field that is not whole in one message, on one page, is
//! left as it is; so is the CRC of a record whose end, or whose own 8 bytes, are in another message.
//! Who has lost the way (a length that cannot be, a page that is none) goes on at the next page that
//! has a header.

use super::whole_pages::WholePages;
use crate::wal::{self, PAGE_BYTES};
use farshore_model::Lsn;

/// Bytes of a record's header, which is read in units of 8: a record begins at a multiple of that,
/// so no unit lies on two pages.
const HEADER_BYTES: u32 = wal::RECORD_HEADER as u32;
const UNIT: usize = 8;
/// Managers of records (`access/rmgrlist.h`).
const RM_XACT: u8 = 1;
const RM_HEAP: u8 = 10;
/// What in `info` says which of the manager's records it is.
const OPERATION: u8 = 0x70;
/// A record that has no more than its main data, of less than 256 bytes.
const SHORT_DATA: u8 = 0xFF;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Reduce,
    Restore,
}

impl Way {
    /// Changes a field; what the log has in it.
    fn xor_u32(self, field: &mut [u8; 4], expected: u32) -> u32 {
        let before = u32::from_le_bytes(*field);
        let after = before ^ expected;
        *field = after.to_le_bytes();
        self.of_log(before, after)
    }

    fn xor_u64(self, field: &mut [u8; 8], expected: u64) -> u64 {
        let before = u64::from_le_bytes(*field);
        let after = before ^ expected;
        *field = after.to_le_bytes();
        self.of_log(before, after)
    }

    pub(super) fn minus_u32(self, field: &mut [u8; 4], expected: u32) -> u32 {
        let before = u32::from_le_bytes(*field);
        let after = match self {
            Way::Reduce => {
                let difference = before.wrapping_sub(expected);
                (difference << 1) ^ (difference >> 31).wrapping_neg()
            }
            Way::Restore => ((before >> 1) ^ (before & 1).wrapping_neg()).wrapping_add(expected),
        };
        *field = after.to_le_bytes();
        self.of_log(before, after)
    }

    fn minus_u64(self, field: &mut [u8; 8], expected: u64) -> u64 {
        let before = u64::from_le_bytes(*field);
        let after = match self {
            Way::Reduce => {
                let difference = before.wrapping_sub(expected);
                (difference << 1) ^ (difference >> 63).wrapping_neg()
            }
            Way::Restore => ((before >> 1) ^ (before & 1).wrapping_neg()).wrapping_add(expected),
        };
        *field = after.to_le_bytes();
        self.of_log(before, after)
    }

    pub(super) fn of_log<T>(self, before: T, after: T) -> T {
        match self {
            Way::Reduce => before,
            Way::Restore => after,
        }
    }
}

/// Where in the log the walk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Anywhere: the next page says.
    Lost,
    /// Between records: the next one begins at the next multiple of 8.
    Between,
    /// Before the record's second 8 bytes.
    Previous { left: u32 },
    /// Before its third.
    Kind { left: u32 },
    /// In its data.
    Data { left: u32 },
}

/// A CRC that will be known at the record's end.
#[derive(Clone, Copy, Debug)]
struct Sum {
    /// Where in the message it stands.
    at: usize,
    /// Of the record's data up to here.
    data: u32,
}

/// The walk along one session's log.
#[derive(Clone, Debug)]
pub struct Redundancy {
    /// Where the walk goes on. Log that begins elsewhere is walked anew.
    next: Option<u64>,
    place: Place,
    /// The record that is walked: its header without the CRC. Zero, of which nothing is expected, if
    /// its beginning was not seen.
    header: [u8; wal::RECORD_CRC_AT],
    record_start: u64,
    /// Where the record before it began.
    previous: u64,
    /// Of the last record that had one.
    xid: u32,
    /// When the last transaction ended.
    time: u64,
    /// Whole pages in it are walked too.
    with_pages: bool,
    pages: WholePages,
}

impl Default for Redundancy {
    fn default() -> Redundancy {
        Redundancy {
            next: None,
            // Flushed log, which is what comes, ends where a record does.
            place: Place::Between,
            header: [0; wal::RECORD_CRC_AT],
            record_start: 0,
            previous: 0,
            xid: 0,
            time: 0,
            with_pages: false,
            pages: WholePages::default(),
        }
    }
}

impl Redundancy {
    /// Takes out of one message's log what is expected there, in its whole pages too or not. Returns
    /// the checksum of the log.
    pub fn reduce(&mut self, start: Lsn, log: &mut [u8], with_pages: bool) -> u32 {
        let sum = crc32c::crc32c(log);
        sum ^ self.walk(start, log, with_pages, Way::Reduce)
    }

    /// Puts it back: the messages must be those that were reduced, all of them, in the same order.
    /// Returns the checksum of the log, which is what [`Redundancy::reduce`] said if it is the same.
    pub fn restore(&mut self, start: Lsn, log: &mut [u8], with_pages: bool) -> u32 {
        let headers = self.walk(start, log, with_pages, Way::Restore);
        crc32c::crc32c(log) ^ headers
    }

    /// Returns the CRC-32C of the headers of the records that it came by, as they are in the log,
    /// one after the other, without their CRCs.
    fn walk(&mut self, start: Lsn, log: &mut [u8], with_pages: bool, way: Way) -> u32 {
        let mut headers = 0;
        if self.next != Some(start.0) {
            *self = Redundancy::default();
        }
        if self.with_pages != with_pages {
            self.pages.give_up();
            self.with_pages = with_pages;
        }
        self.next = Some(start.0.wrapping_add(log.len() as u64));
        let mut sum: Option<Sum> = None;
        let mut at = 0;
        while at < log.len() {
            let position = start.0.wrapping_add(at as u64);
            let on_page = position % PAGE_BYTES;
            let rest = &mut log[at..];
            if on_page == 0 {
                let (place, bytes) = self.enter_page(rest, position);
                if place != self.place {
                    sum = None;
                }
                self.place = place;
                at += bytes;
                continue;
            }
            let rest_of_page = rest.len().min((PAGE_BYTES - on_page) as usize);
            at += match self.place {
                Place::Lost => rest_of_page,
                Place::Between => {
                    let padding = (position.wrapping_neg() % UNIT as u64) as usize;
                    if padding > 0 {
                        rest_of_page.min(padding)
                    } else {
                        sum = None;
                        self.begin(rest, position, way)
                    }
                }
                Place::Previous { left } => match rest.first_chunk_mut::<UNIT>() {
                    Some(previous) => {
                        let found = way.xor_u64(previous, self.previous);
                        self.header[8..16].copy_from_slice(&found.to_le_bytes());
                        self.previous = self.record_start;
                        self.place = Place::Kind { left: left - UNIT as u32 };
                        UNIT
                    }
                    None => self.lose(),
                },
                Place::Kind { left } => match rest.first_chunk::<UNIT>() {
                    Some([info, manager, pad @ .., _, _, _, _]) => {
                        self.header[16..].copy_from_slice(&[*info, *manager, pad[0], pad[1]]);
                        headers = crc32c::crc32c_append(headers, &self.header);
                        let left = left - UNIT as u32;
                        let is_whole = left as usize <= rest.len() - UNIT;
                        sum = is_whole.then_some(Sum { at: at + 4, data: 0 });
                        self.place = Place::Data { left };
                        self.pages.begin(left);
                        UNIT
                    }
                    None => self.lose(),
                },
                Place::Data { left } => {
                    let bytes = rest_of_page.min(left as usize);
                    self.data(&mut rest[..bytes], left, sum.as_mut(), way);
                    self.place = Place::Data { left: left - bytes as u32 };
                    bytes
                }
            };
            if self.place == (Place::Data { left: 0 }) {
                self.place = Place::Between;
                if let Some(Sum { at, data }) = sum.take()
                    && let Some(field) = log[at..].first_chunk_mut::<4>()
                {
                    way.xor_u32(field, crc32c::crc32c_append(data, &self.header));
                }
            }
        }
        headers
    }

    /// Where the page's header leads to, and its bytes.
    fn enter_page(&mut self, page: &[u8], position: u64) -> (Place, usize) {
        let header = wal::page_header(page, Lsn(position));
        let Some(header) = header.filter(|header| header.header_bytes <= page.len() as u64) else {
            return (Place::Lost, page.len().min(UNIT));
        };
        let goes_on = match self.place {
            Place::Previous { left } | Place::Kind { left } | Place::Data { left } => Some(left),
            Place::Lost | Place::Between => None,
        };
        let place = match header.rest_of_record() {
            Some(rest) if goes_on == Some(rest) => self.place,
            Some(left) if left > 0 => {
                self.header = [0; wal::RECORD_CRC_AT];
                self.pages.give_up();
                Place::Data { left }
            }
            Some(_) | None => Place::Between,
        };
        (place, header.header_bytes as usize)
    }

    /// A record's first 8 bytes.
    fn begin(&mut self, rest: &mut [u8], position: u64, way: Way) -> usize {
        let Some([l0, l1, l2, l3, xid @ ..]) = rest.first_chunk_mut::<UNIT>() else {
            return self.lose();
        };
        let length = u32::from_le_bytes([*l0, *l1, *l2, *l3]);
        if !(HEADER_BYTES..=wal::RECORD_BYTES_MAX).contains(&length) {
            return self.lose();
        }
        let found = way.minus_u32(xid, self.xid);
        if found != 0 {
            self.xid = found;
        }
        self.header[..4].copy_from_slice(&length.to_le_bytes());
        self.header[4..8].copy_from_slice(&found.to_le_bytes());
        self.record_start = position;
        self.place = Place::Previous { left: length - UNIT as u32 };
        UNIT
    }

    /// Nothing is known of the bytes from here on; none is passed over.
    fn lose(&mut self) -> usize {
        self.place = Place::Lost;
        0
    }

    /// A piece of a record's data, on one page; `left` bytes of the record are left with it.
    fn data(&mut self, piece: &mut [u8], left: u32, sum: Option<&mut Sum>, way: Way) {
        // The sum is of the log's own bytes. Both may change the same bytes: what was done last is
        // taken back first.
        if way == Way::Restore {
            self.expect_in(piece, left, way);
            if self.with_pages {
                self.pages.walk(piece, way);
            }
        }
        if let Some(sum) = sum {
            sum.data = crc32c::crc32c_append(sum.data, piece);
        }
        if way == Way::Reduce {
            if self.with_pages {
                self.pages.walk(piece, way);
            }
            self.expect_in(piece, left, way);
        }
    }

    fn expect_in(&mut self, piece: &mut [u8], left: u32, way: Way) {
        let [l0, l1, l2, l3, x0, x1, x2, x3, ..] = self.header;
        match (self.header[17], self.header[16] & OPERATION) {
            // A commit and an abort.
            (RM_XACT, 0x00 | 0x20) => {
                let data_bytes = u32::from_le_bytes([l0, l1, l2, l3]).checked_sub(HEADER_BYTES);
                if let Some([SHORT_DATA, _, time @ ..]) = piece.first_chunk_mut::<10>()
                    && data_bytes == Some(left)
                {
                    self.time = way.minus_u64(time, self.time);
                }
            }
            (RM_HEAP, operation) => {
                // The main data is the last of a record.
                let from_end = match operation {
                    // An update, and one that touches no index.
                    0x20 | 0x40 => 14,
                    // A deletion, and a lock.
                    0x10 | 0x60 => 8,
                    _ => return,
                };
                if piece.len() == left as usize
                    && let Some(at) = piece.len().checked_sub(from_end)
                    && let Some(xmax) = piece[at..].first_chunk_mut::<4>()
                {
                    way.xor_u32(xmax, u32::from_le_bytes([x0, x1, x2, x3]));
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::whole_pages::tests::{heap, index, record as whole_pages};
    use crate::synthetic::{Log, SEGMENT_BYTES};
    use proptest::prelude::*;

    const BEGIN: u64 = 5 * SEGMENT_BYTES;

    /// Log of transactions that overlap, with full pages, a long record, and a segment that was
    /// ended early.
    fn transactions(count: u32) -> Log {
        let mut log = Log::new(BEGIN);
        for number in 0..count {
            let xid = 70_000 + number - number % 3;
            let noise = number.wrapping_mul(0x9E37_79B9);
            let mut update = vec![0x20; 30 + (noise >> 28) as usize];
            update.extend_from_slice(&noise.to_le_bytes());
            if number % 11 == 0 {
                update.resize(8_000, 7);
            }
            update.extend_from_slice(&xid.to_le_bytes());
            update.extend_from_slice(&[3, 0, 0x11, 0, 0, 0, 0, 0, 5, 0]);
            log.push_as_server(xid, RM_HEAP, 0x40, &update);
            log.push_as_server(xid, 11, 0, &noise.to_le_bytes());
            if number % 17 == 0 {
                let pages = [(heap(90, number), number), (index(200, 70), number)];
                // With an xmax that lies in a page.
                log.push_as_server(xid, RM_HEAP, 0x40, &whole_pages(&pages));
            }
            let mut deletion = vec![0x10; 20];
            deletion.extend_from_slice(&xid.to_le_bytes());
            deletion.extend_from_slice(&[3, 0, 0x11, 0]);
            log.push_as_server(xid, RM_HEAP, 0x10, &deletion);
            let mut commit = vec![SHORT_DATA, 8];
            let time = 700_000_000_000_000 + u64::from(number) * 1_000 - u64::from(noise % 900);
            commit.extend_from_slice(&time.to_le_bytes());
            log.push_as_server(xid, RM_XACT, 0, &commit);
            if number % 400 == 399 {
                log.push_as_server(0, 0, 0xA0, &[]);
                log.push_as_server(0, 10, 0x70, &vec![1; 100_000]);
                log.switch_segment();
            }
        }
        log
    }

    /// Whether whole pages are reduced in the message that begins there: in most.
    fn has_pages(cut: usize) -> bool {
        cut % 5 != 3
    }

    /// What is left of the log in messages that end where `cuts` say.
    fn reduced(log: &[u8], cuts: &[usize]) -> Vec<u8> {
        let mut reduced = log.to_vec();
        let mut redundancy = Redundancy::default();
        for cut in cuts.windows(2) {
            let start = Lsn(BEGIN + cut[0] as u64);
            redundancy.reduce(start, &mut reduced[cut[0]..cut[1]], has_pages(cut[0]));
        }
        reduced
    }

    fn restored(reduced: &[u8], cuts: &[usize]) -> Vec<u8> {
        let mut log = reduced.to_vec();
        let mut redundancy = Redundancy::default();
        for cut in cuts.windows(2) {
            let start = Lsn(BEGIN + cut[0] as u64);
            redundancy.restore(start, &mut log[cut[0]..cut[1]], has_pages(cut[0]));
        }
        log
    }

    /// The record that ends at `end`, and has `length` bytes that are all on one page.
    fn record(log: &Log, bytes: &[u8], end: u64, length: usize) -> Vec<u8> {
        let begin = (end - log.begin) as usize - length.next_multiple_of(8);
        bytes[begin..begin + length].to_vec()
    }

    #[test]
    fn what_follows_from_the_rest_becomes_zero() {
        let mut log = Log::new(BEGIN);
        let mut commit = vec![SHORT_DATA, 8];
        commit.extend_from_slice(&700_000_000_000_000_u64.to_le_bytes());
        log.push_as_server(9_000, RM_XACT, 0, &commit);
        commit[2..].copy_from_slice(&700_000_000_000_005_u64.to_le_bytes());
        log.push_as_server(8_999, RM_XACT, 0, &commit);
        let mut lock = vec![0; 12];
        lock.extend_from_slice(&8_999_u32.to_le_bytes());
        lock.extend_from_slice(&[1, 0, 0, 0]);
        log.push_as_server(8_999, RM_HEAP, 0x60, &lock);
        let reduced = reduced(&log.bytes, &[0, log.bytes.len()]);
        // One less is 1, five more is 10.
        let mut expected = vec![34, 0, 0, 0, 1];
        expected.resize(24, 0);
        expected[17] = RM_XACT;
        expected.extend_from_slice(&[SHORT_DATA, 8, 10, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(record(&log, &reduced, log.ends[1], 34), expected);
        let mut expected = vec![0; 44];
        (expected[0], expected[16], expected[17], expected[40]) = (44, 0x60, RM_HEAP, 1);
        assert_eq!(record(&log, &reduced, log.ends[2], 44), expected);
        assert_eq!(restored(&reduced, &[0, log.bytes.len()]), log.bytes);
    }

    #[test]
    fn records_across_pages_lose_their_crc_too() {
        let log = transactions(500);
        let whole = reduced(&log.bytes, &[0, log.bytes.len()]);
        // Every record's CRC, wherever its header lies.
        let mut at = 0;
        let mut records = 0;
        for end in &log.ends {
            let on_page = |at: usize| at % PAGE_BYTES as usize;
            let header = |at: usize| {
                if (BEGIN + at as u64).is_multiple_of(SEGMENT_BYTES) { 40 } else { 24 }
            };
            if on_page(at) == 0 {
                at += header(at);
            }
            let mut kind = at + 16;
            if on_page(at) >= PAGE_BYTES as usize - 16 {
                kind += header(at.next_multiple_of(PAGE_BYTES as usize));
            }
            assert_ne!(log.bytes[kind + 4..kind + 8], [0; 4], "at {at}");
            assert_eq!(whole[kind + 4..kind + 8], [0; 4], "at {at}");
            records += 1;
            at = (end - BEGIN) as usize;
            let segment = SEGMENT_BYTES as usize;
            if whole[kind..kind + 2] == [0x40, 0] {
                at = at.next_multiple_of(segment);
            }
        }
        assert_eq!(records, log.ends.len());
        assert_eq!(restored(&whole, &[0, log.bytes.len()]), log.bytes);
    }

    #[test]
    fn a_walk_that_begins_anywhere_finds_the_way_at_the_next_page() {
        let log = transactions(300);
        let all = &log.bytes[..];
        for begin in [1, 23, 8_192 + 8, 8_192 * 3 + 500, 8_192 * 5 + 4_001] {
            let page = (begin as u64).next_multiple_of(PAGE_BYTES) as usize;
            let mut log = all[begin..].to_vec();
            let mut redundancy = Redundancy::default();
            // Without whole pages: the rest of one whose beginning was not seen is left as it is.
            redundancy.reduce(Lsn(BEGIN + begin as u64), &mut log, false);
            let from_page = &log[page - begin..];
            // The first transaction on the page, and the first time, are of log before it.
            let mut known = all.to_vec();
            Redundancy::default().reduce(Lsn(BEGIN), &mut known, false);
            let differ = from_page.iter().zip(&known[page..]).filter(|(a, b)| a != b).count();
            assert!(differ <= 4 + 8 + 8 + 8, "from {begin}: {differ} bytes differ");
            let mut redundancy = Redundancy::default();
            redundancy.restore(Lsn(BEGIN + begin as u64), &mut log, false);
            assert_eq!(log, all[begin..]);
            let begin_of_log = Lsn(BEGIN + begin as u64);
            Redundancy::default().reduce(begin_of_log, &mut log, true);
            Redundancy::default().restore(begin_of_log, &mut log, true);
            assert_eq!(log, all[begin..], "with whole pages");
        }
    }

    #[test]
    fn cut_at_every_byte_all_comes_back() {
        let log = transactions(40);
        let all = &log.bytes[..24_000];
        for cut in (0..all.len()).step_by(if cfg!(debug_assertions) { 7 } else { 1 }) {
            let cuts = [0, cut, all.len()];
            assert!(restored(&reduced(all, &cuts), &cuts) == all, "cut at {cut}");
        }
        for step in [1, 3, 8, 16, 24, 100] {
            let mut cuts: Vec<usize> = (0..all.len()).step_by(step).collect();
            cuts.push(all.len());
            assert!(restored(&reduced(all, &cuts), &cuts) == all, "cut every {step}");
        }
    }

    #[test]
    fn the_end_of_all_positions_is_one_like_others() {
        let mut log = vec![0x20; 100];
        for start in [u64::MAX - 100, u64::MAX - 60, u64::MAX] {
            Redundancy::default().reduce(Lsn(start), &mut log, true);
            Redundancy::default().restore(Lsn(start), &mut log, true);
            assert_eq!(log, [0x20; 100]);
        }
    }

    #[derive(Debug, Clone)]
    enum Damage {
        Flip { at: usize, bits: u8 },
        Word { at: usize, word: u32 },
        Zero { at: usize, bytes: usize },
        Noise { at: usize, bytes: Vec<u8> },
        Remove { at: usize, bytes: usize },
    }

    fn damage() -> impl Strategy<Value = Damage> {
        let at = 0..300_000_usize;
        prop_oneof![
            (at.clone(), 1..=u8::MAX).prop_map(|(at, bits)| Damage::Flip { at, bits }),
            (at.clone(), prop_oneof![0..100_u32, any::<u32>()])
                .prop_map(|(at, word)| Damage::Word { at: at & !7, word }),
            (at.clone(), 1..20_000_usize).prop_map(|(at, bytes)| Damage::Zero { at, bytes }),
            (at.clone(), prop::collection::vec(any::<u8>(), 1..3_000))
                .prop_map(|(at, bytes)| Damage::Noise { at, bytes }),
            (at, 1..9_000_usize).prop_map(|(at, bytes)| Damage::Remove { at, bytes }),
        ]
    }

    /// A CRC alone would not tell: what is restored of a record's CRC fits the wrong header.
    #[test]
    fn a_header_that_came_back_wrong_is_noticed() {
        let log = transactions(60);
        let mut reduced = log.bytes.clone();
        let checksum = Redundancy::default().reduce(Lsn(BEGIN), &mut reduced, true);
        let crc = crc32c::crc32c(&log.bytes);
        let mut same_crc = 0;
        // Of the last records: one after the other on a page.
        for end in log.ends.iter().rev().take(12) {
            let begin = log.ends.iter().rev().find(|before| *before < end).unwrap_or(&BEGIN);
            let begin = (begin - BEGIN) as usize;
            for byte in (4..18).map(|byte| begin + byte) {
                let mut wrong = reduced.clone();
                wrong[byte] ^= 0x20;
                let found = Redundancy::default().restore(Lsn(BEGIN), &mut wrong, true);
                assert!(wrong != log.bytes);
                assert_ne!(found, checksum, "byte {} of the record at {begin}", byte - begin);
                same_crc += u32::from(crc32c::crc32c(&wrong) == crc);
            }
        }
        assert!(same_crc > 50, "{same_crc}: what the sum of headers is for");
    }

    fn damaged(mut log: Vec<u8>, damages: &[Damage]) -> Vec<u8> {
        for damage in damages {
            let (at, bytes) = match damage {
                Damage::Flip { at, .. } => (*at, 1),
                Damage::Word { at, .. } => (*at, 4),
                Damage::Zero { at, bytes } | Damage::Remove { at, bytes } => (*at, *bytes),
                Damage::Noise { at, bytes } => (*at, bytes.len()),
            };
            let at = at % log.len();
            let range = at..(at + bytes).min(log.len());
            match damage {
                Damage::Flip { bits, .. } => log[at] ^= bits,
                Damage::Word { word, .. } => {
                    let length = range.len();
                    log[range].copy_from_slice(&word.to_le_bytes()[..length]);
                }
                Damage::Zero { .. } => log[range].fill(0),
                Damage::Noise { bytes, .. } => {
                    let length = range.len();
                    log[range].copy_from_slice(&bytes[..length]);
                }
                Damage::Remove { .. } if range.len() < log.len() => drop(log.drain(range)),
                Damage::Remove { .. } => {}
            }
        }
        log
    }

    /// Messages of these lengths, again and again; one in `skip` goes another way, so that the
    /// next does not begin where the walk was; and a few begin at a place of their own.
    fn come_back(start: u64, log: &[u8], lengths: &[usize], skip: usize, jumps: &[u64]) {
        let (mut reducing, mut restoring) = (Redundancy::default(), Redundancy::default());
        let (mut at, mut jumped) = (0, 0);
        for (number, length) in lengths.iter().chain([&7]).cycle().enumerate() {
            if at >= log.len() {
                break;
            }
            let here = at..(at + length).min(log.len());
            if number % 5 == 4
                && let Some(jump) = jumps.get(number / 5)
            {
                jumped = *jump;
            }
            let start = Lsn(start.wrapping_add(at as u64).wrapping_add(jumped));
            if number % skip != skip - 1 {
                let mut message = log[here.clone()].to_vec();
                let checksum = reducing.reduce(start, &mut message, true);
                assert_eq!(message.len(), here.len());
                assert_eq!(restoring.restore(start, &mut message, true), checksum);
                assert!(message == log[here.clone()], "message {number} at {here:?}");
            }
            at = here.end;
        }
    }

    proptest! {
        #[test]
        fn any_bytes_come_back(
            start in prop_oneof![any::<u64>(), (0..1_000_u64).prop_map(|page| page * PAGE_BYTES)],
            // Zero, or noise.
            runs in prop::collection::vec((any::<Option<u64>>(), 1..500_usize), 1..100),
            lengths in prop::collection::vec(0..9_000_usize, 1..9),
            skip in 2..9_usize,
        ) {
            let mut log = Vec::new();
            for (noise, bytes) in runs {
                let mut state = noise.unwrap_or(0);
                log.extend(std::iter::repeat_with(|| {
                    state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(state >> 33);
                    (state >> 56) as u8
                }).take(bytes));
            }
            come_back(start, &log, &lengths, skip, &[]);
        }

        #[test]
        fn damaged_log_comes_back(
            damages in prop::collection::vec(damage(), 0..12),
            lengths in prop::collection::vec(prop_oneof![1..64_usize, 1..40_000_usize], 1..12),
            skip in 2..30_usize,
            jumps in prop::collection::vec(
                prop_oneof![Just(0), (0..100_u64).prop_map(|page| page * PAGE_BYTES), any::<u64>()],
                0..4,
            ),
        ) {
            let log = damaged(transactions(120).bytes, &damages);
            come_back(BEGIN, &log, &lengths, skip, &jumps);
        }
    }
}
