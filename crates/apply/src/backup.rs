//! Subscriptions whose target is restored from a backup of the publisher instead of copied.
//!
//! A target that is as the publisher was at a position `L` (a physical backup, recovered and
//! promoted, or a dump of a snapshot) lacks exactly the transactions whose commit record starts at
//! or after `L`. The log is kept for the subscription from before the backup was taken; what is
//! noted on the target then is what a copy of all tables at `L` would have left there.
//!
//! A physical backup proves where it stands: it has the publisher's system identifier, and the
//! history of its timeline says where it left the publisher's. So does a copy of another
//! subscription's target, physical or a dump: its `farshore` schema came along, and what is noted
//! there was committed with the rows.

mod beyond;

use crate::postgres::noted_definition::{definition_sql, known_by_oid};
use crate::postgres::progress::TableCopyColumn;
use crate::postgres::progress::{TABLE_COPIED, TableProgress, state};
use crate::postgres::session::Session;
use crate::subscription::{LOCK_WAIT, SubscriptionSpec};
use crate::{ApplyError, ahead};
pub use beyond::{NotFollowed, delete_left_out};
use farshore_capture::publication::{
    PublishedTable, TableName, above_sql, memberships_and_attached_above,
};
use farshore_capture::slot;
use farshore_capture::source::Source;
use farshore_fault as fault;
use farshore_model::Lsn;
use farshore_pg::{Config, Question, Row, quote_literal};
use farshore_store::{Cursor, LogStore, StoreError};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

/// How long the log may take to reach the backup's position.
const LOG_WAIT: Duration = Duration::from_secs(30);

/// What is said of a target that was restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backup {
    /// It is a physical backup of the publisher, promoted, and tells by itself where it stands.
    TellsItself,
    /// It is as the publisher was there.
    At(Lsn),
    /// It is a copy of that subscription's target, made while that streamed.
    CopiedFrom(String),
}

/// What the backup's tables were when it was taken.
enum Were {
    /// Published so.
    Published(WerePublished),
    /// Copied by another subscription, and followed since.
    Copied(Vec<TableProgress>),
    /// The target cannot tell.
    NotKnown,
}

/// What the catalogue of a physical copy of the publisher says of its publications.
struct WerePublished {
    memberships: HashSet<u32>,
    /// How a partition was attached below the table which had a membership, by its OID and that.
    attached: HashMap<(u32, u32), u32>,
    /// What tables are called here, by their OIDs, which are the publisher's.
    names: HashMap<u32, TableName>,
}

impl WerePublished {
    /// Whether a table has been published since, as far as the two can tell. Attached otherwise, it
    /// was not all the time.
    fn has(&self, table: &PublishedTable) -> bool {
        let membership = table.membership;
        let is_member = membership == 0 || self.memberships.contains(&membership);
        let was_attached = || self.attached.get(&(table.oid, membership)).copied();
        is_member && table.attached_by(membership).is_none_or(|now| was_attached() == Some(now))
    }
}

/// What was noted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Initialised {
    /// The target is as the publisher was there.
    pub lsn: Lsn,
    /// The target itself says so.
    pub proved: bool,
    /// Tables that the backup holds.
    pub tables: usize,
    /// Published tables that are to be copied: the backup does not have them as published tables.
    pub left_out: Vec<TableName>,
    /// Columns that the backup holds and that are not published: they stay as they are.
    pub not_followed: Vec<NotFollowed>,
}

/// What keeps a subscription waiting that is to be initialised from a backup.
pub(crate) fn waits(name: &str, kept_from: Lsn) -> ApplyError {
    ApplyError::NotYet(format!(
        "subscription \"{name}\": waits for its backup. Take one of the publisher now (the log is \
         kept for it from {kept_from} on), restore it as the target, and then run: farshore \
         initialise SITE --subscription {name} (with --lsn for a dump: the position of its snapshot; \
         with --copied-from for a copy of another subscription's target)"
    ))
}

/// Has the log kept from its end on for a subscription that has nothing yet, and whose claim expired:
/// an expired one keeps nothing.
pub(crate) fn claim_anew(store: &dyn LogStore, name: &str) -> Result<Cursor, StoreError> {
    store.drop_cursor(name)?;
    store.register_cursor(name)
}

