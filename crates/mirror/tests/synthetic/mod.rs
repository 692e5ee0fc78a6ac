//! A log in PostgreSQL's format whose records mean nothing: for tests that need no server.
#![allow(dead_code, reason = "each test file uses its own part")]

pub const SEGMENT_BYTES: u64 = 1 << 20;
pub const SYSTEM_ID: u64 = 7_000_000_000_000_000_001;
const PAGE_BYTES: u64 = 8_192;

/// The log from its first segment's start on.
pub struct Log {
    pub bytes: Vec<u8>,
    /// Position of the first byte.
    pub begin: u64,
    pub timeline: u32,
    /// Where each record ends, rounded up as positions are.
    pub ends: Vec<u64>,
    /// Where each begins.
    begins: Vec<u64>,
}

impl Log {
    /// Begins at a segment's start.
    pub fn new(begin: u64) -> Log {
        assert_eq!(begin % SEGMENT_BYTES, 0);
        Log { bytes: Vec::new(), begin, timeline: 1, ends: Vec::new(), begins: Vec::new() }
    }

    pub fn end(&self) -> u64 {
        self.begin + self.bytes.len() as u64
    }

    /// Appends a record of `length` bytes, at least 24.
    pub fn push(&mut self, length: u32) {
        self.push_kind(length, 10, 0);
    }

    /// Appends a record that ends its segment.
    pub fn switch_segment(&mut self) {
        self.push_kind(24, 0, 0x40);
        while !self.end().is_multiple_of(SEGMENT_BYTES) {
            self.bytes.push(0);
        }
    }

    fn push_kind(&mut self, length: u32, manager: u8, info: u8) {
        let number = self.ends.len();
        let mut record = vec![(number % 251) as u8 ^ 0x5A; length as usize];
        record[..4].copy_from_slice(&length.to_le_bytes());
        record[8..16].copy_from_slice(&self.last().to_le_bytes());
        record[16..18].copy_from_slice(&[info, manager]);
        self.append(record);
    }

    /// Appends a record as servers write it: it names the one before, and its data means something.
    pub fn push_as_server(&mut self, xid: u32, manager: u8, info: u8, data: &[u8]) {
        let mut record = vec![0; 24];
        record.extend_from_slice(data);
        let length = record.len() as u32;
        record[..4].copy_from_slice(&length.to_le_bytes());
        record[4..8].copy_from_slice(&xid.to_le_bytes());
        record[8..16].copy_from_slice(&self.last().to_le_bytes());
        record[16..18].copy_from_slice(&[info, manager]);
        self.append(record);
    }

    fn append(&mut self, mut record: Vec<u8>) {
        let crc = crc32c::crc32c_append(crc32c::crc32c(&record[24..]), &record[..20]);
        record[20..24].copy_from_slice(&crc.to_le_bytes());
        let mut rest = &record[..];
        while !rest.is_empty() {
            let is_within = rest.len() < record.len();
            if self.end().is_multiple_of(PAGE_BYTES) {
                self.page_header(if is_within { rest.len() as u32 } else { 0 });
            }
            if !is_within {
                self.begins.push(self.end());
            }
            let room = PAGE_BYTES - self.end() % PAGE_BYTES;
            let (piece, more) = rest.split_at(rest.len().min(room as usize));
            self.bytes.extend_from_slice(piece);
            rest = more;
        }
        while !self.bytes.len().is_multiple_of(8) {
            self.bytes.push(0);
        }
        self.ends.push(self.end());
    }

    fn page_header(&mut self, rest_bytes: u32) {
        let address = self.end();
        let is_first = address.is_multiple_of(SEGMENT_BYTES);
        let info = u16::from(rest_bytes > 0) | if is_first { 2 } else { 0 };
        self.bytes.extend_from_slice(&0xD110_u16.to_le_bytes());
        self.bytes.extend_from_slice(&info.to_le_bytes());
        self.bytes.extend_from_slice(&self.timeline.to_le_bytes());
        self.bytes.extend_from_slice(&address.to_le_bytes());
        self.bytes.extend_from_slice(&rest_bytes.to_le_bytes());
        self.bytes.extend_from_slice(&[0; 4]);
        if is_first {
            self.bytes.extend_from_slice(&SYSTEM_ID.to_le_bytes());
            self.bytes.extend_from_slice(&(SEGMENT_BYTES as u32).to_le_bytes());
            self.bytes.extend_from_slice(&(PAGE_BYTES as u32).to_le_bytes());
        }
    }

    /// What is behind the record that ends there never was.
    pub fn cut(&mut self, end: u64) {
        self.bytes.truncate((end - self.begin) as usize);
        self.ends.retain(|known| *known <= end);
        self.begins.truncate(self.ends.len());
    }

    /// Where the last record begins.
    fn last(&self) -> u64 {
        self.begins.last().copied().unwrap_or(0)
    }

    /// From one position to another.
    pub fn between(&self, from: u64, to: u64) -> &[u8] {
        &self.bytes[(from - self.begin) as usize..(to - self.begin) as usize]
    }

    /// The end of the last record that ends at or before `position`, or the beginning.
    pub fn whole_until(&self, position: u64) -> u64 {
        self.ends.iter().rev().find(|end| **end <= position).copied().unwrap_or(self.begin)
    }
}
