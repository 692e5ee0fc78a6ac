//! Proving who we are, and for SCRAM, having the server prove that it knows the password too.

use crate::Error;
use crate::config::{ChannelBinding, Config, Password};
use crate::error::is_kept_out_by_pooler;
use crate::transport::Transport;
use farshore_wire::backend::{Authentication, Message, ServerError};
use farshore_wire::frontend;
use postgres_protocol::authentication::md5_hash;
use postgres_protocol::authentication::sasl::{self, ScramSha256};

/// What authentication needs to know about the connection.
pub(crate) struct Credentials<'a> {
    pub(crate) config: &'a Config,
    pub(crate) password: Option<Password>,
    /// Why there is no password, if the password file could have had one.
    pub(crate) password_note: Option<String>,
    /// TLS is in use.
    pub(crate) encrypted: bool,
    /// The hash for channel binding, if TLS is in use and defines one.
    pub(crate) end_point: Option<Vec<u8>>,
}

/// Why the session did not start.
pub(crate) struct Refusal {
    pub(crate) error: Error,
    /// The server turned us away before it asked for anything: another kind of encryption may
    /// suit its `pg_hba.conf`.
    pub(crate) unasked: bool,
}

impl<E: Into<Error>> From<E> for Refusal {
    fn from(error: E) -> Refusal {
        Refusal { error: error.into(), unasked: false }
    }
}

/// How far a SCRAM exchange has come.
enum Scram {
    Challenge(Box<ScramSha256>),
    Proof(Box<ScramSha256>),
    Proven { bound: bool },
}

/// Answers the server until it says that we are who we claim to be.
pub(crate) async fn authenticate(
    transport: &mut Transport,
    credentials: &Credentials<'_>,
) -> Result<(), Refusal> {
    let server = transport.server.clone();
    let failed = |reason: String| Error::Auth { server: server.clone(), reason, refusal: None };
    let bind_required = credentials.config.channel_binding == ChannelBinding::Require;
    let mut unasked = true;
    let mut bound = false;
    let mut scram: Option<Scram> = None;
    loop {
        let request = match transport.receive().await? {
            Message::Authentication(request) => request,
            Message::ErrorResponse(error) => {
                return Err(Refusal { error: refused(&server, error, credentials), unasked });
            }
            Message::NoticeResponse(notice) => {
                tracing::debug!(%server, %notice, "notice");
                continue;
            }
            Message::NegotiateProtocolVersion { .. } => continue,
            other => {
                return Err(Error::Protocol(format!("{other:?} during authentication")).into());
            }
        };
        unasked = false;
        match request {
            Authentication::Ok => {
                return match scram {
                    Some(Scram::Challenge(_) | Scram::Proof(_)) => {
                        Err(failed("the server ended SCRAM without proving itself".into()).into())
                    }
                    None if bind_required => Err(failed(
                        "channel_binding=require, but the server asked for no SCRAM".into(),
                    )
                    .into()),
                    Some(Scram::Proven { bound: false }) if bind_required => {
                        Err(failed("channel_binding=require was not met".into()).into())
                    }
                    None | Some(Scram::Proven { .. }) => Ok(()),
                };
            }
            Authentication::CleartextPassword | Authentication::Md5Password { .. }
                if bind_required =>
            {
                let reason = "channel_binding=require, but the server asked for a password";
                return Err(failed(reason.into()).into());
            }
            Authentication::CleartextPassword => {
                let password = password(credentials, &failed)?;
                frontend::password(&mut transport.output, password.expose().as_bytes())?;
            }
            Authentication::Md5Password { salt } => {
                let password = password(credentials, &failed)?;
                let user = credentials.config.user.as_bytes();
                let answer = md5_hash(user, password.expose().as_bytes(), salt);
                frontend::password(&mut transport.output, answer.as_bytes())?;
            }
            Authentication::Sasl { mechanisms } => {
                let password = password(credentials, &failed)?;
                let choice = choose(&mechanisms, credentials).map_err(&failed)?;
                bound = choice.mechanism == sasl::SCRAM_SHA_256_PLUS;
                let exchange = ScramSha256::new(password.expose().as_bytes(), choice.binding);
                let out = &mut transport.output;
                frontend::sasl_initial(out, choice.mechanism, exchange.message())?;
                scram = Some(Scram::Challenge(Box::new(exchange)));
            }
            Authentication::SaslContinue { data } => {
                let Some(Scram::Challenge(mut exchange)) = scram.take() else {
                    return Err(Error::Protocol("unexpected SASL challenge".into()).into());
                };
                exchange.update(&data).map_err(|e| failed(format!("SCRAM: {e}")))?;
                frontend::sasl_response(&mut transport.output, exchange.message())?;
                scram = Some(Scram::Proof(exchange));
            }
            Authentication::SaslFinal { data } => {
                let Some(Scram::Proof(mut exchange)) = scram.take() else {
                    return Err(Error::Protocol("unexpected SASL outcome".into()).into());
                };
                exchange.finish(&data).map_err(|e| {
                    failed(format!("the server does not know the password either (SCRAM: {e})"))
                })?;
                scram = Some(Scram::Proven { bound });
            }
            unsupported @ (Authentication::KerberosV5
            | Authentication::Gss
            | Authentication::GssContinue { .. }
            | Authentication::Sspi) => {
                return Err(failed(format!(
                    "the server asks for {unsupported:?}, which Farshore does not support; \
                     use scram-sha-256 in pg_hba.conf"
                ))
                .into());
            }
        }
        transport.flush().await?;
    }
}

