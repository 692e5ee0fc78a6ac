//! The capture loop of one publication.

use crate::assembler::Assembler;
use crate::attendant::Attendant;
use crate::publication::PublicationSpec;
use crate::{CaptureError, alterations, slot};
use farshore_fault as fault;
use farshore_model::{Durable, Lsn, Received};
use farshore_pg::Mode;
use farshore_pg::replication::{ReplicationStream, StreamMessage};
use farshore_store::{Batch, LogStore, StoreError};
use farshore_wire::pgoutput::Context;
use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// A batch is handed over at this size even if more is waiting, in bytes.
const BATCH_BYTES: usize = 256 << 10;

/// Acknowledgements are at least this far apart while the log moves.
const ACKNOWLEDGE_EVERY: Duration = Duration::from_millis(20);

/// The publisher hears from us at least this often (its `wal_sender_timeout` is 60 s by default).
const STATUS_EVERY: Duration = Duration::from_secs(10);

/// On an idle database the slot follows the log after this long.
const WATERMARK_EVERY: Duration = Duration::from_secs(2);

/// Tables that match the patterns are looked for this often.
const TABLES_EVERY: Duration = Duration::from_secs(5);

/// How long messages are counted to tell a flood.
const PACE_WINDOW: Duration = Duration::from_millis(5);
/// From this rate on, messages are left to gather.
const FLOOD_MESSAGES_PER_SECOND: f64 = 30_000.0;
/// For how long.
const FLOOD_PAUSE: Duration = Duration::from_millis(1);

/// A stream that is silent for this long is taken for dead, where the publisher sets no
/// `wal_sender_timeout` that says otherwise.
const SILENCE_MAX: Duration = Duration::from_secs(60);

/// While something is waited for, a stop is looked for this often.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// What a publication's capture is doing.
#[derive(Clone, Debug, Default)]
pub struct CaptureStatus {
    /// Whether the stream is up.
    pub streaming: bool,
    /// End of the publisher's log as last heard of.
    pub publisher_end: Lsn,
    /// Newest position taken from the stream.
    pub received: Received,
    /// What the slot was told last.
    pub acknowledged: Durable,
    /// Row changes taken on this connection.
    pub changes: u64,
    /// Bytes of replication messages taken on this connection.
    pub wire_bytes: u64,
}

/// Carries one publication from its slot into its store until told to stop.
pub struct Capture {
    /// What to publish.
    pub spec: PublicationSpec,
    /// Where to keep it.
    pub store: Arc<dyn LogStore>,
    /// Where to say how it goes.
    pub status: Arc<Mutex<CaptureStatus>>,
    /// Counts the connections on which the publication was as configured, the slot was there and
    /// the store covered its start. From the first on, snapshots may begin.
    pub ready: watch::Sender<u64>,
    /// The log holds values that have no binary form, or one that means something else elsewhere:
    /// all values are asked for as text. Found out on the way; false at first.
    pub text_only: AtomicBool,
}

impl Capture {
    /// Runs until `stop` turns true (then everything received is made durable and acknowledged)
    /// or something fails.
    pub async fn run(&self, stop: watch::Receiver<bool>) -> Result<(), CaptureError> {
        loop {
            match self.run_connection(stop.clone()).await {
                Err(CaptureError::TurnToText) => {}
                ended => return ended,
            }
        }
    }

