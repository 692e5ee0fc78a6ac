use crate::publication::PublishedTable;
use crate::snapshot::SeenTables;
use ring::rand::{SecureRandom, SystemRandom};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// The snapshots that channels of this site have exported and still keep.
#[derive(Debug, Default)]
pub struct Registry {
    exported: Mutex<HashMap<String, Exported>>,
}

#[derive(Debug)]
struct Exported {
    publication: String,
    /// What the publisher calls it.
    name: String,
    /// What it is a snapshot of.
    seen: SeenTables,
    /// Its tables, as a session in it has read them.
    tables: Option<Arc<Vec<PublishedTable>>>,
}

/// A snapshot in the registry, until this is dropped.
pub(super) struct Registered<'a> {
    registry: &'a Registry,
    /// What sessions ask for; nobody can guess it.
    pub id: String,
}

impl Registry {
    /// Adds a snapshot of a publication; `None` if the operating system has no random bytes.
    pub(super) fn add(
        &self,
        publication: &str,
        name: &str,
        seen: &SeenTables,
    ) -> Option<Registered<'_>> {
        let mut random = [0_u8; 16];
        SystemRandom::new().fill(&mut random).ok()?;
        let id: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        let (publication, name) = (publication.to_owned(), name.to_owned());
        let exported = Exported { publication, name, seen: seen.clone(), tables: None };
        self.lock().insert(id.clone(), exported);
        Some(Registered { registry: self, id })
    }

    /// What the publisher calls a snapshot of this publication, and what it is a snapshot of.
    pub(super) fn find(&self, publication: &str, id: &str) -> Option<(String, SeenTables)> {
        let exported = self.lock();
        let found = exported.get(id).filter(|found| found.publication == publication);
        found.map(|found| (found.name.clone(), found.seen.clone()))
    }

    /// The publication's tables in a snapshot, once a session has read them. (To read them takes
    /// locks, and may wait for whoever wants a table for itself.)
    pub(super) fn tables(&self, id: &str) -> Option<Arc<Vec<PublishedTable>>> {
        self.lock().get(id).and_then(|exported| exported.tables.clone())
    }

    /// Keeps what a session has read, as long as the snapshot.
    pub(super) fn keep_tables(&self, id: &str, tables: &Arc<Vec<PublishedTable>>) {
        if let Some(exported) = self.lock().get_mut(id) {
            exported.tables = Some(tables.clone());
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Exported>> {
        self.exported.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.registry.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn snapshots_are_found_by_their_own_publication_while_they_are_kept() {
        let registry = Registry::default();
        let (seen, none) = (SeenTables::new([7].into()), SeenTables::default());
        let one = registry.add("orders", "1-1", &seen).unwrap();
        let other = registry.add("orders", "1-2", &none).unwrap();
        assert_ne!(one.id, other.id);
        assert_eq!(one.id.len(), 32);
        assert_eq!(registry.find("orders", &one.id), Some(("1-1".to_owned(), seen)));
        assert_eq!(registry.find("people", &one.id), None);
        let id = one.id.clone();
        drop(one);
        assert_eq!(registry.find("orders", &id), None);
        assert_eq!(registry.find("orders", &other.id), Some(("1-2".to_owned(), none)));
    }
}
