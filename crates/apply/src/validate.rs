//! Whether a target's tables have the rows that the publisher's have, while both are at work.
//!
//! Both sides are read as they were at the same position of the publisher's log: its snapshot tells
//! which, and the stream rests there for the moment that a snapshot of the target takes
//! ([`crate::halts`]). Then each side hashes its own rows, and the hashes are compared; rows do not
//! travel. Tables that differ are looked at again in the same snapshots, a few parts of them row by
//! row.
//!
//! A snapshot keeps dead rows, and who needs a table for himself waiting. So there is a new one from
//! time to time, and what is in somebody's way is broken off.

mod differences;

use crate::ApplyError;
use crate::halts::{NotHalted, Resting};
use crate::postgres::in_use::is_of_a_lock;
use crate::postgres::progress::TableProgress;
use crate::postgres::session::Session;
use crate::postgres::target_table::{
    TargetTable, names as target_names, rows_of_its_own, target_table,
};
use crate::remedy;
use crate::subscription::{Subscription, SubscriptionSpec};
pub use differences::{Difference, Differences};
use differences::{compare, differing_parts, rows};
use farshore_capture::publication::{PublishedTable, TableName};
use farshore_capture::snapshot::{DigestQuery, PARTS, ROWS_MAX, SETTINGS};
use farshore_capture::source::{
    Digest, DigestOf, DigestScope, HashedAs, HashedRow, Hashing, SnapshotSession, WAITED_LONG,
};
use farshore_model::{Lsn, quote_identifier};
use std::collections::{HashSet, VecDeque};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// How long the stream is waited for: it may be about to begin, or in the middle of a large
/// transaction.
const RESTS_WITHIN: Duration = Duration::from_secs(30);

/// The stream rests no longer than this until the publisher has made a snapshot: transactions that
/// are open there may keep it from that.
const SNAPSHOT_WITHIN: Duration = Duration::from_secs(10);

/// How long the stream may take until it is where the snapshot is.
const POINT_WITHIN: Duration = Duration::from_secs(120);

/// The stream rests no longer than this until the target has made one.
const TARGET_WITHIN: Duration = Duration::from_secs(10);

/// All that while, a table of the target is not waited for longer than this.
const LOCKED_BRIEFLY: Duration = Duration::from_secs(2);

/// How long an index of the target is waited for that somebody has for himself: all the while
/// snapshots are held.
const LOCKED_MAX: Duration = Duration::from_secs(20);

/// No table is begun in a snapshot that is older, nor are more tables than this held by one.
const SNAPSHOT_FOR: Duration = Duration::from_secs(60);
const TABLES_AT_ONCE: usize = 200;

/// How often it is looked whether somebody waits for a table that is read.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// How often in a row snapshots at one position are tried, and the pause between: the stream has to
/// catch up with what it rested for.
const SNAPSHOT_TRIES: u32 = 3;
const SNAPSHOT_PAUSE: Duration = Duration::from_secs(10);

/// How often in a row a table is tried, and the pause between, longer each time.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_secs(1);

/// Rows of differing parts that are looked at one by one, about.
const LISTED_ROWS: u64 = 50_000;

/// What is told while tables are compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    /// So many tables are compared from here on, as they are at this position.
    Begins {
        /// How many are left.
        tables: usize,
        /// The publisher's position.
        point: Lsn,
    },
    /// A table is being compared.
    Comparing {
        /// Its name on the publisher.
        table: TableName,
        /// What it takes on the publisher's disk.
        bytes: u64,
    },
    /// A table was compared.
    Compared(Compared),
    /// It takes longer, and why.
    Waits(String),
}

/// How a table was found to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compared {
    /// Its name on the publisher.
    pub table: TableName,
    /// Its name on the target.
    pub target: TableName,
    /// Where both sides were compared; zero where they were not.
    pub point: Lsn,
    /// Rows on the publisher and on the target.
    pub rows: (u64, u64),
    /// What rows are named by.
    pub named_by: Vec<String>,
    /// The outcome.
    pub verdict: Verdict,
}

