//! The near gear: the walsender's stream, message by message as the publisher commits.

use super::gears::Traffic;
use super::intake::{BATCH_BYTES, Counted, Intake, append_owned};
use super::{LOOK_EVERY, STATUS_EVERY, catch_up};
use crate::attendant::Attendant;
use crate::slot::Place;
use crate::{CaptureError, slot};
use farshore_fault as fault;
use farshore_model::{Durable, Lsn, PgTime};
use farshore_pg::replication::{ReplicationStream, StreamMessage};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;

/// Acknowledgements are at least this far apart while the log moves.
const ACKNOWLEDGE_EVERY: Duration = Duration::from_millis(20);

/// On an idle database the slot follows the log after this long.
const WATERMARK_EVERY: Duration = Duration::from_secs(2);

/// That something was heard of the publisher is told at most so often.
const NOTE_HEARD_EVERY: Duration = Duration::from_secs(1);

/// How long messages are counted to tell a flood.
const PACE_WINDOW: Duration = Duration::from_millis(5);
/// From this rate on, messages are left to gather.
const FLOOD_MESSAGES_PER_SECOND: f64 = 30_000.0;

/// The clock is read once for so many messages that are here already, or fewer if they are long:
/// to read it for each costs a twentieth of what a small message does.
const MESSAGES_PER_LOOK: usize = 32;
/// What counts as one message, in bytes.
const LONG_MESSAGE_BYTES: usize = 512;

/// Why a stream was left in good order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    /// A stop was asked for.
    ToStop,
    /// It has fallen so far behind that batches are better.
    FarBehind,
}

/// One replication connection at work.
pub(super) struct Session<'s, 'a> {
    intake: &'s mut Intake<'a>,
    stream: ReplicationStream,
    attendant: &'s mut Attendant,
    acknowledged: Durable,
    acknowledged_at: Instant,
    /// Where the publisher said that everything before has been sent, when nothing came after.
    quiet_at: Option<Lsn>,
    /// How far a snapshot needs the log.
    awaited: watch::Receiver<Lsn>,
    pace: Pace,
    silence_max: Duration,
    /// When the publisher last said something, or we last had no ear for it.
    heard_at: Instant,
    /// When that was last told.
    heard_noted_at: Option<Instant>,
    /// From where on the log's traffic is counted, and what had been counted there.
    traffic_from: (Lsn, Counted),
    /// Where this stream began.
    began_at: Lsn,
    /// How far the publisher has said that it has come.
    sent: Lsn,
    /// With that, how far the standbys were that it waits for, and since when neither moves.
    held: Option<(Lsn, Lsn, Instant)>,
}

/// Log of which the publisher gives nothing, while a standby that it waits for gets no further, is
/// said to be held back after so long.
const HELD_BACK_AFTER: Duration =
    Duration::from_secs(if cfg!(feature = "faults") { 1 } else { 30 });

/// The stream is kept for so long while the disk has no room.
const WITHOUT_ROOM_MAX: Duration =
    Duration::from_secs(if cfg!(feature = "faults") { 1 } else { 30 });

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
    Looked(Option<Place>),
    Awaited,
    Found(CaptureError),
    Tick,
    Stop,
}

impl<'s, 'a> Session<'s, 'a> {
    /// Goes on from what `intake` has taken so far; a stream that is silent for `silence_max` is
    /// taken for dead.
    pub fn new(
        intake: &'s mut Intake<'a>,
        stream: ReplicationStream,
        attendant: &'s mut Attendant,
        silence_max: Duration,
    ) -> Session<'s, 'a> {
        let began_at = intake.assembler.last_position();
        let traffic_from = (began_at, intake.counted);
        let awaited = intake.capture.awaited.subscribe();
        Session {
            intake,
            stream,
            attendant,
            acknowledged: Durable(Lsn::ZERO),
            acknowledged_at: Instant::now(),
            quiet_at: None,
            awaited,
            pace: Pace { since: Instant::now(), messages: 0, flood: false },
            silence_max,
            heard_at: Instant::now(),
            heard_noted_at: None,
            traffic_from,
            began_at,
            sent: began_at,
            held: None,
        }
    }

