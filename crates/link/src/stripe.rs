//! One connection of a session: a task that writes and a task that reads.

use crate::arrivals::Arrived;
use crate::frame::{Announced, FrameError, HEADER_BYTES, Header, Kind, REASON_BYTES_MAX};
use crate::handshake::cut;
use crate::heard::Heard;
use crate::outgoing::Frame;
use crate::session::LAST_WORDS;
use crate::shared::{Phase, Shared};
use crate::wire::{Wire, discard};
use crate::{LinkError, LinkOptions};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until, timeout};

/// Pieces are written together up to this many bytes: what is urgent waits for no more.
const BATCH_BYTES: usize = 256 << 10;

/// Payloads up to this size are copied: next to their header when written; out of the read buffer
/// when read, so that a small message does not keep a large buffer alive.
const COPY_BYTES_MAX: usize = 4 << 10;

const READ_BUFFER_BYTES: usize = 64 << 10;

/// No pong is owed.
const NO_PONG: u64 = u64::MAX;

/// What the tasks of one connection share.
#[derive(Clone)]
pub(crate) struct Stripe {
    session: Arc<Shared>,
    number: usize,
    options: LinkOptions,
    /// The last ping that has not been answered. Pings that pile up are answered by one pong.
    pong: Arc<AtomicU64>,
    pong_due: Arc<Notify>,
}

/// Starts the connection's tasks. They end with the session.
pub(crate) fn spawn(stripe: Stripe, wire: Wire) {
    let heard = wire.get_ref().0.get_ref().heard().clone();
    let (reading, writing) = tokio::io::split(wire);
    let counts = (stripe.session.meter.count_task(), stripe.session.meter.count_task());
    let reader = Reader { stripe: stripe.clone(), half: reading, buffer: ReadBuffer::new(), heard };
    let writer = Writer {
        stripe,
        half: writing,
        pending: Pending::default(),
        due: Vec::new(),
        held: Vec::new(),
    };
    tokio::spawn(async move {
        reader.work().await;
        drop(counts.0);
    });
    tokio::spawn(async move {
        writer.work().await;
        drop(counts.1);
    });
}

impl Stripe {
    pub(crate) fn new(session: Arc<Shared>, number: usize, options: &LinkOptions) -> Stripe {
        Stripe {
            session,
            number,
            options: options.clone(),
            pong: Arc::new(AtomicU64::new(NO_PONG)),
            pong_due: Arc::new(Notify::new()),
        }
    }

    fn io_error(&self, error: io::Error) -> LinkError {
        let (site, stripe) = (self.session.site.clone(), self.number);
        if is_gone(&error) {
            return LinkError::Vanished { site, stripe };
        }
        LinkError::Io { site, stripe, error: Arc::new(error) }
    }

    fn frame_error(&self, error: FrameError) -> LinkError {
        LinkError::Frame { site: self.session.site.clone(), stripe: self.number, error }
    }
}

/// Bytes encoded and not written.
#[derive(Default)]
struct Pending {
    chunks: VecDeque<Bytes>,
    bytes: usize,
    /// Headers and small payloads on their way into a chunk.
    small: BytesMut,
}

impl Pending {
    fn push(&mut self, frame: Frame) {
        let head = frame.header.encode(frame.payload.iter().map(|part| &part[..]));
        self.small.put_slice(&head);
        if frame.header.payload_bytes as usize <= COPY_BYTES_MAX {
            frame.payload.iter().for_each(|part| self.small.put_slice(part));
        } else {
            self.seal();
            self.bytes += frame.header.payload_bytes as usize;
            self.chunks.extend(frame.payload);
        }
    }

    /// What was pushed so far can be written.
    fn seal(&mut self) {
        if !self.small.is_empty() {
            self.bytes += self.small.len();
            self.chunks.push_back(self.small.split().freeze());
        }
    }
}

impl Buf for Pending {
    fn remaining(&self) -> usize {
        self.bytes
    }

    fn chunk(&self) -> &[u8] {
        self.chunks.front().map_or(&[], |chunk| &chunk[..])
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let filled = slices.iter_mut().zip(&self.chunks);
        filled.map(|(slice, chunk)| *slice = IoSlice::new(chunk)).count()
    }

    fn advance(&mut self, mut count: usize) {
        self.bytes -= count;
        while let Some(chunk) = self.chunks.front_mut() {
            if count < chunk.len() {
                chunk.advance(count);
                return;
            }
            count -= chunk.len();
            self.chunks.pop_front();
        }
    }
}

struct Writer {
    stripe: Stripe,
    half: WriteHalf<Wire>,
    pending: Pending,
    /// Scratch.
    due: Vec<Frame>,
    /// Pieces that wait for the pacer.
    held: Vec<Frame>,
}

