//! Messages a client sends (PostgreSQL docs: "55.7. Message Formats", those marked *F*).
//!
//! Every encoder appends one whole message to `out` or, on error, leaves `out` as it was. Nothing
//! else is allocated: a pipeline of thousands of messages is one buffer and one write.

use bytes::{BufMut, BytesMut};

/// The protocol version that [`startup`] asks for: 3.0.
pub const PROTOCOL_VERSION: i32 = 3 << 16;

/// Most bytes in one message, its length word included. The server refuses more than this
/// (`PQ_LARGE_MESSAGE_LIMIT`, 1 GiB − 2).
pub const MESSAGE_BYTES_MAX: usize = 0x3FFF_FFFE;

/// Most parameters in one Bind: the count travels as 16 bits.
pub const PARAMETERS_MAX: usize = u16::MAX as usize;

const SSL_REQUEST_CODE: i32 = 80_877_103;
const CANCEL_REQUEST_CODE: i32 = 80_877_102;

/// A message that cannot be put on the wire. `out` was left unchanged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// A string with a zero byte, which would end it early.
    #[error("{what} contains a zero byte, which PostgreSQL's protocol cannot carry")]
    ZeroByte {
        /// Which string.
        what: &'static str,
    },
    /// Longer than [`MESSAGE_BYTES_MAX`].
    #[error("a message of {bytes} bytes is more than PostgreSQL accepts ({MESSAGE_BYTES_MAX})")]
    TooLong {
        /// How long it would have been.
        bytes: usize,
    },
    /// More than [`PARAMETERS_MAX`] items where the count travels as 16 bits.
    #[error("{count} {what} in one message; PostgreSQL's protocol allows {PARAMETERS_MAX}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many.
        count: usize,
    },
    /// A [`Bind`] was finished with another number of parameters than it was begun with.
    #[error("Bind was begun for {expected} parameters and given {given}")]
    ParameterCount {
        /// Announced to [`Bind::begin`].
        expected: usize,
        /// Written.
        given: usize,
    },
}

/// How a value travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// The type's text input and output functions.
    Text,
    /// The type's receive and send functions.
    Binary,
}

impl Format {
    /// The code on the wire.
    pub const fn code(self) -> i16 {
        match self {
            Format::Text => 0,
            Format::Binary => 1,
        }
    }
}

