//! What in the whole pages of a log follows from the rest of them. After a checkpoint the first
//! change to a page logs all of it, and that is most of a log then; of such a page a compressor sees
//! its rows, and between them numbers that each differ from the one before by a little.
//!
//! ```text
//! page       header 24 │ line pointer 4 │ … │ (hole) │ tuple │ … │ special space
//! pointer    offset 15 │ flags 2 │ length 15       − behind the one before, normal, as long
//! heap tuple xmin 4 │ xmax 4 │ cid 4 │ ctid 6 │ …   ⊕ the page's block and the pointer's number
//!            data 4 │ …                            − that of the tuple before, where two before it
//!                                                    differed by little
//! index tuple heap's block 4 │ item 2, info 2 │ …   − that of the tuple before
//!            key 4 │ 4                             the same, as data
//! ```
//! (PostgreSQL: `storage/bufpage.h`, `storage/itemid.h`, `access/htup_details.h`, `access/itup.h`;
//! where in a record they are, `access/xlogrecord.h`.) "Before" is what stands before it in the page,
//! which for tuples is mostly the next pointer's.
//!
//! The same holds as for [`super::redundancy`], which this belongs to: expectations come from bytes
//! that are restored by then, whoever restores walks in the same way, and whether they are right
//! decides only how small log becomes. A field that is not whole in one piece is left as it is.

use super::redundancy::Way;

/// A record with less data has no page that is worth it.
const DATA_BYTES_MIN: u32 = 256;
const PAGE_BYTES: usize = 8_192;
const PAGE_HEADER: usize = 24;
const POINTER: usize = 4;
/// `pd_pagesize_version` of every page since PostgreSQL 8.3.
const SIZE_AND_VERSION: u16 = PAGE_BYTES as u16 | 4;
/// `LP_NORMAL`
const NORMAL: u32 = 1;
/// Of a heap tuple, up to the byte that says where its data begins; and where its ctid is.
const HEAP_TUPLE: usize = 23;
const CTID_AT: usize = 12;
/// Words of an index tuple that are looked at.
const INDEX_WORDS: usize = 4;
/// What two numbers differ by if they are of a row.
const NEAR: u32 = 1 << 10;
/// The headers of all blocks that a record may have, and of what follows them.
const BLOCK_HEADERS_MAX: usize = 33 * 27 + 16;

/// A whole page in a record.
#[derive(Clone, Copy, Debug)]
struct Image {
    /// Where in the record's data it begins.
    at: u32,
    bytes: u16,
    hole_at: u16,
    block: u32,
}

/// Where the walk is in a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    /// Nothing is looked for in the rest of it.
    #[default]
    Nowhere,
    /// Its headers are not all here.
    Headers,
    Images,
}

/// Where the walk is in an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// Before the end of the page's header, or of its pointers.
    #[default]
    Head,
    Tuples,
    /// It is not looked at.
    Skipped,
}

/// Something that the pointers lead to.
#[derive(Clone, Copy, Debug)]
struct Tuple {
    /// Where in the image.
    at: u16,
    bytes: u16,
    /// Its pointer's, from 1.
    number: u16,
}

/// The walk along one session's records.
#[derive(Clone, Debug, Default)]
pub(super) struct WholePages {
    place: Place,
    /// Bytes of the record's data, and how many of them were seen.
    data_bytes: u32,
    seen: u32,
    /// The data's beginning, while its headers are not all here.
    headers: Vec<u8>,
    images: Vec<Image>,
    /// The image that is walked, by its number.
    current: usize,
    stage: Stage,
    /// The image's beginning, as in the log.
    head: Vec<u8>,
    pointers_end: usize,
    /// Offset and length of the last pointer that led somewhere.
    pointer: (u32, u32),
    tuples: Vec<Tuple>,
    /// The next one of them.
    tuple: usize,
    is_heap: bool,
    /// What the last two tuples had; of heap tuples the first word is their data's.
    words: [Option<[u32; INDEX_WORDS]>; 2],
}

impl WholePages {
    /// A record's data begins, which has so many bytes.
    pub fn begin(&mut self, data_bytes: u32) {
        self.place = if data_bytes < DATA_BYTES_MIN { Place::Nowhere } else { Place::Headers };
        (self.data_bytes, self.seen) = (data_bytes, 0);
        self.headers.clear();
    }

    /// The rest of the record is not known, or is another's.
    pub fn give_up(&mut self) {
        self.place = Place::Nowhere;
    }

