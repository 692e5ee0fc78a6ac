use crate::config::{Address, Host, Keepalive};
use crate::gather::Arrived;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpSocket, TcpStream, UnixStream};
use tokio_rustls::client::TlsStream;

/// One way to one host, names resolved.
#[derive(Debug, Clone)]
pub(crate) enum Endpoint {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl Endpoint {
    /// All endpoints of `host`, in the resolver's order.
    pub(crate) async fn resolve(host: &Host) -> io::Result<Vec<Endpoint>> {
        match (&host.address, host.ip) {
            (Address::Unix(directory), _) => {
                Ok(vec![Endpoint::Unix(directory.join(format!(".s.PGSQL.{}", host.port)))])
            }
            (Address::Tcp(_), Some(ip)) => Ok(vec![Endpoint::Tcp((ip, host.port).into())]),
            (Address::Tcp(name), None) => {
                let found: Vec<_> = tokio::net::lookup_host((name.as_str(), host.port))
                    .await?
                    .map(Endpoint::Tcp)
                    .collect();
                if found.is_empty() {
                    return Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
                }
                Ok(found)
            }
        }
    }
}

/// An established byte stream to a server.
pub(crate) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(Box<TlsStream<TcpStream>>),
}

/// Connects by TCP, ready for a protocol that is about latency and notices a dead peer; packets are
/// at most so large, in bytes, where the network would let them be larger.
pub(crate) async fn connect_tcp(
    address: SocketAddr,
    keepalive: Keepalive,
    segment_max: Option<u32>,
) -> io::Result<TcpStream> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    if let Some(bytes) = segment_max {
        socket2::SockRef::from(&socket).set_tcp_mss(bytes)?;
    }
    let stream = socket.connect(address).await?;
    stream.set_nodelay(true)?;
    let options = socket2::SockRef::from(&stream);
    if keepalive.enabled {
        options.set_tcp_keepalive(
            &socket2::TcpKeepalive::new()
                .with_time(keepalive.idle)
                .with_interval(keepalive.interval)
                .with_retries(keepalive.count),
        )?;
    }
    #[cfg(target_os = "linux")]
    if keepalive.user_timeout > Duration::ZERO {
        options.set_tcp_user_timeout(Some(keepalive.user_timeout))?;
    }
    Ok(stream)
}

impl Socket {
    fn tcp(&self) -> Option<&TcpStream> {
        match self {
            Socket::Tcp(stream) => Some(stream),
            Socket::Tls(stream) => Some(stream.get_ref().0),
            Socket::Unix(_) => None,
        }
    }

    /// The kernel says that there is something to read only when there are so many bytes, where a
    /// socket can do that (`SO_RCVLOWAT`, socket(7)); at the end of the stream in any case. Asked for
    /// fewer, it looks at once whether it has them (Linux 4.18 on).
    pub(crate) fn wake_at(&self, bytes: usize) {
        let Some(tcp) = self.tcp() else { return };
        let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
        // SAFETY: the descriptor is open as long as `tcp` is borrowed, and the kernel reads the
        // `c_int` that is pointed to and as long as is said, before the call returns. Where it
        // refuses, the socket is as it was.
        let _ = unsafe {
            libc::setsockopt(
                tcp.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVLOWAT,
                std::ptr::from_ref(&bytes).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
    }

    /// Bytes that wait in the socket; 0 where that cannot be asked.
    pub(crate) fn waiting(&self) -> usize {
        let Some(tcp) = self.tcp() else { return 0 };
        let mut bytes: libc::c_int = 0;
        // SAFETY: the descriptor is open as long as `tcp` is borrowed, and the kernel writes one
        // `c_int` where it is told to, before the call returns.
        let asked = unsafe { libc::ioctl(tcp.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
        if asked == 0 { usize::try_from(bytes).unwrap_or(0) } else { 0 }
    }

    /// Returns when so many bytes wait in the socket, or when no more will come. On a socket that is
    /// not TCP it never does. Cancel-safe.
    pub(crate) async fn wait_for(&self, enough: usize) {
        let Some(tcp) = self.tcp() else { return std::future::pending().await };
        loop {
            let Ok(ready) = tcp.ready(Interest::READABLE).await else { return };
            let look = || match self.waiting() {
                waiting if waiting < enough => Err(io::ErrorKind::WouldBlock.into()),
                _ => Ok(()),
            };
            if ready.is_read_closed() || tcp.try_io(Interest::READABLE, look).is_ok() {
                return;
            }
        }
    }

    /// Whether the kernel took this size for the receive buffer; it does not change it by itself
    /// any more.
    pub(crate) fn set_receive_buffer(&self, bytes: usize) -> bool {
        let Some(tcp) = self.tcp() else { return false };
        socket2::SockRef::from(tcp).set_recv_buffer_size(bytes).is_ok()
    }

    /// What has come so far (`TCP_INFO`, tcp(7)); `None` where the kernel does not say (Linux before
    /// 4.6), and on a socket that is not TCP.
    #[cfg(target_os = "linux")]
    pub(crate) fn arrived(&self) -> Option<Arrived> {
        // Where things are in linux/tcp.h's `struct tcp_info`, counted in words: the `libc` crate's
        // ends before them.
        const BYTES_RECEIVED: usize = 128 / size_of::<u32>();
        const MIN_RTT: usize = 148 / size_of::<u32>();
        const DATA_SEGS_IN: usize = 152 / size_of::<u32>();
        let tcp = self.tcp()?;
        let mut info = [0_u32; DATA_SEGS_IN + 1];
        let mut length = size_of_val(&info) as libc::socklen_t;
        // SAFETY: the descriptor is open as long as `tcp` is borrowed, and the kernel writes at most
        // `length` bytes where it is told to, before the call returns.
        let asked = unsafe {
            libc::getsockopt(
                tcp.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                info.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        if asked != 0 || (length as usize) < size_of_val(&info) {
            return None;
        }
        let mut bytes = [0; size_of::<u64>()];
        for (half, word) in bytes.chunks_exact_mut(size_of::<u32>()).zip(&info[BYTES_RECEIVED..]) {
            half.copy_from_slice(&word.to_ne_bytes());
        }
        Some(Arrived {
            bytes: u64::from_ne_bytes(bytes),
            packets: info[DATA_SEGS_IN],
            // All ones, more than an hour, while nothing has been measured.
            round_trip: Duration::from_micros(info[MIN_RTT].into()),
        })
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn arrived(&self) -> Option<Arrived> {
        None
    }
}

macro_rules! on_stream {
    ($socket:expr, $stream:ident => $call:expr) => {
        match $socket.get_mut() {
            Socket::Tcp(stream) => {
                let $stream = Pin::new(stream);
                $call
            }
            Socket::Unix(stream) => {
                let $stream = Pin::new(stream);
                $call
            }
            Socket::Tls(stream) => {
                let $stream = Pin::new(&mut **stream);
                $call
            }
        }
    };
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        on_stream!(self, stream => stream.poll_read(cx, buffer))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        on_stream!(self, stream => stream.poll_write(cx, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_stream!(self, stream => stream.poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        on_stream!(self, stream => stream.poll_shutdown(cx))
    }
}