/// What Describe and Close are about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target<'a> {
    /// A prepared statement; the empty name is the unnamed one.
    Statement(&'a str),
    /// A portal; the empty name is the unnamed one.
    Portal(&'a str),
}

impl<'a> Target<'a> {
    fn parts(self) -> (u8, &'a str) {
        match self {
            Target::Statement(name) => (b'S', name),
            Target::Portal(name) => (b'P', name),
        }
    }
}

/// Writes `[tag] length body`, and takes it back when `body` fails or grows too long.
fn framed(
    out: &mut BytesMut,
    tag: Option<u8>,
    body: impl FnOnce(&mut BytesMut) -> Result<(), EncodeError>,
) -> Result<(), EncodeError> {
    let start = out.len();
    if let Some(tag) = tag {
        out.put_u8(tag);
    }
    let length_at = out.len();
    out.put_i32(0);
    let written = body(out).and_then(|()| patch_length(out, length_at));
    if written.is_err() {
        out.truncate(start);
    }
    written
}

/// Fills in the length word at `length_at` for a message that ends where `out` ends.
fn patch_length(out: &mut BytesMut, length_at: usize) -> Result<(), EncodeError> {
    let bytes = out.len() - length_at;
    if bytes > MESSAGE_BYTES_MAX {
        return Err(EncodeError::TooLong { bytes });
    }
    out[length_at..length_at + 4].copy_from_slice(&(bytes as u32).to_be_bytes());
    Ok(())
}

fn put_c_string(out: &mut BytesMut, text: &[u8], what: &'static str) -> Result<(), EncodeError> {
    if text.contains(&0) {
        return Err(EncodeError::ZeroByte { what });
    }
    // Checked before copying: a refusal must not cost the memory of what it refuses.
    if text.len() > MESSAGE_BYTES_MAX {
        return Err(EncodeError::TooLong { bytes: text.len() });
    }
    out.put_slice(text);
    out.put_u8(0);
    Ok(())
}

fn put_count(out: &mut BytesMut, count: usize, what: &'static str) -> Result<(), EncodeError> {
    let count = u16::try_from(count).map_err(|_| EncodeError::TooMany { what, count })?;
    out.put_u16(count);
    Ok(())
}

/// StartupMessage: protocol 3.0 and the session's parameters (`user`, `database`, settings).
///
/// # Errors
/// A zero byte in a name or value.
pub fn startup<'a>(
    out: &mut BytesMut,
    parameters: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<(), EncodeError> {
    framed(out, None, |out| {
        out.put_i32(PROTOCOL_VERSION);
        for (name, value) in parameters {
            put_c_string(out, name.as_bytes(), "a startup parameter's name")?;
            put_c_string(out, value.as_bytes(), "a startup parameter")?;
        }
        out.put_u8(0);
        Ok(())
    })
}

/// SSLRequest: the server answers with one byte, `S` or `N`, outside any message.
pub fn ssl_request(out: &mut BytesMut) {
    out.put_i32(8);
    out.put_i32(SSL_REQUEST_CODE);
}

/// CancelRequest, sent alone on a connection of its own. The key has 4 bytes in protocol 3.0 and
/// up to 256 in 3.2.
///
/// # Errors
/// An absurdly long key.
pub fn cancel_request(
    out: &mut BytesMut,
    process_id: i32,
    secret_key: &[u8],
) -> Result<(), EncodeError> {
    framed(out, None, |out| {
        out.put_i32(CANCEL_REQUEST_CODE);
        out.put_i32(process_id);
        out.put_slice(secret_key);
        Ok(())
    })
}

/// PasswordMessage: a password in clear, or its MD5 answer.
///
/// # Errors
/// A zero byte in the password.
pub fn password(out: &mut BytesMut, password: &[u8]) -> Result<(), EncodeError> {
    framed(out, Some(b'p'), |out| put_c_string(out, password, "the password"))
}

/// SASLInitialResponse.
///
/// # Errors
/// A zero byte in the mechanism's name.
pub fn sasl_initial(
    out: &mut BytesMut,
    mechanism: &str,
    response: &[u8],
) -> Result<(), EncodeError> {
    framed(out, Some(b'p'), |out| {
        put_c_string(out, mechanism.as_bytes(), "the SASL mechanism")?;
        put_value(out, Some(response))
    })
}

/// SASLResponse.
///
/// # Errors
/// An absurdly long response.
pub fn sasl_response(out: &mut BytesMut, response: &[u8]) -> Result<(), EncodeError> {
    framed(out, Some(b'p'), |out| {
        out.put_slice(response);
        Ok(())
    })
}

/// Query: one or more statements by the simple protocol.
///
/// # Errors
/// A zero byte in the SQL.
pub fn query(out: &mut BytesMut, sql: &str) -> Result<(), EncodeError> {
    framed(out, Some(b'Q'), |out| put_c_string(out, sql.as_bytes(), "the SQL text"))
}

/// Parse: prepares `sql` under `statement`. A type OID of 0, or fewer types than parameters,
/// leaves the type to the server.
///
/// # Errors
/// A zero byte in a string, or too many types.
pub fn parse(
    out: &mut BytesMut,
    statement: &str,
    sql: &str,
    parameter_types: &[u32],
) -> Result<(), EncodeError> {
    framed(out, Some(b'P'), |out| {
        put_c_string(out, statement.as_bytes(), "the statement's name")?;
        put_c_string(out, sql.as_bytes(), "the SQL text")?;
        put_count(out, parameter_types.len(), "parameter types")?;
        for oid in parameter_types {
            out.put_u32(*oid);
        }
        Ok(())
    })
}

/// Bind, with all parameters in one format and at hand. See [`Bind`] to write them one by one.
///
/// # Errors
/// As [`Bind`].
pub fn bind(
    out: &mut BytesMut,
    portal: &str,
    statement: &str,
    format: Format,
    parameters: &[Option<&[u8]>],
    result_format: Format,
) -> Result<(), EncodeError> {
    let mut bind = Bind::begin(out, portal, statement, parameters.len())?;
    for value in parameters {
        bind.parameter(format, *value)?;
    }
    bind.finish(result_format)
}

/// A Bind message that is written straight into the out buffer, one parameter at a time.
///
/// Dropped before [`Bind::finish`] has succeeded, it takes back everything it wrote.
#[derive(Debug)]
pub struct Bind<'a> {
    out: &'a mut BytesMut,
    start: usize,
    formats_at: usize,
    expected: usize,
    given: usize,
    finished: bool,
}

