//! The replication slot: made once, checked against the store at every start, kept moving.
//!
//! The store notes which slot on which server feeds it. A slot that is gone, belongs to another
//! server, or stands ahead of what the store holds durable means that changes may be missing: that
//! is an error, never a fresh start.

use crate::{CaptureError, publication::PublicationSpec};
use farshore_fault as fault;
use farshore_model::Lsn;
use farshore_pg::replication::{SlotOptions, SlotSnapshot};
use farshore_pg::{Connection, Mode};
use farshore_store::LogStore;

/// Notes in the store about where its log comes from.
const NOTE_SYSTEM: &str = "publisher.system_identifier";
const NOTE_SLOT: &str = "slot.name";
const NOTE_CREATING: &str = "slot.creating";
const NOTE_START: &str = "slot.start";

/// What `pg_replication_slots` says of our slot.
struct SlotRow {
    plugin: Option<String>,
    database: Option<String>,
    active_pid: Option<String>,
    confirmed: Option<Lsn>,
    wal_status: Option<String>,
}

/// Makes sure that the slot exists and continues what `store` holds; returns where to stream from.
pub async fn ensure_slot(
    spec: &PublicationSpec,
    sql: &mut Connection,
    store: &dyn LogStore,
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
            return Err(CaptureError::Gap(format!(
                "publication \"{name}\": replication slot \"{slot}\" is gone from {}. Changes \
                 after {durable} may be lost to this store: remove the publication's folder in \
                 data_dir to copy all tables anew",
                spec.source.redacted()
            )));
        };
        let confirmed = check_slot(spec, &slot, &row)?;
        let known = durable.max(start);
        if confirmed > known {
            return Err(CaptureError::Gap(format!(
                "publication \"{name}\": slot \"{slot}\" stands at {confirmed}, but the store \
                 holds the log only up to {known}: something else moved the slot, or the store \
                 was replaced. The changes between are not in the store: remove the \
                 publication's folder in data_dir to copy all tables anew"
            )));
        }
        return Ok(known);
    }
    let start = match (row, &spec.adopt_slot) {
        (Some(row), Some(_)) => check_slot(spec, &slot, &row)?,
        (None, Some(_)) => {
            return Err(CaptureError::Setup(format!(
                "publication \"{name}\": the publisher has no slot named \"{slot}\" to adopt. \
                 Create it with plugin pgoutput, or remove `adopt_slot`"
            )));
        }
        (Some(row), None) => {
            // We died between making the slot and noting it: nothing was read from it yet.
            if store.note(NOTE_CREATING).as_deref() != Some(&slot) {
                return Err(CaptureError::Setup(format!(
                    "publication \"{name}\": replication slot \"{slot}\" already exists on {} and \
                     was not made for this store{}. Another site may use it: give this \
                     publication another name, drop the slot, or set adopt_slot = \"{slot}\"",
                    spec.source.redacted(),
                    row.active_pid.map_or(String::new(), |pid| format!(" (in use by pid {pid})"))
                )));
            }
            sql.execute("SELECT pg_drop_replication_slot($1)", &[Some(&slot)])
                .await
                .map_err(|error| spec.publisher_error(error))?;
            create_slot(spec, &slot).await?
        }
        (None, None) => {
            store.set_note(NOTE_CREATING, &slot)?;
            create_slot(spec, &slot).await?
        }
    };
    fault::point("capture.after-slot-created");
    store.set_note(NOTE_SYSTEM, &system)?;
    store.set_note(NOTE_SLOT, &slot)?;
    store.set_note(NOTE_START, &start.to_string())?;
    tracing::info!(publication = %name, %slot, %start, "replication slot ready");
    Ok(start)
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
            "SELECT plugin, database, active_pid, confirmed_flush_lsn, wal_status \
             FROM pg_replication_slots WHERE slot_name = $1",
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
        return Err(CaptureError::Gap(format!(
            "publication \"{name}\": slot \"{slot}\" was invalidated: the publisher has removed \
             log that was still needed (see max_slot_wal_keep_size). Drop the slot and remove the \
             publication's folder in data_dir to copy all tables anew"
        )));
    }
    match row.confirmed {
        Some(confirmed) => Ok(confirmed),
        None => setup(format!("publication \"{name}\": slot \"{slot}\" has no confirmed position")),
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
pub async fn nudge(spec: &PublicationSpec, sql: &mut Connection) -> Result<(), farshore_pg::Error> {
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
