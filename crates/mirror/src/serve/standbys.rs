//! Who streams from a spool, and how far each is.

use crate::relay::message::Feedback;
use crate::spool::SlotName;
use farshore_model::Lsn;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// A standby that is refused asks again after 5 s (`wal_retrieve_retry_interval`): who has not for so
/// long has given up, or been helped.
const REFUSED_LATELY: Duration = Duration::from_secs(15);

/// Who had all of a closed spool is given it again after so long.
const DONE_FOR: Duration = Duration::from_secs(60);
/// As many of them are remembered.
const DONE_MAX: usize = 1_024;

/// What a standby needed stays needed for so long after it left: it, or the node that it streams from,
/// may just start again, and rows that its queries read would be removed meanwhile.
const NEEDED_FOR: Duration = Duration::from_secs(60);

/// What all standbys together let be told to the principal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// The one that is furthest behind of those connected that replay has replayed everything
    /// before this; if none is connected, what was so when the last one left.
    pub applied: Lsn,
    /// The oldest rows that queries on any of them need, or on one that left a moment ago; `None` if
    /// that is not known yet: what the principal was told earlier stands.
    pub feedback: Option<Feedback>,
}

/// One standby, as `status` shows it.
#[derive(Clone, Debug)]
pub struct StandbyReport {
    /// As it calls itself.
    pub application_name: String,
    /// Where it connects from.
    pub peer: SocketAddr,
    /// The slot that it uses.
    pub slot: Option<String>,
    /// Everything before this was sent to it.
    pub sent: Lsn,
    /// It has written everything before this.
    pub written: Lsn,
    /// Everything before this survives its crash.
    pub flushed: Lsn,
    /// It has replayed everything before this.
    pub applied: Lsn,
}

#[derive(Debug)]
struct Standby {
    report: StandbyReport,
    slot: Option<SlotName>,
    /// Once it has said so.
    feedback: Option<Feedback>,
}

impl Standby {
    /// It has everything before this.
    fn kept_from(&self) -> Lsn {
        // pg_receivewal says nothing of what it has flushed unless it is asked to.
        let report = &self.report;
        if report.flushed > Lsn::ZERO { report.flushed } else { report.written }
    }

    fn who(&self) -> (String, IpAddr) {
        (self.report.application_name.clone(), self.report.peer.ip())
    }
}

/// A standby that left.
#[derive(Debug)]
struct Left {
    /// What it calls itself, and where it comes from.
    who: Option<(String, IpAddr)>,
    /// Not known of those that were there before this node started.
    feedback: Option<Feedback>,
    until: Instant,
}

/// The standbys that stream now.
#[derive(Debug, Default)]
pub struct Standbys {
    streaming: Mutex<Streaming>,
    seen: watch::Sender<Seen>,
    are_waited_for: AtomicBool,
}

#[derive(Debug)]
struct Streaming {
    next: u64,
    standbys: BTreeMap<u64, Standby>,
    /// Those whose needs still count.
    left: Vec<Left>,
    /// The last one that cannot stream until somebody helps it, in words, and when it asked.
    refused: Option<(Instant, String)>,
    /// Of a spool that was closed: those that had all of it, and when they last were told so.
    done: BTreeMap<(String, IpAddr, Option<SlotName>), Instant>,
}

impl Default for Streaming {
    fn default() -> Streaming {
        let before = Left { who: None, feedback: None, until: Instant::now() + NEEDED_FOR };
        let (standbys, done) = (BTreeMap::new(), BTreeMap::new());
        Streaming { next: 0, standbys, left: vec![before], refused: None, done }
    }
}

impl Streaming {
    /// `is_told`: the principal was told something since this node started.
    fn feedback(&self, is_told: bool) -> Option<Feedback> {
        let here = self.standbys.values().map(|standby| standby.feedback);
        let left = self.left.iter().map(|left| left.feedback);
        let said: Vec<_> = here.chain(left).flatten().collect();
        let may_come_back = self.left.iter().any(|left| left.feedback.is_none());
        let oldest = oldest(said.into_iter());
        // That nothing is needed is not known while somebody may come back who has not said so.
        (is_told || !may_come_back || oldest != Feedback::default()).then_some(oldest)
    }
}

