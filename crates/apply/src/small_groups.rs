//! Groups that are smaller than usual for a while, because the target had no room for one.

use farshore_model::Lsn;

/// How many times the bounds of a group are halved at most: it is one transaction by then.
const HALVINGS_MAX: u32 = 10;
/// Bytes of the publisher's log after the first refusal; doubled whenever larger groups are refused
/// again.
const SPAN_BYTES: u64 = 4 << 20;
const DOUBLINGS_MAX: u32 = 14;
/// After that many spans without a refusal, of which the first few let groups grow, the next one is
/// another shortage.
const SPANS_UNTIL_FORGOTTEN: u64 = 32;

/// Where the bounds of a group are halved, and how many times.
///
/// A target may be short of locks or memory because of others, and only for a while: behind a span
/// of the log groups are twice as large again, and so on. A target that has no room for the usual
/// groups at all refuses once more then, and ever more seldom.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SmallGroups {
    halvings: u32,
    until: Lsn,
    span: u64,
    /// How many times they have been allowed to grow, and were refused.
    regrown: u32,
}

impl SmallGroups {
    /// How many times the bounds of a group are halved that begins behind `position`.
    pub fn halvings_at(&self, position: Lsn) -> u32 {
        if self.halvings == 0 || position < self.until {
            return self.halvings;
        }
        let passed = 1 + position.bytes_since(self.until) / self.span;
        self.halvings.saturating_sub(u32::try_from(passed).unwrap_or(u32::MAX))
    }

    /// Up to here they are smallest, and do not take room side by side.
    pub fn until(&self) -> Lsn {
        self.until
    }

    /// A group behind `applied` was refused. Returns how many times they are halved now; `None` when
    /// they cannot become smaller.
    pub fn note(&mut self, applied: Lsn) -> Option<u32> {
        let halvings = self.halvings_at(applied) + 1;
        if halvings > HALVINGS_MAX {
            return None;
        }
        // One shortage is one, however many attempts it outlasts.
        let has_grown = self.halvings > 0 && applied >= self.until;
        let is_another = applied.bytes_since(self.until) > SPANS_UNTIL_FORGOTTEN * self.span;
        let regrown = if is_another { 0 } else { self.regrown + u32::from(has_grown) };
        let span = SPAN_BYTES << regrown.min(DOUBLINGS_MAX);
        let until = Lsn(applied.0.saturating_add(span));
        *self = SmallGroups { halvings, until, span, regrown };
        Some(halvings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_grow_again_step_by_step() {
        let mut small = SmallGroups::default();
        assert_eq!(small.halvings_at(Lsn::ZERO), 0);
        assert_eq!(small.note(Lsn(1000)), Some(1));
        assert_eq!(small.note(Lsn(1000)), Some(2));
        let until = 1000 + SPAN_BYTES;
        assert_eq!(small.halvings_at(Lsn(until - 1)), 2);
        assert_eq!(small.halvings_at(Lsn(until)), 1);
        assert_eq!(small.halvings_at(Lsn(until + SPAN_BYTES)), 0);
        assert_eq!(small.halvings_at(Lsn(u64::MAX)), 0);
    }

    #[test]
    fn who_refuses_again_is_tried_more_seldom() {
        let mut small = SmallGroups::default();
        let mut position = Lsn(0);
        let mut spans = Vec::new();
        for _ in 0..20 {
            assert_eq!(small.note(position), Some(1));
            spans.push(small.until.bytes_since(position));
            position = small.until;
            assert_eq!(small.halvings_at(position), 0);
        }
        assert!(spans.is_sorted() && spans[0] == SPAN_BYTES && spans[19] == SPAN_BYTES << 14);
    }

    #[test]
    fn a_shortage_of_long_ago_is_forgotten() {
        let mut small = SmallGroups::default();
        let mut position = Lsn(0);
        for _ in 0..6 {
            assert_eq!(small.note(position), Some(1));
            position = small.until;
        }
        position = Lsn(position.0 + (SPANS_UNTIL_FORGOTTEN + 1) * small.span);
        assert_eq!(small.note(position), Some(1));
        assert_eq!(small.until.bytes_since(position), SPAN_BYTES);
    }

    #[test]
    fn there_is_an_end_to_halving() {
        let mut small = SmallGroups::default();
        let noted: Vec<_> = (0..HALVINGS_MAX + 2).map(|_| small.note(Lsn(5))).collect();
        assert_eq!(noted[9..], [Some(10), None, None]);
        // A shortage of some seconds, in which ten attempts failed, is over soon.
        assert_eq!(small.halvings_at(Lsn(5 + 10 * SPAN_BYTES)), 0);
    }
}
