//! A standby becomes a server of its own, once it has everything that the spool holds.
//!
//! What the principal was told as flushed is in the spool, so a promotion that leaves nothing of
//! the spool behind loses no commit that a client saw return. Nothing more may come in meanwhile:
//! whoever calls [`promote`] has ended the far end's session before.

mod inherited;
mod obstacle;

pub use inherited::Inherited;
pub use obstacle::TooLow;

use crate::history::History;
use crate::spool::{Closed, Spool, SpoolError};
use crate::wal::{SETTINGS, Settings, Timeline, history_file_name};
use farshore_fault as fault;
use farshore_model::Lsn;
use farshore_pg::{Config, Connection, Mode};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// How often the standby is asked how far it is.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How often it is said how far it is.
const SAY_EVERY: Duration = Duration::from_secs(2);
/// What a server says that is starting, or that replays and is not consistent yet.
const CANNOT_CONNECT_NOW: &str = "57P03";
/// The server has so long to come out of recovery, in seconds.
const PROMOTED_WITHIN_S: u32 = 60;

/// What is wanted.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The standby; a role that may call `pg_promote` and `pg_read_file`.
    pub standby: Config,
    /// Where the spool serves it, for messages.
    pub listen: String,
    /// Promote it also without what it cannot be given.
    pub allow_data_loss: bool,
    /// Promote it in the place of this one, which was chosen before and never became a primary.
    pub instead_of: Option<String>,
    /// Give up when the standby has not come any further for so long.
    pub patience: Duration,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Promoted {
    /// The server's own timeline.
    pub timeline: Timeline,
    /// Where it begins.
    pub fork: Lsn,
    /// The end of the last whole record in the spool.
    pub spool_end: Lsn,
    /// It had been promoted before.
    pub was_already: bool,
    /// What its settings are; `None` if they could not be asked for.
    pub inherited: Option<Inherited>,
    /// Why the folder has no note that the spool is closed: a restart of the node does not know of
    /// it. `None` if it has.
    pub unsaved: Option<SpoolError>,
}

impl Promoted {
    /// Bytes of log that the spool holds and the server does not.
    pub fn lost_bytes(&self) -> u64 {
        self.spool_end.bytes_since(self.fork)
    }
}

