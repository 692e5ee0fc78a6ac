//! Tracer tokens: transactions that change nothing, and are timed on their way.
//!
//! A token is a logical message in a transaction of its own on the publisher. It takes the way of
//! every transaction: through the log, the slot, the store, the link and the targets, where it
//! moves progress and nothing else.

use crate::CaptureError;
use crate::publication::PublicationSpec;
use farshore_model::{Lsn, PgTime};
use farshore_pg::{Connection, Mode, quote_literal};
use std::time::Instant;

/// Prefix of our logical messages.
pub(crate) const PREFIX: &str = "farshore.tracer";

/// A token that came out of the publisher's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tracer {
    /// Which.
    pub token: u64,
    /// End of its commit record.
    pub position: Lsn,
    /// The publisher's clock at its commit.
    pub commit_time: PgTime,
}

/// What a message holds: the slot that it is for, since others on the same database see it too.
fn content(slot: &str, token: u64) -> String {
    format!("{slot} {token:016x}")
}

/// The token of a message, if it is for this slot.
pub(crate) fn token(slot: &str, prefix: &str, content: &[u8]) -> Option<u64> {
    if prefix != PREFIX {
        return None;
    }
    let (other, token) = std::str::from_utf8(content).ok()?.split_once(' ')?;
    u64::from_str_radix(token, 16).ok().filter(|_| other == slot)
}

/// A token that is about to be committed.
pub struct Post {
    sql: Connection,
    server: String,
}

/// When a token was committed, by this machine's clock.
#[derive(Clone, Copy, Debug)]
pub struct Posted {
    /// COMMIT was sent.
    pub sent: Instant,
    /// COMMIT was answered.
    pub answered: Instant,
}

/// Writes a token in an open transaction on the publisher.
///
/// # Errors
/// The publisher's.
pub async fn prepare(spec: &PublicationSpec, token: u64) -> Result<Post, CaptureError> {
    let mut sql = spec.connect(Mode::Sql).await?;
    let content = quote_literal(&content(&spec.slot_name(), token));
    // Durable on the publisher is enough to be decoded: its standbys are not waited for.
    let emit = format!(
        "BEGIN; SET LOCAL synchronous_commit = local; \
         SELECT pg_catalog.pg_logical_emit_message(true, '{PREFIX}', {content})"
    );
    let emitted = sql.simple_query(&emit).await;
    emitted.map_err(|error| spec.publisher_error(error))?;
    Ok(Post { sql, server: spec.source.redacted() })
}

impl Post {
    /// Commits it.
    ///
    /// # Errors
    /// The publisher's.
    pub async fn commit(mut self) -> Result<Posted, CaptureError> {
        let sent = Instant::now();
        let committed = self.sql.simple_query("COMMIT").await;
        let answered = Instant::now();
        committed.map_err(|error| CaptureError::Publisher { server: self.server, error })?;
        self.sql.close().await;
        Ok(Posted { sent, answered })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_for_its_slot_alone() {
        let content = content("farshore_sales", 77);
        let read =
            |prefix: &str, content: &str| token("farshore_sales", prefix, content.as_bytes());
        assert_eq!(read(PREFIX, &content), Some(77));
        assert_eq!(read("other", &content), None);
        assert_eq!(read(PREFIX, "farshore_stock 4d"), None);
        for hostile in ["", "farshore_sales", "farshore_sales ", "farshore_sales zz", "\u{7f}"] {
            assert_eq!(read(PREFIX, hostile), None);
        }
    }
}