impl<'a> Bind<'a> {
    /// Begins a Bind of `statement` to `portal` with exactly `parameters` parameters.
    ///
    /// # Errors
    /// A zero byte in a name, or more than [`PARAMETERS_MAX`] parameters.
    pub fn begin(
        out: &'a mut BytesMut,
        portal: &str,
        statement: &str,
        parameters: usize,
    ) -> Result<Bind<'a>, EncodeError> {
        let start = out.len();
        // From here on, Drop takes back what was written if anything below fails.
        let mut bind =
            Bind { out, start, formats_at: 0, expected: parameters, given: 0, finished: false };
        bind.out.put_u8(b'B');
        bind.out.put_i32(0);
        put_c_string(bind.out, portal.as_bytes(), "the portal's name")?;
        put_c_string(bind.out, statement.as_bytes(), "the statement's name")?;
        put_count(bind.out, parameters, "parameters")?;
        bind.formats_at = bind.out.len();
        bind.out.put_bytes(0, 2 * parameters);
        put_count(bind.out, parameters, "parameters")?;
        Ok(bind)
    }

    /// Writes the next parameter; `None` is NULL.
    ///
    /// # Errors
    /// One parameter too many, or a value longer than a message may be.
    pub fn parameter(&mut self, format: Format, value: Option<&[u8]>) -> Result<(), EncodeError> {
        self.next_parameter(format)?;
        put_value(self.out, value)
    }

    /// Lets `write` append the next parameter's value straight into the message.
    ///
    /// `write` must only append.
    ///
    /// # Errors
    /// One parameter too many, or a value longer than a message may be.
    pub fn parameter_with(
        &mut self,
        format: Format,
        write: impl FnOnce(&mut BytesMut),
    ) -> Result<(), EncodeError> {
        self.next_parameter(format)?;
        let length_at = self.out.len();
        self.out.put_i32(0);
        write(self.out);
        let bytes = self.out.len().saturating_sub(length_at + 4);
        if bytes > MESSAGE_BYTES_MAX {
            return Err(EncodeError::TooLong { bytes });
        }
        if let Some(word) = self.out.get_mut(length_at..length_at + 4) {
            word.copy_from_slice(&(bytes as u32).to_be_bytes());
        }
        Ok(())
    }

    /// Ends the message; all result columns are asked for in `result_format`.
    ///
    /// # Errors
    /// Fewer parameters than announced, or a message too long; the message is then taken back.
    pub fn finish(mut self, result_format: Format) -> Result<(), EncodeError> {
        if self.given != self.expected {
            return Err(EncodeError::ParameterCount { expected: self.expected, given: self.given });
        }
        self.out.put_u16(1);
        self.out.put_i16(result_format.code());
        let length_at = self.start + 1;
        patch_length(self.out, length_at)?;
        self.finished = true;
        Ok(())
    }

    fn next_parameter(&mut self, format: Format) -> Result<(), EncodeError> {
        if self.given == self.expected {
            let given = self.given + 1;
            return Err(EncodeError::ParameterCount { expected: self.expected, given });
        }
        let at = self.formats_at + 2 * self.given;
        self.out[at..at + 2].copy_from_slice(&format.code().to_be_bytes());
        self.given += 1;
        Ok(())
    }
}

