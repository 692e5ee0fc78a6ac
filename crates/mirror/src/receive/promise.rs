//! What the principal is told of the far end, and what it may rely on.

use crate::relay::message::FarPositions;
use farshore_fault as fault;
use farshore_model::Lsn;

/// What a *flush* that the principal is told promises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Promise {
    /// fdatasynced in the far end's spool.
    #[default]
    Far,
    /// The same, where the far end is a node near the principal that keeps log alone: a mirror of
    /// its spool carries the log on.
    FarSync,
    /// Replayed by the standbys at the far end.
    FarApplied,
    /// Nothing that anybody should wait for: told lazily, of what is durable at the far end.
    Async,
}

impl Promise {
    /// As in a site file.
    pub fn as_str(self) -> &'static str {
        match self {
            Promise::Far => "far",
            Promise::FarSync => "far-sync",
            Promise::FarApplied => "far-applied",
            Promise::Async => "async",
        }
    }

    /// A commit returns when its log is durable in the far end's spool.
    pub(super) fn is_of_the_spool(self) -> bool {
        matches!(self, Promise::Far | Promise::FarSync)
    }

    /// What the principal is told. `received` is what has arrived at the near end, of which
    /// nothing is promised: it is lost with this process. `told` is what it was told before as
    /// flushed.
    pub(super) fn reply(self, received: Lsn, far: FarPositions, told: Lsn) -> Reply {
        if fault::defect("mirror-near-claims-far") {
            return Reply { written: received, flushed: received, applied: far.applied };
        }
        let flushed = match self {
            Promise::Far | Promise::FarSync | Promise::Async => far.durable,
            // A standby that is further behind than the ones before it does not take back what was
            // told: the slot would go back to log that the principal may have dropped. Whatever
            // comes next waits for it.
            Promise::FarApplied => far.durable.min(far.applied.max(told)),
        };
        // Nor does a standby of the principal's, where that is a mirror's far end itself: commits
        // that wait there for its standbys' replay wait for none behind this.
        let applied = if self == Promise::Async { Lsn::ZERO } else { far.applied };
        Reply { written: far.written, flushed, applied }
    }
}

/// A standby status update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) written: Lsn,
    pub(super) flushed: Lsn,
    pub(super) applied: Lsn,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_promises_what_the_mode_says() {
        let far = FarPositions { written: Lsn(30), durable: Lsn(20), applied: Lsn(10) };
        let received = Lsn(40);
        for (promise, flushed, applied) in [
            (Promise::Far, 20, 10),
            (Promise::FarSync, 20, 10),
            (Promise::FarApplied, 10, 10),
            (Promise::Async, 20, 0),
        ] {
            let reply = promise.reply(received, far, Lsn::ZERO);
            let (flushed, applied) = (Lsn(flushed), Lsn(applied));
            let expected = Reply { written: Lsn(30), flushed, applied };
            assert_eq!(reply, expected, "{promise:?}");
        }
        let nobody = FarPositions { applied: Lsn::ZERO, ..far };
        assert_eq!(Promise::FarApplied.reply(received, nobody, Lsn::ZERO).flushed, Lsn::ZERO);
    }

    #[test]
    fn a_standby_that_is_further_behind_takes_nothing_back() {
        let mut told = Lsn::ZERO;
        let mut tell = |durable, applied| {
            let far = FarPositions { written: Lsn(100), durable: Lsn(durable), applied };
            told = Promise::FarApplied.reply(Lsn(100), far, told).flushed;
            told.0
        };
        assert_eq!(tell(30, Lsn(20)), 20);
        // An older one connects: commits wait until it has come as far.
        assert_eq!(tell(40, Lsn(5)), 20);
        assert_eq!(tell(50, Lsn(19)), 20);
        assert_eq!(tell(50, Lsn(31)), 31);
        // Another session, and nothing was heard of standbys yet.
        assert_eq!(tell(50, Lsn::ZERO), 31);
        // What is not durable is told by nobody.
        assert_eq!(tell(25, Lsn(60)), 25);
    }
}
