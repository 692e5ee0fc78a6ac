//! The binary format of COPY (PostgreSQL docs: "COPY", "Binary Format").
//!
//! ```text
//! "PGCOPY\n\xff\r\n\0"  flags i32  extension_len i32  extension …
//! row:      fields i16 ≥ 0, then per field: len i32 (-1: NULL), len bytes
//! trailer:  i16 -1
//! ```
//! All numbers are big-endian.
//!
//! [`RowReader`] splits a stream into rows however it is cut into chunks. A row that lies whole in
//! one chunk (so PostgreSQL sends them) is borrowed from it; only a row that crosses chunks is
//! gathered in a buffer. [`begin`], [`row`], [`field`] and [`end`] write the format.

/// First bytes of every stream.
pub const SIGNATURE: [u8; 11] = *b"PGCOPY\n\xff\r\n\0";

/// Signature, flags and the length of the header's extension.
pub const HEADER_LEN: usize = 19;

/// Bytes a row can have, its field count included: PostgreSQL's own limit for one message.
pub const ROW_LEN_MAX: usize = 0x3FFF_FFFF;

/// A gathering buffer larger than this is given back after its row.
const GATHERED_KEPT_MAX: usize = 1 << 20;

/// Why bytes are not COPY's binary format. Nothing can be read after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("COPY data, byte {offset}: {problem}")]
pub struct CopyError {
    /// Bytes of the stream before the header, row or chunk that is wrong.
    pub offset: u64,
    /// What is wrong.
    pub problem: CopyProblem,
}

/// What is wrong with COPY data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CopyProblem {
    /// It does not start as the format does.
    #[error("expected the signature of COPY's binary format (was FORMAT binary asked for?)")]
    Signature,
    /// A flag is set whose meaning is not known and which must not be ignored (bits 16 to 31).
    #[error("unknown critical flags {found:#010x} in the header")]
    Flags {
        /// All flags.
        found: u32,
    },
    /// The header's extension has a length below zero.
    #[error("expected the length of the header's extension, found {found}")]
    ExtensionLength {
        /// The length.
        found: i32,
    },
    /// The number of fields is neither -1 nor at least 0.
    #[error("expected a number of fields, found {found}")]
    FieldCount {
        /// The number.
        found: i16,
    },
    /// A field's length is neither -1 nor at least 0.
    #[error("expected the length of a field, found {found}")]
    FieldLength {
        /// The length.
        found: i32,
    },
    /// The row would be larger than PostgreSQL allows.
    #[error("row of {len} bytes or more, {max} is the limit", max = ROW_LEN_MAX)]
    RowTooLong {
        /// Length as far as it is known.
        len: usize,
    },
    /// Bytes follow the trailer.
    #[error("{len} bytes follow the trailer")]
    AfterTrailer {
        /// How many, in this chunk.
        len: usize,
    },
    /// The stream ended before its trailer.
    #[error("the data ends before the trailer")]
    NoTrailer,
    /// The reader was used after an error.
    #[error("reading stopped at an earlier error")]
    Stopped,
}

/// One row, borrowed. All of it has been checked: reading its fields cannot fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row<'a> {
    bytes: &'a [u8],
}

impl<'a> Row<'a> {
    /// Number of fields.
    pub fn len(&self) -> usize {
        self.bytes.first_chunk().map_or(0, |count| usize::from(u16::from_be_bytes(*count)))
    }

    /// No fields at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The fields in order; `None` is NULL.
    pub fn fields(&self) -> Fields<'a> {
        Fields { left: self.len(), rest: self.bytes.get(2..).unwrap_or_default() }
    }

    /// The row as it is in the stream, its field count included.
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

/// Iterator over a row's fields.
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    left: usize,
    rest: &'a [u8],
}

impl<'a> Iterator for Fields<'a> {
    type Item = Option<&'a [u8]>;

    /// The row was checked before, so `None` comes after the last field only.
    #[inline]
    fn next(&mut self) -> Option<Option<&'a [u8]>> {
        self.left = self.left.checked_sub(1)?;
        let (len, rest) = self.rest.split_first_chunk()?;
        let Ok(len) = usize::try_from(i32::from_be_bytes(*len)) else {
            self.rest = rest;
            return Some(None);
        };
        let (bytes, rest) = rest.split_at_checked(len)?;
        self.rest = rest;
        Some(Some(bytes))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Fields<'_> {}
impl std::iter::FusedIterator for Fields<'_> {}

/// What the bytes at the front of a stream are.
#[derive(Clone, Copy, Debug)]
enum Phase {
    /// The fixed part of the header.
    Header,
    /// What is left of the header's extension.
    Extension(usize),
    /// A row or the trailer.
    Rows,
    /// Nothing.
    Ended,
    /// An error was found.
    Stopped,
}

/// How far a row has been checked; survives from one chunk to the next, so that no byte is looked
/// at twice.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    /// Bytes checked, also when they have not all arrived.
    checked: usize,
    /// Fields to come, once the count is known.
    fields_left: Option<usize>,
}

