//! How much log a principal keeps for a mirror: said when it is much, and bounded if that is wanted,
//! so that a far site that stays away or is slow does not fill the principal's disk.

use super::NearAgent;
use crate::agents::lock;
use crate::config::SiteConfig;
use crate::mirrors::note::Note;
use crate::mirrors::with_warning;
use farshore_pg::{Config, Connection, Error, Mode};
use std::time::Duration;
use tokio::sync::watch;

/// How often the principal is asked.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// In how many looks one is for slots of before.
const LOOK_FOR_EARLIER_EVERY: u64 = 12;

/// What lets this site see how much log is kept.
pub(crate) const LET_LOOK: &str = "let its role connect to the database too, which pg_hba.conf says; \
     from PostgreSQL 15 on replication is enough";

/// What is said of a principal that takes nobody in any more, and sends log yet.
const SHUTS_DOWN: &str =
    "the principal shuts down, which ends once all of its log is at the far end";

/// The bounds, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub warn_behind: u64,
    pub drop_behind: Option<u64>,
}

/// How far behind a mirror may be that was dropped and resumed: it is as far behind as before at
/// first, and would be dropped again before it can catch up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Leeway {
    /// No further than any.
    #[default]
    None,
    /// As far as it will be seen to be.
    AtNextLook,
    /// So many bytes.
    UpTo(u64),
}

impl Leeway {
    pub fn read(note: &Note) -> Leeway {
        match note.read() {
            None => Leeway::None,
            Some(text) => text.parse().map_or(Leeway::AtNextLook, Leeway::UpTo),
        }
    }

    fn text(self) -> Option<String> {
        match self {
            Leeway::None => None,
            Leeway::AtNextLook => Some("as it will be seen".to_owned()),
            Leeway::UpTo(bytes) => Some(bytes.to_string()),
        }
    }

    /// What is left of it for a mirror that is so many bytes behind, and that may be `most` behind
    /// once it has caught up.
    fn after(self, behind: u64, is_connected: bool, most: u64) -> Leeway {
        match self {
            Leeway::AtNextLook if behind > most => Leeway::UpTo(behind.saturating_add(most)),
            // Where the slot stands is told by the far end: before that it may seem near.
            Leeway::AtNextLook | Leeway::UpTo(_) if is_connected && behind <= most => Leeway::None,
            leeway => leeway,
        }
    }

    fn bound(self, most: u64) -> u64 {
        match self {
            Leeway::None => most,
            Leeway::AtNextLook => u64::MAX,
            Leeway::UpTo(bytes) => bytes.max(most),
        }
    }
}

/// What was seen last.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// Log that the principal keeps for the mirror's slot, in bytes.
    pub kept_bytes: Option<u64>,
    /// Why that could not be looked at the last time.
    pub not_looked: Option<String>,
    /// The principal shuts down.
    pub shuts_down: bool,
    /// Why the mirror was dropped; as its note says.
    pub dropped: Option<String>,
    /// Since it was resumed.
    pub leeway: Leeway,
    /// That another standby has come that the principal takes for this one.
    pub namesake: Option<String>,
}

impl Seen {
    /// Words on a mirror that goes on. A principal that is away is told of otherwise.
    pub fn warning(&self, bounds: &Bounds, is_connected: bool) -> Option<String> {
        let far_behind = with_warning(self.namesake.clone(), bounds.warning(self.kept_bytes));
        let not_looked = self.not_looked.as_ref().filter(|_| is_connected);
        if self.shuts_down && is_connected {
            return with_warning(far_behind, Some(SHUTS_DOWN.to_owned()));
        }
        with_warning(far_behind, not_looked.map(|why| bounds.are_void(why)))
    }
}

