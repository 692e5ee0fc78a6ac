//! What operators ask of a subscription, written to its target while its agent is halted. The agent
//! finds it there when it starts again, also after a crash.

use crate::ApplyError;
use crate::log_feed::{LogFeed, LogItem};
use crate::postgres::foreign_keys::ForeignKeys;
use crate::postgres::progress::{Progress, TABLE_COPYING, state};
use crate::postgres::session::Session;
use crate::subscription::{LOCK_WAIT, SubscriptionSpec};
use farshore_capture::publication::TableName;
use farshore_model::Lsn;
use farshore_model::transaction::Header;
use farshore_store::LogStore;
use std::sync::Arc;

/// A transaction that will be left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SkipRequested {
    /// What the target has applied.
    pub applied: Lsn,
    /// It is the next transaction.
    pub is_next: bool,
}

/// Notes that the transaction whose commit record ends at `lsn` is to be left out.
///
/// # Errors
/// No such transaction lies ahead of what is applied; the agent is at work; the target.
pub async fn request_skip(
    spec: &SubscriptionSpec,
    store: &Arc<dyn LogStore>,
    lsn: Lsn,
) -> Result<SkipRequested, ApplyError> {
    let name = spec.name.as_str();
    let refused = |what: String| {
        ApplyError::Setup(format!("subscription \"{name}\": cannot skip {lsn}: {what}"))
    };
    let (mut session, progress) = open(spec).await?;
    let applied = progress.applied;
    if lsn <= applied {
        return Err(refused(format!("everything up to {applied} is applied already")));
    }
    let end = |header: Option<Header>| header.map(|header| header.end_lsn);
    let next = end(next_transaction(store, applied).await?);
    let found = end(next_transaction(store, Lsn(lsn.0 - 1)).await?);
    if found != Some(lsn) {
        let next = next.map_or_else(String::new, |next| format!("; the next one is {next}"));
        return Err(refused(format!(
            "no stored transaction's commit record ends there (see farshore browse){next}"
        )));
    }
    session
        .execute(
            "INSERT INTO farshore.skip_request (subscription, lsn) \
             VALUES ($1, $2::text::pg_lsn) ON CONFLICT DO NOTHING",
            &[Some(name), Some(&lsn.to_string())],
        )
        .await?;
    session.connection.close().await;
    Ok(SkipRequested { applied, is_next: next == Some(lsn) })
}

/// The first stored transaction after `after`.
pub(crate) async fn next_transaction(
    store: &Arc<dyn LogStore>,
    after: Lsn,
) -> Result<Option<Header>, ApplyError> {
    let mut feed = LogFeed::open(store.clone(), after)?;
    loop {
        match feed.next_at_hand().await? {
            Some(LogItem::Transaction { header, .. }) => return Ok(Some(header)),
            Some(LogItem::Watermark(_)) => {}
            Some(LogItem::Halt(_)) | None => return Ok(None),
        }
    }
}

/// Notes that one table, or all, are to be emptied on the target and copied anew. Returns which.
///
/// # Errors
/// The table is not one of the subscription's; its first copy is not over; the agent is at work;
/// the target.
pub async fn request_resync(
    spec: &SubscriptionSpec,
    table: Option<&TableName>,
) -> Result<Vec<TableName>, ApplyError> {
    let name = spec.name.as_str();
    let refused = |what: String| {
        ApplyError::Setup(format!("subscription \"{name}\": cannot copy anew: {what}"))
    };
    let (mut session, progress) = open(spec).await?;
    if progress.state == state::COPYING {
        return Err(refused(
            "all its tables are being copied already (the first copy, or one that was asked for), \
             and that is not over. It goes on by itself, or with farshore resume"
                .to_owned(),
        ));
    }
    let known = session.load_tables(name).await?;
    let mut tables: Vec<TableName> = known.into_iter().map(|progress| progress.table).collect();
    if let Some(wanted) = table.filter(|table| !tables.contains(table)) {
        let known: Vec<String> = tables.iter().map(ToString::to_string).collect();
        let there = match known.join(", ") {
            none if none.is_empty() => "there is none".to_owned(),
            known => format!("there are: {known}"),
        };
        return Err(refused(format!("{wanted} is not one of its tables ({there})")));
    }
    let all = tables.clone();
    if let Some(wanted) = table {
        tables.retain(|table| table == wanted);
    }
    let bound = bound_by(spec, &mut session, &all, &tables).await?;
    if !bound.is_empty() {
        return Err(refused(format!(
            "foreign keys are checked for this role, and would be in the way: {}. Copy all tables \
             anew (without --table), drop the keys of tables that are not published, or let the \
             role set session_replication_role",
            bound.join(", ")
        )));
    }
    session.simple("BEGIN").await?;
    for table in &tables {
        let which = [Some(name), Some(table.schema.as_str()), Some(table.name.as_str())];
        // No file of the publisher has the number 0: nothing that is on the target is kept.
        let update = format!(
            "UPDATE farshore.table_copy SET state = '{TABLE_COPYING}', file_node = 0 \
             WHERE subscription = $1 AND schema_name = $2 AND table_name = $3"
        );
        session.execute(&update, &which).await?;
        let forget = "DELETE FROM farshore.range_copy \
             WHERE subscription = $1 AND schema_name = $2 AND table_name = $3";
        session.execute(forget, &which).await?;
    }
    if table.is_none() {
        // As a first copy: nothing of what the log had before it is needed.
        let begin = "UPDATE farshore.subscription SET state = $2, applied = '0/0' WHERE name = $1";
        session.execute(begin, &[Some(name), Some(state::COPYING)]).await?;
    } else {
        // From here on, and until the stream has passed the new copy, tables stand at different
        // points.
        session.mark_catching_up(name).await?;
    }
    session.simple("COMMIT").await?;
    session.connection.close().await;
    Ok(tables)
}