/// Why a standby was not promoted, or not as it should have been.
#[derive(Debug, thiserror::Error)]
pub enum PromoteError {
    /// The standby, or the way there.
    #[error("{}", of_standby(server, error))]
    Standby {
        /// Which server.
        server: String,
        /// What is wrong.
        error: farshore_pg::Error,
    },
    /// The spool.
    #[error("{0}")]
    Spool(#[from] SpoolError),
    /// Another cluster's.
    #[error(
        "{server} has the system identifier {found}, and the spool holds the log of {expected}: it \
         is no standby of this mirror. Name the right one (standby = \"…\" or --standby)"
    )]
    AnotherCluster {
        /// Which server.
        server: String,
        /// Its own.
        found: String,
        /// The spool's.
        expected: String,
    },
    /// It is not in recovery.
    #[error(
        "{server} is not in recovery: it is no standby, or was promoted by other means. Nothing was \
         changed; name the mirror's standby (standby = \"…\" or --standby)"
    )]
    NoStandby {
        /// Which server.
        server: String,
    },
    /// Another one was chosen before.
    #[error(
        "{chosen} was to be promoted from this mirror before, and may be a primary by now: {server} \
         is not promoted beside it, and nothing was changed. If {chosen} never was promoted and \
         never will be: --instead-of '{chosen}'"
    )]
    Chosen {
        /// Which server.
        server: String,
        /// The one before.
        chosen: String,
    },
    /// Another one was chosen, and is known to have taken over.
    #[error(
        "{chosen} has taken over from this mirror: what was committed there since is not on {server}, \
         which is not promoted beside it. Nothing was changed. To give that up, once {chosen} is \
         stopped for good: --instead-of '{chosen}' --allow-data-loss"
    )]
    TookOver {
        /// Which server.
        server: String,
        /// The one before.
        chosen: String,
    },
    /// None was chosen.
    #[error(
        "no standby of this mirror was to be promoted before, so there is none instead of which \
         {server} could be. Nothing was changed. Leave --instead-of out, or name the mirror that is \
         meant"
    )]
    NoneChosen {
        /// Which server.
        server: String,
    },
    /// It does not answer.
    #[error("{server} does not answer a question within {within:?}: nothing was changed")]
    Silent {
        /// Which server.
        server: String,
        /// How long it was waited for.
        within: Duration,
    },
    /// It would end its recovery before the end of its log.
    #[error(
        "{server} has a recovery target ({settings}): it would be promoted there, without the log \
         behind it, or stop without being promoted if it has not come that far. It was not promoted, \
         and the mirror goes on. There: ALTER SYSTEM RESET {settings} (or take it out of \
         postgresql.conf), restart the standby, and run this again"
    )]
    RecoveryTarget {
        /// Which server.
        server: String,
        /// Those that are set.
        settings: String,
    },
    /// The role lacks a right.
    #[error(
        "the role may not call {function} on {server}. As a superuser of the principal: GRANT \
         EXECUTE ON FUNCTION {function} TO the role; or connect as a superuser"
    )]
    NoRight {
        /// Which server.
        server: String,
        /// With its arguments.
        function: &'static str,
    },
    /// It cannot replay what it has.
    #[error("{server} cannot be promoted: {too_low}. Nothing was changed")]
    TooLow {
        /// Which server.
        server: String,
        /// What keeps it from that.
        too_low: TooLow,
    },
    /// Nobody can tell whether it can replay what it has.
    #[error(
        "replay is paused on {server} at {at}, and the spool does not have the log behind that to \
         see why. It was not promoted. Look into its log: where that speaks of insufficient parameter \
         settings, raise these, restart it, and run this again; where not, somebody asked for the \
         pause: SELECT pg_wal_replay_resume() there (which would shut down a server with \
         insufficient settings, as a promotion would), and run this again. To promote it as it is: \
         --allow-data-loss"
    )]
    PausedUnknown {
        /// Which server.
        server: String,
        /// Where.
        at: Lsn,
    },
    /// It has everything, and the spool's disk takes no note of it.
    #[error("{}", not_noted(server, *end, error, chosen.as_deref()))]
    NotNoted {
        /// Which server.
        server: String,
        /// The end of the last whole record in the spool.
        end: Lsn,
        /// Why not.
        error: SpoolError,
        /// Another one that is noted, instead of which it was to be promoted.
        chosen: Option<String>,
    },
    /// It does not get further, and lacks something.
    #[error(
        "{server} lacks {bytes} bytes of log that the spool holds: it has {has}, the spool ends at \
         {end}, and for {waited:?} nothing more came to it. {why}. It was not promoted, and the \
         mirror goes on. To promote it without these bytes, and the commits in them: \
         --allow-data-loss"
    )]
    Lacks {
        /// Which server.
        server: String,
        /// How much.
        bytes: u64,
        /// Up to where it has the log.
        has: Lsn,
        /// Up to where the spool has whole records.
        end: Lsn,
        /// Without progress.
        waited: Duration,
        /// As far as can be seen, and what to do.
        why: String,
    },
    /// It lacks something, and the spool cannot give it.
    #[error(
        "{server} lacks {bytes} bytes of log that the spool held, and {damage}. It was not promoted. \
         To promote it without these bytes, and the commits in them: --allow-data-loss"
    )]
    LacksDamaged {
        /// Which server.
        server: String,
        /// How much.
        bytes: u64,
        /// Of the spool.
        damage: SpoolError,
    },
    /// The server does not come out of recovery.
    #[error(
        "{server} was told to promote and has not come out of recovery within {PROMOTED_WITHIN_S} \
         s. The spool is closed: {why}"
    )]
    NotYet {
        /// Which server.
        server: String,
        /// As far as can be seen, and what to do.
        why: String,
    },
    /// It went away once it was told.
    #[error(
        "{server} was told to promote, and then: {error}. The spool is closed. Look at the server's \
         log (where that speaks of insufficient parameter settings, raise these); start it if it is \
         down, and run this again"
    )]
    Told {
        /// Which server.
        server: String,
        /// What came instead of an answer.
        error: farshore_pg::Error,
    },
    /// Whoever promotes it, at the last moment.
    #[error("{0}")]
    CalledOff(String),
    /// Its history is not what it should be.
    #[error("{server} was promoted, but {what}. Do not let clients in before this is understood")]
    WrongHistory {
        /// Which server.
        server: String,
        /// How.
        what: String,
    },
}

