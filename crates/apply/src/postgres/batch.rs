//! The target's half of a catch-up batch: net changes of one table, written in bulk.
//!
//! ```text
//! deletes  DELETE … WHERE key = ANY ($1), or joined to unnest ($1, $2, …)
//! updates  UPDATE … FROM unnest ($1, $2, …), one statement per set of columns that have values;
//!          many values as one array of the table's rows
//! inserts  COPY … FROM STDIN, binary
//! ```
//!
//! Where foreign keys fire, deletes of all tables go first, children before parents, and then the
//! rest, parents before children.
//!
//! Values pass through as they came. Every statement must touch as many rows as it names; whatever
//! goes wrong, the target transaction is given up and its changes are applied row by row, which
//! finds the row and says what is wrong with it ([`super::writer`]).

mod encode;
mod pending;
mod plan;
mod references;
mod rows;

pub use pending::{Batches, Offered};
pub use plan::{BatchPlan, Planned, TableFacts, look_at_tables, plan};
pub(super) use plan::{facts_answer, facts_question};
pub use references::{References, TableReferences, Ties};

use crate::netting::{Effect, NetTable, Netting};
use crate::postgres::pipeline::{Expect, Pipeline, PipelineError, Statement};
use crate::postgres::statements::{Shape, TargetRelation};
use crate::postgres::writer::write_values;
use bytes::Bytes;
use farshore_model::DictionaryId;
use farshore_wire::pgoutput::{Tuple, Value};
use std::collections::HashMap;

/// Rows of so many values go as an array of rows instead of one array per column, for which
/// `unnest` gathers and reads every column by itself. Of fewer it is no gain.
const ROW_AS_ONE_MIN: usize = 8;

/// And only if there are so many values in all: the table's columns have to be looked at then.
const VALUES_AS_ROWS_MIN: usize = 1_000;

/// Most update statements prepared per relation.
const UPDATES_PREPARED_MAX: usize = 64;

/// Fewer updates or deletes than this are a statement each.
const ROWS_IN_BULK_MIN: usize = 3;

/// Changes of one relation version on their way into a target transaction.
pub struct Batch {
    relation: DictionaryId,
    plan: BatchPlan,
    /// What the changes come to so far.
    pub netting: Netting,
    /// Of the foreign keys that fire.
    pub references: TableReferences,
    copy: Option<Statement>,
    /// By how the rows get there.
    deletes: HashMap<Carried, Statement>,
    updates: HashMap<UpdateShape, Statement>,
    identities: encode::Arrays,
    values: encode::Arrays,
    old_rows: rows::Rows,
    new_rows: rows::Rows,
}

/// How the rows that a statement is for get to the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Carried {
    /// A statement for each.
    OneByOne,
    /// An array for each column.
    ByColumn,
    /// An array of rows of the table.
    AsRows,
}

/// An UPDATE statement by what tells it apart.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct UpdateShape {
    /// Columns outside the key that get values, ascending.
    set: Vec<usize>,
    carried: Carried,
}

/// Names for prepared statements, unique within a subscription's connections.
#[derive(Debug, Default)]
pub struct StatementNames {
    last: u64,
    given_up: Vec<String>,
}

impl StatementNames {
    /// One that has not been used.
    pub fn unused(&mut self) -> String {
        self.last += 1;
        format!("farshore_{}", self.last)
    }

    /// Names of statements that were given up since the last call.
    pub fn take_given_up(&mut self) -> Vec<String> {
        std::mem::take(&mut self.given_up)
    }
}

impl Batch {
    /// Nothing is in it.
    pub fn new(
        relation: DictionaryId,
        target: &TargetRelation,
        plan: BatchPlan,
        is_parent: bool,
        references: &References,
    ) -> Batch {
        let table = NetTable {
            columns: target.relation.columns.len(),
            key: plan.key.clone(),
            whole_old_rows: plan.whole_old_rows,
            moves_in_place: plan.own_columns_on_target || is_parent,
        };
        Batch {
            relation,
            references: references.of(target, &table.key),
            plan,
            netting: Netting::new(table),
            copy: None,
            deletes: HashMap::new(),
            updates: HashMap::new(),
            identities: encode::Arrays::default(),
            values: encode::Arrays::default(),
            old_rows: rows::Rows::default(),
            new_rows: rows::Rows::default(),
        }
    }

    /// The target's table has columns that are not published.
    pub fn has_own_columns_on_target(&self) -> bool {
        self.plan.own_columns_on_target
    }

    /// Hands what is in it to the target's pipeline, to be written, and empties it.
    pub fn send(
        &mut self,
        pipeline: &mut Pipeline,
        target: &TargetRelation,
        names: &mut StatementNames,
    ) -> Result<(), PipelineError> {
        self.send_deletes(pipeline, target, names)?;
        self.send_rest(pipeline, target, names)
    }

