//! A spool that begins while commits wait for the mirror.
//!
//! What a principal is told as flushed lets every commit before that return. A spool that is begun
//! anew has no log from before its beginning, so a commit from before would return that is nowhere
//! but at the principal. It is there again once a standby that was made from the principal has
//! replayed past the beginning: until then, or until nobody from before waits any more, nothing is
//! told. That outlasts the process in a note.
//!
//! Where the slot was kept and the spool was not, log is gone that was told: between where a standby
//! stands and the new spool's beginning nobody has any for it, so what is in the spool is of no use
//! to it. Then, too, nothing is told until a standby has replayed past the beginning. That a spool was
//! told of is noted before the first time.

use super::Near;
use crate::error::MirrorError;
use crate::relay::message::FarPositions;
use crate::spool::folder;
use farshore_model::Lsn;
use farshore_pg::{Connection, Error, Mode};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// A note of whom a spool was told to that could not be written is tried again after this.
const NOTE_AGAIN_AFTER: Duration = Duration::from_secs(5);

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
    /// What was told is gone with the spool before it: who waits does not matter.
    is_told_gone: bool,
}

/// Stands in the note where what was told is gone.
const TOLD_GONE: &str = "told";

impl Hold {
    fn encode(&self) -> String {
        let since = self.since.as_deref().unwrap_or_default();
        let gone = if self.is_told_gone { TOLD_GONE } else { "" };
        format!("{}\n{since}\n{gone}\n", self.start)
    }

    fn decode(note: &str) -> Option<Hold> {
        let mut lines = note.lines();
        let start = lines.next()?.parse().ok()?;
        let since = lines.next().filter(|since| !since.is_empty()).map(str::to_owned);
        // One of an earlier version ends before that.
        let is_told_gone = lines.next() == Some(TOLD_GONE);
        Some(Hold { start, since, is_told_gone })
    }

    /// What is said of it.
    fn words(&self, mirror: &str) -> String {
        let start = self.start;
        let resume = format!("farshore mirror resume SITE.toml {mirror}");
        if self.is_told_gone {
            return format!(
                "the spool was begun anew at {start}, and the one before it is gone with log that \
                 was acknowledged: a standby that has not come past {start} cannot go on, nor use \
                 what is in the spool now. So nothing is acknowledged until one has replayed past \
                 {start}; if none gets there, seed one (farshore mirror seed). {resume} \
                 acknowledges all the same: what returns then is lost with the principal, until a \
                 standby is there"
            );
        }
        format!(
            "the spool was begun anew at {start}, and commits wait that are from before: they are in \
             no spool, so nothing is acknowledged until a standby that was made since (farshore \
             mirror seed) has replayed past {start}, or none of them waits any more. {resume} lets \
             them return, and then they are at the principal alone"
        )
    }
}

/// How a new spool begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Beginning {
    /// The slot does not keep all that the principal was not told of.
    pub lacks_untold: bool,
    /// What the principal was told of is gone with the spool before it.
    pub lacks_told: bool,
}

/// What a near end knows of such commits.
#[derive(Debug)]
pub struct BegunAnew {
    note: PathBuf,
    hold: Mutex<Option<Hold>>,
    told: Mutex<Option<Told>>,
}

/// A cluster was told of a spool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Told {
    system_id: u64,
    /// That is not noted; when it is to be tried again.
    note_again_at: Option<Instant>,
}

impl BegunAnew {
    /// They are noted in this file, where there are any; and beside it, in one that ends in `.told`,
    /// whom a spool was told to.
    pub fn noted_in(note: PathBuf) -> BegunAnew {
        BegunAnew { note, hold: Mutex::default(), told: Mutex::default() }
    }

    fn told_note(&self) -> PathBuf {
        self.note.with_extension("told")
    }
}

/// Stands for a beginning that is not known yet.
const PENDING: Lsn = Lsn::ZERO;

