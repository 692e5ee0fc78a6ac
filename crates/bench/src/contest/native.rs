//! PostgreSQL's own logical replication, with the settings that serve it best.

use super::ground::{Ground, SOURCE, SWITCH_MAX};
use super::{Contender, Contestant};
use crate::backlog::SCHEMA;
use anyhow::{Context, Result};
use farshore_testkit::wait::wait_until;
use postgres::Client;
use std::path::PathBuf;

/// Subscription options; what is not named has PostgreSQL's default, as `synchronous_commit = off`
/// for the apply worker.
pub const OPTIONS: &str = "binary = true, streaming = parallel";

/// Subscriptions that have copied what was there and are disabled.
pub struct Native<'a> {
    ground: &'a Ground<'a>,
    /// A subscription is named as its database.
    targets: Vec<(String, Client)>,
}

impl<'a> Native<'a> {
    /// Creates a subscription per target, waits for its initial copy, disables it.
    ///
    /// # Errors
    /// When a server refuses, or a copy takes more than a minute.
    pub fn prepare(ground: &'a Ground<'a>) -> Result<Native<'a>> {
        ground
            .source()?
            .batch_execute(&format!("CREATE PUBLICATION native FOR TABLES IN SCHEMA {SCHEMA}"))?;
        let mut native = Native { ground, targets: Vec::new() };
        let log = native.log();
        for name in ground.targets(Contender::Native) {
            let mut target = ground.target(&name)?;
            target
                .batch_execute(&format!(
                    "CREATE SUBSCRIPTION {name} \
                     CONNECTION 'host=127.0.0.1 port={} user=postgres dbname={SOURCE}' \
                     PUBLICATION native WITH ({OPTIONS})",
                    ground.publisher_port()
                ))
                .context("create the native subscription")?;
            wait_until("the native initial copy", SWITCH_MAX, &[&log], || {
                ground.interrupt().check()?;
                let unready = "SELECT FROM pg_subscription_rel WHERE srsubstate <> 'r'";
                Ok(target.query(unready, &[])?.is_empty().then_some(()))
            })?;
            target.batch_execute(&format!("ALTER SUBSCRIPTION {name} DISABLE"))?;
            native.targets.push((name, target));
        }
        ground.await_idle_slots()?;
        Ok(native)
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
        self.alter("ENABLE")
    }

    fn check(&mut self) -> Result<()> {
        Ok(())
    }

    fn own(&mut self) -> Result<Option<(f64, u64)>> {
        Ok(None)
    }

    fn stop(&mut self) -> Result<()> {
        self.alter("DISABLE")?;
        self.ground.await_idle_slots()
    }

    fn log(&self) -> PathBuf {
        self.ground.subscriber_log()
    }
}
