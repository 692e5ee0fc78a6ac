//! How much log a principal keeps for a mirror: said when it is much, and bounded if that is wanted,
//! so that a far site that stays away does not fill the principal's disk.

use super::NearAgent;
use crate::agents::lock;
use farshore_pg::{Config, Connection, Error, Mode};
use std::time::Duration;
use tokio::sync::watch;

/// How often the principal is asked.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// The bounds, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub warn_behind: u64,
    pub drop_behind: Option<u64>,
}

/// What was seen last.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// Log that the principal keeps for the mirror's slot, in bytes.
    pub kept_bytes: Option<u64>,
    /// Why the slot was dropped.
    pub dropped: Option<String>,
}

impl Bounds {
    /// A word on a mirror that is far behind.
    pub fn warning(&self, kept_bytes: Option<u64>) -> Option<String> {
        let kept = kept_bytes.filter(|kept| *kept > self.warn_behind)?;
        Some(format!(
            "the principal keeps {kept} bytes of log for it, more than warn_behind ({}): the far \
             end is away, or the line is too narrow for what is written",
            self.warn_behind
        ))
    }
}

impl NearAgent {
    /// Looks until `stop` turns true.
    pub async fn watch(&self, mut stop: watch::Receiver<bool>) {
        let mut every = tokio::time::interval(LOOK_EVERY);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => return,
                _ = every.tick() => {}
            }
            match self.look().await {
                Ok(()) => {}
                // The mirror itself tells of a principal that is away.
                Err(error) => tracing::debug!(mirror = %self.near.name, "{error}"),
            }
        }
    }

    async fn look(&self) -> Result<(), Error> {
        let (name, slot) = (&self.near.name, &self.near.slot);
        let kept = kept_bytes(&self.near.principal, slot).await?;
        let was_warned = {
            let mut seen = lock(&self.seen);
            let before = self.bounds.warning(seen.kept_bytes);
            seen.kept_bytes = kept;
            before.is_some()
        };
        if let Some(warning) = self.bounds.warning(kept).filter(|_| !was_warned) {
            tracing::warn!(mirror = %name, "{warning}");
        }
        let Some((kept, most)) =
            kept.zip(self.bounds.drop_behind).filter(|(kept, most)| kept > most)
        else {
            return Ok(());
        };
        // Who streams holds the slot.
        self.end_session.send_modify(|count| *count += 1);
        let mut connection =
            Connection::connect(&self.near.principal, Mode::PhysicalReplication).await?;
        connection.drop_slot(slot, true).await?;
        connection.close().await;
        let what = format!(
            "its slot \"{slot}\" was dropped: the principal kept {kept} bytes of log for it, more \
             than drop_behind ({most}). What of that is gone cannot be sent any more; when the far \
             end says so, remove its spool and seed the standbys anew. Commits that wait for it \
             wait until synchronous_standby_names does not name it"
        );
        tracing::error!(mirror = %name, "{what}");
        let mut seen = lock(&self.seen);
        seen.dropped = Some(what);
        seen.kept_bytes = None;
        Ok(())
    }
}

/// `None` if there is no such slot, or it keeps nothing.
async fn kept_bytes(principal: &Config, slot: &str) -> Result<Option<u64>, Error> {
    let mut connection = Connection::connect(principal, Mode::Sql).await?;
    let sql = "SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() \
               ELSE pg_current_wal_lsn() END - restart_lsn)::int8 \
               FROM pg_replication_slots WHERE slot_name = $1";
    let rows = connection.query(sql, &[Some(slot)]).await?;
    connection.close().await;
    let kept = rows.first().and_then(|row| row.get(0));
    Ok(kept.and_then(|kept| kept.parse::<i64>().ok()).map(|kept| kept.max(0).unsigned_abs()))
}
