//! Tables that join the publication, or are copied anew, while the others stream on.
//!
//! The copy has its own connections and snapshot; the stream passes over changes of its tables.
//! When all their rows are on the target the stream halts, and the copy goes on like one that was
//! interrupted ([`crate::postgres::resume`]): it takes another snapshot, brings the tables forward
//! to it by what the log says was touched meanwhile, and ends. The tables then stand ahead of the
//! others, and the stream goes on from where it was. A cursor of its own keeps the log for that.

use crate::backup::claim_anew;
use crate::careful::Failure;
use crate::postgres::initial_copy::{GIVE_WAY_FOR, InitialCopy, Which};
use crate::postgres::session::Session;
use crate::streaming::StreamEnd;
use crate::subscription::{Attempt, Start, Subscription};
use crate::{ApplyError, TableCopy};
use farshore_model::Lsn;
use farshore_store::StoreError;
use std::time::Duration;
use tokio::sync::watch;

/// Between a subscription's name and what its cursor for a copy is called; in no name.
const COPY_CURSOR: &str = "/copy";

/// A copy waits for the log no longer than this before it takes another snapshot.
const LOG_AWAITED_MAX: Duration = Duration::from_secs(300);

/// Pause before a copy is tried again when the publisher is away.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(2);

/// Whether a cursor of a store keeps the log for a copy of tables, and not for its subscription.
pub fn is_of_copy(cursor: &str) -> bool {
    cursor.ends_with(COPY_CURSOR)
}

/// The subscription that a cursor of a store belongs to.
pub fn cursor_owner(cursor: &str) -> &str {
    cursor.strip_suffix(COPY_CURSOR).unwrap_or(cursor)
}

impl Subscription {
    /// Streams while the tables in `start.beside` are copied. When the stream ends for another
    /// reason the copy is cut off, to go on from the ranges that are there.
    pub(crate) async fn stream_beside_copy(
        &self,
        session: Session,
        start: Start,
        attempt: Attempt,
        stop: &watch::Receiver<bool>,
    ) -> Result<StreamEnd, Failure> {
        let (halt, mut halted) = watch::channel(false);
        let mut stopping = stop.clone();
        let stopped = async {
            // The site's end is a stop, too.
            let _ = stopping.wait_for(|stop| *stop).await;
        };
        let mut copying = Box::pin(self.copy_beside());
        let mut streaming = Box::pin(self.stream(session, start, attempt, &mut halted));
        let ended = tokio::select! {
            end = &mut streaming => end,
            copied = &mut copying => {
                halt.send_replace(true);
                match (streaming.await, copied) {
                    (Ok(_), Err(error)) => Err(error.into()),
                    (Ok(StreamEnd::Stopped), Ok(())) if !*stop.borrow() => {
                        Ok(StreamEnd::CopiedBeside)
                    }
                    (end, _) => end,
                }
            }
            () = stopped => {
                halt.send_replace(true);
                streaming.await
            }
        };
        self.set_status(|status| status.copy_waits = None);
        ended
    }

    /// Copies all rows of what is not copied, but ends no table's copy.
    async fn copy_beside(&self) -> Result<(), ApplyError> {
        let name = self.spec.name.as_str();
        let mut ready = self.capture_ready.clone();
        if ready.wait_for(|sessions| *sessions > 0).await.is_err() {
            return Err(ApplyError::NotYet(format!(
                "subscription \"{name}\": waiting for its publication's capture"
            )));
        }
        // Again and again, for as long as it takes: it is said once.
        let mut said = None;
        loop {
            let application = format!("farshore {name} copy");
            let mut session = Session::connect(&self.spec.target, &application).await?;
            session.wait_for_copiers(name).await?;
            // What this session has begun when we go away must be waited for, too.
            session.join_copy(name).await?;
            let known = session.load_tables(name).await?;
            let copy = InitialCopy {
                subscription: name,
                source: self.source.as_ref(),
                target: &self.spec.target,
                store: &self.store,
                settings: self.spec.copy,
                streaming: true,
                ends: false,
                which: Which::All,
                schema: &self.spec.schema,
                follow_ddl: self.spec.follow_ddl,
                status: &self.status,
                detaching: &self.detaching,
            };
            match copy.run(&mut session, &known).await {
                // Indexes are built here, too: what is left for the halt is what changed meanwhile.
                Ok(_point) => {
                    self.nothing_is_left();
                    return session.finish_tables(name).await;
                }
                Err(ApplyError::GaveWay(why)) => {
                    tracing::info!("{why}");
                    session.connection.close().await;
                    tokio::time::sleep(GIVE_WAY_FOR).await;
                }
                Err(ApplyError::LogBehind { point, what }) => {
                    self.copy_waits_for_log(what);
                    session.connection.close().await;
                    self.log_reaches(point).await?;
                }
                // Each attempt holds up who uses the table after us, the stream too.
                Err(ApplyError::InUse(why)) => {
                    self.leave_for_later(why);
                    session.connection.close().await;
                    tokio::time::sleep(self.detaching.pause()).await;
                }
                // The others stream on meanwhile.
                Err(ApplyError::Capture(error)) if error.is_transient() => {
                    let why = format!("a copy is tried again: {error}");
                    if said.as_ref() != Some(&why) {
                        tracing::warn!(subscription = %name, "{why}");
                    }
                    said = Some(why.clone());
                    self.set_status(|status| status.copy_waits = Some(why));
                    session.connection.close().await;
                    tokio::time::sleep(TRY_AGAIN_AFTER).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Says that a copy waits for the log.
    pub(crate) fn copy_waits_for_log(&self, why: String) {
        tracing::info!("{why}");
        self.set_status(|status| status.copy_waits = Some(why));
    }

    /// Waits until the store has the log up to `point`, or for a while: a publisher that failed over
    /// may never come there.
    pub(crate) async fn log_reaches(&self, point: Lsn) -> Result<(), ApplyError> {
        let mut durable = self.store.durable();
        let reached = durable.wait_for(|durable| durable.0 >= point);
        match tokio::time::timeout(LOG_AWAITED_MAX, reached).await {
            Ok(Ok(_)) | Err(_) => Ok(()),
            Ok(Err(_)) => Err(ApplyError::NotYet("the store stopped taking writes".to_owned())),
        }
    }

    /// Keeps the log from here on for a copy that streaming does not wait for. Where retention has
    /// taken it from under an earlier part of the copy, it is kept anew: what was begun before starts
    /// over by itself, and what is begun now needs it.
    pub(crate) fn keep_log_for_copy(&self) -> Result<(), StoreError> {
        let name = self.copy_cursor();
        let Some(dropped) = self.store.register_cursor(&name)?.expired else { return Ok(()) };
        let from = claim_anew(self.store.as_ref(), &name)?.applied;
        tracing::warn!(
            subscription = %self.spec.name, %dropped, %from,
            "retention dropped log that was kept for a copy of tables: those whose copy was begun \
             before start over, and the log is kept from here on"
        );
        Ok(())
    }

    /// Ends that claim on the log, if there is one.
    pub(crate) fn release_log_of_copy(&self) -> Result<(), StoreError> {
        let cursor = self.copy_cursor();
        if self.store.cursors().iter().any(|known| known.name == cursor) {
            self.store.drop_cursor(&cursor)?;
            self.set_status(|status| status.copies = Vec::<TableCopy>::new());
        }
        Ok(())
    }

    fn copy_cursor(&self) -> String {
        format!("{}{COPY_CURSOR}", self.spec.name)
    }
}
