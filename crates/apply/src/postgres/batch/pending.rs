//! The batches of all tables, between two times that they are sent.

use super::{Batch, Planned, References};
use crate::netting::Taken;
use crate::postgres::foreign_keys::{ForeignKeys, Place, Places};
use crate::postgres::statements::TargetRelation;
use crate::row_by_row::RowByRow;
use crate::scheduler::batch_factor;
use bytes::Bytes;
use farshore_capture::publication::TableName;
use farshore_model::{DictionaryId, Lsn};
use farshore_wire::pgoutput::stored::Stored;
use std::collections::HashMap;

/// Bytes of changes that are held before they are sent; more over many tables ([`batch_factor`]).
const PENDING_BYTES_MAX: usize = 4 << 20;

/// Bytes of bodies that may be kept in memory for what is held of them; over many tables more, as
/// what is held.
const HELD_BYTES_MAX: usize = 16 << 20;

/// And never more than this.
const HELD_BYTES_MOST: usize = 96 << 20;

/// Bytes of changes of one relation that are held: more in a statement gains nothing.
const RELATION_BYTES_MAX: usize = 16 << 20;

/// Changes that are held: each takes memory of its own, however small it is.
const CHANGES_MAX: usize = 200_000;

/// A change larger than this is not held: it goes by itself.
const CHANGE_BYTES_MAX: usize = 256 << 10;

/// What became of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Offered {
    /// It is in.
    Taken,
    /// It is in, and what is held is to be sent now.
    Full,
    /// It is to be applied by itself, now.
    RowByRow,
    /// The changes of its relation must be sent first.
    SendTable,
    /// Everything must be sent first.
    SendAll,
}

/// Relations and their batches.
pub struct Batches {
    row_by_row: RowByRow,
    relations: HashMap<DictionaryId, Known>,
    /// A number for each table, whatever version of it.
    tables: HashMap<TableName, u32>,
    /// Of the foreign keys that fire.
    places: Places,
    references: References,
    /// Relations with changes, in the order of their first.
    pending: Vec<(u32, DictionaryId)>,
    bytes: usize,
    changes: usize,
    /// Bytes of the bodies that what is pending is a part of, and keeps in memory.
    held: usize,
}

struct Known {
    table: u32,
    row_by_row_until: Lsn,
    /// `None` where every change is a statement of its own.
    batch: Option<Batch>,
    /// Changes that are a statement of their own come after everything before them.
    in_order: bool,
    place: Place,
    /// Bytes of its changes that are held.
    bytes: usize,
}

impl Batches {
    /// Nothing is known.
    pub fn new(row_by_row: RowByRow, foreign_keys: ForeignKeys) -> Batches {
        let (places, references) = (foreign_keys.places(), References::new(foreign_keys));
        Batches {
            row_by_row,
            relations: HashMap::new(),
            tables: HashMap::new(),
            places,
            references,
            pending: Vec::new(),
            bytes: 0,
            changes: 0,
            held: 0,
        }
    }

    /// Whether [`Batches::learn`] was called for it.
    pub fn is_known(&self, relation: DictionaryId) -> bool {
        self.relations.contains_key(&relation)
    }

    /// Makes a relation known.
    pub fn learn(&mut self, id: DictionaryId, target: &TargetRelation, planned: Planned) {
        let next = self.tables.len() as u32;
        let table = *self.tables.entry(target.table.clone()).or_insert(next);
        let place = self.places.of(&target.table);
        let is_parent = self.places.is_parent(&target.table);
        let known = Known {
            table,
            row_by_row_until: self.row_by_row.until(&target.table),
            in_order: planned == Planned::InOrder || place != Place::Free,
            place,
            bytes: 0,
            batch: match planned {
                Planned::Batch(plan) if place != Place::InCircle => {
                    Some(Batch::new(id, target, plan, is_parent, &self.references))
                }
                Planned::Batch(_) | Planned::Alone | Planned::InOrder => None,
            },
        };
        self.relations.insert(id, known);
    }

