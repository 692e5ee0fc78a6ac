//! A spool that begins while commits wait for the mirror.
//!
//! What a principal is told as flushed lets every commit before that return. A spool that is begun
//! anew has no log from before its beginning, so a commit from before would return that is nowhere
//! but at the principal. It is there again once a standby that was made from the principal has
//! replayed past the beginning: until then, or until nobody from before waits any more, nothing is
//! told. That outlasts the process in a note.

use super::Near;
use crate::error::MirrorError;
use crate::relay::message::FarPositions;
use crate::spool::folder;
use farshore_model::Lsn;
use farshore_pg::{Connection, Error, Mode};
use std::path::Path;
use std::time::Duration;

/// How long is waited for the principal's answer on who waits.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Since when nothing is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hold {
    /// The spool's beginning.
    start: Lsn,
    /// When it began, by the principal's clock; none if it could not be asked: then whoever waits may
    /// have waited before.
    since: Option<String>,
}

impl Hold {
    fn encode(&self) -> String {
        format!("{}\n{}\n", self.start, self.since.as_deref().unwrap_or_default())
    }

    fn decode(note: &str) -> Option<Hold> {
        let mut lines = note.lines();
        let start = lines.next()?.parse().ok()?;
        let since = lines.next().filter(|since| !since.is_empty()).map(str::to_owned);
        Some(Hold { start, since })
    }
}

/// Who waits at the principal.
enum Waiting {
    Nobody,
    /// Somebody may have, before this time of the principal's.
    Before(Option<String>),
}

impl Near {
    /// Where the spool begins that commits from before wait beside, while they do.
    pub fn begun_anew_at(&self) -> Option<Lsn> {
        self.hold().as_ref().map(|hold| hold.start)
    }

    /// Before anything is told of a spool. `begins_without`: it begins, and the slot does not keep
    /// all that the principal was not told of.
    pub(super) async fn look_for_waiting(
        &self,
        start: Lsn,
        begins_without: bool,
        connection: &mut Connection,
    ) -> Result<(), MirrorError> {
        if !self.promise.is_of_the_spool() {
            return Ok(());
        }
        let noted = match std::fs::read_to_string(&self.begun_anew) {
            Ok(note) => Hold::decode(&note),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(self.note_error("read", error)),
        };
        let hold = match noted {
            Some(noted) if !begins_without => Some(noted),
            Some(_) | None if begins_without => match self.who_waits(connection).await? {
                Waiting::Nobody => None,
                Waiting::Before(since) => Some(Hold { start, since }),
            },
            Some(_) | None => None,
        };
        match &hold {
            Some(hold) => {
                note(&self.begun_anew, hold)?;
                tracing::error!(mirror = %self.name, "{}", held(hold.start));
            }
            None => self.forget_hold(),
        }
        *self.hold() = hold;
        Ok(())
    }

    /// Looks again, while commits are held, whether one from before still waits.
    ///
    /// # Errors
    /// When the principal cannot be asked.
    pub async fn look_who_waits(&self) -> Result<(), Error> {
        let Some(hold) = self.hold().clone() else { return Ok(()) };
        let mut connection = Connection::connect(&self.principal, Mode::Sql).await?;
        let since = hold.since.as_deref();
        let waits = ask_who_waits(&mut connection, since).await?.is_none_or(|waits| waits > 0);
        connection.close().await;
        if !waits {
            self.let_go("nobody waits any more who waited before");
        }
        Ok(())
    }

    /// What may be told at all.
    pub(super) fn is_held(&self, far: FarPositions) -> bool {
        let Some(start) = self.begun_anew_at() else { return false };
        if far.applied <= start {
            return true;
        }
        self.let_go("a standby has replayed past its beginning");
        false
    }

    fn let_go(&self, why: &str) {
        if let Some(hold) = self.hold().take() {
            tracing::info!(mirror = %self.name, start = %hold.start, "the spool that was begun anew is told: {why}");
            self.forget_hold();
        }
    }

    /// One that stays is found again, and let go again.
    fn forget_hold(&self) {
        match std::fs::remove_file(&self.begun_anew) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(mirror = %self.name, "cannot remove {}: {error}", self.begun_anew.display());
            }
            Ok(()) | Err(_) => {}
        }
    }

    fn note_error(&self, action: &'static str, error: std::io::Error) -> MirrorError {
        tracing::error!(mirror = %self.name, "{action} {}: {error}", self.begun_anew.display());
        MirrorError::Io { action: "note that the spool was begun anew", error }
    }

    /// A role that may not look is told by `synchronous_standby_names` alone.
    async fn who_waits(&self, replication: &mut Connection) -> Result<Waiting, MirrorError> {
        let asked = async {
            let mut connection = Connection::connect(&self.principal, Mode::Sql).await?;
            let now = connection.query("SELECT pg_catalog.clock_timestamp()", &[]).await?;
            let now = now.first().and_then(|row| row.get(0)).map(str::to_owned);
            let waits = ask_who_waits(&mut connection, None).await?;
            connection.close().await;
            Ok::<_, Error>((now, waits))
        };
        let since = match tokio::time::timeout(ANSWER_WITHIN, asked).await {
            Ok(Ok((_, Some(0)))) => return Ok(Waiting::Nobody),
            Ok(Ok((now, _))) => now,
            Ok(Err(error)) => {
                tracing::debug!(mirror = %self.name, %error, "who waits at the principal");
                None
            }
            Err(_) => None,
        };
        let shown = replication.simple_query("SHOW synchronous_standby_names").await?;
        let names = shown.first().and_then(|set| set.rows.first()?.get(0).map(str::to_owned));
        let nobody_is_waited_for = names.is_some_and(|names| names.trim().is_empty());
        Ok(if nobody_is_waited_for { Waiting::Nobody } else { Waiting::Before(since) })
    }
}

/// How many commits that began before `since` wait for a standby; `None` if the role may not see.
async fn ask_who_waits(
    connection: &mut Connection,
    since: Option<&str>,
) -> Result<Option<u64>, Error> {
    let sql = "SELECT count(*) FILTER (WHERE wait_event = 'SyncRep' \
           AND query_start < coalesce($1::timestamptz, 'infinity')), \
         pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE') FROM pg_catalog.pg_stat_activity";
    let rows = connection.query(sql, &[since]).await?;
    let Some(row) = rows.first() else { return Ok(None) };
    if row.get(1) != Some("t") {
        return Ok(None);
    }
    row.parse(0).map(Some)
}

fn note(path: &Path, hold: &Hold) -> Result<(), MirrorError> {
    if let Some(above) = path.parent() {
        let action = "make the folder of mirrors";
        std::fs::create_dir_all(above).map_err(|error| MirrorError::Io { action, error })?;
    }
    Ok(folder::replace(path, hold.encode().as_bytes())?)
}

/// What is said of it.
pub fn held(start: Lsn) -> String {
    format!(
        "the spool was begun anew at {start}, and commits wait that are from before: they are in no \
         spool, so nothing is acknowledged until a standby that was made since (farshore mirror \
         seed) has replayed past {start}. Or take the mirror out of synchronous_standby_names for \
         a moment: then they return, and are at the principal alone"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_as_it_was_written() {
        for since in [None, Some("2026-01-01 12:00:00.1+00".to_owned())] {
            let hold = Hold { start: Lsn(0x300_0000), since };
            assert_eq!(Hold::decode(&hold.encode()), Some(hold));
        }
        assert_eq!(Hold::decode("somewhere\n"), None);
    }
}
