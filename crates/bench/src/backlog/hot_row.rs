//! `hot-row`: one row of a table is updated again and again, in a transaction each time.

use super::single_row::{COLUMNS, commit_each, fill, procedure};
use super::{Backlog, SCHEMA, STAGING, Tables, Work, scaled};
use crate::text::Prose;
use anyhow::Result;
use farshore_testkit::interrupt::Interrupt;
use postgres::Client;

const TRANSACTIONS: u64 = 100_000;
/// Rows of the table, among them the hot one; not scaled.
const ROWS: u64 = 1_000;
/// The one.
const HOT: u64 = 500;

/// The case.
#[derive(Debug)]
pub struct HotRow {
    transactions: u64,
}

impl HotRow {
    /// A share of the full work.
    pub fn new(scale: f64) -> HotRow {
        HotRow { transactions: scaled(TRANSACTIONS, scale, 1) }
    }
}

impl Tables for HotRow {
    fn schema(&self) -> String {
        format!("CREATE TABLE {SCHEMA}.hot_row ({COLUMNS})")
    }

    fn preload(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        client.batch_execute(&format!("CREATE UNLOGGED TABLE {STAGING}.payload ({COLUMNS})"))?;
        // As a counter or a queue's head, with a text that is another one each time.
        client.batch_execute(&procedure(&format!(
            "UPDATE {SCHEMA}.hot_row h SET cents = h.cents + p.cents % 1000, note = p.note \
             FROM {STAGING}.payload p WHERE h.id = {HOT} AND p.id = step"
        )))?;
        fill(client, &format!("{SCHEMA}.hot_row"), ROWS, prose, interrupt)?;
        fill(client, &format!("{STAGING}.payload"), self.transactions, prose, interrupt)
    }
}

impl Backlog for HotRow {
    fn work(&self) -> Work {
        Work { commands: self.transactions, transactions: self.transactions, tables: 1 }
    }

    fn build(&self, client: &mut Client, _: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        commit_each(client, self.transactions, interrupt)
    }
}