/// Whether the two sides are equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// They have the same rows.
    Equal,
    /// They do not.
    Differ(Differences),
    /// That cannot be said, and why not.
    NotCompared(String),
}

/// Why it is not gone on with what was begun.
enum Broken {
    /// There are no snapshots at one position yet.
    Before(String),
    /// Other snapshots are tried.
    Again(String),
    /// The table cannot be read.
    Table(String),
    Failed(ApplyError),
}

impl From<ApplyError> for Broken {
    fn from(error: ApplyError) -> Broken {
        if error.is_transient() { Broken::Again(error.to_string()) } else { Broken::Failed(error) }
    }
}

impl From<farshore_capture::CaptureError> for Broken {
    fn from(error: farshore_capture::CaptureError) -> Broken {
        ApplyError::from(error).into()
    }
}

impl Broken {
    /// Nothing was compared yet.
    fn before(self) -> Broken {
        match self {
            Broken::Again(why) => Broken::Before(why),
            other => other,
        }
    }

    /// Whatever is wrong, it is so with one table.
    fn of_table(self) -> Broken {
        match self {
            Broken::Failed(error) => Broken::Table(error.to_string()),
            other => other,
        }
    }
}

impl Subscription {
    /// Compares the tables of this subscription, or those of them that are `wanted` (names on the
    /// publisher), and tells of each. The subscription must be streaming, here and now.
    ///
    /// # Errors
    /// A table that is not published, or none that is; the publisher's and the target's, where trying
    /// again does not help. That tables differ is no error.
    pub async fn validate(
        &self,
        wanted: &[TableName],
        tell: &mpsc::Sender<Told>,
    ) -> Result<(), ApplyError> {
        let published = self.source.published_tables().await?;
        let refused = |what: String| {
            ApplyError::Setup(format!("subscription \"{}\": {what}", self.spec.name))
        };
        if published.is_empty() {
            return Err(refused("no table is published that could be compared".to_owned()));
        }
        if let Some(unknown) =
            wanted.iter().find(|name| !published.iter().any(|table| table.table == **name))
        {
            let names: Vec<String> = published.iter().map(|t| t.table.to_string()).collect();
            return Err(refused(format!(
                "{unknown} is not a published table (published are: {})",
                names.join(", ")
            )));
        }
        let mut left: VecDeque<TableName> = published
            .into_iter()
            .map(|table| table.table)
            .filter(|name| wanted.is_empty() || wanted.contains(name))
            .collect();
        let mut validation = Validation { agent: self, tell, hashing: None };
        let (mut tries, mut tried) = (0, None);
        while !left.is_empty() {
            let broken = validation.with_snapshot(&mut left).await;
            let Some(first) = left.front().cloned() else { break };
            // Tables that were compared meanwhile do not count.
            tries = if tried.as_ref() == Some(&first) { tries + 1 } else { 1 };
            tried = Some(first.clone());
            let (why, pause) = match broken {
                Ok(()) => {
                    tries = 0;
                    continue;
                }
                Err(Broken::Failed(error)) => return Err(error),
                Err(Broken::Before(why)) if tries >= SNAPSHOT_TRIES => {
                    return Err(ApplyError::NotYet(format!(
                        "subscription \"{}\": not compared: {why}",
                        self.spec.name
                    )));
                }
                Err(Broken::Before(why)) => (why, Some(SNAPSHOT_PAUSE)),
                Err(Broken::Again(why)) if tries < TRIES => (why, Some(PAUSE * tries)),
                Err(Broken::Again(why) | Broken::Table(why)) => (why, None),
            };
            if let Some(pause) = pause {
                validation.tell(Told::Waits(format!("{why}. Trying again"))).await;
                tokio::time::sleep(pause).await;
            } else {
                left.pop_front();
                validation.tell(Told::Compared(self.not_compared(first, why))).await;
            }
        }
        Ok(())
    }

