//! Whether the publisher's log is still the one that the store was filled from.
//!
//! A publisher that was put back to an earlier time may have written more than it lost before
//! anybody looks: its positions look right then, and name other changes. Its slot was put back with
//! it, so what the slot would give once more must be what the store has.

mod given;

use super::notes::NOTE_START;
use super::{Place, copy_anew};
use crate::CaptureError;
use crate::publication::PublicationSpec;
use farshore_model::transaction::{Header, Malformed, SUBTRANSACTION_MARK, commands};
use farshore_model::{Lsn, PgTime, Xid, quote_identifier};
use farshore_pg::Connection;
use farshore_store::{Entry, EntryKind, Item, LogStore, SpillItem, StoreError, newest_dropped};
use given::{Given, Wanted};
use std::sync::Arc;

/// What a look at the overlap came to, where it found nothing wrong.
#[derive(Debug)]
pub(crate) enum Overlap {
    /// The publisher has what the store has.
    Agrees,
    /// It was not looked at.
    NotLooked {
        /// Why.
        why: String,
        /// It may be looked at in a moment.
        passes: bool,
    },
}

/// The newest transaction that the store has, or had.
#[derive(Clone, Copy, Debug)]
struct Newest {
    position: Lsn,
    commit_time: PgTime,
    /// Start of its commit record; only known while the log holds it.
    commit_lsn: Option<Lsn>,
    /// Only known while the log holds it.
    xid: Option<Xid>,
}

/// What a store knows of its transactions after a position.
enum Known {
    Newest(Newest),
    /// There are none.
    NoneAfter,
    /// They left the log, and no note tells of them: an earlier version dropped them.
    Forgotten,
}

/// Holds what the slot would give again against what the store has, if the slot is behind it:
/// decoded without being taken, and counted where it is.
///
/// The store's newest transaction must be there, and nothing between it and the store's end: what
/// was written there since would be passed over, since the stream is asked for from that end.
///
/// `tell` hears what is waited for.
///
/// # Errors
/// [`CaptureError::Gap`] if the publisher was set back.
pub(crate) async fn check_overlap(
    spec: &PublicationSpec,
    sql: &mut Connection,
    store: &Arc<dyn LogStore>,
    place: &Place,
    tell: impl Fn(Option<String>),
) -> Result<Overlap, CaptureError> {
    let end = store.durable().borrow().0;
    if place.confirmed >= end {
        return Ok(Overlap::Agrees);
    }
    let not_looked = |why: &str, passes| Ok(Overlap::NotLooked { why: why.to_owned(), passes });
    // An answer may take any time.
    if place.in_use {
        return not_looked("another session has the slot", true);
    }
    let (reading, after) = (store.clone(), place.confirmed);
    let known = tokio::task::spawn_blocking(move || newest_after(reading.as_ref(), after));
    let Ok(known) = known.await else { return not_looked("the log's reader ended", true) };
    let newest = match known? {
        Known::Newest(newest) => Some(newest),
        Known::NoneAfter => None,
        Known::Forgotten => {
            tracing::warn!(
                publication = %spec.name, slot_at = %place.confirmed, store_at = %end,
                "the slot is behind the store, which has dropped what the slot would give again: \
                 whether the publisher was set back cannot be told"
            );
            return not_looked("the store has dropped what it would be compared with", false);
        }
    };
    tracing::info!(
        publication = %spec.name, slot_at = %place.confirmed, store_at = %end,
        "looking whether the publisher's log is still the one that the store was filled from"
    );
    // A slot that was adopted had more than the store was to have.
    let begins = store.note(NOTE_START).and_then(|noted| noted.parse().ok()).unwrap_or(Lsn::ZERO);
    let nothing_after = newest.map_or(place.confirmed, |newest| newest.position).max(begins);
    let wanted = Wanted { newest, nothing_after, end };
    // Nothing before that is asked for.
    let from = newest.map_or(Some(nothing_after), |newest| newest.commit_lsn);
    tell(Some(format!(
        "the publisher decodes its log once more from {} to {end}, to show that it is still the one \
         that the store was filled from",
        place.restart
    )));
    let looked = look(spec, sql, place, from, &wanted).await;
    tell(None);
    let Given { has_newest, other } = match looked {
        Ok(Some(given)) => given,
        Ok(None) => return not_looked("no answer", true),
        // What it gathers for the answer finds no room there (temp_file_limit, a full disk, memory):
        // a stream takes none.
        Err(error) if error.sqlstate().is_some_and(|code| code.starts_with("53")) => {
            tracing::warn!(
                publication = %spec.name,
                "cannot look whether the publisher's log is still the one that the store was filled \
                 from: {error}"
            );
            return not_looked(&error.to_string(), false);
        }
        Err(error) if error.is_transient() => return Err(spec.publisher_error(error)),
        // The stream will meet it too, and tell what it means.
        Err(error) => {
            tracing::warn!(publication = %spec.name, "cannot look at what the slot has: {error}");
            return not_looked(&error.to_string(), false);
        }
    };
    let found = match (newest, other) {
        (Some(Newest { position, commit_time, .. }), _) if !has_newest => format!(
            "the publisher's log does not have the transaction at {position} ({commit_time}), which \
             the store has"
        ),
        (_, Some(other)) => format!(
            "the publisher's log has a transaction at {other} which the store does not have, and \
             the store holds the log up to {end}"
        ),
        (_, None) => return Ok(Overlap::Agrees),
    };
    // Found again each time, since the slot stays: there is nothing to be remembered.
    Err(CaptureError::Gap(format!(
        "publication \"{}\": {found}: it was set back to before that, and has written other changes \
         since. If it is another server, correct `source`. {}",
        spec.name,
        copy_anew(&spec.name)
    )))
}

