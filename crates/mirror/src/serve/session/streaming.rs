//! Log on its way to a standby, and what the standby says of it.

use super::{
    DEAD_AFTER, Done, KEEPALIVE_EVERY, Refusal, Session, SessionError, for_log, in_use, no_slot,
    was_promoted, write, write_with,
};
use crate::keep::blocking;
use crate::relay::message::Feedback;
use crate::serve::standbys::Place;
use crate::spool::{SlotName, SpoolError, SpoolReader};
use crate::wal::{PAGE_BYTES, Segment, Timeline};
use farshore_fault as fault;
use farshore_model::{Lsn, PgTime};
use farshore_wire::replication::{FromClient, FromServer, PrimaryKeepalive, XLogData};
use farshore_wire::server::{self, FromFrontend, type_oid};
use std::time::Duration;
use tokio::task::coop::consume_budget;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep_until, timeout};

/// Most log in one XLogData, as a walsender has it (`MAX_SEND_SIZE`).
const SEND_BYTES_MAX: usize = 128 << 10;

/// Log that came right after some was sent waits so long for more to go with it, where no commit
/// waits for standbys: each piece costs the standby a flush of its own, on a disk that it often
/// shares with the spool that commits do wait for. For as long, nobody is woken by what the standby
/// says of a piece: that it has written it, flushed it and replayed it.
const GATHERING: Duration = Duration::from_millis(5);

impl Session {
    pub(super) async fn stream(
        &mut self,
        slot: Option<String>,
        start: Lsn,
        timeline: Timeline,
    ) -> Result<Done, SessionError> {
        let positions = *self.spool.positions().borrow();
        let slot = match slot {
            None => None,
            Some(name) => match SlotName::new(&name).filter(|slot| self.spool.slot(slot).is_some())
            {
                Some(slot) => Some(slot),
                None => return Ok(no_slot(&name)),
            },
        };
        if let Some(name) = slot.as_ref().filter(|slot| self.spool.is_slot_lost(slot)) {
            let message = format!("can no longer get log by replication slot \"{name}\"");
            return Ok(Done::Refused(Refusal::new("55000", message).hint(
                "It kept more than drop_behind of the mirror. Seed the standby anew, which makes \
                 the slot anew.",
            )));
        }
        let spool = self.spool.clone();
        let history = blocking(move || spool.history(positions.timeline)).await?;
        let left = history.left(positions.timeline, timeline);
        let mut filed_on = timeline;
        let size = self.spool.identity().segment;
        let first = history.begins(positions.timeline, timeline).map(|begins| size.number(begins));
        // The segment that a timeline begins in is its own as a whole. What is before that would be
        // filed by its names, and is another timeline's.
        if first.is_some_and(|first| size.number(start) < first) {
            return Ok(Done::Refused(self.no_segment(timeline, start)));
        }
        if timeline != positions.timeline {
            let Some((left_at, _)) = left.filter(|(left_at, _)| start <= *left_at) else {
                let message = format!(
                    "requested starting point {start} on timeline {timeline} is not in this \
                     server's history"
                );
                return Ok(Done::Refused(Refusal::new("XX000", message)));
            };
            if start == left_at {
                self.end_of_timeline(left);
                server::command_complete(&mut self.out, "START_REPLICATION");
                return Ok(Done::Answered);
            }
            // A spool may have begun on the timeline after it, before the place where that begins.
            if left_at > positions.durable {
                let message = format!(
                    "timeline {timeline} ends at {left_at}, ahead of the WAL flush position of this \
                     server {}",
                    positions.durable
                );
                return Ok(Done::Refused(Refusal::new("XX000", message)));
            }
            // Then the segment has the later timeline's name alone, as a server may have it.
            if size.number(start) == size.number(left_at) {
                filed_on = positions.timeline;
            }
        } else if start > positions.durable {
            let message = format!(
                "requested starting point {start} is ahead of the WAL flush position of this \
                 server {}",
                positions.durable
            );
            return Ok(Done::Refused(Refusal::new("XX000", message).hint(
                "The standby has more log than the mirror: it comes from another copy, or the \
                 mirror is behind. It tries again by itself.",
            )));
        }
        let name = self.application_name.clone();
        // It would have that segment come again and again.
        if let Some(closed) = self.spool.promoted()
            && size.number(start) >= size.number(closed.end)
            && self.context.standbys.has_all(&name, self.peer, slot.as_ref())
        {
            return Ok(was_promoted(&closed));
        }
        let entered = self.context.standbys.enter(&name, self.peer, slot.clone(), start);
        let Some(place) = entered else {
            return Ok(in_use(slot.as_ref().map_or("", SlotName::as_str)));
        };
        // From here on what is there is kept. A slot that stood where the log is gone would keep all
        // that comes, for a client that can use none of it.
        if let Some(slot) = slot.clone()
            && self.holds(start).await?
        {
            self.advance(slot, start).await?;
        }
        tracing::info!(mirror = %self.context.mirror, standby = %for_log(&name), %start, %timeline, "streams");
        server::copy_both_response(&mut self.out);
        write(&mut self.writer, &mut self.out).await?;
        let reader_spool = self.spool.clone();
        let reader = blocking(move || SpoolReader::new(reader_spool, filed_on)).await?;
        let kept_from = self.spool.identity().segment.floor(start);
        let reader = Some(reader);
        let stream = Stream { place, slot, kept_from, timeline, sent: start, reader };
        let done = self.flow(stream).await?;
        self.messages.listen()?;
        Ok(done)
    }

