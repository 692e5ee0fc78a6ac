//! `wide-100`: a table of 100 columns of mixed types, inserts and updates.

use super::{Backlog, SCHEMA, Tables, Work, scaled};
use crate::text::Prose;
use anyhow::Result;
use farshore_testkit::interrupt::Interrupt;
use postgres::Client;
use rand::RngExt;
use std::fmt::Write as _;

const COMMANDS: u64 = 100_000;
const COMMANDS_PER_TRANSACTION: u64 = 20;
const COLUMNS: usize = 100;
/// Rows before replication begins; not scaled, so that updates always find some.
const ROWS_BEFORE: i64 = 2_000;
/// Of 100 commands, this many insert; the others update.
const INSERTS: u32 = 60;
/// Columns that an update sets.
const SET: usize = 8;
/// Of 100 values that may be NULL, this many are.
const NULLS: u32 = 15;
/// Types of the columns behind the key, in turn.
const TYPES: [&str; 11] = [
    "int",
    "text",
    "numeric(12, 2)",
    "timestamptz",
    "boolean",
    "bigint",
    "varchar(40)",
    "date",
    "double precision",
    "smallint",
    "uuid",
];

/// The case.
#[derive(Debug)]
pub struct Wide100 {
    commands: u64,
}

impl Wide100 {
    /// A share of the full work.
    pub fn new(scale: f64) -> Wide100 {
        Wide100 { commands: scaled(COMMANDS, scale, COMMANDS_PER_TRANSACTION) }
    }
}

/// A literal for a column.
fn append_value(sql: &mut String, column: usize, prose: &mut Prose) {
    if prose.rng().random_range(0..100) < NULLS {
        sql.push_str("NULL");
        return;
    }
    let number: u32 = prose.rng().random();
    // Writing to a String cannot fail.
    let _ = match TYPES[(column - 1) % TYPES.len()] {
        "text" => {
            let text = prose.take(8 + number as usize % 33);
            write!(sql, "'{text}'")
        }
        "varchar(40)" => {
            let text = prose.take(4 + number as usize % 21);
            write!(sql, "'{text}'")
        }
        "numeric(12, 2)" => write!(sql, "{}.{:02}", number / 1_000, number % 100),
        "timestamptz" => {
            let (day, second) = (1 + number % 28, number % 86_400);
            let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
            write!(sql, "'2026-03-{day:02} {hour:02}:{minute:02}:{second:02}+00'")
        }
        "boolean" => write!(sql, "{}", number.is_multiple_of(2)),
        "bigint" => write!(sql, "{}", u64::from(number) * 4_099),
        "date" => write!(sql, "'2025-{:02}-{:02}'", 1 + number % 12, 1 + number / 12 % 28),
        "double precision" => write!(sql, "{}", f64::from(number) / 8.0),
        "smallint" => write!(sql, "{}", number % 32_768),
        "uuid" => {
            let uuid: u128 = prose.rng().random();
            write!(sql, "'{uuid:032x}'")
        }
        _ => write!(sql, "{}", number % 1_000_000),
    };
}

fn append_insert(sql: &mut String, id: i64, prose: &mut Prose) {
    let _ = write!(sql, "INSERT INTO {SCHEMA}.wide_100 VALUES ({id}");
    for column in 1..COLUMNS {
        sql.push(',');
        append_value(sql, column, prose);
    }
    sql.push_str(");");
}

fn append_update(sql: &mut String, id: i64, prose: &mut Prose) {
    let _ = write!(sql, "UPDATE {SCHEMA}.wide_100 SET ");
    let first = prose.rng().random_range(0..COLUMNS - 1);
    for step in 0..SET {
        // No common divisor with the number of columns: all are different.
        let column = 1 + (first + step * 7) % (COLUMNS - 1);
        let _ = write!(sql, "{}c_{column:02}=", if step == 0 { "" } else { "," });
        append_value(sql, column, prose);
    }
    let _ = write!(sql, " WHERE id={id};");
}

impl Tables for Wide100 {
    fn schema(&self) -> String {
        let mut sql = format!("CREATE TABLE {SCHEMA}.wide_100 (id bigint PRIMARY KEY");
        for column in 1..COLUMNS {
            let _ = write!(sql, ", c_{column:02} {}", TYPES[(column - 1) % TYPES.len()]);
        }
        sql.push(')');
        sql
    }

    fn preload(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        let mut sql = String::new();
        for id in 0..ROWS_BEFORE {
            append_insert(&mut sql, id, prose);
            if (id + 1) % COMMANDS_PER_TRANSACTION as i64 == 0 {
                interrupt.check()?;
                client.batch_execute(&sql)?;
                sql.clear();
            }
        }
        client.batch_execute(&sql)?;
        Ok(())
    }
}

impl Backlog for Wide100 {
    fn work(&self) -> Work {
        let transactions = self.commands / COMMANDS_PER_TRANSACTION;
        Work { commands: self.commands, transactions, tables: 1 }
    }

    fn build(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        let mut rows = ROWS_BEFORE;
        let mut sql = String::new();
        for _ in 0..self.work().transactions {
            interrupt.check()?;
            sql.clear();
            sql.push_str("BEGIN;");
            for _ in 0..COMMANDS_PER_TRANSACTION {
                if prose.rng().random_range(0..100) < INSERTS {
                    append_insert(&mut sql, rows, prose);
                    rows += 1;
                } else {
                    let id = prose.rng().random_range(0..rows);
                    append_update(&mut sql, id, prose);
                }
            }
            sql.push_str("COMMIT");
            client.batch_execute(&sql)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn updates_set_different_columns() {
        let mut prose = Prose::new(3);
        for _ in 0..200 {
            let mut sql = String::new();
            append_update(&mut sql, 1, &mut prose);
            let mut columns: Vec<&str> =
                sql.match_indices("c_").map(|(at, _)| &sql[at..at + 4]).collect();
            columns.sort_unstable();
            columns.dedup();
            assert_eq!(columns.len(), SET, "{sql}");
        }
    }
}
