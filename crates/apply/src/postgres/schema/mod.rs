//! Tables that are missing on the target, made from the publisher's definitions.
//!
//! ```text
//! present   what the target has
//! outline   a plan less what is there: the steps before the copy, and what follows it
//! create    the steps, each in one transaction that also records what is to follow the copy
//! after     what was recorded, each statement in one transaction with the end of its record
//! ```
//!
//! What is on the target is left alone. After a crash at any moment the same plan has fewer steps
//! left, and what is to follow the copy of a table stands in `farshore.after_copy` from the moment
//! that the table is there.

mod after;
pub use after::AFTER_ORDER;
pub(crate) use after::foreign_keys_waiting_sql;
mod create;
mod name_taken;
mod outline;
mod present;

pub use create::outline_of;
pub(crate) use create::{create_missing, lacks_tables};
pub use outline::{Outline, Step};

use farshore_capture::schema::NameMap;

/// What a subscription does about tables that the target lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchemaSettings {
    /// Whether they are created; else they are an error.
    pub create_tables: bool,
    /// What tables are called on the target.
    pub names: NameMap,
}

impl Default for SchemaSettings {
    fn default() -> Self {
        SchemaSettings { create_tables: true, names: NameMap::default() }
    }
}
