//! The net effect of consecutive changes on one table, key by key. Pure.
//!
//! A batch of source transactions becomes one target transaction, so only what a row is at its end
//! can be seen. Changes are taken in one by one in commit order; afterwards every key has one
//! effect: nothing, an insert, an update, a delete, or a delete and an insert. Applied as all
//! deletes, then all updates, then all inserts, they give the table that the changes one by one
//! would have given.
//!
//! Rows are known by the bytes of their key values. That is how the publisher tells rows apart
//! too: an update that changes the bytes of a key is sent with the old key, also where the key's
//! type calls both equal (`1.0` and `1.00`, or two spellings in citext).
//!
//! Where the publisher sends whole old rows (`REPLICA IDENTITY FULL`) rows are netted by a key that
//! the target has. Nothing says that the publisher has that key too, so each old row must be just
//! what the changes before it have left under its key, and what the target is asked for is the
//! whole old row.
//!
//! What cannot be netted is handed back ([`Taken::Barrier`]): the caller applies what is here and
//! then that change by itself. Nothing is taken in of a change that is handed back.

use bytes::Bytes;
use farshore_fault as fault;
use farshore_wire::pgoutput::{OldTuple, Tuple, Value, encode};
use hashbrown::HashTable;
use std::hash::{BuildHasher, Hasher, RandomState};

/// Keys that a netting keeps memory for when it is empty.
const KEPT_MAX: usize = 32;

/// What a key's changes come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// There was no such row before and there is none now.
    Nothing,
    /// A row that was not there before.
    Insert(Bytes),
    /// New values for a row that was there; unchanged ones are marked so.
    Update(Bytes),
    /// The row is gone.
    Delete,
    /// The row is gone and another has its key.
    Replace(Bytes),
}

impl Effect {
    /// The row that is inserted.
    pub fn inserted(&self) -> Option<&Bytes> {
        match self {
            Effect::Insert(row) | Effect::Replace(row) => Some(row),
            Effect::Nothing | Effect::Update(_) | Effect::Delete => None,
        }
    }
}

/// One key and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Net {
    /// TupleData that has the key's values; of a row that was there before, where whole old rows
    /// are sent, all of that row's.
    pub identity: Bytes,
    /// What became of it.
    pub effect: Effect,
    /// Of its key, as in [`Netting::hashes`]; 0 without a key.
    pub hash: u64,
}

/// What became of a change that was offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Taken {
    /// It is part of the net effect.
    In,
    /// It cannot be netted with what is here.
    Barrier,
}

/// The table whose changes are netted, as one version of its definition has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetTable {
    /// Columns of the table's tuples.
    pub columns: usize,
    /// Columns of the key, ascending; empty when rows have none, and then only inserts are netted.
    pub key: Vec<usize>,
    /// Updates and deletes come with the whole old row, which is what identifies it.
    pub whole_old_rows: bool,
    /// A row must not be deleted and put back where the publisher kept it: the target's table has
    /// columns of its own, or foreign keys refer to it.
    pub moves_in_place: bool,
}

/// Net effects, in the order in which their keys were first met.
#[derive(Debug)]
pub struct Netting {
    table: NetTable,
    nets: Vec<Net>,
    held_back: Vec<Net>,
    index: HashTable<u32>,
    hasher: RandomState,
}

/// What one look at a tuple tells.
#[derive(Clone, Copy)]
struct Look {
    /// Of the key's values.
    hash: u64,
    /// A value is missing because it has not changed.
    unchanged: bool,
    /// A value of the key is among those.
    key_unchanged: bool,
}

impl Netting {
    /// Nothing has changed yet.
    pub fn new(table: NetTable) -> Netting {
        Netting {
            table,
            nets: Vec::new(),
            held_back: Vec::new(),
            index: HashTable::new(),
            hasher: RandomState::new(),
        }
    }

    /// What is netted.
    pub fn table(&self) -> &NetTable {
        &self.table
    }

