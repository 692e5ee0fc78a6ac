//! The log reader: from a publisher's replication slot to durable transactions in a store, and the
//! publisher's side of snapshots.
//!
//! ```text
//! publication   which tables, columns and rows: the PostgreSQL publication, created or adopted
//! alterations   whether something else altered it
//! timelines     the timelines that a publisher has been on
//! patience      which running transactions a slot's creation waits for
//! slot          the replication slot: created, adopted, checked against the store, kept moving
//! assembler     pgoutput messages → batches and spills (no network, no clock)
//! types         what user-defined types are made of, and whether their values may travel in binary
//! reader        the loop: slot → assembler → store → acknowledgement; far behind by SQL function,
//!               else by stream
//! schema        definitions of the published tables, and the SQL that makes them elsewhere
//! attendant     what a session does beside the stream
//! snapshot      a consistent point, tables cut into ranges, rows out in COPY format
//! tracer        transactions that change nothing, and are timed on their way
//! source        what subscriptions ask of the publisher, wherever it is
//! ```
//!
//! A slot is only ever told positions that are durable in the store.

mod alterations;
pub mod assembler;
mod attendant;
mod error;
mod patience;
pub mod publication;
mod reader;
pub mod schema;
pub mod slot;
pub mod snapshot;
pub mod source;
pub mod timelines;
pub mod tracer;
pub mod types;

pub use alterations::out as taken_out;
pub use error::{CaptureError, ONCE_THE_PASSWORD_IS_RIGHT};
pub use reader::{Capture, CaptureStatus};
