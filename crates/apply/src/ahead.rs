//! A target that has more than its store can have given it.
//!
//! Store and publisher may be set back together, as by a snapshot of the machine that both are on,
//! while the target stays. Capture moves the store's end past what the target has soon, with other
//! changes. So what a target has is held against what was durable when the store was opened and
//! what was read for it since; and what was found once is remembered.
//!
//! Where the log has come past what the target has by then, or was begun anew before it, positions
//! tell nothing: but the newest transaction that the target has is not in it, or is another one.

use crate::ApplyError;
use crate::postgres::progress::{Progress, state};
use crate::remedy;
use crate::requests::next_transaction;
use crate::status::SourceTransaction;
use crate::subscription::Subscription;
use farshore_capture::slot;
use farshore_model::transaction::Header;
use farshore_model::{Lsn, PgTime};
use farshore_store::{LogStore, StoreError};
use std::sync::atomic::{AtomicU64, Ordering};

/// How far a subscription's target can have come: what it has it got by an earlier opening of the
/// store, which read only what was durable, or since.
#[derive(Debug)]
pub struct Given(AtomicU64);

impl Given {
    /// `durable` is where the store ended when it was opened, before anything was added.
    pub fn new(durable: Lsn) -> Given {
        Given(AtomicU64::new(durable.0))
    }

    /// What is up to `position` may be on the target from now on.
    pub fn reaches(&self, position: Lsn) {
        self.0.fetch_max(position.0, Ordering::AcqRel);
    }

    fn up_to(&self) -> Lsn {
        Lsn(self.0.load(Ordering::Acquire))
    }
}

/// The store's note that a target was found ahead: how far the store reached, and what was said.
fn note_key(subscription: &str) -> String {
    format!("ahead {subscription}")
}

/// What was found of the target of this subscription, in words, and how far the store reached then.
fn noted(store: &dyn LogStore, subscription: &str) -> Option<(Lsn, String)> {
    let note = store.note(&note_key(subscription))?;
    let (reached, found) = note.split_once(' ')?;
    Some((reached.parse().ok()?, found.to_owned()))
}

/// The target is another now, or was put back as well.
pub(crate) fn forget(store: &dyn LogStore, subscription: &str) -> Result<(), StoreError> {
    if noted(store, subscription).is_none() {
        return Ok(());
    }
    tracing::info!(%subscription, "the target is no longer ahead of the store");
    store.set_note(&note_key(subscription), "")
}

/// The newest transaction that a target has; zero where none is known. One of before a copy that was
/// begun of all of it is not in what is copied.
fn newest_applied(progress: &Progress) -> Lsn {
    match progress.newest {
        Some(newest) if progress.state != state::COPYING => newest.position,
        Some(_) | None => Lsn::ZERO,
    }
}

impl Subscription {
    /// Refuses a target that has what the store cannot have given it. `copied` is where the newest
    /// copy of a table stands: the log may not have come there yet, also where that table is to be
    /// copied once more.
    pub(crate) fn check_not_ahead(
        &self,
        progress: Option<&Progress>,
        copied: Lsn,
    ) -> Result<(), ApplyError> {
        let (name, store) = (self.spec.name.as_str(), self.store.as_ref());
        let Some(progress) = progress else { return Ok(forget(store, name)?) };
        // Transactions come from the store alone, wherever copies stand.
        let newest = newest_applied(progress);
        let is_beyond = |reached: Lsn| progress.applied > reached.max(copied) || newest > reached;
        let applied = progress.applied;
        let begins = slot::log_begins(store).unwrap_or(Lsn::ZERO);
        match noted(store, name) {
            Some((reached, found)) if is_beyond(reached) => {
                return Err(ApplyError::Gap(found));
            }
            Some(_) => forget(store, name)?,
            None => {}
        }
        if slot::is_replica(store) {
            let durable = store.durable().borrow().0;
            if !is_beyond(durable.max(begins).max(self.given.up_to())) {
                return Ok(());
            }
            // What it fetches is the rest of the same log: there is nothing to be remembered.
            return Err(ApplyError::Gap(format!(
                "subscription \"{name}\": the target has applied up to {applied}, but the store \
                 holds only up to {durable}: it was replaced or set back. If this site's store \
                 alone was put back to an older copy of itself, it fetches the rest from its \
                 upstream: farshore resume, once it has. Otherwise, to have all its tables emptied \
                 and copied anew: {}, then farshore resume",
                remedy::resync(name, None)
            )));
        }
        let reached = self.given.up_to().max(begins);
        if is_beyond(reached) {
            let found = format!(
                "subscription \"{name}\": the target has applied up to {applied}, but the \
                     store held only up to {reached} when this node opened it: the store or the \
                     publisher was replaced or set back, and what came since is not what the \
                     target has. Found {}, and remembered: farshore resume and a restart do not \
                     help. To have all its tables emptied and copied anew: {}, then farshore resume; or \
                     restore the target from a backup that has applied no more than {reached}",
                PgTime::now(),
                remedy::resync(name, None)
            );
            store.set_note(&note_key(name), &format!("{reached} {found}"))?;
            return Err(ApplyError::Gap(found));
        }
        Ok(())
    }

    /// Refuses a log that should have the newest transaction of the target, and has not.
    pub(crate) async fn check_same_log(
        &self,
        progress: Option<&Progress>,
    ) -> Result<(), ApplyError> {
        let Some(newest) = progress.and_then(|progress| progress.newest) else { return Ok(()) };
        let (name, store) = (self.spec.name.as_str(), self.store.as_ref());
        let SourceTransaction { position, commit_time } = newest;
        let is_here = slot::log_begins(store).is_some_and(|begins| begins < position)
            && position <= store.durable().borrow().0;
        if !is_here {
            return Ok(());
        }
        let found = match next_transaction(&self.store, Lsn(position.0 - 1)).await {
            // It was kept no longer.
            Err(ApplyError::Store(StoreError::Dropped { .. })) => return Ok(()),
            found => found?,
        };
        let is_it =
            |header: &Header| header.end_lsn == position && header.commit_time == commit_time;
        if found.as_ref().is_some_and(is_it) {
            return Ok(());
        }
        let before = Lsn(position.0 - 1);
        let said = format!(
            "subscription \"{name}\": the newest transaction that the target has, which was committed \
             on the publisher at {commit_time} and ends at {position}, is not in the log here, which \
             goes on past it: the publisher, or the store here or upstream, was set back or \
             replaced, and what came since is not what the target has. Found {}, and remembered. To \
             have all its tables emptied and copied anew: {}, then farshore resume; or restore the \
             target from a backup that has applied less than {position}",
            PgTime::now(),
            remedy::resync(name, None)
        );
        store.set_note(&note_key(name), &format!("{before} {said}"))?;
        Err(ApplyError::Gap(said))
    }
}