    /// Nothing has been taken in.
    pub fn is_empty(&self) -> bool {
        self.nets.is_empty()
    }

    /// The effects, in the order in which their keys were first met.
    pub fn nets(&self) -> &[Net] {
        &self.nets
    }

    /// Hashes of the keys that have changes: equal for equal keys, for as long as this lives.
    pub fn hashes(&self) -> impl Iterator<Item = u64> + Clone {
        let keyed = if self.table.key.is_empty() { &[][..] } else { &self.nets[..] };
        keyed.iter().map(|net| net.hash)
    }

    /// Puts these effects aside until [`Netting::take_back`], beside what was put aside before.
    /// Effects on different keys may be applied in any order. True when there are any; nothing may
    /// be taken in before they are back.
    pub fn hold_back(&mut self, is_wanted: impl FnMut(&Net) -> bool) -> bool {
        let wanted: Vec<bool> = self.nets.iter().map(is_wanted).collect();
        if !wanted.contains(&true) {
            return false;
        }
        let nets = std::mem::take(&mut self.nets);
        for (net, is_wanted) in nets.into_iter().zip(wanted) {
            if is_wanted { self.held_back.push(net) } else { self.nets.push(net) }
        }
        true
    }

    /// What is put aside.
    pub fn held_back(&self) -> &[Net] {
        &self.held_back
    }

    /// What was held back is all that there is now.
    pub fn take_back(&mut self) {
        self.nets = std::mem::take(&mut self.held_back);
    }

    /// Forgets everything but what is held back, and keeps a little memory for the next batch: there
    /// may be thousands of tables.
    pub fn clear(&mut self) {
        self.nets.clear();
        self.nets.shrink_to(KEPT_MAX);
        self.index.clear();
        if self.index.capacity() > 2 * KEPT_MAX {
            self.index = HashTable::new();
        }
    }

    /// Takes in an insert; `new` lies in `body`.
    pub fn insert(&mut self, new: Tuple<'_>, body: &Bytes) -> Taken {
        let Some(look) = self.look(new) else { return Taken::Barrier };
        if look.unchanged {
            return Taken::Barrier;
        }
        let row = body.slice_ref(new.as_bytes());
        if self.table.key.is_empty() {
            self.nets.push(Net { identity: Bytes::new(), effect: Effect::Insert(row), hash: 0 });
            return Taken::In;
        }
        let Some(at) = self.find(look.hash, new) else {
            self.push(look.hash, row.clone(), Effect::Insert(row));
            return Taken::In;
        };
        let net = &mut self.nets[at];
        net.effect = match net.effect {
            Effect::Nothing => Effect::Insert(row),
            Effect::Delete => Effect::Replace(row),
            // It is there already: the target will say so.
            Effect::Insert(_) | Effect::Update(_) | Effect::Replace(_) => return Taken::Barrier,
        };
        Taken::In
    }

