//! The far end's server: unmodified standbys and `pg_receivewal` connect to it with a plain
//! `primary_conninfo`, as to a walsender, and get what is durable in the spool.
//!
//! There is no authentication yet, so it listens on loopback only.

mod session;
mod standbys;

pub use standbys::{Seen, StandbyReport, Standbys};

use crate::error::MirrorError;
use crate::spool::Spool;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

/// Sessions at a time; more wait in the kernel's queue.
const SESSIONS_MAX: usize = 64;
/// After the system refused a connection (no file descriptors left, for instance).
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Serves a mirror's standbys. Dropping it ends their sessions.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    local: SocketAddr,
    context: Context,
}

/// What every session needs.
#[derive(Clone, Debug)]
struct Context {
    mirror: String,
    spool: watch::Receiver<Option<Arc<Spool>>>,
    standbys: Arc<Standbys>,
}

impl Server {
    /// Listens at `address`, `host:port` on loopback; port 0 takes any.
    ///
    /// # Errors
    /// [`MirrorError::Listen`].
    pub async fn bind(
        address: &str,
        mirror: &str,
        spool: watch::Receiver<Option<Arc<Spool>>>,
        standbys: Arc<Standbys>,
    ) -> Result<Server, MirrorError> {
        let failed = |what: String| MirrorError::Listen { address: address.to_owned(), what };
        // Not the name again: it may lead elsewhere the next time.
        let checked = loopback(address).map_err(failed)?;
        let listener = TcpListener::bind(&checked[..]).await.map_err(|error| {
            failed(format!("{error}. Choose another address, or stop what uses it"))
        })?;
        let local = listener.local_addr().map_err(|error| failed(error.to_string()))?;
        let context = Context { mirror: mirror.to_owned(), spool, standbys };
        Ok(Server { listener, local, context })
    }

    /// Where it listens.
    pub fn local_address(&self) -> SocketAddr {
        self.local
    }

    /// Takes connections until it is dropped.
    pub async fn run(self) {
        let permits = Arc::new(Semaphore::new(SESSIONS_MAX));
        // Ends the sessions with this task.
        let mut sessions = JoinSet::new();
        loop {
            // Never closed.
            let Ok(permit) = permits.clone().acquire_owned().await else { return };
            while sessions.try_join_next().is_some() {}
            match self.listener.accept().await {
                Ok((socket, peer)) => {
                    let context = self.context.clone();
                    sessions.spawn(async move {
                        if let Err(error) = session::serve(socket, peer, context).await {
                            tracing::info!(%peer, "a standby's session ended: {error}");
                        }
                        drop(permit);
                    });
                }
                Err(error) => {
                    tracing::warn!("cannot accept a standby's connection: {error}");
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                }
            }
        }
    }
}

/// Whether an address is one that only this machine reaches.
///
/// # Errors
/// What is wrong with it.
pub fn check_loopback(address: &str) -> Result<(), String> {
    loopback(address).map(|_| ())
}

fn loopback(address: &str) -> Result<Vec<SocketAddr>, String> {
    let resolved: Vec<SocketAddr> = address
        .to_socket_addrs()
        .map_err(|error| format!("it is no host:port ({error})"))?
        .collect();
    for address in &resolved {
        if !address.ip().is_loopback() {
            return Err(format!(
                "{} is reached from elsewhere, and standbys are not asked for a password yet. \
                 Listen on 127.0.0.1 or [::1], and let a standby on another machine come through \
                 a tunnel",
                address.ip()
            ));
        }
    }
    Ok(resolved)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_will_do() {
        for address in ["127.0.0.1:5433", "[::1]:5433", "127.8.0.1:0"] {
            assert_eq!(check_loopback(address), Ok(()), "{address}");
        }
        for address in ["0.0.0.0:5433", "[::]:5433", "192.0.2.1:1", "127.0.0.1", ""] {
            assert!(check_loopback(address).is_err(), "{address}");
        }
    }
}
