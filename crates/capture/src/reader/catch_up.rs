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

use super::Capture;
use super::intake::{BATCH_BYTES, Intake};
use crate::CaptureError;
use crate::attendant::{Attendant, Follower};
use crate::publication::PublicationSpec;
use crate::slot::{self, Place};
use farshore_fault as fault;
use farshore_model::{Lsn, PgTime};
use farshore_pg::{Connection, Mode, quote_literal};
use farshore_wire::copy_binary::{CopyError, RowReader};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Small workloads of tests with fault injection meet several batches too.
const UNIT: u64 = if cfg!(feature = "faults") { 16 << 10 } else { 4 << 20 };

/// From here to the end of the log the stream is as good, in bytes of log.
const NEAR_BYTES: u64 = UNIT;

/// Log in the first batch, in bytes: some tens of milliseconds of decoding. Batches after it grow.
const BATCH_LOG_MIN: u64 = 2 * UNIT;

/// Most log in a batch, in bytes.
const BATCH_LOG_MAX: u64 = 32 * UNIT;

/// The farthest from the restart point that a batch begins, in bytes of log: this is what each
/// call decodes again. (An advance moves the restart point by one record only; the next call finds
/// the one after it.)
const AGAIN_MAX: u64 = 2 * BATCH_LOG_MAX;

/// Bytes of messages that a batch should not be more than: the publisher gathers them.
const BATCH_BYTES_MAX: u64 = 128 << 20;

/// For messages of this mean size the stream is as good, in bytes.
const LARGE_MESSAGE_BYTES: u64 = 512;

/// So is it for log that is mostly about something else: with less than one byte of messages in so
/// many of log.
const SPARSE_LOG: u64 = 64;

/// How long the publisher may take for a call; the client's own limit is a little longer.
const CALL_MAX: Duration = Duration::from_secs(60);

/// The SQLSTATE of a call that took longer.
const CANCELLED: &str = "57014";

/// The publisher must not be kept waiting, with a snapshot open, for a disk that takes longer.
const HAND_OVER_MAX: Duration = Duration::from_secs(5);

/// Whether a batch from `from` on would be better than the stream.
pub(super) fn is_worthwhile(capture: &Capture, place: &Place, from: Lsn) -> bool {
    !capture.stream_only.load(Ordering::Relaxed)
        && capture.store.status().waiting_for_room.is_none()
        && place.end.bytes_since(from) >= NEAR_BYTES
        && from.bytes_since(place.restart) <= AGAIN_MAX
}

/// Takes batches until the stream is as good, or a stop was asked for.
pub(super) async fn run(
    intake: &mut Intake<'_>,
    attendant: &mut Attendant,
) -> Result<(), CaptureError> {
    let spec = &intake.capture.spec;
    let sql = connect(spec).await?;
    // What the publisher is at must not keep the slot when nobody waits for it any more.
    let cancel = sql.cancel_token();
    let (mut stop, mut batches) = (intake.stop.clone(), Batches { sql, log: BATCH_LOG_MIN });
    let nudge = attendant.follower();
    let ended = tokio::select! {
        _ = stop.wait_for(|stop| *stop) => Ended::Cut(Ok(())),
        found = attendant.finds() => Ended::Cut(Err(found)),
        ended = batches.run(intake, nudge) => ended,
    };
    match ended {
        Ended::Near => {
            batches.sql.close().await;
            Ok(())
        }
        Ended::Refused(error) => {
            // What was complete is kept. What is wrong shows in the stream too, where it is told
            // from what is to be waited for.
            intake.assembler.begin_again();
            intake.hand_over().await?;
            intake.until_durable().await?;
            if !error.is_transient() && error.sqlstate() != Some(CANCELLED) {
                intake.capture.stream_only.store(true, Ordering::Relaxed);
            }
            let publication = &intake.capture.spec.name;
            tracing::info!(%publication, %error, "no more batches by function: streaming");
            Ok(())
        }
        Ended::Cut(why) => {
            if let Err(error) = cancel.cancel().await {
                tracing::debug!(%error, "not cancelled");
            }
            why
        }
    }
}

async fn connect(spec: &PublicationSpec) -> Result<Connection, CaptureError> {
    let mut sql = spec.connect(Mode::Sql).await?;
    let settings = format!(
        "{}; SET search_path = ''; SET lc_monetary = 'C'; SET work_mem = '64MB'; \
         SET statement_timeout = {}",
        farshore_pg::no_timeouts(sql.server_version()),
        CALL_MAX.as_millis()
    );
    let set = sql.simple_query(&settings).await;
    set.map_err(|error| spec.publisher_error(error))?;
    // Not everywhere: a server that cannot look for a lost client finds out when it answers.
    let _ = sql.simple_query("SET client_connection_check_interval = '2s'").await;
    Ok(sql)
}

/// Why there are no more batches.
enum Ended {
    /// The stream is as good.
    Near,
    /// The publisher refused a call.
    Refused(farshore_pg::Error),
    /// In the middle of something.
    Cut(Result<(), CaptureError>),
}

impl From<CaptureError> for Ended {
    fn from(error: CaptureError) -> Ended {
        Ended::Cut(Err(error))
    }
}

struct Batches {
    sql: Connection,
    /// Log in the next batch, in bytes.
    log: u64,
}

impl Batches {
    async fn run(&mut self, intake: &mut Intake<'_>, nudge: Follower) -> Ended {
        match self.take_all(intake, nudge).await {
            Ok(()) => Ended::Near,
            Err(ended) => ended,
        }
    }

