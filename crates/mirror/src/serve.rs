//! The far end's server: unmodified standbys and `pg_receivewal` connect to it with a plain
//! `primary_conninfo`, as to a walsender, and get what is durable in the spool. `pg_basebackup` gets
//! the principal's files, by way of the near end.
//!
//! ```text
//! access    who may connect, and how it shows that: TLS and a password
//! scram     the server's side of SCRAM-SHA-256; pure
//! session   one standby's session
//! standbys  those that are connected, and how far they have come
//! ```

mod access;
mod scram;
mod session;
mod standbys;

pub use access::Access;
pub use standbys::{Seen, StandbyReport, Standbys};

use crate::error::MirrorError;
use crate::seed::BackupRequest;
use crate::spool::Spool;
use access::Door;
use farshore_link::Session;
use futures_util::future::BoxFuture;
use session::SessionError;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

/// Sessions at a time; more are turned away.
const SESSIONS_MAX: usize = 64;
/// Connections at a time that were not let in yet; more wait in the kernel's queue. Strangers take
/// no session's place.
const KNOCKING_MAX: usize = 256;
/// After the system refused a connection (no file descriptors left, for instance).
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// The way to the principal's files, by a mirror's near end.
pub trait NearEnd: Send + Sync + std::fmt::Debug {
    /// Opens a session for a base backup ([`pass`](crate::seed::pass) is the other side), or says
    /// why there is none.
    fn open_backup(&self, request: BackupRequest) -> BoxFuture<'_, Result<Session, String>>;
}

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
    near_end: Arc<dyn NearEnd>,
    door: Arc<Door>,
    sessions: Arc<Semaphore>,
}

impl Server {
    /// Listens at `address`, `host:port`; port 0 takes any. Reads the files that `access` names.
    ///
    /// # Errors
    /// [`MirrorError::Listen`].
    pub async fn bind(
        address: &str,
        access: &Access,
        mirror: &str,
        spool: watch::Receiver<Option<Arc<Spool>>>,
        standbys: Arc<Standbys>,
        near_end: Arc<dyn NearEnd>,
    ) -> Result<Server, MirrorError> {
        let failed = |what: String| MirrorError::Listen { address: address.to_owned(), what };
        // Not the name again: it may lead elsewhere the next time.
        let checked = access.addresses(address).map_err(failed)?;
        let door = Arc::new(access.load().map_err(failed)?);
        let sessions = Arc::new(Semaphore::new(SESSIONS_MAX));
        let listener = TcpListener::bind(&checked[..]).await.map_err(|error| {
            failed(format!("{error}. Choose another address, or stop what uses it"))
        })?;
        let local = listener.local_addr().map_err(|error| failed(error.to_string()))?;
        let mirror = mirror.to_owned();
        let context = Context { mirror, spool, standbys, near_end, door, sessions };
        Ok(Server { listener, local, context })
    }

    /// Where it listens.
    pub fn local_address(&self) -> SocketAddr {
        self.local
    }

    /// Takes connections until it is dropped.
    pub async fn run(self) {
        let knocking = Arc::new(Semaphore::new(KNOCKING_MAX));
        // Ends the sessions with this task.
        let mut sessions = JoinSet::new();
        loop {
            // Never closed.
            let Ok(permit) = knocking.clone().acquire_owned().await else { return };
            while sessions.try_join_next().is_some() {}
            match self.listener.accept().await {
                Ok((socket, peer)) => {
                    let context = self.context.clone();
                    sessions.spawn(async move {
                        let mirror = context.mirror.clone();
                        match session::serve(socket, peer, context, permit).await {
                            Ok(()) => {}
                            Err(error @ SessionError::Denied(_)) => {
                                tracing::warn!(%mirror, %peer, "not let in: {error}");
                            }
                            Err(error) => {
                                tracing::info!(%mirror, %peer, "a standby's session ended: {error}");
                            }
                        }
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
