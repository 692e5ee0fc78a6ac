//! The schema that everything happens in, and the server's own promise to remove it.
//!
//! A second session, the guard, is told from the start: wait for this lock, then drop the schema.
//! The first session holds the lock until the measurement is over. When this process dies, however
//! it dies, the server closes the first session and thereby releases the lock; the guard's session
//! goes on with its statement although nobody waits for the answer, and drops the schema. So the
//! schema is never there without somebody at the server who removes it.
//!
//! Whoever is still at work in the schema then is ended first: a session whose commit waits for a
//! synchronous standby keeps its locks for as long as that is away, and notices neither that its
//! client has gone nor anything else. Neither session of ours waits for one.

use super::prose::Prose;
use super::{APPLICATION, connect, keep_house, trying};
use crate::{Error, Progress};
use farshore_pg::{Config, Connection, quote_identifier};
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// How schemas' names begin.
const PREFIX: &str = "farshore_commission_";
/// Bytes of different rows that are kept to choose from.
const POOL_BYTES: u64 = 8 << 20;
/// Rows to choose from at most.
const POOL_ROWS_MAX: u64 = 2_000;
/// Rows larger than this do not fit into a page, and are stored out of line.
const INLINE_MAX: u32 = 7_500;
/// How often it is looked who keeps the guard from dropping the schema.
const END_USERS_EVERY: Duration = Duration::from_millis(200);
/// How long a server may take to begin a statement that it was sent.
const GUARD_TIMEOUT: Duration = Duration::from_secs(30);

/// The schema, and who removes it.
#[derive(Debug)]
pub struct Scratch {
    schema: String,
    lock: i64,
    guard: JoinHandle<Result<(), farshore_pg::Error>>,
    /// Rows to choose from.
    pool_rows: u64,
}

impl Scratch {
    /// Sees to it that it will be removed; it is not there yet. Schemas that a crash of the server
    /// left behind are removed first. When this is dropped, nothing is left that `admin` does not
    /// take with it.
    pub async fn begin(
        config: &Config,
        admin: &mut Connection,
        say: Progress<'_>,
    ) -> Result<Scratch, Error> {
        let server = admin.server().to_owned();
        remove_leftovers(admin, say).await.map_err(trying("remove old schemas", &server))?;
        // Positive, so that a name and its lock are the same number.
        let lock = rand::random::<i64>() & i64::MAX;
        let schema = format!("{PREFIX}{lock}");
        let failed = || trying("make a scratch schema", &server);
        let mut guard = connect(config).await?;
        keep_house(&mut guard).await?;
        let guard_pid = guard.backend_pid();
        admin.simple_query(&format!("SELECT pg_advisory_lock({lock})")).await.map_err(failed())?;
        // A warning would be sent at once, to somebody who has gone, and that would end the session.
        let promise = format!(
            "SET client_connection_check_interval = 0; SELECT pg_advisory_lock({lock}); \
             SET LOCAL client_min_messages = error; {}; DROP SCHEMA IF EXISTS {} CASCADE",
            end_users(&schema),
            quote_identifier(&schema)
        );
        let guard = tokio::spawn(async move {
            guard.simple_query(&promise).await?;
            guard.close().await;
            Ok(())
        });
        let mut scratch = Scratch { schema, lock, guard, pool_rows: 0 };
        scratch.await_guard(admin, guard_pid).await?;
        Ok(scratch)
    }

    /// Makes it.
    pub async fn make(&self, admin: &mut Connection) -> Result<(), Error> {
        let server = admin.server().to_owned();
        let sql = format!("CREATE SCHEMA {}", self.quoted());
        admin.simple_query(&sql).await.map_err(trying("make a scratch schema", &server))?;
        Ok(())
    }

    /// Its name, quoted.
    pub fn quoted(&self) -> String {
        quote_identifier(&self.schema)
    }

