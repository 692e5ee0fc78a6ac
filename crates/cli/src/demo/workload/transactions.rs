//! The mixed load's transactions.

use crate::demo::schema::{CUSTOMERS, ORDERS, PRODUCTS, VOUCHERS};
use anyhow::Result;
use farshore_testkit::postgres::Cluster;
use postgres::error::SqlState;
use postgres::{Client, Transaction};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::VecDeque;

/// Documents, as [`crate::demo::schema::ROWS`] makes them.
const DOCUMENTS: i64 = 300;
/// Orders deleted in one transaction, at most.
const ORDERS_REMOVED_MAX: usize = 3;

/// One connection of the mixed load. Workers share tables but not rows, so that they never
/// deadlock.
pub struct Worker {
    client: Client,
    rng: StdRng,
    number: i64,
    workers: i64,
    next_order: i64,
    orders: VecDeque<i64>,
    documents: Vec<String>,
    /// How often each of this worker's vouchers was given another code.
    voucher_changes: Vec<u32>,
}

impl Worker {
    /// Connects worker `number` of `workers`.
    pub fn connect(publisher: &Cluster, number: i64, workers: i64, seed: u64) -> Result<Worker> {
        let mut client = publisher.connect()?;
        client.batch_execute("SET statement_timeout = '60s'")?;
        let mut documents = Vec::new();
        let query = "SELECT md5('d' || i)::uuid::text FROM generate_series(1, $1::bigint) AS i \
                     WHERE i % $2::bigint = $3::bigint";
        for row in client.query(query, &[&DOCUMENTS, &workers, &number])? {
            documents.push(row.get(0));
        }
        Ok(Worker {
            client,
            rng: StdRng::seed_from_u64(seed.wrapping_add(number as u64)),
            number,
            workers,
            next_order: ORDERS + 1 + number,
            orders: (1..=ORDERS).filter(|id| id % workers == number).collect(),
            documents,
            voucher_changes: vec![0; (VOUCHERS as usize).div_ceil(workers as usize)],
        })
    }

    /// Runs one transaction of a random kind; `false` if it was rolled back.
    pub fn transaction(&mut self) -> Result<bool> {
        match self.rng.random_range(0..100) {
            0..34 => self.place_order(),
            34..50 => self.advance_order(),
            50..60 => self.retitle_document(),
            60..63 => self.rewrite_document(),
            63..66 => self.rekey_document(),
            66..72 => self.recode_voucher(),
            72..78 => self.renew_session(),
            78..84 => self.remove_orders(),
            84..89 => self.roll_back_to_savepoint(),
            89..92 => self.roll_back(),
            92..97 => self.measure(),
            _ if self.number == 0 => self.empty_baskets(),
            _ => self.advance_order(),
        }
    }

    fn customer(&mut self) -> i32 {
        let workers = self.workers as i32;
        let mine = CUSTOMERS / workers;
        1 + self.number as i32 + self.rng.random_range(0..mine) * workers
    }

    fn sku(&mut self) -> String {
        let workers = self.workers as i32;
        let mine = PRODUCTS / workers;
        format!("sku-{:04}", 1 + self.number as i32 + self.rng.random_range(0..mine) * workers)
    }

