//! The local control socket, `data_dir/control.sock`: one connection, one request, one answer.
//!
//! The request is one line of JSON. The answer is lines, each behind a sign: `+` a line of a
//! listing, `=` the outcome, which ends it, `!` why it was refused, which ends it too.

use crate::report::SiteReport;
use serde::{Deserialize, Serialize};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader, BufWriter};
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

/// A peer has this long to send its request.
const PEER_MAX: Duration = Duration::from_secs(30);
/// A peer has this long to take the next lines: somebody may read them page by page.
const READER_MAX: Duration = Duration::from_secs(600);
/// Longest request, in bytes.
const REQUEST_BYTES_MAX: u64 = 64 << 10;
/// Longest line of an answer that a client takes, in bytes.
const LINE_BYTES_MAX: u64 = 2 << 30;
/// Requests that are answered side by side.
const PEERS_MAX: usize = 16;

/// What is asked of a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "verb")]
pub enum Request {
    /// The site's state.
    Status,
    /// Halt a subscription until it is resumed.
    Pause {
        /// Which.
        subscription: String,
    },
    /// Let an agent run again.
    Resume {
        /// Which subscription.
        subscription: Option<String>,
        /// Or which publication's capture.
        publication: Option<String>,
    },
    /// Leave a transaction out.
    Skip {
        /// Whose.
        subscription: String,
        /// End of its commit record.
        lsn: String,
    },
    /// Empty tables on the target and copy them anew.
    Resync {
        /// Whose.
        subscription: String,
        /// One table, or all.
        table: Option<String>,
    },
    /// Note that a target was restored from a backup.
    Initialise {
        /// Whose.
        subscription: String,
        /// Where the backup stands, if the target cannot tell.
        lsn: Option<String>,
        /// The subscription whose target it is a copy of, if it is.
        #[serde(default)]
        copied_from: Option<String>,
    },
    /// Post a tracer token and tell when it came where, as JSON.
    Tracer {
        /// Of which publication.
        publication: String,
        /// How long it is waited for.
        seconds: u64,
    },
    /// Compare tables with the publisher's.
    Validate {
        /// Whose.
        subscription: String,
        /// `schema.table` on the publisher; all, where there is none.
        tables: Vec<String>,
        /// As JSON lines.
        json: bool,
    },
    /// List stored changes.
    Browse(BrowseRequest),
    /// Let a mirror that was dropped go on, or its far end ask again that has stopped.
    ResumeMirror {
        /// Which mirror.
        mirror: String,
    },
    /// Keep a mirror's log for a standby that is being made.
    Reserve {
        /// Which mirror.
        mirror: String,
        /// The slot that the standby will use.
        slot: String,
    },
    /// Drop a slot in a mirror's spool whose standby was given up.
    DropSlot {
        /// Which mirror.
        mirror: String,
        /// Which slot.
        slot: String,
    },
    /// Make a mirror's standby a server of its own.
    Promote {
        /// Which mirror.
        mirror: String,
        /// The standby, if it is not the configured one.
        standby: Option<String>,
        /// Also without log that it cannot be given.
        allow_data_loss: bool,
        /// In the place of this one, which was chosen before.
        #[serde(default)]
        instead_of: Option<String>,
        /// Give up after so many seconds without progress.
        wait_seconds: u64,
    },
}

/// Which stored changes are listed, as typed.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct BrowseRequest {
    /// Whose log.
    pub publication: String,
    /// Position or time.
    pub from: Option<String>,
    /// Position or time.
    pub to: Option<String>,
    /// `schema.table`.
    pub table: Option<String>,
    /// Changes at most; 0 for all.
    pub limit: u64,
    /// As JSON lines.
    pub json: bool,
    /// Instead of changes, the groups that this subscription would apply them in.
    #[serde(default)]
    pub schedule: Option<String>,
}

/// Where a site's control socket is.
pub fn socket_path(data_dir: &Path) -> PathBuf {
    data_dir.join("control.sock")
}

/// Why the node could not be asked, for a person, and `who` is to ask it where this user may not.
pub fn cannot_ask(data_dir: &Path, error: &std::io::Error, who: &str) -> String {
    let what = format!("cannot ask the node in {}: {error}", data_dir.display());
    if error.kind() == std::io::ErrorKind::PermissionDenied {
        return format!("{what}. Run this as {who}");
    }
    what
}