    /// What is left after [`Batch::send_deletes`]; then it is empty.
    pub fn send_rest(
        &mut self,
        pipeline: &mut Pipeline,
        target: &TargetRelation,
        names: &mut StatementNames,
    ) -> Result<(), PipelineError> {
        self.send_updates(pipeline, target, names)?;
        self.send_inserts(pipeline, target, names)?;
        self.netting.clear();
        self.identities.release();
        self.values.release();
        self.old_rows.release();
        self.new_rows.release();
        Ok(())
    }

    /// How `rows` go there, with so many values in each.
    fn carried(&self, rows: usize, values: usize, have_arrays: bool, as_rows: bool) -> Carried {
        let is_gain = values >= ROW_AS_ONE_MIN && rows * values >= VALUES_AS_ROWS_MIN;
        match () {
            () if as_rows && (is_gain || !have_arrays) => Carried::AsRows,
            () if have_arrays => Carried::ByColumn,
            () => Carried::OneByOne,
        }
    }

    /// Hands the deletes in it to the target's pipeline.
    pub fn send_deletes(
        &mut self,
        pipeline: &mut Pipeline,
        target: &TargetRelation,
        names: &mut StatementNames,
    ) -> Result<(), PipelineError> {
        let mut deleted: Vec<&Bytes> = self
            .netting
            .nets()
            .iter()
            .filter_map(|net| match net.effect {
                Effect::Delete | Effect::Replace(_) => Some(&net.identity),
                Effect::Nothing | Effect::Insert(_) | Effect::Update(_) => None,
            })
            .collect();
        if deleted.is_empty() {
            return Ok(());
        }
        let identity = self.plan.identity();
        let as_rows = self.plan.old_rows();
        let have_arrays = self.plan.have_arrays(&identity);
        let carried = self.carried(deleted.len(), identity.len(), have_arrays, as_rows.is_some());
        if carried != Carried::OneByOne && self.plan.by_key {
            deleted.sort_by_cached_key(|old| encode::key_prefix(old, &self.plan.key));
        }
        let delete = self.deletes.entry(carried).or_insert_with(|| {
            let (sql, types) = match carried {
                Carried::AsRows => (self.plan.delete_rows_sql(target), self.plan.row_types(1)),
                Carried::ByColumn => {
                    (self.plan.delete_sql(target), self.plan.array_types(&identity))
                }
                Carried::OneByOne => target.sql(&Shape::Delete),
            };
            Statement { name: names.unused(), sql, types }
        });
        let relation = self.relation;
        pipeline.prepare(delete, || Expect::BatchParsed(relation))?;
        if let (Carried::AsRows, Some(fields)) = (carried, as_rows) {
            let rows = self.old_rows.fill(&fields, deleted.into_iter().map(|old| (old, old)))?;
            let (plan, old_rows) = (&self.plan, &self.old_rows);
            let expect = Expect::Counted { relation, rows };
            return pipeline.run(&delete.name, 1, expect, |bind| old_rows.write(plan, bind));
        }
        if carried == Carried::ByColumn {
            let rows = self.identities.fill(&identity, deleted.into_iter())?;
            let (plan, identities) = (&self.plan, &self.identities);
            let expect = Expect::Counted { relation, rows };
            return pipeline.run(&delete.name, identity.len(), expect, |bind| {
                identities.write(plan, &identity, bind)
            });
        }
        for row in deleted {
            let old = Some(Tuple::walked(row));
            let expect = Expect::Counted { relation, rows: 1 };
            pipeline.run(&delete.name, identity.len(), expect, |bind| {
                write_values(bind, &identity, old)
            })?;
        }
        Ok(())
    }

