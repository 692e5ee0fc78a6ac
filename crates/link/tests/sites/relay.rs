//! Something between two sites that may fail them.

use anyhow::Result;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, tcp};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// What happens to bytes on their way.
#[derive(Default)]
pub struct Fate {
    /// They vanish, and connections stay open.
    pub swallowed: AtomicBool,
    /// They come in drops of so many, 20 ms apart; 0 is as they are.
    pub drop_bytes: AtomicUsize,
    /// One bit of the next bytes from the dialer is turned over.
    pub flip: AtomicBool,
    /// Bytes that went through, both ways.
    pub carried: AtomicU64,
}

pub struct Relay {
    pub address: SocketAddr,
    pub fate: Arc<Fate>,
    cut: watch::Sender<bool>,
    _carrying: JoinSet<()>,
}

impl Relay {
    pub async fn to(target: SocketAddr) -> Result<Relay> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let fate = Arc::new(Fate::default());
        let (cut, was_cut) = watch::channel(false);
        let mut carrying = JoinSet::new();
        carrying.spawn(accept(listener, target, fate.clone(), was_cut));
        Ok(Relay { address, fate, cut, _carrying: carrying })
    }

    /// All connections are closed at once, in the middle of whatever they carry.
    pub fn cut(&self) {
        self.cut.send_replace(true);
    }
}

async fn accept(
    listener: TcpListener,
    target: SocketAddr,
    fate: Arc<Fate>,
    was_cut: watch::Receiver<bool>,
) {
    let mut pipes = JoinSet::new();
    while let Ok((near, _)) = listener.accept().await {
        let Ok(far) = TcpStream::connect(target).await else { continue };
        let (fate, mut was_cut) = (fate.clone(), was_cut.clone());
        pipes.spawn(async move {
            let ((near_read, near_write), (far_read, far_write)) =
                (near.into_split(), far.into_split());
            tokio::select! {
                _ = was_cut.wait_for(|cut| *cut) => {}
                _ = async { tokio::join!(
                    carry(near_read, far_write, &fate, true),
                    carry(far_read, near_write, &fate, false),
                ) } => {}
            }
        });
    }
}

async fn carry(
    mut from: tcp::OwnedReadHalf,
    mut to: tcp::OwnedWriteHalf,
    fate: &Fate,
    from_dialer: bool,
) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        if fate.swallowed.load(SeqCst) {
            continue;
        }
        if from_dialer && fate.flip.swap(false, SeqCst) {
            buffer[count / 2] ^= 0x10;
        }
        let whole = |bytes: usize| if bytes == 0 { count } else { bytes };
        let mut left = &buffer[..count];
        while !left.is_empty() {
            let drop_bytes = fate.drop_bytes.load(SeqCst);
            if drop_bytes > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            let (now, later) = left.split_at(whole(drop_bytes).min(left.len()));
            if to.write_all(now).await.is_err() {
                return;
            }
            left = later;
        }
        fate.carried.fetch_add(count as u64, SeqCst);
    }
    if fate.swallowed.load(SeqCst) {
        // The end of a connection vanishes too.
        std::future::pending::<()>().await;
    }
    let _ = to.shutdown().await;
}
