use super::slot::{lsn, required};
use crate::connection::{Connection, GOODBYE_TIMEOUT, Unfinished};
use crate::query::Row;
use crate::{CancelToken, Error};
use bytes::Bytes;
use farshore_model::{Lsn, PgTime};
use farshore_wire::backend::Message;
use farshore_wire::frontend;
use farshore_wire::replication::{FromClient, FromServer, HotStandbyFeedback, StandbyStatusUpdate};
use std::sync::Arc;
use std::time::Duration;

/// What a server says while it streams.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamMessage {
    /// A piece of log, or one message of pgoutput.
    XLogData {
        /// Where the data starts in the log; zero for some logical messages.
        wal_start: Lsn,
        /// End of the log on the server then.
        wal_end: Lsn,
        /// The server's clock.
        send_time: PgTime,
        /// Log bytes, or a pgoutput message. A slice of a larger read buffer: copy what is kept
        /// for long.
        data: Bytes,
    },
    /// The server is alive, and wants to know whether we are.
    Keepalive {
        /// End of the log on the server now; from a logical slot, what it has decoded.
        wal_end: Lsn,
        /// The server's clock.
        send_time: PgTime,
        /// Send a status at once, or the server gives up after `wal_sender_timeout`.
        reply_requested: bool,
    },
}

/// Where a physical stream goes on after its timeline has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TimelineSwitch {
    /// The next timeline.
    pub timeline: u32,
    /// Where it starts.
    pub start: Lsn,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Streaming,
    /// The server has ended the copy; what follows is its closing words.
    Ending,
    Ended,
}

/// A running replication stream.
///
/// All state is in here and none in the futures: [`ReplicationStream::next`] may be dropped at any
/// await and called again, and a status that was only half written is completed by whichever
/// method is called next.
#[derive(Debug)]
pub struct ReplicationStream {
    connection: Connection,
    phase: Phase,
    /// Columns of the result that ends a physical stream.
    columns: Arc<[String]>,
    switch: Option<TimelineSwitch>,
    /// For encoding statuses without allocating.
    status: Vec<u8>,
}

impl Connection {
    /// Starts streaming from a logical slot. `start` earlier than what the slot has confirmed
    /// means: from there. Option values are given as they are and quoted here;
    /// `publication_names` is itself a list of identifiers, see
    /// [`quote_identifier`](crate::quote_identifier).
    ///
    /// # Errors
    /// The server's: 55006 if somebody else streams from the slot, 42704 if there is none. The
    /// connection is closed then.
    pub async fn start_replication(
        self,
        slot: &str,
        start: Lsn,
        options: &[(&str, &str)],
    ) -> Result<ReplicationStream, Error> {
        let sql = Connection::logical_command(slot, start, options)?;
        self.start_stream(&sql).await
    }

    /// Starts streaming the log itself, from `start` on `timeline`, or on the current one.
    ///
    /// # Errors
    /// The server's. Some come only from [`ReplicationStream::next`]: 58P01 if the server has that
    /// log no more, XX000 if it has not got it yet.
    pub async fn start_physical_replication(
        self,
        slot: Option<&str>,
        start: Lsn,
        timeline: Option<u32>,
    ) -> Result<ReplicationStream, Error> {
        let sql = Connection::physical_command(slot, start, timeline);
        self.start_stream(&sql).await
    }

    async fn start_stream(mut self, sql: &str) -> Result<ReplicationStream, Error> {
        self.settle().await?;
        self.encode(|out| frontend::query(out, sql))?;
        self.unfinished = Unfinished::Answer;
        let phase = match self.receive().await? {
            Message::CopyBothResponse(_) => Phase::Streaming,
            // The timeline has nothing more after `start`: the closing words come at once.
            Message::RowDescription(fields) => {
                let columns = fields.into_iter().map(|field| field.name).collect();
                return Ok(ReplicationStream::new(self, Phase::Ending, columns));
            }
            Message::ErrorResponse(error) => return Err(self.fail(error).await),
            other => return Err(Error::Protocol(format!("{other:?} to START_REPLICATION"))),
        };
        Ok(ReplicationStream::new(self, phase, Arc::new([])))
    }
}

