//! How far the log was durable is noted now and then, so that damage is told from a torn end.

use super::FarAgent;
use std::sync::Arc;
use std::time::Duration;

/// What became durable since the last note, and is damaged, passes for the torn end of a crash. A
/// look reads what came since the one before.
const NOTE_EVERY: Duration = Duration::from_secs(5);

impl FarAgent {
    pub(super) async fn note_durable(self: Arc<Self>) {
        let mut every = tokio::time::interval(NOTE_EVERY);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            every.tick().await;
            let Some(spool) = self.far.spool() else { continue };
            match tokio::task::spawn_blocking(move || spool.note_durable()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!(mirror = %self.config.name, "{error}"),
                Err(_) => tracing::error!(mirror = %self.config.name, "noting died"),
            }
        }
    }
}
