//! The replication slot: made once, checked against the store at every start, kept moving.
//!
//! The store notes which slot on which server feeds it. A slot that is gone, belongs to another
//! server, or stands ahead of what the store holds durable means that changes may be missing: that
//! is an error, never a fresh start.

mod overlap;

use crate::patience::patiently;
use crate::{CaptureError, publication::PublicationSpec};
use farshore_fault as fault;
use farshore_model::{Lsn, PgTime};
use farshore_pg::replication::{SlotOptions, SlotSnapshot};
use farshore_pg::{Connection, Mode};
use farshore_store::LogStore;
pub(crate) use overlap::{Overlap, check_overlap};

/// Notes in the store about where its log comes from.
const NOTE_SYSTEM: &str = "publisher.system_identifier";
const NOTE_TIMELINE: &str = "publisher.timeline";
const NOTE_SLOT: &str = "slot.name";
const NOTE_CREATING: &str = "slot.creating";
const NOTE_START: &str = "slot.start";
/// That the publisher has lost what the store holds, in words; empty where it was another server.
const NOTE_LOST: &str = "publisher.lost";
/// The server on which that was found, as the site file names it.
const NOTE_LOST_ON: &str = "publisher.lost_on";

/// What to do when changes are missing.
pub(crate) fn copy_anew(publication: &str) -> String {
    format!(
        "To copy everything anew: stop this node, drop the slot, remove \
         data_dir/publications/{publication}, empty the target's tables, DROP SCHEMA farshore \
         CASCADE there, and start"
    )
}

/// What was found of a publisher that has lost what the store holds. Once it has written as much
/// again its positions look right, and name other changes: so it is remembered, until the site file
/// names another server, or a look at this one shows that it has all after all.
pub fn noted_loss(
    spec: &PublicationSpec,
    note: impl Fn(&str) -> Option<String>,
) -> Option<CaptureError> {
    let found = note(NOTE_LOST).filter(|found| !found.is_empty())?;
    // Under another role, or spelled otherwise, it is the same one.
    let on = farshore_pg::Config::parse(&note(NOTE_LOST_ON)?).ok()?;
    on.is_same_place(&spec.source).then_some(CaptureError::Gap(found))
}

/// Remembers it. Durable when this returns.
fn note_loss(
    spec: &PublicationSpec,
    store: &dyn LogStore,
    found: &str,
) -> Result<(), farshore_store::StoreError> {
    store.set_note(NOTE_LOST_ON, &spec.source.redacted())?;
    store.set_note(NOTE_LOST, found)
}

/// Forgets it, if what the slot would give again shows that the publisher has what the store holds:
/// the address may have led to an old copy of the server for a while. Where that was not looked at,
/// what was found holds.
pub(crate) fn settle_loss(
    spec: &PublicationSpec,
    store: &dyn LogStore,
    seen: Overlap,
) -> Result<(), CaptureError> {
    if store.note(NOTE_LOST).is_none_or(|found| found.is_empty()) {
        return Ok(());
    }
    let lost = noted_loss(spec, |key| store.note(key));
    match (lost, seen) {
        (Some(lost), Overlap::NotLooked { why, passes }) => {
            let held = format!("{lost}. Whether it has all after all was not looked at now: {why}");
            return Err(if passes {
                CaptureError::Interrupted(held)
            } else {
                CaptureError::Gap(held)
            });
        }
        (Some(_), Overlap::Agrees) => tracing::info!(
            publication = %spec.name,
            "the publisher has all that the store holds; what was found of it before is forgotten"
        ),
        (None, _) => {}
    }
    Ok(store.set_note(NOTE_LOST, "")?)
}

/// Says what would keep the slot from being made, adopted or gone on with, without changing
/// anything. `begun` tells what this site has done with it before.
pub async fn look_at_slot(
    spec: &PublicationSpec,
    sql: &mut Connection,
    begun: Begun,
) -> Result<(), CaptureError> {
    let slot = spec.slot_name();
    match (slot_row(spec, sql, &slot).await?, &spec.adopt_slot) {
        (Some(row), Some(_)) => check_slot(spec, &slot, &row).map(drop),
        (None, Some(_)) => Err(nothing_to_adopt(spec, &slot)),
        (Some(row), None) => match begun {
            Begun::Not => Err(somebody_elses(spec, &slot, &row)),
            // Dropped, and made anew.
            Begun::Making => Ok(()),
            Begun::Made => check_slot(spec, &slot, &row).map(drop),
        },
        (None, None) if begun == Begun::Made => Err(gone(spec, &slot)),
        (None, None) => Ok(()),
    }
}

