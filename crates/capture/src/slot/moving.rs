//! Where a slot stands, and what moves it: temporary copies that batches are taken from, and the
//! records of running transactions that its `restart_lsn` moves by.

use super::check_not_ahead;
use crate::CaptureError;
use crate::publication::PublicationSpec;
use farshore_model::Lsn;
use farshore_pg::Connection;

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
    /// What all of those have, if it does: zero if a slot of that name is gone or lost.
    pub standbys_have: Lsn,
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
                 AND (to_jsonb(s)->>'failover')::boolean, \
               (SELECT min(coalesce(o.restart_lsn, '0/0')) \
                FROM unnest(string_to_array(current_setting('synchronized_standby_slots', true), \
                  ',')) AS name \
                LEFT JOIN pg_replication_slots o ON o.slot_name = btrim(name, ' \"')) \
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
        standbys_have: row.get(5).map_or(Ok(Lsn::ZERO), |_| row.parse(5)).map_err(parse)?,
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
        let name = format!("farshore_batches_{}", sql.backend_pid());
        let (slot, copy) = (spec.slot_name(), SlotCopy { name });
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
