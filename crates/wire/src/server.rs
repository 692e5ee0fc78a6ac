//! The server's side: reads what clients send, writes what servers send (PostgreSQL docs: "55.7.
//! Message Formats"). Only what a walsender needs.
//!
//! Total: every input gives a message or a [`ClientError`].

use crate::frontend::EncodeError;
use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Most bytes of a startup packet, as PostgreSQL has it (`MAX_STARTUP_PACKET_LENGTH`).
pub const STARTUP_BYTES_MAX: usize = 10_000;

/// Most bytes of any other message that is taken from a client: commands and status updates are
/// short.
pub const CLIENT_MESSAGE_BYTES_MAX: usize = 64 << 10;

/// Most bytes of what a client answers to a request for authentication: somebody whom nobody knows
/// yet.
const AUTHENTICATION_BYTES_MAX: usize = 4 << 10;

const PROTOCOL_MAJOR: u32 = 3;
const CANCEL_REQUEST_CODE: u32 = 80_877_102;
const SSL_REQUEST_CODE: u32 = 80_877_103;
const GSS_REQUEST_CODE: u32 = 80_877_104;

/// What a client says first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Opening {
    /// It wants TLS; the answer is one byte, `S` or `N`.
    SslRequest,
    /// It wants GSSAPI encryption; the answer is one byte, `G` or `N`.
    GssEncryptionRequest,
    /// It wants another session's statement cancelled.
    CancelRequest,
    /// It wants a session.
    Startup {
        /// Minor version of protocol 3.
        minor: u16,
        /// `user`, `database`, `replication` and settings, in the client's order.
        parameters: Vec<(String, String)>,
    },
}

/// What a client says in a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FromFrontend {
    /// `Q`
    Query(String),
    /// `d`
    CopyData(Bytes),
    /// `c`
    CopyDone,
    /// `f`, with its reason.
    CopyFail(String),
    /// `X`
    Terminate,
}

/// Why a client's bytes are not a message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// Too short to be one, or longer than is taken.
    #[error("a client announced a message of {length} bytes, and at most {max} are taken")]
    Length {
        /// As announced.
        length: u32,
        /// The bound.
        max: usize,
    },
    /// Not protocol 3.
    #[error("a client speaks protocol {major}.{minor}, and only 3 is spoken here")]
    Version {
        /// Major version.
        major: u32,
        /// Minor version.
        minor: u32,
    },
    /// Text that does not end, or is not UTF-8.
    #[error("a client's {message} is malformed")]
    Malformed {
        /// Which message.
        message: &'static str,
    },
    /// No message that is understood here has this tag.
    #[error("a client sent a message with tag {tag:#04x}, which is not understood here")]
    UnknownTag {
        /// First byte.
        tag: u8,
    },
}

/// Cuts the first packet of a connection off `buffer`; `None` if it is not here as a whole yet.
///
/// # Errors
/// [`ClientError`] for whatever is not one.
pub fn split_opening(buffer: &mut BytesMut) -> Result<Option<Opening>, ClientError> {
    let Some(word) = buffer.first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_be_bytes(*word);
    let max = STARTUP_BYTES_MAX;
    let bytes = usize::try_from(length)
        .ok()
        .filter(|bytes| (8..=max).contains(bytes))
        .ok_or(ClientError::Length { length, max })?;
    if buffer.len() < bytes {
        return Ok(None);
    }
    let mut body = buffer.split_to(bytes).freeze();
    body.advance(4);
    match body.get_u32() {
        SSL_REQUEST_CODE => Ok(Some(Opening::SslRequest)),
        GSS_REQUEST_CODE => Ok(Some(Opening::GssEncryptionRequest)),
        CANCEL_REQUEST_CODE => Ok(Some(Opening::CancelRequest)),
        version if version >> 16 == PROTOCOL_MAJOR => {
            let malformed = || ClientError::Malformed { message: "startup packet" };
            let mut parameters = Vec::new();
            loop {
                let name = c_string(&mut body).ok_or_else(malformed)?;
                if name.is_empty() {
                    break;
                }
                parameters.push((name, c_string(&mut body).ok_or_else(malformed)?));
            }
            if !body.is_empty() {
                return Err(malformed());
            }
            Ok(Some(Opening::Startup { minor: version as u16, parameters }))
        }
        version => Err(ClientError::Version { major: version >> 16, minor: version & 0xFFFF }),
    }
}

