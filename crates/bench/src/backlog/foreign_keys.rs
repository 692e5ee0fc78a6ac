//! `foreign-keys`: orders and their lines come, change and go in an order that foreign keys allow.
//! Farshore writes as a role that cannot switch the keys of its target off, so they are checked.
//! PostgreSQL's own apply worker runs as it always does: without checking them.

use super::{Backlog, SCHEMA, Tables, Work, scaled};
use crate::text::Prose;
use anyhow::Result;
use farshore_testkit::interrupt::Interrupt;
use postgres::Client;
use rand::RngExt;
use std::fmt::Write as _;

const COMMANDS: u64 = 200_000;
/// Every order has as many lines.
const LINES: i64 = 4;
/// In each transaction: orders placed with their lines, rows updated, orders deleted with theirs.
const PLACED: u64 = 2;
const UPDATED: u64 = 5;
const DELETED: u64 = 1;
const COMMANDS_PER_TRANSACTION: u64 = (PLACED + DELETED) * (1 + LINES as u64) + UPDATED;
/// Rows before replication begins; not scaled, so that updates and deletes always find some.
const CUSTOMERS: i64 = 1_000;
const ORDERS_BEFORE: i64 = 5_000;
const NOTE_BYTES: std::ops::RangeInclusive<usize> = 20..=120;

/// The case.
#[derive(Debug)]
pub struct ForeignKeys {
    commands: u64,
}

impl ForeignKeys {
    /// A share of the full work.
    pub fn new(scale: f64) -> ForeignKeys {
        ForeignKeys { commands: scaled(COMMANDS, scale, COMMANDS_PER_TRANSACTION) }
    }
}

fn note(prose: &mut Prose) -> String {
    let length = prose.rng().random_range(NOTE_BYTES);
    prose.take(length)
}

/// An order before its lines.
fn append_order(sql: &mut String, id: i64, prose: &mut Prose) {
    let customer = prose.rng().random_range(0..CUSTOMERS);
    let note = note(prose);
    // Writing to a String cannot fail.
    let _ = write!(sql, "INSERT INTO {SCHEMA}.fk_order VALUES ({id},{customer},now(),'{note}');");
    for line in 0..LINES {
        let (product, cents) =
            (prose.rng().random_range(0..9_000), prose.rng().random_range(100..99_999));
        let _ = write!(
            sql,
            "INSERT INTO {SCHEMA}.fk_line VALUES ({},{id},{product},{cents});",
            id * LINES + line
        );
    }
}

/// A customer, an order or a line.
fn append_update(sql: &mut String, order: i64, prose: &mut Prose) {
    let _ = match prose.rng().random_range(0..10) {
        0 => {
            let (id, note) = (prose.rng().random_range(0..CUSTOMERS), note(prose));
            write!(sql, "UPDATE {SCHEMA}.fk_customer SET note='{note}' WHERE id={id};")
        }
        // Some go to another parent.
        1 => {
            let customer = prose.rng().random_range(0..CUSTOMERS);
            write!(sql, "UPDATE {SCHEMA}.fk_order SET customer={customer} WHERE id={order};")
        }
        2..5 => {
            let note = note(prose);
            write!(sql, "UPDATE {SCHEMA}.fk_order SET note='{note}' WHERE id={order};")
        }
        _ => {
            let line = order * LINES + prose.rng().random_range(0..LINES);
            let cents = prose.rng().random_range(100..99_999);
            write!(sql, "UPDATE {SCHEMA}.fk_line SET cents={cents} WHERE id={line};")
        }
    };
}

/// The lines before their order.
fn append_delete(sql: &mut String, id: i64) {
    let _ = write!(
        sql,
        "DELETE FROM {SCHEMA}.fk_line WHERE order_id={id};\
         DELETE FROM {SCHEMA}.fk_order WHERE id={id};"
    );
}

impl Tables for ForeignKeys {
    fn schema(&self) -> String {
        format!(
            "CREATE TABLE {SCHEMA}.fk_customer (id bigint PRIMARY KEY, note text NOT NULL); \
             CREATE TABLE {SCHEMA}.fk_order (id bigint PRIMARY KEY, \
               customer bigint NOT NULL REFERENCES {SCHEMA}.fk_customer, \
               placed timestamptz NOT NULL, note text NOT NULL); \
             CREATE TABLE {SCHEMA}.fk_line (id bigint PRIMARY KEY, \
               order_id bigint NOT NULL REFERENCES {SCHEMA}.fk_order, \
               product int NOT NULL, cents int NOT NULL); \
             CREATE INDEX ON {SCHEMA}.fk_order (customer); \
             CREATE INDEX ON {SCHEMA}.fk_line (order_id)"
        )
    }

    fn checks_foreign_keys(&self) -> bool {
        true
    }

    fn preload(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        let notes: Vec<String> = (0..CUSTOMERS).map(|_| note(prose)).collect();
        client.execute(
            &format!(
                "INSERT INTO {SCHEMA}.fk_customer SELECT id - 1, note \
                 FROM unnest($1::text[]) WITH ORDINALITY AS given (note, id)"
            ),
            &[&notes],
        )?;
        let mut sql = String::new();
        for id in 0..ORDERS_BEFORE {
            append_order(&mut sql, id, prose);
            if id % 100 == 99 {
                interrupt.check()?;
                client.batch_execute(&sql)?;
                sql.clear();
            }
        }
        client.batch_execute(&sql)?;
        Ok(())
    }
}

impl Backlog for ForeignKeys {
    fn work(&self) -> Work {
        let transactions = self.commands / COMMANDS_PER_TRANSACTION;
        Work { commands: self.commands, transactions, tables: 3 }
    }

    fn build(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        let mut live: Vec<i64> = (0..ORDERS_BEFORE).collect();
        let mut next = ORDERS_BEFORE;
        let mut sql = String::new();
        for _ in 0..self.work().transactions {
            interrupt.check()?;
            sql.clear();
            sql.push_str("BEGIN;");
            for _ in 0..PLACED {
                append_order(&mut sql, next, prose);
                live.push(next);
                next += 1;
            }
            for _ in 0..UPDATED {
                let order = live[prose.rng().random_range(0..live.len())];
                append_update(&mut sql, order, prose);
            }
            for _ in 0..DELETED {
                let at = prose.rng().random_range(0..live.len());
                append_delete(&mut sql, live.swap_remove(at));
            }
            sql.push_str("COMMIT");
            client.batch_execute(&sql)?;
        }
        Ok(())
    }
}