/// What checking an item has found.
enum Step {
    /// More bytes are needed: this many in all, from the item's start.
    Needs(usize),
    /// A row of this many bytes.
    Row(usize),
    /// The trailer.
    Trailer,
}

impl Progress {
    fn advance(&mut self, bytes: &[u8]) -> Result<Step, CopyProblem> {
        let mut left = match self.fields_left {
            Some(left) => left,
            None => {
                let Some(count) = bytes.first_chunk() else { return Ok(Step::Needs(2)) };
                self.checked = 2;
                match i16::from_be_bytes(*count) {
                    -1 => return Ok(Step::Trailer),
                    found => {
                        usize::try_from(found).map_err(|_| CopyProblem::FieldCount { found })?
                    }
                }
            }
        };
        loop {
            self.fields_left = Some(left);
            if self.checked > ROW_LEN_MAX {
                return Err(CopyProblem::RowTooLong { len: self.checked });
            }
            let Some(rest) = bytes.get(self.checked..) else {
                return Ok(Step::Needs(self.checked));
            };
            if left == 0 {
                return Ok(Step::Row(self.checked));
            }
            let Some(len) = rest.first_chunk() else { return Ok(Step::Needs(self.checked + 4)) };
            self.checked += 4 + match i32::from_be_bytes(*len) {
                -1 => 0,
                found => usize::try_from(found).map_err(|_| CopyProblem::FieldLength { found })?,
            };
            left -= 1;
        }
    }
}

/// Splits a stream of COPY data into rows.
///
/// Memory: nothing for rows that lie whole in a chunk, else the row's bytes that have arrived; at
/// most [`ROW_LEN_MAX`].
#[derive(Debug)]
pub struct RowReader {
    phase: Phase,
    progress: Progress,
    /// The start of an item whose end is in a later chunk.
    gathered: Vec<u8>,
    /// Bytes of the stream that belong to items which are complete.
    offset: u64,
}

impl Default for RowReader {
    fn default() -> Self {
        RowReader::new()
    }
}

impl RowReader {
    /// At the start of a stream.
    pub fn new() -> RowReader {
        RowReader {
            phase: Phase::Header,
            progress: Progress::default(),
            gathered: Vec::new(),
            offset: 0,
        }
    }

    /// Takes the next bytes of the stream. Call [`Rows::next_row`] until it returns `None`, or the
    /// rest of the chunk is lost and the reader refuses to go on.
    pub fn feed<'a>(&'a mut self, chunk: &'a [u8]) -> Rows<'a> {
        Rows { reader: self, chunk, delivered: false }
    }

    /// The trailer has been read.
    pub fn is_ended(&self) -> bool {
        matches!(self.phase, Phase::Ended)
    }

    /// To be called at the end of the stream.
    ///
    /// # Errors
    /// The trailer has not been read.
    pub fn finish(&self) -> Result<(), CopyError> {
        let problem = match self.phase {
            Phase::Ended => return Ok(()),
            Phase::Stopped => CopyProblem::Stopped,
            Phase::Header | Phase::Extension(_) | Phase::Rows => CopyProblem::NoTrailer,
        };
        Err(CopyError { offset: self.offset, problem })
    }

    fn item_done(&mut self, len: usize) {
        self.offset += len as u64;
        self.progress = Progress::default();
    }

    fn clear_gathered(&mut self) {
        if self.gathered.capacity() > GATHERED_KEPT_MAX {
            self.gathered = Vec::new();
        } else {
            self.gathered.clear();
        }
    }
}

/// The rows that end in one chunk.
#[derive(Debug)]
pub struct Rows<'a> {
    reader: &'a mut RowReader,
    chunk: &'a [u8],
    /// The row last returned was in the gathering buffer.
    delivered: bool,
}

impl Drop for Rows<'_> {
    /// Rows that were never read must not go missing silently.
    fn drop(&mut self) {
        if self.delivered {
            self.reader.clear_gathered();
        }
        if !self.chunk.is_empty() {
            self.reader.phase = Phase::Stopped;
        }
    }
}

impl Rows<'_> {
    /// The next row, or `None` when the chunk is used up.
    ///
    /// # Errors
    /// Whatever is not COPY's binary format; the reader then stays stopped.
    pub fn next_row(&mut self) -> Result<Option<Row<'_>>, CopyError> {
        if std::mem::take(&mut self.delivered) {
            self.reader.clear_gathered();
        }
        match self.next_end() {
            Ok(None) => Ok(None),
            Ok(Some(Found::InChunk(row))) => Ok(Some(Row { bytes: row })),
            Ok(Some(Found::Gathered)) => {
                self.delivered = true;
                Ok(Some(Row { bytes: &self.reader.gathered }))
            }
            Err(problem) => {
                self.reader.phase = Phase::Stopped;
                self.chunk = &[];
                Err(CopyError { offset: self.reader.offset, problem })
            }
        }
    }
}

