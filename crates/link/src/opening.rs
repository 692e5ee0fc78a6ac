//! Sessions whose connections are coming together.

use crate::handshake::{CONNECTIONS_MAX, Hello, SessionId};
use crate::wire::Wire;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout_at};

/// A session is known by its site too, so that no site can join another's.
type Key = (String, SessionId);

/// By session, what its first connection said and where the others are awaited.
#[derive(Clone, Default)]
pub(crate) struct Openings {
    expected: Arc<Mutex<HashMap<Key, Expected>>>,
    /// Changes with every session that is begun.
    begun: watch::Sender<()>,
}

/// Why a connection cannot join.
enum Refusal {
    /// Its session's first connection is not here.
    NotBegun,
    Told(&'static str),
}

struct Expected {
    stripes: u8,
    window_bytes: u64,
    joined: mpsc::Sender<(u8, Wire)>,
}

/// A session that waits for its further connections. Dropping it forgets the session.
pub(crate) struct Opening {
    openings: Openings,
    key: Key,
    joining: mpsc::Receiver<(u8, Wire)>,
    missing: u8,
}

impl Openings {
    /// The session's first connection is here. The error is for the peer and the log.
    pub(crate) fn begin(&self, site: &str, hello: &Hello) -> Result<Opening, String> {
        let key = (site.to_owned(), hello.session);
        let (joined, joining) = mpsc::channel(CONNECTIONS_MAX);
        let mut openings = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        let Entry::Vacant(vacant) = openings.entry(key.clone()) else {
            return Err("a session of this number is being opened already".to_owned());
        };
        let (stripes, window_bytes) = (hello.stripes, hello.window_bytes);
        vacant.insert(Expected { stripes, window_bytes, joined });
        drop(openings);
        self.begun.send_replace(());
        let missing = stripes - 1;
        Ok(Opening { openings: self.clone(), key, joining, missing })
    }

    /// A further connection is here, before its session's first one perhaps: that is waited for so
    /// long. The error gives it back, and is for the peer and the log.
    pub(crate) async fn join(
        &self,
        site: &str,
        hello: &Hello,
        mut wire: Wire,
        within: Duration,
    ) -> Result<(), (Wire, String)> {
        let until = Instant::now() + within;
        let mut begun = self.begun.subscribe();
        loop {
            begun.borrow_and_update();
            wire = match self.try_join(site, hello, wire) {
                Ok(()) => return Ok(()),
                Err((wire, Refusal::Told(why))) => return Err((wire, why.to_owned())),
                Err((wire, Refusal::NotBegun)) => wire,
            };
            if !matches!(timeout_at(until, begun.changed()).await, Ok(Ok(()))) {
                let why = format!(
                    "it joins a session that is not being opened here (whose first connection did \
                     not come within {within:?})"
                );
                return Err((wire, why));
            }
        }
    }

    fn try_join(&self, site: &str, hello: &Hello, wire: Wire) -> Result<(), (Wire, Refusal)> {
        let openings = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(expected) = openings.get(&(site.to_owned(), hello.session)) else {
            return Err((wire, Refusal::NotBegun));
        };
        if (expected.stripes, expected.window_bytes) != (hello.stripes, hello.window_bytes) {
            let what = "it does not agree with the first connection of its session";
            return Err((wire, Refusal::Told(what)));
        }
        let (stripe, joined) = (hello.stripe, &expected.joined);
        joined.try_send((stripe, wire)).map_err(|error| {
            let (_, wire) = error.into_inner();
            (wire, Refusal::Told("its session has all its connections"))
        })
    }
}

impl Opening {
    /// Waits for the further connections and puts them behind the first, each in its place. The
    /// error is for the peer and the log.
    pub(crate) async fn complete(&mut self, first: Wire) -> Result<Vec<Wire>, String> {
        let mut further: Vec<Option<Wire>> = Vec::new();
        further.resize_with(usize::from(self.missing), || None);
        while self.missing > 0 {
            // The sender is in the map until this is dropped.
            let Some((stripe, wire)) = self.joining.recv().await else { break };
            let place = usize::from(stripe).checked_sub(1).and_then(|at| further.get_mut(at));
            match place {
                Some(place @ None) => *place = Some(wire),
                _ => return Err(format!("its connection {stripe} came twice")),
            }
            self.missing -= 1;
        }
        Ok(std::iter::once(first).chain(further.into_iter().flatten()).collect())
    }

    /// How many further connections have not come.
    pub(crate) fn missing(&self) -> u8 {
        self.missing
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        let mut openings = self.openings.expected.lock().unwrap_or_else(PoisonError::into_inner);
        openings.remove(&self.key);
    }
}