    /// Whether the log from there on has not been forgotten.
    async fn holds(&mut self, start: Lsn) -> Result<bool, SessionError> {
        let spool = self.spool.clone();
        let segments = blocking(move || spool.segments()).await?;
        let number = self.spool.identity().segment.number(start);
        // There is none before anything has come.
        Ok(segments.first().is_none_or(|oldest| oldest.number <= number))
    }

    fn no_segment(&self, timeline: Timeline, position: Lsn) -> Refusal {
        let size = self.spool.identity().segment;
        let segment = Segment { timeline, number: size.number(position) };
        let message =
            format!("requested WAL segment {} has already been removed", segment.file_name(size));
        Refusal::new("58P01", message)
            .hint("Make the standby anew, or let it restore the segment from an archive.")
    }

    /// The row that ends a timeline's stream.
    fn end_of_timeline(&mut self, left: Option<(Lsn, Timeline)>) {
        let Some((left_at, next)) = left else { return };
        let columns = [("next_tli", type_oid::INT8), ("next_tli_startpos", type_oid::TEXT)];
        let (next, left_at) = (next.to_string(), left_at.to_string());
        self.row(&columns, &[Some(&next), Some(&left_at)], "START_STREAMING");
    }

    async fn flow(&mut self, mut stream: Stream) -> Result<Done, SessionError> {
        let mut positions = self.spool.positions();
        let mut tick = tokio::time::interval(KEEPALIVE_EVERY);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut heard = Instant::now();
        let mut gathers_until = heard;
        loop {
            let now = *positions.borrow_and_update();
            // Where this timeline ends, once there is another.
            let mut left = None;
            let mut until = now.durable;
            if now.timeline != stream.timeline {
                let spool = self.spool.clone();
                let history = blocking(move || spool.history(now.timeline)).await?;
                left = history.left(now.timeline, stream.timeline);
                let Some((left_at, _)) = left else {
                    let message =
                        format!("timeline {} is not in this server's history", stream.timeline);
                    return Ok(Done::Refused(Refusal::new("XX000", message)));
                };
                until = left_at;
            }
            let is_waited_for = self.context.standbys.are_waited_for();
            if is_waited_for {
                self.messages.listen()?;
            }
            let gathers = left.is_none()
                && until.bytes_since(stream.sent) < SEND_BYTES_MAX as u64
                && !is_waited_for
                && Instant::now() < gathers_until;
            if stream.sent < until && !gathers && !is_waited_for {
                // What commits do wait for goes first: who tells the principal is on this thread too.
                yield_now().await;
            }
            while stream.sent < until && !gathers {
                gathers_until = Instant::now() + GATHERING;
                if !is_waited_for {
                    self.messages.defer();
                }
                match self.send(&mut stream, until, now.durable).await? {
                    Done::Answered => {}
                    refused @ Done::Refused(_) => return Ok(refused),
                }
                if self.hear_what_is_here(&mut stream, &mut heard).await? {
                    return Ok(self.finish(None));
                }
            }
            if left.is_some() || Instant::now() >= gathers_until {
                self.messages.listen()?;
            }
            // The one that is promoted had everything before; any other that streams on would be
            // without news for ever, and would not say so.
            if let Some(closed) = self.spool.promoted()
                && left.is_none()
                && stream.sent >= until
                && stream.place.has(closed.end)
            {
                let (name, slot) = (&self.application_name, stream.slot.as_ref());
                self.context.standbys.note_has_all(name, self.peer, slot);
                return Ok(was_promoted(&closed));
            }
            if left.is_some() {
                server::copy_done(&mut self.out);
                write(&mut self.writer, &mut self.out).await?;
                loop {
                    let next = timeout(DEAD_AFTER, self.messages.next()).await;
                    let Some(message) = next.map_err(|_| SessionError::Silent)?? else {
                        return Err(SessionError::OutOfPlace("the end of its connection"));
                    };
                    if self.hear(&mut stream, message).await? {
                        self.end_of_timeline(left);
                        server::command_complete(&mut self.out, "START_REPLICATION");
                        return Ok(Done::Answered);
                    }
                }
            }
            tokio::select! {
                // Its sender is in the spool, which this session holds.
                _ = positions.changed() => {}
                () = sleep_until(gathers_until),
                    if (gathers && stream.sent < until) || self.messages.is_deferred() => {}
                message = self.messages.next() => {
                    let Some(message) = message? else {
                        return Err(SessionError::OutOfPlace("the end of its connection"));
                    };
                    heard = Instant::now();
                    if self.hear(&mut stream, message).await? {
                        return Ok(self.finish(None));
                    }
                }
                _ = tick.tick() => {
                    // This thread may have been at a disk for long.
                    if self.hear_what_is_here(&mut stream, &mut heard).await? {
                        return Ok(self.finish(None));
                    }
                    if heard.elapsed() > DEAD_AFTER {
                        return Err(SessionError::Silent);
                    }
                    self.keepalive(stream.sent, true).await?;
                }
            }
        }
    }