/// Notes on a target that it was restored from a backup of the publisher, and where that stands.
///
/// # Errors
/// The subscription has begun already; the position is not known, is before what the log is kept
/// from or beyond what it has, or is not the one that the target itself tells; a table holds rows that
/// its row filter leaves out; the servers. Nothing is noted then.
pub async fn initialise(
    spec: &SubscriptionSpec,
    store: &Arc<dyn LogStore>,
    source: &dyn Source,
    backup: &Backup,
) -> Result<Initialised, ApplyError> {
    let name = spec.name.as_str();
    let refused = |what: String| {
        ApplyError::Setup(format!("subscription \"{name}\": cannot be initialised: {what}"))
    };
    let cursor = store.register_cursor(name)?;
    let mut session = Session::connect(&spec.target, &spec.application_name()).await?;
    let progress = session.open_subscription(name, LOCK_WAIT).await?.progress;
    if let Some(progress) = progress {
        return Err(refused(format!(
            "the target has a subscription of that name already (state {}, applied {})",
            progress.state, progress.applied
        )));
    }
    if cursor.expired.is_some() {
        let kept_from = claim_anew(store.as_ref(), name)?.applied;
        return Err(refused(format!(
            "retention dropped what it would need. Take a new backup: the log is kept for it from \
             {kept_from} on"
        )));
    }
    let (Some(publisher), Some(begins)) =
        (slot::publisher_identity(store.as_ref()), slot::log_begins(store.as_ref()))
    else {
        return Err(refused("its publication's capture has not begun yet".to_owned()));
    };
    // What was found of the target as it was before.
    ahead::forget(store.as_ref(), name)?;
    let proved = match backup {
        Backup::CopiedFrom(other) => {
            Some(session.stands_at(other, spec, &publisher).await?.map_err(&refused)?)
        }
        Backup::TellsItself | Backup::At(_) => match session.own_history(&publisher).await? {
            None => None,
            Some(history) => match (source.timelines().await, backup) {
                (Ok(timelines), _) => timelines.left_at(&history),
                // It is said where it stands, and only not proved.
                (Err(_), Backup::At(_)) => None,
                (Err(error), _) => return Err(error.into()),
            },
        },
    };
    let given = if let Backup::At(given) = backup { Some(*given) } else { None };
    let lsn = match (given, proved) {
        (Some(given), Some(proved)) if given != proved => {
            return Err(refused(format!(
                "the target left the publisher's timeline at {proved}, not at {given}"
            )));
        }
        (Some(lsn), _) | (None, Some(lsn)) => lsn,
        (None, None) => {
            return Err(refused(
                "the target does not tell where its backup stands (a dump, a server that was not \
                 promoted since or left the publisher elsewhere, or a role that may not read \
                 pg_wal there): say it with --lsn"
                    .to_owned(),
            ));
        }
    };
    let kept_from = cursor.applied.0.max(begins);
    if lsn < kept_from {
        let newer = match backup {
            Backup::CopiedFrom(other) => {
                format!("Let \"{other}\" get past that position, and take another copy then")
            }
            Backup::TellsItself | Backup::At(_) => "Take a backup that is newer".to_owned(),
        };
        return Err(refused(format!(
            "the backup stands at {lsn}, and the log is kept for it from {kept_from} on. {newer}"
        )));
    }
    let mut durable = store.durable();
    let reached = durable.wait_for(|durable| durable.0 >= lsn);
    if !matches!(tokio::time::timeout(LOG_WAIT, reached).await, Ok(Ok(_))) {
        let end = store.durable().borrow().0;
        return Err(refused(format!(
            "the log here ends at {end}, before {lsn}. Is that a position of the publisher, and \
             does its capture run?"
        )));
    }
    let published = source.published_tables().await?;
    let were = match (backup, proved) {
        (Backup::CopiedFrom(other), _) => Were::Copied(session.load_tables(other).await?),
        (_, Some(_)) => Were::Published(session.were_published().await?),
        (_, None) => Were::NotKnown,
    };
    let (held, left_out) = session.held(&published, spec, &were).await?;
    if held.is_empty() {
        return Err(refused("the target has none of the published tables".to_owned()));
    }
    let beyond = session.beyond(&held, &spec.schema.names).await?;
    if !beyond.rows.is_empty() {
        return Err(refused(format!(
            "the target holds rows that the publication's row filters leave out, and that would \
             stay there for ever. Delete them on the target, and say it again: {}",
            beyond.rows.join("; ")
        )));
    }
    match backup {
        Backup::CopiedFrom(other) => take_over(&mut session, spec, other, &left_out).await?,
        Backup::TellsItself | Backup::At(_) => {
            note(&mut session, spec, &publisher, lsn, &held).await?;
        }
    }
    session.connection.close().await;
    let tables = held.len();
    let (proved, not_followed) = (proved.is_some(), beyond.columns);
    Ok(Initialised { lsn, proved, tables, left_out, not_followed })
}

