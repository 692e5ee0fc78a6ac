//! A publisher and a subscriber of different versions, and a site between them.

use crate::Site;
use anyhow::{Context, Result};
use farshore_testkit::checksum;
use farshore_testkit::postgres::{Cluster, ClusterBuilder, Installation};
use farshore_testkit::wait::wait_until;
use postgres::Client;
use postgres::error::SqlState;
use std::time::Duration;

/// Database on both sides.
pub const DATABASE: &str = "postgres";
/// How long the subscriber may take to show a mark, where nothing else is said.
const PATIENCE: Duration = Duration::from_secs(90);

const MARK_TABLE: &str = "CREATE SCHEMA IF NOT EXISTS farshore_marks; \
    CREATE TABLE IF NOT EXISTS farshore_marks.mark (id bigint PRIMARY KEY)";

/// Major versions of the two sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Direction {
    /// The publisher's.
    pub publisher: u32,
    /// The subscriber's.
    pub subscriber: u32,
}

impl Direction {
    /// An older publisher.
    pub const UP: Direction = Direction { publisher: 15, subscriber: 18 };
    /// A newer publisher.
    pub const DOWN: Direction = Direction { publisher: 18, subscriber: 15 };
}

/// Runs a scenario from 15 to 18 and from 18 to 15.
///
/// # Errors
/// The scenario's, with the direction.
pub fn both_ways(scenario: impl Fn(Direction) -> Result<()>) -> Result<()> {
    for direction in [Direction::UP, Direction::DOWN] {
        scenario(direction).with_context(|| format!("{direction:?}"))?;
    }
    Ok(())
}

/// A publisher that streams transactions of some hundred rows before they commit.
///
/// # Errors
/// When that version is not installed.
pub fn publisher_cluster(major: u32) -> Result<ClusterBuilder> {
    let cluster = Cluster::builder(&Installation::find(major)?);
    Ok(cluster.setting("wal_level", "logical").setting("logical_decoding_work_mem", "64kB"))
}

/// A subscriber with ordinary settings.
///
/// # Errors
/// When that version is not installed.
pub fn subscriber_cluster(major: u32) -> Result<ClusterBuilder> {
    Ok(Cluster::builder(&Installation::find(major)?))
}

/// Two servers and a site, with publication `p` and subscription `s` unless made bare.
pub struct Pair {
    // Goes first when all are dropped.
    /// The site between them.
    pub site: Site,
    /// The publisher.
    pub publisher: Cluster,
    /// The subscriber.
    pub subscriber: Cluster,
    /// How long the subscriber may take to show a mark.
    pub patience: Duration,
    marks: i64,
}

impl Pair {
    /// Servers with the table of marks, and a site file without publications.
    ///
    /// # Errors
    /// When a server cannot be had.
    pub fn bare(direction: Direction) -> Result<Pair> {
        let publisher = publisher_cluster(direction.publisher)?.start()?;
        Pair::of(publisher, subscriber_cluster(direction.subscriber)?.start()?)
    }

    /// As [`Pair::bare`], of servers with settings of their own.
    ///
    /// # Errors
    /// When farshore does not build or a server refuses the table of marks.
    pub fn of(publisher: Cluster, subscriber: Cluster) -> Result<Pair> {
        let site = Site::new()?;
        let pair = Pair { site, publisher, subscriber, patience: PATIENCE, marks: 0 };
        pair.on_both(MARK_TABLE)?;
        Ok(pair)
    }

    /// Publication `p` of the tables that `patterns` name and of the marks, and subscription `s`
    /// to it. `schema` is run on both servers.
    ///
    /// # Errors
    /// When a server cannot be had or refuses the schema.
    pub fn new(direction: Direction, patterns: &[&str], schema: &str) -> Result<Pair> {
        let mut pair = Pair::bare(direction)?;
        pair.on_both(schema)?;
        pair.add_publication("p", patterns, "")?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        Ok(pair)
    }