    /// The client has ended the stream.
    fn finish(&mut self, left: Option<(Lsn, Timeline)>) -> Done {
        server::copy_done(&mut self.out);
        if left.is_some() {
            self.end_of_timeline(left);
        } else {
            server::command_complete(&mut self.out, "START_STREAMING");
        }
        server::command_complete(&mut self.out, "START_REPLICATION");
        Done::Answered
    }

    /// A slot keeps log from there on.
    async fn advance(&mut self, slot: SlotName, kept_from: Lsn) -> Result<(), SessionError> {
        let spool = self.spool.clone();
        let advance = move || {
            spool.advance_slot(&slot, kept_from);
            Ok(())
        };
        Ok(blocking(advance).await?)
    }

    async fn keepalive(&mut self, wal_end: Lsn, reply_requested: bool) -> Result<(), SessionError> {
        let mut data = Vec::with_capacity(18);
        FromServer::PrimaryKeepalive(PrimaryKeepalive {
            wal_end,
            send_time: PgTime::now(),
            reply_requested,
        })
        .encode(&mut data);
        server::copy_data(&mut self.out, &data)?;
        write(&mut self.writer, &mut self.out).await
    }

    /// Sends one XLogData, up to `until` at most.
    async fn send(
        &mut self,
        stream: &mut Stream,
        until: Lsn,
        wal_end: Lsn,
    ) -> Result<Done, SessionError> {
        let from = stream.sent;
        let mut end = until.min(Lsn(from.0 + SEND_BYTES_MAX as u64));
        if end < until {
            // A record may be split only where a page is.
            end = Lsn(end.0 - end.0 % PAGE_BYTES);
        }
        let bytes = end.bytes_since(from) as usize;
        let Some(mut reader) = stream.reader.take() else { return Err(SpoolError::Closing.into()) };
        // What was written a moment ago is in memory: no thread is to be asked for it. Who is
        // further behind may need the disk, and leaves the others of this thread their turn.
        let is_there = if end == until && reader.read_if_cached(from, end, bytes) {
            Ok(true)
        } else {
            let read;
            (reader, read) = blocking(move || {
                let read = reader.read(from, end, bytes);
                Ok((reader, read))
            })
            .await?;
            read
        };
        let reader = stream.reader.insert(reader);
        if !is_there? {
            return Ok(Done::Refused(self.no_segment(stream.timeline, from)));
        }
        let log = reader.log();
        let mut head = Vec::with_capacity(25);
        let piece = XLogData { wal_start: from, wal_end, send_time: PgTime::now(), data: &[] };
        FromServer::XLogData(piece).encode(&mut head);
        server::copy_data_head(&mut self.out, &head, log.len())?;
        fault::point("mirror.before-serve");
        write_with(&mut self.writer, &mut self.out, log).await?;
        stream.sent = Lsn(from.0 + log.len() as u64);
        stream.place.sent(stream.sent);
        Ok(Done::Answered)
    }

