use crate::config::{Address, Host, Keepalive};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
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

/// Connects by TCP, ready for a protocol that is about latency and notices a dead peer.
pub(crate) async fn connect_tcp(
    address: SocketAddr,
    keepalive: Keepalive,
) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address).await?;
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
    /// The kernel says that there is something to read only when there are so many bytes, where a
    /// socket can do that (`SO_RCVLOWAT`, socket(7)); at the end of the stream in any case. Asked for
    /// fewer, it looks at once whether it has them (Linux 4.18 on).
    pub(crate) fn wake_at(&self, bytes: i32) {
        let tcp = match self {
            Socket::Tcp(stream) => stream,
            Socket::Tls(stream) => stream.get_ref().0,
            Socket::Unix(_) => return,
        };
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