/// Who waits at the principal.
enum Waiting {
    Nobody,
    /// Somebody may have, before this time of the principal's.
    Before(Option<String>),
}

impl Near {
    fn hold(&self) -> MutexGuard<'_, Option<Hold>> {
        self.begun_anew.hold.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Where the spool begins that commits from before wait beside, while they do.
    pub fn begun_anew_at(&self) -> Option<Lsn> {
        self.hold().as_ref().map(|hold| hold.start)
    }

    /// What was noted before this node started counts also while no far end asks. Blocks on the disk.
    pub fn recall_begun_anew(&self) {
        if !self.promise.is_of_the_spool() {
            return;
        }
        let noted = self.noted().ok().flatten().filter(|noted| noted.start != PENDING);
        if let Some(noted) = noted {
            tracing::warn!(mirror = %self.name, "{}", noted.words(&self.name));
            *self.hold() = Some(noted);
        }
    }

    /// That nothing is acknowledged for now beside a spool that was begun anew, and why.
    pub fn held(&self) -> Option<String> {
        self.hold().as_ref().map(|hold| hold.words(&self.name))
    }

    fn told_text(&self, system_id: u64) -> String {
        format!("{system_id}\n{}\n", self.slot)
    }

    /// Whether this slot's cluster was told of a spool, and so dropped log that was only there.
    pub(super) fn was_told(&self) -> Result<bool, MirrorError> {
        let Some(system_id) = self.status().system_id else { return Ok(false) };
        if !self.promise.is_of_the_spool() {
            return Ok(false);
        }
        // Known even where it could not be noted.
        if self.told().is_some_and(|told| told.system_id == system_id) {
            return Ok(true);
        }
        match std::fs::read_to_string(self.begun_anew.told_note()) {
            Ok(note) => Ok(note == self.told_text(system_id)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(self.note_error("read", error)),
        }
    }

    /// When the slot was made: whoever dropped the one before it has begun anew.
    pub(super) fn forget_told(&self) {
        let mut told = self.told();
        *told = None;
        match std::fs::remove_file(self.begun_anew.told_note()) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => tracing::warn!(
                mirror = %self.name,
                "commits may wait for a standby although none has to: {error}"
            ),
            Ok(()) | Err(_) => {}
        }
    }

    fn told(&self) -> MutexGuard<'_, Option<Told>> {
        self.begun_anew.told.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Before the principal is told that the spool has something. Blocks on the disk, once; and again
    /// after a while, for as long as the disk does not take it.
    pub(super) fn note_told(&self, now: Instant) {
        let Some(system_id) = self.status().system_id else { return };
        if !self.promise.is_of_the_spool() {
            return;
        }
        let mut told = self.told();
        let before = told.filter(|told| told.system_id == system_id);
        let is_due = before.is_none_or(|told| told.note_again_at.is_some_and(|at| at <= now));
        if !is_due {
            return;
        }
        let noted = write_note(&self.begun_anew.told_note(), &self.told_text(system_id));
        // Commits that wait for the far end do not wait for a disk here.
        let note_again_at = noted.is_err().then_some(now + NOTE_AGAIN_AFTER);
        *told = Some(Told { system_id, note_again_at });
        match (noted, before) {
            (Err(error), None) => tracing::warn!(
                mirror = %self.name,
                "should this node be started again and the far end's spool be lost, it will not be \
                 seen that it is: {error}. It is tried again every {} s",
                NOTE_AGAIN_AFTER.as_secs()
            ),
            (Err(error), Some(_)) => tracing::debug!(mirror = %self.name, "still: {error}"),
            (Ok(()), Some(_)) => {
                tracing::info!(mirror = %self.name, "it is noted now that a spool was told of");
            }
            (Ok(()), None) => {}
        }
    }

