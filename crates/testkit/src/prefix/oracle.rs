//! The publisher's commit order, as PostgreSQL's own `test_decoding` tells it.

use super::decoding::{DecodedTransaction, decode};
use super::history::History;
use super::schema::{TABLES, table_names};
use super::state::{Row, State};
use anyhow::{Context, Result, ensure};
use postgres::error::SqlState;
use postgres::{Client, SimpleQueryMessage};

/// So that no transaction is given out before its end: test_decoding of 18.4 crashes the server when
/// one that it was asked to stream aborts and was never begun there.
const DECODING_SETTINGS: &str = "SET logical_decoding_work_mem = '1GB'";

/// A logical slot that nothing of the product reads.
#[derive(Debug)]
pub struct Oracle {
    slot: &'static str,
}

impl Oracle {
    /// Creates the slot; to be called after [`create_tables`](super::create_tables) and before
    /// the first row is written. The publisher keeps its WAL from now on.
    ///
    /// # Errors
    /// The server's message, as when `wal_level` is not `logical`.
    pub fn create(client: &mut Client) -> Result<Oracle> {
        let slot = "prefix_oracle";
        client
            .execute("SELECT pg_create_logical_replication_slot($1, 'test_decoding')", &[&slot])
            .context("create the oracle's slot")?;
        Ok(Oracle { slot })
    }

    /// Reads all commits so far and replays them. The slot does not move, so it can be read
    /// again. Fails unless the last state is what the publisher's tables hold, so call it when
    /// the writers have stopped.
    ///
    /// # Errors
    /// When the server cannot be read, or what it tells is not consistent.
    pub fn history(&self, client: &mut Client) -> Result<History> {
        let history = self.history_so_far(client)?;
        let tables = read_state(client).context("read the publisher's tables")?;
        ensure!(
            history.final_hash() == tables.hash(),
            "the oracle is wrong: its last state is not what the publisher's tables hold: {:?}",
            history.state(history.steps().len()).changes_to(&tables)
        );
        Ok(history)
    }

    /// As [`Oracle::history`], while the writers are at work: the last state is not looked at.
    ///
    /// # Errors
    /// When the server cannot be read, or what it tells is not consistent.
    pub fn history_so_far(&self, client: &mut Client) -> Result<History> {
        History::replay(self.transactions(client)?)
    }

    /// The end of the last commit so far that changed the workload's tables, as a number; 0 if
    /// there is none.
    ///
    /// # Errors
    /// When the server cannot be read.
    pub fn end(&self, client: &mut Client) -> Result<u64> {
        client.batch_execute(DECODING_SETTINGS)?;
        let query = "SELECT coalesce(max(lsn) - '0/0', 0)::bigint FROM \
                     pg_logical_slot_peek_changes($1, NULL, NULL, 'skip-empty-xacts', '1')";
        let end: i64 = client.query_one(query, &[&self.slot])?.get(0);
        Ok(u64::try_from(end)?)
    }

    /// All commits so far that changed the workload's tables, in commit order.
    ///
    /// # Errors
    /// When the server cannot be read, or its text is not understood.
    pub fn transactions(&self, client: &mut Client) -> Result<Vec<DecodedTransaction>> {
        client.batch_execute(DECODING_SETTINGS)?;
        let query = "SELECT data FROM pg_logical_slot_peek_changes($1, NULL, NULL, \
                     'include-xids', '1', 'skip-empty-xacts', '1')";
        let rows = client.query(query, &[&self.slot]).context("read the oracle's slot")?;
        decode(rows.iter().map(|row| row.get::<_, &str>(0)))
    }

    /// Removes the slot.
    ///
    /// # Errors
    /// The server's message.
    pub fn remove(self, client: &mut Client) -> Result<()> {
        client.execute("SELECT pg_drop_replication_slot($1)", &[&self.slot])?;
        Ok(())
    }
}

/// One SELECT per table, in the order of [`TABLES`].
pub(super) fn select_all() -> String {
    let select = |table: &super::TableSpec| {
        format!("SELECT {} FROM prefix.{};", table.columns.join(", "), table.name)
    };
    TABLES.iter().map(select).collect()
}

/// The rows that [`select_all`] gave; messages of statements before it must not be passed.
pub(super) fn state_of(messages: Vec<SimpleQueryMessage>) -> Result<State> {
    let mut state = State::default();
    let mut table = 0;
    for message in messages {
        match message {
            SimpleQueryMessage::Row(row) => {
                ensure!(table < TABLES.len(), "more results than tables");
                let values = (0..row.len()).map(|index| row.get(index).map(Into::into)).collect();
                state.add(Row::new(table, values));
            }
            SimpleQueryMessage::CommandComplete(_) => table += 1,
            // The columns are known; other messages carry no rows.
            SimpleQueryMessage::RowDescription(_) => {}
            other => anyhow::bail!("unexpected message {other:?}"),
        }
    }
    ensure!(table == TABLES.len(), "results of {table} tables, expected {}", TABLES.len());
    Ok(state)
}

/// Reads all tables of the workload in one snapshot.
///
/// # Errors
/// The server's message, also when another session keeps a table locked.
pub fn read_state(client: &mut Client) -> Result<State> {
    client.batch_execute(READER_SETTINGS)?;
    while let Err(error) = client.batch_execute(&begin_read()) {
        ensure!(error.code() == Some(&SqlState::T_R_DEADLOCK_DETECTED), error);
        client.batch_execute("ROLLBACK")?;
    }
    let messages = client.simple_query(&select_all())?;
    client.batch_execute("COMMIT")?;
    state_of(messages)
}

/// What a reader of all tables sets for itself. Several tables are locked one after the other here,
/// and by the TRUNCATE of several tables: a deadlock is to end here and not there. And who has
/// truncated may stand still with it: that is to be told, and not waited for.
pub(super) const READER_SETTINGS: &str =
    "SET deadlock_timeout = '20ms'; SET lock_timeout = '10s'; SET statement_timeout = '60s'";

/// Begins a read-only transaction that has no snapshot yet: its first SELECT takes it.
///
/// TRUNCATE does not respect snapshots: a reader whose snapshot is older sees an empty table. So
/// the tables are locked against it first, and LOCK takes no snapshot.
pub(super) fn begin_read() -> String {
    let tables = table_names().join(", ");
    format!(
        "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; \
         LOCK TABLE {tables} IN ACCESS SHARE MODE"
    )
}
