//! What the workload's transactions do: each kind is a way in which replication can go wrong.

use postgres::{Client, Error, Transaction};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

const COUNTERS: i32 = 3;
const LISTS: i32 = 8;
const ACCOUNTS: i32 = 20;
const SEATS: i32 = 12;
const DOCUMENTS: i64 = 12;
/// A writer's rows in the ledger: older ones are pruned.
const LEDGER_ROWS_MAX: i64 = 400;
/// Characters of a list that are kept.
const LIST_CHARS: i32 = 800;
/// Stored out of line, and too large to be replicated by chance.
const BODY_CHARS: usize = 12_000;

/// The rows that are there from the beginning.
pub(super) fn fill(client: &mut Client) -> Result<(), Error> {
    client.batch_execute(&format!(
        "BEGIN;
         INSERT INTO prefix.ledger VALUES (0, 0);
         INSERT INTO prefix.trail VALUES (0, 0);
         INSERT INTO prefix.counter SELECT i, 0 FROM generate_series(1, {COUNTERS}) i;
         INSERT INTO prefix.list SELECT i, '' FROM generate_series(1, {LISTS}) i;
         INSERT INTO prefix.account SELECT i, 1000 FROM generate_series(1, {ACCOUNTS}) i;
         INSERT INTO prefix.seat SELECT i, 100 + i FROM generate_series(1, {SEATS}) i;
         INSERT INTO prefix.document
             SELECT i, 0, (SELECT string_agg(md5(i::text || j), '') FROM generate_series(1, 300) j)
             FROM generate_series(1, {DOCUMENTS}) i;
         INSERT INTO prefix.event SELECT -i, i % 7, 'from the beginning' FROM generate_series(1, 300) i;
         COMMIT"
    ))
}

/// One kind of work within a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Count,
    Append,
    Transfer,
    SwapSeats,
    ReplaceSeats,
    Order,
    MoveKey,
    Badge,
    Event,
    Truncate,
    Document,
    Bulk,
    Prune,
}

/// Kinds and how often each is chosen, relative to each other.
const MIX: &[(Kind, u32)] = &[
    (Kind::Count, 20),
    (Kind::Append, 14),
    (Kind::Transfer, 14),
    (Kind::SwapSeats, 8),
    (Kind::ReplaceSeats, 4),
    (Kind::Order, 14),
    (Kind::MoveKey, 8),
    (Kind::Badge, 8),
    (Kind::Event, 10),
    (Kind::Truncate, 2),
    (Kind::Document, 8),
    (Kind::Bulk, 1),
    (Kind::Prune, 2),
];

/// The choices of one writer.
pub(super) struct Writer {
    number: i32,
    rng: StdRng,
    /// Unique over all writers: their number is in the last three digits.
    txid: i64,
    bulk_rows: u32,
    /// The transaction has truncated a table.
    truncated: bool,
}

impl Writer {
    pub(super) fn new(number: u32, seed: u64, bulk_rows: u32) -> Writer {
        let rng = StdRng::seed_from_u64(seed.wrapping_mul(1_000).wrapping_add(number.into()));
        Writer { number: number as i32, rng, txid: i64::from(number), bulk_rows, truncated: false }
    }

    /// Does the work of the next transaction; `false` when it is to be rolled back.
    pub(super) fn fill_transaction(&mut self, tx: &mut Transaction<'_>) -> Result<bool, Error> {
        self.txid += 1_000;
        self.truncated = false;
        let (txid, writer) = (self.txid, self.number);
        // First in some transactions, last in others: a torn one then lacks one or the other.
        let ledger_first = self.rng.random_bool(0.5);
        if ledger_first {
            tx.execute("INSERT INTO prefix.ledger VALUES ($1, $2)", &[&txid, &writer])?;
        }
        for _ in 0..*[1, 1, 1, 2, 3].choose(&mut self.rng).unwrap_or(&1) {
            let kind = self.choose();
            if self.rng.random_bool(0.06) {
                self.undone(tx)?;
            }
            if self.rng.random_bool(0.06) {
                // Kept work of a subtransaction, with an undone one inside.
                let mut inner = tx.transaction()?;
                self.work(&mut inner, kind)?;
                self.undone(&mut inner)?;
                inner.commit()?;
            } else {
                self.work(tx, kind)?;
            }
        }
        tx.execute("INSERT INTO prefix.trail VALUES ($1, $2)", &[&txid, &writer])?;
        if !ledger_first {
            tx.execute("INSERT INTO prefix.ledger VALUES ($1, $2)", &[&txid, &writer])?;
        }
        Ok(self.rng.random_bool(0.95))
    }