/// Writes what a copy of these tables at `lsn` would have left.
async fn note(
    session: &mut Session,
    spec: &SubscriptionSpec,
    publisher: &str,
    lsn: Lsn,
    held: &[&PublishedTable],
) -> Result<(), ApplyError> {
    let name = quote_literal(&spec.name);
    let keeps_attached = session.keeps(TableCopyColumn::Attached).await?;
    let attached = if keeps_attached { ", attached" } else { "" };
    let rows: Vec<String> = held
        .iter()
        .map(|published| {
            let how = published.attached_by(published.membership);
            let how = how.map_or("NULL".to_owned(), |how| how.to_string());
            format!(
                "({name}, {}, {}, '{TABLE_COPIED}', '{lsn}', 0, {}, {}{})",
                quote_literal(&published.table.schema),
                quote_literal(&published.table.name),
                published.membership,
                definition_sql(&known_by_oid(published)),
                if keeps_attached { format!(", {how}::bigint") } else { String::new() }
            )
        })
        .collect();
    session
        .simple(&format!(
            "BEGIN; INSERT INTO farshore.subscription (name, publication, publisher, state, applied) \
             VALUES ({name}, {}, {}, '{}', '{lsn}'); \
             INSERT INTO farshore.table_copy \
             (subscription, schema_name, table_name, state, copied_at, file_node, membership, \
              definition{attached}) \
             VALUES {}",
            quote_literal(&spec.publication),
            quote_literal(publisher),
            state::STREAMING,
            rows.join(", ")
        ))
        .await?;
    fault::point("snapshot.before-finish");
    session.simple("COMMIT").await?;
    fault::point("snapshot.after-finish");
    Ok(())
}

/// Makes what is noted of the subscription `other` this one's: where it stands, and what was copied
/// when. Tables that are `left_out` are copied anew.
async fn take_over(
    session: &mut Session,
    spec: &SubscriptionSpec,
    other: &str,
    left_out: &[TableName],
) -> Result<(), ApplyError> {
    let (name, other) = (quote_literal(&spec.name), quote_literal(other));
    let publication = quote_literal(&spec.publication);
    let forgotten: Vec<String> = left_out
        .iter()
        .map(|table| {
            let (schema, table) = (quote_literal(&table.schema), quote_literal(&table.name));
            format!(
                "DELETE FROM farshore.table_copy WHERE subscription = {name} \
                 AND schema_name = {schema} AND table_name = {table}; "
            )
        })
        .collect();
    session
        .simple(&format!(
            "BEGIN; INSERT INTO farshore.subscription (name, publication, publisher, state, applied) \
             SELECT {name}, {publication}, publisher, state, applied \
             FROM farshore.subscription WHERE name = {other}; \
             UPDATE farshore.table_copy SET subscription = {name} WHERE subscription = {other}; \
             UPDATE farshore.after_copy SET subscription = {name} WHERE subscription = {other}; \
             UPDATE farshore.skip_request SET subscription = {name} WHERE subscription = {other}; \
             {} DELETE FROM farshore.subscription WHERE name = {other}",
            forgotten.concat()
        ))
        .await?;
    fault::point("snapshot.before-finish");
    session.simple("COMMIT").await?;
    fault::point("snapshot.after-finish");
    Ok(())
}

/// Whether both lead to the same database.
///
/// # Errors
/// The servers'.
pub async fn is_same_database(one: &Config, other: &Config) -> Result<bool, ApplyError> {
    let mut holder = Session::connect(one, "farshore initialise").await?;
    let mut asker = Session::connect(other, "farshore initialise").await?;
    // Nobody else takes a lock of this name.
    let unique = format!("initialise {}", holder.connection.backend_pid());
    holder.try_lock(&unique).await?;
    let is_same = !asker.try_lock(&unique).await?;
    holder.connection.close().await;
    asker.connection.close().await;
    Ok(is_same)
}