    /// The next piece of the record's data.
    pub fn walk(&mut self, piece: &mut [u8], way: Way) {
        let from = self.seen;
        self.seen = self.seen.saturating_add(piece.len() as u32);
        if self.place == Place::Headers {
            let room = BLOCK_HEADERS_MAX - self.headers.len();
            self.headers.extend_from_slice(&piece[..piece.len().min(room)]);
            self.place = match images(&self.headers, self.data_bytes, &mut self.images) {
                Some(true) if !self.images.is_empty() => {
                    self.current = 0;
                    self.begin_image();
                    Place::Images
                }
                None if self.headers.len() < BLOCK_HEADERS_MAX => Place::Headers,
                Some(_) | None => Place::Nowhere,
            };
        }
        if self.place != Place::Images {
            return;
        }
        while let Some(image) = self.images.get(self.current).copied() {
            let end = image.at + u32::from(image.bytes);
            let begins = image.at.max(from);
            if begins >= self.seen {
                return;
            }
            let (first, last) = (begins - from, end.min(self.seen) - from);
            if let Some(of_image) = piece.get_mut(first as usize..last as usize) {
                self.image(image, (begins - image.at) as usize, of_image, way);
            }
            if end > self.seen {
                return;
            }
            self.current += 1;
            self.begin_image();
        }
        self.place = Place::Nowhere;
    }

    fn begin_image(&mut self) {
        self.stage = Stage::Head;
        self.head.clear();
        self.pointers_end = 0;
        self.tuples.clear();
        self.tuple = 0;
        self.words = [None; 2];
    }

    /// A piece of an image, which begins at `from` in it.
    fn image(&mut self, image: Image, from: usize, piece: &mut [u8], way: Way) {
        let mut at = 0;
        while self.stage == Stage::Head && at < piece.len() {
            at += self.head(image, &mut piece[at..], way);
        }
        if self.stage != Stage::Tuples {
            return;
        }
        while let Some(tuple) = self.tuples.get(self.tuple).copied() {
            let begins = usize::from(tuple.at);
            if begins >= from + piece.len() {
                return;
            }
            let there = begins.checked_sub(from).and_then(|at| piece.get_mut(at..));
            if let Some(there) = there {
                let bytes = there.len().min(tuple.bytes.into());
                let (there, is_whole) = (&mut there[..bytes], bytes == usize::from(tuple.bytes));
                if self.is_heap {
                    self.heap_tuple(image, tuple, there, way);
                } else if is_whole {
                    self.index_tuple(there, way);
                }
            }
            if begins + usize::from(tuple.bytes) > from + piece.len() {
                // The rest of it comes with the next piece, and is left as it is.
                self.tuple += 1;
                return;
            }
            self.tuple += 1;
        }
    }

    /// Some of the page's header, or a pointer, or some of one.
    fn head(&mut self, image: Image, rest: &mut [u8], way: Way) -> usize {
        let have = self.head.len();
        if have < PAGE_HEADER {
            let bytes = rest.len().min(PAGE_HEADER - have);
            self.head.extend_from_slice(&rest[..bytes]);
            if self.head.len() == PAGE_HEADER {
                self.begin_pointers(image);
            }
            return bytes;
        }
        let within = (have - PAGE_HEADER) % POINTER;
        let bytes = match rest.first_chunk_mut::<POINTER>() {
            Some(word) if within == 0 => {
                let of_log = self.pointer_of_log(word, way);
                self.head.extend_from_slice(&of_log.to_le_bytes());
                POINTER
            }
            // In two pieces: as it is.
            _ => {
                let bytes = rest.len().min(POINTER - within);
                self.head.extend_from_slice(&rest[..bytes]);
                bytes
            }
        };
        if (self.head.len() - PAGE_HEADER).is_multiple_of(POINTER)
            && let Some(word) = self.head.last_chunk::<POINTER>()
        {
            let (offset, _, length) = split(u32::from_le_bytes(*word));
            self.pointer = (if length > 0 { offset } else { self.pointer.0 }, length);
        }
        if self.head.len() >= self.pointers_end {
            self.begin_tuples(image);
        }
        bytes
    }