    /// Work that a savepoint takes back.
    fn undone(&mut self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        let kind = self.choose();
        let mut inner = tx.transaction()?;
        self.work(&mut inner, kind)?;
        inner.rollback()
    }

    fn choose(&mut self) -> Kind {
        MIX.choose_weighted(&mut self.rng, |(_, weight)| *weight)
            .map_or(Kind::Count, |(kind, _)| *kind)
    }

    fn work(&mut self, tx: &mut Transaction<'_>, kind: Kind) -> Result<(), Error> {
        match kind {
            Kind::Count => self.count(tx),
            Kind::Append => self.append(tx),
            Kind::Transfer => self.transfer(tx),
            Kind::SwapSeats => self.swap_seats(tx),
            Kind::ReplaceSeats => self.replace_seats(tx),
            Kind::Order => self.order(tx),
            Kind::MoveKey => self.move_key(tx),
            Kind::Badge => self.badge(tx),
            Kind::Event => self.event(tx),
            Kind::Truncate => self.truncate(tx),
            Kind::Document => self.document(tx),
            Kind::Bulk => self.bulk(tx),
            Kind::Prune => self.prune(tx),
        }
    }

    fn count(&mut self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        // The first one is the hot one.
        let id = if self.rng.random_bool(0.7) { 1 } else { self.rng.random_range(1..=COUNTERS) };
        tx.execute("UPDATE prefix.counter SET n = n + 1 WHERE id = $1", &[&id]).map(drop)
    }

    fn append(&mut self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        let (id, item) = (self.rng.random_range(1..=LISTS), format!(",{}", self.txid));
        let update = "UPDATE prefix.list SET items = right(items || $2, $3) WHERE id = $1";
        tx.execute(update, &[&id, &item, &LIST_CHARS]).map(drop)
    }

    /// Two different numbers, the smaller one first: rows are locked in this order.
    fn pair(&mut self, max: i32) -> (i32, i32) {
        let a = self.rng.random_range(1..max);
        (a, self.rng.random_range(a + 1..=max))
    }

    fn transfer(&mut self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        let (a, b) = self.pair(ACCOUNTS);
        let amount = self.rng.random_range(-50..=50_i64);
        for (id, amount) in [(a, amount), (b, -amount)] {
            let update = "UPDATE prefix.account SET balance = balance + $2 WHERE id = $1";
            tx.execute(update, &[&id, &amount])?;
        }
        Ok(())
    }

    fn holders(
        &mut self,
        tx: &mut Transaction<'_>,
        a: i32,
        b: i32,
    ) -> Result<[Option<i32>; 2], Error> {
        let query = "SELECT holder FROM prefix.seat WHERE id IN ($1, $2) ORDER BY id FOR UPDATE";
        let rows = tx.query(query, &[&a, &b])?;
        let holder = |index: usize| rows.get(index).and_then(|row| row.get(0));
        Ok([holder(0), holder(1)])
    }

    /// Unique values change places by three updates, over a null.
    fn swap_seats(&mut self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        let (a, b) = self.pair(SEATS);
        let [of_a, of_b] = self.holders(tx, a, b)?;
        let set = "UPDATE prefix.seat SET holder = $2 WHERE id = $1";
        tx.execute(set, &[&a, &None::<i32>])?;
        tx.execute(set, &[&b, &of_a])?;
        tx.execute(set, &[&a, &of_b]).map(drop)
    }

    /// Unique values change places by deleted and inserted rows.
    fn replace_seats(&mut self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        let (a, b) = self.pair(SEATS);
        let [of_a, of_b] = self.holders(tx, a, b)?;
        tx.execute("DELETE FROM prefix.seat WHERE id IN ($1, $2)", &[&a, &b])?;
        let insert = "INSERT INTO prefix.seat VALUES ($1, $2), ($3, $4)";
        tx.execute(insert, &[&b, &of_a, &a, &of_b]).map(drop)
    }