    /// Before the slot is made, which tells later that it was not there: notes that it is to be looked
    /// who waits. Says whether that was noted earlier.
    pub(super) fn expect_waiting(&self, begins: bool) -> Result<bool, MirrorError> {
        if !begins || !self.promise.is_of_the_spool() {
            return Ok(false);
        }
        let noted = self.noted()?;
        if noted.is_none() {
            let pending = Hold { start: PENDING, since: None, is_told_gone: false };
            note(&self.begun_anew.note, &pending)?;
        }
        Ok(noted.is_some_and(|noted| noted.start == PENDING))
    }

    fn noted(&self) -> Result<Option<Hold>, MirrorError> {
        match std::fs::read_to_string(&self.begun_anew.note) {
            Ok(note) => Ok(Hold::decode(&note)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.note_error("read", error)),
        }
    }

    /// Before anything is told of a spool, which may begin with this.
    pub(super) async fn look_for_waiting(
        &self,
        start: Lsn,
        begins: Option<Beginning>,
        connection: &mut Connection,
    ) -> Result<(), MirrorError> {
        if !self.promise.is_of_the_spool() {
            return Ok(());
        }
        let hold = match begins {
            Some(Beginning { lacks_told: true, .. }) => {
                let is_waited_for = is_anybody_waited_for(connection).await?;
                is_waited_for.then_some(Hold { start, since: None, is_told_gone: true })
            }
            Some(Beginning { lacks_untold: true, .. }) => match self.who_waits(connection).await? {
                Waiting::Nobody => None,
                Waiting::Before(since) => Some(Hold { start, since, is_told_gone: false }),
            },
            Some(_) | None => return self.hold_on_as_noted(),
        };
        // In one turn with letting go, which would take this note for the one of before.
        let mut held = self.hold();
        match &hold {
            Some(hold) => {
                note(&self.begun_anew.note, hold)?;
                tracing::warn!(mirror = %self.name, "{}", hold.words(&self.name));
            }
            None => self.forget_hold(),
        }
        *held = hold;
        Ok(())
    }

    /// Goes on with what was held, unless it was let go. The note is read in one turn with that: a
    /// word to let go which came between the look and the hold would be undone.
    fn hold_on_as_noted(&self) -> Result<(), MirrorError> {
        let mut hold = self.hold();
        *hold = self.noted()?.filter(|noted| noted.start != PENDING);
        match hold.as_ref() {
            Some(hold) => tracing::warn!(mirror = %self.name, "{}", hold.words(&self.name)),
            None => self.forget_hold(),
        }
        Ok(())
    }

    /// Looks again, while commits are held, whether one from before still waits.
    ///
    /// # Errors
    /// When the principal cannot be asked.
    pub async fn look_who_waits(&self) -> Result<(), Error> {
        let Some(hold) = self.hold().clone() else { return Ok(()) };
        if hold.is_told_gone {
            return self.let_go_if_nobody_is_named(&hold).await;
        }
        match self.ask_who_waits(hold.since.as_deref()).await {
            Ok((_, Some(0))) => self.let_go(&hold, "nobody waits any more who waited before"),
            Ok((now, Some(_))) if hold.since.is_none() => self.hold_since(&hold, now),
            Ok((_, Some(_))) => {}
            Ok((_, None)) | Err(_) => self.let_go_if_nobody_is_named(&hold).await?,
        }
        Ok(())
    }

    async fn let_go_if_nobody_is_named(&self, hold: &Hold) -> Result<(), Error> {
        let mut connection =
            Connection::connect(&self.principal, Mode::PhysicalReplication).await?;
        let is_waited_for = is_anybody_waited_for(&mut connection).await?;
        connection.close().await;
        if !is_waited_for {
            self.let_go(hold, "synchronous_standby_names is empty");
        }
        Ok(())
    }

    /// Commits from before return, on an operator's word, although they are at the principal alone.
    /// Says where the spool begins that they are not in, if any are held.
    pub fn let_commits_return(&self) -> Option<Lsn> {
        let hold = self.hold().clone()?;
        self.let_go(&hold, "somebody has said so");
        Some(hold.start)
    }

