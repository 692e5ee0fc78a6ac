//! What the whole-system scenarios share: a site with its process, a publisher and a subscriber
//! with one publication between them, and marks that tell when the subscriber has caught up.

mod checked;
mod link;
pub mod mixed_tables;
mod pair;
mod site;
mod small_disk;
mod upstream;

pub use checked::Checked;
pub use link::Link;
pub use pair::{DATABASE, Direction, Pair, both_ways, publisher_cluster, subscriber_cluster};
pub use site::{Site, Verb};
pub use small_disk::SmallDisk;
pub use upstream::{DOWNSTREAM, UPSTREAM, Upstream, certificate_lines, issue_certificates};
