//! Writes blocks to one file: compresses, stages, preallocates, writes, syncs.

use super::block::{Container, Content, HEADER_LEN, Header};
use super::io_error;
use super::old_files::OldFiles;
use super::queue::Queue;
use crate::StoreError;
use farshore_fault::unsynced::Tracked;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use zstd::zstd_safe::{self, CCtx, CParameter, InBuffer, OutBuffer, ResetDirective};

/// Staged bytes are written out when they exceed this.
const STAGED_MAX: usize = 1 << 20;
/// A staging buffer larger than this is given back when it is empty.
const STAGED_KEEP_MAX: usize = 2 << 20;
/// Bytes of a large payload compressed or checksummed at a time.
const LARGE_STEP: usize = 1 << 20;

/// A reusable compression context.
pub(crate) struct Compressor {
    context: CCtx<'static>,
}

impl Compressor {
    /// A context for `level`, or the error of an allocation that failed.
    pub fn new(level: i32) -> Result<Compressor, std::io::Error> {
        let mut context = CCtx::try_create().ok_or(std::io::ErrorKind::OutOfMemory)?;
        context.set_parameter(CParameter::CompressionLevel(level)).map_err(zstd_error)?;
        Ok(Compressor { context })
    }
}

fn zstd_error(code: usize) -> std::io::Error {
    std::io::Error::other(format!("zstd: {}", zstd_safe::get_error_name(code)))
}

/// A file that blocks are appended to. After an error it must not be used again: what an fsync
/// did not cover may or may not be on disk.
pub(crate) struct BlockSink {
    file: File,
    path: PathBuf,
    container: Container,
    /// Number of the next block.
    sequence: u64,
    /// Where the staged bytes will be written.
    written: u64,
    staged: Vec<u8>,
    /// File bytes that an fsync has covered.
    synced: u64,
    /// Time spent on writing and syncing since it was last asked for.
    writing: Duration,
    /// Length the file has been given ahead of the data; equals `written` if never preallocated.
    allocated: u64,
    /// Bytes by which the file is lengthened; zero: not ahead.
    allocate_step: u64,
    /// Waits when the disk is full; without it that is an error.
    room: Option<Arc<Queue>>,
    /// Files that make room first.
    old_files: Arc<OldFiles>,
    /// `None` only while the sink is dropped.
    tracked: Option<Tracked>,
    #[cfg(test)]
    fail_sync: std::sync::Arc<std::sync::atomic::AtomicBool>,
}

/// Where a sink starts.
pub(crate) struct SinkStart {
    pub container: Container,
    pub sequence: u64,
    /// End of the valid data in the file.
    pub end: u64,
    /// Bytes that are durable already.
    pub synced: u64,
    /// Length of the file, if it is longer than its data.
    pub allocated: u64,
    pub allocate_step: u64,
}

impl BlockSink {
    pub fn new(file: File, path: &Path, start: SinkStart, old_files: &Arc<OldFiles>) -> BlockSink {
        BlockSink {
            tracked: Some(if start.allocated > start.end {
                Tracked::overwriting(path, start.synced)
            } else {
                Tracked::new(path, start.synced)
            }),
            file,
            path: path.to_owned(),
            container: start.container,
            sequence: start.sequence,
            written: start.end,
            staged: Vec::new(),
            synced: start.synced,
            writing: Duration::ZERO,
            allocated: start.allocated,
            allocate_step: start.allocate_step,
            room: None,
            old_files: old_files.clone(),
            #[cfg(test)]
            fail_sync: std::sync::Arc::default(),
        }
    }

    /// Makes the sink wait for room when the disk is full.
    pub fn waiting_with(mut self, queue: &Arc<Queue>) -> Self {
        self.room = Some(queue.clone());
        self
    }

    /// Lets a test make every sync fail.
    #[cfg(test)]
    pub fn failing_with(mut self, flag: &std::sync::Arc<std::sync::atomic::AtomicBool>) -> Self {
        self.fail_sync = flag.clone();
        self
    }

    /// File offset of the next block.
    pub fn end(&self) -> u64 {
        self.written + self.staged.len() as u64
    }

    fn header(&self, content: Content, zstd: bool, stored_len: usize, raw_len: usize) -> Header {
        Header {
            crc: 0,
            zstd,
            stored_len: stored_len as u32,
            raw_len: raw_len as u32,
            container: self.container,
            sequence: self.sequence,
            synced_to: self.synced,
            content,
        }
    }

