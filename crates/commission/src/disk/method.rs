use rustix::fs::OFlags;
use std::fmt;
use std::fs::File;
use std::io;

/// A way to make a write durable: PostgreSQL's `wal_sync_method`s, and its `open_datasync` past
/// the kernel's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncMethod {
    /// Every write is durable when it returns, and does not go through the kernel's cache.
    OpenDatasyncDirect,
    /// Every write is durable when it returns.
    OpenDatasync,
    /// A write into the kernel's cache, then fdatasync.
    Fdatasync,
    /// A write into the kernel's cache, then fsync: the file's times, too.
    Fsync,
    /// Every write is durable when it returns, with the file's times.
    OpenSync,
}

impl SyncMethod {
    /// The one that needs most first.
    pub const ALL: [SyncMethod; 5] = [
        SyncMethod::OpenDatasyncDirect,
        SyncMethod::OpenDatasync,
        SyncMethod::Fdatasync,
        SyncMethod::Fsync,
        SyncMethod::OpenSync,
    ];

    /// What the file has to be opened with.
    pub(crate) fn flags(self) -> OFlags {
        match self {
            SyncMethod::OpenDatasyncDirect => OFlags::DSYNC | OFlags::DIRECT,
            SyncMethod::OpenDatasync => OFlags::DSYNC,
            SyncMethod::OpenSync => OFlags::SYNC,
            SyncMethod::Fdatasync | SyncMethod::Fsync => OFlags::empty(),
        }
    }

    /// What has to follow a write.
    pub(crate) fn flush(self, file: &File) -> io::Result<()> {
        match self {
            SyncMethod::OpenDatasyncDirect | SyncMethod::OpenDatasync | SyncMethod::OpenSync => {
                Ok(())
            }
            SyncMethod::Fdatasync => file.sync_data(),
            SyncMethod::Fsync => file.sync_all(),
        }
    }
}

impl fmt::Display for SyncMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SyncMethod::OpenDatasyncDirect => "open_datasync with O_DIRECT",
            SyncMethod::OpenDatasync => "open_datasync",
            SyncMethod::Fdatasync => "fdatasync",
            SyncMethod::Fsync => "fsync",
            SyncMethod::OpenSync => "open_sync",
        })
    }
}