fn gone(spec: &PublicationSpec, slot: &str) -> CaptureError {
    CaptureError::Gap(format!(
        "publication \"{}\": replication slot \"{slot}\" is gone from {}. Changes after what this \
         store holds may be lost to it. {}",
        spec.name,
        spec.source.redacted(),
        copy_anew(&spec.name)
    ))
}

fn nothing_to_adopt(spec: &PublicationSpec, slot: &str) -> CaptureError {
    CaptureError::Setup(format!(
        "publication \"{}\": the publisher has no slot named \"{slot}\" to adopt. Create it with \
         plugin pgoutput, or remove `adopt_slot`",
        spec.name
    ))
}

fn somebody_elses(spec: &PublicationSpec, slot: &str, row: &SlotRow) -> CaptureError {
    let user =
        row.active_pid.as_ref().map_or(String::new(), |pid| format!(" (in use by pid {pid})"));
    CaptureError::Setup(format!(
        "publication \"{}\": replication slot \"{slot}\" already exists on {} and was not made for \
         this store{user}. Another site may use it: give this publication another name, drop the \
         slot, or set adopt_slot = \"{slot}\"",
        spec.name,
        spec.source.redacted()
    ))
}

/// What a stream that cannot find the PostgreSQL publication means: the log between the slot's
/// position and where a new publication is made cannot be decoded for it.
pub(crate) fn publication_gone(spec: &PublicationSpec, error: &farshore_pg::Error) -> CaptureError {
    CaptureError::Gap(format!(
        "publication \"{}\": {error}. PostgreSQL publication \"{}\" was dropped, or made after the \
         slot's position, and the log since then cannot be decoded for it. {}",
        spec.name,
        spec.publication_name(),
        copy_anew(&spec.name)
    ))
}

/// Whether a publisher that says so has found rows in its log of a table that it does not know.
pub(crate) fn is_undecodable(code: &str, message: &str) -> bool {
    // "filenumber" since 16.
    code == "XX000" && message.starts_with("could not map filen")
}

/// What a stream means whose publisher cannot decode its own log: trying again decodes the same.
///
/// A known way to it: before version 16 a publisher that begins to decode while a transaction is
/// under way which has made a table's file anew (TRUNCATE, a rewriting ALTER TABLE) goes by what
/// that transaction's commit tells and by who was running, and may miss it (PostgreSQL's commit
/// 7f13ac8123, "Fix catalog lookup with the wrong snapshot during logical decoding", of which
/// versions before 16 could only get a part). Whether the copies of a slot that capture makes and
/// moves can lead to it too is not known.
pub(crate) fn log_undecodable(spec: &PublicationSpec, error: &farshore_pg::Error) -> CaptureError {
    CaptureError::Gap(format!(
        "publication \"{}\": {error}: the publisher cannot decode its own log from where slot \
         \"{}\" stands. Versions of PostgreSQL before 16 are known for that where a table was \
         truncated or rewritten by a transaction that was under way when decoding began. {}",
        spec.name,
        spec.slot_name(),
        copy_anew(&spec.name)
    ))
}

/// The publisher's timeline and the end of its log.
async fn log_end(spec: &PublicationSpec, sql: &mut Connection) -> Result<(u32, Lsn), CaptureError> {
    let rows = sql
        .query(
            "SELECT CASE WHEN NOT pg_is_in_recovery() THEN \
               ('x' || substr(pg_walfile_name(pg_current_wal_flush_lsn()), 1, 8))::bit(32)::int END, \
             CASE WHEN NOT pg_is_in_recovery() THEN pg_current_wal_flush_lsn() END",
            &[],
        )
        .await
        .map_err(|error| spec.publisher_error(error))?;
    let row = rows
        .first()
        .ok_or_else(|| CaptureError::Protocol("no answer to where the log ends".to_owned()))?;
    // In the middle of a failover it may be promoted any moment.
    if row.get(1).is_none() {
        return Err(CaptureError::Standby(spec.source.redacted()));
    }
    let parse = |error| spec.publisher_error(error);
    Ok((row.parse(0).map_err(parse)?, row.parse(1).map_err(parse)?))
}