    /// Says that nothing rests between two transactions.
    fn streams_not(&self) -> ApplyError {
        let status = self.lock_status();
        let why =
            status.error.as_ref().or(status.copy_waits.as_ref()).or(status.waits_for.as_ref());
        ApplyError::NotYet(format!(
            "subscription \"{}\": tables are compared where it rests between two transactions, and it \
             has not come to that within {RESTS_WITHIN:?} (it is {}{}; one may be large): try again \
             later",
            self.spec.name,
            status.phase.word(),
            why.map_or_else(String::new, |why| format!(": {why}"))
        ))
    }

    fn not_compared(&self, table: TableName, why: String) -> Compared {
        Compared {
            target: self.spec.schema.names.table(&table),
            table,
            point: Lsn::ZERO,
            rows: (0, 0),
            named_by: Vec::new(),
            verdict: Verdict::NotCompared(why),
        }
    }
}

/// One comparison of a subscription's tables.
struct Validation<'a> {
    agent: &'a Subscription,
    tell: &'a mpsc::Sender<Told>,
    /// How texts are hashed on both sides, once that is known.
    hashing: Option<Hashing>,
}

/// The publisher as it was at a position.
struct Publisher {
    point: Lsn,
    published: Vec<PublishedTable>,
    /// OIDs of the tables that stay as they are.
    held: Vec<u32>,
    /// Reads them.
    source: Box<dyn SnapshotSession>,
    /// Holds them, and sees who waits for one.
    watched: Box<dyn SnapshotSession>,
}

/// The target, as it was at the same position.
struct Target {
    session: Session,
    known: Vec<TableProgress>,
    /// Names of the tables that stay as they are.
    held: HashSet<String>,
}

/// A table that is compared, as it is read on both sides.
struct Table {
    published: PublishedTable,
    target: TableName,
    types: Vec<Option<HashedAs>>,
    key_columns: Vec<String>,
    query: DigestQuery,
}