/// Promotes a standby of this spool, which takes nothing in at present. Tells on `progress` how far
/// it is; what finds no room there is left out. `last_word` is waited for when the standby has
/// everything and nothing is decided yet; it may call all off. An error before the server was told
/// leaves the spool open. Whoever else streams is told once the caller has noted the promotion
/// ([`Spool::note_promoted`]).
///
/// # Errors
/// [`PromoteError`].
pub async fn promote<Fut: Future<Output = Result<(), String>>>(
    spool: &Arc<Spool>,
    plan: &Plan,
    last_word: impl FnOnce() -> Fut,
    progress: &mpsc::Sender<String>,
) -> Result<Promoted, PromoteError> {
    // A disk without room keeps the rest waiting, for ever perhaps. Nothing of that was
    // acknowledged, and nothing will be.
    // So with a disk that failed: what was durable before is known.
    let positions = match tokio::time::timeout(plan.patience, spool.settled()).await {
        Ok(Ok(settled)) => settled,
        Ok(Err(_)) | Err(_) => *spool.positions().borrow(),
    };
    let reading = spool.clone();
    // What is damaged here the standby may have all the same.
    let (spool_end, damage) = match crate::keep::blocking(move || reading.last_record_end()).await {
        Ok(end) => (end, None),
        Err(damage @ SpoolError::Damaged { durable, .. }) => (durable, Some(damage)),
        // Nor need it be read here, if the standby has it.
        Err(error @ SpoolError::Io { .. }) => {
            tracing::warn!(%error, "the spool's end is taken for the end of a record");
            (positions.durable, None)
        }
        Err(error) => return Err(error.into()),
    };
    let mut connection = connect(plan, progress).await?;
    let server = connection.server().to_owned();
    let standby = |error| PromoteError::Standby { server: server.clone(), error };
    let view = look_within(&mut connection, plan.patience).await?;
    let expected = spool.identity().system_id.to_string();
    if view.system_id != expected {
        return Err(PromoteError::AnotherCluster { server, found: view.system_id, expected });
    }
    for (may, function) in
        [(view.may_promote, "pg_promote(boolean, integer)"), (view.may_read, "pg_read_file(text)")]
    {
        if !may {
            return Err(PromoteError::NoRight { server, function });
        }
    }
    let was_already = !view.is_in_recovery;
    if was_already {
        match spool.closed() {
            None => return Err(PromoteError::NoStandby { server }),
            // The old principal, for instance.
            Some(closed) if timeline(&mut connection).await? <= positions.timeline => {
                return Err(match plan.instead_of {
                    None => PromoteError::Chosen { server, chosen: closed.server },
                    Some(_) => PromoteError::NoStandby { server },
                });
            }
            // A call of this that was broken off may have promoted it.
            Some(_) => {}
        }
    } else {
        may_choose(spool, &server, plan)?;
        if let Some(settings) = view.stops_at(plan.allow_data_loss) {
            return Err(PromoteError::RecoveryTarget { server, settings });
        }
        fault::point("promote.before-drain");
        if !fault::defect("mirror-promote-without-drain") {
            let up_to = (positions.timeline, spool_end);
            match drain(&mut connection, plan, up_to, progress).await {
                Ok(view) => {
                    let of = (server.as_str(), &view);
                    obstacle::check(spool, of, spool_end, plan.allow_data_loss).await?;
                }
                Err(error) => {
                    return Err(why_it_lacks(spool, error, damage, plan.patience).await);
                }
            }
        }
        fault::point("promote.after-drain");
        last_word().await.map_err(PromoteError::CalledOff)?;
        close_for(spool, plan, (positions.timeline, spool_end), &server).await?;
        let _ = progress.try_send(format!("{server} is told to promote"));
        fault::point("promote.before-told");
        // A timeout that the standby has from its principal would end the wait, not the promotion.
        let no_timeouts = farshore_pg::no_timeouts(connection.server_version());
        connection.simple_query(&no_timeouts).await.map_err(standby)?;
        let sql = format!("SELECT pg_promote(true, {PROMOTED_WITHIN_S})");
        let rows = connection.query(&sql, &[]).await;
        let rows = rows.map_err(|error| PromoteError::Told { server: server.clone(), error })?;
        if !rows.first().is_some_and(|row| row.parse_bool(0).unwrap_or(false)) {
            let why = why_not_yet(spool, &mut connection, plan, spool_end).await;
            return Err(PromoteError::NotYet { server, why });
        }
        fault::point("promote.after-told");
    }
    fault::point("promote.before-fork");
    let (timeline, fork) = fork(&mut connection, positions.timeline).await?;
    fault::point("promote.after-fork");
    let inherited = Inherited::ask(&mut connection).await.ok();
    let unsaved = spool.unsaved_close();
    let promoted = Promoted { timeline, fork, spool_end, was_already, inherited, unsaved };
    let is_mutant = fault::defect("mirror-promote-without-drain");
    if promoted.lost_bytes() > 0 && !plan.allow_data_loss && !is_mutant {
        let what = format!(
            "its timeline {timeline} begins at {fork}, {} bytes before {spool_end}, where the \
             spool ends",
            promoted.lost_bytes()
        );
        return Err(PromoteError::WrongHistory { server, what });
    }
    connection.close().await;
    Ok(promoted)
}

