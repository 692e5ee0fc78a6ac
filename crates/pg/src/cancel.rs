use crate::Error;
use crate::connection::Session;
use crate::startup::{Encryption, open};
use bytes::BytesMut;
use farshore_wire::frontend;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Can ask a server to cancel what one session is doing, from anywhere.
#[derive(Debug, Clone)]
pub struct CancelToken {
    pub(crate) session: Arc<Session>,
}

impl CancelToken {
    /// Whether both are of one session.
    pub fn is_same(&self, other: &CancelToken) -> bool {
        Arc::ptr_eq(&self.session, &other.session)
    }

    /// Asks it when this is dropped before [`Abandoned::is_done`]: a session that waits for a lock
    /// does not notice that its client has gone, and goes on waiting.
    pub fn unless_done(self) -> Abandoned {
        Abandoned(Some(self))
    }

    /// Asks, on a connection of its own with the same encryption, and returns when the server has
    /// taken notice. Whether it came in time only the cancelled session can tell: its statement
    /// fails with SQLSTATE 57014, or it was done already.
    ///
    /// # Errors
    /// The server cannot be reached within `connect_timeout`.
    pub async fn cancel(&self) -> Result<(), Error> {
        let Session { config, host, endpoint, encrypted, process_id, secret_key } = &*self.session;
        let server = config.redacted_host(host);
        let encryption = if *encrypted { Encryption::Required } else { Encryption::Off };
        let work = async {
            let opened =
                open(config, host, endpoint, encryption, None).await.map_err(|e| e.error)?;
            let mut socket = opened.socket;
            let mut request = BytesMut::new();
            frontend::cancel_request(&mut request, *process_id, secret_key)?;
            let exchange = async {
                socket.write_all(&request).await?;
                socket.flush().await?;
                // The server says nothing and closes when it has passed the request on.
                socket.read_u8().await
            };
            match exchange.await {
                Ok(_) => Err(Error::Protocol("the server answered a cancel request".into())),
                Err(error) => {
                    tracing::trace!(%server, %error, "cancel request taken");
                    Ok(())
                }
            }
        };
        let after = config.connect_timeout;
        tokio::time::timeout(after, work).await.unwrap_or_else(|_| {
            Err(Error::Timeout { what: format!("cancelling a statement on {server}"), after })
        })
    }
}

/// Of a statement whose future may be dropped: see [`CancelToken::unless_done`].
#[derive(Debug)]
pub struct Abandoned(Option<CancelToken>);

impl Abandoned {
    /// The statement has been answered.
    pub fn is_done(mut self) {
        self.0 = None;
    }
}

impl Drop for Abandoned {
    fn drop(&mut self) {
        let Some(token) = self.0.take() else { return };
        // Without a runtime the process is about to end.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            if let Err(error) = token.cancel().await {
                tracing::debug!(%error, "a statement that was given up goes on");
            }
        });
    }
}