/// Refuses a publisher that was set back to before what the store holds: its positions would name
/// other changes than ours.
async fn check_history(
    spec: &PublicationSpec,
    sql: &mut Connection,
    store: &dyn LogStore,
    known: Lsn,
) -> Result<(), CaptureError> {
    let name = &spec.name;
    let (timeline, end) = log_end(spec, sql).await?;
    let noted = store.note(NOTE_TIMELINE).and_then(|noted| noted.parse::<u32>().ok());
    if end < known {
        let shorter = format!(
            "publication \"{name}\": the publisher's log ends at {end}, before what the store holds \
             ({known}): it was set back, or it is another server. What it writes from then on is \
             not what the targets have. If it is another server, correct `source`."
        );
        let anew = copy_anew(name);
        // Of another timeline it is not the server that the store was filled from: an old primary,
        // which an address led to for a moment, and that is seen again each time.
        if noted.is_some_and(|noted| noted != timeline) {
            return Err(CaptureError::Gap(format!("{shorter} {anew}")));
        }
        if let Some(lost) = noted_loss(spec, |key| store.note(key)) {
            return Err(lost);
        }
        let lost = format!(
            "{shorter} Found {}, and remembered until the server is seen to have it: once the right \
             one is back, farshore resume. {anew}",
            PgTime::now()
        );
        note_loss(spec, store, &lost)?;
        return Err(CaptureError::Gap(lost));
    }
    if let Some(before) = noted.filter(|before| *before != timeline) {
        let left_at = timeline_left_at(spec, timeline, before).await?;
        if left_at.is_none_or(|left_at| left_at < known) {
            let at = left_at.map_or_else(|| "an unknown position".to_owned(), |at| at.to_string());
            return Err(CaptureError::Gap(format!(
                "publication \"{name}\": the publisher is on timeline {timeline}, which left \
                 timeline {before} at {at}, before what the store holds ({known}): the store has \
                 changes that this server lost. {}",
                copy_anew(name)
            )));
        }
        tracing::info!(publication = %name, before, timeline, "the publisher changed its timeline");
    }
    store.set_note(NOTE_TIMELINE, &timeline.to_string())?;
    Ok(())
}

/// Where `timeline`'s history left the timeline `before` (PostgreSQL docs: "27.3.5 Timelines").
async fn timeline_left_at(
    spec: &PublicationSpec,
    timeline: u32,
    before: u32,
) -> Result<Option<Lsn>, CaptureError> {
    let mut replication = spec.connect(Mode::LogicalReplication).await?;
    let history = replication
        .simple_query(&format!("TIMELINE_HISTORY {timeline}"))
        .await
        .map_err(|error| spec.publisher_error(error))?;
    replication.close().await;
    let row = history.first().and_then(|set| set.rows.first());
    let content = row.and_then(|row| row.get(1)).unwrap_or_default();
    // Lines of: timeline, switch position, reason. Bytea may come in its hexadecimal form.
    let decoded = content.strip_prefix("\\x").and_then(decode_hex);
    let content = decoded.as_deref().unwrap_or(content);
    Ok(content.lines().find_map(|line| {
        let mut fields = line.split_whitespace();
        let left: u32 = fields.next()?.parse().ok()?;
        (left == before).then(|| fields.next()?.parse().ok())?
    }))
}

fn decode_hex(digits: &str) -> Option<String> {
    let bytes: Option<Vec<u8>> = (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok())
        .collect();
    String::from_utf8(bytes?).ok()
}

/// What `pg_replication_slots` says of our slot.
struct SlotRow {
    plugin: Option<String>,
    database: Option<String>,
    active_pid: Option<String>,
    confirmed: Option<Lsn>,
    wal_status: Option<String>,
    /// Why it was invalidated, from version 17 on.
    invalidated_by: Option<String>,
}

/// Where the log of a store begins: changes before it were never in it. `None` until capture has
/// made or adopted its slot.
pub fn log_begins(store: &dyn LogStore) -> Option<Lsn> {
    store.note(NOTE_START)?.parse().ok()
}

/// Whether a store's log is that of another site's.
pub fn is_replica(store: &dyn LogStore) -> bool {
    store.note(NOTE_START).is_some() && store.note(NOTE_SLOT).is_none()
}

