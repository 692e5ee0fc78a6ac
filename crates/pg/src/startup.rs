//! From a [`Config`] to a session: hosts, sockets, TLS, authentication, in that order.

use crate::Error;
use crate::authentication::{Credentials, Refusal, authenticate, refused};
use crate::config::{Config, Host, SslMode, TargetSession};
use crate::connection::{Connection, Mode, Session};
use crate::gather::SEGMENT_BYTES_MAX;
use crate::socket::{Endpoint, Socket, UnixSocket, connect_tcp};
use crate::tls;
use crate::transport::Transport;
use bytes::BytesMut;
use farshore_wire::backend::Message;
use farshore_wire::frontend;
use std::collections::HashMap;
use std::io;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// What to do about TLS in one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encryption {
    Off,
    IfOffered,
    Required,
}

/// A byte stream that is ready for the first message.
pub(crate) struct Opened {
    pub(crate) socket: Socket,
    encrypted: bool,
    end_point: Option<Vec<u8>>,
}

/// Tries every address of every host until one gives a session.
pub(crate) async fn connect(config: &Config, mode: Mode) -> Result<Connection, Error> {
    let mut last = None;
    for host in &config.hosts {
        let server = config.redacted_host(host);
        let resolved = within(config, &server, async {
            Endpoint::resolve(host)
                .await
                .map_err(|source| Error::Connect { server: server.clone(), source })
        });
        let endpoints = match resolved.await {
            Ok(endpoints) => endpoints,
            Err(error) => {
                last = Some(error);
                continue;
            }
        };
        for endpoint in endpoints {
            match within(config, &server, connect_endpoint(config, host, &endpoint, mode)).await {
                Ok(connection) => return Ok(connection),
                Err(error) => {
                    tracing::debug!(%server, ?endpoint, %error, "no session");
                    last = Some(error);
                }
            }
        }
    }
    Err(last.unwrap_or_else(|| Error::Protocol("no host to connect to".into())))
}

async fn within<T>(
    config: &Config,
    server: &str,
    work: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let after = config.connect_timeout;
    tokio::time::timeout(after, work)
        .await
        .unwrap_or_else(|_| Err(Error::Timeout { what: format!("connecting to {server}"), after }))
}

async fn connect_endpoint(
    config: &Config,
    host: &Host,
    endpoint: &Endpoint,
    mode: Mode,
) -> Result<Connection, Error> {
    let attempts: &[Encryption] = match (endpoint, config.sslmode) {
        (Endpoint::Unix(_), _) | (_, SslMode::Disable) => &[Encryption::Off],
        (_, SslMode::Allow) => &[Encryption::Off, Encryption::Required],
        (_, SslMode::Prefer) => &[Encryption::IfOffered, Encryption::Off],
        (_, SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull) => &[Encryption::Required],
    };
    let mut attempts = attempts.iter().peekable();
    while let Some(encryption) = attempts.next() {
        match start_session(config, host, endpoint, mode, *encryption).await {
            Ok(connection) => {
                check_target_session(&connection, config.target_session)?;
                return Ok(connection);
            }
            Err(Refusal { error, unasked: true }) if attempts.peek().is_some() => {
                tracing::debug!(%error, ?encryption, "trying the other kind of encryption");
            }
            Err(Refusal { error, .. }) => return Err(error),
        }
    }
    Err(Error::Protocol("no way to connect was left".into()))
}

/// Opens a byte stream, with an MSS up to `segment_max` bytes, and agrees on TLS with the server.
pub(crate) async fn open(
    config: &Config,
    host: &Host,
    endpoint: &Endpoint,
    encryption: Encryption,
    segment_max: Option<u32>,
) -> Result<Opened, Refusal> {
    let server = config.redacted_host(host);
    let unreachable =
        |source: io::Error| Refusal::from(Error::Connect { server: server.clone(), source });
    let address = match endpoint {
        Endpoint::Unix(path) => {
            let socket = UnixSocket::connect(path).await.map_err(|error| {
                let text = format!("{}: {error}; is the server running there?", path.display());
                unreachable(io::Error::new(error.kind(), text))
            })?;
            return Ok(Opened { socket: Socket::Unix(socket), encrypted: false, end_point: None });
        }
        Endpoint::Tcp(address) => *address,
    };
    let mut tcp = connect_tcp(address, config.keepalive, segment_max).await.map_err(|error| {
        unreachable(io::Error::new(error.kind(), format!("{address}: {error}")))
    })?;
    if encryption == Encryption::Off || !offers_tls(&mut tcp).await.map_err(unreachable)? {
        if encryption == Encryption::Required {
            let reason = format!(
                "the server does not offer TLS, and sslmode demands it; switch ssl on there, or \
                 connect with sslmode={}",
                if config.sslmode == SslMode::Allow { "disable" } else { "prefer" }
            );
            return Err(Error::Tls { server, reason }.into());
        }
        return Ok(Opened { socket: Socket::Tcp(tcp), encrypted: false, end_point: None });
    }
    match tls::handshake(config, host, &server, tcp).await {
        Ok(tls::Established { stream, end_point }) => {
            Ok(Opened { socket: Socket::Tls(Box::new(stream)), encrypted: true, end_point })
        }
        Err(error) => Err(Refusal { error, unasked: true }),
    }
}

