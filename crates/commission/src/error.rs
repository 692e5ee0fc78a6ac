use std::io;
use std::path::PathBuf;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It was asked to stop. What it had made is gone.
    #[error("interrupted; nothing was left behind")]
    Interrupted,
    /// A file or folder does not do what was asked of it.
    #[error("cannot {what} {}: {source}", path.display())]
    File {
        /// As in "cannot … PATH".
        what: &'static str,
        /// Which.
        path: PathBuf,
        /// The system's words.
        source: io::Error,
    },
    /// It would not be safe, or make no sense; with what to do instead.
    #[error("{0}")]
    Refused(String),
    /// A server did not do what was asked of it.
    #[error("cannot {what} on {server}: {source}")]
    Server {
        /// As in "cannot … on SERVER".
        what: &'static str,
        /// Without secrets.
        server: String,
        /// The server's or the connection's words.
        source: farshore_pg::Error,
    },
    /// A thread that measures could not be started.
    #[error("cannot start {wanted} threads: {source}; ask for fewer outstanding writes or clients")]
    Threads {
        /// How many were wanted.
        wanted: u32,
        /// The system's words.
        source: io::Error,
    },
    /// A file is not a report, or one of another kind.
    #[error("{}: {reason}", path.display())]
    Report {
        /// Which file.
        path: PathBuf,
        /// What is wrong, and what would be right.
        reason: String,
    },
}

impl Error {
    /// For `map_err`: what was tried on `path`.
    pub(crate) fn file(
        what: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Error {
        let path = path.into();
        move |source| Error::File { what, path, source }
    }
}
