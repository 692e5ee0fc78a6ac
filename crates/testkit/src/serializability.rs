//! Strict serializability, checked from what clients saw.
//!
//! A history of transactions that append to lists and read them is *strictly serializable* if there
//! is one order of them all that explains every value read, and in which a transaction that had
//! returned before another was invoked comes before it. So nothing that returned may be missing
//! later, no read may go back, and nothing may happen twice, on whatever server the clients went on.
//!
//! 1. [`Clients`] run such transactions one after another on a server, note when each was invoked and
//!    when it returned, and go on at another server when they are told to. A transaction whose
//!    connection broke during its COMMIT has an unknown outcome.
//! 2. [`check`] looks for such an order. A list that was read tells the order in which its elements
//!    were appended, so the order that must hold between transactions is a graph, and a cycle in it
//!    is the proof that there is none. This is the method of Elle (Kingsbury and Alvaro, 2020).

mod checker;
mod clients;
mod graph;

pub use checker::{Anomaly, Summary, Violation, check};
pub use clients::{Clients, TABLE};

/// One step of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Appended an element to the list of a key. No element is appended twice in a history.
    Append {
        /// Which list.
        key: i64,
        /// What.
        element: i64,
    },
    /// Read the list of a key; empty if there is none.
    Read {
        /// Which list.
        key: i64,
        /// All of it.
        elements: Vec<i64>,
    },
}

/// What the client knows of how a transaction ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// COMMIT returned, at this time.
    Returned(Moment),
    /// It was rolled back for certain.
    Aborted,
    /// The connection broke during COMMIT: it may have happened, at any time after it was invoked.
    Unknown,
}

/// Microseconds since the history began.
pub type Moment = u64;

/// What one client did in one transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transaction {
    /// Whose it is; for messages.
    pub client: usize,
    /// When the client began it.
    pub invoked: Moment,
    /// How it ended.
    pub outcome: Outcome,
    /// What it did, in order.
    pub operations: Vec<Operation>,
}
