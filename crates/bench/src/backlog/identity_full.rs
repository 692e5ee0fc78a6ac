//! `identity-full`: updates and deletes of tables with `REPLICA IDENTITY FULL`, so that the log
//! holds whole old rows. The tables have a primary key, by which a subscriber can find rows.

use super::{Backlog, SCHEMA, Tables, Work, scaled};
use crate::text::Prose;
use anyhow::Result;
use farshore_testkit::interrupt::Interrupt;
use postgres::Client;
use rand::RngExt;
use std::fmt::Write as _;

const COMMANDS: u64 = 200_000;
const COMMANDS_PER_TRANSACTION: u64 = 20;
const TABLES: usize = 4;
/// Of 100 commands, this many update; the others delete.
const UPDATES: u32 = 75;
/// Rows per statement that fills tables.
const FILL: usize = 10_000;
const NOTE_BYTES: std::ops::RangeInclusive<usize> = 60..=240;

/// The case.
#[derive(Debug)]
pub struct IdentityFull {
    commands: u64,
}

impl IdentityFull {
    /// A share of the full work; the tables shrink with it.
    pub fn new(scale: f64) -> IdentityFull {
        IdentityFull { commands: scaled(COMMANDS, scale, COMMANDS_PER_TRANSACTION) }
    }

    /// As many rows in all as there are commands, so that deletes do not run out of them.
    fn rows_per_table(&self) -> i64 {
        (self.commands / TABLES as u64) as i64
    }
}

fn note(prose: &mut Prose) -> String {
    let length = prose.rng().random_range(NOTE_BYTES);
    prose.take(length)
}

impl Tables for IdentityFull {
    fn schema(&self) -> String {
        (0..TABLES).fold(String::new(), |mut sql, number| {
            let _ = write!(
                sql,
                "CREATE TABLE {SCHEMA}.full_{number} (id bigint PRIMARY KEY, \
                 customer int NOT NULL, amount numeric(12, 2) NOT NULL, \
                 changed timestamptz NOT NULL, closed date, note text NOT NULL); \
                 ALTER TABLE {SCHEMA}.full_{number} REPLICA IDENTITY FULL;"
            );
            sql
        })
    }

    fn preload(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        let all: Vec<i64> = (0..self.rows_per_table()).collect();
        for number in 0..TABLES {
            let insert = client.prepare(&format!(
                "INSERT INTO {SCHEMA}.full_{number} \
                 SELECT id, id * 7 % 50000, id * 31 % 100000 / 100.0, now(), \
                        CASE WHEN id % 3 = 0 THEN current_date END, note \
                 FROM unnest($1::bigint[], $2::text[]) AS given (id, note)"
            ))?;
            for ids in all.chunks(FILL) {
                interrupt.check()?;
                let notes: Vec<String> = ids.iter().map(|_| note(prose)).collect();
                client.execute(&insert, &[&ids, &notes])?;
            }
        }
        Ok(())
    }
}

impl Backlog for IdentityFull {
    fn work(&self) -> Work {
        Work {
            commands: self.commands,
            transactions: self.commands / COMMANDS_PER_TRANSACTION,
            tables: TABLES as u64,
        }
    }

    fn build(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        let mut live: Vec<Vec<i64>> =
            (0..TABLES).map(|_| (0..self.rows_per_table()).collect()).collect();
        let mut sql = String::new();
        for _ in 0..self.work().transactions {
            interrupt.check()?;
            sql.clear();
            sql.push_str("BEGIN;");
            for _ in 0..COMMANDS_PER_TRANSACTION {
                let mut number = prose.rng().random_range(0..TABLES);
                // At a tiny scale one table may run out; all of them cannot.
                while live[number].is_empty() {
                    number = (number + 1) % TABLES;
                }
                let rows = &mut live[number];
                let at = prose.rng().random_range(0..rows.len());
                // Writing to a String cannot fail.
                let _ = if prose.rng().random_range(0..100) < UPDATES {
                    let cents: u32 = prose.rng().random_range(0..10_000_000);
                    let (units, rest) = (cents / 100, cents % 100);
                    let (id, note) = (rows[at], note(prose));
                    write!(
                        sql,
                        "UPDATE {SCHEMA}.full_{number} SET amount={units}.{rest:02},\
                         changed=now(),note='{note}' WHERE id={id};"
                    )
                } else {
                    let id = rows.swap_remove(at);
                    write!(sql, "DELETE FROM {SCHEMA}.full_{number} WHERE id={id};")
                };
            }
            sql.push_str("COMMIT");
            client.batch_execute(&sql)?;
        }
        Ok(())
    }
}
