use crate::config::{Config, Host};
use crate::socket::Endpoint;
use crate::transport::Transport;
use crate::{CancelToken, Error, startup};
use bytes::{Bytes, BytesMut};
use farshore_wire::backend::{Message, ServerError, TransactionStatus};
use farshore_wire::frontend;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// What a session is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Statements.
    Sql,
    /// Replication commands and, by the simple protocol only, statements, in one database.
    LogicalReplication,
    /// Replication commands for the whole server.
    PhysicalReplication,
}

/// What it takes to address the session from elsewhere.
pub(crate) struct Session {
    pub(crate) config: Config,
    pub(crate) host: Host,
    pub(crate) endpoint: Endpoint,
    pub(crate) encrypted: bool,
    pub(crate) process_id: i32,
    pub(crate) secret_key: Bytes,
}

/// Without the key: whoever has it can cancel the session's statements.
impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("server", &self.config.redacted_host(&self.host))
            .field("process_id", &self.process_id)
            .field("encrypted", &self.encrypted)
            .finish_non_exhaustive()
    }
}

/// What an operation whose future was dropped has left on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unfinished {
    Nothing,
    /// An answer that ends with ReadyForQuery, to a simple query.
    Answer,
    /// The same, to extended queries that a Sync ends.
    ExtendedAnswer,
    /// This many answers that end with ReadyForQuery each.
    Answers(u32),
    /// An answer to a simple query, and the server first waits for the end of the COPY data.
    CopyIn,
}

/// A session with a server.
///
/// The methods that ask and wait for the answer ([`Connection::query`] and its like) may be
/// dropped at any await: the next one first takes in what the dropped one left. They must not be
/// called while a pipeline of the caller's own ([`Connection::out`]) still has answers under way.
pub struct Connection {
    pub(crate) transport: Transport,
    session: Arc<Session>,
    settings: HashMap<String, String>,
    server_version: u32,
    status: TransactionStatus,
    pub(crate) unfinished: Unfinished,
}

/// Without what waits in the buffers: it can be large, and it is the user's data.
impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("session", &self.session)
            .field("server_version", &self.server_version)
            .field("status", &self.status)
            .field("unfinished", &self.unfinished)
            .finish_non_exhaustive()
    }
}

/// How long a server may take to answer a goodbye.
pub(crate) const GOODBYE_TIMEOUT: Duration = Duration::from_secs(5);

impl Connection {
    /// Opens a session: the first of the configured hosts that gives one.
    ///
    /// The session has `client_encoding` UTF8, `DateStyle` ISO, `IntervalStyle` postgres and
    /// `extra_float_digits` 3, whatever the role's or database's defaults are.
    ///
    /// # Errors
    /// The last host's, if none gave a session. Never waits longer than `connect_timeout` per
    /// address.
    pub async fn connect(config: &Config, mode: Mode) -> Result<Connection, Error> {
        startup::connect(config, mode).await
    }

    pub(crate) fn new(
        transport: Transport,
        session: Session,
        settings: HashMap<String, String>,
    ) -> Result<Connection, Error> {
        let version = settings.get("server_version").map(String::as_str).unwrap_or_default();
        let server_version = version_number(version)
            .ok_or_else(|| Error::Protocol(format!("server_version is \"{version}\"")))?;
        Ok(Connection {
            transport,
            session: Arc::new(session),
            settings,
            server_version,
            status: TransactionStatus::Idle,
            unfinished: Unfinished::Nothing,
        })
    }

    /// The server, for messages: `postgres://user@host:port/db`.
    pub fn server(&self) -> &str {
        &self.transport.server
    }

    /// The server's version as `server_version_num` has it: 150018 for 15.18.
    pub fn server_version(&self) -> u32 {
        self.server_version
    }

    /// A setting that the server reports by itself, such as `TimeZone`.
    pub fn parameter(&self, name: &str) -> Option<&str> {
        self.settings.get(name).map(String::as_str)
    }

    /// The process id of the server process that serves this session.
    pub fn backend_pid(&self) -> i32 {
        self.session.process_id
    }

    /// Whether the other end of the connection is [`FAR`](crate::FAR), by the shortest round trip
    /// that TCP has seen. Behind a pooler or a proxy the server may be farther.
    pub fn is_far(&self) -> bool {
        self.transport.socket().arrived().is_some_and(|arrived| arrived.is_far())
    }

    /// Whether the server is so close (half a millisecond there and back, by TCP) that a flood of a
    /// stream's messages gathers there: [`crate::replication::ReplicationStream::gather`].
    pub fn is_close(&self) -> bool {
        self.transport.is_close()
    }

    /// Whether the session is encrypted by TLS.
    pub fn is_encrypted(&self) -> bool {
        self.session.encrypted
    }

