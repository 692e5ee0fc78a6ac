//! The replication slot: made once, checked against the store at every start, kept moving.
//!
//! The store notes which slot on which server feeds it. A slot that is gone, belongs to another
//! server, or stands ahead of what the store holds durable means that changes may be missing: that
//! is an error, never a fresh start.

mod history;
mod moving;
mod notes;
mod overlap;
mod server;

use crate::patience::patiently;
use crate::{CaptureError, publication::PublicationSpec};
use farshore_fault as fault;
use farshore_model::{Lsn, quote_identifier};
use farshore_pg::replication::{SlotOptions, SlotSnapshot};
use farshore_pg::{CancelToken, Connection, Mode};
use farshore_store::LogStore;
pub use history::noted_loss;
pub(crate) use history::settle_loss;
use history::{check_history, log_end};
pub use moving::nudge;
pub(crate) use moving::{Place, SlotCopy, advance, end_walsender, place};
pub use notes::{
    Begun, begin_replica, begun, is_replica, log_begins, noted_slot, publisher_identity, timeline,
};
use notes::{NOTE_CREATING, NOTE_SLOT, NOTE_START, NOTE_SYSTEM, NOTE_TIMELINE};
pub(crate) use overlap::{Overlap, check_overlap};
pub(crate) use server::Server;
use std::pin::pin;
use std::time::Duration;
use tokio::sync::watch;

/// What to do when changes are missing.
pub(crate) fn copy_anew(publication: &str) -> String {
    format!(
        "To copy everything anew: stop this node, drop the slot, remove \
         data_dir/publications/{publication}, start, and for each of its subscriptions: farshore \
         resync, then farshore resume"
    )
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
            Begun::Making if is_streamed_from(spec, sql, &row).await? => {
                Err(somebody_elses(spec, &slot, &row))
            }
            // Dropped, and made anew.
            Begun::Making => Ok(()),
            Begun::Made => check_slot(spec, &slot, &row).map(drop),
        },
        (None, None) if begun == Begun::Made => Err(gone(spec, &slot)),
        (None, None) => Ok(()),
    }
}

