//! Whether the publisher still has the log that the store was filled from: its end, its timelines,
//! and what was found of one that lost it.

use super::Overlap;
use super::copy_anew;
use super::notes::{NOTE_LOST, NOTE_LOST_ON, NOTE_TIMELINE};
use crate::CaptureError;
use crate::publication::PublicationSpec;
use farshore_model::{Lsn, PgTime};
use farshore_pg::{Connection, Mode};
use farshore_store::LogStore;

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
pub(super) fn note_loss(
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

/// The publisher's timeline and the end of its log.
pub(super) async fn log_end(
    spec: &PublicationSpec,
    sql: &mut Connection,
) -> Result<(u32, Lsn), CaptureError> {
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
pub(super) async fn check_history(
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
        if timeline < before && left_at.is_none() {
            return Err(CaptureError::Gap(format!(
                "publication \"{name}\": the publisher is on timeline {timeline}, and the store was \
                 filled from timeline {before}: it is an old primary, without what was written since. \
                 Let `source` lead to the server that is on timeline {before}, and go on (farshore \
                 resume). {}",
                copy_anew(name)
            )));
        }
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
    // The first one left none, and has no history.
    if timeline <= 1 {
        return Ok(None);
    }
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
