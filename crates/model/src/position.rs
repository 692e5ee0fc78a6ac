//! The four positions of a publication's log, `received ≥ stored ≥ durable ≥ applied`.
//!
//! Each is the end of a commit record. Each has a type of its own, so that a function which may
//! only act on durable data cannot be handed a position that was merely received.

use crate::Lsn;
use std::fmt;

macro_rules! position {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub Lsn);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

position!(
    /// Everything up to here has arrived in this process's memory. Lost in a crash.
    Received
);
position!(
    /// Everything up to here has been handed to the store. Lost in a crash.
    Stored
);
position!(
    /// Everything up to here survives a crash of the machine that holds the store. The only
    /// position a replication slot may be told.
    Durable
);
position!(
    /// Everything up to here has been committed durably on a subscription's target. The only
    /// position that lets a store forget.
    Applied
);