impl Validation<'_> {
    async fn tell(&self, told: Told) {
        // Whoever is told nothing any more drops us.
        let _ = self.tell.send(told).await;
    }

    /// Compares tables from the front of `left` on in one snapshot, and takes those off.
    async fn with_snapshot(&mut self, left: &mut VecDeque<TableName>) -> Result<(), Broken> {
        let agent = self.agent;
        let spec = &agent.spec;
        let tables: Vec<TableName> = left.iter().take(TABLES_AT_ONCE).cloned().collect();
        let connect = async {
            let session = Session::connect(&spec.target, &application_name(spec)).await?;
            let looks = format!("{} looks for locks", application_name(spec));
            Ok::<_, ApplyError>((session, Session::connect(&spec.target, &looks).await?))
        };
        let (mut session, mut watcher) =
            connect.await.map_err(|error| Broken::from(error).before())?;
        let readable = readable(&mut session, spec, &tables).await?;
        let resting = agent.halts.ask(RESTS_WITHIN).await.map_err(|why| match why {
            NotHalted::Ended => Broken::Before(agent.streams_not().to_string()),
            NotHalted::NotInTime => Broken::Failed(agent.streams_not()),
        })?;
        let publisher = self.publisher(&tables, resting.applied).await.map_err(Broken::before)?;
        let Publisher { point, published, held, mut source, mut watched } = publisher;
        let reader = session.connection.backend_pid();
        let compared = tokio::select! {
            compared = async {
                let target = target_at(spec, resting, point, session, readable);
                let mut target = target.await.map_err(Broken::before)?;
                self.tell(Told::Begins { tables: left.len(), point }).await;
                let begun = Instant::now();
                for name in tables {
                    if begun.elapsed() >= SNAPSHOT_FOR {
                        break;
                    }
                    let table = published.iter().find(|table| table.table == name);
                    let compared = self.compare_one(name, table, point, source.as_mut(), &mut target);
                    let compared = compared.await?;
                    left.pop_front();
                    self.tell(Told::Compared(compared)).await;
                }
                target.session.connection.close().await;
                Ok(())
            } => compared,
            why = in_the_way(watched.as_mut(), &held, &mut watcher, reader) => Err(why),
        };
        watcher.connection.close().await;
        source.close().await;
        watched.close().await;
        compared
    }

    /// A snapshot of the publisher in which these tables stay as they are. Its slot is gone already:
    /// it would keep the log.
    async fn publisher(&self, tables: &[TableName], applied: Lsn) -> Result<Publisher, Broken> {
        let Subscription { spec, source, .. } = self.agent;
        let waits = Mutex::new(None);
        let keep = |why: Option<String>| {
            *waits.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = why;
        };
        let reader = format!("{}_validate", spec.name);
        let taking = async {
            let published = source.published_tables().await?;
            let followed = published.iter().filter(|table| !tables.contains(&table.table));
            let followed: Vec<u32> = followed.map(|table| table.oid).collect();
            let snapshot = source.export_telling(&reader, &followed, &keep).await?;
            let (source, mut watched) = (snapshot.open().await?, snapshot.open().await?);
            let published = watched.tables().await?;
            let wanted = published.iter().filter(|table| tables.contains(&table.table));
            let wanted: Vec<PublishedTable> = wanted.cloned().collect();
            if !watched.hold_still(&wanted).await? {
                return Err(Broken::Again("a table is locked on the publisher".to_owned()));
            }
            let point = snapshot.consistent_point();
            snapshot.close().await;
            let held = wanted.iter().map(|table| table.oid).collect();
            Ok(Publisher { point, published, held, source, watched })
        };
        let Ok(taken) = timeout(SNAPSHOT_WITHIN, taking).await else {
            let why = waits.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
            let why = why.unwrap_or_else(|| {
                "its slot waits for every transaction that was open there, or somebody has one of \
                 the tables for himself"
                    .to_owned()
            });
            return Err(Broken::Again(format!(
                "the publisher has made no snapshot within {SNAPSHOT_WITHIN:?}, and the subscription \
                 is not held up for longer: {why}"
            )));
        };
        let taken = taken?;
        if taken.point < applied {
            return Err(Broken::Again(format!(
                "the publisher's snapshot is of {}, and the target has {applied} already: another \
                 server has answered than the one that the log is of",
                taken.point
            )));
        }
        Ok(taken)
    }

    /// Compares one table, which is published as `table`.
    async fn compare_one(
        &mut self,
        name: TableName,
        published: Option<&PublishedTable>,
        point: Lsn,
        source: &mut dyn SnapshotSession,
        target: &mut Target,
    ) -> Result<Compared, Broken> {
        let not_compared = |why: String| Ok(self.agent.not_compared(name.clone(), why));
        let Some(published) = published else {
            return not_compared("it is not published any more".to_owned());
        };
        if let Some(why) = why_not(&target.known, published, point) {
            return not_compared(why);
        }
        let session = &mut target.session;
        let target_name = self.agent.spec.schema.names.table(&name);
        let Some(there) = target_table(session, &target_name).await? else {
            return not_compared(format!("{target_name} is not on the target"));
        };
        if !target.held.contains(&target_name.to_string()) {
            return not_compared(format!(
                "the role may not read {target_name} on the target, or it was made just now (GRANT \
                 SELECT ON {target_name} TO it)"
            ));
        }
        let types = match there.hashed_as(&self.agent.spec.name, &target_name, published) {
            Ok(types) => types,
            // A column that the publisher has added comes with the next change of a row.
            Err(error) => return not_compared(error.to_string()),
        };
        let mut table = Table::new(published, target_name, &there, types);
        let bytes = published.bytes;
        self.tell(Told::Comparing { table: name.clone(), bytes }).await;
        if let Err(why) = self.can_be_read(source, session, &mut table).await? {
            return not_compared(why);
        }
        let (publisher, target) = table.digests(source, session, &DigestScope::Sums).await?;
        let (Digest::Sums(publisher), Digest::Sums(target)) = (publisher, target) else {
            return Err(Broken::Failed(other_digest()));
        };
        let differing = differing_parts(&publisher, &target);
        let counts = (rows(&publisher), rows(&target));
        let verdict = if differing.is_empty() {
            Verdict::Equal
        } else {
            let per_part = (counts.0.max(counts.1) / u64::from(PARTS)).max(1);
            let parts = usize::try_from(LISTED_ROWS / per_part).unwrap_or(1).max(1);
            let looked_at = &differing[..differing.len().min(parts)];
            let scope = DigestScope::Rows(looked_at.to_vec());
            let (publisher, target) = table.digests(source, session, &scope).await?;
            let (Digest::Rows(publisher), Digest::Rows(target)) = (publisher, target) else {
                return Err(Broken::Failed(other_digest()));
            };
            let mut found = compare(&publisher, &target, ROWS_MAX);
            found.all &= looked_at.len() == differing.len();
            Verdict::Differ(found)
        };
        let Table { target, key_columns: named_by, .. } = table;
        Ok(Compared { table: name, target, point, rows: counts, named_by, verdict })
    }

    /// Whether both sides let us read the table, and hash alike; else why not. Finds out how they
    /// hash, where that is not known yet: as they have texts, if their encodings are the same.
    async fn can_be_read(
        &mut self,
        source: &mut dyn SnapshotSession,
        session: &mut Session,
        table: &mut Table,
    ) -> Result<Result<(), String>, Broken> {
        let encoding = session.connection.parameter("server_encoding").unwrap_or_default();
        let hashing = self.hashing.clone();
        table.query.hashing = hashing.unwrap_or_else(|| Hashing::Encoded(encoding.to_owned()));
        let of_none = DigestScope::Rows(Vec::new());
        let mut publisher = source.digest(table.of(&of_none)).await;
        if matches!(publisher, Ok(None)) {
            table.query.hashing = Hashing::Utf8;
            publisher = source.digest(table.of(&of_none)).await;
        }
        self.hashing = Some(table.query.hashing.clone());
        let target = table.query.ask(&mut session.connection, &of_none).await;
        let target = target.map_err(|error| session.error(error));
        let refused = |error: ApplyError| match Broken::from(error).of_table() {
            Broken::Table(why) => Ok(Err(why)),
            other => Err(other),
        };
        let (publisher, target) = match (publisher, target) {
            (Err(error), _) => return refused(error.into()),
            (_, Err(error)) => return refused(error),
            (Ok(publisher), Ok(target)) => (publisher, target),
        };
        let constant = |digest: Option<&Digest>| match digest {
            Some(Digest::Rows(rows)) => rows.first().map(|row: &HashedRow| row.hash),
            Some(Digest::Sums(_)) | None => None,
        };
        if constant(publisher.as_ref()) != constant(Some(&target)) {
            return Err(Broken::Failed(ApplyError::Setup(format!(
                "subscription \"{}\": publisher and target hash the same text in other ways \
                 (processors of another byte order): nothing can be compared",
                self.agent.spec.name
            ))));
        }
        Ok(Ok(()))
    }
}