/// Reads what the slot would give, from a stream of a copy of it that has been moved to `from`, where
/// that is known: what lies before may be the log of hours. Where there can be no copy, the slot itself
/// is asked by SQL: that can be asked of a slot which nobody has to give back, and gathers all of it.
/// Nor is a slot asked that gives nothing before standbys have it (`synchronized_standby_slots`), which
/// may be away: a copy of it waits for nobody.
/// `None`: no answer.
async fn look(
    spec: &PublicationSpec,
    sql: &mut Connection,
    place: &Place,
    from: Option<Lsn>,
    wanted: &Wanted,
) -> Result<Option<Given>, farshore_pg::Error> {
    let from = from.map_or(place.confirmed, |from| from.max(place.confirmed));
    match given::read(spec, from, wanted).await {
        Ok(given) => return Ok(Some(given)),
        Err(CaptureError::Publisher { error, .. }) if error.server_error().is_none() => {
            return Err(error);
        }
        Err(error) if place.waits_for_standbys => {
            tracing::warn!(
                publication = %spec.name,
                "cannot look whether the publisher's log is still the one that the store was filled \
                 from: {error}"
            );
            return match error {
                CaptureError::Publisher { error, .. } => Err(error),
                _ => Ok(None),
            };
        }
        Err(error) => {
            tracing::debug!(publication = %spec.name, %error, "no copy of the slot to look at");
        }
    }
    let Wanted { newest, nothing_after, end } = wanted;
    let parameters = [
        Some(spec.slot_name()),
        Some(end.to_string()),
        Some(quote_identifier(&spec.publication_name())),
        newest.map(|newest| newest.position.to_string()),
        newest.map(|newest| format!("{:016x}", newest.commit_time.0)),
        newest.and_then(|newest| newest.xid).map(|xid| xid.to_string()),
        Some(nothing_after.to_string()),
    ];
    let parameters: Vec<Option<&str>> = parameters.iter().map(Option::as_deref).collect();
    let rows = sql.query(LOOK, &parameters).await?;
    let answer = |i: usize| rows.first().and_then(|row| row.get(i));
    Ok(answer(0).map(|count| Given {
        has_newest: count != "0",
        other: answer(1).and_then(|other| other.parse().ok()),
    }))
}

