//! An asynchronous PostgreSQL client for replication: TLS, SCRAM, COPY, pipelining, and the
//! streaming replication protocol, logical and physical.
//!
//! A [`Connection`] owns its socket and is driven by whoever awaits on it: there is no background
//! task, so memory, back-pressure and cancellation are the caller's to see. The bytes are encoded
//! and decoded by `farshore_wire`; this crate moves them.
//!
//! - one question, one answer: [`Connection::simple_query`], [`Connection::query`],
//!   [`Connection::execute`];
//! - bulk: [`Connection::copy_out`], [`Connection::copy_in`];
//! - pipelines: [`Connection::out`], [`Connection::flush`], [`Connection::receive`];
//! - the log: [`replication`].

mod authentication;
mod cancel;
mod catalog;
pub mod config;
mod connection;
mod copy;
mod error;
mod gather;
mod query;
mod quote;
mod read_buffer;
pub mod replication;
mod short_timer;
mod socket;
mod startup;
mod tls;
mod transport;

pub use cancel::{Abandoned, CancelToken};
pub use catalog::partition_tree;
pub use config::{Config, ConfigError, Keepalive};
pub use connection::{Connection, Mode};
pub use copy::{CopyIn, CopyOut};
pub use error::{Error, is_lost_by_pooler};
pub use farshore_model::quote_identifier;
pub use farshore_wire::backend::{ServerError, TransactionStatus};
pub use query::{Question, ResultSet, Row};
pub use quote::{quote_literal, text_array};
pub use socket::{FAR, wake_at};
pub use tls::end_point_hash;

/// What [`no_timeouts`] does, in one statement: walsenders of 14.0 and 14.1 take no more at once.
/// But for `tcp_user_timeout`: who sends us rows waits until we take them, for as long as we may
/// have no place to put them, and the kernel would end that, too.
/// `None` before version 14, which is not supported, and is told so elsewhere.
pub fn no_timeouts_at_once(server_version: u32) -> Option<&'static str> {
    match server_version {
        ..140_000 => None,
        140_000..170_000 => Some(
            "SELECT pg_catalog.set_config(name, value, false) FROM (VALUES \
             ('statement_timeout', '0'), ('lock_timeout', '0'), \
             ('idle_in_transaction_session_timeout', '0'), ('idle_session_timeout', '0'), \
             ('tcp_keepalives_idle', '30'), ('tcp_keepalives_interval', '10'), \
             ('tcp_keepalives_count', '6')) AS setting (name, value)",
        ),
        _ => Some(
            "SELECT pg_catalog.set_config(name, value, false) FROM (VALUES \
             ('statement_timeout', '0'), ('lock_timeout', '0'), \
             ('idle_in_transaction_session_timeout', '0'), ('idle_session_timeout', '0'), \
             ('transaction_timeout', '0'), \
             ('tcp_keepalives_idle', '30'), ('tcp_keepalives_interval', '10'), \
             ('tcp_keepalives_count', '6')) AS setting (name, value)",
        ),
    }
}

/// SQL that lifts the role's and the server's time limits for a session that waits by design, and has
/// the server notice, as soon as we would ([`Keepalive`]), that the machine at our end is gone: with
/// the kernel's own two hours a session keeps its locks for as long, and who comes after it waits. By
/// a Unix socket that does nothing.
pub fn no_timeouts(server_version: u32) -> String {
    let mut sql = "SET statement_timeout = 0; SET lock_timeout = 0; \
                   SET idle_in_transaction_session_timeout = 0; SET idle_session_timeout = 0; \
                   SET tcp_keepalives_idle = 30; SET tcp_keepalives_interval = 10; \
                   SET tcp_keepalives_count = 6; SET tcp_user_timeout = '90s'"
        .to_owned();
    if server_version >= 170_000 {
        sql.push_str("; SET transaction_timeout = 0");
    }
    sql
}
