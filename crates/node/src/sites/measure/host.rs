//! What a machine tells of itself, as far as a link depends on it.

use serde::{Deserialize, Serialize};
use std::fs;
use std::time::Duration;

/// A machine and the site on it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    /// Version of Farshore.
    pub farshore: String,
    /// Processors.
    pub cores: usize,
    /// Most bytes of a socket's receive buffer: the last of `net.ipv4.tcp_rmem`.
    pub receive_buffer_max: Option<u64>,
    /// Most bytes of a socket's send buffer: the last of `net.ipv4.tcp_wmem`.
    pub send_buffer_max: Option<u64>,
    /// Congestion controls that the kernel has now.
    pub congestion_controls: String,
    /// zstd level for what goes to the site that asks; 0: as it is stored.
    pub compression: i32,
    /// Bytes per second that may go to the site that asks.
    pub bandwidth: Option<u64>,
    /// Publications that the site that asks may have.
    pub publications: Vec<String>,
    /// Logs that the site that asks follows at this moment.
    pub following: usize,
}

impl Host {
    /// This one, without what belongs to a site.
    pub fn here() -> Host {
        let words = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        Host {
            farshore: env!("CARGO_PKG_VERSION").to_owned(),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            receive_buffer_max: last_number(&words("/proc/sys/net/ipv4/tcp_rmem")),
            send_buffer_max: last_number(&words("/proc/sys/net/ipv4/tcp_wmem")),
            congestion_controls: words("/proc/sys/net/ipv4/tcp_available_congestion_control"),
            ..Host::default()
        }
    }
}

fn last_number(text: &str) -> Option<u64> {
    text.split_ascii_whitespace().last()?.parse().ok()
}

/// TCP segments of all of a machine's connections, or of those in its network namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segments {
    /// Sent, those sent again included.
    pub sent: u64,
    /// Sent again.
    pub resent: u64,
}

impl Segments {
    /// Up to now; `None` where the kernel does not tell.
    pub(super) fn now() -> Option<Segments> {
        parse_segments(&fs::read_to_string("/proc/net/snmp").ok()?)
    }

    /// Between an earlier moment and this one.
    pub(super) fn since(self, before: Segments) -> Segments {
        Segments {
            sent: self.sent.saturating_sub(before.sent),
            resent: self.resent.saturating_sub(before.resent),
        }
    }
}

/// Two lines that begin with `Tcp:`: names, and values in the same order.
fn parse_segments(table: &str) -> Option<Segments> {
    let mut lines = table.lines().filter_map(|line| line.strip_prefix("Tcp:"));
    let (names, values) = (lines.next()?, lines.next()?);
    let value = |wanted: &str| {
        let mut pairs = names.split_ascii_whitespace().zip(values.split_ascii_whitespace());
        pairs.find(|(name, _)| *name == wanted)?.1.parse::<u64>().ok()
    };
    let resent = value("RetransSegs")?;
    // The kernel counts those that are sent again apart.
    Some(Segments { sent: value("OutSegs")?.checked_add(resent)?, resent })
}

/// Processor time that this process has used.
pub(super) fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let nanos = u32::try_from(time.tv_nsec).unwrap_or(0);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), nanos)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_counters_are_found_by_name() {
        let table = "Ip: a b\nIp: 1 2\nTcp: RtoMin OutSegs RetransSegs\nTcp: 200 100 5\n";
        assert_eq!(parse_segments(table), Some(Segments { sent: 105, resent: 5 }));
        assert_eq!(parse_segments("Tcp: OutSegs\nTcp: x\n"), None);
        assert_eq!(parse_segments(""), None);
        assert!(Segments::now().is_some());
        let here = Host::here();
        assert!(here.cores > 0 && here.receive_buffer_max.is_some(), "{here:?}");
        assert_eq!(last_number("4096 16384 4194304"), Some(4_194_304));
    }
}
