//! Health that does not flap: what is said changes once it has been so for a few looks.

use crate::Health;
use crate::report::SiteReport;
use std::collections::BTreeMap;

/// Looks in a row, one a second, that must be worse (or all better) before it is said.
const HOLD_LOOKS: u32 = 3;

/// What is said of one object.
#[derive(Debug)]
struct Said {
    health: Health,
    reason: Option<String>,
    /// Looks in a row that were worse, or better.
    worse: u32,
    better: u32,
}

/// What is said of all objects, by kind and name.
#[derive(Debug, Default)]
pub(crate) struct Steady(BTreeMap<(&'static str, String), Said>);

impl Steady {
    /// Makes a look's health what is to be said. The first look at an object counts at once.
    pub fn settle(&mut self, report: &mut SiteReport) {
        let before = std::mem::take(&mut self.0);
        let mut settle = Settle { before, after: &mut self.0 };
        for p in &mut report.publications {
            settle.one(("publication", p.name.clone()), &mut p.health, &mut p.reason);
        }
        for s in &mut report.subscriptions {
            settle.one(("subscription", s.name.clone()), &mut s.health, &mut s.reason);
        }
        for m in &mut report.mirrors {
            settle.one(("mirror", m.name.clone()), &mut m.health, &mut m.reason);
        }
    }
}

struct Settle<'a> {
    before: BTreeMap<(&'static str, String), Said>,
    after: &'a mut BTreeMap<(&'static str, String), Said>,
}

impl Settle<'_> {
    fn one(
        &mut self,
        key: (&'static str, String),
        health: &mut Health,
        reason: &mut Option<String>,
    ) {
        let found = self.before.remove(&key);
        let is_new = found.is_none();
        let mut said = found.unwrap_or(Said { health: *health, reason: None, worse: 0, better: 0 });
        said.worse = if *health > said.health { said.worse + 1 } else { 0 };
        said.better = if *health < said.health { said.better + 1 } else { 0 };
        let changes = said.worse >= HOLD_LOOKS || said.better >= HOLD_LOOKS;
        if changes || is_new || *health == said.health {
            said = Said { health: *health, reason: reason.clone(), worse: 0, better: 0 };
        } else {
            (*health, *reason) = (said.health, said.reason.clone());
        }
        self.after.insert(key, said);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::SubscriptionReport;

    /// What is said, look by look, of what is seen.
    fn said(seen: &[(Health, &str)]) -> Vec<(Health, String)> {
        let mut steady = Steady::default();
        let look = |(health, reason): &(Health, &str)| {
            let subscription = SubscriptionReport {
                name: "s".to_owned(),
                health: *health,
                reason: (!reason.is_empty()).then(|| (*reason).to_owned()),
                ..SubscriptionReport::default()
            };
            let mut report =
                SiteReport { subscriptions: vec![subscription], ..SiteReport::default() };
            steady.settle(&mut report);
            let subscription = report.subscriptions.remove(0);
            (subscription.health, subscription.reason.unwrap_or_default())
        };
        seen.iter().map(look).collect()
    }

    #[test]
    fn what_comes_and_goes_is_not_said() {
        let (good, late) = ((Health::Good, ""), (Health::Warning, "late"));
        let flapping = [good, late, good, late, late, good, late];
        assert!(said(&flapping).iter().all(|(health, _)| *health == Health::Good));
        let mended = [late, good, late, good, good, late];
        assert!(
            said(&mended)
                .iter()
                .all(|(health, reason)| { *health == Health::Warning && reason == "late" })
        );
    }

    #[test]
    fn what_stays_is_said_with_its_newest_reason() {
        let (good, gone) = ((Health::Good, ""), (Health::Critical, "gone"));
        let (late, later) = ((Health::Warning, "late"), (Health::Warning, "later"));
        let said = said(&[good, late, gone, late, later, good, good, good]);
        let health: Vec<Health> = said.iter().map(|(health, _)| *health).collect();
        let (g, w) = (Health::Good, Health::Warning);
        assert_eq!(health, [g, g, g, w, w, w, w, g]);
        assert_eq!((said[3].1.as_str(), said[4].1.as_str()), ("late", "later"));
        assert_eq!(said[6].1, "later");
    }
}