/// Who may talk to a node: its data folder is open to them.
pub const WHO_MAY_ASK: &str = "the user that the node runs as, or as root";

/// Listens on the control socket. The data folder's lock is held, so a socket that is there
/// already belongs to a node that died.
pub fn listen(data_dir: &Path) -> std::io::Result<UnixListener> {
    let path = socket_path(data_dir);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    UnixListener::bind(path)
}

/// Writes an answer's lines.
pub struct Answer {
    out: BufWriter<OwnedWriteHalf>,
    /// A line was not written to its end: nothing may come behind it.
    is_cut: bool,
}

impl Answer {
    /// A line of a listing.
    ///
    /// # Errors
    /// The client has gone, or takes nothing.
    pub async fn line(&mut self, line: &str) -> std::io::Result<()> {
        self.signed(b'+', line).await
    }

    /// A line that the client is to see now.
    ///
    /// # Errors
    /// The client has gone, or takes nothing.
    pub async fn progress(&mut self, line: &str) -> std::io::Result<()> {
        self.line(line).await?;
        tokio::time::timeout(READER_MAX, self.out.flush()).await?
    }

    async fn signed(&mut self, sign: u8, line: &str) -> std::io::Result<()> {
        self.is_cut = true;
        let write = async {
            self.out.write_u8(sign).await?;
            // A message may have line ends; a listing's lines have none.
            self.out.write_all(line.replace('\n', " ").as_bytes()).await?;
            self.out.write_u8(b'\n').await
        };
        tokio::time::timeout(READER_MAX, write).await??;
        self.is_cut = false;
        Ok(())
    }

    async fn end(mut self, outcome: Result<String, String>) -> std::io::Result<()> {
        if self.is_cut {
            return Ok(());
        }
        match outcome {
            Ok(text) => self.signed(b'=', &text).await?,
            Err(text) => self.signed(b'!', &text).await?,
        }
        tokio::time::timeout(READER_MAX, self.out.flush()).await?
    }
}

/// Answers requests with `answer`, a bounded number side by side.
pub async fn serve<F, Fut>(listener: UnixListener, answer: F)
where
    F: Fn(Request, Answer) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = (Answer, Result<String, String>)> + Send,
{
    let answer = Arc::new(answer);
    let peers = Arc::new(Semaphore::new(PEERS_MAX));
    loop {
        let Ok(permit) = peers.clone().acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            // Out of file descriptors, most likely: give others time to close some.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let answer = answer.clone();
        tokio::spawn(async move {
            if let Err(error) = serve_one(stream, answer.as_ref()).await {
                tracing::debug!(%error, "a control client went away");
            }
            drop(permit);
        });
    }
}

async fn serve_one<F, Fut>(stream: UnixStream, answer: &F) -> std::io::Result<()>
where
    F: Fn(Request, Answer) -> Fut,
    Fut: Future<Output = (Answer, Result<String, String>)>,
{
    let (input, output) = stream.into_split();
    let mut line = String::new();
    let mut input = BufReader::new(input.take(REQUEST_BYTES_MAX));
    tokio::time::timeout(PEER_MAX, input.read_line(&mut line)).await??;
    let out = Answer { out: BufWriter::new(output), is_cut: false };
    let (out, outcome) = match serde_json::from_str(&line) {
        Ok(request) => {
            // They may read or wait for long without a line that would fail.
            let only_tells = matches!(
                request,
                Request::Browse(_) | Request::Tracer { .. } | Request::Validate { .. }
            );
            tokio::select! {
                answered = answer(request, out) => answered,
                () = end_of(&mut input), if only_tells => {
                    return Err(std::io::ErrorKind::BrokenPipe.into());
                }
            }
        }
        Err(error) => (out, Err(format!("the node does not understand this request: {error}"))),
    };
    out.end(outcome).await
}

/// Until the client has gone: it sends nothing behind its request.
async fn end_of(input: &mut (impl AsyncRead + Unpin)) {
    let mut more = [0; 64];
    while input.read(&mut more).await.is_ok_and(|read| read > 0) {}
}

