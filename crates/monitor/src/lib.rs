//! What a site says about itself, over HTTP: a page, a JSON interface and metrics.
//!
//! ```text
//! report      the site's state as plain values, for every way of showing it
//! health      good, warning or critical, and why
//! sample      the state once a second, whoever asks, and rates from one look to the next
//! steady      health that does not flap
//! history     the last thirty hours, on disk
//! api         the JSON interface: state, events, actions (described in openapi.json)
//! prometheus  the metrics
//! web         the page, embedded
//! webhook     changes of health, posted
//! guard       who may ask, and what browsers may do with the answers
//! serve       connections: how many, how long, with TLS
//! ```
//!
//! The monitor knows plain values and nothing of how they come about. It may be slow, or fail:
//! nothing waits for it.

mod api;
mod guard;
mod health;
mod history;
pub mod prometheus;
pub mod report;
mod sample;
mod serve;
mod settings;
mod steady;
mod web;
mod webhook;

pub use api::{OPENAPI, ROUTES};
pub use health::{Bounds, Health, Limits, Thresholds, days_left, judge};
pub use history::{History, Kind, MINUTES};
pub use sample::{Rates, Sampler, Snapshot};
pub use serve::{Monitor, MonitorError};
pub use settings::Settings;
pub use webhook::Webhook;

use report::SiteReport;
use serde::{Deserialize, Serialize};
use std::future::Future;
use std::pin::Pin;

/// How an action ended: what to tell, or why it was refused.
pub type Outcome = Pin<Box<dyn Future<Output = Result<serde_json::Value, String>> + Send>>;

/// The site that is watched.
pub trait Source: Send + Sync + 'static {
    /// Its state now. May wait for a lock, never for a disk or a server.
    fn report(&self) -> SiteReport;

    /// Tells what an operator looks for. May ask a disk or a server.
    fn tell(&self, question: Question) -> Outcome;

    /// Does what an operator asks for.
    fn act(&self, action: Action) -> Outcome;
}

/// What an operator may look for on the page, beside the state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Question {
    /// Stored transactions of a publication, in commit order.
    Changes {
        /// Of which.
        publication: String,
        /// From this transaction on, itself included: end of its commit record; else from the
        /// log's start.
        from: Option<String>,
        /// Changes at most.
        limit: u64,
    },
    /// Conflicts that are recorded on a subscription's target, the newest first.
    Conflicts {
        /// Whose.
        subscription: String,
        /// Records at most.
        limit: u64,
    },
}

/// What an operator may ask for on the page.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// Halt a subscription until it is resumed.
    Pause {
        /// Which.
        subscription: String,
    },
    /// Let a paused or stopped subscription go on.
    Resume {
        /// Which.
        subscription: String,
    },
    /// Let a publication's capture go on.
    ResumePublication {
        /// Which.
        publication: String,
    },
    /// Empty one table on the target and copy it anew.
    Resync {
        /// Whose.
        subscription: String,
        /// `schema.table`.
        table: String,
    },
    /// Leave one transaction out.
    Skip {
        /// Whose.
        subscription: String,
        /// End of its commit record.
        lsn: String,
    },
    /// Post a tracer token and wait until it has arrived.
    Tracer {
        /// Of which publication.
        publication: String,
    },
}