/// Where a complete row is.
enum Found<'a> {
    InChunk(&'a [u8]),
    Gathered,
}

impl<'a> Rows<'a> {
    fn next_end(&mut self) -> Result<Option<Found<'a>>, CopyProblem> {
        loop {
            match self.reader.phase {
                Phase::Header => {
                    if !self.gather(HEADER_LEN) {
                        let start = &self.reader.gathered;
                        let checked = start.len().min(SIGNATURE.len());
                        if start[..checked] != SIGNATURE[..checked] {
                            return Err(CopyProblem::Signature);
                        }
                        return Ok(None);
                    }
                    let extension_len = header_extension_len(&self.reader.gathered)?;
                    self.reader.clear_gathered();
                    self.reader.item_done(HEADER_LEN);
                    self.reader.phase = Phase::Extension(extension_len);
                }
                Phase::Extension(left) => {
                    let skipped = left.min(self.chunk.len());
                    self.chunk = &self.chunk[skipped..];
                    self.reader.item_done(skipped);
                    if skipped < left {
                        self.reader.phase = Phase::Extension(left - skipped);
                        return Ok(None);
                    }
                    self.reader.phase = Phase::Rows;
                }
                Phase::Rows if self.reader.gathered.is_empty() => {
                    if self.chunk.is_empty() {
                        return Ok(None);
                    }
                    let chunk = self.chunk;
                    match self.reader.progress.advance(chunk)? {
                        Step::Row(len) => {
                            let (row, rest) = chunk.split_at(len);
                            self.chunk = rest;
                            self.reader.item_done(len);
                            return Ok(Some(Found::InChunk(row)));
                        }
                        Step::Trailer => {
                            self.chunk = &chunk[2..];
                            self.end_rows();
                        }
                        Step::Needs(_) => {
                            self.reader.gathered.extend_from_slice(chunk);
                            self.chunk = &[];
                            return Ok(None);
                        }
                    }
                }
                Phase::Rows => {
                    let RowReader { progress, gathered, .. } = &mut *self.reader;
                    match progress.advance(gathered)? {
                        Step::Row(len) => {
                            self.reader.item_done(len);
                            return Ok(Some(Found::Gathered));
                        }
                        Step::Trailer => {
                            self.reader.clear_gathered();
                            self.end_rows();
                        }
                        Step::Needs(len) => {
                            if !self.gather(len) {
                                return Ok(None);
                            }
                        }
                    }
                }
                Phase::Ended if self.chunk.is_empty() => return Ok(None),
                Phase::Ended => return Err(CopyProblem::AfterTrailer { len: self.chunk.len() }),
                Phase::Stopped => return Err(CopyProblem::Stopped),
            }
        }
    }

    fn end_rows(&mut self) {
        self.reader.item_done(2);
        self.reader.phase = Phase::Ended;
    }

    /// Moves bytes of the chunk to the gathering buffer until that holds `len`. False if the chunk
    /// has too few.
    fn gather(&mut self, len: usize) -> bool {
        let gathered = &mut self.reader.gathered;
        let wanted = len.saturating_sub(gathered.len()).min(self.chunk.len());
        let (moved, rest) = self.chunk.split_at(wanted);
        gathered.extend_from_slice(moved);
        self.chunk = rest;
        gathered.len() >= len
    }
}

fn header_extension_len(header: &[u8]) -> Result<usize, CopyProblem> {
    let fields = header.strip_prefix(&SIGNATURE).ok_or(CopyProblem::Signature)?;
    let (Some(flags), Some(extension_len)) = (fields.first_chunk(), fields.last_chunk()) else {
        return Err(CopyProblem::Signature);
    };
    let found = u32::from_be_bytes(*flags);
    if found >> 16 != 0 {
        return Err(CopyProblem::Flags { found });
    }
    let found = i32::from_be_bytes(*extension_len);
    usize::try_from(found).map_err(|_| CopyProblem::ExtensionLength { found })
}

/// Appends the header.
pub fn begin(out: &mut Vec<u8>) {
    out.extend_from_slice(&SIGNATURE);
    out.extend_from_slice(&[0; 8]);
}

/// Starts a row; exactly `fields` calls of [`field`] follow. At most 32,767 (PostgreSQL's tables
/// have at most 1,600 columns).
#[inline]
pub fn row(out: &mut Vec<u8>, fields: u16) {
    out.extend_from_slice(&fields.to_be_bytes());
}

/// Appends a field in the binary form of its type; `None` is NULL. At most [`ROW_LEN_MAX`] bytes.
#[inline]
pub fn field(out: &mut Vec<u8>, value: Option<&[u8]>) {
    match value {
        Some(bytes) => {
            out.extend_from_slice(&(bytes.len() as u32).to_be_bytes());
            out.extend_from_slice(bytes);
        }
        None => out.extend_from_slice(&(-1_i32).to_be_bytes()),
    }
}

/// Appends the trailer.
pub fn end(out: &mut Vec<u8>) {
    out.extend_from_slice(&(-1_i16).to_be_bytes());
}