impl Table {
    fn new(
        published: &PublishedTable,
        target: TableName,
        there: &TargetTable,
        types: Vec<Option<HashedAs>>,
    ) -> Table {
        let columns: Vec<&str> =
            published.columns.iter().map(|column| column.name.as_str()).collect();
        let keys = there.columns.iter().filter(|column| column.primary_key);
        let keys: Vec<&str> = keys.map(|column| column.name.as_str()).collect();
        let at = |key: &&str| columns.iter().position(|column| column == key);
        // A part of a key is none.
        let key: Option<Vec<usize>> = keys.iter().map(at).collect();
        let key = key.unwrap_or_default();
        Table {
            key_columns: key.iter().map(|at| columns[*at].to_owned()).collect(),
            query: DigestQuery {
                from: rows_of_its_own(&target, there.partitioned),
                values: columns.iter().map(|column| quote_identifier(column)).collect(),
                key,
                hashing: Hashing::Utf8,
            },
            published: published.clone(),
            target,
            types,
        }
    }

    fn of<'a>(&'a self, scope: &'a DigestScope) -> DigestOf<'a> {
        DigestOf {
            table: &self.published,
            types: &self.types,
            key_columns: &self.key_columns,
            scope,
            hashing: &self.query.hashing,
        }
    }

    /// Both sides' hashes, which they compute side by side.
    async fn digests(
        &self,
        source: &mut dyn SnapshotSession,
        session: &mut Session,
        scope: &DigestScope,
    ) -> Result<(Digest, Digest), Broken> {
        let publisher = async {
            let digest = source.digest(self.of(scope)).await;
            digest.map_err(|error| Broken::from(error).of_table())
        };
        let target = async {
            let digest = self.query.ask(&mut session.connection, scope).await;
            digest.map_err(|error| Broken::from(session.error(error)).of_table())
        };
        let (publisher, target) = tokio::try_join!(publisher, target)?;
        let publisher = publisher.ok_or_else(|| Broken::Failed(other_digest()))?;
        Ok((publisher, target))
    }
}

