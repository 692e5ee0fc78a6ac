//! What a contender's work takes, from its beginning to the last row being visible.

use super::ground::{DRAIN_MAX, Ground};
use super::relay::Relay;
use super::{Contender, Contestant};
use crate::backlog::MARKER;
use crate::measurement::Costs;
use anyhow::Result;
use farshore_testkit::wait::wait_until;
use postgres::{Client, Statement};
use std::time::Instant;

/// CPU time of everybody at the start of a measurement.
#[derive(Debug)]
pub struct Meter {
    begin: Instant,
    publisher: f64,
    subscriber: f64,
    own: f64,
    bytes: u64,
}

/// Connections that look for the last row in each of a contender's databases.
pub struct Watch<'a> {
    ground: &'a Ground<'a>,
    targets: Vec<(Client, Statement)>,
}

impl<'a> Ground<'a> {
    /// Begins a measurement: nothing dirty is left.
    ///
    /// # Errors
    /// When a server cannot be reached.
    pub fn begin(&self, contestant: &mut dyn Contestant) -> Result<Meter> {
        self.bench.servers.checkpoint()?;
        self.interrupt().check()?;
        Ok(Meter {
            bytes: self.relay.as_ref().map_or(0, Relay::bytes_sent),
            own: contestant.own()?.map_or(0.0, |(cpu, _)| cpu),
            publisher: self.bench.servers.publisher.cpu_seconds(),
            subscriber: self.bench.servers.subscriber.cpu_seconds(),
            begin: Instant::now(),
        })
    }

    /// Connects to a contender's databases, to see there when all has arrived.
    ///
    /// # Errors
    /// When the subscriber cannot be reached.
    pub fn watch(&'a self, contender: Contender) -> Result<Watch<'a>> {
        let mut targets = Vec::new();
        for database in self.targets(contender) {
            let mut client = self.target(&database)?;
            let query = client.prepare(&format!("SELECT FROM {MARKER}"))?;
            targets.push((client, query));
        }
        Ok(Watch { ground: self, targets })
    }
}

impl Watch<'_> {
    /// Waits for the marker row to be visible in every database.
    ///
    /// # Errors
    /// When the contender has given up, or after a quarter of an hour.
    pub fn await_markers(&mut self, contestant: &mut dyn Contestant) -> Result<()> {
        let log = contestant.log();
        for (client, query) in &mut self.targets {
            wait_until("the backlog's last row", DRAIN_MAX, &[&log], || {
                self.ground.interrupt().check()?;
                if !client.query(&*query, &[])?.is_empty() {
                    return Ok(Some(()));
                }
                contestant.check().map(|()| None)
            })?;
        }
        Ok(())
    }
}

impl Meter {
    /// Seconds since the beginning.
    pub fn seconds(&self) -> f64 {
        self.begin.elapsed().as_secs_f64()
    }

    /// Bytes that the publisher has sent since the beginning, where they are counted.
    pub fn bytes_sent(&self, ground: &Ground<'_>) -> Option<u64> {
        ground.relay.as_ref().map(|relay| relay.bytes_sent() - self.bytes)
    }

    /// What it has cost everybody since the beginning.
    ///
    /// # Errors
    /// When the kernel refuses to tell.
    pub fn read(&self, ground: &Ground<'_>, contestant: &mut dyn Contestant) -> Result<Costs> {
        let servers = ground.bench.servers;
        Ok(Costs {
            publisher: servers.publisher.cpu_seconds() - self.publisher,
            subscriber: servers.subscriber.cpu_seconds() - self.subscriber,
            own: contestant.own()?.map(|(cpu, rss)| (cpu - self.own, rss)),
        })
    }
}
