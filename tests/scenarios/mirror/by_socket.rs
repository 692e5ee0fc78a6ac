//! A principal on the near end's own machine, reached by Unix socket.

use crate::mirrored::Mirrored;
use anyhow::Result;

#[test]
fn log_comes_by_a_unix_socket() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    mirrored.near.stop()?;
    let (directory, port) = (mirrored.principal.socket_dir(), mirrored.principal.port());
    let directory = directory.display().to_string().replace('/', "%2F");
    let by_socket = format!("postgres://postgres@{directory}:{port}/postgres");
    mirrored.near.replace(&mirrored.principal.url("postgres"), &by_socket)?;
    mirrored.near.start()?;
    mirrored.await_commits(50)?;
    mirrored.finish()
}
