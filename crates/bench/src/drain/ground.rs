//! The databases of one run, and what both contenders need of them.

use super::backlog::{Backlog, MARKER, SCHEMA, STAGING};
use super::{farshore, native};
use crate::progress::say;
use crate::servers::Servers;
use crate::text::Prose;
use anyhow::{Context, Result};
use farshore_testkit::interrupt::Interrupt;
use farshore_testkit::postgres::Cluster;
use farshore_testkit::wait::wait_until;
use postgres::Client;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The published database.
pub const SOURCE: &str = "source";
/// No backlog takes this long to drain, whoever does it.
const DRAIN_MAX: Duration = Duration::from_secs(900);
/// Starting and stopping replication takes seconds at most.
pub const SWITCH_MAX: Duration = Duration::from_secs(60);

/// One run's databases on a pair of servers that outlives them.
#[derive(Debug)]
pub struct Ground<'a> {
    servers: &'a Servers,
    label: String,
    interrupt: &'a Interrupt,
}

/// CPU time of both servers at the start of a measurement.
pub struct Meter {
    begin: Instant,
    publisher: f64,
    subscriber: f64,
}

impl<'a> Ground<'a> {
    /// Creates empty databases.
    ///
    /// # Errors
    /// When a server refuses.
    pub fn new(
        servers: &'a Servers,
        case: &str,
        label: &str,
        interrupt: &'a Interrupt,
    ) -> Result<Ground<'a>> {
        interrupt.check()?;
        let ground = Ground { servers, label: label.to_owned(), interrupt };
        ground.drop_databases().with_context(|| format!("make room for {case}"))?;
        for (cluster, database) in ground.databases() {
            cluster.execute_script(&format!("CREATE DATABASE {database}"))?;
        }
        Ok(ground)
    }

    fn databases(&self) -> [(&'a Cluster, &'static str); 3] {
        [
            (&self.servers.publisher, SOURCE),
            (&self.servers.subscriber, native::DATABASE),
            (&self.servers.subscriber, farshore::DATABASE),
        ]
    }

    fn drop_databases(&self) -> Result<()> {
        for (cluster, database) in self.databases() {
            cluster.execute_script(&format!("DROP DATABASE IF EXISTS {database} WITH (FORCE)"))?;
        }
        Ok(())
    }

    /// Makes the tables on both sides, and the rows that are there before replication begins.
    ///
    /// # Errors
    /// When a server refuses.
    pub fn create(&self, backlog: &dyn Backlog, seed: u64) -> Result<()> {
        let schema = format!(
            "CREATE SCHEMA {SCHEMA}; CREATE TABLE {MARKER} (id int PRIMARY KEY); {}",
            backlog.schema()
        );
        for (cluster, database) in self.databases() {
            cluster.connect_to(database)?.batch_execute(&schema).context("create the tables")?;
        }
        let mut source = self.source()?;
        source.batch_execute(&format!("CREATE SCHEMA {STAGING}; SET synchronous_commit = off"))?;
        backlog.preload(&mut source, &mut Prose::new(seed), self.interrupt)?;
        source.batch_execute("VACUUM (FREEZE, ANALYZE)")?;
        Ok(())
    }

    /// Commits the backlog and the marker row after it, and returns its bytes of WAL.
    ///
    /// # Errors
    /// When the publisher refuses.
    pub fn build(&self, backlog: &dyn Backlog, seed: u64) -> Result<u64> {
        let mut source = self.source()?;
        let position = |source: &mut Client| -> Result<i64> {
            let query = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint";
            Ok(source.query_one(query, &[])?.get(0))
        };
        let begin = position(&mut source)?;
        source.batch_execute("SET synchronous_commit = off")?;
        // Other text than the preloaded rows have.
        let mut prose = Prose::new(seed.wrapping_add(1));
        backlog.build(&mut source, &mut prose, self.interrupt)?;
        // Flushes what the asynchronous commits before it left.
        source.batch_execute(&format!(
            "SET synchronous_commit = on; INSERT INTO {MARKER} VALUES (1)"
        ))?;
        Ok(u64::try_from(position(&mut source)? - begin).unwrap_or(0))
    }

    /// Brings a target's preloaded tables into the same physical order, without dead rows, with
    /// fresh statistics.
    ///
    /// # Errors
    /// When the subscriber refuses.
    pub fn even_out(&self, database: &str) -> Result<()> {
        let mut target = self.servers.subscriber.connect_to(database)?;
        let keys = "SELECT format('CLUSTER %s USING %I', x.indrelid::regclass, i.relname) \
                    FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid \
                    JOIN pg_class t ON t.oid = x.indrelid \
                    WHERE x.indisprimary AND t.relnamespace = $1::text::regnamespace ORDER BY 1";
        for row in target.query(keys, &[&SCHEMA])? {
            target.batch_execute(row.get(0))?;
        }
        target.batch_execute("VACUUM (FREEZE, ANALYZE)")?;
        Ok(())
    }

    /// Begins a measurement: nothing dirty is left, nobody is at work.
    ///
    /// # Errors
    /// When a slot is in use, or a server cannot be reached.
    pub fn begin(&self) -> Result<Meter> {
        self.await_idle_slots()?;
        self.servers.checkpoint()?;
        self.interrupt.check()?;
        Ok(Meter {
            publisher: self.servers.publisher.cpu_seconds(),
            subscriber: self.servers.subscriber.cpu_seconds(),
            begin: Instant::now(),
        })
    }

    /// Waits for the marker row to be visible in a target; `alive` says whether there is hope.
    ///
    /// # Errors
    /// What `alive` says, or after a quarter of an hour.
    pub fn await_marker(
        &self,
        database: &str,
        log: &std::path::Path,
        mut alive: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let mut target = self.servers.subscriber.connect_to(database)?;
        let query = target.prepare(&format!("SELECT FROM {MARKER}"))?;
        wait_until("the backlog's last row", DRAIN_MAX, &[log], || {
            self.interrupt.check()?;
            if !target.query(&query, &[])?.is_empty() {
                return Ok(Some(()));
            }
            alive().map(|()| None)
        })
    }

    /// Waits until no slot of the published database is in use.
    ///
    /// # Errors
    /// After a minute.
    pub fn await_idle_slots(&self) -> Result<()> {
        let mut source = self.source()?;
        let log = self.servers.publisher.log_path();
        wait_until("replication slots to fall idle", SWITCH_MAX, &[&log], || {
            let active = "SELECT FROM pg_replication_slots \
                          WHERE active AND database = current_database()";
            Ok(source.query(active, &[])?.is_empty().then_some(()))
        })
    }

    /// Removes everything of the run. After a failure the servers may be in any state, and what
    /// cannot be removed is left to the next attempt.
    ///
    /// # Errors
    /// When a server refuses although the run went well.
    pub fn clear(&self, failed: bool) -> Result<()> {
        let cleared = self.clear_all();
        if failed { Ok(()) } else { cleared }
    }

    fn clear_all(&self) -> Result<()> {
        native::retire(self)?;
        self.await_idle_slots()?;
        self.source()?.batch_execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots \
             WHERE database = current_database()",
        )?;
        self.drop_databases()?;
        // Lets go of the WAL that the slots retained.
        self.servers.checkpoint()
    }

    /// A connection to the published database.
    ///
    /// # Errors
    /// When the publisher cannot be reached.
    pub fn source(&self) -> Result<Client> {
        self.servers.publisher.connect_to(SOURCE)
    }

    /// A connection to a contender's database.
    ///
    /// # Errors
    /// When the subscriber cannot be reached.
    pub fn target(&self, database: &str) -> Result<Client> {
        self.servers.subscriber.connect_to(database)
    }

    /// URL of the published database.
    pub fn source_url(&self) -> String {
        self.servers.publisher.url(SOURCE)
    }

    /// URL of a contender's database.
    pub fn target_url(&self, database: &str) -> String {
        self.servers.subscriber.url(database)
    }

    /// The publisher's port.
    pub fn source_port(&self) -> u16 {
        self.servers.publisher.port()
    }

    /// The subscriber's log.
    pub fn subscriber_log(&self) -> PathBuf {
        self.servers.subscriber.log_path()
    }

    /// The interrupt that ends the run.
    pub fn interrupt(&self) -> &Interrupt {
        self.interrupt
    }

    /// A line of progress about this run.
    pub fn say(&self, what: &str) {
        say(&format!("{}: {what}", self.label));
    }
}

impl Meter {
    /// Seconds since the beginning, and CPU seconds of publisher and subscriber.
    pub fn read(&self, ground: &Ground<'_>) -> (f64, f64, f64) {
        let seconds = self.begin.elapsed().as_secs_f64();
        let servers = ground.servers;
        (
            seconds,
            servers.publisher.cpu_seconds() - self.publisher,
            servers.subscriber.cpu_seconds() - self.subscriber,
        )
    }
}