impl Writer {
    async fn work(mut self) {
        let session = self.stripe.session.clone();
        let mut phase = session.phase();
        // What is written to `pending` and not to the connection survives the loop's end.
        tokio::select! {
            biased;
            () = over(&mut phase) => {}
            Err(error) = self.write() => {
                return session.fail_after_last_words(self.stripe.io_error(error)).await;
            }
        }
        let phase = phase.borrow().clone();
        let (patience, last_words) = match phase {
            Phase::Failed(LinkError::PeerFailed { .. }) => (LAST_WORDS, None),
            Phase::Failed(error) => (LAST_WORDS, Some(error.to_string())),
            Phase::Running | Phase::Done => (self.stripe.options.dead_after, None),
        };
        // Nobody is left to tell if this fails.
        let _ = timeout(patience, self.close(last_words)).await;
    }

    /// Until an error.
    async fn write(&mut self) -> io::Result<()> {
        let session = self.stripe.session.clone();
        let keepalive = self.stripe.options.keepalive;
        let (pacer, first) = (self.stripe.options.pacer.clone(), self.stripe.options.goes_first);
        let mut ping_at = Instant::now();
        let mut go_at = ping_at;
        loop {
            let now = Instant::now();
            session.take_due(&mut self.due);
            let pong = self.stripe.pong.swap(NO_PONG, Relaxed);
            if pong != NO_PONG {
                self.due.push(Frame::control(Kind::Pong, pong));
            }
            if now >= ping_at {
                self.due.push(Frame::control(Kind::Ping, micros(session.age())));
                ping_at = now + keepalive;
            }
            if self.held.is_empty() {
                let bytes_max = pacer.as_ref().map_or(BATCH_BYTES, |p| p.piece_bytes_max());
                session.take_pieces(bytes_max.min(BATCH_BYTES), &mut self.held);
                let bytes = self.held.iter().map(Frame::wire_bytes).sum();
                go_at = match &pacer {
                    Some(pacer) if bytes > 0 => now + pacer.take(bytes, first),
                    _ => now,
                };
            }
            if let Some(pacer) = pacer.as_ref().filter(|_| !self.due.is_empty()) {
                // What keeps the session alive counts and does not wait.
                pacer.take(self.due.iter().map(Frame::wire_bytes).sum(), false);
            }
            self.due.drain(..).for_each(|frame| self.pending.push(frame));
            if go_at <= now {
                self.held.drain(..).for_each(|frame| self.pending.push(frame));
            }
            self.pending.seal();
            if self.pending.has_remaining() {
                self.write_pending().await?;
                continue;
            }
            let wake_at = if self.held.is_empty() { ping_at } else { ping_at.min(go_at) };
            tokio::select! {
                () = session.work.notified(), if self.held.is_empty() => {}
                () = session.due.notified() => {}
                () = self.stripe.pong_due.notified() => {}
                () = sleep_until(wake_at) => {}
            }
        }
    }

    async fn write_pending(&mut self) -> io::Result<()> {
        let bytes = self.pending.remaining() as u64;
        self.half.write_all_buf(&mut self.pending).await?;
        self.half.flush().await?;
        self.stripe.session.meter.wire_bytes_sent.fetch_add(bytes, Relaxed);
        Ok(())
    }

    /// Finishes the frame begun, says what is due and closes.
    async fn close(&mut self, last_words: Option<String>) -> io::Result<()> {
        match last_words {
            None => {
                self.stripe.session.take_due(&mut self.due);
                self.due.drain(..).for_each(|frame| self.pending.push(frame));
            }
            Some(words) => {
                let words = Bytes::copy_from_slice(cut(&words, REASON_BYTES_MAX).as_bytes());
                let payload_bytes = words.len() as u32;
                let header = Header { kind: Kind::Close, number: 0, payload_bytes };
                self.pending.push(Frame { header, payload: vec![words] });
            }
        }
        self.pending.seal();
        self.write_pending().await?;
        self.half.shutdown().await
    }
}

struct Reader {
    stripe: Stripe,
    half: ReadHalf<Wire>,
    buffer: ReadBuffer,
    heard: Arc<Heard>,
}

/// Bytes read and not looked at.
struct ReadBuffer {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl ReadBuffer {
    fn new() -> ReadBuffer {
        ReadBuffer { bytes: vec![0; READ_BUFFER_BYTES].into(), start: 0, end: 0 }
    }

    fn filled(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Room for at least `bytes` in all, which must not be more than the buffer.
    fn room(&mut self, bytes: usize) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.bytes.len() - self.start < bytes {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }
}

impl Reader {
    async fn work(mut self) {
        let session = self.stripe.session.clone();
        let mut phase = session.phase();
        let (number, dead_after) = (self.stripe.number, self.stripe.options.dead_after);
        let heard = self.heard.clone();
        heard.note();
        let ended = tokio::select! {
            biased;
            () = over(&mut phase) => Ok(()),
            read = self.read() => read.and_then(|()| session.reader_leaves(number)),
            () = silence(&heard, dead_after) => Err(LinkError::Silent {
                site: session.site.clone(),
                stripe: number,
                after: dead_after,
            }),
        };
        match ended {
            Ok(()) => {}
            Err(gone @ LinkError::Vanished { .. }) => session.fail_after_last_words(gone).await,
            Err(error) => session.fail(error),
        }
        // What the peer still sends is read, so that what this side said last arrives.
        let is_done = matches!(&*phase.borrow(), Phase::Done);
        let patience = if is_done { dead_after } else { LAST_WORDS };
        let _ = timeout(patience, discard(&mut self.half)).await;
    }

