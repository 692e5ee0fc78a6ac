//! From a store to a target database: every transaction exactly once, in commit order.
//!
//! ```text
//! subscription  the agent: initial copy, then stream, until told to stop
//! streaming     the log applied: groups begun, filled, committed, acknowledged
//! scheduler     pure: how many source transactions make one target transaction
//! netting       pure: what consecutive changes of one table come to
//! early         a large transaction applied while it arrives, committed in its turn
//! copy_beside   tables copied anew while the others stream on
//! cut_offs      pure: which of those cannot end so, because the stream ends too often
//! ahead         a target that has more than its store can have given it
//! log_feed      store blocks → transactions, read ahead, memory bounded
//! validate      whether publisher and target have the same rows
//! halts         the stream at rest where somebody looks at the target
//! question      what the publisher publishes by now, asked beside the stream
//! requests      what operators ask for: transactions to skip, tables to copy anew
//! browse        the stored log, readable
//! postgres      the target: session, statements, pipeline, progress, initial copy
//! log_backoff   pure: how long what went wrong is not tried again
//! small_groups  pure: how small groups are for a target that had no room
//! row_by_row    pure: where batches are not tried, because one was refused
//! careful       the log applied row by row, after something failed
//! conflict      what is said and done when the target differs
//! remedy        what to do about what a target says
//! status        what the agent is doing
//! ```
//!
//! Progress is written in the same target transaction as the rows it stands for.

mod ahead;
pub mod backup;
pub mod browse;
mod careful;
pub mod conflict;
mod copy_beside;
mod cut_offs;
mod early;
mod error;
mod halts;
mod held_up;
mod log_backoff;
mod log_feed;
pub mod netting;
pub mod postgres;
mod question;
mod remedy;
pub mod requests;
mod row_by_row;
pub mod scheduler;
mod small_groups;
mod status;
mod streaming;
mod subscription;
pub mod validate;

pub use ahead::Given;
pub use conflict::{ConflictPolicy, OnConflict};
pub use copy_beside::{cursor_owner, is_of_copy};
pub use error::{ApplyError, Cause, FailedChange, RefusedCommit};
pub use halts::Halts;
pub use postgres::log_points::LogPoints;
pub use remedy::follows_another;
pub use status::{
    AppliedTransaction, LagHistogram, Phase, SourceTransaction, SubscriptionStatus, TableCopy,
};
pub use subscription::{Initialise, Subscription, SubscriptionSpec};
