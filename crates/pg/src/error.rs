use crate::config::ConfigError;
use farshore_wire::backend::{DecodeError, ServerError};
use farshore_wire::frontend::EncodeError;
use std::io;
use std::time::Duration;

/// What went wrong with a server or on the way to it. `server` fields name the server as
/// [`Config::redacted`](crate::Config::redacted) does.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The connection parameters make no sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No connection could be made.
    #[error("cannot connect to {server}: {source}")]
    Connect {
        /// Which server.
        server: String,
        /// Why.
        source: io::Error,
    },
    /// An established connection broke.
    #[error("connection to {server} lost: {source}")]
    Io {
        /// Which server.
        server: String,
        /// How.
        source: io::Error,
    },
    /// The server closed the connection.
    #[error("{server} closed the connection")]
    Closed {
        /// Which server.
        server: String,
    },
    /// TLS is impossible, or the certificates do not satisfy `sslmode`.
    #[error("TLS with {server}: {reason}")]
    Tls {
        /// Which server.
        server: String,
        /// Why, and what to do.
        reason: String,
    },
    /// We are not who we claim to be, or the server is not who it should be.
    #[error("authentication with {server} failed: {reason}")]
    Auth {
        /// Which server.
        server: String,
        /// Why, and what to do.
        reason: String,
        /// The server's own words, if it was the server that refused.
        refusal: Option<Box<ServerError>>,
    },
    /// The server reported an error.
    #[error("{0}")]
    Server(Box<ServerError>),
    /// The server sent something that is not PostgreSQL's protocol.
    #[error("protocol violation: {0}")]
    Decode(#[from] DecodeError),
    /// Something was asked for that cannot be put on the wire.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// A message came, or a call was made, where it has no place.
    #[error("protocol violation: {0}")]
    Protocol(String),
    /// The server's version or settings do not allow what was asked for.
    #[error("{server}: {reason}")]
    Unsupported {
        /// Which server.
        server: String,
        /// What is missing, and what to do.
        reason: String,
    },
    /// A value was not what the caller expected it to be.
    #[error("unexpected value from the server: {0}")]
    Value(String),
    /// It took too long.
    #[error("{what} took longer than {after:?}")]
    Timeout {
        /// What did.
        what: String,
        /// The limit.
        after: Duration,
    },
}

impl Error {
    /// The server's words, if it had any.
    pub fn server_error(&self) -> Option<&ServerError> {
        match self {
            Error::Server(error) => Some(error),
            Error::Auth { refusal, .. } => refusal.as_deref(),
            Error::Config(_)
            | Error::Connect { .. }
            | Error::Io { .. }
            | Error::Closed { .. }
            | Error::Tls { .. }
            | Error::Decode(_)
            | Error::Encode(_)
            | Error::Protocol(_)
            | Error::Unsupported { .. }
            | Error::Value(_)
            | Error::Timeout { .. } => None,
        }
    }

    /// SQLSTATE, if a server reported the error.
    pub fn sqlstate(&self) -> Option<&str> {
        self.server_error().map(|error| error.code.as_str())
    }

    /// Whether the same thing may well succeed on another try, after a pause and on a new
    /// connection. Everything else needs somebody to change something first.
    pub fn is_transient(&self) -> bool {
        match self {
            Error::Io { .. } | Error::Closed { .. } | Error::Timeout { .. } => true,
            // A server that is starting has no socket yet; a directory we may not enter stays so.
            Error::Connect { source, .. } => !matches!(
                source.kind(),
                io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidInput
            ),
            Error::Server(error) => is_transient_refusal(error),
            // Of a pooler's refusals only those that stay are told so.
            Error::Auth { refusal, .. } => {
                refusal.as_ref().is_some_and(|error| is_transient_sqlstate(&error.code))
            }
            Error::Config(_)
            | Error::Tls { .. }
            | Error::Decode(_)
            | Error::Encode(_)
            | Error::Protocol(_)
            | Error::Unsupported { .. }
            | Error::Value(_) => false,
        }
    }
}

fn is_transient_refusal(error: &ServerError) -> bool {
    // A FATAL one of this code is a database that takes no connections for the time being; the
    // others are settings and slots that somebody has to mend.
    is_transient_sqlstate(&error.code)
        || (error.code == "55000" && error.severity == "FATAL")
        || is_lost_by_pooler(error)
}

/// Whether a pooler has lost the server behind it, or cannot have it for the time being. PgBouncer
/// ends a session for whatever reason as a violation of the protocol ("server conn crashed?",
/// "query_wait_timeout"); what it does not let us ask for stays so.
pub fn is_lost_by_pooler(error: &ServerError) -> bool {
    error.code == "08P01" && error.is_fatal() && !error.message.contains("startup parameter")
}