    async fn run_connection(&self, mut stop: watch::Receiver<bool>) -> Result<(), CaptureError> {
        // What an earlier connection handed over must be durable before another one goes on: the
        // stream is asked for from the durable end.
        let (accepted, mut durable) = (self.store.accepted_end(), self.store.durable());
        tokio::select! {
            reached = durable.wait_for(|durable| durable.0 >= accepted) => if reached.is_err() {
                return Err(store_failure(self.store.as_ref()));
            },
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
        }
        let mut sql = self.spec.connect(Mode::Sql).await?;
        let silence_max = check_settings(&self.spec, &mut sql).await?;
        alterations::ensure_publication(&self.spec, &mut sql, self.store.as_ref()).await?;
        let start = slot::ensure_slot(&self.spec, &mut sql, self.store.as_ref()).await?;
        let binary = !self.text_only.load(Ordering::Relaxed)
            && self.spec.published_tables(&mut sql).await?.iter().all(|t| t.binary_safe);
        let context = Context {
            protocol: match sql.server_version() {
                ..150_000 => 2,
                150_000..160_000 => 3,
                _ => 4,
            },
            in_stream: false,
            parallel_streaming: false,
        };
        let stream = self.start_stream(start, &context, binary).await?;
        let mut session = Session {
            capture: self,
            assembler: Assembler::new(self.store.clone(), context, self.store.durable().borrow().0),
            durable: self.store.durable(),
            stream,
            acknowledged: Durable(Lsn::ZERO),
            acknowledged_at: Instant::now(),
            watermark_at: Instant::now(),
            quiet_at: None,
            binary,
            catalog: None,
            pace: Pace { since: Instant::now(), messages: 0, flood: false },
            attendant: Attendant::start(
                self.spec.clone(),
                sql,
                start,
                alterations::Watch::new(self.store.as_ref()),
            ),
            wire_bytes: 0,
            stop: stop.clone(),
            silence_max,
            heard_at: Instant::now(),
        };
        // An empty store covers nothing; this entry says where its log begins.
        session.assembler.watermark(start);
        session.append().await?;
        session.wait_durable(start).await?;
        self.ready.send_modify(|sessions| *sessions += 1);
        self.set_status(|status| status.streaming = true);
        tracing::info!(publication = %self.spec.name, %start, binary, "capture streaming");
        let result = tokio::select! {
            result = session.run(&mut stop) => result,
            never = self.watch_tables() => match never {},
        };
        self.set_status(|status| status.streaming = false);
        result
    }

    /// Takes tables that match the patterns into the publication as they appear, and tells the
    /// subscriptions when anything has joined or left.
    async fn watch_tables(&self) -> Infallible {
        let (mut sql, mut signature, mut complained) = (None, None, String::new());
        loop {
            match self.look_at_tables(&mut sql).await {
                Ok(now) => {
                    if signature.as_ref().is_some_and(|before| *before != now) {
                        tracing::info!(
                            publication = %self.spec.name,
                            "tables have joined or left the publication"
                        );
                        self.ready.send_modify(|sessions| *sessions += 1);
                    }
                    signature = Some(now);
                    complained.clear();
                }
                Err(error) => {
                    sql = None;
                    let error = error.to_string();
                    if error != complained {
                        tracing::warn!(
                            publication = %self.spec.name,
                            "its tables stay as they are for now: {error}"
                        );
                        complained = error;
                    }
                }
            }
            tokio::time::sleep(TABLES_EVERY).await;
        }
    }

    async fn look_at_tables(
        &self,
        sql: &mut Option<farshore_pg::Connection>,
    ) -> Result<String, CaptureError> {
        let connection = match sql {
            Some(connection) => connection,
            None => {
                let mut fresh = self.spec.connect(Mode::Sql).await?;
                // Others' locks on a table must not hold up the rest for long.
                let timeout = fresh.simple_query("SET lock_timeout = '2s'").await;
                timeout.map_err(|error| self.spec.publisher_error(error))?;
                sql.insert(fresh)
            }
        };
        self.spec.follow_tables(connection).await?;
        self.spec.membership_signature(connection).await
    }

    async fn start_stream(
        &self,
        start: Lsn,
        context: &Context,
        binary: bool,
    ) -> Result<ReplicationStream, CaptureError> {
        let protocol = context.protocol.to_string();
        let publication = farshore_model::quote_identifier(&self.spec.publication_name());
        let mut options = vec![
            ("proto_version", protocol.as_str()),
            ("publication_names", publication.as_str()),
            ("streaming", "on"),
        ];
        if binary {
            options.push(("binary", "true"));
        }
        let connection = self.spec.connect(Mode::LogicalReplication).await?;
        connection
            .start_replication(&self.spec.slot_name(), start, &options)
            .await
            .map_err(|error| self.spec.publisher_error(error))
    }

