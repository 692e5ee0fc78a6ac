//! What a client says, as it comes.

use super::SessionError;
use bytes::BytesMut;
use farshore_wire::server::{self, FromFrontend};
use socket2::SockRef;
use std::io::ErrorKind::{Interrupted, WouldBlock};
use std::io::Read;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use tokio::io::AsyncReadExt;
use tokio::net::tcp::OwnedReadHalf;
use tokio_rustls::server::TlsStream;

/// A client that need not be heard at once is heard at once all the same with so much: some fifty
/// replies of a standby.
const LOUD_BYTES: usize = 2 << 10;
/// What is taken at once of what is here.
const READ_BYTES: usize = 4 << 10;

/// Where it comes from.
pub(in crate::serve) enum Reader {
    Plain(OwnedReadHalf),
    Tls(Box<tokio::io::ReadHalf<TlsStream<tokio::net::TcpStream>>>),
}

/// What the client says. It is read when the session asks for it: between two pieces of log, and
/// while there is none.
pub(super) struct Messages {
    reader: Reader,
    /// What was read and not asked for yet.
    buffer: BytesMut,
    /// The kernel wakes nobody for a few bytes of it.
    is_deferred: bool,
}

impl Messages {
    pub(super) fn begin(reader: Reader, buffer: BytesMut) -> Messages {
        Messages { reader, buffer, is_deferred: false }
    }

    /// What comes from now on wakes nobody, unless it is much or the end: [`Messages::here`] finds
    /// it, and [`Messages::listen`] ends it. A client by TLS is listened to all the time.
    pub(super) fn defer(&mut self) {
        if let (Reader::Plain(socket), false) = (&self.reader, self.is_deferred) {
            self.is_deferred = farshore_pg::wake_at(socket.as_ref(), LOUD_BYTES).is_some();
            if !self.is_deferred {
                // Whatever it did with what it was told.
                farshore_pg::wake_at(socket.as_ref(), 1);
            }
        }
    }

    /// Whether what comes wakes nobody.
    pub(super) fn is_deferred(&self) -> bool {
        self.is_deferred
    }

    /// What comes wakes who waits for it again, and so does what has come.
    pub(super) fn listen(&mut self) -> Result<(), SessionError> {
        if !self.is_deferred {
            return Ok(());
        }
        // What has come is not to wake this thread later on.
        self.take_in()?;
        if let Reader::Plain(socket) = &self.reader {
            farshore_pg::wake_at(socket.as_ref(), 1);
        }
        self.is_deferred = false;
        // Of what came in between, some kernels tell nobody.
        self.take_in()
    }

    /// Reads what is here, whatever the runtime knows of it.
    fn take_in(&mut self) -> Result<(), SessionError> {
        let Reader::Plain(socket) = &self.reader else { return Ok(()) };
        let mut bytes = [0; READ_BYTES];
        match (&*SockRef::from(socket.as_ref())).read(&mut bytes) {
            Ok(read) => self.buffer.extend_from_slice(&bytes[..read]),
            Err(error) if matches!(error.kind(), WouldBlock | Interrupted) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// The next one; `None` at the end of the connection. Cancel-safe.
    pub(super) async fn next(&mut self) -> Result<Option<FromFrontend>, SessionError> {
        loop {
            if let Some(message) = server::split_message(&mut self.buffer)? {
                return Ok(Some(message));
            }
            let read = match &mut self.reader {
                Reader::Plain(socket) => socket.read_buf(&mut self.buffer).await?,
                Reader::Tls(stream) => stream.read_buf(&mut self.buffer).await?,
            };
            if read == 0 {
                return Ok(None);
            }
        }
    }

    /// The next one, if it is here. The end of the connection is left to [`Messages::next`].
    pub(super) fn here(&mut self) -> Result<Option<FromFrontend>, SessionError> {
        if self.is_deferred {
            if let Some(message) = server::split_message(&mut self.buffer)? {
                return Ok(Some(message));
            }
            self.take_in()?;
            return Ok(server::split_message(&mut self.buffer)?);
        }
        // Whoever waits for more asks again, with a waker that wakes.
        match pin!(self.next()).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(message) => message,
            Poll::Pending => Ok(None),
        }
    }
}
