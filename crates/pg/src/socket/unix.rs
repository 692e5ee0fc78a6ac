use std::io;
use std::os::unix::net::UnixStream as Unwatched;
use std::path::Path;
use tokio::net::UnixStream;

/// A connection by Unix socket, which can be left alone.
///
/// The kernel wakes whoever watches such a socket for each message that comes (poll(2) knows no
/// `SO_RCVLOWAT` there). So one that is to be left alone for a moment is not watched meanwhile, and
/// is again as soon as it is used.
#[derive(Debug)]
pub(crate) struct UnixSocket(State);

#[derive(Debug)]
enum State {
    Watched(UnixStream),
    Unwatched(Unwatched),
    /// It could not be given to the runtime, or taken from it.
    Lost,
}

impl UnixSocket {
    pub(crate) async fn connect(path: &Path) -> io::Result<UnixSocket> {
        Ok(UnixSocket(State::Watched(UnixStream::connect(path).await?)))
    }

    /// Has nobody woken by what comes, until the socket is used.
    pub(crate) fn leave_alone(&mut self) {
        self.0 = match std::mem::replace(&mut self.0, State::Lost) {
            State::Watched(stream) => match stream.into_std() {
                Ok(stream) => State::Unwatched(stream),
                Err(error) => {
                    tracing::debug!(%error, "taking a unix socket from the runtime");
                    State::Lost
                }
            },
            other => other,
        };
    }

    /// The stream, watched.
    ///
    /// # Errors
    /// When the system does not let it be watched: then the connection is lost.
    pub(crate) fn stream(&mut self) -> io::Result<&mut UnixStream> {
        if let State::Unwatched(_) = self.0
            && let State::Unwatched(stream) = std::mem::replace(&mut self.0, State::Lost)
        {
            self.0 = State::Watched(UnixStream::from_std(stream)?);
        }
        match &mut self.0 {
            State::Watched(stream) => Ok(stream),
            State::Unwatched(_) | State::Lost => Err(io::ErrorKind::NotConnected.into()),
        }
    }
}