    async fn take_all(&mut self, intake: &mut Intake<'_>, nudge: Follower) -> Result<(), Ended> {
        let spec = &intake.capture.spec;
        let mut witness = spec.connect(Mode::Sql).await?;
        loop {
            let from = intake.assembler.last_position();
            let Some(place) = slot::place(spec, &mut witness).await? else { return Ok(()) };
            slot::check_not_ahead(spec, place.confirmed, from)?;
            intake.capture.set_status(|status| {
                status.publisher_end = place.end;
                status.heard_at = Some(PgTime::now());
            });
            if !is_worthwhile(intake.capture, &place, from) {
                return Ok(());
            }
            let upto = place.end.min(Lsn(from.0 + self.log));
            nudge.reached(upto);
            let batch = self.take(intake, &mut witness, upto).await?;
            let Taken { messages, bytes, streamed } = batch;
            tracing::info!(
                publication = %spec.name, %from, %upto, messages, bytes,
                "far behind: taken by function"
            );
            let log = upto.bytes_since(from);
            if streamed || bytes > LARGE_MESSAGE_BYTES * messages || bytes * SPARSE_LOG < log {
                return Ok(());
            }
            // What is decoded again stays a third of what is new.
            let again = from.bytes_since(place.restart) + log;
            let fits = BATCH_BYTES_MAX.saturating_mul(log) / bytes.max(1);
            self.log = (3 * again).min(4 * self.log).min(fits).clamp(BATCH_LOG_MIN, BATCH_LOG_MAX);
        }
    }

    /// Takes what was committed up to `upto` and is not in the store yet, waits until it is durable
    /// there, and moves the slot.
    async fn take(
        &mut self,
        intake: &mut Intake<'_>,
        witness: &mut Connection,
        upto: Lsn,
    ) -> Result<Taken, Ended> {
        let spec = &intake.capture.spec;
        let from = intake.assembler.last_position();
        let refused = |error: farshore_pg::Error| match error.server_error() {
            Some(_) => Ended::Refused(error),
            None => Ended::Cut(Err(spec.publisher_error(error))),
        };
        intake.assembler.begin_again();
        let mut taken = Taken { messages: 0, bytes: 0, streamed: false };
        let mut copy =
            in_time(spec, self.sql.copy_out(&peek(intake, upto))).await?.map_err(refused)?;
        let mut reader = RowReader::new();
        let broken = |error: CopyError| Ended::from(CaptureError::Protocol(error.to_string()));
        let mut checked = false;
        while let Some(chunk) = in_time(spec, copy.next()).await?.map_err(refused)? {
            if !std::mem::replace(&mut checked, true) {
                // The messages are all decoded now. The slot only moves forwards, so if it is not
                // ahead of the store yet, they began where the store ends, or before.
                if let Some(place) = slot::place(spec, witness).await? {
                    slot::check_not_ahead(spec, place.confirmed, from)?;
                }
            }
            let mut rows = reader.feed(&chunk);
            while let Some(row) = rows.next_row().map_err(broken)? {
                let message = row.fields().next().flatten().unwrap_or_default();
                taken.messages += 1;
                taken.bytes += message.len() as u64;
                intake.message(message, from).await?;
                if intake.assembler.bytes_waiting() >= BATCH_BYTES {
                    hand_over_soon(intake).await?;
                }
            }
        }
        reader.finish().map_err(broken)?;
        taken.streamed = intake.assembler.is_streaming();
        // Everything that was committed up to there has come.
        intake.assembler.watermark(upto);
        hand_over_soon(intake).await?;
        intake.until_durable().await?;
        self.move_slot(intake).await?;
        Ok(taken)
    }

    /// Tells the slot what is durable in the store, and nothing beyond.
    async fn move_slot(&mut self, intake: &mut Intake<'_>) -> Result<(), Ended> {
        let spec = &intake.capture.spec;
        let durable = *intake.durable.borrow_and_update();
        fault::point("capture.before-acknowledge");
        let (slot, position) = (spec.slot_name(), durable.0.to_string());
        let advance = "SELECT pg_replication_slot_advance($1, $2)";
        let parameters = [Some(slot.as_str()), Some(position.as_str())];
        match in_time(spec, self.sql.query(advance, &parameters)).await? {
            Ok(_) => {}
            Err(error) if error.server_error().is_some() => return Err(Ended::Refused(error)),
            Err(error) => return Err(spec.publisher_error(error).into()),
        }
        fault::point("capture.after-acknowledge");
        intake.capture.set_status(|status| status.acknowledged = durable);
        Ok(())
    }
}

/// A publisher that says nothing for longer than it may work is gone.
async fn in_time<T>(
    spec: &PublicationSpec,
    work: impl Future<Output = T>,
) -> Result<T, CaptureError> {
    let after = CALL_MAX + CALL_MAX / 2;
    tokio::time::timeout(after, work).await.map_err(|_| {
        let what = format!("waiting for any word from {}", spec.source.redacted());
        spec.publisher_error(farshore_pg::Error::Timeout { what, after })
    })
}

/// Hands the waiting entries to the store, unless that takes long.
async fn hand_over_soon(intake: &mut Intake<'_>) -> Result<(), CaptureError> {
    match tokio::time::timeout(HAND_OVER_MAX, intake.hand_over()).await {
        Ok(handed_over) => handed_over,
        Err(_) => Err(CaptureError::Interrupted(
            "the store's disk takes long: what the publisher had ready is asked for again"
                .to_owned(),
        )),
    }
}

/// What a batch was made of.
struct Taken {
    messages: u64,
    bytes: u64,
    /// A transaction was streamed before its commit.
    streamed: bool,
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