    /// Takes in an update; both tuples lie in `body`.
    pub fn update(&mut self, old: OldTuple<'_>, new: Tuple<'_>, body: &Bytes) -> Taken {
        if self.table.key.is_empty() {
            return Taken::Barrier;
        }
        let Some(look) = self.look(new) else { return Taken::Barrier };
        let identity = match old {
            // A key value that is marked unchanged is the old one.
            OldTuple::None if look.key_unchanged => return Taken::Barrier,
            OldTuple::None => new,
            OldTuple::Key(old) | OldTuple::Full(old) => old,
        };
        if matches!(old, OldTuple::Full(_)) != self.table.whole_old_rows {
            return Taken::Barrier;
        }
        let found = if matches!(old, OldTuple::None) { Some(look) } else { self.look(identity) };
        let Some(found) = found else { return Taken::Barrier };
        let key_stays = matches!(old, OldTuple::None) || self.key_stays(identity, new);
        let hash = found.hash;
        let at = self.find(hash, identity);
        if self.table.whole_old_rows
            && (found.unchanged || at.is_some_and(|at| !self.is_as_left(at, identity)))
        {
            return Taken::Barrier;
        }
        let before = at.map(|at| &self.nets[at].effect);
        let row = match before {
            None => Some(body.slice_ref(new.as_bytes())),
            Some(Effect::Insert(before) | Effect::Replace(before) | Effect::Update(before))
                if look.unchanged =>
            {
                Tuple::parse(before).ok().map(|before| merged(before, new))
            }
            Some(Effect::Insert(_) | Effect::Replace(_) | Effect::Update(_)) => {
                Some(body.slice_ref(new.as_bytes()))
            }
            // There is no such row: the target will say so.
            Some(Effect::Nothing | Effect::Delete) => None,
        };
        let Some(mut row) = row else { return Taken::Barrier };
        if !key_stays && look.unchanged && self.table.whole_old_rows {
            row = merged(identity, new);
        }
        if key_stays {
            match at {
                None => {
                    self.push(hash, body.slice_ref(identity.as_bytes()), Effect::Update(row));
                }
                Some(at) => {
                    let net = &mut self.nets[at];
                    net.effect = match net.effect {
                        Effect::Insert(_) => Effect::Insert(row),
                        Effect::Replace(_) => Effect::Replace(row),
                        _ => Effect::Update(row),
                    };
                }
            }
            return Taken::In;
        }
        self.move_row(at, hash, body.slice_ref(identity.as_bytes()), row)
    }

    /// A row's key has changed: it is gone from where it was, and there is one at the new place.
    fn move_row(&mut self, at: Option<usize>, hash: u64, identity: Bytes, row: Bytes) -> Taken {
        let Ok(new) = Tuple::parse(&row) else { return Taken::Barrier };
        let Some(look) = self.look(new) else { return Taken::Barrier };
        let is_ours = at.is_some_and(|at| {
            matches!(self.nets[at].effect, Effect::Insert(_) | Effect::Replace(_))
        });
        if look.unchanged || (self.table.moves_in_place && !is_ours) {
            return Taken::Barrier;
        }
        let to = self.find(look.hash, new);
        let arrives = match to.map(|to| &self.nets[to].effect) {
            None | Some(Effect::Nothing) => Effect::Insert(row.clone()),
            Some(Effect::Delete) => Effect::Replace(row.clone()),
            Some(Effect::Insert(_) | Effect::Update(_) | Effect::Replace(_)) => {
                return Taken::Barrier;
            }
        };
        match at {
            None => self.push(hash, identity, Effect::Delete),
            Some(at) => {
                let net = &mut self.nets[at];
                net.effect = match net.effect {
                    Effect::Insert(_) => Effect::Nothing,
                    _ => Effect::Delete,
                };
            }
        }
        match to {
            None => self.push(look.hash, row, arrives),
            Some(to) => self.nets[to].effect = arrives,
        }
        Taken::In
    }

    /// Takes in a delete; `old` lies in `body`.
    pub fn delete(&mut self, old: OldTuple<'_>, body: &Bytes) -> Taken {
        let old = match old {
            OldTuple::Key(old) if !self.table.whole_old_rows => old,
            OldTuple::Full(old) if self.table.whole_old_rows => old,
            OldTuple::None | OldTuple::Key(_) | OldTuple::Full(_) => return Taken::Barrier,
        };
        if self.table.key.is_empty() {
            return Taken::Barrier;
        }
        let Some(look) = self.look(old) else { return Taken::Barrier };
        if look.key_unchanged || (look.unchanged && self.table.whole_old_rows) {
            return Taken::Barrier;
        }
        let at = self.find(look.hash, old);
        if self.table.whole_old_rows && at.is_some_and(|at| !self.is_as_left(at, old)) {
            return Taken::Barrier;
        }
        match at {
            None => self.push(look.hash, body.slice_ref(old.as_bytes()), Effect::Delete),
            Some(at) => {
                let net = &mut self.nets[at];
                net.effect = match net.effect {
                    Effect::Insert(_) => Effect::Nothing,
                    Effect::Update(_) | Effect::Replace(_) => Effect::Delete,
                    Effect::Nothing | Effect::Delete => return Taken::Barrier,
                };
            }
        }
        Taken::In
    }