impl ReplicationStream {
    fn new(connection: Connection, phase: Phase, columns: Arc<[String]>) -> ReplicationStream {
        ReplicationStream { connection, phase, columns, switch: None, status: Vec::new() }
    }

    /// The next message; `None` once the server has ended the stream, be it that it shuts down or
    /// that a physical stream's timeline has ended ([`ReplicationStream::timeline_switch`]).
    /// Cancel-safe.
    ///
    /// Nothing is answered by itself: see [`StreamMessage::Keepalive`].
    ///
    /// # Errors
    /// The server's, and lost connections.
    pub async fn next(&mut self) -> Result<Option<StreamMessage>, Error> {
        loop {
            if let Some(message) = self.next_buffered()? {
                return Ok(Some(message));
            }
            if self.phase == Phase::Ended {
                return Ok(None);
            }
            match self.connection.receive().await {
                Ok(message) => {
                    if let Some(message) = self.accept(message)? {
                        return Ok(Some(message));
                    }
                }
                // A server that shuts down closes the connection behind its closing words.
                Err(Error::Closed { .. } | Error::Io { .. }) if self.phase == Phase::Ending => {
                    self.phase = Phase::Ended;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// When messages come in a flood, leaves them to gather for up to five milliseconds. A
    /// walsender sends each by itself, which costs both sides more than the message is worth.
    pub async fn gather(&mut self) {
        self.connection.transport.gather().await;
    }

    /// Leaves what comes in the socket for this long, or until so many bytes are there: to be woken
    /// for each message takes a processor more time than the message. Cancel-safe.
    pub async fn wait_for(&mut self, bytes: usize, patience: Duration) {
        self.connection.transport.wait_for(bytes, patience).await;
    }

    /// The next message if it is here, or can be read without waiting. `None` does not mean that
    /// the stream has ended.
    ///
    /// # Errors
    /// As [`ReplicationStream::next`].
    pub fn try_next(&mut self) -> Result<Option<StreamMessage>, Error> {
        loop {
            if let Some(message) = self.next_buffered()? {
                return Ok(Some(message));
            }
            if self.phase != Phase::Streaming || !self.connection.transport.read_available()? {
                return Ok(None);
            }
        }
    }

    fn next_buffered(&mut self) -> Result<Option<StreamMessage>, Error> {
        while self.phase != Phase::Ended {
            let Some(message) = self.connection.try_receive()? else { break };
            if let Some(message) = self.accept(message)? {
                return Ok(Some(message));
            }
        }
        Ok(None)
    }

    fn accept(&mut self, message: Message) -> Result<Option<StreamMessage>, Error> {
        match (message, self.phase) {
            (Message::CopyData(data), Phase::Streaming) => return decode(&data).map(Some),
            (Message::CopyDone, Phase::Streaming) => {
                frontend::copy_done(self.connection.out());
                self.phase = Phase::Ending;
            }
            // A server that shuts down ends the command without ending the copy.
            (Message::CommandComplete(_), Phase::Streaming) => self.phase = Phase::Ending,
            (Message::ErrorResponse(error), _) => {
                self.phase = Phase::Ended;
                return Err(Error::Server(error));
            }
            (Message::RowDescription(fields), Phase::Ending) => {
                self.columns = fields.into_iter().map(|field| field.name).collect();
            }
            (Message::DataRow(data), Phase::Ending) => {
                let row = Row::new(&self.columns, &data)?;
                let timeline = required(&row, "next_tli")?
                    .parse()
                    .map_err(|_| Error::Value("next_tli is not a number".into()))?;
                self.switch =
                    Some(TimelineSwitch { timeline, start: lsn(&row, "next_tli_startpos")? });
            }
            (Message::CommandComplete(_) | Message::CopyData(_) | Message::CopyDone, _) => {}
            (Message::ReadyForQuery(_), _) => {
                self.phase = Phase::Ended;
                self.connection.unfinished = Unfinished::Nothing;
            }
            (other, phase) => {
                return Err(Error::Protocol(format!("{other:?} in a stream ({phase:?})")));
            }
        }
        Ok(None)
    }

    /// Tells the server how far we are. For a logical slot `flushed` is what counts: everything
    /// before it is never sent again. Cancel-safe: a status that was begun is sent in the end.
    ///
    /// # Errors
    /// Lost connections.
    pub async fn send_status(
        &mut self,
        written: Lsn,
        flushed: Lsn,
        applied: Lsn,
        reply_requested: bool,
    ) -> Result<(), Error> {
        self.send(FromClient::StandbyStatusUpdate(StandbyStatusUpdate {
            written,
            flushed,
            applied,
            client_time: PgTime::now(),
            reply_requested,
        }))
        .await
    }

    /// Tells the server which rows queries on standbys still need. Cancel-safe, as
    /// [`ReplicationStream::send_status`].
    ///
    /// # Errors
    /// Lost connections.
    pub async fn send_feedback(&mut self, feedback: HotStandbyFeedback) -> Result<(), Error> {
        self.send(FromClient::HotStandbyFeedback(feedback)).await
    }

    async fn send(&mut self, message: FromClient) -> Result<(), Error> {
        if self.phase != Phase::Streaming {
            return Ok(());
        }
        self.status.clear();
        message.encode(&mut self.status);
        frontend::copy_data(&mut self.connection.transport.output, &self.status)?;
        match self.connection.flush().await {
            // A server that has ended the stream reads no more. What it said last comes first.
            Err(Error::Closed { .. } | Error::Io { .. })
                if self.connection.transport.has_frame() =>
            {
                Ok(())
            }
            flushed => flushed,
        }
    }

    /// Where a physical stream goes on, once [`ReplicationStream::next`] has returned `None`;
    /// `None` if it was not the timeline that ended.
    pub fn timeline_switch(&self) -> Option<TimelineSwitch> {
        self.switch
    }

    /// The server, for messages.
    pub fn server(&self) -> &str {
        self.connection.server()
    }

    /// The server's version, as [`Connection::server_version`].
    pub fn server_version(&self) -> u32 {
        self.connection.server_version()
    }

    /// The process id of the walsender.
    pub fn backend_pid(&self) -> i32 {
        self.connection.backend_pid()
    }

    /// Something that can end the stream from elsewhere.
    pub fn cancel_token(&self) -> CancelToken {
        self.connection.cancel_token()
    }

    /// Ends the stream in order, so that the slot is free when this returns, and closes the
    /// connection. What was not yet received is dropped. Waits a few seconds at most; a server
    /// that is deep in a large transaction may take longer to notice.
    pub async fn finish(mut self) {
        if self.phase == Phase::Streaming {
            frontend::copy_done(self.connection.out());
            let ended = async {
                loop {
                    match self.connection.receive().await {
                        Ok(Message::ReadyForQuery(_)) => break,
                        Ok(_being_dropped) => {}
                        Err(error) => {
                            tracing::debug!(%error, "ending the stream");
                            break;
                        }
                    }
                }
            };
            if tokio::time::timeout(GOODBYE_TIMEOUT, ended).await.is_err() {
                tracing::debug!("the stream took more than {GOODBYE_TIMEOUT:?} to end");
            }
        }
        self.connection.close().await;
    }
}

fn decode(data: &Bytes) -> Result<StreamMessage, Error> {
    match FromServer::decode(data) {
        Ok(FromServer::XLogData(message)) => Ok(StreamMessage::XLogData {
            wal_start: message.wal_start,
            wal_end: message.wal_end,
            send_time: message.send_time,
            data: data.slice_ref(message.data),
        }),
        Ok(FromServer::PrimaryKeepalive(message)) => Ok(StreamMessage::Keepalive {
            wal_end: message.wal_end,
            send_time: message.send_time,
            reply_requested: message.reply_requested,
        }),
        Err(error) => Err(Error::Protocol(error.to_string())),
    }
}
