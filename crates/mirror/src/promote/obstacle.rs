//! Log that a standby would have to replay, and cannot with the settings that it has.

use super::{PromoteError, View};
use crate::spool::{Spool, ToReplay};
use farshore_model::Lsn;
use std::sync::Arc;

/// Settings that are lower than what the log asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TooLow {
    /// The record that asks for them begins here or later.
    at: Lsn,
    /// Name, value, and what it has to be.
    settings: Vec<(&'static str, i32, i32)>,
}

impl std::fmt::Display for TooLow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let each =
            |(name, has, needs): &(&str, i32, i32)| format!("{name} {has} instead of {needs}");
        let lower = self.settings.iter().map(each).collect::<Vec<_>>().join(", ");
        let each =
            |(name, _, needs): &(&str, i32, i32)| format!("ALTER SYSTEM SET {name} = {needs}");
        let sql = self.settings.iter().map(each).collect::<Vec<_>>().join("; ");
        write!(
            f,
            "its settings are lower than its principal's ({lower}): PostgreSQL pauses its replay at {}, \
             and shuts it down if it is promoted or resumed there (pg_wal_replay_resume()). There: \
             {sql}; restart it, and run this again",
            self.at
        )
    }
}

/// What of the log that it has, and has not replayed, it cannot replay as it is; and whether the
/// record that it comes to next is known. Of log that is here.
pub(super) async fn obstacle(
    spool: &Arc<Spool>,
    view: &View,
    spool_end: Lsn,
) -> (Option<TooLow>, bool) {
    let (from, end) = (view.replayed, view.received.max(view.replayed).min(spool_end));
    if from >= end {
        return (None, true);
    }
    let reading = spool.clone();
    let found = match crate::keep::blocking(move || reading.to_replay(from, end)).await {
        Ok(found) => found,
        Err(error) => {
            tracing::warn!(%error, "what the standby has still to replay is not known");
            ToReplay { needs: None, is_next_known: false }
        }
    };
    let too_low = found.needs.and_then(|(at, needed)| {
        let settings = view.settings.lower_than(needed);
        (!settings.is_empty()).then_some(TooLow { at, settings })
    });
    (too_low, found.is_next_known)
}

/// Whether a promotion would set its replay going: that is asked before anything is decided, as the
/// spool is closed for good then.
pub(super) async fn check(
    spool: &Arc<Spool>,
    (server, view): (&str, &View),
    spool_end: Lsn,
    allow_data_loss: bool,
) -> Result<(), PromoteError> {
    let server = server.to_owned();
    match obstacle(spool, view, spool_end).await {
        // Whatever may be lost: it would shut down, and not be promoted.
        (Some(too_low), _) => Err(PromoteError::TooLow { server, too_low }),
        (None, false) if view.replay_is_paused && !allow_data_loss => {
            Err(PromoteError::PausedUnknown { server, at: view.replayed })
        }
        (None, _) => Ok(()),
    }
}
