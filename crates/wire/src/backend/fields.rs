use super::{DecodeError, Format, Reader};
use bytes::Bytes;
use std::ops::Range;

/// One column of a RowDescription.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    /// The column's name or alias.
    pub name: String,
    /// OID of the table it comes from, 0 if it is computed.
    pub table_oid: u32,
    /// `attnum` in that table, 0 if it is computed.
    pub column: i16,
    /// OID of its type.
    pub type_oid: u32,
    /// `typlen`: negative for variable length.
    pub type_size: i16,
    /// `atttypmod`: -1 when the type has none.
    pub type_modifier: i32,
    /// How its values travel; not yet known (text) when a statement is described.
    pub format: Format,
}

/// Bytes a column of a RowDescription takes at least.
const FIELD_BYTES_MIN: usize = 19;

impl Field {
    pub(super) fn read_all(reader: &mut Reader) -> Result<Vec<Field>, DecodeError> {
        let count = reader.i16("column count")?;
        let count = reader.count(count.into(), FIELD_BYTES_MIN, "column count")?;
        (0..count)
            .map(|_| {
                Ok(Field {
                    name: reader.string("column name")?,
                    table_oid: reader.u32("table OID")?,
                    column: reader.i16("column number")?,
                    type_oid: reader.u32("type OID")?,
                    type_size: reader.i16("type size")?,
                    type_modifier: reader.i32("type modifier")?,
                    format: reader.format("column format")?,
                })
            })
            .collect()
    }
}

/// A row: its body was checked when it was decoded, so walking it cannot fail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataRow {
    columns: u16,
    /// Without the column count.
    values: Bytes,
}

impl DataRow {
    pub(super) fn read(reader: &mut Reader) -> Result<DataRow, DecodeError> {
        let count = reader.i16("column count")?;
        let columns = reader.count(count.into(), 4, "column count")? as u16;
        let row = DataRow { columns, values: reader.rest() };
        let mut at = 0;
        for _ in 0..columns {
            at = row.value_at(at, reader)?.1;
        }
        match row.values.len() - at {
            0 => Ok(row),
            bytes => Err(DecodeError::Trailing { message: reader.message, bytes }),
        }
    }

    /// The value whose length word is at `at`, and where the next one's is.
    fn value_at(
        &self,
        at: usize,
        reader: &Reader,
    ) -> Result<(Option<Range<usize>>, usize), DecodeError> {
        let word = self.values.get(at..).and_then(|rest| rest.first_chunk::<4>());
        let length = i32::from_be_bytes(*word.ok_or_else(|| reader.truncated("value length"))?);
        let start = at + 4;
        match length {
            -1 => Ok((None, start)),
            length => {
                let length = usize::try_from(length)
                    .map_err(|_| reader.invalid("value length", length.into()))?;
                if self.values.len() - start < length {
                    return Err(reader.truncated("value"));
                }
                Ok((Some(start..start + length), start + length))
            }
        }
    }

    /// How many columns.
    pub fn len(&self) -> usize {
        self.columns.into()
    }

    /// Whether there are no columns.
    pub fn is_empty(&self) -> bool {
        self.columns == 0
    }

    /// The values in order; `None` is NULL.
    pub fn values(&self) -> Values<'_> {
        Values { rest: &self.values, left: self.columns, at: 0 }
    }

    /// All values one behind another, each after its 4-byte length. [`Values::next_range`] tells
    /// where in here a value is.
    pub fn storage(&self) -> &Bytes {
        &self.values
    }
}

/// Walks the values of a [`DataRow`].
#[derive(Debug, Clone)]
pub struct Values<'a> {
    rest: &'a [u8],
    left: u16,
    at: usize,
}

impl<'a> Values<'a> {
    /// The next value as a range of [`DataRow::storage`]; the inner `None` is NULL, the outer one
    /// the end.
    pub fn next_range(&mut self) -> Option<Option<Range<usize>>> {
        let start = self.at;
        let value = self.next()?;
        Some(value.map(|value| start + 4..start + 4 + value.len()))
    }
}

impl<'a> Iterator for Values<'a> {
    type Item = Option<&'a [u8]>;

    fn next(&mut self) -> Option<Option<&'a [u8]>> {
        self.left = self.left.checked_sub(1)?;
        let (word, rest) = self.rest.split_first_chunk::<4>()?;
        let length = i32::from_be_bytes(*word);
        let Ok(length) = usize::try_from(length) else {
            self.rest = rest;
            self.at += 4;
            return Some(None);
        };
        let (value, rest) = rest.split_at_checked(length)?;
        self.rest = rest;
        self.at += 4 + length;
        Some(Some(value))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left.into(), Some(self.left.into()))
    }
}

impl ExactSizeIterator for Values<'_> {}
