use crate::Error;
use crate::connection::{Connection, Unfinished};
use bytes::Bytes;
use farshore_wire::backend::{CommandTag, CopyFormat, Message, ServerError};
use farshore_wire::frontend;

/// [`CopyIn::send`] writes to the socket when this much waits.
const COPY_BUFFER_BYTES: usize = 256 << 10;

/// Most bytes of data in one CopyData message: also the most by which the buffer overshoots.
const COPY_MESSAGE_BYTES: usize = 64 << 10;

/// The type byte of CopyData.
const COPY_DATA: u8 = b'd';

/// A running COPY TO STDOUT.
///
/// Dropped early, the next operation on the connection takes in the rest of the data first.
#[derive(Debug)]
pub struct CopyOut<'a> {
    connection: &'a mut Connection,
    format: CopyFormat,
    tag: Option<CommandTag>,
    /// What the server has ended it with; its last message is still to come.
    failed: Option<Box<ServerError>>,
}

/// A running COPY FROM STDIN.
///
/// Dropped before [`CopyIn::finish`], the COPY fails and nothing of it stays.
#[derive(Debug)]
pub struct CopyIn<'a> {
    connection: &'a mut Connection,
    format: CopyFormat,
}

impl Connection {
    /// Starts a COPY … TO STDOUT.
    ///
    /// # Errors
    /// The server's, or [`Error::Protocol`] if `sql` is something else.
    pub async fn copy_out(&mut self, sql: &str) -> Result<CopyOut<'_>, Error> {
        self.settle().await?;
        self.encode(|out| frontend::query(out, sql))?;
        self.unfinished = Unfinished::Answer;
        match self.receive().await? {
            Message::CopyOutResponse(format) => {
                Ok(CopyOut { connection: self, format, tag: None, failed: None })
            }
            Message::ErrorResponse(error) => Err(self.fail(error).await),
            Message::CopyInResponse(_) => {
                self.refuse_copy_in()?;
                Err(self.misplaced(not_a_copy(sql, "TO STDOUT")).await)
            }
            Message::ReadyForQuery(_) => {
                self.unfinished = Unfinished::Nothing;
                Err(Error::Protocol(not_a_copy(sql, "TO STDOUT")))
            }
            _other => Err(self.misplaced(not_a_copy(sql, "TO STDOUT")).await),
        }
    }

    /// Starts a COPY … FROM STDIN.
    ///
    /// # Errors
    /// The server's, or [`Error::Protocol`] if `sql` is something else.
    pub async fn copy_in(&mut self, sql: &str) -> Result<CopyIn<'_>, Error> {
        self.settle().await?;
        self.encode(|out| frontend::query(out, sql))?;
        self.unfinished = Unfinished::Answer;
        match self.receive().await? {
            Message::CopyInResponse(format) => {
                self.unfinished = Unfinished::CopyIn;
                Ok(CopyIn { connection: self, format })
            }
            Message::ErrorResponse(error) => Err(self.fail(error).await),
            Message::ReadyForQuery(_) => {
                self.unfinished = Unfinished::Nothing;
                Err(Error::Protocol(not_a_copy(sql, "FROM STDIN")))
            }
            _other => Err(self.misplaced(not_a_copy(sql, "FROM STDIN")).await),
        }
    }

    /// Ends a COPY FROM STDIN that was not expected.
    pub(crate) fn refuse_copy_in(&mut self) -> Result<(), Error> {
        let extended = self.unfinished == Unfinished::ExtendedAnswer;
        self.encode(|out| {
            frontend::copy_fail(out, "COPY FROM STDIN was not expected here")?;
            if extended {
                // The Sync that was sent already has been taken for part of the COPY.
                frontend::sync(out);
            }
            Ok(())
        })
    }
}

fn not_a_copy(sql: &str, direction: &str) -> String {
    let start: String = sql.chars().take(60).collect();
    format!("\"{start}\" is not a COPY … {direction}")
}