    /// Rows in five tables.
    fn place_order(&mut self) -> Result<bool> {
        let id = self.next_order;
        self.next_order += self.workers;
        let customer = self.customer();
        let lines: Vec<String> = (0..self.rng.random_range(1..=5)).map(|_| self.sku()).collect();
        let cents: i64 = self.rng.random_range(100..100_000);
        let mut transaction = self.client.transaction()?;
        transaction.execute(
            "INSERT INTO shop.orders VALUES ($1, $2, 'new', clock_timestamp(), \
             $3::bigint / 100.0, 'order ' || $1::bigint, jsonb_build_object('lines', $4::int))",
            &[&id, &customer, &cents, &(lines.len() as i32)],
        )?;
        for (line, sku) in (1_i16..).zip(&lines) {
            transaction.execute(
                "INSERT INTO shop.order_lines \
                 SELECT $1::bigint, $2::smallint, sku, 1 + $2::smallint, price \
                 FROM shop.products WHERE sku = $3",
                &[&id, &line, sku],
            )?;
            transaction.execute(
                "UPDATE shop.stock SET on_hand = on_hand - 1, counted = clock_timestamp() \
                 WHERE warehouse = 'DUB' AND sku = $1",
                &[sku],
            )?;
        }
        transaction.execute(
            "UPDATE shop.customers SET balance = balance - $2::bigint / 100.0, \
             tags = tags[1:3] || ('order ' || $3::bigint) WHERE id = $1",
            &[&customer, &cents, &id],
        )?;
        audit(&mut transaction, "place")?;
        transaction.commit()?;
        self.orders.push_back(id);
        Ok(true)
    }

    fn advance_order(&mut self) -> Result<bool> {
        if self.orders.is_empty() {
            return Ok(false);
        }
        let id = self.orders[self.rng.random_range(0..self.orders.len())];
        self.client.execute(
            "UPDATE shop.orders \
             SET state = states[array_position(states, state) % array_length(states, 1) + 1], \
                 shipping = shipping || jsonb_build_object('at', clock_timestamp()) \
             FROM (SELECT enum_range(NULL::shop.order_state)) AS all_states (states) \
             WHERE id = $1",
            &[&id],
        )?;
        Ok(true)
    }

    fn document(&mut self) -> usize {
        self.rng.random_range(0..self.documents.len())
    }

    /// The body, stored out of line, stays as it is and is not in the log.
    fn retitle_document(&mut self) -> Result<bool> {
        let index = self.document();
        self.client.execute(
            "UPDATE shop.documents SET title = 'Title ' || revision, revision = revision + 1 \
             WHERE id = $1::text::uuid",
            &[&self.documents[index]],
        )?;
        Ok(true)
    }

    fn rewrite_document(&mut self) -> Result<bool> {
        let index = self.document();
        self.client.execute(
            "UPDATE shop.documents SET body = new.body, checksum = decode(md5(new.body), 'hex') \
             FROM (SELECT string_agg(md5(random()::text), '') AS body \
                   FROM generate_series(1, 300)) AS new \
             WHERE id = $1::text::uuid",
            &[&self.documents[index]],
        )?;
        Ok(true)
    }

    /// The key changes, the body stored out of line does not.
    fn rekey_document(&mut self) -> Result<bool> {
        let index = self.document();
        let row = self.client.query_one(
            "UPDATE shop.documents SET id = gen_random_uuid() WHERE id = $1::text::uuid \
             RETURNING id::text",
            &[&self.documents[index]],
        )?;
        self.documents[index] = row.get(0);
        Ok(true)
    }

    /// The replica identity changes; it is a unique index, not the primary key.
    fn recode_voucher(&mut self) -> Result<bool> {
        let index = self.rng.random_range(0..self.voucher_changes.len());
        let number = index as i64 * self.workers + self.number + 1;
        let changes = self.voucher_changes[index];
        let (old, new) =
            (format!("V{number:05}-{changes}"), format!("V{number:05}-{}", changes + 1));
        self.client.execute(
            "UPDATE shop.vouchers SET code = $2, used = NOT used WHERE code = $1",
            &[&old, &new],
        )?;
        self.voucher_changes[index] += 1;
        Ok(true)
    }