    /// Whether nothing may be told.
    pub(super) fn is_held(&self, far: FarPositions) -> bool {
        let Some(hold) = self.hold().clone() else { return false };
        if far.applied <= hold.start {
            return true;
        }
        self.let_go(&hold, "a standby has replayed past its beginning");
        false
    }

    fn let_go(&self, held: &Hold, why: &str) {
        let mut hold = self.hold();
        // Another one may have begun meanwhile.
        if hold.as_ref() == Some(held) {
            tracing::info!(mirror = %self.name, start = %held.start, "the spool that was begun anew is told: {why}");
            *hold = None;
            self.forget_hold();
        }
    }

    /// The time that could not be asked for at first.
    fn hold_since(&self, held: &Hold, now: Option<String>) {
        let mut hold = self.hold();
        if hold.as_ref() == Some(held) {
            let since = Hold { since: now, ..held.clone() };
            match note(&self.begun_anew.note, &since) {
                Ok(()) => *hold = Some(since),
                Err(error) => tracing::warn!(mirror = %self.name, "{error}"),
            }
        }
    }

    /// One that stays is found again, and let go again.
    fn forget_hold(&self) {
        match std::fs::remove_file(&self.begun_anew.note) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(mirror = %self.name, "cannot remove {}: {error}", self.begun_anew.note.display());
            }
            Ok(()) | Err(_) => {}
        }
    }

    fn note_error(&self, action: &'static str, error: std::io::Error) -> MirrorError {
        tracing::error!(mirror = %self.name, "{action} {}: {error}", self.begun_anew.note.display());
        MirrorError::Io { action: "note that the spool was begun anew", error }
    }

    /// A role that may not look is told by `synchronous_standby_names` alone.
    async fn who_waits(&self, replication: &mut Connection) -> Result<Waiting, MirrorError> {
        let asked = tokio::time::timeout(ANSWER_WITHIN, self.ask_who_waits(None));
        let since = match asked.await {
            Ok(Ok((_, Some(0)))) => return Ok(Waiting::Nobody),
            Ok(Ok((now, Some(_)))) => now,
            Ok(Ok((_, None))) | Err(_) => None,
            Ok(Err(error)) => {
                tracing::debug!(mirror = %self.name, %error, "who waits at the principal");
                None
            }
        };
        let is_waited_for = is_anybody_waited_for(replication).await?;
        Ok(if is_waited_for { Waiting::Before(since) } else { Waiting::Nobody })
    }

    /// The principal's time, and how many commits that began before `since` wait for a standby: `None`
    /// if the role may not see.
    async fn ask_who_waits(
        &self,
        since: Option<&str>,
    ) -> Result<(Option<String>, Option<u64>), Error> {
        let sql = "SELECT pg_catalog.clock_timestamp(), count(*) FILTER (WHERE wait_event = 'SyncRep' \
               AND coalesce(query_start, '-infinity') < coalesce($1::timestamptz, 'infinity')), \
             pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE') FROM pg_catalog.pg_stat_activity";
        let mut connection = Connection::connect(&self.principal, Mode::Sql).await?;
        let rows = connection.query(sql, &[since]).await?;
        connection.close().await;
        let Some(row) = rows.first() else { return Ok((None, None)) };
        let waits = if row.get(2) == Some("t") { Some(row.parse(1)?) } else { None };
        Ok((row.get(0).map(str::to_owned), waits))
    }
}

/// Whether `synchronous_standby_names` names anybody.
async fn is_anybody_waited_for(replication: &mut Connection) -> Result<bool, Error> {
    match replication.simple_query("SHOW synchronous_standby_names").await {
        Ok(shown) => {
            let names = shown.first().and_then(|set| set.rows.first()?.get(0).map(str::to_owned));
            Ok(names.is_none_or(|names| !names.trim().is_empty()))
        }
        // A spool's server, which has no commits of its own, knows no such setting.
        Err(error) if error.sqlstate().is_some_and(|code| code.starts_with("42")) => Ok(false),
        Err(error) => Err(error),
    }
}

