//! What the kernel tells about processes: parents, CPU time, peak memory.

use std::time::Duration;

/// One line of `/proc/PID/stat`, the parts that are used here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// Process id.
    pub pid: i32,
    /// Parent's process id.
    pub parent: i32,
    /// Whether the process has ended and only waits to be reaped.
    pub is_zombie: bool,
    /// User and system time of the process itself.
    pub own_cpu: Duration,
    /// User and system time of its children that have ended and were reaped.
    pub reaped_cpu: Duration,
}

/// Reads one process; `None` when there is no such process.
pub fn stat(pid: i32) -> Option<Stat> {
    parse_stat(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse_stat(line: &str) -> Option<Stat> {
    // The command's name stands in parentheses and may hold anything, parentheses included.
    let (head, tail) = line.rsplit_once(')')?;
    let pid = head.split(' ').next()?.parse().ok()?;
    let fields: Vec<&str> = tail.split_whitespace().collect();
    let ticks = |index: usize| fields.get(index)?.parse::<u64>().ok();
    Some(Stat {
        pid,
        parent: fields.get(1)?.parse().ok()?,
        is_zombie: matches!(*fields.first()?, "Z" | "X"),
        own_cpu: ticks_to_duration(ticks(11)? + ticks(12)?),
        reaped_cpu: ticks_to_duration(ticks(13)? + ticks(14)?),
    })
}

fn ticks_to_duration(ticks: u64) -> Duration {
    // SAFETY: sysconf has no memory preconditions.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) }.max(1) as u64;
    Duration::from_millis(ticks * 1000 / per_second)
}

/// Every live process whose parent is `parent`.
pub fn children(parent: i32) -> Vec<Stat> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(stat)
        .filter(|stat| stat.parent == parent)
        .collect()
}

/// The largest resident size a live process ever had (`VmHWM`), in bytes; `None` once it ended.
pub fn peak_rss_bytes(pid: i32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// Files under `directory` that the process has mapped, by name.
pub fn mapped_files(pid: i32, directory: &str) -> Vec<String> {
    let Ok(maps) = std::fs::read_to_string(format!("/proc/{pid}/maps")) else { return Vec::new() };
    let mut files: Vec<String> = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .filter(|file| file.starts_with(directory))
        .map(str::to_owned)
        .collect();
    files.dedup();
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_name_may_hold_parentheses_and_blanks() {
        let line = "42 (a) b (c) S 7 42 42 0 -1 4194304 1 2 3 4 100 50 300 50 20 0 1 0 5 6 7\n";
        let stat = parse_stat(line).unwrap();
        assert_eq!((stat.pid, stat.parent, stat.is_zombie), (42, 7, false));
        assert_eq!(stat.own_cpu * 100, ticks_to_duration(150) * 100);
        assert_eq!(stat.reaped_cpu, ticks_to_duration(350));
        assert_eq!(parse_stat("42 (x"), None);
        assert_eq!(parse_stat("42 (x) S 7"), None);
    }

    #[test]
    fn own_process_is_visible() {
        let pid = std::process::id() as i32;
        assert_eq!(stat(pid).unwrap().pid, pid);
        assert!(peak_rss_bytes(pid).unwrap() > 4096);
        assert_eq!(stat(i32::MAX), None);
    }
}