    /// The publisher's process at the other end.
    pub fn walsender(&self) -> i32 {
        self.stream.backend_pid()
    }

    /// Until `stop` turns true or batches would be better; then everything received is made durable
    /// and acknowledged.
    pub async fn run(mut self) -> Result<Left, CaptureError> {
        let mut stop = self.intake.stop.clone();
        let mut places = self.attendant.places();
        // What was seen before this stream says nothing about it.
        places.mark_unchanged();
        let mut tick = tokio::time::interval(Duration::from_millis(500));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let unacknowledged = *self.intake.durable.borrow() > self.acknowledged;
            let acknowledge_at = self.acknowledged_at + ACKNOWLEDGE_EVERY;
            let event = tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => Event::Stop,
                Ok(()) = places.changed() => Event::Looked(*places.borrow_and_update()),
                () = tokio::time::sleep_until(acknowledge_at), if unacknowledged => Event::Durable,
                changed = self.intake.durable.changed(), if !unacknowledged => match changed {
                    Ok(()) => continue,
                    Err(_) => Event::StoreClosed,
                },
                message = self.stream.next() => match message {
                    Ok(message) => Event::Message(message),
                    Err(error) => Event::Lost(error),
                },
                found = self.attendant.finds() => Event::Found(found),
                Ok(()) = self.awaited.changed() => Event::Awaited,
                _ = tick.tick() => Event::Tick,
            };
            match event {
                Event::Stop => return self.leave(Left::ToStop).await,
                Event::Looked(place) => {
                    if let Some(place) = &place {
                        self.note_place(place);
                    }
                    if self.is_far_behind(place) {
                        return self.leave(Left::FarBehind).await;
                    }
                }
                Event::Lost(error) => return Err(self.lost(error).await),
                Event::Durable => self.acknowledge().await?,
                Event::Awaited => self.follow_if_due().await?,
                Event::StoreClosed => return Err(self.intake.store_failure()),
                Event::Found(found) => return Err(found),
                Event::Tick => {
                    self.break_silence().await?;
                    if self.intake.capture.store.failure().is_some() {
                        return Err(self.intake.store_failure());
                    }
                    self.follow_if_due().await?;
                    if self.acknowledged_at.elapsed() >= STATUS_EVERY {
                        self.acknowledge().await?;
                    }
                }
                Event::Message(None) => {
                    let server = self.stream.server().to_owned();
                    return Err(self.intake.publisher_error(farshore_pg::Error::Closed { server }));
                }
                Event::Message(Some(first)) => {
                    let mut next = Some(first);
                    let mut until_look = 0;
                    while let Some(message) = next {
                        let weight = weight(&message);
                        self.message(message).await?;
                        self.pace.messages += 1;
                        if self.intake.assembler.bytes_waiting() >= BATCH_BYTES {
                            self.append().await?;
                        }
                        if weight < until_look {
                            until_look -= weight;
                        } else {
                            until_look = MESSAGES_PER_LOOK;
                            self.note_heard();
                            // A stream that never pauses must keep nothing back.
                            if self.heard_at - self.acknowledged_at >= ACKNOWLEDGE_EVERY {
                                self.append().await?;
                                self.acknowledge_if_moved().await?;
                                let stopping = *stop.borrow();
                                if stopping || places.has_changed().unwrap_or(false) {
                                    break;
                                }
                            }
                        }
                        // Last: what is taken is handled.
                        next = match self.stream.try_next() {
                            Ok(next) => next,
                            Err(error) => return Err(self.lost(error).await),
                        };
                    }
                    self.append().await?;
                    // Now, and not before what has come is handled: that would wait for two pauses.
                    if self.pace.is_flood() {
                        self.stream.gather().await;
                    }
                }
            }
        }
    }

    /// A transaction that takes long to come is a sign of life too.
    fn note_heard(&mut self) {
        self.heard_at = Instant::now();
        if self.heard_noted_at.is_none_or(|at| self.heard_at - at >= NOTE_HEARD_EVERY) {
            self.heard_noted_at = Some(self.heard_at);
            let now = PgTime::now();
            self.intake.capture.set_status(|status| status.heard_at = Some(now));
        }
    }

    /// The publisher's log goes on behind what it has sent: how far only the slot's other questions
    /// tell, since its keepalives tell what it has decoded.
    fn note_place(&mut self, place: &Place) {
        let (sent, have) = (self.sent, place.standbys_have);
        let left = place.end.bytes_since(sent);
        // What is decoded before anything is sent, or waits here, is not held back: then the standbys
        // have it, or get it.
        let lacks = place.waits_for_standbys && left > 0 && have < place.end;
        self.held = match self.held {
            _ if !lacks => None,
            Some(held) if (held.0, held.1) == (sent, have) => Some(held),
            _ => Some((sent, have, Instant::now())),
        };
        let is_held = self.held.is_some_and(|(_, _, since)| since.elapsed() >= HELD_BACK_AFTER);
        let held = is_held.then(|| {
            format!(
                "the publisher gives nothing of its log after {sent} ({left} bytes by now) before the \
                 standbys that synchronized_standby_slots names have it, of which one stands at \
                 {have}: see to it, or, if it is gone for good, take it out of that setting"
            )
        });
        self.intake.capture.set_status(|status| {
            status.publisher_end = status.publisher_end.max(place.end);
            if let Some(why) = &held
                && status.waits_for.is_none()
            {
                tracing::warn!(publication = %self.intake.capture.spec.name, "{why}");
            }
            status.waits_for = held;
        });
    }

    fn note_sent(&mut self, position: Lsn) {
        self.sent = self.sent.max(position);
    }

    /// A link that was cut says nothing, and the stream of an idle database says little: the
    /// publisher is asked for a word in time, and without an answer the stream is given up.
    async fn break_silence(&mut self) -> Result<(), CaptureError> {
        let silent = self.heard_at.elapsed();
        if silent >= self.silence_max {
            let what = format!("waiting for any word from {}", self.stream.server());
            let after = self.silence_max;
            return Err(self.intake.publisher_error(farshore_pg::Error::Timeout { what, after }));
        }
        if silent >= self.silence_max / 2 {
            let durable = self.acknowledged;
            let asked = self.stream.send_status(durable.0, durable.0, durable.0, true).await;
            asked.map_err(|error| self.intake.publisher_error(error))?;
        }
        Ok(())
    }

    /// The connection is gone: what was complete before is kept. Returns what that means.
    async fn lost(&mut self, error: farshore_pg::Error) -> CaptureError {
        if let Err(failure) = self.intake.hand_over().await {
            return failure;
        }
        // "no binary output function available for type …", of a part of a value.
        if self.intake.binary && error.sqlstate() == Some("42883") {
            return self.intake.turn_to_text(&error);
        }
        if error.sqlstate() == Some("42704") {
            return slot::publication_gone(&self.intake.capture.spec, &error);
        }
        if error.server_error().is_some_and(|said| slot::is_undecodable(&said.code, &said.message))
        {
            return slot::log_undecodable(&self.intake.capture.spec, &error);
        }
        self.intake.publisher_error(error)
    }

    /// Whether the stream, as of `place`, is so far behind that batches would be better. Not before
    /// it has come to anything: it decodes from the restart point too. And a transaction that is
    /// being streamed would be sent anew.
    fn is_far_behind(&mut self, place: Option<Place>) -> bool {
        let from = self.intake.assembler.last_position();
        let (since, before) = self.traffic_from;
        let Counted { messages, bytes } = self.intake.counted.since(before);
        if let Some(traffic) = Traffic::of(from.bytes_since(since), messages, bytes) {
            self.intake.traffic = traffic;
            self.traffic_from = (from, self.intake.counted);
        }
        from > self.began_at
            && self.intake.may_leave_stream()
            && !self.intake.assembler.has_spills()
            && place.is_some_and(|place| catch_up::is_worth_a_shift(self.intake, &place, from))
    }

    async fn message(&mut self, message: StreamMessage) -> Result<(), CaptureError> {
        match message {
            StreamMessage::XLogData { wal_start, wal_end, data, .. } => {
                self.quiet_at = None;
                self.intake.message(&data, wal_start).await?;
                self.attendant.reached(wal_end.max(wal_start));
                self.note_sent(wal_end.max(wal_start));
            }
            StreamMessage::Keepalive { wal_end, reply_requested, .. } => {
                self.attendant.reached(wal_end);
                self.note_sent(wal_end);
                self.intake.capture.set_status(|status| {
                    status.publisher_end = status.publisher_end.max(wal_end);
                });
                self.quiet_at = (!self.intake.assembler.in_transaction()).then_some(wal_end);
                if reply_requested {
                    self.follow_quiet_log().await?;
                    // In the middle of a transaction the log is not quiet, and what was complete
                    // before it waits here still: nobody else would hand it over.
                    self.append().await?;
                    self.wait_durable(self.intake.assembler.last_position()).await?;
                    self.acknowledge().await?;
                } else {
                    self.follow_if_due().await?;
                }
            }
        }
        Ok(())
    }

    /// An idle database's log is followed now and then, and at once to where somebody waits for it.
    async fn follow_if_due(&mut self) -> Result<(), CaptureError> {
        let (awaited, have) = (*self.awaited.borrow(), self.intake.assembler.last_position());
        let is_awaited = have < awaited && self.quiet_at.is_some_and(|quiet| quiet >= awaited);
        if is_awaited || self.intake.handed_over_at.elapsed() >= WATERMARK_EVERY {
            self.follow_quiet_log().await?;
        }
        Ok(())
    }

    /// Everything before the last keepalive's position has been sent to us, so when nothing of it
    /// waits here the store, and with it the slot, may follow: an idle database must not hold its
    /// log back.
    async fn follow_quiet_log(&mut self) -> Result<(), CaptureError> {
        if let Some(position) = self.quiet_at.take() {
            self.intake.assembler.watermark(position);
            self.append().await?;
        }
        Ok(())
    }

    /// Hands the waiting entries to the store.
    async fn append(&mut self) -> Result<(), CaptureError> {
        let Some(batch) = self.intake.take_batch() else { return Ok(()) };
        let store = self.intake.capture.store.clone();
        self.wait_for_disk(append_owned(store, batch)).await?
    }

    async fn wait_durable(&mut self, position: Lsn) -> Result<(), CaptureError> {
        let mut durable = self.intake.durable.clone();
        let reached = async { durable.wait_for(|durable| durable.0 >= position).await.is_ok() };
        match self.wait_for_disk(reached).await? {
            true => Ok(()),
            false => Err(self.intake.store_failure()),
        }
    }

    /// A slow disk must not cost us the connection, so while it is waited for the publisher hears from
    /// us. A stop does not wait for a disk that is full; nor does the publisher, which could not shut
    /// down before we have all of its log.
    async fn wait_for_disk<T>(&mut self, work: impl Future<Output = T>) -> Result<T, CaptureError> {
        let mut work = std::pin::pin!(work);
        let mut no_room_since = None;
        loop {
            tokio::select! {
                done = &mut work => {
                    self.heard_at = Instant::now();
                    return Ok(done);
                }
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
            self.intake.check_stop()?;
            if self.acknowledged_at.elapsed() >= STATUS_EVERY {
                self.acknowledge().await?;
            }
            let Some(why) = self.intake.capture.store.status().waiting_for_room else {
                no_room_since = None;
                continue;
            };
            if no_room_since.get_or_insert_with(Instant::now).elapsed() >= WITHOUT_ROOM_MAX {
                return Err(CaptureError::Interrupted(format!(
                    "{why}. Until then the publisher's stream is left, or the publisher could not \
                     shut down"
                )));
            }
        }
    }

    async fn acknowledge_if_moved(&mut self) -> Result<(), CaptureError> {
        if *self.intake.durable.borrow() > self.acknowledged {
            self.acknowledge().await
        } else {
            Ok(())
        }
    }

    /// Tells the slot what is durable in the store, and nothing beyond.
    async fn acknowledge(&mut self) -> Result<(), CaptureError> {
        let durable = *self.intake.durable.borrow_and_update();
        fault::point("capture.before-acknowledge");
        self.stream
            .send_status(durable.0, durable.0, durable.0, false)
            .await
            .map_err(|error| self.intake.publisher_error(error))?;
        fault::point("capture.after-acknowledge");
        self.acknowledged = durable;
        self.acknowledged_at = Instant::now();
        self.intake.capture.set_status(|status| status.acknowledged = durable);
        Ok(())
    }

    async fn leave(&mut self, left: Left) -> Result<Left, CaptureError> {
        self.append().await?;
        self.wait_durable(self.intake.assembler.last_position()).await?;
        self.acknowledge().await?;
        Ok(left)
    }
}