fn note(path: &Path, hold: &Hold) -> Result<(), MirrorError> {
    write_note(path, &hold.encode())
}

/// Durable when this returns. Makes the folder that it is in, if that is not there.
pub(super) fn write_note(path: &Path, text: &str) -> Result<(), MirrorError> {
    if let Some(above) = path.parent() {
        let action = "make the folder of mirrors";
        std::fs::create_dir_all(above).map_err(|error| MirrorError::Io { action, error })?;
    }
    Ok(folder::replace(path, text.as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::receive::{Promise, Turns};
    use crate::relay::compression::Compression;
    use farshore_pg::Config;
    use std::sync::Arc;

    /// The near end of a mirror, whose notes are in this folder, after a look at its principal.
    fn near(folder: &Path) -> Near {
        let near = Near {
            name: "m".to_owned(),
            principal: Config::parse("postgres://a@127.0.0.1:1/b").unwrap(),
            slot: "s".to_owned(),
            application_name: "m".to_owned(),
            promise: Promise::Far,
            compression: Compression::Auto,
            begun_anew: BegunAnew::noted_in(folder.join("mirrors/m.begun")),
            turns: Arc::new(Turns::noted_in(folder.join("mirrors/m.turn"))),
            status: Mutex::default(),
        };
        near.status().system_id = Some(7);
        near
    }

    #[test]
    fn that_a_spool_was_told_of_is_noted_once_the_disk_takes_it() {
        let folder = tempfile::tempdir().unwrap();
        // No folder can be made there.
        let in_the_way = folder.path().join("mirrors");
        std::fs::write(&in_the_way, "").unwrap();
        let (told, now) = (near(folder.path()), Instant::now());
        told.note_told(now);
        assert!(told.was_told().unwrap(), "it was, whatever the disk says");
        std::fs::remove_file(&in_the_way).unwrap();
        // Not at every word that the principal is told.
        told.note_told(now + NOTE_AGAIN_AFTER / 2);
        assert!(!near(folder.path()).was_told().unwrap());
        told.note_told(now + NOTE_AGAIN_AFTER);
        assert!(near(folder.path()).was_told().unwrap(), "a node that is started again knows");
        told.forget_told();
        assert!(!told.was_told().unwrap() && !near(folder.path()).was_told().unwrap());
    }

    /// A far end asks at the moment at which somebody says that commits may return.
    #[test]
    fn a_word_to_let_commits_return_is_not_undone_by_a_session_that_begins() {
        let folder = tempfile::tempdir().unwrap();
        let near = near(folder.path());
        let held = Hold { start: Lsn(0x300_0000), since: None, is_told_gone: true };
        for round in 0..200 {
            note(&near.begun_anew.note, &held).unwrap();
            near.recall_begun_anew();
            let at_once = std::sync::Barrier::new(2);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    at_once.wait();
                    near.hold_on_as_noted().unwrap();
                });
                at_once.wait();
                assert_eq!(near.let_commits_return(), Some(held.start));
            });
            assert_eq!((near.begun_anew_at(), near.noted().unwrap()), (None, None), "{round}");
        }
    }

    #[test]
    fn a_note_is_read_as_it_was_written() {
        for since in [None, Some("2026-01-01 12:00:00.1+00".to_owned())] {
            for is_told_gone in [false, true] {
                let hold = Hold { start: Lsn(0x300_0000), since: since.clone(), is_told_gone };
                assert_eq!(Hold::decode(&hold.encode()), Some(hold));
            }
        }
        // Of an earlier version.
        let hold = Hold { start: Lsn(0x300_0000), since: None, is_told_gone: false };
        assert_eq!(Hold::decode("0/3000000\n\n"), Some(hold));
        assert_eq!(Hold::decode("somewhere\n"), None);
    }
}
