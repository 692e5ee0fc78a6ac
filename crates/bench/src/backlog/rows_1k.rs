//! `rows-1k`: rows of 1 KB inserted, 100 per transaction.

use super::{Backlog, Tables, Work, scaled};
use crate::text::Prose;
use anyhow::Result;
use farshore_testkit::interrupt::Interrupt;
use postgres::Client;
use rand::RngExt;

const ROWS: u64 = 1_000_000;
const ROWS_PER_TRANSACTION: u64 = 100;
/// With the other columns and headers, a row takes 1 KB.
const BODY_BYTES: usize = 960;

/// The case.
#[derive(Debug)]
pub struct Rows1k {
    rows: u64,
}

impl Rows1k {
    /// A share of the full work.
    pub fn new(scale: f64) -> Rows1k {
        Rows1k { rows: scaled(ROWS, scale, ROWS_PER_TRANSACTION) }
    }
}

impl Tables for Rows1k {
    fn schema(&self) -> String {
        "CREATE TABLE bench.rows_1k (id bigint PRIMARY KEY, customer int NOT NULL, \
         amount numeric(12, 2) NOT NULL, placed timestamptz NOT NULL, body text NOT NULL)"
            .to_owned()
    }

    fn preload(&self, _: &mut Client, _: &mut Prose, _: &Interrupt) -> Result<()> {
        Ok(())
    }
}

impl Backlog for Rows1k {
    fn work(&self) -> Work {
        Work { commands: self.rows, transactions: self.rows / ROWS_PER_TRANSACTION, tables: 1 }
    }

    fn build(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        let insert = client.prepare(
            "INSERT INTO bench.rows_1k \
             SELECT id, customer, cents / 100.0, \
                    timestamptz '2026-01-01 00:00Z' + id * interval '731 milliseconds', body \
             FROM unnest($1::bigint[], $2::int[], $3::int[], $4::text[]) \
                  AS given (id, customer, cents, body)",
        )?;
        for transaction in 0..self.work().transactions {
            interrupt.check()?;
            let (mut ids, mut customers) = (Vec::<i64>::new(), Vec::<i32>::new());
            let (mut cents, mut bodies) = (Vec::<i32>::new(), Vec::<String>::new());
            for row in 0..ROWS_PER_TRANSACTION {
                ids.push((transaction * ROWS_PER_TRANSACTION + row) as i64);
                customers.push(prose.rng().random_range(1..50_000));
                cents.push(prose.rng().random_range(1..1_000_000));
                bodies.push(prose.take(BODY_BYTES));
            }
            client.execute(&insert, &[&ids, &customers, &cents, &bodies])?;
        }
        Ok(())
    }
}