impl Session {
    /// Where the subscription `other` stands on this target, which is said to be a copy of its own;
    /// or why that cannot be gone on from.
    async fn stands_at(
        &mut self,
        other: &str,
        spec: &SubscriptionSpec,
        publisher: &str,
    ) -> Result<Result<Lsn, String>, ApplyError> {
        if !self.try_lock(other).await? {
            return Ok(Err(format!(
                "an agent of subscription \"{other}\" is at work in {}: that is its target, and \
                 no copy of it",
                self.connection.server()
            )));
        }
        let rows = self
            .query(
                "SELECT s.state, s.applied, s.publisher, s.publication, \
                   (SELECT count(*) FROM farshore.table_copy t \
                    WHERE t.subscription = s.name AND t.state <> $2) \
                 FROM farshore.subscription s WHERE s.name = $1",
                &[Some(other), Some(TABLE_COPIED)],
            )
            .await?;
        let Some(row) = rows.first() else {
            return Ok(Err(format!(
                "{} has no trace of subscription \"{other}\": is the farshore schema of what was \
                 copied in it?",
                self.connection.server()
            )));
        };
        if row.get(2) != Some(publisher) {
            return Ok(Err(format!(
                "subscription \"{other}\" follows a publisher with the system identifier {}, and \
                 this one {publisher}",
                row.get(2).unwrap_or_default()
            )));
        }
        // Another site calls it by its own name and a stroke first.
        let plain = |name: &str| name.rsplit('/').next().unwrap_or(name).to_owned();
        let publication = row.get(3).unwrap_or_default();
        if plain(publication) != plain(&spec.publication) {
            return Ok(Err(format!(
                "subscription \"{other}\" follows publication \"{publication}\", and this one \
                 \"{}\"",
                spec.publication
            )));
        }
        if row.get(0) != Some(state::STREAMING) || row.get(4) != Some("0") {
            return Ok(Err(format!(
                "it was copied while tables of subscription \"{other}\" were still being copied \
                 to it. Take another copy when that streams"
            )));
        }
        match row.get(1).and_then(|applied| applied.parse().ok()) {
            Some(applied) => Ok(Ok(applied)),
            None => Ok(Err(format!("what is noted of subscription \"{other}\" is no position"))),
        }
    }

    /// What the publisher's catalogue had when this physical copy of it was made.
    async fn were_published(&mut self) -> Result<WerePublished, ApplyError> {
        let attached = format!(
            "SELECT c.oid, {} FROM pg_catalog.pg_class c WHERE c.relispartition",
            above_sql("true")
        );
        let members = Question::Simple("SELECT oid FROM pg_catalog.pg_publication_rel");
        let names = Question::Simple(
            "SELECT c.oid, n.nspname, c.relname FROM pg_catalog.pg_class c \
             JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind IN ('r', 'p')",
        );
        let [members, attached, names] =
            self.ask([members, Question::Simple(&attached), names]).await?;
        let number = |row: &Row| row.get(0).and_then(|oid| oid.parse::<u32>().ok());
        let memberships = members?.iter().filter_map(number).collect();
        let mut by_membership = HashMap::new();
        for row in &attached? {
            let Some(oid) = number(row) else { continue };
            let (above, how) = memberships_and_attached_above(row.get(1));
            by_membership.extend(above.into_iter().map(|above| (oid, above)).zip(how));
        }
        let named = |row: &Row| {
            let text = |column: usize| row.get(column).map(str::to_owned);
            Some((number(row)?, TableName { schema: text(1)?, name: text(2)? }))
        };
        let names = names?.iter().filter_map(named).collect();
        Ok(WerePublished { memberships, attached: by_membership, names })
    }

    /// The history of this server's timeline, if it was made of a physical backup of the publisher
    /// with that system identifier, was promoted, and may be asked.
    async fn own_history(&mut self, publisher: &str) -> Result<Option<String>, ApplyError> {
        let rows = self
            .query(
                "SELECT system_identifier::text, \
                   pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 8), \
                   pg_catalog.has_function_privilege('pg_catalog.pg_read_file(text)', 'EXECUTE') \
                 FROM pg_catalog.pg_control_system()",
                &[],
            )
            .await?;
        let Some(row) = rows.first() else { return Ok(None) };
        // The current one: the last checkpoint may be of the timeline before.
        let timeline = row.get(1).unwrap_or_default();
        let is_first = timeline == "00000001" || timeline.len() != 8;
        if row.get(0) != Some(publisher) || is_first || row.get(2) != Some("t") {
            return Ok(None);
        }
        let file = quote_literal(&format!("pg_wal/{timeline}.history"));
        let history = format!("SELECT pg_catalog.pg_read_file({file})");
        let rows = self.query(&history, &[]).await?;
        Ok(rows.first().and_then(|row| row.get(0)).map(str::to_owned))
    }