    /// Whether `row` is what the changes so far have left under this key.
    fn is_as_left(&self, at: usize, row: Tuple<'_>) -> bool {
        let net = &self.nets[at];
        let left = match &net.effect {
            Effect::Insert(left) | Effect::Update(left) | Effect::Replace(left) => left,
            Effect::Nothing | Effect::Delete => return false,
        };
        let (Ok(left), Ok(before)) = (Tuple::parse(left), Tuple::parse(&net.identity)) else {
            return false;
        };
        left.values().zip(before.values()).zip(row.values()).all(|((left, before), value)| {
            value == if left == Value::Unchanged { before } else { left }
        })
    }

    fn push(&mut self, hash: u64, identity: Bytes, effect: Effect) {
        let at = self.nets.len() as u32;
        self.nets.push(Net { identity, effect, hash });
        let nets = &self.nets;
        self.index.insert_unique(hash, at, |at| nets[*at as usize].hash);
    }

    /// Walks over a tuple once. `None` if it does not fit the table, or has values in text or a
    /// key without a value: such rows are not netted.
    fn look(&self, tuple: Tuple<'_>) -> Option<Look> {
        if tuple.len() != self.table.columns {
            return None;
        }
        let mut hasher = self.hasher.build_hasher();
        let mut key = self.table.key.iter().copied().peekable();
        let (mut unchanged, mut key_unchanged) = (false, false);
        for (column, value) in tuple.values().enumerate() {
            let of_key = key.next_if_eq(&column).is_some();
            match value {
                Value::Text(_) => return None,
                Value::Null if of_key => return None,
                Value::Null => {}
                Value::Unchanged => {
                    unchanged = true;
                    key_unchanged |= of_key;
                }
                Value::Binary(bytes) if of_key => {
                    hasher.write_usize(bytes.len());
                    hasher.write(bytes);
                }
                Value::Binary(_) => {}
            }
        }
        Some(Look { hash: hasher.finish(), unchanged, key_unchanged })
    }

    fn find(&self, hash: u64, identity: Tuple<'_>) -> Option<usize> {
        let same = |at: &u32| {
            let net = &self.nets[*at as usize];
            net.hash == hash && self.same_key(Tuple::walked(&net.identity), identity)
        };
        self.index.find(hash, same).map(|at| *at as usize)
    }

    fn same_key(&self, a: Tuple<'_>, b: Tuple<'_>) -> bool {
        self.keys(a).eq(self.keys(b))
    }

    fn key_stays(&self, old: Tuple<'_>, new: Tuple<'_>) -> bool {
        self.keys(old).zip(self.keys(new)).all(|(old, new)| new == Value::Unchanged || old == new)
    }

    fn keys<'a>(&'a self, tuple: Tuple<'a>) -> impl Iterator<Item = Value<'a>> {
        let mut key = self.table.key.iter().copied().peekable();
        tuple
            .values()
            .enumerate()
            .filter(move |(column, _)| key.next_if_eq(column).is_some())
            .map(|(_, value)| value)
    }
}

/// `new` with the values that it leaves out taken from the row as it was.
fn merged(before: Tuple<'_>, new: Tuple<'_>) -> Bytes {
    let is_lost = fault::defect("lost-unchanged-value");
    let kept = |before| if is_lost { Value::Null } else { before };
    let values: Vec<Value<'_>> = before
        .values()
        .zip(new.values())
        .map(|(before, new)| if new == Value::Unchanged { kept(before) } else { new })
        .collect();
    encode::tuple(&values).into()
}

#[cfg(test)]
#[path = "netting/tests.rs"]
mod tests;