fn other_digest() -> ApplyError {
    ApplyError::Setup(
        "the publisher's site has answered with other hashes than were asked for".to_owned(),
    )
}

/// The tables that are on the target and that we may read, by their names there.
async fn readable(
    session: &mut Session,
    spec: &SubscriptionSpec,
    tables: &[TableName],
) -> Result<HashSet<String>, Broken> {
    let names: Vec<TableName> = tables.iter().map(|table| spec.schema.names.table(table)).collect();
    let asked = session
        .query(
            "SELECT name FROM unnest($1::text::text[]) AS t (name) \
             WHERE pg_catalog.has_table_privilege(pg_catalog.to_regclass(name)::oid, 'SELECT')",
            &[Some(&target_names(&names))],
        )
        .await;
    let rows = asked.map_err(|error| Broken::from(error).before())?;
    Ok(rows.iter().filter_map(|row| row.get(0)).map(str::to_owned).collect())
}

/// Lets the stream go on to `point`, and takes a snapshot of the target there, in which the tables
/// that are `readable` stay as they are.
async fn target_at(
    spec: &SubscriptionSpec,
    resting: Resting<'_>,
    point: Lsn,
    mut session: Session,
    readable: HashSet<String>,
) -> Result<Target, Broken> {
    let Ok(at_point) = timeout(POINT_WITHIN, resting.go_to(point)).await else {
        return Err(Broken::Again(format!(
            "the subscription has not come as far as the publisher's snapshot ({point}) within \
             {POINT_WITHIN:?}"
        )));
    };
    let at_point = at_point.map_err(|_| {
        Broken::Again("the subscription has begun anew before it came to the point".to_owned())
    })?;
    // The lock comes first: what is emptied or rewritten after a snapshot looks empty in it
    // (PostgreSQL docs: "13.6. Caveats").
    let names: Vec<&str> = readable.iter().map(String::as_str).collect();
    let lock = match names.is_empty() {
        true => String::new(),
        false => format!("; LOCK TABLE {} IN ACCESS SHARE MODE", names.join(", ")),
    };
    let begin = format!(
        "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {SETTINGS}; \
         SET LOCAL lock_timeout = '{}s'{lock}; SET LOCAL lock_timeout = '{}s'",
        LOCKED_BRIEFLY.as_secs(),
        LOCKED_MAX.as_secs()
    );
    let looking = async {
        if let Err(error) = session.connection.simple_query(&begin).await {
            if error.server_error().is_some_and(is_of_a_lock) {
                return Err(Broken::Again(
                    "somebody has a table of the target for himself".to_owned(),
                ));
            }
            return Err(session.error(error).into());
        }
        let known = session.load_tables(&spec.name).await?;
        let progress = session.load_progress(&spec.name).await?;
        Ok((session, known, progress.map_or(Lsn::ZERO, |progress| progress.applied)))
    };
    let Ok(looked) = timeout(TARGET_WITHIN, looking).await else {
        return Err(Broken::Again(format!(
            "the target has not answered within {TARGET_WITHIN:?}, and the subscription is not held \
             up for longer"
        )));
    };
    let (session, known, applied) = looked?;
    if applied != at_point.applied {
        return Err(Broken::Again(format!(
            "the target says that {applied} is applied, and it is {}",
            at_point.applied
        )));
    }
    drop(at_point);
    Ok(Target { session, known, held: readable })
}

