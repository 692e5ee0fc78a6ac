//! Definitions by content and by id.

use bytes::Bytes;
use farshore_model::DictionaryId;
use std::collections::HashMap;

/// All definitions that were made by this process or are retained on disk. Nothing is forgotten
/// while the process lives: capture may still hold an id whose segment was dropped.
#[derive(Debug)]
pub(crate) struct Dictionary {
    by_content: HashMap<Bytes, DictionaryId>,
    by_id: HashMap<DictionaryId, Bytes>,
    next: u32,
}

impl Dictionary {
    /// A dictionary whose first new id is `next` or higher.
    pub fn new(next: u32) -> Dictionary {
        Dictionary { by_content: HashMap::new(), by_id: HashMap::new(), next: next.max(1) }
    }

    /// Takes in a definition found on disk.
    pub fn restore(&mut self, id: DictionaryId, definition: &[u8]) {
        self.next = self.next.max(id.0.saturating_add(1));
        if !self.by_id.contains_key(&id) {
            // Copied: a slice would keep its whole block in memory.
            let definition = Bytes::copy_from_slice(definition);
            self.by_content.insert(definition.clone(), id);
            self.by_id.insert(id, definition);
        }
    }

    /// The id of a definition, a new one if it is new.
    pub fn define(&mut self, definition: &[u8]) -> DictionaryId {
        if let Some(id) = self.by_content.get(definition) {
            return *id;
        }
        let id = DictionaryId(self.next);
        self.restore(id, definition);
        id
    }

    pub fn get(&self, id: DictionaryId) -> Option<&Bytes> {
        self.by_id.get(&id)
    }

    /// The lowest id never given out.
    pub fn next(&self) -> u32 {
        self.next
    }
}
