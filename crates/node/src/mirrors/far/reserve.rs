//! Slots in the spool: one for a standby that is being made, and what all of them keep.

use super::FarAgent;
use crate::report::SlotReport;
use crate::seed::Reserved;
use farshore_mirror::spool::{SlotName, SlotView, Spool, SpoolError};
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
            // One that was never used, or is lost, keeps nothing.
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
        // Not held while others look at it: a writer between would wait for us, and they for it.
        let timeline = kept.positions().borrow().timeline;
        Ok(Reserved {
            system_id: kept.identity().system_id.to_string(),
            kept_from: kept_from.0,
            timeline: timeline.0,
            trouble: self.report().error,
        })
    }

    /// Drops a slot that nobody streams by: its standby was given up.
    ///
    /// # Errors
    /// Why not, for a person.
    pub async fn drop_slot(&self, slot: &str) -> Result<String, String> {
        let mirror = self.name();
        let unknown = || {
            format!("mirror \"{mirror}\" has no slot \"{slot}\" here; farshore status lists them")
        };
        let (spool, name) = self.far.spool().zip(SlotName::new(slot)).ok_or_else(unknown)?;
        if self.far.standbys.is_in_use(&name) {
            return Err(format!(
                "a standby streams by the slot \"{slot}\" of mirror \"{mirror}\": stop it first"
            ));
        }
        let dropped = tokio::task::spawn_blocking(move || spool.drop_slot(&name))
            .await
            .map_err(|_| "dropping the slot died".to_owned())?
            .map_err(|error| error.to_string())?;
        if !dropped {
            return Err(unknown());
        }
        tracing::info!(%mirror, %slot, "dropped a standby's slot");
        Ok(format!(
            "the slot \"{slot}\" of mirror \"{mirror}\" is gone, and the spool keeps no log for it"
        ))
    }

    pub(super) fn slots(&self, spool: &Spool) -> Vec<SlotReport> {
        let durable = spool.positions().borrow().durable;
        let report = |SlotView { name, restart, is_lost }| SlotReport {
            in_use: self.far.standbys.is_in_use(&name),
            name: name.to_string(),
            restart: restart.map(|restart| restart.to_string()),
            kept_bytes: restart.map_or(0, |restart| durable.bytes_since(restart)),
            lost: is_lost,
        };
        spool.slot_views().into_iter().map(report).collect()
    }

    /// A word on slots that keep much, or did.
    pub(super) fn warning_of(&self, slots: &[SlotReport]) -> Option<String> {
        let (mirror, most) = (self.name(), self.config.warn_behind);
        let words = slots.iter().filter_map(|SlotReport { name, kept_bytes, in_use, lost, .. }| {
            let give_up = format!("farshore mirror drop-slot SITE.toml {mirror} {name}");
            match (lost, in_use) {
                (true, _) => Some(format!(
                    "the slot \"{name}\" kept more than drop_behind and keeps no log any more: seed \
                     its standby anew, or, if that is given up, {give_up}"
                )),
                (false, true) if *kept_bytes > most => Some(format!(
                    "the slot \"{name}\" keeps {kept_bytes} bytes of the spool, more than \
                     warn_behind ({most}): its standby takes in less than is written"
                )),
                (false, false) if *kept_bytes > most => Some(format!(
                    "the slot \"{name}\" keeps {kept_bytes} bytes of the spool, more than \
                     warn_behind ({most}), and nobody streams by it: start its standby or, if that \
                     is given up, {give_up}"
                )),
                (false, _) => None,
            }
        });
        let words: Vec<String> = words.collect();
        (!words.is_empty()).then(|| words.join(". "))
    }
}