    /// Several tables in one transaction: inserts, updates of earlier ones, deletes of old ones.
    fn order(&mut self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        let id = self.fresh_id();
        let lines: i32 = self.rng.random_range(1..=6);
        let customer: i32 = self.rng.random_range(1..=50);
        let insert = "INSERT INTO prefix.orders VALUES ($1, $2, 0, 'new')";
        tx.execute(insert, &[&id, &customer])?;
        let insert = "INSERT INTO prefix.order_lines \
                      SELECT $1, i, 'sku ' || i * $3, i FROM generate_series(1, $2) i";
        tx.execute(insert, &[&id, &lines, &customer])?;
        let total = "UPDATE prefix.orders SET total = \
                     (SELECT sum(quantity) FROM prefix.order_lines WHERE order_id = $1) WHERE id = $1";
        tx.execute(total, &[&id])?;
        // Orders of this writer only, so that writers do not wait for each other here.
        let own =
            "SELECT id FROM prefix.orders WHERE id % 1000 = $1::int ORDER BY id DESC OFFSET $2";
        if self.rng.random_bool(0.5) {
            let update = format!(
                "UPDATE prefix.orders SET status = NULLIF($3, '') WHERE id = ({own} LIMIT 1)"
            );
            let status = *["paid", "sent", ""].choose(&mut self.rng).unwrap_or(&"paid");
            let offset: i64 = self.rng.random_range(0..20);
            tx.execute(&update, &[&self.number, &offset, &status])?;
        }
        if self.rng.random_bool(0.3) {
            let keep = 60_i64;
            let delete = format!("DELETE FROM prefix.order_lines WHERE order_id IN ({own})");
            tx.execute(&delete, &[&self.number, &keep])?;
            let delete = format!("DELETE FROM prefix.orders WHERE id IN ({own})");
            tx.execute(&delete, &[&self.number, &keep])?;
        }
        Ok(())
    }

    /// A number that is unique over all writers and within the transaction, and ends like txid.
    fn fresh_id(&mut self) -> i64 {
        let bits: i64 = self.rng.random_range(0..1 << 40);
        bits * 1_000 + i64::from(self.number)
    }

    /// An update of the primary key itself.
    fn move_key(&mut self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        let (owner, id) = (self.number, self.fresh_id());
        let insert = "INSERT INTO prefix.moving VALUES ($1, $2, 'born ' || $3::bigint)";
        if self.rng.random_bool(0.4) {
            return tx.execute(insert, &[&id, &owner, &self.txid]).map(drop);
        }
        let oldest = "(SELECT min(id) FROM prefix.moving WHERE owner = $1)";
        if self.rng.random_bool(0.25) {
            let delete = format!("DELETE FROM prefix.moving WHERE id = {oldest}");
            return tx.execute(&delete, &[&owner]).map(drop);
        }
        let update = format!("UPDATE prefix.moving SET id = $2 WHERE id = {oldest}");
        tx.execute(&update, &[&owner, &id]).map(drop)
    }

    /// The replica identity is a unique index that is not the primary key.
    fn badge(&mut self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        let id = i64::from(self.rng.random_range(1..=15) * 1_000 + self.number);
        let code = format!("it's \"{}\"", self.fresh_id());
        match self.rng.random_range(0..4) {
            0 => tx.execute("DELETE FROM prefix.badge WHERE id = $1", &[&id]),
            1 => tx.execute("UPDATE prefix.badge SET note = $2 WHERE id = $1", &[&id, &code]),
            _ => {
                let insert = "INSERT INTO prefix.badge VALUES ($1, $2, NULL) \
                              ON CONFLICT (id) DO UPDATE SET code = excluded.code";
                tx.execute(insert, &[&id, &code])
            }
        }
        .map(drop)
    }

    fn event(&mut self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        let (id, rows): (i64, i32) = (self.fresh_id(), self.rng.random_range(1..=20));
        let insert = "INSERT INTO prefix.event \
                      SELECT $1::bigint + i * 1000, i, CASE WHEN i % 5 > 0 THEN 'event ' || i END \
                      FROM generate_series(1, $2) i ON CONFLICT DO NOTHING";
        tx.execute(insert, &[&id, &rows])?;
        let delete = "DELETE FROM prefix.event WHERE id IN (SELECT id FROM prefix.event \
                      WHERE id % 1000 = $1::int ORDER BY id OFFSET 100)";
        tx.execute(delete, &[&self.number]).map(drop)
    }

    fn truncate(&mut self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        let tables = *["prefix.scratch", "prefix.scratch, prefix.trail"]
            .choose(&mut self.rng)
            .unwrap_or(&"prefix.scratch");
        self.truncated = true;
        // A writer that holds a row of the table and wants this lock too would be a deadlock.
        tx.batch_execute(&format!("SET LOCAL lock_timeout = '500ms'; TRUNCATE {tables}"))?;
        let (id, rows): (i64, i32) = (self.fresh_id(), self.rng.random_range(0..=30));
        let insert = "INSERT INTO prefix.scratch SELECT $1::bigint + i * 1000, 'filled by ' || $3::bigint \
                      FROM generate_series(1, $2) i";
        tx.execute(insert, &[&id, &rows, &self.txid]).map(drop)
    }

