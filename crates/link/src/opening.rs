//! Sessions whose connections are coming together.

use crate::handshake::{CONNECTIONS_MAX, Hello, SessionId};
use crate::wire::Wire;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::mpsc;

/// A session is known by its site too, so that no site can join another's.
type Key = (String, SessionId);

/// By session, what its first connection said and where the others are awaited.
#[derive(Clone, Default)]
pub(crate) struct Openings(Arc<Mutex<HashMap<Key, Expected>>>);

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
        let mut openings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Entry::Vacant(vacant) = openings.entry(key.clone()) else {
            return Err("a session of this number is being opened already".to_owned());
        };
        let (stripes, window_bytes) = (hello.stripes, hello.window_bytes);
        vacant.insert(Expected { stripes, window_bytes, joined });
        drop(openings);
        let missing = stripes - 1;
        Ok(Opening { openings: self.clone(), key, joining, missing })
    }

    /// A further connection is here. The error gives it back, and is for the peer and the log.
    pub(crate) fn join(&self, site: &str, hello: &Hello, wire: Wire) -> Result<(), (Wire, String)> {
        let openings = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(expected) = openings.get(&(site.to_owned(), hello.session)) else {
            let what = "it joins a session that is not being opened here";
            return Err((wire, what.to_owned()));
        };
        if (expected.stripes, expected.window_bytes) != (hello.stripes, hello.window_bytes) {
            let what = "it does not agree with the first connection of its session";
            return Err((wire, what.to_owned()));
        }
        let (stripe, joined) = (hello.stripe, &expected.joined);
        joined.try_send((stripe, wire)).map_err(|error| {
            let (_, wire) = error.into_inner();
            (wire, "its session has all its connections".to_owned())
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
        let mut openings = self.openings.0.lock().unwrap_or_else(PoisonError::into_inner);
        openings.remove(&self.key);
    }
}
