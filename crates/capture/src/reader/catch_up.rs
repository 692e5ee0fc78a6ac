//! The far gear: far behind, the log is read by SQL function in large batches.
//!
//! A walsender makes a system call for every message, and a transaction of one row is three
//! messages; `pg_logical_slot_get_binary_changes` through a binary COPY gives the same messages
//! for a fraction of the work. But each call decodes from the slot's restart point again, and a
//! call's messages are gathered on the publisher before the first is sent. So `gears` says how much
//! log a batch has, and when the stream is as good; the stream also takes over for transactions
//! that are streamed before their commit, and whenever the publisher refuses.
//!
//! The guarantee is the stream's: batches are taken from a temporary copy of the slot, and the slot
//! itself is moved over them only when they are durable in the store. It is moved when that frees
//! log, while the next batch is decoded, and otherwise by the stream in the end: moving it reads the
//! log once more. (PostgreSQL docs: "Replication Management Functions".)

mod ahead;

use self::ahead::{Ahead, Next};
use super::Capture;
use super::gears::{self, Distance, Traffic};
use super::intake::{BATCH_BYTES, Counted, Intake};
use crate::CaptureError;
use crate::attendant::{Attendant, Follower};
use crate::publication::PublicationSpec;
use crate::slot::{self, Place, SlotCopy};
use farshore_fault as fault;
use farshore_model::{Durable, Lsn, PgTime};
use farshore_pg::{Connection, Mode, quote_literal};
use farshore_wire::copy_binary::{CopyError, RowReader};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::Instant;

/// How long the publisher may take for a call; the client's own limit is a little longer.
const CALL_MAX: Duration = Duration::from_secs(60);

/// The SQLSTATE of a call that took longer.
const CANCELLED: &str = "57014";

/// The publisher must not be kept waiting, with a snapshot open, for a disk that takes longer.
const HAND_OVER_MAX: Duration = Duration::from_secs(5);

/// The most time that a slot is waited for which the stream before has left.
const SLOT_FREE_MAX: Duration = Duration::from_secs(10);

/// After this long, that stream is ended.
const SLOT_FREE_SOON: Duration = Duration::from_secs(1);

/// The slot is moved after this long even if that frees no log, so that it is seen to move.
const MOVE_SLOT_EVERY: Duration = Duration::from_secs(10);

/// How often it is looked whether it is free: the publisher tells nobody when it is.
const LOOK_AT_SLOT_EVERY: Duration = Duration::from_millis(10);

/// Log in the next batch from `from` on, in bytes, after one of `before`; `None` if the stream is
/// as good.
pub(super) fn next_batch(
    intake: &Intake<'_>,
    place: &Place,
    from: Lsn,
    before: Option<u64>,
) -> Option<u64> {
    let distance = distance(intake.capture, place, from, intake.publisher_is_close)?;
    gears::next_batch(intake.traffic, distance, before)
}

/// Whether it pays to leave the stream, which has come to `from`, for batches.
pub(super) fn is_worth_a_shift(intake: &Intake<'_>, place: &Place, from: Lsn) -> bool {
    distance(intake.capture, place, from, intake.publisher_is_close)
        .is_some_and(|distance| gears::is_worth_a_shift(intake.traffic, distance))
}

fn distance(capture: &Capture, place: &Place, from: Lsn, is_close: bool) -> Option<Distance> {
    may_take_batches(capture, place).then(|| Distance {
        again: from.bytes_since(place.restart),
        left: place.end.bytes_since(from),
        is_close,
    })
}

/// Whether there may be batches, however far behind it is.
fn may_take_batches(capture: &Capture, place: &Place) -> bool {
    !capture.stream_only.load(Ordering::Relaxed)
        // A copy of the slot would not wait for the standbys.
        && !place.waits_for_standbys
        && capture.store.status().waiting_for_room.is_none()
}

/// What batches are taken with: a connection to take them on, and another to look at the slot and
/// to move it meanwhile.
pub(super) type Connected = Result<(Connection, Connection), CaptureError>;

/// Connects to take batches from `from` on, where `place` is the slot's, unless the stream is as
/// good.
pub(super) async fn connect_if_far(
    capture: &Capture,
    place: Option<&Place>,
    from: Lsn,
    is_close: bool,
) -> Option<Connected> {
    let distance = distance(capture, place?, from, is_close)?;
    gears::next_batch(Traffic::ASSUMED, distance, None)?;
    Some(connect(&capture.spec).await)
}