impl Standbys {
    /// Whether commits wait until they have replayed: then log is sent to them piece by piece, as
    /// it becomes durable.
    pub fn are_waited_for(&self) -> bool {
        self.are_waited_for.load(Relaxed)
    }

    /// Says so.
    pub fn set_waited_for(&self, are_waited_for: bool) {
        self.are_waited_for.store(are_waited_for, Relaxed);
    }

    /// What they let be told; changes as they go on. Whoever waits is woken when a standby comes or
    /// goes, when one says for the first time what it has replayed, when one needs other rows, and
    /// when more is replayed and commits wait for that. Else that more is replayed is there to be
    /// seen, and wakes nobody.
    pub fn seen(&self) -> watch::Receiver<Seen> {
        self.seen.subscribe()
    }

    /// Who streams now.
    pub fn reports(&self) -> Vec<StandbyReport> {
        self.streaming().standbys.values().map(|standby| standby.report.clone()).collect()
    }

    /// Log from here on is needed by somebody who streams; `None` if nobody does.
    pub fn kept_for_connected(&self) -> Option<Lsn> {
        self.streaming().standbys.values().map(Standby::kept_from).min()
    }

    /// Whether somebody streams by this slot.
    pub fn is_in_use(&self, slot: &SlotName) -> bool {
        self.streaming().standbys.values().any(|standby| standby.slot.as_ref() == Some(slot))
    }

    /// Whether anybody streams that replays: neither pg_receivewal does, nor an asynchronous mirror.
    pub fn does_any_replay(&self) -> bool {
        self.streaming().standbys.values().any(|standby| standby.report.applied > Lsn::ZERO)
    }

    /// Notes that a standby asked in vain: in the words that it was answered.
    pub(crate) fn refuse(&self, application_name: &str, peer: SocketAddr, why: &str) {
        let said =
            format!("standby \"{application_name}\" ({}) asks for log in vain: {why}", peer.ip());
        self.streaming().refused = Some((Instant::now(), said));
    }

    /// Notes that a client has everything of a spool that takes nothing in any more.
    pub(crate) fn note_has_all(&self, name: &str, peer: SocketAddr, slot: Option<&SlotName>) {
        let mut streaming = self.streaming();
        if streaming.done.len() >= DONE_MAX {
            streaming.done.clear();
        }
        streaming.done.insert((name.to_owned(), peer.ip(), slot.cloned()), Instant::now());
    }

    /// Whether that was noted a moment ago. Later it may need the log once more: its disk may have
    /// lost some.
    pub(crate) fn has_all(&self, name: &str, peer: SocketAddr, slot: Option<&SlotName>) -> bool {
        let who = (name.to_owned(), peer.ip(), slot.cloned());
        self.streaming().done.get(&who).is_some_and(|at| at.elapsed() < DONE_FOR)
    }

    /// A standby that asked in vain lately, and will again.
    pub fn refused_lately(&self) -> Option<String> {
        let streaming = self.streaming();
        let (at, said) = streaming.refused.as_ref()?;
        (at.elapsed() < REFUSED_LATELY).then(|| said.clone())
    }

    fn streaming(&self) -> MutexGuard<'_, Streaming> {
        self.streaming.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Counts a standby in; `None` if its slot is in use.
    pub(crate) fn enter(
        self: &Arc<Standbys>,
        application_name: &str,
        peer: SocketAddr,
        slot: Option<SlotName>,
        start: Lsn,
    ) -> Option<Place> {
        let mut streaming = self.streaming();
        if slot.is_some() && streaming.standbys.values().any(|standby| standby.slot == slot) {
            return None;
        }
        let number = streaming.next;
        streaming.next += 1;
        let report = StandbyReport {
            application_name: application_name.to_owned(),
            peer,
            slot: slot.as_ref().map(SlotName::to_string),
            sent: start,
            written: start,
            flushed: Lsn::ZERO,
            applied: Lsn::ZERO,
        };
        streaming.standbys.insert(number, Standby { report, slot, feedback: None });
        self.look_again(&streaming, true);
        Some(Place { standbys: self.clone(), number })
    }

