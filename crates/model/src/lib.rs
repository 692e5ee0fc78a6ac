//! The vocabulary every part of Farshore shares. Pure: no IO, no async, no dependencies.

mod lsn;
mod nearest;
mod position;
mod relation;
pub mod standby_names;
mod time;
mod timeline;
pub mod transaction;
mod user_type;

pub use lsn::{InvalidLsn, Lsn};
pub use nearest::nearest;
pub use position::{Applied, Durable, Received, Stored};
pub use relation::{Column, Relation, ReplicaIdentity, quote_identifier};
pub use time::{InvalidTime, PgTime, date_text, time_of_day_text, timestamp_text};
pub use timeline::{Mark, Timeline, leg_micros};
pub use user_type::{Attribute, FIRST_UNSTABLE_OID, TypeKind, UserType, is_made_of};

/// A PostgreSQL transaction id as it travels on the wire (32 bits, wraps around).
pub type Xid = u32;

/// Names one *version* of one relation's definition within one log.
///
/// Stored changes carry this number where pgoutput carries the relation's OID, so a stored change
/// means the same thing wherever in the log reading starts. Numbers are never reused in a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DictionaryId(pub u32);
