//! Many tables and many subscriptions, half of them stalled: memory stays bounded, and the running
//! half does not notice.
//!
//! - `FARSHORE_TABLES`: published tables (default 1,000; `make stress` has 2,000).
//! - `FARSHORE_SUBSCRIPTIONS`: subscriptions to them, each in a database of its own (default 50).
//! - `FARSHORE_PUBLICATIONS`: publications that share the tables and the subscriptions (default
//!   10; with 1, every subscription has all tables, and copying takes that much longer).

use anyhow::{Context, Result, ensure};
use farshore_testkit::checksum;
use farshore_testkit::postgres::{Cluster, Installation};
use farshore_tests::{DATABASE, Site};
use postgres::Client;
use std::time::{Duration, Instant};

const RSS_BYTES_MAX: u64 = 256 << 20;
const PATIENCE: Duration = Duration::from_secs(900);

struct Many {
    // Goes before its servers.
    site: Site,
    publisher: Cluster,
    subscriber: Cluster,
    tables: usize,
    publications: usize,
    subscriptions: usize,
    marks: i64,
}

fn from_environment(name: &str, default: usize) -> Result<usize> {
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name}={text} is no number")),
        Err(_) => Ok(default),
    }
}

impl Many {
    fn start() -> Result<Many> {
        let publications = from_environment("FARSHORE_PUBLICATIONS", 10)?;
        let publisher = Cluster::builder(&Installation::find(18)?)
            .setting("wal_level", "logical")
            .setting("max_connections", 1_000)
            .setting("max_wal_senders", 200)
            .setting("max_replication_slots", 200)
            .setting("max_locks_per_transaction", 512)
            .start()?;
        let subscriber = Cluster::builder(&Installation::find(15)?)
            .setting("max_connections", 1_000)
            .setting("max_locks_per_transaction", 512)
            // Half a million small files are not what this is about.
            .setting("fsync", "off")
            .start()?;
        let mut many = Many {
            site: Site::new()?,
            publisher,
            subscriber,
            tables: from_environment("FARSHORE_TABLES", 1_000)?,
            publications,
            subscriptions: from_environment("FARSHORE_SUBSCRIPTIONS", 50)?,
            marks: 0,
        };
        many.create()?;
        Ok(many)
    }

    fn create(&mut self) -> Result<()> {
        let begin = Instant::now();
        let per_publication = self.tables / self.publications;
        let mut publisher = self.publisher.connect()?;
        let mut server = self.subscriber.connect()?;
        for publication in 0..self.publications {
            let schema: String = (0..per_publication)
                .map(|table| {
                    format!(
                        "CREATE TABLE p{publication}.t{table} (id integer PRIMARY KEY, n bigint);"
                    )
                })
                .collect();
            let schema = format!(
                "CREATE SCHEMA p{publication}; \
                 CREATE TABLE p{publication}.mark (id bigint PRIMARY KEY); {schema}"
            );
            publisher.batch_execute(&schema)?;
            let template = format!("template_p{publication}");
            server.batch_execute(&format!("CREATE DATABASE {template}"))?;
            self.subscriber.connect_to(&template)?.batch_execute(&schema)?;
            self.site.add(&format!(
                "[publication.p{publication}]\nsource = \"{}\"\ntables = [\"p{publication}.*\"]\n",
                self.publisher.url(DATABASE)
            ))?;
        }
        for number in 0..self.subscriptions {
            let publication = self.publication_of(number);
            server.batch_execute(&format!(
                "CREATE DATABASE d{number} TEMPLATE template_p{publication} STRATEGY file_copy"
            ))?;
            self.site.add(&format!(
                "[subscription.s{number}]\npublication = \"p{publication}\"\ntarget = \"{}\"\n\
                 copy_workers = 1\n",
                self.subscriber.url(&format!("d{number}"))
            ))?;
        }
        println!(
            "{} tables in {} publications, {} subscriptions: made in {:?}",
            self.tables,
            self.publications,
            self.subscriptions,
            begin.elapsed()
        );
        Ok(())
    }

    fn publication_of(&self, subscription: usize) -> usize {
        subscription % self.publications
    }

    /// Every other one of each publication.
    fn is_stalled(&self, subscription: usize) -> bool {
        let nth_of_publication = subscription / self.publications;
        !(nth_of_publication + self.publication_of(subscription)).is_multiple_of(2)
    }

