//! Mirrors: their ends that are here, kept running.

mod far;
mod left_behind;
mod near;
mod near_side;
mod note;

pub(crate) use far::{FarAgent, Takeover};
pub(crate) use left_behind::left_behind;
pub(crate) use near::{LET_LOOK, NearAgent, kept_bytes, resume_without_node, why_dropped};
pub(crate) use near_side::NearSide;

use farshore_model::Lsn;
use std::time::Duration;

fn with_warning(failure: Option<String>, warning: Option<String>) -> Option<String> {
    match (failure, warning) {
        (Some(failure), Some(warning)) => Some(format!("{warning}. {failure}")),
        (failure, warning) => failure.or(warning),
    }
}

/// How it is told that a far end has promoted its standby.
pub(crate) const HAS_PROMOTED: &str = "has promoted the standby of this mirror";

const NOTHING_ACKNOWLEDGED: &str = "nothing was acknowledged";

/// That commits wait, where any do, until something `becomes` so.
fn nothing_is_acknowledged(waits: Duration, becomes: &str) -> String {
    format!(
        "{NOTHING_ACKNOWLEDGED} for {} s, since no more log has become {becomes}; commits that wait \
         for it wait",
        waits.as_secs()
    )
}

/// Nothing is known of standbys that never were.
fn redo_queue(durable: Lsn, applied: Lsn) -> Option<u64> {
    (applied > Lsn::ZERO).then(|| durable.bytes_since(applied))
}

fn ratio(log_bytes: u64, link_bytes: u64) -> Option<f64> {
    (link_bytes > 0).then(|| (100.0 * log_bytes as f64 / link_bytes as f64).round() / 100.0)
}