impl Drop for Bind<'_> {
    fn drop(&mut self) {
        if !self.finished {
            self.out.truncate(self.start);
        }
    }
}

fn put_value(out: &mut BytesMut, value: Option<&[u8]>) -> Result<(), EncodeError> {
    match value {
        None => out.put_i32(-1),
        Some(value) if value.len() > MESSAGE_BYTES_MAX => {
            return Err(EncodeError::TooLong { bytes: value.len() });
        }
        Some(value) => {
            out.put_u32(value.len() as u32);
            out.put_slice(value);
        }
    }
    Ok(())
}

/// Describe.
///
/// # Errors
/// A zero byte in the name.
pub fn describe(out: &mut BytesMut, target: Target<'_>) -> Result<(), EncodeError> {
    let (kind, name) = target.parts();
    framed(out, Some(b'D'), |out| {
        out.put_u8(kind);
        put_c_string(out, name.as_bytes(), "the statement's or portal's name")
    })
}

/// Execute: runs `portal` for at most `rows_max` rows; 0 means all.
///
/// # Errors
/// A zero byte in the name.
pub fn execute(out: &mut BytesMut, portal: &str, rows_max: u32) -> Result<(), EncodeError> {
    framed(out, Some(b'E'), |out| {
        put_c_string(out, portal.as_bytes(), "the portal's name")?;
        out.put_i32(i32::try_from(rows_max).unwrap_or(i32::MAX));
        Ok(())
    })
}

/// Close.
///
/// # Errors
/// A zero byte in the name.
pub fn close(out: &mut BytesMut, target: Target<'_>) -> Result<(), EncodeError> {
    let (kind, name) = target.parts();
    framed(out, Some(b'C'), |out| {
        out.put_u8(kind);
        put_c_string(out, name.as_bytes(), "the statement's or portal's name")
    })
}

fn put_empty(out: &mut BytesMut, tag: u8) {
    out.put_u8(tag);
    out.put_i32(4);
}

/// Flush: asks the server to send what it has.
pub fn flush(out: &mut BytesMut) {
    put_empty(out, b'H');
}

/// Sync: ends a pipeline's unit; the server answers ReadyForQuery, whatever failed before.
pub fn sync(out: &mut BytesMut) {
    put_empty(out, b'S');
}

/// CopyData.
///
/// # Errors
/// More data than one message may hold.
pub fn copy_data(out: &mut BytesMut, data: &[u8]) -> Result<(), EncodeError> {
    out.reserve(5 + data.len());
    copy_data_head(out, data, 0)
}

/// The beginning of a CopyData: `head`, and the `more` bytes that the caller sends right behind it.
///
/// # Errors
/// More data than one message may hold.
pub fn copy_data_head(out: &mut BytesMut, head: &[u8], more: usize) -> Result<(), EncodeError> {
    let bytes = head.len().saturating_add(more).saturating_add(4);
    if bytes > MESSAGE_BYTES_MAX {
        return Err(EncodeError::TooLong { bytes });
    }
    out.put_u8(b'd');
    out.put_u32(bytes as u32);
    out.put_slice(head);
    Ok(())
}

/// CopyDone.
pub fn copy_done(out: &mut BytesMut) {
    put_empty(out, b'c');
}

/// CopyFail: the server fails the COPY with `reason`.
///
/// # Errors
/// A zero byte in the reason.
pub fn copy_fail(out: &mut BytesMut, reason: &str) -> Result<(), EncodeError> {
    framed(out, Some(b'f'), |out| put_c_string(out, reason.as_bytes(), "the reason"))
}

