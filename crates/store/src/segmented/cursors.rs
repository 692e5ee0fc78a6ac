//! Cursors and notes: small maps in memory, each kept in a file that is replaced as a whole.
//!
//! A cursor on disk may lag behind the one in memory, never lead: forward moves are saved at
//! leisure, everything else (registering, dropping, moving back, expiring) before it counts.

use super::folder::write_small;
use super::segment::lock;
use crate::{Cursor, StoreError};
use farshore_fault as fault;
use farshore_model::{Applied, Lsn};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
struct StoredCursor {
    name: String,
    applied: String,
    expired: Option<String>,
}

/// The cursor file's body.
#[derive(Serialize, Deserialize, Debug, Clone, PartialEq, Eq)]
struct StoredCursors {
    store_id: String,
    /// A position that was durable when the file was written: the log cannot be shorter.
    log_end: String,
    cursors: Vec<StoredCursor>,
}

/// What the cursor file said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SavedCursors {
    pub store_id: u64,
    pub log_end: Lsn,
    pub cursors: Vec<Cursor>,
}

impl SavedCursors {
    /// `None` if the body is not what we write.
    pub fn parse(body: &str) -> Option<SavedCursors> {
        let stored: StoredCursors = serde_json::from_str(body).ok()?;
        let cursors = stored.cursors.into_iter().map(|cursor| {
            let expired = match cursor.expired {
                Some(text) => Some(text.parse().ok()?),
                None => None,
            };
            Some(Cursor {
                name: cursor.name,
                applied: Applied(cursor.applied.parse().ok()?),
                expired,
            })
        });
        Some(SavedCursors {
            store_id: u64::from_str_radix(&stored.store_id, 16).ok()?,
            log_end: stored.log_end.parse().ok()?,
            cursors: cursors.collect::<Option<_>>()?,
        })
    }
}

/// The cursors in memory.
#[derive(Debug, Default)]
pub(crate) struct CursorState {
    pub by_name: BTreeMap<String, Cursor>,
    /// Counts changes.
    pub version: u64,
    /// A change that counts from when it is on the disk is not there yet: saving it may have failed.
    pub owed: bool,
    /// The version the file holds.
    saved: u64,
    stopping: bool,
}

/// The cursors and their file.
#[derive(Debug)]
pub(crate) struct Cursors {
    path: PathBuf,
    store_id: u64,
    /// Held for a moment only, never across IO.
    pub state: Mutex<CursorState>,
    /// Held while the file is written, so that an older state never replaces a newer one.
    writing: Mutex<()>,
    /// There is something to save, and nobody who is about to.
    changed: Condvar,
    /// The end has come, while a save is waited for: moves meanwhile wake nobody.
    stopped: Condvar,
}

impl Cursors {
    pub fn new(path: PathBuf, store_id: u64, cursors: Vec<Cursor>) -> Cursors {
        let by_name = cursors.into_iter().map(|cursor| (cursor.name.clone(), cursor)).collect();
        let state = CursorState { by_name, ..CursorState::default() };
        Cursors {
            path,
            store_id,
            state: Mutex::new(state),
            writing: Mutex::new(()),
            changed: Condvar::new(),
            stopped: Condvar::new(),
        }
    }

    /// Tells [`Cursors::keep_saved`] that a forward move waits to be saved.
    pub fn save_soon(&self) {
        self.changed.notify_all();
    }

    /// Writes the file if memory is ahead of it. `log_end` must be durable.
    pub fn save(&self, log_end: Lsn) -> Result<(), StoreError> {
        let _writing = lock(&self.writing);
        let (body, version) = {
            let state = lock(&self.state);
            if state.version == state.saved {
                return Ok(());
            }
            let cursors = state.by_name.values().map(|cursor| StoredCursor {
                name: cursor.name.clone(),
                applied: cursor.applied.to_string(),
                expired: cursor.expired.map(|lsn| lsn.to_string()),
            });
            let stored = StoredCursors {
                store_id: format!("{:016x}", self.store_id),
                log_end: log_end.to_string(),
                cursors: cursors.collect(),
            };
            (to_json(&stored), state.version)
        };
        fault::point("cursor.before-write");
        write_small(&self.path, "cursors", &body)?;
        fault::point("cursor.after-write");
        let mut state = lock(&self.state);
        state.saved = version;
        state.owed &= state.version != version;
        Ok(())
    }

    /// Saves forward moves, at most once per `interval`, until [`Cursors::stop`].
    pub fn keep_saved(&self, interval: Duration, log_end: impl Fn() -> Lsn) {
        let mut state = lock(&self.state);
        let mut failure = None;
        loop {
            while !state.stopping && state.version == state.saved {
                state = self.changed.wait(state).unwrap_or_else(|e| e.into_inner());
            }
            let until = Instant::now() + interval;
            while !state.stopping {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                let waited = self.stopped.wait_timeout(state, left);
                state = waited.unwrap_or_else(|e| e.into_inner()).0;
            }
            let stopping = state.stopping;
            drop(state);
            // Harmless: the file lags, so more log is kept. The next round tries again.
            let failed = self.save(log_end()).err().map(|error| error.to_string());
            match &failed {
                // Once: a full disk may be the log's own.
                Some(error) if failed != failure => {
                    tracing::warn!(%error, "cursors could not be saved; will try again");
                }
                Some(_) | None => {}
            }
            failure = failed;
            if stopping {
                return;
            }
            state = lock(&self.state);
        }
    }

    pub fn stop(&self) {
        lock(&self.state).stopping = true;
        self.changed.notify_all();
        self.stopped.notify_all();
    }
}

/// Maps of strings cannot fail to serialise; an empty object would be refused when read.
fn to_json<T: Serialize>(value: &T) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}

/// Small durable facts.
#[derive(Debug)]
pub(crate) struct Notes {
    path: PathBuf,
    by_key: Mutex<BTreeMap<String, String>>,
}

impl Notes {
    pub fn new(path: PathBuf, by_key: BTreeMap<String, String>) -> Notes {
        Notes { path, by_key: Mutex::new(by_key) }
    }

    pub fn parse(body: &str) -> Option<BTreeMap<String, String>> {
        serde_json::from_str(body).ok()
    }

    pub fn get(&self, key: &str) -> Option<String> {
        lock(&self.by_key).get(key).cloned()
    }

    /// Durable when it returns; unchanged if it fails.
    pub fn set(&self, key: &str, value: &str) -> Result<(), StoreError> {
        self.set_all([(key, value.to_owned())])
    }

    /// Sets several at once, or none of them if it fails.
    pub fn set_all<'a>(
        &self,
        notes: impl IntoIterator<Item = (&'a str, String)>,
    ) -> Result<(), StoreError> {
        let mut by_key = lock(&self.by_key);
        let mut changed = by_key.clone();
        changed.extend(notes.into_iter().map(|(key, value)| (key.to_owned(), value)));
        if *by_key != changed {
            write_small(&self.path, "notes", &to_json(&changed))?;
            *by_key = changed;
        }
        Ok(())
    }
}
