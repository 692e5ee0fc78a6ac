use crate::config::{Address, Host, Keepalive};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::client::TlsStream;
pub(crate) use unix::UnixSocket;

mod unix;

/// From this round trip on a peer is far: what bounds a connection is then the line.
pub const FAR: Duration = Duration::from_millis(5);

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
    Unix(UnixSocket),
    Tls(Box<TlsStream<TcpStream>>),
}

/// What the kernel knows of what came on a TCP connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrived {
    /// Bytes, without headers.
    pub bytes: u64,
    /// Segments that held some, as they were on the wire. Wraps.
    pub segments: u32,
    /// The shortest round trip that was seen.
    pub round_trip: Duration,
    /// The MSS that the peer was told, in bytes.
    pub segment_max: u32,
}

/// What the kernel says while it has not seen any round trip.
const ROUND_TRIP_UNKNOWN: Duration = Duration::from_micros(u32::MAX as u64);

impl Arrived {
    pub(crate) fn is_far(&self) -> bool {
        (FAR..ROUND_TRIP_UNKNOWN).contains(&self.round_trip)
    }
}

/// Connects by TCP, ready for a protocol that is about latency and notices a dead peer; with an MSS
/// of at most so many bytes, where the kernel lets that be asked for.
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
        // It saves time only: who relies on it looks at `Arrived::segment_max`.
        if let Err(error) = socket2::SockRef::from(&socket).set_tcp_mss(bytes) {
            tracing::debug!(%address, %error, "asking for a smaller MSS");
        }
    }
    let stream = socket.connect(address).await?;
    stream.set_nodelay(true)?;
    let options = socket2::SockRef::from(&stream);
    if arrived(&stream).is_some_and(|arrived| arrived.is_far()) {
        // Where a kernel does not have it, what is sent over lossy or long lines is slower.
        let _ = options.set_tcp_congestion(b"bbr");
    }
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

    /// [`wake_at`]; `None` on a socket that is not TCP.
    pub(crate) fn wake_at(&self, bytes: usize) -> Option<usize> {
        self.tcp().and_then(|tcp| wake_at(tcp, bytes))
    }

    /// Whether the server is told at once that we are gone (RST) when the socket is closed, instead
    /// of after all that it has not read yet.
    pub(crate) fn reset_when_closed(&self, reset: bool) {
        let Some(tcp) = self.tcp() else { return };
        let linger = reset.then_some(Duration::ZERO);
        if let Err(error) = socket2::SockRef::from(tcp).set_linger(linger) {
            tracing::debug!(%error, "SO_LINGER");
        }
    }

    /// Bytes that wait in the socket to be read; 0 where that cannot be asked.
    pub(crate) fn unread_bytes(&self) -> usize {
        let Some(tcp) = self.tcp() else { return 0 };
        let mut bytes: libc::c_int = 0;
        // SAFETY: the descriptor is open as long as `tcp` is borrowed, and the kernel writes one
        // `c_int` where it is told to, before the call returns.
        let asked = unsafe { libc::ioctl(tcp.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
        if asked == 0 { usize::try_from(bytes).unwrap_or(0) } else { 0 }
    }

    /// Returns when so many bytes wait to be read, or when no more will come; at once on a socket
    /// that is not TCP. Cancel-safe. That fewer wait is forgotten: [`Socket::wake_at`] has to be
    /// asked for fewer before the socket is read again.
    pub(crate) async fn until_unread(&self, enough: usize) {
        let Some(tcp) = self.tcp() else { return };
        loop {
            let Ok(ready) = tcp.ready(Interest::READABLE).await else { return };
            let look = || match self.unread_bytes() {
                unread if unread < enough => Err(io::ErrorKind::WouldBlock.into()),
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
        let socket = socket2::SockRef::from(tcp);
        socket.set_recv_buffer_size(bytes).is_ok()
            && socket.recv_buffer_size().is_ok_and(|kept| kept >= bytes)
    }

    /// What has come so far; `None` as with [`arrived`], and on a socket that is not TCP.
    pub(crate) fn arrived(&self) -> Option<Arrived> {
        arrived(self.tcp()?)
    }
}

/// The kernel says that there is something to read only when there are so many bytes
/// (`SO_RCVLOWAT`, socket(7)); at the end of the stream in any case. Asked for fewer, it looks at
/// once whether it has them (Linux 4.18 on). Returns how many it waits for now, which are fewer where
/// it has no room for so many; `None` where it does not do that.
pub fn wake_at(tcp: &TcpStream, bytes: usize) -> Option<usize> {
    let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    let mut kept: libc::c_int = 0;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the descriptor is open as long as `tcp` is borrowed, and before each call returns
    // the kernel reads, or writes, one `c_int` where it is told to, which is as long as is said.
    // Where it refuses, the socket is as it was.
    let (set, asked) = unsafe {
        let (socket, level, option) = (tcp.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT);
        let set =
            libc::setsockopt(socket, level, option, std::ptr::from_ref(&bytes).cast(), length);
        let kept = std::ptr::from_mut(&mut kept).cast();
        (set, libc::getsockopt(socket, level, option, kept, &raw mut length))
    };
    // A sandbox may say yes to what it does not know.
    let does = cfg!(target_os = "linux") && set == 0 && asked == 0 && (kept == bytes || kept > 1);
    usize::try_from(kept).ok().filter(|_| does)
}

/// What has come so far (`TCP_INFO`, tcp(7)); `None` where the kernel does not say (Linux before 4.6).
#[cfg(target_os = "linux")]
fn arrived(tcp: &TcpStream) -> Option<Arrived> {
    // Where things are in linux/tcp.h's `struct tcp_info`, counted in words: the `libc` crate's ends
    // before them.
    const ADVMSS: usize = 84 / size_of::<u32>();
    const BYTES_RECEIVED: usize = 128 / size_of::<u32>();
    const MIN_RTT: usize = 148 / size_of::<u32>();
    const DATA_SEGS_IN: usize = 152 / size_of::<u32>();
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
        segments: info[DATA_SEGS_IN],
        // All ones, more than an hour, while nothing has been measured.
        round_trip: Duration::from_micros(info[MIN_RTT].into()),
        segment_max: info[ADVMSS],
    })
}

#[cfg(not(target_os = "linux"))]
fn arrived(_tcp: &TcpStream) -> Option<Arrived> {
    None
}

macro_rules! on_stream {
    ($socket:expr, $stream:ident => $call:expr) => {
        match $socket.get_mut() {
            Socket::Tcp(stream) => {
                let $stream = Pin::new(stream);
                $call
            }
            Socket::Unix(socket) => match socket.stream() {
                Ok(stream) => {
                    let $stream = Pin::new(stream);
                    $call
                }
                Err(error) => Poll::Ready(Err(error)),
            },
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