/// Connects to take batches.
pub(super) async fn connect(spec: &PublicationSpec) -> Connected {
    tokio::try_join!(connect_one(spec), connect_one(spec))
}

/// Takes batches until the stream is as good, or a stop was asked for. `left` is the publisher's
/// process of the stream before, which may have the slot still.
pub(super) async fn run(
    intake: &mut Intake<'_>,
    attendant: &mut Attendant,
    left: Option<i32>,
    connected: Connected,
) -> Result<(), CaptureError> {
    let spec = &intake.capture.spec;
    let (mut sql, mut witness) = match connected {
        Ok(connected) => connected,
        // The stream takes fewer connections.
        Err(error) => {
            tracing::info!(publication = %spec.name, %error, "no batches by function: streaming");
            intake.keep_streaming();
            return Ok(());
        }
    };
    let server = &intake.server;
    let same =
        async { tokio::try_join!(server.check(spec, &mut sql), server.check(spec, &mut witness)) };
    in_time(spec, same).await??;
    // What the publisher is at must not keep the slot when nobody waits for it any more.
    let cancels = [sql.cancel_token(), witness.cancel_token()];
    let mut stop = intake.stop.clone();
    let mut batches = Batches { witness, left };
    let nudge = attendant.follower();
    let ended = tokio::select! {
        _ = stop.wait_for(|stop| *stop) => Ended::Cut(Ok(())),
        found = attendant.finds() => Ended::Cut(Err(found)),
        ended = batches.take_all(sql, intake, nudge) => ended.err().unwrap_or(Ended::Near),
    };
    if matches!(ended, Ended::Refused(_) | Ended::Cut(_)) {
        for cancel in cancels {
            if let Err(error) = cancel.cancel().await {
                tracing::debug!(%error, "not cancelled");
            }
        }
    }
    match ended {
        Ended::Near => {
            batches.witness.close().await;
            Ok(())
        }
        Ended::Refused(error) => {
            batches.witness.close().await;
            // What was complete is kept. What is wrong shows in the stream too, where it is told
            // from what is to be waited for.
            intake.assembler.begin_again();
            intake.hand_over().await?;
            intake.until_durable().await?;
            if !error.is_transient() && error.sqlstate() != Some(CANCELLED) {
                intake.capture.stream_only.store(true, Ordering::Relaxed);
            }
            intake.keep_streaming();
            let publication = &intake.capture.spec.name;
            tracing::info!(%publication, %error, "no more batches by function: streaming");
            Ok(())
        }
        Ended::Cut(why) => why,
    }
}

async fn connect_one(spec: &PublicationSpec) -> Result<Connection, CaptureError> {
    let mut sql = spec.connect(Mode::Sql).await?;
    let settings = format!(
        "SET search_path = ''; SET lc_monetary = 'C'; SET work_mem = '64MB'; \
         SET statement_timeout = {}",
        CALL_MAX.as_millis()
    );
    let set = sql.simple_query(&settings).await;
    set.map_err(|error| spec.publisher_error(error))?;
    // Not everywhere: a server that cannot look for a lost client finds out when it answers.
    let _ = sql.simple_query("SET client_connection_check_interval = '2s'").await;
    // One whose client's machine is gone would keep the slot's copy for two hours.
    let keepalive = "SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; \
                     SET tcp_keepalives_count = 4; SET tcp_user_timeout = '30s'";
    let _ = sql.simple_query(keepalive).await;
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
    /// For questions, and for the slot itself, while batches come on another connection.
    witness: Connection,
    /// The publisher's process of the stream before.
    left: Option<i32>,
}

/// Where things stand on the publisher.
struct Look {
    place: Place,
    /// Where the copy decodes from.
    restart: Lsn,
}

/// A batch that was asked for.
#[derive(Clone, Copy)]
struct Asked {
    from: Lsn,
    upto: Lsn,
}

impl Asked {
    fn log_bytes(&self) -> u64 {
        self.upto.bytes_since(self.from)
    }
}

impl Look {
    /// The batch from `from` on, after one of `before`; `None` if the stream is as good.
    fn plan(&self, intake: &Intake<'_>, from: Lsn, before: Option<u64>) -> Option<Asked> {
        let of_copy = Place { restart: self.restart, ..self.place };
        let log = next_batch(intake, &of_copy, from, before)?;
        Some(Asked { from, upto: self.place.end.min(Lsn(from.0 + log)) })
    }

