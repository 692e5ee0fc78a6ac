//! Seeding: the files of a new standby, from the principal over the link.
//!
//! ```text
//! principal ─ BASE_BACKUP, tar ─► give (near): files ─► chunks that differ ═ link ═► take (far) ─► data directory
//!                                             ▲                                     │
//!                                             └──── digests of what is there ◄──────┘
//! ```
//!
//! The far end first says what it has: a digest of every chunk of every file. Of a backup that was
//! broken off, or a data directory that was the principal's once, only what differs crosses. At the
//! end each file is checked against the checksum in the server's own manifest, whatever it was put
//! together from.
//!
//! Who asks the far end's server for a base backup (`pg_basebackup`) gets the principal's, as it is:
//! `pass` at the near end, [`serve`](crate::serve) at the far one.

mod directory;
mod durable;
mod give;
mod manifest;
pub mod message;
mod pass;
mod take;
pub mod tar;
mod writer;

pub use directory::look;
pub use give::{decline, give, refuse};
pub use message::SeedRequest;
pub use pass::{BackupRequest, pass};
pub use take::{Progress, SeedError, Seeded, Take};

/// Files are compared in pieces of this size.
const CHUNK_BYTES: usize = 256 << 10;
/// Messages that wait between two steps that go on at once: 8 MiB of chunks at most.
const QUEUE_MESSAGES_MAX: usize = 32;
