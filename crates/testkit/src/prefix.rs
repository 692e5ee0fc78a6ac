//! The checker of the product's central promise: **every state a reader can see on a subscriber
//! is the publisher's state after some prefix of its commits, and never an earlier one than a
//! reader saw before.**
//!
//! 1. [`Workload`] writes to the tables of [`TABLES`] at the publisher. Every commit changes the
//!    state in a way that no other commit does (it enters its number into `prefix.ledger`).
//! 2. [`Oracle`] is a logical slot with PostgreSQL's own `test_decoding`: the publisher's commit
//!    order and row images, by no code of the product. [`History`] replays them into the state
//!    after each commit.
//! 3. [`Samplers`] read all tables of the subscriber in one snapshot each, throughout.
//! 4. [`check`] finds for each sample the prefix that it equals, and refuses a sample that equals
//!    none, or only ones that an earlier sample was already past.
//!
//! States are compared by a 128-bit sum over the hashes of their rows, so that each commit costs
//! what it changes and not what the tables hold.

mod checker;
mod decoding;
mod history;
mod kinds;
mod oracle;
mod sampler;
mod schema;
mod session;
mod state;
mod workload;

pub use checker::{Summary, Violation, ViolationKind, check, check_final};
pub use decoding::{Change, Datum, DecodedTransaction, decode};
pub use history::{History, Step};
pub use oracle::{Oracle, read_state};
pub use sampler::{Sample, SampleSeries, Samplers};
pub use schema::{TABLES, TableSpec, create_tables, table_names};
pub use state::{Row, RowChange, State, StateHash};
pub use workload::{Workload, WorkloadOptions, WorkloadSummary};