/// Cuts the next message off `buffer`; `None` if it is not here as a whole yet.
///
/// # Errors
/// [`ClientError`] for whatever is not one.
pub fn split_message(buffer: &mut BytesMut) -> Result<Option<FromFrontend>, ClientError> {
    let Some((tag, body)) = split_tagged(buffer, CLIENT_MESSAGE_BYTES_MAX)? else {
        return Ok(None);
    };
    let text = |mut body: Bytes, message| {
        let text = c_string(&mut body).filter(|_| body.is_empty());
        text.ok_or(ClientError::Malformed { message })
    };
    let message = match tag {
        b'd' => FromFrontend::CopyData(body),
        b'Q' => FromFrontend::Query(text(body, "Query")?),
        b'f' => FromFrontend::CopyFail(text(body, "CopyFail")?),
        b'c' if body.is_empty() => FromFrontend::CopyDone,
        b'X' if body.is_empty() => FromFrontend::Terminate,
        b'c' => return Err(ClientError::Malformed { message: "CopyDone" }),
        b'X' => return Err(ClientError::Malformed { message: "Terminate" }),
        tag => return Err(ClientError::UnknownTag { tag }),
    };
    Ok(Some(message))
}

/// Cuts what a client answers to a request for authentication off `buffer`: its content, which the
/// request says how to read. `None` if it is not here as a whole yet.
///
/// # Errors
/// [`ClientError`] for whatever is not one.
pub fn split_authentication(buffer: &mut BytesMut) -> Result<Option<Bytes>, ClientError> {
    match split_tagged(buffer, AUTHENTICATION_BYTES_MAX)? {
        Some((b'p', body)) => Ok(Some(body)),
        Some((tag, _)) => Err(ClientError::UnknownTag { tag }),
        None => Ok(None),
    }
}

/// What a SASLInitialResponse holds: the mechanism that the client has chosen, and its first words.
///
/// # Errors
/// [`ClientError::Malformed`].
pub fn sasl_initial_response(mut body: Bytes) -> Result<(String, Bytes), ClientError> {
    let malformed = ClientError::Malformed { message: "SASLInitialResponse" };
    let Some(mechanism) = c_string(&mut body) else { return Err(malformed) };
    let length = body.try_get_i32().ok().and_then(|length| usize::try_from(length).ok());
    if length != Some(body.len()) {
        return Err(malformed);
    }
    Ok((mechanism, body))
}

/// A message's tag and content; `None` if it is not here as a whole yet.
fn split_tagged(buffer: &mut BytesMut, max: usize) -> Result<Option<(u8, Bytes)>, ClientError> {
    let Some(head) = buffer.first_chunk::<5>() else { return Ok(None) };
    let tag = head[0];
    let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
    let bytes = usize::try_from(length)
        .ok()
        .filter(|bytes| (4..=max).contains(bytes))
        .ok_or(ClientError::Length { length, max })?;
    if buffer.len() < 1 + bytes {
        return Ok(None);
    }
    let mut body = buffer.split_to(1 + bytes).freeze();
    body.advance(5);
    Ok(Some((tag, body)))
}

fn c_string(body: &mut Bytes) -> Option<String> {
    let end = body.iter().position(|byte| *byte == 0)?;
    let text = body.split_to(end);
    body.advance(1);
    String::from_utf8(text.to_vec()).ok()
}

/// Writes `tag length body`, the length filled in afterwards.
fn framed(out: &mut BytesMut, tag: u8, body: impl FnOnce(&mut BytesMut)) {
    out.put_u8(tag);
    let length_at = out.len();
    out.put_u32(0);
    body(out);
    let bytes = u32::try_from(out.len() - length_at).unwrap_or(u32::MAX);
    out[length_at..length_at + 4].copy_from_slice(&bytes.to_be_bytes());
}

/// Text without the zero bytes that would end it early.
fn put_text(out: &mut BytesMut, text: &str) {
    out.extend(text.bytes().filter(|byte| *byte != 0));
    out.put_u8(0);
}

/// AuthenticationOk.
pub fn authentication_ok(out: &mut BytesMut) {
    framed(out, b'R', |out| out.put_u32(0));
}

/// AuthenticationSASL: the mechanisms, the best one first.
pub fn authentication_sasl(out: &mut BytesMut, mechanisms: &[&str]) {
    framed(out, b'R', |out| {
        out.put_u32(10);
        for mechanism in mechanisms {
            put_text(out, mechanism);
        }
        out.put_u8(0);
    });
}

/// AuthenticationSASLContinue.
pub fn authentication_sasl_continue(out: &mut BytesMut, data: &[u8]) {
    framed(out, b'R', |out| {
        out.put_u32(11);
        out.put_slice(data);
    });
}

