//! `mix-59`: inserts, updates and deletes over 59 tables, 50 commands per transaction.

use super::{Backlog, SCHEMA, Tables, Work, scaled};
use crate::text::Prose;
use anyhow::Result;
use farshore_testkit::interrupt::Interrupt;
use postgres::Client;
use rand::RngExt;
use std::fmt::Write as _;

const COMMANDS: u64 = 400_000;
const COMMANDS_PER_TRANSACTION: u64 = 50;
const TABLES: usize = 59;
/// Rows of all tables before replication begins; not scaled, so that updates and deletes always
/// find some.
const ROWS_BEFORE: usize = 59_000;
/// Of 100 commands, this many insert, and this many update; the others delete.
const INSERTS: u32 = 70;
const UPDATES: u32 = 20;
/// Text lengths; with the other columns a row takes up to 600 bytes.
const NOTE_BYTES: std::ops::RangeInclusive<usize> = 20..=540;

/// The case.
#[derive(Debug)]
pub struct Mix59 {
    commands: u64,
    tables: usize,
}

/// What is known of one table's rows.
struct Table {
    next_id: i64,
    live: Vec<i64>,
}

impl Mix59 {
    /// A share of the full work.
    pub fn new(scale: f64) -> Mix59 {
        Mix59::over(TABLES, COMMANDS as f64 * scale)
    }

    /// The same over another number of tables.
    pub fn over(tables: usize, commands: f64) -> Mix59 {
        let commands = scaled(commands.round() as u64, 1.0, COMMANDS_PER_TRANSACTION);
        Mix59 { commands, tables }
    }

    /// Rows of each table before replication begins.
    fn rows_before(&self) -> i64 {
        (ROWS_BEFORE / self.tables) as i64
    }
}

fn append_command(sql: &mut String, number: usize, table: &mut Table, prose: &mut Prose) {
    let table_name = format!("{SCHEMA}.mix_{number:02}");
    let kind = prose.rng().random_range(0..100);
    let cents = prose.rng().random_range(0..10_000_000);
    let (units, rest) = (cents / 100, cents % 100);
    // Writing to a String cannot fail.
    let _ = if kind < INSERTS || table.live.is_empty() {
        let id = table.next_id;
        table.next_id += 1;
        table.live.push(id);
        let customer = prose.rng().random_range(1..50_000);
        let note = note(prose);
        write!(
            sql,
            "INSERT INTO {table_name} VALUES ({id},{customer},{units}.{rest:02},now(),'{note}');"
        )
    } else {
        let at = prose.rng().random_range(0..table.live.len());
        if kind < INSERTS + UPDATES {
            let (id, note) = (table.live[at], note(prose));
            write!(
                sql,
                "UPDATE {table_name} SET amount={units}.{rest:02},changed=now(),note='{note}' \
                 WHERE id={id};"
            )
        } else {
            let id = table.live.swap_remove(at);
            write!(sql, "DELETE FROM {table_name} WHERE id={id};")
        }
    };
}

/// Letters, digits, blanks and full stops: nothing to be quoted.
fn note(prose: &mut Prose) -> String {
    let length = prose.rng().random_range(NOTE_BYTES);
    prose.take(length)
}

impl Tables for Mix59 {
    fn schema(&self) -> String {
        (0..self.tables).fold(String::new(), |mut sql, number| {
            let _ = write!(
                sql,
                "CREATE TABLE {SCHEMA}.mix_{number:02} (id bigint PRIMARY KEY, \
                 customer int NOT NULL, amount numeric(12, 2) NOT NULL, \
                 changed timestamptz NOT NULL, note text NOT NULL);"
            );
            sql
        })
    }

    fn preload(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        for number in 0..self.tables {
            interrupt.check()?;
            let notes: Vec<String> = (0..self.rows_before()).map(|_| note(prose)).collect();
            client.execute(
                &format!(
                    "INSERT INTO {SCHEMA}.mix_{number:02} \
                     SELECT id - 1, id * 7 % 50000, id * 31 % 100000 / 100.0, now(), note \
                     FROM unnest($1::text[]) WITH ORDINALITY AS given (note, id)"
                ),
                &[&notes],
            )?;
        }
        Ok(())
    }
}

impl Backlog for Mix59 {
    fn work(&self) -> Work {
        Work {
            commands: self.commands,
            transactions: self.commands / COMMANDS_PER_TRANSACTION,
            tables: self.tables as u64,
        }
    }

    fn build(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        let before = self.rows_before();
        let table = || Table { next_id: before, live: (0..before).collect() };
        let mut tables: Vec<Table> = (0..self.tables).map(|_| table()).collect();
        let mut sql = String::new();
        for _ in 0..self.work().transactions {
            interrupt.check()?;
            sql.clear();
            sql.push_str("BEGIN;");
            for _ in 0..COMMANDS_PER_TRANSACTION {
                let number = prose.rng().random_range(0..self.tables);
                append_command(&mut sql, number, &mut tables[number], prose);
            }
            sql.push_str("COMMIT");
            client.batch_execute(&sql)?;
        }
        Ok(())
    }
}
