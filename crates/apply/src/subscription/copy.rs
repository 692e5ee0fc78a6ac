//! A copy that nothing streams beside: a subscription's first, and the end of any other.

use super::Subscription;
use crate::ApplyError;
use crate::postgres::initial_copy::{InitialCopy, Which};
use crate::postgres::progress::{Progress, TableProgress, state};
use crate::postgres::session::Session;
use crate::status::Phase;
use farshore_capture::slot;
use farshore_fault as fault;
use farshore_model::Applied;

impl Subscription {
    /// Copies what is not copied, or only some of it, while nothing streams.
    pub(super) async fn copy_waiting(
        &self,
        session: &mut Session,
        progress: Option<&Progress>,
        pinned: Applied,
        which: Which,
    ) -> Result<(), ApplyError> {
        let name = &self.spec.name;
        session.wait_for_copiers(name).await?;
        let known = session.load_tables(name).await?;
        self.copy(session, progress, pinned, &known, which).await
    }

    async fn copy(
        &self,
        session: &mut Session,
        progress: Option<&Progress>,
        pinned: Applied,
        known: &[TableProgress],
        which: Which,
    ) -> Result<(), ApplyError> {
        let name = self.spec.name.as_str();
        self.set_status(|status| status.phase = Phase::Copying);
        let mut ready = self.capture_ready.clone();
        if ready.wait_for(|sessions| *sessions > 0).await.is_err() {
            return Err(ApplyError::NotYet(format!(
                "subscription \"{name}\": waiting for its publication's capture"
            )));
        }
        let system = slot::publisher_identity(self.store.as_ref());
        if let Some(progress) = progress {
            // Which publisher it is may be known only now.
            self.check_origin(progress, known)?;
            if let Some(now) = system.filter(|system| *system != progress.publisher) {
                tracing::warn!(
                    subscription = %name, before = %progress.publisher, %now,
                    "the publisher is another database cluster than the one that the target was \
                     filled from: all is copied anew, as was asked for"
                );
                // Before any table is copied: one that is half copied is of this one then.
                session.follow_publisher(name, &now).await?;
            }
        } else {
            // The log from `pinned` on is kept for us, and no consistent point can be before it.
            // The log may have come on since the store was opened, as while there was no target.
            self.given.reaches(pinned.0);
            fault::point("snapshot.before-state");
            session
                .execute(
                    "INSERT INTO farshore.subscription (name, publication, publisher, state, applied) \
                     VALUES ($1, $2, $3, $4, $5::text::pg_lsn)",
                    &[
                        Some(name),
                        Some(&self.spec.publication),
                        Some(&system.unwrap_or_default()),
                        Some(state::COPYING),
                        Some(&pinned.to_string()),
                    ],
                )
                .await?;
            fault::point("snapshot.after-state");
        }
        let copy = InitialCopy {
            subscription: name,
            source: self.source.as_ref(),
            target: &self.spec.target,
            store: &self.store,
            settings: self.spec.copy,
            ends: true,
            which,
            streaming: progress.is_some_and(|progress| progress.state != state::COPYING),
            schema: &self.spec.schema,
            follow_ddl: self.spec.follow_ddl,
            status: &self.status,
            detaching: &self.detaching,
        };
        copy.run(session, known).await?;
        // Indexes and constraints of tables that are half copied wait.
        if !matches!(copy.which, Which::These(_)) {
            session.finish_tables(name).await?;
        }
        let tables = session.load_tables(name).await?;
        // Without a table nothing is on the target, and the log goes on from where it is kept.
        let kept = pinned.0.max(slot::log_begins(self.store.as_ref()).unwrap_or_default());
        let newest = tables.iter().map(|table| table.copied_at).max().unwrap_or(kept);
        let oldest = tables.iter().map(|table| table.copied_at).min().unwrap_or(kept);
        // A first copy starts where its oldest table stands; one that adds tables to a running
        // subscription goes on where the others are.
        let applied = match progress {
            Some(progress) if progress.state != state::COPYING => progress.applied,
            Some(_) | None => {
                // Also if those tables leave the publication before the log has come there.
                self.given.reaches(oldest);
                oldest
            }
        };
        let applied = if fault::defect("snapshot-row-also-streamed") { kept } else { applied };
        let word = if applied >= newest || fault::defect("snapshot-row-also-streamed") {
            state::STREAMING
        } else {
            state::CATCHING_UP
        };
        fault::point("snapshot.before-finish");
        // All was copied anew, perhaps because the log is another one.
        let is_anew = |before: &Progress| before.state == state::COPYING && before.keeps_newest;
        let forget = if progress.is_some_and(is_anew) { ", newest = NULL" } else { "" };
        session
            .execute(
                &format!(
                    "UPDATE farshore.subscription SET state = $2, applied = $3::text::pg_lsn, \
                     applied_at = clock_timestamp(){forget} WHERE name = $1"
                ),
                &[Some(name), Some(word), Some(&applied.to_string())],
            )
            .await?;
        fault::point("snapshot.after-finish");
        self.set_status(|status| {
            status.copied_at = Some(newest);
            // Also of one that is paused before anything is streamed.
            status.applied = Applied(applied);
        });
        tracing::info!(subscription = %name, %applied, state = word, "initial copy done");
        Ok(())
    }
}