/// AuthenticationSASLFinal.
pub fn authentication_sasl_final(out: &mut BytesMut, data: &[u8]) {
    framed(out, b'R', |out| {
        out.put_u32(12);
        out.put_slice(data);
    });
}

/// NegotiateProtocolVersion: this server speaks 3.0 and knows no protocol options.
pub fn negotiate_protocol_version(out: &mut BytesMut, unrecognized: &[&str]) {
    framed(out, b'v', |out| {
        out.put_u32(PROTOCOL_MAJOR << 16);
        out.put_u32(u32::try_from(unrecognized.len()).unwrap_or(u32::MAX));
        for name in unrecognized {
            put_text(out, name);
        }
    });
}

/// ParameterStatus.
pub fn parameter_status(out: &mut BytesMut, name: &str, value: &str) {
    framed(out, b'S', |out| {
        put_text(out, name);
        put_text(out, value);
    });
}

/// BackendKeyData of protocol 3.0.
pub fn backend_key_data(out: &mut BytesMut, process_id: i32, secret_key: u32) {
    framed(out, b'K', |out| {
        out.put_i32(process_id);
        out.put_u32(secret_key);
    });
}

/// ReadyForQuery, with no transaction open.
pub fn ready_for_query(out: &mut BytesMut) {
    framed(out, b'Z', |out| out.put_u8(b'I'));
}

/// OIDs of the types that a walsender's results have.
pub mod type_oid {
    /// `int4`
    pub const INT4: u32 = 23;
    /// `int8`
    pub const INT8: u32 = 20;
    /// `text`
    pub const TEXT: u32 = 25;
    /// `bytea`
    pub const BYTEA: u32 = 17;
}

/// RowDescription: names and type OIDs, all values as text.
pub fn row_description(out: &mut BytesMut, columns: &[(&str, u32)]) {
    framed(out, b'T', |out| {
        out.put_u16(u16::try_from(columns.len()).unwrap_or(u16::MAX));
        for (name, oid) in columns {
            put_text(out, name);
            out.put_u32(0);
            out.put_u16(0);
            out.put_u32(*oid);
            out.put_i16(-1);
            out.put_i32(-1);
            out.put_u16(0);
        }
    });
}

/// DataRow; `None` is NULL.
pub fn data_row(out: &mut BytesMut, values: &[Option<&[u8]>]) {
    framed(out, b'D', |out| {
        out.put_u16(u16::try_from(values.len()).unwrap_or(u16::MAX));
        for value in values {
            match value {
                None => out.put_i32(-1),
                Some(value) => {
                    out.put_i32(i32::try_from(value.len()).unwrap_or(i32::MAX));
                    out.put_slice(value);
                }
            }
        }
    });
}

/// CommandComplete.
pub fn command_complete(out: &mut BytesMut, tag: &str) {
    framed(out, b'C', |out| put_text(out, tag));
}

/// CopyBothResponse: text overall, no columns, as a walsender says it.
pub fn copy_both_response(out: &mut BytesMut) {
    framed(out, b'W', |out| {
        out.put_u8(0);
        out.put_u16(0);
    });
}

/// CopyData.
///
/// # Errors
/// More data than one message may hold.
pub fn copy_data(out: &mut BytesMut, data: &[u8]) -> Result<(), EncodeError> {
    crate::frontend::copy_data(out, data)
}

/// The beginning of a CopyData: `head`, and the `more` bytes that the caller sends right behind it.
///
/// # Errors
/// More data than one message may hold.
pub fn copy_data_head(out: &mut BytesMut, head: &[u8], more: usize) -> Result<(), EncodeError> {
    crate::frontend::copy_data_head(out, head, more)
}

/// CopyOutResponse: text overall, no columns, as a base backup begins.
pub fn copy_out_response(out: &mut BytesMut) {
    framed(out, b'H', |out| {
        out.put_u8(0);
        out.put_u16(0);
    });
}

/// CopyDone.
pub fn copy_done(out: &mut BytesMut) {
    framed(out, b'c', |_| {});
}