    /// Returns when the guard waits for its lock.
    async fn await_guard(&mut self, admin: &mut Connection, pid: i32) -> Result<(), Error> {
        let server = admin.server().to_owned();
        let sql = format!(
            "SELECT count(*) FROM pg_locks WHERE pid = {pid} AND locktype = 'advisory' AND NOT granted"
        );
        let begin = Instant::now();
        loop {
            let failed = || trying("see who waits for a lock", &server);
            let answer = admin.simple_query(&sql).await.map_err(failed())?;
            let row = answer.first().and_then(|set| set.rows.first());
            if row.is_some_and(|row| row.get(0) == Some("1")) {
                return Ok(());
            }
            if self.guard.is_finished() || begin.elapsed() > GUARD_TIMEOUT {
                return Err(Error::Refused(format!(
                    "the session on {server} that is to remove the scratch schema does not wait for \
                     its lock; is there a pooler in between? Name the server itself"
                )));
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// A table of the schema, quoted.
    pub fn table(&self, name: &str) -> String {
        format!("{}.{name}", self.quoted())
    }

    /// Makes the table that rows are written to, and fills the one that they come from. Values are
    /// stored as they are: what shrinks them is not the log.
    pub async fn fill(&mut self, admin: &mut Connection, row_size: u32) -> Result<(), Error> {
        let server = admin.server().to_owned();
        let (pool, rows) = (self.table("pool"), self.table("rows"));
        let storage = if row_size <= INLINE_MAX { "PLAIN" } else { "EXTERNAL" };
        let sql = format!(
            "CREATE TABLE {pool} (id int8 PRIMARY KEY, content text NOT NULL); \
             CREATE TABLE {rows} (id int8 NOT NULL, content text NOT NULL); \
             ALTER TABLE {pool} ALTER content SET STORAGE {storage}; \
             ALTER TABLE {rows} ALTER content SET STORAGE {storage}, SET (autovacuum_enabled = off)"
        );
        admin.simple_query(&sql).await.map_err(trying("make tables", &server))?;
        self.pool_rows = (POOL_BYTES / u64::from(row_size)).clamp(8, POOL_ROWS_MAX);
        let failed = || trying("fill a table", &server);
        let mut copy = admin.copy_in(&format!("COPY {pool} FROM STDIN")).await.map_err(failed())?;
        let mut prose = Prose::new();
        for id in 0..self.pool_rows {
            let line = format!("{id}\t{}\n", prose.take(row_size as usize));
            copy.send(line.as_bytes()).await.map_err(failed())?;
        }
        copy.finish().await.map_err(failed())?;
        admin.simple_query(&format!("ANALYZE {pool}")).await.map_err(failed())?;
        Ok(())
    }

    /// `PREPARE` of `go(number of rows, first of those to choose from)`. The rows are looked up one by
    /// one: a plan that reads all of the pool for a single row would be what is measured.
    pub fn prepare(&self) -> String {
        format!(
            "PREPARE go (int8, int8) AS INSERT INTO {} (id, content) \
             SELECT g, (SELECT content FROM {} WHERE id = g % {}) \
             FROM generate_series($2, $2 + $1 - 1) g",
            self.table("rows"),
            self.table("pool"),
            self.pool_rows
        )
    }

    /// Empties the table that rows are written to.
    pub async fn empty(&self, admin: &mut Connection) -> Result<(), Error> {
        let server = admin.server().to_owned();
        let sql = format!("TRUNCATE {}", self.table("rows"));
        admin.simple_query(&sql).await.map_err(trying("empty a table", &server))?;
        Ok(())
    }

    /// Removes it, and returns when it is gone.
    pub async fn remove(self, admin: &mut Connection) -> Result<(), Error> {
        let server = admin.server().to_owned();
        let failed = || trying("remove the scratch schema", &server);
        let unlock = format!("SELECT pg_advisory_unlock({})", self.lock);
        admin.simple_query(&unlock).await.map_err(failed())?;
        let Scratch { schema, mut guard, .. } = self;
        let done = loop {
            tokio::select! {
                done = &mut guard => break done,
                () = tokio::time::sleep(END_USERS_EVERY) => {
                    // One that had begun nothing yet when the guard looked.
                    admin.simple_query(&end_users(&schema)).await.map_err(failed())?;
                }
            }
        };
        if !matches!(done, Ok(Ok(()))) {
            // Somebody ended the guard's session: then it is done from here.
            let name = quote_identifier(&schema);
            let sql = format!("{}; DROP SCHEMA IF EXISTS {name} CASCADE", end_users(&schema));
            admin.simple_query(&sql).await.map_err(failed())?;
        }
        Ok(())
    }
}

/// A statement that ends sessions of ours that have locks in the schema. It names none that the role
/// may not end, which would be an error.
fn end_users(schema: &str) -> String {
    format!(
        "SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a \
         WHERE a.application_name = '{APPLICATION}' AND a.pid <> pg_backend_pid() \
           AND pg_has_role(a.usesysid, 'USAGE') AND EXISTS (SELECT FROM pg_locks l \
             LEFT JOIN pg_class c ON c.oid = l.relation \
             WHERE l.pid = a.pid AND l.granted AND a.datname = current_database() \
               AND (c.relnamespace = to_regnamespace('{schema}') \
                 OR l.classid = 'pg_namespace'::regclass AND l.objid = to_regnamespace('{schema}')))"
    )
}

/// Drops schemas whose lock nobody holds: only a server that crashed leaves one behind.
async fn remove_leftovers(
    admin: &mut Connection,
    say: Progress<'_>,
) -> Result<(), farshore_pg::Error> {
    let sql = "SELECT nspname FROM pg_namespace \
               WHERE nspname ~ '^farshore_commission_[0-9]+$' AND pg_has_role(nspowner, 'USAGE')";
    let rows = admin.query(sql, &[]).await?;
    for row in rows {
        let Some(name) = row.get(0) else { continue };
        let Some(lock) = name.strip_prefix(PREFIX).and_then(|lock| lock.parse::<i64>().ok()) else {
            continue;
        };
        let free = admin.simple_query(&format!("SELECT pg_try_advisory_lock({lock})")).await?;
        let free = free.first().and_then(|set| set.rows.first());
        if free.is_none_or(|row| row.get(0) != Some("t")) {
            continue;
        }
        say(&format!("removing schema {name}, which a crash of the server left behind"));
        let drop = format!("DROP SCHEMA IF EXISTS {} CASCADE", quote_identifier(name));
        admin.simple_query(&drop).await?;
        admin.simple_query(&format!("SELECT pg_advisory_unlock({lock})")).await?;
    }
    Ok(())
}
