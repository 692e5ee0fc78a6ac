//! A slot in the spool for a standby that is being made.

use super::FarAgent;
use crate::seed::Reserved;
use farshore_mirror::spool::{SlotName, SpoolError};
use std::time::Duration;

/// A mirror that was just begun has its spool soon.
const SPOOL_WITHIN: Duration = Duration::from_secs(60);

impl FarAgent {
    /// Keeps the log in the spool from now on, for a standby that will stream by this slot.
    ///
    /// # Errors
    /// Why not, for a person.
    pub async fn reserve(&self, slot: &str) -> Result<Reserved, String> {
        let name = SlotName::new(slot).ok_or_else(|| {
            format!("--slot: \"{slot}\" cannot be a slot's name: use 1 to 63 lower-case letters, digits and _")
        })?;
        if self.far.standbys.is_in_use(&name) {
            return Err(format!(
                "a standby streams by the slot \"{slot}\" of mirror \"{}\". Name another with --slot",
                self.name()
            ));
        }
        let mut begun = self.far.spool.subscribe();
        let spool = tokio::time::timeout(SPOOL_WITHIN, begun.wait_for(Option::is_some)).await;
        let spool = spool.ok().and_then(|begun| begun.ok()?.clone()).ok_or_else(|| {
            let why = self.report().error.unwrap_or_else(|| "its near end is not there".to_owned());
            format!("mirror \"{}\" has received no log yet: {why}", self.name())
        })?;
        let kept = spool.clone();
        let work = move || -> Result<_, SpoolError> {
            spool.check_open()?;
            // One that was never used keeps nothing.
            if spool.slot(&name) == Some(None) {
                spool.drop_slot(&name)?;
            }
            let durable = spool.positions().borrow().durable;
            let from = spool.identity().segment.floor(durable);
            spool.create_slot(&name, Some(from))?;
            Ok(spool.slot(&name).flatten().unwrap_or(from))
        };
        let kept_from = tokio::task::spawn_blocking(work)
            .await
            .map_err(|_| "making the slot died".to_owned())?
            .map_err(|error| error.to_string())?;
        Ok(Reserved { system_id: kept.identity().system_id.to_string(), kept_from: kept_from.0 })
    }
}