fn password<'a>(
    credentials: &'a Credentials<'_>,
    failed: &impl Fn(String) -> Error,
) -> Result<&'a Password, Error> {
    credentials.password.as_ref().ok_or_else(|| {
        let note = credentials.password_note.as_ref();
        failed(format!(
            "the server asks for a password and there is none; set PGPASSWORD, or add a line to \
             ~/.pgpass{}",
            note.map_or(String::new(), |note| format!(" ({note})"))
        ))
    })
}

struct Choice {
    mechanism: &'static str,
    binding: sasl::ChannelBinding,
}

/// RFC 5802, section 6: saying "I could bind, you did not offer it" unmasks whoever removed the
/// offer from the server's list.
fn choose(mechanisms: &[String], credentials: &Credentials<'_>) -> Result<Choice, String> {
    let offers = |name: &str| mechanisms.iter().any(|mechanism| mechanism == name);
    let wanted = credentials.config.channel_binding;
    let end_point = credentials.end_point.as_ref().filter(|_| wanted != ChannelBinding::Disable);
    if offers(sasl::SCRAM_SHA_256_PLUS)
        && let Some(hash) = end_point
    {
        let binding = sasl::ChannelBinding::tls_server_end_point(hash.clone());
        return Ok(Choice { mechanism: sasl::SCRAM_SHA_256_PLUS, binding });
    }
    if wanted == ChannelBinding::Require {
        return Err(if credentials.encrypted {
            "channel_binding=require, but the server does not offer SCRAM-SHA-256-PLUS, or its \
             certificate has a signature without a hash to bind to"
                .into()
        } else {
            "channel_binding=require needs TLS; set sslmode=verify-full".into()
        });
    }
    if !offers(sasl::SCRAM_SHA_256) {
        return Err(format!("the server offers only {}", mechanisms.join(", ")));
    }
    let binding = match end_point {
        Some(_) => sasl::ChannelBinding::unrequested(),
        None => sasl::ChannelBinding::unsupported(),
    };
    Ok(Choice { mechanism: sasl::SCRAM_SHA_256, binding })
}

/// Class 28, invalid authorization, is about who we are, and so is what a pooler keeps us out for;
/// the rest is about the server.
pub(crate) fn refused(
    server: &str,
    error: Box<ServerError>,
    credentials: &Credentials<'_>,
) -> Error {
    if !error.code.starts_with("28") && !is_kept_out_by_pooler(&error) {
        return Error::Server(error);
    }
    let hint = match error.code.as_str() {
        "28P01" => "; check the password in PGPASSWORD, ~/.pgpass or the service file",
        _ if error.message.contains("pg_hba.conf") => {
            "; let this host, user and database in by a line in the server's pg_hba.conf"
        }
        _ => "",
    };
    let note = credentials.password_note.as_ref();
    let note = note.map_or(String::new(), |note| format!(" ({note})"));
    let reason = format!("{error}{hint}{note}");
    Error::Auth { server: server.to_owned(), reason, refusal: Some(error) }
}
