//! The databases of one run, and what both contenders need of them.

use super::relay::Relay;
use super::{Bench, Contender, Sites, Terms};
use crate::backlog::{Backlog, MARKER, SCHEMA, STAGING, Tables};
use crate::line::Conditions;
use crate::progress::say;
use crate::text::Prose;
use anyhow::{Context, Result, bail, ensure};
use farshore_testkit::interrupt::Interrupt;
use farshore_testkit::postgres::Cluster;
use farshore_testkit::wait::watch_until;
use farshore_testkit::wan::{Namespace, Side};
use postgres::{Client, GenericClient};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The published database.
pub const SOURCE: &str = "source";
/// Farshore's role on the target where foreign keys are to be checked.
const PLAIN_ROLE: &str = "farshore_plain";
/// No backlog takes this long to drain, whoever does it.
pub const DRAIN_MAX: Duration = Duration::from_secs(900);
/// Starting and stopping replication takes seconds at most.
pub const SWITCH_MAX: Duration = Duration::from_secs(60);

/// One run's databases on a pair of servers that outlives them.
#[derive(Debug)]
pub struct Ground<'a> {
    pub(super) bench: Bench<'a>,
    label: String,
    /// Databases per contender.
    subscribers: usize,
    /// Farshore's connections to a target at most.
    pub(super) streams: Option<usize>,
    /// Where Farshore is.
    pub(super) sites: Sites,
    /// zstd level on the link between two sites.
    pub(super) compression: u64,
    /// Whether native's worker waits for its commits to be on disk.
    pub(super) native_is_durable: bool,
    /// Whether Farshore serves its monitor.
    pub(super) monitor: bool,
    /// What the line is like once all is prepared.
    line: Option<Conditions>,
    /// On the contenders' way to the publisher.
    pub(super) relay: Option<Relay>,
}

/// A backlog that was committed.
#[derive(Debug, Clone, Copy)]
pub struct Built {
    /// Its size in the publisher's log.
    pub wal_bytes: u64,
    /// Just before its last transaction's commit record: who has more than this has it all.
    pub end: u64,
}