    /// Whether moving the slot lets the publisher remove log. With fault injection it is moved each
    /// time, so that it is moved in the middle of everything.
    fn move_frees_log(&self) -> bool {
        self.restart > self.place.restart || cfg!(feature = "faults")
    }
}

impl Batches {
    /// Takes batches until the stream is as good.
    async fn take_all(
        &mut self,
        mut sql: Connection,
        intake: &mut Intake<'_>,
        nudge: Follower,
    ) -> Result<(), Ended> {
        let (spec, from) = (&intake.capture.spec, intake.assembler.last_position());
        if self.free_slot(spec).await?.is_none() {
            return Ok(());
        }
        let made = in_time(spec, SlotCopy::make(spec, &mut sql, from)).await?;
        let copy = made.map_err(refused)?;
        let mut ahead = Ahead::start(spec.clone(), sql);
        self.take_each(&copy, &mut ahead, intake, nudge).await?;
        if ahead.is_at_work() {
            tracing::info!(
                publication = %spec.name, "the batch that was asked for ahead is not wanted any more"
            );
            return Err(Ended::Cut(Ok(())));
        }
        ahead.close().await;
        Ok(())
    }

    async fn take_each(
        &mut self,
        copy: &SlotCopy,
        ahead: &mut Ahead,
        intake: &mut Intake<'_>,
        nudge: Follower,
    ) -> Result<(), Ended> {
        let spec = &intake.capture.spec;
        let (mut before, mut next) = (None, None);
        let mut moved_at = Instant::now();
        loop {
            let (capture, from) = (intake.capture, intake.assembler.last_position());
            let Some(look) = self.look(copy, capture, from).await? else { return Ok(()) };
            // What was asked for ahead comes next, and no other batch in its place. Things may have
            // changed since.
            let asked = match next.take() {
                Some(next) => Some(next).filter(|_| may_take_batches(capture, &look.place)),
                None => look.plan(intake, from, before),
            };
            let Some(asked) = asked else { return self.end(&look, intake).await };
            if !ahead.is_at_work() {
                ahead.ask(get(intake, copy, asked.upto), asked.upto).await;
            }
            // The publisher is at the next one while this one is handled. The first tells what the
            // log is made of.
            if before.is_some() {
                next = look.plan(intake, asked.upto, Some(asked.log_bytes()));
            }
            if let Some(next) = &next {
                ahead.ask(get(intake, copy, next.upto), next.upto).await;
            }
            nudge.reached(asked.upto);
            let counted = intake.counted;
            let durable = *intake.durable.borrow_and_update();
            let is_due = look.move_frees_log() || moved_at.elapsed() >= MOVE_SLOT_EVERY;
            let (taken, moved) = tokio::join!(take(ahead, intake), async {
                if is_due && durable.0 > look.place.confirmed {
                    move_slot(&mut self.witness, capture, durable).await?;
                    moved_at = Instant::now();
                }
                Ok::<(), Ended>(())
            });
            let streamed = taken?;
            moved?;
            let Counted { messages, bytes } = intake.counted.since(counted);
            tracing::info!(
                publication = %spec.name, from = %asked.from, upto = %asked.upto, messages, bytes,
                "far behind: taken by function"
            );
            if streamed {
                // The next batch would have all of it again.
                intake.keep_streaming();
                return Ok(());
            }
            if let Some(traffic) = Traffic::of(asked.log_bytes(), messages, bytes) {
                intake.traffic = traffic;
            }
            before = Some(asked.log_bytes());
        }
    }

    /// Looks where the slot and its copy stand; `None` if one of them is gone or lost. `from` is
    /// where the store ends.
    async fn look(
        &mut self,
        copy: &SlotCopy,
        capture: &Capture,
        from: Lsn,
    ) -> Result<Option<Look>, CaptureError> {
        let spec = &capture.spec;
        let Some(place) = self.free_slot(spec).await? else { return Ok(None) };
        slot::check_not_ahead(spec, place.confirmed, from)?;
        capture.set_status(|status| {
            status.publisher_end = place.end;
            status.heard_at = Some(PgTime::now());
        });
        let restart = copy.restart(spec, &mut self.witness).await?;
        Ok(restart.map(|restart| Look { place, restart }))
    }