/// How many small messages this one is as much work as.
fn weight(message: &StreamMessage) -> usize {
    match message {
        StreamMessage::XLogData { data, .. } => 1 + data.len() / LONG_MESSAGE_BYTES,
        StreamMessage::Keepalive { .. } => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Capture;
    use crate::alterations::Watch;
    use crate::assembler::Assembler;
    use crate::publication::PublicationSpec;
    use crate::reader::CaptureStatus;
    use crate::slot::Server;
    use farshore_model::{Column, Relation, ReplicaIdentity};
    use farshore_pg::{Config, Connection, Mode};
    use farshore_store::segmented::{Options, SegmentedStore};
    use farshore_testkit::postgres::{Cluster, Installation};
    use farshore_wire::pgoutput::{Begin, Commit, Context, Message, Value, encode};
    use farshore_wire::replication::{FromClient, FromServer, PrimaryKeepalive, XLogData};
    use std::sync::atomic::AtomicBool;
    use std::sync::{Arc, Mutex};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::runtime::Runtime;
    use tokio::sync::watch;

    const TABLE: u32 = 16_500;
    /// What would take no time at all.
    const SOON: Duration = Duration::from_secs(30);

    fn framed(tag: u8, body: &[u8]) -> Vec<u8> {
        let mut message = vec![tag];
        message.extend_from_slice(&(body.len() as u32 + 4).to_be_bytes());
        message.extend_from_slice(body);
        message
    }

    fn copied(message: &FromServer<'_>) -> Vec<u8> {
        let mut body = Vec::new();
        message.encode(&mut body);
        framed(b'd', &body)
    }

    fn logged(end: Lsn, data: &[u8]) -> Vec<u8> {
        let (wal_start, wal_end, send_time) = (end, end, PgTime(7));
        copied(&FromServer::XLogData(XLogData { wal_start, wal_end, send_time, data }))
    }

    fn begin(commit_lsn: Lsn) -> Vec<u8> {
        let begin = Begin { final_lsn: commit_lsn, commit_time: PgTime(7), xid: 800 };
        logged(commit_lsn, &encode::message(&Message::Begin(begin), None))
    }

    fn insert(near: Lsn) -> Vec<u8> {
        logged(near, &encode::insert(TABLE, &[Value::Text(b"v")], None))
    }

    /// A transaction that is whole and one that is not, with the question in it whether we are alive.
    fn asked_within_a_transaction(commit_lsn: Lsn, end_lsn: Lsn) -> Vec<u8> {
        let relation = Relation {
            oid: TABLE,
            schema: "public".into(),
            name: "t".into(),
            identity: ReplicaIdentity::Default,
            columns: vec![Column { key: true, name: "v".into(), type_oid: 25, type_modifier: -1 }],
            types: vec![],
        };
        let commit = Message::Commit(Commit { commit_lsn, end_lsn, commit_time: PgTime(7) });
        let next = Lsn(end_lsn.0 + 100);
        let (send_time, reply_requested) = (PgTime(7), true);
        let asks = PrimaryKeepalive { wal_end: next, send_time, reply_requested };
        [
            begin(commit_lsn),
            logged(commit_lsn, &encode::relation(&relation, None)),
            insert(commit_lsn),
            logged(end_lsn, &encode::message(&commit, None)),
            begin(next),
            insert(next),
            copied(&FromServer::PrimaryKeepalive(asks)),
        ]
        .concat()
    }

    /// The body of the client's next message, which begins with its tag if it has one.
    async fn heard(client: &mut TcpStream, has_tag: bool) -> Vec<u8> {
        let mut body = Vec::new();
        if has_tag {
            body.push(client.read_u8().await.unwrap());
        }
        let length = client.read_u32().await.unwrap() as usize - 4;
        let start = body.len();
        body.resize(start + length, 0);
        client.read_exact(&mut body[start..]).await.unwrap();
        body
    }

    /// Streams this, all of it at once, to who connects, until that has told as flushed what is before
    /// `until`.
    async fn stream_to(listener: TcpListener, stream: Vec<u8>, until: Lsn) {
        let (mut client, _) = listener.accept().await.unwrap();
        heard(&mut client, false).await;
        let greeting = [
            framed(b'R', &[0; 4]),
            framed(b'S', b"server_version\x0015.0\0"),
            framed(b'K', &[0; 8]),
            framed(b'Z', b"I"),
        ];
        client.write_all(&greeting.concat()).await.unwrap();
        assert!(heard(&mut client, true).await.starts_with(b"QSTART_REPLICATION"));
        let both = framed(b'W', &[0; 3]);
        client.write_all(&[both, stream].concat()).await.unwrap();
        loop {
            let said = heard(&mut client, true).await;
            if let FromClient::StandbyStatusUpdate(status) = FromClient::decode(&said[1..]).unwrap()
                && status.flushed >= until
            {
                return;
            }
        }
    }

    #[test]
    fn a_question_within_a_transaction_is_answered_once_what_came_before_is_durable() {
        let installation = Installation::find(15).unwrap();
        let cluster = Cluster::builder(&installation).start().unwrap();
        let spec = PublicationSpec {
            name: "p".to_owned(),
            source: Config::parse(&cluster.url("postgres")).unwrap(),
            tables: Vec::new(),
            articles: std::collections::BTreeMap::new(),
            via_partition_root: false,
            adopt_publication: None,
            adopt_slot: None,
        };
        Runtime::new().unwrap().block_on(async {
            let mut sql = spec.connect(Mode::Sql).await.unwrap();
            let server = Server::ask(&spec, &mut sql).await.unwrap();
            let folder = tempfile::tempdir().unwrap();
            let (store, _) = SegmentedStore::open(folder.path(), Options::default()).unwrap();
            let watch = Watch::new(store.clone());
            let mut attendant =
                Attendant::start(spec.clone(), (sql, server.clone()), Lsn(100), watch);
            let capture = Capture {
                spec,
                store: store.clone(),
                status: Arc::new(Mutex::new(CaptureStatus::default())),
                ready: watch::Sender::new(0),
                text_only: AtomicBool::new(true),
                stream_only: AtomicBool::new(true),
                awaited: watch::Sender::new(Lsn::ZERO),
            };
            let (stop, stopped) = watch::channel(false);
            let assembler = Assembler::new(store, Context::new(2, false), Lsn(100));
            let mut intake = Intake::new(&capture, assembler, false, true, server, stopped);

            let (commit_lsn, end_lsn) = (Lsn(1_000), Lsn(1_010));
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let port = listener.local_addr().unwrap().port();
            let stream = asked_within_a_transaction(commit_lsn, end_lsn);
            let walsender = tokio::spawn(stream_to(listener, stream, end_lsn));
            let config = format!("postgresql://x@127.0.0.1:{port}/x?sslmode=disable");
            let config = Config::parse(&config).unwrap();
            let connection = Connection::connect(&config, Mode::LogicalReplication).await.unwrap();
            let stream = connection.start_replication("p", Lsn(100), &[]).await.unwrap();
            let session = Session::new(&mut intake, stream, &mut attendant, SOON * 2);
            let answered = async {
                let answered = tokio::time::timeout(SOON, walsender).await;
                stop.send_replace(true);
                answered
            };
            let ended = async { tokio::time::timeout(SOON * 2, session.run()).await };
            let (answered, ended) = tokio::join!(answered, ended);
            answered.expect("the publisher is not answered").unwrap();
            // Without a word from the publisher, which has gone, or to the stop.
            drop(ended.expect("it goes on for ever"));
        });
    }
}
