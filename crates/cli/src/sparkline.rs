//! What moved over the last looks, as a line of blocks.

use crate::status::bytes;
use farshore_node::report::SiteReport;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;

const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// Looks that a line shows.
const LOOKS: usize = 40;

/// A line of blocks from 0 to the largest value.
fn line(values: &VecDeque<f64>) -> String {
    let most = values.iter().copied().fold(0.0, f64::max);
    let block = |value: &f64| {
        let part = if most > 0.0 { value / most * (BLOCKS.len() - 1) as f64 } else { 0.0 };
        BLOCKS[(part.round() as usize).min(BLOCKS.len() - 1)]
    };
    values.iter().map(block).collect()
}

/// One subscription over the last looks.
#[derive(Default)]
struct Trend {
    changes: Option<u64>,
    per_look: VecDeque<f64>,
    latency_ms: VecDeque<f64>,
    apply_ms: VecDeque<f64>,
    behind: VecDeque<f64>,
}

fn push(values: &mut VecDeque<f64>, value: f64) {
    values.push_back(value);
    if values.len() > LOOKS {
        values.pop_front();
    }
}

/// All subscriptions over the last looks.
#[derive(Default)]
pub struct Trends(BTreeMap<String, Trend>);

impl Trends {
    /// Takes a look down.
    pub fn note(&mut self, report: &SiteReport) {
        for s in &report.subscriptions {
            let trend = self.0.entry(s.name.clone()).or_default();
            // A connection that begins anew counts from 0.
            let before = trend.changes.replace(s.changes).unwrap_or(s.changes);
            push(&mut trend.per_look, s.changes.checked_sub(before).unwrap_or(s.changes) as f64);
            push(&mut trend.latency_ms, s.latency_ms.unwrap_or(0.0));
            push(&mut trend.apply_ms, s.apply_ms.unwrap_or(0.0));
            push(&mut trend.behind, s.behind_bytes as f64);
        }
    }

    /// Lines for a subscription, if there were two looks; whether there were.
    pub fn show(&self, out: &mut String, subscription: &str) -> bool {
        let Some(trend) = self.0.get(subscription).filter(|trend| trend.behind.len() > 1) else {
            return false;
        };
        let newest = |values: &VecDeque<f64>| values.back().copied().unwrap_or(0.0);
        let changes = newest(&trend.per_look);
        let latency = newest(&trend.latency_ms);
        let _ = writeln!(
            out,
            "  changes    {}  {changes:.0} since the last look",
            line(&trend.per_look)
        );
        let _ = writeln!(out, "  latency    {}  {latency:.0} ms", line(&trend.latency_ms));
        let apply = newest(&trend.apply_ms);
        let _ = writeln!(out, "  apply      {}  {apply:.0} ms", line(&trend.apply_ms));
        let behind = bytes(newest(&trend.behind) as u64);
        let _ = writeln!(out, "  behind     {}  {behind}", line(&trend.behind));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_node::report::SubscriptionReport;

    #[test]
    fn lines_begin_at_zero_and_survive_a_counter_that_begins_anew() {
        let mut trends = Trends::default();
        for (changes, behind) in [(100, 0), (107, 350), (7, 700)] {
            let subscription = SubscriptionReport {
                name: "s".to_owned(),
                changes,
                behind_bytes: behind,
                ..SubscriptionReport::default()
            };
            trends.note(&SiteReport { subscriptions: vec![subscription], ..SiteReport::default() });
        }
        let mut out = String::new();
        assert!(trends.show(&mut out, "s"));
        assert!(out.contains("changes    ▁██  7 since"), "{out}");
        assert!(out.contains("behind     ▁▅█  700 B"), "{out}");
        assert!(out.contains("latency    ▁▁▁  0 ms"), "{out}");
        assert!(line(&VecDeque::new()).is_empty());
    }
}
