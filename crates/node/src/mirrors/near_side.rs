//! The way from a mirror's far end to its near end: over a link, or, where the mirror is direct,
//! within this process.

use super::NearAgent;
use crate::sites::protocol::Wanted;
use farshore_link::{Dialer, LinkError, Session};
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
