//! What the whole-system scenarios share: a site with its process, a publisher and a subscriber
//! with one publication between them, and marks that tell when the subscriber has caught up.

pub mod mixed_tables;
mod pair;
mod site;

pub use pair::{DATABASE, Direction, Pair, both_ways, publisher_cluster, subscriber_cluster};
pub use site::{Site, Verb};
