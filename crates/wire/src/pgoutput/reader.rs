use super::{DecodeError, Problem, Relations, Tuple};
use farshore_model::{Lsn, PgTime};

/// Reads a message from its front. Every method says what it expects, for the error.
#[derive(Clone, Debug)]
pub(super) struct Reader<'a> {
    data: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// Takes the tag.
    #[inline]
    pub(super) fn new(data: &'a [u8]) -> Result<(u8, Reader<'a>), DecodeError> {
        match data.first() {
            Some(tag) => Ok((*tag, Reader { data, at: 1 })),
            None => Err(DecodeError {
                tag: None,
                offset: 0,
                problem: Problem::Ends { what: "a message tag" },
            }),
        }
    }

    /// Reads `data` from its first byte on: it is a part of a message without the tag.
    pub(super) fn without_tag(data: &'a [u8]) -> Reader<'a> {
        Reader { data, at: 0 }
    }

    /// An error at the place where the next byte would be read.
    #[cold]
    pub(super) fn error(&self, problem: Problem) -> DecodeError {
        self.error_at(self.at, problem)
    }

    #[cold]
    pub(super) fn error_at(&self, offset: usize, problem: Problem) -> DecodeError {
        DecodeError { tag: self.data.first().copied(), offset, problem }
    }

    /// Bytes read so far, the tag included.
    #[inline]
    pub(super) fn offset(&self) -> usize {
        self.at
    }

    /// What has not been read.
    #[inline]
    pub(super) fn rest(&self) -> &'a [u8] {
        self.data.get(self.at..).unwrap_or_default()
    }

    #[inline]
    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], DecodeError> {
        match self.rest().first_chunk::<N>() {
            Some(bytes) => {
                self.at += N;
                Ok(*bytes)
            }
            None => Err(self.error(Problem::Ends { what })),
        }
    }

    #[inline]
    pub(super) fn u8(&mut self, what: &'static str) -> Result<u8, DecodeError> {
        let [byte] = self.array(what)?;
        Ok(byte)
    }

    #[inline]
    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, DecodeError> {
        Ok(u32::from_be_bytes(self.array(what)?))
    }

    pub(super) fn i32(&mut self, what: &'static str) -> Result<i32, DecodeError> {
        Ok(i32::from_be_bytes(self.array(what)?))
    }

    pub(super) fn lsn(&mut self, what: &'static str) -> Result<Lsn, DecodeError> {
        Ok(Lsn(u64::from_be_bytes(self.array(what)?)))
    }

    pub(super) fn time(&mut self, what: &'static str) -> Result<PgTime, DecodeError> {
        Ok(PgTime(i64::from_be_bytes(self.array(what)?)))
    }

    /// A 16-bit count.
    #[inline]
    pub(super) fn count16(&mut self, what: &'static str) -> Result<usize, DecodeError> {
        let found = i16::from_be_bytes(self.array(what)?);
        usize::try_from(found).map_err(|_| {
            self.error_at(self.at - 2, Problem::Negative { what, found: i32::from(found) })
        })
    }

    /// A 32-bit count or length.
    #[inline]
    pub(super) fn count32(&mut self, what: &'static str) -> Result<usize, DecodeError> {
        let found = i32::from_be_bytes(self.array(what)?);
        usize::try_from(found)
            .map_err(|_| self.error_at(self.at - 4, Problem::Negative { what, found }))
    }

    /// A byte that is 0 or 1.
    pub(super) fn flag(&mut self, what: &'static str) -> Result<bool, DecodeError> {
        match self.u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            found => Err(self.error_at(self.at - 1, Problem::Unexpected { what, found })),
        }
    }

    /// A flags byte in which no flag is defined.
    pub(super) fn no_flags(&mut self) -> Result<(), DecodeError> {
        const WHAT: &str = "a flags byte of 0";
        match self.u8(WHAT)? {
            0 => Ok(()),
            found => Err(self.error_at(self.at - 1, Problem::Unexpected { what: WHAT, found })),
        }
    }

    #[inline]
    pub(super) fn bytes(
        &mut self,
        len: usize,
        what: &'static str,
    ) -> Result<&'a [u8], DecodeError> {
        match self.rest().get(..len) {
            Some(bytes) => {
                self.at += len;
                Ok(bytes)
            }
            None => Err(self.error(Problem::Ends { what })),
        }
    }

    /// Text that ends with a zero byte.
    pub(super) fn string(&mut self, what: &'static str) -> Result<&'a str, DecodeError> {
        let rest = self.rest();
        let Some(len) = rest.iter().position(|byte| *byte == 0) else {
            return Err(self.error(Problem::Ends { what }));
        };
        match std::str::from_utf8(&rest[..len]) {
            Ok(text) => {
                self.at += len + 1;
                Ok(text)
            }
            Err(error) => {
                Err(self.error_at(self.at + error.valid_up_to(), Problem::NotUtf8 { what }))
            }
        }
    }

    /// Walks over a row's values, so that iterating over them cannot fail.
    #[inline]
    pub(super) fn tuple(&mut self) -> Result<Tuple<'a>, DecodeError> {
        let start = self.rest();
        let start_at = self.at;
        let mut left = self.count16("the number of columns, at least 0")?;
        // Values that are as they should be, at one look each.
        let mut rest = self.rest();
        while left > 0 {
            rest = match rest {
                [b'b' | b't', a, b, c, d, after @ ..] => {
                    match after.get(u32::from_be_bytes([*a, *b, *c, *d]) as usize..) {
                        Some(after) => after,
                        None => break,
                    }
                }
                [b'n' | b'u', after @ ..] => after,
                _ => break,
            };
            left -= 1;
        }
        self.at = self.data.len() - rest.len();
        for _ in 0..left {
            match self.u8("a column value")? {
                b't' | b'b' => {
                    let len = self.count32("the length of a column value, at least 0")?;
                    self.bytes(len, "the bytes of a column value")?;
                }
                b'n' | b'u' => {}
                found => {
                    let what = "a column value of kind 'n', 'u', 't' or 'b'";
                    return Err(self.error_at(self.at - 1, Problem::Unexpected { what, found }));
                }
            }
        }
        Ok(Tuple::walked(&start[..self.at - start_at]))
    }

    /// `count` relation numbers.
    pub(super) fn relations(&mut self, count: usize) -> Result<Relations<'a>, DecodeError> {
        let (numbers, _) = self.rest().as_chunks::<4>();
        match numbers.get(..count) {
            Some(numbers) => {
                self.at += count * 4;
                Ok(Relations { numbers })
            }
            None => Err(self.error(Problem::Ends { what: "the relations that were truncated" })),
        }
    }

    /// Checks that nothing is left.
    #[inline]
    pub(super) fn end(&self) -> Result<(), DecodeError> {
        match self.data.len() - self.at {
            0 => Ok(()),
            len => Err(self.error(Problem::Trailing { len })),
        }
    }
}
