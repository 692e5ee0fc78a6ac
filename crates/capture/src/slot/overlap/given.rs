//! What a slot would give once more, read from a stream of a copy of it.
//!
//! The publisher sends what it decodes and keeps nothing of it, however large a transaction is. (What
//! it gives by SQL function it gathers in a temporary file before it sends the first of it.)

use super::Newest;
use crate::CaptureError;
use crate::publication::PublicationSpec;
use farshore_model::{Lsn, Xid, quote_identifier};
use farshore_pg::replication::{ReplicationStream, StreamMessage};
use farshore_pg::{Error, Mode, quote_literal};
use farshore_wire::pgoutput::{Begin, Commit, Context, Message, decode};

/// What is looked for.
pub(super) struct Wanted {
    /// Must be there.
    pub newest: Option<Newest>,
    /// Nothing that changes rows may be after this,
    pub nothing_after: Lsn,
    /// up to here, where the store ends.
    pub end: Lsn,
}

/// What was found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Given {
    /// The newest transaction of the store.
    pub has_newest: bool,
    /// The first of those that may not be there.
    pub other: Option<Lsn>,
}

/// Reads what the slot would give behind `from`, up to the store's end, or to where the publisher's log
/// ends now.
///
/// # Errors
/// The publisher's; where there can be no copy of the slot, it says so.
pub(super) async fn read(
    spec: &PublicationSpec,
    from: Lsn,
    wanted: &Wanted,
) -> Result<Given, CaptureError> {
    let failed = |error| spec.publisher_error(error);
    let mut connection = spec.connect(Mode::LogicalReplication).await?;
    // Who asks may give up.
    let abandoned = connection.cancel_token().unless_done();
    // It goes with its session.
    let name = format!("farshore_looks_{}", connection.backend_pid());
    let (slot, copy) = (quote_literal(&spec.slot_name()), quote_literal(&name));
    // Moved on its way, nothing of that is sent.
    for statement in [
        format!("SELECT pg_catalog.pg_copy_logical_replication_slot({slot}, {copy}, true)"),
        format!(
            "SELECT pg_catalog.pg_replication_slot_advance(slot_name, '{from}') \
             FROM pg_catalog.pg_replication_slots \
             WHERE slot_name = {copy} AND confirmed_flush_lsn < '{from}'"
        ),
    ] {
        connection.simple_query(&statement).await.map_err(failed)?;
    }
    let ends = connection.simple_query("SELECT pg_catalog.pg_current_wal_flush_lsn()").await;
    let ends = ends.map_err(failed)?;
    let ends = ends.first().and_then(|answer| answer.rows.first()).map(|row| row.parse::<Lsn>(0));
    let until = ends.unwrap_or(Ok(Lsn::ZERO)).map_err(failed)?.min(wanted.end);
    let publication = quote_identifier(&spec.publication_name());
    let options =
        [("proto_version", "1"), ("publication_names", publication.as_str()), ("messages", "on")];
    let mut stream = connection.start_replication(&name, from, &options).await.map_err(failed)?;
    let given = count(&mut stream, wanted, until).await.map_err(failed);
    abandoned.is_done();
    // The publisher may have no room for another copy before this one has gone.
    stream.finish().await;
    given
}

/// Counts what comes, until nothing of interest can come any more: all up to `until` has come.
async fn count(
    stream: &mut ReplicationStream,
    wanted: &Wanted,
    until: Lsn,
) -> Result<Given, Error> {
    let mut counting = Counting::default();
    while let Some(message) = stream.next().await? {
        let is_over = match message {
            StreamMessage::XLogData { data, .. } => counting.take(&data, wanted)?,
            StreamMessage::Keepalive { wal_end, reply_requested, .. } => {
                if reply_requested {
                    stream.send_status(Lsn::ZERO, Lsn::ZERO, Lsn::ZERO, false).await?;
                }
                counting.open.is_none() && wal_end >= until
            }
        };
        if is_over {
            // What is still on its way is of no interest.
            return Ok(counting.given);
        }
    }
    Err(Error::Protocol("the publisher ended the stream of a copied slot".to_owned()))
}

/// Transactions that come one after the other.
#[derive(Default)]
struct Counting {
    given: Given,
    /// The transaction whose commit is still to come, and whether it changes rows.
    open: Option<(Xid, bool)>,
}

impl Counting {
    /// Takes one message; true when nothing of interest can come any more.
    fn take(&mut self, data: &[u8], wanted: &Wanted) -> Result<bool, Error> {
        match data.first() {
            Some(b'I' | b'U' | b'D' | b'T') => {
                if let Some((_, changes)) = &mut self.open {
                    *changes = true;
                }
                return Ok(false);
            }
            Some(b'B' | b'C') => {}
            _ => return Ok(false),
        }
        let decoded = decode(data, &Context::new(1, false));
        match decoded.map_err(|error| Error::Protocol(error.to_string()))?.message {
            Message::Begin(Begin { xid, final_lsn, .. }) => {
                self.open = Some((xid, false));
                Ok(final_lsn >= wanted.end)
            }
            Message::Commit(commit) => {
                let (xid, changes) = self.open.take().unwrap_or_default();
                Ok(self.commit(xid, changes, &commit, wanted))
            }
            _ => Ok(false),
        }
    }

    fn commit(&mut self, xid: Xid, changes: bool, commit: &Commit, wanted: &Wanted) -> bool {
        let position = commit.end_lsn;
        self.given.has_newest |= wanted.newest.is_some_and(|newest| {
            newest.position == position
                && newest.commit_time == commit.commit_time
                && newest.xid.is_none_or(|of_newest| of_newest == xid)
        });
        if changes && position > wanted.nothing_after && position <= wanted.end {
            self.given.other.get_or_insert(position);
        }
        position >= wanted.end
    }
}