/// Asks the node that runs in `data_dir` for the site's state; `None` when none does.
///
/// # Errors
/// The socket's.
pub async fn status(data_dir: &Path) -> std::io::Result<Option<SiteReport>> {
    let asked = tokio::time::timeout(PEER_MAX, ask(data_dir, &Request::Status, |_| Ok(())));
    match asked.await?? {
        Asked::Done(text) => serde_json::from_str(&text).map(Some).map_err(std::io::Error::other),
        Asked::Refused(why) => Err(std::io::Error::other(why)),
        Asked::NotRunning => Ok(None),
    }
}

/// How a request went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// The outcome.
    Done(String),
    /// Why not.
    Refused(String),
    /// No node runs on this data folder.
    NotRunning,
}

/// Asks the node that runs in `data_dir`. `line` takes the lines of a listing.
///
/// # Errors
/// The socket's.
pub async fn ask(
    data_dir: &Path,
    request: &Request,
    mut line: impl FnMut(&str) -> std::io::Result<()>,
) -> std::io::Result<Asked> {
    let stream = match UnixStream::connect(socket_path(data_dir)).await {
        Ok(stream) => stream,
        Err(error)
            if matches!(
                error.kind(),
                std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(Asked::NotRunning);
        }
        Err(error) => return Err(error),
    };
    let (input, mut output) = stream.into_split();
    let mut text = serde_json::to_string(request).map_err(std::io::Error::other)?;
    text.push('\n');
    tokio::time::timeout(PEER_MAX, output.write_all(text.as_bytes())).await??;
    let mut input = BufReader::new(input);
    let mut answer = Vec::new();
    loop {
        answer.clear();
        // Work on a target may take long; a node that dies closes the socket.
        (&mut input).take(LINE_BYTES_MAX).read_until(b'\n', &mut answer).await?;
        let text = String::from_utf8_lossy(&answer);
        // A line without its end is of a node that is gone, or does not wait any longer.
        let text = text.strip_suffix('\n').unwrap_or_default();
        match text.split_at_checked(1) {
            Some(("+", rest)) => line(rest)?,
            Some(("=", rest)) => return Ok(Asked::Done(rest.to_owned())),
            Some(("!", rest)) => return Ok(Asked::Refused(rest.to_owned())),
            _ => {
                let what = "the node ended before it had answered, or nobody read its answer for \
                            ten minutes";
                return Err(std::io::Error::new(std::io::ErrorKind::UnexpectedEof, what));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{PEERS_MAX, Request, WHO_MAY_ASK, ask, cannot_ask, listen, serve, socket_path};
    use std::io::{Error, ErrorKind};
    use std::path::Path;
    use std::time::Duration;
    use tokio::io::AsyncWriteExt as _;
    use tokio::net::UnixStream;

    #[test]
    fn who_may_not_ask_is_told_who_may() {
        let said = |kind: ErrorKind| cannot_ask(Path::new("/d"), &Error::from(kind), WHO_MAY_ASK);
        let denied = said(ErrorKind::PermissionDenied);
        assert!(denied.starts_with("cannot ask the node in /d: "), "{denied}");
        assert!(denied.ends_with(". Run this as the user that the node runs as, or as root"));
        assert!(!said(ErrorKind::TimedOut).contains("Run this"));
    }

    /// Who waits for a token or reads a listing and goes away keeps nobody out.
    #[tokio::test]
    async fn a_client_that_has_gone_makes_room() {
        let folder = tempfile::tempdir().unwrap();
        let listener = listen(folder.path()).unwrap();
        let node = tokio::spawn(serve(listener, |request, answer| async move {
            if matches!(request, Request::Tracer { .. }) {
                std::future::pending::<()>().await;
            }
            (answer, Ok("done".to_owned()))
        }));
        let waits = Request::Tracer { publication: "p".to_owned(), seconds: 600 };
        let mut text = serde_json::to_string(&waits).unwrap();
        text.push('\n');
        for _ in 0..PEERS_MAX {
            let mut client = UnixStream::connect(socket_path(folder.path())).await.unwrap();
            client.write_all(text.as_bytes()).await.unwrap();
        }
        let asked = ask(folder.path(), &Request::Status, |_| Ok(()));
        let asked = tokio::time::timeout(Duration::from_secs(20), asked).await;
        assert!(asked.expect("an answer").is_ok());
        node.abort();
    }
}