/// ErrorResponse. `severity` is `ERROR` or `FATAL`.
pub fn error_response(
    out: &mut BytesMut,
    severity: &str,
    sqlstate: &str,
    message: &str,
    hint: Option<&str>,
) {
    framed(out, b'E', |out| {
        let mut field = |kind: u8, text: &str| {
            out.put_u8(kind);
            put_text(out, text);
        };
        field(b'S', severity);
        field(b'V', severity);
        field(b'C', sqlstate);
        field(b'M', message);
        if let Some(hint) = hint {
            field(b'H', hint);
        }
        out.put_u8(0);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{self, Message};
    use crate::frontend;

    #[test]
    fn what_our_client_sends_is_read() {
        let mut buffer = BytesMut::new();
        frontend::ssl_request(&mut buffer);
        let parameters = [("user", "a"), ("replication", "true")];
        frontend::startup(&mut buffer, parameters).unwrap();
        assert_eq!(split_opening(&mut buffer), Ok(Some(Opening::SslRequest)));
        let parameters = parameters.map(|(n, v)| (n.to_owned(), v.to_owned())).to_vec();
        let whole = buffer.clone();
        for len in 0..whole.len() {
            assert_eq!(split_opening(&mut BytesMut::from(&whole[..len])), Ok(None));
        }
        assert_eq!(split_opening(&mut buffer), Ok(Some(Opening::Startup { minor: 0, parameters })));
        frontend::query(&mut buffer, "IDENTIFY_SYSTEM").unwrap();
        frontend::copy_data(&mut buffer, b"r").unwrap();
        frontend::copy_done(&mut buffer);
        frontend::copy_fail(&mut buffer, "why").unwrap();
        frontend::terminate(&mut buffer);
        for expected in [
            FromFrontend::Query("IDENTIFY_SYSTEM".into()),
            FromFrontend::CopyData(Bytes::from_static(b"r")),
            FromFrontend::CopyDone,
            FromFrontend::CopyFail("why".into()),
            FromFrontend::Terminate,
        ] {
            assert_eq!(split_message(&mut buffer), Ok(Some(expected)));
        }
        assert!(buffer.is_empty());
    }

    #[test]
    fn what_our_client_reads_is_written() {
        let mut out = BytesMut::new();
        authentication_ok(&mut out);
        negotiate_protocol_version(&mut out, &["_pq_.x"]);
        parameter_status(&mut out, "server_version", "15.1");
        backend_key_data(&mut out, 1, 2);
        row_description(&mut out, &[("systemid", type_oid::TEXT), ("dbname", type_oid::TEXT)]);
        data_row(&mut out, &[Some(b"7"), None]);
        copy_both_response(&mut out);
        copy_done(&mut out);
        command_complete(&mut out, "START_REPLICATION");
        error_response(&mut out, "ERROR", "58P01", "gone", Some("hint"));
        ready_for_query(&mut out);
        let mut said = Vec::new();
        while let Some(frame) = backend::split_frame(&mut out).unwrap() {
            said.push(backend::decode(frame).unwrap());
        }
        assert_eq!(said.len(), 11);
        let Message::ErrorResponse(error) = &said[9] else { panic!("{:?}", said[9]) };
        assert_eq!((error.code.as_str(), error.message.as_str()), ("58P01", "gone"));
        assert!(matches!(&said[5], Message::DataRow(row) if row.len() == 2));
    }

    #[test]
    fn answers_to_a_request_for_authentication_are_read() {
        let whole = b"p\0\0\0\x0dM\0\0\0\0\x03n,,";
        for len in 0..whole.len() {
            assert_eq!(split_authentication(&mut BytesMut::from(&whole[..len])), Ok(None));
        }
        let body = split_authentication(&mut BytesMut::from(&whole[..])).unwrap().unwrap();
        let (mechanism, first) = sasl_initial_response(body.clone()).unwrap();
        assert_eq!((mechanism.as_str(), &first[..]), ("M", &b"n,,"[..]));
        for len in 0..body.len() {
            assert!(sasl_initial_response(body.slice(..len)).is_err(), "{len}");
        }
        for bytes in [&b"Q\0\0\0\x04"[..], b"p\0\0\x10\x01", b"p\0\0\0\x03"] {
            assert!(split_authentication(&mut BytesMut::from(bytes)).is_err(), "{bytes:?}");
        }
        // No first words at all, which SCRAM does not do.
        assert!(sasl_initial_response(Bytes::from_static(b"M\0\xff\xff\xff\xff")).is_err());
    }

    #[test]
    fn what_is_no_message_is_refused() {
        for bytes in [&b"GET / HTTP/1.1\r\n"[..], b"\0\0\0\x07\0\x03\0\0", b"\0\0\0\x08\0\x02\0\0"]
        {
            assert!(split_opening(&mut BytesMut::from(bytes)).is_err(), "{bytes:?}");
        }
        for bytes in [&b"P\0\0\0\x04"[..], b"Q\0\0\0\x05x", b"Q\x7f\0\0\0", b"X\0\0\0\x05x"] {
            assert!(split_message(&mut BytesMut::from(bytes)).is_err(), "{bytes:?}");
        }
    }
}