/// Notes in a store that is to be a replica of another site's where its log begins, and which
/// publisher it comes from.
pub fn begin_replica(
    store: &dyn LogStore,
    publisher: &str,
    begins: Lsn,
) -> Result<(), farshore_store::StoreError> {
    store.set_note(NOTE_SYSTEM, publisher)?;
    store.set_note(NOTE_START, &begins.to_string())
}

/// How far a store is with its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begun {
    /// Nothing was done.
    Not,
    /// It was about to be made: it may be there, or half there, or not.
    Making,
    /// It was made or adopted, and feeds the store.
    Made,
}

/// What a store's notes say of its slot.
pub fn begun(note: impl Fn(&str) -> Option<String>) -> Begun {
    match (note(NOTE_START), note(NOTE_CREATING)) {
        (Some(_), _) => Begun::Made,
        (None, Some(_)) => Begun::Making,
        (None, None) => Begun::Not,
    }
}

/// The slot that feeds a store, as far as its notes tell.
pub fn noted_slot(note: impl Fn(&str) -> Option<String>) -> Option<String> {
    note(NOTE_SLOT)
}

/// The publisher's system identifier, as far as the store knows it.
pub fn publisher_identity(store: &dyn LogStore) -> Option<String> {
    store.note(NOTE_SYSTEM)
}

/// Makes sure that the slot exists and continues what `store` holds; returns where to stream from.
/// `tell` hears which transactions its creation waits for.
pub async fn ensure_slot(
    spec: &PublicationSpec,
    sql: &mut Connection,
    store: &dyn LogStore,
    tell: impl Fn(Option<String>),
) -> Result<Lsn, CaptureError> {
    let slot = spec.slot_name();
    let name = &spec.name;
    let system = system_identifier(spec, sql).await?;
    if let Some(known) = store.note(NOTE_SYSTEM).filter(|known| *known != system) {
        return Err(CaptureError::Gap(format!(
            "publication \"{name}\": {} is another database cluster (system identifier {system}) \
             than the one this store was filled from ({known}). Point `source` back, or start a \
             new publication name",
            spec.source.redacted()
        )));
    }
    let row = slot_row(spec, sql, &slot).await?;
    let durable = store.durable().borrow().0;
    if let Some(noted) = store.note(NOTE_START) {
        let start: Lsn =
            noted.parse().map_err(|error| CaptureError::Setup(format!("store note: {error}")))?;
        if let Some(old) = store.note(NOTE_SLOT).filter(|old| *old != slot) {
            return Err(CaptureError::Setup(format!(
                "publication \"{name}\": the store continues slot \"{old}\", the site file names \
                 \"{slot}\". Use the old name, or a new publication name"
            )));
        }
        let Some(row) = row else {
            return Err(gone(spec, &slot));
        };
        let confirmed = check_slot(spec, &slot, &row)?;
        let known = durable.max(start);
        check_not_ahead(spec, confirmed, known)?;
        check_history(spec, sql, store, known).await?;
        return Ok(known);
    }
    if durable > Lsn::ZERO {
        return Err(CaptureError::Gap(format!(
            "publication \"{name}\": the store holds the log up to {durable}, but its file `notes`, \
             which tells the slot that fed it, is gone. Put that file back. {}",
            copy_anew(name)
        )));
    }
    let start = match (row, &spec.adopt_slot) {
        // What the slot holds from before our publication was made cannot be decoded for it, and
        // nothing has been copied yet: begin at the log's end.
        (Some(row), Some(_)) => check_slot(spec, &slot, &row)?.max(log_end(spec, sql).await?.1),
        (None, Some(_)) => return Err(nothing_to_adopt(spec, &slot)),
        (Some(row), None) => {
            // We died between making the slot and noting it: nothing was read from it yet.
            if store.note(NOTE_CREATING).as_deref() != Some(&slot) {
                return Err(somebody_elses(spec, &slot, &row));
            }
            sql.execute("SELECT pg_drop_replication_slot($1)", &[Some(&slot)])
                .await
                .map_err(|error| spec.publisher_error(error))?;
            patiently(spec, create_slot(spec, &slot), tell).await?
        }
        (None, None) => {
            store.set_note(NOTE_CREATING, &slot)?;
            fault::point("capture.before-slot-created");
            patiently(spec, create_slot(spec, &slot), tell).await?
        }
    };
    fault::point("capture.after-slot-created");
    let (timeline, _) = log_end(spec, sql).await?;
    store.set_note(NOTE_TIMELINE, &timeline.to_string())?;
    store.set_note(NOTE_SYSTEM, &system)?;
    store.set_note(NOTE_SLOT, &slot)?;
    store.set_note(NOTE_START, &start.to_string())?;
    tracing::info!(publication = %name, %slot, %start, "replication slot ready");
    Ok(start)
}

