//! Mirrors: the write-ahead log itself, carried to far sites between unmodified PostgreSQL servers.
//!
//! ```text
//! principal ─► receive (near) ═ relay over a link, compressed ═► keep (far) ─► spool ─► serve ─► standbys
//!     ◄─ flushed, by the promise ◄─── written, durable, applied ◄──────────────┘ ◄── applied ──┘
//! ```
//!
//! The near end keeps nothing: the principal's slot does. The far end writes whole segment files,
//! and what it says is durable, an fdatasync has covered. Every acknowledgement that goes back is
//! released by the durable event to its right.

mod descent;
mod error;
pub mod history;
pub mod keep;
pub mod promote;
pub mod receive;
pub mod relay;
pub mod seed;
pub mod serve;
pub mod spool;
pub mod wal;

pub use error::MirrorError;

#[cfg(test)]
#[path = "../tests/synthetic/mod.rs"]
mod synthetic;