    /// Makes a relation unknown that has no changes here.
    pub fn forget(&mut self, relation: DictionaryId) {
        self.relations.remove(&relation);
        self.pending.retain(|(_, pending)| *pending != relation);
    }

    /// The batch of a relation, if it has one, and the number of its table.
    pub fn get_mut(&mut self, relation: DictionaryId) -> Option<(u32, &mut Batch)> {
        let known = self.relations.get_mut(&relation)?;
        Some((known.table, known.batch.as_mut()?))
    }

    /// Relations with changes, parents before their children; the caller sends them.
    pub fn take_pending(&mut self) -> Vec<DictionaryId> {
        (self.bytes, self.changes, self.held) = (0, 0, 0);
        let mut pending: Vec<DictionaryId> =
            self.pending.drain(..).map(|(_, relation)| relation).collect();
        pending.sort_by_key(|relation| match self.relations.get(relation).map(|r| r.place) {
            Some(Place::Behind(number)) => number,
            Some(Place::Free | Place::InCircle) | None => 0,
        });
        pending
    }

    /// Parts of a body have been taken; true when so much is kept in memory that what is pending
    /// is to be sent now.
    pub fn holds(&mut self, body: &Bytes) -> bool {
        self.held += body.len();
        self.held >= (HELD_BYTES_MAX * self.factor()).min(HELD_BYTES_MOST)
    }

    fn factor(&self) -> usize {
        batch_factor(self.pending.len()) as usize
    }

    /// Offers a row change of a known relation. The changes of one table are applied in their
    /// order: as a net effect, or one after the other, but never out of turn.
    pub fn offer(
        &mut self,
        change: &Stored<'_>,
        relation: DictionaryId,
        position: Lsn,
        bytes: usize,
        body: &Bytes,
    ) -> Offered {
        let Some(known) = self.relations.get_mut(&relation) else { return Offered::RowByRow };
        let table = known.table;
        let is_pending =
            |pending: &[(u32, DictionaryId)]| pending.iter().any(|(other, _)| *other == table);
        let batch = match &mut known.batch {
            Some(batch) if position > known.row_by_row_until => batch,
            // Another version of the table may have changes here.
            _ if is_pending(&self.pending) => return Offered::SendAll,
            _ if known.in_order && !self.pending.is_empty() => return Offered::SendAll,
            _ => return Offered::RowByRow,
        };
        let first = batch.netting.is_empty();
        let by_itself = match first {
            _ if known.in_order && !self.pending.is_empty() => Offered::SendAll,
            true => Offered::RowByRow,
            false => Offered::SendTable,
        };
        if first && self.pending.iter().any(|(other, id)| *other == table && *id != relation) {
            return Offered::SendAll;
        }
        if bytes > CHANGE_BYTES_MAX {
            return by_itself;
        }
        let taken = match change {
            Stored::Insert { new, .. } => batch.netting.insert(*new, body),
            Stored::Update { old, new, .. } => batch.netting.update(*old, *new, body),
            Stored::Delete { old, .. } => batch.netting.delete(*old, body),
            Stored::Truncate { .. } | Stored::Message { .. } | Stored::SubtransactionMark(_) => {
                return Offered::RowByRow;
            }
        };
        match taken {
            Taken::In => {}
            Taken::Barrier => return by_itself,
        }
        if first && !self.pending.contains(&(table, relation)) {
            self.pending.push((table, relation));
        }
        // What was held of it before has been sent.
        known.bytes = if first { bytes } else { known.bytes + bytes };
        self.bytes += bytes;
        self.changes += 1;
        let is_full = known.bytes >= RELATION_BYTES_MAX
            || self.changes >= CHANGES_MAX
            || self.bytes >= PENDING_BYTES_MAX * self.factor();
        if is_full { Offered::Full } else { Offered::Taken }
    }
}