/// Refuses a slot that the store continues and that is gone, was lost, or is another one now.
pub(crate) async fn check_there(
    spec: &PublicationSpec,
    sql: &mut Connection,
) -> Result<(), CaptureError> {
    let slot = spec.slot_name();
    match slot_row(spec, sql, &slot).await? {
        Some(row) => check_slot(spec, &slot, &row).map(drop),
        None => Err(gone(spec, &slot)),
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
    let of_another = row.database.as_ref().filter(|theirs| **theirs != spec.source.dbname);
    let then = match (of_another, &row.active_pid) {
        (Some(theirs), _) => format!(
            "It belongs to database \"{theirs}\", not to \"{}\", so to somebody else: give this \
             publication another name",
            spec.source.dbname
        ),
        (None, Some(_)) => format!(
            "Another site may use it: give this publication another name, drop the slot, or set \
             adopt_slot = \"{slot}\""
        ),
        // Under another name it would be left behind, and keep the publisher's log for nobody.
        (None, None) => format!(
            "If this site's data_dir was lost, drop the slot and start, then farshore resync and \
             farshore resume for each of its subscriptions; if another site uses it, give this \
             publication another name; or set adopt_slot = \"{slot}\""
        ),
    };
    CaptureError::Setup(format!(
        "publication \"{}\": replication slot \"{slot}\" already exists on {} and was not made for \
         this store{user}. {then}",
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
/// A known way to it: a publisher that begins to decode while a transaction is under way which has
/// made a table's file anew (TRUNCATE, a rewriting ALTER TABLE) may miss what that has changed in the
/// catalogs (PostgreSQL's commit 7f13ac8123, "Fix catalog lookup with the wrong snapshot during
/// logical decoding", of which versions before 16 could only get a part). PostgreSQL 18.4 does so
/// too, by itself: of 498 slots that were made beside sessions which truncate tables, whether with a
/// snapshot or without, 4 could not be decoded from.
pub(crate) fn log_undecodable(spec: &PublicationSpec, error: &farshore_pg::Error) -> CaptureError {
    CaptureError::Gap(format!(
        "publication \"{}\": {error}: the publisher cannot decode its own log from where slot \
         \"{}\" stands. PostgreSQL is known for that where a table was truncated or rewritten by a \
         transaction that was under way when the slot was made. {}",
        spec.name,
        spec.slot_name(),
        copy_anew(&spec.name)
    ))
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
    /// What is prepared comes when it is prepared.
    two_phase: bool,
}

/// Makes sure that the slot exists and continues what `store` holds; returns where to stream from, or
/// `None` where `stop` turned true first. `tell` hears which transactions its creation waits for.
pub async fn ensure_slot(
    spec: &PublicationSpec,
    sql: &mut Connection,
    store: &dyn LogStore,
    stop: watch::Receiver<bool>,
    tell: impl Fn(Option<String>),
) -> Result<Option<Lsn>, CaptureError> {
    let slot = spec.slot_name();
    let name = &spec.name;
    let system = system_identifier(spec, sql).await?;
    if let Some(known) = store.note(NOTE_SYSTEM).filter(|known| *known != system) {
        return Err(CaptureError::Gap(format!(
            "publication \"{name}\": {} is another database cluster (system identifier {system}) \
             than the one this store was filled from ({known}): was it upgraded, or restored from \
             a dump? If not, point `source` back. {}",
            spec.source.redacted(),
            copy_anew(name)
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
        return Ok(Some(known));
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
        (Some(row), Some(_)) => {
            Some(check_slot(spec, &slot, &row)?.max(log_end(spec, sql).await?.1))
        }
        (None, Some(_)) => return Err(nothing_to_adopt(spec, &slot)),
        (row, None) => {
            if let Some(row) = row {
                drop_unfinished(spec, sql, store, &row).await?;
            }
            patiently(spec, create_decodable_slot(spec, sql, store, stop), tell).await?
        }
    };
    let Some(start) = start else { return Ok(None) };
    fault::point("capture.after-slot-created");
    let (timeline, _) = log_end(spec, sql).await?;
    store.set_note(NOTE_TIMELINE, &timeline.to_string())?;
    store.set_note(NOTE_SYSTEM, &system)?;
    store.set_note(NOTE_SLOT, &slot)?;
    store.set_note(NOTE_START, &start.to_string())?;
    tracing::info!(publication = %name, %slot, %start, "replication slot ready");
    Ok(Some(start))
}

/// Drops the slot that is there, `row`, if we died between making it and noting that: nothing was read
/// from it yet. While our own session that made it, or looked whether it can be decoded from, is still
/// there, the publisher refuses that for the time being.
async fn drop_unfinished(
    spec: &PublicationSpec,
    sql: &mut Connection,
    store: &dyn LogStore,
    row: &SlotRow,
) -> Result<(), CaptureError> {
    let slot = spec.slot_name();
    if store.note(NOTE_CREATING).as_ref() != Some(&slot) {
        return Err(somebody_elses(spec, &slot, row));
    }
    if is_streamed_from(spec, sql, row).await? {
        // Nor is it ours when that session has gone.
        store.set_note(NOTE_CREATING, "")?;
        return Err(somebody_elses(spec, &slot, row));
    }
    drop_own(spec, sql, store).await
}

/// Drops the slot that we have made and not noted yet.
async fn drop_own(
    spec: &PublicationSpec,
    sql: &mut Connection,
    store: &dyn LogStore,
) -> Result<(), CaptureError> {
    let drop = "SELECT pg_drop_replication_slot($1)";
    let dropped = sql.execute(drop, &[Some(&spec.slot_name())]).await;
    dropped.map_err(|error| spec.publisher_error(error))?;
    Ok(store.set_note(NOTE_CREATING, "")?)
}

/// Whether a session streams from a slot that is not noted as made: then it was not made by us, who
/// note that first. Sessions of our own role are seen; those of another one are not ours.
async fn is_streamed_from(
    spec: &PublicationSpec,
    sql: &mut Connection,
    row: &SlotRow,
) -> Result<bool, CaptureError> {
    let (Some(pid), Some(_)) = (&row.active_pid, row.confirmed) else { return Ok(false) };
    let ask = "SELECT FROM pg_stat_activity WHERE pid = $1::text::int \
               AND (query ILIKE 'START_REPLICATION%' OR query = '<insufficient privilege>')";
    let found = sql.query(ask, &[Some(pid)]).await.map_err(|error| spec.publisher_error(error))?;
    Ok(!found.is_empty())
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
               to_jsonb(s)->>'invalidation_reason', (to_jsonb(s)->>'two_phase')::boolean \
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
        two_phase: row.get(6) == Some("t"),
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
    if row.two_phase {
        return setup(format!(
            "publication \"{name}\": slot \"{slot}\" was made with two_phase: transactions come \
             from it when they are prepared, which is not what is carried. Name another slot"
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

/// So often a slot is made anew whose log the publisher cannot decode.
const SLOTS_MAX: u32 = 10;

/// How long a publisher may take to end the creation of a slot that was given up.
const GIVEN_UP_MAX: Duration = Duration::from_secs(5);

/// How long the first log behind a new slot is waited for, where the publisher is at work.
const PROOF_AFTER: Duration = Duration::from_millis(300);

/// So much log is decoded for that at most, before what is written in that time.
const PROOF_BYTES_MAX: u64 = 256 << 20;

/// A new slot from which the publisher can decode the first of its log. About one in a hundred that
/// are made while transactions truncate tables cannot ([`log_undecodable`]); nothing has been copied
/// beside this one yet, so another may take its place. `None` if `stop` turned true first.
async fn create_decodable_slot(
    spec: &PublicationSpec,
    sql: &mut Connection,
    store: &dyn LogStore,
    mut stop: watch::Receiver<bool>,
) -> Result<Option<Lsn>, CaptureError> {
    let slot = &*spec.slot_name();
    let mut made = 1;
    loop {
        let Some(start) = create_slot(spec, store, &mut stop).await? else { return Ok(None) };
        if made == SLOTS_MAX {
            return Ok(Some(start));
        }
        let cancel = sql.cancel_token();
        let is_decodable = tokio::select! {
            looked = is_decodable(spec, sql, slot, start) => Some(looked?),
            _ = stop.wait_for(|stop| *stop) => None,
        };
        match is_decodable {
            Some(true) => return Ok(Some(start)),
            Some(false) => {}
            // The slot stays noted as one that was being made: the next start makes it anew.
            None => {
                give_up(&cancel).await;
                return Ok(None);
            }
        }
        made += 1;
        tracing::info!(
            publication = %spec.name, slot,
            "the publisher cannot decode its own log from where its new slot stands: it is made anew"
        );
        drop_own(spec, sql, store).await?;
    }
}

/// Whether the publisher can decode what it has written since `start`, shortly after.
async fn is_decodable(
    spec: &PublicationSpec,
    sql: &mut Connection,
    slot: &str,
    start: Lsn,
) -> Result<bool, CaptureError> {
    // Until standbys have it, nothing would be said; and behind a transaction that ran for hours all
    // the log since would be decoded twice.
    let is_at_hand = |place: Place| {
        !place.waits_for_standbys && place.end.bytes_since(place.restart) <= PROOF_BYTES_MAX
    };
    if !place(spec, sql).await?.is_some_and(is_at_hand) {
        return Ok(true);
    }
    if log_end(spec, sql).await?.1 > start {
        tokio::time::sleep(PROOF_AFTER).await;
    }
    let (_, end) = log_end(spec, sql).await?;
    let decode = "SELECT count(*) FROM pg_logical_slot_peek_binary_changes($1, $2::pg_lsn, NULL, \
                  'proto_version', '1', 'publication_names', $3)";
    let publication = quote_identifier(&spec.publication_name());
    match sql.query(decode, &[Some(slot), Some(&end.to_string()), Some(&publication)]).await {
        Ok(_) => Ok(true),
        Err(error) if error.is_transient() => Err(spec.publisher_error(error)),
        // Whatever else is wrong is found by who reads it.
        Err(error) => {
            Ok(!error.server_error().is_some_and(|said| is_undecodable(&said.code, &said.message)))
        }
    }
}

/// The slot's start, or `None` if `stop` turned true first.
async fn create_slot(
    spec: &PublicationSpec,
    store: &dyn LogStore,
    stop: &mut watch::Receiver<bool>,
) -> Result<Option<Lsn>, CaptureError> {
    let slot = spec.slot_name();
    let is_stopping = *stop.borrow();
    if is_stopping {
        return Ok(None);
    }
    let mut replication = spec.connect(Mode::LogicalReplication).await?;
    let options = SlotOptions {
        temporary: false,
        snapshot: SlotSnapshot::Nothing,
        // Failover slots (17+) are copied to physical standbys, so that a publisher's failover
        // does not lose the slot.
        failover: replication.server_version() >= 170_000,
        two_phase: false,
    };
    // Not before there is a session that can make it: a slot of that name that is there later on would
    // be taken for ours.
    store.set_note(NOTE_CREATING, &slot)?;
    fault::point("capture.before-slot-created");
    let cancel = replication.cancel_token();
    let done = {
        let mut created = pin!(replication.create_logical_slot(&slot, options));
        let done = tokio::select! {
            biased;
            done = &mut created => Some(done),
            // It may wait for transactions that last for hours.
            _ = stop.wait_for(|stop| *stop) => None,
        };
        match done {
            Some(done) => Some(done),
            None => {
                let ended = async {
                    give_up(&cancel).await;
                    created.await
                };
                tokio::time::timeout(GIVEN_UP_MAX, ended).await.ok()
            }
        }
    };
    match done {
        Some(Ok(created)) => {
            replication.close().await;
            Ok(Some(created.consistent_point))
        }
        Some(Err(error)) => {
            // There is no slot of ours then, and one of that name is somebody else's. Of a connection
            // that was lost nobody knows.
            if error.server_error().is_some_and(|said| !said.is_fatal()) {
                store.set_note(NOTE_CREATING, "")?;
            }
            let is_given_up = *stop.borrow();
            if is_given_up { Ok(None) } else { Err(spec.publisher_error(error)) }
        }
        None => Ok(None),
    }
}

/// Has the publisher end a statement that nobody waits for any more.
async fn give_up(statement: &CancelToken) {
    if let Err(error) = statement.cancel().await {
        tracing::debug!(%error, "not cancelled");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_pg::Config;
    use farshore_store::segmented::{Options, SegmentedStore};
    use farshore_testkit::postgres::{Cluster, Installation};
    use std::collections::BTreeMap;
    use std::sync::Arc;
    use tokio::runtime::Runtime;

    /// What takes no time once it may go on.
    const SOON: Duration = Duration::from_secs(30);

    #[test]
    fn a_log_that_its_publisher_cannot_decode_is_told_from_other_faults() {
        let said = "could not map filenode \"base/5/16615\" to relation OID";
        assert!(is_undecodable("XX000", said));
        assert!(!is_undecodable("XX000", "cache lookup failed for relation 16615"));
        assert!(!is_undecodable("58P01", said));
    }

    fn cluster(major: u32) -> (Cluster, PublicationSpec) {
        let installation = Installation::find(major).unwrap();
        let cluster = Cluster::builder(&installation)
            .setting("wal_level", "logical")
            .setting("max_replication_slots", 1)
            .start()
            .unwrap();
        cluster
            .execute_script("CREATE TABLE t (); CREATE PUBLICATION farshore_p FOR TABLE t")
            .unwrap();
        let spec = PublicationSpec {
            name: "p".to_owned(),
            source: Config::parse(&cluster.url("postgres")).unwrap(),
            tables: Vec::new(),
            articles: BTreeMap::new(),
            via_partition_root: false,
            adopt_publication: None,
            adopt_slot: None,
        };
        (cluster, spec)
    }

    fn store() -> (tempfile::TempDir, Arc<dyn LogStore>) {
        let folder = tempfile::tempdir().unwrap();
        let (store, _) = SegmentedStore::open(folder.path(), Options::default()).unwrap();
        (folder, store)
    }

    fn begun_in(store: &dyn LogStore) -> Begun {
        begun(|key| store.note(key))
    }

    async fn ensure(
        spec: &PublicationSpec,
        store: &dyn LogStore,
        stop: watch::Receiver<bool>,
    ) -> Result<Option<Lsn>, CaptureError> {
        let mut sql = spec.connect(Mode::Sql).await.unwrap();
        let ensured = ensure_slot(spec, &mut sql, store, stop, |_| ());
        tokio::time::timeout(SOON, ensured).await.expect("it waits for ever")
    }

    async fn value(sql: &mut Connection, question: &str) -> String {
        let rows = sql.query(question, &[]).await.unwrap();
        rows[0].get(0).unwrap_or_default().to_owned()
    }

    const SLOTS: &str = "SELECT count(*) FROM pg_replication_slots";

    /// Until this is true on the server.
    async fn await_true(sql: &mut Connection, question: &str) {
        let seen = async { while value(sql, question).await != "t" {} };
        tokio::time::timeout(SOON, seen).await.expect(question);
    }

    /// A transaction for which every slot's creation waits.
    async fn open_transaction(spec: &PublicationSpec) -> Connection {
        let mut open = spec.connect(Mode::Sql).await.unwrap();
        open.simple_query("BEGIN; SELECT txid_current()").await.unwrap();
        open
    }

    const MAKING: &str = "SELECT count(*) = 1 FROM pg_replication_slots \
                          WHERE active_pid IS NOT NULL AND confirmed_flush_lsn IS NULL";

    #[test]
    fn a_stop_ends_the_creation_of_a_slot_that_waits() {
        for major in [15, 18] {
            let (_cluster, spec) = cluster(major);
            Runtime::new().unwrap().block_on(async {
                let (_folder, store) = store();
                let mut sql = spec.connect(Mode::Sql).await.unwrap();
                let open = open_transaction(&spec).await;
                let (stop, stopped) = watch::channel(false);
                let stops = async {
                    await_true(&mut sql, MAKING).await;
                    stop.send_replace(true);
                };
                let (ensured, ()) = tokio::join!(ensure(&spec, store.as_ref(), stopped), stops);
                assert_eq!(ensured.unwrap(), None);
                assert_eq!(begun_in(store.as_ref()), Begun::Not);
                // Nothing of it waits there for the transaction to end.
                assert_eq!(value(&mut sql, SLOTS).await, "0");
                open.close().await;
                stop.send_replace(false);
                let ensured = ensure(&spec, store.as_ref(), stop.subscribe()).await.unwrap();
                assert!(ensured.is_some());
                assert_eq!(begun_in(store.as_ref()), Begun::Made);
            });
        }
    }

    #[test]
    fn nobody_is_told_to_drop_the_slot_of_another_database() {
        let (cluster, spec) = cluster(18);
        cluster.execute_script("CREATE DATABASE other").unwrap();
        let make = "SELECT pg_create_logical_replication_slot('farshore_p', 'pgoutput')";
        cluster.connect_to("other").unwrap().batch_execute(make).unwrap();
        Runtime::new().unwrap().block_on(async {
            let (_folder, store) = store();
            let (_stop, stopped) = watch::channel(false);
            let error = ensure(&spec, store.as_ref(), stopped).await.unwrap_err().to_string();
            assert!(
                error.contains("It belongs to database \"other\", not to \"postgres\""),
                "{error}"
            );
            assert!(!error.contains("drop the slot"), "{error}");
        });
    }

    #[test]
    fn a_slot_that_could_not_be_made_here_is_not_taken_for_ours_when_it_is_there() {
        let (_cluster, spec) = cluster(15);
        Runtime::new().unwrap().block_on(async {
            let (_folder, store) = store();
            let (_stop, stopped) = watch::channel(false);
            let mut sql = spec.connect(Mode::Sql).await.unwrap();
            sql.simple_query("SELECT pg_create_physical_replication_slot('full')").await.unwrap();
            let full = ensure(&spec, store.as_ref(), stopped.clone()).await.unwrap_err();
            assert!(full.is_transient(), "{full}");
            assert_eq!(begun_in(store.as_ref()), Begun::Not);
            let of_another = "SELECT pg_drop_replication_slot('full'); \
                SELECT pg_create_logical_replication_slot('farshore_p', 'pgoutput')";
            sql.simple_query(of_another).await.unwrap();
            let found = ensure(&spec, store.as_ref(), stopped).await.unwrap_err();
            assert!(found.to_string().contains("was not made for this store"), "{found}");
            assert_eq!(value(&mut sql, SLOTS).await, "1");
        });
    }

    #[test]
    fn who_streams_from_a_slot_that_is_not_made_is_another_site() {
        for major in [15, 18] {
            let (_cluster, spec) = cluster(major);
            Runtime::new().unwrap().block_on(async {
                let (_folder, store) = store();
                let (_stop, stopped) = watch::channel(false);
                let mut sql = spec.connect(Mode::Sql).await.unwrap();
                store.set_note(NOTE_CREATING, "farshore_p").unwrap();
                // Our own session, which did not notice that we died.
                let open = open_transaction(&spec).await;
                let mut orphan = spec.connect(Mode::LogicalReplication).await.unwrap();
                let created = async {
                    let options = SlotOptions::default();
                    orphan.create_logical_slot("farshore_p", options).await.unwrap();
                };
                let looks = async {
                    await_true(&mut sql, MAKING).await;
                    let busy = ensure(&spec, store.as_ref(), stopped.clone()).await.unwrap_err();
                    assert!(busy.is_transient(), "{busy}");
                    assert_eq!(begun_in(store.as_ref()), Begun::Making);
                    open.close().await;
                };
                tokio::join!(created, looks);
                // It is made: its session is there, but has nothing to do with it any more.
                let ensured = ensure(&spec, store.as_ref(), stopped.clone()).await.unwrap();
                assert!(ensured.is_some());

                let (_folder, other) = self::store();
                other.set_note(NOTE_CREATING, "farshore_p").unwrap();
                let publication = [("proto_version", "1"), ("publication_names", "farshore_p")];
                let stream = orphan.start_replication("farshore_p", Lsn::ZERO, &publication);
                let stream = stream.await.unwrap();
                let look = look_at_slot(&spec, &mut sql, begun_in(other.as_ref())).await;
                let found = ensure(&spec, other.as_ref(), stopped.clone()).await.unwrap_err();
                assert!(found.to_string().contains("in use by pid"), "{found}");
                assert!(!found.is_transient(), "{found}");
                assert_eq!(look.unwrap_err().to_string(), found.to_string());
                drop(stream);
                let free = "SELECT active_pid IS NULL FROM pg_replication_slots";
                await_true(&mut sql, free).await;
                let found = ensure(&spec, other.as_ref(), stopped).await.unwrap_err();
                assert!(found.to_string().contains("was not made for this store"), "{found}");
                assert_eq!(value(&mut sql, SLOTS).await, "1");
            });
        }
    }
}