/// Refuses a slot that was confirmed beyond what the store knows.
pub(crate) fn check_not_ahead(
    spec: &PublicationSpec,
    confirmed: Lsn,
    known: Lsn,
) -> Result<(), CaptureError> {
    if confirmed <= known {
        return Ok(());
    }
    let (name, slot) = (&spec.name, spec.slot_name());
    Err(CaptureError::Gap(format!(
        "publication \"{name}\": slot \"{slot}\" stands at {confirmed}, but the store holds the log \
         only up to {known}: something else moved the slot, or the store was replaced. The changes \
         between are not in the store. {}",
        copy_anew(name)
    )))
}

/// Where the slot and the publisher's log stand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// Decoding begins here.
    pub restart: Lsn,
    /// What the slot was told last.
    pub confirmed: Lsn,
    /// End of the log that is safe on the publisher's disk.
    pub end: Lsn,
    /// Some session has the slot.
    pub in_use: bool,
    /// It gives nothing that the standbys in `synchronized_standby_slots` do not have yet.
    pub waits_for_standbys: bool,
}

/// Asks where our slot and the publisher's log stand; `None` if the slot is gone or lost.
pub(crate) async fn place(
    spec: &PublicationSpec,
    sql: &mut Connection,
) -> Result<Option<Place>, CaptureError> {
    place_of(spec, sql, &spec.slot_name()).await
}

/// The same of any logical slot.
async fn place_of(
    spec: &PublicationSpec,
    sql: &mut Connection,
    slot: &str,
) -> Result<Option<Place>, CaptureError> {
    // As JSON: before version 17 there is no column of that name.
    let rows = sql
        .query(
            "SELECT restart_lsn, confirmed_flush_lsn, pg_current_wal_flush_lsn(), active_pid, \
               current_setting('synchronized_standby_slots', true) <> '' \
                 AND (to_jsonb(s)->>'failover')::boolean \
             FROM pg_replication_slots AS s WHERE slot_name = $1 \
             AND confirmed_flush_lsn IS NOT NULL AND restart_lsn IS NOT NULL",
            &[Some(slot)],
        )
        .await
        .map_err(|error| spec.publisher_error(error))?;
    let Some(row) = rows.first() else { return Ok(None) };
    let parse = |error| spec.publisher_error(error);
    Ok(Some(Place {
        restart: row.parse(0).map_err(parse)?,
        confirmed: row.parse(1).map_err(parse)?,
        end: row.parse(2).map_err(parse)?,
        in_use: row.get(3).is_some(),
        waits_for_standbys: row.get(4) == Some("t"),
    }))
}

/// A temporary copy of our slot, which goes with the session that made it: what is taken from it is
/// not taken from our slot, which stays at what is durable here.
pub(crate) struct SlotCopy {
    name: String,
}

impl SlotCopy {
    /// Makes a copy that stands at `from`, where the store ends. The publisher refuses that where
    /// no slot is free.
    pub async fn make(
        spec: &PublicationSpec,
        sql: &mut Connection,
        from: Lsn,
    ) -> Result<SlotCopy, CaptureError> {
        let (slot, copy) = (
            spec.slot_name(),
            SlotCopy { name: format!("farshore_batches_{}", sql.backend_pid()) },
        );
        let make = "SELECT pg_copy_logical_replication_slot($1, $2, true)";
        let made = sql.query(make, &[Some(&slot), Some(copy.name())]).await;
        made.map_err(|error| spec.publisher_error(error))?;
        let Some(place) = place_of(spec, sql, copy.name()).await? else { return Ok(copy) };
        check_not_ahead(spec, place.confirmed, from)?;
        if place.confirmed < from {
            let advanced = advance(sql, copy.name(), from).await;
            advanced.map_err(|error| spec.publisher_error(error))?;
        }
        Ok(copy)
    }

    /// What the publisher calls it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where decoding begins, which moves on with what is taken; `None` if the copy is gone or lost.
    pub async fn restart(
        &self,
        spec: &PublicationSpec,
        sql: &mut Connection,
    ) -> Result<Option<Lsn>, CaptureError> {
        Ok(place_of(spec, sql, self.name()).await?.map(|place| place.restart))
    }
}