impl Bounds {
    /// That nothing holds the principal's log, as long as nobody can see how much it is.
    fn are_void(&self, why: &str) -> String {
        let bounds = match self.drop_behind {
            Some(_) => "neither warn_behind nor drop_behind does",
            None => "warn_behind does not do",
        };
        format!(
            "how much log the principal keeps for it cannot be looked at, and {bounds} anything \
             ({why}): {LET_LOOK}"
        )
    }

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
            for round in 0_u64.. {
                every.tick().await;
                if round.is_multiple_of(LOOK_FOR_EARLIER_EVERY) {
                    self.look_for_earlier_slots().await;
                }
                let who_waits = self.near.look_who_waits().await;
                for looked in [self.look_for_namesakes().await, who_waits, self.look().await] {
                    if let Err(error) = looked {
                        // The mirror itself tells of a principal that is away.
                        tracing::debug!(mirror = %self.near.name, "{error}");
                    }
                }
            }
        };
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => {}
            () = looking => {}
        }
    }

    /// A slot of before that keeps nothing any more is not told of at the next start.
    async fn look_for_earlier_slots(&self) {
        let (data_dir, name) = (self.data_dir.clone(), self.near.name.clone());
        let noted = tokio::task::spawn_blocking(move || Note::earlier_slots(&data_dir, &name));
        let server = self.near.principal.redacted();
        for (slot, note) in noted.await.unwrap_or_default() {
            let own = note.clone();
            let text = tokio::task::spawn_blocking(move || own.read()).await.ok().flatten();
            let is_here = text.is_some_and(|text| text == format!("{slot}\n{server}"));
            if !is_here || !matches!(kept_bytes(&self.near.principal, &slot).await, Ok(None)) {
                continue;
            }
            tracing::info!(mirror = %self.near.name, %slot, "the slot of before keeps nothing any more");
            let _ = tokio::task::spawn_blocking(move || note.remove()).await;
        }
    }

    async fn look_for_namesakes(&self) -> Result<(), Error> {
        let found = self.near.later_namesake().await?.map(|namesake| namesake.to_string());
        let before = std::mem::replace(&mut lock(&self.seen).namesake, found.clone());
        if let Some(found) = found.filter(|_| before.is_none()) {
            tracing::error!(mirror = %self.near.name, "{found}");
        }
        Ok(())
    }

    async fn look(&self) -> Result<(), Error> {
        let (name, slot) = (&self.near.name, &self.near.slot);
        let looked = kept_bytes(&self.near.principal, slot).await;
        self.note_look(looked.as_ref().err());
        let kept = looked?;
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
        let Some((kept, most)) = kept.zip(self.bounds.drop_behind) else { return Ok(()) };
        if kept <= self.leeway(kept, most).await.bound(most) {
            return Ok(());
        }
        let why = format!(
            "it was dropped, and stays so: the principal kept {kept} bytes of log for its slot \
             \"{slot}\", more than drop_behind ({most}). Commits that wait for it wait until \
             synchronous_standby_names does not name it. To let it go on: farshore mirror resume \
             SITE.toml {name}, at the near end. If the principal has dropped log that the far end \
             lacks, both ends say so then: stop the far site's node, remove the spool there, start it, and \
             seed the standbys anew"
        );
        self.set_leeway(Leeway::None).await;
        let (note, text) = (self.dropped.clone(), why.clone());
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

    fn note_look(&self, error: Option<&Error>) {
        let is_connected = self.near.status().connected;
        // cannot_connect_now, from a server that sends log: it is not one that starts.
        let shuts_down =
            is_connected && error.is_some_and(|error| error.sqlstate() == Some("57P03"));
        self.near.status().is_shutting_down = shuts_down;
        if std::mem::replace(&mut lock(&self.seen).shuts_down, shuts_down) != shuts_down
            && shuts_down
        {
            tracing::info!(mirror = %self.near.name, "{SHUTS_DOWN}");
        }
        let why = error.filter(|_| !shuts_down).map(ToString::to_string);
        let before = std::mem::replace(&mut lock(&self.seen).not_looked, why.clone());
        if let Some(why) = why.filter(|_| before.is_none() && is_connected) {
            tracing::warn!(mirror = %self.near.name, "{}", self.bounds.are_void(&why));
        }
    }

    async fn leeway(&self, kept: u64, most: u64) -> Leeway {
        let status = *self.near.status();
        let before = lock(&self.seen).leeway;
        let ahead = status.principal_end.bytes_since(status.far.durable);
        let behind = if status.connected { kept.max(ahead) } else { kept };
        let leeway = before.after(behind, status.connected, most);
        if leeway != before {
            self.set_leeway(leeway).await;
        }
        leeway
    }

    async fn set_leeway(&self, leeway: Leeway) {
        lock(&self.seen).leeway = leeway;
        let note = self.resumed.clone();
        let set = move || match leeway.text() {
            Some(text) => note.write(&text),
            None => note.remove().map(drop),
        };
        if let Ok(Err(error)) = tokio::task::spawn_blocking(set).await {
            tracing::warn!(mirror = %self.near.name, "{error}");
        }
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
        // One word for one thing: whoever lets a mirror go on that was dropped need not know that
        // commits are held beside it.
        if lock(&self.seen).dropped.is_none() {
            if self.take_any_spool().await? {
                return Ok(format!(
                    "mirror \"{name}\" takes whichever far end asks next; the one that was refused \
                     does so within a minute, and at once by farshore mirror resume SITE.toml {name} \
                     there. Whichever other one has the same spool is refused from then on"
                ));
            }
            return Ok(match self.near.let_commits_return() {
                Some(start) => format!(
                    "mirror \"{name}\" acknowledges log from now on: commits from before {start} \
                     return, and are at the principal alone until a standby is seeded"
                ),
                None => format!("mirror \"{name}\" was not dropped: nothing was changed"),
            });
        }
        let (dropped, resumed) = (self.dropped.clone(), self.resumed.clone());
        tokio::task::spawn_blocking(move || let_go_on(&dropped, &resumed))
            .await
            .map_err(|_| "removing the note died".to_owned())??;
        let mut seen = lock(&self.seen);
        (seen.dropped, seen.leeway) = (None, Leeway::AtNextLook);
        tracing::info!(mirror = %name, "resumed");
        let mut text = resumed_text(name);
        if let Some(held) = self.held() {
            text.push_str(&format!(". That changes nothing for commits that are held: {held}"));
        }
        Ok(text)
    }
}