    /// What standbys needed that left long ago counts no more; when that is to be looked at next.
    pub(crate) fn let_go(&self, now: Instant) -> Option<Instant> {
        let mut streaming = self.streaming();
        let before = streaming.left.len();
        streaming.left.retain(|left| left.until > now);
        if streaming.left.len() < before {
            self.look_again(&streaming, false);
        }
        streaming.left.iter().map(|left| left.until).min()
    }

    fn look_again(&self, streaming: &Streaming, wakes: bool) {
        let replaying = streaming.standbys.values().map(|standby| standby.report.applied);
        let applied = replaying.filter(|applied| *applied > Lsn::ZERO).min();
        self.seen.send_if_modified(|seen| {
            let feedback = streaming.feedback(seen.feedback.is_some());
            let now = Seen { applied: applied.unwrap_or(seen.applied), feedback };
            let is_waited_for = self.are_waited_for() && now.applied != seen.applied;
            let is_needed = now.feedback != seen.feedback;
            *seen = now;
            wakes || is_waited_for || is_needed
        });
    }
}

/// The oldest of what is needed, each kind by itself. Transaction ids wrap around; their epochs
/// tell.
fn oldest(all: impl Iterator<Item = Feedback>) -> Feedback {
    let (mut xmin, mut catalog) = (None::<(u32, u32)>, None::<(u32, u32)>);
    let older = |known: Option<(u32, u32)>, epoch: u32, xid: u32| match known {
        _ if xid == 0 => known,
        Some(known) => Some(known.min((epoch, xid))),
        None => Some((epoch, xid)),
    };
    for one in all {
        xmin = older(xmin, one.xmin_epoch, one.xmin);
        catalog = older(catalog, one.catalog_xmin_epoch, one.catalog_xmin);
    }
    let (xmin_epoch, xmin) = xmin.unwrap_or_default();
    let (catalog_xmin_epoch, catalog_xmin) = catalog.unwrap_or_default();
    Feedback { xmin, xmin_epoch, catalog_xmin, catalog_xmin_epoch }
}

/// A standby's entry; dropping it counts it out.
#[derive(Debug)]
pub(crate) struct Place {
    standbys: Arc<Standbys>,
    number: u64,
}

impl Place {
    fn change(&self, change: impl FnOnce(&mut Standby)) {
        let mut streaming = self.standbys.streaming();
        let mut begins_to_replay = false;
        if let Some(standby) = streaming.standbys.get_mut(&self.number) {
            let before = standby.report.applied;
            change(standby);
            begins_to_replay = before == Lsn::ZERO && standby.report.applied > Lsn::ZERO;
        }
        self.standbys.look_again(&streaming, begins_to_replay);
    }

    /// Whether it has said that it has everything before `end`.
    pub fn has(&self, end: Lsn) -> bool {
        let streaming = self.standbys.streaming();
        let standby = streaming.standbys.get(&self.number);
        standby.is_some_and(|standby| standby.kept_from() >= end)
    }

    pub fn sent(&self, sent: Lsn) {
        self.change(|standby| standby.report.sent = sent);
    }

    pub fn replied(&self, written: Lsn, flushed: Lsn, applied: Lsn) {
        self.change(|standby| {
            standby.report.written = written;
            standby.report.flushed = flushed;
            standby.report.applied = applied;
        });
    }

