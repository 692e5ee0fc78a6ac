//! The machine's memory, before anything is timed.

use std::fs;

/// What the largest case writes: log and tables of two servers, and a store.
const WARMED_BYTES_MAX: u64 = 8 << 30;
const PIECE_BYTES: usize = 64 << 20;

/// Touches as much free memory as a case may use, and gives it back. Returns how many bytes.
///
/// On a virtual machine the host finds a page when it is first touched, which takes several times
/// as long as to write it. Without this the one of two contenders whose files happened to get
/// memory that nobody had used would pay for both: native replication writes to log segments that
/// were there before.
pub fn warm() -> u64 {
    let wanted = available_bytes().unwrap_or(0).min(allowed_bytes()) / 2;
    let mut pieces = Vec::new();
    while (pieces.len() as u64 + 1) * PIECE_BYTES as u64 <= wanted.min(WARMED_BYTES_MAX) {
        pieces.push(std::hint::black_box(vec![1_u8; PIECE_BYTES]));
    }
    pieces.len() as u64 * PIECE_BYTES as u64
}

/// What a control group allows, if one does.
fn allowed_bytes() -> u64 {
    let text = fs::read_to_string("/sys/fs/cgroup/memory.max").unwrap_or_default();
    text.trim().parse().unwrap_or(u64::MAX)
}

fn available_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}
