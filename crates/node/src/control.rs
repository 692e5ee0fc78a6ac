//! The local control socket, `data_dir/control.sock`: one connection, one JSON report.

use crate::report::SiteReport;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

/// A peer has this long to take or give a report.
const EXCHANGE_MAX: Duration = Duration::from_secs(5);
/// Longest report that a client takes, in bytes.
const REPORT_BYTES_MAX: u64 = 64 << 20;

/// Where a site's control socket is.
pub fn socket_path(data_dir: &Path) -> PathBuf {
    data_dir.join("control.sock")
}

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

/// Answers every connection with a fresh report; one at a time, so that askers cannot pile up.
pub async fn serve(listener: UnixListener, report: impl Fn() -> SiteReport) {
    loop {
        let Ok((mut stream, _)) = listener.accept().await else {
            // Out of file descriptors, most likely: give others time to close some.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let text = serde_json::to_vec(&report()).unwrap_or_default();
        let answer = tokio::time::timeout(EXCHANGE_MAX, stream.write_all(&text)).await;
        if !matches!(answer, Ok(Ok(()))) {
            tracing::debug!("a status client went away");
        }
    }
}

/// Asks the node that runs in `data_dir`; `None` when none does.
pub async fn ask(data_dir: &Path) -> std::io::Result<Option<SiteReport>> {
    let mut stream = match UnixStream::connect(socket_path(data_dir)).await {
        Ok(stream) => stream,
        Err(error)
            if matches!(
                error.kind(),
                std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let mut text = Vec::new();
    let mut limited = (&mut stream).take(REPORT_BYTES_MAX);
    tokio::time::timeout(EXCHANGE_MAX, limited.read_to_end(&mut text)).await??;
    serde_json::from_slice(&text).map(Some).map_err(std::io::Error::other)
}
