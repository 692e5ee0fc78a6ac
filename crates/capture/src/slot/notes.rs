//! What a store notes of where its log comes from: the slot that feeds it, on which server.

use farshore_model::Lsn;
use farshore_store::LogStore;

/// Notes in the store about where its log comes from.
pub(super) const NOTE_SYSTEM: &str = "publisher.system_identifier";
pub(super) const NOTE_TIMELINE: &str = "publisher.timeline";
pub(super) const NOTE_SLOT: &str = "slot.name";
/// The slot that we were about to make; empty once the publisher has refused that.
pub(super) const NOTE_CREATING: &str = "slot.creating";
pub(super) const NOTE_START: &str = "slot.start";
/// That the publisher has lost what the store holds, in words; empty where it was another server.
pub(super) const NOTE_LOST: &str = "publisher.lost";
/// The server on which that was found, as the site file names it.
pub(super) const NOTE_LOST_ON: &str = "publisher.lost_on";

/// Where the log of a store begins: changes before it were never in it. `None` until capture has
/// made or adopted its slot.
pub fn log_begins(store: &dyn LogStore) -> Option<Lsn> {
    store.note(NOTE_START)?.parse().ok()
}

/// Whether a store's log is that of another site's.
pub fn is_replica(store: &dyn LogStore) -> bool {
    store.note(NOTE_START).is_some() && store.note(NOTE_SLOT).is_none()
}

/// Notes in a store that is to be a replica of another site's where its log begins, and which
/// publisher it comes from.
pub fn begin_replica(
    store: &dyn LogStore,
    publisher: &str,
    begins: Lsn,
) -> Result<(), farshore_store::StoreError> {
    store.set_note(NOTE_SYSTEM, publisher)?;
    store.set_note(NOTE_START, &begins.to_string())
}

/// How far a store is with its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begun {
    /// Nothing was done.
    Not,
    /// It was about to be made: it may be there, or half there, or not.
    Making,
    /// It was made or adopted, and feeds the store.
    Made,
}

/// What a store's notes say of its slot.
pub fn begun(note: impl Fn(&str) -> Option<String>) -> Begun {
    match (note(NOTE_START), note(NOTE_CREATING).filter(|slot| !slot.is_empty())) {
        (Some(_), _) => Begun::Made,
        (None, Some(_)) => Begun::Making,
        (None, None) => Begun::Not,
    }
}

/// The slot that feeds a store, as far as its notes tell.
pub fn noted_slot(note: impl Fn(&str) -> Option<String>) -> Option<String> {
    note(NOTE_SLOT)
}

/// The publisher's system identifier, as far as the store knows it.
pub fn publisher_identity(store: &dyn LogStore) -> Option<String> {
    store.note(NOTE_SYSTEM)
}

/// The publisher's timeline when capture last connected to it; `None` in a replica of another site's
/// store.
pub fn timeline(store: &dyn LogStore) -> Option<String> {
    store.note(NOTE_TIMELINE)
}