    fn document(&mut self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        let nth = self.rng.random_range(0..DOCUMENTS);
        let query =
            "SELECT id FROM prefix.document ORDER BY id OFFSET $1 LIMIT 1 FOR UPDATE SKIP LOCKED";
        let Some(row) = tx.query_opt(query, &[&nth])? else { return Ok(()) };
        let id: i64 = row.get(0);
        match self.rng.random_range(0..10) {
            // The large value stays as it is, and is not in the log.
            0..=4 => {
                let update = "UPDATE prefix.document SET revision = revision + 1 WHERE id = $1";
                tx.execute(update, &[&id])
            }
            5..=6 => {
                let update =
                    "UPDATE prefix.document SET id = $2, revision = revision + 1 WHERE id = $1";
                tx.execute(update, &[&id, &self.fresh_id()])
            }
            // It is new, and then left as it is by the same transaction.
            7..=8 => {
                let body = self.body();
                tx.execute("UPDATE prefix.document SET body = $2 WHERE id = $1", &[&id, &body])?;
                let update = "UPDATE prefix.document SET revision = revision + 1 WHERE id = $1";
                tx.execute(update, &[&id])
            }
            _ => {
                tx.execute("DELETE FROM prefix.document WHERE id = $1", &[&id])?;
                let (id, body) = (self.fresh_id(), self.body());
                tx.execute("INSERT INTO prefix.document VALUES ($1, 0, $2)", &[&id, &body])
            }
        }
        .map(drop)
    }

    fn body(&mut self) -> String {
        (0..BODY_CHARS).map(|_| char::from(self.rng.random_range(b' '..=b'~'))).collect()
    }

    /// More than the publisher's decoding memory: sent while it is under way, partly taken back.
    fn bulk(&mut self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        let (batch, rows) = (self.txid, i32::try_from(self.bulk_rows).unwrap_or(i32::MAX));
        let insert = "INSERT INTO prefix.bulk SELECT $1::bigint + i * 1000, $2, 'row ' || i || repeat('x', 40) \
                      FROM generate_series(1, $3) i";
        tx.execute(insert, &[&self.fresh_id(), &batch, &(rows / 2)])?;
        // So that what the publisher has sent by now may be on the subscriber before the rest comes,
        // and other transactions commit meanwhile. Not where a table was truncated: a publisher of
        // version 15 that was killed could not decode its log any more ("could not map filenode").
        if !self.truncated && self.rng.random_bool(0.6) {
            tx.execute("SELECT pg_sleep($1)", &[&self.rng.random_range(0.02..0.25_f64)])?;
        }
        if self.rng.random_bool(0.4) {
            let mut undone = tx.transaction()?;
            let id = self.fresh_id();
            undone.execute(insert, &[&id, &batch, &(rows / 2)])?;
            undone.rollback()?;
        }
        let mut kept = tx.transaction()?;
        let id = self.fresh_id();
        kept.execute(insert, &[&id, &batch, &(rows / 2)])?;
        kept.commit()?;
        if self.rng.random_bool(0.5) {
            let update = "UPDATE prefix.bulk SET value = 'changed by ' || $1::bigint \
                          WHERE batch = $1 AND id % 3000 < 1000";
            tx.execute(update, &[&batch])?;
        }
        // All other batches that are visible, so that the table stays small.
        tx.execute("DELETE FROM prefix.bulk WHERE batch <> $1", &[&batch]).map(drop)
    }

    /// Keeps the tables, and so each sample, small.
    fn prune(&mut self, tx: &mut Transaction<'_>) -> Result<(), Error> {
        let delete = "DELETE FROM prefix.ledger WHERE writer = $1 AND txid < $2";
        let oldest = self.txid - LEDGER_ROWS_MAX * 1_000;
        tx.execute(delete, &[&self.number, &oldest]).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Oracle, create_tables, read_state};
    use super::*;
    use crate::postgres::{Cluster, Installation};
    use anyhow::{Context, Result};

    #[test]
    fn every_kind_of_work_succeeds_and_is_understood_by_the_oracle() -> Result<()> {
        for major in [15, 18] {
            let installation = Installation::find(major)?;
            let cluster =
                Cluster::builder(&installation).setting("wal_level", "logical").start()?;
            let mut client = cluster.connect()?;
            create_tables(&mut client)?;
            let oracle = Oracle::create(&mut client)?;
            fill(&mut client)?;
            let mut writer = Writer::new(1, 1, 200);
            let mut commits = 1;
            for (kind, _) in MIX {
                for _ in 0..12 {
                    writer.txid += 1_000;
                    let mut tx = client.transaction()?;
                    writer.work(&mut tx, *kind).with_context(|| format!("{kind:?}"))?;
                    tx.commit()?;
                    commits += 1;
                }
            }
            let history = oracle.history(&mut client)?;
            // Some work finds nothing to do.
            assert!(history.steps().len() <= commits && history.steps().len() > commits / 2);
            assert!(read_state(&mut client)?.rows().any(|row| row.to_string().starts_with("bulk")));
        }
        Ok(())
    }
}