    /// Published tables that the backup holds, and those that it does not.
    async fn held<'a>(
        &mut self,
        published: &'a [PublishedTable],
        spec: &SubscriptionSpec,
        were: &Were,
    ) -> Result<(Vec<&'a PublishedTable>, Vec<TableName>), ApplyError> {
        let tables = self
            .query(
                "SELECT n.nspname, c.relname FROM pg_catalog.pg_class c \
                 JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
                 WHERE c.relkind IN ('r', 'p')",
                &[],
            )
            .await?;
        let text = |row: &Row, i: usize| row.get(i).unwrap_or_default().to_owned();
        let there: HashSet<TableName> = tables
            .iter()
            .map(|row| TableName { schema: text(row, 0), name: text(row, 1) })
            .collect();
        let names = &spec.schema.names;
        let is_held = |table: &&PublishedTable| {
            let is_called = |name: &TableName| *name == names.table(&table.table);
            let was_there = match were {
                // What has its name here may be another that was called so then.
                Were::Published(were) => {
                    were.has(table) && were.names.get(&table.oid).is_none_or(is_called)
                }
                Were::Copied(tables) => tables.iter().any(|t| t.copied && t.is_still(table)),
                Were::NotKnown => true,
            };
            there.contains(&names.table(&table.table)) && was_there
        };
        let (held, left_out): (Vec<_>, Vec<_>) = published.iter().partition(is_held);
        Ok((held, left_out.into_iter().map(|table| table.table.clone()).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_model::{Applied, PgTime};
    use farshore_store::segmented::{Options, SegmentedStore};
    use farshore_store::{Batch, EntryKind, EntryMeta, Retention};

    #[test]
    fn a_partition_that_was_attached_otherwise_is_not_what_the_backup_holds() {
        let leaf = |membership, above: &[u32], attached: &[u32]| PublishedTable {
            oid: 5,
            table: TableName { schema: "s".into(), name: "leaf".into() },
            columns: Vec::new(),
            types: Vec::new(),
            labels: Vec::new(),
            row_filter: None,
            membership,
            memberships_above: above.to_vec(),
            attached_above: attached.to_vec(),
            file_node: 2,
            blocks: 0,
            bytes: 0,
            binary_safe: true,
            binary_copy: true,
            partitioned: false,
            unsent_key: None,
            updates_untold: false,
            old_keys_untold: false,
        };
        let (above, how) = memberships_and_attached_above(Some("10:700,11:4294967295"));
        assert_eq!((above.as_slice(), how.as_slice()), (&[10, 11][..], &[700, u32::MAX][..]));
        let were = WerePublished {
            memberships: HashSet::from([10, 11, 12]),
            attached: HashMap::from([((5, 10), 700), ((5, 11), u32::MAX)]),
            names: HashMap::new(),
        };
        assert!(were.has(&leaf(10, &[10, 11], &[700, u32::MAX])));
        assert!(!were.has(&leaf(10, &[10], &[701])), "attached again");
        assert!(!were.has(&PublishedTable { oid: 6, ..leaf(10, &[10], &[700]) }), "attached since");
        assert!(were.has(&leaf(12, &[10], &[701])), "published by itself");
        assert!(!were.has(&leaf(13, &[], &[])));
        // A site of an earlier version does not tell; a publication may not list tables.
        assert!(were.has(&leaf(10, &[10], &[])) && were.has(&leaf(0, &[], &[])));
    }

    #[tokio::test]
    async fn a_claim_that_expired_is_made_anew_and_keeps_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let store = SegmentedStore::open(dir.path(), Options::default()).unwrap().0;
        let append = async |position| {
            let entry = EntryMeta {
                position: Lsn(position),
                commit_time: PgTime(0),
                kind: EntryKind::Transaction,
                payload_len: 1,
            };
            let batch = Batch { entries: vec![entry], payload: vec![7], ..Batch::default() };
            store.append(batch).await.unwrap();
            store.durable().wait_for(|durable| durable.0 >= Lsn(position)).await.unwrap();
        };
        store.register_cursor("s").unwrap();
        let small = Retention { bytes_max: Some(1), ..Retention::default() };
        let mut end = 0;
        while store.enforce_retention(&small).unwrap().is_empty() {
            end += 10;
            append(end).await;
            assert!(end < 1_000, "nothing expired");
        }
        // As it is for ever, if nobody does anything.
        assert!(store.register_cursor("s").unwrap().expired.is_some());
        let anew = claim_anew(store.as_ref(), "s").unwrap();
        assert_eq!((anew.applied, anew.expired), (Applied(Lsn(end)), None));
        for position in 1..=9 {
            append(end + position).await;
            store.enforce_retention(&Retention::default()).unwrap();
        }
        assert!(store.read_from(anew.applied.0).is_ok());
    }
}