    /// Adds a publication to the site file; `more` are further lines of its section.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn add_publication(&mut self, name: &str, patterns: &[&str], more: &str) -> Result<()> {
        let tables: Vec<String> = patterns
            .iter()
            .chain(&["farshore_marks.mark"])
            .map(|pattern| format!("'{pattern}'"))
            .collect();
        self.site.add(&format!(
            "[publication.{name}]\nsource = \"{}\"\ntables = [{}]\n{more}\n",
            self.site.url_of(&self.publisher, DATABASE),
            tables.join(", ")
        ))
    }

    /// Adds a subscription to the site file.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn add_subscription(&mut self, name: &str, publication: &str, target: &str) -> Result<()> {
        // FARSHORE_BATCHES=always runs every scenario with changes applied in bulk.
        let batches = std::env::var("FARSHORE_BATCHES").unwrap_or_else(|_| "auto".to_owned());
        // FARSHORE_STREAMS=4 runs it with that many connections side by side.
        let streams = std::env::var("FARSHORE_STREAMS").map(|n| format!("streams = {n}\n"));
        let streams = streams.unwrap_or_default();
        self.site.add(&format!(
            "[subscription.{name}]\npublication = \"{publication}\"\ntarget = \"{target}\"\n\
             batches = \"{batches}\"\n{streams}"
        ))
    }

    /// Has the subscription apply small groups, in batches, on four connections. The site must not
    /// have been started.
    ///
    /// # Errors
    /// When the file cannot be written, or says something else already.
    pub fn apply_side_by_side(&mut self) -> Result<()> {
        self.site.replace(
            "batches = \"auto\"",
            "batches = \"always\"\ngroup_transactions = 10\nstreams = 4",
        )
    }

    /// Runs SQL on the publisher.
    ///
    /// # Errors
    /// The server's message.
    pub fn publish(&self, sql: &str) -> Result<()> {
        self.publisher.execute_script(sql).context("on the publisher")
    }

    /// Runs SQL on both servers.
    ///
    /// # Errors
    /// The server's message.
    pub fn on_both(&self, sql: &str) -> Result<()> {
        self.publish(sql)?;
        self.subscriber.execute_script(sql).context("on the subscriber")
    }

    /// Commits a mark on the publisher and returns its number.
    ///
    /// # Errors
    /// When the publisher refuses.
    pub fn mark(&mut self) -> Result<i64> {
        self.marks += 1;
        let insert = "INSERT INTO farshore_marks.mark VALUES ($1)";
        self.publisher.connect()?.execute(insert, &[&self.marks])?;
        Ok(self.marks)
    }

    /// Waits until `target` shows everything that was committed on the publisher before this call:
    /// the copy is over, so that the mark cannot have come with it, and the mark is there.
    ///
    /// # Errors
    /// When it takes minutes, or an agent stops.
    pub fn await_arrival_at(&mut self, mut target: Client) -> Result<()> {
        let mark = self.mark()?;
        self.site.wait_for("the subscriber to catch up", self.patience, || {
            // One statement, one snapshot.
            let query = "SELECT FROM farshore_marks.mark WHERE id = $1 AND \
                         EXISTS (SELECT FROM farshore.subscription) AND \
                         NOT EXISTS (SELECT FROM farshore.subscription WHERE state <> 'streaming')";
            match target.query_opt(query, &[&mark]) {
                Ok(row) => Ok(row.map(drop)),
                Err(error) if error.code() == Some(&SqlState::UNDEFINED_TABLE) => Ok(None),
                Err(error) => Err(error).context("look for the mark"),
            }
        })
    }

    /// Waits until the store of a site's only publication has the log up to `position`.
    ///
    /// # Errors
    /// When it takes minutes.
    pub fn await_stored(&self, site: &Site, position: &str) -> Result<()> {
        wait_until("the store to get there", self.patience, &[&site.log_path()], || {
            let durable = site.status()?["publications"][0]["durable"].clone();
            let durable = durable.as_str().filter(|durable| !durable.is_empty()).unwrap_or("0/0");
            let reached =
                self.publisher_says(&format!("SELECT '{durable}'::pg_lsn >= '{position}'"))?;
            Ok((reached == "t").then_some(()))
        })
    }

    /// Waits until a table has been copied to the subscriber and subscription `s` streams.
    ///
    /// # Errors
    /// When it takes minutes, or an agent stops.
    pub fn await_copy(&mut self, table: &str) -> Result<()> {
        let mut target = self.subscriber.connect()?;
        self.site.wait_for(&format!("{table} to be copied"), self.patience, || {
            let query = "SELECT FROM farshore.table_copy t \
                         JOIN farshore.subscription s ON s.name = t.subscription \
                         WHERE t.table_name = $1 AND t.state = 'copied' AND s.state = 'streaming'";
            Ok(target.query_opt(query, &[&table])?.map(drop))
        })
    }

    /// As [`Pair::await_arrival_at`], at the subscriber.
    ///
    /// # Errors
    /// When it takes minutes, or an agent stops.
    pub fn await_arrival(&mut self) -> Result<()> {
        self.await_arrival_at(self.subscriber.connect()?)
    }

    /// Waits until the subscriber has caught up, and compares all tables of these schemas. A mark
    /// stands behind everything else in commit order, so from its arrival on nothing may differ.
    ///
    /// # Errors
    /// When tables differ; with the differing rows.
    pub fn assert_equal(&mut self, schemas: &[&str]) -> Result<()> {
        self.await_arrival()?;
        let (source, target) = (self.publisher.url(DATABASE), self.subscriber.url(DATABASE));
        for schema in schemas {
            let tables = checksum::tables_in_schema(&source, schema)?;
            checksum::assert_equal(&source, &target, &tables)?;
        }
        Ok(())
    }

    /// Drops the slot of publication `p`, whose node was stopped: the publisher's walsender learns
    /// of that a moment later.
    ///
    /// # Errors
    /// When the slot stays in use.
    pub fn drop_slot(&self) -> Result<()> {
        let mut publisher = self.publisher.connect()?;
        let log = self.publisher.log_path();
        wait_until("the slot to be dropped", self.patience, &[&log], || {
            match publisher.batch_execute("SELECT pg_drop_replication_slot('farshore_p')") {
                Ok(()) => Ok(Some(())),
                Err(error) if error.code() == Some(&SqlState::OBJECT_IN_USE) => Ok(None),
                Err(error) => Err(error).context("drop the slot"),
            }
        })
    }

    /// One value on the publisher, as text.
    ///
    /// # Errors
    /// When the query fails or gives NULL.
    pub fn publisher_says(&self, query: &str) -> Result<String> {
        said(&mut self.publisher.connect()?, query)
    }

    /// One value on the subscriber, as text.
    ///
    /// # Errors
    /// When the query fails or gives NULL.
    pub fn subscriber_says(&self, query: &str) -> Result<String> {
        said(&mut self.subscriber.connect()?, query)
    }
}

fn said(client: &mut Client, query: &str) -> Result<String> {
    let rows = client.simple_query(query).with_context(|| query.to_owned())?;
    let value = rows.iter().find_map(|message| match message {
        postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
        _ => None,
    });
    value.with_context(|| format!("no value from {query}"))
}