/// One server alone is promoted: the first that was chosen, but for who says that it will never be a
/// primary.
fn may_choose(spool: &Spool, server: &str, plan: &Plan) -> Result<(), PromoteError> {
    let Some(Closed { server: chosen, .. }) = spool.closed() else {
        return match plan.instead_of {
            Some(_) => Err(PromoteError::NoneChosen { server: server.to_owned() }),
            None => Ok(()),
        };
    };
    // A call of this that was broken off may have named it instead already.
    if chosen == server {
        return Ok(());
    }
    let server = server.to_owned();
    // It may be given as it was typed then.
    let is_chosen = |named: &String| {
        *named == chosen || Config::parse(named).is_ok_and(|named| named.redacted() == chosen)
    };
    if !plan.instead_of.as_ref().is_some_and(is_chosen) {
        return Err(PromoteError::Chosen { server, chosen });
    }
    if spool.promoted().is_some() && !plan.allow_data_loss {
        return Err(PromoteError::TookOver { server, chosen });
    }
    Ok(())
}

/// Closes the spool for a server that has everything. A disk that takes no note of it is no reason
/// to be without a server where it has failed anyhow, or where that is allowed: nothing is taken in
/// all the same, as long as the node runs.
async fn close_for(
    spool: &Arc<Spool>,
    plan: &Plan,
    (timeline, end): (Timeline, Lsn),
    server: &str,
) -> Result<(), PromoteError> {
    let before = spool.closed();
    let chosen =
        before.as_ref().map(|before| before.server.clone()).filter(|chosen| chosen != server);
    let server = server.to_owned();
    let closed = match before {
        // Nothing has come in since.
        Some(before) => Closed { server: server.clone(), ..before },
        None => Closed { timeline, end, server: server.clone() },
    };
    let (closing, noted) = (spool.clone(), closed.clone());
    match crate::keep::blocking(move || closing.close(noted)).await {
        Ok(()) => Ok(()),
        Err(error @ SpoolError::Io { .. }) if spool.has_failed() || plan.allow_data_loss => {
            spool.close_until_restart(closed, error);
            Ok(())
        }
        Err(error @ SpoolError::Io { .. }) => {
            Err(PromoteError::NotNoted { server, end, error, chosen })
        }
        Err(error) => Err(error.into()),
    }
}

