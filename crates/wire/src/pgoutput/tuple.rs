use super::DecodeError;
use super::reader::Reader;

/// A row: the TupleData of a message, walked over once so that reading it cannot fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tuple<'a> {
    /// A 16-bit count and that many values, nothing after them.
    bytes: &'a [u8],
}

/// One column's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Value<'a> {
    /// SQL NULL.
    Null,
    /// A large value stored out of line that the update did not touch; the message leaves it out.
    Unchanged,
    /// As the type's output function prints it.
    Text(&'a [u8]),
    /// As the type's send function gives it.
    Binary(&'a [u8]),
}

/// What an update or delete says of the row as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OldTuple<'a> {
    /// Nothing: an update that left the replica identity as it was.
    None,
    /// The columns of the replica identity; all others are NULL.
    Key(Tuple<'a>),
    /// The whole row (`REPLICA IDENTITY FULL`).
    Full(Tuple<'a>),
}

impl<'a> OldTuple<'a> {
    /// The row, whichever kind it is.
    pub fn tuple(&self) -> Option<Tuple<'a>> {
        match self {
            OldTuple::None => None,
            OldTuple::Key(tuple) | OldTuple::Full(tuple) => Some(*tuple),
        }
    }
}

impl<'a> Tuple<'a> {
    /// Reads TupleData that stands alone, such as what [`Tuple::as_bytes`] returned. Offsets in
    /// errors count from the start of `bytes`, and the tag is that of no message.
    pub fn parse(bytes: &'a [u8]) -> Result<Tuple<'a>, DecodeError> {
        let untagged = |error: DecodeError| DecodeError { tag: None, ..error };
        let mut reader = Reader::without_tag(bytes);
        let tuple = reader.tuple().map_err(untagged)?;
        reader.end().map_err(untagged)?;
        Ok(tuple)
    }

    /// Takes up what [`Tuple::as_bytes`] has returned, without walking over it again. Of other bytes
    /// there are as many values as can be read.
    pub fn walked(bytes: &'a [u8]) -> Tuple<'a> {
        Tuple { bytes }
    }

    /// Number of columns, at most 32,767.
    pub fn len(&self) -> usize {
        self.bytes.first_chunk().map_or(0, |count| usize::from(u16::from_be_bytes(*count)))
    }

    /// No columns at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values, in column order.
    pub fn values(&self) -> Values<'a> {
        Values { left: self.len(), rest: self.bytes.get(2..).unwrap_or_default() }
    }

    /// The TupleData as it was in the message, its count included.
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl<'a> IntoIterator for Tuple<'a> {
    type Item = Value<'a>;
    type IntoIter = Values<'a>;

    fn into_iter(self) -> Values<'a> {
        self.values()
    }
}

/// Iterator over a row's values.
#[derive(Clone, Debug)]
pub struct Values<'a> {
    left: usize,
    rest: &'a [u8],
}

impl<'a> Values<'a> {
    /// `None` cannot happen while values are left: the row was walked over before.
    #[inline]
    fn split(rest: &'a [u8]) -> Option<(Value<'a>, &'a [u8])> {
        let (kind, rest) = rest.split_first()?;
        match kind {
            b'n' => Some((Value::Null, rest)),
            b'u' => Some((Value::Unchanged, rest)),
            kind => {
                let (len, rest) = rest.split_first_chunk()?;
                let (bytes, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
                let value = if *kind == b'b' { Value::Binary(bytes) } else { Value::Text(bytes) };
                Some((value, rest))
            }
        }
    }
}

impl<'a> Iterator for Values<'a> {
    type Item = Value<'a>;

    #[inline]
    fn next(&mut self) -> Option<Value<'a>> {
        self.left = self.left.checked_sub(1)?;
        let (value, rest) = Self::split(self.rest)?;
        self.rest = rest;
        Some(value)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Values<'_> {}
impl std::iter::FusedIterator for Values<'_> {}
