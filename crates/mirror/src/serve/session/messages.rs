//! What a client says, as it comes.

use super::SessionError;
use bytes::BytesMut;
use farshore_wire::server::{self, FromFrontend};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// What the client says, read by a task of its own: a session that sends must hear too.
pub(super) struct Messages {
    received: mpsc::Receiver<Result<FromFrontend, SessionError>>,
    reading: JoinHandle<()>,
}

impl Messages {
    pub(super) fn begin(
        mut reader: Box<dyn AsyncRead + Send + Unpin>,
        mut buffer: BytesMut,
    ) -> Messages {
        let (sender, received) = mpsc::channel(16);
        let reading = tokio::spawn(async move {
            loop {
                let message = match server::split_message(&mut buffer) {
                    Ok(Some(message)) => Ok(message),
                    Ok(None) => match reader.read_buf(&mut buffer).await {
                        Ok(0) => return,
                        Ok(_) => continue,
                        Err(error) => Err(error.into()),
                    },
                    Err(error) => Err(error.into()),
                };
                let is_last = message.is_err();
                if sender.send(message).await.is_err() || is_last {
                    return;
                }
            }
        });
        Messages { received, reading }
    }

    /// The next one; `None` at the end of the connection.
    pub(super) async fn next(&mut self) -> Result<Option<FromFrontend>, SessionError> {
        self.received.recv().await.transpose()
    }

    pub(super) fn here(&mut self) -> Result<Option<FromFrontend>, SessionError> {
        self.received.try_recv().ok().transpose()
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        self.reading.abort();
    }
}