    /// Whether a transaction is open, as of the last ReadyForQuery that was received.
    pub fn transaction_status(&self) -> TransactionStatus {
        self.status
    }

    /// Something that can cancel this session's statements from elsewhere.
    pub fn cancel_token(&self) -> CancelToken {
        CancelToken { session: self.session.clone() }
    }

    /// Messages that are not yet written. Append whole messages with `farshore_wire::frontend`;
    /// [`Connection::flush`] or [`Connection::receive`] writes them.
    pub fn out(&mut self) -> &mut BytesMut {
        &mut self.transport.output
    }

    /// Writes everything in [`Connection::out`]. Cancel-safe.
    ///
    /// While the socket takes nothing, this reads, so that a server that cannot send its answers
    /// never makes both sides wait. What is read waits in memory for [`Connection::receive`]: as
    /// much as the server has to say about what was sent, so bound that by sending less at a time.
    ///
    /// # Errors
    /// The connection is lost; the server's parting words, if there were any.
    pub async fn flush(&mut self) -> Result<(), Error> {
        self.transport.flush().await
    }

    /// The next message, writing what waits in [`Connection::out`] meanwhile. Cancel-safe.
    ///
    /// An ErrorResponse is a message like others here, because a pipeline needs it in its place.
    /// ParameterStatus, NoticeResponse and NotificationResponse are dealt with and not returned.
    ///
    /// # Errors
    /// The connection is lost, or the server does not speak the protocol.
    pub async fn receive(&mut self) -> Result<Message, Error> {
        loop {
            let message = self.transport.receive().await?;
            if let Some(message) = self.absorb(message) {
                return Ok(message);
            }
        }
    }

    /// The next message, if it has been read already: no system call.
    ///
    /// # Errors
    /// The server does not speak the protocol.
    pub fn try_receive(&mut self) -> Result<Option<Message>, Error> {
        while let Some(message) = self.transport.buffered()? {
            if let Some(message) = self.absorb(message) {
                return Ok(Some(message));
            }
        }
        Ok(None)
    }

    /// Reads what the socket has now, without waiting, for [`Connection::try_receive`], and pushes
    /// on with what waits in [`Connection::out`].
    ///
    /// # Errors
    /// The connection is lost.
    pub fn read_available(&mut self) -> Result<(), Error> {
        self.transport.read_available().map(drop)
    }

    /// Writes what the socket takes now of what waits in [`Connection::out`], without waiting. What
    /// is left is written by [`Connection::flush`] or [`Connection::receive`].
    pub fn write_available(&mut self) {
        self.transport.write_available();
    }

    /// Deals with what may come at any time.
    fn absorb(&mut self, message: Message) -> Option<Message> {
        match message {
            Message::ParameterStatus { name, value } => {
                self.settings.insert(name, value);
                None
            }
            Message::NoticeResponse(notice) => {
                tracing::debug!(server = %self.transport.server, %notice, "notice");
                None
            }
            Message::NotificationResponse { process_id, channel, payload } => {
                let server = &self.transport.server;
                tracing::debug!(%server, process_id, channel, payload, "notification");
                None
            }
            Message::ReadyForQuery(status) => {
                self.status = status;
                Some(message)
            }
            other => Some(other),
        }
    }

    /// Takes in what an operation whose future was dropped has left, so that a new one gets its
    /// own answers.
    pub(crate) async fn settle(&mut self) -> Result<(), Error> {
        if self.unfinished == Unfinished::CopyIn {
            frontend::copy_fail(self.out(), "the client gave up")?;
            self.unfinished = Unfinished::Answer;
        }
        while self.unfinished != Unfinished::Nothing {
            self.receive_ready().await?;
        }
        Ok(())
    }

    /// Begins a pipeline of the caller's own whose reader may be dropped midway: whoever asks something
    /// next, before [`Connection::end_pipeline`], first takes in what is left of the answers. It has
    /// one Sync, at its end.
    ///
    /// # Errors
    /// The connection is lost.
    pub async fn begin_pipeline(&mut self) -> Result<(), Error> {
        self.settle().await?;
        self.unfinished = Unfinished::ExtendedAnswer;
        Ok(())
    }

    /// ReadyForQuery has come, and with it the end of what [`Connection::begin_pipeline`] began.
    pub fn end_pipeline(&mut self) {
        self.unfinished = Unfinished::Nothing;
    }

    /// ReadyForQuery has come.
    pub(crate) fn answer_ended(&mut self) {
        self.unfinished = match self.unfinished {
            Unfinished::Answers(left @ 2..) => Unfinished::Answers(left - 1),
            _ => Unfinished::Nothing,
        };
    }

