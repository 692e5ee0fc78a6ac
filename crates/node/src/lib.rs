//! One Farshore site: its configuration, its agents, and what it says about itself.
//!
//! ```text
//! config      the site file: as typed → as meant
//! site        stores, captures, receivers and subscriptions wired together
//! agents      what each of them is, and how it says how it goes
//! sites       publications from site to site, over links
//! stores      opened, and rid of claims of subscriptions that are gone
//! supervisor  start again what may recover, stop with a reason what cannot
//! switch      pause, resume and hold one agent
//! control     the local socket that the verbs talk to
//! operate     what operators ask for, with and without a node
//! tracer      tokens that are timed on every leg
//! validate    tables compared with the publisher's
//! monitoring  what the monitor is given: the site's state, and what may be asked of it
//! mirrors     the ends of mirrors that are here
//! seed        the data directory of a new standby
//! schema      the SQL that would create what a target lacks
//! check       preflight: what will not work, before anything starts
//! ```

mod agents;
pub mod check;
pub mod config;
pub mod control;
mod legs;
mod mirrors;
mod monitoring;
pub mod operate;
pub mod schema;
pub mod seed;
pub mod site;
mod sites;
mod stores;
mod supervisor;
mod switch;
mod tell;
mod tracer;
mod validate;

pub use farshore_fault as fault;
pub use farshore_link::certificates;
pub use farshore_mirror::seed::Progress as SeedProgress;
pub use farshore_model::nearest;
pub use farshore_monitor::report;

/// Measuring the line to an upstream site.
pub mod measure {
    pub use crate::sites::measure::ask::{
        Compressed, Compression, Filled, MeasureError, Measuring, Replayed, Upstream, compress,
    };
    pub use crate::sites::measure::{Flow, Host, Segments};
}
