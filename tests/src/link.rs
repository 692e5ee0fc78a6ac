//! A link between two parts that a test can cut.

use anyhow::{Context, Result};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

#[derive(Debug, Default)]
struct State {
    /// Nothing passes, and nobody is told.
    stalled: bool,
    /// Every connection is refused or broken off.
    cut: bool,
    /// The port at the far end.
    to: u16,
    open: Vec<TcpStream>,
    /// Bytes that have passed, both ways.
    passed: u64,
    /// Connections are broken off whenever so many bytes more have passed.
    cut_every: Option<u64>,
    cut_at: u64,
}

impl State {
    fn break_off(&mut self) {
        for stream in self.open.drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// What each piece takes on its way.
    delay: Duration,
}

impl Shared {
    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    /// Lets the time of the way pass, and waits while the link is stalled; false when it is cut.
    fn pass(&self, bytes: usize) -> bool {
        std::thread::sleep(self.delay);
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_while(state, |state| state.stalled && !state.cut);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        state.passed += bytes as u64;
        if let Some(every) = state.cut_every.filter(|_| state.passed >= state.cut_at) {
            state.cut_at = state.passed + every;
            state.break_off();
            return false;
        }
        !state.cut
    }
}

/// A TCP forwarder to a port on this machine. Dropping it cuts it for good.
#[derive(Debug)]
pub struct Link {
    port: u16,
    shared: Arc<Shared>,
}

impl Link {
    /// Forwards a port of its own to `to`.
    ///
    /// # Errors
    /// When there is no free port.
    pub fn to(to: u16) -> Result<Link> {
        Link::far(to, Duration::ZERO)
    }

    /// As [`Link::to`], where every piece takes so long on its way, there and back. Nothing is sent
    /// meanwhile on the same connection, so it is narrow too.
    ///
    /// # Errors
    /// When there is no free port.
    pub fn far(to: u16, delay: Duration) -> Result<Link> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("listen")?;
        let port = listener.local_addr()?.port();
        let shared = Arc::new(Shared { delay, ..Shared::default() });
        shared.change(|state| state.to = to);
        let ours = shared.clone();
        // Ends with the test's process: a listener has no other way to be woken.
        std::thread::spawn(move || {
            for incoming in listener.incoming().flatten() {
                let to = ours.state.lock().unwrap_or_else(PoisonError::into_inner).to;
                let Ok(outgoing) = TcpStream::connect((Ipv4Addr::LOCALHOST, to)) else { continue };
                forward(&ours, incoming, outgoing);
            }
        });
        Ok(Link { port, shared })
    }

    /// The port to connect to.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// From now on nothing passes, in either direction, and both ends believe that the other is
    /// there and says nothing.
    pub fn stall(&self) {
        self.shared.change(|state| state.stalled = true);
    }

    /// Breaks off every connection, and every new one.
    pub fn cut(&self) {
        self.shared.change(|state| {
            state.cut = true;
            state.break_off();
        });
    }

    /// From now on every connection is broken off whenever so many bytes have passed on all of them.
    pub fn cut_every(&self, bytes: u64) {
        self.shared.change(|state| {
            (state.cut_every, state.cut_at) = (Some(bytes), state.passed + bytes);
        });
    }

    /// Bytes that have passed so far, both ways.
    pub fn passed(&self) -> u64 {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner).passed
    }

    /// New connections go to this port.
    pub fn redirect(&self, to: u16) {
        self.shared.change(|state| state.to = to);
    }

    /// Everything passes again. What was broken off stays so.
    pub fn mend(&self) {
        self.shared.change(|state| {
            (state.stalled, state.cut, state.cut_every) = (false, false, None);
        });
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.cut();
    }
}

fn forward(shared: &Arc<Shared>, one: TcpStream, other: TcpStream) {
    let ends = [(&one, &other), (&other, &one)];
    let pairs = ends.map(|(from, to)| Some((from.try_clone().ok()?, to.try_clone().ok()?)));
    for (mut from, mut to) in pairs.into_iter().flatten() {
        let shared = shared.clone();
        std::thread::spawn(move || {
            let mut buffer = vec![0; 64 << 10];
            loop {
                match from.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(read) if shared.pass(read) && to.write_all(&buffer[..read]).is_ok() => {}
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Ok(_) | Err(_) => break,
                }
            }
            let _ = to.shutdown(Shutdown::Both);
            let _ = from.shutdown(Shutdown::Both);
        });
    }
    shared.change(|state| {
        if state.cut {
            let _ = one.shutdown(Shutdown::Both);
        } else {
            state.open.push(one);
        }
    });
}