fn not_noted(server: &str, end: Lsn, error: &SpoolError, chosen: Option<&str>) -> String {
    let has = format!("{server} has every record that the spool holds, up to {end}");
    match chosen {
        None => format!(
            "{has}; but that the spool takes nothing in any more cannot be noted: {error}. It was not \
             promoted. See to that disk, and run this again. Without it: once the old principal is \
             stopped for good, so that this mirror acknowledges nothing more, the server can be \
             promoted without a loss, by --allow-data-loss here or by pg_promote() there"
        ),
        Some(chosen) => format!(
            "{has}; but that it is promoted instead of {chosen} cannot be noted: {error}. It was not \
             promoted. See to that disk, and run this again. Without it: once {chosen} is stopped \
             for good, the server can be promoted without a loss, by --instead-of '{chosen}' \
             --allow-data-loss here or by pg_promote() there"
        ),
    }
}

/// Of a server that was told.
async fn why_not_yet(
    spool: &Arc<Spool>,
    connection: &mut Connection,
    plan: &Plan,
    spool_end: Lsn,
) -> String {
    if let Ok(view) = look_within(connection, plan.patience).await
        && let (Some(too_low), _) = obstacle::obstacle(spool, &view, spool_end).await
    {
        return too_low.to_string();
    }
    "look at the server's log, and run this again".to_owned()
}

/// The error's own words name the server, mostly; those that came from it do not.
fn of_standby(server: &str, error: &farshore_pg::Error) -> String {
    let error = error.to_string();
    match error.contains(server) {
        true => format!("the standby: {error}"),
        false => format!("the standby {server}: {error}"),
    }
}

