//! Which rows refer to which, where foreign keys fire.
//!
//! In another session a parent that is not committed is no parent: a row waits for a group before
//! its own that has its parent. The other way round a parent's delete would be refused, or wait for
//! a lock, while children's deletes before it are not committed: it waits for groups that have
//! deletes or updates of children. And what the target does of its own accord with a parent's
//! delete (`ON DELETE CASCADE`, and the triggers behind it) is to find the rows of all groups
//! before. Keys that can be deferred are checked at the commit, when all that is there.
//!
//! Parents are known by hashes of the values that a foreign key compares. What hashes cannot tell
//! (columns that are not published, or of different types on the two sides, periods) counts as
//! referring to every row that is new; what they tell wrongly (`1.0` refers to `1.00`) the target
//! refuses, and the groups are applied one after the other.

use crate::netting::{Effect, Net};
use crate::postgres::foreign_keys::{ForeignKey, ForeignKeys};
use crate::postgres::statements::TargetRelation;
use bytes::Bytes;
use farshore_wire::pgoutput::{Tuple, Value};
use std::collections::HashSet;
use std::hash::{BuildHasher, Hasher, RandomState};

/// Rows that a group remembers as new; with more, every row of their tables may be.
const ROWS_MAX: usize = 100_000;

/// The foreign keys that fire.
#[derive(Debug, Default)]
pub struct References {
    keys: ForeignKeys,
    hasher: RandomState,
}

/// What rows of a table refer to, and what refers to them.
#[derive(Debug, Default)]
pub struct TableReferences {
    refers_to: Vec<Side>,
    referred_to: Vec<Side>,
    /// The target changes children when rows go.
    acts_on_delete: bool,
    /// Or when they get other values outside what they are known by.
    acts_on_update: bool,
    hasher: RandomState,
}

/// One side of foreign keys that refer to the same columns of the same table.
#[derive(Debug)]
struct Side {
    /// Of those columns.
    target: u64,
    /// Where the values stand in a row, in the key's order; `None` if hashes of them say nothing.
    columns: Option<Vec<usize>>,
    /// They are part of what a row is known by: an update leaves them as they are.
    in_identity: bool,
}

/// What changes have done to rows that foreign keys tie together, as far as others cannot see it.
#[derive(Debug, Default)]
pub struct Ties {
    /// Rows that are new.
    rows: HashSet<u64>,
    /// What has new rows.
    targets: HashSet<u64>,
    /// What has new rows that are not told apart.
    all: HashSet<u64>,
    /// What had rows that some refer to no more.
    let_go: HashSet<u64>,
}

impl References {
    /// Of these keys.
    pub fn new(keys: ForeignKeys) -> References {
        References { keys, hasher: RandomState::new() }
    }

    /// What there is to know about a table whose rows are known by `identity`.
    pub fn of(&self, relation: &TargetRelation, identity: &[usize]) -> TableReferences {
        let side = |key: &ForeignKey, columns: &[String]| {
            let place = |name: &String| relation.columns.iter().position(|c| c.name == *name);
            let places = columns.iter().map(place).collect::<Option<Vec<usize>>>();
            let target = self.hasher.hash_one((key.parent_root(), &key.parent_columns));
            let in_identity =
                places.as_ref().is_some_and(|places| places.iter().all(|at| identity.contains(at)));
            Side { target, columns: places.filter(|_| key.same_types), in_identity }
        };
        let checked_at_once = |key: &&ForeignKey| !key.deferrable;
        let child = || self.keys.of_child(&relation.table);
        let parent = || self.keys.of_parent(&relation.table);
        // What a key does with children is never deferred.
        let acts_on_update =
            |key: &ForeignKey| key.acts_on_update() && !side(key, &key.parent_columns).in_identity;
        TableReferences {
            refers_to: child().filter(checked_at_once).map(|key| side(key, &key.columns)).collect(),
            referred_to: parent()
                .filter(checked_at_once)
                .map(|key| side(key, &key.parent_columns))
                .collect(),
            acts_on_delete: parent().any(ForeignKey::acts_on_delete),
            acts_on_update: parent().any(acts_on_update),
            hasher: self.hasher.clone(),
        }
    }
}