    /// Changes a pointer; what the log has there.
    fn pointer_of_log(&self, word: &mut [u8; POINTER], way: Way) -> u32 {
        const FIELD: u32 = 0x7FFF;
        let (before, length_before) = self.pointer;
        let expected = |length: u32| before.wrapping_sub(length.next_multiple_of(8));
        let (a, flags, b) = split(u32::from_le_bytes(*word));
        let (offset, length) = match way {
            Way::Reduce => {
                (a.wrapping_sub(expected(b)) & FIELD, b.wrapping_sub(length_before) & FIELD)
            }
            Way::Restore => {
                let length = b.wrapping_add(length_before) & FIELD;
                (a.wrapping_add(expected(length)) & FIELD, length)
            }
        };
        let other = offset | (flags ^ NORMAL) << 15 | length << 17;
        let this = u32::from_le_bytes(*word);
        *word = other.to_le_bytes();
        way.of_log(this, other)
    }

    /// The page's header is here.
    fn begin_pointers(&mut self, image: Image) {
        let field = |at: usize| match self.head.get(at..at + 2) {
            Some(&[low, high]) => u16::from_le_bytes([low, high]),
            _ => 0,
        };
        let (lower, upper, special) = (field(12), field(14), field(16));
        let ends_before_hole = usize::from(image.bytes) == PAGE_BYTES || lower <= image.hole_at;
        let is_page = field(18) == SIZE_AND_VERSION
            && usize::from(lower) >= PAGE_HEADER
            && (usize::from(lower) - PAGE_HEADER).is_multiple_of(POINTER)
            && lower <= upper
            && upper <= special
            && usize::from(special) <= PAGE_BYTES
            && ends_before_hole
            && lower <= image.bytes;
        if !is_page || usize::from(lower) == PAGE_HEADER {
            self.stage = Stage::Skipped;
            return;
        }
        self.pointers_end = lower.into();
        self.pointer = (special.into(), 0);
        self.is_heap = usize::from(special) == PAGE_BYTES;
    }

    /// The page's pointers are here.
    fn begin_tuples(&mut self, image: Image) {
        self.stage = Stage::Tuples;
        let hole = PAGE_BYTES - usize::from(image.bytes).min(PAGE_BYTES);
        let least = if self.is_heap { HEAP_TUPLE } else { 2 * POINTER };
        let pointers = self.head.get(PAGE_HEADER..).unwrap_or_default();
        for (index, word) in pointers.chunks_exact(POINTER).enumerate() {
            let word = word.first_chunk().copied().unwrap_or_default();
            let (offset, flags, length) = split(u32::from_le_bytes(word));
            let at = if offset >= u32::from(image.hole_at) {
                (offset as usize).checked_sub(hole)
            } else {
                Some(offset as usize)
            };
            let Some(at) = at.filter(|at| *at >= self.pointers_end) else { continue };
            let is_within = at + length as usize <= usize::from(image.bytes);
            if flags == NORMAL && length as usize >= least && is_within {
                let number = index as u16 + 1;
                self.tuples.push(Tuple { at: at as u16, bytes: length as u16, number });
            }
        }
        self.tuples.sort_unstable_by_key(|tuple| (tuple.at, tuple.number));
        // None is walked twice, whatever the pointers say.
        let mut end = 0;
        self.tuples.retain(|tuple| {
            let is_next = u32::from(tuple.at) >= end;
            if is_next {
                end = u32::from(tuple.at) + u32::from(tuple.bytes);
            }
            is_next
        });
    }

    /// What is here of a heap tuple.
    fn heap_tuple(&mut self, image: Image, tuple: Tuple, there: &mut [u8], way: Way) {
        let Some(head) = there.first_chunk_mut::<HEAP_TUPLE>() else { return };
        let [high_low, high_high, low_low, low_high] = [
            (image.block >> 16) as u8,
            (image.block >> 24) as u8,
            image.block as u8,
            (image.block >> 8) as u8,
        ];
        let [number_low, number_high] = tuple.number.to_le_bytes();
        let expected = [high_low, high_high, low_low, low_high, number_low, number_high];
        for (byte, expected) in head[CTID_AT..].iter_mut().zip(expected) {
            *byte ^= expected;
        }
        let data_at = usize::from(head[HEAP_TUPLE - 1]);
        if data_at < HEAP_TUPLE {
            return;
        }
        let word = there.get_mut(data_at..).and_then(|data| data.first_chunk_mut::<POINTER>());
        let Some(word) = word else { return };
        let of_log = match self.words {
            [Some([last, ..]), Some([before, ..])] if are_near(last, before) => {
                way.minus_u32(word, last)
            }
            _ => u32::from_le_bytes(*word),
        };
        self.words = [Some([of_log, 0, 0, 0]), self.words[0]];
    }