impl CopyOut<'_> {
    /// How the data looks.
    pub fn format(&self) -> &CopyFormat {
        &self.format
    }

    /// The next piece of data, as the server cut it: usually a row, but a binary COPY's header
    /// comes with the first one. `None` is the end, and the server has confirmed that it is
    /// complete. Cancel-safe.
    ///
    /// The piece is a slice of a larger read buffer: copy what is kept for long.
    ///
    /// # Errors
    /// The server's, and lost connections.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        loop {
            if self.connection.unfinished == Unfinished::Nothing {
                return match (self.failed.take(), &self.tag) {
                    (Some(error), _) => Err(Error::Server(error)),
                    (None, Some(_)) => Ok(None),
                    (None, None) => {
                        Err(Error::Protocol("COPY TO STDOUT has ended without its end".into()))
                    }
                };
            }
            match self.connection.receive().await? {
                Message::CopyData(data) => return Ok(Some(data)),
                Message::CopyDone => {}
                Message::CommandComplete(tag) => self.tag = Some(tag),
                Message::ErrorResponse(error) if error.is_fatal() => {
                    return Err(Error::Server(error));
                }
                // Kept, and not waited on: whoever gives up here asks again.
                Message::ErrorResponse(error) => self.failed = Some(error),
                Message::ReadyForQuery(_) => self.connection.unfinished = Unfinished::Nothing,
                other => {
                    let what = format!("{other:?} in COPY TO STDOUT");
                    return Err(self.connection.misplaced(what).await);
                }
            }
        }
    }

    /// The next piece, if it has been read already: no system call. `None` says nothing of the end.
    ///
    /// # Errors
    /// The server does not speak the protocol.
    pub fn next_buffered(&mut self) -> Result<Option<Bytes>, Error> {
        // Whatever else comes takes more than one step to deal with.
        if self.connection.transport.buffered_kind() != Some(COPY_DATA) {
            return Ok(None);
        }
        match self.connection.try_receive()? {
            Some(Message::CopyData(data)) => Ok(Some(data)),
            Some(other) => Err(Error::Protocol(format!("{other:?} in COPY TO STDOUT"))),
            None => Ok(None),
        }
    }

    /// The number of rows copied, as the server counts them; at the end.
    pub fn rows(&self) -> Option<u64> {
        self.tag.as_ref().and_then(CommandTag::rows)
    }

    /// Takes in what is left and gives the number of rows copied, as the server counts them.
    ///
    /// # Errors
    /// As [`CopyOut::next`].
    pub async fn finish(mut self) -> Result<u64, Error> {
        while self.next().await?.is_some() {}
        Ok(self.rows().unwrap_or(0))
    }
}

impl CopyIn<'_> {
    /// How the data has to look.
    pub fn format(&self) -> &CopyFormat {
        &self.format
    }

    /// Sends data, cut anywhere. Buffers up to a few hundred kilobytes and then waits for the
    /// server to take it.
    ///
    /// Not cancel-safe: when dropped, how much of `data` was taken is not known.
    ///
    /// # Errors
    /// The server's, soon after it reports one, so that a doomed COPY does not send on for long;
    /// and lost connections. The COPY is over then.
    pub async fn send(&mut self, data: &[u8]) -> Result<(), Error> {
        for piece in data.chunks(COPY_MESSAGE_BYTES) {
            self.check_running()?;
            self.connection.encode(|out| frontend::copy_data(out, piece))?;
            if self.connection.out().len() >= COPY_BUFFER_BYTES {
                self.connection.flush().await?;
                self.connection.transport.read_available()?;
                self.notice_error().await?;
            }
        }
        Ok(())
    }

    /// A server that fails a COPY says so at once, and then ignores the data.
    async fn notice_error(&mut self) -> Result<(), Error> {
        match self.connection.try_receive()? {
            None => Ok(()),
            Some(Message::ErrorResponse(error)) => {
                self.connection.unfinished = Unfinished::Answer;
                Err(self.connection.fail(error).await)
            }
            Some(other) => {
                Err(Error::Protocol(format!("{other:?} while COPY FROM STDIN is running")))
            }
        }
    }

    fn check_running(&self) -> Result<(), Error> {
        match self.connection.unfinished {
            Unfinished::CopyIn => Ok(()),
            Unfinished::Nothing
            | Unfinished::Answer
            | Unfinished::Answers(_)
            | Unfinished::ExtendedAnswer => {
                Err(Error::Protocol("this COPY FROM STDIN has failed already".into()))
            }
        }
    }

    /// Ends the data and gives the number of rows copied, as the server counts them.
    ///
    /// # Errors
    /// The server's: then nothing was copied.
    pub async fn finish(self) -> Result<u64, Error> {
        self.check_running()?;
        frontend::copy_done(self.connection.out());
        self.connection.unfinished = Unfinished::Answer;
        let mut rows = 0;
        loop {
            match self.connection.receive().await? {
                Message::CommandComplete(tag) => rows = tag.rows().unwrap_or(0),
                Message::ErrorResponse(error) => return Err(self.connection.fail(error).await),
                Message::ReadyForQuery(_) => {
                    self.connection.unfinished = Unfinished::Nothing;
                    return Ok(rows);
                }
                other => {
                    let what = format!("{other:?} at the end of COPY FROM STDIN");
                    return Err(self.connection.misplaced(what).await);
                }
            }
        }
    }

    /// Gives up: the server fails the COPY with `reason` in its log, and nothing of it stays.
    ///
    /// # Errors
    /// Lost connections.
    pub async fn abort(self, reason: &str) -> Result<(), Error> {
        if self.check_running().is_err() {
            return Ok(());
        }
        self.connection.encode(|out| frontend::copy_fail(out, reason))?;
        self.connection.unfinished = Unfinished::Answer;
        self.connection.receive_ready().await
    }
}
