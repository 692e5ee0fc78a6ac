//! The target's half of a catch-up batch: net changes of one table, written in bulk.
//!
//! ```text
//! deletes  DELETE … WHERE key = ANY ($1), or joined to unnest ($1, $2, …)
//! updates  UPDATE … FROM unnest ($1, $2, …), one statement per set of columns that have values
//! inserts  COPY … FROM STDIN, binary
//! ```
//!
//! Values pass through as they came. Every statement must touch as many rows as it names; whatever
//! goes wrong, the target transaction is given up and its changes are applied row by row, which
//! finds the row and says what is wrong with it ([`super::writer`]).

mod encode;
mod pending;
mod plan;

pub use pending::{Batches, Offered};
pub use plan::{BatchPlan, Planned, plan};

use crate::netting::{Effect, NetTable, Netting};
use crate::postgres::pipeline::{Expect, Pipeline, PipelineError, Statement};
use crate::postgres::statements::{Shape, TargetRelation};
use crate::postgres::writer::write_values;
use bytes::Bytes;
use farshore_model::DictionaryId;
use farshore_wire::pgoutput::{Tuple, Value};
use std::collections::HashMap;

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
    copy: Option<CopyStatements>,
    delete: Option<Statement>,
    updates: HashMap<UpdateShape, Statement>,
    arrays: encode::Arrays,
}

/// The statements of a COPY.
struct CopyStatements {
    rows: Statement,
    /// Finds the table's columns to be of the types that the rows were written for.
    types: Statement,
}

