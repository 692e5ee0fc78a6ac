use super::{DataRow, DecodeError, Field, Format, Frame, Reader, ServerError};
use bytes::Bytes;

/// A message from a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// `R`: how the client must prove who it is, or that it has.
    Authentication(Authentication),
    /// `K`: what a CancelRequest for this session must carry.
    BackendKeyData {
        /// The server process's id.
        process_id: i32,
        /// 4 bytes in protocol 3.0, 4 to 256 in 3.2.
        secret_key: Bytes,
    },
    /// `2`
    BindComplete,
    /// `3`
    CloseComplete,
    /// `C`: a statement is done.
    CommandComplete(CommandTag),
    /// `d`: a piece of COPY data, or of the replication stream.
    CopyData(Bytes),
    /// `c`
    CopyDone,
    /// `G`: the server waits for COPY data.
    CopyInResponse(CopyFormat),
    /// `H`: COPY data follows.
    CopyOutResponse(CopyFormat),
    /// `W`: both at once, in replication.
    CopyBothResponse(CopyFormat),
    /// `D`
    DataRow(DataRow),
    /// `I`: the statement was empty.
    EmptyQueryResponse,
    /// `E`
    ErrorResponse(Box<ServerError>),
    /// `V`
    FunctionCallResponse {
        /// The function's result; `None` is NULL.
        value: Option<Bytes>,
    },
    /// `v`: the server speaks an older minor protocol version, or does not know some options.
    NegotiateProtocolVersion {
        /// The newest version that the server speaks.
        version: i32,
        /// Protocol options that the server did not recognise.
        unrecognized: Vec<String>,
    },
    /// `n`: the statement returns no rows.
    NoData,
    /// `N`
    NoticeResponse(Box<ServerError>),
    /// `A`: somebody said NOTIFY.
    NotificationResponse {
        /// Who.
        process_id: i32,
        /// On which channel.
        channel: String,
        /// What.
        payload: String,
    },
    /// `t`: the types of a statement's parameters.
    ParameterDescription(Vec<u32>),
    /// `S`: a setting's value, at the start and whenever it changes.
    ParameterStatus {
        /// The setting.
        name: String,
        /// Its value.
        value: String,
    },
    /// `1`
    ParseComplete,
    /// `s`: Execute's row limit was reached.
    PortalSuspended,
    /// `Z`: the server waits for a query.
    ReadyForQuery(TransactionStatus),
    /// `T`
    RowDescription(Vec<Field>),
}

/// An authentication request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Authentication {
    /// Done.
    Ok,
    /// Kerberos V5, which no supported server asks for.
    KerberosV5,
    /// The password in clear.
    CleartextPassword,
    /// The password, hashed with the user name and this salt.
    Md5Password {
        /// The salt.
        salt: [u8; 4],
    },
    /// GSSAPI.
    Gss,
    /// More GSSAPI or SSPI data.
    GssContinue {
        /// The data.
        data: Bytes,
    },
    /// SSPI.
    Sspi,
    /// One of these SASL mechanisms.
    Sasl {
        /// Their names, the server's favourite first.
        mechanisms: Vec<String>,
    },
    /// A SASL challenge.
    SaslContinue {
        /// The challenge.
        data: Bytes,
    },
    /// The outcome of SASL.
    SaslFinal {
        /// The server's proof.
        data: Bytes,
    },
}

/// Whether a transaction is open, as ReadyForQuery tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TransactionStatus {
    /// None is.
    Idle,
    /// One is.
    InTransaction,
    /// One is, and has failed: only ROLLBACK helps.
    Failed,
}

/// What a COPY looks like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyFormat {
    /// Lines of text, or PostgreSQL's binary COPY format.
    pub overall: Format,
    /// Per column.
    pub columns: Vec<Format>,
}

/// What CommandComplete says, as `INSERT 0 5`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CommandTag(Bytes);

impl CommandTag {
    /// The tag as text.
    pub fn as_str(&self) -> &str {
        // Checked when it was decoded.
        std::str::from_utf8(&self.0).unwrap_or_default()
    }

    /// How many rows the command touched, if it is one that counts.
    pub fn rows(&self) -> Option<u64> {
        self.as_str().rsplit_once(' ')?.1.parse().ok()
    }
}

