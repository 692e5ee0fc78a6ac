//! What a session's halves and the tasks of its connections share.

use crate::LinkError;
use crate::arrivals::{Arrivals, Arrived, News};
use crate::meter::Meter;
use crate::outgoing::{Frame, Outgoing, Piece, Wait};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, watch};

/// How long a peer's last words on one connection may come after the end of another.
const OTHERS_MAY_KNOW: Duration = Duration::from_millis(250);

/// How far a session is. It leaves `Running` once.
#[derive(Clone, Debug)]
pub(crate) enum Phase {
    Running,
    /// Both directions have ended in order; what is due is sent, then connections are closed.
    Done,
    Failed(LinkError),
}

impl Phase {
    pub(crate) fn is_over(&self) -> bool {
        !matches!(self, Phase::Running)
    }
}

/// See the module. The locks are held for moments and never both at once.
pub(crate) struct Shared {
    /// The peer.
    pub(crate) site: String,
    pub(crate) meter: Arc<Meter>,
    phase: watch::Sender<Phase>,
    outgoing: Mutex<Outgoing>,
    arrivals: Mutex<Arrivals>,
    /// Pieces wait: wakes the connection that has been idle for the least time, or the next to be.
    /// So little traffic stays on one connection, which knows its line, and what comes together is
    /// read together; much finds that one busy, and goes on to the next.
    pub(crate) work: Notify,
    /// Something beside the pieces is due: likewise.
    pub(crate) due: Notify,
    /// Pieces were taken, credit came or the peer confirmed our end: wakes the sending half.
    pub(crate) room: Notify,
    /// The next piece or the end came: wakes the receiving half.
    pub(crate) arrived: Notify,
    /// Connections that are being read.
    readers: AtomicUsize,
    started: Instant,
}

impl Shared {
    pub(crate) fn new(
        site: String,
        stripes: usize,
        outgoing: Outgoing,
        arrivals: Arrivals,
        meter: Arc<Meter>,
    ) -> Shared {
        Shared {
            site,
            meter,
            phase: watch::Sender::new(Phase::Running),
            outgoing: Mutex::new(outgoing),
            arrivals: Mutex::new(arrivals),
            work: Notify::new(),
            due: Notify::new(),
            room: Notify::new(),
            arrived: Notify::new(),
            readers: AtomicUsize::new(stripes),
            started: Instant::now(),
        }
    }

    fn outgoing(&self) -> MutexGuard<'_, Outgoing> {
        self.outgoing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arrivals(&self) -> MutexGuard<'_, Arrivals> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn phase(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Time since the session began.
    pub(crate) fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// Ends the session with an error; the first one counts.
    pub(crate) fn fail(&self, error: LinkError) {
        self.leave_running(Phase::Failed(error));
    }

    /// Ends the session because a connection is gone, unless the peer says on another why it is.
    pub(crate) async fn fail_after_last_words(&self, error: LinkError) {
        let mut phase = self.phase();
        let _ = tokio::time::timeout(OTHERS_MAY_KNOW, phase.wait_for(Phase::is_over)).await;
        self.fail(error);
    }

    /// Ends the session because the peer broke a rule.
    pub(crate) fn broken(&self, what: String) -> LinkError {
        let error = LinkError::Protocol { site: self.site.clone(), what };
        self.fail(error.clone());
        error
    }

    fn leave_running(&self, next: Phase) {
        self.phase.send_if_modified(|phase| {
            let is_running = !phase.is_over();
            if is_running {
                *phase = next;
            }
            is_running
        });
    }

    /// The error that the session ended with, if it did.
    pub(crate) fn check(&self) -> Result<(), LinkError> {
        match &*self.phase.borrow() {
            Phase::Failed(error) => Err(error.clone()),
            Phase::Running | Phase::Done => Ok(()),
        }
    }

