//! The far gear: far behind, the log is read by SQL function in large batches.
//!
//! A walsender makes a system call for every message, and a transaction of one row is three
//! messages; `pg_logical_slot_peek_binary_changes` through a binary COPY gives the same messages
//! for a fraction of the work. But each call decodes from the slot's restart point again, and a
//! call's messages are gathered on the publisher before the first is sent. So batches are bounded,
//! they grow with the distance from the restart point, and the stream takes over near the end of
//! the log, for large messages, for transactions that are streamed before their commit, and
//! whenever the publisher refuses.
//!
//! The guarantee is the stream's: a batch is durable in the store before the slot is moved over it.
//! (PostgreSQL docs: "Replication Management Functions".)

use super::intake::{BATCH_BYTES, Intake};
use crate::CaptureError;
use crate::attendant::Attendant;
use crate::slot::{self, Place};
use farshore_fault as fault;
use farshore_model::Lsn;
use farshore_pg::{Connection, Mode, quote_literal};
use farshore_wire::copy_binary::{CopyError, RowReader};

/// Small workloads of tests with fault injection meet several batches too.
const UNIT: u64 = if cfg!(feature = "faults") { 16 << 10 } else { 4 << 20 };

/// From here to the end of the log the stream is as good, in bytes of log.
const NEAR_BYTES: u64 = UNIT;

/// Least log in a batch, in bytes: some tens of milliseconds of decoding.
const BATCH_LOG_MIN: u64 = 2 * UNIT;

/// Most log in a batch, in bytes, and the farthest from the restart point that one begins: this is
/// what each call decodes again.
const BATCH_LOG_MAX: u64 = 32 * UNIT;

/// For messages of this mean size the stream is as good, in bytes.
const LARGE_MESSAGE_BYTES: u64 = 512;

/// For the publisher's gathering of a batch.
const SETTINGS: &str = "SET search_path = ''; SET lc_monetary = 'C'; SET work_mem = '64MB'; \
                        SET statement_timeout = 0; SET lock_timeout = 0";

/// Whether a batch from `from` on would be better than the stream.
pub(super) fn is_worthwhile(place: &Place, from: Lsn) -> bool {
    place.end.bytes_since(from) >= NEAR_BYTES && from.bytes_since(place.restart) <= BATCH_LOG_MAX
}

/// Takes batches until the stream is as good, or a stop was asked for. `place` is where the slot
/// stood a moment ago.
pub(super) async fn run(
    intake: &mut Intake<'_>,
    attendant: &mut Attendant,
    place: Place,
) -> Result<(), CaptureError> {
    let taken = take_batches(intake, attendant, place).await;
    // Also what is left of a batch that broke off: the stream begins where the store ends.
    intake.assembler.begin_again();
    match taken {
        // What is wrong shows in the stream too, where it is told from what is to be waited for.
        Err(CaptureError::Publisher { error, .. }) if error.server_error().is_some() => {
            let publication = &intake.capture.spec.name;
            tracing::info!(%publication, %error, "no more batches by function: streaming");
            Ok(())
        }
        other => other,
    }
}

async fn take_batches(
    intake: &mut Intake<'_>,
    attendant: &mut Attendant,
    mut place: Place,
) -> Result<(), CaptureError> {
    let spec = &intake.capture.spec;
    let mut sql = spec.connect(Mode::Sql).await?;
    let set = sql.simple_query(SETTINGS).await;
    set.map_err(|error| spec.publisher_error(error))?;
    loop {
        let from = intake.assembler.last_position();
        slot::check_not_ahead(spec, place.confirmed, from)?;
        if !is_worthwhile(&place, from) {
            return Ok(());
        }
        let log = 3 * from.bytes_since(place.restart);
        let upto = place.end.min(Lsn(from.0 + log.clamp(BATCH_LOG_MIN, BATCH_LOG_MAX)));
        attendant.reached(upto);
        let mut stop = intake.stop.clone();
        let batch = tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
            found = attendant.finds() => return Err(found),
            batch = take_batch(intake, &mut sql, upto) => batch?,
        };
        let (messages, bytes) = (batch.messages, batch.bytes);
        tracing::info!(
            publication = %spec.name, %from, %upto, messages, bytes,
            "far behind: taken by function"
        );
        if batch.streamed || batch.bytes > LARGE_MESSAGE_BYTES * batch.messages {
            return Ok(());
        }
        match slot::place(spec, &mut sql).await? {
            Some(now) => place = now,
            None => return Ok(()),
        }
        intake.capture.set_status(|status| status.publisher_end = place.end);
    }
}

/// What a batch was made of.
struct Taken {
    messages: u64,
    bytes: u64,
    /// A transaction was streamed before its commit.
    streamed: bool,
}

/// Takes what was committed up to `upto` and is not in the store yet, waits until it is durable
/// there, and moves the slot.
async fn take_batch(
    intake: &mut Intake<'_>,
    sql: &mut Connection,
    upto: Lsn,
) -> Result<Taken, CaptureError> {
    let spec = &intake.capture.spec;
    let from = intake.assembler.last_position();
    intake.assembler.begin_again();
    let mut taken = Taken { messages: 0, bytes: 0, streamed: false };
    let peek = peek(intake, upto);
    let mut copy = sql.copy_out(&peek).await.map_err(|error| spec.publisher_error(error))?;
    let mut reader = RowReader::new();
    let broken = |error: CopyError| CaptureError::Protocol(error.to_string());
    while let Some(chunk) = copy.next().await.map_err(|error| spec.publisher_error(error))? {
        let mut rows = reader.feed(&chunk);
        while let Some(row) = rows.next_row().map_err(broken)? {
            let message = row.fields().next().flatten().unwrap_or_default();
            taken.messages += 1;
            taken.bytes += message.len() as u64;
            intake.message(message, from).await?;
            if intake.assembler.bytes_waiting() >= BATCH_BYTES {
                intake.hand_over().await?;
            }
        }
    }
    reader.finish().map_err(broken)?;
    taken.streamed = intake.assembler.is_streaming();
    // Everything that was committed up to there has come.
    intake.assembler.watermark(upto);
    intake.hand_over().await?;
    intake.until_durable().await?;
    move_slot(intake, sql).await?;
    Ok(taken)
}

/// Tells the slot what is durable in the store, and nothing beyond.
async fn move_slot(intake: &mut Intake<'_>, sql: &mut Connection) -> Result<(), CaptureError> {
    let spec = &intake.capture.spec;
    let durable = *intake.durable.borrow_and_update();
    fault::point("capture.before-acknowledge");
    let (slot, position) = (spec.slot_name(), durable.0.to_string());
    let moved = sql
        .query("SELECT pg_replication_slot_advance($1, $2)", &[Some(&slot), Some(&position)])
        .await;
    moved.map_err(|error| spec.publisher_error(error))?;
    fault::point("capture.after-acknowledge");
    intake.capture.set_status(|status| status.acknowledged = durable);
    Ok(())
}

/// The query for all that was committed up to `upto`.
fn peek(intake: &Intake<'_>, upto: Lsn) -> String {
    let spec = &intake.capture.spec;
    let options: String = intake
        .options()
        .iter()
        .map(|(key, value)| format!(", {}, {}", quote_literal(key), quote_literal(value)))
        .collect();
    format!(
        "COPY (SELECT data FROM pg_logical_slot_peek_binary_changes({}, '{upto}', NULL{options})) \
         TO STDOUT (FORMAT binary)",
        quote_literal(&spec.slot_name())
    )
}