    /// Receives until the server waits for a query.
    pub(crate) async fn receive_ready(&mut self) -> Result<(), Error> {
        loop {
            match self.receive().await? {
                Message::ReadyForQuery(_) => {
                    self.answer_ended();
                    return Ok(());
                }
                Message::ErrorResponse(error) if error.is_fatal() => {
                    return Err(Error::Server(error));
                }
                // A COPY that nobody asked for by name: it must be ended before anything else.
                Message::CopyInResponse(_) => {
                    frontend::copy_fail(self.out(), "this is not the way to COPY FROM STDIN")?;
                    if self.unfinished == Unfinished::ExtendedAnswer {
                        // The Sync that was sent already has been taken for part of the COPY.
                        frontend::sync(self.out());
                    }
                }
                Message::CopyBothResponse(_) => frontend::copy_done(self.out()),
                // What nobody waits for any more.
                Message::Authentication(_)
                | Message::BackendKeyData { .. }
                | Message::BindComplete
                | Message::CloseComplete
                | Message::CommandComplete(_)
                | Message::CopyData(_)
                | Message::CopyDone
                | Message::CopyOutResponse(_)
                | Message::DataRow(_)
                | Message::EmptyQueryResponse
                | Message::ErrorResponse(_)
                | Message::FunctionCallResponse { .. }
                | Message::NegotiateProtocolVersion { .. }
                | Message::NoData
                | Message::NoticeResponse(_)
                | Message::NotificationResponse { .. }
                | Message::ParameterDescription(_)
                | Message::ParameterStatus { .. }
                | Message::ParseComplete
                | Message::PortalSuspended
                | Message::RowDescription(_) => {}
            }
        }
    }

    /// Takes in the rest of a failed operation and gives its error; a fatal one has no rest.
    pub(crate) async fn fail(&mut self, error: Box<ServerError>) -> Error {
        if !error.is_fatal()
            && let Err(lost) = self.receive_ready().await
        {
            return lost;
        }
        Error::Server(error)
    }

    /// As [`Connection::fail`], for a message that has no place in the operation.
    pub(crate) async fn misplaced(&mut self, what: String) -> Error {
        match self.receive_ready().await {
            Ok(()) => Error::Protocol(what),
            Err(lost) => lost,
        }
    }

    /// Appends messages, all or none.
    pub(crate) fn encode(
        &mut self,
        write: impl FnOnce(&mut BytesMut) -> Result<(), frontend::EncodeError>,
    ) -> Result<(), Error> {
        let out = self.out();
        let before = out.len();
        write(out).map_err(|error| {
            self.out().truncate(before);
            Error::Encode(error)
        })
    }

    /// From now on the server is told at once when this ends without [`Connection::close`], be it by
    /// a crash: not after all that was sent and that it has not read yet, which it may not read for
    /// long while it waits for a lock. What it has not read is lost then.
    pub fn reset_when_dropped(&mut self) {
        self.transport.socket().reset_when_closed(true);
    }

    /// Says goodbye and closes the socket. An open transaction is rolled back by the server.
    pub async fn close(mut self) {
        frontend::terminate(self.out());
        self.transport.socket().reset_when_closed(false);
        let goodbye = async {
            match self.transport.flush().await {
                Ok(()) => self.transport.shutdown().await,
                Err(error) => tracing::debug!(%error, "saying goodbye"),
            }
        };
        if tokio::time::timeout(GOODBYE_TIMEOUT, goodbye).await.is_err() {
            tracing::debug!("the server took no goodbye within {GOODBYE_TIMEOUT:?}");
        }
    }
}

/// `15.18 (Debian …)`, `18beta1`, `9.6.3` as `server_version_num` has it.
fn version_number(text: &str) -> Option<u32> {
    let numbers: String = text.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
    let mut parts = numbers.split('.').filter(|part| !part.is_empty()).map(str::parse::<u32>);
    let major = parts.next()?.ok().filter(|major| *major < 10_000)?;
    let minor = parts.next().unwrap_or(Ok(0)).ok().filter(|minor| *minor < 10_000)?;
    if major >= 10 {
        return Some(major * 10_000 + minor);
    }
    let patch = parts.next().unwrap_or(Ok(0)).ok().filter(|patch| *patch < 100)?;
    Some(major * 10_000 + (minor % 100) * 100 + patch)
}

#[cfg(test)]
mod tests {
    use super::version_number;

    #[test]
    fn versions_are_understood() {
        for (text, number) in [
            ("15.18 (Debian 15.18-0+deb12u1)", Some(150_018)),
            ("18.4", Some(180_004)),
            ("18beta1", Some(180_000)),
            ("9.6.3", Some(90_603)),
            ("devel", None),
            ("", None),
            ("99999999999.1", None),
        ] {
            assert_eq!(version_number(text), number, "{text}");
        }
    }
}
