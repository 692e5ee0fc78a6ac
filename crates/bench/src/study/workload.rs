//! The study's transactions: each client has rows of its own in every table, so nobody waits for a
//! lock, and the tables stay in order of what was inserted when.

use crate::backlog::{SCHEMA, Tables};
use crate::load::{self, Source};
use crate::text::Prose;
use anyhow::Result;
use farshore_testkit::interrupt::Interrupt;
use postgres::{Client, Statement};
use rand::RngExt;
use std::fmt::Write as _;
use std::ops::Range;

/// Clients of the publisher.
pub const CLIENTS: usize = 40;
/// Tables.
pub const TABLES: usize = 59;
/// Row changes of the smallest transaction.
pub const COMMANDS_MIN: usize = 10;
/// Row changes of the largest transaction.
pub const COMMANDS_MAX: usize = 100;
/// On average.
pub const COMMANDS_MEAN: f64 = (COMMANDS_MIN + COMMANDS_MAX) as f64 / 2.0;
/// Of 100 commands, this many insert, and this many update; the others delete.
const INSERTS: usize = 70;
const UPDATES: usize = 20;
/// Tables that one transaction touches at most.
const TABLES_PER_TRANSACTION: usize = 4;
/// Rows of each client in each table before replication begins.
const ROWS_BEFORE: i64 = 40;
/// Text lengths; with the other columns a row takes up to 2 KB. Short ones are more frequent.
const NOTE_BYTES_MAX: f64 = 1_950.0;

/// Where the load stands; it goes on from phase to phase.
#[derive(Debug)]
pub struct Workload {
    clients: Vec<Rows>,
    last_beat: i64,
}

/// A client's rows in each table.
type Rows = Vec<Range<i64>>;

impl Workload {
    /// Nothing was committed yet.
    pub fn new() -> Workload {
        let rows: Rows = (0..TABLES).map(|_| 0..ROWS_BEFORE).collect();
        Workload { clients: vec![rows; CLIENTS], last_beat: 0 }
    }
}

fn table(number: usize) -> String {
    format!("{SCHEMA}.study_{number:02}")
}

fn id(client: usize, row: i64) -> i64 {
    row * CLIENTS as i64 + client as i64
}

fn note(prose: &mut Prose) -> String {
    let share: f64 = prose.rng().random();
    prose.take(20 + (share * share * NOTE_BYTES_MAX) as usize)
}

impl Tables for Workload {
    fn schema(&self) -> String {
        (0..TABLES).fold(load::schema(), |mut sql, number| {
            // Writing to a String cannot fail.
            let _ = write!(
                sql,
                "CREATE TABLE {} (id bigint PRIMARY KEY, customer int NOT NULL, \
                 amount numeric(12, 2) NOT NULL, changed timestamptz NOT NULL, note text NOT NULL);",
                table(number)
            );
            sql
        })
    }

    fn preload(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        client.batch_execute(&load::preload())?;
        for number in 0..TABLES {
            interrupt.check()?;
            let ids: Vec<i64> =
                (0..CLIENTS).flat_map(|c| (0..ROWS_BEFORE).map(move |row| id(c, row))).collect();
            let notes: Vec<String> = ids.iter().map(|_| note(prose)).collect();
            client.execute(&insert(number), &[&ids, &notes])?;
        }
        Ok(())
    }
}

impl Source for Workload {
    type Session = Session;

    fn sessions(&self) -> usize {
        CLIENTS
    }

    fn session(&self, number: usize, client: Client, seed: u64) -> Result<Session> {
        Ok(Session {
            client,
            number,
            rows: self.clients[number].clone(),
            statements: (0..TABLES).map(|_| None).collect(),
            prose: Prose::new(seed.wrapping_add(number as u64)),
            committed: 0,
        })
    }

    fn set(&mut self, session: &Session) {
        self.clients[session.number].clone_from(&session.rows);
    }

    fn last_beat(&self) -> i64 {
        self.last_beat
    }

    fn set_beat(&mut self, number: i64) {
        self.last_beat = number;
    }
}

fn insert(number: usize) -> String {
    format!(
        "INSERT INTO {} SELECT id, id % 50000, id * 31 % 100000 / 100.0, now(), note \
         FROM unnest($1::bigint[], $2::text[]) AS given (id, note)",
        table(number)
    )
}

/// One client.
pub struct Session {
    client: Client,
    number: usize,
    rows: Rows,
    statements: Vec<Option<Statements>>,
    prose: Prose,
    committed: u64,
}

/// Of one table.
struct Statements {
    insert: Statement,
    update: Statement,
    delete: Statement,
}

impl Session {
    fn prepare(&mut self, number: usize) -> Result<()> {
        if self.statements[number].is_none() {
            let name = table(number);
            self.statements[number] = Some(Statements {
                insert: self.client.prepare(&insert(number))?,
                update: self.client.prepare(&format!(
                    "UPDATE {name} t SET amount = amount + 1, changed = now(), note = given.note \
                     FROM unnest($1::bigint[], $2::text[]) AS given (id, note) WHERE t.id = given.id"
                ))?,
                delete: self.client.prepare(&format!("DELETE FROM {name} WHERE id = ANY ($1)"))?,
            });
        }
        Ok(())
    }
}

impl load::Session for Session {
    fn committed(&self) -> u64 {
        self.committed
    }

    fn commit(&mut self) -> Result<()> {
        let commands = self.prose.rng().random_range(COMMANDS_MIN..=COMMANDS_MAX);
        let tables = self.prose.rng().random_range(1..=TABLES_PER_TRANSACTION);
        let first = self.prose.rng().random_range(0..TABLES);
        let chosen: Vec<usize> = (0..tables).map(|step| (first + step * 7) % TABLES).collect();
        for number in &chosen {
            self.prepare(*number)?;
        }
        let mut transaction = self.client.transaction()?;
        for (turn, number) in chosen.iter().enumerate() {
            let Some(statements) = &self.statements[*number] else { continue };
            let rows = &mut self.rows[*number];
            let share = commands * (turn + 1) / tables - commands * turn / tables;
            let (mut inserted, mut updated, mut deleted) = (Vec::new(), Vec::new(), Vec::new());
            for _ in 0..share {
                match self.prose.rng().random_range(0..100) {
                    kind if kind < INSERTS => {
                        inserted.push(id(self.number, rows.end));
                        rows.end += 1;
                    }
                    kind if kind < INSERTS + UPDATES => {
                        let row = self.prose.rng().random_range(rows.clone());
                        updated.push(id(self.number, row));
                    }
                    _ if rows.end - rows.start > ROWS_BEFORE / 2 => {
                        deleted.push(id(self.number, rows.start));
                        rows.start += 1;
                    }
                    // Too few rows are left to find some to update.
                    _ => {}
                }
            }
            updated.sort_unstable();
            updated.dedup();
            let mut notes = |ids: &[i64]| -> Vec<String> {
                ids.iter().map(|_| note(&mut self.prose)).collect()
            };
            let (new, changed) = (notes(&inserted), notes(&updated));
            transaction.execute(&statements.insert, &[&inserted, &new])?;
            transaction.execute(&statements.update, &[&updated, &changed])?;
            transaction.execute(&statements.delete, &[&deleted])?;
        }
        transaction.commit()?;
        self.committed += 1;
        Ok(())
    }
}