    fn index_tuple(&mut self, there: &mut [u8], way: Way) {
        let mut words = [0; INDEX_WORDS];
        for (index, (word, of_log)) in there.chunks_exact_mut(POINTER).zip(&mut words).enumerate() {
            let Some(word) = word.first_chunk_mut::<POINTER>() else { break };
            let expected = match self.words {
                [Some(last), _] if index < 2 => Some(last[index]),
                [Some(last), Some(before)] if are_near(last[index], before[index]) => {
                    Some(last[index])
                }
                _ => None,
            };
            *of_log = match expected {
                Some(expected) => way.minus_u32(word, expected),
                None => u32::from_le_bytes(*word),
            };
        }
        self.words = [Some(words), self.words[0]];
    }
}

fn are_near(a: u32, b: u32) -> bool {
    a.wrapping_sub(b).wrapping_add(NEAR) < 2 * NEAR
}

/// A line pointer's offset, flags and length.
fn split(word: u32) -> (u32, u32, u32) {
    (word & 0x7FFF, word >> 15 & 3, word >> 17)
}

/// The whole pages of a record that are not compressed, by what its data begins with. `None` if that
/// is not all here; `Some(false)` if there is no sense in it.
fn images(head: &[u8], data_bytes: u32, images: &mut Vec<Image>) -> Option<bool> {
    const HAS_IMAGE: u8 = 0x10;
    const SAME_RELATION: u8 = 0x80;
    const HAS_HOLE: u8 = 0x01;
    images.clear();
    let mut at = 0;
    // What follows the headers, in their order; images are found by where in it they begin.
    let mut following = 0_u32;
    let byte = |at: usize| head.get(at).copied();
    let u16_at = |at: usize| Some(u16::from_le_bytes([byte(at)?, byte(at + 1)?]));
    let u32_at = |at: usize| Some(u32::from(u16_at(at)?) | u32::from(u16_at(at + 2)?) << 16);
    while (at as u32).saturating_add(following) < data_bytes {
        match byte(at)? {
            // The main data, which is the last.
            0xFF => {
                following = following.saturating_add(byte(at + 1)?.into());
                at += 2;
                break;
            }
            0xFE => {
                following = following.saturating_add(u32_at(at + 1)?);
                at += 5;
                break;
            }
            // Its origin, and the transaction above.
            0xFD => at += 3,
            0xFC => at += 5,
            0..=32 => {
                let flags = byte(at + 1)?;
                let block_data = u16_at(at + 2)?;
                at += 4;
                let mut image = None;
                if flags & HAS_IMAGE != 0 {
                    let (bytes, hole_at, info) = (u16_at(at)?, u16_at(at + 2)?, byte(at + 4)?);
                    at += 5;
                    // Up to PostgreSQL 14 the bits 2 and 4 mean compressed and to be applied, later
                    // the other way round, and 8 and 16 other methods.
                    let is_compressed = info & 0x18 != 0 || info & 0x06 == 0x06;
                    if is_compressed && info & HAS_HOLE != 0 {
                        at += 2;
                    }
                    let is_plain = !is_compressed && usize::from(bytes) <= PAGE_BYTES;
                    image = is_plain.then_some((bytes, hole_at));
                    if !is_plain {
                        following = following.saturating_add(bytes.into());
                    }
                }
                if flags & SAME_RELATION == 0 {
                    at += 12;
                }
                let block = u32_at(at)?;
                at += 4;
                if let Some((bytes, hole_at)) = image {
                    images.push(Image { at: following, bytes, hole_at, block });
                    following = following.saturating_add(bytes.into());
                }
                following = following.saturating_add(block_data.into());
            }
            _ => return Some(false),
        }
    }
    if (at as u32).saturating_add(following) != data_bytes {
        images.clear();
        return Some(false);
    }
    for image in images.iter_mut() {
        image.at += at as u32;
    }
    Some(true)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A heap page of rows as they are filled in, with a hole of some bytes.
    pub fn heap(rows: u16, block: u32) -> Vec<u8> {
        let mut page = vec![0; PAGE_BYTES];
        let mut upper = PAGE_BYTES;
        for row in 0..rows {
            let bytes = 61 + usize::from(row % 3 == 0);
            upper -= bytes.next_multiple_of(8);
            let pointer = upper as u32 | NORMAL << 15 | (bytes as u32) << 17;
            let at = PAGE_HEADER + POINTER * usize::from(row);
            page[at..at + 4].copy_from_slice(&pointer.to_le_bytes());
            let tuple = &mut page[upper..upper + bytes];
            tuple[..4].copy_from_slice(&737_u32.to_le_bytes());
            tuple[12..14].copy_from_slice(&((block >> 16) as u16).to_le_bytes());
            tuple[14..16].copy_from_slice(&(block as u16).to_le_bytes());
            tuple[16..18].copy_from_slice(&(row + 1).to_le_bytes());
            tuple[18] = 3;
            tuple[20..23].copy_from_slice(&[2, 8, 24]);
            tuple[24..28].copy_from_slice(&(1_000_000 + u32::from(row)).to_le_bytes());
            tuple[28..].fill(b'x');
        }
        head(&mut page, PAGE_HEADER + POINTER * usize::from(rows), upper, PAGE_BYTES);
        page
    }

    pub fn index(entries: u16, block: u32) -> Vec<u8> {
        let mut page = vec![0; PAGE_BYTES];
        let mut upper = PAGE_BYTES - 16;
        for entry in 0..entries {
            upper -= 16;
            let pointer = upper as u32 | NORMAL << 15 | 16 << 17;
            let at = PAGE_HEADER + POINTER * usize::from(entry);
            page[at..at + 4].copy_from_slice(&pointer.to_le_bytes());
            let tuple = &mut page[upper..upper + 16];
            tuple[2..4].copy_from_slice(&(block as u16 + entry / 60).to_le_bytes());
            tuple[4..6].copy_from_slice(&(entry % 60 + 1).to_le_bytes());
            tuple[6] = 16;
            tuple[8..12].copy_from_slice(&(5_000 + u32::from(entry)).to_le_bytes());
        }
        head(&mut page, PAGE_HEADER + POINTER * usize::from(entries), upper, PAGE_BYTES - 16);
        page
    }

    fn head(page: &mut [u8], lower: usize, upper: usize, special: usize) {
        for (at, value) in [(12, lower), (14, upper), (16, special)] {
            page[at..at + 2].copy_from_slice(&(value as u16).to_le_bytes());
        }
        page[18..20].copy_from_slice(&SIZE_AND_VERSION.to_le_bytes());
    }

    /// A record's data with these pages, without their holes, and what else a record has.
    pub fn record(pages: &[(Vec<u8>, u32)]) -> Vec<u8> {
        let (mut data, mut behind) = (Vec::new(), Vec::new());
        for (number, (page, block)) in pages.iter().enumerate() {
            let field = |at: usize| u16::from_le_bytes([page[at], page[at + 1]]);
            let (lower, upper) = (field(12), field(14));
            let is_whole = !(lower < upper && usize::from(upper) <= PAGE_BYTES);
            let (lower, upper) = if is_whole { (0, 0) } else { (lower, upper) };
            let same = if number > 0 { 0x80 } else { 0 };
            data.extend_from_slice(&[number as u8, 0x10 | same, 5, 0]);
            let bytes = PAGE_BYTES as u16 - (upper - lower);
            data.extend_from_slice(&bytes.to_le_bytes());
            data.extend_from_slice(&lower.to_le_bytes());
            data.push(if is_whole { 2 } else { 3 });
            if number == 0 {
                data.extend_from_slice(&[7; 12]);
            }
            data.extend_from_slice(&block.to_le_bytes());
            behind.extend_from_slice(&page[..lower.into()]);
            behind.extend_from_slice(&page[upper.into()..]);
            behind.extend_from_slice(b"block");
        }
        data.extend_from_slice(&[0xFD, 1, 0, 0xFC, 1, 2, 3, 4, 0xFF, 3]);
        data.extend_from_slice(&behind);
        data.extend_from_slice(b"end");
        data
    }

    fn walked(data: &[u8], cuts: &[usize], way: Way, pages: &mut WholePages) -> Vec<u8> {
        let mut data = data.to_vec();
        pages.begin(data.len() as u32);
        let mut from = 0;
        for to in cuts.iter().copied().chain([data.len()]) {
            let to = to.clamp(from, data.len());
            pages.walk(&mut data[from..to], way);
            from = to;
        }
        data
    }

    fn packed_bytes(data: &[u8]) -> usize {
        zstd::bulk::compress(data, 1).unwrap().len()
    }

    #[test]
    fn pages_become_small() {
        for (page, block, most) in
            [(heap(100, 0x0002_0304), 0x0002_0304, 0.6), (index(300, 70), 3, 0.35)]
        {
            let data = record(&[(page.clone(), block), (page, block)]);
            let reduced = walked(&data, &[], Way::Reduce, &mut WholePages::default());
            let (before, after) = (packed_bytes(&data), packed_bytes(&reduced));
            println!("{before} bytes packed, reduced {after}");
            assert!((after as f64) < before as f64 * most, "{before}, {after}");
            assert!(walked(&reduced, &[], Way::Restore, &mut WholePages::default()) == data);
        }
    }

    #[test]
    fn what_follows_from_the_rest_of_a_page_becomes_zero() {
        let data = record(&[(heap(3, 9), 9)]);
        let reduced = walked(&data, &[], Way::Reduce, &mut WholePages::default());
        let page = data.len() - b"blockend".len() - (PAGE_HEADER + 3 * POINTER + 3 * 64);
        let tuple = |number: usize| page + PAGE_HEADER + 3 * POINTER + (3 - number) * 64;
        for number in 1..=3 {
            assert_eq!(reduced[tuple(number) + CTID_AT..][..6], [0; 6], "the ctid of {number}");
        }
        // The last pointer's, which is as far behind as it is long, and one byte shorter.
        assert_eq!(reduced[page + PAGE_HEADER + 2 * POINTER..][..2], [0; 2]);
        // Of the third tuple that comes, two before it being near: one less, and a sign.
        assert_eq!(reduced[tuple(1) + 24..][..4], [1, 0, 0, 0]);
    }

    #[test]
    fn what_is_no_page_is_left_as_it_is() {
        let mut other = heap(100, 9);
        other[18] = 5;
        for data in [record(&[(other, 9)]), vec![0; 9_000], vec![0xFF; 300], vec![0x11; 5_000]] {
            assert!(walked(&data, &[], Way::Reduce, &mut WholePages::default()) == data);
        }
    }

    fn any_page() -> impl Strategy<Value = (Vec<u8>, u32)> {
        let page = prop_oneof![
            (1_u16..115, any::<u32>()).prop_map(|(rows, block)| (heap(rows, block), block)),
            (1_u16..390, 0_u32..9).prop_map(|(entries, block)| (index(entries, 70), block)),
        ];
        // Some of its bytes are any, also in its header and its pointers.
        let harm = proptest::collection::vec((0_usize..PAGE_BYTES, any::<u8>()), 0..6);
        let harm_to_head = proptest::collection::vec((10_usize..200, any::<u8>()), 0..3);
        (page, harm, harm_to_head).prop_map(|((mut page, block), harm, to_head)| {
            harm.into_iter().chain(to_head).for_each(|(at, byte)| page[at] = byte);
            (page, block)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn any_pages_come_back_however_they_are_cut(
            records in proptest::collection::vec(
                (
                    proptest::collection::vec(any_page(), 1..4),
                    proptest::collection::vec(0_usize..26_000, 0..8),
                    proptest::collection::vec((0_usize..26_000, any::<u8>()), 0..3),
                ),
                1..4,
            ),
            gives_up in any::<bool>(),
        ) {
            let (mut reducing, mut restoring) = (WholePages::default(), WholePages::default());
            for (pages, mut cuts, harm) in records {
                let mut data = record(&pages);
                for (at, byte) in harm {
                    let length = data.len();
                    data[at % length] = byte;
                }
                cuts.sort_unstable();
                let reduced = walked(&data, &cuts, Way::Reduce, &mut reducing);
                prop_assert_eq!(reduced.len(), data.len());
                prop_assert!(walked(&reduced, &cuts, Way::Restore, &mut restoring) == data);
                if gives_up {
                    reducing.give_up();
                    restoring.give_up();
                }
            }
        }

        #[test]
        fn any_bytes_come_back(
            data in proptest::collection::vec(any::<u8>(), 0..3_000),
            cuts in proptest::collection::vec(0_usize..3_000, 0..4),
        ) {
            let mut cuts = cuts;
            cuts.sort_unstable();
            let reduced = walked(&data, &cuts, Way::Reduce, &mut WholePages::default());
            prop_assert!(walked(&reduced, &cuts, Way::Restore, &mut WholePages::default()) == data);
        }
    }
}