    /// A transaction on each publication that touches all of its tables, and many small ones.
    fn load(&mut self, round: usize) -> Result<()> {
        let mut client = self.publisher.connect()?;
        for publication in 0..self.publications {
            client.batch_execute(&format!(
                "DO $$ DECLARE t text; BEGIN FOR t IN SELECT tablename FROM pg_tables \
                 WHERE schemaname = 'p{publication}' AND tablename <> 'mark' LOOP \
                 EXECUTE format('INSERT INTO p{publication}.%I VALUES ({round}, 1)', t); \
                 EXECUTE format('UPDATE p{publication}.%I SET n = n + 1', t); END LOOP; END $$"
            ))?;
            for table in 0..100 {
                let table = table % (self.tables / self.publications);
                let update = format!("UPDATE p{publication}.t{table} SET n = n + 1");
                client.batch_execute(&update)?;
            }
        }
        Ok(())
    }

    fn mark(&mut self) -> Result<()> {
        self.marks += 1;
        let mut client = self.publisher.connect()?;
        for publication in 0..self.publications {
            let insert = format!("INSERT INTO p{publication}.mark VALUES ($1)");
            client.execute(&insert, &[&self.marks])?;
        }
        Ok(())
    }

    /// Waits until these subscriptions stream and show the last mark.
    fn await_arrival(&mut self, subscriptions: &[usize]) -> Result<()> {
        let begin = Instant::now();
        for number in subscriptions {
            let publication = self.publication_of(*number);
            let mut target = self.subscriber.connect_to(&format!("d{number}"))?;
            let arrived = format!(
                "SELECT FROM p{publication}.mark WHERE id = {} AND EXISTS \
                 (SELECT FROM farshore.subscription WHERE state = 'streaming')",
                self.marks
            );
            self.site.wait_for(&format!("subscription s{number}"), PATIENCE, || {
                match target.query_opt(&arrived, &[]) {
                    Ok(row) => Ok(row.map(drop)),
                    Err(error) if error.code().is_some_and(|c| c.code() == "42P01") => Ok(None),
                    Err(error) => Err(error).context("look for the mark"),
                }
            })?;
        }
        println!(
            "mark {} at {} subscriptions after {:?}; peak RSS {} MB",
            self.marks,
            subscriptions.len(),
            begin.elapsed(),
            self.site.farshore()?.peak_rss_bytes() >> 20
        );
        Ok(())
    }

    fn assert_equal(&self, number: usize) -> Result<()> {
        let schema = format!("p{}", self.publication_of(number));
        let source = self.publisher.url(DATABASE);
        let target = self.subscriber.url(&format!("d{number}"));
        checksum::assert_equal(&source, &target, &checksum::tables_in_schema(&source, &schema)?)
    }
}

#[test]
fn fifty_subscriptions_half_of_them_stalled() -> Result<()> {
    let mut many = Many::start()?;
    let all: Vec<usize> = (0..many.subscriptions).collect();
    let (stalled, running): (Vec<usize>, Vec<usize>) =
        all.iter().partition(|number| many.is_stalled(**number));
    many.load(0)?;
    many.site.start()?;
    many.mark()?;
    many.await_arrival(&all).context("copied")?;

    // Half of the stalled ones wait for a lock, the others cannot connect.
    let mut locks: Vec<Client> = Vec::new();
    let mut server = many.subscriber.connect()?;
    for (index, number) in stalled.iter().enumerate() {
        if index % 2 == 0 {
            let mut client = many.subscriber.connect_to(&format!("d{number}"))?;
            let publication = many.publication_of(*number);
            client.batch_execute(&format!("BEGIN; LOCK TABLE p{publication}.t1"))?;
            locks.push(client);
        } else {
            server.batch_execute(&format!(
                "ALTER DATABASE d{number} ALLOW_CONNECTIONS false; \
                 SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'd{number}'"
            ))?;
        }
    }
    for round in 1..=3 {
        many.load(round)?;
        many.mark()?;
        many.await_arrival(&running).context("the running half")?;
    }

    drop(locks);
    for number in stalled.iter().skip(1).step_by(2) {
        server.batch_execute(&format!("ALTER DATABASE d{number} ALLOW_CONNECTIONS true"))?;
    }
    many.mark()?;
    many.await_arrival(&all).context("the stalled half comes back")?;
    for number in [running[0], stalled[0], stalled[1]] {
        many.assert_equal(number)?;
    }
    let peak = many.site.farshore()?.peak_rss_bytes();
    ensure!(peak <= RSS_BYTES_MAX, "peak RSS {} MB", peak >> 20);
    many.site.stop()?;
    Ok(())
}
