//! What a contender's work takes, from its beginning to the last row being visible.

use super::ground::{DRAIN_MAX, Ground};
use super::relay::Relay;
use super::{Contender, Contestant};
use crate::backlog::MARKER;
use crate::line::Line;
use crate::measurement::{Costs, Own};
use anyhow::Result;
use farshore_testkit::wait::watch_until;
use farshore_testkit::wan::Traffic;
use postgres::{Client, Statement};
use std::time::Instant;

/// CPU time of everybody at the start of a measurement.
#[derive(Debug)]
pub struct Meter {
    begin: Instant,
    publisher: f64,
    subscriber: f64,
    own: Vec<Own>,
    bytes: u64,
    traffic: Traffic,
    emulator: f64,
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
        let mut meter = self.begin_alone()?;
        meter.own = contestant.own()?;
        Ok(meter)
    }

    /// As [`Ground::begin`], for what has no processes of its own.
    ///
    /// # Errors
    /// When a server cannot be reached.
    pub fn begin_alone(&self) -> Result<Meter> {
        self.bench.servers.checkpoint()?;
        self.interrupt().check()?;
        Ok(Meter {
            bytes: self.relay.as_ref().map_or(0, Relay::bytes_sent),
            traffic: self.bench.servers.line.as_ref().map_or_else(Traffic::default, Line::traffic),
            emulator: self.bench.servers.line.as_ref().map_or(0.0, Line::cpu_seconds),
            own: Vec::new(),
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
            watch_until("the backlog's last row", DRAIN_MAX, &[&log], || {
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

    /// What has gone over the network since the beginning, where it is counted; by metric.
    pub fn sent(&self, ground: &Ground<'_>) -> Vec<(&'static str, f64)> {
        let mut sent = Vec::new();
        if let Some(relay) = &ground.relay {
            let bytes = relay.bytes_sent() - self.bytes;
            sent.push(("bytes_sent_mb", bytes as f64 / 1_048_576.0));
        }
        if let Some(line) = &ground.bench.servers.line {
            let (before, now) = (self.traffic, line.traffic());
            let mb = |before: u64, now: u64| (now - before) as f64 / 1e6;
            let dropped =
                |traffic: Traffic| traffic.near_to_far.dropped + traffic.far_to_near.dropped;
            sent.extend([
                ("wire_mb", mb(before.near_to_far.bytes, now.near_to_far.bytes)),
                ("wire_back_mb", mb(before.far_to_near.bytes, now.far_to_near.bytes)),
                ("dropped_packets", (dropped(now) - dropped(before)) as f64),
                ("emulator_cpu_s", line.cpu_seconds() - self.emulator),
            ]);
        }
        sent
    }

    /// What it has cost everybody since the beginning.
    ///
    /// # Errors
    /// When the kernel refuses to tell.
    pub fn read(&self, ground: &Ground<'_>, contestant: &mut dyn Contestant) -> Result<Costs> {
        let own = contestant.own()?.into_iter().map(|own| self.since(own)).collect();
        Ok(Costs { own, ..self.read_alone(ground) })
    }

    /// What it has cost the servers since the beginning.
    pub fn read_alone(&self, ground: &Ground<'_>) -> Costs {
        let servers = ground.bench.servers;
        Costs {
            publisher: servers.publisher.cpu_seconds() - self.publisher,
            subscriber: servers.subscriber.cpu_seconds() - self.subscriber,
            own: Vec::new(),
        }
    }

    fn since(&self, own: Own) -> Own {
        let before = self.own.iter().find(|before| before.name == own.name);
        Own { cpu: own.cpu - before.map_or(0.0, |before| before.cpu), ..own }
    }
}