    fn set_status(&self, change: impl FnOnce(&mut CaptureStatus)) {
        change(&mut self.status.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
    }
}

/// Refuses a publisher that writes no logical information; returns how long its stream may be
/// silent.
async fn check_settings(
    spec: &PublicationSpec,
    sql: &mut farshore_pg::Connection,
) -> Result<Duration, CaptureError> {
    let query = "SELECT current_setting('wal_level'), setting FROM pg_settings \
                 WHERE name = 'wal_sender_timeout'";
    let rows = sql.query(query, &[]).await.map_err(|error| spec.publisher_error(error))?;
    let row = rows.first();
    let level = row.and_then(|row| row.get(0)).unwrap_or_default();
    if level == "logical" {
        let timeout = row.and_then(|row| row.get(1)?.parse().ok()).filter(|ms| *ms > 0);
        return Ok(timeout.map_or(SILENCE_MAX, Duration::from_millis));
    }
    Err(CaptureError::Setup(format!(
        "publication \"{}\": {} has wal_level = {level}. Set wal_level = logical and restart that \
         server",
        spec.name,
        spec.source.redacted()
    )))
}

/// One replication connection at work.
struct Session<'a> {
    capture: &'a Capture,
    assembler: Assembler,
    durable: watch::Receiver<Durable>,
    stream: ReplicationStream,
    acknowledged: Durable,
    acknowledged_at: Instant,
    watermark_at: Instant,
    /// Where the publisher said that everything before has been sent, when nothing came after.
    quiet_at: Option<Lsn>,
    /// Values come in binary where their types have a binary form.
    binary: bool,
    /// For questions about types, once there was one.
    catalog: Option<farshore_pg::Connection>,
    attendant: Attendant,
    pace: Pace,
    wire_bytes: u64,
    stop: watch::Receiver<bool>,
    silence_max: Duration,
    /// When the publisher last said something, or we last had no ear for it.
    heard_at: Instant,
}

/// How fast messages come.
///
/// A walsender sends each message by itself. When they come in a flood, to be woken for every few
/// of them costs more than to handle them, on both sides: then capture lets them gather in the
/// socket for a moment.
struct Pace {
    since: Instant,
    messages: u64,
    flood: bool,
}

impl Pace {
    fn is_flood(&mut self) -> bool {
        let elapsed = self.since.elapsed();
        if elapsed >= PACE_WINDOW {
            let per_second = self.messages as f64 / elapsed.as_secs_f64();
            self.flood = per_second >= FLOOD_MESSAGES_PER_SECOND;
            (self.since, self.messages) = (Instant::now(), 0);
        }
        self.flood
    }
}

/// What woke the loop up.
enum Event {
    Message(Option<StreamMessage>),
    Lost(farshore_pg::Error),
    Durable,
    StoreClosed,
    Found(CaptureError),
    Tick,
    Stop,
}