/// An UPDATE statement by what tells it apart.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct UpdateShape {
    /// Columns outside the key that get values, ascending.
    set: Vec<usize>,
    /// One statement for many rows.
    in_bulk: bool,
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
    pub fn new(relation: DictionaryId, target: &TargetRelation, plan: BatchPlan) -> Batch {
        let columns = 0..target.relation.columns.len();
        let key = if plan.keyed {
            columns.clone().filter(|column| target.relation.columns[*column].key).collect()
        } else {
            Vec::new()
        };
        let table = NetTable {
            columns: columns.len(),
            key,
            own_columns_on_target: plan.own_columns_on_target,
        };
        Batch {
            relation,
            plan,
            netting: Netting::new(table),
            copy: None,
            delete: None,
            updates: HashMap::new(),
            arrays: encode::Arrays::default(),
        }
    }

    /// Hands what is in it to the target's pipeline, to be written, and empties it.
    pub fn send(
        &mut self,
        pipeline: &mut Pipeline,
        target: &TargetRelation,
        names: &mut StatementNames,
    ) -> Result<(), PipelineError> {
        self.send_deletes(pipeline, target, names)?;
        self.send_updates(pipeline, target, names)?;
        self.send_inserts(pipeline, target, names)?;
        self.netting.clear();
        self.arrays.release();
        Ok(())
    }

    fn send_deletes(
        &mut self,
        pipeline: &mut Pipeline,
        target: &TargetRelation,
        names: &mut StatementNames,
    ) -> Result<(), PipelineError> {
        let key = &self.netting.table().key;
        let deleted = self.netting.nets().iter().filter_map(|net| match net.effect {
            Effect::Delete | Effect::Replace(_) => Some(&net.identity),
            Effect::Nothing | Effect::Insert(_) | Effect::Update(_) => None,
        });
        let rows = self.arrays.fill(key, deleted)?;
        if rows == 0 {
            return Ok(());
        }
        let delete = match &self.delete {
            Some(delete) => delete,
            None => {
                let (sql, types) = (self.plan.delete_sql(target, key), self.plan.array_types(key));
                self.delete.insert(Statement { name: names.unused(), sql, types })
            }
        };
        pipeline.prepare(delete, || Expect::BatchParsed(self.relation))?;
        let expect = Expect::Counted { relation: self.relation, rows };
        let (plan, arrays) = (&self.plan, &self.arrays);
        pipeline.run(&delete.name, key.len(), expect, |bind| arrays.write(plan, key, bind))
    }

    fn send_updates(
        &mut self,
        pipeline: &mut Pipeline,
        target: &TargetRelation,
        names: &mut StatementNames,
    ) -> Result<(), PipelineError> {
        let key = self.netting.table().key.clone();
        let mut rows_by_set: HashMap<Vec<usize>, Vec<Bytes>> = HashMap::new();
        let mut set = Vec::new();
        for net in self.netting.nets() {
            let Effect::Update(row) = &net.effect else { continue };
            columns_set(row, &key, &mut set)?;
            let row = joined(&net.identity, row)?;
            match rows_by_set.get_mut(&set) {
                Some(rows) => rows.push(row),
                None => {
                    rows_by_set.insert(set.clone(), vec![row]);
                }
            }
        }
        for (set, rows) in rows_by_set {
            let mut wanted = [key.as_slice(), set.as_slice()].concat();
            wanted.sort_unstable();
            let in_bulk = rows.len() >= ROWS_IN_BULK_MIN && self.plan.have_arrays(&wanted);
            let shape = UpdateShape { set, in_bulk };
            self.prepare_update(target, names, &shape, &key, &wanted);
            let Some(update) = self.updates.get(&shape) else { continue };
            let (relation, name) = (self.relation, &update.name);
            pipeline.prepare(update, || Expect::BatchParsed(relation))?;
            if in_bulk {
                let expect =
                    Expect::Counted { relation, rows: self.arrays.fill(&wanted, rows.iter())? };
                let (plan, arrays) = (&self.plan, &self.arrays);
                pipeline
                    .run(name, wanted.len(), expect, |bind| arrays.write(plan, &wanted, bind))?;
                continue;
            }
            for row in &rows {
                let (tuple, expect) =
                    (Some(encode::parse(row)?), Expect::Counted { relation, rows: 1 });
                pipeline.run(name, shape.set.len() + key.len(), expect, |bind| {
                    write_values(bind, &shape.set, tuple)?;
                    write_values(bind, &key, tuple)
                })?;
            }
        }
        Ok(())
    }

    fn prepare_update(
        &mut self,
        target: &TargetRelation,
        names: &mut StatementNames,
        shape: &UpdateShape,
        key: &[usize],
        wanted: &[usize],
    ) {
        if self.updates.contains_key(shape) {
            return;
        }
        if self.updates.len() >= UPDATES_PREPARED_MAX {
            names.given_up.extend(self.updates.drain().map(|(_, update)| update.name));
        }
        let (sql, types) = if shape.in_bulk {
            (self.plan.update_sql(target, key, &shape.set, wanted), self.plan.array_types(wanted))
        } else {
            let mut unchanged = vec![0_u64; target.relation.columns.len().div_ceil(64)];
            for column in 0..target.relation.columns.len() {
                if !wanted.contains(&column) {
                    unchanged[column / 64] |= 1 << (column % 64);
                }
            }
            target.sql(&Shape::Update { old_given: false, unchanged })
        };
        self.updates.insert(shape.clone(), Statement { name: names.unused(), sql, types });
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
        let copy = match &self.copy {
            Some(copy) => copy,
            None => {
                let mut statement =
                    |sql| Statement { name: names.unused(), sql, types: Vec::new() };
                self.copy.insert(CopyStatements {
                    rows: statement(self.plan.copy_sql(target)),
                    types: statement(self.plan.types_sql(target)),
                })
            }
        };
        for statement in [&copy.rows, &copy.types] {
            pipeline.prepare(statement, || Expect::BatchParsed(self.relation))?;
        }
        let mut rows = 0;
        pipeline.begin_copy(&copy.rows.name)?;
        encode::copy_header(pipeline.out());
        while !left.is_empty() {
            rows += encode::copy_rows(pipeline.out(), &mut left)?;
        }
        encode::copy_trailer(pipeline.out());
        let relation = self.relation;
        pipeline.end_copy(Expect::Counted { relation, rows });
        // A COPY takes values as of the types that the columns have now, and holds a lock from now
        // on: what these are must be what they were.
        pipeline.run(&copy.types.name, 0, Expect::Counted { relation, rows: 1 }, |_| Ok(()))?;
        Ok(())
    }
}

/// Columns outside the key that have values in `row`, ascending.
fn columns_set(row: &Bytes, key: &[usize], set: &mut Vec<usize>) -> Result<(), PipelineError> {
    set.clear();
    let tuple = encode::parse(row)?;
    set.extend(
        tuple
            .values()
            .enumerate()
            .filter(|(column, value)| *value != Value::Unchanged && !key.contains(column))
            .map(|(column, _)| column),
    );
    Ok(())
}

/// `row` with the key's values where it leaves them out.
fn joined(identity: &Bytes, row: &Bytes) -> Result<Bytes, PipelineError> {
    let (known, new): (Tuple<'_>, Tuple<'_>) = (encode::parse(identity)?, encode::parse(row)?);
    if new.values().all(|value| value != Value::Unchanged) {
        return Ok(row.clone());
    }
    let values: Vec<Value<'_>> = known
        .values()
        .zip(new.values())
        // Outside the key the identity's values are of no use, and are not looked at.
        .map(|(known, new)| if new == Value::Unchanged { known } else { new })
        .collect();
    Ok(farshore_wire::pgoutput::encode::tuple(&values).into())
}
