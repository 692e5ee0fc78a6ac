//! `tx-5m`: one transaction that inserts 5,000,000 small rows.

use super::{Backlog, SCHEMA, Tables, Work, scaled};
use crate::text::Prose;
use anyhow::Result;
use farshore_testkit::interrupt::Interrupt;
use postgres::Client;
use rand::RngExt;

const ROWS: u64 = 5_000_000;
/// Rows per statement: what the client holds at a time.
const ROWS_PER_STATEMENT: u64 = 5_000;
/// Text lengths; a row takes some 70 bytes.
const NOTE_BYTES: std::ops::RangeInclusive<usize> = 10..=40;

/// The case.
#[derive(Debug)]
pub struct Tx5m {
    rows: u64,
}

impl Tx5m {
    /// A share of the full work.
    pub fn new(scale: f64) -> Tx5m {
        Tx5m { rows: scaled(ROWS, scale, ROWS_PER_STATEMENT) }
    }
}

impl Tables for Tx5m {
    fn schema(&self) -> String {
        format!(
            "CREATE TABLE {SCHEMA}.tx_5m (id bigint PRIMARY KEY, customer int NOT NULL, \
             note text NOT NULL)"
        )
    }

    fn preload(&self, _: &mut Client, _: &mut Prose, _: &Interrupt) -> Result<()> {
        Ok(())
    }
}

impl Backlog for Tx5m {
    fn work(&self) -> Work {
        Work { commands: self.rows, transactions: 1, tables: 1 }
    }

    fn build(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        let mut transaction = client.transaction()?;
        let insert = transaction.prepare(&format!(
            "INSERT INTO {SCHEMA}.tx_5m SELECT * FROM unnest($1::bigint[], $2::int[], $3::text[])"
        ))?;
        for first in (0..self.rows).step_by(ROWS_PER_STATEMENT as usize) {
            interrupt.check()?;
            let ids: Vec<i64> = (first..first + ROWS_PER_STATEMENT).map(|id| id as i64).collect();
            let (mut customers, mut notes) = (Vec::<i32>::new(), Vec::<String>::new());
            for _ in &ids {
                customers.push(prose.rng().random_range(1..50_000));
                let length = prose.rng().random_range(NOTE_BYTES);
                notes.push(prose.take(length));
            }
            transaction.execute(&insert, &[&ids, &customers, &notes])?;
        }
        transaction.commit()?;
        Ok(())
    }
}
