//! The end of the log that a spool holds, for a principal to be compared with: one that was set
//! back, or left the same timeline as another server did, has other log at the same positions.

use super::reader::SpoolReader;
use super::{Positions, Spool, SpoolError};
use crate::relay::message::Tail;
use farshore_model::Lsn;
use std::sync::Arc;

/// Compared are so many bytes at most.
const COMPARED_BYTES: u64 = 64 << 10;

/// Bytes of a page of log (`XLOG_BLCKSZ`, where the server was built as usual), and of its longer
/// header, which a page has that holds nothing.
const PAGE_BYTES: u64 = 8192;
const PAGE_HEADER_BYTES: u64 = 40;

/// What the log up to `positions.durable` ends with. Behind a segment that was switched early there
/// are pages without anything, which every log would have: what counts is before them. Within one
/// segment, since a principal keeps whole ones. Blocks on the disk.
///
/// # Errors
/// [`SpoolError`], if the spool cannot be read.
pub(crate) fn tail(spool: &Arc<Spool>, positions: Positions) -> Result<Option<Tail>, SpoolError> {
    let durable = positions.durable;
    if durable == Lsn::ZERO {
        return Ok(None);
    }
    let floor = spool.identity().segment.floor(Lsn(durable.0 - 1));
    let mut reader = SpoolReader::new(spool.clone(), positions.timeline)?;
    let from = |end: Lsn| Lsn(end.0.saturating_sub(COMPARED_BYTES)).max(floor);
    let mut until = durable;
    while until > floor {
        // Pages begin at multiples of their size.
        let start = from(until);
        let start = Lsn(start.0 / PAGE_BYTES * PAGE_BYTES).max(floor);
        if !reader.read(start, until, (until.0 - start.0) as usize)? {
            return Ok(None);
        }
        if let Some(end) = end_of_contents(reader.log(), start) {
            let start = from(end);
            if !reader.read(start, end, (end.0 - start.0) as usize)? {
                return Ok(None);
            }
            return Ok(Some(Tail { start, end, crc32c: crc32c::crc32c(reader.log()) }));
        }
        until = start;
    }
    Ok(None)
}

/// Where the last page of `log` ends that holds something. `log` begins with a page.
fn end_of_contents(log: &[u8], start: Lsn) -> Option<Lsn> {
    let pages = log.chunks(PAGE_BYTES as usize).enumerate();
    let holds = |page: &[u8]| page.iter().skip(PAGE_HEADER_BYTES as usize).any(|byte| *byte != 0);
    let last = pages.rev().find(|(_, page)| holds(page));
    last.map(|(number, page)| Lsn(start.0 + number as u64 * PAGE_BYTES + page.len() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_end_with_the_last_page_that_holds_something() {
        let page = PAGE_BYTES as usize;
        let mut log = vec![0; 4 * page + 100];
        let start = Lsn(3 << 24);
        assert_eq!(end_of_contents(&log, start), None);
        // A header is nothing.
        log[2 * page + 39] = 1;
        assert_eq!(end_of_contents(&log, start), None);
        log[page + 40] = 1;
        assert_eq!(end_of_contents(&log, start), Some(Lsn(start.0 + 2 * PAGE_BYTES)));
        log[4 * page + 99] = 1;
        assert_eq!(end_of_contents(&log, start), Some(Lsn(start.0 + 4 * PAGE_BYTES + 100)));
    }
}