    fn send_updates(
        &mut self,
        pipeline: &mut Pipeline,
        target: &TargetRelation,
        names: &mut StatementNames,
    ) -> Result<(), PipelineError> {
        let identity = self.plan.identity();
        let identity_has_arrays = self.plan.have_arrays(&identity);
        let mut rows_by_set: HashMap<Vec<u64>, Vec<(&Bytes, &Bytes)>> = HashMap::new();
        let mut set = Vec::new();
        for net in self.netting.nets() {
            let Effect::Update(row) = &net.effect else { continue };
            columns_set(row, &self.plan.key, &mut set);
            match rows_by_set.get_mut(&set) {
                Some(rows) => rows.push((&net.identity, row)),
                None => {
                    rows_by_set.insert(set.clone(), vec![(&net.identity, row)]);
                }
            }
        }
        for (set, mut rows) in rows_by_set {
            let is_set = |column: &usize| set[column / 64] & 1 << (column % 64) != 0;
            let set: Vec<usize> = (0..64 * set.len()).filter(is_set).collect();
            let as_rows = self.plan.new_rows(&set);
            let carried = if rows.len() < ROWS_IN_BULK_MIN {
                Carried::OneByOne
            } else {
                let have_arrays = identity_has_arrays && self.plan.have_arrays(&set);
                let values = set.len() + identity.len();
                self.carried(rows.len(), values, have_arrays, as_rows.is_some())
            };
            if carried != Carried::OneByOne && self.plan.by_key {
                rows.sort_by_cached_key(|(old, _)| encode::key_prefix(old, &self.plan.key));
            }
            let shape = UpdateShape { set, carried };
            prepare_update(&self.plan, &mut self.updates, target, names, &shape);
            let Some(update) = self.updates.get(&shape) else { continue };
            let (relation, name, set) = (self.relation, &update.name, &shape.set);
            pipeline.prepare(update, || Expect::BatchParsed(relation))?;
            if let (Carried::AsRows, Some(fields)) = (carried, as_rows) {
                let rows_named = self.new_rows.fill(&fields, rows.iter().copied())?;
                let old_fields = self.plan.old_rows();
                if let Some(fields) = &old_fields {
                    self.old_rows.fill(fields, rows.iter().map(|(old, _)| (*old, *old)))?;
                }
                let (plan, new_rows, old_rows) = (&self.plan, &self.new_rows, &self.old_rows);
                let expect = Expect::Counted { relation, rows: rows_named };
                let parameters = 1 + usize::from(old_fields.is_some());
                pipeline.run(name, parameters, expect, |bind| {
                    new_rows.write(plan, bind)?;
                    if old_fields.is_some() { old_rows.write(plan, bind) } else { Ok(()) }
                })?;
                continue;
            }
            let parameters = set.len() + identity.len();
            if carried == Carried::ByColumn {
                let rows_named =
                    self.identities.fill(&identity, rows.iter().map(|(identity, _)| *identity))?;
                self.values.fill(set, rows.iter().map(|(_, row)| *row))?;
                let (plan, identities, values) = (&self.plan, &self.identities, &self.values);
                let expect = Expect::Counted { relation, rows: rows_named };
                pipeline.run(name, parameters, expect, |bind| {
                    values.write(plan, set, bind)?;
                    identities.write(plan, &identity, bind)
                })?;
                continue;
            }
            for (old, new) in rows {
                let (old, new) = (Some(Tuple::walked(old)), Some(Tuple::walked(new)));
                let expect = Expect::Counted { relation, rows: 1 };
                pipeline.run(name, parameters, expect, |bind| {
                    write_values(bind, set, new)?;
                    write_values(bind, &identity, old)
                })?;
            }
        }
        Ok(())
    }

    fn send_inserts(
        &mut self,
        pipeline: &mut Pipeline,
        target: &TargetRelation,
        names: &mut StatementNames,
    ) -> Result<(), PipelineError> {
        let mut left = self.netting.nets();
        if !left.iter().any(|net| net.effect.inserted().is_some()) {
            return Ok(());
        }
        let copy = self.copy.get_or_insert_with(|| {
            let sql = self.plan.copy_sql(target);
            Statement { name: names.unused(), sql, types: Vec::new() }
        });
        pipeline.prepare(copy, || Expect::BatchParsed(self.relation))?;
        let mut rows = 0;
        pipeline.begin_copy(&copy.name)?;
        encode::copy_header(pipeline.out());
        while !left.is_empty() {
            rows += encode::copy_rows(pipeline.out(), &mut left)?;
        }
        encode::copy_trailer(pipeline.out());
        let relation = self.relation;
        pipeline.end_copy(Expect::Counted { relation, rows });
        Ok(())
    }
}

/// Columns outside the key that have values in `row`, a bit each.
fn columns_set(row: &Bytes, key: &[usize], set: &mut Vec<u64>) {
    let tuple = Tuple::walked(row);
    set.clear();
    set.resize(tuple.len().div_ceil(64), 0);
    for (column, value) in tuple.values().enumerate() {
        set[column / 64] |= u64::from(value != Value::Unchanged) << (column % 64);
    }
    for column in key {
        if let Some(word) = set.get_mut(column / 64) {
            *word &= !(1 << (column % 64));
        }
    }
}

fn prepare_update(
    plan: &BatchPlan,
    updates: &mut HashMap<UpdateShape, Statement>,
    target: &TargetRelation,
    names: &mut StatementNames,
    shape: &UpdateShape,
) {
    if updates.contains_key(shape) {
        return;
    }
    if updates.len() >= UPDATES_PREPARED_MAX {
        names.given_up.extend(updates.drain().map(|(_, update)| update.name));
    }
    let (sql, types) = match shape.carried {
        Carried::AsRows => {
            let parameters = 1 + usize::from(plan.whole_old_rows);
            (plan.update_rows_sql(target, &shape.set), plan.row_types(parameters))
        }
        Carried::ByColumn => {
            let wanted = [shape.set.as_slice(), &plan.identity()].concat();
            (plan.update_sql(target, &shape.set), plan.array_types(&wanted))
        }
        Carried::OneByOne => {
            let mut unchanged = vec![0_u64; target.relation.columns.len().div_ceil(64)];
            for column in (0..target.relation.columns.len()).filter(|c| !shape.set.contains(c)) {
                unchanged[column / 64] |= 1 << (column % 64);
            }
            // The key is never among what is set.
            target.sql(&Shape::Update { old_given: true, unchanged })
        }
    };
    updates.insert(shape.clone(), Statement { name: names.unused(), sql, types });
}
