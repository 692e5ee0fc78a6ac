//! PostgreSQL's own logical replication, with the settings that serve it best.

use super::ground::{DRAIN_MAX, Ground, SOURCE};
use super::{Contender, Contestant};
use crate::backlog::SCHEMA;
use crate::measurement::Own;
use anyhow::{Context, Result};
use farshore_testkit::wait::watch_until;
use farshore_testkit::wan::Side;
use postgres::Client;
use std::path::PathBuf;
use std::time::Duration;

/// Subscription options; what is not named has PostgreSQL's default, as `synchronous_commit = off`
/// for the apply worker unless it is to be durable.
pub fn options(is_durable: bool) -> &'static str {
    if is_durable {
        "binary = true, streaming = parallel, synchronous_commit = on"
    } else {
        "binary = true, streaming = parallel"
    }
}

/// Subscriptions, one for each target.
pub struct Native<'a> {
    ground: &'a Ground<'a>,
    /// A subscription is named as its database.
    targets: Vec<(String, Client)>,
    /// Whether there are subscriptions yet.
    is_made: bool,
}

impl<'a> Native<'a> {
    /// Creates a subscription per target, waits for its initial copy, disables it.
    ///
    /// # Errors
    /// When a server refuses, or copies take a quarter of an hour: those of 2,000 tables take
    /// minutes.
    pub fn prepare(ground: &'a Ground<'a>) -> Result<Native<'a>> {
        let mut native = Native::new(ground)?;
        native.start()?;
        native.await_copied(DRAIN_MAX)?;
        native.stop()?;
        Ok(native)
    }

    /// Makes what is to be made before there are subscriptions: its start creates them.
    ///
    /// # Errors
    /// When a server refuses.
    pub fn new(ground: &'a Ground<'a>) -> Result<Native<'a>> {
        ground
            .source()?
            .batch_execute(&format!("CREATE PUBLICATION native FOR TABLES IN SCHEMA {SCHEMA}"))?;
        let mut targets = Vec::new();
        for name in ground.targets(Contender::Native) {
            let target = ground.target(&name)?;
            targets.push((name, target));
        }
        Ok(Native { ground, targets, is_made: false })
    }

    fn create(&mut self) -> Result<()> {
        let (host, port) = self.ground.publisher_address(Side::Far);
        let options = options(self.ground.native_is_durable);
        for (name, target) in &mut self.targets {
            target
                .batch_execute(&format!(
                    "CREATE SUBSCRIPTION {name} \
                     CONNECTION 'host={host} port={port} user=postgres dbname={SOURCE}' \
                     PUBLICATION native WITH ({options})"
                ))
                .context("create the native subscription")?;
        }
        self.is_made = true;
        Ok(())
    }

    fn alter(&mut self, how: &str) -> Result<()> {
        for (name, target) in &mut self.targets {
            target.batch_execute(&format!("ALTER SUBSCRIPTION {name} {how}"))?;
        }
        Ok(())
    }
}

impl Contestant for Native<'_> {
    fn contender(&self) -> Contender {
        Contender::Native
    }

    fn start(&mut self) -> Result<()> {
        if self.is_made { self.alter("ENABLE") } else { self.create() }
    }

    fn await_copied(&mut self, timeout: Duration) -> Result<()> {
        let log = self.log();
        for (_, target) in &mut self.targets {
            watch_until("the native initial copy", timeout, &[&log], || {
                self.ground.interrupt().check()?;
                let unready = "SELECT FROM pg_subscription_rel WHERE srsubstate <> 'r'";
                Ok(target.query(unready, &[])?.is_empty().then_some(()))
            })?;
        }
        Ok(())
    }

    fn check(&mut self) -> Result<()> {
        Ok(())
    }

    fn own(&mut self) -> Result<Vec<Own>> {
        Ok(Vec::new())
    }

    fn stop(&mut self) -> Result<()> {
        self.alter("DISABLE")?;
        self.ground.await_idle_slots()
    }

    fn log(&self) -> PathBuf {
        self.ground.subscriber_log()
    }
}