/// Terminate.
pub fn terminate(out: &mut BytesMut) {
    put_empty(out, b'X');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(write: impl FnOnce(&mut BytesMut)) -> Vec<u8> {
        let mut out = BytesMut::from(&b"before"[..]);
        write(&mut out);
        assert_eq!(&out[..6], b"before");
        out[6..].to_vec()
    }

    #[test]
    fn messages_have_the_documented_bytes() {
        assert_eq!(
            encoded(|o| startup(o, [("user", "a"), ("database", "b")]).unwrap()),
            b"\0\0\0\x1b\0\x03\0\0user\0a\0database\0b\0\0"
        );
        assert_eq!(encoded(ssl_request), b"\0\0\0\x08\x04\xd2\x16\x2f");
        assert_eq!(
            encoded(|o| cancel_request(o, 7, &[1, 2, 3, 4]).unwrap()),
            b"\0\0\0\x10\x04\xd2\x16\x2e\0\0\0\x07\x01\x02\x03\x04"
        );
        assert_eq!(encoded(|o| password(o, b"pw").unwrap()), b"p\0\0\0\x07pw\0");
        assert_eq!(encoded(|o| sasl_initial(o, "M", b"r").unwrap()), b"p\0\0\0\x0bM\0\0\0\0\x01r");
        assert_eq!(encoded(|o| sasl_response(o, b"r").unwrap()), b"p\0\0\0\x05r");
        assert_eq!(encoded(|o| query(o, "q").unwrap()), b"Q\0\0\0\x06q\0");
        assert_eq!(
            encoded(|o| parse(o, "s", "q", &[23]).unwrap()),
            b"P\0\0\0\x0es\0q\0\0\x01\0\0\0\x17"
        );
        assert_eq!(encoded(|o| describe(o, Target::Portal("p")).unwrap()), b"D\0\0\0\x07Pp\0");
        assert_eq!(encoded(|o| close(o, Target::Statement("s")).unwrap()), b"C\0\0\0\x07Ss\0");
        assert_eq!(encoded(|o| execute(o, "", 9).unwrap()), b"E\0\0\0\x09\0\0\0\0\x09");
        assert_eq!(encoded(flush), b"H\0\0\0\x04");
        assert_eq!(encoded(sync), b"S\0\0\0\x04");
        assert_eq!(encoded(|o| copy_data(o, b"xy").unwrap()), b"d\0\0\0\x06xy");
        assert_eq!(encoded(copy_done), b"c\0\0\0\x04");
        assert_eq!(encoded(|o| copy_fail(o, "no").unwrap()), b"f\0\0\0\x07no\0");
        assert_eq!(encoded(terminate), b"X\0\0\0\x04");
    }

    #[test]
    fn bind_writes_formats_values_and_nulls() {
        let bytes = encoded(|out| {
            let mut bind = Bind::begin(out, "", "s", 3).unwrap();
            bind.parameter(Format::Binary, Some(b"ab")).unwrap();
            bind.parameter(Format::Text, None).unwrap();
            bind.parameter_with(Format::Binary, |out| out.put_u16(7)).unwrap();
            bind.finish(Format::Text).unwrap();
        });
        assert_eq!(
            bytes,
            b"B\0\0\0\x25\0s\0\0\x03\0\x01\0\0\0\x01\0\x03\0\0\0\x02ab\xff\xff\xff\xff\0\0\0\x02\0\x07\0\x01\0\0"
        );
    }

    #[test]
    fn a_refused_message_leaves_nothing_behind() {
        let mut out = BytesMut::from(&b"kept"[..]);
        assert!(query(&mut out, "a\0b").is_err());
        assert!(startup(&mut out, [("user", "a\0")]).is_err());
        assert!(parse(&mut out, "s", "q", &[0; 65_536]).is_err());
        assert!(Bind::begin(&mut out, "", "s\0", 0).is_err());
        assert!(Bind::begin(&mut out, "", "s", 65_536).is_err());
        let mut bind = Bind::begin(&mut out, "", "s", 2).unwrap();
        bind.parameter(Format::Text, Some(b"1")).unwrap();
        assert_eq!(
            bind.finish(Format::Text),
            Err(EncodeError::ParameterCount { expected: 2, given: 1 })
        );
        let mut bind = Bind::begin(&mut out, "", "s", 0).unwrap();
        assert!(bind.parameter(Format::Text, None).is_err());
        drop(bind);
        assert_eq!(&out[..], b"kept");
    }
}