    /// Whether the client ends the stream by what it has said so far.
    async fn hear_what_is_here(
        &mut self,
        stream: &mut Stream,
        heard: &mut Instant,
    ) -> Result<bool, SessionError> {
        while let Some(message) = self.messages.here()? {
            *heard = Instant::now();
            if self.hear(stream, message).await? {
                return Ok(true);
            }
            // Others of this thread have their turn, however much a client says.
            consume_budget().await;
        }
        Ok(false)
    }

    /// Whether the client ends the stream.
    async fn hear(
        &mut self,
        stream: &mut Stream,
        message: FromFrontend,
    ) -> Result<bool, SessionError> {
        let data = match message {
            FromFrontend::CopyData(data) => data,
            FromFrontend::CopyDone => return Ok(true),
            FromFrontend::CopyFail(_) => return Err(SessionError::OutOfPlace("CopyFail")),
            FromFrontend::Query(_) => return Err(SessionError::OutOfPlace("a query")),
            FromFrontend::Terminate => return Err(SessionError::OutOfPlace("its goodbye")),
        };
        match FromClient::decode(&data)? {
            FromClient::StandbyStatusUpdate(status) => {
                stream.place.replied(status.written, status.flushed, status.applied);
                let kept_from = self.spool.identity().segment.floor(status.flushed);
                if let Some(slot) = stream.slot.clone().filter(|_| kept_from > stream.kept_from) {
                    self.advance(slot, kept_from).await?;
                    stream.kept_from = kept_from;
                }
                if status.reply_requested {
                    self.keepalive(stream.sent, false).await?;
                }
            }
            FromClient::HotStandbyFeedback(feedback) => stream.place.needs(Feedback {
                xmin: feedback.xmin,
                xmin_epoch: feedback.xmin_epoch,
                catalog_xmin: feedback.catalog_xmin,
                catalog_xmin_epoch: feedback.catalog_xmin_epoch,
            }),
        }
        Ok(false)
    }
}

struct Stream {
    place: Place,
    slot: Option<SlotName>,
    /// Where the segment begins that the slot was told to keep last: replies come several times
    /// per commit, and most change nothing.
    kept_from: Lsn,
    timeline: Timeline,
    /// Everything before this was sent.
    sent: Lsn,
    /// Absent while it reads.
    reader: Option<SpoolReader>,
}
