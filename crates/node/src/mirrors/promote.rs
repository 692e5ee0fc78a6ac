//! `farshore mirror promote`: the standby of a far end takes over.

use super::FarAgent;
use farshore_mirror::keep::FarStatus;
use farshore_mirror::promote::{Plan, Promoted, promote};
use farshore_mirror::spool::Spool;
use farshore_model::Lsn;
use farshore_pg::Config;
use std::time::Duration;
use tokio::sync::mpsc;

/// How a standby is to be promoted, as typed.
pub(crate) struct Takeover<'a> {
    pub standby: Option<&'a str>,
    pub allow_data_loss: bool,
    pub wait_seconds: u64,
}

impl FarAgent {
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Promotes a standby that has everything that the spool holds. Nothing is taken in meanwhile,
    /// and never again once the standby was told.
    ///
    /// # Errors
    /// Why not, for a person.
    pub async fn promote(
        &self,
        wanted: &Takeover<'_>,
        progress: &mpsc::Sender<String>,
    ) -> Result<String, String> {
        let name = self.name();
        let standby = match wanted.standby {
            Some(text) => Config::parse(text).map_err(|error| format!("--standby: {error}"))?,
            None => self.config.standby.clone().ok_or_else(|| {
                format!(
                    "no standby is known: set standby = \"postgres://…\" under [mirror.{name}], or \
                     name one with --standby"
                )
            })?,
        };
        let spool = self.far.spool().ok_or_else(|| {
            format!("mirror \"{name}\" has received no log yet: there is nothing to promote")
        })?;
        let was_connected = self.fetch_the_rest(&spool, wanted.wait_seconds, progress).await;
        // Nothing is acknowledged from here on.
        let held = self.intake.hold().await;
        let plan = Plan {
            standby,
            listen: self.config.listen.clone(),
            allow_data_loss: wanted.allow_data_loss,
            patience: Duration::from_secs(wanted.wait_seconds),
        };
        let promoted = promote(&spool, &plan, progress).await;
        drop(held);
        let promoted = promoted.map_err(|error| error.to_string())?;
        tracing::warn!(
            mirror = %name, timeline = %promoted.timeline, fork = %promoted.fork,
            spool_end = %promoted.spool_end, lost_bytes = promoted.lost_bytes(), "promoted"
        );
        let principal_end = self.far.status().principal_end;
        Ok(said(name, &promoted, was_connected, principal_end))
    }

    /// Lets come what the near end had told of by now: where it streams from a node that keeps log
    /// alone, that is acknowledged and may be nowhere else. Whether it was connected.
    async fn fetch_the_rest(
        &self,
        spool: &Spool,
        wait_seconds: u64,
        progress: &mpsc::Sender<String>,
    ) -> bool {
        let FarStatus { connected, principal_end, .. } = *self.far.status();
        let mut positions = spool.positions();
        let durable = positions.borrow().durable;
        if !connected || durable >= principal_end {
            return connected;
        }
        let _ = progress.try_send(format!(
            "the near end has log up to {principal_end}, {} bytes beyond the spool: fetching it",
            principal_end.bytes_since(durable)
        ));
        let within = Duration::from_secs(wait_seconds);
        let mut reached = durable;
        while reached < principal_end {
            let moved = positions.wait_for(|now| now.durable > reached);
            match tokio::time::timeout(within, moved).await {
                Ok(Ok(now)) => reached = now.durable,
                // What cannot be fetched is not waited for: the near end is gone as well.
                Ok(Err(_)) | Err(_) => break,
            }
        }
        connected
    }
}

fn said(name: &str, promoted: &Promoted, was_connected: bool, principal_end: Lsn) -> String {
    let Promoted { timeline, fork, spool_end, was_already } = promoted;
    let was = if *was_already { "had been promoted already" } else { "is promoted" };
    let mut text =
        format!("the standby of mirror \"{name}\" {was}: timeline {timeline} begins at {fork}");
    match promoted.lost_bytes() {
        0 => text.push_str(&format!(
            ", at or past {spool_end}, where the log in the spool ends: nothing that this mirror \
             acknowledged is lost"
        )),
        lost => text.push_str(&format!(
            ". LOST: {lost} bytes of log up to {spool_end}, which the spool holds, and the commits \
             in them"
        )),
    }
    let not_here = principal_end.bytes_since((*spool_end).max(*fork));
    if not_here > 0 {
        text.push_str(&format!(
            ". The principal had told of log up to {principal_end}, {not_here} bytes more than came \
             here: of mode async, and behind a node that keeps log alone, commits in it are lost"
        ));
    }
    if was_connected {
        text.push_str(
            ". The old principal was still connected: stop it, or keep its clients away. Commits \
             that wait for this mirror there wait for ever",
        );
    }
    text
}
