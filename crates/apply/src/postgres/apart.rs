//! Subscribed tables that are partitions of subscribed tables on the target.
//!
//! A publisher that publishes partitioned tables through their roots publishes a partition by itself
//! once it is detached. On the target it is still a partition then, and what empties the root there
//! would empty it, although it was copied for good. So it is detached there too, as soon as nothing
//! is left to come for it through the root; and nothing empties a tree that holds it.
//!
//! Who reads the root on the target is in the way of that, for as long as he likes, and whoever comes
//! after us waits with us. So it is tried for a moment, and left for later; what streams goes on.

use crate::ApplyError;
use crate::error::passes_by_itself;
use crate::postgres::progress::TableProgress;
use crate::postgres::resume::{Since, Touched, touched_between};
use crate::postgres::schema::SchemaSettings;
use crate::postgres::session::Session;
use crate::postgres::target_table::names;
use farshore_capture::CaptureError;
use farshore_capture::publication::{PublishedTable, TableName};
use farshore_capture::source::Source;
use farshore_model::Lsn;
use farshore_pg::Row;
use farshore_store::LogStore;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::task::JoinHandle;

/// What is below these tables (`$2`) on the target and is filled by itself: by one of our names
/// (`$3`), or as `farshore.table_copy` notes it.
const BELOW: &str = "WITH RECURSIVE filled (relid, subscription) AS ( \
       SELECT pg_catalog.to_regclass(own.name)::oid, NULL::text \
       FROM pg_catalog.unnest($3::text::text[]) AS own (name) NOTED), \
     below (root, parent, relid) AS ( \
       SELECT c.oid, c.oid, c.oid FROM pg_catalog.unnest($2::text::text[]) AS root (name) \
       JOIN pg_catalog.pg_class c ON c.oid = pg_catalog.to_regclass(root.name) AND c.relkind = 'p' \
       UNION ALL SELECT b.root, i.inhparent, i.inhrelid FROM below b \
       JOIN pg_catalog.pg_inherits i ON i.inhparent = b.relid AND NOT i.inhdetachpending) \
     SELECT rn.nspname, r.relname, pn.nspname, p.relname, cn.nspname, c.relname, f.subscription \
     FROM (SELECT DISTINCT relid, nullif(subscription, $1) AS subscription FROM filled) f \
     JOIN below b ON b.relid = f.relid AND b.relid <> b.root \
     JOIN pg_catalog.pg_class r ON r.oid = b.root \
     JOIN pg_catalog.pg_namespace rn ON rn.oid = r.relnamespace \
     JOIN pg_catalog.pg_class p ON p.oid = b.parent \
     JOIN pg_catalog.pg_namespace pn ON pn.oid = p.relnamespace \
     JOIN pg_catalog.pg_class c ON c.oid = b.relid \
     JOIN pg_catalog.pg_namespace cn ON cn.oid = c.relnamespace ORDER BY 1, 2, 5, 6";

/// Left out where `farshore.table_copy` keeps no OIDs.
const NOTED: &str = "UNION ALL SELECT noted.target_oid, noted.subscription \
     FROM farshore.table_copy noted WHERE noted.noted_in = noted.tableoid";

/// A lock is not waited for longer: what uses the root may itself wait for who waits behind us.
const LOCK_WAIT: &str = "2s";

/// Pauses before what was left for later is looked at again; doubled each time.
const PAUSE_MIN: Duration = Duration::from_secs(2);
const PAUSE_MAX: Duration = Duration::from_secs(60);

/// The publisher is asked for a point of its log while nothing streams for so long; it may have to
/// wait for transactions there.
const POINT_WITHIN: Duration = Duration::from_secs(5);

/// The log is not read, to see whether it has anything for a table, while it holds more than this.
const LOOKED_THROUGH_MAX: u64 = 64 << 20;

/// A table that is filled by itself and is a partition of another one, by their names on the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Below {
    /// The one above, of which its rows seem to be.
    pub root: TableName,
    /// What it is a partition of: the root, or something between.
    pub parent: TableName,
    /// The table.
    pub table: TableName,
    /// Which other subscription fills it.
    pub filled_by: Option<String>,
}

impl Below {
    fn detach(&self) -> String {
        format!("ALTER TABLE {} DETACH PARTITION {}", self.parent, self.table)
    }