/// Whether the slot gives the transaction at `$4`, and the first one after `$7` that it gives and
/// that changes rows. A commit's position is the end of its record; servers before 15 also give
/// transactions that change nothing. 67 is 'C', a commit, with its time in bytes 19 to 26; the
/// others are I, U, D and T, which change rows. With messages, as capture asks for them: a tracer
/// token may be all that a transaction has.
const LOOK: &str = "WITH given AS (SELECT xid::text AS xid, \
      max(lsn) FILTER (WHERE get_byte(data, 0) = 67) AS committed, \
      max(encode(substr(data, 19, 8), 'hex')) FILTER (WHERE get_byte(data, 0) = 67) AS time, \
      bool_or(get_byte(data, 0) IN (73, 85, 68, 84)) AS changes \
    FROM pg_logical_slot_peek_binary_changes($1, $2::text::pg_lsn, NULL, \
      'proto_version', '1', 'messages', 'on', 'publication_names', $3) GROUP BY 1) \
    SELECT count(*) FILTER (WHERE committed = $4::text::pg_lsn AND time = $5::text \
        AND xid = coalesce($6::text, xid)), \
      min(committed) FILTER (WHERE changes AND committed > $7::text::pg_lsn \
        AND committed <= $2::text::pg_lsn) FROM given";

