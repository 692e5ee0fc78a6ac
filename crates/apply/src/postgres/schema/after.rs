//! What follows the copy: indexes, constraints, comments.

use super::create::stage_number;
use crate::ApplyError;
use crate::error::passes_by_itself;
use crate::postgres::session::Session;
use farshore_capture::schema::Stage;
use farshore_fault as fault;
use farshore_pg::quote_literal;

/// A recorded statement.
struct Waiting {
    ordinal: String,
    object: String,
    statement: String,
}

impl Session {
    /// Runs what waits for the tables' rows. A statement that the target refuses is recorded with
    /// the reason and passed over: the rows do not need it.
    pub(crate) async fn finish_tables(&mut self, subscription: &str) -> Result<(), ApplyError> {
        self.run_waiting(subscription, "<=", Stage::Checks).await
    }

    /// Adds the foreign keys that wait until all tables stand at the same point. Where triggers
    /// cannot be kept quiet they go on waiting: they would fire for rows whose effects come in the
    /// stream too.
    pub(crate) async fn add_foreign_keys(&mut self, subscription: &str) -> Result<(), ApplyError> {
        if !self.replica_role {
            tracing::warn!(
                %subscription,
                "foreign keys are not created on the target: the role may not set \
                 session_replication_role. Grant it (GRANT SET ON PARAMETER \
                 session_replication_role TO …) and start this node again"
            );
            return Ok(());
        }
        self.run_waiting(subscription, "=", Stage::ForeignKeys).await
    }

    async fn waiting(
        &mut self,
        subscription: &str,
        compare: &str,
        stage: Stage,
    ) -> Result<Vec<Waiting>, ApplyError> {
        let rows = self.query(&waiting_sql(compare, stage), &[Some(subscription)]).await?;
        let text =
            |row: &farshore_pg::Row, column: usize| row.get(column).unwrap_or_default().to_owned();
        Ok(rows
            .iter()
            .map(|row| Waiting {
                ordinal: text(row, 0),
                object: text(row, 1),
                statement: text(row, 2),
            })
            .collect())
    }

    async fn run_waiting(
        &mut self,
        subscription: &str,
        compare: &str,
        stage: Stage,
    ) -> Result<(), ApplyError> {
        for waiting in self.waiting(subscription, compare, stage).await? {
            let Waiting { ordinal, object, statement } = waiting;
            let this =
                format!("subscription = {} AND ordinal = {ordinal}", quote_literal(subscription));
            let done = format!("DELETE FROM farshore.after_copy WHERE {this}");
            let error =
                match self.connection.simple_query(&format!("BEGIN; {statement}; {done}")).await {
                    Ok(_) => {
                        fault::point("snapshot.before-finish");
                        self.simple("COMMIT").await?;
                        fault::point("snapshot.after-finish");
                        tracing::info!(%subscription, "created {object}");
                        continue;
                    }
                    Err(error) => error,
                };
            if error.server_error().is_none_or(passes_by_itself) {
                return Err(self.error(error));
            }
            self.simple("ROLLBACK").await?;
            tracing::warn!(
                %subscription,
                "the target refuses {object}: {error}. Rows do not need it. Once what is in its \
                 way is mended, create it by hand: {statement}"
            );
            let refuse = format!("UPDATE farshore.after_copy SET refusal = $1 WHERE {this}");
            self.execute(&refuse, &[Some(&error.to_string())]).await?;
        }
        Ok(())
    }
}

/// The order in which rows of `farshore.after_copy` are worked off: that of
/// [`Outline::after_copy`](super::Outline::after_copy).
pub const AFTER_ORDER: &str = "stage, CASE stage WHEN 1 THEN -ordinal ELSE ordinal END";

/// What a subscription ($1) is still to create.
fn waiting_sql(compare: &str, stage: Stage) -> String {
    format!(
        "SELECT ordinal, object, statement FROM farshore.after_copy \
         WHERE subscription = $1 AND refusal IS NULL AND stage {compare} {} \
         ORDER BY {AFTER_ORDER}",
        stage_number(stage)
    )
}

/// Has a row for each foreign key that a subscription ($1) is still to add.
pub(crate) fn foreign_keys_waiting_sql() -> String {
    waiting_sql("=", Stage::ForeignKeys)
}