/// What a pooler that cannot let a client in for the time being names as the cause: PgBouncer tells it
/// by words only, and in the same way it tells what somebody has to mend ("no such user", "bouncer
/// config error").
const POOLER_PASSES: [&str; 16] = [
    "timeout",
    "no more connections",
    "connections exceeded",
    "too many",
    "connection slots",
    "login has been failing",
    "cannot connect",
    "connect failed",
    "conn crashed",
    "DNS lookup failed",
    "shutting down",
    "the database system is",
    "evicted",
    "resources exhaustion",
    "out of memory",
    "no memory",
];

/// Whether a pooler that has not let us in does so for a reason that stays until somebody mends it.
pub(crate) fn is_kept_out_by_pooler(error: &ServerError) -> bool {
    is_lost_by_pooler(error) && !POOLER_PASSES.iter().any(|cause| error.message.contains(cause))
}

/// PostgreSQL docs: appendix A, "PostgreSQL Error Codes".
fn is_transient_sqlstate(code: &str) -> bool {
    match code {
        // protocol_violation: the same bytes would violate it again.
        "08P01" => false,
        // program_limit-like members of class 53 that stay until somebody sets a setting are
        // still worth waiting for: disk_full, out_of_memory, too_many_connections.
        _ if code.starts_with("08") || code.starts_with("53") => true,
        // serialization_failure, deadlock_detected, statement_completion_unknown
        "40001" | "40P01" | "40003" => true,
        // object_in_use (a slot is active), lock_not_available
        "55006" | "55P03" => true,
        // query_canceled: by a person, or by a time limit that another statement may keep.
        "57014" => true,
        // admin_shutdown, crash_shutdown, cannot_connect_now, idle_session_timeout
        "57P01" | "57P02" | "57P03" | "57P05" => true,
        // idle_in_transaction_session_timeout
        "25P03" => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_classified() {
        let server = |code: &str| {
            Error::Server(Box::new(ServerError { code: code.into(), ..ServerError::default() }))
        };
        for code in
            ["08006", "40001", "40P01", "53300", "55006", "57014", "57P01", "57P02", "57P03"]
        {
            assert!(server(code).is_transient(), "{code}");
            assert_eq!(server(code).sqlstate(), Some(code));
        }
        for code in ["08P01", "25006", "23505", "28P01", "3D000", "42P01", "XX000", ""] {
            assert!(!server(code).is_transient(), "{code}");
        }
        for (severity, transient) in [("FATAL", true), ("ERROR", false)] {
            let error = ServerError {
                code: "55000".into(),
                severity: severity.into(),
                ..ServerError::default()
            };
            assert_eq!(Error::Server(Box::new(error)).is_transient(), transient, "{severity}");
        }
        let pooler = |severity: &str, message: &str| {
            Error::Server(Box::new(ServerError {
                code: "08P01".into(),
                severity: severity.into(),
                message: message.into(),
                ..ServerError::default()
            }))
        };
        for said in ["server conn crashed?", "query_wait_timeout", "client_login_timeout"] {
            assert!(pooler("FATAL", said).is_transient(), "{said}");
        }
        assert!(!pooler("FATAL", "unsupported startup parameter: options").is_transient());
        let kept_out = |message: &str| match pooler("FATAL", message) {
            Error::Server(error) => is_kept_out_by_pooler(&error),
            _ => unreachable!(),
        };
        for said in [
            "bouncer config error",
            "no such user: app",
            "login rejected",
            "certificate authentication failed",
            "unix socket login rejected",
            "SSL required",
            "server login failed: FATAL password authentication failed for user \"app\"",
        ] {
            assert!(kept_out(said), "{said}");
        }
        for said in [
            "query_wait_timeout",
            "client_login_timeout (server down)",
            "no more connections allowed (max_client_conn)",
            "client connections exceeded (max_db_client_connections)",
            "server login has been failing, try again later (server_login_retry)",
            "server login failed: FATAL the database system is starting up",
            "server login failed: FATAL sorry, too many clients already",
            "server conn crashed?",
            "pgbouncer is shutting down",
        ] {
            assert!(!kept_out(said), "{said}");
        }
        // That one is told with another next step.
        assert!(!kept_out("unsupported startup parameter: options"));
        assert!(!pooler("ERROR", "invalid message format").is_transient());
        let refused = io::Error::from(io::ErrorKind::ConnectionRefused);
        assert!(Error::Connect { server: "a".into(), source: refused }.is_transient());
        assert!(Error::Closed { server: "a".into() }.is_transient());
        assert!(!Error::Tls { server: "a".into(), reason: "b".into() }.is_transient());
    }
}
