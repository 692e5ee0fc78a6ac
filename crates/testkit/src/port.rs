//! Ports for servers that are stopped and started again at the same address.

use anyhow::{Result, bail};
use std::net::{Ipv4Addr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

/// A TCP port on 127.0.0.1 that no other user of this module on the machine is given while the
/// value lives, also while nothing listens there.
///
/// The port lies below the kernel's range for outgoing connections. Inside that range a client
/// that keeps knocking at a stopped server's port can end up connected to itself, and any
/// outgoing connection can take the port while the server is down.
#[derive(Debug)]
pub struct ReservedPort {
    number: u16,
    // An abstract socket: it is gone with the process, whatever way the process ends.
    _claim: UnixListener,
}

impl ReservedPort {
    /// Reserves a free port.
    ///
    /// # Errors
    /// When no port can be had in many attempts.
    pub fn new() -> Result<ReservedPort> {
        const LOWEST: u16 = 10_000;
        let highest = first_ephemeral_port().max(LOWEST + 1_000);
        for _ in 0..1_000 {
            let number = rand::random_range(LOWEST..highest);
            let name = SocketAddr::from_abstract_name(format!("farshore-testkit-port-{number}"))?;
            let Ok(claim) = UnixListener::bind_addr(&name) else { continue };
            if TcpListener::bind((Ipv4Addr::LOCALHOST, number)).is_ok() {
                return Ok(ReservedPort { number, _claim: claim });
            }
        }
        bail!("no free TCP port on 127.0.0.1 between {LOWEST} and {highest}")
    }

    /// The port's number.
    pub fn number(&self) -> u16 {
        self.number
    }
}

fn first_ephemeral_port() -> u16 {
    std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .ok()
        .and_then(|text| text.split_whitespace().next()?.parse().ok())
        .unwrap_or(32_768)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_reservations_differ_and_are_outside_the_ephemeral_range() {
        let ports: Vec<_> = (0..20).map(|_| ReservedPort::new().unwrap()).collect();
        let mut numbers: Vec<_> = ports.iter().map(ReservedPort::number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 20);
        assert!(numbers.iter().all(|number| *number < first_ephemeral_port()));
    }
}
