//! Small rows, as many as wanted, in transactions as large as wanted.

use super::single_row::{COLUMNS, commit_each, fill, procedure};
use super::{Backlog, SCHEMA, STAGING, Tables, Work};
use crate::text::Prose;
use anyhow::Result;
use farshore_testkit::interrupt::Interrupt;
use postgres::Client;

/// Different rows; what comes after them differs by its number alone.
const DIFFERENT: u64 = 100_000;

/// Inserts into one table.
#[derive(Debug)]
pub struct Steps {
    rows: u64,
    per_transaction: u64,
}

impl Steps {
    /// `rows` in transactions of `per_transaction`, a power of ten up to 100,000.
    pub fn new(rows: u64, per_transaction: u64) -> Steps {
        let whole = rows.div_ceil(per_transaction).max(1);
        Steps { rows: whole * per_transaction, per_transaction }
    }
}

impl Tables for Steps {
    fn schema(&self) -> String {
        format!("CREATE TABLE {SCHEMA}.steps ({COLUMNS})")
    }

    fn preload(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        client.batch_execute(&format!("CREATE UNLOGGED TABLE {STAGING}.payload ({COLUMNS})"))?;
        let each = self.per_transaction;
        client.batch_execute(&procedure(&format!(
            "INSERT INTO {SCHEMA}.steps \
             SELECT id + step * {each} - step * {each} % {DIFFERENT}, customer, cents, note \
             FROM {STAGING}.payload WHERE id >= step * {each} % {DIFFERENT} \
             AND id < step * {each} % {DIFFERENT} + {each}"
        )))?;
        let different = self.rows.min(DIFFERENT);
        fill(client, &format!("{STAGING}.payload"), different, prose, interrupt)
    }
}

impl Backlog for Steps {
    fn work(&self) -> Work {
        let transactions = self.rows / self.per_transaction;
        Work { commands: self.rows, transactions, tables: 1 }
    }

    fn build(&self, client: &mut Client, _: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        commit_each(client, self.work().transactions, interrupt)
    }
}