impl Session<'_> {
    async fn run(&mut self, stop: &mut watch::Receiver<bool>) -> Result<(), CaptureError> {
        let mut tick = tokio::time::interval(Duration::from_millis(500));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let unacknowledged = *self.durable.borrow() > self.acknowledged;
            let acknowledge_at = self.acknowledged_at + ACKNOWLEDGE_EVERY;
            let event = tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => Event::Stop,
                () = tokio::time::sleep_until(acknowledge_at), if unacknowledged => Event::Durable,
                changed = self.durable.changed(), if !unacknowledged => match changed {
                    Ok(()) => continue,
                    Err(_) => Event::StoreClosed,
                },
                message = self.stream.next() => match message {
                    Ok(message) => Event::Message(message),
                    Err(error) => Event::Lost(error),
                },
                found = self.attendant.finds() => Event::Found(found),
                _ = tick.tick() => Event::Tick,
            };
            match event {
                Event::Stop => return self.stop().await,
                Event::Lost(error) => return self.lost(error).await,
                Event::Durable => self.acknowledge().await?,
                Event::StoreClosed => return Err(self.store_failure()),
                Event::Found(found) => return Err(found),
                Event::Tick => {
                    self.break_silence().await?;
                    if self.capture.store.failure().is_some() {
                        return Err(self.store_failure());
                    }
                    if self.watermark_at.elapsed() >= WATERMARK_EVERY {
                        self.follow_quiet_log().await?;
                    }
                    if self.acknowledged_at.elapsed() >= STATUS_EVERY {
                        self.acknowledge().await?;
                    }
                }
                Event::Message(None) => {
                    let server = self.stream.server().to_owned();
                    return Err(self.publisher_error(farshore_pg::Error::Closed { server }));
                }
                Event::Message(Some(first)) => {
                    if self.pace.is_flood() {
                        tokio::time::sleep(FLOOD_PAUSE).await;
                    }
                    let mut next = Some(first);
                    while let Some(message) = next {
                        self.message(message).await?;
                        self.pace.messages += 1;
                        if self.assembler.bytes_waiting() >= BATCH_BYTES {
                            self.append().await?;
                        }
                        next = match self.stream.try_next() {
                            Ok(next) => next,
                            Err(error) => return self.lost(error).await,
                        };
                        // A stream that never pauses must keep nothing back.
                        if self.acknowledged_at.elapsed() >= ACKNOWLEDGE_EVERY {
                            self.append().await?;
                            self.acknowledge_if_moved().await?;
                            let stopping = *stop.borrow();
                            if stopping {
                                break;
                            }
                        }
                    }
                    self.append().await?;
                }
            }
        }
    }

    /// A link that was cut says nothing, and the stream of an idle database says little: the
    /// publisher is asked for a word in time, and without an answer the stream is given up.
    async fn break_silence(&mut self) -> Result<(), CaptureError> {
        let silent = self.heard_at.elapsed();
        if silent >= self.silence_max {
            let what = format!("waiting for any word from {}", self.stream.server());
            let after = self.silence_max;
            return Err(self.publisher_error(farshore_pg::Error::Timeout { what, after }));
        }
        if silent >= self.silence_max / 2 {
            let durable = self.acknowledged;
            let asked = self.stream.send_status(durable.0, durable.0, durable.0, true).await;
            asked.map_err(|error| self.publisher_error(error))?;
        }
        Ok(())
    }

    /// The connection is gone: what was complete before is kept.
    async fn lost(&mut self, error: farshore_pg::Error) -> Result<(), CaptureError> {
        if let Some(batch) = self.assembler.take_batch() {
            append_owned(self.capture.store.clone(), batch).await?;
        }
        // "no binary output function available for type …", of a part of a value.
        if self.binary && error.sqlstate() == Some("42883") {
            return Err(self.turn_to_text(&error));
        }
        if error.sqlstate() == Some("42704") {
            return Err(slot::publication_gone(&self.capture.spec, &error));
        }
        Err(self.publisher_error(error))
    }

    async fn message(&mut self, message: StreamMessage) -> Result<(), CaptureError> {
        self.heard_at = Instant::now();
        match message {
            StreamMessage::XLogData { wal_start, wal_end, data, .. } => {
                self.quiet_at = None;
                self.wire_bytes += data.len() as u64;
                if data.first() == Some(&b'R') {
                    self.describe_types(&data, wal_start).await?;
                }
                // The end of a transaction or of a stream block may sync a spill.
                let taken = match data.first() {
                    Some(b'C' | b'E' | b'c') => {
                        tokio::task::block_in_place(|| self.assembler.message(&data))
                    }
                    Some(_) | None => self.assembler.message(&data),
                };
                taken.map_err(|error| error.at(self.capture.spec.source.redacted(), wal_start))?;
                self.attendant.reached(wal_end.max(wal_start));
            }
            StreamMessage::Keepalive { wal_end, reply_requested, .. } => {
                self.attendant.reached(wal_end);
                self.capture.set_status(|status| {
                    status.publisher_end = status.publisher_end.max(wal_end);
                });
                self.quiet_at = (!self.assembler.in_transaction()).then_some(wal_end);
                if reply_requested {
                    self.follow_quiet_log().await?;
                    self.wait_durable(self.assembler.last_position()).await?;
                    self.acknowledge().await?;
                } else if self.watermark_at.elapsed() >= WATERMARK_EVERY {
                    self.follow_quiet_log().await?;
                }
            }
        }
        Ok(())
    }

    /// Learns what the column types of a Relation message are made of, before changes that hold
    /// values of theirs are taken.
    async fn describe_types(&mut self, data: &[u8], near: Lsn) -> Result<(), CaptureError> {
        let spec = &self.capture.spec;
        let types = self.assembler.column_types(data);
        let types = types.map_err(|error| error.at(spec.source.redacted(), near))?;
        let catalog = self.assembler.types();
        if !catalog.missing(types.iter().copied()).is_empty() {
            if self.catalog.is_none() {
                self.catalog = Some(spec.connect(Mode::Sql).await?);
            }
            let Some(sql) = &mut self.catalog else { return Ok(()) };
            let described = catalog.describe(sql, types.iter().copied()).await;
            described.map_err(|error| spec.publisher_error(error))?;
        }
        if self.binary && !types.iter().all(|oid| catalog.travels_in_binary(*oid)) {
            return Err(self.turn_to_text(&"a column's values name things by OID"));
        }
        Ok(())
    }

    fn turn_to_text(&self, why: &dyn std::fmt::Display) -> CaptureError {
        tracing::info!(
            publication = %self.capture.spec.name, %why,
            "values are asked for as text from here on"
        );
        self.capture.text_only.store(true, Ordering::Relaxed);
        CaptureError::TurnToText
    }

    /// Everything before the last keepalive's position has been sent to us, so when nothing of it
    /// waits here the store, and with it the slot, may follow: an idle database must not hold its
    /// log back.
    async fn follow_quiet_log(&mut self) -> Result<(), CaptureError> {
        if let Some(position) = self.quiet_at.take() {
            self.assembler.watermark(position);
            self.append().await?;
        }
        Ok(())
    }

    /// Hands the waiting entries to the store. A slow disk must not cost us the connection, so the
    /// publisher keeps hearing from us meanwhile.
    async fn append(&mut self) -> Result<(), CaptureError> {
        let Some(batch) = self.assembler.take_batch() else { return Ok(()) };
        let received = Received(self.assembler.last_position());
        let (changes, wire_bytes) = (self.assembler.changes_assembled(), self.wire_bytes);
        self.capture.set_status(|status| {
            status.received = received;
            status.publisher_end = status.publisher_end.max(received.0);
            status.changes = changes;
            status.wire_bytes = wire_bytes;
        });
        self.watermark_at = Instant::now();
        let store = self.capture.store.clone();
        let mut appended = std::pin::pin!(append_owned(store, batch));
        loop {
            tokio::select! {
                result = &mut appended => {
                    self.heard_at = Instant::now();
                    return result;
                }
                () = tokio::time::sleep(LOOK_EVERY) => self.meanwhile().await?,
            }
        }
    }

    async fn wait_durable(&mut self, position: Lsn) -> Result<(), CaptureError> {
        let mut durable = self.durable.clone();
        let reached = async { durable.wait_for(|durable| durable.0 >= position).await.is_ok() };
        let mut reached = std::pin::pin!(reached);
        loop {
            tokio::select! {
                reached = &mut reached => {
                    self.heard_at = Instant::now();
                    return if reached { Ok(()) } else { Err(self.store_failure()) };
                }
                () = tokio::time::sleep(LOOK_EVERY) => self.meanwhile().await?,
            }
        }
    }

    /// While the disk is waited for, the publisher hears from us, and a stop does not wait for a
    /// disk that is full.
    async fn meanwhile(&mut self) -> Result<(), CaptureError> {
        let stopping = *self.stop.borrow();
        if stopping && self.capture.store.status().waiting_for_room.is_some() {
            return Err(CaptureError::Interrupted(
                "the disk is full, so what was received last is left to be sent again".to_owned(),
            ));
        }
        if self.acknowledged_at.elapsed() >= STATUS_EVERY {
            self.acknowledge().await?;
        }
        Ok(())
    }

    async fn acknowledge_if_moved(&mut self) -> Result<(), CaptureError> {
        if *self.durable.borrow() > self.acknowledged { self.acknowledge().await } else { Ok(()) }
    }

    /// Tells the slot what is durable in the store, and nothing beyond.
    async fn acknowledge(&mut self) -> Result<(), CaptureError> {
        let durable = *self.durable.borrow_and_update();
        fault::point("capture.before-acknowledge");
        self.stream
            .send_status(durable.0, durable.0, durable.0, false)
            .await
            .map_err(|error| self.publisher_error(error))?;
        fault::point("capture.after-acknowledge");
        self.acknowledged = durable;
        self.acknowledged_at = Instant::now();
        self.capture.set_status(|status| status.acknowledged = durable);
        Ok(())
    }

    async fn stop(&mut self) -> Result<(), CaptureError> {
        self.append().await?;
        self.wait_durable(self.assembler.last_position()).await?;
        self.acknowledge().await
    }

    fn store_failure(&self) -> CaptureError {
        store_failure(self.capture.store.as_ref())
    }

    fn publisher_error(&self, error: farshore_pg::Error) -> CaptureError {
        self.capture.spec.publisher_error(error)
    }
}

fn store_failure(store: &dyn LogStore) -> CaptureError {
    match store.failure() {
        Some(error @ StoreError::Failed(_)) => CaptureError::Store(error),
        Some(error) => CaptureError::Store(StoreError::Failed(Arc::new(error))),
        None => CaptureError::Protocol("the store closed".to_owned()),
    }
}

async fn append_owned(store: Arc<dyn LogStore>, batch: Batch) -> Result<(), CaptureError> {
    store.append(batch).await.map_err(CaptureError::Store)
}
