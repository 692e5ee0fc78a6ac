//! Reading durable log back, for standbys.

use super::folder::Listing;
use super::{Spool, SpoolError};
use crate::history::History;
use crate::wal::{Segment, SegmentBytes, Timeline};
use bytes::{Bytes, BytesMut};
use farshore_model::Lsn;
use rustix::io::ReadWriteFlags;
use std::fs::File;
use std::io::IoSliceMut;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Reads the log of one timeline and its ancestors.
#[derive(Debug)]
pub struct SpoolReader {
    spool: Arc<Spool>,
    timeline: Timeline,
    history: History,
    open: Option<(Segment, File)>,
}

impl SpoolReader {
    /// For who is on `timeline`. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError`], if the timeline's history cannot be read.
    pub fn new(spool: Arc<Spool>, timeline: Timeline) -> Result<SpoolReader, SpoolError> {
        let history = spool.history(timeline)?;
        Ok(SpoolReader { spool, timeline, history, open: None })
    }

    /// Log from `from` on, not beyond `until` (which the caller knows to be durable), not beyond
    /// its segment's end, and at most `bytes_max`. `None` if the segment has been removed. Blocks
    /// on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn read(
        &mut self,
        from: Lsn,
        until: Lsn,
        bytes_max: usize,
    ) -> Result<Option<Bytes>, SpoolError> {
        let size = self.spool.identity().segment;
        let number = size.number(from);
        if self.open.as_ref().is_none_or(|(open, _)| open.number != number) {
            let listing = Listing::read(self.spool.folder(), size)?;
            let Some(segment) = listing.find(self.timeline, &self.history, number) else {
                return Ok(None);
            };
            let path = self.spool.folder().join(segment.file_name(size));
            match File::open(&path) {
                Ok(file) => self.open = Some((segment, file)),
                // It was removed since it was listed.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(SpoolError::io("open", &path)(error)),
            }
        }
        let Some((segment, file)) = &self.open else { return Ok(None) };
        let mut data = BytesMut::zeroed(length(size, from, until, bytes_max));
        file.read_exact_at(&mut data, from.0 % size.get()).map_err(|error| {
            let path = self.spool.folder().join(segment.file_name(size));
            SpoolError::io("read", &path)(error)
        })?;
        Ok((!self.spool.shared.forgotten.has(*segment)).then(|| data.freeze()))
    }

    /// The same log as [`SpoolReader::read`] would give, if the segment is open and the operating
    /// system has all of it in memory. For the newest log: of older log, a kernel may begin to read
    /// what it has not.
    pub fn read_if_cached(&self, from: Lsn, until: Lsn, bytes_max: usize) -> Option<Bytes> {
        let size = self.spool.identity().segment;
        let number = size.number(from);
        let (segment, file) = self.open.as_ref().filter(|(open, _)| open.number == number)?;
        let mut data = BytesMut::zeroed(length(size, from, until, bytes_max));
        let at = from.0 % size.get();
        let into = &mut [IoSliceMut::new(&mut data)];
        // Where a file system does not know how, or would wait, this is an error or too little.
        let read = rustix::io::preadv2(file, into, at, ReadWriteFlags::NOWAIT);
        let is_there = read == Ok(data.len()) && !self.spool.shared.forgotten.has(*segment);
        is_there.then(|| data.freeze())
    }
}

/// How much of the log from `from` on is in its segment, before `until`, and no more than asked for.
fn length(size: SegmentBytes, from: Lsn, until: Lsn, bytes_max: usize) -> usize {
    let end = until.min(size.start(size.number(from) + 1));
    end.bytes_since(from).min(bytes_max as u64) as usize
}