impl NearAgent {
    /// Whether a far end was refused as a copy; then whichever asks next is taken.
    async fn take_any_spool(&self) -> Result<bool, String> {
        let turns = self.near.turns.clone();
        let taken = tokio::task::spawn_blocking(move || turns.take_any()).await;
        taken.map_err(|_| "removing the note died".to_owned())?
    }
}

/// The same where no node runs.
///
/// # Errors
/// Why not, for a person.
pub(crate) fn resume_without_node(site: &SiteConfig, name: &str) -> Result<String, String> {
    if !site.mirrors.near.iter().any(|mirror| mirror.name == name) {
        let is_far = site.mirrors.far.iter().any(|mirror| mirror.name == name);
        return Err(if is_far {
            format!(
                "no node runs here: the far end of mirror \"{name}\" asks its principal again when \
                 it starts (farshore run). Where the mirror was dropped, farshore mirror resume at \
                 its near end"
            )
        } else {
            format!("the site file has no mirror \"{name}\"")
        });
    }
    let (dropped, resumed) =
        (Note::dropped(&site.data_dir, name), Note::resumed(&site.data_dir, name));
    if !let_go_on(&dropped, &resumed)? {
        return Ok(format!(
            "mirror \"{name}\" was not dropped: nothing was changed. Commits that are held are let go \
             while the node runs"
        ));
    }
    Ok(resumed_text(name))
}

/// Why a mirror with its near end here was dropped, if it was. Blocks on the disk.
pub(crate) fn why_dropped(site: &SiteConfig, name: &str) -> Option<String> {
    Note::dropped(&site.data_dir, name).read()
}

/// Whether it was dropped. The leeway first: without it, it would be dropped again at once.
fn let_go_on(dropped: &Note, resumed: &Note) -> Result<bool, String> {
    if dropped.read().is_none() {
        return Ok(false);
    }
    if let Some(text) = Leeway::AtNextLook.text() {
        resumed.write(&text)?;
    }
    dropped.remove()
}

fn resumed_text(name: &str) -> String {
    format!(
        "mirror \"{name}\" goes on when its far end asks for it next. If the principal has dropped \
         log that the far end lacks, both ends say so: stop the far site's node, remove the spool \
         there, start it, and seed the standbys anew"
    )
}

/// `None` if there is no such slot, or it keeps nothing. There is no SQL where the principal is a
/// node that keeps log alone, or lets the role in for replication only; before PostgreSQL 15 there
/// is nothing else.
pub(crate) async fn kept_bytes(principal: &Config, slot: &str) -> Result<Option<u64>, Error> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mirror_that_was_resumed_may_catch_up() {
        const MOST: u64 = 100;
        assert_eq!(Leeway::None.after(500, true, MOST), Leeway::None);
        assert_eq!(Leeway::None.bound(MOST), MOST);
        // Its slot was made a moment ago, and the far end has not said where it is.
        let fresh = Leeway::AtNextLook.after(3, false, MOST);
        assert_eq!((fresh, fresh.bound(MOST)), (Leeway::AtNextLook, u64::MAX));
        let behind = fresh.after(500, true, MOST);
        assert_eq!((behind, behind.bound(MOST)), (Leeway::UpTo(600), 600));
        // It catches up, or falls back by as much as any mirror may.
        assert_eq!(behind.after(550, true, MOST), behind);
        assert_eq!(behind.after(100, false, MOST), behind, "it is away");
        assert_eq!(behind.after(100, true, MOST), Leeway::None);
        assert_eq!(fresh.after(100, true, MOST), Leeway::None);
    }

    #[test]
    fn bounds_that_nobody_can_look_at_are_told() {
        let (warn_behind, mut bounds) =
            (1 << 30, Bounds { warn_behind: 1 << 30, drop_behind: None });
        let why = Some("no pg_hba.conf entry".to_owned());
        let seen = Seen { not_looked: why, ..Seen::default() };
        assert_eq!(seen.warning(&bounds, false), None, "the principal may be away");
        let warning = seen.warning(&bounds, true).unwrap();
        assert!(warning.contains("warn_behind does not do anything (no pg_hba.conf"), "{warning}");
        bounds.drop_behind = Some(2 * warn_behind);
        let warning = seen.warning(&bounds, true).unwrap();
        assert!(warning.contains("neither warn_behind nor drop_behind does"), "{warning}");
        assert_eq!(Seen::default().warning(&bounds, true), None);
    }

    #[test]
    fn leeway_outlives_the_node() {
        let folder = tempfile::tempdir().unwrap();
        let note = Note::resumed(folder.path(), "m");
        assert_eq!(Leeway::read(&note), Leeway::None);
        for leeway in [Leeway::AtNextLook, Leeway::UpTo(7)] {
            note.write(&leeway.text().unwrap()).unwrap();
            assert_eq!(Leeway::read(&note), leeway);
        }
        let dropped = Note::dropped(folder.path(), "m");
        assert!(!let_go_on(&dropped, &note).unwrap());
        dropped.write("too far behind").unwrap();
        assert!(let_go_on(&dropped, &note).unwrap());
        assert_eq!((dropped.read(), Leeway::read(&note)), (None, Leeway::AtNextLook));
    }
}
