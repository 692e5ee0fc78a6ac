//! `toast`: updates of rows that hold a text of 4 to 8 KB out of line and leave that as it is. The
//! log does not carry such a text again, so neither must an update lose it on the way.

use super::{Backlog, SCHEMA, Tables, Work, scaled};
use crate::text::Prose;
use anyhow::Result;
use farshore_testkit::interrupt::Interrupt;
use postgres::Client;
use rand::RngExt;
use std::fmt::Write as _;

const UPDATES: u64 = 100_000;
const UPDATES_PER_TRANSACTION: u64 = 20;
/// Each row is updated this many times on average.
const UPDATES_PER_ROW: u64 = 5;
/// Rows per statement that fills the table: some 3 MB.
const FILL: usize = 500;
const BODY_BYTES: std::ops::RangeInclusive<usize> = 4_096..=8_192;
const STATE_BYTES: std::ops::RangeInclusive<usize> = 20..=60;

/// The case.
#[derive(Debug)]
pub struct Toast {
    updates: u64,
}

impl Toast {
    /// A share of the full work; the table shrinks with it.
    pub fn new(scale: f64) -> Toast {
        Toast { updates: scaled(UPDATES, scale, UPDATES_PER_TRANSACTION) }
    }

    fn rows(&self) -> i64 {
        (self.updates / UPDATES_PER_ROW) as i64
    }
}

impl Tables for Toast {
    fn schema(&self) -> String {
        // Out of line whatever it compresses to: otherwise the shorter half would stay in the row.
        format!(
            "CREATE TABLE {SCHEMA}.toast (id bigint PRIMARY KEY, version int NOT NULL, \
             changed timestamptz NOT NULL, state text NOT NULL, body text NOT NULL); \
             ALTER TABLE {SCHEMA}.toast ALTER body SET STORAGE EXTERNAL"
        )
    }

    fn preload(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        let insert = client.prepare(&format!(
            "INSERT INTO {SCHEMA}.toast SELECT id, 1, now(), 'new', body \
             FROM unnest($1::bigint[], $2::text[]) AS given (id, body)"
        ))?;
        let all: Vec<i64> = (0..self.rows()).collect();
        for ids in all.chunks(FILL) {
            interrupt.check()?;
            let mut body = || {
                let length = prose.rng().random_range(BODY_BYTES);
                prose.take(length)
            };
            let bodies: Vec<String> = ids.iter().map(|_| body()).collect();
            client.execute(&insert, &[&ids, &bodies])?;
        }
        Ok(())
    }
}

impl Backlog for Toast {
    fn work(&self) -> Work {
        let transactions = self.updates / UPDATES_PER_TRANSACTION;
        Work { commands: self.updates, transactions, tables: 1 }
    }

    fn build(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        let mut sql = String::new();
        for _ in 0..self.work().transactions {
            interrupt.check()?;
            sql.clear();
            sql.push_str("BEGIN;");
            for _ in 0..UPDATES_PER_TRANSACTION {
                let id = prose.rng().random_range(0..self.rows());
                let length = prose.rng().random_range(STATE_BYTES);
                // Letters, digits, blanks and full stops: nothing to be quoted.
                let state = prose.take(length);
                let _ = write!(
                    sql,
                    "UPDATE {SCHEMA}.toast SET version=version+1,changed=now(),state='{state}' \
                     WHERE id={id};"
                );
            }
            sql.push_str("COMMIT");
            client.batch_execute(&sql)?;
        }
        Ok(())
    }
}