    /// Appends a block of at most a few hundred KiB: compressed, if there is something to do so
    /// with and it shrinks.
    pub fn put(
        &mut self,
        compressor: Option<&mut Compressor>,
        content: Content,
        raw: &[u8],
    ) -> Result<(), StoreError> {
        let start = self.staged.len();
        let payload = start + HEADER_LEN;
        let shrunk = match compressor {
            Some(compressor) => {
                self.staged.resize(payload + zstd_safe::compress_bound(raw.len()), 0);
                let compressed = compressor
                    .context
                    .compress2(&mut self.staged[payload..], raw)
                    .map_err(|code| io_error("compress for", &self.path)(zstd_error(code)))?;
                Some(compressed).filter(|compressed| *compressed < raw.len())
            }
            None => {
                self.staged.resize(payload, 0);
                None
            }
        };
        match shrunk {
            Some(compressed) => self.staged.truncate(payload + compressed),
            None => {
                self.staged.truncate(payload);
                self.staged.extend_from_slice(raw);
            }
        }
        let stored_len = self.staged.len() - payload;
        let crc = crc32c::crc32c(&self.staged[payload..]);
        let header = self.header(content, shrunk.is_some(), stored_len, raw.len()).encode(crc);
        self.staged[start..payload].copy_from_slice(&header);
        self.sequence += 1;
        if self.staged.len() > STAGED_MAX {
            self.write_staged()?;
        }
        Ok(())
    }

    /// Appends a block whose payload is stored as it is given: `crc` is its CRC32C, `raw_len` the
    /// length it decompresses to if it is a zstd frame.
    pub fn put_stored(
        &mut self,
        content: Content,
        (zstd, raw_len): (bool, u32),
        payload: &[u8],
        crc: u32,
    ) -> Result<(), StoreError> {
        // Before this block, so that what is written ends with a whole one.
        if self.staged.len() + HEADER_LEN + payload.len() > STAGED_MAX {
            self.write_staged()?;
        }
        let header = self.header(content, zstd, payload.len(), raw_len as usize).encode(crc);
        self.staged.extend_from_slice(&header);
        self.sequence += 1;
        if payload.len() > STAGED_MAX {
            self.write_staged()?;
            for piece in payload.chunks(LARGE_STEP) {
                self.write_at(piece, self.written)?;
                self.written += piece.len() as u64;
            }
        } else {
            self.staged.extend_from_slice(payload);
        }
        Ok(())
    }

    /// Appends a block whose raw payload is `prefix` and then `payload`, without a copy of either:
    /// it is compressed piece by piece straight into the file, and written raw over that if it
    /// turns out not to shrink.
    pub fn put_large(
        &mut self,
        compressor: &mut Compressor,
        content: Content,
        prefix: &[u8],
        payload: &[u8],
    ) -> Result<(), StoreError> {
        self.write_staged()?;
        let raw_len = prefix.len() + payload.len();
        let written = self.stream_compressed(compressor, prefix, payload, raw_len)?;
        let (zstd, stored_len, crc) = match written {
            Some((stored_len, crc)) => (true, stored_len, crc),
            None => {
                let mut at = self.written + HEADER_LEN as u64;
                let mut crc = 0;
                for piece in [prefix, payload].into_iter().flat_map(|part| part.chunks(LARGE_STEP))
                {
                    crc = crc32c::crc32c_append(crc, piece);
                    self.write_at(piece, at)?;
                    at += piece.len() as u64;
                }
                (false, raw_len, crc)
            }
        };
        let header = self.header(content, zstd, stored_len, raw_len).encode(crc);
        self.write_at(&header, self.written)?;
        self.written += (HEADER_LEN + stored_len) as u64;
        self.sequence += 1;
        Ok(())
    }

    /// Stored length and checksum, or `None` if the frame would not be smaller than `raw_len`.
    fn stream_compressed(
        &mut self,
        compressor: &mut Compressor,
        prefix: &[u8],
        payload: &[u8],
        raw_len: usize,
    ) -> Result<Option<(usize, u32)>, StoreError> {
        use zstd_safe::zstd_sys::ZSTD_EndDirective::{ZSTD_e_continue, ZSTD_e_end};
        let failed = |path: &Path, code| io_error("compress for", path)(zstd_error(code));
        let context = &mut compressor.context;
        context
            .set_pledged_src_size(Some(raw_len as u64))
            .map_err(|code| failed(&self.path, code))?;
        let mut buffer = vec![0; LARGE_STEP];
        let (mut stored_len, mut crc) = (0, 0);
        for (part, end) in [(prefix, ZSTD_e_continue), (payload, ZSTD_e_end)] {
            let mut input = InBuffer::around(part);
            loop {
                let mut output = OutBuffer::around(&mut buffer[..]);
                let left = context
                    .compress_stream2(&mut output, &mut input, end)
                    .map_err(|code| failed(&self.path, code))?;
                let len = output.pos();
                if stored_len + len >= raw_len {
                    context
                        .reset(ResetDirective::SessionOnly)
                        .map_err(|code| failed(&self.path, code))?;
                    return Ok(None);
                }
                let at = self.written + (HEADER_LEN + stored_len) as u64;
                let piece = &buffer[..len];
                crc = crc32c::crc32c_append(crc, piece);
                stored_len += len;
                self.write_at(piece, at)?;
                let part_done = match end {
                    ZSTD_e_end => left == 0,
                    _ => input.pos() == part.len(),
                };
                if part_done {
                    break;
                }
            }
        }
        Ok(Some((stored_len, crc)))
    }