impl TableReferences {
    /// Whether foreign keys are on the table, or refer to it.
    pub fn are_some(&self) -> bool {
        !self.refers_to.is_empty() || !self.referred_to.is_empty()
    }

    /// Whether foreign keys refer to the table.
    pub fn is_parent(&self) -> bool {
        !self.referred_to.is_empty()
    }

    /// Whether the table refers to itself.
    pub fn refers_to_itself(&self) -> bool {
        self.refers_to.iter().any(|to| self.referred_to.iter().any(|by| by.target == to.target))
    }

    /// Whether the target may do more with a net change than it says.
    pub fn acts(&self, net: &Net) -> bool {
        match net.effect {
            Effect::Delete | Effect::Replace(_) => self.acts_on_delete,
            Effect::Update(_) => self.acts_on_update,
            Effect::Nothing | Effect::Insert(_) => false,
        }
    }

    /// Whether a net change must come after those of `ties`.
    pub fn needs(&self, net: &Net, ties: &Ties) -> bool {
        let goes = |side: &Side| match net.effect {
            Effect::Delete | Effect::Replace(_) => true,
            Effect::Update(_) => !side.in_identity,
            Effect::Nothing | Effect::Insert(_) => false,
        };
        self.referred_to.iter().any(|side| goes(side) && ties.let_go.contains(&side.target))
            || left(net).is_some_and(|row| self.may_refer_to_new(row, ties))
    }

    fn may_refer_to_new(&self, row: &Bytes, ties: &Ties) -> bool {
        self.refers_to.iter().filter(|side| ties.targets.contains(&side.target)).any(|side| {
            match self.hash(side, row) {
                Hash::Nothing => false,
                Hash::Of(hash) => ties.rows.contains(&hash) || ties.all.contains(&side.target),
                Hash::Unknown => true,
            }
        })
    }

    /// Adds what a net change does.
    pub fn add(&self, net: &Net, ties: &mut Ties) {
        if matches!(net.effect, Effect::Delete | Effect::Replace(_) | Effect::Update(_)) {
            ties.let_go.extend(self.refers_to.iter().map(|side| side.target));
        }
        let Some(row) = left(net) else { return };
        let is_update = matches!(net.effect, Effect::Update(_));
        for side in self.referred_to.iter().filter(|side| !(is_update && side.in_identity)) {
            match self.hash(side, row) {
                Hash::Of(hash) => {
                    ties.rows.insert(hash);
                }
                Hash::Unknown => {
                    ties.all.insert(side.target);
                }
                Hash::Nothing => continue,
            }
            ties.targets.insert(side.target);
        }
        if ties.rows.len() > ROWS_MAX {
            ties.rows.clear();
            ties.all.extend(&ties.targets);
        }
    }

    fn hash(&self, side: &Side, row: &Bytes) -> Hash {
        let Some(columns) = &side.columns else { return Hash::Unknown };
        let mut hasher = self.hasher.build_hasher();
        hasher.write_u64(side.target);
        let mut unchanged = 0;
        for column in columns {
            match Tuple::walked(row).values().nth(*column) {
                Some(Value::Binary(bytes)) => {
                    hasher.write_usize(bytes.len());
                    hasher.write(bytes);
                }
                // Rows with NULL refer to nothing.
                Some(Value::Null) => return Hash::Nothing,
                Some(Value::Unchanged) => unchanged += 1,
                Some(Value::Text(_)) | None => return Hash::Unknown,
            }
        }
        // What has not changed was there before.
        match unchanged {
            0 => {}
            _ if unchanged == columns.len() => return Hash::Nothing,
            _ => return Hash::Unknown,
        }
        Hash::Of(hasher.finish())
    }
}

enum Hash {
    Of(u64),
    /// There is none.
    Nothing,
    Unknown,
}

/// The row as it is in the end, as far as it was sent.
fn left(net: &Net) -> Option<&Bytes> {
    match &net.effect {
        Effect::Insert(row) | Effect::Replace(row) | Effect::Update(row) => Some(row),
        Effect::Nothing | Effect::Delete => None,
    }
}
