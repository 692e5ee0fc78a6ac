//! The way from a mirror's far end to its near end: over a link, or, where the mirror is direct,
//! within this process.

use super::NearAgent;
use crate::sites::protocol::Wanted;
use farshore_link::{Dialer, LinkError, Session};
use farshore_mirror::seed::BackupRequest;
use farshore_mirror::serve::NearEnd;
use farshore_store::BoxFuture;
use std::sync::Arc;

/// Messages between two ends in one process that wait to be taken.
const MESSAGES_MAX: usize = 4;

/// Where a mirror's near end is.
pub(crate) enum NearSide {
    /// At another site.
    Link(Dialer),
    /// Here: log comes straight from the principal.
    Direct {
        /// The near end.
        near: Arc<NearAgent>,
        /// This site.
        site: String,
    },
}

impl NearSide {
    /// Opens a session for what is `wanted`, and has `far` talk in it. A near end that is here talks
    /// in the same task: what one says to the other wakes no other thread.
    ///
    /// # Errors
    /// No session.
    pub async fn talk<T, Talking: Future<Output = T>>(
        &self,
        wanted: Wanted,
        far: impl FnOnce(Session) -> Talking,
    ) -> Result<T, LinkError> {
        match self {
            NearSide::Link(dialer) => {
                let text = serde_json::to_vec(&wanted).unwrap_or_default();
                Ok(far(dialer.open(&text).await?).await)
            }
            NearSide::Direct { near, site } => {
                let (here, there) = Session::within(site, MESSAGES_MAX);
                let (answered, told) = tokio::join!(near.answer(there, wanted), far(here));
                // The far end is told why the near end goes, and says it, mostly.
                if let Err(error) = answered {
                    tracing::debug!(mirror = %near.name(), "the near end's session ended: {error}");
                }
                Ok(told)
            }
        }
    }
}

impl std::fmt::Debug for NearSide {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NearSide::Link(dialer) => f.debug_tuple("Link").field(dialer).finish(),
            NearSide::Direct { near, .. } => f.debug_tuple("Direct").field(&near.name()).finish(),
        }
    }
}

impl NearEnd for NearSide {
    fn open_backup(&self, request: BackupRequest) -> BoxFuture<'_, Result<Session, String>> {
        let wanted = Wanted::Backup(request);
        Box::pin(async move {
            match self {
                NearSide::Link(dialer) => {
                    let text = serde_json::to_vec(&wanted).unwrap_or_default();
                    dialer.open(&text).await.map_err(|error| error.to_string())
                }
                NearSide::Direct { near, site } => {
                    let (here, there) = Session::within(site, MESSAGES_MAX);
                    let near = near.clone();
                    // It ends with the session, whose other side the client's has.
                    tokio::spawn(async move {
                        if let Err(error) = near.answer(there, wanted).await {
                            tracing::warn!(mirror = %near.name(), "base backup ended: {error}");
                        }
                    });
                    Ok(here)
                }
            }
        })
    }
}