/// Moves a slot to `position`: what was committed before is not asked of it again.
pub(crate) async fn advance(
    sql: &mut Connection,
    slot: &str,
    position: Lsn,
) -> Result<(), farshore_pg::Error> {
    let position = position.to_string();
    let advance = "SELECT pg_replication_slot_advance($1, $2)";
    sql.query(advance, &[Some(slot), Some(&position)]).await.map(drop)
}

/// Ends the publisher's process `walsender`, of a stream of ours, if it has our slot still.
pub(crate) async fn end_walsender(
    spec: &PublicationSpec,
    sql: &mut Connection,
    walsender: i32,
) -> Result<(), CaptureError> {
    let end = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots \
               WHERE slot_name = $1 AND active_pid = $2::text::int";
    let (slot, pid) = (spec.slot_name(), walsender.to_string());
    let ended = sql.query(end, &[Some(&slot), Some(&pid)]).await;
    ended.map(drop).map_err(|error| spec.publisher_error(error))
}

/// The cluster's system identifier (`pg_control_system` may be closed to us; the replication
/// command is not).
async fn system_identifier(
    spec: &PublicationSpec,
    sql: &mut Connection,
) -> Result<String, CaptureError> {
    let open = sql.query("SELECT system_identifier::text FROM pg_control_system()", &[]).await;
    if let Ok(Some(id)) = open.map(|rows| rows.first().and_then(|r| r.get(0)).map(str::to_owned)) {
        return Ok(id);
    }
    let mut replication = spec.connect(Mode::LogicalReplication).await?;
    let system =
        replication.identify_system().await.map_err(|error| spec.publisher_error(error))?;
    Ok(system.system_id)
}

async fn slot_row(
    spec: &PublicationSpec,
    sql: &mut Connection,
    slot: &str,
) -> Result<Option<SlotRow>, CaptureError> {
    let rows = sql
        .query(
            // As JSON: before version 17 there is no column of that name.
            "SELECT plugin, database, active_pid, confirmed_flush_lsn, wal_status, \
               to_jsonb(s)->>'invalidation_reason' \
             FROM pg_replication_slots AS s WHERE slot_name = $1",
            &[Some(slot)],
        )
        .await
        .map_err(|error| spec.publisher_error(error))?;
    let Some(row) = rows.first() else { return Ok(None) };
    let text = |i: usize| row.get(i).map(str::to_owned);
    let confirmed = match row.get(3) {
        Some(_) => Some(row.parse(3).map_err(|error| spec.publisher_error(error))?),
        None => None,
    };
    Ok(Some(SlotRow {
        plugin: text(0),
        database: text(1),
        active_pid: text(2),
        confirmed,
        wal_status: text(4),
        invalidated_by: text(5),
    }))
}

/// A slot that can feed this publication; returns what it has been told.
fn check_slot(spec: &PublicationSpec, slot: &str, row: &SlotRow) -> Result<Lsn, CaptureError> {
    let name = &spec.name;
    let setup = |what: String| Err(CaptureError::Setup(what));
    if row.plugin.as_deref() != Some("pgoutput") {
        let plugin = row.plugin.as_deref().unwrap_or("none: it is a physical slot");
        return setup(format!(
            "publication \"{name}\": slot \"{slot}\" uses plugin {plugin}; pgoutput is needed. \
             Name another slot"
        ));
    }
    let ours = &spec.source.dbname;
    if let Some(theirs) = row.database.as_ref().filter(|theirs| *theirs != ours) {
        return setup(format!(
            "publication \"{name}\": slot \"{slot}\" belongs to database \"{theirs}\", not to \
             \"{ours}\". Name another slot, or another database in `source`"
        ));
    }
    if row.wal_status.as_deref() == Some("lost") {
        let why = why_invalidated(row.invalidated_by.as_deref());
        return Err(CaptureError::Gap(format!(
            "publication \"{name}\": slot \"{slot}\" was invalidated: {why}. {}",
            copy_anew(name)
        )));
    }
    match row.confirmed {
        Some(confirmed) => Ok(confirmed),
        None => setup(format!("publication \"{name}\": slot \"{slot}\" has no confirmed position")),
    }
}

