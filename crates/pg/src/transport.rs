use crate::Error;
use crate::gather::{self, Gather};
use crate::read_buffer::{KEPT_BYTES_MAX, ReadBuffer};
use crate::socket::Socket;
use bytes::{Buf, Bytes, BytesMut};
use farshore_wire::backend::{Frame, Message, ServerError, decode};
use std::future::poll_fn;
use std::io;
use std::ops::ControlFlow;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// A socket and what waits on either side of it. All state lives here, none in the futures, so
/// every future that this hands out may be dropped and made again.
pub(crate) struct Transport {
    /// For messages.
    pub(crate) server: String,
    socket: Socket,
    input: ReadBuffer,
    /// Whole messages that are not yet written; the first may be written in part.
    pub(crate) output: BytesMut,
    /// TLS holds bytes that it has been given and has not yet put on the wire.
    needs_flush: bool,
    /// The socket takes nothing any more. What the server said before may still be there to read.
    write_failure: Option<io::Error>,
    gather: Gather,
}

impl Transport {
    pub(crate) fn new(server: String, socket: Socket) -> Transport {
        let (input, output) = (ReadBuffer::new(), BytesMut::new());
        let gather = Gather::default();
        Transport { server, socket, input, output, needs_flush: false, write_failure: None, gather }
    }

    /// Writes until everything is on the wire. `Pending` if the socket takes no more now, or takes
    /// nothing any more: then the end of what can be read tells how the connection was lost, after
    /// what the server said last.
    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.write_failure.is_none() {
            match std::task::ready!(self.try_poll_write(cx)) {
                Ok(()) => return Poll::Ready(()),
                Err(error) => self.write_failure = Some(error),
            }
        }
        self.output.clear();
        Poll::Pending
    }

    fn try_poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.output.is_empty() {
            match std::task::ready!(Pin::new(&mut self.socket).poll_write(cx, &self.output))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => {
                    self.output.advance(written);
                    self.needs_flush = true;
                }
            }
        }
        if self.needs_flush {
            std::task::ready!(Pin::new(&mut self.socket).poll_flush(cx))?;
            self.needs_flush = false;
            // All room was advanced over; start again at the front, or small after a large burst.
            if self.output.capacity() > KEPT_BYTES_MAX || !self.output.try_reclaim(4096) {
                self.output = BytesMut::new();
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Reads once; 0 is the end of the stream.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let Transport { socket, input, .. } = self;
        let read = pin!(socket.read_buf(input.with_room()));
        read.poll(cx)
    }

    /// The next message that is wholly here.
    pub(crate) fn buffered(&mut self) -> Result<Option<Message>, Error> {
        Ok(match self.input.next_frame()? {
            Some(frame) => Some(decode(frame)?),
            None => None,
        })
    }

    /// The type byte of the next message, if that is wholly here.
    pub(crate) fn buffered_kind(&self) -> Option<u8> {
        self.input.visit_frames(|kind, _| ControlFlow::Break(kind))
    }

    /// Reads once, at least one byte, or says how the connection was lost.
    fn poll_read_some(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Error>> {
        match std::task::ready!(self.poll_read(cx)) {
            Ok(0) => {
                let cause = self.write_failure.take();
                // A later read finds the end again, and a later write fails again.
                Poll::Ready(Err(self.lost(cause)))
            }
            Ok(_) => Poll::Ready(Ok(())),
            Err(error) => Poll::Ready(Err(self.lost(Some(error)))),
        }
    }

    /// What it goes over.
    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Writes what the socket takes now, without waiting.
    pub(crate) fn write_available(&mut self) {
        // Nobody is parked on this socket while we hold `&mut self`, so no wake-up gets lost.
        let mut cx = Context::from_waker(Waker::noop());
        let _written_or_later: Poll<()> = self.poll_write(&mut cx);
    }

    /// Reads what the socket has now, without waiting, and pushes on with what waits to be
    /// written. Says whether anything was read.
    pub(crate) fn read_available(&mut self) -> Result<bool, Error> {
        self.write_available();
        let mut cx = Context::from_waker(Waker::noop());
        match self.poll_read_some(&mut cx) {
            Poll::Pending => Ok(false),
            Poll::Ready(read) => read.map(|()| true),
        }
    }

    /// Whether the peer is so close that a flood can be left to gather there.
    pub(crate) fn is_close(&self) -> bool {
        gather::is_close(&self.socket)
    }

    /// Leaves messages to gather in the socket for a moment.
    pub(crate) async fn gather(&mut self) {
        self.gather.wait(&mut self.socket).await;
    }

    /// Leaves what comes in the socket for this long, or until it is so many bytes.
    pub(crate) async fn wait_for(&self, bytes: usize, patience: Duration) {
        gather::wait_for(bytes, &self.socket, patience).await;
    }

    /// Waits for the next message, writing meanwhile. Cancel-safe.
    pub(crate) async fn receive(&mut self) -> Result<Message, Error> {
        poll_fn(|cx| {
            loop {
                if let Some(message) = self.buffered()? {
                    return Poll::Ready(Ok(message));
                }
                let _written_or_later: Poll<()> = self.poll_write(cx);
                std::task::ready!(self.poll_read_some(cx))?;
            }
        })
        .await
    }

    /// Whether a message is wholly here.
    pub(crate) fn has_frame(&self) -> bool {
        self.input.has_frame()
    }

    /// Writes everything, reading while the socket takes nothing, so that a server that waits for
    /// us to read never makes both sides wait for each other. Cancel-safe.
    pub(crate) async fn flush(&mut self) -> Result<(), Error> {
        poll_fn(|cx| {
            while self.poll_write(cx).is_pending() {
                std::task::ready!(self.poll_read_some(cx))?;
            }
            Poll::Ready(Ok(()))
        })
        .await
    }

    /// Why the connection is gone: the server's own words, if they have arrived.
    fn lost(&self, error: Option<io::Error>) -> Error {
        if let Some(parting) = self.input.visit_frames(fatal_error) {
            return Error::Server(Box::new(parting));
        }
        let server = self.server.clone();
        match error {
            None => Error::Closed { server },
            Some(error) => match error.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>()) {
                Some(tls) => Error::Tls { server, reason: tls.to_string() },
                // A peer that dies without saying goodbye in TLS, too.
                None if error.kind() == io::ErrorKind::UnexpectedEof => Error::Closed { server },
                None => Error::Io { server, source: error },
            },
        }
    }

    /// Closes the stream in order, as far as the peer lets us.
    pub(crate) async fn shutdown(&mut self) {
        if let Err(error) = self.socket.shutdown().await {
            tracing::debug!(server = %self.server, %error, "closing the socket");
        }
    }
}

fn fatal_error(tag: u8, body: &[u8]) -> ControlFlow<ServerError> {
    if tag != b'E' {
        return ControlFlow::Continue(());
    }
    match decode(Frame { tag, body: Bytes::copy_from_slice(body) }) {
        Ok(Message::ErrorResponse(error)) if error.is_fatal() => ControlFlow::Break(*error),
        // Whoever takes this frame out will hear about it.
        Ok(_) | Err(_) => ControlFlow::Continue(()),
    }
}