/// Exactly one byte is read: what follows belongs to TLS, and bytes that somebody in between slips
/// in before the handshake make it fail.
async fn offers_tls(tcp: &mut TcpStream) -> io::Result<bool> {
    let mut request = BytesMut::new();
    frontend::ssl_request(&mut request);
    tcp.write_all(&request).await?;
    match tcp.read_u8().await? {
        b'S' => Ok(true),
        b'N' => Ok(false),
        // Its text is from before the peer is known, so it is not to be shown.
        b'E' => Err(io::Error::other("the server refused to negotiate TLS")),
        other => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("answered a TLS request with byte 0x{other:02x}; is this a PostgreSQL server?"),
        )),
    }
}

async fn start_session(
    config: &Config,
    host: &Host,
    endpoint: &Endpoint,
    mode: Mode,
    encryption: Encryption,
) -> Result<Connection, Refusal> {
    // Changes come by logical replication, each in a message of its own.
    let segment_max = (mode == Mode::LogicalReplication).then_some(SEGMENT_BYTES_MAX);
    let opened = open(config, host, endpoint, encryption, segment_max).await?;
    let Opened { socket, encrypted, end_point } = opened;
    let server = config.redacted_host(host);
    let mut transport = Transport::new(server.clone(), socket);

    let mut parameters = vec![
        ("user", config.user.as_str()),
        ("database", config.dbname.as_str()),
        ("application_name", config.application_name.as_str()),
        ("client_encoding", "UTF8"),
        ("DateStyle", "ISO"),
        ("IntervalStyle", "postgres"),
        ("extra_float_digits", "3"),
    ];
    match mode {
        Mode::Sql => {}
        // Values that come as text must not depend on the role's or the database's settings: names
        // within them are qualified, and money is as in the C locale.
        Mode::LogicalReplication => parameters.extend([
            ("replication", "database"),
            ("search_path", ""),
            ("lc_monetary", "C"),
        ]),
        Mode::PhysicalReplication => parameters.push(("replication", "true")),
    }
    if let Some(options) = &config.options {
        parameters.push(("options", options));
    }
    frontend::startup(&mut transport.output, parameters)?;
    transport.flush().await?;

    let databases: &[&str] = match mode {
        Mode::Sql | Mode::LogicalReplication => &[&config.dbname],
        Mode::PhysicalReplication => &["replication", &config.dbname],
    };
    let (password, password_note) = config.password_for(host, databases);
    let credentials = Credentials { config, password, password_note, encrypted, end_point };
    authenticate(&mut transport, &credentials).await?;

    let mut settings = HashMap::new();
    let mut key = (0, bytes::Bytes::new());
    loop {
        match transport.receive().await? {
            Message::ParameterStatus { name, value } => {
                settings.insert(name, value);
            }
            Message::BackendKeyData { process_id, secret_key } => {
                // Copied, so that 4 bytes do not keep a whole read buffer alive.
                key = (process_id, bytes::Bytes::copy_from_slice(&secret_key));
            }
            Message::NegotiateProtocolVersion { .. } => {}
            Message::NoticeResponse(notice) => tracing::debug!(%server, %notice, "notice"),
            Message::ErrorResponse(error) => {
                return Err(refused(&server, error, &credentials).into());
            }
            Message::ReadyForQuery(_) => break,
            other => return Err(Error::Protocol(format!("{other:?} during startup")).into()),
        }
    }
    let session = Session {
        config: config.clone(),
        host: host.clone(),
        endpoint: endpoint.clone(),
        encrypted,
        process_id: key.0,
        secret_key: key.1,
    };
    Ok(Connection::new(transport, session, settings)?)
}

fn check_target_session(connection: &Connection, wanted: TargetSession) -> Result<(), Error> {
    let on = |name: &str| connection.parameter(name) == Some("on");
    let (standby, read_only) = (on("in_hot_standby"), on("default_transaction_read_only"));
    let suits = match wanted {
        TargetSession::Any => true,
        TargetSession::ReadWrite => !standby && !read_only,
        TargetSession::ReadOnly => standby || read_only,
        TargetSession::Primary => !standby,
        TargetSession::Standby => standby,
    };
    if suits {
        return Ok(());
    }
    // Worth another try: roles change when a cluster fails over.
    let text = format!(
        "the server is {}, and target_session_attrs asks for {wanted:?}",
        match (standby, read_only) {
            (true, _) => "a standby",
            (false, true) => "read-only by default",
            (false, false) => "a writable primary",
        }
    );
    let server = connection.server().to_owned();
    Err(Error::Connect { server, source: io::Error::other(text) })
}
