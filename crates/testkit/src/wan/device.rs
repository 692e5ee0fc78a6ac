//! Network devices of the namespace that the calling thread is in, by ioctl.

use anyhow::{Context, Result};
use std::fs::{File, OpenOptions};
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

/// Bytes of the largest IP packet on the line.
const MTU: i32 = 1500;
/// Frames that the device holds for the forwarder, which is late when the machine is busy.
const QUEUE_FRAMES: i32 = 4096;
const NETMASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 252);
/// The name of the device at each end.
pub(super) const NAME: &str = "wan0";

/// Brings up loopback, makes the TUN device of this end and gives it its address. The device goes
/// away with the descriptor. Reads and writes do not block; each is one frame.
pub(super) fn create(address: Ipv4Addr) -> Result<File> {
    // IPv6 would send packets of its own. Where the kernel has none, there is nothing to switch
    // off.
    for which in ["all", "default"] {
        let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{which}/disable_ipv6"), "1");
    }
    // Any socket will do: it stands for its namespace.
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).context("open a socket")?;
    let mut up = request("lo");
    up.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    control(&socket, libc::SIOCSIFFLAGS, up).context("bring up loopback")?;

    // The device is made in the namespace in which its descriptor is opened.
    let tun = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")
        .context("open /dev/net/tun")?;
    let mut kind = request(NAME);
    kind.ifr_ifru.ifru_flags =
        (libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    control(&tun, libc::TUNSETIFF, kind).context("make a TUN device")?;
    // Checksums and segmentation are left to whoever reads the device: TCP then hands over up to
    // 64 KiB at once, which costs little more than one packet.
    let offloads = libc::c_ulong::from(libc::TUN_F_CSUM | libc::TUN_F_TSO4);
    // SAFETY: this request takes its argument by value.
    if unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETOFFLOAD, offloads) } < 0 {
        return Err(io::Error::last_os_error()).context("let the TUN device take large frames");
    }

    let mut with_address = request(NAME);
    with_address.ifr_ifru.ifru_addr = socket_address(address);
    control(&socket, libc::SIOCSIFADDR, with_address).context("set the address")?;
    let mut with_netmask = request(NAME);
    with_netmask.ifr_ifru.ifru_netmask = socket_address(NETMASK);
    control(&socket, libc::SIOCSIFNETMASK, with_netmask).context("set the netmask")?;
    let mut with_mtu = request(NAME);
    with_mtu.ifr_ifru.ifru_mtu = MTU;
    control(&socket, libc::SIOCSIFMTU, with_mtu).context("set the MTU")?;
    let mut with_queue = request(NAME);
    with_queue.ifr_ifru.ifru_metric = QUEUE_FRAMES;
    match control(&socket, libc::SIOCSIFTXQLEN, with_queue) {
        // In a user namespace the kernel keeps to its own 500 frames.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
        result => result.context("set the device's queue")?,
    }
    up.ifr_name = request(NAME).ifr_name;
    control(&socket, libc::SIOCSIFFLAGS, up).context("bring up the TUN device")?;
    Ok(tun)
}

/// An empty request about this device.
fn request(name: &str) -> libc::ifreq {
    // SAFETY: ifreq is integers and a union of integers and a pointer that is not followed here;
    // all-zero bytes are valid for each.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays 0.
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name[..room].iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request
}

fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    let mut data = [0; 14];
    // As sockaddr_in: two bytes of port, then the address.
    for (to, from) in data[2..6].iter_mut().zip(address.octets()) {
        *to = from as libc::c_char;
    }
    libc::sockaddr { sa_family: libc::AF_INET as libc::sa_family_t, sa_data: data }
}

fn control(fd: &impl AsRawFd, what: libc::Ioctl, mut request: libc::ifreq) -> io::Result<()> {
    // SAFETY: every request that comes here reads and writes one ifreq, and this one is alive.
    if unsafe { libc::ioctl(fd.as_raw_fd(), what, &raw mut request) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