/// A standby that is being started is waited for.
async fn connect(plan: &Plan, progress: &mpsc::Sender<String>) -> Result<Connection, PromoteError> {
    let server = plan.standby.redacted();
    let begun = Instant::now();
    let mut said: Option<Instant> = None;
    loop {
        let error = match Connection::connect(&plan.standby, Mode::Sql).await {
            Ok(connection) => return Ok(connection),
            Err(error) => error,
        };
        // One that is stopped and started again takes none at all in between.
        let is_starting = error.sqlstate() == Some(CANNOT_CONNECT_NOW)
            || (said.is_some() && error.is_transient());
        if !is_starting || begun.elapsed() >= plan.patience {
            return Err(PromoteError::Standby { server, error });
        }
        if said.is_none_or(|said| said.elapsed() >= SAY_EVERY) {
            said = Some(Instant::now());
            let _ = progress.try_send(format!("{server} takes no connections yet: {error}"));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// What it lacks may be damaged here, in a segment that is long complete: a server asks for such
/// log again and again. Commits wait meanwhile, so it is looked for no longer than `patience`.
async fn why_it_lacks(
    spool: &Arc<Spool>,
    error: PromoteError,
    damage: Option<SpoolError>,
    patience: Duration,
) -> PromoteError {
    let PromoteError::Lacks { server, bytes, has, end, waited, why } = error else { return error };
    let reading = spool.clone();
    let checking = crate::keep::blocking(move || {
        let oldest = reading.segments()?.first().map(|segment| segment.number);
        let begins = oldest.map(|number| reading.identity().segment.start(number));
        reading.check_from(has).map(|()| begins)
    });
    let checked = tokio::time::timeout(patience, checking).await.unwrap_or(Ok(None));
    let removed = spool.has_failed().then(|| spool.failure());
    let removed = removed.filter(|failure| matches!(failure, SpoolError::Removed { .. }));
    match (damage, checked) {
        (Some(damage @ SpoolError::Damaged { .. }), _)
        | (_, Err(damage @ SpoolError::Damaged { .. })) => {
            PromoteError::LacksDamaged { server, bytes, damage }
        }
        (_, Ok(Some(begins))) if has < begins => {
            let why = format!(
                "What it needs next is not kept any more: the spool begins at {begins}. It cannot \
                 follow: promote another standby, or seed this one anew"
            );
            PromoteError::Lacks { server, bytes, has, end, waited, why }
        }
        _ => {
            let why = removed.map_or(why, |removed| removed.to_string());
            PromoteError::Lacks { server, bytes, has, end, waited, why }
        }
    }
}

/// Waits until the standby has replayed every whole record of the spool; where replay is held on
/// purpose, until it has them on its disk: a server that is promoted replays all that it has first,
/// if it has no recovery target. How it showed itself last.
async fn drain(
    connection: &mut Connection,
    plan: &Plan,
    (timeline, spool_end): (Timeline, Lsn),
    progress: &mpsc::Sender<String>,
) -> Result<View, PromoteError> {
    let server = connection.server().to_owned();
    let (mut best, mut moved) = (Lsn::ZERO, Instant::now());
    let mut said: Option<Instant> = None;
    let mut every = tokio::time::interval(LOOK_EVERY);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        let view = look_within(connection, plan.patience).await?;
        if !view.is_in_recovery {
            return Err(PromoteError::NoStandby { server });
        }
        let has = view.has();
        // What it has of another timeline is not what the spool holds.
        if has >= spool_end && view.timeline == Some(timeline) {
            return Ok(view);
        }
        // Replay of what it has on its disk may be what it is at, before it asks for more.
        if has > best {
            (best, moved) = (has, Instant::now());
        }
        if moved.elapsed() >= plan.patience {
            let bytes = spool_end.bytes_since(has);
            if plan.allow_data_loss {
                let _ = progress.try_send(format!(
                    "{server} lacks {bytes} bytes of log that the spool holds; promoted without \
                     them, as you allow"
                ));
                return Ok(view);
            }
            let why = view.why_nothing_comes((timeline, spool_end), &plan.listen);
            let waited = plan.patience;
            return Err(PromoteError::Lacks { server, bytes, has, end: spool_end, waited, why });
        }
        if said.is_none_or(|said| said.elapsed() >= SAY_EVERY) {
            said = Some(Instant::now());
            let _ = progress.try_send(format!(
                "{server} has the log up to {has}, the spool up to {spool_end}: {} bytes to go",
                spool_end.bytes_since(has)
            ));
        }
    }
}

/// A standby as it shows itself.
struct View {
    is_in_recovery: bool,
    system_id: String,
    /// Log that came by streaming is on its disk up to here.
    received: Lsn,
    replayed: Lsn,
    /// On purpose, by somebody or at a recovery target; or because its settings are too low.
    replay_is_paused: bool,
    replay_is_delayed: bool,
    /// Settings that name a recovery target.
    recovery_target: Option<String>,
    /// The timeline of that log.
    timeline: Option<Timeline>,
    /// Of its walreceiver.
    status: Option<String>,
    may_promote: bool,
    may_read: bool,
    settings: Settings,
}

impl View {
    /// Up to where a promotion would get. What a server has on its disk may have gone bad on the
    /// way there, so replay tells; where that is held on purpose, a promotion sets it going.
    fn has(&self) -> Lsn {
        if self.is_set_going() { self.received.max(self.replayed) } else { self.replayed }
    }

    /// Whether a promotion has it replay what it has. At a recovery target it ends recovery.
    fn is_set_going(&self) -> bool {
        (self.replay_is_paused || self.replay_is_delayed) && self.recovery_target.is_none()
    }

    /// The recovery target that a promotion must not meet. One that was reached may be wanted, by who
    /// allows what is behind it to be lost. One that was not ends the server instead ("recovery
    /// ended before configured recovery target was reached").
    fn stops_at(&self, allow_data_loss: bool) -> Option<String> {
        let settings = self.recovery_target.clone()?;
        (!(allow_data_loss && self.replay_is_paused)).then_some(settings)
    }

    fn why_nothing_comes(&self, (timeline, end): (Timeline, Lsn), listen: &str) -> String {
        if !self.is_set_going() && self.received >= end {
            return format!(
                "It has received all, and replays nothing beyond {}: a query there may be in the \
                 way, or log went bad on its disk; look at its log",
                self.replayed
            );
        }
        if let Some(other) = self.timeline.filter(|other| *other != timeline) {
            return format!(
                "It follows timeline {other}, and the spool is on {timeline}: it comes from \
                 elsewhere, or has not found the way yet; look at its log"
            );
        }
        match self.status.as_deref() {
            Some("streaming") => {
                "It streams, and nothing comes: is its upstream this mirror, and is the way there \
                 sound?"
                    .to_owned()
            }
            Some(status) => format!(
                "Its walreceiver is \"{status}\": look at its log. It should stream from {listen}"
            ),
            None => format!(
                "It has no walreceiver: its primary_conninfo should lead to {listen}; look at its \
                 log"
            ),
        }
    }
}

/// A server that hangs must not keep the mirror closed.
async fn look_within(connection: &mut Connection, within: Duration) -> Result<View, PromoteError> {
    let server = connection.server().to_owned();
    match tokio::time::timeout(within.max(Duration::from_secs(5)), look(connection)).await {
        Ok(view) => view.map_err(|error| PromoteError::Standby { server, error }),
        Err(_) => Err(PromoteError::Silent { server, within }),
    }
}

/// Every role may read these settings. Should one be refused or unknown all the same, nothing is
/// promoted: the server's words say which.
async fn look(connection: &mut Connection) -> Result<View, farshore_pg::Error> {
    let sql = "SELECT pg_is_in_recovery(), (SELECT system_identifier FROM pg_control_system()), \
               pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn(), \
               CASE WHEN pg_is_in_recovery() THEN pg_is_wal_replay_paused() ELSE false END, \
               current_setting('recovery_min_apply_delay') <> '0', \
               (SELECT string_agg(name, ', ') FROM (VALUES ('recovery_target'), \
               ('recovery_target_lsn'), ('recovery_target_name'), ('recovery_target_time'), \
               ('recovery_target_xid')) targets (name) \
               WHERE current_setting(name) <> ''), \
               (SELECT status FROM pg_stat_wal_receiver), \
               coalesce((SELECT received_tli FROM pg_stat_wal_receiver), \
               (SELECT nullif(min_recovery_end_timeline, 0) FROM pg_control_recovery())), \
               has_function_privilege('pg_promote(boolean, integer)', 'EXECUTE'), \
               has_function_privilege('pg_read_file(text)', 'EXECUTE')";
    let settings = SETTINGS.map(|name| format!(", current_setting('{name}')")).concat();
    let sql = &format!("{sql}{settings}");
    let rows = connection.query(sql, &[]).await?;
    let row = rows
        .first()
        .ok_or_else(|| farshore_pg::Error::Protocol("no row to a SELECT without FROM".into()))?;
    // NULL as long as nothing has been received or replayed.
    let position = |column| row.get(column).and_then(|text| text.parse().ok()).unwrap_or(Lsn::ZERO);
    // A setting that is no number is not known to be too low.
    let setting = |i| row.get(11 + i).and_then(|text| text.parse().ok()).unwrap_or(i32::MAX);
    Ok(View {
        is_in_recovery: row.parse_bool(0)?,
        system_id: row.get(1).unwrap_or_default().to_owned(),
        received: position(2),
        replayed: position(3),
        replay_is_paused: row.parse_bool(4)?,
        replay_is_delayed: row.parse_bool(5)?,
        recovery_target: row.get(6).map(str::to_owned),
        status: row.get(7).map(str::to_owned),
        timeline: row.get(8).and_then(|text| text.parse().ok()).map(Timeline),
        may_promote: row.parse_bool(9)?,
        may_read: row.parse_bool(10)?,
        settings: Settings(std::array::from_fn(setting)),
    })
}

/// The timeline that a server writes, which is in no recovery.
async fn timeline(connection: &mut Connection) -> Result<Timeline, PromoteError> {
    let server = connection.server().to_owned();
    let rows = connection.query("SELECT pg_walfile_name(pg_current_wal_lsn())", &[]).await;
    let rows = rows.map_err(|error| PromoteError::Standby { server: server.clone(), error })?;
    let name = rows.first().and_then(|row| row.get(0)).unwrap_or_default();
    let timeline = name.get(..8).and_then(|hex| u32::from_str_radix(hex, 16).ok()).map(Timeline);
    timeline.ok_or_else(|| PromoteError::WrongHistory {
        server,
        what: format!("it names its log \"{name}\""),
    })
}

/// The timeline that a promoted server is on, and where it left `own`, by its history file.
async fn fork(connection: &mut Connection, own: Timeline) -> Result<(Timeline, Lsn), PromoteError> {
    let server = connection.server().to_owned();
    let wrong = |what: String| PromoteError::WrongHistory { server: server.clone(), what };
    let timeline = timeline(connection).await?;
    let path = format!("pg_wal/{}", history_file_name(timeline));
    let rows = connection.query("SELECT pg_read_file($1)", &[Some(&path)]).await;
    let rows = rows.map_err(|error| PromoteError::Standby { server: server.clone(), error })?;
    let text = rows.first().and_then(|row| row.get(0)).unwrap_or_default();
    let history = History::parse(timeline, text).map_err(|error| wrong(error.to_string()))?;
    let (fork, _) = history.left(timeline, own).ok_or_else(|| {
        wrong(format!("its timeline {timeline} does not come from {own}, the spool's"))
    })?;
    Ok((timeline, fork))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    fn at_target(replay_is_paused: bool, recovery_target: Option<&str>) -> View {
        View {
            is_in_recovery: true,
            system_id: "7".to_owned(),
            received: Lsn(200),
            replayed: Lsn(100),
            replay_is_paused,
            replay_is_delayed: false,
            recovery_target: recovery_target.map(str::to_owned),
            timeline: Some(Timeline(1)),
            status: None,
            may_promote: true,
            may_read: true,
            settings: Settings::default(),
        }
    }

    #[test]
    fn what_is_behind_a_recovery_target_is_not_what_a_promotion_gets_to() {
        assert_eq!(at_target(true, None).has(), Lsn(200));
        assert_eq!(at_target(true, None).stops_at(false), None);
        let set = Some("recovery_target_lsn");
        assert_eq!(at_target(true, set).has(), Lsn(100));
        assert!(at_target(true, set).stops_at(false).is_some());
        assert!(at_target(false, set).stops_at(false).is_some());
        // Who allows the loss gets a server, and not one that stops.
        assert!(at_target(true, set).stops_at(true).is_none());
        assert!(at_target(false, set).stops_at(true).is_some());
    }

    /// A server that refuses every connection with a code; how often it did.
    async fn refusing(code: &'static str) -> (Config, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let count = Arc::new(AtomicUsize::new(0));
        let counted = count.clone();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                counted.fetch_add(1, SeqCst);
                let length = client.read_u32().await.unwrap() as usize;
                client.read_exact(&mut vec![0; length - 4]).await.unwrap();
                let fields = format!("SFATAL\0VFATAL\0C{code}\0Mit is starting up\0\0");
                client.write_u8(b'E').await.unwrap();
                client.write_u32(fields.len() as u32 + 4).await.unwrap();
                client.write_all(fields.as_bytes()).await.unwrap();
            }
        });
        let url = format!("postgres://u@127.0.0.1:{port}/d?sslmode=disable");
        (Config::parse(&url).unwrap(), count)
    }

    #[tokio::test]
    async fn a_standby_that_is_starting_is_waited_for_and_named() {
        for (code, is_asked_again) in [(CANNOT_CONNECT_NOW, true), ("3D000", false)] {
            let (standby, count) = refusing(code).await;
            let server = standby.redacted();
            let patience = Duration::from_millis(500);
            let (listen, instead_of) = (String::new(), None);
            let plan = Plan { standby, listen, allow_data_loss: false, instead_of, patience };
            let (progress, mut told) = mpsc::channel(8);
            let error = connect(&plan, &progress).await.err().unwrap().to_string();
            assert!(error.starts_with(&format!("the standby {server}: ")), "{error}");
            assert_eq!(count.load(SeqCst) > 1, is_asked_again, "{code}");
            assert_eq!(told.try_recv().is_ok(), is_asked_again, "{code}");
        }
    }
}
