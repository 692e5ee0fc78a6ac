//! Signs of life of a connection, below TLS: that gives nothing before a whole record of up to 16 KiB
//! has come, which on a slow line that many connections share takes longer than who is dead is waited
//! for.

use std::io;
use std::io::IoSlice;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// When bytes last came.
#[derive(Debug)]
pub(crate) struct Heard {
    since: Instant,
    /// After `since`, microseconds.
    last: AtomicU64,
}

impl Heard {
    /// Now.
    pub fn note(&self) {
        let micros = u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.last.store(micros, Relaxed);
    }

    /// How long that is ago.
    pub fn ago(&self) -> Duration {
        self.since.elapsed().saturating_sub(Duration::from_micros(self.last.load(Relaxed)))
    }
}

/// A socket that notes when bytes come.
#[derive(Debug)]
pub(crate) struct Listening {
    tcp: TcpStream,
    heard: Arc<Heard>,
}

impl Listening {
    pub fn to(tcp: TcpStream) -> Listening {
        let heard = Arc::new(Heard { since: Instant::now(), last: AtomicU64::new(0) });
        Listening { tcp, heard }
    }

    pub fn heard(&self) -> &Arc<Heard> {
        &self.heard
    }
}

impl AsyncRead for Listening {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.tcp).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.heard.note();
        }
        polled
    }
}

impl AsyncWrite for Listening {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tcp).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(context)
    }
}
