//! PostgreSQL's own logical replication, with the settings that serve it best.

use super::backlog::SCHEMA;
use super::ground::{Ground, SOURCE, SWITCH_MAX};
use crate::measurement::Drained;
use anyhow::{Context, Result};
use farshore_testkit::wait::wait_until;

/// Its target.
pub const DATABASE: &str = "native";
/// Subscription options; what is not named has PostgreSQL's default, as `synchronous_commit = off`
/// for the apply worker.
pub const OPTIONS: &str = "binary = true, streaming = parallel";

/// A subscription that has copied what was there and is disabled.
#[derive(Debug)]
pub struct Native;

impl Native {
    /// Creates it, waits for its initial copy, disables it.
    ///
    /// # Errors
    /// When a server refuses, or the copy takes more than a minute.
    pub fn prepare(ground: &Ground<'_>) -> Result<Native> {
        ground
            .source()?
            .batch_execute(&format!("CREATE PUBLICATION native FOR TABLES IN SCHEMA {SCHEMA}"))?;
        let mut target = ground.target(DATABASE)?;
        target
            .batch_execute(&format!(
                "CREATE SUBSCRIPTION native \
                 CONNECTION 'host=127.0.0.1 port={} user=postgres dbname={SOURCE}' \
                 PUBLICATION native WITH ({OPTIONS})",
                ground.source_port()
            ))
            .context("create the native subscription")?;
        let log = ground.subscriber_log();
        wait_until("the native initial copy", SWITCH_MAX, &[&log], || {
            ground.interrupt().check()?;
            let unready = "SELECT FROM pg_subscription_rel WHERE srsubstate <> 'r'";
            Ok(target.query(unready, &[])?.is_empty().then_some(()))
        })?;
        target.batch_execute("ALTER SUBSCRIPTION native DISABLE")?;
        ground.await_idle_slots()?;
        Ok(Native)
    }

    /// Enables it and measures until the last row is visible, then disables it again.
    ///
    /// # Errors
    /// When the row does not arrive.
    pub fn drain(&mut self, ground: &Ground<'_>) -> Result<Drained> {
        let mut target = ground.target(DATABASE)?;
        let meter = ground.begin()?;
        target.batch_execute("ALTER SUBSCRIPTION native ENABLE")?;
        ground.await_marker(DATABASE, &ground.subscriber_log(), || Ok(()))?;
        let (seconds, cpu_publisher, cpu_subscriber) = meter.read(ground);
        target.batch_execute("ALTER SUBSCRIPTION native DISABLE")?;
        ground.await_idle_slots()?;
        Ok(Drained { seconds, cpu_publisher, cpu_subscriber, own: None })
    }
}

/// Drops the subscription and its slot.
///
/// # Errors
/// When the subscriber refuses.
pub fn retire(ground: &Ground<'_>) -> Result<()> {
    ground.target(DATABASE)?.batch_execute("DROP SUBSCRIPTION IF EXISTS native")?;
    Ok(())
}