    /// The error that it is there; `why` tells why we leave it there.
    pub fn error(&self, subscription: &str, why: &str) -> ApplyError {
        let by_whom = match &self.filled_by {
            Some(other) => format!("is filled by subscription \"{other}\""),
            None => "is published by itself".to_owned(),
        };
        ApplyError::Setup(format!(
            "subscription \"{subscription}\": table {} {by_whom}, and on the target it is a partition \
             of {}: what empties that would empty it too. {why}. On the target: {}; then go on \
             (farshore resume)",
            self.table,
            self.root,
            self.detach()
        ))
    }
}

impl Session {
    /// What is below `roots` and filled by itself: by its own name among `own`, or by what any
    /// subscription noted (of ours, that may be long ago). All names are the target's.
    pub async fn filled_below(
        &mut self,
        subscription: &str,
        roots: &[TableName],
        own: &[TableName],
    ) -> Result<Vec<Below>, ApplyError> {
        if roots.is_empty() {
            return Ok(Vec::new());
        }
        let noted = if self.keeps_oids().await? { NOTED } else { "" };
        let (roots, own) = (names(roots), names(own));
        let parameters = [Some(subscription), Some(roots.as_str()), Some(own.as_str())];
        let rows = self.query(&BELOW.replace("NOTED", noted), &parameters).await?;
        Ok(rows.iter().map(below).collect())
    }

    /// Detaches a table from what it is a partition of on the target.
    ///
    /// # Errors
    /// Tables are not ours to change, or the target does not let us; somebody uses the root
    /// ([`ApplyError::InUse`]), and trying again later is called for.
    pub async fn set_apart(
        &mut self,
        subscription: &str,
        settings: &SchemaSettings,
        below: &Below,
    ) -> Result<(), ApplyError> {
        if !settings.create_tables {
            let why = "It is not detached there, because create_tables = false";
            return Err(below.error(subscription, why));
        }
        let sql = format!("BEGIN; SET LOCAL lock_timeout = '{LOCK_WAIT}'; {}", below.detach());
        let Err(error) = self.connection.simple_query(&sql).await else {
            self.simple("COMMIT").await?;
            tracing::info!(
                subscription, table = %below.table, root = %below.root,
                "the table is published by itself: it was detached on the target"
            );
            return Ok(());
        };
        match error.sqlstate().map(str::to_owned).as_deref() {
            Some("55P03") => {
                self.simple("ROLLBACK").await?;
                Err(ApplyError::InUse(format!(
                    "subscription \"{subscription}\": {} is to be detached from {} on the target, \
                     and gives way to who uses them there; it is tried again",
                    below.table, below.parent
                )))
            }
            Some(_) if error.server_error().is_some_and(|said| !passes_by_itself(said)) => {
                let message = error.to_string();
                let why = message.trim_end_matches('.');
                Err(below.error(subscription, &format!("It cannot be detached there: {why}")))
            }
            Some(_) | None => Err(self.error(error)),
        }
    }
}

/// A table of the publisher, by its OID, and its membership in the publication.
type Member = (u32, u32);

fn member(table: &PublishedTable) -> Member {
    (table.oid, table.membership)
}

/// What is to be detached on the target and was left for later, for as long as the subscription is
/// kept running.
#[derive(Debug, Default)]
pub struct Detaching {
    noted: Mutex<Noted>,
    /// A question to the publisher, which outlives who waits for it.
    asked: tokio::sync::Mutex<Option<Asked>>,
}

#[derive(Debug, Default)]
struct Noted {
    /// Points of the publisher's log at which tables were published by themselves. The first is
    /// kept: nothing comes for the table through its root after it, and a newer one would be as far
    /// ahead of a stream that the root keeps busy as the one before was.
    apart_at: HashMap<Member, Lsn>,
    pause: Duration,
}

#[derive(Debug)]
struct Asked {
    /// What was published by itself when it was asked.
    tables: Vec<Member>,
    point: JoinHandle<Result<Lsn, CaptureError>>,
}

impl Detaching {
    fn noted(&self) -> MutexGuard<'_, Noted> {
        self.noted.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Notes that a table was published by itself at `point`, and returns the first such point.
    pub(crate) fn apart_at(&self, table: &PublishedTable, point: Lsn) -> Lsn {
        *self.noted().apart_at.entry(member(table)).or_insert(point)
    }

    /// Of what is not published by itself, a point is to be found again.
    pub(crate) async fn keep(&self, published: &[PublishedTable]) {
        let is_published = |known: &Member| published.iter().any(|table| member(table) == *known);
        self.noted().apart_at.retain(|known, _| is_published(known));
        if let Some(asked) = self.asked.lock().await.as_mut() {
            asked.tables.retain(is_published);
        }
    }

