//! Whether the publisher's log is still the one that the store was filled from.
//!
//! A publisher that was put back to an earlier time may have written more than it lost before
//! anybody looks: its positions look right then, and name other changes. Its slot was put back with
//! it, so what the slot would give once more must be what the store has.

use super::{Place, copy_anew};
use crate::CaptureError;
use crate::publication::PublicationSpec;
use farshore_model::transaction::Header;
use farshore_model::{Lsn, quote_identifier};
use farshore_pg::Connection;
use farshore_store::{EntryKind, Item, LogStore};
use std::sync::Arc;

/// Looks for the store's last transaction in what the slot would give again, if that is behind it:
/// decoded without being taken, and but for commits not sent.
///
/// # Errors
/// [`CaptureError::Gap`] if it is not there.
pub(crate) async fn check_overlap(
    spec: &PublicationSpec,
    sql: &mut Connection,
    store: &Arc<dyn LogStore>,
    place: &Place,
) -> Result<(), CaptureError> {
    // Where it is in use, or waits for standbys, an answer may take any time.
    if place.in_use || place.waits_for_standbys {
        return Ok(());
    }
    let (reading, after) = (store.clone(), place.confirmed);
    let last = tokio::task::spawn_blocking(move || last_transaction(reading.as_ref(), after));
    let Ok(last) = last.await else { return Ok(()) };
    let Some((position, xid)) = last? else { return Ok(()) };
    tracing::info!(
        publication = %spec.name, slot_at = %place.confirmed, store_at = %position,
        "looking whether the publisher's log is still the one that the store was filled from"
    );
    // 67 is 'C', a commit; its position is the end of the commit record. With messages, as capture
    // asks for them: a tracer token may be all that a transaction has.
    let sql_text = "SELECT count(*) FROM pg_logical_slot_peek_binary_changes($1, $2::text::pg_lsn, \
                    NULL, 'proto_version', '1', 'messages', 'on', 'publication_names', $3) AS change \
                    WHERE change.lsn = $2::text::pg_lsn AND change.xid::text = $4 \
                    AND get_byte(change.data, 0) = 67";
    let parameters = [
        Some(spec.slot_name()),
        Some(position.to_string()),
        Some(quote_identifier(&spec.publication_name())),
        Some(xid.to_string()),
    ];
    let parameters: Vec<Option<&str>> = parameters.iter().map(Option::as_deref).collect();
    let rows = match sql.query(sql_text, &parameters).await {
        Ok(rows) => rows,
        Err(error) if error.is_transient() => return Err(spec.publisher_error(error)),
        // The stream will meet it too, and tell what it means.
        Err(error) => {
            tracing::warn!(publication = %spec.name, "cannot look at what the slot has: {error}");
            return Ok(());
        }
    };
    if rows.first().and_then(|row| row.get(0)) != Some("0") {
        return Ok(());
    }
    // Found again each time, since the slot stays: there is nothing to be remembered.
    Err(CaptureError::Gap(format!(
        "publication \"{}\": the publisher's log does not have transaction {xid} at {position}, which \
         the store has: it was set back to before that, and has written other changes since. If it \
         is another server, correct `source`. {}",
        spec.name,
        copy_anew(&spec.name)
    )))
}

/// Position and transaction id of the last transaction after a position. Blocks on the disk.
fn last_transaction(store: &dyn LogStore, after: Lsn) -> Result<Option<(Lsn, u32)>, CaptureError> {
    if after >= store.durable().borrow().0 {
        return Ok(None);
    }
    let mut reader = match store.read_from(after) {
        Ok(reader) => reader,
        // What the slot has is older than what is left of the store.
        Err(farshore_store::StoreError::Dropped { start, .. }) => store.read_from(start)?,
        Err(error) => return Err(error.into()),
    };
    let mut last = None;
    while let Some(block) = reader.next_block()? {
        for item in block {
            let Item::Entry(entry) = item else { continue };
            if entry.kind == EntryKind::Watermark {
                continue;
            }
            let decoded = Header::decode(&entry.payload);
            let (header, _) = decoded
                .map_err(|error| CaptureError::Malformed { position: entry.position, error })?;
            last = Some((entry.position, header.xid));
        }
    }
    Ok(last)
}