    fn done_if_both_ended(&self) {
        if self.arrivals().is_complete() && self.outgoing().is_confirmed() {
            self.leave_running(Phase::Done);
        }
    }

    // ---- the sending half

    /// Hands pieces to the connections, as credit and room allow.
    pub(crate) fn offer(&self, pieces: &mut VecDeque<Piece>) -> Result<(), Wait> {
        if pieces.is_empty() {
            return Ok(());
        }
        let mut outgoing = self.outgoing();
        let result = outgoing.offer(pieces);
        self.meter.waiting_bytes.store(outgoing.waiting_bytes() as u64, Ordering::Relaxed);
        drop(outgoing);
        self.work.notify_last();
        result
    }

    pub(crate) fn end(&self) {
        self.outgoing().end();
        self.due.notify_last();
    }

    pub(crate) fn is_confirmed(&self) -> bool {
        self.outgoing().is_confirmed()
    }

    // ---- the receiving half

    /// The next piece in order.
    pub(crate) fn take(&self) -> Option<Arrived> {
        let mut arrivals = self.arrivals();
        let (piece, grant) = arrivals.take()?;
        self.meter.hold(arrivals.held_bytes());
        drop(arrivals);
        if let Some(total) = grant {
            self.outgoing().owe_grant(total);
            self.due.notify_last();
        }
        Some(piece)
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.arrivals().is_at_end()
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.arrivals().is_complete()
    }

    // ---- tasks that write

    pub(crate) fn take_due(&self, into: &mut Vec<Frame>) {
        self.outgoing().take_due(into);
    }

    /// One piece, and more within `bytes_max`.
    pub(crate) fn take_pieces(&self, bytes_max: usize, into: &mut Vec<Frame>) {
        let mut outgoing = self.outgoing();
        outgoing.take_pieces(bytes_max, into);
        self.meter.waiting_bytes.store(outgoing.waiting_bytes() as u64, Ordering::Relaxed);
        let has_more = outgoing.has_pieces();
        drop(outgoing);
        if has_more {
            self.work.notify_last();
        }
        if !into.is_empty() {
            self.room.notify_one();
        }
    }

    // ---- tasks that read

    pub(crate) fn arrive(&self, number: u64, piece: Arrived) -> Result<(), LinkError> {
        let mut arrivals = self.arrivals();
        let news = arrivals.insert(number, piece);
        self.meter.hold(arrivals.held_bytes());
        drop(arrivals);
        self.tell(news)
    }

    pub(crate) fn peer_ends(&self, end: u64) -> Result<(), LinkError> {
        let news = self.arrivals().set_end(end);
        self.tell(news)
    }

    fn tell(&self, news: Result<News, String>) -> Result<(), LinkError> {
        let news = news.map_err(|what| self.broken(what))?;
        if news.is_next {
            self.arrived.notify_one();
        }
        if news.is_complete {
            self.outgoing().owe_ended();
            self.due.notify_last();
            self.done_if_both_ended();
        }
        Ok(())
    }

    pub(crate) fn peer_grants(&self, total: u64) {
        self.outgoing().grant(total);
        self.room.notify_one();
    }

    pub(crate) fn peer_confirms(&self) -> Result<(), LinkError> {
        if !self.outgoing().confirm() {
            return Err(self.broken("it confirmed an end that was not sent".to_owned()));
        }
        self.room.notify_one();
        self.done_if_both_ended();
        Ok(())
    }

    /// A connection was closed by the peer. In order only if both sides have said all: a peer
    /// closes when it has our confirmation, and what it sent last may still come on another.
    pub(crate) fn reader_leaves(&self, stripe: usize) -> Result<(), LinkError> {
        let was_last = self.readers.fetch_sub(1, Ordering::Relaxed) == 1;
        let may_close = self.arrivals().is_complete() && self.outgoing().is_ended();
        if may_close && !was_last {
            return Ok(());
        }
        Err(LinkError::Vanished { site: self.site.clone(), stripe })
    }
}