    /// It was detached.
    pub(crate) fn forget(&self, table: &PublishedTable) {
        self.noted().apart_at.remove(&member(table));
    }

    /// How long what was left is left alone this time.
    pub(crate) fn pause(&self) -> Duration {
        let mut noted = self.noted();
        let pause = noted.pause.clamp(PAUSE_MIN, PAUSE_MAX);
        noted.pause = 2 * pause;
        pause
    }

    /// Nothing is left.
    pub(crate) fn all_done(&self) {
        self.noted().pause = PAUSE_MIN;
    }

    /// A point of the publisher's log at which a table that is `published` by itself was so. `None`
    /// while the publisher has not said one.
    pub(crate) async fn point_of(
        &self,
        table: &PublishedTable,
        published: &[PublishedTable],
        source: &Arc<dyn Source>,
        subscription: &str,
    ) -> Option<Lsn> {
        if let Some(point) = self.noted().apart_at.get(&member(table)) {
            return Some(*point);
        }
        let mut asked = self.asked.lock().await;
        // One that was asked before it was published by itself says nothing of it.
        if asked.as_ref().is_some_and(|asked| {
            asked.point.is_finished() && !asked.tables.contains(&member(table))
        }) {
            *asked = None;
        }
        let question = asked.get_or_insert_with(|| {
            let (source, reader) = (source.clone(), subscription.to_owned());
            let point = tokio::spawn(async move {
                let snapshot = source.export(&reader).await?;
                let point = snapshot.consistent_point();
                snapshot.close().await;
                Ok(point)
            });
            Asked { tables: published.iter().map(member).collect(), point }
        });
        let told = tokio::time::timeout(POINT_WITHIN, &mut question.point).await.ok()?;
        let tables = std::mem::take(&mut question.tables);
        *asked = None;
        let error = match told {
            Ok(Ok(point)) => {
                let mut noted = self.noted();
                for of in tables {
                    noted.apart_at.entry(of).or_insert(point);
                }
                return noted.apart_at.get(&member(table)).copied();
            }
            Ok(Err(error)) => error.to_string(),
            Err(error) => error.to_string(),
        };
        tracing::info!(subscription, "the publisher does not say where its log stands: {error}");
        None
    }
}

/// What the log has for a table between what is applied and `until`, which it has come to; `None`
/// where that is not looked through.
pub(crate) async fn left_for(
    store: &Arc<dyn LogStore>,
    table: &TableProgress,
    applied: Lsn,
    until: Lsn,
) -> Result<Option<Touched>, ApplyError> {
    if applied >= until {
        return Ok(Some(Touched::Nothing));
    }
    if until.bytes_since(applied) > LOOKED_THROUGH_MAX {
        return Ok(None);
    }
    // What it missed under another name is seen when its own changes come.
    let since = Since { point: applied.max(table.copied_at), oid: None };
    let since = HashMap::from([(table.table.clone(), since)]);
    Ok(touched_between(store, &since, until).await?.remove(&table.table))
}

/// The names on the target of published tables, and of those among them that stand for all of their
/// partitions.
pub struct PublishedNames {
    /// All.
    pub tables: Vec<TableName>,
    /// Those that are published through their root.
    pub roots: Vec<TableName>,
}

impl PublishedNames {
    /// Of what the publisher says that it publishes.
    pub fn of(published: &[PublishedTable], settings: &SchemaSettings) -> PublishedNames {
        let name = |table: &PublishedTable| settings.names.table(&table.table);
        PublishedNames {
            tables: published.iter().map(name).collect(),
            roots: published.iter().filter(|table| table.partitioned).map(name).collect(),
        }
    }
}

fn below(row: &Row) -> Below {
    let name = |column: usize| TableName {
        schema: row.get(column).unwrap_or_default().to_owned(),
        name: row.get(column + 1).unwrap_or_default().to_owned(),
    };
    Below {
        root: name(0),
        parent: name(2),
        table: name(4),
        filled_by: row.get(6).map(str::to_owned),
    }
}

#[cfg(test)]
mod tests {
    use super::{Detaching, PAUSE_MAX, PAUSE_MIN};

    #[test]
    fn pauses_grow_until_nothing_is_left() {
        let detaching = Detaching::default();
        assert_eq!([detaching.pause(), detaching.pause()], [PAUSE_MIN, 2 * PAUSE_MIN]);
        assert_eq!((0..9).map(|_| detaching.pause()).max(), Some(PAUSE_MAX));
        detaching.all_done();
        assert_eq!(detaching.pause(), PAUSE_MIN);
    }
}
