//! Reading durable log back, for standbys.

use super::folder::Listing;
use super::{Spool, SpoolError};
use crate::history::History;
use crate::wal::{Segment, SegmentBytes, Timeline};
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
    /// What was read last, and room for more, which is not cleared each time.
    buffer: Vec<u8>,
    read_bytes: usize,
}

impl SpoolReader {
    /// For who is on `timeline`. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError`], if the timeline's history cannot be read.
    pub fn new(spool: Arc<Spool>, timeline: Timeline) -> Result<SpoolReader, SpoolError> {
        let history = spool.history(timeline)?;
        let (buffer, read_bytes) = (Vec::new(), 0);
        Ok(SpoolReader { spool, timeline, history, open: None, buffer, read_bytes })
    }

    /// Reads log from `from` on, not beyond `until` (which the caller knows to be durable), not
    /// beyond its segment's end, and at most `bytes_max`; [`SpoolReader::log`] has it then. `false`
    /// if the segment has been removed. Blocks on the disk.
    ///
    /// # Errors
    /// [`SpoolError::Io`].
    pub fn read(&mut self, from: Lsn, until: Lsn, bytes_max: usize) -> Result<bool, SpoolError> {
        let size = self.spool.identity().segment;
        let number = size.number(from);
        self.read_bytes = 0;
        if self.open.as_ref().is_none_or(|(open, _)| open.number != number) {
            let listing = Listing::read(self.spool.folder(), size)?;
            let Some(segment) = listing.find(self.timeline, &self.history, number) else {
                return Ok(false);
            };
            let path = self.spool.folder().join(segment.file_name(size));
            match File::open(&path) {
                Ok(file) => self.open = Some((segment, file)),
                // It was removed since it was listed.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
                Err(error) => return Err(SpoolError::io("open", &path)(error)),
            }
        }
        let length = length(size, from, until, bytes_max);
        let Some((segment, file)) = &self.open else { return Ok(false) };
        let into = room(&mut self.buffer, length);
        file.read_exact_at(into, from.0 % size.get()).map_err(|error| {
            let path = self.spool.folder().join(segment.file_name(size));
            SpoolError::io("read", &path)(error)
        })?;
        if self.spool.shared.forgotten.has(*segment) {
            return Ok(false);
        }
        self.read_bytes = length;
        Ok(true)
    }

    /// Reads the same log as [`SpoolReader::read`] would, if the segment is open and the operating
    /// system has all of it in memory; whether it has. For the newest log: of older log, a kernel
    /// may begin to read what it has not.
    pub fn read_if_cached(&mut self, from: Lsn, until: Lsn, bytes_max: usize) -> bool {
        let size = self.spool.identity().segment;
        let number = size.number(from);
        self.read_bytes = 0;
        let Some((segment, file)) = self.open.as_ref().filter(|(open, _)| open.number == number)
        else {
            return false;
        };
        let length = length(size, from, until, bytes_max);
        let into = &mut [IoSliceMut::new(room(&mut self.buffer, length))];
        // Where a file system does not know how, or would wait, this is an error or too little.
        let read = rustix::io::preadv2(file, into, from.0 % size.get(), ReadWriteFlags::NOWAIT);
        if read != Ok(length) || self.spool.shared.forgotten.has(*segment) {
            return false;
        }
        self.read_bytes = length;
        true
    }

    /// The log that was read last.
    pub fn log(&self) -> &[u8] {
        self.buffer.get(..self.read_bytes).unwrap_or_default()
    }
}

fn room(buffer: &mut Vec<u8>, bytes: usize) -> &mut [u8] {
    if buffer.len() < bytes {
        buffer.resize(bytes, 0);
    }
    &mut buffer[..bytes]
}

/// How much of the log from `from` on is in its segment, before `until`, and no more than asked for.
fn length(size: SegmentBytes, from: Lsn, until: Lsn, bytes_max: usize) -> usize {
    let end = until.min(size.start(size.number(from) + 1));
    end.bytes_since(from).min(bytes_max as u64) as usize
}