/// Decodes one frame. Row and COPY data stay slices of it.
///
/// # Errors
/// A [`DecodeError`] for whatever is not a documented message, whole and with nothing behind it.
pub fn decode(frame: Frame) -> Result<Message, DecodeError> {
    let Frame { tag, body } = frame;
    let named = |message| Reader { message, body: body.clone() };
    let (message, reader) = match tag {
        // First what is many.
        b'd' => return Ok(Message::CopyData(body)),
        b'D' => {
            let mut r = named("DataRow");
            (Message::DataRow(DataRow::read(&mut r)?), r)
        }
        b'C' => {
            let mut r = named("CommandComplete");
            let tag = r.c_bytes("command tag")?;
            if std::str::from_utf8(&tag).is_err() {
                return Err(DecodeError::NotUtf8 { message: r.message, field: "command tag" });
            }
            (Message::CommandComplete(CommandTag(tag)), r)
        }
        b'1' => (Message::ParseComplete, named("ParseComplete")),
        b'2' => (Message::BindComplete, named("BindComplete")),
        b'3' => (Message::CloseComplete, named("CloseComplete")),
        b'A' => {
            let mut r = named("NotificationResponse");
            let process_id = r.i32("process id")?;
            let channel = r.lossy_string("channel")?;
            let payload = r.lossy_string("payload")?;
            (Message::NotificationResponse { process_id, channel, payload }, r)
        }
        b'c' => (Message::CopyDone, named("CopyDone")),
        b'E' => {
            let mut r = named("ErrorResponse");
            (Message::ErrorResponse(Box::new(ServerError::read(&mut r)?)), r)
        }
        b'G' => {
            let mut r = named("CopyInResponse");
            (Message::CopyInResponse(copy_format(&mut r)?), r)
        }
        b'H' => {
            let mut r = named("CopyOutResponse");
            (Message::CopyOutResponse(copy_format(&mut r)?), r)
        }
        b'I' => (Message::EmptyQueryResponse, named("EmptyQueryResponse")),
        b'K' => {
            let mut r = named("BackendKeyData");
            let process_id = r.i32("process id")?;
            let secret_key = r.rest();
            if !(4..=256).contains(&secret_key.len()) {
                return Err(r.invalid("secret key's length", secret_key.len() as i64));
            }
            (Message::BackendKeyData { process_id, secret_key }, r)
        }
        b'n' => (Message::NoData, named("NoData")),
        b'N' => {
            let mut r = named("NoticeResponse");
            (Message::NoticeResponse(Box::new(ServerError::read(&mut r)?)), r)
        }
        b'R' => {
            let mut r = named("Authentication");
            (Message::Authentication(authentication(&mut r)?), r)
        }
        b'S' => {
            let mut r = named("ParameterStatus");
            let name = r.lossy_string("name")?;
            let value = r.lossy_string("value")?;
            (Message::ParameterStatus { name, value }, r)
        }
        b's' => (Message::PortalSuspended, named("PortalSuspended")),
        b'T' => {
            let mut r = named("RowDescription");
            (Message::RowDescription(Field::read_all(&mut r)?), r)
        }
        b't' => {
            let mut r = named("ParameterDescription");
            // A 16-bit count that may use the sign bit: 65,535 parameters are allowed.
            let count = r.i16("parameter count")? as u16;
            let count = r.count(count.into(), 4, "parameter count")?;
            let types = (0..count).map(|_| r.u32("type OID")).collect::<Result<_, _>>()?;
            (Message::ParameterDescription(types), r)
        }
        b'v' => {
            let mut r = named("NegotiateProtocolVersion");
            let version = r.i32("version")?;
            let count = r.i32("option count")?;
            let count = r.count(count.into(), 1, "option count")?;
            let unrecognized =
                (0..count).map(|_| r.lossy_string("option")).collect::<Result<_, _>>()?;
            (Message::NegotiateProtocolVersion { version, unrecognized }, r)
        }
        b'V' => {
            let mut r = named("FunctionCallResponse");
            let value = match r.i32("value length")? {
                -1 => None,
                length => {
                    let length = r.count(length.into(), 1, "value length")?;
                    Some(r.body.split_to(length))
                }
            };
            (Message::FunctionCallResponse { value }, r)
        }
        b'W' => {
            let mut r = named("CopyBothResponse");
            (Message::CopyBothResponse(copy_format(&mut r)?), r)
        }
        b'Z' => {
            let mut r = named("ReadyForQuery");
            let status = match r.u8("transaction status")? {
                b'I' => TransactionStatus::Idle,
                b'T' => TransactionStatus::InTransaction,
                b'E' => TransactionStatus::Failed,
                other => return Err(r.invalid("transaction status", other.into())),
            };
            (Message::ReadyForQuery(status), r)
        }
        tag => return Err(DecodeError::UnknownTag { tag }),
    };
    reader.end()?;
    Ok(message)
}

fn copy_format(r: &mut Reader) -> Result<CopyFormat, DecodeError> {
    let overall = match r.u8("overall format")? {
        0 => Format::Text,
        1 => Format::Binary,
        other => return Err(r.invalid("overall format", other.into())),
    };
    let count = r.i16("column count")?;
    let count = r.count(count.into(), 2, "column count")?;
    let columns = (0..count).map(|_| r.format("column format")).collect::<Result<_, _>>()?;
    Ok(CopyFormat { overall, columns })
}

fn authentication(r: &mut Reader) -> Result<Authentication, DecodeError> {
    Ok(match r.i32("request")? {
        0 => Authentication::Ok,
        2 => Authentication::KerberosV5,
        3 => Authentication::CleartextPassword,
        5 => Authentication::Md5Password { salt: r.u32("salt")?.to_be_bytes() },
        7 => Authentication::Gss,
        8 => Authentication::GssContinue { data: r.rest() },
        9 => Authentication::Sspi,
        10 => {
            let mut mechanisms = Vec::new();
            loop {
                let mechanism = r.string("mechanism")?;
                if mechanism.is_empty() {
                    break Authentication::Sasl { mechanisms };
                }
                mechanisms.push(mechanism);
            }
        }
        11 => Authentication::SaslContinue { data: r.rest() },
        12 => Authentication::SaslFinal { data: r.rest() },
        code => return Err(DecodeError::UnknownAuthentication { code }),
    })
}