/// How long a target may take to list conflicts.
const LIST_TIMEOUT: &str = "SET statement_timeout = '10s'";

/// Longest text of a value that is listed, in characters.
const LISTED_CHARS_MAX: usize = 2_000;

/// The newest conflicts that the target has recorded for a subscription, each as a JSON object; the
/// newest first. Long values are cut.
///
/// # Errors
/// The target's.
pub async fn recorded_conflicts(
    spec: &SubscriptionSpec,
    limit: u64,
) -> Result<Vec<String>, ApplyError> {
    let mut session = Session::connect(&spec.target, &spec.application_name()).await?;
    session.simple(LIST_TIMEOUT).await?;
    let made = session.query("SELECT to_regclass('farshore.conflicts')", &[]).await?;
    let is_made = made.first().is_some_and(|row| row.get(0).is_some());
    let mut conflicts = Vec::new();
    if is_made {
        let cut = |column: &str| format!("'{column}', left({column}::text, {LISTED_CHARS_MAX})");
        let query = format!(
            "SELECT json_build_object('recorded_at', recorded_at, 'table', \
               nullif(concat_ws('.', schema_name, table_name), ''), 'operation', operation, \
               'action', action, 'sqlstate', sqlstate, 'lsn', source_lsn, \
               'commit_time', commit_time, {}, {}, {}, {}, {})::text \
             FROM farshore.conflicts WHERE subscription = $1 ORDER BY id DESC LIMIT {limit}",
            cut("reason"),
            cut("key"),
            cut("old_row"),
            cut("new_row"),
            cut("existing_row")
        );
        let rows = session.query(&query, &[Some(spec.name.as_str())]).await?;
        conflicts.extend(rows.iter().filter_map(|row| row.get(0).map(str::to_owned)));
    }
    session.connection.close().await;
    Ok(conflicts)
}

/// Foreign keys of the target that tie `tables` to others and are checked for what we write: rows
/// of the others would be deleted with theirs, or refer to rows that are not there.
async fn bound_by(
    spec: &SubscriptionSpec,
    session: &mut Session,
    all: &[TableName],
    tables: &[TableName],
) -> Result<Vec<String>, ApplyError> {
    if session.replica_role {
        return Ok(Vec::new());
    }
    let loaded = ForeignKeys::load(&mut session.connection).await;
    let keys = loaded.map_err(|error| session.error(error))?;
    let on_target = |tables: &[TableName]| -> Vec<TableName> {
        tables.iter().map(|table| spec.schema.names.table(table)).collect()
    };
    let (all, tables) = (on_target(all), on_target(tables));
    Ok(keys
        .keys
        .iter()
        .filter(|key| {
            let (child, parent) = (tables.contains(&key.child), tables.contains(&key.parent));
            parent && !child || child && !parent && all.contains(&key.parent)
        })
        .map(|key| key.on_table())
        .collect())
}

/// A session that holds the subscription's lock, and what is applied.
async fn open(spec: &SubscriptionSpec) -> Result<(Session, Progress), ApplyError> {
    let name = spec.name.as_str();
    let mut session = Session::connect(&spec.target, &spec.application_name()).await?;
    session.ensure_schema().await?;
    session.lock_subscription(name, LOCK_WAIT).await?;
    let progress = session.load_progress(name).await?.ok_or_else(|| {
        ApplyError::Setup(format!("subscription \"{name}\": nothing was copied to its target yet"))
    })?;
    Ok((session, progress))
}
