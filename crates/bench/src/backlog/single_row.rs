//! `insert-1` and `update-1`: transactions of one row. The server itself commits them, in a
//! procedure fed from an unlogged table, because a client's round trips would take longer.

use super::{Backlog, SCHEMA, STAGING, Tables, Work, scaled};
use crate::text::Prose;
use anyhow::Result;
use farshore_testkit::interrupt::Interrupt;
use postgres::Client;
use rand::RngExt;
use rand::seq::SliceRandom;

const TRANSACTIONS: u64 = 200_000;
/// Transactions per call of the procedure.
const CALL: u64 = 10_000;
/// Rows per statement that fills tables.
const FILL: usize = 10_000;
/// Text lengths.
const NOTE_BYTES: std::ops::RangeInclusive<usize> = 60..=180;

/// 200,000 transactions of one inserted row.
#[derive(Debug)]
pub struct Insert1 {
    transactions: u64,
}

/// 200,000 transactions of one updated row: each row of a table once, in random order.
#[derive(Debug)]
pub struct Update1 {
    transactions: u64,
}

impl Insert1 {
    /// A share of the full work.
    pub fn new(scale: f64) -> Insert1 {
        Insert1 { transactions: scaled(TRANSACTIONS, scale, 1) }
    }
}

impl Update1 {
    /// A share of the full work; the table shrinks with it.
    pub fn new(scale: f64) -> Update1 {
        Update1 { transactions: scaled(TRANSACTIONS, scale, 1) }
    }
}

/// `n` from 0, a customer, an amount in cents, a note.
pub(super) fn fill(
    client: &mut Client,
    into: &str,
    rows: u64,
    prose: &mut Prose,
    interrupt: &Interrupt,
) -> Result<()> {
    let insert = client.prepare(&format!(
        "INSERT INTO {into} SELECT * FROM unnest($1::bigint[], $2::int[], $3::bigint[], $4::text[])"
    ))?;
    let all: Vec<i64> = (0..rows as i64).collect();
    for ids in all.chunks(FILL) {
        interrupt.check()?;
        let rng = prose.rng();
        let customers: Vec<i32> = ids.iter().map(|_| rng.random_range(1..50_000)).collect();
        let cents: Vec<i64> = ids.iter().map(|_| rng.random_range(1..10_000_000)).collect();
        let notes: Vec<String> = ids
            .iter()
            .map(|_| {
                let length = prose.rng().random_range(NOTE_BYTES);
                prose.take(length)
            })
            .collect();
        client.execute(&insert, &[&ids, &customers, &cents, &notes])?;
    }
    Ok(())
}

/// Calls the procedure for steps from 0.
pub(super) fn commit_each(
    client: &mut Client,
    transactions: u64,
    interrupt: &Interrupt,
) -> Result<()> {
    for first in (0..transactions).step_by(CALL as usize) {
        interrupt.check()?;
        let last = (first + CALL).min(transactions) - 1;
        client.batch_execute(&format!("CALL {STAGING}.commit_each({first}, {last})"))?;
    }
    Ok(())
}

/// Columns that [`fill`] fills.
pub(super) const COLUMNS: &str = "id bigint PRIMARY KEY, customer int NOT NULL, cents bigint NOT NULL, \
                       note text NOT NULL";

/// A procedure that commits a statement for every `step` between two numbers.
pub(super) fn procedure(statement: &str) -> String {
    format!(
        "CREATE PROCEDURE {STAGING}.commit_each(first bigint, last bigint) LANGUAGE plpgsql AS $$ \
         BEGIN FOR step IN first..last LOOP {statement}; COMMIT; END LOOP; END $$"
    )
}

impl Tables for Insert1 {
    fn schema(&self) -> String {
        format!("CREATE TABLE {SCHEMA}.insert_1 ({COLUMNS})")
    }

    fn preload(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        client.batch_execute(&format!("CREATE UNLOGGED TABLE {STAGING}.payload ({COLUMNS})"))?;
        client.batch_execute(&procedure(&format!(
            "INSERT INTO {SCHEMA}.insert_1 SELECT * FROM {STAGING}.payload WHERE id = step"
        )))?;
        fill(client, &format!("{STAGING}.payload"), self.transactions, prose, interrupt)
    }
}

impl Backlog for Insert1 {
    fn work(&self) -> Work {
        Work { commands: self.transactions, transactions: self.transactions, tables: 1 }
    }

    fn build(&self, client: &mut Client, _: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        commit_each(client, self.transactions, interrupt)
    }
}

impl Tables for Update1 {
    fn schema(&self) -> String {
        format!("CREATE TABLE {SCHEMA}.update_1 ({COLUMNS})")
    }

    fn preload(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        let turns = format!("{STAGING}.turns");
        client.batch_execute(&format!(
            "CREATE UNLOGGED TABLE {turns} (turn bigint PRIMARY KEY, row_id bigint NOT NULL)"
        ))?;
        client.batch_execute(&procedure(&format!(
            "UPDATE {SCHEMA}.update_1 SET cents = cents + step % 1000 + 1 \
             WHERE id = (SELECT row_id FROM {turns} WHERE turn = step)"
        )))?;
        let mut order: Vec<i64> = (0..self.transactions as i64).collect();
        order.shuffle(prose.rng());
        client.execute(
            &format!(
                "INSERT INTO {turns} SELECT n - 1, row_id \
                 FROM unnest($1::bigint[]) WITH ORDINALITY AS t (row_id, n)"
            ),
            &[&order],
        )?;
        fill(client, &format!("{SCHEMA}.update_1"), self.transactions, prose, interrupt)
    }
}

impl Backlog for Update1 {
    fn work(&self) -> Work {
        Work { commands: self.transactions, transactions: self.transactions, tables: 1 }
    }

    fn build(&self, client: &mut Client, _: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        commit_each(client, self.transactions, interrupt)
    }
}
