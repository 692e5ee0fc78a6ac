//! Whether a target's tables have the rows that the publisher's have, while both are at work.
//!
//! Both sides are read as they were at the same position of the publisher's log: its snapshot tells
//! which, and the stream rests there for the moment that a snapshot of the target takes
//! ([`crate::halts`]). Then each side hashes its own rows, and the hashes are compared; rows do not
//! travel. Tables that differ are looked at again in the same snapshots, a few parts of them row by
//! row.
//!
//! A snapshot keeps the publisher from removing dead rows, and who needs a table for himself waiting.
//! So there is a new one from time to time, and what is in somebody's way is broken off.

mod differences;

use crate::ApplyError;
use crate::halts::NotHalted;
use crate::postgres::initial_copy::GIVE_WAY_FOR;
use crate::postgres::progress::TableProgress;
use crate::postgres::session::Session;
use crate::postgres::target_table::{rows_of_its_own, target_table};
use crate::remedy;
use crate::subscription::{Subscription, SubscriptionSpec};
pub use differences::{Difference, Differences};
use differences::{compare, differing_parts, rows};
use farshore_capture::publication::{PublishedTable, TableName};
use farshore_capture::snapshot::{CopyFormat, CopyPlan, DigestQuery, PARTS, ROWS_MAX, SETTINGS};
use farshore_capture::source::{
    Digest, DigestOf, DigestScope, Hashing, Snapshot, SnapshotSession, WAITED_LONG,
};
use farshore_model::{Lsn, quote_identifier};
use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// How long the stream is waited for: it may be about to begin, or in the middle of a large
/// transaction.
const RESTS_WITHIN: Duration = Duration::from_secs(30);

/// The stream rests no longer than this until the publisher has made a snapshot: transactions that
/// are open there may keep it from that.
const SNAPSHOT_WITHIN: Duration = Duration::from_secs(10);

/// How long the stream may take until it is where the snapshot is.
const POINT_WITHIN: Duration = Duration::from_secs(120);

/// No table is begun in a snapshot that is older.
const SNAPSHOT_FOR: Duration = Duration::from_secs(60);

/// How often it is looked whether somebody waits for a table that is read.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// How long a table of the target is waited for that somebody has for himself: all the while
/// snapshots are held.
const LOCKED_MAX: Duration = Duration::from_secs(20);

/// How often in a row a table is tried.
const TRIES: u32 = 5;

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
    /// There are no snapshots at one position yet: tried again, no table is the cause.
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

impl Subscription {
    /// Compares the tables of this subscription, or those of them that are `wanted` (names on the
    /// publisher), and tells of each. The subscription must be streaming, here and now.
    ///
    /// # Errors
    /// A table that is not published; the publisher's and the target's, where trying again does not
    /// help. That tables differ is no error.
    pub async fn validate(
        &self,
        wanted: &[TableName],
        tell: &mpsc::Sender<Told>,
    ) -> Result<(), ApplyError> {
        let published = self.source.published_tables().await?;
        if let Some(unknown) =
            wanted.iter().find(|name| !published.iter().any(|table| table.table == **name))
        {
            let names: Vec<String> = published.iter().map(|t| t.table.to_string()).collect();
            return Err(ApplyError::Setup(format!(
                "subscription \"{}\": {unknown} is not a published table (published are: {})",
                self.spec.name,
                names.join(", ")
            )));
        }
        let mut left: VecDeque<TableName> = published
            .into_iter()
            .map(|table| table.table)
            .filter(|name| wanted.is_empty() || wanted.contains(name))
            .collect();
        let mut validation =
            Validation { agent: self, tell, hashing: Hashing::Encoded(String::new()) };
        let (mut tries, mut tried) = (0, None);
        while !left.is_empty() {
            let broken = validation.with_snapshot(&mut left).await;
            // Tables that were compared meanwhile do not count.
            tries = if tried.as_ref() == left.front() { tries } else { 0 };
            let Some(first) = left.front().cloned() else { break };
            tried = Some(first.clone());
            let why = match broken {
                Ok(()) => continue,
                Err(Broken::Failed(error)) => return Err(error),
                Err(Broken::Before(why)) if tries + 1 >= TRIES => {
                    return Err(ApplyError::NotYet(format!(
                        "subscription \"{}\": not compared: {why}",
                        self.spec.name
                    )));
                }
                Err(Broken::Again(why)) if tries + 1 >= TRIES => Err(why),
                Err(Broken::Table(why)) => Err(why),
                Err(Broken::Before(why) | Broken::Again(why)) => Ok(why),
            };
            match why {
                Ok(why) => {
                    tries += 1;
                    validation.tell(Told::Waits(format!("{why}. Trying again"))).await;
                    tokio::time::sleep(GIVE_WAY_FOR * tries).await;
                }
                Err(why) => {
                    left.pop_front();
                    validation.tell(Told::Compared(self.not_compared(first, why))).await;
                }
            }
        }
        Ok(())
    }