impl<'a> Ground<'a> {
    /// Creates empty databases.
    ///
    /// # Errors
    /// When a server refuses.
    pub fn new(bench: Bench<'a>, label: &str, terms: Terms) -> Result<Ground<'a>> {
        bench.interrupt.check()?;
        let port = bench.servers.publisher.port();
        // A relay would be at neither end.
        ensure!(!terms.counts_bytes || bench.servers.line.is_none(), "a line counts its bytes");
        let relay = terms.counts_bytes.then(|| Relay::to(port)).transpose()?;
        let ground = Ground {
            bench,
            label: label.to_owned(),
            subscribers: terms.subscribers,
            streams: terms.streams,
            sites: terms.sites,
            compression: terms.compression,
            native_is_durable: terms.native_is_durable,
            monitor: terms.monitor,
            line: terms.line,
            relay,
        };
        if let Some(line) = &bench.servers.line {
            line.set(None);
        }
        ground.clear_all().context("make room")?;
        for (cluster, database) in ground.databases() {
            cluster.execute_script(&format!("CREATE DATABASE {database}"))?;
        }
        Ok(ground)
    }

    /// A contender's databases.
    pub fn targets(&self, contender: Contender) -> Vec<String> {
        (1..=self.subscribers).map(|number| format!("{}_{number}", contender.name())).collect()
    }

    fn databases(&self) -> Vec<(&'a Cluster, String)> {
        let mut databases = vec![(&self.bench.servers.publisher, SOURCE.to_owned())];
        for contender in Contender::BOTH {
            let targets = self.targets(contender).into_iter();
            databases.extend(targets.map(|name| (&self.bench.servers.subscriber, name)));
        }
        databases
    }

    /// Makes the tables on both sides, and the rows that are there before replication begins.
    ///
    /// # Errors
    /// When a server refuses.
    pub fn create(&self, tables: &dyn Tables) -> Result<()> {
        let schema = format!(
            "CREATE SCHEMA {SCHEMA}; CREATE TABLE {MARKER} (id int PRIMARY KEY); {}",
            tables.schema()
        );
        for (cluster, database) in self.databases() {
            cluster.connect_to(&database)?.batch_execute(&schema).context("create the tables")?;
        }
        if tables.checks_foreign_keys() {
            for database in self.targets(Contender::Farshore) {
                self.admit_plain_role(&database)?;
            }
        }
        let mut source = self.source()?;
        source.batch_execute(&format!("CREATE SCHEMA {STAGING}; SET synchronous_commit = off"))?;
        let mut prose = Prose::new(self.seed());
        tables.preload(&mut source, &mut prose, self.interrupt())?;
        source.batch_execute("VACUUM (FREEZE, ANALYZE)")?;
        Ok(())
    }

    /// Commits the backlog and the marker row after it.
    ///
    /// # Errors
    /// When the publisher refuses.
    pub fn build(&self, backlog: &dyn Backlog) -> Result<Built> {
        let mut source = self.source()?;
        let begin = insert_position(&mut source)?;
        source.batch_execute("SET synchronous_commit = off")?;
        // Other text than the preloaded rows have.
        let mut prose = Prose::new(self.seed().wrapping_add(1));
        backlog.build(&mut source, &mut prose, self.interrupt())?;
        // Flushes what the asynchronous commits before it left.
        source.batch_execute("SET synchronous_commit = on")?;
        let mut last = source.transaction()?;
        last.batch_execute(&format!("INSERT INTO {MARKER} VALUES (1)"))?;
        let end = insert_position(&mut last)?;
        last.commit()?;
        Ok(Built { wal_bytes: end.saturating_sub(begin), end })
    }

    /// Brings all targets' preloaded tables into the same physical order, without dead rows, with
    /// fresh statistics.
    ///
    /// # Errors
    /// When the subscriber refuses.
    pub fn even_out(&self) -> Result<()> {
        for database in Contender::BOTH.into_iter().flat_map(|who| self.targets(who)) {
            self.interrupt().check()?;
            let mut target = self.target(&database)?;
            let keys = "SELECT format('CLUSTER %s USING %I', x.indrelid::regclass, i.relname) \
                        FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid \
                        JOIN pg_class t ON t.oid = x.indrelid \
                        WHERE x.indisprimary AND t.relnamespace = $1::text::regnamespace \
                        ORDER BY 1";
            for row in target.query(keys, &[&SCHEMA])? {
                target.batch_execute(row.get(0))?;
            }
            target.batch_execute("VACUUM (FREEZE, ANALYZE)")?;
        }
        Ok(())
    }

    /// Ends the preparations, which nobody wants to wait for: from here on the line is as long and
    /// as narrow as it is to be.
    pub fn set_line(&self) {
        if let Some(line) = &self.bench.servers.line {
            line.set(self.line);
        }
    }

    /// Waits until no slot of the published database is in use.
    ///
    /// # Errors
    /// After a minute.
    pub fn await_idle_slots(&self) -> Result<()> {
        let mut source = self.source()?;
        let log = self.bench.servers.publisher.log_path();
        watch_until("replication slots to fall idle", SWITCH_MAX, &[&log], || {
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
        let servers = self.bench.servers;
        for database in databases_of(&servers.subscriber)? {
            let mut target = self.target(&database)?;
            // A subscription that cannot reach its slot any more would not let itself be dropped.
            let own = "SELECT subname::text FROM pg_subscription s JOIN pg_database d \
                       ON d.oid = s.subdbid WHERE d.datname = current_database()";
            for row in target.query(own, &[])? {
                let name: String = row.get(0);
                for step in ["DISABLE", "SET (slot_name = NONE)"] {
                    target.batch_execute(&format!("ALTER SUBSCRIPTION {name} {step}"))?;
                }
                target.batch_execute(&format!("DROP SUBSCRIPTION {name}"))?;
            }
            drop(target);
            let drop = format!("DROP DATABASE {database} WITH (FORCE)");
            servers.subscriber.execute_script(&drop)?;
        }
        for database in databases_of(&servers.publisher)? {
            self.await_idle_slots()?;
            self.source()?.batch_execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots \
                 WHERE database = current_database()",
            )?;
            let drop = format!("DROP DATABASE {database} WITH (FORCE)");
            servers.publisher.execute_script(&drop)?;
        }
        // Lets go of the WAL that the slots retained.
        servers.checkpoint()
    }

    /// A connection to the published database.
    ///
    /// # Errors
    /// When the publisher cannot be reached.
    pub fn source(&self) -> Result<Client> {
        self.bench.servers.publisher.connect_to(SOURCE)
    }

    /// A connection to a contender's database.
    ///
    /// # Errors
    /// When the subscriber cannot be reached.
    pub fn target(&self, database: &str) -> Result<Client> {
        self.bench.servers.subscriber.connect_to(database)
    }

    /// URL of the published database.
    pub fn source_url(&self) -> String {
        self.bench.servers.publisher.url(SOURCE)
    }

    /// URL of a contender's database.
    pub fn target_url(&self, database: &str) -> String {
        self.bench.servers.subscriber.url(database)
    }

    /// URL by which Farshore at one end reaches one of its databases.
    pub fn farshore_url(&self, from: Side, database: &str, tables: &dyn Tables) -> String {
        let role = if tables.checks_foreign_keys() { PLAIN_ROLE } else { "postgres" };
        let host = self.host(from, Side::Far);
        let port = self.bench.servers.subscriber.port();
        format!("postgres://{role}@{host}:{port}/{database}")
    }

    /// The subscriber.
    pub fn subscriber(&self) -> &Cluster {
        &self.bench.servers.subscriber
    }

    /// The network at one end; none if both ends are this machine's.
    pub fn end(&self, side: Side) -> Option<&Namespace> {
        self.bench.servers.end(side)
    }

    /// The address of one end for who is at the other end, or there too.
    pub fn host(&self, from: Side, to: Side) -> Ipv4Addr {
        match self.end(to) {
            Some(end) if from != to => end.address(),
            _ => Ipv4Addr::LOCALHOST,
        }
    }

    /// Lets a role without privileges write to the tables of one of Farshore's databases. It is
    /// not told that it may set `session_replication_role`.
    fn admit_plain_role(&self, database: &str) -> Result<()> {
        let mut target = self.target(database)?;
        target
            .batch_execute(&format!(
                "DO $$ BEGIN CREATE ROLE {PLAIN_ROLE} LOGIN; \
                 EXCEPTION WHEN duplicate_object THEN NULL; END $$; \
                 GRANT CREATE ON DATABASE {database} TO {PLAIN_ROLE}; \
                 GRANT USAGE ON SCHEMA {SCHEMA} TO {PLAIN_ROLE}; \
                 GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON ALL TABLES \
                 IN SCHEMA {SCHEMA} TO {PLAIN_ROLE}"
            ))
            .context("admit a role without privileges")?;
        let may = "SELECT has_parameter_privilege($1, 'session_replication_role', 'SET')";
        if target.query_one(may, &[&PLAIN_ROLE])?.get(0) {
            bail!("{PLAIN_ROLE} may set session_replication_role: keys would not be checked");
        }
        Ok(())
    }

    /// Where contenders at one end reach the publisher.
    pub fn publisher_address(&self, from: Side) -> (Ipv4Addr, u16) {
        let direct = || self.bench.servers.publisher.port();
        let port = self.relay.as_ref().map_or_else(direct, Relay::port);
        (self.host(from, Side::Near), port)
    }

    /// URL by which Farshore reaches the published database, which it is always beside.
    pub fn publisher_url(&self) -> String {
        let (host, port) = self.publisher_address(Side::Near);
        format!("postgres://postgres@{host}:{port}/{SOURCE}")
    }

    /// URL by which who is at the far end reaches the published database.
    pub fn publisher_url_from_far(&self) -> String {
        let (host, port) = self.publisher_address(Side::Far);
        format!("postgres://postgres@{host}:{port}/{SOURCE}")
    }

    /// The subscriber's log.
    pub fn subscriber_log(&self) -> PathBuf {
        self.bench.servers.subscriber.log_path()
    }

    /// Farshore.
    pub fn binary(&self) -> &Path {
        self.bench.binary
    }

    /// Seed of all generated data.
    pub fn seed(&self) -> u64 {
        self.bench.plan.seed
    }

    /// The interrupt that ends the run.
    pub fn interrupt(&self) -> &Interrupt {
        self.bench.interrupt
    }

    /// A line of progress about this run.
    pub fn say(&self, what: &str) {
        say(&format!("{}: {what}", self.label));
    }
}

/// Where the publisher's log ends, as a number of bytes.
fn insert_position(source: &mut impl GenericClient) -> Result<u64> {
    let query = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint";
    Ok(source.query_one(query, &[])?.get::<_, i64>(0).unsigned_abs())
}

/// What runs have left on a server.
fn databases_of(cluster: &Cluster) -> Result<Vec<String>> {
    let query = "SELECT datname::text FROM pg_database \
                 WHERE NOT datistemplate AND datname <> 'postgres' ORDER BY 1";
    Ok(cluster.connect()?.query(query, &[])?.iter().map(|row| row.get(0)).collect())
}
