//! Rows that were looked up, as bytes in frames of data.
//!
//! ```text
//! row:    length u32 of the rest    table u32  block u32  line pointer u16  values u16
//! value:  length i32 (-1: NULL), so many bytes
//! ```
//! All numbers are big-endian. Frames cut rows anywhere.

use crate::snapshot::{FoundRow, RowPlace};
use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Bytes that a row may have: PostgreSQL's own limit for one message, and some.
const ROW_BYTES_MAX: usize = 1 << 30;

/// Appends a row; false, with nothing appended, if it is too large for this form.
pub(super) fn encode_row(out: &mut BytesMut, row: &FoundRow) -> bool {
    let values: usize = row.values.iter().flatten().map(Bytes::len).sum();
    let len = 12 + 4 * row.values.len() + values;
    if len > ROW_BYTES_MAX || row.values.len() > usize::from(u16::MAX) {
        return false;
    }
    out.reserve(4 + len);
    out.put_u32(len as u32);
    out.put_u32(row.place.table);
    out.put_u32(row.place.block);
    out.put_u16(row.place.row);
    out.put_u16(row.values.len() as u16);
    for value in &row.values {
        match value {
            None => out.put_i32(-1),
            Some(value) => {
                out.put_i32(value.len() as i32);
                out.put_slice(value);
            }
        }
    }
    true
}

/// Puts rows together again.
#[derive(Debug, Default)]
pub(super) struct RowDecoder {
    left: BytesMut,
}

impl RowDecoder {
    /// Takes bytes in.
    pub fn push(&mut self, data: &[u8]) {
        self.left.extend_from_slice(data);
    }

    /// Whether no row has begun.
    pub fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    /// The next whole row; what is wrong if there can be none.
    pub fn next(&mut self) -> Result<Option<FoundRow>, &'static str> {
        let Some(len) = self.left.first_chunk::<4>() else { return Ok(None) };
        let len = u32::from_be_bytes(*len) as usize;
        if !(12..=ROW_BYTES_MAX).contains(&len) {
            return Err("a row of a length that no row has");
        }
        if self.left.len() < 4 + len {
            return Ok(None);
        }
        self.left.advance(4);
        let mut body = self.left.split_to(len).freeze();
        let place = RowPlace { table: body.get_u32(), block: body.get_u32(), row: body.get_u16() };
        let count = body.get_u16();
        let mut values = Vec::with_capacity(usize::from(count).min(body.len() / 4));
        for _ in 0..count {
            if body.len() < 4 {
                return Err("a row that is cut off");
            }
            values.push(match body.get_i32() {
                -1 => None,
                len => match usize::try_from(len) {
                    Ok(len) if len <= body.len() => Some(body.split_to(len)),
                    Ok(_) | Err(_) => return Err("a value that is cut off"),
                },
            });
        }
        if !body.is_empty() {
            return Err("a row with something behind it");
        }
        Ok(Some(FoundRow { place, values }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> [FoundRow; 3] {
        let value = |bytes: &'static [u8]| Some(Bytes::from_static(bytes));
        let place = RowPlace { table: u32::MAX, block: 7, row: u16::MAX };
        [
            FoundRow { place, values: vec![value(b"abc"), None, value(b"")] },
            FoundRow { place, values: vec![] },
            FoundRow { place, values: vec![value(&[0; 1000])] },
        ]
    }

    #[test]
    fn rows_come_as_they_were_sent_however_they_are_cut() {
        let mut bytes = BytesMut::new();
        assert!(rows().iter().all(|row| encode_row(&mut bytes, row)));
        for size in [1, 3, 100, 10_000] {
            let (mut decoder, mut came) = (RowDecoder::default(), Vec::new());
            for piece in bytes.chunks(size) {
                decoder.push(piece);
                while let Some(row) = decoder.next().unwrap() {
                    came.push(row);
                }
            }
            assert!(decoder.is_empty());
            assert_eq!(came, rows());
        }
    }

    #[test]
    fn no_bytes_are_taken_for_rows() {
        let mut bytes = BytesMut::new();
        assert!(encode_row(&mut bytes, &rows()[0]));
        for at in 0..bytes.len() {
            for byte in [0, 1, 127, 255] {
                let mut damaged = bytes.clone();
                damaged[at] = byte;
                let mut decoder = RowDecoder::default();
                decoder.push(&damaged);
                // Whatever it says, it says something.
                let _ = decoder.next();
            }
        }
    }
}
