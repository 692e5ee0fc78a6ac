use crate::config::{Address, Host, Keepalive};
use std::io;
use std::net::SocketAddr;
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
