//! Named crash points and named defects, for tests only.
//!
//! Without the `faults` feature both functions are empty and the compiler removes the calls.
//! With it, two environment variables steer them:
//!
//! - `FARSHORE_CRASH=point[:nth][:cut|:panic]`: at the `nth` (default first) passage of `point` the
//!   process is ended by SIGKILL. With `cut` a power cut is played first: every file known to
//!   [`unsynced::Tracked`] loses the bytes that no fsync has covered.
//!   With `panic` it panics there instead.
//! - `FARSHORE_DEFECT=name`: the named defect is switched on; a checker must notice it.
//!
//! A program asks [`check`] first whether they name what there is: a process that ends by such an
//! error looks like one that was caught. The names in the product are compared with the lists here
//! by a test, and at each call in a build with the feature.

#[cfg(feature = "faults")]
mod enabled;
#[cfg(feature = "faults")]
pub use enabled::{check, defect, point, points_passed, unsynced};

#[cfg(not(feature = "faults"))]
mod disabled;
#[cfg(not(feature = "faults"))]
pub use disabled::{check, defect, point, points_passed, unsynced};

/// Every crash point in the product.
pub const POINTS: &[&str] = &[
    "store.before-write",
    "store.before-fsync",
    "store.after-fsync",
    "store.before-roll",
    "store.after-roll",
    "store.before-rename",
    "store.after-rename",
    "store.before-drop",
    "store.after-drop",
    "spill.before-fsync",
    "spill.after-fsync",
    "spill.before-abort",
    "cursor.before-write",
    "cursor.after-write",
    "capture.before-slot-created",
    "capture.after-slot-created",
    "capture.before-shape-noted",
    "capture.before-acknowledge",
    "capture.after-acknowledge",
    "snapshot.before-state",
    "snapshot.after-state",
    "snapshot.before-range-commit",
    "snapshot.after-range-commit",
    "snapshot.before-finish",
    "snapshot.after-finish",
    "apply.before-commit",
    "apply.after-commit-sent",
    "apply.after-commit",
    "apply.before-acknowledge",
    "apply.after-acknowledge",
    "receive.before-spill-block",
    "receive.before-block",
    "receive.after-block",
    "receive.before-acknowledge",
    "receive.after-acknowledge",
    "spool.before-write",
    "spool.before-fsync",
    "spool.after-fsync",
    "spool.before-roll",
    "spool.after-roll",
    "spool.before-forget",
    "spool.after-forget",
    "spool.before-replace",
    "spool.before-close",
    "spool.after-close",
    "mirror.before-send",
    "mirror.after-send",
    "mirror.before-reply",
    "mirror.after-reply",
    "mirror.before-acknowledge",
    "mirror.after-acknowledge",
    "mirror.before-serve",
    "seed.before-file",
    "backup.before-piece",
    "promote.before-drain",
    "promote.after-drain",
    "promote.before-told",
    "promote.after-told",
    "promote.before-fork",
    "promote.after-fork",
];

/// Every defect that can be switched on. Each must be caught by a checker in `tests/`, or be shown
/// there to do no harm.
pub const DEFECTS: &[&str] = &[
    "acknowledge-before-fsync",
    "progress-in-separate-transaction",
    "dropped-change",
    "doubled-batch-after-reconnect",
    "swapped-transactions",
    "snapshot-row-also-streamed",
    "lost-unchanged-value",
    "missed-conflict",
    "commit-unanswered",
    "missed-parent",
    "unordered-commits",
    "early-keeps-rolled-back",
    "late-halt",
    "spool-durable-before-fsync",
    "mirror-near-claims-far",
    "mirror-reply-from-received",
    "mirror-promote-without-drain",
    "mirror-misses-namesakes",
    "mirror-trusts-positions",
];