    pub fn needs(&self, feedback: Feedback) {
        let mut streaming = self.standbys.streaming();
        let Streaming { standbys, left, .. } = &mut *streaming;
        if let Some(standby) = standbys.get_mut(&self.number) {
            standby.feedback = Some(feedback);
            let who = standby.who();
            // It is back.
            left.retain(|left| left.who.as_ref() != Some(&who));
        }
        self.standbys.look_again(&streaming, false);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut streaming = self.standbys.streaming();
        if let Some(standby) = streaming.standbys.remove(&self.number)
            && let Some(feedback) = standby.feedback.filter(|needed| *needed != Feedback::default())
        {
            let (who, until) = (Some(standby.who()), Instant::now() + NEEDED_FOR);
            streaming.left.push(Left { who, feedback: Some(feedback), until });
        }
        self.standbys.look_again(&streaming, true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_furthest_behind_counts() {
        let standbys = Arc::new(Standbys::default());
        let peer: SocketAddr = "127.0.0.1:1".parse().unwrap();
        let slot = SlotName::new("a");
        let first = standbys.enter("one", peer, slot.clone(), Lsn(5)).unwrap();
        assert!(standbys.enter("thief", peer, slot.clone(), Lsn(5)).is_none());
        assert!(standbys.is_in_use(slot.as_ref().unwrap()));
        let second = standbys.enter("two", peer, None, Lsn(5)).unwrap();
        let receiver = standbys.enter("pg_receivewal", peer, None, Lsn(7)).unwrap();
        first.replied(Lsn(30), Lsn(20), Lsn(10));
        assert_eq!(standbys.seen().borrow().applied, Lsn(10));
        assert!(standbys.does_any_replay());
        second.replied(Lsn(30), Lsn(9), Lsn(8));
        receiver.replied(Lsn(8), Lsn::ZERO, Lsn::ZERO);
        assert_eq!(standbys.seen().borrow().applied, Lsn(8));
        assert_eq!(standbys.kept_for_connected(), Some(Lsn(8)));
        let feedback = |xmin, xmin_epoch| Feedback { xmin, xmin_epoch, ..Feedback::default() };
        first.needs(feedback(900, 0));
        second.needs(feedback(3, 1));
        assert_eq!(standbys.seen().borrow().feedback, Some(feedback(900, 0)));
        drop(first);
        assert!(!standbys.is_in_use(slot.as_ref().unwrap()));
        drop(second);
        assert!(!standbys.does_any_replay());
        drop(receiver);
        assert_eq!(standbys.seen().borrow().applied, Lsn(8));
        assert!(standbys.reports().is_empty());
    }

    #[test]
    fn what_a_standby_needed_counts_for_a_while_after_it_left() {
        let standbys = Arc::new(Standbys::default());
        let seen = || standbys.seen().borrow().feedback;
        let enter =
            |name| standbys.enter(name, "127.0.0.1:1".parse().unwrap(), None, Lsn(5)).unwrap();
        let feedback = |xmin| Feedback { xmin, ..Feedback::default() };
        let nothing = Feedback::default();
        let long_after = |from: Instant| from + NEEDED_FOR + Duration::from_secs(1);
        let begun = Instant::now();
        assert_eq!(seen(), None, "those that were there before may come back");
        let first = enter("one");
        assert_eq!(seen(), None, "it has not said yet");
        first.needs(nothing);
        assert_eq!(seen(), None, "another one may come back, and need rows");
        first.needs(feedback(70));
        assert_eq!(seen(), Some(feedback(70)), "it needs some");
        first.needs(nothing);
        assert_eq!(seen(), Some(nothing), "and does not any more");
        first.needs(feedback(70));
        let second = enter("two");
        second.needs(feedback(90));
        drop(first);
        assert_eq!(seen(), Some(feedback(70)), "it may start again");
        let first = enter("one");
        assert_eq!(seen(), Some(feedback(70)));
        first.needs(feedback(80));
        assert_eq!(seen(), Some(feedback(80)), "it is back");
        drop((first, second));
        assert!(standbys.let_go(Instant::now()).is_some_and(|next| next > begun));
        assert_eq!(seen(), Some(feedback(80)));
        assert_eq!(standbys.let_go(long_after(Instant::now())), None);
        assert_eq!(seen(), Some(nothing));
        let standbys = Standbys::default();
        assert_eq!(standbys.let_go(long_after(Instant::now())), None);
        let seen = standbys.seen().borrow().feedback;
        assert_eq!(seen, Some(nothing), "nobody came back");
    }
}