    /// Until the peer closes the connection between two frames.
    async fn read(&mut self) -> Result<(), LinkError> {
        loop {
            if !self.fill(HEADER_BYTES).await? {
                return if self.buffer.filled().is_empty() { Ok(()) } else { Err(self.cut_off()) };
            }
            let mut head = [0; HEADER_BYTES];
            head.copy_from_slice(&self.buffer.filled()[..HEADER_BYTES]);
            self.buffer.start += HEADER_BYTES;
            let announced =
                Announced::decode(&head).map_err(|error| self.stripe.frame_error(error))?;
            let payload = self.payload(announced.header.payload_bytes as usize).await?;
            announced.check(&payload).map_err(|error| self.stripe.frame_error(error))?;
            self.handle(announced.header, payload)?;
        }
    }

    fn handle(&self, header: Header, payload: Bytes) -> Result<(), LinkError> {
        let session = &self.stripe.session;
        match header.kind {
            Kind::First { message_bytes } => {
                let message_bytes = Some(message_bytes);
                session.arrive(header.number, Arrived { message_bytes, payload })
            }
            Kind::More => session.arrive(header.number, Arrived { message_bytes: None, payload }),
            Kind::Credit => {
                session.peer_grants(header.number);
                Ok(())
            }
            Kind::Ping => {
                self.stripe.pong.store(header.number, Relaxed);
                self.stripe.pong_due.notify_one();
                Ok(())
            }
            Kind::Pong => {
                // A number that was never sent tells nothing and does no harm.
                if let Some(round_trip) = micros(session.age()).checked_sub(header.number) {
                    session.meter.round_trip_us.store(round_trip, Relaxed);
                }
                Ok(())
            }
            Kind::End => session.peer_ends(header.number),
            Kind::Ended => session.peer_confirms(),
            Kind::Close => Err(LinkError::PeerFailed {
                site: session.site.clone(),
                why: String::from_utf8_lossy(&payload).into_owned(),
            }),
        }
    }

    /// Reads until the buffer holds so many bytes; false if the peer closed before.
    async fn fill(&mut self, bytes: usize) -> Result<bool, LinkError> {
        while self.buffer.filled().len() < bytes {
            let read = self.half.read(self.buffer.room(bytes)).await;
            let count = self.count(read)?;
            if count == 0 {
                return Ok(false);
            }
            self.buffer.end += count;
        }
        Ok(true)
    }

    async fn payload(&mut self, bytes: usize) -> Result<Bytes, LinkError> {
        if bytes <= COPY_BYTES_MAX {
            if !self.fill(bytes).await? {
                return Err(self.cut_off());
            }
            let payload = Bytes::copy_from_slice(&self.buffer.filled()[..bytes]);
            self.buffer.start += bytes;
            return Ok(payload);
        }
        let mut payload = BytesMut::with_capacity(bytes);
        let buffered = self.buffer.filled().len().min(bytes);
        payload.put_slice(&self.buffer.filled()[..buffered]);
        self.buffer.start += buffered;
        while payload.len() < bytes {
            let missing = bytes - payload.len();
            let read = self.half.read_buf(&mut (&mut payload).limit(missing)).await;
            if self.count(read)? == 0 {
                return Err(self.cut_off());
            }
        }
        Ok(payload.freeze())
    }

    /// Notes that bytes came. A connection that is gone counts as closed: whether it may be is
    /// known elsewhere.
    fn count(&self, read: io::Result<usize>) -> Result<usize, LinkError> {
        let session = &self.stripe.session;
        match read {
            Ok(count) => {
                session.meter.wire_bytes_received.fetch_add(count as u64, Relaxed);
                Ok(count)
            }
            Err(error) if is_gone(&error) => Ok(0),
            Err(error) => Err(self.stripe.io_error(error)),
        }
    }

    fn cut_off(&self) -> LinkError {
        let site = self.stripe.session.site.clone();
        LinkError::Vanished { site, stripe: self.stripe.number }
    }
}

/// Until nothing has been heard for `dead_after`.
async fn silence(heard: &Heard, dead_after: Duration) {
    while let Some(left) = dead_after.checked_sub(heard.ago()) {
        // At least a tick, as clocks of timers are coarse.
        tokio::time::sleep(left.max(Duration::from_millis(1))).await;
    }
}

async fn over(phase: &mut watch::Receiver<Phase>) {
    // Fails only when the session is gone, and then it is over.
    let _ = phase.wait_for(Phase::is_over).await;
}

fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::UnexpectedEof
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
    )
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