    /// A binary key: delete, insert again, change.
    fn renew_session(&mut self) -> Result<bool> {
        let token: [u8; 16] = self.rng.random();
        let customer = self.customer();
        let mut transaction = self.client.transaction()?;
        transaction.execute(
            "INSERT INTO shop.sessions VALUES ($1, $2, '::1', NULL, '08:00:2b:04:05:06', \
             clock_timestamp(), '1 month -3 days')",
            &[&token.as_slice(), &customer],
        )?;
        transaction.execute(
            "UPDATE shop.sessions SET token = token || '\\x00'::bytea, idle = idle * 2 \
             WHERE token = $1",
            &[&token.as_slice()],
        )?;
        let gone: [u8; 2] = self.rng.random();
        transaction.execute(
            "DELETE FROM shop.sessions WHERE substr(token, 1, 1) = substr($1::bytea, 1, 1) \
             AND customer % $2::int = $3::int",
            &[
                &gone.as_slice(),
                &(self.workers as i32),
                &((self.number as i32 + 1) % self.workers as i32),
            ],
        )?;
        transaction.commit()?;
        Ok(true)
    }

    fn remove_orders(&mut self) -> Result<bool> {
        let count = self.rng.random_range(1..=ORDERS_REMOVED_MAX).min(self.orders.len());
        let gone: Vec<i64> = self.orders.drain(..count).collect();
        let mut transaction = self.client.transaction()?;
        transaction.execute("DELETE FROM shop.order_lines WHERE order_id = ANY ($1)", &[&gone])?;
        transaction.execute("DELETE FROM shop.orders WHERE id = ANY ($1)", &[&gone])?;
        audit(&mut transaction, "remove")?;
        transaction.commit()?;
        Ok(true)
    }

    /// What a sub-transaction did is gone, what was before and after it stays.
    fn roll_back_to_savepoint(&mut self) -> Result<bool> {
        let customer = self.customer();
        let mut transaction = self.client.transaction()?;
        audit(&mut transaction, "before the savepoint")?;
        let mut doomed = transaction.transaction()?;
        doomed.execute("UPDATE shop.customers SET vip = NOT vip WHERE id = $1", &[&customer])?;
        audit(&mut doomed, "never happened")?;
        doomed.rollback()?;
        let mut kept = transaction.transaction()?;
        kept.execute(
            "UPDATE shop.customers SET last_seen = '2001:db8::7' WHERE id = $1",
            &[&customer],
        )?;
        kept.commit()?;
        transaction.commit()?;
        Ok(true)
    }

    fn roll_back(&mut self) -> Result<bool> {
        let customer = self.customer();
        let mut transaction = self.client.transaction()?;
        transaction.execute("UPDATE shop.customers SET balance = 0 WHERE id = $1", &[&customer])?;
        audit(&mut transaction, "never happened")?;
        transaction.rollback()?;
        Ok(false)
    }

    fn measure(&mut self) -> Result<bool> {
        let sensor = self.rng.random_range(0..50) * self.workers as i32 + self.number as i32;
        self.client.execute(
            "INSERT INTO shop.measurements \
             SELECT $1::int, clock_timestamp() + i * interval '1 microsecond', random() * 1e6, \
                    (i % 256)::bit(8) FROM generate_series(1, 20) AS i ON CONFLICT DO NOTHING",
            &[&sensor],
        )?;
        Ok(true)
    }

    /// TRUNCATE needs the table for itself, which the initial copy may not grant: then another
    /// time.
    fn empty_baskets(&mut self) -> Result<bool> {
        let mut transaction = self.client.transaction()?;
        transaction.batch_execute("SET LOCAL lock_timeout = '20ms'")?;
        match transaction.batch_execute("TRUNCATE shop.baskets") {
            Ok(()) => {}
            Err(error) if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        transaction.execute(
            "INSERT INTO shop.baskets SELECT i, 'basket of ' || clock_timestamp() \
             FROM generate_series(1, 20) AS i",
            &[],
        )?;
        transaction.commit()?;
        Ok(true)
    }
}

fn audit(transaction: &mut Transaction<'_>, what: &str) -> Result<()> {
    transaction.execute(
        "INSERT INTO shop.audit (at, actor, event) \
         VALUES (clock_timestamp(), current_user, jsonb_build_object('what', $1::text))",
        &[&what],
    )?;
    Ok(())
}