/// Why a table cannot be compared now, as far as its copy goes.
fn why_not(known: &[TableProgress], table: &PublishedTable, point: Lsn) -> Option<String> {
    let Some(known) = known.iter().find(|known| known.table == table.table) else {
        return Some("it is not copied yet".to_owned());
    };
    if !known.copied || known.asked_for {
        return Some("its copy is under way".to_owned());
    }
    if !known.is_still(table) {
        return Some("it is published otherwise by now, and not copied yet".to_owned());
    }
    // It stands ahead of the others.
    (known.copied_at > point).then(|| "it has been copied just now".to_owned())
}

/// Until somebody has waited for long for what is read, on either side.
async fn in_the_way(
    watched: &mut dyn SnapshotSession,
    tables: &[u32],
    watcher: &mut Session,
    reader: i32,
) -> Broken {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        match watched.is_in_the_way(tables).await {
            Ok(false) => {}
            Ok(true) => {
                return Broken::Again(
                    "a command on the publisher needs a table for itself (TRUNCATE, DDL), and is \
                     given way to"
                        .to_owned(),
                );
            }
            Err(error) => return error.into(),
        }
        let waiting = format!(
            "SELECT pg_catalog.count(*) FROM pg_catalog.pg_locks l WHERE NOT l.granted \
             AND l.waitstart < pg_catalog.clock_timestamp() - interval '{} seconds' \
             AND {reader} = ANY (pg_catalog.pg_blocking_pids(l.pid))",
            WAITED_LONG.as_secs()
        );
        match watcher.query(&waiting, &[]).await {
            Ok(rows) if rows.first().and_then(|row| row.get(0)) == Some("0") => {}
            Ok(_) => {
                return Broken::Again(
                    "somebody on the target waits for what is read, and is given way to".to_owned(),
                );
            }
            Err(error) => return error.into(),
        }
    }
}

fn application_name(spec: &SubscriptionSpec) -> String {
    format!("{} validate", spec.application_name())
}

impl Compared {
    /// For a person: one line, and one for each row that is named.
    pub fn lines(&self) -> Vec<String> {
        let Compared { table, rows: (publisher, target), named_by, verdict, .. } = self;
        match verdict {
            Verdict::Equal => vec![format!("{table}: equal, {publisher} rows")],
            Verdict::NotCompared(why) => vec![format!("{table}: not compared: {why}")],
            Verdict::Differ(found) => {
                let Differences { missing, extra, other, named, all } = found;
                let at_least = if *all { "" } else { "at least " };
                let counts = match missing + extra + other {
                    // The listed rows are alike: those behind them are not.
                    0 => "in rows that were not looked at one by one".to_owned(),
                    _ => format!(
                        "{at_least}missing on the target {missing}, only there {extra}, with other \
                         values {other}"
                    ),
                };
                let mut lines = vec![format!(
                    "{table}: DIFFERS: {counts} (rows on the publisher: {publisher}, on the target: \
                     {target})"
                )];
                let columns = match named_by.is_empty() {
                    true => "row".to_owned(),
                    false => {
                        named_by.iter().map(|n| quote_identifier(n)).collect::<Vec<_>>().join(", ")
                    }
                };
                for (what, name) in named {
                    let what = match what {
                        Difference::Missing => "missing on the target",
                        Difference::Extra => "only on the target",
                        Difference::Other => "other values",
                    };
                    lines.push(format!("  {what}: ({columns}) = ({name})"));
                }
                lines
            }
        }
    }
}

/// How tables that differ are made equal.
pub fn copy_anew(subscription: &str, table: &TableName) -> String {
    remedy::resync(subscription, Some(table))
}