/// The reason that `pg_replication_slots` gives, in words.
fn why_invalidated(reason: Option<&str>) -> String {
    match reason {
        Some("idle_timeout") => {
            "nobody has used it for so long that the publisher gave it up (see \
                                 idle_replication_slot_timeout)"
                .to_owned()
        }
        Some("wal_level_insufficient") => {
            "the publisher ran with a wal_level that is not logical".to_owned()
        }
        Some("rows_removed") => "the publisher has removed rows of its catalogs that were still \
                                 needed to decode its log"
            .to_owned(),
        None | Some("wal_removed") => "the publisher has removed log that was still needed (see \
                                       max_slot_wal_keep_size)"
            .to_owned(),
        Some(other) => format!("the publisher says {other}"),
    }
}

async fn create_slot(spec: &PublicationSpec, slot: &str) -> Result<Lsn, CaptureError> {
    let mut replication = spec.connect(Mode::LogicalReplication).await?;
    let options = SlotOptions {
        temporary: false,
        snapshot: SlotSnapshot::Nothing,
        // Failover slots (17+) are copied to physical standbys, so that a publisher's failover
        // does not lose the slot.
        failover: replication.server_version() >= 170_000,
        two_phase: false,
    };
    let created = replication
        .create_logical_slot(slot, options)
        .await
        .map_err(|error| spec.publisher_error(error))?;
    replication.close().await;
    Ok(created.consistent_point)
}

/// Makes the publisher write a running-transactions record, the only place where a slot's
/// `restart_lsn` can move to.
///
/// PostgreSQL writes one every 15 s on its own, so under a fast load a slot that confirms at once
/// would still hold back hundreds of MB of log. Uses `pg_log_standby_snapshot()` where the role may
/// (16+), else a temporary logical slot, whose creation writes the record first thing.
///
/// The record is of use only where capture still has to come by, so nothing is done while the
/// publisher's log has not grown by `every` bytes since the last one at `last` (capture may be
/// reading old log). Returns where the log ends if a record was written.
pub async fn nudge(
    spec: &PublicationSpec,
    sql: &mut Connection,
    last: Lsn,
    every: u64,
) -> Result<Option<Lsn>, farshore_pg::Error> {
    let rows = sql.query("SELECT pg_current_wal_lsn()", &[]).await?;
    let end: Lsn = match rows.first() {
        Some(row) => row.parse(0)?,
        None => return Ok(None),
    };
    if end.bytes_since(last) < every {
        return Ok(None);
    }
    log_running_transactions(spec, sql).await?;
    Ok(Some(end))
}

async fn log_running_transactions(
    spec: &PublicationSpec,
    sql: &mut Connection,
) -> Result<(), farshore_pg::Error> {
    if sql.server_version() >= 160_000 {
        let result = sql.query("SELECT pg_log_standby_snapshot()", &[]).await;
        match result {
            Err(error) if error.sqlstate() == Some("42501") => {}
            other => return other.map(drop),
        }
    }
    // Creation would wait for all running transactions; the record is written before that.
    let name = format!("{}_nudge", spec.slot_name());
    let name = quote_literal_63(&name);
    sql.simple_query("SET statement_timeout = '200ms'").await?;
    let created = sql
        .simple_query(&format!(
            "SELECT pg_create_logical_replication_slot({name}, 'pgoutput', true)"
        ))
        .await;
    sql.simple_query("SET statement_timeout = 0").await?;
    match created {
        Ok(_) => {
            sql.simple_query(&format!("SELECT pg_drop_replication_slot({name})")).await.map(drop)
        }
        // Cancelled while it waited: the record is written, and the slot is gone with the error.
        Err(error) if error.sqlstate() == Some("57014") => Ok(()),
        Err(error) => Err(error),
    }
}

fn quote_literal_63(name: &str) -> String {
    // Slot names are plain ASCII; PostgreSQL takes 63 bytes.
    let start = name.len().saturating_sub(63);
    farshore_pg::quote_literal(&name[start..])
}

#[cfg(test)]
mod tests {
    use super::is_undecodable;

    #[test]
    fn a_log_that_its_publisher_cannot_decode_is_told_from_other_faults() {
        let said = "could not map filenode \"base/5/16615\" to relation OID";
        assert!(is_undecodable("XX000", said));
        assert!(!is_undecodable("XX000", "cache lookup failed for relation 16615"));
        assert!(!is_undecodable("58P01", said));
    }
}