    /// Says that nothing rests between two transactions, and what is done instead.
    fn streams_not(&self) -> ApplyError {
        let status = self.lock_status();
        let why =
            status.error.as_ref().or(status.copy_waits.as_ref()).or(status.waits_for.as_ref());
        ApplyError::NotYet(format!(
            "subscription \"{}\": tables are compared where it rests between two transactions, and \
             it does not come to that now (it is {}{}): try again once it streams",
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
    /// How texts are hashed on both sides.
    hashing: Hashing,
}

/// Both sides as they were at one position.
struct Sides {
    point: Lsn,
    snapshot: Box<dyn Snapshot>,
    published: Vec<PublishedTable>,
    /// Reads the publisher's tables.
    source: Box<dyn SnapshotSession>,
    /// Reads the target's.
    target: Session,
    known: Vec<TableProgress>,
}

impl Validation<'_> {
    async fn tell(&self, told: Told) {
        // Whoever is told nothing any more drops us.
        let _ = self.tell.send(told).await;
    }

    /// Compares tables from the front of `left` on in one snapshot, and takes those off.
    async fn with_snapshot(&mut self, left: &mut VecDeque<TableName>) -> Result<(), Broken> {
        let sides = self.both_sides(left).await.map_err(|broken| match broken {
            Broken::Again(why) => Broken::Before(why),
            other => other,
        });
        let mut sides = sides?;
        let held: Vec<u32> = sides
            .published
            .iter()
            .filter(|table| left.contains(&table.table))
            .map(|table| table.oid)
            .collect();
        let mut watched = sides.snapshot.open().await?;
        let watch_name = format!("{} looks for locks", application_name(&self.agent.spec));
        let mut watcher = Session::connect(&self.agent.spec.target, &watch_name).await?;
        let reader = sides.target.connection.backend_pid();
        self.tell(Told::Begins { tables: left.len(), point: sides.point }).await;
        let begun = Instant::now();
        let compared = tokio::select! {
            compared = self.compare_all(&mut sides, left, begun) => compared,
            why = in_the_way(watched.as_mut(), &held, &mut watcher, reader) => Err(why),
        };
        watcher.connection.close().await;
        watched.close().await;
        let Sides { snapshot, source, target, .. } = sides;
        target.connection.close().await;
        source.close().await;
        snapshot.close().await;
        compared
    }

    async fn compare_all(
        &mut self,
        sides: &mut Sides,
        left: &mut VecDeque<TableName>,
        begun: Instant,
    ) -> Result<(), Broken> {
        while let Some(name) = left.front()
            && begun.elapsed() < SNAPSHOT_FOR
        {
            let compared = self.compare(sides, name).await?;
            left.pop_front();
            self.tell(Told::Compared(compared)).await;
        }
        Ok(())
    }

    /// Snapshots of both sides at the same position.
    async fn both_sides(&self, left: &VecDeque<TableName>) -> Result<Sides, Broken> {
        let Subscription { spec, source, .. } = self.agent;
        let name = application_name(spec);
        let mut target = Session::connect(&spec.target, &name).await?;
        let published = source.published_tables().await?;
        let followed: Vec<u32> = published
            .iter()
            .filter(|table| !left.contains(&table.table))
            .map(|table| table.oid)
            .collect();
        let resting = self.agent.halts.ask(RESTS_WITHIN).await.map_err(|why| match why {
            NotHalted::Ended => Broken::Again(self.agent.streams_not().to_string()),
            NotHalted::NotInTime => Broken::Failed(self.agent.streams_not()),
        })?;
        let waits = Mutex::new(None);
        let keep = |why: Option<String>| {
            *waits.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = why;
        };
        let reader = format!("{}_validate", spec.name);
        let exported = source.export_telling(&reader, &followed, &keep);
        let Ok(exported) = tokio::time::timeout(SNAPSHOT_WITHIN, exported).await else {
            let why = waits.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
            let why = why.unwrap_or_else(|| {
                "its slot waits for every transaction that was open there".to_owned()
            });
            return Err(Broken::Again(format!(
                "the publisher has made no snapshot within {SNAPSHOT_WITHIN:?}, and the subscription \
                 is not held up for longer: {why}"
            )));
        };
        let snapshot = exported?;
        let point = snapshot.consistent_point();
        let Ok(at_point) = tokio::time::timeout(POINT_WITHIN, resting.go_to(point)).await else {
            return Err(Broken::Again(format!(
                "the subscription has not come as far as the publisher's snapshot ({point}) within \
                 {POINT_WITHIN:?}"
            )));
        };
        let at_point = at_point.map_err(|_| Broken::Again(self.agent.streams_not().to_string()))?;
        // The first query takes the snapshot.
        let begin = format!(
            "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; {SETTINGS}; \
             SET LOCAL lock_timeout = '{}s'",
            LOCKED_MAX.as_secs()
        );
        target.simple(&begin).await?;
        let known = target.load_tables(&spec.name).await?;
        let progress = target.load_progress(&spec.name).await?;
        let applied = progress.map_or(Lsn::ZERO, |progress| progress.applied);
        if applied != at_point.applied {
            return Err(Broken::Again(format!(
                "the target says that {applied} is applied, and it is {}",
                at_point.applied
            )));
        }
        drop(at_point);
        let mut source = snapshot.open().await?;
        let published = source.tables().await?;
        Ok(Sides { point, snapshot, published, source, target, known })
    }

    /// Compares one table.
    async fn compare(&mut self, sides: &mut Sides, name: &TableName) -> Result<Compared, Broken> {
        let agent = self.agent;
        let Some(table) = sides.published.iter().find(|table| table.table == *name).cloned() else {
            return Ok(agent.not_compared(name.clone(), "it is not published any more".to_owned()));
        };
        self.tell(Told::Comparing { table: name.clone(), bytes: table.bytes }).await;
        if let Some(why) = why_not(&sides.known, &table, sides.point) {
            return Ok(agent.not_compared(name.clone(), why));
        }
        let target_name = agent.spec.schema.names.table(name);
        let Some(target) = target_table(&mut sides.target, &target_name).await? else {
            let why = format!("{target_name} is not on the target");
            return Ok(agent.not_compared(name.clone(), why));
        };
        let casts = match target.casts(&agent.spec.name, &target_name, &table) {
            Ok(casts) => casts,
            // A column that the publisher has added comes with the next change of a row.
            Err(error) => return Ok(agent.not_compared(name.clone(), error.to_string())),
        };
        let plan = CopyPlan { format: CopyFormat::Text, casts };
        let columns: Vec<&str> = table.columns.iter().map(|column| column.name.as_str()).collect();
        let keys = target.columns.iter().filter(|column| column.primary_key);
        let keys: Vec<&str> = keys.map(|column| column.name.as_str()).collect();
        let is_keyed = !keys.is_empty() && keys.iter().all(|key| columns.contains(key));
        let keys = if is_keyed { keys } else { Vec::new() };
        let key_columns: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
        let at = |key: &&str| columns.iter().position(|column| column == key);
        let mut query = DigestQuery {
            from: rows_of_its_own(&target_name, target.partitioned),
            values: columns.iter().map(|column| quote_identifier(column)).collect(),
            key: keys.iter().filter_map(at).collect(),
            hashing: self.hashing.clone(),
        };
        self.choose_hashing(sides, (&table, &plan)).await?;
        query.hashing = self.hashing.clone();
        let of = |scope| DigestOf {
            table: &table,
            plan: &plan,
            key_columns: &key_columns,
            scope,
            hashing: &self.hashing,
        };
        let (publisher, target) = digests(sides, &query, of(&DigestScope::Sums)).await?;
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
            let (publisher, target) = digests(sides, &query, of(&scope)).await?;
            let (Digest::Rows(publisher), Digest::Rows(target)) = (publisher, target) else {
                return Err(Broken::Failed(other_digest()));
            };
            let mut found = compare(&publisher, &target, ROWS_MAX);
            found.all &= looked_at.len() == differing.len();
            Verdict::Differ(found)
        };
        let named_by = if is_keyed { key_columns } else { Vec::new() };
        let (table, target, point) = (name.clone(), target_name, sides.point);
        Ok(Compared { table, target, point, rows: counts, named_by, verdict })
    }

    /// Hashes are of texts as both servers have them, where their encodings are the same.
    async fn choose_hashing(
        &mut self,
        sides: &mut Sides,
        (table, plan): (&PublishedTable, &CopyPlan),
    ) -> Result<(), Broken> {
        let encoding = sides.target.connection.parameter("server_encoding").unwrap_or_default();
        if self.hashing != Hashing::Encoded(String::new()) {
            return Ok(());
        }
        let hashing = Hashing::Encoded(encoding.to_owned());
        // Of no part.
        let scope = DigestScope::Rows(Vec::new());
        let wanted = DigestOf { table, plan, key_columns: &[], scope: &scope, hashing: &hashing };
        let is_alike = sides.source.digest(wanted).await?.is_some();
        self.hashing = if is_alike { hashing } else { Hashing::Utf8 };
        Ok(())
    }
}

/// Both sides' hashes, which they compute side by side.
async fn digests(
    sides: &mut Sides,
    query: &DigestQuery,
    wanted: DigestOf<'_>,
) -> Result<(Digest, Digest), Broken> {
    let Sides { source, target, .. } = sides;
    // Whatever was wrong with one table, both transactions are over.
    let of_table = |error: ApplyError| match Broken::from(error) {
        Broken::Failed(error) => Broken::Table(error.to_string()),
        other => other,
    };
    let publisher = async { source.digest(wanted).await.map_err(|error| of_table(error.into())) };
    let answered = async {
        let digest = query.ask(&mut target.connection, wanted.scope).await;
        digest.map_err(|error| of_table(target.error(error)))
    };
    let (publisher, target) = tokio::try_join!(publisher, answered)?;
    let publisher = publisher.ok_or_else(|| Broken::Failed(other_digest()))?;
    Ok((publisher, target))
}

fn other_digest() -> ApplyError {
    ApplyError::Setup(
        "the publisher's site has answered with other hashes than were asked for".to_owned(),
    )
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
                    "a command on the target needs a table for itself, and is given way to"
                        .to_owned(),
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
                let mut lines = vec![format!(
                    "{table}: DIFFERS: {at_least}{missing} rows missing on the target, {extra} only \
                     there, {other} with other values ({publisher} rows on the publisher, {target} \
                     on the target)"
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
