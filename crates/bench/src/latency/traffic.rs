//! The transactions of the load: inserts and updates of rows of one table.

use crate::backlog::{SCHEMA, Tables, scaled};
use crate::contest::Ground;
use crate::load::{self, Source};
use crate::text::Prose;
use anyhow::Result;
use farshore_testkit::interrupt::Interrupt;
use postgres::{Client, Statement};
use rand::RngExt;

/// Connections that commit the load, so that flushes of the publisher's log are shared.
const SESSIONS: usize = 8;
/// Rows before replication begins, per session.
const ROWS_BEFORE: i64 = 2_500;
/// Rows of a transaction that has many: half of them inserted, half updated.
const MANY: usize = 50;
/// Transactions whose drain measures the ceiling: 400,000 rows.
const BACKLOG: u64 = 8_000;
const NOTE_BYTES: std::ops::RangeInclusive<usize> = 60..=180;

/// Where the load stands; it goes on from phase to phase.
#[derive(Debug)]
pub struct Traffic {
    rows: usize,
    /// Rows that each session has inserted.
    next: Vec<i64>,
    last_beat: i64,
}

impl Traffic {
    /// Transactions of one row, inserted or updated in turn.
    pub fn of_one_row() -> Traffic {
        Traffic::new(1)
    }

    /// Transactions of many rows.
    pub fn of_many_rows() -> Traffic {
        Traffic::new(MANY)
    }

    fn new(rows: usize) -> Traffic {
        Traffic { rows, next: vec![ROWS_BEFORE; SESSIONS], last_beat: 0 }
    }

    /// Rows per transaction.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Commits transactions as fast as one session can; returns how many.
    pub fn backlog(&mut self, ground: &Ground<'_>, scale: f64) -> Result<u64> {
        let mut client = ground.source()?;
        client.batch_execute("SET synchronous_commit = off")?;
        let mut session = self.session(0, client, ground.seed())?;
        let transactions = scaled(BACKLOG, scale, 1);
        for _ in 0..transactions {
            ground.interrupt().check()?;
            load::Session::commit(&mut session)?;
        }
        self.set(&session);
        Ok(transactions)
    }
}

impl Source for Traffic {
    type Session = Session;

    fn sessions(&self) -> usize {
        SESSIONS
    }

    fn session(&self, number: usize, client: Client, seed: u64) -> Result<Session> {
        Session::new(client, number, self.next[number], self.rows, seed)
    }

    fn set(&mut self, session: &Session) {
        self.next[session.number] = session.next;
    }

    fn last_beat(&self) -> i64 {
        self.last_beat
    }

    fn set_beat(&mut self, number: i64) {
        self.last_beat = number;
    }
}

impl Tables for Traffic {
    fn schema(&self) -> String {
        format!(
            "{} CREATE TABLE {SCHEMA}.traffic (id bigint PRIMARY KEY, customer int NOT NULL, \
             cents bigint NOT NULL, note text NOT NULL);",
            load::schema()
        )
    }

    fn preload(&self, client: &mut Client, prose: &mut Prose, interrupt: &Interrupt) -> Result<()> {
        client.batch_execute(&load::preload())?;
        for session in 0..SESSIONS {
            interrupt.check()?;
            let ids: Vec<i64> = (0..ROWS_BEFORE).map(|row| id(session, row)).collect();
            let Given { customers, cents, notes } = given(prose, ids.len());
            client.execute(&insert(), &[&ids, &customers, &cents, &notes])?;
        }
        Ok(())
    }
}

/// Rows of different sessions are different rows: nobody waits for a lock.
fn id(session: usize, row: i64) -> i64 {
    row * SESSIONS as i64 + session as i64
}

struct Given {
    customers: Vec<i32>,
    cents: Vec<i64>,
    notes: Vec<String>,
}

fn given(prose: &mut Prose, rows: usize) -> Given {
    let mut given = Given { customers: Vec::new(), cents: Vec::new(), notes: Vec::new() };
    for _ in 0..rows {
        given.customers.push(prose.rng().random_range(1..50_000));
        given.cents.push(prose.rng().random_range(1..10_000_000));
        let length = prose.rng().random_range(NOTE_BYTES);
        given.notes.push(prose.take(length));
    }
    given
}

fn insert() -> String {
    format!(
        "INSERT INTO {SCHEMA}.traffic \
         SELECT * FROM unnest($1::bigint[], $2::int[], $3::bigint[], $4::text[])"
    )
}

/// One client of the publisher.
pub struct Session {
    client: Client,
    prose: Prose,
    number: usize,
    next: i64,
    committed: u64,
    kind: Kind,
}

/// Each transaction is one statement, so that it costs one round trip.
enum Kind {
    OneRow { insert: Statement, update: Statement },
    ManyRows { both: Statement, half: usize },
}

impl Session {
    fn new(
        mut client: Client,
        number: usize,
        next: i64,
        rows: usize,
        seed: u64,
    ) -> Result<Session> {
        let update = format!("UPDATE {SCHEMA}.traffic SET cents = cents + 1 WHERE id");
        let kind = if rows == 1 {
            Kind::OneRow {
                insert: client.prepare(&insert())?,
                update: client.prepare(&format!("{update} = $1"))?,
            }
        } else {
            let both = format!("WITH changed AS ({update} = ANY ($5::bigint[])) {}", insert());
            Kind::ManyRows { both: client.prepare(&both)?, half: rows / 2 }
        };
        let prose = Prose::new(seed.wrapping_add(number as u64));
        Ok(Session { client, prose, number, next, committed: 0, kind })
    }
}

impl load::Session for Session {
    fn committed(&self) -> u64 {
        self.committed
    }

    fn commit(&mut self) -> Result<()> {
        match &self.kind {
            Kind::OneRow { update, .. } if self.committed % 2 == 1 => {
                let row = self.prose.rng().random_range(0..self.next);
                self.client.execute(update, &[&id(self.number, row)])?;
            }
            Kind::OneRow { insert, .. } => {
                let ids = [id(self.number, self.next)];
                self.next += 1;
                let Given { customers, cents, notes } = given(&mut self.prose, 1);
                self.client.execute(insert, &[&&ids[..], &customers, &cents, &notes])?;
            }
            Kind::ManyRows { both, half } => {
                let half = *half as i64;
                // Spread over all rows, each at most once.
                let (stride, first) =
                    (self.next / half, self.prose.rng().random_range(0..self.next));
                let changed: Vec<i64> = (0..half)
                    .map(|step| id(self.number, (first + step * stride) % self.next))
                    .collect();
                let ids: Vec<i64> =
                    (self.next..self.next + half).map(|row| id(self.number, row)).collect();
                self.next += half;
                let Given { customers, cents, notes } = given(&mut self.prose, ids.len());
                self.client.execute(both, &[&ids, &customers, &cents, &notes, &changed])?;
            }
        }
        self.committed += 1;
        Ok(())
    }
}
