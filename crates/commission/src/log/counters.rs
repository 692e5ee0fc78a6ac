//! What the server counts of its log.

use super::server::Server;
use super::trying;
use crate::Error;
use farshore_model::Lsn;
use farshore_pg::{Connection, Row};
use std::time::{Duration, Instant};

/// Sessions tell what they did when they end; the process that writes the log ahead of them tells it
/// every `wal_writer_delay`, 200 ms unless set otherwise.
const STILL_FOR: Duration = Duration::from_millis(250);
/// Up to 14 a process of its own collected statistics, and gave them out every half second.
const STILL_FOR_14: Duration = Duration::from_millis(650);
/// A server in use by others never comes to rest.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(4);

/// Readings of the server's counters; or the difference between two.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Counters {
    /// Where the log ends, in bytes.
    pub position: u64,
    /// Bytes of records, without pages' headers.
    pub record_bytes: u64,
    /// Writes of the log.
    pub writes: u64,
    /// Flushes of the log; 0 where writes are durable by themselves (`open_datasync`, `open_sync`).
    pub flushes: u64,
    /// How often a session had to write the log because its buffers were full.
    pub buffers_full: u64,
    /// Milliseconds in writes, where `track_wal_io_timing` is on.
    pub write_ms: f64,
    /// Milliseconds in flushes, where `track_wal_io_timing` is on.
    pub flush_ms: f64,
}

impl Counters {
    /// Reads them.
    pub async fn read(admin: &mut Connection, server: &Server) -> Result<Counters, Error> {
        // From 18 on what a process read and wrote is in one view for all kinds of files. New
        // segments are filled with zeros there, too, under `init`: that is no writing of the log.
        let io = if server.version >= 180_000 {
            "SELECT sum(writes), sum(fsyncs), sum(write_time), sum(fsync_time) FROM pg_stat_io \
             WHERE object = 'wal' AND context = 'normal'"
        } else {
            "SELECT wal_write, wal_sync, wal_write_time, wal_sync_time FROM pg_stat_wal"
        };
        let sql = format!(
            "SELECT pg_current_wal_insert_lsn(), l.wal_bytes::int8, w::int8, s::int8, \
             coalesce(wt, 0)::float8, coalesce(st, 0)::float8, l.wal_buffers_full \
             FROM pg_stat_wal l, ({io}) io (w, s, wt, st)"
        );
        let address = admin.server().to_owned();
        let failed = || trying("read the log's statistics", &address);
        let answer = admin.simple_query(&sql).await.map_err(failed())?;
        let row = answer.first().and_then(|set| set.rows.first());
        let row = row.ok_or_else(|| {
            failed()(farshore_pg::Error::Value("the answer has no row".to_owned()))
        })?;
        Counters::of(row).map_err(failed())
    }

    fn of(row: &Row) -> Result<Counters, farshore_pg::Error> {
        Ok(Counters {
            position: row.parse::<Lsn>(0)?.0,
            record_bytes: row.parse(1)?,
            writes: row.parse(2)?,
            flushes: row.parse(3)?,
            write_ms: row.parse(4)?,
            flush_ms: row.parse(5)?,
            buffers_full: row.parse(6)?,
        })
    }

    /// Reads them until they have stood still for as long as the server may take to tell them.
    pub async fn settled(admin: &mut Connection, server: &Server) -> Result<Counters, Error> {
        let still_for = if server.version < 150_000 {
            // Reading for as long as this makes the asking session tell what it did before, too.
            STILL_FOR_14
        } else {
            // The asking session has made tables and emptied them: it would tell a second later,
            // and that would be taken for the clients' work.
            let address = admin.server().to_owned();
            let failed = trying("read the log's statistics", &address);
            admin.simple_query("SELECT pg_stat_force_next_flush()").await.map_err(failed)?;
            STILL_FOR
        };
        let begin = Instant::now();
        let mut last = Counters::read(admin, server).await?;
        let mut since = Instant::now();
        loop {
            tokio::time::sleep(still_for / 10).await;
            let now = Counters::read(admin, server).await?;
            if now != last {
                (last, since) = (now, Instant::now());
            }
            if since.elapsed() >= still_for || begin.elapsed() >= SETTLE_TIMEOUT {
                return Ok(last);
            }
        }
    }

    /// What came to them since `before`. None of them goes back, unless somebody resets them.
    pub fn since(self, before: Counters) -> Counters {
        Counters {
            position: self.position.saturating_sub(before.position),
            record_bytes: self.record_bytes.saturating_sub(before.record_bytes),
            writes: self.writes.saturating_sub(before.writes),
            flushes: self.flushes.saturating_sub(before.flushes),
            buffers_full: self.buffers_full.saturating_sub(before.buffers_full),
            write_ms: (self.write_ms - before.write_ms).max(0.0),
            flush_ms: (self.flush_ms - before.flush_ms).max(0.0),
        }
    }
}
