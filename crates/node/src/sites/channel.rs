//! A session, as what a far subscription asks its publisher through.

use super::protocol::Wanted;
use bytes::Bytes;
use farshore_capture::source::{Channel, ChannelError, Opener};
use farshore_link::{Dialer, LinkError, Receiver, Sender, Session};
use farshore_store::BoxFuture;

/// A session's both directions.
pub(super) struct SessionChannel {
    sender: Sender,
    receiver: Receiver,
}

impl SessionChannel {
    pub fn new(session: Session) -> SessionChannel {
        let (sender, receiver) = session.split();
        SessionChannel { sender, receiver }
    }

    /// Sends what is on its way, and ends.
    pub async fn finish(self) {
        // The receiver stays until then: without it the session is given up.
        let SessionChannel { sender, receiver } = self;
        if let Err(error) = sender.finish().await {
            tracing::debug!("a session's end: {error}");
        }
        drop(receiver);
    }
}

fn failed(error: LinkError) -> ChannelError {
    ChannelError::away(error.to_string())
}

impl Channel for SessionChannel {
    fn send(&mut self, message: Bytes) -> BoxFuture<'_, Result<(), ChannelError>> {
        Box::pin(async move { self.sender.send(message).await.map_err(failed) })
    }

    fn next(&mut self) -> BoxFuture<'_, Result<Option<Bytes>, ChannelError>> {
        Box::pin(async move { self.receiver.next().await.map_err(failed) })
    }
}

/// Opens sessions to where a publication comes from.
pub(crate) struct SourceOpener {
    /// The way there.
    pub dialer: Dialer,
    /// Its name there.
    pub publication: String,
}

impl Opener for SourceOpener {
    fn open(&self) -> BoxFuture<'_, Result<Box<dyn Channel>, ChannelError>> {
        Box::pin(async move {
            let wanted = Wanted::Source { publication: self.publication.clone() };
            let request = serde_json::to_vec(&wanted).unwrap_or_default();
            let session = self.dialer.open(&request).await.map_err(failed)?;
            let channel: Box<dyn Channel> = Box::new(SessionChannel::new(session));
            Ok(channel)
        })
    }
}
