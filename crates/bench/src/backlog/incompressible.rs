//! `incompressible`: rows of 1 KB of random bytes, from which compression gains nothing.

use super::{Backlog, SCHEMA, Tables, Work, scaled};
use crate::text::Prose;
use anyhow::Result;
use farshore_testkit::interrupt::Interrupt;
use postgres::Client;
use rand::Rng;

const ROWS: u64 = 300_000;
const ROWS_PER_TRANSACTION: u64 = 100;
/// With the key and headers, a row takes 1 KB.
const BODY_BYTES: usize = 980;

/// The case.
#[derive(Debug)]
pub struct Incompressible {
    rows: u64,
    body_bytes: usize,
}

impl Incompressible {
    /// A share of the full work.
    pub fn new(scale: f64) -> Incompressible {
        Incompressible::of(ROWS, BODY_BYTES, scale)
    }

    /// A share of other work: so many rows of so many random bytes.
    pub fn of(rows: u64, body_bytes: usize, scale: f64) -> Incompressible {
        Incompressible { rows: scaled(rows, scale, ROWS_PER_TRANSACTION), body_bytes }
    }
}

impl Tables for Incompressible {
    fn schema(&self) -> String {
        format!("CREATE TABLE {SCHEMA}.incompressible (id bigint PRIMARY KEY, body bytea NOT NULL)")
    }

    fn preload(&self, _: &mut Client, _: &mut Prose, _: &Interrupt) -> Result<()> {
        Ok(())
    }
}

impl Backlog for Incompressible {
    fn work(&self) -> Work {
        Work { commands: self.rows, transactions: self.rows / ROWS_PER_TRANSACTION, tables: 1 }
    }

    fn build(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        let insert = client.prepare(&format!(
            "INSERT INTO {SCHEMA}.incompressible SELECT * FROM unnest($1::bigint[], $2::bytea[])"
        ))?;
        for transaction in 0..self.work().transactions {
            interrupt.check()?;
            let first = transaction * ROWS_PER_TRANSACTION;
            let ids: Vec<i64> = (first..first + ROWS_PER_TRANSACTION).map(|id| id as i64).collect();
            let mut body = || {
                let mut bytes = vec![0; self.body_bytes];
                prose.rng().fill_bytes(&mut bytes);
                bytes
            };
            let bodies: Vec<Vec<u8>> = ids.iter().map(|_| body()).collect();
            client.execute(&insert, &[&ids, &bodies])?;
        }
        Ok(())
    }
}
