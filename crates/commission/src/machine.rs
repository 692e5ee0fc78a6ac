//! What a measurement was taken on, as far as the kernel tells.

use crate::report::Fact;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

fn line_of(path: impl AsRef<Path>) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.lines().next()?.trim().to_owned())
}

/// The value behind `name` in a file of lines like `name : value`.
fn value_in(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    })
}

/// Processor, memory, kernel.
pub fn facts() -> Vec<Fact> {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let processor = value_in("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".into());
    let mut facts = vec![Fact::new("processor", processor), Fact::new("cores", cores)];
    let memory = value_in("/proc/meminfo", "MemTotal")
        .and_then(|text| text.trim_end_matches("kB").trim().parse::<u64>().ok());
    if let Some(kib) = memory {
        facts.push(Fact::new("memory", crate::units::bytes(kib << 10)));
    }
    if let Some(kernel) = line_of("/proc/sys/kernel/osrelease") {
        facts.push(Fact::new("kernel", kernel));
    }
    facts
}

/// The file system that a folder is on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// `ext4`, `tmpfs` ….
    pub kind: String,
    /// Device, or what stands for it.
    pub source: String,
    /// Options, as the kernel lists them.
    pub options: String,
    /// What the kernel tells of the block device, where there is one.
    pub device: Vec<Fact>,
}

impl Mount {
    /// Finds it by the device number of `folder`; `None` where the kernel does not tell.
    pub fn of(folder: &Path) -> Option<Mount> {
        let device = fs::metadata(folder).ok()?.dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let table = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let mut mount = parse_mountinfo(&table, &format!("{major}:{minor}"))?;
        mount.device = device_facts(major, minor);
        Some(mount)
    }

    /// Whether it keeps its files in memory alone.
    pub fn is_memory(&self) -> bool {
        matches!(self.kind.as_str(), "tmpfs" | "ramfs" | "devtmpfs")
    }

    /// For a report.
    pub fn facts(&self) -> Vec<Fact> {
        let file_system = format!("{} on {} ({})", self.kind, self.source, self.options);
        let mut facts = vec![Fact::new("file system", file_system)];
        facts.extend(self.device.iter().cloned());
        facts
    }
}

/// Lines are `id parent major:minor root mountpoint options optional… - kind source superoptions`.
fn parse_mountinfo(table: &str, number: &str) -> Option<Mount> {
    table.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut before = before.split(' ');
        if before.nth(2)? != number {
            return None;
        }
        let options = before.nth(2)?;
        let mut after = after.split(' ');
        Some(Mount {
            kind: after.next()?.to_owned(),
            source: after.next()?.to_owned(),
            options: options.to_owned(),
            device: Vec::new(),
        })
    })
}

fn device_facts(major: u32, minor: u32) -> Vec<Fact> {
    let base = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    // A partition's queue is its disk's.
    let queue = [base.join("queue"), base.join("../queue")].into_iter().find(|path| path.is_dir());
    let Some(queue) = queue else { return Vec::new() };
    let mut facts = Vec::new();
    for (name, file) in [
        ("device write cache", "write_cache"),
        ("device scheduler", "scheduler"),
        ("device rotates", "rotational"),
    ] {
        if let Some(value) = line_of(queue.join(file)) {
            facts.push(Fact::new(name, value));
        }
    }
    facts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_found_by_its_device() {
        let table = "21 1 0:20 / /proc rw shared:1 - proc proc rw\n\
                     30 1 253:0 / / rw,relatime shared:1 master:2 - ext4 /dev/vda rw,errors=x\n";
        let mount = parse_mountinfo(table, "253:0").unwrap();
        assert_eq!((mount.kind.as_str(), mount.source.as_str()), ("ext4", "/dev/vda"));
        assert_eq!(mount.options, "rw,relatime");
        assert!(!mount.is_memory());
        assert_eq!(parse_mountinfo(table, "9:9"), None);
        assert_eq!(parse_mountinfo("nonsense\n- -\n", "9:9"), None);
        assert!(!facts().is_empty());
    }
}