/// Whether all that a transaction changed was rolled back before it committed. Decoded after its
/// commit it is none; earlier versions stored it where it was streamed before. Blocks on the disk.
fn is_rolled_back(
    store: &dyn LogStore,
    entry: &Entry,
    header: &Header,
    body: &[u8],
) -> Result<bool, CaptureError> {
    if header.aborted_subtransactions.is_empty() {
        return Ok(false);
    }
    let malformed = |error| CaptureError::Malformed { position: entry.position, error };
    let mut writer = header.xid;
    let mut has_live = |body: &[u8]| {
        for command in commands(body) {
            match command? {
                [SUBTRANSACTION_MARK, xid @ ..] => {
                    let xid = xid.first_chunk::<4>().ok_or(Malformed::Truncated)?;
                    writer = u32::from_be_bytes(*xid);
                }
                _ if header.aborted_subtransactions.binary_search(&writer).is_err() => {
                    return Ok(true);
                }
                _ => {}
            }
        }
        Ok(false)
    };
    let EntryKind::Spilled(spill) = entry.kind else {
        return has_live(body).map(|live| !live).map_err(malformed);
    };
    let mut spill = store.open_spill(spill)?;
    while let Some(items) = spill.next_block()? {
        for item in items {
            let SpillItem::Chunk(chunk) = item else { continue };
            if has_live(&chunk).map_err(malformed)? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Position, transaction id and commit time of the store's newest transaction after a position.
/// Blocks on the disk.
fn newest_after(store: &dyn LogStore, after: Lsn) -> Result<Known, CaptureError> {
    let (mut reader, is_dropped) = match store.read_from(after) {
        Ok(reader) => (reader, false),
        // What the slot has is older than what is left of the store.
        Err(StoreError::Dropped { start, .. }) => (store.read_from(start)?, true),
        Err(error) => return Err(error.into()),
    };
    let mut newest = None;
    while let Some(block) = reader.next_block()? {
        for item in block {
            let Item::Entry(entry) = item else { continue };
            if entry.kind == EntryKind::Watermark {
                continue;
            }
            let malformed = |error| CaptureError::Malformed { position: entry.position, error };
            let (header, body) = Header::decode(&entry.payload).map_err(malformed)?;
            if is_rolled_back(store, &entry, &header, body)? {
                continue;
            }
            newest = Some(Newest {
                position: entry.position,
                commit_time: header.commit_time,
                commit_lsn: Some(header.commit_lsn),
                xid: Some(header.xid),
            });
        }
    }
    if let Some(newest) = newest {
        return Ok(Known::Newest(newest));
    }
    if !is_dropped {
        return Ok(Known::NoneAfter);
    }
    Ok(match newest_dropped(store) {
        Some((position, commit_time)) if position > after => {
            Known::Newest(Newest { position, commit_time, commit_lsn: None, xid: None })
        }
        Some(_) => Known::NoneAfter,
        None => Known::Forgotten,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slot::place;
    use farshore_model::transaction::push_command;
    use farshore_pg::{Config, Mode};
    use farshore_store::segmented::{Options, SegmentedStore};
    use farshore_store::{Batch, EntryMeta};
    use farshore_testkit::postgres::{Cluster, Installation};
    use farshore_wire::pgoutput::{Context, Message, decode};
    use std::time::{Duration, Instant};
    use tokio::runtime::Runtime;

    /// A body in which each of these wrote a row.
    fn body(writers: &[Xid]) -> Vec<u8> {
        let mut body = Vec::new();
        for xid in writers {
            let mut mark = vec![SUBTRANSACTION_MARK];
            mark.extend_from_slice(&xid.to_be_bytes());
            push_command(&mut body, &mark);
            push_command(&mut body, b"I and a row");
        }
        body
    }

    #[tokio::test]
    async fn what_was_rolled_back_as_a_whole_is_not_looked_for() {
        let folder = tempfile::tempdir().unwrap();
        let (store, _) = SegmentedStore::open(folder.path(), Options::default()).unwrap();
        let mut batch = Batch::default();
        let mut add = |position: u64, writers: &[Xid], aborted: &[Xid], spills: bool| {
            let header = Header {
                xid: position as Xid,
                commit_lsn: Lsn(position - 10),
                end_lsn: Lsn(position),
                commit_time: PgTime(7),
                commands: 2 * writers.len() as u64,
                aborted_subtransactions: aborted.to_vec(),
            };
            let start = batch.payload.len();
            header.encode(&mut batch.payload);
            let kind = if spills {
                let mut spill = store.begin_spill().unwrap();
                for writer in writers {
                    spill.write(&body(&[*writer]), &[]).unwrap();
                }
                EntryKind::Spilled(spill.finish().unwrap())
            } else {
                batch.payload.extend_from_slice(&body(writers));
                EntryKind::Transaction
            };
            batch.entries.push(EntryMeta {
                position: Lsn(position),
                commit_time: PgTime(7),
                kind,
                payload_len: (batch.payload.len() - start) as u32,
            });
        };
        // Of these something is left.
        add(100, &[100], &[], false);
        add(200, &[201, 202], &[201], false);
        add(300, &[301, 302], &[301], true);
        // And of these nothing.
        add(400, &[401, 402], &[401, 402], false);
        add(500, &[501, 502], &[501, 502], true);
        store.append(batch).await.unwrap();
        store.durable().wait_for(|durable| durable.0 >= Lsn(500)).await.unwrap();
        let newest = |after: u64| match newest_after(store.as_ref(), Lsn(after)).unwrap() {
            Known::Newest(newest) => Some((newest.position, newest.xid)),
            Known::NoneAfter => None,
            Known::Forgotten => panic!("nothing was dropped"),
        };
        assert_eq!(newest(0), Some((Lsn(300), Some(300))));
        assert_eq!(newest(300), None);
    }

    /// The newest transaction that a slot would give.
    async fn newest_of(sql: &mut Connection, slot: &str) -> Header {
        let peek = "SELECT encode(data, 'hex') FROM pg_logical_slot_peek_binary_changes($1, \
            NULL, NULL, 'proto_version', '1', 'publication_names', 'farshore_p') \
            WHERE get_byte(data, 0) IN (66, 67) ORDER BY lsn DESC, get_byte(data, 0) LIMIT 2";
        let rows = sql.query(peek, &[Some(slot)]).await.unwrap();
        let mut header = Header {
            xid: 0,
            commit_lsn: Lsn::ZERO,
            end_lsn: Lsn::ZERO,
            commit_time: PgTime(0),
            commands: 1,
            aborted_subtransactions: Vec::new(),
        };
        for row in &rows {
            let hex = row.get(0).unwrap();
            let bytes: Vec<u8> = (0..hex.len())
                .step_by(2)
                .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
                .collect();
            match decode(&bytes, &Context::new(1, false)).unwrap().message {
                Message::Begin(begin) => header.xid = begin.xid,
                Message::Commit(commit) => {
                    header.commit_lsn = commit.commit_lsn;
                    header.end_lsn = commit.end_lsn;
                    header.commit_time = commit.commit_time;
                }
                other => panic!("{other:?}"),
            }
        }
        header
    }

    /// A copy of the slot goes with its session.
    async fn until_copies_are_gone(sql: &mut Connection) {
        let slots = "SELECT count(*) FROM pg_replication_slots";
        let until = Instant::now() + Duration::from_secs(60);
        while sql.query(slots, &[]).await.unwrap()[0].get(0) != Some("1") {
            assert!(Instant::now() < until, "a copy of the slot stays");
        }
    }

    /// A store that has this transaction, and the log up to where it ends now.
    async fn store_with(header: &Header, end: Lsn) -> (tempfile::TempDir, Arc<dyn LogStore>) {
        let folder = tempfile::tempdir().unwrap();
        let (store, _) = SegmentedStore::open(folder.path(), Options::default()).unwrap();
        let mut batch = Batch::default();
        header.encode(&mut batch.payload);
        push_command(&mut batch.payload, b"I and a row");
        let commit_time = header.commit_time;
        let entry =
            |position, kind, payload_len| EntryMeta { position, commit_time, kind, payload_len };
        let payload_len = batch.payload.len() as u32;
        batch.entries.push(entry(header.end_lsn, EntryKind::Transaction, payload_len));
        batch.entries.push(entry(end, EntryKind::Watermark, 0));
        store.append(batch).await.unwrap();
        store.durable().wait_for(|durable| durable.0 >= end).await.unwrap();
        (folder, store)
    }

    /// Its slot gives nothing that they do not have; a copy of it does.
    #[test]
    fn a_publisher_whose_slot_waits_for_standbys_is_looked_at() {
        let cluster = Cluster::builder(&Installation::find(17).unwrap())
            .setting("wal_level", "logical")
            .setting("synchronized_standby_slots", "standby")
            .start()
            .unwrap();
        cluster
            .execute_script(
                "CREATE TABLE t (i integer, v text); CREATE PUBLICATION farshore_p FOR TABLE t",
            )
            .unwrap();
        Runtime::new().unwrap().block_on(async {
            let spec = spec_of(&cluster);
            let mut sql = spec.connect(Mode::Sql).await.unwrap();
            for statement in [
                "SELECT pg_create_physical_replication_slot('standby', true)",
                "SELECT pg_create_logical_replication_slot('farshore_p', 'pgoutput', false, false, \
                   true)",
                "INSERT INTO t VALUES (0, 'before')",
                "INSERT INTO t VALUES (0, 'newest')",
                "SELECT pg_copy_logical_replication_slot('farshore_p', 'seen', true)",
            ] {
                sql.simple_query(statement).await.unwrap();
            }
            let newest = newest_of(&mut sql, "seen").await;
            sql.simple_query("SELECT pg_drop_replication_slot('seen')").await.unwrap();
            let at = place(&spec, &mut sql).await.unwrap().unwrap();
            assert!(at.waits_for_standbys, "{at:?}");
            let end = Lsn(newest.end_lsn.0 + 1);
            let (_folder, store) = store_with(&newest, end).await;
            let seen = check_overlap(&spec, &mut sql, &store, &at, |_| ()).await.unwrap();
            assert!(matches!(seen, Overlap::Agrees), "{seen:?}");
            let other = Header { commit_time: PgTime(newest.commit_time.0 + 1), ..newest.clone() };
            let (_folder, lacking) = store_with(&other, end).await;
            let found = check_overlap(&spec, &mut sql, &lacking, &at, |_| ()).await.unwrap_err();
            assert!(found.to_string().contains("does not have the transaction at"), "{found}");
        });
    }

    fn spec_of(cluster: &Cluster) -> PublicationSpec {
        PublicationSpec {
            name: "p".to_owned(),
            source: Config::parse(&cluster.url("postgres")).unwrap(),
            tables: Vec::new(),
            articles: std::collections::BTreeMap::new(),
            via_partition_root: false,
            adopt_publication: None,
            adopt_slot: None,
        }
    }

    #[test]
    fn only_what_is_near_the_stores_end_is_gathered() {
        for major in [15, 18] {
            let installation = Installation::find(major).unwrap();
            let cluster =
                Cluster::builder(&installation).setting("wal_level", "logical").start().unwrap();
            cluster
                .execute_script(
                    "CREATE TABLE t (i integer, v text); CREATE PUBLICATION farshore_p FOR TABLE t",
                )
                .unwrap();
            Runtime::new().unwrap().block_on(look_near(&spec_of(&cluster)));
        }
    }

    async fn look_near(spec: &PublicationSpec) {
        let mut sql = spec.connect(Mode::Sql).await.unwrap();
        for statement in [
            "SELECT pg_create_logical_replication_slot('farshore_p', 'pgoutput')",
            "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 20000) i",
            "INSERT INTO t VALUES (0, 'before')",
            "INSERT INTO t VALUES (0, 'newest')",
        ] {
            sql.simple_query(statement).await.unwrap();
        }
        let newest = newest_of(&mut sql, "farshore_p").await;
        // No room for what the first transaction comes to.
        sql.simple_query("SET work_mem = '64kB'; SET temp_file_limit = '64kB'").await.unwrap();
        let at = place(spec, &mut sql).await.unwrap().unwrap();
        let end = Lsn(newest.end_lsn.0 + 1);
        let (_folder, store) = store_with(&newest, end).await;
        let told = std::sync::Mutex::new(Vec::new());
        let tell = |what: Option<String>| told.lock().unwrap().push(what.is_some());
        let seen = check_overlap(spec, &mut sql, &store, &at, tell).await.unwrap();
        assert!(matches!(seen, Overlap::Agrees), "{seen:?}");
        assert_eq!(*told.lock().unwrap(), [true, false]);
        until_copies_are_gone(&mut sql).await;
        // Another transaction at that place, and one before the store's end that it does not have.
        let other = Header { commit_time: PgTime(newest.commit_time.0 + 1), ..newest.clone() };
        let (_folder, lacking) = store_with(&other, end).await;
        let found = check_overlap(spec, &mut sql, &lacking, &at, tell).await.unwrap_err();
        assert!(found.to_string().contains("does not have the transaction at"), "{found}");
        sql.simple_query("INSERT INTO t VALUES (0, 'since')").await.unwrap();
        sql.simple_query("RESET work_mem; RESET temp_file_limit").await.unwrap();
        let since = newest_of(&mut sql, "farshore_p").await;
        sql.simple_query("SET work_mem = '64kB'; SET temp_file_limit = '64kB'").await.unwrap();
        let (_folder, passed) = store_with(&newest, Lsn(since.end_lsn.0 + 1)).await;
        let found = check_overlap(spec, &mut sql, &passed, &at, tell).await.unwrap_err();
        assert!(found.to_string().contains("has a transaction at"), "{found}");
        // However large the newest is, nothing of it is gathered.
        sql.simple_query("RESET work_mem; RESET temp_file_limit").await.unwrap();
        let large = "INSERT INTO t SELECT i, repeat('y', 100) FROM generate_series(1, 20000) i";
        sql.simple_query(large).await.unwrap();
        let newest = newest_of(&mut sql, "farshore_p").await;
        sql.simple_query("SET work_mem = '64kB'; SET temp_file_limit = '64kB'").await.unwrap();
        let (_folder, store) = store_with(&newest, Lsn(newest.end_lsn.0 + 1)).await;
        let seen = check_overlap(spec, &mut sql, &store, &at, tell).await.unwrap();
        assert!(matches!(seen, Overlap::Agrees), "{seen:?}");
        until_copies_are_gone(&mut sql).await;
    }
}