    /// There are no more batches. A stream passes over what the slot stands before as well, and
    /// takes longer for it.
    async fn end(&mut self, look: &Look, intake: &mut Intake<'_>) -> Result<(), Ended> {
        if look.move_frees_log() {
            intake.until_durable().await?;
            let durable = *intake.durable.borrow_and_update();
            tracing::info!(
                publication = %intake.capture.spec.name, from = %look.place.confirmed,
                to = %durable.0, "moving the slot over what was taken"
            );
            move_slot(&mut self.witness, intake.capture, durable).await?;
        }
        Ok(())
    }

    /// Where the slot stands, once nothing has it in use: a stream that was left just now may be
    /// going still, and is ended if that takes long. What else has it is met by the call.
    async fn free_slot(&mut self, spec: &PublicationSpec) -> Result<Option<Place>, CaptureError> {
        let since = Instant::now();
        loop {
            let place = slot::place(spec, &mut self.witness).await?;
            if !place.is_some_and(|place| place.in_use) || since.elapsed() >= SLOT_FREE_MAX {
                return Ok(place);
            }
            if since.elapsed() >= SLOT_FREE_SOON
                && let Some(walsender) = self.left.take()
            {
                slot::end_walsender(spec, &mut self.witness, walsender).await?;
            }
            tokio::time::sleep(LOOK_AT_SLOT_EVERY).await;
        }
    }
}

/// Takes in the first batch that was asked for and has not come, and hands it to the store. Returns
/// whether a transaction was streamed before its commit.
async fn take(ahead: &mut Ahead, intake: &mut Intake<'_>) -> Result<bool, Ended> {
    let from = intake.assembler.last_position();
    intake.assembler.begin_again();
    let mut reader = RowReader::new();
    let broken = |error: CopyError| Ended::from(CaptureError::Protocol(error.to_string()));
    let upto = loop {
        let piece = match ahead.next().await? {
            Next::Piece(piece) => piece,
            Next::End(upto) => break upto,
        };
        for bytes in &piece.rows {
            let mut rows = reader.feed(bytes);
            while let Some(row) = rows.next_row().map_err(broken)? {
                let message = row.fields().next().flatten().unwrap_or_default();
                intake.message(message, from).await?;
                if intake.assembler.bytes_waiting() >= BATCH_BYTES {
                    hand_over_soon(intake).await?;
                }
            }
        }
    };
    reader.finish().map_err(broken)?;
    let streamed = intake.assembler.is_streaming();
    // Everything that was committed up to there has come. It need not be durable before the next
    // batch is asked for: that moves the copy alone.
    intake.assembler.watermark(upto);
    hand_over_soon(intake).await?;
    Ok(streamed)
}

/// Tells the slot what is durable in the store, and nothing beyond.
async fn move_slot(sql: &mut Connection, capture: &Capture, durable: Durable) -> Result<(), Ended> {
    let spec = &capture.spec;
    fault::point("capture.before-acknowledge");
    let moved = in_time(spec, slot::advance(sql, &spec.slot_name(), durable.0)).await?;
    moved.map_err(|error| refused(spec.publisher_error(error)))?;
    fault::point("capture.after-acknowledge");
    capture.set_status(|status| status.acknowledged = durable);
    Ok(())
}

/// What the publisher answered no to ends the batches; what is wrong otherwise, this connection.
fn refused(error: CaptureError) -> Ended {
    match error {
        CaptureError::Publisher { error, .. } if error.server_error().is_some() => {
            Ended::Refused(error)
        }
        error => Ended::Cut(Err(error)),
    }
}

/// A publisher that says nothing for longer than it may work is gone.
pub(super) async fn in_time<T>(
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

/// The query for all that was committed up to `upto`, which takes it from the copy.
fn get(intake: &Intake<'_>, copy: &SlotCopy, upto: Lsn) -> String {
    let options: String = intake
        .options()
        .iter()
        .map(|(key, value)| format!(", {}, {}", quote_literal(key), quote_literal(value)))
        .collect();
    format!(
        "COPY (SELECT data FROM pg_logical_slot_get_binary_changes({}, '{upto}', NULL{options})) \
         TO STDOUT (FORMAT binary)",
        quote_literal(copy.name())
    )
}
