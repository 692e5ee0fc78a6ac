//! A relay on the loopback that counts what the publisher sends, in the same way for everybody who
//! connects through it. Its own CPU time is this program's, not a server's.

use anyhow::{Context, Result};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Bytes passed on at a time.
const CHUNK: usize = 128 << 10;

/// A port that leads to a server. Dropping it closes every connection through it.
#[derive(Debug)]
pub struct Relay {
    port: u16,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Bytes that came from the server.
    sent: AtomicU64,
    closed: AtomicBool,
    /// Both ends of every connection that lives, so that they can be closed.
    open: Mutex<Vec<(u64, [TcpStream; 2])>>,
}

impl Relay {
    /// Listens on a free port.
    ///
    /// # Errors
    /// When there is none.
    pub fn to(port: u16) -> Result<Relay> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("listen")?;
        let own = listener.local_addr().context("learn the relay's port")?.port();
        let shared = Arc::new(Shared::default());
        let server = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let accepting = std::thread::spawn({
            let shared = shared.clone();
            move || accept(&listener, server, &shared)
        });
        Ok(Relay { port: own, shared, accepting: Some(accepting) })
    }

    /// Where to connect.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Bytes that the server has sent so far.
    pub fn bytes_sent(&self) -> u64 {
        self.shared.sent.load(Ordering::Relaxed)
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.closed.store(true, Ordering::SeqCst);
        // Wakes the thread that accepts, which then sees that it is over.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
        if let Some(accepting) = self.accepting.take() {
            let _ = accepting.join();
        }
        for (_, ends) in self.shared.connections().iter() {
            close(ends);
        }
    }
}

impl Shared {
    fn connections(&self) -> std::sync::MutexGuard<'_, Vec<(u64, [TcpStream; 2])>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn close(ends: &[TcpStream; 2]) {
    for end in ends {
        // Fails where the other side was first.
        let _ = end.shutdown(Shutdown::Both);
    }
}

fn accept(listener: &TcpListener, server: SocketAddr, shared: &Arc<Shared>) {
    for (number, client) in (0..).zip(listener.incoming()) {
        if shared.closed.load(Ordering::SeqCst) {
            return;
        }
        // A client that cannot be served sees its connection closed, and says so.
        let _ = client.and_then(|client| serve(number, client, server, shared));
    }
}

fn serve(
    number: u64,
    client: TcpStream,
    server: SocketAddr,
    shared: &Arc<Shared>,
) -> std::io::Result<()> {
    let upstream = TcpStream::connect(server)?;
    for stream in [&client, &upstream] {
        stream.set_nodelay(true)?;
    }
    shared.connections().push((number, [client.try_clone()?, upstream.try_clone()?]));
    let (from_client, to_server) = (client.try_clone()?, upstream.try_clone()?);
    std::thread::spawn({
        let shared = shared.clone();
        move || {
            pass(from_client, to_server, None);
            let mut open = shared.connections();
            if let Some(at) = open.iter().position(|(other, _)| *other == number) {
                // Ends the other direction too.
                close(&open.swap_remove(at).1);
            }
        }
    });
    let shared = shared.clone();
    std::thread::spawn(move || pass(upstream, client, Some(&shared.sent)));
    Ok(())
}

/// Passes on until either side is gone; then the other side learns it too.
fn pass(mut from: TcpStream, mut to: TcpStream, counter: Option<&AtomicU64>) {
    let mut chunk = vec![0; CHUNK];
    while let Ok(length @ 1..) = from.read(&mut chunk) {
        if let Some(counter) = counter {
            counter.fetch_add(length as u64, Ordering::Relaxed);
        }
        if to.write_all(&chunk[..length]).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_the_server_sends_and_closes_what_it_carries() {
        let server = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let relay = Relay::to(server.local_addr().unwrap().port()).unwrap();
        let mut client = TcpStream::connect((Ipv4Addr::LOCALHOST, relay.port())).unwrap();
        let (mut serving, _) = server.accept().unwrap();
        client.write_all(b"question").unwrap();
        let mut asked = [0; 8];
        serving.read_exact(&mut asked).unwrap();
        assert_eq!(&asked, b"question");
        serving.write_all(b"an answer").unwrap();
        let mut answer = [0; 9];
        client.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"an answer");
        assert_eq!(relay.bytes_sent(), 9);
        drop(relay);
        assert!(matches!(client.read(&mut answer), Ok(0) | Err(_)));
        assert!(matches!(serving.read(&mut asked), Ok(0) | Err(_)));
    }
}
