//! How much log a principal keeps for a mirror: said when it is much, and bounded if that is wanted,
//! so that a far site that stays away or is slow does not fill the principal's disk.

use super::NearAgent;
use super::dropped::DropNote;
use crate::agents::lock;
use crate::config::SiteConfig;
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
    /// Why the mirror was dropped; as its note says.
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
        let looking = async {
            loop {
                every.tick().await;
                if let Err(error) = self.look().await {
                    // The mirror itself tells of a principal that is away.
                    tracing::debug!(mirror = %self.near.name, "{error}");
                }
            }
        };
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => {}
            () = looking => {}
        }
    }

    async fn look(&self) -> Result<(), Error> {
        let (name, slot) = (&self.near.name, &self.near.slot);
        let kept = kept_bytes(&self.near.principal, slot).await?;
        let _turn = self.dropping.lock().await;
        let (was_warned, is_dropped) = {
            let mut seen = lock(&self.seen);
            let before = self.bounds.warning(seen.kept_bytes);
            seen.kept_bytes = kept;
            (before.is_some(), seen.dropped.is_some())
        };
        if is_dropped {
            return self.drop_slot().await;
        }
        if let Some(warning) = self.bounds.warning(kept).filter(|_| !was_warned) {
            tracing::warn!(mirror = %name, "{warning}");
        }
        let Some((kept, most)) =
            kept.zip(self.bounds.drop_behind).filter(|(kept, most)| kept > most)
        else {
            return Ok(());
        };
        let why = format!(
            "it was dropped, and stays so: the principal kept {kept} bytes of log for its slot \
             \"{slot}\", more than drop_behind ({most}). Commits that wait for it wait until \
             synchronous_standby_names does not name it. To let it go on: farshore mirror resume \
             SITE.toml {name}, at the near end. If the principal has dropped log that the far end \
             lacks, both ends say so then: remove the spool there and seed the standbys anew"
        );
        let (note, text) = (self.note.clone(), why.clone());
        // Before the slot goes: a node that dies in between goes on with dropping it.
        let noted = tokio::task::spawn_blocking(move || note.write(&text)).await;
        if let Ok(Err(error)) = noted {
            tracing::error!(mirror = %name, "that it is dropped is forgotten at a restart: {error}");
        }
        tracing::error!(mirror = %name, "{why}");
        lock(&self.seen).dropped = Some(why);
        // Who streams holds the slot.
        self.end_session.send_modify(|count| *count += 1);
        self.drop_slot().await
    }

    /// Drops the slot of a mirror that was dropped, if it is there.
    async fn drop_slot(&self) -> Result<(), Error> {
        let mut connection =
            Connection::connect(&self.near.principal, Mode::PhysicalReplication).await?;
        // In use: by a session of a moment ago, which lets go, or by somebody else. Either way it is
        // looked at again soon.
        match connection.drop_slot(&self.near.slot, false).await {
            Ok(()) => {
                tracing::warn!(mirror = %self.near.name, slot = %self.near.slot, "dropped the slot");
            }
            // undefined_object
            Err(error) if error.sqlstate() == Some("42704") => {}
            Err(error) => return Err(error),
        }
        connection.close().await;
        lock(&self.seen).kept_bytes = None;
        Ok(())
    }

    /// Lets a mirror that was dropped go on when its far end asks next.
    ///
    /// # Errors
    /// Why not, for a person.
    pub async fn resume(&self) -> Result<String, String> {
        let name = &self.near.name;
        let _turn = self.dropping.lock().await;
        let note = self.note.clone();
        tokio::task::spawn_blocking(move || note.remove())
            .await
            .map_err(|_| "removing the note died".to_owned())??;
        if lock(&self.seen).dropped.take().is_none() {
            return Ok(format!("mirror \"{name}\" was not dropped: nothing was changed"));
        }
        tracing::info!(mirror = %name, "resumed");
        Ok(resumed_text(name))
    }
}

/// The same where no node runs.
///
/// # Errors
/// Why not, for a person.
pub(crate) fn resume_without_node(site: &SiteConfig, name: &str) -> Result<String, String> {
    if !site.mirrors.near.iter().any(|mirror| mirror.name == name) {
        return Err(format!("the site file has no near end of a mirror \"{name}\""));
    }
    if !DropNote::of(&site.data_dir, name).remove()? {
        return Ok(format!("mirror \"{name}\" was not dropped: nothing was changed"));
    }
    Ok(resumed_text(name))
}

fn resumed_text(name: &str) -> String {
    format!(
        "mirror \"{name}\" goes on when its far end asks for it next. If the principal has dropped \
         log that the far end lacks, both ends say so: remove the spool there and seed the standbys \
         anew"
    )
}

/// `None` if there is no such slot, or it keeps nothing. There is no SQL where the principal is a
/// node that keeps log alone, or lets the role in for replication only; before PostgreSQL 15 there
/// is nothing else.
async fn kept_bytes(principal: &Config, slot: &str) -> Result<Option<u64>, Error> {
    match kept_by_sql(principal, slot).await {
        Ok(kept) => Ok(kept),
        Err(error) => kept_by_replication(principal, slot).await.map_err(|_| error),
    }
}

async fn kept_by_sql(principal: &Config, slot: &str) -> Result<Option<u64>, Error> {
    let mut connection = Connection::connect(principal, Mode::Sql).await?;
    let sql = "SELECT (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() \
               ELSE pg_current_wal_lsn() END - restart_lsn)::int8 \
               FROM pg_replication_slots WHERE slot_name = $1";
    let rows = connection.query(sql, &[Some(slot)]).await?;
    connection.close().await;
    let kept = rows.first().and_then(|row| row.get(0));
    Ok(kept.and_then(|kept| kept.parse::<i64>().ok()).map(|kept| kept.max(0).unsigned_abs()))
}

async fn kept_by_replication(principal: &Config, slot: &str) -> Result<Option<u64>, Error> {
    let mut connection = Connection::connect(principal, Mode::PhysicalReplication).await?;
    let end = connection.identify_system().await?.xlogpos;
    let slot = connection.read_physical_slot(slot).await?;
    connection.close().await;
    Ok(slot.and_then(|slot| slot.restart).map(|restart| end.bytes_since(restart)))
}
