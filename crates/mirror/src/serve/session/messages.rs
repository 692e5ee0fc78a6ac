//! What a client says, as it comes.

use super::SessionError;
use bytes::BytesMut;
use farshore_wire::server::{self, FromFrontend};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use tokio::io::{AsyncRead, AsyncReadExt};

/// What the client says. It is read when the session asks for it: between two pieces of log, and
/// while there is none.
pub(super) struct Messages {
    reader: Box<dyn AsyncRead + Send + Unpin>,
    /// What was read and not asked for yet.
    buffer: BytesMut,
}

impl Messages {
    pub(super) fn begin(reader: Box<dyn AsyncRead + Send + Unpin>, buffer: BytesMut) -> Messages {
        Messages { reader, buffer }
    }

    /// The next one; `None` at the end of the connection. Cancel-safe.
    pub(super) async fn next(&mut self) -> Result<Option<FromFrontend>, SessionError> {
        loop {
            if let Some(message) = server::split_message(&mut self.buffer)? {
                return Ok(Some(message));
            }
            if self.reader.read_buf(&mut self.buffer).await? == 0 {
                return Ok(None);
            }
        }
    }

    /// The next one, if it is here. The end of the connection is left to [`Messages::next`].
    pub(super) fn here(&mut self) -> Result<Option<FromFrontend>, SessionError> {
        // Whoever waits for more asks again, with a waker that wakes.
        match pin!(self.next()).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(message) => message,
            Poll::Pending => Ok(None),
        }
    }
}