    /// Waits for room where the sink may. What is not synced can be written again at its place.
    fn write_at(&mut self, bytes: &[u8], at: u64) -> Result<(), StoreError> {
        let started = Instant::now();
        let written = self.write_at_last(bytes, at);
        self.writing += started.elapsed();
        written
    }

    fn write_at_last(&mut self, bytes: &[u8], at: u64) -> Result<(), StoreError> {
        let mut waited = false;
        loop {
            let step = self.allocate_step;
            let written = write_piece(&self.file, &self.path, &mut self.allocated, step, bytes, at);
            match (written, &self.room) {
                (Err(error), _) if error.is_out_of_room() && self.old_files.give_up() => {}
                (Err(error), Some(queue)) if error.is_out_of_room() => {
                    if at + bytes.len() as u64 > self.allocated {
                        // What was reserved and is not enough may help others: the cursors, whose
                        // saving lets retention make room.
                        self.allocated = at.min(self.allocated);
                        let shorter = self.file.set_len(self.allocated);
                        shorter.map_err(io_error("shorten", &self.path))?;
                    }
                    if !queue.wait_for_room(&error) {
                        return Err(error);
                    }
                    waited = true;
                }
                (Ok(()), Some(queue)) if waited => {
                    queue.found_room();
                    return Ok(());
                }
                (written, _) => return written,
            }
        }
    }

    /// Hands what is staged to the operating system.
    pub fn write_staged(&mut self) -> Result<(), StoreError> {
        if !self.staged.is_empty() {
            let staged = std::mem::take(&mut self.staged);
            self.write_at(&staged, self.written)?;
            self.written += staged.len() as u64;
            if staged.capacity() <= STAGED_KEEP_MAX {
                self.staged = staged;
                self.staged.clear();
            }
        }
        Ok(())
    }

    /// Where what was handed to the operating system ends: between two blocks, when no block is
    /// being put.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Bytes written that no fsync has covered.
    pub fn unsynced(&self) -> u64 {
        self.written - self.synced
    }

    /// Time spent on writing and syncing so far, since it was last taken.
    pub fn writing(&self) -> Duration {
        self.writing
    }

    /// As [`BlockSink::writing`], and begins anew.
    pub fn take_writing(&mut self) -> Duration {
        std::mem::take(&mut self.writing)
    }

    /// Gives the staging buffer's memory back.
    pub fn shrink(&mut self) {
        self.staged.shrink_to_fit();
    }

    /// Appends bytes that are no block.
    pub fn put_plain(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.staged.extend_from_slice(bytes);
        self.write_staged()
    }

    /// Makes what was written durable. Never call it again after it failed: the kernel may have
    /// dropped the dirty pages, and a second call would succeed without them.
    pub fn sync(&mut self) -> Result<(), StoreError> {
        #[cfg(test)]
        if self.fail_sync.load(std::sync::atomic::Ordering::SeqCst) {
            let error = std::io::Error::from_raw_os_error(libc::EIO);
            return Err(io_error("sync", &self.path)(error));
        }
        let started = Instant::now();
        self.file.sync_data().map_err(io_error("sync", &self.path))?;
        self.writing += started.elapsed();
        self.synced = self.written;
        self.note_synced();
        Ok(())
    }

    fn note_synced(&self) {
        if let Some(tracked) = &self.tracked {
            tracked.synced(self.synced);
        }
    }

    /// Cuts off what was preallocated and makes the length durable.
    pub fn seal(&mut self) -> Result<(), StoreError> {
        self.file.set_len(self.written).map_err(io_error("shorten", &self.path))?;
        self.file.sync_all().map_err(io_error("sync", &self.path))?;
        self.allocated = self.written;
        self.synced = self.written;
        self.note_synced();
        Ok(())
    }
}

impl Drop for BlockSink {
    fn drop(&mut self) {
        if self.synced < self.written {
            // Closing a file makes nothing durable: a power cut still takes what no fsync covered.
            let _kept = std::mem::ManuallyDrop::new(self.tracked.take());
        }
    }
}

fn write_piece(
    file: &File,
    path: &Path,
    allocated: &mut u64,
    step: u64,
    bytes: &[u8],
    at: u64,
) -> Result<(), StoreError> {
    let end = at + bytes.len() as u64;
    if step > 0 && end > *allocated {
        // To the next multiple of the step, so that it is done rarely.
        let target = end.div_ceil(step) * step;
        preallocate(file, *allocated, target).map_err(io_error("reserve disk space for", path))?;
        *allocated = target;
    }
    file.write_all_at(bytes, at).map_err(io_error("write", path))
}

/// Lengthens a file with blocks that read as zeros.
fn preallocate(file: &File, from: u64, to: u64) -> Result<(), std::io::Error> {
    loop {
        // SAFETY: the descriptor is open as long as `file` is borrowed; no memory is passed.
        let code = unsafe {
            libc::posix_fallocate(file.as_raw_fd(), from as libc::off_t, (to - from) as libc::off_t)
        };
        match code {
            0 => return Ok(()),
            libc::EINTR => continue,
            code => return Err(std::io::Error::from_raw_os_error(code)),
        }
    }
}
