//! Trouble that comes while replication runs. For each: it is said, with what to do; what can go
//! on goes on; when it is over the subscription goes on by itself, or was stopped with a reason;
//! and what readers saw throughout was a prefix of the publisher's commits.

#[path = "trouble/altered.rs"]
mod altered;
#[path = "trouble/full_disks.rs"]
mod full_disks;
#[path = "trouble/keys.rs"]
mod keys;
#[path = "trouble/links.rs"]
mod links;
#[path = "trouble/publication.rs"]
mod publication;
#[path = "trouble/publisher.rs"]
mod publisher;
#[path = "trouble/readers.rs"]
mod readers;
#[path = "trouble/restored.rs"]
mod restored;
#[path = "trouble/target.rs"]
mod target;
