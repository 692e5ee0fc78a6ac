use crate::Error;
use crate::read_buffer::{KEPT_BYTES_MAX, ReadBuffer};
use crate::socket::Socket;
use bytes::{Buf, Bytes, BytesMut};
use farshore_wire::backend::{Frame, Message, ServerError, decode};
use std::future::poll_fn;
use std::io;
use std::ops::ControlFlow;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
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
}

impl Transport {
    pub(crate) fn new(server: String, socket: Socket) -> Transport {
        let (input, output) = (ReadBuffer::new(), BytesMut::new());
        Transport { server, socket, input, output, needs_flush: false }
    }

    /// Writes until everything is on the wire. `Pending` only if the socket takes no more now.
    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.output.is_empty() {
            match Pin::new(&mut self.socket).poll_write(cx, &self.output)? {
                Poll::Ready(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(written) => {
                    self.output.advance(written);
                    self.needs_flush = true;
                }
                Poll::Pending => return Poll::Pending,
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

    /// Reads what the socket has now, without waiting, and pushes on with what waits to be
    /// written. Says whether anything was read.
    pub(crate) fn read_available(&mut self) -> Result<bool, Error> {
        // Nobody is parked on this socket while we hold `&mut self`, so no wake-up gets lost.
        let mut cx = Context::from_waker(Waker::noop());
        if let Poll::Ready(Err(error)) = self.poll_write(&mut cx) {
            let lost = self.lost_while_writing(error);
            return if self.has_frame() { Ok(true) } else { Err(lost) };
        }
        match self.poll_read(&mut cx) {
            Poll::Pending => Ok(false),
            Poll::Ready(Ok(0)) => Err(self.lost(None)),
            Poll::Ready(Ok(_)) => Ok(true),
            Poll::Ready(Err(error)) => Err(self.lost(Some(error))),
        }
    }

    /// Waits for the next message, writing meanwhile. Cancel-safe.
    pub(crate) async fn receive(&mut self) -> Result<Message, Error> {
        poll_fn(|cx| {
            loop {
                if let Some(message) = self.buffered()? {
                    return Poll::Ready(Ok(message));
                }
                if let Poll::Ready(Err(error)) = self.poll_write(cx) {
                    let lost = self.lost_while_writing(error);
                    if self.has_frame() {
                        continue;
                    }
                    return Poll::Ready(Err(lost));
                }
                match std::task::ready!(self.poll_read(cx)) {
                    Ok(0) => return Poll::Ready(Err(self.lost(None))),
                    Ok(_) => {}
                    Err(error) => return Poll::Ready(Err(self.lost(Some(error)))),
                }
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
            loop {
                match self.poll_write(cx) {
                    Poll::Ready(Ok(())) => return Poll::Ready(Ok(())),
                    Poll::Ready(Err(error)) => {
                        return Poll::Ready(Err(self.lost_while_writing(error)));
                    }
                    Poll::Pending => {}
                }
                match std::task::ready!(self.poll_read(cx)) {
                    Ok(0) => return Poll::Ready(Err(self.lost(None))),
                    Ok(_) => {}
                    Err(error) => return Poll::Ready(Err(self.lost(Some(error)))),
                }
            }
        })
        .await
    }

    /// A write fails before the server's parting words have been read: take them in first. They
    /// stay in the buffer for whoever receives them.
    fn lost_while_writing(&mut self, error: io::Error) -> Error {
        self.output.clear();
        self.needs_flush = false;
        let mut cx = Context::from_waker(Waker::noop());
        while let Poll::Ready(Ok(1..)) = self.poll_read(&mut cx) {}
        self.lost(Some(error))
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
